//! What is shared: pages saved by the host's cache, by one pool for cache and guests, and by KSM.

use super::{MOUNT, READ_TREE, Results, SharingRow, Size, boot_all, cpu_s, plain_setup, raw_drive, same, through};
use crate::disk::files::{cached_bytes, drop_cached};
use crate::disk::server::Server;
use crate::disk::{Failure, Scratch};
use crate::vm::{self, Boot, Guest, Setup};
use pagefold_os::{ksm, procfs};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

pub(super) fn sharing(
    scratch: &Scratch,
    boot: &Boot,
    directory: &Path,
    images: &[PathBuf],
    size: &Size,
    results: &mut Results,
    skipped: &mut Vec<String>,
) -> Result<(), Failure> {
    let count = images.len();
    let server = Server::start(scratch, "cache", directory, size.cache_mib(), None)?;
    let mut guests = boot_all(boot, through(&server, images), &plain_setup())?;
    same(&vm::all(&mut guests, MOUNT)?)?;
    let (started, cpu) = (Instant::now(), cpu_s([server.pid()]));
    same(&vm::all(&mut guests, READ_TREE)?)?;
    let seconds = started.elapsed().as_secs_f64();
    let status = server.status()?;
    let scanned = status.misses + status.read_ahead_blocks;
    let ours = status.memory_saved_bytes / 4096;
    results.sharing.push(SharingRow {
        guests: count,
        name: "pagefold disk (host's cache)".to_owned(),
        pages_saved: ours,
        pages_scanned: scanned,
        cpu_s: cpu_s([server.pid()]) - cpu,
        host_cache_bytes: status.resident_bytes + status.metadata_bytes,
        seconds,
    });
    drop(guests);
    drop(server);

    if let Err(error) = one_pool(scratch, boot, directory, images, size, results) {
        skipped.push(format!("guests and mount in one pool: {error}"));
    }

    // The same guests on the plain files, with KSM on their memory.
    images.iter().try_for_each(|image| drop_cached(image))?;
    let ksmd = procfs::pids().into_iter().find(|pid| procfs::name(*pid).as_deref() == Some("ksmd"));
    let taken = ksm::Settings::take()
        .and_then(|settings| Ok((settings, ksmd.ok_or_else(|| std::io::Error::other("ksmd is not to be seen"))?)));
    let (mut settings, ksmd) = match taken {
        Ok(taken) => taken,
        Err(error) => {
            skipped.push(format!("KSM on the guests: {error}"));
            return Ok(());
        }
    };
    ksm::write("run", 2)?;
    ksm::write("run", 0)?;
    let mut guests = boot_all(boot, images.iter().map(|image| raw_drive(image, "writeback")), &plain_setup())?;
    same(&vm::all(&mut guests, MOUNT)?)?;
    let read = |name| ksm::read(name).map(|value| value.max(0) as u64);
    let (scanned_before, cpu_before) = (read("pages_scanned")?, cpu_s([ksmd]));
    // As many pages as our cache looked at, spread over the time that the workload took there.
    ksm::write("sleep_millisecs", 20)?;
    ksm::write("pages_to_scan", ((scanned as f64 * 0.02 / seconds) as i64).max(1))?;
    ksm::write("run", 1)?;
    let started = Instant::now();
    guests.iter_mut().try_for_each(|guest| guest.begin(READ_TREE))?;
    let deadline = started + Duration::from_secs(120);
    while read("pages_scanned")? - scanned_before < scanned && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    ksm::write("run", 0)?;
    let budget = read("pages_scanned")? - scanned_before;
    if budget > scanned + scanned / 4 {
        // Its counters and settings are the machine's: somebody else turned it on again.
        skipped.push(format!(
            "KSM on {count} guests: it scanned {budget} pages of {scanned}; somebody else drives it too"
        ));
        guests.iter_mut().try_for_each(|guest| guest.wait().map(drop))?;
        return Ok(());
    }
    same(&guests.iter_mut().map(Guest::wait).collect::<Result<Vec<_>, _>>()?)?;
    let kept: u64 = images.iter().map(|image| cached_bytes(image)).sum::<Result<u64, _>>()?;
    let mut row = |name: String, pages_scanned: u64, cpu: f64, since: Instant| -> Result<(), Failure> {
        results.sharing.push(SharingRow {
            guests: count,
            name,
            pages_saved: read("pages_sharing")?,
            pages_scanned,
            cpu_s: cpu,
            host_cache_bytes: kept,
            seconds: since.elapsed().as_secs_f64(),
        });
        Ok(())
    };
    row("plain files, KSM on the guests, equal scan budget".to_owned(), budget, cpu_s([ksmd]) - cpu_before, started)?;
    // With all the budget it wants, until it finds nothing more: what the equal budget costs it.
    ksm::write("sleep_millisecs", 10)?;
    ksm::write("pages_to_scan", 5000)?;
    ksm::write("run", 1)?;
    let started = Instant::now();
    let mut last = (0, Instant::now());
    while started.elapsed() < size.ksm_alone && last.1.elapsed() < Duration::from_secs(5) {
        std::thread::sleep(Duration::from_millis(250));
        let now = read("pages_sharing")?;
        if now > last.0 + last.0 / 100 {
            last = (now, Instant::now());
        }
    }
    ksm::write("run", 0)?;
    let scanned_alone = read("pages_scanned")? - scanned_before;
    row(
        "the same, KSM going on until nothing more comes".to_owned(),
        scanned_alone,
        cpu_s([ksmd]) - cpu_before,
        started,
    )?;
    settings.restore();
    Ok(())
}

