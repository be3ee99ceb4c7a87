//! The table: 4,096 shards of buckets, each grown on its own.
//!
//! The high 12 bits of a hash choose a shard: one entry of a directory of
//! 32 KiB, which stays in the cache. A shard is an array of buckets of any
//! length, and other bits of the hash name two of them as the *home buckets*
//! of an entry (`home_buckets.rs`): it lies in one of them, and nowhere else.
//! A lookup prefetches both together and compares all their slots in one step, so
//! no lookup waits twice, and all lookups cost the same.
//!
//! Writers of a shard exclude each other by a lock word that names the holder's
//! thread record, so a lock of a killed holder is recognised and taken over
//! (`recover.rs`). Readers take no lock: a value they read is valid if the bucket's
//! header and the shard's directory entry are unchanged afterwards; the absence
//! of a key is valid if both buckets' headers are.
//! The arena never unmaps, so a late read returns garbage. On a tmpfs it may read
//! a hole, which allocates a page, or faults if none is left: hence hazards for
//! records of more than a page. Reads without a hazard (a bucket, a record's
//! lengths, a key) are short: to meet a hole, a reader must be stopped exactly
//! there until the memory was freed, given back and the system ran out of pages.
//!
//! There is no global growth. A shard grows when it is full, and, so that
//! memory stays dense, inserts also pass over the shards in order and
//! rebuild those that will be full soon: freed blocks are then neighbours and
//! their memory is used again.

mod arena_access;
mod bucket_pair;
mod copy;
mod displacement;
mod grow;
mod home_buckets;
mod lock;
mod read;
mod write;

pub use home_buckets::Homes;
pub use read::{Lookup, Probe, Sink};
pub use write::Change;

use crate::bucket::{BUCKET_BYTES, Bucket, REMAINDER_BITS, SLOTS, SlotKind};
use crate::hash::Hasher;
use crate::overflow_record::OverflowRecord;
use crate::wide;
use llds::arena::{Arena, CachedThread};
use std::sync::atomic::{AtomicU64, Ordering};

const _: () = assert!(size_of::<Bucket>() == BUCKET_BYTES);

/// Shards of a table.
pub const SHARDS: usize = 1 << (64 - REMAINDER_BITS);

/// Arrays lie at multiples of a line.
const LINE_BYTES: u64 = 64;
const OFFSET_BITS: u32 = 34;
const COUNT_BITS: u32 = 18;
/// Set for good when a key of this shard was stored under its second hash.
const FLOODED: u64 = 1 << 52;
const GENERATION: u64 = 1 << 54;

/// Offsets that a directory entry can name lie below this: 1 TiB.
pub const OFFSETS_END: u64 = LINE_BYTES << OFFSET_BITS;

/// A directory entry: where a shard's buckets are and how many.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Dir(pub u64);

impl Dir {
    #[inline]
    pub fn offset(self) -> u64 {
        (self.0 & ((1 << OFFSET_BITS) - 1)) * LINE_BYTES
    }

    #[inline]
    pub fn buckets(self) -> usize {
        ((self.0 >> OFFSET_BITS) & ((1 << COUNT_BITS) - 1)) as usize
    }

    /// Whether the buckets lie inside `range` as a whole, or there are none.
    pub fn lies_in(self, range: &std::ops::Range<u64>) -> bool {
        let bytes = (self.buckets() * BUCKET_BYTES) as u64;
        bytes == 0 || (range.contains(&self.offset()) && bytes <= range.end - self.offset())
    }

    #[inline]
    pub fn flooded(self) -> bool {
        self.0 & FLOODED != 0
    }

    /// The entry for another array; the generation tells it from every recent entry.
    fn moved(self, offset: u64, buckets: usize) -> Dir {
        let rest = self.0 & (FLOODED | !(GENERATION - 1));
        Dir((rest | (offset / LINE_BYTES) | (buckets as u64) << OFFSET_BITS).wrapping_add(GENERATION))
    }
}

/// The position of an entry, found under its shard's lock.
#[derive(Clone, Copy)]
pub struct EntryPosition {
    pub bucket: usize,
    pub slot: usize,
    pub kind: SlotKind,
    pub word: u64,
}

/// A key's hash, taken apart.
#[derive(Clone, Copy)]
pub struct Spot {
    pub shard: usize,
    pub remainder: u64,
}

impl Spot {
    #[inline]
    pub fn of(hash: u64) -> Spot {
        Spot { shard: (hash >> REMAINDER_BITS) as usize, remainder: hash & ((1 << REMAINDER_BITS) - 1) }
    }

