//! A program that keeps its own cold memory compressed: no daemon, no privilege, faults in the faulting thread.
//!
//! ```sh
//! cargo run --release --example cold_region
//! ```
//!
//! The example fills 256 MiB with records, evicts them while it continues to
//! read, and shows its memory before and after, and the cost of a touch. A
//! second thread evicts idle pages: a region needs no other help.

use pagefold_tier::region::ColdRegion;
use pagefold_tier::{Config, Effort, Tier};
use std::io::Read;
use std::time::{Duration, Instant};

const LEN: usize = 256 << 20;
const RECORD: usize = 512;

fn record(number: usize) -> [u8; RECORD] {
    let mut record = [b' '; RECORD];
    let text = format!("record {number}: {} of {} in shelf {}", number % 97, number % 13, number / 1000);
    record[..text.len()].copy_from_slice(text.as_bytes());
    record[RECORD - 8..].copy_from_slice(&number.to_le_bytes());
    record
}

fn resident_mib() -> u64 {
    pagefold_os::procfs::memory(std::process::id() as i32).map_or(0, |memory| memory.pss >> 20)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let tier = Tier::create(Config { bytes_max: 128 << 20, ..Config::default() }, None)?;
    let mut region = ColdRegion::new(tier, LEN)?;
    for (number, bytes) in region.chunks_exact_mut(RECORD).enumerate() {
        bytes.copy_from_slice(&record(number));
    }
    println!("filled: {} MiB of memory", resident_mib());
    let parker = region.parker();
    let start = Instant::now();
    let parked = parker.park(0..LEN, Effort::Dense);
    println!("parked {} pages in {:?}: {} MiB of memory", parked.pages, start.elapsed(), resident_mib());
    // A second thread would call this every few seconds; pages that are idle for two calls are evicted.
    let evictor = std::thread::spawn(move || {
        for _ in 0..4 {
            std::thread::sleep(Duration::from_millis(200));
            parker.park_idle(2);
        }
    });
    let records = LEN / RECORD;
    let start = Instant::now();
    for step in 0..20_000 {
        let number = step * 7919 % records;
        assert_eq!(region[number * RECORD..][..RECORD], record(number), "record {number}");
    }
    let stats = region.stats();
    println!(
        "20000 random reads in {:?}: {} faults of {:.1} us each",
        start.elapsed(),
        stats.faults,
        stats.fault_ns as f64 / 1e3 / stats.faults.max(1) as f64
    );
    // A buffer of a system call must be pinned: the kernel reports EFAULT for evicted pages.
    let pinned = region.pin(0..1 << 20)?;
    std::fs::File::open("/dev/zero")?.read_exact(&mut region[..1 << 20])?;
    drop(pinned);
    evictor.join().map_err(|_| "the evicting thread failed")?;
    println!("at the end {} pages are evicted: {} MiB of memory", region.stats().pages_out, resident_mib());
    Ok(())
}
