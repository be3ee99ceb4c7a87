//! The table: 4,096 segments of buckets, each grown on its own.
//!
//! The high 12 bits of a hash choose a segment: one entry of a directory of
//! 32 KiB, which stays in the cache. A segment is an array of
//! buckets of any length; a secret multiplier spreads the low 52 bits over it.
//! An entry lies in its home bucket or, when that is full, in another on its
//! *way*: the home's neighbour, then buckets here and there in the array. The
//! home's header says how far to look, at most [`REACH_MAX`] buckets.
//!
//! Writers of a segment exclude each other by a lock word that names the
//! holder's seat, so a lock whose holder was killed is recognised and taken
//! over (`recover.rs`). Readers take no lock: what they read is valid if the
//! bucket's header and the segment's directory entry are unchanged afterwards.
//! The arena never unmaps, so reading too late reads garbage. On a tmpfs it
//! may read a hole, which takes a page, or is a fault if there is none left:
//! hence hazards for records of more than a page. What is read without one (a
//! bucket, a record's lengths, a key) is little, and a reader must stop right
//! there until it was freed, given back and taken by somebody else.
//!
//! There is no global growth. A segment grows when it is full, and, so that
//! memory stays dense, inserts also pass over the segments in order and
//! rebuild those that will be full soon: freed blocks are then neighbours and
//! their memory is used again.

use crate::bucket::{BUCKET_BYTES, Bucket, Head, Kind, REACH_COPIED, REACH_MAX, REMAINDER_BITS, SLOTS};
use crate::error::Error;
use crate::hash::Hasher;
use crate::record::{self, Record, prefetch};
use crate::{KEY_BYTES_MAX, VALUE_BYTES_MAX};
use llds::arena::fault::point;
use llds::arena::{Arena, LOG_BYTES_MAX, SPAN_BYTES, SeatRef};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering, fence};

const _: () = assert!(size_of::<Bucket>() == BUCKET_BYTES);

/// Segments of a table.
pub const SEGMENTS: usize = 1 << (64 - REMAINDER_BITS);

/// Entries per bucket, in hundredths, to which a segment is rebuilt.
const FILL_TO: usize = 288;
/// A passing insert rebuilds segments above this fill, in hundredths of entries per bucket.
const FILL_PASS: usize = 336;
/// What passing over one segment costs of a thread's credit.
const CREDIT_PER_SEGMENT: u32 = 1 << 24;
/// What as many inserts as there are entries earn: four passes over all segments, one each time that the table has grown
/// by 28 %. Fill rises from 0.72 to 0.92 meanwhile, 19.7 bytes per entry of 16 on average, and an entry is copied four
/// times on the whole. More passes are denser and slower; with fewer, arrays fail before their turn and leave the order in
/// which memory is used again.
const CREDIT_PER_OWN_SIZE: u32 = CREDIT_PER_SEGMENT * 4;
/// Steps of a way for which a writer of many asks before it looks.
pub const AHEAD: usize = 4;
/// Keys of one and the same 64-bit hash in a segment before further ones go by their second hash.
const SAME_HASH_MAX: usize = 8;

const OFFSET_BITS: u32 = 34;
const COUNT_BITS: u32 = 18;
/// Set for good when a key of this segment was stored under its second hash.
const FLOODED: u64 = 1 << 52;
const GENERATION: u64 = 1 << 54;
const OWNER_SHIFT: u32 = 48;

/// Offsets that a directory entry can name lie below this: 1 TiB.
pub const OFFSETS_END: u64 = (BUCKET_BYTES as u64) << OFFSET_BITS;

/// Buckets of the largest segment.
const BUCKETS_MAX: usize = (1 << COUNT_BITS) - 1;

/// A directory entry: where a segment's buckets are and how many.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Dir(pub u64);

impl Dir {
    #[inline]
    pub fn offset(self) -> u64 {
        (self.0 & ((1 << OFFSET_BITS) - 1)) * BUCKET_BYTES as u64
    }

    #[inline]
    pub fn buckets(self) -> usize {
        ((self.0 >> OFFSET_BITS) & ((1 << COUNT_BITS) - 1)) as usize
    }

    #[inline]
    pub fn flooded(self) -> bool {
        self.0 & FLOODED != 0
    }

    /// The entry for another array; the generation tells it from every recent entry.
    fn moved(self, offset: u64, buckets: usize) -> Dir {
        let rest = self.0 & (FLOODED | !(GENERATION - 1));
        Dir((rest | (offset / BUCKET_BYTES as u64) | (buckets as u64) << OFFSET_BITS).wrapping_add(GENERATION))
    }
}

/// Where an entry was found by the holder of its segment's lock.
#[derive(Clone, Copy)]
pub struct Place {
    pub bucket: usize,
    pub slot: usize,
    pub kind: Kind,
    pub word: u64,
}

/// Neighbours, the home among them, with which the way begins: mostly one page, so one miss of the TLB.
const NEAR: usize = 4;

/// The buckets in which an entry may lie, in the order in which they are tried.
///
/// After the neighbours they lie anywhere. Were they the next ones, as in linear probing, full buckets would cluster: from
/// 0.90 of all slots filled on an entry often found no room within its reach. So arrays are filled to 0.99 before one fails.
#[derive(Clone, Copy)]
pub struct Way {
    spread: u64,
    buckets: u64,
}

impl Way {
    /// The bucket in which an entry belongs.
    #[inline]
    pub fn home(self) -> usize {
        (((self.spread >> 32) * self.buckets) >> 32) as usize
    }

