//! A handle: one open of an image, as the front ends use it.

use crate::cache::Cache;
use crate::error::Error;
use crate::geometry::BLOCK_BYTES;
use crate::image::Image;
use crate::open_images::ImageRef;
use crate::read_ahead::{ReadAhead, Sequence};
use parking_lot::Mutex;
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// An open image.
pub struct Handle {
    image: ImageRef,
    read_ahead: Arc<ReadAhead>,
    writable: bool,
    /// How many of the image's writeback errors this handle has reported.
    pub(crate) errors_seen: Mutex<u64>,
    sequence: Mutex<Sequence>,
}

impl Handle {
    /// Makes a handle. One that writes claims the file.
    ///
    /// # Errors
    /// `EACCES` if the file is not open for writing, `EBUSY` if another cache writes to it.
    pub(crate) fn new(image: ImageRef, read_ahead: Arc<ReadAhead>, writable: bool) -> io::Result<Self> {
        let errors_seen = Mutex::new(image.open.image.errors.start());
        let handle = Self { image, read_ahead, writable, errors_seen, sequence: Mutex::default() };
        if writable {
            let file = handle.image().file()?;
            if !file.writable() {
                return Err(io::Error::from_raw_os_error(libc::EACCES));
            }
            file.claim()?;
        }
        Ok(handle)
    }

    /// The image.
    pub fn image(&self) -> &Arc<Image> {
        &self.image.open.image
    }

    fn cache(&self) -> &Cache {
        &self.image.images.cache
    }

    /// Whether writing is allowed.
    pub fn writable(&self) -> bool {
        self.writable
    }

    /// As [`Cache::read`], with read-ahead for sequential readers.
    ///
    /// # Errors
    /// As [`Cache::read`].
    pub fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<usize, Error> {
        self.note_read(offset, buffer.len());
        self.cache().read(self.image(), offset, buffer)
    }

    /// Reads `length` bytes and passes them to `deliver`: from the frames if they lie there in one piece, else through
    /// `buffer`. `deliver` must not wait for other requests.
    ///
    /// # Errors
    /// As [`Cache::read`]; `deliver` was not called then.
    pub(crate) fn read_with<R>(
        &self,
        offset: u64,
        length: usize,
        buffer: &mut Vec<u8>,
        deliver: impl FnOnce(&[u8]) -> R,
    ) -> Result<R, Error> {
        self.note_read(offset, length);
        let deliver = match self.cache().read_in_place(self.image(), offset, length, deliver) {
            Ok(done) => return Ok(done),
            Err(deliver) => deliver,
        };
        if buffer.len() < length {
            buffer.resize(length, 0);
        }
        let count = self.cache().read(self.image(), offset, &mut buffer[..length])?;
        Ok(deliver(&buffer[..count]))
    }

    /// Reads into `buffer` if every byte of it is in memory; `None` if not, or if another thread may have to be waited for.
    pub(crate) fn read_memory(&self, offset: u64, buffer: &mut [u8]) -> Option<usize> {
        let (cache, image, length) = (self.cache(), self.image(), buffer.len());
        let size = match cache.read_in_place(image, offset, length, |bytes| buffer.copy_from_slice(bytes)) {
            Ok(()) => length,
            Err(_) if cache.may_wait(image, offset..offset + length as u64) => return None,
            Err(_) => cache.read(image, offset, buffer).ok()?,
        };
        self.note_read(offset, length);
        Some(size)
    }

    /// Returns true if a write of `range` needs no disk, by all that is known now.
    pub(crate) fn writes_memory(&self, range: Range<u64>) -> bool {
        let (cache, block) = (self.cache(), BLOCK_BYTES as u64);
        // Only blocks that are written partly are loaded.
        let loads = |at: u64| !at.is_multiple_of(block) && cache.may_wait(self.image(), at..at + 1);
        range.end <= self.image().size()
            && cache.has_room_for_writes((range.end - range.start).div_ceil(block) as usize + 2)
            && !loads(range.start)
            && !loads(range.end)
    }

    /// Notes a read and requests read-ahead for a sequential reader.
    fn note_read(&self, offset: u64, length: usize) {
        let cache = self.cache();
        let window_max = cache.config().read_ahead_bytes as u64;
        let ahead = self.sequence.lock().note(offset, length as u64, window_max);
        if let Some(range) = ahead
            && range.start < self.image().size()
            // No worker is woken for blocks that are in memory already.
            && cache.has_absent(self.image(), range.clone())
        {
            self.read_ahead.request(self.image(), range);
        }
    }

    /// As [`Cache::write`].
    ///
    /// # Errors
    /// As [`Cache::write`].
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<(), Error> {
        self.check_writable()?;
        self.cache().write(self.image(), offset, data)
    }

    /// As [`Cache::set_size`].
    ///
    /// # Errors
    /// As [`Cache::set_size`].
    pub fn set_size(&self, size: u64) -> Result<(), Error> {
        self.check_writable()?;
        self.cache().set_size(self.image(), size)
    }

    /// As [`Cache::punch`].
    ///
    /// # Errors
    /// As [`Cache::punch`].
    pub fn punch(&self, offset: u64, length: u64) -> Result<(), Error> {
        self.check_writable()?;
        self.cache().punch(self.image(), offset, length)
    }

    /// As [`Cache::zero`].
    ///
    /// # Errors
    /// As [`Cache::zero`].
    pub fn zero(&self, offset: u64, length: u64) -> Result<(), Error> {
        self.check_writable()?;
        self.cache().zero(self.image(), offset, length)
    }

    /// As [`Cache::reserve`].
    ///
    /// # Errors
    /// As [`Cache::reserve`].
    pub fn reserve(&self, offset: u64, length: u64, keep_size: bool) -> Result<(), Error> {
        self.check_writable()?;
        self.cache().reserve(self.image(), offset, length, keep_size)
    }

    /// As [`Cache::seek`].
    ///
    /// # Errors
    /// As [`Cache::seek`].
    pub fn seek(&self, offset: u64, data: bool) -> Result<u64, Error> {
        self.cache().seek(self.image(), offset, data)
    }

    fn check_writable(&self) -> Result<(), Error> {
        if self.writable { Ok(()) } else { Err(Error::ReadOnly) }
    }

    /// Makes everything written to the image durable.
    ///
    /// # Errors
    /// What the disk refused since this handle last asked, once, and what it refuses now.
    pub fn sync(&self) -> io::Result<()> {
        self.sync_range(0..u64::MAX, false)
    }

    /// As [`Handle::sync`] for the bytes of `range`; with `attributes`, mode, owner and times too.
    ///
    /// # Errors
    /// As [`Handle::sync`].
    pub fn sync_range(&self, range: Range<u64>, attributes: bool) -> io::Result<()> {
        let block = BLOCK_BYTES as u64;
        let blocks = range.start / block..range.end.div_ceil(block);
        let synced = self.cache().sync_with(self.image(), blocks, attributes);
        let errors = &self.image().errors;
        match errors.take(&mut self.errors_seen.lock()) {
            // Another request of this handle has reported the error, and this sync is not durable either.
            None if !synced => Err(errors.last()),
            reported => reported.map_or(Ok(()), Err),
        }
    }
}
