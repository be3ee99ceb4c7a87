//! `pagefold completions`: what the shell needs to complete our command line.

use crate::error::Error;
use clap::{Arg, ArgGroup, Command, CommandFactory, Id};
use clap_complete::Shell;
use std::process::ExitCode;

/// Print the completions for a shell
#[derive(clap::Args)]
#[command(after_help = "Examples:
  pagefold completions bash > /etc/bash_completion.d/pagefold
  pagefold completions zsh > ~/.zfunc/_pagefold
  pagefold completions fish > ~/.config/fish/completions/pagefold.fish")]
pub struct Args {
    /// Shell to complete for
    shell: Shell,
}

/// Writes the completions to standard output.
pub fn run(args: Args) -> Result<ExitCode, Error> {
    let mut text = Vec::new();
    let mut command = shown(&crate::Cli::command()).version(env!("CARGO_PKG_VERSION")).propagate_version(true);
    clap_complete::generate(args.shell, &mut command, "pagefold", &mut text);
    crate::output::print(&String::from_utf8(text)?)?;
    Ok(ExitCode::SUCCESS)
}

/// `command` without what its help hides: that is for us to call, and clap's scripts offer it all the same.
fn shown(command: &Command) -> Command {
    let args: Vec<&Arg> = command.get_arguments().filter(|arg| !arg.is_hide_set()).collect();
    let has = |id: &&Id| args.iter().any(|arg| arg.get_id() == *id);
    let groups = command.get_groups().map(|group| ArgGroup::new(group.get_id()).args(group.get_args().filter(has)));
    // clap takes names that stay for good only.
    let name: &'static str = command.get_name().to_owned().leak();
    Command::new(name)
        .about(command.get_about().cloned().unwrap_or_default())
        .args(args.iter().copied().cloned())
        .groups(groups)
        .subcommands(command.get_subcommands().filter(|below| !below.is_hide_set()).map(shown))
}
