//! Locks: one word per shard, with the number of the holder's thread record and the number of entries.
//!
//! Writers wait for a living holder only: a writer that finds the holder dead
//! recovers it (`recover.rs`) and continues.

use super::Table;
use llds::arena::ThreadRef;
use llds::arena::fault::point;
use std::sync::atomic::{AtomicU64, Ordering};

const OWNER_SHIFT: u32 = 48;
const COUNT: u64 = (1 << OWNER_SHIFT) - 1;

/// A held shard lock; dropping it unlocks.
pub struct ShardGuard<'t> {
    table: &'t Table,
    shard: usize,
}

impl Drop for ShardGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        self.table.unlock(self.shard, self.table.count(self.shard));
    }
}

impl Table {
    /// Locks a shard for writing; waits for a living holder, recovers a dead one.
    #[inline]
    pub fn lock(&self, thread: &ThreadRef<'_>, shard: usize) -> ShardGuard<'_> {
        self.lock_as(thread.owner(), shard);
        ShardGuard { table: self, shard }
    }

    /// Locks a shard for thread record `owner`, the calling thread's, and returns how many entries the shard has.
    /// [`Table::unlock`] must follow.
    #[inline(always)]
    pub(super) fn lock_as(&self, owner: u64, shard: usize) -> u64 {
        let lock = self.lock_word(shard);
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

    /// Unlocks a shard that has `count` entries now.
    #[inline(always)]
    pub(super) fn unlock(&self, shard: usize, count: u64) {
        point();
        self.lock_word(shard).store(count, Ordering::Release);
    }

    /// A lock taken by [`Table::lock_as`].
    pub(super) fn held(&self, shard: usize) -> ShardGuard<'_> {
        ShardGuard { table: self, shard }
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

    pub(super) fn try_lock(&self, thread: &ThreadRef<'_>, shard: usize) -> Option<ShardGuard<'_>> {
        let lock = self.lock_word(shard);
        let seen = lock.load(Ordering::Relaxed);
        let mine = thread.owner() << OWNER_SHIFT;
        let free = seen >> OWNER_SHIFT == 0
            && lock.compare_exchange(seen, seen | mine, Ordering::Acquire, Ordering::Relaxed).is_ok();
        // Constructed only if this thread holds the lock, because dropping it unlocks.
        free.then(|| ShardGuard { table: self, shard })
    }

    /// Entries of a shard.
    #[inline]
    pub fn count(&self, shard: usize) -> u64 {
        self.lock_word(shard).load(Ordering::Relaxed) & COUNT
    }

    #[inline]
    pub(super) fn add_count(&self, shard: usize, delta: i64) -> u64 {
        let lock = self.lock_word(shard);
        let word = lock.load(Ordering::Relaxed).wrapping_add_signed(delta);
        lock.store(word, Ordering::Relaxed);
        word & COUNT
    }
}
