//! Spans: how blocks are given out and taken back.
//!
//! Memory is cut into spans of [`SPAN_BYTES`]. A span is free, or holds blocks
//! of one class under a bitmap, or is part of a large block. A thread leases a
//! span per class: only the lease holder sets bits of its bitmap, anybody
//! clears them. The `meta` word of a span, changed by compare-and-swap, is the
//! truth; the per-class bitmaps of spans with room are hints, and may be
//! wrong in both directions without harm. A log extent is leased likewise; it
//! knows itself how far it is filled, so that the next one goes on there.
//!
//! Orders are chosen so that a death between two stores loses at most one
//! block until the next audit, and never gives one block out twice.

use super::class::{CUTS, Cut, LOG, LOG_SPANS_MAX, SMALL_BYTES_MAX, SPAN_BYTES, class_of, log_cut, log_spans};
use super::fault;
use super::seat::{INTENT_ALLOC, Seat};
use super::{Error, Inner};
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// State: never used.
const UNUSED: u64 = 0;
/// State: free, pages may be present.
const FREE: u64 = 1;
/// State: free, pages were given back.
const HOLE: u64 = 2;
/// State: holds blocks of one class.
const SMALL: u64 = 3;
/// State: first span of a large block.
const LARGE: u64 = 4;
/// State: further span of a large block.
const REST: u64 = 5;

/// Spans that lie in one 2 MiB page and are given back together.
const GROUP: usize = (2 << 20) / SPAN_BYTES;

/// Spans of the smallest arena that has logs.
const LOG_ARENA_SPANS_MIN: usize = 128;

/// Free spans kept with their pages before any are given back.
const KEEP_SPANS: u64 = 4;

/// How long the pages of a freed extent stay in a file. Who reads an array takes no hazard, so he may come late; a day in
/// tests, so that none of them depends on the hour.
const LATE: Duration = if cfg!(test) { Duration::from_secs(86_400) } else { Duration::from_millis(100) };

/// A span's table entry.
#[repr(C)]
pub(super) struct Entry {
    /// State, class, owner seat (plus one), and length of a large block in spans.
    pub meta: AtomicU64,
    /// The bitmap of a class with at most 64 blocks per span; of a log extent, the line at which it is filled next.
    pub bits: AtomicU64,
}

/// A `meta` word taken apart.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Meta {
    state: u64,
    class: usize,
    owner: u64,
    spans: u64,
}

impl Meta {
    fn of(word: u64) -> Meta {
        Meta {
            state: word & 0xff,
            class: ((word >> 8) & 0xff) as usize,
            owner: (word >> 16) & 0xffff,
            spans: word >> 32,
        }
    }

    fn word(self) -> u64 {
        self.state | (self.class as u64) << 8 | self.owner << 16 | self.spans << 32
    }

    fn free(state: u64, owner: u64) -> u64 {
        Meta { state, class: 0, owner, spans: 0 }.word()
    }

    /// How a span in state SMALL is cut.
    #[inline]
    fn cut(self) -> Cut {
        if self.class < LOG { CUTS[self.class] } else { log_cut(self.spans as usize) }
    }

    fn claimable(self) -> bool {
        self.owner == 0 && matches!(self.state, UNUSED | FREE | HOLE)
    }
}

/// What the spans of an arena hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpanStats {
    /// Bytes in blocks that are given out.
    pub allocated_bytes: u64,
    /// Blocks that are given out.
    pub block_count: u64,
    /// Bytes of spans that have pages: in use, leased or kept for reuse.
    pub held_bytes: u64,
    /// Bytes of free spans kept with their pages.
    pub kept_bytes: u64,
}

impl Inner {
    /// Gives out a block of at least `size` bytes and writes the intent to link it into `seat`.
    pub(super) fn alloc(&self, seat: &Seat, owner: u64, size: usize) -> Result<u64, Error> {
        let block = if size <= SMALL_BYTES_MAX {
            self.alloc_small(seat, owner, class_of(size))?
        } else {
            self.alloc_large(seat, owner, size.div_ceil(SPAN_BYTES))?
        };
        // A reader that still looks at this block's former life must, once it sees our stores, also see
        // that life's end: pairs with the acquire fence before such a reader's last check.
        std::sync::atomic::fence(Ordering::Release);
        Ok(block)
    }

