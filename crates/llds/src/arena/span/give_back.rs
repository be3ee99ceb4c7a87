//! Giving back: the pages of free spans go back to the system, by groups that fill 2 MiB.
//!
//! A few free spans keep their pages for the next claims. In a small arena,
//! where 2 MiB are much, pages go back by single spans, and the first huge pages
//! are made when a further one is needed. The pages of freed extents in a file stay for a moment, because readers of arrays
//! may be late: they go back with the next memory that the process frees, or when it closes.
//!
//! In a small private arena a huge page is a large part of the memory. There,
//! parts of a huge page go back too when a thread ends that claimed at least
//! 2 MiB: free spans, and the space before and after the blocks of unowned
//! extents. The rest of such a huge page lies on small pages until all of it is
//! free.

use super::{FREE, HOLE, LOG, Meta, SMALL, UNUSED, Unit, tail_mask};
use crate::arena::class::SPAN_BYTES;
use crate::arena::{Inner, fault};
use std::cell::Cell;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Spans that lie in one 2 MiB page and are given back together.
const GROUP: usize = (2 << 20) / SPAN_BYTES;

/// Free spans kept with their pages before any are given back: an eighth of those in use, but at least one and at most
/// these.
const KEEP_SPANS: usize = 4;

/// Used spans below which pages go back by single spans: eight huge pages.
const SINGLE_SPANS_MAX: usize = 8 * GROUP;

/// Spans at the front of an arena that lie on small pages until one after them is used: two huge pages.
pub(in crate::arena) const SMALL_PAGE_SPANS: usize = 2 * GROUP;

/// Used spans up to which an arena gives partly used huge pages back in part: 32 huge pages.
const RESTS_SPANS_MAX: usize = 32 * GROUP;

thread_local! {
    /// Spans that this thread has claimed.
    static TAKEN: Cell<usize> = const { Cell::new(0) };
}

/// Counts a span that the calling thread claims.
pub(super) fn count_taken() {
    TAKEN.set(TAKEN.get() + 1);
}

/// How long the pages of a freed extent stay in a file. Readers of an array take no hazard, so a reader may be late. A day
/// in tests, so that no test depends on timing.
const DEFERRAL: Duration = if cfg!(test) { Duration::from_secs(86_400) } else { Duration::from_millis(100) };

