//! Makes merged memory private, by a thread of the program.
//!
//! There are two ways, with a hazard each. The kernel copies where the program may write (`populate`): no write of another
//! thread is lost, but the mapping stays the pool's. Bytes are copied to one anonymous mapping (`gather`): a write of
//! another thread meanwhile is lost, and a device that reads into the page is left with the old one. The caller knows which
//! way is safe, and holds the mapping lock.

use super::c_library::me;
use super::pins;
use crate::address_space::anonymous::{keep_attributes, keep_from_copies};
use crate::address_space::discarded_ranges;
use crate::address_space::maps::{Maps, POOL_NAME, pool_mappings};
use crate::cold;
use crate::live::{copy_of, take_back};
use crate::state::SHARED;
use core::ffi::c_int;
use pagefold_os::raw::{Errno, Result};
use pagefold_os::{PAGE_SIZE, Range, mem};

pub(super) const EVERYTHING: Range = Range { start: 0, end: u64::MAX };

/// Makes every page that is shown from the pool in `range`, and what the agent handed to KSM, the program's own. The mapping
/// lock is held.
///
/// Where the program may write, the kernel's own copy on write does it, so that no write of another thread is lost; the
/// daemon has such pages unshared later. Elsewhere only devices can be writing, and the bytes are copied.
pub(super) fn unmerge(range: Range) -> Result<()> {
    take_back(range, || SHARED.mapping_lock.lock(me()));
    for_each_merged(range, |part, prot| match prot & libc::PROT_WRITE {
        // A copy would leave a device that still reads into the page with the old one.
        0 if pins::are_registered() => Ok(()),
        0 => gather(part),
        _ => populate(part),
    })
}

/// Makes `range`, if part of it is or was shown from the pool, one anonymous private mapping with the same bytes, rights and
/// attributes, as it would be without merging: calls that take one mapping only will take it. The mapping lock is held.
///
/// Calls that need this are about memory to which no other thread may be writing at the same time.
///
/// # Errors
/// `ENOMEM` if there is no memory for it, or a device may have pinned pages of it for good; then nothing has changed.
pub(super) fn gather(range: Range) -> Result<()> {
    gather_unless(range, pins::are_registered)
}

/// As [`gather`]; refused if `pinned` says so where something is to be copied.
#[inline(never)]
fn gather_unless(range: Range, pinned: impl Fn() -> bool) -> Result<()> {
    let maps = Maps::open()?;
    // Not on the stack, which may be a small one.
    let room = mem::Mapping::anonymous(8 << 10)?;
    // SAFETY: the mapping is ours, writable, and that long.
    let buffer = unsafe { core::slice::from_raw_parts_mut(room.as_ptr(), room.len()) };
    // One mapping, to the program, is a row of neighbours with the same rights, all anonymous or ours.
    let (mut end, mut rights, mut merged, mut one, mut pieces) = (range.start, None, false, true, 0);
    maps.for_each(buffer, |map| {
        if !map.range.overlaps(&range) {
            return;
        }
        let pool = map.name.starts_with(POOL_NAME) && !map.shared;
        merged |= pool;
        pieces += 1;
        one &= (pool || !map.shared && map.inode == 0)
            && map.range.start <= end
            && *rights.get_or_insert(map.prot) == map.prot;
        end = map.range.end;
    })?;
    let Some(rights) = rights.filter(|_| one && (merged || pieces > 1) && end >= range.end) else { return Ok(()) };
    if pinned() {
        return Err(Errno(libc::ENOMEM));
    }
    if discarded_ranges::overlap(range) {
        // Zeros that are not there yet, which the copy would not wait for.
        cold::read_in(range);
    }
    // SAFETY: adds a right, and takes it away again: what may not be read could not be waited for.
    let protect = |rights| unsafe { mem::protect(range.start, range.len(), rights) };
    let hidden = rights & libc::PROT_READ == 0;
    let readable = if hidden { protect(rights | libc::PROT_READ) } else { Ok(()) };
    // Where the kernel has no room for more mappings it may have changed the first ones.
    readable.and_then(|()| replace_by_copy(range, rights)).inspect_err(|_| {
        if hidden {
            let _ = protect(rights);
        }
    })?;
    let held = SHARED.mapping_lock.lock(me());
    keep_attributes(range, SHARED.tables(&held).table, true);
    Ok(())
}

