//! How the tier's costs grow: with what pages are made of, and with threads.

use super::latency::timed;
use super::{Row, median};
use pagefold_tier::{Config, Effort, Tier};
use std::time::Instant;

type Page = [u8; 4096];

/// Measures on so many pages.
pub fn measure(pages: usize) -> Vec<Row> {
    let mut rows = Vec::new();
    for percent in [0, 25, 50, 75, 100] {
        for (name, effort) in [("LZ4", Effort::Fast), ("zstd + dictionary", Effort::Dense)] {
            rows.push(of_random_share(percent, pages, name, effort));
        }
    }
    for threads in [1, 2, 4] {
        rows.push(by_threads(threads, pages));
    }
    rows
}

/// Pages of which the first `percent` are noise and the rest is text; no two are equal.
fn made_of(percent: usize, count: usize) -> Vec<Page> {
    let mut noise = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        noise = noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (noise >> 33) as u8
    };
    let page = |number: usize| {
        let mut page = [0; 4096];
        let random = 4096 * percent / 100;
        page[..random].fill_with(&mut next);
        let text =
            format!("page {number}: a line of a log that says much the same as the line before, {}\n", number % 7);
        page[random..].iter_mut().zip(text.bytes().cycle()).for_each(|(to, from)| *to = from);
        page
    };
    (0..count).map(page).collect()
}

/// A tier without near pages, which would take all text for one.
fn tier(pages: usize, regions: u32) -> Tier {
    let bytes_max = (pages as u64 * 4096 * 5 / 4).max(64 << 20);
    let tier = Tier::create(Config { bytes_max, patches: false, ..Config::default() }, None).expect("memory");
    (1..=regions).for_each(|region| tier.add_region(region, pages as u64).expect("a region"));
    tier
}

fn of_random_share(percent: usize, count: usize, name: &str, effort: Effort) -> Row {
    let pages = made_of(percent, count);
    let tier = tier(count, 1);
    if effort == Effort::Dense {
        tier.train_on(pages.iter().step_by((count / 256).max(1)).copied().collect::<Vec<Page>>().as_flattened());
    }
    let mut store = timed(count, |at| {
        tier.store(1, at as u64, &pages[at], effort).expect("room");
    });
    let mut back = [0; 4096];
    let mut load = timed(count, |at| {
        tier.load(1, at as u64, &mut back).expect("it was stored");
        assert!(back == pages[at], "page {at} came back wrong");
    });
    let stats = tier.stats();
    Row {
        part: "growth",
        name: format!("random bytes, {name}"),
        on: format!("{percent} %, {count} pages"),
        figures: vec![
            ("store us", median(&mut store)),
            ("load us", median(&mut load)),
            ("bytes/page", (stats.bytes_held + stats.bytes_metadata) as f64 / count as f64),
        ],
    }
}

/// Threads that store and then load pages of their own regions in one tier.
fn by_threads(threads: u32, count: usize) -> Row {
    let count = count / threads as usize;
    let sets: Vec<Vec<Page>> = (0..threads).map(|thread| made_of(10 + thread as usize, count)).collect();
    let tier = tier(count * threads as usize, threads);
    let timed = |act: &(dyn Fn(u32, u64, &Page) + Sync)| {
        let began = Instant::now();
        std::thread::scope(|scope| {
            for (region, pages) in (1..).zip(&sets) {
                scope.spawn(move || (0..).zip(pages).for_each(|(at, page)| act(region, at, page)));
            }
        });
        began.elapsed().as_secs_f64() * 1e6 / (count * threads as usize) as f64
    };
    let store = timed(&|region, at, page| {
        tier.store(region, at, page, Effort::Fast).expect("room");
    });
    let load = timed(&|region, at, page| {
        let mut back = [0; 4096];
        tier.load(region, at, &mut back).expect("it was stored");
        assert!(back == *page, "page {at} came back wrong");
    });
    Row {
        part: "growth",
        name: "threads, LZ4".to_owned(),
        on: format!("{threads}, {} pages", count * threads as usize),
        figures: vec![("store us", store), ("load us", load)],
    }
}
