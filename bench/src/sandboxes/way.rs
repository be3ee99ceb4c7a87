//! The ways to keep sandboxes, and the measure of one.

use super::Plan;
use crate::files::HOLDERS;
use crate::group::{self, Group};
use crate::instance::Instance;
use crate::ksm_peer;
use crate::process::{self, Failure, wait_for};
use crate::stats;
use crate::tool::Daemon;
use crate::zswap::kernel::Zswap;
use pagefold_daemon::cold::Activity;
use pagefold_os::{ksm, procfs};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

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

/// What was measured in one round.
pub struct Measured {
    /// Memory of each sandbox after its work: all processes' shares of what is in memory (Pss), the daemon's included, and
    /// zswap's pool.
    pub busy_mib: f64,
    /// The same once what can leave has left.
    pub idle_mib: f64,
    /// Memory that the host lacks then, for each: records of the kernel's included, and whatever else happened meanwhile.
    pub host_idle_mib: f64,
    /// Processor time of all, while they wait, for each sandbox.
    pub idle_cpu_percent: f64,
    /// Time to the first reply of sandboxes one after the other, in milliseconds: median and longest.
    pub one: (f64, f64),
    /// The longest of several that are asked at once.
    pub at_once_max_ms: f64,
    /// The median of sandboxes one after the other that have waited once more since their first reply, in milliseconds.
    pub again_p50_ms: f64,
    /// The start and the work of all sandboxes, two at a time.
    pub work_s: f64,
    /// Every sandbox still holds its data.
    pub is_right: bool,
}

/// The engine while it runs.
struct RunningEngine {
    daemon: Option<Daemon>,
    ksm: Option<ksm::Settings>,
    group: Option<Group>,
    zswap: Option<Zswap>,
    writes_file: bool,
}

/// The part of their memory to which the kernel is asked to go.
const RECLAIM_TO: u64 = 10;
/// The longest time for the policy to park all.
const PARK_MAX: Duration = Duration::from_secs(120);
/// The tier's memory shrinks no more for so long: all that can is in its file.
const FILE_QUIET: Duration = Duration::from_secs(5);
/// The most that are asked at once.
const AT_ONCE: usize = 10;

impl Way {
    /// In this order they are measured.
    pub const ALL: [Way; 7] = [Way::Nothing, Way::Ksm, Way::KsmZswap, Way::KsmSwap, Way::Merged, Way::Cold, Way::File];

    /// Whether `--quick` measures it.
    pub fn is_quick(self) -> bool {
        !matches!(self, Way::Ksm | Way::KsmSwap)
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

    fn engine(self, plan: Plan) -> Result<RunningEngine, Failure> {
        let is_ours = matches!(self, Way::Merged | Way::Cold | Way::File);
        // Merging comes first.
        let idle = format!("--park-idle={}s", plan.settles.as_secs() / 3);
        let mut policy = vec!["--cold-policy=manual", &idle, "--park-within=2s"];
        if self == Way::File {
            policy.extend(["--cold-scan-interval=1s", "--tier-file-after=5s"]);
        }
        let with_swap = matches!(self, Way::KsmZswap | Way::KsmSwap);
        let swap = (plan.sandboxes * (plan.mib + 64) * 2) as u64 * (1 << 20);
        Ok(RunningEngine {
            daemon: is_ours.then(|| Daemon::start(&policy)).transpose()?,
            ksm: (self == Way::Ksm || with_swap).then(ksm_peer::at_full_speed).transpose()?,
            group: with_swap.then(|| Group::of_run("sandboxes")).transpose()?,
            zswap: match self {
                Way::KsmZswap => Some(Zswap::start(swap)?),
                Way::KsmSwap => Some(Zswap::swap_alone(swap)?),
                _ => None,
            },
            writes_file: self == Way::File,
        })
    }

    fn command(self, engine: &RunningEngine, seed: usize, mib: usize) -> Command {
        let mut words = match (self, &engine.daemon) {
            (Way::Merged, Some(daemon)) => daemon.run(&["--manage", "all"]),
            (Way::Cold | Way::File, Some(daemon)) => daemon.run(&["--cold"]),
            _ => Vec::new(),
        };
        words.extend(["python3".into(), format!("{HOLDERS}/sandbox.py"), seed.to_string(), mib.to_string()]);
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).stderr(Stdio::null());
        if engine.ksm.is_some() {
            ksm_peer::merge_all(&mut command);
        }
        if let Some(group) = &engine.group {
            group.adopt(&mut command);
        }
        command
    }

