//! Recovery: finds thread records of dead processes, releases what the threads held, and frees the records.
//!
//! The arena releases what it knows of a dead thread: spans, hazards, retired
//! blocks. Whether a block was linked or unlinked only the structure above knows,
//! so it resolves the intents in between. Every step may be repeated, because the
//! recovering process may be killed too. What is lost nevertheless, an audit finds.

use super::class::SPAN_BYTES;
use super::process_identity::Identity;
use super::thread_record::{ABANDONED, INTENT_ALLOC, INTENT_RETIRE, THREADS_MAX, ThreadRecord};
use super::{Arena, Inner, ThreadRef, fault, liveness};
use std::sync::atomic::Ordering;

/// A dead thread's record under recovery by the calling thread; [`Arena::end_recovery`] frees it.
pub struct DeadThread<'a> {
    thread: &'a ThreadRecord,
    owner: u64,
}

impl DeadThread<'_> {
    /// Returns the number the dead thread wrote into lock words.
    pub fn owner(&self) -> u64 {
        self.owner
    }

    /// Returns the block the dead thread was about to link, 0 for none.
    pub fn alloc_intent(&self) -> u64 {
        self.thread.intent(INTENT_ALLOC)
    }

    /// Returns the block the dead thread was about to unlink, 0 for none.
    pub fn retire_intent(&self) -> u64 {
        self.thread.intent(INTENT_RETIRE)
    }

    /// Records, in the dead thread's record, the intent to unlink `block`. The dead thread's own intent must be settled.
    pub fn intend_retire(&self, block: u64) {
        self.thread.intend_retire(block);
    }
}

impl Arena {
    /// Returns true if record `owner` belongs to a dead process, so that [`Arena::begin_recovery`] is due.
    pub fn is_dead(&self, owner: u64) -> bool {
        if self.inner.identity.is_none() || owner == 0 || owner > THREADS_MAX as u64 {
            return false;
        }
        let state = self.inner.record_at(owner).state.load(Ordering::Acquire);
        state != 0 && !self.inner.may_live(state)
    }

    /// Returns the numbers of all records that belong to dead processes.
    pub fn dead_threads(&self) -> Vec<u64> {
        let mut known: Vec<(u64, bool)> = Vec::new();
        (1..=self.inner.records_high())
            .filter(|&owner| {
                let state = self.inner.record_at(owner).state.load(Ordering::Acquire);
                if state == 0 || self.inner.identity.is_none() {
                    return false;
                }
                // All threads of a process die with it: ask the kernel once.
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

    /// Returns true if a living process owns or recovers any record other than through this handle.
    pub fn is_used_elsewhere(&self) -> bool {
        let registered = self.inner.registered.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        (1..=self.inner.records_high()).any(|owner| {
            let state = self.inner.record_at(owner).state.load(Ordering::Acquire);
            state != 0 && !registered.contains(&(owner as u16)) && self.inner.may_live(state)
        })
    }

    /// Begins the recovery of a dead thread's record. Returns `None` if its owner may live or another thread recovers it.
    ///
    /// The caller resolves the dead thread's locks and intents, then calls [`Arena::end_recovery`]. If the caller dies
    /// meanwhile, another recovery starts over, so each step must be repeatable.
    pub fn begin_recovery(&self, owner: u64) -> Option<DeadThread<'_>> {
        let identity = self.inner.identity?;
        let thread = self.inner.record_at(owner);
        let state = thread.state.load(Ordering::Acquire);
        if state == 0 || self.is_forked() || self.inner.may_live(state) {
            return None;
        }
        let mine = identity.recovering();
        thread.state.compare_exchange(state, mine, Ordering::SeqCst, Ordering::SeqCst).ok()?;
        fault::point();
        Some(DeadThread { thread, owner })
    }

    /// Frees the block a dead thread had taken but not linked.
    pub fn recover_alloc(&self, dead: &DeadThread<'_>) {
        let block = dead.alloc_intent();
        // Clear the intent first: another thread may take a large block as soon as it is free, and a repeated recovery
        // would free that thread's block. A death in between loses the block until the next audit.
        dead.thread.settle_alloc();
        fault::point();
        if block != 0 && self.inner.is_allocated(block) {
            self.inner.free(block, dead.owner);
        }
    }

    /// Keeps the block a dead thread had linked.
    pub fn keep_alloc(&self, dead: &DeadThread<'_>) {
        dead.thread.settle_alloc();
    }

    /// Retires the block a dead thread had unlinked, unless the dead thread retired it itself.
    pub fn recover_retire(&self, dead: &DeadThread<'_>) {
        let block = dead.retire_intent();
        let retired = self.inner.retired_blocks(dead.thread);
        let is_there = || retired.iter().any(|entry| entry.load(Ordering::Acquire) == block);
        if block != 0 && self.inner.is_allocated(block) && !is_there() {
            self.inner.retire(dead.thread, block, self.inner.block_bytes(block));
        }
        fault::point();
        dead.thread.settle_retire();
    }

    /// Keeps the block a dead thread intended to unlink and did not.
    pub fn keep_retire(&self, dead: &DeadThread<'_>) {
        dead.thread.settle_retire();
    }

    /// Ends a recovery: releases the spans, hazards and retired blocks of the dead thread, then frees its record.
    pub fn end_recovery(&self, dead: DeadThread<'_>) {
        let thread = dead.thread;
        for hazard in &thread.hazards {
            hazard.store(0, Ordering::Release);
        }
        fault::point();
        self.inner.release_spans_of(dead.owner);
        fault::point();
        self.inner.collect(thread, dead.owner);
        // Counted before the record is free: a thread that finds no dead record also sees that a sweep may be due.
        self.inner.header().recoveries.fetch_add(1, Ordering::SeqCst);
        thread.state.store(0, Ordering::SeqCst);
    }

    /// Frees spans that a death left unreachable although no block lies there, and ends an audit: afterwards
    /// [`Arena::is_audited`] holds. No other thread may use the arena meanwhile.
    pub fn release_lost(&self, thread: &ThreadRef<'_>) {
        self.inner.release_lost(thread.owner);
        let header = self.inner.header();
        header.audited.store(header.recoveries.load(Ordering::SeqCst), Ordering::SeqCst);
    }

    /// Returns true if [`Arena::release_lost`] was called since the last recovery.
    pub fn is_audited(&self) -> bool {
        let header = self.inner.header();
        header.audited.load(Ordering::SeqCst) == header.recoveries.load(Ordering::SeqCst)
    }

    /// Returns the bytes that [`Arena::release_lost`] would find in spans that are part of no block. Exact only while no
    /// thread allocates or frees.
    pub fn orphan_bytes(&self) -> u64 {
        let mut bytes = 0;
        self.inner.each_orphan(|_| bytes += SPAN_BYTES as u64);
        bytes
    }
}

impl Inner {
    /// Returns true if the process named in a record's non-zero `state` may still execute instructions.
    pub(super) fn may_live(&self, state: u64) -> bool {
        let (Some(own), Some(file)) = (self.identity, self.map.file()) else { return true };
        let process = Identity::of(state);
        if process.pid() == own.pid() || state == ABANDONED {
            return process == own;
        }
        !liveness::is_unlocked(file, self.map.inode(), process.pid())
            && liveness::may_run(process, self.header().namespaces.load(Ordering::Relaxed))
    }
}
