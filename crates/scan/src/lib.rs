//! A dry run: what merging would save, found without changing anything.
//!
//! Pages of running processes (or of memory dumps) are read once, hashed and
//! forgotten; what stays of a page is one 64-bit `record`. Then the records
//! are searched for twins (`analyse`), and the twins' addresses for runs, the
//! neighbouring pages that have neighbouring twins: runs decide how fast a
//! merge is and how many mappings it costs.
//!
//! The scan can be trusted to leave processes as they are: it reads
//! `/proc/PID/mem` only where `/proc/PID/pagemap` says that a page is present
//! and the process's own, so that nothing is faulted in; a page that goes away
//! in between may still be. It does not stop anybody, so a page that changes
//! while it is read counts with a content it may never have had.
//!
//! Memory: 14 bytes per page while reading, 23.3 while analysing, and what the
//! allocator keeps of joined pieces, at most 8. Zero pages need none.

#![forbid(unsafe_code)]

mod analyse;
mod config;
mod dump;
mod error;
mod gather;
mod process;
mod record;
mod report;
mod shifted;
mod smaps;
mod source;

pub use config::Config;
pub use dump::Dump;
pub use error::Lost;
pub use gather::Progress;
pub use process::Process;
pub use record::PageKind;
pub use report::{Cost, Histogram, Ksm, Note, Report, Runs, SourceReport, Totals};
pub use smaps::Reason;
pub use source::{Identity, Pages, ScanPlan, Source, WorkUnit};

/// Scans `sources` and returns what was found; calls `progress` about ten times a second.
///
/// A source that cannot be read, ends meanwhile or holds its reader is left out
/// as a whole and noted in the report.
pub fn scan(sources: Vec<Box<dyn Source>>, config: &Config, progress: &mut dyn FnMut(Progress)) -> Report {
    let started = std::time::Instant::now();
    let gathered = gather::gather(sources, config, progress);
    let mut report = analyse::analyse(gathered, config);
    report.seconds = started.elapsed().as_secs_f64();
    report
}
