//! The structures under test behind one face.

use llds::b_tree::BTree;
use llds::sd_tree::SdTree;
use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::{Mutex, RwLock};

/// A map from 64-bit keys to 64-bit values that several threads use.
pub trait Map: Send + Sync {
    /// Gives the key's value.
    fn get(&self, key: u64) -> Option<u64>;
    /// Stores a key that is not there; tells whether it went in.
    fn insert(&self, key: u64, value: u64) -> bool;
    /// Removes a key; tells whether it was there. `value` is what was stored.
    fn remove(&self, key: u64, value: u64) -> bool;
    /// Gives a key that is there another value than `old`, in one step if the structure has one for it; tells whether the key
    /// was there.
    fn replace(&self, key: u64, old: u64, value: u64) -> bool {
        self.remove(key, old) && self.insert(key, value)
    }
    /// Looks many keys up at once, if the structure can; else tells that it cannot.
    fn get_many(&self, _keys: &[u64], _found: &mut [Option<u64>]) -> bool {
        false
    }
    /// Inserts many at once, if the structure can.
    fn insert_many(&self, _pairs: &[(u64, u64)]) -> bool {
        false
    }
    /// Sums the values of up to `count` entries from the key on, if the structure is ordered.
    fn scan(&self, _from: u64, _count: usize) -> Option<u64> {
        None
    }
    /// What the structure itself says it uses, in bytes.
    fn memory_bytes(&self) -> Option<u64> {
        None
    }
}

/// One multiplication and a shift: the keys are random, so that a costly hash would only slow the hashed peers.
#[derive(Default, Clone, Copy)]
pub struct FastHasher(u64);

impl Hasher for FastHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u64(&mut self, word: u64) {
        let wide = u128::from(self.0 ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
        self.0 = (wide >> 64) as u64 ^ wide as u64;
    }
}

/// The hasher of all hashed peers.
pub type FastBuild = BuildHasherDefault<FastHasher>;

/// How to make a structure: its name, what it is, and the call with the number of keys and whether to
/// use huge pages (those who allocate through malloc get them by a tunable of the C library).
pub type Maker = (&'static str, &'static str, fn(usize, bool) -> Box<dyn Map>);

/// All structures of this build, ours first.
pub fn all() -> Vec<Maker> {
    let mut makers: Vec<Maker> = vec![
        ("sd-tree", "llds SD tree, fingerprints", |keys, huge| {
            Box::new(SdTree::with_pages(keys, huge).expect("address space"))
        }),
        ("sd-tree-grown", "the same, grown from nothing", |_, huge| {
            Box::new(SdTree::with_pages(0, huge).expect("address space"))
        }),
        ("sd-tree-dense", "the same in less memory, as the merge engine has it", |keys, huge| {
            Box::new(SdTree::dense(keys, huge).expect("address space"))
        }),
        ("b-tree", "llds B-tree", |_, huge| Box::new(BTree::<u64>::with_pages(huge).expect("address space"))),
        ("std-hash-lock", "std HashMap, one RwLock", |_, _| {
            Box::new(Locked(RwLock::new(HashMap::with_hasher(FastBuild::default()))))
        }),
        ("std-hash-sharded", "std HashMap, 256 mutexes", |_, _| {
            Box::new(Sharded((0..256).map(|_| Mutex::new(HashMap::with_hasher(FastBuild::default()))).collect()))
        }),
        ("std-btree-lock", "std BTreeMap, one RwLock", |_, _| Box::new(LockedOrdered(RwLock::new(BTreeMap::new())))),
    ];
    makers.extend(crate::kv::makers());
    #[cfg(feature = "peers")]
    makers.extend(super::peers::all());
    #[cfg(feature = "cpp-peers")]
    makers.extend(super::cpp::all());
    makers
}

impl Map for SdTree {
    fn get(&self, key: u64) -> Option<u64> {
        SdTree::get(self, key)
    }

