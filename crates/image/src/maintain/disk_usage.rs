//! What files and directories take on the disk.

use crate::link_farm;
use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// What a file, or a directory and all below it, takes on the disk, bytes. Files that are gone, that this user may not look
/// at, or that are mounted there are left out.
pub(super) fn disk_bytes(path: &Path) -> u64 {
    let Ok(top) = fs::symlink_metadata(path) else { return 0 };
    let (mut bytes, mut todo, mut linked) = (0, vec![path.to_path_buf()], HashSet::new());
    while let Some(path) = todo.pop() {
        let Ok(meta) = fs::symlink_metadata(&path) else { continue };
        // All names of a file lead to the same blocks.
        if meta.dev() != top.dev() || !meta.is_dir() && meta.nlink() > 1 && !linked.insert(meta.ino()) {
            continue;
        }
        bytes += meta.blocks() * 512;
        if meta.is_dir() {
            todo.extend(fs::read_dir(&path).into_iter().flatten().flatten().map(|entry| entry.path()));
        }
    }
    bytes
}

/// The same for a staging directory, in which a link farm's objects are not counted.
pub(super) fn staged_bytes(path: &Path) -> u64 {
    let farm = path.join(link_farm::SUFFIX);
    if !farm.exists() {
        return disk_bytes(path);
    }
    let parts = fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
    parts.map(|part| if part == farm { link_farm::disk_bytes(&part) } else { disk_bytes(&part) }).sum()
}
