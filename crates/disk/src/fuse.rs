//! The FUSE front end: the directory's files under their own names, read and written through the cache.
//!
//! Data goes with direct I/O, so the kernel keeps no copy of its own; names and attributes are the host's. A file
//! that is open is found by its inode even when its name is gone. Locks are the kernel's: it keeps them per mount.

use crate::engine::{Engine, FileKey, Handle, stat};
use crate::error::Error;
use crate::file::{HostFile, Place, open_beneath};
use fuser::{
    Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, InitFlags, KernelConfig,
    LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry,
    ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, Request, TimeOrNow, WriteFlags,
};
use parking_lot::{Mutex, RwLock};
use rustix::fs::{AtFlags, Mode, OFlags, Stat, Timespec, Timestamps};
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// How long the kernel may believe names and attributes. Changes through the mount are seen at once; this bounds
/// how late changes made in the directory itself are.
const BELIEVE: Duration = Duration::from_secs(1);
/// Largest request: the kernel's own limit for FUSE by default.
const REQUEST_BYTES_MAX: u32 = 1 << 20;

/// A file the kernel holds on to.
struct Node {
    /// Parent and name; with hard links several, the one looked up last at the end.
    names: Vec<(u64, OsString)>,
    key: FileKey,
    lookups: u64,
}

impl Node {
    fn gain(&mut self, parent: INodeNo, name: &OsStr) {
        self.lose(parent, name);
        self.names.push((parent.0, name.to_owned()));
    }

    fn lose(&mut self, parent: INodeNo, name: &OsStr) {
        self.names.retain(|(at, own)| (*at, &**own) != (parent.0, name));
    }
}

/// The names the kernel knows, by node number.
struct Nodes {
    by_number: HashMap<u64, Node>,
    by_key: HashMap<FileKey, u64>,
    /// For files of other devices, whose inode numbers may collide with ours.
    next_foreign: u64,
    root: FileKey,
}

const ROOT: u64 = 1;
const FOREIGN: u64 = 1 << 62;

impl Nodes {
    fn number(&mut self, key: FileKey) -> u64 {
        if let Some(&number) = self.by_key.get(&key) {
            return number;
        }
        let number = if key == self.root {
            ROOT
        } else if key.0 == self.root.0 && key.1 > ROOT && key.1 < FOREIGN {
            key.1
        } else {
            self.next_foreign += 1;
            FOREIGN + self.next_foreign
        };
        self.by_key.insert(key, number);
        number
    }

    fn path(&self, number: u64) -> Option<PathBuf> {
        let mut names = Vec::new();
        let mut at = number;
        while at != ROOT {
            let (parent, name) = self.by_number.get(&at)?.names.last()?;
            names.push(name);
            at = *parent;
            if names.len() > 4096 {
                return None;
            }
        }
        let path: PathBuf = names.into_iter().rev().collect();
        Some(if path.as_os_str().is_empty() { PathBuf::from(".") } else { path })
    }
}

/// One entry of a directory, as read when it was opened.
struct DirEntry {
    number: u64,
    kind: FileType,
    name: OsString,
}

/// The file system.
pub struct DiskFs {
    engine: Arc<Engine>,
    nodes: RwLock<Nodes>,
    handles: RwLock<HashMap<u64, Arc<Handle>>>,
    directories: RwLock<HashMap<u64, Arc<Vec<DirEntry>>>>,
    next_handle: AtomicU64,
    /// Buffers for read replies, which the kernel takes in one piece. The one used last is used next, by whichever
    /// worker: it is the one that lies in the processor's cache.
    buffers: Mutex<Vec<Vec<u8>>>,
    is_root: bool,
}

impl DiskFs {
    /// Makes the file system of `engine`'s directory.
    ///
    /// # Errors
    /// The directory cannot be looked at.
    pub fn new(engine: Arc<Engine>) -> io::Result<Self> {
        let root = rustix::fs::fstat(engine.directory())?;
        let root = (root.st_dev, root.st_ino);
        let nodes = Nodes { by_number: HashMap::new(), by_key: HashMap::new(), next_foreign: 0, root };
        Ok(Self {
            engine,
            nodes: RwLock::new(nodes),
            handles: RwLock::default(),
            directories: RwLock::default(),
            next_handle: AtomicU64::new(1),
            buffers: Mutex::default(),
            is_root: rustix::process::geteuid().is_root(),
        })
    }

