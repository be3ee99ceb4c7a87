//! The image file under the cache: the trait the cache asks for, and the host's files.

use rustix::fs::{Advice, FallocateFlags, FlockOperation, OFlags, ResolveFlags};
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// Opens `path` below `dir`, through no link: whoever may change the directory could lead a name out of it.
///
/// # Errors
/// As `openat2(2)`; `ELOOP` at a link.
pub(crate) fn open_beneath(dir: impl AsFd, path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    let how = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    rustix::fs::openat2(dir, path, flags | OFlags::CLOEXEC, rustix::fs::Mode::empty(), how)
}

/// A name in the directory that holds it, for calls that act on names and follow no link at their end.
pub(crate) struct Place<'a> {
    top: BorrowedFd<'a>,
    parent: Option<OwnedFd>,
    /// The last part of the path.
    pub(crate) name: &'a Path,
}

impl<'a> Place<'a> {
    /// Finds the directory of `path` below `dir`, through no link.
    ///
    /// # Errors
    /// As [`open_beneath`].
    pub(crate) fn find(dir: &'a File, path: &'a Path) -> io::Result<Self> {
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

/// What tells one version of an image file from another.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stamp {
    /// Size in bytes.
    pub size: u64,
    /// Last change of content: seconds and nanoseconds.
    pub mtime: (i64, u32),
    /// Last change of inode or content: seconds and nanoseconds. No call can set it back on a file system that is
    /// written, and an inode number that is given to another file gets a new one, so it is the file's generation too.
    pub ctime: (i64, u32),
    /// Device number; in what [`BlockFile::lasting`] gives, [`pagefold_os::volume::identity`].
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

/// How `allocate` changes a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Allocate {
    /// Reserve space; content stays.
    Reserve,
    /// Give space back; the range reads as zeros.
    Punch,
    /// The range reads as zeros; its space stays reserved, and is where there was none.
    Zero,
}

/// An image file, as the cache needs it. Offsets and sizes in bytes.
///
/// Reads and writes of whole, aligned blocks are the common case; a write may end unaligned at the end of the file.
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
    /// The disk's; what was written since the last success may be lost.
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

    /// What this version of the file is.
    ///
    /// # Errors
    /// The file system's.
    fn stamp(&self) -> io::Result<Stamp>;

    /// A version of this file, as it may be compared with that of another time: device numbers are given again.
    fn lasting(&self, stamp: Stamp) -> Stamp {
        stamp
    }

    /// The file on the host, for its attributes: its name may be gone. `None` where there is no such thing.
    fn host(&self) -> Option<&File> {
        None
    }

    /// Finds data or a hole at or after `offset`, as `lseek` with `SEEK_DATA` or `SEEK_HOLE`.
    ///
    /// # Errors
    /// `ENXIO` when there is none.
    fn seek(&self, offset: u64, data: bool) -> io::Result<u64>;

    /// Whether reads pass by the kernel's page cache.
    fn direct(&self) -> bool;

    /// Whether writes are possible.
    fn writable(&self) -> bool;

    /// Takes the file for the writers of this cache, until [`BlockFile::release`] or the file is closed.
    ///
    /// # Errors
    /// `EBUSY` where another cache has it: each would overwrite what the other wrote.
    fn claim(&self) -> io::Result<()> {
        Ok(())
    }

    /// Leaves the file to the writers of another cache; everything written is in it.
    fn release(&self) {}
}

/// A file of the host, read and written with `O_DIRECT` where its file system allows that.
pub struct HostFile {
    /// For unaligned ends, and for everything where direct I/O is refused.
    buffered: File,
    direct: Option<File>,
    /// Cleared for good when the file system refuses a direct read it accepted the flag for.
    direct_works: AtomicBool,
    writable: bool,
    /// Which file system it lies on: see [`pagefold_os::volume`].
    volume: u64,
}

