//! The directory that the parts work in.

use crate::process::Failure;
use std::path::{Path, PathBuf};

/// A directory on a real disk, removed with this value.
pub(super) struct Scratch(pub(super) PathBuf);

impl Scratch {
    pub(super) fn new() -> Result<Self, Failure> {
        let path = PathBuf::from(format!("/var/tmp/pagefold-bench-{}", std::process::id()));
        std::fs::create_dir(&path)?;
        Ok(Self(path))
    }

    pub(super) fn dir(&self, name: &str) -> Result<PathBuf, Failure> {
        let path = self.0.join(name);
        std::fs::create_dir_all(&path)?;
        Ok(path)
    }

    /// The same files under another directory, for a second mount: one directory is served once.
    pub(super) fn clone_of(&self, directory: &Path) -> Result<PathBuf, Failure> {
        let copy = self.dir("clone")?;
        for entry in std::fs::read_dir(directory)?.flatten() {
            std::fs::hard_link(entry.path(), copy.join(entry.file_name()))?;
        }
        Ok(copy)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
