//! The thread of a client of the tier: how it begins, its connections one after the other, and when it ends.
//!
//! It is the only thread of a cold client ([`run`]), or the second thread of a merged one while its anonymous memory is lent
//! ([`lend`]). The session outlives each connection. It ends only when every page is back, or when no process lives that
//! could bring pages back.

use super::daemon_liveness::DaemonLiveness;
use super::fault_in::dismiss_standby;
use super::handshake::connect;
use super::loan::ask_end_of_loan;
use super::requests::end_if_asked;
use super::session::ColdSession;
use crate::runtime::connection::REFUSED_MS;
use crate::runtime::housekeeping::exit_if_alone;
use crate::runtime::thread::{begin_thread, exit_thread, name_thread};
use crate::state::{ATTACHED, LOAN, LOAN_THREAD, SHARED};
use core::sync::atomic::{AtomicU32, Ordering};
use pagefold_os::raw::{Errno, Result};
use pagefold_os::sched;

/// Pause between attempts to reach a daemon, in milliseconds.
const RECONNECT_MS: i32 = 50;

/// Becomes a client of the tier beside live merging, after `give_up` has made live merging leave the anonymous memory.
///
/// # Errors
/// `EBUSY` while the loan before has not ended; `EAGAIN` if there is no memory for the thread; as `give_up`.
pub(crate) fn lend(give_up: impl FnOnce() -> Result<()>) -> Result<()> {
    if !LOAN_THREAD.is_gone() || LOAN.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Acquire).is_err() {
        return Err(Errno(libc::EBUSY));
    }
    let lent = give_up().and_then(|()| if LOAN_THREAD.start(second_main) { Ok(()) } else { Err(Errno(libc::EAGAIN)) });
    if lent.is_err() {
        LOAN.store(0, Ordering::Release);
        // Live merging has to watch all of it again.
        SHARED.changed();
    }
    lent
}

extern "C" fn second_main() -> ! {
    const NAME: &core::ffi::CStr = c"pagefold-cold";
    // In an attached program the table of descriptors is that of the agent's first thread, with its socket to the keeper and
    // none of the program's.
    let has_table = if ATTACHED {
        name_thread(NAME);
        true
    } else {
        begin_thread(NAME)
    };
    if has_table {
        serve_while(&LOAN);
    }
    LOAN.store(0, Ordering::Release);
    // Live merging has to watch all of it again.
    SHARED.changed();
    exit_thread()
}

/// Body of a cold client's only thread.
pub(crate) fn run() {
    serve_while(&SHARED.phase);
}

/// Serves daemons for as long as `phase` is 1, then brings everything back.
fn serve_while(phase: &AtomicU32) {
    let goes_on = || phase.load(Ordering::Acquire) == 1;
    let mut cold: Option<ColdSession> = None;
    let mut liveness = DaemonLiveness::default();
    let mut rests_until = 0;
    while goes_on() {
        let connected = (sched::monotonic_ns() >= rests_until).then(|| connect(&mut cold, phase));
        match connected {
            None => {}
            Some(Ok(mut connection)) => {
                liveness.note_alive();
                if let Some(cold) = &mut cold {
                    let _ = cold.serve(&mut connection, phase);
                }
                if !goes_on() {
                    // Before the connection ends: its end makes the daemon look.
                    cold.take().into_iter().for_each(ColdSession::leave);
                    break;
                }
            }
            Some(Err(failure)) => {
                SHARED.error.store(failure.errno.0, Ordering::Relaxed);
                if failure.rests {
                    rests_until = sched::monotonic_ns() + REFUSED_MS as u64 * 1_000_000;
                }
            }
        }
        exit_if_alone();
        end_if_asked();
        if goes_on() {
            let _ = pagefold_os::fd::poll(&mut [], RECONNECT_MS);
        }
        cold.iter().for_each(ColdSession::drain_wakeups);
        if let Some(cold) = cold.take_if(|cold| liveness.is_lost(&cold.residency)) {
            cold.give_up();
            // No process has the lent memory any more.
            ask_end_of_loan();
        }
    }
    cold.into_iter().for_each(ColdSession::leave);
    dismiss_standby();
}
