//! The agent's thread: it answers the daemon's requests, one at a time.
//!
//! The thread is made by a raw clone(2): it shares the program's memory but has
//! its own table of descriptors, so the program neither sees our descriptors
//! nor closes them, and we hold none of its. It has no thread-local storage:
//! everything it calls must do without `errno`. It dies with the process and
//! with exec(2), both in the kernel's hands; it can never die alone, so pages
//! are never left in the staging area.

use crate::cold;
use crate::guard::{Guard, Held};
use crate::heap::{self, Heap};
use crate::table::{MergedChunks, Table};
use crate::wire::{
    self, CHANNEL_COUNTERS, CHANNEL_IN, CHANNEL_LEN, CHANNEL_OUT, CHANNEL_PAGES, Counters, FETCH_PAGES_MAX,
    FREEZE_PAGES_MAX, LIST_MAX, Op, Outcome, Packet, Piece, RegionEntry, SEGMENTS_HELD,
};
use core::cell::UnsafeCell;
use core::ffi::CStr;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use pagefold_os::fd::Fd;
use pagefold_os::raw::{Errno, Result};
use pagefold_os::uffd::{self, Uffd};
use pagefold_os::{PAGE_SIZE, Page, Range, maps, mem, memfd, pagemap, sched, sock, stat, syscall};

const PAGE: u64 = PAGE_SIZE as u64;

pub(crate) const NOTHING: Range = Range { start: 0, end: 0 };

/// Name that pool segments carry in /proc/PID/maps.
pub const POOL_NAME: &[u8] = b"/memfd:pagefold-pool";

/// `me` of the agent's thread for the guard, and of the cold tier's; no thread pointer has these values.
pub(crate) const AGENT: usize = 1;
pub(crate) const COLD_AGENT: usize = 2;

/// How long the agent waits before it tries to reach a daemon that is gone, in milliseconds.
const RECONNECT_MS: i32 = 500;

/// And before it tries again when it could not set itself up.
const REFUSED_MS: i32 = 10_000;

/// How long the agent waits for a daemon that listens but takes no connections, and for the answer to what it greets with: at
/// work, and if it is about to leave.
pub(crate) const TAKEN_MS: u64 = 20;
const ANSWERED_MS: [u64; 2] = [10_000, 1_000];

/// How old a process must be whose memory is all managed before its agent greets, in milliseconds.
const ALL_START_MS: i32 = 60;

/// The process's mappings. By the calling thread, here and elsewhere: the process's own directory has no memory any more once
/// its first thread has ended.
const MAPS: &CStr = c"/proc/thread-self/maps";

/// How often our threads look around, in nanoseconds.
const LOOKS_NS: u64 = 500_000_000;

/// How long the agent waits for requests before it looks whether the program changed its mappings or wants it to leave:
/// while something happens, and after [`BUSY_NS`] without anything.
const PAUSES_MS: [i32; 2] = [100, 500];
const BUSY_NS: u64 = 3_000_000_000;

/// The smallest mapping that `--all` manages, in bytes.
pub const ALL_MIN: u64 = 1 << 20;

/// What program threads and the agent's thread share; one per process.
pub struct Shared {
    /// Held while mappings change.
    pub guard: Guard,
    /// Counts changes of the managed ranges.
    pub generation: AtomicU64,
    /// 0 not started, 1 running, 2 asked to leave, 3 given up.
    pub phase: AtomicU32,
    /// The agent's thread.
    pub thread: Thread,
    /// Manage every large private anonymous mapping.
    pub all: AtomicBool,
    /// The agent's thread answers discards of merged pages.
    pub holds: AtomicBool,
    /// Forked from a process that had merged pages.
    pub forked: AtomicBool,
    /// Errno that made the agent give up, for the curious.
    pub error: AtomicI32,
    socket_len: AtomicUsize,
    socket: UnsafeCell<[u8; 108]>,
    domain: UnsafeCell<[u8; 64]>,
    table: UnsafeCell<Table>,
    merged: UnsafeCell<MergedChunks>,
}

// SAFETY: the cells are written before the thread starts (socket, domain) or while the guard is held (table, merged).
unsafe impl Sync for Shared {}

/// The one state of this process.
pub static SHARED: Shared = Shared {
    guard: Guard::new(),
    generation: AtomicU64::new(1),
    phase: AtomicU32::new(0),
    thread: Thread::new(),
    all: AtomicBool::new(false),
    holds: AtomicBool::new(false),
    forked: AtomicBool::new(false),
    error: AtomicI32::new(0),
    socket_len: AtomicUsize::new(0),
    socket: UnsafeCell::new([0; 108]),
    domain: UnsafeCell::new([0; 64]),
    table: UnsafeCell::new(Table::new()),
    merged: UnsafeCell::new(MergedChunks::new()),
};

/// Access to what the guard protects.
pub struct Tables<'a> {
    _held: &'a Held<'a>,
    /// Ranges and notes.
    pub table: &'a mut Table,
    /// Chunks with merged pages.
    pub merged: &'a mut MergedChunks,
}

impl Shared {
    /// Sets where the daemon listens and which domain we belong to; false if either is too long.
    /// Call before [`start`].
    pub fn configure(&self, socket: &[u8], domain: &[u8], all: bool) -> bool {
        if socket.len() >= 108 || domain.len() > 64 || self.phase.load(Ordering::Acquire) != 0 {
            return false;
        }
        // SAFETY: no thread of ours runs yet (phase 0), and the caller is the only one to configure.
        unsafe {
            (&mut *self.socket.get())[..socket.len()].copy_from_slice(socket);
            *self.domain.get() = [0; 64];
            (&mut *self.domain.get())[..domain.len()].copy_from_slice(domain);
        }
        self.socket_len.store(socket.len(), Ordering::Release);
        self.all.store(all, Ordering::Relaxed);
        true
    }

    /// True if [`configure`](Self::configure) was called.
    pub fn is_configured(&self) -> bool {
        self.socket_len.load(Ordering::Acquire) > 0
    }

    /// The tables, for who holds the guard.
    pub fn tables<'a>(&'a self, held: &'a Held<'a>) -> Tables<'a> {
        // SAFETY: the guard is held, so nobody else has the tables. A frame of the same thread further out may
        // hold the guard too (a signal handler interrupted it): such frames never keep a borrow across calls
        // that can be interrupted by our own entry points, which are short and allocation-free.
        unsafe { Tables { _held: held, table: &mut *self.table.get(), merged: &mut *self.merged.get() } }
    }

    /// Tells the daemon, at its next look, that the managed ranges changed.
    pub fn changed(&self) {
        self.generation.fetch_add(1, Ordering::Release);
    }
}

/// A pool segment that is mapped for comparing.
struct Segment {
    id: u32,
    fd: Fd,
    map: mem::Mapping,
    pages: u32,
}

/// The agent at work: everything that one connection to a daemon needs.
pub(crate) struct Agent {
    channel_fd: Fd,
    channel: mem::Mapping,
    /// Watches for writes; sends no events.
    pub(crate) watch: Uffd,
    /// Holds frozen and merged ranges; tells of discards.
    pub(crate) hold: Uffd,
    /// Watches the end of the heap while part of that is frozen.
    pub(crate) heap: Heap,
    /// /dev/userfaultfd, if we have it.
    device: Option<Fd>,
    /// We greeted this daemon while the plain memory was the cold tier's.
    away: bool,
    /// Where frozen pages wait.
    pub(crate) staging: mem::Mapping,
    /// Where memory that is given back is made, if that can be had; `None` before it is needed.
    nursery: Option<Option<u64>>,
    segments: [Option<Segment>; SEGMENTS_HELD],
    /// The process's page map.
    pub(crate) pagemap: Fd,
    /// Its mappings.
    pub(crate) maps: Maps,
    /// Where the agent may run, and where it does if it was called somewhere.
    cpus: sched::Cpus,
    cpu: Option<u64>,
    /// Pages of the frozen span that the program discarded meanwhile.
    pub(crate) voids: [bool; FREEZE_PAGES_MAX],
}

/// The program has locked all its memory: there is nothing for the agent to do.
pub(crate) static ALL_LOCKED: AtomicBool = AtomicBool::new(false);

/// What filters of the program's leave the agent (see [`filter`](crate::filter)).
pub(crate) static MAY_START: AtomicBool = AtomicBool::new(true);
pub(crate) static MAY_FOLLOW: AtomicBool = AtomicBool::new(true);

