//! The status of the cold tier.
//!
//! Counters are read one by one, without a lock over all: sums may be a moment apart.

use super::idle::policy::Activity;
use super::tiers::Tiers;
use crate::waits::Waits;
use pagefold_os::sync::lock;
use serde::{Deserialize, Serialize};
use std::sync::atomic::Ordering;
use std::time::Instant;

/// A client of the cold tier, as status shows it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ColdClient {
    /// Process id.
    pub pid: i32,
    /// User id.
    pub uid: u32,
    /// Command name.
    pub name: String,
    /// Domain.
    pub domain: String,
    /// Pages in the tier now.
    pub pages_out: u64,
    /// Pages evicted so far.
    pub pages_evicted: u64,
    /// Faults on evicted pages.
    pub refaults: u64,
    /// Pages returned by faults, prefetch and unpark.
    pub pages_returned: u64,
    /// Faults on fresh pages of regions with pages out.
    pub zero_faults: u64,
    /// Pages lost: damaged, unreadable, or the tier died. SIGBUS for a thread that touches them.
    pub pages_lost: u64,
    /// Time that the client's threads waited for pages, in nanoseconds.
    pub fault_ns: u64,
    /// Faults by time from reading to answering: entry `i` counts those below 2^i microseconds.
    pub fault_us_log2: Vec<u64>,
    /// Faults by time from reading to answering, since it became a client of this daemon.
    pub waits: Waits,
    /// Those of the last five minutes.
    pub waits_recent: Waits,
    /// Evicted by `park` or the park policy, and not returned by `unpark` or, under a policy, found at work since.
    pub parked: bool,
    /// What it does, as the park policy sees it.
    pub activity: Activity,
    /// The agent is connected.
    pub connected: bool,
    /// It ran already when it became a client.
    pub attached: bool,
    /// Times that all threads of an attached client were stopped for the tier.
    pub stops: u64,
    /// For how long in all, in nanoseconds.
    pub stop_ns: u64,
    /// Longest such stop, in nanoseconds.
    pub stop_ns_max: u64,
    /// How long a page must be idle before it is evicted, in seconds; 0 before the first scan.
    pub idle_s: f64,
    /// Processor time of the agent in nanoseconds.
    pub agent_cpu_ns: u64,
}

impl ColdClient {
    /// The state shown after the client's name, with a blank before it; empty if it is connected and there is nothing to
    /// say.
    pub const fn state_suffix(&self) -> &'static str {
        match (self.connected, self.parked, self.activity) {
            (false, ..) => " (no agent)",
            (true, true, _) => " (parked)",
            (true, false, Activity::Busy) => " (busy)",
            (true, false, Activity::Idle) => " (idle)",
            (true, false, Activity::Waking) => " (waking)",
            (true, false, Activity::Unwatched | Activity::Parked) => "",
        }
    }
}

/// A domain's tier, as status shows it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ColdDomain {
    /// Domain.
    pub name: String,
    /// User id.
    pub uid: u32,
    /// Bytes of clients' pages that are in the tier.
    pub cold_bytes: u64,
    /// Memory of the tier, its indexes included.
    pub memory_bytes: u64,
    /// Of that: indexes.
    pub metadata_bytes: u64,
    /// Limit of the arena.
    pub max_bytes: u64,
    /// `cold_bytes` for each byte of `memory_bytes`.
    pub compression_ratio: f64,
    /// Pages in the tier.
    pub pages: u64,
    /// Of those: different contents.
    pub unique_pages: u64,
    /// Unique pages in memory compressed by Zstandard, or as a patch against a similar page.
    pub unique_pages_dense: u64,
    /// Unique pages that the cleaner recompressed so far.
    pub pages_recompressed: u64,
    /// Pages of one repeated word.
    pub pages_filled: u64,
    /// Bytes in the file.
    pub disk_bytes: u64,
    /// Bytes in free slots and ends of slabs.
    pub waste_bytes: u64,
    /// Stores refused: the tier was full, or the kernel gave no memory.
    pub stores_refused: u64,
    /// Loads that failed.
    pub loads_failed: u64,
    /// Loads by time: entry `i` counts those below 2^i microseconds.
    pub load_us_log2: Vec<u64>,
}

