//! syscall(2) and prctl(2): calls by number, each led to the room that follows it.

use super::active::active;
use super::advice::madvise;
use super::c_library::fail;
use super::early::is_early;
use super::filters::{leave_for_filter, meet_filter};
use super::fork::{after_fork_child, after_fork_parent, is_fork, may_fork};
use super::mapping::{mmap, mprotect, mremap, munmap};
use super::suspend::{leave_for_good, wanted};
use super::userfaultfd::kernels_ioctl;
use super::without_agent::{setns, unshare};
use super::{credentials, keys, locks, seals};
use crate::state::SHARED;
use core::ffi::{c_int, c_long, c_ulong, c_void};
use core::sync::atomic::Ordering;
use pagefold_os::syscall;

/// prctl(2): `PR_SET_MEMORY_MERGE` manages all memory; a seccomp filter that forbids what the agent does makes it leave
/// first, and so does a process that shall not be dumped.
///
/// # Safety
/// As prctl(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn prctl(option: c_int, a: usize, b: usize, c: usize, d: usize) -> c_int {
    const PR_SET_MEMORY_MERGE: c_int = 67;
    if active() {
        match option {
            PR_SET_MEMORY_MERGE if b == 0 && c == 0 && d == 0 && a <= 1 => {
                SHARED.all.store(a == 1, Ordering::Relaxed);
                if a == 1 {
                    wanted();
                } else {
                    SHARED.changed();
                }
            }
            // Neither a later agent nor the program's own threads could open what they need of /proc.
            libc::PR_SET_DUMPABLE if a == 0 => leave_for_good(),
            libc::PR_SET_SECCOMP if a == libc::SECCOMP_MODE_STRICT as usize => leave_for_filter(),
            libc::PR_SET_SECCOMP if b != 0 => meet_filter(b as u64, false),
            _ => {}
        }
    }
    // SAFETY: the program's own call with its own arguments, as its caller promised.
    match unsafe { syscall!(libc::SYS_prctl, option, a, b, c, d) } {
        Ok(value) => {
            if active() {
                credentials::taken_by_prctl(option).follow();
            }
            value as c_int
        }
        Err(errno) => {
            fail(errno);
            -1
        }
    }
}

/// syscall(2): the raw ways into what is followed above.
///
/// # Safety
/// As syscall(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syscall(number: c_long, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long {
    let is_active = active();
    if is_active || is_early() {
        match number {
            // SAFETY: the same call by its C name, with the program's own arguments.
            libc::SYS_munmap => return c_long::from(unsafe { munmap(a as *mut _, b) }),
            libc::SYS_mmap => {
                // SAFETY: the same call by its C name, with the program's own arguments.
                return unsafe { mmap(a as *mut _, b, c as c_int, d as c_int, e as c_int, f as i64) } as c_long;
            }
            // SAFETY: the same call by its C name, with the program's own arguments.
            libc::SYS_mremap => return unsafe { mremap(a as *mut _, b, c, d as c_int, e as *mut _) } as c_long,
            _ => {}
        }
    }
    if is_active {
        match number {
            // Libraries probe for it with no filter, or with flags that strict mode does not take: nothing is installed
            // then.
            libc::SYS_seccomp if a == libc::SECCOMP_SET_MODE_STRICT as usize && b == 0 => leave_for_filter(),
            libc::SYS_seccomp if a == libc::SECCOMP_SET_MODE_FILTER as usize && c != 0 => {
                meet_filter(c as u64, b & libc::SECCOMP_FILTER_FLAG_TSYNC as usize != 0);
            }
            // SAFETY: the same call by its C name.
            libc::SYS_madvise => return c_long::from(unsafe { madvise(a as *mut _, b, c as c_int) }),
            // SAFETY: the same call by its C name, with the program's own arguments.
            libc::SYS_mprotect => return c_long::from(unsafe { mprotect(a as *mut _, b, c as c_int) }),
            libc::SYS_pkey_mprotect => {
                // SAFETY: the same call by its C name, with the program's own arguments.
                return c_long::from(unsafe { keys::pkey_mprotect(a as *mut _, b, c as c_int, d as c_int) });
            }
            // SAFETY: the same call by its C name, with the program's own arguments.
            libc::SYS_prctl => return c_long::from(unsafe { prctl(a as c_int, b, c, d, e) }),
            libc::SYS_ioctl => {
                // SAFETY: the same call by its C name, with the program's own arguments.
                return c_long::from(unsafe { kernels_ioctl(a as c_int, b as c_ulong, c as *mut c_void) });
            }
            // SAFETY: the same call by its C name, with the program's own arguments.
            libc::SYS_mlock => return c_long::from(unsafe { locks::mlock(a as *mut _, b) }),
            // SAFETY: the same call by its C name, with the program's own arguments.
            libc::SYS_mlock2 => return c_long::from(unsafe { locks::mlock2(a as *mut _, b, c as core::ffi::c_uint) }),
            // SAFETY: the same call by its C name, with the program's own arguments.
            libc::SYS_munlock => return c_long::from(unsafe { locks::munlock(a as *mut _, b) }),
            // SAFETY: the same call by its C name, with the program's own arguments.
            libc::SYS_mlockall => return c_long::from(unsafe { locks::mlockall(a as c_int) }),
            // SAFETY: the same call by its C name, with the program's own arguments.
            libc::SYS_munlockall => return c_long::from(unsafe { locks::munlockall() }),
            // SAFETY: the same call by its C name, with the program's own arguments.
            libc::SYS_mseal => return c_long::from(unsafe { seals::mseal(a as *mut _, b, c as c_ulong) }),
            // SAFETY: the same call by its C name, with the program's own arguments.
            libc::SYS_unshare => return c_long::from(unsafe { unshare(a as c_int) }),
            // SAFETY: the same call by its C name, with the program's own arguments.
            libc::SYS_setns => return c_long::from(unsafe { setns(a as c_int, b as c_int) }),
            _ => {}
        }
    }
    let forks = is_fork(number, a, b);
    if forks && active() && !may_fork() {
        return -1;
    }
    // SAFETY: the program's own call with its own arguments, as its caller promised.
    let result = unsafe { syscall!(number, a, b, c, d, e, f) };
    if forks && active() {
        if result == Ok(0) { after_fork_child() } else { after_fork_parent() }
    }
    if active() && result.is_ok() {
        credentials::taken_by(number).follow();
    }
    match result {
        Ok(value) => value as c_long,
        Err(errno) => {
            fail(errno);
            -1
        }
    }
}
