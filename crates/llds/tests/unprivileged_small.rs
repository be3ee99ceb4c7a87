//! Both trees with so few keys that an interpreter of Rust, which checks each access, gets to the end:
//! `tests/miri`. With the small nodes of `--cfg pagefold_stress` nodes split and merge all the same.
#![cfg(not(loom))]

use fastrand::Rng;
use llds::b_tree::BTree;
use llds::sd_tree::{SdTree, SweepCursor};
use std::collections::{BTreeMap, BTreeSet};

const THREADS: u64 = 3;
/// Operations of a thread.
const OPERATIONS: u64 = if cfg!(miri) { 120 } else { 20_000 };
/// Keys of a thread.
const KEYS: u64 = if cfg!(miri) { 40 } else { 2_000 };

/// Each thread keeps keys of its own beside those of the others, and knows what each of them has.
fn threads_keep_their_keys(work: impl Fn(u64, &mut Rng) + Sync) {
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let work = &work;
            scope.spawn(move || work(thread, &mut Rng::with_seed(thread)));
        }
    });
}

#[test]
fn a_b_tree_has_what_each_thread_put_there() {
    let tree = BTree::<u64>::new().unwrap();
    threads_keep_their_keys(|thread, random| {
        let mut expected = BTreeMap::new();
        for step in 0..OPERATIONS {
            let key = random.u64(..KEYS) * THREADS + thread;
            match random.u8(..4) {
                0 => assert_eq!(tree.remove(key), expected.remove(&key)),
                1 => assert_eq!(tree.get(key), expected.get(&key).copied()),
                _ => assert_eq!(tree.insert_or_replace(key, step).unwrap(), expected.insert(key, step)),
            }
        }
        let own = tree.scan(..).filter(|(key, _)| key % THREADS == thread);
        assert!(own.eq(expected), "thread {thread}");
    });
}

#[test]
fn an_sd_tree_has_what_each_thread_put_there() {
    let tree = SdTree::with_capacity_hint(0).unwrap();
    // A quarter of the buckets, so that they fill and get children.
    let fingerprint = |thread: u64, key: u64| Rng::with_seed(key * THREADS + thread).u64(..) >> 2;
    threads_keep_their_keys(|thread, random| {
        let mut expected = BTreeSet::new();
        let mut cursor = SweepCursor::new();
        for _ in 0..OPERATIONS {
            let key = random.u64(..KEYS);
            // A leaf knows a part of a fingerprint only: the value tells the key.
            let (place, value) = (fingerprint(thread, key), key * THREADS + thread);
            let is_same = |other| other == value;
            let found = expected.contains(&key).then_some(value);
            match random.u8(..8) {
                0 | 1 => assert_eq!(tree.remove(place, value), expected.remove(&key)),
                2 => assert_eq!(tree.get_with(place, is_same), found),
                // Nothing is dead, so a sweep takes nothing.
                3 => assert_eq!(tree.retain(&mut cursor, 4, |_| true), 0),
                _ => {
                    assert_eq!(tree.get_or_insert_with(place, value, is_same).unwrap(), found);
                    expected.insert(key);
                }
            }
        }
        for key in 0..KEYS {
            let value = key * THREADS + thread;
            let found = tree.get_with(fingerprint(thread, key), |other| other == value);
            assert_eq!(found.is_some(), expected.contains(&key));
        }
    });
}
