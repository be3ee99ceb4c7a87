//! What malloc(3) gives to threads other than the first: the first heaps of the C library's arenas.
//!
//! An arena has heaps: reservations of 64 MiB that the C library makes, opens from their start, and unmaps by internal
//! calls, which are not interposed. Memory that ends unseen may be another thread's fresh memory a moment later, so later
//! heaps are left alone. The first heap lasts as long as the process, because the arena itself lies in it: arenas without
//! threads wait for the next thread. What happens to a first heap:
//!
//! - mprotect(2) opens more of it, after everything that was ever opened and so after everything that is managed;
//! - MADV_DONTNEED discards its end and pages of free blocks, which the kernel reports like any raw discard. The C library
//!   does not rely on zeros there: `calloc` clears everything that was ever opened;
//! - in a program with another user's rights, and where memory is strictly accounted (`vm.overcommit_memory` 2), its end is
//!   mapped anew instead, without any report, and counts as clear. There arenas are left alone ([`may_end`]).
//!
//! So glibc does from 2.26 to 2.43, by its source. Memory is left alone unless it is known to be such a heap by the
//! library's version, its place, each word of its head and the mappings around it.

use crate::address_space::maps::POOL_NAME;
use crate::range_attributes::RangeAttributes;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use pagefold_os::fd::Fd;
use pagefold_os::{PAGE_SIZE, Range, maps};

const PAGE: u64 = PAGE_SIZE as u64;

/// Length and alignment of a heap.
const HEAP_LEN: u64 = 64 << 20;
/// The smallest first heap that is managed, in bytes: each thread may have one.
const FIRST_HEAP_MIN: u64 = 1 << 20;
/// Maximum of places that one list examines, so that terabytes of other reservations cost little.
const LOOKS_MAX: u32 = 1024;
/// Words of a heap's head, and the first one of the arena behind it.
const WORDS: usize = 7;
pub(crate) type Head = [u64; WORDS];

/// Length of a heap's head, by the C library's version; 0 if its heaps are not known, or not its program's allocator.
static HEAD_LEN: AtomicU64 = AtomicU64::new(0);
/// The end of a heap may have been mapped anew, and will be.
static ENDS: AtomicBool = AtomicBool::new(false);

/// The program's allocator is the C library's, of this version. Call before there are other threads.
#[cfg(feature = "preload")]
pub(crate) fn begin(version: &[u8]) {
    let digits = version.strip_prefix(b"2.").unwrap_or(b"").iter().take_while(|byte| byte.is_ascii_digit()).take(4);
    let minor = digits.fold(0, |all, digit| all * 10 + u32::from(digit - b'0'));
    // Elsewhere pages may bear tags.
    if !cfg!(target_arch = "x86_64") || is_secure() {
        return;
    }
    HEAD_LEN.store(head_len(minor), Ordering::Relaxed);
    is_strict();
}

/// Returns true in a program with other rights than its caller (set-user-ID and the like).
#[cfg(feature = "preload")]
fn is_secure() -> bool {
    // SAFETY: takes a number.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

#[cfg(any(feature = "preload", test))]
fn head_len(minor: u32) -> u64 {
    match minor {
        // Pointer to the arena, to the heap before, size, and how much was ever opened.
        26..=34 => 32,
        // And the size of pages.
        35..=43 => 48,
        _ => 0,
    }
}

/// Returns true if memory is strictly accounted, or if that is unknown. The C library asks once, in the same way, when it
/// first gives something back: it may have seen any value that the setting ever had.
fn is_strict() -> bool {
    let mut value = [0u8; 1];
    let file = Fd::open(c"/proc/sys/vm/overcommit_memory", libc::O_RDONLY, 0);
    let got = file.and_then(|file| file.read_at(&mut value, 0));
    if value[0] == b'2' {
        ENDS.store(true, Ordering::Relaxed);
    }
    got != Ok(1) || ENDS.load(Ordering::Relaxed)
}

/// True if part of `range` is an arena's, and its end may be mapped anew: it must not be taken away.
pub(crate) fn may_end(table: &RangeAttributes, range: Range) -> bool {
    table.has_arena(range) && is_strict()
}

/// Finds first heaps in a list of mappings.
#[derive(Debug)]
pub(crate) struct Finder {
    head_len: u64,
    looks: u32,
    heap: Option<HeapEnd>,
}

/// What looks like a first heap, as far as mappings were seen.
#[derive(Clone, Copy, Debug)]
struct HeapEnd {
    start: u64,
    /// As far as it was ever opened, by its head: what is read of the mappings may be older, and is not more.
    opened: u64,
    /// As far as the mappings are what a heap has.
    fits: u64,
    is_open: bool,
}

/// How a mapping can be part of a heap.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Open,
    Closed,
    Other,
}

