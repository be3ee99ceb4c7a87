//! Concurrent maps from the registry.

use crate::{FastBuild, Maker, map, red_black};

/// The peers of feature `registry`: the fastest hash maps, congee, an adaptive radix tree, and a red-black tree under a
/// lock.
pub fn all() -> Vec<Maker> {
    vec![
        ("dashmap", |_| Box::new(DashMap::with_hasher(FastBuild::default()))),
        ("scc-hash-map", |_| Box::new(SccHashMap::with_hasher(FastBuild::default()))),
        ("congee", |_| Box::new(Congee::new())),
        red_black::maker(),
    ]
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

type Congee = congee::U64Congee<usize>;
map! { Congee, map, key, value,
    Congee::get(map, key, &congee::epoch::pin()).map(|value| value as u64),
    Congee::insert(map, key, value as usize, &congee::epoch::pin()).expect("memory").is_none(),
    Congee::remove(map, key, &congee::epoch::pin()).is_some()
}
