//! Concurrent maps from the registry.

use super::maps::{FastBuild, Maker, Map};

/// The peers of feature `peers`.
pub fn all() -> Vec<Maker> {
    vec![
        ("papaya", "papaya HashMap", |_, _| {
            Box::new(papaya::HashMap::<u64, u64, FastBuild>::with_hasher(FastBuild::default()))
        }),
        ("dashmap", "DashMap", |_, _| {
            Box::new(dashmap::DashMap::<u64, u64, FastBuild>::with_hasher(FastBuild::default()))
        }),
        ("dashmap-reserved", "DashMap, room made before", |keys, _| {
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

impl Map for papaya::HashMap<u64, u64, FastBuild> {
    fn get(&self, key: u64) -> Option<u64> {
        self.pin().get(&key).copied()
    }

    fn insert(&self, key: u64, value: u64) -> bool {
        self.pin().insert(key, value).is_none()
    }

    fn remove(&self, key: u64, _value: u64) -> bool {
        self.pin().remove(&key).is_some()
    }
}

impl Map for dashmap::DashMap<u64, u64, FastBuild> {
    fn get(&self, key: u64) -> Option<u64> {
        dashmap::DashMap::get(self, &key).map(|value| *value)
    }

    fn insert(&self, key: u64, value: u64) -> bool {
        dashmap::DashMap::insert(self, key, value).is_none()
    }

    fn remove(&self, key: u64, _value: u64) -> bool {
        dashmap::DashMap::remove(self, &key).is_some()
    }
}

impl Map for scc::HashMap<u64, u64, FastBuild> {
    fn get(&self, key: u64) -> Option<u64> {
        self.read_sync(&key, |_, &value| value)
    }

    fn insert(&self, key: u64, value: u64) -> bool {
        self.insert_sync(key, value).is_ok()
    }

    fn remove(&self, key: u64, _value: u64) -> bool {
        self.remove_sync(&key).is_some()
    }
}

impl Map for scc::HashIndex<u64, u64, FastBuild> {
    fn get(&self, key: u64) -> Option<u64> {
        self.peek_with(&key, |_, &value| value)
    }

    fn insert(&self, key: u64, value: u64) -> bool {
        self.insert_sync(key, value).is_ok()
    }

    fn remove(&self, key: u64, _value: u64) -> bool {
        self.remove_sync(&key)
    }
}

impl Map for scc::TreeIndex<u64, u64> {
    fn get(&self, key: u64) -> Option<u64> {
        self.peek_with(&key, |_, &value| value)
    }

    fn insert(&self, key: u64, value: u64) -> bool {
        self.insert_sync(key, value).is_ok()
    }

    fn remove(&self, key: u64, _value: u64) -> bool {
        self.remove_sync(&key)
    }

    fn scan(&self, from: u64, count: usize) -> Option<u64> {
        let guard = scc::Guard::new();
        Some(self.range(from.., &guard).take(count).fold(0, |sum, (_, &value)| sum.wrapping_add(value)))
    }
}

impl Map for crossbeam_skiplist::SkipMap<u64, u64> {
    fn get(&self, key: u64) -> Option<u64> {
        crossbeam_skiplist::SkipMap::get(self, &key).map(|entry| *entry.value())
    }

    fn insert(&self, key: u64, value: u64) -> bool {
        crossbeam_skiplist::SkipMap::insert(self, key, value);
        true
    }

    fn remove(&self, key: u64, _value: u64) -> bool {
        crossbeam_skiplist::SkipMap::remove(self, &key).is_some()
    }

    fn replace(&self, key: u64, _old: u64, value: u64) -> bool {
        // Its insert replaces, and does not tell.
        Map::insert(self, key, value)
    }

    fn scan(&self, from: u64, count: usize) -> Option<u64> {
        Some(self.range(from..).take(count).fold(0, |sum, entry| sum.wrapping_add(*entry.value())))
    }
}

impl Map for congee::U64Congee<usize> {
    fn get(&self, key: u64) -> Option<u64> {
        congee::U64Congee::get(self, key, &congee::epoch::pin()).map(|value| value as u64)
    }

    fn insert(&self, key: u64, value: u64) -> bool {
        congee::U64Congee::insert(self, key, value as usize, &congee::epoch::pin()).expect("memory").is_none()
    }

    fn remove(&self, key: u64, _value: u64) -> bool {
        congee::U64Congee::remove(self, key, &congee::epoch::pin()).is_some()
    }

    fn replace(&self, key: u64, _old: u64, value: u64) -> bool {
        !Map::insert(self, key, value)
    }

    fn scan(&self, from: u64, count: usize) -> Option<u64> {
        let mut buffer = vec![([0u8; 8], 0usize); count];
        let found = self.range(from, u64::MAX, &mut buffer, &congee::epoch::pin());
        Some(buffer[..found].iter().fold(0, |sum, &(_, value)| sum.wrapping_add(value as u64)))
    }
}

impl Map for masstree::MassTree15Inline<u64> {
    fn get(&self, key: u64) -> Option<u64> {
        masstree::MassTree15Inline::get(self, &key.to_be_bytes())
    }

    fn insert(&self, key: u64, value: u64) -> bool {
        masstree::MassTree15Inline::insert(self, &key.to_be_bytes(), value).is_none()
    }

    fn remove(&self, key: u64, _value: u64) -> bool {
        masstree::MassTree15Inline::remove(self, &key.to_be_bytes()).expect("not contended for ever").is_some()
    }

    fn replace(&self, key: u64, _old: u64, value: u64) -> bool {
        !Map::insert(self, key, value)
    }

    fn scan(&self, from: u64, count: usize) -> Option<u64> {
        let guard = self.guard();
        let mut left = count;
        let mut sum = 0u64;
        self.scan_values(
            masstree::RangeBound::Included(&from.to_be_bytes()),
            masstree::RangeBound::Unbounded,
            |value| {
                sum = sum.wrapping_add(value);
                left -= 1;
                left > 0
            },
            &guard,
        );
        Some(sum)
    }
}
