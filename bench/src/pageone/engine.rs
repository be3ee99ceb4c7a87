//! The engines: pagefold's daemon and the kernel's KSM, started, resumed and queried in the same way.

use super::workload::{Shape, Workload};
use crate::ksm_peer;
use crate::process::{Failure, wait_for};
use crate::tool::Daemon;
use pagefold_daemon::VMA_BUDGET_MAX;
use pagefold_daemon::control::{self, Answer, Request};
use pagefold_os::{ksm, procfs};
use pagefold_protocol::wait_histogram;
use std::time::{Duration, Instant};

/// A merging engine and its settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MergingEngine {
    /// pagefold with this many workers; `predict` as the daemon does by default.
    Ours { workers: usize, predict: bool },
    /// KSM at full speed.
    Ksm,
}

impl MergingEngine {
    /// As the tables call it.
    pub fn name(self) -> String {
        match self {
            MergingEngine::Ours { workers, predict } => {
                let (more, way) = (if workers > 1 { "s" } else { "" }, if predict { "" } else { ", hashed" });
                format!("pagefold, {workers} worker{more}{way}")
            }
            MergingEngine::Ksm => "KSM, smart_scan 1".to_owned(),
        }
    }
}

/// How far an engine was at some time.
#[derive(Clone, Copy, Debug)]
pub struct Look {
    /// When.
    pub at: Instant,
    /// Places that show a shared page, the first of each content included, or were zero and are dropped.
    pub merged: u64,
    /// Processor time spent so far, in nanoseconds: daemon and agents, or ksmd.
    pub cpu_ns: u64,
    /// Grows as long as the engine works: steps are long, and places are counted at their end.
    pub activity: u64,
    /// Bytes that the host could give out.
    pub available: u64,
}

/// Passes over all memory so far.
#[derive(Clone, Copy, Debug)]
pub struct Passes {
    /// How many.
    pub count: f64,
    /// As in [`Look`]: all processor time of the engine.
    pub cpu_ns: u64,
}

/// An engine that was started.
pub enum Running {
    /// The tool's daemon.
    Ours(Daemon),
    /// The settings to restore, the scanner's process, and the pages merged before.
    Ksm(ksm::Settings, i32, u64),
}

impl Running {
    /// Starts the engine; KSM does not run before [`Running::go`].
    pub fn start(engine: MergingEngine, period: Duration) -> Result<Running, Failure> {
        match engine {
            MergingEngine::Ours { workers, predict } => {
                let (workers, period) =
                    (format!("--workers={workers}"), format!("--scan-interval={}ms", period.as_millis()));
                let mappings = format!("--vma-budget={VMA_BUDGET_MAX}");
                let mut options = vec!["--pool-max=1T", &*mappings, &*workers, &*period];
                options.extend((!predict).then_some("--no-predict"));
                Ok(Running::Ours(Daemon::start(&options)?))
            }
            MergingEngine::Ksm => {
                let settings = ksm_peer::at_full_speed()?;
                ksm::write("run", 2)?;
                ksm::write("run", 0)?;
                // Older kernels lack it.
                let _ = ksm::write("smart_scan", 1);
                let mut running = Running::Ksm(settings, ksm_peer::scanner()?, 0);
                let before = running.look().merged;
                if let Running::Ksm(_, _, held) = &mut running {
                    *held = before;
                }
                Ok(running)
            }
        }
    }

    /// Starts a workload for this engine to merge, but not before [`Running::go`].
    pub fn workload(&self, shape: Shape) -> Result<Workload, Failure> {
        match self {
            Running::Ours(daemon) => {
                let workload = Workload::start(shape, Some(&daemon.socket))?;
                self.hold(&workload.pids())?;
                Ok(workload)
            }
            Running::Ksm(..) => {
                let mut workload = Workload::start(shape, None)?;
                workload.tell("merge", "merging")?;
                Ok(workload)
            }
        }
    }

    /// Pauses these processes; KSM does not run yet anyway.
    pub fn hold(&self, pids: &[i32]) -> Result<(), Failure> {
        let Running::Ours(daemon) = self else { return Ok(()) };
        for pid in pids {
            // A process becomes a client a moment after its greeting.
            let pause = || control::ask(&daemon.socket, &Request::Pause { pid: Some(*pid) });
            let is_paused = || matches!(pause(), Ok(Answer::Done { count: 1 })).then_some(());
            wait_for(&format!("process {pid} as a client"), Duration::from_secs(10), is_paused)?;
        }
        Ok(())
    }

