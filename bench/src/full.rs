//! The runs behind `--full`: together they measure every published figure, within two hours on two
//! processors for all of them.
//!
//! Slow structures far behind (maps under one lock, trees with a node per key, the largest sets) run once, everything else in
//! rounds. Runs that only add detail come last, as far as the time reaches on this machine.

use std::time::Duration;

/// The longest time for all runs together.
const LIMIT: Duration = Duration::from_secs(2 * 60 * 60);

/// A run of a benchmark.
pub struct Run {
    /// The benchmark.
    pub bench: &'static str,
    /// The tag of its record.
    pub tag: &'static str,
    /// Its arguments.
    pub args: Vec<&'static str>,
    /// For a run that is left out when time is short: how long it takes on a busy host of two processors.
    last: Option<Duration>,
}

impl Run {
    /// True if it ends within the limit, `elapsed` after the first run began.
    pub fn fits(&self, elapsed: Duration) -> bool {
        self.last.is_none_or(|takes| elapsed + takes <= LIMIT)
    }
}

/// The fast structures.
const NEAR: &str = "sd-tree,sd-tree-grown,b-tree,forrest,std-hash-sharded,papaya,dashmap,scc-hash-map,congee";
/// The slow ones.
const FAR: &str = "std-hash-lock,std-btree-lock,forrest-ordered,scc-hash-index,skiplist,masstree,rb-tree-lock,\
                   absl-btree-lock,libcuckoo,tbb,liburcu";
/// Structures of which 10^8 keys fit into 7 GiB, with a second copy for batched inserts.
const FIT: &str = "sd-tree,b-tree,forrest,dashmap,scc-hash-map";
const ZIPF: &str = "sd-tree,b-tree,forrest,papaya,dashmap,scc-hash-map,congee";
/// Structures of the cold tier's index without a node per key: with such nodes 10^7 keys take minutes.
const OURS: &str = "flat-array,radix-64,tier-flat,tier-b-tree,b-tree";

/// Benchmark, tag, arguments, the value of the last argument, and for optional runs the minutes.
type Row = (&'static str, &'static str, &'static str, &'static str, Option<u64>);

/// In the order in which they run; of the optional ones the most important first.
const RUNS: &[Row] = &[
    ("erofs", "full", "--full", "", None),
    ("pagecache", "full", "--full", "", None),
    ("index", "uniform", "--keys 10000000 --rounds 3 --threads 2 --only", NEAR, None),
    ("index", "one-thread", "--keys 10000000 --rounds 1 --threads 1 --only", NEAR, None),
    ("index", "reserved", "--keys 10000000 --rounds 3 --threads 2 --only", "forrest-reserved,dashmap-reserved", None),
    ("index", "large", "--keys 100000000 --rounds 1 --threads 2 --only", FIT, None),
    ("index", "zipf", "--keys 10000000 --rounds 3 --threads 2 --mix read --dist zipf --only", ZIPF, None),
    (
        "index",
        "growth",
        "--keys 100000000 --rounds 1 --threads 1 --growth --only",
        "sd-tree,b-tree,forrest,dashmap",
        None,
    ),
    ("kv", "source-small", "--keys 1000000 --rounds 3 --tables", "source", None),
    ("kv", "shared", "--keys 10000000 --rounds 1 --tables", "shared", None),
    ("pageone", "merge", "--only merge --rounds", "5", None),
    // The published test's processes, a thirty-second of their size.
    ("pageone", "merge-large", "--only merge --layout files --full --rounds", "1", None),
    ("pageone", "breaks", "--only breaks --rounds", "3", None),
    ("pageone", "delay", "--only delay --rounds", "3", None),
    ("pageone", "idle", "--only idle --rounds", "3", None),
    ("pageone", "churn", "--only churn --rounds", "1", None),
    ("pageone", "guests", "--only guests --full --rounds", "1", None),
    ("zswap", "index", "--part index --entries 100000,1000000 --rounds", "1", None),
    ("zswap", "tier", "--part density,latency,live,half --guests 4 --rounds", "3", None),
    ("zswap", "index-large", "--part index --entries 10000000 --rounds 1 --only", OURS, Some(6)),
    // A sixteenth of the published size.
    ("pageone", "merge-largest", "--only merge --layout files --processes 12 --mib 1024 --rounds", "1", Some(6)),
    ("sandboxes", "full", "--rounds", "1", Some(10)),
    ("coverage", "full", "--rounds", "1", Some(25)),
    ("kv", "source", "--keys 10000000 --rounds 1 --tables", "source", Some(11)),
    ("index", "far", "--keys 10000000 --rounds 1 --threads 2 --only", FAR, Some(11)),
    ("erofs", "many", "--many", "", Some(1)),
    ("index", "growth-trees", "--keys 10000000 --rounds 1 --threads 1 --growth --only", "congee,rb-tree-lock", Some(2)),
    // With 10^7 keys and two threads it did not end here, with 10^6 it takes minutes.
    ("index", "scc-tree", "--keys 100000 --rounds 1 --threads 2 --only", "scc-tree-index", Some(2)),
];

/// The runs of these benchmarks, in their order.
pub fn runs(benches: &[&str]) -> Vec<Run> {
    let run = |&(bench, tag, line, value, minutes): &Row| Run {
        bench,
        tag,
        args: line.split(' ').chain(Some(value).filter(|value| !value.is_empty())).collect(),
        last: minutes.map(|minutes| Duration::from_secs(minutes * 60)),
    };
    RUNS.iter().map(run).filter(|run| benches.contains(&run.bench)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    const ALL: [&str; 8] = ["coverage", "erofs", "pagecache", "index", "kv", "pageone", "sandboxes", "zswap"];

    #[test]
    fn no_record_overwrites_another() {
        let runs = runs(&ALL);
        let tags: BTreeSet<(&str, &str)> = runs.iter().map(|run| (run.bench, run.tag)).collect();
        assert_eq!((tags.len(), runs.len()), (runs.len(), RUNS.len()));
    }

    #[test]
    fn a_run_that_would_end_too_late_is_left_out() {
        let runs = runs(&["kv"]);
        let (first, last) = (&runs[0], &runs[runs.len() - 1]);
        assert!(first.fits(LIMIT) && last.fits(Duration::ZERO) && !last.fits(LIMIT - Duration::from_secs(60)));
    }
}
