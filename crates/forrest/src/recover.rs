//! Recovery: releases what a killed process held; and checks of a store's layout.
//!
//! A writer dies holding at most two shard locks, with at most one block
//! allocated and one unlinked (its intents). Everything it published was whole at
//! every store, so recovery decides nothing about content: it finds out which of
//! the intents happened, removes the second copy of an entry that was being
//! moved, counts again, and unlocks. Each step may be repeated, because the
//! recovering process may be killed too: it records what it does in the dead
//! thread's record, so that the next recovery continues there.

use crate::bucket::{Head, SLOTS, SlotKind};
use crate::overflow_record::OverflowRecord;
use crate::table::{Dir, EntryPosition, Homes, SHARDS, Spot, Table};
use llds::arena::DeadThread;
use llds::arena::fault::point;
use std::collections::HashSet;
use std::sync::atomic::Ordering;

/// The counts of [`crate::Store::check`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Entries.
    pub entries: u64,
    /// Entries in the first of their two home buckets.
    pub in_first_bucket: u64,
    /// Entries under their second hash.
    pub second: u64,
    /// Buckets.
    pub buckets: u64,
    /// Blocks that are allocated but neither linked nor retired; a death can leave one.
    pub lost_blocks: u64,
}

impl Table {
    /// Recovers all dead threads.
    pub fn recover_all(&self) {
        for owner in self.arena.dead_threads() {
            self.recover(owner);
        }
    }

    /// Recovers the owner of a thread record, if it is dead and no other thread recovers it.
    pub fn recover(&self, owner: u64) {
        let Some(dead) = self.arena.begin_recovery(owner) else { return };
        let held: Vec<usize> =
            (0..SHARDS).filter(|&s| self.lock_word(s).load(Ordering::Acquire) >> 48 == owner).collect();
        for &shard in &held {
            self.renew_versions(shard);
            point();
        }
        // Blocks are linked and unlinked under locks, and a recovery records its intents in the dead thread's record, not in
        // its own. So the shards locked by the dead thread tell whether its intents happened.
        let linked = |block: u64| held.iter().any(|&shard| self.is_linked(shard, block));
        let block = dead.alloc_intent();
        if block != 0 && linked(block) {
            self.arena.keep_alloc(&dead);
        } else {
            self.arena.recover_alloc(&dead);
        }
        point();
        let block = dead.retire_intent();
        if block != 0 && linked(block) {
            self.arena.keep_retire(&dead);
        } else {
            self.arena.recover_retire(&dead);
        }
        for &shard in &held {
            point();
            self.drop_second_copies(&dead, shard);
            let mut count = 0;
            self.each_in(shard, |_, _| count += 1);
            point();
            // The count without an owner: this is the unlock.
            self.lock_word(shard).store(count, Ordering::Release);
        }
        point();
        self.arena.end_recovery(dead);
    }

    /// Makes readers start over that read a value word just before the dead writer replaced it.
    fn renew_versions(&self, shard: usize) {
        let dir = self.dir(shard, Ordering::Acquire);
        for index in 0..dir.buckets() {
            let head = &self.bucket(dir, index).head;
            head.store(Head(head.load(Ordering::Relaxed)).next().0, Ordering::Release);
        }
    }

    fn is_linked(&self, shard: usize, block: u64) -> bool {
        let dir = self.dir(shard, Ordering::Acquire);
        let mut found = dir.buckets() != 0 && dir.offset() == block;
        self.each_in(shard, |place, _| found |= place.kind.is_record() && place.word == block);
        found
    }

    /// Removes the second copy of an entry that the dead writer was moving: readers see the first copy.
    ///
    /// The intent goes to the dead thread's record: after a death in here, the next recovery of that record finds the intent
    /// beside the lock under which to resolve it, and no other recovery does.
    fn drop_second_copies(&self, dead: &DeadThread<'_>, shard: usize) {
        let dir = self.dir(shard, Ordering::Acquire);
        let mut entries: Vec<(EntryPosition, u64)> = Vec::new();
        self.each_in(shard, |place, remainder| entries.push((place, remainder)));
        for &(place, remainder) in &entries {
            let (bucket, slot) = self.first_copy(dir, place, remainder);
            if (bucket, slot) == (place.bucket, place.slot) {
                continue;
            }
            let word = self.bucket(dir, bucket).words[slot].load(Ordering::Relaxed);
            // An entry that was moved unchanged has the same record in both positions.
            if place.kind.is_record() && place.word != word {
                dead.intend_retire(place.word);
                point();
                self.unlink(dir, place);
                self.arena.recover_retire(dead);
            } else {
                self.unlink(dir, place);
            }
        }
    }

    fn unlink(&self, dir: Dir, place: EntryPosition) {
        let bucket = self.bucket(dir, place.bucket);
        bucket.head.store(bucket.head(Ordering::Relaxed).without(place.slot).0, Ordering::Release);
        point();
    }

