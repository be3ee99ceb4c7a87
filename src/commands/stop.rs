//! `pagefold stop`: ends the running daemon, and says what becomes of the memory that it manages.

use crate::error::Error;
use crate::output::{print, print_json};
use crate::{daemon_client, note, say, units};
use pagefold_daemon::cold::keeper_path;
use pagefold_daemon::control::{Answer, ColdOnStop, Request};
use pagefold_daemon::status::{Client, Status};
use pagefold_os::fd::Fd;
use pagefold_os::{Errno, sock};
use pagefold_tier::keeper::Keeper;
use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

const PAGE: u64 = pagefold_os::PAGE_SIZE as u64;

/// Time between two looks whether the daemon has ended.
const LOOK: Duration = Duration::from_millis(5);

/// End this user's daemon; merged pages stay merged, cold pages return first
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  pagefold stop
  pagefold stop --json
  pagefold unmerge --all && pagefold stop    and nothing stays shared

Merged pages stay merged: the kernel holds them, and copies a page when a program writes to it. Programs
that go on running connect to the next daemon, which merges them again.

Cold pages return to their programs before the daemon ends, and its keeper ends with it. Pages for which
a program's memory limit has no room stay with the keeper: a thread that touches one waits until a
daemon runs.

A daemon that systemd started is left alone, because systemd would start it again.

Exit status: 0 if the daemon has ended, 1 if none runs, or if cold pages stay with the keeper.")]
pub struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: daemon_client::DaemonArg,
}

/// What `--json` prints.
#[derive(serde::Serialize)]
struct Stopped {
    /// The daemon's process id.
    pid: i32,
    /// Clients with merged pages.
    merged_clients: u64,
    /// Bytes of their pages that stay merged.
    merged_bytes: u64,
    /// Clients with cold pages.
    cold_clients: u64,
    /// Bytes of their cold pages before the stop.
    cold_bytes: u64,
    /// Clients whose cold pages stay with the keeper.
    cold_clients_left: u64,
    /// How long the stop took.
    seconds: f64,
}

/// A daemon that runs.
pub struct Running {
    status: Status,
    process: Fd,
}

impl Running {
    /// The daemon at `socket`; `None` if no daemon listens there.
    ///
    /// # Errors
    /// It does not answer, or systemd started it and would start it again after `verb`.
    pub fn find(socket: &Path, verb: &str) -> Result<Option<Running>, Error> {
        let Some(status) = daemon_client::status_of_any(socket)? else { return Ok(None) };
        if !status.service.is_empty() {
            return Err(format!(
                "the daemon at {} is a service of systemd, which would start it again; systemctl {verb} {}",
                socket.display(),
                status.service
            )
            .into());
        }
        let connected = sock::connect(socket.as_os_str().as_bytes());
        match connected.and_then(|connection| sock::peer_process(&connection)) {
            Ok(process) => Ok(Some(Running { status, process })),
            // It has ended meanwhile.
            Err(Errno(libc::ECONNREFUSED | libc::ENOENT)) => Ok(None),
            Err(errno) => Err(format!("the daemon at {}: {}", socket.display(), io::Error::from(errno)).into()),
        }
    }

    /// Its process id.
    pub fn pid(&self) -> i32 {
        self.status.pid
    }

    /// Clients with merged pages, and the bytes of those.
    fn merged(&self) -> (u64, u64) {
        let totals = &self.status.totals;
        let has_merged = |client: &&Client| client.stats.pages_sharing + client.stats.pages_zero > 0;
        let clients = self.status.clients.iter().filter(has_merged).count() as u64;
        (clients, (totals.pages_sharing + totals.pages_zero) * PAGE)
    }

    /// Clients with cold pages, and the bytes of those.
    fn cold(&self) -> (u64, u64) {
        let clients = self.status.cold.clients.iter().map(|client| client.pages_out).filter(|pages| *pages > 0);
        clients.fold((0, 0), |(count, bytes), pages| (count + 1, bytes + pages * PAGE))
    }

