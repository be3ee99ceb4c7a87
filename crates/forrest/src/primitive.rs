//! The atomics used by `bucket.rs`; the model test replaces them with loom's.

pub use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};
