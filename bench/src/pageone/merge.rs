//! Merging: time per page, memory, and the longest waits.

use super::args::Args;
use super::engine::{MergingEngine, Running};
use super::settle::{PERIOD, QUIET, memory_over_time, pace, settle};
use super::workload::{PageLayout, Shape};
use crate::process::Failure;
use crate::record;
use crate::stats::Spread;
use clap::ValueEnum;
use serde_json::json;

/// One run of an engine over a workload, until nothing more is merged.
struct Merged {
    pages: u64,
    wall_us: Option<f64>,
    cpu_s: f64,
    before_mib: f64,
    /// Sum of the processes' proportional memory, plus all memory of the engine.
    after_mib: f64,
    metadata_mib: f64,
    freeze_us_p99: Option<f64>,
    memory_over_time_mib: Vec<[f64; 2]>,
}

fn merge_once(engine: MergingEngine, shape: Shape) -> Result<Merged, Failure> {
    let running = Running::start(engine, PERIOD)?;
    let mut workload = running.workload(shape)?;
    workload.fill()?;
    let before = workload.pss();
    let mut samples = settle(&running, QUIET)?;
    let last = samples[samples.len() - 1];
    let after = workload.pss() + running.own_bytes(shape.pages());
    workload.check()?;
    let wall_us = pace(&samples);
    // The kernel gives memory out again some time after the last merge.
    samples.push(running.look());
    Ok(Merged {
        pages: last.merged,
        wall_us,
        cpu_s: (last.cpu_ns - samples[0].cpu_ns) as f64 / 1e9,
        before_mib: before as f64 / 1048576.0,
        after_mib: after as f64 / 1048576.0,
        metadata_mib: running.metadata_bytes(shape.pages()) as f64 / 1048576.0,
        freeze_us_p99: running.freeze_us_p99(),
        memory_over_time_mib: memory_over_time(&samples, before as f64 / 1048576.0),
    })
}

impl Merged {
    fn cpu_us(&self) -> f64 {
        self.cpu_s * 1e6 / self.pages.max(1) as f64
    }
}

fn spread(runs: &[Merged], of: impl Fn(&Merged) -> Option<f64>) -> Spread {
    Spread::of(runs.iter().filter_map(of))
}

/// The engines of a layout's table.
fn engines(args: &Args, layout: PageLayout) -> Vec<MergingEngine> {
    // Quickly, all of ours once.
    if args.extent.quick && layout != PageLayout::Files {
        return args.pair();
    }
    let mut engines = vec![
        MergingEngine::Ours { workers: 1, predict: true },
        MergingEngine::Ours { workers: 2, predict: true },
        MergingEngine::Ours { workers: 1, predict: false },
    ];
    if !args.no_ksm {
        engines.push(MergingEngine::Ksm);
    }
    engines
}

/// Measures merging, a table for each layout.
pub fn merge(args: &Args) -> Result<(), Failure> {
    for layout in args.layout.map_or_else(|| PageLayout::value_variants().to_vec(), |layout| vec![layout]) {
        let shape = args.shape(layout)?;
        let mut runs: Vec<(MergingEngine, Vec<Merged>)> =
            engines(args, layout).into_iter().map(|engine| (engine, Vec::new())).collect();
        for round in 0..args.rounds() {
            for (engine, runs) in &mut runs {
                runs.push(merge_once(*engine, shape)?);
            }
            eprintln!("{}: round {} of {}", layout.name(), round + 1, args.rounds());
        }
        let peer = runs.iter().find(|(engine, _)| *engine == MergingEngine::Ksm);
        let peer = peer.map(|(_, runs)| spread(runs, |run| Some(run.cpu_us())).median);
        let rows = runs.iter().map(|(engine, runs)| {
            let median = |of: &dyn Fn(&Merged) -> f64| spread(runs, |run| Some(of(run))).median;
            let cpu = spread(runs, |run| Some(run.cpu_us()));
            json!({
                "part": "merge", "layout": layout.name(), "engine": engine.name(), "processes": shape.processes,
                "mib_each": shape.mib, "pages_merged": median(&|run| run.pages as f64), "cpu_us_per_page": cpu,
                "speed_against_ksm": peer.map(|peer| peer / cpu.median),
                "wall_us_per_page": spread(runs, |run| run.wall_us),
                "memory_before_mib": median(&|run| run.before_mib), "memory_after_mib": median(&|run| run.after_mib),
                "records_mib": median(&|run| run.metadata_mib),
                "memory_over_time_mib": runs[0].memory_over_time_mib,
                "freeze_us_p99": runs[0].freeze_us_p99.map(|_| spread(runs, |run| run.freeze_us_p99)),
            })
        });
        record::table(
            "merging: time per merged page, on the wall between the first and the last of them; memory; and the longest 1 % of waits",
            "layout|engine|merged=pages_merged:0|CPU us/page=cpu_us_per_page:2|speed=speed_against_ksm:2 x|\
             wall us/page=wall_us_per_page:2|\
             before MiB=memory_before_mib:0|after MiB=memory_after_mib:0|records MiB=records_mib:1|\
             wait p99 us=freeze_us_p99:0",
            rows.collect(),
        );
    }
    Ok(())
}
