//! The SD tree does what a plain list of (fingerprint, value) pairs does, whatever the fingerprints.
//!
//! Two bytes make a fingerprint; a quarter of them share many leading bits, so that children, depth and
//! `Full` are met as well as growth.

#![no_main]

use libfuzzer_sys::fuzz_target;
use llds::sd_tree::{Full, SdTree, SweepCursor};
use std::collections::HashMap;

fn fingerprint(high: u8, low: u8) -> u64 {
    let spread = (u64::from(high) << 8 | u64::from(low)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    if high < 64 { 0x0123_4500_0000_0000 | u64::from(high) << 37 | u64::from(low) << 29 | 1 } else { spread }
}

fuzz_target!(|data: &[u8]| {
    let tree = SdTree::with_capacity_hint(0).unwrap();
    // Values are unique per insert, so that the oracle is exact although tags are not.
    let mut oracle: HashMap<u64, u64> = HashMap::new();
    let mut owner: HashMap<u64, u64> = HashMap::new();
    let mut cursor = SweepCursor::new();
    let mut fresh = 0;
    for step in data.chunks_exact(3) {
        let key = fingerprint(step[1], step[2]);
        let held = oracle.get(&key).copied();
        match step[0] % 8 {
            0..=3 => {
                fresh += 1;
                owner.insert(fresh, key);
                match tree.get_or_insert_with(key, fresh, |value| owner[&value] == key) {
                    Ok(existing) => {
                        assert_eq!(existing, held);
                        oracle.entry(key).or_insert(fresh);
                    }
                    Err(Full) => assert!(held.is_none(), "a key that is there needs no room"),
                }
            }
            4 => {
                let removed = tree.remove(key, held.unwrap_or(fresh + 1));
                assert_eq!(removed, oracle.remove(&key).is_some());
            }
            5 => {
                if let Some(held) = held {
                    fresh += 1;
                    owner.insert(fresh, key);
                    // Refused only where the tree is full; then nothing has changed.
                    if tree.replace(key, held, fresh) {
                        oracle.insert(key, fresh);
                    }
                }
            }
            6 => {
                let removed = tree.retain(&mut cursor, 1 + usize::from(step[2]), |value| value % 5 != u64::from(step[1] % 6));
                let before = oracle.len() as u64;
                oracle.retain(|&key, &mut value| tree.get_with(key, |found| found == value).is_some());
                assert_eq!(before - oracle.len() as u64, removed);
            }
            _ => {}
        }
        assert_eq!(tree.get_with(key, |value| owner[&value] == key), oracle.get(&key).copied());
        assert_eq!(tree.len(), oracle.len() as u64);
    }
    let keys: Vec<u64> = oracle.keys().copied().collect();
    let mut found = vec![None; keys.len()];
    tree.lookup_many(&keys, &mut found);
    for (key, found) in keys.into_iter().zip(found) {
        assert!(found.is_some());
        assert_eq!(tree.get_with(key, |value| owner[&value] == key), Some(oracle[&key]));
    }
});
