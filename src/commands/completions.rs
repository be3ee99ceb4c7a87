//! `pagefold completions`: what the shell needs to complete our command line.

use super::Error;
use clap::CommandFactory;
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
    clap_complete::generate(args.shell, &mut crate::Cli::command(), "pagefold", &mut text);
    crate::output::print(&String::from_utf8(text)?)?;
    Ok(ExitCode::SUCCESS)
}
