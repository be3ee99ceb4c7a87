//! The agent's thread: it answers the daemon's requests, one at a time.
//!
//! The thread is made by a raw clone(2): it shares the program's memory but has
//! its own table of descriptors, so the program neither sees our descriptors
//! nor closes them, and we hold none of its. It has no thread-local storage:
//! everything it calls must do without `errno`. It dies with the process and
//! with exec(2), both in the kernel's hands; it can never die alone, so pages
//! are never left in the staging area.
//!
//! The rooms: `life` is how it begins, is asked to leave and ends, `connect` how it greets a daemon and what it sets up for that,
//! `requests` what the daemon asks for, `events` what the kernel tells it of merged memory.

mod connect;
mod events;
mod life;
mod requests;

pub(crate) use connect::{REFUSED_MS, TAKEN_MS, is_lasting, wait_for_answer};
#[cfg(test)]
pub(crate) use connect::{alone, one_at_a_time};
pub(crate) use events::HOLD_MODES;
#[cfg(feature = "preload")]
pub(crate) use events::{forget_served, give_owed, wait_served};
pub(crate) use life::start;
#[cfg(feature = "preload")]
pub(crate) use life::{REST, ask_to_leave_giving_back, stop, stop_giving_back, wait_begun};

use crate::arena;
use crate::bell::Bell;
use crate::growth::Growth;
use crate::heap::Heap;
use crate::maps::Maps;
use crate::own::{NURSERY, NURSERY_LEN, is_left_alone};
use crate::plain::keep_attributes;
use crate::seat::Seat;
use crate::shared::{AGENT, SHARED};
use crate::voids;
use crate::whole::HUGE_PAGES;
use core::sync::atomic::Ordering;
use pagefold_os::fd::Fd;
use pagefold_os::raw::Result;
use pagefold_os::uffd::{self, Uffd};
use pagefold_os::{PAGE_SIZE, Page, Range, mem, sched};
use pagefold_protocol::channel::{Channel, Counters};
use pagefold_protocol::message::SEGMENTS_HELD;

const PAGE: u64 = PAGE_SIZE as u64;

/// Wakes the agent's thread where it waits for the daemon and for events.
pub(crate) static BELL: Bell = Bell::new();

/// A pool segment that is mapped for comparing.
struct Segment {
    id: u32,
    fd: Fd,
    map: mem::Mapping,
    pages: u32,
}

/// The agent at work: everything that one connection to a daemon needs.
pub(crate) struct Agent {
    channel: Channel,
    /// Watches for writes; sends no events.
    pub(crate) watch: Uffd,
    /// Holds frozen and merged ranges; tells of discards.
    pub(crate) hold: Uffd,
    /// Watches the end of the heap while part of that is frozen.
    pub(crate) heap: Heap,
    /// /dev/userfaultfd, if we have it.
    device: Option<Fd>,
    /// We greeted this daemon while the plain memory was the cold tier's.
    away: bool,
    /// Where frozen pages wait.
    pub(crate) staging: mem::Mapping,
    /// Where a huge page waits that is frozen whole; `None` before there was one.
    pub(crate) whole: Option<mem::Mapping>,
    /// Where the pages of the span that is frozen wait: one of these two.
    pub(crate) room: u64,
    /// The end of what was mapped of it.
    pub(crate) mapped_to: u64,
    /// Where memory that is given back is made, if that can be had; `None` before it is needed.
    nursery: Option<Option<u64>>,
    segments: [Option<Segment>; SEGMENTS_HELD],
    /// The process's page map.
    pub(crate) pagemap: Fd,
    /// Its mappings.
    pub(crate) maps: Maps,
    /// Whether there are more of them than were listed.
    growth: Growth,
    /// Where it runs.
    seat: Seat,
    /// Processor time of this thread before the connection: earlier ones have told of it.
    cpu_before_ns: u64,
    /// Pages of the frozen span that the program discarded meanwhile.
    pub(crate) voids: [bool; HUGE_PAGES],
}

