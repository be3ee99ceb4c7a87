//! Numbers that tell things of one daemon from those of its predecessors.

use std::hash::{BuildHasher, RandomState};

/// A random number other than 0.
pub(crate) fn random_id() -> u64 {
    RandomState::new().hash_one(std::process::id()).max(1)
}
