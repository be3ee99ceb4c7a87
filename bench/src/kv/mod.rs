//! `pagefold bench kv`: forrest and its peers, same keys, same threads, same run.
//!
//! Two tables: the source's test against its red-black tree; a store that processes share, beside threads of one process and
//! LMDB. Operations of forrest beside other maps are rows of `index`.

mod shared;
mod source;

use crate::index::run::in_child;
use crate::options::{self, Common};
use crate::process::Failure;
use crate::record;
use clap::Parser;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::path::PathBuf;
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
    #[arg(long, value_name = "NAME,…", value_delimiter = ',', default_value = "source,shared", value_parser = ["source", "shared"])]
    tables: Vec<String>,
}

/// Runs the benchmark.
pub fn run(args: &[String]) -> ExitCode {
    options::run("kv", args, |args: Args| match &args.common.child {
        Some(plan) => {
            child(&serde_json::from_str(plan)?);
            Ok(())
        }
        None => args.tables.iter().try_for_each(|table| rows(&args, table)),
    })
}

/// What a child measures, or reads for another child.
#[derive(Serialize, Deserialize)]
struct Plan {
    table: String,
    name: String,
    keys: usize,
    /// Threads, or the reader's number.
    threads: usize,
    /// The store that a reader reads.
    path: Option<PathBuf>,
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
fn rows(args: &Args, table: &str) -> Result<(), Failure> {
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
            let plan = Plan { table: table.into(), name: name.to_string(), keys, threads: *threads, path: None };
            match in_child("kv", name, &plan)? {
                Some(rate) => rates.push(rate),
                None if round == 0 => eprintln!("SKIPPED: {name} ({about}) is not available here"),
                None => {}
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

fn child(plan: &Plan) {
    let Plan { table, name, keys, threads, path } = plan;
    if let Some(path) = path {
        return shared::reader(name, *keys, *threads, path);
    }
    let rate = match &**table {
        "source" => source::rate(name, *keys, *threads),
        _ => shared::rate(name, *keys, *threads),
    };
    println!("{}", json!(rate));
}
