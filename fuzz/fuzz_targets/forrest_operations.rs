//! A store behaves like a std map under any sequence of operations.
#![no_main]

use forrest::Options;
use libfuzzer_sys::fuzz_target;
use std::collections::HashMap;

fuzz_target!(|data: &[u8]| {
    let store = Options::new().limit_bytes(64 << 20).private().expect("address space");
    let mut model: HashMap<Vec<u8>, Vec<u8>> = HashMap::new();
    for step in data.chunks_exact(4) {
        let [op, key, length, fill] = [step[0], step[1], step[2], step[3]];
        let key = if key & 1 == 0 { u64::from(key).to_le_bytes().to_vec() } else { vec![key; usize::from(key % 37)] };
        let value = vec![fill; usize::from(length) * if length > 200 { 40 } else { 1 }];
        match op % 6 {
            0 => assert_eq!(store.set(&key, &value).expect("room"), model.insert(key, value).is_some()),
            1 => assert_eq!(store.take(&key).expect("a thread record"), model.remove(&key)),
            2 => assert_eq!(store.get(&key).as_deref(), model.get(&key).map(Vec::as_slice)),
            3 => {
                let fresh = !model.contains_key(&key);
                assert_eq!(store.insert(&key, &value).expect("room"), fresh);
                model.entry(key).or_insert(value);
            }
            4 => assert_eq!(store.get_ref(&key).as_deref(), model.get(&key).map(Vec::as_slice)),
            _ => {
                let now = model.get(&key).cloned();
                assert!(store.compare_swap(&key, now.as_deref(), Some(&value)).expect("room"));
                model.insert(key, value);
            }
        }
    }
    let report = store.check().expect("a sound store");
    assert_eq!((report.entries, report.lost_blocks), (model.len() as u64, 0));
});
