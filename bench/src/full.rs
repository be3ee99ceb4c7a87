//! The runs behind `--full`: together they measure every published figure, within two hours on two processors for all of them.

/// A run of a benchmark.
pub struct Run {
    /// The benchmark.
    pub bench: &'static str,
    /// The tag of its record.
    pub tag: &'static str,
    /// Its options, separated by spaces.
    pub line: &'static str,
}

const fn run(bench: &'static str, tag: &'static str, line: &'static str) -> Run {
    Run { bench, tag, line }
}

/// In the order in which they run.
const RUNS: &[Run] = &[
    run("erofs", "full", "--full"),
    run("pagecache", "full", "--full"),
    run("index", "full", "--keys 10000000 --rounds 5 --threads 2"),
    run("kv", "source", "--keys 10000000 --rounds 1 --tables source"),
    run("kv", "shared", "--keys 10000000 --rounds 3 --threads 2 --tables shared"),
    run("pageone", "merge", "--only merge --rounds 5"),
    // The published test's processes, a thirty-second of their size.
    run("pageone", "merge-large", "--only merge --layout files --full --rounds 3"),
    run("pageone", "huge", "--only merge --layout huge --full --rounds 1"),
    run("pageone", "scattered", "--only merge --layout scattered --full --rounds 1"),
    run("pageone", "breaks", "--only breaks --rounds 3"),
    run("pageone", "delay", "--only delay --rounds 3"),
    run("pageone", "idle", "--only idle --full --rounds 1"),
    run("pageone", "churn", "--only churn --rounds 1"),
    run("pageone", "guests", "--only guests --rounds 1"),
    run("zswap", "full", "--guests 4 --rounds 3"),
    run("sandboxes", "full", "--rounds 1"),
    run("coverage", "full", "--rounds 1"),
];

/// The runs of these benchmarks, in their order.
pub fn runs(benches: &[&str]) -> impl Iterator<Item = &'static Run> {
    RUNS.iter().filter(|run| benches.contains(&run.bench))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_bench_has_runs_and_no_record_overwrites_another() {
        let tags: BTreeSet<(&str, &str)> = RUNS.iter().map(|run| (run.bench, run.tag)).collect();
        assert_eq!(tags.len(), RUNS.len());
        let benches: BTreeSet<&str> = RUNS.iter().map(|run| run.bench).collect();
        assert_eq!(benches, crate::BENCHES.iter().map(|bench| bench.0).collect());
    }
}
