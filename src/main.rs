//! pagefold: one copy of every page.
//!
//! This file only parses arguments and hands them to one file per command in
//! `commands/`; errors end as one line on standard error and a non-zero exit.

mod args;
mod attach_rules;
mod commands;
mod completion_values;
mod config;
mod daemon_client;
mod error;
mod exit;
mod inherited_state;
mod output;
mod remote_status;
mod top;
mod units;
mod unmanaged_memory;

use clap::{CommandFactory, FromArgMatches, Parser};
use std::path::PathBuf;
use std::process::ExitCode;

/// One copy of every page: memory, page cache and cold memory, deduplicated from user space.
#[derive(Parser)]
#[command(name = "pagefold", version, propagate_version = true)]
#[command(after_help = "\
Defaults for options are read from /etc/pagefold/pagefold.toml and
$XDG_CONFIG_HOME/pagefold/pagefold.toml, or from the one file that --config or PAGEFOLD_CONFIG
names; the command line wins.

Environment:
  NO_COLOR              no colours, as without a terminal
  PAGEFOLD_CONFIG       the file with defaults, as --config
  PAGEFOLD_SOCKET       the daemon's socket, as --socket; `run` sets it
  PAGEFOLD_STORE        the store of image trees, as image --store
  PAGEFOLD_RUNTIME_DIR  files of agent, daemon and mounts; without it
                        $XDG_RUNTIME_DIR/pagefold (root: /run/pagefold)

Exit status:
  0    done, and all is well
  1    failed, or something is not well (doctor, scan, verify, demo)
  2    wrong usage
  125  run and image exec failed (run also for wrong usage)
  126  they cannot run the program
  127  they do not find it; otherwise their status is the program's")]
struct Cli {
    /// File with defaults for options, instead of /etc/pagefold/pagefold.toml and the user's; `none` for no file (`./none`
    /// is one)
    #[arg(long, global = true, value_name = "PATH", display_order = 900)]
    config: Option<PathBuf>,
    #[command(subcommand)]
    command: commands::Command,
}

fn main() -> ExitCode {
    match commands::answer_shell() {
        Ok(false) => {}
        Ok(true) => return ExitCode::SUCCESS,
        Err(error) => {
            note!("pagefold: {error}");
            return ExitCode::FAILURE;
        }
    }
    let matches = match config::parse(Cli::command()) {
        Ok(matches) => matches,
        Err((error, code)) => {
            note!("pagefold: {error}");
            return ExitCode::from(code);
        }
    };
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    match commands::run(cli.command) {
        Ok(code) => code,
        Err(error) => {
            note!("pagefold: {error}");
            ExitCode::FAILURE
        }
    }
}
