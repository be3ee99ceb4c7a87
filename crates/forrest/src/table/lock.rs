//! Locks: one word per segment, with the holder's seat and the number of entries.
//!
//! Writers wait for a living holder only: whoever finds that he is dead cleans
//! up after him (`recover.rs`) and goes on.

use super::Table;
use llds::arena::SeatRef;
use llds::arena::fault::point;
use std::sync::atomic::{AtomicU64, Ordering};

const OWNER_SHIFT: u32 = 48;
const COUNT: u64 = (1 << OWNER_SHIFT) - 1;

/// A held segment lock; dropping it unlocks.
pub struct Held<'t> {
    table: &'t Table,
    segment: usize,
}

impl Drop for Held<'_> {
    #[inline]
    fn drop(&mut self) {
        self.table.unlock(self.segment, self.table.count(self.segment));
    }
}

impl Table {
    /// Locks a segment for writing; waits for a living holder, cleans up after a dead one.
    #[inline]
    pub fn lock(&self, seat: &SeatRef<'_>, segment: usize) -> Held<'_> {
        self.lock_as(seat.owner(), segment);
        Held { table: self, segment }
    }

    /// Locks a segment in the name of the calling thread's seat, and returns how many entries it has.
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
    pub(super) fn held(&self, segment: usize) -> Held<'_> {
        Held { table: self, segment }
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

    pub(super) fn try_lock(&self, seat: &SeatRef<'_>, segment: usize) -> Option<Held<'_>> {
        let lock = self.lock_word(segment);
        let seen = lock.load(Ordering::Relaxed);
        let mine = seat.owner() << OWNER_SHIFT;
        let free = seen >> OWNER_SHIFT == 0
            && lock.compare_exchange(seen, seen | mine, Ordering::Acquire, Ordering::Relaxed).is_ok();
        // Made only if we hold it: dropping it unlocks.
        free.then(|| Held { table: self, segment })
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
