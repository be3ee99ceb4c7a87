//! userfaultfd(2): watching and freezing pages.
//!
//! Structures and numbers are the kernel's (`include/uapi/linux/userfaultfd.h`).

use crate::fd::Fd;
use crate::raw::{Errno, Result};
use crate::{PAGE_SIZE, Range, syscall};
use core::ffi::CStr;

/// The kernel has page-fault events for write protection.
pub const FEATURE_PAGEFAULT_FLAG_WP: u64 = 1 << 0;
/// fork(2) sends an event.
pub const FEATURE_EVENT_FORK: u64 = 1 << 1;
/// mremap(2) sends an event.
pub const FEATURE_EVENT_REMAP: u64 = 1 << 2;
/// Discarding advice sends an event, and waits until it is read.
pub const FEATURE_EVENT_REMOVE: u64 = 1 << 3;
/// Missing pages of shared memory files can be served.
pub const FEATURE_MISSING_SHMEM: u64 = 1 << 5;
/// munmap(2) sends an event.
pub const FEATURE_EVENT_UNMAP: u64 = 1 << 6;
/// A fault is answered by SIGBUS in the faulting thread.
pub const FEATURE_SIGBUS: u64 = 1 << 7;
/// Faults carry the number of the faulting thread.
pub const FEATURE_THREAD_ID: u64 = 1 << 8;
/// Page-cache pages that are not yet mapped can be served.
pub const FEATURE_MINOR_SHMEM: u64 = 1 << 10;
/// Memory files can be write-protected.
pub const FEATURE_WP_HUGETLBFS_SHMEM: u64 = 1 << 12;
/// Pages that do not exist yet can be write-protected.
pub const FEATURE_WP_UNPOPULATED: u64 = 1 << 13;
/// Poisoning is there.
pub const FEATURE_POISON: u64 = 1 << 14;
/// Write protection resolves itself: a write only leaves a mark.
pub const FEATURE_WP_ASYNC: u64 = 1 << 15;
/// Pages can be moved.
pub const FEATURE_MOVE: u64 = 1 << 16;
/// Accesses to pages that are protected against reads as well leave a mark, and no event; Linux 7.3.
pub const FEATURE_RWP_ASYNC: u64 = 1 << 17 | 1 << 18;

/// Accesses to absent pages wait.
pub const MODE_MISSING: u64 = 1 << 0;
/// Writes are noticed.
pub const MODE_WP: u64 = 1 << 1;
/// Accesses to pages that are only in the page cache wait.
pub const MODE_MINOR: u64 = 1 << 2;

/// Event: a thread waits at a page.
pub const EVENT_PAGEFAULT: u8 = 0x12;
/// Event: the process was forked.
pub const EVENT_FORK: u8 = 0x13;
/// Event: a range was moved.
pub const EVENT_REMAP: u8 = 0x14;
/// Event: a range is being discarded.
pub const EVENT_REMOVE: u8 = 0x15;
/// Event: a range was unmapped.
pub const EVENT_UNMAP: u8 = 0x16;

const fn ioc(dir: u32, ty: u32, nr: u32, size: usize) -> u32 {
    (dir << 30) | ((size as u32) << 16) | (ty << 8) | nr
}
const READ: u32 = 2;
const BOTH: u32 = 3;
const UFFD: u32 = 0xAA;

