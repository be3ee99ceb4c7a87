//! What the thread of live merging keeps over a connection, and what the steps of a merge ask of it.

use super::earlier_segments::EarlierSegments;
use super::freeze_area::FreezeArea;
use crate::address_space::anonymous::{keep_attributes, keep_from_copies};
use crate::address_space::discarded_ranges;
use crate::address_space::glibc_arenas;
use crate::address_space::heap::HeapEnd;
use crate::address_space::list_clock::ListClock;
use crate::address_space::maps::Maps;
use crate::address_space::regions::is_left_alone;
use crate::address_space::rss_watch::RssWatch;
use crate::limits::NURSERY_LEN;
use crate::owned_ranges::{self, Owned, OwnedMapping};
use crate::runtime::affinity::Affinity;
use crate::runtime::sparse_table::SparseTable;
use crate::runtime::wakeup::Wakeup;
use crate::state::{AGENT, ATTACHED, SHARED};
use core::ffi::c_int;
use core::sync::atomic::Ordering;
use pagefold_os::fd::Fd;
use pagefold_os::raw::Result;
use pagefold_os::uffd::{self, Uffd};
use pagefold_os::{PAGE_SIZE, Page, Range, mem, sched};
use pagefold_protocol::channel::{AgentCounters, Channel};
use pagefold_protocol::message::SEGMENTS_HELD;

pub(super) const PAGE: u64 = PAGE_SIZE as u64;

/// Wakes the agent's thread where it waits for the daemon and for events.
pub(crate) static WAKEUP: Wakeup = Wakeup::new(Owned::Wakeup);

/// A pool segment that is mapped for comparing.
pub(super) struct Segment {
    pub(super) id: u32,
    pub(super) fd: Fd,
    pub(super) map: mem::Mapping,
    pub(super) pages: u32,
}

/// The agent at work: everything that one connection to a daemon needs.
pub(crate) struct Agent {
    pub(super) channel: Channel,
    /// Watches for writes; sends no events.
    pub(crate) watch: Uffd,
    /// Holds frozen and merged ranges; tells of discards.
    pub(crate) hold: Uffd,
    /// Has ranges while they are unshared, where `hold` must not: it would report the agent's own moves to the agent, which
    /// waits for them. `None` where `hold` reports no moves.
    pub(super) quiet: Option<Uffd>,
    /// Watches the end of the heap while part of that is frozen.
    pub(crate) heap: HeapEnd,
    /// /dev/userfaultfd, if we have it.
    pub(super) device: Option<Fd>,
    /// We greeted this daemon while the plain memory was the cold tier's.
    pub(super) is_lent: bool,
    /// Where frozen pages wait.
    pub(super) freeze_area: FreezeArea,
    /// Where a frozen huge page waits, and the rights there; `None` before it is needed.
    pub(super) huge_freeze_area: Option<(OwnedMapping, c_int)>,
    /// Where memory that is given back is made, if that can be had; `None` before it is needed.
    pub(super) nursery: Option<Option<u64>>,
    pub(super) segments: SparseTable<Segment>,
    /// Segments of the connections before.
    pub(super) earlier: EarlierSegments,
    /// The process's page map.
    pub(crate) pagemap: Fd,
    /// Its mappings.
    pub(crate) maps: Maps,
    /// Whether there are more of them than were listed.
    pub(super) rss_watch: RssWatch,
    /// When they are listed anew where the program's calls are not seen.
    pub(super) list_clock: ListClock,
    /// Where it runs.
    pub(super) affinity: Affinity,
    /// Processor time of this thread before the connection: earlier ones have told of it.
    pub(super) cpu_before_ns: u64,
}

impl Agent {
    /// Where the slots `slot..slot + pages` of `segment` can be read, if we hold it.
    pub(crate) fn slots(&self, segment: u32, slot: u32, pages: u32) -> Option<*const Page> {
        let held = self.segments.get(segment as usize % SEGMENTS_HELD).filter(|held| held.id == segment)?;
        let end = slot.checked_add(pages)?;
        (end <= held.pages).then(|| (held.map.addr() + u64::from(slot) * PAGE) as *const Page)
    }

    pub(crate) fn segment_fd(&self, segment: u32) -> Option<i32> {
        let held = self.segments.get(segment as usize % SEGMENTS_HELD).filter(|held| held.id == segment)?;
        Some(held.fd.raw())
    }

    /// Puts the attributes that the program gave to `range` onto the mapping that replaced it: `plain` memory, or the
    /// pool's.
    pub(crate) fn keep_attributes(&self, range: Range, plain: bool) {
        let held = SHARED.mapping_lock.lock(AGENT);
        keep_attributes(range, SHARED.tables(&held).table, plain);
    }

