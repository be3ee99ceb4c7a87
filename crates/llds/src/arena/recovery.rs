//! Recovery: seats whose processes died are found, cleaned up and free again.
//!
//! The arena puts back what it knows of a dead thread: spans, hazards, limbo.
//! Whether a block was linked or unlinked only the structure above can say, so
//! it decides about the intents in between. Every step bears repetition, since
//! who cleans up may be killed too. An audit finds what is lost all the same.

use super::class::SPAN_BYTES;
use super::seat::{ABANDONED, INTENT_ALLOC, INTENT_RETIRE, Identity, SEATS_MAX, Seat};
use super::{Arena, Inner, SeatRef, alive, fault};
use std::sync::atomic::Ordering;

/// A dead seat under recovery by this thread; it becomes free when dropped through [`Arena::end_recovery`].
pub struct DeadSeat<'a> {
    seat: &'a Seat,
    owner: u64,
}

impl DeadSeat<'_> {
    /// Returns the number the dead thread wrote into lock words.
    pub fn owner(&self) -> u64 {
        self.owner
    }

    /// Returns the block the dead thread was about to link, 0 for none.
    pub fn alloc_intent(&self) -> u64 {
        self.seat.intent(INTENT_ALLOC)
    }

    /// Returns the block the dead thread was about to unlink, 0 for none.
    pub fn retire_intent(&self) -> u64 {
        self.seat.intent(INTENT_RETIRE)
    }

    /// Writes down, in the dead thread's place, that `block` is about to be unlinked. Its own intent must be settled.
    pub fn intend_retire(&self, block: u64) {
        self.seat.intend_retire(block);
    }
}

impl Arena {
    /// Whether the seat numbered `owner` belongs to a process that is dead, so that [`Arena::begin_recovery`] is due.
    pub fn is_dead(&self, owner: u64) -> bool {
        if self.inner.identity.is_none() || owner == 0 || owner > SEATS_MAX as u64 {
            return false;
        }
        let state = self.inner.seat_at(owner).state.load(Ordering::Acquire);
        state != 0 && !self.inner.may_live(state)
    }

    /// Returns the numbers of all seats whose processes are dead.
    pub fn dead_seats(&self) -> Vec<u64> {
        let mut known: Vec<(u64, bool)> = Vec::new();
        (1..=self.inner.seats_high())
            .filter(|&owner| {
                let state = self.inner.seat_at(owner).state.load(Ordering::Acquire);
                if state == 0 || self.inner.identity.is_none() {
                    return false;
                }
                // Threads of one process share its fate: ask the system once.
                let process = state | 3;
                if let Some(&(_, dead)) = known.iter().find(|(other, _)| *other == process) {
                    return dead;
                }
                let dead = !self.inner.may_live(state);
                known.push((process, dead));
                dead
            })
            .collect()
    }

    /// Whether any seat is taken, or being cleaned up, by a living process other than through this handle.
    pub fn is_used_elsewhere(&self) -> bool {
        let taken = self.inner.taken.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        (1..=self.inner.seats_high()).any(|owner| {
            let state = self.inner.seat_at(owner).state.load(Ordering::Acquire);
            state != 0 && !taken.contains(&(owner as u16)) && self.inner.may_live(state)
        })
    }

    /// Begins to clean up after the dead owner of a seat. `None` if he is not dead or somebody else does it.
    ///
    /// The caller resolves the dead thread's locks and intents, then calls [`Arena::end_recovery`]. If the caller
    /// dies meanwhile, the next one starts over, so each step must bear repetition.
    pub fn begin_recovery(&self, owner: u64) -> Option<DeadSeat<'_>> {
        let identity = self.inner.identity?;
        let seat = self.inner.seat_at(owner);
        let state = seat.state.load(Ordering::Acquire);
        if state == 0 || self.is_forked() || self.inner.may_live(state) {
            return None;
        }
        let mine = identity.recovering();
        seat.state.compare_exchange(state, mine, Ordering::SeqCst, Ordering::SeqCst).ok()?;
        fault::point();
        Some(DeadSeat { seat, owner })
    }

    /// Frees the block a dead thread had taken but not linked.
    pub fn recover_alloc(&self, dead: &DeadSeat<'_>) {
        let block = dead.alloc_intent();
        // Strike out first: nothing keeps others from taking a large block again once it is free, so whoever repeated
        // this would free theirs. A death in between loses the block until the next audit.
        dead.seat.settle_alloc();
        fault::point();
        if block != 0 && self.inner.is_allocated(block) {
            self.inner.free(block, dead.owner);
        }
    }

    /// Keeps the block a dead thread had linked.
    pub fn keep_alloc(&self, dead: &DeadSeat<'_>) {
        dead.seat.settle_alloc();
    }

    /// Puts the block a dead thread had unlinked into its limbo, if it did not get there itself.
    pub fn recover_retire(&self, dead: &DeadSeat<'_>) {
        let block = dead.retire_intent();
        let limbo = self.inner.limbo(dead.seat);
        let is_there = || limbo.iter().any(|entry| entry.load(Ordering::Acquire) == block);
        if block != 0 && self.inner.is_allocated(block) && !is_there() {
            self.inner.retire(dead.seat, block, self.inner.block_bytes(block));
        }
        fault::point();
        dead.seat.settle_retire();
    }

    /// Keeps the block a dead thread had meant to unlink and did not.
    pub fn keep_retire(&self, dead: &DeadSeat<'_>) {
        dead.seat.settle_retire();
    }

    /// Ends a recovery: spans, hazards and limbo of the dead seat are put back, the seat is free.
    pub fn end_recovery(&self, dead: DeadSeat<'_>) {
        let seat = dead.seat;
        for hazard in &seat.hazards {
            hazard.store(0, Ordering::Release);
        }
        fault::point();
        self.inner.release_spans_of(dead.owner);
        fault::point();
        self.inner.collect(seat, dead.owner);
        // Counted before the seat is free: whoever finds all seats clean also finds that there may be something to sweep.
        self.inner.header().recoveries.fetch_add(1, Ordering::SeqCst);
        seat.state.store(0, Ordering::SeqCst);
    }

    /// Puts back memory that a death left where nobody finds it, though no block lies there, and ends an audit: from here
    /// [`Arena::is_audited`]. Nobody else may use the arena meanwhile.
    pub fn release_lost(&self, seat: &SeatRef<'_>) {
        self.inner.release_lost(seat.owner);
        let header = self.inner.header();
        header.audited.store(header.recoveries.load(Ordering::SeqCst), Ordering::SeqCst);
    }

    /// Whether [`Arena::release_lost`] was called since the last death was cleaned up.
    pub fn is_audited(&self) -> bool {
        let header = self.inner.header();
        header.audited.load(Ordering::SeqCst) == header.recoveries.load(Ordering::SeqCst)
    }

    /// Bytes that [`Arena::release_lost`] would find in spans that are part of no block. Exact only while nobody allocates
    /// or frees.
    pub fn orphan_bytes(&self) -> u64 {
        let mut bytes = 0;
        self.inner.each_orphan(|_| bytes += SPAN_BYTES as u64);
        bytes
    }
}

impl Inner {
    /// Whether the process named in a seat's non-zero `state` may still execute instructions.
    pub(super) fn may_live(&self, state: u64) -> bool {
        let (Some(own), Some(file)) = (self.identity, self.map.file()) else { return true };
        let process = Identity::of(state);
        if process.pid() == own.pid() || state == ABANDONED {
            return process == own;
        }
        !alive::is_unlocked(file, self.map.inode(), process.pid())
            && alive::may_run(process, self.header().namespaces.load(Ordering::Relaxed))
    }
}