    fn path(&self, number: INodeNo) -> io::Result<PathBuf> {
        self.nodes.read().path(number.0).ok_or_else(|| io::Error::from_raw_os_error(libc::ESTALE))
    }

    fn child(&self, parent: INodeNo, name: &OsStr) -> io::Result<PathBuf> {
        // No `./name` for the root's: images are known by their paths.
        Ok(if parent.0 == ROOT { PathBuf::from(name) } else { self.path(parent)?.join(name) })
    }

    fn key(&self, number: INodeNo) -> Option<FileKey> {
        self.nodes.read().by_number.get(&number.0).map(|node| node.key)
    }

    fn handle(&self, number: FileHandle) -> Result<Arc<Handle>, Error> {
        let handle = self.handles.read().get(&number.0).cloned();
        handle.ok_or_else(|| io::Error::from_raw_os_error(libc::EBADF).into())
    }

    fn keep(&self, handle: Handle) -> FileHandle {
        let number = self.next_handle.fetch_add(1, Ordering::Relaxed);
        self.handles.write().insert(number, Arc::new(handle));
        FileHandle(number)
    }

    /// Enters a name the kernel asked for; it keeps it until it says forget.
    fn enter(&self, parent: INodeNo, name: &OsStr) -> io::Result<FileAttr> {
        let path = self.child(parent, name)?;
        let stat = stat(self.engine.directory(), &path)?;
        let key = (stat.st_dev, stat.st_ino);
        let mut nodes = self.nodes.write();
        let number = nodes.number(key);
        let node = nodes.by_number.entry(number).or_insert_with(|| Node { names: Vec::new(), key, lookups: 0 });
        node.key = key;
        node.gain(parent, name);
        node.lookups += 1;
        drop(nodes);
        Ok(self.attributes(number, &stat))
    }

    fn forget_number(&self, number: u64, count: u64) {
        let mut nodes = self.nodes.write();
        if let Some(node) = nodes.by_number.get_mut(&number) {
            node.lookups = node.lookups.saturating_sub(count);
            if node.lookups == 0 {
                let key = node.key;
                nodes.by_number.remove(&number);
                nodes.by_key.remove(&key);
            }
        }
    }

    fn stat_of(&self, number: INodeNo) -> io::Result<Stat> {
        // An open image may have lost its name.
        if let Some(image) = self.key(number).and_then(|key| self.engine.opened(key))
            && let Ok(file) = image.file()
            && let Some(stat) = file.stat()
        {
            return stat;
        }
        stat(self.engine.directory(), &self.path(number)?)
    }

    fn attributes(&self, number: u64, stat: &Stat) -> FileAttr {
        let mut attr = attributes(number, stat);
        if let Some(image) = self.engine.opened((stat.st_dev, stat.st_ino)) {
            attr.size = image.size();
            // What is still on its way to the file has changed it all the same.
            attr.mtime = attr.mtime.max(image.written_at());
        }
        attr
    }

    fn list(&self, number: INodeNo) -> io::Result<Vec<DirEntry>> {
        let path = self.path(number)?;
        let directory = open_beneath(self.engine.directory(), &path, OFlags::DIRECTORY | OFlags::RDONLY)?;
        let mut entries = Vec::new();
        for entry in rustix::fs::Dir::new(directory)? {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            entries.push(DirEntry {
                number: entry.ino().max(ROOT + 1),
                kind: kind_of(entry.file_type()),
                name: std::os::unix::ffi::OsStringExt::from_vec(name.to_vec()),
            });
        }
        Ok(entries)
    }

    /// Who a new file is given to, where we may.
    fn maker(&self, request: &Request) -> Option<(rustix::fs::Uid, rustix::fs::Gid)> {
        let (uid, gid) = (request.uid(), request.gid());
        let wanted = self.is_root && (uid, gid) != (0, 0);
        wanted.then(|| (rustix::fs::Uid::from_raw(uid), rustix::fs::Gid::from_raw(gid)))
    }

