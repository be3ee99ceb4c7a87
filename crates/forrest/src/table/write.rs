//! Writing: an entry is set, changed or deleted under its shard's lock.
//!
//! Every change becomes visible to readers by one store, of a bucket's header or
//! of a value's word. The order of the stores before it lets a late reader detect
//! the change, and lets recovery complete a death at any of them. A key of 8
//! bytes with a short value takes a path of few steps ([`Table::set_word`],
//! [`Table::delete_word`]), everything else [`Table::modify`].

use super::bucket_pair::{BucketPair, SeenPair, prefetch_pair, prefetch_values};
use super::grow::is_sparse;
use super::{Dir, EntryPosition, FLOODED, GENERATION, Homes, Spot, Table};
use crate::bucket::{Mark, SLOTS, SlotKind};
use crate::error::Error;
use crate::overflow_record::{self, OverflowRecord};
use crate::{KEY_BYTES_MAX, VALUE_BYTES_MAX};
use llds::arena::ThreadRef;
use llds::arena::fault::point;
use llds::prefetch;
use std::sync::atomic::{Ordering, fence};

/// Keys with the same 64-bit hash in a shard before further ones use their second hash.
const SAME_HASH_MAX: usize = 8;

/// A free slot for an entry.
#[derive(Clone, Copy)]
pub(super) struct FreeSlot {
    pub bucket: usize,
    pub slot: usize,
}

/// A change of an entry.
pub enum Change<'v> {
    /// It stays as it is.
    Keep,
    /// It gets this value, and is made if it is not there.
    Put(&'v [u8]),
    /// It gets these 8 bytes.
    Word([u8; 8]),
    /// It is deleted.
    Delete,
}

impl Table {
    /// Prefetches the lines that a write of this hash reads first.
    #[inline]
    pub fn prefetch_write(&self, hash: u64) {
        let spot = Spot::of(hash);
        prefetch(self.lock_word(spot.shard));
        prefetch_pair(self.pair(self.dir(spot.shard, Ordering::Relaxed), spot.remainder));
    }

    /// Prefetches the values line that a write of this hash will store to, once the lines of [`Table::prefetch_write`] are
    /// in the cache.
    #[inline]
    pub fn prefetch_write_values(&self, hash: u64) {
        let spot = Spot::of(hash);
        let (first, second) = self.pair(self.dir(spot.shard, Ordering::Relaxed), spot.remainder);
        let heads = (first.head(Ordering::Relaxed), second.head(Ordering::Relaxed));
        let seen = SeenPair { first: (first, heads.0), second: (second, heads.1), mask: 0 };
        prefetch(&seen.emptier().0.words);
    }

