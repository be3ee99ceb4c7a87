//! Logs: extents of some spans that a thread fills from front to back with arrays of any size.
//!
//! An extent notes itself how far it is filled, so that whoever leases it next
//! goes on there. What was freed inside is not given out again until the whole
//! extent is empty.

use super::{Meta, REST, SMALL, tail_mask};
use crate::arena::class::{LOG, log_cut};
use crate::arena::seat::{INTENT_ALLOC, Seat};
use crate::arena::{Error, Inner, fault};
use std::sync::atomic::Ordering;

impl Inner {
    /// Whether extents of so many spans go from thread to thread with each block: if every thread kept those of both logs
    /// that it filled last, they could be more than a quarter of the arena.
    pub(super) fn are_logs_shared(&self, spans: usize) -> bool {
        self.seats_high() as usize * 2 * spans > self.layout.spans / 4
    }

    /// Takes the next `units` lines of the log extent at `span`, which this thread leases, if so many are left.
    ///
    /// Where to go on is noted in the extent itself, so that whoever leases it next fills the rest, also after a death.
    /// One between bit and note leaves a block at the note, which was never linked and which the intent names: it is
    /// freed before the lease ends. Is that lost too, by the death of who cleans up, the next block begins there as if
    /// it had not been. So a bit at the note is nobody's, and what lies before it is not given out again until the
    /// extent is empty.
    pub(super) fn take_lines(&self, seat: &Seat, span: usize, units: u32) -> Option<u64> {
        let cut = &Meta::of(self.entry(span).meta.load(Ordering::Relaxed)).cut();
        if units > self.lines_left(span, cut) {
            return None;
        }
        let next = &self.entry(span).bits;
        let at = next.load(Ordering::Relaxed) as u32;
        let block = self.span_offset(span) + u64::from(cut.first) + u64::from(at) * 64;
        seat.intents[INTENT_ALLOC].store(block, Ordering::Release);
        fault::point();
        self.bitmap(span, cut, at / 64).fetch_or(1 << (at % 64), Ordering::SeqCst);
        fault::point();
        next.store(u64::from(at + units), Ordering::Relaxed);
        fault::point();
        Some(block)
    }

    /// Claims free spans for a log extent, and leases it.
    pub(super) fn cut_log(&self, owner: u64, class: usize, spans: usize) -> Result<usize, Error> {
        let span = self.claim_extent(spans, spans, owner)?;
        let cut = &log_cut(spans);
        for index in 0..cut.words {
            self.bitmap(span, cut, index).store(tail_mask(cut, index), Ordering::Relaxed);
        }
        self.entry(span).bits.store(0, Ordering::Relaxed);
        fault::point();
        // Head first: from here the rest belongs to it, whoever looks.
        let head = Meta { state: SMALL, class, owner, spans: spans as u64 };
        self.entry(span).meta.store(head.word(), Ordering::SeqCst);
        for rest in 1..spans {
            fault::point();
            self.entry(span + rest).meta.store(Meta::free(REST, 0), Ordering::SeqCst);
        }
        Ok(span)
    }

    /// Leases an extent of the log `class`, of so many spans, that nobody leases and that has `units` lines left.
    pub(super) fn take_log(&self, owner: u64, class: usize, spans: usize, units: u32) -> Option<usize> {
        for index in 0..self.fresh().div_ceil(64) {
            let hints = self.hints(class, index);
            let mut bits = hints.load(Ordering::Relaxed);
            while bits != 0 {
                let mask = bits & bits.wrapping_neg();
                let span = index * 64 + bits.trailing_zeros() as usize;
                bits &= bits - 1;
                // A hint stays until the extent is leased: for others it may be the right one.
                if self.lease_log(span, owner, units, |meta| meta.class == class && meta.spans == spans as u64) {
                    hints.fetch_and(!mask, Ordering::SeqCst);
                    return Some(span);
                }
                let is_log = || {
                    let meta = Meta::of(self.entry(span).meta.load(Ordering::SeqCst));
                    meta.state == SMALL && meta.class == class
                };
                if !is_log() {
                    hints.fetch_and(!mask, Ordering::SeqCst);
                    // Whoever made it one meanwhile may have seen the hint that we struck out.
                    if is_log() {
                        hints.fetch_or(mask, Ordering::SeqCst);
                    }
                }
            }
        }
        None
    }

    /// Leases an extent of either log, of any length, that nobody leases and that has `units` lines left.
    #[cold]
    pub(super) fn take_any_log(&self, owner: u64, units: u32) -> Option<usize> {
        (0..self.fresh()).find(|&span| self.lease_log(span, owner, units, |_| true))
    }

    /// Leases the log extent at `span`, if one begins there that nobody leases, that is of the right kind and has `units`
    /// lines left.
    fn lease_log(&self, span: usize, owner: u64, units: u32, is_right: impl Fn(Meta) -> bool) -> bool {
        let meta = Meta::of(self.entry(span).meta.load(Ordering::SeqCst));
        let idle = meta.state == SMALL && meta.class >= LOG && meta.owner == 0;
        if !idle || !is_right(meta) || self.lines_left(span, &meta.cut()) < units {
            return false;
        }
        if !self.swap_meta(span, meta.word(), Meta { owner, ..meta }.word()) {
            return false;
        }
        fault::point();
        // Another may have leased it, filled it and left it since we looked.
        let is_left = self.lines_left(span, &meta.cut()) >= units;
        if !is_left {
            self.drop_lease(span, owner);
        }
        is_left
    }

    /// Bytes left in the extent from which [`Inner::alloc_log`] gives next, 0 if it must take a new one.
    pub(in crate::arena) fn log_room(&self, seat: &Seat, second: bool) -> usize {
        let class = LOG + usize::from(second);
        let leased = seat.leases[class].load(Ordering::Relaxed);
        if leased == 0 {
            return 0;
        }
        let span = leased as usize - 1;
        let cut = &Meta::of(self.entry(span).meta.load(Ordering::Relaxed)).cut();
        self.lines_left(span, cut) as usize * 64
    }

    /// The extent in which a log block lies, and whether it is of a second log.
    pub(in crate::arena) fn log_of(&self, block: u64) -> Option<(u64, bool)> {
        let (span, meta) = self.head_of(block)?;
        (meta.state == SMALL && meta.class >= LOG).then(|| (self.span_offset(span), meta.class == LOG + 1))
    }

    /// Whether the extent of a log block holds so little else that moving the block away is worth it, if its other
    /// blocks are of `size` bytes like this one. False while a thread still fills it.
    pub(in crate::arena) fn is_log_sparse(&self, block: u64, size: usize) -> bool {
        let Some((span, meta)) = self.head_of(block) else { return false };
        if meta.state != SMALL || meta.class < LOG || meta.owner != 0 {
            return false;
        }
        let cut = &meta.cut();
        // What was not given out yet is no waste: another fills it.
        let given = cut.count - self.lines_left(span, cut);
        let enough = given as usize * 64 / size.max(64) / 10 * 8;
        let mut count = 0;
        for index in 0..cut.words {
            let bits = self.bitmap(span, cut, index).load(Ordering::Relaxed) & !tail_mask(cut, index);
            count += bits.count_ones() as usize;
            if count >= enough {
                return false;
            }
        }
        true
    }
}
