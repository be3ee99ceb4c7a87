//! The C face: what `forrest.h` declares.
//!
//! A handle is an index and a generation in the shape of a pointer that is
//! never followed, so a NULL, closed or invented handle is an error code and
//! not a crash. No panic leaves a function of this module.

use crate::config::{Options, Pages};
use crate::error::Error;
use crate::hash::Hash;
use crate::store::Store;
use libc::{c_char, c_int, c_uint, c_void, size_t};
use std::cell::{Cell, UnsafeCell};
use std::ffi::CStr;
use std::ops::Bound;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};

/// A handle; it points to nothing.
#[repr(C)]
pub struct FORREST {
    _opaque: [u8; 0],
}

/// Done.
pub const FORREST_OK: c_int = 0;
/// There is no entry of this key, or no store of this name.
pub const FORREST_NOT_FOUND: c_int = 1;
/// There is an entry, or a store, already.
pub const FORREST_EXISTS: c_int = 2;
/// The value is not the expected one.
pub const FORREST_MISMATCH: c_int = 3;
/// The value does not fit the buffer; its length was stored.
pub const FORREST_TOO_SMALL: c_int = 4;
/// An argument is NULL or out of range.
pub const FORREST_INVALID: c_int = 5;
/// The handle is not open.
pub const FORREST_BAD_HANDLE: c_int = 6;
/// The handle was opened before fork; open it again in the child.
pub const FORREST_FORKED: c_int = 7;
/// The memory limit is reached.
pub const FORREST_FULL: c_int = 8;
/// The system has no memory left.
pub const FORREST_NO_MEMORY: c_int = 9;
/// The key is too long.
pub const FORREST_KEY_TOO_LONG: c_int = 10;
/// The value is too long.
pub const FORREST_VALUE_TOO_LONG: c_int = 11;
/// The value is not a number of 8 bytes.
pub const FORREST_NOT_A_NUMBER: c_int = 12;
/// The name cannot name a store.
pub const FORREST_BAD_NAME: c_int = 13;
/// The file is not a store, or was made with other settings.
pub const FORREST_FOREIGN: c_int = 14;
/// The store was written by another version.
pub const FORREST_VERSION: c_int = 15;
/// The store was written on another kind of machine.
pub const FORREST_ARCHITECTURE: c_int = 16;
/// The store is truncated or damaged.
pub const FORREST_DAMAGED: c_int = 17;
/// Too many threads or handles use stores, or the handle is in use by a callback that wants to close it.
pub const FORREST_BUSY: c_int = 18;
/// The system refused something; errno may say what.
pub const FORREST_SYSTEM: c_int = 19;
/// An error inside the library.
pub const FORREST_INTERNAL: c_int = 20;

/// The store does not keep its keys in order; a shared one cannot.
pub const FORREST_NOT_ORDERED: c_int = 21;
/// The file of this name is another user's, or others may write it.
pub const FORREST_UNTRUSTED: c_int = 22;

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

/// Gets an entry; returns non-zero to stop.
pub type forrest_visit =
    Option<unsafe extern "C" fn(*mut c_void, *const c_void, size_t, *const c_void, size_t) -> c_int>;

/// Gets the value at a position, NULL if there is none.
pub type forrest_each = Option<unsafe extern "C" fn(*mut c_void, size_t, *const c_void, size_t)>;

/// Stores one process can have open at a time.
const HANDLES: usize = 1024;

/// A place for an open store: how many calls use it, and which generation of handle opens it.
struct Slot {
    /// Generation in the high half (odd: open), calls under way in the low half.
    word: AtomicU64,
    store: UnsafeCell<Option<Store>>,
}

// SAFETY: `store` is written only by whoever turned the generation even with no call under way, and before the
// generation that opens it is published.
unsafe impl Sync for Slot {}

static SLOTS: [Slot; HANDLES] = [const { Slot { word: AtomicU64::new(0), store: UnsafeCell::new(None) } }; HANDLES];

