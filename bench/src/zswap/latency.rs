//! A page out, and in again: the tier alone, the tier behind userfaultfd, and zswap.

use super::kernel::Zswap;
use super::measure::{Area, Busy, as_pages, timed, to_io};
use super::row::Row;
use crate::stats::Random;
use pagefold_os::Range;
use pagefold_os::uffd::{self, Uffd};
use pagefold_tier::region::ColdRegion;
use pagefold_tier::{BackingFile, Config, Effort, Tier};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

fn row(name: &str, us: Vec<f64>) -> Row {
    let on = format!("{} pages", us.len());
    Row::of_times("latency", name, on, us)
}

/// Measures on the first `count` pages of a set.
pub fn measure(set: &[u8], count: usize) -> Vec<Row> {
    let pages = as_pages(set);
    let step = (pages.len() / count).max(1);
    let pages: Vec<&[u8; 4096]> = pages.iter().step_by(step).take(count).map(|(_, page)| *page).collect();
    let count = pages.len();
    let mut rows = Vec::new();
    let order = Random(7).order(count);
    for (label, effort, patches) in [
        ("LZ4", Effort::Fast, false),
        ("zstd + dictionary", Effort::Dense, false),
        ("zstd + dictionary + patches", Effort::Dense, true),
    ] {
        let config = Config { bytes_max: 1 << 30, patches, ..Config::default() };
        let backing = BackingFile::create(&std::env::temp_dir(), 1 << 30).expect("a file");
        let tier = Tier::create(config, Some(Box::new(backing))).expect("memory");
        tier.add_client(1, count as u64).expect("a region");
        if effort == Effort::Dense {
            let samples: Vec<u8> =
                pages.iter().step_by((count / 1024).max(1)).flat_map(|page| page.iter().copied()).collect();
            tier.train_on(&samples);
        }
        let store = timed(count, |at| drop(tier.store(1, at as u64, pages[at], effort)));
        rows.push(row(&format!("store, {label}"), store));
        let mut data = [0; 4096];
        let load = timed(count, |at| {
            tier.load(1, order[at] as u64, &mut data).expect("stored");
            assert!(data[0] == pages[order[at]][0]);
        });
        rows.push(row(&format!("load, {label}"), load));
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
            rows.push(row("load from the file (O_DIRECT)", read));
        }
    }
    match zswap(&pages, &order) {
        Ok(found) => rows.extend(found),
        Err(error) => eprintln!("SKIPPED: zswap: {error}"),
    }
    rows
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
    rows.push(row(&format!("zswap touch, {compressor}, random"), touch));
    area.page_out();
    let busy = Busy::start();
    let touch = timed(count, |at| {
        area.touch(order[at]);
    });
    drop(busy);
    rows.push(row(&format!("zswap touch, {compressor}, random, cores busy"), touch));
    area.page_out();
    Zswap::page_cluster(3)?;
    let touch = timed(count, |at| {
        area.touch(at);
    });
    rows.push(row(&format!("zswap touch, {compressor}, in order, clusters of 8"), touch));
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

/// Faults that the faulting thread serves itself, through the library: at random and in order.
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
    // Densely packed, so that comparing a touched byte does not miss the cache itself.
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
    let prefetcher = region.prefetcher();
    std::thread::spawn(move || prefetcher.run());
    let helped = timed(count, touch);
    Ok(vec![
        row("fault in the faulting thread", random),
        row("fault in the faulting thread, cores busy", beside),
        row("fault in the faulting thread, in order", in_order),
        row("fault in the faulting thread, in order, a second hand", helped),
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
            // The thread runs before the clock starts.
            std::thread::sleep(Duration::from_millis(5));
            let touch = match cluster {
                1 => timed(count, |at| {
                    area.touch(order[at]);
                }),
                _ => timed(count, |at| {
                    area.touch(at);
                }),
            };
            rows.push(row(name, touch));
            stop.store(true, Ordering::Relaxed);
            Ok(())
        })?;
        uffd.unregister(range).map_err(to_io)?;
        area.forget();
    }
    Ok(rows)
}
