//! Power cuts: what a sync acknowledged is on the disk, whenever the power goes.
//!
//! A seeded run of writes, truncations, punches, flushes and syncs goes through the cache onto a simulated disk that
//! logs every write. Then the power is cut at thousands of points of that log: everything up to the last sync survives,
//! and of later writes any set of sectors, torn and reordered. For every block of the image that survives, its
//! content must be the one the last acknowledged sync made durable, or one written since, sector by sector.

mod common;

use common::Random;
use pagefold_disk::sim::{Event, Faults, SECTOR_BYTES, SimFile, after_power_cut};
use pagefold_disk::{Cache, Config, FingerprintKey};
use std::collections::HashSet;
use std::sync::Arc;

type Sector = [u8; SECTOR_BYTES];

/// The contents that each sector may have after a cut: the durable one first, then every later one.
struct Oracle {
    now: Vec<u8>,
    allowed: Vec<Vec<Sector>>,
    sizes: Vec<usize>,
}

impl Oracle {
    fn new(data: Vec<u8>) -> Self {
        let mut oracle = Self { allowed: Vec::new(), sizes: vec![data.len()], now: data };
        oracle.acknowledge();
        oracle
    }

    fn sector(&self, n: usize) -> Sector {
        let mut sector = [0; SECTOR_BYTES];
        let from = (n * SECTOR_BYTES).min(self.now.len());
        let to = (from + SECTOR_BYTES).min(self.now.len());
        sector[..to - from].copy_from_slice(&self.now[from..to]);
        sector
    }

    fn changed(&mut self, from: usize, to: usize) {
        for n in from / SECTOR_BYTES..to.div_ceil(SECTOR_BYTES) {
            let sector = self.sector(n);
            if self.allowed.len() <= n {
                // Beyond the end there were zeros, which a grown file may show.
                self.allowed.resize(n + 1, vec![[0; SECTOR_BYTES]]);
            }
            if self.allowed[n].last() != Some(&sector) {
                self.allowed[n].push(sector);
            }
        }
        self.sizes.push(self.now.len());
    }

    fn acknowledge(&mut self) {
        let count = self.now.len().div_ceil(SECTOR_BYTES);
        self.allowed = (0..count).map(|n| vec![self.sector(n)]).collect();
        self.sizes = vec![self.now.len()];
    }

    fn check(&self, disk: &[u8], what: &dyn Fn() -> String) {
        // A write may survive without the cut of the file before it, so the size lies anywhere between the known ones.
        let (low, high) = (self.sizes.iter().min().unwrap(), self.sizes.iter().max().unwrap());
        assert!((*low..=*high).contains(&disk.len()), "{}: {} bytes, not {low} to {high}", what(), disk.len());
        for (n, sector) in disk.chunks(SECTOR_BYTES).enumerate() {
            let allowed = self.allowed.get(n).is_some_and(|allowed| allowed.iter().any(|version| version == sector));
            assert!(allowed, "{}: sector {n} has bytes that were never written, or lost acknowledged ones", what());
        }
    }
}