thread_local! {
    /// Calls of this thread that are under way: more than none inside a callback.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// A call under way on an open store.
struct Call {
    slot: &'static Slot,
}

impl Drop for Call {
    fn drop(&mut self) {
        DEPTH.set(DEPTH.get() - 1);
        self.slot.word.fetch_sub(1, Ordering::Release);
    }
}

impl Call {
    fn store(&self) -> Result<&Store, c_int> {
        // SAFETY: while our call is counted nobody writes the slot, and its generation said that it is open.
        unsafe { (*self.slot.store.get()).as_ref() }.ok_or(FORREST_BAD_HANDLE)
    }
}

fn slot_of(handle: *mut FORREST) -> Result<(&'static Slot, u64), c_int> {
    let handle = handle as u64;
    let (index, generation) = ((handle >> 32) as usize, handle & 0xffff_ffff);
    if handle == 0 {
        return Err(FORREST_INVALID);
    }
    let slot = index.checked_sub(1).and_then(|index| SLOTS.get(index)).ok_or(FORREST_BAD_HANDLE)?;
    if generation % 2 == 1 { Ok((slot, generation)) } else { Err(FORREST_BAD_HANDLE) }
}

fn enter(handle: *mut FORREST) -> Result<Call, c_int> {
    let (slot, generation) = slot_of(handle)?;
    let word = slot.word.fetch_add(1, Ordering::Acquire);
    DEPTH.set(DEPTH.get() + 1);
    let call = Call { slot };
    if word >> 32 == generation { Ok(call) } else { Err(FORREST_BAD_HANDLE) }
}

fn publish(store: Store) -> Result<*mut FORREST, c_int> {
    for (index, slot) in SLOTS.iter().enumerate() {
        let word = slot.word.load(Ordering::Relaxed);
        // Even: closed. A count in the low half alone marks a slot that is being filled or emptied.
        if word >> 32 & 1 == 1 || word & 0xffff_ffff != 0 {
            continue;
        }
        if slot.word.compare_exchange(word, word + 1, Ordering::Acquire, Ordering::Relaxed).is_err() {
            continue;
        }
        // SAFETY: the generation is even, so no call reads the slot, and our count keeps others from filling it.
        unsafe { *slot.store.get() = Some(store) };
        let generation = (word >> 32) + 1;
        slot.word.fetch_add((1 << 32) - 1, Ordering::Release);
        return Ok((((index as u64 + 1) << 32) | (generation & 0xffff_ffff)) as *mut FORREST);
    }
    Err(FORREST_BUSY)
}

fn code_of(error: &Error) -> c_int {
    use llds::arena::Error as Arena;
    match error {
        Error::KeyTooLong { .. } => FORREST_KEY_TOO_LONG,
        Error::ValueTooLong { .. } => FORREST_VALUE_TOO_LONG,
        Error::NotANumber { .. } => FORREST_NOT_A_NUMBER,
        Error::Name(_) => FORREST_BAD_NAME,
        Error::NotFound(_) => FORREST_NOT_FOUND,
        Error::Exists(_) => FORREST_EXISTS,
        Error::Untrusted { .. } => FORREST_UNTRUSTED,
        Error::Settings(_) => FORREST_FOREIGN,
        Error::NotOrdered | Error::OrderedShared => FORREST_NOT_ORDERED,
        Error::Arena(error) => match error {
            Arena::Full { .. } => FORREST_FULL,
            Arena::Reserve { .. } | Arena::NoMemory { .. } => FORREST_NO_MEMORY,
            Arena::Seats => FORREST_BUSY,
            Arena::Forked => FORREST_FORKED,
            Arena::Foreign => FORREST_FOREIGN,
            Arena::Version { .. } => FORREST_VERSION,
            Arena::Architecture { .. } => FORREST_ARCHITECTURE,
            Arena::Truncated { .. } | Arena::Damaged(_) => FORREST_DAMAGED,
            _ => FORREST_SYSTEM,
        },
    }
}

impl From<Error> for Code {
    fn from(error: Error) -> Code {
        Code(code_of(&error))
    }
}

impl From<c_int> for Code {
    fn from(code: c_int) -> Code {
        Code(code)
    }
}

/// An error on its way out.
struct Code(c_int);

/// Runs a call: errors become codes, a panic becomes FORREST_INTERNAL.
fn guard(run: impl FnOnce() -> Result<(), Code>) -> c_int {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(())) => FORREST_OK,
        Ok(Err(Code(code))) => code,
        Err(_) => FORREST_INTERNAL,
    }
}

