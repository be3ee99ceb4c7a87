//! What status shows of the cold tier.
//!
//! Counters are read one by one, without a lock over all: sums may be a moment apart.

use super::tiers::Tiers;
use pagefold_os::sync::lock;
use serde::{Deserialize, Serialize};
use std::sync::atomic::Ordering;

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
    /// Pages that are out now.
    pub pages_out: u64,
    /// Pages that ever went out.
    pub pages_out_ever: u64,
    /// Faults on pages that were out.
    pub refaults: u64,
    /// Pages that came back, with neighbours and by unpark.
    pub pages_back: u64,
    /// Faults on fresh pages of regions with pages out.
    pub zero_faults: u64,
    /// Pages lost: damaged, unreadable, or the tier died. SIGBUS for a thread that touches them.
    pub pages_lost: u64,
    /// Time that the client's threads waited for pages, in nanoseconds.
    pub fault_ns: u64,
    /// Faults by time from reading to answering: entry `i` counts those below 2^i microseconds.
    pub fault_us_log2: Vec<u64>,
    /// Put out by `park`, and not brought back by `unpark` since.
    pub parked: bool,
    /// The agent is connected.
    pub connected: bool,
    /// How long a page must be silent before it goes out, in seconds; 0 before the first look.
    pub idle_s: f64,
    /// Processor time of the agent in nanoseconds.
    pub agent_cpu_ns: u64,
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
    pub held_bytes: u64,
    /// Limit of the arena.
    pub bytes_max: u64,
    /// `cold_bytes` for each byte held.
    pub ratio: f64,
    /// Pages, and the different contents that they show.
    pub pages: u64,
    /// See `pages`.
    pub contents: u64,
    /// Contents in memory kept by Zstandard, or as a patch against a near page.
    pub contents_dense: u64,
    /// Contents ever made dense by the cleaner.
    pub recompressed: u64,
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
    /// The keeper's process holds our descriptors.
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
            held_bytes: stats.bytes_held + stats.bytes_metadata,
            bytes_max: stats.bytes_max,
            ratio: stats.ratio(),
            pages: stats.pages,
            contents: stats.contents,
            contents_dense: stats.contents_zstd + stats.contents_patch,
            recompressed: stats.recompressed,
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
            status.clients.push(ColdClient {
                pid: client.pid,
                uid: client.uid,
                name: client.name.clone(),
                domain: group.key.1.clone(),
                pages_out: client.pages_out(&group.tier),
                pages_out_ever: get(&counters.pages_out_ever),
                refaults: get(&counters.refaults),
                pages_back: get(&counters.pages_back),
                zero_faults: get(&counters.zero_faults),
                pages_lost: client.table.head().lost.load(Ordering::Relaxed),
                fault_ns: get(&counters.fault_ns),
                fault_us_log2: counters.fault_us.iter().map(get).collect(),
                // A leased client has its memory here until it is unparked, so it is parked also under a successor.
                parked: client.is_parked() || client.leased.load(Ordering::Relaxed),
                connected: lock(&client.socket).is_some(),
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
