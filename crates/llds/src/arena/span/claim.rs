//! Claiming: a thread takes free spans, one at a time or as many adjacent ones as a large block needs.
//!
//! A span is claimed by a compare-and-swap of its `meta` word and gets its pages
//! before any thread writes to it. A lack of pages is therefore an error, not a
//! fault.

use super::give_back::{SMALL_PAGE_SPANS, count_taken};
use super::{FREE, HOLE, LARGE, Meta, REST, SpanEntry, UNUSED};
use crate::arena::class::SPAN_BYTES;
use crate::arena::layout::{PART_SPANS, TILE_TABLE_BYTES};
use crate::arena::thread_record::{INTENT_ALLOC, ThreadRecord};
use crate::arena::{Error, Inner, fault};
use std::sync::atomic::Ordering;

impl Inner {
    /// Claims a free span: one that was used before, else a fresh one. It stays in state FREE, owned by `owner`.
    pub(super) fn claim_span(&self, owner: u64) -> Result<usize, Error> {
        let words = self.fresh().div_ceil(64);
        let mut refused = None;
        for index in 0..words {
            let hints = self.hints(0, index);
            let mut bits = hints.load(Ordering::Relaxed);
            while bits != 0 {
                let bit = bits.trailing_zeros();
                bits &= bits - 1;
                let span = index * 64 + bit as usize;
                // If one hole got no pages, do not try further holes. They keep their hints.
                if refused.is_some() && Meta::of(self.entry(span).meta.load(Ordering::SeqCst)).state == HOLE {
                    continue;
                }
                hints.fetch_and(!(1 << bit), Ordering::SeqCst);
                let meta = Meta::of(self.entry(span).meta.load(Ordering::SeqCst));
                if !meta.claimable() {
                    continue;
                }
                match self.claim(span, meta, owner) {
                    Ok(true) => return Ok(span),
                    Ok(false) => {}
                    Err(error) => refused = Some(error),
                }
            }
        }
        if let Some(error) = refused {
            return Err(error);
        }
        loop {
            let span = self.fresh();
            if span >= self.layout.spans {
                return self.claim_unhinted(owner);
            }
            self.secure_parts(span + 1)?;
            let meta = Meta::of(self.entry(span).meta.load(Ordering::SeqCst));
            let claimed = meta.state == UNUSED && meta.owner == 0 && self.claim(span, meta, owner)?;
            let fresh = &self.header().fresh;
            let _ = fresh.compare_exchange(span as u64, span as u64 + 1, Ordering::SeqCst, Ordering::SeqCst);
            if claimed {
                return Ok(span);
            }
        }
    }

    /// Claims a free span that no hint names. Such spans exist: an aligned extent skipped them, a thread held them for a
    /// moment, or a thread died before it set the hint. All other free spans get hints, so that later claims find them.
    #[cold]
    fn claim_unhinted(&self, owner: u64) -> Result<usize, Error> {
        let (mut claimed, mut refused) = (None, None);
        for span in 0..self.tabled() {
            let meta = Meta::of(self.entry(span).meta.load(Ordering::SeqCst));
            if !meta.claimable() {
                continue;
            }
            if claimed.is_some() || (refused.is_some() && meta.state != FREE) {
                self.hint(0, span);
                continue;
            }
            match self.claim(span, meta, owner) {
                Ok(true) => claimed = Some(span),
                Ok(false) => {}
                Err(error) => refused = Some(error),
            }
        }
        claimed.ok_or_else(|| refused.unwrap_or_else(|| self.full()))
    }

    fn full(&self) -> Error {
        Error::Full { limit_bytes: (self.layout.spans * SPAN_BYTES) as u64 }
    }

    /// Claims `span`, seen claimable as `meta`, and allocates its pages. Returns false if another thread was quicker.
    fn claim(&self, span: usize, meta: Meta, owner: u64) -> Result<bool, Error> {
        let held = Meta { owner, ..meta };
        if !self.swap_meta(span, meta.word(), held.word()) {
            return Ok(false);
        }
        fault::point();
        if meta.state == FREE {
            self.keep_less(1);
        } else {
            let offset = self.span_offset(span) as usize;
            if span >= SMALL_PAGE_SPANS {
                self.map.make_huge(offset, SPAN_BYTES);
            }
            if span == SMALL_PAGE_SPANS && meta.state == UNUSED {
                self.map.collapse(self.span_offset(0) as usize, SMALL_PAGE_SPANS * SPAN_BYTES);
            }
            if let Err(error) = self.map.secure(offset, SPAN_BYTES) {
                // UNUSED stays UNUSED, a hole stays a hole: the next claim tries to get pages again.
                self.entry(span).meta.store(Meta { owner: 0, ..meta }.word(), Ordering::SeqCst);
                if meta.state == HOLE {
                    self.hint(0, span);
                }
                return Err(error);
            }
        }
        self.entry(span).meta.store(Meta::free(FREE, owner), Ordering::SeqCst);
        self.header().used.fetch_add(1, Ordering::Relaxed);
        count_taken();
        Ok(true)
    }

