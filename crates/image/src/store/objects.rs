//! Objects by digest: where they are, and the mark of those that were found damaged.
//!
//! The mark is a permission that the object has lost. It keeps builds from relying on the object. It does not keep
//! readers of a mount from it: the mounting process is root, or root of a user namespace.

use super::Store;
use crate::digest::Digest;
use crate::error::{At, Result};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// The permission that a damaged object has lost.
const OWNER_MAY_READ: u32 = 0o400;

/// Returns true if a file has the mark of [`Store::mark_damaged`].
pub(crate) fn is_marked(meta: &fs::Metadata) -> bool {
    meta.mode() & OWNER_MAY_READ == 0
}

/// Returns true if the object at `path` is there with its size, and was not found damaged.
pub(super) fn is_whole(path: &Path, size: u64) -> bool {
    fs::symlink_metadata(path).is_ok_and(|meta| meta.len() == size && !is_marked(&meta))
}

impl Store {
    /// The directory of the objects: overlayfs's data-only layer.
    pub fn objects_dir(&self) -> PathBuf {
        self.path("objects")
    }

    /// The file that holds object `digest`.
    pub fn object_path(&self, digest: &Digest) -> PathBuf {
        self.path("objects").join(digest.object_path())
    }

    /// Marks an object or a self-contained image as damaged. No build relies on it any more, and the next build that has
    /// its content replaces it.
    pub(crate) fn mark_damaged(&self, path: &Path) -> Result<()> {
        fs::set_permissions(path, fs::Permissions::from_mode(0o000)).at(path)
    }

    /// Takes the mark of [`Store::mark_damaged`] away.
    pub(crate) fn unmark_damaged(&self, path: &Path) -> Result<()> {
        fs::set_permissions(path, fs::Permissions::from_mode(0o600)).at(path)
    }
}
