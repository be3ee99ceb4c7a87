//! forrest among the maps.

use bench_peers::{Maker, map};
use forrest::{Options, Store};
use std::path::PathBuf;

/// forrest's entries in the list of maps.
pub fn makers() -> Vec<Maker> {
    vec![
        ("forrest", "forrest, private", |_, huge| Box::new(Forrest(options(huge).private().expect("address space")))),
        ("forrest-reserved", "forrest, capacity reserved", |keys, huge| {
            let store = options(huge).private().expect("address space");
            store.reserve(keys as u64).expect("memory");
            Box::new(Forrest(store))
        }),
        ("forrest-shared", "forrest, in /dev/shm", |_, huge| {
            let path = PathBuf::from(format!("/dev/shm/forrest-bench-{}", std::process::id()));
            let _ = std::fs::remove_file(&path);
            let store = options(huge).create_path(&path).expect("room in /dev/shm");
            std::fs::remove_file(&path).expect("just made");
            Box::new(Forrest(store))
        }),
        ("forrest-ordered", "forrest, private, keys in order too", |_, huge| {
            Box::new(Forrest(options(huge).ordered().private().expect("address space")))
        }),
    ]
}

fn options(huge: bool) -> Options {
    Options::new().pages(if huge { forrest::Pages::Auto } else { forrest::Pages::Small })
}

/// The number that a value of eight bytes holds.
pub fn number(value: &[u8]) -> u64 {
    value.try_into().map_or(u64::MAX, u64::from_le_bytes)
}

struct Forrest(Store);

map! { Forrest, map, key, value,
    map.0.get(&key.to_le_bytes()).map(|value| number(&value)),
    !map.0.set(&key.to_le_bytes(), &value.to_le_bytes()).expect("memory"),
    map.0.delete(&key.to_le_bytes()).expect("a thread record"),
    fn get_many(&self, keys: &[u64], found: &mut [Option<u64>]) -> bool {
        let mut bytes = [[0; 8]; 256];
        for (keys, found) in keys.chunks(256).zip(found.chunks_mut(256)) {
            for (bytes, key) in bytes.iter_mut().zip(keys) {
                *bytes = key.to_le_bytes();
            }
            self.0.get_many(&bytes[..keys.len()], |index, value| found[index] = value.map(number));
        }
        true
    },
    fn insert_many(&self, pairs: &[(u64, u64)]) -> bool {
        let pairs: Vec<([u8; 8], [u8; 8])> =
            pairs.iter().map(|(key, value)| (key.to_le_bytes(), value.to_le_bytes())).collect();
        self.0.set_many(&pairs).expect("memory");
        true
    },
    fn scan(&self, from: u64, count: usize) -> Option<u64> {
        // The order of the little-endian bytes: any total order serves a bench.
        let scan = self.0.scan(&from.to_le_bytes()..).ok()?;
        Some(scan.take(count).fold(0, |sum: u64, (_, value)| sum.wrapping_add(number(&value))))
    }
}
