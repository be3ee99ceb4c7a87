//! Small blocks: spans of one class each, leased by the thread that takes blocks there.
//!
//! A block is a bit: who leases the span finds a free one and sets it. When
//! no span is free, room is sought wherever there is some, up to the arrays.

use super::{Meta, SMALL, tail_mask};
use crate::arena::class::{CUTS, LOG};
use crate::arena::seat::{INTENT_ALLOC, Seat};
use crate::arena::{Error, Inner, fault};
use std::sync::atomic::Ordering;

impl Inner {
    pub(super) fn alloc_small(&self, seat: &Seat, owner: u64, class: usize) -> Result<u64, Error> {
        loop {
            let leased = seat.leases[class].load(Ordering::Relaxed);
            if leased != 0 {
                let span = leased as usize - 1;
                if let Some(block) = self.take_block(seat, span, class) {
                    return Ok(block);
                }
                seat.leases[class].store(0, Ordering::Relaxed);
                self.drop_lease(span, owner);
            }
            match self.take_lease(owner, class) {
                Ok(span) => {
                    seat.cursors[class].store(0, Ordering::Relaxed);
                    seat.leases[class].store(span as u32 + 1, Ordering::Relaxed);
                }
                Err(error) => return self.alloc_tight(seat, owner, class).ok_or(error),
            }
        }
    }

    /// Finds a block when no span is free: in a span this thread leases and does not need, else in a larger class, else
    /// among the arrays.
    #[cold]
    fn alloc_tight(&self, seat: &Seat, owner: u64, class: usize) -> Option<u64> {
        for lease in seat.leases.iter().skip(1) {
            let leased = lease.load(Ordering::Relaxed);
            let meta = Meta::of(self.entry((leased as usize).saturating_sub(1)).meta.load(Ordering::Relaxed));
            if leased != 0 && self.is_empty(leased as usize - 1, &meta.cut()) {
                lease.store(0, Ordering::Relaxed);
                self.drop_lease(leased as usize - 1, owner);
                let span = self.take_lease(owner, class).ok()?;
                seat.cursors[class].store(0, Ordering::Relaxed);
                seat.leases[class].store(span as u32 + 1, Ordering::Relaxed);
                return self.take_block(seat, span, class);
            }
        }
        let lines = CUTS[class].block_bytes.is_multiple_of(64);
        for (larger, cut) in CUTS.iter().enumerate().skip(class + 1) {
            if lines && !cut.block_bytes.is_multiple_of(64) {
                continue;
            }
            let leased = seat.leases[larger].load(Ordering::Relaxed);
            if leased != 0
                && let Some(block) = self.take_block(seat, leased as usize - 1, larger)
            {
                return Some(block);
            }
            if let Some(span) = self.take_partial(owner, larger) {
                if leased != 0 {
                    self.drop_lease(leased as usize - 1, owner);
                }
                seat.cursors[larger].store(0, Ordering::Relaxed);
                seat.leases[larger].store(span as u32 + 1, Ordering::Relaxed);
                return self.take_block(seat, span, larger);
            }
        }
        let units = CUTS[class].block_bytes.div_ceil(64);
        let leased = &seat.leases[LOG..];
        let ours = leased.iter().map(|lease| lease.load(Ordering::Relaxed)).filter(|&leased| leased != 0);
        if let Some(block) = ours.into_iter().find_map(|leased| self.take_lines(seat, leased as usize - 1, units)) {
            return Some(block);
        }
        let span = self.take_any_log(owner, units)?;
        let before = leased[0].swap(span as u32 + 1, Ordering::Relaxed);
        if before != 0 {
            self.drop_lease(before as usize - 1, owner);
        }
        self.take_lines(seat, span, units)
    }

    /// Takes a free block of a span this thread leases.
    #[inline]
    fn take_block(&self, seat: &Seat, span: usize, class: usize) -> Option<u64> {
        let cut = &CUTS[class];
        let start = seat.cursors[class].load(Ordering::Relaxed);
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
            seat.intents[INTENT_ALLOC].store(block, Ordering::Release);
            fault::point();
            // SeqCst: pairs with the look at `meta` in `free_small`.
            word.fetch_or(1 << bit, Ordering::SeqCst);
            fault::point();
            seat.cursors[class].store(index, Ordering::Relaxed);
            return Some(block);
        }
        None
    }

    /// Leases a span of `class` with room, or a free one that it cuts for the class.
    fn take_lease(&self, owner: u64, class: usize) -> Result<usize, Error> {
        match self.try_lease(owner, class) {
            Err(_) if self.sweep(owner) => self.try_lease(owner, class),
            done => done,
        }
    }

    fn try_lease(&self, owner: u64, class: usize) -> Result<usize, Error> {
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

    /// Leases a span of `class` that nobody leases and that has room.
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
                self.drop_lease(span, owner);
            }
        }
        None
    }
}