    fn insert(&self, key: u64, value: u64) -> bool {
        self.get_or_insert(key, value).expect("keys are well spread").is_none()
    }

    fn remove(&self, key: u64, value: u64) -> bool {
        SdTree::remove(self, key, value)
    }

    fn get_many(&self, keys: &[u64], found: &mut [Option<u64>]) -> bool {
        self.lookup_many(keys, found);
        true
    }

    fn insert_many(&self, pairs: &[(u64, u64)]) -> bool {
        let mut existing = [None; 256];
        for pairs in pairs.chunks(256) {
            self.get_or_insert_many(pairs, &mut existing[..pairs.len()]).expect("keys are well spread");
        }
        true
    }

    fn memory_bytes(&self) -> Option<u64> {
        Some(SdTree::memory_bytes(self))
    }
}

impl Map for BTree<u64> {
    fn get(&self, key: u64) -> Option<u64> {
        BTree::get(self, key)
    }

    fn insert(&self, key: u64, value: u64) -> bool {
        self.insert_or_replace(key, value).expect("room").is_none()
    }

    fn remove(&self, key: u64, _value: u64) -> bool {
        BTree::remove(self, key).is_some()
    }

    fn replace(&self, key: u64, _old: u64, value: u64) -> bool {
        !Map::insert(self, key, value)
    }

    fn get_many(&self, keys: &[u64], found: &mut [Option<u64>]) -> bool {
        BTree::get_many(self, keys, found);
        true
    }

    fn scan(&self, from: u64, count: usize) -> Option<u64> {
        Some(BTree::scan(self, from..).take(count).fold(0, |sum, (_, value)| sum.wrapping_add(value)))
    }

    fn memory_bytes(&self) -> Option<u64> {
        Some(BTree::memory_bytes(self))
    }
}

struct Locked(RwLock<HashMap<u64, u64, FastBuild>>);

impl Map for Locked {
    fn get(&self, key: u64) -> Option<u64> {
        self.0.read().expect("no panics").get(&key).copied()
    }

    fn insert(&self, key: u64, value: u64) -> bool {
        self.0.write().expect("no panics").insert(key, value).is_none()
    }

    fn remove(&self, key: u64, _value: u64) -> bool {
        self.0.write().expect("no panics").remove(&key).is_some()
    }
}

struct Sharded(Vec<Mutex<HashMap<u64, u64, FastBuild>>>);

impl Sharded {
    fn shard(&self, key: u64) -> std::sync::MutexGuard<'_, HashMap<u64, u64, FastBuild>> {
        self.0[(key >> 56) as usize].lock().expect("no panics")
    }
}

impl Map for Sharded {
    fn get(&self, key: u64) -> Option<u64> {
        self.shard(key).get(&key).copied()
    }

    fn insert(&self, key: u64, value: u64) -> bool {
        self.shard(key).insert(key, value).is_none()
    }

    fn remove(&self, key: u64, _value: u64) -> bool {
        self.shard(key).remove(&key).is_some()
    }
}

struct LockedOrdered(RwLock<BTreeMap<u64, u64>>);

impl Map for LockedOrdered {
    fn get(&self, key: u64) -> Option<u64> {
        self.0.read().expect("no panics").get(&key).copied()
    }

    fn insert(&self, key: u64, value: u64) -> bool {
        self.0.write().expect("no panics").insert(key, value).is_none()
    }

    fn remove(&self, key: u64, _value: u64) -> bool {
        self.0.write().expect("no panics").remove(&key).is_some()
    }

    fn replace(&self, key: u64, _old: u64, value: u64) -> bool {
        !self.insert(key, value)
    }

    fn scan(&self, from: u64, count: usize) -> Option<u64> {
        let map = self.0.read().expect("no panics");
        Some(map.range(from..).take(count).fold(0, |sum, (_, &value)| sum.wrapping_add(value)))
    }
}
