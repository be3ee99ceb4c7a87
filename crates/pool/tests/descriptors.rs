//! Where the process has few descriptors: the limit is the whole process's, so this stands alone.

#![cfg(not(loom))]

use pagefold_os::fd::Fd;
use pagefold_os::{PAGE_SIZE, fd};
use pagefold_pool::{Pool, PublishError, SLOTS_PER_SEGMENT};

/// A client still connects to a daemon after its pools have taken every descriptor they may.
#[test]
fn pools_leave_descriptors_to_others() {
    let limit = libc::rlimit { rlim_cur: 80, rlim_max: 80 };
    // SAFETY: the call only looks at what it is given.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
    assert_eq!(fd::limit(), Ok(80));
    let pools = [1, 2].map(|number| Pool::new(&number.to_string(), 1 << 40));
    let page = [7; PAGE_SIZE];
    let pages = [&page; SLOTS_PER_SEGMENT as usize];
    let mut full = 0;
    for pool in pools.iter().cycle() {
        match pool.publish(&pages) {
            Ok(published) => assert_eq!(published.taken, pages.len()),
            Err(PublishError::System(error)) => {
                assert_eq!(error.raw_os_error(), Some(libc::EMFILE));
                full += 1;
            }
            Err(error) => panic!("{error}"),
        }
        if full == 2 {
            break;
        }
    }
    let segments: u64 = pools.iter().map(|pool| pool.stats().segments).sum();
    assert!(segments >= 40, "{segments}");
    let others: Vec<Fd> = (0..16).map_while(|_| Fd::open(c"/dev/null", libc::O_RDONLY, 0).ok()).collect();
    assert_eq!(others.len(), 16);
}
