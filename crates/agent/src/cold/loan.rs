//! The loan: which thread manages the anonymous memory of a client that is merged live.
//!
//! A parked client becomes a client of the tier as well. A second thread then does what the only thread of a cold client
//! does, for the anonymous memory, and the thread of live merging leaves that memory alone. Merged pages stay merged. Here
//! is what both threads and the program's threads ask; `lifecycle` begins and ends the loan.
//!
//! The memory returns to the thread of live merging only when the word is 0, not when the end is requested.

#[cfg(feature = "preload")]
use super::session::{COLD, WAKEUP};
use crate::state::{LOAN, LOAN_THREAD};
#[cfg(feature = "preload")]
use crate::state::{SHARED, is_lent};
use core::sync::atomic::Ordering;

/// Asks for the memory back; the generation changes when it is.
pub(crate) fn ask_end_of_loan() {
    let _ = LOAN.compare_exchange(1, 2, Ordering::AcqRel, Ordering::Acquire);
}

/// Asks for the memory back and waits until it is; calls `serve` meanwhile.
pub(crate) fn end_loan(mut serve: impl FnMut()) {
    ask_end_of_loan();
    // Not the thread of live merging, which alone calls this in an attached program: the thread of the loan may be waiting
    // for it, and looks twice a second by itself.
    #[cfg(feature = "preload")]
    if !LOAN_THREAD.is_gone() {
        WAKEUP.wake();
    }
    while !LOAN_THREAD.is_gone() {
        serve();
        LOAN_THREAD.wait_a_moment();
    }
}

/// No thread may be started from now on, so this starts the thread that faults everything in when the agent leaves.
#[cfg(feature = "preload")]
pub(crate) fn start_standby() {
    let runs = SHARED.phase.load(Ordering::Acquire) == 1;
    if is_lent() || runs && COLD.load(Ordering::Relaxed) {
        super::fault_in::start_standby();
    }
}
