//! `pagefold bench`: hands over to the benchmark program, which is built apart
//! so that the peers it races do not become dependencies of the tool.

use crate::error::Error;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};

/// Measure pagefold beside its peers (from a source tree)
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  pagefold bench pageone --quick\n  pagefold bench llds --json\n  \
    pagefold bench all --full --record DIR\n\n\
    Benchmarks: containers, coverage, erofs, pagecache, index, kv, pageone, sandboxes, timing, zswap;\n\
    llds stands for index and kv, all for all of them. NAME --help lists the options of one.\n\
    Options: --quick ends in seconds, --full takes every published figure (two hours\n\
    at most), --json prints JSON, --record DIR writes the rows there.")]
pub struct Args {
    /// Benchmark and its options, as `pagefold-bench` takes them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
}

/// Runs `pagefold-bench` from beside this program, else builds it from the source tree we stand in.
pub fn run(args: Args) -> Result<ExitCode, Error> {
    let here = std::env::current_exe()?;
    let beside = here.with_file_name("pagefold-bench");
    let mut command = if beside.exists() {
        Command::new(beside)
    } else if Path::new("bench/Cargo.toml").exists() {
        let mut cargo = Command::new("cargo");
        cargo.args(["run", "--quiet", "--release", "-p", "pagefold-bench", "--"]);
        cargo
    } else {
        return Err("bench: pagefold-bench is not beside this program; run it in the source tree, or install it from \
                    there: cargo install --path bench"
            .into());
    };
    // Replaces this process, so that a signal to it reaches the benchmark.
    Err(command.args(args.args).exec().into())
}