fn kind(map: &maps::Map<'_>) -> Kind {
    let is_nobodys = map.inode == 0 && (map.name.is_empty() || map.name.starts_with(b"[anon:"));
    if map.is_plain_anonymous() && !map.is_executable() || !map.shared && map.name.starts_with(POOL_NAME) {
        Kind::Open
    } else if !map.shared && is_nobodys && map.prot == libc::PROT_NONE {
        Kind::Closed
    } else {
        Kind::Other
    }
}

impl Finder {
    /// Begins a list; nothing is found if not `wanted`.
    pub(crate) fn begin(wanted: bool) -> Finder {
        let head_len = if wanted { HEAD_LEN.load(Ordering::Relaxed) } else { 0 };
        Finder::new(if head_len > 0 && is_strict() { 0 } else { head_len })
    }

    fn new(head_len: u64) -> Finder {
        Finder { head_len, looks: 0, heap: None }
    }

    /// True if what is known to be a first heap may be managed.
    pub(crate) fn manages(&self) -> bool {
        self.head_len > 0
    }

    /// Looks at the next mapping, by `read` at what may be a head. Notes what may be managed of each first heap; true if
    /// there is one that had no note.
    pub(crate) fn see(
        &mut self,
        map: &maps::Map<'_>,
        table: &mut RangeAttributes,
        read: impl Fn(u64) -> Option<Head>,
    ) -> bool {
        if self.head_len == 0 {
            return false;
        }
        let kind = kind(map);
        let mut found = self.fit(map.range, kind, table);
        let mut at = map.range.start.next_multiple_of(HEAP_LEN);
        while kind == Kind::Open && at < map.range.end && self.looks < LOOKS_MAX {
            let (end, note) = table.stretch(at + PAGE, map.range.end);
            if note.seen || note.reserved || note.arena {
                at = end.next_multiple_of(HEAP_LEN);
                continue;
            }
            self.looks += 1;
            if let Some(opened) = read(at).and_then(|head| opened_of(&head, at, self.head_len)) {
                self.heap = Some(HeapEnd { start: at, opened: at + opened, fits: at, is_open: true });
                found |= self.fit(Range { start: at, end: map.range.end }, kind, table);
            }
            at += HEAP_LEN;
        }
        found
    }

    /// Goes on with the heap that was begun: first all is open, then all is closed, and nothing between. True if that is all
    /// of it.
    fn fit(&mut self, range: Range, kind: Kind, table: &mut RangeAttributes) -> bool {
        let Some(mut heap) = self.heap.take() else { return false };
        let end = heap.start + HEAP_LEN;
        let fits = match kind {
            Kind::Open => heap.is_open && range.end.min(end) <= heap.opened,
            Kind::Closed => heap.fits > heap.start,
            Kind::Other => false,
        };
        if !fits || range.start != heap.fits {
            return false;
        }
        (heap.fits, heap.is_open) = (range.end, kind == Kind::Open);
        if heap.fits < end {
            self.heap = Some(heap);
            return false;
        }
        // The arena itself is written by every call.
        table.change(Range { start: heap.start + PAGE, end }, |note| note.arena = true);
        true
    }
}

