//! The steps of an entry, and of leaving.
//!
//! 1. [`look`] decides whether the program can be entered, and says why not.
//! 2. One thread of it is stopped, at a moment at which nothing would be lost: no signal is on its way to the thread, and
//!    the thread is not in the middle of a restartable sequence. Its registers are set to the instructions of [`borrow`],
//!    and it goes on.
//! 3. The new thread waits for the agent's code, which is written from outside; then it begins.
//! 4. The agent opens its socket, and the other end is taken.
//!
//! After each step the tracer may die: the program goes on, and the new thread ends by itself if it is not served.

use crate::borrow::{self, Words};
use crate::call_names::name_of_call;
use crate::image::AgentImage;
use crate::memory::{self, Memory};
use crate::stop::{call_of, is_own, with_stopped};
use crate::trace::{Registers, Report, Tracer};
use pagefold_os::fd::Fd;
use pagefold_os::procfs::OwnedMap;
use pagefold_os::{PAGE_SIZE, Range, procfs, syscall};
use pagefold_protocol::POOL_NAME;
use pagefold_protocol::entry::{EntryPage, SOCKET_MAX, order, stage};
use pagefold_protocol::seccomp_filter::{self, Leeway};
use std::mem::offset_of;
use std::time::{Duration, Instant};
use std::{fs, io, thread};

/// Bytes of the stack of the agent's first thread.
const STACK_LEN: u64 = 256 << 10;
/// How long the borrowed thread, and then the agent, may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long an agent without a daemon may take to see that one asks for a connection: it looks twice a second.
const AGENT_LOOKS: Duration = Duration::from_secs(2);
/// How long one thread may take to stand still before another is tried.
const STOP_PATIENCE: Duration = Duration::from_millis(20);
/// How long threads may take that have not stood still by then: on a busy machine each waits for a processor.
const LATE_PATIENCE: Duration = Duration::from_secs(2);
/// How often the threads of the program are tried.
const TRIES: usize = 20;

/// What lets the packaged daemon read the filters of programs: the one command as root.
pub const FILTERS_CURE: &str = "install -Dm644 -t /etc/systemd/system/pagefold.service.d /usr/share/pagefold/examples/filters.conf \
                                && systemctl daemon-reload && systemctl restart pagefold";

/// Why a program was not entered. It goes on as if nothing had been.
#[derive(Debug, thiserror::Error)]
pub enum EntryError {
    /// There is no such process.
    #[error("there is no such process")]
    Gone,
    /// It cannot be entered, and why.
    #[error("{0}")]
    Refused(String),
    /// A thread of it can be borrowed, but no agent can live in it, and why.
    #[error("{0}")]
    NoAgent(String),
    /// No thread of it could be borrowed.
    #[error("no thread of it could be borrowed: {0}")]
    Busy(String),
    /// The kernel refused a step.
    #[error("{step}: {error}")]
    System {
        /// What was tried.
        step: &'static str,
        /// The kernel's reason.
        error: io::Error,
    },
}

/// What the agent needs to know.
#[derive(Clone, Copy, Debug)]
pub struct Settings<'a> {
    /// Where the daemon listens.
    pub socket: &'a [u8],
    /// The domain's name, 64 bytes at most.
    pub domain: &'a str,
    /// All large private memory is managed, not only what the program marks as mergeable.
    pub all: bool,
    /// Idle memory is evicted to the cold tier instead of being merged.
    pub cold: Option<ColdOptions>,
    /// The agent makes its userfaultfd by a system call, for the daemon has no device for it.
    pub makes_userfaultfd: bool,
}

/// What a client of the cold tier asks for; zeros stand for the daemon's defaults.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ColdOptions {
    /// Share of run time that may be lost to refaults, in millionths.
    pub tolerance_ppm: u64,
    /// Limit of the domain's tier in bytes, if this client is its first.
    pub tier_max: u64,
}

/// An agent in a program, before its greeting.
#[derive(Debug)]
pub struct Entered {
    /// Our end of the agent's connection.
    pub requests: Fd,
    /// How long the borrowed thread stood still.
    pub still: Duration,
}