    /// The `step`-th bucket; the 0th is the home. Some may be named twice.
    #[inline]
    pub fn at(self, step: usize) -> usize {
        let home = self.home();
        match step {
            0 => home,
            1..NEAR => {
                let neighbour = home ^ step;
                if neighbour < self.buckets as usize { neighbour } else { home }
            }
            _ => {
                // Steps of one length, however chosen, come round to the same few buckets for some keys.
                let mixed = self.spread.wrapping_add((step as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
                let place = (mixed ^ mixed >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93) >> 32;
                ((place * self.buckets) >> 32) as usize
            }
        }
    }
}

/// A free slot for an entry, and how far it is on the entry's way.
#[derive(Clone, Copy)]
pub struct Room {
    bucket: usize,
    slot: usize,
    step: usize,
}

/// A key's hash, taken apart.
#[derive(Clone, Copy)]
pub struct Spot {
    pub segment: usize,
    pub remainder: u64,
}

impl Spot {
    #[inline]
    pub fn of(hash: u64) -> Spot {
        Spot { segment: (hash >> REMAINDER_BITS) as usize, remainder: hash & ((1 << REMAINDER_BITS) - 1) }
    }

    pub fn hash(self) -> u64 {
        (self.segment as u64) << REMAINDER_BITS | self.remainder
    }
}

/// What becomes of an entry.
pub enum Change<'v> {
    /// It stays as it is.
    Keep,
    /// It gets this value, and is made if it is not there.
    Put(&'v [u8]),
    /// It gets these 8 bytes.
    Word([u8; 8]),
    /// It goes.
    Delete,
}

/// Takes what a reader found. May be called again when the first finding proves stale.
pub trait Sink {
    /// Whether [`Sink::record`] copies the record, so that a long one must be kept meanwhile.
    const READS: bool = true;

    fn inline(&mut self, bytes: [u8; 8], length: usize);
    fn record(&mut self, record: Record<'_>, offset: u64);
}

/// What [`Table::read_word`] came to.
pub enum Probe {
    /// The value's bytes, and how many of the 8 there are.
    Inline([u8; 8], usize),
    /// There is no entry of the key.
    Missing,
    /// Something that [`Table::read`] must look at: a record, an entry that ended, a change under way.
    Unclear,
}

/// A lookup under way, of many at once.
#[derive(Clone, Copy)]
pub struct Asked {
    dir: Dir,
    hash: u64,
    head: Head,
    bucket: u32,
    mask: u32,
}

impl Asked {
    /// No lookup.
    pub const NONE: Asked = Asked { dir: Dir(0), hash: 0, head: Head(0), bucket: 0, mask: 0 };

    pub fn hash(&self) -> u64 {
        self.hash
    }
}

/// The table over an arena.
pub struct Table {
    pub arena: Arena,
    /// Where the arena begins: kept here, one load closer.
    base: *const u8,
    dir: *const AtomicU64,
    locks: *const AtomicU64,
    cursor: *const AtomicU64,
    pub hasher: Hasher,
    place: u64,
}

// SAFETY: the pointers lead into the arena's mapping, which lives as long as `arena`; all access is atomic.
unsafe impl Send for Table {}
// SAFETY: as above.
unsafe impl Sync for Table {}

thread_local! {
    /// What this thread owes the passing growth.
    static CREDIT: Cell<u32> = const { Cell::new(0) };
    /// The extent this thread passed last (a table's address, an offset), and whether it is to be emptied.
    static EXTENT: Cell<((usize, u64), bool)> = const { Cell::new(((0, 0), false)) };
}

/// A record under a hazard of the calling thread's seat.
struct Kept<'t> {
    seat: SeatRef<'t>,
    hazard: usize,
}

impl Drop for Kept<'_> {
    fn drop(&mut self) {
        self.seat.hazard_clear(self.hazard);
    }
}

/// A held segment lock; dropping it unlocks.
pub struct Held<'t> {
    table: &'t Table,
    segment: usize,
}

impl Drop for Held<'_> {
    #[inline]
    fn drop(&mut self) {
        let lock = self.table.lock_word(self.segment);
        let count = lock.load(Ordering::Relaxed) & ((1 << OWNER_SHIFT) - 1);
        point();
        lock.store(count, Ordering::Release);
    }
}

impl Table {
    /// `dir` and `locks` are the first of [`SEGMENTS`] words each.
    pub fn new(arena: Arena, words: [*mut u8; 3], hasher: Hasher, place: u64) -> Table {
        let [dir, locks, cursor] = words.map(|at| at.cast::<AtomicU64>().cast_const());
        let base = arena.at(0).cast_const();
        Table { arena, base, dir, locks, cursor, hasher, place: place | 1 }
    }

    #[inline]
    pub fn dir_word(&self, segment: usize) -> &AtomicU64 {
        debug_assert!(segment < SEGMENTS);
        // SAFETY: the directory has SEGMENTS words; the index is masked.
        unsafe { &*self.dir.add(segment & (SEGMENTS - 1)) }
    }

    #[inline]
    pub fn lock_word(&self, segment: usize) -> &AtomicU64 {
        // SAFETY: as for the directory.
        unsafe { &*self.locks.add(segment & (SEGMENTS - 1)) }
    }

    #[inline]
    pub fn dir(&self, segment: usize, order: Ordering) -> Dir {
        Dir(self.dir_word(segment).load(order))
    }

    /// The bucket `index` of the segment at `dir`. `index` is below its count.
    #[inline]
    pub fn bucket(&self, dir: Dir, index: usize) -> &Bucket {
        let at = self.base.wrapping_add(dir.offset() as usize + index * BUCKET_BYTES);
        // SAFETY: directory entries name blocks inside the arena; blocks of lines are 64-byte aligned; the mapping
        // outlives `self`, and buckets consist of atomics, so even a stale entry leads to readable memory.
        unsafe { &*at.cast::<Bucket>() }
    }

    /// The way of an entry through an array of `buckets`, at least one.
    #[inline]
    pub fn way(&self, remainder: u64, buckets: usize) -> Way {
        // Twice, so that chosen remainders in arithmetic progression do not stay one.
        let once = remainder.wrapping_mul(self.place);
        Way { spread: (once ^ (once >> 29)).wrapping_mul(self.place), buckets: buckets as u64 }
    }

    // ---- reading ----

    /// Looks for an entry in a slot under a key of 8 bytes, whose hash says all that the key says.
    #[inline]
    pub fn read_word(&self, hash: u64) -> Probe {
        let spot = Spot::of(hash);
        let dir = self.dir(spot.segment, Ordering::Acquire);
        if dir.buckets() == 0 {
            return Probe::Missing;
        }
        let way = self.way(spot.remainder, dir.buckets());
        let first = self.bucket(dir, way.home());
        let first_head = first.head(Ordering::Acquire);
        let mask = first.matches(spot.remainder);
        if mask != 0 {
            return self.inline_at(spot, dir, first, first_head, mask);
        }
        self.read_on(spot, dir, way, first, first_head)
    }

