//! A freeze: a range of pages that the agent has taken away from the program, until each is mapped from the pool or back.
//!
//! [`Agent::freeze`] takes the mapping lock, leaves the end of the heap and what the program excludes alone, and registers
//! the range for missing pages, so that a thread that touches an absent page waits. [`remap`](super::remap) and
//! [`remap_huge`](super::remap_huge) then move the pages away, compare them, and map or return them. [`Freeze::end`] wakes
//! the waiting threads and releases the lock.

use super::session::{Agent, PAGE};
use crate::address_space::anonymous::{map_over, watch_anonymous};
use crate::address_space::discarded_ranges;
use crate::address_space::heap::WatchedEnd;
use crate::address_space::prefault;
use crate::limits::{HUGE_PAGES, MOVE_TRIES};
use crate::mapping_lock::MappingLockGuard;
use crate::owned_ranges;
use crate::range_attributes::Attributes;
use crate::runtime::thread::yield_now;
use crate::state::SHARED;
use core::ffi::c_int;
use core::sync::atomic::Ordering;
use pagefold_os::page::is_zero;
use pagefold_os::pagemap::{self, Query};
use pagefold_os::raw::Errno;
use pagefold_os::uffd;
use pagefold_os::{Page, Range, sched};
use pagefold_protocol::message::{Outcome, PIECE_ZERO, RefusalReason, RemapPiece};
use pagefold_protocol::wait_histogram;

/// A range of frozen pages; the mapping lock is held. It must be ended by [`end`](Self::end).
pub(super) struct Freeze<'a> {
    pub(super) agent: &'a Agent,
    pub(super) range: Range,
    /// Where the frozen pages wait.
    pub(super) freeze_area: u64,
    /// What the program may do with them, and the agent where they wait.
    rights: c_int,
    /// End of what is mapped from the pool so far; 0 if nothing is.
    pub(super) mapped_end: u64,
    /// Pages of the range that the program has discarded since.
    pub(super) discarded: [bool; HUGE_PAGES],
    /// The watched end of the heap, if the range is below it.
    heap: Option<WatchedEnd>,
    began_ns: u64,
    /// The duration is counted already.
    is_noted: bool,
    held: MappingLockGuard<'static>,
}

