//! Consistency checks of the cache's books, for tests and fuzzing.

use super::Cache;
use crate::frame_table::{BlockKey, FrameUse};
use crate::frames::FrameIndex;
use crate::geometry::CHUNK_BLOCKS;
use crate::image::{BlockState, Image};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Cache {
    /// Checks that entries, frame records, index, free list and counts agree. No other thread may use the cache meanwhile.
    ///
    /// # Errors
    /// A description of the first disagreement.
    pub fn verify(&self) -> Result<(), String> {
        let mut users: HashMap<FrameIndex, HashSet<BlockKey>> = HashMap::new();
        let mut dirty_frames = HashSet::new();
        let mut dirty_total = 0;
        for image in self.images() {
            let dirty = self.verify_image(&image, &mut users, &mut dirty_frames)?;
            if dirty != image.dirty_blocks.load(Ordering::Relaxed) {
                return Err(format!("{} miscounts its {dirty} dirty blocks", image.name()));
            }
            dirty_total += dirty;
        }
        if dirty_total != self.dirty_blocks.load(Ordering::Relaxed) {
            return Err(format!("the cache miscounts its {dirty_total} dirty blocks"));
        }
        let mut used = 0;
        for frame in (0..self.frames.count() as u32).map(FrameIndex) {
            let state = self.table.lock(frame);
            let sharers: HashSet<BlockKey> = state.sharers.as_slice().iter().copied().collect();
            let there = users.remove(&frame).unwrap_or_default();
            if sharers != there || sharers.len() != state.sharers.len() {
                return Err(format!("frame {frame:?} lists {sharers:?}, but {there:?} refer to it"));
            }
            let expected = match (sharers.is_empty(), dirty_frames.contains(&frame)) {
                (true, _) => FrameUse::None,
                (false, true) => FrameUse::Dirty,
                (false, false) => FrameUse::Clean,
            };
            if state.used != expected {
                return Err(format!("frame {frame:?} is {:?} and should be {expected:?}", state.used));
            }
            if state.used == FrameUse::Clean && self.fingerprint(frame) != state.fingerprint {
                return Err(format!("clean frame {frame:?} was written in place"));
            }
            let found = self.index.get(state.fingerprint, |other| other == frame).is_some();
            if state.indexed != found {
                return Err(format!("frame {frame:?} and the index disagree"));
            }
            if state.indexed && state.used != FrameUse::Clean {
                return Err(format!("frame {frame:?} is indexed and {:?}", state.used));
            }
            used += usize::from(state.used != FrameUse::None);
        }
        if used + self.free.len() != self.frames.count() {
            return Err(format!("{used} used and {} free frames are not {}", self.free.len(), self.frames.count()));
        }
        Ok(())
    }

    fn verify_image(
        &self,
        image: &Arc<Image>,
        users: &mut HashMap<FrameIndex, HashSet<BlockKey>>,
        dirty_frames: &mut HashSet<FrameIndex>,
    ) -> Result<usize, String> {
        let mut dirty = 0;
        for number in image.chunk_numbers(0) {
            let Some(chunk) = image.existing_chunk(number) else { continue };
            let entries = chunk.entries.read();
            let dirty_before = dirty;
            for at in 0..CHUNK_BLOCKS {
                if entries.is_loading(at) {
                    return Err(format!("block {at} of chunk {number} is still loading"));
                }
                let frame = match entries.state(at) {
                    BlockState::Absent | BlockState::Zero => continue,
                    BlockState::Clean(frame) => frame,
                    BlockState::Dirty(frame) => {
                        dirty += 1;
                        dirty_frames.insert(frame);
                        frame
                    }
                    BlockState::Writeback(_) => {
                        return Err(format!("block {at} of chunk {number} is still in writeback"));
                    }
                };
                let key = BlockKey { image: image.id, block: number * CHUNK_BLOCKS as u64 + at as u64 };
                users.entry(frame).or_default().insert(key);
            }
            let listed = image.dirty_chunks.lock().contains(&number);
            if listed != (dirty > dirty_before) || entries.dirty() != dirty - dirty_before {
                return Err(format!("chunk {number} miscounts its dirty blocks"));
            }
        }
        Ok(dirty)
    }

    /// The frames of an image's present blocks, by block. Blocks with the same number share memory.
    pub fn frame_numbers(&self, image: &Image) -> HashMap<u64, u32> {
        let mut numbers = HashMap::new();
        for number in image.chunk_numbers(0) {
            let Some(chunk) = image.existing_chunk(number) else { continue };
            let entries = chunk.entries.read();
            for at in 0..CHUNK_BLOCKS {
                if let BlockState::Clean(frame) | BlockState::Dirty(frame) | BlockState::Writeback(frame) =
                    entries.state(at)
                {
                    numbers.insert(number * CHUNK_BLOCKS as u64 + at as u64, frame.0);
                }
            }
        }
        numbers
    }
}
