//! Sandboxes: many programs that work for a while and then mostly wait. What does one cost the host while it waits, how soon
//! does it reply, how much does it slow down its neighbours, and how many fit into a limit of memory?
//!
//! Each sandbox is a program of Python or Node.js (`bench/holders/sandbox.py`, `sandbox.js`). It does a scripted day of
//! work, a part of which is the same in all sandboxes, and waits. The bench measures the memory that all processes hold,
//! before and after idle memory has left; their processor time while the sandboxes wait; and the time to the first reply, of
//! one sandbox after the other, of the same after they have waited again, and of several at once. In the end each sandbox
//! compares all that it holds. `slowdown` and `fits` start others.

mod fits;
mod slowdown;
mod waiting;
mod way;

use crate::options::{self, Extent, Only, positive};
use crate::process::{self, Failure};
use crate::record;
use crate::stats::Spread;
use clap::{Parser, ValueEnum};
use pagefold_os::procfs;
use serde_json::{Value, json};
use std::process::{Command, ExitCode};
use std::time::Duration;
use waiting::Measured;
use way::{Kind, Way};

/// Programs that mostly wait: what they cost, and how soon they reply.
#[derive(Parser, Debug)]
#[command(
    name = "pagefold bench sandboxes",
    after_help = "Example:\n  pagefold bench sandboxes --sandboxes 24 --rounds 3"
)]
struct Args {
    #[command(flatten)]
    only: Only,
    /// The program that each of them is.
    #[arg(long, value_enum, default_value_t = Kind::Python)]
    kind: Kind,
    /// Sandboxes; without it 24 (with --quick 4).
    #[arg(long, value_name = "N", value_parser = positive())]
    sandboxes: Option<usize>,
    /// MiB of data in each, about.
    #[arg(long, value_name = "N", value_parser = positive())]
    mib: Option<usize>,
    /// Runs of each way; the median and the spread are shown. Without it one.
    #[arg(long, value_name = "N", value_parser = positive())]
    rounds: Option<usize>,
    /// What is measured, as a list; without it all.
    #[arg(long, value_name = "PART,…", value_delimiter = ',', value_enum)]
    part: Vec<Part>,
    /// The limit of memory for `fits`, as 8G; without it a twelfth of the machine's memory, 8G at most (with --quick 96M)
    #[arg(long, value_name = "SIZE", value_parser = options::size)]
    limit: Option<u64>,
    #[command(flatten)]
    extent: Extent,
}

/// What can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Memory, processor time and replies of sandboxes that wait.
    Waiting,
    /// The work of one while its neighbours park and wake.
    Slowdown,
    /// How many fit into a limit of memory.
    Fits,
}

impl Args {
    fn wants(&self, part: Part) -> bool {
        self.part.is_empty() || self.part.contains(&part)
    }
}

/// Entry point.
pub fn run(args: &[String]) -> ExitCode {
    options::run("sandboxes", args, |args| measure(&args))
}

/// What is measured: how many sandboxes of what size, and for how long they wait.
#[derive(Clone, Copy, Debug)]
struct Plan {
    kind: Kind,
    sandboxes: usize,
    mib: usize,
    /// From the end of the work until what can leave has left.
    settles: Duration,
    /// The time over which processor time is counted.
    waits: Duration,
    /// For how long a sandbox works beside neighbours, and without.
    works: Duration,
    /// From the work of one sandbox to the start of the next one, where they come until the memory is full.
    pause: Duration,
    /// The memory into which they must fit.
    limit_bytes: u64,
}

/// The most that is filled without a request.
const LIMIT_MAX: u64 = 8 << 30;

impl Plan {
    fn of(args: &Args) -> Plan {
        let limit_bytes = match args.extent.quick {
            true => 96 << 20,
            // In whole GiB.
            false => (procfs::available_and_total().1 / 12).next_multiple_of(1 << 30).min(LIMIT_MAX),
        };
        let times = if args.extent.quick { [6_000, 2_000, 2_000, 600] } else { [60_000, 20_000, 20_000, 3_000] };
        let [settles, waits, works, pause] = times.map(Duration::from_millis);
        Plan {
            kind: args.kind,
            sandboxes: args.sandboxes.unwrap_or(if args.extent.quick { 4 } else { 24 }),
            mib: args.mib.unwrap_or(if args.extent.quick { 16 } else { 64 }),
            settles,
            waits,
            works,
            pause,
            limit_bytes: args.limit.unwrap_or(limit_bytes),
        }
    }

