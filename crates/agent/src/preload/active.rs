//! Whether the agent follows the calling process: each interposed call asks here first.
//!
//! So a child that was forked unseen learns here that it is one, and a thread does here what its signal handler had to
//! leave. Neither happens in the frame that holds the mapping lock for a fork. And the agent leaves a program here that
//! gives more advice about its memory than the agent can follow.

use super::c_library::me;
use super::credentials;
use super::suspend::{AWAY, START, leave_for_good};
use crate::address_space::discarded_ranges;
use crate::cold;
use crate::live::forget_served;
use crate::process::{is_new_child, mark_process};
use crate::range_attributes::CROWDED;
use crate::runtime::affinity;
use crate::state::{ALL_LOCKED, SHARED};
use core::sync::atomic::{AtomicBool, Ordering};

pub(super) static ACTIVE: AtomicBool = AtomicBool::new(false);

pub(super) fn active() -> bool {
    let active = ACTIVE.load(Ordering::Relaxed);
    // A child that holds the mapping lock is in the middle of a fork that is known.
    if active && !SHARED.mapping_lock.is_held_by(me()) && is_new_child() {
        // Forked by a raw call. Its agent starts with the next memory that wants one.
        begin_child(me());
    }
    if active {
        credentials::renew_if_due();
        leave_if_crowded();
    }
    active
}

/// The agent leaves before the program says more about its memory than can be known.
fn leave_if_crowded() {
    if CROWDED.load(Ordering::Acquire) && SHARED.phase.load(Ordering::Acquire) < 2 {
        leave_for_good();
    }
}

pub(super) fn managed_all() -> bool {
    SHARED.all.load(Ordering::Relaxed)
}

/// In a forked child, in which the frames of `goes_on` go on, or none (0). True if it needs an agent at once: its merged
/// pages do; a child without any may never need it, unless all its memory is managed.
pub(super) fn begin_child(goes_on: usize) -> bool {
    mark_process();
    SHARED.mapping_lock.reset(goes_on);
    AWAY.reset(goes_on);
    START.store(false, Ordering::Relaxed);
    credentials::forget_due();
    cold::after_fork_child();
    discarded_ranges::after_fork_child();
    forget_served();
    affinity::forget();
    SHARED.thread.forget();
    SHARED.holds.store(false, Ordering::Relaxed);
    let phase = SHARED.phase.load(Ordering::Relaxed);
    // What made the agent give up is inherited: a filter, or a lack.
    if phase != 3 {
        SHARED.phase.store(0, Ordering::Relaxed);
    }
    let held = SHARED.mapping_lock.lock(me());
    let tables = SHARED.tables(&held);
    let merged = !tables.merged.is_empty();
    // Locks are not inherited.
    tables.table.change_noted(|note| note.locked = false);
    drop(held);
    ALL_LOCKED.store(false, Ordering::Release);
    SHARED.forked.store(merged, Ordering::Relaxed);
    // Another thread of the parent's may have sent the agent away for a moment.
    phase != 3 && (merged || managed_all())
}
