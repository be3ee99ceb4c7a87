//! A region with its own tier: every byte reads as last written, whatever threads park, fault, pin or fork.

mod common;

use common::page_of;
use pagefold_tier::region::{ColdRegion, RegionError};
use pagefold_tier::{BackingFile, Config, Effort, Tier};
use proptest::prelude::*;
use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const PAGE: usize = 4096;

/// Locked for writing by the test that creates the maximum of regions.
static MANY: std::sync::RwLock<()> = std::sync::RwLock::new(());

/// A region with a small tier and a file; `None`, with a message, without userfaultfd.
fn region(pages: usize) -> Option<ColdRegion> {
    let backing = BackingFile::create(&std::env::temp_dir(), 64 << 20).unwrap();
    let config = Config { bytes_max: 4 << 20, recompress_ticks: 0, workers: 2, ..Config::default() };
    let tier = Tier::create(config, Some(Box::new(backing))).unwrap();
    // Another test may create the maximum of regions.
    let _one = MANY.read().unwrap_or_else(std::sync::PoisonError::into_inner);
    match ColdRegion::new(tier, pages * PAGE) {
        Ok(region) => Some(region),
        Err(error @ RegionError::Userfaultfd(_)) => {
            let _ = writeln!(std::io::stderr(), "SKIPPED: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Starts a prefetcher for a region; its thread ends with the region.
fn spawn_prefetcher(region: &ColdRegion) -> std::thread::JoinHandle<()> {
    let prefetcher = region.prefetcher();
    std::thread::spawn(move || prefetcher.run())
}

/// Ends the other threads when dropped, also after a failed assertion.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[derive(Clone, Debug)]
enum Step {
    Write { at: usize, len: usize, value: u8 },
    Page { page: usize, content: u16 },
    Read { at: usize, len: usize },
    Park { at: usize, len: usize, dense: bool },
    Unpark { at: usize, len: usize },
    Pin { at: usize, len: usize },
    Unpin,
    Cool { silent: u8 },
    Discard { at: usize, len: usize },
}

/// More than the tier holds in memory if the pages are noise, and three chunks.
const PAGES: usize = 1300;

fn step() -> impl Strategy<Value = Step> {
    let at = 0..PAGES * PAGE;
    let range = || (0..PAGES * PAGE, prop_oneof![1..10_000_usize, 1..PAGES * PAGE]);
    prop_oneof![
        3 => (at.clone(), 1..9000_usize, any::<u8>()).prop_map(|(at, len, value)| Step::Write { at, len, value }),
        6 => (0..PAGES, any::<u16>()).prop_map(|(page, content)| Step::Page { page, content }),
        3 => (at, 1..9000_usize).prop_map(|(at, len)| Step::Read { at, len }),
        4 => (range(), any::<bool>()).prop_map(|((at, len), dense)| Step::Park { at, len, dense }),
        1 => range().prop_map(|(at, len)| Step::Unpark { at, len }),
        1 => range().prop_map(|(at, len)| Step::Pin { at, len: len.min(50_000) }),
        1 => Just(Step::Unpin),
        2 => (1..4_u8).prop_map(|silent| Step::Cool { silent }),
        1 => range().prop_map(|(at, len)| Step::Discard { at, len }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, max_shrink_iters: 200, ..ProptestConfig::default() })]

    #[test]
    fn a_region_is_memory(filled in any::<bool>(), helped in any::<bool>(), steps in proptest::collection::vec(step(), 1..60)) {
        let Some(mut region) = region(PAGES) else { return Ok(()) };
        let prefetcher = helped.then(|| spawn_prefetcher(&region));
        let mut model = vec![0_u8; PAGES * PAGE];
        if filled {
            for page in 0..PAGES {
                // Mostly noise: more than the tier holds in memory.
                let content = page_of(page as u16 * 8 + if page % 8 == 0 { 2 } else { 1 });
                region[page * PAGE..][..PAGE].copy_from_slice(&content);
                model[page * PAGE..][..PAGE].copy_from_slice(&content);
            }
        }
        let parker = region.parker();
        let mut pinned = Vec::new();
        for step in steps {
            let to = |at: usize, len: usize| at..(at + len).min(PAGES * PAGE);
            match step {
                Step::Write { at, len, value } => {
                    region[to(at, len)].fill(value);
                    model[to(at, len)].fill(value);
                }
                Step::Page { page, content } => {
                    region[page * PAGE..][..PAGE].copy_from_slice(&page_of(content));
                    model[page * PAGE..][..PAGE].copy_from_slice(&page_of(content));
                }
                Step::Read { at, len } => prop_assert!(region[to(at, len)] == model[to(at, len)]),
                Step::Park { at, len, dense } => {
                    let parked = parker.park(to(at, len), if dense { Effort::Dense } else { Effort::Fast });
                    prop_assert_eq!(parked.refused, 0, "the file has room");
                    // No other thread runs: only a kernel that splits or pins pages would make one busy.
                    prop_assert!(parked.busy <= parked.pages + parked.pinned, "{:?}", parked);
                }
                Step::Unpark { at, len } => {
                    parker.unpark(to(at, len)).unwrap();
                }
                Step::Pin { at, len } => pinned.push(region.pin(to(at, len)).unwrap()),
                Step::Unpin => drop(pinned.pop()),
                Step::Cool { silent } => {
                    parker.park_idle(silent);
                }
                Step::Discard { at, len } => {
                    region.discard(to(at, len));
                    model[to(at, len)].fill(0);
                }
            }
        }
        prop_assert!(region[..] == model[..]);
        drop(pinned);
        parker.unpark(0..PAGES * PAGE).unwrap();
        prop_assert_eq!((region.stats().pages_out, region.tier_stats().pages), (0, 0), "nothing is left in the tier");
        prop_assert!(region[..] == model[..]);
        drop(region);
        prefetcher.map_or(Ok(()), std::thread::JoinHandle::join).expect("the prefetcher's thread");
    }
}

#[test]
fn parked_pages_leave_memory_and_a_touch_loads_them() {
    let Some(mut region) = region(1024) else { return };
    for page in 0..1024 {
        region[page * PAGE..][..PAGE].copy_from_slice(&page_of(page as u16));
    }
    let resident = || {
        let mut here = vec![0_u8; 1024];
        // SAFETY: the kernel writes a byte for each page, and the vector has that many.
        assert_eq!(unsafe { libc::mincore(region.as_ptr().cast(), 1024 * PAGE, here.as_mut_ptr()) }, 0);
        here.iter().filter(|byte| **byte & 1 != 0).count()
    };
    assert_eq!(resident(), 1024);
    let parked = region.parker().park(0..1024 * PAGE, Effort::Dense);
    assert!(parked.pages >= 1000, "{parked:?}");
    assert_eq!((resident() as u64, region.stats().pages_out), (1024 - parked.pages, parked.pages));
    for page in (0..1024).rev() {
        assert!(region[page * PAGE..][..PAGE] == page_of(page as u16), "page {page}");
    }
    let stats = region.stats();
    assert_eq!((stats.pages_out, stats.pages_loaded), (0, parked.pages));
    // In descending order one by one; in ascending order in windows.
    assert_eq!(stats.faults, parked.pages);
    let parked = region.parker().park(0..1024 * PAGE, Effort::Fast);
    assert!((0..1024).all(|page| region[page * PAGE..][..PAGE] == page_of(page as u16)));
    assert!(region.stats().faults - stats.faults < parked.pages / 4, "{:?}", region.stats());
}

/// Two threads load the pages of a program that accesses them in order, and the second thread ends with the region.
#[test]
fn a_prefetcher_loads_some_of_the_pages() {
    let Some(mut region) = region(1024) else { return };
    for page in 0..1024 {
        region[page * PAGE..][..PAGE].copy_from_slice(&page_of(page as u16));
    }
    let prefetcher = spawn_prefetcher(&region);
    let end = Instant::now() + Duration::from_secs(120);
    // It may have been preempted in some of the passes, but not in all.
    while region.stats().pages_prefetched < 100 {
        assert!(Instant::now() < end, "{:?}", region.stats());
        let parked = region.parker().park(0..1024 * PAGE, Effort::Fast);
        assert!(parked.pages >= 1000, "{parked:?}");
        assert!((0..1024).all(|page| region[page * PAGE..][..PAGE] == page_of(page as u16)));
    }
    let parker = region.parker();
    drop(region);
    prefetcher.join().unwrap();
    let stats = parker.stats();
    assert_eq!((stats.pages_out, stats.pages_loaded), (0, stats.pages_parked), "{stats:?}");
}

/// Threads write and read their own pages, and read constant pages, while other threads evict pages.
#[test]
fn no_write_is_lost_under_a_parker() {
    const WRITERS: usize = 4;
    const EACH: usize = 300;
    let Some(mut region) = region(WRITERS * EACH + 128) else { return };
    for page in 0..128 {
        region[(WRITERS * EACH + page) * PAGE..][..PAGE].copy_from_slice(&page_of(page as u16));
    }
    let seconds = std::env::var("PAGEFOLD_STRESS_S").ok().and_then(|text| text.parse().ok()).unwrap_or(4);
    let end = Instant::now() + Duration::from_secs(seconds);
    let (stop, steps) = (AtomicBool::new(false), AtomicU64::new(0));
    let base = region.as_ptr() as usize;
    spawn_prefetcher(&region);
    std::thread::scope(|scope| {
        let _stop = Stop(&stop);
        for seed in 0..2_u64 {
            let (parker, stop) = (region.parker(), &stop);
            scope.spawn(move || {
                let mut round = seed;
                while !stop.load(Ordering::Relaxed) {
                    round += 1;
                    let all = 0..(WRITERS * EACH + 128) * PAGE;
                    match round % 16 {
                        0 => drop(parker.unpark(all)),
                        n if n % 4 == 0 => drop(parker.park_idle(1)),
                        n => {
                            parker.park(all, if n % 2 == 0 { Effort::Dense } else { Effort::Fast });
                        }
                    }
                }
            });
        }
        // The prefetcher loads pages for a thread that accesses them in order.
        scope.spawn(|| {
            // SAFETY: the address lies in the region, and no thread writes to these pages.
            let common =
                unsafe { std::slice::from_raw_parts((base as *const u8).add(WRITERS * EACH * PAGE), 128 * PAGE) };
            for page in (0..128).cycle().take_while(|_| !stop.load(Ordering::Relaxed)) {
                assert!(common[page * PAGE..][..PAGE] == page_of(page as u16), "common page {page}");
            }
        });
        let writers: Vec<_> = (0..WRITERS)
            .map(|number| {
                let steps = &steps;
                scope.spawn(move || {
                    // SAFETY: the address lies in the region, which outlives the thread; only this thread uses the page.
                    let own = unsafe {
                        std::slice::from_raw_parts_mut((base as *mut u8).add(number * EACH * PAGE), EACH * PAGE)
                    };
                    // SAFETY: the address lies in the region, and no thread writes to these pages.
                    let common = unsafe {
                        std::slice::from_raw_parts((base as *const u8).add(WRITERS * EACH * PAGE), 128 * PAGE)
                    };
                    let mut model = vec![0_u16; EACH];
                    let mut random = fastrand::Rng::with_seed(number as u64);
                    let mut step = 0;
                    while Instant::now() < end {
                        let page = random.usize(..EACH);
                        let slice = &mut own[page * PAGE..][..PAGE];
                        if model[page] == 0 {
                            assert!(slice.iter().all(|byte| *byte == 0), "writer {number}, page {page}: not fresh");
                        } else {
                            assert!(*slice == page_of(model[page]), "writer {number}, page {page}, step {step}");
                        }
                        if random.u8(..4) > 0 {
                            model[page] = random.u16(..2048) | 1;
                            slice.copy_from_slice(&page_of(model[page]));
                        }
                        let shared = random.usize(..128);
                        assert!(common[shared * PAGE..][..PAGE] == page_of(shared as u16), "common page {shared}");
                        step += 1;
                    }
                    steps.fetch_add(step, Ordering::Relaxed);
                    (model, own)
                })
            })
            .collect();
        for (number, writer) in writers.into_iter().enumerate() {
            let (model, own) = writer.join().unwrap();
            for (page, content) in model.iter().enumerate().filter(|(_, content)| **content != 0) {
                assert!(own[page * PAGE..][..PAGE] == page_of(*content), "writer {number}, page {page} at the end");
            }
        }
    });
    let stats = region.stats();
    assert!(stats.faults > 100 && stats.pages_unreadable == 0, "{stats:?}");
    eprintln!("{} steps, {stats:?}", steps.load(Ordering::Relaxed));
}

#[test]
fn many_threads_fault_on_the_same_pages_concurrently() {
    let Some(mut region) = region(64) else { return };
    for page in 0..64 {
        region[page * PAGE..][..PAGE].copy_from_slice(&page_of(page as u16 * 8 + 2));
    }
    let (prefetcher, parker) = (spawn_prefetcher(&region), region.parker());
    let gate = std::sync::Barrier::new(16);
    for _ in 0..30 {
        parker.park(0..64 * PAGE, Effort::Fast);
        std::thread::scope(|scope| {
            for _ in 0..16 {
                scope.spawn(|| {
                    gate.wait();
                    for page in 0..64 {
                        assert!(region[page * PAGE..][..PAGE] == page_of(page as u16 * 8 + 2), "page {page}");
                    }
                });
            }
        });
    }
    drop(region);
    prefetcher.join().unwrap();
    assert_eq!(parker.stats().pages_out, 0);
}

/// The program changes a page's access rights, as a write barrier does, while the page is frozen.
#[test]
fn no_write_is_lost_if_access_rights_change() {
    let Some(mut region) = region(1) else { return };
    let end = Instant::now() + Duration::from_secs(2);
    let (over, parker) = (AtomicBool::new(false), region.parker());
    let (first, last) = (region.as_ptr(), PAGE / 8 - 1);
    let wrong = std::thread::scope(|scope| {
        let _stop = Stop(&over);
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                parker.park(0..PAGE, Effort::Fast);
            }
        });
        let protect = |rights| {
            // SAFETY: the page lies in the region, and only this thread writes to it.
            assert_eq!(unsafe { libc::mprotect(first.cast(), PAGE, rights) }, 0);
        };
        (1..).find(|count: &u64| {
            region[last * 8..].copy_from_slice(&count.to_le_bytes());
            protect(libc::PROT_READ);
            std::thread::yield_now();
            let read = u64::from_le_bytes(region[last * 8..].try_into().unwrap());
            protect(libc::PROT_READ | libc::PROT_WRITE);
            read != *count || Instant::now() > end
        })
    });
    let count = wrong.unwrap();
    assert_eq!(u64::from_le_bytes(region[last * 8..].try_into().unwrap()), count, "the page is lost");
}

