//! All structures of this build: ours, those of the standard library, and the peers.

use bench_peers::{FastBuild, Maker, Map, map};
use llds::b_tree::BTree;
use llds::sd_tree::SdTree;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, RwLock};

/// All structures of this build, ours first.
pub fn all() -> Vec<Maker> {
    let mut makers: Vec<Maker> = vec![
        ("sd-tree", "llds SD tree, fingerprints", |keys, huge| {
            Box::new(Tree(SdTree::with_pages(keys, huge).expect("address space")))
        }),
        ("sd-tree-grown", "the same, grown from empty", |_, huge| {
            Box::new(Tree(SdTree::with_pages(0, huge).expect("address space")))
        }),
        ("sd-tree-dense", "the same in less memory, as the merge engine has it", |keys, huge| {
            Box::new(Tree(SdTree::dense(keys, huge).expect("address space")))
        }),
        ("b-tree", "llds B-tree", |_, huge| Box::new(Ordered(BTree::with_pages(huge).expect("address space")))),
        ("std-hash-lock", "std HashMap, one RwLock", |_, _| {
            Box::new(Locked(RwLock::new(HashMap::with_hasher(FastBuild::default()))))
        }),
        ("std-hash-sharded", "std HashMap, 256 mutexes", |_, _| {
            Box::new(Sharded((0..256).map(|_| Mutex::new(HashMap::with_hasher(FastBuild::default()))).collect()))
        }),
        ("std-btree-lock", "std BTreeMap, one RwLock", |_, _| Box::new(LockedOrdered(RwLock::new(BTreeMap::new())))),
    ];
    makers.extend(crate::index::forrest::makers());
    makers.extend(bench_peers::all());
    makers
}

struct Tree(SdTree);

impl Map for Tree {
    fn get(&self, key: u64) -> Option<u64> {
        self.0.get(key)
    }

    fn insert(&self, key: u64, value: u64) -> bool {
        self.0.get_or_insert(key, value).expect("keys are well spread").is_none()
    }

    fn remove(&self, key: u64, value: u64) -> bool {
        self.0.remove(key, value)
    }

    fn get_many(&self, keys: &[u64], found: &mut [Option<u64>]) -> bool {
        self.0.lookup_many(keys, found);
        true
    }

    fn insert_many(&self, pairs: &[(u64, u64)]) -> bool {
        let mut existing = [None; 256];
        for pairs in pairs.chunks(256) {
            self.0.get_or_insert_many(pairs, &mut existing[..pairs.len()]).expect("keys are well spread");
        }
        true
    }
}

struct Ordered(BTree<u64>);

map! { Ordered, map, key, value,
    map.0.get(key),
    map.0.insert_or_replace(key, value).expect("memory").is_none(),
    map.0.remove(key).is_some(),
    fn replace(&self, key: u64, _old: u64, value: u64) -> bool {
        !self.insert(key, value)
    },
    fn get_many(&self, keys: &[u64], found: &mut [Option<u64>]) -> bool {
        self.0.get_many(keys, found);
        true
    },
    fn scan(&self, from: u64, count: usize) -> Option<u64> {
        Some(self.0.scan(from..).take(count).fold(0, |sum, (_, value)| sum.wrapping_add(value)))
    }
}

struct Locked(RwLock<HashMap<u64, u64, FastBuild>>);
map! { Locked, map, key, value,
    map.0.read().expect("no panics").get(&key).copied(),
    map.0.write().expect("no panics").insert(key, value).is_none(),
    map.0.write().expect("no panics").remove(&key).is_some()
}

struct Sharded(Vec<Mutex<HashMap<u64, u64, FastBuild>>>);

impl Sharded {
    fn shard(&self, key: u64) -> std::sync::MutexGuard<'_, HashMap<u64, u64, FastBuild>> {
        self.0[(key >> 56) as usize].lock().expect("no panics")
    }
}

map! { Sharded, map, key, value,
    map.shard(key).get(&key).copied(),
    map.shard(key).insert(key, value).is_none(),
    map.shard(key).remove(&key).is_some()
}

struct LockedOrdered(RwLock<BTreeMap<u64, u64>>);
map! { LockedOrdered, map, key, value,
    map.0.read().expect("no panics").get(&key).copied(),
    map.0.write().expect("no panics").insert(key, value).is_none(),
    map.0.write().expect("no panics").remove(&key).is_some(),
    fn replace(&self, key: u64, _old: u64, value: u64) -> bool {
        !self.insert(key, value)
    },
    fn scan(&self, from: u64, count: usize) -> Option<u64> {
        let map = self.0.read().expect("no panics");
        Some(map.range(from..).take(count).fold(0, |sum, (_, &value)| sum.wrapping_add(value)))
    }
}
