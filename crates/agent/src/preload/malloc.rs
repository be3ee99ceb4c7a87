//! free(3) and realloc(3): blocks of the C library's allocator that have a mapping of their own.
//!
//! Such a block ends by an munmap(2) inside the C library, which nothing interposed shows. Which blocks are of that kind is
//! read from the word before them, so only if the allocator is the C library's; ours may be called while the next one is
//! looked up.

use super::active::active;
use super::c_library::{fail, first, glibc, glibc_version, me, next, next_with};
use super::unmerge::gather;
use crate::address_space::glibc_arenas;
use crate::cold;
use crate::mapping_lock::MappingLockGuard;
use crate::state::SHARED;
use core::ffi::{c_char, c_int, c_void};
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use pagefold_os::raw::Errno;
use pagefold_os::{PAGE_SIZE, Range};

const PAGE: u64 = PAGE_SIZE as u64;

static NEXT_FREE: AtomicUsize = AtomicUsize::new(0);
pub(super) static NEXT_REALLOC: AtomicUsize = AtomicUsize::new(0);

/// Our `free` was called with no block.
static CALLED: AtomicBool = AtomicBool::new(false);

/// No function: the next `free` is being looked up.
const LOOKING: usize = 1;

/// The next `free`, or [`LOOKING`].
pub(super) fn next_free() -> usize {
    next_with(&NEXT_FREE, c"free".as_ptr(), LOOKING, glibc().free)
}

/// The size of `block` if the C library's allocator mapped it for itself: it may be managed, by the program's word if not by
/// ours.
///
/// # Safety
/// `block` is a live block of the C library's allocator.
unsafe fn own_mapping(block: *mut c_void, next: usize, libc_own: usize) -> Option<Range> {
    const MAPPED: usize = 2;
    if next != libc_own || block.is_null() || !active() {
        return None;
    }
    // SAFETY: the word before a block of this allocator is its size with three flag bits.
    let size = unsafe { *block.cast::<usize>().sub(1) };
    (size & MAPPED != 0)
        .then(|| Range { start: (block as u64 - 16) & !(PAGE - 1), end: block as u64 - 16 + (size & !7) as u64 })
}

/// free(3): the end of a block that has a mapping of its own is an munmap(2) inside the C library.
///
/// # Safety
/// As free(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free(block: *mut c_void) {
    if block.is_null() {
        if !CALLED.load(Ordering::Relaxed) {
            CALLED.store(true, Ordering::Relaxed);
        }
        return;
    }
    let function = next_free();
    if function == LOOKING {
        // The text of an earlier error, perhaps another allocator's.
        return;
    }
    // SAFETY: the block is live, as the caller promises.
    let mapped = unsafe { own_mapping(block, function, libc_free_of_next()) };
    // SAFETY: `function` is a `free`.
    let call: unsafe extern "C" fn(*mut c_void) = unsafe { core::mem::transmute(function) };
    match mapped {
        // SAFETY: passed on.
        None => unsafe { call(block) },
        Some(range) => {
            let held = SHARED.mapping_lock.lock(me());
            let _ = cold::discarding(range, || {
                // SAFETY: passed on.
                unsafe { call(block) };
                Ok(())
            });
            forget(&held, range);
        }
    }
}

/// `range` is no block any more.
fn forget(held: &MappingLockGuard<'_>, range: Range) {
    let table = SHARED.tables(held).table;
    if table.knows(range) {
        table.forget(range);
        SHARED.changed();
    }
}

/// What `dlsym` gives for the C library's own `free`, if the next one is that.
///
/// Allocators that take its place (tcmalloc, mimalloc) bring `__libc_free` as well, so what is compared is a function
/// that no allocator has.
fn libc_free_of_next() -> usize {
    static OWN: AtomicUsize = AtomicUsize::new(0);
    match OWN.load(Ordering::Acquire) {
        0 => {
            let found = NEXT_FREE.load(Ordering::Acquire);
            if found <= LOOKING {
                // Asked while it is looked up: nothing is known yet.
                return usize::MAX;
            }
            let same = if same_object(found, glibc().version) { found } else { usize::MAX };
            OWN.store(same, Ordering::Release);
            same
        }
        found => found,
    }
}

