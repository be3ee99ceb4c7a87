//! A page out, and in again: the tier alone, the tier behind userfaultfd, and zswap.

use super::density::as_pages;
use super::kernel::Zswap;
use super::{Row, quantile};
use pagefold_os::uffd::{self, Uffd};
use pagefold_os::{Range, mem::Mapping};
use pagefold_tier::region::ColdRegion;
use pagefold_tier::{BackingFile, Config, Effort, Tier};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Anonymous memory on small pages.
pub struct Area(Mapping);

fn to_io(errno: pagefold_os::Errno) -> io::Error {
    io::Error::from_raw_os_error(errno.0)
}

impl Area {
    pub fn new(len: usize) -> io::Result<Area> {
        Mapping::anonymous(len).map(Area).map_err(to_io)
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the mapping is ours, readable and writable, of that length, and borrowed mutably for as long.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_ptr(), self.0.len()) }
    }

    /// Reads one byte of a page, whatever that brings.
    fn touch(&self, page: usize) -> u8 {
        assert!(page * 4096 < self.0.len());
        // SAFETY: inside the mapping, as just checked; volatile, because the read is what counts.
        unsafe { self.0.as_ptr().add(page * 4096).read_volatile() }
    }

    pub fn page_out(&self) {
        // SAFETY: the range is ours; the advice changes nothing that can be read.
        let _ = unsafe { pagefold_os::mem::advise(self.0.addr(), self.0.len() as u64, libc::MADV_PAGEOUT) };
    }

    fn forget(&self) {
        // SAFETY: the range is ours, and what was in it is not read again.
        let _ = unsafe { pagefold_os::mem::advise(self.0.addr(), self.0.len() as u64, libc::MADV_DONTNEED) };
    }

    pub fn resident_bytes(&self) -> io::Result<usize> {
        let pages = self.0.len() / 4096;
        let file = std::fs::File::open("/proc/self/pagemap")?;
        let mut entries = vec![0; pages * 8];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut entries, self.0.addr() / 4096 * 8)?;
        Ok(entries.as_chunks::<8>().0.iter().filter(|entry| entry[7] & 0x80 != 0).count() * 4096)
    }
}

/// Pages 0 to `count` in random order.
/// The numbers below `count` in an order that looks random and is always the same.
pub fn shuffled(count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    let mut state = 7_u64;
    for at in (1..count).rev() {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        order.swap(at, (state >> 33) as usize % (at + 1));
    }
    order
}

fn row(name: &str, mut us: Vec<f64>, pages: usize) -> Row {
    let sum: f64 = us.iter().sum();
    us.sort_by(f64::total_cmp);
    Row {
        part: "latency",
        name: name.to_owned(),
        on: format!("{pages} pages"),
        figures: vec![("p50 us", quantile(&us, 0.5)), ("p99 us", quantile(&us, 0.99)), ("us/page", sum / pages as f64)],
    }
}

/// Microseconds of each of `count` acts.
pub fn timed(count: usize, mut act: impl FnMut(usize)) -> Vec<f64> {
    let time = |at| {
        let start = Instant::now();
        act(at);
        start.elapsed().as_secs_f64() * 1e6
    };
    (0..count).map(time).collect()
}

