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

use std::process::ExitCode;

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

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let chosen = args.first().and_then(|name| BENCHES.iter().find(|bench| bench.0 == name));
    match chosen {
        Some((_, _, run)) => run(&args[1..]),
        None => {
            eprintln!("usage: pagefold-bench NAME [--quick|--full] [--json] [options]");
            for (name, about, _) in BENCHES {
                eprintln!("  {name:12} {about}");
            }
            ExitCode::from(2)
        }
    }
}