/// What an entry leaves in a program as long as the agent is there.
#[derive(Clone, Copy, Debug)]
pub struct Traces {
    /// The process.
    pub pid: i32,
    /// Its start time, in ticks since boot.
    pub started: u64,
    /// The agent's memory.
    pub image: Range,
    /// Where the instructions lie.
    pub code: u64,
}

impl Traces {
    /// Of process `pid`, as its agent says: where its memory lies, and where the code that leaves. `None` if that cannot be.
    pub fn of(pid: i32, image: Range, leave_at: u64) -> Option<Traces> {
        let is_whole = image.start.is_multiple_of(PAGE_SIZE as u64) && image.len() > STACK_LEN + PAGE_SIZE as u64;
        let code = borrow::code_at(leave_at)?;
        Some(Traces { pid, started: procfs::start_time(pid)?, image, code }).filter(|_| is_whole)
    }

    /// The entry page.
    const fn page(&self) -> u64 {
        self.image.end - STACK_LEN - PAGE_SIZE as u64
    }
}

fn step(step: &'static str) -> impl Fn(io::Error) -> EntryError {
    move |error| match error.raw_os_error() {
        Some(libc::ESRCH) => EntryError::Gone,
        _ => EntryError::System { step, error },
    }
}

/// Says why no agent can live in process `pid`.
///
/// # Errors
/// [`EntryError::Gone`], or [`EntryError::Refused`] with one line: what, and what to do about it.
pub fn look(pid: i32) -> Result<Vec<OwnedMap>, EntryError> {
    let refuse = |reason: &str| Err(EntryError::Refused(reason.into()));
    let maps = look_at_threads(pid)?;
    if maps.iter().any(|map| map.name.as_bytes().starts_with(POOL_NAME) && !map.shared) {
        return refuse("it shows merged memory already, its own or that of the process that forked it");
    }
    if has_agent(pid) {
        return refuse("an agent is in it already");
    }
    Ok(maps)
}

/// The kernel gives the file to the program's user: another one needs the right to overrule that.
fn open_memory(pid: i32) -> Result<Memory, EntryError> {
    Memory::open(pid).map_err(|error| match error.raw_os_error() {
        Some(libc::EACCES) => EntryError::Refused(
            "it is another user's, and this daemon may not write its memory without CAP_DAC_OVERRIDE: attach by root's daemon".into(),
        ),
        _ => step("opening its memory")(error),
    })
}

fn has_filter(pid: i32, thread: i32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/task/{thread}/status")).unwrap_or_default();
    procfs::has_filter(&status)
}

/// True if this process has a filter: the kernel shows it no other's then.
fn has_own_filter() -> bool {
    let own = std::process::id() as i32;
    has_filter(own, own)
}

/// Asks the seccomp filters of `thread`, which stands still, about each call that the agent makes: its threads get them too.
///
/// # Errors
/// [`EntryError::NoAgent`]: a call is forbidden, or the filters cannot be read.
fn judge_filters(tracer: &Tracer, thread: i32, makes_userfaultfd: bool) -> Result<Leeway, EntryError> {
    let filters = tracer.filters(thread).map_err(|error| {
        let why = if has_own_filter() {
            format!("this daemon may not read it, for it has one itself: {FILTERS_CURE}")
        } else if error.raw_os_error() == Some(libc::EACCES) {
            "this daemon may not read it without CAP_SYS_ADMIN: attach by root's daemon".into()
        } else {
            format!("the kernel does not show it ({error})")
        };
        EntryError::NoAgent(format!("a seccomp filter restricts its system calls, and {why}"))
    })?;
    let filters: Vec<&[libc::sock_filter]> = filters.iter().map(Vec::as_slice).collect();
    seccomp_filter::judge_attached(&filters, makes_userfaultfd).map_err(|number| {
        EntryError::NoAgent(format!(
            "its seccomp filter forbids a system call of the agent's ({}): allow that call (SystemCallFilter= and other settings of \
             a service), or attach --backend ksm",
            name_of_call(number)
        ))
    })
}

