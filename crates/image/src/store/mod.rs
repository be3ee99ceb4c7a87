//! The store: objects by digest, images by name, and the rules by which many builders and one collector meet.
//!
//! ```text
//! STORE/pagefold-image-store     format number and the store's own id
//! STORE/domains/DOMAIN/
//!     objects/xx/yyyy…           file contents by SHA-256, never changed once there
//!     trees/DIGEST.erofs         metadata images, named by their own SHA-256 (the image digest)
//!     trees/DIGEST.objects       the objects of each, for a fast mark
//!     trees/DIGEST.shelf/        the objects by the tree's order, and the form of the metadata that is mounted
//!     trees/DIGEST.unshelved     which object has no room for a name on a shelf, if one has none
//!     images/NAME                a name's record: digest, counts, configuration (JSON)
//!     leases/ID                  what a build or mount in progress stands on; locked while it lives
//!     staging/ID/                what a build has written and not yet published
//!     cache/                     stat caches of source directories: digests of unchanged files
//!     mnt/                       empty: where `exec` mounts, in a namespace of its own
//!     lock, gc.lock, shelf.lock, published   see below
//! ```
//!
//! *Nothing half.* An object is written under `staging/`, made durable by one syncfs for
//! the whole batch, and only then renamed to its name: what has a name is complete. An
//! image's record is renamed into place last. A build that dies leaves a staging directory
//! and an unlocked lease, and the next collection removes both.
//!
//! *Nothing lost.* Whoever relies on an object writes its digest into his lease and then
//! looks whether it is there, under the domain lock shared (microseconds). The collector
//! deletes in batches under the domain lock exclusive, and only what no image, no mount and no
//! lease names at that moment. Neither waits for the other's whole run.
//!
//! *No shared secrets.* A domain is a directory of its own: nothing is shared across domains,
//! and the store is closed to other users (mode 0700); overlayfs reads it with the rights of who mounted.

mod damage;
mod lease;
mod lock;
mod names;
mod publish;
mod trees;

pub use lease::Lease;
pub(crate) use lease::is_full_or_fixed;
pub use names::{DamagedImage, Record, Records, RunConfig, check_name};
pub use publish::{Build, BuildStats};
pub use trees::decode_objects;

use crate::digest::Digest;
use crate::error::{At, Error, Result, input};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// The newest store format this program reads.
pub const FORMAT: u64 = 2;
/// The one it begins with: the next is for shelves, which an older collector would not know to be mounted.
const FIRST_FORMAT: u64 = 1;
/// The permission that an object found damaged has lost.
const OWNER_MAY_READ: u32 = 0o400;
/// What a metadata directory's name has behind the image's digest.
pub(crate) const ROOT_DIRECTORY: &str = "rootdir";
/// The same in a user namespace; there follows which.
pub(crate) const USER_DIRECTORY: &str = "userdir";
/// The end of the name if its files lead to the image's shelf.
pub(crate) const SHELVED: &str = "-shelved";
/// Where `exec` mounts.
const EXEC_PLACE: &str = "mnt";
const FORMAT_FILE: &str = "pagefold-image-store";

#[derive(Serialize, Deserialize)]
struct Format {
    format: u64,
    id: String,
}

/// Whether a file has the mark of [`Store::condemn`].
pub(crate) fn is_marked(meta: &fs::Metadata) -> bool {
    meta.mode() & OWNER_MAY_READ == 0
}

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

/// Refuses a store that is there and no directory.
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

/// An id no other process uses: 64 random bits, hexadecimal.
pub(crate) fn random_id() -> Result<String> {
    let mut bytes = [0u8; 8];
    File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes)).at("/dev/urandom")?;
    Ok(format!("{:016x}", u64::from_le_bytes(bytes)))
}

/// Refuses the store of another user: he could not use what we make in it, nor could our collector see what his builds stand
/// on, and his links would lead us. Whose it is tells the file that made it a store: the directory may be another's, or of
/// many. A server may give all files one owner; then ours are his.
fn check_owner(root: &Path, format: &Path) -> Result<()> {
    let owner = fs::symlink_metadata(format).at(format)?.uid();
    let ours = || -> Result<u32> {
        let probe = root.join(format!(".{}", random_id()?));
        let file = File::options().write(true).create_new(true).mode(0o600).open(&probe).at(&probe)?;
        fs::remove_file(&probe).at(&probe)?;
        Ok(file.metadata().at(&probe)?.uid())
    };
    if owner == rustix::process::geteuid().as_raw() || ours().is_ok_and(|uid| uid == owner) {
        return Ok(());
    }
    Err(Error::Refused(format!(
        "{}: a store of user {owner}'s; run as that user, or give --store another directory",
        root.display()
    )))
}

