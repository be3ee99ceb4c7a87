//! The SD tree: a lock-free map from fingerprints to page numbers, one cache line per search.
//!
//! *Static* is an array of 64-byte buckets, chosen by the leading bits of the key. *Dynamic* are
//! the children: a bucket that overflows hands one half of its keys, those whose next bit is 0 or
//! those where it is 1, to a child in another line, and so on down. On the way down each key bit
//! is used once: the leading bits choose the bucket, one bit per level the half, and the leaf's
//! tag holds the bits that come next. A search touches 1.1 to 1.3 lines on average.
//!
//! The static array whose buckets are chosen by `k` leading bits lies at the memory's lines
//! `2^k .. 2^(k+1)`: a bucket's line is the key's leading bits with a one in front, so growing needs
//! no allocation and no table. The lines below the smallest array hold the tree's own words, the
//! children lie behind the largest.
//!
//! # Why it can be trusted
//!
//! A node is one control word and seven slots. *Every change of a node is one compare-and-swap of
//! its control word*, which carries a version: an insert claims a free slot, writes the leaf, and
//! commits against the very version under which it found no equal key. So two inserts of one
//! fingerprint agree on one winner, although they may have picked different slots. Delete is one
//! compare-and-swap. A leaf needs no allocation and no reclamation.
//!
//! Readers write nothing, not even an epoch. They read the control word, the slots, and the
//! control word again. Versions never go back, not even when a child's line is used again, so an
//! unchanged control word proves what was read between.
//!
//! A full node is split in three steps that anybody can finish: `MOVING` in the control word, the
//! link in place of a leaf, the new control word. The static array grows a segment (1/256 of the
//! keys) at a time into the array of twice the size: a bucket is frozen, its two successors are
//! filled word by word from what can no longer change (all helpers write the same), and `DONE` is
//! set. No thread waits for another: who meets unfinished work finishes it.
//!
//! # What it does not promise
//!
//! - A tag is at most 23 bits, so a *match is probable, not certain*: with four or five leaves per bucket
//!   about one search in a million meets a leaf of another fingerprint, and with no more known bits
//!   for old leaves after each doubling, growth by 2^n makes that n/2 + 1 times as many, not 2^n.
//!   [`SdTree::get_with`] and [`SdTree::get_or_insert_with`] take a check that makes it exact, and
//!   [`Exact`](key::Exact) wraps that up for any kind of key.
//! - Keys must be spread evenly: a hash, keyed where an attacker chooses the content. If they are
//!   not, depth still ends at 8 levels below the array; after that an insert fails with [`Full`].
//! - A thread that stops in the middle of an insert holds its claimed slot, and what is unlinked
//!   meanwhile is not used again until it goes on (see [`crate::epoch`]). Nobody waits for it.

mod batch;
mod child;
mod grow;
pub mod key;
mod sweep;
#[cfg(all(target_arch = "x86_64", not(loom), not(miri)))]
mod wide;
mod word;

#[cfg(test)]
mod tests;

pub use sweep::SweepCursor;
pub use word::{VALUE_BITS, VALUE_MAX};

use crate::epoch;
use crate::lines::{LINE_BYTES, Memory};
use crate::primitive::{Ordering, spin_hint};
use std::io;
use word::{Control, SLOTS, State};

/// Independent parts that grow one at a time.
#[cfg(all(not(loom), not(pagefold_stress)))]
const SEGMENT_BITS: u32 = 8;
#[cfg(all(not(loom), pagefold_stress))]
const SEGMENT_BITS: u32 = 2;
#[cfg(loom)]
const SEGMENT_BITS: u32 = 0;
const SEGMENTS: u64 = 1 << SEGMENT_BITS;

/// The smallest static array; the lines below it hold the tree's own words.
#[cfg(all(not(loom), not(pagefold_stress)))]
const FIRST_BITS_MIN: u32 = 8;
#[cfg(all(not(loom), pagefold_stress))]
const FIRST_BITS_MIN: u32 = 7;
#[cfg(loom)]
const FIRST_BITS_MIN: u32 = 3;

/// The largest static array: 2^31 buckets are 128 GiB and ten thousand million keys.
#[cfg(not(loom))]
const BITS_MAX: u32 = 31;
#[cfg(loom)]
const BITS_MAX: u32 = 4;

/// Doublings from the first static array to the last. With `DEPTH_MAX` it stays below the bits
/// that a leaf knows, so that every leaf can always be moved down.
const DOUBLINGS_MAX: u32 = if SLOTS == 7 { 14 } else { 10 };

/// Levels below the static array. A bucket of random keys gets this deep once in 10^16 with seven
/// slots; with three, for tests, more levels are needed.
const DEPTH_MAX: u32 = if SLOTS == 7 { 8 } else { 12 };

const _: () = assert!(DOUBLINGS_MAX + DEPTH_MAX < word::TAG_KEY_BITS);

