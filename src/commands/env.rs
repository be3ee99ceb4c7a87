//! `pagefold env`: the environment that makes a program a client, for programs that something else than `run` starts.

use crate::error::Error;
use crate::{daemon_client, note};
use std::process::ExitCode;

/// Print the environment that makes a program a client
#[derive(clap::Args)]
#[command(after_help = "Examples:
  pagefold env --manage all > /run/pagefold/web.env
  podman run --env-file /run/pagefold/web.env \\
    -v /run/pagefold:/run/pagefold:ro IMAGE
  env $(pagefold env --domain customer-7) qemu-system-x86_64 disk.img

The lines name the agent and the daemon's socket, which the program must find at the same paths. No
daemon is started: without one the program runs as usual, and is merged once a daemon starts.

Exit status: 0 if printed, 1 if the agent could not be written, 2 for wrong usage.")]
pub struct Args {
    #[command(flatten)]
    client: super::run::ClientArgs,
    #[command(flatten)]
    daemon: daemon_client::DaemonArg,
}

/// Prints the lines.
pub fn run(args: Args) -> Result<ExitCode, Error> {
    if let Some(domain) = &args.client.domain {
        crate::args::domain(domain)?;
    }
    let socket = args.daemon.socket()?;
    let cold = args.client.cold.then_some(daemon_client::Cold { refault_budget: None, tier_max: None });
    let mut text = String::new();
    for (name, value) in daemon_client::environment(
        &socket,
        args.client.domain.as_deref(),
        args.client.manage == super::run::Manage::All,
        cold.as_ref(),
    )? {
        if value.contains('\n') {
            return Err(format!("{name} has a line break, which such a file cannot hold").into());
        }
        if value.contains([' ', '\t']) {
            note!("pagefold: note: {name} has a blank: good for a file, but not for env $(pagefold env …)");
        }
        text += &format!("{name}={value}\n");
    }
    crate::output::print(&text)?;
    Ok(ExitCode::SUCCESS)
}