#[test]
fn locked_memory_is_discarded() {
    let Some(mut region) = region(2) else { return };
    region.fill(7);
    // SAFETY: the range is the region's mapping.
    if unsafe { libc::mlock(region.as_ptr().cast(), PAGE) } != 0 {
        let _ = writeln!(std::io::stderr(), "SKIPPED: no memory may be locked");
        return;
    }
    region.discard(0..2 * PAGE);
    assert!(region.iter().all(|byte| *byte == 0));
}

#[test]
fn idle_pages_are_evicted_and_written_ones_stay() {
    let Some(mut region) = region(40) else { return };
    for page in 0..40 {
        region[page * PAGE..][..PAGE].copy_from_slice(&page_of(page as u16 * 8 + 3));
    }
    let parker = region.parker();
    for round in 0..2 {
        region[5 * PAGE] = round;
        assert_eq!(parker.park_idle(2).pages, 0, "too soon in round {round}");
    }
    region[5 * PAGE] = 9;
    assert_eq!(parker.park_idle(2).pages, 39, "{:?}", parker.stats());
    // A page that was loaded immediately must be idle for twice as long.
    assert!(region[7 * PAGE..][..PAGE] == page_of(59));
    region[5 * PAGE] = 10;
    let went: Vec<u64> = (0..5).map(|_| parker.park_idle(2).pages).collect();
    assert_eq!((went, region.stats().pages_out), (vec![0, 0, 1, 0, 1], 40));
}

