//! Calls that make, move and end mappings: mmap(2), munmap(2), mremap(2), mprotect(2).
//!
//! Large private mappings that the program lets the kernel place are placed by
//! us, in a zone of addresses that is never used twice. So an address that the
//! program gave back through a path we do not see cannot come to life again as
//! something else while its pages are frozen.

use super::active::{active, managed_all};
use super::c_library::{fail, me, returned};
use super::early::{self, is_early};
use super::manageable::{self, is_manageable, is_open, is_plain};
use super::ranges::{for_each_mapped, range_of};
use super::suspend::wanted;
use super::unmerge::{gather, gather_each};
use crate::address_space::maps::{Maps, pool_mappings};
use crate::cold;
use crate::limits::NOTHING;
use crate::mapping_lock::MappingLockGuard;
use crate::range_attributes::Attributes;
use crate::state::SHARED;
use core::ffi::{c_int, c_void};
use core::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use pagefold_os::raw::{Errno, Result};
use pagefold_os::{ADDRESS_END, PAGE_SIZE, Range, mem};
use pagefold_protocol::message::ALL_MIN;

const PAGE: u64 = PAGE_SIZE as u64;

/// Mappings at least this large are placed in the zone even without `--manage all`: they are guest memory or alike.
const PLACE_MIN: u64 = 32 << 20;

/// Where the zone begins, and how far it may be shifted at random.
pub(super) const ZONE_START: u64 = 0x1000_0000_0000;
const ZONE_END: u64 = 0x5000_0000_0000;

pub(super) static ZONE_NEXT: AtomicU64 = AtomicU64::new(0);

/// Where in the zone a block of `len` bytes is to be; nothing if there is no room. What asks for more than that uses up
/// none.
///
/// Side by side, as the kernel has them: many blocks are one mapping then, and a program may have only so many.
fn place(len: u64) -> Option<u64> {
    const HUGE: u64 = 2 << 20;
    let size = len.checked_next_multiple_of(PAGE).filter(|size| *size < ZONE_END)?;
    // Blocks of whole huge pages begin where huge pages begin, again as with the kernel.
    let begin = |at: u64| if size.is_multiple_of(HUGE) { at.next_multiple_of(HUGE) } else { at };
    let step = |at: u64| Some(begin(at) + size).filter(|end| at != 0 && *end < ZONE_END);
    ZONE_NEXT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, step).ok().map(begin)
}

fn map(addr: *mut c_void, len: usize, prot: c_int, flags: c_int, fd: c_int, offset: i64) -> Result<u64> {
    let large = len as u64 >= if managed_all() { ALL_MIN } else { PLACE_MIN };
    let plain = is_plain(prot, flags);
    let manageable = managed_all() && is_manageable(prot, flags);
    let mark = move |note: &mut Attributes| manageable::mark(note, prot, large);
    if addr.is_null() && large && plain && flags & (libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE) == 0 {
        // A wish, without MAP_FIXED_NOREPLACE, which sandboxes may not know. Where the kernel has a reason to put it
        // elsewhere, as it puts small memory, its end is seen if an interposed call makes it.
        let place = place(len as u64).unwrap_or(0);
        // SAFETY: the program's own call, with a wish.
        let place = unsafe { mem::map(place, len as u64, prot, flags, fd, offset as u64) }?;
        if manageable {
            note_mapped(place, len, is_open(prot), mark);
        }
        return Ok(place);
    }
    if flags & libc::MAP_FIXED != 0
        && flags & libc::MAP_FIXED_NOREPLACE != libc::MAP_FIXED_NOREPLACE
        && let Some(range) = range_of(addr, len)
    {
        let held = SHARED.mapping_lock.lock(me());
        let mapped = cold::discarding(range, || {
            // SAFETY: the program's own call with its own arguments, as its caller promised.
            unsafe { mem::map(addr as u64, len as u64, prot, flags, fd, offset as u64) }
        })
        .inspect_err(|_| forget_holes(&held, range))?;
        let table = SHARED.tables(&held).table;
        // A part of what is managed stays so, however small.
        let manageable = manageable && (large || table.sees(range));
        table.forget(range);
        if manageable {
            table.change(range, mark);
        }
        drop(held);
        if manageable && is_open(prot) {
            wanted();
        }
        return Ok(mapped);
    }
    // SAFETY: the program's own call with its own arguments, as its caller promised.
    let mapped = unsafe { mem::map(addr as u64, len as u64, prot, flags, fd, offset as u64) }?;
    if manageable && large {
        note_mapped(mapped, len, is_open(prot), mark);
    }
    Ok(mapped)
}

