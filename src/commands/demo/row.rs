//! What one way of merging achieved, and what both ways are asked to do.

use super::crew::Crew;
use crate::error::Error;
use serde::Serialize;
use std::time::Duration;

/// Longest time to wait for merging to come to rest.
pub(super) const MERGE_MAX: Duration = Duration::from_secs(120);

/// How long nothing changes, while the processor time of doing nothing is measured.
pub(super) const REST: Duration = Duration::from_secs(4);

/// Pages that each process writes to in the storm.
pub(super) const STORM_PAGES: u64 = 4000;

/// What one way of merging achieved.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    pub(super) name: &'static str,
    pub(super) before_bytes: u64,
    /// With all that merging itself keeps.
    pub(super) after_bytes: u64,
    /// Of that: the daemon and the kernel's mappings, or KSM's records.
    pub(super) own_bytes: u64,
    pub(super) seconds: f64,
    pub(super) cpu_seconds: f64,
    pub(super) pages_merged: u64,
    /// Processor time at rest, percent of one processor.
    pub(super) rest_cpu_percent: f64,
    /// The same at the kernel's own speed, for KSM: it merges slowly then.
    pub(super) rest_cpu_percent_by_default: Option<f64>,
    /// Time of one write in the storm.
    pub(super) write_us: f64,
    pub(super) intact: usize,
    pub(super) processes: usize,
}

/// Has every process write to pages anywhere, all at the same time; returns the time of one write in microseconds.
pub(super) fn storm(crew: &mut Crew) -> Result<f64, Error> {
    let written = crew.tell(&format!("write {STORM_PAGES}"))?;
    let writes = STORM_PAGES * written.count("written").max(1) as u64;
    Ok(written.sum() as f64 / 1e3 / writes as f64)
}
