//! What is shared: pages saved by the host's cache, by one pool for cache and guests, and by KSM.

use super::machines::{MOUNT, READ_TREE, Stage, boot_all, cpu_s, plain_setup, raw_drive, through};
use crate::disk::server::{Mount, Server};
use crate::files::{cached_bytes, drop_cached};
use crate::ksm_peer;
use crate::process::Failure;
use crate::record;
use crate::tool::Daemon;
use crate::vm::{self, Guest, Setup, same};
use pagefold_disk::Status;
use pagefold_os::ksm;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

pub(super) fn sharing(stage: Stage<'_>) -> Result<(), Failure> {
    let mut rows = Vec::new();
    let (scanned, seconds) = by_cache(stage, &mut rows)?;
    if let Err(error) = one_pool(stage, &mut rows) {
        eprintln!("SKIPPED: guests and mount in one pool: {error}");
    }
    if let Err(error) = by_ksm(stage, scanned, seconds, &mut rows) {
        eprintln!("SKIPPED: KSM on the guests: {error}");
    }
    record::table(
        "Guests read a kernel tree, one image each, installed apart",
        "name|guests|pages saved|looked at=pages_scanned|CPU s=cpu_s:2|host cache MiB=host_cache_bytes:M1|s=seconds:1",
        rows,
    );
    Ok(())
}

/// Pages that a mount has looked at.
fn scanned(status: &Status) -> u64 {
    status.misses + status.read_ahead_blocks
}

/// Calls `saved` until it has grown by less than a hundredth for five seconds, or for `limit`.
fn settle(limit: Duration, mut saved: impl FnMut() -> Result<u64, Failure>) -> Result<(), Failure> {
    let (started, mut last) = (Instant::now(), (0, Instant::now()));
    while started.elapsed() < limit && last.1.elapsed() < Duration::from_secs(5) {
        std::thread::sleep(Duration::from_millis(250));
        let now = saved()?;
        if now > last.0 + last.0 / 100 {
            last = (now, Instant::now());
        }
    }
    Ok(())
}

/// The host's cache alone; returns how many pages it looked at, and in how many seconds.
fn by_cache(
    Stage { scratch, boot, directory, images, size }: Stage<'_>,
    rows: &mut Vec<Value>,
) -> Result<(u64, f64), Failure> {
    let server = Server::start(scratch, Mount { cache_mib: size.cache_mib(), ..Mount::cache(directory) })?;
    let mut guests = boot_all(boot, through(&server, images), &plain_setup())?;
    same(&vm::all(&mut guests, MOUNT)?)?;
    let (started, cpu) = (Instant::now(), cpu_s([server.pid()]));
    same(&vm::all(&mut guests, READ_TREE)?)?;
    let (seconds, status) = (started.elapsed().as_secs_f64(), server.status()?);
    rows.push(json!({
        "part": "sharing", "guests": images.len(), "name": "pagefold disk (host's cache)",
        "pages_saved": status.memory_saved_bytes / 4096, "pages_scanned": scanned(&status),
        "cpu_s": cpu_s([server.pid()]) - cpu, "host_cache_bytes": status.resident_bytes + status.metadata_bytes,
        "seconds": seconds,
    }));
    Ok((scanned(&status), seconds))
}

/// The same guests on the plain files, with KSM on their memory: with as many pages looked at as the cache looked at, in the
/// same time, and then until it finds nothing more.
fn by_ksm(
    Stage { boot, images, size, .. }: Stage<'_>,
    scanned: u64,
    seconds: f64,
    rows: &mut Vec<Value>,
) -> Result<(), Failure> {
    images.iter().try_for_each(|image| drop_cached(image))?;
    let ksmd = ksm_peer::scanner()?;
    let mut settings = ksm::Settings::take()?;
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
        // Its counters and settings are the machine's: another program has turned it on again.
        return Err(format!("it scanned {budget} pages of {scanned}; another program drives it too").into());
    }
    same(&guests.iter_mut().map(Guest::wait).collect::<Result<Vec<_>, _>>()?)?;
    let kept: u64 = images.iter().map(|image| cached_bytes(image)).sum::<Result<u64, _>>()?;
    let mut row = |name: &str, since: Instant| -> Result<(), Failure> {
        rows.push(json!({
            "part": "sharing", "guests": images.len(), "name": name, "pages_saved": read("pages_sharing")?,
            "pages_scanned": read("pages_scanned")? - scanned_before, "cpu_s": cpu_s([ksmd]) - cpu_before,
            "host_cache_bytes": kept, "seconds": since.elapsed().as_secs_f64(),
        }));
        Ok(())
    };
    row("plain files, KSM on the guests, equal scan budget", started)?;
    // With all the budget it wants, until it finds nothing more: what the equal budget costs it.
    ksm::write("sleep_millisecs", 10)?;
    ksm::write("pages_to_scan", 5000)?;
    ksm::write("run", 1)?;
    let started = Instant::now();
    settle(size.ksm_alone, || Ok(read("pages_sharing")?))?;
    ksm::write("run", 0)?;
    row("the same, KSM going on until nothing more comes", started)?;
    settings.restore();
    Ok(())
}

/// Bytes that a daemon saves net of its pool, and processor seconds of daemon and agents.
fn totals(daemon: &Daemon) -> Result<(u64, f64), Failure> {
    let totals = daemon.status()?.totals;
    Ok((totals.deduplicated_bytes.saturating_sub(totals.pool_bytes), totals.cpu_ns as f64 / 1e9))
}

/// Guests and mount under `pagefold run`: the guests' own copies and the host's are one frame.
fn one_pool(Stage { scratch, boot, directory, images, size }: Stage<'_>, rows: &mut Vec<Value>) -> Result<(), Failure> {
    let daemon = Daemon::start(&["--scan-interval", "500ms"])?;
    let under = daemon.run(&[]);
    let mount = Mount { cache_mib: size.cache_mib(), under: under.clone(), ..Mount::cache(directory) };
    let server = Server::start(scratch, mount)?;
    let mut guests = boot_all(boot, through(&server, images), &Setup { under, ..plain_setup() })?;
    same(&vm::all(&mut guests, MOUNT)?)?;
    let (cpu, cpu_merging, started) = (cpu_s([server.pid()]), totals(&daemon)?.1, Instant::now());
    same(&vm::all(&mut guests, READ_TREE)?)?;
    settle(size.ksm_alone, || Ok(totals(&daemon)?.0))?;
    let ((saved, cpu_merged), status) = (totals(&daemon)?, server.status()?);
    rows.push(json!({
        "part": "sharing", "guests": images.len(), "name": "the same in one pool: guests and mount under run",
        "pages_saved": (status.memory_saved_bytes + saved) / 4096, "pages_scanned": scanned(&status),
        // The server's own agent is in both: too much rather than too little.
        "cpu_s": cpu_s([server.pid()]) - cpu + cpu_merged - cpu_merging,
        "host_cache_bytes": status.resident_bytes + status.metadata_bytes, "seconds": started.elapsed().as_secs_f64(),
    }));
    // The guests still read the same bytes.
    same(&vm::all(&mut guests, "find /mnt -type f | sort | xargs cat | md5sum")?)?;
    Ok(())
}
