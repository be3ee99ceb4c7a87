//! What sandboxes cost while they wait, and how soon they reply.

use super::Plan;
use super::way::{Way, swapped_group};
use crate::instance::Instance;
use crate::process::Failure;
use crate::stats;
use pagefold_os::procfs;
use std::time::{Duration, Instant};

/// The most that are asked at once.
const AT_ONCE: usize = 10;

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

impl Way {
    /// One round.
    pub fn measure(self, plan: Plan) -> Result<Measured, Failure> {
        let before = lacking_mib();
        // Merging comes first.
        let idle = format!("--park-idle={}s", plan.settles.as_secs() / 3);
        let group = self.swaps().then(|| swapped_group("sandboxes")).transpose()?;
        let swap = (plan.sandboxes * (plan.mib + 64) * 2) << 20;
        let engine =
            self.engine(plan.kind, swap, &["--cold-policy=manual", &idle, "--park-within=2s"], group.as_ref())?;
        let (mut sandboxes, began) = (Vec::new(), Instant::now());
        for seed in 1..=plan.sandboxes {
            sandboxes.push(Instance::start(&mut engine.command(seed, plan.mib))?);
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

/// Memory that the host lacks, in MiB: the median of some looks.
fn lacking_mib() -> f64 {
    let look = |_| {
        std::thread::sleep(Duration::from_millis(300));
        let (available, total) = procfs::available_and_total();
        (total - available) as f64 / f64::from(1 << 20)
    };
    stats::median((0..5).map(look))
}
