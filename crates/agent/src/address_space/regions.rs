//! Which memory is managed: lists of mappings, for the daemon and for the agent itself.
//!
//! Managed is what the program asked for, and with `--manage all` every large mapping with an end that the agent sees:
//! memory that may end unseen is never listed, and what is never listed is never frozen. A list reads attributes, and marks
//! blocks of the allocator, so the caller holds the mapping lock.

use crate::address_space::glibc_arenas::{self, Finder, Head};
use crate::address_space::heap;
use crate::address_space::maps::{Maps, POOL_NAME};
use crate::owned_ranges::{self, is_in_nursery};
use crate::range_attributes::RangeAttributes;
use crate::state::{COLD_AGENT, MAY_EXECUTE, SHARED};
use core::sync::atomic::Ordering;
use pagefold_os::fd::Fd;
use pagefold_os::raw::Result;
use pagefold_os::{PAGE_SIZE, Range, maps};
use pagefold_protocol::channel::Channel;
use pagefold_protocol::message::{ALL_MIN, LIST_MAX, RegionEntry};

const PAGE: u64 = PAGE_SIZE as u64;

/// Lists the managed plain memory from address `from` on to `channel`, for the cold tier.
pub(crate) fn list_anonymous(maps: &Maps, channel: &Channel, from: u64) -> Result<usize> {
    let held = SHARED.mapping_lock.lock(COLD_AGENT);
    list(maps, SHARED.tables(&held).table, Listed::Anonymous, from, |index, entry| channel.put_answer(index, entry))
}

/// Returns true if part of `range` must not be frozen: the program excludes it, it is the agent's, or it may end unseen.
pub(crate) fn is_left_alone(table: &RangeAttributes, range: Range) -> bool {
    table.excludes(range) || owned_ranges::first_in(range).is_some() || glibc_arenas::may_end(table, range)
}

/// Calls `f` with each managed range of plain memory.
pub(crate) fn for_each_anonymous(maps: &Maps, mut f: impl FnMut(Range)) {
    let held = SHARED.mapping_lock.lock(COLD_AGENT);
    let mut from = 0;
    loop {
        let mut end = from;
        let listed = list(maps, SHARED.tables(&held).table, Listed::Anonymous, from, |_, entry| {
            end = entry.end;
            f(Range { start: entry.start, end });
        });
        if listed != Ok(LIST_MAX) {
            return;
        }
        from = end;
    }
}

/// What a list holds.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Listed {
    /// The managed ranges, merged or not.
    Managed,
    /// Those of them that are not merged.
    Anonymous,
    /// The mappings of pool files.
    Pool,
}

/// Lists what [`Listed`] says from address `from` on: the first [`LIST_MAX`] entries. The rest is listed from the end of the
/// last one on.
pub(crate) fn list(
    maps: &Maps,
    table: &mut RangeAttributes,
    what: Listed,
    from: u64,
    put: impl FnMut(usize, RegionEntry),
) -> Result<usize> {
    heap::look();
    // Names can be long; a line that does not fit is not one of ours.
    let mut buffer = [0u8; 16 << 10];
    let blocks = SHARED.all.load(Ordering::Relaxed) && SHARED.blocks.load(Ordering::Relaxed);
    let mut lister = Lister {
        count: 0,
        last: RegionEntry::default(),
        least: 0,
        is_executable: false,
        what,
        from,
        heap_end: heap::managed_end(),
        all: SHARED.all.load(Ordering::Relaxed),
        blocks,
        arenas: Finder::begin(blocks && what != Listed::Pool),
        memory: Fd::open(c"/proc/thread-self/mem", libc::O_RDONLY, 0).ok(),
        table,
        put,
    };
    maps.for_each_while(&mut buffer, |map| {
        lister.map(map);
        lister.count < LIST_MAX
    })?;
    lister.put_last();
    Ok(lister.count)
}

