//! What libforrest declares, under its names, so that programs written for it need few changes.
//!
//! Keys are numbers of 64 bits, and results are structures that the caller
//! frees. All of it stands on the other functions.

use super::codes::{Code, FORREST_INVALID, FORREST_NOT_FOUND};
use super::handle::{FORREST, forrest_close, with_store};
use super::out::Malloced;
use super::{bytes, forrest_open};
use libc::{c_int, c_uint, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What libforrest returns.
#[repr(C)]
pub struct llds_result_ent {
    /// The key.
    pub key: u64,
    /// The value, to be freed by the caller; NULL if there is none.
    pub val: *mut c_void,
    /// Bytes of the value.
    pub vlen: c_int,
    /// An error code, 0 for success.
    pub result: c_int,
}

/// A result in malloc'ed memory, to be freed by the caller together with its value; NULL, with the value freed, if malloc
/// fails.
fn result(key: u64, (val, length): (*mut c_void, usize), result: c_int) -> *mut llds_result_ent {
    // SAFETY: malloc'ed memory of the size of what is written to it; a value is from malloc, or NULL.
    unsafe {
        let out = libc::malloc(size_of::<llds_result_ent>()).cast::<llds_result_ent>();
        if out.is_null() {
            libc::free(val);
        } else {
            out.write(llds_result_ent { key, val, vlen: length as c_int, result });
        }
        out
    }
}

/// Opens a private store, as libforrest opens its device. NULL on failure.
#[unsafe(no_mangle)]
pub extern "C" fn forrest_alloc() -> *mut FORREST {
    let mut handle = std::ptr::null_mut();
    // SAFETY: NULL is allowed for name and options; `handle` is a local variable.
    unsafe { forrest_open(std::ptr::null(), std::ptr::null(), &raw mut handle) };
    handle
}

/// MurmurHash64A. 0 for a NULL key or a negative length.
///
/// # Safety
/// `key` must be readable for `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ft_MurmurHash64A(key: *const c_void, length: c_int, seed: c_uint) -> u64 {
    let hash = || {
        let length = usize::try_from(length).map_err(|_| Code(FORREST_INVALID))?;
        // SAFETY: `# Safety` requires `key` to be NULL or readable for its length; `bytes` refuses NULL.
        Ok::<u64, Code>(crate::murmur64a(unsafe { bytes(key, length) }?, u64::from(seed)))
    };
    catch_unwind(AssertUnwindSafe(hash)).ok().and_then(Result::ok).unwrap_or(0)
}

/// Sets an entry by its 64-bit key; the result is to be freed by the caller. Unlike libforrest it replaces.
///
/// # Safety
/// `value` must be readable for `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forrest_insert_key(
    handle: *mut FORREST,
    key: u64,
    value: *mut c_void,
    length: c_int,
) -> *mut llds_result_ent {
    let code = with_store(handle, |store| {
        let length = usize::try_from(length).map_err(|_| Code(FORREST_INVALID))?;
        // SAFETY: `# Safety` requires `value` to be readable for `length` bytes; `bytes` refuses NULL.
        store.set(&key.to_le_bytes(), unsafe { bytes(value, length) }?)?;
        Ok(())
    });
    result(key, (std::ptr::null_mut(), 0), code)
}

/// Gets an entry by its 64-bit key; the result and its value are to be freed by the caller.
#[unsafe(no_mangle)]
pub extern "C" fn forrest_get_key(handle: *mut FORREST, key: u64) -> *mut llds_result_ent {
    let mut found = (std::ptr::null_mut(), 0);
    let code = with_store(handle, |store| {
        found = Malloced::of(store, &key.to_le_bytes())?;
        Ok(())
    });
    result(key, found, code)
}

/// Deletes an entry by its 64-bit key, which libforrest promised and did not have.
#[unsafe(no_mangle)]
pub extern "C" fn forrest_delete_key(handle: *mut FORREST, key: u64) -> c_int {
    with_store(handle, |store| if store.delete(&key.to_le_bytes())? { Ok(()) } else { Err(Code(FORREST_NOT_FOUND)) })
}

/// Deletes all entries.
#[unsafe(no_mangle)]
pub extern "C" fn forrest_rm_tree(handle: *mut FORREST) -> c_int {
    with_store(handle, |store| {
        store.clear()?;
        Ok(())
    })
}

/// Closes the handle.
#[unsafe(no_mangle)]
pub extern "C" fn forrest_cleanup(handle: *mut FORREST) -> c_int {
    forrest_close(handle)
}
