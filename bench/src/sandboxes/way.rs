//! The ways to keep sandboxes.

use crate::files::HOLDERS;
use crate::group::{self, Group};
use crate::instance::Instance;
use crate::ksm_peer;
use crate::process::{self, Failure, wait_for};
use crate::tool::{Daemon, moved};
use crate::zswap::kernel::Zswap;
use clap::ValueEnum;
use pagefold_daemon::cold::{Activity, ClientSelector};
use pagefold_daemon::control::Request;
use pagefold_os::{ksm, procfs};
use std::io;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The program that a sandbox is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// Python.
    Python,
    /// Node.js.
    Node,
}

impl Kind {
    /// What runs it.
    pub fn program(self) -> &'static str {
        match self {
            Kind::Python => "python3",
            Kind::Node => "node",
        }
    }

    fn script(self) -> String {
        let end = if self == Kind::Python { "py" } else { "js" };
        format!("{HOLDERS}/sandbox.{end}")
    }
}

/// How the host keeps sandboxes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// As they are.
    Nothing,
    /// KSM at full speed for all their memory.
    Ksm,
    /// The same with zswap; when they wait, a limit of their control group has the kernel take what it can, and is lifted.
    KsmZswap,
    /// The same with a swap file alone, on disk.
    KsmSwap,
    /// `pagefold run --manage all` under a park policy: merged live, and what is left goes to the cold tier.
    Merged,
    /// `pagefold run --cold` under a park policy: the cold tier alone.
    Cold,
    /// The same, and what stays cold goes to the tier's file on disk.
    File,
}

/// The engine while it runs.
pub struct RunningEngine<'a> {
    way: Way,
    kind: Kind,
    daemon: Option<Daemon>,
    ksm: Option<ksm::Settings>,
    zswap: Option<Zswap>,
    group: Option<&'a Group>,
}

/// The part of their memory to which the kernel is asked to go.
const RECLAIM_TO: u64 = 10;
/// The longest time for the policy to park all.
const PARK_MAX: Duration = Duration::from_secs(120);
/// The tier's memory shrinks no more for so long: all that can is in its file.
const FILE_QUIET: Duration = Duration::from_secs(5);

impl Way {
    /// In this order they are measured.
    pub const ALL: [Way; 7] = [Way::Nothing, Way::Ksm, Way::KsmZswap, Way::KsmSwap, Way::Merged, Way::Cold, Way::File];

    /// Whether `--quick` measures it: the peer, and what needs most of ours.
    pub fn is_quick(self) -> bool {
        matches!(self, Way::KsmZswap | Way::Merged | Way::File)
    }

    /// Whether `--quick` measures all of it.
    pub fn is_quickest(self) -> bool {
        matches!(self, Way::KsmZswap | Way::Merged)
    }

    /// As the table calls it.
    pub fn name(self) -> &'static str {
        match self {
            Way::Nothing => "nothing",
            Way::Ksm => "KSM",
            Way::KsmZswap => "KSM, zswap",
            Way::KsmSwap => "KSM, swap on disk",
            Way::Merged => "pagefold, merged and parked",
            Way::Cold => "pagefold, cold tier",
            Way::File => "pagefold, cold tier's file on disk",
        }
    }

    /// Why it cannot be measured here, if it cannot.
    pub fn can_be_measured(self) -> Result<(), String> {
        match self {
            Way::Nothing | Way::Merged | Way::Cold | Way::File => Ok(()),
            _ if !process::is_root() => Err("it needs root".into()),
            Way::Ksm => ksm::unused().map_err(|error| error.to_string()),
            Way::KsmZswap | Way::KsmSwap => {
                ksm::unused().and_then(|()| group::zswap_lies_outside()).map_err(|error| error.to_string())?;
                let zswap = Path::new("/sys/module/zswap/parameters/enabled").exists();
                zswap.then_some(()).ok_or_else(|| "this kernel has no zswap".into())
            }
        }
    }

    /// Starts what keeps the sandboxes: ours with these options, swap of `swap_bytes`. All of it, and the sandboxes, live in
    /// `group`, if there is one.
    pub fn engine<'a>(
        self,
        kind: Kind,
        swap_bytes: usize,
        options: &[&str],
        group: Option<&'a Group>,
    ) -> Result<RunningEngine<'a>, Failure> {
        let mut options = options.to_vec();
        if self == Way::File {
            options.extend(["--cold-scan-interval=1s", "--tier-file-after=5s"]);
        }
        let engine = RunningEngine {
            way: self,
            kind,
            daemon: self.is_ours().then(|| Daemon::start_in(group, &options)).transpose()?,
            ksm: (self == Way::Ksm || self.swaps()).then(ksm_peer::at_full_speed).transpose()?,
            zswap: match self {
                Way::KsmZswap => Some(Zswap::start(swap_bytes as u64)?),
                Way::KsmSwap => Some(Zswap::swap_alone(swap_bytes as u64)?),
                _ => None,
            },
            group,
        };
        if engine.ksm.is_some() {
            ksm::write("run", 1)?;
        }
        Ok(engine)
    }

    fn is_ours(self) -> bool {
        matches!(self, Way::Merged | Way::Cold | Way::File)
    }

    /// Whether the kernel takes idle memory.
    pub fn swaps(self) -> bool {
        matches!(self, Way::KsmZswap | Way::KsmSwap)
    }
}

