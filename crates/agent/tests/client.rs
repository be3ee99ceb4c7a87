//! A program that opts in by code, without a daemon.
#![cfg(all(not(feature = "preload"), not(loom)))]

use pagefold_agent::client::{Client, Region};
use pagefold_os::{PAGE_SIZE, mem, memfd};
use std::fs;
use std::time::{Duration, Instant};

fn limit_descriptors(change: impl Fn(&mut libc::rlimit)) -> libc::rlimit {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the structure lives across the calls.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) }, 0);
    let before = limit;
    change(&mut limit);
    // SAFETY: the structure lives across the call.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0);
    before
}

/// Waits until the agent's thread sleeps. It has the thread-local storage of the test's thread, and AddressSanitizer finds
/// no stack for it while it begins if that thread has ended by then.
fn wait_for_the_agent() {
    let sleeps = |thread: &fs::DirEntry| {
        let of = |file: &str| fs::read_to_string(thread.path().join(file)).unwrap_or_default();
        of("comm").starts_with("pagefold-agent") && of("stat").contains(") S ")
    };
    let deadline = Instant::now() + Duration::from_secs(60);
    while !fs::read_dir("/proc/self/task").expect("threads").flatten().any(|thread| sleeps(&thread)) {
        assert!(Instant::now() < deadline, "the agent's thread does not begin");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_discarded_region_reads_zero_without_descriptors() {
    let client = Client::connect("/nonexistent/pagefold".as_ref(), "test").expect("a client");
    wait_for_the_agent();
    let mut region = Region::new(&client, 4 * PAGE_SIZE).expect("a region");
    region.fill(1);
    // As the agent maps a slot.
    let pool = memfd::create(c"pagefold-pool", PAGE_SIZE as u64).expect("a file");
    assert_eq!(pool.write(&[7; PAGE_SIZE]), Ok(PAGE_SIZE));
    let (addr, prot) = (region.as_ptr() as u64 + PAGE_SIZE as u64, libc::PROT_READ | libc::PROT_WRITE);
    // SAFETY: a page of the region, to which no reference exists now.
    unsafe { mem::map(addr, PAGE_SIZE as u64, prot, libc::MAP_PRIVATE | libc::MAP_FIXED, pool.raw(), 0) }
        .expect("a mapping");
    assert_eq!(region[PAGE_SIZE], 7);
    let before = limit_descriptors(|limit| limit.rlim_cur = 0);
    region.discard(0, 2);
    limit_descriptors(|limit| *limit = before);
    assert!(region[..2 * PAGE_SIZE].iter().all(|&byte| byte == 0), "discarded pages show old bytes");
    assert!(region[2 * PAGE_SIZE..].iter().all(|&byte| byte == 1));
    region[..2 * PAGE_SIZE].fill(2);
    region.discard(1, 3);
    assert!(region[PAGE_SIZE..].iter().all(|&byte| byte == 0));
}
