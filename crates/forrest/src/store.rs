//! The store: what a program calls.

use crate::bucket::SlotKind;
use crate::config::Options;
use crate::error::Error;
use crate::hash::{Hash, Hasher, random};
use crate::order::{KeyBound, Order};
use crate::recover::Report;
use crate::scan::Scan;
use crate::stats::Stats;
use crate::table::{Change, Lookup, OFFSETS_END, Probe, SHARDS, Sink, Table};
use crate::value::{Guarding, Into, Presence, Ref, RefBytes, Value};
use llds::arena::{self, Arena, Pages};
use std::fs::File;
use std::io;
use std::ops::{Bound, RangeBounds};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

/// Kind of arena, and first word of its root: a store, layout 3.
const KIND: u64 = u64::from_le_bytes(*b"forrest3");

/// Where named stores live.
const DIRECTORY: &str = "/dev/shm";

/// Limit of a private store that sets none: address space, not memory.
const PRIVATE_LIMIT: u64 = 256 << 30;
/// Limit of a shared store that sets none.
const SHARED_LIMIT: u64 = 64 << 30;
/// Highest limit: what the directory can name, less ample room for the fixed part in front.
const LIMIT_MAX: u64 = OFFSETS_END - (1 << 30);

/// Words of settings, followed by their checksum.
const SETTINGS: usize = 7;

/// Bytes of the root before the directory: settings, then the cursor of the incremental growth.
const ROOT_HEAD: usize = 4096;
const CURSOR_AT: usize = 1024;
const ROOT_BYTES: usize = ROOT_HEAD + 2 * SHARDS * 8;

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

impl Options {
    /// Makes a store that is private to this process.
    ///
    /// # Errors
    /// [`Error::Arena`] if the address space is not there.
    pub fn private(&self) -> Result<Store, Error> {
        let arena = Arena::private(&self.arena(PRIVATE_LIMIT))?;
        init_root(&arena, self.hash.unwrap_or_default())?;
        let order = if self.ordered { Some(Order::new(self.pages != Pages::Small)?.into()) } else { None };
        Ok(Store { order, ..Store::over(arena)? })
    }

    /// Opens the shared store `name`, or makes it, for processes of this user.
    ///
    /// # Errors
    /// [`Error::Name`]; [`Error::Untrusted`] if the file of that name belongs to another user, or other users may write it;
    /// or the reason why the store there cannot be used.
    pub fn open(&self, name: &str) -> Result<Store, Error> {
        self.open_or_create(&path_of(name)?, Source::Name)
    }

    /// Makes the shared store `name`.
    ///
    /// # Errors
    /// [`Error::Exists`] if there is one.
    pub fn create(&self, name: &str) -> Result<Store, Error> {
        self.create_path(&path_of(name)?)
    }

    /// Opens the shared store `name`, which must be there.
    ///
    /// # Errors
    /// [`Error::NotFound`] if there is none; otherwise as [`Options::open`].
    pub fn open_existing(&self, name: &str) -> Result<Store, Error> {
        self.open_file(&path_of(name)?, Source::Name)
    }

    /// Opens the shared store in the file `path`, or makes it. The file may lie on a tmpfs or a hugetlbfs.
    ///
    /// A new file gets mode 0600. Unlike a store opened by name, a file that is writable for a group is accepted, and so is
    /// a symbolic link. Any user that may write the file, or replace it, can end this process or change its memory. So give
    /// a path in a directory that only trusted users may write.
    ///
    /// # Errors
    /// The file system's; [`Error::Untrusted`] if it is not a regular file; or why the store there cannot be used.
    pub fn open_path(&self, path: &Path) -> Result<Store, Error> {
        self.open_or_create(path, Source::Path)
    }

