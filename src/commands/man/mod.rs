//! `pagefold man`: the manual pages: of each command, of the configuration file, and of the whole.

mod command;
mod config_file;
mod roff;

use crate::error::Error;
use clap::CommandFactory;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Write the manual pages into a directory
#[derive(clap::Args)]
#[command(after_help = "Examples:
  pagefold man ~/.local/share/man
  pagefold man /tmp/man && man -M /tmp/man pagefold-scan

Commands have pages in section 1, pagefold.toml in 5, and an overview is pagefold(7).")]
pub struct Args {
    /// Directory for the sections man1, man5 and man7; made if it is not there
    dir: PathBuf,
}

/// What pagefold is, and its words.
const OVERVIEW: &str = include_str!("../../../dist/man/pagefold.7");

/// Writes one page per command, one for each command of a group, and those that are of no command.
pub fn run(args: Args) -> Result<ExitCode, Error> {
    let cannot = |error: std::io::Error| format!("man: cannot write into {}: {error}", args.dir.display());
    if args.dir == Path::new("-") {
        return Err("man: writes one file per page and needs a directory; ./- is a directory of that name".into());
    }
    if args.dir.exists() && !args.dir.is_dir() {
        return Err(format!("man: {} is not a directory", args.dir.display()).into());
    }
    let [commands, files, overviews] = ["man1", "man5", "man7"].map(|section| args.dir.join(section));
    for section in [&commands, &files, &overviews] {
        std::fs::create_dir_all(section).map_err(cannot)?;
    }
    let mut all = crate::Cli::command().disable_help_subcommand(true);
    all.build();
    command::write(&all, &[], &commands).map_err(cannot)?;
    std::fs::write(files.join("pagefold.toml.5"), config_file::page()).map_err(cannot)?;
    let overview = OVERVIEW.replace("@VERSION@", env!("CARGO_PKG_VERSION"));
    std::fs::write(overviews.join("pagefold.7"), overview).map_err(cannot)?;
    Ok(ExitCode::SUCCESS)
}
