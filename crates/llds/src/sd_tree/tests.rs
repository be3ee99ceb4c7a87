//! Invariants tested from inside: with sync points inside operations, and with small trees.

#![cfg(not(loom))]

use super::sync_points::{Point, SYNC};
use super::*;
use std::collections::HashMap;
use std::sync::Mutex;

/// All tests share the process's clock: tests that need it to move, and tests that stop it, take turns.
static TURN: Mutex<()> = Mutex::new(());

/// A well-spread sequence of fingerprints (splitmix64).
/// A number for each index, anywhere.
fn spread(index: u64) -> u64 {
    fastrand::Rng::with_seed(index).u64(..)
}

#[test]
fn holds_what_was_inserted_while_growing() {
    let tree = SdTree::with_capacity_hint(0).unwrap();
    let count = 300_000;
    let mut taken = 0;
    for index in 0..count {
        match tree.get_or_insert(spread(index), index).unwrap() {
            None => taken += 1,
            // Another fingerprint with the same known bits: rare, and it must be one that is there.
            Some(other) => assert!(other < index),
        }
    }
    assert_eq!(tree.len(), taken);
    assert!(taken > count - 10, "{taken} of {count}");
    let stats = tree.stats();
    assert!(stats.level_max > FIRST_BITS_MIN + 2, "grew: {stats:?}");
    for index in 0..count {
        let exact = tree.get_with(spread(index), |value| value == index);
        assert!(exact.is_some() || tree.get(spread(index)).is_some(), "{index}");
    }
    let misses = (count..2 * count).filter(|&index| tree.get(spread(index)).is_some()).count();
    assert!(misses < 60, "{misses} false matches in {count}");
    eprintln!("{stats:?}: {:.2} bytes per leaf", stats.memory_bytes as f64 / stats.leaf_count as f64);
}

#[test]
#[cfg(not(pagefold_stress))]
fn dense_tree_holds_the_same_in_fewer_buckets() {
    let trees = [SdTree::dense(0, true).unwrap(), SdTree::with_capacity_hint(0).unwrap()];
    for tree in &trees {
        for index in 0..300_000 {
            tree.get_or_insert_with(spread(index), index, |value| value == index).unwrap();
        }
        assert!((0..300_000).all(|index| tree.get_with(spread(index), |value| value == index) == Some(index)));
    }
    // Not bytes: children are reused only as other tests let the epochs advance.
    let [dense, quick] = trees.map(|tree| tree.stats().bucket_count);
    assert!(dense * 5 < quick * 4, "{dense} and {quick} buckets");
}

#[test]
fn threads_that_insert_one_fingerprint_agree_on_one_winner() {
    let threads = 4;
    let count = 20_000;
    let tree = SdTree::with_capacity_hint(0).unwrap();
    let outcomes: Vec<Vec<u64>> = std::thread::scope(|scope| {
        let handles: Vec<_> = (0..threads)
            .map(|thread| {
                let tree = &tree;
                scope.spawn(move || {
                    (0..count)
                        .map(|index| {
                            let own = index * threads + thread;
                            let check = |value: u64| value / threads == index;
                            tree.get_or_insert_with(spread(index), own, check).unwrap().unwrap_or(own)
                        })
                        .collect()
                })
            })
            .collect();
        handles.into_iter().map(|handle| handle.join().unwrap()).collect()
    });
    for index in 0..count as usize {
        let winner = outcomes[0][index];
        assert!(outcomes.iter().all(|outcome| outcome[index] == winner), "two winners for {index}");
        assert_eq!(tree.get_with(spread(index as u64), |value| value / threads == index as u64), Some(winner));
    }
    assert_eq!(tree.len(), count);
}

