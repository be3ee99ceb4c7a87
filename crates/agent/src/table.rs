//! What the program told us about its memory: included and excluded ranges, and where merged pages lie.
//!
//! Fixed arrays, no allocation. Everything here is touched only while the guard is held.

use pagefold_os::Range;

/// Ranges that are told apart at most.
const RANGES_MAX: usize = 1024;

/// What is known about a range.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Note {
    /// Managed because the program asked for it.
    pub mergeable: bool,
    /// Left alone because the program asked for it, or marked it as secret.
    pub excluded: bool,
    /// Left alone while the program tracks it by a userfaultfd of its own.
    pub tracked: bool,
    /// Locked into memory.
    pub locked: bool,
    /// Sealed: nobody replaces or moves it any more.
    pub sealed: bool,
    /// Mapped through an interposed call: its end is seen as well.
    pub seen: bool,
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

impl Note {
    /// True if the program wants it left alone.
    pub const fn is_excluded(&self) -> bool {
        self.excluded || self.tracked || self.locked || self.sealed
    }
}

/// Disjoint ranges with notes, in order of address.
#[derive(Debug)]
pub struct Table {
    entries: [(Range, Note); RANGES_MAX],
    len: usize,
    /// Ranges that did not fit: the program has more than we follow.
    pub overflow: u64,
}

const EMPTY: (Range, Note) = (
    Range { start: 0, end: 0 },
    Note {
        mergeable: false,
        excluded: false,
        tracked: false,
        locked: false,
        sealed: false,
        seen: false,
        dont_fork: false,
        wipe_on_fork: false,
        dont_dump: false,
        huge: false,
        small: false,
    },
);

impl Table {
    /// Makes an empty table.
    pub const fn new() -> Table {
        Table { entries: [EMPTY; RANGES_MAX], len: 0, overflow: 0 }
    }

    /// The ranges.
    pub fn entries(&self) -> &[(Range, Note)] {
        &self.entries[..self.len]
    }

    /// The note at `addr`.
    pub fn at(&self, addr: u64) -> Note {
        let after = self.entries().partition_point(|(range, _)| range.end <= addr);
        match self.entries().get(after) {
            Some((range, note)) if range.start <= addr => *note,
            _ => Note::default(),
        }
    }

    /// Where the stretch with one note that begins at `addr` ends (at `end` at most), and that note.
    pub fn stretch(&self, addr: u64, end: u64) -> (u64, Note) {
        let index = self.entries().partition_point(|(entry, _)| entry.end <= addr);
        match self.entries().get(index) {
            Some((entry, note)) if entry.start <= addr => (entry.end.min(end), *note),
            Some((entry, _)) => (entry.start.min(end), Note::default()),
            None => (end, Note::default()),
        }
    }

    /// True if the program wants part of `range` left alone.
    pub fn excludes(&self, range: Range) -> bool {
        let first = self.entries().partition_point(|(entry, _)| entry.end <= range.start);
        self.entries()[first..]
            .iter()
            .take_while(|(entry, _)| entry.start < range.end)
            .any(|(_, note)| note.is_excluded())
    }

    /// Where what is locked begins in `range`.
    pub fn first_locked(&self, range: Range) -> Option<u64> {
        let locked = |(entry, note): &&(Range, Note)| note.locked && entry.overlaps(&range);
        self.entries().iter().find(locked).map(|(entry, _)| entry.start.max(range.start))
    }

    /// True if part of `range` must stay in the mapping that it has: it is locked or sealed.
    pub fn keeps_mapping(&self, range: Range) -> bool {
        self.entries().iter().any(|(entry, note)| (note.locked || note.sealed) && entry.overlaps(&range))
    }