/// Length of the nursery: a mapping that is given back is one again as far as this reaches.
pub(crate) const NURSERY_LEN: u64 = 32 << 20;
/// Where it is, 0 before there is one. A forked child inherits it.
static NURSERY: AtomicU64 = AtomicU64::new(0);

/// Where frozen pages wait, 0 before there is such a place.
static STAGING: AtomicU64 = AtomicU64::new(0);

/// Memory of ours that looks like the program's, and that the program may give any advice on, as it does who advises all that
/// its list of mappings shows. It is never managed: an agent that freezes its own stack waits for itself.
fn own() -> [Range; 7] {
    let at = |start: &AtomicU64, len: u64| match start.load(Ordering::Relaxed) {
        0 => NOTHING,
        start => Range { start, end: start + len },
    };
    [
        at(&SHARED.thread.stack, STACK_LEN as u64),
        at(&cold::second_thread().stack, STACK_LEN as u64),
        at(&STAGING, (FREEZE_PAGES_MAX * PAGE_SIZE) as u64),
        at(&cold::STAGING, (FETCH_PAGES_MAX * PAGE_SIZE) as u64),
        at(&NURSERY, NURSERY_LEN),
        origin_page(),
        statics(),
    ]
}

#[cfg(feature = "preload")]
fn origin_page() -> Range {
    let page = ORIGIN.load(Ordering::Relaxed);
    if page == 0 { NOTHING } else { Range::pages_from(page, 1) }
}

#[cfg(not(feature = "preload"))]
fn origin_page() -> Range {
    NOTHING
}

/// What the library's file has no bytes for.
#[cfg(feature = "preload")]
fn statics() -> Range {
    unsafe extern "C" {
        static __bss_start: u8;
        static _end: u8;
    }
    Range { start: &raw const __bss_start as u64 & !(PAGE - 1), end: (&raw const _end as u64).next_multiple_of(PAGE) }
}

/// A program that links us is managed where it says so in code.
#[cfg(not(feature = "preload"))]
fn statics() -> Range {
    NOTHING
}

/// The first memory of ours in `range`.
fn first_own(range: Range) -> Option<Range> {
    own().into_iter().filter(|own| own.overlaps(&range)).min_by_key(|own| own.start)
}

/// True if part of `range` must not be frozen: the program wants it left alone, or it is ours.
pub(crate) fn is_left_alone(table: &Table, range: Range) -> bool {
    table.excludes(range) || first_own(range).is_some()
}

fn is_nursery(addr: u64) -> bool {
    let base = NURSERY.load(Ordering::Relaxed);
    base != 0 && (base..base + NURSERY_LEN).contains(&addr)
}

/// A word of its own page, 1 in the process that made it; the kernel wipes it in a child, by whatever call that was forked.
/// 0 before there is one.
#[cfg(feature = "preload")]
static ORIGIN: AtomicU64 = AtomicU64::new(0);

#[cfg(feature = "preload")]
fn origin() -> Option<&'static AtomicU32> {
    match ORIGIN.load(Ordering::Acquire) {
        0 => None,
        // SAFETY: a page that stays mapped, in children too.
        addr => Some(unsafe { &*(addr as *const AtomicU32) }),
    }
}

/// The process whose memory this is, 0 if that is not known.
#[cfg(feature = "preload")]
static PROCESS: AtomicI32 = AtomicI32::new(0);

/// Not the C library's: a child that has this memory may have been made behind that.
#[cfg(feature = "preload")]
fn process() -> i32 {
    // SAFETY: takes nothing.
    unsafe { syscall!(libc::SYS_getpid) }.map_or(0, |pid| pid as i32)
}

/// The memory is the calling process's from here on.
#[cfg(feature = "preload")]
pub(crate) fn mark_process() {
    PROCESS.store(process(), Ordering::Relaxed);
}

/// False in a child that has its parent's memory, as vfork(2) makes them: the agent there is the parent's.
#[cfg(feature = "preload")]
pub(crate) fn is_own_process() -> bool {
    PROCESS.load(Ordering::Relaxed) == process()
}

/// Makes this process known to itself; before it has other threads.
#[cfg(feature = "preload")]
pub(crate) fn mark_origin() {
    mark_process();
    let Ok(page) = mem::Mapping::anonymous(PAGE_SIZE) else { return };
    // SAFETY: changes no bytes of this process.
    if unsafe { mem::advise(page.addr(), PAGE, libc::MADV_WIPEONFORK) }.is_ok() {
        ORIGIN.store(page.addr(), Ordering::Release);
        core::mem::forget(page);
        is_new_child();
    }
}

/// True, once, in a forked child.
#[cfg(feature = "preload")]
pub(crate) fn is_new_child() -> bool {
    origin().is_some_and(|word| word.load(Ordering::Relaxed) == 0 && word.swap(1, Ordering::Relaxed) == 0)
}

/// The next thread rests before it greets: what replaced one may soon be replaced.
pub(crate) static REST: AtomicBool = AtomicBool::new(false);

/// The agent's thread has made the calls with which it starts.
static BEGUN: AtomicBool = AtomicBool::new(false);

/// Starts the agent's thread if it does not run; returns false if it cannot be started.
pub fn start() -> bool {
    if !SHARED.is_configured() || !MAY_START.load(Ordering::Acquire) || ALL_LOCKED.load(Ordering::Acquire) {
        return false;
    }
    match SHARED.phase.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => {
            let started = spawn();
            if !started {
                // A lack that may go away, and that children need not have: they are in another namespace of processes, say.
                let _ = SHARED.phase.compare_exchange(1, 0, Ordering::AcqRel, Ordering::Acquire);
            }
            started
        }
        Err(phase) => phase == 1,
    }
}

/// Waits until the thread that was started is past its start; at most a second.
#[cfg(feature = "preload")]
pub(crate) fn wait_begun() {
    for _ in 0..1000 {
        if SHARED.phase.load(Ordering::Acquire) != 1 || BEGUN.load(Ordering::Acquire) {
            return;
        }
        let _ = pagefold_os::fd::poll(&mut [], 1);
    }
}

/// Asks the agent's thread to leave and waits until it has; merged pages stay as they are.
/// `final_phase` is 0 if it may be started again, 3 if not.
pub fn stop(final_phase: u32) {
    // What is lent comes back first.
    cold::end_lease();
    ask_to_leave();
    // Asked by us, by the frame that we interrupted, or about to end by itself.
    SHARED.thread.wait();
    // Who gave up meanwhile has given up for good.
    let _ = SHARED.phase.fetch_update(Ordering::AcqRel, Ordering::Acquire, |phase| (phase != 3).then_some(final_phase));
}

fn ask_to_leave() {
    if SHARED.phase.compare_exchange(1, 2, Ordering::AcqRel, Ordering::Acquire).is_ok() {
        // SAFETY: wakes who waits on a word of ours.
        let _ = unsafe {
            syscall!(libc::SYS_futex, SHARED.phase.as_ptr(), libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, i32::MAX)
        };
    }
}

/// The range that becomes plain memory before the agent leaves, as start and end; empty if none.
static GIVE_BACK: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

fn give_back() -> Range {
    Range { start: GIVE_BACK[0].load(Ordering::Relaxed), end: GIVE_BACK[1].load(Ordering::Relaxed) }
}

/// As [`stop`], but what `range` shows from the pool is plain memory first, with no write of another thread lost. What that
/// cannot be done for stays as it is.
#[cfg(feature = "preload")]
pub(crate) fn stop_giving_back(range: Range, final_phase: u32) {
    GIVE_BACK[0].store(range.start, Ordering::Relaxed);
    GIVE_BACK[1].store(range.end, Ordering::Relaxed);
    stop(final_phase);
    GIVE_BACK[1].store(0, Ordering::Relaxed);
}

/// Asks the agent's threads to leave, with `range` plain, and does not wait for that. They start again after a [`stop`].
#[cfg(feature = "preload")]
pub(crate) fn ask_to_leave_giving_back(range: Range) {
    GIVE_BACK[0].store(range.start, Ordering::Relaxed);
    GIVE_BACK[1].store(range.end, Ordering::Relaxed);
    cold::ask_end_of_lease();
    ask_to_leave();
}

const STACK_LEN: usize = 256 << 10;

const WATCH_FEATURES: u64 = uffd::FEATURE_PAGEFAULT_FLAG_WP | uffd::FEATURE_WP_ASYNC | uffd::FEATURE_MOVE;

