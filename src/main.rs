//! pagefold: one copy of every page.
//!
//! This file only parses arguments and hands them to one file per command in
//! `commands/`; errors end as one line on standard error and a non-zero exit.

mod commands;
mod host;
mod output;
mod top;
mod units;

use clap::Parser;
use std::process::ExitCode;

/// One copy of every page: memory, page cache and cold memory, deduplicated from user space.
#[derive(Parser)]
#[command(name = "pagefold", version, propagate_version = true)]
#[command(after_help = "Exit status: 0 success, 1 failure, 2 wrong usage; `run` passes on the command's own.")]
struct Cli {
    #[command(subcommand)]
    command: commands::Command,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match commands::run(cli.command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("pagefold: {error}");
            ExitCode::FAILURE
        }
    }
}
