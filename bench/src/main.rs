//! The benchmarks of pagefold, side by side with their peers.
//!
//! One module per benchmark; each prints a table, or JSON with `--json`, and
//! ends in seconds with `--quick`. What the sources published stands below its table.

mod coverage;
mod disk;
mod figures;
mod files;
mod full;
mod group;
mod image;
mod index;
mod instance;
mod ksm_peer;
mod kv;
mod options;
mod pageone;
mod process;
mod published;
mod record;
mod redis;
mod restore;
mod sandboxes;
mod scratch;
mod stats;
mod table;
mod tool;
mod vm;
mod zswap;

use process::Failure;
use published::Definition;
use record::Measured;
use serde_json::{Value, json};
use std::path::Path;
use std::process::{ExitCode, Stdio};
use std::time::Instant;

/// Where a bench that another one has started leaves its rows.
const ROWS: &str = "PAGEFOLD_BENCH_ROWS";

/// A benchmark: its name, one line about it, and its entry point, which gets the remaining arguments.
type Bench = (&'static str, &'static str, fn(&[String]) -> ExitCode);

/// All benchmarks, in the order of the help text.
const BENCHES: &[Bench] = &[
    ("coverage", "programs of many kinds: merging against the kernel's KSM", coverage::run),
    ("erofs", "image trees: page cache shared by content, against other ways", image::run),
    ("pagecache", "disk images against the kernel's page cache, plain FUSE and qcow2", disk::run),
    ("index", "SD tree and B-tree against other maps", index::run),
    ("kv", "forrest against other maps, LMDB and redis; shared stores", kv::run),
    ("pageone", "live memory: merging against the kernel's KSM", pageone::run),
    (
        "sandboxes",
        "programs that mostly wait: memory, processor time and replies, against KSM and zswap",
        sandboxes::run,
    ),
    ("zswap", "cold tier against zswap, zram and other indexes", zswap::run),
];

/// The benchmarks that `name` stands for.
fn named(name: &str) -> Vec<&'static str> {
    let all = BENCHES.iter().map(|bench| bench.0);
    match name {
        "all" => all.collect(),
        "llds" => vec!["index", "kv"],
        _ => all.filter(|bench| *bench == name).collect(),
    }
}

/// Removes `--name VALUE` from the arguments.
fn take(args: &mut Vec<String>, name: &str) -> Result<Option<String>, String> {
    let Some(at) = args.iter().position(|arg| arg == name) else { return Ok(None) };
    match args.get(at + 1).filter(|value| !value.starts_with("--")).cloned() {
        Some(value) => {
            args.drain(at..at + 2);
            Ok(Some(value))
        }
        None => Err(format!("{name} takes a directory")),
    }
}

/// Runs several benchmarks, each in a process of its own; a failure does not stop the others.
fn several(names: &[&str], args: &[String], record: Option<&str>) -> (Vec<(String, Vec<Value>)>, ExitCode) {
    let mut measured = Vec::new();
    let mut failed = Vec::new();
    let mut run = |name: &str, tag: &str, args: &[String]| {
        eprintln!("--- {name} {}", args.join(" "));
        match one(name, args, record, tag) {
            Ok(rows) => measured.push((name.to_string(), rows)),
            Err(error) => {
                eprintln!("pagefold-bench {name}: {error}");
                failed.push(name.to_string());
            }
        }
    };
    let rest: Vec<String> = args.iter().filter(|arg| *arg != "--full").cloned().collect();
    if rest.len() == args.len() {
        names.iter().for_each(|name| run(name, &record::tag(args), args));
    } else {
        let began = Instant::now();
        for planned in full::runs(names) {
            let words: Vec<String> =
                planned.args.iter().map(|word| word.to_string()).chain(rest.iter().cloned()).collect();
            if planned.fits(began.elapsed()) {
                run(planned.bench, planned.tag, &words);
            } else {
                let alone = format!("pagefold bench {} {}", planned.bench, words.join(" "));
                eprintln!("SKIPPED: two hours are not enough for {alone}");
            }
        }
    }
    if failed.is_empty() {
        return (measured, ExitCode::SUCCESS);
    }
    eprintln!("pagefold-bench: failed: {}", failed.join(", "));
    (measured, ExitCode::FAILURE)
}

fn one(name: &str, args: &[String], record: Option<&str>, tag: &str) -> Result<Vec<Value>, Failure> {
    let measured = in_child(name, args)?;
    if let Some(dir) = record {
        keep(dir, name, tag, args, &measured)?;
    }
    Ok(measured.rows)
}

/// Runs a benchmark in a process of its own and returns what it measured; with `--json` it prints no table.
fn in_child(name: &str, args: &[String]) -> Result<Measured, Failure> {
    let rows = tempfile::NamedTempFile::new()?;
    let mut command = process::own(name)?;
    command.args(args).env(ROWS, rows.path());
    if args.iter().any(|arg| arg == "--json") {
        command.stdout(Stdio::null());
    }
    let status = command.status()?;
    if !status.success() {
        return Err(status.to_string().into());
    }
    Ok(serde_json::from_slice(&std::fs::read(rows.path())?)?)
}

