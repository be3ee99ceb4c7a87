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
    // SAFETY: ftruncate(2) takes no pointer, and no process has mapped the new file.
    unsafe { syscall!(libc::SYS_ftruncate, fd.raw(), len) }?;
    Ok(fd)
}

/// Adds `seals` to the memory file `fd`.
///
/// # Errors
/// As fcntl(2) `F_ADD_SEALS`; `EBUSY` while the file is mapped writable and `SEAL_WRITE` is asked for.
pub fn add_seals(fd: &Fd, seals: i32) -> Result<()> {
    // SAFETY: `F_ADD_SEALS` takes no pointer, and a seal changes no byte of the file.
    unsafe { syscall!(libc::SYS_fcntl, fd.raw(), libc::F_ADD_SEALS, seals) }.map(drop)
}

/// Returns the seals of the memory file `fd`.
///
/// # Errors
/// As fcntl(2) `F_GET_SEALS`; `EINVAL` if `fd` is no memory file.
pub fn seals(fd: &Fd) -> Result<i32> {
    // SAFETY: `F_GET_SEALS` takes no pointer.
    unsafe { syscall!(libc::SYS_fcntl, fd.raw(), libc::F_GET_SEALS) }.map(|seals| seals as i32)
}

/// Sets the permission bits of `fd`.
///
/// # Errors
/// As fchmod(2).
pub fn set_mode(fd: &Fd, mode: u32) -> Result<()> {
    // SAFETY: fchmod(2) takes no pointer and changes the mode only.
    unsafe { syscall!(libc::SYS_fchmod, fd.raw(), mode) }.map(drop)
}

/// Sets the group of `fd`.
///
/// # Errors
/// As fchown(2).
pub fn set_group(fd: &Fd, group: u32) -> Result<()> {
    // SAFETY: fchown(2) takes no pointer; -1 leaves the owner.
    unsafe { syscall!(libc::SYS_fchown, fd.raw(), -1_i64, group) }.map(drop)
}

/// Returns the owner and the group of `fd`.
///
/// # Errors
/// As fstat(2).
pub fn owner_and_group(fd: &Fd) -> Result<(u32, u32)> {
    stat(fd.raw()).map(|stat| (stat.st_uid, stat.st_gid))
}

/// Bytes from the start of the file up to its first hole: reading them allocates nothing.
///
/// # Errors
/// As lseek(2) `SEEK_HOLE`.
pub fn first_hole(fd: &Fd) -> Result<u64> {
    // SAFETY: lseek(2) takes no pointer; it moves the file's position only.
    unsafe { syscall!(libc::SYS_lseek, fd.raw(), 0, libc::SEEK_HOLE) }.map(|at| at as u64)
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

/// Returns whether `fd`, perhaps opened with `O_PATH`, is a memory file of small pages. Asks no file system but the kernel's
/// own: a client may pass any file, also one of a file system that it serves itself and that answers when it likes.
#[cfg(feature = "std")]
pub fn is_one(fd: &Fd) -> bool {
    static DEVICE: std::sync::OnceLock<Option<(u32, u32)>> = std::sync::OnceLock::new();
    // All memory files lie on one device, of which no user has a mount.
    let ours = *DEVICE.get_or_init(|| create(c"pagefold-device", 0).and_then(|file| device(&file)).ok());
    ours.is_some() && device(fd).ok() == ours
}

#[cfg(feature = "std")]
fn device(fd: &Fd) -> Result<(u32, u32)> {
    let mut found = core::mem::MaybeUninit::<libc::statx>::zeroed();
    let flags = libc::AT_EMPTY_PATH | libc::AT_STATX_DONT_SYNC;
    // SAFETY: the path is empty and ends; the kernel fills the structure.
    unsafe { syscall!(libc::SYS_statx, fd.raw(), c"".as_ptr(), flags, libc::STATX_TYPE, found.as_mut_ptr()) }?;
    // SAFETY: filled above, and all zeros are valid.
    let found = unsafe { found.assume_init() };
    Ok((found.stx_dev_major, found.stx_dev_minor))
}

/// Opens the memory file again, for reading only: the descriptor for processes that must not write.
///
/// # Errors
/// As open(2) of `/proc/self/fd/N`.
#[cfg(feature = "std")]
pub fn reopen_read_only(fd: &Fd) -> Result<Fd> {
    reopen(fd, libc::O_RDONLY)
}

/// Opens the memory file again, with `flags` of open(2).
///
/// # Errors
/// As open(2) of `/proc/self/fd/N`.
#[cfg(feature = "std")]
pub fn reopen(fd: &Fd, flags: i32) -> Result<Fd> {
    let path = std::ffi::CString::new(format!("/proc/self/fd/{}", fd.raw())).map_err(|_| crate::Errno(libc::EINVAL))?;
    Fd::open(&path, flags, 0)
}
