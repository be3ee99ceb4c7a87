//! What the program's own calls need of the tier: forks, moves and discards of memory with evicted pages.
//!
//! All run in the program's threads, with the mapping lock held. A child has no daemon to ask for pages, the daemon would
//! look for a moved page at its old address, and a discarded page must not return. So each of these calls is prepared here,
//! before or around the system call.

use super::fault_in::{EVERYTHING, Wanted, all, fault_in, forget_thread};
use super::session::{RESIDENCY, residency};
use crate::runtime::thread::yield_now;
use crate::state::{LOAN, LOAN_THREAD};
use core::sync::atomic::Ordering;
use pagefold_os::Range;
use pagefold_os::raw::Result;
use pagefold_protocol::residency_map::EVICTED;

/// Before a fork, with the mapping lock held: the child cannot ask for pages, so all are brought back but those that it will
/// not have anyway: `dont_fork` says how far (to an end at most) an address is of one kind, and whether of that.
///
/// # Errors
/// `ENOMEM` if a limit of memory has no room for that; not if it is to be done `ignores_limit`.
pub(crate) fn before_fork(ignores_limit: bool, dont_fork: impl Fn(u64, u64) -> (u64, bool)) -> Result<()> {
    let Some(residency) = residency() else { return Ok(()) };
    fault_in(&residency, &Wanted { range: EVERYTHING, stretch: dont_fork, ignores_limit })
}

/// Before the agent leaves though it need not, with the mapping lock held: everything comes back.
///
/// # Errors
/// `ENOMEM` if a limit of memory has no room for that.
pub(crate) fn before_leaving() -> Result<()> {
    before_move(EVERYTHING)
}

/// Before a range moves, with the mapping lock held: everything of it comes back, so that nothing hangs on its old address.
///
/// # Errors
/// `ENOMEM` if a limit of memory has no room for that.
pub(crate) fn before_move(range: Range) -> Result<()> {
    let Some(residency) = residency() else { return Ok(()) };
    fault_in(&residency, &Wanted { range, stretch: all, ignores_limit: false })
}

/// Makes a call of the program's that discards `range`, with the mapping lock held.
///
/// The kernel lets the caller go when the daemon has *heard* of the discard. So wait until it has obeyed: no page of the
/// range is out any more.
pub(crate) fn discarding<T>(range: Range, call: impl FnOnce() -> Result<T>) -> Result<T> {
    let result = call();
    let mut turn = 0;
    // A child that a signal handler forked meanwhile goes on here, too, and has no table.
    while result.is_ok()
        && let Some(residency) = residency()
        && residency.head().evicted.load(Ordering::Acquire) > 0
        && residency.has(range, EVICTED)
    {
        turn += 1;
        if turn < 16 {
            yield_now();
        } else {
            let _ = pagefold_os::fd::poll(&mut [], 1);
        }
    }
    result
}

/// In a forked child: table and descriptors are the parent's.
pub(crate) fn after_fork_child() {
    RESIDENCY.store(0, Ordering::Release);
    LOAN.store(0, Ordering::Release);
    LOAN_THREAD.forget();
    forget_thread();
}

/// Tells the daemon what the program said about a range; true if this process is a client of the tier.
pub(crate) fn hint(range: Range, advice: i32) -> bool {
    match residency() {
        Some(residency) => {
            residency.hint(range.start, range.end, advice);
            true
        }
        None => false,
    }
}