/// Looks whether the program's allocator is the C library's, of which we know what it does with memory.
pub(super) fn look_at_allocator() {
    let sees = sees_blocks();
    SHARED.blocks.store(sees, Ordering::Relaxed);
    if sees {
        glibc_arenas::begin(glibc_version().unwrap_or(c"").to_bytes());
    }
}

/// Returns true if the program's blocks are the C library's and end by this `free`. An executable may bring an allocator of
/// its own, which is found before this library: then the next `free` is the C library's, and is never called.
fn sees_blocks() -> bool {
    let function = first(c"free");
    if function == 0 || next_free() != libc_free_of_next() {
        return false;
    }
    // By a call, not by the address: that is in the executable where it refers to `free` and cannot be moved.
    // SAFETY: it is a `free`, for which no block is none.
    unsafe { core::mem::transmute::<usize, unsafe extern "C" fn(*mut c_void)>(function)(core::ptr::null_mut()) };
    CALLED.load(Ordering::Relaxed)
}

/// True if both addresses lie in the same loaded object.
fn same_object(a: usize, b: usize) -> bool {
    #[repr(C)]
    struct Info {
        name: *const c_char,
        base: *mut c_void,
        symbol: *const c_char,
        addr: *mut c_void,
    }
    unsafe extern "C" {
        fn dladdr(addr: *const c_void, info: *mut Info) -> c_int;
    }
    let base = |addr: usize| {
        let mut info = Info {
            name: core::ptr::null(),
            base: core::ptr::null_mut(),
            symbol: core::ptr::null(),
            addr: core::ptr::null_mut(),
        };
        // SAFETY: fills the structure for any address.
        let known = unsafe { dladdr(addr as *const c_void, &mut info) };
        (known != 0).then_some(info.base as usize)
    };
    base(a).is_some() && base(a) == base(b)
}

/// Another block of `size` bytes with what the `len` of `block` hold, as for one that cannot grow where it is: that cannot
/// be made one mapping, for a device may have pages of it, say.
///
/// # Safety
/// As realloc(3).
unsafe fn copy_block(block: *mut c_void, len: usize, size: usize) -> *mut c_void {
    // SAFETY: no preconditions.
    let fresh = unsafe { libc::malloc(size) };
    if !fresh.is_null() {
        // SAFETY: both blocks are live and as long, and not the same.
        unsafe { core::ptr::copy_nonoverlapping(block.cast::<u8>(), fresh.cast::<u8>(), len.min(size)) };
        // SAFETY: the caller gives it up.
        unsafe { free(block) };
    }
    fresh
}

/// realloc(3): as free(3); a block with a mapping of its own may move by mremap(2) inside the C library.
///
/// # Safety
/// As realloc(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn realloc(block: *mut c_void, size: usize) -> *mut c_void {
    let function = next(&NEXT_REALLOC, c"realloc".as_ptr(), glibc().realloc);
    let free_function = next(&NEXT_FREE, c"free".as_ptr(), glibc().free);
    // SAFETY: the block is live, as the caller promises.
    let mapped = unsafe { own_mapping(block, free_function, libc_free_of_next()) };
    // SAFETY: `function` is a `realloc`.
    let call: unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void = unsafe { core::mem::transmute(function) };
    match mapped {
        // SAFETY: passed on.
        None => unsafe { call(block, size) },
        Some(range) => {
            let held = SHARED.mapping_lock.lock(me());
            // What goes without anything left of it may be the pool's.
            let merged = size > 0 && SHARED.tables(&held).merged.may_overlap(range);
            // What is out first: gathering copies what is here.
            if cold::before_move(range).is_err() {
                drop(held);
                fail(Errno(libc::ENOMEM));
                return core::ptr::null_mut();
            }
            if merged && gather(range).is_err() {
                drop(held);
                // SAFETY: as the caller promises.
                return unsafe { copy_block(block, (range.end - block as u64) as usize, size) };
            }
            // SAFETY: passed on.
            let moved = unsafe { call(block, size) };
            // Else the block lives on where it is.
            if !moved.is_null() || size == 0 {
                forget(&held, range);
            }
            moved
        }
    }
}
