//! The collector: takes what no image, no mount and no build needs, and only that.
//!
//! It reads the roots under the domain lock, marks without it, and deletes in
//! batches under the lock exclusive. Before each batch it reads again what may have changed since: the leases (small)
//! and the tail of the publish log. A digest that is in use at that moment stays, so neither a build nor a mount has to
//! wait for the whole run, and none loses an object it has seen.

use crate::digest::Digest;
use crate::dirs::{disk_bytes, remove_tree, staged_bytes};
use crate::error::{At, Error, Result};
use crate::mounts::{self, Held, held_by_kernel};
use crate::shelf;
use crate::store::{DamagedImage, ROOT_DIRECTORY, SHELVED, Store, USER_DIRECTORY, random_id};
use rustix::fs::FlockOperation;
use rustix::mount::UnmountFlags;
use std::collections::{BTreeMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Objects deleted per hold of the domain lock: tens of milliseconds.
const BATCH: usize = if cfg!(pagefold_stress) { 2 } else { 1024 };

/// How long the stat cache of a directory is of use: 30 days.
const CACHE_AGE: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// Lines that tell of what could not be removed, at most.
const MOST_FAILED: usize = 16;

/// What a collection did.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Stats {
    /// Images by name.
    pub images: u64,
    /// Metadata images kept: by a name, a mount or a lease.
    pub trees_kept: u64,
    /// Of those, the ones that are kept because it cannot be seen from here whether somebody has them mounted: by a
    /// metadata directory, or on a file system that does not tell who has a file open.
    pub trees_unseen: u64,
    /// Metadata images removed.
    pub trees_removed: u64,
    /// Objects kept.
    pub objects_kept: u64,
    /// Objects removed, or that would be with `dry_run`.
    pub objects_removed: u64,
    /// Their bytes.
    pub bytes_removed: u64,
    /// Bytes of all else that was removed, or would be: metadata images, what was made of them, what dead builds had staged,
    /// stat caches of long ago.
    pub other_bytes_removed: u64,
    /// Builds that had died, whose remains were removed.
    pub builds_removed: u64,
    /// Files and trees that were to be removed and could not be: all else was collected.
    pub failures: u64,
    /// Why, one line each, for the first of them.
    pub failed: Vec<String>,
    /// Images whose records cannot be read. While there are any every tree is kept, with its objects: it may be theirs.
    pub damaged: Vec<DamagedImage>,
}

impl Stats {
    /// Whether something was removed. That one thing resists keeps nobody from removing the next: it is noted.
    fn removed(&mut self, result: Result<()>) -> bool {
        match result {
            Ok(()) => return true,
            Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => {}
            Err(error) => {
                self.failures += 1;
                if self.failed.len() < MOST_FAILED {
                    self.failed.push(error.to_string());
                }
            }
        }
        false
    }
}

/// The entries of a directory, all of them: what an error hides would pass for what is not there.
fn entries(dir: &Path) -> Result<Vec<fs::DirEntry>> {
    fs::read_dir(dir).at(dir)?.map(|entry| entry.at(dir)).collect()
}

/// What came of something at `path`, unless that has gone meanwhile. What only cannot be reached is still there.
fn unless_gone<T>(result: io::Result<T>, path: &Path) -> Result<Option<T>> {
    match result {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        other => other.map(Some).at(path),
    }
}