/// The tool's daemon, gone with this value.
struct Daemon {
    child: std::process::Child,
    tool: PathBuf,
    socket: PathBuf,
}

impl Daemon {
    fn start(scratch: &Scratch) -> Result<Daemon, Failure> {
        let tool = std::env::current_exe()?.with_file_name("pagefold");
        if !tool.exists() {
            return Err(format!("{} is not built: cargo build --release", tool.display()).into());
        }
        let socket = scratch.dir("daemon")?.join("s");
        let mut command = std::process::Command::new(&tool);
        command.args(["daemon", "--priority=normal", "--scan-interval", "500ms", "--socket"]).arg(&socket);
        let child = command.stdin(std::process::Stdio::null()).stdout(std::process::Stdio::null()).spawn()?;
        let daemon = Daemon { child, tool, socket };
        let started = Instant::now();
        while daemon.totals().is_err() {
            if started.elapsed() > Duration::from_secs(20) {
                return Err("the daemon does not come up".into());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(daemon)
    }

    /// What makes a program a client.
    fn run(&self) -> Vec<String> {
        [&*self.tool.display().to_string(), "run", "--socket", &self.socket.display().to_string(), "--"]
            .map(str::to_owned)
            .into()
    }

    /// Bytes saved net of the pool, and processor seconds of daemon and agents.
    fn totals(&self) -> Result<(u64, f64), Failure> {
        let mut command = std::process::Command::new(&self.tool);
        let output = command.args(["status", "--json", "--socket"]).arg(&self.socket).output()?;
        let status: serde_json::Value = serde_json::from_slice(&output.stdout)?;
        let number = |name: &str| status["totals"][name].as_u64().ok_or(format!("totals have no {name}"));
        let saved = number("saved_bytes")?.saturating_sub(number("pool_bytes")?);
        Ok((saved, number("cpu_ns")? as f64 / 1e9))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Guests and mount under `pagefold run`: the guests' own copies and the host's are one frame.
fn one_pool(
    scratch: &Scratch,
    boot: &Boot,
    directory: &Path,
    images: &[PathBuf],
    size: &Size,
    results: &mut Results,
) -> Result<(), Failure> {
    let daemon = Daemon::start(scratch)?;
    let server = Server::start_under(scratch, directory, size.cache_mib(), &daemon.run())?;
    let setup = Setup { under: daemon.run(), ..plain_setup() };
    let mut guests = boot_all(boot, through(&server, images), &setup)?;
    same(&vm::all(&mut guests, MOUNT)?)?;
    let (cpu, cpu_merging, started) = (cpu_s([server.pid()]), daemon.totals()?.1, Instant::now());
    same(&vm::all(&mut guests, READ_TREE)?)?;
    let mut last = (0, Instant::now());
    while started.elapsed() < size.ksm_alone && last.1.elapsed() < Duration::from_secs(5) {
        std::thread::sleep(Duration::from_millis(250));
        let now = daemon.totals()?.0;
        if now > last.0 + last.0 / 100 {
            last = (now, Instant::now());
        }
    }
    let (saved, cpu_merged) = daemon.totals()?;
    let status = server.status()?;
    results.sharing.push(SharingRow {
        guests: images.len(),
        name: "the same in one pool: guests and mount under run".to_owned(),
        pages_saved: (status.memory_saved_bytes + saved) / 4096,
        pages_scanned: status.misses + status.read_ahead_blocks,
        // The server's own agent is in both: too much rather than too little.
        cpu_s: cpu_s([server.pid()]) - cpu + cpu_merged - cpu_merging,
        host_cache_bytes: status.resident_bytes + status.metadata_bytes,
        seconds: started.elapsed().as_secs_f64(),
    });
    // Still one truth for all of them.
    same(&vm::all(&mut guests, "find /mnt -type f | sort | xargs cat | md5sum")?)?;
    Ok(())
}
