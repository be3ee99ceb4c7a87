//! Retired blocks: unlinked blocks wait in the thread's record until no hazard names them.
//!
//! A record has more entries for retired blocks than there are hazards in all
//! records. So a free entry always exists, and the memory that stuck readers can
//! hold is bounded.

use super::class::SPAN_BYTES;
use super::process_identity::Identity;
use super::thread_record::{COLLECT_EVERY, ThreadRecord, retired_max};
use super::{Arena, Inner, ThreadRef, fault};
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Instant;

/// Bytes of retired blocks that a thread may keep in an arena of any size.
const RETIRED_BYTES: usize = 8 << 10;

impl Arena {
    /// Frees a block that was just unlinked as soon as no guard reads it, and clears the intent.
    #[inline]
    pub fn retire(&self, thread: &ThreadRef<'_>, block: u64) {
        self.retire_sized(thread, block, self.inner.block_bytes(block));
    }

    /// As [`Arena::retire`], when the caller knows the block's size (the arena does not store the size of log blocks).
    #[inline]
    pub fn retire_sized(&self, thread: &ThreadRef<'_>, block: u64, bytes: u64) {
        self.inner.retire(thread, block, bytes);
        fault::point();
        thread.settle_retire();
        let count = thread.retired_count.load(Ordering::Relaxed);
        // Retired blocks must not be much of what is in use.
        let bytes_max = (self.inner.used() * SPAN_BYTES / 64).clamp(RETIRED_BYTES, 1 << 20) as u64;
        if count >= COLLECT_EVERY || thread.retired_bytes.load(Ordering::Relaxed) > bytes_max {
            self.inner.collect(thread, thread.owner);
            self.inner.give_back_deferred(Some(Instant::now()), thread.owner);
        }
    }

    /// Frees the blocks that this thread retired and no guard reads.
    pub fn collect(&self, thread: &ThreadRef<'_>) {
        self.inner.collect(thread, thread.owner);
    }

    /// Frees the blocks that ended threads left retired and that no guard reads any more.
    pub fn collect_left(&self) {
        let inner = &self.inner;
        let mine = inner.identity.map_or(1, Identity::registered);
        for owner in 1..=inner.records_high() {
            let thread = inner.record_at(owner);
            let is_left = thread.state.load(Ordering::Acquire) == 0 && !inner.retired_blocks(thread).is_empty();
            // Take the record for a moment: a record with an owner is collected by that owner.
            if is_left && thread.state.compare_exchange(0, mine, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
                inner.collect(thread, owner);
                thread.state.store(0, Ordering::SeqCst);
            }
        }
    }

    /// Calls `visit` with every retired block of every record.
    pub fn each_retired(&self, mut visit: impl FnMut(u64)) {
        for owner in 1..=self.inner.records_high() {
            for entry in self.inner.retired_blocks(self.inner.record_at(owner)) {
                let block = entry.load(Ordering::Acquire);
                if block != 0 {
                    visit(block);
                }
            }
        }
    }
}

impl Inner {
    pub(super) fn retired_blocks<'a>(&self, thread: &'a ThreadRecord) -> &'a [AtomicU64] {
        let high = (thread.retired_high.load(Ordering::Acquire) as usize).min(thread.retired.len());
        &thread.retired[..high]
    }

    #[inline]
    pub(super) fn retire(&self, thread: &ThreadRecord, block: u64, bytes: u64) {
        let bytes = thread.retired_bytes.load(Ordering::Relaxed) + bytes;
        // New entries go above the old ones; `collect` lowers the mark. A free entry always exists: see `retired_max`.
        let mut index = thread.retired_high.load(Ordering::Relaxed) as usize;
        if index >= retired_max(self.records_high() as usize) {
            index = thread.retired.iter().position(|entry| entry.load(Ordering::Relaxed) == 0).unwrap_or(0);
        }
        thread.retired[index].store(block, Ordering::Release);
        fault::point();
        thread.retired_high.fetch_max(index as u64 + 1, Ordering::AcqRel);
        thread.retired_bytes.store(bytes, Ordering::Relaxed);
        thread.retired_count.store(thread.retired_count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// Removes retired entries that name no allocated block: only damage to the file creates them. No thread may write the
    /// record meanwhile.
    pub(super) fn drop_invalid_retired(&self, thread: &ThreadRecord) {
        for entry in self.retired_blocks(thread) {
            let block = entry.load(Ordering::Relaxed);
            if block != 0 && !self.is_allocated(block) {
                entry.store(0, Ordering::Relaxed);
            }
        }
    }

    /// Frees the retired blocks of `thread` that no hazard names.
    pub(super) fn collect(&self, thread: &ThreadRecord, owner: u64) {
        thread.retired_count.store(0, Ordering::Relaxed);
        thread.retired_bytes.store(0, Ordering::Relaxed);
        if self.retired_blocks(thread).is_empty() {
            return;
        }
        // Pairs with the SeqCst fence in `hazard_set`: if the loads below miss a hazard, its reader sees, in its check, that
        // the block was unlinked.
        fence(Ordering::SeqCst);
        let mut read: Vec<u64> = Vec::new();
        for other in 1..=self.records_high() {
            let other = self.record_at(other);
            if other.state.load(Ordering::Relaxed) != 0 {
                read.extend(other.hazards.iter().map(|hazard| hazard.load(Ordering::Acquire)).filter(|&b| b != 0));
            }
        }
        read.sort_unstable();
        let mut high = 0;
        for (index, entry) in self.retired_blocks(thread).iter().enumerate() {
            let block = entry.load(Ordering::Relaxed);
            if block == 0 {
                continue;
            }
            if read.binary_search(&block).is_ok() {
                high = index as u64 + 1;
                continue;
            }
            // Clear the entry first: a death in between loses the block until the next audit, but never frees it twice.
            entry.store(0, Ordering::SeqCst);
            fault::point();
            self.free(block, owner);
        }
        thread.retired_high.store(high, Ordering::Release);
    }
}