/// Keys per static bucket, in tenths, above which the next segment grows: one bucket in twenty overflows.
const LOAD_TENTHS: u64 = match SLOTS {
    7 => 40,
    // Shrunken for tests: growing comes at once.
    3 => 21,
    _ => 3,
};

/// The same for a dense tree: one bucket in six overflows.
const DENSE_LOAD_TENTHS: u64 = if SLOTS == 7 { 52 } else { LOAD_TENTHS };

/// Counters of leaves that one thread each has for itself, so that counting needs no locked instruction; the others
/// share one more.
#[cfg(not(loom))]
const OWN_COUNTS: usize = 31;
#[cfg(loom)]
const OWN_COUNTS: usize = 0;

/// "pagefold SD 3": refuses memory that is not a tree, or one with other constants.
const MAGIC: u64 = 0x7066_5344_0003_0000 | (SLOTS as u64) << 8 | SEGMENT_BITS as u64;

/// Where the tree's own words lie.
mod place {
    /// Line 0, hardly written: magic, geometry, `MARKED`.
    pub(super) const HEAD: u64 = 0;
    /// Line 1: the words below.
    pub(super) const SHARED: u64 = 1;
    /// The growth under way: `segment:16 | bits:8 | position:40`, plus one; 0 for none.
    pub(super) const ACTIVE: usize = 0;
    /// Children ever used.
    pub(super) const CHILDREN: usize = 1;
    /// Children to be used again: `changes:24 | line:40`.
    pub(super) const FREE: usize = 2;
    /// Three bags of unlinked children by epoch: `epoch:24 | line:40`.
    pub(super) const LIMBO: usize = 3;
    /// Buckets in the static arrays now.
    pub(super) const BUCKETS: usize = 6;
    /// Children in the free list.
    pub(super) const FREE_COUNT: usize = 7;
    /// In line 0: the epoch in which an empty child was last marked by a sweep.
    pub(super) const MARKED: usize = 2;
    /// A line for each thread that counts alone, and one for all others: leaves, and (of the former) inserts.
    pub(super) const COUNTS: u64 = 2;
    /// The line of the others.
    pub(super) const COUNT_SHARED: u64 = COUNTS + super::OWN_COUNTS as u64;
    /// One word per segment: leading bits that choose its buckets.
    pub(super) const SEGMENTS: u64 = COUNT_SHARED + 1;
    /// One word per segment: `epoch << 8 | bits` of an array part that is to be released, or 0.
    pub(super) const RELEASES: u64 = SEGMENTS + super::SEGMENTS.div_ceil(8);
    /// A line whose first word says how far the buckets of the growth under way are taken on, as `ACTIVE`: a hint.
    pub(super) const CLAIMS: u64 = RELEASES + super::SEGMENTS.div_ceil(8);
    pub(super) const END: u64 = CLAIMS + 1;
}

const _: () = assert!(place::END <= 1 << FIRST_BITS_MIN);

/// The tree cannot take the key: more keys share their leading bits than its depth allows, or
/// its address space is used up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the SD tree is full here: too many keys share their leading bits, or the address space is used up")]
pub struct Full;

/// What the tree holds and takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Leaves.
    pub leaf_count: u64,
    /// Buckets of the static part.
    pub bucket_count: u64,
    /// Children in use.
    pub child_count: u64,
    /// Bytes of memory in use, all in: buckets, children (free ones too) and the tree's own words.
    pub memory_bytes: u64,
    /// Leading key bits that choose the bucket in the smallest and the largest segment.
    pub level_min: u32,
    /// See `level_min`.
    pub level_max: u32,
}

/// What one search reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    /// Cache lines.
    pub lines: u32,
    /// Key bits used to choose the bucket and, below it, the halves.
    pub path_bits: u32,
    /// Key bits compared with tags.
    pub tag_bits: u32,
}

/// A lock-free map from 64-bit fingerprints to 40-bit values. See the [module](self) for what it
/// is and what it does not promise.
///
/// ```
/// let tree = llds::sd_tree::SdTree::with_capacity_hint(1_000_000)?;
/// assert_eq!(tree.get_or_insert(0x1234_5678_9abc_def0, 42)?, None);
/// assert_eq!(tree.get_or_insert(0x1234_5678_9abc_def0, 43)?, Some(42));
/// assert_eq!(tree.get(0x1234_5678_9abc_def0), Some(42));
/// assert!(tree.remove(0x1234_5678_9abc_def0, 42));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct SdTree {
    memory: Memory,
    /// Leading bits of the smallest segments at the start.
    first_bits: u32,
    /// Segments that started with one bit more.
    ahead: u64,
    /// Leading bits beyond which no segment grows.
    max_bits: u32,
    /// Keys per static bucket, in tenths, above which the next segment grows.
    load_tenths: u64,
}

/// What one attempt to search came to.
enum Attempt {
    Found(u64),
    Missing,
    /// Somebody changed what was read, or left work unfinished: try again, after helping.
    Again,
}

