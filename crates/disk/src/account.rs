//! The account: what the frames hold, who shares them, and whether the books agree.

use crate::BLOCK_BYTES;
use crate::cache::{CHUNK_BLOCKS, Cache};
use crate::fingerprints::Known;
use crate::frames::FrameIndex;
use crate::image::{Image, State};
use crate::stats::{ImageStatus, Status, get};
use crate::table::{BlockKey, Use};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// One image's blocks, counted over all frames.
#[derive(Clone, Copy, Default)]
struct Tally {
    sole: u64,
    shared: u64,
    dirty: u64,
    saved_bytes: f64,
}

impl Cache {
    /// Counts what is in memory and what sharing saves now. Walks all frames: about 20 ns per frame.
    pub fn status(&self) -> Status {
        let mut tallies: HashMap<u32, Tally> = HashMap::new();
        let mut status = Status {
            cache_bytes: (self.frames.count() * BLOCK_BYTES) as u64,
            merging: self.merging(),
            ..Status::default()
        };
        let mut used = 0;
        for frame in (0..self.frames.count() as u32).map(FrameIndex) {
            let body = self.table.lock(frame);
            let sharers = body.sharers.as_slice();
            match (body.used, sharers.len()) {
                (Use::None, _) | (_, 0) => continue,
                (Use::Dirty, _) => tallies.entry(sharers[0].image).or_default().dirty += 1,
                (Use::Clean, 1) => {
                    status.pages_unshared += 1;
                    tallies.entry(sharers[0].image).or_default().sole += 1;
                }
                (Use::Clean, count) => {
                    status.pages_shared += 1;
                    status.pages_sharing += count as u64;
                    for key in sharers {
                        let tally = tallies.entry(key.image).or_default();
                        tally.shared += 1;
                        tally.saved_bytes += BLOCK_BYTES as f64 * (1.0 - 1.0 / count as f64);
                    }
                }
            }
            used += 1;
        }
        let block = BLOCK_BYTES as u64;
        status.resident_bytes = used * block;
        status.memory_saved_bytes = (status.pages_sharing - status.pages_shared) * block;
        for image in self.images() {
            let tally = tallies.get(&image.id).copied().unwrap_or_default();
            let zeros = image.count_zeros();
            status.pages_zero += zeros;
            let counters = &image.counters;
            let line = ImageStatus {
                name: image.name(),
                size_bytes: image.size(),
                resident_bytes: (tally.sole + tally.shared + tally.dirty + zeros) * block,
                shared_bytes: tally.shared * block,
                dirty_bytes: tally.dirty * block,
                memory_saved_bytes: tally.saved_bytes.round() as u64,
                io_saved_bytes: get(&counters.io_saved_bytes),
                hits: get(&counters.hits),
                misses: get(&counters.misses),
                disk_read_bytes: get(&counters.disk_read_bytes),
                disk_written_bytes: get(&counters.disk_written_bytes),
                direct_io: image.direct(),
                open: false,
                changed_behind: get(&counters.changed_behind),
                fingerprints: image.fingerprints.lock().as_ref().map(|known| known.outcome.clone()),
            };
            status.io_saved_bytes += line.io_saved_bytes;
            status.hits += line.hits;
            status.misses += line.misses;
            status.disk_read_bytes += line.disk_read_bytes;
            status.disk_written_bytes += line.disk_written_bytes;
            status.dirty_bytes += line.dirty_bytes;
            status.images.push(line);
        }
        status.images.sort_by(|a, b| a.name.cmp(&b.name));
        status.metadata_bytes = self.metadata_bytes() as u64;
        let counters = &self.counters;
        status.breaks = get(&counters.breaks);
        status.shared_on_load = get(&counters.shared_on_load);
        status.shared_after_writeback = get(&counters.shared_after_writeback);
        status.evictions = get(&counters.evictions);
        status.collisions = get(&counters.collisions);
        status.read_ahead_blocks = get(&counters.read_ahead_blocks);
        status.syncs = get(&counters.syncs);
        status.writeback_errors = get(&counters.writeback_errors);
        status.uncached_reads = get(&counters.uncached_reads);
        status.fingerprint_files_rejected = get(&counters.fingerprint_files_rejected);
        status
    }

    fn metadata_bytes(&self) -> usize {
        let images = self.images();
        let chunks: usize = images.iter().map(|image| image.chunk_count()).sum();
        let known = |image: &Arc<Image>| image.fingerprints.lock().as_ref().map_or(0, Known::memory_bytes);
        let sharers = (0..self.frames.count() as u32).map(|n| match self.table.lock(FrameIndex(n)).sharers.len() {
            0 | 1 => 0,
            count => 24 + count * size_of::<BlockKey>(),
        });
        self.table.memory_bytes()
            + sharers.sum::<usize>()
            + self.queues.lock().memory_bytes()
            + self.index.memory_bytes()
            + self.frames.count() * size_of::<u32>()
            + chunks * (CHUNK_BLOCKS * 4 + 128)
            + images.iter().map(known).sum::<usize>()
    }

