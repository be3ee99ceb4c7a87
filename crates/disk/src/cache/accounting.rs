//! The status: what the frames hold and what sharing saves.

use super::Cache;
use crate::fingerprint_file::BlockFingerprints;
use crate::frame_table::{BlockKey, FrameUse};
use crate::frames::FrameIndex;
use crate::geometry::{BLOCK_BYTES, CHUNK_BLOCKS};
use crate::image::Image;
use crate::stats::{ImageStatus, Status, get};
use std::collections::HashMap;
use std::sync::Arc;

/// One image's blocks, counted over all frames.
#[derive(Clone, Copy, Default)]
struct Tally {
    sole: u64,
    shared: u64,
    dirty: u64,
    saved_bytes: f64,
}

impl Cache {
    /// Counts what is in memory and what sharing saves now. Walks all frames, at about 20 ns each.
    pub fn status(&self) -> Status {
        let mut tallies: HashMap<u32, Tally> = HashMap::new();
        let mut status = Status {
            cache_bytes: (self.frames.count() * BLOCK_BYTES) as u64,
            merging: self.merging(),
            ..Status::default()
        };
        let mut used = 0;
        for frame in (0..self.frames.count() as u32).map(FrameIndex) {
            let state = self.table.lock(frame);
            let sharers = state.sharers.as_slice();
            match (state.used, sharers.len()) {
                (FrameUse::None, _) | (_, 0) => continue,
                (FrameUse::Dirty, _) => tallies.entry(sharers[0].image).or_default().dirty += 1,
                (FrameUse::Clean, 1) => {
                    status.pages_unshared += 1;
                    tallies.entry(sharers[0].image).or_default().sole += 1;
                }
                (FrameUse::Clean, count) => {
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
        status.cow_breaks = get(&counters.cow_breaks);
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
        let known = |image: &Arc<Image>| image.fingerprints.lock().as_ref().map_or(0, BlockFingerprints::memory_bytes);
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::fingerprint::FingerprintKey;
    use crate::sim::SimFile;

    #[test]
    fn fingerprints_count_as_metadata_until_they_are_forgotten() {
        let config = Config { cache_bytes: 4 << 20, key: FingerprintKey::Strong([7; 32]), ..Config::default() };
        let cache = Cache::new(config).unwrap();
        let data: Vec<u8> = (0..(16u32 << 20) / 8).flat_map(|n| u64::from(n + 1).to_le_bytes()).collect();
        let blocks = data.len() / BLOCK_BYTES;
        let image = cache.add_image("x", Arc::new(SimFile::new(data))).unwrap();
        *image.fingerprints.lock() = Some(BlockFingerprints::default());
        let mut bytes = vec![0; 1 << 20];
        (0..16).for_each(|n| assert!(cache.read(&image, n << 20, &mut bytes).is_ok()));
        let with = cache.metadata_bytes();
        let known = image.fingerprints.lock().take().unwrap();
        assert!((16 * blocks..17 * blocks).contains(&known.memory_bytes()), "{}", known.memory_bytes());
        assert_eq!(with, cache.metadata_bytes() + known.memory_bytes());
        *image.fingerprints.lock() = Some(known);
        // In pieces: a chunk's fingerprints stay while one block of it is known.
        for block in 0..blocks as u64 {
            cache.punch(&image, block * BLOCK_BYTES as u64, BLOCK_BYTES as u64).unwrap();
            let known = image.fingerprints.lock().as_ref().unwrap().memory_bytes();
            assert_eq!(known > 0, (block as usize) < blocks - 1, "after block {block}");
        }
    }
}
