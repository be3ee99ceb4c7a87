//! Memory held per byte of real pages.

use super::kernel::{Zswap, zram_bytes};
use super::{Row, median};
use pagefold_tier::{Config, Effort, Tier};
use std::io;
use std::time::{Duration, Instant};

/// Pages of a set, whole.
pub fn as_pages(set: &[u8]) -> Vec<(u64, &[u8; 4096])> {
    (0..).zip(set.as_chunks::<4096>().0).collect()
}

fn config(set: &[u8]) -> Config {
    Config { bytes_max: (set.len() as u64 * 5 / 4).max(64 << 20), ..Config::default() }
}

fn tier(set: &[u8], effort: Effort, patches: bool) -> Row {
    let tier = Tier::create(Config { patches, ..config(set) }, None).expect("memory");
    let pages = as_pages(set);
    tier.add_region(1, pages.len() as u64).expect("a region");
    let (start, cpu) = (Instant::now(), cpu_s());
    let refused = tier.store_many(1, &pages, effort).iter().filter(|result| result.is_err()).count();
    let (seconds, cpu) = (start.elapsed().as_secs_f64(), cpu_s() - cpu);
    assert_eq!(refused, 0, "the tier refused pages");
    let stats = tier.stats();
    // The sum of all: no figure of a set that does not come back.
    let mut back = [0; 4096];
    let step = (pages.len() / 2000).max(1);
    for (page, data) in pages.iter().step_by(step) {
        tier.load(1, *page, &mut back).expect("what was stored");
        assert!(back == **data, "page {page} came back wrong");
    }
    let name = match (effort, patches) {
        (Effort::Fast, _) => "tier, LZ4",
        (Effort::Dense, false) => "tier, zstd + dictionary",
        (Effort::Dense, true) => "tier, zstd + dictionary + patches",
    };
    row(
        name,
        set,
        (stats.bytes_held + stats.bytes_metadata) as f64,
        set.len() as f64 / seconds / 1e9,
        cpu * 1e6 / pages.len() as f64,
    )
}

/// Processor time of this process, in seconds.
fn cpu_s() -> f64 {
    // SAFETY: all-zero is a valid rusage, and the kernel fills it.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &raw mut usage);
        usage
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

fn row(name: &str, set: &[u8], held: f64, gb_per_s: f64, cpu_us: f64) -> Row {
    let gib = set.len() as f64 / f64::from(1 << 30);
    Row {
        part: "density",
        name: name.to_owned(),
        on: String::new(),
        figures: vec![
            ("set MB", set.len() as f64 / 1e6),
            ("held MB/GiB", held / 1e6 / gib),
            ("ratio", set.len() as f64 / held),
            ("store GB/s", gb_per_s),
            ("cpu us/page", cpu_us),
        ],
    }
}

/// Puts the set out by MADV_PAGEOUT with zswap on; returns the bytes of the pool and the rate of going out.
fn zswap(set: &[u8]) -> io::Result<(f64, f64, f64)> {
    let _zswap = Zswap::start(set.len() as u64 + (256 << 20))?;
    let before = Zswap::bytes();
    let mut memory = super::latency::Area::new(set.len())?;
    memory.bytes_mut().copy_from_slice(set);
    let (start, cpu) = (Instant::now(), cpu_s());
    let end = start + Duration::from_secs(120);
    let mut left = set.len();
    while left > 0 && Instant::now() < end {
        memory.page_out();
        let resident = memory.resident_bytes()?;
        if resident >= left {
            break;
        }
        left = resident;
    }
    let (seconds, cpu) = (start.elapsed().as_secs_f64(), cpu_s() - cpu);
    let after = Zswap::bytes();
    if left > set.len() / 50 {
        return Err(io::Error::other(format!("{left} of {} bytes would not go out", set.len())));
    }
    Ok((after.0 - before.0, set.len() as f64 / seconds / 1e9, cpu * 1e6 / (set.len() / 4096) as f64))
}

/// Measures ours and the kernel's on one set.
pub fn measure(on: &str, set: &[u8]) -> Vec<Row> {
    let mut rows = Vec::new();
    for (effort, patches) in [(Effort::Fast, false), (Effort::Dense, false), (Effort::Dense, true)] {
        let mut runs: Vec<Row> =
            (0..if set.len() < 512 << 20 { 3 } else { 1 }).map(|_| tier(set, effort, patches)).collect();
        let column = |index: usize| median(&mut runs.iter().map(|row| row.figures[index].1).collect::<Vec<f64>>());
        let figures: Vec<f64> = (0..5).map(column).collect();
        let mut first = runs.swap_remove(0);
        first.figures.iter_mut().zip(figures).for_each(|(figure, median)| figure.1 = median);
        rows.push(first);
    }
    match zswap(set) {
        Ok((held, rate, cpu)) => rows.push(row(&format!("zswap, {}", Zswap::compressor()), set, held, rate, cpu)),
        Err(error) => eprintln!("SKIPPED: zswap on {on}: {error}"),
    }
    for algorithm in ["lzo-rle", "lzo", "lz4", "zstd"] {
        let (start, cpu) = (Instant::now(), cpu_s());
        match zram_bytes(set, algorithm) {
            Ok(held) => {
                let rate = set.len() as f64 / start.elapsed().as_secs_f64() / 1e9;
                let cpu = (cpu_s() - cpu) * 1e6 / (set.len() / 4096) as f64;
                rows.push(row(&format!("zram, {algorithm}"), set, held, rate, cpu));
            }
            Err(error) => eprintln!("SKIPPED: zram with {algorithm}: {error}"),
        }
    }
    for row in &mut rows {
        row.on = on.to_owned();
    }
    rows
}
