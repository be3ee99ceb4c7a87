//! Which process the memory belongs to: a forked child, the process itself, or a parent that lends it.
//!
//! A raw call may fork a process unseen, so a page that the kernel wipes in children tells a child apart. A child that
//! shares its parent's memory, as vfork(2) makes them, is told apart by its process id: the agent there is the parent's.

use crate::owned_ranges::{self, Owned};
use core::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use pagefold_os::{PAGE_SIZE, Range, mem, syscall};

const PAGE: u64 = PAGE_SIZE as u64;

/// A word of its own page, 1 in the process that made it; the kernel wipes it in a child, by whatever call that was forked.
/// 0 before there is one.
static ORIGIN: AtomicU64 = AtomicU64::new(0);

fn origin() -> Option<&'static AtomicU32> {
    match ORIGIN.load(Ordering::Acquire) {
        0 => None,
        // SAFETY: a page that stays mapped, in children too.
        addr => Some(unsafe { &*(addr as *const AtomicU32) }),
    }
}

/// The process that owns this memory, 0 if that is not known.
static PROCESS: AtomicI32 = AtomicI32::new(0);

/// Not the C library's: a child that has this memory may have been made behind that.
fn process() -> i32 {
    // SAFETY: the call takes no arguments.
    unsafe { syscall!(libc::SYS_getpid) }.map_or(0, |pid| pid as i32)
}

/// The memory is the calling process's from here on.
pub(crate) fn mark_process() {
    PROCESS.store(process(), Ordering::Relaxed);
}

/// False in a child that has its parent's memory, as vfork(2) makes them: the agent there is the parent's.
pub(crate) fn is_own_process() -> bool {
    PROCESS.load(Ordering::Relaxed) == process()
}

/// Makes this process known to itself; before it has other threads.
pub(crate) fn mark_origin() {
    mark_process();
    let Ok(page) = mem::Mapping::anonymous(PAGE_SIZE) else { return };
    // SAFETY: changes no bytes of this process.
    if unsafe { mem::advise(page.addr(), PAGE, libc::MADV_WIPEONFORK) }.is_ok() {
        owned_ranges::register(Owned::Origin, Range::pages_from(page.addr(), 1));
        ORIGIN.store(page.addr(), Ordering::Release);
        core::mem::forget(page);
        is_new_child();
    }
}

/// True, once, in a forked child.
pub(crate) fn is_new_child() -> bool {
    origin().is_some_and(|word| word.load(Ordering::Relaxed) == 0 && word.swap(1, Ordering::Relaxed) == 0)
}
