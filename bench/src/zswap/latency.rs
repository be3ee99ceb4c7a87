//! A page out, and in again: the tier alone, a region of the library, and zswap.

use super::kernel::Zswap;
use super::measure::{Area, Busy, as_pages, timed};
use super::row;
use crate::restore::Undo;
use crate::stats;
use pagefold_tier::region::ColdRegion;
use pagefold_tier::{Config, Effort, Tier};
use serde_json::Value;
use std::io;

fn row(name: &str, us: Vec<f64>) -> Value {
    let on = format!("{} pages", us.len());
    row::of_times("latency", name, &on, &row::in_short(us))
}

/// Measures on the first `count` pages of a set.
pub fn measure(set: &[u8], count: usize) -> Vec<Value> {
    let pages = as_pages(set);
    let step = (pages.len() / count).max(1);
    let pages: Vec<&[u8; 4096]> = pages.iter().step_by(step).take(count).map(|(_, page)| *page).collect();
    let order = stats::order(pages.len(), 7);
    let mut rows = Vec::new();
    for (label, effort) in [("LZ4", Effort::Fast), ("zstd + dictionary", Effort::Dense)] {
        match served_here(&pages, effort, &order) {
            Ok(found) => rows.extend(found.into_iter().map(|(name, us)| row(&format!("{name}, {label}"), us))),
            Err(error) => eprintln!("SKIPPED: faults in a region: {error}"),
        }
    }
    match zswap(&pages, &order) {
        Ok(found) => rows.extend(found),
        Err(error) => eprintln!("SKIPPED: zswap: {error}"),
    }
    rows
}

fn zswap(pages: &[&[u8; 4096]], order: &[usize]) -> io::Result<Vec<Value>> {
    let count = pages.len();
    let _zswap = Zswap::start(count as u64 * 4096 + (64 << 20))?;
    let mut area = Area::new(count * 4096)?;
    for (slot, page) in area.bytes_mut().as_chunks_mut::<4096>().0.iter_mut().zip(pages) {
        slot.copy_from_slice(*page);
    }
    let compressor = Zswap::compressor();
    area.page_out();
    let touch = timed(count, |at| area.touch(order[at]));
    let mut rows = vec![row(&format!("zswap touch, {compressor}, random"), touch)];
    area.page_out();
    let busy = Busy::start();
    let touch = timed(count, |at| area.touch(order[at]));
    drop(busy);
    rows.push(row(&format!("zswap touch, {compressor}, random, cores busy"), touch));
    // In order the kernel reads neighbours ahead, as it does by default.
    let ahead = Undo::set("/proc/sys/vm/page-cluster", "3")?;
    area.page_out();
    rows.push(row(&format!("zswap touch, {compressor}, in order"), timed(count, |at| area.touch(at))));
    drop(ahead);
    Ok(rows)
}

/// Times of faults that the faulting thread serves itself, through the library.
fn served_here(
    pages: &[&[u8; 4096]],
    effort: Effort,
    order: &[usize],
) -> Result<[(&'static str, Vec<f64>); 2], String> {
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
    Ok([("fault in the faulting thread", random), ("fault in the faulting thread, cores busy", beside)])
}
