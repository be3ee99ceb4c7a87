//! Allocating frames: free ones, then those of evicted clean blocks, then those of flushed dirty blocks.
//!
//! The thread that needs frames evicts and flushes by itself, with at most `layout` locked. It also bounds how many
//! blocks are dirty.

use super::Cache;
use crate::error::Error;
use crate::frame_table::{BlockKey, FrameUse};
use crate::frames::OwnedFrame;
use crate::geometry::CHUNK_BLOCKS;
use crate::image::{BlockState, Image};
use crate::stats::add;
use std::io;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long a write waits for frames that other requests hold, for example while a disk hangs.
const WAIT_MAX: Duration = Duration::from_secs(30);
/// Pause between two tries.
const RETRY_PAUSE: Duration = Duration::from_millis(1);

impl Cache {
    /// Finds up to `count` frames: free ones, then those of evicted blocks, then of flushed ones.
    pub(super) fn allocate(&self, count: usize, into: &mut Vec<OwnedFrame>) {
        let goal = into.len() + count;
        for _ in 0..8 {
            self.free.take(goal - into.len(), into);
            if into.len() >= goal {
                return;
            }
            // A few more than needed, so that the next caller need not evict.
            if self.evict(goal - into.len() + 32) == 0 && self.flush_others(None) == 0 {
                break;
            }
        }
        self.free.take(goal - into.len(), into);
    }

    /// Fills `spare` up to `count` frames, for a caller that cannot continue without them. If there are none, other
    /// requests hold them and will free them: a thread that waits here holds no frame. No lock but `layout` may be held.
    pub(super) fn allocate_all(&self, count: usize, spare: &mut Vec<OwnedFrame>) -> Result<(), Error> {
        let mut began = None;
        while spare.len() < count {
            self.allocate(count - spare.len(), spare);
            if spare.len() < count {
                if began.get_or_insert_with(Instant::now).elapsed() > WAIT_MAX {
                    return Err(Error::Full(io::Error::from_raw_os_error(libc::ENOMEM)));
                }
                self.free_frames(std::mem::take(spare));
                std::thread::sleep(RETRY_PAUSE);
            }
        }
        Ok(())
    }

    /// Evicts until `count` frames are free or no more can be evicted; returns how many were.
    fn evict(&self, count: usize) -> usize {
        let mut freed = Vec::new();
        let mut tries = self.frames.count() * 2;
        while freed.len() < count && tries > 0 {
            tries -= 1;
            let victim = self.queues.lock().pop(|f| self.table.touches(f), |f, n| self.table.set_touches(f, n));
            let Some(frame) = victim else { break };
            let sharers: Vec<BlockKey> = {
                let mut state = self.table.lock(frame);
                state.queued = false;
                if state.used != FrameUse::Clean {
                    continue;
                }
                state.sharers.as_slice().to_vec()
            };
            let fingerprint = self.table.lock(frame).fingerprint;
            let mut evicted = None;
            for key in sharers {
                let Some(image) = self.image(key.image) else { continue };
                let Some(chunk) = image.existing_chunk(key.block / CHUNK_BLOCKS as u64) else { continue };
                let at = key.block as usize % CHUNK_BLOCKS;
                let mut entries = chunk.entries.write();
                if entries.state(at) == BlockState::Clean(frame) {
                    evicted = self.leave(frame, key);
                    entries.set(at, BlockState::Absent);
                }
            }
            match evicted {
                Some(frame) => {
                    self.queues.lock().remember(fingerprint.index_key());
                    freed.push(frame);
                }
                None => {
                    // It has gained a sharer since, or a loading thread is about to enter one.
                    let mut queues = self.queues.lock();
                    let mut state = self.table.lock(frame);
                    if state.used == FrameUse::Clean && !state.queued {
                        state.queued = true;
                        queues.put_back(frame);
                    }
                }
            }
        }
        let count = freed.len();
        add(&self.counters.evictions, count);
        self.free_frames(freed);
        count
    }

