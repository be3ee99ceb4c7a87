//! Requests of an entry: decoded, passed to the file system, answered in the same entry.

use super::wire::{Answer, HEADER_BYTES, Request, finish, name};
use crate::error::Error;
use crate::fuse::attributes::AttributeChange;
use crate::fuse::file_system::{DiskFs, OPEN_FLAGS};
use fuser::{FileHandle, INodeNo, RenameFlags};
use std::ffi::OsStr;
use std::io;
use std::path::Path;

/// Which users' requests are answered, as `fuser` decides it for the classic transport.
#[derive(Clone, Copy)]
pub(in crate::fuse) enum Access {
    All,
    RootAnd(u32),
    Only(u32),
}

impl Access {
    fn allows(self, request: &Request) -> bool {
        let uid = request.caller.uid;
        match self {
            Access::All => true,
            Access::RootAnd(owner) => uid == owner || uid == 0,
            Access::Only(owner) => uid == owner,
        }
    }
}

/// The kernel's operations (fuse.h) that are answered here; others get `ENOSYS`, after which the kernel no longer sends
/// them.
mod op {
    pub(super) const LOOKUP: u32 = 1;
    pub(super) const GETATTR: u32 = 3;
    pub(super) const SETATTR: u32 = 4;
    pub(super) const READLINK: u32 = 5;
    pub(super) const SYMLINK: u32 = 6;
    pub(super) const MKNOD: u32 = 8;
    pub(super) const MKDIR: u32 = 9;
    pub(super) const UNLINK: u32 = 10;
    pub(super) const RMDIR: u32 = 11;
    pub(super) const RENAME: u32 = 12;
    pub(super) const LINK: u32 = 13;
    pub(super) const OPEN: u32 = 14;
    pub(super) const READ: u32 = 15;
    pub(super) const WRITE: u32 = 16;
    pub(super) const STATFS: u32 = 17;
    pub(super) const RELEASE: u32 = 18;
    pub(super) const FSYNC: u32 = 20;
    pub(super) const FLUSH: u32 = 25;
    pub(super) const OPENDIR: u32 = 27;
    pub(super) const READDIR: u32 = 28;
    pub(super) const RELEASEDIR: u32 = 29;
    pub(super) const FSYNCDIR: u32 = 30;
    pub(super) const CREATE: u32 = 35;
    pub(super) const DESTROY: u32 = 38;
    pub(super) const FALLOCATE: u32 = 43;
    pub(super) const RENAME2: u32 = 45;
    pub(super) const LSEEK: u32 = 46;
}

/// Bits of `fuse_setattr_in.valid`.
mod valid {
    pub(super) const MODE: u32 = 1 << 0;
    pub(super) const UID: u32 = 1 << 1;
    pub(super) const GID: u32 = 1 << 2;
    pub(super) const SIZE: u32 = 1 << 3;
    pub(super) const ATIME: u32 = 1 << 4;
    pub(super) const MTIME: u32 = 1 << 5;
    pub(super) const HANDLE: u32 = 1 << 6;
    pub(super) const ATIME_NOW: u32 = 1 << 7;
    pub(super) const MTIME_NOW: u32 = 1 << 8;
}

/// `fuse_write_in.write_flags`: the write is of a shared mapping.
const WRITE_CACHE: u32 = 1;
/// `fuse_fsync_in.fsync_flags`: only data.
const FSYNC_DATA: u32 = 1;

/// An error number.
struct Errno(i32);

impl From<io::Error> for Errno {
    fn from(error: io::Error) -> Self {
        Errno(error.raw_os_error().unwrap_or(libc::EIO))
    }
}

impl From<Error> for Errno {
    fn from(error: Error) -> Self {
        Errno(error.errno())
    }
}

impl From<i32> for Errno {
    fn from(number: i32) -> Self {
        Errno(number)
    }
}

