//! What a domain promises of its books, its budget and its memory, each on a machine where nothing else happens.

mod common;

use common::Scripted;
use pagefold_merge::client::{Gone, PoolMapping};
use pagefold_merge::page::PageState;
use pagefold_merge::sim::{Machine, Options, Process, page_of};
use pagefold_merge::{ClientId, Config, Domain, Unmerged};
use pagefold_os::{PAGE_SIZE, Range};
use pagefold_pool::{Key, Room, SEGMENT_LEN};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

const PAGE: u64 = PAGE_SIZE as u64;

struct Bench {
    machine: Machine,
    domain: Domain,
    now_ns: u64,
}

impl Bench {
    fn new(config: Config, options: Options) -> Bench {
        let domain = Domain::with_key(Config { period_ns: 1000, ..config }, Key::from_seed(5)).unwrap();
        Bench { machine: Machine::new(5, Options { interference: 0, ..options }), domain, now_ns: 0 }
    }

    fn simple() -> Bench {
        Bench::new(Config::default(), Options::default())
    }

    /// A process with pages of these contents, and its client.
    fn add(&self, contents: impl IntoIterator<Item = u32>) -> (Process, Range, ClientId) {
        let process = self.machine.spawn();
        let contents: Vec<u32> = contents.into_iter().collect();
        let range = process.map(contents.len() as u64);
        for (page, content) in contents.into_iter().enumerate().filter(|(_, content)| *content != 0) {
            process.write(range.start + page as u64 * PAGE, content);
        }
        let id = self.domain.add(Box::new(process.client()));
        (process, range, id)
    }

    fn periods(&mut self, count: u32) {
        for _ in 0..count {
            self.now_ns += self.domain.config().period_ns;
            while self.domain.step_any(self.now_ns, None, &mut Vec::new()).is_some() {}
            self.machine.check();
            assert_eq!(self.machine.failure(), None);
            assert_eq!(self.domain.audit(), Vec::<String>::new());
        }
    }
}

#[test]
fn room_for_fetched_pages_is_given_back_at_rest() {
    let mut bench = Bench::simple();
    bench.add(2..600);
    bench.add(2..600);
    bench.periods(8);
    let later = bench.now_ns + 2_000_000_000;
    assert!(!bench.domain.release_buffers(bench.now_ns), "it was used a moment ago");
    assert!(bench.domain.release_buffers(later), "there is some");
    assert!(!bench.domain.release_buffers(later), "there is no more");
    bench.add(2..600);
    bench.periods(8);
    assert_eq!(bench.domain.stats().pages_sharing, 3 * 598);
}

#[test]
fn equal_pages_take_one_slot_however_many_they_are() {
    let mut bench = Bench::simple();
    bench.add(vec![7; 600]);
    bench.add((0..600).map(|page| 7 + page % 3 * 10));
    bench.periods(8);
    let stats = bench.domain.stats();
    assert_eq!((stats.pages_shared, stats.pages_sharing), (3, 1200));
    assert_eq!(stats.pool_bytes, 3 * PAGE, "no slot was given that nobody shares");
}

/// A look reads the tables of all of a client's pages.
#[test]
fn memory_at_rest_is_looked_at_once_in_sixteen_periods() {
    let mut bench = Bench::new(Config { idle_pages_min: 0, ..Config::default() }, Options::default());
    let (process, range, _) = bench.add((0..300).map(|page| 2 + page % 100));
    bench.periods(12);
    assert_eq!(bench.domain.stats().pages_sharing, 300);
    let left_out = |bench: &Bench| bench.domain.stats().events.scans_skipped;
    let before = left_out(&bench);
    bench.periods(160);
    assert_eq!(left_out(&bench) - before, 150);
    // What the process does is seen at once, and all that follows from it.
    process.write(range.start + 7 * PAGE, 4000);
    bench.periods(1);
    assert_eq!(bench.domain.stats().events.cow_breaks, 1);
    bench.periods(10);
    assert_eq!(bench.domain.stats().pages_unshared, 1);
    // What others do to it, a little later.
    bench.periods(20);
    process.poke(range.start + 107 * PAGE, 4000);
    bench.periods(16);
    assert_eq!(bench.domain.stats().events.cow_breaks, 2);
    bench.periods(10);
    assert_eq!((bench.domain.stats().pages_sharing, bench.domain.stats().pages_unshared), (300, 0));
}

/// Two contents with fingerprints that begin alike are one for the index.
#[test]
fn what_only_looks_like_a_slot_is_not_compared_for_ever() {
    // The 8 bits of the smallest index, and the 23 that its leaves know beyond.
    let key = Key::from_seed(5);
    let mut seen = std::collections::HashMap::new();
    let alike = (2..).find_map(|content| {
        let like = key.fingerprint(&page_of(content)) >> 33;
        seen.insert(like, content).map(|other| (other, content))
    });
    let (a, b) = alike.expect("some fingerprints are alike");
    let config = Config { index_capacity: 64, idle_pages_min: 0, ..Config::default() };
    let mut bench = Bench::new(config, Options::default());
    bench.add([a; 40]);
    bench.periods(8);
    let (process, range, _) = bench.add([b; 2].into_iter().chain((0..20).map(|page| b + 1 + page)));
    bench.periods(20);
    let stats = bench.domain.stats();
    assert!((1..=4).contains(&stats.events.compare_failed), "{:?}", stats.events);
    assert_eq!((stats.pages_sharing, stats.pages_unshared, stats.pages_volatile), (40, 22, 0));
    bench.periods(100);
    let after = bench.domain.stats().events;
    assert_eq!(after.compare_failed, stats.events.compare_failed);
    assert!(after.scans_skipped - stats.events.scans_skipped >= 180, "all has come to rest: {after:?}");
    // Written, it is a page like any other.
    process.write(range.start, b + 1);
    bench.periods(8);
    assert_eq!(bench.domain.stats().pages_sharing, 42);
}

