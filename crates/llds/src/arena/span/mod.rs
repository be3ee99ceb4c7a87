//! Spans: how blocks are allocated and freed.
//!
//! Memory is cut into spans of [`SPAN_BYTES`]. A span is free, or holds blocks
//! of one class under a bitmap, or is part of a large block. A thread owns one span
//! per class, or in a small arena none beyond an allocation: only the owner sets
//! bits of the span's bitmap, any thread clears them. The `meta` word of a span,
//! changed by compare-and-swap, is the truth. The
//! per-class bitmaps of spans with room are hints and may be wrong in both
//! directions without harm. A log extent is owned in the same way; it stores how
//! far it is filled, so that its next owner continues there.
//!
//! Stores are ordered so that a death between two of them loses at most one
//! block until the next audit, and never allocates one block twice.

mod claim;
mod give_back;
mod log;
mod release;
mod repair;
mod small;

use super::class::{CUTS, Cut, LOG, LOG_SPANS_MAX, SMALL_BYTES_MAX, SPAN_BYTES, class_of, log_cut, log_spans};
use super::thread_record::ThreadRecord;
use super::{Error, Inner};
use std::sync::atomic::{AtomicU64, Ordering};

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

/// Spans of the smallest arena that has logs.
const LOG_ARENA_SPANS_MIN: usize = 128;

/// A span's table entry.
#[repr(C)]
pub(super) struct Entry {
    /// State, class, number of the owner's thread record (0 for none), and length of a large block in spans.
    pub meta: AtomicU64,
    /// The bitmap of a class with at most 64 blocks per span; of a log extent, the line up to which it is filled.
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
    /// Bytes in allocated blocks.
    pub allocated_bytes: u64,
    /// Allocated blocks.
    pub block_count: u64,
    /// Bytes of spans that have pages: in use, owned or kept for reuse.
    pub held_bytes: u64,
    /// Bytes of free spans kept with their pages.
    pub kept_bytes: u64,
}

impl Inner {
    /// Allocates a block of at least `size` bytes and stores the intent to link it in `thread`.
    pub(super) fn alloc(&self, thread: &ThreadRecord, owner: u64, size: usize) -> Result<u64, Error> {
        let block = if size <= SMALL_BYTES_MAX {
            self.alloc_small(thread, owner, class_of(size))?
        } else {
            self.alloc_large(thread, owner, size.div_ceil(SPAN_BYTES))?
        };
        // A reader may still look at an earlier use of this block. Once it sees a store of ours, it must also see the end of
        // that use: pairs with the acquire fence before the reader's last check.
        std::sync::atomic::fence(Ordering::Release);
        Ok(block)
    }

    /// Spans of the log extents in which blocks of `size` bytes lie; `None` if they lie in none.
    fn log_extent(&self, size: usize) -> Option<usize> {
        // An extent is at most a 16th of the arena: in a small arena the unused parts of extents would be too much of it.
        let spans = log_spans(size).min((self.layout.spans / 16 + 1).next_power_of_two() / 2);
        (size <= spans * SPAN_BYTES / 4 && self.layout.spans >= LOG_ARENA_SPANS_MIN).then_some(spans)
    }

    /// Allocates `size` bytes (a multiple of 64) directly after this thread's previous allocation by this function.
    pub(super) fn alloc_log(&self, thread: &ThreadRecord, owner: u64, size: usize, second: bool) -> Result<u64, Error> {
        let units = (size.div_ceil(64) as u32).max(1);
        let Some(spans) = self.log_extent(size) else { return self.alloc(thread, owner, size) };
        let class = LOG + usize::from(second);
        loop {
            let owned = thread.owned_spans[class].load(Ordering::Relaxed);
            if owned != 0 {
                let block = self.take_lines(thread, owned as usize - 1, units);
                // The intent names the block, whichever thread owns the extent.
                if block.is_none() || self.are_logs_shared(spans) {
                    self.disown(thread, owner, class);
                }
                if let Some(block) = block {
                    std::sync::atomic::fence(Ordering::Release);
                    return Ok(block);
                }
            }
            // Not enough adjacent free spans, or no pages for them: use any extent with room, else any block of the size.
            let span = self.take_or_cut_log(owner, class, spans, units).or_else(|| self.take_any_log(owner, units));
            let Some(span) = span else { return self.alloc(thread, owner, size) };
            thread.owned_spans[class].store(span as u32 + 1, Ordering::Relaxed);
        }
    }

    /// Does the slow part of the next allocation of `size` bytes from the first log: takes an extent with room for it and
    /// faults its pages in. Stops silently where that fails.
    pub(super) fn ready_log(&self, thread: &ThreadRecord, owner: u64, size: usize) {
        let units = (size.div_ceil(64) as u32).max(1);
        let Some(spans) = self.log_extent(size).filter(|spans| !self.are_logs_shared(*spans)) else { return };
        let is_new = self.log_room(thread, false) < units as usize * 64;
        if is_new {
            self.disown(thread, owner, LOG);
            let Some(span) = self.take_or_cut_log(owner, LOG, spans, units) else { return };
            thread.owned_spans[LOG].store(span as u32 + 1, Ordering::Relaxed);
        }
        let span = thread.owned_spans[LOG].load(Ordering::Relaxed) as usize - 1;
        let cut = &Meta::of(self.entry(span).meta.load(Ordering::Relaxed)).cut();
        let room = self.log_room(thread, false);
        let end = self.span_offset(span) as usize + cut.first as usize + cut.count as usize * 64;
        self.map.ready(end - room, size, room, is_new);
    }

    fn take_or_cut_log(&self, owner: u64, class: usize, spans: usize, units: u32) -> Option<usize> {
        self.take_log(owner, class, spans, units).or_else(|| self.cut_log(owner, class, spans).ok())
    }

    /// Returns the number of the block that begins at `block` in a span cut as `cut`.
    #[inline]
    fn number_of(&self, block: u64, span: usize, cut: &Cut) -> Option<u32> {
        let inside = (block.checked_sub(self.span_offset(span))? as u32).checked_sub(cut.first)?;
        let number = inside / cut.block_bytes;
        (inside.is_multiple_of(cut.block_bytes) && number < cut.count).then_some(number)
    }

    /// Returns the span with the entry that describes the block at `block`, and its meta word.
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

    /// Returns true if an allocated block begins at `block`.
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

    /// Returns the bytes of the block that begins at `block`, 0 if there is none, 64 for a log block.
    pub(super) fn block_bytes(&self, block: u64) -> u64 {
        let Some((span, meta)) = self.head_of(block) else { return 0 };
        let _ = span;
        match meta.state {
            SMALL => u64::from(meta.cut().block_bytes),
            LARGE => meta.spans * SPAN_BYTES as u64,
            _ => 0,
        }
    }

    /// Calls `visit` with every allocated block.
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

    /// Returns how many lines at the end of the log extent at `span` were never allocated.
    #[inline]
    fn lines_left(&self, span: usize, cut: &Cut) -> u32 {
        u64::from(cut.count).saturating_sub(self.entry(span).bits.load(Ordering::Relaxed)) as u32
    }

    fn swap_meta(&self, span: usize, from: u64, to: u64) -> bool {
        self.entry(span).meta.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Returns word `index` of the bitmap of a span cut as `cut`.
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

    /// Sets the hint that `span` has room for `class`, or is free (class 0).
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
        // SAFETY: the table holds `spans` entries (index asserted), lies inside the mapping, is 64-byte aligned, and consists
        // of atomics, for which every bit pattern is a value.
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
