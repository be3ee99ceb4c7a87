//! Spans: how blocks are allocated and freed.
//!
//! Memory is cut into spans of [`SPAN_BYTES`]. A span is free, or holds blocks
//! of one class under a bitmap, or is split into tiles, of which slabs hold blocks
//! of one class, or is part of a large block. A class gets whole spans once it has
//! filled slabs of as many tiles. A thread owns one span or slab (a *unit*) per
//! class as far as its share of the arena allows, else none beyond an allocation:
//! only the owner sets bits of the unit's bitmap, any thread clears them. The
//! `meta` word of a unit, changed by compare-and-swap, is the truth. The
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
mod split;
mod take_back;
mod unit;

use super::class::{
    CUTS, Cut, LOG, LOG_SPANS_MAX, SLAB_CUTS, SMALL_BYTES_MAX, SPAN_BYTES, TILE_BYTES, TILES, class_of, log_cut,
    log_spans,
};
use super::layout::{ENTRY_BYTES, PART_SPANS, TILE_TABLE_BYTES};
use super::thread_record::ThreadRecord;
use super::{Error, Inner};
pub(super) use give_back::SMALL_PAGE_SPANS;
use std::sync::atomic::{AtomicU64, Ordering};
pub(super) use unit::Unit;

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
/// State: further span of a large block, or further tile of a slab.
const REST: u64 = 5;
/// State: split into tiles, which have entries of their own.
const SPLIT: u64 = 6;

/// The bit of a `meta` word that says that another thread asks for the unit.
const WANTED: u64 = 1 << 63;

/// Spans of the smallest arena that has logs.
const LOG_ARENA_SPANS_MIN: usize = 128;

/// The table entry of a span or a tile.
#[repr(C)]
pub(super) struct SpanEntry {
    /// State, class, number of the owner's thread record (0 for none), length of a large block in spans or of a slab in
    /// tiles, and whether another thread asks for it.
    pub meta: AtomicU64,
    /// The bitmap of a class with at most 64 blocks per span; of a log extent, the line up to which it is filled.
    pub bits: AtomicU64,
}

const _: () = assert!(size_of::<SpanEntry>() == ENTRY_BYTES);

/// A `meta` word taken apart.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Meta {
    state: u64,
    class: usize,
    owner: u64,
    spans: u64,
    wanted: bool,
}

impl Meta {
    #[inline]
    fn of(word: u64) -> Meta {
        Meta {
            state: word & 0xff,
            class: ((word >> 8) & 0xff) as usize,
            owner: (word >> 16) & 0xffff,
            spans: (word & !WANTED) >> 32,
            wanted: word & WANTED != 0,
        }
    }

    fn new(state: u64) -> Meta {
        Meta { state, class: 0, owner: 0, spans: 0, wanted: false }
    }

    /// Returns true if `owner` owns a unit of `class`, no log, for which no other thread asks.
    #[inline]
    fn is_owned(self, class: usize, owner: u64) -> bool {
        self.state == SMALL && self.class == class && self.owner == owner && !self.wanted
    }

    /// Returns the bytes of a unit in state SMALL.
    fn bytes(self) -> usize {
        match (self.class, self.spans as usize) {
            (..LOG, 0) => SPAN_BYTES,
            (..LOG, tiles) => tiles * TILE_BYTES,
            (_, spans) => spans * SPAN_BYTES,
        }
    }

    /// How a unit of a class that is no log is cut.
    #[inline]
    fn small_cut(self) -> &'static Cut {
        if self.spans == 0 { &CUTS[self.class] } else { &SLAB_CUTS[self.class] }
    }

    #[inline]
    fn word(self) -> u64 {
        let wanted = if self.wanted { WANTED } else { 0 };
        self.state | (self.class as u64) << 8 | self.owner << 16 | self.spans << 32 | wanted
    }

    fn free(state: u64, owner: u64) -> u64 {
        Meta { owner, ..Meta::new(state) }.word()
    }

    /// How a unit in state SMALL is cut.
    #[inline]
    fn cut(self) -> Cut {
        if self.class < LOG { *self.small_cut() } else { log_cut(self.spans as usize) }
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
    /// Bytes of free spans, and free tiles, kept with their pages.
    pub kept_bytes: u64,
}

