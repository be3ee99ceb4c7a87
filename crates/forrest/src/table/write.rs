//! Writing: an entry is set, changed or deleted under its segment's lock.
//!
//! Every change shows itself to readers by one store, of a bucket's header or
//! of a value's word; the order of the stores before it is what lets a reader
//! find out that he was late, and a death be cleaned up at any of them. A key
//! of 8 bytes with a short value takes a way of few steps
//! ([`Table::set_word`], [`Table::delete_word`]), the rest [`Table::modify`].

use super::grow::is_sparse;
use super::seen::{Seen, ask_for, ask_for_words};
use super::{Dir, FLOODED, GENERATION, Homes, Place, Spot, Table};
use crate::bucket::{Kind, Mark, SLOTS};
use crate::error::Error;
use crate::record::{self, Record};
use crate::{KEY_BYTES_MAX, VALUE_BYTES_MAX};
use llds::arena::SeatRef;
use llds::arena::fault::point;
use llds::prefetch;
use std::sync::atomic::{Ordering, fence};

/// Keys of one and the same 64-bit hash in a segment before further ones go by their second hash.
const SAME_HASH_MAX: usize = 8;

/// A free slot for an entry.
#[derive(Clone, Copy)]
pub(super) struct Room {
    pub bucket: usize,
    pub slot: usize,
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

impl Table {
    /// Asks for what a writer of this hash looks at first.
    #[inline]
    pub fn prefetch_write(&self, hash: u64) {
        let spot = Spot::of(hash);
        prefetch(self.lock_word(spot.segment));
        ask_for(self.both(self.dir(spot.segment, Ordering::Relaxed), spot.remainder));
    }

    /// Asks for the values beside which a writer of this hash will write, once he has what he asked for first.
    #[inline]
    pub fn prefetch_room(&self, hash: u64) {
        let spot = Spot::of(hash);
        let (first, second) = self.both(self.dir(spot.segment, Ordering::Relaxed), spot.remainder);
        let heads = (first.head(Ordering::Relaxed), second.head(Ordering::Relaxed));
        let seen = Seen { first: (first, heads.0), second: (second, heads.1), mask: 0 };
        prefetch(&seen.emptier().0.words);
    }

    /// Sets the entry of a key of 8 bytes to a value in a slot: what [`Table::modify`] does, where it takes few steps.
    /// `None` if it takes more, and nothing has changed. `asked` says that what is needed is on its way.
    #[inline]
    pub fn set_word(&self, hash: u64, kind: Kind, word: u64, asked: bool) -> Option<bool> {
        let spot = Spot::of(hash);
        let dir = self.dir(spot.segment, Ordering::Relaxed);
        let both = self.both(dir, spot.remainder);
        if !asked {
            // All lines that may be written: the stores of one call must be done before the next one's lock is taken.
            ask_for(both);
            ask_for_words(both);
        }
        let owner = self.quick.owner()?;
        if dir.buckets() == 0 {
            return None;
        }
        let count = self.lock_as(owner, spot.segment);
        if self.dir(spot.segment, Ordering::Relaxed) != dir {
            self.unlock(spot.segment, count);
            return None;
        }
        let seen = self.see(both, spot.remainder, Ordering::Relaxed);
        if seen.mask != 0 {
            let ((bucket, _), slot) = seen.found();
            let is_same = bucket.mark(slot) == Mark::new(kind, spot.remainder);
            if is_same {
                bucket.words[slot].store(word, Ordering::Release);
            }
            self.unlock(spot.segment, count);
            return is_same.then_some(true);
        }
        let (bucket, head) = seen.emptier();
        if head.is_full() {
            return self.set_crowded(hash, dir, kind, word);
        }
        // From here on as in `put`.
        fence(Ordering::Release);
        bucket.fill(head.free_slot(), kind, spot.remainder, word);
        point();
        bucket.head.store(head.filled().0, Ordering::Release);
        self.unlock(spot.segment, count + 1);
        self.inserted(hash, count + 1);
        Some(false)
    }

    /// Goes on with [`Table::set_word`] where both homes are full, under the lock.
    #[cold]
    #[inline(never)]
    fn set_crowded(&self, hash: u64, dir: Dir, kind: Kind, word: u64) -> Option<bool> {
        let spot = Spot::of(hash);
        let count = self.count(spot.segment);
        let Some(room) = self.make_room(dir, Homes::of(spot.remainder, dir.buckets())) else {
            self.unlock(spot.segment, count);
            return None;
        };
        let bucket = self.bucket(dir, room.bucket);
        fence(Ordering::Release);
        bucket.fill(room.slot, kind, spot.remainder, word);
        point();
        bucket.head.store(bucket.head(Ordering::Relaxed).with(room.slot).0, Ordering::Release);
        self.unlock(spot.segment, count + 1);
        self.inserted(hash, count + 1);
        Some(false)
    }

