//! Reading: lookups that take no lock and write nothing, one at a time and many in flight.
//!
//! A value is valid if the bucket's header and the shard's directory entry are
//! the same before and after; the absence of a key is valid if both buckets'
//! headers are. Otherwise the reader starts over. A key of 8 bytes has a path of
//! its own ([`Table::read_word`]) that returns in two registers; what it cannot
//! decide goes to [`Table::read`].
use super::bucket_pair::{BucketPair, SeenPair, prefetch_values};
use super::{Dir, Spot, Table};
use crate::bucket::{Head, Mark, SLOTS, SlotKind};
use crate::overflow_record::OverflowRecord;
use llds::arena::ThreadRef;
use llds::prefetch;
use std::hint::select_unpredictable;
use std::sync::atomic::{Ordering, fence};

/// Receives what a reader found. May be called again if the first result proves stale.
pub trait Sink {
    /// Whether [`Sink::record`] copies the record, so that a long one must be protected meanwhile.
    const READS: bool = true;

    fn inline(&mut self, bytes: [u8; 8], length: usize);
    fn record(&mut self, record: OverflowRecord<'_>, offset: u64);
}

/// The result of [`Table::read_word`].
pub enum Probe {
    /// The value's bytes, and how many of the 8 there are.
    Inline([u8; 8], usize),
    /// There is no entry of the key.
    Missing,
    /// [`Table::read`] must decide: a record, an entry that was deleted, a change in progress.
    Unclear,
}

/// One of many lookups in flight.
#[derive(Clone, Copy)]
pub struct Lookup {
    dir: Dir,
    hash: u64,
    heads: (Head, Head),
    mask: u32,
}

impl Lookup {
    /// No lookup.
    pub const NONE: Lookup = Lookup { dir: Dir(0), hash: 0, heads: (Head(0), Head(0)), mask: 0 };

    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// What was read of both home buckets.
    #[inline(always)]
    fn seen_pair<'t>(&self, pair: BucketPair<'t>) -> SeenPair<'t> {
        SeenPair { first: (pair.0, self.heads.0), second: (pair.1, self.heads.1), mask: self.mask }
    }
}

/// A record protected by a hazard of the calling thread.
struct HazardGuard<'t> {
    thread: ThreadRef<'t>,
    hazard: usize,
}

impl Drop for HazardGuard<'_> {
    fn drop(&mut self) {
        self.thread.hazard_clear(self.hazard);
    }
}

impl Table {
    /// Looks up a key of 8 bytes with a value in the slot; the hash of such a key identifies it.
    #[inline]
    pub fn read_word(&self, hash: u64) -> Probe {
        let spot = Spot::of(hash);
        let dir = self.dir(spot.shard, Ordering::Acquire);
        if dir.buckets() == 0 {
            return Probe::Missing;
        }
        let pair = self.pair(dir, spot.remainder);
        // At most one of the two is needed; prefetching both costs less than waiting for the comparison.
        prefetch_values(pair);
        self.probe_of(spot, dir, self.seen_pair(pair, spot.remainder, Ordering::Acquire))
    }

    /// Evaluates the home buckets of a key of 8 bytes.
    #[inline(always)]
    fn probe_of(&self, spot: Spot, dir: Dir, seen: SeenPair<'_>) -> Probe {
        if seen.mask == 0 {
            let unchanged = self.is_unchanged(spot, dir, seen);
            return if unchanged { Probe::Missing } else { Probe::Unclear };
        }
        let ((bucket, head), slot) = seen.found();
        let (mark, value) = (bucket.mark(slot), bucket.words[slot].load(Ordering::Relaxed));
        // Acquire, as in `read_as`: pairs with the release fence before a writer fills a slot.
        fence(Ordering::Acquire);
        let unchanged = bucket.head(Ordering::Relaxed) == head && self.dir(spot.shard, Ordering::Relaxed) == dir;
        if mark == Mark::new(SlotKind::inline(8), spot.remainder) && unchanged {
            return Probe::Inline(value.to_ne_bytes(), 8);
        }
        Table::probe_rare(spot, mark, value, unchanged)
    }

