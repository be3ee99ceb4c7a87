//! Whatever memory looks like, the scan counts what a naive model counts that compares every page with every
//! other: contents, copies inside and across, shared and kernel-only pages, domains, runs, budgets and bills.

use pagefold_scan::{Config, Cost, Identity, Ksm, Lost, PageKind, Pages, Reason, ScanPlan, Source, WorkUnit, scan};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

/// Four contents to a page number would never meet; few contents meet often. 0 is the zero page.
#[derive(Clone, Debug)]
struct Cell {
    content: u8,
    shared: bool,
}

/// A mapping: where it starts, and its pages, `None` where nothing is present.
#[derive(Clone, Debug)]
struct Area {
    first_page: u64,
    kind: PageKind,
    cells: Vec<Option<Cell>>,
}

#[derive(Clone, Debug)]
struct Memory {
    domain: u64,
    areas: Vec<Area>,
    /// Pages in a unit.
    unit: u64,
}

fn page(content: u8) -> [u8; 4096] {
    let mut page = [0; 4096];
    page[usize::from(content) * 16] = content;
    page
}

impl Source for Memory {
    fn identity(&self) -> Identity {
        Identity { pid: None, name: "memory".into(), domain: self.domain }
    }

    fn plan(&self) -> Result<ScanPlan, Lost> {
        let mut plan = ScanPlan { merged: 17, ..ScanPlan::default() };
        for area in &self.areas {
            let reason = (area.kind == PageKind::KernelOnly).then_some(Reason::Locked);
            for at in (0..area.cells.len() as u64).step_by(self.unit as usize) {
                plan.units.push(WorkUnit {
                    first_page: area.first_page + at,
                    page_count: self.unit.min(area.cells.len() as u64 - at),
                    kind: area.kind,
                    reason,
                    continues: at > 0,
                });
            }
        }
        Ok(plan)
    }

    fn read(&self, unit: &WorkUnit, _: &mut [u8], pages: &mut Pages) -> Result<(), Lost> {
        let holds = |area: &&Area| {
            area.first_page <= unit.first_page && unit.first_page < area.first_page + area.cells.len() as u64
        };
        let area = self.areas.iter().find(holds).expect("units lie in areas");
        for number in unit.first_page..unit.first_page + unit.page_count {
            if let Some(cell) = &area.cells[(number - area.first_page) as usize] {
                pages.take(number, cell.shared, false, &page(cell.content));
            }
        }
        Ok(())
    }
}

/// One present page as the model sees it.
#[derive(Clone, Debug)]
struct Seen {
    source: usize,
    domain: u64,
    area: usize,
    page: u64,
    kind: PageKind,
    content: u8,
}

