//! Dropping blocks: a range of them, those beyond a new end, or stale ones after an external change of the file.
//!
//! A thread that drops unwritten blocks has `layout` and `flush` locked; blocks that equal the disk may be dropped at any
//! time. An external change is noted where it is detected and accepted by the next request, which drops stale blocks.

use super::Cache;
use crate::error::Error;
use crate::frame_table::BlockKey;
use crate::frames::OwnedFrame;
use crate::geometry::{BLOCK_BYTES, CHUNK_BLOCKS};
use crate::image::{BlockState, Entries, Image};
use crate::stats::add;
use std::sync::atomic::Ordering;

impl Cache {
    /// Drops an image and all its blocks, dirty ones too: for a file that no longer exists.
    pub fn discard_image(&self, image: &Image) {
        let _layout = image.layout.write();
        let _flush = image.flush.lock();
        self.drop_blocks(image, 0, u64::MAX, true);
        image.discarded.store(true, Ordering::Release);
        image.set_file(None);
        self.images.write()[image.id as usize] = None;
    }

    /// Drops blocks `from..to`. With `dirty_too` drops unwritten ones too, and `flush` must be locked.
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
                let unwritten = matches!(entries.state(at), BlockState::Dirty(_) | BlockState::Writeback(_));
                if (from..to).contains(&block) && (dirty_too || !unwritten) {
                    self.drop_block(image, &mut entries, at, block, &mut freed);
                }
            }
            if entries.dirty() == 0 {
                image.dirty_chunks.lock().remove(&number);
            }
            drop(entries);
            self.free_frames(freed);
        }
        image.sweep(false);
    }

    fn drop_block(&self, image: &Image, entries: &mut Entries, at: usize, block: u64, freed: &mut Vec<OwnedFrame>) {
        let key = BlockKey { image: image.id, block };
        match entries.state(at) {
            BlockState::Absent => return,
            BlockState::Zero => {}
            BlockState::Clean(frame) => freed.extend(self.leave(frame, key)),
            BlockState::Dirty(frame) => {
                freed.push(self.disown(frame));
                self.dirty_blocks.fetch_sub(1, Ordering::Relaxed);
                image.dirty_blocks.fetch_sub(1, Ordering::Relaxed);
            }
            BlockState::Writeback(_) => unreachable!("a thread that drops unwritten blocks holds the flush lock"),
        }
        entries.set(at, BlockState::Absent);
    }

    /// Drops the blocks beyond `size` and clears the last block's bytes there. `layout` and `flush` are locked.
    pub(super) fn cut_blocks(&self, image: &Image, size: u64) {
        let whole = size / BLOCK_BYTES as u64;
        let inside = (size % BLOCK_BYTES as u64) as usize;
        let mut first_dropped = whole;
        if inside > 0 {
            first_dropped += 1;
            let at = whole as usize % CHUNK_BLOCKS;
            if let Some(chunk) = image.existing_chunk(whole / CHUNK_BLOCKS as u64) {
                let mut entries = chunk.entries.write();
                if let BlockState::Dirty(frame) = entries.state(at) {
                    self.frames.zero(frame, inside..BLOCK_BYTES);
                } else {
                    // It is loaded again from the disk, with zeros beyond the end.
                    let mut freed = Vec::new();
                    self.drop_block(image, &mut entries, at, whole, &mut freed);
                    drop(entries);
                    self.free_frames(freed);
                }
            }
        }
        self.drop_blocks(image, first_dropped, u64::MAX, true);
        if let Some(fingerprints) = &mut *image.fingerprints.lock() {
            fingerprints.forget(whole..u64::MAX);
        }
    }

    /// Returns true if another program has changed the file, and notes that for the next request.
    pub fn detect_change(&self, image: &Image) -> bool {
        let Some(known) = image.stamp.try_lock() else {
            // The cache itself is changing the file now.
            return false;
        };
        let Ok(file) = image.file() else { return false };
        match file.stamp() {
            Ok(stamp) if stamp != *known => {
                image.changed_externally.store(true, Ordering::Release);
                true
            }
            _ => false,
        }
    }

    /// Drops blocks that a noted external change made stale. Unwritten blocks stay, because they are newer.
    pub(crate) fn accept_change(&self, image: &Image) -> Result<(), Error> {
        if !image.changed_externally.load(Ordering::Acquire) {
            return Ok(());
        }
        let _layout = image.layout.write();
        let _flush = image.flush.lock();
        let mut known = image.stamp.lock();
        if !image.changed_externally.load(Ordering::Acquire) {
            return Ok(());
        }
        // Accepted only once the new version is known: if the disk does not tell, requests fail instead of reading stale
        // data.
        let stamp = image.file()?.stamp()?;
        image.changed_externally.store(false, Ordering::Release);
        *known = stamp;
        let before = image.size.swap(stamp.size, Ordering::AcqRel);
        drop(known);
        add(&image.counters.changed_behind, 1);
        self.drop_blocks(image, 0, u64::MAX, false);
        if let Some(fingerprints) = &mut *image.fingerprints.lock() {
            fingerprints.forget(0..u64::MAX);
        }
        if stamp.size < before {
            self.cut_blocks(image, stamp.size);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::sim::{Faults, SimFile};
    use std::sync::Arc;

    #[test]
    fn a_noted_change_is_kept_until_the_new_version_can_be_read() {
        let cache = Cache::new(Config { cache_bytes: 4 << 20, ..Config::default() }).unwrap();
        let file = Arc::new(SimFile::new(vec![1; 1 << 16]));
        let image = cache.add_image("x", file.clone()).unwrap();
        let mut byte = [0];
        cache.read(&image, 0, &mut byte).unwrap();
        file.change_externally(|data| data.fill(2));
        assert!(cache.detect_change(&image));
        file.set_faults(Faults { stamp: Some(libc::EIO), ..Faults::default() });
        for _ in 0..2 {
            assert_eq!(cache.read(&image, 0, &mut byte).unwrap_err().errno(), libc::EIO);
            assert!(cache.read_in_place(&image, 0, 1, |_| ()).is_err());
        }
        file.set_faults(Faults::default());
        cache.read(&image, 0, &mut byte).unwrap();
        assert_eq!(byte, [2]);
    }

    /// Another program changes the size during the cache's own change, which hides the other's times.
    #[test]
    fn an_external_change_of_size_is_detected_during_a_write() {
        let cache = Cache::new(Config { cache_bytes: 4 << 20, ..Config::default() }).unwrap();
        for size in [1 << 15, 1 << 17] {
            let file = Arc::new(SimFile::new(vec![1; 1 << 16]));
            let image = cache.add_image("x", file.clone()).unwrap();
            cache.read(&image, 0, &mut vec![0; 1 << 16]).unwrap();
            let changed = image.change_content(|own| {
                file.change_externally(|data| data.resize(size, 2));
                own.write_at(&[std::io::IoSlice::new(&[3])], 0)
            });
            changed.unwrap();
            let mut bytes = vec![0; 1 << 18];
            assert_eq!(cache.read(&image, 0, &mut bytes).unwrap(), size);
            assert!(bytes[..size] == file.data());
            // The cache's own changes of the size do not count as external.
            let before = cache.status().images[image.id as usize].changed_behind;
            cache.write(&image, 3 << 16, &[4]).unwrap();
            cache.set_size(&image, 5000).unwrap();
            cache.reserve(&image, 0, 9000, false).unwrap();
            cache.read(&image, 0, &mut bytes).unwrap();
            assert_eq!(cache.status().images[image.id as usize].changed_behind, before);
            cache.discard_image(&image);
        }
    }
}
