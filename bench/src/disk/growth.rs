//! Growth with images, their size, the cache and writers.

use super::files::{random_file, read_through, summary, xorshift};
use super::reads::random_reads;
use super::server::Server;
use super::{Failure, GrowthRow, ROUNDS, Results, Scratch, Size};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// Random reads or writes a second at one setting, and the memory they leave.
pub(super) fn growth(scratch: &Scratch, size: &Size, results: &mut Results) -> Result<(), Failure> {
    let directory = scratch.dir("growth")?;
    let file_mib = size.file_mib / 4;
    for n in 0..16 {
        random_file(&directory.join(format!("{n}")), file_mib, 5)?;
    }
    let mut row = |what: String, value: usize, server: &Server, samples: Vec<f64>| -> Result<(), Failure> {
        let status = server.status()?;
        let (per_s, spread_percent) = summary(samples);
        let (resident_bytes, metadata_bytes) = (status.resident_bytes, status.metadata_bytes);
        results.growth.push(GrowthRow {
            what,
            value: value as u64,
            per_s,
            spread_percent,
            resident_bytes,
            metadata_bytes,
        });
        Ok(())
    };
    let rounds = |work: &dyn Fn() -> Result<f64, Failure>| (0..ROUNDS).map(|_| work()).collect::<Result<Vec<_>, _>>();
    for images in [1, 4, 16] {
        let server = Server::start(scratch, "cache", &directory, file_mib + 64, None)?;
        for n in 0..images {
            read_through(&server.at.join(format!("{n}")))?;
        }
        let last = server.at.join(format!("{}", images - 1));
        let samples = rounds(&|| random_reads(&last, size.round / 3))?;
        row(format!("reads: equal images of {file_mib} MiB"), images, &server, samples)?;
    }
    for mib in [file_mib / 4, file_mib, file_mib * 4] {
        let image = directory.join("size");
        random_file(&image, mib, 6)?;
        let server = Server::start(scratch, "cache", &directory, file_mib * 4 + 64, None)?;
        read_through(&server.at.join("size"))?;
        let samples = rounds(&|| random_reads(&server.at.join("size"), size.round / 3))?;
        row("reads: one image, MiB, all in the cache".to_owned(), mib, &server, samples)?;
    }
    for percent in [25, 50, 100] {
        let server = Server::start(scratch, "cache", &directory, file_mib * 4 * percent / 100, None)?;
        read_through(&server.at.join("size"))?;
        let samples = rounds(&|| random_reads(&server.at.join("size"), size.round / 3))?;
        row(format!("reads: cache in % of an image of {} MiB", file_mib * 4), percent, &server, samples)?;
    }
    for writers in [1, 2, 4, 8] {
        let server = Server::start(scratch, "cache", &directory, file_mib * 8 + 64, None)?;
        let samples = rounds(&|| random_writes(&server.at, writers, size.round / 3))?;
        row("writes: writers, an image each, synced at the end".to_owned(), writers, &server, samples)?;
    }
    Ok(std::fs::remove_dir_all(directory)?)
}

/// 4 KiB writes a second of `writers` threads, each to its own image, the final syncs included.
fn random_writes(at: &Path, writers: usize, time: Duration) -> Result<f64, Failure> {
    let started = Instant::now();
    let count = std::thread::scope(|scope| {
        let write = |n: usize| -> std::io::Result<u64> {
            let file = File::options().write(true).open(at.join(format!("{n}")))?;
            let blocks = file.metadata()?.len() / 4096;
            let mut state = 77 + n as u64;
            let mut buffer = [0; 4096];
            let mut count = 0;
            while started.elapsed() < time {
                let place = xorshift(&mut state) % blocks;
                buffer[..8].copy_from_slice(&state.to_le_bytes());
                file.write_all_at(&buffer, place * 4096)?;
                count += 1;
            }
            file.sync_all()?;
            Ok(count)
        };
        let threads: Vec<_> = (0..writers).map(|n| scope.spawn(move || write(n))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a writer panicked")).sum::<std::io::Result<u64>>()
    })?;
    Ok(count as f64 / started.elapsed().as_secs_f64())
}
