//! The removal of directory trees of any depth and with any modes.

use crate::error::{At, Result};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags};
use rustix::io::Errno;
use std::ffi::CStr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

/// Removes a directory tree. Modes of its directories may forbid it, and it may be deeper than a path can be long or a
/// process can have files open: deeper directories are moved up, so that two directories are open at a time and names
/// suffice.
pub(crate) fn remove_tree(path: &Path) -> Result<()> {
    let remove = || -> rustix::io::Result<()> {
        rustix::fs::chmod(path, Mode::RWXU)?;
        let top = open_dir(CWD, path)?;
        let mut number = 0u64;
        drain(&top, |name, is_dir| {
            if !is_dir {
                return rustix::fs::unlinkat(&top, name, AtFlags::empty());
            }
            rustix::fs::chmodat(&top, name, Mode::RWXU, AtFlags::empty())?;
            let dir = open_dir(&top, name)?;
            drain(&dir, |name, is_dir| {
                if !is_dir {
                    return rustix::fs::unlinkat(&dir, name, AtFlags::empty());
                }
                // Moving a directory into another writes its `..`.
                rustix::fs::chmodat(&dir, name, Mode::RWXU, AtFlags::empty())?;
                loop {
                    number += 1;
                    match rustix::fs::renameat(&dir, name, &top, number.to_string()) {
                        // The tree itself has a file of that name.
                        Err(Errno::EXIST | Errno::NOTEMPTY | Errno::NOTDIR) => {}
                        other => break other,
                    }
                }
            })?;
            rustix::fs::unlinkat(&top, name, AtFlags::REMOVEDIR)
        })?;
        rustix::fs::rmdir(path)
    };
    remove().at(path)
}

fn open_dir(at: impl AsFd, name: impl rustix::path::Arg) -> rustix::io::Result<OwnedFd> {
    rustix::fs::openat(at, name, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
}

/// Calls `take` with the name of each entry and whether it is a directory, until `take` has removed all entries.
fn drain(dir: &OwnedFd, mut take: impl FnMut(&CStr, bool) -> rustix::io::Result<()>) -> rustix::io::Result<()> {
    loop {
        let mut empty = true;
        for entry in rustix::fs::Dir::read_from(dir)? {
            let entry = entry?;
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            let kind = match entry.file_type() {
                FileType::Unknown => {
                    FileType::from_raw_mode(rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)?.st_mode)
                }
                known => known,
            };
            take(name, kind == FileType::Directory)?;
            empty = false;
        }
        // Entries added while a directory is read may be missing from the list.
        if empty {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::process::Command;

    /// In a child process with few descriptors: removes the tree.
    #[test]
    fn child_that_removes() {
        let Some(path) = std::env::var_os("PAGEFOLD_TEST_REMOVE") else { return };
        remove_tree(Path::new(&path)).unwrap();
    }

    #[test]
    fn a_tree_of_any_depth_and_mode_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().join("top");
        fs::create_dir(&top).unwrap();
        let mut at = open_dir(CWD, &top).unwrap();
        for depth in 0..3000u32 {
            // Names that the removal itself gives, too.
            let (name, mode) = (format!("{}", depth % 7), Mode::from_raw_mode(0o700));
            for name in [&name, "9"] {
                rustix::fs::mkdirat(&at, name, mode).unwrap();
            }
            rustix::fs::openat(&at, "8", OFlags::CREATE | OFlags::CLOEXEC, mode).unwrap();
            let below = open_dir(&at, &*name).unwrap();
            rustix::fs::chmodat(&at, "9", Mode::empty(), AtFlags::empty()).unwrap();
            rustix::fs::fchmod(&at, Mode::empty()).unwrap();
            at = below;
        }
        let mut child = Command::new("sh");
        child.args(["-c", "ulimit -n 64; exec \"$0\" --exact remove_tree::tests::child_that_removes"]);
        let out = child.arg(std::env::current_exe().unwrap()).env("PAGEFOLD_TEST_REMOVE", &top).output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stdout));
        assert!(!top.exists());
    }
}
