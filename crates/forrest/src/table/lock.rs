//! Locks: one word per segment, with the number of the holder's thread record and the number of entries.
//!
//! Writers wait for a living holder only: a writer that finds the holder dead
//! recovers it (`recover.rs`) and continues.

use super::Table;
use llds::arena::ThreadRef;
use llds::arena::fault::point;
use std::sync::atomic::{AtomicU64, Ordering};

const OWNER_SHIFT: u32 = 48;
const COUNT: u64 = (1 << OWNER_SHIFT) - 1;

/// A held segment lock; dropping it unlocks.
pub struct SegmentGuard<'t> {
    table: &'t Table,
    segment: usize,
}

impl Drop for SegmentGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        self.table.unlock(self.segment, self.table.count(self.segment));
    }
}

impl Table {
    /// Locks a segment for writing; waits for a living holder, recovers a dead one.
    #[inline]
    pub fn lock(&self, thread: &ThreadRef<'_>, segment: usize) -> SegmentGuard<'_> {
        self.lock_as(thread.owner(), segment);
        SegmentGuard { table: self, segment }
    }

    /// Locks a segment for thread record `owner`, the calling thread's, and returns how many entries the segment has.
    /// [`Table::unlock`] must follow.
    #[inline(always)]
    pub(super) fn lock_as(&self, owner: u64, segment: usize) -> u64 {
        let lock = self.lock_word(segment);
        let mine = owner << OWNER_SHIFT;
        let mut seen = lock.load(Ordering::Relaxed);
        if seen >> OWNER_SHIFT != 0
            || lock.compare_exchange(seen, seen | mine, Ordering::Acquire, Ordering::Relaxed).is_err()
        {
            seen = self.lock_slow(lock, mine);
        }
        point();
        seen
    }

    /// Unlocks a segment that has `count` entries now.
    #[inline(always)]
    pub(super) fn unlock(&self, segment: usize, count: u64) {
        point();
        self.lock_word(segment).store(count, Ordering::Release);
    }

    /// A lock taken by [`Table::lock_as`].
    pub(super) fn held(&self, segment: usize) -> SegmentGuard<'_> {
        SegmentGuard { table: self, segment }
    }

    #[cold]
    fn lock_slow(&self, lock: &AtomicU64, mine: u64) -> u64 {
        let mut rounds = 0u32;
        loop {
            let seen = lock.load(Ordering::Relaxed);
            let owner = seen >> OWNER_SHIFT;
            if owner == 0 {
                if lock.compare_exchange(seen, seen | mine, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                    return seen;
                }
                continue;
            }
            rounds += 1;
            if rounds < 100 {
                std::hint::spin_loop();
            } else if rounds.is_multiple_of(512) && self.arena.is_dead(owner) {
                self.recover(owner);
            } else {
                std::thread::yield_now();
            }
        }
    }

    pub(super) fn try_lock(&self, thread: &ThreadRef<'_>, segment: usize) -> Option<SegmentGuard<'_>> {
        let lock = self.lock_word(segment);
        let seen = lock.load(Ordering::Relaxed);
        let mine = thread.owner() << OWNER_SHIFT;
        let free = seen >> OWNER_SHIFT == 0
            && lock.compare_exchange(seen, seen | mine, Ordering::Acquire, Ordering::Relaxed).is_ok();
        // Constructed only if this thread holds the lock, because dropping it unlocks.
        free.then(|| SegmentGuard { table: self, segment })
    }

    /// Entries of a segment.
    #[inline]
    pub fn count(&self, segment: usize) -> u64 {
        self.lock_word(segment).load(Ordering::Relaxed) & COUNT
    }

    #[inline]
    pub(super) fn add_count(&self, segment: usize, delta: i64) -> u64 {
        let lock = self.lock_word(segment);
        let word = lock.load(Ordering::Relaxed).wrapping_add_signed(delta);
        lock.store(word, Ordering::Relaxed);
        word & COUNT
    }
}
