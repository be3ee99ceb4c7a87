//! One thread of a program executes a few instructions of ours, and goes on with what it did.

use crate::error::{EntryError, step};
use crate::image::AgentImage;
use crate::instructions::{self, Words};
use crate::layout::Layout;
use crate::look::{FILTERS_CURE, has_filter, has_own_filter, judge_filters, open_memory};
use crate::memory;
use crate::registers::{at_instructions, is_64_bit, is_in_restartable_sequence, words};
use crate::stop::{call_of, status_of};
use crate::trace::{Report, Tracer};
use pagefold_os::procfs;
use pagefold_os::procfs::OwnedMap;
use pagefold_protocol::seccomp_filter::Leeway;
use std::time::{Duration, Instant};
use std::{fs, thread};

/// How long one thread may take to stand still before another is tried.
const STOP_PATIENCE: Duration = Duration::from_millis(20);

/// How long threads may take that have not stood still by then: on a busy machine each waits for a processor.
const LATE_PATIENCE: Duration = Duration::from_secs(2);

/// How often the threads of the program are tried.
const TRIES: usize = 20;

/// What is entered, with what, and where.
pub(crate) struct Plan<'a> {
    pub(crate) pid: i32,
    pub(crate) what: Purpose<'a>,
    /// The program's mappings before the entry.
    pub(crate) maps: &'a [OwnedMap],
}

/// What a thread is borrowed for.
pub(crate) enum Purpose<'a> {
    /// It starts the agent, which makes its userfaultfd by a system call or not.
    Agent(&'a AgentImage, Layout, bool),
    /// It has KSM merge the program's memory, or not any more.
    Ksm(bool),
}

impl Purpose<'_> {
    /// What the instructions need for it, beside the registers.
    fn words(&self) -> Words {
        match self {
            Purpose::Ksm(merges) => Words { base: u64::from(*merges), ..Words::default() },
            Purpose::Agent(agent, layout, _) => Words {
                base: layout.0.start,
                len: layout.0.len(),
                data: layout.0.start + agent.code_len,
                data_len: layout.0.len() - agent.code_len,
                stack: layout.0.end,
                page: layout.page(),
                begin: layout.0.start + agent.begin,
                sleep_ns: 1_000_000,
                ..Words::default()
            },
        }
    }
}

/// A thread that has been sent to the instructions.
pub(crate) struct Borrowed {
    pub(crate) code: u64,
    pub(crate) still: Duration,
    /// What its filters leave the agent.
    pub(crate) leeway: Leeway,
}

