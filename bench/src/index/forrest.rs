//! forrest among the maps.

use bench_peers::{BATCH, map};
use forrest::Store;

/// forrest with keys and values of eight bytes.
pub struct Forrest(pub Store);

/// The number that a value of eight bytes holds.
pub fn number(value: &[u8]) -> u64 {
    value.try_into().map_or(u64::MAX, u64::from_le_bytes)
}

map! { Forrest, map, key, value,
    map.0.get(&key.to_le_bytes()).map(|value| number(&value)),
    !map.0.set(&key.to_le_bytes(), &value.to_le_bytes()).expect("memory"),
    map.0.delete(&key.to_le_bytes()).expect("a thread record"),
    fn get_many(&self, keys: &[u64], found: &mut [Option<u64>]) -> bool {
        let mut bytes = [[0; 8]; BATCH];
        bytes.iter_mut().zip(keys).for_each(|(bytes, key)| *bytes = key.to_le_bytes());
        self.0.get_many(&bytes[..keys.len()], |index, value| found[index] = value.map(number));
        true
    },
    fn insert_many(&self, pairs: &[(u64, u64)]) -> bool {
        let pairs: Vec<([u8; 8], [u8; 8])> =
            pairs.iter().map(|(key, value)| (key.to_le_bytes(), value.to_le_bytes())).collect();
        self.0.set_many(&pairs).expect("memory");
        true
    }
}
