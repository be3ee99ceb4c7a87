//! A store with key order answers as a `BTreeMap` does, both ways, whatever the keys' lengths; and threads that insert
//! and delete concurrently leave table and order with the same keys.

use forrest::{Error, Options, Store};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::ops::Bound;

#[derive(Clone, Debug)]
enum Op {
    Set(Vec<u8>, Vec<u8>),
    Insert(Vec<u8>, Vec<u8>),
    Delete(Vec<u8>),
    Add(Vec<u8>),
    Swap(Vec<u8>, bool),
    Scan(Bound<Vec<u8>>, Bound<Vec<u8>>, Vec<bool>),
    Clear,
}

/// Few different bytes, and lengths around the 15 that the tree holds: keys that are each other's beginnings.
fn keys() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![prop::collection::vec(0u8..3, 0..4), prop::collection::vec(1u8..3, 13..18)]
}

fn bounds() -> impl Strategy<Value = Bound<Vec<u8>>> {
    prop_oneof![keys().prop_map(Bound::Included), keys().prop_map(Bound::Excluded), Just(Bound::Unbounded)]
}

fn ops() -> impl Strategy<Value = Op> {
    let values = || prop::collection::vec(any::<u8>(), 0..12);
    prop_oneof![
        6 => (keys(), values()).prop_map(|(key, value)| Op::Set(key, value)),
        2 => (keys(), values()).prop_map(|(key, value)| Op::Insert(key, value)),
        3 => keys().prop_map(Op::Delete),
        1 => keys().prop_map(Op::Add),
        1 => (keys(), any::<bool>()).prop_map(|(key, keep)| Op::Swap(key, keep)),
        3 => (bounds(), bounds(), prop::collection::vec(any::<bool>(), 0..40)).prop_map(|(a, b, c)| Op::Scan(a, b, c)),
        1 => Just(Op::Clear),
    ]
}

fn by_ref(bound: &Bound<Vec<u8>>) -> Bound<&Vec<u8>> {
    match bound {
        Bound::Included(key) => Bound::Included(key),
        Bound::Excluded(key) => Bound::Excluded(key),
        Bound::Unbounded => Bound::Unbounded,
    }
}

/// Takes from the front or the back as `sides` says, then the rest from the front.
fn pull<I: DoubleEndedIterator>(mut iterator: I, sides: &[bool]) -> Vec<I::Item> {
    let mut out = Vec::new();
    for &back in sides {
        out.extend(if back { iterator.next_back() } else { iterator.next() });
    }
    out.extend(iterator);
    out
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
    #[test]
    fn equals_a_btree_map(ops in prop::collection::vec(ops(), 1..200)) {
        let store = Options::new().limit_bytes(64 << 20).ordered().private().unwrap();
        let mut model: BTreeMap<Vec<u8>, Vec<u8>> = BTreeMap::new();
        for op in ops {
            match op {
                Op::Set(key, value) => {
                    prop_assert_eq!(store.set(&key, &value).unwrap(), model.insert(key, value).is_some());
                }
                Op::Insert(key, value) => {
                    let absent = !model.contains_key(&key);
                    prop_assert_eq!(store.insert(&key, &value).unwrap(), absent);
                    model.entry(key).or_insert(value);
                }
                Op::Delete(key) => prop_assert_eq!(store.delete(&key).unwrap(), model.remove(&key).is_some()),
                Op::Add(key) => {
                    let now = model.get(&key).cloned().unwrap_or_else(|| vec![0; 8]);
                    match <[u8; 8]>::try_from(&now[..]) {
                        Ok(bytes) => {
                            let sum = i64::from_le_bytes(bytes).wrapping_add(3);
                            prop_assert_eq!(store.add(&key, 3).unwrap(), sum);
                            model.insert(key, sum.to_le_bytes().to_vec());
                        }
                        Err(_) => prop_assert!(store.add(&key, 3).is_err()),
                    }
                }
                Op::Swap(key, keep) => {
                    let expected = model.get(&key).cloned();
                    let new = keep.then_some(&b"new"[..]);
                    prop_assert!(store.compare_swap(&key, expected.as_deref(), new).unwrap());
                    match new {
                        Some(value) => model.insert(key, value.to_vec()),
                        None => model.remove(&key),
                    };
                }
                Op::Scan(low, high, sides) => {
                    let empty = match (&low, &high) {
                        (Bound::Unbounded, _) | (_, Bound::Unbounded) => false,
                        (Bound::Excluded(a), Bound::Excluded(b)) => a >= b,
                        (Bound::Included(a) | Bound::Excluded(a), Bound::Included(b) | Bound::Excluded(b)) => a > b,
                    };
                    // The standard library panics at a range that ends before it begins; ours is empty.
                    let expected = if empty {
                        Vec::new()
                    } else {
                        let range = model.range::<Vec<u8>, _>((by_ref(&low), by_ref(&high)));
                        pull(range.map(|(key, value)| (key.clone(), value.clone())), &sides)
                    };
                    let scan = store.scan((by_ref(&low), by_ref(&high))).unwrap();
                    prop_assert_eq!(pull(scan.map(|(key, value)| (key, value.to_vec())), &sides), expected);
                }
                Op::Clear => prop_assert_eq!(store.clear().unwrap(), std::mem::take(&mut model).len() as u64),
            }
        }
        let all: Vec<_> = store.scan::<[u8]>(..).unwrap().map(|(key, value)| (key, value.to_vec())).collect();
        prop_assert_eq!(all, model.into_iter().collect::<Vec<_>>());
        store.check().unwrap();
    }
}

