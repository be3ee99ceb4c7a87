//! Reading: by a copy, in place, and ahead.
//!
//! A read copies present blocks under the chunk's lock and loads absent ones, one run at a time. If the blocks are
//! neighbours in memory, the front end gets the frames themselves.

use super::Cache;
use super::load::{ChunkBlocks, ReaderBuffer};
use crate::error::Error;
use crate::frames::{FrameIndex, OwnedFrame};
use crate::geometry::{BLOCK_BYTES, CHUNK_BLOCKS, CHUNK_BYTES};
use crate::image::{BlockState, Entries, Image};
use crate::stats::add;
use std::ops::Range;
use std::sync::atomic::Ordering;

impl Cache {
    /// Reads into `buffer` from byte `offset`; returns fewer bytes than asked only at the end of the image.
    ///
    /// # Errors
    /// The disk's. What precedes the failing block is not returned.
    pub fn read(&self, image: &Image, offset: u64, buffer: &mut [u8]) -> Result<usize, Error> {
        self.accept_change(image)?;
        if offset.saturating_add(buffer.len() as u64) > image.size() && self.detect_change(image) {
            self.accept_change(image)?;
        }
        let _layout = image.layout.read();
        let length = (image.size().saturating_sub(offset)).min(buffer.len() as u64) as usize;
        let mut rest = &mut buffer[..length];
        let mut at = offset;
        let mut spare = Vec::new();
        while !rest.is_empty() {
            let part = ((CHUNK_BYTES - at % CHUNK_BYTES) as usize).min(rest.len());
            let (now, later) = rest.split_at_mut(part);
            let result = self.read_in_chunk(image, at, now, &mut spare);
            if result.is_err() {
                self.free_frames(spare);
                return result.map(|()| 0);
            }
            rest = later;
            at += part as u64;
        }
        self.free_frames(spare);
        Ok(length)
    }

    /// Passes `length` bytes from `offset` to `deliver` without a copy, if they lie in one piece in the cache. Otherwise
    /// returns `deliver`, and the caller uses [`Cache::read`].
    ///
    /// Images that were read in sequence lie in ascending frames, and so do the blocks that share them: most requests are
    /// one piece. The chunk stays locked for reading while `deliver` runs, so `deliver` must not wait for other requests.
    pub(crate) fn read_in_place<R, D>(&self, image: &Image, offset: u64, length: usize, deliver: D) -> Result<R, D>
    where
        D: FnOnce(&[u8]) -> R,
    {
        if image.changed_externally.load(Ordering::Acquire) || offset.saturating_add(length as u64) > image.size() {
            return Err(deliver);
        }
        let _layout = image.layout.read();
        if length == 0 || offset.saturating_add(length as u64) > image.size() {
            return Err(deliver);
        }
        let first = (offset % CHUNK_BYTES) as usize;
        if first + length > CHUNK_BYTES as usize {
            return Err(deliver);
        }
        let Some(chunk) = image.existing_chunk(offset / CHUNK_BYTES) else { return Err(deliver) };
        let entries = chunk.entries.read();
        let blocks = first / BLOCK_BYTES..(first + length).div_ceil(BLOCK_BYTES);
        let Some(start) = entries.state(blocks.start).frame() else { return Err(deliver) };
        let is_next_frame = |at: usize| {
            let expected = FrameIndex(start.0 + (at - blocks.start) as u32);
            entries.state(at).frame() == Some(expected)
        };
        if !blocks.clone().skip(1).all(is_next_frame) {
            return Err(deliver);
        }
        (0..blocks.len() as u32).for_each(|n| self.table.touch(FrameIndex(start.0 + n)));
        add(&image.counters.hits, blocks.len());
        Ok(self.frames.read_run(start, blocks.len(), |bytes| deliver(&bytes[first % BLOCK_BYTES..][..length])))
    }

    fn read_in_chunk(
        &self,
        image: &Image,
        offset: u64,
        buffer: &mut [u8],
        spare: &mut Vec<OwnedFrame>,
    ) -> Result<(), Error> {
        let number = offset / CHUNK_BYTES;
        let chunk = image.chunk(number);
        let base = number * CHUNK_BYTES;
        let mut done = 0;
        while done < buffer.len() {
            let before = done;
            let (at, skip) = {
                let entries = chunk.entries.read();
                loop {
                    let position = (offset - base) as usize + done;
                    let (at, skip) = (position / BLOCK_BYTES, position % BLOCK_BYTES);
                    if done == buffer.len() {
                        break (at, skip);
                    }
                    let part = (BLOCK_BYTES - skip).min(buffer.len() - done);
                    match entries.state(at) {
                        BlockState::Absent => break (at, skip),
                        BlockState::Zero => buffer[done..done + part].fill(0),
                        BlockState::Clean(frame) | BlockState::Dirty(frame) | BlockState::Writeback(frame) => {
                            if done + part < buffer.len()
                                && at + 1 < CHUNK_BLOCKS
                                && let Some(next) = entries.state(at + 1).frame()
                            {
                                self.frames.prefetch(next);
                            }
                            self.frames.copy_out(frame, skip, &mut buffer[done..done + part]);
                            self.table.touch(frame);
                        }
                    }
                    done += part;
                }
            };
            add(&image.counters.hits, (done - before).div_ceil(BLOCK_BYTES));
            if done == buffer.len() {
                break;
            }
            let limit = at + (skip + buffer.len() - done).div_ceil(BLOCK_BYTES);
            let wanted = ChunkBlocks { image, chunk: &chunk, number, blocks: at..limit };
            let reader = ReaderBuffer { bytes: &mut buffer[done..], skip };
            match self.load(&wanted, Some(reader), spare)? {
                0 => chunk.wait_loaded(at),
                blocks => {
                    add(&image.counters.misses, blocks);
                    done = (done + blocks * BLOCK_BYTES - skip).min(buffer.len());
                }
            }
        }
        Ok(())
    }

