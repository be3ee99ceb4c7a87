//! Red-black trees in C++, through `trees.cc`.

use crate::{Maker, Map};
use std::ffi::c_void;

unsafe extern "C" {
    fn number_tree_create() -> *mut c_void;
    fn number_tree_destroy(tree: *mut c_void);
    fn number_tree_get(tree: *mut c_void, key: u64, value: *mut u64) -> bool;
    fn number_tree_insert(tree: *mut c_void, key: u64, value: u64) -> bool;
    fn number_tree_replace(tree: *mut c_void, key: u64, value: u64) -> bool;
    fn number_tree_remove(tree: *mut c_void, key: u64) -> bool;

    fn source_tree_create() -> *mut c_void;
    fn source_tree_destroy(tree: *mut c_void);
    fn source_tree_insert(tree: *mut c_void, key: u64, text: *const u8, length: u32);
    fn source_tree_holds(tree: *mut c_void, key: u64, text: *const u8, length: u32) -> bool;
}

/// The user-space side of the source's test: a red-black tree under one lock, values allocated one by one.
pub struct SourceTree(*mut c_void);

// SAFETY: every function of the tree takes its pthread_rwlock.
unsafe impl Send for SourceTree {}
// SAFETY: every function of the tree takes its pthread_rwlock.
unsafe impl Sync for SourceTree {}

impl Default for SourceTree {
    fn default() -> Self {
        Self::new()
    }
}

impl SourceTree {
    /// Makes an empty tree.
    pub fn new() -> Self {
        // SAFETY: the function takes nothing and returns a new tree that only this value owns.
        Self(unsafe { source_tree_create() })
    }

    /// Inserts a value under an absent key.
    pub fn put(&self, key: u64, value: &[u8]) {
        // SAFETY: the tree lives as long as self; the text is copied within the call.
        unsafe { source_tree_insert(self.0, key, value.as_ptr(), value.len() as u32) }
    }

    /// Returns true if the key has this value.
    pub fn holds(&self, key: u64, value: &[u8]) -> bool {
        // SAFETY: the tree lives as long as self; the text is only read within the call.
        unsafe { source_tree_holds(self.0, key, value.as_ptr(), value.len() as u32) }
    }
}

impl Drop for SourceTree {
    fn drop(&mut self) {
        // SAFETY: this value owns the tree, and no call of it is under way during drop.
        unsafe { source_tree_destroy(self.0) }
    }
}

/// A red-black tree of numbers under one lock.
struct NumberTree(*mut c_void);

// SAFETY: every function of the tree takes its pthread_rwlock.
unsafe impl Send for NumberTree {}
// SAFETY: every function of the tree takes its pthread_rwlock.
unsafe impl Sync for NumberTree {}

impl Drop for NumberTree {
    fn drop(&mut self) {
        // SAFETY: this value owns the tree, and no call of it is under way during drop.
        unsafe { number_tree_destroy(self.0) }
    }
}

impl Map for NumberTree {
    fn get(&self, key: u64) -> Option<u64> {
        let mut value = 0;
        // SAFETY: the tree lives as long as self; the value is written within the call.
        unsafe { number_tree_get(self.0, key, &mut value) }.then_some(value)
    }

    fn insert(&self, key: u64, value: u64) -> bool {
        // SAFETY: the tree lives as long as self.
        unsafe { number_tree_insert(self.0, key, value) }
    }

    fn remove(&self, key: u64, _value: u64) -> bool {
        // SAFETY: the tree lives as long as self.
        unsafe { number_tree_remove(self.0, key) }
    }

    fn replace(&self, key: u64, _old: u64, value: u64) -> bool {
        // SAFETY: the tree lives as long as self.
        unsafe { number_tree_replace(self.0, key, value) }
    }
}

/// The peers of feature `cpp`.
pub fn all() -> Vec<Maker> {
    // SAFETY: the function takes nothing and returns a new tree that only this value owns.
    vec![("rb-tree-lock", |_| Box::new(NumberTree(unsafe { number_tree_create() })))]
}
