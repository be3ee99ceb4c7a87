//! Releasing: blocks are freed, ownership of units ends, and empty units become free.
//!
//! The thread that clears the last bit of an unowned unit frees the unit. While a
//! unit is owned, its owner checks that when it gives up the ownership.

use super::{LARGE, Meta, REST, SMALL, Unit, tail_mask};
use crate::arena::class::LOG;
use crate::arena::{Inner, fault};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Instant;

impl Inner {
    /// Frees a block; does nothing if none begins there. `owner` is the record of the thread for which this is done.
    pub(in crate::arena) fn free(&self, block: u64, owner: u64) {
        let Some((unit, meta)) = self.head_of(block) else {
            debug_assert!(false, "free of an offset outside the spans");
            return;
        };
        match meta.state {
            SMALL => self.free_small(block, unit, meta, owner),
            LARGE if block == self.unit_offset(unit) => self.free_large(unit, owner, true),
            _ => debug_assert!(false, "free of {block:#x} in a span of state {}", meta.state),
        }
    }

    fn free_small(&self, block: u64, unit: Unit, meta: Meta, owner: u64) {
        let class = meta.class;
        let cut = &meta.cut();
        // A caller may be wrong (a damaged file): an offset that is no block must not change a bit outside the bitmap.
        let Some(number) = self.number_of(block, unit, cut) else {
            debug_assert!(false, "free of {block:#x}, where no block begins");
            return;
        };
        let mask = 1u64 << (number % 64);
        let before = self.bitmap(unit, cut, number / 64).fetch_and(!mask, Ordering::SeqCst);
        debug_assert!(before & mask != 0, "block {block:#x} freed twice");
        if before & mask == 0 {
            return;
        }
        fault::point();
        // SeqCst, after the SeqCst clear of the bit: pairs with the fence in `disown_unit`, which orders its change of
        // `meta` before its reads of the bitmap. Either we see the unit unowned, or its former owner sees the cleared bit.
        let meta = self.meta(unit);
        if meta.state != SMALL || meta.owner != 0 || meta.class != class {
            return;
        }
        if class < LOG {
            self.hint_room(unit, class);
        }
        if before & !mask == tail_mask(cut, number / 64) && self.is_empty(unit, cut) {
            self.release_unit(unit, meta, owner);
        }
    }

    pub(super) fn free_large(&self, head: Unit, owner: u64, give_back: bool) {
        let meta = self.meta(head);
        // The block shrinks from its end, so that a death leaves a shorter block, not a torn one.
        for rest in (1..meta.spans).rev() {
            let end = head.plus(rest as usize);
            // Owned before it leaves the block, so that a recovery of this thread finds it.
            self.entry(end).meta.store(Meta::free(REST, owner), Ordering::SeqCst);
            fault::point();
            let shorter = Meta { owner, spans: rest, ..meta };
            self.entry(head).meta.store(shorter.word(), Ordering::SeqCst);
            fault::point();
            self.make_free(end, owner, give_back);
        }
        self.make_free(head, owner, give_back);
    }

    /// Frees an empty, unowned unit that was seen as `meta`, unless another thread takes it first.
    fn release_unit(&self, unit: Unit, meta: Meta, owner: u64) {
        let (cut, class) = (&meta.cut(), meta.class);
        let idle = Meta { owner: 0, ..meta };
        let held = Meta { owner, ..meta };
        self.forget(owner, unit, class);
        if !self.swap_meta(unit, idle.word(), held.word()) {
            return;
        }
        fault::point();
        // An empty unit is an empty large block.
        let empty = Meta { owner, spans: meta.spans.max(1), ..Meta::new(LARGE) };
        if !self.is_empty(unit, cut) || !self.swap_meta(unit, held.word(), empty.word()) {
            return self.disown_unit(unit, owner);
        }
        fault::point();
        if unit.tile().is_some() {
            let tiles = &self.header().slab_tiles[class];
            let less = |tiles: u32| Some(tiles.saturating_sub(meta.spans as u32));
            let _ = tiles.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        }
        let deferred = class >= LOG && self.identity.is_some();
        self.free_large(unit, owner, !deferred);
        if deferred {
            self.deferred.lock().unwrap_or_else(PoisonError::into_inner).push_back((
                Instant::now(),
                unit.span(),
                meta.spans as usize,
            ));
            self.give_back_deferred(Some(Instant::now()), owner);
        }
    }

    /// Ends the ownership of a unit if `owner` has it still, and publishes a hint if the unit has room.
    pub(in crate::arena) fn disown_unit(&self, unit: Unit, owner: u64) {
        let mut meta = self.meta(unit);
        loop {
            if meta.state != SMALL || meta.owner != owner {
                return;
            }
            fault::point();
            // Another thread may mark it as wanted, or take it back, at any time.
            if self.swap_meta(unit, meta.word(), Meta { owner: 0, wanted: false, ..meta }.word()) {
                break;
            }
            meta = self.meta(unit);
        }
        fault::point();
        // A thread that freed a block while we owned the unit left the hint to us. Pairs with the SeqCst operations in
        // `free_small`: either that thread sees `meta` without an owner, or we see its cleared bit below.
        std::sync::atomic::fence(Ordering::SeqCst);
        self.publish_room(unit, Meta { wanted: false, ..meta }, owner);
    }

    /// Makes an unowned unit findable: publishes a hint if it has room, and frees it if it is empty.
    pub(super) fn publish_room(&self, unit: Unit, meta: Meta, owner: u64) {
        let cut = &meta.cut();
        let has_room = match meta.class {
            // Less than one block of the size it was made for is not worth a hint.
            LOG.. => self.lines_left(unit.span(), cut) >= (cut.count / 32).max(1),
            _ => self.has_room(unit, cut),
        };
        if has_room {
            self.hint_room(unit, meta.class);
        }
        if self.is_empty(unit, cut) {
            self.release_unit(unit, meta, owner);
        }
    }

    /// Sets the hint that an unowned unit has room for `class`.
    fn hint_room(&self, unit: Unit, class: usize) {
        match unit.tile() {
            Some(_) => self.hint_slab(unit, class),
            None => self.hint(class, unit.span()),
        }
    }
}
