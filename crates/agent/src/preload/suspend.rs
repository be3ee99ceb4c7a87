//! Suspends the agent and resumes it.
//!
//! One thread at a time: it holds [`AWAY`] from before it asks the agent to leave until the agent is back. It waits for the
//! agent, which may wait for the mapping lock. So a holder of the mapping lock waits for neither, nor does a signal handler
//! that interrupted such a holder ([`is_in_the_way`]). A thread that wants an agent meanwhile leaves a note and does not
//! wait.

use super::c_library::me;
use super::pins;
use super::unmerge::{EVERYTHING, has_merged, unmerge};
use crate::address_space::maps::pool_mappings;
use crate::cold;
use crate::limits::NOTHING;
use crate::live::{ask_to_leave_giving_back, start, stop_giving_back};
use crate::mapping_lock::{MappingLock, MappingLockGuard};
use crate::process::is_own_process;
use crate::state::{MAY_START, SHARED};
use core::sync::atomic::{AtomicBool, Ordering};
use pagefold_os::Range;

/// Held by the thread that suspends the agent, until the agent is back: two threads at a time would each take the other's
/// agent for their own. It is taken before the mapping lock, never by a holder of that: the agent may be waiting for it.
pub(super) static AWAY: MappingLock = MappingLock::new();

/// A thread that could not take [`AWAY`] wants an agent to start.
pub(super) static START: AtomicBool = AtomicBool::new(false);

/// Holds [`AWAY`]. Starts the agent in the end if a thread wanted it meanwhile.
pub(super) struct Away(Option<MappingLockGuard<'static>>);

impl Away {
    pub(super) fn take() -> Away {
        Away(Some(AWAY.lock(me())))
    }

    /// True if this is a handler, which interrupted a frame that has it.
    pub(super) fn is_nested(&self) -> bool {
        self.0.as_ref().is_some_and(MappingLockGuard::is_nested)
    }
}

impl Drop for Away {
    fn drop(&mut self) {
        drop(self.0.take());
        if START.load(Ordering::SeqCst) {
            start_unless_away();
        }
    }
}

/// Returns true inside a signal handler that interrupted a frame holding the mapping lock or [`AWAY`]. Such a handler must
/// not wait for the agent: the agent may itself be waiting for that lock, and both would deadlock.
pub(super) fn is_in_the_way() -> bool {
    SHARED.mapping_lock.is_held_by(me()) || AWAY.is_held_by(me())
}

/// Starts the agent, now, or when the thread that suspends it has made its call. Never waits.
pub(super) fn start_unless_away() {
    // Else it would end with a child that is another program soon.
    if !is_own_process() {
        return;
    }
    START.store(true, Ordering::SeqCst);
    while START.load(Ordering::SeqCst) {
        match AWAY.try_lock(me()) {
            Some(held) if !held.is_nested() => {
                START.store(false, Ordering::SeqCst);
                start();
            }
            // The holder looks once more after it has freed it.
            _ => return,
        }
    }
}

/// Starts the agent now if the program has memory for it.
pub(super) fn wanted() {
    if SHARED.phase.load(Ordering::Relaxed) == 0 {
        start_unless_away();
    }
    SHARED.changed();
}

/// What an agent unshares that leaves with everything, perhaps for good. Where devices may be reading into memory the frames
/// must stay, so the kernel makes that memory private in place. After a filter there may be no agent for what is still the
/// pool's, so then it stays only for registered buffers.
fn all_but_pinned(for_good: bool) -> Range {
    let held = || if for_good { pins::are_registered() } else { pins::may_be_there() };
    if has_merged() && held() { NOTHING } else { EVERYTHING }
}

/// Asks the agent to leave, perhaps for good, and does not wait for it: the caller [`is_in_the_way`].
pub(super) fn ask_to_leave(for_good: bool) {
    ask_to_leave_giving_back(all_but_pinned(for_good));
}

/// As [`stop_giving_back`] for all memory, whatever the program may do there; not if the caller [`is_in_the_way`].
pub(super) fn leave_with_all(final_phase: u32) {
    if !is_own_process() {
        return;
    }
    let _away = Away::take();
    if SHARED.phase.load(Ordering::Acquire) == 3 {
        return;
    }
    if has_merged() {
        // Only the agent can unshare merged memory.
        start();
    }
    stop_giving_back(all_but_pinned(final_phase == 3), final_phase);
    let held = SHARED.mapping_lock.lock(me());
    if SHARED.tables(&held).merged.is_empty() {
        return;
    }
    // What the agent did not give back. Others may be writing there: then the kernel makes the copies, in mappings that are
    // the pool's still.
    if unmerge(EVERYTHING).is_ok() && pool_mappings(EVERYTHING, |_, _| true) == Ok(false) {
        SHARED.tables(&held).merged.clear();
    }
}

/// The agent leaves, for good, and merged pages become the program's own: it could not look after them any more.
pub(super) fn leave_for_good() {
    if is_own_process() && is_in_the_way() {
        // It is asked for, and does not come back.
        cold::start_standby();
        MAY_START.store(false, Ordering::Release);
        return ask_to_leave(true);
    }
    leave_with_all(3);
}
