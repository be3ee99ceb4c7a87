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
//! The rooms: `serve` is the thread and its connection, `take` how pages leave, `back` how they come back, `calls` what the
//! program's own calls need of the tier, `lease` who has the plain memory of a merged client, `lost` the end of pages that
//! nobody can bring back.

mod back;
#[cfg(feature = "preload")]
mod calls;
mod lease;
mod lost;
mod serve;
mod take;

#[cfg(feature = "preload")]
pub(crate) use back::read_in;
#[cfg(feature = "preload")]
pub(crate) use calls::{after_fork_child, before_fork, before_leaving, before_move, hint, voiding};
pub(crate) use lease::{ask_end_of_lease, is_leased, threads};
#[cfg(feature = "preload")]
pub(crate) use lease::{end_lease, stand_by};
pub(crate) use serve::{lease, run};

use crate::bell::Bell;
use crate::maps::Maps;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use pagefold_os::fd::Fd;
use pagefold_os::mem;
use pagefold_os::uffd::Uffd;
use pagefold_protocol::channel::Channel;
use pagefold_protocol::residency_map::{EVICTED, ResidencyMap};

/// Set before the thread starts: this process's cold pages go to the tier.
pub static COLD: AtomicBool = AtomicBool::new(false);
/// Share of run time that may be lost to refaults, in millionths; 0 for the daemon's default.
pub static TOLERANCE_PPM: AtomicU64 = AtomicU64::new(0);
/// Limit of the domain's tier in bytes, if this client is its first; 0 for the daemon's default.
pub static TIER_MAX: AtomicU64 = AtomicU64::new(0);

/// Wakes the thread where it waits for the daemon.
pub(crate) static BELL: Bell = Bell::new();

/// Where the table is mapped in this process, 0 if it is not.
static TABLE: AtomicU64 = AtomicU64::new(0);

fn table() -> Option<ResidencyMap> {
    match TABLE.load(Ordering::Acquire) {
        0 => None,
        // SAFETY: stored once the mapping is there, which stays as long as the guard is held; who asks holds that.
        base => Some(unsafe { ResidencyMap::at(base) }),
    }
}

/// What the agent keeps over all its connections.
struct Cold {
    /// The process's mappings.
    maps: Maps,
    /// What of its memory is there.
    pagemap: Fd,
    /// Holds the managed ranges.
    hold: Uffd,
    /// True until a daemon has enabled `hold`.
    bare: bool,
    /// Holds the staging area, where nobody waits, and the bell.
    mover: Option<Uffd>,
    staging: Option<mem::Mapping>,
    table_fd: Fd,
    table: ResidencyMap,
}

struct Connection {
    socket: Fd,
    channel: Channel,
    epoch: u32,
}

/// True if the page at `addr` is in the tier.
pub(crate) fn is_out(addr: u64) -> bool {
    table().is_some_and(|table| table.state(addr) == EVICTED)
}