impl Agent {
    /// Begins to freeze `range`, memory with `rights`; its pages will wait from `freeze_area` on. `None` if it must be
    /// left alone, or cannot be registered.
    pub(super) fn freeze(&self, range: Range, rights: c_int, freeze_area: u64) -> Option<Freeze<'_>> {
        let held = self.lock_mappings();
        if self.is_excluded(range) {
            return None;
        }
        let heap = self.heap.watch_end(range, &self.watch).ok()?;
        let began_ns = sched::monotonic_ns();
        // The range leaves the watch for writes; pages that stay are protected again in the end.
        let _ = self.watch.unregister(range);
        if self.hold.register(range, uffd::MODE_MISSING).is_err() {
            // Part of it may be registered.
            self.watch_parts(range);
            self.unwatch_heap(heap, range);
            let _ = self.hold.wake(range);
            return None;
        }
        Some(Freeze {
            agent: self,
            range,
            freeze_area,
            rights,
            mapped_end: 0,
            discarded: [false; HUGE_PAGES],
            heap,
            began_ns,
            is_noted: false,
            held,
        })
    }

    /// Ends what [`watch_end`](crate::address_space::heap::HeapEnd::watch_end) began.
    pub(super) fn unwatch_heap(&self, heap: Option<WatchedEnd>, range: Range) {
        if heap.is_some_and(|heap| self.heap.unwatch_end(&heap, range, &self.watch)) {
            SHARED.changed();
        }
    }

    /// Maps the kernel's zero page over the pieces of zeros that were merged, where nothing has come since. A program that
    /// tracks memory by a userfaultfd, as postcopy migration does, finds received pages present.
    fn map_zero_page(&self, pieces: &[RemapPiece], outcomes: &[Outcome]) {
        for (piece, outcome) in pieces.iter().zip(outcomes).filter(|(piece, _)| piece.segment == PIECE_ZERO) {
            let Range { start: mut at, end } = Range::pages_from(piece.addr, u64::from(outcome.merged));
            while at < end {
                let (done, error) = self.watch.zero(Range { start: at, end }, 0);
                at += done;
                match error {
                    None => {}
                    Some(Errno(libc::EEXIST)) => at += PAGE,
                    // Another mapping by now.
                    Some(_) => break,
                }
            }
        }
    }

    /// Counts a freeze of `ns` nanoseconds.
    pub(super) fn note_freeze(&self, ns: u64) {
        let counters = self.counters();
        counters.freezes.fetch_add(1, Ordering::Relaxed);
        counters.freeze_ns_max.fetch_max(ns, Ordering::Relaxed);
        counters.freeze_us[wait_histogram::bucket(ns / 1000)].fetch_add(1, Ordering::Relaxed);
    }

    /// Watches pool mappings in `range`, and gives them the attributes of the program's memory that was there.
    pub(super) fn adopt_pool(&self, range: Range) {
        // One call serves all neighbours, however many mappings they are.
        self.hold_pool(range);
        self.keep_attributes(range, false);
        self.remember_merged(range);
    }

    /// Maps the pages of the merged pieces into the page table, so that no access of the program has to wait for the agent:
    /// long pieces by windows, and neighbouring short ones, each a mapping of its own, by one call.
    pub(super) fn prefault(&self, pieces: &[RemapPiece], outcomes: &[Outcome]) {
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

    /// Watches for writes what is anonymous in `range`; pool mappings there stay held, and their discards answered.
    pub(super) fn watch_parts(&self, range: Range) {
        let mut at = range.start;
        let _ = self.maps.pools(range, |part, _| {
            self.watch_part(Range { start: at, end: part.start });
            self.hold_pool(part);
            at = part.end;
            false
        });
        self.watch_part(Range { start: at, end: range.end });
    }

    /// Watches `range`, which was frozen and is anonymous, for writes.
    pub(super) fn watch_part(&self, range: Range) {
        if !range.is_empty() {
            let _ = self.hold.unregister(range);
            // Where the range holds something else too, nothing happens.
            let _ = watch_anonymous(&self.watch, range);
        }
    }

    /// The first page of `range` that is in memory or in swap; what cannot be seen counts as such.
    fn first_kept(&self, range: Range) -> Option<u64> {
        let kept = Query { any_of: pagemap::PRESENT | pagemap::SWAPPED, report: pagemap::PRESENT, ..Query::default() };
        let mut found = [pagemap::ScannedRange::default()];
        match pagemap::scan(&self.pagemap, range, kept, &mut found) {
            Ok((0, _)) => None,
            Ok(_) => Some(found[0].start),
            Err(_) => Some(range.start),
        }
    }

    /// Where the slots of `piece` can be read, `Some(None)` for a piece of zeros; `None` if the segment is not mapped here.
    fn slots_of(&self, piece: &RemapPiece) -> Option<Option<*const Page>> {
        if piece.segment == PIECE_ZERO {
            Some(None)
        } else {
            self.slots(piece.segment, piece.slot, piece.pages).map(Some)
        }
    }
}

