//! Logs: extents of some spans that their owner fills from front to back with arrays of any size.
//!
//! An extent stores how far it is filled, so that its next owner continues there.
//! Freed space inside an extent is not reused until the whole extent is empty.

use super::{Meta, REST, SMALL, Unit, tail_mask};
use crate::arena::class::{LOG, log_cut};
use crate::arena::thread_record::ThreadRecord;
use crate::arena::{Error, Inner, fault};
use std::sync::atomic::Ordering;

impl Inner {
    /// Returns true if threads share extents of `spans` spans, giving up the ownership after each block: if every thread
    /// kept its extents of both logs, they could be more than a quarter of the used spans. A single thread shares nothing in
    /// an arena that is not small.
    pub(super) fn are_logs_shared(&self, spans: usize) -> bool {
        let threads = self.records_high() as usize;
        let most = threads * 2 * spans;
        most > self.layout.spans / 4 || threads > 1 && most > self.used() / 4
    }

    /// Returns the log extent that this thread owns as its log of `class`, and its meta word.
    pub(super) fn owned_log(&self, thread: &ThreadRecord, owner: u64, class: usize) -> Option<(usize, Meta)> {
        let span = Unit::listed(&thread.owned_spans[class], Ordering::Relaxed)?.span();
        self.as_owned_log(span, owner).map(|meta| (span, meta))
    }

    fn as_owned_log(&self, span: usize, owner: u64) -> Option<Meta> {
        let meta = Meta::of(self.entry(span).meta.load(Ordering::Relaxed));
        (meta.state == SMALL && meta.class >= LOG && meta.owner == owner && !meta.wanted).then_some(meta)
    }

    /// Allocates the next `units` lines of the log extent at `span`, which this thread owns, if so many are left and no
    /// other thread took it back.
    ///
    /// The fill mark is stored in the extent, so that the next owner continues there, also after a death. A death between
    /// setting the bit and advancing the mark leaves a block at the mark: it was never linked, and the intent names it, so
    /// recovery frees it before it ends the ownership. If the recovering thread dies too, the bit may stay; then the next
    /// block begins there and sets the same bit. So a bit at the mark belongs to no block, and space before the mark is not
    /// reused until the extent is empty.
    pub(super) fn take_lines(&self, thread: &ThreadRecord, owner: u64, span: usize, units: u32) -> Option<u64> {
        let meta = self.as_owned_log(span, owner)?;
        let cut = &meta.cut();
        if units > self.lines_left(span, cut) {
            return None;
        }
        let next = &self.entry(span).bits;
        let at = next.load(Ordering::Relaxed) as u32;
        let block = self.span_offset(span) + u64::from(cut.first) + u64::from(at) * 64;
        if !self.announce(thread, Unit::from(span), meta, block) {
            return None;
        }
        self.bitmap(span, cut, at / 64).fetch_or(1 << (at % 64), Ordering::SeqCst);
        fault::point();
        next.store(u64::from(at + units), Ordering::Relaxed);
        fault::point();
        Some(block)
    }

    /// Claims free spans for a log extent, which `owner` then owns.
    pub(super) fn cut_log(&self, owner: u64, class: usize, spans: usize) -> Result<usize, Error> {
        let span = self.claim_extent(spans, spans, owner)?;
        let cut = &log_cut(spans);
        for index in 0..cut.words {
            self.bitmap(span, cut, index).store(tail_mask(cut, index), Ordering::Relaxed);
        }
        self.entry(span).bits.store(0, Ordering::Relaxed);
        fault::point();
        // Head first: from here on every reader of the table counts the other spans to this extent.
        let head = Meta { class, owner, spans: spans as u64, ..Meta::new(SMALL) };
        self.entry(span).meta.store(head.word(), Ordering::SeqCst);
        for rest in 1..spans {
            fault::point();
            self.entry(span + rest).meta.store(Meta::free(REST, 0), Ordering::SeqCst);
        }
        Ok(span)
    }

