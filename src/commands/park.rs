//! `pagefold park` and `unpark`: an idle client's memory to the cold tier and back, at once.

use super::Error;
use crate::{host, units};
use pagefold_daemon::cold::Whom;
use pagefold_daemon::control::{Answer, Request};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

/// Move an idle client's memory to the cold tier, now
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  pagefold run --cold -- qemu-system-x86_64 -m 2G disk.img &
  pagefold park 4711
  pagefold park --cgroup machine.slice
  pagefold park --all

The client goes on running: what it touches comes back, with its neighbours. It must have been
started with pagefold run --cold. Pages that are locked, pinned for I/O or shared with a forked
process stay.")]
pub struct Park {
    #[command(flatten)]
    whom: Target,
}

/// Bring a parked client's memory back, now
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  pagefold unpark 4711
  pagefold unpark --cgroup machine.slice

It need not be done before the client works again: the pages it touches come back anyway. The
pages that it touched when it last worked come first.")]
pub struct Unpark {
    #[command(flatten)]
    whom: Target,
}

#[derive(clap::Args)]
struct Target {
    /// Process id of the client
    #[arg(required_unless_present_any = ["cgroup", "all"], conflicts_with_all = ["cgroup", "all"])]
    client: Option<i32>,
    /// All clients in this cgroup and below it
    #[arg(long, value_name = "PATH", conflicts_with = "all")]
    cgroup: Option<String>,
    /// All clients of the cold tier
    #[arg(long)]
    all: bool,
    /// Socket of the daemon [default: this user's]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
}

impl Target {
    fn whom(&self) -> Whom {
        match (&self.client, &self.cgroup) {
            (Some(pid), _) => Whom::Pid(*pid),
            (None, Some(path)) => Whom::Cgroup(path.clone()),
            (None, None) => Whom::All,
        }
    }
}

fn moved(socket: Option<&Path>, request: &Request, what: &str) -> Result<ExitCode, Error> {
    let socket = host::socket(socket)?;
    let began = Instant::now();
    match host::ask(&socket, request)? {
        Answer::Moved { clients, pages } => {
            let bytes = pages * pagefold_os::PAGE_SIZE as u64;
            let seconds = began.elapsed().as_secs_f64();
            println!(
                "{} pages ({}) of {clients} {} {what} in {seconds:.2} s",
                units::show_count(pages),
                units::show_size(bytes),
                if clients == 1 { "client" } else { "clients" },
            );
            Ok(ExitCode::SUCCESS)
        }
        other => Err(format!("the daemon answered {other:?}").into()),
    }
}

/// Runs `park`.
pub fn park(args: Park) -> Result<ExitCode, Error> {
    let request = Request::Park { whom: args.whom.whom() };
    moved(args.whom.socket.as_deref(), &request, "went to the cold tier")
}

/// Runs `unpark`.
pub fn unpark(args: Unpark) -> Result<ExitCode, Error> {
    let request = Request::Unpark { whom: args.whom.whom() };
    moved(args.whom.socket.as_deref(), &request, "came back")
}
