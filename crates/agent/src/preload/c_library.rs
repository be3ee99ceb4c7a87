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

// What only the C library has that we know: null elsewhere. A loader ends a program in which a name is missing that is not
// weak.
core::arch::global_asm!(
    ".weak __libc_free",
    ".weak __libc_realloc",
    ".weak gnu_get_libc_version",
    ".pushsection .data.rel.ro.pagefold_glibc, \"aw\"",
    ".balign 8",
    ".globl pagefold_glibc",
    ".hidden pagefold_glibc",
    "pagefold_glibc:",
    ".quad __libc_free",
    ".quad __libc_realloc",
    ".quad gnu_get_libc_version",
    ".popsection",
);

/// Functions of glibc's own; 0 where the program has another C library.
pub(super) struct Glibc {
    pub(super) free: usize,
    pub(super) realloc: usize,
    pub(super) version: usize,
}

/// Where they are.
pub(super) fn glibc() -> Glibc {
    unsafe extern "C" {
        static pagefold_glibc: [usize; 3];
    }
    // SAFETY: three words that the loader filled before any code of this library runs, and that never change.
    let [free, realloc, version] = unsafe { pagefold_glibc };
    Glibc { free, realloc, version }
}

/// Its version; nothing in a program with another C library, such as musl.
pub(super) fn glibc_version() -> Option<&'static CStr> {
    match glibc().version {
        0 => None,
        // SAFETY: glibc's function of this name has this type, and gives a text that stays.
        at => Some(unsafe { CStr::from_ptr(core::mem::transmute::<usize, extern "C" fn() -> *const c_char>(at)()) }),
    }
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

/// A variable of the environment, before the program has begun, so that no thread changes it.
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
