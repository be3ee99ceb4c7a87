//! Threads store, discard, fork and clean while other threads load: a load returns the whole page of one store, or nothing.

mod common;

use common::page_of;
use pagefold_tier::{BackingFile, Config, Effort, LoadError, Tier};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const PAGES: u64 = 256;

/// Content `version` of a page. It contains the page number, so that bytes of another page are detected.
fn content(page: u64, version: u64) -> [u8; 4096] {
    let mut data = page_of((version * 8 + 2 + version % 4) as u16 % 2048);
    data[..8].copy_from_slice(&page.to_le_bytes());
    data
}

#[test]
fn loads_see_whole_pages_of_their_own() {
    let backing = BackingFile::create(&std::env::temp_dir(), 64 << 20).unwrap();
    let config = Config { bytes_max: 8 << 20, recompress_ticks: 0, ..Config::default() };
    let tier = Tier::create(config, Some(Box::new(backing))).unwrap();
    tier.add_client(1, PAGES).unwrap();
    let seconds = std::env::var("PAGEFOLD_STRESS_S").ok().and_then(|text| text.parse().ok()).unwrap_or(4);
    let end = Instant::now() + Duration::from_secs(seconds);
    let (stop, loaded) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for seed in 1..3_u64 {
            let tier = &tier;
            let stop = &stop;
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(seed);
                while !stop.load(Ordering::Relaxed) {
                    let (page, version) = (random.u64(..PAGES), random.u64(..300));
                    let client = if random.bool() { 1 } else { 9 };
                    match random.u8(..10) {
                        0..=1 => drop(tier.discard(client, page..page + 3)),
                        2 => drop(tier.write_back_now(20_000)),
                        3 => drop(tier.compact_now()),
                        4 => drop(tier.tick()),
                        5 if random.u8(..16) == 0 => {
                            tier.remove_client(100 + seed as u32);
                            tier.fork_client(client, 100 + seed as u32).unwrap();
                        }
                        n => {
                            let effort = if n < 8 { Effort::Fast } else { Effort::Dense };
                            tier.store(client, page, &content(page, version), effort).unwrap();
                        }
                    }
                }
            });
        }
        for seed in 5..7_u64 {
            let (tier, stop, loaded) = (&tier, &stop, &loaded);
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(seed);
                let mut data = [0; 4096];
                while !stop.load(Ordering::Relaxed) {
                    let (page, client) = (random.u64(..PAGES), [1, 9, 101, 102][random.usize(..4)]);
                    match tier.load(client, page, &mut data) {
                        Ok(()) => {
                            assert_eq!(data[..8], page.to_le_bytes(), "bytes of another page");
                            loaded.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(LoadError::NotStored { .. }) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
            });
        }
        while Instant::now() < end {
            std::thread::sleep(Duration::from_millis(20));
        }
        stop.store(true, Ordering::Relaxed);
    });
    let stats = tier.stats();
    assert!(loaded.load(Ordering::Relaxed) > 1000 && stats.loads_failed == 0, "{stats:?}");
    for client in tier.client_ids() {
        tier.remove_client(client);
    }
    let stats = tier.stats();
    assert_eq!((stats.pages, stats.contents, stats.payload_bytes, stats.disk_bytes), (0, 0, 0, 0), "something leaked");
}