    /// Locks the shard of a key of 8 bytes and reads its home buckets: the common beginning of
    /// [`Table::set_word`] and [`Table::delete_word`]. Returns the shard's count and what was seen.
    ///
    /// `None`, with nothing locked, if the thread's record is not cached, or the shard has no array or another one than
    /// `dir`.
    #[inline(always)]
    fn lock_pair<'t>(&self, spot: Spot, dir: Dir, pair: BucketPair<'t>) -> Option<(u64, SeenPair<'t>)> {
        let owner = self.cached_thread.owner()?;
        if dir.buckets() == 0 {
            return None;
        }
        let count = self.lock_as(owner, spot.shard);
        if self.dir(spot.shard, Ordering::Relaxed) != dir {
            self.unlock(spot.shard, count);
            return None;
        }
        Some((count, self.seen_pair(pair, spot.remainder, Ordering::Relaxed)))
    }

    /// Sets the entry of a key of 8 bytes to a value in a slot: what [`Table::modify`] does, if it takes few steps.
    /// Otherwise returns `None`, with nothing changed. `prefetched` says that the needed lines were prefetched.
    #[inline]
    pub fn set_word(&self, hash: u64, kind: SlotKind, word: u64, prefetched: bool) -> Option<bool> {
        let spot = Spot::of(hash);
        let dir = self.dir(spot.shard, Ordering::Relaxed);
        let pair = self.pair(dir, spot.remainder);
        if !prefetched {
            // All lines that may be written: the stores of one call must complete before the next call's lock is taken.
            prefetch_pair(pair);
            prefetch_values(pair);
        }
        let (count, seen) = self.lock_pair(spot, dir, pair)?;
        if seen.mask != 0 {
            let ((bucket, _), slot) = seen.found();
            let is_same = bucket.mark(slot) == Mark::new(kind, spot.remainder);
            if is_same {
                bucket.words[slot].store(word, Ordering::Release);
            }
            self.unlock(spot.shard, count);
            return is_same.then_some(true);
        }
        let (bucket, head) = seen.emptier();
        if head.is_full() {
            return self.set_displacing(hash, dir, kind, word);
        }
        // Release, as in `put`: a reader that sees a store below also sees the end of the slot's former entry.
        fence(Ordering::Release);
        bucket.fill(head.free_slot(), kind, spot.remainder, word);
        point();
        bucket.head.store(head.filled().0, Ordering::Release);
        self.unlock(spot.shard, count + 1);
        self.inserted(hash, count + 1);
        Some(false)
    }

    /// Continues [`Table::set_word`] if both home buckets are full, under the lock.
    #[cold]
    #[inline(never)]
    fn set_displacing(&self, hash: u64, dir: Dir, kind: SlotKind, word: u64) -> Option<bool> {
        let spot = Spot::of(hash);
        let count = self.count(spot.shard);
        let Some(free) = self.displace(dir, Homes::of(spot.remainder, dir.buckets())) else {
            self.unlock(spot.shard, count);
            return None;
        };
        let bucket = self.bucket(dir, free.bucket);
        fence(Ordering::Release);
        bucket.fill(free.slot, kind, spot.remainder, word);
        point();
        bucket.head.store(bucket.head(Ordering::Relaxed).with(free.slot).0, Ordering::Release);
        self.unlock(spot.shard, count + 1);
        self.inserted(hash, count + 1);
        Some(false)
    }

    /// Deletes the entry of a key of 8 bytes, as [`Table::set_word`] sets one.
    #[inline]
    pub fn delete_word(&self, hash: u64) -> Option<bool> {
        let spot = Spot::of(hash);
        let dir = self.dir(spot.shard, Ordering::Relaxed);
        let pair = self.pair(dir, spot.remainder);
        prefetch_pair(pair);
        let (count, seen) = self.lock_pair(spot, dir, pair)?;
        if seen.mask == 0 {
            self.unlock(spot.shard, count);
            return Some(false);
        }
        let ((bucket, head), slot) = seen.found();
        let mark = bucket.mark(slot);
        if !mark.fits(spot.remainder) || mark.kind().is_record() {
            self.unlock(spot.shard, count);
            return None;
        }
        bucket.head.store(head.without(slot).0, Ordering::Release);
        point();
        if is_sparse(count - 1, dir.buckets()) {
            self.shrink_word(spot.shard);
        } else {
            self.unlock(spot.shard, count - 1);
        }
        self.deleted(hash, count - 1);
        Some(true)
    }

    /// Ends [`Table::delete_word`] if few entries are left.
    #[cold]
    #[inline(never)]
    fn shrink_word(&self, shard: usize) {
        let _held = self.held(shard);
        self.add_count(shard, -1);
        point();
        if let Ok(thread) = self.thread() {
            self.shrink(&thread, shard);
        }
    }

    /// Changes the entry of `key` as `decide` says, which gets its value; no other thread changes it meanwhile.
    /// Returns whether the entry existed before.
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
        // Prefetch the lines while taking the lock.
        prefetch_pair(self.pair(self.dir(spot.shard, Ordering::Relaxed), spot.remainder));
        let thread = self.thread()?;
        let held = self.lock(&thread, spot.shard);
        let dir = self.dir(spot.shard, Ordering::Relaxed);
        let (place, same) = self.find(dir, key, spot.remainder, SlotKind::RECORD);
        if place.is_none() && key.len() != 8 && (dir.flooded() || same >= SAME_HASH_MAX) {
            drop(held);
            return self.modify_flooded(&thread, key, spot, decide);
        }
        let grown = self.apply(&thread, spot, SlotKind::RECORD, key, place, decide)?;
        drop(held);
        if let Some(count) = grown {
            self.inserted(hash, count);
        }
        Ok(place.is_some())
    }

    /// [`Table::modify`] when the key's first shard has keys under their second hash, or must get one.
    #[cold]
    fn modify_flooded<'v>(
        &self,
        thread: &ThreadRef<'_>,
        key: &[u8],
        spot: Spot,
        decide: impl FnOnce(Option<&[u8]>) -> Result<Change<'v>, Error>,
    ) -> Result<bool, Error> {
        let second = Spot::of(self.hasher.second(key));
        // Two locks, always in ascending order; one if both hashes lead to the same shard.
        let low = self.lock(thread, spot.shard.min(second.shard));
        let high = (spot.shard != second.shard).then(|| self.lock(thread, spot.shard.max(second.shard)));
        let dir = self.dir(spot.shard, Ordering::Relaxed);
        let (place, same) = self.find(dir, key, spot.remainder, SlotKind::RECORD);
        let existed = if place.is_some() {
            self.apply(thread, spot, SlotKind::RECORD, key, place, decide)?;
            true
        } else {
            let other = self.dir(second.shard, Ordering::Relaxed);
            let (place, _) = self.find(other, key, second.remainder, SlotKind::SECOND);
            if place.is_none() && same < SAME_HASH_MAX {
                self.apply(thread, spot, SlotKind::RECORD, key, None, decide)?;
                false
            } else {
                if !dir.flooded() {
                    // Marked before the key is inserted, so that no reader misses the key.
                    let flooded = Dir(dir.0 | FLOODED).0.wrapping_add(GENERATION);
                    self.dir_word(spot.shard).store(flooded, Ordering::Release);
                    point();
                }
                self.apply(thread, second, SlotKind::SECOND, key, place, decide)?;
                place.is_some()
            }
        };
        drop(high);
        drop(low);
        Ok(existed)
    }

    /// Finds the entry of `key` under the shard's lock; also how many other keys have its hash.
    #[inline]
    fn find(&self, dir: Dir, key: &[u8], remainder: u64, record_kind: SlotKind) -> (Option<EntryPosition>, usize) {
        let buckets = dir.buckets();
        if buckets == 0 {
            return (None, 0);
        }
        let homes = Homes::of(remainder, buckets);
        let mut seen = self.seen_pair(self.pair(dir, remainder), remainder, Ordering::Relaxed);
        if homes.first == homes.second {
            seen.mask &= (1 << SLOTS) - 1;
        }
        let mut same = 0;
        while seen.mask != 0 {
            let index = if seen.mask.trailing_zeros() < SLOTS as u32 { homes.first } else { homes.second };
            let ((bucket, _), slot) = seen.found();
            seen.mask &= seen.mask - 1;
            let mark = bucket.mark(slot);
            if !mark.fits(remainder) {
                continue;
            }
            let (kind, word) = (mark.kind(), bucket.words[slot].load(Ordering::Relaxed));
            let found = if kind.is_record() {
                let found = kind == record_kind
                    && OverflowRecord::at(&self.arena, word).is_some_and(|record| record.has_key(key));
                same += usize::from(!found && kind == record_kind);
                found
            } else {
                key.len() == 8 && record_kind == SlotKind::RECORD
            };
            if found {
                return (Some(EntryPosition { bucket: index, slot, kind, word }), same);
            }
        }
        (None, same)
    }

    /// Carries out what `decide` says. Returns the shard's count if an entry was added.
    #[inline]
    fn apply<'v>(
        &self,
        thread: &ThreadRef<'_>,
        spot: Spot,
        record_kind: SlotKind,
        key: &[u8],
        place: Option<EntryPosition>,
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
                // SAFETY: the record is linked, and the shard's lock, held until `decide` returns, keeps it linked.
                None => OverflowRecord::at(&self.arena, place.word).map(|record| unsafe { record.value() }),
            },
        };
        let word;
        let value = match decide(now)? {
            Change::Keep => return Ok(None),
            Change::Delete => {
                if let Some(place) = place {
                    self.delete(thread, spot.shard, place);
                    self.deleted(spot.remainder, self.count(spot.shard));
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
        let done = self.put(thread, spot, record_kind, key, place, value);
        if done.is_err() {
            thread.settle_alloc();
            thread.settle_retire();
        }
        done?;
        Ok(if place.is_none() { Some(self.add_count(spot.shard, 1)) } else { None })
    }

    #[inline]
    fn put(
        &self,
        thread: &ThreadRef<'_>,
        spot: Spot,
        record_kind: SlotKind,
        key: &[u8],
        mut place: Option<EntryPosition>,
        value: &[u8],
    ) -> Result<(), Error> {
        let fits = key.len() == 8 && value.len() <= 8 && record_kind == SlotKind::RECORD;
        let kind = if fits { SlotKind::inline(value.len()) } else { record_kind };
        let mut bytes = [0; 8];
        if fits {
            bytes[..value.len()].copy_from_slice(value);
        }
        let mut dir = self.dir(spot.shard, Ordering::Relaxed);
        if let Some(old) = place
            && old.kind == kind
        {
            let bucket = self.bucket(dir, old.bucket);
            if fits {
                bucket.words[old.slot].store(u64::from_ne_bytes(bytes), Ordering::Release);
                return Ok(());
            }
            let new = self.new_record(thread, key, value)?;
            thread.intend_retire(old.word);
            point();
            bucket.words[old.slot].store(new, Ordering::Release);
            point();
            // After the word and before the old record can be freed: a reader that found the old one notices.
            bucket.head.store(bucket.head(Ordering::Relaxed).next().0, Ordering::Release);
            point();
            thread.settle_alloc();
            point();
            self.arena.retire(thread, old.word);
            return Ok(());
        }
        // The slot first: growing and allocating a record both use the thread's single alloc intent.
        let FreeSlot { bucket: index, slot } = loop {
            let homes = Homes::of(spot.remainder, dir.buckets());
            if let Some(free) = self.free_slot_for(dir, homes, place) {
                break free;
            }
            if dir.buckets() == 0 || self.displace(dir, homes).is_none() {
                self.grow(thread, spot.shard)?;
                dir = self.dir(spot.shard, Ordering::Relaxed);
            }
            if place.is_some() {
                place = self.find(dir, key, spot.remainder, record_kind).0;
            }
        };
        let word = if fits { u64::from_ne_bytes(bytes) } else { self.new_record(thread, key, value)? };
        let old_record = place.filter(|old| old.kind.is_record());
        if let Some(old) = old_record {
            thread.intend_retire(old.word);
            point();
        }
        let bucket = self.bucket(dir, index);
        // Release: a reader that sees a store into the slot also sees the end of the slot's former entry. Pairs with the
        // acquire fence in `read_as`.
        fence(Ordering::Release);
        bucket.fill(slot, kind, spot.remainder, word);
        point();
        let head = bucket.head(Ordering::Relaxed).with(slot);
        match place {
            Some(old) if old.bucket == index => bucket.head.store(head.without(old.slot).0, Ordering::Release),
            Some(old) => {
                // A reader that sees neither entry read this bucket before and the old one after: it finds this header
                // changed.
                bucket.head.store(head.0, Ordering::Release);
                point();
                let bucket = self.bucket(dir, old.bucket);
                bucket.head.store(bucket.head(Ordering::Relaxed).without(old.slot).0, Ordering::Release);
            }
            None => bucket.head.store(head.0, Ordering::Release),
        }
        point();
        if !fits {
            thread.settle_alloc();
        }
        if let Some(old) = old_record {
            point();
            self.arena.retire(thread, old.word);
        }
        Ok(())
    }

    fn new_record(&self, thread: &ThreadRef<'_>, key: &[u8], value: &[u8]) -> Result<u64, Error> {
        let size = overflow_record::record_bytes(key.len(), value.len());
        let offset = self.or_recover(thread, || self.arena.alloc(thread, size))?;
        // SAFETY: `alloc` just returned a block of at least `size` bytes, which no other thread can reach yet.
        unsafe { overflow_record::write(&self.arena, offset, key, value) };
        point();
        Ok(offset)
    }

    /// Removes an entry under the shard's lock.
    pub fn delete(&self, thread: &ThreadRef<'_>, shard: usize, place: EntryPosition) {
        let dir = self.dir(shard, Ordering::Relaxed);
        let bucket = self.bucket(dir, place.bucket);
        let record = place.kind.is_record();
        if record {
            thread.intend_retire(place.word);
            point();
        }
        bucket.head.store(bucket.head(Ordering::Relaxed).without(place.slot).0, Ordering::Release);
        point();
        if record {
            self.arena.retire(thread, place.word);
            point();
        }
        let count = self.add_count(shard, -1);
        point();
        if is_sparse(count, dir.buckets()) {
            self.shrink(thread, shard);
        }
    }

    /// Deletes every entry of a shard, one by one, so that a death in between loses none of their memory, and then its
    /// array.
    pub fn clear_shard(&self, thread: &ThreadRef<'_>, shard: usize) -> u64 {
        let _held = self.lock(thread, shard);
        let mut cleared = 0;
        while self.count(shard) > 0 {
            let mut places = Vec::new();
            self.each_in(shard, |place, _| places.push(place));
            if places.is_empty() {
                break;
            }
            let dir = self.dir(shard, Ordering::Relaxed);
            for place in places {
                if self.dir(shard, Ordering::Relaxed) != dir {
                    // A delete shrank the array: collect the positions again.
                    break;
                }
                self.delete(thread, shard, place);
                cleared += 1;
            }
        }
        // An array that `reserve` made and no entry uses.
        if self.count(shard) == 0 && self.dir(shard, Ordering::Relaxed).buckets() != 0 {
            self.shrink(thread, shard);
        }
        cleared
    }
}
