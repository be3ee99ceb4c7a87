//! Small blocks: units of one class each, owned by the thread that allocates there.
//!
//! A block is a bit: the owner of the unit finds a clear one and sets it. A thread
//! owns units up to its share of the arena, beyond which each is owned only for
//! the time of an allocation. When nothing is free, units that other threads own
//! are taken back; then larger classes and log extents serve the block.

use super::{Meta, SMALL, SPLIT, Unit, tail_mask};
use crate::arena::class::{CUTS, SPAN_BYTES, TILE_BYTES};
use crate::arena::thread_record::ThreadRecord;
use crate::arena::{Error, Inner, fault};
use std::sync::atomic::Ordering;

/// Bytes of units that a thread may own in an arena of any size.
const OWNED_BYTES: usize = 24 << 10;

impl Inner {
    pub(super) fn alloc_small(&self, thread: &ThreadRecord, owner: u64, class: usize) -> Result<u64, Error> {
        loop {
            if let Some(unit) = Unit::listed(&thread.owned_spans[class], Ordering::Relaxed) {
                if let Some(block) = self.take_block(thread, owner, unit, class) {
                    return Ok(block);
                }
                self.disown(thread, owner, class);
            }
            let room = self.share_left(thread);
            match self.own_unit(owner, class, room) {
                Ok(unit) if self.meta(unit).bytes() <= room => {
                    thread.cursors[class].store(0, Ordering::Relaxed);
                    unit.list(thread, class);
                }
                Ok(unit) => {
                    if let Some(block) = self.take_one(thread, owner, unit, class) {
                        return Ok(block);
                    }
                }
                Err(error) => return self.alloc_tight(thread, owner, class).ok_or(error),
            }
        }
    }

    /// Returns the bytes of units that this thread may own in addition: all units that threads own, most of them partly
    /// empty, are at most a quarter of the used spans, or [`OWNED_BYTES`] for each thread.
    fn share_left(&self, thread: &ThreadRecord) -> usize {
        let owned = thread.owned_bytes.load(Ordering::Relaxed) as usize;
        let threads = (self.records_high() as usize).max(1);
        (self.used() * SPAN_BYTES / 4 / threads).max(OWNED_BYTES).saturating_sub(owned)
    }

    /// Allocates a block when nothing is free: in what other threads own, else in a larger class, else in a log extent.
    #[cold]
    fn alloc_tight(&self, thread: &ThreadRecord, owner: u64, class: usize) -> Option<u64> {
        self.relieve(thread, owner);
        if let Some(block) =
            self.own_unit(owner, class, 0).ok().and_then(|unit| self.take_one(thread, owner, unit, class))
        {
            return Some(block);
        }
        let lines = CUTS[class].block_bytes.is_multiple_of(64);
        for (larger, cut) in CUTS.iter().enumerate().skip(class + 1) {
            if lines && !cut.block_bytes.is_multiple_of(64) {
                continue;
            }
            let block = self.take_partial(owner, larger).and_then(|unit| self.take_one(thread, owner, unit, larger));
            if block.is_some() {
                return block;
            }
        }
        let units = CUTS[class].block_bytes.div_ceil(64);
        let span = self.take_any_log(owner, units)?;
        let block = self.take_lines(thread, owner, span, units);
        self.disown_unit(Unit::from(span), owner);
        block
    }

    /// Allocates a block of a unit that this thread owns for this once: the intent names the block, whichever thread owns
    /// the unit.
    fn take_one(&self, thread: &ThreadRecord, owner: u64, unit: Unit, class: usize) -> Option<u64> {
        let block = self.take_block(thread, owner, unit, class);
        self.disown_unit(unit, owner);
        block
    }

