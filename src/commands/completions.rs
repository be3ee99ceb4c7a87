//! `pagefold completions`: what the shell needs to complete our command line. The scripts ask this program at each tab, so
//! that they offer what there is at that moment.

use crate::error::Error;
use clap::{Arg, ArgGroup, Command, CommandFactory, Id};
use clap_complete::Shell;
use clap_complete::env::{CompleteEnv, Shells};
use std::process::ExitCode;

/// Print the completions for a shell
#[derive(clap::Args)]
#[command(after_help = "Examples:
  pagefold completions bash > /etc/bash_completion.d/pagefold
  pagefold completions zsh > ~/.zfunc/_pagefold
  pagefold completions fish > ~/.config/fish/completions/pagefold.fish

At a tab the shell asks pagefold, which offers commands and options, process ids, images and mounts.")]
pub struct Args {
    /// Shell to complete for
    shell: Shell,
}

/// The variable by which a script asks for completions; its value is the shell.
const ASKED: &str = "PAGEFOLD_COMPLETE";

/// The library's script for bash has words end at the colons of images' names.
const BASH: &str = r#"_pagefold() {
    # Bash takes app:1 and --name=app apart; they are put together again, and what bash has already is not offered twice.
    local IFS=$' \t\n' word glued=1 words=() index
    for ((index = 0; index <= COMP_CWORD; index++)); do
        word=${COMP_WORDS[index]}
        if ((index == COMP_CWORD)); then
            word=${2-}
            [[ ${COMP_WORDS[index]} == [:=] ]] && word=${COMP_WORDS[index]}
        fi
        if [[ $word == [:=] && ${#words[@]} -gt 1 ]]; then
            words[-1]+=$word
            glued=0
        elif ((glued == 0)); then
            words[-1]+=$word
            glued=1
        else
            words+=("$word")
        fi
    done
    local current=${words[-1]}
    local has=
    [[ $current == *[:=]* ]] && has=${current%"${current##*[:=]}"}
    mapfile -t COMPREPLY < <(_CLAP_IFS=$'\n' _CLAP_COMPLETE_INDEX=$((${#words[@]} - 1)) PAGEFOLD_COMPLETE=bash \
        pagefold -- "${words[@]}" 2> /dev/null)
    COMPREPLY=("${COMPREPLY[@]#"$has"}")
    [[ ${COMPREPLY-} == *[=/:] ]] && compopt -o nospace 2> /dev/null
    return 0
}
complete -o bashdefault -o default -F _pagefold pagefold
"#;

/// Zsh loads the file as the body of a function when it is first needed: that first call completes, too.
const ZSH_FIRST_CALL: &str = "[[ $funcstack[1] != _pagefold ]] || _clap_dynamic_completer_pagefold \"$@\"\n";

/// Answers the shell, if it was a script of ours that called; returns whether it was.
///
/// # Errors
/// A shell that is not known.
pub fn answer() -> Result<bool, Error> {
    // All other calls pay for no more than this look.
    if std::env::var_os(ASKED).is_none() {
        return Ok(false);
    }
    let asked = CompleteEnv::with_factory(command).var(ASKED);
    let here = std::env::current_dir().ok();
    asked.try_complete(std::env::args_os(), here.as_deref()).map_err(|error| format!("{ASKED}: {error}").into())
}

/// Writes the completions to standard output.
pub fn run(args: Args) -> Result<ExitCode, Error> {
    let mut text = Vec::new();
    match args.shell {
        Shell::Bash => text.extend_from_slice(BASH.as_bytes()),
        shell => {
            let shells = Shells::builtins();
            let completer = shells.completer(&shell.to_string()).ok_or_else(|| format!("{shell}: not known"))?;
            completer.write_registration(ASKED, "pagefold", "pagefold", "pagefold", &mut text)?;
        }
    }
    if args.shell == Shell::Zsh {
        text.extend_from_slice(ZSH_FIRST_CALL.as_bytes());
    }
    crate::output::print(&String::from_utf8(text)?)?;
    Ok(ExitCode::SUCCESS)
}

fn command() -> Command {
    shown(&crate::Cli::command()).version(env!("CARGO_PKG_VERSION")).propagate_version(true)
}

/// `command` without what its help hides: that is for us to call.
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
