//! Models of the lock-free paths: loom runs each through every interleaving with few preemptions.
//!
//! Under `--cfg loom` a node has two slots, the tree one section of eight buckets, and a third leaf
//! makes it grow, so that two threads with an operation each meet every path.
//!
//! `LOOM_MAX_PREEMPTIONS=2 RUSTFLAGS="--cfg loom" cargo test -p llds --test loom --release`

#![cfg(loom)]

use llds::sd_tree::{SdTree, SweepCursor};
use loom::sync::Arc;
use loom::thread;

/// Fingerprints of one bucket: they differ in the bits after the bucket's.
const A: u64 = 0b0000_0001 << 53;
const B: u64 = 0b1000_0001 << 53;
const C: u64 = 0b1100_0001 << 53;
/// A fingerprint of another bucket.
const FAR: u64 = 0b111 << 61;

fn model(run: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.max_branches = 100_000;
    if builder.preemption_bound.is_none() {
        builder.preemption_bound = Some(2);
    }
    if builder.max_duration.is_none() {
        // The bound on preemptions ends most models before this limit; the others print how far they came.
        builder.max_duration = Some(std::time::Duration::from_secs(6));
    }
    // Loom finds no race where the first thread only reads, so readers are spawned; this tells if one is not.
    let executions = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(0));
    let counter = executions.clone();
    builder.check(move || {
        counter.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        run();
    });
    let executions = executions.load(std::sync::atomic::Ordering::Relaxed);
    assert!(executions > 10, "only {executions} executions: the model shows nothing");
    println!("{executions} executions");
}

fn tree_with(leaves: &[(u64, u64)]) -> Arc<SdTree> {
    let tree = SdTree::with_capacity_hint(0).unwrap();
    for &(fingerprint, value) in leaves {
        assert_eq!(tree.get_or_insert(fingerprint, value), Ok(None));
    }
    Arc::new(tree)
}

#[test]
fn two_inserts_of_one_fingerprint_have_one_winner() {
    model(|| {
        let tree = tree_with(&[]);
        let other = tree.clone();
        let thread = thread::spawn(move || other.get_or_insert(A, 1).unwrap());
        let mine = tree.get_or_insert(A, 2).unwrap();
        let theirs = thread.join().unwrap();
        match (mine, theirs) {
            (None, Some(2)) => assert_eq!(tree.get(A), Some(2)),
            (Some(1), None) => assert_eq!(tree.get(A), Some(1)),
            outcome => panic!("{outcome:?}"),
        }
        assert_eq!(tree.len(), 1);
    });
}

/// The race that a version decides: a slot before the one chosen becomes free meanwhile.
#[test]
fn insert_beside_delete_and_insert_in_another_slot() {
    model(|| {
        let tree = tree_with(&[(A, 7)]);
        let other = tree.clone();
        let thread = thread::spawn(move || {
            assert!(other.remove(A, 7));
            other.get_or_insert(B, 1).unwrap()
        });
        let mine = tree.get_or_insert(B, 2).unwrap();
        let theirs = thread.join().unwrap();
        assert!(mine.is_none() != theirs.is_none(), "{mine:?} {theirs:?}");
        let winner = if mine.is_none() { 2 } else { 1 };
        assert!(tree.remove(B, winner));
        assert_eq!(tree.get(B), None, "one leaf only");
    });
}

#[test]
fn delete_and_insert_of_one_key() {
    model(|| {
        let tree = tree_with(&[(A, 1)]);
        let other = tree.clone();
        let thread = thread::spawn(move || other.remove(A, 1));
        let other = tree.clone();
        let inserter = thread::spawn(move || other.get_or_insert(A, 2).unwrap());
        assert!(thread.join().unwrap());
        let seen = inserter.join().unwrap();
        match seen {
            None => assert_eq!(tree.get(A), Some(2)),
            Some(1) => assert_eq!(tree.get(A), None),
            other => panic!("{other:?}"),
        }
    });
}

#[test]
fn two_deletes_have_one_winner() {
    model(|| {
        let tree = tree_with(&[(A, 1)]);
        let other = tree.clone();
        let thread = thread::spawn(move || other.remove(A, 1));
        let other = tree.clone();
        let second = thread::spawn(move || other.remove(A, 1));
        assert!(second.join().unwrap() != thread.join().unwrap());
        assert_eq!(tree.len(), 0);
    });
}

/// A key that is always there is always found: its slot changes during the read, and is reused for another key.
#[test]
fn reader_beside_replace_and_reuse_of_the_slot() {
    model(|| {
        let tree = tree_with(&[(A, 1)]);
        let other = tree.clone();
        let thread = thread::spawn(move || {
            let first = other.get(A).expect("always there");
            let second = other.get(A).expect("always there");
            assert!(first <= second, "{first} then {second}");
        });
        assert!(tree.replace(A, 1, 2));
        tree.get_or_insert(B, 3).unwrap();
        thread.join().unwrap();
        assert_eq!(tree.get(A), Some(2));
    });
}

