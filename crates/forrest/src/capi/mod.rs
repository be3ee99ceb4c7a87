//! The C face: what `forrest.h` declares.
//!
//! A handle is an index and a generation in the shape of a pointer that is
//! never followed, so a NULL, closed or invented handle is an error code and
//! not a crash. No panic leaves a function of this module.

mod codes;
mod handle;
mod libforrest;
mod out;

pub use codes::*;
pub use handle::{FORREST, forrest_close};
pub use libforrest::*;

use crate::config::{Options, Pages};
use crate::hash::Hash;
use crate::store::Store;
use codes::{Code, guard};
use handle::{publish, with_store};
use libc::{c_char, c_int, c_uint, c_void, size_t};
use out::{Buffer, Malloced};
use std::ffi::CStr;
use std::ops::Bound;

/// Flag of `forrest_options`: the store must not be there yet.
pub const FORREST_CREATE: c_uint = 1;
/// Flag of `forrest_options`: the store must be there.
pub const FORREST_EXISTING: c_uint = 2;
/// Flag of `forrest_options`: hash with a secret key.
pub const FORREST_KEYED: c_uint = 4;
/// Flag of `forrest_options`: 4 KiB pages only.
pub const FORREST_SMALL_PAGES: c_uint = 8;
/// Flag of `forrest_options`: explicit 1 GiB pages where there are some.
pub const FORREST_PAGES_1G: c_uint = 16;

/// Flag of `forrest_options`: keys in order too, for forrest_scan; a private store only.
pub const FORREST_ORDERED: c_uint = 32;

/// Settings of a store; zero is the default of each.
#[repr(C)]
pub struct forrest_options {
    /// Memory limit in bytes.
    pub limit_bytes: u64,
    /// Seed of MurmurHash64A; 0 stands for 9.
    pub seed: u64,
    /// FORREST_CREATE and its like.
    pub flags: c_uint,
    /// Zero.
    pub reserved: c_uint,
}

/// Bytes somewhere.
#[repr(C)]
pub struct forrest_bytes {
    /// The first byte.
    pub data: *const c_void,
    /// How many.
    pub length: size_t,
}

/// What a store holds and takes.
#[repr(C)]
pub struct forrest_stats {
    /// Entries.
    pub entry_count: u64,
    /// Bytes in table and records.
    pub allocated_bytes: u64,
    /// Bytes of memory they lie in.
    pub held_bytes: u64,
    /// Bytes of free memory kept for reuse.
    pub kept_bytes: u64,
    /// Bytes of directory and locks.
    pub fixed_bytes: u64,
    /// The memory limit.
    pub limit_bytes: u64,
    /// Threads that have written and live.
    pub thread_count: u64,
    /// Deaths of other processes' threads that were cleaned up.
    pub recovery_count: u64,
}

/// Gets an entry; returns non-zero to stop.
pub type forrest_visit =
    Option<unsafe extern "C" fn(*mut c_void, *const c_void, size_t, *const c_void, size_t) -> c_int>;

/// Gets the value at a position, NULL if there is none.
pub type forrest_each = Option<unsafe extern "C" fn(*mut c_void, size_t, *const c_void, size_t)>;

/// The bytes a caller passed.
///
/// # Safety
/// `data` must be readable for `length` bytes.
unsafe fn bytes<'a>(data: *const c_void, length: size_t) -> Result<&'a [u8], Code> {
    if length == 0 {
        return Ok(&[]);
    }
    if data.is_null() || length > isize::MAX as usize {
        return Err(Code(FORREST_INVALID));
    }
    // SAFETY: `# Safety` requires `length` readable bytes; NULL and lengths above isize::MAX were refused above.
    Ok(unsafe { std::slice::from_raw_parts(data.cast::<u8>(), length) })
}

/// Stores a result in the caller's variable, unless that is NULL.
///
/// # Safety
/// `out` must be NULL or writable.
unsafe fn give<T>(out: *mut T, value: T) {
    if !out.is_null() {
        // SAFETY: `# Safety` requires `out` to be NULL or writable; NULL was ruled out.
        unsafe { out.write(value) };
    }
}

