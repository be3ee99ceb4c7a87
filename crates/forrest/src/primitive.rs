//! The atomics that `bucket.rs` stands on; the model test puts others in their place.

pub use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};
