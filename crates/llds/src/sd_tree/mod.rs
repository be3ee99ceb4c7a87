//! The SD tree: a lock-free map from fingerprints to page numbers, one cache line per search.
//!
//! The *static* part is an array of 64-byte buckets, chosen by the leading bits of the key. The
//! *dynamic* part are the children: a bucket that overflows moves one half of its keys, those with a
//! next bit of 0 or those with a 1, to a child in another line, and so on down. On the way down each
//! key bit is used once: the leading bits choose the bucket, one bit per level the half, and the
//! leaf's tag holds the bits that come next. A search touches 1.1 to 1.3 lines on average.
//!
//! The static array with `k` leading bits lies at the memory's lines `2^k .. 2^(k+1)`: a bucket's line
//! is the key's leading bits with a one in front, so growing needs no allocation and no table. The
//! lines below the smallest array hold the tree's header, the children lie after the largest array.
//!
//! # Why it can be trusted
//!
//! A node is one control word and seven slots. *Every change of a node is one compare-and-swap of
//! its control word*, which carries a version: an insert claims a free slot, writes the leaf, and
//! commits against the version under which it found no equal key. So two inserts of one fingerprint
//! agree on one winner, although they may have picked different slots. Delete is one
//! compare-and-swap. A leaf needs no allocation and no reclamation.
//!
//! Readers write nothing, not even an epoch. They read the control word, the slots, and the
//! control word again. Versions never go back, not even when a child's line is reused, so an
//! unchanged control word proves what was read in between.
//!
//! A full node is split in three steps that any thread can finish: `MOVING` in the control word, the
//! link in place of a leaf, the new control word. The static array grows a section (1/256 of the
//! keys) at a time into the array of twice the size: a bucket is frozen, its two successors are
//! filled word by word from words that can no longer change (all helpers write the same), and `DONE`
//! is set. No thread waits for another: a thread that meets unfinished work finishes it.
//!
//! # What it does not promise
//!
//! - A tag is at most 23 bits, so a *match is probable, not certain*: with four or five leaves per bucket
//!   about one search in a million meets a leaf of another fingerprint, and with no more known bits
//!   for old leaves after each doubling, growth by 2^n makes that n/2 + 1 times as many, not 2^n.
//!   [`SdTree::get_with`] and [`SdTree::get_or_insert_with`] take a check that makes it exact, and
//!   [`Exact`](key::Exact) wraps that up for any kind of key.
//! - Keys must be spread evenly: a hash, keyed where an attacker chooses the content. If they are
//!   not, depth still ends at 8 levels below the array; after that an insert fails with [`Full`].
//! - A thread that stops in the middle of an insert holds its claimed slot, and memory unlinked
//!   meanwhile is not reused until it continues (see [`crate::epoch`]). No thread waits for it.

mod batch;
mod change;
mod child;
mod count;
mod create;
mod grow;
mod header;
pub mod key;
mod search;
mod sweep;
mod sync_points;
#[cfg(all(target_arch = "x86_64", not(loom), not(miri)))]
mod wide;
mod word;

#[cfg(test)]
mod tests;

pub use count::Stats;
pub use search::Trace;
pub use sweep::SweepCursor;
pub use word::{VALUE_BITS, VALUE_MAX};

use crate::line_memory::LineMemory;
use crate::primitive::Ordering;
use word::{Control, SLOTS};

/// Independent parts of the static array that grow one at a time.
#[cfg(all(not(loom), not(pagefold_stress)))]
const SECTION_BITS: u32 = 8;
#[cfg(all(not(loom), pagefold_stress))]
const SECTION_BITS: u32 = 2;
#[cfg(loom)]
const SECTION_BITS: u32 = 0;
const SECTIONS: u64 = 1 << SECTION_BITS;

/// Leading bits of the smallest static array; the lines below it hold the tree's header.
#[cfg(all(not(loom), not(pagefold_stress)))]
const FIRST_BITS_MIN: u32 = 8;
#[cfg(all(not(loom), pagefold_stress))]
const FIRST_BITS_MIN: u32 = 7;
#[cfg(loom)]
const FIRST_BITS_MIN: u32 = 3;

/// The largest static array: 2^31 buckets are 128 GiB and ten thousand million keys.
#[cfg(not(loom))]
const BITS_MAX: u32 = 31;
#[cfg(loom)]
const BITS_MAX: u32 = 4;

/// Doublings from the first static array to the last. With `DEPTH_MAX` it stays below the bits
/// that a leaf knows, so that every leaf can always be moved down.
const DOUBLINGS_MAX: u32 = if SLOTS == 7 { 14 } else { 10 };

