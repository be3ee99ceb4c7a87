//! Warm reads.

use super::args::Size;
use super::server::{Mount, Server};
use crate::files::{random_file, read_through};
use crate::process::Failure;
use crate::record;
use crate::scratch::Scratch;
use crate::stats::quartiles;
use serde_json::json;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// Slices of the time for warm reads.
const SLICES: usize = 60;

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

pub(super) fn reads(scratch: &Scratch, size: &Size) -> Result<(), Failure> {
    let directory = scratch.sub("reads")?;
    let path = directory.join("image");
    random_file(&path, size.file_mib, 7)?;
    let cache_mib = size.file_mib + 64;
    let ours = Server::start(scratch, Mount { cache_mib, ..Mount::cache(&directory) })?;
    let plain = Server::start(scratch, Mount { kind: "plain".into(), ..Mount::cache(&directory) })?;
    let places = [
        ("plain file, kernel's page cache", path.clone()),
        ("plain FUSE pass-through", plain.at.join("image")),
        ("pagefold disk", ours.at.join("image")),
    ];
    let sums = places.iter().map(|(_, place)| read_through(place)).collect::<Result<Vec<_>, _>>()?;
    if sums.windows(2).any(|pair| pair[0] != pair[1]) {
        return Err("the mounts give different bytes".into());
    }
    let mut samples = places.each_ref().map(|_| Vec::new());
    // In turn and in short slices, so that a disturbance hits all of them, and few slices of each.
    let slice = size.round / SLICES as u32 * 2;
    for _ in 0..SLICES {
        for ((_, place), samples) in places.iter().zip(&mut samples) {
            samples.push(random_reads(place, slice)?);
        }
    }
    let rows = places.into_iter().zip(samples).map(|((name, _), samples)| {
        let (median, spread) = quartiles(samples);
        json!({ "part": "reads", "name": name, "random_4k_per_s": median, "random_spread_percent": spread })
    });
    record::table(
        &format!("Warm reads of one file, one thread: median of {SLICES} slices, half between the quartiles"),
        "name|4 KiB random/s=random_4k_per_s:0|+-=random_spread_percent:1 %",
        rows.collect(),
    );
    Ok(())
}
