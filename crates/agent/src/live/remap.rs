//! Freeze, compare, map: the only place where pages of a client become pages of the pool; [`unshare`](super::unshare) is the
//! way back.
//!
//! The order of steps carries the promise that no write is lost:
//!
//! 1. the range is registered for missing pages: a thread that touches an absent page waits;
//! 2. `UFFDIO_MOVE` takes the pages away, each atomically; the kernel refuses pinned and fork-shared pages, and anything but
//!    private anonymous memory;
//! 3. the bytes, which no thread can change now, are compared with the slots;
//! 4. pages that differ are moved back;
//! 5. pages that are equal are mapped from the pool, as read-only page cache under a private mapping, so that a later write
//!    is the kernel's own copy on write;
//! 6. the range is watched again and the waiting threads are woken.
//!
//! The mapping lock is held from 1 to 6: calls that would change the mappings wait. What the steps share with those of a
//! huge page is [`freeze`](super::freeze).

use super::freeze::{Freeze, half};
use super::session::{Agent, PAGE};
use crate::address_space::prefault;
use crate::limits::MOVE_TRIES;
use pagefold_os::raw::Errno;
use pagefold_os::{Range, mem, pagemap};
use pagefold_protocol::message::{FREEZE_PAGES_MAX, Outcome, PIECE_ZERO, RefusalReason, RemapPiece};

/// What became of a page of the range.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// Still where it was: pinned, or refused.
    Left(RefusalReason),
    /// In the freeze area.
    Frozen,
    /// Absent, or swapped out.
    Hole,
    /// Equal to its slot (or zero): to be mapped, later mapped.
    Equal,
}

impl Agent {
    /// Merges the pieces of one freeze: ascending, at most [`FREEZE_PAGES_MAX`] pages from first to last, nothing merged
    /// between them. Writes one outcome per piece.
    pub(super) fn remap_range(&self, pieces: &[RemapPiece], outcomes: &mut [Outcome]) {
        self.remap_exclusive(pieces, outcomes);
        for (piece, outcome) in pieces.iter().zip(outcomes) {
            let rest = behind(piece, outcome.merged);
            let range = Range::pages_from(rest.addr, u64::from(rest.pages));
            if outcome.reason == RefusalReason::Pinned as u32 && self.make_exclusive(range) {
                let mut again = [Outcome::default()];
                self.remap_exclusive(&[rest], &mut again);
                *outcome = Outcome { merged: outcome.merged + again[0].merged, reason: again[0].reason };
            }
        }
    }

    /// Makes the pages of `range` that this process alone has exclusive to it, as its next write would: the kernel counts a
    /// page that a fork shared as shared until then, even when the child has ended or executed another program. Returns
    /// false if there is none.
    ///
    /// Not while pages are frozen: a page that a bare call discards at this moment would have the agent wait for itself.
    fn make_exclusive(&self, range: Range) -> bool {
        let _held = self.lock_mappings();
        if self.is_excluded(range) {
            return false;
        }
        let mut is_any = false;
        let seen = pagemap::each_alone(&self.pagemap, range, |addr| {
            // SAFETY: changes no bytes. A page that another process has by now is copied by the kernel.
            is_any |= unsafe { mem::advise(addr, PAGE, libc::MADV_POPULATE_WRITE) }.is_ok();
        });
        is_any && seen.is_ok()
    }

