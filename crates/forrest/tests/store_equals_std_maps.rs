//! A store under any sequence of operations does what a std map does.

use forrest::{Hash, Options, Store};
use proptest::prelude::*;
use std::collections::HashMap;

#[derive(Clone, Debug)]
enum Op {
    Set(Vec<u8>, Vec<u8>),
    Insert(Vec<u8>, Vec<u8>),
    Delete(Vec<u8>),
    Take(Vec<u8>),
    Get(Vec<u8>),
    Add(Vec<u8>, i64),
    Swap(Vec<u8>, bool, Option<Vec<u8>>),
    Clear,
}

fn key() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        // Few keys, so that operations meet; 8 bytes and others, so that both kinds of entry change into each other.
        8 => (0u64..40).prop_map(|n| n.to_le_bytes().to_vec()),
        4 => (0u32..30).prop_map(|n| format!("key{n}").into_bytes()),
        1 => prop::collection::vec(any::<u8>(), 0..40),
    ]
}

fn value() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        4 => prop::collection::vec(any::<u8>(), 0..=8),
        3 => any::<u64>().prop_map(|n| n.to_le_bytes().to_vec()),
        2 => prop::collection::vec(any::<u8>(), 9..200),
        1 => (any::<u8>(), 1000usize..20_000).prop_map(|(byte, length)| vec![byte; length]),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        12 => (key(), value()).prop_map(|(k, v)| Op::Set(k, v)),
        4 => (key(), value()).prop_map(|(k, v)| Op::Insert(k, v)),
        6 => key().prop_map(Op::Delete),
        2 => key().prop_map(Op::Take),
        8 => key().prop_map(Op::Get),
        3 => (key(), any::<i64>()).prop_map(|(k, n)| Op::Add(k, n)),
        3 => (key(), any::<bool>(), prop::option::of(value())).prop_map(|(k, hit, v)| Op::Swap(k, hit, v)),
        1 => Just(Op::Clear),
    ]
}

fn run(store: &Store, ops: &[Op]) {
    let mut model: HashMap<Vec<u8>, Vec<u8>> = HashMap::new();
    for op in ops {
        match op {
            Op::Set(k, v) => assert_eq!(store.set(k, v).unwrap(), model.insert(k.clone(), v.clone()).is_some()),
            Op::Insert(k, v) => {
                let fresh = !model.contains_key(k);
                assert_eq!(store.insert(k, v).unwrap(), fresh);
                if fresh {
                    model.insert(k.clone(), v.clone());
                }
            }
            Op::Delete(k) => assert_eq!(store.delete(k).unwrap(), model.remove(k).is_some()),
            Op::Take(k) => assert_eq!(store.take(k).unwrap(), model.remove(k)),
            Op::Get(k) => {
                let expected = model.get(k).map(Vec::as_slice);
                assert_eq!(store.get(k).as_deref(), expected);
                assert_eq!(store.get_ref(k).as_deref(), expected);
                assert_eq!(store.contains(k), expected.is_some());
                let mut out = vec![1, 2, 3];
                assert_eq!(store.get_into(k, &mut out), expected.is_some());
                assert_eq!(out, expected.unwrap_or_default());
            }
            Op::Add(k, n) => {
                let now = model.get(k).map_or(Some(0), |v| v.as_slice().try_into().ok().map(i64::from_le_bytes));
                match (store.add(k, *n), now) {
                    (Ok(sum), Some(now)) => {
                        assert_eq!(sum, now.wrapping_add(*n));
                        model.insert(k.clone(), sum.to_le_bytes().to_vec());
                    }
                    (Err(forrest::Error::NotANumber { .. }), None) => {}
                    (got, now) => panic!("{got:?} where the value is {now:?}"),
                }
            }
            Op::Swap(k, hit, v) => {
                let now = model.get(k).cloned();
                let expected = if *hit { now.clone() } else { Some(b"not this".to_vec()) };
                let swaps = expected == now;
                assert_eq!(store.compare_swap(k, expected.as_deref(), v.as_deref()).unwrap(), swaps);
                match v {
                    Some(v) if swaps => drop(model.insert(k.clone(), v.clone())),
                    None if swaps => drop(model.remove(k)),
                    _ => {}
                }
            }
            Op::Clear => {
                assert_eq!(store.clear().unwrap(), model.len() as u64);
                model.clear();
            }
        }
    }
    assert_eq!(store.len(), model.len() as u64);
    let mut seen = HashMap::new();
    store
        .for_each(|k, v| {
            assert!(seen.insert(k.to_vec(), v.to_vec()).is_none(), "visited twice");
            true
        })
        .unwrap();
    assert_eq!(seen, model);
    let keys: Vec<Vec<u8>> = model.keys().cloned().chain([b"missing".to_vec()]).collect();
    let mut count = 0;
    store.get_many(&keys, |index, value| {
        assert_eq!(index, count);
        assert_eq!(value, model.get(&keys[index]).map(Vec::as_slice));
        count += 1;
    });
    assert_eq!(count, keys.len());
    let report = store.check().unwrap();
    assert_eq!((report.entries, report.lost_blocks), (model.len() as u64, 0));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn with_murmur(ops in prop::collection::vec(op(), 1..400)) {
        run(&Options::new().limit_bytes(128 << 20).private().unwrap(), &ops);
    }

    #[test]
    fn with_a_keyed_hash(ops in prop::collection::vec(op(), 1..200)) {
        run(&Options::new().limit_bytes(128 << 20).hash(Hash::Keyed).private().unwrap(), &ops);
    }
}

