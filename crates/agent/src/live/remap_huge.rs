//! A huge page that is merged whole: taken, compared and freed as one.
//!
//! A merge page by page would have the kernel split it first, while its pages are frozen. That takes longer than everything
//! else, and leaves 512 small pages to be freed. So where the pieces cover a huge page, it is moved as one. If all of it is
//! equal, it is mapped, and the huge page returns to the system as one. If anything differs, it moves back, and the caller
//! tries freeze by freeze. The order of steps is that of [`remap`](super::remap), and so is the argument for it.

use super::freeze::Freeze;
use super::session::{Agent, PAGE};
use crate::address_space::anonymous::watch_anonymous;
use crate::address_space::prefault;
use crate::limits::{HUGE_LEN, HUGE_PAGES};
use crate::owned_ranges::{Owned, OwnedMapping};
use core::ffi::c_int;
use pagefold_os::pagemap::{self, Query};
use pagefold_os::raw::Errno;
use pagefold_os::{PAGE_SIZE, Range, mem, uffd};
use pagefold_protocol::message::{Outcome, PIECE_ZERO, RefusalReason, RemapPiece};

/// How many of the first `pieces` cover exactly the pages of one huge page, side by side; `None` if they do not.
pub(crate) fn pieces_of_one(pieces: impl Iterator<Item = RemapPiece>) -> Option<usize> {
    let mut range = Range { start: 0, end: 0 };
    for (index, piece) in pieces.enumerate() {
        if index == 0 {
            range = Range { start: piece.addr, end: piece.addr };
        }
        let joins = piece.addr == range.end && piece.pages > 0 && u64::from(piece.pages) <= HUGE_PAGES as u64;
        if !joins || !range.start.is_multiple_of(HUGE_LEN) {
            return None;
        }
        range.end += u64::from(piece.pages) * PAGE;
        if range.len() >= HUGE_LEN {
            return (range.len() == HUGE_LEN).then_some(index + 1);
        }
    }
    None
}

impl Agent {
    /// Merges the pieces, which cover the pages of one huge page, if it is one and all are equal. Returns false if nothing
    /// is merged; else writes one outcome per piece.
    pub(super) fn remap_huge(&mut self, pieces: &[RemapPiece], outcomes: &mut [Outcome]) -> bool {
        let Some(first) = pieces.first() else { return false };
        let range = Range { start: first.addr, end: first.addr + HUGE_LEN };
        let rights = self.rights_of_plain(range.start);
        if !self.is_huge(range) {
            return false;
        }
        let Some(freeze_area) = self.make_huge_freeze_area(rights) else { return false };
        self.read_slots(pieces);
        let Some(mut freeze) = self.freeze(range, rights, freeze_area) else { return false };
        outcomes.fill(Outcome { merged: 0, reason: RefusalReason::NotAnonymous as u32 });
        let merged = freeze.take_huge() && freeze.are_equal(pieces) && freeze.map_all(pieces, outcomes);
        if merged {
            freeze.wake();
            freeze.settle(pieces, outcomes);
        }
        let is_whole = merged && outcomes.iter().all(|outcome| outcome.merged > 0);
        freeze.end(pieces, outcomes, if is_whole { HUGE_LEN } else { 0 });
        if !is_whole {
            // The place has a page table of small pages now, and would take no huge page again.
            self.huge_freeze_area = None;
        }
        merged
    }

    /// Brings the slots into the page table and the cache before the freeze, which is shorter for it.
    fn read_slots(&self, pieces: &[RemapPiece]) {
        const LINE: usize = 64;
        for piece in pieces.iter().filter(|piece| piece.segment != PIECE_ZERO) {
            let Some(slots) = self.slots(piece.segment, piece.slot, piece.pages) else { continue };
            for line in (0..piece.pages as usize * PAGE_SIZE).step_by(LINE) {
                // SAFETY: `slots` points at the slots of the piece, in a mapped segment.
                unsafe { slots.cast::<u8>().add(line).read_volatile() };
            }
        }
    }

    /// Returns true if one huge page lies at `range`, other than the kernel's huge zero page.
    fn is_huge(&self, range: Range) -> bool {
        let all_of = pagemap::HUGE | pagemap::PRESENT | pagemap::PFNZERO;
        let query = Query { all_of, inverted: pagemap::PFNZERO, report: pagemap::HUGE, ..Query::default() };
        let mut found = [pagemap::ScannedRange::default()];
        let seen = pagemap::scan(&self.pagemap, range, query, &mut found);
        matches!(seen, Ok((1, _))) && found[0].start == range.start && found[0].end == range.end
    }

