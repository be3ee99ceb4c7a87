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
        let mut known = image.known.lock();
        if !image.changed.load(Ordering::Acquire) {
            return Ok(());
        }
        // Accepted once it is known what to: where the disk does not tell, nobody reads what is stale.
        let stamp = image.file()?.stamp()?;
        image.changed.store(false, Ordering::Release);
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
    fn a_change_that_cannot_be_looked_at_is_not_forgotten() {
        let cache = Cache::new(Config { cache_bytes: 4 << 20, ..Config::default() }).unwrap();
        let file = Arc::new(SimFile::new(vec![1; 1 << 16]));
        let image = cache.add_image("x", file.clone()).unwrap();
        let mut byte = [0];
        cache.read(&image, 0, &mut byte).unwrap();
        file.change_behind(|data| data.fill(2));
        assert!(cache.look_behind(&image));
        file.set_faults(Faults { stamp: Some(libc::EIO), ..Faults::default() });
        for _ in 0..2 {
            assert_eq!(cache.read(&image, 0, &mut byte).unwrap_err().errno(), libc::EIO);
            assert!(cache.read_in_place(&image, 0, 1, |_| ()).is_err());
        }
        file.set_faults(Faults::default());
        cache.read(&image, 0, &mut byte).unwrap();
        assert_eq!(byte, [2]);
    }

    /// Others' changes of the size while ours is under way, whose times hide theirs.
    #[test]
    fn another_size_is_seen_whatever_we_write_meanwhile() {
        let cache = Cache::new(Config { cache_bytes: 4 << 20, ..Config::default() }).unwrap();
        for size in [1 << 15, 1 << 17] {
            let file = Arc::new(SimFile::new(vec![1; 1 << 16]));
            let image = cache.add_image("x", file.clone()).unwrap();
            cache.read(&image, 0, &mut vec![0; 1 << 16]).unwrap();
            let changed = image.change(|own| {
                file.change_behind(|data| data.resize(size, 2));
                own.write_at(&[std::io::IoSlice::new(&[3])], 0)
            });
            changed.unwrap();
            let mut bytes = vec![0; 1 << 18];
            assert_eq!(cache.read(&image, 0, &mut bytes).unwrap(), size);
            assert!(bytes[..size] == file.data());
            // Our own changes of it are no one else's.
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
