//! The bucket: four entries in one cache line.
//!
//! ```text
//! word 0     header: 4 x 4 bits kind | 4 bits reach | 4 x 4 bits remainder | 28 bits version
//! word 1     low 16 bits of the four remainders
//! word 2, 3  middle 32 bits of the four remainders
//! word 4..8  the four values, or offsets of records
//! ```
//!
//! A *remainder* is the low 52 bits of the key's 64-bit hash; the high 12 bits
//! are the number of the segment the bucket belongs to, so the full hash is
//! compared although less of it is stored.
//!
//! Readers take no lock: they read the header, then what they need, then the
//! header again. A writer (there is one per segment at a time) therefore
//! *publishes* by one store of the header with a higher version: an entry is
//! there, gone, or another, at that store. Only the value word of an entry
//! that keeps its kind is overwritten in place, by one store as well.

use crate::primitive::{AtomicU64, Ordering};

/// Entries of a bucket.
pub const SLOTS: usize = 4;

/// Bytes of a bucket.
pub const BUCKET_BYTES: usize = 64;

/// Low bits of a hash that a bucket stores.
pub const REMAINDER_BITS: u32 = 52;

const EXTRA_SHIFT: u32 = 20;
const VERSION_SHIFT: u32 = 36;

/// Buckets beside its home in which an entry may lie.
pub const REACH_MAX: usize = 64;

/// What the four bits of a reach stand for: exact where it matters, coarse where it is rare.
const REACHES: [u8; 16] = [0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, REACH_MAX as u8];

/// Buckets beside its home in which a copy leaves an entry, so that later ones find room too.
pub const REACH_COPIED: usize = 24;

/// What a slot holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind(pub u64);

impl Kind {
    /// Nothing.
    pub const EMPTY: Kind = Kind(0);
    /// An offset of a record; the remainder is of the key's first hash.
    pub const RECORD: Kind = Kind(10);
    /// An offset of a record; the remainder is of the key's second hash.
    pub const SECOND: Kind = Kind(11);