impl Inner {
    /// Frees a span or tile that `owner` owns, and may give pages back when enough free spans are kept.
    pub(super) fn make_free(&self, unit: Unit, owner: u64, give_back: bool) {
        if unit.tile().is_some() {
            return self.free_tile(unit, owner);
        }
        let span = unit.span();
        let used = &self.header().used;
        let _ = used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| Some(n.saturating_sub(1)));
        let entry = self.entry(span);
        entry.meta.store(Meta::free(FREE, owner), Ordering::SeqCst);
        fault::point();
        self.header().kept.fetch_add(1, Ordering::Relaxed);
        if give_back && self.keeps_enough() {
            self.give_back_group(span, owner);
        }
        let state = Meta::of(entry.meta.load(Ordering::SeqCst)).state;
        entry.meta.store(Meta::free(state, 0), Ordering::SeqCst);
        self.hint(0, span);
    }

    /// Gives the pages of a span back that held slabs, in an arena where one such span is much of what is in use. A large
    /// block that is replaced again and again finds the pages of the one before, because they are kept.
    pub(super) fn give_back_small(&self, span: usize, owner: u64) {
        if self.used() < SINGLE_SPANS_MAX {
            self.trim_group(span / GROUP * GROUP, owner);
        }
    }

    /// Subtracts free spans that are not kept any more.
    pub(super) fn keep_less(&self, count: u64) {
        let kept = &self.header().kept;
        let _ = kept.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| Some(n.saturating_sub(count)));
    }

    /// Returns true if more free spans have pages than are kept for the next claims.
    fn keeps_enough(&self) -> bool {
        let most = (self.used() / 8).clamp(1, KEEP_SPANS) + self.fresh() / 64;
        self.header().kept.load(Ordering::Relaxed) > most as u64
    }

    /// Gives back the pages of extents that this process freed long enough before `now`; without `now`, of all of them.
    pub(in crate::arena) fn give_back_deferred(&self, now: Option<Instant>, owner: u64) {
        let (due, left): (Vec<_>, bool) = {
            let mut deferred = self.deferred.lock().unwrap_or_else(PoisonError::into_inner);
            let is_due = |since: Instant| now.is_none_or(|now| now.duration_since(since) >= DEFERRAL);
            let count = deferred.iter().take_while(|extent| is_due(extent.0)).count();
            (deferred.drain(..count).collect(), !deferred.is_empty())
        };
        for (_, span, spans) in due {
            for first in (span / GROUP * GROUP..span + spans).step_by(GROUP) {
                if self.keeps_enough() {
                    self.trim_group(first, owner);
                }
            }
        }
        if !left && self.used() < SINGLE_SPANS_MAX && self.keeps_enough() {
            // Spans that were freed beside used ones: one group in turn.
            let next = self.next_trim.fetch_add(GROUP, Ordering::Relaxed) % self.fresh().max(1);
            self.trim_group(next / GROUP * GROUP, owner);
        }
    }

    /// Gives the 2 MiB around `span`, which is free and owned by `owner`, back to the system if its neighbours are free too;
    /// in a small arena `span` alone if they are not. Returns true if all went back.
    fn give_back_group(&self, span: usize, owner: u64) -> bool {
        let first = span / GROUP * GROUP;
        let last = (first + GROUP).min(self.layout.spans);
        let mut held = Vec::with_capacity(GROUP);
        let mut whole = true;
        for near in first..last {
            if near == span {
                continue;
            }
            let meta = Meta::of(self.entry(near).meta.load(Ordering::SeqCst));
            if meta.claimable() && self.swap_meta(near, meta.word(), Meta { owner, ..meta }.word()) {
                held.push((near, meta));
                fault::point();
            } else {
                whole = false;
                break;
            }
        }
        if whole {
            self.map.give_back(self.span_offset(first) as usize, (last - first) * SPAN_BYTES);
            let was_free = Meta::of(self.entry(span).meta.load(Ordering::SeqCst)).state == FREE;
            let freed = u64::from(was_free) + held.iter().filter(|(_, meta)| meta.state == FREE).count() as u64;
            self.keep_less(freed);
            self.entry(span).meta.store(Meta::free(HOLE, owner), Ordering::SeqCst);
        } else if self.used() < SINGLE_SPANS_MAX {
            self.give_back_one(span);
            self.entry(span).meta.store(Meta::free(HOLE, owner), Ordering::SeqCst);
        }
        for (near, meta) in held {
            let state = if whole && meta.state != UNUSED { HOLE } else { meta.state };
            self.entry(near).meta.store(Meta::free(state, 0), Ordering::SeqCst);
            if state != UNUSED {
                self.hint(0, near);
            }
        }
        whole
    }

    /// Gives the pages of a free span back that this thread owns.
    fn give_back_one(&self, span: usize) {
        let offset = self.span_offset(span) as usize;
        match self.map.is_transparent() {
            true => self.map.give_back_rest(offset, SPAN_BYTES),
            false => self.map.give_back(offset, SPAN_BYTES),
        }
        if self.meta(span).state == FREE {
            self.keep_less(1);
        }
    }

    /// Gives all pages of free spans back to the system.
    pub(in crate::arena) fn trim(&self, owner: u64) {
        for first in (0..self.fresh()).step_by(GROUP) {
            self.trim_group(first, owner);
        }
        self.give_back_rests(owner);
    }

    /// Called when a thread ends: gives parts of huge pages back, if the thread claimed at least a huge page.
    pub(in crate::arena) fn give_back_rests_at_end(&self, owner: u64) {
        if TAKEN.get() >= GROUP {
            self.give_back_rests(owner);
        }
    }

    /// Gives back the unused parts of huge pages of a small arena.
    fn give_back_rests(&self, owner: u64) {
        if !self.map.is_transparent() || self.fresh() > RESTS_SPANS_MAX {
            return;
        }
        for first in (0..self.fresh()).step_by(GROUP) {
            let group = first..(first + GROUP).min(self.layout.spans);
            // A group that is entirely free was given back when it became free, or is kept.
            if group.clone().all(|span| Meta::of(self.entry(span).meta.load(Ordering::SeqCst)).claimable()) {
                continue;
            }
            for span in group {
                self.give_back_rest(span, owner);
            }
        }
    }

    /// Gives back the pages of a free span, or those before and after the remaining blocks of an unowned extent.
    fn give_back_rest(&self, span: usize, owner: u64) {
        let meta = Meta::of(self.entry(span).meta.load(Ordering::SeqCst));
        let is_idle_log = meta.state == SMALL && meta.class >= LOG && meta.owner == 0;
        if is_idle_log {
            self.forget(owner, Unit::from(span), meta.class);
        }
        if !(meta.claimable() && meta.state != HOLE || is_idle_log)
            || !self.swap_meta(span, meta.word(), Meta { owner, ..meta }.word())
        {
            return;
        }
        let offset = self.span_offset(span) as usize;
        if is_idle_log {
            let cut = &meta.cut();
            let begin = offset + cut.first as usize;
            let filled = cut.count - self.lines_left(span, cut);
            // The lengths of the blocks are not stored; but no block lies before the first one.
            let first = (0..cut.words).find_map(|index| {
                let bits = self.bitmap(span, cut, index).load(Ordering::SeqCst) & !tail_mask(cut, index);
                (bits != 0).then(|| index * 64 + bits.trailing_zeros())
            });
            for lines in [0..first.unwrap_or(0), filled..cut.count] {
                let start = (begin + lines.start as usize * 64).next_multiple_of(4096);
                let end = (begin + lines.end as usize * 64) & !4095;
                self.map.give_back_rest(start, end.saturating_sub(start));
            }
            self.disown_unit(Unit::from(span), owner);
            return;
        }
        self.map.give_back_rest(offset, SPAN_BYTES);
        if meta.state == FREE {
            self.keep_less(1);
        }
        let state = if meta.state == UNUSED { UNUSED } else { HOLE };
        self.entry(span).meta.store(Meta::free(state, 0), Ordering::SeqCst);
        if state == HOLE {
            self.hint(0, span);
        }
    }

    /// Gives the 2 MiB from `first` on back to the system if all of it is free; in a small arena its free spans.
    fn trim_group(&self, first: usize, owner: u64) {
        for span in first..(first + GROUP).min(self.layout.spans) {
            // Holes too: a late reader may have faulted pages in again.
            let meta = self.meta(span);
            if !meta.claimable() || meta.state == UNUSED {
                continue;
            }
            if self.swap_meta(span, meta.word(), Meta { owner, ..meta }.word()) {
                let whole = self.give_back_group(span, owner);
                self.entry(span).meta.store(Meta::free(self.meta(span).state, 0), Ordering::SeqCst);
                self.hint(0, span);
                if whole || self.used() >= SINGLE_SPANS_MAX {
                    return;
                }
            }
        }
    }
}
