//! Invariants of the B-tree.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::ops::Bound;

/// A number for each index, anywhere.
fn spread(index: u64) -> u64 {
    fastrand::Rng::with_seed(index).u64(..)
}

impl<K: FixedKey> BTree<K> {
    /// Walks the whole tree: order, bounds, levels, and that every node is counted.
    fn check(&self) {
        let root = self.pool.word(ANCHOR, 1).load(Ordering::Relaxed);
        let mut nodes = 0;
        let mut entries = 0;
        self.check_node(root, None, None, None, &mut nodes, &mut entries);
        assert_eq!(nodes, self.pool.used(), "every node in use is in the tree");
        assert_eq!(entries, self.len());
    }

    fn check_node(
        &self,
        node: u64,
        level: Option<u32>,
        low: Option<K>,
        high: Option<K>,
        nodes: &mut u64,
        entries: &mut u64,
    ) {
        *nodes += 1;
        assert!(self.pool.read_version(node).is_some(), "node {node} is alive and unlocked");
        let shape = self.pool.shape(node);
        assert!(level.is_none_or(|level| level == shape.level));
        assert!(shape.count <= Self::capacity(shape));
        let keys: Vec<K> = (0..shape.count).map(|index| self.pool.key(node, index)).collect();
        assert!(keys.is_sorted_by(|a, b| a < b), "{keys:?}");
        assert!(keys.iter().all(|&key| low.is_none_or(|low| key >= low) && high.is_none_or(|high| key < high)));
        if shape.level == 0 {
            *entries += shape.count as u64;
            return;
        }
        for index in 0..=shape.count {
            let low = if index > 0 { Some(keys[index - 1]) } else { low };
            let high = if index < shape.count { Some(keys[index]) } else { high };
            self.check_node(self.pool.child::<K>(node, index), Some(shape.level - 1), low, high, nodes, entries);
        }
    }
}

fn fill_and_empty<K: FixedKey>(key: impl Fn(u64) -> K, count: u64) {
    let tree = BTree::<K>::new().unwrap();
    for index in 0..count {
        assert_eq!(tree.insert_or_replace(key(index), index), Ok(None));
    }
    tree.check();
    let full = tree.stats();
    eprintln!("{full:?}: {:.2} bytes per entry", full.memory_bytes as f64 / count as f64);
    for index in 0..count {
        assert_eq!(tree.get(key(index)), Some(index));
        assert_eq!(tree.get_or_insert(key(index), 1), Ok(Some(index)));
        assert_eq!(tree.insert_or_replace(key(index), index + 1), Ok(Some(index)));
    }
    for index in 0..count {
        assert_eq!(tree.remove(key(index)), Some(index + 1));
        assert_eq!(tree.remove(key(index)), None);
    }
    tree.check();
    let empty = tree.stats();
    assert_eq!((empty.entry_count, empty.height), (0, 0), "{empty:?}");
    assert!(empty.node_count < 4, "{empty:?}");
    assert!(empty.memory_bytes < full.memory_bytes / 4 || full.memory_bytes < 8 << 20, "memory returns: {empty:?}");
}

#[test]
fn fills_and_empties_in_random_order() {
    fill_and_empty(spread, 200_000);
}

#[test]
fn fills_and_empties_in_ascending_order() {
    fill_and_empty(|index| index, 100_000);
}

#[test]
fn fills_and_empties_in_descending_order() {
    fill_and_empty(|index| u64::MAX - index, 100_000);
}

#[test]
fn fills_and_empties_with_wide_keys() {
    fill_and_empty(|index| u128::from(spread(index)) << 64 | u128::from(spread(!index)), 50_000);
    fill_and_empty(|index| (index % 7, spread(index)), 50_000);
}

#[test]
fn entries_stay_dense_under_random_inserts() {
    let tree = BTree::<u64>::new().unwrap();
    for index in 0..400_000 {
        tree.insert_or_replace(spread(index), index).unwrap();
    }
    let bytes = tree.memory_bytes() as f64 / tree.len() as f64;
    assert!(bytes <= 21.0 || NODE_LINES < 8, "{bytes} bytes per entry");
}

#[test]
fn bulk_load_is_full_and_whole() {
    for count in [0, 1, 2, 31, 32, 33, 1000, 1271, 1272, 1303, 100_000] {
        let tree = BTree::from_sorted((0..count).map(|index| (index * 3, index))).unwrap();
        tree.check();
        assert_eq!(tree.len(), count);
        for index in 0..count {
            assert_eq!(tree.get(index * 3), Some(index));
            assert_eq!(tree.get(index * 3 + 1), None);
        }
        assert!(tree.scan(..).map(|(key, _)| key).eq((0..count).map(|index| index * 3)));
        for index in 0..count {
            assert_eq!(tree.insert_or_replace(index * 3 + 1, index), Ok(None));
        }
        tree.check();
    }
    assert!(matches!(BTree::from_sorted([(1u64, 0), (1, 0)]), Err(BuildError::NotAscending { index: 1 })));
}

#[test]
fn batches_give_what_single_lookups_give() {
    let tree = BTree::<u64>::new().unwrap();
    for index in 0..50_000 {
        tree.insert_or_replace(spread(index), index).unwrap();
    }
    let keys: Vec<_> = (0..60_001).map(spread).collect();
    let mut found = vec![Some(9); keys.len()];
    tree.get_many(&keys, &mut found);
    for (index, found) in found.iter().enumerate() {
        assert_eq!(*found, (index < 50_000).then_some(index as u64));
    }
}

