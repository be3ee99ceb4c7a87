//! Blocks go: dropped by number, cut off with the end of an image, or stale because somebody changed its file.
//!
//! Whoever drops unwritten blocks holds `shape` and `flush`; blocks that equal the disk may go at any time. A change
//! behind our back is noted where it is seen and accepted by the next request, which drops what it made stale.

use super::{CHUNK_BLOCKS, Cache};
use crate::BLOCK_BYTES;
use crate::error::Error;
use crate::frames::OwnedFrame;
use crate::image::{Entries, Image, State};
use crate::stats::add;
use crate::table::BlockKey;
use std::sync::atomic::Ordering;

impl Cache {
    /// Drops an image and all its blocks, dirty ones too: for a file that is gone.
    pub fn discard_image(&self, image: &Image) {
        let _shape = image.shape.write();
        let _flush = image.flush.lock();
        self.drop_blocks(image, 0, u64::MAX, true);
        image.gone.store(true, Ordering::Release);
        image.set_file(None);
        self.images.write()[image.id as usize] = None;
    }

    /// Drops blocks `from..to`. With `dirty_too`, unwritten data as well, and `flush` must be held.
    pub(super) fn drop_blocks(&self, image: &Image, from: u64, to: u64, dirty_too: bool) {
        for number in image.chunk_numbers(from / CHUNK_BLOCKS as u64) {
            let first = number * CHUNK_BLOCKS as u64;
            if first >= to {
                continue;
            }
            let Some(chunk) = image.existing_chunk(number) else { continue };
            let mut freed = Vec::new();
            let mut entries = chunk.entries.write();
            for at in 0..CHUNK_BLOCKS {
                let block = first + at as u64;
                let unwritten = matches!(entries.state(at), State::Dirty(_) | State::Writeback(_));
                if (from..to).contains(&block) && (dirty_too || !unwritten) {
                    self.drop_block(image, &mut entries, at, block, &mut freed);
                }
            }
            if entries.dirty() == 0 {
                image.dirty_chunks.lock().remove(&number);
            }
            drop(entries);
            self.give(freed);
        }
        image.sweep(false);
    }

    fn drop_block(&self, image: &Image, entries: &mut Entries, at: usize, block: u64, freed: &mut Vec<OwnedFrame>) {
        let key = BlockKey { image: image.id, block };
        match entries.state(at) {
            State::Absent => return,
            State::Zero => {}
            State::Clean(frame) => freed.extend(self.leave(frame, key)),
            State::Dirty(frame) => {
                freed.push(self.disown(frame));
                self.dirty_blocks.fetch_sub(1, Ordering::Relaxed);
                image.dirty_blocks.fetch_sub(1, Ordering::Relaxed);
            }
            State::Writeback(_) => unreachable!("whoever drops unwritten blocks holds the flush lock"),
        }
        entries.set(at, State::Absent);
    }

    /// Drops the blocks beyond `size`, and what the last one held there. `shape` and `flush` are held.
    pub(super) fn cut_blocks(&self, image: &Image, size: u64) {
        let whole = size / BLOCK_BYTES as u64;
        let inside = (size % BLOCK_BYTES as u64) as usize;
        let mut first_gone = whole;
        if inside > 0 {
            first_gone += 1;
            let at = whole as usize % CHUNK_BLOCKS;
            if let Some(chunk) = image.existing_chunk(whole / CHUNK_BLOCKS as u64) {
                let mut entries = chunk.entries.write();
                if let State::Dirty(frame) = entries.state(at) {
                    self.frames.zero(frame, inside..BLOCK_BYTES);
                } else {
                    // It comes again from the disk, with zeros beyond the end.
                    let mut freed = Vec::new();
                    self.drop_block(image, &mut entries, at, whole, &mut freed);
                    drop(entries);
                    self.give(freed);
                }
            }
        }
        self.drop_blocks(image, first_gone, u64::MAX, true);
        if let Some(fingerprints) = &mut *image.fingerprints.lock() {
            fingerprints.forget(whole..u64::MAX);
        }
    }

    /// Whether the file is another version than the one we know; if so, it is noted for the next request.
    pub fn look_behind(&self, image: &Image) -> bool {
        let Some(known) = image.known.try_lock() else {
            // We are changing it ourselves right now.
            return false;
        };
        let Ok(file) = image.file() else { return false };
        match file.stamp() {
            Ok(stamp) if stamp != *known => {
                image.changed.store(true, Ordering::Release);
                true
            }
            _ => false,
        }
    }

    /// Drops what somebody else's change made stale. Unwritten blocks stay: they are newer.
    pub(crate) fn accept_change(&self, image: &Image) -> Result<(), Error> {
        if !image.changed.load(Ordering::Acquire) {
            return Ok(());
        }
        let _shape = image.shape.write();
        let _flush = image.flush.lock();
        if !image.changed.swap(false, Ordering::AcqRel) {
            return Ok(());
        }
        let stamp = image.file()?.stamp()?;
        *image.known.lock() = stamp;
        add(&image.counters.changed_behind, 1);
        self.drop_blocks(image, 0, u64::MAX, false);
        if let Some(fingerprints) = &mut *image.fingerprints.lock() {
            fingerprints.forget(0..u64::MAX);
        }
        let before = image.size();
        image.size.store(stamp.size, Ordering::Release);
        if stamp.size < before {
            self.cut_blocks(image, stamp.size);
        }
        Ok(())
    }
}