/// Answers the request of an entry.
pub(super) fn answer(fs: &DiskFs, access: Access, header: &mut [u8; HEADER_BYTES], payload: &mut [u8]) {
    let request = Request::read(header);
    // The kernel sends these for users that have the file open already, or for none.
    let is_ungated = matches!(
        request.opcode,
        op::READ | op::READDIR | op::WRITE | op::FSYNC | op::FSYNCDIR | op::RELEASE | op::RELEASEDIR | op::DESTROY
    );
    let done = if request.payload > payload.len() {
        Err(Errno(libc::EINVAL))
    } else if !is_ungated && !access.allows(&request) {
        Err(Errno(libc::EACCES))
    } else {
        answer_data(fs, &request, payload)
    };
    finish(header, request.unique, done.map_err(|error| error.0));
}

/// Answers the request of an entry if that needs no disk and waits for no other thread. Returns false if it is not answered.
///
/// A write is judged by a hint, which may be wrong and then delays other requests of this processor.
pub(super) fn answer_quickly(fs: &DiskFs, access: Access, header: &mut [u8; HEADER_BYTES], payload: &mut [u8]) -> bool {
    let request = Request::read(header);
    let (offset, size) = (request.u64(8), request.u32(16));
    let handle = || fs.handle(FileHandle(request.u64(0))).ok();
    match request.opcode {
        op::READ => {
            let into = payload.get_mut(..size as usize);
            let read = into.and_then(|into| handle()?.read_memory(request.offset(8).ok()?, into));
            read.map(|size| finish(header, request.unique, Ok(size))).is_some()
        }
        op::WRITE => {
            let syncs = request.u32(32) & libc::O_DSYNC as u32 != 0;
            let range = offset..offset.saturating_add(size.into());
            let is_quick = !syncs && handle().is_some_and(|handle| handle.writes_memory(range));
            if is_quick {
                answer(fs, access, header, payload);
            }
            is_quick
        }
        op::GETATTR | op::FLUSH => {
            answer(fs, access, header, payload);
            true
        }
        _ => false,
    }
}

/// Answers requests on open files, and passes others on.
fn answer_data(fs: &DiskFs, request: &Request, payload: &mut [u8]) -> Result<usize, Errno> {
    let handle = FileHandle(request.u64(0));
    match request.opcode {
        op::READ => {
            let into = payload.get_mut(..request.u32(16) as usize).ok_or(libc::EINVAL)?;
            return Ok(fs.handle(handle)?.read(request.offset(8)?, into)?);
        }
        op::WRITE => {
            let size = request.u32(16);
            let data = payload[..request.payload].get(..size as usize).ok_or(libc::EINVAL)?;
            let from_mapping = request.u32(20) & WRITE_CACHE != 0;
            fs.write(handle, request.offset(8)?, data, from_mapping, request.u32(32) as i32)?;
            return Ok(Answer::new(payload).u32(&[size, 0]).size());
        }
        op::LSEEK => {
            let found = fs.seek(handle, request.u64(8) as i64, request.u32(16) as i32)?;
            return Ok(Answer::new(payload).u64(&[found]).size());
        }
        op::READDIR => {
            let entries = fs.entries(handle).ok_or(libc::EBADF)?;
            let mut answer = Answer::new(payload.get_mut(..request.u32(16) as usize).ok_or(libc::EINVAL)?);
            let first = usize::try_from(request.u64(8)).unwrap_or(usize::MAX);
            for (at, entry) in entries.iter().enumerate().skip(first) {
                if !answer.add_entry(entry.number, at as u64 + 1, entry.kind, &entry.name) {
                    break;
                }
            }
            return Ok(answer.size());
        }
        op::FSYNC => fs.sync(handle, request.u32(8) & FSYNC_DATA != 0)?,
        op::FALLOCATE => fs.allocate(handle, request.offset(8)?, request.offset(16)?, request.u32(24) as i32)?,
        op::RELEASE => fs.close(handle),
        op::RELEASEDIR => fs.close_directory(handle),
        // As on any local file system, close does not sync; errors are reported by the next sync.
        op::FLUSH | op::DESTROY => {}
        _ => return answer_names(fs, request, payload),
    }
    Ok(0)
}

