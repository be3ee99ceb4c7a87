//! What the program's own calls need of the tier: forks, moves and discards of memory of which pages are out.
//!
//! All run in the program's threads, with the guard held. A child has nobody to ask for pages, a page that moves would be
//! looked for at its old address, and a page that is discarded must not come back: so each call has its way here, before or
//! around what the kernel does.

use super::fault_in::{EVERYTHING, Wanted, all, bring_back, forget_bringer};
use super::session::{TABLE, table};
use crate::runtime::thread::yield_now;
use crate::state::{LEASE, LEASE_THREAD};
use core::sync::atomic::Ordering;
use pagefold_os::Range;
use pagefold_os::raw::Result;
use pagefold_protocol::residency_map::EVICTED;

/// Before a fork, with the guard held: the child cannot ask for pages, so all are brought back but those that it will not
/// have anyway: `dont_fork` says how far (to an end at most) an address is of one kind, and whether of that.
///
/// # Errors
/// `ENOMEM` if a limit of memory has no room for that; not if it is to be done `whatever_it_takes`.
pub(crate) fn before_fork(whatever_it_takes: bool, dont_fork: impl Fn(u64, u64) -> (u64, bool)) -> Result<()> {
    let Some(table) = table() else { return Ok(()) };
    bring_back(&table, &Wanted { range: EVERYTHING, stretch: dont_fork, whatever_it_takes })
}

/// Before the agent leaves though it need not, with the guard held: everything comes back.
///
/// # Errors
/// `ENOMEM` if a limit of memory has no room for that.
pub(crate) fn before_leaving() -> Result<()> {
    before_move(EVERYTHING)
}

/// Before a range moves, with the guard held: everything of it comes back, so that nothing hangs on its old address.
///
/// # Errors
/// `ENOMEM` if a limit of memory has no room for that.
pub(crate) fn before_move(range: Range) -> Result<()> {
    let Some(table) = table() else { return Ok(()) };
    bring_back(&table, &Wanted { range, stretch: all, whatever_it_takes: false })
}

/// Makes a call of the program's that discards `range`, with the guard held.
///
/// The kernel lets the caller go when the daemon has *heard* of the discard. So wait until it has obeyed: no page of the
/// range is out any more. Should it die in between, its successor finds the range here, and obeys when the call is done: one
/// that fails leaves what it did not come to.
pub(crate) fn voiding<T>(range: Range, call: impl FnOnce() -> Result<T>) -> Result<T> {
    let Some(table) = table().filter(|_| !range.is_empty()) else { return call() };
    // Not 0 if a signal handler has come into another.
    let (outer, outer_is_done) = table.head().set_discarding(range, false);
    let result = call();
    if result.is_ok() {
        table.head().set_discarding(range, true);
    }
    let mut turn = 0;
    // A child that a signal handler forked meanwhile goes on here, too, and has no table.
    while result.is_ok()
        && let Some(table) = self::table()
        && table.head().evicted.load(Ordering::Acquire) > 0
        && table.has(range, EVICTED)
    {
        turn += 1;
        if turn < 16 {
            yield_now();
        } else {
            let _ = pagefold_os::fd::poll(&mut [], 1);
        }
    }
    if let Some(table) = self::table() {
        table.head().set_discarding(outer, outer_is_done);
    }
    result
}

/// In a forked child: table and descriptors are the parent's.
pub(crate) fn after_fork_child() {
    TABLE.store(0, Ordering::Release);
    LEASE.store(0, Ordering::Release);
    LEASE_THREAD.forget();
    forget_bringer();
}

/// Tells the daemon what the program said about a range; true if somebody listens.
pub(crate) fn hint(range: Range, advice: i32) -> bool {
    match table() {
        Some(table) => {
            table.hint(range.start, range.end, advice);
            true
        }
        None => false,
    }
}