#[test]
fn reader_beside_delete() {
    model(|| {
        let tree = tree_with(&[(A, 1), (B, 2)]);
        let other = tree.clone();
        let thread = thread::spawn(move || {
            assert_eq!(other.get(B), Some(2));
            if other.get(A).is_none() {
                assert_eq!(other.get(A), None);
            }
        });
        let other = tree.clone();
        let remover = thread::spawn(move || assert!(other.remove(A, 1)));
        remover.join().unwrap();
        thread.join().unwrap();
        assert_eq!(tree.get(A), None);
    });
}

#[test]
fn reader_beside_split() {
    model(|| {
        let tree = tree_with(&[(A, 1), (B, 2)]);
        let other = tree.clone();
        let thread = thread::spawn(move || {
            assert_eq!(other.get(B), Some(2));
            assert_eq!(other.get(A), Some(1));
        });
        assert_eq!(tree.get_or_insert(C, 3), Ok(None));
        thread.join().unwrap();
        assert_eq!(tree.get(C), Some(3));
    });
}

/// The check is called with inserted values, never with the number of the line that replaces a leaf.
#[test]
fn check_beside_split() {
    model(|| {
        let tree = tree_with(&[(A, 1), (B, 2)]);
        let other = tree.clone();
        let thread = thread::spawn(move || {
            let is_value = |value| {
                assert!((1..=3).contains(&value), "asked about {value}");
                true
            };
            assert_eq!(other.get_with(A, is_value), Some(1));
            assert_eq!(other.get_with(B, is_value), Some(2));
        });
        assert_eq!(tree.get_or_insert(C, 3), Ok(None));
        thread.join().unwrap();
        assert_eq!(tree.get(C), Some(3));
    });
}

#[test]
fn two_inserts_that_split_one_node() {
    model(|| {
        let tree = tree_with(&[(A, 1), (B, 2)]);
        let other = tree.clone();
        let thread = thread::spawn(move || other.get_or_insert(C, 3).unwrap());
        let mine = tree.get_or_insert(C, 4).unwrap();
        let theirs = thread.join().unwrap();
        assert!(mine.is_none() != theirs.is_none());
        assert_eq!((tree.get(A), tree.get(B)), (Some(1), Some(2)));
        assert_eq!(tree.get(C), Some(if mine.is_none() { 4 } else { 3 }));
        assert_eq!(tree.len(), 3);
    });
}

#[test]
fn delete_beside_split() {
    model(|| {
        let tree = tree_with(&[(A, 1), (B, 2)]);
        let other = tree.clone();
        let thread = thread::spawn(move || assert_eq!(other.get_or_insert(C, 3), Ok(None)));
        assert!(tree.remove(B, 2));
        thread.join().unwrap();
        assert_eq!((tree.get(A), tree.get(B), tree.get(C)), (Some(1), None, Some(3)));
    });
}

/// The third leaf makes the array grow: every bucket moves while a reader reads and another deletes.
#[test]
fn reader_beside_growth() {
    model(|| {
        let tree = tree_with(&[(A, 1), (FAR, 2)]);
        let other = tree.clone();
        let thread = thread::spawn(move || {
            assert_eq!(other.get(A), Some(1));
            assert_eq!(other.get(FAR), Some(2));
        });
        assert_eq!(tree.get_or_insert(B, 3), Ok(None));
        thread.join().unwrap();
        assert_eq!((tree.get(A), tree.get(B), tree.get(FAR)), (Some(1), Some(3), Some(2)));
        assert_eq!(tree.stats().level_max, 4, "grew");
    });
}

#[test]
fn insert_and_delete_beside_growth() {
    model(|| {
        let tree = tree_with(&[(A, 1), (FAR, 2)]);
        let other = tree.clone();
        let thread = thread::spawn(move || other.get_or_insert(B, 3).unwrap());
        assert!(tree.remove(A, 1));
        let mine = tree.get_or_insert(B, 4).unwrap();
        let theirs = thread.join().unwrap();
        assert!(mine.is_none() != theirs.is_none());
        assert_eq!(tree.get(A), None);
        assert_eq!(tree.get(B), Some(if mine.is_none() { 4 } else { 3 }));
    });
}

/// A child becomes empty, is marked, cut off, retired and reused for another split, while a reader
/// descends through it.
#[test]
fn reader_beside_reuse_of_a_child() {
    model(|| {
        let tree = SdTree::with_capacity_hint(0).unwrap();
        for (fingerprint, value) in [(A, 1), (B, 2), (C, 3)] {
            assert_eq!(tree.get_or_insert(fingerprint, value), Ok(None));
        }
        let tree = Arc::new(tree);
        let other = tree.clone();
        let thread = thread::spawn(move || {
            assert_eq!(other.get(B), Some(2));
            assert_eq!(other.get(A), Some(1));
        });
        assert!(tree.remove(C, 3));
        let mut cursor = SweepCursor::new();
        while cursor.passes() < 2 {
            tree.retain(&mut cursor, 4, |_| true);
        }
        thread.join().unwrap();
        assert_eq!((tree.get(A), tree.get(B), tree.get(C)), (Some(1), Some(2), None));
    });
}

