//! Counters of a store.

use llds::arena::Backing;

/// Contents and memory of a store.
#[derive(Clone, Copy, Debug)]
pub struct Stats {
    /// Entries.
    pub entry_count: u64,
    /// Buckets of eight entries each.
    pub bucket_count: u64,
    /// Bytes in blocks: buckets and records.
    pub allocated_bytes: u64,
    /// Bytes of the spans that the blocks lie in: the memory that the limit counts, without free spans kept for reuse.
    pub held_bytes: u64,
    /// Bytes of free memory kept for reuse.
    pub kept_bytes: u64,
    /// Bytes of directory and locks.
    pub fixed_bytes: u64,
    /// Bytes of the tree that keeps keys in order, 0 without one.
    pub order_bytes: u64,
    /// The memory limit.
    pub limit_bytes: u64,
    /// Pages that the store got.
    pub backing: Backing,
    /// Live threads that have written to it.
    pub thread_count: u64,
    /// Deaths of other processes' threads that were cleaned up.
    pub recovery_count: u64,
}

impl Stats {
    /// Returns the counters as one line of JSON.
    pub fn to_json(&self) -> String {
        format!(
            "{{\"entry_count\":{},\"bucket_count\":{},\"allocated_bytes\":{},\"held_bytes\":{},\"kept_bytes\":{},\
             \"fixed_bytes\":{},\"order_bytes\":{},\"limit_bytes\":{},\"backing\":\"{}\",\"thread_count\":{},\"recovery_count\":{}}}",
            self.entry_count,
            self.bucket_count,
            self.allocated_bytes,
            self.held_bytes,
            self.kept_bytes,
            self.fixed_bytes,
            self.order_bytes,
            self.limit_bytes,
            self.backing.name(),
            self.thread_count,
            self.recovery_count
        )
    }
}
