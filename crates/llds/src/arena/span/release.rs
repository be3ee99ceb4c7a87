//! Releasing: blocks are freed, ownership of spans ends, and empty spans become free.
//!
//! The thread that clears the last bit of an unowned span frees the span. While a
//! span is owned, its owner checks that when it gives up the ownership.

use super::{LARGE, Meta, REST, SMALL, tail_mask};
use crate::arena::class::LOG;
use crate::arena::{Inner, fault};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Instant;

impl Inner {
    /// Frees a block; does nothing if none begins there. `owner` is the record of the thread for which this is done.
    pub(in crate::arena) fn free(&self, block: u64, owner: u64) {
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
        // A caller may be wrong (a damaged file): an offset that is no block must not change a bit outside the bitmap.
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
        // SeqCst, after the SeqCst clear of the bit: pairs with the fence in `disown_span`, which orders its store of `meta`
        // before its reads of the bitmap. Either we see the span unowned, or its former owner sees the cleared bit.
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

    pub(super) fn free_large(&self, head: usize, owner: u64, give_back: bool) {
        let meta = Meta::of(self.entry(head).meta.load(Ordering::SeqCst));
        // The block shrinks from its end, so that a death leaves a shorter block, not a torn one.
        for rest in (1..meta.spans).rev() {
            // Owned before it leaves the block, so that a recovery of this thread finds it.
            self.entry(head + rest as usize).meta.store(Meta::free(REST, owner), Ordering::SeqCst);
            fault::point();
            let shorter = Meta { owner, spans: rest, ..meta };
            self.entry(head).meta.store(shorter.word(), Ordering::SeqCst);
            fault::point();
            self.make_free(head + rest as usize, owner, give_back);
        }
        self.make_free(head, owner, give_back);
    }

    /// Frees an empty, unowned span that was seen as `meta`, unless another thread takes it first.
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
            let deferred = self.identity.is_some();
            self.free_large(span, owner, !deferred);
            if deferred {
                self.deferred.lock().unwrap_or_else(PoisonError::into_inner).push_back((
                    Instant::now(),
                    span,
                    spans as usize,
                ));
                self.give_back_deferred(Some(Instant::now()), owner);
            }
        } else if self.is_empty(span, cut) {
            self.make_free(span, owner, true);
        } else {
            self.disown_span(span, owner);
        }
    }

    /// Ends the ownership of a span, and publishes a hint if the span has room.
    pub(in crate::arena) fn disown_span(&self, span: usize, owner: u64) {
        let meta = Meta::of(self.entry(span).meta.load(Ordering::SeqCst));
        if meta.state != SMALL || meta.owner != owner {
            return;
        }
        fault::point();
        self.entry(span).meta.store(Meta { owner: 0, ..meta }.word(), Ordering::SeqCst);
        fault::point();
        // A thread that freed a block while we owned the span left the hint to us. Pairs with the SeqCst operations in
        // `free_small`: either that thread sees `meta` without an owner, or we see its cleared bit below.
        std::sync::atomic::fence(Ordering::SeqCst);
        self.publish_room(span, meta, owner);
    }

    /// Makes an unowned span findable: publishes a hint if it has room, and frees it if it is empty.
    pub(super) fn publish_room(&self, span: usize, meta: Meta, owner: u64) {
        let cut = &meta.cut();
        let has_room = match meta.class {
            // Less than one block of the size it was made for is not worth a hint.
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
}
