//! What the program told us about its memory: included and excluded ranges, and where merged pages lie.
//!
//! Fixed arrays, no allocation. Everything here is touched only while the mapping lock is held; as a signal handler holds it
//! if its thread does, none runs while a table changes.
//!
//! What the program asked to be left alone, has locked, marked and the like is never forgotten; what it merely wants managed
//! is, where there is no room: memory without a note is left alone. Where what is never forgotten takes half the room the
//! agent leaves ([`CROWDED`]): one call may say something else of every range that is told apart, and of all between them.

#[cfg(not(loom))]
use crate::runtime::signals::block_signals;
use core::sync::atomic::{AtomicBool, Ordering};
use pagefold_os::Range;

/// Ranges that are told apart at most. Costs no memory before it is used.
const RANGES_MAX: usize = 1 << 14;
/// Promises that one more call cannot make more than [`RANGES_MAX`].
const PROMISES_MAX: usize = RANGES_MAX / 2 - 2;

/// A table may soon have no room for what the program says: the agent is to leave before it says more.
pub static CROWDED: AtomicBool = AtomicBool::new(false);

/// Ranges that are shorter than this, in bytes, and merely managed are told apart only while the table has few entries:
/// others must find room, and each new one between others moves all behind it.
const SMALL_LEN: u64 = 1 << 20;
/// That many entries. The agent of a program that was entered notes its ranges in order of address, and follows none of its
/// calls.
const SMALL_MAX: usize = if cfg!(feature = "attached") { RANGES_MAX } else { RANGES_MAX / 4 };

/// What is known about a range.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Attributes {
    /// Managed because the program asked for it.
    pub mergeable: bool,
    /// The agent has handed the plain memory of it to the kernel's KSM: the program did not ask for that.
    pub handed: bool,
    /// Left alone because the program asked for it, or marked it as secret.
    pub excluded: bool,
    /// Left alone while the program tracks it by a userfaultfd of its own.
    pub tracked: bool,
    /// Locked into memory.
    pub locked: bool,
    /// Sealed: it can be neither replaced nor moved any more.
    pub sealed: bool,
    /// Under a protection key other than 0, which no mapping of ours would have.
    pub keyed: bool,
    /// Mapped through an interposed call: its end is seen as well.
    pub seen: bool,
    /// The same of a part that may be small or closed: managed where much of it is open.
    pub reserved: bool,
    /// Of the first heap of an arena of the C library's: it has no end.
    pub arena: bool,
    /// `MADV_DONTFORK` is in force.
    pub dont_fork: bool,
    /// `MADV_WIPEONFORK` is in force.
    pub wipe_on_fork: bool,
    /// `MADV_DONTDUMP` is in force.
    pub dont_dump: bool,
    /// `MADV_HUGEPAGE` is in force.
    pub huge: bool,
    /// `MADV_NOHUGEPAGE` is in force.
    pub small: bool,
}

impl Attributes {
    /// True if the program wants it left alone, or what it wants cannot be had of the pool's mappings.
    pub const fn is_excluded(&self) -> bool {
        self.excluded || self.tracked || self.locked || self.sealed || self.keyed || self.wipe_on_fork
    }

    /// True if neither a child nor a dump may have the memory, or one of the two.
    pub const fn is_kept_from_copies(&self) -> bool {
        self.dont_fork || self.dont_dump
    }

    /// True if something would go wrong without it. Else nothing is managed that could be, or on pages of another size.
    const fn is_promise(&self) -> bool {
        self.is_excluded() || self.is_kept_from_copies()
    }

    /// Returns true if the program asked for nothing.
    const fn is_merely_managed(&self) -> bool {
        !self.is_promise() && !self.mergeable && !self.handed && !self.arena && !self.huge && !self.small
    }

    /// What of it is a promise.
    const fn without_wishes(self) -> Attributes {
        Attributes {
            mergeable: false,
            handed: false,
            seen: false,
            reserved: false,
            arena: false,
            huge: false,
            small: false,
            ..self
        }
    }
}

/// Disjoint ranges with notes, in order of address.
#[derive(Debug)]
pub struct RangeAttributes {
    entries: [(Range, Attributes); RANGES_MAX],
    len: usize,
    /// How many of them are [promises](Attributes::is_promise).
    promises: usize,
    /// An attribute did not fit: it is unknown from now on what must be left alone.
    lost: bool,
}