#[test]
fn churn_beside_growth_keeps_every_threads_keys() {
    let tree = SdTree::with_capacity_hint(0).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let tree = &tree;
            scope.spawn(move || {
                // Each thread owns its values; the exact check keeps foreign leaves apart.
                let mut oracle = HashMap::new();
                for step in 0..60_000u64 {
                    let random = spread((step << 8) | thread);
                    let index = ((random % 6_000) << 2) | thread;
                    let (key, mine) = (spread(index), |value: u64| value & 0x3f_ffff == index);
                    let fresh = (step & 0xffff) << 22 | index;
                    match random >> 60 {
                        0..=6 => {
                            let seen = tree.get_or_insert_with(key, fresh, mine).unwrap();
                            assert_eq!(seen, oracle.get(&index).copied());
                            oracle.entry(index).or_insert(fresh);
                        }
                        7..=9 => {
                            let old = oracle.get(&index).copied().unwrap_or(fresh);
                            assert_eq!(tree.remove(key, old), oracle.remove(&index).is_some());
                        }
                        10..=11 => {
                            if let Some(old) = oracle.get_mut(&index) {
                                assert!(
                                    tree.replace(key, *old, fresh),
                                    "{:?} {:?}",
                                    tree.get_with(key, mine),
                                    tree.trace(key)
                                );
                                *old = fresh;
                            } else {
                                assert!(!tree.replace(key, fresh, fresh));
                            }
                        }
                        _ => assert_eq!(tree.get_with(key, mine), oracle.get(&index).copied(), "index {index}"),
                    }
                }
                for (&index, &value) in &oracle {
                    assert_eq!(tree.get_with(spread(index), |value| value & 0x3f_ffff == index), Some(value));
                }
            });
        }
        // A sweep that finds no dead leaf runs beside them, and cuts empty children off.
        let tree = &tree;
        scope.spawn(move || {
            let mut cursor = SweepCursor::new();
            while cursor.passes() < 20 {
                assert_eq!(tree.retain(&mut cursor, 64, |_| true), 0);
            }
        });
    });
}

#[test]
fn batches_give_what_single_operations_give() {
    let tree = SdTree::with_capacity_hint(1000).unwrap();
    let pairs: Vec<_> = (0..50_000).map(|index| (spread(index % 40_000), index)).collect();
    let mut existing = vec![None; pairs.len()];
    tree.get_or_insert_many(&pairs, &mut existing).unwrap();
    for (&(key, _), existing) in pairs.iter().zip(&existing).skip(40_000) {
        assert_eq!(*existing, tree.get(key));
    }
    let keys: Vec<_> = (0..90_001).map(spread).collect();
    let mut found = vec![Some(1); keys.len()];
    tree.lookup_many(&keys, &mut found);
    for (&key, &found) in keys.iter().zip(&found) {
        assert_eq!(found, tree.get(key));
    }
}

#[test]
fn sweep_removes_the_dead_and_gives_children_back() {
    let _turn = TURN.lock();
    let tree = SdTree::with_capacity_hint(0).unwrap();
    for index in 0..20_000 {
        tree.get_or_insert_with(spread(index), index, |value| value == index).unwrap();
    }
    let before = tree.stats();
    assert!(before.child_count > 0);
    let mut cursor = SweepCursor::new();
    let mut removed = 0;
    while cursor.passes() < 6 {
        removed += tree.retain(&mut cursor, 100, |value| value % 10 == 0);
    }
    assert_eq!(removed, 18_000);
    assert_eq!(tree.len(), 2_000);
    for index in 0..20_000 {
        let found = tree.get_with(spread(index), |value| value == index);
        assert_eq!(found, (index % 10 == 0).then_some(index));
    }
    // Threads of other tests are pinned for moments, and children are reused only when they are not.
    for _ in 0..100_000 {
        tree.retain(&mut cursor, 100, |_| true);
        tree.reclaim_retired();
        if tree.stats().child_count < before.child_count / 2 {
            break;
        }
        std::thread::yield_now();
    }
    let after = tree.stats();
    assert!(after.child_count < before.child_count / 2, "{before:?} {after:?}");
}

