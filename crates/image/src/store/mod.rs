//! The store: objects by digest, images by name, and the rules by which many builders and one collector meet.
//!
//! ```text
//! STORE/pagefold-image-store     format number and the store's own id
//! STORE/domains/DOMAIN/
//!     objects/xx/yyyy…           file contents by SHA-256, never changed once there
//!     trees/DIGEST.erofs         metadata images, named by their own SHA-256 (the image digest)
//!     trees/DIGEST.objects       the objects of each, for a fast mark
//!     trees/DIGEST.shelf/        the image's link farm: the objects in the tree's order, and the mounted metadata
//!     trees/DIGEST.unshelved     which object cannot have another hard link, if one cannot
//!     images/NAME                a name's record: digest, counts, configuration (JSON)
//!     leases/ID                  what a build or mount in progress relies on; locked while its owner lives
//!     staging/ID/                what a build has written and not yet published
//!     downloads/SHA256           packed layers that a pull has fetched, or has begun to; locked while it lives
//!     cache/                     stat caches of source directories: digests of unchanged files
//!     mnt/                       empty: `exec` mounts here, in a private namespace
//!     lock, gc.lock, shelf.lock, published   see below
//! ```
//!
//! *Nothing half.* An object is written under `staging/`, made durable by one syncfs for
//! the whole batch, and only then renamed to its name: a file that has its name is complete. An
//! image's record is renamed into place last. A build that dies leaves a staging directory
//! and an unlocked lease, and the next collection removes both.
//!
//! *Nothing lost.* A build or mount writes the digest of an object it relies on into its lease, and then
//! looks whether the object exists, under the shared domain lock (microseconds). The collector
//! deletes in batches under the exclusive domain lock, and only objects that no image, no mount and no
//! lease names at that moment. Neither waits for the other's whole run.
//!
//! *No shared secrets.* A domain is a directory of its own: nothing is shared across domains,
//! and the store is closed to other users (mode 0700); overlayfs reads it with the rights of the mounting process.
//!
//! The store calls nothing above it: it only notes that link farms need a repair, and the builds and mounts that use it
//! run the repair.

mod builds;
mod damage;
mod downloads;
mod format_file;
mod lease;
mod lock;
mod names;
mod objects;
mod publish;
mod repair_note;
mod staging;
mod stat_cache;
mod trees;

pub(crate) use builds::{entries, open_lease, remove_dead_builds, unless_gone};
pub use downloads::Download;
pub use format_file::FORMAT;
pub use lease::Lease;
pub use names::{DamagedImage, ImageRecord, ImageRecords, LayerTree, check_name};
pub(crate) use objects::is_marked;
pub(crate) use publish::StagedLayer;
pub use staging::BuildStats;
pub(crate) use staging::{Batch, HOLE_BYTES, Staging};
pub(crate) use stat_cache::{FileState, StatCache, StatEntry};
pub use trees::decode_objects;
pub(crate) use trees::{FARM_SUFFIX, ROOT_DIRECTORY, USER_DIRECTORY};

pub use crate::run_config::RunConfig;

use crate::digest::Digest;
use crate::error::{At, Error, Result, input};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// Where `exec` mounts.
const EXEC_PLACE: &str = "mnt";

/// One domain of a store, open.
#[derive(Debug)]
pub struct Store {
    root: PathBuf,
    domain: String,
    dir: PathBuf,
    id: String,
    sync: bool,
}

