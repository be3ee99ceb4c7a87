//! Concurrent maps from the registry.

use crate::{FastBuild, Maker, Map, map};

/// The peers of feature `registry`.
pub fn all() -> Vec<Maker> {
    vec![
        ("papaya", "papaya HashMap", |_, _| {
            Box::new(papaya::HashMap::<u64, u64, FastBuild>::with_hasher(FastBuild::default()))
        }),
        ("dashmap", "DashMap", |_, _| {
            Box::new(dashmap::DashMap::<u64, u64, FastBuild>::with_hasher(FastBuild::default()))
        }),
        ("dashmap-reserved", "DashMap, capacity reserved", |keys, _| {
            let hasher = FastBuild::default();
            Box::new(dashmap::DashMap::<u64, u64, FastBuild>::with_capacity_and_hasher(keys, hasher))
        }),
        ("scc-hash-map", "scc HashMap", |_, _| {
            Box::new(scc::HashMap::<u64, u64, FastBuild>::with_hasher(FastBuild::default()))
        }),
        ("scc-hash-index", "scc HashIndex", |_, _| {
            Box::new(scc::HashIndex::<u64, u64, FastBuild>::with_hasher(FastBuild::default()))
        }),
        ("scc-tree-index", "scc TreeIndex", |_, _| Box::new(scc::TreeIndex::<u64, u64>::new())),
        ("skiplist", "crossbeam SkipMap", |_, _| Box::new(crossbeam_skiplist::SkipMap::<u64, u64>::new())),
        ("congee", "congee (ART)", |_, _| Box::new(congee::U64Congee::<usize>::new())),
        ("masstree", "masstree crate, inline values", |_, _| Box::new(masstree::MassTree15Inline::<u64>::new())),
    ]
}

type Papaya = papaya::HashMap<u64, u64, FastBuild>;
map! { Papaya, map, key, value,
    map.pin().get(&key).copied(),
    map.pin().insert(key, value).is_none(),
    map.pin().remove(&key).is_some()
}

type DashMap = dashmap::DashMap<u64, u64, FastBuild>;
map! { DashMap, map, key, value,
    DashMap::get(map, &key).map(|value| *value),
    DashMap::insert(map, key, value).is_none(),
    DashMap::remove(map, &key).is_some()
}

type SccHashMap = scc::HashMap<u64, u64, FastBuild>;
map! { SccHashMap, map, key, value,
    map.read_sync(&key, |_, &value| value),
    map.insert_sync(key, value).is_ok(),
    map.remove_sync(&key).is_some()
}

type SccHashIndex = scc::HashIndex<u64, u64, FastBuild>;
map! { SccHashIndex, map, key, value,
    map.peek_with(&key, |_, &value| value),
    map.insert_sync(key, value).is_ok(),
    map.remove_sync(&key)
}

type SccTreeIndex = scc::TreeIndex<u64, u64>;
map! { SccTreeIndex, map, key, value,
    map.peek_with(&key, |_, &value| value),
    map.insert_sync(key, value).is_ok(),
    map.remove_sync(&key),
    fn scan(&self, from: u64, count: usize) -> Option<u64> {
        let guard = scc::Guard::new();
        Some(self.range(from.., &guard).take(count).fold(0, |sum, (_, &value)| sum.wrapping_add(value)))
    }
}

// Its insert replaces, and does not tell whether the key was there.
type SkipMap = crossbeam_skiplist::SkipMap<u64, u64>;
map! { SkipMap, map, key, value,
    SkipMap::get(map, &key).map(|entry| *entry.value()),
    {
        SkipMap::insert(map, key, value);
        true
    },
    SkipMap::remove(map, &key).is_some(),
    fn replace(&self, key: u64, _old: u64, value: u64) -> bool {
        Map::insert(self, key, value)
    },
    fn scan(&self, from: u64, count: usize) -> Option<u64> {
        Some(self.range(from..).take(count).fold(0, |sum, entry| sum.wrapping_add(*entry.value())))
    }
}

type Congee = congee::U64Congee<usize>;
map! { Congee, map, key, value,
    Congee::get(map, key, &congee::epoch::pin()).map(|value| value as u64),
    Congee::insert(map, key, value as usize, &congee::epoch::pin()).expect("memory").is_none(),
    Congee::remove(map, key, &congee::epoch::pin()).is_some(),
    fn replace(&self, key: u64, _old: u64, value: u64) -> bool {
        !Map::insert(self, key, value)
    },
    fn scan(&self, from: u64, count: usize) -> Option<u64> {
        let mut buffer = vec![([0u8; 8], 0usize); count];
        let found = self.range(from, u64::MAX, &mut buffer, &congee::epoch::pin());
        Some(buffer[..found].iter().fold(0, |sum, &(_, value)| sum.wrapping_add(value as u64)))
    }
}

type MassTree = masstree::MassTree15Inline<u64>;
map! { MassTree, map, key, value,
    MassTree::get(map, &key.to_be_bytes()),
    MassTree::insert(map, &key.to_be_bytes(), value).is_none(),
    MassTree::remove(map, &key.to_be_bytes()).expect("not contended for ever").is_some(),
    fn replace(&self, key: u64, _old: u64, value: u64) -> bool {
        !Map::insert(self, key, value)
    },
    fn scan(&self, from: u64, count: usize) -> Option<u64> {
        let (guard, mut left, mut sum) = (self.guard(), count, 0u64);
        let from = from.to_be_bytes();
        let add = |value: u64| {
            sum = sum.wrapping_add(value);
            left -= 1;
            left > 0
        };
        self.scan_values(masstree::RangeBound::Included(&from), masstree::RangeBound::Unbounded, add, &guard);
        Some(sum)
    }
}
