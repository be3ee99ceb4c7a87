//! Freeze, compare, map: the only place where a client's pages become others'; `heal` gives them back.
//!
//! The order of steps carries the promise that no write is lost:
//!
//! 1. the span is registered for missing pages: who touches an absent page waits;
//! 2. `UFFDIO_MOVE` takes the pages away, atomically each; the kernel refuses
//!    pinned and fork-shared pages, and anything but plain private memory;
//! 3. the bytes, which nobody can change now, are compared with the slots;
//! 4. what differs is moved back;
//! 5. what is equal is mapped from the pool, read-only page cache under a
//!    private mapping, so that a later write is the kernel's own copy on write;
//! 6. the span is watched again and those who wait are woken.
//!
//! The guard is held from 1 to 6: calls that would change the mappings wait.

use crate::address_space::anonymous::watch_plain;
use crate::address_space::discarded_ranges;
use crate::address_space::heap::Watched;
use crate::address_space::prefault;
use crate::limits::{HUGE_PAGES, MOVE_TRIES};
use crate::live::session::Agent;
use crate::runtime::thread::yield_now;
use crate::state::SHARED;
use core::sync::atomic::Ordering;
use pagefold_os::page::is_zero;
use pagefold_os::pagemap::{self, Query};
use pagefold_os::raw::Errno;
use pagefold_os::uffd::{self, Uffd};
use pagefold_os::{PAGE_SIZE, Page, Range, mem, sched};
use pagefold_protocol::message::{FREEZE_PAGES_MAX, Outcome, PIECE_ZERO, Piece, RefusalReason};
use pagefold_protocol::wait_histogram;

const PAGE: u64 = PAGE_SIZE as u64;

/// What became of a page of the span, by page.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// Still where it was: pinned, or refused.
    Left(RefusalReason),
    /// In the staging area.
    Staged,
    /// Nothing was there.
    Hole,
    /// Equal to its slot (or zero): to be mapped.
    Equal,
}

impl Agent {
    /// Merges the pieces of one span: ascending, at most [`FREEZE_PAGES_MAX`] pages from first to last,
    /// with nothing merged between them. Writes one outcome per piece.
    pub(crate) fn remap_span(&mut self, pieces: &[Piece], outcomes: &mut [Outcome]) {
        let (Some(first), Some(last)) = (pieces.first(), pieces.last()) else { return };
        let span = Range { start: first.addr, end: last.addr + u64::from(last.pages) * PAGE };
        outcomes.fill(Outcome { merged: 0, reason: RefusalReason::NotAnonymous as u32 });
        if span.is_empty() || span.pages() > FREEZE_PAGES_MAX as u64 || !span.start.is_multiple_of(PAGE) {
            return;
        }
        let _held = self.lock_guard();
        if self.is_excluded(span) {
            return;
        }
        let Ok(heap) = self.heap.hold(span, &self.watch) else { return };
        let frozen_at = sched::monotonic_ns();
        self.begin_freeze(self.staging.addr());
        // The watch loses the span: what stays is protected again below.
        let _ = self.watch.unregister(span);
        if self.hold.register(span, uffd::MODE_MISSING).is_err() {
            // Part of it may be registered.
            self.watch_parts(span);
            self.let_heap_go(heap, span);
            let _ = self.hold.wake(span);
            return;
        }
        let mut states = [State::Hole; FREEZE_PAGES_MAX];
        let states = &mut states[..span.pages() as usize];
        self.take(span, states);
        for (piece, outcome) in pieces.iter().zip(outcomes.iter_mut()) {
            *outcome = self.compare(span, piece, states);
        }
        self.give_back(span, states);
        for (piece, outcome) in pieces.iter().zip(outcomes.iter_mut()) {
            self.map_piece(span, piece, outcome, states);
        }
        if pieces.iter().zip(&*outcomes).any(|(piece, outcome)| outcome.merged > 0 && piece.segment != PIECE_ZERO) {
            self.hear_discards(span);
        }
        let all_shown =
            states.iter().all(|state| *state == State::Equal) && pieces.iter().all(|piece| piece.segment != PIECE_ZERO);
        if all_shown {
            // Who waits finds the slots; what else is to be done nobody needs to wait for.
            let _ = self.hold.wake(span);
            self.note_freeze(sched::monotonic_ns() - frozen_at);
        }
        self.watch_again(span, pieces, outcomes, states);
        self.let_heap_go(heap, span);
        let _ = self.hold.wake(span);
        if !all_shown {
            self.note_freeze(sched::monotonic_ns() - frozen_at);
        }
        self.show_zeros_of(pieces, outcomes);
        // SAFETY: the staging area is ours and holds only pages that are now mapped from the pool (or were discarded).
        let _ = unsafe { mem::advise(self.staging.addr(), span.len(), libc::MADV_DONTNEED) };
    }

