//! The program's own signal handlers touch evicted pages, in threads that are evicting, loading or faulting at that moment:
//! no thread deadlocks with itself.

mod common;

use common::page_of;
use pagefold_tier::region::{ColdRegion, RegionError};
use pagefold_tier::{BackingFile, Config, Effort, Tier};
use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const PAGE: usize = 4096;
const PAGES: usize = 1500;

static BASE: AtomicUsize = AtomicUsize::new(0);
static STATE: AtomicU64 = AtomicU64::new(1);
static SIGNALS: AtomicU64 = AtomicU64::new(0);
static WRONG: AtomicU64 = AtomicU64::new(0);

/// Mostly noise: more than the tier holds in memory, so that some pages are in its file.
fn content(page: usize) -> [u8; PAGE] {
    page_of(if page.is_multiple_of(4) { page * 8 + 2 } else { page * 8 + 1 } as u16)
}

/// The first and last byte of each page, which the handler compares.
static EXPECTED: std::sync::OnceLock<Vec<(u8, u8)>> = std::sync::OnceLock::new();

extern "C" fn touch(_: i32) {
    let state = STATE.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
    let page = (state.wrapping_mul(6364136223846793005) >> 33) as usize % PAGES;
    let address = (BASE.load(Ordering::Relaxed) + page * PAGE) as *const u8;
    // SAFETY: the page lies in the region, which is dropped after the last signal.
    let found = unsafe { (address.read_volatile(), address.add(PAGE - 1).read_volatile()) };
    if EXPECTED.get().is_some_and(|all| all[page] != found) {
        WRONG.fetch_add(1, Ordering::Relaxed);
    }
    SIGNALS.fetch_add(1, Ordering::Relaxed);
}

/// Counts a thread as ended, also after a panic.
struct Ends<'a>(&'a AtomicUsize);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn a_signal_handler_may_touch_evicted_pages_at_any_moment() {
    let backing = BackingFile::create(&std::env::temp_dir(), 64 << 20).unwrap();
    let config = Config { bytes_max: 4 << 20, recompress_ticks: 0, workers: 2, ..Config::default() };
    let tier = Tier::create(config, Some(Box::new(backing))).unwrap();
    let mut region = match ColdRegion::new(tier, PAGES * PAGE) {
        Ok(region) => region,
        Err(error @ RegionError::Userfaultfd(_)) => {
            let _ = writeln!(std::io::stderr(), "SKIPPED: {error}");
            return;
        }
        Err(error) => panic!("{error}"),
    };
    for page in 0..PAGES {
        region[page * PAGE..][..PAGE].copy_from_slice(&content(page));
    }
    EXPECTED.get_or_init(|| (0..PAGES).map(|page| (content(page)[0], content(page)[PAGE - 1])).collect());
    BASE.store(region.as_ptr() as usize, Ordering::Relaxed);
    // SAFETY: the handler has the required signature; it reads memory and changes atomics only.
    unsafe { libc::signal(libc::SIGUSR1, touch as *const () as usize) };
    let stop = AtomicBool::new(false);
    let ended = AtomicUsize::new(0);
    let threads = std::sync::Mutex::new(Vec::new());
    // SAFETY: the call takes no arguments.
    let enter = || threads.lock().unwrap().push(unsafe { libc::pthread_self() } as usize);
    std::thread::scope(|scope| {
        // Kept, because a signal can be sent only to a thread that is not joined yet.
        let mut handles = Vec::new();
        for number in 0..2 {
            let (region, stop, ended, enter) = (&region, &stop, &ended, &enter);
            let parker = region.parker();
            handles.push(scope.spawn(move || {
                let _ends = Ends(ended);
                enter();
                for round in number.. {
                    match round % 8 {
                        0 => drop(parker.unpark(0..PAGES * PAGE)),
                        1 | 5 => drop(parker.park_idle(1)),
                        2 => drop(parker.tier_stats()),
                        3 => drop(parker.pin(0..64 * PAGE)),
                        n => drop(parker.park(0..PAGES * PAGE, if n == 4 { Effort::Dense } else { Effort::Fast })),
                    }
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                }
            }));
            handles.push(scope.spawn(move || {
                let _ends = Ends(ended);
                enter();
                let mut page = number * 7;
                while !stop.load(Ordering::Relaxed) {
                    page = (page + 37) % PAGES;
                    assert!(region[page * PAGE..][..PAGE] == content(page), "page {page}");
                }
            }));
        }
        let are_enough = || SIGNALS.load(Ordering::Relaxed) >= 1000 && region.stats().faults > 1000;
        // Signals until there were enough, and until all threads have ended: none may hang with signals or without.
        let end = Instant::now() + Duration::from_secs(3);
        let given_up = Instant::now() + Duration::from_secs(100);
        while ended.load(Ordering::Relaxed) < 4 {
            if Instant::now() < end || !are_enough() {
                // SAFETY: the threads are not joined yet.
                threads.lock().unwrap().iter().for_each(|one| unsafe {
                    libc::pthread_kill(*one as libc::pthread_t, libc::SIGUSR1);
                });
            } else {
                stop.store(true, Ordering::Relaxed);
            }
            std::thread::sleep(Duration::from_micros(100));
            if Instant::now() > given_up {
                let _ = writeln!(std::io::stderr(), "threads hang: {:?}", region.stats());
                std::process::abort();
            }
        }
        handles.into_iter().for_each(|handle| handle.join().unwrap());
    });
    let stats = region.stats();
    assert_eq!(WRONG.load(Ordering::Relaxed), 0, "a handler read other bytes");
    assert!(stats.pages_unreadable == 0, "{stats:?}");
    assert!(region.tier_stats().loads_from_disk > 0, "{:?}", region.tier_stats());
    eprintln!("{} signals, {stats:?}", SIGNALS.load(Ordering::Relaxed));
}
