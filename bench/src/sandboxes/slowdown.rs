//! How much slower a sandbox works while its neighbours park and wake.
//!
//! It does rounds of work alone. Then neighbours start, work and are parked, and it does rounds for as long again, while one
//! neighbour after the other answers a request and is parked again, at the same pace in every way. Where idle memory stays,
//! they only answer.

use super::Plan;
use super::way::{RunningEngine, Way, swapped_group};
use crate::group::Group;
use crate::instance::Instance;
use crate::process::Failure;
use crate::stats::{self, Spread};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Neighbours.
const NEIGHBOURS: usize = 10;
/// The time from one waking to the next.
const PACE: Duration = Duration::from_millis(200);

/// What was measured in one go.
pub struct Measured {
    /// The times of the rounds alone, in seconds.
    alone: Vec<f64>,
    /// The same beside neighbours.
    beside: Vec<f64>,
    wakings_per_s: f64,
    /// Every sandbox still holds its data.
    is_right: bool,
}

/// A sandbox that wakes and parks, and its group, which goes after it.
struct Neighbour {
    sandbox: Instance,
    group: Option<Group>,
}

impl Neighbour {
    fn start(way: Way, engine: &RunningEngine<'_>, seed: usize, mib: usize) -> Result<Neighbour, Failure> {
        let group = way.swaps().then(|| swapped_group(&format!("neighbour-{seed}"))).transpose()?;
        let mut command = engine.command(seed, mib);
        if let Some(group) = &group {
            group.adopt(&mut command);
        }
        let neighbour = Neighbour { sandbox: Instance::start(&mut command)?, group };
        neighbour.sandbox.ready()?;
        Ok(neighbour)
    }

    fn park(&self, engine: &RunningEngine<'_>) -> Result<(), Failure> {
        engine.park(&self.sandbox, self.group.as_ref())
    }
}

/// Has one neighbour after the other reply and park until `done`; returns how many did in a second.
fn stir(engine: &RunningEngine<'_>, neighbours: &mut [Neighbour], done: &AtomicBool) -> Result<f64, String> {
    let (began, count) = (Instant::now(), neighbours.len());
    let mut wakings = 0;
    while !done.load(Ordering::Relaxed) {
        let neighbour = &mut neighbours[wakings % count];
        neighbour.sandbox.ask("reply")?;
        neighbour.park(engine).map_err(|error| error.to_string())?;
        wakings += 1;
        std::thread::sleep((PACE * wakings as u32).saturating_sub(began.elapsed()));
    }
    Ok(wakings as f64 / began.elapsed().as_secs_f64())
}

/// The times of all rounds within this time, in seconds.
fn rounds(worker: &mut Instance, within: Duration) -> Result<Vec<f64>, String> {
    // The first warms up.
    worker.ask("round")?;
    let (mut times, end) = (Vec::new(), Instant::now() + within);
    while times.is_empty() || Instant::now() < end {
        let began = Instant::now();
        worker.ask("round")?;
        times.push(began.elapsed().as_secs_f64());
    }
    Ok(times)
}

impl Way {
    /// Measures it once.
    pub fn slowdown(self, plan: Plan) -> Result<Measured, Failure> {
        let count = NEIGHBOURS.min(plan.sandboxes);
        let swap = ((count + 1) * (plan.mib + 64) * 2) << 20;
        let engine = self.engine(plan.kind, swap, &["--cold-policy=manual"], None)?;
        let mut worker = engine.sandbox(1, plan.mib)?;
        let alone = rounds(&mut worker, plan.works)?;
        let mut neighbours = Vec::new();
        for seed in 2..count + 2 {
            neighbours.push(Neighbour::start(self, &engine, seed, plan.mib)?);
        }
        for pair in neighbours.chunks_mut(2) {
            pair.iter_mut().try_for_each(|one| one.sandbox.send("work"))?;
            pair.iter().try_for_each(|one| one.sandbox.answer())?;
        }
        neighbours.iter().try_for_each(|one| one.park(&engine))?;
        let done = AtomicBool::new(false);
        let (beside, wakings_per_s) = std::thread::scope(|scope| {
            let working = scope.spawn(|| {
                let beside = rounds(&mut worker, plan.works);
                done.store(true, Ordering::Relaxed);
                beside
            });
            let wakings_per_s = stir(&engine, &mut neighbours, &done);
            Ok::<_, String>((working.join().expect("it does not panic")?, wakings_per_s?))
        })?;
        let sandboxes = neighbours.iter_mut().map(|one| &mut one.sandbox).chain([&mut worker]);
        let wrong: Vec<String> = sandboxes.filter_map(|sandbox| sandbox.ask("compare").err()).collect();
        wrong.iter().for_each(|why| eprintln!("  {}: {why}", self.name()));
        Ok(Measured { alone, beside, wakings_per_s, is_right: wrong.is_empty() })
    }
}

/// The row of a way, from all that was measured.
pub fn row(plan: Plan, way: Way, measured: &[Measured]) -> Value {
    let all = |of: fn(&Measured) -> &Vec<f64>| Spread::of(measured.iter().flat_map(of).copied());
    let median = |times: &[f64]| stats::median(times.iter().copied());
    let percent = measured.iter().map(|one| 100.0 * median(&one.beside) / median(&one.alone));
    json!({
        "part": "slowdown", "way": plan.named(way), "neighbours": NEIGHBOURS.min(plan.sandboxes), "mib": plan.mib,
        "alone_s": all(|one| &one.alone),
        "beside_s": all(|one| &one.beside),
        "beside_percent": Spread::of(percent),
        "wakings_per_s": Spread::of(measured.iter().map(|one| one.wakings_per_s)),
        "right": measured.iter().all(|one| one.is_right),
    })
}
