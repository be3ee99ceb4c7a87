//! Memory for one: guests that read independent copies of one file.

use super::{PressureRow, Results, Size, boot_all, raw_drive, same, through};
use crate::disk::files::{drop_cached, random_file, read_through};
use crate::disk::server::Server;
use crate::disk::{Failure, Scratch};
use crate::group::Group;
use crate::undo::SwapFile;
use crate::vm;
use crate::vm::{Boot, Guest, Setup};
use pagefold_os::ksm;
use std::path::{Path, PathBuf};
use std::time::Instant;

pub(super) const READERS: usize = 4;
pub(super) const PASSES: usize = 3;
/// Small guests: what they cannot keep they ask the host for again.
const SMALL_MIB: usize = 96;
/// What QEMU takes beyond its guest's memory, with a small buffer for translated code.
const QEMU_MIB: usize = 56;

fn vmstat(name: &str) -> Result<u64, Failure> {
    let text = std::fs::read_to_string("/proc/vmstat")?;
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')).ok_or("no such counter")?;
    Ok(value.trim().parse()?)
}

/// Bytes that a process made the disk read, swap included.
fn process_reads(pid: i32) -> u64 {
    let io = std::fs::read_to_string(format!("/proc/{pid}/io")).unwrap_or_default();
    io.lines().find_map(|line| line.strip_prefix("read_bytes: ")?.trim().parse().ok()).unwrap_or(0)
}

pub(super) fn pressure(
    scratch: &Scratch,
    boot: &Boot,
    size: &Size,
    results: &mut Results,
    skipped: &mut Vec<String>,
) -> Result<(), Failure> {
    let directory = scratch.dir("guest-copies")?;
    let copies: Vec<PathBuf> = (0..READERS).map(|n| directory.join(format!("copy{n}.raw"))).collect();
    random_file(&copies[0], size.file_mib, 17)?;
    copies[1..].iter().try_for_each(|copy| std::fs::copy(&copies[0], copy).map(drop))?;
    let swap = match SwapFile::new(scratch.0.join("swap"), 1 << 30) {
        Ok(swap) => swap,
        Err(error) => {
            skipped.push(format!("memory for one: no swap file: {error}"));
            return Ok(());
        }
    };
    let fingerprints = scratch.dir("guest-fingerprints")?;
    if !size.all_peers {
        learn(scratch, &directory, &copies, size, &fingerprints)?;
    }
    let plain_files = Pressed { name: "plain files, kernel's page cache", ..Pressed::default() };
    let cached = Pressed { name: "pagefold disk", cached: true, ..Pressed::default() };
    let known = Some(&*fingerprints);
    let mut plain = (0, 0);
    for how in [
        plain_files,
        Pressed { name: "the same, KSM on the guests (its default rate)", with_ksm: true, long: true, ..plain_files },
        cached,
        Pressed { name: "pagefold disk, fingerprints being learnt", store: known, long: true, ..cached },
        Pressed { name: "pagefold disk, fingerprints known", store: known, ..cached },
        Pressed { name: "plain files, swappiness 100", swappiness: Some(100), long: true, ..plain_files },
        Pressed { name: "pagefold disk, swappiness 100", swappiness: Some(100), long: true, ..cached },
    ] {
        if how.long && !size.all_peers {
            continue;
        }
        eprintln!("pagecache: memory for one: {}", how.name);
        copies.iter().try_for_each(|copy| drop_cached(copy))?;
        let under_pressure = match read_under_pressure(scratch, boot, size, &directory, &copies, &how)? {
            Ok(under_pressure) => under_pressure,
            Err(why) => {
                skipped.push(format!("memory for one: {}: {why}", how.name));
                continue;
            }
        };
        let UnderPressure { swapped, read, peak_bytes, limit_bytes, seconds } = under_pressure;
        if !how.cached && !how.with_ksm {
            plain = (swapped, read);
        }
        let (swap_plain, read_plain) = plain;
        results.pressure.push(PressureRow {
            name: how.name.to_owned(),
            swap_bytes: swapped,
            disk_read_bytes: read,
            swap_change_percent: 100.0 * (swapped as f64 / (swap_plain as f64).max(1.0) - 1.0),
            disk_change_percent: 100.0 * (read as f64 / (read_plain as f64).max(1.0) - 1.0),
            peak_bytes,
            limit_bytes,
            seconds,
        });
    }
    drop(swap);
    Ok(std::fs::remove_dir_all(directory)?)
}