    /// Takes an unowned extent of the log `class` with `spans` spans and at least `units` lines left.
    pub(super) fn take_log(&self, owner: u64, class: usize, spans: usize, units: u32) -> Option<usize> {
        for index in 0..self.fresh().div_ceil(64) {
            let hints = self.hints(class, index);
            let mut bits = hints.load(Ordering::Relaxed);
            while bits != 0 {
                let mask = bits & bits.wrapping_neg();
                let span = index * 64 + bits.trailing_zeros() as usize;
                bits &= bits - 1;
                // A hint stays until the extent is owned: it may suit other threads.
                if self.own_log(span, owner, units, |meta| meta.class == class && meta.spans == spans as u64) {
                    hints.fetch_and(!mask, Ordering::SeqCst);
                    return Some(span);
                }
                let is_log = || {
                    let meta = Meta::of(self.entry(span).meta.load(Ordering::SeqCst));
                    meta.state == SMALL && meta.class == class
                };
                if !is_log() {
                    hints.fetch_and(!mask, Ordering::SeqCst);
                    // A thread that made it an extent meanwhile may have seen the hint that we cleared.
                    if is_log() {
                        hints.fetch_or(mask, Ordering::SeqCst);
                    }
                }
            }
        }
        None
    }

    /// Takes an unowned extent of either log, of any length, with at least `units` lines left.
    #[cold]
    pub(super) fn take_any_log(&self, owner: u64, units: u32) -> Option<usize> {
        (0..self.fresh()).find(|&span| self.own_log(span, owner, units, |_| true))
    }

    /// Takes the log extent at `span`, if an unowned one begins there that is of the right kind and has `units` lines left.
    fn own_log(&self, span: usize, owner: u64, units: u32, is_right: impl Fn(Meta) -> bool) -> bool {
        let meta = Meta::of(self.entry(span).meta.load(Ordering::SeqCst));
        let idle = meta.state == SMALL && meta.class >= LOG && meta.owner == 0;
        if !idle || !is_right(meta) || self.lines_left(span, &meta.cut()) < units {
            return false;
        }
        if !self.swap_meta(span, meta.word(), Meta { owner, ..meta }.word()) {
            return false;
        }
        fault::point();
        // Another thread may have owned, filled and disowned it since we looked.
        let is_left = self.lines_left(span, &meta.cut()) >= units;
        if !is_left {
            self.disown_unit(Unit::from(span), owner);
        }
        is_left
    }

    /// Returns the bytes left in the extent that [`Inner::alloc_log`] uses next, 0 if it must take a new one.
    pub(in crate::arena) fn log_room(&self, thread: &ThreadRecord, owner: u64, second: bool) -> usize {
        let owned = self.owned_log(thread, owner, LOG + usize::from(second));
        owned.map_or(0, |(span, meta)| self.lines_left(span, &meta.cut()) as usize * 64)
    }

    /// Returns the extent in which a log block lies, and whether it belongs to a second log.
    pub(in crate::arena) fn log_of(&self, block: u64) -> Option<(u64, bool)> {
        let (unit, meta) = self.head_of(block)?;
        (meta.state == SMALL && meta.class >= LOG).then(|| (self.unit_offset(unit), meta.class == LOG + 1))
    }

    /// Returns true if the extent of a log block holds so few other blocks (assumed to be of `size` bytes too) that moving
    /// this block away is worth it. False while a thread owns the extent.
    pub(in crate::arena) fn is_log_sparse(&self, block: u64, size: usize) -> bool {
        let Some((unit, meta)) = self.head_of(block) else { return false };
        let span = unit.span();
        if meta.state != SMALL || meta.class < LOG || meta.owner != 0 {
            return false;
        }
        let cut = &meta.cut();
        // Lines that were never allocated are no waste: the next owner fills them.
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
