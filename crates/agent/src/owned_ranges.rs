//! The agent's own memory among the program's: stacks, freeze areas, the nursery and the like.
//!
//! The program may give advice on this memory, as a program does that advises everything in its list of mappings. The agent
//! must never manage it: an agent that freezes its own stack waits for itself. So each module that makes such memory
//! registers it here, and lists and freezes leave it out. A forked child inherits the registry with the memory.

use core::sync::atomic::{AtomicU64, Ordering};
use pagefold_os::uffd::{self, Uffd};
use pagefold_os::{PAGE_SIZE, Range, mem};

const PAGE: u64 = PAGE_SIZE as u64;

/// What the agent has at most one range for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owned {
    /// Stack of the thread of live merging, or of a cold client's only thread.
    Stack,
    /// Stack of the thread that serves the cold tier during a loan.
    LoanStack,
    /// Stack of the thread that faults pages in.
    FaultInStack,
    /// Where frozen pages wait.
    FreezeArea,
    /// Where frozen pages wait that can be executed.
    ExecutableFreezeArea,
    /// Where a huge page waits that is frozen whole.
    HugeFreezeArea,
    /// Where pages wait that are being evicted.
    ColdFreezeArea,
    /// Where memory for unshared pages is made.
    Nursery,
    /// The list of pool segments.
    Segments,
    /// The list of those of earlier daemons.
    EarlierSegments,
    /// The page that wakes the thread of live merging.
    Wakeup,
    /// The page that wakes the thread of the cold tier.
    ColdWakeup,
    /// The page that the kernel wipes in forked children.
    #[cfg(feature = "preload")]
    Origin,
    /// The library's zero-initialized statics.
    #[cfg(feature = "preload")]
    Statics,
    /// Everything that the entry mapped: code, data and the first stack.
    #[cfg(feature = "attached")]
    Image,
}

const COUNT: usize = 15;

/// Bits of a word that count the pages of a range; the number of its first page is above them.
const PAGES_BITS: u32 = 24;

/// The range of each [`Owned`] in one word, so that a reader never combines the parts of two ranges; 0 if there is none.
static RANGES: [AtomicU64; COUNT] = [const { AtomicU64::new(0) }; COUNT];

/// Registers `range` in the place of the range before; an empty range if the memory is gone.
pub(crate) fn register(owned: Owned, range: Range) {
    RANGES[owned as usize].store(pack(range), Ordering::Release);
}

/// The range of `owned`, empty if there is none.
pub(crate) fn range_of(owned: Owned) -> Range {
    unpack(&RANGES[owned as usize])
}

const fn pack(range: Range) -> u64 {
    if range.is_empty() { 0 } else { ((range.start / PAGE) << PAGES_BITS) | range.pages() }
}

fn unpack(word: &AtomicU64) -> Range {
    let word = word.load(Ordering::Acquire);
    Range::pages_from((word >> PAGES_BITS) * PAGE, word & ((1 << PAGES_BITS) - 1))
}

/// The first range of the agent's that overlaps `range`.
pub(crate) fn first_in(range: Range) -> Option<Range> {
    let overlapping = RANGES.iter().map(unpack).filter(|owned| !owned.is_empty() && owned.overlaps(&range));
    overlapping.min_by_key(|owned| owned.start)
}

/// Returns true if `addr` lies in the nursery.
pub(crate) fn is_in_nursery(addr: u64) -> bool {
    let nursery = range_of(Owned::Nursery);
    (nursery.start..nursery.end).contains(&addr)
}

/// Takes the pages out of `range` of a freeze area with `rights`, into which `mover` moves pages: a move takes what is there
/// for its own.
///
/// The kernel discards nothing that is locked, and a call of the program's may have locked all memory. Such a range is
/// mapped anew.
pub(crate) fn empty_freeze_area(range: Range, rights: i32, mover: &Uffd) {
    // SAFETY: the freeze area is the agent's; what is there is void.
    if unsafe { mem::advise(range.start, range.len(), libc::MADV_DONTNEED) }.is_ok() {
        return;
    }
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    // SAFETY: the freeze area is the agent's, so no object of the program lies below the new mapping.
    let _ = unsafe { mem::map(range.start, range.len(), rights, flags, -1, 0) };
    hide_range(range.start, range.len());
    // Without that no page is moved there.
    let _ = mover.register(range, uffd::MODE_WP);
}

/// Memory of the agent's that is registered for as long as it is mapped: its address may be the program's afterwards.
#[derive(Debug)]
pub(crate) struct OwnedMapping {
    _map: mem::Mapping,
    owned: Owned,
    range: Range,
}

impl OwnedMapping {
    /// Takes over `map`, of which the agent uses `range`, and hides it. It is not registered yet: another may stand there
    /// still.
    pub(crate) fn new(owned: Owned, map: mem::Mapping, range: Range) -> OwnedMapping {
        hide(&map);
        OwnedMapping { _map: map, owned, range }
    }

    /// Registers it in the place of the range before.
    pub(crate) fn register(&self) {
        register(self.owned, self.range);
    }

    pub(crate) const fn range(&self) -> Range {
        self.range
    }
}

impl Drop for OwnedMapping {
    fn drop(&mut self) {
        // What stands there by now may be a successor's.
        let _ = RANGES[self.owned as usize].compare_exchange(pack(self.range), 0, Ordering::AcqRel, Ordering::Relaxed);
    }
}

/// Leaves a mapping of the agent's out of forked children and core dumps.
pub(crate) fn hide(map: &mem::Mapping) {
    hide_range(map.addr(), map.len() as u64);
}

/// The same of `len` bytes at `addr`, which are the agent's.
pub(crate) fn hide_range(addr: u64, len: u64) {
    for advice in [libc::MADV_DONTFORK, libc::MADV_DONTDUMP] {
        // SAFETY: the advice changes no bytes of this process.
        let _ = unsafe { mem::advise(addr, len, advice) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_owned_as_long_as_it_is_mapped() {
        // No other test has one.
        let owned = Owned::LoanStack;
        let make = || {
            let map = mem::Mapping::anonymous(2 * PAGE_SIZE).unwrap();
            let range = Range::pages_from(map.addr(), 2);
            OwnedMapping::new(owned, map, range)
        };
        let (first, second) = (make(), make());
        let ranges = [first.range(), second.range()];
        assert_eq!(ranges.map(first_in), [None; 2], "not registered yet");
        first.register();
        second.register();
        assert_eq!(ranges.map(first_in), [None, Some(ranges[1])], "a successor stands in its place");
        drop(first);
        assert_eq!(first_in(ranges[1]), Some(ranges[1]), "and stays when the first is unmapped");
        drop(second);
        assert_eq!(ranges.map(first_in), [None; 2], "the addresses may be the program's now");
    }
}
