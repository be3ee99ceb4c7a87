//! What the daemon tells about itself: one structure for status, live view, JSON and metrics.

use pagefold_merge::stats::{ClientStats, DomainStats};
use serde::{Deserialize, Serialize};

/// Sums over all domains.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Totals {
    /// Slots that are shared.
    pub pages_shared: u64,
    /// Mappings of slots.
    pub pages_sharing: u64,
    /// Zero pages dropped and still holes.
    pub pages_zero: u64,
    /// Silent pages without a twin.
    pub pages_unshared: u64,
    /// Pages that change.
    pub pages_volatile: u64,
    /// Managed pages.
    pub pages: u64,
    /// Periods passed, summed over clients.
    pub full_scans: u64,
    /// Merged pages that were written again.
    pub breaks: u64,
    /// Pages ever merged.
    pub pages_merged: u64,
    /// Bytes that clients no longer hold.
    pub saved_bytes: u64,
    /// Bytes of pool segments.
    pub pool_bytes: u64,
    /// Bytes of released pool segments that a process still maps.
    pub pool_lingering_bytes: u64,
    /// Bytes of our own records and of kernel mappings.
    pub metadata_bytes: u64,
    /// Saved bytes less pool, what lingers of it, and metadata.
    pub general_profit: i64,
    /// Processor time of daemon and agents, in nanoseconds.
    pub cpu_ns: u64,
}

/// A client as seen from outside.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Client {
    /// Process id; also the client's name in commands.
    pub pid: i32,
    /// User id.
    pub uid: u32,
    /// Command name.
    pub name: String,
    /// Domain.
    pub domain: String,
    /// Counters.
    pub stats: ClientStats,
    /// Times that pages were frozen.
    pub freezes: u64,
    /// Longest freeze, in nanoseconds.
    pub freeze_ns_max: u64,
    /// Freezes by duration: entry `i` counts those below [`wait_histogram::bucket_end`](pagefold_protocol::wait_histogram::bucket_end)`(i)`
    /// microseconds that no earlier entry counts, four entries to an octave.
    pub freeze_us: Vec<u64>,
}

/// A process that asked to be managed and could not be.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NotCovered {
    /// Process id.
    pub pid: i32,
    /// Command name.
    pub name: String,
    /// Why.
    pub reason: String,
}

/// Everything.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    /// Version of pagefold.
    pub version: String,
    /// The daemon's process id.
    pub pid: i32,
    /// Seconds since it started.
    pub uptime_s: f64,
    /// Worker threads per domain.
    pub workers: usize,
    /// One pass of the watch stage, in seconds.
    pub period_s: f64,
    /// Resident bytes of the daemon.
    pub rss_bytes: u64,
    /// Sums.
    pub totals: Totals,
    /// Domains.
    pub domains: Vec<DomainStats>,
    /// Clients.
    pub clients: Vec<Client>,
    /// Processes that could not be managed, the last 64.
    pub not_covered: Vec<NotCovered>,
    /// The cold tier.
    pub cold: crate::cold::ColdStatus,
    /// How far the comparison is that `verify` asked for last.
    pub verifying: Verifying,
}

/// How far a comparison is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Verifying {
    /// Shared mappings that were looked at.
    pub pages: u64,
    /// Of so many in the domains that it has come to.
    pub pages_total: u64,
}

/// What `verify` found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Verified {
    /// Shared mappings that were looked at.
    pub pages: u64,
    /// Of those: the same physical frame as the slot.
    pub same_frame: u64,
    /// Of those: frames could not be seen (no privilege), but the bytes are equal.
    pub same_bytes: u64,
    /// Written since the ledger was last settled.
    pub broken: u64,
    /// Not in memory, or the client was gone when we looked.
    pub absent: u64,
    /// Not looked at: the daemon may not see what this client has in memory.
    pub unseen: u64,
    /// Pages that are wrong.
    pub wrong_pages: u64,
    /// What is wrong, the ledger's faults included: one line each, the first hundred of a domain.
    pub wrong: Vec<String>,
}
