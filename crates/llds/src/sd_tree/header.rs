//! The header: where the tree's own words lie.
//!
//! They take the first lines, below the smallest static array, so that every
//! mapping of a tree in a file finds them, at any address.

/// Line 0, rarely written: magic, geometry, `MARKED`.
pub(super) const HEAD: u64 = 0;
/// Line 1: the words below.
pub(super) const SHARED: u64 = 1;
/// The growth under way: `section:16 | bits:8 | position:40`, plus one; 0 for none.
pub(super) const ACTIVE: usize = 0;
/// Children ever used.
pub(super) const CHILDREN: usize = 1;
/// The free list of children: `changes:24 | line:40`.
pub(super) const FREE: usize = 2;
/// Three bags of unlinked children by epoch: `epoch:24 | line:40`.
pub(super) const RETIRED: usize = 3;
/// Buckets in the static arrays now.
pub(super) const BUCKETS: usize = 6;
/// Children in the free list.
pub(super) const FREE_COUNT: usize = 7;
/// In line 0: the epoch in which an empty child was last marked by a sweep.
pub(super) const MARKED: usize = 2;
/// One line per counting slot and one that all other threads share: leaves and, in the former, inserts.
pub(super) const COUNTS: u64 = 2;
/// The shared line.
pub(super) const COUNT_SHARED: u64 = COUNTS + super::OWN_COUNTS as u64;
/// One word per section: leading bits that choose its buckets.
pub(super) const SECTIONS: u64 = COUNT_SHARED + 1;
/// One word per section: `epoch:48 | parts:16`, the array parts to be released (one bit each) and the epoch since when.
pub(super) const RELEASES: u64 = SECTIONS + super::SECTIONS.div_ceil(8);
/// A line with one word: how far helpers have claimed the buckets of the current growth, in the form of `ACTIVE`. A hint.
pub(super) const CLAIMS: u64 = RELEASES + super::SECTIONS.div_ceil(8);
pub(super) const END: u64 = CLAIMS + 1;
