//! Memory held per byte of real pages.

use super::kernel::Zswap;
use super::measure::{Area, Spent, as_pages};
use super::row::Row;
use crate::stats::median;
use pagefold_tier::{Config, Effort, Tier};
use std::io;
use std::time::{Duration, Instant};

fn config(set: &[u8]) -> Config {
    Config { bytes_max: (set.len() as u64 * 5 / 4).max(64 << 20), ..Config::default() }
}

fn tier(set: &[u8], effort: Effort, patches: bool) -> Row {
    let tier = Tier::create(Config { patches, ..config(set) }, None).expect("memory");
    let pages = as_pages(set);
    tier.add_client(1, pages.len() as u64).expect("a region");
    let mut spent = Spent::default();
    let results = spent.on(|| tier.store_many(1, &pages, effort));
    let refused = results.iter().filter(|result| result.is_err()).count();
    assert_eq!(refused, 0, "the tier refused pages");
    let stats = tier.stats();
    // A set that reads back wrong has no figure.
    let mut back = [0; 4096];
    let step = (pages.len() / 2000).max(1);
    for (page, data) in pages.iter().step_by(step) {
        tier.load(1, *page, &mut back).expect("what was stored");
        assert!(back == **data, "page {page} came back wrong");
    }
    let name = match (effort, patches) {
        (Effort::Fast | Effort::Ready, _) => "tier, LZ4",
        (Effort::Dense, false) => "tier, zstd + dictionary",
        (Effort::Dense, true) => "tier, zstd + dictionary + patches",
    };
    row(name, set, (stats.bytes_held + stats.bytes_metadata) as f64, &spent)
}

fn row(name: &str, set: &[u8], held: f64, spent: &Spent) -> Row {
    let gib = set.len() as f64 / f64::from(1 << 30);
    Row {
        part: "density",
        name: name.to_owned(),
        on: String::new(),
        figures: vec![
            ("set MB", set.len() as f64 / 1e6),
            ("held MB/GiB", held / 1e6 / gib),
            ("ratio", set.len() as f64 / held),
            ("store GB/s", set.len() as f64 / spent.seconds / 1e9),
            ("cpu us/page", spent.cpu_s * 1e6 / (set.len() / 4096) as f64),
        ],
    }
}

/// Evicts the set by MADV_PAGEOUT with zswap on; returns the bytes of the pool and the time of eviction.
fn zswap(set: &[u8]) -> io::Result<(f64, Spent)> {
    let _zswap = Zswap::start(set.len() as u64 + (256 << 20))?;
    let before = Zswap::bytes();
    let mut memory = Area::new(set.len())?;
    memory.bytes_mut().copy_from_slice(set);
    let mut spent = Spent::default();
    let end = Instant::now() + Duration::from_secs(120);
    let mut left = set.len();
    while left > 0 && Instant::now() < end {
        spent.on(|| memory.page_out());
        let resident = memory.resident_bytes()?;
        if resident >= left {
            break;
        }
        left = resident;
    }
    let after = Zswap::bytes();
    if left > set.len() / 50 {
        return Err(io::Error::other(format!("{left} of {} bytes were not evicted", set.len())));
    }
    Ok((after.0 - before.0, spent))
}

/// The medians of the rounds.
fn of_rounds(rounds: usize, once: impl Fn() -> io::Result<Row>) -> io::Result<Row> {
    let mut runs = (0..rounds).map(|_| once()).collect::<io::Result<Vec<Row>>>()?;
    let column = |index: usize| median(runs.iter().map(|row| row.figures[index].1));
    let figures: Vec<f64> = (0..runs[0].figures.len()).map(column).collect();
    let mut first = runs.swap_remove(0);
    first.figures.iter_mut().zip(figures).for_each(|(figure, median)| figure.1 = median);
    Ok(first)
}

/// Measures ours and the kernel's on one set.
pub fn measure(on: &str, set: &[u8]) -> Vec<Row> {
    let mut rows = Vec::new();
    let rounds = if set.len() < 512 << 20 { 3 } else { 1 };
    let mut add = |name: &str, once: &dyn Fn() -> io::Result<Row>| match of_rounds(rounds, once) {
        Ok(row) => rows.push(Row { on: on.to_owned(), ..row }),
        Err(error) => eprintln!("SKIPPED: {name} on {on}: {error}"),
    };
    for (effort, patches) in [(Effort::Fast, false), (Effort::Dense, false), (Effort::Dense, true)] {
        add("the tier", &|| Ok(tier(set, effort, patches)));
    }
    add("zswap", &|| {
        let (held, spent) = zswap(set)?;
        Ok(row(&format!("zswap, {}", Zswap::compressor()), set, held, &spent))
    });
    rows
}
