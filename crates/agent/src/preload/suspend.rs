//! Sends the agent away and has it back.
//!
//! One thread at a time: it has [`AWAY`] from before the agent is asked to leave until that is back, and waits for the agent,
//! which may wait for the guard. So nobody waits for either who holds the guard, nor a signal handler whose frame does
//! ([`is_in_the_way`]). Who wants an agent meanwhile says so and does not wait.

use super::c_library::me;
use super::pins;
use super::unmerge::{EVERYTHING, has_merged, unmerge};
use crate::address_space::maps::pool_mappings;
use crate::cold;
use crate::limits::NOTHING;
use crate::live::{ask_to_leave_giving_back, start, stop_giving_back};
use crate::mapping_lock::{Guard, Held};
use crate::process::is_own_process;
use crate::state::{MAY_START, SHARED};
use core::sync::atomic::{AtomicBool, Ordering};
use pagefold_os::Range;

/// Held by the thread that sends the agent away, until that is back: two at a time would each take the other's agent for its
/// own. It is taken before the guard, never by who holds that: the agent may be waiting for the guard.
pub(super) static AWAY: Guard = Guard::new();

/// Somebody wants an agent to start that could not take [`AWAY`].
pub(super) static START: AtomicBool = AtomicBool::new(false);

/// Has [`AWAY`]. Starts the agent in the end if somebody wanted it meanwhile.
pub(super) struct Away(Option<Held<'static>>);

impl Away {
    pub(super) fn take() -> Away {
        Away(Some(AWAY.lock(me())))
    }

    /// True if this is a handler, which interrupted a frame that has it.
    pub(super) fn is_nested(&self) -> bool {
        self.0.as_ref().is_some_and(Held::is_nested)
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

/// True if this is a handler, which interrupted a frame that the agent, or who waits for that, may be waiting for: who waited
/// for the agent here would wait for ever.
pub(super) fn is_in_the_way() -> bool {
    SHARED.guard.is_held_by(me()) || AWAY.is_held_by(me())
}

/// Starts the agent, now or when whoever has sent it away has made his call. Never waits.
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
            // Who holds it looks once more when it has let go.
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

/// What an agent that leaves with all, perhaps for good, gives back. Where devices may be reading into memory the frames stay, so
/// that is made the program's own where it is, by the kernel. Behind a filter nobody may be able to look after what is the pool's
/// still, so then it stays only for buffers that are registered.
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
        // Nobody else can give back what is merged.
        start();
    }
    stop_giving_back(all_but_pinned(final_phase == 3), final_phase);
    let held = SHARED.guard.lock(me());
    if SHARED.tables(&held).merged.is_empty() {
        return;
    }
    // What the agent did not give back. Others may be writing there: then the kernel makes the copies, in mappings that are the
    // pool's still.
    if unmerge(EVERYTHING).is_ok() && pool_mappings(EVERYTHING, |_, _| true) == Ok(false) {
        SHARED.tables(&held).merged.clear();
    }
}

/// The agent leaves, for good, and merged pages become the program's own: it could not look after them any more.
pub(super) fn leave_for_good() {
    if is_own_process() && is_in_the_way() {
        // It is asked for, and does not come back.
        cold::stand_by();
        MAY_START.store(false, Ordering::Release);
        return ask_to_leave(true);
    }
    leave_with_all(3);
}