/// Answers requests on names and attributes.
fn answer_names(fs: &DiskFs, request: &Request, payload: &mut [u8]) -> Result<usize, Errno> {
    let (node, caller) = (request.node, request.caller);
    let input = &payload[..request.payload];
    let attr = match request.opcode {
        op::LOOKUP => fs.look_up(node, name(input)?.0)?,
        op::MKNOD => fs.make_file(caller, node, name(input)?.0, request.u32(0), request.u32(8))?,
        op::MKDIR => fs.make_directory(caller, node, name(input)?.0, request.u32(0) & !request.u32(4))?,
        op::SYMLINK => {
            let (own, rest) = name(input)?;
            fs.make_link(caller, node, own, Path::new(name(rest)?.0))?
        }
        op::LINK => fs.add_name(INodeNo(request.u64(0)), node, name(input)?.0)?,
        op::GETATTR => return Ok(Answer::new(payload).attr(&fs.attributes_of(node)?).size()),
        op::SETATTR => return Ok(Answer::new(payload).attr(&set_attributes(fs, request)?).size()),
        op::CREATE => {
            let mode = request.u32(4) & !request.u32(8);
            let (attr, handle) = fs.create_and_open(caller, node, name(input)?.0, mode, request.u32(0) as i32)?;
            return Ok(opened(Answer::new(payload).entry(&attr), handle, OPEN_FLAGS.bits()));
        }
        op::OPEN => {
            let handle = fs.open_image(node, request.u32(0) as i32)?;
            return Ok(opened(Answer::new(payload), handle, OPEN_FLAGS.bits()));
        }
        op::OPENDIR => return Ok(opened(Answer::new(payload), fs.open_directory(node)?, 0)),
        op::READLINK => return Ok(Answer::new(payload).bytes(fs.link_target(node)?.as_bytes()).size()),
        op::UNLINK => return fs.remove(node, name(input)?.0).map(|()| 0).map_err(Errno::from),
        op::RMDIR => return fs.remove_directory(node, name(input)?.0).map(|()| 0).map_err(Errno::from),
        op::RENAME => return rename(fs, request, input, RenameFlags::empty()),
        op::RENAME2 => return rename(fs, request, input, RenameFlags::from_bits_retain(request.u32(8))),
        op::FSYNCDIR => return fs.sync_directory(node).map(|()| 0).map_err(Errno::from),
        op::STATFS => {
            let stat = fs.stat_fs()?;
            let sizes = [stat.f_bsize as u32, stat.f_namemax as u32, stat.f_frsize as u32];
            let counts = [stat.f_blocks, stat.f_bfree, stat.f_bavail, stat.f_files, stat.f_ffree];
            return Ok(Answer::new(payload).u64(&counts).u32(&sizes).u32(&[0; 7]).size());
        }
        _ => return Err(Errno(libc::ENOSYS)),
    };
    Ok(Answer::new(payload).entry(&attr).size())
}

/// `fuse_open_out`.
fn opened(answer: Answer<'_>, handle: FileHandle, flags: u32) -> usize {
    answer.u64(&[handle.0]).u32(&[flags, 0]).size()
}

fn rename(fs: &DiskFs, request: &Request, input: &[u8], flags: RenameFlags) -> Result<usize, Errno> {
    let (old, rest) = name(input)?;
    let new: &OsStr = name(rest)?.0;
    fs.rename_node((request.node, old), (INodeNo(request.u64(0)), new), flags)?;
    Ok(0)
}

