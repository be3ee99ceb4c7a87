//! The memory of a region: the state of each page, its eviction, and its loading.
//!
//! | state | the page is | the tier holds | changed by |
//! |---|---|---|---|
//! | resident | resident, or never written | nothing | any thread |
//! | resident, stored | resident | an old entry, discarded by the next `park`, `park_idle` or `unpark` | any thread |
//! | frozen | being compared by the evicting thread | | that thread |
//! | evicted | in the tier | its entry | any thread |
//! | busy | being loaded, or filled with zeros, by a thread | as before | that thread |
//!
//! Only a thread that has `evict_state` locked stores and discards entries. The
//! handler never does, because it must not free memory.
//!
//! This file holds the states and their rules; `evict` evicts pages, `fault_in` loads them, `prefetcher` helps it, and
//! `handle` creates and drops a region.

mod evict;
mod fault_in;
pub(super) mod handle;
mod prefetcher;
mod shared_window;

use super::decoder::SpinBudget;
use super::report::{RegionError, RegionStats};
use crate::page_directory;
use crate::stats::Stats;
use crate::tier::Tier;
use pagefold_os::fd::Fd;
use pagefold_os::mem::{self, Mapping};
use pagefold_os::signal::Blocked;
use pagefold_os::sync::lock;
use pagefold_os::uffd::Uffd;
use pagefold_os::{PAGE_SIZE, Range as Addresses};
use shared_window::SharedWindow;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

const RESIDENT: u8 = 0;
const RESIDENT_STORED: u8 = 1;
const FROZEN: u8 = 2;
const EVICTED: u8 = 3;
const BUSY: u8 = 4;

/// Pages that switch to missing mode together, so that absent pages cost a userfault only near evicted ones.
const CHUNK: usize = 512;
/// Pages copied and stored together.
const BATCH: usize = 256;
/// Pages frozen together, which bounds how long an access waits for the comparison.
const FREEZE: usize = 64;
/// The region's client number in its tier.
const CLIENT: u32 = 1;

#[derive(Debug, Default)]
struct Counters {
    out: AtomicU64,
    parked: AtomicU64,
    loaded: AtomicU64,
    faults: AtomicU64,
    fault_ns: AtomicU64,
    prefetched: AtomicU64,
    zero_faults: AtomicU64,
    unreadable: AtomicU64,
}

/// Pages that stay resident.
#[derive(Debug)]
struct Pin {
    id: u64,
    pages: Range<usize>,
}

#[derive(Debug, Default)]
struct Pins {
    next: u64,
    all: Vec<Pin>,
}

/// The buffers and marks of eviction.
#[derive(Debug)]
struct EvictState {
    freeze_area: Mapping,
    copies_fd: Fd,
    copies: Mapping,
    pagemap: Fd,
    /// Whether each chunk is in missing mode.
    missing: Vec<bool>,
    /// Strikes and age of each page, allocated by the first `park_idle`.
    ages: Option<Mapping>,
}

/// A region, shared by its handles and the signal handler.
#[derive(Debug)]
pub(super) struct Shared {
    memory: Mapping,
    states: Mapping,
    /// One byte that is 1 in this process and 0 in a child.
    ours: Mapping,
    uffd: Uffd,
    tier: Tier,
    index: Arc<page_directory::ClientPages>,
    counters: Counters,
    /// One past the last page of the last fault's window, and the window's length.
    window_end: AtomicU64,
    window_pages: AtomicU64,
    window: SharedWindow,
    /// A page that was resident when it faulted, and how often in a row: see [`fault_in::STUCK_MAX`].
    stuck: AtomicU64,
    closed: AtomicBool,
    evict_state: Mutex<EvictState>,
    pins: Mutex<Pins>,
}

/// An anonymous mapping that a child of a fork does not have.
fn map_dontfork(len: usize) -> Result<Mapping, RegionError> {
    let map = Mapping::anonymous(len).map_err(RegionError::Memory)?;
    // SAFETY: the range is the new mapping; the advice does not change its bytes.
    unsafe { mem::advise(map.addr(), map.len() as u64, libc::MADV_DONTFORK) }.map_err(RegionError::Memory)?;
    Ok(map)
}

impl Shared {
    pub(super) fn memory(&self) -> &Mapping {
        &self.memory
    }

    fn pages(&self) -> usize {
        self.memory.len() / PAGE_SIZE
    }

    /// The pages that a range of bytes touches.
    pub(super) fn pages_of(&self, bytes: &Range<usize>) -> Range<usize> {
        let len = self.memory.len();
        assert!(bytes.start <= bytes.end && bytes.end <= len, "bytes {bytes:?} of a region of {len}");
        if bytes.is_empty() {
            return 0..0;
        }
        bytes.start / PAGE_SIZE..bytes.end.div_ceil(PAGE_SIZE)
    }

    fn state(&self, page: usize) -> &AtomicU8 {
        assert!(page < self.pages());
        // SAFETY: the assertion keeps the byte inside the mapping, and every access to it is atomic.
        unsafe { AtomicU8::from_ptr(self.states.as_ptr().add(page)) }
    }

    fn addr(&self, page: usize) -> u64 {
        self.memory.addr() + (page * PAGE_SIZE) as u64
    }

