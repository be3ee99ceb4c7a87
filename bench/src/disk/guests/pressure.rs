//! Memory for one: guests that read independent copies of one file.

use super::machines::{Stage, boot_all, raw_drive, through};
use crate::disk::server::{Mount, Server};
use crate::files::{drop_cached, random_file, read_through};
use crate::group::Group;
use crate::process::{Failure, vmstat};
use crate::record;
use crate::restore::SwapFile;
use crate::vm::{self, Guest, Setup, same};
use pagefold_os::ksm;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::Instant;

const READERS: usize = 4;
const PASSES: usize = 3;
/// Guests so small that they cannot keep the file and read it from the host again.
const SMALL_MIB: usize = 96;
/// Memory of QEMU beyond its guest's, with a small buffer for translated code.
const QEMU_MIB: usize = 56;

/// Bytes that a process made the disk read, swap included.
fn process_reads(pid: i32) -> u64 {
    let io = std::fs::read_to_string(format!("/proc/{pid}/io")).unwrap_or_default();
    io.lines().find_map(|line| line.strip_prefix("read_bytes: ")?.trim().parse().ok()).unwrap_or(0)
}

pub(super) fn pressure(stage: Stage<'_>) -> Result<(), Failure> {
    let Stage { scratch, size, .. } = stage;
    let directory = scratch.sub("guest-copies")?;
    let copies: Vec<PathBuf> = (0..READERS).map(|n| directory.join(format!("copy{n}.raw"))).collect();
    random_file(&copies[0], size.file_mib, 17)?;
    copies[1..].iter().try_for_each(|copy| std::fs::copy(&copies[0], copy).map(drop))?;
    let stage = Stage { directory: &directory, images: &copies, ..stage };
    let swap = match SwapFile::new(scratch.dir.join("swap"), 1 << 30) {
        Ok(swap) => swap,
        Err(error) => {
            eprintln!("SKIPPED: memory for one: no swap file: {error}");
            return Ok(());
        }
    };
    let fingerprints = scratch.sub("guest-fingerprints")?;
    learn(stage, &fingerprints)?;
    let plain_files = Pressed { name: "plain files, kernel's page cache", ..Pressed::default() };
    let cached = Pressed { name: "pagefold disk", cached: true, ..Pressed::default() };
    let known = Some(&*fingerprints);
    let (mut plain, mut rows) = ((0.0, 0.0), Vec::new());
    for how in [
        plain_files,
        Pressed { name: "the same, KSM on the guests (its default rate)", with_ksm: true, ..plain_files },
        cached,
        Pressed { name: "pagefold disk, fingerprints known", store: known, ..cached },
    ] {
        if !size.all_rows && !how.is_quick() {
            continue;
        }
        eprintln!("pagecache: memory for one: {}", how.name);
        copies.iter().try_for_each(|copy| drop_cached(copy))?;
        let mut row = match read_under_pressure(stage, &how)? {
            Ok(row) => row,
            Err(why) => {
                eprintln!("SKIPPED: memory for one: {}: {why}", how.name);
                continue;
            }
        };
        let number = |field: &str| row[field].as_f64().unwrap_or(f64::NAN);
        let (swapped, read) = (number("swap_bytes"), number("disk_read_bytes"));
        if !how.cached && !how.with_ksm {
            plain = (swapped, read);
        }
        row["swap_change_percent"] = json!(100.0 * (swapped / plain.0.max(1.0) - 1.0));
        row["disk_change_percent"] = json!(100.0 * (read / plain.1.max(1.0) - 1.0));
        rows.push(row);
    }
    record::table(
        &format!(
            "{READERS} guests read an independent copy of one file {PASSES} times, memory for the guests and one copy"
        ),
        "name|swap MiB=swap_bytes:M1|change=swap_change_percent:1 %|disk MiB=disk_read_bytes:M1|\
         change=disk_change_percent:1 %|peak MiB=peak_bytes:M1|limit MiB=limit_bytes:M0|s=seconds:1",
        rows,
    );
    drop(swap);
    Ok(std::fs::remove_dir_all(directory)?)
}

