//! Releasing: blocks are taken back, leases end, and spans that are empty then become free.
//!
//! Whoever clears the last bit of a span that nobody leases frees the span;
//! while it is leased that is left to the end of the lease.

use super::{LARGE, Meta, REST, SMALL, tail_mask};
use crate::arena::class::LOG;
use crate::arena::{Inner, fault};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Instant;

impl Inner {
    /// Takes a block back, and nothing if none begins there. `owner` names the seat on whose behalf.
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

    pub(super) fn free_large(&self, head: usize, owner: u64, give_back: bool) {
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
                self.give_back_late(Some(Instant::now()), owner);
            }
        } else if self.is_empty(span, cut) {
            self.make_free(span, owner, true);
        } else {
            self.drop_lease(span, owner);
        }
    }

    /// Ends a lease, and sees to it that the span is found again if it has room.
    pub(in crate::arena) fn drop_lease(&self, span: usize, owner: u64) {
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
    pub(super) fn find_again(&self, span: usize, meta: Meta, owner: u64) {
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
}