impl SdTree {
    /// Makes an empty tree that holds `capacity` leaves without growing and 10^4 times as many with it.
    ///
    /// Reserves address space only; memory comes with use, on huge pages where the system has them.
    ///
    /// # Errors
    /// When the address space cannot be reserved (a limit on it, or strict overcommit).
    pub fn with_capacity_hint(capacity: usize) -> io::Result<Self> {
        Self::with_pages(capacity, true)
    }

    /// Makes an empty tree as [`SdTree::with_pages`] does that takes an eighth less memory, 15.4 bytes for a leaf, and a
    /// quarter more time for a search.
    ///
    /// # Errors
    /// As [`SdTree::with_capacity_hint`].
    pub fn dense(capacity: usize, huge: bool) -> io::Result<Self> {
        Self::with_load(capacity, huge, DENSE_LOAD_TENTHS)
    }

    /// Makes an empty tree as [`SdTree::with_capacity_hint`] does, on huge pages or on ordinary ones.
    ///
    /// # Errors
    /// As [`SdTree::with_capacity_hint`].
    pub fn with_pages(capacity: usize, huge: bool) -> io::Result<Self> {
        Self::with_load(capacity, huge, LOAD_TENTHS)
    }

    fn with_load(capacity: usize, huge: bool, load_tenths: u64) -> io::Result<Self> {
        let (first_bits, ahead) = Self::geometry(capacity as u64, load_tenths);
        let mut max_bits = (first_bits + DOUBLINGS_MAX).min(BITS_MAX);
        loop {
            match Memory::reserve(Self::line_count(max_bits), huge) {
                Ok(memory) => return Ok(Self { memory, first_bits, ahead, max_bits, load_tenths }.format()),
                // A limit on address space: reserve less, grow less.
                Err(_) if max_bits > first_bits + 1 => max_bits -= 1,
                Err(error) => return Err(error),
            }
        }
    }

    /// Makes an empty tree in a file of zeros, whose length it sets; others of this process can
    /// [`attach`](SdTree::attach) to it.
    ///
    /// # Errors
    /// When the file cannot be extended or mapped.
    #[cfg(not(loom))]
    pub fn create_in(file: std::os::fd::BorrowedFd<'_>, capacity: usize) -> io::Result<Self> {
        use std::os::fd::AsRawFd;
        let load_tenths = LOAD_TENTHS;
        let (first_bits, ahead) = Self::geometry(capacity as u64, load_tenths);
        let max_bits = (first_bits + DOUBLINGS_MAX).min(BITS_MAX);
        let lines = Self::line_count(max_bits);
        // SAFETY: the descriptor is borrowed for the call; ftruncate touches no memory of ours.
        if unsafe { libc::ftruncate(file.as_raw_fd(), (lines as usize * LINE_BYTES) as libc::off_t) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { memory: Memory::map(file, lines)?, first_bits, ahead, max_bits, load_tenths }.format())
    }