/// Runs a call on an open store.
fn with_store(handle: *mut FORREST, run: impl FnOnce(&Store) -> Result<(), Code>) -> c_int {
    guard(|| {
        let call = enter(handle)?;
        let store = call.store()?;
        if store.is_forked() {
            return Err(Code(FORREST_FORKED));
        }
        run(store)
    })
}

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
    // SAFETY: the caller's promise; NULL and impossible lengths were refused.
    Ok(unsafe { std::slice::from_raw_parts(data.cast::<u8>(), length) })
}

/// Stores a result where the caller asked for it, if he did.
///
/// # Safety
/// `out` must be NULL or writable.
unsafe fn give<T>(out: *mut T, value: T) {
    if !out.is_null() {
        // SAFETY: the caller's promise.
        unsafe { out.write(value) };
    }
}

/// A copy of `value` in memory from malloc, as C programs free it. At least one byte.
fn to_malloc(value: &[u8]) -> Result<*mut c_void, Code> {
    // SAFETY: malloc'ed memory of at least the copied length.
    unsafe {
        let copy = libc::malloc(value.len().max(1));
        if copy.is_null() {
            return Err(Code(FORREST_NO_MEMORY));
        }
        std::ptr::copy_nonoverlapping(value.as_ptr(), copy.cast::<u8>(), value.len());
        Ok(copy)
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
        // SAFETY: `out` is not NULL, the caller says it is writable.
        unsafe { out.write(std::ptr::null_mut()) };
        let mut settings = Options::new();
        let mut flags = 0;
        // SAFETY: NULL or valid by the caller's promise.
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
            // SAFETY: NUL-terminated by the caller's promise.
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
        // SAFETY: as above.
        unsafe { out.write(handle) };
        Ok(())
    })
}

/// Closes a handle. Waits for calls of other threads that are under way; later ones get FORREST_BAD_HANDLE.
#[unsafe(no_mangle)]
pub extern "C" fn forrest_close(handle: *mut FORREST) -> c_int {
    guard(|| {
        let (slot, generation) = slot_of(handle)?;
        if DEPTH.get() != 0 {
            return Err(Code(FORREST_BUSY));
        }
        let mut word = slot.word.load(Ordering::Relaxed);
        loop {
            if word >> 32 != generation {
                return Err(Code(FORREST_BAD_HANDLE));
            }
            // Even generation, and one more call so that nobody fills the slot before it is empty.
            let closed = ((generation + 1) & 0xffff_ffff) << 32 | ((word & 0xffff_ffff) + 1);
            match slot.word.compare_exchange_weak(word, closed, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => break,
                Err(now) => word = now,
            }
        }
        // SAFETY: calls under way only read; we write after the last one has left.
        let forked = unsafe { (*slot.store.get()).as_ref() }.is_some_and(Store::is_forked);
        if forked {
            // Threads that were inside a call did not come along; their calls never end, so the slot stays taken.
            return Ok(());
        }
        while slot.word.load(Ordering::Acquire) & 0xffff_ffff != 1 {
            std::thread::yield_now();
        }
        // SAFETY: ours is the only call left, and the generation keeps new ones out.
        let store = unsafe { (*slot.store.get()).take() };
        slot.word.fetch_sub(1, Ordering::Release);
        drop(store);
        Ok(())
    })
}

/// Removes the shared store called `name`; who has it open goes on.
///
/// # Safety
/// `name` must be NULL or NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forrest_remove(name: *const c_char) -> c_int {
    guard(|| {
        if name.is_null() {
            return Err(Code(FORREST_INVALID));
        }
        // SAFETY: NUL-terminated by the caller's promise.
        let name = unsafe { CStr::from_ptr(name) }.to_str().map_err(|_| Code(FORREST_BAD_NAME))?;
        Ok(Store::remove(name)?)
    })
}

