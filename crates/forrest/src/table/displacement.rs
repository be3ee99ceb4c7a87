//! Displacement: finds a free slot in a home bucket, and makes one by moving other entries (cuckoo hashing).

use super::write::FreeSlot;
use super::{Dir, EntryPosition, Homes, Table};
use crate::bucket::SLOTS;
use llds::arena::fault::point;
use std::sync::atomic::{Ordering, fence};

impl Table {
    /// A free slot for an entry in its home buckets; in `place`'s own bucket if that has one.
    #[inline]
    pub(super) fn free_slot_for(&self, dir: Dir, homes: Homes, place: Option<EntryPosition>) -> Option<FreeSlot> {
        if dir.buckets() == 0 {
            return None;
        }
        let free_in = |bucket: usize| {
            let head = self.bucket(dir, bucket).head(Ordering::Relaxed);
            (!head.is_full()).then(|| FreeSlot { bucket, slot: head.free_slot() })
        };
        if let Some(free) = place.and_then(|place| free_in(place.bucket)) {
            return Some(free);
        }
        let used = |bucket: usize| self.bucket(dir, bucket).head(Ordering::Relaxed).used();
        let (first, second) = (used(homes.first), used(homes.second));
        free_in(if second < first { homes.second } else { homes.first })
    }

    /// Frees a slot in one of two full home buckets: one of their entries moves to its other home, perhaps after
    /// another entry moved out of that one. `None` if no entry can move.
    #[cold]
    #[inline(never)]
    pub(super) fn displace(&self, dir: Dir, homes: Homes) -> Option<FreeSlot> {
        let near = [homes.first, homes.second].into_iter().find_map(|bucket| self.displace_from(dir, bucket));
        near.or_else(|| self.displace_farther(dir, homes))
    }

    /// Moves an entry out of a full bucket to its other home, if one has a free slot there.
    fn displace_from(&self, dir: Dir, bucket: usize) -> Option<FreeSlot> {
        /// Entries for which the other home is prefetched before the first of them is read.
        const AHEAD: usize = 4;
        for slots in (0..SLOTS).step_by(AHEAD) {
            let others: [usize; AHEAD] =
                std::array::from_fn(|at| self.other_home(dir, FreeSlot { bucket, slot: slots + at }));
            // Both lines, the first ones first: they decide which second line is written.
            for &other in &others {
                llds::prefetch(self.bucket(dir, other));
            }
            for &other in &others {
                llds::prefetch(&self.bucket(dir, other).words);
            }
            for (at, &other) in others.iter().enumerate() {
                let head = self.bucket(dir, other).head(Ordering::Relaxed);
                if !head.is_full() {
                    let free = FreeSlot { bucket, slot: slots + at };
                    self.move_entry(dir, free, FreeSlot { bucket: other, slot: head.free_slot() });
                    return Some(free);
                }
            }
        }
        None
    }

    /// As [`Table::displace`] if the other homes of all entries are full too: frees a slot in one of those first.
    #[cold]
    fn displace_farther(&self, dir: Dir, homes: Homes) -> Option<FreeSlot> {
        for bucket in [homes.first, homes.second] {
            for slot in 0..SLOTS {
                let free = FreeSlot { bucket, slot };
                let other = self.other_home(dir, free);
                // An entry that moves out of there does not move here: this bucket is full.
                if other != bucket
                    && let Some(freed) = self.displace_from(dir, other)
                {
                    self.move_entry(dir, free, freed);
                    return Some(free);
                }
            }
        }
        None
    }

    fn other_home(&self, dir: Dir, at: FreeSlot) -> usize {
        Homes::of(self.bucket(dir, at.bucket).remainder(at.slot), dir.buckets()).other(at.bucket)
    }

    /// Moves an entry to its other home, under the shard's lock.
    ///
    /// The entry exists twice for a moment, and at every moment at least once; a death in between leaves it twice
    /// (`recover.rs`). A reader that read the other bucket before the move and this one after finds the other bucket's
    /// header changed.
    fn move_entry(&self, dir: Dir, from: FreeSlot, to: FreeSlot) {
        let (old, new) = (self.bucket(dir, from.bucket), self.bucket(dir, to.bucket));
        let word = old.words[from.slot].load(Ordering::Relaxed);
        fence(Ordering::Release);
        new.fill(to.slot, old.mark(from.slot).kind(), old.remainder(from.slot), word);
        point();
        new.head.store(new.head(Ordering::Relaxed).with(to.slot).0, Ordering::Release);
        point();
        old.head.store(old.head(Ordering::Relaxed).without(from.slot).0, Ordering::Release);
        point();
    }
}