    /// Starts merging.
    pub fn go(&self) -> Result<(), Failure> {
        match self {
            Running::Ours(daemon) => {
                control::ask(&daemon.socket, &Request::Resume { pid: None }).map(drop).map_err(Into::into)
            }
            Running::Ksm(..) => Ok(ksm::write("run", 1)?),
        }
    }

    /// How far it is, by one request to the daemon: answering costs processor time that is measured.
    pub fn look(&self) -> Look {
        let (at, (available, _)) = (Instant::now(), procfs::available_and_total());
        match self {
            Running::Ours(daemon) => {
                let status = daemon.status().unwrap_or_default();
                let events = status.domains.iter().map(|domain| &domain.events);
                Look {
                    at,
                    merged: status.totals.pages_sharing + status.totals.pages_zero,
                    cpu_ns: status.totals.cpu_ns,
                    activity: events.map(|events| events.pages_fingerprinted + events.pages_merged).sum(),
                    available,
                }
            }
            Running::Ksm(_, scanner, held) => {
                let read = |name| ksm::read(name).unwrap_or(0).max(0) as u64;
                let merged = read("pages_sharing") + read("pages_shared") + read("ksm_zero_pages");
                let merged = merged.saturating_sub(*held);
                Look { at, merged, cpu_ns: procfs::cpu_ns(*scanner).unwrap_or(0), activity: merged, available }
            }
        }
    }

    /// Pages that no longer take memory: all places of a content but one, and all that are zero.
    pub fn saved(&self) -> u64 {
        match self {
            Running::Ours(daemon) => {
                let totals = daemon.status().unwrap_or_default().totals;
                (totals.pages_sharing + totals.pages_zero).saturating_sub(totals.pages_shared)
            }
            Running::Ksm(..) => self.look().merged.saturating_sub(ksm::read("pages_shared").unwrap_or(0).max(0) as u64),
        }
    }

    /// Passes over all memory of this many processes, and their processor time.
    pub fn passes(&self, processes: u64) -> Result<Passes, Failure> {
        match self {
            Running::Ours(daemon) => {
                let status = daemon.status()?;
                let scans: u64 = status.domains.iter().map(|domain| domain.events.full_scans).sum();
                Ok(Passes { count: scans as f64 / processes as f64, cpu_ns: status.totals.cpu_ns })
            }
            Running::Ksm(_, scanner, _) => Ok(Passes {
                count: ksm::read("full_scans")? as f64,
                cpu_ns: procfs::cpu_ns(*scanner).ok_or("ksmd is gone")?,
            }),
        }
    }

    /// Bytes of records: ours, or KSM's for `pages` that it looks at.
    pub fn metadata_bytes(&self, pages: u64) -> u64 {
        match self {
            Running::Ours(daemon) => {
                daemon.status().map_or(0, |status| status.totals.metadata_bytes + status.totals.mapping_bytes)
            }
            Running::Ksm(..) => pages * ksm_peer::RECORD_BYTES,
        }
    }

    /// Memory of the engine itself that no program's share counts: the daemon's, or KSM's records.
    pub fn own_bytes(&self, pages: u64) -> u64 {
        match self {
            Running::Ours(daemon) => daemon.own_bytes().unwrap_or(0),
            Running::Ksm(..) => self.metadata_bytes(pages),
        }
    }

    /// 99 % of freezes were shorter than this, in microseconds; KSM does not freeze.
    pub fn freeze_us_p99(&self) -> Option<f64> {
        let Running::Ours(daemon) = self else { return None };
        let clients = daemon.status().ok()?.clients;
        let buckets = clients.iter().map(|client| client.freeze_us.len()).max()?;
        let counts: Vec<u64> =
            (0..buckets).map(|bucket| clients.iter().filter_map(|client| client.freeze_us.get(bucket)).sum()).collect();
        let total: u64 = counts.iter().sum();
        let mut seen = 0;
        let at = counts.iter().position(|count| {
            seen += count;
            seen as f64 >= total as f64 * 0.99
        });
        at.map(|bucket| wait_histogram::bucket_end(bucket) as f64)
    }

    /// Words that start a program under it: none for KSM.
    pub fn run(&self, options: &[&str]) -> Vec<String> {
        match self {
            Running::Ours(daemon) => daemon.run(options),
            Running::Ksm(..) => Vec::new(),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Running::Ksm(settings, ..) = self {
            settings.restore();
        }
    }
}