    /// Opens the tree that [`SdTree::create_in`] made in this file, at whatever address it lands.
    ///
    /// # Errors
    /// When the file cannot be mapped or holds no tree of this version.
    ///
    /// # Safety
    /// All handles that change the tree must be in one process, since they share its epochs; the
    /// file must not be truncated or written by others while a handle exists.
    #[cfg(not(loom))]
    pub unsafe fn attach(file: std::os::fd::BorrowedFd<'_>) -> io::Result<Self> {
        use std::os::fd::AsRawFd;
        // SAFETY: an all-zero stat is a valid one to be overwritten.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: the descriptor is borrowed for the call and `stat` is ours.
        if unsafe { libc::fstat(file.as_raw_fd(), &mut stat) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let lines = stat.st_size as u64 / LINE_BYTES as u64;
        let refuse = |why: &str| io::Error::new(io::ErrorKind::InvalidData, format!("no SD tree in this file: {why}"));
        if lines < 1 << FIRST_BITS_MIN {
            return Err(refuse("it is too short"));
        }
        let memory = Memory::map(file, lines)?;
        if memory.word(place::HEAD, 0).load(Ordering::Acquire) != MAGIC {
            return Err(refuse("another version, or not a tree"));
        }
        let geometry = memory.word(place::HEAD, 1).load(Ordering::Acquire);
        let (first_bits, max_bits) = (geometry as u8 as u32, (geometry >> 8) as u8 as u32);
        let (ahead, load_tenths) = (geometry >> 16 & 0xffff, geometry >> 32);
        let sane = (FIRST_BITS_MIN..=BITS_MAX).contains(&first_bits)
            && (first_bits..=BITS_MAX).contains(&max_bits)
            && ahead < SEGMENTS
            && [LOAD_TENTHS, DENSE_LOAD_TENTHS].contains(&load_tenths)
            && Self::line_count(max_bits) == lines;
        if !sane {
            return Err(refuse("its geometry does not fit its length"));
        }
        Ok(Self { memory, first_bits, ahead, max_bits, load_tenths })
    }

    /// The first array for so many leaves: leading bits, and how many segments start one bit ahead.
    fn geometry(capacity: u64, load_tenths: u64) -> (u32, u64) {
        let buckets = (capacity * 10).div_ceil(load_tenths).max(1 << FIRST_BITS_MIN);
        let first_bits = buckets.ilog2().min(BITS_MAX - 1);
        let base = 1u64 << first_bits;
        let ahead = (buckets.min(2 * base - 1) - base).saturating_mul(SEGMENTS) >> first_bits;
        (first_bits, ahead)
    }

    /// Static arrays up to `max_bits`, and room for children.
    fn line_count(max_bits: u32) -> u64 {
        let children = if cfg!(loom) { 6 } else { (1 << max_bits) + (1 << 14) };
        (2 << max_bits) + children
    }

    /// Writes the words of an empty tree into memory of zeros.
    fn format(self) -> Self {
        for segment in 0..SEGMENTS {
            self.segment_word(segment).store(self.initial_bits(segment).into(), Ordering::Relaxed);
        }
        let buckets = (1 << self.first_bits) + (self.ahead << (self.first_bits - SEGMENT_BITS));
        self.shared(place::BUCKETS).store(buckets, Ordering::Relaxed);
        let geometry =
            u64::from(self.first_bits) | u64::from(self.max_bits) << 8 | self.ahead << 16 | self.load_tenths << 32;
        self.memory.word(place::HEAD, 1).store(geometry, Ordering::Relaxed);
        self.memory.word(place::HEAD, 0).store(MAGIC, Ordering::Release);
        self
    }

    fn shared(&self, word: usize) -> &crate::primitive::AtomicU64 {
        self.memory.word(place::SHARED, word)
    }

    /// The line of a segment's array part: where it begins in the array of `bits` leading bits.
    fn segment_start(segment: u64, bits: u32) -> u64 {
        (1 << bits) | segment << (bits - SEGMENT_BITS)
    }

    #[inline(always)]
    fn segment_of(fingerprint: u64) -> u64 {
        // Two shifts, since SEGMENT_BITS may be 0.
        fingerprint >> 1 >> (63 - SEGMENT_BITS)
    }

    #[inline(always)]
    fn segment_word(&self, segment: u64) -> &crate::primitive::AtomicU64 {
        self.memory.word(place::SEGMENTS + segment / 8, (segment % 8) as usize)
    }

    /// The leading bits that choose this key's bucket now.
    #[inline(always)]
    fn segment_bits(&self, fingerprint: u64) -> u32 {
        self.segment_word(Self::segment_of(fingerprint)).load(Ordering::Acquire) as u32
    }

    /// The leading bits of a segment's first array part, whose untouched buckets are valid and empty.
    #[inline(always)]
    fn initial_bits(&self, segment: u64) -> u32 {
        self.first_bits + u32::from(segment < self.ahead)
    }

    #[inline(always)]
    fn bucket_line(fingerprint: u64, bits: u32) -> u64 {
        (1 << bits) | fingerprint >> (64 - bits)
    }

    /// The half of a node at `level` that holds the key: the key's next bit.
    #[inline(always)]
    fn half_of(fingerprint: u64, level: u32) -> usize {
        (fingerprint << level >> 63) as usize
    }

    /// Gives the value of a leaf that matches the fingerprint, very probably its own.
    #[inline]
    pub fn get(&self, fingerprint: u64) -> Option<u64> {
        self.get_with(fingerprint, |_| true)
    }

    /// Gives the value of a leaf that matches the fingerprint and passes `is_same`, which is asked
    /// for each matching leaf (nearly always at most one) and should compare the full keys.
    #[inline]
    pub fn get_with(&self, fingerprint: u64, mut is_same: impl FnMut(u64) -> bool) -> Option<u64> {
        loop {
            match self.attempt(fingerprint, &mut is_same) {
                Attempt::Found(value) => return Some(value),
                Attempt::Missing => return None,
                Attempt::Again => self.settle(fingerprint),
            }
        }
    }

    /// Finishes whatever unfinished work lies on the key's path.
    #[cold]
    fn settle(&self, fingerprint: u64) {
        let _pin = epoch::pin();
        let (mut line, mut level) = self.root(fingerprint);
        let mut parent = None;
        loop {
            let control = self.memory.load_control(line);
            if control.has(Control::FROZEN) {
                return self.unblock(line, parent);
            }
            if control.has(Control::MOVING) {
                self.finish_move(line, control);
                continue;
            }
            let half = Self::half_of(fingerprint, level);
            match self.child_of(line, control, fingerprint, level) {
                Some(Some(child)) => (parent, line, level) = (Some((line, half)), child, level + 1),
                Some(None) => {}
                None => return spin_hint(),
            }
        }
    }

    /// The slot of a leaf that matches and passes the check, and its word.
    #[inline(always)]
    fn find_leaf(
        &self,
        line: u64,
        control: Control,
        key: u64,
        is_same: &mut impl FnMut(u64) -> bool,
    ) -> Option<(usize, u64)> {
        // All slots first, then the few that match: the loads and compares need no branches.
        let mut hits = self.matching_slots(line, key) & control.leaves();
        while hits != 0 {
            let slot = hits.trailing_zeros() as usize;
            let word = self.memory.slot(line, slot).load(Ordering::Acquire);
            if is_same(word::value(word)) {
                return Some((slot, word));
            }
            hits &= hits - 1;
        }
        None
    }

    /// One bit per slot whose word matches, whatever it is.
    #[inline(always)]
    fn matching_slots(&self, line: u64, key: u64) -> u64 {
        #[cfg(all(target_arch = "x86_64", not(loom), not(miri)))]
        if crate::wide::has_avx512() {
            // SAFETY: the processor has AVX-512, and a line's eight words are mapped and aligned.
            let words = unsafe { wide::matching_words(std::ptr::from_ref(self.memory.control(line)).cast(), key) };
            return words >> 1;
        }
        let mut hits = 0u64;
        for slot in 0..SLOTS {
            let word = self.memory.slot(line, slot).load(Ordering::Acquire);
            hits |= u64::from(word::matches(word, key)) << slot;
        }
        hits
    }

    /// One search without a write and without a pin; see the module's head for why it is sound.
    #[inline(always)]
    fn attempt(&self, fingerprint: u64, is_same: &mut impl FnMut(u64) -> bool) -> Attempt {
        let mut level = self.segment_bits(fingerprint);
        let mut line = Self::bucket_line(fingerprint, level);
        let mut control = self.memory.load_control(line);
        if control.has(Control::FROZEN) {
            if !control.has(Control::DONE) || level >= self.max_bits {
                return Attempt::Again;
            }
            level += 1;
            line = Self::bucket_line(fingerprint, level);
            control = self.memory.load_control(line);
        }
        if control.0 == 0 {
            // An untouched first bucket is empty; any other zero is memory that was released under us.
            let segment = Self::segment_of(fingerprint);
            let untouched = level == self.initial_bits(segment) && self.segment_bits(fingerprint) == level;
            return if untouched { Attempt::Missing } else { Attempt::Again };
        }
        loop {
            if control.has(Control::FROZEN | Control::MOVING) {
                return Attempt::Again;
            }
            let found = self.find_leaf(line, control, fingerprint << level, is_same);
            let link = match found {
                Some(_) => None,
                None => control.link(Self::half_of(fingerprint, level)),
            };
            let Some(slot) = link else {
                // Pairs with the release of whoever claimed or freed a slot: had a slot changed under us,
                // its new word could only be seen together with a new control word.
                if self.memory.load_control(line) != control {
                    return Attempt::Again;
                }
                return found.map_or(Attempt::Missing, |(_, word)| Attempt::Found(word::value(word)));
            };
            let link = self.memory.slot(line, slot).load(Ordering::Acquire);
            if self.memory.load_control(line) != control {
                return Attempt::Again;
            }
            let child = word::value(link);
            let child_control = self.memory.load_control(child);
            // Still linked after its control word was read: that was the child's own.
            if self.memory.load_control(line) != control {
                return Attempt::Again;
            }
            (line, level, control) = (child, level + 1, child_control);
        }
    }

    /// The bucket that now stands for the key, and its level. The caller is pinned.
    fn root(&self, fingerprint: u64) -> (u64, u32) {
        loop {
            let bits = self.segment_bits(fingerprint);
            let line = Self::bucket_line(fingerprint, bits);
            let control = self.memory.load_control(line);
            if !control.has(Control::FROZEN) {
                return (line, bits);
            }
            if !control.has(Control::DONE) {
                self.migrate(line, bits);
            }
            let next = Self::bucket_line(fingerprint, bits + 1);
            if !self.memory.load_control(next).has(Control::FROZEN) {
                return (next, bits + 1);
            }
            // The segment has finished this growth and is in the next one.
        }
    }

    /// Inserts the value unless a leaf matches the fingerprint. Gives the value of that leaf, or
    /// `None` if this one went in. Of threads that insert one fingerprint at once exactly one gets `None`.
    ///
    /// # Errors
    /// [`Full`] when too many keys share their leading bits; never for well-spread keys.
    ///
    /// # Panics
    /// When `value` exceeds [`VALUE_MAX`].
    pub fn get_or_insert(&self, fingerprint: u64, value: u64) -> Result<Option<u64>, Full> {
        self.get_or_insert_with(fingerprint, value, |_| true)
    }

    /// Inserts as [`SdTree::get_or_insert`] does, but takes for equal only what passes `is_same`.
    ///
    /// # Errors
    /// As [`SdTree::get_or_insert`].
    ///
    /// # Panics
    /// As [`SdTree::get_or_insert`].
    pub fn get_or_insert_with(
        &self,
        fingerprint: u64,
        value: u64,
        mut is_same: impl FnMut(u64) -> bool,
    ) -> Result<Option<u64>, Full> {
        assert!(value <= VALUE_MAX, "value {value:#x} has more than {VALUE_BITS} bits");
        let _pin = epoch::pin();
        let existing = self.insert_pinned(fingerprint, value, &mut is_same)?;
        if existing.is_none() {
            self.count_insert();
        }
        Ok(existing)
    }

    /// Goes down to the node that decides about the key: the first with a leaf that matches and passes the check, or the
    /// last of the path. Helps with unfinished work on the way. `act` gets the node and the leaf, if there is one.
    #[inline(always)]
    fn descend<T>(
        &self,
        fingerprint: u64,
        is_same: &mut impl FnMut(u64) -> bool,
        mut act: impl FnMut(&Node, Option<(usize, u64)>, &mut dyn FnMut(u64) -> bool) -> Next<T>,
    ) -> T {
        'restart: loop {
            let (mut line, root_level) = self.root(fingerprint);
            let mut level = root_level;
            let mut parent = None;
            loop {
                let control = self.memory.load_control(line);
                if control.has(Control::FROZEN) {
                    self.unblock(line, parent.map(|(parent, level)| (parent, Self::half_of(fingerprint, level))));
                    continue 'restart;
                }
                if control.has(Control::MOVING) {
                    self.finish_move(line, control);
                    continue;
                }
                let found = self.find_leaf(line, control, fingerprint << level, is_same);
                if found.is_none()
                    && let Some(child) = self.child_of(line, control, fingerprint, level)
                {
                    match child {
                        Some(child) => (parent, line, level) = (Some((line, level)), child, level + 1),
                        None => continue,
                    }
                    continue;
                }
                match act(&Node { line, control, level, depth: level - root_level }, found, is_same) {
                    Next::Done(result) => return result,
                    Next::Again => continue,
                    Next::Restart => continue 'restart,
                }
            }
        }
    }

