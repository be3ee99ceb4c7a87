//! The heap, while pages of it are in our hands.
//!
//! The C library's allocator gives the end of the heap back, and takes it again, by brk(2) from within: no interposed call
//! shows it and no guard holds it up. So where pages are frozen the heap may end and begin anew, as fresh memory, before we
//! map something there.
//!
//! The heap ends from its top downwards. So while pages of it are frozen its last page is watched for being unmapped, by a
//! descriptor for nothing else: who takes part of the heap away takes that page too, and then waits until we have read
//! that. What was mapped meanwhile where no heap is any more is unmapped again before, and the heap can grow behind that
//! only. What is mapped later the kernel takes away with the rest.

use crate::address_space::anonymous::watch_plain;
use crate::address_space::maps::pool_mappings;
use crate::state::{AGENT, SHARED, is_leased};
use core::sync::atomic::{AtomicU64, Ordering};
use pagefold_os::fd::Fd;
use pagefold_os::raw::{Errno, Result};
use pagefold_os::uffd::{self, Uffd};
use pagefold_os::{PAGE_SIZE, Range, mem, stat, syscall};

const PAGE: u64 = PAGE_SIZE as u64;

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
pub(crate) struct Heap {
    uffd: Uffd,
}

/// The page that is watched while something of the heap is frozen.
pub(crate) struct Watched {
    page: Range,
    /// It was among the pages that are watched for writes.
    managed: bool,
}

impl Heap {
    pub(crate) fn new(device: Option<&Fd>) -> Result<Heap> {
        // Registered for writes that nobody waits for.
        let features = uffd::FEATURE_EVENT_UNMAP | uffd::FEATURE_PAGEFAULT_FLAG_WP | uffd::FEATURE_WP_ASYNC;
        Ok(Heap { uffd: Uffd::new(device, features)? })
    }

    /// Call before anything of `range` is frozen, and [`let_go`](Self::let_go) after the last mapping was made there; the
    /// guard is held. Nothing if no heap was ever there.
    ///
    /// # Errors
    /// If the heap ends in `range` or right behind it, or its last page is another descriptor's: nothing of it can be
    /// frozen now.
    pub(crate) fn hold(&self, range: Range, watch: &Uffd) -> Result<Option<Watched>> {
        let (start, furthest) = (START.load(Ordering::Relaxed), FURTHEST.load(Ordering::Relaxed));
        if range.end <= start || range.start >= furthest {
            return Ok(None);
        }
        let page = Range { start: end().saturating_sub(PAGE), end: end() };
        if page.len() != PAGE || range.end > page.start {
            return Err(Errno(libc::EBUSY));
        }
        let mut watched = Watched { page, managed: false };
        let mut registered = self.uffd.register(page, uffd::MODE_WP);
        if registered == Err(Errno(libc::EBUSY)) && is_managed(page) {
            // The heap was longer when its end was last left out of what is managed.
            watch.unregister(page)?;
            watched.managed = true;
            registered = self.uffd.register(page, uffd::MODE_WP);
        }
        // Whoever shrank it before did so before anything was frozen.
        if registered.is_ok() && end() >= page.end {
            return Ok(Some(watched));
        }
        self.end(&watched, watch);
        Err(registered.err().unwrap_or(Errno(libc::EBUSY)))
    }

    /// Unmaps what lies in `range` where the heap has ended since [`hold`](Self::hold), and lets those go on who wait;
    /// true if there was any.
    pub(crate) fn let_go(&self, watched: &Watched, range: Range, watch: &Uffd) -> bool {
        // Who ends the heap from here on meets what we have mapped.
        let ended = self.is_ending(watched.page);
        let gone = Range { start: range.start.max(end()), end: range.end };
        let lost = ended && gone.start < gone.end;
        if lost {
            // SAFETY: the program gave the range back, and who did waits; so nobody can have it again yet.
            let _ = unsafe { mem::unmap(gone.start, gone.len()) };
        }
        self.end(watched, watch);
        lost
    }

    fn end(&self, watched: &Watched, watch: &Uffd) {
        let _ = self.uffd.unregister(watched.page);
        // Nobody comes any more; who came has told the kernel, but perhaps not yet us.
        while self.is_ending(watched.page) {
            if !matches!(self.uffd.read_event(), Ok(Some(_))) {
                // SAFETY: takes nothing.
                let _ = unsafe { syscall!(libc::SYS_sched_yield) };
            }
        }
        if watched.managed {
            let _ = watch_plain(watch, watched.page);
        }
    }

    /// True from the moment in which somebody unmaps the page until he goes on behind that. The kernel answers no request
    /// in between; this one it refuses anyhow, for the page is no file's.
    fn is_ending(&self, page: Range) -> bool {
        self.uffd.map_cached(page, 0).1 == Some(Errno(libc::EAGAIN))
    }
}

/// True if it can only be our own descriptor for writes that has `page`.
fn is_managed(page: Range) -> bool {
    let held = SHARED.guard.lock(AGENT);
    !is_leased() && !SHARED.tables(&held).table.at(page.start).tracked && pool_mappings(page, |_, _| true) == Ok(false)
}