pub(crate) const THREAD_FLAGS: i32 = libc::CLONE_VM
    | libc::CLONE_FS
    | libc::CLONE_SIGHAND
    | libc::CLONE_THREAD
    | libc::CLONE_SYSVSEM
    | libc::CLONE_PARENT_SETTID
    | libc::CLONE_CHILD_CLEARTID;

fn spawn() -> bool {
    BEGUN.store(false, Ordering::Release);
    SHARED.thread.start(thread_main)
}

/// Bytes of the longest path of a thread's file in /proc.
#[cfg(feature = "preload")]
pub(crate) const TASK_PATH_LEN: usize = 48;

/// A thread of ours.
#[derive(Debug)]
pub struct Thread {
    /// Its number; the kernel clears it when the thread is gone.
    id: AtomicI32,
    /// Its stack, which serves the next one.
    stack: AtomicU64,
}

impl Thread {
    pub(crate) const fn new() -> Thread {
        Thread { id: AtomicI32::new(0), stack: AtomicU64::new(0) }
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.id.load(Ordering::Acquire) == 0
    }

    /// Where /proc tells of it; `name` is one of the files there, or empty for the directory. `None` if it is gone.
    #[cfg(feature = "preload")]
    pub(crate) fn path<'a>(&self, name: &[u8], buffer: &'a mut [u8; TASK_PATH_LEN]) -> Option<&'a CStr> {
        let id = self.id.load(Ordering::Acquire).unsigned_abs();
        let mut digits = [0; 10];
        let (mut first, mut rest) = (digits.len(), id);
        while rest > 0 {
            first -= 1;
            digits[first] = b'0' + (rest % 10) as u8;
            rest /= 10;
        }
        let mut at = 0;
        for part in [b"/proc/self/task/", &digits[first..], name, b"\0"] {
            buffer.get_mut(at..at + part.len())?.copy_from_slice(part);
            at += part.len();
        }
        if id == 0 { None } else { CStr::from_bytes_until_nul(buffer).ok() }
    }

    /// In a forked child, which has none of its parent's threads.
    #[cfg(feature = "preload")]
    pub(crate) fn forget(&self) {
        self.id.store(0, Ordering::Relaxed);
    }

    /// Starts it, if the one before is gone; `main` never returns.
    pub(crate) fn start(&self, main: extern "C" fn() -> !) -> bool {
        if !self.is_gone() {
            return false;
        }
        let mut stack = self.stack.load(Ordering::Relaxed);
        if stack == 0 {
            let Ok(fresh) = mem::Mapping::anonymous(STACK_LEN) else { return false };
            stack = fresh.addr();
            core::mem::forget(fresh);
            self.stack.store(stack, Ordering::Relaxed);
        }
        let top = (stack + STACK_LEN as u64) & !15;
        // No signal of the program's may ever be delivered to our thread: it inherits a full mask.
        let all = [u64::MAX];
        let mut before = [0u64];
        // SAFETY: the masks are 8 bytes as the kernel wants them.
        let _ = unsafe { syscall!(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr(), 8) };
        let result = clone_thread(THREAD_FLAGS, top, self.id.as_ptr(), main);
        // SAFETY: restores the caller's mask.
        let _ = unsafe { syscall!(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, before.as_ptr(), 0, 8) };
        result >= 0
    }

    /// Waits until it is gone.
    pub(crate) fn wait(&self) {
        loop {
            let id = self.id.load(Ordering::Acquire);
            if id == 0 {
                return;
            }
            let timeout = libc::timespec { tv_sec: 0, tv_nsec: 10_000_000 };
            // SAFETY: the word outlives the call. The kernel wakes it (shared futex) when the thread ends.
            let _ = unsafe {
                syscall!(libc::SYS_futex, self.id.as_ptr(), libc::FUTEX_WAIT, id, core::ptr::from_ref(&timeout))
            };
        }
    }
}

/// Starts a thread at `main` on the stack that ends at `top`; the kernel keeps its id in `word`.
#[cfg(target_arch = "x86_64")]
fn clone_thread(flags: libc::c_int, top: u64, word: *mut i32, main: extern "C" fn() -> !) -> isize {
    let result: isize;
    // SAFETY: the new thread starts on its own, aligned stack with rax = 0 and calls `main`, which never returns; the
    // parent goes on after the block. The stack is nobody else's until the kernel has cleared `word`.
    unsafe {
        core::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "call r9",
            "ud2",
            "2:",
            inlateout("rax") libc::SYS_clone as isize => result,
            in("rdi") flags as usize, in("rsi") top, in("rdx") word, in("r10") word, in("r8") 0usize,
            in("r9") main as usize,
            lateout("rcx") _, lateout("r11") _,
        );
    }
    result
}

/// As on x86-64.
#[cfg(target_arch = "aarch64")]
fn clone_thread(flags: libc::c_int, top: u64, word: *mut i32, main: extern "C" fn() -> !) -> isize {
    let result: isize;
    // SAFETY: as on x86-64; arm64 takes the child's thread-id word as the fifth argument.
    unsafe {
        core::arch::asm!(
            "svc 0",
            "cbnz x0, 2f",
            "mov x29, xzr",
            "blr x5",
            "brk #1",
            "2:",
            in("x5") main as usize,
            in("x8") libc::SYS_clone, inlateout("x0") flags as isize => result,
            in("x1") top, in("x2") word, in("x3") 0usize, in("x4") word,
        );
    }
    result
}

/// What a thread of ours does first; `name` has 15 bytes at most.
pub(crate) fn begin_thread(name: &CStr) {
    // Give up every descriptor of who started us: our table is our own since the clone.
    // SAFETY: numbers only; nothing of ours is open yet.
    let _ = unsafe { syscall!(libc::SYS_close_range, 0, u32::MAX, 0) };
    // SAFETY: names the thread.
    let _ = unsafe { syscall!(libc::SYS_prctl, libc::PR_SET_NAME, name.as_ptr()) };
}

/// Body of the agent's thread.
extern "C" fn thread_main() -> ! {
    begin_thread(c"pagefold-agent");
    BEGUN.store(true, Ordering::Release);
    // Discards of merged pages must be answered whether there is a daemon or not.
    let mut left: Option<Agent> = None;
    hold_what_is_merged(&mut left);
    // Most processes that begin are soon another program or gone: those with nothing merged yet need not greet.
    let rests = REST.swap(false, Ordering::AcqRel) || SHARED.all.load(Ordering::Relaxed);
    if rests && !SHARED.forked.load(Ordering::Relaxed) {
        wait_or_leave(left.as_ref(), ALL_START_MS);
    }
    if cold::COLD.load(Ordering::Relaxed) {
        cold::run();
    }
    // The daemon shall not see us go before all is given back.
    let mut socket = None;
    while SHARED.phase.load(Ordering::Acquire) == 1 {
        hold_what_is_merged(&mut left);
        match connect(&mut left) {
            Ok((mut agent, fresh)) => {
                let _ = agent.serve(socket.insert(fresh));
                agent.segments = [const { None }; SEGMENTS_HELD];
                left = Some(agent);
            }
            Err(Errno(errno)) => SHARED.error.store(errno, Ordering::Relaxed),
        }
        // The daemon is gone or refused us. What is merged stays merged; a new daemon may come.
        wait_or_leave(left.as_ref(), RECONNECT_MS);
    }
    if SHARED.phase.load(Ordering::Acquire) == 2 && !give_back().is_empty() {
        // Who was asked to leave before it began has merged memory to give back all the same, whether there is a daemon or not.
        if MAY_START.load(Ordering::Acquire) {
            hold_what_is_merged(&mut left);
            if left.is_none()
                && let Ok((agent, fresh)) = connect(&mut left)
            {
                (left, socket) = (Some(agent), Some(fresh));
            }
        }
        left.iter_mut().for_each(Agent::leave_plain);
    }
    // The kernel says that a thread has ended before it closes what that had open, on a busy machine long before; and a range
    // is nobody else's as long as our userfaultfd is open.
    SHARED.holds.store(false, Ordering::Release);
    drop((left, socket));
    exit_thread()
}

pub(crate) fn exit_thread() -> ! {
    loop {
        // SAFETY: ends this thread only; the kernel clears and wakes `SHARED.thread`.
        let _ = unsafe { syscall!(libc::SYS_exit, 0) };
    }
}

