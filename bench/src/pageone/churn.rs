//! Shared pages that are written again and again: what an engine spends on them, and how much stays one copy meanwhile.

use super::crew::{Layout, Shape};
use super::engine::Running;
use super::{Failure, Options, PERIOD, QUIET, Report, Spread, settle};
use serde_json::json;
use std::time::Duration;

/// Writes anywhere in merged memory, at rates that grow; a write leaves the content as it was, so each breaks a page that
/// could be merged again at once.
pub fn churn(options: &Options, report: &mut Report) -> Result<(), Failure> {
    let (processes, mib, time, rates): (u64, u64, u64, &[u64]) = match options.quick {
        true => (2, 40, 2, &[0, 1000]),
        false => (4, 120, 10, &[0, 100, 1000, 10_000, 100_000]),
    };
    let (shape, time) = (Shape { layout: Layout::Files, processes, mib }, Duration::from_secs(time));
    crate::record::table!("churn: {processes} processes of {mib} MiB, merged, then written to anywhere for {time:?}");
    crate::record::table!(
        "{:22} {:>9} {:>9} {:>20} {:>20} {:>20}",
        "engine",
        "writes/s",
        "reached",
        "processor, %",
        "saved meanwhile, %",
        "write p99, ns"
    );
    for &rate in rates {
        for engine in options.pair() {
            let (mut reached, mut busy, mut saved, mut p99) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
            for _ in 0..options.rounds {
                let running = Running::start(engine, PERIOD)?;
                let mut crew = running.crew(shape)?;
                crew.fill()?;
                let before = crew.pss();
                settle(&running, QUIET)?;
                let merged = crew.pss();
                let from = running.look();
                let mut now = merged;
                // Looked at shortly before the end, by the kernel's account: counters of an engine know of a break later.
                let (writes, longest) = crew.churn(rate, time, |crew| {
                    std::thread::sleep(time * 9 / 10);
                    now = crew.pss();
                })?;
                let to = running.look();
                crew.check()?;
                let seconds = (to.at - from.at).as_secs_f64();
                reached.push(writes as f64 / time.as_secs_f64());
                busy.push((to.cpu_ns - from.cpu_ns) as f64 / 1e7 / seconds);
                saved.push(before.saturating_sub(now) as f64 * 100.0 / before.saturating_sub(merged).max(1) as f64);
                p99.push(longest as f64);
            }
            let [reached, busy, saved, p99] = [reached, busy, saved, p99].map(Spread::of);
            crate::record::table!(
                "{:22} {rate:>9} {:>9.0} {:>20} {:>20} {:>20}",
                engine.name(),
                reached.median,
                busy.show(2),
                saved.show(1),
                p99.show(0)
            );
            report.rows.push(json!({
                "part": "churn", "engine": engine.name(), "processes": processes, "mib_each": mib, "writes_per_s": rate,
                "writes_per_s_reached": reached.json(), "processor_percent": busy.json(),
                "saved_percent": saved.json(), "write_p99_ns": p99.json(),
            }));
        }
    }
    Ok(())
}
