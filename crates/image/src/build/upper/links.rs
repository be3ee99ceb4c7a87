//! The hard links between an upper directory and the store, and how either side is rid of them.

use crate::build::source::{SourceDirectory, names, read_xattrs};
use crate::error::{At, Result};
use crate::remove_tree::remove_tree;
use rustix::fs::{FileType, Gid, Mode, OFlags, Stat, Timespec, Timestamps, Uid, XattrFlags};
use rustix::io::Errno;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Names of a copy and of a link to it, beside the upper directory.
const COPY: [&str; 2] = ["unshared", "unshared-link"];

/// Removes the upper directory of a recorded tree. Its files that are objects now get an object's owner and mode first, so
/// a caller that was killed can call this again.
///
/// # Errors
/// The system's.
pub fn release(upper: &Path) -> Result<()> {
    if !upper.try_exists().at(upper)? {
        return Ok(());
    }
    each_linked_file(upper, |path, _| {
        let file = File::from(rustix::fs::open(path, OFlags::RDONLY | OFlags::NOFOLLOW, Mode::empty()).at(path)?);
        for name in read_xattrs(&file, OsStr::new("")).at(path)?.into_keys() {
            match rustix::fs::fremovexattr(&file, OsStr::from_bytes(&name)) {
                // Attributes set by the system's policy stay.
                Err(Errno::NODATA | Errno::NOTSUP | Errno::PERM | Errno::ACCESS) => {}
                other => other.at(path)?,
            }
        }
        rustix::fs::fchown(&file, Some(Uid::ROOT), Some(Gid::ROOT)).at(path)?;
        rustix::fs::fchmod(&file, Mode::RUSR | Mode::WUSR).at(path)
    })?;
    remove_tree(upper)
}

/// Gives an upper directory files of its own again, where [`apply`](super::apply()) linked them into the store.
///
/// # Errors
/// The system's.
pub fn unshare(upper: &Path) -> Result<()> {
    // The names of each inode here: an inode with more names than these is an object as well.
    let mut files: HashMap<(u64, u64), (Stat, Vec<PathBuf>)> = HashMap::new();
    each_linked_file(upper, |path, stat| {
        files.entry((stat.st_dev, stat.st_ino)).or_insert_with(|| (*stat, Vec::new())).1.push(path.to_path_buf());
        Ok(())
    })?;
    for (stat, names) in files.into_values() {
        if stat.st_nlink as usize > names.len() {
            unshare_file(upper, &stat, &names)?;
        }
    }
    Ok(())
}

/// Replaces a file under all of its names by a copy.
fn unshare_file(upper: &Path, stat: &Stat, names: &[PathBuf]) -> Result<()> {
    let first = &names[0];
    let [copy, link] = COPY.map(|name| upper.with_file_name(name));
    for left in [&copy, &link] {
        // Of a process that was killed here.
        match fs::remove_file(left) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            other => other.at(left)?,
        }
    }
    let mut from = File::open(first).at(first)?;
    let mut to = File::options().write(true).create_new(true).open(&copy).at(&copy)?;
    io::copy(&mut from, &mut to).at(&copy)?;
    rustix::fs::fchown(&to, Some(Uid::from_raw(stat.st_uid)), Some(Gid::from_raw(stat.st_gid))).at(&copy)?;
    rustix::fs::fchmod(&to, Mode::from_raw_mode(stat.st_mode & 0o7777)).at(&copy)?;
    for (name, value) in read_xattrs(&from, OsStr::new("")).at(first)? {
        match rustix::fs::fsetxattr(&to, OsStr::from_bytes(&name), &value, XattrFlags::empty()) {
            Err(Errno::NOTSUP) => {}
            other => other.at(&copy)?,
        }
    }
    let time = |tv_sec, tv_nsec| Timespec { tv_sec, tv_nsec: tv_nsec as _ };
    let times = Timestamps {
        last_access: time(stat.st_atime, stat.st_atime_nsec),
        last_modification: time(stat.st_mtime, stat.st_mtime_nsec),
    };
    rustix::fs::futimens(&to, &times).at(&copy)?;
    to.sync_all().at(&copy)?;
    for name in &names[1..] {
        fs::hard_link(&copy, &link).at(&link)?;
        fs::rename(&link, name).at(name)?;
    }
    fs::rename(&copy, first).at(first)
}

/// Calls `each` for every name of a regular file that has several names.
fn each_linked_file(upper: &Path, mut each: impl FnMut(&Path, &Stat) -> Result<()>) -> Result<()> {
    let source = SourceDirectory::open(upper)?;
    let mut todo = vec![PathBuf::new()];
    while let Some(path) = todo.pop() {
        let full = source.full(&path);
        let Some(dir) = source.open_dir(&path)? else { continue };
        for name in names(&dir, &full)? {
            let name = OsStr::from_bytes(&name);
            let at = path.join(name);
            let stat = rustix::fs::statat(&dir, name, rustix::fs::AtFlags::SYMLINK_NOFOLLOW).at(source.full(&at))?;
            match FileType::from_raw_mode(stat.st_mode) {
                FileType::Directory => todo.push(at),
                FileType::RegularFile if stat.st_nlink > 1 => each(&source.full(&at), &stat)?,
                _ => {}
            }
        }
    }
    Ok(())
}