/// `USERFAULTFD_IOC_NEW`: on /dev/userfaultfd, makes a descriptor of the calling process.
const DEV_NEW: u32 = ioc(0, UFFD, 0x00, 0);
const API: u32 = ioc(BOTH, UFFD, 0x3F, size_of::<Api>());
/// `UFFDIO_REGISTER`; its argument begins with address and length.
pub const REGISTER: u32 = ioc(BOTH, UFFD, 0x00, size_of::<Register>());
/// `UFFDIO_UNREGISTER`; its argument is address and length.
pub const UNREGISTER: u32 = ioc(READ, UFFD, 0x01, size_of::<UffdRange>());
const WAKE: u32 = ioc(READ, UFFD, 0x02, size_of::<UffdRange>());
const COPY: u32 = ioc(BOTH, UFFD, 0x03, size_of::<Copy_>());
const ZEROPAGE: u32 = ioc(BOTH, UFFD, 0x04, size_of::<Zeropage>());
const MOVE: u32 = ioc(BOTH, UFFD, 0x05, size_of::<Move>());
const CONTINUE: u32 = ioc(BOTH, UFFD, 0x07, size_of::<Zeropage>());
const POISON: u32 = ioc(BOTH, UFFD, 0x08, size_of::<Zeropage>());
const WRITEPROTECT: u32 = ioc(BOTH, UFFD, 0x06, size_of::<WriteProtect>());

/// Every request that this module makes, for callers that check whether a filter allows it.
pub const REQUESTS: [u32; 11] =
    [DEV_NEW, API, REGISTER, UNREGISTER, WAKE, COPY, ZEROPAGE, MOVE, CONTINUE, POISON, WRITEPROTECT];

#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}
#[repr(C)]
struct UffdRange {
    start: u64,
    len: u64,
}
#[repr(C)]
struct Register {
    range: UffdRange,
    mode: u64,
    ioctls: u64,
}
#[repr(C)]
struct Copy_ {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    copied: i64,
}
#[repr(C)]
struct Zeropage {
    range: UffdRange,
    mode: u64,
    zeroed: i64,
}
#[repr(C)]
struct Move {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    moved: i64,
}
#[repr(C)]
struct WriteProtect {
    range: UffdRange,
    mode: u64,
}

impl From<Range> for UffdRange {
    fn from(range: Range) -> Self {
        UffdRange { start: range.start, len: range.len() }
    }
}

/// Do not wake the threads that wait for the range; the caller wakes them later.
pub const DONTWAKE: u64 = 1;
/// `MOVE`: holes in the source are skipped instead of failing.
pub const MOVE_ALLOW_SRC_HOLES: u64 = 1 << 1;

/// The lowest address that a program may map by default; nothing below the first MiB is to be registered.
const LOWEST: u64 = 64 << 10;

/// An event that a descriptor delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A thread waits at this address.
    PageFault {
        /// The page's address.
        addr: u64,
        /// The access was a write.
        write: bool,
        /// The thread's number in its own namespace, 0 without [`FEATURE_THREAD_ID`].
        thread: i32,
    },
    /// The range is about to be discarded; the discarding thread waited until this was read.
    Remove(Range),
    /// The range was unmapped; the unmapping thread waited until this was read.
    Unmap(Range),
    /// The pages of a range were moved to another address; the moving thread waited until this was read.
    Remap {
        /// Where they were.
        from: Range,
        /// First address of where they are.
        to: u64,
    },
    /// The process was forked; the number is a new descriptor of ours for the child's memory, to be wrapped once.
    Fork(i32),
    /// Any other event, by number.
    Other(u8),
}

/// An event as the kernel writes it: `struct uffd_msg`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Message([u64; 4]);

impl Message {
    /// No event.
    pub const NONE: Message = Message([0; 4]);