const EMPTY: (Range, Attributes) = (
    Range { start: 0, end: 0 },
    Attributes {
        mergeable: false,
        handed: false,
        excluded: false,
        tracked: false,
        locked: false,
        sealed: false,
        keyed: false,
        seen: false,
        reserved: false,
        arena: false,
        dont_fork: false,
        wipe_on_fork: false,
        dont_dump: false,
        huge: false,
        small: false,
    },
);

impl RangeAttributes {
    /// Makes an empty table.
    pub const fn new() -> RangeAttributes {
        RangeAttributes { entries: [EMPTY; RANGES_MAX], len: 0, promises: 0, lost: false }
    }

    /// The ranges.
    pub fn entries(&self) -> &[(Range, Attributes)] {
        &self.entries[..self.len]
    }

    /// The ranges that end behind `addr`.
    fn behind(&self, addr: u64) -> &[(Range, Attributes)] {
        &self.entries()[self.entries().partition_point(|(entry, _)| entry.end <= addr)..]
    }

    /// The ranges of which part lies in `range`.
    fn within(&self, range: Range) -> impl Iterator<Item = &(Range, Attributes)> {
        self.behind(range.start).iter().take_while(move |(entry, _)| entry.start < range.end)
    }

    /// The note at `addr`.
    pub fn at(&self, addr: u64) -> Attributes {
        match self.behind(addr).first() {
            Some((range, note)) if range.start <= addr => *note,
            _ => Attributes::default(),
        }
    }

    /// True if part of `range` has a note.
    pub fn knows(&self, range: Range) -> bool {
        self.within(range).next().is_some()
    }

    /// The first range behind `addr` that the program tracks.
    pub fn first_tracked(&self, addr: u64) -> Option<Range> {
        self.behind(addr).iter().find(|(_, note)| note.tracked).map(|(range, _)| *range)
    }

    /// The first range of those that overlap `range` that the agent handed to KSM, as far as it lies in `range`.
    pub fn first_handed(&self, range: Range) -> Option<Range> {
        self.within(range).find(|(_, note)| note.handed).map(|(entry, _)| entry.intersection(&range))
    }

    /// Bytes that the agent handed to KSM.
    pub fn handed_bytes(&self) -> u64 {
        self.entries().iter().filter(|(_, note)| note.handed).map(|(entry, _)| entry.len()).sum()
    }

    /// Returns true if it is unknown what must be left alone: everything is, then.
    pub fn is_lost(&self) -> bool {
        self.lost
    }

    /// Where the stretch with one note that begins at `addr` ends (at `end` at most), and that note.
    pub fn stretch(&self, addr: u64, end: u64) -> (u64, Attributes) {
        match self.behind(addr).first() {
            Some((entry, note)) if entry.start <= addr => (entry.end.min(end), *note),
            Some((entry, _)) => (entry.start.min(end), Attributes::default()),
            None => (end, Attributes::default()),
        }
    }

    /// Where the first part of `range` ends that is either all memory that children and dumps may have, or under one note
    /// that keeps it from them; and the note at its start.
    pub fn alike_for_copies(&self, range: Range) -> (u64, Attributes) {
        let (mut at, note) = self.stretch(range.start, range.end);
        while at < range.end && !note.is_kept_from_copies() {
            let (end, next) = self.stretch(at, range.end);
            if next.is_kept_from_copies() {
                break;
            }
            at = end;
        }
        (at, note)
    }

    /// True if the program wants part of `range` left alone.
    pub fn excludes(&self, range: Range) -> bool {
        self.lost || self.within(range).any(|(_, note)| note.is_excluded())
    }

    /// True if the end of every part of `range` is seen.
    pub fn sees(&self, range: Range) -> bool {
        let mut at = range.start;
        while at < range.end {
            let (end, note) = self.stretch(at, range.end);
            if !note.seen && !note.reserved {
                return false;
            }
            at = end;
        }
        true
    }

    /// True if part of `range` is an arena's of the C library.
    pub fn has_arena(&self, range: Range) -> bool {
        self.within(range).any(|(_, note)| note.arena)
    }