/// Ends the calling thread of ours if the program's first thread has ended, and none but ours live on: the process must not
/// live on for us.
pub(crate) fn leave_if_alone() {
    let Ok(file) = Fd::open(c"/proc/self/stat", libc::O_RDONLY, 0) else { return };
    let mut text = [0u8; 512];
    let Ok(got) = file.read(&mut text) else { return };
    let field = |number| text.get(..got).and_then(|text| stat::field(text, number));
    let ours = 1 + usize::from(!SHARED.thread.is_gone()) + usize::from(cold::has_second_thread());
    let alone = |threads: &str| threads.parse() == Ok(ours);
    if field(3) == Some("Z") && field(20).is_some_and(alone) {
        exit_thread();
    }
}

fn wait_or_leave(left: Option<&Agent>, ms: i32) {
    let began = sched::monotonic_ns();
    leave_if_alone();
    while SHARED.phase.load(Ordering::Acquire) == 1 && sched::monotonic_ns() - began < ms as u64 * 1_000_000 {
        let Some(agent) = left else {
            let timeout = libc::timespec { tv_sec: 0, tv_nsec: 20_000_000 };
            // SAFETY: the word outlives the call; [`stop`] wakes us.
            let _ = unsafe {
                syscall!(
                    libc::SYS_futex,
                    SHARED.phase.as_ptr(),
                    libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG,
                    1,
                    core::ptr::from_ref(&timeout)
                )
            };
            continue;
        };
        let fd = agent.hold.fd().raw();
        let _ = pagefold_os::fd::poll(&mut [libc::pollfd { fd, events: libc::POLLIN, revents: 0 }], 20);
        agent.serve_alone();
    }
}

/// Waits until the daemon has answered on `socket`, which may take a while, and answers what waits for `left` meanwhile.
///
/// # Errors
/// `ETIMEDOUT` if it takes its time, or if `phase` is another by now.
pub(crate) fn wait_for_answer(socket: &Fd, left: Option<&Agent>, phase: &AtomicU32) -> Result<()> {
    let (began, at_first) = (sched::monotonic_ns(), phase.load(Ordering::Acquire));
    let limit_ms = ANSWERED_MS[usize::from(at_first != 1)];
    while phase.load(Ordering::Acquire) == at_first && sched::monotonic_ns() - began < limit_ms * 1_000_000 {
        let hold = left.map_or(-1, |agent| agent.hold.fd().raw());
        let mut polls = [socket.raw(), hold].map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
        pagefold_os::fd::poll(&mut polls, 20)?;
        if polls[0].revents != 0 {
            return Ok(());
        }
        if let Some(agent) = left {
            agent.serve_alone();
        }
    }
    Err(Errno(libc::ETIMEDOUT))
}

/// Takes charge, without a daemon yet, of merged pages that nobody looks after: a forked child's, or after an agent that left.
/// One that may not make a userfaultfd gets it from the daemon.
fn hold_what_is_merged(left: &mut Option<Agent>) {
    let held = SHARED.guard.lock(AGENT);
    let none = left.is_some() || SHARED.tables(&held).merged.is_empty();
    drop(held);
    if !none {
        let channel = memfd::create(c"pagefold-alone", CHANNEL_LEN as u64);
        let made = channel.and_then(|channel| {
            memfd::add_seals(&channel, memfd::SEAL_SHRINK)?;
            set_up(channel, open_files()?, uffd::open_device().ok().as_ref(), left)
        });
        *left = made.ok();
    }
}

fn open_files() -> Result<(Fd, Maps)> {
    Ok((Fd::open(c"/proc/thread-self/pagemap", libc::O_RDONLY, 0)?, Maps::open()?))
}

/// Greets the daemon and sets everything up; the socket is the daemon's.
///
/// `left` is what an earlier connection left: its hold is taken over, for merged ranges hang on it.
fn connect(left: &mut Option<Agent>) -> Result<(Agent, Fd)> {
    let len = SHARED.socket_len.load(Ordering::Acquire);
    // SAFETY: written before the thread started.
    let (path, domain) = unsafe { (&(&*SHARED.socket.get())[..len], &*SHARED.domain.get()) };
    let socket = sock::connect_within(path, TAKEN_MS)?;
    let mut hello = Packet::new(Op::Hello);
    hello.a = if SHARED.all.load(Ordering::Relaxed) { wire::HELLO_ALL } else { 0 };
    if SHARED.forked.load(Ordering::Relaxed) {
        hello.a |= wire::HELLO_FORKED;
    }
    let away = cold::is_leased();
    if away {
        hello.a |= wire::HELLO_AWAY;
    }
    hello.text = *domain;
    let files = open_files()?;
    sock::set_timeout(&socket, ANSWERED_MS[0])?;
    sock::send(&socket, hello.bytes(), &[files.0.raw()])?;
    wait_for_answer(&socket, left.as_ref(), &SHARED.phase)?;
    let mut buffer = [0u8; size_of::<Packet>()];
    let (got, mut fds) = sock::receive(&socket, &mut buffer, 0)?;
    let welcome = Packet::parse(&buffer[..got]).filter(|packet| packet.op == Op::Welcome as u32);
    let welcome = welcome.ok_or(Errno(libc::EPROTO))?;
    if welcome.status != 0 {
        return Err(Errno(welcome.status));
    }
    let channel_fd = fds.take(0).ok_or(Errno(libc::EPROTO))?;
    let device = fds.take(1).or_else(|| uffd::open_device().ok());
    match set_up(channel_fd, files, device.as_ref(), left) {
        Ok(mut agent) => {
            (agent.device, agent.away) = (device, away);
            // From now on we wait for requests as long as it takes.
            let told =
                sock::send(&socket, Packet::new(Op::Ready).bytes(), &[]).and_then(|()| sock::set_timeout(&socket, 0));
            if let Err(errno) = told {
                // Its hold is the one that merged ranges hang on.
                *left = Some(agent);
                return Err(errno);
            }
            Ok((agent, socket))
        }
        Err(errno) => {
            let mut ready = Packet::new(Op::Ready);
            ready.status = errno.0;
            let told = sock::send(&socket, ready.bytes(), &[]);
            drop(socket);
            if left.is_none() && is_lasting(errno) {
                give_up();
            } else {
                wait_or_leave(left.as_ref(), REFUSED_MS);
            }
            told.and(Err(errno))
        }
    }
}

/// The agent ends for good. Who has asked it to leave meanwhile gets what he asked for first.
fn give_up() {
    let _ = SHARED.phase.compare_exchange(1, 3, Ordering::AcqRel, Ordering::Acquire);
}

/// Whether a lack will not go away by itself. Memory, descriptors and the like come back.
fn is_lasting(errno: Errno) -> bool {
    matches!(errno.0, libc::EPERM | libc::EACCES | libc::ENOSYS | libc::EINVAL | libc::ENOTTY | libc::EOPNOTSUPP)
}

fn set_up(channel_fd: Fd, (pagemap, maps): (Fd, Maps), device: Option<&Fd>, left: &mut Option<Agent>) -> Result<Agent> {
    let (len, _) = memfd::len_and_inode(channel_fd.raw())?;
    if len < CHANNEL_LEN as u64 || memfd::seals(&channel_fd)? & memfd::SEAL_SHRINK == 0 {
        return Err(Errno(libc::EPROTO));
    }
    let channel =
        mem::Mapping::file(channel_fd.raw(), 0, CHANNEL_LEN, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED)?;
    cold::mark_own(&channel);
    let hold_features = WATCH_FEATURES
        | uffd::FEATURE_WP_HUGETLBFS_SHMEM
        | uffd::FEATURE_EVENT_REMOVE
        | uffd::FEATURE_MISSING_SHMEM
        | uffd::FEATURE_MINOR_SHMEM;
    let watch = Uffd::new(device, WATCH_FEATURES)?;
    let new = if left.is_none() { Some(Uffd::new(device, hold_features)?) } else { None };
    let staging = mem::Mapping::anonymous(FREEZE_PAGES_MAX * PAGE_SIZE)?;
    // What a child shares cannot be moved back.
    cold::mark_own(&staging);
    watch_staging(&watch, &staging)?;
    STAGING.store(staging.addr(), Ordering::Relaxed);
    let heap = Heap::new(device)?;
    let is_new = new.is_some();
    // From here on nothing fails: merged ranges hang on it.
    let hold = new.or_else(|| left.take().map(|agent| agent.hold)).ok_or(Errno(libc::EBADF))?;
    let agent = Agent {
        channel_fd,
        channel,
        watch,
        hold,
        heap,
        device: None,
        away: false,
        staging,
        nursery: None,
        segments: [const { None }; SEGMENTS_HELD],
        pagemap,
        maps,
        cpus: sched::Cpus::of_thread().unwrap_or(sched::Cpus::NONE),
        cpu: None,
        voids: [false; FREEZE_PAGES_MAX],
    };
    agent.hold_merged(is_new);
    dump_merged_pages();
    Ok(agent)
}

