//! Repair: completes what a death left undone among the spans.
//!
//! Spans that a dead thread owned are released by its recovery. A span without its
//! hint, or the torn rest of a block, has no owner: a walk over all spans finds it,
//! when no room is found otherwise, or in an audit.

use super::{FREE, HOLE, LARGE, Meta, REST, SMALL, SPLIT, UNUSED, Unit};
use crate::arena::class::{CLASS_COUNT, LOG, LOG_SPANS_MAX, SLAB_TILES, TILES};
use crate::arena::layout::SPLIT_HINT;
use crate::arena::{Inner, fault};
use std::sync::atomic::Ordering;

impl Inner {
    /// Returns true if every entry of the table is possible, whichever threads died: cuts, bitmaps and blocks are found by
    /// the table.
    pub(in crate::arena) fn is_table_sound(&self) -> bool {
        (0..self.tabled()).all(|span| {
            let meta = self.meta(span);
            let left = (self.layout.spans - span) as u64;
            match meta.state {
                UNUSED | FREE | HOLE | REST => meta.spans == 0,
                SPLIT => meta.spans == 0 && (0..TILES).all(|tile| self.is_tile_sound(span, tile)),
                SMALL if meta.class < LOG => meta.class != 0 && meta.spans == 0,
                SMALL => meta.class < CLASS_COUNT && (1..=left.min(LOG_SPANS_MAX as u64)).contains(&meta.spans),
                LARGE => (1..=left).contains(&meta.spans),
                _ => false,
            }
        })
    }

    fn is_tile_sound(&self, span: usize, tile: usize) -> bool {
        let meta = self.meta(Unit::of_tile(span, tile));
        let left = (TILES - tile) as u64;
        match meta.state {
            UNUSED | FREE | REST => meta.spans == 0,
            SMALL => {
                (1..LOG).contains(&meta.class) && meta.spans == SLAB_TILES[meta.class] as u64 && meta.spans <= left
            }
            LARGE => (1..=left).contains(&meta.spans),
            _ => false,
        }
    }

    /// Overwrites a span's `meta` word.
    #[cfg(test)]
    pub(in crate::arena) fn damage(&self, span: usize, meta: u64) {
        self.entry(span).meta.store(meta, Ordering::SeqCst);
    }

    /// Releases every unit that a dead thread owned, and counts the units again.
    pub(in crate::arena) fn release_spans_of(&self, owner: u64) {
        // All spans that have entries: a thread that claims an extent advances `fresh` only after it claimed all of it.
        for span in 0..self.tabled() {
            let meta = self.meta(span);
            if meta.state != SPLIT {
                if meta.owner == owner {
                    self.release_dead(Unit::from(span), meta, owner);
                }
                continue;
            }
            // The dead thread may have died while it split the span, or while it made it one again.
            if meta.owner == owner {
                self.finish_split(span);
            }
            for unit in (0..TILES).map(|tile| Unit::of_tile(span, tile)) {
                let meta = self.meta(unit);
                if meta.owner == owner {
                    self.release_dead(unit, meta, owner);
                }
            }
        }
        self.count_units();
    }

    /// Releases a unit that a dead thread owned as `meta`.
    fn release_dead(&self, unit: Unit, meta: Meta, owner: u64) {
        match meta.state {
            SMALL => {
                // The dead thread may have died before it marked all spans of the extent, or tiles of the slab; complete
                // that before another thread can own it.
                for rest in 1..meta.spans as usize {
                    self.entry(unit.plus(rest)).meta.store(Meta::free(REST, 0), Ordering::SeqCst);
                    fault::point();
                }
                self.disown_unit(unit, owner);
            }
            LARGE => self.free_large(unit, owner, true),
            // Claimed and not cut yet, or the end of a slab that the dead thread was freeing.
            FREE | REST if unit.tile().is_some() => self.make_free(unit, owner, true),
            _ if self.inside_large(unit.span()) => {
                self.entry(unit).meta.store(Meta::free(REST, 0), Ordering::SeqCst);
            }
            // The end of a block that the dead thread was freeing.
            REST => self.make_free(unit, owner, true),
            // The dead thread may have died before it secured the pages, or right after. As a hole the span gets pages
            // again when claimed, and `trim` gives back those it has.
            UNUSED | FREE | HOLE => {
                self.header().fresh.fetch_max(unit.span() as u64 + 1, Ordering::SeqCst);
                self.entry(unit).meta.store(Meta::free(HOLE, 0), Ordering::SeqCst);
                self.hint(0, unit.span());
            }
            _ => {}
        }
    }