/// Copies the value of a key into a buffer; stores its length in any case.
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
        // SAFETY: the caller's promise.
        let value = store.get(unsafe { bytes(key, key_length) }?).ok_or(FORREST_NOT_FOUND)?;
        // SAFETY: the caller's promise.
        unsafe { give(length, value.len()) };
        if value.len() > capacity {
            return Err(Code(FORREST_TOO_SMALL));
        }
        if buffer.is_null() && !value.is_empty() {
            return Err(Code(FORREST_INVALID));
        }
        if !value.is_empty() {
            // SAFETY: the buffer holds `capacity` bytes by the caller's promise, checked to be enough.
            unsafe { std::ptr::copy_nonoverlapping(value.as_ptr(), buffer.cast::<u8>(), value.len()) };
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
        // SAFETY: not NULL, and writable by the caller's promise; likewise below.
        unsafe { value.write(std::ptr::null_mut()) };
        // SAFETY: the caller's promise.
        let found = store.get(unsafe { bytes(key, key_length) }?).ok_or(FORREST_NOT_FOUND)?;
        // SAFETY: as above.
        unsafe {
            value.write(to_malloc(&found)?);
            give(length, found.len());
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
        // SAFETY: the caller's promise.
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
        // SAFETY: the caller's promise.
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
        // SAFETY: the caller's promise.
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
        // SAFETY: the caller's promise.
        let total = store.add(unsafe { bytes(key, key_length) }?, delta)?;
        // SAFETY: the caller's promise.
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
    // SAFETY: passed on.
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
    // SAFETY: passed on.
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
            // SAFETY: the caller's promise.
            unsafe { side.as_ref().map(|side| bytes(side.data, side.length)).transpose() }
        };
        // SAFETY: the caller's promise.
        let key = unsafe { bytes(key, key_length) }?;
        if store.compare_swap(key, side(expected)?, side(desired)?)? { Ok(()) } else { Err(Code(FORREST_MISMATCH)) }
    })
}

/// Keys as the caller's array has them.
///
/// # Safety
/// `array` must be readable for `count` elements, whose bytes must be readable.
unsafe fn slices<'a>(array: *const forrest_bytes, count: size_t) -> Result<Vec<&'a [u8]>, Code> {
    if count == 0 {
        return Ok(Vec::new());
    }
    if array.is_null() || count > isize::MAX as usize / size_of::<forrest_bytes>() {
        return Err(Code(FORREST_INVALID));
    }
    // SAFETY: the caller's promise; NULL and impossible counts were refused.
    let array = unsafe { std::slice::from_raw_parts(array, count) };
    // SAFETY: the caller's promise.
    array.iter().map(|one| unsafe { bytes(one.data, one.length) }).collect()
}

/// Looks up many keys, with many cache misses in flight; calls `each` for every one in order.
///
/// # Safety
/// Pointers must be valid for their lengths; `each` must not unwind.
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
        // SAFETY: the caller's promise.
        let keys = unsafe { slices(keys, count) }?;
        store.get_many(&keys, |index, value| {
            let (data, length) = value.map_or((std::ptr::null(), 0), |value| (value.as_ptr(), value.len()));
            // SAFETY: the caller's function, called as declared.
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
        // SAFETY: the caller's promise.
        let (keys, values) = unsafe { (slices(keys, count)?, slices(values, count)?) };
        let entries: Vec<(&[u8], &[u8])> = keys.into_iter().zip(values).collect();
        Ok(store.set_many(&entries)?)
    })
}

/// Calls `visit` with every entry, in no order, until it returns non-zero.
///
/// # Safety
/// `visit` must not unwind.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forrest_for_each(handle: *mut FORREST, visit: forrest_visit, argument: *mut c_void) -> c_int {
    with_store(handle, |store| {
        let visit = visit.ok_or(FORREST_INVALID)?;
        store.for_each(|key, value| {
            // SAFETY: the caller's function, called as declared.
            unsafe { visit(argument, key.as_ptr().cast(), key.len(), value.as_ptr().cast(), value.len()) == 0 }
        })?;
        Ok(())
    })
}

