//! When the program drops rights, its agent drops them too: users, groups, capabilities, filters and the like belong to a
//! thread, and the C library passes them on only to threads that it knows. An attacker that takes over a program writes to
//! all its memory, and so to the stack of the agent's thread as well.
//!
//! So after each call that may drop something, the agent's thread is compared with the calling one. If the agent's thread
//! has more rights, it is replaced before the call returns, by a thread that the caller starts and that has the caller's
//! rights.

mod calls;

pub(super) use calls::look_up;

use super::c_library::me;
use super::suspend::{Away, ask_to_leave, is_in_the_way, leave_with_all};
use crate::live::{REST, start};
use crate::process::is_own_process;
use crate::runtime::thread::TASK_PATH_LEN;
use crate::state::{MAY_START, SHARED};
use core::ffi::{c_int, c_long};
use core::sync::atomic::{AtomicUsize, Ordering};
use pagefold_os::fd::Fd;
use pagefold_os::mem;

const CAP_SETGID: u64 = 1 << 6;
const CAP_SETUID: u64 = 1 << 7;

/// What of a thread's /proc/PID/task/TID/status says what it may do.
struct Power<'a> {
    /// Real, effective, saved, for files.
    users: [u64; 4],
    groups: [u64; 4],
    more_groups: &'a [u8],
    permitted: u64,
    bounding: u64,
    no_new_privs: u64,
    filters: u64,
}

impl<'a> Power<'a> {
    fn parse(text: &'a [u8]) -> Option<Power<'a>> {
        let line = |name: &[u8]| text.split(|&byte| byte == b'\n').find_map(|line| line.strip_prefix(name));
        let number = |name: &[u8], radix| digits(line(name)?.trim_ascii(), radix);
        let four = |name: &[u8]| {
            let mut words = line(name)?.trim_ascii().split(|&byte| byte == b'\t');
            let mut ids = [0; 4];
            for id in &mut ids {
                *id = digits(words.next()?, 10)?;
            }
            Some(ids)
        };
        Some(Power {
            users: four(b"Uid:")?,
            groups: four(b"Gid:")?,
            more_groups: line(b"Groups:")?,
            permitted: number(b"CapPrm:", 16)?,
            bounding: number(b"CapBnd:", 16)?,
            no_new_privs: number(b"NoNewPrivs:", 10)?,
            // Kernels without filters have no such lines.
            filters: number(b"Seccomp_filters:", 10).unwrap_or(0),
        })
    }

    /// True if a thread with this could do what one with `other` could not come to do.
    fn exceeds(&self, other: &Power<'_>) -> bool {
        let foreign = |ids: [u64; 4], known: [u64; 4]| ids.iter().any(|id| !known.contains(id));
        self.permitted & !other.permitted != 0
            || self.bounding & !other.bounding != 0
            || self.no_new_privs < other.no_new_privs
            || self.filters < other.filters
            || other.permitted & CAP_SETUID == 0 && foreign(self.users, other.users)
            || other.permitted & CAP_SETGID == 0
                && (foreign(self.groups, other.groups) || self.more_groups != other.more_groups)
    }
}

fn digits(text: &[u8], radix: u32) -> Option<u64> {
    let value = |all: u64, byte: &u8| {
        let digit = char::from(*byte).to_digit(radix)?;
        all.checked_mul(u64::from(radix))?.checked_add(u64::from(digit))
    };
    if text.is_empty() { None } else { text.iter().try_fold(0, value) }
}

/// True if our thread can do more than the calling one, or if that cannot be told.
fn agent_exceeds_us() -> bool {
    const TEXT_MAX: usize = 8 << 10;
    let mut path = [0; TASK_PATH_LEN];
    let Some(agents) = SHARED.thread.path(b"/status", &mut path) else { return true };
    // Not on the stack, which may be a small one.
    let Ok(room) = mem::Mapping::anonymous(2 * TEXT_MAX) else { return true };
    // SAFETY: the mapping is ours, writable, and that long.
    let (first, second) = unsafe { core::slice::from_raw_parts_mut(room.as_ptr(), room.len()) }.split_at_mut(TEXT_MAX);
    let mut lens = [0; 2];
    for ((path, text), len) in
        [(agents, &mut *first), (c"/proc/thread-self/status", &mut *second)].into_iter().zip(&mut lens)
    {
        let Ok(file) = Fd::open(path, libc::O_RDONLY, 0) else { return true };
        // The kernel gives a page at most at a time.
        while let Ok(got) = file.read(&mut text[*len..]) {
            if got == 0 {
                break;
            }
            *len += got;
        }
    }
    match (Power::parse(&first[..lens[0]]), Power::parse(&second[..lens[1]])) {
        // What did not find room was not compared.
        (Some(agent), Some(caller)) => lens.contains(&TEXT_MAX) || agent.exceeds(&caller),
        _ => true,
    }
}

/// After a call that may have taken something away from the calling thread.
pub(super) fn follow() {
    if !SHARED.thread.is_gone() && is_own_process() && agent_exceeds_us() {
        renew();
    }
}

/// The thread that has yet to replace the agent's threads, as [`me`] names it; 0 if none has.
static DUE: AtomicUsize = AtomicUsize::new(0);

/// Replaces our threads by new ones that have what the caller has. All is plain memory in between: the new ones may never
/// reach a daemon.
///
/// A handler that may not wait for them asks them to leave; the new ones come with the first call of its thread that may.
pub(super) fn renew() {
    if SHARED.thread.is_gone() || !is_own_process() {
        return;
    }
    if is_in_the_way() {
        DUE.store(me(), Ordering::Relaxed);
        return ask_to_leave(false);
    }
    replace();
}

/// What a handler of this thread left to be done.
pub(super) fn renew_if_due() {
    let due = DUE.load(Ordering::Relaxed);
    if due != 0 && due == me() && !is_in_the_way() && is_own_process() {
        forget_due();
        replace();
    }
}

pub(super) fn forget_due() {
    DUE.store(0, Ordering::Relaxed);
}

fn replace() {
    let _away = Away::take();
    if !MAY_START.load(Ordering::Acquire) {
        return leave_with_all(3);
    }
    leave_with_all(0);
    REST.store(true, Ordering::Release);
    start();
}

/// What a raw call may take away.
pub(super) enum Taken {
    Nothing,
    /// Something that [`follow`] sees.
    Seen,
    /// Something that no file tells.
    Unseen,
}

pub(super) fn taken_by(number: c_long) -> Taken {
    match number {
        libc::SYS_setuid
        | libc::SYS_setgid
        | libc::SYS_setreuid
        | libc::SYS_setregid
        | libc::SYS_setresuid
        | libc::SYS_setresgid
        | libc::SYS_setgroups
        | libc::SYS_setfsuid
        | libc::SYS_setfsgid
        | libc::SYS_capset
        | libc::SYS_seccomp => Taken::Seen,
        libc::SYS_landlock_restrict_self => Taken::Unseen,
        _ => Taken::Nothing,
    }
}

pub(super) fn taken_by_prctl(option: c_int) -> Taken {
    match option {
        libc::PR_SET_NO_NEW_PRIVS | libc::PR_CAPBSET_DROP | libc::PR_SET_SECCOMP => Taken::Seen,
        libc::PR_SET_SECUREBITS => Taken::Unseen,
        _ => Taken::Nothing,
    }
}

impl Taken {
    /// The call has succeeded.
    pub(super) fn follow(self) {
        match self {
            Taken::Nothing => {}
            Taken::Seen => follow(),
            Taken::Unseen => renew(),
        }
    }
}