#[test]
fn system_calls_need_a_pin() {
    let Some(mut region) = region(600) else { return };
    region[..PAGE * 600].fill(7);
    let parker = region.parker();
    parker.park(0..600 * PAGE, Effort::Fast);
    let mut zeros = std::fs::File::open("/dev/zero").unwrap();
    let error = zeros.read(&mut region[8 * PAGE..24 * PAGE]).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
    assert_eq!(region[8 * PAGE], 7, "and nothing happened");
    region.discard(100 * PAGE..110 * PAGE);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = Stop(&stop);
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                parker.park(0..600 * PAGE, Effort::Fast);
            }
        });
        for _ in 0..200 {
            // Also for never written pages, which are absent but not evicted.
            let pinned = region.pin(90 * PAGE + 5..120 * PAGE).unwrap();
            zeros.read_exact(&mut region[90 * PAGE + 5..120 * PAGE]).unwrap();
            drop(pinned);
            region[90 * PAGE + 5..95 * PAGE].fill(3);
        }
    });
    assert!(region[95 * PAGE..120 * PAGE].iter().all(|byte| *byte == 0));
    assert!(region[90 * PAGE + 5..95 * PAGE].iter().all(|byte| *byte == 3));
    assert_eq!((region[90 * PAGE + 4], region.stats().pages_pinned), (7, 0));
}