/// Measures on the first `count` pages of a set.
pub fn measure(set: &[u8], count: usize) -> Vec<Row> {
    let pages = as_pages(set);
    let step = (pages.len() / count).max(1);
    let pages: Vec<&[u8; 4096]> = pages.iter().step_by(step).take(count).map(|(_, page)| *page).collect();
    let count = pages.len();
    let mut rows = Vec::new();
    let order = shuffled(count);
    for (label, effort, patches) in [
        ("LZ4", Effort::Fast, false),
        ("zstd + dictionary", Effort::Dense, false),
        ("zstd + dictionary + patches", Effort::Dense, true),
    ] {
        let config = Config { bytes_max: 1 << 30, patches, ..Config::default() };
        let backing = BackingFile::create(&std::env::temp_dir(), 1 << 30).expect("a file");
        let tier = Tier::create(config, Some(Box::new(backing))).expect("memory");
        tier.add_region(1, count as u64).expect("a region");
        if effort == Effort::Dense {
            let samples: Vec<u8> =
                pages.iter().step_by((count / 1024).max(1)).flat_map(|page| page.iter().copied()).collect();
            tier.train_on(&samples);
        }
        let store = timed(count, |at| drop(tier.store(1, at as u64, pages[at], effort)));
        rows.push(row(&format!("store, {label}"), store, count));
        let mut data = [0; 4096];
        let load = timed(count, |at| {
            tier.load(1, order[at] as u64, &mut data).expect("stored");
            assert!(data[0] == pages[order[at]][0]);
        });
        rows.push(row(&format!("load, {label}"), load, count));
        if !patches {
            let here = served_here(&pages, effort, &order);
            for found in [here, served(&tier, count, &order).map_err(|error| error.to_string())] {
                match found {
                    Ok(found) => rows.extend(found.into_iter().map(|mut row| {
                        row.name = format!("{}, {label}", row.name);
                        row
                    })),
                    Err(error) => eprintln!("SKIPPED: userfaultfd: {error}"),
                }
            }
        }
        if effort == Effort::Fast {
            let written = tier.write_back_now(u64::MAX);
            assert!(written > 0, "nothing was written back");
            let read = timed(count.min(2000), |at| drop(tier.load(1, order[at] as u64, &mut data)));
            rows.push(row("load from the file (O_DIRECT)", read, count.min(2000)));
        }
    }
    match zswap(&pages, &order) {
        Ok(found) => rows.extend(found),
        Err(error) => eprintln!("SKIPPED: zswap: {error}"),
    }
    rows
}