/// A move wants its target to be ours. Not in missing mode: who touches all memory (mlockall(2), a debugger) would wait there
/// for ever.
fn watch_staging(watch: &Uffd, staging: &mem::Mapping) -> Result<()> {
    watch.register(Range::pages_from(staging.addr(), FREEZE_PAGES_MAX as u64), uffd::MODE_WP)
}

/// Watches plain memory, unless it is the cold tier's for a while: its own descriptor has it then.
///
/// # Errors
/// As the kernel says; something other than plain memory lies there.
pub(crate) fn watch_plain(watch: &Uffd, range: Range) -> Result<()> {
    if cold::is_leased() { Err(Errno(libc::EBUSY)) } else { watch.register(range, uffd::MODE_WP) }
}

/// Core dumps must contain merged pages: to the kernel they are private file pages, which it leaves out by default.
fn dump_merged_pages() {
    // A thread's directory has no such file; where the first thread has ended this was done before, or is not done.
    const PATH: &CStr = c"/proc/self/coredump_filter";
    let Ok(file) = Fd::open(PATH, libc::O_RDWR, 0) else { return };
    let mut text = [0u8; 16];
    let Ok(got) = file.read(&mut text) else { return };
    let digits = text[..got].iter().map_while(|&b| (b as char).to_digit(16));
    let filter = digits.fold(0u32, |all, digit| all << 4 | digit) | 1 << 2;
    let mut out = *b"0x00000000";
    for (index, byte) in out[2..].iter_mut().enumerate() {
        let nibble = (filter >> (28 - 4 * index)) & 15;
        *byte = b"0123456789abcdef"[nibble as usize];
    }
    let _ = file.write(&out);
}

impl Agent {
    /// Answers requests until the daemon is gone or we are asked to leave.
    fn serve(&mut self, socket: &Fd) -> Result<()> {
        let mut looked = 0;
        let (mut busy, mut told) = (0, 0);
        loop {
            look_around(&mut looked, AGENT, Some(&self.watch));
            let now = sched::monotonic_ns();
            let pause_ms = if now - busy < BUSY_NS { PAUSES_MS[0] } else { PAUSES_MS[1] };
            let mut polls = [
                libc::pollfd { fd: socket.raw(), events: libc::POLLIN, revents: 0 },
                libc::pollfd { fd: self.hold.fd().raw(), events: libc::POLLIN, revents: 0 },
            ];
            let ready = pagefold_os::fd::poll(&mut polls, pause_ms)?;
            let generation = SHARED.generation.load(Ordering::Acquire);
            self.counters().generation.store(generation, Ordering::Release);
            if ready != 0 || generation != told {
                (busy, told) = (now, generation);
            }
            // A lease that ended by itself: the daemon learns it from the next greeting.
            if SHARED.phase.load(Ordering::Acquire) != 1 || self.away && !cold::is_leased() {
                return Ok(());
            }
            if ready == 0 {
                continue;
            }
            if polls[1].revents != 0 {
                // With the guard nobody maps something else where a discard is being answered.
                let _held = self.lock_guard();
                serve_events(&self.hold, &self.maps, &self.watch, self.counters());
            }
            if polls[0].revents == 0 {
                continue;
            }
            let mut buffer = [0u8; size_of::<Packet>()];
            let (got, mut fds) = sock::receive(socket, &mut buffer, libc::MSG_DONTWAIT)?;
            let Some(request) = Packet::parse(&buffer[..got]) else { return Err(Errno(libc::EPROTO)) };
            self.follow(request.cpu);
            let mut answer = Packet { status: 0, count: 0, ..request };
            if request.op == Op::Leave as u32 {
                give_up();
                return sock::send(socket, answer.bytes(), &[]);
            }
            match self.answer(&request, &mut fds) {
                Ok(count) => answer.count = count as u64,
                Err(Errno(errno)) => answer.status = errno,
            }
            self.counters().cpu_ns.store(sched::thread_cpu_ns(), Ordering::Relaxed);
            sock::send(socket, answer.bytes(), &[])?;
        }
    }

    /// Runs where the daemon's worker runs, if the program may: it waits for the answer, so its processor is free.
    fn follow(&mut self, cpu: u64) {
        let Some(cpu) = cpu.checked_sub(1).filter(|_| MAY_FOLLOW.load(Ordering::Relaxed)) else { return };
        if self.cpu != Some(cpu) && self.cpus.contains(cpu) {
            self.cpu = Some(cpu);
            let _ = sched::Cpus::one(cpu).map(|one| one.bind_thread());
        }
    }

    fn answer(&mut self, request: &Packet, fds: &mut sock::Fds) -> Result<usize> {
        let count = (request.count as usize).min(LIST_MAX);
        const REGIONS: u32 = Op::Regions as u32;
        const WATCH: u32 = Op::Watch as u32;
        const FETCH: u32 = Op::Fetch as u32;
        const REMAP: u32 = Op::Remap as u32;
        const HEAL: u32 = Op::Heal as u32;
        const FORGET: u32 = Op::Forget as u32;
        const PART: u32 = Op::Part as u32;
        match request.op {
            REGIONS => self.regions(request.a == 1, request.b),
            WATCH => {
                for index in 0..count {
                    let range: Range = self.input(index);
                    let status = watch_plain(&self.watch, range).map_or_else(|errno| errno.0, |()| 0);
                    self.output(index, status);
                }
                Ok(count)
            }
            FETCH => self.fetch(count),
            PART => self.part(request.a == 1).map(|()| 0),
            REMAP => {
                // In any case: the daemon does not bring them again.
                self.take_segments(request.a, fds);
                if cold::is_leased() { Err(Errno(libc::EBUSY)) } else { self.remap(count) }
            }
            HEAL => {
                for index in 0..count {
                    let range: Range = self.input(index);
                    let status = self.heal(range).map_or_else(|errno| errno.0, |()| 0);
                    self.output(index, status);
                }
                Ok(count)
            }
            FORGET => {
                for index in 0..count {
                    let id: u32 = self.input(index);
                    let place = &mut self.segments[id as usize % SEGMENTS_HELD];
                    if place.as_ref().is_some_and(|held| held.id == id) {
                        *place = None;
                    }
                }
                Ok(count)
            }
            _ => Err(Errno(libc::ENOSYS)),
        }
    }

    /// Leaves the plain memory to the cold tier, which a second thread is the client of, or asks for it back. The thread tells
    /// when it is ours again, by changing the generation.
    fn part(&mut self, away: bool) -> Result<()> {
        if !away {
            self.away = false;
            cold::ask_end_of_lease();
            return Ok(());
        }
        if !MAY_START.load(Ordering::Acquire) {
            return Err(Errno(libc::EPERM));
        }
        cold::lease(|| {
            // Watches nothing: the kernel takes a range from one descriptor only.
            self.watch = Uffd::new(self.device.as_ref(), WATCH_FEATURES)?;
            watch_staging(&self.watch, &self.staging)
        })
    }

    /// Gives back what [`stop_giving_back`] asked for. Merges nothing any more.
    fn leave_plain(&mut self) {
        let mut rest = give_back();
        loop {
            // One by one: healing asks the same file.
            let mut first = NOTHING;
            let found = self.maps.pools(rest, |part, _| {
                first = part;
                true
            });
            if found != Ok(true) {
                return;
            }
            for start in (first.start..first.end).step_by(FREEZE_PAGES_MAX * PAGE_SIZE) {
                let end = first.end.min(start + FREEZE_PAGES_MAX as u64 * PAGE);
                let _ = self.heal(Range { start, end });
            }
            rest.start = first.end;
        }
    }

