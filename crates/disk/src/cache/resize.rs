//! Changing an image's size and holes.
//!
//! Such a change locks `Image::layout` for writing. If it drops blocks it also locks `Image::flush`, because a writeback
//! under way would write dropped blocks to the file again. The file on the host changes first; if that fails, nothing
//! has changed.

use super::Cache;
use crate::error::Error;
use crate::file::Allocate;
use crate::geometry::{BLOCK_BYTES, CHUNK_BYTES};
use crate::image::Image;
use std::sync::atomic::Ordering;

impl Cache {
    /// Sets the size of an image; a longer one reads as zeros there.
    ///
    /// # Errors
    /// The file system's; nothing has changed then.
    pub fn set_size(&self, image: &Image, size: u64) -> Result<(), Error> {
        self.range_end(size, 0)?;
        self.accept_change(image)?;
        if !image.file()?.writable() {
            return Err(Error::ReadOnly);
        }
        let _layout = image.layout.write();
        self.check_accepts_changes()?;
        self.set_size_exclusive(image, size)
    }

    fn set_size_exclusive(&self, image: &Image, size: u64) -> Result<(), Error> {
        // A writeback under way to the part that is cut off would write it again.
        let _flush = image.flush.lock();
        let before = image.change_content(|file| {
            file.set_len(size)?;
            Ok(image.size.swap(size, Ordering::AcqRel))
        })?;
        image.unsynced.store(true, Ordering::Release);
        if size < before {
            self.cut_blocks(image, size);
        }
        Ok(())
    }

    /// Makes `length` bytes from `offset` read as zeros and frees their disk space; the size stays.
    ///
    /// # Errors
    /// The disk's.
    pub fn punch(&self, image: &Image, offset: u64, length: u64) -> Result<(), Error> {
        self.clear(image, Allocate::Punch, offset, length)
    }

    /// Makes `length` bytes from `offset` read as zeros and keeps or reserves their disk space; the size stays.
    ///
    /// # Errors
    /// The disk's.
    pub fn zero(&self, image: &Image, offset: u64, length: u64) -> Result<(), Error> {
        self.clear(image, Allocate::Zero, offset, length)
    }

    fn clear(&self, image: &Image, how: Allocate, offset: u64, length: u64) -> Result<(), Error> {
        let end = self.range_end(offset, length)?;
        self.accept_change(image)?;
        if !image.file()?.writable() {
            return Err(Error::ReadOnly);
        }
        let layout = image.layout.write();
        self.check_accepts_changes()?;
        let end = end.min(image.size());
        if offset >= end {
            return Ok(());
        }
        let block = BLOCK_BYTES as u64;
        // The block at the end of the file may be dropped whole: beyond the end there are only zeros.
        let last = if end == image.size() { end.next_multiple_of(block) } else { end / block * block };
        let first = offset.next_multiple_of(block).min(last.max(offset));
        let zeros = [0; BLOCK_BYTES];
        if first >= last {
            return self.write_zeros(image, offset, end, &zeros);
        }
        self.write_zeros(image, offset, first, &zeros)?;
        if last < end {
            self.write_zeros(image, last, end, &zeros)?;
        }
        {
            let _flush = image.flush.lock();
            let cleared = image.change_content(|file| file.allocate(how, first, last - first));
            image.unsynced.store(true, Ordering::Release);
            // A failed call may have cleared a part, so clean blocks may differ from the disk now.
            self.drop_blocks(image, first / block, last / block, cleared.is_ok());
            if let Some(fingerprints) = &mut *image.fingerprints.lock() {
                fingerprints.forget(first / block..last / block);
            }
            match cleared {
                Ok(()) => return Ok(()),
                Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {}
                Err(error) => return Err(error.into()),
            }
        }
        drop(layout);
        self.clear_in_pieces(image, first, last.min(end), &zeros)
    }

    /// Clears by writing, for a file system that cannot punch. Writing may take long, so the layout is unlocked between
    /// two pieces. A concurrent write or cut takes effect before or after a piece, as for any two concurrent requests.
    fn clear_in_pieces(&self, image: &Image, from: u64, to: u64, zeros: &[u8; BLOCK_BYTES]) -> Result<(), Error> {
        for at in (from..to).step_by(CHUNK_BYTES as usize) {
            let _layout = image.layout.read();
            self.check_accepts_changes()?;
            self.write_zeros(image, at, (at + CHUNK_BYTES).min(to).min(image.size()), zeros)?;
        }
        Ok(())
    }

    fn write_zeros(&self, image: &Image, from: u64, to: u64, zeros: &[u8; BLOCK_BYTES]) -> Result<(), Error> {
        let mut at = from;
        while at < to {
            let part = (BLOCK_BYTES as u64 - at % BLOCK_BYTES as u64).min(to - at);
            self.write_blocks(image, at, &zeros[..part as usize], u64::MAX)?;
            at += part;
        }
        Ok(())
    }

