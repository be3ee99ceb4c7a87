//! Sandboxes: many programs that work for a while and then mostly wait. What does one cost the host while it waits, and how soon does
//! it reply?
//!
//! Each sandbox is a Python program (`bench/holders/sandbox.py`). It does a scripted day of work, a part of which is the same in all
//! sandboxes, and waits. The bench measures the memory that all processes hold, before and after idle memory has left; their
//! processor time while the sandboxes wait; and the time to the first reply, of one sandbox after the other, of the same after they have
//! waited again, and of several at once. In the end each sandbox compares all that it holds.

mod way;

use crate::options::{self, Extent, Only, positive};
use crate::process::{self, Failure};
use crate::record;
use crate::stats::Spread;
use clap::Parser;
use serde_json::{Value, json};
use std::process::ExitCode;
use std::time::Duration;
use way::{Measured, Way};

/// Programs that mostly wait: what they cost, and how soon they reply.
#[derive(Parser, Debug)]
#[command(
    name = "pagefold bench sandboxes",
    after_help = "Example:\n  pagefold bench sandboxes --sandboxes 24 --rounds 3"
)]
struct Args {
    #[command(flatten)]
    only: Only,
    /// Sandboxes; without it 24 (with --quick 6).
    #[arg(long, value_name = "N", value_parser = positive())]
    sandboxes: Option<usize>,
    /// MiB of data in each, about.
    #[arg(long, value_name = "N", value_parser = positive())]
    mib: Option<usize>,
    /// Runs of each way; the median and the spread are shown. Without it one.
    #[arg(long, value_name = "N", value_parser = positive())]
    rounds: Option<usize>,
    #[command(flatten)]
    extent: Extent,
}

/// Entry point.
pub fn run(args: &[String]) -> ExitCode {
    options::run("sandboxes", args, |args| measure(&args))
}

/// What is measured: how many sandboxes of what size, and for how long they wait.
#[derive(Clone, Copy, Debug)]
struct Plan {
    sandboxes: usize,
    mib: usize,
    /// From the end of the work until what can leave has left.
    settles: Duration,
    /// The time over which processor time is counted.
    waits: Duration,
}

impl Plan {
    fn of(args: &Args) -> Plan {
        let [settles, waits] = if args.extent.quick { [12, 3] } else { [60, 20] }.map(Duration::from_secs);
        Plan {
            sandboxes: args.sandboxes.unwrap_or(if args.extent.quick { 6 } else { 24 }),
            mib: args.mib.unwrap_or(if args.extent.quick { 16 } else { 64 }),
            settles,
            waits,
        }
    }
}

/// The row of a way, from all its rounds.
fn row(plan: Plan, way: Way, rounds: &[Measured]) -> Value {
    let spread = |of: fn(&Measured) -> f64| Spread::of(rounds.iter().map(of));
    json!({
        "way": way.name(), "sandboxes": plan.sandboxes, "mib": plan.mib,
        "busy_mib": spread(|round| round.busy_mib),
        "idle_mib": spread(|round| round.idle_mib),
        "host_idle_mib": spread(|round| round.host_idle_mib),
        "idle_cpu_percent": spread(|round| round.idle_cpu_percent),
        "first_reply_p50_ms": spread(|round| round.one.0),
        "first_reply_max_ms": spread(|round| round.one.1),
        "second_reply_p50_ms": spread(|round| round.again_p50_ms),
        "at_once_max_ms": spread(|round| round.at_once_max_ms),
        "work_s": spread(|round| round.work_s),
        "right": rounds.iter().all(|round| round.is_right),
    })
}

fn measure(args: &Args) -> Result<(), Failure> {
    process::tool()?;
    let plan = Plan::of(args);
    record::emit_versions(
        json!({ "python": process::output(std::process::Command::new("python3").arg("--version"))?.trim() }),
    );
    let (mut rows, mut wrong) = (Vec::new(), Vec::new());
    let wanted = |way: &Way| args.only.wants(way.name()).unwrap_or(!args.extent.quick || way.is_quick());
    for way in Way::ALL.into_iter().filter(wanted) {
        if let Err(why) = way.can_be_measured() {
            eprintln!("SKIPPED: {}: {why}", way.name());
            continue;
        }
        eprintln!("{}", way.name());
        let mut rounds = Vec::new();
        for _ in 0..args.rounds.unwrap_or(1) {
            rounds.push(way.measure(plan).map_err(|error| format!("{}: {error}", way.name()))?);
        }
        let row = row(plan, way, &rounds);
        if row["right"] != true {
            wrong.push(way.name());
        }
        rows.push(row);
    }
    record::table(
        "sandboxes: memory of each, and what it costs while it waits",
        "way|sandboxes|busy MiB=busy_mib:1|idle MiB=idle_mib:1|of the host=host_idle_mib:1|idle CPU=idle_cpu_percent:3 %|first reply p50 ms=first_reply_p50_ms:1|\
         longest=first_reply_max_ms:1|second p50 ms=second_reply_p50_ms:1|at once, longest=at_once_max_ms:1|work s=work_s:2|right",
        rows,
    );
    match wrong.is_empty() {
        true => Ok(()),
        false => Err(format!("a sandbox does not hold its data any more: {}", wrong.join(", ")).into()),
    }
}
