//! Processor time of agents.

use std::sync::atomic::{AtomicU64, Ordering};

/// Raises `known_ns` to `claimed_ns`, the processor time that the agent of `pid` claims, and returns the new value. The
/// claim is believed up to the processor time of the whole process. The kernel tells nothing of a process that has ended or
/// that lives in another pid namespace; then the claim is ignored.
pub(crate) fn note_cpu_ns(known_ns: &AtomicU64, pid: i32, claimed_ns: u64) -> u64 {
    let now = claimed_ns.min(pagefold_os::procfs::cpu_ns(pid).unwrap_or(0));
    known_ns.fetch_max(now, Ordering::Relaxed).max(now)
}
