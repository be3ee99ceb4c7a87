//! Memory that the program tracks by a userfaultfd of its own, as VM monitors do for postcopy migration and snapshots.
//!
//! The kernel takes a range from one descriptor only, and what we watch is ours: so the program's comes first. The range is
//! plain memory before it is asked for again, and left alone until the program has let go of it.

use super::active::active;
use super::c_library::{fail, me};
use super::unmerge::gather_unwritable;
use super::without_agent::without_thread;
use crate::address_space::maps::pool_mappings;
use crate::live::take_back;
use crate::state::SHARED;
use core::ffi::{c_int, c_ulong, c_void};
use core::sync::atomic::{AtomicUsize, Ordering};
use pagefold_os::raw::{Errno, Result};
use pagefold_os::{Range, syscall, uffd};

pub(super) static NEXT_IOCTL: AtomicUsize = AtomicUsize::new(0);

type IoctlFn = unsafe extern "C" fn(c_int, c_ulong, ...) -> c_int;

/// ioctl(2): registrations of userfaultfds are followed. What they are not about is the next library's: it may be one that
/// plays a device.
///
/// # Safety
/// As ioctl(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    let next = NEXT_IOCTL.load(Ordering::Acquire);
    if next == 0 || matches!(request as u32, uffd::REGISTER | uffd::UNREGISTER) {
        // SAFETY: the program's own call with its own arguments, as its caller promised.
        return unsafe { kernels_ioctl(fd, request, argument) };
    }
    // SAFETY: the C library's function of this name has this type; the program's own call.
    unsafe { core::mem::transmute::<usize, IoctlFn>(next)(fd, request, argument) }
}

/// As [`ioctl`], for callers that go to the kernel past all libraries, as those do that emulate a device.
///
/// # Safety
/// As ioctl(2).
pub(super) unsafe fn kernels_ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    // SAFETY: the program's own call with its own arguments, as its caller promised.
    let call = || unsafe { syscall!(libc::SYS_ioctl, fd, request, argument) };
    let result = match request as u32 {
        uffd::REGISTER if active() => register(fd, argument, call),
        uffd::UNREGISTER if active() => {
            let result = call();
            if result.is_ok() {
                track(range_at(argument), false);
            }
            result
        }
        _ => call(),
    };
    match result {
        Ok(value) => value as c_int,
        Err(errno) => {
            fail(errno);
            -1
        }
    }
}

fn register(fd: c_int, argument: *mut c_void, call: impl Fn() -> Result<usize>) -> Result<usize> {
    let mut result = call();
    if result.is_ok() {
        let range = range_at(argument);
        if !shows_pool(range) {
            track(range, true);
            return result;
        }
        // The agent is about to start, and has not asked for what is merged yet.
        let mut range = [range.start, range.len()];
        // SAFETY: the request takes address and length.
        unsafe { syscall!(libc::SYS_ioctl, fd, uffd::UNREGISTER, range.as_mut_ptr()) }?;
        result = Err(Errno(libc::EBUSY));
    }
    if result == Err(Errno(libc::EBUSY)) {
        let range = range_at(argument);
        // All that is watched is let go for a moment, and what is out comes back.
        result = without_thread(libc::EBUSY, range, || {
            let held = SHARED.mapping_lock.lock(me());
            // Memory to which no thread can write just now may be copied. Otherwise a program that tracks missing pages
            // would be shown a file's.
            gather_unwritable(range, libc::EBUSY).map_err(|_| Errno(libc::EBUSY))?;
            let result = call();
            drop(held);
            if result.is_ok() {
                track(range, true);
            }
            result
        });
    }
    result
}

fn shows_pool(range: Range) -> bool {
    let held = SHARED.mapping_lock.lock(me());
    SHARED.tables(&held).merged.may_overlap(range) && pool_mappings(range, |_, _| true).unwrap_or(true)
}

/// The range that the kernel has just read from `argument`.
fn range_at(argument: *mut c_void) -> Range {
    // SAFETY: both requests begin with address and length, and the kernel could read them.
    let [start, len] = unsafe { core::ptr::read_unaligned(argument.cast::<[u64; 2]>()) };
    Range { start, end: start.saturating_add(len) }
}

fn track(range: Range, tracked: bool) {
    let held = SHARED.mapping_lock.lock(me());
    SHARED.tables(&held).table.change(range, |note| note.tracked = tracked);
    drop(held);
    if tracked {
        // KSM drops the marks by which the program would learn of writes.
        take_back(range, || SHARED.mapping_lock.lock(me()));
    }
    SHARED.changed();
}