#[test]
fn hostile_keys_end_in_full_and_harm_no_other_key() {
    let tree = SdTree::with_capacity_hint(1000).unwrap();
    let mut fitted = 0;
    let refused = (0..100_000u64).find(|&index| {
        let hostile = 0xabcd_ef00_0000_0000 | index.reverse_bits() >> 40;
        match tree.get_or_insert_with(hostile, index, |value| value == index) {
            Ok(_) => {
                fitted += 1;
                false
            }
            Err(Full) => true,
        }
    });
    assert!(refused.is_some(), "{fitted} keys with 24 equal leading bits fitted");
    let children = tree.stats().child_count;
    assert!(children <= u64::from(DEPTH_MAX) + 2, "{children} children");
    for index in 0..1000 {
        tree.get_or_insert_with(spread(index), index, |value| value == index).unwrap();
    }
}

#[test]
fn all_keys_equal_is_one_leaf() {
    let tree = SdTree::with_capacity_hint(0).unwrap();
    assert_eq!(tree.get_or_insert(7, 1), Ok(None));
    for value in 2..100_000 {
        assert_eq!(tree.get_or_insert(7, value), Ok(Some(1)));
    }
    assert_eq!(tree.len(), 1);
}

/// Runs `work` in a thread that stops for good (until the test ends) at the given point, and `meanwhile` here.
fn with_stopped_thread(point: Point, work: impl FnOnce() + Send, meanwhile: impl FnOnce()) -> bool {
    let (reached_send, reached) = std::sync::mpsc::channel();
    let (go_send, go) = std::sync::mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let ended = reached_send.clone();
            let stopped = std::cell::Cell::new(false);
            SYNC.set(Some(Box::new(move |at| {
                if at == point && !stopped.replace(true) {
                    reached_send.send(true).unwrap();
                    let _ = go.recv();
                }
            })));
            work();
            SYNC.set(None);
            let _ = ended.send(false);
        });
        let stopped = reached.recv().unwrap();
        meanwhile();
        drop(go_send);
        stopped
    })
}

#[test]
fn a_stopped_thread_blocks_no_other() {
    let _turn = TURN.lock();
    use Point::*;
    for point in [Claimed, Written, Moving, Linked, Frozen, HalfCopied] {
        let tree = SdTree::with_capacity_hint(0).unwrap();
        let exactly = |index: u64| move |value: u64| value & 0xfff_ffff == index;
        let stopped = with_stopped_thread(
            point,
            || {
                for index in 0..30_000 {
                    tree.get_or_insert_with(spread(index), 1 << 30 | index, exactly(index)).unwrap();
                }
            },
            || {
                for index in 0..60_000 {
                    tree.get_or_insert_with(spread(index), index, exactly(index)).unwrap();
                }
                for index in 0..60_000 {
                    let value = tree.get_with(spread(index), exactly(index)).expect("inserted");
                    assert!(tree.replace(spread(index), value, 2 << 30 | index));
                }
                // Growing keeps up, although the stopped thread claimed buckets that it does not move.
                let stats = tree.stats();
                assert!(stats.bucket_count * LOAD_TENTHS >= stats.leaf_count * 9, "{point:?} {stats:?}");
                let mut cursor = SweepCursor::new();
                while cursor.passes() < 2 {
                    tree.retain(&mut cursor, 1000, |value| value & 0xfff_ffff < 50_000);
                }
                for index in 0..40_000 {
                    assert!(tree.remove(spread(index), 2 << 30 | index), "{point:?} {index}");
                }
                assert_eq!(
                    (0..60_000).filter(|&index| tree.get_with(spread(index), exactly(index)).is_some()).count(),
                    10_000
                );
            },
        );
        assert!(stopped, "{point:?} was never reached");
    }
}