    /// Makes a shared store in the new file `path`.
    ///
    /// # Errors
    /// [`Error::Exists`] if there is a file.
    pub fn create_path(&self, path: &Path) -> Result<Store, Error> {
        self.check_shared()?;
        if path.symlink_metadata().is_ok() {
            return Err(Error::Exists(path.display().to_string()));
        }
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        // The file has no name until it is complete, so no process can open half a store.
        let file = File::options().read(true).write(true).custom_flags(libc::O_TMPFILE).mode(0o600).open(folder)?;
        lock_file(&file, libc::LOCK_SH)?;
        let arena = Arena::create(above_stdio(&file)?, &self.arena(SHARED_LIMIT))?;
        init_root(&arena, self.hash.unwrap_or_default())?;
        let store = Store::over(arena)?;
        match link(&file, path) {
            Ok(()) => Ok(store),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                Err(Error::Exists(path.display().to_string()))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Opens the shared store in the file `path`, which must be there. It trusts the same users as [`Options::open_path`].
    ///
    /// # Errors
    /// [`Error::NotFound`] if there is none; otherwise as [`Options::open_path`].
    pub fn open_existing_path(&self, path: &Path) -> Result<Store, Error> {
        self.open_file(path, Source::Path)
    }

    fn open_or_create(&self, path: &Path, source: Source) -> Result<Store, Error> {
        loop {
            match self.open_file(path, source) {
                Err(Error::NotFound(_)) => {}
                other => return other,
            }
            match self.create_path(path) {
                // Another process made it just now: open that one. A dangling link is neither opened nor replaced.
                Err(Error::Exists(_)) if !path.is_symlink() => {}
                other => return other,
            }
        }
    }

    fn open_file(&self, path: &Path, source: Source) -> Result<Store, Error> {
        self.check_shared()?;
        let follow = if source == Source::Name { libc::O_NOFOLLOW } else { 0 };
        let file = match File::options().read(true).write(true).custom_flags(libc::O_CLOEXEC | follow).open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(Error::NotFound(path.display().to_string()));
            }
            Err(error) if source == Source::Name && error.raw_os_error() == Some(libc::ELOOP) => {
                return Err(untrusted(path, "it is a symbolic link; remove it, or choose another name"));
            }
            Err(error) => return Err(error.into()),
        };
        check_trust(&file, path, source)?;
        // Every open store holds a shared lock on its file, so an exclusive lock proves that no other process has it open.
        if lock_file(&file, libc::LOCK_EX | libc::LOCK_NB).is_ok() {
            let store = Store::over(Arena::open_alone(file.try_clone()?, KIND, self.pages)?)?;
            store.table.recover_all();
            if !store.table.are_locks_sound() {
                return Err(arena::Error::Damaged("a shard is locked, though no process uses the store").into());
            }
            if !store.table.arena.is_audited() {
                store.table.free_lost()?;
            }
            // The handle is closed here: while the lock is converted to a shared one, another process may get the exclusive
            // lock for a moment, and would treat the owners of all thread records as dead.
        }
        lock_file(&file, libc::LOCK_SH)?;
        let store = Store::over(Arena::open(above_stdio(&file)?, KIND, self.pages)?)?;
        let same = match (&self.hash, &store.table.hasher) {
            (None, _) | (Some(Hash::Keyed), Hasher::Keyed { .. }) => true,
            (Some(Hash::Murmur { seed }), Hasher::Murmur { seed: theirs, .. }) => seed == theirs,
            _ => false,
        };
        if !same {
            return Err(Error::Settings("hash"));
        }
        store.table.recover_all();
        Ok(store)
    }

    fn check_shared(&self) -> Result<(), Error> {
        if self.ordered { Err(Error::OrderedShared) } else { Ok(()) }
    }

    fn arena(&self, limit: u64) -> arena::Options {
        arena::Options {
            capacity_bytes: self.limit_bytes.unwrap_or(limit).min(LIMIT_MAX),
            root_bytes: ROOT_BYTES,
            kind: KIND,
            pages: self.pages,
            numa: self.numa,
        }
    }
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