    /// Reserves disk space for `length` bytes from `offset`; grows the image unless `keep_size`.
    ///
    /// # Errors
    /// The file system's, above all `ENOSPC`.
    pub fn reserve(&self, image: &Image, offset: u64, length: u64, keep_size: bool) -> Result<(), Error> {
        let end = self.range_end(offset, length)?;
        self.accept_change(image)?;
        let _layout = image.layout.write();
        self.check_accepts_changes()?;
        image.change_content(|file| file.allocate(Allocate::Reserve, offset, length))?;
        image.unsynced.store(true, Ordering::Release);
        if !keep_size && end > image.size() {
            self.grow(image, end)?;
        }
        Ok(())
    }

    /// Finds data or a hole at or after `offset`.
    ///
    /// # Errors
    /// `ENXIO` when there is none; the disk's when dirty blocks cannot be written first.
    pub fn seek(&self, image: &Image, offset: u64, data: bool) -> Result<u64, Error> {
        if image.dirty_bytes() > 0 {
            // A dirty block may lie in a range that is still a hole on the disk.
            self.flush_range(image, 0..u64::MAX)?;
        }
        Ok(image.file()?.seek(offset, data)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::fingerprint::{Fingerprint, FingerprintKey};
    use crate::fingerprint_file::BlockFingerprints;
    use crate::sim::{Faults, SimFile};
    use std::sync::Arc;

    #[test]
    fn a_punch_that_fails_half_way_leaves_no_clean_block_that_differs_from_the_disk() {
        let config =
            Config { cache_bytes: 4 << 20, key: FingerprintKey::Strong([7; 32]), flush_batch: 16, ..Config::default() };
        let cache = Cache::new(config).unwrap();
        for how in [Allocate::Punch, Allocate::Zero] {
            let file = Arc::new(SimFile::new((0..64 * BLOCK_BYTES).map(|at| (at / BLOCK_BYTES) as u8 + 1).collect()));
            let image = cache.add_image("x", file.clone()).unwrap();
            *image.fingerprints.lock() = Some(BlockFingerprints::default());
            let mut bytes = vec![0; 64 * BLOCK_BYTES];
            cache.read(&image, 0, &mut bytes).unwrap();
            assert!(cache.sync(&image, 0..u64::MAX));
            cache.write(&image, 0, &[99; BLOCK_BYTES]).unwrap();
            file.set_faults(Faults { punch_half: Some(libc::EIO), ..Faults::default() });
            assert_eq!(cache.clear(&image, how, 0, bytes.len() as u64).unwrap_err().errno(), libc::EIO);
            file.set_faults(Faults::default());
            let known = |block| image.fingerprints.lock().as_ref().unwrap().get(block);
            assert!((0..64).all(|block| known(block) == Fingerprint::UNKNOWN));
            cache.read(&image, 0, &mut bytes).unwrap();
            assert_eq!(bytes[..BLOCK_BYTES], [99; BLOCK_BYTES], "a dirty block stays");
            assert!(bytes[BLOCK_BYTES..] == file.data()[BLOCK_BYTES..]);
            assert!(image.unsynced.load(Ordering::Acquire), "the cleared part is not durable yet");
            cache.verify().unwrap();
        }
    }

    /// The file system cannot punch, so zeros are written, and the disk is slow.
    #[test]
    fn a_large_punch_does_not_delay_readers() {
        let cache = Cache::new(Config { cache_bytes: 4 << 20, ..Config::default() }).unwrap();
        let file = Arc::new(SimFile::new(vec![7; 16 << 20]));
        file.set_faults(Faults { no_punch: true, hang: true, ..Faults::default() });
        let image = cache.add_image("x", file.clone()).unwrap();
        let (done, result) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let punch = scope.spawn(|| cache.punch(&image, 1000, (16 << 20) - 2000));
            // Until it waits for the disk.
            while image.dirty_bytes() < 1 << 20 {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            scope.spawn(|| done.send(cache.read(&image, (16 << 20) - 100, &mut [0; 100]).is_ok()));
            let served = result.recv_timeout(std::time::Duration::from_secs(20));
            file.set_faults(Faults { no_punch: true, ..Faults::default() });
            assert_eq!(served, Ok(true), "a reader waits for the whole punch");
            punch.join().unwrap().unwrap();
        });
        assert!(cache.sync(&image, 0..u64::MAX));
        let expected = [vec![7; 1000], vec![0; (16 << 20) - 2000], vec![7; 1000]].concat();
        assert!(file.data() == expected);
        cache.verify().unwrap();
    }
}
