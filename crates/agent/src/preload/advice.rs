//! madvise(2): discards, merging and attributes are followed.
//!
//! Advice that the kernel gives up for a file's pages, or takes otherwise, meets memory that is plain first; a discard of
//! what is merged puts fresh memory in its place, for the pool's mapping would show its old bytes again. Attributes are
//! noted, so that what replaces the memory later has them, too.

use super::active::active;
use super::c_library::{me, returned};
use super::ranges::{for_each_mapped, range_of};
use super::suspend::wanted;
use super::unmerge::{gather_ending, gather_unwritable, unmerge};
use super::without_agent::without_thread;
use crate::address_space::anonymous::{keep_attributes, replace_merged};
use crate::address_space::maps::{Maps, pool_mappings};
use crate::cold;
use crate::range_attributes::{Attributes, RangeAttributes};
use crate::state::SHARED;
use core::ffi::{c_int, c_void};
use core::sync::atomic::Ordering;
use pagefold_os::raw::{Errno, Result};
use pagefold_os::{Range, mem};

/// `MADV_WIPEONFORK`, which the kernel refuses for a file's pages: what is merged is plain memory first.
fn wipe_on_fork(range: Range) -> Result<()> {
    let held = SHARED.mapping_lock.lock(me());
    let tables = SHARED.tables(&held);
    let merged = tables.merged.may_overlap(range) && pool_mappings(range, |_, _| true).unwrap_or(true);
    // From here on, so that none of it is merged again behind us.
    tables.table.change(range, |note| note.excluded = true);
    drop(held);
    if merged {
        // Where other threads may be writing the agent's thread gives back; what it did not is refused, as a copy made here
        // may lose one of their writes.
        without_thread(libc::EINVAL, range, || {
            let _held = SHARED.mapping_lock.lock(me());
            gather_unwritable(range, libc::EINVAL).and_then(|()| wipe(range)).map(|()| 0)
        })?;
    } else {
        wipe(range)?;
    }
    SHARED.changed();
    Ok(())
}

/// `MADV_WIPEONFORK` of plain memory; noted, so that a copy of it is wiped as well.
fn wipe(range: Range) -> Result<()> {
    // SAFETY: changes no bytes of this process.
    let call = |range: Range| unsafe { mem::advise(range.start, range.len(), libc::MADV_WIPEONFORK) };
    let held = SHARED.mapping_lock.lock(me());
    let table = SHARED.tables(&held).table;
    let result = call(range);
    if result.is_ok() {
        table.change(range, |note| note.wipe_on_fork = true);
    } else {
        // Of a hole the kernel tells when it has done the rest; what it refuses ends it, and not what it did before.
        let mut wiped = true;
        let _ = for_each_mapped(range, |part| {
            wiped = wiped && call(part).is_ok();
            if wiped {
                table.change(part, |note| note.wipe_on_fork = true);
            }
        });
    }
    result
}

/// Discards `range`, parts of which are merged, as `call` does by `advice`; the mapping lock is held.
fn discard_merged(
    range: Range,
    advice: c_int,
    table: &mut RangeAttributes,
    call: impl Fn(c_int) -> Result<()>,
) -> Result<()> {
    // A pool mapping would show its old bytes again: put fresh memory in its place first. Where it is locked the kernel
    // gets no further.
    let locked = table.first_locked(range).filter(|_| advice != libc::MADV_DONTNEED_LOCKED);
    let reached = Range { start: range.start, end: locked.unwrap_or(range.end) };
    // Of what is sealed the kernel discards only what may be written to.
    let mut sealed = false;
    let refused = |_, prot, errno| sealed |= errno == Errno(libc::EPERM) && prot & libc::PROT_WRITE == 0;
    let replaced = Maps::open().and_then(|maps| replace_merged(&maps, reached, None, Some(table), refused));
    // A thread that cannot see the mappings (a root directory without /proc, no descriptors left) or replace them (sealed by
    // a raw call, no memory for another mapping) leaves it to the agent. The agent reads the event of the discard, but
    // cannot read the attributes meanwhile.
    let seen = match replaced {
        Ok(_) => true,
        Err(errno) if sealed => return Err(errno),
        Err(_) if SHARED.holds.load(Ordering::Acquire) => false,
        Err(errno) => return Err(errno),
    };
    SHARED.changed();
    // What lies between may be out.
    if seen {
        cold::discarding(range, || call(advice))
    } else {
        // The agent has heard of it when this returns (as of a discard, which the other may be), and has done it when
        // the pages can be read.
        let advice = if advice == libc::MADV_FREE { libc::MADV_DONTNEED } else { advice };
        let result = cold::discarding(range, || call(advice));
        cold::read_in(range);
        keep_attributes(range, table, true);
        result
    }
}

