//! Growing: each shard is copied to a longer or shorter array on its own, under its lock.
//!
//! A shard grows when an entry finds no free slot. To keep memory dense, inserts
//! also earn credit, with which they pass over the shards in order and rebuild
//! those that will be full soon. Readers use the old array until the directory
//! entry tells them to start over.

use super::{COUNT_BITS, Dir, SHARDS, Table};
use crate::bucket::{BUCKET_BYTES, SLOTS};
use crate::error::Error;
use llds::arena::fault::point;
use llds::arena::{LOG_BYTES_MAX, SPAN_BYTES, ThreadRef};
use std::cell::Cell;
use std::sync::atomic::Ordering;

/// Entries per bucket, in hundredths, to which a shard is rebuilt.
const FILL_TO: usize = SLOTS * 73;

/// A passing insert rebuilds shards above this fill, in hundredths of entries per bucket.
const FILL_PASS: usize = SLOTS * 84;

/// One insert of this many checks whether the incremental growth is due, and earns the credit of all. A power of two.
const INSERTS_PER_LOOK: u64 = 32;

/// Arrays ahead that a pass inspects to judge an extent.
const LOOK_AHEAD: usize = 16;

/// What passing over one shard costs of a thread's credit.
const CREDIT_PER_SHARD: i32 = 1 << 24;

/// The largest credit and the largest debt of a thread. A small table earns more than that; the excess is dropped, because
/// it has little memory to keep dense.
const CREDIT_MAX: i32 = CREDIT_PER_SHARD * INSERTS_PER_LOOK as i32;

/// The credit earned by as many inserts as there are entries: four and a half passes over all shards, one for each growth
/// of the table by 25 %. The fill rises from 0.73 to 0.91 between passes, which is 19.6 bytes per entry of 16 on average,
/// and an entry is copied four and a half times in total. More passes copy more. With fewer passes, more inserts find both
/// home buckets full, and arrays grow before their turn, out of the order in which memory is reused.
const CREDIT_PER_OWN_SIZE: i32 = CREDIT_PER_SHARD / 2 * 9;

/// Bytes in use from which on arrays lie in logs, however many threads there are.
const LOGS_FROM_BYTES: u64 = 128 * SPAN_BYTES as u64;

/// Buckets of the largest shard.
const BUCKETS_MAX: usize = (1 << COUNT_BITS) - 1;

thread_local! {
    /// This thread's credit for the incremental growth; negative after deletes.
    static CREDIT: Cell<i32> = const { Cell::new(0) };
    /// The extent this thread passed last (a table's address, an offset), and whether it is to be emptied.
    static EXTENT: Cell<((usize, u64), bool)> = const { Cell::new(((0, 0), false)) };
}

impl Table {
    /// Makes every shard large enough for its share of `entries`, so that inserts up to that number copy no array.
    pub fn reserve(&self, thread: &ThreadRef<'_>, entries: u64) -> Result<(), Error> {
        // Hashes spread the entries evenly up to a few standard deviations; a pass skips shards that are not filled further.
        let share = entries as f64 / SHARDS as f64;
        let most = share + 3.0 * share.sqrt();
        let wanted = (most * 100.0 / FILL_PASS as f64).ceil() as usize;
        let buckets_max = BUCKETS_MAX.min(self.arena.capacity_bytes() as usize / (BUCKET_BYTES * SHARDS));
        if wanted > buckets_max {
            let most = (buckets_max * FILL_PASS) as f64 / 100.0;
            // The inverse of `share + 3 * sqrt(share)`.
            let root = (most + 2.25).sqrt() - 1.5;
            return Err(Error::TooMany { entries, entries_max: (root * root * SHARDS as f64) as u64 });
        }
        for shard in 0..SHARDS {
            let _held = self.lock(thread, shard);
            if self.dir(shard, Ordering::Relaxed).buckets() < wanted {
                self.rebuild(thread, shard, wanted, false)?;
            }
        }
        Ok(())
    }

    /// Grows a full shard.
    pub(super) fn grow(&self, thread: &ThreadRef<'_>, shard: usize) -> Result<(), Error> {
        let buckets = self.dir(shard, Ordering::Relaxed).buckets();
        self.check_spread(shard, buckets)?;
        let wanted = fitting(self.count(shard) as usize + 1).max(buckets + 1 + buckets / 16);
        self.rebuild(thread, shard, longer(buckets, wanted), true)
    }

    /// Refuses a longer array if the entries are crowded in few buckets: a longer array would not help.
    fn check_spread(&self, shard: usize, buckets: usize) -> Result<(), Error> {
        let entries = self.count(shard);
        if buckets > 16 && entries * 8 < (buckets * SLOTS) as u64 { Err(Error::Crowded { entries }) } else { Ok(()) }
    }

