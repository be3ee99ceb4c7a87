//! A page out, and in again: the tier alone, a region of the library, and zswap.

use super::kernel::Zswap;
use super::measure::{Area, Busy, as_pages, timed};
use super::row::Row;
use crate::stats::Random;
use pagefold_tier::region::ColdRegion;
use pagefold_tier::{Config, Effort, Tier};
use std::io;
use std::time::Instant;

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
        let tier = Tier::create(config, None).expect("memory");
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
            match served_here(&pages, effort, &order) {
                Ok(found) => rows.extend(found.into_iter().map(|(name, us)| row(&format!("{name}, {label}"), us))),
                Err(error) => eprintln!("SKIPPED: faults in a region: {error}"),
            }
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
    let touch = timed(count, |at| area.touch(order[at]));
    rows.push(row(&format!("zswap touch, {compressor}, random"), touch));
    area.page_out();
    let busy = Busy::start();
    let touch = timed(count, |at| area.touch(order[at]));
    drop(busy);
    rows.push(row(&format!("zswap touch, {compressor}, random, cores busy"), touch));
    area.page_out();
    Zswap::page_cluster(3)?;
    let touch = timed(count, |at| area.touch(at));
    rows.push(row(&format!("zswap touch, {compressor}, in order, clusters of 8"), touch));
    Ok(rows)
}

/// Times of faults that the faulting thread serves itself, through the library.
fn served_here(
    pages: &[&[u8; 4096]],
    effort: Effort,
    order: &[usize],
) -> Result<[(&'static str, Vec<f64>); 3], String> {
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
    Ok([
        ("fault in the faulting thread", random),
        ("fault in the faulting thread, cores busy", beside),
        ("fault in the faulting thread, in order", in_order),
    ])
}
