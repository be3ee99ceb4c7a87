//! The classic transport: `fuser` reads requests from /dev/fuse, this file passes them on and answers.
//!
//! It also shakes hands with the kernel for both transports.

use super::attributes::AttributeChange;
use super::file_system::{CACHE_TIME, DiskFs, OPEN_FLAGS, REQUEST_BYTES_MAX};
use super::names::Caller;
use crate::error::Error;
use fuser::{
    Errno, FileHandle, Filesystem, FopenFlags, Generation, INodeNo, InitFlags, KernelConfig, LockOwner, OpenFlags,
    RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen,
    ReplyStatfs, ReplyWrite, Request, TimeOrNow, WriteFlags,
};
use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

/// The file system as `fuser` serves it.
pub(super) struct Classic {
    pub(super) fs: Arc<DiskFs>,
    /// In: whether to ask the kernel for rings. Out: whether it agreed.
    pub(super) ring: Arc<AtomicBool>,
}

fn errno(error: &io::Error) -> Errno {
    Errno::from_i32(error.raw_os_error().unwrap_or(libc::EIO))
}

/// The error number of a failed request on an image.
fn code(error: &Error) -> Errno {
    Errno::from_i32(error.errno())
}

fn caller(request: &Request) -> Caller {
    Caller { uid: request.uid(), gid: request.gid() }
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

impl Filesystem for Classic {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let wanted = [InitFlags::FUSE_ASYNC_DIO, InitFlags::FUSE_PARALLEL_DIROPS, InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP];
        for flag in wanted {
            // All are optional: an older kernel without one of them works, too.
            let _ = config.add_capabilities(flag);
        }
        let _ = config.set_max_write(REQUEST_BYTES_MAX);
        let _ = config.set_max_background(64);
        let wanted = self.ring.load(Ordering::Relaxed);
        self.ring.store(wanted && config.add_capabilities(InitFlags::FUSE_OVER_IO_URING).is_ok(), Ordering::Relaxed);
        Ok(())
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        answer!(self.fs.look_up(parent, name), reply, attr => reply.entry(&CACHE_TIME, &attr, Generation(0)));
    }

    fn forget(&self, _request: &Request, number: INodeNo, count: u64) {
        self.fs.forget_number(number.0, count);
    }

    fn getattr(&self, _request: &Request, number: INodeNo, _handle: Option<FileHandle>, reply: ReplyAttr) {
        answer!(self.fs.attributes_of(number), reply, attr => reply.attr(&CACHE_TIME, &attr));
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
        match self.fs.set_attributes(number, handle, change) {
            Ok(attr) => reply.attr(&CACHE_TIME, &attr),
            Err(error) => reply.error(code(&error)),
        }
    }

    fn readlink(&self, _request: &Request, number: INodeNo, reply: ReplyData) {
        answer!(self.fs.link_target(number), reply, target => reply.data(target.as_bytes()));
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
        let made = self.fs.make_file(caller(request), parent, name, mode, umask);
        answer!(made, reply, attr => reply.entry(&CACHE_TIME, &attr, Generation(0)));
    }

    fn mkdir(&self, request: &Request, parent: INodeNo, name: &OsStr, mode: u32, umask: u32, reply: ReplyEntry) {
        let made = self.fs.make_directory(caller(request), parent, name, mode & !umask);
        answer!(made, reply, attr => reply.entry(&CACHE_TIME, &attr, Generation(0)));
    }

    fn unlink(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        answer!(self.fs.remove(parent, name), reply, () => reply.ok());
    }

    fn rmdir(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        answer!(self.fs.remove_directory(parent, name), reply, () => reply.ok());
    }

    fn symlink(&self, request: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let made = self.fs.make_link(caller(request), parent, name, target);
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
        answer!(self.fs.rename_node((parent, name), (new_parent, new_name), flags), reply, () => reply.ok());
    }

    fn link(&self, _request: &Request, number: INodeNo, new_parent: INodeNo, new_name: &OsStr, reply: ReplyEntry) {
        let linked = self.fs.add_name(number, new_parent, new_name);
        answer!(linked, reply, attr => reply.entry(&CACHE_TIME, &attr, Generation(0)));
    }

    fn open(&self, _request: &Request, number: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        answer!(self.fs.open_image(number, flags.0), reply, handle => reply.opened(handle, OPEN_FLAGS));
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
        let created = self.fs.create_and_open(caller(request), parent, name, mode & !umask, flags);
        answer!(created, reply, (attr, handle) => reply.created(&CACHE_TIME, &attr, Generation(0), handle, OPEN_FLAGS));
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
        let mut buffer = self.fs.buffers.lock().pop().unwrap_or_default();
        let mut reply = Some(reply);
        // The kernel copies into pages that it holds already, so sending the reply waits for no other request.
        let answer = |bytes: &[u8]| {
            if let Some(reply) = reply.take() {
                reply.data(bytes);
            }
        };
        let result =
            self.fs.handle(handle).and_then(|handle| handle.read_with(offset, size as usize, &mut buffer, answer));
        self.fs.buffers.lock().push(buffer);
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
        let from_mapping = write_flags.contains(WriteFlags::FUSE_WRITE_CACHE);
        match self.fs.write(handle, offset, data, from_mapping, flags.0) {
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
        self.fs.close(handle);
        reply.ok();
    }

    fn fsync(&self, _request: &Request, _number: INodeNo, handle: FileHandle, data_only: bool, reply: ReplyEmpty) {
        match self.fs.sync(handle, data_only) {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(code(&error)),
        }
    }

    fn opendir(&self, _request: &Request, number: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        answer!(self.fs.open_directory(number), reply, handle => reply.opened(handle, FopenFlags::empty()));
    }

    fn readdir(
        &self,
        _request: &Request,
        _number: INodeNo,
        handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let Some(entries) = self.fs.entries(handle) else { return reply.error(Errno::EBADF) };
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
        self.fs.close_directory(handle);
        reply.ok();
    }

    fn fsyncdir(&self, _request: &Request, number: INodeNo, _handle: FileHandle, _data_only: bool, reply: ReplyEmpty) {
        answer!(self.fs.sync_directory(number), reply, () => reply.ok());
    }

    fn statfs(&self, _request: &Request, _number: INodeNo, reply: ReplyStatfs) {
        answer!(self.fs.stat_fs(), reply, s => reply.statfs(
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
        match self.fs.allocate(handle, offset, length, mode) {
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
        match self.fs.seek(handle, offset, whence) {
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