/// Opens a lease, unless it has gone. One that is closed to us is left from when root could build in a user's store; what it
/// stands on nobody but he can tell.
fn open_lease(path: &Path) -> Result<Option<File>> {
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

/// The digests that builds and mounts in progress stand on, all but `dead` ones.
fn leased(store: &Store, dead: &HashSet<OsString>) -> Result<HashSet<u128>> {
    let mut all = HashSet::new();
    for entry in entries(&store.path("leases"))? {
        let path = entry.path();
        if dead.contains(&entry.file_name()) {
            continue;
        }
        if let Some(mut file) = open_lease(&path)? {
            let mut bytes = Vec::new();
            file.read_to_end(&mut bytes).at(&path)?;
            all.extend(bytes.chunks_exact(32).map(|raw| Digest(raw.try_into().expect("32 bytes")).key()));
        }
    }
    Ok(all)
}

/// Removes leases nobody holds and what their builds had staged. A dry run only says which leases that would be.
fn remove_dead_builds(store: &Store, dry_run: bool, stats: &mut Stats) -> Result<HashSet<OsString>> {
    let (leases, staging) = (store.path("leases"), store.path("staging"));
    let mut dead = HashSet::new();
    for entry in entries(&leases)? {
        let path = entry.path();
        let Some(file) = open_lease(&path)? else { continue };
        if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
            if dry_run {
                stats.builds_removed += 1;
                dead.insert(entry.file_name());
                continue;
            }
            // Ours now: whoever created it and has not locked it yet will find it gone, and try again. Its owner may
            // have ended well between our two looks.
            stats.builds_removed += u64::from(stats.removed(fs::remove_file(&path).at(&path)));
        }
    }
    for entry in entries(&staging)? {
        // A staging directory is made after its lease and removed before it.
        let lease = leases.join(entry.file_name());
        if dead.contains(&entry.file_name()) || !lease.try_exists().at(&lease)? {
            let (path, bytes) = (entry.path(), staged_bytes(&entry.path()));
            let remove = || {
                let _ = rustix::mount::unmount(path.join("meta"), UnmountFlags::DETACH);
                remove_tree(&path)
            };
            if dry_run || stats.removed(remove()) {
                stats.other_bytes_removed += bytes;
            }
        }
    }
    Ok(dead)
}

/// Removes what builds have left that died, for the next that needs the room. What resists is for the collector to tell.
pub(crate) fn clear_dead_builds(store: &Store) {
    let _ = remove_dead_builds(store, false, &mut Stats::default());
}

/// Removes the stat caches of directories that were not built for long: each build writes its own anew.
fn remove_old_caches(store: &Store, dry_run: bool, stats: &mut Stats) -> Result<()> {
    for entry in entries(&store.path("cache"))? {
        let age = entry.metadata().ok().and_then(|meta| meta.modified().ok()?.elapsed().ok());
        if age.is_some_and(|age| age > CACHE_AGE) {
            let bytes = bytes_of(&entry);
            if dry_run || stats.removed(fs::remove_file(entry.path()).at(entry.path())) {
                stats.other_bytes_removed += bytes;
            }
        }
    }
    Ok(())
}

struct Live {
    trees: HashSet<Digest>,
    objects: HashSet<u128>,
}

impl Live {
    /// Marks a tree and its objects.
    fn mark(&mut self, store: &Store, digest: Digest) -> Result<()> {
        if self.trees.insert(digest) {
            // Without the list nobody knows what the image needs: then nothing may go.
            let objects = store.tree_objects(&digest).map_err(|error| {
                let names = store.names_of(&digest);
                Error::Damaged(format!("gc removes nothing while an image cannot be read ({names}): {error}, or forget it (`pagefold image rm`)"))
            })?;
            self.objects.extend(objects.iter().map(|object| object.0.key()));
        }
        Ok(())
    }
}

