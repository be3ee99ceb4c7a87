//! The stat cache of a source directory: digests of its files at the last build, by what stat said of them.
//!
//! A file with the file system, inode, size, mtime and ctime of the last build has the digest of the last build.

use super::Store;
use super::staging::Staging;
use crate::digest::Digest;
use crate::error::{At, Result};
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The size and times of a file: equal ones mean equal content.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct FileState {
    pub(crate) size: u64,
    pub(crate) mtime: (i64, u32),
    pub(crate) ctime: (i64, u32),
}

/// A cache entry: file system and inode, the file's state, its digest.
pub(crate) type StatEntry = ((u64, u64), (FileState, Digest));

const MAGIC: &[u8; 8] = b"PFSTAT01";
const ENTRY_BYTES: usize = 8 * 5 + 4 * 2 + 32;

/// The cache as the last build left it.
#[derive(Default)]
pub(crate) struct StatCache {
    files: HashMap<(u64, u64), (FileState, Digest)>,
}

impl StatCache {
    /// The cache of the source directory `root`.
    pub(crate) fn path(store: &Store, root: &Path) -> PathBuf {
        store.path("cache").join(format!("{}.stat", Digest::of(root.as_os_str().as_bytes()).hex()))
    }

    /// Reads a cache; one that is missing or damaged is empty.
    pub(crate) fn load(path: &Path) -> Self {
        let Some(bytes) = fs::read(path).ok() else { return Self::default() };
        let Some(body) = bytes.len().checked_sub(8).and_then(|end| bytes.get(..end)) else { return Self::default() };
        let checked = Digest::of(body).0[..8] == bytes[body.len()..];
        let Some(list) = body.strip_prefix(MAGIC).filter(|_| checked) else { return Self::default() };
        let entry = |raw: &[u8]| {
            let u64_at = |at: usize| u64::from_le_bytes(raw[at..at + 8].try_into().expect("8 bytes"));
            let u32_at = |at: usize| u32::from_le_bytes(raw[at..at + 4].try_into().expect("4 bytes"));
            let state = FileState {
                size: u64_at(16),
                mtime: (u64_at(24) as i64, u32_at(40)),
                ctime: (u64_at(32) as i64, u32_at(44)),
            };
            ((u64_at(0), u64_at(8)), (state, Digest(raw[48..80].try_into().expect("32 bytes"))))
        };
        Self { files: list.chunks_exact(ENTRY_BYTES).map(entry).collect() }
    }

    /// The digest that the file with that file system and inode had, if its state is still the same.
    pub(crate) fn digest(&self, file: (u64, u64), state: FileState) -> Option<Digest> {
        self.files.get(&file).filter(|(then, _)| *then == state).map(|(_, digest)| *digest)
    }

    /// Replaces the cache at `path` by `entries`.
    pub(crate) fn save(path: &Path, entries: &[StatEntry], staging: &Staging) -> Result<()> {
        let mut out = MAGIC.to_vec();
        for ((device, inode), (state, digest)) in entries {
            for number in [*device, *inode, state.size, state.mtime.0 as u64, state.ctime.0 as u64] {
                out.extend(number.to_le_bytes());
            }
            out.extend(state.mtime.1.to_le_bytes());
            out.extend(state.ctime.1.to_le_bytes());
            out.extend(digest.0);
        }
        let check = Digest::of(&out);
        out.extend(&check.0[..8]);
        // Not durable on purpose: a cache that a crash cuts short fails its check and is ignored.
        let staged = staging.scratch_path();
        File::create(&staged).and_then(|mut file| file.write_all(&out)).at(&staged)?;
        fs::rename(&staged, path).at(path)
    }
}