/// Marks what was mapped at `start`, where nothing was; memory that is `open` is listed soon.
fn note_mapped(start: u64, len: usize, open: bool, mark: impl Fn(&mut Attributes)) {
    if let Some(range) = range_of(start as *mut c_void, len) {
        note(range, mark);
        if open {
            wanted();
        }
    }
}

/// Forgets what is no mapping of `range` any more: a call that puts something there may fail when what was there is gone.
fn forget_holes(held: &MappingLockGuard<'_>, range: Range) {
    let table = SHARED.tables(held).table;
    if !table.knows(range) {
        return;
    }
    let mut at = range.start;
    let seen = for_each_mapped(range, |part| {
        table.forget(Range { start: at, end: part.start });
        at = part.end;
    });
    if seen.is_ok() {
        table.forget(Range { start: at, end: range.end });
        SHARED.changed();
    }
}

pub(super) fn note(range: Range, change: impl Fn(&mut Attributes)) {
    let held = SHARED.mapping_lock.lock(me());
    SHARED.tables(&held).table.change(range, change);
}

/// mmap(2), with large private memory placed in the zone.
///
/// # Safety
/// As mmap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    addr: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    let result = if active() {
        map(addr, len, prot, flags, fd, offset)
    } else {
        // SAFETY: the program's own call with its own arguments, as its caller promised.
        let mapped = unsafe { mem::map(addr as u64, len as u64, prot, flags, fd, offset as u64) };
        if is_early()
            && let Ok(start) = mapped
            && let Some(range) = range_of(start as *mut c_void, len)
        {
            early::note_mapped(range, prot, flags);
        }
        mapped
    };
    match result {
        Ok(addr) => {
            if flags & libc::MAP_LOCKED != 0
                && active()
                && let Some(range) = range_of(addr as *mut c_void, len)
            {
                note(range, |note| note.locked = true);
            }
            addr as *mut c_void
        }
        Err(errno) => {
            fail(errno);
            libc::MAP_FAILED
        }
    }
}

/// mmap64, the same function on our architectures.
///
/// # Safety
/// As mmap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(
    addr: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    // SAFETY: passed on.
    unsafe { mmap(addr, len, prot, flags, fd, offset) }
}

/// munmap(2).
///
/// # Safety
/// As munmap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munmap(addr: *mut c_void, len: usize) -> c_int {
    // SAFETY: the program's own call with its own arguments, as its caller promised.
    let call = || unsafe { mem::unmap(addr as u64, len as u64) };
    let Some(range) = range_of(addr, len).filter(|_| active() || is_early()) else { return returned(call()) };
    let held = SHARED.mapping_lock.lock(me());
    let result = cold::discarding(range, call);
    if result.is_ok() {
        let table = SHARED.tables(&held).table;
        if table.knows(range) {
            table.forget(range);
            SHARED.changed();
        }
    }
    drop(held);
    returned(result)
}

/// Makes `call`, the program's mremap(2) that moves `range` to the address `to` as it is. The mapping lock is held.
///
/// Since Linux 6.17 the kernel moves several mappings in one such call. But it stops in the middle at a mapping that a
/// userfaultfd watches, unless that is the first and only one. So each is moved by a call of its own.
fn move_each(range: Range, to: u64, flags: c_int, call: impl Fn() -> Result<u64>) -> Result<u64> {
    let whole = Range { start: to, end: to.saturating_add(range.len()) };
    // Such an address the kernel may refuse, and only for the last part.
    let is_refused = range.overlaps(&whole) || whole.end >= ADDRESS_END;
    let Some(maps) = Maps::open().ok().filter(|_| !is_refused) else { return call() };
    let mut at = range.start;
    while at < range.end {
        let part = maps.first_mapped(Range { start: at, end: range.end });
        if at == range.start {
            match part {
                // Where the kernel cannot be asked it moves one mapping only.
                Err(_) | Ok(None) => return call(),
                Ok(Some(part)) if part == range || part.start > at || !moves_several() => return call(),
                Ok(Some(_)) => {}
            }
        }
        let Some(part) = part? else { break };
        // SAFETY: a part of the program's own call.
        unsafe { mem::remap(part.start, part.len(), part.len(), flags, to + (part.start - range.start)) }?;
        at = part.end;
    }
    Ok(to)
}

