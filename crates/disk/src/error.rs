//! What can go wrong in the cache.

use std::io;

/// Why a request on an image failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The image's disk refused a read or a change.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// Everything in the cache is dirty and the disk takes nothing more.
    #[error("the cache is full of dirty blocks that the disk refuses: {0}")]
    Full(io::Error),
    /// The image was opened for reading only.
    #[error("the image is read-only")]
    ReadOnly,
    /// The mount ends, and takes no change any more.
    #[error("the mount has ended")]
    Ended,
    /// Offset and length do not fit a file.
    #[error("offset {offset} and length {length} go beyond what a file can have")]
    Range {
        /// First byte.
        offset: u64,
        /// Byte count.
        length: u64,
    },
}

impl Error {
    /// The error number a caller of the file system sees.
    pub fn errno(&self) -> i32 {
        match self {
            Self::Io(error) | Self::Full(error) => error.raw_os_error().unwrap_or(libc::EIO),
            Self::ReadOnly => libc::EBADF,
            // What the kernel says of a mount whose server is gone.
            Self::Ended => libc::ENOTCONN,
            Self::Range { .. } => libc::EFBIG,
        }
    }
}

/// Errors of an image's writeback, told once to every handle, as Linux tells them at `fsync`.
#[derive(Default)]
pub(crate) struct WritebackErrors {
    last: parking_lot::Mutex<Last>,
}

#[derive(Default)]
struct Last {
    count: u64,
    errno: i32,
    told: bool,
}

impl WritebackErrors {
    /// Notes a failed writeback.
    pub(crate) fn note(&self, error: &io::Error) {
        let errno = error.raw_os_error().unwrap_or(libc::EIO);
        let mut last = self.last.lock();
        *last = Last { count: last.count + 1, errno, told: false };
    }

    /// How many there were.
    pub(crate) fn count(&self) -> u64 {
        self.last.lock().count
    }

    /// Where a new handle starts: an error nobody was told about yet is still ahead of it.
    pub(crate) fn start(&self) -> u64 {
        let last = self.last.lock();
        if last.told { last.count } else { last.count.saturating_sub(1) }
    }

    /// The last error of all, whoever was told.
    pub(crate) fn last(&self) -> io::Error {
        let errno = self.last.lock().errno;
        io::Error::from_raw_os_error(if errno == 0 { libc::EIO } else { errno })
    }

    /// The last error, if there was one after the `seen` first ones; moves `seen` on.
    pub(crate) fn take(&self, seen: &mut u64) -> Option<io::Error> {
        let mut last = self.last.lock();
        if last.count == *seen {
            return None;
        }
        *seen = last.count;
        last.told = true;
        Some(io::Error::from_raw_os_error(last.errno))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_told_once_to_each_and_to_the_first_that_comes() {
        let errors = WritebackErrors::default();
        let (mut a, mut b) = (errors.start(), errors.start());
        assert!(errors.take(&mut a).is_none());
        errors.note(&io::Error::from_raw_os_error(libc::ENOSPC));
        let mut late = errors.start();
        for seen in [&mut a, &mut b, &mut late] {
            assert_eq!(errors.take(seen).and_then(|e| e.raw_os_error()), Some(libc::ENOSPC));
            assert!(errors.take(seen).is_none());
        }
        let mut later = errors.start();
        assert!(errors.take(&mut later).is_none(), "somebody was told already");
    }
}
