//! Reading: lookups that take no lock and write nothing, one at a time and many in flight.
//!
//! What was read holds if the bucket's header and the segment's directory
//! entry are the same before and after; else the reader starts over. A key of
//! 8 bytes has a path of its own ([`Table::read_word`]) that ends in two
//! registers; all that it cannot decide goes to [`Table::read`].

use super::way::{NEAR, Way};
use super::{Dir, Spot, Table};
use crate::bucket::{Bucket, Head, Kind};
use crate::record::{Record, prefetch};
use llds::arena::SeatRef;
use std::sync::atomic::{Ordering, fence};

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

impl Table {
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
        // The caller's code ran since, for as long as it liked: of an array that is gone the pages may be too.
        if self.dir(spot.segment, Ordering::Acquire) != asked.dir {
            return Probe::Unclear;
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
        let mut was_late = false;
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
                    // Acquire: a record that takes another's place is linked by this word alone.
                    let value = bucket.words[slot].load(Ordering::Acquire);
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
                        && let Some(_kept) = self.keep(value, was_late)
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
                        was_late = true;
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

    /// Puts a hazard on a record, so that it stays as it is; the caller must then check that it is still linked. In a shared
    /// store its pages might go; in a private one writers might change the bucket again and again while it is copied, so
    /// there for a reader who `was_late` once. `None` for others, or if there is no seat or hazard to be had.
    #[cold]
    fn keep(&self, record: u64, was_late: bool) -> Option<Kept<'_>> {
        if !was_late && !self.arena.is_shared() {
            return None;
        }
        let seat = self.seat().ok()?;
        let hazard = seat.hazard_free()?;
        seat.hazard_set(hazard, record);
        Some(Kept { seat, hazard })
    }
}
