//! The kernel's structures in an entry: `fuse_uring_req_header`, and the structures of requests and answers (fuse.h).
//!
//! All is read and written by offset, within bounds: a wrong size is an error, never an access.

use crate::fuse::file_system::CACHE_TIME;
use crate::fuse::names::Caller;
use fuser::{FileAttr, FileType, INodeNo, TimeOrNow};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Bytes of an entry's header: request or answer header, the operation's arguments, the entry's own fields.
pub(super) const HEADER_BYTES: usize = 288;
/// Bytes of an operation's arguments.
const ARGUMENT_BYTES: usize = 128;
const ARGUMENTS_AT: usize = 128;
const COMMIT_ID_AT: usize = 264;
const PAYLOAD_SIZE_AT: usize = 272;

/// What the process asks of the kernel.
pub(super) mod command {
    /// Takes a new entry.
    pub(in super::super) const REGISTER: u32 = 1;
    /// Takes an answer, and the entry for the next request.
    pub(in super::super) const COMMIT_AND_FETCH: u32 = 2;

    /// `fuse_uring_cmd_req`: flags, the request's id, the queue's number.
    pub(in super::super) fn arguments(queue: u16, id: u64) -> [u8; 80] {
        let mut bytes = [0; 80];
        bytes[8..16].copy_from_slice(&id.to_ne_bytes());
        bytes[16..18].copy_from_slice(&queue.to_ne_bytes());
        bytes
    }
}

/// The number by which the kernel finds the request of an entry.
pub(super) fn commit_id(header: &[u8; HEADER_BYTES]) -> u64 {
    u64_at(header, COMMIT_ID_AT)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// A request, without its payload.
pub(super) struct Request {
    pub(super) opcode: u32,
    pub(super) unique: u64,
    pub(super) node: INodeNo,
    pub(super) caller: Caller,
    /// Bytes of the payload that belong to it.
    pub(super) payload: usize,
    arguments: [u8; ARGUMENT_BYTES],
}

impl Request {
    pub(super) fn read(header: &[u8; HEADER_BYTES]) -> Self {
        let arguments = &header[ARGUMENTS_AT..ARGUMENTS_AT + ARGUMENT_BYTES];
        Self {
            opcode: u32_at(header, 4),
            unique: u64_at(header, 8),
            node: INodeNo(u64_at(header, 16)),
            caller: Caller { uid: u32_at(header, 24), gid: u32_at(header, 28) },
            payload: u32_at(header, PAYLOAD_SIZE_AT) as usize,
            arguments: arguments.try_into().expect("as many bytes"),
        }
    }

    /// The argument of 32 bits at a byte of the operation's structure.
    pub(super) fn u32(&self, at: usize) -> u32 {
        u32_at(&self.arguments, at)
    }

    /// The same of 64 bits.
    pub(super) fn u64(&self, at: usize) -> u64 {
        u64_at(&self.arguments, at)
    }

    /// An offset in a file, at a byte of the operation's structure.
    pub(super) fn offset(&self, at: usize) -> Result<u64, i32> {
        let offset = self.u64(at);
        if i64::try_from(offset).is_ok() { Ok(offset) } else { Err(libc::EINVAL) }
    }

    /// A time to set: one bit of `valid` for it, one more for the present time.
    pub(super) fn time(&self, set: u32, now: u32, seconds_at: usize, nanoseconds_at: usize) -> Option<TimeOrNow> {
        let valid = self.u32(0);
        if valid & set == 0 {
            return None;
        }
        if valid & now != 0 {
            return Some(TimeOrNow::Now);
        }
        let (seconds, nanoseconds) = (self.u64(seconds_at) as i64, self.u32(nanoseconds_at).min(999_999_999));
        let whole = Duration::from_secs(seconds.unsigned_abs());
        let base = if seconds < 0 { UNIX_EPOCH.checked_sub(whole) } else { UNIX_EPOCH.checked_add(whole) };
        let time = base.and_then(|base| base.checked_add(Duration::from_nanos(nanoseconds.into())));
        Some(TimeOrNow::SpecificTime(time.unwrap_or(UNIX_EPOCH)))
    }
}

/// The name of a payload that ends with the first zero byte, and what follows it.
pub(super) fn name(payload: &[u8]) -> Result<(&OsStr, &[u8]), i32> {
    let end = payload.iter().position(|&byte| byte == 0).ok_or(libc::EINVAL)?;
    Ok((OsStr::from_bytes(&payload[..end]), &payload[end + 1..]))
}

/// Ends the work on an entry: the answer's header for `unique`, with the size of its payload or its error number.
pub(super) fn finish(header: &mut [u8; HEADER_BYTES], unique: u64, answer: Result<usize, i32>) {
    let (size, error) = match answer {
        Ok(size) => (size as u32, 0),
        // The kernel takes no other numbers.
        Err(errno) if (1..512).contains(&errno) => (0, -errno),
        Err(_) => (0, -libc::EIO),
    };
    header[0..4].copy_from_slice(&(size + 16).to_ne_bytes());
    header[4..8].copy_from_slice(&error.to_ne_bytes());
    header[8..16].copy_from_slice(&unique.to_ne_bytes());
    header[PAYLOAD_SIZE_AT..PAYLOAD_SIZE_AT + 4].copy_from_slice(&size.to_ne_bytes());
}

/// Writes an answer into a payload.
pub(super) struct Answer<'a> {
    into: &'a mut [u8],
    size: usize,
}

