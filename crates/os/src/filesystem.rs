//! Which file system a file lies on, told apart over time, and what its mount forbids.
//!
//! A device number is given again: to another disk image on a loop device, to any file system without a disk of its
//! own. And where a file system is read-only, even the change time is data that its maker chose.

use std::ffi::CString;
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// File systems without a block device of their own.
const ANONYMOUS: u32 = 0;
/// Loop devices.
const LOOP: u32 = 7;
/// The mount's number, never given again until the next boot (Linux 6.8).
const STATX_MNT_ID_UNIQUE: u32 = 0x4000;

/// True if nothing below `path` may be run, nor mapped to be run: its mount says `noexec`.
pub fn is_noexec(path: &Path) -> bool {
    let Ok(path) = CString::new(path.as_os_str().as_bytes()) else { return false };
    // SAFETY: a struct of plain numbers, for which zero is a value, lives across the call that fills it.
    unsafe {
        let mut system: libc::statvfs = std::mem::zeroed();
        libc::statvfs(path.as_ptr(), &mut system) == 0 && system.f_flag & libc::ST_NOEXEC != 0
    }
}

/// A number for the file system `file` lies on: where it is the same again, a file of the same inode number and change
/// time is the same file, unchanged. It is the device's where the device tells, and else the mount's.
///
/// # Errors
/// The file system's.
pub fn identity(file: &File) -> std::io::Result<u64> {
    use std::os::unix::fs::MetadataExt;
    let device = file.metadata()?.dev();
    // SAFETY: both structs are plain numbers, for which zero is a value, and live across the calls that fill them.
    let (read_only, mount) = unsafe {
        let mut system: libc::statvfs = std::mem::zeroed();
        if libc::fstatvfs(file.as_raw_fd(), &mut system) != 0 {
            return Err(std::io::Error::last_os_error());
        }
        let mut stat: libc::statx = std::mem::zeroed();
        let flags = libc::AT_EMPTY_PATH;
        let asked = libc::statx(file.as_raw_fd(), c"".as_ptr(), flags, STATX_MNT_ID_UNIQUE, &mut stat);
        let unique = asked == 0 && stat.stx_mask & STATX_MNT_ID_UNIQUE != 0;
        (system.f_flag & libc::ST_RDONLY != 0, unique.then_some(stat.stx_mnt_id))
    };
    if !read_only && ![ANONYMOUS, LOOP].contains(&libc::major(device)) {
        return Ok(device);
    }
    let mut hasher = DefaultHasher::new();
    device.hash(&mut hasher);
    match (mount, std::fs::read("/proc/sys/kernel/random/boot_id")) {
        (Some(mount), Ok(boot)) => (mount, boot).hash(&mut hasher),
        // Unknown: then it counts as different from every other one.
        _ => std::time::SystemTime::now().hash(&mut hasher),
    }
    Ok(hasher.finish())
}

/// File systems of the kernel's own files: the sizes there mean nothing, and a write is a command.
const PSEUDO: [libc::__fsword_t; 9] = [
    libc::PROC_SUPER_MAGIC,
    libc::SYSFS_MAGIC,
    libc::CGROUP_SUPER_MAGIC,
    libc::CGROUP2_SUPER_MAGIC,
    libc::DEBUGFS_MAGIC,
    libc::TRACEFS_MAGIC,
    libc::SECURITYFS_MAGIC,
    libc::BPF_FS_MAGIC,
    libc::DEVPTS_SUPER_MAGIC,
];

/// Whether `file` lies on a file system of the kernel's own files (proc, sysfs and the like): they hold nothing to be kept.
pub fn is_pseudo(file: &impl AsRawFd) -> bool {
    // SAFETY: the struct is plain numbers, for which zero is a value, and lives across the call that fills it.
    unsafe {
        let mut system: libc::statfs = std::mem::zeroed();
        libc::fstatfs(file.as_raw_fd(), &mut system) == 0 && PSEUDO.contains(&system.f_type)
    }
}
