//! The most that two workers could do here: two daemons that share nothing, at the same time.
//!
//! Two workers of one daemon share its index, its pool and the kernel's locks of the pool's files. Two daemons with half of
//! the processes each share only the machine. Twice the speed of one such daemon is what they would reach together if
//! processors, memory and hypervisor gave each as much as one.

use super::args::Args;
use super::engine::{Engine, Running};
use super::settle::{PERIOD, QUIET, pace, settle};
use super::workload::{Layout, Shape, Workload};
use crate::process::Failure;
use crate::record;
use crate::stats::Spread;
use serde_json::json;

/// One daemon with half of the processes, alone and beside another.
pub fn measure(args: &Args) -> Result<(), Failure> {
    let whole = args.shape(Layout::Files)?;
    let half = Shape { processes: (whole.processes / 2).max(2), ..whole };
    let (mut alone, mut both, mut ratio) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..args.rounds() {
        let one = speeds(1, half)?;
        let two = speeds(2, half)?;
        ratio.push(two / one);
        alone.push(one);
        both.push(two);
    }
    let (alone, both, ratio) = (Spread::of(alone), Spread::of(both), Spread::of(ratio));
    record::table(
        "two daemons of one worker each that share nothing, against one: pages merged per second",
        "processes each|MiB each=mib_each|one, alone=pages_per_s_alone:0|two, together=pages_per_s_both:0|\
         two against one=both_against_alone:2 x",
        vec![json!({
            "part": "two_daemons", "processes_each": half.processes, "mib_each": half.mib, "pages_per_s_alone": alone,
            "pages_per_s_both": both, "both_against_alone": ratio,
        })],
    );
    Ok(())
}

/// Pages per second that this many daemons merge together at the same time.
fn speeds(daemons: usize, shape: Shape) -> Result<f64, Failure> {
    let mut at_work: Vec<(Running, Workload)> = Vec::new();
    for _ in 0..daemons {
        let running = Running::start(Engine::Ours { workers: 1, predict: true }, PERIOD)?;
        let mut workload = running.workload(shape)?;
        workload.fill()?;
        at_work.push((running, workload));
    }
    let speed = |running: &Running| -> Result<f64, String> {
        let looks = settle(running, QUIET).map_err(|error| error.to_string())?;
        Ok(pace(&looks).merging_us.map_or(f64::NAN, |us| 1e6 / us))
    };
    let speeds: Vec<Result<f64, String>> = std::thread::scope(|scope| {
        let threads: Vec<_> = at_work.iter().map(|(running, _)| scope.spawn(move || speed(running))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err("a thread ended".into()))).collect()
    });
    let mut sum = 0.0;
    for speed in speeds {
        sum += speed?;
    }
    at_work.iter_mut().try_for_each(|(_, workload)| workload.check())?;
    Ok(sum)
}
