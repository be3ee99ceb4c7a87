//! Reading: lookups that take no lock and write nothing, one at a time and many in flight.
//!
//! What was read holds if the bucket's header and the segment's directory
//! entry are the same before and after; that there is nothing holds if both
//! buckets' headers are. Else the reader starts over. A key of
//! 8 bytes has a path of its own ([`Table::read_word`]) that ends in two
//! registers; all that it cannot decide goes to [`Table::read`].
use super::seen::{Both, Seen, ask_for_words};
use super::{Dir, Spot, Table};
use crate::bucket::{Head, Kind, Mark, SLOTS};
use crate::record::Record;
use llds::arena::SeatRef;
use llds::prefetch;
use std::hint::select_unpredictable;
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
    heads: (Head, Head),
    mask: u32,
}

impl Asked {
    /// No lookup.
    pub const NONE: Asked = Asked { dir: Dir(0), hash: 0, heads: (Head(0), Head(0)), mask: 0 };

    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// What was seen in both homes.
    #[inline(always)]
    fn seen<'t>(&self, both: Both<'t>) -> Seen<'t> {
        Seen { first: (both.0, self.heads.0), second: (both.1, self.heads.1), mask: self.mask }
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
        let both = self.both(dir, spot.remainder);
        // One of the two will be wanted, if any; the other costs less than to wait and see.
        ask_for_words(both);
        self.tell(spot, dir, self.see(both, spot.remainder, Ordering::Acquire))
    }

    /// What the homes of a key of 8 bytes say.
    #[inline(always)]
    fn tell(&self, spot: Spot, dir: Dir, seen: Seen<'_>) -> Probe {
        if seen.mask == 0 {
            let unchanged = self.is_unchanged(spot, dir, seen);
            return if unchanged { Probe::Missing } else { Probe::Unclear };
        }
        let ((bucket, head), slot) = seen.found();
        let (mark, value) = (bucket.mark(slot), bucket.words[slot].load(Ordering::Relaxed));
        // As in `read_as`.
        fence(Ordering::Acquire);
        let unchanged = bucket.head(Ordering::Relaxed) == head && self.dir(spot.segment, Ordering::Relaxed) == dir;
        if mark == Mark::new(Kind::inline(8), spot.remainder) && unchanged {
            return Probe::Inline(value.to_ne_bytes(), 8);
        }
        Table::tell_of(spot, mark, value, unchanged)
    }

    /// What an entry says that has another kind than most.
    #[cold]
    fn tell_of(spot: Spot, mark: Mark, value: u64, unchanged: bool) -> Probe {
        match mark.kind().inline_length() {
            Some(length) if unchanged && mark.fits(spot.remainder) => Probe::Inline(value.to_ne_bytes(), length),
            _ => Probe::Unclear,
        }
    }

    /// Whether both homes, and where they lie, are what they were when they were seen.
    #[inline(always)]
    fn is_unchanged(&self, spot: Spot, dir: Dir, seen: Seen<'_>) -> bool {
        fence(Ordering::Acquire);
        seen.is_unchanged() && self.dir(spot.segment, Ordering::Relaxed) == dir
    }

    /// Begins a lookup of many: asks for the first home of a hash. What many lookups ask for in vain costs them more than
    /// a further step, so the second home waits until the first was looked at.
    #[inline]
    pub fn ask(&self, hash: u64) -> Asked {
        let spot = Spot::of(hash);
        let dir = self.dir(spot.segment, Ordering::Acquire);
        prefetch(self.both(dir, spot.remainder).0);
        Asked { dir, hash, ..Asked::NONE }
    }

    /// Goes on with a lookup: looks at the first home, and asks for the value, or for the second home.
    #[inline]
    pub fn ask_on(&self, asked: &mut Asked) {
        if asked.dir.buckets() == 0 {
            return;
        }
        let remainder = Spot::of(asked.hash).remainder;
        let (first, second) = self.both(asked.dir, remainder);
        asked.heads.0 = first.head(Ordering::Acquire);
        asked.mask = self.see_one((first, asked.heads.0), remainder);
        let value = std::ptr::from_ref(&first.words[asked.mask.trailing_zeros() as usize % SLOTS]).cast();
        prefetch(select_unpredictable(asked.mask == 0, std::ptr::from_ref(second), value));
    }

    /// Goes on with a lookup: looks at the second home if there was nothing in the first one, and asks for the value.
    #[inline]
    pub fn ask_farther(&self, asked: &mut Asked) {
        if asked.dir.buckets() == 0 {
            return;
        }
        let remainder = Spot::of(asked.hash).remainder;
        let (first, second) = self.both(asked.dir, remainder);
        let is_second = asked.mask == 0;
        let bucket = select_unpredictable(is_second, second, first);
        let head = bucket.head(Ordering::Acquire);
        let mask = self.see_one((bucket, head), remainder);
        // What was in the first home and has gone meanwhile is perhaps in the second, at which nobody looked: no header is
        // like this one.
        let (seen, unseen) = (asked.heads.0, Head(u64::MAX));
        asked.heads = (select_unpredictable(is_second, seen, head), select_unpredictable(is_second, head, unseen));
        asked.mask = mask << select_unpredictable(is_second, SLOTS, 0);
        // Where nothing was found this is some line that does no harm.
        prefetch(&bucket.words[mask.trailing_zeros() as usize % SLOTS]);
    }

    /// Goes on with a lookup by another key than of 8 bytes: asks for the record.
    #[inline]
    pub fn ask_record(&self, asked: &Asked) {
        if asked.mask != 0 {
            let seen = asked.seen(self.both(asked.dir, Spot::of(asked.hash).remainder));
            let ((bucket, _), slot) = seen.found();
            Record::prefetch(&self.arena, bucket.words[slot].load(Ordering::Relaxed));
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
        self.tell(spot, asked.dir, asked.seen(self.both(asked.dir, spot.remainder)))
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
            let mut seen = self.see(self.both(dir, spot.remainder), spot.remainder, Ordering::Acquire);
            while seen.mask != 0 {
                let ((bucket, head), slot) = seen.found();
                seen.mask &= seen.mask - 1;
                let mark = bucket.mark(slot);
                if !mark.fits(spot.remainder) {
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
                if let Some(length) = mark.kind().inline_length() {
                    if key.len() != 8 || record_kind == Kind::SECOND {
                        continue;
                    }
                    if !unchanged() {
                        continue 'again;
                    }
                    sink.inline(value.to_ne_bytes(), length);
                    return (true, false);
                }
                if mark.kind() != record_kind {
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
            if self.is_unchanged(spot, dir, seen) {
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
