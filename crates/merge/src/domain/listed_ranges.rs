//! Ranges and pool mappings as a client lists them: checked, and cut.

use crate::client::{FREEZE_PAGES_MAX, Gone, MAPPINGS_MAX, PoolMapping};
use pagefold_os::{ADDRESS_MAX, PAGE_SIZE, Range, ranges};
use pagefold_pool::SLOTS_PER_SEGMENT;

const PAGE: u64 = PAGE_SIZE as u64;

/// Pages of one client that are managed at most (512 GiB); the rest is left alone.
const PAGES_MAX: u64 = 1 << 27;

/// Checks what a client says about its managed ranges, and takes as many as we follow.
pub(super) fn check_regions(ranges: &mut Vec<Range>) -> Result<(), Gone> {
    let mut before = PAGE;
    let mut room = PAGES_MAX;
    for range in ranges.iter_mut() {
        check(*range, before)?;
        before = range.end;
        range.end = range.end.min(range.start + room * PAGE);
        room -= range.pages();
    }
    ranges.retain(|range| !range.is_empty());
    Ok(())
}

/// Checks what a client says about its pool mappings. What lies behind the end of a segment shows nothing.
pub(super) fn check_mappings(mappings: &mut Vec<PoolMapping>) -> Result<(), Gone> {
    let mut before = PAGE;
    for mapping in mappings.iter_mut() {
        check(mapping.range, before)?;
        before = mapping.range.end;
        let pages = SLOTS_PER_SEGMENT.saturating_sub(mapping.index);
        mapping.range.end = mapping.range.end.min(mapping.range.start + u64::from(pages) * PAGE);
    }
    mappings.retain(|mapping| !mapping.range.is_empty());
    if mappings.len() > MAPPINGS_MAX { Err(Gone) } else { Ok(()) }
}

/// Mappings that there are more for the pool's: one for each edge. Those that touch have one in common.
pub(super) fn edges(mappings: &[PoolMapping]) -> i64 {
    let touching = mappings.windows(2).filter(|pair| pair[0].range.end == pair[1].range.start).count();
    (mappings.len() * 2 - touching) as i64
}

/// A range of user memory that begins at `before` or later.
fn check(range: Range, before: u64) -> Result<(), Gone> {
    let aligned = range.start.is_multiple_of(PAGE) && range.end.is_multiple_of(PAGE);
    if aligned && before <= range.start && range.start < range.end && range.end <= ADDRESS_MAX {
        Ok(())
    } else {
        Err(Gone)
    }
}

/// The whole pages of `range` that lie in `limits`.
pub(super) fn clip(range: Range, limits: Range) -> Range {
    let start = range.start.clamp(limits.start, limits.end).next_multiple_of(PAGE);
    let end = range.end.min(limits.end) / PAGE * PAGE;
    Range { start, end: end.max(start) }
}

/// The parts of `range` that lie outside all `mappings`.
pub(super) fn without(range: Range, mappings: &[PoolMapping]) -> Vec<Range> {
    ranges::outside(range, parts_of(range, mappings).map(|(part, _)| part))
}

/// The parts of `range` inside single mappings, and the mappings that there are more once a part is none of the pool's.
pub(super) fn parts_of(range: Range, mappings: &[PoolMapping]) -> impl Iterator<Item = (Range, i64)> + use<'_> {
    let first = mappings.partition_point(|mapping| mapping.range.end <= range.start);
    mappings[first..].iter().take_while(move |mapping| mapping.range.start < range.end).map(move |mapping| {
        let part = range.intersection(&mapping.range);
        let added = i64::from(mapping.range.start < part.start) + i64::from(part.end < mapping.range.end);
        (part, added)
    })
}

