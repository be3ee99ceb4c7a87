//! The benchmarks of pagefold, side by side with their peers.
//!
//! One module per benchmark; each prints a table, or JSON with `--json`, and
//! ends in seconds with `--quick`. Each runs in a process of its own, which leaves its rows in a file.

mod containers;
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
mod lazy;
mod options;
mod pageone;
mod plots;
mod process;
mod published;
mod record;
mod records;
mod redis;
mod restore;
mod sandboxes;
mod scratch;
mod stats;
mod table;
mod timing;
mod tool;
mod vm;
mod zswap;

use process::Failure;
use record::Measured;
use serde_json::{Value, json};
use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::process::{ExitCode, ExitStatus, Stdio};

/// Where the process of a bench leaves its rows.
const ROWS: &str = "PAGEFOLD_BENCH_ROWS";

/// A benchmark: its name, one line about it, and its entry point, which gets the remaining arguments.
type Bench = (&'static str, &'static str, fn(&[String]) -> ExitCode);

/// All benchmarks, in the order of the help text.
const BENCHES: &[Bench] = &[
    ("containers", "images and containers of containerd, against its overlayfs snapshotter", containers::run),
    ("coverage", "programs of many kinds: merging against the kernel's KSM", coverage::run),
    ("erofs", "image trees: page cache shared by content, against other ways", image::run),
    ("pagecache", "disk images against the kernel's page cache, plain FUSE and KSM", disk::run),
    ("index", "SD tree, B-tree and forrest against other maps", index::run),
    ("kv", "forrest against the source's red-black tree and LMDB", kv::run),
    (
        "lazy",
        "first starts of images that are not here: mounts that fetch what is opened, against whole pulls",
        lazy::run,
    ),
    ("pageone", "live memory: merging against the kernel's KSM", pageone::run),
    (
        "sandboxes",
        "programs that mostly wait: memory, processor time and replies, against KSM and zswap",
        sandboxes::run,
    ),
    ("timing", "what a program learns from the time of its writes: one domain, two domains, KSM", timing::run),
    ("zswap", "cold tier against zswap and a red-black tree", zswap::run),
];

/// What draws files from the records below a directory: the files by path.
type Draw = fn(&Path) -> Result<Vec<(String, String)>, String>;

/// What measures nothing.
const DRAWN: [(&str, Draw); 2] = [("figures", figures::draw), ("plots", plots::draw)];

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

/// Runs a benchmark in a process of its own; returns how it ended and what it measured. With `--json` it prints no table.
fn in_child(name: &str, args: &[String]) -> io::Result<(ExitStatus, Option<Measured>)> {
    let rows = tempfile::NamedTempFile::new()?;
    let mut command = process::own(name)?;
    command.args(args).env(ROWS, rows.path());
    if args.iter().any(|arg| arg == "--json") {
        command.stdout(Stdio::null());
    }
    let status = command.status()?;
    Ok((status, serde_json::from_slice(&std::fs::read(rows.path())?).ok()))
}

/// The process of a benchmark. Its own helper processes come here too; they emit nothing.
fn bench(name: &str, args: &[String], rows: Option<&OsStr>) -> ExitCode {
    let (_, _, run) = BENCHES.iter().find(|bench| bench.0 == name).expect("a name of the list");
    let code = run(args);
    let Some((rows, measured)) = rows.zip(record::emitted()) else { return code };
    std::fs::write(rows, json!(measured).to_string()).map_or(ExitCode::FAILURE, |()| code)
}

/// What is run: a benchmark, the tag of its record, its arguments.
type Planned = (String, String, Vec<String>);