#[test]
fn threads_keep_their_keys_beside_each_other() {
    let tree = BTree::<u64>::new().unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..3u64)
            .map(|thread| {
                let tree = &tree;
                scope.spawn(move || {
                    let mut oracle = BTreeMap::new();
                    for step in 0..80_000u64 {
                        let random = spread(step << 8 | thread);
                        // Grows, then shrinks: splits, then merges.
                        let key = (random % 30_000) * 4 + thread;
                        let inserts = if step < 40_000 { 6 } else { 2 };
                        if random >> 61 < inserts {
                            assert_eq!(tree.insert_or_replace(key, step), Ok(oracle.insert(key, step)));
                        } else if random >> 61 < 7 {
                            assert_eq!(tree.remove(key), oracle.remove(&key));
                        } else {
                            assert_eq!(tree.get(key), oracle.get(&key).copied());
                        }
                    }
                    oracle
                })
            })
            .collect();
        // A key that is always there is always found, and scans are always in order.
        let (tree, stop) = (&tree, &stop);
        tree.insert_or_replace(60_003, 7).unwrap();
        let reader = scope.spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                assert_eq!(tree.get(60_003), Some(7));
                let mut found = [None; 2];
                tree.get_many(&[60_003, 60_007], &mut found);
                assert_eq!(found, [Some(7), None]);
                let keys: Vec<_> = tree.scan(50_000..70_000).map(|(key, _)| key).collect();
                assert!(keys.is_sorted_by(|a, b| a < b) && keys.contains(&60_003));
                let keys: Vec<_> = tree.scan(50_000..70_000).rev().map(|(key, _)| key).collect();
                assert!(keys.is_sorted_by(|a, b| a > b) && keys.contains(&60_003));
            }
        });
        let mut all = BTreeMap::from([(60_003, 7)]);
        for worker in workers {
            all.extend(worker.join().unwrap());
        }
        stop.store(true, Ordering::Relaxed);
        reader.join().unwrap();
        assert!(tree.scan(..).eq(all));
    });
    tree.check();
}

#[derive(Clone, Debug)]
enum Step {
    Insert(u16, u64),
    Offer(u16, u64),
    Remove(u16),
    Get(u16),
    Scan(Bound<u16>, Bound<u16>, bool),
}

fn bounds() -> impl Strategy<Value = Bound<u16>> {
    prop_oneof![(0u16..600).prop_map(Bound::Included), (0u16..600).prop_map(Bound::Excluded), Just(Bound::Unbounded)]
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0u16..600, any::<u64>()).prop_map(|(key, value)| Step::Insert(key, value)),
        1 => (0u16..600, any::<u64>()).prop_map(|(key, value)| Step::Offer(key, value)),
        3 => (0u16..600).prop_map(Step::Remove),
        1 => (0u16..600).prop_map(Step::Get),
        1 => (bounds(), bounds(), any::<bool>()).prop_map(|(low, high, back)| Step::Scan(low, high, back)),
    ];
    prop::collection::vec(step, 0..1200)
}

fn in_order(low: Bound<u64>, high: Bound<u64>) -> bool {
    match (low, high) {
        (Bound::Excluded(low), Bound::Excluded(high)) => low < high,
        (Bound::Included(low) | Bound::Excluded(low), Bound::Included(high) | Bound::Excluded(high)) => low <= high,
        _ => true,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn behaves_as_a_btree_map(steps in steps()) {
        let tree = BTree::<u64>::new().unwrap();
        let mut oracle = BTreeMap::new();
        for step in steps {
            match step {
                Step::Insert(key, value) => {
                    prop_assert_eq!(tree.insert_or_replace(key.into(), value), Ok(oracle.insert(u64::from(key), value)));
                }
                Step::Offer(key, value) => {
                    let old = oracle.get(&u64::from(key)).copied();
                    oracle.entry(key.into()).or_insert(value);
                    prop_assert_eq!(tree.get_or_insert(key.into(), value), Ok(old));
                }
                Step::Remove(key) => prop_assert_eq!(tree.remove(key.into()), oracle.remove(&u64::from(key))),
                Step::Get(key) => prop_assert_eq!(tree.get(key.into()), oracle.get(&u64::from(key)).copied()),
                Step::Scan(low, high, back) => {
                    let (low, high) = (low.map(u64::from), high.map(u64::from));
                    let scan = tree.scan((low, high));
                    if !in_order(low, high) {
                        prop_assert_eq!(scan.count(), 0);
                        continue;
                    }
                    let range = oracle.range((low, high)).map(|(&key, &value)| (key, value));
                    if back {
                        prop_assert!(scan.rev().eq(range.rev()));
                    } else {
                        prop_assert!(scan.eq(range));
                    }
                }
            }
        }
        tree.check();
    }
}

#[test]
fn scan_from_both_ends_meets_in_the_middle() {
    let tree = BTree::from_sorted((0..1000u64).map(|key| (key, key))).unwrap();
    let mut scan = tree.scan(100..900);
    let mut seen = Vec::new();
    while let Some((key, _)) = scan.next() {
        seen.push(key);
        if let Some((key, _)) = scan.next_back() {
            seen.push(key);
        }
    }
    seen.sort_unstable();
    assert_eq!(seen, (100..900).collect::<Vec<_>>());
}