    /// What it says.
    pub fn event(self) -> Event {
        let words = self.0;
        match words[0].to_ne_bytes()[0] {
            EVENT_PAGEFAULT => {
                Event::PageFault { addr: words[2], write: words[1] & 1 != 0, thread: words[3] as u32 as i32 }
            }
            EVENT_REMOVE => Event::Remove(Range { start: words[1], end: words[2] }),
            EVENT_UNMAP => Event::Unmap(Range { start: words[1], end: words[2] }),
            EVENT_REMAP => {
                Event::Remap { from: Range { start: words[1], end: words[1].saturating_add(words[3]) }, to: words[2] }
            }
            EVENT_FORK => {
                let bytes = words[1].to_ne_bytes();
                Event::Fork(i32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
            }
            other => Event::Other(other),
        }
    }
}

impl From<[u64; 4]> for Message {
    fn from(words: [u64; 4]) -> Message {
        Message(words)
    }
}

/// A userfaultfd: a watch over ranges of one process's memory.
#[derive(Debug)]
pub struct Uffd(Fd);

impl Uffd {
    /// Makes a descriptor for the calling process with `features`, non-blocking, close-on-exec.
    ///
    /// `device` is an open /dev/userfaultfd, which needs no privilege; without it the system call is used.
    ///
    /// # Errors
    /// `EPERM` without device and privilege; `EINVAL` if the kernel lacks a feature.
    pub fn new(device: Option<&Fd>, features: u64) -> Result<Uffd> {
        let uffd = Uffd::bare(device)?;
        uffd.enable(features)?;
        Ok(uffd)
    }

    /// Makes a descriptor for faults in user mode only, which needs neither privilege nor device.
    ///
    /// For [`FEATURE_SIGBUS`] this is no loss: with it a system call that meets an absent page gets `EFAULT` anyway.
    ///
    /// # Errors
    /// `EPERM` or `ENOSYS` where a filter forbids the call; `EINVAL` if the kernel lacks a feature.
    pub fn user_mode_only(features: u64) -> Result<Uffd> {
        const USER_MODE_ONLY: i32 = 1;
        // SAFETY: flags only.
        let fd = unsafe { syscall!(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK | USER_MODE_ONLY) }?;
        // SAFETY: just made, ours.
        let uffd = Uffd(unsafe { Fd::from_raw(fd as i32) });
        uffd.enable(features)?;
        Ok(uffd)
    }

    /// Makes a descriptor that is of no use until this or another process [enables](Self::enable) it.
    ///
    /// # Errors
    /// `EPERM` without device and privilege.
    pub fn bare(device: Option<&Fd>) -> Result<Uffd> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
        let fd = match device {
            // SAFETY: the ioctl takes flags only and returns a new descriptor.
            Some(device) => unsafe { syscall!(libc::SYS_ioctl, device.raw(), DEV_NEW, flags) }?,
            // SAFETY: flags only.
            None => unsafe { syscall!(libc::SYS_userfaultfd, flags) }?,
        };
        // SAFETY: just made, ours.
        let fd = unsafe { Fd::from_raw(fd as i32) };
        Ok(Uffd(fd))
    }

    /// Chooses the features, once, and makes the descriptor ready.
    ///
    /// # Errors
    /// `EINVAL` if the kernel lacks one, or the choice was made already; `EPERM` for [`FEATURE_EVENT_FORK`] without
    /// `CAP_SYS_PTRACE`.
    pub fn enable(&self, features: u64) -> Result<()> {
        ioctl(&self.0, API, &mut Api { api: 0xAA, features, ioctls: 0 })
    }

    /// Wraps a descriptor that another process made and passed to us.
    pub fn from_fd(fd: Fd) -> Uffd {
        Uffd(fd)
    }

    /// Returns true if the descriptor is a userfaultfd. A client may pass anything.
    #[cfg(feature = "std")]
    pub fn is_one(&self) -> bool {
        let link = std::fs::read_link(format!("/proc/self/fd/{}", self.0.raw()));
        link.is_ok_and(|name| name.as_os_str() == "anon_inode:[userfaultfd]")
    }

    /// The descriptor, given away.
    pub fn into_fd(self) -> Fd {
        self.0
    }

    /// The descriptor.
    pub const fn fd(&self) -> &Fd {
        &self.0
    }

    /// Watches `range` in `mode`, in place of the modes that this descriptor had there.
    ///
    /// A mode may be added, not taken away: since Linux 7.3 the kernel refuses to drop write protection from a range
    /// before it is [unregistered](Self::unregister), because its pages may still carry the mark.
    ///
    /// # Errors
    /// `EBUSY` if another descriptor has part of the range, or if `mode` lacks the write protection that part of it has;
    /// `EINVAL` if a mapping there cannot be watched.
    pub fn register(&self, range: Range, mode: u64) -> Result<()> {
        ioctl(&self.0, REGISTER, &mut Register { range: range.into(), mode, ioctls: 0 })
    }

