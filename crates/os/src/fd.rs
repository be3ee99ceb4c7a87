//! Files: an owned descriptor, and reading and writing it.

use crate::raw::{Errno, Result, retry};
use crate::syscall;
use core::ffi::CStr;

/// Gets the limits of descriptors to `old`, or sets them to `new`.
fn prlimit(new: *const libc::rlimit64, old: *mut libc::rlimit64) -> Result<usize> {
    // SAFETY: the callers give structures that live across the call, or null.
    unsafe { syscall!(libc::SYS_prlimit64, 0, libc::RLIMIT_NOFILE, new, old) }
}

fn limits() -> Result<libc::rlimit64> {
    let mut limit = libc::rlimit64 { rlim_cur: 0, rlim_max: 0 };
    prlimit(core::ptr::null(), &raw mut limit)?;
    Ok(limit)
}

/// The number of descriptors that this process may have open.
///
/// # Errors
/// As prlimit(2).
pub fn limit() -> Result<u64> {
    limits().map(|limit| limit.rlim_cur)
}

/// Raises the number of descriptors that this process may have open as far as it may; returns it.
///
/// # Errors
/// As prlimit(2).
pub fn raise_limit() -> Result<u64> {
    let mut limit = limits()?;
    limit.rlim_cur = limit.rlim_max;
    prlimit(&raw const limit, core::ptr::null_mut())?;
    Ok(limit.rlim_cur)
}

/// A file descriptor that is closed when dropped.
#[derive(Debug)]
pub struct Fd(i32);

impl Fd {
    /// Takes ownership of `fd`.
    ///
    /// # Safety
    /// `fd` is open, and only the returned value closes it.
    pub const unsafe fn from_raw(fd: i32) -> Fd {
        Fd(fd)
    }

    /// The number, still owned by this value.
    pub const fn raw(&self) -> i32 {
        self.0
    }

    /// Gives the number away; it is no longer closed on drop.
    pub fn into_raw(self) -> i32 {
        let fd = self.0;
        core::mem::forget(self);
        fd
    }

    /// Opens `path` with `flags` of open(2) (close-on-exec is added) and `mode`.
    ///
    /// # Errors
    /// As open(2).
    pub fn open(path: &CStr, flags: i32, mode: u32) -> Result<Fd> {
        Fd::open_at(libc::AT_FDCWD, path, flags, mode)
    }

    /// As [`Fd::open`], with a relative `path` below the directory `dir`.
    ///
    /// # Errors
    /// As openat(2).
    pub fn open_at(dir: i32, path: &CStr, flags: i32, mode: u32) -> Result<Fd> {
        retry(|| {
            // SAFETY: the path is a valid C string for the duration of the call.
            unsafe { syscall!(libc::SYS_openat, dir, path.as_ptr(), flags | libc::O_CLOEXEC, mode) }
        })
        .map(|fd| Fd(fd as i32))
    }

    /// Duplicates the descriptor, close-on-exec.
    ///
    /// # Errors
    /// As fcntl(2) `F_DUPFD_CLOEXEC`.
    pub fn duplicate(&self) -> Result<Fd> {
        // SAFETY: `F_DUPFD_CLOEXEC` takes no pointer; the descriptor that it returns is new and has this one owner.
        unsafe { syscall!(libc::SYS_fcntl, self.0, libc::F_DUPFD_CLOEXEC, 0) }.map(|fd| Fd(fd as i32))
    }

    /// Reads into `buffer` and returns the number of bytes; 0 at the end.
    ///
    /// # Errors
    /// As read(2), but never `EINTR`.
    pub fn read(&self, buffer: &mut [u8]) -> Result<usize> {
        // SAFETY: the kernel writes at most `buffer.len()` bytes into `buffer`.
        retry(|| unsafe { syscall!(libc::SYS_read, self.0, buffer.as_mut_ptr(), buffer.len()) })
    }

