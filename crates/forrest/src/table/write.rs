//! Writing: an entry is set, changed or deleted under its segment's lock.
//!
//! Every change shows itself to readers by one store, of a bucket's header or
//! of a value's word; the order of the stores before it is what lets a reader
//! find out that he was late, and a death be cleaned up at any of them. A key
//! of 8 bytes with a short value takes a way of few steps
//! ([`Table::set_word`], [`Table::delete_word`]), the rest [`Table::modify`].

use super::grow::fitting;
use super::way::Way;
use super::{Dir, FLOODED, GENERATION, Place, Spot, Table};
use crate::bucket::{Kind, REACH_MAX, SLOTS};
use crate::error::Error;
use crate::record::{self, Record, prefetch};
use crate::{KEY_BYTES_MAX, VALUE_BYTES_MAX};
use llds::arena::SeatRef;
use llds::arena::fault::point;
use std::sync::atomic::{Ordering, fence};

/// Steps of a way for which a writer of many asks before it looks.
pub const AHEAD: usize = 4;

/// Keys of one and the same 64-bit hash in a segment before further ones go by their second hash.
const SAME_HASH_MAX: usize = 8;

/// A free slot for an entry, and how far it is on the entry's way.
#[derive(Clone, Copy)]
pub struct Room {
    bucket: usize,
    slot: usize,
    step: usize,
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
}