/// Records the rows in `dir`, with machine, kernel, versions and commit.
fn keep(dir: &str, name: &str, tag: &str, args: &[String], measured: &Measured) -> Result<(), String> {
    let path = record::write(Path::new(dir), name, tag, args, measured).map_err(|error| format!("{dir}: {error}"))?;
    eprintln!("recorded in {}", path.display());
    Ok(())
}

/// Prints what was published beside what was measured, or all of it as JSON.
fn conclude(name: &str, args: &[String], measured: Vec<(String, Vec<Value>)>) {
    let mut compared = Vec::new();
    let concerned = |definition: &Definition| measured.iter().any(|(bench, _)| definition.reads.contains(bench));
    for definition in published::names().filter_map(published::definition).filter(concerned) {
        let of = |bench: &String| definition.reads.contains(bench);
        let rows: Vec<Value> =
            measured.iter().filter(|(bench, _)| of(bench)).flat_map(|(_, rows)| rows.iter().cloned()).collect();
        let lines = definition.compare(&rows);
        if !args.iter().any(|arg| arg == "--json") {
            print!("{}", published::table(&definition, &lines));
        }
        compared.extend(lines);
    }
    if args.iter().any(|arg| arg == "--json") {
        let rows: Vec<Value> = measured
            .into_iter()
            .flat_map(|(bench, rows)| {
                rows.into_iter().map(move |mut row| {
                    // Rows of `erofs` have a field `bench` of their own.
                    if let Some(row) = row.as_object_mut() {
                        row.entry("bench").or_insert_with(|| bench.clone().into());
                    }
                    row
                })
            })
            .collect();
        let document = json!({
            "bench": name, "arguments": args, "circumstances": record::circumstances(), "published": compared, "rows": rows,
        });
        println!("{document:#}");
    }
}

/// The help text. `.ci/run` takes the names of the benchmarks from the lines that begin with two spaces.
fn help() -> String {
    let names: String = BENCHES.iter().map(|(name, about, _)| format!("  {name:12} {about}\n")).collect();
    format!(
        "usage: pagefold-bench NAME [--quick|--full] [--json] [--record DIR] [options]\n\
         {names}\
         NAME may also be llds (index and kv), all, or figures, which measures nothing: it draws docs/benchmarks.md and\n\
         README's table from the newest records in bench/record. NAME --help lists the options of one benchmark.\n\
         --quick ends in seconds. --full takes every published figure: all of them take two hours at most.\n\
         --json prints JSON. --record DIR writes the rows there with machine, kernel, versions and commit."
    )
}

fn usage_error(message: &str) -> ExitCode {
    eprintln!("{message}\n{}", help());
    ExitCode::from(2)
}

fn main() -> ExitCode {
    // A pager that reads our tables may close the pipe early.
    // SAFETY: no thread runs yet, and the default action needs nothing of ours.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
    let mut args: Vec<String> = std::env::args().skip(1).collect();
    if args.is_empty() {
        return usage_error("pagefold-bench: no benchmark named");
    }
    let name = args.remove(0);
    let chosen = named(&name);
    let asks_help = |word: &str| ["--help", "-h", "help"].contains(&word);
    if asks_help(&name) || (chosen.len() > 1 && args.iter().any(|arg| asks_help(arg))) {
        println!("{}", help());
        return ExitCode::SUCCESS;
    }
    if name == "figures" {
        return figures::run();
    }
    if chosen.is_empty() {
        return usage_error(&format!("pagefold-bench: no benchmark is called {name}"));
    }
    // Printing help measures nothing, so it does not wait for another run to end.
    let help = args.iter().any(|arg| asks_help(arg));
    if let Some(code) = (!help).then(restore::guarded).flatten() {
        return code;
    }
    let record = match take(&mut args, "--record") {
        Ok(record) => record,
        Err(error) => return usage_error(&format!("pagefold-bench: {error}")),
    };
    // A full run of one bench may be several runs of it, each in a process of its own.
    let whole = args.iter().all(|arg| arg == "--full" || arg == "--json") && args.iter().any(|arg| arg == "--full");
    let whole = whole && std::env::var_os(ROWS).is_none();
    let alone = BENCHES.iter().find(|bench| chosen == [bench.0] && !(whole && full::runs(&[bench.0]).len() > 1));
    let (measured, code) = match alone {
        Some((_, _, run)) => {
            let code = run(&args);
            // Helper processes of benches emit nothing, nor does a bench with wrong options.
            let Some(measured) = record::emitted() else { return code };
            if let Some(path) = std::env::var_os(ROWS) {
                let written = std::fs::write(&path, json!(measured).to_string());
                return written.map_or(ExitCode::FAILURE, |()| code);
            }
            if let Some(dir) = record.filter(|_| code == ExitCode::SUCCESS)
                && let Err(error) = keep(&dir, &name, &record::tag(&args), &args, &measured)
            {
                eprintln!("pagefold-bench {name}: {error}");
                return ExitCode::FAILURE;
            }
            (vec![(name.clone(), measured.rows)], code)
        }
        None => several(&chosen, &args, record.as_deref()),
    };
    conclude(&name, &args, measured);
    code
}
