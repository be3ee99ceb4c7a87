//! Plans against the plainest model of them: one page at a time.

use pagefold_merge::client::FREEZE_PAGES_MAX;
use pagefold_merge::page::PageState;
use pagefold_merge::plan::{PageRun, TargetSlot, mappings_added, remap_pieces, run_pages_min, runs};
use pagefold_merge::table::Table;
use pagefold_os::{PAGE_SIZE, Range};
use pagefold_pool::{SLOTS_PER_SEGMENT, Slot};
use proptest::prelude::*;

const PAGE: u64 = PAGE_SIZE as u64;
const START: u64 = 1 << 30;
const PAGES: u64 = 1200;

fn table() -> Table {
    let mut table = Table::default();
    table.set_ranges(&[Range::pages_from(START, PAGES)], |_| (0, Default::default()), |_, _| {}, |_| {});
    for page in 0..PAGES {
        table.set(START + page * PAGE, PageState::Candidate { indexed: true, backoff: 0 });
    }
    table
}

fn slot_of(state: PageState) -> Option<Slot> {
    if let PageState::Shared(slot) = state { Some(slot) } else { None }
}

/// Edges between mappings, counted page by page.
fn edges(table: &Table) -> i64 {
    let joined = |page: u64| {
        let at = |page| slot_of(table.state(START + page * PAGE));
        match (at(page), at(page + 1)) {
            (None, None) => true,
            (Some(a), Some(b)) => a.number() + 1 == b.number() && a.segment() == b.segment(),
            _ => false,
        }
    };
    (0..PAGES - 1).filter(|page| !joined(*page)).count() as i64
}

fn target() -> impl Strategy<Value = TargetSlot> {
    prop_oneof![Just(None), (0..60u32).prop_map(|slot| Some(Slot::from_number(SLOTS_PER_SEGMENT - 30 + slot)))]
}

proptest! {
    #[test]
    fn added_mappings_are_the_edges_that_appear(
        plans in proptest::collection::vec((1..PAGES - 60, 1..50u64, 0..4000u32), 1..40)
    ) {
        let mut table = table();
        for (page, len, slot) in plans {
            // A run stays in one segment, and lies on plain pages.
            let len = len.min(u64::from(SLOTS_PER_SEGMENT - slot % SLOTS_PER_SEGMENT));
            let range = Range::pages_from(START + page * PAGE, len);
            let addrs = || (range.start..range.end).step_by(PAGE_SIZE);
            if addrs().any(|addr| slot_of(table.state(addr)).is_some()) {
                continue;
            }
            let run = PageRun { range, target: Some(Slot::from_number(slot)) };
            let (before, added) = (edges(&table), mappings_added(&table, &run));
            for (offset, addr) in addrs().enumerate() {
                table.set(addr, PageState::Shared(Slot::from_number(slot + offset as u32)));
            }
            prop_assert_eq!(edges(&table) - before, added);
        }
    }

    #[test]
    fn runs_and_spans_hold_every_page_once_and_in_order(
        targets in proptest::collection::btree_map(0..PAGES, target(), 0..400),
        merged in proptest::collection::btree_set(0..PAGES, 0..20),
    ) {
        let mut table = table();
        for page in merged.iter().filter(|page| !targets.contains_key(page)) {
            table.set(START + page * PAGE, PageState::Shared(Slot::from_number(9)));
        }
        let pairs: Vec<(u64, TargetSlot)> = targets.iter().map(|(page, target)| (START + page * PAGE, *target)).collect();
        let runs = runs(pairs.iter().copied());
        let listed = |range: Range, target: &dyn Fn(u64) -> TargetSlot| -> Vec<(u64, TargetSlot)> {
            (0..range.pages()).map(|page| (range.start + page * PAGE, target(page))).collect()
        };
        let of_runs: Vec<(u64, TargetSlot)> =
            runs.iter().flat_map(|run| listed(run.range, &|page| run.target_at(page))).collect();
        prop_assert_eq!(&of_runs, &pairs);
        for run in &runs {
            if let Some(first) = run.target {
                let last = run.target_at(run.range.pages() - 1).unwrap();
                prop_assert_eq!(first.segment(), last.segment(), "a run of slots is one mapping");
            }
        }
        let pieces = remap_pieces(&table, &runs);
        let of_pieces: Vec<(u64, TargetSlot)> = pieces
            .iter()
            .flat_map(|piece| {
                let at = |page: u64| piece.slot.map(|slot| Slot::from_number(slot.number() + page as u32));
                listed(piece.range, &at)
            })
            .collect();
        prop_assert_eq!(&of_pieces, &pairs);
        for freeze in pieces.chunk_by(|a, b| a.freeze == b.freeze) {
            let (first, last) = (freeze[0].range.start, freeze[freeze.len() - 1].range.end);
            prop_assert!((last - first) / PAGE <= FREEZE_PAGES_MAX);
            let frozen = (first..last).step_by(PAGE_SIZE);
            prop_assert!(frozen.into_iter().all(|addr| slot_of(table.state(addr)).is_none()), "merged pages never freeze");
            let held_segments: u64 = freeze.iter().map(|piece| piece.range.pages()).sum();
            prop_assert!(held_segments * 4 >= (last - first) / PAGE, "a quarter at least is to be merged");
        }
    }

    #[test]
    fn the_fuller_the_budget_the_longer_the_run(budget in 0u64..1 << 20, used in 0u64..1 << 21, more in 0u64..1000) {
        prop_assert!(run_pages_min(used, budget) <= run_pages_min(used + more, budget));
        prop_assert!(used < budget || run_pages_min(used.max(1), budget) == u64::MAX);
        prop_assert!(used * 2 >= budget || run_pages_min(used, budget) == 1);
    }
}
