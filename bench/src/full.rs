//! What `--full` stands for: the runs of each benchmark that together take every published figure, in about two hours on
//! two processors for all of them.
//!
//! What is slow and far behind (maps under one lock, trees with a node per key, the largest sets) is taken once,
//! everything else in rounds.

/// A run: the tag of its record, and its arguments.
pub type Run = (&'static str, Vec<&'static str>);

/// The structures whose figures stand close to each other.
const NEAR: &str = "sd-tree,sd-tree-grown,b-tree,forrest,std-hash-sharded,papaya,dashmap,scc-hash-map,congee";
/// Those far behind.
const FAR: &str = "std-hash-lock,std-btree-lock,forrest-ordered,scc-hash-index,skiplist,masstree,rb-tree-lock,\
                   absl-btree-lock,libcuckoo,tbb,liburcu";
/// Those of which 10^8 keys fit into 7 GiB, with a second structure for batched inserts.
const FIT: &str = "sd-tree,b-tree,forrest,dashmap,scc-hash-map";
/// One of each kind: trie, tree, hash tables, and the source's tree without its lock.
const TLB: &str = "sd-tree,b-tree,forrest,dashmap,rb-tree-bare";
const ZIPF: &str = "sd-tree,b-tree,forrest,papaya,dashmap,scc-hash-map,congee";

/// The runs of a benchmark, by name.
pub fn runs(bench: &str) -> Vec<Run> {
    let words = |tag, line: &'static str, more: &[&'static str]| -> Run {
        (tag, line.split(' ').chain(more.iter().copied()).collect())
    };
    match bench {
        "index" => vec![
            words("uniform", "--keys 10000000 --rounds 3 --threads 2 --only", &[NEAR]),
            words("one-thread", "--keys 10000000 --rounds 1 --threads 1 --only", &[NEAR]),
            words("far", "--keys 10000000 --rounds 1 --threads 2 --only", &[FAR]),
            // With 10^7 keys and two threads it did not come to an end here, with 10^6 it takes minutes.
            words("scc-tree", "--keys 100000 --rounds 1 --threads 2 --only scc-tree-index", &[]),
            words("reserved", "--keys 10000000 --rounds 3 --threads 2 --only forrest-reserved,dashmap-reserved", &[]),
            words("large", "--keys 100000000 --rounds 1 --threads 2 --only", &[FIT]),
            words("zipf", "--keys 10000000 --rounds 3 --threads 2 --mix read --dist zipf --only", &[ZIPF]),
            words(
                "growth",
                "--keys 100000000 --rounds 1 --threads 1 --growth --only sd-tree,b-tree,forrest,dashmap",
                &[],
            ),
            words("growth-trees", "--keys 10000000 --rounds 1 --threads 1 --growth --only congee,rb-tree-lock", &[]),
            // Simulated by cachegrind, so with fewer keys.
            words("tlb", "--keys 1000000 --rounds 1 --tlb --only", &[TLB]),
            words("content", "--content", &[]),
        ],
        "kv" => vec![
            words("source", "--keys 10000000 --rounds 1 --tables source", &[]),
            words("source-small", "--keys 1000000 --rounds 3 --tables source", &[]),
            words("shared", "--keys 10000000 --rounds 1 --tables shared", &[]),
            words("values", "--keys 1000000 --rounds 3 --tables values", &[]),
        ],
        "zswap" => vec![
            words("index", "--part index --entries 100000,1000000 --rounds 1", &[]),
            // Trees with a node per key take minutes here.
            words(
                "index-large",
                "--part index --entries 10000000 --rounds 1 --only",
                &["flat-array,radix-64,tier-flat,tier-b-tree,b-tree,rb-tree-lock"],
            ),
            words("growth", "--part growth", &[]),
            words("tier", "--part density,latency,live,half --guests 4 --rounds 3", &[]),
        ],
        "pageone" => vec![
            words("merge", "--only merge --rounds 5", &[]),
            // The published test's processes, a thirty-second and a sixteenth of their size.
            words("merge-large", "--only merge --layout files --full --rounds 1", &[]),
            words("merge-largest", "--only merge --layout files --processes 12 --mib 1024 --rounds 1", &[]),
            words("breaks", "--only breaks --rounds 3", &[]),
            words("delay", "--only delay --rounds 3", &[]),
            words("idle", "--only idle --rounds 3", &[]),
            words("churn", "--only churn --rounds 1", &[]),
            words("growth", "--only growth --rounds 1", &[]),
            words("guests", "--only guests --full --rounds 1", &[]),
        ],
        "erofs" => vec![words("full", "--full", &[]), words("many", "--many", &[])],
        _ => vec![words("full", "--full", &[])],
    }
}
