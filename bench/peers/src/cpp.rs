//! Maps in C++ and C, through `maps.cc`.

use crate::{Maker, Map};
use std::ffi::c_void;

/// The table of functions that each peer fills; as in `maps.cc`.
#[repr(C)]
struct Functions {
    create: extern "C" fn() -> *mut c_void,
    get: extern "C" fn(*mut c_void, u64, *mut u64) -> bool,
    insert: extern "C" fn(*mut c_void, u64, u64) -> bool,
    remove: extern "C" fn(*mut c_void, u64) -> bool,
    replace: Option<extern "C" fn(*mut c_void, u64, u64) -> bool>,
    scan: Option<extern "C" fn(*mut c_void, u64, u64) -> u64>,
    destroy: extern "C" fn(*mut c_void),
}

unsafe extern "C" {
    static peer_std_map: Functions;
    static peer_std_map_bare: Functions;
    static peer_absl_btree: Functions;
    static peer_cuckoo: Functions;
    static peer_tbb: Functions;
    static peer_urcu: Functions;

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

struct Peer {
    functions: &'static Functions,
    map: *mut c_void,
}

// SAFETY: each peer is a concurrent map or takes a lock in C++; the driver gives the bare one to one thread only.
unsafe impl Send for Peer {}
// SAFETY: each peer is a concurrent map or takes a lock in C++; the driver gives the bare one to one thread only.
unsafe impl Sync for Peer {}

impl Peer {
    fn boxed(functions: &'static Functions) -> Box<dyn Map> {
        Box::new(Self { functions, map: (functions.create)() })
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        (self.functions.destroy)(self.map);
    }
}

impl Map for Peer {
    fn get(&self, key: u64) -> Option<u64> {
        let mut value = 0;
        (self.functions.get)(self.map, key, &mut value).then_some(value)
    }

    fn insert(&self, key: u64, value: u64) -> bool {
        (self.functions.insert)(self.map, key, value)
    }

    fn remove(&self, key: u64, _value: u64) -> bool {
        (self.functions.remove)(self.map, key)
    }

    fn replace(&self, key: u64, old: u64, value: u64) -> bool {
        match self.functions.replace {
            Some(replace) => replace(self.map, key, value),
            None => self.remove(key, old) && self.insert(key, value),
        }
    }

    fn scan(&self, from: u64, count: usize) -> Option<u64> {
        self.functions.scan.map(|scan| scan(self.map, from, count as u64))
    }
}

/// The peers of feature `cpp`.
pub fn all() -> Vec<Maker> {
    // SAFETY: the tables are constants of `maps.cc`.
    macro_rules! peer {
        ($table:ident) => {
            |_, _| Peer::boxed(unsafe { &$table })
        };
    }
    vec![
        ("rb-tree-lock", "C++ std::map (red-black), pthread_rwlock", peer!(peer_std_map)),
        ("rb-tree-bare", "the same without a lock: one thread only", peer!(peer_std_map_bare)),
        ("absl-btree-lock", "absl::btree_map, pthread_rwlock", peer!(peer_absl_btree)),
        ("libcuckoo", "libcuckoo cuckoohash_map", peer!(peer_cuckoo)),
        ("tbb", "TBB concurrent_hash_map", peer!(peer_tbb)),
        ("liburcu", "liburcu cds_lfht", peer!(peer_urcu)),
    ]
}
