//! A full tier, a full or broken disk, no memory, damaged bytes: an error for the affected page, and nothing else changes.

mod common;

use common::{dup, page_of};
use pagefold_tier::{Backing, BackingFile, Config, Effort, LoadError, StoreError, Tier};
use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex};

/// A file in memory that fails on request.
#[derive(Debug, Default)]
struct Faulty {
    bytes: Mutex<Vec<u8>>,
    write_errno: AtomicI32,
    read_errno: AtomicI32,
    flip: AtomicBool,
}

#[derive(Clone, Debug, Default)]
struct Handle(Arc<Faulty>);

fn fail(errno: &AtomicI32) -> io::Result<()> {
    match errno.load(Ordering::Relaxed) {
        0 => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}

impl Backing for Handle {
    fn write(&self, offset: u64, blocks: &[u8]) -> io::Result<()> {
        fail(&self.0.write_errno)?;
        let mut bytes = self.0.bytes.lock().unwrap();
        let end = offset as usize + blocks.len();
        if bytes.len() < end {
            bytes.resize(end, 0);
        }
        bytes[offset as usize..end].copy_from_slice(blocks);
        Ok(())
    }

    fn read(&self, offset: u64, blocks: &mut [u8]) -> io::Result<()> {
        fail(&self.0.read_errno)?;
        let bytes = self.0.bytes.lock().unwrap();
        let held = bytes.get(offset as usize..offset as usize + blocks.len());
        blocks.copy_from_slice(held.ok_or(io::ErrorKind::UnexpectedEof)?);
        if self.0.flip.load(Ordering::Relaxed) {
            blocks.iter_mut().for_each(|byte| *byte ^= 0x10);
        }
        Ok(())
    }

    fn discard(&self, _: u64, _: u64) {}

    fn bytes_max(&self) -> u64 {
        8 << 20
    }

    fn fd(&self) -> Option<RawFd> {
        None
    }
}

fn config() -> Config {
    Config { bytes_max: 4 << 20, ..Config::default() }
}

/// Different noise for each page: it does not compress, and no page is near another.
fn noise(page: u64) -> [u8; 4096] {
    let mut bytes = [0; 4096];
    fastrand::Rng::with_seed(page).fill(&mut bytes);
    bytes
}

fn assert_holds(tier: &Tier, pages: u64) {
    let mut data = [0; 4096];
    for page in 0..pages {
        tier.load(1, page, &mut data).unwrap();
        assert!(data == noise(page), "page {page}");
    }
}

/// Stores noise until the tier refuses; returns how many pages were stored.
fn fill(tier: &Tier) -> u64 {
    for page in 0..100_000 {
        match tier.store(1, page, &noise(page), Effort::Dense) {
            Ok(_) => {}
            Err(StoreError::Full { bytes_held, bytes_max }) => {
                assert!(bytes_held > bytes_max / 2);
                return page;
            }
            Err(error) => panic!("{error}"),
        }
    }
    panic!("never full");
}

#[test]
fn a_full_tier_refuses_and_keeps_what_it_has() {
    let tier = Tier::create(config(), None).unwrap();
    let pages = fill(&tier);
    assert!(pages > 800);
    assert_holds(&tier, pages);
    // A refused store leaves the page's old content.
    assert!(tier.store(1, 0, &noise(5000), Effort::Fast).is_err());
    assert_holds(&tier, pages);
    // Discards free memory for stores.
    tier.discard(1, 0..10);
    tier.store(1, 0, &noise(0), Effort::Fast).unwrap();
}

#[test]
fn a_full_disk_is_a_full_tier() {
    let file = Handle::default();
    let tier = Tier::create(config(), Some(Box::new(file.clone()))).unwrap();
    let pages = fill(&tier);
    assert!(pages > 2600, "8 MiB of file and 4 of memory took {pages} pages");
    assert!(tier.stats().writeback_errors > 0);
    assert_holds(&tier, pages);
}

#[test]
fn a_write_that_fails_changes_nothing() {
    let file = Handle::default();
    file.0.write_errno.store(libc::EIO, Ordering::Relaxed);
    let tier = Tier::create(config(), Some(Box::new(file.clone()))).unwrap();
    let pages = fill(&tier);
    let stats = tier.stats();
    assert!(stats.writeback_errors > 0 && stats.contents_on_disk == 0 && stats.disk_bytes == 0, "{stats:?}");
    assert_holds(&tier, pages);
    // The file recovers, and writeback works again with the next tick.
    file.0.write_errno.store(0, Ordering::Relaxed);
    tier.tick();
    tier.store(1, pages, &noise(pages), Effort::Dense).unwrap_or_else(|error| panic!("{error}: {:?}", tier.stats()));
    assert!(tier.stats().written_back > 0);
    assert_holds(&tier, pages + 1);
}

#[test]
fn a_read_that_fails_or_lies_is_an_error_for_that_page_alone() {
    let file = Handle::default();
    let tier = Tier::create(config(), Some(Box::new(file.clone()))).unwrap();
    for page in 0..200 {
        tier.store(1, page, &noise(page), Effort::Dense).unwrap();
    }
    assert!(tier.write_back_now(400_000) > 50);
    tier.store(1, 500, &noise(500), Effort::Dense).unwrap();
    let mut data = [0; 4096];
    let count_failing = |is_expected: &dyn Fn(&LoadError) -> bool| {
        let mut data = [0; 4096];
        let failing = (0..200).filter(|page| match tier.load(1, *page, &mut data) {
            Ok(()) => {
                assert!(data == noise(*page));
                false
            }
            Err(error) => {
                assert!(is_expected(&error), "{error}");
                assert!(error.to_string().contains(&format!("page {page}")));
                true
            }
        });
        failing.count()
    };
    file.0.read_errno.store(libc::EIO, Ordering::Relaxed);
    let failing = count_failing(
        &|error| matches!(error, LoadError::ReadBack { source, .. } if source.raw_os_error() == Some(libc::EIO)),
    );
    assert!(failing > 50 && failing < 200, "{failing}");
    file.0.read_errno.store(0, Ordering::Relaxed);
    file.0.flip.store(true, Ordering::Relaxed);
    assert_eq!(count_failing(&|error| matches!(error, LoadError::Damaged { .. })), failing);
    tier.load(1, 500, &mut data).unwrap();
    // The error concerns the read, not the entry.
    file.0.flip.store(false, Ordering::Relaxed);
    assert_holds(&tier, 200);
}

#[test]
fn no_memory_is_an_error_and_passes() {
    let tier = Tier::create(Config { bytes_max: 64 << 20, ..Config::default() }, None).unwrap();
    tier.store(1, 0, &noise(0), Effort::Fast).unwrap();
    tier.fail_memory(libc::ENOMEM);
    let refused = (1..100).filter(|page| match tier.store(1, *page, &noise(*page), Effort::Dense) {
        Ok(_) => false,
        Err(StoreError::NoMemory(errno)) => errno.0 == libc::ENOMEM,
        Err(error) => panic!("{error}"),
    });
    assert!(refused.count() > 90);
    assert_holds(&tier, 1);
    assert!(tier.fork_client(1, 2).is_ok());
    tier.fail_memory(0);
    for page in 1..100 {
        tier.store(1, page, &noise(page), Effort::Dense).unwrap();
    }
    assert_holds(&tier, 100);
}

/// Flips bits all over the arena while the tier runs: no load ever returns wrong bytes.
#[test]
fn damaged_memory_is_an_error_and_never_wrong_bytes() {
    use std::os::unix::fs::FileExt;
    let config = Config { bytes_max: 16 << 20, key: [1, 2], ..Config::default() };
    for seed in 0..20_u64 {
        let tier = Tier::create(config.clone(), None).unwrap();
        for page in 0..300 {
            let effort = if page % 2 == 0 { Effort::Fast } else { Effort::Dense };
            tier.store(1, page, &page_of(page as u16), effort).unwrap();
        }
        let path = format!("/proc/self/fd/{}", tier.fds().0);
        let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
        let mut random = fastrand::Rng::with_seed(seed);
        // The content slabs begin after slab 0, the table, and the leaves: damage only them.
        let mut damaged = 0;
        let len = file.metadata().unwrap().len();
        while damaged < 400 {
            let offset = random.u64(3 << 18..len);
            let mut byte = [0];
            file.read_exact_at(&mut byte, offset).unwrap();
            if byte[0] != 0 {
                file.write_all_at(&[byte[0] ^ 1 << random.u8(..8)], offset).unwrap();
                damaged += 1;
            }
        }
        let check = |tier: &Tier| {
            let mut data = [0; 4096];
            let wrong = (0..300).filter(|page| match tier.load(1, *page, &mut data) {
                Ok(()) => {
                    assert!(data == page_of(*page as u16), "wrong bytes");
                    false
                }
                Err(LoadError::Damaged { .. }) => true,
                Err(error) => panic!("{error}"),
            });
            wrong.count()
        };
        let wrong = check(&tier);
        assert!(wrong > 0, "seed {seed}: the damage hit nothing");
        let arena = dup(tier.fds().0);
        drop(tier);
        let (tier, adopted) = Tier::adopt(arena, None, config.clone()).unwrap();
        assert_eq!(adopted.pages, 300);
        assert!(check(&tier) >= wrong);
    }
}

/// Writeback spares loaded pages once; the second time it writes them like others, wherever its walk stopped.
#[test]
fn writeback_goes_round() {
    let tier =
        Tier::create(Config { bytes_max: 64 << 20, ..Config::default() }, Some(Box::new(Handle::default()))).unwrap();
    for page in 0..1000 {
        tier.store(1, page, &noise(page), Effort::Fast).unwrap();
    }
    assert_holds(&tier, 1000);
    let first = tier.write_back_now(2 << 20);
    assert!(first >= 500, "{first}");
    let second = tier.write_back_now(2 << 20);
    assert!(first + second >= 765, "{first} {second}");
    assert_holds(&tier, 1000);
}

/// Data that a predecessor wrote beyond the new limit of the file stays readable; the limit applies to new writes.
#[test]
fn a_smaller_limit_of_the_file_loses_nothing() {
    let config = || Config { bytes_max: 64 << 20, ..Config::default() };
    let file = BackingFile::create(&std::env::temp_dir(), 64 << 20).unwrap();
    let tier = Tier::create(config(), Some(Box::new(file))).unwrap();
    for page in 0..3000 {
        tier.store(1, page, &noise(page), Effort::Fast).unwrap();
    }
    while tier.write_back_now(64 << 20) > 0 {}
    let held = tier.stats().disk_bytes_held;
    assert!(held >= 8 << 20, "{held}");
    let (arena, file) = tier.fds();
    let (arena, file) = (dup(arena), dup(file.unwrap()));
    drop(tier);
    let file = BackingFile::from_fd(file, 3 << 20);
    let (tier, adopted) = Tier::adopt(arena, Some(Box::new(file)), config()).unwrap();
    assert_eq!((adopted.pages, adopted.pages_lost), (3000, 0));
    assert_holds(&tier, 3000);
    // Nothing more is written before less than the limit is in use. Then free zones are used, wherever they lie.
    for page in 3000..3500 {
        tier.store(1, page, &noise(page), Effort::Fast).unwrap();
    }
    assert_eq!((tier.write_back_now(64 << 20), tier.stats().disk_bytes_held), (0, held));
    tier.discard(1, 0..2800);
    let held = tier.stats().disk_bytes_held;
    assert!(held < 3 << 20, "{held}");
    tier.write_back_now(64 << 20);
    let stats = tier.stats();
    assert!(stats.disk_bytes_held > held && stats.disk_bytes_held <= 3 << 20, "{stats:?}");
    let mut data = [0; 4096];
    for page in 2800..3500 {
        tier.load(1, page, &mut data).unwrap();
        assert!(data == noise(page), "page {page}");
    }
}

/// Runs in a child process that requests larger thread stacks than possible.
#[test]
fn many_pages_are_stored_where_no_thread_is_to_be_had() {
    const ALONE: &str = "PAGEFOLD_NO_THREADS";
    if std::env::var_os(ALONE).is_none() {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "many_pages_are_stored_where_no_thread_is_to_be_had", "--test-threads=1"]);
        let output = child.env(ALONE, "1").env("RUST_MIN_STACK", (1_u64 << 60).to_string()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        return;
    }
    assert!(std::thread::Builder::new().spawn(|| ()).is_err(), "there are threads");
    let tier = Tier::create(Config { bytes_max: 64 << 20, workers: 4, ..Config::default() }, None).unwrap();
    let pages: Vec<_> = (0..1000).map(noise).collect();
    let batch: Vec<_> = (0..).zip(&pages).collect();
    assert!(tier.store_many(1, &batch, Effort::Fast).iter().all(Result::is_ok));
    assert_holds(&tier, 1000);
}

/// The creating process sets the limit; a successor does not know it and reads it from the arena.
#[test]
fn an_adopted_tier_keeps_its_limit() {
    let config = |bytes_max| Config { bytes_max, ..Config::default() };
    let mut tier = Tier::create(config(8 << 20), None).unwrap();
    for bytes_max in [4 << 20, 64 << 20] {
        let arena = dup(tier.fds().0);
        drop(tier);
        (tier, _) = Tier::adopt(arena, None, config(bytes_max)).unwrap();
        assert_eq!(tier.stats().bytes_max, 8 << 20);
    }
}
