//! Split spans: cut into tiles, of which slabs hold blocks of one class each.
//!
//! A class of which an arena holds little takes a slab of some tiles, not a span.
//! The tiles of a span that is not split are in state UNUSED, so that a thread
//! which looks at them late claims none. A split span whose tiles are all free
//! becomes a free span.

use super::{FREE, Meta, REST, SMALL, SPLIT, SpanEntry, UNUSED, Unit, tail_mask};
use crate::arena::class::{SLAB_TILES, TILES};
use crate::arena::layout::{SPLIT_HINT, TILE_TABLE_BYTES};
use crate::arena::{Error, Inner, fault};
use std::sync::atomic::{AtomicU64, Ordering};

impl Inner {
    /// Claims free tiles, and cuts them for `class`. The slab is owned by `owner`.
    pub(super) fn own_slab(&self, owner: u64, class: usize) -> Result<Unit, Error> {
        loop {
            if let Some(head) = self.find_slab(owner, class) {
                return Ok(head);
            }
            let span = self.claim_span(owner)?;
            // Pages of a span take a while to come. All threads that found no tiles meanwhile would split one each.
            if let Some(head) = self.find_slab(owner, class) {
                self.make_free(Unit::from(span), owner, true);
                return Ok(head);
            }
            self.split_span(span, owner)?;
        }
    }

    /// Claims free tiles of the spans that are split already, and cuts them for `class`.
    fn find_slab(&self, owner: u64, class: usize) -> Option<Unit> {
        for index in 0..self.fresh().div_ceil(64) {
            let mut bits = self.hints(SPLIT_HINT, index).load(Ordering::Relaxed);
            while bits != 0 {
                let span = index * 64 + bits.trailing_zeros() as usize;
                bits &= bits - 1;
                if let Some(head) = self.claim_tiles(span, SLAB_TILES[class], owner) {
                    self.cut_slab(head, class, owner);
                    return Some(head);
                }
                self.hint_no_tiles(span);
            }
        }
        None
    }

    /// Claims `count` adjacent free tiles of a split span; they stay in state FREE, owned by `owner`.
    fn claim_tiles(&self, span: usize, count: usize, owner: u64) -> Option<Unit> {
        if !self.is_split(span) {
            return None;
        }
        let (idle, held) = (Meta::free(FREE, 0), Meta::free(FREE, owner));
        let mut start = 0;
        while start + count <= TILES {
            let tile = |index: usize| Unit::of_tile(span, index);
            let is_taken = |index: &usize| self.entry(tile(*index)).meta.load(Ordering::Relaxed) != idle;
            if let Some(taken) = (start..start + count).rev().find(is_taken) {
                start = taken + 1;
                continue;
            }
            let Some(lost) = (start..start + count).find(|&index| !self.swap_meta(tile(index), idle, held)) else {
                fault::point();
                return Some(tile(start));
            };
            // Another thread was quicker.
            (start..lost).for_each(|index| self.entry(tile(index)).meta.store(idle, Ordering::SeqCst));
            start = lost + 1;
        }
        None
    }

    /// Cuts claimed tiles from `head` on for `class`.
    fn cut_slab(&self, head: Unit, class: usize, owner: u64) {
        let tiles = SLAB_TILES[class];
        let meta = Meta { class, owner, spans: tiles as u64, ..Meta::new(SMALL) };
        let cut = meta.small_cut();
        for index in 0..cut.words {
            self.bitmap(head, cut, index).store(tail_mask(cut, index), Ordering::Relaxed);
        }
        fault::point();
        // Head first: from here on every reader of the table counts the other tiles to this slab.
        self.entry(head).meta.store(meta.word(), Ordering::SeqCst);
        for rest in 1..tiles {
            fault::point();
            self.entry(head.plus(rest)).meta.store(Meta::free(REST, 0), Ordering::SeqCst);
        }
        self.header().slab_tiles[class].fetch_add(tiles as u32, Ordering::Relaxed);
    }

    /// Takes an unowned slab of `class` with room in a split span. The hint stays until the span has no such slab.
    pub(super) fn take_partial_slab(&self, span: usize, owner: u64, class: usize) -> Option<Unit> {
        while let Some(tile) = self.tile_with_room(span, class) {
            // Cleared first, and set again when the slab is disowned with room.
            self.swap_tile_class(span, tile, class, 0);
            let unit = Unit::of_tile(span, tile);
            if self.take_with_room(unit, owner, class) {
                return Some(unit);
            }
        }
        self.unhint(class, span, || self.tile_with_room(span, class).is_some());
        None
    }

    /// Sets the hint that a slab has room for `class`.
    pub(super) fn hint_slab(&self, unit: Unit, class: usize) {
        let (span, tile) = (unit.span(), unit.tile().unwrap_or(0));
        let word = self.tile_classes(span, tile / 8).load(Ordering::SeqCst);
        let found = (word >> (tile % 8 * 8)) & 0xff;
        if found != class as u64 {
            self.swap_tile_class(span, tile, found as usize, class);
        }
        self.hint(class, span);
    }

