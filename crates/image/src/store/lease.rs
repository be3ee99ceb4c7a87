//! Leases: what builds and mounts in progress stand on, written down for the collector.
//!
//! Whoever relies on an object or a tree first writes its digest into his
//! lease and then looks whether it is there, under the domain lock shared. The
//! lease's file is locked as long as its owner lives; an unlocked one is a
//! dead owner's.

use super::lock::lock_target;
use super::{Record, Store, random_id};
use crate::digest::Digest;
use crate::error::{At, Error, Result};
use rustix::fs::FlockOperation;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

impl Store {
    /// The record of image `name`, and a lease that keeps the image from the collector, whatever becomes of the name.
    ///
    /// # Errors
    /// [`Error::NoImage`]; a damaged record.
    pub fn hold(&self, name: &str) -> Result<(Record, Lease<'_>)> {
        let lease = Lease::new(self)?;
        Ok((lease.claim_image(name)?, lease))
    }
}

/// What a build or a mount in progress stands on. The file is locked as long as its owner lives.
///
/// Where there is no room to write it down, or nothing may be written, a mount keeps the collector out as long as the lease lives:
/// that is not long, and images can be mounted from a full disk. Its owner must not take the domain lock exclusive.
#[derive(Debug)]
pub struct Lease<'a> {
    store: &'a Store,
    pub(super) id: String,
    path: PathBuf,
    claims: Mutex<Claims>,
    /// The domain lock, held shared for each claim; its own open file so that threads of one build share it in turn.
    lock: File,
}

#[derive(Debug)]
struct Claims {
    /// None where none could be made.
    file: Option<File>,
    /// Whether the domain lock is held until the end, since something could not be written.
    is_held: bool,
    /// Whether it may be.
    may_hold: bool,
}

/// Whether nothing more can be written here.
pub(crate) fn is_full_or_fixed(error: &Error) -> bool {
    let is_fixed = |source: &std::io::Error| source.raw_os_error() == Some(libc::EROFS);
    matches!(error, Error::Full { .. }) || matches!(error, Error::Io { source, .. } if is_fixed(source))
}

impl<'a> Lease<'a> {
    /// Takes a new lease, for who needs no room.
    pub(crate) fn new(store: &'a Store) -> Result<Self> {
        Self::take(store, true)
    }

    /// Takes a new lease, for who will need room.
    pub(super) fn written(store: &'a Store) -> Result<Self> {
        Self::take(store, false)
    }

    fn take(store: &'a Store, may_hold: bool) -> Result<Self> {
        let lock_path = store.path("lock");
        let lock = match lock_target(&lock_path) {
            Err(error) if may_hold && is_full_or_fixed(&error) => File::open(&lock_path).at(&lock_path)?,
            other => other?,
        };
        let id = random_id()?;
        let path = store.path("leases").join(&id);
        let (file, is_held) = match make(&path) {
            Err(error) if may_hold && is_full_or_fixed(&error) => {
                rustix::fs::flock(&lock, FlockOperation::LockShared).at(&lock_path)?;
                (None, true)
            }
            made => (Some(made?), false),
        };
        Ok(Self { store, id, path, claims: Mutex::new(Claims { file, is_held, may_hold }), lock })
    }

    /// Makes sure that the lease is written down: nobody else takes the staging directory of its id for a dead owner's.
    pub(crate) fn write_down(&self) -> Result<()> {
        let mut claims = self.claims.lock().expect("no panic while held");
        if claims.file.is_none() {
            claims.file = Some(make(&self.path)?);
        }
        Ok(())
    }

    /// Whether the domain lock is held, so that nobody gets it exclusive, its owner neither.
    pub(crate) fn is_held(&self) -> bool {
        self.claims.lock().expect("no panic while held").is_held
    }

    /// Claims `digests`, then tells which of `paths` exist, in one step against the collector.
    pub(super) fn claim<T>(&self, digests: &[Digest], look: impl FnOnce() -> T) -> Result<T> {
        let mut claims = self.claims.lock().expect("no panic while held");
        let (file, may_hold) = match &mut *claims {
            Claims { file: Some(file), is_held: false, may_hold } => (file, *may_hold),
            _ => return Ok(look()),
        };
        rustix::fs::flock(&self.lock, FlockOperation::LockShared).at(&self.path)?;
        let mut bytes = Vec::with_capacity(digests.len() * 32);
        digests.iter().for_each(|digest| bytes.extend(digest.0));
        match file.write_all(&bytes).at(&self.path) {
            Err(error) if may_hold && is_full_or_fixed(&error) => {
                claims.is_held = true;
                Ok(look())
            }
            wrote => {
                let found = wrote.map(|()| look());
                rustix::fs::flock(&self.lock, FlockOperation::Unlock).at(&self.path)?;
                found
            }
        }
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

/// Makes a lease's file, and locks it.
fn make(path: &Path) -> Result<File> {
    loop {
        let file = File::options().append(true).read(true).create_new(true).mode(0o600).open(path).at(path)?;
        rustix::fs::flock(&file, FlockOperation::LockExclusive).at(path)?;
        // A collector may have taken the file for a dead build's before the lock was ours.
        if rustix::fs::fstat(&file).at(path)?.st_nlink > 0 {
            return Ok(file);
        }
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        // Left behind, it is a dead build's lease, and the collector removes it.
        let _ = fs::remove_file(&self.path);
        // A child that is just forked has a copy of the open file, and would hold the lock on.
        let _ = rustix::fs::flock(&self.lock, FlockOperation::Unlock);
    }
}
