//! How the agent's thread begins, is asked to leave, and ends.
//!
//! Its phase is one word: 0 not started, 1 running, 2 asked to leave, 3 given up for good. A thread that asks it to leave
//! may have a range unshared first. Other merged memory stays as it is, and a thread that is started later takes charge of
//! it.
//!
//! The agent's thread may wait for the mapping lock: a holder of that lock must not wait for its end.

use super::handshake::{adopt_merged_ranges, connect, wait_or_leave};
use super::leftover::take_back;
use super::session::Agent;
#[cfg(feature = "preload")]
use super::session::WAKEUP;
use crate::attached;
use crate::cold;
use crate::runtime::affinity;
use crate::runtime::thread::{begin_thread, exit_thread};
use crate::state::{AGENT, ALL_LOCKED, ATTACHED, MAY_START, SHARED};
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use pagefold_os::raw::Errno;
#[cfg(feature = "preload")]
use pagefold_os::syscall;
use pagefold_os::{PAGE_SIZE, Range};
use pagefold_protocol::message::FREEZE_PAGES_MAX;

const PAGE: u64 = PAGE_SIZE as u64;

/// How long the agent waits before it tries to reach a daemon that is gone, in milliseconds.
const RECONNECT_MS: i32 = 500;

/// Tries to reach a daemon after which the agent closes the segments that the program shows no more: about a minute.
const LOOK_TRIES: u32 = 120;

/// Age that a process must have before its agent connects if all its memory is managed, in milliseconds.
const ALL_START_MS: i32 = 60;

/// The next thread rests before it greets: what replaced one may soon be replaced.
pub(crate) static REST: AtomicBool = AtomicBool::new(false);

/// The agent's thread has made the calls with which it starts.
static BEGUN: AtomicBool = AtomicBool::new(false);

/// Starts the agent's thread if it does not run; returns false if it cannot be started.
pub(crate) fn start() -> bool {
    if !SHARED.is_configured() || !MAY_START.load(Ordering::Acquire) || ALL_LOCKED.load(Ordering::Acquire) {
        return false;
    }
    match SHARED.phase.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => {
            let started = spawn();
            if !started {
                not_started();
            }
            started
        }
        Err(phase) => phase == 1,
    }
}

