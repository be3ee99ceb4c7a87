//! Counters, and the status made from them.

use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of one image since it was opened.
#[derive(Default)]
pub(crate) struct ImageCounters {
    pub(crate) hits: AtomicU64,
    pub(crate) misses: AtomicU64,
    pub(crate) disk_read_bytes: AtomicU64,
    pub(crate) disk_written_bytes: AtomicU64,
    pub(crate) io_saved_bytes: AtomicU64,
    pub(crate) changed_behind: AtomicU64,
}

/// Counters of the whole cache.
#[derive(Default)]
pub(crate) struct CacheCounters {
    pub(crate) cow_breaks: AtomicU64,
    pub(crate) shared_on_load: AtomicU64,
    pub(crate) shared_after_writeback: AtomicU64,
    pub(crate) evictions: AtomicU64,
    pub(crate) collisions: AtomicU64,
    pub(crate) read_ahead_blocks: AtomicU64,
    pub(crate) syncs: AtomicU64,
    pub(crate) writeback_errors: AtomicU64,
    pub(crate) uncached_reads: AtomicU64,
    pub(crate) fingerprint_files_rejected: AtomicU64,
}

pub(crate) fn add(counter: &AtomicU64, amount: usize) {
    counter.fetch_add(amount as u64, Ordering::Relaxed);
}

pub(crate) fn get(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

/// What a cache holds and saves now. Sizes in bytes; counters since the mount.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The mount point.
    pub mountpoint: String,
    /// The directory that holds them.
    pub directory: String,
    /// How the kernel's requests arrive: `ring` (FUSE over io_uring) or `classic` (/dev/fuse).
    #[serde(default)]
    pub transport: String,
    /// The process that serves them.
    pub pid: u32,
    /// Seconds since the mount.
    pub uptime_s: u64,
    /// Limit of the memory for blocks.
    pub cache_bytes: u64,
    /// Memory that blocks take now, each shared one counted once.
    pub resident_bytes: u64,
    /// Memory that the bookkeeping takes on top.
    pub metadata_bytes: u64,
    /// Memory that the blocks would take beyond `resident_bytes` if every image had its own copy; zero blocks are free.
    pub memory_saved_bytes: u64,
    /// Reads that needed no disk because a fingerprint file named content that was in memory already.
    pub io_saved_bytes: u64,
    /// Blocks newer than the disk.
    pub dirty_bytes: u64,
    /// Frames that several blocks share.
    pub pages_shared: u64,
    /// Blocks that share them.
    pub pages_sharing: u64,
    /// Clean frames with one block.
    pub pages_unshared: u64,
    /// Blocks of zeros, which need no frame.
    pub pages_zero: u64,
    /// Blocks found in memory.
    pub hits: u64,
    /// Blocks not found in memory.
    pub misses: u64,
    /// Bytes read from the images' disk.
    pub disk_read_bytes: u64,
    /// Bytes written to the images' disk.
    pub disk_written_bytes: u64,
    /// Shared blocks that became private because they were written.
    pub cow_breaks: u64,
    /// Blocks loaded with a content that was in memory already.
    pub shared_on_load: u64,
    /// Blocks written back with a content that was in memory already.
    pub shared_after_writeback: u64,
    /// Frames that were evicted.
    pub evictions: u64,
    /// Equal fingerprints of unequal blocks: the comparison prevented a false sharing.
    pub collisions: u64,
    /// Blocks read before they were asked for.
    pub read_ahead_blocks: u64,
    /// Syncs that reached the disk.
    pub syncs: u64,
    /// Writebacks that the disk refused.
    pub writeback_errors: u64,
    /// Reads that bypassed the cache because there was no free frame.
    pub uncached_reads: u64,
    /// Fingerprint files that were stale or damaged, and are rebuilt.
    pub fingerprint_files_rejected: u64,
    /// Whether the frames may be merged with guests' pages.
    pub merging: bool,
    /// Each image with blocks in memory, or open.
    pub images: Vec<ImageStatus>,
}

/// One image's part. Sizes in bytes; counters since the image was opened.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ImageStatus {
    /// Path below the directory.
    pub name: String,
    /// Size of the file.
    pub size_bytes: u64,
    /// Blocks in memory, zero blocks included.
    pub resident_bytes: u64,
    /// Of these, in frames with other blocks.
    pub shared_bytes: u64,
    /// Of these, newer than the disk.
    pub dirty_bytes: u64,
    /// This image's part of what sharing saves: of a frame with n blocks, each block saves 1 - 1/n.
    pub memory_saved_bytes: u64,
    /// Reads that needed no disk thanks to fingerprints.
    pub io_saved_bytes: u64,
    /// Blocks found in memory.
    pub hits: u64,
    /// Blocks not found in memory.
    pub misses: u64,
    /// Bytes read from disk.
    pub disk_read_bytes: u64,
    /// Bytes written to disk.
    pub disk_written_bytes: u64,
    /// Whether the kernel keeps no second copy.
    pub direct_io: bool,
    /// Whether a client has it open.
    pub open: bool,
    /// How often another program changed the file, so that its blocks were dropped.
    pub changed_behind: u64,
    /// What happened to the fingerprint file, if fingerprints are on.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub fingerprints: Option<String>,
}