/// Opens a store: the shared one called `name`, or a private one if `name` is NULL.
///
/// # Safety
/// Pointers must be valid or NULL; `name` NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forrest_open(
    name: *const c_char,
    options: *const forrest_options,
    out: *mut *mut FORREST,
) -> c_int {
    guard(|| {
        if out.is_null() {
            return Err(Code(FORREST_INVALID));
        }
        // SAFETY: NULL was refused above; `# Safety` requires any other `out` to be writable.
        unsafe { out.write(std::ptr::null_mut()) };
        let mut settings = Options::new();
        let mut flags = 0;
        // SAFETY: `# Safety` requires `options` to be NULL or valid.
        if let Some(options) = unsafe { options.as_ref() } {
            flags = options.flags;
            if options.reserved != 0 || flags & !63 != 0 || flags & 3 == 3 {
                return Err(Code(FORREST_INVALID));
            }
            if options.limit_bytes != 0 {
                settings = settings.limit_bytes(options.limit_bytes);
            }
            if flags & FORREST_KEYED != 0 {
                settings = settings.hash(Hash::Keyed);
            } else if options.seed != 0 {
                settings = settings.hash(Hash::Murmur { seed: options.seed });
            }
            if flags & FORREST_SMALL_PAGES != 0 {
                settings = settings.pages(Pages::Small);
            } else if flags & FORREST_PAGES_1G != 0 {
                settings = settings.pages(Pages::Huge1G);
            }
            if flags & FORREST_ORDERED != 0 {
                settings = settings.ordered();
            }
        }
        let store = if name.is_null() {
            settings.private()?
        } else {
            // SAFETY: `name` is not NULL, and `# Safety` requires it to be NUL-terminated.
            let name = unsafe { CStr::from_ptr(name) }.to_str().map_err(|_| Code(FORREST_BAD_NAME))?;
            if flags & FORREST_CREATE != 0 {
                settings.create(name)?
            } else if flags & FORREST_EXISTING != 0 {
                settings.open_existing(name)?
            } else {
                settings.open(name)?
            }
        };
        let handle = publish(store)?;
        // SAFETY: NULL was refused above; `# Safety` requires any other `out` to be writable.
        unsafe { out.write(handle) };
        Ok(())
    })
}

/// Removes the shared store called `name`; processes that have it open keep it.
///
/// # Safety
/// `name` must be NULL or NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forrest_remove(name: *const c_char) -> c_int {
    guard(|| {
        if name.is_null() {
            return Err(Code(FORREST_INVALID));
        }
        // SAFETY: `name` is not NULL, and `# Safety` requires it to be NUL-terminated.
        let name = unsafe { CStr::from_ptr(name) }.to_str().map_err(|_| Code(FORREST_BAD_NAME))?;
        Ok(Store::remove(name)?)
    })
}

/// Copies the value of a key into a buffer; stores its length if there is one, also if the buffer is too small.
///
/// # Safety
/// Pointers must be valid for their lengths, or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forrest_get(
    handle: *mut FORREST,
    key: *const c_void,
    key_length: size_t,
    buffer: *mut c_void,
    capacity: size_t,
    length: *mut size_t,
) -> c_int {
    with_store(handle, |store| {
        // SAFETY: `# Safety` requires `key` and `buffer` to be NULL or valid for their lengths; both calls check for NULL.
        let (key, mut value) = unsafe { (bytes(key, key_length)?, Buffer::new(buffer, capacity)) };
        if !store.read(key, &mut value) {
            return Err(Code(FORREST_NOT_FOUND));
        }
        // SAFETY: `# Safety` requires `length` to be NULL or writable; `give` checks for NULL.
        unsafe { give(length, value.length) };
        if value.length > capacity {
            return Err(Code(FORREST_TOO_SMALL));
        }
        if buffer.is_null() && value.length != 0 {
            return Err(Code(FORREST_INVALID));
        }
        Ok(())
    })
}

