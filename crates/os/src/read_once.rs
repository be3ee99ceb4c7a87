//! Reads of data that is read once: the kernel keeps what it has cached already, which programs may be using, and drops what
//! the read itself loads.

use crate::raw::Errno;
use crate::syscall;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

/// `RWF_DONTCACHE` of Linux 6.14: the kernel drops the pages that this read loads.
const DONT_CACHE: u32 = 0x80;

/// Reads at `offset`, as `pread(2)`.
///
/// On an older kernel, or a file system that does not support it, the pages stay: nothing tells them from those in use.
///
/// # Errors
/// The file's.
pub fn read_at(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    match dropping(file, buffer, offset) {
        Err(Errno(libc::EOPNOTSUPP | libc::ENOSYS)) => file.read_at(buffer, offset),
        read => Ok(read?),
    }
}

/// True if the kernel drops what a read of `file` loads.
pub fn is_supported(file: &File) -> bool {
    dropping(file, &mut [0], 0).is_ok()
}

fn dropping(file: &File, buffer: &mut [u8], offset: u64) -> Result<usize, Errno> {
    let piece = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    // SAFETY: the kernel writes into `buffer`, up to its length. The offset is given in two halves, of which a kernel of 64
    // bits reads the first alone.
    unsafe { syscall!(libc::SYS_preadv2, file.as_raw_fd(), &raw const piece, 1, offset, 0, DONT_CACHE) }
}

/// A file that is read once, from its beginning.
#[derive(Debug)]
pub struct ReadOnce {
    file: File,
    offset: u64,
}

impl ReadOnce {
    /// Reads `file` from its beginning. On a kernel without `RWF_DONTCACHE` these pages are evicted before pages in use.
    pub fn new(file: File) -> ReadOnce {
        // SAFETY: posix_fadvise(2) takes no pointer. If the file takes no advice the reads are the same.
        unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_NOREUSE) };
        ReadOnce { file, offset: 0 }
    }
}

impl Read for ReadOnce {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = read_at(&self.file, buffer, self.offset)?;
        self.offset += count as u64;
        Ok(count)
    }
}