    /// Stops watching `range`, wakes the threads that wait there, and drops its write protection.
    ///
    /// # Errors
    /// `EINVAL` if nothing is mapped there or a mapping there cannot be watched at all.
    pub fn unregister(&self, range: Range) -> Result<()> {
        ioctl(&self.0, UNREGISTER, &mut UffdRange::from(range))
    }

    /// Wakes every thread that waits in `range`.
    ///
    /// # Errors
    /// `EINVAL` for a range that is no range.
    pub fn wake(&self, range: Range) -> Result<()> {
        ioctl(&self.0, WAKE, &mut UffdRange::from(range))
    }

    /// Moves the pages of `src` to `dst`, which must be empty and watched for missing pages.
    ///
    /// Returns the bytes moved, and the error that ended the move early, if one did:
    /// `EBUSY` a page is pinned or shared by fork, `EAGAIN` try again, `ENOENT` a hole,
    /// `EINVAL` the source is not plain anonymous memory.
    pub fn move_pages(&self, dst: u64, src: Range, mode: u64) -> (u64, Option<Errno>) {
        let mut arg = Move { dst, src: src.start, len: src.len(), mode, moved: 0 };
        match ioctl(&self.0, MOVE, &mut arg) {
            Ok(()) => (src.len(), None),
            Err(errno) => (arg.moved.max(0) as u64, Some(errno)),
        }
    }

    /// Copies `src` of our memory to the absent pages at `dst`; returns the bytes copied and the error that ended it.
    ///
    /// # Safety
    /// `src..src + len` is readable memory of the calling process.
    pub unsafe fn copy(&self, dst: u64, src: u64, len: u64, mode: u64) -> (u64, Option<Errno>) {
        let mut arg = Copy_ { dst, src, len, mode, copied: 0 };
        match ioctl(&self.0, COPY, &mut arg) {
            Ok(()) => (len, None),
            Err(errno) => (arg.copied.max(0) as u64, Some(self.settled(errno))),
        }
    }

    /// Maps the zero page over the absent pages of `range`; returns the bytes done and the error that ended it.
    pub fn zero(&self, range: Range, mode: u64) -> (u64, Option<Errno>) {
        let mut arg = Zeropage { range: range.into(), mode, zeroed: 0 };
        match ioctl(&self.0, ZEROPAGE, &mut arg) {
            Ok(()) => (range.len(), None),
            Err(errno) => (arg.zeroed.max(0) as u64, Some(self.settled(errno))),
        }
    }

    /// Maps what the page cache holds for the unmapped pages of `range`; returns the bytes done and the error that ended it.
    ///
    /// `EEXIST` a page is mapped already, `EAGAIN` a discard is under way.
    pub fn map_cached(&self, range: Range, mode: u64) -> (u64, Option<Errno>) {
        let mut arg = Zeropage { range: range.into(), mode, zeroed: 0 };
        match ioctl(&self.0, CONTINUE, &mut arg) {
            Ok(()) => (range.len(), None),
            Err(errno) => (arg.zeroed.max(0) as u64, Some(self.settled(errno))),
        }
    }

    /// Makes the absent pages of `range` unusable: a thread that touches one gets SIGBUS. Returns the bytes done and the
    /// error that ended it, `EEXIST` at a page that is there.
    pub fn poison(&self, range: Range, mode: u64) -> (u64, Option<Errno>) {
        let mut arg = Zeropage { range: range.into(), mode, zeroed: 0 };
        match ioctl(&self.0, POISON, &mut arg) {
            Ok(()) => (range.len(), None),
            Err(errno) => (arg.zeroed.max(0) as u64, Some(self.settled(errno))),
        }
    }