/// Unlinked memory is not past while a thread that could hold it is pinned.
#[test]
fn pinned_thread_keeps_what_it_can_reach() {
    use llds::epoch;
    use loom::sync::atomic::{AtomicU64, Ordering};
    model(|| {
        // 1: linked. 0: unlinked. `used` is what the memory's next owner writes.
        let link = Arc::new(AtomicU64::new(1));
        let used = Arc::new(AtomicU64::new(0));
        let (link2, used2) = (link.clone(), used.clone());
        let thread = thread::spawn(move || {
            let _pin = epoch::pin();
            if link2.load(Ordering::Acquire) == 1 {
                assert_eq!(used2.load(Ordering::Acquire), 0, "used again under a reader");
            }
        });
        link.store(0, Ordering::Release);
        let stamp = epoch::clock().now();
        epoch::clock().try_advance();
        epoch::clock().try_advance();
        if epoch::clock().is_past(stamp) {
            used.store(1, Ordering::Release);
        }
        thread.join().unwrap();
    });
}

/// The B-tree: a node is one line of three pairs, so the fourth entry splits it.
mod b_tree {
    use super::model;
    use llds::b_tree::BTree;
    use loom::sync::Arc;
    use loom::thread;

    fn tree_with(entries: &[(u64, u64)]) -> Arc<BTree<u64>> {
        let tree = BTree::new().unwrap();
        for &(key, value) in entries {
            assert_eq!(tree.insert_or_replace(key, value), Ok(None));
        }
        Arc::new(tree)
    }

    /// The optimistic read: entries shift meanwhile, and the value it returns was there.
    #[test]
    fn reader_beside_insert_that_shifts() {
        model(|| {
            let tree = tree_with(&[(5, 50), (7, 70)]);
            let other = tree.clone();
            let thread = thread::spawn(move || {
                assert_eq!(other.get(7), Some(70));
                assert_eq!(other.get(6), None);
            });
            assert_eq!(tree.insert_or_replace(1, 10), Ok(None));
            thread.join().unwrap();
            assert_eq!((tree.get(1), tree.get(5)), (Some(10), Some(50)));
        });
    }

    #[test]
    fn reader_beside_split_of_the_root() {
        model(|| {
            let tree = tree_with(&[(1, 10), (5, 50), (7, 70)]);
            let other = tree.clone();
            let thread = thread::spawn(move || assert_eq!(other.get(7), Some(70)));
            assert_eq!(tree.insert_or_replace(6, 60), Ok(None));
            thread.join().unwrap();
            assert_eq!((tree.get(1), tree.get(6)), (Some(10), Some(60)));
        });
    }

    /// Removals merge two leaves; the right one is freed and may be reused.
    #[test]
    fn reader_beside_merge() {
        model(|| {
            let tree = tree_with(&[(1, 10), (3, 30), (5, 50), (7, 70)]);
            // One more removal, and the left leaf is empty.
            assert_eq!(tree.remove(3), Some(30));
            let writer = tree.clone();
            let writer = thread::spawn(move || assert_eq!(writer.remove(1), Some(10)));
            let other = tree.clone();
            let thread = thread::spawn(move || {
                assert_eq!(other.get(7), Some(70));
                if other.get(1).is_none() {
                    assert_eq!(other.get(1), None);
                }
                assert_eq!(other.get(5), Some(50));
            });
            writer.join().unwrap();
            thread.join().unwrap();
            assert_eq!((tree.get(1), tree.get(7)), (None, Some(70)));
        });
    }

    #[test]
    fn scan_beside_split() {
        model(|| {
            let tree = tree_with(&[(1, 10), (5, 50), (7, 70)]);
            let other = tree.clone();
            let thread = thread::spawn(move || {
                let keys: Vec<_> = other.scan(..).map(|(key, _)| key).filter(|&key| key != 6).collect();
                assert_eq!(keys, [1, 5, 7]);
            });
            assert_eq!(tree.insert_or_replace(6, 60), Ok(None));
            thread.join().unwrap();
        });
    }

    #[test]
    fn two_writers_of_one_key() {
        model(|| {
            let tree = tree_with(&[(1, 10)]);
            let other = tree.clone();
            let thread = thread::spawn(move || other.insert_or_replace(1, 11).unwrap());
            let other = tree.clone();
            let second = thread::spawn(move || other.insert_or_replace(1, 12).unwrap());
            match (second.join().unwrap(), thread.join().unwrap()) {
                (Some(10), Some(12)) => assert_eq!(tree.get(1), Some(11)),
                (Some(11), Some(10)) => assert_eq!(tree.get(1), Some(12)),
                outcome => panic!("{outcome:?}"),
            }
        });
    }
}
