//! The demonstration's first row: pagefold merges the processes.
//!
//! As root the processes are started plainly, and then attached. Other users may not enter them, so theirs load the agent
//! when they start.

use super::crew::Crew;
use super::interrupt::{LOOK, end_with_us, go_on, pause, wait_for};
use super::row::{MERGE_MAX, REST, Row, STORM_PAGES, storm};
use crate::error::Error;
use crate::output::Progress;
use crate::{daemon_client, note, units};
use pagefold_daemon::control::{Answer, Backend, Request};
use pagefold_daemon::status::Status;
use pagefold_os::{ksm, procfs};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const PAGE: usize = pagefold_os::PAGE_SIZE;

/// How long memory must be silent before our daemon merges it: two of its periods.
pub(super) const SILENCE_S: u64 = 2;

/// The domain of the processes.
const DOMAIN: &str = "demo";

/// A daemon of the demonstration's own.
struct OwnDaemon {
    child: Child,
    socket: PathBuf,
}

impl Drop for OwnDaemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        for end in ["", ".lock"] {
            let mut path = self.socket.clone().into_os_string();
            path.push(end);
            let _ = std::fs::remove_file(path);
        }
    }
}

impl OwnDaemon {
    fn start() -> Result<OwnDaemon, Error> {
        let socket = daemon_client::runtime_dir()?.join(format!("demo-{}.sock", std::process::id()));
        let mut command = Command::new(std::env::current_exe()?);
        command
            // What the file says is for another daemon: its addresses, for instance, are taken. And a keeper would stay: it
            // is for cold pages and forks, and there are none.
            .args(["daemon", "--config", "none", "--no-keeper", "--priority=normal", "--scan-interval"])
            .args([&format!("{}s", SILENCE_S / 2), "--socket"])
            .arg(&socket)
            .env_remove("LD_PRELOAD")
            .stdin(Stdio::null());
        // In good order: it removes its socket.
        let child = end_with_us(&mut command, libc::SIGTERM).spawn()?;
        let mut daemon = OwnDaemon { child, socket };
        let mut ended = false;
        let decided = || {
            ended = daemon.child.try_wait().is_ok_and(|status| status.is_some());
            ended || daemon_client::status(&daemon.socket).is_ok()
        };
        wait_for(decided, daemon_client::DAEMON_START_MAX, "the daemon does not listen")?;
        if ended { Err("the daemon has ended".into()) } else { Ok(daemon) }
    }

    /// Attaches the processes; returns the longest time for which a thread of one stood still.
    fn attach(&self, crew: &Crew) -> Result<Duration, Error> {
        let mut longest = 0;
        for pid in crew.pids() {
            match daemon_client::ask(
                &self.socket,
                &Request::Attach { pid, domain: DOMAIN.to_owned(), cold: false, backend: Backend::Agent },
            )? {
                Answer::Attached { still_ns, .. } => longest = longest.max(still_ns),
                _ => return Err("the daemon answered something else".into()),
            }
        }
        Ok(Duration::from_nanos(longest))
    }

    /// Starts processes that the daemon merges from now on; returns them with the memory that they used before.
    fn start_crew(&self, processes: usize, size: u64, root: bool) -> Result<(Crew, u64), Error> {
        if root {
            let crew = Crew::start(processes, size, &[])?;
            let before_bytes = crew.pss();
            match self.attach(&crew) {
                Ok(still) => {
                    note!(
                        "{} in memory; attached while they run: none stood still for more than {} us; merging …",
                        units::show_size(before_bytes),
                        still.as_micros()
                    );
                    return Ok((crew, before_bytes));
                }
                Err(error) => {
                    go_on()?;
                    note!("they cannot be attached ({error}); started once more, with the agent in them …");
                }
            }
        }
        // The processes wait to be merged until all are full, so that before and after can be told.
        let environment = daemon_client::environment(&self.socket, Some(DOMAIN), false, None)?;
        let mut crew = Crew::start(processes, size, &environment)?;
        let before_bytes = crew.pss();
        note!("{} in memory; merging …", units::show_size(before_bytes));
        crew.tell("merge")?;
        Ok((crew, before_bytes))
    }
}

