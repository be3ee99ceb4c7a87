//! Locks on files of a domain: builders and the collector, and one collector at a time.
//!
//! Whoever relies on objects holds the domain lock shared, whoever deletes
//! holds it exclusive, both for moments only.

use super::Store;
use crate::error::{At, Result};
use rustix::fs::FlockOperation;
use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

impl Store {
    /// Locks the domain; shared for those who rely on objects, exclusive for who deletes.
    pub(crate) fn lock(&self, exclusive: bool) -> Result<Lock> {
        let how = if exclusive { FlockOperation::LockExclusive } else { FlockOperation::LockShared };
        Lock::take(&self.path("lock"), how).map(|lock| lock.expect("waited for"))
    }

    /// Locks the shelves; shared for who makes one, exclusive for who changes those that are there.
    pub(crate) fn lock_shelves(&self, exclusive: bool) -> Result<Lock> {
        let how = if exclusive { FlockOperation::LockExclusive } else { FlockOperation::LockShared };
        Lock::take(&self.path("shelf.lock"), how).map(|lock| lock.expect("waited for"))
    }

    /// Makes the caller the domain's only collector, unless there is one.
    pub(crate) fn lock_collector(&self) -> Result<Option<Lock>> {
        Lock::take(&self.path("gc.lock"), FlockOperation::NonBlockingLockExclusive)
    }
}

/// A lock on a file, held until it is dropped.
///
/// It is let go of by name, not by closing the file: a child that another thread is just forking has the same open file
/// until it execs, and would hold the lock on.
#[derive(Debug)]
pub(crate) struct Lock(File);

impl Lock {
    /// None when `how` does not wait and another holds it.
    fn take(path: &Path, how: FlockOperation) -> Result<Option<Self>> {
        let file = lock_target(path)?;
        match rustix::fs::flock(&file, how) {
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            done => done.at(path).map(|()| Some(Self(file))),
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        let _ = rustix::fs::flock(&self.0, FlockOperation::Unlock);
    }
}

pub(super) fn lock_target(path: &Path) -> Result<File> {
    File::options().read(true).write(true).create(true).truncate(false).mode(0o600).open(path).at(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_free_as_soon_as_it_is_dropped_whoever_has_a_copy_of_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("s"), "default").unwrap();
        let lock = store.lock_collector().unwrap().unwrap();
        assert!(store.lock_collector().unwrap().is_none());
        // What a child between fork and exec has.
        let _copy = lock.0.try_clone().unwrap();
        drop(lock);
        assert!(store.lock_collector().unwrap().is_some());
    }
}