fn set_attributes(fs: &DiskFs, request: &Request) -> Result<fuser::FileAttr, Error> {
    let is_set = |bit| request.u32(0) & bit != 0;
    let change = AttributeChange {
        mode: is_set(valid::MODE).then(|| request.u32(68)),
        uid: is_set(valid::UID).then(|| request.u32(76)),
        gid: is_set(valid::GID).then(|| request.u32(80)),
        size: is_set(valid::SIZE).then(|| request.u64(16)),
        atime: request.time(valid::ATIME, valid::ATIME_NOW, 32, 56),
        mtime: request.time(valid::MTIME, valid::MTIME_NOW, 40, 60),
    };
    let handle = is_set(valid::HANDLE).then(|| FileHandle(request.u64(8)));
    fs.set_attributes(request.node, handle, change)
}

#[cfg(test)]
mod tests {
    use super::super::queue::PAYLOAD_BYTES;
    use super::*;
    use crate::config::Config;
    use crate::engine::Engine;

    struct Fixture {
        fs: DiskFs,
        payload: Vec<u8>,
        _directory: tempfile::TempDir,
    }

    impl Fixture {
        fn new(read_only: bool) -> Self {
            let directory = tempfile::tempdir_in("/var/tmp").unwrap();
            std::fs::write(directory.path().join("x"), [7; 10_000]).unwrap();
            let config = Config { cache_bytes: 4 << 20, ..Config::default() };
            let fs = DiskFs::new(Engine::start(directory.path(), config, None, read_only).unwrap()).unwrap();
            Self { fs, payload: vec![0; PAYLOAD_BYTES], _directory: directory }
        }

        /// Answers a request; returns its error number and the size of the answer.
        fn ask(&mut self, opcode: u32, node: u64, arguments: &[(usize, u64)], input: &[u8]) -> (i32, usize) {
            self.payload[..input.len()].copy_from_slice(input);
            self.ask_sized(opcode, node, arguments, input.len() as u32)
        }

        fn ask_sized(&mut self, opcode: u32, node: u64, arguments: &[(usize, u64)], size: u32) -> (i32, usize) {
            let mut header = [0; HEADER_BYTES];
            header[4..8].copy_from_slice(&opcode.to_ne_bytes());
            header[8..16].copy_from_slice(&77u64.to_ne_bytes());
            header[16..24].copy_from_slice(&node.to_ne_bytes());
            for (at, value) in arguments {
                header[128 + at..136 + at].copy_from_slice(&value.to_ne_bytes());
            }
            header[272..276].copy_from_slice(&size.to_ne_bytes());
            if !answer_quickly(&self.fs, Access::All, &mut header, &mut self.payload) {
                answer(&self.fs, Access::All, &mut header, &mut self.payload);
            }
            let word = |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().unwrap());
            assert_eq!(u64::from_ne_bytes(header[8..16].try_into().unwrap()), 77, "the answer names its request");
            assert_eq!(word(0), word(272) + 16);
            (-(word(4) as i32), word(272) as usize)
        }

