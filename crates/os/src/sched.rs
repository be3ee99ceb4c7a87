//! Scheduling of the calling thread.

use crate::raw::Result;
use crate::syscall;

/// Runs the calling thread only when no other thread wants the processor.
///
/// # Errors
/// As sched_setscheduler(2).
pub fn donate_idle_time() -> Result<()> {
    let param = libc::sched_param { sched_priority: 0 };
    // SAFETY: the structure outlives the call.
    unsafe { syscall!(libc::SYS_sched_setscheduler, 0, libc::SCHED_IDLE, core::ptr::from_ref(&param)) }.map(drop)
}

/// The calling thread competes for processors as threads usually do, whatever it inherited.
///
/// # Errors
/// As sched_setscheduler(2): `EPERM` if its nice value is below what this user may have.
pub fn take_ordinary_time() -> Result<()> {
    let param = libc::sched_param { sched_priority: 0 };
    // SAFETY: the structure outlives the call.
    unsafe { syscall!(libc::SYS_sched_setscheduler, 0, libc::SCHED_OTHER, core::ptr::from_ref(&param)) }.map(drop)
}

/// How a thread competes for processors.
#[derive(Clone, Copy)]
pub struct Turn(libc::sched_attr);

impl Turn {
    const SIZE: u32 = size_of::<libc::sched_attr>() as u32;
    /// Threads that it starts compete as threads usually do.
    const NOT_INHERITED: u64 = 1;

    const ORDINARY: Turn = Turn(libc::sched_attr {
        size: Turn::SIZE,
        sched_policy: libc::SCHED_OTHER as u32,
        sched_flags: 0,
        sched_nice: 0,
        sched_priority: 0,
        sched_runtime: 0,
        sched_deadline: 0,
        sched_period: 0,
    });

    /// Before all threads that compete as usual, and in turns with others like it: for moments only.
    const FIRST: Turn = Turn(libc::sched_attr {
        sched_policy: libc::SCHED_RR as u32,
        sched_flags: Turn::NOT_INHERITED,
        sched_priority: 1,
        ..Turn::ORDINARY.0
    });

    fn of(thread: i32) -> Result<Turn> {
        let mut turn = Turn::ORDINARY;
        // SAFETY: the kernel writes as much as the structure has.
        unsafe { syscall!(libc::SYS_sched_getattr, thread, core::ptr::from_mut(&mut turn.0), Turn::SIZE, 0) }?;
        // What the kernel shows of an ordinary thread is its usual slice, and would be taken for a wish.
        turn.0.sched_runtime = 0;
        let is_first = turn.0.sched_policy == libc::SCHED_RR as u32 && turn.0.sched_flags & Turn::NOT_INHERITED != 0;
        // It is left from a process that was killed before it could give it back.
        Ok(if is_first { Turn::ORDINARY } else { turn })
    }

    /// Has `thread` (0: the caller) compete so again.
    ///
    /// # Errors
    /// As sched_setattr(2).
    pub fn give_back(&self, thread: i32) -> Result<()> {
        // SAFETY: the structure outlives the call.
        unsafe { syscall!(libc::SYS_sched_setattr, thread, core::ptr::from_ref(&self.0), 0) }.map(drop)
    }
}

/// Has `thread` (0: the caller) run before all threads that compete as usual, also of groups with little weight or a
/// quota; returns how it competed before.
///
/// # Errors
/// As sched_setattr(2): `EPERM` without `CAP_SYS_NICE`.
pub fn take_first_turn(thread: i32) -> Result<Turn> {
    let before = Turn::of(thread)?;
    Turn::FIRST.give_back(thread)?;
    Ok(before)
}

/// A set of processors, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cpus([u64; Cpus::WORDS]);

impl Cpus {
    /// Words of 64 processors each that a set takes.
    pub const WORDS: usize = 128;

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

    /// The set as a mask, the lowest processors first.
    pub const fn words(&self) -> &[u64; Cpus::WORDS] {
        &self.0
    }

    /// The set of such a mask.
    pub const fn of_words(words: [u64; Cpus::WORDS]) -> Cpus {
        Cpus(words)
    }

    /// The processors of the set, in order.
    pub fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        let bits = |(at, word): (usize, &u64)| {
            let (at, word) = (at as u64, *word);
            (0..64).filter(move |bit| word >> bit & 1 != 0).map(move |bit| at * 64 + bit)
        };
        // Nearly all words of nearly all sets are empty.
        self.0.iter().enumerate().filter(|(_, word)| **word != 0).flat_map(bits)
    }

    /// What the `index`-th of `shares` gets when the set is dealt out: every `shares`-th processor, from there on.
    pub fn share(&self, index: usize, shares: usize) -> Cpus {
        let mut share = Cpus::NONE;
        for cpu in self.iter().skip(index).step_by(shares.max(1)) {
            share.0[(cpu / 64) as usize] |= 1 << (cpu % 64);
        }
        share
    }

    /// The set without `cpu`.
    #[must_use]
    pub fn without(mut self, cpu: u64) -> Cpus {
        if let Some(word) = self.0.get_mut((cpu / 64) as usize) {
            *word &= !(1 << (cpu % 64));
        }
        self
    }

    /// Where the calling thread may run.
    ///
    /// # Errors
    /// As sched_getaffinity(2).
    pub fn of_thread() -> Result<Cpus> {
        Cpus::of(0)
    }

    /// Where a thread may run, by the number that [`thread`] tells.
    ///
    /// # Errors
    /// As sched_getaffinity(2).
    pub fn of(thread: i32) -> Result<Cpus> {
        let mut cpus = Cpus::NONE;
        // SAFETY: the kernel writes at most the given length.
        unsafe { syscall!(libc::SYS_sched_getaffinity, thread, size_of::<Cpus>(), cpus.0.as_mut_ptr()) }?;
        Ok(cpus)
    }

    /// Has the calling thread run in this set only.
    ///
    /// # Errors
    /// As sched_setaffinity(2).
    pub fn bind_thread(&self) -> Result<()> {
        self.bind(0)
    }

    /// Has a thread, by the number that [`thread`] tells, run in this set only.
    ///
    /// # Errors
    /// As sched_setaffinity(2).
    pub fn bind(&self, thread: i32) -> Result<()> {
        // SAFETY: the kernel reads the given length.
        unsafe { syscall!(libc::SYS_sched_setaffinity, thread, size_of::<Cpus>(), self.0.as_ptr()) }.map(drop)
    }

    /// Has a thread run in this set, but not on `cpu`, if there is another. Only a matter of time, so that failing is none.
    pub fn bind_off(&self, cpu: u64, thread: i32) {
        let elsewhere = self.without(cpu);
        if elsewhere != Cpus::NONE {
            let _ = elsewhere.bind(thread);
        }
    }
}

