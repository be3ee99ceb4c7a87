//! What single moments cost: the first write to a shared page, the way from duplicates to one copy, a pass with nothing
//! to do.

use super::crew::{Layout, Shape};
use super::engine::{Engine, Running};
use super::{Failure, Options, PERIOD, QUIET, Report, Spread, quantile, settle};
use serde_json::json;
use std::time::{Duration, Instant};

/// First write to each of many shared pages.
pub fn breaks(options: &Options, report: &mut Report) -> Result<(), Failure> {
    let shape = Shape { layout: Layout::Files, processes: 2, mib: if options.quick { 40 } else { 160 } };
    let pages = shape.mib * 256 / 2;
    crate::record::table!("breaks: the first write to each of {pages} shared pages, in nanoseconds");
    crate::record::table!("{:22} {:>20} {:>20} {:>10} {:>10}", "engine", "p50", "p99", "p50", "p99");
    let mut peer: Option<(f64, f64)> = None;
    for engine in options.pair().into_iter().rev() {
        let (mut p50, mut p99) = (Vec::new(), Vec::new());
        for _ in 0..options.rounds {
            let running = Running::start(engine, PERIOD)?;
            let mut crew = running.crew(shape)?;
            crew.fill()?;
            settle(&running, QUIET)?;
            let times = crew.write_to(pages)?;
            p50.push(quantile(&times, 0.5) as f64);
            p99.push(quantile(&times, 0.99) as f64);
            crew.check()?;
        }
        let (p50, p99) = (Spread::of(p50), Spread::of(p99));
        let against = peer.map(|peer| (p50.median / peer.0, p99.median / peer.1));
        let ratio = |ratio: Option<f64>| ratio.map_or("-".into(), |ratio| format!("{ratio:.2} x"));
        crate::record::table!(
            "{:22} {:>20} {:>20} {:>10} {:>10}",
            engine.name(),
            p50.show(0),
            p99.show(0),
            ratio(against.map(|both| both.0)),
            ratio(against.map(|both| both.1))
        );
        report.rows.push(json!({
            "part": "breaks", "engine": engine.name(), "pages": pages, "p50_ns": p50.json(), "p99_ns": p99.json(),
            "p50_against_ksm": against.map(|both| both.0), "p99_against_ksm": against.map(|both| both.1),
        }));
        peer.get_or_insert((p50.median, p99.median));
    }
    Ok(())
}

/// From the last duplicate written to nine tenths of them merged.
pub fn delay(options: &Options, report: &mut Report) -> Result<(), Failure> {
    let shape = Shape { layout: Layout::Files, processes: 2, mib: if options.quick { 40 } else { 512 } };
    let period = Duration::from_secs(1);
    crate::record::table!(
        "delay: from {} MiB of duplicates written to 90 % merged, period 1 s",
        shape.processes * shape.mib
    );
    crate::record::table!("{:22} {:>20}", "engine", "seconds");
    for engine in options.pair() {
        let mut times = Vec::new();
        for _ in 0..options.rounds {
            let running = Running::start(engine, period)?;
            let mut crew = running.crew(shape)?;
            running.go()?;
            crew.fill()?;
            let began = Instant::now();
            while running.look().merged * 10 < shape.pages() * 9 {
                if began.elapsed() > Duration::from_secs(120) {
                    return Err(format!("{}: not merged within two minutes", engine.name()).into());
                }
                std::thread::sleep(Duration::from_millis(10));
            }
            times.push(began.elapsed().as_secs_f64());
            crew.check()?;
        }
        let times = Spread::of(times);
        crate::record::table!("{:22} {:>20}", engine.name(), times.show(2));
        report.rows.push(json!({ "part": "delay", "engine": engine.name(), "mib": shape.processes * shape.mib, "seconds": times.json() }));
    }
    Ok(())
}

/// No pass takes longer.
const PASS_MAX: Duration = Duration::from_secs(120);