    /// The position where a reader finds the key of `place`.
    fn first_copy(&self, dir: Dir, place: EntryPosition, remainder: u64) -> (usize, usize) {
        let mut key = Vec::new();
        let word_key = match OverflowRecord::at(&self.arena, place.word).filter(|_| place.kind.is_record()) {
            Some(record) => {
                record.copy_key(&mut key);
                key.len() == 8 && place.kind == SlotKind::RECORD
            }
            None => true,
        };
        let homes = Homes::of(remainder, dir.buckets());
        for index in [homes.first, homes.second] {
            let bucket = self.bucket(dir, index);
            let used = bucket.head(Ordering::Relaxed).used();
            for slot in (0..SLOTS).filter(|slot| used >> slot & 1 == 1 && bucket.remainder(*slot) == remainder) {
                let kind = bucket.mark(slot).kind();
                let same = if kind.is_record() {
                    let record = OverflowRecord::at(&self.arena, bucket.words[slot].load(Ordering::Relaxed));
                    match record {
                        Some(record) if place.kind.is_record() => kind == place.kind && record.has_key(&key),
                        Some(record) => kind == SlotKind::RECORD && record.key_bytes == 8,
                        None => false,
                    }
                } else {
                    word_key
                };
                if same {
                    return (index, slot);
                }
            }
        }
        (place.bucket, place.slot)
    }

    /// Frees blocks, and spans without a block, that a death left unreachable. No other thread may use the store meanwhile.
    pub fn free_lost(&self) -> Result<u64, crate::Error> {
        let thread = self.thread()?;
        let lost = self.lost_blocks();
        for &block in &lost {
            self.arena.free(&thread, block);
        }
        self.arena.release_lost(&thread);
        Ok(lost.len() as u64)
    }

    fn lost_blocks(&self) -> Vec<u64> {
        let mut known: HashSet<u64> = HashSet::new();
        for shard in 0..SHARDS {
            let dir = self.dir(shard, Ordering::Acquire);
            if dir.buckets() != 0 {
                known.insert(dir.offset());
            }
            self.each_in(shard, |place, _| {
                if place.kind.is_record() {
                    known.insert(place.word);
                }
            });
        }
        self.arena.each_retired(|block| {
            known.insert(block);
        });
        let mut lost = Vec::new();
        self.arena.each_block(|block| {
            if !known.contains(&block) {
                lost.push(block);
            }
        });
        lost
    }

    /// Checks every invariant of the layout. Exact only while no thread writes.
    pub fn check(&self) -> Result<Report, String> {
        let mut report = Report::default();
        for shard in 0..SHARDS {
            let word = self.lock_word(shard).load(Ordering::Acquire);
            if word >> 48 != 0 {
                return Err(format!("shard {shard} is locked by thread {}", word >> 48));
            }
            let dir = self.dir(shard, Ordering::Acquire);
            let bytes = (dir.buckets() * crate::bucket::BUCKET_BYTES) as u64;
            if !dir.lies_in(&self.arena.data_range()) {
                return Err(format!("shard {shard} lies outside the arena"));
            }
            let is_block =
                || self.arena.block_bytes(dir.offset()) >= bytes.min(64) && self.arena.is_allocated(dir.offset());
            if dir.buckets() != 0 && !is_block() {
                return Err(format!("shard {shard} is not in a block of its own"));
            }
            report.buckets += dir.buckets() as u64;
            let mut entries = Vec::new();
            self.each_in(shard, |place, remainder| entries.push((place, remainder)));
            if entries.len() as u64 != word {
                return Err(format!("shard {shard} counts {word} entries and has {}", entries.len()));
            }
            for (place, remainder) in entries {
                self.check_entry(shard, dir, place, remainder, &mut report)?;
            }
        }
        report.lost_blocks = self.lost_blocks().len() as u64;
        match self.arena.orphan_bytes() {
            0 => Ok(report),
            bytes => Err(format!("{bytes} bytes are part of a block that is gone")),
        }
    }

    fn check_entry(
        &self,
        shard: usize,
        dir: Dir,
        place: EntryPosition,
        remainder: u64,
        report: &mut Report,
    ) -> Result<(), String> {
        let at = format!("shard {shard}, bucket {}, slot {}", place.bucket, place.slot);
        let homes = Homes::of(remainder, dir.buckets());
        if place.bucket != homes.first && place.bucket != homes.second {
            return Err(format!("{at}: its homes are {} and {}", homes.first, homes.second));
        }
        if self.first_copy(dir, place, remainder) != (place.bucket, place.slot) {
            return Err(format!("{at}: a second copy"));
        }
        if !place.kind.is_record() && place.kind.inline_length().is_none() {
            return Err(format!("{at}: unknown kind {}", place.kind.0));
        }
        if place.kind.is_record() {
            if !self.arena.is_allocated(place.word) {
                return Err(format!("{at}: its record is not allocated"));
            }
            let Some(record) = OverflowRecord::at(&self.arena, place.word) else {
                return Err(format!("{at}: its record does not fit the arena"));
            };
            let mut key = Vec::new();
            record.copy_key(&mut key);
            let second = place.kind == SlotKind::SECOND;
            let hash = if second { self.hasher.second(&key) } else { self.hasher.first(&key) };
            let spot = Spot::of(hash);
            if (spot.shard, spot.remainder) != (shard, remainder) {
                return Err(format!("{at}: its key hashes elsewhere"));
            }
            report.second += u64::from(second);
        }
        report.entries += 1;
        report.in_first_bucket += u64::from(place.bucket == homes.first);
        Ok(())
    }
}