    /// Goes on with [`Table::read_word`] beside the home bucket.
    #[inline]
    fn read_on(&self, spot: Spot, dir: Dir, way: Way, home: &Bucket, home_head: Head) -> Probe {
        for step in 1..=home_head.reach() {
            let bucket = self.bucket(dir, way.at(step));
            let head = bucket.head(Ordering::Acquire);
            let mask = bucket.matches(spot.remainder);
            if mask != 0 {
                return self.inline_at(spot, dir, bucket, head, mask);
            }
        }
        self.missing(spot, dir, home, home_head)
    }

    /// What a bucket, read under `head`, says of an entry in a slot that `mask` names first.
    #[inline(always)]
    fn inline_at(&self, spot: Spot, dir: Dir, bucket: &Bucket, head: Head, mask: u32) -> Probe {
        let slot = mask.trailing_zeros() as usize;
        let value = bucket.words[slot].load(Ordering::Relaxed);
        // As in `read_as`.
        fence(Ordering::Acquire);
        let unchanged = bucket.head(Ordering::Relaxed) == head && self.dir(spot.segment, Ordering::Relaxed) == dir;
        match head.kind(slot).inline_length() {
            Some(length) if unchanged && head.extra(slot) == spot.remainder >> 48 => {
                Probe::Inline(value.to_ne_bytes(), length)
            }
            _ => Probe::Unclear,
        }
    }

    #[inline(always)]
    fn missing(&self, spot: Spot, dir: Dir, home: &Bucket, head: Head) -> Probe {
        fence(Ordering::Acquire);
        let unchanged = home.head(Ordering::Relaxed) == head && self.dir(spot.segment, Ordering::Relaxed) == dir;
        if unchanged { Probe::Missing } else { Probe::Unclear }
    }

    /// Begins a lookup of many: asks for the home bucket of a hash.
    #[inline]
    pub fn ask(&self, hash: u64) -> Asked {
        let spot = Spot::of(hash);
        let dir = self.dir(spot.segment, Ordering::Acquire);
        // Without buckets this is some line of the arena's own, which nobody looks at.
        let bucket = self.way(spot.remainder, dir.buckets()).home();
        prefetch(self.bucket(dir, bucket));
        Asked { dir, hash, bucket: bucket as u32, mask: 0, head: Head(0) }
    }

    /// Goes on with a lookup: looks at the home bucket, and asks for what else must be looked at: its
    /// neighbours, as far as it reaches, or the record.
    #[inline]
    pub fn ask_on(&self, asked: &mut Asked) {
        if asked.dir.buckets() == 0 {
            return;
        }
        let remainder = Spot::of(asked.hash).remainder;
        let bucket = self.bucket(asked.dir, asked.bucket as usize);
        asked.head = bucket.head(Ordering::Acquire);
        asked.mask = bucket.matches(remainder);
        if asked.mask != 0 {
            let slot = asked.mask.trailing_zeros() as usize;
            if asked.head.kind(slot).is_record() {
                Record::prefetch(&self.arena, bucket.words[slot].load(Ordering::Relaxed));
            }
        } else {
            let way = self.way(remainder, asked.dir.buckets());
            for step in 1..=asked.head.reach().min(NEAR - 1) {
                prefetch(self.bucket(asked.dir, way.at(step)));
            }
        }
    }

    /// Ends a lookup of a key of 8 bytes.
    #[inline]
    pub fn answer(&self, asked: &Asked) -> Probe {
        let spot = Spot::of(asked.hash);
        if asked.dir.buckets() == 0 {
            return Probe::Missing;
        }
        let home = self.bucket(asked.dir, asked.bucket as usize);
        if asked.mask != 0 {
            return self.inline_at(spot, asked.dir, home, asked.head, asked.mask);
        }
        let way = self.way(spot.remainder, asked.dir.buckets());
        self.read_on(spot, asked.dir, way, home, asked.head)
    }

    /// Gives the value of `key`, whose first hash is `hash`, to `sink`. False if there is none.
    #[inline]
    pub fn read(&self, key: &[u8], hash: u64, sink: &mut impl Sink) -> bool {
        let (found, flooded) = self.read_as(key, Spot::of(hash), Kind::RECORD, sink);
        found || (flooded && self.read_second(key, sink))
    }

    #[cold]
    fn read_second(&self, key: &[u8], sink: &mut impl Sink) -> bool {
        self.read_as(key, Spot::of(self.hasher.second(key)), Kind::SECOND, sink).0
    }

