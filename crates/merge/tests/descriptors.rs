//! Where the process has no descriptors left: the limit is the whole process's, so this stands alone.

use pagefold_merge::sim::{Machine, Options};
use pagefold_merge::{Config, Domain};
use pagefold_pool::Key;

/// Lets the process have `most` descriptors; returns how many it might have had.
fn limit_descriptors(most: u64) -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: both calls only look at or fill what they are given.
    unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit), 0);
        let before = std::mem::replace(&mut limit.rlim_cur, most);
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit), 0);
        before
    }
}

#[test]
fn no_descriptors_are_no_full_pool() {
    let config = Config { period_ns: 1000, ..Config::default() };
    let domain = Domain::with_key(config, Key::from_seed(5)).unwrap();
    let machine = Machine::new(5, Options { interference: 0, ..Options::default() });
    for _ in 0..2 {
        let process = machine.spawn();
        // Each content stands there twice.
        let range = process.map(100);
        (0..100).for_each(|page| process.write(range.start + page * 4096, 2 + page as u32 / 2 * 2));
        domain.add(Box::new(process.client()));
    }
    let mut now_ns = 0;
    let mut periods = |count| {
        for _ in 0..count {
            now_ns += 1000;
            while domain.step_any(now_ns, None, &mut Vec::new()).is_some() {}
        }
        domain.stats()
    };
    let before = limit_descriptors(0);
    let events = periods(8).events;
    limit_descriptors(before);
    assert_eq!(events.pool_full_pages, 0);
    // All but the first that was seen of each content, be they a content's first here or not.
    assert_eq!(events.segment_alloc_failed_pages, 150, "{events:?}");
    // They are looked up later on.
    assert_eq!(periods(150).pages_sharing, 200);
}
