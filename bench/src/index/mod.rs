//! `pagefold bench index`: our indexes and their peers, same keys, same threads, same run.
//!
//! Each measurement is a process of its own, so that no structure inherits another's heap, and
//! rounds go through all structures in turn, so that a noisy minute hits all alike. Keys are a
//! bijection of 0, 1, 2, … and need no memory; hashed peers use one multiplication as hash.

pub mod forrest;
pub mod registry;
pub mod run;

use crate::options::{self, Common};
use crate::process::Failure;
use crate::record;
use clap::Parser;
use run::{Figures, Plan, in_child};
use serde_json::json;
use std::collections::BTreeMap;
use std::process::ExitCode;

/// Indexes and their peers: lookups, inserts, churn, memory.
#[derive(Parser, Debug)]
#[command(
    name = "pagefold bench index",
    after_help = "Examples:\n  pagefold bench index --quick\n  pagefold bench index --keys 10000000 --threads 2 --only sd-tree,dashmap"
)]
struct Args {
    #[command(flatten)]
    common: Common,
    /// Only these structures.
    #[arg(long, value_name = "NAME,…", value_delimiter = ',')]
    only: Vec<String>,
}

/// Runs the benchmark.
pub fn run(args: &[String]) -> ExitCode {
    options::run("index", args, |args: Args| match &args.common.child {
        Some(plan) => {
            println!("{}", json!(run::measure(&serde_json::from_str(plan)?)));
            Ok(())
        }
        None => drive(&args),
    })
}

/// A structure with a number of threads, and each figure of each round.
struct Row {
    structure: &'static str,
    threads: usize,
    figures: BTreeMap<String, Vec<f64>>,
}

fn drive(args: &Args) -> Result<(), Failure> {
    let (keys, rounds) = (args.common.keys(), args.common.rounds());
    let known: Vec<&'static str> = registry::all().iter().map(|maker| maker.0).collect();
    for name in args.only.iter().filter(|name| !known.contains(&name.as_str())) {
        eprintln!("SKIPPED: {name} is not in this build: {} (feature peers adds more)", known.join(", "));
    }
    let chosen = || known.iter().filter(|name| args.only.is_empty() || args.only.iter().any(|only| only == *name));
    let threads = args.common.threads.iter();
    let row = |(threads, structure): (usize, &&'static str)| Row { structure, threads, figures: BTreeMap::new() };
    let mut rows: Vec<Row> = threads.flat_map(|threads| chosen().map(|name| row((*threads, name)))).collect();
    let operations = if args.common.extent.quick { 400_000 } else { 4_000_000 };
    for seed in 0..rounds as u64 {
        for row in &mut rows {
            let plan = Plan { structure: row.structure.to_owned(), keys, threads: row.threads, operations, seed };
            let what = format!("{} with {keys} keys and {} threads", row.structure, row.threads);
            match in_child::<Figures>("index", &what, &plan) {
                Ok(figures) => {
                    figures.into_iter().for_each(|(name, value)| row.figures.entry(name).or_default().push(value))
                }
                // A structure that fails or never ends must not take the others' rows with it.
                Err(error) => eprintln!("LEFT OUT: {error}"),
            }
        }
    }
    rows.retain(|row| !row.figures.is_empty());
    if rows.is_empty() {
        return Err("nothing was measured".into());
    }
    let rows = rows.iter().map(|row| {
        json!({
            "bench": "index", "structure": row.structure, "keys": keys, "threads": row.threads, "figures": row.figures,
            "rounds": rounds,
        })
    });
    record::table(
        &format!("{keys} keys, huge pages: million operations per second; bytes per key by RSS"),
        "structure|threads|insert=/figures/insert|insert-batch=/figures/insert-batch|get=/figures/get|\
         get-batch=/figures/get-batch|get-miss=/figures/get-miss|churn=/figures/churn|delete=/figures/delete|\
         bytes/key=/figures/bytes~1key",
        rows.collect(),
    );
    Ok(())
}
