//! Low-level data structures for very large memory.

pub mod arena;
pub mod b_tree;
pub mod epoch;
mod line_memory;
mod prefetch;
mod primitive;
pub mod sd_tree;
#[cfg(all(target_arch = "x86_64", not(loom), not(miri)))]
mod wide;

pub use prefetch::prefetch;
