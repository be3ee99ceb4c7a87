//! `pagefold env`: the environment that makes a program a client, for who starts programs by other means than `run`.

use super::Error;
use crate::{host, note};
use std::process::ExitCode;

/// Print the environment that makes a program a client, for containers and services
#[derive(clap::Args)]
#[command(after_help = "Examples:
  pagefold env --manage all > /run/pagefold/web.env
  podman run --env-file /run/pagefold/web.env \\
    -v /run/pagefold:/run/pagefold:ro IMAGE
  env $(pagefold env --domain customer-7) qemu-system-x86_64 -m 2G disk.img

The lines name the agent and the daemon's socket, which the program must find at the same paths. No
daemon is started: a program without one works as ever, and is merged once a daemon comes.

Exit status: 0 if printed, 1 if the agent could not be written, 2 for wrong usage.")]
pub struct Args {
    #[command(flatten)]
    client: super::run::ClientArgs,
    #[command(flatten)]
    daemon: host::DaemonArg,
}

/// Prints the lines.
pub fn run(args: Args) -> Result<ExitCode, Error> {
    if let Some(domain) = &args.client.domain {
        super::run::check_domain(domain)?;
    }
    let socket = args.daemon.socket()?;
    let cold = args.client.cold.then_some(host::Cold { refault_budget: None, tier_max: None });
    let mut text = String::new();
    for (name, value) in host::environment(
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