    /// Where a frozen huge page with `rights` waits; the place is made if there is none. `None` if that fails.
    fn make_huge_freeze_area(&mut self, rights: c_int) -> Option<u64> {
        if let Some((place, has)) = &self.huge_freeze_area
            && *has == rights
        {
            return Some(place.range().start);
        }
        self.huge_freeze_area = None;
        let begin = |map: &mem::Mapping| map.addr().next_multiple_of(HUGE_LEN);
        let aligned = |map: &mem::Mapping| begin(map) + HUGE_LEN <= map.addr() + map.len() as u64;
        let make = |len| mem::Mapping::anonymous(len).ok().filter(aligned);
        let map = make(HUGE_LEN as usize).or_else(|| make(2 * HUGE_LEN as usize))?;
        // SAFETY: the mapping is ours; its rights only grow.
        if rights != mem::READ_WRITE && unsafe { mem::protect(map.addr(), map.len() as u64, rights) }.is_err() {
            return None;
        }
        let start = begin(&map);
        let place = OwnedMapping::new(Owned::HugeFreezeArea, map, Range { start, end: start + HUGE_LEN });
        self.watch.register(place.range(), uffd::MODE_WP).ok()?;
        place.register();
        self.huge_freeze_area = Some((place, rights));
        Some(start)
    }
}

