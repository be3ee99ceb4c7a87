//! Memory that the program seals: no mapping there is replaced or moved any more, ours neither. So it comes back and is
//! plain before it is sealed, and is left alone for good.

use super::active::active;
use super::c_library::returned;
use super::locks::settle;
use super::ranges::range_of;
use core::ffi::{c_int, c_ulong, c_void};
use pagefold_os::syscall;

/// mseal(2).
///
/// # Safety
/// As mseal(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mseal(addr: *mut c_void, len: usize, flags: c_ulong) -> c_int {
    // SAFETY: the program's own call with its own arguments, as its caller promised.
    let call = || unsafe { syscall!(libc::SYS_mseal, addr, len, flags) };
    let result = match range_of(addr, len).filter(|range| !range.is_empty() && active()) {
        Some(range) => settle(range, |note| note.sealed = true, call),
        None => call(),
    };
    returned(result.map(drop))
}
