//! Bucket pairs: both home buckets of an entry, compared as one.
//!
//! While a processor waits for memory it executes as many later instructions as
//! fit its queues. The fewer instructions an operation has, above all those that
//! depend on the awaited load, the more operations overlap their misses. A
//! mispredicted branch discards all of that overlap. So both buckets are compared
//! in one step, and the choice between them is not a branch.

use super::{Dir, Homes, Table};
use crate::bucket::{ALL_SLOTS, Bucket, SLOTS};
use crate::wide::{self, Side};
use llds::prefetch;
use std::hint::select_unpredictable;
use std::sync::atomic::Ordering;

/// The two buckets in which an entry may lie.
pub(super) type BucketPair<'t> = (&'t Bucket, &'t Bucket);

/// The home buckets of an entry with their headers as read.
#[derive(Clone, Copy)]
pub(super) struct SeenPair<'t> {
    pub first: Side<'t>,
    pub second: Side<'t>,
    /// A bit for each slot that may hold the entry: the low eight for the first bucket, the next eight for the second.
    pub mask: u32,
}

impl<'t> SeenPair<'t> {
    /// The first slot that may hold the entry, and its bucket. There must be one.
    #[inline(always)]
    pub fn found(self) -> (Side<'t>, usize) {
        let slot = self.mask.trailing_zeros() as usize;
        (pick(slot < SLOTS, self.first, self.second), slot % SLOTS)
    }

    /// The bucket with fewer entries.
    #[inline(always)]
    pub fn emptier(self) -> Side<'t> {
        // Slots are filled from the first on, so the smaller mask has fewer bits set, or its free slots are the higher ones.
        pick(self.second.1.used() < self.first.1.used(), self.second, self.first)
    }

    /// Returns true if both headers are unchanged. The caller executes an acquire fence before.
    #[inline(always)]
    pub fn is_unchanged(self) -> bool {
        self.first.0.head(Ordering::Relaxed) == self.first.1 && self.second.0.head(Ordering::Relaxed) == self.second.1
    }
}

/// One of two, without a branch.
#[inline(always)]
fn pick<'t>(is_one: bool, one: Side<'t>, other: Side<'t>) -> Side<'t> {
    (select_unpredictable(is_one, one.0, other.0), select_unpredictable(is_one, one.1, other.1))
}

impl Table {
    /// The home buckets of a remainder. Without buckets these are lines of the arena's fixed part.
    #[inline(always)]
    pub(super) fn pair(&self, dir: Dir, remainder: u64) -> BucketPair<'_> {
        let homes = Homes::of(remainder, dir.buckets());
        (self.bucket(dir, homes.first), self.bucket(dir, homes.second))
    }

    /// Reads both headers and compares all slots.
    #[inline(always)]
    pub(super) fn seen_pair<'t>(&self, pair: BucketPair<'t>, remainder: u64, order: Ordering) -> SeenPair<'t> {
        let (first, second) = ((pair.0, pair.0.head(order)), (pair.1, pair.1.head(order)));
        SeenPair { first, second, mask: wide::matches(self.wide, first, second, remainder) }
    }

    /// A bit for each slot of one bucket that may hold the entry.
    #[inline(always)]
    pub(super) fn match_one(&self, side: Side<'_>, remainder: u64) -> u32 {
        wide::matches(self.wide, side, side, remainder) & ALL_SLOTS as u32
    }
}

/// Prefetches the compared line of both buckets.
#[inline(always)]
pub(super) fn prefetch_pair(pair: BucketPair<'_>) {
    prefetch(pair.0);
    prefetch(pair.1);
}

/// Prefetches the values of both buckets.
#[inline(always)]
pub(super) fn prefetch_values(pair: BucketPair<'_>) {
    prefetch(&pair.0.words);
    prefetch(&pair.1.words);
}
