//! `pagefold bench kv`: forrest and its peers, same keys, same threads, same run.
//!
//! Three tables: operations against other maps (by the engine of `index`: each measurement a process of its own, rounds
//! interleaved); the source's test against its red-black tree; a store that processes share, beside threads of one process,
//! LMDB and redis.

mod clock;
mod shared;
mod source;

use crate::index;
use crate::options::{self, Clock, Common};
use crate::{process, record};
use clap::Parser;
use serde_json::json;
use std::path::Path;
use std::process::ExitCode;

/// The peers of the first table that this build may have.
const PEERS: &str = "forrest,forrest-shared,forrest-ordered,std-hash-lock,std-hash-sharded,std-btree-lock,papaya,dashmap,scc-hash-map,\
                     scc-hash-index,rb-tree-lock,absl-btree-lock,libcuckoo,tbb,liburcu";

/// forrest and its peers: the source's test, gets, inserts, churn, memory, shared stores.
#[derive(Parser, Debug)]
#[command(
    name = "pagefold bench kv",
    after_help = "Examples:\n  pagefold bench kv --quick\n  pagefold bench kv --keys 10000000 --threads 1,2 --tables source,shared\n  \
                  pagefold bench kv --clock cpu --tables maps -- --mix churn --dist zipf"
)]
struct Args {
    #[command(flatten)]
    common: Common,
    /// Which tables.
    #[arg(long, value_name = "NAME,…", value_delimiter = ',', default_value = "maps,source,shared")]
    tables: Vec<String>,
    /// Options passed on to the `maps` table: --mix, --dist, --pages, --only, as `pagefold bench index` has them.
    #[arg(last = true, value_name = "INDEX OPTIONS")]
    rest: Vec<String>,
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
    let known = ["maps", "source", "shared"];
    if let Some(unknown) = args.tables.iter().find(|table| !known.contains(&table.as_str())) {
        eprintln!("pagefold bench kv: no table named {unknown}; there are {}", known.join(", "));
        return ExitCode::from(2);
    }
    for table in known.into_iter().filter(|name| args.tables.iter().any(|table| table == name)) {
        let done = if table == "maps" { maps(&args) } else { rows(&args, table) };
        if let Err(message) = done {
            eprintln!("pagefold bench kv: {table}: {message}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

/// The first table, by the engine of `index`.
fn maps(args: &Args) -> Result<(), String> {
    let known: Vec<&str> = index::registry::all().into_iter().map(|maker| maker.0).collect();
    let only: Vec<&str> = PEERS.split(',').filter(|name| known.contains(name)).collect();
    let mut passed = vec![
        "--keys".to_string(),
        args.common.keys(10_000_000).to_string(),
        "--rounds".into(),
        args.common.rounds().to_string(),
        "--threads".into(),
        args.common.threads.iter().map(usize::to_string).collect::<Vec<_>>().join(","),
    ];
    if !args.rest.iter().any(|option| option == "--only") {
        passed.extend(["--only".into(), only.join(",")]);
    }
    passed.extend(
        (args.common.clock == Clock::Cpu).then_some(["--clock".to_string(), "cpu".into()]).into_iter().flatten(),
    );
    passed.extend(args.common.quick.then(|| "--quick".into()));
    passed.extend(args.common.json.then(|| "--json".into()));
    passed.extend(args.rest.iter().cloned());
    if index::run(&passed) == ExitCode::SUCCESS { Ok(()) } else { Err("see above".into()) }
}

/// The rows of a table: a name for each, and what it is.
type Row = (&'static str, &'static str);

const SOURCE: &[Row] = &[
    ("forrest", "one at a time"),
    ("forrest-batch", "set_many, get_many"),
    ("rb-tree-source", "the source's user-space side: red-black tree, one rwlock"),
    ("rb-tree-lock", "the same without its allocations: std::map of numbers"),
    ("std-btree-lock", "BTreeMap of strings, one RwLock"),
];

const SHARED: &[Row] = &[
    ("private", "forrest, threads of one process"),
    ("shared", "forrest, a process per thread, /dev/shm"),
    ("shared-huge", "the same on a tmpfs with huge pages"),
    ("private-batch", "forrest, threads, get_many"),
    ("shared-batch", "forrest, processes, get_many"),
    ("lmdb", "LMDB in /dev/shm, a process per thread"),
    ("redis", "redis over a Unix socket, GETs one at a time"),
];

/// Measures the rows of a table, interleaved, and prints them.
fn rows(args: &Args, table: &str) -> Result<(), String> {
    let keys = args.common.keys(10_000_000);
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
            let clock = if args.common.clock == Clock::Cpu { "cpu" } else { "wall" };
            let plan = format!("{table} {name} {keys} {threads} {clock}");
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
            "bench": "kv", "table": table, "keys": keys, "clock": args.common.clock, "name": name, "about": about,
            "threads": threads, "rates": rates,
        })
    });
    let by = if args.common.clock == Clock::Cpu { " of processor time" } else { "" };
    let title = format!("{keys} keys, {about}: million operations per second{by}");
    record::table(&title, "name|threads|rate=rates:3|about", rows.collect());
    Ok(())
}

fn child(plan: &str) {
    let fields: Vec<&str> = plan.split(' ').collect();
    let (Some(keys), Some(threads)) =
        (fields.get(2).and_then(|field| field.parse().ok()), fields.get(3).and_then(|field| field.parse().ok()))
    else {
        eprintln!("a plan is TABLE NAME KEYS THREADS CLOCK");
        std::process::exit(2);
    };
    let _ = clock::CLOCK.set(if fields.get(4) == Some(&"cpu") { Clock::Cpu } else { Clock::Wall });
    if fields[0] == "reader" {
        shared::reader(fields[1], keys, threads, Path::new(fields[5]));
        return;
    }
    let rate = match fields[0] {
        "source" => source::rate(fields[1], keys, threads),
        _ => {
            let (folder, _gone) = crate::restore::folder("kv").expect("a folder of this run");
            shared::rate(fields[1], keys, threads, &folder)
        }
    };
    println!("{}", rate.map_or("-".into(), |rate| rate.to_string()));
}
