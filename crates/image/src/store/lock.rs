//! Locks on files of a domain: builders and the collector, and one collector at a time.
//!
//! A process that relies on objects holds the domain lock shared, one that deletes them
//! holds it exclusive, both for moments only.

use super::Store;
use crate::error::{At, Result};
use rustix::fs::FlockOperation;
use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

impl Store {
    /// Locks the domain: shared to rely on objects, exclusive to delete them.
    pub(crate) fn lock(&self, exclusive: bool) -> Result<Lock> {
        let how = if exclusive { FlockOperation::LockExclusive } else { FlockOperation::LockShared };
        Lock::take(&self.path("lock"), how).map(|lock| lock.expect("waited for"))
    }

    /// Locks the link farms: shared to make one, exclusive to change existing ones.
    pub(crate) fn lock_farms(&self, exclusive: bool) -> Result<Lock> {
        let how = if exclusive { FlockOperation::LockExclusive } else { FlockOperation::LockShared };
        Lock::take(&self.path("shelf.lock"), how).map(|lock| lock.expect("waited for"))
    }

    /// Makes the caller the domain's only collector; `None` if there is one.
    pub(crate) fn lock_collector(&self) -> Result<Option<Lock>> {
        Lock::take(&self.path("gc.lock"), FlockOperation::NonBlockingLockExclusive)
    }
}

/// A lock on a file, held until it is dropped.
///
/// Dropping it unlocks the file explicitly instead of only closing it: a child that another thread is forking has the same
/// open file until it execs, and would keep the lock held.
#[derive(Debug)]
pub(crate) struct Lock(File);

impl Lock {
    /// `None` if `how` does not wait and another process holds the lock.
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
    fn a_dropped_lock_is_free_even_while_another_process_has_a_copy_of_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("s"), "default").unwrap();
        let lock = store.lock_collector().unwrap().unwrap();
        assert!(store.lock_collector().unwrap().is_none());
        // As a child between fork and exec has it.
        let _copy = lock.0.try_clone().unwrap();
        drop(lock);
        assert!(store.lock_collector().unwrap().is_some());
    }
}
