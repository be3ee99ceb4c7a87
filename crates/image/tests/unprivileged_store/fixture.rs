//! A store, and a tree to build images from.

use pagefold_image::build::{Build, Omissions};
use pagefold_image::config::Limits;
use pagefold_image::oci::{self, Wanted};
use pagefold_image::progress::Progress;
use pagefold_image::store::Store;
use pagefold_image::tree::Tree;
use pagefold_image::{Error, gc};
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// A store, and in the same directory an empty tree to build images from.
pub struct Fixture {
    pub dir: tempfile::TempDir,
    pub tree: PathBuf,
    pub store: Store,
}

impl Fixture {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let tree = dir.path().join("tree");
        fs::create_dir(&tree).unwrap();
        let store = Store::open(&dir.path().join("s"), "default").unwrap();
        Self { dir, tree, store }
    }
}

/// Reads the one image of a layout or an archive.
pub fn import(build: &Build<'_>, path: &Path) -> Tree {
    let (wanted, limits, mut notes) = (Wanted::default(), Limits::default(), Omissions::default());
    oci::import(build, path, &wanted, limits, &mut notes, &Progress::silent()).unwrap().0
}

/// Fills a directory with one of every kind of file that a plain user can make.
pub fn sample(dir: &Path) {
    fs::create_dir_all(dir.join("bin")).unwrap();
    fs::create_dir_all(dir.join("empty")).unwrap();
    fs::write(dir.join("bin/tool"), vec![7; 10_000]).unwrap();
    fs::set_permissions(dir.join("bin/tool"), fs::Permissions::from_mode(0o4755)).unwrap();
    fs::hard_link(dir.join("bin/tool"), dir.join("bin/other name")).unwrap();
    fs::write(dir.join("small"), b"inline").unwrap();
    fs::write(dir.join("nothing"), b"").unwrap();
    fs::write(dir.join("copy"), vec![7; 10_000]).unwrap();
    symlink("../outside", dir.join("dangling")).unwrap();
    symlink(format!("/{}", "long/".repeat(500)), dir.join("long")).unwrap();
    fs::write(
        dir.join("big"),
        (0..3_000_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect::<Vec<_>>(),
    )
    .unwrap();
}

/// Collects when all processes of this machine answer: while a process is stuck in the kernel, nothing may be collected.
pub fn collect(store: &Store, dry: bool) -> gc::Stats {
    let began = Instant::now();
    loop {
        match gc::collect(store, dry) {
            Err(Error::Refused(why)) if why.contains("do not answer") && began.elapsed() < Duration::from_secs(60) => {}
            other => return other.unwrap(),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

pub fn wait_for_old_times() {
    // The stat cache trusts only files older than its doubt.
    std::thread::sleep(Duration::from_millis(3100));
}