    /// Splits the list of pieces into spans (neighbours with one `flags` number) and merges them one by one.
    fn remap(&mut self, count: usize) -> Result<usize> {
        let mut pieces = [Piece::default(); FREEZE_PAGES_MAX];
        let mut outcomes = [Outcome::default(); FREEZE_PAGES_MAX];
        let mut at = 0;
        while at < count {
            let first: Piece = self.input(at);
            let mut len = 0;
            while at + len < count && len < pieces.len() {
                let piece: Piece = self.input(at + len);
                if piece.flags != first.flags {
                    break;
                }
                pieces[len] = piece;
                len += 1;
            }
            let ascending = pieces[..len].windows(2).all(|pair| {
                pair[0].addr + u64::from(pair[0].pages) * PAGE <= pair[1].addr && pair[0].pages > 0 && pair[1].pages > 0
            });
            if ascending {
                self.remap_span(&pieces[..len], &mut outcomes[..len]);
            } else {
                outcomes[..len].fill(Outcome { merged: 0, why: wire::Why::NotPlain as u32 });
            }
            for (index, outcome) in outcomes[..len].iter().enumerate() {
                self.output(at + index, *outcome);
            }
            at += len;
        }
        Ok(count)
    }

    /// Copies runs of pages to the channel by pwrite(2): the kernel reads them, so a page that is gone is an
    /// error here and not a fault in the program.
    fn fetch(&mut self, count: usize) -> Result<usize> {
        let mut room = FETCH_PAGES_MAX as u64;
        let mut to = CHANNEL_PAGES as u64;
        for index in 0..count {
            let range: Range = self.input(index);
            let pages = range.pages().min(room);
            let mut copied = 0u64;
            while copied < pages * PAGE {
                // SAFETY: the kernel reads from the program's memory and reports what it cannot read.
                let wrote = unsafe {
                    syscall!(
                        libc::SYS_pwrite64,
                        self.channel_fd.raw(),
                        range.start + copied,
                        pages * PAGE - copied,
                        to + copied
                    )
                };
                match wrote {
                    Ok(0) | Err(_) => break,
                    Ok(bytes) => copied += bytes as u64,
                }
            }
            to += pages * PAGE;
            room -= pages;
            self.output(index, copied / PAGE);
        }
        Ok(count)
    }

    /// Lists the managed ranges, or (`pool`) the mappings of pool files from address `from` on.
    fn regions(&mut self, pool: bool, from: u64) -> Result<usize> {
        // Reading the table needs the guard, reading maps does not; both are short.
        let held = self.lock_guard();
        let (channel, table) = (self.channel.addr(), SHARED.tables(&held).table);
        // Merged and plain memory lie in few ranges together.
        let (what, from) = if pool { (Listed::Pool, from) } else { (Listed::Managed, 0) };
        list(&self.maps, table, what, from, |index, entry| write_out(channel, index, entry))
    }

    fn take_segments(&mut self, ids: u64, fds: &mut sock::Fds) {
        // The ids of the descriptors stand at the end of the input list.
        for index in 0..(ids as usize).min(fds.len()).min(wire::SEGMENTS_PER_REQUEST) {
            let id: u32 = self.input(LIST_MAX - 1 - index);
            // Whatever becomes of the new one: what has the place may be an older segment of the same id.
            self.segments[id as usize % SEGMENTS_HELD] = None;
            let Some(fd) = fds.take(index) else { continue };
            let Ok((len, _)) = memfd::len_and_inode(fd.raw()) else { continue };
            // A file that can shrink could kill the program by SIGBUS: refuse it.
            let sealed = memfd::seals(&fd).is_ok_and(|seals| {
                seals & memfd::SEAL_SHRINK != 0 && seals & (memfd::SEAL_WRITE | memfd::SEAL_FUTURE_WRITE) != 0
            });
            if !sealed {
                continue;
            }
            let flags = libc::MAP_SHARED;
            let Ok(map) = mem::Mapping::file(fd.raw(), 0, len as usize, libc::PROT_READ, flags) else { continue };
            cold::mark_own(&map);
            self.segments[id as usize % SEGMENTS_HELD] = Some(Segment { id, fd, map, pages: (len / PAGE) as u32 });
        }
    }

    /// Where the slots `slot..slot + pages` of `segment` can be read, if we hold it.
    pub(crate) fn slots(&self, segment: u32, slot: u32, pages: u32) -> Option<*const Page> {
        let held = self.segments[segment as usize % SEGMENTS_HELD].as_ref().filter(|held| held.id == segment)?;
        let end = slot.checked_add(pages)?;
        (end <= held.pages).then(|| (held.map.addr() + u64::from(slot) * PAGE) as *const Page)
    }

    pub(crate) fn segment_fd(&self, segment: u32) -> Option<i32> {
        let held = self.segments[segment as usize % SEGMENTS_HELD].as_ref().filter(|held| held.id == segment)?;
        Some(held.fd.raw())
    }

    /// Takes the guard; serves discards while waiting, for their callers may hold it.
    pub(crate) fn lock_guard(&self) -> Held<'static> {
        let counters = self.counters();
        SHARED.guard.lock_serving(AGENT, || serve_events(&self.hold, &self.maps, &self.watch, counters))
    }

    /// Puts the attributes that the program gave to `range` onto the mapping that replaced it: `plain` memory, or the pool's.
    pub(crate) fn keep_attributes(&self, range: Range, plain: bool) {
        let held = SHARED.guard.lock(AGENT);
        keep_attributes(range, SHARED.tables(&held).table, plain);
    }

    /// Watches merged pages for discards that no interposed call shows, and for writes.
    pub(crate) fn hold_pool(&self, range: Range) {
        // Missing mode never triggers, for every page of the file exists. Minor mode does for pages that are not mapped:
        // after a discard, or when the kernel took them back.
        let _ = self.hold.register(range, uffd::MODE_MISSING | uffd::MODE_MINOR | uffd::MODE_WP);
        // Only what is the file's page at that very moment: a private copy (the page was written already) stays as it is,
        // so that the daemon's next look finds it.
        let query = pagemap::Query { all_of: pagemap::MERGED, flags: pagemap::PROTECT, ..Default::default() };
        let _ = pagemap::protect(&self.pagemap, range, query);
    }

    /// Takes charge of the merged pages that are there already: an earlier agent's, or a parent's.
    fn hold_merged(&self, is_new: bool) {
        let _held = self.lock_guard();
        let everything = Range { start: 0, end: u64::MAX };
        let _ = self.maps.pools(everything, |part, _| {
            // Where a hold that was taken over has it already, a page that is not mapped would have us wait for ourselves.
            if is_new {
                // SAFETY: reads the pages in; a page that is not mapped would only cost a fault that we answer.
                let _ = unsafe { mem::advise(part.start, part.len(), libc::MADV_POPULATE_READ) };
            }
            self.hold_pool(part);
            self.remember_merged(part);
            false
        });
        SHARED.holds.store(true, Ordering::Release);
    }

    /// True if the program has asked for part of `range` to be left alone, perhaps after the daemon planned.
    pub(crate) fn is_excluded(&self, range: Range) -> bool {
        let held = SHARED.guard.lock(AGENT);
        is_left_alone(SHARED.tables(&held).table, range)
    }

    /// Answers what waits while there is no daemon.
    fn serve_alone(&self) {
        while let Ok(Some(event)) = self.hold.read_event() {
            serve_event(&self.hold, &self.maps, None, None, event);
        }
    }

    /// True if the program has locked part of `range`.
    pub(crate) fn is_locked(&self, range: Range) -> bool {
        let held = SHARED.guard.lock(AGENT);
        SHARED.tables(&held).table.first_locked(range).is_some()
    }

    /// Answers the faults and discards that wait.
    pub(crate) fn serve_event(&self, event: uffd::Event) {
        serve_event(&self.hold, &self.maps, Some(&self.watch), Some(self.counters()), event);
    }

    pub(crate) fn remember_merged(&self, range: Range) {
        let held = SHARED.guard.lock(AGENT);
        SHARED.tables(&held).merged.add(range);
    }

    /// What the program may do in `range`, if that lies in one mapping of a pool file.
    pub(crate) fn rights_of_pool(&self, range: Range) -> Option<i32> {
        let mut rights = None;
        let visit = |part: Range, prot| {
            rights = (part == range).then_some(prot);
            true
        };
        self.maps.pools(range, visit).ok().and(rights)
    }

    /// Where memory that is given back is made, see [`Agent::heal`].
    pub(crate) fn nursery(&mut self) -> Option<u64> {
        if self.nursery.is_none() {
            self.nursery = Some(self.find_nursery().ok());
        }
        self.nursery.flatten()
    }

    fn find_nursery(&self) -> Result<u64> {
        let mut base = NURSERY.load(Ordering::Relaxed);
        if base == 0 {
            // Between two pages that nobody may touch, so that it never joins what lies beside it.
            let (len, flags) = (NURSERY_LEN + 2 * PAGE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
            // SAFETY: the kernel chooses a free range.
            let addr = unsafe { mem::map(0, len, libc::PROT_NONE, flags, -1, 0) }?;
            base = addr + PAGE;
            // SAFETY: the range is ours.
            if let Err(errno) = unsafe { mem::protect(base, NURSERY_LEN, libc::PROT_READ | libc::PROT_WRITE) } {
                // SAFETY: the same range.
                let _ = unsafe { mem::unmap(addr, len) };
                return Err(errno);
            }
            NURSERY.store(base, Ordering::Relaxed);
        }
        // Its pages come by `UFFDIO_COPY` one by one, never as a huge page.
        self.hold.register(Range { start: base, end: base + NURSERY_LEN }, uffd::MODE_MISSING)?;
        Ok(base)
    }

    pub(crate) fn counters(&self) -> &'static Counters {
        // SAFETY: the channel begins with the counters, lives until the process ends or the agent is dropped with
        // no reference left in use, and atomics bear that the daemon writes there too.
        unsafe { &*((self.channel.addr() + CHANNEL_COUNTERS as u64) as *const Counters) }
    }

    /// Entry `index` of the daemon's list, copied.
    fn input<T: Copy>(&self, index: usize) -> T {
        input(self.channel.addr(), index)
    }

    fn output<T: Copy>(&self, index: usize, value: T) {
        write_out(self.channel.addr(), index, value);
    }
}