    /// [`remap_range`](Self::remap_range); pages that a fork shared stay, as those that are pinned.
    fn remap_exclusive(&self, pieces: &[RemapPiece], outcomes: &mut [Outcome]) {
        let (Some(first), Some(last)) = (pieces.first(), pieces.last()) else { return };
        let range = Range { start: first.addr, end: last.addr + u64::from(last.pages) * PAGE };
        outcomes.fill(Outcome { merged: 0, reason: RefusalReason::NotAnonymous as u32 });
        if range.is_empty() || range.pages() > FREEZE_PAGES_MAX as u64 || !range.start.is_multiple_of(PAGE) {
            return;
        }
        let rights = self.rights_of_plain(range.start);
        let Some(freeze_area) = self.freeze_area.start(rights) else { return };
        let Some(mut freeze) = self.freeze(range, rights, freeze_area) else { return };
        let mut states = [State::Hole; FREEZE_PAGES_MAX];
        let states = &mut states[..range.pages() as usize];
        freeze.take(states);
        for (piece, outcome) in pieces.iter().zip(outcomes.iter_mut()) {
            *outcome = freeze.compare_piece(piece, states);
        }
        for run in runs(states, |state| matches!(state, State::Frozen | State::Hole)) {
            freeze.move_back(run);
        }
        for (piece, outcome) in pieces.iter().zip(outcomes.iter_mut()) {
            freeze.map_piece(piece, outcome, states);
        }
        if pieces.iter().zip(&*outcomes).any(|(piece, outcome)| outcome.merged > 0 && piece.segment != PIECE_ZERO) {
            self.report_discards(range);
        }
        let has_zeros = pieces.iter().any(|piece| piece.segment == PIECE_ZERO);
        if !has_zeros && states.iter().all(|state| *state == State::Equal) {
            freeze.wake();
        }
        freeze.watch_again(pieces, outcomes, states);
        freeze.end(pieces, outcomes, range.len());
    }
}

impl Freeze<'_> {
    /// Step 2: moves the range's pages to the freeze area.
    fn take(&mut self, states: &mut [State]) {
        let range = self.range;
        let mut at = range.start;
        let mut tries = 0;
        // One move stays within one mapping.
        let mut len = range.len();
        while at < range.end {
            let part = Range { start: at, end: range.end.min(at + len) };
            let (moved, error) = self.move_away(part);
            at += moved;
            let left = match error {
                None => {
                    len = range.len();
                    None
                }
                Some(Errno(libc::EAGAIN)) if tries < MOVE_TRIES => {
                    tries += 1;
                    None
                }
                Some(Errno(libc::EAGAIN | libc::EBUSY)) => Some(RefusalReason::Pinned),
                Some(Errno(libc::ENOENT)) => Some(RefusalReason::Absent),
                Some(_) if at + PAGE < part.end => {
                    len = half(part.end - at);
                    None
                }
                Some(_) => Some(RefusalReason::NotAnonymous),
            };
            if let Some(reason) = left {
                states[self.page_of(at)] = State::Left(reason);
                at += PAGE;
                tries = 0;
            }
        }
        // A swapped-out page is not present here; it goes back untouched with the rest.
        prefault::each_present(Range::pages_from(self.freeze_area, range.pages()), &self.agent.pagemap, |page| {
            if let Some(state @ State::Hole) = states.get_mut(page) {
                *state = State::Frozen;
            }
        });
    }

    /// Step 3: how many pages of `piece` equal their slots, from the first one on.
    fn compare_piece(&self, piece: &RemapPiece, states: &mut [State]) -> Outcome {
        let compared = self.compare(piece, |page| match states[page] {
            State::Left(reason) => Err(reason),
            State::Equal => Err(RefusalReason::NotAnonymous),
            // A hole may also be a swapped-out page, so it never counts as zero.
            State::Hole => Err(RefusalReason::Absent),
            State::Frozen => Ok(()),
        });
        let (merged, reason) = compared.err().unwrap_or((piece.pages, RefusalReason::Done));
        let first = self.page_of(piece.addr);
        states[first..first + merged as usize].fill(State::Equal);
        Outcome { merged, reason: reason as u32 }
    }

    /// Step 5: maps the equal pages of `piece` from the pool.
    fn map_piece(&mut self, piece: &RemapPiece, outcome: &mut Outcome, states: &mut [State]) {
        if outcome.merged == 0 || piece.segment == PIECE_ZERO {
            return;
        }
        let first = self.page_of(piece.addr);
        let equal = first..first + outcome.merged as usize;
        if let Some(kept) = self.discarded[equal.clone()].iter().position(|discarded| *discarded) {
            let rest = first + kept..equal.end;
            states[rest.clone()].fill(State::Frozen);
            self.move_back(rest);
            *outcome = Outcome { merged: kept as u32, reason: RefusalReason::Discarded as u32 };
        }
        let mut done = 0;
        while done < outcome.merged {
            let rest = first + done as usize..first + outcome.merged as usize;
            let (end, _) = self.alike_for_copies(self.range_of(rest.clone()));
            let pages = (self.page_of(end) - rest.start) as u32;
            if let Err(reason) = self.map_slots(&RemapPiece { pages, ..behind(piece, done) }) {
                states[rest.clone()].fill(State::Frozen);
                self.move_back(rest);
                *outcome = Outcome { merged: done, reason: reason as u32 };
                return;
            }
            done += pages;
        }
    }

    /// Step 6: pages that were not merged are watched for writes again; holes in place of zero pages become ordinary memory.
    fn watch_again(&self, pieces: &[RemapPiece], outcomes: &[Outcome], states: &mut [State]) {
        // From here on `Equal` means: mapped from the pool.
        for (piece, outcome) in pieces.iter().zip(outcomes).filter(|(piece, _)| piece.segment == PIECE_ZERO) {
            let first = self.page_of(piece.addr);
            states[first..first + outcome.merged as usize].fill(State::Hole);
        }
        let agent = self.agent;
        agent.prefault(pieces, outcomes);
        for run in runs(states, |state| *state == State::Equal) {
            agent.adopt_pool(self.range_of(run));
        }
        for run in runs(states, |state| *state != State::Equal) {
            let range = self.range_of(run.clone());
            if states[run.clone()].contains(&State::Left(RefusalReason::NotAnonymous)) {
                agent.watch_parts(range);
            } else {
                agent.watch_part(range);
            }
            for frozen in runs(&states[run], |state| *state == State::Frozen) {
                let start = range.start + frozen.start as u64 * PAGE;
                let _ = agent.watch.write_protect(Range::pages_from(start, frozen.len() as u64));
            }
        }
    }
}

