//! From (page, slot) pairs to pieces: runs, freezes, and what they cost in mappings.

use crate::client::{FREEZE_PAGES_MAX, RemapPiece};
use crate::page::PageState;
use crate::table::{CHUNK_LEN, Table};
use pagefold_os::{PAGE_SIZE, Range};
use pagefold_pool::Slot;

const PAGE: u64 = PAGE_SIZE as u64;

/// What a page shall show: a slot, or nothing (it is zero).
pub type TargetSlot = Option<Slot>;

/// Neighbouring pages with neighbouring targets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRun {
    /// The pages.
    pub range: Range,
    /// The first page's target.
    pub target: TargetSlot,
}

impl PageRun {
    /// The target of the page after `pages` pages.
    pub fn target_at(&self, pages: u64) -> TargetSlot {
        self.target.map(|slot| Slot::from_number(slot.number() + pages as u32))
    }

    fn takes(&self, addr: u64, target: TargetSlot) -> bool {
        self.range.end == addr
            && match (self.target_at(self.range.pages()), target) {
                (None, None) => true,
                // A run of slots ends with its segment: the next one is another file.
                (Some(next), Some(slot)) => next == slot && slot.index() != 0,
                _ => false,
            }
    }
}

/// Joins pairs, ascending by address, to runs.
pub fn runs(pairs: impl IntoIterator<Item = (u64, TargetSlot)>) -> Vec<PageRun> {
    let mut runs: Vec<PageRun> = Vec::new();
    for (addr, target) in pairs {
        match runs.last_mut() {
            Some(run) if run.takes(addr, target) => run.range.end += PAGE,
            _ => runs.push(PageRun { range: Range::pages_from(addr, 1), target }),
        }
    }
    runs
}

/// Mappings that the process has more (or fewer) once `run` is mapped.
pub fn mappings_added(table: &Table, run: &PageRun) -> i64 {
    let Some(first) = run.target else { return 0 };
    let last = run.target_at(run.range.pages() - 1);
    let edge = |outside: PageState, joined: bool| match outside {
        // Beside other slots there was an edge already; it goes if the slots join.
        PageState::Shared(_) | PageState::Broken { .. } if joined => -1,
        PageState::Shared(_) | PageState::Broken { .. } => 0,
        _ => 1,
    };
    let left = table.state(run.range.start.wrapping_sub(PAGE));
    let right = table.state(run.range.end);
    let joins = |state: PageState, slot: Option<u32>, edge_index: u32| match (state, slot) {
        (PageState::Shared(other), Some(number)) => {
            other.number() == number && number % pagefold_pool::SLOTS_PER_SEGMENT != edge_index
        }
        _ => false,
    };
    let before = first.number().checked_sub(1);
    let after = last.and_then(|slot| slot.number().checked_add(1));
    edge(left, joins(left, before, pagefold_pool::SLOTS_PER_SEGMENT - 1)) + edge(right, joins(right, after, 0))
}

/// The shortest run, in pages, that is worth its mappings when `used` of `budget` mappings are taken.
pub fn run_pages_min(used: u64, budget: u64) -> u64 {
    if used >= budget {
        return u64::MAX;
    }
    match used.saturating_mul(100) / budget {
        0..50 => 1,
        50..75 => 4,
        _ => 16,
    }
}

/// Pages of one freeze at most, merged or between those that are: their threads wait meanwhile. Twice as many are merged no
/// faster, and 99 % of waits were below 256 us instead of 160.
const FREEZE_PAGES: u64 = 64;
const _: () = assert!(FREEZE_PAGES <= FREEZE_PAGES_MAX);

/// Pieces of one freeze at most: each is a system call while it lasts. With 16 waits were below 256 us, too.
const FREEZE_PIECES_MAX: usize = 12;

/// Cuts runs into pieces and groups pieces into freezes: at most 64 pages and 12 pieces,
/// nothing merged between them, and at least a quarter of them to be merged, for freezing the others costs as well.
/// `runs` ascend by address.
pub fn remap_pieces(table: &Table, runs: &[PageRun]) -> Vec<RemapPiece> {
    let mut pieces: Vec<RemapPiece> = Vec::new();
    let mut freeze = 0;
    let mut freeze_start = 0;
    let mut freeze_planned = 0;
    let mut freeze_pieces = 0;
    for run in runs {
        let mut at = run.range.start;
        while at < run.range.end {
            // The agent takes huge pages whole where pieces cover them.
            let end = run.range.end.min(at + FREEZE_PAGES * PAGE).min(at / CHUNK_LEN * CHUNK_LEN + CHUNK_LEN);
            let pages = (end - at) / PAGE;
            let joins = pieces.last().is_some_and(|last| {
                let whole = (end - freeze_start) / PAGE;
                whole <= FREEZE_PAGES
                    && freeze_pieces < FREEZE_PIECES_MAX
                    && (freeze_planned + pages) * 4 >= whole
                    && plain_between(table, last.range.end, at)
            });
            if !joins {
                freeze += 1;
                freeze_start = at;
                freeze_planned = 0;
                freeze_pieces = 0;
            }
            freeze_planned += pages;
            freeze_pieces += 1;
            pieces.push(RemapPiece {
                range: Range { start: at, end },
                slot: run.target_at((at - run.range.start) / PAGE),
                freeze,
                follows: false,
            });
            at = end;
        }
    }
    pieces
}