/// Whatever the processes do, and whatever is done to them: a look that is left out would have found nothing.
#[test]
fn looks_that_are_left_out_would_have_changed_nothing() {
    let mut left_out = 0;
    for seed in 0..12u64 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut below = |limit: u64| random.u64(..limit);
        let make = |idle_pages_min| {
            let config = Config { idle_pages_min, pool_max_bytes: 1 << 20, ..Config::default() };
            let bench = Bench::new(config, Options::default());
            let added = [60, 61, 400].map(|contents| bench.add((0..120).map(|page| page * 7 % contents)));
            (bench, added)
        };
        let mut sides = [make(0), make(u64::MAX)];
        for period in 0..150 {
            // A quarter of the time something happens, else nothing for long enough that all comes to rest.
            for _ in 0..if period / 12 % 4 == 0 { below(4) } else { 0 } {
                let (process, page, what) = (below(3) as usize, below(110), below(10));
                let content = below(60) as u32;
                for (bench, added) in &sides {
                    let (process, range, id) = &added[process];
                    let addr = range.start + page * PAGE;
                    match what {
                        0..5 => process.write(addr, content),
                        5 => process.pin(addr, content.is_multiple_of(2)),
                        6 => process.discard(Range::pages_from(addr, 4), content.is_multiple_of(2)),
                        7 => drop(bench.domain.unmerge(*id).map(|_| bench.domain.pause(*id, false))),
                        8 => process.write(addr, 0),
                        _ => (0..8).for_each(|next| process.write(addr + next * PAGE, content + next as u32)),
                    }
                }
            }
            let seen = sides.each_mut().map(|(bench, _)| {
                bench.periods(1);
                let stats = bench.domain.stats();
                left_out += stats.events.scans_skipped;
                let events = (stats.events.cow_breaks, stats.events.pages_restored, stats.events.pages_merged);
                (
                    stats.pages_shared,
                    stats.pages_sharing,
                    stats.pages_zero,
                    stats.pages_unshared,
                    stats.pages_volatile,
                    events,
                )
            });
            assert_eq!(seen[0], seen[1], "seed {seed}, period {period}");
        }
    }
    assert!(left_out > 1000, "{left_out}");
}

/// A slot for each of many neighbours with one content would be a mapping for each.
#[test]
fn one_page_very_often_takes_few_slots_and_few_mappings() {
    const PAGES: u32 = 8000;
    let config = Config { vma_budget: 1024, ..Config::default() };
    let mut bench = Bench::new(config, Options { pages_max: 1 << 14, ..Options::default() });
    let processes = [(); 2].map(|()| bench.add(vec![7; PAGES as usize]).0);
    // Here it has no neighbour of its own.
    let (mixed, ..) = bench.add((0..200).map(|page| if page % 2 == 0 { 7 } else { 100 + page }));
    bench.periods(100);
    let stats = bench.domain.stats();
    assert_eq!(stats.pages_sharing, u64::from(2 * PAGES + 100), "{:?}", stats.events);
    assert!(stats.pages_shared <= 66 && stats.pool_bytes <= 130 * PAGE, "{} slots", stats.pages_shared);
    for process in &processes {
        assert!(process.mappings() <= 2 * PAGES as usize / 64, "{} mappings", process.mappings());
    }
    assert!(mixed.mappings() >= 200);
    // What was shared so goes like any other.
    for process in processes.iter().chain([&mixed]) {
        process.exit();
    }
    bench.periods(4);
    let stats = bench.domain.stats();
    assert_eq!((stats.pages_sharing, stats.pool_bytes), (0, 0));
}

/// What lies behind the slot in the pool is nothing that the page behind would show.
#[test]
fn one_page_very_often_is_not_taken_for_the_start_of_a_run() {
    let mut bench = Bench::new(Config::default(), Options { pages_max: 1 << 14, ..Options::default() });
    let others = (0..200).map(|page| 1000 + page / 2);
    let (process, ..) = bench.add([7; 2].into_iter().chain(others).chain([7; 8000]));
    bench.periods(10);
    let (stats, mappings) = (bench.domain.stats(), process.mappings());
    assert_eq!((stats.pages_sharing, stats.events.compare_failed), (8202, 0));
    assert!(mappings <= 202 + 2 * 8000 / 64, "{mappings} mappings");
}

/// Copies would be memory for nothing where no neighbours have the content.
#[test]
fn a_page_that_stands_alone_very_often_takes_one_slot() {
    let config = Config { vma_budget: 1 << 20, ..Config::default() };
    let mut bench = Bench::new(config, Options { pages_max: 1 << 14, ..Options::default() });
    bench.add((0..8000).map(|page| if page % 2 == 0 { 7 } else { 10 + page }));
    bench.periods(10);
    let stats = bench.domain.stats();
    assert_eq!((stats.pages_shared, stats.pages_sharing), (1, 4000));
}

#[test]
fn isolated_duplicates_stay_within_the_budget_and_are_reported() {
    let config = Config { vma_budget: 40, ..Config::default() };
    let mut bench = Bench::new(config, Options::default());
    // Neighbours in the one process are no neighbours in the other. Slots are given in the order of one of them, which
    // may be merged whole; the other has no run that is longer than a page.
    let (a, _, id) = bench.add((0..400).map(|page| 2 + page * 2));
    let (b, _, other) = bench.add((0..400).map(|page| 2 + (page * 7 % 400) * 2));
    bench.periods(100);
    let mut mappings = [a.mappings(), b.mappings()];
    mappings.sort_unstable();
    assert!(mappings[0] <= 60 && (10..=60).contains(&mappings[1]), "{mappings:?} mappings");
    let stats = bench.domain.stats();
    assert!(stats.events.over_vma_budget_runs > 0);
    let limited = [id, other].map(|id| stats.clients[&id].not_merged.get("mapping limit").copied().unwrap_or(0));
    assert!(limited.iter().sum::<u64>() > 0, "{limited:?}");
}

/// A slot that neither side has mappings left for would be memory that is never given back.
#[test]
fn what_the_budget_leaves_out_takes_no_memory() {
    const PAGES: u32 = 4000;
    let config = Config { vma_budget: 200, ..Config::default() };
    let mut bench = Bench::new(config, Options { pages_max: 1 << 16, ..Options::default() });
    // Every second page has twins in the others, the rest have none: no run is longer than a page.
    let contents = |side: u32, factor: u32| {
        (0..PAGES).map(move |page| 2 + if page % 2 == 0 { page * factor % PAGES } else { page + PAGES * side } * 2)
    };
    for (side, factor) in [(1, 1), (2, 7), (3, 11)] {
        bench.add(contents(side, factor));
    }
    for _ in 0..300 {
        bench.periods(1);
        let stats = bench.domain.stats();
        assert!(
            stats.pool_bytes <= stats.pages_sharing * PAGE,
            "{} for {}",
            stats.pool_bytes / PAGE,
            stats.pages_sharing
        );
    }
    let stats = bench.domain.stats();
    assert!(stats.pages_sharing >= stats.pages_shared + 60, "{} of {}", stats.pages_shared, stats.pages_sharing);
    assert!(stats.events.over_vma_budget_runs > 0);
}

