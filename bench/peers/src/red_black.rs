//! A red-black tree under one lock, an allocation per entry: what the sources compare their structures with.

use crate::{Maker, map};
use intrusive_collections::{KeyAdapter, RBTree, RBTreeAtomicLink, intrusive_adapter};
use std::sync::RwLock;
use std::sync::atomic::{AtomicU64, Ordering};

struct Entry<V> {
    link: RBTreeAtomicLink,
    key: u64,
    value: V,
}

intrusive_adapter!(ByKey<V> = Box<Entry<V>>: Entry<V> { link => RBTreeAtomicLink });

impl<V> KeyAdapter<'_> for ByKey<V> {
    type Key = u64;

    fn get_key(&self, entry: &Entry<V>) -> u64 {
        entry.key
    }
}

/// The tree.
pub struct RedBlackTree<V>(RwLock<RBTree<ByKey<V>>>);

impl<V> Default for RedBlackTree<V> {
    fn default() -> Self {
        Self(RwLock::new(RBTree::new(ByKey::new())))
    }
}

impl<V> RedBlackTree<V> {
    /// Lets `look` see the value of a present key.
    pub fn with<T>(&self, key: u64, look: impl FnOnce(&V) -> T) -> Option<T> {
        self.0.read().expect("no panic under the lock").find(&key).get().map(|entry| look(&entry.value))
    }

    /// Stores an absent key; returns whether it was absent. The entry is allocated before the lock is taken.
    pub fn insert(&self, key: u64, value: V) -> bool {
        let entry = Box::new(Entry { link: RBTreeAtomicLink::new(), key, value });
        let mut tree = self.0.write().expect("no panic under the lock");
        let intrusive_collections::rbtree::Entry::Vacant(place) = tree.entry(&key) else { return false };
        place.insert(entry);
        true
    }
}

/// The peer among the maps.
pub fn maker() -> Maker {
    ("rb-tree-lock", |_| Box::new(RedBlackTree::<AtomicU64>::default()))
}

map! { RedBlackTree<AtomicU64>, map, key, value,
    map.with(key, |value| value.load(Ordering::Relaxed)),
    RedBlackTree::insert(map, key, AtomicU64::new(value)),
    map.0.write().expect("no panic under the lock").find_mut(&key).remove().is_some(),
    fn replace(&self, key: u64, _old: u64, value: u64) -> bool {
        let tree = self.0.write().expect("no panic under the lock");
        tree.find(&key).get().map(|entry| entry.value.store(value, Ordering::Relaxed)).is_some()
    }
}