    /// Moves a shard to an array of at least `wanted` buckets; to none if it is empty and `wanted` is 0.
    ///
    /// `alone` says that the shard is not the next in order: its array must not lie between those rebuilt in order.
    pub(super) fn rebuild(
        &self,
        thread: &ThreadRef<'_>,
        shard: usize,
        wanted: usize,
        alone: bool,
    ) -> Result<(), Error> {
        let old = self.dir(shard, Ordering::Relaxed);
        let mut wanted = self.even(thread, wanted, alone);
        let (offset, buckets) = loop {
            if wanted > BUCKETS_MAX {
                return Err(Error::Crowded { entries: self.count(shard) });
            }
            let buckets = rounded(wanted).min(BUCKETS_MAX);
            if buckets == 0 {
                break (0, 0);
            }
            let offset = match self.alloc_array(thread, buckets * BUCKET_BYTES, alone) {
                Ok(offset) => offset,
                Err(error) => {
                    thread.settle_alloc();
                    return Err(error.into());
                }
            };
            if self.copy(old, Dir(0).moved(offset, buckets)) {
                break (offset, buckets);
            }
            // Cleared before another thread can allocate the block: after a death in between, recovery must not free it.
            thread.settle_alloc();
            point();
            self.arena.free(thread, offset);
            self.check_spread(shard, buckets)?;
            wanted = longer(buckets, buckets + 1 + buckets / 8);
        };
        point();
        let new = old.moved(offset, buckets);
        if old.buckets() != 0 {
            thread.intend_retire(old.offset());
            point();
        }
        self.dir_word(shard).store(new.0, Ordering::Release);
        point();
        thread.settle_alloc();
        if old.buckets() != 0 {
            point();
            self.arena.retire_sized(thread, old.offset(), (old.buckets() * BUCKET_BYTES) as u64);
        }
        Ok(())
    }

    /// Allocates an array of so many bytes.
    fn alloc_array(&self, thread: &ThreadRef<'_>, bytes: usize, alone: bool) -> Result<u64, llds::arena::Error> {
        self.or_recover(thread, || match self.has_logs() {
            true => self.arena.alloc_log(thread, bytes, alone),
            false => self.arena.alloc(thread, bytes),
        })
    }

    /// Returns true if arrays lie in logs. In a small store the partly filled extents, two for each thread, would be most of
    /// it.
    fn has_logs(&self) -> bool {
        let extents = 2 * self.arena.threads_max_seen() * SPAN_BYTES as u64;
        self.arena.used_bytes() >= (4 * extents).min(LOGS_FROM_BYTES)
    }

    /// About `wanted` buckets, chosen so that blocks of that size fill the log's current extent exactly.
    fn even(&self, thread: &ThreadRef<'_>, wanted: usize, alone: bool) -> usize {
        let left = self.arena.log_room(thread, alone) / BUCKET_BYTES;
        let Some(each) = left.checked_div((left + wanted / 2).checked_div(wanted).unwrap_or(0)) else { return wanted };
        // Filling the extent must not make an array longer than allowed.
        if each.abs_diff(wanted) <= wanted / 16 { each.min(wanted.max(BUCKETS_MAX)) } else { wanted }
    }

    /// Moves a shard to a shorter array.
    #[cold]
    pub(super) fn shrink(&self, thread: &ThreadRef<'_>, shard: usize) {
        // Shrinking is optional: without memory for the smaller copy the larger one stays.
        let _ = self.rebuild(thread, shard, fitting(self.count(shard) as usize), true);
    }

    /// Called after an insert into a shard that has `count` entries now: rebuilds the next shards in order that will be
    /// full soon.
    #[inline(always)]
    pub(super) fn inserted(&self, hash: u64, count: u64) {
        if hash.is_multiple_of(INSERTS_PER_LOOK) {
            self.pass(count);
        }
    }

    #[cold]
    #[inline(never)]
    fn pass(&self, count: u64) {
        let Ok(thread) = self.thread() else { return };
        let mut credit = (CREDIT.get() + earned(count)).min(CREDIT_MAX);
        while credit >= CREDIT_PER_SHARD {
            credit -= CREDIT_PER_SHARD;
            self.pass_one(&thread);
        }
        CREDIT.set(credit);
    }