/// For a lack that may go away, and that children need not have: they are in another namespace of processes, say.
fn not_started() {
    let _ = SHARED.phase.compare_exchange(1, 0, Ordering::AcqRel, Ordering::Acquire);
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
#[cfg(feature = "preload")]
pub(crate) fn stop(final_phase: u32) {
    // What is lent comes back first.
    cold::end_loan(|| ());
    ask_to_leave();
    // Whichever the thread waits for.
    WAKEUP.wake();
    cold::WAKEUP.wake();
    // Asked by us, by the frame that we interrupted, or about to end by itself.
    SHARED.thread.wait();
    // An agent that gave up meanwhile has given up for good.
    let _ = SHARED.phase.fetch_update(Ordering::AcqRel, Ordering::Acquire, |phase| (phase != 3).then_some(final_phase));
}

#[cfg(feature = "preload")]
fn ask_to_leave() {
    if SHARED.phase.compare_exchange(1, 2, Ordering::AcqRel, Ordering::Acquire).is_ok() {
        // SAFETY: a static word; the call wakes its waiters.
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
    cold::ask_end_of_loan();
    ask_to_leave();
}

fn spawn() -> bool {
    BEGUN.store(false, Ordering::Release);
    SHARED.thread.start(thread_main)
}

/// Body of the agent's thread.
extern "C" fn thread_main() -> ! {
    affinity::forget();
    let apart = begin_thread(c"pagefold-agent");
    if !apart {
        not_started();
    }
    BEGUN.store(true, Ordering::Release);
    if !apart {
        exit_thread();
    }
    run()
}

/// The agent's thread in a program that it entered; it has its descriptors already.
#[cfg(feature = "attached")]
pub(crate) fn entered() -> ! {
    SHARED.thread.adopt();
    SHARED.phase.store(1, Ordering::Release);
    run()
}

/// Serves daemons, one after the other, until the agent is asked to leave.
fn run() -> ! {
    // Discards of merged pages must be answered whether there is a daemon or not.
    let mut left: Option<Agent> = None;
    adopt_merged_ranges(&mut left);
    // Most processes that begin are soon another program or gone: those with nothing merged yet need not greet.
    let rests = REST.swap(false, Ordering::AcqRel) || SHARED.all.load(Ordering::Relaxed);
    if rests && !ATTACHED && !SHARED.forked.load(Ordering::Relaxed) {
        wait_or_leave(left.as_ref(), ALL_START_MS);
    }
    if cold::COLD.load(Ordering::Relaxed) {
        cold::run();
        attached::leave();
    }
    // The daemon shall not see us go before all is given back.
    let mut socket = None;
    let mut tries = 0u32;
    while SHARED.phase.load(Ordering::Acquire) == 1 {
        adopt_merged_ranges(&mut left);
        match connect(&mut left) {
            Ok((mut agent, fresh)) => {
                let _ = agent.serve(socket.insert(fresh));
                agent.affinity.leave();
                agent.keep_segments();
                left = Some(agent);
                tries = 0;
            }
            Err(Errno(errno)) => SHARED.error.store(errno, Ordering::Relaxed),
        }
        // The daemon is gone or refused us. What is merged stays merged; a new daemon may come.
        wait_or_leave(left.as_ref(), RECONNECT_MS);
        tries += 1;
        if tries.is_multiple_of(LOOK_TRIES)
            && let Some(agent) = &mut left
        {
            agent.keep_segments();
        }
    }
    // Threads that have woken this one need not wait for the work that follows.
    left.iter().for_each(Agent::serve_alone);
    if ATTACHED {
        // The thread of a loan runs in the memory that this one is about to unmap, and may wait for an answer of this one.
        cold::end_loan(|| left.iter().for_each(Agent::serve_alone));
    }
    if SHARED.phase.load(Ordering::Acquire) == 2 && !give_back().is_empty() {
        // An agent that is asked to leave before it began unshares merged memory all the same, whether there is a daemon or
        // not.
        if MAY_START.load(Ordering::Acquire) {
            adopt_merged_ranges(&mut left);
            if left.is_none()
                && let Ok((agent, fresh)) = connect(&mut left)
            {
                (left, socket) = (Some(agent), Some(fresh));
            }
        }
        left.iter_mut().for_each(Agent::unshare_before_leaving);
        take_back(give_back(), || left.as_ref().map_or_else(|| SHARED.mapping_lock.lock(AGENT), Agent::lock_mappings));
    }
    left.iter().for_each(Agent::fill_discarded);
    // The kernel reports the end of a thread before it closes that thread's descriptors, on a busy machine long before; and
    // no other descriptor can register a range as long as this userfaultfd is open.
    SHARED.holds.store(false, Ordering::Release);
    // Discards by threads that still saw `holds` set.
    left.iter().for_each(Agent::fill_discarded);
    // And what attributes are owed for that.
    left.iter().for_each(|agent| drop(agent.lock_mappings()));
    drop((left, socket));
    attached::leave()
}

impl Agent {
    /// Gives back what [`stop_giving_back`] asked for. Merges nothing any more.
    fn unshare_before_leaving(&mut self) {
        let mut rest = give_back();
        while let Some(first) = self.maps.first_pool(rest) {
            for start in (first.start..first.end).step_by(FREEZE_PAGES_MAX * PAGE_SIZE) {
                let end = first.end.min(start + FREEZE_PAGES_MAX as u64 * PAGE);
                let _ = self.unshare(Range { start, end });
            }
            rest.start = first.end;
        }
    }
}
