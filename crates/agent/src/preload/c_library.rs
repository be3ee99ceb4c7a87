//! What we use of the C library: its `errno`, the environment, and the functions that ours stand before.
//!
//! A lookup may allocate and lock, so functions that a signal handler may need are looked up before the program begins.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::sync::atomic::{AtomicUsize, Ordering};
use pagefold_os::raw::{Errno, Result};

unsafe extern "C" {
    fn __errno_location() -> *mut c_int;
    fn pthread_self() -> usize;
    fn getenv(name: *const c_char) -> *const c_char;
    fn strlen(text: *const c_char) -> usize;
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
}

pub(super) fn me() -> usize {
    // SAFETY: returns the thread's own pointer.
    unsafe { pthread_self() }
}

pub(super) fn fail(errno: Errno) {
    // SAFETY: the C library's errno of this thread.
    unsafe { *__errno_location() = errno.0 };
}

pub(super) fn returned(result: Result<()>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(errno) => {
            fail(errno);
            -1
        }
    }
}

/// A variable of the environment, while the program has not begun and nobody changes it.
pub(super) fn text(name: &CStr) -> Option<&'static [u8]> {
    // SAFETY: getenv returns a C string or null.
    unsafe {
        let value = getenv(name.as_ptr());
        if value.is_null() { None } else { Some(core::slice::from_raw_parts(value.cast::<u8>(), strlen(value))) }
    }
}

/// The next `name` after ours in the order of libraries, looked up once; `meanwhile` serves the lookup itself.
pub(super) fn next_with(cache: &AtomicUsize, name: *const c_char, meanwhile: usize, fallback: usize) -> usize {
    const RTLD_NEXT: *mut c_void = -1isize as *mut c_void;
    match cache.load(Ordering::Acquire) {
        0 => {
            cache.store(meanwhile, Ordering::Release);
            // SAFETY: a valid C string.
            let found = unsafe { dlsym(RTLD_NEXT, name) } as usize;
            let found = if found == 0 { fallback } else { found };
            cache.store(found, Ordering::Release);
            found
        }
        found => found,
    }
}

/// The next `name` after ours, or `fallback` if there is none.
pub(super) fn next(cache: &AtomicUsize, name: *const c_char, fallback: usize) -> usize {
    next_with(cache, name, fallback, fallback)
}

/// The `name` that the program calls, 0 if there is none.
pub(super) fn first(name: &CStr) -> usize {
    // SAFETY: a valid C string.
    unsafe { dlsym(core::ptr::null_mut(), name.as_ptr()) as usize }
}

/// Whether a sanitizer or valgrind looks at every access: they keep shadows of all memory, at addresses of their own.
pub(super) fn is_instrumented() -> bool {
    let names = [c"__asan_init", c"__tsan_init", c"__msan_init", c"__hwasan_init", c"__lsan_init"];
    let preloaded = text(c"LD_PRELOAD").unwrap_or(b"");
    names.into_iter().any(|name| first(name) != 0) || preloaded.windows(10).any(|part| part == b"/vgpreload")
}