    pub(super) fn alloc_large(&self, thread: &ThreadRecord, owner: u64, count: usize) -> Result<u64, Error> {
        let start = self.claim_extent(count, 1, owner)?;
        let block = self.span_offset(start);
        thread.intents[INTENT_ALLOC].store(block, Ordering::Release);
        fault::point();
        // From here the block is allocated. Its further spans are marked by this thread, or by its recovery.
        let head = Meta { spans: count as u64, ..Meta::new(LARGE) };
        self.entry(start).meta.store(head.word(), Ordering::SeqCst);
        for span in start + 1..start + count {
            fault::point();
            self.entry(span).meta.store(Meta::free(REST, 0), Ordering::SeqCst);
        }
        Ok(block)
    }

    /// Claims `count` adjacent spans from a multiple of `align` on; they stay in state FREE, owned by `owner`.
    pub(super) fn claim_extent(&self, count: usize, align: usize, owner: u64) -> Result<usize, Error> {
        match self.try_claim_extent(count, align, owner) {
            Err(_) if self.sweep(owner) => self.try_claim_extent(count, align, owner),
            done => done,
        }
    }

    fn try_claim_extent(&self, count: usize, align: usize, owner: u64) -> Result<usize, Error> {
        let (mut start, mut refused) = (0, None);
        while start + count <= self.layout.spans {
            self.secure_parts(start + count)?;
            // Once a span got no pages, only spans that have pages qualify.
            let taken = |span: &usize| {
                let meta = Meta::of(self.entry(*span).meta.load(Ordering::Relaxed));
                !meta.claimable() || (refused.is_some() && meta.state != FREE)
            };
            let passed = match (start..start + count).rev().find(taken) {
                Some(span) => span,
                None => match self.claim_all(start, count, owner) {
                    Ok(()) => {
                        self.header().fresh.fetch_max((start + count) as u64, Ordering::SeqCst);
                        return Ok(start);
                    }
                    Err((span, error)) => {
                        refused = error.or(refused);
                        span
                    }
                },
            };
            start = (passed + 1).next_multiple_of(align);
        }
        Err(refused.unwrap_or_else(|| self.full()))
    }

    /// Claims `count` spans from `start`, or none. On failure returns the span that another thread took, or that got no
    /// pages.
    fn claim_all(&self, start: usize, count: usize, owner: u64) -> Result<(), (usize, Option<Error>)> {
        for span in start..start + count {
            let meta = Meta::of(self.entry(span).meta.load(Ordering::SeqCst));
            let claimed = if meta.claimable() { self.claim(span, meta, owner) } else { Ok(false) };
            if !matches!(claimed, Ok(true)) {
                for back in start..span {
                    self.make_free(back.into(), owner, true);
                }
                return Err((span, claimed.err()));
            }
        }
        Ok(())
    }

    /// Allocates the pages of the table and the hints of the first `spans` spans.
    fn secure_parts(&self, spans: usize) -> Result<(), Error> {
        let parts = &self.header().parts;
        let (have, need) = (parts.load(Ordering::Acquire) as usize, spans.div_ceil(PART_SPANS));
        for part in have..need {
            let bytes = PART_SPANS * size_of::<SpanEntry>();
            self.map.secure(self.layout.table + part * bytes, bytes)?;
            let (hints, bytes) = self.layout.hints_of(part);
            self.map.secure(hints, bytes)?;
            parts.fetch_max(part as u64 + 1, Ordering::SeqCst);
        }
        Ok(())
    }

    /// Allocates the pages of the table of a span's tiles.
    pub(super) fn secure_tiles(&self, span: usize) -> Result<(), Error> {
        self.map.secure(self.layout.tiles + span * TILE_TABLE_BYTES, TILE_TABLE_BYTES)
    }
}