    fn over(arena: Arena) -> Result<Store, Error> {
        if arena.data_range().end > OFFSETS_END {
            return Err(arena::Error::Damaged("it is larger than its directory can name").into());
        }
        if arena.root_bytes() < ROOT_BYTES {
            return Err(arena::Error::Damaged("it has no room for its directory").into());
        }
        let root = arena.root();
        let settings: Vec<u64> = (0..=SETTINGS)
            // SAFETY: the root has ROOT_BYTES (checked above), and its settings are not written after creation.
            .map(|index| unsafe { root.cast::<u64>().add(index).read() })
            .collect();
        if settings[0] != KIND || settings[SETTINGS] != settings_sum(&settings[..SETTINGS]) {
            return Err(arena::Error::Damaged("the settings do not fit their checksum").into());
        }
        let hash = if settings[1] == 1 { Hash::Keyed } else { Hash::Murmur { seed: settings[2] } };
        let hasher = Hasher::new(hash, [settings[3], settings[4]], [settings[5], settings[6]]);
        let limit_bytes = arena.capacity_bytes();
        let at = |offset: usize| root.wrapping_add(offset);
        let words = [at(ROOT_HEAD), at(ROOT_HEAD + SHARDS * 8), at(CURSOR_AT)];
        let table = Table::new(arena, words, hasher);
        if !table.is_directory_sound() {
            return Err(arena::Error::Damaged("its directory names places outside of it").into());
        }
        Ok(Store { table: table.into(), order: None, limit_bytes })
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

/// Writes a new store's settings.
fn init_root(arena: &Arena, hash: Hash) -> Result<(), Error> {
    let [key0, key1, mix0, mix1] = random::<4>()?;
    let (keyed, seed) = match hash {
        Hash::Keyed => (1, 0),
        Hash::Murmur { seed } => (0, seed),
    };
    let settings: [u64; SETTINGS] = [KIND, keyed, seed, key0, key1, mix0, mix1];
    let root = arena.root().cast::<u64>();
    for (index, word) in settings.into_iter().chain([settings_sum(&settings)]).enumerate() {
        // SAFETY: the root has ROOT_BYTES, and no other thread or process reads it before the store is published.
        unsafe { root.add(index).write(word) };
    }
    Ok(())
}

fn settings_sum(settings: &[u64]) -> u64 {
    let bytes: Vec<u8> = settings.iter().flat_map(|word| word.to_le_bytes()).collect();
    crate::hash::murmur64a(&bytes, 9)
}

fn path_of(name: &str) -> Result<PathBuf, Error> {
    if name.is_empty() || name.len() > 200 || name.starts_with('.') || name.contains(['/', '\0']) {
        return Err(Error::Name(name.to_owned()));
    }
    Ok(Path::new(DIRECTORY).join(format!("forrest.{name}")))
}

/// How the caller named the store's file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Source {
    /// By a name, in a directory where any user may make files.
    Name,
    /// By a path; the caller chose its directories and permissions.
    Path,
}

/// Refuses a file that other users may have made or may change: the words of a store are trusted.
fn check_trust(file: &File, path: &Path, source: Source) -> Result<(), Error> {
    let meta = file.metadata()?;
    if !meta.is_file() {
        return Err(untrusted(path, "it is not a regular file; remove it, or choose another name"));
    }
    if source == Source::Path {
        return Ok(());
    }
    // SAFETY: geteuid takes no arguments and cannot fail.
    let user = unsafe { libc::geteuid() };
    if meta.uid() != user && meta.uid() != 0 {
        let why = format!(
            "it belongs to user {}, this process runs as {user}; choose another name, or have it removed",
            meta.uid()
        );
        return Err(untrusted(path, &why));
    }
    if meta.mode() & 0o022 != 0 {
        let mode = meta.mode() & 0o7777;
        let why =
            format!("group or others may write it (mode {mode:04o}); remove it, or open it by its path to share it");
        return Err(untrusted(path, &why));
    }
    Ok(())
}

fn untrusted(path: &Path, why: &str) -> Error {
    Error::Untrusted { path: path.display().to_string(), why: why.to_owned() }
}

/// Gives a nameless file its name; fails if the name is taken.
fn link(file: &File, path: &Path) -> io::Result<()> {
    use std::os::unix::ffi::OsStrExt;
    let from = std::ffi::CString::new(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    let to = std::ffi::CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: both paths are NUL-terminated and outlive the call.
    let done =
        unsafe { libc::linkat(libc::AT_FDCWD, from.as_ptr(), libc::AT_FDCWD, to.as_ptr(), libc::AT_SYMLINK_FOLLOW) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Returns another descriptor of a file, above the first three: a program that closed those would print into its store.
fn above_stdio(file: &File) -> io::Result<File> {
    file.try_clone()
}

fn lock_file(file: &File, how: i32) -> io::Result<()> {
    loop {
        // SAFETY: flock takes no pointers; the descriptor is open while `file` is borrowed.
        if unsafe { libc::flock(file.as_raw_fd(), how) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

#[cfg(test)]
mod tests;