    pub fn hash(self) -> u64 {
        (self.shard as u64) << REMAINDER_BITS | self.remainder
    }
}

/// The table over an arena.
pub struct Table {
    pub arena: Arena,
    /// The arena's first byte, stored here to save a load.
    base: *const u8,
    dir: *const AtomicU64,
    locks: *const AtomicU64,
    cursor: *const AtomicU64,
    pub hasher: Hasher,
    cached_thread: CachedThread,
    /// Whether the processor has AVX-512, see [`wide::has_avx512`].
    wide: bool,
}

// SAFETY: the pointers lead into the arena's mapping, which lives as long as `arena` and is not bound to a thread.
unsafe impl Send for Table {}
// SAFETY: the pointers lead into the arena's mapping, which lives as long as `arena`; all accesses are atomic.
unsafe impl Sync for Table {}

impl Table {
    /// `dir` and `locks` are the first of [`SHARDS`] words each.
    pub fn new(arena: Arena, words: [*mut u8; 3], hasher: Hasher) -> Table {
        let [dir, locks, cursor] = words.map(|at| at.cast::<AtomicU64>().cast_const());
        let base = arena.at(0).cast_const();
        let cached_thread = arena.cached_thread();
        Table { arena, base, dir, locks, cursor, hasher, cached_thread, wide: wide::has_avx512() }
    }

    #[inline]
    pub fn dir_word(&self, shard: usize) -> &AtomicU64 {
        debug_assert!(shard < SHARDS);
        // SAFETY: `new` got the first of SHARDS directory words; the mask keeps the index below SHARDS.
        unsafe { &*self.dir.add(shard & (SHARDS - 1)) }
    }

    #[inline]
    pub fn lock_word(&self, shard: usize) -> &AtomicU64 {
        // SAFETY: `new` got the first of SHARDS lock words; the mask keeps the index below SHARDS.
        unsafe { &*self.locks.add(shard & (SHARDS - 1)) }
    }

    #[inline]
    pub fn dir(&self, shard: usize, order: Ordering) -> Dir {
        Dir(self.dir_word(shard).load(order))
    }

    /// The bucket `index` of the shard at `dir`. `index` is below its count.
    #[inline]
    pub fn bucket(&self, dir: Dir, index: usize) -> &Bucket {
        let at = self.base.wrapping_add(dir.offset() as usize + index * BUCKET_BYTES);
        // SAFETY: a directory entry names a range inside the arena (checked by `is_directory_sound` when a store is opened;
        // later entries name allocated blocks), aligned to 64 bytes. The mapping outlives `self`, and buckets consist of
        // atomics, so even a stale entry leads to readable memory.
        unsafe { &*at.cast::<Bucket>() }
    }

    /// Returns true if each shard lies inside the arena, whatever the file contains: no later code checks it again.
    pub fn is_directory_sound(&self) -> bool {
        let range = self.arena.data_range();
        (0..SHARDS).all(|shard| self.dir(shard, Ordering::Acquire).lies_in(&range))
    }

    /// Returns true if no shard is locked or counts more entries than it has slots. Exact only while no thread writes.
    pub fn are_locks_sound(&self) -> bool {
        (0..SHARDS).all(|shard| {
            let capacity = self.dir(shard, Ordering::Acquire).buckets() * SLOTS;
            // A held lock has its owner in the high bits, so it is a larger number than any count.
            self.lock_word(shard).load(Ordering::Acquire) <= capacity as u64
        })
    }

    /// Calls `visit` with the entries of a shard, in no order, under its lock.
    pub fn each_in(&self, shard: usize, mut visit: impl FnMut(EntryPosition, u64)) {
        let dir = self.dir(shard, Ordering::Relaxed);
        for index in 0..dir.buckets() {
            let bucket = self.bucket(dir, index);
            let head = bucket.head(Ordering::Relaxed);
            for slot in (0..SLOTS).filter(|slot| head.used() >> slot & 1 == 1) {
                let word = bucket.words[slot].load(Ordering::Relaxed);
                visit(
                    EntryPosition { bucket: index, slot, kind: bucket.mark(slot).kind(), word },
                    bucket.remainder(slot),
                );
            }
        }
    }

    /// The key of an entry.
    pub fn key_of(&self, shard: usize, place: EntryPosition, remainder: u64, out: &mut Vec<u8>) {
        if place.kind.is_record() {
            if let Some(record) = OverflowRecord::at(&self.arena, place.word) {
                record.copy_key(out);
            }
        } else {
            out.extend_from_slice(&self.hasher.word_of(Spot { shard, remainder }.hash()));
        }
    }
}
