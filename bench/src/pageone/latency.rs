//! Single latencies: the first write to a shared page, the way from duplicates to one copy, a pass with nothing to do.

use super::args::Args;
use super::engine::{MergingEngine, Running};
use super::settle::{PERIOD, QUIET, settle};
use super::workload::{PageLayout, Shape};
use crate::process::Failure;
use crate::record;
use crate::stats::{Spread, quantile};
use serde_json::json;
use std::time::{Duration, Instant};

/// Two processes with `mib` MiB of files each.
fn two_of(mib: u64, equal_percent: u64) -> Shape {
    Shape { layout: PageLayout::Files, processes: 2, mib, equal_percent }
}

/// First write to each of many shared pages.
pub fn breaks(args: &Args) -> Result<(), Failure> {
    let shape = two_of(if args.extent.quick { 40 } else { 160 }, 100);
    let pages = shape.mib * 256 / 2;
    let mut rows = Vec::new();
    for engine in args.pair() {
        let (mut p50, mut p99) = (Vec::new(), Vec::new());
        for _ in 0..args.rounds() {
            let running = Running::start(engine, PERIOD)?;
            let mut workload = running.workload(shape)?;
            workload.fill()?;
            settle(&running, QUIET)?;
            let times = workload.write_to(pages)?;
            p50.push(quantile(&times, 0.5).unwrap_or(0) as f64);
            p99.push(quantile(&times, 0.99).unwrap_or(0) as f64);
            workload.check()?;
        }
        let (p50, p99) = (Spread::of(p50), Spread::of(p99));
        rows.push(json!({ "part": "breaks", "engine": engine.name(), "pages": pages, "p50_ns": p50, "p99_ns": p99 }));
    }
    record::table(
        &format!("breaks: the first write to each of {pages} shared pages, in nanoseconds"),
        "engine|p50=p50_ns:0|p99=p99_ns:0",
        rows,
    );
    Ok(())
}

/// From the last duplicate written to nine tenths of them merged.
pub fn delay(args: &Args) -> Result<(), Failure> {
    let shape = two_of(if args.extent.quick { 40 } else { 512 }, 100);
    let (period, mut rows) = (Duration::from_secs(1), Vec::new());
    for engine in args.pair().into_iter().rev() {
        let mut times = Vec::new();
        for _ in 0..args.rounds() {
            let running = Running::start(engine, period)?;
            let mut workload = running.workload(shape)?;
            running.go()?;
            workload.fill()?;
            let began = Instant::now();
            while running.look().merged * 10 < shape.pages() * 9 {
                if began.elapsed() > Duration::from_secs(120) {
                    return Err(format!("{}: not merged within two minutes", engine.name()).into());
                }
                std::thread::sleep(Duration::from_millis(10));
            }
            times.push(began.elapsed().as_secs_f64());
            workload.check()?;
        }
        let times = Spread::of(times);
        rows.push(
            json!({ "part": "delay", "engine": engine.name(), "mib": shape.processes * shape.mib, "seconds": times }),
        );
    }
    record::table(
        &format!("delay: from {} MiB of duplicates written to 90 % merged, period 1 s", shape.processes * shape.mib),
        "engine|seconds:2",
        rows,
    );
    Ok(())
}

/// The longest time for the passes of one measurement.
const PASS_MAX: Duration = Duration::from_secs(120);

/// Passes of one measurement: in this many each client is looked at once at least.
const PASSES: f64 = 16.0;