/// One run; returns how many cuts were checked.
fn run(seed: u64, steps: usize) -> usize {
    let mut random = Random::new(seed);
    let size = 1 << 20;
    let start: Vec<u8> = (0..size).map(|_| random.below(3) as u8).collect();
    let file = Arc::new(SimFile::new(start.clone()));
    let config = Config { cache_bytes: 4 << 20, workers: 1, key: FingerprintKey::Fast(1), ..Config::default() };
    let cache = Cache::new(config).unwrap();
    let image = cache.add_image("image", file.clone()).unwrap();
    let mut oracle = Oracle::new(start.clone());
    let mut base = start;
    let mut log_seen = 0;
    let mut cuts = 0;
    for step in 0..steps {
        let offset = random.below(oracle.now.len() as u64 + 3000);
        let mut length = 1 + random.below(20_000);
        if offset + length > oracle.now.len() as u64 {
            // Sizes are whole sectors; the model test covers sizes inside the last block.
            length = (offset + length).next_multiple_of(SECTOR_BYTES as u64) - offset;
        }
        let case = random.below(100);
        let synced = match case {
            0..60 => {
                let data: Vec<u8> = (0..length).map(|n| (seed + step as u64 + n / 700) as u8).collect();
                cache.write(&image, offset, &data).unwrap();
                let end = (offset + length) as usize;
                let grown_from = oracle.now.len().min(offset as usize);
                if oracle.now.len() < end {
                    oracle.now.resize(end, 0);
                }
                oracle.now[offset as usize..end].copy_from_slice(&data);
                oracle.changed(grown_from, end);
                false
            }
            60..65 => {
                let new = random.below(size as u64 + 50_000) as usize / SECTOR_BYTES * SECTOR_BYTES;
                cache.set_size(&image, new as u64).unwrap();
                let before = oracle.now.len();
                oracle.now.resize(new, 0);
                oracle.changed(new.min(before), new.max(before));
                false
            }
            65..70 => {
                cache.punch(&image, offset, length).unwrap();
                let from = (offset as usize).min(oracle.now.len());
                let to = (from + length as usize).min(oracle.now.len());
                oracle.now[from..to].fill(0);
                oracle.changed(from, to);
                false
            }
            70..85 => {
                cache.flush_tick();
                false
            }
            _ => {
                // A sync that fails acknowledges nothing.
                let fails = random.below(4) == 0;
                let sync_once = fails.then_some(libc::EIO);
                file.set_faults(Faults { sync_once, ..Faults::default() });
                let acknowledged = cache.sync(&image, 0..u64::MAX);
                file.set_faults(Faults::default());
                assert!(acknowledged || fails);
                acknowledged
            }
        };
        // Cut anywhere in the writes of this step, before its sync counts; then let the sync count.
        let log = file.log();
        for at in log_seen..=log.len() {
            for _ in 0..2 {
                let odds = random.below(5);
                let disk = after_power_cut(&base, &log[..at], || random.below(4) < odds);
                oracle.check(&disk, &|| format!("seed {seed} step {step}, cut after event {at} of {}", log.len()));
                cuts += 1;
            }
        }
        log_seen = log.len();
        if synced {
            oracle.acknowledge();
            // Nothing after the last sync survives: the disk has exactly the acknowledged content.
            let disk = after_power_cut(&base, &log, || false);
            assert!(disk == oracle.now, "seed {seed} step {step}: a sync acknowledged what is not on the disk");
            if matches!(log.last(), Some(Event::Sync)) && log.len() > 200 {
                base = disk;
                let fresh = Arc::new(SimFile::new(base.clone()));
                return cuts + run_on(&cache, fresh);
            }
        }
    }
    cuts
}

/// After a cut the image is opened again: its content is the surviving one.
fn run_on(cache: &Cache, survived: Arc<SimFile>) -> usize {
    let image = cache.add_image("after the cut", survived.clone()).unwrap();
    let mut buffer = vec![0; survived.data().len()];
    assert_eq!(cache.read(&image, 0, &mut buffer).unwrap(), buffer.len());
    assert!(buffer == survived.data());
    cache.verify().unwrap();
    0
}

#[test]
fn thousands_of_power_cuts_lose_no_acknowledged_write() {
    let cuts: usize = (1..=20).map(|seed| run(seed, 120)).sum();
    println!("{cuts} power cuts");
    assert!(cuts > 5000, "{cuts} cuts are too few to mean anything");
}

#[test]
fn a_sync_that_does_nothing_would_be_caught() {
    // The negative control: without the sync the oracle must object at some cut.
    let file = Arc::new(SimFile::new(vec![1; 1 << 16]));
    let cache = Cache::new(Config { cache_bytes: 4 << 20, workers: 1, ..Config::default() }).unwrap();
    let image = cache.add_image("image", file.clone()).unwrap();
    let mut oracle = Oracle::new(vec![1; 1 << 16]);
    cache.write(&image, 0, &[2; 8192]).unwrap();
    oracle.now[..8192].fill(2);
    oracle.changed(0, 8192);
    oracle.acknowledge();
    let disk = after_power_cut(&[1; 1 << 16], &file.log(), || true);
    assert!(std::panic::catch_unwind(|| oracle.check(&disk, &String::new)).is_err());
}

#[test]
fn every_acknowledged_version_differs_from_its_neighbours() {
    // Checks the test itself: two syncs with different content leave different disks.
    let file = Arc::new(SimFile::new(vec![0; 8192]));
    let cache = Cache::new(Config { cache_bytes: 4 << 20, ..Config::default() }).unwrap();
    let image = cache.add_image("image", file.clone()).unwrap();
    let mut seen = HashSet::new();
    for value in 1..=3u8 {
        cache.write(&image, 100, &[value; 10]).unwrap();
        assert!(cache.sync(&image, 0..u64::MAX));
        assert!(seen.insert(file.data()));
    }
}
