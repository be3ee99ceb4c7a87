//! Which segments an agent holds, as the daemon knows it: these need not be sent again.

use pagefold_pool::Pool;
use pagefold_protocol::message::SEGMENTS_HELD;

/// No segment.
const NONE: (u32, u64) = (u32::MAX, 0);
/// Inode of a segment that the agent may not have got: no file's.
const UNSURE: u64 = 0;
/// Number of released segments of a pool that was not asked yet.
const UNASKED: u64 = u64::MAX;

/// A copy of the agent's own table.
pub(super) struct HeldSegments {
    /// Ids of segments, by place, and the inodes of their files: an id may be another's later.
    places: Box<[(u32, u64); SEGMENTS_HELD]>,
    /// Segments that the pool had let go when it was last asked.
    released: u64,
}

impl HeldSegments {
    /// Of an agent that holds none.
    pub(super) fn new() -> HeldSegments {
        HeldSegments { places: Box::new([NONE; SEGMENTS_HELD]), released: 0 }
    }

    /// Where segment `id` is held; two segments of one place cannot be held at once.
    pub(super) fn place(id: u32) -> usize {
        id as usize % SEGMENTS_HELD
    }

    /// Whether the agent has segment `id`, the file with this `inode`.
    pub(super) fn has(&self, id: u32, inode: u64) -> bool {
        self.places[HeldSegments::place(id)] == (id, inode)
    }

    /// The agent has it from now on, and no longer the one that was in its place.
    pub(super) fn note(&mut self, id: u32, inode: u64) {
        self.places[HeldSegments::place(id)] = (id, inode);
    }

    /// Segment `id` comes again with the next request for it: the agent may not have it. If it has, it is told to forget it
    /// all the same.
    pub(super) fn doubt(&mut self, id: u32) {
        let held = &mut self.places[HeldSegments::place(id)];
        if held.0 == id {
            held.1 = UNSURE;
        }
    }

    /// The pool may have let one go that was noted since it was last asked.
    pub(super) fn ask_again(&mut self) {
        self.released = UNASKED;
    }

    /// Takes out those that `pool` has let go; their ids.
    pub(super) fn take_released(&mut self, pool: &Pool) -> Vec<u32> {
        // Before the look: what is let go meanwhile is found in the next period.
        let released = pool.stats().segments_released;
        if std::mem::replace(&mut self.released, released) == released {
            return Vec::new();
        }
        let mut ids = Vec::new();
        for held in self.places.iter_mut() {
            let (id, inode) = *held;
            if id != NONE.0 && pool.segment_inode(id) != Some(inode) {
                *held = NONE;
                ids.push(id);
            }
        }
        ids
    }

    /// How many there are.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.places.iter().filter(|held| **held != NONE).count()
    }
}