/// Returns the value of a key in memory of its own, to be freed by the caller.
///
/// # Safety
/// Pointers must be valid for their lengths, or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forrest_get_copy(
    handle: *mut FORREST,
    key: *const c_void,
    key_length: size_t,
    value: *mut *mut c_void,
    length: *mut size_t,
) -> c_int {
    with_store(handle, |store| {
        if value.is_null() {
            return Err(Code(FORREST_INVALID));
        }
        // SAFETY: NULL was refused above; `# Safety` requires any other `value` to be writable.
        unsafe { value.write(std::ptr::null_mut()) };
        // SAFETY: `# Safety` requires `key` to be NULL or readable for its length; `bytes` refuses NULL.
        let (copy, bytes) = Malloced::of(store, unsafe { bytes(key, key_length) }?)?;
        // SAFETY: `value` was checked for NULL above; `# Safety` requires `length` to be NULL or writable.
        unsafe {
            value.write(copy);
            give(length, bytes);
        }
        Ok(())
    })
}

/// Sets a key to a value.
///
/// # Safety
/// Pointers must be valid for their lengths, or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forrest_set(
    handle: *mut FORREST,
    key: *const c_void,
    key_length: size_t,
    value: *const c_void,
    value_length: size_t,
) -> c_int {
    with_store(handle, |store| {
        // SAFETY: `# Safety` requires `key` and `value` to be NULL or readable for their lengths; `bytes` refuses NULL.
        let (key, value) = unsafe { (bytes(key, key_length)?, bytes(value, value_length)?) };
        store.set(key, value)?;
        Ok(())
    })
}

/// Sets a key that is not there yet; FORREST_EXISTS otherwise.
///
/// # Safety
/// Pointers must be valid for their lengths, or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forrest_insert(
    handle: *mut FORREST,
    key: *const c_void,
    key_length: size_t,
    value: *const c_void,
    value_length: size_t,
) -> c_int {
    with_store(handle, |store| {
        // SAFETY: `# Safety` requires `key` and `value` to be NULL or readable for their lengths; `bytes` refuses NULL.
        let (key, value) = unsafe { (bytes(key, key_length)?, bytes(value, value_length)?) };
        if store.insert(key, value)? { Ok(()) } else { Err(Code(FORREST_EXISTS)) }
    })
}

/// Deletes a key; FORREST_NOT_FOUND if there is none.
///
/// # Safety
/// Pointers must be valid for their lengths, or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forrest_delete(handle: *mut FORREST, key: *const c_void, key_length: size_t) -> c_int {
    with_store(handle, |store| {
        // SAFETY: `# Safety` requires `key` to be NULL or readable for its length; `bytes` refuses NULL.
        if store.delete(unsafe { bytes(key, key_length) }?)? { Ok(()) } else { Err(Code(FORREST_NOT_FOUND)) }
    })
}

/// Adds to the number under a key (8 bytes, little-endian; none counts as 0) and stores the sum.
///
/// # Safety
/// Pointers must be valid for their lengths, or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forrest_add(
    handle: *mut FORREST,
    key: *const c_void,
    key_length: size_t,
    delta: i64,
    sum: *mut i64,
) -> c_int {
    with_store(handle, |store| {
        // SAFETY: `# Safety` requires `key` to be NULL or readable for its length; `bytes` refuses NULL.
        let total = store.add(unsafe { bytes(key, key_length) }?, delta)?;
        // SAFETY: `# Safety` requires `sum` to be NULL or writable; `give` checks for NULL.
        unsafe { give(sum, total) };
        Ok(())
    })
}

/// Adds 1; see forrest_add.
///
/// # Safety
/// Pointers must be valid for their lengths, or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forrest_increment(
    handle: *mut FORREST,
    key: *const c_void,
    key_length: size_t,
    sum: *mut i64,
) -> c_int {
    // SAFETY: `# Safety` requires of `key` and `sum` what forrest_add requires.
    unsafe { forrest_add(handle, key, key_length, 1, sum) }
}

/// Subtracts 1; see forrest_add.
///
/// # Safety
/// Pointers must be valid for their lengths, or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forrest_decrement(
    handle: *mut FORREST,
    key: *const c_void,
    key_length: size_t,
    sum: *mut i64,
) -> c_int {
    // SAFETY: `# Safety` requires of `key` and `sum` what forrest_add requires.
    unsafe { forrest_add(handle, key, key_length, -1, sum) }
}