/// Reads all copies through a mount once, so that their fingerprints are there.
fn learn(Stage { scratch, directory, images, size, .. }: Stage<'_>, store: &Path) -> Result<(), Failure> {
    let fingerprints = Some(store.to_owned());
    let server =
        Server::start(scratch, Mount { cache_mib: size.file_mib + 64, fingerprints, ..Mount::cache(directory) })?;
    for copy in images {
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
    /// With KSM on the guests.
    with_ksm: bool,
    /// Fingerprints.
    store: Option<&'a Path>,
}

impl Pressed<'_> {
    /// Whether `--quick` measures it: the plain files, and the cache with all that it can have.
    fn is_quick(&self) -> bool {
        !self.with_ksm && self.cached == self.store.is_some()
    }
}

/// KSM as the kernel sets it when it is turned on, until this value is dropped.
fn ksm_by_default() -> std::io::Result<ksm::Settings> {
    let settings = ksm::Settings::take()?;
    ksm::write("sleep_millisecs", 20)?;
    ksm::write("pages_to_scan", 100)?;
    // Older kernels lack both.
    for (name, value) in [("use_zero_pages", 0), ("smart_scan", 1)] {
        if ksm::read(name).is_ok() {
            ksm::write(name, value)?;
        }
    }
    ksm::write("run", 1)?;
    Ok(settings)
}

/// One row, or why it cannot be measured here.
fn read_under_pressure(
    Stage { scratch, boot, directory, images, size }: Stage<'_>,
    how: &Pressed<'_>,
) -> Result<Result<Value, String>, Failure> {
    // The guests, and one copy of the file with a quarter to spare; the server's own memory comes out of that quarter.
    let limit_mib = READERS * (SMALL_MIB + QEMU_MIB) + size.file_mib + size.file_mib / 4;
    let group = Group::of_run(if how.cached { "disk" } else { "plain" })?;
    group.limit((limit_mib as u64) << 20)?;
    // Declared before the guests, so that it is dropped after them.
    let settings = match how.with_ksm.then(ksm_by_default).transpose() {
        Ok(settings) => settings,
        Err(error) => return Ok(Err(error.to_string())),
    };
    let mut setup = Setup { memory_mib: SMALL_MIB, group: Some(group.0.clone()), ..Setup::default() };
    setup.accel = Some("tcg,tb-size=16".to_owned());
    let cache_mib = size.file_mib + size.file_mib / 16;
    let server = match how.cached {
        true => {
            let (fingerprints, group) = (how.store.map(Path::to_owned), Some(group.0.clone()));
            Some(Server::start(scratch, Mount { cache_mib, fingerprints, group, ..Mount::cache(directory) })?)
        }
        false => None,
    };
    let mut guests = match &server {
        Some(server) => boot_all(boot, through(server, images), &setup)?,
        None => boot_all(boot, images.iter().map(|copy| raw_drive(copy, "writeback")), &setup)?,
    };
    let pids: Vec<i32> = guests.iter().map(Guest::pid).chain(server.iter().map(Server::pid)).collect();
    let swaps = || (vmstat("pswpin") * 4096, vmstat("pswpout") * 4096);
    let reads = || pids.iter().copied().map(process_reads).sum::<u64>();
    let (swap_before, read_before, started) = (swaps(), reads(), Instant::now());
    for _ in 0..PASSES {
        same(&vm::all(&mut guests, "md5sum < /dev/vda")?)?;
    }
    let (swap_after, seconds) = (swaps(), started.elapsed().as_secs_f64());
    let swapped_in = swap_after.0 - swap_before.0;
    // Pages read from swap are not reads of an image.
    let read = (reads() - read_before).saturating_sub(swapped_in);
    let peak_bytes: u64 = group.read(&["memory.max_usage_in_bytes", "memory.peak"]).trim().parse().unwrap_or(0);
    drop(guests);
    drop(server);
    drop(settings);
    Ok(Ok(json!({
        "part": "pressure", "name": how.name, "swap_bytes": swapped_in + swap_after.1 - swap_before.1,
        "disk_read_bytes": read, "peak_bytes": peak_bytes, "limit_bytes": limit_mib << 20, "seconds": seconds,
    })))
}