/// Decides which mappings are managed, and joins neighbours.
struct Lister<'a, P: FnMut(usize, RegionEntry)> {
    count: usize,
    last: RegionEntry,
    /// How long that must be.
    least: u64,
    /// The mapping that is being looked at can be executed.
    is_executable: bool,
    what: Listed,
    from: u64,
    /// Where what is managed of the heap ends.
    heap_end: u64,
    all: bool,
    /// So are blocks of the C library's allocator.
    blocks: bool,
    /// And its arenas.
    arenas: Finder,
    /// /proc/thread-self/mem, to look at memory that may go away meanwhile.
    memory: Option<Fd>,
    table: &'a mut RangeAttributes,
    put: P,
}

impl<P: FnMut(usize, RegionEntry)> Lister<'_, P> {
    fn map(&mut self, map: &maps::Map<'_>) {
        let pool = map.name.starts_with(POOL_NAME) && !map.shared;
        if self.what == Listed::Pool {
            if pool && map.range.start >= self.from && self.count < LIST_MAX {
                let slot = map.offset / PAGE;
                (self.put)(
                    self.count,
                    RegionEntry { start: map.range.start, end: map.range.end, inode: map.inode, slot },
                );
                self.count += 1;
            }
            return;
        }
        self.find_arenas(map);
        if pool {
            if self.what == Listed::Managed {
                self.add(map.range, 0);
            }
            return;
        }
        // Looking into the nursery would be a fault.
        if !map.is_plain_anonymous() || is_in_nursery(map.range.start) {
            return;
        }
        if map.is_executable() {
            // Nothing of it is evicted: the cold tier moves pages between mappings that cannot be executed.
            if self.what == Listed::Anonymous || !MAY_EXECUTE.load(Ordering::Relaxed) {
                return;
            }
        }
        self.is_executable = map.is_executable();
        if self.all && map.name == b"[heap]" {
            // Merged pages cut the heap into several mappings.
            let end = self.heap_end.clamp(map.range.start, map.range.end);
            self.noted(Range { start: map.range.start, end }, true);
            self.noted(Range { start: end, end: map.range.end }, false);
            return;
        }
        if self.blocks && map.range.len() >= ALL_MIN {
            let note = self.table.at(map.range.start);
            if !note.seen && !note.reserved {
                self.find_blocks(map.range);
            }
        }
        self.noted(map.range, false);
    }

    /// Adds the parts of `range` that are managed by their attributes; if `bare`, all except those that must be left alone.
    /// Memory that is excluded from core dumps is secret: it is managed only if the program asked for it by madvise(2).
    fn noted(&mut self, range: Range, bare: bool) {
        let mut at = range.start;
        while at < range.end {
            let (end, note) = self.table.stretch(at, range.end);
            let arena = note.arena && self.arenas.manages();
            // Of what is opened piece by piece there may be thousands of pages between others; the list is finite.
            let least = if note.mergeable || bare || note.seen || arena { 0 } else { ALL_MIN };
            if !self.table.is_lost()
                && !note.is_excluded()
                && (note.mergeable || !note.dont_dump && (bare || self.all && (note.seen || note.reserved || arena)))
            {
                if self.is_executable {
                    SHARED.executable.store(true, Ordering::Relaxed);
                }
                self.add(Range { start: at, end }, least);
            }
            at = end;
        }
    }

    /// Large blocks of the C library's allocator at the start of `range`: each begins with its size and the mark of a
    /// block that was mapped for itself. Their end is seen by the interposed `free`, so they can be managed.
    fn find_blocks(&mut self, range: Range) {
        const MAPPED: u64 = 2;
        let Some(memory) = &self.memory else { return };
        let mut at = range.start;
        while at < range.end {
            let mut head = [0u8; 16];
            if memory.read_at(&mut head, at) != Ok(16) {
                break;
            }
            let before = u64::from_ne_bytes([head[0], head[1], head[2], head[3], head[4], head[5], head[6], head[7]]);
            let size =
                u64::from_ne_bytes([head[8], head[9], head[10], head[11], head[12], head[13], head[14], head[15]]);
            let len = size & !7;
            if before != 0 || size & 7 != MAPPED || len == 0 || len % PAGE != 0 || len > range.end - at {
                break;
            }
            at += len;
        }
        if at > range.start {
            self.table.change(Range { start: range.start, end: at }, |note| note.seen = true);
        }
    }

    /// Notes the first heaps of the C library's arenas. What came before in this list is listed the next time.
    fn find_arenas(&mut self, map: &maps::Map<'_>) {
        let Lister { arenas, table, memory: Some(memory), .. } = self else { return };
        let read = |at| {
            let mut bytes = [0u8; size_of::<Head>()];
            let is_there = memory.read_at(&mut bytes, at) == Ok(bytes.len());
            // SAFETY: words are any bytes.
            is_there.then(|| unsafe { core::mem::transmute::<[u8; size_of::<Head>()], Head>(bytes) })
        };
        if arenas.see(map, table, read) {
            SHARED.changed();
        }
    }

    /// Adds `range` but for what is ours in it, and if it is shorter than `least` only beside other memory.
    fn add(&mut self, mut range: Range, least: u64) {
        while let Some(own) = owned_ranges::first_in(range) {
            self.join(Range { start: range.start, end: own.start }, least);
            range.start = own.end;
        }
        self.join(range, least);
    }

    fn join(&mut self, range: Range, least: u64) {
        let range = Range { start: range.start.max(self.from), end: range.end };
        if range.is_empty() {
            return;
        }
        if self.last.end == range.start && self.last.end != 0 {
            self.last.end = range.end;
            self.least = self.least.min(least);
        } else {
            self.put_last();
            self.least = least;
            self.last = RegionEntry { start: range.start, end: range.end, inode: 0, slot: 0 };
        }
    }

    fn put_last(&mut self) {
        let range = Range { start: self.last.start, end: self.last.end };
        if range.len() >= self.least.max(1) && self.count < LIST_MAX {
            (self.put)(self.count, self.last);
            self.count += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_os::mem;

    /// More ranges than one list holds: each is listed once, in order of address.
    #[test]
    fn a_list_goes_on_from_the_end_of_the_one_before() {
        const COUNT: u64 = 2 * LIST_MAX as u64 + 100;
        const STEP: u64 = 2 * PAGE;
        let room = mem::Mapping::anonymous((COUNT * STEP) as usize).unwrap();
        let all = Range { start: room.addr(), end: room.addr() + COUNT * STEP };
        // SAFETY: the test's memory, which is not touched.
        unsafe { mem::protect(all.start, all.len(), libc::PROT_NONE) }.unwrap();
        let opened: Vec<Range> = (0..COUNT).map(|index| Range::pages_from(all.start + index * STEP, 1)).collect();
        for range in &opened {
            // SAFETY: the range is a page of `room`, the test's memory, which is not touched.
            unsafe { mem::protect(range.start, PAGE, mem::READ_WRITE) }.unwrap();
        }
        let mut table = Box::new(RangeAttributes::new());
        table.change(all, |note| note.mergeable = true);
        let maps = Maps::open().unwrap();
        let (mut listed, mut from, mut lists) = (Vec::new(), 0, 0);
        loop {
            let put = |_, entry: RegionEntry| listed.push(Range { start: entry.start, end: entry.end });
            let count = list(&maps, &mut table, Listed::Managed, from, put).unwrap();
            lists += 1;
            if count < LIST_MAX {
                break;
            }
            from = listed.last().unwrap().end;
        }
        // Other tests merge memory of theirs meanwhile.
        listed.retain(|range| range.overlaps(&all));
        assert_eq!(listed, opened);
        assert!(lists >= 3);
    }
}
