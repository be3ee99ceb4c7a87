//! The sentinel: tells a forked child that it is not the process that made the arena.
//!
//! A child has the same thread-local words and the same mapping, and would sit
//! in its parent's seats. Whoever looks for his seat asks the sentinel first.

use super::Error;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

/// A page that is not inherited by children: it tells a forked process from the one that made the arena,
/// even when fork was called as a raw system call.
///
/// Where the kernel cannot do that, the page says which process made the arena.
pub(super) struct Sentinel(*mut AtomicU64);

/// What the page says in the process that made the arena, if the kernel wipes it in others.
const WIPED_ELSEWHERE: u64 = u64::MAX;

// SAFETY: the page is only read after creation, through an atomic.
unsafe impl Send for Sentinel {}

// SAFETY: as above.
unsafe impl Sync for Sentinel {}

impl Sentinel {
    pub(super) fn new() -> Result<Sentinel, Error> {
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
            Ok(Sentinel(page.cast()))
        }
    }

    /// The word that tells, which lives as long as this.
    pub(super) fn word(&self) -> *const AtomicU64 {
        self.0
    }

    /// Whether a word says that this is the process that made the arena. If not, [`Sentinel::is_wiped`] knows.
    #[inline(always)]
    pub(super) fn says_here(word: u64) -> bool {
        word == WIPED_ELSEWHERE
    }

    #[inline]
    pub(super) fn is_wiped(&self) -> bool {
        // SAFETY: the page lives as long as we do.
        match unsafe { (*self.0).load(Ordering::Relaxed) } {
            WIPED_ELSEWHERE => false,
            0 => true,
            maker => maker != u64::from(std::process::id()),
        }
    }
}

impl Drop for Sentinel {
    fn drop(&mut self) {
        // SAFETY: nobody else holds the page.
        unsafe { libc::munmap(self.0.cast(), 4096) };
    }
}