    /// Deletes the entry of a key of 8 bytes, as [`Table::set_word`] sets one.
    #[inline]
    pub fn delete_word(&self, hash: u64) -> Option<bool> {
        let spot = Spot::of(hash);
        let dir = self.dir(spot.segment, Ordering::Relaxed);
        let both = self.both(dir, spot.remainder);
        ask_for(both);
        let owner = self.quick.owner()?;
        if dir.buckets() == 0 {
            return None;
        }
        let count = self.lock_as(owner, spot.segment);
        if self.dir(spot.segment, Ordering::Relaxed) != dir {
            self.unlock(spot.segment, count);
            return None;
        }
        let seen = self.see(both, spot.remainder, Ordering::Relaxed);
        if seen.mask == 0 {
            self.unlock(spot.segment, count);
            return Some(false);
        }
        let ((bucket, head), slot) = seen.found();
        let mark = bucket.mark(slot);
        if !mark.fits(spot.remainder) || mark.kind().is_record() {
            self.unlock(spot.segment, count);
            return None;
        }
        bucket.head.store(head.without(slot).0, Ordering::Release);
        point();
        if is_sparse(count - 1, dir.buckets()) {
            self.shrink_word(spot.segment);
        } else {
            self.unlock(spot.segment, count - 1);
        }
        self.deleted(hash, count - 1);
        Some(true)
    }

    /// Ends [`Table::delete_word`] where few entries are left.
    #[cold]
    #[inline(never)]
    fn shrink_word(&self, segment: usize) {
        let _held = self.held(segment);
        self.add_count(segment, -1);
        point();
        if let Ok(seat) = self.seat() {
            self.shrink(&seat, segment);
        }
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
        ask_for(self.both(self.dir(spot.segment, Ordering::Relaxed), spot.remainder));
        let seat = self.seat()?;
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
            self.inserted(hash, count);
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
        if buckets == 0 {
            return (None, 0);
        }
        let homes = Homes::of(remainder, buckets);
        let mut seen = self.see(self.both(dir, remainder), remainder, Ordering::Relaxed);
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
                let found =
                    kind == record_kind && Record::at(&self.arena, word).is_some_and(|record| record.has_key(key));
                same += usize::from(!found && kind == record_kind);
                found
            } else {
                key.len() == 8 && record_kind == Kind::RECORD
            };
            if found {
                return (Some(Place { bucket: index, slot, kind, word }), same);
            }
        }
        (None, same)
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
                    self.deleted(spot.remainder, self.count(spot.segment));
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
        let Room { bucket: index, slot } = loop {
            let homes = Homes::of(spot.remainder, dir.buckets());
            if let Some(room) = self.room(dir, homes, place) {
                break room;
            }
            if dir.buckets() == 0 || self.make_room(dir, homes).is_none() {
                self.grow(seat, spot.segment)?;
                dir = self.dir(spot.segment, Ordering::Relaxed);
            }
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
        let bucket = self.bucket(dir, index);
        // Whoever sees what we write into the slot also sees that its former entry ended.
        fence(Ordering::Release);
        bucket.fill(slot, kind, spot.remainder, word);
        point();
        let head = bucket.head(Ordering::Relaxed).with(slot);
        match place {
            Some(old) if old.bucket == index => bucket.head.store(head.without(old.slot).0, Ordering::Release),
            Some(old) => {
                // A reader that sees neither looked here before and there after: he finds this header changed.
                bucket.head.store(head.0, Ordering::Release);
                point();
                let bucket = self.bucket(dir, old.bucket);
                bucket.head.store(bucket.head(Ordering::Relaxed).without(old.slot).0, Ordering::Release);
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

    fn new_record(&self, seat: &SeatRef<'_>, key: &[u8], value: &[u8]) -> Result<u64, Error> {
        let size = record::record_bytes(key.len(), value.len());
        let offset = self.or_recover(seat, || self.arena.alloc(seat, size))?;
        record::write(&self.arena, offset, key, value);
        point();
        Ok(offset)
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
        bucket.head.store(bucket.head(Ordering::Relaxed).without(place.slot).0, Ordering::Release);
        point();
        if record {
            self.arena.retire(seat, place.word);
            point();
        }
        let count = self.add_count(segment, -1);
        point();
        if is_sparse(count, dir.buckets()) {
            self.shrink(seat, segment);
        }
    }

    /// Forgets every entry of a segment, one by one, so that a death in between loses none of their memory, and its array.
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
        // Room that was made and not used.
        if self.count(segment) == 0 && self.dir(segment, Ordering::Relaxed).buckets() != 0 {
            self.shrink(seat, segment);
        }
        cleared
    }
}
