//! Every process reads what it last wrote, whatever the schedule.
//!
//! `PAGEFOLD_SIM_SEED=N` replays one seed, `PAGEFOLD_SIM_SEEDS=N` runs that many.

use pagefold_merge::Config;
use pagefold_merge::sim::{Options, Plan, Summary, run};

fn env(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

fn seeds(default: u64) -> std::ops::Range<u64> {
    match env("PAGEFOLD_SIM_SEED") {
        Some(seed) => seed..seed + 1,
        None => 1..1 + env("PAGEFOLD_SIM_SEEDS").unwrap_or(default),
    }
}

#[test]
fn every_process_reads_what_it_wrote_last() {
    let mut all = Summary::default();
    let mut failures = Vec::new();
    for seed in seeds(200) {
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
    let done_all = [all.merged, all.breaks, all.healed, all.compacted, all.refuted, all.released, all.no_segment];
    if env("PAGEFOLD_SIM_SEED").is_none() {
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

/// With the writers stopped, every duplicate is merged in the end, broken pages included: none is forgotten. Of what the
/// simulation cannot expect to be merged [`Process::mergeable`](pagefold_merge::sim::Process::mergeable) tells the reasons.
#[test]
fn when_writers_rest_every_duplicate_is_merged() {
    let mut all = Summary::default();
    let mut failures = Vec::new();
    for seed in seeds(150) {
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
    if env("PAGEFOLD_SIM_SEED").is_none() {
        assert!([all.duplicates, all.no_segment].iter().all(|count| *count > 1000), "the runs did too little: {all:?}");
    }
}