    /// Allocates a block of a unit that this thread owns. `None` if it has no room, or was taken back.
    #[inline]
    fn take_block(&self, thread: &ThreadRecord, owner: u64, unit: Unit, class: usize) -> Option<u64> {
        let meta = Meta::of(self.entry(unit).meta.load(Ordering::Relaxed));
        if !meta.is_owned(class, owner) {
            return None;
        }
        let cut = meta.small_cut();
        let cursor = thread.cursors[class].load(Ordering::Relaxed);
        let start = if cursor < cut.words { cursor } else { 0 };
        for step in 0..cut.words {
            let index = if start + step < cut.words { start + step } else { start + step - cut.words };
            let word = self.bitmap(unit, cut, index);
            let bits = word.load(Ordering::Relaxed);
            if bits == u64::MAX {
                continue;
            }
            let bit = bits.trailing_ones();
            let number = u64::from(index * 64 + bit);
            let block = self.unit_offset(unit) + u64::from(cut.first) + number * u64::from(cut.block_bytes);
            if !self.announce(thread, unit, meta, block) {
                return None;
            }
            // SeqCst, like the load of `meta` in `free_small`, so that a thread which frees this block later sees our
            // `meta`.
            word.fetch_or(1 << bit, Ordering::SeqCst);
            fault::point();
            thread.cursors[class].store(index, Ordering::Relaxed);
            return Some(block);
        }
        None
    }

    /// Takes an unowned unit of `class` with room, or claims a free one and cuts it for the class.
    fn own_unit(&self, owner: u64, class: usize, room: usize) -> Result<Unit, Error> {
        match self.try_own_unit(owner, class, room) {
            Err(_) if self.sweep(owner) => self.try_own_unit(owner, class, room),
            done => done,
        }
    }

    fn try_own_unit(&self, owner: u64, class: usize, room: usize) -> Result<Unit, Error> {
        if let Some(unit) = self.take_partial(owner, class) {
            return Ok(unit);
        }
        // A class gets a whole span once it has filled slabs of as many tiles.
        let tiles = self.header().slab_tiles[class].load(Ordering::Relaxed) as usize;
        if room >= SPAN_BYTES
            && tiles * TILE_BYTES >= SPAN_BYTES
            && let Ok(unit) = self.own_span(owner, class)
        {
            return Ok(unit);
        }
        self.own_slab(owner, class).or_else(|_| self.own_span(owner, class))
    }

    /// Claims a free span and cuts it for `class`.
    fn own_span(&self, owner: u64, class: usize) -> Result<Unit, Error> {
        let unit = Unit::from(self.claim_span(owner)?);
        let cut = &CUTS[class];
        for index in 0..cut.words {
            self.bitmap(unit, cut, index).store(tail_mask(cut, index), Ordering::Relaxed);
        }
        fault::point();
        self.entry(unit).meta.store(Meta { class, owner, ..Meta::new(SMALL) }.word(), Ordering::SeqCst);
        Ok(unit)
    }

    /// Takes an unowned unit of `class` that has room.
    fn take_partial(&self, owner: u64, class: usize) -> Option<Unit> {
        for index in 0..self.fresh().div_ceil(64) {
            let hints = self.hints(class, index);
            let mut bits = hints.load(Ordering::Relaxed);
            while bits != 0 {
                let bit = bits.trailing_zeros();
                bits &= bits - 1;
                let span = index * 64 + bit as usize;
                if self.meta(span).state == SPLIT {
                    if let Some(unit) = self.take_partial_slab(span, owner, class) {
                        return Some(unit);
                    }
                    continue;
                }
                hints.fetch_and(!(1 << bit), Ordering::SeqCst);
                if self.take_with_room(Unit::from(span), owner, class) {
                    return Some(Unit::from(span));
                }
                // Its slabs, if it was split meanwhile: another thread may have seen the hint that we cleared.
                if self.meta(span).state == SPLIT {
                    self.hint(class, span);
                }
            }
        }
        None
    }

    /// Takes a unit of `class` if it is unowned and has room.
    pub(super) fn take_with_room(&self, unit: Unit, owner: u64, class: usize) -> bool {
        fault::point();
        let meta = self.meta(unit);
        if !meta.is_owned(class, 0) || !self.swap_meta(unit, meta.word(), Meta { owner, ..meta }.word()) {
            return false;
        }
        fault::point();
        let has_room = self.has_room(unit, meta.small_cut());
        if !has_room {
            self.disown_unit(unit, owner);
        }
        has_room
    }
}
