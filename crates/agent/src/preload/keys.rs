//! Memory under a protection key: a mapping of ours in its place has none, and is open to threads that may not read it. So
//! it comes back and is plain before it gets its key, and is left alone as long as it has it, whatever the program says of
//! merging.

use super::active::active;
use super::c_library::{me, returned};
use super::locks::settle;
use super::mapping::mprotect;
use super::ranges::range_of;
use crate::state::SHARED;
use core::ffi::{c_int, c_void};
use pagefold_os::raw::{Errno, Result};
use pagefold_os::{Range, syscall};

/// pkey_mprotect(2).
///
/// # Safety
/// As pkey_mprotect(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pkey_mprotect(addr: *mut c_void, len: usize, prot: c_int, key: c_int) -> c_int {
    if key == -1 {
        // SAFETY: what the kernel takes it for.
        return unsafe { mprotect(addr, len, prot) };
    }
    // SAFETY: the program's own call with its own arguments, as its caller promised.
    let call = || unsafe { syscall!(libc::SYS_pkey_mprotect, addr, len, prot, key) };
    let result = match range_of(addr, len).filter(|range| !range.is_empty() && active()) {
        // What all memory has from the start.
        Some(range) if key == 0 => unlock(range, call),
        Some(range) => settle(range, |note| note.keyed = true, || lock(range, call)),
        None => call(),
    };
    returned(result.map(drop))
}

/// Makes `call`, which gives `range` a key, with the mapping lock held. Where that fails on the way the first pages may have
/// it.
fn lock(range: Range, call: impl Fn() -> Result<usize>) -> Result<usize> {
    call().inspect_err(|errno| {
        if *errno != Errno(libc::EINVAL) {
            let held = SHARED.mapping_lock.lock(me());
            SHARED.tables(&held).table.change(range, |note| note.keyed = true);
            SHARED.changed();
        }
    })
}

/// Makes `call`, which gives `range` key 0.
fn unlock(range: Range, call: impl Fn() -> Result<usize>) -> Result<usize> {
    let held = SHARED.mapping_lock.lock(me());
    let result = call()?;
    let table = SHARED.tables(&held).table;
    if table.knows(range) {
        table.change(range, |note| note.keyed = false);
        SHARED.changed();
    }
    Ok(result)
}