/// What waits for a client is counted by runs, not by pages: long ones take next to nothing of its budget.
#[test]
fn long_runs_are_no_claim_on_the_budget() {
    const PAGES: u32 = 1 << 15;
    let config = Config { vma_budget: 2000, ..Config::default() };
    let mut bench = Bench::new(config, Options { pages_max: 1 << 17, ..Options::default() });
    for _ in 0..2 {
        bench.add((0..PAGES).map(|page| 2 + page * 2));
    }
    bench.periods(10);
    let stats = bench.domain.stats();
    assert_eq!((stats.pages_sharing, stats.events.over_vma_budget_runs), (2 * u64::from(PAGES), 0));
}

/// A client without mappings left does not hold up others that have its contents too.
#[test]
fn twins_with_room_find_each_other_past_one_without() {
    const PAGES: u32 = 1000;
    let config = Config { vma_budget: 200, ..Config::default() };
    let mut bench = Bench::new(config, Options { pages_max: 1 << 16, ..Options::default() });
    // Every second page from `first` on is one of as many contents, the rest have no twins.
    let contents = |side: u32, first: u32, factor: u32| {
        (0..PAGES).map(move |page| {
            let twin = first + page * factor % PAGES;
            if page % 2 == 0 { 2 + twin * 2 } else { 1 << 20 | side << 16 | page << 1 }
        })
    };
    let (full, ..) = bench.add(contents(1, 0, 1).chain(contents(2, PAGES, 1)));
    bench.add(contents(3, 0, 7));
    bench.periods(20);
    let used = full.mappings();
    assert!(used >= 100, "{used} mappings");
    let others = [(4, 11), (5, 13)].map(|(side, factor)| bench.add(contents(side, PAGES, factor)).0);
    bench.periods(20);
    for process in &others {
        assert!(process.slots().len() >= 40, "{} merged", process.slots().len());
    }
}

#[test]
fn long_runs_obey_the_budget_as_well() {
    let config = Config { vma_budget: 20, predict: false, ..Config::default() };
    let mut bench = Bench::new(config, Options { pages_max: 10_000, ..Options::default() });
    // Runs of 20 equal pages, in the other process in reverse order of runs, with a page of its own behind each.
    let run = |side: u32, run: u32| {
        (0..21).map(move |page| if page < 20 { 2 + (run * 20 + page) * 2 } else { 1 << 20 | side << 16 | run << 1 })
    };
    let (a, ..) = bench.add((0..100).flat_map(|number| run(0, number)));
    let (b, ..) = bench.add((0..100).rev().flat_map(|number| run(1, number)));
    bench.periods(100);
    for process in [&a, &b] {
        let mappings = process.mappings();
        assert!((10..=24).contains(&mappings), "{mappings} mappings");
    }
}

/// Short runs wait for others that may lie beside them, and their slots with them, however many periods pass meanwhile.
#[test]
fn scattered_duplicates_are_looked_up_once() {
    const PAGES: u32 = 1 << 16;
    let config = Config { vma_budget: 1 << 20, ..Config::default() };
    let mut bench = Bench::new(config, Options { pages_max: 1 << 17, ..Options::default() });
    // Every second page has a twin in the other process, the others have none: no run is longer than a page.
    let contents = |side: u32, factor: u32| {
        (0..PAGES).map(move |page| 2 + if page % 2 == 0 { page * factor % PAGES } else { page + PAGES * side } * 2)
    };
    let (a, _, in_a) = bench.add(contents(1, 1));
    let (b, _, in_b) = bench.add(contents(2, 7));
    // Looking up takes longer than a period.
    for _ in 0..20 {
        bench.now_ns += bench.domain.config().period_ns;
        [in_a, in_b].iter().for_each(|id| assert!(bench.domain.step(*id, bench.now_ns).is_ok()));
    }
    assert_eq!(bench.domain.audit(), Vec::<String>::new());
    assert_eq!((a.slots().len(), b.slots().len()), (PAGES as usize / 2, PAGES as usize / 2));
    let fingerprinted = bench.domain.stats().events.pages_fingerprinted;
    assert_eq!((fingerprinted, bench.domain.pool().stats().segments_released), (2 * u64::from(PAGES), 0));
}

/// Writes here and there into long runs: a page that is healed alone costs two mappings, so most stay as they are.
#[test]
fn healing_obeys_the_budget() {
    let config = Config { vma_budget: 40, dead_slots_min: u64::MAX, ..Config::default() };
    let mut bench = Bench::new(config, Options { pages_max: 10_000, ..Options::default() });
    let (a, range, id) = bench.add((0..2000).map(|page| 2 + page * 2));
    bench.add((0..2000).map(|page| 2 + page * 2));
    bench.periods(8);
    for page in (0..2000).step_by(2) {
        a.write(range.start + page * PAGE, 1 << 20 | (page as u32) << 1);
    }
    bench.periods(100);
    assert!((10..=50).contains(&a.mappings()), "{} mappings", a.mappings());
    assert!(bench.domain.stats().clients[&id].pages_broken > 900);
    // Written in one piece, the rest makes whole mappings of them, which cost nothing.
    for page in (1..2000).step_by(2) {
        a.write(range.start + page * PAGE, 1 << 21 | (page as u32) << 1);
    }
    bench.periods(60);
    assert_eq!(bench.domain.stats().clients[&id].pages_broken, 0);
}

/// The kernel's limit is lower than the budget: merging rests, goes on later, and never takes what is not there.
#[test]
fn a_refused_mapping_is_no_end() {
    let mut bench = Bench::new(Config::default(), Options { mappings_max: Some(25), ..Options::default() });
    let (a, range, _) = bench.add((0..200).map(|page| 2 + page * 2));
    bench.add((0..200).map(|page| 2 + (page * 7 % 200) * 2));
    bench.periods(60);
    assert!(a.mappings() <= 25);
    // The program gives most of its memory back: what could not be merged now can.
    a.unmap(Range { start: range.start + 8 * PAGE, end: range.end }, false);
    bench.periods(120);
    assert!(
        a.mergeable(bench.domain.pool()).iter().all(|(.., merged)| *merged),
        "{:?}",
        a.mergeable(bench.domain.pool())
    );
}

