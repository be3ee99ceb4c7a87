//! The directory that a bench works in.

use crate::process::Failure;
use pagefold_os::mountinfo;
use std::fs;
use std::path::{Path, PathBuf};

/// A directory with mounts below it, both removed with this value.
pub struct Scratch {
    /// The directory.
    pub dir: PathBuf,
}

impl Scratch {
    /// Makes a directory of this run in `parent`.
    pub fn new(parent: &Path) -> Result<Scratch, Failure> {
        let dir = parent.join(format!("pagefold-bench-{}", std::process::id()));
        fs::create_dir_all(&dir).map_err(|error| format!("{}: {error}", dir.display()))?;
        Ok(Scratch { dir: dir.canonicalize()? })
    }

    /// A directory in it.
    pub fn sub(&self, name: &str) -> Result<PathBuf, Failure> {
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
            let _ = crate::process::run("umount", &["-l", &mount.at.display().to_string()]);
        }
        let _ = fs::remove_dir_all(&self.dir);
    }
}