    /// Where what is locked begins in `range`.
    pub fn first_locked(&self, range: Range) -> Option<u64> {
        self.within(range).find(|(_, note)| note.locked).map(|(entry, _)| entry.start.max(range.start))
    }

    /// True if part of `range` must stay in the mapping that it has: it is, or may be, locked or sealed, or has a key.
    pub fn keeps_mapping(&self, range: Range) -> bool {
        self.lost || self.within(range).any(|(_, note)| note.locked || note.sealed || note.keyed)
    }

    /// Applies `change` to every note in `range`, splitting and adding entries as needed.
    pub fn change(&mut self, range: Range, change: impl Fn(&mut Attributes)) {
        #[cfg(not(loom))]
        let _blocked = block_signals();
        let mut at = range.start;
        while at < range.end {
            let (piece_end, before) = self.stretch(at, range.end);
            let mut note = before;
            change(&mut note);
            if note != before {
                self.cut(Range { start: at, end: piece_end });
                self.put(Range { start: at, end: piece_end }, note);
            }
            at = piece_end;
        }
    }

    /// Applies `change` to every note that there is.
    pub fn change_noted(&mut self, change: impl Fn(&mut Attributes)) {
        let mut at = 0;
        while let Some((range, _)) = self.behind(at).first().copied() {
            at = range.end;
            self.change(range, &change);
        }
    }

    /// Forgets `range`: it was unmapped or replaced.
    pub fn forget(&mut self, range: Range) {
        #[cfg(not(loom))]
        let _blocked = block_signals();
        self.cut(range);
    }

    /// The mapping at `from` is at `to` now, which is longer or shorter, perhaps at the same address. Notes come along,
    /// those of the end for what grew; `from` `keeps` its own if it is still mapped.
    pub fn carry(&mut self, from: Range, to: Range, keeps: bool) {
        let moves = from.start != to.start;
        if moves {
            self.forget(to);
        }
        // A shared mapping of which nothing is to move is there twice then.
        let last = self.at(if from.is_empty() { from.start } else { from.end - 1 });
        let mut at = from.start;
        while moves && at < from.end {
            let (end, note) = self.stretch(at, from.end);
            if !keeps {
                self.forget(Range { start: at, end });
            }
            let start = to.start + (at - from.start);
            let part = Range { start, end: to.end.min(start + (end - at)) };
            if note != Attributes::default() && part.start < part.end {
                self.change(part, |to| *to = note);
            }
            at = end;
        }
        let grown = Range { start: to.start + from.len(), end: to.end };
        if grown.start < grown.end {
            self.forget(grown);
            if last != Attributes::default() {
                self.change(grown, |to| *to = last);
            }
        }
    }

    fn cut(&mut self, range: Range) {
        if range.start >= range.end {
            // The halves of an entry would join again, for ever.
            return;
        }
        loop {
            let index = self.entries().partition_point(|(entry, _)| entry.end <= range.start);
            let Some((entry, note)) = self.entries().get(index).copied().filter(|(entry, _)| entry.start < range.end)
            else {
                return;
            };
            self.remove(index);
            self.put(Range { start: entry.start, end: range.start }, note);
            self.put(Range { start: range.end, end: entry.end }, note);
        }
    }

    /// Adds `range`, of which nothing has a note, if there is any of it and anything to note.
    fn put(&mut self, mut range: Range, note: Attributes) {
        if range.start >= range.end || note == Attributes::default() {
            return;
        }
        let mut index = self.entries().partition_point(|(entry, _)| entry.end <= range.start);
        let alone = self.len;
        // Join equal neighbours, so that many small calls do not fill the table.
        if index > 0
            && self.entries[index - 1] == (Range { start: self.entries[index - 1].0.start, end: range.start }, note)
        {
            range.start = self.entries[index - 1].0.start;
            self.remove(index - 1);
            index -= 1;
        }
        if index < self.len && self.entries[index].0.start == range.end && self.entries[index].1 == note {
            range.end = self.entries[index].0.end;
            self.remove(index);
        }
        if self.len == alone && self.len >= SMALL_MAX && range.len() < SMALL_LEN && note.is_merely_managed() {
            return;
        }
        if self.len == RANGES_MAX {
            if note.is_promise() {
                self.put_crowding(range, note);
            }
            return;
        }
        self.entries.copy_within(index..self.len, index + 1);
        self.entries[index] = (range, note);
        self.len += 1;
        self.promises += usize::from(note.is_promise());
        if self.promises > PROMISES_MAX {
            CROWDED.store(true, Ordering::Release);
        }
    }

