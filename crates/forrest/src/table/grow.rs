//! Growing: each segment is copied to a longer or shorter array on its own, under its lock.
//!
//! A segment grows when an entry finds no room. So that memory stays dense,
//! inserts also earn credit with which they pass over the segments in order
//! and rebuild those that will be full soon. Readers go on in the old array
//! until the directory entry tells them to start over.

use super::{COUNT_BITS, Dir, SEGMENTS, Table};
use crate::bucket::{BUCKET_BYTES, SLOTS};
use crate::error::Error;
use llds::arena::fault::point;
use llds::arena::{LOG_BYTES_MAX, SPAN_BYTES, SeatRef};
use std::cell::Cell;
use std::sync::atomic::Ordering;

/// Entries per bucket, in hundredths, to which a segment is rebuilt.
const FILL_TO: usize = SLOTS * 73;

/// A passing insert rebuilds segments above this fill, in hundredths of entries per bucket.
const FILL_PASS: usize = SLOTS * 84;

/// One insert of so many looks whether the passing growth is due, and earns for all of them. A power of two.
const INSERTS_PER_LOOK: u64 = 32;

/// By so many arrays ahead a pass judges an extent.
const LOOK_AHEAD: usize = 16;

/// What passing over one segment costs of a thread's credit.
const CREDIT_PER_SEGMENT: i32 = 1 << 24;

/// The most that a thread keeps, and the most that it is behind. What a small table owes beyond a few segments is let go: it
/// has little memory to keep dense.
const CREDIT_MAX: i32 = CREDIT_PER_SEGMENT * INSERTS_PER_LOOK as i32;

/// What as many inserts as there are entries earn: four and a half passes over all segments, one each time that the table has
/// grown by 25 %. Fill rises from 0.73 to 0.91 meanwhile, 19.6 bytes per entry of 16 on average, and an entry is copied four
/// and a half times on the whole. With more passes more is copied; with fewer, more inserts find both homes full, and arrays
/// fail before their turn and leave the order in which memory is used again.
const CREDIT_PER_OWN_SIZE: i32 = CREDIT_PER_SEGMENT / 2 * 9;

/// Buckets of the largest segment.
const BUCKETS_MAX: usize = (1 << COUNT_BITS) - 1;

thread_local! {
    /// What this thread owes the passing growth; less than nothing where it deleted.
    static CREDIT: Cell<i32> = const { Cell::new(0) };
    /// The extent this thread passed last (a table's address, an offset), and whether it is to be emptied.
    static EXTENT: Cell<((usize, u64), bool)> = const { Cell::new(((0, 0), false)) };
}

impl Table {
    /// Makes every segment large enough for its share of `entries`, so that inserts up to there copy none.
    pub fn reserve(&self, seat: &SeatRef<'_>, entries: u64) -> Result<(), Error> {
        // Hashes spread them evenly, but for a few deviations; a pass leaves segments alone that are not filled further.
        let share = entries as f64 / SEGMENTS as f64;
        let most = share + 3.0 * share.sqrt();
        let wanted = (most * 100.0 / FILL_PASS as f64).ceil() as usize;
        let buckets_max = BUCKETS_MAX.min(self.arena.capacity_bytes() as usize / (BUCKET_BYTES * SEGMENTS));
        if wanted > buckets_max {
            let most = (buckets_max * FILL_PASS) as f64 / 100.0;
            // As above, the other way round.
            let root = (most + 2.25).sqrt() - 1.5;
            return Err(Error::TooMany { entries, entries_max: (root * root * SEGMENTS as f64) as u64 });
        }
        for segment in 0..SEGMENTS {
            let _held = self.lock(seat, segment);
            if self.dir(segment, Ordering::Relaxed).buckets() < wanted {
                self.rebuild(seat, segment, wanted, false)?;
            }
        }
        Ok(())
    }

    /// Makes room in a segment that is full.
    pub(super) fn grow(&self, seat: &SeatRef<'_>, segment: usize) -> Result<(), Error> {
        let buckets = self.dir(segment, Ordering::Relaxed).buckets();
        self.check_hope(segment, buckets)?;
        let wanted = fitting(self.count(segment) as usize + 1).max(buckets + 1 + buckets / 16);
        self.rebuild(seat, segment, longer(buckets, wanted), true)
    }

    /// Refuses a longer array to entries that nearly all want the same few buckets: it would not help them.
    fn check_hope(&self, segment: usize, buckets: usize) -> Result<(), Error> {
        let entries = self.count(segment);
        if buckets > 16 && entries * 8 < (buckets * SLOTS) as u64 { Err(Error::Crowded { entries }) } else { Ok(()) }
    }