    /// Gives out `size` bytes (a multiple of 64) right behind what this thread got here last.
    pub(super) fn alloc_log(&self, seat: &Seat, owner: u64, size: usize, second: bool) -> Result<u64, Error> {
        let units = (size.div_ceil(64) as u32).max(1);
        // No extent is too large a part of the arena; what is left in those of a small one would be.
        let spans = log_spans(size).min((self.layout.spans / 16 + 1).next_power_of_two() / 2);
        if size > spans * SPAN_BYTES / 4 || self.layout.spans < LOG_ARENA_SPANS_MIN {
            return self.alloc(seat, owner, size);
        }
        let class = LOG + usize::from(second);
        loop {
            let leased = seat.leases[class].load(Ordering::Relaxed);
            if leased != 0 {
                let block = self.take_lines(seat, leased as usize - 1, units);
                // The intent names the block, whoever leases the extent.
                if block.is_none() || self.are_logs_shared(spans) {
                    seat.leases[class].store(0, Ordering::Relaxed);
                    self.drop_lease(leased as usize - 1, owner);
                }
                if let Some(block) = block {
                    std::sync::atomic::fence(Ordering::Release);
                    return Ok(block);
                }
            }
            let span = match self.take_log(owner, class, spans, units) {
                Some(span) => span,
                None => match self.cut_log(owner, class, spans) {
                    Ok(span) => span,
                    // Not enough free spans in a row, or no pages for them: any extent with room, else any block of
                    // the size, will do.
                    Err(_) => match self.take_any_log(owner, units) {
                        Some(span) => span,
                        None => return self.alloc(seat, owner, size),
                    },
                },
            };
            seat.leases[class].store(span as u32 + 1, Ordering::Relaxed);
        }
    }

    /// Whether extents of so many spans go from thread to thread with each block: if every thread kept those of both logs
    /// that it filled last, they could be more than a quarter of the arena.
    fn are_logs_shared(&self, spans: usize) -> bool {
        self.seats_high() as usize * 2 * spans > self.layout.spans / 4
    }