/// Processor time of a pass over memory that was examined already: of daemon and agents, or of ksmd. Our daemon skips a
/// process that has no page fault, so passes that look at every process are measured as well.
pub fn idle(args: &Args) -> Result<(), Failure> {
    let shape = match (args.extent.quick, args.extent.full) {
        (true, _) => two_of(128, 100),
        (_, true) => two_of(2048, 100),
        _ => two_of(1024, 100),
    };
    let gib = (shape.processes * shape.mib) as f64 / 1024.0;
    let mut rows = Vec::new();
    for engine in args.pair() {
        let ours = matches!(engine, MergingEngine::Ours { .. });
        let (mut rest, mut looks) = (Vec::new(), Vec::new());
        for _ in 0..args.rounds() {
            let running = Running::start(engine, PERIOD)?;
            let mut workload = running.workload(shape)?;
            workload.fill()?;
            settle(&running, QUIET)?;
            let passes = if ours { PASSES } else { 1.0 };
            rest.push(us_per_pass(&running, shape.processes, passes, args.extent.quick)? / gib);
            if ours {
                // Longer than the measurement, so that its last pass still meets processes with faults.
                let time = PERIOD * 30;
                looks.push(
                    workload.fault_elsewhere(time, || {
                        std::thread::sleep(2 * PERIOD);
                        us_per_pass(&running, shape.processes, PASSES, args.extent.quick)
                    })?? / gib,
                );
            }
            workload.check()?;
        }
        let names = [engine.name(), format!("{}, faults elsewhere", engine.name())];
        for (name, times) in names.into_iter().zip([rest, looks]).filter(|(_, times)| !times.is_empty()) {
            rows.push(json!({ "part": "idle", "engine": name, "gib": gib, "us_per_gib": Spread::of(times) }));
        }
    }
    record::table(
        &format!("idle: processor time of one pass over {gib} GiB in which nothing changed, in microseconds per GiB"),
        "engine|us per GiB=us_per_gib:0",
        rows,
    );
    Ok(())
}

/// Processor time of looking at memory for the first time, and of merging what is equal: until we have come to rest, or
/// until KSM has passed twice. It takes checksums in the first pass, and merges in the second.
pub fn first(args: &Args) -> Result<(), Failure> {
    let (mib, shares) = match (args.extent.quick, args.extent.full) {
        (true, _) => (128, &[50][..]),
        (_, true) => (2048, &[0, 10, 50][..]),
        _ => (1024, &[0, 10, 50][..]),
    };
    let mut rows = Vec::new();
    for (engine, share) in args.pair().into_iter().flat_map(|engine| shares.iter().map(move |share| (engine, *share))) {
        let shape = two_of(mib, share);
        let mut times = Vec::new();
        for _ in 0..args.rounds() {
            let running = Running::start(engine, PERIOD)?;
            let mut workload = running.workload(shape)?;
            workload.fill()?;
            times.push(first_look_ns(&running, shape)? as f64 / 1e3 / shape.pages() as f64);
            workload.check()?;
        }
        rows.push(json!({ "part": "first", "engine": engine.name(), "gib": shape.pages() as f64 / f64::from(1 << 18),
            "equal_percent": share, "cpu_us_per_page": Spread::of(times) }));
    }
    record::table(
        "first looks: processor time for each page of memory that was not looked at before",
        "engine|GiB=gib:2|equal=equal_percent:0 %|CPU us/page=cpu_us_per_page:2",
        rows,
    );
    Ok(())
}

/// Merges until the engine has looked at every page and merged what is equal; returns its processor time for that.
fn first_look_ns(running: &Running, shape: Shape) -> Result<u64, Failure> {
    let (began, before) = (Instant::now(), running.passes(shape.processes)?);
    running.go()?;
    let mut last = running.look();
    loop {
        std::thread::sleep(Duration::from_millis(40));
        let now = running.look();
        let is_done = match running {
            Running::Ours(_) => now.activity >= shape.pages() && last.at.elapsed() > QUIET,
            Running::Ksm(..) => running.passes(shape.processes)?.count >= before.count + 2.0,
        };
        if is_done {
            return Ok(now.cpu_ns - before.cpu_ns);
        }
        if now.activity > last.activity {
            last = now;
        }
        if began.elapsed() > PASS_MAX {
            return Err(format!("{PASS_MAX:?} were too short for a first look").into());
        }
    }
}

/// Waits for `passes` passes; returns the processor time of one, in microseconds.
fn us_per_pass(running: &Running, processes: u64, passes: f64, quick: bool) -> Result<f64, Failure> {
    let (began, before) = (Instant::now(), running.passes(processes)?);
    loop {
        std::thread::sleep(Duration::from_secs(if quick { 2 } else { 5 }));
        let after = running.passes(processes)?;
        if after.count >= before.count + passes {
            return Ok((after.cpu_ns - before.cpu_ns) as f64 / 1000.0 / (after.count - before.count));
        }
        if began.elapsed() > PASS_MAX {
            return Err(format!("no {passes} passes within {PASS_MAX:?}").into());
        }
    }
}