/// Has pagefold merge such processes.
pub(super) fn merge(processes: usize, size: u64, root: bool) -> Result<Row, Error> {
    let daemon = OwnDaemon::start()?;
    note!(
        "{processes} processes fill {} each with the files of this machine, in different orders …",
        units::show_size(size)
    );
    let (mut crew, before_bytes) = daemon.start_crew(processes, size, root)?;
    let began = Instant::now();
    let (status, seconds) = settle(&daemon.socket, began)?;
    let own = procfs::memory(daemon.child.id() as i32).unwrap_or_default();
    let mapping_bytes: u64 = status.domains.iter().map(|domain| domain.mapping_bytes).sum();
    // Pool pages that the daemon maps are the processes' memory, whichever process the kernel charges.
    let own_bytes = own.pss - own.pss_shared_memory + mapping_bytes;
    let after_bytes = crew.pss() + own.pss + mapping_bytes;
    note!(
        "{} after {seconds:.1} s: {} pages are mapped in {} places; nothing changes for {} s …",
        units::show_size(after_bytes),
        units::show_count(status.totals.pages_shared),
        units::show_count(status.totals.pages_sharing),
        REST.as_secs()
    );
    // Not by the daemon's own count: to be asked costs it more than to rest. The processes only wait, so their time is the
    // agents'.
    let cpu = || crew.pids().chain([daemon.child.id() as i32]).filter_map(procfs::cpu_ns).sum::<u64>();
    let before = cpu();
    pause(REST)?;
    let rest_ns = cpu() - before;
    note!("comparing every byte …");
    let mut intact = crew.check()?;
    let Answer::Verified(verified) = daemon_client::ask(&daemon.socket, &Request::Verify {})? else {
        return Err("the daemon answered something else".into());
    };
    if !verified.wrong.is_empty() {
        return Err(format!(
            "{} of {} shared pages are wrong: {}",
            verified.wrong.len(),
            verified.pages,
            verified.wrong[0]
        )
        .into());
    }
    note!("every byte is right; each process writes to {STORM_PAGES} pages anywhere, as fast as it can …");
    let write_us = storm(&mut crew)?;
    intact = intact.min(crew.check()?);
    if intact == processes {
        note!("every byte is right again: each write went to its own process alone.");
    }
    Ok(Row {
        name: "pagefold",
        before_bytes,
        after_bytes,
        own_bytes,
        seconds,
        cpu_seconds: status.totals.cpu_ns as f64 / 1e9,
        pages_merged: status.totals.pages_merged + status.totals.pages_zeroed,
        rest_cpu_percent: rest_ns as f64 / REST.as_nanos() as f64 * 100.0,
        rest_cpu_percent_by_default: None,
        write_us,
        intact,
        processes,
    })
}

/// Waits until nothing more is merged for three periods; returns the status and the time at which it came to rest.
fn settle(socket: &Path, began: Instant) -> Result<(Status, f64), Error> {
    let mut last = (0, began.elapsed());
    let mut progress = Progress::new("merging");
    loop {
        pause(LOOK)?;
        let status = daemon_client::status(socket)?;
        let totals = &status.totals;
        // What was looked at and found to have a twin, or none; the rest still changes or waits for its turn.
        let seen = totals.pages_sharing + totals.pages_zero + totals.pages_unshared;
        progress.update(seen * PAGE as u64, totals.pages.max(seen) * PAGE as u64);
        let merged = totals.pages_merged + totals.pages_zeroed;
        if merged != last.0 {
            last = (merged, began.elapsed());
        }
        let quiet = began.elapsed() - last.1;
        if last.0 > 0 && quiet > Duration::from_millis(3500) || began.elapsed() > MERGE_MAX {
            return Ok((status, last.1.as_secs_f64()));
        }
        if last.0 == 0 && began.elapsed() > Duration::from_secs(30) {
            let why = match status.unmanaged_processes.first() {
                Some(process) => process.reason.clone(),
                None if ksm::read("run").is_ok_and(|run| run == 1) => {
                    "KSM runs, which may have them already (echo 0 > /sys/kernel/mm/ksm/run)".to_owned()
                }
                None => "no reason known".to_owned(),
            };
            return Err(format!("nothing was merged in 30 s: {why}; pagefold doctor tells more").into());
        }
    }
}