/// The kernel's number of the calling thread.
pub fn thread() -> i32 {
    // SAFETY: takes nothing, and always succeeds.
    unsafe { syscall!(libc::SYS_gettid) }.unwrap_or(0) as i32
}

/// The processor that the calling thread runs on now.
pub fn cpu() -> Option<u64> {
    let mut cpu = 0u32;
    let null = core::ptr::null_mut::<u8>();
    // SAFETY: the kernel writes the number; it asks for nothing else.
    unsafe { syscall!(libc::SYS_getcpu, core::ptr::from_mut(&mut cpu), null, null) }.ok()?;
    Some(u64::from(cpu))
}

/// Keeps the calling thread off `cpu`. For a thread that works beside another one on `cpu`: the kernel might make it wait
/// for that one.
pub fn keep_off(cpu: Option<u64>) {
    if let (Some(cpu), Ok(cpus)) = (cpu, Cpus::of_thread()) {
        cpus.bind_off(cpu, 0);
    }
}

/// Nanoseconds of the monotonic clock.
pub fn monotonic_ns() -> u64 {
    clock_ns(libc::CLOCK_MONOTONIC)
}

/// [`monotonic_ns`] without entering the kernel, for callers that ask often and may use the C library.
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

/// Page faults of all threads of this process, but for the calling one's. 0 if the kernel does not tell.
pub fn faults_of_others() -> u64 {
    let faults = |who: libc::c_int| {
        // SAFETY: all zeros is such a structure.
        let mut usage: libc::rusage = unsafe { core::mem::zeroed() };
        // SAFETY: the kernel fills the structure, which outlives the call.
        let _ = unsafe { syscall!(libc::SYS_getrusage, who, core::ptr::from_mut(&mut usage)) };
        (usage.ru_minflt + usage.ru_majflt) as u64
    };
    // Ours first: a fault of ours in between must not seem to be another thread's.
    let own = faults(libc::RUSAGE_THREAD);
    faults(libc::RUSAGE_SELF).saturating_sub(own)
}

fn clock_ns(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel fills the structure; the two clocks always exist.
    let _ = unsafe { syscall!(libc::SYS_clock_gettime, clock, core::ptr::from_mut(&mut time)) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_of_other_threads_are_counted() {
        let page_faults = |pages: usize| {
            let memory = crate::mem::Mapping::anonymous(pages * crate::PAGE_SIZE).unwrap();
            for page in 0..pages {
                // SAFETY: within the mapping, which is ours.
                unsafe { ((memory.addr() as usize + page * crate::PAGE_SIZE) as *mut u8).write_volatile(1) };
            }
        };
        let before = faults_of_others();
        std::thread::spawn(move || page_faults(1000)).join().unwrap();
        assert!(faults_of_others() - before >= 1000);
    }

    #[test]
    fn who_keeps_off_a_processor_runs_on_another() {
        let (allowed, here, now) = std::thread::spawn(|| {
            let (allowed, here) = (Cpus::of_thread().expect("a set"), cpu().expect("a processor"));
            keep_off(Some(here));
            (allowed, here, Cpus::of_thread().expect("a set"))
        })
        .join()
        .expect("no panic");
        let elsewhere = allowed.without(here);
        assert_eq!(now, if elsewhere == Cpus::NONE { allowed } else { elsewhere });
    }

    #[test]
    fn shares_are_disjoint_and_all_there_is() {
        let mut cpus = Cpus::NONE;
        cpus.0[0] = 0b1011_0100;
        cpus.0[2] = 1 << 63 | 1;
        let all: Vec<u64> = cpus.iter().collect();
        assert_eq!(all, [2, 4, 5, 7, 128, 191]);
        for shares in 1..8 {
            let mut dealt: Vec<u64> =
                (0..shares).flat_map(|index| cpus.share(index, shares).iter().collect::<Vec<_>>()).collect();
            dealt.sort_unstable();
            assert_eq!(dealt, all, "{shares}");
        }
        assert_eq!(cpus.share(1, 4).iter().collect::<Vec<_>>(), [4, 191]);
        assert_eq!(cpus.share(6, 7), Cpus::NONE);
        assert_eq!(cpus.without(128).without(3).without(1 << 40).iter().collect::<Vec<_>>(), [2, 4, 5, 7, 191]);
    }
}