/// Every processor has something to do while this lives.
pub struct Busy {
    stop: Arc<AtomicBool>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl Busy {
    /// Starts a thread for each processor.
    pub fn start() -> Busy {
        let stop = Arc::new(AtomicBool::new(false));
        let spin = || {
            let stop = stop.clone();
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            })
        };
        let threads = (0..std::thread::available_parallelism().map_or(1, usize::from)).map(|_| spin()).collect();
        Busy { stop, threads }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn zswap(pages: &[&[u8; 4096]], order: &[usize]) -> io::Result<Vec<Row>> {
    let count = pages.len();
    let _zswap = Zswap::start(count as u64 * 4096 + (64 << 20))?;
    let mut area = Area::new(count * 4096)?;
    for (slot, page) in area.bytes_mut().as_chunks_mut::<4096>().0.iter_mut().zip(pages) {
        slot.copy_from_slice(*page);
    }
    let compressor = Zswap::compressor();
    let start = Instant::now();
    area.page_out();
    let out_us = start.elapsed().as_secs_f64() * 1e6 / count as f64;
    let mut rows = vec![Row {
        part: "latency",
        name: format!("zswap store (MADV_PAGEOUT), {compressor}"),
        on: format!("{count} pages"),
        figures: vec![("p50 us", f64::NAN), ("p99 us", f64::NAN), ("us/page", out_us)],
    }];
    let touch = timed(count, |at| {
        area.touch(order[at]);
    });
    rows.push(row(&format!("zswap touch, {compressor}, random"), touch, count));
    area.page_out();
    let busy = Busy::start();
    let touch = timed(count, |at| {
        area.touch(order[at]);
    });
    drop(busy);
    rows.push(row(&format!("zswap touch, {compressor}, random, cores busy"), touch, count));
    area.page_out();
    Zswap::page_cluster(3)?;
    let touch = timed(count, |at| {
        area.touch(at);
    });
    rows.push(row(&format!("zswap touch, {compressor}, in order, clusters of 8"), touch, count));
    Ok(rows)
}

// Served through userfaultfd.

/// `UFFDIO_COPY` and its argument; as in linux/userfaultfd.h.
const UFFDIO_COPY: u64 = 0xc028_aa03;

#[repr(C)]
struct Copy {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    copied: i64,
}

fn copy_in(fd: i32, dst: u64, pages: &[[u8; 4096]]) {
    let mut copy = Copy { dst, src: pages.as_ptr() as u64, len: pages.len() as u64 * 4096, mode: 0, copied: 0 };
    // SAFETY: the kernel reads `pages` and writes only into the registered range; the structure outlives the call.
    unsafe { libc::ioctl(fd, UFFDIO_COPY, &raw mut copy) };
}

/// Faults that the faulting thread serves itself, through the library: at random, and in order.
fn served_here(pages: &[&[u8; 4096]], effort: Effort, order: &[usize]) -> Result<Vec<Row>, String> {
    let count = pages.len();
    let config = Config { bytes_max: 1 << 30, patches: false, ..Config::default() };
    let tier = Tier::create(config, None).map_err(|error| error.to_string())?;
    let mut region = ColdRegion::new(tier, count * 4096).map_err(|error| error.to_string())?;
    for (slot, page) in region.as_chunks_mut::<4096>().0.iter_mut().zip(pages) {
        slot.copy_from_slice(*page);
    }
    let parker = region.parker();
    let park = || {
        let parked = parker.park(0..count * 4096, effort);
        assert!(parked.pages + parked.busy == count as u64, "{parked:?}");
    };
    // Beside each other: what a touch is compared with must not be a miss of its own.
    let firsts: Vec<u8> = pages.iter().map(|page| page[0]).collect();
    let touch = |page: usize| assert!(region[page * 4096] == firsts[page]);
    park();
    let random = timed(count, |at| touch(order[at]));
    park();
    let busy = Busy::start();
    let beside = timed(count, |at| touch(order[at]));
    drop(busy);
    park();
    let in_order = timed(count, touch);
    park();
    let hand = region.hand();
    std::thread::spawn(move || hand.work());
    let helped = timed(count, touch);
    Ok(vec![
        row("fault in the faulting thread", random, count),
        row("fault in the faulting thread, cores busy", beside, count),
        row("fault in the faulting thread, in order", in_order, count),
        row("fault in the faulting thread, in order, a second hand", helped, count),
    ])
}

fn served(tier: &Tier, count: usize, order: &[usize]) -> io::Result<Vec<Row>> {
    let mut rows = Vec::new();
    let area = Area::new(count.next_multiple_of(8) * 4096)?;
    let range = Range::pages_from(area.0.addr(), count.next_multiple_of(8) as u64);
    for (name, cluster, polling) in [
        ("fault by a waiting thread", 1, false),
        ("fault by a polling thread", 1, true),
        ("fault by a waiting thread, clusters of 8", 8, false),
    ] {
        let uffd = Uffd::new(None, 0).map_err(to_io)?;
        uffd.register(range, uffd::MODE_MISSING).map_err(to_io)?;
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| -> io::Result<()> {
            scope.spawn(|| {
                let mut pages = vec![[0; 4096]; cluster];
                while !stop.load(Ordering::Relaxed) {
                    if !polling {
                        let mut poll = [libc::pollfd { fd: uffd.fd().raw(), events: libc::POLLIN, revents: 0 }];
                        let _ = pagefold_os::fd::poll(&mut poll, 20);
                    }
                    let Ok(Some(uffd::Event::PageFault { addr, .. })) = uffd.read_event() else { continue };
                    let page = (addr - range.start) / 4096;
                    if let Ok(run) = tier.load_cluster(1, page, &mut pages) {
                        let first = run.start as usize % cluster;
                        let len = (run.end - run.start) as usize;
                        copy_in(uffd.fd().raw(), range.start + run.start * 4096, &pages[first..first + len]);
                    }
                }
            });
            // The thread is there before the clock runs.
            std::thread::sleep(Duration::from_millis(5));
            let touch = match cluster {
                1 => timed(count, |at| {
                    area.touch(order[at]);
                }),
                _ => timed(count, |at| {
                    area.touch(at);
                }),
            };
            rows.push(row(name, touch, count));
            stop.store(true, Ordering::Relaxed);
            Ok(())
        })?;
        uffd.unregister(range).map_err(to_io)?;
        area.forget();
    }
    Ok(rows)
}
