//! `pagefold bench index`: our indexes and their peers, same keys, same threads, same run.
//!
//! Each measurement is a process of its own, so that no structure inherits another's heap, and
//! rounds go through all structures in turn, so that a noisy minute hits all alike. Keys are a
//! bijection of 0, 1, 2, … and need no memory; hashed peers use one multiplication as hash.

pub mod forrest;
pub mod registry;
pub mod run;

use crate::options::{self, Clock, Common};
use crate::process::{self, Running, wait_for};
use crate::table::{self, Column, counted};
use clap::Parser;
use run::{Dist, Figures, Mix, Plan};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::process::{ExitCode, Stdio};
use std::time::Duration;

/// Indexes and their peers: lookups, inserts, churn, memory.
#[derive(Parser, Debug)]
#[command(
    name = "pagefold bench index",
    after_help = "Examples:\n  pagefold bench index --quick\n  pagefold bench index --keys 10000000 --threads 1,2 --mix read\n  \
                  pagefold bench index --growth --only sd-tree,b-tree,std-btree-lock"
)]
struct Args {
    #[command(flatten)]
    common: Common,
    /// Rates by wall-clock time or by processor time.
    #[arg(long, value_enum, default_value = "wall")]
    clock: Clock,
    /// Which operations.
    #[arg(long, value_enum, default_value = "all")]
    mix: Mix,
    /// How keys are chosen.
    #[arg(long, value_enum, default_value = "uniform")]
    dist: Dist,
    /// Only these structures.
    #[arg(long, value_name = "NAME,…", value_delimiter = ',')]
    only: Vec<String>,
    /// Huge pages for all (the structures' own, and malloc's), or ordinary pages for all.
    #[arg(long, value_name = "huge|small|both", default_value = "huge")]
    pages: String,
    /// Time per lookup against the number of keys, from 10^3 up to --keys.
    #[arg(long)]
    growth: bool,
}

/// Runs the benchmark.
pub fn run(args: &[String]) -> ExitCode {
    let args: Args = match options::parse("index", args) {
        Ok(args) => args,
        Err(code) => return code,
    };
    if let Some(plan) = &args.common.child {
        let plan: Plan = serde_json::from_str(plan).expect("the driver's own plan");
        println!("{}", serde_json::to_string(&run::measure(&plan)).expect("plain figures"));
        return ExitCode::SUCCESS;
    }
    options::exit_code("index", drive(&args).map_err(Into::into))
}

/// The longest time for one measurement.
const MEASURE_MAX: Duration = Duration::from_secs(600);

/// The values of one figure over the rounds.
type Rounds = BTreeMap<String, Vec<f64>>;

/// One line of the result: what was measured, and each figure of each round.
#[derive(serde::Serialize)]
struct Row {
    structure: String,
    about: String,
    keys: usize,
    threads: usize,
    pages: &'static str,
    figures: Rounds,
}

fn drive(args: &Args) -> Result<(), String> {
    let keys = args.common.keys(30_000_000);
    let rounds = args.common.rounds();
    let known = registry::all();
    for name in &args.only {
        if !known.iter().any(|maker| maker.0 == name) {
            let names: Vec<_> = known.iter().map(|maker| maker.0).collect();
            return Err(format!(
                "no structure named {name} in this build: {} (features peers and cpp-peers add more)",
                names.join(", ")
            ));
        }
    }
    let chosen: Vec<_> =
        known.iter().filter(|maker| args.only.is_empty() || args.only.iter().any(|name| name == maker.0)).collect();
    let pages: &[bool] = match args.pages.as_str() {
        "huge" => &[true],
        "small" => &[false],
        "both" => &[true, false],
        other => return Err(format!("--pages {other}: say huge, small or both")),
    };
    let sizes: Vec<usize> = if args.growth {
        (3..).map(|power| 10usize.pow(power)).take_while(|&size| size <= keys).collect()
    } else {
        vec![keys]
    };
    let mut rows: Vec<Row> = Vec::new();
    for &keys in &sizes {
        for &threads in &args.common.threads {
            for &huge in pages {
                for maker in &chosen {
                    if maker.0.ends_with("-bare") && threads > 1 {
                        continue;
                    }
                    rows.push(Row {
                        structure: maker.0.into(),
                        about: maker.1.into(),
                        keys,
                        threads,
                        pages: if huge { "huge" } else { "small" },
                        figures: Rounds::new(),
                    });
                }
            }
        }
    }
    measure_rows(args, rounds, &mut rows);
    rows.retain(|row| !row.figures.is_empty());
    if rows.is_empty() {
        return Err("nothing was measured".into());
    }
    let rows: Vec<Value> = rows
        .iter()
        .map(|row| {
            let mut row = json!(row);
            for (name, value) in [("mix", json!(args.mix)), ("dist", json!(args.dist)), ("clock", json!(args.clock))] {
                row[name] = value;
            }
            row["bench"] = "index".into();
            row["rounds"] = rounds.into();
            row
        })
        .collect();
    if !args.common.extent.json {
        eprint!("\r{:70}\r", "");
    }
    print_tables(&rows, args.clock);
    crate::record::emit(rows);
    Ok(())
}