    /// Counts used spans, and tiles in slabs, again: a death between a change and its count makes the counts wrong.
    fn count_units(&self) {
        let (mut used, mut tiles) = (0, [0; CLASS_COUNT]);
        for span in 0..self.fresh() {
            used += u64::from(!self.meta(span).claimable());
        }
        self.each_unit(|unit, meta| {
            if unit.tile().is_some() && meta.state == SMALL && meta.class < CLASS_COUNT {
                tiles[meta.class] += meta.spans as u32;
            }
        });
        self.header().used.store(used, Ordering::Relaxed);
        self.header().slab_tiles.iter().zip(tiles).for_each(|(counter, count)| counter.store(count, Ordering::Relaxed));
    }

    /// Makes spans findable that a death left unreachable: the rest of a block that is gone, and unowned spans with room
    /// that no hint names. No other thread may use the arena meanwhile.
    pub(in crate::arena) fn release_lost(&self, owner: u64) {
        self.each_orphan(|span| self.make_free(Unit::from(span), owner, true));
        self.publish_all_room(owner);
    }

    /// Restores what deaths hid from allocations: hints of unowned spans, and empty spans that were about to become free.
    /// Returns false if no death was recovered since the last sweep.
    ///
    /// A hint is cleared before a span is owned and set after the ownership ended, so a death in between loses it. That
    /// death is counted later, when its record is recovered; the same holds for the death of a recovering thread. A death
    /// inside this function leaves `swept` as it was, so the next sweep walks over all spans again.
    #[cold]
    pub(super) fn sweep(&self, owner: u64) -> bool {
        let header = self.header();
        let deaths = header.recoveries.load(Ordering::SeqCst);
        if header.swept.load(Ordering::SeqCst) == deaths {
            return false;
        }
        self.publish_all_room(owner);
        header.swept.store(deaths, Ordering::SeqCst);
        true
    }

    fn publish_all_room(&self, owner: u64) {
        self.each_unit(|unit, meta| {
            if meta.state == SMALL && meta.owner == 0 {
                self.publish_room(unit, meta, owner);
            } else if unit.tile().is_some() && meta.word() == Meta::free(FREE, 0) {
                self.hint(SPLIT_HINT, unit.span());
                if unit.tile() == Some(0) {
                    self.unsplit_span(unit.span(), owner);
                }
            }
        });
    }

    /// Calls `visit` with every span marked as a further span of a large block that no block reaches. Exact only while no
    /// thread allocates or frees.
    pub(in crate::arena) fn each_orphan(&self, mut visit: impl FnMut(usize)) {
        let mut end = 0;
        for span in 0..self.tabled() {
            let meta = Meta::of(self.entry(span).meta.load(Ordering::SeqCst));
            match meta.state {
                LARGE => end = span + meta.spans as usize,
                SMALL if meta.class >= LOG => end = span + meta.spans as usize,
                REST if span >= end => visit(span),
                _ => {}
            }
        }
    }

    /// Returns true if `span` belongs to the large block or extent that begins before it.
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

    /// Makes the large block at `block` shorter by one span, which then belongs to no block.
    #[cfg(test)]
    pub(in crate::arena) fn orphan_tail(&self, block: u64) {
        let Some((head, meta)) = self.head_of(block) else { return };
        self.entry(head).meta.store(Meta { spans: meta.spans - 1, ..meta }.word(), Ordering::SeqCst);
    }
}
