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

/// A set of processors, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cpus([u64; Cpus::WORDS]);

impl Cpus {
    const WORDS: usize = 128;

    /// The set that holds none.
    pub const NONE: Cpus = Cpus([0; Cpus::WORDS]);

    /// The set that holds only `cpu`; `None` if there can be no such processor.
    pub fn one(cpu: u64) -> Option<Cpus> {
        let mut cpus = Cpus::NONE;
        *cpus.0.get_mut((cpu / 64) as usize)? = 1 << (cpu % 64);
        Some(cpus)
    }

    /// True if `cpu` is in the set.
    pub fn contains(&self, cpu: u64) -> bool {
        self.0.get((cpu / 64) as usize).is_some_and(|word| word >> (cpu % 64) & 1 != 0)
    }

    /// Where the calling thread may run.
    ///
    /// # Errors
    /// As sched_getaffinity(2).
    pub fn of_thread() -> Result<Cpus> {
        let mut cpus = Cpus::NONE;
        // SAFETY: the kernel writes at most the given length.
        unsafe { syscall!(libc::SYS_sched_getaffinity, 0, size_of::<Cpus>(), cpus.0.as_mut_ptr()) }?;
        Ok(cpus)
    }

    /// Has the calling thread run in this set only.
    ///
    /// # Errors
    /// As sched_setaffinity(2).
    pub fn bind_thread(&self) -> Result<()> {
        // SAFETY: the kernel reads the given length.
        unsafe { syscall!(libc::SYS_sched_setaffinity, 0, size_of::<Cpus>(), self.0.as_ptr()) }.map(drop)
    }
}

/// The processor that the calling thread runs on now.
pub fn cpu() -> Option<u64> {
    let mut cpu = 0u32;
    let null = core::ptr::null_mut::<u8>();
    // SAFETY: the kernel writes the number; it asks for nothing else.
    unsafe { syscall!(libc::SYS_getcpu, core::ptr::from_mut(&mut cpu), null, null) }.ok()?;
    Some(u64::from(cpu))
}

/// Nanoseconds of the monotonic clock.
pub fn monotonic_ns() -> u64 {
    clock_ns(libc::CLOCK_MONOTONIC)
}

/// [`monotonic_ns`] without entering the kernel, for who looks often and has the C library to ask.
#[cfg(feature = "std")]
pub fn quick_monotonic_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the structure is filled; the clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
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