/// How much of a first heap at `start` was ever opened; nothing if this is not the head of one, or of one that is small yet.
fn opened_of(head: &Head, start: u64, head_len: u64) -> Option<u64> {
    /// The arena's memory does not come from brk(2).
    const NONCONTIGUOUS: u64 = 2;
    let [arena, previous, size, opened, page_len, ..] = *head;
    let state = head.get((head_len / 8) as usize)?;
    let (lock, flags) = (state & 0xffff_ffff, state >> 32);
    let is_first = arena == start + head_len && previous == 0 && lock <= 2 && flags & NONCONTIGUOUS != 0;
    // Pages of another size are a tunable's.
    let is_usual = head_len == 32 || page_len == PAGE;
    let fits = 0 < size && size <= opened && opened <= HEAP_LEN && size % PAGE == 0 && opened % PAGE == 0;
    (is_first && is_usual && fits && opened >= FIRST_HEAP_MIN).then_some(opened)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_os::mem::READ_WRITE as RW;

    const START: u64 = 0x7f12_4000_0000;
    const MIB: u64 = 1 << 20;

    /// The head of a first heap at `start`, of the newer kind.
    fn head(start: u64, opened: u64) -> Head {
        [start + 48, 0, opened / 2, opened, PAGE, 0, 2 << 32]
    }

    fn map(start: u64, end: u64, prot: i32) -> maps::Map<'static> {
        maps::Map { range: Range { start, end }, prot, shared: false, offset: 0, inode: 0, name: b"" }
    }

    /// The ranges that are noted after `maps` were seen, with these heads.
    fn found(head_len: u64, maps: &[maps::Map<'_>], heads: &[(u64, Head)]) -> Vec<Range> {
        let (mut table, mut finder) = (Box::new(RangeAttributes::new()), Finder::new(head_len));
        let read = |at| heads.iter().find(|(start, _)| *start == at).map(|(_, head)| *head);
        let mut any = false;
        for map in maps {
            any |= finder.see(map, &mut table, read);
        }
        let ranges: Vec<_> = table.entries().iter().map(|(range, note)| (*range, note.arena)).collect();
        assert!(any != ranges.is_empty() && ranges.iter().all(|(_, arena)| *arena));
        // Nothing new the next time.
        assert!(!maps.iter().any(|map| finder.see(map, &mut table, read)));
        ranges.into_iter().map(|(range, _)| range).collect()
    }

    fn managed(start: u64) -> Range {
        Range { start: start + PAGE, end: start + HEAP_LEN }
    }

    #[test]
    fn a_first_heap_is_known_by_its_head_and_its_mappings() {
        let closed = START + 5 * MIB;
        let usual = [map(START, closed, RW), map(closed, START + HEAP_LEN, libc::PROT_NONE)];
        let one = |maps: &[maps::Map<'_>], head: Head| found(48, maps, &[(START, head)]);
        assert_eq!(one(&usual, head(START, 5 * MIB)), [managed(START)]);
        // It has grown since the mappings were read; it is another's that lies behind, of no rights as well.
        assert_eq!(one(&usual, head(START, 6 * MIB)), [managed(START)]);
        let longer = [usual[0], map(closed, START + 3 * HEAP_LEN, libc::PROT_NONE)];
        assert_eq!(one(&longer, head(START, 5 * MIB)), [managed(START)]);
        // In several mappings, some of them the pool's.
        let pool = maps::Map { inode: 7, name: b"/memfd:pagefold-pool (deleted)", ..map(START + MIB, closed, RW) };
        let parts = [map(START, START + MIB, RW), pool, usual[1]];
        assert_eq!(one(&parts, head(START, 5 * MIB)), [managed(START)]);
        // Of older libraries.
        let older = [START + 32, 0, MIB, 5 * MIB, 2 << 32, 0, 0];
        assert_eq!(found(32, &usual, &[(START, older)]), [managed(START)]);
        assert_eq!(found(48, &usual, &[(START, older)]), []);
        assert_eq!(found(32, &usual, &[(START, head(START, 5 * MIB))]), []);
        assert_eq!(found(0, &usual, &[(START, older)]), []);
    }

    #[test]
    fn memory_that_only_resembles_a_first_heap_is_left_alone() {
        let closed = START + 5 * MIB;
        let (open, rest) = (map(START, closed, RW), map(closed, START + HEAP_LEN, libc::PROT_NONE));
        let right = head(START, 5 * MIB);
        let none = |maps: &[maps::Map<'_>], head: Head, what: &str| {
            assert_eq!(found(48, maps, &[(START, head)]), [], "{what}");
        };
        let usual = [open, rest];
        let but = |index: usize, value: u64| {
            let mut head = right;
            head[index] = value;
            head
        };
        none(&usual, but(0, START + HEAP_LEN + 48), "a later heap");
        none(&usual, but(1, START - HEAP_LEN), "a later heap");
        none(&usual, but(0, 0), "a heap that is being made");
        none(&usual, but(2, 6 * MIB), "larger than it was opened");
        none(&usual, but(2, 0), "empty");
        none(&usual, but(2, 17), "no pages");
        none(&usual, but(3, 2 * HEAP_LEN), "too large");
        none(&usual, but(4, 2 * MIB), "huge pages");
        none(&usual, but(6, 0), "no arena");
        none(&usual, but(6, 2 << 32 | 9), "no lock");
        none(
            &[map(START, START + MIB / 2, RW), map(START + MIB / 2, START + HEAP_LEN, 0)],
            head(START, MIB / 2),
            "small",
        );
        none(&usual[..1], right, "nothing behind");
        none(&[open, map(closed, START + HEAP_LEN - PAGE, 0)], right, "an end too short");
        none(&[open, map(closed + PAGE, START + HEAP_LEN, 0)], right, "a gap");
        none(
            &[map(START, closed + PAGE, RW), map(closed + PAGE, START + HEAP_LEN, 0)],
            right,
            "open behind what it opened",
        );
        none(&[open, map(closed, START + HEAP_LEN, libc::PROT_READ)], right, "another's rights");
        none(&[open, maps::Map { inode: 9, name: b"/file", ..rest }], right, "a file");
        none(&[maps::Map { shared: true, ..open }, rest], right, "shared memory");
        let middle = map(START + 3 * MIB, START + 4 * MIB, 0);
        let holes = [map(START, START + 3 * MIB, RW), middle, map(START + 4 * MIB, closed, RW), rest];
        none(&holes, right, "closed in the middle");
    }

    #[test]
    fn heaps_lie_side_by_side() {
        let at = |index: u64| START + index * HEAP_LEN;
        // A block before; a first heap that is full, a later one that is, another first one.
        let opened = at(2) + 3 * MIB;
        let maps = [map(START - MIB, opened, RW), map(opened, at(5), 0)];
        let later = [at(0) + 48, at(0), HEAP_LEN, HEAP_LEN, PAGE, 0, 0];
        let heads = [(at(0), head(at(0), HEAP_LEN)), (at(1), later), (at(2), head(at(2), 3 * MIB))];
        assert_eq!(found(48, &maps, &heads), [managed(at(0)), managed(at(2))]);
    }

    #[test]
    fn large_memory_costs_little() {
        let (mut table, mut finder) = (Box::new(RangeAttributes::new()), Finder::new(48));
        let looks = std::cell::Cell::new(0);
        let read = |_| {
            looks.set(looks.get() + 1);
            None
        };
        let (large, seen) = (map(1 << 40, 3 << 40, RW), map(4 << 40, 6 << 40, RW));
        table.change(seen.range, |note| note.seen = true);
        finder.see(&seen, &mut table, read);
        assert_eq!(looks.get(), 0);
        finder.see(&large, &mut table, read);
        finder.see(&map(8 << 40, 9 << 40, 0), &mut table, read);
        assert_eq!(looks.get(), LOOKS_MAX);
    }

    #[test]
    fn versions_are_told_apart() {
        assert_eq!([25, 26, 34, 35, 43, 44].map(head_len), [0, 32, 32, 48, 48, 0]);
    }
}
