//! Shared pages that are written again and again: what an engine spends on them, and how much memory stays saved.

use super::args::Args;
use super::engine::Running;
use super::settle::{PERIOD, QUIET, settle};
use super::workload::{PageLayout, Shape};
use crate::process::Failure;
use crate::record;
use crate::stats::Spread;
use serde_json::json;
use std::time::Duration;

/// Writes anywhere in merged memory, at growing rates; a write leaves the content as it was, so each breaks a page that
/// could be merged again immediately.
pub fn churn(args: &Args) -> Result<(), Failure> {
    let (processes, mib, time, rates): (u64, u64, u64, &[u64]) = match args.extent.quick {
        true => (2, 40, 2, &[0, 1000]),
        false => (4, 120, 10, &[0, 100, 1000, 10_000, 100_000]),
    };
    let (shape, time) =
        (Shape { layout: PageLayout::Files, processes, mib, equal_percent: 100 }, Duration::from_secs(time));
    let mut rows = Vec::new();
    for &rate in rates {
        for engine in args.pair().into_iter().rev() {
            let (mut reached, mut busy, mut saved, mut p99) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
            for _ in 0..args.rounds() {
                let running = Running::start(engine, PERIOD)?;
                let mut workload = running.workload(shape)?;
                workload.fill()?;
                let before = workload.pss();
                settle(&running, QUIET)?;
                let merged = workload.pss();
                let from = running.look();
                let mut now = merged;
                // Measured shortly before the end, from the kernel's counters: an engine's own learn of a break later.
                let (writes, longest) = workload.churn(rate, time, |workload| {
                    std::thread::sleep(time * 9 / 10);
                    now = workload.pss();
                })?;
                let to = running.look();
                workload.check()?;
                let seconds = (to.at - from.at).as_secs_f64();
                reached.push(writes as f64 / time.as_secs_f64());
                busy.push((to.cpu_ns - from.cpu_ns) as f64 / 1e7 / seconds);
                saved.push(before.saturating_sub(now) as f64 * 100.0 / before.saturating_sub(merged).max(1) as f64);
                p99.push(longest as f64);
            }
            let [reached, busy, saved, p99] = [reached, busy, saved, p99].map(Spread::of);
            rows.push(json!({
                "part": "churn", "engine": engine.name(), "processes": processes, "mib_each": mib, "writes_per_s": rate,
                "writes_per_s_reached": reached, "processor_percent": busy,
                "saved_percent": saved, "write_p99_ns": p99,
            }));
        }
    }
    record::table(
        &format!("churn: {processes} processes of {mib} MiB, merged, then written to anywhere for {time:?}"),
        "engine|writes/s=writes_per_s|reached=writes_per_s_reached:0|processor=processor_percent:2 %|\
         saved meanwhile=saved_percent:1 %|write p99 ns=write_p99_ns:0",
        rows,
    );
    Ok(())
}
