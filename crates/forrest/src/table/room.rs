//! Room: a slot for an entry in one of its homes, and how to get one there.

use super::write::Room;
use super::{Dir, Homes, Place, Table};
use crate::bucket::SLOTS;
use llds::arena::fault::point;
use std::sync::atomic::{Ordering, fence};

impl Table {
    /// A free slot for an entry in its homes; in `place`'s own bucket if there is one.
    #[inline]
    pub(super) fn room(&self, dir: Dir, homes: Homes, place: Option<Place>) -> Option<Room> {
        if dir.buckets() == 0 {
            return None;
        }
        let free_in = |bucket: usize| {
            let head = self.bucket(dir, bucket).head(Ordering::Relaxed);
            (!head.is_full()).then(|| Room { bucket, slot: head.free_slot() })
        };
        if let Some(room) = place.and_then(|place| free_in(place.bucket)) {
            return Some(room);
        }
        let used = |bucket: usize| self.bucket(dir, bucket).head(Ordering::Relaxed).used();
        let (first, second) = (used(homes.first), used(homes.second));
        free_in(if second < first { homes.second } else { homes.first })
    }

    /// Makes room in one of two homes that are full: one of their entries moves to its other home, perhaps after another
    /// has moved out of there. `None` if none can.
    #[cold]
    #[inline(never)]
    pub(super) fn make_room(&self, dir: Dir, homes: Homes) -> Option<Room> {
        let near = [homes.first, homes.second].into_iter().find_map(|bucket| self.make_room_in(dir, bucket));
        near.or_else(|| self.make_room_farther(dir, homes))
    }

    /// Moves an entry out of a full bucket to its other home, if one has room there.
    fn make_room_in(&self, dir: Dir, bucket: usize) -> Option<Room> {
        /// Entries whose other homes are asked for before the first of them is looked at.
        const AHEAD: usize = 4;
        for slots in (0..SLOTS).step_by(AHEAD) {
            let others: [usize; AHEAD] =
                std::array::from_fn(|at| self.other_home(dir, Room { bucket, slot: slots + at }));
            // Both lines, but the first ones first: they tell which of the second is written to.
            for &other in &others {
                llds::prefetch(self.bucket(dir, other));
            }
            for &other in &others {
                llds::prefetch(&self.bucket(dir, other).words);
            }
            for (at, &other) in others.iter().enumerate() {
                let head = self.bucket(dir, other).head(Ordering::Relaxed);
                if !head.is_full() {
                    let room = Room { bucket, slot: slots + at };
                    self.move_entry(dir, room, Room { bucket: other, slot: head.free_slot() });
                    return Some(room);
                }
            }
        }
        None
    }

    /// As [`Table::make_room`] where the other homes of all entries are full too: one of those gets room first.
    #[cold]
    fn make_room_farther(&self, dir: Dir, homes: Homes) -> Option<Room> {
        for bucket in [homes.first, homes.second] {
            for slot in 0..SLOTS {
                let room = Room { bucket, slot };
                let other = self.other_home(dir, room);
                // Whatever moves out of there does not come here: we are full.
                if other != bucket
                    && let Some(freed) = self.make_room_in(dir, other)
                {
                    self.move_entry(dir, room, freed);
                    return Some(room);
                }
            }
        }
        None
    }

    fn other_home(&self, dir: Dir, at: Room) -> usize {
        Homes::of(self.bucket(dir, at.bucket).remainder(at.slot), dir.buckets()).other(at.bucket)
    }

    /// Moves an entry to its other home, under the segment's lock.
    ///
    /// It is there twice for a moment, and never not at all; a death in between leaves it twice (`recover.rs`). A reader who
    /// looked at the other home before, and here after, finds the other home's header changed.
    fn move_entry(&self, dir: Dir, from: Room, to: Room) {
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
