//! A temporary directory for privileged tests that mount, of this crate and of others.

#[path = "unmount.rs"]
mod unmount;

use pagefold_os::mountinfo;
use std::fs;
use std::path::{Path, PathBuf};
#[allow(unused_imports)]
pub use unmount::{umount, unmount};

/// Why privileged tests cannot run here, if so.
fn missing() -> Option<&'static str> {
    if !rustix::process::geteuid().is_root() {
        return Some("needs root");
    }
    let filesystems = fs::read_to_string("/proc/filesystems").unwrap_or_default();
    (!filesystems.contains("erofs") || !filesystems.contains("overlay")).then_some("needs EROFS and overlayfs")
}

/// A temporary directory; mounts below it are unmounted before it is removed.
pub struct Scratch(tempfile::TempDir);

impl Scratch {
    /// `None` after saying why the tests cannot run here.
    pub fn new() -> Option<Self> {
        match missing() {
            Some(why) => println!("SKIPPED: {why}"),
            None => return Some(Self(tempfile::tempdir().unwrap())),
        }
        None
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    pub fn dir(&self, name: &str) -> PathBuf {
        let path = self.0.path().join(name);
        fs::create_dir_all(&path).unwrap();
        path
    }

    /// What is mounted below it.
    pub fn mounted(&self) -> Vec<PathBuf> {
        let table = fs::read("/proc/self/mountinfo").unwrap();
        mountinfo::parse(&table).map(|mount| mount.at).filter(|at| at.starts_with(self.path())).collect()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        for at in self.mounted().iter().rev() {
            let _ = rustix::mount::unmount(at, rustix::mount::UnmountFlags::DETACH);
        }
    }
}
