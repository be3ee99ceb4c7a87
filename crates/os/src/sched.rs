//! Scheduling of the calling thread.

use crate::raw::Result;
use crate::syscall;

/// Runs the calling thread only when nobody else wants the processor.
///
/// # Errors
/// As sched_setscheduler(2).
pub fn donate_idle_time() -> Result<()> {
    let param = libc::sched_param { sched_priority: 0 };
    // SAFETY: the structure outlives the call.
    unsafe { syscall!(libc::SYS_sched_setscheduler, 0, libc::SCHED_IDLE, core::ptr::from_ref(&param)) }.map(drop)
}

/// Nanoseconds of the monotonic clock.
pub fn monotonic_ns() -> u64 {
    clock_ns(libc::CLOCK_MONOTONIC)
}

/// Nanoseconds of processor time that the calling thread used.
pub fn thread_cpu_ns() -> u64 {
    clock_ns(libc::CLOCK_THREAD_CPUTIME_ID)
}

fn clock_ns(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel fills the structure; the two clocks always exist.
    let _ = unsafe { syscall!(libc::SYS_clock_gettime, clock, core::ptr::from_mut(&mut time)) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
