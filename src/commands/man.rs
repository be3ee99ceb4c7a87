//! `pagefold man`: the manual pages, made from the same definitions as `--help`.

use super::Error;
use clap::CommandFactory;
use std::path::PathBuf;
use std::process::ExitCode;

/// Write the manual pages into a directory
#[derive(clap::Args)]
#[command(after_help = "Examples:
  pagefold man ~/.local/share/man/man1
  pagefold man /tmp/man && man -l /tmp/man/pagefold-scan.1")]
pub struct Args {
    /// Directory for the pages; made if it is not there
    dir: PathBuf,
}

/// Writes one page per command.
pub fn run(args: Args) -> Result<ExitCode, Error> {
    let cannot = |error: std::io::Error| format!("man: cannot write into {}: {error}", args.dir.display());
    std::fs::create_dir_all(&args.dir).map_err(cannot)?;
    clap_mangen::generate_to(crate::Cli::command(), &args.dir).map_err(cannot)?;
    Ok(ExitCode::SUCCESS)
}