    fn give_to(&self, request: &Request, place: &Place<'_>) -> io::Result<()> {
        if let Some((uid, gid)) = self.maker(request) {
            rustix::fs::chownat(place.parent(), place.name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
        }
        Ok(())
    }

    fn check_changeable(&self) -> io::Result<()> {
        if self.engine.read_only() { Err(io::Error::from_raw_os_error(libc::EROFS)) } else { Ok(()) }
    }

    #[allow(clippy::too_many_arguments, reason = "what the kernel sends")]
    fn set_attributes(
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
        let directory = self.engine.directory();
        if let Some(size) = size {
            match handle.and_then(|handle| self.handle(handle).ok()).filter(|handle| handle.writable()) {
                Some(handle) => handle.set_size(size)?,
                None => self.engine.open(&self.path(number)?, true)?.set_size(size)?,
            }
        }
        if mode.is_some() || uid.is_some() || gid.is_some() || atime.is_some() || mtime.is_some() {
            // The very file, and no link: its name may be another's since the kernel looked it up.
            let open = open_beneath(directory, &self.path(number)?, OFlags::PATH | OFlags::NOFOLLOW);
            let file = open.map_err(io::Error::from)?;
            let stat = rustix::fs::fstat(&file).map_err(io::Error::from)?;
            let key = (stat.st_dev, stat.st_ino);
            if self.key(number) != Some(key) {
                return Err(io::Error::from_raw_os_error(libc::ESTALE).into());
            }
            let image = self.engine.opened(key);
            if let Some(image) = &image
                && (atime.is_some() || mtime.is_some())
            {
                // A flush after this would move the times again.
                self.engine.cache().flush_range(image, 0..u64::MAX)?;
                image.forget_written_at();
            }
            self.engine.change(key, || {
                if let Some(mode) = mode {
                    rustix::fs::chmod(format!("/proc/self/fd/{}", file.as_raw_fd()), Mode::from_raw_mode(mode))?;
                }
                if uid.is_some() || gid.is_some() {
                    let uid = uid.map(rustix::fs::Uid::from_raw);
                    let gid = gid.map(rustix::fs::Gid::from_raw);
                    rustix::fs::chownat(&file, "", uid, gid, AtFlags::EMPTY_PATH)?;
                }
                if atime.is_some() || mtime.is_some() {
                    let times = Timestamps { last_access: timespec(atime), last_modification: timespec(mtime) };
                    rustix::fs::utimensat(&file, "", &times, AtFlags::EMPTY_PATH)?;
                }
                Ok(())
            })?;
        }
        let stat = self.stat_of(number)?;
        Ok(self.attributes(number.0, &stat))
    }

    fn rename_node(
        &self,
        (parent, name): (INodeNo, &OsStr),
        (new_parent, new_name): (INodeNo, &OsStr),
        flags: RenameFlags,
    ) -> io::Result<()> {
        self.check_changeable()?;
        let directory = self.engine.directory();
        let from = self.child(parent, name)?;
        let to = self.child(new_parent, new_name)?;
        let source = stat(directory, &from)?;
        let target = stat(directory, &to).ok();
        let host_flags = rustix::fs::RenameFlags::from_bits_retain(flags.bits());
        let source_key = (source.st_dev, source.st_ino);
        let (old, new) = (self.engine.place(&from)?, self.engine.place(&to)?);
        self.engine.change(source_key, || {
            Ok(rustix::fs::renameat_with(old.parent(), old.name, new.parent(), new.name, host_flags)?)
        })?;
        let mut nodes = self.nodes.write();
        let mut moved = |key: FileKey, from: (INodeNo, &OsStr), to: (INodeNo, &OsStr)| {
            let number = nodes.by_key.get(&key).copied();
            if let Some(node) = number.and_then(|number| nodes.by_number.get_mut(&number)) {
                node.lose(from.0, from.1);
                node.gain(to.0, to.1);
            }
        };
        let exchanged = flags.contains(RenameFlags::RENAME_EXCHANGE);
        let target_key = target.as_ref().map(|target| (target.st_dev, target.st_ino));
        // Two names of one file stay as they are.
        if target_key != Some(source_key) {
            moved(source_key, (parent, name), (new_parent, new_name));
            if let (true, Some(key)) = (exchanged, target_key) {
                moved(key, (new_parent, new_name), (parent, name));
            }
            // What was replaced has that name no more, though it may be open still.
            let number = target_key.filter(|_| !exchanged).and_then(|key| nodes.by_key.get(&key).copied());
            if let Some(node) = number.and_then(|number| nodes.by_number.get_mut(&number)) {
                node.lose(new_parent, new_name);
            }
        }
        drop(nodes);
        if let Some(image) = self.engine.opened(source_key) {
            image.set_name(&to.to_string_lossy());
        }
        if let (false, Some(target)) = (exchanged, target)
            && target.st_nlink == 1
            && (target.st_dev, target.st_ino) != source_key
        {
            self.engine.unlinked((target.st_dev, target.st_ino));
        }
        Ok(())
    }

    fn remove(&self, parent: INodeNo, name: &OsStr) -> io::Result<()> {
        self.check_changeable()?;
        let path = self.child(parent, name)?;
        let stat = stat(self.engine.directory(), &path)?;
        let key = (stat.st_dev, stat.st_ino);
        let place = self.engine.place(&path)?;
        self.engine.change(key, || Ok(rustix::fs::unlinkat(place.parent(), place.name, AtFlags::empty())?))?;
        if stat.st_nlink <= 1 {
            self.engine.unlinked(key);
        }
        let mut nodes = self.nodes.write();
        let number = nodes.by_key.get(&key).copied();
        if let Some(node) = number.and_then(|number| nodes.by_number.get_mut(&number)) {
            node.lose(parent, name);
        }
        Ok(())
    }

    /// Makes a file and opens it; `None` where it is there already and need not be new.
    fn make(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        flags: i32,
    ) -> io::Result<Option<HostFile>> {
        self.check_changeable()?;
        let path = self.child(parent, name)?;
        let place = self.engine.place(&path)?;
        let open = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        // Its maker may write through the open file whatever the mode, and so must we: it is opened twice.
        let file = match rustix::fs::openat(place.parent(), place.name, open, Mode::from_raw_mode(mode | 0o600)) {
            Err(rustix::io::Errno::EXIST) if flags & libc::O_EXCL == 0 => return Ok(None),
            other => HostFile::new(other?.into(), true)?,
        };
        if let Some((uid, gid)) = self.maker(request) {
            rustix::fs::fchown(file.file(), Some(uid), Some(gid))?;
        }
        // Another owner costs the set-user bit.
        if mode & 0o6600 != 0o600 {
            rustix::fs::fchmod(file.file(), Mode::from_raw_mode(mode))?;
        }
        Ok(Some(file))
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
        nlink: stat.st_nlink as u32,
        uid: stat.st_uid,
        gid: stat.st_gid,
        rdev: stat.st_rdev as u32,
        blksize: crate::BLOCK_BYTES as u32,
        flags: 0,
    }
}

fn kind_of(kind: rustix::fs::FileType) -> FileType {
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

fn errno(error: &io::Error) -> Errno {
    Errno::from_i32(error.raw_os_error().unwrap_or(libc::EIO))
}

/// The error number of a failed request on an image.
fn code(error: &Error) -> Errno {
    Errno::from_i32(error.errno())
}

/// Answers with `$reply.$ok(..)`, or with the error.
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
            // Each is a convenience: an older kernel without it serves as well.
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
        answer!(self.enter(parent, name), reply, attr => reply.entry(&BELIEVE, &attr, Generation(0)));
    }