/// A thread stays pinned while the array doubles twice: both parts are released when it continues.
#[test]
fn array_parts_that_wait_for_one_pin_are_all_released() {
    let _turn = TURN.lock();
    // Every section's part of the first array is of 2 MiB together with its neighbours'.
    let tree = SdTree::with_pages(((1 << 15) * LOAD_TENTHS / 10) as usize, false).unwrap();
    assert_eq!((tree.first_bits, tree.ahead), (15, 0));
    let pin = crate::epoch::pin();
    let mut inserted = 0;
    while tree.stats().level_min < 17 {
        for _ in 0..1000 {
            tree.get_or_insert(spread(inserted), inserted).unwrap();
            inserted += 1;
        }
    }
    tree.release_arrays();
    // No bucket that was moved is zero.
    let held = |bits: u32| (1u64 << bits..2 << bits).filter(|&line| tree.memory.load_control(line).0 != 0).count();
    assert_eq!((held(15), held(16)), (1 << 15, 1 << 16), "released under a pin");
    drop(pin);
    let spins_left = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while (held(15), held(16)) != (0, 0) {
        assert!(std::time::Instant::now() < spins_left, "{} and {} buckets are kept", held(15), held(16));
        tree.release_arrays();
        std::thread::yield_now();
    }
    assert!((0..inserted).all(|index| tree.get(spread(index)).is_some()));
}

#[test]
fn one_memory_at_two_addresses_is_one_tree() {
    use std::os::fd::AsFd;
    let file = tempfile::tempfile().unwrap();
    // SAFETY: the file is empty and only this test has it; both handles are in this process.
    let first = unsafe { SdTree::create_in(file.as_fd(), 100) }.unwrap();
    // SAFETY: only this test has the file; both handles are in this process.
    let second = unsafe { SdTree::attach(file.as_fd()) }.unwrap();
    assert_ne!(first.memory.control(0) as *const _, second.memory.control(0) as *const _);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            (0..20_000).for_each(|index| {
                first.get_or_insert(spread(index), index).unwrap();
            })
        });
        scope.spawn(|| {
            (20_000..40_000).for_each(|index| {
                second.get_or_insert(spread(index), index).unwrap();
            })
        });
    });
    for index in 0..40_000 {
        assert!(first.get(spread(index)).is_some());
        assert_eq!(first.get(spread(index)), second.get(spread(index)));
    }
    assert_eq!(first.stats(), second.stats());
}

#[test]
fn foreign_memory_is_refused() {
    use std::os::fd::AsFd;
    let file = tempfile::tempfile().unwrap();
    // SAFETY: only this test has the file.
    assert!(unsafe { SdTree::attach(file.as_fd()) }.is_err(), "empty");
    file.set_len(1 << 20).unwrap();
    // SAFETY: only this test has the file; both handles are in this process.
    assert!(unsafe { SdTree::attach(file.as_fd()) }.is_err(), "zeros");
    // SAFETY: only this test has the file, and all of it is zeros.
    let tree = unsafe { SdTree::create_in(file.as_fd(), 100) }.unwrap();
    tree.memory.word(header::HEAD, 1).store(0xffff, Ordering::Relaxed);
    // SAFETY: only this test has the file; both handles are in this process.
    assert!(unsafe { SdTree::attach(file.as_fd()) }.is_err(), "geometry out of range");
}

mod keys {
    use super::super::key::*;
    use super::*;

    struct Stored<T>(Vec<T>);

    impl<T: Key> Resolve for Stored<T> {
        fn with_key<U>(&self, value: u64, read: impl FnOnce(&[u8]) -> U) -> U {
            read(self.0[value as usize].bytes().as_ref())
        }
    }

    fn page(index: u64) -> [u8; 4096] {
        let mut page = [0; 4096];
        // Equal in all but eight bytes at the end: the most expensive case for a tree over content.
        page[4088..].copy_from_slice(&spread(index).to_le_bytes());
        page
    }