    /// Returns a tile of which the hints say that a slab begins there with room for `class`.
    fn tile_with_room(&self, span: usize, class: usize) -> Option<usize> {
        const ONES: u64 = u64::MAX / 255;
        (0..TILES / 8).find_map(|index| {
            // A byte of `other` is zero where the class is `class`; the lowest such byte is found exactly.
            let other = self.tile_classes(span, index).load(Ordering::SeqCst) ^ (class as u64 * ONES);
            let zeros = other.wrapping_sub(ONES) & !other & (ONES << 7);
            (zeros != 0).then(|| index * 8 + zeros.trailing_zeros() as usize / 8)
        })
    }

    /// Changes the hint of a tile from one class to another; 0 is none.
    fn swap_tile_class(&self, span: usize, tile: usize, from: usize, to: usize) {
        let flip = ((from ^ to) as u64) << (tile % 8 * 8);
        let is_from = |word: u64| ((word >> (tile % 8 * 8)) & 0xff == from as u64).then_some(word ^ flip);
        // Another thread has changed the hint of this tile: it is as good.
        let _ = self.tile_classes(span, tile / 8).fetch_update(Ordering::SeqCst, Ordering::Relaxed, is_from);
    }

    /// Returns eight bytes: for each of eight tiles the class for which a slab that begins there may have room.
    fn tile_classes(&self, span: usize, index: usize) -> &AtomicU64 {
        let entries = TILES * size_of::<SpanEntry>();
        self.word((self.layout.tiles + span * TILE_TABLE_BYTES + entries + index * 8) as u64)
    }

    pub(super) fn is_split(&self, span: usize) -> bool {
        self.entry(span).meta.load(Ordering::SeqCst) == Meta::new(SPLIT).word()
    }

    /// Clears the hint that a split span has free tiles, if it has none.
    fn hint_no_tiles(&self, span: usize) {
        let has_free = || {
            let is_free = |tile| self.entry(Unit::of_tile(span, tile)).meta.load(Ordering::SeqCst);
            self.is_split(span) && (0..TILES).any(|tile| is_free(tile) == Meta::free(FREE, 0))
        };
        if !has_free() {
            self.unhint(SPLIT_HINT, span, has_free);
        }
    }

    /// Splits a span that `owner` has claimed; makes it free where that fails.
    fn split_span(&self, span: usize, owner: u64) -> Result<(), Error> {
        if let Err(error) = self.secure_tiles(span) {
            self.make_free(Unit::from(span), owner, true);
            return Err(error);
        }
        self.entry(span).meta.store(Meta { owner, ..Meta::new(SPLIT) }.word(), Ordering::SeqCst);
        fault::point();
        self.finish_split(span);
        Ok(())
    }

    /// Makes the unused tiles of a split span free, and the span usable by all threads.
    pub(super) fn finish_split(&self, span: usize) {
        for tile in 0..TILES {
            let meta = &self.entry(Unit::of_tile(span, tile)).meta;
            if Meta::of(meta.load(Ordering::SeqCst)).state == UNUSED {
                meta.store(Meta::free(FREE, 0), Ordering::SeqCst);
            }
        }
        fault::point();
        self.entry(span).meta.store(Meta::new(SPLIT).word(), Ordering::SeqCst);
        fault::point();
        self.hint(SPLIT_HINT, span);
    }

    /// Makes a tile free, and its span too if that was the last one in use.
    pub(super) fn free_tile(&self, unit: Unit, owner: u64) {
        self.entry(unit).meta.store(Meta::free(FREE, 0), Ordering::SeqCst);
        fault::point();
        self.hint(SPLIT_HINT, unit.span());
        self.unsplit_span(unit.span(), owner);
    }

    /// Makes a split span free if all its tiles are.
    pub(super) fn unsplit_span(&self, span: usize, owner: u64) {
        let tile = |index: usize| Unit::of_tile(span, index);
        let idle = Meta::free(FREE, 0);
        if (0..TILES).any(|index| self.entry(tile(index)).meta.load(Ordering::Relaxed) != idle) {
            return;
        }
        let held = Meta { owner, ..Meta::new(SPLIT) };
        if !self.swap_meta(span, Meta::new(SPLIT).word(), held.word()) {
            return;
        }
        fault::point();
        // A thread that claims a tile now keeps the span split.
        let is_whole = (0..TILES).all(|index| self.swap_meta(tile(index), idle, Meta::free(UNUSED, 0)));
        fault::point();
        if is_whole {
            self.make_free(Unit::from(span), owner, true);
            self.give_back_small(span, owner);
        } else {
            self.finish_split(span);
        }
    }
}
