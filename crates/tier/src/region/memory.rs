//! The memory of a region: where each page is, how it goes out, and how it comes back.
//!
//! | state | the page is | the tier has | who changes it |
//! |---|---|---|---|
//! | here | here, or never was | nothing | anybody |
//! | back | here | an old entry, discarded by the next `park`, `cool` or `unpark` | anybody |
//! | frozen | in the parker's hands | | the parker |
//! | out | in the tier | its entry | anybody |
//! | busy | in the hands of a thread that brings it or zeros | as before | that thread |
//!
//! Entries are stored and discarded by who holds `parking` only, never in the
//! handler, where nothing may be freed.
//!
//! Here are the states and who may change them; `out` takes pages away, `back` brings them, `hand` helps with it, `handle` makes it all.

mod back;
mod hand;
mod handle;
mod out;

use super::decoder::Patience;
use super::{RegionError, RegionStats};
use crate::index;
use crate::stats::Stats;
use crate::tier::Tier;
pub(super) use handle::Handle;
use pagefold_os::fd::Fd;
use pagefold_os::mem::{self, Mapping};
use pagefold_os::signal::Blocked;
use pagefold_os::sync::lock;
use pagefold_os::uffd::Uffd;
use pagefold_os::{PAGE_SIZE, Range as Addresses};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

const HERE: u8 = 0;
const BACK: u8 = 1;
const FROZEN: u8 = 2;
const OUT: u8 = 3;
const BUSY: u8 = 4;

/// Pages whose missing mode is switched together: absent pages cost a fault of ours only where some are out.
const CHUNK: usize = 512;
/// Pages copied and stored at once.
const BATCH: usize = 256;
/// Pages frozen at once: how long an access waits for a comparison.
const FREEZE: usize = 64;
/// The region's number in its tier.
const REGION: u32 = 1;

#[derive(Debug, Default)]
struct Counters {
    out: AtomicU64,
    parked: AtomicU64,
    back: AtomicU64,
    faults: AtomicU64,
    fault_ns: AtomicU64,
    by_hand: AtomicU64,
    zero_faults: AtomicU64,
    unreadable: AtomicU64,
}

/// Pages `first..end` stay here.
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

/// What the parker has.
#[derive(Debug)]
struct Parking {
    staging: Mapping,
    copies_fd: Fd,
    copies: Mapping,
    pagemap: Fd,
    /// In missing mode.
    missing: Vec<bool>,
    /// Strikes and age of each page, made by the first `cool`.
    ages: Option<Mapping>,
}

/// A region, shared by its handles and found by the handler.
#[derive(Debug)]
pub(super) struct Shared {
    memory: Mapping,
    states: Mapping,
    /// One byte that is 1 in this process and 0 in a child.
    ours: Mapping,
    uffd: Uffd,
    tier: Tier,
    index: Arc<index::Region>,
    counters: Counters,
    /// One past the last page that a fault brought, and how many it brought.
    window_end: AtomicU64,
    window_pages: AtomicU64,
    offer: hand::Offer,
    /// A page that was here when it faulted, and how often in a row: see [`back::STUCK_MAX`].
    stuck: AtomicU64,
    closed: AtomicBool,
    parking: Mutex<Parking>,
    pins: Mutex<Pins>,
}

/// A mapping of our own: a child does not have it.
fn own(len: usize) -> Result<Mapping, RegionError> {
    let map = Mapping::anonymous(len).map_err(RegionError::Memory)?;
    // SAFETY: changes no bytes.
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
        // SAFETY: a byte of the mapping, as just checked, only ever used as an atomic.
        unsafe { AtomicU8::from_ptr(self.states.as_ptr().add(page)) }
    }

    fn addr(&self, page: usize) -> u64 {
        self.memory.addr() + (page * PAGE_SIZE) as u64
    }

    fn addresses(&self, pages: &Range<usize>) -> Addresses {
        Addresses { start: self.addr(pages.start), end: self.addr(pages.end) }
    }

    /// False in a child of a fork: our descriptor is the parent's memory, our mappings are not there, and a lock may be
    /// held by a thread that is not there either.
    pub(super) fn is_ours(&self) -> bool {
        // SAFETY: one byte of our own mapping.
        unsafe { self.ours.as_ptr().read_volatile() == 1 }
    }

    /// The region is dropped; other handles may be left.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.offer.ring();
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
            pages_back: get(&counters.back),
            faults: get(&counters.faults),
            fault_ns: get(&counters.fault_ns),
            pages_by_hand: get(&counters.by_hand),
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
        let mut patience = Patience::default();
        while matches!(self.state(page).load(Ordering::Acquire), BUSY | FROZEN) {
            patience.wait();
        }
    }

    /// Takes a page into the parker's hands; what it was.
    fn take(&self, page: usize) -> u8 {
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

    /// Discards the old entries of pages that came back.
    fn sweep(&self, pages: Range<usize>) {
        let swept =
            |page: &usize| self.state(*page).compare_exchange(BACK, HERE, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        for_runs(pages.filter(swept), usize::MAX, |run| {
            self.tier.discard(REGION, run.start as u64..run.end as u64);
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

    /// Whoever held a lock of the tier is not there to give it back.
    #[test]
    fn a_child_waits_for_no_lock_of_the_tier() {
        let Some(mut region) = region(2 * PAGE_SIZE) else { return };
        let shared = region.shared.clone();
        let held = shared.tier.regions.write().unwrap();
        // By a bare call: fork(3) would wait for locks of other threads, too. Without a signal: tests of the keeper have
        // this process ignore those of children, which are nobody's then.
        // SAFETY: the child works on its copies, allocates nothing, and ends.
        let child = unsafe { libc::syscall(libc::SYS_clone, 0, 0, 0, 0, 0) } as i32;
        if child == 0 {
            let _ = (region.tier_stats(), region.stats());
            region.discard(1..2 * PAGE_SIZE);
            // SAFETY: ends this process at once.
            unsafe { libc::_exit(0) };
        }
        drop(held);
        let mut status = -1;
        // SAFETY: our own child.
        let mut wait = |flags| unsafe { libc::waitpid(child, &raw mut status, libc::__WALL | flags) };
        let has_ended = (0..6000).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(10));
            wait(libc::WNOHANG) == child
        });
        if !has_ended {
            // SAFETY: our own child, which waits with its signals blocked.
            unsafe { libc::kill(child, libc::SIGKILL) };
            wait(0);
        }
        assert_eq!(status, 0);
    }
}
