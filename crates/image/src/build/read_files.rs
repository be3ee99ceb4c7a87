//! Reads the files that a walk found into the store, on all processors.

use super::Build;
use super::omissions::{Omissions, clean_xattrs};
use super::source::{GONE, OpenFile, SourceDirectory, file_state, last_name, meta, read_xattrs};
use super::walk::FoundFile;
use crate::error::{At, Error, Result};
use crate::parallel;
use crate::progress::Progress;
use crate::sys;
use crate::tree::{Data, FileKind, Inode, Tree, Xattrs};
use rustix::fs::Stat;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// A file as it was read.
pub(super) struct ReadFile {
    pub(super) data: Data,
    pub(super) stat: Stat,
    /// Its attributes, if the file changed since the walk.
    pub(super) xattrs: Option<Xattrs>,
    /// Whether any later change would show in the file's times.
    pub(super) is_settled: bool,
}

/// File times this close to a build may come again after a change, seconds: file systems stamp files with the time of the
/// timer tick.
const RACY_S: i64 = 2;

/// Reads `files`. A file that no longer has any of its names is `None`.
pub(super) fn read_files<'a>(
    build: &Build,
    source: &SourceDirectory,
    files: &'a [FoundFile],
    progress: &Progress,
) -> Result<Vec<(&'a FoundFile, Option<ReadFile>)>> {
    parallel::map(files, |file| Ok((file, read_found(build, source, file, progress)?)))
}

/// Reads what stands under the names of a file that the walk saw and that is no longer there. A file replaced by rename(2)
/// is the new one, names that lead to one file still do, and names that went away are left out.
pub(super) fn read_replaced(
    build: &Build,
    source: &SourceDirectory,
    gone: &FoundFile,
    tree: &mut Tree,
    omissions: &mut Omissions,
    progress: &Progress,
) -> Result<()> {
    let mut found = HashMap::new();
    for (dir, path) in &gone.names {
        let name = last_name(path);
        let key = |stat: &Stat| (stat.st_dev, stat.st_ino, file_state(stat));
        if let Some(open) = source.open_file(path)?
            && let Some(&id) = found.get(&key(&open.stat))
        {
            tree.link(*dir, name, id)?;
            continue;
        }
        let Some((file, data, stat)) = read_file(build, progress, || source.open_file(path))? else {
            omissions.add(GONE, path.as_os_str().as_bytes());
            tree.unlink(*dir, name);
            continue;
        };
        let mut xattrs = read_xattrs(&file, OsStr::new("")).at(source.full(path))?;
        clean_xattrs(&mut xattrs, name, omissions);
        let id = tree.add(Inode { meta: meta(&stat, xattrs), kind: FileKind::File(data) });
        tree.link(*dir, name, id)?;
        found.insert(key(&stat), id);
    }
    Ok(())
}

/// Reads a file that the walk found, if it is still there.
fn read_found(
    build: &Build,
    source: &SourceDirectory,
    found: &FoundFile,
    progress: &Progress,
) -> Result<Option<ReadFile>> {
    let Some((file, data, stat)) = read_file(build, progress, || found.open(source))? else { return Ok(None) };
    let path: &Path = &found.names[0].1;
    let changed = file_state(&stat) != found.state;
    let xattrs = changed.then(|| read_xattrs(&file, OsStr::new("")).at(source.full(path))).transpose()?;
    let is_settled = is_settled(&stat) && !sys::is_dirty(&file).unwrap_or(false);
    Ok(Some(ReadFile { data, stat, xattrs, is_settled }))
}

/// Returns true if a later change would show in the file's times, unless it is written through a mapping to a page that is
/// dirty already.
fn is_settled(stat: &Stat) -> bool {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs() as i64);
    stat.st_ctime.max(stat.st_mtime) < now - RACY_S
}

/// Reads the file that `open` opens, again if it changes meanwhile. Returns it with its content and state.
fn read_file(
    build: &Build,
    progress: &Progress,
    open: impl Fn() -> Result<Option<OpenFile>>,
) -> Result<Option<(File, Data, Stat)>> {
    let mut why = None;
    for _ in 0..3 {
        let Some(OpenFile { mut file, path, stat: before }) = open()? else { return Ok(None) };
        if is_settled(&before) && sys::is_dirty(&file).unwrap_or(true) {
            sys::write_out(&file);
        }
        let data = match build.put_reader(&mut file, &path, |bytes| progress.add(bytes, false)) {
            // A file server has removed the file.
            Err(error @ Error::Io { .. }) if is_stale(&error) => {
                why = Some(error);
                continue;
            }
            other => other?,
        };
        let after = rustix::fs::fstat(file.as_fd()).at(&path)?;
        if file_state(&before) == file_state(&after) && data.size() == after.st_size as u64 {
            progress.add(0, true);
            return Ok(Some((file, data, after)));
        }
        why = Some(Error::Refused(format!(
            "{}: keeps changing while it is read; build from a copy or snapshot",
            path.display()
        )));
    }
    Err(why.expect("read at least once"))
}

fn is_stale(error: &Error) -> bool {
    matches!(error, Error::Io { source, .. } if source.raw_os_error() == Some(libc::ESTALE))
}