    /// Notes that the pages of a span will wait from `room` on.
    pub(crate) fn begin_freeze(&mut self, room: u64) {
        self.room = room;
        self.mapped_to = 0;
        self.voids = [false; HUGE_PAGES];
    }

    /// Ends what [`Heap::hold`](crate::address_space::heap::Heap::hold) began.
    pub(crate) fn let_heap_go(&self, heap: Option<Watched>, range: Range) {
        if heap.is_some_and(|heap| self.heap.let_go(&heap, range, &self.watch)) {
            SHARED.changed();
        }
    }

    /// As [`show_zeros`](Self::show_zeros), for the pieces of zeros that were merged.
    pub(crate) fn show_zeros_of(&self, pieces: &[Piece], outcomes: &[Outcome]) {
        for (piece, outcome) in pieces.iter().zip(outcomes) {
            if piece.segment == PIECE_ZERO && outcome.merged > 0 {
                self.show_zeros(Range::pages_from(piece.addr, u64::from(outcome.merged)));
            }
        }
    }

    /// Has the kernel show its page of zeros where pages of zeros were: to who tracks memory by a userfaultfd, as postcopy
    /// migration does, what has come is there. Where something came meanwhile it stays.
    fn show_zeros(&self, range: Range) {
        let mut at = range.start;
        while at < range.end {
            let (done, error) = self.watch.zero(Range { start: at, end: range.end }, 0);
            at += done;
            match error {
                None => {}
                Some(Errno(libc::EEXIST)) => at += PAGE,
                // Another mapping by now.
                Some(_) => return,
            }
        }
    }

