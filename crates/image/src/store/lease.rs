//! Leases: what builds and mounts in progress stand on, written down for the collector.
//!
//! Whoever relies on an object or a tree first writes its digest into his
//! lease and then looks whether it is there, under the domain lock shared. The
//! lease's file is locked as long as its owner lives; an unlocked one is a
//! dead owner's.

use super::lock::lock_target;
use super::{Record, Store, random_id};
use crate::digest::Digest;
use crate::error::{At, Result};
use rustix::fs::FlockOperation;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::Mutex;

impl Store {
    /// The record of image `name`, and a lease that keeps the image from the collector, whatever becomes of the name.
    ///
    /// # Errors
    /// [`Error::NoImage`](crate::Error::NoImage); a damaged record.
    pub fn hold(&self, name: &str) -> Result<(Record, Lease<'_>)> {
        let lease = Lease::new(self)?;
        Ok((lease.claim_image(name)?, lease))
    }
}

/// What a build or a mount in progress stands on. The file is locked as long as its owner lives.
#[derive(Debug)]
pub struct Lease<'a> {
    store: &'a Store,
    pub(super) id: String,
    path: PathBuf,
    file: Mutex<File>,
    /// The domain lock, held shared for each claim; its own open file so that threads of one build share it in turn.
    lock: File,
}

impl<'a> Lease<'a> {
    /// Takes a new lease.
    pub(crate) fn new(store: &'a Store) -> Result<Self> {
        let lock = lock_target(&store.path("lock"))?;
        loop {
            let id = random_id()?;
            let path = store.path("leases").join(&id);
            let file = File::options().append(true).read(true).create_new(true).mode(0o600).open(&path).at(&path)?;
            rustix::fs::flock(&file, FlockOperation::LockExclusive).at(&path)?;
            // A collector may have taken the file for a dead build's before the lock was ours.
            if rustix::fs::fstat(&file).at(&path)?.st_nlink > 0 {
                return Ok(Self { store, id, path, file: Mutex::new(file), lock });
            }
        }
    }

    /// Claims `digests`, then tells which of `paths` exist, in one step against the collector.
    pub(super) fn claim<T>(&self, digests: &[Digest], look: impl FnOnce() -> T) -> Result<T> {
        let mut file = self.file.lock().expect("no panic while held");
        rustix::fs::flock(&self.lock, FlockOperation::LockShared).at(&self.path)?;
        let mut bytes = Vec::with_capacity(digests.len() * 32);
        digests.iter().for_each(|digest| bytes.extend(digest.0));
        let wrote = file.write_all(&bytes).at(&self.path);
        let found = wrote.map(|()| look());
        rustix::fs::flock(&self.lock, FlockOperation::Unlock).at(&self.path)?;
        found
    }

    /// The lease's id, and the name of its staging directory.
    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    /// Claims a tree (and with it the tree's objects); says whether it is there.
    pub(crate) fn claim_tree(&self, digest: &Digest) -> Result<bool> {
        let path = self.store.tree_path(digest);
        self.claim(&[*digest], || path.try_exists())?.at(&path)
    }

    /// Claims what `name` stands for.
    pub(crate) fn claim_image(&self, name: &str) -> Result<Record> {
        loop {
            let record = self.store.image(name)?;
            // What is not there was collected after the name was given to another, or is missing.
            if self.claim_tree(&record.digest)? || self.store.image(name)?.digest == record.digest {
                return Ok(record);
            }
        }
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        // Left behind, it is a dead build's lease, and the collector removes it.
        let _ = fs::remove_file(&self.path);
    }
}