    fn addresses(&self, pages: &Range<usize>) -> Addresses {
        Addresses { start: self.addr(pages.start), end: self.addr(pages.end) }
    }

    /// Returns false in a child of a fork: there, the userfaultfd belongs to the parent's memory, the mappings do not exist,
    /// and a lock may be held by a thread of the parent.
    pub(super) fn is_ours(&self) -> bool {
        // SAFETY: the byte lies in the mapping `ours`, which a child has too, filled with zeros.
        unsafe { self.ours.as_ptr().read_volatile() == 1 }
    }

    /// Marks the region as dropped; other handles may still exist.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.window.wake_prefetchers();
    }

    fn usable(&self) -> bool {
        self.is_ours() && !self.closed.load(Ordering::Acquire)
    }

    pub(super) fn stats(&self) -> RegionStats {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.counters;
        let pinned = if !self.is_ours() {
            0
        } else {
            let _quiet = Blocked::all();
            lock(&self.pins).all.iter().map(|pin| pin.pages.len() as u64).sum()
        };
        RegionStats {
            pages: self.pages() as u64,
            pages_out: get(&counters.out),
            pages_parked: get(&counters.parked),
            pages_loaded: get(&counters.loaded),
            faults: get(&counters.faults),
            fault_ns: get(&counters.fault_ns),
            pages_prefetched: get(&counters.prefetched),
            zero_faults: get(&counters.zero_faults),
            pages_unreadable: get(&counters.unreadable),
            pages_pinned: pinned,
        }
    }

    pub(super) fn tier_stats(&self) -> Stats {
        if !self.is_ours() {
            return Stats::default();
        }
        let _quiet = Blocked::all();
        self.tier.stats()
    }

    fn wait_for(&self, page: usize) {
        let mut budget = SpinBudget::default();
        while matches!(self.state(page).load(Ordering::Acquire), BUSY | FROZEN) {
            budget.spin();
        }
    }

    /// Freezes a page; returns its state before.
    fn freeze_page(&self, page: usize) -> u8 {
        let state = self.state(page);
        loop {
            match state.load(Ordering::Acquire) {
                BUSY | FROZEN => self.wait_for(page),
                before => {
                    if state.compare_exchange(before, FROZEN, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                        return before;
                    }
                }
            }
        }
    }

    /// Discards the old entries of resident pages.
    fn sweep(&self, pages: Range<usize>) {
        let swept = |page: &usize| {
            self.state(*page).compare_exchange(RESIDENT_STORED, RESIDENT, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        for_runs(pages.filter(swept), usize::MAX, |run| {
            self.tier.discard(CLIENT, run.start as u64..run.end as u64);
        });
    }

    pub(super) fn pin(&self, pages: Range<usize>) -> u64 {
        if !self.is_ours() {
            return 0;
        }
        let _quiet = Blocked::all();
        let mut pins = lock(&self.pins);
        pins.next += 1;
        let id = pins.next;
        pins.all.push(Pin { id, pages });
        id
    }

    pub(super) fn unpin(&self, id: u64) {
        if self.is_ours() {
            let _quiet = Blocked::all();
            lock(&self.pins).all.retain(|pin| pin.id != id);
        }
    }
}

/// Calls `f` with runs of neighbours, each at most `max` long.
fn for_runs(pages: impl Iterator<Item = usize>, max: usize, mut f: impl FnMut(Range<usize>)) {
    let mut run = 0..0;
    for page in pages {
        if page == run.end && !run.is_empty() && run.len() < max {
            run.end += 1;
            continue;
        }
        if !run.is_empty() {
            f(run);
        }
        run = page..page + 1;
    }
    if !run.is_empty() {
        f(run);
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::region;
    use super::*;

    /// The thread that holds a lock of the tier does not exist in the child.
    #[test]
    fn a_child_waits_for_no_lock_of_the_tier() {
        let Some(mut region) = region(2 * PAGE_SIZE) else { return };
        let shared = region.shared.clone();
        let held = shared.tier.clients.write().unwrap();
        // By the raw call, because fork(3) would wait for locks of other threads. Without an exit signal, because tests of
        // the keeper ignore SIGCHLD in this process, and an ignored child cannot be waited for.
        // SAFETY: the child works on its copies, allocates nothing, and ends.
        let child = unsafe { libc::syscall(libc::SYS_clone, 0, 0, 0, 0, 0) } as i32;
        if child == 0 {
            let _ = (region.tier_stats(), region.stats());
            region.discard(1..2 * PAGE_SIZE);
            // SAFETY: _exit takes a number and ends the child.
            unsafe { libc::_exit(0) };
        }
        drop(held);
        let mut status = -1;
        // SAFETY: `status` outlives the call; `child` is this process's child.
        let mut wait = |flags| unsafe { libc::waitpid(child, &raw mut status, libc::__WALL | flags) };
        let has_ended = (0..6000).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(10));
            wait(libc::WNOHANG) == child
        });
        if !has_ended {
            // SAFETY: kill(2) takes no pointer; `child` is not reaped yet.
            unsafe { libc::kill(child, libc::SIGKILL) };
            wait(0);
        }
        assert_eq!(status, 0);
    }
}
