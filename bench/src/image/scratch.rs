//! The directory that the parts work in.

use crate::process::Failure;
use pagefold_os::mountinfo;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

/// A directory with mounts below it; both go with this value.
pub(super) struct Scratch {
    pub(super) dir: PathBuf,
    pub(super) keep: bool,
}

impl Scratch {
    pub(super) fn sub(&self, name: &str) -> Result<PathBuf, Failure> {
        let path = self.dir.join(name);
        fs::create_dir_all(&path)?;
        Ok(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let table = fs::read("/proc/self/mountinfo").unwrap_or_default();
        let ours: Vec<_> = mountinfo::parse(&table).filter(|mount| mount.at.starts_with(&self.dir)).collect();
        for mount in ours.iter().rev() {
            let _ = Command::new("umount").arg("-l").arg(&mount.at).status();
        }
        if !self.keep {
            let _ = fs::remove_dir_all(&self.dir);
        }
    }
}