/// Reads all copies through a mount once, so that their fingerprints are there.
fn learn(scratch: &Scratch, directory: &Path, copies: &[PathBuf], size: &Size, store: &Path) -> Result<(), Failure> {
    let server = Server::start(scratch, "cache", directory, size.file_mib + 64, Some(store))?;
    for copy in copies {
        read_through(&server.at.join(copy.file_name().ok_or("no name")?))?;
    }
    Ok(())
}

/// A row of the table: how the guests read, and what the kernel may do meanwhile.
#[derive(Clone, Copy, Default)]
struct Pressed<'a> {
    name: &'static str,
    /// Through the cache, else plain files.
    cached: bool,
    with_ksm: bool,
    /// Fingerprints.
    store: Option<&'a Path>,
    /// How readily the kernel swaps the guests instead of dropping file cache, where it is not its default (60).
    swappiness: Option<u64>,
    /// Not in the quick run.
    long: bool,
}

/// What four guests did to the host.
struct UnderPressure {
    /// Bytes swapped in and out.
    swapped: u64,
    /// Bytes of images read from disk.
    read: u64,
    peak_bytes: u64,
    limit_bytes: u64,
    seconds: f64,
}

/// KSM as the kernel sets it when it is turned on, until this value goes; an error if it cannot be had so.
fn ksm_by_default() -> std::io::Result<ksm::Settings> {
    let settings = ksm::Settings::take()?;
    ksm::write("sleep_millisecs", 20)?;
    ksm::write("pages_to_scan", 100)?;
    // Older kernels have neither.
    for (name, value) in [("use_zero_pages", 0), ("smart_scan", 1)] {
        if ksm::read(name).is_ok() {
            ksm::write(name, value)?;
        }
    }
    ksm::write("run", 1)?;
    Ok(settings)
}

/// One row, or why what it is called cannot be had.
fn read_under_pressure(
    scratch: &Scratch,
    boot: &Boot,
    size: &Size,
    directory: &Path,
    copies: &[PathBuf],
    how: &Pressed,
) -> Result<Result<UnderPressure, String>, Failure> {
    // The guests, and one copy of the file with a quarter to spare; the server's own memory comes out of that quarter.
    let limit_mib = READERS * (SMALL_MIB + QEMU_MIB) + size.file_mib + size.file_mib / 4;
    let group = Group::new(if how.cached { "disk" } else { "plain" })?;
    group.limit((limit_mib as u64) << 20)?;
    if how.swappiness.is_some_and(|swappiness| group.set_swappiness(swappiness).is_err()) {
        return Ok(Err("these control groups have no swappiness".to_owned()));
    }
    // First: what is dropped last goes on until the guests are gone.
    let settings = match how.with_ksm.then(ksm_by_default).transpose() {
        Ok(settings) => settings,
        Err(error) => return Ok(Err(error.to_string())),
    };
    let mut setup = Setup { memory_mib: SMALL_MIB, group: Some(group.path.clone()), ..Setup::default() };
    setup.accel = Some("tcg,tb-size=16".to_owned());
    let cache_mib = size.file_mib + size.file_mib / 16;
    let server = match how.cached {
        true => Some(Server::start_in(scratch, "cache", directory, cache_mib, how.store, Some(&group.path))?),
        false => None,
    };
    let mut guests = match &server {
        Some(server) => boot_all(boot, through(server, copies), &setup)?,
        None => boot_all(boot, copies.iter().map(|copy| raw_drive(copy, "writeback")), &setup)?,
    };
    let pids: Vec<i32> = guests.iter().map(Guest::pid).chain(server.iter().map(Server::pid)).collect();
    let swaps = || -> Result<(u64, u64), Failure> { Ok((vmstat("pswpin")? * 4096, vmstat("pswpout")? * 4096)) };
    let reads = || pids.iter().copied().map(process_reads).sum::<u64>();
    let (swap_before, read_before, started) = (swaps()?, reads(), Instant::now());
    for _ in 0..PASSES {
        same(&vm::all(&mut guests, "md5sum < /dev/vda")?)?;
    }
    let (swap_after, seconds) = (swaps()?, started.elapsed().as_secs_f64());
    let swapped_in = swap_after.0 - swap_before.0;
    // What came back from swap is no read of an image.
    let read = (reads() - read_before).saturating_sub(swapped_in);
    // Of the first kind of groups; the second tells it elsewhere.
    let peak_bytes = group.number(&["memory.max_usage_in_bytes", "memory.peak"]).unwrap_or(0);
    drop(guests);
    drop(server);
    drop(settings);
    Ok(Ok(UnderPressure {
        swapped: swapped_in + swap_after.1 - swap_before.1,
        read,
        peak_bytes,
        limit_bytes: (limit_mib as u64) << 20,
        seconds,
    }))
}
