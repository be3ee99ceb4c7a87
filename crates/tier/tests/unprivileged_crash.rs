//! The owner is killed at random instants while it stores, discards, compresses, compacts and writes back; a
//! successor gets the descriptors from the keeper and adopts. Every page must have one of two contents: the last one that
//! the owner acknowledged, or the one that it was storing.
//!
//! The owner is this test program, started again with an environment variable that makes it the owner. Before and after
//! each operation it writes to a small shared file, its journal.

mod common;

use common::page_of;
use pagefold_os::fd::Fd;
use pagefold_tier::keeper::Keeper;
use pagefold_tier::{BackingFile, Config, Effort, LoadError, Tier};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const PAGES: u64 = 4096;
const DISK_BYTES: u64 = 64 << 20;
const ROLE: &str = "PAGEFOLD_TIER_CRASH_SOCKET";

fn config() -> Config {
    Config { bytes_max: 6 << 20, key: [8, 9], recompress_ticks: 0, workers: 1, ..Config::default() }
}

/// Client 1 has a known length, 2 has not, 3 is forked from 1 now and then.
fn slot(client: u32, page: u64) -> u64 {
    (u64::from(client) * PAGES + page) * 4
}

/// The journal: per page the content that is acknowledged, and the one that may have been reached (0: none).
struct Journal(File);

impl Journal {
    fn set(&self, at: u64, value: u16) {
        self.0.write_all_at(&value.to_le_bytes(), at).unwrap();
    }

    fn get(&self, at: u64) -> u16 {
        let mut bytes = [0; 2];
        self.0.read_exact_at(&mut bytes, at).unwrap();
        u16::from_le_bytes(bytes)
    }

    fn intend(&self, client: u32, page: u64, content: u16) {
        self.set(slot(client, page) + 2, content);
    }

    fn done(&self, client: u32, page: u64, content: u16) {
        self.set(slot(client, page), content);
    }

    fn allowed(&self, client: u32, page: u64) -> [u16; 2] {
        [self.get(slot(client, page)), self.get(slot(client, page) + 2)]
    }
}

fn adopt_or_create(keeper: &Keeper) -> Tier {
    match keeper.get("tier") {
        Ok(mut fds) => {
            let file = fds.pop().unwrap();
            let backing = BackingFile::from_fd(file, DISK_BYTES);
            let (tier, adopted) = Tier::adopt(fds.pop().unwrap(), Some(Box::new(backing)), config()).unwrap();
            assert_eq!(adopted.pages_lost, 0);
            tier
        }
        Err(_) => {
            let backing = BackingFile::create(&std::env::temp_dir(), DISK_BYTES).unwrap();
            let tier = Tier::create(config(), Some(Box::new(backing))).unwrap();
            tier.add_client(1, PAGES).unwrap();
            let (arena, file) = tier.fds();
            keeper.put("tier", &[arena, file.unwrap()]).unwrap();
            tier
        }
    }
}

/// Runs the owner until it is killed.
fn work(socket: &Path, journal: &Journal, seed: u64) -> ! {
    let keeper = Keeper::connect(socket).unwrap();
    let tier = adopt_or_create(&keeper);
    println!("ready");
    std::thread::scope(|scope| {
        // Cleaning runs during stores, so that a kill interrupts both.
        scope.spawn(|| {
            let mut round = seed;
            loop {
                round += 1;
                match round % 4 {
                    0 => drop(tier.tick()),
                    1 => drop(tier.write_back_now(200_000)),
                    2 => drop(tier.recompress_all()),
                    _ => drop(tier.compact_now()),
                }
            }
        });
        let mut random = fastrand::Rng::with_seed(seed);
        loop {
            let client = random.u32(1..=2);
            let page = random.u64(..PAGES);
            let content = random.u16(1..=4000);
            if random.u8(..4) == 0 {
                let end = (page + random.u64(1..=12)).min(PAGES);
                (page..end).for_each(|page| journal.intend(client, page, 0));
                tier.discard(client, page..end);
                (page..end).for_each(|page| journal.done(client, page, 0));
            } else if random.u16(..500) == 0 {
                // A child of client 1: its pages are those of the parent at this moment.
                (0..PAGES).for_each(|page| journal.intend(3, page, 0));
                tier.remove_client(3);
                (0..PAGES).for_each(|page| journal.done(3, page, 0));
                let parent: Vec<u16> = (0..PAGES).map(|page| journal.get(slot(1, page))).collect();
                (0..PAGES).zip(&parent).for_each(|(page, content)| journal.intend(3, page, *content));
                if tier.fork_client(1, 3).is_ok() {
                    (0..PAGES).zip(&parent).for_each(|(page, content)| journal.done(3, page, *content));
                } else {
                    (0..PAGES).for_each(|page| journal.intend(3, page, 0));
                }
            } else {
                journal.intend(client, page, content);
                let effort = if random.bool() { Effort::Fast } else { Effort::Dense };
                match tier.store(client, page, &page_of(content), effort) {
                    Ok(_) => journal.done(client, page, content),
                    Err(_) => journal.intend(client, page, journal.get(slot(client, page))),
                }
            }
        }
    })
}

/// Adopts as the successor and checks each page.
fn check(keeper: &Keeper, journal: &Journal) -> u64 {
    let tier = adopt_or_create(keeper);
    let mut data = [0; 4096];
    let mut present = 0;
    for client in 1..4 {
        for page in 0..PAGES {
            let allowed = journal.allowed(client, page);
            let shown = match tier.load(client, page, &mut data) {
                Ok(()) => allowed.into_iter().find(|content| *content != 0 && page_of(*content) == data),
                Err(LoadError::NotStored { .. }) => allowed.into_iter().find(|content| *content == 0),
                Err(error) => panic!("{error}"),
            };
            let shown = shown.unwrap_or_else(|| panic!("client {client}, page {page}: shows none of {allowed:?}"));
            present += u64::from(shown != 0);
            journal.intend(client, page, shown);
            journal.done(client, page, shown);
        }
    }
    assert_eq!(tier.stats().pages, present);
    present
}

