//! The collector: takes what no image, no mount and no build needs, and only that.
//!
//! It reads the roots under the domain lock, marks without it, and deletes in
//! batches under the lock exclusive. Before each batch it reads again what may have changed since: the leases (small)
//! and the tail of the publish log. A digest that is in use at that moment stays, so neither a build nor a mount has to
//! wait for the whole run, and none loses an object it has seen.

use crate::digest::Digest;
use crate::error::{At, Error, Result};
use crate::mount::remove_tree;
use crate::mounts::{self, held_by_kernel};
use crate::store::Store;
use rustix::fs::FlockOperation;
use rustix::mount::UnmountFlags;
use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Objects deleted per hold of the domain lock: tens of milliseconds.
const BATCH: usize = if cfg!(pagefold_stress) { 2 } else { 1024 };

/// How long the stat cache of a directory is of use: 30 days.
const CACHE_AGE: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// What a collection did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Stats {
    /// Images by name.
    pub images: u64,
    /// Metadata images kept: by a name, a mount or a lease.
    pub trees_kept: u64,
    /// Of those, the ones that are kept because it cannot be seen from here whether somebody has them mounted by a
    /// metadata directory.
    pub trees_unseen: u64,
    /// Metadata images removed.
    pub trees_removed: u64,
    /// Objects kept.
    pub objects_kept: u64,
    /// Objects removed, or that would be with `dry_run`.
    pub objects_removed: u64,
    /// Their bytes.
    pub bytes_removed: u64,
    /// Builds that had died, whose remains were removed.
    pub builds_removed: u64,
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

/// The digests that builds and mounts in progress stand on.
fn leased(store: &Store) -> Result<HashSet<u128>> {
    let mut all = HashSet::new();
    for entry in entries(&store.path("leases"))? {
        let path = entry.path();
        if let Some(bytes) = unless_gone(fs::read(&path), &path)? {
            all.extend(bytes.chunks_exact(32).map(|raw| Digest(raw.try_into().expect("32 bytes")).key()));
        }
    }
    Ok(all)
}

/// Removes leases nobody holds and what their builds had staged; returns how many.
fn remove_dead_builds(store: &Store) -> Result<u64> {
    let (leases, staging) = (store.path("leases"), store.path("staging"));
    let mut removed = 0;
    for entry in entries(&leases)? {
        let path = entry.path();
        let Some(file) = unless_gone(File::open(&path), &path)? else { continue };
        if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
            // Ours now: whoever created it and has not locked it yet will find it gone, and try again. Its owner may
            // have ended well between our two looks.
            removed += u64::from(unless_gone(fs::remove_file(&path), &path)?.is_some());
        }
    }
    for entry in entries(&staging)? {
        // A staging directory is made after its lease and removed before it.
        let lease = leases.join(entry.file_name());
        if !lease.try_exists().at(&lease)? {
            let path = entry.path();
            let _ = rustix::mount::unmount(path.join("meta"), UnmountFlags::DETACH);
            match remove_tree(&path) {
                Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => {}
                other => other?,
            }
        }
    }
    Ok(removed)
}

/// Removes the stat caches of directories that were not built for long: each build writes its own anew.
fn remove_old_caches(store: &Store) -> Result<()> {
    for entry in entries(&store.path("cache"))? {
        let age = entry.metadata().ok().and_then(|meta| meta.modified().ok()?.elapsed().ok());
        if age.is_some_and(|age| age > CACHE_AGE) {
            unless_gone(fs::remove_file(entry.path()), &entry.path())?;
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
                let names = names_of(store, &digest);
                Error::Damaged(format!("gc removes nothing while an image cannot be read ({names}): {error}"))
            })?;
            self.objects.extend(objects.iter().map(|object| object.0.key()));
        }
        Ok(())
    }
}