    /// One round.
    pub fn measure(self, plan: Plan) -> Result<Measured, Failure> {
        let before = lacking_mib();
        let engine = self.engine(plan)?;
        if engine.ksm.is_some() {
            ksm::write("run", 1)?;
        }
        let (mut sandboxes, began) = (Vec::new(), Instant::now());
        for seed in 1..=plan.sandboxes {
            sandboxes.push(Instance::start(&mut self.command(&engine, seed, plan.mib))?);
            if seed % 2 == 0 || seed == plan.sandboxes {
                let pair = &mut sandboxes[(seed - 1) / 2 * 2..];
                pair.iter().try_for_each(Instance::ready)?;
                pair.iter_mut().try_for_each(|sandbox| sandbox.send("work"))?;
                pair.iter().try_for_each(Instance::answer)?;
            }
        }
        let work_s = began.elapsed().as_secs_f64();
        let pids = engine.pids(&sandboxes);
        let each = |mib: f64| mib / plan.sandboxes as f64;
        let busy_mib = each(engine.held_mib(&pids));
        std::thread::sleep(plan.settles);
        engine.take_idle_memory()?;
        let (idle_mib, host_idle_mib) = (each(engine.held_mib(&pids)), each(lacking_mib() - before));
        let cpu = || pids.iter().filter_map(|pid| procfs::cpu_ns(*pid)).sum::<u64>();
        let (began, cpu_before) = (Instant::now(), cpu());
        std::thread::sleep(plan.waits);
        let cpu_ns = cpu().saturating_sub(cpu_before) as f64;
        let idle_cpu_percent = 100.0 * cpu_ns / began.elapsed().as_nanos() as f64 / plan.sandboxes as f64;
        let mut is_right = true;
        let mut check = |answer: Result<(), String>| {
            if let Err(why) = answer {
                eprintln!("  {}: {why}", self.name());
                is_right = false;
            }
        };
        let at_once = (plan.sandboxes / 2).min(AT_ONCE);
        let (several, singly) = sandboxes.split_at_mut(at_once);
        let mut ask_singly = |sandboxes: &mut [Instance]| {
            let ask = |sandbox: &mut Instance| {
                let began = Instant::now();
                check(sandbox.ask("reply"));
                began.elapsed().as_secs_f64() * 1000.0
            };
            sandboxes.iter_mut().map(ask).collect::<Vec<f64>>()
        };
        let times = ask_singly(singly);
        let longest = times.iter().copied().fold(f64::NAN, f64::max);
        // The policy sees that they have woken, and that they wait again.
        std::thread::sleep(plan.waits);
        engine.take_idle_memory()?;
        let again_p50_ms = stats::median(ask_singly(singly));
        let began = Instant::now();
        several.iter_mut().for_each(|sandbox| check(sandbox.send("reply")));
        several.iter().for_each(|sandbox| check(sandbox.answer()));
        let at_once_max_ms = began.elapsed().as_secs_f64() * 1000.0;
        sandboxes.iter_mut().for_each(|sandbox| check(sandbox.ask("compare")));
        Ok(Measured {
            busy_mib,
            idle_mib,
            host_idle_mib,
            idle_cpu_percent,
            one: (stats::median(times), longest),
            at_once_max_ms,
            again_p50_ms,
            work_s,
            is_right,
        })
    }
}

impl RunningEngine {
    /// Has idle memory leave, in the way of the engine.
    fn take_idle_memory(&self) -> Result<(), Failure> {
        if let Some(daemon) = &self.daemon {
            wait_for("the policy to park all sandboxes", PARK_MAX, || {
                let clients = daemon.status().ok()?.cold.clients;
                (!clients.is_empty() && clients.iter().all(|client| client.activity == Activity::Parked)).then_some(())
            })?;
            if self.writes_file {
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
        if let Some(group) = &self.group {
            // The kernel swaps before it drops the file cache.
            group.set(&[("memory.swappiness", "100")]);
            group.limit(group.used() / RECLAIM_TO)?;
            group.lift();
        }
        Ok(())
    }

    /// What these processes hold, and what was taken from them and is in memory still, in MiB.
    fn held_mib(&self, pids: &[i32]) -> f64 {
        let shares: u64 = pids.iter().filter_map(|pid| procfs::memory(*pid).ok()).map(|memory| memory.pss).sum();
        let compressed = if self.zswap.is_some() { Zswap::bytes().0 } else { 0.0 };
        (shares as f64 + compressed) / f64::from(1 << 20)
    }

    /// The processes that the bench measures: the sandboxes, the daemon, the kernel's scanner.
    fn pids(&self, sandboxes: &[Instance]) -> Vec<i32> {
        let mut pids: Vec<i32> = sandboxes.iter().flat_map(Instance::pids).collect();
        pids.extend(self.daemon.as_ref().map(Daemon::pid));
        if self.ksm.is_some() {
            pids.extend(ksm_peer::scanner().ok());
        }
        pids
    }
}

/// Memory that the host lacks, in MiB: the median of some looks.
fn lacking_mib() -> f64 {
    let look = |_| {
        std::thread::sleep(Duration::from_millis(300));
        let (available, total) = procfs::available_and_total();
        (total - available) as f64 / f64::from(1 << 20)
    };
    stats::median((0..5).map(look))
}