    fn insert_pinned(
        &self,
        fingerprint: u64,
        value: u64,
        is_same: &mut impl FnMut(u64) -> bool,
    ) -> Result<Option<u64>, Full> {
        let mut patience = 10_000;
        self.descend(fingerprint, is_same, |node, found, is_same| {
            let &Node { line, control, level, depth } = node;
            if let Some((_, found)) = found {
                if self.memory.load_control(line) != control {
                    return Next::Again;
                }
                return Next::Done(Ok(Some(word::value(found))));
            }
            let Some(slot) = control.free_slot() else {
                match self.start_move(line, control, depth) {
                    // Every slot is being written by another thread: a moment, or threads that are stopped.
                    Err(Full) if control.leaves() == 0 && patience > 0 => {
                        patience -= 1;
                        spin_hint();
                    }
                    Err(Full) => return Next::Done(Err(Full)),
                    Ok(()) => {}
                }
                return Next::Again;
            };
            let claimed = control.set_state(slot, State::Claimed).without(Control::PENDING).next_version();
            if !self.memory.change(line, control, claimed) {
                return Next::Again;
            }
            stop_here(Point::Claimed);
            self.memory.slot(line, slot).store(word::leaf(fingerprint, level, value), Ordering::Release);
            stop_here(Point::Written);
            match self.commit(line, claimed, slot, fingerprint, level, is_same) {
                Commit::Done => Next::Done(Ok(None)),
                Commit::Exists(existing) => Next::Done(Ok(Some(existing))),
                Commit::Elsewhere => Next::Restart,
            }
        })
    }

