//! The fork sentinel: a word that differs between the process that made the arena and its forked children.
//!
//! A forked child has the same thread-local words and the same mapping as its
//! parent, so it would use its parent's thread records. Every lookup of a
//! thread's record therefore reads the sentinel first.

use super::Error;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

/// A page that children do not inherit (MADV_WIPEONFORK): it tells a forked process from the one that made the arena, even
/// after a raw fork system call.
///
/// Where the kernel cannot wipe pages, the page holds the id of the process that made the arena.
pub(super) struct ForkSentinel(*mut AtomicU64);

/// The word in the process that made the arena, if the kernel wipes the page in forked children.
const WIPED_ELSEWHERE: u64 = u64::MAX;

// SAFETY: the page is only read after creation, through an atomic.
unsafe impl Send for ForkSentinel {}

// SAFETY: after creation all threads only read the page, through an atomic.
unsafe impl Sync for ForkSentinel {}

impl ForkSentinel {
    pub(super) fn new() -> Result<ForkSentinel, Error> {
        // SAFETY: a fresh private page at an address the kernel chooses; the advice covers exactly that page.
        unsafe {
            let page = libc::mmap(
                std::ptr::null_mut(),
                4096,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            );
            if page == libc::MAP_FAILED {
                return Err(Error::Io(io::Error::last_os_error()));
            }
            let wiped = libc::madvise(page, 4096, libc::MADV_WIPEONFORK) == 0;
            let word = if wiped { WIPED_ELSEWHERE } else { u64::from(std::process::id()) };
            page.cast::<AtomicU64>().write(AtomicU64::new(word));
            Ok(ForkSentinel(page.cast()))
        }
    }

    /// Returns the sentinel's word, which is valid as long as `self`.
    pub(super) fn word(&self) -> *const AtomicU64 {
        self.0
    }

    /// Returns true if the word proves that this is the process that made the arena. If it does not,
    /// [`ForkSentinel::is_forked_child`] decides.
    #[inline(always)]
    pub(super) fn says_here(word: u64) -> bool {
        word == WIPED_ELSEWHERE
    }

    #[inline]
    pub(super) fn is_forked_child(&self) -> bool {
        // SAFETY: `new` mapped the page, and only `drop` unmaps it.
        match unsafe { (*self.0).load(Ordering::Relaxed) } {
            WIPED_ELSEWHERE => false,
            0 => true,
            maker => maker != u64::from(std::process::id()),
        }
    }
}

impl Drop for ForkSentinel {
    fn drop(&mut self) {
        // SAFETY: `new` mapped exactly this page; users of `word` keep the sentinel alive (`CachedThread::_sentinel`).
        unsafe { libc::munmap(self.0.cast(), 4096) };
    }
}
