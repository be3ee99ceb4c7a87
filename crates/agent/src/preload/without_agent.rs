//! Calls that fail while the agent's thread is there: they are made again without it.
//!
//! Merged memory that the call is about is private meanwhile, and evicted pages return, if a limit of memory has room for
//! them. None of that is done for a holder of the mapping lock: the agent may wait for it.

use super::active::active;
use super::c_library::{me, returned};
use super::pins;
use super::suspend::{Away, leave_with_all};
use super::unmerge::gather_everything;
use crate::cold;
use crate::limits::NOTHING;
use crate::live::{start, stop_giving_back};
use crate::process::is_own_process;
use crate::runtime::thread::TASK_PATH_LEN;
use crate::state::{FAULT_IN_THREAD, LOAN_THREAD, MAY_START, SHARED, is_lent};
use core::ffi::{CStr, c_int};
use core::sync::atomic::Ordering;
use pagefold_os::fd::Fd;
use pagefold_os::raw::{Errno, Result};
use pagefold_os::{Range, syscall};

/// How often a call that our thread stood in the way of is tried again, a millisecond apart, once that is gone.
const ALONE_TRIES: u32 = 20;

/// The same while the thread is still listed, which has ended and waits for a processor, or where the daemon has yet to
/// close its copies of a userfaultfd.
const BUSY_TRIES: u32 = 2000;

/// Makes `call` with the agent's thread gone, which may have been why it fails with `errno`, and what `range` shows from the
/// pool plain memory. Nothing is done (`ENOMEM`) where a limit of memory has no room for all that is out.
pub(super) fn without_thread(errno: i32, range: Range, call: impl Fn() -> Result<usize>) -> Result<usize> {
    // Waiting for the agent, which may wait for the mapping lock, would be for ever.
    if !active() || !is_own_process() || SHARED.mapping_lock.is_held_by(me()) {
        return call();
    }
    let away = Away::take();
    if away.is_nested() {
        return call();
    }
    if !range.is_empty() && SHARED.phase.load(Ordering::Acquire) == 0 {
        // Only the agent can unshare merged memory.
        start();
    }
    let mut ran = SHARED.phase.load(Ordering::Acquire) == 1;
    if ran && !MAY_START.load(Ordering::Acquire) {
        // It could not come back.
        leave_with_all(3);
        ran = false;
    }
    // The daemon has copies of what a cold client registers its memory with.
    let is_shared = errno == libc::EBUSY && (cold::COLD.load(Ordering::Relaxed) || is_lent());
    let mut buffers = [[0; TASK_PATH_LEN]; 3];
    let [first, second, third] = &mut buffers;
    let [one, other] = [&LOAN_THREAD, &FAULT_IN_THREAD];
    let paths = [SHARED.thread.path(b"", first), one.path(b"", second), other.path(b"", third)];
    if ran {
        let held = SHARED.mapping_lock.lock(me());
        cold::before_leaving()?;
        drop(held);
        // Where the call needs plain memory it is refused only for what is held for good: a device that has a page for a
        // moment may be reading anywhere.
        let held = !range.is_empty() && if errno == 0 { pins::may_be_there() } else { pins::are_registered() };
        stop_giving_back(if held { NOTHING } else { range }, 0);
    }
    let mut result = call();
    // The kernel tells us that a thread has ended before it no longer counts, on a busy machine long before.
    let (mut tries, mut busy_tries) = (ALONE_TRIES, BUSY_TRIES);
    while ran && result == Err(Errno(errno)) && tries > 0 {
        if busy_tries > 0 && (is_shared || paths.into_iter().flatten().any(is_there)) {
            busy_tries -= 1;
        } else {
            tries -= 1;
        }
        let _ = pagefold_os::fd::poll(&mut [], 1);
        result = call();
    }
    if ran {
        start();
    }
    result
}

fn is_there(path: &CStr) -> bool {
    Fd::open(path, libc::O_PATH, 0).is_ok()
}

/// Makes `call`, again with the agent's thread gone if it fails as calls do that want a process of one thread.
fn alone(call: impl Fn() -> Result<usize>) -> c_int {
    let result = match call() {
        Err(Errno(libc::EINVAL)) if active() => {
            let result = without_thread(libc::EINVAL, NOTHING, call);
            if result.is_ok() && is_own_process() && SHARED.phase.load(Ordering::Acquire) == 0 {
                // No thread can be made here any more, as before the first child of a new namespace of processes. The caller
                // is the only thread, so no other one is writing.
                gather_everything();
            }
            result
        }
        result => result,
    };
    returned(result.map(drop))
}

/// unshare(2).
///
/// # Safety
/// As unshare(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unshare(flags: c_int) -> c_int {
    // SAFETY: the program's own call with its own arguments, as its caller promised.
    alone(|| unsafe { syscall!(libc::SYS_unshare, flags) })
}

/// setns(2).
///
/// # Safety
/// As setns(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn setns(fd: c_int, kind: c_int) -> c_int {
    // SAFETY: the program's own call with its own arguments, as its caller promised.
    alone(|| unsafe { syscall!(libc::SYS_setns, fd, kind) })
}