    /// The way as rows have it: those of Python are the published ones.
    fn named(&self, way: Way) -> String {
        let kind = if self.kind == Kind::Python { "" } else { "Node.js: " };
        format!("{kind}{}", way.name())
    }
}

/// The row of a way, from all its rounds.
fn row(plan: Plan, way: Way, rounds: &[Measured]) -> Value {
    let spread = |of: fn(&Measured) -> f64| Spread::of(rounds.iter().map(of));
    json!({
        "part": "waiting", "way": plan.named(way), "sandboxes": plan.sandboxes, "mib": plan.mib,
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

/// The rows of a way, one for each part that is wanted.
fn rows(args: &Args, plan: Plan, way: Way) -> Result<Vec<Value>, Failure> {
    fn rounds<T>(args: &Args, mut one: impl FnMut() -> Result<T, Failure>) -> Result<Vec<T>, Failure> {
        (0..args.rounds.unwrap_or(1)).map(|_| one()).collect()
    }
    let mut rows = Vec::new();
    if args.wants(Part::Waiting) {
        rows.push(row(plan, way, &rounds(args, || way.measure(plan))?));
    }
    if args.extent.quick && !way.is_quickest() {
        return Ok(rows);
    }
    if args.wants(Part::Slowdown) {
        rows.push(slowdown::row(plan, way, &rounds(args, || way.slowdown(plan))?));
    }
    if args.wants(Part::Fits) {
        match fits::can_be_measured() {
            Ok(()) => rows.push(fits::row(plan, way, &rounds(args, || way.fits(plan))?)),
            Err(why) => eprintln!("SKIPPED: {}: how many fit: {why}", way.name()),
        }
    }
    Ok(rows)
}

fn measure(args: &Args) -> Result<(), Failure> {
    process::tool()?;
    let plan = Plan::of(args);
    let program = plan.kind.program();
    let Ok(version) = process::output(Command::new(program).arg("--version")) else {
        eprintln!("SKIPPED: {program} is not installed");
        return Ok(());
    };
    record::emit_versions(json!({ program: version.trim() }));
    let mut rows = Vec::new();
    let wanted = |way: &Way| args.only.wants(way.name()).unwrap_or(!args.extent.quick || way.is_quick());
    for way in Way::ALL.into_iter().filter(wanted) {
        if let Err(why) = way.can_be_measured() {
            eprintln!("SKIPPED: {}: {why}", way.name());
            continue;
        }
        eprintln!("{}", way.name());
        rows.extend(self::rows(args, plan, way).map_err(|error| format!("{}: {error}", way.name()))?);
    }
    let wrong: Vec<&str> =
        rows.iter().filter(|row| row["right"] == false).filter_map(|row| row["way"].as_str()).collect();
    let done = match wrong.is_empty() {
        true => Ok(()),
        false => Err(format!("a sandbox does not hold its data any more: {}", wrong.join(", ")).into()),
    };
    for (part, title, columns) in TABLES {
        let (of_part, rest): (Vec<Value>, _) =
            std::mem::take(&mut rows).into_iter().partition(|row| row["part"] == part);
        rows = rest;
        if !of_part.is_empty() {
            record::table(title, columns, of_part);
        }
    }
    done
}

/// The table of each part.
const TABLES: [(&str, &str, &str); 3] = [
    (
        "waiting",
        "sandboxes: memory of each, and what it costs while it waits",
        "way|sandboxes|busy MiB=busy_mib:1|idle MiB=idle_mib:1|of the host=host_idle_mib:1|idle CPU=idle_cpu_percent:3 %|first reply p50 ms=first_reply_p50_ms:1|\
         longest=first_reply_max_ms:1|second p50 ms=second_reply_p50_ms:1|at once, longest=at_once_max_ms:1|work s=work_s:2|right",
    ),
    (
        "slowdown",
        "sandboxes: a round of work alone, and beside neighbours that park and wake",
        "way|neighbours|wakings a second=wakings_per_s:1|alone s=alone_s:3|beside s=beside_s:3|beside, of alone=beside_percent:1 %|right",
    ),
    (
        "fits",
        "sandboxes: how many fit into a limit, and what ended that",
        "way|limit MiB=limit_mib|sandboxes:0|latest reply ms=latest_reply_ms:0|end|right",
    ),
];
