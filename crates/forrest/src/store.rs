//! The store: what a program calls.

mod open;
mod root;

use open::path_of;
use root::ROOT_BYTES;

use crate::bucket::SlotKind;
use crate::config::Options;
use crate::error::Error;
use crate::order::{KeyBound, Order};
use crate::recover::Report;
use crate::scan::Scan;
use crate::stats::Stats;
use crate::table::{Change, Lookup, Probe, SHARDS, Sink, Table};
use crate::value::{Guarding, Into, Presence, Ref, RefBytes, Value};
use llds::arena;
use std::io;
use std::ops::{Bound, RangeBounds};
use std::sync::atomic::Ordering;

/// Lookups that `get_many` keeps in flight: the lines that one lookup needs next are prefetched while it works on others.
const LOOKUPS: usize = 64;
/// Changes that `set_many` keeps in flight.
const BATCH: usize = 32;

/// A key-value store in memory. Clones are the same store; all methods may be called by many threads concurrently.
///
/// Keys and values are bytes. Reads take no lock and wait for no other thread; writers of one of 4,096 shards wait for
/// each other. Every operation on one key takes effect at one instant between its call and its return.
///
/// ```
/// let store = forrest::Store::new()?;
/// store.set(b"apples", b"3")?;
/// assert_eq!(store.get(b"apples").unwrap(), b"3");
/// assert_eq!(store.add(b"visits", 1)?, 1);
/// assert!(store.delete(b"apples")?);
/// assert!(store.get(b"apples").is_none());
/// # Ok::<(), forrest::Error>(())
/// ```
#[derive(Clone)]
pub struct Store {
    table: std::sync::Arc<Table>,
    order: Option<std::sync::Arc<Order>>,
    limit_bytes: u64,
}

impl Store {
    /// Makes a private store with default settings.
    ///
    /// # Errors
    /// As [`Options::private`].
    pub fn new() -> Result<Store, Error> {
        Options::new().private()
    }

    /// Opens the shared store `name` with default settings, or makes it. It outlives its processes until
    /// [`Store::remove`].
    ///
    /// # Errors
    /// As [`Options::open`].
    pub fn open(name: &str) -> Result<Store, Error> {
        Options::new().open(name)
    }