    #[inline]
    fn read_as<S: Sink>(&self, key: &[u8], spot: Spot, record_kind: Kind, sink: &mut S) -> (bool, bool) {
        let word = self.dir_word(spot.segment);
        'again: loop {
            let dir = Dir(word.load(Ordering::Acquire));
            let buckets = dir.buckets();
            if buckets == 0 {
                return (false, dir.flooded());
            }
            let way = self.way(spot.remainder, buckets);
            let home_bucket = self.bucket(dir, way.home());
            let home_head = home_bucket.head(Ordering::Acquire);
            let (mut bucket, mut head, mut step) = (home_bucket, home_head, 0);
            loop {
                let mut mask = bucket.matches(spot.remainder);
                while mask != 0 {
                    let slot = mask.trailing_zeros() as usize;
                    mask &= mask - 1;
                    let kind = head.kind(slot);
                    if head.extra(slot) != spot.remainder >> 48 {
                        continue;
                    }
                    // Pairs with the release fence before a writer fills a slot or a block: if what we read came
                    // from a later life of this memory, one of the two words below has changed.
                    let unchanged = || {
                        fence(Ordering::Acquire);
                        bucket.head(Ordering::Relaxed) == head && word.load(Ordering::Relaxed) == dir.0
                    };
                    let value = bucket.words[slot].load(Ordering::Relaxed);
                    if let Some(length) = kind.inline_length() {
                        if key.len() != 8 || record_kind == Kind::SECOND {
                            continue;
                        }
                        if !unchanged() {
                            continue 'again;
                        }
                        sink.inline(value.to_ne_bytes(), length);
                        return (true, false);
                    }
                    if kind != record_kind {
                        continue;
                    }
                    let record = Record::at(&self.arena, value);
                    if S::READS
                        && let Some(long) = record.filter(Record::is_long)
                        && let Some(_kept) = self.keep(value)
                    {
                        if !unchanged() {
                            continue 'again;
                        }
                        // It stays from here on, linked or not: what is read is the value of this instant.
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
                        continue 'again;
                    }
                    if record.is_some() {
                        return (true, false);
                    }
                }
                if step == home_head.reach() {
                    break;
                }
                step += 1;
                bucket = self.bucket(dir, way.at(step));
                head = bucket.head(Ordering::Acquire);
            }
            fence(Ordering::Acquire);
            if home_bucket.head(Ordering::Relaxed) == home_head && word.load(Ordering::Relaxed) == dir.0 {
                return (false, dir.flooded());
            }
        }
    }

    /// Puts a hazard on a record of a shared store, so that its pages stay; the caller must then check that it is still
    /// linked. `None` where there is nothing to fear, or no seat or hazard to be had.
    #[cold]
    fn keep(&self, record: u64) -> Option<Kept<'_>> {
        if !self.arena.is_shared() {
            return None;
        }
        let seat = self.seat().ok()?;
        let hazard = seat.hazard_free()?;
        seat.hazard_set(hazard, record);
        Some(Kept { seat, hazard })
    }

    /// Asks for the buckets that a writer of this hash needs most likely.
    #[inline]
    pub fn prefetch_write(&self, hash: u64, steps: usize) {
        let spot = Spot::of(hash);
        let dir = self.dir(spot.segment, Ordering::Relaxed);
        // Without buckets this is some line of the arena's own, which nobody looks at.
        let way = self.way(spot.remainder, dir.buckets());
        for step in 0..steps {
            prefetch(self.bucket(dir, way.at(step)));
        }
    }

    // ---- locking ----

    /// Locks a segment for writing; waits for a living holder, cleans up after a dead one.
    #[inline]
    pub fn lock(&self, seat: &SeatRef<'_>, segment: usize) -> Held<'_> {
        let lock = self.lock_word(segment);
        let seen = lock.load(Ordering::Relaxed);
        let mine = seat.owner() << OWNER_SHIFT;
        if seen >> OWNER_SHIFT != 0
            || lock.compare_exchange(seen, seen | mine, Ordering::Acquire, Ordering::Relaxed).is_err()
        {
            self.lock_slow(lock, mine);
        }
        point();
        Held { table: self, segment }
    }

    #[cold]
    fn lock_slow(&self, lock: &AtomicU64, mine: u64) {
        let mut rounds = 0u32;
        loop {
            let seen = lock.load(Ordering::Relaxed);
            let owner = seen >> OWNER_SHIFT;
            if owner == 0 {
                if lock.compare_exchange(seen, seen | mine, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                    return;
                }
                continue;
            }
            rounds += 1;
            if rounds < 100 {
                std::hint::spin_loop();
            } else if rounds.is_multiple_of(512) && self.arena.is_dead(owner) {
                self.recover(owner);
            } else {
                std::thread::yield_now();
            }
        }
    }

    fn try_lock(&self, seat: &SeatRef<'_>, segment: usize) -> Option<Held<'_>> {
        let lock = self.lock_word(segment);
        let seen = lock.load(Ordering::Relaxed);
        let mine = seat.owner() << OWNER_SHIFT;
        let free = seen >> OWNER_SHIFT == 0
            && lock.compare_exchange(seen, seen | mine, Ordering::Acquire, Ordering::Relaxed).is_ok();
        // Made only if we hold it: dropping it unlocks.
        free.then(|| Held { table: self, segment })
    }

    /// Entries of a segment.
    #[inline]
    pub fn count(&self, segment: usize) -> u64 {
        self.lock_word(segment).load(Ordering::Relaxed) & ((1 << OWNER_SHIFT) - 1)
    }

    #[inline]
    fn add_count(&self, segment: usize, delta: i64) -> u64 {
        let lock = self.lock_word(segment);
        let word = lock.load(Ordering::Relaxed).wrapping_add_signed(delta);
        lock.store(word, Ordering::Relaxed);
        word & ((1 << OWNER_SHIFT) - 1)
    }

    // ---- writing ----

    /// Sets the entry of a key of 8 bytes to a value in a slot: what [`Table::modify`] does, where it takes few steps.
    /// `None` if it does not, or there is no seat to be had, and nothing has changed.
    #[inline]
    pub fn set_word(&self, hash: u64, kind: Kind, word: u64, asked: bool) -> Option<bool> {
        let spot = Spot::of(hash);
        let dir = self.dir(spot.segment, Ordering::Relaxed);
        if dir.buckets() == 0 {
            return None;
        }
        let way = self.way(spot.remainder, dir.buckets());
        if !asked {
            prefetch(self.bucket(dir, way.home()));
            prefetch(self.bucket(dir, way.at(1)));
        }
        let seat = self.seat_quick()?;
        let held = self.lock(&seat, spot.segment);
        if self.dir(spot.segment, Ordering::Relaxed) != dir {
            return None;
        }
        let home = self.bucket(dir, way.home());
        let home_head = home.head(Ordering::Relaxed);
        let (mut bucket, mut head, mut step, mut room) = (home, home_head, 0, None);
        loop {
            match bucket.find_inline(head, spot.remainder) {
                None => {}
                Some(slot) if head.kind(slot) == kind => {
                    bucket.words[slot].store(word, Ordering::Release);
                    return Some(true);
                }
                Some(_) => return None,
            }
            if room.is_none() {
                room = head.free_slot().map(|slot| (bucket, head, slot, step));
            }
            if step >= home_head.reach() && room.is_some() {
                break;
            }
            if step == REACH_MAX {
                return None;
            }
            step += 1;
            bucket = self.bucket(dir, way.at(step));
            head = bucket.head(Ordering::Relaxed);
        }
        let (bucket, mut head, slot, step) = room?;
        // From here on as in `put`.
        if home_head.reach() < step {
            let reaching = home_head.with_reach(step).next();
            home.head.store(reaching.0, Ordering::Release);
            point();
            if std::ptr::eq(bucket, home) {
                head = reaching;
            }
        }
        fence(Ordering::Release);
        bucket.fill(slot, spot.remainder, word);
        point();
        bucket.head.store(head.with_entry(slot, kind, spot.remainder).next().0, Ordering::Release);
        point();
        let count = self.add_count(spot.segment, 1);
        drop(held);
        self.pass(&seat, count);
        Some(false)
    }

    /// Deletes the entry of a key of 8 bytes, as [`Table::set_word`] sets one.
    #[inline]
    pub fn delete_word(&self, hash: u64) -> Option<bool> {
        let spot = Spot::of(hash);
        let dir = self.dir(spot.segment, Ordering::Relaxed);
        if dir.buckets() == 0 {
            return None;
        }
        let way = self.way(spot.remainder, dir.buckets());
        prefetch(self.bucket(dir, way.home()));
        prefetch(self.bucket(dir, way.at(1)));
        let seat = self.seat_quick()?;
        let _held = self.lock(&seat, spot.segment);
        if self.dir(spot.segment, Ordering::Relaxed) != dir {
            return None;
        }
        let reach = self.bucket(dir, way.home()).head(Ordering::Relaxed).reach();
        for step in 0..=reach {
            let index = way.at(step);
            let bucket = self.bucket(dir, index);
            let head = bucket.head(Ordering::Relaxed);
            if let Some(slot) = bucket.find_inline(head, spot.remainder) {
                let kind = head.kind(slot);
                if kind.is_record() {
                    return None;
                }
                self.delete(&seat, spot.segment, Place { bucket: index, slot, kind, word: 0 });
                return Some(true);
            }
        }
        Some(false)
    }

    /// Changes the entry of `key` as `decide` says, seeing its value; nobody else changes it meanwhile.
    /// Returns whether the entry was there before.
    #[inline]
    pub fn modify<'v>(
        &self,
        key: &[u8],
        hash: u64,
        decide: impl FnOnce(Option<&[u8]>) -> Result<Change<'v>, Error>,
    ) -> Result<bool, Error> {
        if key.len() > KEY_BYTES_MAX {
            return Err(Error::KeyTooLong { bytes: key.len() });
        }
        let spot = Spot::of(hash);
        // The lines are on their way while we take the lock.
        self.prefetch_write(hash, 2);
        let seat = self.seat()?;
        let held = self.lock(&seat, spot.segment);
        let dir = self.dir(spot.segment, Ordering::Relaxed);
        let (place, same, room) = self.find(dir, key, spot.remainder, Kind::RECORD);
        if place.is_none() && key.len() != 8 && (dir.flooded() || same >= SAME_HASH_MAX) {
            drop(held);
            return self.modify_flooded(&seat, key, spot, decide);
        }
        let grown = self.apply(&seat, spot, Kind::RECORD, key, (place, room), decide)?;
        drop(held);
        if let Some(count) = grown {
            self.pass(&seat, count);
        }
        Ok(place.is_some())
    }

    /// [`Table::modify`] when the key's first segment has keys under their second hash, or must get one.
    #[cold]
    fn modify_flooded<'v>(
        &self,
        seat: &SeatRef<'_>,
        key: &[u8],
        spot: Spot,
        decide: impl FnOnce(Option<&[u8]>) -> Result<Change<'v>, Error>,
    ) -> Result<bool, Error> {
        let second = Spot::of(self.hasher.second(key));
        // Two locks, always in the same order; one if both hashes lead to one segment.
        let low = self.lock(seat, spot.segment.min(second.segment));
        let high = (spot.segment != second.segment).then(|| self.lock(seat, spot.segment.max(second.segment)));
        let dir = self.dir(spot.segment, Ordering::Relaxed);
        let (place, same, room) = self.find(dir, key, spot.remainder, Kind::RECORD);
        let existed = if place.is_some() {
            self.apply(seat, spot, Kind::RECORD, key, (place, room), decide)?;
            true
        } else {
            let other = self.dir(second.segment, Ordering::Relaxed);
            let (place, _, other_room) = self.find(other, key, second.remainder, Kind::SECOND);
            if place.is_none() && same < SAME_HASH_MAX {
                self.apply(seat, spot, Kind::RECORD, key, (None, room), decide)?;
                false
            } else {
                if !dir.flooded() {
                    // Before the key is there, so that no reader misses it.
                    let flooded = Dir(dir.0 | FLOODED).0.wrapping_add(GENERATION);
                    self.dir_word(spot.segment).store(flooded, Ordering::Release);
                    point();
                }
                self.apply(seat, second, Kind::SECOND, key, (place, other_room), decide)?;
                place.is_some()
            }
        };
        drop(high);
        drop(low);
        Ok(existed)
    }

    /// Finds the entry of `key` under the segment's lock; also how many other keys have its hash, and the first free
    /// slot met on the way.
    #[inline]
    fn find(&self, dir: Dir, key: &[u8], remainder: u64, record_kind: Kind) -> (Option<Place>, usize, Option<Room>) {
        let buckets = dir.buckets();
        let (mut same, mut room) = (0, None);
        if buckets == 0 {
            return (None, 0, None);
        }
        let way = self.way(remainder, buckets);
        let (mut index, mut step) = (way.home(), 0);
        let reach = self.bucket(dir, index).head(Ordering::Relaxed).reach();
        loop {
            let bucket = self.bucket(dir, index);
            let head = bucket.head(Ordering::Relaxed);
            let mut mask = bucket.matches(remainder);
            while mask != 0 {
                let slot = mask.trailing_zeros() as usize;
                mask &= mask - 1;
                let kind = head.kind(slot);
                if head.extra(slot) != remainder >> 48 {
                    continue;
                }
                let word = bucket.words[slot].load(Ordering::Relaxed);
                let found = if kind.is_record() {
                    let found =
                        kind == record_kind && Record::at(&self.arena, word).is_some_and(|record| record.has_key(key));
                    same += usize::from(!found && kind == record_kind);
                    found
                } else {
                    kind != Kind::EMPTY && key.len() == 8 && record_kind == Kind::RECORD
                };
                if found {
                    return (Some(Place { bucket: index, slot, kind, word }), same, None);
                }
            }
            if room.is_none()
                && let Some(slot) = head.free_slot()
            {
                room = Some(Room { bucket: index, slot, step });
            }
            if step == reach {
                return (None, same, room);
            }
            step += 1;
            index = way.at(step);
        }
    }

    /// Carries out what `decide` says. Returns the segment's entries if there is one more now.
    #[inline]
    fn apply<'v>(
        &self,
        seat: &SeatRef<'_>,
        spot: Spot,
        record_kind: Kind,
        key: &[u8],
        (place, room): (Option<Place>, Option<Room>),
        decide: impl FnOnce(Option<&[u8]>) -> Result<Change<'v>, Error>,
    ) -> Result<Option<u64>, Error> {
        let inline;
        let now = match place {
            None => None,
            Some(place) => match place.kind.inline_length() {
                Some(length) => {
                    inline = place.word.to_ne_bytes();
                    Some(&inline[..length])
                }
                // SAFETY: the record is linked and the segment's lock keeps it so until `decide` returns.
                None => Record::at(&self.arena, place.word).map(|record| unsafe { record.value() }),
            },
        };
        let word;
        let value = match decide(now)? {
            Change::Keep => return Ok(None),
            Change::Delete => {
                if let Some(place) = place {
                    self.delete(seat, spot.segment, place);
                }
                return Ok(None);
            }
            Change::Put(value) => value,
            Change::Word(bytes) => {
                word = bytes;
                &word
            }
        };
        if value.len() > VALUE_BYTES_MAX {
            return Err(Error::ValueTooLong { bytes: value.len() });
        }
        let done = self.put(seat, spot, record_kind, key, (place, room), value);
        if done.is_err() {
            seat.settle_alloc();
            seat.settle_retire();
        }
        done?;
        Ok(if place.is_none() { Some(self.add_count(spot.segment, 1)) } else { None })
    }

    #[inline]
    fn put(
        &self,
        seat: &SeatRef<'_>,
        spot: Spot,
        record_kind: Kind,
        key: &[u8],
        (mut place, mut room): (Option<Place>, Option<Room>),
        value: &[u8],
    ) -> Result<(), Error> {
        let fits = key.len() == 8 && value.len() <= 8 && record_kind == Kind::RECORD;
        let kind = if fits { Kind::inline(value.len()) } else { record_kind };
        let mut bytes = [0; 8];
        if fits {
            bytes[..value.len()].copy_from_slice(value);
        }
        let mut dir = self.dir(spot.segment, Ordering::Relaxed);
        if let Some(old) = place
            && old.kind == kind
        {
            let bucket = self.bucket(dir, old.bucket);
            if fits {
                bucket.words[old.slot].store(u64::from_ne_bytes(bytes), Ordering::Release);
                return Ok(());
            }
            let new = self.new_record(seat, key, value)?;
            seat.intend_retire(old.word);
            point();
            bucket.words[old.slot].store(new, Ordering::Release);
            point();
            // After the word and before the old record can be freed: a reader that found the old one notices.
            bucket.head.store(bucket.head(Ordering::Relaxed).next().0, Ordering::Release);
            point();
            seat.settle_alloc();
            point();
            self.arena.retire(seat, old.word);
            return Ok(());
        }
        // Room first: growing and taking a record both use the one intent a seat has.
        let (home, Room { bucket: index, slot, step }) = loop {
            let way = self.way(spot.remainder, dir.buckets());
            if let Some(room) = room.or_else(|| self.room(dir, way, place)) {
                break (way.home(), room);
            }
            self.grow(seat, spot.segment)?;
            dir = self.dir(spot.segment, Ordering::Relaxed);
            room = None;
            if place.is_some() {
                place = self.find(dir, key, spot.remainder, record_kind).0;
            }
        };
        let word = if fits { u64::from_ne_bytes(bytes) } else { self.new_record(seat, key, value)? };
        let old_record = place.filter(|old| old.kind.is_record());
        if let Some(old) = old_record {
            seat.intend_retire(old.word);
            point();
        }
        let home_bucket = self.bucket(dir, home);
        let head = home_bucket.head(Ordering::Relaxed);
        if head.reach() < step {
            home_bucket.head.store(head.with_reach(step).next().0, Ordering::Release);
            point();
        }
        let bucket = self.bucket(dir, index);
        // Whoever sees what we write into the slot also sees that its former entry ended.
        fence(Ordering::Release);
        bucket.fill(slot, spot.remainder, word);
        point();
        let head = bucket.head(Ordering::Relaxed).with_entry(slot, kind, spot.remainder).next();
        match place {
            Some(old) if old.bucket == index => {
                bucket.head.store(head.with_kind(old.slot, Kind::EMPTY).0, Ordering::Release);
            }
            Some(old) => {
                bucket.head.store(head.0, Ordering::Release);
                point();
                // A reader that was past `index` before and reaches the old place after must start over.
                if index != home {
                    home_bucket.head.store(home_bucket.head(Ordering::Relaxed).next().0, Ordering::Release);
                    point();
                }
                let bucket = self.bucket(dir, old.bucket);
                let head = bucket.head(Ordering::Relaxed).with_kind(old.slot, Kind::EMPTY).next();
                bucket.head.store(head.0, Ordering::Release);
            }
            None => bucket.head.store(head.0, Ordering::Release),
        }
        point();
        if !fits {
            seat.settle_alloc();
        }
        if let Some(old) = old_record {
            point();
            self.arena.retire(seat, old.word);
        }
        Ok(())
    }

    /// A free slot for an entry of this way; in `place`'s own bucket if there is one.
    #[inline]
    fn room(&self, dir: Dir, way: Way, place: Option<Place>) -> Option<Room> {
        if dir.buckets() == 0 {
            return None;
        }
        if let Some(place) = place
            && let Some(slot) = self.bucket(dir, place.bucket).head(Ordering::Relaxed).free_slot()
        {
            // The home reaches there already.
            return Some(Room { bucket: place.bucket, slot, step: 0 });
        }
        (0..=REACH_MAX).find_map(|step| {
            let bucket = way.at(step);
            let slot = self.bucket(dir, bucket).head(Ordering::Relaxed).free_slot()?;
            Some(Room { bucket, slot, step })
        })
    }

    fn new_record(&self, seat: &SeatRef<'_>, key: &[u8], value: &[u8]) -> Result<u64, Error> {
        let size = record::record_bytes(key.len(), value.len());
        let offset = self.or_recover(seat, || self.arena.alloc(seat, size))?;
        record::write(&self.arena, offset, key, value);
        point();
        Ok(offset)
    }

    /// The calling thread's seat. When all are taken, some may be dead processes': cleans up after those and tries again.
    #[inline]
    pub fn seat(&self) -> Result<SeatRef<'_>, llds::arena::Error> {
        match self.arena.seat() {
            Err(llds::arena::Error::Seats) => self.seat_again(),
            seat => seat,
        }
    }

    /// [`Table::seat`] without its error, in registers.
    #[inline(always)]
    fn seat_quick(&self) -> Option<SeatRef<'_>> {
        self.arena.seat_last().or_else(|| self.seat_new())
    }

    #[cold]
    fn seat_new(&self) -> Option<SeatRef<'_>> {
        self.seat().ok()
    }

    #[cold]
    fn seat_again(&self) -> Result<SeatRef<'_>, llds::arena::Error> {
        self.recover_all();
        self.arena.seat()
    }

    /// Allocates; when there is no room, takes back what this thread retired, then what dead processes hold, and tries
    /// again after each.
    #[inline]
    fn or_recover(
        &self,
        seat: &SeatRef<'_>,
        alloc: impl Fn() -> Result<u64, llds::arena::Error>,
    ) -> Result<u64, llds::arena::Error> {
        alloc().or_else(|_| self.alloc_again(seat, alloc))
    }

    #[cold]
    fn alloc_again(
        &self,
        seat: &SeatRef<'_>,
        alloc: impl Fn() -> Result<u64, llds::arena::Error>,
    ) -> Result<u64, llds::arena::Error> {
        self.arena.collect(seat);
        let second = alloc();
        if second.is_ok() || self.arena.dead_seats().is_empty() {
            return second;
        }
        self.recover_all();
        alloc()
    }

    /// Takes an entry out under the segment's lock.
    pub fn delete(&self, seat: &SeatRef<'_>, segment: usize, place: Place) {
        let dir = self.dir(segment, Ordering::Relaxed);
        let bucket = self.bucket(dir, place.bucket);
        let record = place.kind.is_record();
        if record {
            seat.intend_retire(place.word);
            point();
        }
        let head = bucket.head(Ordering::Relaxed).with_kind(place.slot, Kind::EMPTY).next();
        bucket.head.store(head.0, Ordering::Release);
        point();
        if record {
            self.arena.retire(seat, place.word);
            point();
        }
        let count = self.add_count(segment, -1);
        point();
        let buckets = dir.buckets();
        if count == 0 || (buckets > 4 && (count as usize) * 3 < buckets * SLOTS) {
            // Less memory is a kindness, not a duty: without room for the smaller copy the larger one stays.
            let _ = self.rebuild(seat, segment, fitting(count as usize), true);
        }
    }

    // ---- growing ----

    /// Makes every segment large enough for its share of `entries`, so that inserts up to there copy none.
    pub fn reserve(&self, seat: &SeatRef<'_>, entries: u64) -> Result<(), Error> {
        // Hashes spread them evenly, but for a few deviations; a pass leaves segments alone that are not filled further.
        let share = entries as f64 / SEGMENTS as f64;
        let most = share + 3.0 * share.sqrt();
        let wanted = (most * 100.0 / FILL_PASS as f64).ceil() as usize;
        for segment in 0..SEGMENTS {
            let _held = self.lock(seat, segment);
            if self.dir(segment, Ordering::Relaxed).buckets() < wanted {
                self.rebuild(seat, segment, wanted, false)?;
            }
        }
        Ok(())
    }

    /// Makes room in a segment that is full.
    fn grow(&self, seat: &SeatRef<'_>, segment: usize) -> Result<(), Error> {
        let buckets = self.dir(segment, Ordering::Relaxed).buckets();
        let wanted = fitting(self.count(segment) as usize + 1).max(buckets + 1 + buckets / 16);
        self.rebuild(seat, segment, wanted, true)
    }

    /// Moves a segment to an array of at least `wanted` buckets; to none if it is empty and `wanted` is 0.
    ///
    /// `alone` says that it is not the next one in order: it must not lie between those that move in order.
    fn rebuild(&self, seat: &SeatRef<'_>, segment: usize, wanted: usize, alone: bool) -> Result<(), Error> {
        let old = self.dir(segment, Ordering::Relaxed);
        let mut wanted = self.even(seat, wanted, alone);
        let (offset, buckets) = loop {
            let buckets = rounded(wanted);
            if buckets == 0 {
                break (0, 0);
            }
            if buckets > BUCKETS_MAX {
                return Err(
                    llds::arena::Error::Full { limit_bytes: (BUCKETS_MAX * BUCKET_BYTES * SEGMENTS) as u64 }.into()
                );
            }
            let offset = match self.or_recover(seat, || self.arena.alloc_log(seat, buckets * BUCKET_BYTES, alone)) {
                Ok(offset) => offset,
                Err(error) => {
                    seat.settle_alloc();
                    return Err(error.into());
                }
            };
            if self.copy(old, Dir(0).moved(offset, buckets)) {
                break (offset, buckets);
            }
            // Struck out before others can take the block: a death in between must not free theirs.
            seat.settle_alloc();
            point();
            self.arena.free(seat, offset);
            wanted = buckets + 1 + buckets / 8;
        };
        point();
        let new = old.moved(offset, buckets);
        if old.buckets() != 0 {
            seat.intend_retire(old.offset());
            point();
        }
        self.dir_word(segment).store(new.0, Ordering::Release);
        point();
        seat.settle_alloc();
        if old.buckets() != 0 {
            point();
            self.arena.retire_sized(seat, old.offset(), (old.buckets() * BUCKET_BYTES) as u64);
        }
        Ok(())
    }

    /// About `wanted` buckets, so many that blocks of the size fill the log's present extent to its end.
    fn even(&self, seat: &SeatRef<'_>, wanted: usize, alone: bool) -> usize {
        let room = self.arena.log_room(seat, alone) / BUCKET_BYTES;
        let Some(each) = room.checked_div((room + wanted / 2).checked_div(wanted).unwrap_or(0)) else { return wanted };
        if each.abs_diff(wanted) <= wanted / 16 { each } else { wanted }
    }

    /// Copies all entries of `from` to the unpublished array `to`. False if one does not find room.
    ///
    /// Homes keep their order whatever the length of the array, so both sides are walked from front to back. Entries
    /// whose home is full wait until all others lie in theirs.
    fn copy(&self, from: Dir, to: Dir) -> bool {
        let buckets = to.buckets();
        for index in 0..buckets {
            self.bucket(to, index).clear();
        }
        let mut late: Vec<(Kind, u64, u64)> = Vec::new();
        let first = self.bucket(to, 0);
        // SAFETY: the array has `buckets` buckets from its first on, and homes are below that.
        let at = |index: usize| unsafe { &*std::ptr::from_ref(first).add(index) };
        for index in 0..from.buckets() {
            self.bucket(from, index).each(|kind, remainder, word| {
                if !at(self.way(remainder, buckets).home()).append(kind, remainder, word) {
                    late.push((kind, remainder, word));
                }
            });
        }
        late.into_iter().all(|(kind, remainder, word)| {
            let way = self.way(remainder, buckets);
            let Some(step) = (1..=REACH_COPIED).find(|&step| at(way.at(step)).append(kind, remainder, word)) else {
                return false;
            };
            let home = at(way.home());
            let head = home.head(Ordering::Relaxed);
            if head.reach() < step {
                home.head.store(head.with_reach(step).0, Ordering::Relaxed);
            }
            true
        })
    }

    /// After an insert into a segment of `count` entries: rebuild the next segments in order that will be full soon.
    #[inline]
    fn pass(&self, seat: &SeatRef<'_>, count: u64) {
        // A segment has fewer than 2^20 entries, so that what an insert owes is never rounded to nothing.
        // What a small table owes beyond a few segments is let go: it has little memory to keep dense.
        let credit = (CREDIT.get() + CREDIT_PER_OWN_SIZE / count as u32).min(CREDIT_PER_SEGMENT * 8);
        CREDIT.set(credit);
        if credit >= CREDIT_PER_SEGMENT {
            self.pass_slow(seat, credit);
        }
    }

    #[cold]
    fn pass_slow(&self, seat: &SeatRef<'_>, credit: u32) {
        CREDIT.set(credit - CREDIT_PER_SEGMENT);
        // SAFETY: the word lies in the root of the arena, which lives as long as `self`.
        let cursor = unsafe { &*self.cursor };
        let segment = cursor.fetch_add(1, Ordering::Relaxed) as usize % SEGMENTS;
        let Some(_held) = self.try_lock(seat, segment) else { return };
        let (count, buckets) = (self.count(segment) as usize, self.dir(segment, Ordering::Relaxed).buckets());
        if count * 100 > buckets * FILL_PASS || (buckets != 0 && self.is_in_the_way(segment)) {
            // It is only early; a full store finds out at the insert that needs the room.
            let _ = self.rebuild(seat, segment, fitting(count), false);
        }
    }

    /// Whether a segment's array lies where memory is freed by moving it away.
    fn is_in_the_way(&self, segment: usize) -> bool {
        let dir = self.dir(segment, Ordering::Relaxed);
        let Some((extent, second)) = self.arena.log_of(dir.offset()) else { return false };
        if second {
            return true;
        }
        // Neighbours lie in one extent: the verdict over the first holds for all, so that the extent is emptied or not.
        let here = (std::ptr::from_ref(self).addr(), extent);
        let (last, mut sparse) = EXTENT.get();
        if last != here {
            sparse = self.arena.is_log_sparse(dir.offset(), dir.buckets() * BUCKET_BYTES);
            EXTENT.set((here, sparse));
        }
        sparse
    }

    /// Calls `visit` with the entries of a segment, in no order, under its lock.
    pub fn each_in(&self, segment: usize, mut visit: impl FnMut(Place, u64)) {
        let dir = self.dir(segment, Ordering::Relaxed);
        for index in 0..dir.buckets() {
            let bucket = self.bucket(dir, index);
            let head = bucket.head(Ordering::Relaxed);
            for slot in 0..SLOTS {
                let kind = head.kind(slot);
                if kind != Kind::EMPTY {
                    let word = bucket.words[slot].load(Ordering::Relaxed);
                    visit(Place { bucket: index, slot, kind, word }, bucket.remainder(head, slot));
                }
            }
        }
    }

    /// Forgets every entry of a segment, one by one, so that a death in between loses none of their memory.
    pub fn clear_segment(&self, seat: &SeatRef<'_>, segment: usize) -> u64 {
        let _held = self.lock(seat, segment);
        let mut cleared = 0;
        while self.count(segment) > 0 {
            let mut places = Vec::new();
            self.each_in(segment, |place, _| places.push(place));
            if places.is_empty() {
                break;
            }
            let dir = self.dir(segment, Ordering::Relaxed);
            for place in places {
                if self.dir(segment, Ordering::Relaxed) != dir {
                    // The array shrank under us: look again.
                    break;
                }
                self.delete(seat, segment, place);
                cleared += 1;
            }
        }
        cleared
    }

    /// The key of an entry.
    pub fn key_of(&self, segment: usize, place: Place, remainder: u64, out: &mut Vec<u8>) {
        if place.kind.is_record() {
            if let Some(record) = Record::at(&self.arena, place.word) {
                record.copy_key(out);
            }
        } else {
            out.extend_from_slice(&self.hasher.word_of(Spot { segment, remainder }.hash()));
        }
    }
}