impl<'a> Answer<'a> {
    /// An answer of at most `into`'s length.
    pub(super) fn new(into: &'a mut [u8]) -> Self {
        Self { into, size: 0 }
    }

    pub(super) fn size(&self) -> usize {
        self.size
    }

    pub(super) fn bytes(mut self, bytes: &[u8]) -> Self {
        self.into[self.size..self.size + bytes.len()].copy_from_slice(bytes);
        self.size += bytes.len();
        self
    }

    pub(super) fn u32(self, values: &[u32]) -> Self {
        values.iter().fold(self, |answer, value| answer.bytes(&value.to_ne_bytes()))
    }

    pub(super) fn u64(self, values: &[u64]) -> Self {
        values.iter().fold(self, |answer, value| answer.bytes(&value.to_ne_bytes()))
    }

    /// `fuse_entry_out`.
    pub(super) fn entry(self, attr: &FileAttr) -> Self {
        let (seconds, rest) = (CACHE_TIME.as_secs(), CACHE_TIME.subsec_nanos());
        self.u64(&[attr.ino.0, 0, seconds, seconds]).u32(&[rest, rest]).attributes(attr)
    }

    /// `fuse_attr_out`.
    pub(super) fn attr(self, attr: &FileAttr) -> Self {
        self.u64(&[CACHE_TIME.as_secs()]).u32(&[CACHE_TIME.subsec_nanos(), 0]).attributes(attr)
    }

    fn attributes(self, attr: &FileAttr) -> Self {
        let times = [attr.atime, attr.mtime, attr.ctime].map(seconds);
        let mode = mode_of(attr.kind) | u32::from(attr.perm);
        self.u64(&[attr.ino.0, attr.size, attr.blocks, times[0].0, times[1].0, times[2].0])
            .u32(&[times[0].1, times[1].1, times[2].1])
            .u32(&[mode, attr.nlink, attr.uid, attr.gid, attr.rdev, attr.blksize, 0])
    }

    /// Adds a `fuse_dirent`; returns false if it has no room.
    pub(super) fn add_entry(&mut self, number: u64, next: u64, kind: FileType, name: &OsStr) -> bool {
        let name = name.as_bytes();
        let whole = (24 + name.len()).next_multiple_of(8);
        if self.size + whole > self.into.len() {
            return false;
        }
        let lengths = [name.len() as u32, mode_of(kind) >> 12];
        let rest = std::mem::take(&mut self.into);
        let answer = Answer { into: rest, size: self.size }.u64(&[number, next]).u32(&lengths).bytes(name);
        let padding = self.size + whole - answer.size;
        *self = answer.bytes(&[0; 8][..padding]);
        true
    }
}

/// Seconds since the epoch, as the kernel's unsigned field, and the nanoseconds after them.
fn seconds(time: SystemTime) -> (u64, u32) {
    match time.duration_since(UNIX_EPOCH) {
        Ok(after) => (after.as_secs(), after.subsec_nanos()),
        Err(before) => {
            let before = before.duration();
            let borrow = i64::from(before.subsec_nanos() > 0);
            let rest = (1_000_000_000 - before.subsec_nanos()) % 1_000_000_000;
            ((-(before.as_secs() as i64) - borrow) as u64, rest)
        }
    }
}

fn mode_of(kind: FileType) -> u32 {
    match kind {
        FileType::NamedPipe => libc::S_IFIFO,
        FileType::CharDevice => libc::S_IFCHR,
        FileType::BlockDevice => libc::S_IFBLK,
        FileType::Directory => libc::S_IFDIR,
        FileType::RegularFile => libc::S_IFREG,
        FileType::Symlink => libc::S_IFLNK,
        FileType::Socket => libc::S_IFSOCK,
    }
}