/// True if all pages from `start` to `end` are managed, plain memory.
fn plain_between(table: &Table, start: u64, end: u64) -> bool {
    (start..end).step_by(PAGE_SIZE).all(|addr| match table.find(addr) {
        Some((chunk, index)) => matches!(
            chunk.state(index),
            PageState::Armed { .. }
                | PageState::Candidate { .. }
                | PageState::Sleeping { .. }
                | PageState::Arming { .. }
                | PageState::Zero
        ),
        None => false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(pages: u64) -> Table {
        let mut table = Table::default();
        table.set_ranges(&[Range::pages_from(1 << 30, pages)], |_| (0, Default::default()), |_, _| {}, |_| {});
        for page in 0..pages {
            table.set((1 << 30) + page * PAGE, PageState::Candidate { indexed: true, backoff: 0 });
        }
        table
    }

    fn at(page: u64) -> u64 {
        (1 << 30) + page * PAGE
    }

    fn slot(number: u32) -> TargetSlot {
        Some(Slot::from_number(number))
    }

    #[test]
    fn runs_end_where_slots_or_segments_do() {
        let pairs = [
            (at(0), slot(2046)),
            (at(1), slot(2047)),
            (at(2), slot(2048)),
            (at(3), None),
            (at(4), None),
            (at(6), None),
        ];
        let lens: Vec<u64> = runs(pairs).iter().map(|run| run.range.pages()).collect();
        assert_eq!(lens, [2, 1, 2, 1]);
    }

    #[test]
    fn freezes_are_short_dense_and_never_cross_merged_pages() {
        let mut table = table(4000);
        let all: Vec<PageRun> = runs((0..4000).step_by(2).map(|page| (at(page), slot(page as u32 * 3))));
        table.set(at(1001), PageState::Shared(Slot::from_number(9)));
        let pieces = remap_pieces(&table, &all);
        assert_eq!(pieces.iter().map(|piece| piece.range.pages()).sum::<u64>(), 2000);
        for pair in pieces.windows(2) {
            assert!(pair[0].range.end <= pair[1].range.start);
            if pair[0].freeze == pair[1].freeze {
                assert!(!(pair[0].range.end..pair[1].range.start).step_by(PAGE_SIZE).any(|addr| addr == at(1001)));
            }
        }
        let first = pieces.iter().filter(|piece| piece.freeze == pieces[0].freeze);
        let pages = first.clone().next_back().unwrap().range.end - pieces[0].range.start;
        assert!(pages / PAGE <= FREEZE_PAGES && first.count() == FREEZE_PIECES_MAX);
        let sparse = runs((0..4000).step_by(9).map(|page| (at(page), slot(0))));
        let alone = remap_pieces(&table, &sparse);
        assert!(
            alone.windows(2).all(|pair| pair[0].freeze != pair[1].freeze),
            "one in nine is not worth freezing the rest"
        );
        let long = remap_pieces(&table, &runs((0..1000).map(|page| (at(page), slot(page as u32)))));
        assert!(long.iter().all(|piece| piece.range.pages() <= FREEZE_PAGES));
        assert_eq!(long[1].slot, slot(FREEZE_PAGES as u32));
    }

    #[test]
    fn mappings_are_counted_by_edges() {
        let mut table = table(100);
        let run = |page, len, number| PageRun { range: Range::pages_from(at(page), len), target: slot(number) };
        assert_eq!(mappings_added(&table, &run(10, 4, 50)), 2);
        for page in 10..14 {
            table.set(at(page), PageState::Shared(Slot::from_number(40 + page as u32)));
        }
        assert_eq!(mappings_added(&table, &run(14, 1, 54)), 0, "it prolongs the run");
        assert_eq!(mappings_added(&table, &run(14, 1, 99)), 1);
        assert_eq!(mappings_added(&table, &PageRun { range: Range::pages_from(at(50), 5), target: None }), 0);
    }
}
