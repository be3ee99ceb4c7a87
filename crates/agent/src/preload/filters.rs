//! Filters that the program is about to install: the agent stays if it can live with one, else it leaves before.
//!
//! Our threads have the filter too, so a call of theirs that it forbids may end the process. What cannot be read is taken
//! for a filter that forbids all.

use super::c_library::me;
use super::suspend::{Away, is_in_the_way, leave_for_good};
use crate::cold;
use crate::live::{start, wait_begun};
use crate::process::is_own_process;
use crate::runtime::affinity;
use crate::runtime::signals::{CHILD_FILTERED, MAY_BLOCK};
use crate::state::{MAY_EXECUTE, MAY_START, SHARED};
use core::sync::atomic::Ordering;
use pagefold_os::fd::Fd;
use pagefold_os::mem;
use pagefold_protocol::seccomp_filter;

/// The program is about to install the filter at `at`, a `sock_fprog`, for `all` its threads: stays if the agent can live
/// with it, else leaves. Our thread has it too, by the kernel's hand or since it is replaced.
pub(super) fn meet_filter(at: u64, all: bool) {
    if !is_own_process() {
        return CHILD_FILTERED.store(true, Ordering::Release);
    }
    let verdict = filter_at(at).filter(|verdict| verdict.stay && (verdict.start || all));
    let Some(verdict) = verdict else { return leave_for_filter() };
    if !verdict.execute && !forbid_execution() {
        return leave_for_filter();
    }
    if !verdict.start && is_in_the_way() {
        return leave_for_good();
    }
    if !verdict.start {
        // Later it would be too late. A program with nothing to merge yet may have something later.
        let away = Away::take();
        start();
        cold::start_standby();
        drop(away);
        wait_begun();
        MAY_START.store(false, Ordering::Release);
    }
    if !verdict.follow {
        affinity::forbid(SHARED.thread.number());
    }
}

/// From now on no memory that can be executed is managed. Returns false if there is some already.
fn forbid_execution() -> bool {
    // The agent lists memory with the lock held.
    let _held = SHARED.mapping_lock.lock(me());
    MAY_EXECUTE.store(false, Ordering::Relaxed);
    !SHARED.executable.load(Ordering::Relaxed)
}

/// The agent leaves for a filter that may forbid anything; what the program's threads do for it is no more than they must.
pub(super) fn leave_for_filter() {
    if !is_own_process() {
        return CHILD_FILTERED.store(true, Ordering::Release);
    }
    leave_for_good();
    MAY_BLOCK.store(false, Ordering::Release);
}

/// What the filter of the program's at `at` says about us; nothing if it cannot be read, which the kernel will say too.
fn filter_at(at: u64) -> Option<seccomp_filter::Verdict> {
    // Through the kernel: the program may pass anything.
    let memory = Fd::open(c"/proc/thread-self/mem", libc::O_RDONLY, 0).ok()?;
    let mut head = [0u8; size_of::<libc::sock_fprog>()];
    (memory.read_at(&mut head, at) == Ok(head.len())).then_some(())?;
    // SAFETY: plain integers and a pointer that is not followed; the array is as long, and need not be aligned.
    let head: libc::sock_fprog = unsafe { core::ptr::read_unaligned(head.as_ptr().cast()) };
    let count = usize::from(head.len);
    if count == 0 || count > seccomp_filter::INSTRUCTIONS_MAX {
        return None;
    }
    let room = mem::Mapping::anonymous(count * size_of::<libc::sock_filter>()).ok()?;
    // SAFETY: the mapping is ours, writable, and at least that long.
    let bytes = unsafe { core::slice::from_raw_parts_mut(room.as_ptr(), count * size_of::<libc::sock_filter>()) };
    (memory.read_at(bytes, head.filter as u64) == Ok(bytes.len())).then_some(())?;
    // SAFETY: page aligned, `count` instructions long, and any bytes are instructions of integers.
    let program = unsafe { core::slice::from_raw_parts(room.as_ptr() as *const libc::sock_filter, count) };
    Some(seccomp_filter::judge(program))
}
