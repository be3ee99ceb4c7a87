//! A huge page that is merged whole: taken, compared and given up as one.
//!
//! Page by page the kernel would split it first, while its pages are in our hands: that takes longer than all else, and leaves
//! 512 small pages to be freed. So where the pieces that follow one another cover a huge page it is moved as it is. If all of it
//! is equal it is mapped and the huge page goes back to the system as one; if anything is not it goes back to where it was,
//! and span by span is tried. The order of steps is that of [`remap`](crate::live::remap), and so is the argument for it.

use crate::address_space::prefault;
use crate::limits::{HUGE_LEN, HUGE_PAGES, NOTHING};
use crate::live::remap::rewatch;
use crate::live::session::Agent;
use crate::owned_ranges::{self, Owned, hide};
use pagefold_os::pagemap::{self, Query};
use pagefold_os::raw::Errno;
use pagefold_os::{PAGE_SIZE, Range, mem, sched, uffd};
use pagefold_protocol::message::{Outcome, PIECE_ZERO, Piece, RefusalReason};

const PAGE: u64 = PAGE_SIZE as u64;

/// How many of the first `pieces` cover exactly the pages of one huge page, side by side; `None` if they do not.
pub(crate) fn pieces_of_one(pieces: impl Iterator<Item = Piece>) -> Option<usize> {
    let mut span = Range { start: 0, end: 0 };
    for (index, piece) in pieces.enumerate() {
        if index == 0 {
            span = Range { start: piece.addr, end: piece.addr };
        }
        let joins = piece.addr == span.end && piece.pages > 0 && u64::from(piece.pages) <= HUGE_PAGES as u64;
        if !joins || !span.start.is_multiple_of(HUGE_LEN) {
            return None;
        }
        span.end += u64::from(piece.pages) * PAGE;
        if span.len() >= HUGE_LEN {
            return (span.len() == HUGE_LEN).then_some(index + 1);
        }
    }
    None
}

impl Agent {
    /// Merges the pieces, which cover the pages of one huge page, if it is one and all are equal. Returns false if nothing was
    /// done; else writes one outcome per piece.
    pub(crate) fn remap_whole(&mut self, pieces: &[Piece], outcomes: &mut [Outcome]) -> bool {
        let Some(first) = pieces.first() else { return false };
        let span = Range { start: first.addr, end: first.addr + HUGE_LEN };
        if !self.is_huge(span) || !self.has_whole() {
            return false;
        }
        self.read_slots(pieces);
        let _held = self.lock_guard();
        if self.is_excluded(span) {
            return false;
        }
        let Ok(heap) = self.heap.hold(span, &self.watch) else { return false };
        let frozen_at = sched::monotonic_ns();
        outcomes.fill(Outcome { merged: 0, reason: RefusalReason::NotAnonymous as u32 });
        self.begin_freeze(owned_ranges::range_of(Owned::HugeStaging).start);
        let _ = self.watch.unregister(span);
        let held = self.hold.register(span, uffd::MODE_MISSING).is_ok();
        if !held {
            // Part of it may be registered.
            self.watch_parts(span);
        }
        let merged = held && self.take_whole(span) && self.are_equal(pieces) && self.map_all(span, pieces, outcomes);
        if merged {
            // Who waits finds the slots; what else is to be done nobody needs to wait for.
            let _ = self.hold.wake(span);
        }
        self.note_freeze(sched::monotonic_ns() - frozen_at);
        if merged {
            self.settle_whole(span, pieces, outcomes);
        }
        self.let_heap_go(heap, span);
        let _ = self.hold.wake(span);
        self.show_zeros_of(pieces, outcomes);
        if merged && outcomes.iter().all(|outcome| outcome.merged > 0) {
            // SAFETY: ours, and what is there is mapped from the pool by now, or zero.
            let _ = unsafe { mem::advise(self.room, HUGE_LEN, libc::MADV_DONTNEED) };
        } else {
            // With a page table of small pages it would take no huge page again.
            self.forget_whole();
        }
        merged
    }

