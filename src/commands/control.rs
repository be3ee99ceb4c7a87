//! `pagefold unmerge`, `pause`, `resume`, `verify`: one request to the daemon each.

use super::Error;
use crate::output::print_json;
use crate::{host, units};
use pagefold_daemon::control::{Answer, Request};
use std::path::PathBuf;
use std::process::ExitCode;

/// Give a client its private memory back and leave it alone
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  pagefold unmerge 4711\n\npagefold resume 4711 lets it merge again.")]
pub struct Unmerge {
    /// Process id of the client
    client: i32,
    /// Socket of the daemon [default: this user's]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
}

/// Stop merging, for one client or for all; what is merged stays
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  pagefold pause\n  pagefold pause 4711")]
pub struct Pause {
    /// Process id of the client [default: all]
    client: Option<i32>,
    /// Socket of the daemon [default: this user's]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
}

/// Go on merging
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  pagefold resume\n  pagefold resume 4711")]
pub struct Resume {
    /// Process id of the client [default: all]
    client: Option<i32>,
    /// Socket of the daemon [default: this user's]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
}

/// Compare every shared page with its slot through the kernel's own page tables
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  pagefold verify\n  pagefold verify --json\n\nExit status 1 if any page is wrong.")]
pub struct Verify {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Socket of the daemon [default: this user's]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
}

fn done(socket: Option<PathBuf>, request: &Request, what: &str) -> Result<ExitCode, Error> {
    let socket = host::socket(socket.as_deref())?;
    match host::ask(&socket, request)? {
        Answer::Done { count } => {
            println!("{} {what}", units::show_count(count));
            Ok(ExitCode::SUCCESS)
        }
        other => Err(format!("the daemon answered {other:?}").into()),
    }
}

/// Runs `unmerge`.
pub fn unmerge(args: Unmerge) -> Result<ExitCode, Error> {
    done(args.socket, &Request::Unmerge { pid: args.client }, "pages are private again")
}

/// Runs `pause`.
pub fn pause(args: Pause) -> Result<ExitCode, Error> {
    done(args.socket, &Request::Pause { pid: args.client }, "clients paused")
}

/// Runs `resume`.
pub fn resume(args: Resume) -> Result<ExitCode, Error> {
    done(args.socket, &Request::Resume { pid: args.client }, "clients resumed")
}

/// Runs `verify`.
pub fn verify(args: Verify) -> Result<ExitCode, Error> {
    let socket = host::socket(args.socket.as_deref())?;
    let Answer::Verified(found) = host::ask(&socket, &Request::Verify {})? else {
        return Err("the daemon answered something else".into());
    };
    if args.json {
        print_json(&found)?;
    } else {
        println!("{} shared pages looked at", units::show_count(found.pages));
        println!("{:>12} show the slot's own frame", units::show_count(found.same_frame));
        if found.same_bytes > 0 {
            println!(
                "{:>12} show the slot's bytes (frames are visible to root only)",
                units::show_count(found.same_bytes)
            );
        }
        println!("{:>12} were written meanwhile", units::show_count(found.broken));
        println!("{:>12} were not in memory", units::show_count(found.absent));
        println!("{:>12} are wrong", units::show_count(found.wrong.len() as u64));
        found.wrong.iter().for_each(|line| println!("  {line}"));
    }
    Ok(if found.wrong.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