/// What the machine has no memory for is put off, and nothing that is merged suffers.
#[test]
fn a_pool_without_room_grows_when_there_is_some() {
    let room = Arc::new(AtomicBool::new(false));
    let asked = room.clone();
    let has = move |bytes| asked.load(Ordering::Relaxed) && bytes >= SEGMENT_LEN as u64;
    let config = Config { room: Room::new(has), pool_max_bytes: SEGMENT_LEN as u64 + 1, ..Config::default() };
    let mut bench = Bench::new(config, Options::default());
    let (a, ..) = bench.add((0..100).map(|page| 2 + page * 2));
    bench.add((0..100).map(|page| 2 + page * 2));
    bench.periods(8);
    let stats = bench.domain.stats();
    assert!(a.slots().is_empty() && stats.events.segment_alloc_failed_pages > 0 && stats.events.pool_full_pages == 0);
    assert_eq!((stats.pool_bytes, stats.pool_max_bytes), (0, SEGMENT_LEN as u64));
    room.store(true, Ordering::Relaxed);
    bench.periods(80);
    assert_eq!(bench.domain.stats().pages_sharing, 200);
}

#[test]
fn a_full_pool_is_filled_up_when_there_is_room_again() {
    let mut bench = Bench::new(Config { pool_max_bytes: 1, ..Config::default() }, Options::default());
    let slots = (SEGMENT_LEN / PAGE_SIZE) as u32;
    let (a, ..) = bench.add((0..slots).map(|page| 2 + page * 2));
    let (b, ..) = bench.add((0..slots).map(|page| 2 + page * 2));
    bench.periods(8);
    assert_eq!(bench.domain.stats().pages_shared, u64::from(slots));
    let (c, ..) = bench.add((0..100).map(|page| 1 << 20 | page));
    let (d, ..) = bench.add((0..100).map(|page| 1 << 20 | page));
    bench.periods(8);
    assert!(c.slots().is_empty() && bench.domain.stats().events.pool_full_pages > 0);
    a.exit();
    b.exit();
    bench.periods(200);
    assert_eq!((c.slots().len(), d.slots().len()), (100, 100));
}

#[test]
fn what_lies_between_managed_ranges_is_left_alone() {
    let mut bench = Bench::simple();
    let (process, range, id) = bench.add(vec![5; 30]);
    let secret = Range::pages_from(range.start + 10 * PAGE, 4);
    process.exclude(secret);
    bench.periods(10);
    assert_eq!(bench.domain.stats().clients[&id].pages, 26);
    assert_eq!(process.slots().len(), 26);
    // Excluded after it was merged: private again, and it stays so.
    let late = Range::pages_from(range.start + 20 * PAGE, 3);
    process.exclude(late);
    bench.periods(40);
    process.slots().iter().for_each(|(addr, ..)| assert!(!late.contains(&Range::pages_from(*addr, 1))));
    assert_eq!(process.slots().len(), 23);
}

#[test]
fn memory_that_was_discarded_or_remapped_is_merged_again() {
    for raw in [false, true] {
        let mut bench = Bench::simple();
        let (process, range, _) = bench.add(vec![9; 40]);
        bench.periods(8);
        assert_eq!(process.slots().len(), 40);
        process.discard(Range::pages_from(range.start + 5 * PAGE, 20), raw);
        bench.periods(3);
        assert_eq!(process.slots().len(), 20);
        (5..25).for_each(|page| process.write(range.start + page * PAGE, 9));
        bench.periods(10);
        assert_eq!(process.slots().len(), 40, "raw: {raw}");
    }
}

#[test]
fn unmerging_gives_private_memory_back_and_resuming_merges_it_again() {
    let mut bench = Bench::simple();
    let (a, _, id) = bench.add((0..300).map(|page| 2 + page));
    bench.add((0..300).map(|page| 2 + page));
    bench.periods(8);
    assert_eq!(bench.domain.unmerge(id), Ok(Unmerged { pages: 300, left: 0 }));
    assert!(a.slots().is_empty());
    bench.periods(20);
    assert!(a.slots().is_empty(), "it is paused");
    bench.domain.pause(id, false);
    bench.periods(20);
    assert_eq!(a.slots().len(), 300);
}

/// A prediction covers several freezes; where it fails in the first, those behind are merged all the same, and left alone
/// then.
#[test]
fn what_is_merged_is_not_frozen_again() {
    let mut bench = Bench::simple();
    for _ in 0..2 {
        bench.add((0..3000).map(|page| 2 + page));
    }
    bench.periods(8);
    let (third, range, _) = bench.add((0..3000).map(|page| 2 + page));
    // Far enough behind the start that what lies before is looked up and not guessed.
    third.pin(range.start + 1200 * PAGE, true);
    bench.periods(8);
    assert_eq!(third.slots().len(), 2999);
}

/// Each round of a remap finds one page of a run that cannot be merged, and there are a few rounds only.
#[test]
fn what_lies_behind_many_pages_that_fail_is_merged() {
    let mut bench = Bench::new(Config { predict: false, ..Config::default() }, Options::default());
    bench.add((0..60).map(|page| 2 + page));
    let (pinned, range, _) = bench.add((0..60).map(|page| 2 + page));
    (5..50).step_by(5).for_each(|page| pinned.pin(range.start + page * PAGE, true));
    // Before any of those is tried again.
    bench.periods(12);
    assert_eq!(pinned.slots().len(), 51);
}

#[test]
fn a_forked_child_shares_what_its_parent_shares() {
    let mut bench = Bench::simple();
    let (parent, range, _) = bench.add((0..50).map(|page| 2 + page % 25));
    bench.periods(8);
    parent.fork();
    let child = bench.machine.born().remove(0);
    bench.domain.add(Box::new(child.client()));
    child.write(range.start, 1000);
    bench.periods(1);
    assert_eq!(bench.domain.stats().pages_sharing, 99);
    parent.exit();
    bench.periods(4);
    assert_eq!((bench.domain.stats().pages_sharing, child.slots().len()), (49, 49));
}