impl Inner {
    /// Allocates a block of at least `size` bytes and stores the intent to link it in `thread`.
    pub(super) fn alloc(&self, thread: &ThreadRecord, owner: u64, size: usize) -> Result<u64, Error> {
        let block = if size <= SMALL_BYTES_MAX {
            self.alloc_small(thread, owner, class_of(size))?
        } else {
            let count = size.div_ceil(SPAN_BYTES);
            self.alloc_large(thread, owner, count).or_else(|_| {
                self.relieve(thread, owner);
                self.alloc_large(thread, owner, count)
            })?
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
            if let Some(unit) = Unit::listed(&thread.owned_spans[class], Ordering::Relaxed) {
                let block = self.take_lines(thread, owner, unit.span(), units);
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
            Unit::from(span).list(thread, class);
        }
    }

    /// Does the slow part of the next allocation of `size` bytes from the first log: takes an extent with room for it and
    /// faults its pages in. Stops silently where that fails.
    pub(super) fn ready_log(&self, thread: &ThreadRecord, owner: u64, size: usize) {
        let units = (size.div_ceil(64) as u32).max(1);
        let Some(spans) = self.log_extent(size).filter(|spans| !self.are_logs_shared(*spans)) else { return };
        let is_new = self.log_room(thread, owner, false) < units as usize * 64;
        if is_new {
            self.disown(thread, owner, LOG);
            let Some(span) = self.take_or_cut_log(owner, LOG, spans, units) else { return };
            Unit::from(span).list(thread, LOG);
        }
        let Some((span, meta)) = self.owned_log(thread, owner, LOG) else { return };
        let cut = &meta.cut();
        let room = self.lines_left(span, cut) as usize * 64;
        let end = self.span_offset(span) as usize + cut.first as usize + cut.count as usize * 64;
        self.map.ready(end - room, size, room, is_new);
    }

    fn take_or_cut_log(&self, owner: u64, class: usize, spans: usize, units: u32) -> Option<usize> {
        self.take_log(owner, class, spans, units).or_else(|| self.cut_log(owner, class, spans).ok())
    }

    /// Returns the number of the block that begins at `block` in a unit cut as `cut`.
    #[inline]
    fn number_of(&self, block: u64, unit: Unit, cut: &Cut) -> Option<u32> {
        let inside = (block.checked_sub(self.unit_offset(unit))? as u32).checked_sub(cut.first)?;
        let number = inside / cut.block_bytes;
        (inside.is_multiple_of(cut.block_bytes) && number < cut.count).then_some(number)
    }

    /// Returns the unit with the entry that describes the block at `block`, and its meta word.
    #[inline]
    fn head_of(&self, block: u64) -> Option<(Unit, Meta)> {
        let span = self.span_of(block)?;
        let mut unit = Unit::from(span);
        let mut meta = self.meta(unit);
        let mut steps = LOG_SPANS_MAX;
        if meta.state == SPLIT {
            unit = Unit::of_tile(span, (block - self.span_offset(span)) as usize / TILE_BYTES);
            meta = self.meta(unit);
            steps = TILES;
        }
        for _ in 1..steps {
            let Some(before) = unit.before().filter(|_| meta.state == REST) else { break };
            unit = before;
            meta = self.meta(unit);
        }
        Some((unit, meta))
    }

    /// Returns true if an allocated block begins at `block`.
    pub(super) fn is_allocated(&self, block: u64) -> bool {
        let Some((unit, meta)) = self.head_of(block) else { return false };
        match meta.state {
            LARGE => block == self.unit_offset(unit),
            SMALL => {
                let cut = &meta.cut();
                self.number_of(block, unit, cut).is_some_and(|number| {
                    self.bitmap(unit, cut, number / 64).load(Ordering::SeqCst) & (1 << (number % 64)) != 0
                })
            }
            _ => false,
        }
    }

    /// Returns the bytes of the block that begins at `block`, 0 if there is none, 64 for a log block.
    pub(super) fn block_bytes(&self, block: u64) -> u64 {
        let Some((_, meta)) = self.head_of(block) else { return 0 };
        match meta.state {
            SMALL => u64::from(meta.cut().block_bytes),
            LARGE => meta.spans * SPAN_BYTES as u64,
            _ => 0,
        }
    }

    /// Calls `visit` with every span that is not split, and every tile of those that are.
    fn each_unit(&self, mut visit: impl FnMut(Unit, Meta)) {
        for span in 0..self.fresh() {
            let unit = Unit::from(span);
            match self.meta(unit) {
                meta if meta.state == SPLIT => {
                    let tiles = (0..TILES).map(|tile| Unit::of_tile(span, tile));
                    tiles.for_each(|unit| visit(unit, self.meta(unit)));
                }
                meta => visit(unit, meta),
            }
        }
    }

    /// Calls `visit` with every allocated block.
    pub(super) fn each_block(&self, mut visit: impl FnMut(u64)) {
        self.each_unit(|unit, meta| match meta.state {
            LARGE => visit(self.unit_offset(unit)),
            SMALL => {
                let cut = &meta.cut();
                for index in 0..cut.words {
                    let mut bits = self.bitmap(unit, cut, index).load(Ordering::SeqCst) & !tail_mask(cut, index);
                    while bits != 0 {
                        let number = index * 64 + bits.trailing_zeros();
                        bits &= bits - 1;
                        let inside = cut.first + number * cut.block_bytes;
                        visit(self.unit_offset(unit) + u64::from(inside));
                    }
                }
            }
            _ => {}
        });
    }

    pub(super) fn span_stats(&self) -> SpanStats {
        let mut stats = SpanStats::default();
        self.each_block(|block| {
            stats.block_count += 1;
            stats.allocated_bytes += self.block_bytes(block);
        });
        self.each_unit(|unit, meta| {
            let bytes = if unit.tile().is_some() { TILE_BYTES } else { SPAN_BYTES } as u64;
            match meta.state {
                FREE => {
                    stats.kept_bytes += bytes;
                    stats.held_bytes += bytes;
                }
                SMALL | LARGE | REST => stats.held_bytes += bytes,
                _ => {}
            }
        });
        stats
    }

    fn fresh(&self) -> usize {
        (self.header().fresh.load(Ordering::SeqCst) as usize).min(self.layout.spans)
    }

    /// Returns how many spans have table entries and hints with pages. Beyond them nothing was ever claimed.
    fn tabled(&self) -> usize {
        (self.header().parts.load(Ordering::Acquire) as usize).saturating_mul(PART_SPANS).min(self.layout.spans)
    }

    /// Returns how many spans are not free; a hint.
    pub(super) fn used(&self) -> usize {
        (self.header().used.load(Ordering::Relaxed) as usize).min(self.layout.spans)
    }

    /// Returns how many lines at the end of the log extent at `span` were never allocated.
    #[inline]
    fn lines_left(&self, span: usize, cut: &Cut) -> u32 {
        u64::from(cut.count).saturating_sub(self.entry(span).bits.load(Ordering::Relaxed)) as u32
    }

    #[inline]
    fn meta(&self, unit: impl Into<Unit>) -> Meta {
        Meta::of(self.entry(unit).meta.load(Ordering::SeqCst))
    }

    fn swap_meta(&self, unit: impl Into<Unit>, from: u64, to: u64) -> bool {
        self.entry(unit).meta.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Returns word `index` of the bitmap of a unit cut as `cut`.
    #[inline]
    fn bitmap(&self, unit: impl Into<Unit>, cut: &Cut, index: u32) -> &AtomicU64 {
        let unit = unit.into();
        if cut.words == 1 { &self.entry(unit).bits } else { self.word(self.unit_offset(unit) + u64::from(index) * 8) }
    }

    fn has_room(&self, unit: Unit, cut: &Cut) -> bool {
        (0..cut.words).any(|index| self.bitmap(unit, cut, index).load(Ordering::SeqCst) != u64::MAX)
    }

    fn is_empty(&self, unit: Unit, cut: &Cut) -> bool {
        (0..cut.words).all(|index| self.bitmap(unit, cut, index).load(Ordering::SeqCst) == tail_mask(cut, index))
    }

    /// Sets the hint that `span` has room for `class`, or is free (class 0).
    fn hint(&self, class: usize, span: usize) {
        let word = self.hints(class, span / 64);
        let mask = 1 << (span % 64);
        if word.load(Ordering::SeqCst) & mask == 0 {
            word.fetch_or(mask, Ordering::SeqCst);
        }
    }

    /// Clears the hint of `span`, and sets it again if another thread made it true meanwhile: that thread may have seen the
    /// hint that was cleared.
    fn unhint(&self, class: usize, span: usize, is_true: impl Fn() -> bool) {
        self.hints(class, span / 64).fetch_and(!(1 << (span % 64)), Ordering::SeqCst);
        if is_true() {
            self.hint(class, span);
        }
    }

    /// Returns a word of the hints of `class` (0 for free spans, or [`super::layout::SPLIT_HINT`]).
    fn hints(&self, class: usize, index: usize) -> &AtomicU64 {
        self.word(self.layout.hint(class, index) as u64)
    }

    #[inline]
    fn entry(&self, unit: impl Into<Unit>) -> &SpanEntry {
        let unit = unit.into();
        let span = unit.span();
        assert!(span < self.layout.spans);
        let offset = match unit.tile() {
            None => self.layout.table + span * size_of::<SpanEntry>(),
            Some(tile) => self.layout.tiles + span * TILE_TABLE_BYTES + tile % TILES * size_of::<SpanEntry>(),
        };
        // SAFETY: the table has an entry for each span (index asserted), and each span a table of TILES entries. They lie
        // inside the mapping, are 16-byte aligned, and consist of atomics, for which every bit pattern is a value.
        unsafe { &*self.map.base().add(offset).cast::<SpanEntry>() }
    }

    #[inline]
    fn unit_offset(&self, unit: Unit) -> u64 {
        self.span_offset(unit.span()) + (unit.tile().unwrap_or(0) * TILE_BYTES) as u64
    }

    #[inline]
    fn span_offset(&self, span: usize) -> u64 {
        (self.layout.data + span * SPAN_BYTES) as u64
    }

    #[inline]
    fn span_of(&self, block: u64) -> Option<usize> {
        let span = block.checked_sub(self.layout.data as u64)? as usize / SPAN_BYTES;
        (span < self.tabled()).then_some(span)
    }
}

/// Bits of bitmap word `index` that stand for no block; they are always set.
#[inline]
fn tail_mask(cut: &Cut, index: u32) -> u64 {
    let used = cut.count.saturating_sub(index * 64);
    if used >= 64 { 0 } else { u64::MAX << used }
}