    /// A value of `length` (at most 8) bytes in the slot itself, under a key of 8 bytes.
    #[inline]
    pub const fn inline(length: usize) -> Kind {
        Kind(1 + length as u64)
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

/// The header word of a bucket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Head(pub u64);

impl Head {
    #[inline]
    pub fn kind(self, slot: usize) -> Kind {
        Kind((self.0 >> (slot * 4)) & 15)
    }

    /// How many buckets beside this one, each in the order of its own way, entries may lie in whose home is this one.
    #[inline]
    pub fn reach(self) -> usize {
        usize::from(REACHES[((self.0 >> 16) & 15) as usize])
    }

    /// The four highest bits of a slot's remainder.
    #[inline]
    pub fn extra(self, slot: usize) -> u64 {
        (self.0 >> (EXTRA_SHIFT as usize + slot * 4)) & 15
    }

    /// The slot becomes an entry of this kind and remainder.
    #[inline]
    pub fn with_entry(self, slot: usize, kind: Kind, remainder: u64) -> Head {
        let shift = EXTRA_SHIFT as usize + slot * 4;
        Head(self.0 & !(15 << shift) | (remainder >> 48) << shift).with_kind(slot, kind)
    }

    #[inline]
    pub fn with_kind(self, slot: usize, kind: Kind) -> Head {
        Head(self.0 & !(15 << (slot * 4)) | kind.0 << (slot * 4))
    }

    /// A reach of at least `reach`.
    #[inline]
    pub fn with_reach(self, reach: usize) -> Head {
        let reach = REACHES.iter().position(|&step| usize::from(step) >= reach).unwrap_or(REACHES.len() - 1);
        Head(self.0 & !(15 << 16) | (reach as u64) << 16)
    }

    /// The same content under the next version.
    #[inline]
    pub fn next(self) -> Head {
        const CONTENT: u64 = (1 << VERSION_SHIFT) - 1;
        Head(self.0 & CONTENT | (self.0 & !CONTENT).wrapping_add(1 << VERSION_SHIFT))
    }

    #[inline]
    pub fn free_slot(self) -> Option<usize> {
        let free = !self.used() & 0x1111;
        if free == 0 { None } else { Some(free.trailing_zeros() as usize / 4) }
    }

    /// The lowest bit of each kind that is not empty.
    #[inline]
    pub fn used(self) -> u64 {
        let kinds = self.0 & 0xffff;
        (kinds | kinds >> 1 | kinds >> 2 | kinds >> 3) & 0x1111
    }
}

/// A bucket in arena memory.
#[repr(C, align(64))]
pub struct Bucket {
    pub head: AtomicU64,
    low: AtomicU64,
    high: [AtomicU64; 2],
    pub words: [AtomicU64; SLOTS],
}

impl Bucket {
    /// A bucket without entries.
    #[cfg(test)]
    pub fn empty() -> Bucket {
        let zero = || AtomicU64::new(0);
        Bucket { head: zero(), low: zero(), high: [zero(), zero()], words: [zero(), zero(), zero(), zero()] }
    }

    #[inline]
    pub fn head(&self, order: Ordering) -> Head {
        Head(self.head.load(order))
    }

    /// Returns a bit for each slot whose low 48 bits are those of `remainder`; the slot may be empty, and the header
    /// has the other four bits.
    #[inline]
    pub fn matches(&self, remainder: u64) -> u32 {
        let low = self.low.load(Ordering::Relaxed);
        let (high0, high1) = (self.high[0].load(Ordering::Relaxed), self.high[1].load(Ordering::Relaxed));
        matches(low, high0, high1, remainder)
    }

    /// The slot in use, read under `head`, of a key of 8 bytes.
    #[inline]
    pub fn find_inline(&self, head: Head, remainder: u64) -> Option<usize> {
        let mut mask = self.matches(remainder);
        while mask != 0 {
            let slot = mask.trailing_zeros() as usize;
            mask &= mask - 1;
            if head.extra(slot) == remainder >> 48 && head.kind(slot) != Kind::EMPTY {
                return Some(slot);
            }
        }
        None
    }

    #[inline]
    pub fn remainder(&self, head: Head, slot: usize) -> u64 {
        let low = self.low.load(Ordering::Relaxed) >> (slot * 16) & 0xffff;
        let high = self.high[slot / 2].load(Ordering::Relaxed) >> (slot % 2 * 32) & 0xffff_ffff;
        head.extra(slot) << 48 | high << 16 | low
    }

    /// Makes a bucket that nobody else sees an empty one.
    #[inline]
    pub fn clear(&self) {
        self.head.store(0, Ordering::Relaxed);
        self.low.store(0, Ordering::Relaxed);
        self.high[0].store(0, Ordering::Relaxed);
        self.high[1].store(0, Ordering::Relaxed);
    }

    /// Calls `visit` with kind, remainder and word of each entry of a bucket that nobody changes.
    #[inline(always)]
    pub fn each(&self, mut visit: impl FnMut(Kind, u64, u64)) {
        let head = self.head(Ordering::Relaxed);
        let low = self.low.load(Ordering::Relaxed);
        for slot in 0..SLOTS {
            let kind = head.kind(slot);
            if kind != Kind::EMPTY {
                let high = self.high[slot / 2].load(Ordering::Relaxed) >> (slot % 2 * 32) & 0xffff_ffff;
                let remainder = head.extra(slot) << 48 | high << 16 | low >> (slot * 16) & 0xffff;
                visit(kind, remainder, self.words[slot].load(Ordering::Relaxed));
            }
        }
    }

    /// Adds an entry to a bucket that nobody else sees and that only this call has filled since it was cleared.
    /// False if it is full.
    #[inline]
    pub fn append(&self, kind: Kind, remainder: u64, word: u64) -> bool {
        let head = self.head(Ordering::Relaxed);
        // Filled from the first slot on.
        let slot = (67 - (head.0 & 0xffff).leading_zeros() as usize) / 4;
        if slot == SLOTS {
            return false;
        }
        // What is not used yet is zero.
        let low = self.low.load(Ordering::Relaxed) | (remainder & 0xffff) << (slot * 16);
        self.low.store(low, Ordering::Relaxed);
        let half = &self.high[slot / 2];
        let high = half.load(Ordering::Relaxed) | (remainder >> 16 & 0xffff_ffff) << (slot % 2 * 32);
        half.store(high, Ordering::Relaxed);
        self.words[slot].store(word, Ordering::Relaxed);
        let added = kind.0 << (slot * 4) | (remainder >> 48) << (EXTRA_SHIFT as usize + slot * 4);
        self.head.store(head.0 | added, Ordering::Relaxed);
        true
    }

    /// Writes a free slot; it becomes an entry when the header says so.
    #[inline]
    pub fn fill(&self, slot: usize, remainder: u64, word: u64) {
        let shift = slot * 16;
        let low = self.low.load(Ordering::Relaxed) & !(0xffff << shift) | (remainder & 0xffff) << shift;
        self.low.store(low, Ordering::Relaxed);
        let shift = slot % 2 * 32;
        let half = &self.high[slot / 2];
        let high = half.load(Ordering::Relaxed) & !(0xffff_ffff << shift) | (remainder >> 16 & 0xffff_ffff) << shift;
        half.store(high, Ordering::Relaxed);
        self.words[slot].store(word, Ordering::Relaxed);
    }
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn matches(low: u64, high0: u64, high1: u64, remainder: u64) -> u32 {
    use std::arch::x86_64::*;
    // SAFETY: SSE2 is part of x86_64; the intrinsics touch registers only.
    unsafe {
        let high = _mm_set_epi64x(high1 as i64, high0 as i64);
        let high = _mm_cmpeq_epi32(high, _mm_set1_epi32((remainder >> 16) as i32));
        let low = _mm_cmpeq_epi16(_mm_cvtsi64_si128(low as i64), _mm_set1_epi16(remainder as i16));
        let both = _mm_and_si128(high, _mm_unpacklo_epi16(low, low));
        _mm_movemask_ps(_mm_castsi128_ps(both)) as u32
    }
}

#[cfg(not(target_arch = "x86_64"))]
#[inline]
fn matches(low: u64, high0: u64, high1: u64, remainder: u64) -> u32 {
    let highs = [high0 as u32, (high0 >> 32) as u32, high1 as u32, (high1 >> 32) as u32];
    let mut mask = 0;
    for (slot, high) in highs.into_iter().enumerate() {
        let equal = high == (remainder >> 16) as u32 && (low >> (slot * 16)) as u16 == remainder as u16;
        mask |= u32::from(equal) << slot;
    }
    mask
}