    #[test]
    fn each_key_byte_is_read_once_and_once_more_to_prove_a_match() {
        let pages: Vec<_> = (0..2_000).map(page).collect();
        let tree = Exact::new(SdTree::with_capacity_hint(0).unwrap(), Stored(pages.clone()), 1234);
        for (value, page) in pages.iter().enumerate() {
            assert_eq!(tree.get_or_insert(page, value as u64), Ok(None));
        }
        for (value, page) in pages.iter().enumerate() {
            let (found, reads) = tree.get_counted(page);
            assert_eq!(found, Some(value as u64));
            assert_eq!(reads.fingerprint_bytes, 4096);
            assert_eq!(reads.compared_bytes, 4096 * (1 + reads.false_matches));
        }
        let missed: u64 = (5_000..7_000)
            .map(|index| {
                let (found, reads) = tree.get_counted(&page(index));
                assert_eq!(found, None);
                reads.compared_bytes
            })
            .sum();
        assert!(missed <= 4096, "a miss compares nothing but once in a million");
    }

    #[test]
    fn keys_of_equal_fingerprints_stay_apart() {
        let stored: Vec<_> = (0..6u128).map(|low| Fingerprint128(0x77 << 64 | low)).collect();
        let tree = Exact::new(SdTree::with_capacity_hint(0).unwrap(), Stored(stored.clone()), 0);
        let fitting = SLOTS.min(stored.len());
        for (value, key) in stored.iter().enumerate().take(fitting) {
            assert_eq!(tree.get_or_insert(key, value as u64), Ok(None));
        }
        for (value, key) in stored.iter().enumerate() {
            assert_eq!(tree.get(key), (value < fitting).then_some(value as u64));
        }
    }

    #[test]
    fn fingerprints_depend_on_every_byte_and_the_seed() {
        let mut bytes: Vec<u8> = (0..200).map(|index| index as u8).collect();
        for len in 0..200 {
            let whole = fingerprint_bytes(&bytes[..len], 1);
            assert_ne!(whole, fingerprint_bytes(&bytes[..len], 2));
            for at in 0..len {
                bytes[at] ^= 1;
                assert_ne!(whole, fingerprint_bytes(&bytes[..len], 1), "byte {at} of {len}");
                bytes[at] ^= 1;
            }
        }
    }
}

#[test]
fn path_and_tag_read_each_fingerprint_bit_about_once() {
    let tree = SdTree::with_capacity_hint(0).unwrap();
    for index in 0..100_000 {
        tree.get_or_insert(spread(index), index).unwrap();
    }
    let (mut bits, mut lines) = (0, 0);
    for index in 0..100_000 {
        let reads = tree.trace(spread(index));
        bits += u64::from(reads.path_bits + reads.tag_bits);
        lines += u64::from(reads.lines);
    }
    let (bits, lines) = (bits as f64 / 1e5, lines as f64 / 1e5);
    eprintln!("{bits:.1} of 64 key bits and {lines:.3} lines per search");
    assert!(bits < 64.0, "{bits} bits read per search");
    if SLOTS == 7 {
        assert!(lines < 1.4, "{lines} lines per search");
    }
}

mod properties {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[derive(Clone, Debug)]
    enum Step {
        Insert(u64),
        InsertMany(Vec<u64>),
        Remove(u64),
        Replace(u64),
        Sweep(usize, u64),
        Get(u64),
    }