/// The parts of `range` inside single mappings, each short enough to be frozen at once.
pub(super) fn within(range: Range, mappings: &[PoolMapping]) -> Vec<Range> {
    let mut parts = Vec::new();
    for (part, _) in parts_of(range, mappings) {
        let mut at = part.start;
        while at < part.end {
            let end = part.end.min(at + FREEZE_PAGES_MAX * PAGE);
            parts.push(Range { start: at, end });
            at = end;
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn pages(ranges: &[Range]) -> BTreeSet<u64> {
        ranges.iter().flat_map(|range| (range.start..range.end).step_by(PAGE_SIZE)).collect()
    }

    #[test]
    fn touching_mappings_have_an_edge_in_common() {
        let at = |page: u64, pages| PoolMapping {
            range: Range::pages_from(page * PAGE, pages),
            inode: 1,
            index: 7 * page as u32,
        };
        assert_eq!(edges(&[]), 0);
        assert_eq!(edges(&[at(16, 2)]), 2);
        assert_eq!(edges(&[at(16, 2), at(18, 1), at(19, 4)]), 4);
        assert_eq!(edges(&[at(16, 2), at(18, 1), at(20, 4)]), 5);
    }

    /// Disjoint, ascending ranges of gaps and lengths in pages.
    fn layout(parts: &[(u64, u64)]) -> Vec<Range> {
        let mut at = 16;
        let place = |(gap, len): &(u64, u64)| {
            let start = at + gap;
            at = start + len;
            Range::pages_from(start * PAGE, *len)
        };
        parts.iter().map(place).collect()
    }

    proptest! {
        #[test]
        fn without_and_within_cut_a_range_in_two_sets(
            parts in proptest::collection::vec((0u64..40, 1u64..600), 0..12),
            start in 0u64..2000,
            len in 1u64..3000,
        ) {
            let ranges = layout(&parts);
            let mappings: Vec<PoolMapping> =
                ranges.iter().map(|range| PoolMapping { range: *range, inode: 1, index: 0 }).collect();
            let range = Range::pages_from(start * PAGE, len);
            let outside = without(range, &mappings);
            let inside = within(range, &mappings);
            let all = pages(&[range]);
            let mapped = pages(&ranges);
            prop_assert_eq!(pages(&outside), all.difference(&mapped).copied().collect::<BTreeSet<u64>>());
            prop_assert_eq!(pages(&inside), all.intersection(&mapped).copied().collect::<BTreeSet<u64>>());
            for piece in inside {
                prop_assert!(!piece.is_empty() && piece.pages() <= FREEZE_PAGES_MAX);
                prop_assert!(ranges.iter().any(|range| range.contains(&piece)), "a piece lies in one mapping");
            }
        }

        #[test]
        fn what_a_client_claims_is_taken_as_it_is_or_not_at_all(
            claims in proptest::collection::vec((any::<u64>(), any::<u64>()), 1..4),
            parts in proptest::collection::vec((0u64..40, 1u64..600), 1..12),
            index in any::<u32>(),
        ) {
            let claimed: Vec<Range> = claims.iter().map(|(start, end)| Range { start: *start, end: *end }).collect();
            let aligned = |range: &Range| Range { start: range.start & !(PAGE - 1), end: range.end & !(PAGE - 1) };
            for mut regions in [claimed.clone(), claimed.iter().map(aligned).collect()] {
                if check_regions(&mut regions).is_ok() {
                    prop_assert!(regions.iter().all(|range| range.start < range.end && range.end <= ADDRESS_MAX));
                    prop_assert!(regions.windows(2).all(|pair| pair[0].end <= pair[1].start));
                    prop_assert!(regions.iter().map(Range::pages).sum::<u64>() <= PAGES_MAX);
                }
            }
            let honest = layout(&parts);
            let mut regions = honest.clone();
            prop_assert_eq!(check_regions(&mut regions), Ok(()));
            prop_assert_eq!(&regions, &honest);
            let mut mappings: Vec<PoolMapping> =
                honest.iter().map(|range| PoolMapping { range: *range, inode: 1, index }).collect();
            prop_assert_eq!(check_mappings(&mut mappings), Ok(()));
            for mapping in mappings {
                prop_assert!(u64::from(mapping.index) + mapping.range.pages() <= u64::from(SLOTS_PER_SEGMENT));
            }
        }

        #[test]
        fn a_clipped_report_is_whole_pages_of_what_was_asked(start in any::<u64>(), end in any::<u64>(), at in 0u64..1 << 40, len in 1u64..1 << 20) {
            let limits = Range::pages_from(at * PAGE, len);
            let near = Range { start: start % (1 << 53), end: end % (1 << 53) };
            for report in [Range { start, end }, near, Range { start: u64::MAX - start % PAGE, end: u64::MAX }] {
                let clipped = clip(report, limits);
                prop_assert!(clipped.is_empty() || limits.contains(&clipped) && report.contains(&clipped));
                prop_assert!(clipped.is_empty() || clipped.start.is_multiple_of(PAGE) && clipped.end.is_multiple_of(PAGE));
            }
        }
    }
}
