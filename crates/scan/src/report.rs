//! What a scan reports: plain counters, rendered by the caller.

use crate::smaps::Reason;
use serde::Serialize;
use std::collections::BTreeMap;

/// All that a scan found. Counts are pages of 4 KiB unless the name says otherwise. In a sample, counts of
/// contents are scaled up; zero, examined and left-out pages are exact.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    /// One page content in this many was remembered.
    pub sample_one_in: u32,
    /// How long the scan took.
    pub seconds: f64,
    /// Sums over all sources.
    pub totals: Totals,
    /// Duplicates by the length of the runs they come in.
    pub runs: Runs,
    /// What merging would save, and cost.
    pub cost: Cost,
    /// What the kernel's KSM would save on the same processes.
    pub ksm: Ksm,
    /// Present pages that would not be merged, and why.
    pub not_merged: BTreeMap<Reason, u64>,
    /// The sources, as they were given.
    pub sources: Vec<SourceReport>,
    /// What went wrong without stopping the scan.
    pub notes: Vec<Note>,
}

/// Pages by what they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Totals {
    /// Read and looked at.
    pub examined: u64,
    /// Zero, in memory of their own.
    pub zero: u64,
    /// The kernel's zero page: cost nothing already.
    pub zero_mapped: u64,
    /// Equal to no other page.
    pub unique: u64,
    /// Copies of a page of the same source, the first not counted.
    pub duplicate_inside: u64,
    /// Copies of a page of another source, the first not counted. For one source: its pages that others hold too.
    pub duplicate_across: u64,
    /// Duplicates, the first copies counted, that are part of a huge page: merging them splits it.
    pub duplicate_huge: u64,
    /// Equal to other memory at another place within its page, so no merge of pages shares it; first copies not counted. An
    /// estimate from one line in 256; 0 in a sample.
    pub duplicate_shifted: u64,
    /// Shared by fork or by KSM.
    pub shared_already: u64,
    /// Shared by pagefold; not among the examined.
    pub shared_by_pagefold: u64,
    /// Examined, but only the kernel could merge them; see `not_merged`.
    pub kernel_only: u64,
    /// In swap; not looked at.
    pub swapped: u64,
    /// Held by devices (`VmPin`), at most; counted elsewhere too.
    pub pinned: u64,
}

/// Runs of one range of lengths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Histogram {
    /// Shortest run counted here, in pages.
    pub from: u64,
    /// Longest run counted here; the last bucket has no end.
    pub to: Option<u64>,
    /// Number of runs.
    pub runs: u64,
    /// Pages in them.
    pub pages: u64,
}

/// Runs of neighbouring pages that have neighbouring twins; each would be one mapping.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Runs {
    /// Pages that have a twin, the first copies counted.
    pub pages: u64,
    /// Number of runs; in a sample an estimate.
    pub count: u64,
    /// Mean length in pages.
    pub mean: f64,
    /// By length, doubling. Empty in a sample.
    pub histogram: Vec<Histogram>,
}

/// The bill of a merge, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Cost {
    /// Memory of duplicates that would be freed.
    pub duplicate_bytes: u64,
    /// Memory of zero pages that would be freed.
    pub zero_bytes: u64,
    /// Duplicates that would stay because their runs are beyond a process's mapping budget.
    pub over_budget_pages: u64,
    /// Mappings that the merge would make.
    pub mappings: u64,
    /// Kernel memory for them, at [`Cost::MAPPING_BYTES`] each.
    pub mapping_bytes: u64,
    /// Our memory for the pages looked at, at [`Cost::SCANNED_BYTES`] each.
    pub scanned_bytes: u64,
    /// Our memory for the pages shared, at [`Cost::SHARED_BYTES`] each.
    pub shared_bytes: u64,
    /// Deduplicated bytes less what the merge costs.
    pub saved_bytes: i64,
    /// Half the width of the interval in which the saving lies in 19 of 20 samples; 0 without sampling.
    pub sample_error_bytes: u64,
}

impl Cost {
    /// Kernel memory of a mapping, measured on isolated merges.
    pub const MAPPING_BYTES: u64 = 490;
    /// Our memory per page looked at: index, states, fingerprint.
    pub const SCANNED_BYTES: u64 = 16;
    /// Our memory per page shared: ledger and slot.
    pub const SHARED_BYTES: u64 = 24;
}

/// The bill of KSM on the same memory, with `use_zero_pages`, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Ksm {
    /// Pages it would look at, those that only the kernel can merge included.
    pub examined: u64,
    /// Memory of duplicates and zero pages that would be freed.
    pub deduplicated_bytes: u64,
    /// Its memory: one item per page looked at and one node per page kept.
    pub metadata_bytes: u64,
    /// Deduplicated bytes less what the merge costs.
    pub saved_bytes: i64,
}

impl Ksm {
    /// `struct ksm_rmap_item` and `struct ksm_stable_node`, 64 bytes each on 64-bit machines.
    pub const ITEM_BYTES: u64 = 64;
    /// `max_page_sharing`, its default.
    pub const SHARERS_MAX: u64 = 256;
}

/// One process or file.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SourceReport {
    /// Process id, if it is a process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    /// Command name or path.
    pub name: String,
    /// Its domain: pages are compared only inside one.
    pub domain: u64,
    /// Its pages.
    #[serde(flatten)]
    pub totals: Totals,
    /// Its part of the deduplicated bytes: of a page with n copies each copy saves (n-1)/n.
    pub deduplicated_bytes: u64,
    /// Its present pages that would not be merged.
    pub not_merged: BTreeMap<Reason, u64>,
}

/// A source that was left out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Note {
    /// Process id, if it is a process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    /// Command name or path.
    pub name: String,
    /// What happened.
    pub what: String,
    /// True if the user can do something about it: no rights, no such file.
    pub failure: bool,
}