    /// The child for the key: `None` without a link, `Some(None)` if the node has changed.
    #[inline(always)]
    fn child_of(&self, line: u64, control: Control, fingerprint: u64, level: u32) -> Option<Option<u64>> {
        let slot = control.link(Self::half_of(fingerprint, level))?;
        let link = self.memory.slot(line, slot).load(Ordering::Acquire);
        Some((self.memory.load_control(line) == control).then(|| word::value(link)))
    }

    /// Makes the claimed and written slot a leaf, unless an equal key came first.
    fn commit(
        &self,
        line: u64,
        claimed: Control,
        slot: usize,
        fingerprint: u64,
        level: u32,
        is_same: &mut dyn FnMut(u64) -> bool,
    ) -> Commit {
        let mut control = claimed;
        loop {
            if self.memory.change(line, control, control.set_state(slot, State::Leaf).next_version()) {
                return Commit::Done;
            }
            control = self.memory.load_control(line);
            if control.has(Control::FROZEN) {
                // Whoever took the node's content over did not take a claimed slot.
                return Commit::Elsewhere;
            }
            if control.has(Control::MOVING) {
                self.finish_move(line, control);
                continue;
            }
            let found = self.find_leaf(line, control, fingerprint << level, &mut |found| is_same(found));
            if self.memory.load_control(line) != control {
                continue;
            }
            if let Some((_, word)) = found {
                self.unclaim(line, slot);
                return Commit::Exists(word::value(word));
            }
            if control.link(Self::half_of(fingerprint, level)).is_some() {
                self.unclaim(line, slot);
                return Commit::Elsewhere;
            }
        }
    }

