//! /proc/PID/pagemap: the entries of its pages, and `PAGEMAP_SCAN`: which pages were written, and protect them again.

use crate::fd::Fd;
use crate::raw::{Errno, Result};
use crate::{Range, syscall};

/// The page was written since it was last protected (or never was protected).
pub const WRITTEN: u64 = 1 << 1;
/// The page is a file's (page cache), not the process's own.
pub const FILE: u64 = 1 << 2;
/// The page is in memory.
pub const PRESENT: u64 = 1 << 3;
/// The page is in swap.
pub const SWAPPED: u64 = 1 << 4;
/// The page is the kernel's zero page.
pub const PFNZERO: u64 = 1 << 5;
/// The page is part of a huge page.
pub const HUGE: u64 = 1 << 6;
/// The mapping is watched for writes asynchronously.
pub const WPALLOWED: u64 = 1 << 0;

/// A page of a pool file that may still have to be protected.
pub const MERGED: u64 = WPALLOWED | WRITTEN | FILE | PRESENT;

/// Protect the pages that match.
pub const PROTECT: u64 = 1 << 0;
/// Fail on ranges that are not watched asynchronously.
pub const CHECK_WPASYNC: u64 = 1 << 1;

/// Neighbouring pages of the same categories.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ScannedRange {
    /// First address.
    pub start: u64,
    /// First address after it.
    pub end: u64,
    /// What the pages have in common, of what was asked for.
    pub categories: u64,
}

#[repr(C)]
#[derive(Default)]
struct Arg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// The request that this module makes, for callers that check whether a filter allows it.
pub const REQUEST: u32 = SCAN;
const SCAN: u32 = (3 << 30) | ((size_of::<Arg>() as u32) << 16) | ((b'f' as u32) << 8) | 16;

/// Returns true if the descriptor is a page map. A client may pass anything, also a file of a file system that the client
/// serves itself and answers when it likes.
pub fn is_one(fd: &Fd) -> bool {
    let mut system = core::mem::MaybeUninit::<libc::statfs>::zeroed();
    // SAFETY: the kernel writes the structure.
    if unsafe { syscall!(libc::SYS_fstatfs, fd.raw(), system.as_mut_ptr()) }.is_err() {
        return false;
    }
    // SAFETY: the kernel has written it, and any bytes are valid numbers.
    let system = unsafe { system.assume_init() };
    // An empty range asks nothing; of a process that has ended meanwhile the kernel tells just that.
    let asked = || scan(fd, Range { start: 0, end: 0 }, Query::default(), &mut []);
    system.f_type == libc::PROC_SUPER_MAGIC && matches!(asked(), Ok(_) | Err(Errno(libc::ESRCH)))
}

/// What to look for and what to tell about it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Query {
    /// All of these must hold (after inversion).
    pub all_of: u64,
    /// At least one of these must hold (after inversion), if any is given.
    pub any_of: u64,
    /// These count as holding when they do not.
    pub inverted: u64,
    /// Categories to report.
    pub report: u64,
    /// [`PROTECT`] and [`CHECK_WPASYNC`].
    pub flags: u64,
}

/// Protects the pages of `range` that match `query`, each in one step with the match, and tells nothing of them.
///
/// # Errors
/// As [`scan`].
pub fn protect(fd: &Fd, range: Range, query: Query) -> Result<()> {
    let mut out = [ScannedRange::default(); 16];
    let mut start = range.start;
    while start < range.end {
        let (_, walked) = scan(fd, Range { start, end: range.end }, query, &mut out)?;
        if walked <= start {
            break;
        }
        start = walked;
    }
    Ok(())
}

/// Bytes of one page's entry in the file.
pub const ENTRY_BYTES: usize = 8;

/// What the file says of one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageEntry(u64);

impl PageEntry {
    const PRESENT: u64 = 1 << 63;
    const FILE: u64 = 1 << 61;
    const EXCLUSIVE: u64 = 1 << 56;
    const FRAME: u64 = (1 << 55) - 1;

    /// The entry with these bytes.
    pub fn from_bytes(bytes: [u8; ENTRY_BYTES]) -> PageEntry {
        PageEntry(u64::from_ne_bytes(bytes))
    }

    /// The entries of neighbouring pages, as the file holds them.
    pub fn all(bytes: &[u8]) -> impl Iterator<Item = PageEntry> {
        bytes.as_chunks().0.iter().copied().map(PageEntry::from_bytes)
    }

    /// True if the page is in memory.
    pub fn is_present(self) -> bool {
        self.0 & PageEntry::PRESENT != 0
    }

    /// True if the page is a file's or shared memory's, not the process's own.
    pub fn is_file(self) -> bool {
        self.0 & PageEntry::FILE != 0
    }

    /// True if no other process maps the page.
    pub fn is_exclusive(self) -> bool {
        self.0 & PageEntry::EXCLUSIVE != 0
    }

    /// The number of the physical frame; 0 if the page is not in memory, or without `CAP_SYS_ADMIN`.
    pub fn frame(self) -> u64 {
        if self.is_present() { self.0 & PageEntry::FRAME } else { 0 }
    }
}

/// Calls `each` with the address of each page of `range` that is in memory, is no file's, and is mapped by this process
/// alone.
///
/// # Errors
/// As read(2).
pub fn each_alone(fd: &Fd, range: Range, mut each: impl FnMut(u64)) -> Result<()> {
    const PAGE: u64 = crate::PAGE_SIZE as u64;
    let mut at = range.start;
    while at < range.end {
        let mut bytes = [0u8; 64 * ENTRY_BYTES];
        let wanted = (((range.end - at) / PAGE) as usize * ENTRY_BYTES).min(bytes.len());
        let got = fd.read_at(&mut bytes[..wanted], at / PAGE * ENTRY_BYTES as u64)?;
        if got == 0 {
            return Ok(());
        }
        for entry in PageEntry::all(&bytes[..got]) {
            if entry.is_present() && entry.is_exclusive() && !entry.is_file() {
                each(at);
            }
            at += PAGE;
        }
    }
    Ok(())
}

/// Scans `range` of the process that the pagemap `fd` belongs to; fills `out` and returns how many
/// ranges it got and the address up to which the range has been walked.
///
/// # Errors
/// `EPERM` if protection is asked for on a range that is not watched, `ESRCH` if the process is gone, `EINVAL` if
/// protection is asked for without room for ranges: the kernel would protect all pages, whatever the query says.
pub fn scan(fd: &Fd, range: Range, query: Query, out: &mut [ScannedRange]) -> Result<(usize, u64)> {
    if query.flags & PROTECT != 0 && out.is_empty() {
        return Err(Errno(libc::EINVAL));
    }
    let mut arg = Arg {
        size: size_of::<Arg>() as u64,
        flags: query.flags,
        start: range.start,
        end: range.end,
        vec: if out.is_empty() { 0 } else { out.as_mut_ptr() as u64 },
        vec_len: out.len() as u64,
        category_inverted: query.inverted,
        category_mask: query.all_of,
        category_anyof_mask: query.any_of,
        return_mask: query.report,
        ..Arg::default()
    };
    // SAFETY: the kernel writes at most `vec_len` ranges into `out`, and the walk's end into `arg`.
    let count = unsafe { syscall!(libc::SYS_ioctl, fd.raw(), SCAN, core::ptr::from_mut(&mut arg)) }?;
    Ok((count, arg.walk_end))
}
