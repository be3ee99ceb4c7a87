//! Independent copies with memory for one.

use super::files::{drop_cached, random_file, read_through, summary};
use super::server::Server;
use super::{Failure, PressureRow, Results, Scratch, Size};
use crate::group::Group;
use crate::undo::Undo;
use std::path::{Path, PathBuf};
use std::time::Instant;

pub(super) const READERS: usize = 4;
pub(super) const PASSES: usize = 2;
/// MiB of the limit for programs: a server's threads and records beside the cache, the readers' buffers.
pub(super) const OTHER_MIB: usize = 40;

/// How the copies are read.
#[derive(Clone, Copy)]
enum Way {
    Plain,
    Cached,
    Learning,
    Known,
}

const WAYS: [(Way, &str); 4] = [
    (Way::Plain, "plain files"),
    (Way::Cached, "pagefold disk"),
    (Way::Learning, "pagefold disk, fingerprints being learnt"),
    (Way::Known, "pagefold disk, fingerprints known"),
];

pub(super) fn pressure(scratch: &Scratch, size: &Size, results: &mut Results) -> Result<(), Failure> {
    let directory = scratch.dir("copies")?;
    let copies: Vec<PathBuf> = (0..READERS).map(|n| directory.join(format!("copy{n}"))).collect();
    random_file(&copies[0], size.file_mib, 99)?;
    for copy in &copies[1..] {
        std::fs::copy(&copies[0], copy)?;
    }
    let sum = read_through(&copies[0])?;
    let limit_mib = size.file_mib + size.file_mib / 4 + OTHER_MIB;
    if let Err(error) = crate::group::root() {
        results.skipped.push(format!("copies with memory for one: {error}"));
        return Ok(());
    }
    // In turns, so that nobody has the colder devices, or the quieter minutes, for himself.
    let mut samples = [const { (Vec::new(), Vec::new()) }; WAYS.len()];
    for round in 0..size.guests.rounds.min(3) {
        let fingerprints = scratch.dir(&format!("fingerprints{round}"))?;
        for ((way, _), (bytes, seconds)) in WAYS.into_iter().zip(&mut samples) {
            copies.iter().try_for_each(|copy| drop_cached(copy))?;
            let store = matches!(way, Way::Learning | Way::Known).then_some(&*fingerprints);
            let sample = limited_reads(scratch, way, (&directory, &copies), store, limit_mib, sum)?;
            bytes.push(sample.0 as f64);
            seconds.push(sample.1);
        }
    }
    let kernel = summary(samples[0].0.clone()).0;
    for ((_, name), (bytes, seconds)) in WAYS.into_iter().zip(&samples) {
        let bytes = summary(bytes.clone()).0;
        results.pressure.push(PressureRow {
            name: format!("{name}, {limit_mib} MiB in all"),
            disk_read_bytes: bytes as u64,
            against_kernel_percent: 100.0 * (bytes / kernel - 1.0),
            seconds: summary(seconds.clone()).0,
        });
    }
    Ok(())
}

/// Every reader reads its copy through, twice, all at once.
fn read_all(places: &[PathBuf], sum: u64) -> Result<(), Failure> {
    let results: Vec<Result<bool, String>> = std::thread::scope(|scope| {
        let reader = |place: &PathBuf| {
            (0..PASSES).try_fold(true, |ok, _| Ok(ok && read_through(place).map_err(|e| e.to_string())? == sum))
        };
        let handles: Vec<_> = places.iter().map(|place| scope.spawn(move || reader(place))).collect();
        handles.into_iter().map(|handle| handle.join().unwrap_or(Err("a reader panicked".to_owned()))).collect()
    });
    for result in results {
        if !result? {
            return Err("a reader got other bytes than were written".into());
        }
    }
    Ok(())
}

/// The same in a memory control group with a limit, which the server is in too; bytes read from disk, and seconds.
fn limited_reads(
    scratch: &Scratch,
    way: Way,
    (directory, copies): (&Path, &[PathBuf]),
    store: Option<&Path>,
    limit_mib: usize,
    sum: u64,
) -> Result<(u64, f64), Failure> {
    let (root, _, home) = crate::group::root()?;
    let group = Group::new("copies")?;
    group.limit((limit_mib as u64) << 20)?;
    // The server's own memory and the readers' come out of the limit as well.
    let cache_mib = limit_mib - OTHER_MIB - limit_mib / 16;
    let server = match way {
        Way::Plain => None,
        _ => Some(Server::start_in(scratch, "cache", directory, cache_mib, store, Some(&group.path))?),
    };
    let at = |copy: &PathBuf| match &server {
        Some(server) => server.at.join(copy.file_name().expect("a copy's name")),
        None => copy.clone(),
    };
    let places: Vec<PathBuf> = copies.iter().map(at).collect();
    let pid = std::process::id().to_string();
    std::fs::write(group.path.join("cgroup.procs"), &pid)?;
    // Home again, whatever happens, or the group could not go.
    let _home = Undo::later({
        let pid = pid.clone();
        move || drop(std::fs::write(root.join(home.trim_start_matches('/')).join("cgroup.procs"), pid))
    });
    let (before, started) = (disk_reads()?, Instant::now());
    read_all(&places, sum)?;
    let seconds = started.elapsed().as_secs_f64();
    let bytes = match &server {
        Some(server) => server.status()?.disk_read_bytes,
        None => disk_reads()? - before,
    };
    Ok((bytes, seconds))
}

/// Bytes this process made the disk read.
fn disk_reads() -> Result<u64, Failure> {
    let io = std::fs::read_to_string("/proc/self/io")?;
    let line = io.lines().find_map(|line| line.strip_prefix("read_bytes: ")).ok_or("no read_bytes")?;
    Ok(line.trim().parse()?)
}
