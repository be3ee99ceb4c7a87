//! Every process reads what it last wrote, whatever the schedule.
//!
//! `PAGEFOLD_SIM_SEED=N` replays one seed, `PAGEFOLD_SIM_SEEDS=N` runs that many.

mod common;

use common::Scripted;
use pagefold_merge::sim::{Machine, Options, Plan, Process, SimClient, Summary, run};
use pagefold_merge::{Config, Domain};
use pagefold_pool::Key;

fn env(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

/// The seeds that are run: `usual` of them, unless the environment says otherwise; and whether they are so many that all
/// must have happened in their runs.
fn seeds(usual: u64) -> (std::ops::Range<u64>, bool) {
    let seeds = match env("PAGEFOLD_SIM_SEED") {
        Some(seed) => seed..seed + 1,
        None => 1..1 + env("PAGEFOLD_SIM_SEEDS").unwrap_or(usual),
    };
    let are_enough = seeds.end - seeds.start >= usual;
    (seeds, are_enough)
}

#[test]
fn every_process_reads_what_it_wrote_last() {
    let mut all = Summary::default();
    let mut failures = Vec::new();
    let (seeds, are_enough) = seeds(200);
    for seed in seeds {
        match run(seed, Plan::of_seed(seed)) {
            Ok(summary) => all += summary,
            Err(failure) => {
                println!("{failure}");
                failures.push(failure.seed);
            }
        }
    }
    println!("{all:?}");
    assert!(failures.is_empty(), "failing seeds: {failures:?}");
    let done_all = [
        all.merged,
        all.cow_breaks,
        all.pages_restored,
        all.pages_compacted,
        all.refuted,
        all.released,
        all.segment_alloc_failed_pages,
    ];
    if are_enough {
        assert!(done_all.iter().all(|count| *count > 100), "the runs did too little: {all:?}");
    }
}

/// The negative control: without the comparison the oracle must see wrong bytes.
#[test]
fn without_the_comparison_the_oracle_finds_wrong_bytes() {
    let caught = (1..40u64).find_map(|seed| {
        let plan = Plan::of_seed(seed);
        let options = Options { compare: false, interference: 200, ..plan.options };
        run(seed, Plan { options, ..plan }).err()
    });
    let failure = caught.expect("no seed of forty noticed that pages were mapped without being compared");
    assert!(failure.what.contains("was written last"), "{failure}");
}

/// Huge pages that have twins, at rest until their process's other threads act in the middle of a merge.
#[test]
fn huge_pages_that_are_merged_whole_show_what_was_written_last() {
    let (mut whole, mut failures) = (0, Vec::new());
    let (seeds, are_enough) = seeds(40);
    for seed in seeds {
        let options = Options { huge: true, exits: false, interference: 30, pages_max: 1 << 13, ..Options::default() };
        let machine = Machine::new(seed, options);
        machine.set_quiet(true);
        let config = Config { period_ns: 1000, vma_budget: 16_000, ..Config::default() };
        let domain = Domain::with_key(config, Key::from_seed(seed)).expect("a domain");
        let mut now_ns = 0;
        for round in 0..4u32 {
            // Each time more that shows the same, and some of it moved.
            let process = machine.spawn();
            let range = process.map_huge(2 * 512);
            for page in 0..2 * 512 {
                process.write(range.start + u64::from(page) * 4096, 2 + (page + round % 2 * 37) * 2);
            }
            domain.add(Box::new(stirred_by_merges(process.client(), &machine)));
            for _ in 0..12 {
                now_ns += 1000;
                while domain.step_any(now_ns, None, &mut Vec::new()).is_some() {}
                machine.check();
            }
        }
        failures.extend(machine.failure().or_else(|| domain.audit().pop()).map(|what| format!("seed {seed}: {what}")));
        whole += machine.processes().iter().map(Process::merged_whole).sum::<u64>();
    }
    println!("{whole} huge pages were merged whole");
    assert!(failures.is_empty(), "{failures:?}");
    assert!(!are_enough || whole > 50, "{whole} huge pages");
}

/// Seeds that once left a page: slots of one content in two segments of an earlier daemon, of which only the released one
/// was in the index (595, 606, 775) or was retired (1138), pages that were healed before the table had them (356, 853), and
/// pages that were written between a look and a freeze (1285).
const SEEDS_THAT_LEFT_A_PAGE: [u64; 7] = [356, 595, 606, 775, 853, 1138, 1285];

/// With the writers stopped, every duplicate is merged in the end, broken pages included: none is forgotten. Of what the
/// simulation cannot expect to be merged [`Process::mergeable`](pagefold_merge::sim::Process::mergeable) tells the reasons.
#[test]
fn when_writers_rest_every_duplicate_is_merged() {
    let mut all = Summary::default();
    let mut failures = Vec::new();
    let (range, are_enough) = seeds(150);
    let again =
        SEEDS_THAT_LEFT_A_PAGE.into_iter().filter(|seed| env("PAGEFOLD_SIM_SEED").is_none() && !range.contains(seed));
    for seed in range.clone().chain(again) {
        let plan = Plan::of_seed(seed);
        let options = Options { mappings_max: None, exits: false, ..plan.options };
        let config = Config { vma_budget: 16_000, pool_max_bytes: 1 << 40, ..plan.config };
        let plan = Plan { options, config, hostile_one_in: 0, quiet_periods: 400, merges_all: true, ..plan };
        match run(seed, plan) {
            Ok(summary) => all += summary,
            Err(failure) => {
                println!("{failure}");
                failures.push(failure.seed);
            }
        }
    }
    println!("{all:?}");
    assert!(failures.is_empty(), "failing seeds: {failures:?}");
    if are_enough {
        assert!(
            [all.duplicates, all.segment_alloc_failed_pages].iter().all(|count| *count > 1000),
            "the runs did too little: {all:?}"
        );
    }
}

/// A client of a process with threads that act while pages are merged, and else rest: written before, a huge page is not one
/// that is merged whole.
fn stirred_by_merges(honest: SimClient, machine: &Machine) -> Scripted {
    let machine = machine.clone();
    let at = move |call| {
        match call {
            "remap" => machine.set_quiet(false),
            "remapped" => machine.set_quiet(true),
            _ => {}
        }
        Ok(())
    };
    Scripted { honest, claims: None, at: Box::new(at) }
}