    /// Removes the shared store `name`. Processes that have it open go on with it; its memory comes back when the
    /// last one closes it.
    ///
    /// # Errors
    /// [`Error::NotFound`] if there is none.
    pub fn remove(name: &str) -> Result<(), Error> {
        match std::fs::remove_file(path_of(name)?) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(Error::NotFound(name.to_owned())),
            other => Ok(other?),
        }
    }

    /// Returns the value of `key`, copied.
    #[inline]
    pub fn get(&self, key: &[u8]) -> Option<Value> {
        let hash = self.table.hasher.first(key);
        if key.len() == 8 {
            match self.table.read_word(hash) {
                Probe::Inline(bytes, length) => return Some(Value::short(bytes, length)),
                Probe::Missing => return None,
                Probe::Unclear => {}
            }
        }
        self.get_any(key, hash)
    }

    #[inline(never)]
    fn get_any(&self, key: &[u8], hash: u64) -> Option<Value> {
        let mut value = Value::new();
        self.table.read(key, hash, &mut value).then_some(value)
    }

    /// Passes the value of `key` to `sink`, perhaps in several attempts. Returns false if there is none.
    #[inline]
    pub(crate) fn read(&self, key: &[u8], sink: &mut impl Sink) -> bool {
        let hash = self.table.hasher.first(key);
        if key.len() == 8 {
            match self.table.read_word(hash) {
                Probe::Inline(bytes, length) => {
                    sink.inline(bytes, length);
                    return true;
                }
                Probe::Missing => return false,
                Probe::Unclear => {}
            }
        }
        self.table.read(key, hash, sink)
    }

    /// Copies the value of `key` into `out`, replacing its content. Returns false, with an empty `out`, if there is none.
    #[inline]
    pub fn get_into(&self, key: &[u8], out: &mut Vec<u8>) -> bool {
        let found = self.read(key, &mut Into(out));
        if !found {
            out.clear();
        }
        found
    }

    /// Returns the value of `key` in place, under a guard.
    #[inline]
    pub fn get_ref(&self, key: &[u8]) -> Option<Ref<'_>> {
        let hash = self.table.hasher.first(key);
        if key.len() == 8 {
            match self.table.read_word(hash) {
                Probe::Inline(bytes, length) => {
                    return Some(Ref { bytes: RefBytes::Short { bytes, length: length as u8 } });
                }
                Probe::Missing => return None,
                Probe::Unclear => {}
            }
        }
        self.get_ref_any(key, hash)
    }

    #[inline(never)]
    fn get_ref_any(&self, key: &[u8], hash: u64) -> Option<Ref<'_>> {
        let thread = self.table.thread().ok();
        let hazard = thread.as_ref().and_then(|thread| thread.hazard_free());
        let bytes = RefBytes::Short { bytes: [0; 8], length: 0 };
        let mut sink = Guarding { arena: &self.table.arena, thread, hazard, bytes, offset: 0 };
        let found = self.table.read(key, hash, &mut sink);
        if let (Some(thread), Some(hazard)) = (sink.thread, sink.hazard) {
            let record = crate::overflow_record::OverflowRecord::at(sink.arena, sink.offset)
                .filter(|_| found && sink.offset != 0);
            match record {
                Some(record) => {
                    // SAFETY: `Guarding` set the hazard before `read` checked that the record is still linked, and the
                    // hazard stays until the guard is dropped.
                    let value = unsafe { record.value() };
                    return Some(Ref { bytes: RefBytes::Held { value, hazard, thread, arena: sink.arena } });
                }
                None => thread.hazard_clear(hazard),
            }
        }
        found.then_some(Ref { bytes: sink.bytes })
    }

    /// Returns true if there is an entry of `key`.
    #[inline]
    pub fn contains(&self, key: &[u8]) -> bool {
        self.read(key, &mut Presence)
    }

    /// Calls `each` with the position and value of every key in turn, keeping many lookups in flight.
    pub fn get_many<K: AsRef<[u8]>>(&self, keys: &[K], mut each: impl FnMut(usize, Option<&[u8]>)) {
        let table = &*self.table;
        let mut long = Vec::new();
        let mut lookup = [Lookup::NONE; LOOKUPS];
        for (batch, keys) in keys.chunks(LOOKUPS).enumerate() {
            for (lookup, key) in lookup.iter_mut().zip(keys) {
                *lookup = table.begin_lookup(table.hasher.first(key.as_ref()));
            }
            for lookup in &mut lookup[..keys.len()] {
                table.probe_first(lookup);
            }
            for lookup in &mut lookup[..keys.len()] {
                table.probe_second(lookup);
            }
            for (lookup, _) in lookup.iter().zip(keys).filter(|(_, key)| key.as_ref().len() != 8) {
                table.prefetch_record(lookup);
            }
            for (index, (key, lookup)) in keys.iter().zip(&lookup).enumerate() {
                if key.as_ref().len() == 8 {
                    match table.finish_lookup(lookup) {
                        Probe::Inline(bytes, length) => {
                            each(batch * LOOKUPS + index, Some(&bytes[..length]));
                            continue;
                        }
                        Probe::Missing => {
                            each(batch * LOOKUPS + index, None);
                            continue;
                        }
                        Probe::Unclear => {}
                    }
                }
                let hash = lookup.hash();
                let mut sink = Batched { short: [0; 8], length: 0, long: &mut long, is_long: false };
                let found = table.read(key.as_ref(), hash, &mut sink);
                let (short, length, is_long) = (sink.short, sink.length, sink.is_long);
                let value = if is_long { &long[..] } else { &short[..length] };
                each(batch * LOOKUPS + index, found.then_some(value));
            }
        }
    }

    /// Changes an entry, and the order of keys if there is one.
    #[inline]
    fn modify<'v>(
        &self,
        key: &[u8],
        hash: u64,
        decide: impl FnOnce(Option<&[u8]>) -> Result<Change<'v>, Error>,
    ) -> Result<bool, Error> {
        match &self.order {
            None => self.table.modify(key, hash, decide),
            Some(order) => order.modify(&self.table, key, hash, decide),
        }
    }

    /// Sets `key` to `value`. Returns whether it was there before.
    ///
    /// # Errors
    /// [`Error::KeyTooLong`], [`Error::ValueTooLong`], or [`Error::Arena`] at the memory limit.
    #[inline]
    pub fn set(&self, key: &[u8], value: &[u8]) -> Result<bool, Error> {
        self.set_hashed(key, value, self.table.hasher.first(key), false)
    }

    /// `prefetched` says that the lines it needs were prefetched.
    #[inline]
    fn set_hashed(&self, key: &[u8], value: &[u8], hash: u64, prefetched: bool) -> Result<bool, Error> {
        if key.len() == 8 && value.len() <= 8 && self.order.is_none() {
            // The most common length first, so that it is one load and no call of memcpy.
            let word = match value.try_into() {
                Ok(bytes) => u64::from_ne_bytes(bytes),
                Err(_) => short_word(value),
            };
            if let Some(existed) = self.table.set_word(hash, SlotKind::inline(value.len()), word, prefetched) {
                return Ok(existed);
            }
        }
        self.set_any(key, value, hash)
    }

    #[inline(never)]
    fn set_any(&self, key: &[u8], value: &[u8], hash: u64) -> Result<bool, Error> {
        self.modify(key, hash, |_| Ok(Change::Put(value)))
    }

    /// Sets many keys, keeping many of their cache misses in flight. Stops at the first error; those before it are set.
    ///
    /// # Errors
    /// As [`Store::set`].
    pub fn set_many<K: AsRef<[u8]>, V: AsRef<[u8]>>(&self, entries: &[(K, V)]) -> Result<(), Error> {
        let table = &*self.table;
        let mut hashes = [0u64; BATCH];
        for entries in entries.chunks(BATCH) {
            for (hash, (key, _)) in hashes.iter_mut().zip(entries) {
                *hash = table.hasher.first(key.as_ref());
                table.prefetch_write(*hash);
            }
            for &hash in &hashes[..entries.len()] {
                table.prefetch_write_values(hash);
            }
            for ((key, value), &hash) in entries.iter().zip(&hashes) {
                self.set_hashed(key.as_ref(), value.as_ref(), hash, true)?;
            }
        }
        Ok(())
    }

    /// Sets `key` to `value` if there is no entry of it. Returns true if it did.
    ///
    /// # Errors
    /// As [`Store::set`].
    #[inline]
    pub fn insert(&self, key: &[u8], value: &[u8]) -> Result<bool, Error> {
        let hash = self.table.hasher.first(key);
        let existed =
            self.modify(key, hash, |now| Ok(if now.is_some() { Change::Keep } else { Change::Put(value) }))?;
        Ok(!existed)
    }

    /// Deletes the entry of `key`. Returns true if there was one.
    ///
    /// # Errors
    /// [`Error::Arena`] in a forked child, or when too many threads use the store.
    #[inline]
    pub fn delete(&self, key: &[u8]) -> Result<bool, Error> {
        let hash = self.table.hasher.first(key);
        if key.len() == 8
            && self.order.is_none()
            && let Some(existed) = self.table.delete_word(hash)
        {
            return Ok(existed);
        }
        self.delete_any(key, hash)
    }

    #[inline(never)]
    fn delete_any(&self, key: &[u8], hash: u64) -> Result<bool, Error> {
        self.modify(key, hash, |_| Ok(Change::Delete))
    }

    /// Deletes the entry of `key` and returns its value.
    ///
    /// # Errors
    /// As [`Store::delete`].
    pub fn take(&self, key: &[u8]) -> Result<Option<Vec<u8>>, Error> {
        let mut taken = None;
        self.modify(key, self.table.hasher.first(key), |now| {
            taken = now.map(<[u8]>::to_vec);
            Ok(Change::Delete)
        })?;
        Ok(taken)
    }

    /// Adds `delta` to the number under `key` and returns the sum; no entry counts as 0, sums wrap.
    ///
    /// A number is a value of 8 bytes, little-endian.
    ///
    /// # Errors
    /// [`Error::NotANumber`] if the value has another length; otherwise as [`Store::set`].
    #[inline]
    pub fn add(&self, key: &[u8], delta: i64) -> Result<i64, Error> {
        let mut sum = 0;
        self.modify(key, self.table.hasher.first(key), |now| {
            let number = match now {
                None => 0,
                Some(bytes) => {
                    i64::from_le_bytes(bytes.try_into().map_err(|_| Error::NotANumber { bytes: bytes.len() })?)
                }
            };
            sum = number.wrapping_add(delta);
            Ok(Change::Word(sum.to_le_bytes()))
        })?;
        Ok(sum)
    }

    /// Sets `key` to `new` if its value is `expected`, where `None` stands for no entry. Returns whether it did.
    ///
    /// # Errors
    /// As [`Store::set`].
    pub fn compare_swap(&self, key: &[u8], expected: Option<&[u8]>, new: Option<&[u8]>) -> Result<bool, Error> {
        let mut done = false;
        self.modify(key, self.table.hasher.first(key), |now| {
            done = now == expected;
            Ok(match new {
                Some(value) if done => Change::Put(value),
                None if done => Change::Delete,
                _ => Change::Keep,
            })
        })?;
        Ok(done)
    }

    /// Calls `visit` with every entry, in no order, until it returns false.
    ///
    /// Entries that are there all the time are visited once; those set or deleted meanwhile may be or not. `visit`
    /// runs without locks and may change the store.
    ///
    /// # Errors
    /// [`Error::Arena`] in a forked child, or when too many threads use the store.
    pub fn for_each(&self, mut visit: impl FnMut(&[u8], &[u8]) -> bool) -> Result<(), Error> {
        let table = &*self.table;
        let (mut bytes, mut ends) = (Vec::new(), Vec::new());
        for shard in 0..SHARDS {
            // Looked up each time: if `visit` forked, the child must not lock a shard in its parent's name.
            let thread = table.thread()?;
            if table.dir(shard, Ordering::Relaxed).buckets() == 0 {
                continue;
            }
            bytes.clear();
            ends.clear();
            {
                let _held = table.lock(&thread, shard);
                table.each_in(shard, |place, remainder| {
                    table.key_of(shard, place, remainder, &mut bytes);
                    let key_end = bytes.len();
                    match place.kind.inline_length() {
                        Some(length) => bytes.extend_from_slice(&place.word.to_ne_bytes()[..length]),
                        None => {
                            if let Some(record) = crate::overflow_record::OverflowRecord::at(&table.arena, place.word) {
                                record.copy_value(&mut bytes);
                            }
                        }
                    }
                    ends.push((key_end, bytes.len()));
                });
            }
            let mut start = 0;
            for &(key_end, end) in &ends {
                if !visit(&bytes[start..key_end], &bytes[key_end..end]) {
                    return Ok(());
                }
                start = end;
            }
        }
        Ok(())
    }

    /// Goes through the entries of a range by key order, or backwards by `rev`.
    ///
    /// Keys are compared byte by byte. Entries that are there all the time are seen once; those set or deleted
    /// meanwhile may be or not. No lock is held between two steps.
    ///
    /// ```
    /// let store = forrest::Options::new().ordered().private()?;
    /// for name in ["cherry", "apple", "banana"] {
    ///     store.set(name.as_bytes(), b"1")?;
    /// }
    /// let names: Vec<_> = store.scan::<[u8]>(&b"b"[..]..)?.map(|(key, _)| key).collect();
    /// assert_eq!(names, [b"banana".to_vec(), b"cherry".to_vec()]);
    /// assert_eq!(store.scan::<[u8]>(..)?.next_back().unwrap().0, b"cherry");
    /// # Ok::<(), forrest::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::NotOrdered`] if the store was not made with [`Options::ordered`].
    pub fn scan<'r, K: AsRef<[u8]> + ?Sized + 'r>(&self, range: impl RangeBounds<&'r K>) -> Result<Scan<'_>, Error> {
        if self.order.is_none() {
            return Err(Error::NotOrdered);
        }
        // In a forked child a part of the order that another thread was writing at the fork stays locked for ever.
        if self.is_forked() {
            return Err(arena::Error::Forked.into());
        }
        let own = |bound: Bound<&&'r K>| bound.map(|key| key.as_ref().to_vec());
        Ok(Scan::new(self, own(range.start_bound()), own(range.end_bound())))
    }

    pub(crate) fn key_page(&self, low: &KeyBound, high: &KeyBound, back: bool, count: usize) -> Vec<Vec<u8>> {
        self.order.as_ref().map_or_else(Vec::new, |order| order.page(low, high, back, count))
    }

    /// Whether keys are kept in order, for [`Store::scan`].
    pub fn is_ordered(&self) -> bool {
        self.order.is_some()
    }

    /// Makes room for `entries` entries in all, so that inserts up to there copy nothing to grow.
    ///
    /// The memory is allocated and touched now: about 20 bytes for each entry. Entries other than keys of 8 bytes with
    /// values of up to 8 bytes take further memory when they are set. Deletes shrink the room when a third of it would
    /// suffice.
    ///
    /// # Errors
    /// [`Error::TooMany`], with nothing done, if these entries alone would exceed the memory limit. [`Error::Arena`] at the
    /// memory limit; room made until then stays. [`Error::is_full`] is true for both.
    pub fn reserve(&self, entries: u64) -> Result<(), Error> {
        self.table.reserve(&self.table.thread()?, entries)
    }

    /// Deletes all entries, and gives back their memory and the room made by [`Store::reserve`]. Returns the number of
    /// deleted entries. Entries set meanwhile may stay.
    ///
    /// # Errors
    /// As [`Store::delete`].
    pub fn clear(&self) -> Result<u64, Error> {
        let thread = self.table.thread()?;
        let clear = || (0..SHARDS).map(|shard| self.table.clear_shard(&thread, shard)).sum();
        let cleared = match &self.order {
            None => clear(),
            Some(order) => order.clear(&self.table, clear),
        };
        self.table.arena.trim(&thread);
        Ok(cleared)
    }

    /// Returns the number of entries. Exact while no thread writes.
    pub fn len(&self) -> u64 {
        (0..SHARDS).map(|shard| self.table.count(shard)).sum()
    }

    /// Whether there is no entry.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the store's contents and memory. Walks the whole table of spans.
    pub fn stats(&self) -> Stats {
        let stats = self.table.arena.stats();
        let arrays = (0..SHARDS).map(|s| self.table.dir(s, Ordering::Relaxed)).filter(|dir| dir.buckets() != 0);
        // The arena does not know the size of log blocks, so it counted 64 bytes for each array.
        let (bucket_count, array_bytes) = arrays.fold((0, 0), |(count, bytes), dir| {
            let counted = self.table.arena.block_bytes(dir.offset());
            let size = (dir.buckets() * crate::bucket::BUCKET_BYTES) as u64;
            (count + dir.buckets() as u64, bytes + size.saturating_sub(counted))
        });
        Stats {
            entry_count: self.len(),
            bucket_count,
            allocated_bytes: stats.spans.allocated_bytes + array_bytes,
            held_bytes: stats.spans.held_bytes - stats.spans.kept_bytes,
            kept_bytes: stats.spans.kept_bytes,
            fixed_bytes: ROOT_BYTES as u64,
            order_bytes: self.order.as_ref().map_or(0, |order| order.memory_bytes()),
            limit_bytes: self.limit_bytes,
            backing: stats.backing,
            thread_count: stats.thread_count,
            recovery_count: stats.recovery_count,
        }
    }

    /// Gives free memory back to the system now.
    ///
    /// # Errors
    /// As [`Store::delete`].
    pub fn trim(&self) -> Result<(), Error> {
        let thread = self.table.thread()?;
        self.table.arena.trim(&thread);
        Ok(())
    }

    /// Releases what processes held that were killed while they used this store, and takes back what idle threads hold. Both
    /// happen automatically where a dead process blocks another, or an operation finds no room; this call looks for all.
    pub fn recover(&self) {
        self.table.recover_all();
        // Fails where all records are taken by living threads; then there is nothing to do without one.
        let _ = self.table.arena.relieve();
    }

    /// Returns the shard of a key, for tests: keys of one shard share its lock and its buckets.
    #[doc(hidden)]
    pub fn shard_of(&self, key: &[u8]) -> usize {
        crate::table::Spot::of(self.table.hasher.first(key)).shard
    }

    /// Checks every invariant of the layout, entry by entry. Exact only while no thread writes.
    ///
    /// # Errors
    /// A description of the first violation.
    pub fn check(&self) -> Result<Report, String> {
        self.table.check()
    }

    /// Returns true if this handle was opened before the calling process was forked: then only reads work.
    #[inline]
    pub fn is_forked(&self) -> bool {
        self.table.arena.is_forked()
    }
}

/// The word of a value of less than 8 bytes.
fn short_word(value: &[u8]) -> u64 {
    let mut bytes = [0; 8];
    bytes[..value.len()].copy_from_slice(value);
    u64::from_ne_bytes(bytes)
}

/// The sink of one lookup of `get_many`.
struct Batched<'v> {
    short: [u8; 8],
    length: usize,
    long: &'v mut Vec<u8>,
    is_long: bool,
}

impl Sink for Batched<'_> {
    #[inline]
    fn inline(&mut self, bytes: [u8; 8], length: usize) {
        (self.short, self.length, self.is_long) = (bytes, length, false);
    }

    fn record(&mut self, record: crate::overflow_record::OverflowRecord<'_>, _offset: u64) {
        self.long.clear();
        record.copy_value(self.long);
        self.is_long = true;
    }
}

#[cfg(test)]
mod tests;
