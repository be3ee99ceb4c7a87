//! What can go wrong in the cache.

use serde::{Deserialize, Serialize};
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
    /// The mount is ending and accepts no more changes.
    #[error("the mount has ended")]
    Ended,
    /// Offset and length do not fit in a file.
    #[error("offset {offset} and length {length} exceed the largest file size")]
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
            // What the kernel reports for a mount without a server.
            Self::Ended => libc::ENOTCONN,
            Self::Range { .. } => libc::EFBIG,
        }
    }
}

/// Errors of an image's writeback, each reported once to every handle, as Linux reports them at `fsync`.
#[derive(Default)]
pub(crate) struct WritebackErrors {
    last: parking_lot::Mutex<Last>,
}

#[derive(Default)]
struct Last {
    count: u64,
    errno: i32,
    reported: bool,
}

impl WritebackErrors {
    /// Notes a failed writeback.
    pub(crate) fn note(&self, error: &io::Error) {
        let errno = error.raw_os_error().unwrap_or(libc::EIO);
        let mut last = self.last.lock();
        *last = Last { count: last.count + 1, errno, reported: false };
    }

    /// How many errors were noted.
    pub(crate) fn count(&self) -> u64 {
        self.last.lock().count
    }

    /// Where a new handle starts: an error that no handle has reported yet is still ahead of it.
    pub(crate) fn start(&self) -> u64 {
        let last = self.last.lock();
        if last.reported { last.count } else { last.count.saturating_sub(1) }
    }

    /// The last error of all, reported or not.
    pub(crate) fn last(&self) -> io::Error {
        let errno = self.last.lock().errno;
        io::Error::from_raw_os_error(if errno == 0 { libc::EIO } else { errno })
    }

    /// Returns the last error, if one was noted after the first `seen`, and advances `seen`.
    pub(crate) fn take(&self, seen: &mut u64) -> Option<io::Error> {
        let mut last = self.last.lock();
        if last.count == *seen {
            return None;
        }
        *seen = last.count;
        last.reported = true;
        Some(io::Error::from_raw_os_error(last.errno))
    }
}

/// Data of one image that the disk refused when the mount ended.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LostData {
    /// The image.
    pub name: String,
    /// How many bytes could not be written; 0 if all were written and only the sync failed.
    pub bytes: u64,
    /// The disk's error.
    pub error: String,
}

impl std::fmt::Display for LostData {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { name, bytes, error } = self;
        match bytes {
            0 => {
                write!(out, "{name} was written, but fsync failed, and a crash may lose what was written last: {error}")
            }
            _ => write!(out, "{bytes} bytes of {name} could not be written and are lost: {error}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_reported_once_to_each_handle_and_to_the_first_later_one() {
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
        assert!(errors.take(&mut later).is_none(), "an earlier handle has reported it");
    }

    #[test]
    fn written_data_is_not_called_lost() {
        let said = |bytes| LostData { name: "a".into(), bytes, error: "EIO".into() }.to_string();
        assert_eq!(said(4096), "4096 bytes of a could not be written and are lost: EIO");
        assert_eq!(said(0), "a was written, but fsync failed, and a crash may lose what was written last: EIO");
    }
}