/// The default store: `PAGEFOLD_STORE`, else `/var/lib/pagefold/images` for root, else
/// `$XDG_DATA_HOME/pagefold/images` (`~/.local/share/…`).
pub fn default_root() -> PathBuf {
    if let Some(path) = std::env::var_os("PAGEFOLD_STORE").filter(|path| !path.is_empty()) {
        return path.into();
    }
    if rustix::process::geteuid().is_root() {
        return "/var/lib/pagefold/images".into();
    }
    let data = std::env::var_os("XDG_DATA_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let home = || PathBuf::from(std::env::var_os("HOME").unwrap_or_else(|| "/".into())).join(".local/share");
    data.unwrap_or_else(home).join("pagefold/images")
}

fn make_dir(path: &Path, mode: u32) -> Result<()> {
    fs::DirBuilder::new().recursive(true).mode(mode).create(path).at(path)
}

/// Refuses a store path at which there is a file.
fn refuse_file(root: &Path) -> Result<()> {
    if fs::metadata(root).is_ok_and(|meta| !meta.is_dir()) {
        return Err(Error::Refused(format!("{}: not a directory; give --store another place", root.display())));
    }
    Ok(())
}

/// Refuses what cannot be a domain's name.
///
/// # Errors
/// A name that is empty, too long, begins with a dot, or has other characters than letters, digits, - _ and dots.
pub fn check_domain(domain: &str) -> Result<()> {
    let proper = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if domain.is_empty() || domain.len() > 100 || domain.starts_with('.') || !domain.chars().all(proper) {
        return Err(input!("{domain:?}: a domain's name has letters, digits, - _ and . only"));
    }
    Ok(())
}

#[cfg(test)]
thread_local! {
    /// What this thread's tests do whenever written data would be made durable.
    pub(crate) static ON_SYNC: std::cell::RefCell<Option<Box<dyn Fn()>>> = const { std::cell::RefCell::new(None) };
}

impl Store {
    /// Opens domain `domain` of the store at `root`, making both where they are missing.
    ///
    /// # Errors
    /// A store of a newer format or of another user, a domain name that is not a name, the system's.
    pub fn open(root: &Path, domain: &str) -> Result<Self> {
        check_domain(domain)?;
        refuse_file(root)?;
        make_dir(root, 0o700)?;
        let root = &root.canonicalize().at(root)?;
        format_file::create(root)?;
        format_file::check_owner(root)?;
        let format = format_file::read(root)?;
        let dir = root.join("domains").join(domain);
        for part in ["objects", "trees", "images", "leases", "staging", "cache"] {
            make_dir(&dir.join(part), 0o700)?;
        }
        match make_dir(&dir.join(EXEC_PLACE), 0o700) {
            // A store of an earlier version where nothing can be written: `exec_place` has another place.
            Err(error) if error.is_full_or_read_only() => {}
            made => made?,
        }
        Ok(Self { root: root.into(), domain: domain.into(), dir, id: format.id, sync: true })
    }

    /// Closes the store to versions that do not know link farms, before the first one is made.
    pub(crate) fn upgrade(&self) -> Result<()> {
        format_file::upgrade(&self.root, &self.id)
    }

    /// Opens domain `domain` of the store at `root` if it exists; a query must not make one.
    ///
    /// # Errors
    /// As [`Store::open`].
    pub fn open_existing(root: &Path, domain: &str) -> Result<Option<Self>> {
        check_domain(domain)?;
        refuse_file(root)?;
        let dir = root.join("domains").join(domain);
        match fs::metadata(&dir) {
            Ok(_) => Self::open(root, domain).map(Some),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).at(&dir),
        }
    }

    /// The domains of the store at `root`.
    ///
    /// # Errors
    /// The system's.
    pub fn domains(root: &Path) -> Result<Vec<String>> {
        let dir = root.join("domains");
        let names = fs::read_dir(&dir).at(&dir)?.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        let mut names: Vec<String> = names.collect();
        names.sort();
        Ok(names)
    }

    /// Leaves durability to the system: for measurements and stores that can be rebuilt.
    pub fn without_sync(mut self) -> Self {
        self.sync = false;
        self
    }

    /// Makes everything written to the file system of `disk`, the directory `path`, durable, unless the store leaves
    /// durability to the system.
    ///
    /// An open file reports writes that were lost since it was opened, and no earlier ones: `disk` must have been open
    /// before the first write.
    pub(crate) fn sync_disk(&self, disk: &File, path: &Path) -> Result<()> {
        #[cfg(test)]
        ON_SYNC.with_borrow(|hook| hook.iter().for_each(|hook| hook()));
        if self.sync { rustix::fs::syncfs(disk).at(path) } else { Ok(()) }
    }

    /// Where the store is.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The domain's name.
    pub fn domain(&self) -> &str {
        &self.domain
    }

    /// A part of the domain's directory.
    pub(crate) fn path(&self, part: &str) -> PathBuf {
        self.dir.join(part)
    }

    /// A directory to mount on in a private mount namespace, where no other process sees what the mount hides.
    pub(crate) fn exec_place(&self) -> PathBuf {
        let place = self.path(EXEC_PLACE);
        if place.is_dir() { place } else { self.path("images") }
    }

    /// The source of a mount of `digest` in the mount table, so that every mount names its store itself.
    pub(crate) fn mount_source(&self, digest: &Digest) -> String {
        format!("{}{}", self.mount_source_prefix(), digest.hex())
    }

    /// What the sources of all mounts of this domain begin with.
    pub(crate) fn mount_source_prefix(&self) -> String {
        format!("pagefold:{}:{}:", self.id, self.domain)
    }

    /// The store's own id.
    pub fn id(&self) -> &str {
        &self.id
    }
}