/// The names that stand for an image, for messages.
pub(crate) fn names_of(store: &Store, digest: &Digest) -> String {
    let images = store.images().unwrap_or_default();
    let names: Vec<&str> = images.iter().filter(|image| image.digest == *digest).map(|i| i.name.as_str()).collect();
    if names.is_empty() { digest.to_string() } else { names.join(", ") }
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
    if !dry_run {
        stats.builds_removed = remove_dead_builds(store)?;
        remove_old_caches(store)?;
    }

    let mut live = Live { trees: HashSet::new(), objects: HashSet::new() };
    let log_path = store.path("published");
    let lock = store.lock(true)?;
    let mut roots: Vec<Digest> =
        store.images()?.into_iter().inspect(|_| stats.images += 1).map(|image| image.digest).collect();
    // Leases before mounts: who mounts holds his lease until the mount is in the table, and nobody takes a new one
    // while we hold the lock.
    let leases = leased(store)?;
    let mounted = mounts::view(store)?;
    if mounted.silent > 0 {
        return Err(Error::Refused(format!(
            "gc: {} processes do not answer in /proc, and what they have mounted is unknown; try again, or end them (state D in ps)",
            mounted.silent
        )));
    }
    roots.extend(mounted.mounts.iter().map(|mount| mount.digest));
    let trees = store.path("trees");
    let mut doomed = Vec::new();
    let named: HashSet<Digest> = roots.iter().copied().collect();
    let mut seen = HashSet::new();
    for entry in entries(&trees)? {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let Some(digest) = name.get(..64).and_then(|hex| Digest::from_hex(hex.as_bytes())) else { continue };
        if named.contains(&digest) || !seen.insert(digest) {
            continue;
        }
        // Nobody but the tables knows of a mount by a metadata directory.
        let unseen = || mounted.partial && store.has_directory(&digest);
        if leases.contains(&digest.key()) || held_by_kernel(store, &digest)? {
            roots.push(digest);
        } else if unseen() {
            stats.trees_unseen += 1;
            roots.push(digest);
        } else {
            doomed.push(digest);
        }
    }
    // From here on the log tells of what is published; all before is in `roots`.
    let log_from = if dry_run { read_log(store)?.len() } else { 0 };
    if !dry_run {
        fs::write(&log_path, b"").at(&log_path)?;
        for digest in &doomed {
            remove_image_files(store, digest)?;
        }
    }
    drop(lock);
    stats.trees_removed = doomed.len() as u64;
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
                delete(store, &mut live, &mut batch, dry_run.then_some(log_from), &mut stats)?;
            }
        }
    }
    delete(store, &mut live, &mut batch, dry_run.then_some(log_from), &mut stats)?;
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
    stats: &mut Stats,
) -> Result<()> {
    let _exclusive = store.lock(true)?;
    let leased = leased(store)?;
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
        if dry_run.is_none() {
            fs::remove_file(&path).at(&path)?;
        }
        stats.objects_removed += 1;
        stats.bytes_removed += size;
    }
    Ok(())
}

fn remove_image_files(store: &Store, digest: &Digest) -> Result<()> {
    let trees = store.path("trees");
    let hex = digest.hex();
    for end in ["erofs", "full.erofs", "objects", "start", "userdir.notes", "rootdir.notes"] {
        match fs::remove_file(trees.join(format!("{hex}.{end}"))) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error).at(&trees),
            _ => {}
        }
    }
    for end in ["userdir", "rootdir"] {
        let (path, doomed) = (trees.join(format!("{hex}.{end}")), trees.join(format!("{hex}.{end}.doomed")));
        let remove = || -> Result<()> {
            if doomed.exists() {
                rustix::fs::chmod(&doomed, rustix::fs::Mode::RWXU).at(&doomed)?;
                remove_tree(&doomed)?;
            }
            Ok(())
        };
        // What a collector that died has left; then out of its name in one step, so that half a directory is never
        // taken for all of it.
        remove()?;
        match fs::rename(&path, &doomed) {
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            other => other.at(&path)?,
        }
        remove()?;
    }
    Ok(())
}