/// Buckets for `count` entries at the fill to which segments are rebuilt; 0 for none.
fn fitting(count: usize) -> usize {
    (count * 100).div_ceil(FILL_TO)
}

/// Buckets of the block that the arena gives for `wanted` of them.
fn rounded(wanted: usize) -> usize {
    let bytes = wanted * BUCKET_BYTES;
    if bytes <= LOG_BYTES_MAX { wanted } else { bytes.next_multiple_of(SPAN_BYTES) / BUCKET_BYTES }
}

/// The head of a bucket without its version, for checks.
pub fn content(head: Head) -> u64 {
    head.0 & 0xf_ffff_ffff
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps of equal length would come round to a few buckets for some keys, and an array half empty would be full.
    #[test]
    fn ways_stay_in_the_array_and_come_by_many_buckets() {
        let hard = (0..64).flat_map(|bit| [1u64 << bit, u64::MAX << bit, u64::MAX >> bit, (u64::MAX / 3) << bit]);
        let spread = (0..20_000u64).map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ i << 7);
        for spread in hard.chain(spread).chain((1..1000).map(|part| u64::MAX / part)) {
            for buckets in [1u64, 2, 3, 5, 16, 257, 4096, 100_003] {
                let way = Way { spread, buckets };
                let mut seen: Vec<usize> = (0..=REACH_MAX).map(|step| way.at(step)).collect();
                assert_eq!(seen[0], way.home());
                assert!(seen.iter().all(|&bucket| bucket < buckets as usize), "{spread:#x} of {buckets}: {seen:?}");
                seen.sort_unstable();
                seen.dedup();
                let least =
                    [(1, 1), (16, 8), (257, 40)].into_iter().rfind(|&(from, _)| buckets >= from).unwrap_or((1, 1)).1;
                assert!(seen.len() >= least, "{spread:#x} of {buckets}: only {seen:?}");
            }
        }
    }
}
