//! The store: objects by digest, images by name, and the rules by which many builders and one collector meet.
//!
//! ```text
//! STORE/pagefold-image-store     format number and the store's own id
//! STORE/domains/DOMAIN/
//!     objects/xx/yyyy…           file contents by SHA-256, never changed once there
//!     trees/DIGEST.erofs         metadata images, named by their own SHA-256 (the image digest)
//!     trees/DIGEST.objects       the objects of each, for a fast mark
//!     images/NAME                a name's record: digest, counts, configuration (JSON)
//!     leases/ID                  what a build or mount in progress stands on; locked while it lives
//!     staging/ID/                what a build has written and not yet published
//!     cache/                     stat caches of source directories: digests of unchanged files
//!     lock, gc.lock, published   see below
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

use crate::digest::Digest;
use crate::erofs;
use crate::error::{At, Error, Result, input};
use crate::tree::{Data, INLINE_MAX, Tree};
use rustix::fs::{FlockOperation, RenameFlags};
use serde::{Deserialize, Serialize};
use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// The newest store format this program reads and the one it writes.
pub const FORMAT: u64 = 1;
/// The permission that an object found damaged has lost.
const OWNER_MAY_READ: u32 = 0o400;
const FORMAT_FILE: &str = "pagefold-image-store";
/// Staged bytes after which a build publishes its objects so far: what a killed import does not have to redo.
const BATCH_BYTES: u64 = 1 << 30;
/// Staged objects after which it does.
const BATCH_OBJECTS: usize = 16_384;

/// Objects claimed and looked for per hold of the domain lock: milliseconds.
const CLAIM_BATCH: usize = if cfg!(pagefold_stress) { 2 } else { 1024 };

#[derive(Serialize, Deserialize)]
struct Format {
    format: u64,
    id: String,
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

/// What an image's name stands for.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    /// The name it was stored under.
    pub name: String,
    /// SHA-256 of the metadata image: equal trees have equal digests.
    pub digest: Digest,
    /// Names in the tree (hard links count once each).
    pub entries: u64,
    /// Regular files (inodes).
    pub files: u64,
    /// Bytes of all regular files.
    pub bytes: u64,
    /// Different objects.
    pub objects: u64,
    /// Bytes of the different objects.
    pub object_bytes: u64,
    /// Size of the metadata image, bytes.
    pub metadata_bytes: u64,
    /// When it was published, seconds since 1970.
    pub created_s: u64,
    /// What it was built from.
    pub source: String,
    /// How to run it, from an OCI image's configuration.
    #[serde(default, skip_serializing_if = "RunConfig::is_empty")]
    pub config: RunConfig,
    /// What could not be stored, one line each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// How an image wants to be run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunConfig {
    /// Environment, NAME=VALUE.
    #[serde(default)]
    pub env: Vec<String>,
    /// Entry point, before the command.
    #[serde(default)]
    pub entrypoint: Vec<String>,
    /// Command.
    #[serde(default)]
    pub cmd: Vec<String>,
    /// Directory to start in.
    #[serde(default)]
    pub working_dir: String,
    /// User to run as, as the image names it.
    #[serde(default)]
    pub user: String,
}

impl RunConfig {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

fn make_dir(path: &Path, mode: u32) -> Result<()> {
    fs::DirBuilder::new().recursive(true).mode(mode).create(path).at(path)
}

/// An id no other process uses: 64 random bits, hexadecimal.
fn random_id() -> Result<String> {
    let mut bytes = [0u8; 8];
    File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes)).at("/dev/urandom")?;
    Ok(format!("{:016x}", u64::from_le_bytes(bytes)))
}

