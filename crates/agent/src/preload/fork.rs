//! Forks: no page may be frozen when memory is copied.
//!
//! So the mapping lock is held over each fork that is seen. Among the handlers of the program's libraries it is taken last
//! and freed first: a thread that holds one of their locks may wait for it. Evicted pages return before, because a child has
//! no daemon to ask. The child has its parent's tables, but neither its threads nor its descriptors: its agent starts anew.

use super::active::{ACTIVE, active, begin_child};
use super::c_library::{fail, me, next};
use super::suspend::{Away, start_unless_away};
use crate::address_space::discarded_ranges;
use crate::address_space::maps::Maps;
use crate::cold;
use crate::live::stop;
use crate::live::{apply_owed, wait_served};
use crate::process::is_new_child;
use crate::state::SHARED;
use core::ffi::{c_char, c_int, c_long, c_void};
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use pagefold_os::raw::{Errno, Result};
use pagefold_os::{PAGE_SIZE, Range};

const PAGE: u64 = PAGE_SIZE as u64;

type Handler = Option<extern "C" fn()>;
type RegisterFn = unsafe extern "C" fn(Handler, Handler, Handler, *const c_void) -> c_int;

static NEXT_REGISTER: AtomicUsize = AtomicUsize::new(0);

/// Registers the fork handlers of this library, once; before those of any library that registers through
/// [`__register_atfork`].
///
/// Handlers that prepare a fork run from the last to the first, the others from the first to the last. So libraries take
/// their locks before the mapping lock is taken here, and it is freed before they free theirs: a thread that holds such a
/// lock and waits for the mapping lock gets it. Their handlers may map and discard as ever.
pub(super) fn register_first() -> Option<RegisterFn> {
    static DONE: AtomicBool = AtomicBool::new(false);
    let register = match next(&NEXT_REGISTER, c"__register_atfork".as_ptr(), 0) {
        0 => return None,
        // SAFETY: the C library's function of this name has this type.
        found => unsafe { core::mem::transmute::<usize, RegisterFn>(found) },
    };
    if !DONE.swap(true, Ordering::Relaxed) {
        // SAFETY: the handlers live as long as the library, which is never unloaded (it was preloaded).
        unsafe { register(Some(before_fork), Some(parent_of_fork), Some(child_of_fork), core::ptr::null()) };
    }
    Some(register)
}

/// What pthread_atfork(3) is in every object that calls it. Constructors of libraries do so before ours runs.
///
/// # Safety
/// As pthread_atfork(3); `object` is the caller's, or null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __register_atfork(
    prepare: Handler,
    parent: Handler,
    child: Handler,
    object: *const c_void,
) -> c_int {
    match register_first() {
        // SAFETY: passed on.
        Some(register) => unsafe { register(prepare, parent, child, object) },
        None => libc::ENOMEM,
    }
}

/// What pthread_atfork(3) calls: it cannot refuse, and [`fork`] has seen before whether there is room.
extern "C" fn before_fork() {
    if active() {
        let _ = prepare_fork(true);
    }
}

extern "C" fn parent_of_fork() {
    if active() {
        after_fork_parent();
    }
}

extern "C" fn child_of_fork() {
    if ACTIVE.load(Ordering::Relaxed) {
        after_fork_child();
    }
}

/// Readies memory for being copied, and takes the mapping lock until [`after_fork_parent`].
///
/// # Errors
/// `ENOMEM`, without the mapping lock, if a limit of memory has no room for what the child must have; not if it is to be
/// done `ignores_limit`.
fn prepare_fork(ignores_limit: bool) -> Result<()> {
    // No page may be in the freeze area when the child's memory is copied.
    let held = SHARED.mapping_lock.lock(me());
    // Nor may pages be evicted: the child has no daemon to ask. No page is evicted while the mapping lock is held.
    cold::before_fork(ignores_limit, |addr, end| {
        let (end, note) = SHARED.tables(&held).table.stretch(addr, end);
        (end, note.dont_fork)
    })?;
    // A discard may be answered, and its memory not DONTFORK again yet.
    wait_served();
    apply_owed(&held);
    // Zeros that are not there yet, in place of which the child would find the slots.
    if !discarded_ranges::is_empty()
        && let Ok(maps) = Maps::open()
    {
        discarded_ranges::for_each(&maps, |void| _ = cold::read_in(void));
    }
    core::mem::forget(held);
    Ok(())
}

/// [`prepare_fork`] for calls that may fail; false with `errno` set.
pub(super) fn may_fork() -> bool {
    prepare_fork(false).inspect_err(|errno| fail(*errno)).is_ok()
}

pub(super) fn after_fork_parent() {
    SHARED.mapping_lock.unlock_forgotten(me());
}

pub(super) fn after_fork_child() {
    SHARED.mapping_lock.unlock_forgotten(me());
    let _ = is_new_child();
    if begin_child(me()) {
        start_unless_away();
    }
}

type ForkFn = unsafe extern "C" fn() -> c_int;
type CloneFn = unsafe extern "C" fn(
    extern "C" fn(*mut c_void) -> c_int,
    *mut c_void,
    c_int,
    *mut c_void,
    *mut c_void,
    *mut c_void,
    *mut c_void,
) -> c_int;