        fn open(&mut self, flags: i32) -> u64 {
            assert_eq!(self.ask(op::LOOKUP, 1, &[], b"x\0"), (0, 128));
            let node = u64::from_ne_bytes(self.payload[..8].try_into().unwrap());
            assert_eq!(self.ask(op::OPEN, node, &[(0, flags as u64)], b""), (0, 16));
            u64::from_ne_bytes(self.payload[..8].try_into().unwrap())
        }
    }

    #[test]
    fn sizes_that_do_not_fit_are_errors() {
        let mut fixture = Fixture::new(false);
        let handle = fixture.open(libc::O_RDWR);
        for size in [PAYLOAD_BYTES as u64 + 1, u64::from(u32::MAX)] {
            for opcode in [op::READ, op::WRITE] {
                assert_eq!(fixture.ask(opcode, 2, &[(0, handle), (8, 0), (16, size)], b"").0, libc::EINVAL);
            }
            let opened = fixture.ask(op::OPENDIR, 1, &[], b"");
            assert_eq!(opened, (0, 16));
            let directory = u64::from_ne_bytes(fixture.payload[..8].try_into().unwrap());
            assert_eq!(fixture.ask(op::READDIR, 1, &[(0, directory), (16, size)], b"").0, libc::EINVAL);
            // An answer that has room for less than one name has none.
            assert_eq!(fixture.ask(op::READDIR, 1, &[(0, directory), (16, 24)], b""), (0, 0));
        }
        // A payload that says it is larger than an entry, and a write of more than came.
        assert_eq!(fixture.ask_sized(op::LOOKUP, 1, &[], PAYLOAD_BYTES as u32 + 1).0, libc::EINVAL);
        assert_eq!(fixture.ask(op::WRITE, 2, &[(0, handle), (8, 0), (16, 9)], b"eight by").0, libc::EINVAL);
        // Offsets beyond any file, names that do not end, handles that no open returned.
        for opcode in [op::READ, op::WRITE, op::FALLOCATE] {
            assert_eq!(fixture.ask(opcode, 2, &[(0, handle), (8, u64::MAX - 3), (16, 4)], b"four").0, libc::EINVAL);
            assert_eq!(fixture.ask(opcode, 2, &[(0, 999), (8, 0), (16, 4)], b"four").0, libc::EBADF);
        }
        for opcode in [op::LOOKUP, op::UNLINK, op::MKDIR, op::SYMLINK, op::RENAME2] {
            assert_eq!(fixture.ask(opcode, 1, &[], b"x").0, libc::EINVAL);
        }
        assert_eq!(fixture.ask(op::RENAME2, 1, &[(0, 1)], b"x\0y").0, libc::EINVAL);
        // After all of them the file is as it was.
        assert_eq!(fixture.ask(op::READ, 2, &[(0, handle), (8, 0), (16, 20_000)], b""), (0, 10_000));
        assert!(fixture.payload[..10_000] == [7; 10_000]);
    }

    #[test]
    fn no_request_of_garbage_panics() {
        let mut fixture = Fixture::new(true);
        fixture.open(libc::O_RDONLY);
        let mut numbers = fastrand::Rng::with_seed(5);
        let mut random = move || {
            let value = numbers.u64(..);
            // Small values are handles, nodes and sizes that exist.
            if value.is_multiple_of(3) { value } else { value % 9 }
        };
        for _ in 0..30_000 {
            let arguments: Vec<_> = (0..15).map(|n| (n * 8, random())).collect();
            let input: Vec<u8> = (0..random() % 40).map(|_| random() as u8).collect();
            let (error, size) = fixture.ask((random() % 60) as u32, random(), &arguments, &input);
            assert!((0..512).contains(&error) && size <= PAYLOAD_BYTES, "{error}, {size}");
        }
    }

    #[test]
    fn requests_of_other_users_are_refused() {
        let asks = |access: Access, uid: u32, opcode: u32| {
            let mut fixture = Fixture::new(false);
            let mut header = [0; HEADER_BYTES];
            header[4..8].copy_from_slice(&opcode.to_ne_bytes());
            header[16..24].copy_from_slice(&1u64.to_ne_bytes());
            header[24..28].copy_from_slice(&uid.to_ne_bytes());
            answer(&fixture.fs, access, &mut header, &mut fixture.payload);
            i32::from_ne_bytes(header[4..8].try_into().unwrap())
        };
        let refused = -libc::EACCES;
        for opcode in [op::STATFS, op::OPENDIR, op::GETATTR, op::READLINK, op::CREATE] {
            assert_eq!(asks(Access::Only(5), 0, opcode), refused);
            assert_eq!(asks(Access::RootAnd(5), 6, opcode), refused);
            for (access, uid) in
                [(Access::Only(5), 5), (Access::RootAnd(5), 5), (Access::RootAnd(5), 0), (Access::All, 6)]
            {
                assert_ne!(asks(access, uid, opcode), refused);
            }
        }
        // The kernel sends the write of a mapping for no user.
        assert_ne!(asks(Access::Only(5), 6, op::WRITE), refused);
    }
}
