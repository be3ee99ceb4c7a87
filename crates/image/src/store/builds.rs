//! Remains of builds and mounts that were killed: leases without an owner, and what their owners had staged.

use super::Store;
use crate::error::{At, Error, Result};
use crate::remove_tree::remove_tree;
use rustix::fs::FlockOperation;
use rustix::mount::UnmountFlags;
use std::collections::HashSet;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// What a pass over the remains of dead builds did, or would do.
#[derive(Default)]
pub(crate) struct DeadBuilds {
    /// In a dry run: the leases without an owner.
    pub(crate) leases: HashSet<OsString>,
    /// How many builds had died.
    pub(crate) count: u64,
    /// Bytes of what they had staged.
    pub(crate) staged_bytes: u64,
    /// What could not be removed.
    pub(crate) errors: Vec<Error>,
}

impl DeadBuilds {
    /// Returns true if something was removed. A file that cannot be removed does not keep the pass from the next one.
    fn removed(&mut self, result: Result<()>) -> bool {
        match result {
            Ok(()) => return true,
            Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => {}
            Err(error) => self.errors.push(error),
        }
        false
    }
}

/// The entries of a directory, all of them: an entry hidden by an error would pass for one that is not there.
pub(crate) fn entries(dir: &Path) -> Result<Vec<fs::DirEntry>> {
    fs::read_dir(dir).at(dir)?.map(|entry| entry.at(dir)).collect()
}

/// The result of an operation on `path`, or `None` if the file no longer exists. A file that only cannot be reached is an
/// error.
pub(crate) fn unless_gone<T>(result: io::Result<T>, path: &Path) -> Result<Option<T>> {
    match result {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        other => other.map(Some).at(path),
    }
}

/// Opens a lease, unless it is gone.
///
/// # Errors
/// A lease closed to this user, left from when root could build in a user's store: only that user can tell what it keeps.
pub(crate) fn open_lease(path: &Path) -> Result<Option<File>> {
    match File::open(path) {
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            let owner = fs::symlink_metadata(path).map_or("another user".into(), |meta| format!("user {}", meta.uid()));
            Err(Error::Refused(format!(
                "gc: {}: a build or mount of {owner} has left it; remove it if none is running, and run gc again",
                path.display()
            )))
        }
        other => unless_gone(other, path),
    }
}

/// Removes leases without an owner, and what their builds had staged; `bytes_of` counts that before it goes. A dry run only
/// lists the leases.
pub(crate) fn remove_dead_builds(store: &Store, dry_run: bool, bytes_of: impl Fn(&Path) -> u64) -> Result<DeadBuilds> {
    let (leases, staging) = (store.path("leases"), store.path("staging"));
    let mut dead = DeadBuilds::default();
    for entry in entries(&leases)? {
        let path = entry.path();
        let Some(file) = open_lease(&path)? else { continue };
        // A living owner holds the lock.
        if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            continue;
        }
        if dry_run {
            dead.count += 1;
            dead.leases.insert(entry.file_name());
        } else {
            // A process that has made the lease and not yet locked it will find it gone, and make another one. The owner
            // may also have ended and removed it between the open and the lock.
            let removed = dead.removed(fs::remove_file(&path).at(&path));
            dead.count += u64::from(removed);
        }
    }
    for entry in entries(&staging)? {
        // A staging directory is made after its lease and removed before it.
        let lease = leases.join(entry.file_name());
        if dead.leases.contains(&entry.file_name()) || !lease.try_exists().at(&lease)? {
            let path = entry.path();
            let bytes = bytes_of(&path);
            if dry_run || dead.removed(remove_staged(&path)) {
                dead.staged_bytes += bytes;
            }
        }
    }
    Ok(dead)
}

/// Removes a staging directory, in which a dead mount may have left its metadata mounted.
fn remove_staged(path: &Path) -> Result<()> {
    let _ = rustix::mount::unmount(path.join("meta"), UnmountFlags::DETACH);
    remove_tree(path)
}

impl Store {
    /// Removes what dead builds have left, to make room for the next. What cannot be removed is reported by the collector.
    pub(super) fn clear_dead_builds(&self) {
        let _ = remove_dead_builds(self, false, |_| 0);
    }
}
