//! Thread records: what one thread holds of an arena, stored where other threads and processes can read it.
//!
//! A record carries the thread's process, the spans it owns (allocates from),
//! the blocks its guards read (hazards), the blocks it unlinked but must not free
//! yet (retired), and what it was about to do (intents). In a shared arena the
//! records lie in the shared memory, so any thread that notices a death can
//! release what the dead thread held.
//!
//! Only its owner writes a record, except during recovery and collection of a
//! free record. Both take the record by a compare-and-swap of its `state` word.

use super::class::CLASS_COUNT;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Thread records of an arena: threads, over all processes, that can use it at the same time.
pub const THREADS_MAX: usize = 1024;

/// Records beyond those ever taken that have pages: a thread needs a record to free memory, even when the system has no
/// page left.
pub(super) const RECORDS_SPARE: usize = 4;

/// Blocks one thread can hold under guards at the same time; further guards copy.
pub const HAZARDS: usize = 8;

/// Retired blocks between two collections.
pub(super) const COLLECT_EVERY: u64 = 64;

/// Retired blocks of a record while records up to `high` were taken. All hazards of those records cannot fill it, so a
/// retire always finds a free entry.
pub(super) const fn retired_max(high: usize) -> usize {
    // By steps of a page, so that the records seldom need further ones.
    high.next_multiple_of(64) * HAZARDS + 2 * COLLECT_EVERY as usize
}

const RETIRED_MAX: usize = retired_max(THREADS_MAX);

/// Bytes of a record that have pages while records up to `high` were taken.
pub(super) const fn record_bytes(high: usize) -> usize {
    std::mem::offset_of!(ThreadRecord, retired) + retired_max(high) * 8
}

/// Intent slot: a block taken from the allocator and not yet linked anywhere.
pub const INTENT_ALLOC: usize = 0;
/// Intent slot: a block about to be unlinked and not yet among the retired ones.
pub const INTENT_RETIRE: usize = 1;

/// The whole `state` of a record that belonged to a process known to be dead, whichever it was.
pub(super) const ABANDONED: u64 = 3;

/// The record of one thread, in arena memory.
#[repr(C, align(64))]
pub struct ThreadRecord {
    pub(super) state: AtomicU64,
    pub(super) intents: [AtomicU64; 2],
    /// Bytes and number of blocks retired since the last collection.
    pub(super) retired_bytes: AtomicU64,
    pub(super) retired_count: AtomicU64,
    /// Entries of `retired` at and above this index are zero.
    pub(super) retired_high: AtomicU64,
    /// Bytes of the units in `owned_spans`, without log extents.
    pub(super) owned_bytes: AtomicU64,
    _pad: u64,
    pub(super) hazards: [AtomicU64; HAZARDS],
    /// Unit (span or slab) owned per class, plus one; 0 is none. Another thread may have taken it back since: the unit's
    /// `meta` word is the truth.
    pub(super) owned_spans: [AtomicU32; CLASS_COUNT],
    /// Bitmap word per class at which the last block was found.
    pub(super) cursors: [AtomicU32; CLASS_COUNT],
    /// Retired blocks; 0 is an empty entry.
    pub(super) retired: [AtomicU64; RETIRED_MAX],
}

impl ThreadRecord {
    /// Returns the block that the record's owner was about to link or unlink, 0 for none.
    pub fn intent(&self, which: usize) -> u64 {
        self.intents[which].load(Ordering::Acquire)
    }

    /// Records the intent to unlink `block`. Must come before the store that unlinks it.
    #[inline]
    pub fn intend_retire(&self, block: u64) {
        self.intents[INTENT_RETIRE].store(block, Ordering::Release);
    }

    /// Clears the intent to link a block: it is linked, or was freed.
    #[inline]
    pub fn settle_alloc(&self) {
        self.intents[INTENT_ALLOC].store(0, Ordering::Release);
    }

    /// Clears the intent to retire a block.
    #[inline]
    pub fn settle_retire(&self) {
        self.intents[INTENT_RETIRE].store(0, Ordering::Release);
    }

    /// Returns the index of a hazard that is not in use.
    pub fn hazard_free(&self) -> Option<usize> {
        self.hazards.iter().position(|hazard| hazard.load(Ordering::Relaxed) == 0)
    }

    /// Announces that this thread reads `block`. The caller must check afterwards that the block is still linked.
    #[inline]
    pub fn hazard_set(&self, index: usize, block: u64) {
        self.hazards[index].store(block, Ordering::Relaxed);
        // Pairs with the SeqCst fence in `collect`: either the collector sees this hazard, or the caller's check after
        // this fence sees that the block was unlinked before.
        std::sync::atomic::fence(Ordering::SeqCst);
    }

    /// Ends the announcement of [`ThreadRecord::hazard_set`].
    #[inline]
    pub fn hazard_clear(&self, index: usize) {
        // Release: our reads of the block happen before it is freed; pairs with the acquire load of the hazard in
        // `collect`.
        self.hazards[index].store(0, Ordering::Release);
    }
}
