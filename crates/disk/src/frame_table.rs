//! The record of each frame, and the free frames.

use crate::fingerprint::Fingerprint;
use crate::frames::{FrameIndex, Frames, OwnedFrame};
use crate::policy::TOUCHES_MAX;
use parking_lot::{Mutex, MutexGuard};
use std::sync::atomic::{AtomicU8, Ordering};

/// Names a block of an image.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub(crate) struct BlockKey {
    pub(crate) image: u32,
    pub(crate) block: u64,
}

/// How a frame is used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum FrameUse {
    /// Free, or owned by a thread that fills it.
    None,
    /// Belongs to one block; written in place, never shared.
    Dirty,
    /// Equal to the disk; never written, may be shared.
    Clean,
}

/// The part of a frame's record that its lock guards.
#[derive(Debug)]
pub(crate) struct FrameState {
    pub(crate) used: FrameUse,
    /// Whether the content index names this frame. Only indexed frames gain sharers.
    pub(crate) indexed: bool,
    /// Whether one of the eviction queues holds this frame's number.
    pub(crate) queued: bool,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) sharers: Sharers,
}

impl FrameState {
    /// Returns true if the index names this frame for content with `fingerprint`, and the frame holds that content.
    pub(crate) fn represents(&self, fingerprint: Fingerprint) -> bool {
        self.used == FrameUse::Clean && self.indexed && self.fingerprint == fingerprint
    }
}

/// The blocks that share a frame. One is the common case and needs no allocation.
#[derive(Debug, Default)]
pub(crate) enum Sharers {
    #[default]
    None,
    One(BlockKey),
    #[allow(clippy::box_collection, reason = "keeps the record of a frame small")]
    Many(Box<Vec<BlockKey>>),
}

impl Sharers {
    pub(crate) fn as_slice(&self) -> &[BlockKey] {
        match self {
            Self::None => &[],
            Self::One(key) => std::slice::from_ref(key),
            Self::Many(keys) => keys,
        }
    }

    pub(crate) fn push(&mut self, key: BlockKey) {
        match self {
            Self::None => *self = Self::One(key),
            Self::One(first) => *self = Self::Many(Box::new(vec![*first, key])),
            Self::Many(keys) => keys.push(key),
        }
    }

    /// Removes `key`, which must be there.
    pub(crate) fn remove(&mut self, key: BlockKey) {
        match self {
            Self::One(only) if *only == key => *self = Self::None,
            Self::Many(keys) => {
                let at = keys.iter().position(|k| *k == key).expect("a sharer is on its frame's list");
                keys.swap_remove(at);
                if let [last] = keys[..] {
                    *self = Self::One(last);
                }
            }
            _ => unreachable!("{key:?} does not share this frame"),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.as_slice().len()
    }
}

struct FrameRecord {
    touches: AtomicU8,
    state: Mutex<FrameState>,
}

/// Set in `touches` for a frame that was read ahead: the read that it was loaded for does not count as a touch.
const READ_AHEAD: u8 = 0x80;

/// The records of all frames. Lock order: a chunk before a record; of two records, an owned one may be taken first.
pub(crate) struct FrameTable {
    records: Box<[FrameRecord]>,
}

impl FrameTable {
    /// Makes the records of `frame_count` frames.
    ///
    /// # Errors
    /// There is not enough memory for them.
    pub(crate) fn new(frame_count: usize) -> std::io::Result<Self> {
        let record = || FrameRecord {
            touches: AtomicU8::new(0),
            state: Mutex::new(FrameState {
                used: FrameUse::None,
                indexed: false,
                queued: false,
                fingerprint: Fingerprint::UNKNOWN,
                sharers: Sharers::None,
            }),
        };
        let mut records = Vec::new();
        records.try_reserve_exact(frame_count).map_err(|_| std::io::ErrorKind::OutOfMemory)?;
        records.extend((0..frame_count).map(|_| record()));
        Ok(Self { records: records.into_boxed_slice() })
    }

    pub(crate) fn lock(&self, frame: FrameIndex) -> MutexGuard<'_, FrameState> {
        self.records[frame.at()].state.lock()
    }

    /// Counts a reader of `frame`. Racing touches may count once: the count only guides eviction.
    pub(crate) fn touch(&self, frame: FrameIndex) {
        let touches = &self.records[frame.at()].touches;
        match touches.load(Ordering::Relaxed) {
            READ_AHEAD.. => touches.store(0, Ordering::Relaxed),
            n if n < TOUCHES_MAX => touches.store(n + 1, Ordering::Relaxed),
            _ => {}
        }
    }

    pub(crate) fn set_touches(&self, frame: FrameIndex, count: u8) {
        self.records[frame.at()].touches.store(count, Ordering::Relaxed);
    }

    pub(crate) fn mark_read_ahead(&self, frame: FrameIndex) {
        self.records[frame.at()].touches.store(READ_AHEAD, Ordering::Relaxed);
    }

