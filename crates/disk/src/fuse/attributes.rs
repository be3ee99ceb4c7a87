//! Attributes: the host's, corrected by what the cache knows.
//!
//! The host's size and times of an open image may be older than the cache's, and its name may be gone. A change of
//! attributes goes to the very file that the kernel means, never to another file that has its name now.

use super::file_system::DiskFs;
use crate::error::Error;
use crate::file::{key_of, stat_beneath};
use crate::geometry::BLOCK_BYTES;
use fuser::{FileAttr, FileHandle, FileType, INodeNo, TimeOrNow};
use rustix::fs::{AtFlags, Mode, Stat, Timespec, Timestamps};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, UNIX_EPOCH};

/// The attributes to change; `None` for those that stay.
pub(super) struct AttributeChange {
    pub(super) mode: Option<u32>,
    pub(super) uid: Option<u32>,
    pub(super) gid: Option<u32>,
    pub(super) size: Option<u64>,
    pub(super) atime: Option<TimeOrNow>,
    pub(super) mtime: Option<TimeOrNow>,
}

impl DiskFs {
    fn stat_of(&self, number: INodeNo) -> io::Result<Stat> {
        // An open image may have lost its name.
        if let Some(image) = self.key(number).and_then(|key| self.engine.open_image(key))
            && let Ok(file) = image.file()
            && let Some(file) = file.host()
        {
            return Ok(rustix::fs::fstat(file)?);
        }
        stat_beneath(self.engine.directory(), &self.path(number)?)
    }

    pub(super) fn attributes_of(&self, number: INodeNo) -> io::Result<FileAttr> {
        Ok(self.attributes(number.0, &self.stat_of(number)?))
    }

    pub(super) fn attributes(&self, number: u64, stat: &Stat) -> FileAttr {
        let mut attr = attributes(number, stat);
        if let Some(image) = self.engine.open_image((stat.st_dev, stat.st_ino)) {
            attr.size = image.size();
            // A write counts even if its data has not reached the file yet.
            attr.mtime = attr.mtime.max(image.written_at());
        }
        attr
    }

    /// Changes attributes of a file; `handle` is an open handle of it, if the kernel sent one.
    pub(super) fn set_attributes(
        &self,
        number: INodeNo,
        handle: Option<FileHandle>,
        change: AttributeChange,
    ) -> Result<FileAttr, Error> {
        let AttributeChange { mode, uid, gid, size, atime, mtime } = change;
        self.check_changeable()?;
        if let Some(size) = size {
            match handle.and_then(|handle| self.handle(handle).ok()).filter(|handle| handle.writable()) {
                Some(handle) => handle.set_size(size)?,
                None => self.open_number(number, true)?.set_size(size)?,
            }
        }
        if mode.is_some() || uid.is_some() || gid.is_some() || atime.is_some() || mtime.is_some() {
            let key = self.key(number).ok_or_else(|| io::Error::from_raw_os_error(libc::ESTALE))?;
            let image = self.engine.open_image(key);
            let opened = image.as_ref().and_then(|image| image.file().ok());
            let named;
            let file = match opened.as_ref().and_then(|opened| opened.host()) {
                // Its name may be gone.
                Some(file) => file.as_fd(),
                None => {
                    // The very file, not a link's target: another file may have got the name since the kernel looked it up.
                    named = self.engine.open_path(&self.path(number)?)?;
                    if key_of(&named)? != key {
                        return Err(io::Error::from_raw_os_error(libc::ESTALE).into());
                    }
                    named.as_fd()
                }
            };
            if let Some(image) = &image
                && (atime.is_some() || mtime.is_some())
            {
                // A later flush would change the times again.
                self.engine.cache().flush_range(image, 0..u64::MAX)?;
                image.forget_written_at();
            }
            self.engine.change_metadata(file, || {
                if let Some(mode) = mode {
                    rustix::fs::chmod(format!("/proc/self/fd/{}", file.as_raw_fd()), Mode::from_raw_mode(mode))?;
                }
                if uid.is_some() || gid.is_some() {
                    let uid = uid.map(rustix::fs::Uid::from_raw);
                    let gid = gid.map(rustix::fs::Gid::from_raw);
                    rustix::fs::chownat(file, "", uid, gid, AtFlags::EMPTY_PATH)?;
                }
                if atime.is_some() || mtime.is_some() {
                    let times = Timestamps { last_access: timespec(atime), last_modification: timespec(mtime) };
                    rustix::fs::utimensat(file, "", &times, AtFlags::EMPTY_PATH)?;
                }
                Ok(())
            })?;
        }
        Ok(self.attributes_of(number)?)
    }
}

fn attributes(number: u64, stat: &Stat) -> FileAttr {
    let time = |seconds: i64, nanoseconds: u64| match u64::try_from(seconds) {
        Ok(seconds) => UNIX_EPOCH + Duration::new(seconds, nanoseconds as u32),
        Err(_) => UNIX_EPOCH - Duration::from_secs(seconds.unsigned_abs()) + Duration::from_nanos(nanoseconds),
    };
    FileAttr {
        ino: INodeNo(number),
        size: stat.st_size as u64,
        blocks: stat.st_blocks as u64,
        atime: time(stat.st_atime, stat.st_atime_nsec),
        mtime: time(stat.st_mtime, stat.st_mtime_nsec),
        ctime: time(stat.st_ctime, stat.st_ctime_nsec),
        crtime: UNIX_EPOCH,
        kind: kind_of(rustix::fs::FileType::from_raw_mode(stat.st_mode)),
        perm: (stat.st_mode & 0o7777) as u16,
        nlink: stat.st_nlink as _,
        uid: stat.st_uid,
        gid: stat.st_gid,
        rdev: stat.st_rdev as u32,
        blksize: BLOCK_BYTES as u32,
        flags: 0,
    }
}

pub(super) fn kind_of(kind: rustix::fs::FileType) -> FileType {
    match kind {
        rustix::fs::FileType::Directory => FileType::Directory,
        rustix::fs::FileType::Symlink => FileType::Symlink,
        rustix::fs::FileType::Fifo => FileType::NamedPipe,
        rustix::fs::FileType::Socket => FileType::Socket,
        rustix::fs::FileType::CharacterDevice => FileType::CharDevice,
        rustix::fs::FileType::BlockDevice => FileType::BlockDevice,
        _ => FileType::RegularFile,
    }
}

fn timespec(time: Option<TimeOrNow>) -> Timespec {
    match time {
        None => Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT },
        Some(TimeOrNow::Now) => Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_NOW },
        Some(TimeOrNow::SpecificTime(time)) => match time.duration_since(UNIX_EPOCH) {
            Ok(after) => Timespec { tv_sec: after.as_secs() as i64, tv_nsec: after.subsec_nanos().into() },
            Err(before) => {
                let before = before.duration();
                let borrow = i64::from(before.subsec_nanos() > 0);
                let nanoseconds = (1_000_000_000 - i64::from(before.subsec_nanos())) % 1_000_000_000;
                Timespec { tv_sec: -(before.as_secs() as i64) - borrow, tv_nsec: nanoseconds }
            }
        },
    }
}