    /// True if the program keeps the start of `range` from its children, or from dumps.
    pub(crate) fn is_kept_from_copies(&self, range: Range) -> bool {
        let held = SHARED.mapping_lock.lock(AGENT);
        SHARED.tables(&held).table.alike_for_copies(range).1.is_kept_from_copies()
    }

    /// See [`keep_from_copies`].
    pub(crate) fn keep_from_copies(&self, fresh: Range, range: Range) {
        let held = SHARED.mapping_lock.lock(AGENT);
        keep_from_copies(fresh, range, SHARED.tables(&held).table);
    }

    /// True if the program has asked for part of `range` to be left alone, perhaps after the daemon planned.
    pub(crate) fn is_excluded(&self, range: Range) -> bool {
        let held = SHARED.mapping_lock.lock(AGENT);
        is_left_alone(SHARED.tables(&held).table, range)
    }

    /// True if the mappings of `range` cannot be replaced: the program has locked, sealed or keyed part of it, or discarded
    /// what cannot be told from the slots where it is, or may map it anew unseen.
    pub(crate) fn keeps_mapping(&self, range: Range) -> bool {
        let held = SHARED.mapping_lock.lock(AGENT);
        let table = SHARED.tables(&held).table;
        let may_change = !ATTACHED && (glibc_arenas::may_end(table, range) || discarded_ranges::overlap(range));
        table.keeps_mapping(range) || may_change
    }

    /// Notes that a bare call has sealed `range`, as the kernel has just told us.
    pub(crate) fn note_sealed(&self, range: Range) {
        let held = SHARED.mapping_lock.lock(AGENT);
        SHARED.tables(&held).table.change(range, |note| note.sealed = true);
    }

    /// Keeps for the next daemon what merged memory shows of this one's segments.
    pub(super) fn keep_segments(&mut self) {
        self.earlier.keep(self.segments.drain().map(|segment| segment.fd), &self.maps);
    }

    pub(crate) fn remember_merged(&self, range: Range) {
        let held = SHARED.mapping_lock.lock(AGENT);
        SHARED.tables(&held).merged.add(range);
    }

    /// What the program may do with its plain memory at `addr`, as far as the agent merges such memory. A guess: the mapping
    /// may change at any time, and the kernel then refuses the move to the freeze area.
    pub(super) fn rights_of_plain(&self, addr: u64) -> c_int {
        if SHARED.executable.load(Ordering::Relaxed) && self.maps.rights_at(addr) == Some(mem::READ_WRITE_EXECUTE) {
            mem::READ_WRITE_EXECUTE
        } else {
            mem::READ_WRITE
        }
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

    /// Where memory for unshared pages is made, see [`Agent::unshare`].
    pub(crate) fn nursery(&mut self) -> Option<u64> {
        if self.nursery.is_none() {
            self.nursery = Some(self.find_nursery().ok());
        }
        self.nursery.flatten()
    }

    fn find_nursery(&self) -> Result<u64> {
        let mut base = owned_ranges::range_of(Owned::Nursery).start;
        if base == 0 {
            // Between two inaccessible pages, so that it never joins a neighbouring mapping.
            let (len, flags) = (NURSERY_LEN + 2 * PAGE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
            // SAFETY: the kernel chooses a free range.
            let addr = unsafe { mem::map(mem::wish(len), len, libc::PROT_NONE, flags, -1, 0) }?;
            base = addr + PAGE;
            // SAFETY: the range is ours.
            if let Err(errno) = unsafe { mem::protect(base, NURSERY_LEN, mem::READ_WRITE) } {
                // SAFETY: the range that was just mapped, which nothing uses yet.
                let _ = unsafe { mem::unmap(addr, len) };
                return Err(errno);
            }
            owned_ranges::register(Owned::Nursery, Range { start: base, end: base + NURSERY_LEN });
        }
        // Its pages come by `UFFDIO_COPY` one by one, never as a huge page.
        self.quiet().register(Range { start: base, end: base + NURSERY_LEN }, uffd::MODE_MISSING)?;
        Ok(base)
    }

    /// The descriptor that has a range while it is unshared.
    pub(super) fn quiet(&self) -> &Uffd {
        self.quiet.as_ref().unwrap_or(&self.hold)
    }

    pub(crate) const fn counters(&self) -> &AgentCounters {
        self.channel.counters()
    }

    /// Tells the daemon what our work for it costs.
    pub(super) fn tell_cpu_time(&self) {
        let ns = sched::thread_cpu_ns().saturating_sub(self.cpu_before_ns);
        self.counters().cpu_ns.store(ns, Ordering::Relaxed);
    }
}