/// A fork shares them already: neither parent nor child could show a slot.
#[test]
fn pages_that_a_fork_shares_take_no_slots_before_one_side_writes() {
    let mut bench = Bench::simple();
    let parent = bench.machine.spawn();
    let range = parent.map(200);
    (0..200).for_each(|page| parent.write(range.start + page * PAGE, 2 + page as u32));
    parent.fork();
    let child = bench.machine.born().remove(0);
    for process in [&parent, &child] {
        bench.domain.add(Box::new(process.client()));
    }
    bench.periods(40);
    let stats = bench.domain.stats();
    assert_eq!((stats.pages_sharing, bench.domain.pool().stats().bytes), (0, 0));
    // Both write the same to half of it, elsewhere.
    for page in 0..100 {
        parent.write(range.start + page * PAGE, 1000 + page as u32);
        child.write(range.start + (199 - page) * PAGE, 1000 + page as u32);
    }
    bench.periods(40);
    let shared: Vec<usize> = [&parent, &child].map(|process| process.slots().len()).into();
    assert_eq!(shared, [100, 100]);
}

#[test]
fn when_the_last_client_goes_so_does_the_pool() {
    let mut bench = Bench::simple();
    let (one, _, a) = bench.add((0..300).map(|page| 2 + page));
    let (other, _, b) = bench.add((0..300).map(|page| 2 + page));
    bench.periods(8);
    assert!(bench.domain.remove(a) && bench.domain.remove(b) && !bench.domain.remove(b));
    let pool = bench.domain.pool().stats();
    assert_eq!((pool.segments, pool.bytes, pool.pages_sharing), (0, 0, 0));
    // Their programs live on, and show it.
    assert_eq!(bench.domain.stats().pool_orphaned_bytes, 300 * PAGE);
    one.exit();
    assert_eq!(bench.domain.stats().pool_orphaned_bytes, 300 * PAGE);
    other.exit();
    assert_eq!(bench.domain.stats().pool_orphaned_bytes, 0);
}

/// What a client does not let go of is told as such.
#[test]
fn what_cannot_be_unmerged_is_counted() {
    let mut bench = Bench::simple();
    bench.add(vec![7; 300]);
    let process = bench.machine.spawn();
    let range = process.map(300);
    (0..300).for_each(|page| process.write(range.start + page * PAGE, 7));
    let pinned = Arc::new(AtomicBool::new(false));
    let pins = pinned.clone();
    let at = move |call| if call == "heal" && pins.load(Ordering::Relaxed) { Err(Gone) } else { Ok(()) };
    let id = bench.domain.add(Box::new(Scripted { honest: process.client(), claims: None, at: Box::new(at) }));
    bench.periods(8);
    pinned.store(true, Ordering::Relaxed);
    assert_eq!(bench.domain.unmerge(id), Ok(Unmerged { pages: 0, left: 300 }));
    pinned.store(false, Ordering::Relaxed);
    assert_eq!(bench.domain.unmerge(id), Ok(Unmerged { pages: 300, left: 0 }));
}

/// Where most slots of a segment are dead its memory comes back: the last sharers are moved to other slots.
#[test]
fn segments_of_dead_slots_are_emptied() {
    let slots = (SEGMENT_LEN / PAGE_SIZE) as u64;
    let mut bench = Bench::new(
        Config { dead_slots_min: 1, ..Config::default() },
        Options { pages_max: 10_000, ..Options::default() },
    );
    let contents = || (0..3 * slots as u32).map(|page| 2 + page * 2);
    let (a, in_a, _) = bench.add(contents());
    let (b, in_b, _) = bench.add(contents());
    let (.., private) = bench.add(contents());
    bench.periods(8);
    // A client that got its memory back is left alone for good, and does not hold up the others.
    assert_eq!(bench.domain.unmerge(private), Ok(Unmerged { pages: 3 * slots, left: 0 }));
    assert_eq!(bench.domain.stats().pool_bytes, 3 * slots * PAGE);
    // Seven of eight pages get contents of their own, in both.
    for page in (0..3 * slots).filter(|page| page % 8 != 0) {
        a.write(in_a.start + page * PAGE, 1 << 20 | (page as u32) << 1);
        b.write(in_b.start + page * PAGE, 1 << 24 | (page as u32) << 1);
    }
    bench.periods(80);
    let stats = bench.domain.stats();
    assert_eq!((stats.pages_shared, stats.pages_sharing), (3 * slots / 8, 2 * (3 * slots / 8)), "all that is equal");
    assert!(stats.events.pages_compacted >= 2 * (3 * slots / 8), "{:?}", stats.events);
    assert!(stats.pool_bytes <= slots * PAGE, "{} bytes for {} pages", stats.pool_bytes, stats.pages_shared);
    assert_eq!(bench.domain.pool().stats().segments_released, 3);
}

/// Memory that an earlier daemon merged is in the next one's books in the end, and shared with later clients.
#[test]
fn segments_of_an_earlier_daemon_are_left() {
    let mut bench = Bench::new(Config::default(), Options { pages_max: 10_000, ..Options::default() });
    let contents = || (0..3000).map(|page| 2 + page * 2);
    let (a, in_a, _) = bench.add(contents());
    let (b, ..) = bench.add(contents());
    bench.periods(8);
    assert_eq!((a.slots().len(), b.slots().len()), (3000, 3000));
    let config = bench.domain.config().clone();
    bench.domain = Domain::with_key(config, Key::from_seed(6)).unwrap();
    for process in [&a, &b] {
        bench.domain.add(Box::new(process.client()));
    }
    bench.periods(2);
    a.write(in_a.start, 1 << 20);
    let (c, ..) = bench.add(contents());
    bench.periods(100);
    let slots = [&a, &b, &c].map(|process| process.slots_of(bench.domain.pool()).len());
    assert_eq!(slots, [2999, 3000, 3000]);
    assert_eq!(bench.domain.stats().pages_shared, 3000);
}