/// Sets a key to `desired` if its value is `expected`; NULL stands for no entry on both sides.
///
/// # Safety
/// Pointers must be valid, or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forrest_compare_swap(
    handle: *mut FORREST,
    key: *const c_void,
    key_length: size_t,
    expected: *const forrest_bytes,
    desired: *const forrest_bytes,
) -> c_int {
    with_store(handle, |store| {
        let side = |side: *const forrest_bytes| -> Result<Option<&[u8]>, Code> {
            // SAFETY: `# Safety` requires `expected` and `desired` to be NULL or valid, and their bytes readable.
            unsafe { side.as_ref().map(|side| bytes(side.data, side.length)).transpose() }
        };
        // SAFETY: `# Safety` requires `key` to be NULL or readable for its length; `bytes` refuses NULL.
        let key = unsafe { bytes(key, key_length) }?;
        if store.compare_swap(key, side(expected)?, side(desired)?)? { Ok(()) } else { Err(Code(FORREST_MISMATCH)) }
    })
}

/// Keys as the caller's array has them.
///
/// # Safety
/// `array` must be readable for `count` elements, and so must the bytes that they name.
unsafe fn slices<'a>(array: *const forrest_bytes, count: size_t) -> Result<Vec<&'a [u8]>, Code> {
    if count == 0 {
        return Ok(Vec::new());
    }
    if array.is_null() || count > isize::MAX as usize / size_of::<forrest_bytes>() {
        return Err(Code(FORREST_INVALID));
    }
    // SAFETY: `# Safety` requires `count` readable elements; NULL and impossible counts were refused above.
    let array = unsafe { std::slice::from_raw_parts(array, count) };
    // SAFETY: `# Safety` requires the bytes of each element to be readable; `bytes` refuses NULL.
    array.iter().map(|one| unsafe { bytes(one.data, one.length) }).collect()
}

/// Looks up many keys, with many cache misses in flight; calls `each` for every one in order.
///
/// # Safety
/// Pointers must be valid for their lengths; `each` must return: no unwinding, no longjmp.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forrest_get_many(
    handle: *mut FORREST,
    keys: *const forrest_bytes,
    count: size_t,
    each: forrest_each,
    argument: *mut c_void,
) -> c_int {
    with_store(handle, |store| {
        let each = each.ok_or(FORREST_INVALID)?;
        // SAFETY: `# Safety` requires the array and the bytes it names to be readable; `slices` refuses NULL.
        let keys = unsafe { slices(keys, count) }?;
        store.get_many(&keys, |index, value| {
            let (data, length) = value.map_or((std::ptr::null(), 0), |value| (value.as_ptr(), value.len()));
            // SAFETY: the caller's callback has the declared type; the pointers are valid until it returns.
            unsafe { each(argument, index, data.cast(), length) };
        });
        Ok(())
    })
}

/// Sets many keys. Stops at the first error; those before it are set.
///
/// # Safety
/// Pointers must be valid for their lengths.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forrest_set_many(
    handle: *mut FORREST,
    keys: *const forrest_bytes,
    values: *const forrest_bytes,
    count: size_t,
) -> c_int {
    with_store(handle, |store| {
        // SAFETY: `# Safety` requires both arrays and the bytes they name to be readable; `slices` refuses NULL.
        let (keys, values) = unsafe { (slices(keys, count)?, slices(values, count)?) };
        let entries: Vec<(&[u8], &[u8])> = keys.into_iter().zip(values).collect();
        Ok(store.set_many(&entries)?)
    })
}

/// Calls `visit` with every entry, in no order, until it returns non-zero.
///
/// # Safety
/// `visit` must return: no unwinding, no longjmp.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forrest_for_each(handle: *mut FORREST, visit: forrest_visit, argument: *mut c_void) -> c_int {
    with_store(handle, |store| {
        let visit = visit.ok_or(FORREST_INVALID)?;
        store.for_each(|key, value| {
            // SAFETY: the caller's callback has the declared type; the pointers are valid until it returns.
            unsafe { visit(argument, key.as_ptr().cast(), key.len(), value.as_ptr().cast(), value.len()) == 0 }
        })?;
        Ok(())
    })
}