    /// Gives a claimed slot back; if the node is frozen it is gone anyway.
    fn unclaim(&self, line: u64, slot: usize) {
        loop {
            let control = self.memory.load_control(line);
            if control.has(Control::FROZEN) {
                return;
            }
            if self.memory.change(line, control, control.set_state(slot, State::Free).next_version()) {
                return;
            }
        }
    }

    /// Finds the leaf with this fingerprint and value and offers its node and slot to `step` until that says it is done.
    #[inline(always)]
    fn with_leaf<T>(&self, fingerprint: u64, value: u64, mut step: impl FnMut(&Node, usize) -> Option<T>) -> Option<T> {
        self.descend(fingerprint, &mut |found| found == value, |node, found, _| match found {
            Some((slot, _)) => step(node, slot).map_or(Next::Again, |result| Next::Done(Some(result))),
            None if self.memory.load_control(node.line) == node.control => Next::Done(None),
            None => Next::Again,
        })
    }

    /// Removes the leaf with this fingerprint if its value is `expected`; tells whether it was there.
    pub fn remove(&self, fingerprint: u64, expected: u64) -> bool {
        let _pin = epoch::pin();
        let removed = self.with_leaf(fingerprint, expected, |&Node { line, control, .. }, slot| {
            self.memory.change(line, control, control.set_state(slot, State::Free).next_version()).then_some(())
        });
        if removed.is_some() {
            self.count_removals(1);
        }
        removed.is_some()
    }

    /// Replaces `old_value` by `new_value` in the leaf with this fingerprint, in one step for all who
    /// look; tells whether it was there. Also `false` if the leaf's bucket has no room for the step and
    /// is at its last level, which needs the same hostile keys as [`Full`].
    ///
    /// # Panics
    /// When `new_value` exceeds [`VALUE_MAX`].
    pub fn replace(&self, fingerprint: u64, old_value: u64, new_value: u64) -> bool {
        assert!(new_value <= VALUE_MAX, "value {new_value:#x} has more than {VALUE_BITS} bits");
        let _pin = epoch::pin();
        self.with_leaf(fingerprint, old_value, |&Node { line, control, level, depth }, slot| {
            let Some(fresh) = control.free_slot() else {
                return self.start_move(line, control, depth).err().map(|Full| false);
            };
            let claimed = control.set_state(fresh, State::Claimed).next_version();
            if !self.memory.change(line, control, claimed) {
                return None;
            }
            // The new leaf knows what the fingerprint tells, which may be more than the old one did.
            self.memory.slot(line, fresh).store(word::leaf(fingerprint, level, new_value), Ordering::Release);
            let swapped = claimed.set_state(fresh, State::Leaf).set_state(slot, State::Free).next_version();
            if self.memory.change(line, claimed, swapped) {
                return Some(true);
            }
            self.unclaim(line, fresh);
            None
        })
        .unwrap_or(false)
    }

    /// Tells what a search for the fingerprint reads: lines, and bits of the key.
    ///
    /// A bit counts each time it is looked at: once by the path, and by the tag window of each line.
    pub fn trace(&self, fingerprint: u64) -> Trace {
        let _pin = epoch::pin();
        let (mut line, mut level) = self.root(fingerprint);
        let mut trace = Trace { lines: 0, path_bits: level, tag_bits: 0 };
        loop {
            trace.lines += 1;
            trace.tag_bits += word::TAG_KEY_BITS.min(64 - level);
            let control = self.memory.load_control(line);
            let found = self.find_leaf(line, control, fingerprint << level, &mut |_| true);
            if found.is_some() || control.has(Control::MOVING | Control::FROZEN) {
                return trace;
            }
            let Some(Some(child)) = self.child_of(line, control, fingerprint, level) else { return trace };
            (line, level) = (child, level + 1);
            trace.path_bits += 1;
        }
    }

    /// Counts the leaves; exact when nobody changes the tree meanwhile.
    pub fn len(&self) -> u64 {
        let sum = (place::COUNTS..=place::COUNT_SHARED)
            .fold(0u64, |sum, line| sum.wrapping_add(self.memory.word(line, 0).load(Ordering::Relaxed)));
        // One thread may remove what another has counted.
        if (sum as i64) < 0 { 0 } else { sum }
    }

    /// Tells whether there are no leaves.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of memory that the tree uses, all in.
    pub fn memory_bytes(&self) -> u64 {
        self.stats().memory_bytes
    }

