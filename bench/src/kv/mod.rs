//! `pagefold bench kv`: forrest and its peers, same keys, same threads, same run.
//!
//! Two tables: the source's test against its red-black tree; a store that processes share, beside threads of one process and
//! LMDB. Operations of forrest beside other maps are rows of `index`.

mod shared;
mod source;

use crate::options::{self, Common};
use crate::{process, record};
use clap::Parser;
use serde_json::json;
use std::path::Path;
use std::process::ExitCode;

/// forrest and its peers: the source's test, shared stores.
#[derive(Parser, Debug)]
#[command(
    name = "pagefold bench kv",
    after_help = "Examples:\n  pagefold bench kv --quick\n  pagefold bench kv --keys 10000000 --threads 1,2 --tables source"
)]
struct Args {
    #[command(flatten)]
    common: Common,
    /// Which tables.
    #[arg(long, value_name = "NAME,…", value_delimiter = ',', default_value = "source,shared")]
    tables: Vec<String>,
}

/// Runs the benchmark.
pub fn run(args: &[String]) -> ExitCode {
    let args: Args = match options::parse("kv", args) {
        Ok(args) => args,
        Err(code) => return code,
    };
    if let Some(plan) = &args.common.child {
        child(plan);
        return ExitCode::SUCCESS;
    }
    let known = ["source", "shared"];
    if let Some(unknown) = args.tables.iter().find(|table| !known.contains(&table.as_str())) {
        eprintln!("pagefold bench kv: no table named {unknown}; there are {}", known.join(", "));
        return ExitCode::from(2);
    }
    for table in known.into_iter().filter(|name| args.tables.iter().any(|table| table == name)) {
        if let Err(message) = rows(&args, table) {
            eprintln!("pagefold bench kv: {table}: {message}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

/// The rows of a table: a name for each, and what it is.
type Row = (&'static str, &'static str);

const SOURCE: &[Row] = &[
    ("forrest", "one at a time"),
    ("forrest-batch", "set_many, get_many"),
    ("rb-tree-source", "the source's user-space side: red-black tree, one rwlock"),
    ("std-btree-lock", "BTreeMap of strings, one RwLock"),
];

const SHARED: &[Row] = &[
    ("private", "forrest, threads of one process"),
    ("shared", "forrest, a process per thread, /dev/shm"),
    ("lmdb", "LMDB in /dev/shm, a process per thread"),
];

/// Measures the rows of a table, interleaved, and prints them.
fn rows(args: &Args, table: &str) -> Result<(), String> {
    let keys = args.common.keys();
    let (names, about) = match table {
        "source" => (SOURCE, "inserts and reads of the source's test: key%lu hashed with seed 9, decimal values"),
        _ => (SHARED, "gets of a store that processes share"),
    };
    let mut lines: Vec<(Row, usize, Vec<f64>)> = Vec::new();
    for &threads in &args.common.threads {
        lines.extend(names.iter().map(|&row| (row, threads, Vec::new())));
    }
    for round in 0..args.common.rounds() {
        for ((name, about), threads, rates) in &mut lines {
            // A process of its own, so that no structure inherits another's heap.
            let plan = format!("{table} {name} {keys} {threads}");
            let mut command = process::own("kv").map_err(|error| error.to_string())?;
            command.args(["--child", &plan]).env("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1");
            let text = process::output(&mut command).map_err(|error| format!("measuring {name}: {error}"))?;
            if let Ok(rate) = text.trim().parse() {
                rates.push(rate);
            } else if round == 0 {
                eprintln!("SKIPPED: {name} ({about}) is not available here");
            }
        }
    }
    let measured = lines.into_iter().filter(|(.., rates)| !rates.is_empty());
    let rows = measured.map(|((name, about), threads, rates)| {
        json!({
            "bench": "kv", "table": table, "keys": keys, "name": name, "about": about, "threads": threads, "rates": rates,
        })
    });
    let title = format!("{keys} keys, {about}: million operations per second");
    record::table(&title, "name|threads|rate=rates:3|about", rows.collect());
    Ok(())
}

fn child(plan: &str) {
    let fields: Vec<&str> = plan.split(' ').collect();
    let (Some(keys), Some(threads)) =
        (fields.get(2).and_then(|field| field.parse().ok()), fields.get(3).and_then(|field| field.parse().ok()))
    else {
        eprintln!("a plan is TABLE NAME KEYS THREADS");
        std::process::exit(2);
    };
    if fields[0] == "reader" {
        shared::reader(fields[1], keys, threads, Path::new(fields[4]));
        return;
    }
    let rate = match fields[0] {
        "source" => source::rate(fields[1], keys, threads),
        _ => shared::rate(fields[1], keys, threads),
    };
    println!("{}", rate.map_or("-".into(), |rate| rate.to_string()));
}
