//! The agent of a client whose cold pages go to the tier (`pagefold run --cold`).
//!
//! One thread as in `engine`, with a connection of its own
//! kind. The daemon serves the faults; what only the process itself can do is
//! here: copy pages out, and take those away that did not change since.
//!
//! **A page leaves in two steps.** `ColdCopy` copies it to the channel while
//! the program goes on. The daemon stores the copy. `ColdDrop` then freezes the
//! page (`UFFDIO_MOVE` to the staging area), compares it with the copy, and
//! only if they are equal says in the table that the page is out, and lets the
//! frozen page go. So an access waits for a comparison, never for a compressor,
//! and the page is in the tier before it is taken from the program. Pages that
//! differ, and those that the kernel will not move (pinned, shared by a fork),
//! stay.
//!
//! Guard, then pact (see [`residency_map`](pagefold_protocol::residency_map)): in this order.
//!
//! `lifecycle` is the thread, from its first connection to its end; `requests` what it answers; `evict` how pages leave and
//! `fault_in` how they return; `interpose` what the program's own calls need of the tier; `lease` lends the anonymous memory
//! of a merged client; `daemon_liveness` tells when evicted pages are lost.

mod daemon_liveness;
mod evict;
mod fault_in;
#[cfg(feature = "preload")]
mod interpose;
mod lease;
mod lifecycle;
mod session;

#[cfg(feature = "preload")]
pub(crate) use fault_in::read_in;
#[cfg(feature = "preload")]
pub(crate) use interpose::{after_fork_child, before_fork, before_leaving, before_move, hint, voiding};
pub(crate) use lease::ask_end_of_lease;
#[cfg(feature = "preload")]
pub(crate) use lease::{end_lease, stand_by};
pub(crate) use lifecycle::{lease, run};
#[cfg(feature = "preload")]
pub(crate) use session::BELL;
pub(crate) use session::is_out;
pub use session::{COLD, TIER_MAX, TOLERANCE_PPM};
