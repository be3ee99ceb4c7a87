//! The image file under the cache: the trait the cache asks for, and the host's files.

use crate::geometry::BLOCK_BYTES;
use rustix::fs::{Advice, AtFlags, FallocateFlags, FlockOperation, OFlags, ResolveFlags};
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// Opens `path` below `dir` without following a link. A user that may write to the directory could otherwise make a
/// name lead out of it.
///
/// # Errors
/// As `openat2(2)`; `ELOOP` at a link.
pub(crate) fn open_beneath(dir: impl AsFd, path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    let how = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    rustix::fs::openat2(dir, path, flags | OFlags::CLOEXEC, rustix::fs::Mode::empty(), how)
}

/// A name and an open directory that holds it, for calls that act on names and do not follow a link at the end.
pub(crate) struct EntryName<'a> {
    top: BorrowedFd<'a>,
    parent: Option<OwnedFd>,
    /// The last part of the path.
    pub(crate) name: &'a Path,
}

impl<'a> EntryName<'a> {
    /// Opens the directory of `path` below `dir` without following a link.
    ///
    /// # Errors
    /// As [`open_beneath`].
    pub(crate) fn resolve(dir: &'a File, path: &'a Path) -> io::Result<Self> {
        let (top, parent) = (dir.as_fd(), path.parent().unwrap_or(Path::new("")));
        if parent.as_os_str().is_empty() {
            return Ok(Self { top, parent: None, name: path });
        }
        let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        let parent = open_beneath(dir, parent, OFlags::PATH | OFlags::DIRECTORY)?;
        Ok(Self { top, parent: Some(parent), name: Path::new(name) })
    }

    /// The directory.
    pub(crate) fn parent(&self) -> BorrowedFd<'_> {
        self.parent.as_ref().map_or(self.top, |parent| parent.as_fd())
    }
}

/// A version of an image file. Two versions of a file differ in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stamp {
    /// Size in bytes.
    pub size: u64,
    /// Last change of content: seconds and nanoseconds.
    pub mtime: (i64, u32),
    /// Last change of inode or content: seconds and nanoseconds. No call on a mounted file system can set it back, and a
    /// file that reuses an inode number gets a new one, so it serves as the file's generation too.
    pub ctime: (i64, u32),
    /// Device number, or in a stamp of [`BlockFile::persistent_stamp`] the file system's identity.
    pub dev: u64,
    /// Inode number.
    pub ino: u64,
}

/// The version of an open file.
pub(crate) fn stamp_of(file: impl AsFd) -> io::Result<Stamp> {
    let stat = rustix::fs::fstat(file)?;
    Ok(Stamp {
        size: stat.st_size as u64,
        mtime: (stat.st_mtime, stat.st_mtime_nsec as u32),
        ctime: (stat.st_ctime, stat.st_ctime_nsec as u32),
        dev: stat.st_dev,
        ino: stat.st_ino,
    })
}

/// Names a file of the host: device and inode number.
pub(crate) type FileKey = (u64, u64);

/// The key of an open file.
pub(crate) fn key_of(file: impl AsFd) -> io::Result<FileKey> {
    let stat = rustix::fs::fstat(file)?;
    Ok((stat.st_dev, stat.st_ino))
}

/// The attributes of `path` below `directory`, those of the link if it is one.
pub(crate) fn stat_beneath(directory: &File, path: &Path) -> io::Result<rustix::fs::Stat> {
    let entry = EntryName::resolve(directory, path)?;
    Ok(rustix::fs::statat(entry.parent(), entry.name, AtFlags::SYMLINK_NOFOLLOW)?)
}

/// How `allocate` changes a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Allocate {
    /// Reserve space; content stays.
    Reserve,
    /// Free the range's space; it reads as zeros.
    Punch,
    /// The range reads as zeros; its space stays reserved, or is reserved where it was a hole.
    Zero,
}