impl Freeze<'_> {
    /// Wakes the threads that wait for the range: they find the slots. No thread has to wait for the work that is left.
    pub(super) fn wake(&mut self) {
        let _ = self.agent.hold.wake(self.range);
        self.note();
    }

    fn note(&mut self) {
        if !core::mem::replace(&mut self.is_noted, true) {
            self.agent.note_freeze(sched::monotonic_ns() - self.began_ns);
        }
    }

    /// Ends the freeze, after which no page of it may be in the freeze area unless it is mapped from the pool, zero or
    /// discarded. Frees the first `frozen` bytes there.
    pub(super) fn end(mut self, pieces: &[RemapPiece], outcomes: &[Outcome], frozen: u64) {
        self.agent.unwatch_heap(self.heap.take(), self.range);
        self.wake();
        self.agent.map_zero_page(pieces, outcomes);
        if frozen > 0 {
            self.empty_freeze_area(Range { start: self.freeze_area, end: self.freeze_area + frozen });
        }
    }

    fn empty_freeze_area(&self, range: Range) {
        owned_ranges::empty_freeze_area(range, self.rights, &self.agent.watch);
    }

    /// The addresses of the pages `run` of the range.
    pub(super) fn range_of(&self, run: core::ops::Range<usize>) -> Range {
        Range::pages_from(self.range.start + run.start as u64 * PAGE, run.len() as u64)
    }

    /// Moves `part` of the range to the freeze area, which is empty there; returns the bytes moved and what ended the move
    /// early.
    pub(super) fn move_away(&self, part: Range) -> (u64, Option<Errno>) {
        let mode = uffd::MOVE_ALLOW_SRC_HOLES | uffd::DONTWAKE;
        let (moved, error) =
            self.agent.watch.move_pages(self.freeze_area + (part.start - self.range.start), part, mode);
        #[cfg(test)]
        let (moved, error) =
            if FORGETS_MOVES.load(Ordering::Relaxed) { (0, Some(Errno(libc::EEXIST))) } else { (moved, error) };
        if error != Some(Errno(libc::EEXIST)) {
            return (moved, error);
        }
        // Linux 6.18 and later forget a move that follows an attempt within the same call: they find its target taken then.
        // The target was empty, and no thread can fill the source now. So what the source lacks is in the freeze area.
        let rest = Range { start: part.start + moved, ..part };
        let gone = self.agent.first_kept(rest).unwrap_or(rest.end) - rest.start;
        (moved + gone, error.filter(|_| gone == 0))
    }

    /// The number in the range of the page at `addr`.
    pub(super) const fn page_of(&self, addr: u64) -> usize {
        ((addr - self.range.start) / PAGE) as usize
    }

    /// How many frozen pages of `piece`, from the first one on, equal their slots. `frozen` tells why one is not.
    ///
    /// # Errors
    /// With the number of equal pages, why the next one was refused.
    pub(super) fn compare(
        &self,
        piece: &RemapPiece,
        frozen: impl Fn(usize) -> Result<(), RefusalReason>,
    ) -> Result<(), (u32, RefusalReason)> {
        let slots = self.agent.slots_of(piece).ok_or((0, RefusalReason::NotAnonymous))?;
        let first = self.page_of(piece.addr);
        for page in 0..piece.pages as usize {
            let refuse = |reason| (page as u32, reason);
            frozen(first + page).map_err(refuse)?;
            // SAFETY: the page is resident in the freeze area, so the read cannot wait, and no other thread writes there.
            let bytes = unsafe { &*((self.freeze_area + (first + page) as u64 * PAGE) as *const Page) };
            let is_equal = match slots {
                // SAFETY: `slots` points at the slots of the piece, in a mapped segment; they are never written again.
                Some(slots) => bytes == unsafe { &*slots.add(page) },
                None => is_zero(bytes),
            };
            if !is_equal {
                return Err(refuse(RefusalReason::Changed));
            }
        }
        Ok(())
    }

    /// See [`RangeAttributes::alike_for_copies`](crate::range_attributes::RangeAttributes::alike_for_copies).
    pub(super) fn alike_for_copies(&self, range: Range) -> (u64, Attributes) {
        SHARED.tables(&self.held).table.alike_for_copies(range)
    }

    /// Maps the slots of `piece`: all of its pages must be frozen and equal, and [alike for copies](Self::alike_for_copies).
    /// For a piece of zeros nothing is mapped.
    ///
    /// # Errors
    /// Why the kernel refused the mapping.
    pub(super) fn map_slots(&mut self, piece: &RemapPiece) -> Result<(), RefusalReason> {
        let range = Range::pages_from(piece.addr, u64::from(piece.pages));
        if piece.segment == PIECE_ZERO {
            self.mapped_end = range.end;
            return Ok(());
        }
        let Some(fd) = self.agent.segment_fd(piece.segment) else { return Err(RefusalReason::NotAnonymous) };
        let source = Some((fd, u64::from(piece.slot) * PAGE));
        let (_, note) = self.alike_for_copies(range);
        // SAFETY: the range was anonymous memory with these rights a moment ago (UFFDIO_MOVE proved it) and its pages are
        // frozen. The mapping lock keeps the mapping in place; what lies beyond a heap that shrinks is unmapped again. The
        // bytes that appear equal those that were there.
        let mapped = unsafe { map_over(range, self.rights, source, &note) };
        match mapped {
            Ok(()) => {
                self.mapped_end = range.end;
                discarded_ranges::remove(range);
                Ok(())
            }
            Err(Errno(libc::EPERM)) => {
                self.agent.note_sealed(range);
                Err(RefusalReason::NotAnonymous)
            }
            // No file may be mapped with these rights (SELinux, `PR_SET_MDWE`): other memory is not concerned.
            Err(Errno(libc::EACCES)) => Err(RefusalReason::NotAnonymous),
            Err(_) => Err(RefusalReason::Limit),
        }
    }

    /// Moves the frozen pages `run` (page numbers in the range) back; holes are skipped.
    pub(super) fn move_back(&mut self, run: core::ops::Range<usize>) {
        let (mut at, end) = (self.freeze_area + run.start as u64 * PAGE, self.freeze_area + run.end as u64 * PAGE);
        let mut len = end - at;
        let mut tries = 0;
        while at < end {
            let part = Range { start: at, end: end.min(at + len) };
            let target = self.range.start + (at - self.freeze_area);
            let mode = uffd::MOVE_ALLOW_SRC_HOLES | uffd::DONTWAKE;
            let (moved, error) = self.agent.hold.move_pages(target, part, mode);
            at += moved;
            match error {
                None => len = end - at,
                // A discard is under way: its event must be read before anything moves. The discarding thread then drops
                // what is in place; the frozen pages of its range are dropped here.
                Some(Errno(libc::EAGAIN)) => match self.agent.hold.read_event() {
                    Ok(Some(uffd::Event::Remove(range))) => self.discard(range),
                    // Threads that wait for the range are woken in the end; others need their answer now.
                    Ok(Some(event @ uffd::Event::PageFault { addr, .. }))
                        if !(self.range.start..self.range.end).contains(&addr) =>
                    {
                        self.agent.serve_event(event);
                    }
                    _ => yield_now(),
                },
                // No memory for a page table: the bytes are safe here, and the program waits as it would for any memory.
                Some(Errno(libc::ENOMEM)) => yield_now(),
                Some(Errno(libc::EBUSY)) if tries < MOVE_TRIES => {
                    tries += 1;
                    yield_now();
                }
                // One move stays within one mapping.
                Some(Errno(errno)) if errno != libc::EBUSY && at + PAGE < part.end => len = half(part.end - at),
                Some(_) if !self.copy_back(at, target + moved) => yield_now(),
                Some(_) => at += PAGE,
            }
        }
    }

    /// Copies the frozen page at `from` to `to`, where a move is refused: the program has locked the target or changed its
    /// rights by a raw call, or something pins the frozen page. Returns false if the caller must try again.
    fn copy_back(&self, from: u64, to: u64) -> bool {
        if self.agent.first_kept(Range::pages_from(from, 1)).is_none() {
            return true;
        }
        // SAFETY: a page of the freeze area, which is the agent's.
        let (_, error) = unsafe { self.agent.hold.copy(to, from, PAGE, uffd::DONTWAKE) };
        // Any other error: the target was unmapped or replaced, so that the page has no address any more.
        !matches!(error, Some(Errno(libc::EAGAIN | libc::ENOMEM)))
    }

    /// The program discards `removed`: frozen pages of it are dropped and will not be mapped.
    fn discard(&mut self, removed: Range) {
        // What is mapped from the pool is answered like any discard of merged memory.
        let frozen = Range { start: self.mapped_end.clamp(self.range.start, self.range.end), ..self.range };
        let start = removed.start.clamp(frozen.start, frozen.end);
        let end = removed.end.clamp(frozen.start, frozen.end);
        if start < end {
            let frozen = self.freeze_area + (start - self.range.start);
            self.empty_freeze_area(Range { start: frozen, end: frozen + (end - start) });
            let pages = self.page_of(start)..self.page_of(end);
            self.discarded[pages].fill(true);
        }
        for outside in [
            Range { start: removed.start, end: removed.end.min(frozen.start) },
            Range { start: removed.start.max(frozen.end), end: removed.end },
        ] {
            if outside.start < outside.end {
                self.agent.serve_event(uffd::Event::Remove(outside));
            }
        }
    }
}

#[cfg(test)]
static FORGETS_MOVES: core::sync::atomic::AtomicBool = core::sync::atomic::AtomicBool::new(false);

/// For tests: moves to the freeze area are done, and reported as the kernel reports those that it forgets.
#[cfg(test)]
pub(super) struct ForgetMoves;

#[cfg(test)]
impl ForgetMoves {
    pub(super) fn begin() -> ForgetMoves {
        FORGETS_MOVES.store(true, Ordering::Relaxed);
        ForgetMoves
    }
}

#[cfg(test)]
impl Drop for ForgetMoves {
    fn drop(&mut self) {
        FORGETS_MOVES.store(false, Ordering::Relaxed);
    }
}

/// Half of `len` bytes, in whole pages.
pub(super) const fn half(len: u64) -> u64 {
    (len / PAGE).div_ceil(2) * PAGE
}