    /// Applies `change` to every note in `range`, splitting and adding entries as needed.
    pub fn change(&mut self, range: Range, change: impl Fn(&mut Note)) {
        let mut at = range.start;
        while at < range.end {
            let index = self.entries().partition_point(|(entry, _)| entry.end <= at);
            let (piece_end, mut note, inside) = match self.entries().get(index) {
                Some((entry, note)) if entry.start <= at => (entry.end.min(range.end), *note, true),
                Some((entry, _)) => (entry.start.min(range.end), Note::default(), false),
                None => (range.end, Note::default(), false),
            };
            change(&mut note);
            if inside {
                self.cut(Range { start: at, end: piece_end });
            }
            if note != Note::default() {
                self.put(Range { start: at, end: piece_end }, note);
            }
            at = piece_end;
        }
    }

    /// Applies `change` to every note that there is.
    pub fn change_noted(&mut self, change: impl Fn(&mut Note)) {
        let mut at = 0;
        while let Some((range, note)) = self.entries().iter().find(|(range, _)| range.end > at).copied() {
            at = range.end;
            let mut changed = note;
            change(&mut changed);
            if changed != note {
                self.change(range, |note| *note = changed);
            }
        }
    }

    /// Forgets `range`: it was unmapped or replaced.
    pub fn forget(&mut self, range: Range) {
        self.cut(range);
    }

    /// The mapping at `from` is at `to` now, which is longer or shorter, perhaps at the same address. Notes come along, those
    /// of the end for what grew; `from` `keeps` its own if it is still mapped.
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
            if note != Note::default() && part.start < part.end {
                self.change(part, |to| *to = note);
            }
            at = end;
        }
        let grown = Range { start: to.start + from.len(), end: to.end };
        if grown.start < grown.end {
            self.forget(grown);
            if last != Note::default() {
                self.change(grown, |to| *to = last);
            }
        }
    }

    fn cut(&mut self, range: Range) {
        let mut index = 0;
        while index < self.len {
            let (entry, note) = self.entries[index];
            if !entry.overlaps(&range) {
                index += 1;
                continue;
            }
            let left = Range { start: entry.start, end: range.start };
            let right = Range { start: range.end, end: entry.end };
            self.remove(index);
            if !left.is_empty() {
                self.put(left, note);
            }
            if !right.is_empty() {
                self.put(right, note);
            }
        }
    }

    fn put(&mut self, mut range: Range, note: Note) {
        let mut index = self.entries().partition_point(|(entry, _)| entry.end <= range.start);
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
        if self.len == RANGES_MAX {
            self.overflow += 1;
            return;
        }
        self.entries.copy_within(index..self.len, index + 1);
        self.entries[index] = (range, note);
        self.len += 1;
    }

    fn remove(&mut self, index: usize) {
        self.entries.copy_within(index + 1..self.len, index);
        self.len -= 1;
    }
}

impl Default for Table {
    fn default() -> Self {
        Table::new()
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
        self.slots.fill(0);
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
        (chunk.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as usize % Self::SLOTS
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
            let mut table = Box::new(Table::new());
            table.change(range(10, 20), |note| note.mergeable = true);
            table.change(range(12, 14), |note| note.excluded = true);
            table.change(range(18, 20), |note| note.dont_fork = true);
            table.change(range(100, 130), |note| note.locked = true);
            table
        };
        let excluded = |table: &Table| (0..200).filter(|&at| table.at(at).excluded).collect::<Vec<_>>();
        let dont_fork = |table: &Table| (0..200).filter(|&at| table.at(at).dont_fork).collect::<Vec<_>>();
        for keeps in [false, true] {
            let mut table = marked();
            table.carry(range(8, 20), range(108, 120), keeps);
            assert_eq!(excluded(&table), if keeps { vec![12, 13, 112, 113] } else { vec![112, 113] });
            assert_eq!(table.at(15).mergeable, keeps);
            assert_eq!(table.at(109), Note::default());
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
    }

    #[test]
    fn the_table_agrees_with_a_map_of_pages() {
        let mut seed = 7u64;
        let mut random = |below: u64| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 33) % below
        };
        let mut table = Box::new(Table::new());
        let mut model: BTreeMap<u64, Note> = BTreeMap::new();
        for _ in 0..20_000 {
            let start = random(64);
            let range = Range { start, end: start + 1 + random(12) };
            match random(4) {
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
        assert_eq!(table.overflow, 0);
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
}
