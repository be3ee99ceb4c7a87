//! What the kernel reports of merged memory: discards by raw system calls, and accesses to pages that are not mapped.
//!
//! A thread waits for each answer, with or without the mapping lock, and with or without a daemon. So the agent also answers
//! while it waits for the mapping lock itself, and an answer may only try to take that lock.

use super::session::{Agent, PAGE};
use crate::address_space::anonymous::{keep_attributes, replace_merged};
use crate::address_space::discarded_ranges;
use crate::address_space::maps::Maps;
use crate::limits::HUGE_LEN;
use crate::mapping_lock::MappingLockGuard;
use crate::owned_ranges::is_in_nursery;
use crate::state::{AGENT, ATTACHED, SHARED};
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use pagefold_os::raw::Errno;
use pagefold_os::uffd::{self, Uffd};
use pagefold_os::{Range, mem, pagemap};
use pagefold_protocol::channel::AgentCounters;

/// How mappings of the pool are watched.
pub(crate) const HOLD_MODES: u64 = uffd::MODE_MISSING | uffd::MODE_MINOR | uffd::MODE_WP;

impl Agent {
    /// Takes the mapping lock; serves discards while waiting, for their callers may hold it.
    pub(crate) fn lock_mappings(&self) -> MappingLockGuard<'static> {
        let counters = self.counters();
        let held =
            SHARED.mapping_lock.lock_serving(AGENT, || serve_events(&self.hold, &self.maps, &self.watch, counters));
        apply_owed(&held);
        held
    }

    /// Watches merged pages for discards that no interposed call shows, and for writes.
    pub(crate) fn hold_pool(&self, range: Range) {
        // Missing mode never triggers, for every page of the file exists. Minor mode does for pages that are not mapped:
        // after a discard, or when the kernel took them back.
        self.register_pool(range, HOLD_MODES);
        // Only what is the file's page at that very moment: a private copy (the page was written already) stays as it is,
        // so that the daemon's next look finds it.
        let query = pagemap::Query { all_of: pagemap::MERGED, flags: pagemap::PROTECT, ..Default::default() };
        let _ = pagemap::protect(&self.pagemap, range, query);
    }

    /// Has the kernel tell us of discards in `range`, parts of which have just been mapped from the pool: before it is read
    /// in, and so before [`hold_pool`](Self::hold_pool), for in these modes it would be read in page by page, and by us.
    ///
    /// A part that already has all of [`HOLD_MODES`] refuses the narrower mode (`EBUSY`): it reports discards as it is.
    pub(crate) fn report_discards(&self, range: Range) {
        self.register_pool(range, uffd::MODE_MISSING);
    }

    /// Registers what shows the pool in `range`.
    fn register_pool(&self, range: Range, mode: u64) {
        if self.hold.register(range, mode).is_err() {
            // Something else lies there too, fresh memory where a discard was answered: the kernel takes all or nothing.
            let _ = self.maps.pools(range, |part, _| {
                let _ = self.hold.register(part, mode);
                false
            });
        }
    }

    /// Takes charge of the merged pages that are there already: an earlier agent's, or a parent's.
    pub(super) fn hold_merged(&self, is_new: bool) {
        let _held = self.lock_mappings();
        let everything = Range { start: 0, end: u64::MAX };
        let _ = self.maps.pools(everything, |part, _| {
            // Where a hold that was taken over has it already, a page that is not mapped would have us wait for ourselves.
            let comes = is_new && !discarded_ranges::overlap(part);
            if comes && part.end.saturating_sub(part.start.next_multiple_of(HUGE_LEN)) < HUGE_LEN {
                // SAFETY: reads the pages in; a page that is not mapped would only cost a fault that we answer.
                let _ = unsafe { mem::advise(part.start, part.len(), libc::MADV_POPULATE_READ) };
            } else if comes {
                self.register_pool(part, HOLD_MODES);
                self.map_as_pages(part);
            }
            self.hold_pool(part);
            self.remember_merged(part);
            false
        });
        SHARED.holds.store(true, Ordering::Release);
    }

    /// Maps what the page cache has for `part`, page by page: the first write to a huge page would split it, and then each
    /// of its pages would have to be mapped again. A thread that touches a page meanwhile waits for the end of a step at
    /// most.
    pub(crate) fn map_as_pages(&self, part: Range) {
        const ABSENT: pagemap::Query = pagemap::Query {
            all_of: pagemap::PRESENT,
            inverted: pagemap::PRESENT,
            report: pagemap::PRESENT,
            any_of: 0,
            flags: 0,
        };
        let mut step = Range { start: part.start, end: part.start };
        while step.end < part.end {
            step = Range { start: step.end, end: part.end.min(step.end + HUGE_LEN) };
            // A child has copies of the page tables where its parent had written anything.
            while !step.is_empty() {
                let mut found = [pagemap::ScannedRange::default()];
                let Ok((1, _)) = pagemap::scan(&self.pagemap, step, ABSENT, &mut found) else { break };
                let absent = Range { start: found[0].start, end: found[0].end };
                let (done, error) = self.hold.map_cached(absent, 0);
                // What does not come now, for it is there already or a discard is under way, comes when it is asked for.
                step.start = absent.start + done + if error.is_some() { PAGE } else { 0 };
            }
        }
    }

    /// Puts zeros where discarded pages are absent, before the agent stops answering faults there.
    pub(super) fn fill_discarded(&self) {
        self.serve_alone();
        // What is answered meanwhile reads our file of mappings.
        let maps = Maps::open();
        let maps = maps.as_ref().unwrap_or(&self.maps);
        discarded_ranges::for_each(maps, |void| discarded_ranges::fill(&self.hold, void, || self.serve_alone()));
    }

    /// Puts zeros where discarded pages are absent, so that the daemon's next look finds pages that are the program's own.
    pub(super) fn fill_what_was_discarded(&self) {
        discarded_ranges::for_each(&self.maps, |void| self.fill_absent(void));
    }

    /// Puts zeros where `void`, which was discarded, has no pages.
    pub(super) fn fill_absent(&self, void: Range) {
        const ABSENT: pagemap::Query = pagemap::Query {
            inverted: pagemap::PRESENT,
            all_of: pagemap::PRESENT,
            report: pagemap::PRESENT,
            any_of: 0,
            flags: 0,
        };
        // A discard leaves the mark of write protection, which the kernel reports as swapped out. What is in swap stays.
        let mut rest = void;
        while !rest.is_empty() {
            let mut found = [pagemap::ScannedRange::default()];
            let Ok((1, _)) = pagemap::scan(&self.pagemap, rest, ABSENT, &mut found) else { return };
            let absent = Range { start: found[0].start, end: found[0].end };
            discarded_ranges::fill(&self.hold, absent, || self.serve_alone());
            rest.start = absent.end;
        }
    }

    /// Answers what waits while there is no daemon.
    pub(crate) fn serve_alone(&self) {
        serve_each(&self.hold, |event| serve_event(&self.hold, &self.maps, None, None, event));
        SHARED.mapping_lock.try_lock(AGENT).iter().for_each(apply_owed);
    }

    /// Answers the faults and discards that wait.
    pub(crate) fn serve_event(&self, event: uffd::Event) {
        serve_event(&self.hold, &self.maps, Some(&self.watch), Some(self.counters()), event);
    }
}