/// The cold tier, as status shows it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ColdStatus {
    /// Tiers.
    pub domains: Vec<ColdDomain>,
    /// Clients.
    pub clients: Vec<ColdClient>,
    /// A keeper process holds the daemon's descriptors.
    pub keeper: bool,
}

/// Processor time of all agents that there are and were.
pub(crate) fn agents_cpu_ns(tiers: &Tiers) -> u64 {
    let groups = lock(&tiers.groups.all);
    let of_groups: u64 = groups.values().map(|group| group.agents_cpu_ns()).sum();
    of_groups + tiers.groups.past_cpu_ns.load(Ordering::Relaxed)
}

pub(crate) fn status(tiers: &Tiers) -> ColdStatus {
    let mut status = ColdStatus { keeper: lock(&tiers.keeper).is_some(), ..ColdStatus::default() };
    for group in tiers.all_groups() {
        let stats = group.tier.stats();
        status.domains.push(ColdDomain {
            name: group.key.1.clone(),
            uid: group.key.0,
            cold_bytes: stats.pages * pagefold_os::PAGE_SIZE as u64,
            memory_bytes: stats.bytes_held + stats.bytes_metadata,
            metadata_bytes: stats.bytes_metadata,
            max_bytes: stats.bytes_max,
            compression_ratio: stats.ratio(),
            pages: stats.pages,
            unique_pages: stats.contents,
            unique_pages_dense: stats.contents_zstd + stats.contents_patch,
            pages_recompressed: stats.recompressed,
            pages_filled: stats.pages_filled,
            disk_bytes: stats.disk_bytes,
            waste_bytes: stats.bytes_free_slots + stats.bytes_rounding,
            stores_refused: stats.stores_refused,
            loads_failed: stats.loads_failed,
            load_us_log2: stats.load_us.to_vec(),
        });
        for client in lock(&group.clients).values() {
            let counters = &client.counters;
            let get = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
            let activity = lock(&client.idleness).activity();
            let fault_us_log2: Vec<u64> = counters.fault_us.iter().map(get).collect();
            let (waits, waits_recent) = lock(&client.past_counts).waits(
                Instant::now(),
                &fault_us_log2,
                |bucket| 1 << bucket,
                get(&counters.fault_ns_max),
            );
            let attached = lock(&client.attached).clone();
            let [stops, stop_ns, stop_ns_max] = attached.as_ref().map_or([0; 3], |attached| attached.stops());
            status.clients.push(ColdClient {
                pid: client.pid,
                uid: client.uid,
                name: client.name.clone(),
                domain: group.key.1.clone(),
                pages_out: client.pages_out(&group.tier),
                pages_evicted: get(&counters.pages_evicted),
                refaults: get(&counters.refaults),
                pages_returned: get(&counters.pages_returned),
                zero_faults: get(&counters.zero_faults),
                pages_lost: client.table.head().lost.load(Ordering::Relaxed),
                fault_ns: get(&counters.fault_ns),
                fault_us_log2,
                waits,
                waits_recent,
                // Without a policy a lent client has its memory here until it is unparked, so it is parked also under a
                // successor.
                parked: client.is_parked() || activity == Activity::Unwatched && client.lent.load(Ordering::Relaxed),
                activity,
                connected: lock(&client.socket).is_some(),
                attached: attached.is_some(),
                stops,
                stop_ns,
                stop_ns_max,
                idle_s: client
                    .eviction
                    .try_lock()
                    .ok()
                    .and_then(|state| state.pacing.pace)
                    .map_or(0.0, |pace| pace.idle_s),
                agent_cpu_ns: get(&counters.agent_cpu_ns),
            });
        }
    }
    status
}
