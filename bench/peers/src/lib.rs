//! The peers that the benchmarks race, in a crate of their own: the harness builds without them in seconds.
//!
//! Without the feature `registry` there are none.

#[cfg(feature = "registry")]
pub mod lmdb;
#[cfg(feature = "registry")]
pub mod red_black;
#[cfg(feature = "registry")]
mod registry;

use std::hash::{BuildHasherDefault, Hasher};

/// The most keys or pairs of one call for many.
pub const BATCH: usize = 256;

/// A map from 64-bit keys to 64-bit values that several threads use.
pub trait Map: Send + Sync {
    /// Returns the key's value.
    fn get(&self, key: u64) -> Option<u64>;
    /// Stores an absent key; returns whether it was absent.
    fn insert(&self, key: u64, value: u64) -> bool;
    /// Removes a key; returns whether it was present. `value` is the stored value.
    fn remove(&self, key: u64, value: u64) -> bool;
    /// Replaces the value `old` of a present key, in one step if the structure can; returns whether the key was present.
    fn replace(&self, key: u64, old: u64, value: u64) -> bool {
        self.remove(key, old) && self.insert(key, value)
    }
    /// Looks up at most [`BATCH`] keys in one call; returns false if the structure cannot.
    fn get_many(&self, _keys: &[u64], _found: &mut [Option<u64>]) -> bool {
        false
    }
    /// Inserts at most [`BATCH`] pairs in one call; returns false if the structure cannot.
    fn insert_many(&self, _pairs: &[(u64, u64)]) -> bool {
        false
    }
}

/// Implements [`Map`] by an expression for each call: the map, the key and the value are named first.
#[macro_export]
macro_rules! map {
    ($type:ty, $map:ident, $key:ident, $value:ident, $get:expr, $insert:expr, $remove:expr $(, $more:item)*) => {
        impl $crate::Map for $type {
            fn get(&self, $key: u64) -> Option<u64> {
                let $map = self;
                $get
            }

            fn insert(&self, $key: u64, $value: u64) -> bool {
                let $map = self;
                $insert
            }

            fn remove(&self, $key: u64, _: u64) -> bool {
                let $map = self;
                $remove
            }

            $($more)*
        }
    };
}

/// One multiplication and a shift: the keys are random, and a costly hash would only slow the hashed peers down.
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

/// How to make a structure: its name, and the call with the number of keys.
pub type Maker = (&'static str, fn(usize) -> Box<dyn Map>);

/// The peers of this build.
pub fn all() -> Vec<Maker> {
    #[cfg(feature = "registry")]
    return registry::all();
    #[cfg(not(feature = "registry"))]
    Vec::new()
}