struct Cleanup {
    directory: PathBuf,
    keeper: Child,
}

impl Drop for Cleanup {
    fn drop(&mut self) {
        let _ = self.keeper.kill();
        let _ = self.keeper.wait();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

#[test]
fn every_page_survives_kills() {
    if let Some(socket) = std::env::var_os(ROLE) {
        let socket = PathBuf::from(socket);
        let journal = File::options().read(true).write(true).open(socket.with_file_name("journal")).unwrap();
        let seed = std::env::var("PAGEFOLD_TIER_CRASH_SEED").unwrap().parse().unwrap();
        work(&socket, &Journal(journal), seed);
    }
    let directory = tempfile::Builder::new().prefix("pagefold-crash").tempdir().unwrap().keep();
    let socket = directory.join("keeper");
    let (keeper, child) = Keeper::start(Path::new(env!("CARGO_BIN_EXE_pagefold-keeper")), &socket).unwrap();
    let _cleanup = Cleanup { directory: directory.clone(), keeper: child };
    let journal = File::options().read(true).write(true).create_new(true).open(directory.join("journal")).unwrap();
    journal.set_len(slot(4, 0)).unwrap();
    let journal = Journal(journal);
    let seconds = std::env::var("PAGEFOLD_CRASH_S").ok().and_then(|text| text.parse().ok()).unwrap_or(20);
    let end = Instant::now() + Duration::from_secs(seconds);
    let (mut kills, mut present_max) = (0_u64, 0);
    while Instant::now() < end {
        let mut owner = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "every_page_survives_kills", "--nocapture"])
            .env(ROLE, &socket)
            .env("PAGEFOLD_TIER_CRASH_SEED", (kills + 1).to_string())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        wait_ready(&mut owner);
        std::thread::sleep(Duration::from_micros(kills.wrapping_mul(7919) % 60_000 + 500));
        assert!(owner.try_wait().unwrap().is_none(), "seed {}: the owner ended by itself", kills + 1);
        owner.kill().unwrap();
        owner.wait().unwrap();
        present_max = present_max.max(check(&keeper, &journal));
        kills += 1;
    }
    println!("{kills} kills, up to {present_max} pages held");
    assert!(kills > 5 && present_max > 1000, "{kills} kills, {present_max} pages");
    keeper.quit().unwrap();
}

fn wait_ready(owner: &mut Child) {
    use std::io::{BufRead, BufReader};
    let mut lines = BufReader::new(owner.stdout.take().unwrap()).lines();
    while lines.next().is_some_and(|line| !line.unwrap().contains("ready")) {}
}

#[test]
fn the_keeper_holds_and_drops_descriptors() {
    let directory = tempfile::Builder::new().prefix("pagefold-keeper").tempdir().unwrap().keep();
    let socket = directory.join("socket");
    let program = Path::new(env!("CARGO_BIN_EXE_pagefold-keeper"));
    let (keeper, child) = Keeper::start(program, &socket).unwrap();
    let _cleanup = Cleanup { directory, keeper: child };
    let memory = pagefold_os::memfd::create(c"kept", 4096).unwrap();
    memory.write(b"still here").unwrap();
    keeper.put("a", &[memory.raw()]).unwrap();
    keeper.put("b", &[memory.raw(), memory.raw()]).unwrap();
    drop(memory);
    assert_eq!(keeper.names().unwrap(), ["a", "b"]);
    let fds: Vec<Fd> = keeper.get("b").unwrap();
    let mut bytes = [0; 10];
    fds[1].read_at(&mut bytes, 0).unwrap();
    assert_eq!((fds.len(), &bytes), (2, b"still here"));
    keeper.forget("b").unwrap();
    assert_eq!(keeper.get("b").unwrap_err().raw_os_error(), Some(libc::ENOENT));
    assert_eq!(keeper.put("", &[fds[0].raw()]).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    assert_eq!(keeper.put("c", &[]).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    assert_eq!(keeper.put(&"n".repeat(200), &[fds[0].raw()]).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    // Another connection sees the same descriptors; invalid requests on one do not disturb the other.
    let other = Keeper::connect(&socket).unwrap();
    let raw = pagefold_os::sock::connect(socket.to_str().unwrap().as_bytes()).unwrap();
    for packet in [&[][..], &[0], &[255; 2000], b"P", b"Gnothing"] {
        let _ = pagefold_os::sock::send(&raw, packet, &[]);
    }
    assert_eq!(other.get("a").unwrap().len(), 1);
    // A second keeper on the same socket ends with an error.
    let status = Command::new(program).arg(&socket).stderr(Stdio::null()).status().unwrap();
    assert_eq!(status.code(), Some(1));
    other.quit().unwrap();
}

/// An arena with a live owner is not adopted, because two owners would destroy it.
#[test]
fn the_arena_of_a_live_owner_is_not_adopted() {
    let tier = Tier::create(config(), None).unwrap();
    let error = Tier::adopt(common::dup(tier.fds().0), None, config()).unwrap_err();
    assert!(matches!(error, pagefold_tier::AdoptError::OwnerAlive { pid } if pid == std::process::id()), "{error}");
    tier.store(1, 1, &page_of(2), Effort::Fast).unwrap();
    let arena = common::dup(tier.fds().0);
    drop(tier);
    let (tier, _) = Tier::adopt(arena, None, config()).unwrap();
    assert!(tier.contains(1, 1));
}