#[test]
fn a_million_keys_grow_and_shrink() {
    let store = Options::new().private().unwrap();
    let value = |n: u64| n.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    let count: u64 = 1_000_000;
    for n in 0..count {
        assert!(!store.set(&n.to_le_bytes(), &value(n)).unwrap());
    }
    for n in 0..count {
        assert_eq!(store.get(&n.to_le_bytes()).unwrap(), &value(n));
    }
    assert!(store.get(&count.to_le_bytes()).is_none());
    let report = store.check().unwrap();
    assert_eq!((report.entries, report.lost_blocks), (count, 0));
    let full = store.stats();
    let bytes_per_entry = (full.allocated_bytes + full.fixed_bytes) as f64 / count as f64;
    println!("{bytes_per_entry:.2} bytes per entry, {full:?}, {report:?}");
    assert!(bytes_per_entry < 21.0, "{bytes_per_entry} bytes per entry");
    for n in (0..count).rev() {
        assert!(store.delete(&n.to_le_bytes()).unwrap());
    }
    assert!(store.is_empty());
    store.trim().unwrap();
    let empty = store.stats();
    assert_eq!(store.check().unwrap().lost_blocks, 0);
    assert!(empty.held_bytes < full.held_bytes / 10, "{empty:?}");
}

/// With room made before, inserts make no array anew until there are more entries than that.
#[test]
fn reserved_room_is_enough() {
    const ENTRIES: u64 = 300_000;
    let store = Store::new().unwrap();
    store.set(b"before", b"x").unwrap();
    store.reserve(ENTRIES).unwrap();
    let buckets = store.stats().bucket_count;
    assert!(buckets * 8 > ENTRIES, "{buckets} buckets");
    for key in 1..ENTRIES {
        store.set(&key.to_le_bytes(), &(key ^ 7).to_le_bytes()).unwrap();
    }
    let stats = store.stats();
    // A few shards of 4,096 get more than their share, and grow.
    assert!(stats.bucket_count < buckets + buckets / 50, "{buckets} buckets became {}", stats.bucket_count);
    assert!(stats.held_bytes < ENTRIES * 40, "{} bytes", stats.held_bytes);
    assert_eq!((stats.entry_count, store.get(b"before").as_deref()), (ENTRIES, Some(&b"x"[..])));
    for key in 1..ENTRIES {
        assert_eq!(store.get(&key.to_le_bytes()).as_deref(), Some(&(key ^ 7).to_le_bytes()[..]), "{key}");
    }
    store.reserve(10).unwrap();
    assert_eq!(store.stats().bucket_count, stats.bucket_count, "room is never taken back");
}

#[test]
fn reserved_room_shrinks_with_the_entries() {
    let store = Store::new().unwrap();
    store.reserve(300_000).unwrap();
    store.set(b"key", b"value").unwrap();
    assert_eq!(store.clear().unwrap(), 1);
    let stats = store.stats();
    assert_eq!((stats.bucket_count, stats.allocated_bytes, stats.held_bytes), (0, 0, 0));
    store.set(b"key", b"value").unwrap();
}

#[test]
fn reserving_beyond_the_limit_is_refused_and_the_store_still_works() {
    let store = Options::new().limit_bytes(4 << 20).private().unwrap();
    store.set(b"key", b"value").unwrap();
    for asked in [1 << 30, u64::MAX] {
        let error = store.reserve(asked).unwrap_err();
        let forrest::Error::TooMany { entries, entries_max } = error else { panic!("{error}") };
        assert!(error.is_full() && error.to_string().contains(&asked.to_string()), "{error}");
        // 4 MiB of buckets of 128 bytes, eight entries in each.
        assert!(entries == asked && (100_000..1 << 18).contains(&entries_max), "{error}");
        // What it says is what it takes, to within the rounding.
        let more = store.reserve(entries_max + 4096);
        assert!(matches!(more, Err(forrest::Error::TooMany { .. })), "{more:?}");
        let fewer = store.reserve(entries_max - 4096);
        assert!(!matches!(fewer, Err(forrest::Error::TooMany { .. })), "{fewer:?}");
    }
    assert_eq!(store.get(b"key").as_deref(), Some(&b"value"[..]));
    store.delete(b"key").unwrap();
}