/// True if the kernel moves several mappings in one call.
fn moves_several() -> bool {
    /// 1 if it does not, 2 if it does; 0 before it was tried.
    static KNOWN: AtomicU8 = AtomicU8::new(0);
    const LEN: u64 = 2 * PAGE;
    if KNOWN.load(Ordering::Relaxed) == 0 {
        let Ok(room) = mem::Mapping::anonymous(2 * LEN as usize) else { return false };
        let (from, to) = (room.addr(), room.addr() + LEN);
        // SAFETY: our own memory. Two mappings, since they have different rights.
        let moved = unsafe {
            mem::protect(from, PAGE, libc::PROT_NONE)
                .and_then(|()| mem::remap(from, LEN, LEN, libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED, to))
        };
        KNOWN.store(1 + u8::from(moved.is_ok()), Ordering::Relaxed);
        if moved.is_ok() {
            // Another thread may have memory by now where they were.
            core::mem::forget(room);
            // SAFETY: our own memory.
            let _ = unsafe { mem::unmap(to, LEN) };
        }
    }
    KNOWN.load(Ordering::Relaxed) == 2
}

/// mremap(2): merged pages become private first, for a pool mapping must neither grow nor lie about its neighbours.
///
/// # Safety
/// As mremap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mremap(
    addr: *mut c_void,
    len: usize,
    new_len: usize,
    flags: c_int,
    new_addr: *mut c_void,
) -> *mut c_void {
    let call = || {
        // SAFETY: the program's own call with its own arguments, as its caller promised.
        unsafe { mem::remap(addr as u64, len as u64, new_len as u64, flags, new_addr as u64) }
    };
    let ranges = || Some((range_of(addr, len)?, range_of(addr, new_len)?));
    let is_fixed = flags & libc::MREMAP_FIXED != 0;
    let fixed = if is_fixed { range_of(new_addr, new_len) } else { Some(NOTHING) };
    let result = if (active() || is_early())
        && let (Some((range, resized)), Some(fixed)) = (ranges(), fixed)
    {
        let held = SHARED.mapping_lock.lock(me());
        let shrinks = new_len <= len && flags & (libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP) == 0;
        let back = if shrinks { Ok(()) } else { cold::before_move(range) };
        let kept = Range { start: range.start, end: range.end.min(resized.end) };
        // Other threads may write to what only grows, so it is not copied: there is no room for it here.
        let stays = !shrinks && flags & (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) == 0;
        let gathered = if back.is_err() {
            back
        } else if shrinks || len == 0 || !SHARED.tables(&held).merged.may_overlap(range) {
            Ok(())
        } else if !stays {
            gather_each(kept)
        } else if pool_mappings(range, |_, _| true).unwrap_or(true) {
            Err(Errno(libc::ENOMEM))
        } else {
            Ok(())
        };
        // What the call takes away.
        let voided = if shrinks { Range { start: resized.end, end: range.end } } else { fixed };
        let keeps_length = is_fixed && range == resized && !range.is_empty();
        let call = || if keeps_length { move_each(range, fixed.start, flags, call) } else { call() };
        let result = match gathered.and_then(|()| cold::discarding(voided, call)) {
            // More than one mapping, perhaps by us: what was given back does not join with what never was the pool's.
            Err(Errno(libc::EFAULT)) if stays => Err(Errno(libc::ENOMEM)),
            Err(Errno(libc::EFAULT)) if !shrinks => match gather(kept) {
                Ok(()) => cold::discarding(voided, call),
                Err(errno @ Errno(libc::ENOMEM)) => Err(errno),
                // A program that may not read its own memory gets the kernel's error.
                Err(_) => Err(Errno(libc::EFAULT)),
            },
            other => other,
        };
        if let Ok(moved) = result {
            let table = SHARED.tables(&held).table;
            if shrinks {
                table.forget(voided);
            } else {
                let keeps = flags & libc::MREMAP_DONTUNMAP != 0;
                table.carry(range, Range { start: moved, end: moved + resized.len() }, keeps);
                if keeps {
                    // The lock has moved with the pages.
                    table.change(range, |note| note.locked = false);
                }
            }
            SHARED.changed();
        } else {
            forget_holes(&held, fixed);
            if keeps_length {
                // A part may have moved before the call failed.
                forget_holes(&held, range);
            }
        }
        drop(held);
        result
    } else {
        call()
    };
    match result {
        Ok(addr) => addr as *mut c_void,
        Err(errno) => {
            fail(errno);
            libc::MAP_FAILED
        }
    }
}

/// mprotect(2).
///
/// # Safety
/// As mprotect(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mprotect(addr: *mut c_void, len: usize, prot: c_int) -> c_int {
    if !active() {
        // SAFETY: the program's own call with its own arguments, as its caller promised.
        return returned(unsafe { mem::protect(addr as u64, len as u64, prot) });
    }
    let held = SHARED.mapping_lock.lock(me());
    // SAFETY: the program's own call with its own arguments, as its caller promised.
    let result = unsafe { mem::protect(addr as u64, len as u64, prot) };
    drop(held);
    returned(result)
}