/// Ranges that got fresh memory while another thread held the mapping lock, so that their attributes are owed. The agent's
/// thread adds at the end; a holder of the lock takes from the start.
static OWED: [[AtomicU64; 2]; OWED_MAX] = [const { [const { AtomicU64::new(0) }; 2] }; OWED_MAX];
const OWED_MAX: usize = 1 << 10;
/// How many were ever added, and taken.
static ADDED: AtomicUsize = AtomicUsize::new(0);
static TAKEN: AtomicUsize = AtomicUsize::new(0);
/// There were more: any memory may be owed its attributes.
static ALL_OWED: AtomicBool = AtomicBool::new(false);

fn owe_attributes(range: Range) {
    let added = ADDED.load(Ordering::Relaxed);
    if added - TAKEN.load(Ordering::Acquire) == OWED_MAX {
        return ALL_OWED.store(true, Ordering::Release);
    }
    let [start, end] = &OWED[added % OWED_MAX];
    start.store(range.start, Ordering::Relaxed);
    end.store(range.end, Ordering::Relaxed);
    ADDED.store(added + 1, Ordering::Release);
}

/// Puts attributes where they are owed. A handler may do so while its thread does.
pub(crate) fn apply_owed(held: &MappingLockGuard<'_>) {
    if ALL_OWED.swap(false, Ordering::AcqRel) {
        keep_attributes(Range { start: 0, end: u64::MAX }, SHARED.tables(held).table, false);
    }
    loop {
        let taken = TAKEN.load(Ordering::Acquire);
        if taken == ADDED.load(Ordering::Acquire) {
            return;
        }
        let [start, end] = &OWED[taken % OWED_MAX];
        let range = Range { start: start.load(Ordering::Relaxed), end: end.load(Ordering::Relaxed) };
        keep_attributes(range, SHARED.tables(held).table, true);
        let _ = TAKEN.compare_exchange(taken, taken + 1, Ordering::AcqRel, Ordering::Acquire);
    }
}

