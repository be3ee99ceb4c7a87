//! Memory that the program locks: it must be in memory, and no fault may wait for the daemon. So evicted pages return and
//! merged ones are unshared before it is locked, and it is left alone until it is unlocked.

use super::active::active;
use super::c_library::{me, returned};
use super::mapping::note;
use super::ranges::range_of;
use super::suspend::wanted;
use super::unmerge::{EVERYTHING, unmerge};
use super::without_agent::without_thread;
use crate::address_space::maps::pool_mappings;
use crate::cold;
use crate::range_attributes::Attributes;
use crate::state::{ALL_LOCKED, SHARED};
use core::ffi::{c_int, c_uint, c_void};
use core::sync::atomic::Ordering;
use pagefold_os::raw::Result;
use pagefold_os::{PAGE_SIZE, Range, syscall};

/// The pages of which the kernel locks all if a part is meant; nothing where it refuses them. It lets the sum of a length
/// wrap.
fn pages_of(addr: *mut c_void, len: usize) -> Option<Range> {
    let within = addr as usize % PAGE_SIZE;
    let len = len.wrapping_add(within).wrapping_add(PAGE_SIZE - 1) / PAGE_SIZE * PAGE_SIZE;
    range_of((addr as usize - within) as *mut c_void, len)
}

/// Makes `call`, which locks the pages of `len` bytes at `addr`.
fn lock(addr: *mut c_void, len: usize, call: impl Fn() -> Result<usize>) -> Result<usize> {
    match pages_of(addr, len).filter(|_| active()) {
        Some(range) => settle(range, |note| note.locked = true, call),
        None => call(),
    }
}

/// Makes `call` with all of `range` here and plain, as far as that can be done; `change` notes what it did there.
pub(super) fn settle(
    range: Range,
    change: impl Fn(&mut Attributes),
    call: impl Fn() -> Result<usize>,
) -> Result<usize> {
    let settling = || {
        let held = SHARED.mapping_lock.lock(me());
        cold::before_move(range)?;
        // What the agent did not give back. Others may be writing there: then the kernel makes the copies.
        unmerge(range)?;
        let result = call();
        if result.is_ok() {
            SHARED.tables(&held).table.change(range, &change);
            SHARED.changed();
        }
        result
    };
    let held = SHARED.mapping_lock.lock(me());
    let merged = SHARED.tables(&held).merged.may_overlap(range);
    let merged = merged && pool_mappings(range, |_, _| true).unwrap_or(true);
    drop(held);
    // Other threads may be writing: the agent's thread unshares it.
    if merged { without_thread(0, range, settling) } else { settling() }
}

/// mlock(2).
///
/// # Safety
/// As mlock(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlock(addr: *mut c_void, len: usize) -> c_int {
    // SAFETY: the program's own call with its own arguments, as its caller promised.
    let call = || unsafe { syscall!(libc::SYS_mlock, addr, len) };
    returned(lock(addr, len, call).map(drop))
}

/// mlock2(2).
///
/// # Safety
/// As mlock2(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlock2(addr: *mut c_void, len: usize, flags: c_uint) -> c_int {
    // SAFETY: the program's own call with its own arguments, as its caller promised.
    let call = || unsafe { syscall!(libc::SYS_mlock2, addr, len, flags) };
    returned(lock(addr, len, call).map(drop))
}

/// munlock(2).
///
/// # Safety
/// As munlock(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munlock(addr: *mut c_void, len: usize) -> c_int {
    // SAFETY: the program's own call with its own arguments, as its caller promised.
    let result = unsafe { syscall!(libc::SYS_munlock, addr, len) };
    if result.is_ok()
        && active()
        && let Some(range) = pages_of(addr, len)
    {
        note(range, |note| note.locked = false);
        SHARED.changed();
    }
    returned(result.map(drop))
}

/// mlockall(2): the agent is away until munlockall(2).
///
/// # Safety
/// As mlockall(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlockall(flags: c_int) -> c_int {
    let call = || {
        if active() {
            let _held = SHARED.mapping_lock.lock(me());
            unmerge(EVERYTHING)?;
        }
        // SAFETY: the program's own call with its own arguments, as its caller promised.
        unsafe { syscall!(libc::SYS_mlockall, flags) }.inspect(|_| ALL_LOCKED.store(active(), Ordering::Release))
    };
    returned(if active() { without_thread(0, EVERYTHING, call) } else { call() }.map(drop))
}

/// munlockall(2).
///
/// # Safety
/// As munlockall(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munlockall() -> c_int {
    // SAFETY: the program's own call with its own arguments, as its caller promised.
    let result = unsafe { syscall!(libc::SYS_munlockall) };
    if result.is_ok() && active() {
        note(Range { start: 0, end: u64::MAX }, |note| note.locked = false);
        if ALL_LOCKED.swap(false, Ordering::AcqRel) {
            wanted();
        }
    }
    returned(result.map(drop))
}
