//! Memory mappings of the calling process.

use crate::raw::Result;
use crate::{PAGE_SIZE, syscall};
use core::sync::atomic::{AtomicU64, Ordering};

/// Where the next mapping is asked for that may lie anywhere; 0 for the kernel's choice.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// Where what is mapped apart lies: below all that the kernel gives by itself.
const APART: core::ops::Range<u64> = 0x0800_0000_0000..0x1000_0000_0000;

/// Keeps the mappings of this process that are made by [`Mapping`] apart from those that others make, by `random`: the
/// kernel puts them into holes, and a program may know of a hole of its own where it wants something later.
pub fn keep_apart(random: u64) {
    let room = (APART.end - APART.start) / 2;
    NEXT.store(APART.start + random % room / PAGE_SIZE as u64 * PAGE_SIZE as u64, Ordering::Relaxed);
}

/// A wish where `len` bytes are to lie, if [`keep_apart`] was called; where something is already the kernel chooses. None
/// touches another, and what can have huge pages begins with one.
pub fn wish(len: u64) -> u64 {
    const HUGE: u64 = 2 << 20;
    let begin = |at: u64| if len >= HUGE { at.next_multiple_of(HUGE) } else { at };
    let next = |at: u64| match begin(at) + len + PAGE_SIZE as u64 {
        _ if at == 0 => None,
        next if next < APART.end => Some(next),
        _ => Some(APART.start),
    };
    NEXT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).map_or(0, begin)
}

/// Maps memory as mmap(2) and returns its address.
///
/// # Errors
/// As mmap(2).
///
/// # Safety
/// With `MAP_FIXED` whatever was mapped at `addr` is gone: nothing may refer to it.
pub unsafe fn map(addr: u64, len: u64, prot: i32, flags: i32, fd: i32, offset: u64) -> Result<u64> {
    // SAFETY: passed on to the caller.
    unsafe { syscall!(libc::SYS_mmap, addr, len, prot, flags, fd, offset) }.map(|addr| addr as u64)
}

/// Unmaps `len` bytes at `addr`.
///
/// # Errors
/// As munmap(2).
///
/// # Safety
/// Nothing may refer to the range afterwards.
pub unsafe fn unmap(addr: u64, len: u64) -> Result<()> {
    // SAFETY: passed on to the caller.
    unsafe { syscall!(libc::SYS_munmap, addr, len) }.map(drop)
}

/// Moves a mapping as mremap(2) and returns its new address.
///
/// # Errors
/// As mremap(2).
///
/// # Safety
/// Nothing may refer to the old range, nor, with `MREMAP_FIXED`, to what was at `new_addr`.
pub unsafe fn remap(addr: u64, len: u64, new_len: u64, flags: i32, new_addr: u64) -> Result<u64> {
    // SAFETY: passed on to the caller.
    unsafe { syscall!(libc::SYS_mremap, addr, len, new_len, flags, new_addr) }.map(|addr| addr as u64)
}

/// Rights of memory that a program reads and writes.
pub const READ_WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;
/// Rights of memory that it also executes.
pub const READ_WRITE_EXECUTE: i32 = READ_WRITE | libc::PROT_EXEC;

/// Advice that makes a huge page of the memory there at once, whatever the settings for transparent ones are; Linux 6.1.
pub const MADV_COLLAPSE: i32 = 25;
/// Advice that makes every access to a range a fault, and its end; Linux 6.13, for files' pages 6.15.
pub const MADV_GUARD_INSTALL: i32 = 102;
/// See [`MADV_GUARD_INSTALL`]. The pages read zero afterwards.
pub const MADV_GUARD_REMOVE: i32 = 103;

/// Gives advice about a range as madvise(2).
///
/// # Errors
/// As madvise(2).
///
/// # Safety
/// Advice that discards (`MADV_DONTNEED` and its like) changes what the range reads.
pub unsafe fn advise(addr: u64, len: u64, advice: i32) -> Result<()> {
    // SAFETY: passed on to the caller.
    unsafe { syscall!(libc::SYS_madvise, addr, len, advice) }.map(drop)
}

