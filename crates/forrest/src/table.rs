//! The table: 4,096 segments of buckets, each grown on its own.
//!
//! The high 12 bits of a hash choose a segment: one entry of a directory of
//! 32 KiB, which stays in the cache. A segment is an array of
//! buckets of any length; a secret multiplier spreads the low 52 bits over it.
//! An entry lies in its home bucket or, when that is full, in one of the next
//! [`REACH_MAX`]; the home's header says how far to look.
//!
//! Writers of a segment exclude each other by a lock word that names the
//! holder's seat, so a lock whose holder was killed is recognised and taken
//! over (`recover.rs`). Readers take no lock: what they read is valid if the
//! bucket's header and the segment's directory entry are unchanged afterwards.
//! The arena never unmaps, so reading too late reads garbage, not a fault.
//!
//! There is no global growth. A segment grows when it is full, and, so that
//! memory stays dense, inserts also pass over the segments in order and
//! rebuild those that will be full soon: freed blocks are then neighbours and
//! their memory is used again.

use crate::bucket::{BUCKET_BYTES, Bucket, Head, Kind, REACH_MAX, REMAINDER_BITS, SLOTS};
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
const FILL_PASS: usize = 322;
/// What passing over one segment costs of a thread's credit.
const CREDIT_PER_SEGMENT: u32 = 1 << 24;
/// What as many inserts as there are entries earn: five passes over all segments, one each time that the table has grown
/// by a fifth. Fill rises from 0.72 to 0.88 meanwhile, 20.2 bytes per entry of 16 on average, and an entry is copied five
/// times on the whole. More passes are denser and slower; with fewer, arrays fail before their turn: from 0.90 on an entry
/// often finds no room within its reach.
const CREDIT_PER_OWN_SIZE: u32 = CREDIT_PER_SEGMENT * 5;
/// Keys of one and the same 64-bit hash in a segment before further ones go by their second hash.
const SAME_HASH_MAX: usize = 8;

const OFFSET_BITS: u32 = 34;
const COUNT_BITS: u32 = 18;
/// Set for good when a key of this segment was stored under its second hash.
const FLOODED: u64 = 1 << 52;
const GENERATION: u64 = 1 << 54;
const OWNER_SHIFT: u32 = 48;

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

