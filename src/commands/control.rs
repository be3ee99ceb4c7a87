//! `pagefold unmerge`, `pause`, `resume`, `verify`: one request to the daemon each.

use super::Error;
use crate::output::print_json;
use crate::say;
use crate::{host, units};
use pagefold_daemon::control::{Answer, Request};
use pagefold_daemon::status::Status;
use std::path::PathBuf;
use std::process::ExitCode;

const PAGE: u64 = pagefold_os::PAGE_SIZE as u64;

/// Give a client its private memory back and leave it alone
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  pagefold unmerge 4711\n\npagefold resume 4711 lets it merge again.")]
pub struct Unmerge {
    /// Process id of the client
    client: i32,
    /// Print JSON
    #[arg(long)]
    json: bool,
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
    /// Print JSON
    #[arg(long)]
    json: bool,
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
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Socket of the daemon [default: this user's]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
}

/// Compare every shared page with its slot through the kernel's own page tables
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  pagefold verify\n  pagefold verify --json\n\nExit status: 0 if all are right, 1 if any page is wrong."
)]
pub struct Verify {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Socket of the daemon [default: this user's]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
}

/// What `--json` prints.
#[derive(serde::Serialize)]
struct Done {
    /// Clients, or pages.
    count: u64,
}

fn done(socket: Option<PathBuf>, request: &Request, json: bool, words: [&str; 2]) -> Result<ExitCode, Error> {
    let socket = host::socket(socket.as_deref())?;
    tell(host::ask(&socket, request)?, json, words)
}

fn tell(answer: Answer, json: bool, words: [&str; 2]) -> Result<ExitCode, Error> {
    match answer {
        Answer::Done { count } if json => print_json(&Done { count })?,
        Answer::Done { count } => say!("{} {}", units::show_count(count), words[usize::from(count != 1)]),
        other => return Err(format!("the daemon answered {other:?}").into()),
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs `unmerge`.
pub fn unmerge(args: Unmerge) -> Result<ExitCode, Error> {
    let socket = host::socket(args.socket.as_deref())?;
    let shared = |status: &Status| -> u64 {
        status.clients.iter().filter(|one| one.pid == args.client).map(|one| one.stats.pages_sharing).sum()
    };
    let healed = |status: &Status| -> u64 { status.domains.iter().map(|one| one.events.healed).sum() };
    let answer = host::ask_and_watch(&socket, &Request::Unmerge { pid: args.client }, "unmerge", |before, now| {
        (healed(now).saturating_sub(healed(before)) * PAGE, shared(before) * PAGE)
    })?;
    tell(answer, args.json, ["page is private again", "pages are private again"])
}

/// Runs `pause`.
pub fn pause(args: Pause) -> Result<ExitCode, Error> {
    done(args.socket, &Request::Pause { pid: args.client }, args.json, ["client paused", "clients paused"])
}

/// Runs `resume`.
pub fn resume(args: Resume) -> Result<ExitCode, Error> {
    done(args.socket, &Request::Resume { pid: args.client }, args.json, ["client resumed", "clients resumed"])
}

/// Runs `verify`.
pub fn verify(args: Verify) -> Result<ExitCode, Error> {
    let socket = host::socket(args.socket.as_deref())?;
    let answer = host::ask_and_watch(&socket, &Request::Verify {}, "verify", |_, now| {
        (now.verifying.pages * PAGE, now.verifying.pages_total * PAGE)
    })?;
    let Answer::Verified(found) = answer else {
        return Err("the daemon answered something else".into());
    };
    if args.json {
        print_json(&found)?;
    } else {
        say!("{} shared pages looked at", units::show_count(found.pages));
        say!("{:>12} show the slot's own frame", units::show_count(found.same_frame));
        if found.same_bytes > 0 {
            say!("{:>12} show the slot's bytes (frames are visible to root only)", units::show_count(found.same_bytes));
        }
        say!("{:>12} were written meanwhile", units::show_count(found.broken));
        say!("{:>12} were not in memory", units::show_count(found.absent));
        say!("{:>12} are wrong", units::show_count(found.wrong.len() as u64));
        for line in &found.wrong {
            say!("  {line}");
        }
    }
    Ok(if found.wrong.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