    /// Takes the next `units` lines of the log extent at `span`, which this thread leases, if so many are left.
    ///
    /// Where to go on is noted in the extent itself, so that whoever leases it next fills the rest, also after a death.
    /// One between bit and note leaves a block at the note, which was never linked and which the intent names: it is
    /// freed before the lease ends. Is that lost too, by the death of who cleans up, the next block begins there as if
    /// it had not been. So a bit at the note is nobody's, and what lies before it is not given out again until the
    /// extent is empty.
    fn take_lines(&self, seat: &Seat, span: usize, units: u32) -> Option<u64> {
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

    /// Lines at the end of the log extent at `span` that were not given out yet.
    #[inline]
    fn lines_left(&self, span: usize, cut: &Cut) -> u32 {
        u64::from(cut.count).saturating_sub(self.entry(span).bits.load(Ordering::Relaxed)) as u32
    }

    /// Claims free spans for a log extent, and leases it.
    fn cut_log(&self, owner: u64, class: usize, spans: usize) -> Result<usize, Error> {
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
    fn take_log(&self, owner: u64, class: usize, spans: usize, units: u32) -> Option<usize> {
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
    fn take_any_log(&self, owner: u64, units: u32) -> Option<usize> {
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
    pub(super) fn log_room(&self, seat: &Seat, second: bool) -> usize {
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
    pub(super) fn log_of(&self, block: u64) -> Option<(u64, bool)> {
        let (span, meta) = self.head_of(block)?;
        (meta.state == SMALL && meta.class >= LOG).then(|| (self.span_offset(span), meta.class == LOG + 1))
    }

    /// Whether the extent of a log block holds so little else that moving the block away is worth it, if its other
    /// blocks are of `size` bytes like this one. False while a thread still fills it.
    pub(super) fn is_log_sparse(&self, block: u64, size: usize) -> bool {
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

    fn alloc_small(&self, seat: &Seat, owner: u64, class: usize) -> Result<u64, Error> {
        loop {
            let leased = seat.leases[class].load(Ordering::Relaxed);
            if leased != 0 {
                let span = leased as usize - 1;
                if let Some(block) = self.take_block(seat, span, class) {
                    return Ok(block);
                }
                seat.leases[class].store(0, Ordering::Relaxed);
                self.drop_lease(span, owner);
            }
            match self.take_lease(owner, class) {
                Ok(span) => {
                    seat.cursors[class].store(0, Ordering::Relaxed);
                    seat.leases[class].store(span as u32 + 1, Ordering::Relaxed);
                }
                Err(error) => return self.alloc_tight(seat, owner, class).ok_or(error),
            }
        }
    }

    /// Finds a block when no span is free: in a span this thread leases and does not need, else in a larger class, else
    /// among the arrays.
    #[cold]
    fn alloc_tight(&self, seat: &Seat, owner: u64, class: usize) -> Option<u64> {
        for lease in seat.leases.iter().skip(1) {
            let leased = lease.load(Ordering::Relaxed);
            let meta = Meta::of(self.entry((leased as usize).saturating_sub(1)).meta.load(Ordering::Relaxed));
            if leased != 0 && self.is_empty(leased as usize - 1, &meta.cut()) {
                lease.store(0, Ordering::Relaxed);
                self.drop_lease(leased as usize - 1, owner);
                let span = self.take_lease(owner, class).ok()?;
                seat.cursors[class].store(0, Ordering::Relaxed);
                seat.leases[class].store(span as u32 + 1, Ordering::Relaxed);
                return self.take_block(seat, span, class);
            }
        }
        let lines = CUTS[class].block_bytes.is_multiple_of(64);
        for (larger, cut) in CUTS.iter().enumerate().skip(class + 1) {
            if lines && !cut.block_bytes.is_multiple_of(64) {
                continue;
            }
            let leased = seat.leases[larger].load(Ordering::Relaxed);
            if leased != 0
                && let Some(block) = self.take_block(seat, leased as usize - 1, larger)
            {
                return Some(block);
            }
            if let Some(span) = self.take_partial(owner, larger) {
                if leased != 0 {
                    self.drop_lease(leased as usize - 1, owner);
                }
                seat.cursors[larger].store(0, Ordering::Relaxed);
                seat.leases[larger].store(span as u32 + 1, Ordering::Relaxed);
                return self.take_block(seat, span, larger);
            }
        }
        let units = CUTS[class].block_bytes.div_ceil(64);
        let leased = &seat.leases[LOG..];
        let ours = leased.iter().map(|lease| lease.load(Ordering::Relaxed)).filter(|&leased| leased != 0);
        if let Some(block) = ours.into_iter().find_map(|leased| self.take_lines(seat, leased as usize - 1, units)) {
            return Some(block);
        }
        let span = self.take_any_log(owner, units)?;
        let before = leased[0].swap(span as u32 + 1, Ordering::Relaxed);
        if before != 0 {
            self.drop_lease(before as usize - 1, owner);
        }
        self.take_lines(seat, span, units)
    }

    /// Takes a free block of a span this thread leases.
    #[inline]
    fn take_block(&self, seat: &Seat, span: usize, class: usize) -> Option<u64> {
        let cut = &CUTS[class];
        let start = seat.cursors[class].load(Ordering::Relaxed);
        for step in 0..cut.words {
            let index = if start + step < cut.words { start + step } else { start + step - cut.words };
            let word = self.bitmap(span, cut, index);
            let bits = word.load(Ordering::Relaxed);
            if bits == u64::MAX {
                continue;
            }
            let bit = bits.trailing_ones();
            let number = u64::from(index * 64 + bit);
            let block = self.span_offset(span) + u64::from(cut.first) + number * u64::from(cut.block_bytes);
            seat.intents[INTENT_ALLOC].store(block, Ordering::Release);
            fault::point();
            // SeqCst: pairs with the look at `meta` in `free_small`.
            word.fetch_or(1 << bit, Ordering::SeqCst);
            fault::point();
            seat.cursors[class].store(index, Ordering::Relaxed);
            return Some(block);
        }
        None
    }

    /// Leases a span of `class` with room, or a free one that it cuts for the class.
    fn take_lease(&self, owner: u64, class: usize) -> Result<usize, Error> {
        match self.try_lease(owner, class) {
            Err(_) if self.sweep(owner) => self.try_lease(owner, class),
            done => done,
        }
    }

    fn try_lease(&self, owner: u64, class: usize) -> Result<usize, Error> {
        if let Some(span) = self.take_partial(owner, class) {
            return Ok(span);
        }
        let span = self.claim_span(owner)?;
        let cut = &CUTS[class];
        for index in 0..cut.words {
            self.bitmap(span, cut, index).store(tail_mask(cut, index), Ordering::Relaxed);
        }
        fault::point();
        self.entry(span).meta.store(Meta { state: SMALL, class, owner, spans: 0 }.word(), Ordering::SeqCst);
        Ok(span)
    }

    /// Leases a span of `class` that nobody leases and that has room.
    fn take_partial(&self, owner: u64, class: usize) -> Option<usize> {
        let words = self.fresh().div_ceil(64);
        for index in 0..words {
            let hints = self.hints(class, index);
            let mut bits = hints.load(Ordering::Relaxed);
            while bits != 0 {
                let bit = bits.trailing_zeros();
                bits &= bits - 1;
                hints.fetch_and(!(1 << bit), Ordering::SeqCst);
                let span = index * 64 + bit as usize;
                let idle = Meta { state: SMALL, class, owner: 0, spans: 0 };
                fault::point();
                if !self.swap_meta(span, idle.word(), Meta { owner, ..idle }.word()) {
                    continue;
                }
                fault::point();
                if self.has_room(span, &CUTS[class]) {
                    return Some(span);
                }
                self.drop_lease(span, owner);
            }
        }
        None
    }

    /// Ends a lease, and sees to it that the span is found again if it has room.
    pub(super) fn drop_lease(&self, span: usize, owner: u64) {
        let meta = Meta::of(self.entry(span).meta.load(Ordering::SeqCst));
        if meta.state != SMALL || meta.owner != owner {
            return;
        }
        fault::point();
        self.entry(span).meta.store(Meta { owner: 0, ..meta }.word(), Ordering::SeqCst);
        fault::point();
        // Whoever freed a block while we held the span left the hint to us; SeqCst on both sides means
        // that one of the two sees the other.
        std::sync::atomic::fence(Ordering::SeqCst);
        self.find_again(span, meta, owner);
    }

    /// Sees to it that a span that nobody leases is found by who can use it: all of it if it is empty.
    fn find_again(&self, span: usize, meta: Meta, owner: u64) {
        let cut = &meta.cut();
        let has_room = match meta.class {
            // For less than a block of those that it was made for, nobody need look here.
            LOG.. => self.lines_left(span, cut) >= (cut.count / 32).max(1),
            _ => self.has_room(span, cut),
        };
        if has_room {
            self.hint(meta.class, span);
        }
        if self.is_empty(span, cut) {
            self.release_span(span, meta, owner);
        }
    }

    /// Takes a free span: one that was used before, else a fresh one. It stays in state FREE under `owner`.
    fn claim_span(&self, owner: u64) -> Result<usize, Error> {
        let words = self.fresh().div_ceil(64);
        let mut refused = None;
        for index in 0..words {
            let hints = self.hints(0, index);
            let mut bits = hints.load(Ordering::Relaxed);
            while bits != 0 {
                let bit = bits.trailing_zeros();
                bits &= bits - 1;
                let span = index * 64 + bit as usize;
                // One hole that gets no pages is asked for all of them. It keeps its hint.
                if refused.is_some() && Meta::of(self.entry(span).meta.load(Ordering::SeqCst)).state == HOLE {
                    continue;
                }
                hints.fetch_and(!(1 << bit), Ordering::SeqCst);
                let meta = Meta::of(self.entry(span).meta.load(Ordering::SeqCst));
                if !meta.claimable() {
                    continue;
                }
                match self.claim(span, meta, owner) {
                    Ok(true) => return Ok(span),
                    Ok(false) => {}
                    Err(error) => refused = Some(error),
                }
            }
        }
        if let Some(error) = refused {
            return Err(error);
        }
        loop {
            let span = self.fresh();
            if span >= self.layout.spans {
                return self.claim_unhinted(owner);
            }
            let meta = Meta::of(self.entry(span).meta.load(Ordering::SeqCst));
            let claimed = meta.state == UNUSED && meta.owner == 0 && self.claim(span, meta, owner)?;
            let fresh = &self.header().fresh;
            let _ = fresh.compare_exchange(span as u64, span as u64 + 1, Ordering::SeqCst, Ordering::SeqCst);
            if claimed {
                return Ok(span);
            }
        }
    }

    /// Takes a free span that no hint names: an aligned extent passed over it, somebody held it only for a moment, or he
    /// died before he hinted. All others get their hints, so that the next claims need not look everywhere.
    #[cold]
    fn claim_unhinted(&self, owner: u64) -> Result<usize, Error> {
        let (mut claimed, mut refused) = (None, None);
        for span in 0..self.layout.spans {
            let meta = Meta::of(self.entry(span).meta.load(Ordering::SeqCst));
            if !meta.claimable() {
                continue;
            }
            if claimed.is_some() || (refused.is_some() && meta.state != FREE) {
                self.hint(0, span);
                continue;
            }
            match self.claim(span, meta, owner) {
                Ok(true) => claimed = Some(span),
                Ok(false) => {}
                Err(error) => refused = Some(error),
            }
        }
        claimed.ok_or_else(|| refused.unwrap_or_else(|| self.full()))
    }

    fn full(&self) -> Error {
        Error::Full { limit_bytes: (self.layout.spans * SPAN_BYTES) as u64 }
    }

    /// Takes `span`, seen claimable as `meta`, and makes sure it has pages. False if somebody else was quicker.
    fn claim(&self, span: usize, meta: Meta, owner: u64) -> Result<bool, Error> {
        let held = Meta { owner, ..meta };
        if !self.swap_meta(span, meta.word(), held.word()) {
            return Ok(false);
        }
        fault::point();
        if meta.state == FREE {
            let _ = self.header().kept.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
        } else if let Err(error) = self.map.secure(self.span_offset(span) as usize, SPAN_BYTES) {
            // UNUSED stays UNUSED, a hole stays a hole: the next try asks for pages again.
            self.entry(span).meta.store(Meta { owner: 0, ..meta }.word(), Ordering::SeqCst);
            if meta.state == HOLE {
                self.hint(0, span);
            }
            return Err(error);
        }
        self.entry(span).meta.store(Meta::free(FREE, owner), Ordering::SeqCst);
        Ok(true)
    }

    fn alloc_large(&self, seat: &Seat, owner: u64, count: usize) -> Result<u64, Error> {
        let start = self.claim_extent(count, 1, owner)?;
        let block = self.span_offset(start);
        seat.intents[INTENT_ALLOC].store(block, Ordering::Release);
        fault::point();
        // From here the block is given out; the rest of its spans follow, by us or by our recoverer.
        let head = Meta { state: LARGE, class: 0, owner: 0, spans: count as u64 };
        self.entry(start).meta.store(head.word(), Ordering::SeqCst);
        for span in start + 1..start + count {
            fault::point();
            self.entry(span).meta.store(Meta::free(REST, 0), Ordering::SeqCst);
        }
        Ok(block)
    }

    /// Claims `count` neighbouring spans from a multiple of `align` on; they stay in state FREE under `owner`.
    fn claim_extent(&self, count: usize, align: usize, owner: u64) -> Result<usize, Error> {
        match self.try_claim_extent(count, align, owner) {
            Err(_) if self.sweep(owner) => self.try_claim_extent(count, align, owner),
            done => done,
        }
    }

    fn try_claim_extent(&self, count: usize, align: usize, owner: u64) -> Result<usize, Error> {
        let (mut start, mut refused) = (0, None);
        while start + count <= self.layout.spans {
            // Once there were no pages for one, only spans that have theirs will do.
            let taken = |span: &usize| {
                let meta = Meta::of(self.entry(*span).meta.load(Ordering::Relaxed));
                !meta.claimable() || (refused.is_some() && meta.state != FREE)
            };
            let passed = match (start..start + count).rev().find(taken) {
                Some(span) => span,
                None => match self.claim_run(start, count, owner) {
                    Ok(()) => {
                        self.header().fresh.fetch_max((start + count) as u64, Ordering::SeqCst);
                        return Ok(start);
                    }
                    Err((span, error)) => {
                        refused = error.or(refused);
                        span
                    }
                },
            };
            start = (passed + 1).next_multiple_of(align);
        }
        Err(refused.unwrap_or_else(|| self.full()))
    }

    /// Claims `count` spans from `start`, or none of them and returns the one that was taken by somebody else, or for
    /// which there are no pages.
    fn claim_run(&self, start: usize, count: usize, owner: u64) -> Result<(), (usize, Option<Error>)> {
        for span in start..start + count {
            let meta = Meta::of(self.entry(span).meta.load(Ordering::SeqCst));
            let claimed = if meta.claimable() { self.claim(span, meta, owner) } else { Ok(false) };
            if !matches!(claimed, Ok(true)) {
                for back in start..span {
                    self.make_free(back, owner, true);
                }
                return Err((span, claimed.err()));
            }
        }
        Ok(())
    }

    /// Takes a block back, and nothing if none begins there. `owner` names the seat on whose behalf.
    pub(super) fn free(&self, block: u64, owner: u64) {
        let Some((span, meta)) = self.head_of(block) else {
            debug_assert!(false, "free of an offset outside the spans");
            return;
        };
        match meta.state {
            SMALL => self.free_small(block, span, meta, owner),
            LARGE if block == self.span_offset(span) => self.free_large(span, owner, true),
            _ => debug_assert!(false, "free of {block:#x} in a span of state {}", meta.state),
        }
    }

    fn free_small(&self, block: u64, span: usize, meta: Meta, owner: u64) {
        let class = meta.class;
        let cut = &meta.cut();
        // Its callers may be wrong: what is no block of this span must not become a bit outside its bitmap.
        let Some(number) = self.number_of(block, span, cut) else {
            debug_assert!(false, "free of {block:#x}, where no block begins");
            return;
        };
        let mask = 1u64 << (number % 64);
        let before = self.bitmap(span, cut, number / 64).fetch_and(!mask, Ordering::SeqCst);
        debug_assert!(before & mask != 0, "block {block:#x} freed twice");
        if before & mask == 0 {
            return;
        }
        fault::point();
        // SeqCst: pairs with `drop_lease`.
        let meta = Meta::of(self.entry(span).meta.load(Ordering::SeqCst));
        if meta.state != SMALL || meta.owner != 0 || meta.class != class {
            return;
        }
        if class < LOG {
            self.hint(class, span);
        }
        if before & !mask == tail_mask(cut, number / 64) && self.is_empty(span, cut) {
            self.release_span(span, meta, owner);
        }
    }

    /// The number of the block that begins at `block` in a span that is cut as `cut`.
    #[inline]
    fn number_of(&self, block: u64, span: usize, cut: &Cut) -> Option<u32> {
        let inside = (block.checked_sub(self.span_offset(span))? as u32).checked_sub(cut.first)?;
        let number = inside / cut.block_bytes;
        (inside.is_multiple_of(cut.block_bytes) && number < cut.count).then_some(number)
    }

    /// The span in which the block at `block` is accounted for, and its meta word.
    #[inline]
    fn head_of(&self, block: u64) -> Option<(usize, Meta)> {
        let mut span = self.span_of(block)?;
        let mut meta = Meta::of(self.entry(span).meta.load(Ordering::SeqCst));
        for _ in 1..LOG_SPANS_MAX {
            if meta.state != REST || span == 0 {
                break;
            }
            span -= 1;
            meta = Meta::of(self.entry(span).meta.load(Ordering::SeqCst));
        }
        Some((span, meta))
    }

    fn free_large(&self, head: usize, owner: u64, give_back: bool) {
        let meta = Meta::of(self.entry(head).meta.load(Ordering::SeqCst));
        // The block shrinks from its end, so that a death leaves a shorter block, not a torn one.
        for rest in (1..meta.spans).rev() {
            // Ours before it is out of the block, so that whoever cleans up after us finds it.
            self.entry(head + rest as usize).meta.store(Meta::free(REST, owner), Ordering::SeqCst);
            fault::point();
            let shorter = Meta { owner, spans: rest, ..meta };
            self.entry(head).meta.store(shorter.word(), Ordering::SeqCst);
            fault::point();
            self.make_free(head + rest as usize, owner, give_back);
        }
        self.make_free(head, owner, give_back);
    }

    /// Makes an empty, unowned span that was seen as `meta` free, unless somebody leases it first.
    fn release_span(&self, span: usize, meta: Meta, owner: u64) {
        let (cut, spans) = (&meta.cut(), meta.spans);
        let idle = Meta { owner: 0, ..meta };
        if !self.swap_meta(span, idle.word(), Meta { owner, ..idle }.word()) {
            return;
        }
        fault::point();
        if self.is_empty(span, cut) && meta.class >= LOG {
            // An empty extent is an empty large block.
            self.entry(span).meta.store(Meta { state: LARGE, class: 0, owner, spans }.word(), Ordering::SeqCst);
            fault::point();
            let late = self.identity.is_some();
            self.free_large(span, owner, !late);
            if late {
                self.late.lock().unwrap_or_else(PoisonError::into_inner).push_back((
                    Instant::now(),
                    span,
                    spans as usize,
                ));
                self.give_back_late(Instant::now(), owner);
            }
        } else if self.is_empty(span, cut) {
            self.make_free(span, owner, true);
        } else {
            self.drop_lease(span, owner);
        }
    }

    /// Makes a span that `owner` holds free, and may give pages back when enough free spans are kept.
    fn make_free(&self, span: usize, owner: u64, give_back: bool) {
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

    /// Whether more free spans have pages than are kept for the next who need some.
    fn keeps_enough(&self) -> bool {
        self.header().kept.load(Ordering::Relaxed) > KEEP_SPANS + (self.fresh() / 64) as u64
    }

    /// Gives the pages of extents back that this process freed long enough before `now`.
    pub(super) fn give_back_late(&self, now: Instant, owner: u64) {
        let due: Vec<_> = {
            let mut late = self.late.lock().unwrap_or_else(PoisonError::into_inner);
            let count = late.iter().take_while(|extent| now.duration_since(extent.0) >= LATE).count();
            late.drain(..count).collect()
        };
        for (_, span, spans) in due {
            for first in (span / GROUP * GROUP..span + spans).step_by(GROUP) {
                if self.keeps_enough() {
                    self.trim_group(first, owner);
                }
            }
        }
    }

    /// Gives the 2 MiB around `span`, held free by `owner`, back to the system if its neighbours are free too.
    fn give_back_group(&self, span: usize, owner: u64) {
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
            let kept = &self.header().kept;
            let _ = kept.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| Some(n.saturating_sub(freed)));
            self.entry(span).meta.store(Meta::free(HOLE, owner), Ordering::SeqCst);
        }
        for (near, meta) in held {
            let state = if whole && meta.state != UNUSED { HOLE } else { meta.state };
            self.entry(near).meta.store(Meta::free(state, 0), Ordering::SeqCst);
            if state != UNUSED {
                self.hint(0, near);
            }
        }
    }

    /// Gives all pages of free spans back to the system.
    pub(super) fn trim(&self, owner: u64) {
        for first in (0..self.fresh()).step_by(GROUP) {
            self.trim_group(first, owner);
        }
    }

    /// Gives the 2 MiB from `first` on back to the system if all of it is free.
    fn trim_group(&self, first: usize, owner: u64) {
        // Holes too: a reader that was late may have filled one again.
        let used = (first..(first + GROUP).min(self.layout.spans)).find_map(|span| {
            let meta = Meta::of(self.entry(span).meta.load(Ordering::SeqCst));
            (meta.claimable() && meta.state != UNUSED).then_some((span, meta))
        });
        let Some((span, meta)) = used else { return };
        if self.swap_meta(span, meta.word(), Meta { owner, ..meta }.word()) {
            self.give_back_group(span, owner);
            let state = Meta::of(self.entry(span).meta.load(Ordering::SeqCst)).state;
            self.entry(span).meta.store(Meta::free(state, 0), Ordering::SeqCst);
            self.hint(0, span);
        }
    }

    /// Puts back every span a dead seat held.
    pub(super) fn release_spans_of(&self, owner: u64) {
        // All of them: who claims many moves `fresh` on only when he has them all.
        for span in 0..self.layout.spans {
            let meta = Meta::of(self.entry(span).meta.load(Ordering::SeqCst));
            if meta.owner != owner {
                continue;
            }
            match meta.state {
                SMALL => {
                    // An extent is whole before another fills it: its maker may have died before the rest was written.
                    for rest in 1..meta.spans as usize {
                        self.entry(span + rest).meta.store(Meta::free(REST, 0), Ordering::SeqCst);
                        fault::point();
                    }
                    self.drop_lease(span, owner);
                }
                LARGE => self.free_large(span, owner, true),
                _ if self.inside_large(span) => {
                    self.entry(span).meta.store(Meta::free(REST, 0), Ordering::SeqCst);
                }
                // The end of a block that it was freeing.
                REST => self.make_free(span, owner, true),
                // It may have died before it secured the pages, or right after: a hole asks for them again, and `trim`
                // gives back what there is.
                UNUSED | FREE | HOLE => {
                    self.header().fresh.fetch_max(span as u64 + 1, Ordering::SeqCst);
                    self.entry(span).meta.store(Meta::free(HOLE, 0), Ordering::SeqCst);
                    self.hint(0, span);
                }
                _ => {}
            }
        }
    }

    /// Puts back spans that a death left where nobody looks: the rest of a block that is gone, and idle ones with room
    /// that no hint names. Nobody else may use the arena meanwhile.
    pub(super) fn release_lost(&self, owner: u64) {
        self.each_orphan(|span| self.make_free(span, owner, true));
        self.find_all_again(owner);
    }

    /// Finds again what deaths hid from those who look for room: idle spans that lost their hint, and empty ones that were
    /// to become free. False if nobody died since the last time.
    ///
    /// A hint goes before the span is leased and comes after the lease ended, so a death between loses it. That death is
    /// counted when its seat is cleaned up, which is later; so is the death of one who cleans up. Who dies in here leaves
    /// the note as it was, and the next one looks at all of them again.
    #[cold]
    fn sweep(&self, owner: u64) -> bool {
        let header = self.header();
        let deaths = header.recoveries.load(Ordering::SeqCst);
        if header.swept.load(Ordering::SeqCst) == deaths {
            return false;
        }
        self.find_all_again(owner);
        header.swept.store(deaths, Ordering::SeqCst);
        true
    }

    fn find_all_again(&self, owner: u64) {
        for span in 0..self.fresh() {
            let meta = Meta::of(self.entry(span).meta.load(Ordering::SeqCst));
            if meta.state == SMALL && meta.owner == 0 {
                self.find_again(span, meta, owner);
            }
        }
    }

    /// Calls `visit` with every further span of a large block that no block reaches. Exact only while nobody allocates
    /// or frees.
    pub(super) fn each_orphan(&self, mut visit: impl FnMut(usize)) {
        let mut end = 0;
        for span in 0..self.layout.spans {
            let meta = Meta::of(self.entry(span).meta.load(Ordering::SeqCst));
            match meta.state {
                LARGE => end = span + meta.spans as usize,
                SMALL if meta.class >= LOG => end = span + meta.spans as usize,
                REST if span >= end => visit(span),
                _ => {}
            }
        }
    }

    /// Makes the large block at `block` shorter by a span that nobody knows of then.
    #[cfg(test)]
    pub(super) fn orphan_tail(&self, block: u64) {
        let Some((head, meta)) = self.head_of(block) else { return };
        self.entry(head).meta.store(Meta { spans: meta.spans - 1, ..meta }.word(), Ordering::SeqCst);
    }

    /// Whether `span` belongs to the large block that begins at or before it.
    fn inside_large(&self, span: usize) -> bool {
        for head in (0..span).rev() {
            let meta = Meta::of(self.entry(head).meta.load(Ordering::SeqCst));
            match meta.state {
                LARGE => return head as u64 + meta.spans > span as u64,
                SMALL if meta.class >= LOG => return head + meta.spans as usize > span,
                REST => {}
                FREE | HOLE if meta.owner != 0 => {}
                _ => return false,
            }
        }
        false
    }

    /// Whether `block` is the start of a block that is given out.
    pub(super) fn is_allocated(&self, block: u64) -> bool {
        let Some((span, meta)) = self.head_of(block) else { return false };
        match meta.state {
            LARGE => block == self.span_offset(span),
            SMALL => {
                let cut = &meta.cut();
                self.number_of(block, span, cut).is_some_and(|number| {
                    self.bitmap(span, cut, number / 64).load(Ordering::SeqCst) & (1 << (number % 64)) != 0
                })
            }
            _ => false,
        }
    }

    /// Bytes of the block that begins at `block`, 0 if there is none; at least 64 for a log block.
    pub(super) fn block_bytes(&self, block: u64) -> u64 {
        let Some((span, meta)) = self.head_of(block) else { return 0 };
        let _ = span;
        match meta.state {
            SMALL => u64::from(meta.cut().block_bytes),
            LARGE => meta.spans * SPAN_BYTES as u64,
            _ => 0,
        }
    }

    /// Calls `visit` with every block that is given out.
    pub(super) fn each_block(&self, mut visit: impl FnMut(u64)) {
        for span in 0..self.fresh() {
            let meta = Meta::of(self.entry(span).meta.load(Ordering::SeqCst));
            match meta.state {
                LARGE => visit(self.span_offset(span)),
                SMALL => {
                    let cut = &meta.cut();
                    for index in 0..cut.words {
                        let mut bits = self.bitmap(span, cut, index).load(Ordering::SeqCst) & !tail_mask(cut, index);
                        while bits != 0 {
                            let number = index * 64 + bits.trailing_zeros();
                            bits &= bits - 1;
                            let inside = cut.first + number * cut.block_bytes;
                            visit(self.span_offset(span) + u64::from(inside));
                        }
                    }
                }
                _ => {}
            }
        }
    }

    pub(super) fn span_stats(&self) -> SpanStats {
        let mut stats = SpanStats::default();
        self.each_block(|block| {
            stats.block_count += 1;
            stats.allocated_bytes += self.block_bytes(block);
        });
        for span in 0..self.fresh() {
            match Meta::of(self.entry(span).meta.load(Ordering::Relaxed)).state {
                FREE => {
                    stats.kept_bytes += SPAN_BYTES as u64;
                    stats.held_bytes += SPAN_BYTES as u64;
                }
                SMALL | LARGE | REST => stats.held_bytes += SPAN_BYTES as u64,
                _ => {}
            }
        }
        stats
    }

    fn fresh(&self) -> usize {
        (self.header().fresh.load(Ordering::SeqCst) as usize).min(self.layout.spans)
    }

    fn swap_meta(&self, span: usize, from: u64, to: u64) -> bool {
        self.entry(span).meta.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Word `index` of the bitmap of a span that is cut as `cut`.
    #[inline]
    fn bitmap(&self, span: usize, cut: &Cut, index: u32) -> &AtomicU64 {
        if cut.words == 1 { &self.entry(span).bits } else { self.word(self.span_offset(span) + u64::from(index) * 8) }
    }

    fn has_room(&self, span: usize, cut: &Cut) -> bool {
        (0..cut.words).any(|index| self.bitmap(span, cut, index).load(Ordering::SeqCst) != u64::MAX)
    }

    fn is_empty(&self, span: usize, cut: &Cut) -> bool {
        (0..cut.words).all(|index| self.bitmap(span, cut, index).load(Ordering::SeqCst) == tail_mask(cut, index))
    }

    /// Notes that `span` has room for `class`, or is free for class 0.
    fn hint(&self, class: usize, span: usize) {
        let word = self.hints(class, span / 64);
        let mask = 1 << (span % 64);
        if word.load(Ordering::SeqCst) & mask == 0 {
            word.fetch_or(mask, Ordering::SeqCst);
        }
    }

    fn hints(&self, class: usize, index: usize) -> &AtomicU64 {
        self.word((self.layout.hints + (class * self.layout.hint_words + index) * 8) as u64)
    }

    fn entry(&self, span: usize) -> &Entry {
        assert!(span < self.layout.spans);
        let offset = self.layout.table + span * size_of::<Entry>();
        // SAFETY: the table holds `spans` entries (asserted), lies inside the mapping, is 64-byte aligned, and
        // consists of atomics for which every bit pattern is a value.
        unsafe { &*self.map.base().add(offset).cast::<Entry>() }
    }

    #[inline]
    fn span_offset(&self, span: usize) -> u64 {
        (self.layout.data + span * SPAN_BYTES) as u64
    }

    #[inline]
    fn span_of(&self, block: u64) -> Option<usize> {
        let span = block.checked_sub(self.layout.data as u64)? as usize / SPAN_BYTES;
        (span < self.layout.spans).then_some(span)
    }
}

/// Bits of bitmap word `index` that stand for no block; they are always set.
#[inline]
fn tail_mask(cut: &Cut, index: u32) -> u64 {
    let used = cut.count.saturating_sub(index * 64);
    if used >= 64 { 0 } else { u64::MAX << used }
}