/// Ends a child: no destructor, no test harness.
fn exit(code: i32) -> ! {
    // SAFETY: _exit takes a number and ends the process.
    unsafe { libc::_exit(code) }
}

#[test]
fn a_child_has_no_region_and_the_parent_keeps_its_own() {
    let Some(mut region) = region(64) else { return };
    for page in 0..64 {
        region[page * PAGE..][..PAGE].copy_from_slice(&page_of(page as u16 * 8 + 4));
    }
    let parker = region.parker();
    assert!(parker.park(0..32 * PAGE, Effort::Fast).pages > 0);
    let fork = |body: &dyn Fn()| {
        // SAFETY: the child runs `body`, which allocates nothing, and ends.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            body();
            exit(0);
        }
        let mut status = 0;
        // SAFETY: `pid` is this process's child; the status outlives the call.
        unsafe { libc::waitpid(pid, &raw mut status, 0) };
        status
    };
    for page in [3, 40] {
        let status = fork(&|| {
            // SAFETY: not sound on purpose: the child must die of SIGSEGV at this unmapped address.
            unsafe { region.as_ptr().add(page * PAGE).read_volatile() };
        });
        assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSEGV, "page {page}: {status:#x}");
    }
    // Calls on its handles do not touch any memory.
    let status = fork(&|| {
        parker.park(0..64 * PAGE, Effort::Fast);
        let _ = parker.unpark(0..64 * PAGE);
        drop(parker.clone());
        drop(parker.pin(0..64 * PAGE));
    });
    assert_eq!(status, 0);
    assert!(region.stats().pages_out > 0, "the child brought nothing back");
    for page in 0..64 {
        assert!(region[page * PAGE..][..PAGE] == page_of(page as u16 * 8 + 4), "page {page}");
    }
}

