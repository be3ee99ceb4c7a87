//! What our own records cost per page: index, tables, ledgers and counts, as `Domain::stats` tells them.

use pagefold_merge::sim::{Machine, Options};
use pagefold_merge::{Config, Domain};
use pagefold_os::PAGE_SIZE;
use pagefold_pool::Key;

const PAGE: u64 = PAGE_SIZE as u64;

/// Merges processes with these contents until nothing happens; returns metadata bytes, pages and pages sharing.
fn metadata(processes: u32, pages: u32, content: impl Fn(u32, u32) -> u32) -> (u64, u64, u64) {
    let machine = Machine::new(1, Options { interference: 0, ..Options::default() });
    let config = Config { period_ns: 1000, ..Config::default() };
    let domain = Domain::with_key(config, Key::from_seed(1)).unwrap();
    for number in 0..processes {
        let process = machine.spawn();
        let range = process.map(u64::from(pages));
        for page in 0..pages {
            process.write(range.start + u64::from(page) * PAGE, content(number, page));
        }
        domain.add(Box::new(process.client()));
    }
    for period in 1..8 {
        while domain.step_any(period * 1000, None, &mut Vec::new()).is_some() {}
    }
    assert_eq!(domain.audit(), Vec::<String>::new());
    let stats = domain.stats();
    (stats.metadata_bytes, stats.pages, stats.pages_sharing)
}

#[test]
fn records_of_pages_without_a_twin_take_sixteen_bytes_each() {
    let (bytes, pages, sharing) = metadata(4, 256 << 10, |process, page| 2 * (process * (256 << 10) + page + 1));
    let each = bytes as f64 / pages as f64;
    println!("scanned, no twins: {pages} pages, {each:.2} bytes per page");
    // The index compares parts of fingerprints: about one page in a million finds a twin that is none.
    assert!(pages == 1 << 20 && sharing < 64, "{sharing} of {pages} share");
    assert!(each <= 16.0, "{each:.2} bytes per page scanned");
}

#[test]
fn records_of_pages_shared_in_runs_take_twenty_four_bytes_each() {
    // The least sharing there is: two of a kind, in runs of 64 in different orders.
    let run =
        |process: u32, page: u32| 2 * ((page / 64 * if process == 0 { 1 } else { 5 } % 1024) * 64 + page % 64 + 1);
    let (bytes, pages, sharing) = metadata(2, 64 << 10, run);
    let each = bytes as f64 / sharing as f64;
    println!("shared by two in runs of 64: {pages} pages, {sharing} sharing, {each:.2} bytes per page shared");
    assert_eq!((pages, sharing), (128 << 10, 128 << 10));
    assert!(each <= 24.0, "{each:.2} bytes per page shared");
}
