//! Attributes: the host's, but for what the cache knows better.
//!
//! An open image may have grown, or been written to, or have lost its name; what the host says of it is corrected by
//! that. A change of attributes goes to the very file that the kernel means, never to another that has its name now.

use super::DiskFs;
use crate::engine::{key_of, stat};
use crate::error::Error;
use fuser::{FileAttr, FileHandle, FileType, INodeNo, TimeOrNow};
use rustix::fs::{AtFlags, Mode, Stat, Timespec, Timestamps};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, UNIX_EPOCH};

impl DiskFs {
    pub(super) fn stat_of(&self, number: INodeNo) -> io::Result<Stat> {
        // An open image may have lost its name.
        if let Some(image) = self.key(number).and_then(|key| self.engine.opened(key))
            && let Ok(file) = image.file()
            && let Some(file) = file.host()
        {
            return Ok(rustix::fs::fstat(file)?);
        }
        stat(self.engine.directory(), &self.path(number)?)
    }

    pub(super) fn attributes(&self, number: u64, stat: &Stat) -> FileAttr {
        let mut attr = attributes(number, stat);
        if let Some(image) = self.engine.opened((stat.st_dev, stat.st_ino)) {
            attr.size = image.size();
            // What is still on its way to the file has changed it all the same.
            attr.mtime = attr.mtime.max(image.written_at());
        }
        attr
    }

    #[allow(clippy::too_many_arguments, reason = "what the kernel sends")]
    pub(super) fn set_attributes(
        &self,
        number: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        handle: Option<FileHandle>,
    ) -> Result<FileAttr, Error> {
        self.check_changeable()?;
        if let Some(size) = size {
            match handle.and_then(|handle| self.handle(handle).ok()).filter(|handle| handle.writable()) {
                Some(handle) => handle.set_size(size)?,
                None => self.open_number(number, true)?.set_size(size)?,
            }
        }
        if mode.is_some() || uid.is_some() || gid.is_some() || atime.is_some() || mtime.is_some() {
            let key = self.key(number).ok_or_else(|| io::Error::from_raw_os_error(libc::ESTALE))?;
            let image = self.engine.opened(key);
            let opened = image.as_ref().and_then(|image| image.file().ok());
            let named;
            let file = match opened.as_ref().and_then(|opened| opened.host()) {
                // It may have no name any more.
                Some(file) => file.as_fd(),
                None => {
                    // The very file, and no link: its name may be another's since the kernel looked it up.
                    named = self.engine.named(&self.path(number)?)?;
                    if key_of(&named)? != key {
                        return Err(io::Error::from_raw_os_error(libc::ESTALE).into());
                    }
                    named.as_fd()
                }
            };
            if let Some(image) = &image
                && (atime.is_some() || mtime.is_some())
            {
                // A flush after this would move the times again.
                self.engine.cache().flush_range(image, 0..u64::MAX)?;
                image.forget_written_at();
            }
            self.engine.change(file, || {
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
        let stat = self.stat_of(number)?;
        Ok(self.attributes(number.0, &stat))
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
        blksize: crate::BLOCK_BYTES as u32,
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