/// What is left of `piece` behind its first `merged` pages.
fn behind(piece: &RemapPiece, merged: u32) -> RemapPiece {
    let addr = piece.addr + u64::from(merged) * PAGE;
    RemapPiece { addr, pages: piece.pages - merged, slot: piece.slot.wrapping_add(merged), ..*piece }
}

/// The runs of neighbouring states for which `wanted` holds, as index ranges.
fn runs(states: &[State], wanted: impl Fn(&State) -> bool + Copy) -> impl Iterator<Item = core::ops::Range<usize>> {
    // A copy on the stack, so that the caller may change the original while walking.
    let mut marks = [false; FREEZE_PAGES_MAX];
    for (mark, state) in marks.iter_mut().zip(states) {
        *mark = wanted(state);
    }
    let len = states.len();
    let mut at = 0;
    core::iter::from_fn(move || {
        while at < len && !marks[at] {
            at += 1;
        }
        let start = at;
        while at < len && marks[at] {
            at += 1;
        }
        (start < at).then_some(start..at)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::live::freeze::ForgetMoves;
    use crate::live::handshake::{alone, one_at_a_time};
    use crate::state::SHARED;
    use core::ffi::c_int;
    use core::sync::atomic::Ordering;
    use pagefold_os::{PAGE_SIZE, Page, memfd};
    use pagefold_protocol::message::DOMAIN_NAME_MAX;

    /// A page that differs from those of other numbers, and from zeros.
    fn content(number: usize) -> Page {
        let mut page = [9; PAGE_SIZE];
        page[..8].copy_from_slice(&(number as u64).to_le_bytes());
        page
    }

    #[test]
    fn equal_pages_are_mapped_and_all_others_move_back() {
        let _one = one_at_a_time();
        map_equal_pages(mem::READ_WRITE);
    }

    #[test]
    fn memory_that_can_be_executed_is_mapped_with_its_rights() {
        let _one = one_at_a_time();
        SHARED.executable.store(true, Ordering::Relaxed);
        map_equal_pages(mem::READ_WRITE_EXECUTE);
        // And usual memory beside it.
        map_equal_pages(mem::READ_WRITE);
    }

    /// The kernel moves no page that a fork shared before its process writes to it; a page that the process alone has is not
    /// kept from merging by that.
    #[test]
    fn pages_are_merged_once_the_children_that_shared_them_are_gone() {
        const PAGES: usize = 8;
        let _one = one_at_a_time();
        let segment = memfd::create(c"pagefold-pool", PAGES as u64 * PAGE).unwrap();
        (0..PAGES).for_each(|slot| assert_eq!(segment.write(&content(slot)), Ok(PAGE_SIZE)));
        let Some(agent) = alone(segment) else { return eprintln!("SKIPPED: needs a userfaultfd") };
        let memory = mem::Mapping::anonymous(PAGES * PAGE_SIZE).unwrap();
        for page in 0..PAGES {
            // SAFETY: a page of the test's memory, to which no reference exists.
            unsafe { memory.as_ptr().add(page * PAGE_SIZE).cast::<Page>().write(content(page)) };
        }
        let mut ends = [0; 2];
        // SAFETY: makes a pipe; the child makes system calls only.
        let child = unsafe {
            assert_eq!(libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC), 0);
            match libc::fork() {
                0 => {
                    libc::close(ends[1]);
                    libc::read(ends[0], ends.as_mut_ptr().cast(), 1);
                    libc::_exit(0)
                }
                child => child,
            }
        };
        let pieces = [0u32, 4].map(|page| RemapPiece {
            addr: memory.addr() + u64::from(page) * PAGE,
            pages: 4,
            slot: page,
            ..RemapPiece::default()
        });
        let merge = || {
            let mut outcomes = [Outcome::default(); 2];
            agent.remap_range(&pieces, &mut outcomes);
            outcomes.map(|outcome| (outcome.merged, outcome.reason))
        };
        assert_eq!(merge(), [(0, RefusalReason::Pinned as u32); 2], "the child has the pages, too");
        // The process's own again: the rest of its piece is not.
        // SAFETY: a page of the test's memory.
        unsafe { memory.as_ptr().cast::<Page>().write(content(0)) };
        assert_eq!(merge(), [(1, RefusalReason::Pinned as u32), (0, RefusalReason::Pinned as u32)]);
        // SAFETY: ends the child, which is ours, and waits for it.
        unsafe {
            libc::close(ends[1]);
            assert_eq!(libc::waitpid(child, core::ptr::null_mut(), 0), child);
            libc::close(ends[0]);
        }
        let mut outcomes = [Outcome::default(); 2];
        agent.remap_range(&[behind(&pieces[0], 1), pieces[1]], &mut outcomes);
        let done = RefusalReason::Done as u32;
        assert_eq!(outcomes.map(|outcome| (outcome.merged, outcome.reason)), [(3, done), (4, done)]);
        for page in 0..PAGES {
            // SAFETY: a page of the test's memory.
            let bytes = unsafe { memory.as_ptr().add(page * PAGE_SIZE).cast::<Page>().read_volatile() };
            assert!(bytes == content(page), "page {page}");
        }
    }

    /// The rights that the program has by now are others than those with which the pages were taken.
    #[test]
    fn pages_are_only_mapped_with_the_rights_that_they_had() {
        let _one = one_at_a_time();
        SHARED.executable.store(true, Ordering::Relaxed);
        let segment = memfd::create(c"pagefold-pool", PAGE).unwrap();
        assert_eq!(segment.write(&content(3)), Ok(PAGE_SIZE));
        let Some(mut agent) = alone(segment) else { return eprintln!("SKIPPED: needs a userfaultfd") };
        agent.freeze_area.add_executable(&agent.watch);
        let memory = mem::Mapping::anonymous(PAGE_SIZE).unwrap();
        // SAFETY: the test's memory, to which no reference exists.
        unsafe { memory.as_ptr().cast::<Page>().write(content(3)) };
        let piece = RemapPiece { addr: memory.addr(), pages: 1, ..RemapPiece::default() };
        for (rights, assumed) in
            [(mem::READ_WRITE, mem::READ_WRITE_EXECUTE), (mem::READ_WRITE_EXECUTE, mem::READ_WRITE)]
        {
            // SAFETY: the test's memory.
            unsafe { mem::protect(memory.addr(), PAGE, rights) }.unwrap();
            let range = Range::pages_from(memory.addr(), 1);
            let mut freeze = agent.freeze(range, assumed, agent.freeze_area.start(assumed).unwrap()).unwrap();
            let mut states = [State::Hole];
            freeze.take(&mut states);
            assert!(states[0] == State::Left(RefusalReason::NotAnonymous), "the kernel moved {rights} to {assumed}");
            let mut outcomes = [Outcome::default()];
            freeze.watch_again(&[piece], &outcomes, &mut states);
            freeze.end(&[piece], &outcomes, PAGE);
            agent.remap_range(&[piece], &mut outcomes);
            assert_eq!((outcomes[0].merged, agent.rights_of_pool(range)), (1, Some(rights)));
            assert_eq!(agent.unshare(range), Ok(()));
            assert_eq!(agent.maps.rights_at(memory.addr()), Some(rights));
        }
    }

    /// A kernel that forgets moves says of each page that its place in the freeze area is taken.
    #[test]
    fn pages_whose_move_the_kernel_forgets_are_not_lost() {
        let _one = one_at_a_time();
        let _forgets = ForgetMoves::begin();
        map_equal_pages(mem::READ_WRITE);
    }

    fn map_equal_pages(rights: c_int) {
        // The longest name that a segment may have: the mappings are found by it.
        let name = format!("pagefold-pool:{}", "d".repeat(DOMAIN_NAME_MAX));
        let segment = memfd::create(&std::ffi::CString::new(name).unwrap(), 16 * PAGE).unwrap();
        (0..16).for_each(|slot| assert_eq!(segment.write(&content(slot)), Ok(PAGE_SIZE)));
        let Some(mut agent) = alone(segment) else { return eprintln!("SKIPPED: needs a userfaultfd") };
        if rights != mem::READ_WRITE {
            agent.freeze_area.add_executable(&agent.watch);
        }
        let memory = mem::Mapping::anonymous(12 * PAGE_SIZE).unwrap();
        // SAFETY: the test's memory.
        unsafe { mem::protect(memory.addr(), 12 * PAGE, rights) }.unwrap();
        let put = |page: usize, bytes: &Page| {
            // SAFETY: a page of the test's memory, to which no reference exists.
            unsafe { memory.as_ptr().add(page * PAGE_SIZE).cast::<Page>().write(*bytes) }
        };
        // Two equal pages, one that differs, one equal; a zero page; an absent one; equal, differs, left between the pieces.
        (0..2).for_each(|page| put(page, &content(page)));
        put(2, &content(70));
        put(3, &content(3));
        put(4, &[0; PAGE_SIZE]);
        put(6, &content(6));
        put(7, &content(71));
        put(8, &content(72));
        put(9, &content(9));
        let piece = |page: u32, pages: u32, slot: u32| RemapPiece {
            addr: memory.addr() + u64::from(page) * PAGE,
            pages,
            slot,
            ..RemapPiece::default()
        };
        let zeros = RemapPiece { segment: PIECE_ZERO, ..piece(4, 1, 0) };
        let pieces = [piece(0, 4, 0), zeros, piece(5, 1, 5), piece(6, 1, 6), piece(7, 1, 7), piece(9, 1, 9)];
        let mut outcomes = [Outcome::default(); 6];
        agent.remap_range(&pieces, &mut outcomes);
        let (done, changed) = (RefusalReason::Done as u32, RefusalReason::Changed as u32);
        let absent = RefusalReason::Absent as u32;
        let found = outcomes.map(|outcome| (outcome.merged, outcome.reason));
        assert_eq!(found, [(2, changed), (1, done), (0, absent), (1, done), (0, changed), (1, done)]);
        let mut shown = Vec::new();
        let everything = Range::pages_from(memory.addr(), 12);
        agent
            .maps
            .pools(everything, |part, shown_rights| {
                assert_eq!(shown_rights, rights);
                shown.push(((part.start - memory.addr()) / PAGE, (part.end - memory.addr()) / PAGE));
                false
            })
            .unwrap();
        assert_eq!(shown, [(0, 2), (6, 7), (9, 10)]);
        let expected = [0, 1, 70, 3, usize::MAX, usize::MAX, 6, 71, 72, 9];
        for (page, number) in expected.into_iter().enumerate() {
            // SAFETY: a page of the test's memory.
            let bytes = unsafe { memory.as_ptr().add(page * PAGE_SIZE).cast::<Page>().read_volatile() };
            let wanted = if number == usize::MAX { [0; PAGE_SIZE] } else { content(number) };
            assert!(bytes == wanted, "page {page}");
            // A write is the program's own.
            put(page, &content(200 + page));
        }
        for page in 0..expected.len() {
            // SAFETY: a page of the test's memory.
            let bytes = unsafe { memory.as_ptr().add(page * PAGE_SIZE).cast::<Page>().read_volatile() };
            assert!(bytes == content(200 + page), "page {page} after a write");
        }
    }

    /// Spans that are frozen and moved back while the kernel compacts memory, which has it try moves again.
    #[test]
    fn frozen_pages_survive_compaction() {
        const PAGES: usize = 1 << 10;
        const TRIGGER: &str = "/proc/sys/vm/compact_memory";
        let _one = one_at_a_time();
        let segment = memfd::create(c"pagefold-pool", 64 * PAGE).unwrap();
        (0..64).for_each(|slot| assert_eq!(segment.write(&content(10_000 + slot)), Ok(PAGE_SIZE)));
        let Some(agent) = alone(segment) else { return eprintln!("SKIPPED: needs a userfaultfd") };
        if std::fs::write(TRIGGER, "1").is_err() {
            return eprintln!("SKIPPED: memory cannot be compacted by request here (root, and CONFIG_COMPACTION)");
        }
        let ends = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !ends.load(core::sync::atomic::Ordering::Acquire) {
                    // Holes of one page everywhere, so that there is something to compact.
                    let holes = mem::Mapping::anonymous(64 << 20).unwrap();
                    for at in (0..holes.len()).step_by(PAGE_SIZE) {
                        // SAFETY: inside the mapping.
                        unsafe { holes.as_ptr().add(at).write(1) };
                    }
                    for at in (0..holes.len()).step_by(2 * PAGE_SIZE) {
                        // SAFETY: the test's memory.
                        let _ = unsafe { mem::advise(holes.addr() + at as u64, PAGE, libc::MADV_DONTNEED) };
                    }
                    let _ = std::fs::write(TRIGGER, "1");
                }
            });
            let (mut wrong, mut turns) = (0, 0);
            let began = std::time::Instant::now();
            while wrong == 0 && began.elapsed().as_secs() < 4 {
                turns += 1;
                let memory = mem::Mapping::anonymous(PAGES * PAGE_SIZE).unwrap();
                // SAFETY: pages of the test's memory.
                let at = |page: usize| unsafe { memory.as_ptr().add(page * PAGE_SIZE).cast::<Page>() };
                // SAFETY: `page` is below `PAGES`, so `at` points into `memory`, which no other thread uses yet.
                (0..PAGES).for_each(|page| unsafe { at(page).write(content(page)) });
                for first in (0..8 * PAGES).step_by(8).map(|first| first % PAGES) {
                    let piece = |page: usize| RemapPiece {
                        addr: at(first + page) as u64,
                        pages: 1,
                        slot: page as u32,
                        ..RemapPiece::default()
                    };
                    agent.remap_range(&core::array::from_fn::<_, 8, _>(piece), &mut [Outcome::default(); 8]);
                }
                // SAFETY: `page` is below `PAGES`, so `at` points into `memory`, which is mapped until the turn ends.
                wrong = (0..PAGES).filter(|page| unsafe { at(*page).read_volatile() } != content(*page)).count();
            }
            ends.store(true, core::sync::atomic::Ordering::Release);
            assert_eq!(wrong, 0, "pages are lost, turn {turns} after {:?}", began.elapsed());
            println!("{turns} turns");
        });
    }

    #[test]
    fn runs_are_maximal() {
        let states = [State::Equal, State::Frozen, State::Frozen, State::Hole, State::Frozen];
        let found: Vec<_> = runs(&states, |state| *state == State::Frozen).collect();
        assert_eq!(found, [1..3, 4..5]);
        assert_eq!(runs(&[], |_| true).count(), 0);
    }
}