/// Calls visit with the entries of keys from `from` on and below `to` (NULL: no bound), by key order, or backwards if
/// `backwards` is not 0, until it returns non-zero. The store must be FORREST_ORDERED.
///
/// # Safety
/// The bounds must be NULL or valid; `visit` is called with `argument` and must return: no unwinding, no
/// longjmp.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forrest_scan(
    handle: *mut FORREST,
    from: *const forrest_bytes,
    to: *const forrest_bytes,
    backwards: c_int,
    visit: forrest_visit,
    argument: *mut c_void,
) -> c_int {
    with_store(handle, |store| {
        let visit = visit.ok_or(FORREST_INVALID)?;
        // SAFETY: `# Safety` requires both bounds to be NULL or valid.
        let (from, to) = unsafe { (from.as_ref(), to.as_ref()) };
        // SAFETY: `# Safety` requires the bounds' bytes to be readable; `bytes` refuses NULL.
        let key = |at: &forrest_bytes| unsafe { bytes(at.data, at.length) };
        let low = from.map(key).transpose()?.map_or(Bound::Unbounded, Bound::Included);
        let high = to.map(key).transpose()?.map_or(Bound::Unbounded, Bound::Excluded);
        let mut scan = store.scan::<[u8]>((low, high))?;
        while let Some((key, value)) = if backwards != 0 { scan.next_back() } else { scan.next() } {
            // SAFETY: the caller's callback has the declared type; the pointers are valid until it returns.
            if unsafe { visit(argument, key.as_ptr().cast(), key.len(), value.as_ptr().cast(), value.len()) } != 0 {
                break;
            }
        }
        Ok(())
    })
}

/// Makes room for so many entries in all, so that sets up to there copy nothing to grow.
#[unsafe(no_mangle)]
pub extern "C" fn forrest_reserve(handle: *mut FORREST, entries: u64) -> c_int {
    with_store(handle, |store| Ok(store.reserve(entries)?))
}

/// Deletes all entries and stores how many they were.
///
/// # Safety
/// `count` must be writable or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forrest_clear(handle: *mut FORREST, count: *mut u64) -> c_int {
    with_store(handle, |store| {
        let cleared = store.clear()?;
        // SAFETY: `# Safety` requires `count` to be NULL or writable; `give` checks for NULL.
        unsafe { give(count, cleared) };
        Ok(())
    })
}

/// Stores the number of entries.
///
/// # Safety
/// `count` must be writable or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forrest_count(handle: *mut FORREST, count: *mut u64) -> c_int {
    with_store(handle, |store| {
        // SAFETY: `# Safety` requires `count` to be NULL or writable; `give` checks for NULL.
        unsafe { give(count, store.len()) };
        Ok(())
    })
}

/// Stores what the store holds and takes.
///
/// # Safety
/// `out` must be writable or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forrest_get_stats(handle: *mut FORREST, out: *mut forrest_stats) -> c_int {
    with_store(handle, |store| {
        let stats = store.stats();
        let stats = forrest_stats {
            entry_count: stats.entry_count,
            allocated_bytes: stats.allocated_bytes,
            held_bytes: stats.held_bytes,
            kept_bytes: stats.kept_bytes,
            fixed_bytes: stats.fixed_bytes,
            limit_bytes: stats.limit_bytes,
            thread_count: stats.thread_count,
            recovery_count: stats.recovery_count,
        };
        // SAFETY: `# Safety` requires `out` to be NULL or writable; `give` checks for NULL.
        unsafe { give(out, stats) };
        Ok(())
    })
}

/// Gives free memory back to the system.
#[unsafe(no_mangle)]
pub extern "C" fn forrest_trim(handle: *mut FORREST) -> c_int {
    with_store(handle, |store| Ok(store.trim()?))
}

/// Cleans up after processes that were killed while they used the store.
#[unsafe(no_mangle)]
pub extern "C" fn forrest_recover(handle: *mut FORREST) -> c_int {
    with_store(handle, |store| {
        store.recover();
        Ok(())
    })
}

/// Returns the library's version, e.g. "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn forrest_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}
