//! The leftover: plain memory that the budget of mappings keeps private, handed to the kernel's KSM. So are the program's
//! own copies of pages of files, which no userfaultfd can move.
//!
//! KSM merges pages without a mapping for each. It looks only at memory that is marked, so the agent marks what it manages
//! and nothing else. `prctl(PR_SET_MEMORY_MERGE)` would mark all of the program's memory, what comes later and in its
//! children as well, and could not be undone where the program had asked for it itself.
//!
//! Each note of the table says whether the agent handed a range. KSM drops the write protection of a page that it merges. So
//! the page counts as written, which costs one look. The agent's userfaultfd watches all that is handed: no other
//! userfaultfd, which would miss a write then, can have it.

use super::session::Agent;
use crate::address_space::anonymous::watch_anonymous;
use crate::address_space::maps::POOL_NAME;
use crate::address_space::regions::{Listed, list};
use crate::mapping_lock::MappingLockGuard;
use crate::range_attributes::RangeAttributes;
use crate::state::{SHARED, is_lent};
use core::sync::atomic::Ordering;
use pagefold_os::raw::{Errno, Result};
use pagefold_os::{Range, mem, sched};
use pagefold_protocol::message::{ALL_MIN, LIST_MAX, RegionEntry};

/// Bytes that are taken back under the mapping lock together: KSM's pages are copied, one by one.
const TAKEN_TOGETHER: u64 = 2 << 20;
/// Time for which one request takes back.
const TAKE_BACK_NS: u64 = 10_000_000;

impl Agent {
    /// Hands the plain memory that is managed to KSM, and large private mappings of files, but for what the program has
    /// marked itself. Memory that cannot be watched for writes stays the program's.
    ///
    /// # Errors
    /// `EBUSY` while the cold tier has the memory; `EINVAL` if this kernel has no KSM; as reading the mappings.
    pub(super) fn hand_leftover(&self) -> Result<()> {
        if is_lent() {
            return Err(Errno(libc::EBUSY));
        }
        let room = mem::Mapping::anonymous(LIST_MAX * size_of::<Range>())?;
        // SAFETY: the mapping is ours, that long, aligned to a page, and zeros are ranges.
        let found = unsafe { core::slice::from_raw_parts_mut(room.as_ptr().cast::<Range>(), LIST_MAX) };
        let (mut from, mut bytes) = (0, 0);
        loop {
            let held = self.lock_mappings();
            let table = SHARED.tables(&held).table;
            let put = |index: usize, entry: RegionEntry| found[index] = Range { start: entry.start, end: entry.end };
            let count = list(&self.maps, table, Listed::Managed, from, put)?;
            for range in &found[..count] {
                bytes += self.hand(*range, table)?;
            }
            self.counters().leftover_bytes.store(bytes, Ordering::Relaxed);
            if count < LIST_MAX {
                bytes += self.hand_files(table)?;
                self.counters().leftover_bytes.store(bytes, Ordering::Relaxed);
                return Ok(());
            }
            from = found[count - 1].end;
        }
    }

    /// Hands to KSM what [`hand_leftover`](Self::hand_leftover) does, but for plain memory. Returns true if that is
    /// anything.
    ///
    /// # Errors
    /// As [`hand_leftover`](Self::hand_leftover).
    pub(super) fn hand_file_copies(&self) -> Result<bool> {
        if is_lent() {
            return Err(Errno(libc::EBUSY));
        }
        let held = self.lock_mappings();
        let table = SHARED.tables(&held).table;
        let bytes = self.hand_files(table)?;
        self.counters().leftover_bytes.store(table.handed_bytes(), Ordering::Relaxed);
        Ok(bytes > 0)
    }

    /// Hands the large private mappings of files that the program may write to, and returns their length. KSM merges only
    /// pages that were written: the others are the file's, which all processes share.
    fn hand_files(&self, table: &mut RangeAttributes) -> Result<u64> {
        let (mut bytes, mut result) = (0, Ok(()));
        // Names can be long; a line that does not fit is left out.
        let mut buffer = [0u8; 16 << 10];
        self.maps.for_each_while(&mut buffer, |map| {
            let is_template = map.is_private_file() && !map.name.starts_with(POOL_NAME) && map.range.len() >= ALL_MIN;
            if is_template {
                result = self.hand_file(map.range, table).map(|handed| bytes += handed);
            }
            result.is_ok()
        })?;
        result.map(|()| bytes)
    }

