//! Warm reads.

use super::args::Size;
use super::server::{Mount, Server};
use crate::files::{random_file, read_through};
use crate::process::{self, Failure};
use crate::record;
use crate::restore::Undo;
use crate::scratch::Scratch;
use crate::stats::quartiles;
use serde_json::json;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// Slices of the time for warm reads.
const SLICES: usize = 60;

/// Reads a file for some time; returns the rate.
type Reader = fn(&Path, Duration) -> Result<f64, Failure>;

fn random_reads(path: &Path, time: Duration) -> Result<f64, Failure> {
    let file = File::open(path)?;
    let blocks = file.metadata()?.len() / 4096;
    let (mut random, mut buffer) = (fastrand::Rng::with_seed(1), [0; 4096]);
    let (started, mut count) = (Instant::now(), 0u64);
    while started.elapsed() < time {
        for _ in 0..64 {
            file.read_exact_at(&mut buffer, random.u64(0..blocks) * 4096)?;
        }
        count += 64;
    }
    Ok(count as f64 / started.elapsed().as_secs_f64())
}

fn sequential_reads(path: &Path, time: Duration) -> Result<f64, Failure> {
    let file = File::open(path)?;
    let blocks = file.metadata()?.len() >> 20;
    let mut buffer = vec![0; 1 << 20];
    let (started, mut count) = (Instant::now(), 0u64);
    while started.elapsed() < time {
        file.read_exact_at(&mut buffer, (count % blocks) << 20)?;
        count += 1;
    }
    Ok(count as f64 / 1024.0 / started.elapsed().as_secs_f64())
}

/// Random reads with 32 of them under way; without fio, no number.
fn deep_reads(path: &Path, time: Duration) -> Result<f64, Failure> {
    let mut fio = Command::new("fio");
    fio.args(["--name=deep", "--rw=randread", "--bs=4k", "--ioengine=io_uring", "--iodepth=32", "--readonly"]);
    fio.args(["--invalidate=0", "--time_based", "--output-format=json", &format!("--runtime={}ms", time.as_millis())]);
    let output = process::output(fio.arg(format!("--filename={}", path.display())))?;
    let report: serde_json::Value = serde_json::from_str(&output)?;
    report.pointer("/jobs/0/read/iops").and_then(serde_json::Value::as_f64).ok_or("fio gives no rate".into())
}

pub(super) fn reads(scratch: &Scratch, size: &Size) -> Result<(), Failure> {
    let (directory, ring_directory) = (scratch.sub("reads")?, scratch.sub("reads-ring")?);
    let path = directory.join("image");
    random_file(&path, size.file_mib, 7)?;
    std::fs::hard_link(&path, ring_directory.join("image"))?;
    let mount = |kind: &str, transport, directory| {
        let cache_mib = size.file_mib + 64;
        Server::start(scratch, Mount { kind: kind.into(), cache_mib, transport, ..Mount::cache(directory) })
    };
    let (ours, plain) = (mount("cache", "classic", &directory)?, mount("plain", "", &directory)?);
    let switched = Undo::set("/sys/module/fuse/parameters/enable_uring", "Y");
    let ring = switched.map_err(|error| eprintln!("SKIPPED: rings: {error}")).ok();
    let ring = ring.map(|_on| mount("ring", "ring", &ring_directory)).transpose()?;
    let mut places = vec![
        ("plain file, kernel's page cache", path.clone()),
        ("plain FUSE pass-through", plain.at.join("image")),
        ("pagefold disk", ours.at.join("image")),
    ];
    places.extend(ring.as_ref().map(|ring| ("pagefold disk, ring", ring.at.join("image"))));
    let sums = places.iter().map(|(_, place)| read_through(place)).collect::<Result<Vec<_>, _>>()?;
    if sums.windows(2).any(|pair| pair[0] != pair[1]) {
        return Err("the mounts give different bytes".into());
    }
    let mut kinds: Vec<(&str, Reader, usize)> =
        vec![("random_4k_per_s", random_reads, SLICES), ("sequential_gib_per_s", sequential_reads, SLICES)];
    if process::output(Command::new("fio").arg("--version")).is_ok() {
        // fio takes half a second to start.
        kinds.push(("random_4k_deep_per_s", deep_reads, 5));
    } else {
        eprintln!("SKIPPED: depth 32: fio is not installed");
    }
    let mut rows: Vec<_> = places.iter().map(|(name, _)| json!({ "part": "reads", "name": name })).collect();
    for (kind, read, slices) in kinds {
        let mut samples = vec![Vec::new(); places.len()];
        // In turn and in short slices, so that a disturbance hits all of them, and few slices of each.
        for _ in 0..slices {
            for ((_, place), samples) in places.iter().zip(&mut samples) {
                samples.push(read(place, size.round * 2 / slices as u32)?);
            }
        }
        for (row, samples) in rows.iter_mut().zip(samples) {
            let (median, spread) = quartiles(samples);
            row[kind] = json!(median);
            if kind == "random_4k_per_s" {
                row["random_spread_percent"] = json!(spread);
            }
        }
    }
    record::table(
        &format!("Warm reads of one file, one thread: median of {SLICES} slices, half between the quartiles"),
        "name|4 KiB random/s=random_4k_per_s:0|+-=random_spread_percent:1 %|depth 32=random_4k_deep_per_s:0|1 MiB in order, GiB/s=sequential_gib_per_s:2",
        rows,
    );
    Ok(())
}