#[cfg(test)]
thread_local! {
    /// What this thread's tests do while the disk would be waited for.
    pub(crate) static AT_SETTLE: std::cell::RefCell<Option<Box<dyn Fn()>>> = const { std::cell::RefCell::new(None) };
}

impl Store {
    /// Opens domain `domain` of the store at `root`, making both where they are missing.
    ///
    /// # Errors
    /// A store of a newer format or of another user, a domain name that is no name, the system's.
    pub fn open(root: &Path, domain: &str) -> Result<Self> {
        check_domain(domain)?;
        let format_path = root.join(FORMAT_FILE);
        refuse_file(root)?;
        make_dir(root, 0o700)?;
        let root = &root.canonicalize().at(root)?;
        if !format_path.exists() {
            // A first user beside us links the format before anything else, so entries without it are a stranger's.
            let mut entries = fs::read_dir(root).at(root)?.flatten();
            // A file system of its own has a directory from the start.
            let foreign = entries.any(|entry| {
                let name = entry.file_name();
                !name.as_encoded_bytes().starts_with(b".") && name != "lost+found"
            });
            if foreign && !format_path.exists() {
                return Err(Error::Refused(format!(
                    "{}: neither empty nor an image store; give --store another directory",
                    root.display()
                )));
            }
            let text = serde_json::to_vec(&Format { format: FIRST_FORMAT, id: random_id()? }).expect("plain data");
            let staged = root.join(format!(".{}", random_id()?));
            let mut file = File::options().write(true).create_new(true).mode(0o600).open(&staged).at(&staged)?;
            file.write_all(&text).and_then(|()| file.sync_all()).at(&staged)?;
            // Two first users at once: the first link wins, the other reads it.
            match fs::hard_link(&staged, &format_path) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error).at(&format_path),
                _ => fs::remove_file(&staged).at(&staged)?,
            }
        }
        check_owner(root, &format_path)?;
        let text = fs::read(&format_path).at(&format_path)?;
        let bad = |error| Error::Damaged(format!("{}: {error}; restore it from another copy", format_path.display()));
        // Only the number must be readable in a store from the future.
        let number: serde_json::Value = serde_json::from_slice(&text).map_err(bad)?;
        let found = number["format"].as_u64().unwrap_or(u64::MAX);
        if found > FORMAT {
            return Err(Error::Newer { path: root.into(), found, known: FORMAT });
        }
        let format: Format = serde_json::from_slice(&text).map_err(bad)?;
        let dir = root.join("domains").join(domain);
        for part in ["objects", "trees", "images", "leases", "staging", "cache"] {
            make_dir(&dir.join(part), 0o700)?;
        }
        match make_dir(&dir.join(EXEC_PLACE), 0o700) {
            // A store of a version before, where nothing can be written: there is another place for who needs it.
            Err(error) if is_full_or_fixed(&error) => {}
            made => made?,
        }
        Ok(Self { root: root.into(), domain: domain.into(), dir, id: format.id, sync: true })
    }

    /// Closes the store to versions that do not know what this one is about to make in it.
    pub(crate) fn upgrade(&self) -> Result<()> {
        let path = self.root.join(FORMAT_FILE);
        let text = fs::read(&path).at(&path)?;
        if serde_json::from_slice(&text).is_ok_and(|now: Format| now.format >= FORMAT) {
            return Ok(());
        }
        let text = serde_json::to_vec(&Format { format: FORMAT, id: self.id.clone() }).expect("plain data");
        let staged = self.root.join(format!(".{}", random_id()?));
        let mut file = File::options().write(true).create_new(true).mode(0o600).open(&staged).at(&staged)?;
        let written = file.write_all(&text).and_then(|()| file.sync_all()).and_then(|()| fs::rename(&staged, &path));
        if written.is_err() {
            let _ = fs::remove_file(&staged);
        }
        written.at(&path)
    }

    /// Opens domain `domain` of the store at `root`, if it is there: who only asks makes none.
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

    /// Makes what was written to the file system of `disk`, the directory `path`, durable, unless durability is the
    /// system's affair. An open file hears of the writes that were lost since it was opened, and of no earlier ones:
    /// it must have been open before the first.
    pub(crate) fn settle(&self, disk: &File, path: &Path) -> Result<()> {
        #[cfg(test)]
        AT_SETTLE.with_borrow(|hook| hook.iter().for_each(|hook| hook()));
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

    /// A directory to mount on in a namespace of one's own, where nobody else sees what it hides.
    pub(crate) fn exec_place(&self) -> PathBuf {
        let place = self.path(EXEC_PLACE);
        if place.is_dir() { place } else { self.path("images") }
    }

    /// The directory of the objects: overlayfs's data-only layer.
    pub fn objects_dir(&self) -> PathBuf {
        self.path("objects")
    }

    /// The file that holds object `digest`.
    pub fn object_path(&self, digest: &Digest) -> PathBuf {
        self.path("objects").join(digest.object_path())
    }

    /// Marks an object or a self-contained image as damaged, by its permissions: no build relies on it any more, and the
    /// next that has its content puts it in its place.
    pub(crate) fn condemn(&self, path: &Path) -> Result<()> {
        fs::set_permissions(path, fs::Permissions::from_mode(0o000)).at(path)
    }

    /// Takes the mark of [`Store::condemn`] away.
    pub(crate) fn restore(&self, path: &Path) -> Result<()> {
        fs::set_permissions(path, fs::Permissions::from_mode(0o600)).at(path)
    }

    /// The metadata image of `digest`.
    pub fn tree_path(&self, digest: &Digest) -> PathBuf {
        self.path("trees").join(format!("{}.erofs", digest.hex()))
    }

    /// The self-contained image of `digest`, where one was written.
    pub fn full_path(&self, digest: &Digest) -> PathBuf {
        self.path("trees").join(format!("{}.full.erofs", digest.hex()))
    }

    /// Whether there is a self-contained image of `digest` that was not found damaged.
    pub(crate) fn has_full(&self, digest: &Digest) -> bool {
        fs::symlink_metadata(self.full_path(digest)).is_ok_and(|meta| !is_marked(&meta))
    }

    /// What programs of `digest` need at their start, where somebody has looked.
    pub(crate) fn profile_path(&self, digest: &Digest) -> PathBuf {
        self.path("trees").join(format!("{}.start", digest.hex()))
    }

    /// The metadata of `digest` as a directory; its files have the owners of whatever ids the user namespace `mapping`
    /// stands for, or all of them. They lead to the objects' digests, or if `shelved` to the image's shelf.
    pub(crate) fn directory_path(&self, digest: &Digest, mapping: Option<&str>, shelved: bool) -> PathBuf {
        let kind = mapping.map_or(ROOT_DIRECTORY.to_string(), |mapping| format!("{USER_DIRECTORY}-{mapping}"));
        let end = if shelved { SHELVED } else { "" };
        self.path("trees").join(format!("{}.{kind}{end}", digest.hex()))
    }

    /// The metadata directories there are.
    pub(crate) fn directories(&self) -> Result<BTreeMap<Digest, Vec<PathBuf>>> {
        let (trees, mut all) = (self.path("trees"), BTreeMap::<Digest, Vec<PathBuf>>::new());
        for entry in fs::read_dir(&trees).at(&trees)? {
            let entry = entry.at(&trees)?;
            let name = entry.file_name();
            let Some((hex, kind)) = name.as_encoded_bytes().split_at_checked(64) else { continue };
            // What has a further end are notes, or remains.
            let kind = kind.strip_prefix(b".").filter(|kind| !kind.contains(&b'.')).unwrap_or_default();
            let whole = [ROOT_DIRECTORY, USER_DIRECTORY].iter().any(|start| kind.starts_with(start.as_bytes()));
            if let (true, Some(digest)) = (whole, Digest::from_hex(hex)) {
                all.entry(digest).or_default().push(entry.path());
            }
        }
        Ok(all)
    }

    /// Whether there is anything of image `digest` here, or may be.
    pub(crate) fn knows(&self, digest: &Digest) -> bool {
        let paths = [self.tree_path(digest), self.sidecar_path(digest), self.full_path(digest)];
        paths.iter().any(|path| path.try_exists().unwrap_or(true))
    }

    fn sidecar_path(&self, digest: &Digest) -> PathBuf {
        self.path("trees").join(format!("{}.objects", digest.hex()))
    }

    /// What a mount of `digest` is called in the mount table, so that every mount names its store itself.
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
