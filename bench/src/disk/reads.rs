//! Warm reads.

use super::files::{mib, middle, random_file, read_through, xorshift};
use super::server::Server;
use super::{Failure, ReadRow, Results, SLICES, Scratch, Size};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

pub(super) fn random_reads(path: &Path, time: Duration) -> Result<f64, Failure> {
    let file = File::open(path)?;
    let blocks = file.metadata()?.len() / 4096;
    let mut state = 0x1234_5678_9abc_def1;
    let mut buffer = [0; 4096];
    let started = Instant::now();
    let mut count = 0u64;
    while started.elapsed() < time {
        for _ in 0..64 {
            file.read_exact_at(&mut buffer, xorshift(&mut state) % blocks * 4096)?;
        }
        count += 64;
    }
    Ok(count as f64 / started.elapsed().as_secs_f64())
}

fn sequential_reads(path: &Path, time: Duration) -> Result<f64, Failure> {
    let file = File::open(path)?;
    let size = file.metadata()?.len();
    let mut buffer = vec![0; 1 << 20];
    let started = Instant::now();
    let (mut at, mut bytes) = (0, 0u64);
    while started.elapsed() < time {
        file.read_exact_at(&mut buffer, at)?;
        at = (at + (1 << 20)) % size;
        bytes += 1 << 20;
    }
    Ok(mib(bytes) / started.elapsed().as_secs_f64())
}

/// Reads a file in single blocks in a random order, so that no two neighbours lie beside each other in a cache.
fn read_in_pieces(path: &Path) -> Result<(), Failure> {
    let file = File::open(path)?;
    let blocks = file.metadata()?.len() / 4096;
    let mut buffer = [0; 4096];
    let mut at = 0;
    for _ in 0..blocks {
        // A step without a common divisor with the count passes by every block once.
        at = (at + 7_368_787) % blocks;
        file.read_exact_at(&mut buffer, at * 4096)?;
    }
    Ok(())
}

pub(super) fn reads(scratch: &Scratch, size: &Size, results: &mut Results) -> Result<(), Failure> {
    let directory = scratch.dir("reads")?;
    let path = directory.join("image");
    random_file(&path, size.file_mib, 7)?;
    let ours = Server::start(scratch, "cache", &directory, size.file_mib + 64, None)?;
    let plain = Server::start(scratch, "plain", &directory, 0, None)?;
    let scattered = Server::start_at(scratch, "scattered", &scratch.clone_of(&directory)?, size.file_mib + 64)?;
    read_in_pieces(&scattered.at.join("image"))?;
    let places = [
        ("plain file, kernel's page cache", path.clone()),
        ("plain FUSE pass-through", plain.at.join("image")),
        ("pagefold disk", ours.at.join("image")),
        ("pagefold disk, blocks brought in at random", scattered.at.join("image")),
    ];
    let sums: Vec<u64> = places.iter().map(|(_, place)| read_through(place)).collect::<Result<_, _>>()?;
    if sums.windows(2).any(|pair| pair[0] != pair[1]) {
        return Err("the three ways give different bytes".into());
    }
    let mut samples = places.each_ref().map(|_| (Vec::new(), Vec::new()));
    // In turn and in short slices, so that a disturbance hits all of them, and few slices of each.
    let slice = size.round / SLICES as u32 * 2;
    for _ in 0..SLICES {
        for ((_, place), samples) in places.iter().zip(&mut samples) {
            samples.0.push(random_reads(place, slice)?);
            samples.1.push(sequential_reads(place, slice)?);
        }
    }
    for ((name, _), (random, sequential)) in places.into_iter().zip(samples) {
        let (random_4k_per_s, random_spread_percent) = middle(random);
        let (sequential_mib_per_s, sequential_spread_percent) = middle(sequential);
        results.reads.push(ReadRow {
            name: name.to_owned(),
            random_4k_per_s,
            random_spread_percent,
            sequential_mib_per_s,
            sequential_spread_percent,
        });
    }
    Ok(())
}
