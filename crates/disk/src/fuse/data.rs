//! Data: opening, reading, writing, allocating and syncing images through the cache.

use super::file_system::DiskFs;
use crate::error::Error;
use fuser::{FileHandle, INodeNo};
use std::io;

impl DiskFs {
    pub(super) fn open_image(&self, number: INodeNo, flags: i32) -> io::Result<FileHandle> {
        Ok(self.register(self.open_number(number, flags & libc::O_ACCMODE != libc::O_RDONLY)?))
    }

    /// Writes, and syncs if the open `flags` of the file ask for it. The kernel sends a write `from_mapping`, a shared one,
    /// with any handle of the file.
    pub(super) fn write(
        &self,
        handle: FileHandle,
        offset: u64,
        data: &[u8],
        from_mapping: bool,
        flags: i32,
    ) -> Result<(), Error> {
        let handle = self.handle(handle)?;
        if from_mapping {
            self.engine.cache().write(handle.image(), offset, data)?;
        } else {
            handle.write(offset, data)?;
        }
        if flags & libc::O_DSYNC != 0 {
            // O_SYNC is O_DSYNC with one more bit.
            let attributes = flags & libc::O_SYNC == libc::O_SYNC;
            handle.sync_range(offset..offset + data.len() as u64, attributes)?;
        }
        Ok(())
    }

    pub(super) fn sync(&self, handle: FileHandle, data_only: bool) -> Result<(), Error> {
        Ok(self.handle(handle)?.sync_range(0..u64::MAX, !data_only)?)
    }

    pub(super) fn allocate(&self, handle: FileHandle, offset: u64, length: u64, mode: i32) -> Result<(), Error> {
        let handle = self.handle(handle)?;
        let keep_size = mode & libc::FALLOC_FL_KEEP_SIZE != 0;
        match mode & !libc::FALLOC_FL_KEEP_SIZE {
            0 => handle.reserve(offset, length, keep_size),
            libc::FALLOC_FL_PUNCH_HOLE => handle.punch(offset, length),
            libc::FALLOC_FL_ZERO_RANGE => {
                // The range beyond the end is reserved only; there is nothing to clear.
                if offset.saturating_add(length) > handle.image().size() {
                    handle.reserve(offset, length, keep_size)?;
                }
                handle.zero(offset, length)
            }
            _ => Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP).into()),
        }
    }

    pub(super) fn seek(&self, handle: FileHandle, offset: i64, whence: i32) -> Result<u64, Error> {
        let handle = self.handle(handle)?;
        match (u64::try_from(offset), whence) {
            (Ok(offset), libc::SEEK_DATA) => handle.seek(offset, true),
            (Ok(offset), libc::SEEK_HOLE) => handle.seek(offset, false),
            (Err(_), _) => Err(io::Error::from_raw_os_error(libc::ENXIO).into()),
            _ => Err(io::Error::from_raw_os_error(libc::EINVAL).into()),
        }
    }

    /// Space and files of the file system that holds the images.
    pub(super) fn stat_fs(&self) -> io::Result<rustix::fs::StatVfs> {
        Ok(rustix::fs::fstatvfs(self.engine.directory())?)
    }
}