pub(super) static NEXT_FORK: AtomicUsize = AtomicUsize::new(0);
pub(super) static NEXT_LIBC_FORK: AtomicUsize = AtomicUsize::new(0);
pub(super) static NEXT_CLONE: AtomicUsize = AtomicUsize::new(0);

/// The C library's `name`, a fork; nothing, with `errno` set, if it has none.
fn next_fork(cache: &AtomicUsize, name: *const c_char) -> Option<ForkFn> {
    match next(cache, name, 0) {
        0 => {
            fail(Errno(libc::ENOSYS));
            None
        }
        // SAFETY: both forks have this type.
        function => Some(unsafe { core::mem::transmute::<usize, ForkFn>(function) }),
    }
}

/// fork(2): refused with `ENOMEM` where a limit of memory has no room for what the child must have.
///
/// # Safety
/// As fork(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fork() -> c_int {
    let Some(call) = next_fork(&NEXT_LIBC_FORK, c"fork".as_ptr()) else { return -1 };
    if active() {
        if !may_fork() {
            return -1;
        }
        // The other handlers, which run before this library's, do the rest: they may wait for a thread that waits for the
        // mapping lock.
        after_fork_parent();
    }
    // SAFETY: the program's own call with its own arguments, as its caller promised.
    unsafe { call() }
}

/// _Fork(3): a fork without the handlers of pthread_atfork(3); ours are needed all the same.
///
/// # Safety
/// As fork(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn _Fork() -> c_int {
    let Some(call) = next_fork(&NEXT_FORK, c"_Fork".as_ptr()) else { return -1 };
    if !active() {
        // SAFETY: the program's own call with its own arguments, as its caller promised.
        return unsafe { call() };
    }
    if !may_fork() {
        return -1;
    }
    // SAFETY: the program's own call with its own arguments, as its caller promised.
    let pid = unsafe { call() };
    if pid == 0 {
        after_fork_child()
    } else {
        after_fork_parent()
    }
    pid
}

/// What a cloned child begins with.
struct Begin {
    function: extern "C" fn(*mut c_void) -> c_int,
    argument: *mut c_void,
}

extern "C" fn begin_clone(begin: *mut c_void) -> c_int {
    let _ = is_new_child();
    // It has a stack of its own.
    if begin_child(0) {
        start_unless_away();
    }
    // SAFETY: the parent's frame, of which the child has a copy.
    let begin = unsafe { &*begin.cast::<Begin>() };
    let status = (begin.function)(begin.argument);
    // The C library ends this thread only, and expects that to be the end of the process.
    let _away = Away::take();
    stop(3);
    status
}

/// clone(3): without `CLONE_VM` it is a fork.
///
/// # Safety
/// As clone(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clone(
    function: extern "C" fn(*mut c_void) -> c_int,
    stack: *mut c_void,
    flags: c_int,
    argument: *mut c_void,
    parent_tid: *mut c_void,
    tls: *mut c_void,
    child_tid: *mut c_void,
) -> c_int {
    let found = next(&NEXT_CLONE, c"clone".as_ptr(), 0);
    if found == 0 {
        fail(Errno(libc::ENOSYS));
        return -1;
    }
    // SAFETY: it is the C library's `clone`; arguments that the caller did not give are passed on as they came.
    let call: CloneFn = unsafe { core::mem::transmute(found) };
    if !active() || flags & libc::CLONE_VM != 0 || stack.is_null() {
        // SAFETY: the program's own call with its own arguments, as its caller promised.
        return unsafe { call(function, stack, flags, argument, parent_tid, tls, child_tid) };
    }
    let mut begin = Begin { function, argument };
    if !may_fork() {
        return -1;
    }
    // SAFETY: the program's own call; `begin` lives in this frame, which the child's copy of memory has too.
    let pid =
        unsafe { call(begin_clone, stack, flags, core::ptr::from_mut(&mut begin).cast(), parent_tid, tls, child_tid) };
    after_fork_parent();
    pid
}

/// True for the raw calls that copy the address space.
pub(super) fn is_fork(number: c_long, a: usize, b: usize) -> bool {
    #[cfg(target_arch = "x86_64")]
    if number == libc::SYS_fork {
        return true;
    }
    let flags = match number {
        libc::SYS_clone => a as u64,
        libc::SYS_clone3 => match clone_flags(a, b) {
            Some(flags) => flags,
            None => return false,
        },
        _ => return false,
    };
    flags & libc::CLONE_VM as u64 == 0
}

/// The flags in the arguments of a clone3(2), `size` bytes at `at`; nothing if the kernel will refuse them, or if there is
/// no agent that a child could miss.
fn clone_flags(at: usize, size: usize) -> Option<u64> {
    /// The shortest that the kernel takes. Flags come first.
    const SIZE_MIN: usize = 64;
    if size < SIZE_MIN || !active() || SHARED.phase.load(Ordering::Acquire) == 3 {
        return None;
    }
    let at = at as u64;
    let end = at.checked_add(SIZE_MIN as u64)?.checked_next_multiple_of(PAGE)?;
    // The program may pass anything.
    cold::read_in(Range { start: at & !(PAGE - 1), end })
        // SAFETY: the kernel could read there just now; any bytes are a number.
        .then(|| unsafe { core::ptr::read_unaligned(at as *const u64) })
}
