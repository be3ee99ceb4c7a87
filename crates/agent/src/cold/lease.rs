//! Who has the plain memory of a client that is merged live.
//!
//! A client that is parked becomes a client of the tier as well: a second thread then does what the only one of a cold client
//! does, for the plain memory, which the other thread leaves alone meanwhile. What is merged stays merged. Here is what both
//! threads and the program's ask; the lease begins and ends in `serve`.
//!
//! The memory is the first thread's again only when the word says 0: who asks for the end has it no sooner.

use super::back::BRINGER;
use crate::thread::Thread;
use core::sync::atomic::{AtomicU32, Ordering};

/// The thread of a lease.
pub(super) static SECOND: Thread = Thread::new();

/// 0 no lease, 1 leased, 2 asked to end.
pub(super) static LEASE: AtomicU32 = AtomicU32::new(0);

/// True while the plain memory is the tier's.
pub(crate) fn is_leased() -> bool {
    LEASE.load(Ordering::Acquire) != 0
}

/// Asks for the memory back; the generation changes when it is.
pub(crate) fn ask_end_of_lease() {
    let _ = LEASE.compare_exchange(1, 2, Ordering::AcqRel, Ordering::Acquire);
}

/// Asks for the memory back and waits until it is.
#[cfg(feature = "preload")]
pub(crate) fn end_lease() {
    ask_end_of_lease();
    if !SECOND.is_gone() {
        super::BELL.ring();
    }
    SECOND.wait();
}

/// No thread may be started from now on: who could bring everything back when the agent leaves is started before.
#[cfg(feature = "preload")]
pub(crate) fn stand_by() {
    let runs = crate::shared::SHARED.phase.load(Ordering::Acquire) == 1;
    if is_leased() || runs && super::COLD.load(Ordering::Relaxed) {
        super::back::stand_by();
    }
}

/// The tier's threads beside the only one of a client that is not leased.
pub(crate) fn threads() -> [&'static Thread; 2] {
    [&SECOND, &BRINGER]
}