impl Store {
    /// Opens domain `domain` of the store at `root`, making both where they are missing.
    ///
    /// # Errors
    /// A store of a newer format, a domain name that is no name, the system's.
    pub fn open(root: &Path, domain: &str) -> Result<Self> {
        let proper = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if domain.is_empty() || domain.len() > 100 || domain.starts_with('.') || !domain.chars().all(proper) {
            return Err(input!("{domain:?}: a domain's name has letters, digits, - _ and . only"));
        }
        let format_path = root.join(FORMAT_FILE);
        make_dir(root, 0o700)?;
        let root = &root.canonicalize().at(root)?;
        if !format_path.exists() {
            // A first user beside us links the format before anything else, so entries without it are a stranger's.
            let mut entries = fs::read_dir(root).at(root)?.flatten();
            let foreign = entries.any(|entry| !entry.file_name().as_encoded_bytes().starts_with(b"."));
            if foreign && !format_path.exists() {
                return Err(Error::Refused(format!(
                    "{}: neither empty nor an image store; give --store another directory",
                    root.display()
                )));
            }
            let text = serde_json::to_vec(&Format { format: FORMAT, id: random_id()? }).expect("plain data");
            let staged = root.join(format!(".{}", random_id()?));
            let mut file = File::options().write(true).create_new(true).mode(0o600).open(&staged).at(&staged)?;
            file.write_all(&text).and_then(|()| file.sync_all()).at(&staged)?;
            // Two first users at once: the first link wins, the other reads it.
            match fs::hard_link(&staged, &format_path) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error).at(&format_path),
                _ => fs::remove_file(&staged).at(&staged)?,
            }
        }
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
        Ok(Self { root: root.into(), domain: domain.into(), dir, id: format.id, sync: true })
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
        fs::symlink_metadata(self.full_path(digest)).is_ok_and(|meta| meta.mode() & OWNER_MAY_READ != 0)
    }

    /// What programs of `digest` need at their start, where somebody has looked.
    pub(crate) fn profile_path(&self, digest: &Digest) -> PathBuf {
        self.path("trees").join(format!("{}.start", digest.hex()))
    }

    /// The metadata of `digest` as a directory, of root's or a user namespace's kind.
    pub(crate) fn directory_path(&self, digest: &Digest, user: bool) -> PathBuf {
        self.path("trees").join(format!("{}.{}", digest.hex(), if user { "userdir" } else { "rootdir" }))
    }

    /// Whether there is a metadata directory of `digest`.
    pub(crate) fn has_directory(&self, digest: &Digest) -> bool {
        [false, true].iter().any(|user| self.directory_path(digest, *user).exists())
    }

    /// Whether there is anything of image `digest` here.
    pub(crate) fn knows(&self, digest: &Digest) -> bool {
        [self.tree_path(digest), self.sidecar_path(digest), self.full_path(digest)].iter().any(|path| path.exists())
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

    /// Locks the domain; shared for those who rely on objects, exclusive for who deletes.
    pub(crate) fn lock(&self, exclusive: bool) -> Result<Lock> {
        let how = if exclusive { FlockOperation::LockExclusive } else { FlockOperation::LockShared };
        Lock::take(&self.path("lock"), how).map(|lock| lock.expect("waited for"))
    }

    /// Makes the caller the domain's only collector, unless there is one.
    pub(crate) fn lock_collector(&self) -> Result<Option<Lock>> {
        Lock::take(&self.path("gc.lock"), FlockOperation::NonBlockingLockExclusive)
    }

    fn image_path(&self, name: &str) -> PathBuf {
        let mut file = String::new();
        for byte in name.bytes() {
            match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' => file.push(byte.into()),
                b'.' if !file.is_empty() => file.push('.'),
                _ => file.push_str(&format!("%{byte:02x}")),
            }
        }
        self.path("images").join(file)
    }

    /// Refuses what cannot be an image's name; a build that asks first is not for nothing.
    ///
    /// # Errors
    /// A name that is empty, too long, or has control characters.
    pub fn check_name(&self, name: &str) -> Result<()> {
        if name.is_empty() || name.len() > 200 || name.chars().any(char::is_control) {
            return Err(input!("{name:?}: an image's name has 1 to 200 bytes and no control characters"));
        }
        let bytes = self.image_path(name).file_name().map_or(0, |file| file.len());
        if bytes > 255 {
            return Err(input!(
                "{name:?}: too long; all but letters, digits, - _ and . takes three bytes of a file name, {bytes} of 255 here"
            ));
        }
        Ok(())
    }

    /// The record of image `name`.
    ///
    /// # Errors
    /// [`Error::NoImage`]; a damaged record.
    pub fn image(&self, name: &str) -> Result<Record> {
        let path = self.image_path(name);
        match fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text)
                .map_err(|error| Error::Damaged(format!("{}: {error}; build the image again", path.display()))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(Error::NoImage { name: name.into(), domain: self.domain.clone(), store: self.root.clone() })
            }
            Err(error) => Err(error).at(path),
        }
    }

    /// All images, by name.
    ///
    /// # Errors
    /// A damaged record, the system's.
    pub fn images(&self) -> Result<Vec<Record>> {
        let dir = self.path("images");
        let mut all = Vec::new();
        for entry in fs::read_dir(&dir).at(&dir)? {
            let path = entry.at(&dir)?.path();
            let text = match fs::read(&path) {
                // Removed meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                other => other.at(&path)?,
            };
            let record: Record = serde_json::from_slice(&text)
                .map_err(|error| Error::Damaged(format!("{}: {error}; build the image again", path.display())))?;
            all.push(record);
        }
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }

    /// Forgets the name; the collector takes what nothing needs any more.
    ///
    /// # Errors
    /// [`Error::NoImage`].
    pub fn remove(&self, name: &str) -> Result<()> {
        let _shared = self.lock(false)?;
        let path = self.image_path(name);
        match fs::remove_file(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(Error::NoImage { name: name.into(), domain: self.domain.clone(), store: self.root.clone() })
            }
            other => other.at(path),
        }
    }

    /// The bytes of a metadata image, checked against the digest that names it.
    ///
    /// # Errors
    /// [`Error::Damaged`] when it is missing or not itself any more.
    pub fn tree_bytes(&self, digest: &Digest) -> Result<Vec<u8>> {
        self.tree_whole(digest, |mut file| {
            let mut bytes = Vec::new();
            file.read_to_end(&mut bytes).map(|_| (Digest::of(&bytes), bytes))
        })
    }

    /// Checks a metadata image against the digest that names it.
    ///
    /// # Errors
    /// See [`Store::tree_bytes`].
    pub(crate) fn check_tree(&self, digest: &Digest) -> Result<()> {
        self.tree_whole(digest, |mut file| crate::digest::hash_reader(&mut file).map(|(found, _)| (found, ())))
    }

    /// What `read` makes of a metadata image, if it finds the digest that names it.
    fn tree_whole<T>(&self, digest: &Digest, read: impl FnOnce(File) -> io::Result<(Digest, T)>) -> Result<T> {
        let path = self.tree_path(digest);
        let (found, value) = match File::open(&path).and_then(read) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(Error::Damaged(format!("{}: missing; build the image again", path.display())));
            }
            other => other.at(&path)?,
        };
        if found != *digest {
            return Err(Error::Damaged(format!("{}: damaged; build the image again", path.display())));
        }
        Ok(value)
    }

    /// The tree of a metadata image.
    ///
    /// # Errors
    /// See [`Store::tree_bytes`].
    pub fn tree(&self, digest: &Digest) -> Result<Tree> {
        erofs::read(&self.tree_bytes(digest)?, erofs::Limits::default())
    }

    /// The objects of a tree, sorted: digest, bytes, files that show it.
    ///
    /// # Errors
    /// See [`Store::tree_bytes`].
    pub fn tree_objects(&self, digest: &Digest) -> Result<Vec<(Digest, u64, u32)>> {
        if let Some(list) = fs::read(self.sidecar_path(digest)).ok().and_then(|bytes| decode_objects(&bytes)) {
            return Ok(list);
        }
        // The list is only a shortcut; the metadata image is the truth.
        Ok(self.tree(digest)?.objects())
    }

    /// The record of image `name`, and a lease that keeps the image from the collector, whatever becomes of the name.
    ///
    /// # Errors
    /// [`Error::NoImage`]; a damaged record.
    pub fn hold(&self, name: &str) -> Result<(Record, Lease<'_>)> {
        let lease = Lease::new(self)?;
        Ok((lease.claim_image(name)?, lease))
    }

    /// Starts a build: a lease and a place to stage in.
    ///
    /// # Errors
    /// The system's.
    pub fn build(&self) -> Result<Build<'_>> {
        let lease = Lease::new(self)?;
        let staging = self.path("staging").join(&lease.id);
        make_dir(&staging, 0o700)?;
        Ok(Build {
            store: self,
            lease,
            disk: File::open(&staging).at(&staging)?,
            staging,
            staged: Mutex::default(),
            counter: AtomicU64::new(0),
            stats: BuildStats::default(),
        })
    }
}