/// Answers what waits: discards of merged pages by raw system calls, and accesses to merged pages that are not mapped.
pub(super) fn serve_events(hold: &Uffd, maps: &Maps, watch: &Uffd, counters: &AgentCounters) {
    serve_each(hold, |event| serve_event(hold, maps, Some(watch), Some(counters), event));
}

/// Odd while an event may have been read that is not served.
static SERVED: AtomicUsize = AtomicUsize::new(0);

fn serve_each(hold: &Uffd, serve: impl Fn(uffd::Event)) {
    loop {
        SERVED.fetch_add(1, Ordering::AcqRel);
        let event = hold.read_event();
        let Ok(Some(event)) = event else {
            SERVED.fetch_add(1, Ordering::AcqRel);
            return;
        };
        serve(event);
        SERVED.fetch_add(1, Ordering::AcqRel);
    }
}

/// Waits until what is being served is: a discard returns as soon as its event was read. The mapping lock may be held.
#[cfg(feature = "preload")]
pub(crate) fn wait_served() {
    let at = SERVED.load(Ordering::Acquire);
    while at % 2 == 1 && SERVED.load(Ordering::Acquire) == at {
        crate::runtime::thread::yield_now();
    }
}

/// In a forked child: an event that the parent's thread was serving is never finished there.
#[cfg(feature = "preload")]
pub(crate) fn forget_served() {
    SERVED.store(0, Ordering::Release);
}

/// Answers one event.
///
/// The pages of a discarded range must read zero, so they become fresh memory. Until then no thread sees old bytes: merged
/// memory is registered in minor mode, for pages that only the page cache has. So a thread that touches a page just dropped
/// by the discard waits, and the agent reads that fault after it has answered the discard.
fn serve_event(hold: &Uffd, maps: &Maps, watch: Option<&Uffd>, counters: Option<&AgentCounters>, event: uffd::Event) {
    match event {
        uffd::Event::Remove(range) => {
            if let Some(counters) = counters {
                counters.discards.fetch_add(1, Ordering::Relaxed);
            }
            if ATTACHED {
                // Nothing is mapped here: by now another thread may have been given the addresses.
                let _ = maps.pools(range, |part, _| {
                    discarded_ranges::add(part);
                    false
                });
                let _ = hold.wake(range);
                return SHARED.changed();
            }
            // A thread that discards inside an interposed call holds the mapping lock and waits for this answer: the
            // attributes cannot be read then.
            let held = SHARED.mapping_lock.try_lock(AGENT);
            let table = held.as_ref().map(|held| &*SHARED.tables(held).table);
            let is_known = table.is_some();
            let replaced = replace_merged(maps, range, watch, table, |part, prot, errno| {
                // Of what is sealed the kernel discards only what may be written to; a mapping of the pool's it does not
                // know as such.
                if prot & libc::PROT_WRITE != 0 || errno != Errno(libc::EPERM) {
                    discarded_ranges::add(part);
                }
            });
            drop(held);
            if !is_known && replaced != Ok(false) {
                owe_attributes(range);
            }
            let _ = hold.wake(range);
            SHARED.changed();
        }
        uffd::Event::PageFault { addr, .. } => {
            let page = Range::pages_from(addr & !(PAGE - 1), 1);
            // The nursery, touched by a call that touches all memory: mlockall(2), or a debugger.
            if is_in_nursery(addr) {
                let _ = hold.zero(page, 0);
            }
            if discarded_ranges::answer(hold, page) {
                let _ = hold.wake(page);
                return;
            }
            // Whatever else this says (mapped already, another mapping by now, a discard under way), the access tries
            // again and finds out, or comes back to us.
            if hold.map_cached(page, 0).1 == Some(Errno(libc::EINVAL)) {
                // Plain memory, which has nothing cached: held by mistake, and nothing is frozen now. Where something is
                // there already it stays.
                let _ = hold.zero(page, 0);
            }
            let _ = hold.wake(page);
        }
        #[cfg(feature = "attached")]
        uffd::Event::Remap { from, to } => discarded_ranges::carry(from, to),
        #[cfg(feature = "attached")]
        uffd::Event::Fork(fd) => {
            crate::attached::adopt_child(fd, |fill| discarded_ranges::for_each(maps, fill));
        }
        // Not asked for.
        uffd::Event::Unmap(_) | uffd::Event::Other(_) => {}
        #[cfg(not(feature = "attached"))]
        uffd::Event::Remap { .. } | uffd::Event::Fork(_) => {}
    }
}