    /// Called after a delete from a shard that has `count` entries now: takes back most of the credit of an insert.
    ///
    /// With balanced inserts and deletes, fewer arrays are copied that need not grow. Taking all credit back would be too
    /// much: the passes also empty extents with holes left by arrays that grew out of order.
    #[inline(always)]
    pub(super) fn deleted(&self, hash: u64, count: u64) {
        if hash.is_multiple_of(INSERTS_PER_LOOK) {
            let credit = CREDIT.get() - earned(count) / 9 * 8;
            CREDIT.set(credit.max(-CREDIT_MAX));
        }
    }

    fn pass_one(&self, thread: &ThreadRef<'_>) {
        // SAFETY: `new` got an aligned word in the arena's root, which is mapped as long as `self`.
        let cursor = unsafe { &*self.cursor };
        let shard = cursor.fetch_add(1, Ordering::Relaxed) as usize % SHARDS;
        let look = || (self.count(shard) as usize, self.dir(shard, Ordering::Relaxed).buckets());
        let (count, buckets) = look();
        if is_due(count, buckets) {
            // Before the lock: writers that wait for the shard should not also wait for memory.
            if self.has_logs() {
                self.arena.ready_log(thread, rounded(self.even(thread, fitting(count), false)) * BUCKET_BYTES);
            }
        }
        let Some(_held) = self.try_lock(thread, shard) else { return };
        let (count, buckets) = look();
        if is_due(count, buckets) || (buckets != 0 && self.is_in_the_way(shard)) {
            // This rebuild is early, so its failure is ignored; the insert that needs the room reports a full store.
            let _ = self.rebuild(thread, shard, fitting(count), false);
        }
    }

    /// Returns true if moving a shard's array away helps to free memory.
    fn is_in_the_way(&self, shard: usize) -> bool {
        let dir = self.dir(shard, Ordering::Relaxed);
        let Some((extent, second)) = self.arena.log_of(dir.offset()) else { return false };
        if second {
            return true;
        }
        // Neighbours lie in one extent: the decision for the first holds for all, so that an extent is emptied as a whole.
        let here = (std::ptr::from_ref(self).addr(), extent);
        let (last, mut emptied) = EXTENT.get();
        if last != here {
            emptied =
                self.is_left(shard, extent) || self.arena.is_log_sparse(dir.offset(), dir.buckets() * BUCKET_BYTES);
            EXTENT.set((here, emptied));
        }
        emptied
    }

    /// Returns true if a quarter or more of the arrays from `shard` on in this extent will leave it anyway, because they
    /// are due to grow: the others would hold the whole extent until the next pass.
    fn is_left(&self, shard: usize, extent: u64) -> bool {
        let (mut due, mut all) = (0, 0);
        for near in shard..SHARDS.min(shard + LOOK_AHEAD) {
            let dir = self.dir(near, Ordering::Relaxed);
            if self.arena.log_of(dir.offset()).is_some_and(|(offset, _)| offset == extent) {
                all += 1;
                due += usize::from(is_due(self.count(near) as usize, dir.buckets()));
            }
        }
        due * 4 >= all
    }
}

/// The credit of [`INSERTS_PER_LOOK`] inserts if a shard has `count` entries.
fn earned(count: u64) -> i32 {
    // A shard has fewer than 2^22 entries, so the credit is never rounded to 0.
    let earned = INSERTS_PER_LOOK * CREDIT_PER_OWN_SIZE as u64 / count.max(1);
    earned.min(CREDIT_MAX as u64) as i32
}

/// Returns true if an array of `buckets` with `count` entries will be full soon.
fn is_due(count: usize, buckets: usize) -> bool {
    count * 100 > buckets * FILL_PASS
}

/// Returns true if an array of `buckets` should shrink when `count` entries are left in it.
#[inline(always)]
pub(super) fn is_sparse(count: u64, buckets: usize) -> bool {
    count == 0 || (buckets > 2 && (count as usize) * 3 < buckets * SLOTS)
}

/// Buckets for `count` entries at the fill to which shards are rebuilt; 0 for none.
pub(super) fn fitting(count: usize) -> usize {
    (count * 100).div_ceil(FILL_TO)
}

/// `wanted` buckets in place of `buckets`, limited to [`BUCKETS_MAX`] unless that is reached already.
fn longer(buckets: usize, wanted: usize) -> usize {
    if buckets < BUCKETS_MAX { wanted.min(BUCKETS_MAX) } else { wanted }
}

/// Buckets that fit the block which the arena allocates for `wanted` buckets.
fn rounded(wanted: usize) -> usize {
    let bytes = wanted * BUCKET_BYTES;
    if bytes <= LOG_BYTES_MAX { wanted } else { bytes.next_multiple_of(SPAN_BYTES) / BUCKET_BYTES }
}