impl Agent {
    /// Where the slots `slot..slot + pages` of `segment` can be read, if we hold it.
    pub(crate) fn slots(&self, segment: u32, slot: u32, pages: u32) -> Option<*const Page> {
        let held = self.segments[segment as usize % SEGMENTS_HELD].as_ref().filter(|held| held.id == segment)?;
        let end = slot.checked_add(pages)?;
        (end <= held.pages).then(|| (held.map.addr() + u64::from(slot) * PAGE) as *const Page)
    }

    pub(crate) fn segment_fd(&self, segment: u32) -> Option<i32> {
        let held = self.segments[segment as usize % SEGMENTS_HELD].as_ref().filter(|held| held.id == segment)?;
        Some(held.fd.raw())
    }

    /// Puts the attributes that the program gave to `range` onto the mapping that replaced it: `plain` memory, or the pool's.
    pub(crate) fn keep_attributes(&self, range: Range, plain: bool) {
        let held = SHARED.guard.lock(AGENT);
        keep_attributes(range, SHARED.tables(&held).table, plain);
    }

    /// True if the program has asked for part of `range` to be left alone, perhaps after the daemon planned.
    pub(crate) fn is_excluded(&self, range: Range) -> bool {
        let held = SHARED.guard.lock(AGENT);
        is_left_alone(SHARED.tables(&held).table, range)
    }

    /// True if the mappings of `range` cannot be replaced: the program has locked, sealed or keyed part of it, or discarded what cannot
    /// be told from the slots where it is, or may map it anew unseen.
    pub(crate) fn keeps_mapping(&self, range: Range) -> bool {
        let held = SHARED.guard.lock(AGENT);
        let table = SHARED.tables(&held).table;
        table.keeps_mapping(range) || arena::may_end(table, range) || voids::overlap(range)
    }

    /// Notes that a bare call has sealed `range`, as the kernel has just told us.
    pub(crate) fn note_sealed(&self, range: Range) {
        let held = SHARED.guard.lock(AGENT);
        SHARED.tables(&held).table.change(range, |note| note.sealed = true);
    }

    pub(crate) fn remember_merged(&self, range: Range) {
        let held = SHARED.guard.lock(AGENT);
        SHARED.tables(&held).merged.add(range);
    }

    /// What the program may do in `range`, if that lies in one mapping of a pool file.
    pub(crate) fn rights_of_pool(&self, range: Range) -> Option<i32> {
        let mut rights = None;
        let visit = |part: Range, prot| {
            rights = (part == range).then_some(prot);
            true
        };
        self.maps.pools(range, visit).ok().and(rights)
    }

    /// Where memory that is given back is made, see [`Agent::heal`].
    pub(crate) fn nursery(&mut self) -> Option<u64> {
        if self.nursery.is_none() {
            self.nursery = Some(self.find_nursery().ok());
        }
        self.nursery.flatten()
    }

    fn find_nursery(&self) -> Result<u64> {
        let mut base = NURSERY.load(Ordering::Relaxed);
        if base == 0 {
            // Between two pages that nobody may touch, so that it never joins what lies beside it.
            let (len, flags) = (NURSERY_LEN + 2 * PAGE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
            // SAFETY: the kernel chooses a free range.
            let addr = unsafe { mem::map(mem::wish(len), len, libc::PROT_NONE, flags, -1, 0) }?;
            base = addr + PAGE;
            // SAFETY: the range is ours.
            if let Err(errno) = unsafe { mem::protect(base, NURSERY_LEN, libc::PROT_READ | libc::PROT_WRITE) } {
                // SAFETY: the same range.
                let _ = unsafe { mem::unmap(addr, len) };
                return Err(errno);
            }
            NURSERY.store(base, Ordering::Relaxed);
        }
        // Its pages come by `UFFDIO_COPY` one by one, never as a huge page.
        self.hold.register(Range { start: base, end: base + NURSERY_LEN }, uffd::MODE_MISSING)?;
        Ok(base)
    }

    pub(crate) const fn counters(&self) -> &Counters {
        self.channel.counters()
    }

    /// Tells the daemon what our work for it costs.
    fn tell_cpu_time(&self) {
        let ns = sched::thread_cpu_ns().saturating_sub(self.cpu_before_ns);
        self.counters().cpu_ns.store(ns, Ordering::Relaxed);
    }
}
