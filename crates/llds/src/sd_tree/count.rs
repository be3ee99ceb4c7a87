//! Counting: leaves per thread, and the tree's statistics.
//!
//! A thread with an epoch slot below `OWN_COUNTS` counts in a line that only it writes; all
//! other threads share one line. Sums are exact while no thread changes the tree.

use super::{OWN_COUNTS, SECTIONS, SdTree, header};
use crate::epoch;
use crate::line_memory::LINE_BYTES;
use crate::primitive::Ordering;

/// What the tree holds and takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Leaves.
    pub leaf_count: u64,
    /// Buckets of the static part.
    pub bucket_count: u64,
    /// Children in use.
    pub child_count: u64,
    /// Bytes of memory in use: buckets, children (free ones too) and the tree's own words.
    pub memory_bytes: u64,
    /// Leading key bits that choose the bucket in the smallest and the largest section.
    pub level_min: u32,
    /// See `level_min`.
    pub level_max: u32,
}

impl SdTree {
    /// Counts the leaves; exact while no thread changes the tree.
    pub fn len(&self) -> u64 {
        let sum = (header::COUNTS..=header::COUNT_SHARED)
            .fold(0u64, |sum, line| sum.wrapping_add(self.memory.word(line, 0).load(Ordering::Relaxed)));
        // One thread may remove leaves that another counted, so a sum of racing reads can be negative.
        if (sum as i64) < 0 { 0 } else { sum }
    }

    /// Tells whether there are no leaves.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of memory that the tree uses in total.
    pub fn memory_bytes(&self) -> u64 {
        self.stats().memory_bytes
    }

    /// Reads the tree's statistics.
    pub fn stats(&self) -> Stats {
        let bucket_count = self.shared(header::BUCKETS).load(Ordering::Relaxed);
        let children_ever = self.shared(header::CHILDREN).load(Ordering::Relaxed);
        let children_free = self.shared(header::FREE_COUNT).load(Ordering::Relaxed);
        let (mut level_min, mut level_max) = (u32::MAX, 0);
        for section in 0..SECTIONS {
            let bits = self.section_word(section).load(Ordering::Relaxed) as u32;
            level_min = level_min.min(bits);
            level_max = level_max.max(bits);
        }
        Stats {
            leaf_count: self.len(),
            bucket_count,
            child_count: children_ever.saturating_sub(children_free),
            memory_bytes: (bucket_count + children_ever + header::END) * LINE_BYTES as u64,
            level_min,
            level_max,
        }
    }

    /// The line that only this thread writes, if it has one. An epoch slot belongs to one thread until that thread ends;
    /// the next owner of the slot sees all that it wrote (release in `deregister`, acquire in `register`).
    #[inline(always)]
    pub(super) fn own_counts(&self) -> Option<u64> {
        epoch::thread_slot().filter(|&slot| slot < OWN_COUNTS).map(|slot| header::COUNTS + slot as u64)
    }

    #[inline(always)]
    pub(super) fn count_removals(&self, removals: u64) {
        if let Some(line) = self.own_counts() {
            let leaves = self.memory.word(line, 0);
            leaves.store(leaves.load(Ordering::Relaxed).wrapping_sub(removals), Ordering::Relaxed);
        } else {
            self.memory.word(header::COUNT_SHARED, 0).fetch_sub(removals, Ordering::Relaxed);
        }
    }
}