/// Calls visit with the entries of keys from `from` on and below `to` (NULL: no bound), by key order, or backwards if
/// `backwards` is not 0, until it returns non-zero. The store must be FORREST_ORDERED.
///
/// # Safety
/// The bounds must be NULL or valid; `visit` is called with `argument` and must not unwind.
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
        // SAFETY: NULL or valid by the caller's promise.
        let (from, to) = unsafe { (from.as_ref(), to.as_ref()) };
        // SAFETY: as above.
        let key = |at: &forrest_bytes| unsafe { bytes(at.data, at.length) };
        let low = from.map(key).transpose()?.map_or(Bound::Unbounded, Bound::Included);
        let high = to.map(key).transpose()?.map_or(Bound::Unbounded, Bound::Excluded);
        let mut scan = store.scan::<[u8]>((low, high))?;
        while let Some((key, value)) = if backwards != 0 { scan.next_back() } else { scan.next() } {
            // SAFETY: the caller's function, called as declared.
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
        // SAFETY: the caller's promise.
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
        // SAFETY: the caller's promise.
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
        // SAFETY: the caller's promise.
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

/// Returns the text of an error code; never NULL.
#[unsafe(no_mangle)]
pub extern "C" fn forrest_error_text(code: c_int) -> *const c_char {
    let text = match code {
        FORREST_OK => c"success",
        FORREST_NOT_FOUND => c"not found",
        FORREST_EXISTS => c"exists already",
        FORREST_MISMATCH => c"the value is not the expected one",
        FORREST_TOO_SMALL => c"the buffer is too small; the needed length was stored",
        FORREST_INVALID => c"an argument is NULL or out of range",
        FORREST_BAD_HANDLE => c"the handle is not open",
        FORREST_FORKED => c"the handle was opened before fork; open it again in the child",
        FORREST_FULL => c"the memory limit is reached; delete something or choose a larger limit",
        FORREST_NO_MEMORY => c"the system has no memory left",
        FORREST_KEY_TOO_LONG => c"the key is longer than FORREST_KEY_BYTES_MAX",
        FORREST_VALUE_TOO_LONG => c"the value is longer than FORREST_VALUE_BYTES_MAX",
        FORREST_NOT_A_NUMBER => c"the value is not a number of 8 bytes",
        FORREST_BAD_NAME => c"the name must have 1 to 200 bytes of UTF-8 without '/', not beginning with '.'",
        FORREST_FOREIGN => c"the file is not a store, or was made with other settings",
        FORREST_VERSION => c"the store was written by another version",
        FORREST_ARCHITECTURE => c"the store was written on another kind of machine",
        FORREST_DAMAGED => c"the store is truncated or damaged; remove it",
        FORREST_BUSY => c"too many threads or handles, or a callback closes its own handle",
        FORREST_SYSTEM => c"the system refused",
        FORREST_INTERNAL => c"an error inside the library",
        FORREST_NOT_ORDERED => c"the store does not keep its keys in order; a shared one cannot",
        FORREST_UNTRUSTED => c"the file of this name is another user's, or others may write it; choose another name",
        _ => c"unknown error code",
    };
    text.as_ptr()
}

/// Returns the library's version, e.g. "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn forrest_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// Opens a private store, as libforrest opens its device. NULL on failure.
#[unsafe(no_mangle)]
pub extern "C" fn forrest_alloc() -> *mut FORREST {
    let mut handle = std::ptr::null_mut();
    // SAFETY: NULL arguments are allowed, `handle` is ours.
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
        // SAFETY: the caller's promise.
        Ok::<u64, Code>(crate::murmur64a(unsafe { bytes(key, length) }?, u64::from(seed)))
    };
    catch_unwind(AssertUnwindSafe(hash)).ok().and_then(Result::ok).unwrap_or(0)
}

/// A result in memory that the caller frees; NULL if there is none.
fn result(key: u64, value: Option<&[u8]>, code: c_int) -> *mut llds_result_ent {
    // SAFETY: malloc'ed memory of the size of what is written to it.
    unsafe {
        let out = libc::malloc(size_of::<llds_result_ent>()).cast::<llds_result_ent>();
        if !out.is_null() {
            let (val, vlen, result) = match value.map(to_malloc) {
                Some(Ok(copy)) => (copy, value.map_or(0, <[u8]>::len) as c_int, code),
                Some(Err(Code(code))) => (std::ptr::null_mut(), 0, code),
                None => (std::ptr::null_mut(), 0, code),
            };
            out.write(llds_result_ent { key, val, vlen, result });
        }
        out
    }
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
        // SAFETY: the caller's promise.
        store.set(&key.to_le_bytes(), unsafe { bytes(value, length) }?)?;
        Ok(())
    });
    result(key, None, code)
}

/// Gets an entry by its 64-bit key; the result and its value are to be freed by the caller.
#[unsafe(no_mangle)]
pub extern "C" fn forrest_get_key(handle: *mut FORREST, key: u64) -> *mut llds_result_ent {
    let mut found = None;
    let code = with_store(handle, |store| {
        found = store.get(&key.to_le_bytes());
        if found.is_some() { Ok(()) } else { Err(Code(FORREST_NOT_FOUND)) }
    });
    result(key, found.as_deref(), code)
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
