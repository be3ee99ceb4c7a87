//! Where the tree's own words lie.
//!
//! They take the first lines, below the smallest static array, so that a tree
//! in a file is found by whoever maps it, at whatever address.

/// Line 0, hardly written: magic, geometry, `MARKED`.
pub(super) const HEAD: u64 = 0;
/// Line 1: the words below.
pub(super) const SHARED: u64 = 1;
/// The growth under way: `segment:16 | bits:8 | position:40`, plus one; 0 for none.
pub(super) const ACTIVE: usize = 0;
/// Children ever used.
pub(super) const CHILDREN: usize = 1;
/// Children to be used again: `changes:24 | line:40`.
pub(super) const FREE: usize = 2;
/// Three bags of unlinked children by epoch: `epoch:24 | line:40`.
pub(super) const LIMBO: usize = 3;
/// Buckets in the static arrays now.
pub(super) const BUCKETS: usize = 6;
/// Children in the free list.
pub(super) const FREE_COUNT: usize = 7;
/// In line 0: the epoch in which an empty child was last marked by a sweep.
pub(super) const MARKED: usize = 2;
/// A line for each thread that counts alone, and one for all others: leaves, and (of the former) inserts.
pub(super) const COUNTS: u64 = 2;
/// The line of the others.
pub(super) const COUNT_SHARED: u64 = COUNTS + super::OWN_COUNTS as u64;
/// One word per segment: leading bits that choose its buckets.
pub(super) const SEGMENTS: u64 = COUNT_SHARED + 1;
/// One word per segment: `epoch:48 | parts:16`, the array parts that are to be released, one bit each, and since when.
pub(super) const RELEASES: u64 = SEGMENTS + super::SEGMENTS.div_ceil(8);
/// A line whose first word says how far the buckets of the growth under way are taken on, as `ACTIVE`: a hint.
pub(super) const CLAIMS: u64 = RELEASES + super::SEGMENTS.div_ceil(8);
pub(super) const END: u64 = CLAIMS + 1;
