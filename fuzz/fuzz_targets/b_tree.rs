//! The B-tree behaves like a BTreeMap.

#![no_main]

use libfuzzer_sys::fuzz_target;
use llds::b_tree::BTree;
use std::collections::BTreeMap;
use std::ops::Bound;

fuzz_target!(|data: &[u8]| {
    let Some((&mode, data)) = data.split_first() else { return };
    let mut oracle: BTreeMap<u64, u64> = BTreeMap::new();
    let tree = if mode % 2 == 0 {
        BTree::<u64>::new().unwrap()
    } else {
        oracle.extend((0..u64::from(mode) * 20).map(|key| (key * 40, key)));
        BTree::from_sorted(oracle.iter().map(|(&key, &value)| (key, value))).unwrap()
    };
    for (at, step) in data.chunks_exact(4).enumerate() {
        // Single keys, and runs of neighbours, which fill and empty nodes.
        let key = u64::from(step[1]) << 8 | u64::from(step[2]);
        let run = key..key + u64::from(step[3] % 64);
        match step[0] % 8 {
            0 => assert_eq!(tree.insert_or_replace(key, at as u64), Ok(oracle.insert(key, at as u64))),
            1 => run.for_each(|key| assert_eq!(tree.insert_or_replace(key, at as u64), Ok(oracle.insert(key, at as u64)))),
            2 => run.rev().for_each(|key| {
                let held = oracle.get(&key).copied();
                oracle.entry(key).or_insert(at as u64);
                assert_eq!(tree.get_or_insert(key, at as u64), Ok(held));
            }),
            3 => assert_eq!(tree.remove(key), oracle.remove(&key)),
            4 => run.for_each(|key| assert_eq!(tree.remove(key), oracle.remove(&key))),
            5 => run.rev().for_each(|key| assert_eq!(tree.remove(key), oracle.remove(&key))),
            6 => {
                let bounds = (Bound::Included(run.start), Bound::Excluded(run.end));
                assert!(tree.scan(bounds).eq(oracle.range(bounds).map(|(&key, &value)| (key, value))));
                assert!(tree.scan(bounds).rev().eq(oracle.range(bounds).rev().map(|(&key, &value)| (key, value))));
            }
            _ => assert_eq!(tree.get(key), oracle.get(&key).copied()),
        }
    }
    assert_eq!(tree.len(), oracle.len() as u64);
    let keys: Vec<u64> = oracle.keys().copied().collect();
    let mut found = vec![None; keys.len()];
    tree.get_many(&keys, &mut found);
    assert!(found.iter().zip(oracle.values()).all(|(found, value)| *found == Some(*value)));
    assert!(tree.scan(..).eq(oracle));
});
