//! Units: what a thread owns and allocates from: a span, or a slab of tiles in a split span.
//!
//! Both have an entry in a table, with the same `meta` word: spans in the table
//! of spans, tiles in the table of their span. The entry of a slab is that of its
//! first tile.

use crate::arena::class::{SLAB_TILES, SPAN_BYTES, TILE_BYTES, TILES};
use crate::arena::thread_record::ThreadRecord;
use std::sync::atomic::{AtomicU32, Ordering};

/// Bits of a unit's number that say which tile it is, plus one; 0 stands for the whole span.
const TILE_BITS: u32 = TILES.ilog2() + 1;

/// The number of a span, or of a tile.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::arena) struct Unit(u32);

impl From<usize> for Unit {
    #[inline]
    fn from(span: usize) -> Unit {
        Unit((span as u32) << TILE_BITS)
    }
}

impl Unit {
    #[inline]
    pub(super) fn of_tile(span: usize, tile: usize) -> Unit {
        Unit((span as u32) << TILE_BITS | (tile as u32 + 1))
    }

    /// Returns the span that it is, or in which it lies.
    #[inline]
    pub(super) fn span(self) -> usize {
        (self.0 >> TILE_BITS) as usize
    }

    /// Returns which tile of its span it is; `None` for a whole span.
    #[inline]
    pub(super) fn tile(self) -> Option<usize> {
        (self.0 & ((1 << TILE_BITS) - 1)).checked_sub(1).map(|tile| tile as usize)
    }

    /// Returns the unit `by` spans or tiles further on.
    #[inline]
    pub(super) fn plus(self, by: usize) -> Unit {
        match self.tile() {
            Some(_) => Unit(self.0 + by as u32),
            None => Unit::from(self.span() + by),
        }
    }

    /// Returns the span, or the tile of the same span, before it.
    #[inline]
    pub(super) fn before(self) -> Option<Unit> {
        match self.tile() {
            Some(tile) => (tile > 0).then(|| Unit(self.0 - 1)),
            None => self.span().checked_sub(1).map(Unit::from),
        }
    }

    /// Returns the unit that an entry of a thread's list of owned units names.
    #[inline]
    pub(super) fn listed(entry: &AtomicU32, order: Ordering) -> Option<Unit> {
        entry.load(order).checked_sub(1).map(Unit)
    }

    /// Writes it to the list of the calling thread as its unit of `class`.
    #[inline]
    pub(super) fn list(self, thread: &ThreadRecord, class: usize) {
        thread.owned_spans[class].store(self.0 + 1, Ordering::Relaxed);
        let bytes = thread.owned_bytes.load(Ordering::Relaxed) + self.bytes(class);
        thread.owned_bytes.store(bytes, Ordering::Relaxed);
    }

    /// Removes the unit of `class` from the list of the calling thread, and returns it.
    #[inline]
    pub(in crate::arena) fn unlist(thread: &ThreadRecord, class: usize) -> Option<Unit> {
        let unit = Unit::listed(&thread.owned_spans[class], Ordering::Relaxed)?;
        thread.owned_spans[class].store(0, Ordering::SeqCst);
        let bytes = thread.owned_bytes.load(Ordering::Relaxed).saturating_sub(unit.bytes(class));
        thread.owned_bytes.store(bytes, Ordering::Relaxed);
        Some(unit)
    }

    /// Returns the bytes of a unit that holds blocks of `class`; of log extents none.
    #[inline]
    fn bytes(self, class: usize) -> u64 {
        match SLAB_TILES.get(class) {
            None => 0,
            Some(_) if self.tile().is_none() => SPAN_BYTES as u64,
            Some(tiles) => (tiles * TILE_BYTES) as u64,
        }
    }
}
