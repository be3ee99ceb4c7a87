//! The limits, errors and figures of a region.

use crate::error::StoreError;
use pagefold_os::Errno;
use thiserror::Error;

/// Largest region, in bytes.
pub const REGION_BYTES_MAX: usize = 256 << 30;
/// Most regions of a process at the same time.
pub const REGIONS_MAX: usize = 64;
/// Most pages that a fault loads, if the program accesses them in ascending order; half as many without a
/// [`Prefetcher`](super::Prefetcher).
pub const FAULT_PAGES_MAX: usize = 32;

/// Why a region could not be created.
#[derive(Debug, Error)]
pub enum RegionError {
    /// The length is out of range.
    #[error("a region of {bytes} bytes cannot be created: the length is 1 byte to 256 GiB")]
    Size {
        /// Requested bytes.
        bytes: usize,
    },
    /// The process has [`REGIONS_MAX`] regions.
    #[error("a process has at most {REGIONS_MAX} regions: drop one first")]
    TooMany,
    /// The kernel refuses a userfaultfd with signals, moves and asynchronous write protection.
    #[error("userfaultfd: {0}: it needs Linux 6.8 or later, and no seccomp filter that forbids it")]
    Userfaultfd(#[source] Errno),
    /// The kernel refuses memory, or a descriptor or signal handler that the region needs.
    #[error("memory for the region: {0}")]
    Memory(#[source] Errno),
    /// The tier cannot store the region's record.
    #[error(transparent)]
    Tier(#[from] StoreError),
}

/// Pages that cannot be loaded: damaged, or their file unreadable. A touch of them raises SIGBUS.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{pages} pages of the region cannot be loaded, the first at byte {first}; a touch of them raises SIGBUS")]
pub struct Unreadable {
    /// Offset of the first in bytes.
    pub first: usize,
    /// How many.
    pub pages: u64,
}

/// What happened to the pages that were to be evicted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Parked {
    /// Evicted.
    pub pages: u64,
    /// Written meanwhile, or in use by a device: they stay resident.
    pub busy: u64,
    /// Pinned: they stay resident.
    pub pinned: u64,
    /// Refused by the tier, which is full or has no memory: they stay resident.
    pub refused: u64,
}

/// The figures of a region now; counters count from its creation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegionStats {
    /// Pages of the region.
    pub pages: u64,
    /// Pages that are evicted now.
    pub pages_out: u64,
    /// Evictions so far.
    pub pages_parked: u64,
    /// Pages loaded, by faults and by `unpark`.
    pub pages_loaded: u64,
    /// Faults on evicted pages.
    pub faults: u64,
    /// Time that threads spent in these faults, in nanoseconds.
    pub fault_ns: u64,
    /// Pages of these faults' windows that a [`Prefetcher`](super::Prefetcher) loaded.
    pub pages_prefetched: u64,
    /// Faults on never written pages near evicted ones.
    pub zero_faults: u64,
    /// Failed attempts to load a page.
    pub pages_unreadable: u64,
    /// Pages pinned now.
    pub pages_pinned: u64,
}