    /// Flushes some blocks of the image with the most dirty ones, or of the next if its disk refuses them; returns how many.
    fn flush_others(&self, except: Option<&Image>) -> usize {
        let mut images = self.images();
        images.retain(|image| image.dirty_bytes() > 0 && except.is_none_or(|e| e.id != image.id));
        images.sort_by_key(|image| std::cmp::Reverse(image.dirty_bytes()));
        let flushed = images.iter().map(|image| self.flush_some(image, 1024).unwrap_or(0));
        flushed.into_iter().find(|&count| count > 0).unwrap_or(0)
    }

    /// Flushes until `count` more dirty blocks of `image` are allowed.
    ///
    /// A write fails only if its own image's disk refuses blocks. If another disk does, the write continues once its own
    /// image has no dirty block left.
    pub(super) fn limit_dirty(&self, image: &Image, count: usize) -> Result<(), Error> {
        let dirty_max = self.config.dirty_max().max(count + 1) - count;
        while self.dirty_blocks.load(Ordering::Relaxed) > dirty_max {
            let own = if image.dirty_bytes() > 0 { self.flush_some(image, 1024) } else { Ok(0) };
            // If its own disk accepts nothing, flushing others may still be enough.
            if !matches!(own, Ok(1..)) && self.flush_others(Some(image)) == 0 {
                return own.map(drop).map_err(Error::Full);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::geometry::BLOCK_BYTES;
    use crate::sim::{Faults, SimFile};
    use std::sync::Arc;

    #[test]
    fn a_write_waits_for_frames_that_other_requests_hold() {
        let cache = Cache::new(Config { cache_bytes: 4 << 20, ..Config::default() }).unwrap();
        let file = Arc::new(SimFile::new(vec![1; 1 << 20]));
        let image = cache.add_image("x", file.clone()).unwrap();
        let mut taken = Vec::new();
        cache.free.take(cache.frames.count(), &mut taken);
        std::thread::scope(|scope| {
            let write = scope.spawn(|| cache.write(&image, 1000, &[2; 100_000]));
            std::thread::sleep(Duration::from_millis(100));
            assert!(!write.is_finished());
            // One by one: less than it needs each time.
            taken.drain(..).for_each(|frame| cache.free_frames(vec![frame]));
            write.join().unwrap().unwrap();
        });
        assert!(cache.sync(&image, 0..u64::MAX));
        assert_eq!(file.data()[1000..101_000], [2; 100_000]);
        cache.verify().unwrap();
    }

    #[test]
    fn a_bad_block_fails_no_write_while_another_image_can_be_flushed() {
        let config = Config { cache_bytes: 4 << 20, dirty_percent: 1, ..Config::default() };
        let cache = Cache::new(config).unwrap();
        let files = [(); 2].map(|()| Arc::new(SimFile::new(vec![1; 1 << 20])));
        let [full, bad] = [0, 1].map(|n| cache.add_image("x", files[n].clone()).unwrap());
        files[1].set_faults(Faults { bad_block: Some(0), ..Faults::default() });
        cache.write(&bad, 0, &[2; BLOCK_BYTES]).unwrap();
        for n in 1..cache.config.dirty_max() as u64 {
            cache.write(&full, n << 12, &[2; BLOCK_BYTES]).unwrap();
        }
        assert!(bad.dirty_bytes() > 0 && full.dirty_bytes() > 0);
        cache.write(&bad, 1 << 16, &[2; BLOCK_BYTES]).unwrap();
        // No other image can be flushed any more: now the error is reported.
        files[1].set_faults(Faults { write: Some(libc::EIO), ..Faults::default() });
        let refused = (0..64).find_map(|n| cache.write(&bad, n << 12, &[3; BLOCK_BYTES]).err());
        assert_eq!(refused.map(|error| error.errno()), Some(libc::EIO));
    }
}