/// Says why no thread of process `pid` can be borrowed.
fn look_at_threads(pid: i32) -> Result<Vec<OwnedMap>, EntryError> {
    let refuse = |reason: &str| Err(EntryError::Refused(reason.into()));
    if pid <= 0 || !fs::exists(format!("/proc/{pid}")).unwrap_or(false) {
        return Err(EntryError::Gone);
    }
    if pid == std::process::id() as i32 {
        return refuse("it is the daemon itself");
    }
    if !borrow::is_supported() {
        return refuse("programs can be entered on x86-64 only so far; start it by pagefold run");
    }
    let status = procfs::status(pid);
    let field = |name: &str| procfs::value(&status, name).unwrap_or_default();
    match field("State").chars().next() {
        None | Some('Z' | 'X') => return Err(EntryError::Gone),
        Some('T' | 't') => return refuse("it is stopped (SIGSTOP or a debugger): let it go on first"),
        _ => {}
    }
    let tracer = field("TracerPid");
    if tracer != "0" && !tracer.is_empty() {
        return Err(EntryError::Refused(format!("process {tracer} traces it: end that first")));
    }
    if field("Kthread") == "1" || field("VmSize").is_empty() {
        return refuse("it is a thread of the kernel");
    }
    if field("Tgid") != pid.to_string() {
        return Err(EntryError::Refused(format!("it is a thread of process {}: name that", field("Tgid"))));
    }
    let maps = procfs::maps(pid).map_err(|error| match error.kind() {
        io::ErrorKind::PermissionDenied => EntryError::Refused(
            "this user may not trace it: it is another user's, or has other rights than its user (see ptrace(2), pagefold doctor)".into(),
        ),
        _ => EntryError::Gone,
    })?;
    if maps.is_empty() {
        return Err(EntryError::Gone);
    }
    Ok(maps)
}

/// Enters process `pid` and starts `agent` there.
///
/// # Errors
/// [`EntryError`]; the program goes on as if nothing had been.
pub fn enter(pid: i32, agent: &AgentImage, settings: &Settings<'_>) -> Result<Entered, EntryError> {
    if settings.socket.len() >= SOCKET_MAX || settings.domain.len() > 64 {
        return Err(EntryError::Refused("the path of the daemon's socket or the domain's name is too long".into()));
    }
    let maps = look(pid)?;
    let memory = open_memory(pid)?;
    if let Some(left) = memory::unfinished(&memory, &maps, &borrow::MARK) {
        clear(pid, left)?;
    }
    let page = PAGE_SIZE as u64;
    let len = agent.len + page + STACK_LEN;
    let range = memory::free_range(&maps, len)
        .ok_or_else(|| EntryError::Refused("its address space has no room for the agent".into()))?;
    let layout = Layout { range, page: range.start + agent.len, stack: range.end - STACK_LEN };
    let what = Purpose::Agent(agent, layout, settings.makes_userfaultfd);
    let borrowed = borrow_aside(&Plan { pid, what, maps: &maps })?;
    let memory = open_memory(pid)?;
    let result = begin(pid, agent, &layout, settings, &borrowed, &memory);
    match result {
        Ok(requests) => Ok(Entered { requests, still: borrowed.still }),
        Err(error) => {
            let _ = memory.write(layout.page + offset_of!(EntryPage, order) as u64, &order::GIVE_UP.to_ne_bytes());
            wait_for_end(pid, range);
            let _ = clear(pid, borrow::range(borrowed.code));
            Err(error)
        }
    }
}

/// Has the kernel's KSM merge the memory of process `pid`, or (`merges` is false) not any more, as `PR_SET_MEMORY_MERGE` of
/// prctl(2) does. Children inherit it. Returns how long one of its threads stood still.
///
/// A seccomp filter is suspended for the call. Only if the tracer is killed in these microseconds, the filter judges it.
///
/// # Errors
/// [`EntryError`].
pub fn set_merged_by_ksm(pid: i32, merges: bool) -> Result<Duration, EntryError> {
    let maps = look_at_threads(pid)?;
    let memory = open_memory(pid)?;
    if let Some(left) = memory::unfinished(&memory, &maps, &borrow::MARK).filter(|_| own_thread(pid).is_none()) {
        clear(pid, left)?;
    }
    let borrowed = borrow_aside(&Plan { pid, what: Purpose::Ksm(merges), maps: &maps })?;
    clear_soon(pid, borrow::range(borrowed.code))?;
    Ok(borrowed.still)
}