    fn forget(&self, _request: &Request, number: INodeNo, count: u64) {
        self.forget_number(number.0, count);
    }

    fn getattr(&self, _request: &Request, number: INodeNo, _handle: Option<FileHandle>, reply: ReplyAttr) {
        let attr = self.stat_of(number).map(|stat| self.attributes(number.0, &stat));
        answer!(attr, reply, attr => reply.attr(&BELIEVE, &attr));
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
        match self.set_attributes(number, mode, uid, gid, size, atime, mtime, handle) {
            Ok(attr) => reply.attr(&BELIEVE, &attr),
            Err(error) => reply.error(code(&error)),
        }
    }

    fn readlink(&self, _request: &Request, number: INodeNo, reply: ReplyData) {
        let target = self.path(number).and_then(|path| {
            let place = self.engine.place(&path)?;
            Ok(rustix::fs::readlinkat(place.parent(), place.name, Vec::new())?)
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
        let made = self.make(request, parent, name, mode & 0o7777 & !umask, libc::O_EXCL);
        answer!(made.and_then(|_| self.enter(parent, name)), reply, attr => reply.entry(&BELIEVE, &attr, Generation(0)));
    }

    fn mkdir(&self, request: &Request, parent: INodeNo, name: &OsStr, mode: u32, umask: u32, reply: ReplyEntry) {
        let made = self.check_changeable().and_then(|()| self.child(parent, name)).and_then(|path| {
            let place = self.engine.place(&path)?;
            rustix::fs::mkdirat(place.parent(), place.name, Mode::from_raw_mode(mode & 0o7777 & !umask))?;
            self.give_to(request, &place)?;
            self.enter(parent, name)
        });
        answer!(made, reply, attr => reply.entry(&BELIEVE, &attr, Generation(0)));
    }

    fn unlink(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        answer!(self.remove(parent, name), reply, () => reply.ok());
    }

    fn rmdir(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let removed = self.check_changeable().and_then(|()| self.child(parent, name)).and_then(|path| {
            let place = self.engine.place(&path)?;
            Ok(rustix::fs::unlinkat(place.parent(), place.name, AtFlags::REMOVEDIR)?)
        });
        answer!(removed, reply, () => reply.ok());
    }

    fn symlink(&self, request: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let made = self.check_changeable().and_then(|()| self.child(parent, name)).and_then(|path| {
            let place = self.engine.place(&path)?;
            rustix::fs::symlinkat(target, place.parent(), place.name)?;
            self.give_to(request, &place)?;
            self.enter(parent, name)
        });
        answer!(made, reply, attr => reply.entry(&BELIEVE, &attr, Generation(0)));
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
            let (old, new) = (self.engine.place(&from)?, self.engine.place(&to)?);
            let link = || Ok(rustix::fs::linkat(old.parent(), old.name, new.parent(), new.name, AtFlags::empty())?);
            match self.key(number) {
                Some(key) => self.engine.change(key, link)?,
                None => link()?,
            }
            self.enter(new_parent, new_name)
        });
        answer!(linked, reply, attr => reply.entry(&BELIEVE, &attr, Generation(0)));
    }