/// An image file, as the cache needs it. Offsets and sizes in bytes.
///
/// Most reads and writes are of whole, aligned blocks; a write may end unaligned at the end of the file.
pub trait BlockFile: Send + Sync {
    /// Reads into `buffers` from `offset`; returns fewer bytes than asked only at the end of the file.
    ///
    /// # Errors
    /// The disk's.
    fn read_at(&self, buffers: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<usize>;

    /// Writes all of `buffers` at `offset`.
    ///
    /// # Errors
    /// The disk's; part of the data may have been written.
    fn write_at(&self, buffers: &[IoSlice<'_>], offset: u64) -> io::Result<()>;

    /// Returns once everything written before is on stable storage.
    ///
    /// # Errors
    /// The disk's; data written since the last success may be lost.
    fn sync(&self) -> io::Result<()>;

    /// As [`BlockFile::sync`], and mode, owner and times too.
    ///
    /// # Errors
    /// As [`BlockFile::sync`].
    fn sync_attributes(&self) -> io::Result<()> {
        self.sync()
    }

    /// Sets the size; a longer file reads as zeros there.
    ///
    /// # Errors
    /// The file system's.
    fn set_len(&self, size: u64) -> io::Result<()>;

    /// Reserves, punches or zeroes `length` bytes from `offset`, keeping the size.
    ///
    /// # Errors
    /// `EOPNOTSUPP` where the file system cannot.
    fn allocate(&self, how: Allocate, offset: u64, length: u64) -> io::Result<()>;

    /// The file's version now.
    ///
    /// # Errors
    /// The file system's.
    fn stamp(&self) -> io::Result<Stamp>;

    /// `stamp` in a form that may be compared across mounts and reboots, after which device numbers are reused.
    fn persistent_stamp(&self, stamp: Stamp) -> Stamp {
        stamp
    }

    /// The open file of the host, for its attributes: its name may be gone. `None` if it is not a file of the host.
    fn host(&self) -> Option<&File> {
        None
    }

    /// Finds data or a hole at or after `offset`, as `lseek` with `SEEK_DATA` or `SEEK_HOLE`.
    ///
    /// # Errors
    /// `ENXIO` when there is none.
    fn seek(&self, offset: u64, data: bool) -> io::Result<u64>;

    /// Whether reads bypass the kernel's page cache.
    fn direct(&self) -> bool;

    /// Whether writes are possible.
    fn writable(&self) -> bool;

    /// Claims the file for the writers of this cache, until [`BlockFile::release`] or close.
    ///
    /// # Errors
    /// `EBUSY` if another cache has claimed it: each would overwrite the other's writes.
    fn claim(&self) -> io::Result<()> {
        Ok(())
    }

    /// Gives up the claim. The caller has written everything back.
    fn release(&self) {}
}

/// A file of the host, read and written with `O_DIRECT` if its file system allows it.
pub struct HostFile {
    /// For unaligned ends, and for everything if direct I/O is refused.
    buffered: File,
    direct: Option<File>,
    /// Cleared for good when the file system refuses a direct read although it accepted `O_DIRECT`.
    direct_works: AtomicBool,
    writable: bool,
    /// The identity of its file system: see [`pagefold_os::filesystem`].
    volume: u64,
}

impl HostFile {
    /// Opens `path` below `dir` for reading, and if `writable` for writing too.
    ///
    /// # Errors
    /// As `open(2)`; `EINVAL` if it is not a regular file, `ELOOP` if the path has a link.
    pub fn open(dir: impl AsFd, path: &Path, writable: bool) -> io::Result<Self> {
        let access = if writable { OFlags::RDWR } else { OFlags::RDONLY };
        let flags = access | OFlags::NONBLOCK | OFlags::NOATIME;
        let file = File::from(match open_beneath(&dir, path, flags) {
            // `O_NOATIME` is for the file's owner only.
            Err(rustix::io::Errno::PERM) => open_beneath(&dir, path, flags - OFlags::NOATIME)?,
            other => other?,
        });
        if !file.metadata()?.is_file() {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        Self::new(file, writable)
    }

    /// Takes a regular file that is open for reading, and for writing if `writable`.
    ///
    /// # Errors
    /// The file's flags or its file system cannot be read.
    pub(crate) fn new(buffered: File, writable: bool) -> io::Result<Self> {
        let kept = OFlags::RWMODE | OFlags::NONBLOCK | OFlags::NOATIME;
        let flags = rustix::fs::fcntl_getfl(&buffered)? & kept | OFlags::CLOEXEC | OFlags::DIRECT;
        // Through the descriptor: another file may have its name by now.
        let path = format!("/proc/self/fd/{}", buffered.as_raw_fd());
        let direct = rustix::fs::open(path, flags, rustix::fs::Mode::empty()).ok().map(File::from);
        let direct_works = AtomicBool::new(direct.is_some());
        let volume = pagefold_os::filesystem::identity(&buffered)?;
        Ok(Self { buffered, direct, direct_works, writable, volume })
    }

    /// The file without `O_DIRECT`, for attributes.
    pub fn file(&self) -> &File {
        &self.buffered
    }

    fn direct_file(&self) -> Option<&File> {
        self.direct.as_ref().filter(|_| self.direct_works.load(Ordering::Relaxed))
    }
}

/// Whether every buffer and the offset suit direct I/O on any disk.
fn aligned<'a>(buffers: impl Iterator<Item = &'a [u8]>, offset: u64) -> bool {
    let block = BLOCK_BYTES;
    offset.is_multiple_of(block as u64)
        && buffers
            .into_iter()
            .all(|buffer| buffer.len().is_multiple_of(block) && (buffer.as_ptr() as usize).is_multiple_of(block))
}

impl BlockFile for HostFile {
    fn read_at(&self, buffers: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<usize> {
        let mut done = 0;
        let mut rest = buffers;
        IoSliceMut::advance_slices(&mut rest, 0);
        while !rest.is_empty() {
            let at = offset + done as u64;
            let direct = self.direct_file().filter(|_| aligned(rest.iter().map(|b| &**b), at));
            let part = rest.len().min(libc::UIO_MAXIOV as usize);
            let result = match direct {
                Some(file) => rustix::io::preadv(file, &mut rest[..part], at),
                None => rustix::io::preadv(&self.buffered, &mut rest[..part], at),
            };
            match result {
                Ok(0) => break,
                Ok(count) => {
                    if direct.is_none() {
                        // The kernel need not keep a second copy. This is a hint, so its failure is ignored.
                        let length = std::num::NonZeroU64::new(count as u64);
                        let _ = rustix::fs::fadvise(&self.buffered, at, length, Advice::DontNeed);
                    }
                    done += count;
                    // A direct read ends unaligned at the end of the file only.
                    if direct.is_some() && !count.is_multiple_of(BLOCK_BYTES) {
                        break;
                    }
                    IoSliceMut::advance_slices(&mut rest, count);
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::INVAL) if direct.is_some() => self.direct_works.store(false, Ordering::Relaxed),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(done)
    }

    fn write_at(&self, buffers: &[IoSlice<'_>], offset: u64) -> io::Result<()> {
        let mut own: Vec<IoSlice<'_>> = buffers.to_vec();
        let mut rest = &mut own[..];
        let mut at = offset;
        IoSlice::advance_slices(&mut rest, 0);
        while !rest.is_empty() {
            // Aligned parts bypass the page cache, an unaligned end goes through it; the kernel keeps both coherent.
            let front = rest.iter().take_while(|b| aligned(std::iter::once(&***b), at)).count();
            let front = front.min(libc::UIO_MAXIOV as usize);
            let direct = self.direct_file();
            let result = match (direct, front, whole_blocks(&rest[0], at)) {
                (Some(file), 1.., _) => rustix::io::pwritev(file, &rest[..front], at),
                (Some(file), 0, Some(whole)) => rustix::io::pwrite(file, whole, at),
                _ => rustix::io::pwrite(&self.buffered, &rest[0], at),
            };
            match result {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => {
                    at += count as u64;
                    IoSlice::advance_slices(&mut rest, count);
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::INVAL) if direct.is_some() => {
                    self.direct_works.store(false, Ordering::Relaxed);
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        // One call covers writes through both descriptors, because they share the inode.
        Ok(rustix::fs::fdatasync(&self.buffered)?)
    }

    fn sync_attributes(&self) -> io::Result<()> {
        Ok(rustix::fs::fsync(&self.buffered)?)
    }

    fn set_len(&self, size: u64) -> io::Result<()> {
        Ok(rustix::fs::ftruncate(&self.buffered, size)?)
    }

    fn allocate(&self, how: Allocate, offset: u64, length: u64) -> io::Result<()> {
        let mode = match how {
            Allocate::Reserve => FallocateFlags::KEEP_SIZE,
            Allocate::Punch => FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            Allocate::Zero => FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE,
        };
        Ok(rustix::fs::fallocate(&self.buffered, mode, offset, length)?)
    }

    fn stamp(&self) -> io::Result<Stamp> {
        stamp_of(&self.buffered)
    }

    fn persistent_stamp(&self, stamp: Stamp) -> Stamp {
        Stamp { dev: self.volume, ..stamp }
    }

    fn host(&self) -> Option<&File> {
        Some(&self.buffered)
    }

    fn seek(&self, offset: u64, data: bool) -> io::Result<u64> {
        use rustix::fs::SeekFrom;
        let to = if data { SeekFrom::Data(offset) } else { SeekFrom::Hole(offset) };
        Ok(rustix::fs::seek(&self.buffered, to)?)
    }

    fn direct(&self) -> bool {
        self.direct_file().is_some()
    }

    fn writable(&self) -> bool {
        self.writable
    }

    fn claim(&self) -> io::Result<()> {
        match rustix::fs::flock(&self.buffered, FlockOperation::NonBlockingLockExclusive) {
            Err(rustix::io::Errno::WOULDBLOCK) => Err(io::Error::from_raw_os_error(libc::EBUSY)),
            // A file system without locks cannot tell of another cache.
            _ => Ok(()),
        }
    }

    fn release(&self) {
        let _ = rustix::fs::flock(&self.buffered, FlockOperation::Unlock);
    }
}

/// The aligned whole blocks at the start of a buffer, if it has any.
fn whole_blocks(buffer: &[u8], at: u64) -> Option<&[u8]> {
    let front = &buffer[..buffer.len() / BLOCK_BYTES * BLOCK_BYTES];
    (!front.is_empty() && aligned(std::iter::once(front), at)).then_some(front)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(align(4096))]
    struct Aligned([u8; 3 * BLOCK_BYTES]);

    #[test]
    fn an_unaligned_end_is_written_and_read_back() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = dir.path().join("image");
        std::fs::write(&path, b"").unwrap();
        let handle = File::open(dir.path()).unwrap();
        let file = HostFile::open(&handle, Path::new("image"), true).unwrap();
        let mut data = Box::new(Aligned([7; 3 * BLOCK_BYTES]));
        data.0[8192..].fill(9);
        file.write_at(&[IoSlice::new(&data.0[..9000])], 0).unwrap();
        assert_eq!(file.stamp().unwrap().size, 9000);
        let mut back = Box::new(Aligned([0; 3 * BLOCK_BYTES]));
        assert_eq!(file.read_at(&mut [IoSliceMut::new(&mut back.0)], 0).unwrap(), 9000);
        assert_eq!(back.0[..9000], data.0[..9000]);
        file.sync().unwrap();
    }

    #[test]
    fn a_link_never_leads_out_of_the_directory() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let outside = tempfile::tempdir_in("/var/tmp").unwrap();
        std::fs::write(outside.path().join("image"), b"").unwrap();
        std::fs::create_dir(dir.path().join("sub")).unwrap();
        std::fs::write(dir.path().join("sub/image"), b"").unwrap();
        std::os::unix::fs::symlink(outside.path(), dir.path().join("link")).unwrap();
        std::os::unix::fs::symlink(outside.path().join("image"), dir.path().join("last")).unwrap();
        let handle = File::open(dir.path()).unwrap();
        HostFile::open(&handle, Path::new("sub/image"), true).unwrap();
        assert!(EntryName::resolve(&handle, Path::new("sub/image")).is_ok());
        let code = |result: Option<io::Error>| result.and_then(|error| error.raw_os_error());
        for name in ["link/image", "last"] {
            assert_eq!(code(HostFile::open(&handle, Path::new(name), true).err()), Some(libc::ELOOP), "{name}");
        }
        assert_eq!(code(EntryName::resolve(&handle, Path::new("link/image")).err()), Some(libc::ELOOP));
        let above = Path::new(outside.path().file_name().unwrap());
        assert!(HostFile::open(&handle, &Path::new("..").join(above).join("image"), true).is_err());
    }

    #[test]
    fn a_directory_is_refused_as_an_image() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        std::fs::create_dir(dir.path().join("sub")).unwrap();
        let handle = File::open(dir.path()).unwrap();
        let opened = HostFile::open(&handle, Path::new("sub"), false);
        assert_eq!(opened.err().and_then(|e| e.raw_os_error()), Some(libc::EINVAL));
    }
}
