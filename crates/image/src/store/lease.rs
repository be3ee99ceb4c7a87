//! Leases: what builds and mounts in progress rely on, written down for the collector.
//!
//! A build or mount first writes the digest of an object or tree into its
//! lease, and then looks whether it exists, under the shared domain lock. The
//! lease's file is locked as long as its owner lives; an unlocked lease belongs
//! to a dead owner.

use super::lock::lock_target;
use super::{ImageRecord, ImageRecords, Store};
use crate::digest::Digest;
use crate::error::{At, Error, Result};
use crate::random_id::random_id;
use rustix::fs::FlockOperation;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

impl Store {
    /// The record of image `name`, and a lease that keeps the image from the collector even if the name is removed.
    ///
    /// # Errors
    /// [`Error::NoImage`]; a damaged record.
    pub fn hold(&self, name: &str) -> Result<(ImageRecord, Lease<'_>)> {
        let lease = Lease::new(self)?;
        Ok((lease.claim_image(name)?, lease))
    }
}

/// What a build or a mount in progress relies on. The file is locked as long as its owner lives.
///
/// Images can be mounted from a full disk, or where nothing may be written: where a claim cannot be written down, a mount
/// keeps the collector out by holding the domain lock as long as the lease lives, which is not long. The lease's owner
/// must not take the domain lock exclusively: it would wait for itself.
#[derive(Debug)]
pub struct Lease<'a> {
    store: &'a Store,
    id: String,
    path: PathBuf,
    claims: Mutex<Claims>,
    /// The domain lock, held shared during each claim. Its own open file, so that threads of one build take turns.
    lock: File,
}

#[derive(Debug)]
struct Claims {
    /// The lease's file; none where none could be made.
    file: Option<File>,
    /// Whether the domain lock is held until the end, since something could not be written.
    is_held: bool,
    /// Whether it may be.
    may_hold: bool,
}

impl<'a> Lease<'a> {
    /// Takes a new lease for an owner that can work without writing: a mount, a query.
    pub(crate) fn new(store: &'a Store) -> Result<Self> {
        Self::take(store, true)
    }

    /// Takes a new lease for an owner that has to write: a build.
    pub(super) fn written(store: &'a Store) -> Result<Self> {
        Self::take(store, false)
    }

    fn take(store: &'a Store, may_hold: bool) -> Result<Self> {
        let lock_path = store.path("lock");
        let lock = match lock_target(&lock_path) {
            Err(error) if may_hold && error.is_full_or_read_only() => File::open(&lock_path).at(&lock_path)?,
            other => other?,
        };
        let id = random_id()?;
        let path = store.path("leases").join(&id);
        let (file, is_held) = match make(&path) {
            Err(error) if may_hold && error.is_full_or_read_only() => {
                rustix::fs::flock(&lock, FlockOperation::LockShared).at(&lock_path)?;
                (None, true)
            }
            made => (Some(made?), false),
        };
        Ok(Self { store, id, path, claims: Mutex::new(Claims { file, is_held, may_hold }), lock })
    }

    /// Makes sure that the lease has a file. Without it, another process would take the staging directory with the lease's
    /// id for a dead owner's.
    pub(crate) fn write_down(&self) -> Result<()> {
        let mut claims = self.claims.lock().expect("no panic while held");
        if claims.file.is_none() {
            claims.file = Some(make(&self.path)?);
        }
        Ok(())
    }

    /// Returns true if the domain lock is held: no process can take it exclusively, the lease's owner included.
    pub(crate) fn is_held(&self) -> bool {
        self.claims.lock().expect("no panic while held").is_held
    }

    /// Claims `digests`, then calls `look`, in one step against the collector. Returns what `look` returned.
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
            Err(error) if may_hold && error.is_full_or_read_only() => {
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

    /// Claims a tree, and with it the tree's objects. Returns true if the tree exists.
    pub(crate) fn claim_tree(&self, digest: &Digest) -> Result<bool> {
        let path = self.store.tree_path(digest);
        self.claim(&[*digest], || path.try_exists())?.at(&path)
    }

    /// Claims the image that `name` stands for.
    pub(crate) fn claim_image(&self, name: &str) -> Result<ImageRecord> {
        loop {
            let record = self.store.image(name)?;
            // A missing tree was collected after the name was given to another image, or is lost.
            if self.claim_tree(&record.digest)? || self.store.image(name)?.digest == record.digest {
                return Ok(record);
            }
        }
    }
}

impl Lease<'_> {
    /// All images, each claimed: while the lease is held nothing of them is collected. Each of `names` must be among them.
    pub(crate) fn claim_images(&self, names: &[String]) -> Result<ImageRecords> {
        let mut all = self.store.records()?;
        for name in names.iter().filter(|name| !all.damaged.iter().any(|record| record.name == **name)) {
            self.store.image(name)?;
        }
        for image in std::mem::take(&mut all.images) {
            match self.claim_image(&image.name) {
                // Removed since the records were read.
                Err(Error::NoImage { .. }) => {}
                other => all.images.push(other?),
            }
        }
        Ok(all)
    }
}

/// Makes a lease's file, and locks it.
fn make(path: &Path) -> Result<File> {
    loop {
        let file = File::options().append(true).read(true).create_new(true).mode(0o600).open(path).at(path)?;
        rustix::fs::flock(&file, FlockOperation::LockExclusive).at(path)?;
        // Before this process had locked the file, a collector may have taken it for a dead build's and removed it.
        if rustix::fs::fstat(&file).at(path)?.st_nlink > 0 {
            return Ok(file);
        }
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        // If this fails, the file is a dead build's lease, and the collector removes it.
        let _ = fs::remove_file(&self.path);
        // A child that another thread is forking has a copy of the open file, and would keep the lock held.
        let _ = rustix::fs::flock(&self.lock, FlockOperation::Unlock);
    }
}
