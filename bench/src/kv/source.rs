//! The source's test: `key%lu` hashed with seed 9, decimal values; all threads insert, join, and read.

use crate::index::run::timed;
use forrest::Store;
use std::collections::BTreeMap;
use std::sync::RwLock;

/// What the source's test needs of a store. The methods for many keys are for stores with batches.
trait Strings: Sync {
    fn put(&self, key: u64, value: &[u8]);
    fn holds(&self, key: u64, value: &[u8]) -> bool;
    fn put_many(&self, entries: &[([u8; 8], Digits)]) {
        entries.iter().for_each(|(key, value)| self.put(u64::from_le_bytes(*key), value.as_ref()));
    }
    fn holds_many(&self, keys: &[[u8; 8]], values: &[Digits]) -> bool {
        keys.iter().zip(values).all(|(key, value)| self.holds(u64::from_le_bytes(*key), value.as_ref()))
    }
}

impl Strings for Store {
    fn put(&self, key: u64, value: &[u8]) {
        self.set(&key.to_le_bytes(), value).expect("memory");
    }

    fn holds(&self, key: u64, value: &[u8]) -> bool {
        self.get(&key.to_le_bytes()).is_some_and(|found| *found == *value)
    }

    fn put_many(&self, entries: &[([u8; 8], Digits)]) {
        self.set_many(entries).expect("memory");
    }

    fn holds_many(&self, keys: &[[u8; 8]], values: &[Digits]) -> bool {
        let mut good = true;
        self.get_many(keys, |index, found| good &= found == Some(values[index].as_ref()));
        good
    }
}

/// The user-space side of the source's test: an insert searches first and then takes the lock for writing.
#[cfg(feature = "peers")]
impl Strings for bench_peers::red_black::RedBlackTree<Box<[u8]>> {
    fn put(&self, key: u64, value: &[u8]) {
        if self.with(key, |_| ()).is_none() {
            self.insert(key, value.into());
        }
    }

    fn holds(&self, key: u64, value: &[u8]) -> bool {
        self.with(key, |found| **found == *value) == Some(true)
    }
}

impl Strings for RwLock<BTreeMap<u64, Box<[u8]>>> {
    fn put(&self, key: u64, value: &[u8]) {
        self.write().expect("no panic under the lock").insert(key, value.into());
    }

    fn holds(&self, key: u64, value: &[u8]) -> bool {
        self.read().expect("no panic under the lock").get(&key).is_some_and(|found| **found == *value)
    }
}

/// The decimal text of a number, without an allocation.
#[derive(Clone, Copy)]
struct Digits {
    bytes: [u8; 20],
    start: u8,
}

impl Digits {
    fn of(mut number: usize) -> Digits {
        let mut digits = Digits { bytes: [0; 20], start: 20 };
        loop {
            digits.start -= 1;
            digits.bytes[usize::from(digits.start)] = b'0' + (number % 10) as u8;
            number /= 10;
            if number == 0 {
                return digits;
            }
        }
    }
}

impl AsRef<[u8]> for Digits {
    fn as_ref(&self) -> &[u8] {
        &self.bytes[usize::from(self.start)..]
    }
}

/// The source's key of a number: the hash of `key%lu` with seed 9.
fn source_key(number: usize) -> u64 {
    let mut digits = Digits::of(number);
    let start = usize::from(digits.start) - 3;
    digits.bytes[start..start + 3].copy_from_slice(b"key");
    forrest::murmur64a(&digits.bytes[start..], 9)
}

/// All threads insert their share; join; all threads read it. Both phases count, as in the source.
fn test(store: &dyn Strings, keys: usize, threads: usize, batched: bool) -> Option<f64> {
    let share = keys.div_ceil(threads);
    let range = |thread: usize| (thread * share).min(keys)..((thread + 1) * share).min(keys);
    let phase = |read: bool| {
        timed(threads, keys, |thread| {
            if !batched {
                for number in range(thread) {
                    let value = Digits::of(number);
                    if read {
                        assert!(store.holds(source_key(number), value.as_ref()), "{number} is missing");
                    } else {
                        store.put(source_key(number), value.as_ref());
                    }
                }
                return;
            }
            let range = range(thread);
            let (mut keys, mut values, mut entries) = (Vec::new(), Vec::new(), Vec::new());
            for first in range.clone().step_by(256) {
                let numbers = first..(first + 256).min(range.end);
                if read {
                    keys.clear();
                    values.clear();
                    keys.extend(numbers.clone().map(|number| source_key(number).to_le_bytes()));
                    values.extend(numbers.map(Digits::of));
                    assert!(store.holds_many(&keys, &values), "some from {first} on are missing");
                } else {
                    entries.clear();
                    entries.extend(numbers.map(|number| (source_key(number).to_le_bytes(), Digits::of(number))));
                    store.put_many(&entries);
                }
            }
        })
    };
    let (insert, read) = (phase(false), phase(true));
    Some(2.0 / (1.0 / insert + 1.0 / read))
}

/// The rate of one row, in million operations per second; `None` where the build lacks the peer.
pub(super) fn rate(name: &str, keys: usize, threads: usize) -> Option<f64> {
    match name {
        "forrest" => test(&Store::new().ok()?, keys, threads, false),
        "forrest-batch" => test(&Store::new().ok()?, keys, threads, true),
        #[cfg(feature = "peers")]
        "rb-tree-source" => test(&bench_peers::red_black::RedBlackTree::default(), keys, threads, false),
        "std-btree-lock" => test(&RwLock::new(BTreeMap::new()), keys, threads, false),
        _ => None,
    }
}
