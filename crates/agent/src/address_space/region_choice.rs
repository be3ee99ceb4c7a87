//! Which managed ranges are listed where there are more than a list holds: the longest ones.
//!
//! Lengths are compared by their power of two. Of two ranges that are alike in that, the merged one comes first: a range that is no
//! longer listed keeps its pool mappings, but its pages are no longer counted as sharers. Then the lower address comes first, because
//! the list is in order of address.

use pagefold_os::Range;
use pagefold_protocol::message::LIST_MAX;

/// Twice the logarithms of lengths, and whether part of the range is merged.
const CLASSES: usize = 128;

/// The ranges of one reading of the mappings, counted, and those of them that are chosen.
pub(crate) struct RegionChoice {
    counts: [u32; CLASSES],
    /// Ranges of a higher class are chosen, and of this one so many more.
    last_class: usize,
    room: usize,
}

impl RegionChoice {
    /// Chooses the first ranges that come.
    pub(crate) const fn first() -> RegionChoice {
        RegionChoice { counts: [0; CLASSES], last_class: 0, room: LIST_MAX }
    }

    /// Chooses the longest of the ranges that were counted, for another reading; nothing if all of them were chosen.
    pub(crate) fn longest(&self) -> Option<RegionChoice> {
        let mut room = LIST_MAX;
        for last_class in (0..CLASSES).rev() {
            let count = self.counts[last_class] as usize;
            if count > room {
                return Some(RegionChoice { counts: [0; CLASSES], last_class, room });
            }
            room -= count;
        }
        None
    }

    /// Counts `range`, of which part may be merged. Returns true if it is chosen.
    pub(crate) fn takes(&mut self, range: Range, is_merged: bool) -> bool {
        let class = 2 * range.len().max(1).ilog2() as usize + usize::from(is_merged);
        self.counts[class] = self.counts[class].saturating_add(1);
        if class > self.last_class && self.last_class > 0 {
            return true;
        }
        let takes = class >= self.last_class && self.room > 0;
        self.room -= usize::from(takes);
        takes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The indices of what is chosen of ranges with these lengths, some of them merged.
    fn chosen(ranges: &[(u64, bool)]) -> Vec<usize> {
        let list = |choice: &mut RegionChoice| -> Vec<usize> {
            let takes = |&(len, is_merged): &(u64, bool)| choice.takes(Range { start: 0, end: len }, is_merged);
            ranges.iter().map(takes).enumerate().filter(|(_, takes)| *takes).map(|(index, _)| index).collect()
        };
        let mut first = RegionChoice::first();
        let all = list(&mut first);
        first.longest().map_or(all, |mut choice| list(&mut choice))
    }

    #[test]
    fn all_are_chosen_while_there_is_room() {
        let ranges = vec![(4096, false); LIST_MAX];
        assert_eq!(chosen(&ranges).len(), LIST_MAX);
        assert_eq!(chosen(&[(1, false), (1 << 62, true), (u64::MAX, true)]), [0, 1, 2]);
    }

    #[test]
    fn small_ranges_displace_no_large_one() {
        let mut ranges = vec![(128 << 10, false); 20_000];
        ranges.extend([(4 << 30, false), (1 << 20, true)]);
        let chosen = chosen(&ranges);
        assert_eq!(chosen.len(), LIST_MAX);
        assert!(chosen.ends_with(&[LIST_MAX - 3, 20_000, 20_001]), "the lowest of the small ones, and both large ones");
    }

    #[test]
    fn merged_ranges_stay_before_others_of_their_length() {
        let mut ranges = vec![(256 << 10, false); 3000];
        ranges[2500..].fill((300 << 10, true));
        let (chosen, kept) = (chosen(&ranges), LIST_MAX - 500);
        assert_eq!(chosen, (0..kept).chain(2500..3000).collect::<Vec<_>>());
    }
}