impl RunningEngine<'_> {
    /// The command that starts a sandbox of this seed and size.
    pub fn command(&self, seed: usize, mib: usize) -> Command {
        let mut words = match (self.way, &self.daemon) {
            (Way::Merged, Some(daemon)) => daemon.run(&["--manage", "all"]),
            (Way::Cold | Way::File, Some(daemon)) => daemon.run(&["--cold"]),
            _ => Vec::new(),
        };
        words.extend([self.kind.program().into(), self.kind.script(), seed.to_string(), mib.to_string()]);
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).stderr(Stdio::null());
        if self.ksm.is_some() {
            ksm_peer::merge_all(&mut command);
        }
        if let Some(group) = self.group {
            group.adopt(&mut command);
        }
        command
    }

    /// Starts a sandbox and has it do its work.
    pub fn sandbox(&self, seed: usize, mib: usize) -> Result<Instance, Failure> {
        let mut sandbox = Instance::start(&mut self.command(seed, mib))?;
        sandbox.ready()?;
        sandbox.ask("work")?;
        Ok(sandbox)
    }

    /// Has the memory of one sandbox leave now, in the way of the engine; `group` is the sandbox's own.
    pub fn park(&self, sandbox: &Instance, group: Option<&Group>) -> Result<(), Failure> {
        if let Some(daemon) = &self.daemon {
            moved(&daemon.socket, &Request::Park { clients: ClientSelector::Pid(sandbox.pid()) })?;
        }
        if let Some(group) = group {
            // The kernel takes what it can, and says that it is not all.
            group.limit_to(group.used() / RECLAIM_TO);
            group.lift();
        }
        Ok(())
    }

    /// Has idle memory leave, in the way of the engine.
    pub fn take_idle_memory(&self) -> Result<(), Failure> {
        if let Some(daemon) = &self.daemon {
            wait_for("the policy to park all sandboxes", PARK_MAX, || {
                let clients = daemon.status().ok()?.cold.clients;
                (!clients.is_empty() && clients.iter().all(|client| client.activity == Activity::Parked)).then_some(())
            })?;
            if self.way == Way::File {
                let mut least = (u64::MAX, Instant::now());
                wait_for("the tier to write what is parked to its file", PARK_MAX, || {
                    let domain = daemon.status().ok()?.cold.domains.pop()?;
                    if domain.memory_bytes < least.0 {
                        least = (domain.memory_bytes, Instant::now());
                    }
                    (domain.disk_bytes > 0 && least.1.elapsed() > FILE_QUIET).then_some(())
                })?;
            }
        }
        if let Some(group) = self.group.filter(|_| self.way.swaps()) {
            group.limit(group.used() / RECLAIM_TO)?;
            group.lift();
        }
        Ok(())
    }

    /// What these processes hold, and what was taken from them and is in memory still, in MiB.
    pub fn held_mib(&self, pids: &[i32]) -> f64 {
        let shares: u64 = pids.iter().filter_map(|pid| procfs::memory(*pid).ok()).map(|memory| memory.pss).sum();
        let compressed = if self.zswap.is_some() { Zswap::bytes().0 } else { 0.0 };
        (shares as f64 + compressed) / f64::from(1 << 20)
    }

    /// The processes that the bench measures: the sandboxes, the daemon, the kernel's scanner.
    pub fn pids(&self, sandboxes: &[Instance]) -> Vec<i32> {
        let mut pids: Vec<i32> = sandboxes.iter().flat_map(Instance::pids).collect();
        pids.extend(self.daemon.as_ref().map(Daemon::pid));
        if self.ksm.is_some() {
            pids.extend(ksm_peer::scanner().ok());
        }
        pids
    }
}

/// A group of which the kernel swaps before it drops the file cache.
pub fn swapped_group(name: &str) -> io::Result<Group> {
    let group = Group::of_run(name)?;
    group.set(&[("memory.swappiness", "100")]);
    Ok(group)
}