    /// Touches that count for eviction.
    pub(crate) fn touches(&self, frame: FrameIndex) -> u8 {
        self.records[frame.at()].touches.load(Ordering::Relaxed) & !READ_AHEAD
    }

    /// Bytes of memory the records take, without the lists of sharers.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.records.len() * size_of::<FrameRecord>()
    }
}

/// Most free frames that keep their memory. Beyond it the memory of all but [`WARM_KEEP`] goes back to the kernel.
const WARM_MAX: usize = 1024;
const WARM_KEEP: usize = 512;

/// The frames that hold no block.
pub(crate) struct FreeFrames {
    lists: Mutex<Lists>,
}

struct Lists {
    /// Used lately: they still have memory.
    warm: Vec<OwnedFrame>,
    /// Without memory; the last one is taken first, so the list runs from high numbers to low.
    cold: Vec<OwnedFrame>,
}

impl FreeFrames {
    pub(crate) fn new(frame_count: usize) -> Self {
        let cold = (0..frame_count as u32).rev().map(|n| OwnedFrame(FrameIndex(n))).collect();
        Self { lists: Mutex::new(Lists { warm: Vec::new(), cold }) }
    }

    /// Moves up to `count` frames into `into`.
    pub(crate) fn take(&self, count: usize, into: &mut Vec<OwnedFrame>) {
        let mut lists = self.lists.lock();
        let Lists { warm, cold } = &mut *lists;
        let from_warm = warm.len().min(count);
        into.extend(warm.drain(warm.len() - from_warm..));
        let from_cold = cold.len().min(count - from_warm);
        into.extend(cold.drain(cold.len() - from_cold..).rev());
    }

    /// Puts frames back, and returns memory to the kernel if many free frames have it.
    pub(crate) fn put(&self, frames: &Frames, mut freed: Vec<OwnedFrame>) {
        let mut lists = self.lists.lock();
        lists.warm.append(&mut freed);
        if lists.warm.len() > WARM_MAX {
            let surplus = lists.warm.len() - WARM_KEEP;
            let mut trimmed: Vec<OwnedFrame> = lists.warm.drain(..surplus).collect();
            drop(lists);
            self.put_cold(frames, &mut trimmed);
        }
    }

    /// Returns the memory of all free frames to the kernel.
    pub(crate) fn trim(&self, frames: &Frames) {
        let mut trimmed = std::mem::take(&mut self.lists.lock().warm);
        self.put_cold(frames, &mut trimmed);
    }

    /// Returns the memory of `trimmed` to the kernel, and puts these frames back.
    fn put_cold(&self, frames: &Frames, trimmed: &mut Vec<OwnedFrame>) {
        frames.release(trimmed);
        // Neighbours are taken in ascending order again: a read into them has one buffer, not one for each frame.
        trimmed.reverse();
        self.lists.lock().cold.append(trimmed);
    }

    pub(crate) fn len(&self) -> usize {
        let lists = self.lists.lock();
        lists.warm.len() + lists.cold.len()
    }

    /// How many free frames still have memory.
    #[cfg(test)]
    pub(crate) fn warm_len(&self) -> usize {
        self.lists.lock().warm.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_record_stays_small() {
        // The bookkeeping is promised to stay near 2.5 % of the cache; this is its largest part.
        assert!(size_of::<FrameRecord>() <= 80, "{}", size_of::<FrameRecord>());
    }

    #[test]
    fn the_read_that_a_frame_was_read_ahead_for_is_not_a_touch() {
        assert_eq!(FrameTable::new(1 << 50).err().map(|e| e.kind()), Some(std::io::ErrorKind::OutOfMemory));
        let table = FrameTable::new(1).unwrap();
        table.mark_read_ahead(FrameIndex(0));
        table.touch(FrameIndex(0));
        assert_eq!(table.touches(FrameIndex(0)), 0);
        table.touch(FrameIndex(0));
        assert_eq!(table.touches(FrameIndex(0)), 1);
    }

    #[test]
    fn freed_frames_can_be_taken_again_and_their_memory_is_trimmed() {
        let frames = Frames::new(2 * WARM_MAX).unwrap();
        let free = FreeFrames::new(frames.count());
        let mut taken = Vec::new();
        free.take(3000, &mut taken);
        assert_eq!((taken.len(), free.len()), (2048, 0));
        assert!(taken.windows(2).all(|w| w[0].index() < w[1].index()), "fresh frames come as one run");
        free.put(&frames, taken);
        assert_eq!((free.len(), free.warm_len()), (2048, WARM_KEEP));
        free.trim(&frames);
        assert_eq!((free.len(), free.warm_len()), (2048, 0));
        let mut again = Vec::new();
        free.take(256, &mut again);
        assert!(again.is_sorted_by(|a, b| a.index().0 + 1 == b.index().0), "trimmed frames come as one run too");
    }
}
