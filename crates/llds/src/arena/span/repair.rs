//! Repair: what a death left undone among the spans.
//!
//! What a dead seat held is put back when it is cleaned up. What no seat names
//! any more, a span without its hint or the torn rest of a block, is found by
//! going over all spans: when there is no room otherwise, or in an audit.

use super::{FREE, HOLE, LARGE, Meta, REST, SMALL, UNUSED};
use crate::arena::class::{CLASS_COUNT, LOG, LOG_SPANS_MAX};
use crate::arena::{Inner, fault};
use std::sync::atomic::Ordering;

impl Inner {
    /// Whether all that the table says of spans can be, whoever died: cuts, bitmaps and blocks are found by it.
    pub(in crate::arena) fn is_table_sound(&self) -> bool {
        (0..self.layout.spans).all(|span| {
            let meta = Meta::of(self.entry(span).meta.load(Ordering::SeqCst));
            let left = (self.layout.spans - span) as u64;
            match meta.state {
                UNUSED | FREE | HOLE | REST => meta.spans == 0,
                SMALL if meta.class < LOG => meta.class != 0 && meta.spans == 0,
                SMALL => meta.class < CLASS_COUNT && (1..=left.min(LOG_SPANS_MAX as u64)).contains(&meta.spans),
                LARGE => (1..=left).contains(&meta.spans),
                _ => false,
            }
        })
    }

    /// Makes the table say something else of a span.
    #[cfg(test)]
    pub(in crate::arena) fn damage(&self, span: usize, meta: u64) {
        self.entry(span).meta.store(meta, Ordering::SeqCst);
    }

    /// Puts back every span a dead seat held.
    pub(in crate::arena) fn release_spans_of(&self, owner: u64) {
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
    pub(in crate::arena) fn release_lost(&self, owner: u64) {
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
    pub(super) fn sweep(&self, owner: u64) -> bool {
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
    pub(in crate::arena) fn each_orphan(&self, mut visit: impl FnMut(usize)) {
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

    /// Makes the large block at `block` shorter by a span that nobody knows of then.
    #[cfg(test)]
    pub(in crate::arena) fn orphan_tail(&self, block: u64) {
        let Some((head, meta)) = self.head_of(block) else { return };
        self.entry(head).meta.store(Meta { spans: meta.spans - 1, ..meta }.word(), Ordering::SeqCst);
    }
}
