//! What two workers could do at most here: two daemons that share nothing, at once.
//!
//! Two workers of one daemon share its index, its pool and the kernel's locks of the pool's files. Two daemons with half of
//! the processes each share the machine alone. What one such daemon does by itself, doubled, is what they would do together
//! if processors, memory and hypervisor gave each as much as one.

use super::crew::{Crew, Layout, Shape};
use super::engine::{Engine, Running};
use super::{Failure, Options, PERIOD, QUIET, Report, Spread, pace, settle};
use serde_json::json;

/// One daemon with half of the processes, alone and beside another.
pub fn apart(options: &Options, report: &mut Report) -> Result<(), Failure> {
    let whole = options.shape(Layout::Files)?;
    let half = Shape { processes: (whole.processes / 2).max(2), ..whole };
    crate::record::table!(
        "apart: daemons of one worker that share nothing, {} processes of {} MiB each, pages merged per second",
        half.processes,
        half.mib
    );
    let (mut alone, mut both, mut ratio) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..options.rounds {
        let one = speeds(1, half)?;
        let two = speeds(2, half)?;
        ratio.push(two / one);
        alone.push(one);
        both.push(two);
    }
    let (alone, both, ratio) = (Spread::of(alone), Spread::of(both), Spread::of(ratio));
    crate::record::table!("{:22} {:>26}", "one, alone", alone.show(0));
    crate::record::table!("{:22} {:>26}", "two at once, together", both.show(0));
    crate::record::table!("{:22} {:>26}", "two against one", ratio.show(2));
    report.rows.push(json!({
        "part": "apart", "processes_each": half.processes, "mib_each": half.mib,
        "pages_per_s_alone": alone.json(), "pages_per_s_both": both.json(), "both_against_alone": ratio.json(),
    }));
    Ok(())
}

/// Pages per second that so many daemons merge at once, all together.
fn speeds(daemons: usize, shape: Shape) -> Result<f64, Failure> {
    let mut at_work: Vec<(Running, Crew)> = Vec::new();
    for _ in 0..daemons {
        let running = Running::start(Engine::Ours { workers: 1, predict: true }, PERIOD)?;
        let mut crew = running.crew(shape)?;
        crew.fill()?;
        at_work.push((running, crew));
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
    at_work.iter_mut().try_for_each(|(_, crew)| crew.check())?;
    Ok(sum)
}