    /// Brings the slots into the page table and the cache: what the comparison finds there nobody waits for.
    fn read_slots(&self, pieces: &[Piece]) {
        const LINE: usize = 64;
        for piece in pieces.iter().filter(|piece| piece.segment != PIECE_ZERO) {
            let Some(slots) = self.slots(piece.segment, piece.slot, piece.pages) else { continue };
            for line in (0..piece.pages as usize * PAGE_SIZE).step_by(LINE) {
                // SAFETY: `slots` points at the slots of the piece, in a mapped segment.
                unsafe { slots.cast::<u8>().add(line).read_volatile() };
            }
        }
    }

    /// True if one huge page is at `range`, and not the kernel's of zeros.
    fn is_huge(&self, range: Range) -> bool {
        let all_of = pagemap::HUGE | pagemap::PRESENT | pagemap::PFNZERO;
        let query = Query { all_of, inverted: pagemap::PFNZERO, report: pagemap::HUGE, ..Query::default() };
        let mut found = [pagemap::Region::default()];
        let seen = pagemap::scan(&self.pagemap, range, query, &mut found);
        matches!(seen, Ok((1, _))) && found[0].start == range.start && found[0].end == range.end
    }

    /// Makes the place where a huge page waits, if there is none. Returns false if it cannot be had.
    fn has_whole(&mut self) -> bool {
        if self.whole.is_some() {
            return true;
        }
        let begin = |map: &mem::Mapping| map.addr().next_multiple_of(HUGE_LEN);
        let aligned = |map: &mem::Mapping| begin(map) + HUGE_LEN <= map.addr() + map.len() as u64;
        let make = |len| mem::Mapping::anonymous(len).ok().filter(aligned);
        let Some(map) = make(HUGE_LEN as usize).or_else(|| make(2 * HUGE_LEN as usize)) else { return false };
        hide(&map);
        let room = begin(&map);
        if self.watch.register(Range { start: room, end: room + HUGE_LEN }, uffd::MODE_WP).is_err() {
            return false;
        }
        owned_ranges::register(Owned::HugeStaging, Range { start: room, end: room + HUGE_LEN });
        self.whole = Some(map);
        true
    }

    /// Lets the place go where a huge page waits.
    pub(crate) fn forget_whole(&mut self) {
        self.whole = None;
        owned_ranges::register(Owned::HugeStaging, NOTHING);
    }

    /// Moves the huge page at `span` away; where that does not succeed it is back.
    fn take_whole(&mut self, span: Range) -> bool {
        // Looked for once more: from here on who reads what was discarded waits, and gets no huge page of zeros. Some kernels
        // (6.16 and newer) move that as a page that does not exist.
        let (moved, error) = if self.is_huge(span) {
            self.watch.move_pages(self.room, span, uffd::MOVE_ALLOW_SRC_HOLES | uffd::DONTWAKE)
        } else {
            (0, Some(Errno(libc::ENOENT)))
        };
        // Somebody may have split it in this very moment: then it is not worth it.
        if error.is_none() && self.is_huge(Range { start: self.room, end: self.room + HUGE_LEN }) {
            return true;
        }
        self.put_back(span, 0..(moved / PAGE) as usize);
        self.watch_part(Range { start: span.start + moved, ..span });
        false
    }

    /// Moves pages of `span` back, and watches those for writes as they were.
    fn put_back(&mut self, span: Range, pages: core::ops::Range<usize>) {
        let range = Range { start: span.start + pages.start as u64 * PAGE, end: span.start + pages.end as u64 * PAGE };
        if range.is_empty() {
            return;
        }
        self.move_back(span, pages);
        let _ = self.hold.unregister(range);
        rewatch(&self.watch, range);
        let _ = self.watch.write_protect(range);
    }

    /// True if each page equals its slot; where one does not, all are back.
    fn are_equal(&mut self, pieces: &[Piece]) -> bool {
        let mut at = 0;
        let equal = pieces.iter().all(|piece| {
            let pages = at..at + piece.pages as usize;
            at = pages.end;
            self.is_equal(piece, pages)
        });
        if !equal && let Some(first) = pieces.first() {
            self.put_back(Range { start: first.addr, end: first.addr + HUGE_LEN }, 0..HUGE_PAGES);
        }
        equal
    }