    /// Lines that say what becomes of memory when it stops.
    fn fate(&self, cold_fate: &str) -> String {
        let (merged, bytes) = self.merged();
        let mut text = match merged {
            0 => "nothing is merged\n".to_owned(),
            _ => format!(
                "{} of {} stay merged; a write still copies the page\n",
                units::show_size(bytes),
                units::show_counted(merged, "client", "clients")
            ),
        };
        let (cold, bytes) = self.cold();
        if cold > 0 {
            let clients = units::show_counted(cold, "client", "clients");
            text += &format!("{} of cold memory of {clients} {cold_fate}\n", units::show_size(bytes));
        }
        text
    }

    /// Stops it, and waits until its process has ended. Returns the number of clients whose cold pages were not returned.
    pub fn stop(&self, socket: &Path, cold: ColdOnStop) -> Result<u64, Error> {
        let out = |status: &Status| status.cold.clients.iter().map(|client| client.pages_out * PAGE).sum::<u64>();
        let watched = |request: &Request| {
            daemon_client::ask_and_watch(socket, request, "return of cold memory", |before, now| {
                (out(before).saturating_sub(out(now)), out(before))
            })
        };
        let asked = watched(&Request::Stop { cold: Some(cold) });
        let answer = match asked {
            // A daemon of an earlier version knows one way to stop: by its configuration.
            Err(error) if error.to_string().contains("no request of this version") => {
                watched(&Request::Stop { cold: None })
            }
            asked => asked,
        }?;
        let Answer::Done { count } = answer else { return Err(format!("the daemon answered {answer:?}").into()) };
        while !sock::has_ended(&self.process) {
            std::thread::sleep(LOOK);
        }
        Ok(count)
    }
}

/// Stops the daemon at `socket`, if one runs, so that this process can take its place. Cold pages stay with the keeper,
/// which starts `successor` if this process dies before it listens. The connection to the keeper must last until then.
/// Without a `successor` cold pages are returned.
///
/// # Errors
/// As [`Running::find`] and [`Running::stop`].
pub fn make_way(socket: &Path, successor: &[OsString]) -> Result<Option<Keeper>, Error> {
    let Some(running) = Running::find(socket, "restart")? else { return Ok(None) };
    // From here on the keeper starts no other daemon when the running one ends.
    let keeper = Keeper::connect(&keeper_path(socket))
        .ok()
        .filter(|keeper| !successor.is_empty() && keeper.supervise(successor).is_ok());
    let cold = if keeper.is_some() { ColdOnStop::Keep } else { ColdOnStop::Return };
    note!("pagefold: takes the place of daemon {}", running.pid());
    let fate = running.fate(if keeper.is_some() { "stay with the keeper meanwhile" } else { "are returned first" });
    fate.lines().for_each(|line| note!("pagefold: {line}"));
    running.stop(socket, cold)?;
    Ok(keeper)
}

/// Runs `stop`.
pub fn run(args: Args) -> Result<ExitCode, Error> {
    let socket = args.daemon.socket()?;
    let Some(running) = Running::find(&socket, "stop")? else {
        return Err(format!("no daemon listens at {}: nothing to stop", socket.display()).into());
    };
    let began = Instant::now();
    if !args.json {
        say!("daemon {} at {}", running.pid(), socket.display());
        print(&running.fate("are returned first"))?;
    }
    let cold_clients_left = running.stop(&socket, ColdOnStop::Return)?;
    let seconds = began.elapsed().as_secs_f64();
    if args.json {
        let ((merged_clients, merged_bytes), (cold_clients, cold_bytes)) = (running.merged(), running.cold());
        let pid = running.pid();
        print_json(&Stopped {
            pid,
            merged_clients,
            merged_bytes,
            cold_clients,
            cold_bytes,
            cold_clients_left,
            seconds,
        })?;
    } else {
        say!("stopped in {seconds:.2} s");
    }
    if cold_clients_left > 0 {
        return Err(format!(
            "cold pages of {} have no room in their memory limits and stay with the keeper: a thread that touches one waits \
             until a daemon runs",
            units::show_counted(cold_clients_left, "client", "clients")
        )
        .into());
    }
    Ok(ExitCode::SUCCESS)
}
