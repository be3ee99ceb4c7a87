//! The daemon's status: one structure for `status`, `top`, JSON and metrics.

use crate::waits::Waits;
use pagefold_merge::stats::{ClientStats, DomainStats};
use pagefold_protocol::channel::AgentCounters;
use serde::{Deserialize, Serialize};
use std::sync::atomic::Ordering;

/// Sums over all domains.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Totals {
    /// Slots in use.
    pub pages_shared: u64,
    /// Mappings of slots.
    pub pages_sharing: u64,
    /// Zero pages dropped and still holes.
    pub pages_zero: u64,
    /// Pages unwritten for two scans, without an equal page.
    pub pages_unshared: u64,
    /// Pages that change.
    pub pages_volatile: u64,
    /// Managed pages.
    pub pages: u64,
    /// Scans for writes, summed over clients.
    pub full_scans: u64,
    /// Merged pages that were written again.
    pub cow_breaks: u64,
    /// Pages mapped to slots.
    pub pages_merged: u64,
    /// Zero pages dropped.
    pub pages_zeroed: u64,
    /// Bytes of clients' shared and zero pages, before anything of pagefold's own is subtracted.
    pub deduplicated_bytes: u64,
    /// Bytes of pool segments.
    pub pool_bytes: u64,
    /// Bytes of released pool segments that a process still maps.
    pub pool_orphaned_bytes: u64,
    /// Bytes of index, tables and ledgers.
    pub metadata_bytes: u64,
    /// Bytes of kernel mappings that merging costs, estimated at 245 bytes each.
    pub mapping_bytes: u64,
    /// Deduplicated bytes less pool, orphaned pool, metadata and mappings: KSM's general_profit.
    pub general_profit: i64,
    /// Other memory of pagefold: the daemon's and the keeper's own, and agents at 96 KiB each, estimated.
    pub process_bytes: u64,
    /// Memory that would be in use without live merging, less all that pagefold uses: general_profit less process_bytes.
    pub saved_bytes: i64,
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
    /// It ran already when it became a client.
    pub attached: bool,
    /// Times that all threads of an attached client were stopped.
    pub stops: u64,
    /// For how long in all, in nanoseconds.
    pub stop_ns: u64,
    /// Longest such stop, in nanoseconds.
    pub stop_ns_max: u64,
    /// Freezes by duration: entry `i` counts those below [`bucket_end`](pagefold_protocol::wait_histogram::bucket_end)`(i)`
    /// microseconds that no earlier entry counts, four entries to an octave.
    pub freeze_us: Vec<u64>,
    /// Waits for pages that were frozen, since it became a client.
    pub waits: Waits,
    /// Those of the last five minutes.
    pub waits_recent: Waits,
    /// Its memory that is not managed, by reason, the largest first. Looked at when a status is asked for, at most each few
    /// seconds.
    pub unmanaged: Vec<UnmanagedMemory>,
    /// What became of memory that its budget of mappings keeps private.
    pub leftover: Leftover,
}

/// Memory of a client that the budget of mappings keeps private.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Leftover {
    /// Whether it was handed to KSM, or why not; empty if no page with an equal one is left out.
    pub state: String,
    /// Bytes of the client's memory that were handed to KSM.
    pub handed_bytes: u64,
    /// Pages of the client that KSM has merged.
    pub ksm_pages: u64,
    /// KSM's profit from the client as the kernel counts it: bytes of these pages less its records; 0 where the kernel does
    /// not tell.
    pub ksm_profit_bytes: i64,
}

/// The reason for pages that the kernel's page cache shares by itself.
pub const FILE_PAGES: &str = "pages of files";

/// Memory of a client that is not managed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct UnmanagedMemory {
    /// Why.
    pub reason: String,
    /// How much of it is resident; 0 where the daemon may not look.
    pub bytes: u64,
}

impl Client {
    /// Takes over what the client's agent counts in the channel. A new counter of the agent needs a field here, and this
    /// line.
    pub(crate) fn read_counters(&mut self, counters: &AgentCounters) {
        self.freezes = counters.freezes.load(Ordering::Relaxed);
        self.freeze_ns_max = counters.freeze_ns_max.load(Ordering::Relaxed);
        self.freeze_us = counters.freeze_us.iter().map(|count| count.load(Ordering::Relaxed)).collect();
    }
}

/// A process that asked to be managed and could not be.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct UnmanagedProcess {
    /// Process id.
    pub pid: i32,
    /// Command name.
    pub name: String,
    /// Why.
    pub reason: String,
}

/// The machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Host {
    /// Its name.
    pub name: String,
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// Of those: what the kernel could give to programs without swapping (MemAvailable).
    pub available_bytes: u64,
}

impl Host {
    /// This machine, now.
    pub(crate) fn here() -> Host {
        let (available_bytes, memory_bytes) = pagefold_os::procfs::available_and_total();
        Host { name: pagefold_os::probe::host_name(), memory_bytes, available_bytes }
    }
}

/// Everything.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    /// Version of pagefold.
    pub version: String,
    /// The daemon's process id.
    pub pid: i32,
    /// How systemctl names the service that it is, such as `pagefold.service` or `--user pagefold.service`; empty if it is
    /// none.
    pub service: String,
    /// Seconds since it started.
    pub uptime_s: f64,
    /// Worker threads per domain.
    pub workers: usize,
    /// Time between two scans for writes, in seconds.
    pub scan_interval_s: f64,
    /// Resident bytes of the daemon.
    pub resident_bytes: u64,
    /// The machine.
    pub host: Host,
    /// Sums.
    pub totals: Totals,
    /// Domains.
    pub domains: Vec<DomainStats>,
    /// Clients.
    pub clients: Vec<Client>,
    /// Processes that could not be managed, the last 64.
    pub unmanaged_processes: Vec<UnmanagedProcess>,
    /// The cold tier.
    pub cold: crate::cold::ColdStatus,
    /// Progress of the last `verify`.
    pub verifying: Verifying,
}

impl Status {
    /// Memory that would be in use without pagefold, less all that it uses; of a domain: less its pool, records, mappings
    /// and tier.
    pub fn saved_bytes(&self, domain: Option<&str>) -> i64 {
        let is_meant = |name: &str| domain.is_none_or(|wanted| wanted == name);
        let live = match domain {
            None => self.totals.saved_bytes,
            // Several users may each have a domain of one name; it is one in the views.
            Some(_) => self.domains.iter().filter(|one| is_meant(&one.name)).map(|one| one.general_profit).sum(),
        };
        let tiers = self.cold.domains.iter().filter(|tier| is_meant(&tier.name));
        live + tiers.map(|tier| tier.cold_bytes as i64 - tier.memory_bytes as i64).sum::<i64>()
    }
}

/// Progress of a comparison.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Verifying {
    /// Shared mappings compared so far.
    pub pages: u64,
    /// Shared mappings in the domains reached so far.
    pub pages_total: u64,
}

/// What `verify` found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Verified {
    /// Shared mappings compared.
    pub pages: u64,
    /// Of those: the same physical frame as the slot.
    pub same_frame: u64,
    /// Of those: frames could not be seen (no privilege), but the bytes are equal.
    pub same_bytes: u64,
    /// Written since the ledger was last settled.
    pub broken: u64,
    /// Not in memory, or the client had exited.
    pub absent: u64,
    /// Not compared: the daemon may not read this client's page tables.
    pub unseen: u64,
    /// Pages that are wrong.
    pub wrong_pages: u64,
    /// What is wrong, the ledger's faults included: one line each, the first hundred of a domain.
    pub wrong: Vec<String>,
}
