//! Seeing: both homes of an entry, looked at as one.
//!
//! What a processor does while it waits for memory is as much as fits its
//! queues: the fewer instructions an operation has, above all such as wait for
//! what was asked for, the more operations wait at once. And a branch that is
//! foretold wrongly ends the waiting for all behind it. So both homes are
//! compared at once, and which of them it was is no branch.

use super::{Dir, Homes, Table};
use crate::bucket::{ALL_SLOTS, Bucket, SLOTS};
use crate::wide::{self, Side};
use llds::prefetch;
use std::hint::select_unpredictable;
use std::sync::atomic::Ordering;

/// The two buckets in which an entry may lie.
pub(super) type Both<'t> = (&'t Bucket, &'t Bucket);

/// The homes of an entry, as they were seen.
#[derive(Clone, Copy)]
pub(super) struct Seen<'t> {
    pub first: Side<'t>,
    pub second: Side<'t>,
    /// A bit for each slot that may hold the entry: the low eight of the first home, the next of the second.
    pub mask: u32,
}

impl<'t> Seen<'t> {
    /// The first slot that may hold the entry, and its bucket. There must be one.
    #[inline(always)]
    pub fn found(self) -> (Side<'t>, usize) {
        let slot = self.mask.trailing_zeros() as usize;
        (pick(slot < SLOTS, self.first, self.second), slot % SLOTS)
    }

    /// The home with fewer entries.
    #[inline(always)]
    pub fn emptier(self) -> Side<'t> {
        // Slots are filled from the first on: of two numbers the smaller one has fewer bits, or those that came free later.
        pick(self.second.1.used() < self.first.1.used(), self.second, self.first)
    }

    /// Whether both headers are what they were. An acquire fence comes before.
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
    /// The homes of a remainder. Without buckets these are some lines of the arena's own.
    #[inline(always)]
    pub(super) fn both(&self, dir: Dir, remainder: u64) -> Both<'_> {
        let homes = Homes::of(remainder, dir.buckets());
        (self.bucket(dir, homes.first), self.bucket(dir, homes.second))
    }

    /// Looks at both homes.
    #[inline(always)]
    pub(super) fn see<'t>(&self, both: Both<'t>, remainder: u64, order: Ordering) -> Seen<'t> {
        let (first, second) = ((both.0, both.0.head(order)), (both.1, both.1.head(order)));
        Seen { first, second, mask: wide::matches(self.wide, first, second, remainder) }
    }

    /// A bit for each slot of one home that may hold the entry.
    #[inline(always)]
    pub(super) fn see_one(&self, side: Side<'_>, remainder: u64) -> u32 {
        wide::matches(self.wide, side, side, remainder) & ALL_SLOTS as u32
    }
}

/// Asks for what is compared in both homes.
#[inline(always)]
pub(super) fn ask_for(both: Both<'_>) {
    prefetch(both.0);
    prefetch(both.1);
}

/// Asks for the values in both homes.
#[inline(always)]
pub(super) fn ask_for_words(both: Both<'_>) {
    prefetch(&both.0.words);
    prefetch(&both.1.words);
}