    /// Hands a private mapping of a file, but for what is excluded or kept from dumps, and returns its length.
    fn hand_file(&self, range: Range, table: &mut RangeAttributes) -> Result<u64> {
        let (mut at, mut bytes) = (range.start, 0);
        while at < range.end && !table.is_lost() {
            let (end, note) = table.stretch(at, range.end);
            let part = Range { start: at, end };
            at = end;
            if note.is_excluded() || note.mergeable || note.dont_dump {
                continue;
            }
            let marked = self.mark(part)?;
            if marked > 0 {
                table.change(part, |note| note.handed = true);
            }
            bytes += marked;
        }
        Ok(bytes)
    }

    /// Hands the plain memory of `range`, which is managed, and returns its length. The notes say so of merged memory too:
    /// one note for each piece between merged pages would fill the table, and what replaces a pool mapping is handed as
    /// well.
    fn hand(&self, range: Range, table: &mut RangeAttributes) -> Result<u64> {
        let (mut at, mut bytes) = (range.start, 0);
        while at < range.end {
            let (end, note) = table.stretch(at, range.end);
            let part = Range { start: at, end };
            at = end;
            if note.is_excluded() || note.mergeable {
                continue;
            }
            table.change(part, |note| note.handed = true);
            let mut plain = part.start;
            let mut result = Ok(0);
            self.maps.pools(part, |pool, _| {
                result = self.mark(Range { start: plain, end: pool.start });
                bytes += result.unwrap_or(0);
                plain = pool.end;
                result.is_err()
            })?;
            result?;
            bytes += self.mark(Range { start: plain, end: part.end })?;
        }
        Ok(bytes)
    }

    /// Marks memory for KSM; returns the bytes of it that are marked.
    fn mark(&self, plain: Range) -> Result<u64> {
        if plain.is_empty() || watch_anonymous(&self.watch, plain).is_err() {
            return Ok(0);
        }
        // SAFETY: the advice changes no bytes.
        match unsafe { mem::advise(plain.start, plain.len(), libc::MADV_MERGEABLE) } {
            Ok(()) => Ok(plain.len()),
            Err(Errno(libc::EINVAL)) => Err(Errno(libc::EINVAL)),
            // No room for one more mapping, say.
            Err(_) => Ok(0),
        }
    }

    /// Takes back handed memory for a while; returns true if there is more.
    ///
    /// # Errors
    /// `EAGAIN` if the kernel has no memory for copies of KSM's pages; those stay KSM's.
    pub(super) fn take_back_leftover(&self) -> Result<bool> {
        let (began, mut from) = (sched::monotonic_ns(), 0);
        loop {
            let held = self.lock_mappings();
            let table = SHARED.tables(&held).table;
            match take_back_first(Range { start: from, end: u64::MAX }, table)? {
                Some(end) => from = end,
                None => {
                    self.counters().leftover_bytes.store(0, Ordering::Relaxed);
                    return Ok(false);
                }
            }
            if sched::monotonic_ns() - began > TAKE_BACK_NS {
                return Ok(true);
            }
        }
    }

    /// Tells a daemon that has not asked for it how much is handed at most, and any daemon if nothing is.
    pub(super) fn note_leftover(&self, table: &RangeAttributes) {
        let bytes = table.handed_bytes();
        let told = &self.counters().leftover_bytes;
        if bytes == 0 || told.load(Ordering::Relaxed) == 0 {
            told.store(bytes, Ordering::Relaxed);
        }
    }
}

/// Takes back what was handed of `range`, under the lock that `lock` takes: the program is about to have it for itself. What
/// the kernel has no memory for stays KSM's.
pub(crate) fn take_back(range: Range, lock: impl Fn() -> MappingLockGuard<'static>) {
    let mut rest = range;
    loop {
        let held = lock();
        match take_back_first(rest, SHARED.tables(&held).table) {
            Ok(Some(end)) => rest.start = end,
            Ok(None) | Err(_) => return,
        }
    }
}

/// Takes back the first handed piece of `range`; returns its end, or `None` if there is none.
fn take_back_first(range: Range, table: &mut RangeAttributes) -> Result<Option<u64>> {
    let Some(first) = table.first_handed(range) else { return Ok(None) };
    let piece = Range { start: first.start, end: first.end.min(first.start + TAKEN_TOGETHER) };
    // SAFETY: KSM's pages become copies with the same bytes.
    match unsafe { mem::advise(piece.start, piece.len(), libc::MADV_UNMERGEABLE) } {
        // The kernel tells of a hole when it has done the rest.
        Ok(()) | Err(Errno(libc::ENOMEM)) => {
            table.change(piece, |note| note.handed = false);
            Ok(Some(piece.end))
        }
        Err(errno) => Err(errno),
    }
}