/// Where the segments can be opened again, the next daemon knows at once what is merged, and shares it with new clients.
#[test]
fn segments_of_an_earlier_daemon_are_taken_in() {
    let options = Options { pages_max: 10_000, inherits: 1000, ..Options::default() };
    let mut bench = Bench::new(Config { dead_slots_min: 1, ..Config::default() }, options);
    let contents = || (0..3000).map(|page| 2 + page * 2);
    let (a, in_a, _) = bench.add(contents());
    let (b, in_b, _) = bench.add(contents());
    bench.periods(8);
    assert_eq!((a.slots().len(), b.slots().len()), (3000, 3000));
    // Written while there is no daemon: of the first page nothing is shared any more.
    for (process, range) in [(&a, in_a), (&b, in_b)] {
        process.write(range.start, 1 << 20 | process.pid() << 1);
    }
    let config = bench.domain.config().clone();
    bench.domain = Domain::with_key(config, Key::from_seed(6)).unwrap();
    let ids = [&a, &b].map(|process| bench.domain.add(Box::new(process.client())));
    bench.periods(1);
    let stats = bench.domain.stats();
    assert_eq!((stats.pages_shared, stats.pages_sharing), (2999, 2 * 2999));
    assert_eq!((stats.events.pages_merged, stats.events.cow_breaks), (0, 0), "nothing was merged or broken anew");
    let (c, ..) = bench.add(contents());
    bench.periods(8);
    assert_eq!(c.slots_of(bench.domain.pool()).len(), 3000);
    let stats = bench.domain.stats();
    // The first page's content is still in its slot, or it is c's alone.
    assert!((2999..=3000).contains(&stats.pages_shared), "{stats:?}");
    assert_eq!(bench.domain.audit(), Vec::<String>::new());
    // The memory comes back with the last client.
    assert!(ids.into_iter().all(|id| bench.domain.remove(id)));
    bench.domain.clients().into_iter().for_each(|id| assert!(bench.domain.remove(id)));
    assert_eq!(bench.domain.pool().stats().segments, 0);
}

/// A client that cannot be moved keeps the segment in use: others that have its contents share it again.
#[test]
fn a_segment_that_cannot_be_emptied_serves_on() {
    let slots = (SEGMENT_LEN / PAGE_SIZE) as u64;
    let mut bench = Bench::new(
        Config { dead_slots_min: 1, ..Config::default() },
        Options { pages_max: 10_000, ..Options::default() },
    );
    let contents = || (0..slots as u32).map(|page| 2 + page * 2);
    let (a, in_a, _) = bench.add(contents());
    // Nothing is given back to a process that has a page pinned.
    let pinned = a.map(1);
    a.write(pinned.start, 1 << 28);
    a.pin(pinned.start, true);
    let (b, in_b, _) = bench.add(contents());
    bench.periods(8);
    for page in (0..slots).filter(|page| page % 8 != 0) {
        a.write(in_a.start + page * PAGE, 1 << 20 | (page as u32) << 1);
        b.write(in_b.start + page * PAGE, 1 << 24 | (page as u32) << 1);
    }
    bench.periods(80);
    let stats = bench.domain.stats();
    assert!(stats.events.pages_compacted >= slots / 8, "the other one was moved: {:?}", stats.events);
    assert_eq!((stats.pages_shared, stats.pages_sharing), (slots / 8, 2 * (slots / 8)), "and came back");
    assert_eq!(bench.domain.pool().stats().segments_released, 0);
}

/// A huge page is left whole while few of its pages have a twin, and split when it pays.
#[test]
fn huge_pages_are_split_only_where_it_pays() {
    for (twins, splits) in [(20, false), (400, true)] {
        let mut bench = Bench::new(Config::default(), Options { huge: true, pages_max: 4096, ..Options::default() });
        let process = bench.machine.spawn();
        let range = process.map_huge(512);
        for page in 0..512 {
            process.write(range.start + page * PAGE, 1000 + page as u32 * 2);
        }
        bench.domain.add(Box::new(process.client()));
        bench.add((0..twins).map(|page| 1000 + page * 2));
        bench.periods(60);
        assert_eq!(process.slots().len(), if splits { twins as usize } else { 0 });
    }
}

/// Huge pages are looked up and predicted as ones, wherever their slots begin: with their segment, within, or in two of
/// them. Where one is not as predicted the rest of it is merged all the same, and those behind it are merged whole.
#[test]
fn huge_pages_are_merged_whole_wherever_their_slots_are() {
    const CHUNKS: u64 = 10;
    for shift in [0, 37, 300, 490] {
        let options = Options { huge: true, pages_max: 1 << 14, ..Options::default() };
        let mut bench = Bench::new(Config { vma_budget: 16_000, ..Config::default() }, options);
        let content = |page: u64| 2 + page as u32 * 2;
        bench.add((0..(CHUNKS + 1) * 512).map(content));
        bench.add((0..(CHUNKS + 1) * 512).map(content));
        bench.periods(12);
        let process = bench.machine.spawn();
        let range = process.map_huge(CHUNKS * 512);
        (0..CHUNKS * 512).for_each(|page| process.write(range.start + page * PAGE, content(page + shift)));
        // In the middle, at the begin and at the end of three of them something of its own.
        let odd = [2 * 512 + 200, 5 * 512, 7 * 512 + 511];
        odd.iter().for_each(|page| process.write(range.start + page * PAGE, 1_000_001 + *page as u32 * 2));
        bench.domain.add(Box::new(process.client()));
        bench.periods(20);
        assert_eq!(process.slots().len() as u64, CHUNKS * 512 - odd.len() as u64, "shifted by {shift}");
        assert_eq!(process.merged_whole(), CHUNKS - odd.len() as u64, "shifted by {shift}");
        assert_eq!(bench.domain.stats().pages_unshared, odd.len() as u64);
    }
}

/// A guest on huge pages has all of them probed in one period, and others have their turns meanwhile.
#[test]
fn no_step_probes_all_huge_pages() {
    const CHUNKS: u64 = 200;
    let options = Options { huge: true, pages_max: 1 << 17, ..Options::default() };
    let mut bench = Bench::new(Config::default(), options);
    let process = bench.machine.spawn();
    let range = process.map_huge(CHUNKS * 512);
    // Each has contents of its own, so none is split.
    (0..CHUNKS * 512).for_each(|page| process.write(range.start + page * PAGE, 2 + page as u32 * 2));
    let fetches = Arc::new(AtomicU32::new(0));
    let count = fetches.clone();
    let at = move |call| {
        count.fetch_add(u32::from(call == "fetch"), Ordering::Relaxed);
        Ok(())
    };
    bench.domain.add(Box::new(Scripted { honest: process.client(), claims: None, at: Box::new(at) }));
    let mut most = 0;
    for _ in 0..6 {
        bench.now_ns += bench.domain.config().period_ns;
        loop {
            let before = fetches.load(Ordering::Relaxed);
            if bench.domain.step_any(bench.now_ns, None, &mut Vec::new()).is_none() {
                break;
            }
            most = most.max(fetches.load(Ordering::Relaxed) - before);
        }
    }
    assert!(fetches.load(Ordering::Relaxed) >= CHUNKS as u32, "all were probed");
    assert!((1..=40).contains(&most), "{most} in one step");
}