/// Levels below the static array. A bucket of random keys gets this deep once in 10^16 with seven
/// slots; with three, for tests, more levels are needed.
const DEPTH_MAX: u32 = if SLOTS == 7 { 8 } else { 12 };

const _: () = assert!(DOUBLINGS_MAX + DEPTH_MAX < word::TAG_KEY_BITS);

/// Keys per static bucket, in tenths, above which the next section grows: one bucket in twenty overflows.
const LOAD_TENTHS: u64 = match SLOTS {
    7 => 40,
    // Smaller for tests: the array grows early.
    3 => 21,
    _ => 3,
};

/// The same for a dense tree: one bucket in six overflows.
const DENSE_LOAD_TENTHS: u64 = if SLOTS == 7 { 52 } else { LOAD_TENTHS };

/// Leaf counters with one writing thread each, so that counting needs no locked instruction; all other threads share one
/// more.
#[cfg(not(loom))]
const OWN_COUNTS: usize = 31;
#[cfg(loom)]
const OWN_COUNTS: usize = 0;

const _: () = assert!(header::END <= 1 << FIRST_BITS_MIN);

/// The tree cannot take the key: more keys share their leading bits than its depth allows, or
/// its address space is used up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the SD tree is full here: too many keys share their leading bits, or the address space is used up")]
pub struct Full;

/// A lock-free map from 64-bit fingerprints to 40-bit values. See the [module](self) for what it
/// is and what it does not promise.
///
/// ```
/// let tree = llds::sd_tree::SdTree::with_capacity_hint(1_000_000)?;
/// assert_eq!(tree.get_or_insert(0x1234_5678_9abc_def0, 42)?, None);
/// assert_eq!(tree.get_or_insert(0x1234_5678_9abc_def0, 43)?, Some(42));
/// assert_eq!(tree.get(0x1234_5678_9abc_def0), Some(42));
/// assert!(tree.remove(0x1234_5678_9abc_def0, 42));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct SdTree {
    memory: LineMemory,
    /// Leading bits of the smallest sections at the start.
    first_bits: u32,
    /// Sections that started with one bit more.
    ahead: u64,
    /// Leading bits beyond which no section grows.
    max_bits: u32,
    /// Keys per static bucket, in tenths, above which the next section grows.
    load_tenths: u64,
}

impl SdTree {
    fn shared(&self, word: usize) -> &crate::primitive::AtomicU64 {
        self.memory.word(header::SHARED, word)
    }

    /// The line of a section's array part: where it begins in the array of `bits` leading bits.
    fn section_start(section: u64, bits: u32) -> u64 {
        (1 << bits) | section << (bits - SECTION_BITS)
    }

    #[inline(always)]
    fn section_of(fingerprint: u64) -> u64 {
        // Two shifts, since SECTION_BITS may be 0.
        fingerprint >> 1 >> (63 - SECTION_BITS)
    }

    #[inline(always)]
    fn section_word(&self, section: u64) -> &crate::primitive::AtomicU64 {
        self.memory.word(header::SECTIONS + section / 8, (section % 8) as usize)
    }

    /// The leading bits that choose this key's bucket now.
    #[inline(always)]
    fn section_bits(&self, fingerprint: u64) -> u32 {
        self.section_word(Self::section_of(fingerprint)).load(Ordering::Acquire) as u32
    }

    /// The leading bits of a section's first array part; untouched buckets there are valid and empty.
    #[inline(always)]
    fn initial_bits(&self, section: u64) -> u32 {
        self.first_bits + u32::from(section < self.ahead)
    }

    #[inline(always)]
    fn bucket_line(fingerprint: u64, bits: u32) -> u64 {
        (1 << bits) | fingerprint >> (64 - bits)
    }

    /// The half of a node at `level` that holds the key: the key's next bit.
    #[inline(always)]
    fn half_of(fingerprint: u64, level: u32) -> usize {
        (fingerprint << level >> 63) as usize
    }
}

/// A node in its line.
impl LineMemory {
    /// A node's control word.
    #[inline(always)]
    fn control(&self, line: u64) -> &crate::primitive::AtomicU64 {
        self.word(line, 0)
    }

    /// A node's slot.
    #[inline(always)]
    fn slot(&self, line: u64, slot: usize) -> &crate::primitive::AtomicU64 {
        self.word(line, slot + 1)
    }

    /// Loads a node's control word and all that was done before it was stored.
    #[inline(always)]
    fn load_control(&self, line: u64) -> Control {
        Control(self.control(line).load(Ordering::Acquire))
    }

    /// Replaces a node's control word if it is still `old`.
    #[inline(always)]
    fn change(&self, line: u64, old: Control, new: Control) -> bool {
        self.control(line).compare_exchange(old.0, new.0, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}
