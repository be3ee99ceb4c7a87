//! The kernel's requests: each is decoded, passed on and answered.

use super::attributes::AttributeChange;
use super::file_system::DiskFs;
use super::nodes::{Node, ROOT};
use crate::error::Error;
use crate::file::open_beneath;
use fuser::{
    Errno, FileHandle, Filesystem, FopenFlags, Generation, INodeNo, InitFlags, KernelConfig, LockOwner, OpenFlags,
    RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen,
    ReplyStatfs, ReplyWrite, Request, TimeOrNow, WriteFlags,
};
use rustix::fs::{AtFlags, Mode, OFlags};
use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

/// How long the kernel may cache names and attributes. It sees changes through the mount immediately, and changes in the
/// directory itself at most this much later.
const CACHE_TIME: Duration = Duration::from_secs(1);
/// Largest request: the kernel's default limit for FUSE.
const REQUEST_BYTES_MAX: u32 = 1 << 20;

fn errno(error: &io::Error) -> Errno {
    Errno::from_i32(error.raw_os_error().unwrap_or(libc::EIO))
}

/// The error number of a failed request on an image.
fn code(error: &Error) -> Errno {
    Errno::from_i32(error.errno())
}

/// Evaluates `$ok` with the result's value, or replies with the error.
macro_rules! answer {
    ($result:expr, $reply:ident, $value:pat => $ok:expr) => {
        match $result {
            Ok($value) => $ok,
            Err(error) => $reply.error(errno(&error)),
        }
    };
}