    /// Step 2: moves the span's pages to the staging area.
    fn take(&mut self, span: Range, states: &mut [State]) {
        let staging = self.room;
        let mut at = span.start;
        let mut tries = 0;
        // One move takes pages of one mapping only.
        let mut len = span.len();
        while at < span.end {
            let part = Range { start: at, end: span.end.min(at + len) };
            let mode = uffd::MOVE_ALLOW_SRC_HOLES | uffd::DONTWAKE;
            let (moved, error) = self.watch.move_pages(staging + (at - span.start), part, mode);
            at += moved;
            let left = match error {
                None => {
                    len = span.len();
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
            if let Some(why) = left {
                states[((at - span.start) / PAGE) as usize] = State::Left(why);
                at += PAGE;
                tries = 0;
            }
        }
        // Swapped-out pages are not there; they go back untouched with the rest.
        prefault::each_present(Range::pages_from(staging, span.pages()), &self.pagemap, |page| {
            if let Some(state @ State::Hole) = states.get_mut(page) {
                *state = State::Staged;
            }
        });
    }

    /// Step 3: how many pages of `piece` equal their slots, from the first on.
    fn compare(&self, span: Range, piece: &Piece, states: &mut [State]) -> Outcome {
        let Some(slots) = self.slots_of(piece) else {
            return Outcome { merged: 0, reason: RefusalReason::NotAnonymous as u32 };
        };
        let first = ((piece.addr - span.start) / PAGE) as usize;
        for page in 0..piece.pages as usize {
            let merged = page as u32;
            let why = match states[first + page] {
                State::Left(why) => why,
                State::Equal => RefusalReason::NotAnonymous,
                // A hole may also be a swapped-out page, so it never counts as zero.
                State::Hole => RefusalReason::Absent,
                State::Staged if self.shows(first + page, slots, page) => RefusalReason::Done,
                State::Staged => RefusalReason::Changed,
            };
            if why != RefusalReason::Done {
                return Outcome { merged, reason: why as u32 };
            }
            states[first + page] = State::Equal;
        }
        Outcome { merged: piece.pages, reason: RefusalReason::Done as u32 }
    }

    /// Whether all of `piece`, which is in memory in `pages` of the span, equals its slots.
    pub(crate) fn is_equal(&self, piece: &Piece, pages: core::ops::Range<usize>) -> bool {
        let Some(slots) = self.slots_of(piece) else { return false };
        pages.enumerate().all(|(page, staged)| self.shows(staged, slots, page))
    }

    /// Where the slots of `piece` can be read, `Some(None)` if it is to be zero; `None` if we do not hold them.
    fn slots_of(&self, piece: &Piece) -> Option<Option<*const Page>> {
        if piece.segment == PIECE_ZERO {
            Some(None)
        } else {
            self.slots(piece.segment, piece.slot, piece.pages).map(Some)
        }
    }

    /// Whether page `staged` of the span, which is in memory, is what slot `page` of `slots` is.
    fn shows(&self, staged: usize, slots: Option<*const Page>, page: usize) -> bool {
        // SAFETY: the page is resident where it waits, so the read cannot wait, and nobody else writes there.
        let bytes = unsafe { &*((self.room + staged as u64 * PAGE) as *const Page) };
        match slots {
            // SAFETY: `slots` points at the slots of a piece, in a mapped segment; they are never written again.
            Some(slots) => bytes == unsafe { &*slots.add(page) },
            None => is_zero(bytes),
        }
    }

    /// Step 4: moves back everything that is staged and not equal.
    fn give_back(&mut self, span: Range, states: &[State]) {
        for run in runs(states, |state| matches!(state, State::Staged | State::Hole)) {
            self.move_back(span, run);
        }
    }

    /// Moves the staged pages `run` (page numbers in the span) back; holes are skipped.
    pub(crate) fn move_back(&mut self, span: Range, run: core::ops::Range<usize>) {
        let offset = run.start as u64 * PAGE;
        let end = self.room + run.end as u64 * PAGE;
        let mut at = self.room + offset;
        let mut len = end - at;
        let mut tries = 0;
        while at < end {
            let part = Range { start: at, end: end.min(at + len) };
            let target = span.start + (at - self.room);
            let mode = uffd::MOVE_ALLOW_SRC_HOLES | uffd::DONTWAKE;
            let (moved, error) = self.hold.move_pages(target, part, mode);
            at += moved;
            match error {
                None => len = end - at,
                // A discard is under way: its event must be read before anything moves. The discarding
                // thread then drops what is in place; what we still hold of its range is dropped here.
                Some(Errno(libc::EAGAIN)) => match self.hold.read_event() {
                    Ok(Some(uffd::Event::Remove(range))) => self.discard_while_frozen(span, range),
                    // Those who wait for the span are woken in the end; others need their answer now.
                    Ok(Some(event @ uffd::Event::PageFault { addr, .. }))
                        if !(span.start..span.end).contains(&addr) =>
                    {
                        self.serve_event(event);
                    }
                    _ => yield_now(),
                },
                // No memory for a page table: the bytes are safe here, and the program waits as it would for any memory.
                Some(Errno(libc::ENOMEM)) => yield_now(),
                Some(Errno(libc::EBUSY)) if tries < MOVE_TRIES => {
                    tries += 1;
                    yield_now();
                }
                // One mapping only, here as well.
                Some(Errno(errno)) if errno != libc::EBUSY && at + PAGE < part.end => len = half(part.end - at),
                Some(_) if !self.copy_back(at, target + moved) => yield_now(),
                Some(_) => at += PAGE,
            }
        }
    }

    /// Copies the staged page at `from` to `to`, which does not take it by a move: the program has locked it or changed its
    /// rights by a bare call, or something holds the staged page. Returns false if that is to be tried again.
    fn copy_back(&self, from: u64, to: u64) -> bool {
        let staged =
            Query { any_of: pagemap::PRESENT | pagemap::SWAPPED, report: pagemap::PRESENT, ..Query::default() };
        let mut found = [pagemap::Region::default()];
        if matches!(pagemap::scan(&self.pagemap, Range::pages_from(from, 1), staged, &mut found), Ok((0, _))) {
            return true;
        }
        // SAFETY: a page of the staging area, which is ours.
        let (_, error) = unsafe { self.hold.copy(to, from, PAGE, uffd::DONTWAKE) };
        // Else it was unmapped or replaced: the page has no home any more.
        !matches!(error, Some(Errno(libc::EAGAIN | libc::ENOMEM)))
    }

    /// The program discards `removed` while `span` is in our hands: what we hold of it is dropped and will not be mapped.
    fn discard_while_frozen(&mut self, span: Range, removed: Range) {
        // What is mapped already is not ours to drop.
        let held = Range { start: self.mapped_to.clamp(span.start, span.end), ..span };
        let start = removed.start.clamp(held.start, held.end);
        let end = removed.end.clamp(held.start, held.end);
        if start < end {
            let staged = self.room + (start - span.start);
            // SAFETY: the staging area is ours; the program has declared these pages void.
            let _ = unsafe { mem::advise(staged, end - start, libc::MADV_DONTNEED) };
            let pages = ((start - span.start) / PAGE) as usize..((end - span.start) / PAGE) as usize;
            self.voids[pages].fill(true);
        }
        for outside in [
            Range { start: removed.start, end: removed.end.min(held.start) },
            Range { start: removed.start.max(held.end), end: removed.end },
        ] {
            if outside.start < outside.end {
                self.serve_event(uffd::Event::Remove(outside));
            }
        }
    }

    /// Step 5: maps the equal pages of `piece` from the pool.
    fn map_piece(&mut self, span: Range, piece: &Piece, outcome: &mut Outcome, states: &mut [State]) {
        if outcome.merged == 0 || piece.segment == PIECE_ZERO {
            return;
        }
        let first = ((piece.addr - span.start) / PAGE) as usize;
        let equal = first..first + outcome.merged as usize;
        if let Some(void) = self.voids[equal.clone()].iter().position(|void| *void) {
            let rest = first + void..equal.end;
            states[rest.clone()].fill(State::Staged);
            self.move_back(span, rest);
            *outcome = Outcome { merged: void as u32, reason: RefusalReason::Discarded as u32 };
            if void == 0 {
                return;
            }
        }
        let merged = Piece { pages: outcome.merged, ..*piece };
        if let Err(why) = self.map_slots(&merged) {
            let run = first..first + outcome.merged as usize;
            states[run.clone()].fill(State::Staged);
            self.move_back(span, run);
            *outcome = Outcome { merged: 0, reason: why as u32 };
        }
    }

    /// Maps the slots of `piece`, all of whose pages are in our hands and equal them. Of one of zeros nothing is to be mapped.
    pub(crate) fn map_slots(&mut self, piece: &Piece) -> Result<(), RefusalReason> {
        let range = Range::pages_from(piece.addr, u64::from(piece.pages));
        if piece.segment == PIECE_ZERO {
            self.mapped_to = range.end;
            return Ok(());
        }
        let Some(fd) = self.segment_fd(piece.segment) else { return Err(RefusalReason::NotAnonymous) };
        let flags = libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE;
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the range was plain anonymous memory a moment ago (UFFDIO_MOVE proved it), its pages are in our
        // hands, the guard keeps the mapping in place (what a shrinking heap leaves is unmapped again), and the bytes that
        // appear equal those that were there.
        let mapped = unsafe { mem::map(range.start, range.len(), rights, flags, fd, u64::from(piece.slot) * PAGE) };
        match mapped {
            Ok(_) => {
                self.mapped_to = range.end;
                discarded_ranges::remove(range);
                Ok(())
            }
            Err(Errno(libc::EPERM)) => {
                self.note_sealed(range);
                Err(RefusalReason::NotAnonymous)
            }
            Err(_) => Err(RefusalReason::Limit),
        }
    }

    /// Step 6: what was not merged is watched for writes again; holes of zero pages become ordinary.
    fn watch_again(&mut self, span: Range, pieces: &[Piece], outcomes: &[Outcome], states: &mut [State]) {
        // From here on `Equal` means: mapped from the pool.
        for (piece, outcome) in pieces.iter().zip(outcomes) {
            if piece.segment == PIECE_ZERO {
                let first = ((piece.addr - span.start) / PAGE) as usize;
                states[first..first + outcome.merged as usize].fill(State::Hole);
            }
        }
        self.populate(pieces, outcomes);
        for run in runs(states, |state| *state == State::Equal) {
            let range = Range { start: span.start + run.start as u64 * PAGE, end: span.start + run.end as u64 * PAGE };
            self.keep_shown(range);
        }
        for run in runs(states, |state| *state != State::Equal) {
            let range = Range { start: span.start + run.start as u64 * PAGE, end: span.start + run.end as u64 * PAGE };
            if states[run.clone()].contains(&State::Left(RefusalReason::NotAnonymous)) {
                self.watch_parts(range);
            } else {
                self.watch_part(range);
            }
            for staged in runs(&states[run.clone()], |state| *state == State::Staged) {
                let start = range.start + staged.start as u64 * PAGE;
                let _ = self.watch.write_protect(Range::pages_from(start, staged.len() as u64));
            }
        }
    }

    /// Watches what shows the pool in `range`, and gives it the attributes that the program's memory there had.
    pub(crate) fn keep_shown(&self, range: Range) {
        // One call serves all neighbours, however many mappings they are.
        self.hold_pool(range);
        self.keep_attributes(range, false);
        self.remember_merged(range);
    }

    /// Reads in what was mapped, so that no access of the program's has to wait for us: long pieces by windows, and
    /// neighbouring short ones, each a mapping of its own, by one call.
    pub(crate) fn populate(&self, pieces: &[Piece], outcomes: &[Outcome]) {
        let mut short = Range { start: 0, end: 0 };
        for (piece, outcome) in pieces.iter().zip(outcomes) {
            if piece.segment == PIECE_ZERO || outcome.merged == 0 {
                continue;
            }
            let mapped = Range::pages_from(piece.addr, u64::from(outcome.merged));
            if prefault::is_long(mapped) {
                prefault::populate(mapped, &self.pagemap);
            } else if short.end == mapped.start {
                short.end = mapped.end;
            } else {
                if !short.is_empty() {
                    prefault::read_in(short);
                }
                short = mapped;
            }
        }
        if !short.is_empty() {
            prefault::read_in(short);
        }
    }

    /// As [`watch_part`](Self::watch_part), where what shows the pool already stays held: its discards are answered.
    pub(crate) fn watch_parts(&self, range: Range) {
        let mut at = range.start;
        let _ = self.maps.pools(range, |part, _| {
            self.watch_part(Range { start: at, end: part.start });
            self.hold_pool(part);
            at = part.end;
            false
        });
        self.watch_part(Range { start: at, end: range.end });
    }

    /// What was frozen is plain memory that is watched.
    pub(crate) fn watch_part(&self, range: Range) {
        if !range.is_empty() {
            let _ = self.hold.unregister(range);
            rewatch(&self.watch, range);
        }
    }

    pub(crate) fn note_freeze(&self, ns: u64) {
        let counters = self.counters();
        counters.freezes.fetch_add(1, Ordering::Relaxed);
        counters.freeze_ns_max.fetch_max(ns, Ordering::Relaxed);
        counters.freeze_us[wait_histogram::bucket(ns / 1000)].fetch_add(1, Ordering::Relaxed);
    }
}

/// Watches `range` for writes; where it holds more than plain memory, nothing happens.
pub(crate) fn rewatch(watch: &Uffd, range: Range) {
    let _ = watch_plain(watch, range);
}

/// Half of `len` bytes, in whole pages.
const fn half(len: u64) -> u64 {
    (len / PAGE).div_ceil(2) * PAGE
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

    #[test]
    fn runs_are_maximal() {
        let states = [State::Equal, State::Staged, State::Staged, State::Hole, State::Staged];
        let found: Vec<_> = runs(&states, |state| *state == State::Staged).collect();
        assert_eq!(found, [1..3, 4..5]);
        assert_eq!(runs(&[], |_| true).count(), 0);
    }
}
