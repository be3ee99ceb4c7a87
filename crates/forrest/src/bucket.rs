//! The bucket: eight entries in two cache lines.
//!
//! ```text
//! word 0      header: 8 bits, one for each slot in use | 56 bits version
//! word 1      marks of the eight slots: 4 bits kind | highest 4 bits of the remainder
//! word 2, 3   next 16 bits of the eight remainders
//! word 4..8   low 32 bits of the eight remainders
//! word 8..16  the eight values, or offsets of records
//! ```
//!
//! A *remainder* is the low 52 bits of the key's 64-bit hash; the high 12 bits
//! are the number of the shard the bucket belongs to, so the full hash is
//! compared although less of it is stored. All that a search compares lies in
//! the first line.
//!
//! Readers take no lock: they read the header, then what they need, then the
//! header again. A writer (there is one per shard at a time) therefore
//! *publishes* by one store of the header with a higher version: an entry is
//! there, gone, or another, at that store. Only the value word of an entry
//! that keeps its kind is overwritten in place, by one store as well.

use crate::primitive::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

/// Entries of a bucket.
pub const SLOTS: usize = 8;

/// Bytes of a bucket.
pub const BUCKET_BYTES: usize = 128;

/// Low bits of a hash that a bucket stores.
pub const REMAINDER_BITS: u32 = 52;

/// A bit for each slot.
pub const ALL_SLOTS: u64 = (1 << SLOTS) - 1;

/// The version is a number of these.
const VERSION: u64 = 1 << SLOTS;

/// What a slot in use holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotKind(pub u8);

impl SlotKind {
    /// An offset of a record; the remainder is of the key's first hash.
    pub const RECORD: SlotKind = SlotKind(10);
    /// An offset of a record; the remainder is of the key's second hash.
    pub const SECOND: SlotKind = SlotKind(11);

    /// A value of `length` (at most 8) bytes in the slot itself, under a key of 8 bytes.
    #[inline]
    pub const fn inline(length: usize) -> SlotKind {
        SlotKind(1 + length as u8)
    }

    /// The length of an inline value.
    #[inline]
    pub const fn inline_length(self) -> Option<usize> {
        if self.0 >= 1 && self.0 <= 9 { Some(self.0 as usize - 1) } else { None }
    }

    /// Whether the slot's word is the offset of a record.
    #[inline]
    pub const fn is_record(self) -> bool {
        self.0 == 10 || self.0 == 11
    }
}

/// What the header does not say of a slot: its kind, and the highest four bits of its remainder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark(pub u8);

impl Mark {
    #[inline]
    pub const fn new(kind: SlotKind, remainder: u64) -> Mark {
        Mark(kind.0 << 4 | (remainder >> 48) as u8)
    }

    #[inline]
    pub const fn kind(self) -> SlotKind {
        SlotKind(self.0 >> 4)
    }

    /// Whether it is of an entry with this remainder, the other bits of which were compared.
    #[inline]
    pub const fn fits(self, remainder: u64) -> bool {
        self.0 & 15 == (remainder >> 48) as u8
    }
}

/// The header word of a bucket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Head(pub u64);

impl Head {
    /// A bit for each slot in use.
    #[inline]
    pub const fn used(self) -> u64 {
        self.0 & ALL_SLOTS
    }

    #[inline]
    pub const fn is_full(self) -> bool {
        self.used() == ALL_SLOTS
    }

    /// The first slot that is not in use; there must be one.
    #[inline]
    pub const fn free_slot(self) -> usize {
        self.0.trailing_ones() as usize % SLOTS
    }

    /// [`Head::free_slot`] is in use, under the next version.
    #[inline]
    pub const fn filled(self) -> Head {
        // The sum sets the lowest bit that is not set, and clears those below.
        Head((self.0 | (self.0 + 1)).wrapping_add(VERSION))
    }

    /// `slot` is in use, under the next version.
    #[inline]
    pub const fn with(self, slot: usize) -> Head {
        Head((self.0 | 1 << slot).wrapping_add(VERSION))
    }

    /// `slot` is not in use, under the next version.
    #[inline]
    pub const fn without(self, slot: usize) -> Head {
        Head((self.0 & !(1 << slot)).wrapping_add(VERSION))
    }

    /// The same content under the next version.
    #[inline]
    pub const fn next(self) -> Head {
        Head(self.0.wrapping_add(VERSION))
    }
}

/// A bucket in arena memory.
#[repr(C, align(64))]
pub struct Bucket {
    pub head: AtomicU64,
    marks: [AtomicU8; SLOTS],
    middle: [AtomicU16; SLOTS],
    low: [AtomicU32; SLOTS],
    pub words: [AtomicU64; SLOTS],
}

impl Bucket {
    /// A bucket without entries.
    #[cfg(test)]
    pub fn empty() -> Bucket {
        Bucket {
            head: AtomicU64::new(0),
            marks: std::array::from_fn(|_| AtomicU8::new(0)),
            middle: std::array::from_fn(|_| AtomicU16::new(0)),
            low: std::array::from_fn(|_| AtomicU32::new(0)),
            words: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }

    #[inline]
    pub fn head(&self, order: Ordering) -> Head {
        Head(self.head.load(order))
    }

    #[inline]
    pub fn mark(&self, slot: usize) -> Mark {
        Mark(self.marks[slot].load(Ordering::Relaxed))
    }

    /// Returns a bit for each slot that is in use according to `head` and matches the low 48 bits of `remainder`; the mark
    /// has the other four bits.
    #[cfg(any(test, not(target_arch = "x86_64")))]
    #[inline]
    pub fn matches(&self, head: Head, remainder: u64) -> u32 {
        let mut mask = 0;
        for slot in 0..SLOTS {
            let equal = self.low[slot].load(Ordering::Relaxed) == remainder as u32
                && self.middle[slot].load(Ordering::Relaxed) == (remainder >> 32) as u16;
            mask |= u32::from(equal) << slot;
        }
        mask & head.used() as u32
    }

    /// The remainder of the entry in a slot that no thread changes.
    #[inline]
    pub fn remainder(&self, slot: usize) -> u64 {
        let high = u64::from(self.mark(slot).0 & 15) << 48;
        let middle = u64::from(self.middle[slot].load(Ordering::Relaxed)) << 32;
        high | middle | u64::from(self.low[slot].load(Ordering::Relaxed))
    }

    /// Writes a free slot; it becomes an entry when the header says so.
    #[inline]
    pub fn fill(&self, slot: usize, kind: SlotKind, remainder: u64, word: u64) {
        self.low[slot].store(remainder as u32, Ordering::Relaxed);
        self.middle[slot].store((remainder >> 32) as u16, Ordering::Relaxed);
        self.marks[slot].store(Mark::new(kind, remainder).0, Ordering::Relaxed);
        self.words[slot].store(word, Ordering::Relaxed);
    }

    /// Writes a slot of an unpublished bucket: the parts of an entry as they are stored here, `high` with the mark above the
    /// 16 bits of the remainder.
    #[inline(always)]
    pub fn put(&self, slot: usize, low: u32, high: u32, word: u64) {
        self.low[slot].store(low, Ordering::Relaxed);
        self.middle[slot].store(high as u16, Ordering::Relaxed);
        self.marks[slot].store((high >> 16) as u8, Ordering::Relaxed);
        self.words[slot].store(word, Ordering::Relaxed);
    }
}