    /// As [`read`](Self::read), but never waits, whatever the descriptor's flags: another process that shares the descriptor
    /// may have set them.
    ///
    /// # Errors
    /// As read(2), but never `EINTR`; `EAGAIN` where there is nothing now.
    pub fn read_at_once(&self, buffer: &mut [u8]) -> Result<usize> {
        let parts = [libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() }];
        // Without a place in the file, as read(2).
        let read = || {
            // SAFETY: the kernel writes at most `buffer.len()` bytes into `buffer`.
            unsafe { syscall!(libc::SYS_preadv2, self.0, parts.as_ptr(), 1, -1_i64, -1_i64, libc::RWF_NOWAIT) }
        };
        match retry(read) {
            // Of a kernel, or a file, that does not know how.
            Err(Errno(libc::EOPNOTSUPP)) => {
                self.set_nonblocking()?;
                self.read(buffer)
            }
            got => got,
        }
    }

    /// Has reads and writes fail with `EAGAIN` where they would wait.
    ///
    /// # Errors
    /// As fcntl(2).
    pub fn set_nonblocking(&self) -> Result<()> {
        // SAFETY: `F_GETFL` takes no pointer; `self` keeps the descriptor open.
        let flags = unsafe { syscall!(libc::SYS_fcntl, self.0, libc::F_GETFL) }? as i32;
        // SAFETY: `F_SETFL` takes no pointer; `self` keeps the descriptor open.
        unsafe { syscall!(libc::SYS_fcntl, self.0, libc::F_SETFL, flags | libc::O_NONBLOCK) }.map(drop)
    }

    /// Reads into `buffer` from byte `offset` and returns the number of bytes.
    ///
    /// # Errors
    /// As pread(2), but never `EINTR`.
    pub fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<usize> {
        // SAFETY: the kernel writes at most `buffer.len()` bytes into `buffer`.
        retry(|| unsafe { syscall!(libc::SYS_pread64, self.0, buffer.as_mut_ptr(), buffer.len(), offset) })
    }

    /// Writes `bytes` and returns how many were taken.
    ///
    /// # Errors
    /// As write(2), but never `EINTR`.
    pub fn write(&self, bytes: &[u8]) -> Result<usize> {
        // SAFETY: the kernel reads `bytes` only.
        retry(|| unsafe { syscall!(libc::SYS_write, self.0, bytes.as_ptr(), bytes.len()) })
    }
}

impl Drop for Fd {
    fn drop(&mut self) {
        // SAFETY: we own the descriptor. An error of close(2) leaves nothing to do.
        let _ = unsafe { syscall!(libc::SYS_close, self.0) };
    }
}

#[cfg(feature = "std")]
impl std::os::fd::AsRawFd for Fd {
    fn as_raw_fd(&self) -> i32 {
        self.0
    }
}

#[cfg(feature = "std")]
impl From<std::os::fd::OwnedFd> for Fd {
    fn from(fd: std::os::fd::OwnedFd) -> Fd {
        use std::os::fd::IntoRawFd;
        Fd(fd.into_raw_fd())
    }
}

#[cfg(feature = "std")]
impl From<Fd> for std::os::fd::OwnedFd {
    fn from(fd: Fd) -> std::os::fd::OwnedFd {
        use std::os::fd::FromRawFd;
        // SAFETY: the descriptor was ours alone, and is given away.
        unsafe { std::os::fd::OwnedFd::from_raw_fd(fd.into_raw()) }
    }
}

/// Waits until one of `polls` is ready or `timeout_ms` passed (-1: for ever) and returns how many are.
///
/// # Errors
/// As poll(2); `EINTR` counts as nothing ready.
pub fn poll(polls: &mut [libc::pollfd], timeout_ms: i32) -> Result<usize> {
    let timeout =
        libc::timespec { tv_sec: i64::from(timeout_ms / 1000), tv_nsec: i64::from(timeout_ms % 1000) * 1_000_000 };
    let timeout: *const libc::timespec = if timeout_ms < 0 { core::ptr::null() } else { &timeout };
    // SAFETY: the kernel writes the `revents` of the slice only.
    match unsafe { syscall!(libc::SYS_ppoll, polls.as_mut_ptr(), polls.len(), timeout, 0usize, 8usize) } {
        Err(crate::Errno(libc::EINTR)) => Ok(0),
        other => other,
    }
}