impl Filesystem for DiskFs {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let wanted = [InitFlags::FUSE_ASYNC_DIO, InitFlags::FUSE_PARALLEL_DIROPS, InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP];
        for flag in wanted {
            // All are optional: an older kernel without one of them works, too.
            let _ = config.add_capabilities(flag);
        }
        let _ = config.set_max_write(REQUEST_BYTES_MAX);
        let _ = config.set_max_background(64);
        let mut nodes = self.nodes.write();
        let key = nodes.root;
        nodes.number(key);
        nodes.by_number.insert(ROOT, Node { names: Vec::new(), key, lookups: u64::MAX / 2 });
        Ok(())
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        answer!(self.look_up(parent, name), reply, attr => reply.entry(&CACHE_TIME, &attr, Generation(0)));
    }

    fn forget(&self, _request: &Request, number: INodeNo, count: u64) {
        self.forget_number(number.0, count);
    }

    fn getattr(&self, _request: &Request, number: INodeNo, _handle: Option<FileHandle>, reply: ReplyAttr) {
        let attr = self.stat_of(number).map(|stat| self.attributes(number.0, &stat));
        answer!(attr, reply, attr => reply.attr(&CACHE_TIME, &attr));
    }

    fn setattr(
        &self,
        _request: &Request,
        number: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        handle: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<fuser::BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let change = AttributeChange { mode, uid, gid, size, atime, mtime };
        match self.set_attributes(number, handle, change) {
            Ok(attr) => reply.attr(&CACHE_TIME, &attr),
            Err(error) => reply.error(code(&error)),
        }
    }

    fn readlink(&self, _request: &Request, number: INodeNo, reply: ReplyData) {
        let target = self.path(number).and_then(|path| {
            let entry = self.engine.entry_name(&path)?;
            Ok(rustix::fs::readlinkat(entry.parent(), entry.name, Vec::new())?)
        });
        answer!(target, reply, target => reply.data(target.as_bytes()));
    }

    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        _rdev: u32,
        reply: ReplyEntry,
    ) {
        if mode & libc::S_IFMT != libc::S_IFREG && mode & libc::S_IFMT != 0 {
            return reply.error(Errno::EPERM);
        }
        let made = self.create_file(request, parent, name, mode & 0o7777 & !umask, libc::O_EXCL);
        answer!(made.and_then(|_| self.look_up(parent, name)), reply, attr => reply.entry(&CACHE_TIME, &attr, Generation(0)));
    }

    fn mkdir(&self, request: &Request, parent: INodeNo, name: &OsStr, mode: u32, umask: u32, reply: ReplyEntry) {
        let made = self.check_changeable().and_then(|()| self.child(parent, name)).and_then(|path| {
            let entry = self.engine.entry_name(&path)?;
            rustix::fs::mkdirat(entry.parent(), entry.name, Mode::from_raw_mode(mode & 0o7777 & !umask))?;
            self.set_owner(request, &entry)?;
            self.look_up(parent, name)
        });
        answer!(made, reply, attr => reply.entry(&CACHE_TIME, &attr, Generation(0)));
    }

    fn unlink(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        answer!(self.remove(parent, name), reply, () => reply.ok());
    }

    fn rmdir(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let removed = self.check_changeable().and_then(|()| self.child(parent, name)).and_then(|path| {
            let entry = self.engine.entry_name(&path)?;
            Ok(rustix::fs::unlinkat(entry.parent(), entry.name, AtFlags::REMOVEDIR)?)
        });
        answer!(removed, reply, () => reply.ok());
    }

    fn symlink(&self, request: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let made = self.check_changeable().and_then(|()| self.child(parent, name)).and_then(|path| {
            let entry = self.engine.entry_name(&path)?;
            rustix::fs::symlinkat(target, entry.parent(), entry.name)?;
            self.set_owner(request, &entry)?;
            self.look_up(parent, name)
        });
        answer!(made, reply, attr => reply.entry(&CACHE_TIME, &attr, Generation(0)));
    }

    fn rename(
        &self,
        _request: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        answer!(self.rename_node((parent, name), (new_parent, new_name), flags), reply, () => reply.ok());
    }

    fn link(&self, _request: &Request, number: INodeNo, new_parent: INodeNo, new_name: &OsStr, reply: ReplyEntry) {
        let linked = self.check_changeable().and_then(|()| {
            let (from, to) = (self.path(number)?, self.child(new_parent, new_name)?);
            let (old, new) = (self.engine.entry_name(&from)?, self.engine.entry_name(&to)?);
            self.engine.change_metadata(self.engine.open_path(&from)?, || {
                Ok(rustix::fs::linkat(old.parent(), old.name, new.parent(), new.name, AtFlags::empty())?)
            })?;
            self.look_up(new_parent, new_name)
        });
        answer!(linked, reply, attr => reply.entry(&CACHE_TIME, &attr, Generation(0)));
    }

    fn open(&self, _request: &Request, number: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let writable = flags.0 & libc::O_ACCMODE != libc::O_RDONLY;
        let opened = self.open_number(number, writable);
        answer!(opened, reply, handle => reply.opened(self.register(handle), open_flags()));
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let created = self.create_file(request, parent, name, mode & 0o7777 & !umask, flags).and_then(|made| {
            let (path, writable) = (self.child(parent, name)?, flags & libc::O_ACCMODE != libc::O_RDONLY);
            let handle = match made {
                Some(file) => self.engine.open_file(&path, file, writable)?,
                None => self.engine.open(&path, writable)?,
            };
            Ok((self.look_up(parent, name)?, handle))
        });
        answer!(created, reply, (attr, handle) => {
            reply.created(&CACHE_TIME, &attr, Generation(0), self.register(handle), open_flags());
        });
    }

    fn read(
        &self,
        _request: &Request,
        _number: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let mut buffer = self.buffers.lock().pop().unwrap_or_default();
        let mut reply = Some(reply);
        // The kernel copies into pages that it holds already, so sending the reply waits for no other request.
        let answer = |bytes: &[u8]| {
            if let Some(reply) = reply.take() {
                reply.data(bytes);
            }
        };
        let result =
            self.handle(handle).and_then(|handle| handle.read_with(offset, size as usize, &mut buffer, answer));
        self.buffers.lock().push(buffer);
        if let Err(error) = result
            && let Some(reply) = reply
        {
            reply.error(code(&error));
        }
    }

    fn write(
        &self,
        _request: &Request,
        _number: INodeNo,
        handle: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let written = self.handle(handle).and_then(|handle| {
            if write_flags.contains(WriteFlags::FUSE_WRITE_CACHE) {
                // From a shared mapping: the kernel may send the write with any handle of the file.
                self.engine.cache().write(handle.image(), offset, data)?;
            } else {
                handle.write(offset, data)?;
            }
            if flags.0 & libc::O_DSYNC != 0 {
                // O_SYNC is O_DSYNC with one more bit.
                let attributes = flags.0 & libc::O_SYNC == libc::O_SYNC;
                handle.sync_range(offset..offset + data.len() as u64, attributes)?;
            }
            Ok(())
        });
        match written {
            Ok(()) => reply.written(data.len() as u32),
            Err(error) => reply.error(code(&error)),
        }
    }

    fn flush(
        &self,
        _request: &Request,
        _number: INodeNo,
        _handle: FileHandle,
        _lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        // As on any local file system, close does not sync; errors are reported by the next sync.
        reply.ok();
    }

    fn release(
        &self,
        _request: &Request,
        _number: INodeNo,
        handle: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        let closed = self.handles.write().remove(&handle.0);
        drop(closed);
        reply.ok();
    }

    fn fsync(&self, _request: &Request, _number: INodeNo, handle: FileHandle, data_only: bool, reply: ReplyEmpty) {
        match self.handle(handle).and_then(|handle| Ok(handle.sync_range(0..u64::MAX, !data_only)?)) {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(code(&error)),
        }
    }

    fn opendir(&self, _request: &Request, number: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        answer!(self.list(number), reply, entries => {
            let handle = self.next_handle.fetch_add(1, Ordering::Relaxed);
            self.directories.write().insert(handle, Arc::new(entries));
            reply.opened(FileHandle(handle), FopenFlags::empty());
        });
    }

    fn readdir(
        &self,
        _request: &Request,
        _number: INodeNo,
        handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let Some(entries) = self.directories.read().get(&handle.0).cloned() else {
            return reply.error(Errno::EBADF);
        };
        for (at, entry) in entries.iter().enumerate().skip(usize::try_from(offset).unwrap_or(usize::MAX)) {
            if reply.add(INodeNo(entry.number), at as u64 + 1, entry.kind, &entry.name) {
                break;
            }
        }
        reply.ok();
    }

    fn releasedir(
        &self,
        _request: &Request,
        _number: INodeNo,
        handle: FileHandle,
        _flags: OpenFlags,
        reply: ReplyEmpty,
    ) {
        self.directories.write().remove(&handle.0);
        reply.ok();
    }

    fn fsyncdir(&self, _request: &Request, number: INodeNo, _handle: FileHandle, _data_only: bool, reply: ReplyEmpty) {
        let synced = self.path(number).and_then(|path| {
            let directory = open_beneath(self.engine.directory(), &path, OFlags::DIRECTORY | OFlags::RDONLY)?;
            Ok(rustix::fs::fsync(directory)?)
        });
        answer!(synced, reply, () => reply.ok());
    }

    fn statfs(&self, _request: &Request, _number: INodeNo, reply: ReplyStatfs) {
        let stat = rustix::fs::fstatvfs(self.engine.directory()).map_err(io::Error::from);
        answer!(stat, reply, s => reply.statfs(
            s.f_blocks, s.f_bfree, s.f_bavail, s.f_files, s.f_ffree, s.f_bsize as u32, s.f_namemax as u32, s.f_frsize as u32,
        ));
    }

    fn fallocate(
        &self,
        _request: &Request,
        _number: INodeNo,
        handle: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let keep_size = mode & libc::FALLOC_FL_KEEP_SIZE != 0;
        let result = self.handle(handle).and_then(|handle| match mode & !libc::FALLOC_FL_KEEP_SIZE {
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
        });
        match result {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(code(&error)),
        }
    }

    fn lseek(
        &self,
        _request: &Request,
        _number: INodeNo,
        handle: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let result = self.handle(handle).and_then(|handle| match (u64::try_from(offset), whence) {
            (Ok(offset), libc::SEEK_DATA) => handle.seek(offset, true),
            (Ok(offset), libc::SEEK_HOLE) => handle.seek(offset, false),
            (Err(_), _) => Err(io::Error::from_raw_os_error(libc::ENXIO).into()),
            _ => Err(io::Error::from_raw_os_error(libc::EINVAL).into()),
        });
        match result {
            Ok(offset) => reply.offset(offset as i64),
            Err(error) => reply.error(code(&error)),
        }
    }

    // Not implemented: after ENOSYS the kernel no longer sends these requests.

    fn getxattr(&self, _request: &Request, _number: INodeNo, _name: &OsStr, _size: u32, reply: fuser::ReplyXattr) {
        reply.error(Errno::ENOSYS);
    }

    fn listxattr(&self, _request: &Request, _number: INodeNo, _size: u32, reply: fuser::ReplyXattr) {
        reply.error(Errno::ENOSYS);
    }

    fn copy_file_range(
        &self,
        _request: &Request,
        _ino_in: INodeNo,
        _fh_in: FileHandle,
        _offset_in: u64,
        _ino_out: INodeNo,
        _fh_out: FileHandle,
        _offset_out: u64,
        _len: u64,
        _flags: fuser::CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        reply.error(Errno::ENOSYS);
    }
}

fn open_flags() -> FopenFlags {
    FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES
}