    /// Maps the slots, those that follow one another by one call. What the kernel does not map is back. Returns false if all is.
    fn map_all(&mut self, span: Range, pieces: &[Piece], outcomes: &mut [Outcome]) -> bool {
        let mut done = 0;
        while let Some(first) = pieces.get(done) {
            let follow = |pair: &&[Piece]| {
                let next = pair[0].slot.checked_add(pair[0].pages);
                pair[0].segment == pair[1].segment && (pair[0].segment == PIECE_ZERO || next == Some(pair[1].slot))
            };
            let mut joined = done + 1 + pieces[done..].windows(2).take_while(follow).count();
            // A huge page of the file's in the page table is split by the first write to it, and then none of its pages is there.
            let as_huge = done == 0 && first.segment != PIECE_ZERO && (first.slot as usize).is_multiple_of(HUGE_PAGES);
            if as_huge {
                joined = 1;
            }
            let pages: u32 = pieces[done..joined].iter().map(|piece| piece.pages).sum();
            let why = match self.map_slots(&Piece { pages, ..*first }) {
                Ok(()) => RefusalReason::Done,
                Err(why) => why,
            };
            for (piece, outcome) in pieces[done..joined].iter().zip(&mut outcomes[done..joined]) {
                *outcome =
                    Outcome { merged: if why == RefusalReason::Done { piece.pages } else { 0 }, reason: why as u32 };
            }
            if why != RefusalReason::Done {
                let from = ((first.addr - span.start) / PAGE) as usize;
                self.put_back(span, from..HUGE_PAGES);
                outcomes[joined..].fill(Outcome { merged: 0, reason: why as u32 });
                return done > 0;
            }
            if first.segment != PIECE_ZERO {
                self.hear_discards(Range { start: first.addr, end: self.mapped_to });
            }
            if as_huge {
                prefault::read_in(Range::pages_from(first.addr, 1));
            }
            done = joined;
        }
        true
    }