const OBJECTS_MAGIC: &[u8; 8] = b"PFOBJS01";
const OBJECT_ENTRY: usize = 44;

/// The list of a tree's objects as the sidecar holds it: magic, entries, and their SHA-256's first 8 bytes.
pub(crate) fn encode_objects(list: &[(Digest, u64, u32)]) -> Vec<u8> {
    let mut out = OBJECTS_MAGIC.to_vec();
    for (digest, size, files) in list {
        out.extend(digest.0);
        out.extend(size.to_le_bytes());
        out.extend(files.to_le_bytes());
    }
    let check = Digest::of(&out);
    out.extend(&check.0[..8]);
    out
}

/// Reads a sidecar; `None` when it is not exactly one.
pub fn decode_objects(bytes: &[u8]) -> Option<Vec<(Digest, u64, u32)>> {
    let body = bytes.get(..bytes.len().checked_sub(8)?)?;
    if Digest::of(body).0[..8] != bytes[body.len()..] {
        return None;
    }
    let list = body.strip_prefix(OBJECTS_MAGIC)?;
    if !list.len().is_multiple_of(OBJECT_ENTRY) {
        return None;
    }
    let entry = |raw: &[u8]| {
        let digest = Digest(raw[..32].try_into().expect("32 bytes"));
        let size = u64::from_le_bytes(raw[32..40].try_into().expect("8 bytes"));
        (digest, size, u32::from_le_bytes(raw[40..44].try_into().expect("4 bytes")))
    };
    Some(list.chunks_exact(OBJECT_ENTRY).map(entry).collect())
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

fn lock_target(path: &Path) -> Result<File> {
    File::options().read(true).write(true).create(true).truncate(false).mode(0o600).open(path).at(path)
}

/// Whether the object at `path` is there with its size, and was not found damaged.
fn is_whole(path: &Path, size: u64) -> bool {
    fs::symlink_metadata(path).is_ok_and(|meta| meta.len() == size && meta.mode() & OWNER_MAY_READ != 0)
}

/// What a build or a mount in progress stands on. The file is locked as long as its owner lives.
#[derive(Debug)]
pub struct Lease<'a> {
    store: &'a Store,
    id: String,
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
    fn claim<T>(&self, digests: &[Digest], look: impl FnOnce() -> T) -> Result<T> {
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
        self.claim(&[*digest], || self.store.tree_path(digest).exists())
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

/// What a build did.
#[derive(Debug, Default)]
pub struct BuildStats {
    /// Objects that were new to the store.
    pub objects_new: AtomicU64,
    /// Their bytes.
    pub bytes_new: AtomicU64,
    /// Files whose object was there already.
    pub objects_found: AtomicU64,
    /// Bytes read and hashed.
    pub bytes_hashed: AtomicU64,
    /// Files whose digest the stat cache knew.
    pub files_unchanged: AtomicU64,
}

#[derive(Default)]
struct Staged {
    /// Digest to staging file.
    files: HashMap<Digest, PathBuf>,
    bytes: u64,
    /// Digests this build has claimed and seen in the store.
    known: HashSet<Digest>,
}

/// A build in progress; dropping it undoes what it has not published.
pub struct Build<'a> {
    store: &'a Store,
    lease: Lease<'a>,
    staging: PathBuf,
    /// The staging directory, open since before the first write.
    disk: File,
    staged: Mutex<Staged>,
    counter: AtomicU64,
    /// What was done so far.
    pub stats: BuildStats,
}

impl Build<'_> {
    /// The store built into.
    pub fn store(&self) -> &Store {
        self.store
    }

    /// Whether the store has object `digest`; if so it stays until this build ends.
    ///
    /// # Errors
    /// The system's.
    pub fn has(&self, digest: &Digest, size: u64) -> Result<bool> {
        {
            let staged = self.staged.lock().expect("no panic while held");
            if staged.known.contains(digest) || staged.files.contains_key(digest) {
                return Ok(true);
            }
        }
        let path = self.store.object_path(digest);
        let there = || is_whole(&path, size);
        // Only what is there needs the claim, and then a second look: what is not will be claimed when it is published.
        if !there() {
            return Ok(false);
        }
        let found = self.lease.claim(&[*digest], there)?;
        if found {
            self.staged.lock().expect("no panic while held").known.insert(*digest);
            self.stats.objects_found.fetch_add(1, Ordering::Relaxed);
        }
        Ok(found)
    }

    /// [`Build::has`] for many at once, in as many steps against the collector as keep each short.
    ///
    /// # Errors
    /// The system's.
    pub fn has_all(&self, wanted: &[(Digest, u64)]) -> Result<Vec<bool>> {
        let mut found = Vec::with_capacity(wanted.len());
        for piece in wanted.chunks(CLAIM_BATCH) {
            let digests: Vec<Digest> = piece.iter().map(|(digest, _)| *digest).collect();
            self.lease.claim(&digests, || {
                found.extend(piece.iter().map(|(digest, size)| is_whole(&self.store.object_path(digest), *size)));
            })?;
        }
        let there = || wanted.iter().zip(&found).filter(|(_, found)| **found).map(|((digest, _), _)| *digest);
        self.stats.objects_found.fetch_add(there().count() as u64, Ordering::Relaxed);
        self.staged.lock().expect("no panic while held").known.extend(there());
        Ok(found)
    }

    /// A path of its own in the staging directory.
    pub(crate) fn scratch_path(&self) -> PathBuf {
        self.staging.join(self.counter.fetch_add(1, Ordering::Relaxed).to_string())
    }

    fn scratch(&self) -> Result<(PathBuf, File)> {
        let path = self.scratch_path();
        let file = File::options().read(true).write(true).create_new(true).mode(0o600).open(&path).at(&path)?;
        Ok((path, file))
    }

    /// A file without a name for what must be read twice; gone when closed.
    pub(crate) fn spool(&self) -> Result<File> {
        let (path, file) = self.scratch()?;
        fs::remove_file(&path).at(&path)?;
        Ok(file)
    }

    fn stage(&self, digest: Digest, size: u64, path: PathBuf) -> Result<()> {
        let mut staged = self.staged.lock().expect("no panic while held");
        if staged.files.contains_key(&digest) {
            drop(staged);
            return fs::remove_file(&path).at(&path);
        }
        staged.files.insert(digest, path);
        staged.bytes += size;
        self.stats.objects_new.fetch_add(1, Ordering::Relaxed);
        self.stats.bytes_new.fetch_add(size, Ordering::Relaxed);
        if staged.bytes >= BATCH_BYTES || staged.files.len() >= BATCH_OBJECTS {
            return self.flush(&mut staged);
        }
        Ok(())
    }

    /// Stores a file's bytes.
    ///
    /// # Errors
    /// The system's; [`Error::Full`].
    pub fn put_bytes(&self, bytes: &[u8]) -> Result<Data> {
        let size = bytes.len() as u64;
        if size <= INLINE_MAX {
            return Ok(Data::Inline(bytes.into()));
        }
        let digest = Digest::of(bytes);
        self.stats.bytes_hashed.fetch_add(size, Ordering::Relaxed);
        if !self.has(&digest, size)? {
            let (path, mut file) = self.scratch()?;
            file.write_all(bytes).at(&path)?;
            self.stage(digest, size, path)?;
        }
        Ok(Data::Object(digest, size))
    }

    /// Stores everything `reader` gives, without holding it in memory; `tick` hears of each piece.
    ///
    /// # Errors
    /// The reader's, the system's; [`Error::Full`].
    pub fn put_reader(&self, reader: &mut impl Read, what: &Path, mut tick: impl FnMut(u64)) -> Result<Data> {
        thread_local! {
            /// One per thread: a fresh megabyte for each file would cost more than most files do.
            static BUFFER: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
        }
        let mut buffer = BUFFER.take();
        buffer.resize(1 << 20, 0);
        let result = self.put_pieces(reader, what, &mut tick, &mut buffer);
        BUFFER.set(buffer);
        result
    }

    fn put_pieces(
        &self,
        reader: &mut impl Read,
        what: &Path,
        tick: &mut impl FnMut(u64),
        buffer: &mut [u8],
    ) -> Result<Data> {
        let mut filled = 0;
        while filled < buffer.len() {
            match reader.read(&mut buffer[filled..]) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error).at(what),
            }
        }
        tick(filled as u64);
        if filled < buffer.len() {
            return self.put_bytes(&buffer[..filled]);
        }
        use sha2::Digest as _;
        let (path, mut file) = self.scratch()?;
        let (mut hasher, mut size) = (sha2::Sha256::new(), 0u64);
        while filled > 0 {
            hasher.update(&buffer[..filled]);
            file.write_all(&buffer[..filled]).at(&path)?;
            size += filled as u64;
            filled = loop {
                match reader.read(buffer) {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    other => break other.at(what)?,
                }
            };
            tick(filled as u64);
        }
        let digest = Digest(hasher.finalize().into());
        self.stats.bytes_hashed.fetch_add(size, Ordering::Relaxed);
        if self.has(&digest, size)? {
            fs::remove_file(&path).at(&path)?;
        } else {
            self.stage(digest, size, path)?;
        }
        Ok(Data::Object(digest, size))
    }

    /// Makes what is staged durable and gives it its names.
    fn flush(&self, staged: &mut Staged) -> Result<()> {
        if staged.files.is_empty() {
            return Ok(());
        }
        self.store.settle(&self.disk, &self.staging)?;
        let digests: Vec<Digest> = staged.files.keys().copied().collect();
        self.lease.claim(&digests, || {
            for (digest, path) in staged.files.drain() {
                let target = self.store.object_path(&digest);
                let result = rename_new(&path, &target);
                let result = match result {
                    Err(rustix::io::Errno::NOENT) => {
                        make_dir(target.parent().expect("objects/xx"), 0o700)?;
                        rename_new(&path, &target)
                    }
                    other => other,
                };
                match result {
                    Err(rustix::io::Errno::EXIST) => {
                        if is_whole(&target, fs::symlink_metadata(&path).at(&path)?.len()) {
                            fs::remove_file(&path).at(&path)?;
                        } else {
                            // Damaged from outside: ours was hashed a moment ago.
                            fs::rename(&path, &target).at(&target)?;
                        }
                    }
                    other => other.at(&target)?,
                }
                staged.known.insert(digest);
            }
            Ok(())
        })??;
        staged.bytes = 0;
        Ok(())
    }

    /// Publishes `tree` under `name`.
    ///
    /// # Errors
    /// The system's; [`Error::Full`]. The name then still stands for what it stood for before.
    pub fn publish(
        &self,
        name: &str,
        tree: &Tree,
        source: &str,
        config: RunConfig,
        notes: Vec<String>,
    ) -> Result<Record> {
        self.store.check_name(name)?;
        let image = erofs::write(tree, erofs::Layout::Metadata)?;
        let digest = Digest::of(&image.head);
        let objects = tree.objects();
        let (mut entries, mut bytes) = (0, 0);
        tree.walk(|_, _| entries += 1);
        let (reachable, _) = tree.reachable();
        let sizes = reachable.iter().filter_map(|&id| match &tree.inode(id).kind {
            crate::tree::Kind::File(data) => Some(data.size()),
            _ => None,
        });
        let files = sizes.inspect(|size| bytes += size).count() as u64;
        let record = Record {
            name: name.into(),
            digest,
            entries: entries - 1,
            files,
            bytes,
            objects: objects.len() as u64,
            object_bytes: objects.iter().map(|object| object.1).sum(),
            metadata_bytes: image.head.len() as u64,
            created_s: std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs()),
            source: source.into(),
            config,
            notes,
        };
        let mut staged = self.staged.lock().expect("no panic while held");
        let stage = |bytes: &[u8]| -> Result<PathBuf> {
            let (path, mut file) = self.scratch()?;
            file.write_all(bytes).at(&path)?;
            Ok(path)
        };
        let tree_staged = stage(&image.head)?;
        let list_staged = stage(&encode_objects(&objects))?;
        let record_staged = stage(&serde_json::to_vec_pretty(&record).expect("plain data"))?;
        if staged.files.is_empty() {
            self.store.settle(&self.disk, &self.staging)?;
        }
        self.flush(&mut staged)?;
        drop(staged);
        self.lease.claim(&[digest], || {
            let (tree_path, list_path) = (self.store.tree_path(&digest), self.store.sidecar_path(&digest));
            // A mount that no table shows is known by its hold on this very file: one that is whole is never replaced.
            if same_content(&tree_path, &image.head) {
                fs::remove_file(&tree_staged).at(&tree_staged)?;
            } else {
                fs::rename(&tree_staged, &tree_path).at(&tree_path)?;
            }
            fs::rename(&list_staged, &list_path).at(&list_path)?;
            // The collector reads this to learn of images published since it listed them.
            let log = self.store.path("published");
            let mut file = File::options().append(true).create(true).mode(0o600).open(&log).at(&log)?;
            file.write_all(&digest.0).at(&log)?;
            // Every name the record relies on is durable before the record is; its content is already.
            self.store.settle(&self.disk, &log)?;
            let path = self.store.image_path(name);
            fs::rename(&record_staged, &path).at(&path)?;
            let images = self.store.path("images");
            if self.store.sync {
                File::open(&images).and_then(|dir| dir.sync_all()).at(&images)?;
            }
            Ok(())
        })??;
        Ok(record)
    }
}

/// Whether the file at `path` holds exactly `bytes`.
fn same_content(path: &Path, bytes: &[u8]) -> bool {
    let Ok(mut file) = File::open(path) else { return false };
    let (mut piece, mut at) = (vec![0; 1 << 16], 0);
    loop {
        match file.read(&mut piece) {
            Ok(0) => return at == bytes.len(),
            Ok(count) if bytes.get(at..at + count) == Some(&piece[..count]) => at += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            _ => return false,
        }
    }
}

fn rename_new(from: &Path, to: &Path) -> rustix::io::Result<()> {
    use rustix::fs::CWD;
    match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // File systems without the flag (NFS): a link refuses an existing name just as well.
        Err(rustix::io::Errno::INVAL) => rustix::fs::link(from, to).and_then(|()| rustix::fs::unlink(from)),
        other => other,
    }
}

impl Drop for Build<'_> {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.staging);
    }
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
