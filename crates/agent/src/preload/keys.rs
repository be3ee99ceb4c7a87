//! Memory under a protection key: a mapping of ours in its place has none, and is open to threads that may not read it. So it
//! comes back and is plain before it gets its key, and is left alone as memory that the program excluded.

use super::active::active;
use super::c_library::returned;
use super::locks::settle;
use super::mapping::{mprotect, range_of};
use core::ffi::{c_int, c_void};
use pagefold_os::syscall;

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
    // SAFETY: the program's own call.
    let call = || unsafe { syscall!(libc::SYS_pkey_mprotect, addr, len, prot, key) };
    // Key 0 is what all memory has from the start; what had another one before is excluded already.
    let keyed = range_of(addr, len).filter(|range| key != 0 && !range.is_empty() && active());
    let result = match keyed {
        Some(range) => settle(range, |note| note.excluded = true, call),
        None => call(),
    };
    returned(result.map(drop))
}
