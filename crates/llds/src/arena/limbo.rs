//! Limbo: blocks that were unlinked wait in their seat until no hazard names them.
//!
//! A seat's limbo is as large as all hazards of all seats and some more, so
//! there is always room, and what stuck readers can hold is bounded.

use super::class::SPAN_BYTES;
use super::seat::{COLLECT_EVERY, Identity, Seat};
use super::{Arena, Inner, SeatRef, fault};
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Instant;

impl Arena {
    /// Takes back a block that was just unlinked, as soon as no guard reads it, and strikes out the intent.
    #[inline]
    pub fn retire(&self, seat: &SeatRef<'_>, block: u64) {
        self.retire_sized(seat, block, self.inner.block_bytes(block));
    }

    /// Takes a block back as [`Arena::retire`] does, when the caller knows its size (log blocks do not tell theirs).
    #[inline]
    pub fn retire_sized(&self, seat: &SeatRef<'_>, block: u64, bytes: u64) {
        self.inner.retire(seat, block, bytes);
        fault::point();
        seat.settle_retire();
        let count = seat.retired.load(Ordering::Relaxed);
        // A small arena must not be full of what waits here.
        let bytes_max = (1 << 20).min((self.inner.layout.spans * SPAN_BYTES / 64) as u64);
        if count >= COLLECT_EVERY || seat.retired_bytes.load(Ordering::Relaxed) > bytes_max {
            self.inner.collect(seat, seat.owner);
            self.inner.give_back_late(Some(Instant::now()), seat.owner);
        }
    }

    /// Frees what this thread retired and nobody reads.
    pub fn collect(&self, seat: &SeatRef<'_>) {
        self.inner.collect(seat, seat.owner);
    }

    /// Frees what threads retired that have ended since, while guards read it, and that nobody reads any more.
    pub fn collect_left(&self) {
        let inner = &self.inner;
        let mine = inner.identity.map_or(1, Identity::taken);
        for owner in 1..=inner.seats_high() {
            let seat = inner.seat_at(owner);
            let is_left = seat.state.load(Ordering::Acquire) == 0 && !inner.limbo(seat).is_empty();
            // Ours for a moment: whoever sits there collects himself.
            if is_left && seat.state.compare_exchange(0, mine, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
                inner.collect(seat, owner);
                seat.state.store(0, Ordering::SeqCst);
            }
        }
    }

    /// Calls `visit` with every block in any limbo.
    pub fn each_retired(&self, mut visit: impl FnMut(u64)) {
        for owner in 1..=self.inner.seats_high() {
            for entry in self.inner.limbo(self.inner.seat_at(owner)) {
                let block = entry.load(Ordering::Acquire);
                if block != 0 {
                    visit(block);
                }
            }
        }
    }
}

impl Inner {
    pub(super) fn limbo<'a>(&self, seat: &'a Seat) -> &'a [AtomicU64] {
        let high = (seat.limbo_high.load(Ordering::Acquire) as usize).min(seat.limbo.len());
        &seat.limbo[..high]
    }

    #[inline]
    pub(super) fn retire(&self, seat: &Seat, block: u64, bytes: u64) {
        let bytes = seat.retired_bytes.load(Ordering::Relaxed) + bytes;
        // New entries go above the old ones; `collect` lowers the mark. There is always room: see `LIMBO`.
        let mut index = seat.limbo_high.load(Ordering::Relaxed) as usize;
        if index >= seat.limbo.len() {
            index = seat.limbo.iter().position(|entry| entry.load(Ordering::Relaxed) == 0).unwrap_or(0);
        }
        seat.limbo[index].store(block, Ordering::Release);
        fault::point();
        seat.limbo_high.fetch_max(index as u64 + 1, Ordering::AcqRel);
        seat.retired_bytes.store(bytes, Ordering::Relaxed);
        seat.retired.store(seat.retired.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// Strikes out of a limbo, in which nobody writes, what is no block: only damage puts it there.
    pub(super) fn strike_out_strays(&self, seat: &Seat) {
        for entry in self.limbo(seat) {
            let block = entry.load(Ordering::Relaxed);
            if block != 0 && !self.is_allocated(block) {
                entry.store(0, Ordering::Relaxed);
            }
        }
    }

    /// Frees the blocks in `seat`'s limbo that no hazard names.
    pub(super) fn collect(&self, seat: &Seat, owner: u64) {
        seat.retired.store(0, Ordering::Relaxed);
        seat.retired_bytes.store(0, Ordering::Relaxed);
        if self.limbo(seat).is_empty() {
            return;
        }
        // Pairs with the fence in `hazard_set`: a reader whose hazard we miss will see our unlinking.
        fence(Ordering::SeqCst);
        let mut read: Vec<u64> = Vec::new();
        for other in 1..=self.seats_high() {
            let other = self.seat_at(other);
            if other.state.load(Ordering::Relaxed) != 0 {
                read.extend(other.hazards.iter().map(|hazard| hazard.load(Ordering::Acquire)).filter(|&b| b != 0));
            }
        }
        read.sort_unstable();
        let mut high = 0;
        for (index, entry) in self.limbo(seat).iter().enumerate() {
            let block = entry.load(Ordering::Relaxed);
            if block == 0 {
                continue;
            }
            if read.binary_search(&block).is_ok() {
                high = index as u64 + 1;
                continue;
            }
            // Strike out first: a death in between loses the block until the next audit, and never frees it twice.
            entry.store(0, Ordering::SeqCst);
            fault::point();
            self.free(block, owner);
        }
        seat.limbo_high.store(high, Ordering::Release);
    }
}
