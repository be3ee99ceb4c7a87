//! `pagefold park` and `unpark`: an idle client's memory to the cold tier and back, at once.

use super::control::for_each;
use crate::error::Error;
use crate::output::print_json;
use crate::{completion_values, daemon_client, say, units};
use pagefold_daemon::cold::{ClientSelector, ColdClient};
use pagefold_daemon::control::{Answer, Request};
use pagefold_daemon::status::Status;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

/// Evict an idle client's memory to the cold tier now
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  pagefold run -- qemu-system-x86_64 -m 2G disk.img &
  pagefold park 4711
  pagefold park $(pidof qemu-system-x86_64)
  pagefold park --cgroup machine.slice
  pagefold park --all

The client goes on running: pages it touches return, with their neighbours. Merged pages stay
merged; all others are evicted, and are merged again after pagefold unpark. Pages that are locked,
pinned for I/O or shared with a forked process stay in memory.")]
pub struct Park {
    #[command(flatten)]
    target: Target,
}

/// Return a parked client's memory now
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  pagefold unpark 4711
  pagefold unpark --cgroup machine.slice

Not needed before the client works again: the pages it touches return by themselves. The pages
that it touched most recently return first.")]
pub struct Unpark {
    #[command(flatten)]
    target: Target,
}

#[derive(clap::Args)]
#[command(group(clap::ArgGroup::new("target").required(true).args(["clients", "cgroup", "all"])))]
struct Target {
    /// Process ids of clients
    #[arg(value_name = "PID", value_parser = units::pid, add = completion_values::clients())]
    clients: Vec<i32>,
    /// All clients in this cgroup and below it
    #[arg(long, value_name = "PATH", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    cgroup: Option<String>,
    /// All clients
    #[arg(long)]
    all: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: daemon_client::DaemonArg,
}

impl Target {
    /// One request each.
    fn selectors(&self) -> Vec<ClientSelector> {
        match &self.cgroup {
            Some(path) => vec![ClientSelector::Cgroup(path.clone())],
            None if self.all => vec![ClientSelector::All],
            None => self.clients.iter().map(|pid| ClientSelector::Pid(*pid)).collect(),
        }
    }
}

/// What `--json` prints.
#[derive(serde::Serialize)]
struct Moved {
    clients: u64,
    pages: u64,
    bytes: u64,
    seconds: f64,
}

/// Parks or unparks the selected clients; on a terminal it shows meanwhile how many bytes were moved. Returns clients and
/// pages.
fn ask_and_watch(socket: &Path, selector: &ClientSelector, park: bool) -> Result<(u64, u64), Error> {
    let clients = selector.clone();
    let one = if let ClientSelector::Pid(pid) = clients { Some(pid) } else { None };
    let request = if park { Request::Park { clients } } else { Request::Unpark { clients } };
    let sum = |status: &Status, of: fn(&ColdClient) -> u64| -> u64 {
        status.cold.clients.iter().filter(|client| one.is_none_or(|pid| pid == client.pid)).map(of).sum()
    };
    let out = |client: &ColdClient| client.pages_out * pagefold_os::PAGE_SIZE as u64;
    let answer =
        daemon_client::ask_and_watch(socket, &request, if park { "park" } else { "unpark" }, |before, now| {
            // What is locked or pinned stays; what grows meanwhile may be more than there was.
            let resident = |client: &ColdClient| pagefold_os::procfs::rss(client.pid);
            let done = sum(now, out).abs_diff(sum(before, out));
            (done, if park { done + sum(now, resident) } else { sum(before, out) })
        })?;
    let Answer::Moved { clients, pages } = answer else {
        return Err("the daemon answered something else".into());
    };
    Ok((clients, pages))
}

fn moved(target: &Target, park: bool) -> Result<ExitCode, Error> {
    let socket = target.daemon.socket()?;
    let began = Instant::now();
    let (moved, code) = for_each(&target.selectors(), |selector| ask_and_watch(&socket, selector, park))?;
    let (clients, pages) = moved.iter().fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
    let bytes = pages * pagefold_os::PAGE_SIZE as u64;
    let seconds = began.elapsed().as_secs_f64();
    if target.json {
        print_json(&Moved { clients, pages, bytes, seconds })?;
    } else {
        say!(
            "{} ({}) of {} {} in {seconds:.2} s",
            units::show_counted(pages, "page", "pages"),
            units::show_size(bytes),
            units::show_counted(clients, "client", "clients"),
            if park { "evicted" } else { "returned" },
        );
    }
    Ok(code)
}

/// Runs `park`.
pub fn park(args: Park) -> Result<ExitCode, Error> {
    moved(&args.target, true)
}

/// Runs `unpark`.
pub fn unpark(args: Unpark) -> Result<ExitCode, Error> {
    moved(&args.target, false)
}
