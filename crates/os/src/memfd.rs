//! Memory files and their seals.

use crate::fd::Fd;
use crate::raw::Result;
use crate::syscall;
use core::ffi::CStr;

/// The file cannot shrink: readers cannot meet SIGBUS.
pub const SEAL_SHRINK: i32 = 0x2;
/// The file cannot grow.
pub const SEAL_GROW: i32 = 0x4;
/// The file cannot be written by any means.
pub const SEAL_WRITE: i32 = 0x8;
/// No new writable mapping or write is allowed; a writable mapping that exists stays.
pub const SEAL_FUTURE_WRITE: i32 = 0x10;
/// No seal can be added.
pub const SEAL_SEAL: i32 = 0x1;

/// Creates a memory file of `len` bytes, named `name` in /proc, that can be sealed.
///
/// # Errors
/// As memfd_create(2) and ftruncate(2).
pub fn create(name: &CStr, len: u64) -> Result<Fd> {
    // SAFETY: the name is a valid C string for the duration of the call.
    let fd = unsafe { syscall!(libc::SYS_memfd_create, name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) }?;
    // SAFETY: the descriptor was just made and is ours.
    let fd = unsafe { Fd::from_raw(fd as i32) };
    // SAFETY: numbers only.
    unsafe { syscall!(libc::SYS_ftruncate, fd.raw(), len) }?;
    Ok(fd)
}

/// Adds `seals` to the memory file `fd`.
///
/// # Errors
/// As fcntl(2) `F_ADD_SEALS`; `EBUSY` while the file is mapped writable and `SEAL_WRITE` is asked for.
pub fn add_seals(fd: &Fd, seals: i32) -> Result<()> {
    // SAFETY: numbers only.
    unsafe { syscall!(libc::SYS_fcntl, fd.raw(), libc::F_ADD_SEALS, seals) }.map(drop)
}

/// Returns the seals of the memory file `fd`.
///
/// # Errors
/// As fcntl(2) `F_GET_SEALS`; `EINVAL` if `fd` is no memory file.
pub fn seals(fd: &Fd) -> Result<i32> {
    // SAFETY: numbers only.
    unsafe { syscall!(libc::SYS_fcntl, fd.raw(), libc::F_GET_SEALS) }.map(|seals| seals as i32)
}

/// Sets the permission bits of `fd`.
///
/// # Errors
/// As fchmod(2).
pub fn set_mode(fd: &Fd, mode: u32) -> Result<()> {
    // SAFETY: numbers only.
    unsafe { syscall!(libc::SYS_fchmod, fd.raw(), mode) }.map(drop)
}

/// Returns (length in bytes, inode number) of `fd`.
///
/// # Errors
/// As fstat(2).
pub fn len_and_inode(fd: i32) -> Result<(u64, u64)> {
    stat(fd).map(|stat| (stat.st_size as u64, stat.st_ino))
}

/// Bytes of the pages that the file is made of.
///
/// # Errors
/// As fstat(2).
pub fn page_size(fd: i32) -> Result<u64> {
    stat(fd).map(|stat| stat.st_blksize as u64)
}

fn stat(fd: i32) -> Result<libc::stat> {
    let mut stat = core::mem::MaybeUninit::<libc::stat>::zeroed();
    // SAFETY: the kernel fills the structure; on our architectures libc's layout of it is the kernel's.
    unsafe { syscall!(libc::SYS_fstat, fd, stat.as_mut_ptr()) }?;
    // SAFETY: filled above.
    Ok(unsafe { stat.assume_init() })
}

/// Opens the memory file again, for reading only: the descriptor for processes that must not write.
///
/// # Errors
/// As open(2) of `/proc/self/fd/N`.
#[cfg(feature = "std")]
pub fn reopen_read_only(fd: &Fd) -> Result<Fd> {
    let path = std::ffi::CString::new(format!("/proc/self/fd/{}", fd.raw())).map_err(|_| crate::Errno(libc::EINVAL))?;
    Fd::open(&path, libc::O_RDONLY, 0)
}