/// Measures all rows, round by round.
fn measure_rows(args: &Args, rounds: usize, rows: &mut [Row]) {
    let mut left_out: Vec<String> = Vec::new();
    for round in 0..rounds {
        for row in rows.iter_mut() {
            if left_out.contains(&row.structure) {
                continue;
            }
            let plan = Plan {
                structure: row.structure.clone(),
                keys: row.keys,
                threads: row.threads,
                mix: if args.growth { Mix::Read } else { args.mix },
                dist: args.dist,
                clock: args.clock,
                huge: row.pages == "huge",
                operations: if args.common.extent.quick { 400_000 } else { 4_000_000 },
                seed: round as u64,
            };
            let figures = match in_child(&plan) {
                Ok(figures) => figures,
                // A structure that fails or never ends must not take the others' rows with it.
                Err(message) => {
                    eprintln!("\nLEFT OUT: {message}");
                    left_out.push(row.structure.clone());
                    continue;
                }
            };
            for (name, value) in figures {
                row.figures.entry(name).or_default().push(value);
            }
            if !args.common.extent.json && std::io::stderr().is_terminal() {
                eprint!(
                    "\rround {}/{rounds}: {:<18} {} keys, {} threads   ",
                    round + 1,
                    row.structure,
                    row.keys,
                    row.threads
                );
            }
        }
    }
}

/// Measures in a process of its own and gives its figures.
fn in_child(plan: &Plan) -> Result<Figures, String> {
    let what = format!("{} with {} keys and {} threads", plan.structure, plan.keys, plan.threads);
    let mut command = process::own("index").map_err(|error| format!("cannot find this program: {error}"))?;
    command.args(["--child", &serde_json::to_string(plan).expect("a plain plan")]);
    // glibc 2.35 and later: malloc asks for huge pages (1) or does not (0).
    command.env("GLIBC_TUNABLES", if plan.huge { "glibc.malloc.hugetlb=1" } else { "glibc.malloc.hugetlb=0" });
    let mut child = Running::start(command.stdin(Stdio::null()).stdout(Stdio::piped()))
        .map_err(|error| format!("cannot start the measuring process: {error}"))?;
    // Its output fits into the pipe, so it can be read after the end.
    let status = wait_for(&what, MEASURE_MAX, || child.0.try_wait().transpose()).map_err(|error| error.to_string())?;
    let status = status.map_err(|error| format!("{what}: {error}"))?;
    if !status.success() {
        return Err(format!("measuring {what} failed: {status}"));
    }
    let printed = child.0.stdout.take().expect("it is piped");
    serde_json::from_reader(printed).map_err(|error| format!("measuring {what} gave no figures: {error}"))
}

fn print_tables(rows: &[Value], clock: Clock) {
    let group = |row: &Value| (row["keys"].clone(), row["threads"].clone(), row["pages"].clone());
    let by = if clock == Clock::Cpu { " of processor time" } else { "" };
    for rows in rows.chunk_by(|a, b| group(a) == group(b)) {
        let mut columns = vec![Column::new("structure", "/structure".into())];
        for name in run::COLUMNS.iter().filter(|name| rows.iter().any(|row| row["figures"].get(name).is_some())) {
            columns.push(Column::new(name, format!("/figures/{}", name.replace('/', "~1"))));
        }
        let (keys, threads, pages) = group(&rows[0]);
        let threads = counted(threads.as_u64().unwrap_or(0), "thread");
        let title = format!(
            "{keys} keys, {threads}, {} pages: million operations per second{by}; bytes per key by RSS",
            pages.as_str().unwrap_or_default()
        );
        table::print_columns(&title, &columns, rows);
    }
}