fn all_pages(memories: &[Memory]) -> Vec<Seen> {
    let mut all = Vec::new();
    for (source, memory) in memories.iter().enumerate() {
        for (number, area) in memory.areas.iter().enumerate() {
            for (at, cell) in area.cells.iter().enumerate() {
                let Some(cell) = cell else { continue };
                let kind = if cell.shared && area.kind != PageKind::Pool { PageKind::Shared } else { area.kind };
                all.push(Seen {
                    source,
                    domain: memory.domain,
                    area: number,
                    page: area.first_page + at as u64,
                    kind,
                    content: cell.content,
                });
            }
        }
    }
    all
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Counted {
    zero: u64,
    unique: u64,
    inside: u64,
    across: u64,
    shared: u64,
    kernel_only: u64,
    runs: Vec<u64>,
    saved: u64,
    over: u64,
    ksm_saved: u64,
    ksm_nodes: u64,
}

fn model(memories: &[Memory], budget: usize, shortest: fn(u64, u64) -> u64) -> Counted {
    let mut counted = Counted::default();
    let all = all_pages(memories);
    let is_zero = |seen: &Seen| seen.content == 0;
    let twins = |seen: &Seen, kind: PageKind| -> Vec<&Seen> {
        all.iter().filter(|o| o.domain == seen.domain && o.content == seen.content && o.kind == kind).collect()
    };
    let merges = |seen: &Seen| {
        let pooled = !twins(seen, PageKind::Pool).is_empty();
        seen.kind == PageKind::Own && !is_zero(seen) && (twins(seen, PageKind::Own).len() >= 2 || pooled)
    };
    let mut slots: BTreeMap<(u64, u8), u64> = BTreeMap::new();
    // In the order in which the contents first occur anywhere.
    for seen in all.iter().filter(|seen| !is_zero(seen)) {
        let key = (seen.domain, seen.content);
        let next = slots.len() as u64;
        if twins(seen, PageKind::Own).iter().any(|own| merges(own)) {
            slots.entry(key).or_insert(next);
        }
    }
    let mut taken: BTreeMap<(u64, u8), u64> = BTreeMap::new();
    for source in 0..memories.len() {
        let mut runs: Vec<Vec<&Seen>> = Vec::new();
        for seen in all.iter().filter(|seen| seen.source == source && merges(seen)) {
            let slot = |seen: &Seen| slots[&(seen.domain, seen.content)];
            match runs.last_mut() {
                Some(run)
                    if run.last().is_some_and(|last| {
                        last.area == seen.area && last.page + 1 == seen.page && slot(last) + 1 == slot(seen)
                    }) =>
                {
                    run.push(seen);
                }
                _ => runs.push(vec![seen]),
            }
        }
        counted.runs.extend(runs.iter().map(|run| run.len() as u64));
        // Longest first, earlier ones first among equals.
        runs.sort_by_key(|run| std::cmp::Reverse(run.len()));
        let is_worth = |(used, run): (usize, &Vec<&Seen>)| run.len() as u64 >= shortest(used as u64, budget as u64);
        let worth = runs.iter().enumerate().take_while(|one| is_worth(*one)).count();
        counted.over += runs.iter().skip(worth).map(|run| run.len() as u64).sum::<u64>();
        for seen in runs.iter().take(worth).flatten() {
            *taken.entry((seen.domain, seen.content)).or_default() += 1;
        }
    }
    let mut contents: BTreeSet<(u64, u8)> = BTreeSet::new();
    for seen in &all {
        match seen.kind {
            PageKind::Own if is_zero(seen) => counted.zero += 1,
            PageKind::Own if !merges(seen) => counted.unique += 1,
            PageKind::Own => {}
            PageKind::KernelOnly => counted.kernel_only += 1,
            PageKind::Shared => counted.shared += 1,
            PageKind::Pool => {}
        }
        if !is_zero(seen) && contents.insert((seen.domain, seen.content)) {
            let own = twins(seen, PageKind::Own);
            let holders: BTreeSet<usize> = own.iter().map(|own| own.source).collect();
            let pooled = !twins(seen, PageKind::Pool).is_empty();
            counted.inside += (own.len() - holders.len()) as u64;
            counted.across += holders.len().saturating_sub(usize::from(!pooled)) as u64;
            let taken = taken.get(&(seen.domain, seen.content)).copied().unwrap_or(0);
            counted.saved += if pooled { taken } else { taken.saturating_sub(1) };
            let shared = u64::from(!twins(seen, PageKind::Shared).is_empty());
            let copies = own.len() as u64 + twins(seen, PageKind::KernelOnly).len() as u64 + shared;
            if copies >= 2 {
                counted.ksm_nodes += copies.div_ceil(256);
                counted.ksm_saved += copies - copies.div_ceil(256);
            }
        }
    }
    counted.runs.sort_unstable();
    counted
}

fn cells() -> impl Strategy<Value = Vec<Option<Cell>>> {
    let cell = (0u8..12, prop::bool::weighted(0.1)).prop_map(|(content, shared)| Cell { content, shared });
    // Stretches that count up make runs; random cells break them.
    let stretch = (0u8..8, 1usize..10).prop_map(|(from, length)| {
        (0..length as u8).map(|n| Some(Cell { content: from + n, shared: false })).collect()
    });
    let random = prop::collection::vec(prop::option::weighted(0.8, cell), 1..6);
    let piece: BoxedStrategy<Vec<Option<Cell>>> = prop_oneof![stretch, random].boxed();
    prop::collection::vec(piece, 0..5).prop_map(|pieces| pieces.concat())
}

fn memory() -> impl Strategy<Value = Memory> {
    let kind = prop_oneof![6 => Just(PageKind::Own), 2 => Just(PageKind::KernelOnly), 1 => Just(PageKind::Pool)];
    let areas = prop::collection::vec((kind, cells(), 0u64..2), 0..4);
    (0u64..2, areas, 1u64..9).prop_map(|(domain, parts, unit)| {
        let mut next = 1;
        let mut areas = Vec::new();
        for (kind, cells, gap) in parts {
            let first_page = next + gap;
            next = first_page + cells.len() as u64;
            areas.push(Area { first_page, kind, cells });
        }
        Memory { domain, areas, unit }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn the_scan_counts_what_the_model_counts(
        memories in prop::collection::vec(memory(), 1..5),
        budget in 0usize..12,
        workers in 1usize..4,
        reserves in any::<bool>(),
    ) {
        let mut config = Config { workers, map_budget: budget as u64, ..Config::default() };
        if reserves {
            // The second half is for runs.
            config.shortest_run = |used, budget| if used * 2 < budget { 1 } else if used < budget { 3 } else { u64::MAX };
        }
        let shortest = config.shortest_run;
        let sources = memories.iter().map(|memory| Box::new(memory.clone()) as Box<dyn Source>).collect();
        let report = scan(sources, &config, &mut |_| {});
        let expected = model(&memories, budget, shortest);
        let totals = &report.totals;
        let zero_kernel_only = all_pages(&memories).iter().filter(|s| s.content == 0 && s.kind == PageKind::KernelOnly).count() as u64;
        let examined = all_pages(&memories).iter().filter(|seen| seen.kind != PageKind::Pool).count() as u64;
        prop_assert_eq!(totals.examined, examined);
        prop_assert_eq!(
            (totals.zero, totals.unique, totals.duplicate_inside, totals.duplicate_across),
            (expected.zero, expected.unique, expected.inside, expected.across)
        );
        prop_assert_eq!(
            (totals.shared_already, totals.shared_by_pagefold, totals.kernel_only),
            (expected.shared, 17 * memories.len() as u64, expected.kernel_only)
        );
        prop_assert_eq!(report.runs.count, expected.runs.len() as u64);
        prop_assert_eq!(report.runs.pages, expected.runs.iter().sum::<u64>());
        for bucket in &report.runs.histogram {
            let within = |length: &&u64| (bucket.from..=bucket.to.unwrap_or(u64::MAX)).contains(*length);
            prop_assert_eq!(bucket.runs, expected.runs.iter().filter(within).count() as u64);
            prop_assert_eq!(bucket.pages, expected.runs.iter().filter(within).sum::<u64>());
        }
        prop_assert_eq!(report.cost.over_budget_pages, expected.over);
        prop_assert_eq!(report.cost.duplicate_bytes, expected.saved * 4096);
        prop_assert_eq!(report.cost.zero_bytes, expected.zero * 4096);
        let spent = report.cost.mappings * Cost::MAPPING_BYTES
            + (expected.zero + expected.unique + report.runs.pages) * Cost::SCANNED_BYTES
            + (report.runs.pages - expected.over) * Cost::SHARED_BYTES;
        prop_assert_eq!(report.cost.saved_bytes, ((expected.saved + expected.zero) * 4096) as i64 - spent as i64);
        prop_assert_eq!(report.ksm.deduplicated_bytes, (expected.ksm_saved + expected.zero + zero_kernel_only) * 4096);
        prop_assert_eq!(
            report.ksm.metadata_bytes,
            (totals.examined + expected.ksm_nodes) * Ksm::ITEM_BYTES
        );
        prop_assert!(report.notes.is_empty());
    }
}

/// Copies of many contents, some frequent, some rare; what a sample says of them is within its own error bars,
/// wider by half to keep chance out.
#[test]
fn a_sample_estimates_within_its_error() {
    struct Big;
    impl Source for Big {
        fn identity(&self) -> Identity {
            Identity::default()
        }
        fn plan(&self) -> Result<ScanPlan, Lost> {
            let unit = |n: u64| WorkUnit {
                first_page: 1 + n * 1000,
                page_count: 1000,
                kind: PageKind::Own,
                reason: None,
                continues: n > 0,
            };
            Ok(ScanPlan { units: (0..60).map(unit).collect(), ..ScanPlan::default() })
        }
        fn read(&self, unit: &WorkUnit, _: &mut [u8], pages: &mut Pages) -> Result<(), Lost> {
            for number in unit.first_page..unit.first_page + unit.page_count {
                // 20,000 contents three times, in stretches of 50 pages, each third pass in another order.
                let stretch = number / 50 % 400;
                let content = if number > 40_000 { stretch * 7 % 400 * 50 + number % 50 } else { number % 20_000 };
                let mut page = [1; 4096];
                page[..8].copy_from_slice(&content.to_le_bytes());
                pages.take(number, false, false, &page);
            }
            Ok(())
        }
    }
    let run = |one_in| {
        let config = Config { one_in, seed: 42, ..Config::default() };
        scan(vec![Box::new(Big)], &config, &mut |_| {})
    };
    let (all, sample) = (run(1), run(8));
    assert_eq!(all.cost.sample_error_bytes, 0);
    assert_eq!(all.totals.examined, sample.totals.examined);
    let difference = all.cost.duplicate_bytes.abs_diff(sample.cost.duplicate_bytes);
    let error = sample.cost.sample_error_bytes;
    assert!(error > 0 && difference <= error * 3 / 2, "off by {difference}, promised {error}");
    let (mean, estimated) = (all.runs.mean, sample.runs.mean);
    assert!(estimated > mean / 3.0 && estimated < mean * 3.0, "mean run {mean}, estimated {estimated}");
    assert!(sample.runs.histogram.is_empty());
}

/// A source that blocks for ever, as a process with pages under its own userfaultfd does, costs its own part of
/// the scan and nothing else.
#[test]
fn a_source_that_holds_its_reader_is_given_up() {
    struct Stuck;
    impl Source for Stuck {
        fn identity(&self) -> Identity {
            Identity { pid: Some(1), name: "stuck".into(), domain: 0 }
        }
        fn plan(&self) -> Result<ScanPlan, Lost> {
            let unit =
                |n| WorkUnit { first_page: n, page_count: 1, kind: PageKind::Own, reason: None, continues: false };
            Ok(ScanPlan { units: (1..9).map(unit).collect(), ..ScanPlan::default() })
        }
        fn read(&self, unit: &WorkUnit, _: &mut [u8], pages: &mut Pages) -> Result<(), Lost> {
            pages.take(unit.first_page, false, false, &page(3));
            if unit.first_page >= 4 {
                loop {
                    std::thread::park();
                }
            }
            Ok(())
        }
    }
    let good = Memory {
        domain: 0,
        areas: vec![Area {
            first_page: 1,
            kind: PageKind::Own,
            cells: vec![Some(Cell { content: 3, shared: false }); 100],
        }],
        unit: 1,
    };
    let config = Config { workers: 2, patience: std::time::Duration::from_millis(200), ..Config::default() };
    let report = scan(vec![Box::new(Stuck), Box::new(good)], &config, &mut |_| {});
    assert_eq!(report.notes.len(), 1);
    assert_eq!((report.notes[0].name.as_str(), report.notes[0].what.as_str()), ("stuck", "holds whoever reads it"));
    assert_eq!((report.totals.examined, report.totals.duplicate_inside), (100, 99));
}

/// Files of holes only, of exabytes each: all together have more bytes than can be told, and are not said to have none.
#[test]
fn what_is_more_than_can_be_told_is_told_as_the_most() {
    struct Holes;
    impl Source for Holes {
        fn identity(&self) -> Identity {
            Identity { pid: None, name: "holes".into(), domain: 0 }
        }
        fn plan(&self) -> Result<ScanPlan, Lost> {
            let unit =
                WorkUnit { first_page: 0, page_count: 1 << 51, kind: PageKind::Own, reason: None, continues: false };
            Ok(ScanPlan { units: vec![unit], bytes: 1 << 63, ..ScanPlan::default() })
        }
        fn read(&self, unit: &WorkUnit, _: &mut [u8], pages: &mut Pages) -> Result<(), Lost> {
            pages.take_holes(unit.page_count);
            Ok(())
        }
    }
    let sources = (0..4).map(|_| Box::new(Holes) as Box<dyn Source>).collect();
    let report = scan(sources, &Config::default(), &mut |_| ());
    assert_eq!((report.totals.zero, report.cost.zero_bytes), (1 << 53, u64::MAX));
    assert_eq!((report.cost.saved_bytes, report.ksm.saved_bytes), (i64::MAX, i64::MAX));
}