/// The table over an arena.
pub struct Table {
    pub arena: Arena,
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
        Table { arena, dir, locks, cursor, hasher, place: place | 1 }
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
        let at = self.arena.at(dir.offset() + (index * BUCKET_BYTES) as u64);
        // SAFETY: directory entries name blocks inside the arena; blocks of lines are 64-byte aligned; the mapping
        // outlives `self`, and buckets consist of atomics, so even a stale entry leads to readable memory.
        unsafe { &*at.cast::<Bucket>() }
    }

    /// The bucket in which an entry belongs, of `buckets`.
    #[inline]
    pub fn home(&self, remainder: u64, buckets: usize) -> usize {
        // Twice, so that chosen remainders in arithmetic progression do not stay one.
        let once = remainder.wrapping_mul(self.place);
        let spread = (once ^ (once >> 29)).wrapping_mul(self.place) >> 32;
        ((spread * buckets as u64) >> 32) as usize
    }

    // ---- reading ----

    /// Looks for an entry in a slot under a key of 8 bytes, whose hash says all that the key says.
    #[inline]
    pub fn read_word(&self, hash: u64) -> Probe {
        let spot = Spot::of(hash);
        let word = self.dir_word(spot.segment);
        let dir = Dir(word.load(Ordering::Acquire));
        let buckets = dir.buckets();
        if buckets == 0 {
            return Probe::Missing;
        }
        let home = self.home(spot.remainder, buckets);
        let first = self.bucket(dir, home);
        let first_head = first.head(Ordering::Acquire);
        let (mut bucket, mut head, mut step) = (first, first_head, 0);
        loop {
            let mask = bucket.matches(spot.remainder);
            if mask != 0 {
                let slot = mask.trailing_zeros() as usize;
                let value = bucket.words[slot].load(Ordering::Relaxed);
                // As in `read_as`.
                fence(Ordering::Acquire);
                let unchanged = bucket.head(Ordering::Relaxed) == head && word.load(Ordering::Relaxed) == dir.0;
                return match head.kind(slot).inline_length() {
                    Some(length) if unchanged && head.extra(slot) == spot.remainder >> 48 => {
                        Probe::Inline(value.to_ne_bytes(), length)
                    }
                    _ => Probe::Unclear,
                };
            }
            if step == first_head.reach().min(buckets - 1) {
                fence(Ordering::Acquire);
                let unchanged = first.head(Ordering::Relaxed) == first_head && word.load(Ordering::Relaxed) == dir.0;
                return if unchanged { Probe::Missing } else { Probe::Unclear };
            }
            step += 1;
            let index = if home + step >= buckets { home + step - buckets } else { home + step };
            bucket = self.bucket(dir, index);
            head = bucket.head(Ordering::Acquire);
        }
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
    fn read_as(&self, key: &[u8], spot: Spot, record_kind: Kind, sink: &mut impl Sink) -> (bool, bool) {
        let word = self.dir_word(spot.segment);
        'again: loop {
            let dir = Dir(word.load(Ordering::Acquire));
            let buckets = dir.buckets();
            if buckets == 0 {
                return (false, dir.flooded());
            }
            let home = self.home(spot.remainder, buckets);
            let home_bucket = self.bucket(dir, home);
            let home_head = home_bucket.head(Ordering::Acquire);
            let (mut bucket, mut head, mut index) = (home_bucket, home_head, home);
            let mut left = home_head.reach().min(buckets - 1);
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
                    let record = Record::at(&self.arena, value).filter(|record| record.has_key(key));
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
                if left == 0 {
                    break;
                }
                left -= 1;
                index = if index + 1 == buckets { 0 } else { index + 1 };
                bucket = self.bucket(dir, index);
                head = bucket.head(Ordering::Acquire);
            }
            fence(Ordering::Acquire);
            if home_bucket.head(Ordering::Relaxed) == home_head && word.load(Ordering::Relaxed) == dir.0 {
                return (false, dir.flooded());
            }
        }
    }

    /// Asks for the home bucket of a hash.
    #[inline]
    pub fn prefetch_bucket(&self, hash: u64) {
        let spot = Spot::of(hash);
        let dir = self.dir(spot.segment, Ordering::Relaxed);
        if dir.buckets() != 0 {
            prefetch(self.bucket(dir, self.home(spot.remainder, dir.buckets())));
        }
    }

    /// Asks for what comes after the home bucket (already here): the next one, or the record.
    #[inline]
    pub fn prefetch_rest(&self, hash: u64) {
        let spot = Spot::of(hash);
        let dir = self.dir(spot.segment, Ordering::Relaxed);
        if dir.buckets() == 0 {
            return;
        }
        let home = self.home(spot.remainder, dir.buckets());
        let bucket = self.bucket(dir, home);
        let head = bucket.head(Ordering::Relaxed);
        let mask = bucket.matches(spot.remainder);
        if mask == 0 {
            if head.reach() != 0 && home + 1 < dir.buckets() {
                prefetch(self.bucket(dir, home + 1));
            }
        } else {
            let slot = mask.trailing_zeros() as usize;
            if head.kind(slot).is_record() {
                Record::prefetch(&self.arena, bucket.words[slot].load(Ordering::Relaxed));
            }
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
        // The line is on its way while we take the lock.
        self.prefetch_bucket(hash);
        let seat = self.arena.seat()?;
        let held = self.lock(&seat, spot.segment);
        let dir = self.dir(spot.segment, Ordering::Relaxed);
        let (place, same) = self.find(dir, key, spot.remainder, Kind::RECORD);
        if place.is_none() && key.len() != 8 && (dir.flooded() || same >= SAME_HASH_MAX) {
            drop(held);
            return self.modify_flooded(&seat, key, spot, decide);
        }
        let grown = self.apply(&seat, spot, Kind::RECORD, key, place, decide)?;
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
        let (place, same) = self.find(dir, key, spot.remainder, Kind::RECORD);
        let existed = if place.is_some() {
            self.apply(seat, spot, Kind::RECORD, key, place, decide)?;
            true
        } else {
            let other = self.dir(second.segment, Ordering::Relaxed);
            let (place, _) = self.find(other, key, second.remainder, Kind::SECOND);
            if place.is_none() && same < SAME_HASH_MAX {
                self.apply(seat, spot, Kind::RECORD, key, None, decide)?;
                false
            } else {
                if !dir.flooded() {
                    // Before the key is there, so that no reader misses it.
                    let flooded = Dir(dir.0 | FLOODED).0.wrapping_add(GENERATION);
                    self.dir_word(spot.segment).store(flooded, Ordering::Release);
                    point();
                }
                self.apply(seat, second, Kind::SECOND, key, place, decide)?;
                place.is_some()
            }
        };
        drop(high);
        drop(low);
        Ok(existed)
    }

    /// Finds the entry of `key` under the segment's lock; also how many other keys have its hash.
    #[inline]
    fn find(&self, dir: Dir, key: &[u8], remainder: u64, record_kind: Kind) -> (Option<Place>, usize) {
        let buckets = dir.buckets();
        let mut same = 0;
        if buckets == 0 {
            return (None, 0);
        }
        let mut index = self.home(remainder, buckets);
        let mut left = self.bucket(dir, index).head(Ordering::Relaxed).reach().min(buckets - 1);
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
                    return (Some(Place { bucket: index, slot, kind, word }), same);
                }
            }
            if left == 0 {
                return (None, same);
            }
            left -= 1;
            index = if index + 1 == buckets { 0 } else { index + 1 };
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
        place: Option<Place>,
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
        let done = self.put(seat, spot, record_kind, key, place, value);
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
        mut place: Option<Place>,
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
        let (home, index, slot) = loop {
            let home = self.home(spot.remainder, dir.buckets());
            if let Some((index, slot)) = self.room(dir, home, place) {
                break (home, index, slot);
            }
            self.grow(seat, spot.segment)?;
            dir = self.dir(spot.segment, Ordering::Relaxed);
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
        let step = if index >= home { index - home } else { index + dir.buckets() - home };
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

    /// A free slot for an entry of this home; in `place`'s own bucket if there is one.
    #[inline]
    fn room(&self, dir: Dir, home: usize, place: Option<Place>) -> Option<(usize, usize)> {
        let buckets = dir.buckets();
        if buckets == 0 {
            return None;
        }
        if let Some(place) = place
            && let Some(slot) = self.bucket(dir, place.bucket).head(Ordering::Relaxed).free_slot()
        {
            return Some((place.bucket, slot));
        }
        let mut index = home;
        for _ in 0..buckets.min(REACH_MAX + 1) {
            if let Some(slot) = self.bucket(dir, index).head(Ordering::Relaxed).free_slot() {
                return Some((index, slot));
            }
            index = if index + 1 == buckets { 0 } else { index + 1 };
        }
        None
    }

    fn new_record(&self, seat: &SeatRef<'_>, key: &[u8], value: &[u8]) -> Result<u64, Error> {
        let size = record::record_bytes(key.len(), value.len());
        let offset = self.or_recover(|| self.arena.alloc(seat, size))?;
        record::write(&self.arena, offset, key, value);
        point();
        Ok(offset)
    }

    /// Allocates; when there is no room, cleans up after dead processes, which may hold some, and tries again.
    #[inline]
    fn or_recover(&self, alloc: impl Fn() -> Result<u64, llds::arena::Error>) -> Result<u64, llds::arena::Error> {
        let first = alloc();
        if first.is_ok() || self.arena.dead_seats().is_empty() {
            return first;
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
        let mut wanted = wanted;
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
            let offset = match self.or_recover(|| self.arena.alloc_log(seat, buckets * BUCKET_BYTES, alone)) {
                Ok(offset) => offset,
                Err(error) => {
                    seat.settle_alloc();
                    return Err(error.into());
                }
            };
            if self.copy(old, Dir(0).moved(offset, buckets)) {
                break (offset, buckets);
            }
            self.arena.free(seat, offset);
            seat.settle_alloc();
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

    /// Copies all entries of `from` to the unpublished array `to`. False if one does not find room.
    ///
    /// Homes keep their order whatever the length of the array, so both sides are walked from front to back.
    fn copy(&self, from: Dir, to: Dir) -> bool {
        let buckets = to.buckets();
        for index in 0..buckets {
            self.bucket(to, index).clear();
        }
        for index in 0..from.buckets() {
            let bucket = self.bucket(from, index);
            let head = bucket.head(Ordering::Relaxed);
            let mut used = head.used();
            while used != 0 {
                let slot = used.trailing_zeros() as usize / 4;
                used &= used - 1;
                let remainder = bucket.remainder(head, slot);
                let word = bucket.words[slot].load(Ordering::Relaxed);
                let home = self.home(remainder, buckets);
                let mut place = home;
                let mut step = 0;
                while !self.bucket(to, place).append(head.kind(slot), remainder, word) {
                    place = if place + 1 == buckets { 0 } else { place + 1 };
                    step += 1;
                    if step == buckets || step > REACH_MAX {
                        return false;
                    }
                }
                let home_bucket = self.bucket(to, home);
                let head = home_bucket.head(Ordering::Relaxed);
                if step != 0 && head.reach() < step {
                    home_bucket.head.store(head.with_reach(step).0, Ordering::Relaxed);
                }
            }
        }
        true
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
        let offset = self.dir(segment, Ordering::Relaxed).offset();
        if count * 100 > buckets * FILL_PASS
            || (buckets != 0 && self.arena.is_second_log(offset))
            || (buckets != 0 && self.arena.is_log_sparse(offset, buckets * BUCKET_BYTES))
        {
            // It is only early; a full store finds out at the insert that needs the room.
            let _ = self.rebuild(seat, segment, fitting(count), false);
        }
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