/// Entry `index` of the list that the daemon wrote to the channel at `channel`, copied.
pub(crate) fn input<T: Copy>(channel: u64, index: usize) -> T {
    assert_entry::<T>();
    let at = channel + (CHANNEL_IN + (index % LIST_MAX) * 32) as u64;
    // SAFETY: inside the channel; T is plain integers. The daemon does not write while we answer, and if it did we
    // would read other integers.
    unsafe { core::ptr::read_volatile(at as *const T) }
}

/// The daemon's socket and the domain's name, padded with zeros.
pub(crate) fn read_settings() -> (&'static [u8], &'static [u8; 64]) {
    let len = SHARED.socket_len.load(Ordering::Acquire);
    // SAFETY: written before the thread started.
    unsafe { (&(&*SHARED.socket.get())[..len], &*SHARED.domain.get()) }
}

/// Lists the managed plain memory from address `from` on to the channel at `channel`, for the cold tier.
pub(crate) fn list_plain(maps: &Maps, channel: u64, from: u64) -> Result<usize> {
    let held = SHARED.guard.lock(COLD_AGENT);
    list(maps, SHARED.tables(&held).table, Listed::Plain, from, |index, entry| write_out(channel, index, entry))
}

/// What our threads do now and then, since `looked`: end if they are the last ones, and take back what the program tracked by
/// a userfaultfd that is closed by now. `probe` is a descriptor of ours.
pub(crate) fn look_around(looked: &mut u64, me: usize, probe: Option<&Uffd>) {
    let now = sched::monotonic_ns();
    if now - *looked < LOOKS_NS {
        return;
    }
    *looked = now;
    leave_if_alone();
    let (Some(held), Some(probe)) = (SHARED.guard.try_lock(me), probe) else { return };
    let table = SHARED.tables(&held).table;
    let mut from = 0;
    while let Some(range) =
        table.entries().iter().find(|(range, note)| note.tracked && range.end > from).map(|one| one.0)
    {
        from = range.end;
        // The kernel takes a range from one descriptor only.
        if probe.register(range, uffd::MODE_WP).is_ok() {
            let _ = probe.unregister(range);
            table.change(range, |note| note.tracked = false);
            SHARED.changed();
        }
    }
}

/// Calls `f` with each managed range of plain memory.
pub(crate) fn for_each_plain(maps: &Maps, mut f: impl FnMut(Range)) {
    let held = SHARED.guard.lock(COLD_AGENT);
    let mut from = 0;
    loop {
        let mut end = from;
        let listed = list(maps, SHARED.tables(&held).table, Listed::Plain, from, |_, entry| {
            end = entry.end;
            f(Range { start: entry.start, end });
        });
        if listed != Ok(LIST_MAX) {
            return;
        }
        from = end;
    }
}

/// What a list holds.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Listed {
    /// The managed ranges, merged or not.
    Managed,
    /// Those of them that are not merged.
    Plain,
    /// The mappings of pool files.
    Pool,
}

/// Lists what [`Listed`] says from address `from` on, at most [`LIST_MAX`] entries.
fn list(maps: &Maps, table: &mut Table, what: Listed, from: u64, put: impl FnMut(usize, RegionEntry)) -> Result<usize> {
    heap::look();
    // Names can be long; a line that does not fit is not one of ours.
    let mut buffer = [0u8; 16 << 10];
    let mut lister = Lister {
        count: 0,
        last: RegionEntry::default(),
        what,
        from,
        all: SHARED.all.load(Ordering::Relaxed),
        memory: Fd::open(c"/proc/thread-self/mem", libc::O_RDONLY, 0).ok(),
        table,
        put,
    };
    maps.for_each(&mut buffer, |map| lister.map(map))?;
    if what != Listed::Pool {
        lister.put_last();
    }
    Ok(lister.count)
}

const fn assert_entry<T>() {
    assert!(size_of::<T>() <= 32);
}

pub(crate) fn write_out<T: Copy>(channel: u64, index: usize, value: T) {
    assert_entry::<T>();
    let at = channel + (CHANNEL_OUT + (index % LIST_MAX) * 32) as u64;
    // SAFETY: inside the channel, aligned to 32 bytes.
    unsafe { core::ptr::write_volatile(at as *mut T, value) }
}

/// Answers what waits: discards of merged pages by raw system calls, and accesses to merged pages that are not mapped.
fn serve_events(hold: &Uffd, maps: &Maps, watch: &Uffd, counters: &Counters) {
    while let Ok(Some(event)) = hold.read_event() {
        serve_event(hold, maps, Some(watch), Some(counters), event);
    }
}

/// Answers one event.
///
/// The pages of a discarded range must read zero, so they become fresh memory. Until that is done nobody sees old bytes:
/// merged memory is watched for pages that are only in the page cache, so who touches a page that the discard has just
/// dropped waits for us, and we read that fault after we answered the discard.
fn serve_event(hold: &Uffd, maps: &Maps, watch: Option<&Uffd>, counters: Option<&Counters>, event: uffd::Event) {
    match event {
        uffd::Event::Remove(range) => {
            if let Some(counters) = counters {
                counters.discards.fetch_add(1, Ordering::Relaxed);
            }
            // Who discards inside an interposed call holds the guard and waits for us: then the table is not ours to read.
            let held = SHARED.guard.try_lock(AGENT);
            let table = held.as_ref().map(|held| &*SHARED.tables(held).table);
            let _ = replace_merged(maps, range, watch, table);
            drop(held);
            let _ = hold.wake(range);
            SHARED.changed();
        }
        uffd::Event::PageFault { addr, .. } => {
            let page = Range::pages_from(addr & !(PAGE - 1), 1);
            // Nobody's memory, touched because all is: by mlockall(2), or a debugger.
            if is_nursery(addr) {
                let _ = hold.zero(page, 0);
            }
            // Whatever else this says (mapped already, another mapping by now, a discard under way), the access tries
            // again and finds out, or comes back to us.
            if hold.map_cached(page, 0).1 == Some(Errno(libc::EINVAL)) {
                // Plain memory, which has nothing cached: held by mistake, and nothing is frozen now. Where something is
                // there already it stays.
                let _ = hold.zero(page, 0);
            }
            let _ = hold.wake(page);
        }
        // Not asked for.
        uffd::Event::Unmap(_) | uffd::Event::Remap { .. } | uffd::Event::Fork(_) | uffd::Event::Other(_) => {}
    }
}

/// Puts the attributes that `table` knows for `range` onto the mapping there, which is `plain` memory or the pool's.
pub(crate) fn keep_attributes(range: Range, table: &Table, plain: bool) {
    let mut at = range.start;
    while at < range.end {
        let (end, note) = table.stretch(at, range.end);
        let wanted = [
            (note.dont_fork, libc::MADV_DONTFORK),
            (note.wipe_on_fork && plain, libc::MADV_WIPEONFORK),
            (note.dont_dump, libc::MADV_DONTDUMP),
            (note.mergeable, libc::MADV_MERGEABLE),
            (note.huge, libc::MADV_HUGEPAGE),
            (note.small && plain, libc::MADV_NOHUGEPAGE),
        ];
        for (set, advice) in wanted {
            if set {
                // SAFETY: these attributes change no content.
                let _ = unsafe { mem::advise(at, end - at, advice) };
            }
        }
        at = end;
    }
}

