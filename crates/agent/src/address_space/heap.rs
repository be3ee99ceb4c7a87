//! The heap, while pages of it are frozen.
//!
//! The C library's allocator gives the end of the heap back, and takes it again, by internal calls of brk(2), which are not
//! interposed and do not take the mapping lock. So while pages are frozen, the heap may end and begin anew, as fresh memory,
//! before the agent maps something there.
//!
//! The heap ends from its top downwards. So while pages of it are frozen, its last page is watched for being unmapped, by a
//! descriptor of its own: a thread that takes part of the heap away takes that page too, and then waits until the agent has
//! read the event. Before that, the agent unmaps what it has mapped beyond the new end, and only then can the heap grow
//! again. The kernel takes away what is mapped later together with the rest.

use crate::address_space::anonymous::watch_anonymous;
use crate::address_space::maps::pool_mappings;
use crate::state::{AGENT, ATTACHED, SHARED, is_lent};
use core::sync::atomic::{AtomicU64, Ordering};
use pagefold_os::fd::Fd;
use pagefold_os::raw::{Errno, Result};
use pagefold_os::uffd::{self, Uffd};
use pagefold_os::{PAGE_SIZE, Range, mem, stat, syscall};

const PAGE: u64 = PAGE_SIZE as u64;

/// Length of the heap's end that is left alone: the allocator gives back and takes again more than this at a time
/// (`M_TOP_PAD`, `M_TRIM_THRESHOLD`).
const END_LEN: u64 = 128 << 10;
/// The least heap of which anything is managed: a smaller one is the bookkeeping of a program, seldom equal and always in
/// use.
const SIZE_MIN: u64 = 1 << 20;

/// Where the heap begins, and the furthest that it was seen to reach; 0 before it was looked at.
static START: AtomicU64 = AtomicU64::new(0);
static FURTHEST: AtomicU64 = AtomicU64::new(0);

/// Looks how far the heap reaches, before memory is listed: what is never listed is never frozen.
pub(crate) fn look() {
    if START.load(Ordering::Relaxed) == 0 {
        // Without its begin all below the end counts as heap: that is slower, and right.
        START.store(begin().unwrap_or(PAGE), Ordering::Relaxed);
    }
    FURTHEST.fetch_max(end(), Ordering::Relaxed);
}

/// Where what is managed of the heap ends: its own end comes and goes, and a small heap is left alone.
pub(crate) fn managed_end() -> u64 {
    let (start, end) = (START.load(Ordering::Relaxed), end());
    if end.saturating_sub(start) < SIZE_MIN { start } else { end - END_LEN }
}

/// Where the heap ends now, in whole pages.
fn end() -> u64 {
    // SAFETY: asks only, for no heap ends at 0.
    let end = unsafe { syscall!(libc::SYS_brk, 0) }.unwrap_or(0) as u64;
    end.next_multiple_of(PAGE)
}

/// Where the kernel began the heap, from the 47th field of /proc/thread-self/stat.
fn begin() -> Option<u64> {
    let file = Fd::open(c"/proc/thread-self/stat", libc::O_RDONLY, 0).ok()?;
    let mut text = [0u8; 1024];
    let got = file.read(&mut text).ok()?;
    let start: u64 = stat::field(text.get(..got)?, 47)?.parse().ok()?;
    (start > 0).then_some(start & !(PAGE - 1))
}

/// Watches the end of the heap.
pub(crate) struct HeapEnd {
    uffd: Uffd,
}

/// The page that is watched while something of the heap is frozen.
pub(crate) struct WatchedEnd {
    page: Range,
    /// It was among the pages that are watched for writes.
    managed: bool,
}

impl HeapEnd {
    pub(crate) fn new(device: Option<&Fd>) -> Result<HeapEnd> {
        // Registered for asynchronous write protection, in which no thread waits.
        let features = uffd::FEATURE_EVENT_UNMAP | uffd::FEATURE_PAGEFAULT_FLAG_WP | uffd::FEATURE_WP_ASYNC;
        Ok(HeapEnd { uffd: Uffd::new(device, features)? })
    }

    /// Call before anything of `range` is frozen, and [`let_go`](Self::let_go) after the last mapping was made there; the
    /// mapping lock is held. Nothing if no heap was ever there.
    ///
    /// # Errors
    /// If the heap ends in `range` or right behind it, or its last page is another descriptor's: nothing of it can be
    /// frozen now.
    pub(crate) fn watch_end(&self, range: Range, watch: &Uffd) -> Result<Option<WatchedEnd>> {
        if ATTACHED {
            // No thread of the program runs meanwhile.
            return Ok(None);
        }
        let (start, furthest) = (START.load(Ordering::Relaxed), FURTHEST.load(Ordering::Relaxed));
        if range.end <= start || range.start >= furthest {
            return Ok(None);
        }
        let page = Range { start: end().saturating_sub(PAGE), end: end() };
        if page.len() != PAGE || range.end > page.start {
            return Err(Errno(libc::EBUSY));
        }
        let mut watched = WatchedEnd { page, managed: false };
        let mut registered = self.uffd.register(page, uffd::MODE_WP);
        if registered == Err(Errno(libc::EBUSY)) && is_managed(page) {
            // The heap was longer when its end was last left out of what is managed.
            watch.unregister(page)?;
            watched.managed = true;
            registered = self.uffd.register(page, uffd::MODE_WP);
        }
        // A thread that shrank the heap earlier did so before anything was frozen.
        if registered.is_ok() && end() >= page.end {
            return Ok(Some(watched));
        }
        self.end(&watched, watch);
        Err(registered.err().unwrap_or(Errno(libc::EBUSY)))
    }

    /// Unmaps what lies in `range` beyond the end that the heap has got since [`watch_end`](Self::watch_end), and wakes the
    /// waiting threads; true if there was any.
    pub(crate) fn unwatch_end(&self, watched: &WatchedEnd, range: Range, watch: &Uffd) -> bool {
        // A thread that ends the heap from here on unmaps what the agent has mapped.
        let ended = self.is_ending(watched.page);
        let gone = Range { start: range.start.max(end()), end: range.end };
        let lost = ended && gone.start < gone.end;
        if lost {
            // SAFETY: the program gave the range back, and the thread that did so still waits in the kernel, so the range is
            // not in use.
            let _ = unsafe { mem::unmap(gone.start, gone.len()) };
        }
        self.end(watched, watch);
        lost
    }

    fn end(&self, watched: &WatchedEnd, watch: &Uffd) {
        let _ = self.uffd.unregister(watched.page);
        // No new thread waits, but one may already have reported the end to the kernel, and its event is not readable yet.
        while self.is_ending(watched.page) {
            if !matches!(self.uffd.read_event(), Ok(Some(_))) {
                // SAFETY: the call takes no arguments.
                let _ = unsafe { syscall!(libc::SYS_sched_yield) };
            }
        }
        if watched.managed {
            let _ = watch_anonymous(watch, watched.page);
        }
    }

    /// Returns true from the moment in which a thread unmaps the page until it goes on after that. In between the kernel
    /// answers every request with `EAGAIN`. Otherwise it refuses this one too, because the page is not a file's, but with
    /// another error.
    fn is_ending(&self, page: Range) -> bool {
        self.uffd.map_cached(page, 0).1 == Some(Errno(libc::EAGAIN))
    }
}

/// True if it can only be our own descriptor for writes that has `page`.
fn is_managed(page: Range) -> bool {
    let held = SHARED.mapping_lock.lock(AGENT);
    !is_lent() && !SHARED.tables(&held).table.at(page.start).tracked && pool_mappings(page, |_, _| true) == Ok(false)
}