impl HostFile {
    /// Opens `path` below `dir` for reading, and for writing where that is allowed and `writable` asks for it.
    ///
    /// # Errors
    /// As `open(2)`; `EINVAL` if it is no regular file, `ELOOP` if a link is on the way.
    pub fn open(dir: impl AsFd, path: &Path, writable: bool) -> io::Result<Self> {
        let access = if writable { OFlags::RDWR } else { OFlags::RDONLY };
        let flags = access | OFlags::NONBLOCK | OFlags::NOATIME;
        let file = File::from(match open_beneath(&dir, path, flags) {
            // Only the owner may leave the access time alone.
            Err(rustix::io::Errno::PERM) => open_beneath(&dir, path, flags - OFlags::NOATIME)?,
            other => other?,
        });
        if !file.metadata()?.is_file() {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        Self::new(file, writable)
    }

    /// Takes a regular file that is open for reading, and for writing if it is `writable`.
    ///
    /// # Errors
    /// The file cannot be looked at.
    pub(crate) fn new(buffered: File, writable: bool) -> io::Result<Self> {
        let kept = OFlags::RWMODE | OFlags::NONBLOCK | OFlags::NOATIME;
        let flags = rustix::fs::fcntl_getfl(&buffered)? & kept | OFlags::CLOEXEC | OFlags::DIRECT;
        // The very file: its name may be another's by now.
        let path = format!("/proc/self/fd/{}", buffered.as_raw_fd());
        let direct = rustix::fs::open(path, flags, rustix::fs::Mode::empty()).ok().map(File::from);
        let direct_works = AtomicBool::new(direct.is_some());
        let volume = pagefold_os::volume::identity(&buffered)?;
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
    let block = crate::BLOCK_BYTES;
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
                        // Keep no second copy in the kernel; a hint, so its failure is no error.
                        let length = std::num::NonZeroU64::new(count as u64);
                        let _ = rustix::fs::fadvise(&self.buffered, at, length, Advice::DontNeed);
                    }
                    done += count;
                    // A short direct read ends unaligned: only at the end of the file.
                    if direct.is_some() && !count.is_multiple_of(crate::BLOCK_BYTES) {
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
            // Aligned parts go directly, an unaligned end through the page cache; the kernel keeps both coherent.
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
        // One inode, so one call covers what went through either descriptor.
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

    fn lasting(&self, stamp: Stamp) -> Stamp {
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
            // A file system without locks: there is nobody to ask.
            _ => Ok(()),
        }
    }

    fn release(&self) {
        let _ = rustix::fs::flock(&self.buffered, FlockOperation::Unlock);
    }
}

/// The aligned whole blocks at the front of a buffer that ends unaligned, if there are any.
fn whole_blocks(buffer: &[u8], at: u64) -> Option<&[u8]> {
    let front = &buffer[..buffer.len() / crate::BLOCK_BYTES * crate::BLOCK_BYTES];
    (!front.is_empty() && aligned(std::iter::once(front), at)).then_some(front)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(align(4096))]
    struct Aligned([u8; 3 * crate::BLOCK_BYTES]);

    #[test]
    fn an_unaligned_end_is_written_and_read_back() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = dir.path().join("image");
        std::fs::write(&path, b"").unwrap();
        let handle = File::open(dir.path()).unwrap();
        let file = HostFile::open(&handle, Path::new("image"), true).unwrap();
        let mut data = Box::new(Aligned([7; 3 * crate::BLOCK_BYTES]));
        data.0[8192..].fill(9);
        file.write_at(&[IoSlice::new(&data.0[..9000])], 0).unwrap();
        assert_eq!(file.stamp().unwrap().size, 9000);
        let mut back = Box::new(Aligned([0; 3 * crate::BLOCK_BYTES]));
        assert_eq!(file.read_at(&mut [IoSliceMut::new(&mut back.0)], 0).unwrap(), 9000);
        assert_eq!(back.0[..9000], data.0[..9000]);
        file.sync().unwrap();
    }

    #[test]
    fn no_link_leads_out_of_the_directory() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let outside = tempfile::tempdir_in("/var/tmp").unwrap();
        std::fs::write(outside.path().join("image"), b"").unwrap();
        std::fs::create_dir(dir.path().join("sub")).unwrap();
        std::fs::write(dir.path().join("sub/image"), b"").unwrap();
        std::os::unix::fs::symlink(outside.path(), dir.path().join("link")).unwrap();
        std::os::unix::fs::symlink(outside.path().join("image"), dir.path().join("last")).unwrap();
        let handle = File::open(dir.path()).unwrap();
        HostFile::open(&handle, Path::new("sub/image"), true).unwrap();
        assert!(Place::find(&handle, Path::new("sub/image")).is_ok());
        let code = |result: Option<io::Error>| result.and_then(|error| error.raw_os_error());
        for name in ["link/image", "last"] {
            assert_eq!(code(HostFile::open(&handle, Path::new(name), true).err()), Some(libc::ELOOP), "{name}");
        }
        assert_eq!(code(Place::find(&handle, Path::new("link/image")).err()), Some(libc::ELOOP));
        let above = Path::new(outside.path().file_name().unwrap());
        assert!(HostFile::open(&handle, &Path::new("..").join(above).join("image"), true).is_err());
    }

    #[test]
    fn a_directory_is_no_image() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        std::fs::create_dir(dir.path().join("sub")).unwrap();
        let handle = File::open(dir.path()).unwrap();
        let opened = HostFile::open(&handle, Path::new("sub"), false);
        assert_eq!(opened.err().and_then(|e| e.raw_os_error()), Some(libc::EINVAL));
    }
}
