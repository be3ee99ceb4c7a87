//! `pagefold bench index`: our indexes and their peers, same keys, same threads, same run.
//!
//! Each measurement is a process of its own, so that no structure inherits another's heap, and
//! rounds go through all structures in turn, so that a noisy minute hits all alike. Keys are a
//! bijection of 0, 1, 2, … and need no memory; hashed peers use one multiplication as hash.

#[cfg(feature = "cpp-peers")]
pub mod cpp;
pub mod maps;
#[cfg(feature = "peers")]
mod peers;
pub mod run;

use crate::options::{self, Clock, Common};
use clap::{Parser, ValueEnum};
use run::{Figures, Plan};
use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

/// Which operations to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mix {
    /// Everything below.
    All,
    /// Lookups: hits one at a time and in batches, misses, scans.
    Read,
    /// 95 % lookups, 5 % inserts and removals.
    #[value(name = "95")]
    Mostly,
    /// Half lookups, half inserts and removals.
    #[value(name = "50")]
    Half,
    /// Inserts alone.
    Insert,
    /// Each key removed, a new one inserted, at constant size; then all deleted.
    Churn,
}

/// How keys are chosen for lookups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Dist {
    /// Each as often as any other.
    Uniform,
    /// By Zipf's law with exponent 0.99.
    Zipf,
}

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
    match drive(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("pagefold bench index: {message}");
            ExitCode::from(1)
        }
    }
}

/// No structure is measured for longer.
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
    let known = maps::all();
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
    let mut left_out: Vec<String> = Vec::new();
    for round in 0..rounds {
        for row in &mut rows {
            if left_out.contains(&row.structure) {
                continue;
            }
            let plan = Plan {
                structure: row.structure.clone(),
                keys: row.keys,
                threads: row.threads,
                mix: if args.growth { Mix::Read } else { args.mix },
                dist: args.dist,
                clock: args.common.clock,
                huge: row.pages == "huge",
                operations: if args.common.quick { 400_000 } else { 4_000_000 },
                seed: round as u64,
            };
            let figures = match in_child(&plan) {
                Ok(figures) => figures,
                // One that fails or never ends must not take the others' rows with it.
                Err(message) => {
                    eprintln!("\nLEFT OUT: {message}");
                    left_out.push(row.structure.clone());
                    continue;
                }
            };
            for (name, value) in figures {
                row.figures.entry(name).or_default().push(value);
            }
            if !args.common.json && std::io::stderr().is_terminal() {
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
    rows.retain(|row| !row.figures.is_empty());
    if rows.is_empty() {
        return Err("nothing was measured".into());
    }
    crate::record::emit(serde_json::json!({
        "bench": "index", "mix": args.mix, "dist": args.dist, "clock": args.common.clock, "rounds": rounds,
        "rows": rows,
    }));
    if !args.common.json {
        eprint!("\r{:70}\r", "");
        print_tables(&rows, rounds, args.common.clock);
    }
    Ok(())
}

/// Measures in a process of its own and gives its figures.
fn in_child(plan: &Plan) -> Result<Figures, String> {
    let program = std::env::current_exe().map_err(|error| format!("cannot find this program: {error}"))?;
    let mut command = Command::new(program);
    command.args(["index", "--child", &serde_json::to_string(plan).expect("a plain plan")]);
    // glibc 2.35 and later: malloc asks for huge pages (1) or does not (0).
    command.env("GLIBC_TUNABLES", if plan.huge { "glibc.malloc.hugetlb=1" } else { "glibc.malloc.hugetlb=0" });
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .map_err(|error| format!("cannot start the measuring process: {error}"))?;
    let what = format!("{} with {} keys and {} threads", plan.structure, plan.keys, plan.threads);
    let began = Instant::now();
    // What it prints fits into the pipe: it need not be read before it ends.
    let status = loop {
        match child.try_wait().map_err(|error| format!("{what}: {error}"))? {
            Some(status) => break status,
            None if began.elapsed() > MEASURE_MAX => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("{what} did not end within {} s", MEASURE_MAX.as_secs()));
            }
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    if !status.success() {
        return Err(format!("measuring {what} failed: {status}"));
    }
    let printed = child.stdout.take().expect("it is piped");
    serde_json::from_reader(printed).map_err(|error| format!("measuring {what} gave no figures: {error}"))
}

/// The middle value, and half the distance between the extremes in percent of it.
pub fn median_and_spread(values: &[f64]) -> (f64, f64) {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let median = sorted[sorted.len() / 2];
    let spread = if median > 0.0 { 50.0 * (sorted[sorted.len() - 1] - sorted[0]) / median } else { 0.0 };
    (median, spread)
}

fn print_tables(rows: &[Row], rounds: usize, clock: Clock) {
    let mut groups: Vec<(usize, usize, &str)> = rows.iter().map(|row| (row.keys, row.threads, row.pages)).collect();
    groups.dedup();
    let by = if clock == Clock::Cpu { " of processor time" } else { "" };
    println!(
        "Million operations per second{by}, median of {rounds} rounds (+-: half the spread, in percent); bytes per key by RSS."
    );
    for (keys, threads, pages) in groups {
        let rows: Vec<_> =
            rows.iter().filter(|row| (row.keys, row.threads, row.pages) == (keys, threads, pages)).collect();
        let mut columns: Vec<&str> = Vec::new();
        for name in run::COLUMNS {
            if rows.iter().any(|row| row.figures.contains_key(*name)) {
                columns.push(name);
            }
        }
        println!("\n{keys} keys, {threads} thread{}, {pages} pages", if threads == 1 { "" } else { "s" });
        print!("{:18}", "");
        columns.iter().for_each(|column| print!("{column:>13}"));
        println!();
        for row in rows {
            print!("{:18}", row.structure);
            for column in &columns {
                match row.figures.get(*column) {
                    Some(values) => {
                        let (median, spread) = median_and_spread(values);
                        let spread = if rounds > 1 { format!(" +-{spread:.0}") } else { String::new() };
                        print!("{:>13}", format!("{median:.2}{spread}"));
                    }
                    None => print!("{:>13}", "-"),
                }
            }
            println!();
        }
    }
}