    /// Returns false when the process that the memory belongs to has ended.
    pub fn is_alive(&self) -> bool {
        self.refusal() != Some(Errno(libc::ESRCH))
    }

    /// True while a call waits for an event to be read, or has not gone on since.
    pub fn is_changing(&self) -> bool {
        self.refusal() == Some(Errno(libc::EAGAIN))
    }

    /// Why nothing can be done where nothing of ours is ever registered: the kernel looks at the range last.
    fn refusal(&self) -> Option<Errno> {
        let range = Range { start: LOWEST, end: LOWEST + PAGE_SIZE as u64 };
        let mut arg = Zeropage { range: range.into(), mode: DONTWAKE, zeroed: 0 };
        ioctl(&self.0, ZEROPAGE, &mut arg).err()
    }

    /// `errno`, but `EAGAIN` in place of `ENOENT` while a change of the memory has not been read. Linux looks for the
    /// mapping before it asks whether mappings change (`mfill_atomic`, since 6.9): a mapping that has just moved away is
    /// not there, and the event that tells where it is comes after that.
    fn settled(&self, errno: Errno) -> Errno {
        if errno == Errno(libc::ENOENT) && self.is_changing() { Errno(libc::EAGAIN) } else { errno }
    }

    /// Write-protects `range`.
    ///
    /// # Errors
    /// `ENOENT` if the range is not watched for writes.
    pub fn write_protect(&self, range: Range) -> Result<()> {
        ioctl(&self.0, WRITEPROTECT, &mut WriteProtect { range: range.into(), mode: 1 })
    }

    /// Reads one event, `None` if there is none now. Reading a removal lets the remover go on.
    ///
    /// # Errors
    /// As read(2).
    pub fn read_event(&self) -> Result<Option<Event>> {
        let mut message = [Message::NONE];
        Ok((self.read_by(&mut message, Fd::read)? == 1).then(|| message[0].event()))
    }

    /// As [`read_event`](Self::read_event), but never waits, even if the client that made the descriptor set it to wait.
    ///
    /// # Errors
    /// As read(2).
    pub fn read_event_at_once(&self) -> Result<Option<Event>> {
        let mut message = [Message::NONE];
        Ok((self.read_messages(&mut message)? == 1).then(|| message[0].event()))
    }

    /// Reads as many events as there are and fit, as the kernel writes them, and returns how many. Never waits, even if the
    /// client that made the descriptor set it to wait.
    ///
    /// # Errors
    /// As read(2).
    pub fn read_messages(&self, messages: &mut [Message]) -> Result<usize> {
        self.read_by(messages, Fd::read_at_once)
    }

    fn read_by(&self, messages: &mut [Message], read: impl FnOnce(&Fd, &mut [u8]) -> Result<usize>) -> Result<usize> {
        // SAFETY: the messages are the slice's, and any bytes are a valid message.
        let bytes = unsafe {
            core::slice::from_raw_parts_mut(messages.as_mut_ptr().cast::<u8>(), core::mem::size_of_val(messages))
        };
        match read(&self.0, bytes) {
            Ok(got) => Ok(got / size_of::<Message>()),
            Err(Errno(libc::EAGAIN)) => Ok(0),
            Err(errno) => Err(errno),
        }
    }
}

/// Opens /dev/userfaultfd.
///
/// # Errors
/// As open(2).
pub fn open_device() -> Result<Fd> {
    const PATH: &CStr = c"/dev/userfaultfd";
    Fd::open(PATH, libc::O_RDWR, 0)
}

fn ioctl<T>(fd: &Fd, request: u32, arg: &mut T) -> Result<()> {
    // SAFETY: each request constant carries the size of its structure, and the callers above pass that structure.
    unsafe { syscall!(libc::SYS_ioctl, fd.raw(), request, core::ptr::from_mut(arg)) }.map(drop)
}