    /// Returns true if a block of `range` (in bytes) inside the image is neither in memory nor being loaded.
    pub(crate) fn has_absent(&self, image: &Image, range: Range<u64>) -> bool {
        self.any_block(image, range, |entries, n| entries.state(n) == BlockState::Absent && !entries.is_loading(n))
    }

    /// Returns true if a read of `range` (in bytes) may wait: for the disk, or for a thread that reads it.
    pub(crate) fn may_wait(&self, image: &Image, range: Range<u64>) -> bool {
        image.changed_externally.load(Ordering::Acquire)
            || range.end > image.size()
            || self.any_block(image, range, |entries, n| entries.state(n) == BlockState::Absent)
    }

    /// Returns true if `test` holds for a block of `range` (in bytes) inside the image, or if nothing is known of one.
    fn any_block(&self, image: &Image, range: Range<u64>, test: impl Fn(&Entries, usize) -> bool) -> bool {
        let blocks = range.start / BLOCK_BYTES as u64..range.end.min(image.size()).div_ceil(BLOCK_BYTES as u64);
        let mut at = blocks.start;
        while at < blocks.end {
            let Some(chunk) = image.existing_chunk(at / CHUNK_BLOCKS as u64) else { return true };
            let entries = chunk.entries.read();
            let first = at as usize % CHUNK_BLOCKS;
            let last = CHUNK_BLOCKS.min(first + (blocks.end - at) as usize);
            if (first..last).any(|n| test(&entries, n)) {
                return true;
            }
            at += (last - first) as u64;
        }
        false
    }

    /// Loads absent blocks of `range` before they are read. A read of a block that failed here reports its error.
    pub fn read_ahead(&self, image: &Image, range: Range<u64>) {
        let _layout = image.layout.read();
        let end = range.end.min(image.size());
        let mut at = range.start / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
        let mut spare = Vec::new();
        while at < end && !image.discarded.load(Ordering::Acquire) {
            let number = at / CHUNK_BYTES;
            let (base, chunk) = (number * CHUNK_BYTES, image.chunk(number));
            let first = ((at - base) / BLOCK_BYTES as u64) as usize;
            let limit = ((end - base).div_ceil(BLOCK_BYTES as u64) as usize).min(CHUNK_BLOCKS);
            let absent = {
                let entries = chunk.entries.read();
                (first..limit).find(|&n| entries.state(n) == BlockState::Absent && !entries.is_loading(n))
            };
            let Some(first) = absent else {
                at = base + CHUNK_BYTES;
                continue;
            };
            match self.load(&ChunkBlocks { image, chunk: &chunk, number, blocks: first..limit }, None, &mut spare) {
                Ok(blocks) => {
                    add(&self.counters.read_ahead_blocks, blocks);
                    at = base + ((first + blocks.max(1)) * BLOCK_BYTES) as u64;
                }
                Err(_) => break,
            }
        }
        self.free_frames(spare);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::sim::SimFile;
    use std::sync::Arc;

    #[test]
    fn bytes_delivered_in_place_are_the_images() {
        let cache = Cache::new(Config { cache_bytes: 4 << 20, ..Config::default() }).unwrap();
        let mut numbers = fastrand::Rng::with_seed(1);
        let mut random = move |below: usize| numbers.usize(..below);
        let mut model: Vec<u8> = (0..2 << 20).map(|_| random(256) as u8).collect();
        // A piece of zeros, which has no frame, and a size that is not a multiple of a block.
        model[700 << 10..900 << 10].fill(0);
        model.truncate((2 << 20) - 1234);
        let images: Vec<_> =
            (0..2).map(|n| cache.add_image(&format!("{n}"), Arc::new(SimFile::new(model.clone()))).unwrap()).collect();
        let mut models = [model.clone(), model];
        let (mut in_place, mut not_in_place) = (0, 0);
        for step in 0..4000 {
            let n = random(2);
            let (image, model) = (&images[n], &mut models[n]);
            let offset = random(model.len());
            let length = (1 + random(200_000)).min(model.len() - offset);
            match step % 8 {
                0 => {
                    let data: Vec<u8> = (0..length.min(9000)).map(|_| random(256) as u8).collect();
                    cache.write(image, offset as u64, &data).unwrap();
                    model[offset..offset + data.len()].copy_from_slice(&data);
                }
                1 if step % 40 == 1 => assert!(cache.sync(image, 0..u64::MAX)),
                2 => {
                    cache.read(image, offset as u64, &mut vec![0; length]).unwrap();
                }
                _ => {
                    let delivered = cache.read_in_place(image, offset as u64, length, <[u8]>::to_vec);
                    match delivered {
                        Ok(bytes) => {
                            assert!(bytes == model[offset..offset + length], "step {step}");
                            in_place += 1;
                        }
                        Err(_) => not_in_place += 1,
                    }
                }
            }
        }
        assert!(in_place > 100 && not_in_place > 100, "{in_place} in place, {not_in_place} not: both must happen");
        let beyond = models[0].len() as u64 - 10;
        assert!(
            cache.read_in_place(&images[0], beyond, 20, |_| ()).is_err(),
            "a read beyond the end is never in place"
        );
        cache.verify().unwrap();
    }
}
