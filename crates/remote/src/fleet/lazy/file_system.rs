//! The file system that shows an image's objects by their digests: `ab/cdef…`.
//!
//! Names and sizes are known from the start. Opening an object waits until it is here; a thread that answers the kernel
//! never does. The kernel then reads the object's own file (FUSE passthrough); where it cannot, this process reads it.

use super::objects::{Failure, Objects};
use fuser::{
    BackingId, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, InitFlags,
    KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen,
    Request,
};
use pagefold_image::digest::Digest;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, UNIX_EPOCH};

/// Nothing here ever changes.
const FOREVER: Duration = Duration::from_secs(1 << 30);

/// The number of directory `00`; the other directories follow.
const DIRECTORIES: u64 = 2;

/// The number of the first object.
const OBJECTS: u64 = DIRECTORIES + 256;

/// A file that the kernel has open.
enum Handle {
    /// The kernel reads the object itself.
    Passed(#[expect(dead_code, reason = "held until the kernel lets go")] Arc<BackingId>),
    /// This process reads it.
    Read(Arc<File>),
}

/// What the kernel has open.
#[derive(Default)]
struct OpenFiles {
    handles: HashMap<u64, Handle>,
    /// The name that the kernel has for each object that it reads itself: one for all open files of the object.
    passed: HashMap<usize, Weak<BackingId>>,
    last: u64,
}

/// What [`ObjectFs`] and the replies that wait have in common.
#[derive(Default)]
struct Shared {
    open: Mutex<OpenFiles>,
    /// Whether the kernel can read objects itself.
    passes: AtomicBool,
}

/// The file system.
pub struct ObjectFs {
    objects: Arc<Objects>,
    shared: Arc<Shared>,
}

impl ObjectFs {
    pub fn new(objects: Arc<Objects>) -> Self {
        Self { objects, shared: Arc::default() }
    }

    /// The number of the file `name` in directory `parent`.
    fn number(&self, parent: INodeNo, name: &OsStr) -> Option<u64> {
        let name = name.as_bytes();
        let byte = |name: &[u8]| u64::from_str_radix(std::str::from_utf8(name).ok()?, 16).ok();
        if parent == INodeNo::ROOT {
            return byte(name).filter(|_| name.len() == 2).map(|byte| DIRECTORIES + byte);
        }
        let first = parent.0.checked_sub(DIRECTORIES).filter(|byte| *byte < 256)?;
        let hex = [format!("{first:02x}").as_bytes(), name].concat();
        Some(OBJECTS + self.objects.number(&Digest::from_hex(&hex)?)? as u64)
    }

    fn attributes(&self, number: INodeNo) -> Option<FileAttr> {
        let (kind, size) = match number.0.checked_sub(OBJECTS) {
            Some(object) => (FileType::RegularFile, self.objects.size(usize::try_from(object).ok()?)?),
            None if number.0 >= INodeNo::ROOT.0 => (FileType::Directory, 0),
            None => return None,
        };
        Some(FileAttr {
            ino: number,
            size,
            blocks: size.div_ceil(512),
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind,
            perm: if kind == FileType::Directory { 0o500 } else { 0o400 },
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }
}

impl Shared {
    fn open_files(&self) -> MutexGuard<'_, OpenFiles> {
        self.open.lock().expect("no panic while held")
    }

    /// Answers an open of `object`: its file is here.
    fn opened(&self, object: usize, file: File, reply: ReplyOpen) {
        let mut open = self.open_files();
        open.last += 1;
        let handle = open.last;
        if self.passes.load(Ordering::Relaxed) {
            let known = open.passed.get(&object).and_then(Weak::upgrade);
            let passed = known.map_or_else(|| reply.open_backing(&file).map(Arc::new), Ok);
            if let Ok(passed) = passed {
                open.passed.insert(object, Arc::downgrade(&passed));
                open.handles.insert(handle, Handle::Passed(passed.clone()));
                drop(open);
                return reply.opened_passthrough(FileHandle(handle), FopenFlags::empty(), &passed);
            }
            // A store on a file system of several layers: none of its files can be passed on.
            self.passes.store(false, Ordering::Relaxed);
        }
        open.handles.insert(handle, Handle::Read(Arc::new(file)));
        drop(open);
        reply.opened(FileHandle(handle), FopenFlags::FOPEN_KEEP_CACHE);
    }
}

impl Filesystem for ObjectFs {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let passes =
            config.add_capabilities(InitFlags::FUSE_PASSTHROUGH).is_ok() && config.set_max_stack_depth(1).is_ok();
        self.shared.passes.store(passes, Ordering::Relaxed);
        // Optional: an older kernel without it looks names up one after the other.
        let _ = config.add_capabilities(InitFlags::FUSE_PARALLEL_DIROPS);
        Ok(())
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.number(parent, name).and_then(|number| self.attributes(INodeNo(number))) {
            Some(attributes) => reply.entry(&FOREVER, &attributes, Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _request: &Request, number: INodeNo, _handle: Option<FileHandle>, reply: ReplyAttr) {
        match self.attributes(number) {
            Some(attributes) => reply.attr(&FOREVER, &attributes),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn open(&self, _request: &Request, number: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        if flags.0 & libc::O_ACCMODE != libc::O_RDONLY {
            return reply.error(Errno::EROFS);
        }
        let Some(object) = number.0.checked_sub(OBJECTS).and_then(|object| usize::try_from(object).ok()) else {
            return reply.error(Errno::EISDIR);
        };
        let shared = self.shared.clone();
        self.objects.open(object, move |opened| match opened {
            Ok(file) => shared.opened(object, file, reply),
            Err(Failure::Full) => reply.error(Errno::ENOSPC),
            Err(Failure::Lost) => reply.error(Errno::EIO),
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
        _owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let file = match self.shared.open_files().handles.get(&handle.0) {
            Some(Handle::Read(file)) => file.clone(),
            _ => return reply.error(Errno::EBADF),
        };
        let mut bytes = vec![0; size as usize];
        match pagefold_os::fill::fill(&mut bytes, |rest, done| file.read_at(rest, offset + done as u64)) {
            Ok(count) => reply.data(&bytes[..count]),
            Err(error) => reply.error(error.into()),
        }
    }

    fn release(
        &self,
        _request: &Request,
        _number: INodeNo,
        handle: FileHandle,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        let closed = self.shared.open_files().handles.remove(&handle.0);
        drop(closed);
        reply.ok();
    }

    fn readdir(&self, _request: &Request, _number: INodeNo, _handle: FileHandle, _offset: u64, reply: ReplyDirectory) {
        reply.ok();
    }
}