    fn open(&self, _request: &Request, number: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let writable = flags.0 & libc::O_ACCMODE != libc::O_RDONLY;
        let opened = self.path(number).and_then(|path| self.engine.open(&path, writable));
        answer!(opened, reply, handle => reply.opened(self.keep(handle), open_flags()));
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
        let created = self.make(request, parent, name, mode & 0o7777 & !umask, flags).and_then(|made| {
            let (path, writable) = (self.child(parent, name)?, flags & libc::O_ACCMODE != libc::O_RDONLY);
            let handle = match made {
                Some(file) => self.engine.hold(&path, file, writable)?,
                None => self.engine.open(&path, writable)?,
            };
            Ok((self.enter(parent, name)?, handle))
        });
        answer!(created, reply, (attr, handle) => {
            reply.created(&BELIEVE, &attr, Generation(0), self.keep(handle), open_flags());
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
        // The kernel copies into pages it holds already, so the answer waits for nobody.
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
                // From a shared mapping: the kernel may send it with any handle of the file.
                self.engine.cache().write(handle.image(), offset, data)?;
            } else {
                handle.write(offset, data)?;
            }
            if flags.0 & libc::O_DSYNC != 0 {
                // O_SYNC is O_DSYNC and one bit more.
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
        // As on any local file system, close is no sync; errors wait for one.
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
                // What lies beyond the end is reserved; there is nothing to clear.
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

    // What the host's own calls do better: the kernel stops asking after the first answer.

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
