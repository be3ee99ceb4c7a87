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
use std::sync::atomic::Ordering;

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
            if image.dirty_bytes() > 0 {
                self.flush_some(image, 1024).map_err(Error::Full)?;
            } else if self.flush_others(Some(image)) == 0 {
                break;
            }
        }
        Ok(())
    }
}
