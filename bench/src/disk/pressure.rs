//! Independent copies with memory for one.

use super::files::{drop_cached, random_file, read_through};
use super::server::Server;
use super::{Failure, PressureRow, Results, Scratch, Size};
use std::path::PathBuf;
use std::time::Instant;

pub(super) const READERS: usize = 4;
pub(super) const PASSES: usize = 2;

pub(super) fn pressure(scratch: &Scratch, size: &Size, results: &mut Results) -> Result<(), Failure> {
    let directory = scratch.dir("copies")?;
    let copies: Vec<PathBuf> = (0..READERS).map(|n| directory.join(format!("copy{n}"))).collect();
    random_file(&copies[0], size.file_mib, 99)?;
    for copy in &copies[1..] {
        std::fs::copy(&copies[0], copy)?;
        drop_cached(copy)?;
    }
    let sum = read_through(&copies[0])?;
    let limit_mib = size.file_mib + size.file_mib / 4;
    let cold = || copies.iter().try_for_each(|copy| drop_cached(copy));

    cold()?;
    let kernel = match limited_reads(&copies, limit_mib, sum) {
        Ok((bytes, seconds)) => {
            let name = format!("plain files, {limit_mib} MiB of page cache (control group)");
            results.pressure.push(PressureRow { name, disk_read_bytes: bytes, against_kernel_percent: 0.0, seconds });
            bytes
        }
        Err(error) => {
            results.skipped.push(format!("plain files with limited memory: {error}"));
            return Ok(());
        }
    };
    let fingerprints = scratch.dir("fingerprints")?;
    for (name, store) in [
        ("pagefold disk", None),
        ("pagefold disk, fingerprints being learnt", Some(&*fingerprints)),
        ("pagefold disk, fingerprints known", Some(&*fingerprints)),
    ] {
        cold()?;
        let server = Server::start(scratch, "cache", &directory, limit_mib, store)?;
        let started = Instant::now();
        let places: Vec<PathBuf> = (0..READERS).map(|n| server.at.join(format!("copy{n}"))).collect();
        read_all(&places, sum)?;
        let seconds = started.elapsed().as_secs_f64();
        let bytes = server.status()?.disk_read_bytes;
        results.pressure.push(PressureRow {
            name: format!("{name}, cache of {limit_mib} MiB"),
            disk_read_bytes: bytes,
            against_kernel_percent: 100.0 * (bytes as f64 / kernel as f64 - 1.0),
            seconds,
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

/// The same in a memory control group with a limit; returns bytes read from disk and seconds.
fn limited_reads(copies: &[PathBuf], limit_mib: usize, sum: u64) -> Result<(u64, f64), Failure> {
    let (root, limit, home) = crate::group::root()?;
    let group = root.join(format!("pagefold-bench-{}", std::process::id()));
    std::fs::create_dir(&group)?;
    let pid = std::process::id().to_string();
    let outcome = (|| {
        std::fs::write(group.join(limit), ((limit_mib as u64) << 20).to_string())?;
        std::fs::write(group.join("cgroup.procs"), &pid)?;
        let before = disk_reads()?;
        let started = Instant::now();
        read_all(copies, sum)?;
        Ok((disk_reads()? - before, started.elapsed().as_secs_f64()))
    })();
    // Home again, whatever happened, or the group could not go.
    std::fs::write(root.join(home.trim_start_matches('/')).join("cgroup.procs"), &pid)?;
    std::fs::remove_dir(&group)?;
    outcome
}

/// Bytes this process made the disk read.
fn disk_reads() -> Result<u64, Failure> {
    let io = std::fs::read_to_string("/proc/self/io")?;
    let line = io.lines().find_map(|line| line.strip_prefix("read_bytes: ")).ok_or("no read_bytes")?;
    Ok(line.trim().parse()?)
}