/// Entries of pages that changed leave the index, so that it does not grow with time.
#[test]
fn the_index_forgets_what_changed() {
    let mut bench = Bench::new(
        Config { index_capacity: 64, ..Config::default() },
        Options { pages_max: 4096, ..Options::default() },
    );
    let (process, range, _) = bench.add((0..2000).map(|page| 2 + page * 2));
    let mut sizes = Vec::new();
    for round in 1..=12u32 {
        bench.periods(16);
        sizes.push(bench.domain.stats().metadata_bytes);
        for page in 0..2000 {
            process.write(range.start + u64::from(page) * PAGE, 2 + (round * 2000 + page) * 2);
        }
    }
    assert!(sizes[11] < sizes[1] * 2, "{sizes:?}");
}

/// Where the index leads to a page that changed meanwhile, the first of several equal ones takes its place; the others are
/// its twins.
#[test]
fn twins_that_find_a_page_that_changed_are_merged_with_each_other() {
    let mut bench = Bench::simple();
    let (process, range, _) = bench.add((0..200).map(|page| 2 + page * 2));
    bench.periods(6);
    bench.add((0..400).map(|page| 2 + page / 2 * 2));
    bench.periods(2);
    for page in 0..200 {
        process.write(range.start + page * PAGE, 1000 + page as u32 * 2);
    }
    bench.periods(20);
    assert_eq!(bench.domain.stats().pages_sharing, 400);
}

/// Adds a client that tells when it is asked, and says `said` when the sender is dropped.
fn add_slow(bench: &Bench, said: Result<(), Gone>) -> (Receiver<()>, Sender<()>) {
    let (asked, is_asked) = channel();
    let (answer, answered) = channel::<()>();
    let at = move |_| {
        let _ = asked.send(());
        let _ = answered.recv();
        said
    };
    bench.domain.add(Box::new(Scripted { honest: bench.machine.spawn().client(), claims: None, at: Box::new(at) }));
    (is_asked, answer)
}

/// What a worker found due may be paused or given its memory back before it comes to it.
#[test]
fn who_was_just_unmerged_is_not_merged_from_an_old_list() {
    for paused in [false, true] {
        let bench = Bench::simple();
        let (is_asked, answer) = add_slow(&bench, Err(Gone));
        let process = bench.machine.spawn();
        process.map(10);
        let calls = Arc::new(AtomicU32::new(0));
        let count = calls.clone();
        let other = bench.domain.add(Box::new(Scripted {
            honest: process.client(),
            claims: None,
            at: Box::new(move |_| {
                count.fetch_add(1, Ordering::Relaxed);
                Ok(())
            }),
        }));
        std::thread::scope(|scope| {
            let worker = scope.spawn(|| bench.domain.step_any(0, None, &mut Vec::new()));
            is_asked.recv().unwrap();
            match paused {
                true => assert!(bench.domain.pause(other, true)),
                false => assert_eq!(bench.domain.unmerge(other), Ok(Unmerged { pages: 0, left: 0 })),
            }
            drop(answer);
            assert_eq!(worker.join().unwrap(), None, "all that is left is paused");
        });
        assert!(bench.domain.step(other, 0).is_ok());
        assert_eq!(calls.load(Ordering::Relaxed), 0);
    }
}

/// Addresses cost a client nothing, the records about them do: there are as many as there is memory for.
#[test]
fn records_keep_to_the_room_that_there_is() {
    let room = Arc::new(AtomicBool::new(false));
    let asked = room.clone();
    let config = Config { room: Room::new(move |_| asked.load(Ordering::Relaxed)), ..Config::default() };
    let mut bench = Bench::new(config, Options::default());
    let all = Range { start: 1 << 30, end: (1 << 30) + (64 << 30) };
    let scripted = |claims| {
        let honest = bench.machine.spawn().client();
        bench.domain.add(Box::new(Scripted { honest, claims: Some((claims, Vec::new())), at: Box::new(|_| Ok(())) }))
    };
    let id = scripted(vec![all]);
    bench.periods(3);
    let pages = |bench: &Bench| bench.domain.stats().clients[&id].pages;
    let without = bench.domain.stats().metadata_bytes;
    assert_eq!(pages(&bench), 0, "of what is left out nothing is known");
    room.store(true, Ordering::Relaxed);
    bench.periods(1);
    assert_eq!(pages(&bench), all.pages(), "it is asked for again");
    assert!(bench.domain.stats().metadata_bytes > without + (4 << 20));
    // What is known stays.
    room.store(false, Ordering::Relaxed);
    bench.periods(3);
    assert_eq!(pages(&bench), all.pages());
}

/// An audit wants all clients at rest. One of them that does not answer keeps only the audit waiting: no
/// client that comes or goes or is to be merged.
#[test]
fn nobody_waits_with_an_audit() {
    let bench = Bench::simple();
    let (is_asked, answer) = add_slow(&bench, Ok(()));
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| bench.domain.step_any(0, None, &mut Vec::new()));
        is_asked.recv().unwrap();
        let audit = scope.spawn(|| bench.domain.audit());
        scope.spawn(|| {
            for _ in 0..3 {
                std::thread::sleep(Duration::from_millis(50));
                let id = bench.domain.add(Box::new(bench.machine.spawn().client()));
                while bench.domain.step_any(0, None, &mut Vec::new()).is_none() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                assert!(bench.domain.remove(id));
            }
            let _ = tell.send(());
        });
        let done = told.recv_timeout(Duration::from_secs(60));
        let waits = !audit.is_finished();
        drop(answer);
        assert!(worker.join().unwrap().is_some());
        assert_eq!(audit.join().unwrap(), Vec::<String>::new());
        assert!(done.is_ok() && waits, "others wait with the audit, or it does not");
    });
}