/// Collects a domain.
///
/// # Errors
/// A second collector at work; an image whose object list cannot be read; the system's.
pub fn collect(store: &Store, dry_run: bool) -> Result<Stats> {
    let Some(_only) = store.lock_collector()? else {
        return Err(Error::Refused("gc: another collection is running; wait for it".into()));
    };
    let mut stats = Stats::default();
    let dead = remove_dead_builds(store, dry_run, &mut stats)?;
    remove_old_caches(store, dry_run, &mut stats)?;

    let mut live = Live { trees: HashSet::new(), objects: HashSet::new() };
    let log_path = store.path("published");
    let lock = store.lock(true)?;
    let records = store.records()?;
    (stats.images, stats.damaged) = (records.images.len() as u64, records.damaged);
    let mut roots: Vec<Digest> = records.images.iter().map(|image| image.digest).collect();
    // Leases before mounts: who mounts holds his lease until the mount is in the table, and nobody takes a new one
    // while we hold the lock.
    let leases = leased(store, &dead)?;
    let mounted = mounts::view(store)?;
    if mounted.silent > 0 {
        return Err(Error::Refused(format!(
            "gc: {} processes do not answer in /proc, and what they have mounted is unknown; try again, or end them (state D in ps)",
            mounted.silent
        )));
    }
    roots.extend(mounted.mounts.iter().map(|mount| mount.digest));
    let trees = store.path("trees");
    let named: HashSet<Digest> = roots.iter().copied().collect();
    let (mut forms, mut remains) = (BTreeMap::<Digest, Vec<fs::DirEntry>>::new(), Vec::new());
    // Metadata directories of a kind that no mount asks for any more, and such mounts as there are show in a table.
    let mut outdated = Vec::new();
    let in_use = |digest: &Digest| {
        mounted.partial || leases.contains(&digest.key()) || mounted.mounts.iter().any(|mount| mount.digest == *digest)
    };
    for entry in entries(&trees)? {
        let name = entry.file_name();
        let Some(digest) = name.as_bytes().get(..64).and_then(Digest::from_hex) else { continue };
        if name.as_bytes().ends_with(DOOMED.as_bytes()) {
            // What a collector that died has left.
            remains.push(entry.path());
        } else if !named.contains(&digest) {
            forms.entry(digest).or_default().push(entry);
        } else if is_outdated(&trees, name.as_bytes()) && !in_use(&digest) {
            outdated.push(entry);
        }
    }
    let mut doomed = Vec::new();
    for (digest, files) in forms {
        // Nobody but the tables knows of a mount by a metadata directory.
        let unseen = || mounted.partial && files.iter().any(|file| is_dir(file) && !is_shelf(&file.file_name()));
        // Any tree may be what a damaged record names. Without its metadata image it is nobody's any more.
        let tree = store.tree_path(&digest);
        let may_be_named = !stats.damaged.is_empty() && tree.try_exists().at(&tree)?;
        let known = may_be_named || leases.contains(&digest.key());
        let held = if known { Held::Yes } else { held_by_kernel(store, &digest)? };
        match held {
            Held::No if !unseen() => doomed.push(files),
            held => {
                stats.trees_unseen += u64::from(held != Held::Yes);
                roots.push(digest);
            }
        }
    }
    // From here on the log tells of what is published; all before is in `roots`.
    let log_from = if dry_run { read_log(store)?.len() } else { 0 };
    if !dry_run {
        fs::write(&log_path, b"").at(&log_path)?;
        remove_image_files(&outdated, &mut remains, &mut stats);
        doomed.retain(|files| remove_image_files(files, &mut remains, &mut stats));
    }
    drop(lock);
    stats.trees_removed = doomed.len() as u64;
    if dry_run {
        stats.other_bytes_removed += outdated.iter().chain(doomed.iter().flatten()).map(bytes_of).sum::<u64>();
    }
    for path in remains {
        let bytes = bytes_below(&path);
        if dry_run || stats.removed(remove_tree(&path)) {
            stats.other_bytes_removed += bytes;
        }
    }
    for digest in roots {
        live.mark(store, digest)?;
    }
    stats.trees_kept = live.trees.len() as u64;

    let mut batch: Vec<(u128, u64, PathBuf)> = Vec::new();
    let objects = store.objects_dir();
    for shard in entries(&objects)? {
        let prefix = shard.file_name().to_string_lossy().into_owned();
        for entry in entries(&shard.path())? {
            let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
            let Some(digest) = Digest::from_hex(name.as_bytes()) else { continue };
            if live.objects.contains(&digest.key()) {
                stats.objects_kept += 1;
                continue;
            }
            let size = entry.metadata().map_or(0, |meta| meta.len());
            batch.push((digest.key(), size, entry.path()));
            if batch.len() >= BATCH {
                delete(store, &mut live, &mut batch, dry_run.then_some(log_from), &dead, &mut stats)?;
            }
        }
    }
    delete(store, &mut live, &mut batch, dry_run.then_some(log_from), &dead, &mut stats)?;
    Ok(stats)
}

/// The digests published since the log was last emptied.
fn read_log(store: &Store) -> Result<Vec<Digest>> {
    let path = store.path("published");
    let log = unless_gone(fs::read(&path), &path)?.unwrap_or_default();
    Ok(log.chunks_exact(32).map(|raw| Digest(raw.try_into().expect("32 bytes"))).collect())
}