/// Borrows a thread on a thread of its own: when that ends the kernel lets go of whatever is still traced.
pub(crate) fn borrow_aside(plan: &Plan<'_>) -> Result<Borrowed, EntryError> {
    thread::scope(|scope| {
        scope.spawn(|| borrow_thread(plan)).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Stops one thread, has it execute the instructions, and lets it go on.
fn borrow_thread(plan: &Plan<'_>) -> Result<Borrowed, EntryError> {
    let pid = plan.pid;
    let tracer = Tracer::default();
    let mut why = String::from("it has none");
    // Threads that were asked to stand still and have not yet: they are traced until they do, or until this thread ends.
    let mut late = Vec::new();
    let (began, mut tries) = (Instant::now(), 0);
    while tries < TRIES || (!late.is_empty() && began.elapsed() < LATE_PATIENCE) {
        tries += 1;
        for thread in threads_by_calm(pid) {
            let was_late = late.contains(&thread);
            late.retain(|one| *one != thread);
            let (asked, patience) = match was_late {
                true => (Ok(()), Duration::ZERO),
                false => (ask_to_stand_still(&tracer, thread, pid), STOP_PATIENCE),
            };
            match asked.and_then(|()| try_thread(&tracer, thread, patience, plan)) {
                Ok(borrowed) => return Ok(borrowed),
                Err(Unfit::Passing(reason)) => why = reason.into(),
                Err(Unfit::Late) => {
                    late.push(thread);
                    why = "its threads do not stand still".into();
                }
                Err(Unfit::Lasting(error)) => return Err(error),
            }
        }
        thread::sleep(Duration::from_millis(1));
    }
    if fs::exists(format!("/proc/{pid}/task/{pid}")).unwrap_or(false) {
        Err(EntryError::Busy(why))
    } else {
        Err(EntryError::Gone)
    }
}

/// Why a thread is not borrowed.
enum Unfit {
    /// At another moment it, or another thread, may do.
    Passing(&'static str),
    /// It has not stood still in time.
    Late,
    /// No thread will.
    Lasting(EntryError),
}

/// The threads of a process: first those that run, then those that sleep in calls which go on after a stop as if nothing had
/// been.
fn threads_by_calm(pid: i32) -> Vec<i32> {
    let mut threads = procfs::threads(pid).unwrap_or_default();
    threads.sort_by_cached_key(|thread| unrest(pid, *thread));
    threads
}

/// How much a stop would disturb `thread`.
fn unrest(pid: i32, thread: i32) -> u8 {
    const RESTART: [libc::c_long; 7] = [
        libc::SYS_futex,
        libc::SYS_ppoll,
        libc::SYS_read,
        libc::SYS_wait4,
        libc::SYS_nanosleep,
        libc::SYS_clock_nanosleep,
        libc::SYS_accept4,
    ];
    match call_of(pid, thread).as_str() {
        "running" => 0,
        #[cfg(target_arch = "x86_64")]
        number if number.parse() == Ok(libc::SYS_poll) => 1,
        number if number.parse().is_ok_and(|number| RESTART.contains(&number)) => 1,
        _ => 2,
    }
}

/// True if a thread of this process traces `thread`.
fn is_traced_by_us(pid: i32, thread: i32) -> bool {
    let status = status_of(pid, thread);
    let tracer = procfs::field(&status, "TracerPid").unwrap_or(0);
    tracer != 0 && fs::exists(format!("/proc/self/task/{tracer}")).unwrap_or(false)
}

fn ask_to_stand_still(tracer: &Tracer, thread: i32, pid: i32) -> Result<(), Unfit> {
    tracer.seize(thread).and_then(|()| tracer.interrupt(thread)).map_err(|error| match error.raw_os_error() {
        // A thread of ours that ends has not let go of it yet.
        Some(libc::EPERM) if is_traced_by_us(pid, thread) => Unfit::Passing("it is stopped at this moment"),
        Some(libc::EPERM) if !Tracer::is_allowed() => Unfit::Lasting(EntryError::Refused(
            "this daemon's own seccomp filter forbids ptrace(2): its unit must allow that, as root's pagefold.service does"
                .into(),
        )),
        Some(libc::EPERM) => Unfit::Lasting(EntryError::Refused(
            "this user may not trace it, or another process does (see ptrace(2), pagefold doctor)".into(),
        )),
        _ => Unfit::Passing("a thread ended"),
    })
}

/// Borrows `thread`, which was asked to stand still, if it does within `patience`.
fn try_thread(tracer: &Tracer, thread: i32, patience: Duration, plan: &Plan<'_>) -> Result<Borrowed, Unfit> {
    let began = Instant::now();
    loop {
        match tracer.poll(thread) {
            Ok(Some((_, Report::Stopped { signal: 0, group: false }))) => break,
            Ok(Some((_, Report::Stopped { signal, group }))) => {
                let _ = tracer.detach(thread, signal);
                return Err(Unfit::Passing(if group { "it is stopped" } else { "signals come all the time" }));
            }
            Ok(Some((_, Report::Ended))) | Err(_) => return Err(Unfit::Passing("a thread ended")),
            // Still traced; that ends with this thread.
            Ok(None) if began.elapsed() >= patience => return Err(Unfit::Late),
            Ok(None) => thread::yield_now(),
        }
    }
    let has_filter = has_filter(plan.pid, thread);
    let leeway = match plan.what {
        Purpose::Agent(_, _, makes_userfaultfd) if has_filter => judge_filters(tracer, thread, makes_userfaultfd),
        _ => Ok(Leeway::ALL),
    };
    let leeway = leeway.map_err(|error| {
        let _ = tracer.detach(thread, 0);
        Unfit::Lasting(error)
    })?;
    let is_filtered = matches!(plan.what, Purpose::Ksm(_)) && has_filter;
    if is_filtered && tracer.suspend_filters(thread).is_err() {
        let _ = tracer.detach(thread, 0);
        let why = if has_own_filter() {
            format!("this daemon may not suspend it, for it has one itself: {FILTERS_CURE}")
        } else {
            "only a daemon with CAP_SYS_ADMIN may suspend it: attach by root's daemon".into()
        };
        return Err(Unfit::Lasting(EntryError::Refused(format!(
            "a seccomp filter restricts its system calls, and {why}"
        ))));
    }
    let sent = send_to_instructions(tracer, thread, plan, leeway);
    let signal = if is_filtered && sent.is_ok() { run_unfiltered(tracer, thread) } else { 0 };
    let detached = tracer.detach(thread, signal);
    let code = sent?;
    match detached {
        Ok(()) => Ok(Borrowed { code, still: began.elapsed(), leeway }),
        // Killed while it stood still.
        Err(_) => Err(Unfit::Lasting(EntryError::Gone)),
    }
}

/// Lets `thread` make the calls of [`instructions`] without its filters, which are in force again before it goes back to
/// code of the program's. Returns a signal that it is still to handle.
fn run_unfiltered(tracer: &Tracer, thread: i32) -> i32 {
    /// It blocks signals, makes its call, and restores the signals: each begins and ends.
    const STOPS: u32 = 6;
    let (mut stops, mut signal) = (0, 0);
    while stops < STOPS && tracer.run_to_call(thread).is_ok() {
        let report = loop {
            match tracer.poll(thread) {
                Ok(None) => thread::yield_now(),
                Ok(Some((_, report))) => break report,
                Err(_) => return 0,
            }
        };
        match report {
            Report::Stopped { signal: Tracer::IN_CALL, .. } => stops += 1,
            Report::Stopped { signal: 0, .. } => {}
            Report::Stopped { signal: came, .. } => signal = came,
            Report::Ended => return 0,
        }
    }
    let _ = tracer.resume_filters(thread);
    signal
}

/// Writes the instructions and sets the registers of `thread`, which stands still; nothing is changed on errors.
fn send_to_instructions(tracer: &Tracer, thread: i32, plan: &Plan<'_>, leeway: Leeway) -> Result<u64, Unfit> {
    let pid = plan.pid;
    let ended = |_| Unfit::Passing("a thread ended");
    // The number may be another process's by now.
    if !fs::exists(format!("/proc/{pid}/task/{thread}")).unwrap_or(false) {
        return Err(Unfit::Lasting(EntryError::Gone));
    }
    let registers = tracer.registers(thread).map_err(|error| match error.raw_os_error() {
        Some(libc::ENOEXEC) => Unfit::Lasting(EntryError::Refused("it is a 32-bit program".into())),
        _ => Unfit::Passing("a thread ended"),
    })?;
    if !is_64_bit(&registers) {
        return Err(Unfit::Lasting(EntryError::Refused("it is a 32-bit program".into())));
    }
    if has_pending_signal(pid, thread) {
        return Err(Unfit::Passing("signals come all the time"));
    }
    // Opened now: the program may have become another one since its mappings were read.
    let memory = open_memory(pid).map_err(Unfit::Lasting)?;
    if is_in_restartable_sequence(thread, &memory, &registers) {
        return Err(Unfit::Passing("its threads are in restartable sequences all the time"));
    }
    let at = memory::unused_code(&memory, plan.maps, instructions::len()).ok_or_else(|| {
        let len = instructions::len();
        let reason =
            format!("neither the kernel's code in it nor a file's ends in {len} bytes of zeros, which an entry takes");
        Unfit::Lasting(EntryError::Refused(reason))
    })?;
    let ways = [(leeway.code_in_place, instructions::CODE_IN_PLACE), (leeway.code_of_file, instructions::CODE_OF_FILE)];
    let ways = ways.into_iter().filter(|(open, _)| *open).map(|(_, way)| way).sum();
    let words = Words { ways, ..words(plan.what.words(), &registers, tracer.signal_mask(thread).map_err(ended)?) };
    let written = tracer.write(thread, at, &instructions::code(&words));
    written.map_err(|error| Unfit::Lasting(step("writing the instructions of the entry")(error)))?;
    if let Err(error) = tracer.set_registers(thread, &at_instructions(&registers, at)) {
        let _ = tracer.write(thread, at, &vec![0; instructions::len()]);
        return Err(ended(error));
    }
    Ok(at)
}

/// True if a signal is on its way to `thread`: a call that it interrupts must return, which a borrowed thread's would not.
fn has_pending_signal(pid: i32, thread: i32) -> bool {
    let status = status_of(pid, thread);
    let set = |name: &str| u64::from_str_radix(procfs::value(&status, name).unwrap_or_default(), 16).unwrap_or(0);
    (set("SigPnd") | set("ShdPnd")) & !set("SigBlk") != 0
}
