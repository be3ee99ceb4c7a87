//! Claiming: free spans become somebody's, one at a time or as many neighbours as a large block needs.
//!
//! A span is claimed by a compare-and-swap of its `meta` word and gets its
//! pages before anybody writes to it; where there are none, that is an error
//! and not a fault.

use super::give_back::count_taken;
use super::{FREE, HOLE, LARGE, Meta, REST, UNUSED};
use crate::arena::class::SPAN_BYTES;
use crate::arena::seat::{INTENT_ALLOC, Seat};
use crate::arena::{Error, Inner, fault};
use std::sync::atomic::Ordering;

impl Inner {
    /// Takes a free span: one that was used before, else a fresh one. It stays in state FREE under `owner`.
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
                // One hole that gets no pages is asked for all of them. It keeps its hint.
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
            let meta = Meta::of(self.entry(span).meta.load(Ordering::SeqCst));
            let claimed = meta.state == UNUSED && meta.owner == 0 && self.claim(span, meta, owner)?;
            let fresh = &self.header().fresh;
            let _ = fresh.compare_exchange(span as u64, span as u64 + 1, Ordering::SeqCst, Ordering::SeqCst);
            if claimed {
                return Ok(span);
            }
        }
    }

    /// Takes a free span that no hint names: an aligned extent passed over it, somebody held it only for a moment, or he
    /// died before he hinted. All others get their hints, so that the next claims need not look everywhere.
    #[cold]
    fn claim_unhinted(&self, owner: u64) -> Result<usize, Error> {
        let (mut claimed, mut refused) = (None, None);
        for span in 0..self.layout.spans {
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

    /// Takes `span`, seen claimable as `meta`, and makes sure it has pages. False if somebody else was quicker.
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
            self.map.make_huge(offset, SPAN_BYTES);
            if let Err(error) = self.map.secure(offset, SPAN_BYTES) {
                // UNUSED stays UNUSED, a hole stays a hole: the next try asks for pages again.
                self.entry(span).meta.store(Meta { owner: 0, ..meta }.word(), Ordering::SeqCst);
                if meta.state == HOLE {
                    self.hint(0, span);
                }
                return Err(error);
            }
        }
        self.entry(span).meta.store(Meta::free(FREE, owner), Ordering::SeqCst);
        count_taken();
        Ok(true)
    }

    pub(super) fn alloc_large(&self, seat: &Seat, owner: u64, count: usize) -> Result<u64, Error> {
        let start = self.claim_extent(count, 1, owner)?;
        let block = self.span_offset(start);
        seat.intents[INTENT_ALLOC].store(block, Ordering::Release);
        fault::point();
        // From here the block is given out; the rest of its spans follow, by us or by our recoverer.
        let head = Meta { state: LARGE, class: 0, owner: 0, spans: count as u64 };
        self.entry(start).meta.store(head.word(), Ordering::SeqCst);
        for span in start + 1..start + count {
            fault::point();
            self.entry(span).meta.store(Meta::free(REST, 0), Ordering::SeqCst);
        }
        Ok(block)
    }

    /// Claims `count` neighbouring spans from a multiple of `align` on; they stay in state FREE under `owner`.
    pub(super) fn claim_extent(&self, count: usize, align: usize, owner: u64) -> Result<usize, Error> {
        match self.try_claim_extent(count, align, owner) {
            Err(_) if self.sweep(owner) => self.try_claim_extent(count, align, owner),
            done => done,
        }
    }

    fn try_claim_extent(&self, count: usize, align: usize, owner: u64) -> Result<usize, Error> {
        let (mut start, mut refused) = (0, None);
        while start + count <= self.layout.spans {
            // Once there were no pages for one, only spans that have theirs will do.
            let taken = |span: &usize| {
                let meta = Meta::of(self.entry(*span).meta.load(Ordering::Relaxed));
                !meta.claimable() || (refused.is_some() && meta.state != FREE)
            };
            let passed = match (start..start + count).rev().find(taken) {
                Some(span) => span,
                None => match self.claim_run(start, count, owner) {
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

    /// Claims `count` spans from `start`, or none of them and returns the one that was taken by somebody else, or for
    /// which there are no pages.
    fn claim_run(&self, start: usize, count: usize, owner: u64) -> Result<(), (usize, Option<Error>)> {
        for span in start..start + count {
            let meta = Meta::of(self.entry(span).meta.load(Ordering::SeqCst));
            let claimed = if meta.claimable() { self.claim(span, meta, owner) } else { Ok(false) };
            if !matches!(claimed, Ok(true)) {
                for back in start..span {
                    self.make_free(back, owner, true);
                }
                return Err((span, claimed.err()));
            }
        }
        Ok(())
    }
}
