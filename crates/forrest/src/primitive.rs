//! The atomics that `bucket.rs` stands on; the model test puts others in their place.

pub use std::sync::atomic::{AtomicU64, Ordering};
