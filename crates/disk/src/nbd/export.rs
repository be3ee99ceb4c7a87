//! What is served: an image, or in tests anything that acts as one.

use crate::error::Error;
use crate::handle::Handle;

/// An export. Errors are error numbers.
pub trait Disk: Send + Sync {
    /// Size in bytes.
    fn size(&self) -> u64;
    /// Whether writing is refused.
    fn read_only(&self) -> bool;
    /// Fills `buffer` from `offset`; the range lies inside the size.
    ///
    /// # Errors
    /// An error number.
    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), i32>;
    /// Writes `data` at `offset`; the range lies inside the size.
    ///
    /// # Errors
    /// An error number.
    fn write(&self, offset: u64, data: &[u8]) -> Result<(), i32>;
    /// Makes a range read as zeros; with `hole`, its disk space may be freed.
    ///
    /// # Errors
    /// An error number.
    fn zero(&self, offset: u64, length: u64, hole: bool) -> Result<(), i32>;
    /// Makes earlier writes durable.
    ///
    /// # Errors
    /// An error number.
    fn flush(&self) -> Result<(), i32>;
    /// Where the data or hole ends that begins at `offset`, which lies inside the size, and whether it is a hole. The end
    /// may lie behind the size.
    ///
    /// # Errors
    /// An error number.
    fn extent(&self, offset: u64) -> Result<(u64, bool), i32>;
}

impl Disk for Handle {
    fn size(&self) -> u64 {
        self.image().size()
    }

    fn read_only(&self) -> bool {
        !self.writable()
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), i32> {
        let count = Handle::read(self, offset, buffer).map_err(|error| error.errno())?;
        // The image was cut after the client got its size: the missing bytes read as zeros.
        buffer[count..].fill(0);
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), i32> {
        Handle::write(self, offset, data).map_err(|error: Error| error.errno())
    }

    fn zero(&self, offset: u64, length: u64, hole: bool) -> Result<(), i32> {
        let result = if hole { self.punch(offset, length) } else { Handle::zero(self, offset, length) };
        result.map_err(|error| error.errno())
    }

    fn flush(&self) -> Result<(), i32> {
        self.sync().map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))
    }

    fn extent(&self, offset: u64) -> Result<(u64, bool), i32> {
        match self.seek(offset, true).map_err(|error| error.errno()) {
            Ok(data) if data > offset => Ok((data, true)),
            Ok(_) => match self.seek(offset, false).map_err(|error| error.errno()) {
                // The data was punched meanwhile: the next question finds the hole.
                Ok(hole) => Ok((hole.max(offset + 1), false)),
                Err(libc::ENXIO) => Ok((u64::MAX, false)),
                Err(errno) => Err(errno),
            },
            // No data from here to the end.
            Err(libc::ENXIO) => Ok((u64::MAX, true)),
            Err(errno) => Err(errno),
        }
    }
}