/// Puts a copy of `range` in its place, with `rights`.
fn replace_by_copy(range: Range, rights: c_int) -> Result<()> {
    let fresh = copy_of(range.start, range.len())?;
    // SAFETY: the fresh memory is ours; nothing is read or written there until it is the program's.
    unsafe { mem::protect(fresh.addr(), range.len(), rights) }?;
    let held = SHARED.mapping_lock.lock(me());
    keep_from_copies(Range::pages_from(fresh.addr(), range.pages()), range, SHARED.tables(&held).table);
    drop(held);
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: replaces what lies there by memory of the same bytes.
    unsafe { mem::remap(fresh.addr(), range.len(), range.len(), flags, range.start) }?;
    core::mem::forget(fresh);
    Ok(())
}

/// Makes the pages of `part`, which the program may write, its own, all but those that are guarded.
fn populate(part: Range) -> Result<()> {
    // SAFETY: changes no bytes.
    let write = |range: Range| unsafe { mem::advise(range.start, range.len(), libc::MADV_POPULATE_WRITE) };
    match write(part) {
        Err(Errno(libc::EFAULT)) => {
            (part.start..part.end).step_by(PAGE_SIZE).try_for_each(|addr| match write(Range::pages_from(addr, 1)) {
                Err(Errno(libc::EFAULT)) => Ok(()),
                other => other,
            })
        }
        other => other,
    }
}

/// As [`gather`]; where `range` is more than one mapping nothing of it is the pool's any more: the kernel may take each by
/// itself (since Linux 6.17).
pub(super) fn gather_each(range: Range) -> Result<()> {
    gather(range)?;
    for_each_merged(range, |part, _| gather(part))
}

/// As [`gather`] for each pool mapping in `range`. Its bytes are about to end, and so they are for devices.
pub(super) fn gather_ending(range: Range) -> Result<()> {
    for_each_merged(range, |part, _| gather_unless(part, || false))
}

/// Calls `act` with each pool mapping in `range` and its rights; what failed first is the result. The mapping lock is held.
fn for_each_merged(range: Range, act: impl Fn(Range, c_int) -> Result<()>) -> Result<()> {
    let held = SHARED.mapping_lock.lock(me());
    if !SHARED.tables(&held).merged.may_overlap(range) {
        // So the mappings, which may be out of reach, need not be read.
        return Ok(());
    }
    let mut failed = None;
    pool_mappings(range, |part, prot| {
        failed = failed.or(act(part, prot).err());
        false
    })?;
    failed.map_or(Ok(()), Err)
}

/// Makes what is merged in `range` private where no thread can write to it just now, so that a copy loses nothing. The
/// mapping lock is held.
///
/// # Errors
/// `refused` if some of it can be written to, which is left as it is; and as [`gather`].
pub(super) fn gather_unwritable(range: Range, refused: i32) -> Result<()> {
    for_each_merged(range, |part, prot| if prot & libc::PROT_WRITE != 0 { Err(Errno(refused)) } else { gather(part) })
}

/// Makes everything that is still shown from the pool the program's own; no other thread may be writing to it.
pub(super) fn gather_everything() {
    take_back(EVERYTHING, || SHARED.mapping_lock.lock(me()));
    let held = SHARED.mapping_lock.lock(me());
    if !SHARED.tables(&held).merged.is_empty() && for_each_merged(EVERYTHING, |part, _| gather(part)).is_ok() {
        SHARED.tables(&held).merged.clear();
    }
}

pub(super) fn has_merged() -> bool {
    let held = SHARED.mapping_lock.lock(me());
    !SHARED.tables(&held).merged.is_empty()
}