fn delete(
    store: &Store,
    live: &mut Live,
    batch: &mut Vec<(u128, u64, PathBuf)>,
    dry_run: Option<usize>,
    dead: &HashSet<OsString>,
    stats: &mut Stats,
) -> Result<()> {
    let _exclusive = store.lock(true)?;
    let leased = leased(store, dead)?;
    // A dry run leaves the log as it is and starts where it ended.
    for digest in read_log(store)?.into_iter().skip(dry_run.unwrap_or(0)) {
        // The log is written just before the name: a build killed between them leaves a digest without image.
        let tree = store.tree_path(&digest);
        if tree.try_exists().at(&tree)? {
            live.mark(store, digest)?;
        }
    }
    for (key, size, path) in batch.drain(..) {
        if live.objects.contains(&key) || leased.contains(&key) {
            stats.objects_kept += 1;
            continue;
        }
        if dry_run.is_none() && !stats.removed(fs::remove_file(&path).at(&path)) {
            continue;
        }
        stats.objects_removed += 1;
        stats.bytes_removed += size;
    }
    Ok(())
}

/// What an entry takes: a directory with all below it.
fn bytes_of(file: &fs::DirEntry) -> u64 {
    if is_dir(file) { bytes_below(&file.path()) } else { file.metadata().map_or(0, |meta| meta.len()) }
}

/// What a directory takes with all below it; a shelf's objects are counted under their own names.
fn bytes_below(path: &Path) -> u64 {
    if is_shelf(path.file_name().unwrap_or_default()) { shelf::disk_bytes(path) } else { disk_bytes(path) }
}

/// Whether a name is a shelf's, or of what is left of one.
fn is_shelf(name: &OsStr) -> bool {
    let end = name.as_bytes().get(64..).unwrap_or_default();
    end.split(|byte| *byte == b'.').nth(1) == Some(shelf::END.as_bytes())
}

/// Whether a name is that of a metadata directory that is no longer mounted: one for all mappings of ids, or one that leads to
/// the objects' digests where there is one that leads to the shelf.
fn is_outdated(trees: &Path, name: &[u8]) -> bool {
    let kind = name[64..].strip_prefix(b".").filter(|kind| !kind.contains(&b'.')).unwrap_or_default();
    let is_directory = [ROOT_DIRECTORY, USER_DIRECTORY].iter().any(|start| kind.starts_with(start.as_bytes()));
    let shelved = || trees.join(OsStr::from_bytes(&[name, SHELVED.as_bytes()].concat())).exists();
    is_directory && !kind.ends_with(SHELVED.as_bytes()) && (kind == USER_DIRECTORY.as_bytes() || shelved())
}

fn is_dir(file: &fs::DirEntry) -> bool {
    file.file_type().map_or(true, |kind| kind.is_dir())
}

/// The end of the names of metadata directories that are being removed.
const DOOMED: &str = ".doomed";

/// Removes the files of an image, after its metadata directories were taken out of their names in one step: half a directory
/// is never taken for all of it. They are for `remove_tree`, later. Says whether nothing is left under a name.
fn remove_image_files(files: &[fs::DirEntry], remains: &mut Vec<PathBuf>, stats: &mut Stats) -> bool {
    let (dirs, files): (Vec<_>, Vec<_>) = files.iter().partition(|file| is_dir(file));
    let doom = |path: PathBuf| -> Result<PathBuf> {
        let mut doomed = path.clone().into_os_string();
        doomed.push(format!(".{}{DOOMED}", random_id()?));
        fs::rename(&path, &doomed).at(&path)?;
        Ok(doomed.into())
    };
    let mut all = true;
    for dir in dirs {
        all &= stats.removed(doom(dir.path()).map(|doomed| remains.push(doomed)));
    }
    for file in files {
        let (bytes, removed) = (bytes_of(file), stats.removed(fs::remove_file(file.path()).at(file.path())));
        stats.other_bytes_removed += if removed { bytes } else { 0 };
        all &= removed;
    }
    all
}
