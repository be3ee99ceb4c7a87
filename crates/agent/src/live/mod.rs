//! Live merging: the agent's thread answers the daemon's requests, one at a time.
//!
//! A raw clone(2) makes the thread: it shares the program's memory but has its own table of descriptors. So the program
//! neither sees our descriptors nor closes them, and we hold none of the program's. The thread has no thread-local storage:
//! everything that it calls must do without `errno`. Only the kernel ends it, with the process or at exec(2); it never dies
//! alone, so pages never stay in the freeze area.
//!
//! `lifecycle` starts the thread and ends it, `handshake` connects it to a daemon, `requests` answers the daemon, and
//! `events` answers the kernel about merged memory. `freeze` takes pages away from the program for the comparison, to a
//! `freeze_area`; `remap` and `remap_huge` map slots in their place, and `unshare` replaces slots by private memory.
//! `leftover` hands memory to the kernel's KSM that merging leaves out. `earlier_segments` are kept for the next daemon.

mod earlier_segments;
mod events;
mod freeze;
mod freeze_area;
mod handshake;
mod leftover;
mod lifecycle;
mod remap;
mod remap_huge;
mod requests;
mod session;
mod unshare;

#[cfg(feature = "preload")]
pub(crate) use events::{apply_owed, forget_served, wait_served};
#[cfg(feature = "preload")]
pub(crate) use leftover::take_back;
#[cfg(feature = "attached")]
pub(crate) use lifecycle::entered;
#[cfg(not(feature = "attached"))]
pub(crate) use lifecycle::start;
#[cfg(feature = "preload")]
pub(crate) use lifecycle::{REST, ask_to_leave_giving_back, stop, stop_giving_back, wait_begun};
#[cfg(feature = "preload")]
pub(crate) use unshare::copy_of;