    /// As [`put`](Self::put), of a promise, at the cost of wishes: there is no room.
    fn put_crowding(&mut self, range: Range, note: Attributes) {
        // Memory that is no longer managed is the least that can be lost.
        let wishes = self.entries().iter().enumerate().filter(|(_, (_, note))| !note.is_promise());
        if let Some((least, _)) = wishes.min_by_key(|(_, (range, _))| range.len()) {
            self.remove(least);
            self.put(range, note);
            return;
        }
        self.forget_wishes();
        if self.len == RANGES_MAX {
            self.lost = true;
        } else {
            self.put(range, note.without_wishes());
        }
    }

    /// Keeps promises only; neighbours that differed in wishes are one.
    fn forget_wishes(&mut self) {
        let mut kept = 0;
        for index in 0..self.len {
            let (range, note) = self.entries[index];
            let note = note.without_wishes();
            match self.entries[..kept].last_mut() {
                Some((last, same)) if last.end == range.start && *same == note => last.end = range.end,
                _ if note == Attributes::default() => {}
                _ => {
                    self.entries[kept] = (range, note);
                    kept += 1;
                }
            }
        }
        (self.len, self.promises) = (kept, kept);
    }

    fn remove(&mut self, index: usize) {
        self.promises -= usize::from(self.entries[index].1.is_promise());
        self.entries.copy_within(index + 1..self.len, index);
        self.len -= 1;
    }
}

impl Default for RangeAttributes {
    fn default() -> Self {
        RangeAttributes::new()
    }
}

/// 2 MiB chunks that may hold merged pages: a superset, kept as a hash set that only grows.
///
/// When it is full every chunk counts as merged: slower, never wrong.
#[derive(Debug)]
pub struct MergedChunks {
    slots: [u64; MergedChunks::SLOTS],
    len: usize,
}

impl MergedChunks {
    const SLOTS: usize = 1 << 15;
    const SHIFT: u32 = 21;
    /// So many neighbouring chunks have neighbouring slots: chunks of one area would else touch a page of the table each.
    const NEIGHBOURS: u64 = 64;

    /// Makes an empty set.
    pub const fn new() -> MergedChunks {
        MergedChunks { slots: [0; MergedChunks::SLOTS], len: 0 }
    }

    /// True if nothing was ever merged.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Forgets all chunks: nothing is merged any more.
    pub fn clear(&mut self) {
        // Only the pages that were written: the others need no memory.
        self.slots.iter_mut().filter(|slot| **slot != 0).for_each(|slot| *slot = 0);
        self.len = 0;
    }

    /// Remembers that pages in `range` are merged.
    pub fn add(&mut self, range: Range) {
        for chunk in range.start >> Self::SHIFT..=(range.end - 1) >> Self::SHIFT {
            if self.len * 2 >= Self::SLOTS {
                self.len = Self::SLOTS;
                return;
            }
            let mut slot = Self::slot(chunk);
            while self.slots[slot] != 0 && self.slots[slot] != chunk {
                slot = (slot + 1) % Self::SLOTS;
            }
            if self.slots[slot] == 0 {
                self.slots[slot] = chunk;
                self.len += 1;
            }
        }
    }

    /// True if pages in `range` may be merged.
    pub fn may_overlap(&self, range: Range) -> bool {
        if self.len == 0 || range.is_empty() {
            return false;
        }
        let (first, last) = (range.start >> Self::SHIFT, (range.end - 1) >> Self::SHIFT);
        if self.len >= Self::SLOTS || last - first > 4096 {
            return true;
        }
        (first..=last).any(|chunk| {
            let mut slot = Self::slot(chunk);
            while self.slots[slot] != 0 {
                if self.slots[slot] == chunk {
                    return true;
                }
                slot = (slot + 1) % Self::SLOTS;
            }
            false
        })
    }