/// Borrows a thread on a thread of its own: when that ends the kernel lets go of whatever is still traced.
fn borrow_aside(plan: &Plan<'_>) -> Result<Borrowed, EntryError> {
    thread::scope(|scope| {
        scope.spawn(|| borrow_thread(plan)).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Where the parts of the agent's memory lie.
#[derive(Clone, Copy)]
struct Layout {
    range: Range,
    /// The entry page.
    page: u64,
    /// The first stack.
    stack: u64,
}

/// What is entered, with what, and where.
struct Plan<'a> {
    pid: i32,
    what: Purpose<'a>,
    /// The program's mappings before the entry.
    maps: &'a [OwnedMap],
}

/// What a thread is borrowed for.
enum Purpose<'a> {
    /// It starts the agent, which makes its userfaultfd by a system call or not.
    Agent(&'a AgentImage, Layout, bool),
    /// It has KSM merge the program's memory, or not any more.
    Ksm(bool),
}

/// A thread that has been sent to the instructions.
struct Borrowed {
    code: u64,
    still: Duration,
    /// What its filters leave the agent.
    leeway: Leeway,
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
    let status = fs::read_to_string(format!("/proc/{pid}/task/{thread}/status")).unwrap_or_default();
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

/// Lets `thread` make the calls of [`borrow`] without its filters, which are in force again before it goes back to code of
/// the program's. Returns a signal that it is still to handle.
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
    let at = memory::unused_code(&memory, plan.maps, borrow::len()).ok_or_else(|| {
        Unfit::Lasting(EntryError::Refused(
            "its code has no room for the instructions of an entry (it has no vdso)".into(),
        ))
    })?;
    let ways = [(leeway.code_in_place, borrow::CODE_IN_PLACE), (leeway.code_of_file, borrow::CODE_OF_FILE)];
    let ways = ways.into_iter().filter(|(open, _)| *open).map(|(_, way)| way).sum();
    let words = Words { ways, ..words(&plan.what, &registers, tracer.signal_mask(thread).map_err(ended)?) };
    let written = tracer.write(thread, at, &borrow::code(&words));
    written.map_err(|error| Unfit::Lasting(step("writing the instructions of the entry")(error)))?;
    if let Err(error) = tracer.set_registers(thread, &at_instructions(&registers, at)) {
        let _ = tracer.write(thread, at, &vec![0; borrow::len()]);
        return Err(ended(error));
    }
    Ok(at)
}

#[cfg(target_arch = "x86_64")]
fn is_64_bit(registers: &Registers) -> bool {
    registers.cs == 0x33
}

#[cfg(target_arch = "x86_64")]
fn at_instructions(registers: &Registers, at: u64) -> Registers {
    // No system call: the kernel would restart it, with the instructions' registers.
    Registers { rip: at, orig_rax: u64::MAX, ..*registers }
}

/// What the instructions need, with the registers as the thread is to have them when it goes on.
#[cfg(target_arch = "x86_64")]
fn words(what: &Purpose<'_>, registers: &Registers, mask: u64) -> Words {
    // What the kernel does when a thread goes on that was stopped in a call: it makes the call again. Numbers of the
    // kernel's own.
    const RESTART: [i64; 3] = [-512, -513, -514];
    const RESTART_BLOCK: i64 = -516;
    const SYSCALL_LEN: u64 = 2;
    let in_call = registers.orig_rax as i64 >= 0;
    let (rax, rip) = match registers.rax as i64 {
        result if in_call && RESTART.contains(&result) => (registers.orig_rax, registers.rip - SYSCALL_LEN),
        RESTART_BLOCK if in_call => (libc::SYS_restart_syscall as u64, registers.rip - SYSCALL_LEN),
        _ => (registers.rax, registers.rip),
    };
    let agents = match what {
        Purpose::Ksm(merges) => Words { base: u64::from(*merges), ..Words::default() },
        Purpose::Agent(agent, layout, _) => Words {
            base: layout.range.start,
            len: layout.range.len(),
            data: layout.range.start + agent.code_len,
            data_len: layout.range.len() - agent.code_len,
            stack: layout.range.end,
            page: layout.page,
            begin: layout.range.start + agent.begin,
            sleep_ns: 1_000_000,
            ..Words::default()
        },
    };
    Words {
        all_signals: u64::MAX,
        mask,
        flags: registers.eflags,
        rsp: registers.rsp,
        rax,
        rdi: registers.rdi,
        rsi: registers.rsi,
        rdx: registers.rdx,
        r10: registers.r10,
        r8: registers.r8,
        r9: registers.r9,
        rcx: registers.rcx,
        r11: registers.r11,
        rip,
        ..agents
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn is_64_bit(_: &Registers) -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
fn at_instructions(registers: &Registers, _: u64) -> Registers {
    *registers
}

#[cfg(not(target_arch = "x86_64"))]
fn words(_: &Purpose<'_>, _: &Registers, mask: u64) -> Words {
    Words { mask, ..Words::default() }
}

/// True if a signal is on its way to `thread`: a call that it interrupts must return, which a borrowed thread's would not.
fn has_pending_signal(pid: i32, thread: i32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/task/{thread}/status")).unwrap_or_default();
    let set = |name: &str| u64::from_str_radix(procfs::value(&status, name).unwrap_or_default(), 16).unwrap_or(0);
    (set("SigPnd") | set("ShdPnd")) & !set("SigBlk") != 0
}

/// True if `thread` stands within a restartable sequence: the kernel would abort that, had it not been sent elsewhere.
#[cfg(target_arch = "x86_64")]
fn is_in_restartable_sequence(thread: i32, memory: &Memory, registers: &Registers) -> bool {
    const GET_RSEQ_CONFIGURATION: libc::c_uint = 0x420f;
    let mut configuration = [0u64; 3];
    // SAFETY: the kernel writes at most as many bytes as it is told.
    let got = unsafe {
        let len = size_of_val(&configuration);
        libc::ptrace(GET_RSEQ_CONFIGURATION as _, thread, len, (&raw mut configuration).cast::<libc::c_void>())
    };
    if got <= 0 || configuration[0] == 0 {
        return false;
    }
    let word = |at: u64| {
        let mut bytes = [0; 8];
        memory.read(at, &mut bytes).ok().map(|()| u64::from_ne_bytes(bytes))
    };
    // The descriptor's address stands behind two numbers of a processor; in it, start and length behind version and flags.
    let Some(descriptor) = word(configuration[0] + 8).filter(|at| *at != 0) else { return false };
    match (word(descriptor + 8), word(descriptor + 16)) {
        (Some(start), Some(len)) => (start..start.saturating_add(len)).contains(&registers.rip),
        _ => true,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn is_in_restartable_sequence(_: i32, _: &Memory, _: &Registers) -> bool {
    true
}

/// Waits until `done` says something, for as long as a step may take.
fn wait_until<T>(done: impl FnMut() -> Option<T>) -> Option<T> {
    wait_for(PATIENCE, done)
}

fn wait_for<T>(patience: Duration, mut done: impl FnMut() -> Option<T>) -> Option<T> {
    let began = Instant::now();
    loop {
        if let Some(what) = done() {
            return Some(what);
        }
        if began.elapsed() > patience {
            return None;
        }
        thread::sleep(Duration::from_micros(200));
    }
}

/// Writes the agent's code, has its first thread begin, and takes its socket.
fn begin(
    pid: i32,
    agent: &AgentImage,
    layout: &Layout,
    settings: &Settings<'_>,
    borrowed: &Borrowed,
    memory: &Memory,
) -> Result<Fd, EntryError> {
    let word = |at: usize| memory.word(layout.page + at as u64);
    let late = |what: &str| EntryError::Busy(what.into());
    // A program without room for a mapping or a thread goes on without either.
    let thread = wait_until(|| {
        // In this order: the kernel writes the number before the borrowed thread goes back.
        let left = word(offset_of!(EntryPage, left)).unwrap_or(0);
        let thread = word(offset_of!(EntryPage, thread)).unwrap_or(0) as i32;
        (left != 0 && thread > 0).then_some(thread)
    });
    let thread = thread.ok_or_else(|| {
        late("the thread did not get to map memory and start another (limits of memory, address space or threads?)")
    })?;
    let writing = step("writing the agent");
    memory.write(layout.range.start, &agent.at(layout.range.start)).map_err(&writing)?;
    let put = |at: usize, bytes: &[u8]| memory.write(layout.page + at as u64, bytes).map_err(&writing);
    let both = |words: [u64; 2]| words.map(u64::to_ne_bytes).concat();
    put(offset_of!(EntryPage, socket_len), &(settings.socket.len() as u32).to_ne_bytes())?;
    put(offset_of!(EntryPage, all), &u32::from(settings.all).to_ne_bytes())?;
    put(offset_of!(EntryPage, may_follow), &u16::from(borrowed.leeway.follow).to_ne_bytes())?;
    put(offset_of!(EntryPage, may_execute), &u16::from(borrowed.leeway.execute).to_ne_bytes())?;
    if let Some(cold) = settings.cold {
        put(offset_of!(EntryPage, cold), &1u32.to_ne_bytes())?;
        put(offset_of!(EntryPage, cold_options), &both([cold.tolerance_ppm, cold.tier_max]))?;
    }
    put(offset_of!(EntryPage, image), &both([layout.range.start, layout.range.len()]))?;
    put(offset_of!(EntryPage, stack), &both([layout.stack, layout.range.end]))?;
    put(offset_of!(EntryPage, leave_at), &borrow::leave_at(borrowed.code).to_ne_bytes())?;
    put(offset_of!(EntryPage, domain), settings.domain.as_bytes())?;
    put(offset_of!(EntryPage, socket), settings.socket)?;
    put(offset_of!(EntryPage, order), &order::BEGIN.to_ne_bytes())?;
    let opened = wait_until(|| word(offset_of!(EntryPage, stage)).ok().filter(|stage| *stage != 0));
    if opened != Some(stage::OPEN) {
        let errno = word(offset_of!(EntryPage, error)).unwrap_or(0) as i32;
        if errno == libc::EACCES {
            return Err(EntryError::Refused("it forbids that others read its memory (PR_SET_DUMPABLE)".into()));
        }
        return Err(EntryError::System {
            step: "the agent could not begin",
            error: io::Error::from_raw_os_error(errno),
        });
    }
    // The number that the kernel wrote is that of the program's own namespace of processes.
    take_connection(own_thread(pid).unwrap_or(thread), memory, layout.page)
}

/// Takes the socket that the agent's thread `own` has opened, as its entry page says.
fn take_connection(own: i32, memory: &Memory, page: u64) -> Result<Fd, EntryError> {
    let taking = step("taking the agent's socket (Linux 6.9 or newer)");
    let fd = memory.word(page + offset_of!(EntryPage, requests) as u64).map_err(&taking)?;
    let requests = take_descriptor(own, fd as i32).map_err(&taking)?;
    let order = page + offset_of!(EntryPage, order) as u64;
    memory.write(order, &order::TAKEN.to_ne_bytes()).map_err(step("writing the agent"))?;
    Ok(requests)
}

/// True if an agent is in process `pid`.
pub fn has_agent(pid: i32) -> bool {
    own_thread(pid).is_some()
}

/// Has the agent in process `pid`, which finds no daemon, open another socket; returns our end. The agent greets on it.
///
/// # Errors
/// [`EntryError`]: another daemon has the agent, or it is of another version.
pub fn ask_for_connection(pid: i32) -> Result<Fd, EntryError> {
    let refuse = |reason: &str| EntryError::Refused(format!("an agent is in it already, {reason}"));
    let maps = look_at_threads(pid)?;
    let own = own_thread(pid).ok_or(EntryError::Gone)?;
    let memory = open_memory(pid)?;
    let code = memory::unfinished(&memory, &maps, &borrow::MARK).map(|found| found.start);
    let words = code.and_then(|code| borrow::words(|bytes| memory.read(code, bytes).is_ok()));
    let page =
        words.map(|words| words.page).ok_or_else(|| refuse("and was not entered by this version of pagefold"))?;
    let asking = step("asking its agent for a connection");
    let put = |at: usize, word: u32| memory.write(page + at as u64, &word.to_ne_bytes()).map_err(&asking);
    put(offset_of!(EntryPage, stage), 0)?;
    put(offset_of!(EntryPage, order), order::CONNECT)?;
    let opened = wait_for(AGENT_LOOKS, || {
        let stage = memory.word(page + offset_of!(EntryPage, stage) as u64);
        stage.ok().filter(|stage| *stage == stage::OPEN)
    });
    if opened.is_none() {
        put(offset_of!(EntryPage, order), order::TAKEN)?;
        return Err(refuse("a client of another daemon"));
    }
    take_connection(own, &memory, page)
}

/// The agent's first thread, by its name.
fn own_thread(pid: i32) -> Option<i32> {
    procfs::threads(pid).ok()?.into_iter().find(|thread| is_own(pid, *thread))
}

/// A copy of descriptor `fd` of `thread`, which has descriptors of its own.
fn take_descriptor(thread: i32, fd: i32) -> io::Result<Fd> {
    const PIDFD_THREAD: i32 = libc::O_EXCL;
    // SAFETY: pidfd_open(2) takes no pointer.
    let pidfd = unsafe { syscall!(libc::SYS_pidfd_open, thread, PIDFD_THREAD) }?;
    // SAFETY: just made, ours.
    let pidfd = unsafe { Fd::from_raw(pidfd as i32) };
    // SAFETY: pidfd_getfd(2) takes no pointer.
    let taken = unsafe { syscall!(libc::SYS_pidfd_getfd, pidfd.raw(), fd, 0) }?;
    // SAFETY: just made, ours.
    Ok(unsafe { Fd::from_raw(taken as i32) })
}

/// Waits until the agent's thread has ended and `image` is unmapped; false if that does not happen in time.
fn wait_for_end(pid: i32, image: Range) -> bool {
    wait_until(|| {
        let is_there = own_thread(pid).is_some();
        let is_mapped = procfs::maps(pid).is_ok_and(|maps| maps.iter().any(|map| map.range.overlaps(&image)));
        (!is_there && !is_mapped).then_some(())
    })
    .is_some()
}

/// Takes the instructions out of the program again, at a moment at which no thread executes them.
fn clear(pid: i32, code: Range) -> Result<(), EntryError> {
    let cleared = with_stopped(pid, |stopped| {
        let executes =
            |thread| stopped.tracer().registers(thread).is_ok_and(|registers| code.overlaps(&at_of(&registers)));
        if stopped.still().any(executes) {
            return Err(io::Error::from_raw_os_error(libc::EBUSY));
        }
        let thread = stopped.still().next().ok_or_else(|| io::Error::from_raw_os_error(libc::EBUSY))?;
        stopped.tracer().write(thread, code.start, &vec![0; code.len() as usize])
    });
    match cleared {
        Ok(Err(error)) if error.raw_os_error() == Some(libc::EBUSY) => {
            Err(EntryError::Busy("an entry that was not finished is under way: it ends by itself within 10 s".into()))
        }
        Ok(done) => done.map_err(step("clearing the instructions of the entry")),
        Err(error) => Err(EntryError::Busy(error.to_string())),
    }
}

#[cfg(target_arch = "x86_64")]
fn at_of(registers: &Registers) -> Range {
    Range { start: registers.rip, end: registers.rip + 1 }
}

#[cfg(not(target_arch = "x86_64"))]
fn at_of(_: &Registers) -> Range {
    Range { start: 0, end: 0 }
}

/// Has the agent leave, and takes out of the program what its entry has left. No page may be merged any more.
///
/// # Errors
/// [`EntryError::Busy`] if the agent does not end in time; [`EntryError::Gone`] if the program has ended.
pub fn leave(traces: &Traces) -> Result<(), EntryError> {
    if procfs::start_time(traces.pid) != Some(traces.started) {
        return Err(EntryError::Gone);
    }
    let memory = open_memory(traces.pid)?;
    // Looked at once more: the number may have become another process's until the memory was open.
    if procfs::start_time(traces.pid) != Some(traces.started) {
        return Err(EntryError::Gone);
    }
    let order = traces.page() + offset_of!(EntryPage, order) as u64;
    memory.write(order, &order::LEAVE.to_ne_bytes()).map_err(step("telling the agent to leave"))?;
    if !wait_for_end(traces.pid, traces.image) {
        return Err(EntryError::Busy("the agent has not ended".into()));
    }
    clear_soon(traces.pid, borrow::range(traces.code))
}

/// As [`clear`], tried again while a thread executes the instructions.
fn clear_soon(pid: i32, code: Range) -> Result<(), EntryError> {
    let mut last = Ok(());
    for _ in 0..TRIES {
        last = clear(pid, code);
        if !matches!(last, Err(EntryError::Busy(_))) {
            break;
        }
        thread::sleep(Duration::from_millis(5));
    }
    last
}