#[test]
fn regions_can_be_dropped_and_created_again() {
    let Some(first) = region(8) else { return };
    let mut all = Vec::new();
    let many = MANY.write().unwrap_or_else(std::sync::PoisonError::into_inner);
    let error = loop {
        let tier = Tier::create(Config { bytes_max: 4 << 20, ..Config::default() }, None).unwrap();
        match ColdRegion::new(tier, 8 * PAGE) {
            Ok(region) => all.push(region),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, RegionError::TooMany), "{error}");
    all.truncate(6);
    drop(many);
    for (number, region) in all.iter_mut().enumerate() {
        region.fill(number as u8 + 1);
        assert_eq!(region.parker().park(0..8 * PAGE, Effort::Fast).pages, 8);
    }
    let parker = all[0].parker();
    all.retain(|region| region.stats().pages_out == 8 && region[0] % 2 == 0);
    assert_eq!(parker.park(0..8 * PAGE, Effort::Fast).pages, 0, "a handle of a region that is gone does nothing");
    assert!(all.iter().all(|region| region.iter().all(|byte| byte % 2 == 0 && *byte == region[0])));
    drop(first);
    assert!(matches!(
        ColdRegion::new(Tier::create(Config::default(), None).unwrap(), 0),
        Err(RegionError::Size { .. })
    ));
}

