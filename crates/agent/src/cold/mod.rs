//! The agent of a client that has its cold pages in the tier (`pagefold run --cold`).
//!
//! One thread, as in `live`, with a connection of its own kind. The daemon serves the faults. The agent does what only the
//! process itself can do: it copies pages out, and takes those away that have not changed since.
//!
//! **A page is evicted in two steps.** `ColdCopy` copies it to the channel while the program goes on, and the daemon stores
//! the copy. `ColdEvict` then freezes the page (`UFFDIO_MOVE` to the freeze area) and compares it with the copy. Only if
//! they are equal, the residency map says that the page is evicted, and the frozen page is freed. So an access waits for a
//! comparison, never for a compressor, and the page is in the tier before it leaves the program. Pages that differ stay, and
//! so do pages that the kernel will not move (pinned, or shared by a fork).
//!
//! Lock order: mapping lock, then owner lock (see [`residency_map`](pagefold_protocol::residency_map)).
//!
//! `lifecycle` is the thread and `session` what it keeps; `handshake` connects it to a daemon, `requests` answers the
//! daemon, and `leave` ends the session. `evict` is how pages leave and `fault_in` how they return. `interpose` is what the
//! program's own calls need of the tier; `loan` lends the anonymous memory of a merged client; `daemon_liveness` tells when
//! evicted pages are lost.

mod daemon_liveness;
mod evict;
mod fault_in;
#[cfg(test)]
mod fixture;
mod handshake;
#[cfg(feature = "preload")]
mod interpose;
mod leave;
mod lifecycle;
mod loan;
mod requests;
mod session;

#[cfg(feature = "preload")]
pub(crate) use fault_in::read_in;
#[cfg(feature = "preload")]
pub(crate) use interpose::{after_fork_child, before_fork, before_leaving, before_move, discarding, hint};
pub(crate) use lifecycle::{lend, run};
#[cfg(feature = "preload")]
pub(crate) use loan::start_standby;
pub(crate) use loan::{ask_end_of_loan, end_loan};
#[cfg(feature = "preload")]
pub(crate) use session::WAKEUP;
pub(crate) use session::is_evicted;
pub use session::{COLD, TIER_MAX, TOLERANCE_PPM};