/// A client that some worker has in hand is due when that worker says so: the others need not look every moment.
#[test]
fn a_client_in_hand_is_not_due() {
    let bench = Bench::simple();
    let (is_asked, answer) = add_slow(&bench, Ok(()));
    assert_eq!(bench.domain.due_ns(), Some(0));
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| bench.domain.step_any(0, None, &mut Vec::new()));
        is_asked.recv().unwrap();
        let due = bench.domain.due_ns();
        drop(answer);
        assert!(worker.join().unwrap().is_some());
        assert_eq!(due, None);
    });
    assert_eq!(bench.domain.due_ns(), Some(1000));
}

/// A notice has its owner stepped soon, but not before clients that have waited longer.
#[test]
fn clients_that_find_each_other_do_not_starve_a_third() {
    let mut bench = Bench::simple();
    let (a, ..) = bench.add((0..400).map(|page| 2 + page * 2));
    let (b, ..) = bench.add((0..400).map(|page| 2 + page * 2));
    let process = bench.machine.spawn();
    process.map(10);
    let asked = Arc::new(AtomicU32::new(0));
    let count = asked.clone();
    let at = move |call| {
        count.fetch_add(u32::from(call == "touched"), Ordering::Relaxed);
        Ok(())
    };
    bench.domain.add(Box::new(Scripted { honest: process.client(), claims: None, at: Box::new(at) }));
    for _ in 0..8 {
        // All three have waited for the end of the period, and the first two have notices for each other in between.
        bench.now_ns += bench.domain.config().period_ns + 10;
        let before = asked.load(Ordering::Relaxed);
        for _ in 0..3 {
            bench.domain.step_any(bench.now_ns, None, &mut Vec::new());
        }
        assert!(asked.load(Ordering::Relaxed) > before, "it had no turn");
        while bench.domain.step_any(bench.now_ns, None, &mut Vec::new()).is_some() {}
    }
    assert!(a.slots().len() + b.slots().len() > 400, "they did find each other");
}

/// A client that got its memory back in the middle of its lookups has nothing to look up: no worker waits for it.
#[test]
fn nobody_waits_for_who_was_unmerged() {
    let mut bench = Bench::new(Config::default(), Options { pages_max: 1 << 17, ..Options::default() });
    let (.., big) = bench.add((0..40_000).map(|page| 1 << 20 | page << 1));
    for _ in 0..3 {
        bench.now_ns += bench.domain.config().period_ns;
        bench.domain.step(big, bench.now_ns).unwrap();
    }
    let looked_up = bench.domain.stats().events.pages_fingerprinted;
    assert!((1..40_000).contains(&looked_up), "in the middle: {looked_up}");
    assert_eq!(bench.domain.unmerge(big), Ok(Unmerged { pages: 0, left: 0 }));
    // Every second page has a twin.
    let contents = |side: u32| (0..60).map(move |page| 2 + page * 2 + if page % 2 == 0 { 0 } else { side << 16 });
    let (a, ..) = bench.add(contents(1));
    let (b, ..) = bench.add(contents(2));
    bench.periods(3);
    assert_eq!((a.slots().len(), b.slots().len()), (30, 30));
}

#[test]
fn claims_that_cannot_be_end_the_client_and_large_ones_are_cut() {
    let bench = Bench::simple();
    let range = |start, end| Range { start, end };
    let step = |regions: Vec<Range>, mappings: Vec<PoolMapping>| {
        let honest = bench.machine.spawn().client();
        let id = bench.domain.add(Box::new(Scripted {
            honest,
            claims: Some((regions, mappings)),
            at: Box::new(|_| Ok(())),
        }));
        bench.domain.step(id, 0).map(|_| id)
    };
    let wrong = [
        vec![range(0, PAGE)],
        vec![range(PAGE, 100)],
        vec![range(3 * PAGE, 2 * PAGE)],
        vec![range(2 * PAGE, 4 * PAGE), range(3 * PAGE, 5 * PAGE)],
        vec![range(4 * PAGE, 5 * PAGE), range(2 * PAGE, 3 * PAGE)],
        vec![range(PAGE, u64::MAX - PAGE + 1)],
    ];
    for regions in wrong {
        assert_eq!(step(regions.clone(), Vec::new()), Err(Gone), "{regions:?}");
        let mappings = regions.iter().map(|range| PoolMapping { range: *range, inode: 1, index: 0 }).collect();
        assert_eq!(step(Vec::new(), mappings), Err(Gone), "{regions:?}");
    }
    let id = step(vec![range(1 << 30, 1 << 50)], Vec::new()).unwrap();
    let client = bench.domain.stats().clients[&id].clone();
    assert_eq!(client.pages, 1 << 27, "512 GiB are followed, the rest is left alone");
    assert!(client.metadata_bytes < 128 << 20, "{}", client.metadata_bytes);
    // A mapping longer than a segment shows no more slots than the segment has.
    let whole = PoolMapping { range: range(1 << 30, 1 << 40), inode: 1, index: u32::MAX };
    assert!(step(vec![range(1 << 30, 1 << 31)], vec![whole]).is_ok());
    assert_eq!(bench.domain.page_state(id, 1 << 30), PageState::Unknown);
}

/// In parts of any size it is the same as at once.
#[test]
fn the_ledger_can_be_read_in_parts() {
    let mut bench = Bench::new(Config::default(), Options { pages_max: 4096, ..Options::default() });
    let (process, range, id) = bench.add((0..1500).map(|page| 2 + page % 700));
    bench.periods(8);
    // Gaps, also over the end of a chunk.
    for page in (0..1500).filter(|page| page % 7 == 3 || (400..620).contains(page)) {
        process.write(range.start + page * PAGE, 1 << 20 | page as u32);
    }
    bench.periods(1);
    let whole = bench.domain.ledger();
    assert!(whole.len() > 900 && whole.len() < 1300, "{}", whole.len());
    for most in [1, 128, 5000] {
        let (mut parts, mut from) = (Vec::new(), 0);
        loop {
            let part = bench.domain.ledger_part(id, from, most);
            let Some(last) = part.last() else { break };
            assert!(part.len() <= most);
            from = last.1 + PAGE;
            parts.extend(part);
        }
        assert_eq!(parts, whole);
    }
    assert!(bench.domain.ledger_part(id + 1, 0, 1).is_empty());
}