impl Freeze<'_> {
    /// Moves the huge page to the freeze area. Where that fails it is back.
    fn take_huge(&mut self) -> bool {
        // Checked once more: a thread that reads discarded memory from here on waits, and gets no huge zero page, which some
        // kernels (6.16 and newer) move as a page that does not exist.
        let (moved, error) =
            if self.agent.is_huge(self.range) { self.move_away(self.range) } else { (0, Some(Errno(libc::ENOENT))) };
        // If something has split it in this very moment, a merge as one is not worth it.
        if error.is_none() && self.agent.is_huge(Range { start: self.freeze_area, end: self.freeze_area + HUGE_LEN }) {
            return true;
        }
        self.put_back(0..(moved / PAGE) as usize);
        self.agent.watch_part(Range { start: self.range.start + moved, ..self.range });
        false
    }

    /// Moves pages back, and watches them for writes as before.
    fn put_back(&mut self, pages: core::ops::Range<usize>) {
        let range = self.range_of(pages.clone());
        if range.is_empty() {
            return;
        }
        self.move_back(pages);
        let _ = self.agent.hold.unregister(range);
        let _ = watch_anonymous(&self.agent.watch, range);
        let _ = self.agent.watch.write_protect(range);
    }

    /// Returns true if each page equals its slot. If one does not, all are back.
    fn are_equal(&mut self, pieces: &[RemapPiece]) -> bool {
        let equal = pieces.iter().all(|piece| self.compare(piece, |_| Ok(())).is_ok());
        if !equal {
            self.put_back(0..HUGE_PAGES);
        }
        equal
    }

    /// Maps the slots, consecutive ones by one call. What the kernel does not map is back. Returns false if nothing is
    /// mapped.
    fn map_all(&mut self, pieces: &[RemapPiece], outcomes: &mut [Outcome]) -> bool {
        let mut done = 0;
        while let Some(first) = pieces.get(done) {
            let follow = |pair: &&[RemapPiece]| {
                let next = pair[0].slot.checked_add(pair[0].pages);
                pair[0].segment == pair[1].segment && (pair[0].segment == PIECE_ZERO || next == Some(pair[1].slot))
            };
            let mut joined = done + 1 + pieces[done..].windows(2).take_while(follow).count();
            // The first write to a huge page of the file in the page table splits it, and then none of its pages is mapped.
            let as_huge = done == 0 && first.segment != PIECE_ZERO && (first.slot as usize).is_multiple_of(HUGE_PAGES);
            if as_huge {
                joined = 1;
            }
            let pages: u32 = pieces[done..joined].iter().map(|piece| piece.pages).sum();
            if let Err(reason) = self.map_slots(&RemapPiece { pages, ..*first }) {
                self.put_back(self.page_of(first.addr)..HUGE_PAGES);
                outcomes[done..].fill(Outcome { merged: 0, reason: reason as u32 });
                return done > 0;
            }
            for (piece, outcome) in pieces[done..joined].iter().zip(&mut outcomes[done..joined]) {
                *outcome = Outcome { merged: piece.pages, reason: RefusalReason::Done as u32 };
            }
            if first.segment != PIECE_ZERO {
                self.agent.report_discards(Range { start: first.addr, end: self.mapped_end });
            }
            if as_huge {
                prefault::read_in(Range::pages_from(first.addr, 1));
            }
            done = joined;
        }
        true
    }

    /// Maps the merged pages into the page table, and watches everything.
    fn settle(&self, pieces: &[RemapPiece], outcomes: &[Outcome]) {
        self.agent.prefault(pieces, outcomes);
        let mut shown = Range { start: self.range.start, end: self.range.start };
        for (piece, outcome) in pieces.iter().zip(outcomes) {
            let range = Range::pages_from(piece.addr, u64::from(outcome.merged));
            if piece.segment == PIECE_ZERO || range.is_empty() {
                self.agent.watch_part(range);
            } else if shown.end == range.start {
                shown.end = range.end;
            } else {
                if !shown.is_empty() {
                    self.agent.adopt_pool(shown);
                }
                shown = range;
            }
        }
        if !shown.is_empty() {
            self.agent.adopt_pool(shown);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::freeze::ForgetMoves;
    use super::super::handshake::{alone, one_at_a_time};
    use super::*;
    use core::sync::atomic::{AtomicU64, Ordering};
    use pagefold_os::{Page, fd::Fd, memfd, sched};

    /// A segment with slots that all differ.
    fn segment() -> Fd {
        let file = memfd::create(c"pagefold-pool", 2 * HUGE_LEN).unwrap();
        for slot in 0..2 * HUGE_PAGES {
            let wrote = file.write(&content(slot));
            assert_eq!(wrote.unwrap(), PAGE_SIZE);
        }
        file
    }

    fn content(slot: usize) -> Page {
        let mut page = [7; PAGE_SIZE];
        page[..8].copy_from_slice(&(slot as u64 + 1).to_le_bytes());
        page
    }

    /// Memory with room for one huge page, and where that begins.
    fn room() -> (mem::Mapping, u64) {
        let map = mem::Mapping::anonymous(3 * HUGE_LEN as usize).unwrap();
        let at = map.addr().next_multiple_of(HUGE_LEN);
        (map, at)
    }

    /// Has a fresh huge page at `at` that shows the slots from `slot` on; false if the kernel has none to give.
    fn fill(agent: &Agent, at: u64, slot: usize) -> bool {
        let (rights, flags) = (mem::READ_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED);
        // SAFETY: the test's memory.
        unsafe {
            mem::map(at, HUGE_LEN, rights, flags, -1, 0).unwrap();
            let _ = mem::advise(at, HUGE_LEN, libc::MADV_HUGEPAGE);
            for page in 0..HUGE_PAGES {
                ((at + page as u64 * PAGE) as *mut Page).write(content(slot + page));
            }
        }
        agent.is_huge(Range { start: at, end: at + HUGE_LEN })
    }

    /// What is mapped at `page` of the memory at `at`.
    fn shown(at: u64, page: usize) -> Page {
        // SAFETY: the test's memory.
        unsafe { ((at + page as u64 * PAGE) as *const Page).read_volatile() }
    }

    /// Pieces that show the slots from `slot` on.
    fn pieces_at(at: u64, slot: usize) -> [RemapPiece; HUGE_PAGES / 64] {
        core::array::from_fn(|index| RemapPiece {
            addr: at + index as u64 * 64 * PAGE,
            pages: 64,
            slot: (slot + index * 64) as u32,
            ..RemapPiece::default()
        })
    }

    fn begin(test: impl FnOnce(Agent, u64)) {
        let _one = one_at_a_time();
        let (_map, at) = room();
        match alone(segment()).filter(|agent| fill(agent, at, 0)) {
            Some(agent) => test(agent, at),
            None => eprintln!("SKIPPED: no userfaultfd for us, or no huge page"),
        }
    }

    #[test]
    fn the_huge_zero_page_is_not_taken() {
        begin(|mut agent, at| {
            let range = Range { start: at, end: at + HUGE_LEN };
            assert!(agent.is_huge(range));
            // SAFETY: the test's memory.
            unsafe { mem::advise(at, HUGE_LEN, libc::MADV_DONTNEED) }.unwrap();
            assert_eq!(shown(at, 5), [0; PAGE_SIZE]);
            assert!(!agent.is_huge(range), "moved, it is a page that does not exist for some kernels");
            let mut outcomes = [Outcome::default(); 8];
            let pieces = pieces_at(at, 0).map(|piece| RemapPiece { segment: PIECE_ZERO, ..piece });
            assert!(!agent.remap_huge(&pieces, &mut outcomes));
            assert_eq!(shown(at, 5), [0; PAGE_SIZE]);
        });
    }

    #[test]
    fn a_differing_huge_page_moves_back_and_an_equal_one_is_mapped() {
        begin(map_an_equal_one);
    }

    /// See [`pages_whose_move_the_kernel_forgets_are_not_lost`](super::super::remap).
    #[test]
    fn a_huge_page_whose_move_the_kernel_forgets_is_not_lost() {
        begin(|agent, at| {
            let _forgets = ForgetMoves::begin();
            map_an_equal_one(agent, at);
        });
    }

    fn map_an_equal_one(mut agent: Agent, at: u64) {
        let range = Range { start: at, end: at + HUGE_LEN };
        agent.watch.register(range, uffd::MODE_WP).unwrap();
        let mut outcomes = [Outcome::default(); 8];
        let mut pieces = pieces_at(at, 0);
        // The last page, and one in the middle, are another's.
        for wrong in [7, 4] {
            pieces[wrong].slot += 1;
            assert!(!agent.remap_huge(&pieces, &mut outcomes));
            pieces[wrong].slot -= 1;
            assert!(agent.is_huge(range), "it was split");
            let all_of = pagemap::WPALLOWED | pagemap::WRITTEN;
            let query = Query { all_of, report: pagemap::WRITTEN, ..Query::default() };
            let written = pagemap::scan(&agent.pagemap, range, query, &mut [pagemap::ScannedRange::default()]);
            assert_eq!(written.unwrap().0, 0, "it is not watched as before");
        }
        assert!(agent.remap_huge(&pieces, &mut outcomes));
        assert!(outcomes.iter().all(|outcome| outcome.merged == 64 && outcome.reason == RefusalReason::Done as u32));
        assert_eq!(agent.rights_of_pool(range), Some(mem::READ_WRITE));
        assert!((0..HUGE_PAGES).all(|page| shown(at, page) == content(page)));
        assert_eq!(agent.hold.register(range, uffd::MODE_MISSING), Ok(()));
        assert!(agent.watch.register(range, uffd::MODE_WP).is_err(), "discards are not heard of");
    }

    /// A discard that was answered meanwhile leaves fresh memory among what is mapped.
    #[test]
    fn pool_mappings_are_registered_despite_other_mappings_between() {
        begin(|mut agent, at| {
            let mut outcomes = [Outcome::default(); 8];
            assert!(agent.remap_huge(&pieces_at(at, 0), &mut outcomes));
            let page = |index: u64| Range::pages_from(at + index * PAGE, 1);
            agent.hold.unregister(Range { start: at, end: at + HUGE_LEN }).unwrap();
            agent.serve_event(uffd::Event::Remove(page(100)));
            agent.hold_pool(Range { start: at, end: at + HUGE_LEN });
            let ours = |index: u64| agent.watch.register(page(index), uffd::MODE_WP).is_ok();
            assert_eq!([0, 99, 100, 101, 511].map(ours), [false, false, true, false, false]);
        });
    }

    /// As in a forked child, which has the page table of its parent where that had written something.
    #[test]
    fn absent_pages_are_mapped_as_small_pages() {
        begin(|mut agent, at| {
            let mut outcomes = [Outcome::default(); 8];
            assert!(agent.remap_huge(&pieces_at(at, 0), &mut outcomes));
            let whole = Range { start: at, end: at + HUGE_LEN };
            let there = || {
                let query = Query { all_of: pagemap::PRESENT, report: pagemap::PRESENT, ..Query::default() };
                let mut found = [pagemap::ScannedRange::default(); 64];
                let (count, _) = pagemap::scan(&agent.pagemap, whole, query, &mut found).unwrap();
                found[..count].iter().map(|region| (region.end - region.start) / PAGE).sum::<u64>()
            };
            for gone in [0..0, 0..512, 0..1, 511..512, 100..300] {
                agent.hold.unregister(whole).unwrap();
                let range = Range { start: at + gone.start * PAGE, end: at + gone.end * PAGE };
                // SAFETY: the test's memory; no event is read, so the slots are mapped again.
                unsafe {
                    mem::advise(range.start, range.len(), libc::MADV_DONTNEED).unwrap();
                    ((at + 200 * PAGE) as *mut u64).write_volatile(201);
                }
                assert!(there() >= HUGE_PAGES as u64 - (gone.end - gone.start));
                agent.hold_pool(whole);
                agent.map_as_pages(whole);
                assert_eq!(there(), HUGE_PAGES as u64, "{gone:?}");
                assert!((0..HUGE_PAGES).all(|page| shown(at, page) == content(page)));
            }
        });
    }

    /// Merges the pieces whole, or one by one; returns whether all are merged.
    fn merge(agent: &mut Agent, pieces: &[RemapPiece; 8], whole: bool) -> bool {
        let mut outcomes = [Outcome::default(); 8];
        if whole {
            return agent.remap_huge(pieces, &mut outcomes);
        }
        for (piece, outcome) in pieces.iter().zip(&mut outcomes) {
            agent.remap_range(core::slice::from_ref(piece), core::slice::from_mut(outcome));
        }
        outcomes.iter().all(|outcome| outcome.merged == 64)
    }

    /// Raw discards at any time of a merge, each of one page, and then a look at its fresh content. A discard between a
    /// page's mapping and its registration is lost, a few in a thousand here.
    #[test]
    fn raw_discards_during_a_merge_read_zeros() {
        const ROUNDS: u64 = 1000;
        for whole in [true, false] {
            begin(|mut agent, at| {
                let (begun, ended) = (AtomicU64::new(0), AtomicU64::new(0));
                std::thread::scope(|scope| {
                    let discards = scope.spawn(|| {
                        let mut stale = 0;
                        for round in 1..=ROUNDS {
                            while begun.load(Ordering::Acquire) < round {
                                std::thread::yield_now();
                            }
                            let began = sched::monotonic_ns();
                            while sched::monotonic_ns() - began < round * 7919 % 1500 * 1000 {
                                std::hint::spin_loop();
                            }
                            let page = (round * 31 % HUGE_PAGES as u64) as usize;
                            // SAFETY: the test's memory.
                            unsafe { mem::advise(at + page as u64 * PAGE, PAGE, libc::MADV_DONTNEED) }.unwrap();
                            stale += u64::from(shown(at, page) != [0; PAGE_SIZE]);
                            ended.store(round, Ordering::Release);
                        }
                        stale
                    });
                    let mut merged = 0;
                    for round in 1..=ROUNDS {
                        fill(&agent, at, 0);
                        agent.watch.register(Range { start: at, end: at + HUGE_LEN }, uffd::MODE_WP).unwrap();
                        begun.store(round, Ordering::Release);
                        merged += u64::from(merge(&mut agent, &pieces_at(at, 0), whole));
                        while ended.load(Ordering::Acquire) < round {
                            agent.serve_alone();
                        }
                        agent.serve_alone();
                    }
                    let stale = discards.join().unwrap();
                    eprintln!("whole: {whole}, {merged} of {ROUNDS} merged, {stale} showed old bytes");
                    assert!(merged > 0 && stale < ROUNDS / 20, "old bytes after {stale} of {ROUNDS} discards");
                });
            });
        }
    }

    fn piece(page: u64, pages: u32) -> RemapPiece {
        RemapPiece { addr: (1 << 30) + page * PAGE, pages, ..RemapPiece::default() }
    }

    #[test]
    fn pieces_side_by_side_are_one_huge_page() {
        let of_one = |pieces: &[RemapPiece]| pieces_of_one(pieces.iter().copied());
        let eight: Vec<RemapPiece> = (0..9).map(|index| piece(index * 64, 64)).collect();
        assert_eq!(of_one(&eight), Some(8), "what is behind it is another's");
        assert_eq!(of_one(&eight[..7]), None, "too short");
        assert_eq!(of_one(&eight[1..]), None, "not aligned");
        assert_eq!(of_one(&[piece(0, 64), piece(65, 447)]), None, "a gap");
        assert_eq!(of_one(&[piece(0, 64), piece(63, 448)]), None, "over one another");
        assert_eq!(of_one(&[piece(0, 64), piece(64, 449)]), None, "too long");
        assert_eq!(of_one(&[piece(0, 64), piece(64, 0), piece(64, 448)]), None, "an empty one");
        assert_eq!(of_one(&[piece(0, 1), piece(1, 511)]), Some(2));
        assert_eq!(of_one(&[piece(0, u32::MAX)]), None);
        assert_eq!(of_one(&[]), None);
    }
}