    /// Checks that entries, frame records, index, free list and counts agree, while nobody uses the cache.
    ///
    /// # Errors
    /// The first disagreement, in words. For tests and fuzzing.
    pub fn verify(&self) -> Result<(), String> {
        let mut owners: HashMap<FrameIndex, HashSet<BlockKey>> = HashMap::new();
        let mut dirty_frames = HashSet::new();
        let mut dirty_total = 0;
        for image in self.images() {
            let dirty = self.verify_image(&image, &mut owners, &mut dirty_frames)?;
            if dirty != image.dirty_blocks.load(Ordering::Relaxed) {
                return Err(format!(
                    "{} counts another number of dirty blocks than the {dirty} there are",
                    image.name()
                ));
            }
            dirty_total += dirty;
        }
        if dirty_total != self.dirty_blocks.load(Ordering::Relaxed) {
            return Err(format!("{dirty_total} blocks are dirty, another number is counted"));
        }
        let mut used = 0;
        for frame in (0..self.frames.count() as u32).map(FrameIndex) {
            let body = self.table.lock(frame);
            let sharers: HashSet<BlockKey> = body.sharers.as_slice().iter().copied().collect();
            let there = owners.remove(&frame).unwrap_or_default();
            if sharers != there || sharers.len() != body.sharers.len() {
                return Err(format!("frame {frame:?} lists {sharers:?}, but {there:?} refer to it"));
            }
            let expected = match (sharers.is_empty(), dirty_frames.contains(&frame)) {
                (true, _) => Use::None,
                (false, true) => Use::Dirty,
                (false, false) => Use::Clean,
            };
            if body.used != expected {
                return Err(format!("frame {frame:?} is {:?} and should be {expected:?}", body.used));
            }
            if body.used == Use::Clean && self.fingerprint(frame) != body.fingerprint {
                return Err(format!("clean frame {frame:?} was written in place"));
            }
            let found = self.index.get(body.fingerprint, |other| other == frame).is_some();
            if body.indexed != found {
                return Err(format!("frame {frame:?} and the index disagree"));
            }
            if body.indexed && body.used != Use::Clean {
                return Err(format!("frame {frame:?} is indexed and {:?}", body.used));
            }
            used += usize::from(body.used != Use::None);
        }
        if used + self.free.len() != self.frames.count() {
            return Err(format!("{used} used and {} free frames are not {}", self.free.len(), self.frames.count()));
        }
        Ok(())
    }

    fn verify_image(
        &self,
        image: &Arc<Image>,
        owners: &mut HashMap<FrameIndex, HashSet<BlockKey>>,
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
                    State::Absent | State::Zero => continue,
                    State::Clean(frame) => frame,
                    State::Dirty(frame) => {
                        dirty += 1;
                        dirty_frames.insert(frame);
                        frame
                    }
                    State::Writeback(_) => return Err(format!("block {at} of chunk {number} is still in writeback")),
                };
                let key = BlockKey { image: image.id, block: number * CHUNK_BLOCKS as u64 + at as u64 };
                owners.entry(frame).or_default().insert(key);
            }
            let listed = image.dirty_chunks.lock().contains(&number);
            if listed != (dirty > dirty_before) || entries.dirty() != dirty - dirty_before {
                return Err(format!("chunk {number} miscounts its dirty blocks"));
            }
        }
        Ok(dirty)
    }

    /// The frames that hold the present blocks of an image, by block: who has the same number shares memory.
    pub fn frame_numbers(&self, image: &Image) -> HashMap<u64, u32> {
        let mut numbers = HashMap::new();
        for number in image.chunk_numbers(0) {
            let Some(chunk) = image.existing_chunk(number) else { continue };
            let entries = chunk.entries.read();
            for at in 0..CHUNK_BLOCKS {
                if let State::Clean(frame) | State::Dirty(frame) | State::Writeback(frame) = entries.state(at) {
                    numbers.insert(number * CHUNK_BLOCKS as u64 + at as u64, frame.0);
                }
            }
        }
        numbers
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, FingerprintKey};
    use crate::sim::SimFile;

    #[test]
    fn fingerprints_count_as_bookkeeping_and_go_when_they_are_forgotten() {
        let config = Config { cache_bytes: 4 << 20, key: FingerprintKey::Strong([7; 32]), ..Config::default() };
        let cache = Cache::new(config).unwrap();
        let data: Vec<u8> = (0..(16u32 << 20) / 8).flat_map(|n| u64::from(n + 1).to_le_bytes()).collect();
        let blocks = data.len() / BLOCK_BYTES;
        let image = cache.add_image("x", Arc::new(SimFile::new(data))).unwrap();
        *image.fingerprints.lock() = Some(Known::default());
        let mut bytes = vec![0; 1 << 20];
        (0..16).for_each(|n| assert!(cache.read(&image, n << 20, &mut bytes).is_ok()));
        let with = cache.metadata_bytes();
        let known = image.fingerprints.lock().take().unwrap();
        assert!((16 * blocks..17 * blocks).contains(&known.memory_bytes()), "{}", known.memory_bytes());
        assert_eq!(with, cache.metadata_bytes() + known.memory_bytes());
        *image.fingerprints.lock() = Some(known);
        // In pieces: whatever is left of a chunk keeps it.
        for block in 0..blocks as u64 {
            cache.punch(&image, block * BLOCK_BYTES as u64, BLOCK_BYTES as u64).unwrap();
            let known = image.fingerprints.lock().as_ref().unwrap().memory_bytes();
            assert_eq!(known > 0, (block as usize) < blocks - 1, "after block {block}");
        }
    }
}