/// The runs that these arguments ask for. `--full` of a whole benchmark may be several.
fn plan(names: &[&'static str], args: &[String]) -> Vec<Planned> {
    let rest: Vec<String> = args.iter().filter(|arg| *arg != "--full").cloned().collect();
    let is_whole = names.len() > 1 || rest.iter().all(|arg| arg == "--json");
    if rest.len() == args.len() || !is_whole {
        return names.iter().map(|name| (name.to_string(), record::tag(args), args.to_vec())).collect();
    }
    full::runs(names).map(|(bench, tag, options)| (bench, tag, [options, rest.clone()].concat())).collect()
}

/// Runs a benchmark and records its rows; returns them with the exit code.
fn run(planned: &Planned, record: Option<&str>) -> Result<(Vec<Value>, u8), Failure> {
    let (name, tag, args) = planned;
    let (status, measured) = in_child(name, args)?;
    let code = status.code().map_or(1, |code| code as u8);
    let Some(mut measured) = measured else { return Ok((Vec::new(), code)) };
    if let Some(dir) = record.filter(|_| code == 0) {
        let path =
            record::write(Path::new(dir), name, tag, args, &measured).map_err(|error| format!("{dir}: {error}"))?;
        eprintln!("recorded in {}", path.display());
    }
    // Rows of `erofs` have a field `bench` of their own.
    for row in measured.rows.iter_mut().filter_map(Value::as_object_mut) {
        row.entry("bench").or_insert_with(|| name.as_str().into());
    }
    Ok((measured.rows, code))
}

/// Runs benchmarks one after the other; a failure does not stop the others.
fn run_all(planned: &[Planned], record: Option<&str>) -> (Vec<Value>, u8) {
    let (mut all, mut worst) = (Vec::new(), 0);
    for planned in planned {
        eprintln!("--- {} {}", planned.0, planned.2.join(" "));
        let (rows, code) = run(planned, record).unwrap_or_else(|error| {
            eprintln!("pagefold-bench {}: {error}", planned.0);
            (Vec::new(), 1)
        });
        all.extend(rows);
        worst = worst.max(code);
    }
    (all, worst)
}

/// The help text. `.ci/run` takes the names of the benchmarks from the lines that begin with two spaces.
fn help() -> String {
    let names: String = BENCHES.iter().map(|(name, about, _)| format!("  {name:12} {about}\n")).collect();
    format!(
        "usage: pagefold-bench NAME [--quick|--full] [--json] [--record DIR] [options]\n\
         {names}\
         NAME may also be llds (index and kv), all, or figures or plots, which measure nothing: from the newest records in\n\
         bench/record figures draws docs/benchmarks.md and tables of other documents, plots docs/plots.md and its pictures.\n\
         NAME --help lists the options of one benchmark.\n\
         --quick ends in seconds. --full takes every published figure: all of them take two hours at most.\n\
         --json prints JSON. --record DIR writes the rows there with machine, kernel, versions and commit."
    )
}

/// Draws files of the source tree in the current directory.
fn write_drawn(name: &str, draw: Draw) -> ExitCode {
    let written = draw(Path::new(".")).and_then(|files| {
        for (path, text) in files {
            std::fs::create_dir_all(Path::new(&path).with_file_name(""))
                .and_then(|()| std::fs::write(&path, text))
                .map_err(|error| format!("{path}: {error}"))?;
            eprintln!("drew {path}");
        }
        Ok(())
    });
    match written {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pagefold-bench {name}: {error}; run it in the top directory of the source tree");
            ExitCode::FAILURE
        }
    }
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
    let is_help = |word: &str| ["--help", "-h", "help"].contains(&word);
    let asks_help = args.iter().any(|arg| is_help(arg));
    if is_help(&name) || (chosen.len() > 1 && asks_help) {
        println!("{}", help());
        return ExitCode::SUCCESS;
    }
    if let Some((_, draw)) = DRAWN.iter().find(|drawn| drawn.0 == name) {
        return write_drawn(&name, *draw);
    }
    if chosen.is_empty() {
        return usage_error(&format!("pagefold-bench: no benchmark is called {name}"));
    }
    // Printing help measures nothing, so it does not wait for another run to end.
    if let Some(code) = (!asks_help).then(restore::guarded).flatten() {
        return code;
    }
    let rows = std::env::var_os(ROWS);
    if asks_help || rows.is_some() {
        return bench(chosen[0], &args, rows.as_deref());
    }
    let record = match take(&mut args, "--record") {
        Ok(record) => record,
        Err(error) => return usage_error(&format!("pagefold-bench: {error}")),
    };
    let (rows, code) = run_all(&plan(&chosen, &args), record.as_deref());
    if args.iter().any(|arg| arg == "--json") {
        let document =
            json!({ "bench": name, "arguments": args, "circumstances": record::circumstances(), "rows": rows });
        println!("{document:#}");
    }
    ExitCode::from(code)
}
