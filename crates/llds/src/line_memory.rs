//! The memory of the lock-free structures: one range of cache lines, reserved once, with pages that come at the first
//! touch.
//!
//! Lines are named by number, never by address, so the same memory works at any address and at several
//! addresses at the same time. It is never unmapped while its owner lives: a read of a released line
//! gives zeros, and the structures treat a zero control word as "gone".

use crate::primitive::AtomicU64;
use std::io;

/// Bytes in a line.
pub(crate) const LINE_BYTES: usize = 64;
#[cfg(not(any(loom, miri)))]
const HUGE_BYTES: usize = 2 << 20;

/// A mapping of lines.
pub(crate) struct LineMemory {
    #[cfg(not(loom))]
    base: *mut AtomicU64,
    #[cfg(loom)]
    words: Vec<AtomicU64>,
    lines: u64,
}

// SAFETY: the memory is not bound to a thread; it is accessed only through atomics and unmapped only by Drop.
#[cfg(not(loom))]
unsafe impl Send for LineMemory {}
// SAFETY: the memory is accessed only through atomics and unmapped only by Drop.
#[cfg(not(loom))]
unsafe impl Sync for LineMemory {}

#[cfg(not(loom))]
impl LineMemory {
    /// Reserves address space for `lines` lines of zeros. Physical memory comes with the first
    /// touch; after the first 2 MiB in huge pages, if `huge` is set and the system has them.
    #[cfg(not(miri))]
    pub(crate) fn reserve(lines: u64, huge: bool) -> io::Result<Self> {
        let bytes = lines as usize * LINE_BYTES;
        // One huge page more, so that the base can be aligned to it.
        let padded = bytes + HUGE_BYTES;
        // SAFETY: a fresh private mapping at an address of the kernel's choice overlaps no other memory.
        let raw = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                padded,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if raw == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = raw as usize;
        let aligned = start.next_multiple_of(HUGE_BYTES);
        // SAFETY: both ranges are the unused ends of the mapping made above.
        unsafe {
            if aligned > start {
                libc::munmap(raw, aligned - start);
            }
            if aligned + bytes < start + padded {
                libc::munmap((aligned + bytes) as *mut libc::c_void, start + padded - aligned - bytes);
            }
        }
        let memory = Self { base: aligned as *mut AtomicU64, lines };
        // An index must not become a candidate for page merging itself, and a core dump of terabytes is useless.
        // A kernel without huge pages refuses the last advice, which is harmless.
        // SAFETY: the range is the mapping made above; none of these advices changes its content.
        unsafe {
            libc::madvise(raw_at(aligned), bytes, libc::MADV_UNMERGEABLE);
            libc::madvise(raw_at(aligned), bytes, libc::MADV_DONTDUMP);
            let advice = if huge { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE };
            if bytes > HUGE_BYTES {
                libc::madvise(raw_at(aligned + HUGE_BYTES), bytes - HUGE_BYTES, advice);
            }
        }
        Ok(memory)
    }

    /// Miri has no pages that come at the first touch: it holds all lines, so they are few.
    #[cfg(miri)]
    pub(crate) fn reserve(lines: u64, _huge: bool) -> io::Result<Self> {
        if lines > MIRI_LINES_MAX {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        // SAFETY: no structure has no lines.
        let base = unsafe { std::alloc::alloc_zeroed(layout(lines)) };
        Ok(Self { base: base.cast(), lines })
    }

    /// Maps `lines` lines of a file that is long enough, shared with all other mappings of it.
    pub(crate) fn map(file: std::os::fd::BorrowedFd<'_>, lines: u64) -> io::Result<Self> {
        use std::os::fd::AsRawFd;
        // SAFETY: a fresh mapping at an address of the kernel's choice overlaps no other memory.
        let raw = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                lines as usize * LINE_BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_NORESERVE,
                file.as_raw_fd(),
                0,
            )
        };
        if raw == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { base: raw.cast(), lines })
    }

    /// Returns word `index` from the start of a line: one of its eight words, or one of a later line.
    #[inline(always)]
    pub(crate) fn word(&self, line: u64, index: usize) -> &AtomicU64 {
        debug_assert!(line + (index as u64) / 8 < self.lines, "line {line}, word {index}, of {} lines", self.lines);
        // SAFETY: callers derive line and index from the structure's geometry, so the word lies in the mapping (checked
        // in debug builds), which lives as long as `self`; fresh pages are zeros, which are valid atomics, and all
        // accesses go through atomics.
        unsafe { &*self.base.add(line as usize * 8 + index) }
    }

    /// Prefetches a line.
    #[inline(always)]
    pub(crate) fn prefetch(&self, line: u64) {
        debug_assert!(line < self.lines);
        crate::prefetch(self.base.wrapping_add(line as usize * 8));
    }

    /// Gives the lines' memory back to the system; they read as zeros from now on.
    #[cfg(not(miri))]
    pub(crate) fn release(&self, lines: std::ops::Range<u64>) {
        debug_assert!(lines.end <= self.lines);
        let start = self.base as usize + lines.start as usize * LINE_BYTES;
        let bytes = (lines.end - lines.start) as usize * LINE_BYTES;
        // SAFETY: the range lies in the mapping; the structures release only lines that no thread can write any more, and
        // their readers treat a zero control word as "gone".
        unsafe {
            // REMOVE punches the hole in a shared file; on private memory it is refused and DONTNEED does it.
            if libc::madvise(raw_at(start), bytes, libc::MADV_REMOVE) != 0 {
                libc::madvise(raw_at(start), bytes, libc::MADV_DONTNEED);
            }
        }
    }
}

#[cfg(not(any(loom, miri)))]
fn raw_at(address: usize) -> *mut libc::c_void {
    address as *mut libc::c_void
}

/// Lines of the largest structure under miri.
#[cfg(miri)]
const MIRI_LINES_MAX: u64 = 1 << 17;

#[cfg(miri)]
fn layout(lines: u64) -> std::alloc::Layout {
    std::alloc::Layout::array::<[u8; LINE_BYTES]>(lines as usize).unwrap().align_to(LINE_BYTES).unwrap()
}

#[cfg(not(loom))]
impl Drop for LineMemory {
    fn drop(&mut self) {
        // SAFETY: `reserve` has allocated the lines, and references into them borrow `self`.
        #[cfg(miri)]
        unsafe {
            std::alloc::dealloc(self.base.cast(), layout(self.lines));
        }
        // SAFETY: `reserve` or `map` made the mapping; references into it borrow `self`, so none is left.
        #[cfg(not(miri))]
        unsafe {
            libc::munmap(self.base.cast(), self.lines as usize * LINE_BYTES);
        }
    }
}

#[cfg(any(loom, miri))]
impl LineMemory {
    pub(crate) fn release(&self, lines: std::ops::Range<u64>) {
        for line in lines {
            for index in 0..8 {
                self.word(line, index).store(0, crate::primitive::Ordering::Relaxed);
            }
        }
    }
}

#[cfg(loom)]
impl LineMemory {
    pub(crate) fn reserve(lines: u64, _huge: bool) -> io::Result<Self> {
        Ok(Self { words: (0..lines * 8).map(|_| AtomicU64::new(0)).collect(), lines })
    }

    pub(crate) fn word(&self, line: u64, index: usize) -> &AtomicU64 {
        &self.words[line as usize * 8 + index]
    }

    pub(crate) fn prefetch(&self, _line: u64) {}
}

impl LineMemory {
    /// How many lines there are.
    pub(crate) fn lines(&self) -> u64 {
        self.lines
    }
}