/// Passes of one measurement: of so many in a row each client is looked at in one at least.
const PASSES: f64 = 16.0;

/// Processor time of a pass over memory that was examined already: all that daemon and agents spend meanwhile, or ksmd. Ours
/// leaves looks out while a process has no page fault, so it is measured where each pass looks as well.
pub fn idle(options: &Options, report: &mut Report) -> Result<(), Failure> {
    let shape = match (options.quick, options.full) {
        (true, _) => Shape { layout: Layout::Files, processes: 2, mib: 128 },
        (_, true) => Shape { layout: Layout::Files, processes: 2, mib: 2048 },
        _ => Shape { layout: Layout::Files, processes: 2, mib: 1024 },
    };
    let gib = (shape.processes * shape.mib) as f64 / 1024.0;
    crate::record::table!(
        "idle: processor time of one pass over {gib} GiB in which nothing changed, in microseconds per GiB"
    );
    crate::record::table!("{:34} {:>24} {:>10} {:>24}", "engine", "us per GiB", "of KSM's", "watching, wall us");
    let mut peer: Option<f64> = None;
    for engine in options.pair().into_iter().rev() {
        let ours = matches!(engine, Engine::Ours { .. });
        let (mut rest, mut looks) = (Moments::default(), Moments::default());
        for _ in 0..options.rounds {
            let running = Running::start(engine, PERIOD)?;
            let mut crew = running.crew(shape)?;
            crew.fill()?;
            settle(&running, QUIET)?;
            rest.add(&running, shape.processes, gib, if ours { PASSES } else { 1.0 }, options.quick)?;
            if ours {
                // Longer than is measured: who begins late must not look at processes that rest again.
                let time = PERIOD * 30;
                crew.fault_elsewhere(time, || {
                    std::thread::sleep(2 * PERIOD);
                    looks.add(&running, shape.processes, gib, PASSES, options.quick)
                })??;
            }
            crew.check()?;
        }
        let names = [engine.name(), format!("{}, faults elsewhere", engine.name())];
        for (name, moments) in names.into_iter().zip([rest, looks]).take(1 + usize::from(ours)) {
            let (times, watching) = (Spread::of(moments.times), Spread::of(moments.watching));
            let share = peer.map(|peer| times.median / peer);
            crate::record::table!(
                "{name:34} {:>24} {:>10} {:>24}",
                times.show(0),
                share.map_or("-".into(), |share| format!("1/{:.0}", 1.0 / share)),
                watching.show(0)
            );
            report.rows.push(json!({
                "part": "idle", "engine": name, "gib": gib, "us_per_gib": times.json(), "of_ksm": share,
                "watch_wall_us_per_gib": watching.json(),
            }));
            peer.get_or_insert(times.median);
        }
    }
    Ok(())
}

/// What passes took, in microseconds per GiB.
#[derive(Default)]
struct Moments {
    times: Vec<f64>,
    watching: Vec<f64>,
}

impl Moments {
    /// Waits for so many passes and notes what one of them took.
    fn add(&mut self, running: &Running, processes: u64, gib: f64, passes: f64, quick: bool) -> Result<(), Failure> {
        let (began, before) = (Instant::now(), running.passes(processes)?);
        let after = loop {
            std::thread::sleep(Duration::from_secs(if quick { 2 } else { 5 }));
            let after = running.passes(processes)?;
            if after.count >= before.count + passes {
                break after;
            }
            if began.elapsed() > PASS_MAX {
                return Err(format!("no {passes} passes within {PASS_MAX:?}").into());
            }
        };
        let per_gib = |ns: u64| ns as f64 / 1000.0 / (after.count - before.count) / gib;
        self.times.push(per_gib(after.cpu_ns - before.cpu_ns));
        self.watching.extend(after.watch_ns.zip(before.watch_ns).map(|(after, before)| per_gib(after - before)));
        Ok(())
    }
}