    /// Reads the tree's figures.
    pub fn stats(&self) -> Stats {
        let bucket_count = self.shared(place::BUCKETS).load(Ordering::Relaxed);
        let children_ever = self.shared(place::CHILDREN).load(Ordering::Relaxed);
        let children_free = self.shared(place::FREE_COUNT).load(Ordering::Relaxed);
        let (mut level_min, mut level_max) = (u32::MAX, 0);
        for segment in 0..SEGMENTS {
            let bits = self.segment_word(segment).load(Ordering::Relaxed) as u32;
            level_min = level_min.min(bits);
            level_max = level_max.max(bits);
        }
        Stats {
            leaf_count: self.len(),
            bucket_count,
            child_count: children_ever.saturating_sub(children_free),
            memory_bytes: (bucket_count + children_ever + place::END) * LINE_BYTES as u64,
            level_min,
            level_max,
        }
    }

    /// The line in which this thread alone counts, if it has one. A place is one thread's until that ends, and who takes
    /// it then sees all that it wrote.
    #[inline(always)]
    fn own_counts(&self) -> Option<u64> {
        epoch::thread_place().filter(|&place| place < OWN_COUNTS).map(|place| place::COUNTS + place as u64)
    }

    /// Counts a leaf and gives growing its share of this thread's time. The caller is pinned.
    #[inline(always)]
    fn count_insert(&self) {
        let inserts = if let Some(line) = self.own_counts() {
            let (leaves, inserts) = (self.memory.word(line, 0), self.memory.word(line, 1));
            leaves.store(leaves.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
            let count = inserts.load(Ordering::Relaxed).wrapping_add(1);
            inserts.store(count, Ordering::Relaxed);
            count
        } else {
            self.memory.word(place::COUNT_SHARED, 0).fetch_add(1, Ordering::Relaxed).wrapping_add(1)
        };
        if inserts.is_multiple_of(grow::INSERTS_PER_STEP) {
            self.grow_step();
        }
    }

    #[inline(always)]
    fn count_removals(&self, removals: u64) {
        if let Some(line) = self.own_counts() {
            let leaves = self.memory.word(line, 0);
            leaves.store(leaves.load(Ordering::Relaxed).wrapping_sub(removals), Ordering::Relaxed);
        } else {
            self.memory.word(place::COUNT_SHARED, 0).fetch_sub(removals, Ordering::Relaxed);
        }
    }
}

/// A node in its line.
impl Memory {
    /// A node's control word.
    #[inline(always)]
    fn control(&self, line: u64) -> &crate::primitive::AtomicU64 {
        self.word(line, 0)
    }

    /// A node's slot.
    #[inline(always)]
    fn slot(&self, line: u64, slot: usize) -> &crate::primitive::AtomicU64 {
        self.word(line, slot + 1)
    }

    /// Loads a node's control word and all that was done before it was stored.
    #[inline(always)]
    fn load_control(&self, line: u64) -> Control {
        Control(self.control(line).load(Ordering::Acquire))
    }

    /// Replaces a node's control word if it is still `old`.
    #[inline(always)]
    fn change(&self, line: u64, old: Control, new: Control) -> bool {
        self.control(line).compare_exchange(old.0, new.0, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}

/// A node on the way of a change, as it was seen: neither moving nor frozen.
struct Node {
    line: u64,
    control: Control,
    level: u32,
    /// Levels below its bucket.
    depth: u32,
}

/// What follows on a look at a node.
enum Next<T> {
    Done(T),
    /// The node has changed: look again.
    Again,
    /// The key's place may be elsewhere now: from the bucket on.
    Restart,
}

/// What came of a commit.
enum Commit {
    Done,
    /// An equal key is there, with this value.
    Exists(u64),
    /// The key's place is now in another node.
    Elsewhere,
}

/// Places where a test can stop a thread to show that nobody waits for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(all(test, not(loom))), allow(dead_code))]
enum Point {
    /// A slot is claimed and not yet written.
    Claimed,
    /// A slot is written and not yet committed.
    Written,
    /// A node is marked as moving and has no link yet.
    Moving,
    /// The link is in place, the control word not yet changed.
    Linked,
    /// A bucket is frozen and nothing of it copied.
    Frozen,
    /// One half of a bucket is copied.
    HalfCopied,
}

#[cfg(all(test, not(loom)))]
type StopHook = Box<dyn Fn(Point)>;

#[cfg(all(test, not(loom)))]
thread_local! {
    /// What this thread does at such a place.
    static STOP: std::cell::RefCell<Option<StopHook>> = const { std::cell::RefCell::new(None) };
}

#[inline(always)]
fn stop_here(_point: Point) {
    #[cfg(all(test, not(loom)))]
    STOP.with(|stop| {
        if let Some(stop) = stop.borrow().as_ref() {
            stop(_point);
        }
    });
}
