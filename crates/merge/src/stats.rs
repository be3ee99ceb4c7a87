//! Counters, under KSM's names where the meaning is the same.

use pagefold_protocol::message::RefusalReason;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Events since the domain began; each may be read while others count on.
        #[derive(Debug, Default)]
        pub struct DomainCounters { $($(#[$doc])* pub $name: AtomicU64),* }

        /// A copy of [`DomainCounters`].
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(default)]
        pub struct Events { $($(#[$doc])* pub $name: u64),* }

        impl DomainCounters {
            /// Copies the counters.
            pub fn events(&self) -> Events {
                Events { $($name: self.$name.load(Ordering::Relaxed)),* }
            }
        }
    };
}

counters! {
    /// Scans for writes, summed over clients.
    full_scans,
    /// Of those: memory was not read, because the process had no page fault since the last scan.
    scans_skipped,
    /// Pages that were read and fingerprinted.
    pages_fingerprinted,
    /// Pages mapped to slots.
    pages_merged,
    /// Of those: found by their neighbour's slot, without a fingerprint.
    pages_predicted,
    /// Zero pages dropped.
    pages_zeroed,
    /// Merged pages that were written again.
    cow_breaks,
    /// Written (broken) pages turned back into plain anonymous memory.
    pages_restored,
    /// Merged pages turned back into plain memory so that their pool segment could be freed.
    pages_compacted,
    /// Merged pages that the program discarded, unmapped or replaced.
    pages_discarded,
    /// Runs that were mapped.
    runs_merged,
    /// Comparisons that failed: the page had changed, or the entry was stale.
    compare_failed,
    /// Runs left alone because the budget of mappings was used up.
    over_vma_budget_runs,
    /// Pages left alone because the pool was full.
    pool_full_pages,
    /// Pages left alone because the kernel gave no memory or descriptors for a pool segment.
    segment_alloc_failed_pages,
    /// Nanoseconds spent in the watch stage.
    watch_ns,
    /// Nanoseconds spent reading and fingerprinting.
    fingerprint_ns,
    /// Nanoseconds spent in the index and publishing.
    index_ns,
    /// Nanoseconds spent in remaps, as the worker measures them.
    remap_ns,
}

/// Adds `by` to a counter.
pub fn add(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

/// One client, as of the end of its last step.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClientStats {
    /// Managed pages.
    pub pages: u64,
    /// Pages that show a slot.
    pub pages_sharing: u64,
    /// Zero pages dropped and still holes.
    pub pages_zero: u64,
    /// Pages that change.
    pub pages_volatile: u64,
    /// Pages unwritten for two scans, without an equal page.
    pub pages_unshared: u64,
    /// Pages that were shared and were written.
    pub pages_broken: u64,
    /// Breaks so far.
    pub cow_breaks: u64,
    /// Mappings that merging added, estimated.
    pub mappings: u64,
    /// Pages of huge pages that are left whole.
    pub pages_huge: u64,
    /// Pages that could not be merged, by reason.
    pub not_merged: BTreeMap<String, u64>,
    /// Bytes of pagefold's records about it.
    pub metadata_bytes: u64,
    /// Processor time its agent spent.
    pub agent_cpu_ns: u64,
    /// Nothing is done for it: paused by an operator, or parked.
    pub paused: bool,
}

/// The word for a reason, as shown to people.
pub fn why_word(why: RefusalReason) -> &'static str {
    match why {
        RefusalReason::Done => "done",
        RefusalReason::Changed => "changed meanwhile",
        RefusalReason::Pinned => "pinned or shared by fork",
        RefusalReason::NotAnonymous => "not plain private memory",
        RefusalReason::Absent => "not in memory",
        RefusalReason::Limit => "mapping limit",
        RefusalReason::Discarded => "discarded",
    }
}

/// A domain.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct DomainStats {
    /// Its name.
    pub name: String,
    /// User id of its clients; the owner of the domain fills it in.
    pub uid: u32,
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
    /// Bytes in pool segments.
    pub pool_bytes: u64,
    /// Bytes of released pool segments that a process still maps; they count towards the largest size.
    pub pool_orphaned_bytes: u64,
    /// Largest size of the pool.
    pub pool_max_bytes: u64,
    /// Bytes of index, tables and ledgers.
    pub metadata_bytes: u64,
    /// Bytes of kernel mappings that merging costs, estimated at 245 bytes each.
    pub mapping_bytes: u64,
    /// Bytes of clients' shared and zero pages, before anything of pagefold's own is subtracted.
    pub deduplicated_bytes: u64,
    /// Deduplicated bytes less pool, orphaned pool, metadata and mappings: KSM's general_profit.
    pub general_profit: i64,
    /// Events.
    pub events: Events,
    /// Clients, by number.
    pub clients: BTreeMap<u32, ClientStats>,
}
