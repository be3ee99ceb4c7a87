//! Room: frames for those who need them, and a bound on what is dirty.
//!
//! Frames are had from the free ones, then by evicting clean blocks, then by flushing dirty ones. All of it is done by
//! whoever needs the room, with at most `shape` held.

use super::{CHUNK_BLOCKS, Cache};
use crate::error::Error;
use crate::frames::OwnedFrame;
use crate::image::{Image, State};
use crate::stats::add;
use crate::table::{BlockKey, Use};
use std::io;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long a write waits for frames that others have, as where a disk hangs.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often it looks.
const PAUSE: Duration = Duration::from_millis(1);

impl Cache {
    /// Finds up to `count` frames: free ones, then those of evicted blocks, then of flushed ones.
    pub(super) fn allocate(&self, count: usize, into: &mut Vec<OwnedFrame>) {
        let goal = into.len() + count;
        for _ in 0..8 {
            self.free.take(goal - into.len(), into);
            if into.len() >= goal {
                return;
            }
            // A few more than asked, so that the next one need not evict at once.
            if self.evict(goal - into.len() + 32) == 0 && self.flush_others(None) == 0 {
                break;
            }
        }
        self.free.take(goal - into.len(), into);
    }

    /// Has `spare` hold `count` frames, for who cannot do without. Where there are none they are in the hands of other
    /// requests, and come back: nobody who waits for them here has any. No lock but `shape` may be held.
    pub(super) fn allocate_all(&self, count: usize, spare: &mut Vec<OwnedFrame>) -> Result<(), Error> {
        let mut began = None;
        while spare.len() < count {
            self.allocate(count - spare.len(), spare);
            if spare.len() < count {
                if began.get_or_insert_with(Instant::now).elapsed() > PATIENCE {
                    return Err(Error::Full(io::Error::from_raw_os_error(libc::ENOMEM)));
                }
                self.give(std::mem::take(spare));
                std::thread::sleep(PAUSE);
            }
        }
        Ok(())
    }

    /// Evicts until `count` frames became free or nothing more can go; returns how many did.
    fn evict(&self, count: usize) -> usize {
        let mut freed = Vec::new();
        let mut tries = self.frames.count() * 2;
        while freed.len() < count && tries > 0 {
            tries -= 1;
            let victim = self.queues.lock().pop(|f| self.table.touches(f), |f, n| self.table.set_touches(f, n));
            let Some(frame) = victim else { break };
            let sharers: Vec<BlockKey> = {
                let mut body = self.table.lock(frame);
                body.queued = false;
                if body.used != Use::Clean {
                    continue;
                }
                body.sharers.as_slice().to_vec()
            };
            let fingerprint = self.table.lock(frame).fingerprint;
            let mut gone = None;
            for key in sharers {
                let Some(image) = self.image(key.image) else { continue };
                let Some(chunk) = image.existing_chunk(key.block / CHUNK_BLOCKS as u64) else { continue };
                let at = key.block as usize % CHUNK_BLOCKS;
                let mut entries = chunk.entries.write();
                if entries.state(at) == State::Clean(frame) {
                    gone = self.leave(frame, key);
                    entries.set(at, State::Absent);
                }
            }
            match gone {
                Some(frame) => {
                    self.queues.lock().remember(fingerprint.index_key());
                    freed.push(frame);
                }
                None => {
                    // It gained a sharer meanwhile, or one is just being installed.
                    let mut queues = self.queues.lock();
                    let mut body = self.table.lock(frame);
                    if body.used == Use::Clean && !body.queued {
                        body.queued = true;
                        queues.put_back(frame);
                    }
                }
            }
        }
        let count = freed.len();
        add(&self.counters.evictions, count);
        self.give(freed);
        count
    }

    /// Flushes some blocks of the image with the most dirty ones whose disk takes them; returns how many went.
    fn flush_others(&self, except: Option<&Image>) -> usize {
        let mut images = self.images();
        images.retain(|image| image.dirty_bytes() > 0 && except.is_none_or(|e| e.id != image.id));
        images.sort_by_key(|image| std::cmp::Reverse(image.dirty_bytes()));
        let flushed = images.iter().map(|image| self.flush_some(image, 1024).unwrap_or(0));
        flushed.into_iter().find(|&count| count > 0).unwrap_or(0)
    }

    /// Flushes until `count` more dirty blocks of `image` are allowed.
    ///
    /// A writer answers for his own image's disk only: where another one refuses its blocks, he goes on with none of
    /// his own left dirty.
    pub(super) fn make_room_for_dirty(&self, image: &Image, count: usize) -> Result<(), Error> {
        let room = self.config.dirty_max().max(count + 1) - count;
        while self.dirty_blocks.load(Ordering::Relaxed) > room {
            let own = if image.dirty_bytes() > 0 { self.flush_some(image, 1024) } else { Ok(0) };
            // Where his own disk takes nothing, others may still make room.
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
    use crate::BLOCK_BYTES;
    use crate::config::Config;
    use crate::sim::{Faults, SimFile};
    use std::sync::Arc;

    #[test]
    fn a_write_waits_for_frames_that_others_have() {
        let cache = Cache::new(Config { cache_bytes: 4 << 20, ..Config::default() }).unwrap();
        let file = Arc::new(SimFile::new(vec![1; 1 << 20]));
        let image = cache.add_image("x", file.clone()).unwrap();
        let mut taken = Vec::new();
        cache.free.take(cache.frames.count(), &mut taken);
        std::thread::scope(|scope| {
            let write = scope.spawn(|| cache.write(&image, 1000, &[2; 100_000]));
            std::thread::sleep(Duration::from_millis(100));
            assert!(!write.is_finished());
            // One by one: not all that it needs at once.
            taken.drain(..).for_each(|frame| cache.give(vec![frame]));
            write.join().unwrap().unwrap();
        });
        assert!(cache.sync(&image, 0..u64::MAX));
        assert_eq!(file.data()[1000..101_000], [2; 100_000]);
        cache.verify().unwrap();
    }

    #[test]
    fn a_bad_block_of_ones_own_is_no_error_where_another_image_has_the_room() {
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
        // Nobody else has room: now it is its own.
        files[1].set_faults(Faults { write: Some(libc::EIO), ..Faults::default() });
        let refused = (0..64).find_map(|n| cache.write(&bad, n << 12, &[3; BLOCK_BYTES]).err());
        assert_eq!(refused.map(|error| error.errno()), Some(libc::EIO));
    }
}