    /// Has what was mapped in the page table, and watches all.
    fn settle_whole(&self, span: Range, pieces: &[Piece], outcomes: &[Outcome]) {
        self.populate(pieces, outcomes);
        let mut shown = Range { start: span.start, end: span.start };
        for (piece, outcome) in pieces.iter().zip(outcomes) {
            let range = Range::pages_from(piece.addr, u64::from(outcome.merged));
            if piece.segment == PIECE_ZERO || range.is_empty() {
                self.watch_part(range);
            } else if shown.end == range.start {
                shown.end = range.end;
            } else {
                if !shown.is_empty() {
                    self.keep_shown(shown);
                }
                shown = range;
            }
        }
        if !shown.is_empty() {
            self.keep_shown(shown);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::live::handshake::{alone, one_at_a_time};
    use core::sync::atomic::{AtomicU64, Ordering};
    use pagefold_os::{Page, fd::Fd, memfd};

    /// A segment whose slots all differ.
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
        let (rights, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED);
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
    fn pieces_at(at: u64, slot: usize) -> [Piece; HUGE_PAGES / 64] {
        core::array::from_fn(|index| Piece {
            addr: at + index as u64 * 64 * PAGE,
            pages: 64,
            slot: (slot + index * 64) as u32,
            ..Piece::default()
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
    fn the_huge_page_of_zeros_is_not_taken() {
        begin(|mut agent, at| {
            let span = Range { start: at, end: at + HUGE_LEN };
            assert!(agent.is_huge(span));
            // SAFETY: the test's memory.
            unsafe { mem::advise(at, HUGE_LEN, libc::MADV_DONTNEED) }.unwrap();
            assert_eq!(shown(at, 5), [0; PAGE_SIZE]);
            assert!(!agent.is_huge(span), "moved, it is a page that does not exist for some kernels");
            let mut outcomes = [Outcome::default(); 8];
            let pieces = pieces_at(at, 0).map(|piece| Piece { segment: PIECE_ZERO, ..piece });
            assert!(!agent.remap_whole(&pieces, &mut outcomes));
            assert_eq!(shown(at, 5), [0; PAGE_SIZE]);
        });
    }

    #[test]
    fn what_differs_goes_back_whole_and_what_is_equal_is_mapped() {
        begin(|mut agent, at| {
            let span = Range { start: at, end: at + HUGE_LEN };
            agent.watch.register(span, uffd::MODE_WP).unwrap();
            let mut outcomes = [Outcome::default(); 8];
            let mut pieces = pieces_at(at, 0);
            // The last page, and one in the middle, are another's.
            for wrong in [7, 4] {
                pieces[wrong].slot += 1;
                assert!(!agent.remap_whole(&pieces, &mut outcomes));
                pieces[wrong].slot -= 1;
                assert!(agent.is_huge(span), "it was split");
                let all_of = pagemap::WPALLOWED | pagemap::WRITTEN;
                let query = Query { all_of, report: pagemap::WRITTEN, ..Query::default() };
                let written = pagemap::scan(&agent.pagemap, span, query, &mut [pagemap::Region::default()]);
                assert_eq!(written.unwrap().0, 0, "it is not watched as before");
            }
            assert!(agent.remap_whole(&pieces, &mut outcomes));
            assert!(
                outcomes.iter().all(|outcome| outcome.merged == 64 && outcome.reason == RefusalReason::Done as u32)
            );
            assert_eq!(agent.rights_of_pool(span), Some(libc::PROT_READ | libc::PROT_WRITE));
            assert!((0..HUGE_PAGES).all(|page| shown(at, page) == content(page)));
            assert_eq!(agent.hold.register(span, uffd::MODE_MISSING), Ok(()));
            assert!(agent.watch.register(span, uffd::MODE_WP).is_err(), "discards are not heard of");
        });
    }

    /// A discard that was answered meanwhile leaves fresh memory among what is mapped.
    #[test]
    fn what_shows_the_pool_is_held_whatever_lies_between() {
        begin(|mut agent, at| {
            let mut outcomes = [Outcome::default(); 8];
            assert!(agent.remap_whole(&pieces_at(at, 0), &mut outcomes));
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
    fn what_is_not_there_is_mapped_as_pages() {
        begin(|mut agent, at| {
            let mut outcomes = [Outcome::default(); 8];
            assert!(agent.remap_whole(&pieces_at(at, 0), &mut outcomes));
            let span = Range { start: at, end: at + HUGE_LEN };
            let there = || {
                let query = Query { all_of: pagemap::PRESENT, report: pagemap::PRESENT, ..Query::default() };
                let mut found = [pagemap::Region::default(); 64];
                let (count, _) = pagemap::scan(&agent.pagemap, span, query, &mut found).unwrap();
                found[..count].iter().map(|region| (region.end - region.start) / PAGE).sum::<u64>()
            };
            for gone in [0..0, 0..512, 0..1, 511..512, 100..300] {
                agent.hold.unregister(span).unwrap();
                let range = Range { start: at + gone.start * PAGE, end: at + gone.end * PAGE };
                // SAFETY: the test's memory; nobody hears of it, so the slots are there again.
                unsafe {
                    mem::advise(range.start, range.len(), libc::MADV_DONTNEED).unwrap();
                    ((at + 200 * PAGE) as *mut u64).write_volatile(201);
                }
                assert!(there() >= HUGE_PAGES as u64 - (gone.end - gone.start));
                agent.hold_pool(span);
                agent.map_as_pages(span);
                assert_eq!(there(), HUGE_PAGES as u64, "{gone:?}");
                assert!((0..HUGE_PAGES).all(|page| shown(at, page) == content(page)));
            }
        });
    }

    /// Merges the pieces whole, or one by one; returns whether all are merged.
    fn merge(agent: &mut Agent, pieces: &[Piece; 8], whole: bool) -> bool {
        let mut outcomes = [Outcome::default(); 8];
        if whole {
            return agent.remap_whole(pieces, &mut outcomes);
        }
        for (piece, outcome) in pieces.iter().zip(&mut outcomes) {
            agent.remap_span(core::slice::from_ref(piece), core::slice::from_mut(outcome));
        }
        outcomes.iter().all(|outcome| outcome.merged == 64)
    }

    /// Bare discards at any time of a merge, each of a page whose fresh content is looked at then. What comes between a page's
    /// mapping and its registration is lost, a few in a thousand here.
    #[test]
    fn bare_discards_of_what_is_being_merged_show_zeros() {
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

    fn piece(page: u64, pages: u32) -> Piece {
        Piece { addr: (1 << 30) + page * PAGE, pages, ..Piece::default() }
    }

    #[test]
    fn pieces_side_by_side_are_one_huge_page() {
        let of_one = |pieces: &[Piece]| pieces_of_one(pieces.iter().copied());
        let eight: Vec<Piece> = (0..9).map(|index| piece(index * 64, 64)).collect();
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