#[test]
fn threads_leave_table_and_order_equal() {
    let store = Options::new().limit_bytes(256 << 20).ordered().private().unwrap();
    let fixed = |n: u32| {
        format!("fixed-{n:05}{}", if n.is_multiple_of(3) { " and so long that it goes by the lock" } else { "" })
    };
    for n in 0..300 {
        store.set(fixed(n).as_bytes(), &n.to_le_bytes()).unwrap();
    }
    std::thread::scope(|scope| {
        for thread in 0..3u64 {
            let store = &store;
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(thread);
                for _ in 0..20_000 {
                    let key = format!("x{}", random.u8(..200));
                    if random.bool() {
                        store.set(key.as_bytes(), b"1").unwrap();
                    } else {
                        store.delete(key.as_bytes()).unwrap();
                    }
                }
            });
        }
        // What is there all the time is in every scan, in order, from both sides.
        for round in 0..50 {
            let mut keys: Vec<_> = store.scan(&b"fixed"[..]..&b"g"[..]).unwrap().map(|(key, _)| key).collect();
            assert_eq!(keys.len(), 300, "round {round}");
            assert!(keys.is_sorted());
            keys.reverse();
            let back: Vec<_> = store.scan::<[u8]>(..&b"g"[..]).unwrap().rev().map(|(key, _)| key).collect();
            assert_eq!(back, keys);
        }
    });
    let mut entries = Vec::new();
    store
        .for_each(|key, _| {
            entries.push(key.to_vec());
            true
        })
        .unwrap();
    entries.sort();
    let scanned: Vec<_> = store.scan::<[u8]>(..).unwrap().map(|(key, _)| key).collect();
    assert_eq!(scanned, entries);
}

#[test]
fn order_is_refused_where_it_cannot_be() {
    assert!(matches!(Store::new().unwrap().scan::<[u8]>(..), Err(Error::NotOrdered)));
    assert!(matches!(Options::new().ordered().open("ordered"), Err(Error::OrderedShared)));
}

#[test]
fn a_forked_child_is_refused_a_scan() {
    let store = Options::new().ordered().private().unwrap();
    for number in 0..1000u64 {
        store.set(&number.to_be_bytes(), b"value").unwrap();
    }
    let mut begun = store.scan::<[u8]>(..).unwrap();
    assert!(begun.next().is_some());
    // SAFETY: the child only reads memory and leaves by _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = store.scan::<[u8]>(..).is_err_and(|error| error.to_string().contains("fork"));
        // What it had read before the fork, and no more.
        let ends = begun.count() < 999;
        // SAFETY: _exit ends the child without running destructors of the parent's threads.
        unsafe { libc::_exit(i32::from(!(refused && ends))) };
    }
    let mut status = 0;
    // SAFETY: waitpid writes only the status; the child was just forked.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(status, 0);
    assert_eq!(begun.count(), 999);
}