    /// [`Table::probe_of`] for an entry of a rarer kind than an 8-byte value.
    #[cold]
    fn probe_rare(spot: Spot, mark: Mark, value: u64, unchanged: bool) -> Probe {
        match mark.kind().inline_length() {
            Some(length) if unchanged && mark.fits(spot.remainder) => Probe::Inline(value.to_ne_bytes(), length),
            _ => Probe::Unclear,
        }
    }

    /// Returns true if both home buckets, and the directory entry, are unchanged since they were read.
    #[inline(always)]
    fn is_unchanged(&self, spot: Spot, dir: Dir, seen: SeenPair<'_>) -> bool {
        fence(Ordering::Acquire);
        seen.is_unchanged() && self.dir(spot.shard, Ordering::Relaxed) == dir
    }

    /// Begins one of many lookups: prefetches the first home bucket. Useless prefetches cost many lookups more than a
    /// further step does, so the second bucket is prefetched only after the first was read.
    #[inline]
    pub fn begin_lookup(&self, hash: u64) -> Lookup {
        let spot = Spot::of(hash);
        let dir = self.dir(spot.shard, Ordering::Acquire);
        prefetch(self.pair(dir, spot.remainder).0);
        Lookup { dir, hash, ..Lookup::NONE }
    }

    /// Second step of a lookup: reads the first home bucket, and prefetches the value or the second bucket.
    #[inline]
    pub fn probe_first(&self, lookup: &mut Lookup) {
        if lookup.dir.buckets() == 0 {
            return;
        }
        let remainder = Spot::of(lookup.hash).remainder;
        let (first, second) = self.pair(lookup.dir, remainder);
        lookup.heads.0 = first.head(Ordering::Acquire);
        lookup.mask = self.match_one((first, lookup.heads.0), remainder);
        let value = std::ptr::from_ref(&first.words[lookup.mask.trailing_zeros() as usize % SLOTS]).cast();
        prefetch(select_unpredictable(lookup.mask == 0, std::ptr::from_ref(second), value));
    }

    /// Third step of a lookup: reads the second home bucket if the first had no match, and prefetches the value.
    #[inline]
    pub fn probe_second(&self, lookup: &mut Lookup) {
        if lookup.dir.buckets() == 0 {
            return;
        }
        let remainder = Spot::of(lookup.hash).remainder;
        let (first, second) = self.pair(lookup.dir, remainder);
        let is_second = lookup.mask == 0;
        let bucket = select_unpredictable(is_second, second, first);
        let head = bucket.head(Ordering::Acquire);
        let mask = self.match_one((bucket, head), remainder);
        // An entry that left the first bucket meanwhile may be in the second, which was not read then. `Head(u64::MAX)`
        // equals no header, so the lookup cannot conclude absence from it.
        let (seen, unseen) = (lookup.heads.0, Head(u64::MAX));
        lookup.heads = (select_unpredictable(is_second, seen, head), select_unpredictable(is_second, head, unseen));
        lookup.mask = mask << select_unpredictable(is_second, SLOTS, 0);
        // Without a match this prefetches a harmless line.
        prefetch(&bucket.words[mask.trailing_zeros() as usize % SLOTS]);
    }

    /// Further step of a lookup with a key of another length than 8: prefetches the record.
    #[inline]
    pub fn prefetch_record(&self, lookup: &Lookup) {
        if lookup.mask != 0 {
            let seen = lookup.seen_pair(self.pair(lookup.dir, Spot::of(lookup.hash).remainder));
            let ((bucket, _), slot) = seen.found();
            OverflowRecord::prefetch(&self.arena, bucket.words[slot].load(Ordering::Relaxed));
        }
    }

    /// Ends a lookup of a key of 8 bytes.
    #[inline]
    pub fn finish_lookup(&self, lookup: &Lookup) -> Probe {
        let spot = Spot::of(lookup.hash);
        if lookup.dir.buckets() == 0 {
            return Probe::Missing;
        }
        // The caller's code ran meanwhile, for any time: if the array is gone, its pages may be too.
        if self.dir(spot.shard, Ordering::Acquire) != lookup.dir {
            return Probe::Unclear;
        }
        self.probe_of(spot, lookup.dir, lookup.seen_pair(self.pair(lookup.dir, spot.remainder)))
    }