    /// Fingerprints of which many share a bucket, and some all but a few bits.
    fn fingerprints() -> impl Strategy<Value = u64> {
        prop_oneof![
            (0u64..4000).prop_map(spread),
            (0u64..64).prop_map(|low| 0x4321 << 48 | low << 42 | 1),
            (0u64..8, 0u64..200).prop_map(|(high, low)| high << 61 | spread(low) >> 9),
        ]
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            6 => fingerprints().prop_map(Step::Insert),
            1 => prop::collection::vec(fingerprints(), 1..80).prop_map(Step::InsertMany),
            3 => fingerprints().prop_map(Step::Remove),
            2 => fingerprints().prop_map(Step::Replace),
            1 => (1usize..400, 2u64..6).prop_map(|(buckets, modulus)| Step::Sweep(buckets, modulus)),
            2 => fingerprints().prop_map(Step::Get),
        ];
        prop::collection::vec(step, 0..800)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        /// Values are unique, so the map of value to fingerprint makes every match exact.
        #[test]
        fn behaves_as_a_btree_map(steps in steps()) {
            let tree = SdTree::with_capacity_hint(0).unwrap();
            let mut oracle: BTreeMap<u64, u64> = BTreeMap::new();
            let mut owner: Vec<u64> = vec![u64::MAX];
            let mut cursor = SweepCursor::new();
            for step in steps {
                match step {
                    Step::Insert(key) => {
                        let value = owner.len() as u64;
                        owner.push(key);
                        match tree.get_or_insert_with(key, value, |found| owner[found as usize] == key) {
                            Ok(existing) => {
                                prop_assert_eq!(existing, oracle.get(&key).copied());
                                oracle.entry(key).or_insert(value);
                            }
                            Err(Full) => prop_assert!(!oracle.contains_key(&key)),
                        }
                    }
                    Step::InsertMany(keys) => {
                        // Without a check a match may belong to another key; the returned value tells which.
                        let pairs: Vec<_> = keys.iter().enumerate().map(|(at, &key)| (key, (owner.len() + at) as u64)).collect();
                        owner.extend(&keys);
                        let mut existing = vec![None; pairs.len()];
                        if tree.get_or_insert_many(&pairs, &mut existing).is_err() {
                            for &(key, value) in &pairs {
                                if tree.get_with(key, |found| found == value).is_some() {
                                    oracle.insert(key, value);
                                }
                            }
                            continue;
                        }
                        for (&(key, value), existing) in pairs.iter().zip(existing) {
                            match existing {
                                None => prop_assert_eq!(oracle.insert(key, value), None),
                                Some(found) => prop_assert_eq!(oracle[&owner[found as usize]], found),
                            }
                        }
                    }
                    Step::Remove(key) => {
                        let value = oracle.get(&key).copied().unwrap_or(VALUE_MAX);
                        prop_assert_eq!(tree.remove(key, value), oracle.remove(&key).is_some());
                    }
                    Step::Replace(key) => {
                        let fresh = owner.len() as u64;
                        owner.push(key);
                        match oracle.get_mut(&key) {
                            // Refused only for lack of room; then nothing has changed.
                            Some(value) => {
                                if tree.replace(key, *value, fresh) {
                                    *value = fresh;
                                }
                            }
                            None => prop_assert!(!tree.replace(key, VALUE_MAX, fresh)),
                        }
                    }
                    Step::Sweep(buckets, modulus) => {
                        tree.retain(&mut cursor, buckets, |value| value % modulus != 0);
                        oracle.retain(|&key, &mut value| tree.get_with(key, |found| found == value).is_some() || value % modulus != 0);
                    }
                    Step::Get(key) => {
                        let found = tree.get_with(key, |found| owner[found as usize] == key);
                        prop_assert_eq!(found, oracle.get(&key).copied());
                    }
                }
                prop_assert_eq!(tree.len(), oracle.len() as u64);
            }
            for (&key, &value) in &oracle {
                prop_assert_eq!(tree.get_with(key, |found| owner[found as usize] == key), Some(value));
            }
        }
    }
}

#[test]
fn a_sweep_takes_no_leaf_that_it_did_not_ask_about() {
    let tree = SdTree::with_capacity_hint(0).unwrap();
    tree.get_or_insert(spread(1), 7).unwrap();
    let mut asked = 0;
    let mut cursor = SweepCursor::new();
    while cursor.passes() == 0 {
        tree.retain(&mut cursor, 64, |value| {
            asked += 1;
            if asked == 1 {
                // Another user of the value ends and a new one begins, in the same slot.
                assert!(tree.remove(spread(1), value));
                assert_eq!(tree.get_or_insert(spread(1), value).unwrap(), None);
            }
            asked != 1
        });
    }
    assert_eq!((tree.get(spread(1)), asked), (Some(7), 2));
}
