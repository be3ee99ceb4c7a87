//! The settings of a cache, with their defaults and reasons.

use crate::BLOCK_BYTES;
use std::time::Duration;

/// How a cache behaves. Sizes in bytes, times as durations.
#[derive(Clone, Debug)]
pub struct Config {
    /// Memory for blocks, [`CACHE_BYTES_MAX`] at most. Bookkeeping comes on top: about 2.5 % of it and 1 MiB.
    pub cache_bytes: usize,
    /// Pause between two periodic flushes. The paper's forced flush: a dirty page cannot be shared, a flushed one can.
    pub flush_interval: Duration,
    /// Most blocks one periodic flush writes per image, so that a flush never takes the disk for long.
    pub flush_batch: usize,
    /// Dirty share of the cache, in percent, above which a flush starts at once and not at the next interval, and down to
    /// which it goes on.
    pub dirty_background_percent: u32,
    /// Dirty share of the cache, in percent, above which a writer itself must flush before it goes on.
    pub dirty_percent: u32,
    /// Furthest read-ahead of a sequential reader; 0 turns read-ahead off.
    pub read_ahead_bytes: usize,
    /// Threads that read ahead, and writes in flight during one flush.
    pub workers: usize,
    /// Most blocks that share one frame. Bounds the time to evict it, as KSM's `max_page_sharing` does.
    pub sharers_max: usize,
    /// Ask the kernel and the live-memory agent to merge the frames with equal pages of other processes.
    pub merge: bool,
    /// Key of the content fingerprints: secret, so that a guest cannot choose collisions.
    pub key: FingerprintKey,
}

/// Which fingerprint, and its key.
#[derive(Clone, Debug)]
pub enum FingerprintKey {
    /// XXH3-128 with a seed: fast. Equal fingerprints are followed by a comparison of the bytes.
    Fast(u64),
    /// BLAKE3 with a key, cut to 128 bits: strong enough to stand for the bytes, which fingerprints beside images need.
    Strong([u8; 32]),
}

impl Default for Config {
    fn default() -> Self {
        Self {
            cache_bytes: 256 << 20,
            flush_interval: Duration::from_secs(5),
            flush_batch: 16384,
            dirty_background_percent: 10,
            dirty_percent: 40,
            read_ahead_bytes: 2 << 20,
            workers: 4,
            sharers_max: if cfg!(pagefold_stress) { 3 } else { 256 },
            merge: false,
            key: FingerprintKey::Fast(random_u64()),
        }
    }
}

/// Smallest cache: enough for every worker to have one request in flight.
pub const CACHE_BYTES_MIN: usize = 1024 * BLOCK_BYTES;

/// Largest cache: the number of a frame has 30 bits.
pub const CACHE_BYTES_MAX: usize = ((1 << 30) - 1) * BLOCK_BYTES;

/// A number nobody outside can guess: the standard library seeds its hash maps from the kernel's generator.
pub(crate) fn random_u64() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}

impl Config {
    /// Frames the cache will have.
    pub fn frame_count(&self) -> usize {
        self.cache_bytes.max(CACHE_BYTES_MIN) / BLOCK_BYTES
    }

    pub(crate) fn dirty_max(&self) -> usize {
        (self.frame_count() * self.dirty_percent.clamp(1, 80) as usize / 100).max(1)
    }

    pub(crate) fn dirty_background(&self) -> usize {
        (self.frame_count() * self.dirty_background_percent.clamp(1, 80) as usize / 100).max(1)
    }

    /// Most blocks one request takes at once: small caches must serve several requests side by side.
    pub(crate) fn io_blocks_max(&self) -> usize {
        (self.frame_count() / 64).clamp(8, crate::cache::CHUNK_BLOCKS)
    }
}