    /// Passes the value of `key`, with first hash `hash`, to `sink`. Returns false if there is none.
    #[inline]
    pub fn read(&self, key: &[u8], hash: u64, sink: &mut impl Sink) -> bool {
        let (found, flooded) = self.read_as(key, Spot::of(hash), SlotKind::RECORD, sink);
        found || (flooded && self.read_second(key, sink))
    }

    #[cold]
    fn read_second(&self, key: &[u8], sink: &mut impl Sink) -> bool {
        self.read_as(key, Spot::of(self.hasher.second(key)), SlotKind::SECOND, sink).0
    }

    #[inline]
    fn read_as<S: Sink>(&self, key: &[u8], spot: Spot, record_kind: SlotKind, sink: &mut S) -> (bool, bool) {
        let word = self.dir_word(spot.shard);
        let mut was_late = false;
        'again: loop {
            let dir = Dir(word.load(Ordering::Acquire));
            let buckets = dir.buckets();
            if buckets == 0 {
                return (false, dir.flooded());
            }
            let mut seen = self.seen_pair(self.pair(dir, spot.remainder), spot.remainder, Ordering::Acquire);
            while seen.mask != 0 {
                let ((bucket, head), slot) = seen.found();
                seen.mask &= seen.mask - 1;
                let mark = bucket.mark(slot);
                if !mark.fits(spot.remainder) {
                    continue;
                }
                // Pairs with the release fence before a writer fills a slot or a block: if we read a word of a later
                // use of this memory, one of the two words below has changed.
                let unchanged = || {
                    fence(Ordering::Acquire);
                    bucket.head(Ordering::Relaxed) == head && word.load(Ordering::Relaxed) == dir.0
                };
                // Acquire: a record that replaces another is linked by the release store of this word alone (`put`).
                let value = bucket.words[slot].load(Ordering::Acquire);
                if let Some(length) = mark.kind().inline_length() {
                    if key.len() != 8 || record_kind == SlotKind::SECOND {
                        continue;
                    }
                    if !unchanged() {
                        continue 'again;
                    }
                    sink.inline(value.to_ne_bytes(), length);
                    return (true, false);
                }
                if mark.kind() != record_kind {
                    continue;
                }
                let record = OverflowRecord::at(&self.arena, value);
                if S::READS
                    && let Some(long) = record.filter(OverflowRecord::is_long)
                    && let Some(_kept) = self.protect(value, was_late)
                {
                    if !unchanged() {
                        continue 'again;
                    }
                    // The record stays from here on, linked or not: the read returns the value of this instant.
                    if !long.has_key(key) {
                        continue;
                    }
                    sink.record(long, value);
                    return (true, false);
                }
                let record = record.filter(|record| record.has_key(key));
                if let Some(record) = record {
                    sink.record(record, value);
                }
                if !unchanged() {
                    was_late = true;
                    continue 'again;
                }
                if record.is_some() {
                    return (true, false);
                }
            }
            if self.is_unchanged(spot, dir, seen) {
                return (false, dir.flooded());
            }
        }
    }

    /// Sets a hazard on a record, so that it is not freed; the caller must then check that it is still linked. In a shared
    /// store the record's pages might be given back meanwhile. In a private one writers might change the bucket repeatedly
    /// while it is copied, so a reader sets the hazard there after it `was_late` once. `None` otherwise, or if the thread
    /// gets no record or has no free hazard.
    #[cold]
    fn protect(&self, record: u64, was_late: bool) -> Option<HazardGuard<'_>> {
        if !was_late && !self.arena.is_shared() {
            return None;
        }
        let thread = self.thread().ok()?;
        let hazard = thread.hazard_free()?;
        thread.hazard_set(hazard, record);
        Some(HazardGuard { thread, hazard })
    }
}