    fn slot(chunk: u64) -> usize {
        let group = (chunk / Self::NEIGHBOURS).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40;
        (group * Self::NEIGHBOURS + chunk % Self::NEIGHBOURS) as usize % Self::SLOTS
    }
}

impl Default for MergedChunks {
    fn default() -> Self {
        MergedChunks::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn notes_go_where_the_mapping_goes() {
        let range = |start, end| Range { start, end };
        let marked = || {
            let mut table = Box::new(RangeAttributes::new());
            table.change(range(10, 20), |note| note.mergeable = true);
            table.change(range(12, 14), |note| note.excluded = true);
            table.change(range(18, 20), |note| note.dont_fork = true);
            table.change(range(100, 130), |note| note.locked = true);
            table
        };
        let excluded = |table: &RangeAttributes| (0..200).filter(|&at| table.at(at).excluded).collect::<Vec<_>>();
        let dont_fork = |table: &RangeAttributes| (0..200).filter(|&at| table.at(at).dont_fork).collect::<Vec<_>>();
        for keeps in [false, true] {
            let mut table = marked();
            table.carry(range(8, 20), range(108, 120), keeps);
            assert_eq!(excluded(&table), if keeps { vec![12, 13, 112, 113] } else { vec![112, 113] });
            assert_eq!(table.at(15).mergeable, keeps);
            assert_eq!(table.at(109), Attributes::default());
            assert!(table.at(107).locked && table.at(120).locked && !table.at(115).locked && table.at(115).mergeable);
        }
        // Longer in place, longer elsewhere, and shorter.
        let mut table = marked();
        table.carry(range(10, 20), range(10, 23), false);
        assert_eq!(dont_fork(&table), [18, 19, 20, 21, 22]);
        table.carry(range(10, 23), range(50, 65), false);
        assert_eq!((excluded(&table), dont_fork(&table)), (vec![52, 53], vec![58, 59, 60, 61, 62, 63, 64]));
        table.carry(range(50, 65), range(70, 73), false);
        assert_eq!((excluded(&table), dont_fork(&table)), (vec![72], vec![]));
        // As long as before: nothing goes.
        table.forget(range(71, 71));
        assert_eq!((table.at(71).mergeable, excluded(&table)), (true, vec![72]));
    }

    #[test]
    fn small_ranges_that_are_merely_managed_leave_room() {
        let mut table = Box::new(RangeAttributes::new());
        let at = |number: u64| Range { start: number << 24, end: (number << 24) + SMALL_LEN / 8 };
        let note = |table: &mut RangeAttributes, range| table.change(range, |note| note.seen = true);
        (1..=2 * RANGES_MAX as u64).for_each(|number| note(&mut table, at(number)));
        assert_eq!(table.entries().len(), SMALL_MAX);
        let (large, after) = (1 << 50, 1 << 51);
        note(&mut table, Range { start: large, end: large + SMALL_LEN });
        table.change(Range { start: after, end: after + 1 }, |note| note.mergeable = true);
        assert!(table.at(large).seen && table.at(after).mergeable && table.at(at(1).start).seen);
        // What a known range grows by needs no entry of its own.
        note(&mut table, Range { start: at(1).end, end: at(1).end + 1 });
        assert!(table.at(at(1).end).seen && table.at(at(1).start).seen);
        // Another one has room once there is some.
        table.forget(Range { start: 0, end: at(4).end });
        note(&mut table, at(1));
        assert!(table.at(at(1).start).seen);
    }

    #[test]
    fn the_table_agrees_with_a_map_of_pages() {
        let mut random = fastrand::Rng::with_seed(7);
        let mut table = Box::new(RangeAttributes::new());
        let mut model: BTreeMap<u64, Attributes> = BTreeMap::new();
        for _ in 0..20_000 {
            let start = random.u64(..64);
            let range = Range { start, end: start + random.u64(1..13) };
            match random.u64(..4) {
                0 => {
                    table.forget(range);
                    for page in range.start..range.end {
                        model.remove(&page);
                    }
                }
                1 => {
                    table.change(range, |note| note.mergeable = true);
                    (range.start..range.end).for_each(|page| model.entry(page).or_default().mergeable = true);
                }
                2 => {
                    table.change(range, |note| note.mergeable = false);
                    (range.start..range.end).for_each(|page| model.entry(page).or_default().mergeable = false);
                }
                _ => {
                    table.change(range, |note| note.dont_fork = true);
                    (range.start..range.end).for_each(|page| model.entry(page).or_default().dont_fork = true);
                }
            }
            for page in 0..80 {
                assert_eq!(table.at(page), model.get(&page).copied().unwrap_or_default(), "page {page}");
            }
            let disjoint = table.entries().windows(2).all(|pair| pair[0].0.end <= pair[1].0.start);
            assert!(disjoint && table.entries().iter().all(|(range, _)| !range.is_empty()));
        }
        assert!(!table.is_lost());
    }

    #[test]
    fn a_full_table_forgets_no_promise() {
        let range = |start: usize, len| Range { start: start as u64, end: start as u64 + len };
        let promises = |table: &RangeAttributes| table.entries().iter().filter(|(_, note)| note.is_promise()).count();
        let mut table = Box::new(RangeAttributes::new());
        for at in 0..RANGES_MAX + 9 {
            table.change(range(10 * at, 5 + u64::from(at == 7)), |note| note.mergeable = true);
        }
        assert_eq!((table.entries().len(), table.at(10 * RANGES_MAX as u64)), (RANGES_MAX, Attributes::default()));
        // One that takes a place, and one that takes two: what is cut through.
        table.change(range(10 * RANGES_MAX, 2), |note| note.locked = true);
        table.change(range(72, 2), |note| note.dont_fork = true);
        assert!(table.at(10 * RANGES_MAX as u64).locked && table.at(72).dont_fork && table.at(72).mergeable);
        assert!(!table.at(74).dont_fork && table.keeps_mapping(range(10 * RANGES_MAX, 1)));
        assert_eq!((table.entries().len(), promises(&table)), (RANGES_MAX, 2));
        assert!(!CROWDED.load(Ordering::Relaxed), "there is room for promises");
        // Every other one has none of the first, and whatever comes between is known, too.
        for at in 0..PROMISES_MAX - 2 {
            table.change(range(10 * at + 100, 3), |note| note.sealed = true);
        }
        let known: Vec<u64> = (0..10 * RANGES_MAX as u64 + 100).filter(|&at| table.at(at).is_promise()).collect();
        assert_eq!((promises(&table), CROWDED.load(Ordering::Relaxed)), (PROMISES_MAX, false));
        table.change(range(0, 10 * RANGES_MAX as u64 + 100), |note| note.excluded = true);
        assert!(
            known.iter().all(|&at| table.at(at).is_promise()) && !table.is_lost() && CROWDED.load(Ordering::Relaxed)
        );
        assert!((0..10 * RANGES_MAX as u64 + 100).all(|at| table.excludes(Range { start: at, end: at + 1 })));
        assert!(!table.excludes(range(20 * RANGES_MAX, 1)));
        // A program that goes on all the same is left alone altogether.
        for at in 0..RANGES_MAX {
            table.change(range(10 * at + 20 * RANGES_MAX, 1), |note| note.locked = true);
        }
        assert!(table.is_lost() && table.excludes(range(100 * RANGES_MAX, 1)));
        assert!(table.keeps_mapping(range(100 * RANGES_MAX, 1)));
        let disjoint = table.entries().windows(2).all(|pair| pair[0].0.end <= pair[1].0.start);
        assert!(disjoint && promises(&table) == table.promises);
    }

    /// A handler changes the table wherever in changing it its thread was.
    #[test]
    fn a_handler_changes_the_table_too() {
        struct Both(core::cell::UnsafeCell<RangeAttributes>);
        // SAFETY: one thread uses it, and its handler.
        unsafe impl Sync for Both {}
        static ATTRIBUTES: Both = Both(core::cell::UnsafeCell::new(RangeAttributes::new()));
        static DONE: core::sync::atomic::AtomicU64 = core::sync::atomic::AtomicU64::new(0);
        // SAFETY: one thread uses it, and its handler does not run while the table changes.
        let table = || unsafe { &mut *ATTRIBUTES.0.get() };
        let mark = move |start: u64, locked: bool| {
            table().change(Range { start, end: start + 5 }, |note| note.locked = locked)
        };
        extern "C" fn handle(_: libc::c_int) {
            let done = DONE.fetch_add(1, Ordering::Relaxed);
            // SAFETY: the interrupted thread is not in a change: signals are blocked there.
            let table = unsafe { &mut *ATTRIBUTES.0.get() };
            table.change(Range { start: 7, end: 9 }, |note| note.sealed = done.is_multiple_of(2));
        }
        // As where the agent leaves, or has given up.
        crate::state::SHARED.phase.store(3, Ordering::Relaxed);
        // Long enough for many signals to come while it moves.
        (1..8000).for_each(|at| mark(at * 10, true));
        std::thread::spawn(move || {
            // SAFETY: the handler touches what is this thread's; no other has the timer's signal.
            unsafe {
                libc::signal(libc::SIGVTALRM, handle as *const () as libc::sighandler_t);
                let mut timer: libc::timer_t = core::ptr::null_mut();
                let mut event: libc::sigevent = core::mem::zeroed();
                event.sigev_notify = libc::SIGEV_THREAD_ID;
                event.sigev_signo = libc::SIGVTALRM;
                event.sigev_notify_thread_id = libc::gettid();
                assert_eq!(libc::timer_create(libc::CLOCK_MONOTONIC, &mut event, &mut timer), 0);
                let often = libc::timespec { tv_sec: 0, tv_nsec: 20_000 };
                let times = libc::itimerspec { it_interval: often, it_value: often };
                assert_eq!(libc::timer_settime(timer, 0, &times, core::ptr::null_mut()), 0);
                let deadline = std::time::Instant::now() + std::time::Duration::from_secs(120);
                while DONE.load(Ordering::Relaxed) < 20_000 && std::time::Instant::now() < deadline {
                    mark(20, false);
                    mark(20, true);
                }
                libc::timer_delete(timer);
            }
            let locked: Vec<u64> = (0..80_000).filter(|&at| table().at(at).locked).collect();
            let expected: Vec<u64> = (1..8000).flat_map(|at| at * 10..at * 10 + 5).collect();
            assert!(locked == expected, "{} and {}", locked.len(), expected.len());
            let sealed = DONE.load(Ordering::Relaxed) % 2 == 1;
            assert_eq!(table().entries().len(), 7999 + usize::from(sealed));
        })
        .join()
        .unwrap();
    }

    #[test]
    fn merged_chunks_are_a_superset() {
        let mut set = Box::new(MergedChunks::new());
        let at = |chunk: u64| Range { start: chunk << 21, end: (chunk << 21) + 4096 };
        assert!(!set.may_overlap(at(5)));
        for chunk in (1..10_000).step_by(3) {
            set.add(at(chunk));
        }
        assert!(set.may_overlap(at(4)) && !set.may_overlap(at(5)));
        assert!(set.may_overlap(Range { start: 5 << 21, end: 8 << 21 }));
        for chunk in 10_000..40_000 {
            set.add(at(chunk));
        }
        assert!(set.may_overlap(at(5)), "a full set says yes to all");
    }

    #[test]
    fn merged_chunks_agree_with_a_set_and_neighbours_share_memory() {
        let mut random = fastrand::Rng::with_seed(11);
        let (mut set, mut model) = (Box::new(MergedChunks::new()), std::collections::BTreeSet::new());
        let at = |chunk: u64| Range { start: chunk << 21, end: (chunk << 21) + 4096 };
        for _ in 0..200 {
            let (first, count) = (random.u64(1..1 << 26), random.u64(1..100));
            (first..first + count).for_each(|chunk| set.add(at(chunk)));
            model.extend(first..first + count);
        }
        let near = model.iter().flat_map(|chunk| [chunk - 1, *chunk, chunk + 1, chunk + 64]).collect::<Vec<_>>();
        assert!(near.iter().all(|chunk| set.may_overlap(at(*chunk)) == model.contains(chunk)));
        set.clear();
        assert!(set.is_empty() && set.slots.iter().all(|slot| *slot == 0));
        // 64 MiB.
        (5000..5032).for_each(|chunk| set.add(at(chunk)));
        let pages = set.slots.chunks(512).filter(|page| page.iter().any(|slot| *slot != 0)).count();
        assert!(pages <= 2, "{pages}");
    }
}
