//! What the thread of a cold client keeps over all its connections, and what the program's threads ask of it.

use crate::address_space::list_clock::ListClock;
use crate::address_space::maps::Maps;
use crate::owned_ranges::{Owned, OwnedMapping};
use crate::runtime::wakeup::Wakeup;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use pagefold_os::fd::Fd;
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
pub(crate) static WAKEUP: Wakeup = Wakeup::new(Owned::ColdWakeup);

/// Where the table is mapped in this process, 0 if it is not.
pub(super) static RESIDENCY: AtomicU64 = AtomicU64::new(0);

pub(super) fn residency() -> Option<ResidencyMap> {
    match RESIDENCY.load(Ordering::Acquire) {
        0 => None,
        // SAFETY: stored once the mapping is there, which stays as long as the mapping lock is held, and the caller holds
        // that.
        base => Some(unsafe { ResidencyMap::at(base) }),
    }
}

/// What the agent keeps over all its connections.
pub(super) struct ColdSession {
    /// The process's mappings.
    pub(super) maps: Maps,
    /// What of its memory is there.
    pub(super) pagemap: Fd,
    /// Holds the managed ranges.
    pub(super) hold: Uffd,
    /// True until a daemon has enabled `hold`.
    pub(super) bare: bool,
    /// Holds the freeze area, where no thread ever waits, and the wakeup page.
    pub(super) mover: Option<Uffd>,
    pub(super) freeze_area: Option<OwnedMapping>,
    /// When the mappings are listed anew where the program's calls are not seen.
    pub(super) list_clock: ListClock,
    pub(super) residency_fd: Fd,
    pub(super) residency: ResidencyMap,
}

pub(super) struct Connection {
    pub(super) socket: Fd,
    pub(super) channel: Channel,
    pub(super) epoch: u32,
}

/// True if the page at `addr` is in the tier.
pub(crate) fn is_evicted(addr: u64) -> bool {
    residency().is_some_and(|residency| residency.state(addr) == EVICTED)
}
