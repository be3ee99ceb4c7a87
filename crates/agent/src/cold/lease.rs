//! Who has the plain memory of a client that is merged live.
//!
//! A client that is parked becomes a client of the tier as well: a second thread then does what the only one of a cold client
//! does, for the plain memory, which the other thread leaves alone meanwhile. What is merged stays merged. Here is what both
//! threads and the program's ask; the lease begins and ends in `serve`.
//!
//! The memory is the first thread's again only when the word says 0: who asks for the end has it no sooner.

#[cfg(feature = "preload")]
use super::session::{BELL, COLD};
use crate::state::LEASE;
#[cfg(feature = "preload")]
use crate::state::{LEASE_THREAD, SHARED, is_leased};
use core::sync::atomic::Ordering;

/// Asks for the memory back; the generation changes when it is.
pub(crate) fn ask_end_of_lease() {
    let _ = LEASE.compare_exchange(1, 2, Ordering::AcqRel, Ordering::Acquire);
}

/// Asks for the memory back and waits until it is.
#[cfg(feature = "preload")]
pub(crate) fn end_lease() {
    ask_end_of_lease();
    if !LEASE_THREAD.is_gone() {
        BELL.ring();
    }
    LEASE_THREAD.wait();
}

/// No thread may be started from now on: who could bring everything back when the agent leaves is started before.
#[cfg(feature = "preload")]
pub(crate) fn stand_by() {
    let runs = SHARED.phase.load(Ordering::Acquire) == 1;
    if is_leased() || runs && COLD.load(Ordering::Relaxed) {
        super::fault_in::stand_by();
    }
}