/// Sets the protection of a range as mprotect(2).
///
/// # Errors
/// As mprotect(2).
///
/// # Safety
/// Later accesses that the protection forbids are fatal.
pub unsafe fn protect(addr: u64, len: u64, prot: i32) -> Result<()> {
    // SAFETY: passed on to the caller.
    unsafe { syscall!(libc::SYS_mprotect, addr, len, prot) }.map(drop)
}

/// A private or shared mapping that is unmapped when dropped.
#[derive(Debug)]
pub struct Mapping {
    addr: u64,
    len: u64,
}

// SAFETY: a mapping is plain memory of the process; what threads do to it is up to the users of its address.
unsafe impl Send for Mapping {}
// SAFETY: the value holds an address and a length, and no method changes them.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of private anonymous memory, never on huge pages.
    ///
    /// # Errors
    /// As mmap(2).
    pub fn anonymous(len: usize) -> Result<Mapping> {
        let len = len.next_multiple_of(PAGE_SIZE) as u64;
        // SAFETY: the kernel chooses a free range.
        let addr = unsafe {
            map(wish(len), len, READ_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE, -1, 0)
        }?;
        // SAFETY: the range is ours; the advice discards nothing. Kernels without huge pages refuse it, which is as good.
        let _ = unsafe { advise(addr, len, libc::MADV_NOHUGEPAGE) };
        Ok(Mapping { addr, len })
    }

    /// Maps `len` bytes of `fd` from `offset` with `prot` and `flags`.
    ///
    /// # Errors
    /// As mmap(2).
    pub fn file(fd: i32, offset: u64, len: usize, prot: i32, flags: i32) -> Result<Mapping> {
        let len = len.next_multiple_of(PAGE_SIZE) as u64;
        // SAFETY: without MAP_FIXED the kernel chooses a free range.
        let addr = unsafe { map(wish(len), len, prot, flags & !libc::MAP_FIXED, fd, offset) }?;
        Ok(Mapping { addr, len })
    }

    /// As [`file`](Self::file) from offset 0, at an address that is a multiple of `align` (a power of two, in bytes).
    ///
    /// # Errors
    /// As mmap(2).
    pub fn file_aligned(fd: i32, len: usize, prot: i32, flags: i32, align: usize) -> Result<Mapping> {
        let (len, align) = (len.next_multiple_of(PAGE_SIZE) as u64, align as u64);
        let room = len + align;
        let reserve = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: the kernel chooses a free range.
        let start = unsafe { map(0, room, libc::PROT_NONE, reserve, -1, 0) }?;
        let addr = start.next_multiple_of(align);
        // SAFETY: all of it lies in the range that was just reserved.
        let mapped = unsafe { map(addr, len, prot, flags | libc::MAP_FIXED, fd, 0) };
        let (before, after) = (addr - start, start + room - addr - len);
        if before > 0 {
            // SAFETY: the unused part of the reservation just made above; no address of it has been given out.
            let _ = unsafe { unmap(start, before) };
        }
        // SAFETY: the part of the reservation after the mapping; no address of it has been given out.
        let _ = unsafe { unmap(addr + len, after) };
        if let Err(errno) = mapped {
            // SAFETY: the part of the reservation that could not be mapped; no address of it has been given out.
            let _ = unsafe { unmap(addr, len) };
            return Err(errno);
        }
        Ok(Mapping { addr, len })
    }

    /// First address.
    pub const fn addr(&self) -> u64 {
        self.addr
    }

    /// Length in bytes.
    pub const fn len(&self) -> usize {
        self.len as usize
    }

    /// True if nothing is mapped.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// First address as a pointer.
    pub const fn as_ptr(&self) -> *mut u8 {
        self.addr as *mut u8
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping, and its address is not used after its life.
        let _ = unsafe { unmap(self.addr, self.len) };
    }
}
