//! How many sandboxes fit into a limit of memory.
//!
//! They start one after the other in a control group with that limit, do their work and wait. Now and then all are asked. It
//! is over when one has ended, or is late with a reply. All that keeps them counts: our daemon and keeper with pool and tier
//! live in the group, and the limit goes down by what zswap's pool takes outside of it.

use super::Plan;
use super::way::{RunningEngine, Way, swapped_group};
use crate::group::Group;
use crate::instance::Instance;
use crate::process::{Failure, wait_for};
use crate::restore::Undo;
use crate::stats::Spread;
use crate::zswap::kernel::Zswap;
use serde_json::{Value, json};
use std::cell::Cell;
use std::time::{Duration, Instant};

/// A later reply is missed.
const REPLY_MAX: Duration = Duration::from_secs(1);
/// The longest time for a start and for the work: then it is stuck.
const WORK_MAX: Duration = Duration::from_secs(60);
/// After so large a part of those that there are has been added, all are asked.
const ASKED_AFTER: usize = 8;
/// What was measured in one go.
pub struct Measured {
    /// The sandboxes that all replied in time, the last time that they were asked.
    count: usize,
    /// The latest of these replies, in milliseconds.
    latest_reply_ms: f64,
    /// What happened when there were more.
    end: String,
    /// Every sandbox holds its data, as far as it was asked.
    is_right: bool,
}

/// The limit, and what is in it.
struct Limited<'a> {
    engine: &'a RunningEngine<'a>,
    group: &'a Group,
    bytes: u64,
    swaps: bool,
    /// No sandbox has said that its data is not what it was.
    is_right: Cell<bool>,
}

impl Limited<'_> {
    /// Counts zswap's pool.
    fn count_pool(&self) -> Result<(), String> {
        let pool = if self.swaps { Zswap::bytes().0 as u64 } else { 0 };
        let is_set = || self.group.limit_to(self.bytes.saturating_sub(pool)).then_some(());
        wait_for("zswap's pool within the limit", REPLY_MAX, is_set).map_err(|error| error.to_string())
    }

    /// One more has done its work, and waits.
    fn add(&self, sandboxes: &mut Vec<Instance>, plan: Plan) -> Result<(), String> {
        self.count_pool()?;
        let command = &mut self.engine.command(sandboxes.len() + 1, plan.mib);
        let mut sandbox = Instance::start(command).map_err(|error| error.to_string())?;
        self.says(&sandbox, "ready", WORK_MAX)?;
        sandbox.send("work")?;
        self.says(&sandbox, "right", WORK_MAX)?;
        sandboxes.push(sandbox);
        std::thread::sleep(plan.pause);
        Ok(())
    }

    /// Waits until the sandbox says this.
    fn says(&self, sandbox: &Instance, wanted: &str, limit: Duration) -> Result<(), String> {
        let line = sandbox.line_within(limit)?;
        if line == wanted {
            return Ok(());
        }
        self.is_right.set(false);
        Err(format!("it prints {line:?} instead of {wanted:?}"))
    }

    /// Asks all of them; returns the latest reply.
    fn ask(&self, sandboxes: &mut [Instance]) -> Result<Duration, String> {
        let mut latest = Duration::ZERO;
        for sandbox in sandboxes {
            self.count_pool()?;
            let began = Instant::now();
            sandbox.send("reply")?;
            self.says(sandbox, "right", REPLY_MAX)?;
            latest = latest.max(began.elapsed());
        }
        Ok(latest)
    }
}

/// A line to a sandbox that the kernel has killed is an error, and ends the bench no more, until this is dropped.
fn outlive_sandboxes() -> Undo {
    // SAFETY: neither action runs code of ours.
    let set = |action| unsafe { libc::signal(libc::SIGPIPE, action) };
    let before = set(libc::SIG_IGN);
    Undo::later(move || {
        set(before);
    })
}

/// Why it cannot be measured here, if it cannot.
pub fn can_be_measured() -> Result<(), String> {
    Group::of_run("fits").map(drop).map_err(|error| error.to_string())
}

impl Way {
    /// Measures it once.
    pub fn fits(self, plan: Plan) -> Result<Measured, Failure> {
        let _pipes = outlive_sandboxes();
        let group = swapped_group("fits")?;
        let tier_max = format!("--tier-max={}", plan.limit_bytes / 2);
        // A sandbox is parked before the next one starts.
        let [idle, within] = ["idle", "within"].map(|name| format!("--park-{name}={}ms", plan.pause.as_millis() / 3));
        let swap = plan.limit_bytes as usize * 6;
        let engine = self.engine(plan.kind, swap, &[&idle, &within, &tier_max], Some(&group))?;
        let limited = Limited {
            engine: &engine,
            group: &group,
            bytes: plan.limit_bytes,
            swaps: self.swaps(),
            is_right: Cell::new(true),
        };
        let (mut sandboxes, mut asked) = (Vec::new(), 0);
        let (mut count, mut latest_reply_ms) = (0, f64::NAN);
        let end = loop {
            if let Err(why) = limited.add(&mut sandboxes, plan) {
                break format!("with {}: {why}", sandboxes.len() + 1);
            }
            if sandboxes.len() < asked + (asked / ASKED_AFTER).max(1) {
                continue;
            }
            asked = sandboxes.len();
            match limited.ask(&mut sandboxes) {
                Ok(latest) => (count, latest_reply_ms) = (asked, latest.as_secs_f64() * 1000.0),
                Err(why) => break format!("with {asked}: {why}"),
            }
        };
        // All of a full group at once: what ends in order needs memory for that.
        group.end_all()?;
        Ok(Measured { count, latest_reply_ms, end, is_right: limited.is_right.get() })
    }
}

/// The row of a way, from all that was measured.
pub fn row(plan: Plan, way: Way, measured: &[Measured]) -> Value {
    let spread = |of: fn(&Measured) -> f64| Spread::of(measured.iter().map(of));
    json!({
        "part": "fits", "way": plan.named(way), "limit_mib": plan.limit_bytes >> 20, "mib": plan.mib,
        "sandboxes": spread(|one| one.count as f64),
        "latest_reply_ms": spread(|one| one.latest_reply_ms),
        "end": measured.last().map(|one| one.end.as_str()),
        "right": measured.iter().all(|one| one.is_right),
    })
}
