//! The settings of a cache, with their defaults and reasons.

use crate::fingerprint::FingerprintKey;
use crate::geometry::{BLOCK_BYTES, CHUNK_BLOCKS, FRAMES_MAX};
use std::time::Duration;

/// How a cache behaves. Sizes in bytes, times as durations.
#[derive(Clone, Debug)]
pub struct Config {
    /// Memory for blocks, [`CACHE_BYTES_MAX`] at most. Bookkeeping comes on top: about 2.5 % of it and 1 MiB.
    pub cache_bytes: usize,
    /// Pause between two periodic flushes: the paper's forced flush. A dirty page cannot be shared, a flushed one can.
    pub flush_interval: Duration,
    /// Most blocks that one periodic flush writes per image, so that a flush never occupies the disk for long.
    pub flush_batch: usize,
    /// Dirty share of the cache, in percent, above which a flush starts before the next interval. It continues down to
    /// this share.
    pub dirty_background_percent: u32,
    /// Dirty share of the cache, in percent, above which a writing thread flushes before it continues.
    pub dirty_percent: u32,
    /// Furthest read-ahead of a sequential reader; 0 turns read-ahead off.
    pub read_ahead_bytes: usize,
    /// Threads that read ahead, and writes in flight during one flush.
    pub workers: usize,
    /// Most blocks that share one frame. It bounds the time to evict a frame, as KSM's `max_page_sharing` does.
    pub sharers_max: usize,
    /// Ask the kernel and the live-memory agent to merge the frames with equal pages of other processes.
    pub merge: bool,
    /// Key of the content fingerprints: secret, so that a guest cannot choose collisions.
    pub key: FingerprintKey,
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

/// Smallest cache: enough for one request of every worker.
pub const CACHE_BYTES_MIN: usize = 1024 * BLOCK_BYTES;

/// Largest cache: the number of a frame has 30 bits.
pub const CACHE_BYTES_MAX: usize = FRAMES_MAX * BLOCK_BYTES;

/// An unpredictable number: the standard library seeds its hash maps from the kernel's generator.
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

    /// Most blocks that one request holds: a small cache must serve several requests at the same time.
    pub(crate) fn io_blocks_max(&self) -> usize {
        (self.frame_count() / 64).clamp(8, CHUNK_BLOCKS)
    }
}
