//! Memory held per byte of real pages.

use super::kernel::Zswap;
use super::measure::{Area, Spent, as_pages};
use super::row;
use pagefold_os::procfs;
use pagefold_tier::{Config, Effort, Tier};
use serde_json::{Value, json};
use std::io;

fn tier(on: &str, set: &[u8], effort: Effort, patches: bool) -> Value {
    let bytes_max = (set.len() as u64 * 5 / 4).max(64 << 20);
    let tier = Tier::create(Config { patches, bytes_max, ..Config::default() }, None).expect("memory");
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
    row(name, on, set, (stats.bytes_held + stats.bytes_metadata) as f64, &spent)
}

fn row(name: &str, on: &str, set: &[u8], held: f64, spent: &Spent) -> Value {
    let bytes = set.len() as f64;
    row::of(
        "density",
        name,
        on,
        json!({ "set MB": bytes / 1e6, "held MB/GiB": held / 1e6 / (bytes / f64::from(1 << 30)), "ratio": bytes / held,
            "store GB/s": bytes / spent.seconds / 1e9, "cpu us/page": spent.cpu_s * 1e6 / (bytes / 4096.0) }),
    )
}

/// Evicts the set by MADV_PAGEOUT with zswap on; returns the bytes of the pool and the time of eviction.
fn zswap(set: &[u8]) -> io::Result<(f64, Spent)> {
    let _zswap = Zswap::start(set.len() as u64 + (256 << 20))?;
    let before = Zswap::bytes();
    let mut memory = Area::new(set.len())?;
    memory.bytes_mut().copy_from_slice(set);
    let mut spent = Spent::default();
    let resident = || procfs::rss(std::process::id() as i32) as usize;
    let (filled, mut evicted) = (resident(), 0);
    loop {
        spent.on(|| memory.page_out());
        let now = filled.saturating_sub(resident());
        if now <= evicted {
            break;
        }
        evicted = now;
    }
    if evicted < set.len() / 50 * 49 {
        return Err(io::Error::other(format!("{evicted} of {} bytes were evicted", set.len())));
    }
    Ok((Zswap::bytes().0 - before.0, spent))
}

/// Measures ours and the kernel's on one set.
pub fn measure(on: &str, set: &[u8]) -> Vec<Value> {
    let mut rows = Vec::new();
    let rounds = if set.len() < 512 << 20 { 3 } else { 1 };
    let mut add = |name: &str, once: &dyn Fn() -> io::Result<Value>| match (0..rounds)
        .map(|_| once())
        .collect::<io::Result<Vec<_>>>()
    {
        Ok(rounds) => rows.push(row::of_rounds(&rounds)),
        Err(error) => eprintln!("SKIPPED: {name} on {on}: {error}"),
    };
    for (effort, patches) in [(Effort::Fast, false), (Effort::Dense, false), (Effort::Dense, true)] {
        add("the tier", &|| Ok(tier(on, set, effort, patches)));
    }
    add("zswap", &|| {
        let (held, spent) = zswap(set)?;
        Ok(row(&format!("zswap, {}", Zswap::compressor()), on, set, held, &spent))
    });
    rows
}
