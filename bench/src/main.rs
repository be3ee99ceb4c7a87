//! The benchmarks of pagefold, side by side with their peers.
//!
//! One module per benchmark; each prints a table, or JSON with `--json`, and
//! ends in seconds with `--quick`.

mod disk;
mod image;
mod index;
mod kv;
mod options;
mod pageone;
mod record;
mod scan;
mod vm;
mod zswap;

use serde_json::{Value, json};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

/// A benchmark: its name, one line about it, and its entry point, which gets the remaining arguments.
type Bench = (&'static str, &'static str, fn(&[String]) -> ExitCode);

/// All benchmarks, in the order of the help text.
const BENCHES: &[Bench] = &[
    ("erofs", "image trees: page cache shared by content, against other ways", image::run),
    ("pagecache", "disk images against the kernel's page cache, plain FUSE and qcow2", disk::run),
    ("index", "SD tree and B-tree against other maps", index::run),
    ("kv", "forrest against other maps, LMDB and redis; shared stores", kv::run),
    ("pageone", "live memory: merging against the kernel's KSM", pageone::run),
    ("scan", "dry run against a naive scan and KSM", scan::run),
    ("zswap", "cold tier against zswap, zram and other indexes", zswap::run),
];

/// Names of the benchmarks that `name` stands for.
fn named(name: &str) -> Vec<&'static str> {
    let all = BENCHES.iter().map(|bench| bench.0);
    match name {
        "all" => all.collect(),
        "llds" => vec!["index", "kv"],
        _ => all.filter(|bench| *bench == name).collect(),
    }
}

/// Runs several benchmarks, each in a process of its own, all of them even if one fails. With `--record DIR` their rows go
/// there as JSON, with machine, kernel, versions and commit, and not to the screen.
fn several(names: &[&str], args: &[String]) -> ExitCode {
    let mut args = args.to_vec();
    let record = args.iter().position(|arg| arg == "--record").map(|at| args.drain(at..).nth(1).unwrap_or_default());
    if record.as_deref() == Some("") {
        eprintln!("pagefold-bench: --record takes a directory, and comes last");
        return ExitCode::from(2);
    }
    let failed: Vec<&&str> = names
        .iter()
        .filter(|name| {
            eprintln!("--- {name} {}", args.join(" "));
            let done = one(name, &args, record.as_deref());
            done.map_err(|error| eprintln!("pagefold-bench {name}: {error}")).is_err()
        })
        .collect();
    match failed.is_empty() {
        true => ExitCode::SUCCESS,
        false => {
            eprintln!("pagefold-bench: failed: {failed:?}");
            ExitCode::FAILURE
        }
    }
}

fn one(name: &str, args: &[String], record: Option<&str>) -> Result<(), Box<dyn std::error::Error>> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg(name).args(args);
    let Some(dir) = record else {
        let status = command.status()?;
        return if status.success() { Ok(()) } else { Err(status.to_string().into()) };
    };
    let output = command.arg("--json").stdout(Stdio::piped()).stderr(Stdio::inherit()).output()?;
    if !output.status.success() {
        return Err(output.status.to_string().into());
    }
    let rows = match serde_json::from_slice(&output.stdout)? {
        Value::Array(rows) => rows,
        whole => vec![whole],
    };
    let tag = args.iter().find_map(|arg| arg.strip_prefix("--")).unwrap_or_default();
    let path = record::write(Path::new(dir), name, tag, args, json!({}), &rows)?;
    eprintln!("recorded in {}", path.display());
    Ok(())
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let chosen = args.first().map(|name| named(name)).unwrap_or_default();
    let alone = BENCHES.iter().find(|bench| chosen == [bench.0]);
    match alone {
        Some((_, _, run)) => run(&args[1..]),
        None if !chosen.is_empty() => several(&chosen, &args[1..]),
        None => {
            eprintln!("usage: pagefold-bench NAME [--quick|--full] [--json] [options]");
            for (name, about, _) in BENCHES {
                eprintln!("  {name:12} {about}");
            }
            eprintln!("NAME may also be llds (index and kv) or all; these take --record DIR as the last option");
            ExitCode::from(2)
        }
    }
}