    /// Moves a segment to an array of at least `wanted` buckets; to none if it is empty and `wanted` is 0.
    ///
    /// `alone` says that it is not the next one in order: it must not lie between those that move in order.
    pub(super) fn rebuild(&self, seat: &SeatRef<'_>, segment: usize, wanted: usize, alone: bool) -> Result<(), Error> {
        let old = self.dir(segment, Ordering::Relaxed);
        let mut wanted = self.even(seat, wanted, alone);
        let (offset, buckets) = loop {
            if wanted > BUCKETS_MAX {
                return Err(Error::Crowded { entries: self.count(segment) });
            }
            let buckets = rounded(wanted).min(BUCKETS_MAX);
            if buckets == 0 {
                break (0, 0);
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
            self.check_hope(segment, buckets)?;
            wanted = longer(buckets, buckets + 1 + buckets / 8);
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
        // Never longer than an array may be for what fills the extent only.
        if each.abs_diff(wanted) <= wanted / 16 { each.min(wanted.max(BUCKETS_MAX)) } else { wanted }
    }

    /// Moves a segment to a shorter array.
    #[cold]
    pub(super) fn shrink(&self, seat: &SeatRef<'_>, segment: usize) {
        // Less memory is a kindness, not a duty: without room for the smaller copy the larger one stays.
        let _ = self.rebuild(seat, segment, fitting(self.count(segment) as usize), true);
    }

    /// After an insert into a segment that has `count` entries now: rebuild the next segments in order that will be full
    /// soon.
    #[inline(always)]
    pub(super) fn inserted(&self, hash: u64, count: u64) {
        if hash.is_multiple_of(INSERTS_PER_LOOK) {
            self.pass(count);
        }
    }

    #[cold]
    #[inline(never)]
    fn pass(&self, count: u64) {
        let Ok(seat) = self.seat() else { return };
        let mut credit = (CREDIT.get() + earned(count)).min(CREDIT_MAX);
        while credit >= CREDIT_PER_SEGMENT {
            credit -= CREDIT_PER_SEGMENT;
            self.pass_one(&seat);
        }
        CREDIT.set(credit);
    }

    /// After a delete from a segment that has `count` entries now: it takes back most of what an insert earns.
    ///
    /// Where entries come and go, fewer arrays are copied that need not become longer. All of it would be too much: the
    /// passes also empty the extents in which arrays that grew out of order have left holes.
    #[inline(always)]
    pub(super) fn deleted(&self, hash: u64, count: u64) {
        if hash.is_multiple_of(INSERTS_PER_LOOK) {
            let credit = CREDIT.get() - earned(count) / 9 * 8;
            CREDIT.set(credit.max(-CREDIT_MAX));
        }
    }

    fn pass_one(&self, seat: &SeatRef<'_>) {
        // SAFETY: the word lies in the root of the arena, which lives as long as `self`.
        let cursor = unsafe { &*self.cursor };
        let segment = cursor.fetch_add(1, Ordering::Relaxed) as usize % SEGMENTS;
        let look = || (self.count(segment) as usize, self.dir(segment, Ordering::Relaxed).buckets());
        let (count, buckets) = look();
        if is_due(count, buckets) {
            // Whoever waits for the segment should not wait for memory.
            self.arena.ready_log(seat, rounded(self.even(seat, fitting(count), false)) * BUCKET_BYTES);
        }
        let Some(_held) = self.try_lock(seat, segment) else { return };
        let (count, buckets) = look();
        if is_due(count, buckets) || (buckets != 0 && self.is_in_the_way(segment)) {
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
        let (last, mut emptied) = EXTENT.get();
        if last != here {
            emptied =
                self.is_left(segment, extent) || self.arena.is_log_sparse(dir.offset(), dir.buckets() * BUCKET_BYTES);
            EXTENT.set((here, emptied));
        }
        emptied
    }

    /// Whether a quarter or more of the arrays from `segment` on that lie in an extent leave it by themselves: the rest
    /// would hold all of it until the next pass.
    fn is_left(&self, segment: usize, extent: u64) -> bool {
        let (mut due, mut all) = (0, 0);
        for near in segment..SEGMENTS.min(segment + LOOK_AHEAD) {
            let dir = self.dir(near, Ordering::Relaxed);
            if self.arena.log_of(dir.offset()).is_some_and(|(offset, _)| offset == extent) {
                all += 1;
                due += usize::from(is_due(self.count(near) as usize, dir.buckets()));
            }
        }
        due * 4 >= all
    }
}

/// What [`INSERTS_PER_LOOK`] inserts earn where a segment has `count` entries.
fn earned(count: u64) -> i32 {
    // A segment has fewer than 2^22 entries, so that what inserts owe is never rounded to nothing.
    let earned = INSERTS_PER_LOOK * CREDIT_PER_OWN_SIZE as u64 / count.max(1);
    earned.min(CREDIT_MAX as u64) as i32
}

/// Whether an array of `buckets` with `count` entries will be full soon.
fn is_due(count: usize, buckets: usize) -> bool {
    count * 100 > buckets * FILL_PASS
}

/// Whether an array of `buckets` is to become shorter when `count` entries are left in it.
#[inline(always)]
pub(super) fn is_sparse(count: u64, buckets: usize) -> bool {
    count == 0 || (buckets > 2 && (count as usize) * 3 < buckets * SLOTS)
}

/// Buckets for `count` entries at the fill to which segments are rebuilt; 0 for none.
pub(super) fn fitting(count: usize) -> usize {
    (count * 100).div_ceil(FILL_TO)
}

/// The `wanted` buckets in place of fewer; the last step that there can be may be a short one.
fn longer(buckets: usize, wanted: usize) -> usize {
    if buckets < BUCKETS_MAX { wanted.min(BUCKETS_MAX) } else { wanted }
}

/// Buckets of the block that the arena gives for `wanted` of them.
fn rounded(wanted: usize) -> usize {
    let bytes = wanted * BUCKET_BYTES;
    if bytes <= LOG_BYTES_MAX { wanted } else { bytes.next_multiple_of(SPAN_BYTES) / BUCKET_BYTES }
}
