//! Small blocks: spans of one class each, owned by the thread that allocates there.
//!
//! A block is a bit: the owner of the span finds a clear one and sets it. While
//! owned spans would be a large part of the arena, threads share spans instead:
//! each owns one only for the time of an allocation. When no span is free, larger
//! classes and then log extents serve the block.

use super::{Meta, SMALL, tail_mask};
use crate::arena::class::{CUTS, LOG};
use crate::arena::thread_record::{INTENT_ALLOC, ThreadRecord};
use crate::arena::{Error, Inner, fault};
use std::sync::atomic::Ordering;

impl Inner {
    pub(super) fn alloc_small(&self, thread: &ThreadRecord, owner: u64, class: usize) -> Result<u64, Error> {
        loop {
            let owned = thread.owned_spans[class].load(Ordering::Relaxed);
            if owned != 0 {
                let span = owned as usize - 1;
                if let Some(block) = self.take_block(thread, span, class) {
                    return Ok(block);
                }
                thread.owned_spans[class].store(0, Ordering::Relaxed);
                self.disown_span(span, owner);
            }
            let shared = self.are_spans_shared(thread);
            match self.own_span(owner, class) {
                Ok(span) if shared => {
                    let block = self.take_block(thread, span, class);
                    // The intent names the block, whichever thread owns the span.
                    self.disown_span(span, owner);
                    if let Some(block) = block {
                        return Ok(block);
                    }
                }
                Ok(span) => {
                    thread.cursors[class].store(0, Ordering::Relaxed);
                    thread.owned_spans[class].store(span as u32 + 1, Ordering::Relaxed);
                }
                Err(error) => return self.alloc_tight(thread, owner, class).ok_or(error),
            }
        }
    }

    /// Returns true if this thread must not own a further span beyond an allocation: if all threads owned as many, owned
    /// spans could be more than a quarter of those in use, most of them nearly empty. A single thread shares nothing.
    fn are_spans_shared(&self, thread: &ThreadRecord) -> bool {
        let owned = thread.owned_spans[..LOG].iter().filter(|owned| owned.load(Ordering::Relaxed) != 0).count();
        let kept = self.header().kept.load(Ordering::Relaxed) as usize;
        let used = self.fresh().saturating_sub(kept);
        let threads = self.records_high() as usize;
        threads > 1 && (owned + 1) * threads > used / 4
    }

    /// Allocates a block when no span is free: in an empty span that this thread owns, else in a larger class, else in a
    /// log extent.
    #[cold]
    fn alloc_tight(&self, thread: &ThreadRecord, owner: u64, class: usize) -> Option<u64> {
        for entry in thread.owned_spans.iter().skip(1) {
            let owned = entry.load(Ordering::Relaxed);
            let meta = Meta::of(self.entry((owned as usize).saturating_sub(1)).meta.load(Ordering::Relaxed));
            if owned != 0 && self.is_empty(owned as usize - 1, &meta.cut()) {
                entry.store(0, Ordering::Relaxed);
                self.disown_span(owned as usize - 1, owner);
                let span = self.own_span(owner, class).ok()?;
                thread.cursors[class].store(0, Ordering::Relaxed);
                thread.owned_spans[class].store(span as u32 + 1, Ordering::Relaxed);
                return self.take_block(thread, span, class);
            }
        }
        let lines = CUTS[class].block_bytes.is_multiple_of(64);
        for (larger, cut) in CUTS.iter().enumerate().skip(class + 1) {
            if lines && !cut.block_bytes.is_multiple_of(64) {
                continue;
            }
            let owned = thread.owned_spans[larger].load(Ordering::Relaxed);
            if owned != 0
                && let Some(block) = self.take_block(thread, owned as usize - 1, larger)
            {
                return Some(block);
            }
            if let Some(span) = self.take_partial(owner, larger) {
                let block = self.take_block(thread, span, larger);
                // Other threads may need the rest.
                self.disown_span(span, owner);
                return block;
            }
        }
        let units = CUTS[class].block_bytes.div_ceil(64);
        let owned = &thread.owned_spans[LOG..];
        let ours = owned.iter().map(|owned| owned.load(Ordering::Relaxed)).filter(|&owned| owned != 0);
        if let Some(block) = ours.into_iter().find_map(|owned| self.take_lines(thread, owned as usize - 1, units)) {
            return Some(block);
        }
        let span = self.take_any_log(owner, units)?;
        let before = owned[0].swap(span as u32 + 1, Ordering::Relaxed);
        if before != 0 {
            self.disown_span(before as usize - 1, owner);
        }
        self.take_lines(thread, span, units)
    }

    /// Allocates a block of a span that this thread owns.
    #[inline]
    fn take_block(&self, thread: &ThreadRecord, span: usize, class: usize) -> Option<u64> {
        let cut = &CUTS[class];
        let start = thread.cursors[class].load(Ordering::Relaxed);
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
            thread.intents[INTENT_ALLOC].store(block, Ordering::Release);
            fault::point();
            // SeqCst, like the load of `meta` in `free_small`, so that a thread which frees this block later sees our `meta`.
            word.fetch_or(1 << bit, Ordering::SeqCst);
            fault::point();
            thread.cursors[class].store(index, Ordering::Relaxed);
            return Some(block);
        }
        None
    }

    /// Takes an unowned span of `class` with room, or claims a free one and cuts it for the class.
    fn own_span(&self, owner: u64, class: usize) -> Result<usize, Error> {
        match self.try_own_span(owner, class) {
            Err(_) if self.sweep(owner) => self.try_own_span(owner, class),
            done => done,
        }
    }

    fn try_own_span(&self, owner: u64, class: usize) -> Result<usize, Error> {
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

    /// Takes an unowned span of `class` that has room.
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
                self.disown_span(span, owner);
            }
        }
        None
    }
}