/// Bytes of stack that a thread uses to read a byte of each address.
fn stack_of(addresses: &[usize]) -> usize {
    const LEN: usize = 1 << 20;
    extern "C" fn body(list: *mut libc::c_void) -> *mut libc::c_void {
        // SAFETY: `stack_of` passed the pointer, and joins this thread before the addresses are freed.
        let list = unsafe { &*list.cast::<&[usize]>() };
        for address in *list {
            // SAFETY: the address lies in a region, or in memory of the test.
            unsafe { (*address as *const u8).read_volatile() };
        }
        std::ptr::null_mut()
    }
    let stack = pagefold_os::mem::Mapping::anonymous(LEN).unwrap();
    // SAFETY: the mapping has that length and no other user.
    let bytes = unsafe { std::slice::from_raw_parts_mut(stack.as_ptr(), LEN) };
    bytes.fill(0xa5);
    // SAFETY: the attribute is initialised before use, and the stack outlives the thread, which is joined.
    unsafe {
        let mut attributes: libc::pthread_attr_t = std::mem::zeroed();
        assert_eq!(libc::pthread_attr_init(&raw mut attributes), 0);
        assert_eq!(libc::pthread_attr_setstack(&raw mut attributes, stack.as_ptr().cast(), LEN), 0);
        let mut thread = std::mem::zeroed();
        let list = std::ptr::from_ref(&addresses).cast_mut().cast();
        assert_eq!(libc::pthread_create(&raw mut thread, &raw const attributes, body, list), 0);
        assert_eq!(libc::pthread_join(thread, std::ptr::null_mut()), 0);
        libc::pthread_attr_destroy(&raw mut attributes);
    }
    LEN - bytes.iter().position(|byte| *byte != 0xa5).unwrap()
}

#[test]
fn a_fault_needs_eight_kib_of_stack() {
    let Some(mut region) = region(1300) else { return };
    for page in 0..1300 {
        region[page * PAGE..][..PAGE].copy_from_slice(&page_of((if page < 900 { page * 8 + 1 } else { page }) as u16));
    }
    let parker = region.parker();
    // Every codec, and pages in the file.
    parker.park(0..1000 * PAGE, Effort::Fast);
    parker.park(1000 * PAGE..1300 * PAGE, Effort::Dense);
    let (base, here) = (region.as_ptr() as usize, [0_u8; 1]);
    let without = stack_of(&[here.as_ptr() as usize]);
    let pages: Vec<usize> = (0..1300).map(|page| base + page * PAGE).collect();
    let with = stack_of(&pages);
    let stats = region.tier_stats();
    eprintln!("stack: {} bytes for a fault", with - without);
    assert!(stats.loads_from_disk > 100 && stats.contents_lz4 > 0 && stats.contents_patch > 0, "{stats:?}");
    assert!(with - without <= 8192, "{} bytes", with - without);
}