/// Replaces every pool mapping in `range` by fresh anonymous memory, as a discard of anonymous memory would leave it,
/// with the rights of the old one and the attributes in `table`.
///
/// # Errors
/// If the mappings cannot be read, or the kernel refuses one.
pub fn replace_merged(maps: &Maps, range: Range, watch: Option<&Uffd>, table: Option<&Table>) -> Result<bool> {
    let (mut found, mut failed) = (false, None);
    maps.pools(range, |part, prot| {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
        // SAFETY: the program has declared the content of the range void; the mapping there is ours.
        match unsafe { mem::map(part.start, part.len(), prot, flags, -1, 0) } {
            Ok(_) => {
                if let Some(table) = table {
                    keep_attributes(part, table, true);
                }
                if let Some(watch) = watch {
                    let _ = watch_plain(watch, part);
                }
            }
            Err(errno) => failed = Some(errno),
        }
        found = true;
        false
    })?;
    failed.map_or(Ok(found), Err)
}

/// The process's mappings, in a file that stays good whatever root directory the program moves to.
#[derive(Debug)]
pub struct Maps(Fd);

impl Maps {
    /// Opens the file.
    ///
    /// # Errors
    /// As open(2), where the program's root directory has no /proc or it may have no more descriptors.
    pub fn open() -> Result<Maps> {
        Fd::open(MAPS, libc::O_RDONLY, 0).map(Maps)
    }

    /// Calls `f` with each mapping; a line that is longer than `buffer` is left out.
    ///
    /// # Errors
    /// As read(2).
    pub(crate) fn for_each(&self, buffer: &mut [u8], mut f: impl FnMut(&maps::Map<'_>)) -> Result<()> {
        let mut at = 0;
        maps::for_each_line(
            buffer,
            |out| self.0.read_at(out, at).inspect(|got| at += *got as u64),
            |line| {
                if let Some(map) = maps::parse_line(line) {
                    f(&map);
                }
            },
        )
    }

    /// Calls `f` with the part of each pool mapping that lies in `range`, and what the program may do there, until it says
    /// true; returns whether it did.
    ///
    /// # Errors
    /// As [`for_each`](Self::for_each).
    pub(crate) fn pools(&self, range: Range, mut f: impl FnMut(Range, i32) -> bool) -> Result<bool> {
        // Room for the names of ours: longer ones are left out. The stack may be a small one.
        let mut name = [0u8; 2 * POOL_NAME.len()];
        let mut visit = |map: &maps::Map<'_>| {
            let part = Range { start: map.range.start.max(range.start), end: map.range.end.min(range.end) };
            part.start < part.end && !map.shared && map.name.starts_with(POOL_NAME) && f(part, map.prot)
        };
        // One by one, where the kernel can: there may be a hundred thousand of them, and few in the range.
        let mut from = range.start;
        while from < range.end {
            match maps::file_from(&self.0, from, &mut name) {
                Ok(Some(map)) => {
                    from = map.range.end;
                    if visit(&map) {
                        return Ok(true);
                    }
                }
                Ok(None) => return Ok(false),
                Err(Errno(libc::ENOTTY)) => break,
                Err(errno) => return Err(errno),
            }
        }
        if from >= range.end {
            return Ok(false);
        }
        self.any(visit)
    }

    /// True if `visit` says so of a mapping; those behind are left out.
    #[inline(never)]
    fn any(&self, mut visit: impl FnMut(&maps::Map<'_>) -> bool) -> Result<bool> {
        let mut buffer = [0u8; 8 << 10];
        let mut any = false;
        // The file shows the mappings of the moment each piece is read; changing what was already read is harmless.
        self.for_each(&mut buffer, |map| any = any || visit(map))?;
        Ok(any)
    }
}

/// [`Maps::pools`] for a thread that has no such file open.
pub(crate) fn pool_mappings(range: Range, f: impl FnMut(Range, i32) -> bool) -> Result<bool> {
    Maps::open()?.pools(range, f)
}

/// Decides which mappings are managed, and joins neighbours.
struct Lister<'a, P: FnMut(usize, RegionEntry)> {
    count: usize,
    last: RegionEntry,
    what: Listed,
    from: u64,
    all: bool,
    /// /proc/thread-self/mem, to look at memory that may go away meanwhile.
    memory: Option<Fd>,
    table: &'a mut Table,
    put: P,
}

impl<P: FnMut(usize, RegionEntry)> Lister<'_, P> {
    fn map(&mut self, map: &maps::Map<'_>) {
        let pool = map.name.starts_with(POOL_NAME) && !map.shared;
        if self.what == Listed::Pool {
            if pool && map.range.start >= self.from && self.count < LIST_MAX {
                let slot = map.offset / PAGE;
                (self.put)(
                    self.count,
                    RegionEntry { start: map.range.start, end: map.range.end, inode: map.inode, slot },
                );
                self.count += 1;
            }
            return;
        }
        if pool {
            if self.what == Listed::Managed {
                self.add(map.range);
            }
            return;
        }
        // Looking into the nursery would be a fault.
        if !map.is_plain_anonymous() || is_nursery(map.range.start) {
            return;
        }
        if self.all && map.name == b"[heap]" {
            // The top of the heap comes and goes; leave it.
            let end = map.range.end.saturating_sub(ALL_MIN).max(map.range.start);
            self.noted(Range { start: map.range.start, end }, true);
            self.noted(Range { start: end, end: map.range.end }, false);
            return;
        }
        if self.all && map.range.len() >= ALL_MIN && !self.table.at(map.range.start).seen {
            self.find_blocks(map.range);
        }
        self.noted(map.range, false);
    }

    /// Adds the parts of `range` whose notes say so; parts without a note if `bare`.
    fn noted(&mut self, range: Range, bare: bool) {
        let mut at = range.start;
        while at < range.end {
            let index = self.table.entries().partition_point(|(entry, _)| entry.end <= at);
            let (end, note) = match self.table.entries().get(index) {
                Some((entry, note)) if entry.start <= at => (entry.end.min(range.end), *note),
                Some((entry, _)) => (entry.start.min(range.end), Default::default()),
                None => (range.end, Default::default()),
            };
            if !note.is_excluded() && (note.mergeable || bare || self.all && note.seen) {
                self.add(Range { start: at, end });
            }
            at = end;
        }
    }

    /// Large blocks of the C library's allocator at the start of `range`: each begins with its size and the mark of a
    /// block that was mapped for itself. Their end is seen by the interposed `free`, so they can be managed.
    fn find_blocks(&mut self, range: Range) {
        const MAPPED: u64 = 2;
        let Some(memory) = &self.memory else { return };
        let mut at = range.start;
        while at < range.end {
            let mut head = [0u8; 16];
            if memory.read_at(&mut head, at) != Ok(16) {
                break;
            }
            let before = u64::from_ne_bytes([head[0], head[1], head[2], head[3], head[4], head[5], head[6], head[7]]);
            let size =
                u64::from_ne_bytes([head[8], head[9], head[10], head[11], head[12], head[13], head[14], head[15]]);
            let len = size & !7;
            if before != 0 || size & 7 != MAPPED || len == 0 || len % PAGE != 0 || len > range.end - at {
                break;
            }
            at += len;
        }
        if at > range.start {
            self.table.change(Range { start: range.start, end: at }, |note| note.seen = true);
        }
    }

    /// Adds `range` but for what is ours in it.
    fn add(&mut self, mut range: Range) {
        while let Some(own) = first_own(range) {
            self.join(Range { start: range.start, end: own.start });
            range.start = own.end;
        }
        self.join(range);
    }

    fn join(&mut self, range: Range) {
        let range = Range { start: range.start.max(self.from), end: range.end };
        if range.is_empty() {
            return;
        }
        if self.last.end == range.start && self.last.end != 0 {
            self.last.end = range.end;
        } else {
            self.put_last();
            self.last = RegionEntry { start: range.start, end: range.end, inode: 0, slot: 0 };
        }
    }

    fn put_last(&mut self) {
        if self.last.end > self.last.start && self.count < LIST_MAX {
            (self.put)(self.count, self.last);
            self.count += 1;
        }
    }
}