/// What `advice` changes in the attributes of a range.
fn mark_of(advice: c_int) -> Option<fn(&mut Attributes)> {
    match advice {
        libc::MADV_MERGEABLE => Some(|note| (note.mergeable, note.handed, note.excluded) = (true, false, false)),
        libc::MADV_UNMERGEABLE => Some(|note| (note.mergeable, note.handed, note.excluded) = (false, false, true)),
        libc::MADV_DONTFORK => Some(|note| note.dont_fork = true),
        libc::MADV_DOFORK => Some(|note| note.dont_fork = false),
        libc::MADV_KEEPONFORK => Some(|note| note.wipe_on_fork = false),
        libc::MADV_DONTDUMP => Some(|note| note.dont_dump = true),
        libc::MADV_DODUMP => Some(|note| note.dont_dump = false),
        libc::MADV_HUGEPAGE => Some(|note| (note.huge, note.small) = (true, false)),
        libc::MADV_NOHUGEPAGE => Some(|note| (note.huge, note.small) = (false, true)),
        _ => None,
    }
}

fn advise(range: Range, advice: c_int) -> Result<()> {
    const MADV_FREE: c_int = libc::MADV_FREE;
    // SAFETY: the program's own call with its own arguments, as its caller promised.
    let call = |advice| unsafe { mem::advise(range.start, range.len(), advice) };
    if matches!(advice, libc::MADV_POPULATE_READ | libc::MADV_POPULATE_WRITE) {
        // Touches, one after the other: what waits for a page must not hold up what makes room for it.
        return call(advice);
    }
    if advice == libc::MADV_WIPEONFORK {
        return wipe_on_fork(range);
    }
    let held = SHARED.mapping_lock.lock(me());
    let merged = SHARED.tables(&held).merged.may_overlap(range);
    let result = match advice {
        libc::MADV_DONTNEED | MADV_FREE | libc::MADV_DONTNEED_LOCKED if merged => {
            discard_merged(range, advice, SHARED.tables(&held).table, call)
        }
        libc::MADV_UNMERGEABLE if merged => {
            unmerge(range)?;
            call(advice)
        }
        libc::MADV_REMOVE if merged => Err(Errno(libc::EINVAL)),
        mem::MADV_GUARD_INSTALL => {
            // Where pages of a file bear marks the kernel tries for ever; and when the guard goes they read zero, so neither
            // what is merged nor what is out may come back. It may refuse, too: until then the bytes stay.
            let gathered = if merged { gather_ending(range).inspect(|()| SHARED.changed()) } else { Ok(()) };
            gathered.and_then(|()| call(advice)).inspect(|()| {
                let _ = cold::discarding(range, || call(libc::MADV_DONTNEED));
                // Until then a page that came back beside a touched one may have taken the place of its guard.
                let _ = call(advice);
            })
        }
        // The tier is where the program's cold pages go; there need be no swap. With none of ours, the kernel decides.
        libc::MADV_COLD | libc::MADV_PAGEOUT | libc::MADV_WILLNEED if cold::hint(range, advice) => {
            // Of holes and the like the kernel tells, by advice that leaves all where it is.
            match call(if advice == libc::MADV_PAGEOUT { libc::MADV_COLD } else { advice }) {
                // A kernel without swap has nothing that will be needed.
                Err(Errno(libc::EBADF)) => Ok(()),
                told => told,
            }
        }
        libc::MADV_DONTNEED | MADV_FREE | libc::MADV_DONTNEED_LOCKED | libc::MADV_REMOVE => {
            cold::discarding(range, || call(advice))
        }
        _ => call(advice),
    };
    let mark = mark_of(advice);
    let merging = matches!(advice, libc::MADV_MERGEABLE | libc::MADV_UNMERGEABLE);
    if let Some(mark) = mark
        && (merging || matches!(result, Ok(()) | Err(Errno(libc::ENOMEM))))
    {
        let table = SHARED.tables(&held).table;
        if merging || result.is_ok() {
            // The program's word on merging stands behind a hole, too, and where there is no KSM.
            table.change(range, mark);
        } else {
            // Of a hole the kernel tells when it has done the rest. What is mapped there later has no marks.
            let _ = for_each_mapped(range, |part| table.change(part, mark));
        }
        drop(held);
        if advice == libc::MADV_MERGEABLE {
            wanted();
        } else {
            SHARED.changed();
        }
    }
    match result {
        // KSM may be absent from this kernel (EINVAL); the program's wish stands all the same. So it does where part of the
        // range is a hole, of which it is told.
        Err(errno) if advice == libc::MADV_MERGEABLE && errno != Errno(libc::ENOMEM) => Ok(()),
        result => result,
    }
}

/// madvise(2): discards, merging and attributes are followed.
///
/// # Safety
/// As madvise(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(addr: *mut c_void, len: usize, advice: c_int) -> c_int {
    match range_of(addr, len) {
        Some(range) if !range.is_empty() && active() => returned(advise(range, advice)),
        // SAFETY: the program's own call with its own arguments, as its caller promised.
        _ => returned(unsafe { mem::advise(addr as u64, len as u64, advice) }),
    }
}

/// posix_madvise(3): as the C library, `POSIX_MADV_DONTNEED` does nothing.
///
/// # Safety
/// As posix_madvise(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_madvise(addr: *mut c_void, len: usize, advice: c_int) -> c_int {
    if advice == libc::POSIX_MADV_DONTNEED {
        return 0;
    }
    // SAFETY: the program's own call with its own arguments, as its caller promised.
    unsafe { mem::advise(addr as u64, len as u64, advice) }.map_or_else(|errno| errno.0, |()| 0)
}
