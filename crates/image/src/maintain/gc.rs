//! The collector: removes what no image, no mount and no build needs, and only that.
//!
//! It reads the roots under the domain lock, marks without it, and deletes in
//! batches under the exclusive lock. Before each batch it reads again what may have changed since: the leases (small)
//! and the tail of the publish log. A digest that is in use at that moment stays, so neither a build nor a mount has to
//! wait for the whole run, and none loses an object it has seen.

use super::disk_usage::{disk_bytes, staged_bytes};
use crate::digest::Digest;
use crate::error::{At, Error, Result};
use crate::in_use::InUse;
use crate::link_farm;
use crate::random_id::random_id;
use crate::remove_tree::remove_tree;
use crate::runtime::mounts::{self, View, image_in_use};
use crate::store::{
    DamagedImage, FARM_SUFFIX, ROOT_DIRECTORY, Store, USER_DIRECTORY, entries, open_lease, remove_dead_builds,
    unless_gone,
};
use std::collections::{BTreeMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{ErrorKind, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Objects deleted per hold of the domain lock: tens of milliseconds.
const BATCH: usize = if cfg!(pagefold_stress) { 2 } else { 1024 };

/// How long the stat cache of a directory is of use: 30 days.
const CACHE_AGE: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// Most lines about what could not be removed.
const FAILED_LINES_MAX: usize = 16;

/// What a collection did.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Stats {
    /// Images by name.
    pub images: u64,
    /// Metadata images kept: by a name, a mount or a lease.
    pub trees_kept: u64,
    /// Of those, the ones that are kept because this process cannot see whether they are mounted: by a metadata directory,
    /// or on a file system that does not report open files.
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
    /// Dead builds that left remains, which were removed.
    pub builds_removed: u64,
    /// Files and trees that were to be removed and could not be: all else was collected.
    pub failures: u64,
    /// Why, one line each, for the first few.
    pub failed: Vec<String>,
    /// Images with records that cannot be read. While there are any, every tree is kept with its objects: it may be theirs.
    pub damaged: Vec<DamagedImage>,
}

impl Stats {
    /// Returns true if something was removed. A file that cannot be removed is counted and noted, and the collection goes
    /// on.
    fn removed(&mut self, result: Result<()>) -> bool {
        match result {
            Ok(()) => return true,
            Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => {}
            Err(error) => self.failed(&error),
        }
        false
    }

    fn failed(&mut self, error: &Error) {
        self.failures += 1;
        if self.failed.len() < FAILED_LINES_MAX {
            self.failed.push(error.to_string());
        }
    }
}

/// Collects a domain.
///
/// # Errors
/// Another collection at work; an image with an unreadable object list; the system's.
pub fn collect(store: &Store, dry_run: bool) -> Result<Stats> {
    let Some(_only) = store.lock_collector()? else {
        return Err(Error::Refused("gc: another collection is running; wait for it".into()));
    };
    let mut run = Collection::new(store, dry_run);
    run.remove_dead_builds()?;
    run.remove_old_caches()?;
    run.remove_downloads()?;
    let (trees, layers) = run.collect_trees()?;
    for digest in trees {
        run.mark(digest)?;
    }
    run.mark_layers(layers);
    run.stats.trees_kept = run.live_trees.len() as u64;
    run.sweep_objects()?;
    Ok(run.stats)
}

/// A collection in progress.
struct Collection<'a> {
    store: &'a Store,
    dry_run: bool,
    /// Leases without an owner, in a dry run.
    dead_leases: HashSet<OsString>,
    live_trees: HashSet<Digest>,
    live_objects: HashSet<u128>,
    /// Entries of the publish log that the marked trees include already: a dry run leaves the log as it is.
    log_from: usize,
    stats: Stats,
}

/// The files under `trees/` that may be removed.
#[derive(Default)]
struct TreeFiles {
    /// Files of trees that no name, lease or mount table names.
    unnamed: BTreeMap<Digest, Vec<fs::DirEntry>>,
    /// Directories that a collector has renamed to be removed, this one or one that was killed.
    remains: Vec<PathBuf>,
    /// Metadata directories of a kind that this version no longer mounts; existing mounts of them show in a table.
    outdated: Vec<fs::DirEntry>,
}

impl<'a> Collection<'a> {
    fn new(store: &'a Store, dry_run: bool) -> Self {
        Self {
            store,
            dry_run,
            dead_leases: HashSet::new(),
            live_trees: HashSet::new(),
            live_objects: HashSet::new(),
            log_from: 0,
            stats: Stats::default(),
        }
    }

    /// Removes leases without an owner and what their builds had staged.
    fn remove_dead_builds(&mut self) -> Result<()> {
        let dead = remove_dead_builds(self.store, self.dry_run, staged_bytes)?;
        self.stats.builds_removed = dead.count;
        self.stats.other_bytes_removed += dead.staged_bytes;
        dead.errors.iter().for_each(|error| self.stats.failed(error));
        self.dead_leases = dead.leases;
        Ok(())
    }

    /// Removes the stat caches of directories that were not built for long: each build writes its own anew.
    fn remove_old_caches(&mut self) -> Result<()> {
        for entry in entries(&self.store.path("cache"))? {
            let age = entry.metadata().ok().and_then(|meta| meta.modified().ok()?.elapsed().ok());
            if age.is_some_and(|age| age > CACHE_AGE) {
                let bytes = bytes_of(&entry);
                if self.dry_run || self.stats.removed(fs::remove_file(entry.path()).at(entry.path())) {
                    self.stats.other_bytes_removed += bytes;
                }
            }
        }
        Ok(())
    }

    /// Removes what ended pulls have fetched and not used.
    fn remove_downloads(&mut self) -> Result<()> {
        for download in self.store.abandoned_downloads()? {
            let bytes = download.bytes();
            if self.dry_run || self.stats.removed(download.remove()) {
                self.stats.other_bytes_removed += bytes;
            }
        }
        Ok(())
    }

    /// Removes the trees that nothing needs, with all that was made of them. Returns the other trees, from which objects
    /// are marked, and the trees of images' layers.
    fn collect_trees(&mut self) -> Result<(Vec<Digest>, Vec<Digest>)> {
        let lock = self.store.lock(true)?;
        let records = self.store.records()?;
        (self.stats.images, self.stats.damaged) = (records.images.len() as u64, records.damaged);
        let mut roots: Vec<Digest> = records.images.iter().map(|image| image.digest).collect();
        let layers: Vec<Digest> =
            records.images.iter().flat_map(|image| &image.layers).map(|layer| layer.tree).collect();
        // Leases before mounts: a mount holds its lease until it is in the table, and no new lease can be claimed with under
        // this lock.
        let leases = self.leased()?;
        let mounted = self.view_mounts()?;
        roots.extend(mounted.mounts.iter().map(|mount| mount.digest));
        let mut files = self.tree_files(&roots, &layers, &leases, &mounted)?;
        let (mut doomed, kept) = self.choose_doomed(std::mem::take(&mut files.unnamed), &leases, &mounted)?;
        roots.extend(kept);
        if self.dry_run {
            self.log_from = read_log(self.store)?.len();
        } else {
            // From here on the log lists what is published; everything earlier is in `roots`.
            let log = self.store.path("published");
            fs::write(&log, b"").at(&log)?;
            remove_image_files(&files.outdated, &mut files.remains, &mut self.stats);
            doomed.retain(|image| remove_image_files(image, &mut files.remains, &mut self.stats));
        }
        drop(lock);
        self.stats.trees_removed = doomed.len() as u64;
        if self.dry_run {
            let bytes = files.outdated.iter().chain(doomed.iter().flatten()).map(bytes_of).sum::<u64>();
            self.stats.other_bytes_removed += bytes;
        }
        for path in files.remains {
            let bytes = bytes_below(&path);
            if self.dry_run || self.stats.removed(remove_tree(&path)) {
                self.stats.other_bytes_removed += bytes;
            }
        }
        Ok((roots, layers))
    }

    /// The digests that builds and mounts in progress rely on. Leases of dead builds do not count.
    fn leased(&self) -> Result<HashSet<u128>> {
        let mut all = HashSet::new();
        for entry in entries(&self.store.path("leases"))? {
            let path = entry.path();
            if self.dead_leases.contains(&entry.file_name()) {
                continue;
            }
            if let Some(mut file) = open_lease(&path)? {
                let mut bytes = Vec::new();
                file.read_to_end(&mut bytes).at(&path)?;
                all.extend(bytes.as_chunks().0.iter().map(|raw| Digest(*raw).key()));
            }
        }
        Ok(all)
    }

    fn view_mounts(&self) -> Result<View> {
        let mounted = mounts::view(self.store)?;
        if mounted.silent > 0 {
            return Err(Error::Refused(format!(
                "gc: {} processes do not answer in /proc, and what they have mounted is unknown; try again, or end them (state D in ps)",
                mounted.silent
            )));
        }
        Ok(mounted)
    }

    /// Sorts the files under `trees/`.
    fn tree_files(
        &self,
        roots: &[Digest],
        layers: &[Digest],
        leases: &HashSet<u128>,
        mounted: &View,
    ) -> Result<TreeFiles> {
        let trees = self.store.path("trees");
        let named: HashSet<&Digest> = roots.iter().chain(layers).collect();
        let in_use = |digest: &Digest| {
            mounted.partial
                || leases.contains(&digest.key())
                || mounted.mounts.iter().any(|mount| mount.digest == *digest)
        };
        let mut files = TreeFiles::default();
        for entry in entries(&trees)? {
            let name = entry.file_name();
            let Some(digest) = name.as_bytes().get(..64).and_then(Digest::from_hex) else { continue };
            if name.as_bytes().ends_with(DOOMED.as_bytes()) {
                files.remains.push(entry.path());
            } else if !named.contains(&digest) {
                files.unnamed.entry(digest).or_default().push(entry);
            } else if is_outdated(&trees, name.as_bytes()) && !in_use(&digest) {
                files.outdated.push(entry);
            }
        }
        Ok(files)
    }

    /// Splits trees without a name: returns the files of those to remove, and the trees to keep.
    fn choose_doomed(
        &mut self,
        unnamed: BTreeMap<Digest, Vec<fs::DirEntry>>,
        leases: &HashSet<u128>,
        mounted: &View,
    ) -> Result<(Vec<Vec<fs::DirEntry>>, Vec<Digest>)> {
        let (mut doomed, mut kept) = (Vec::new(), Vec::new());
        for (digest, files) in unnamed {
            // A damaged record may name any tree that has its metadata image.
            let tree = self.store.tree_path(&digest);
            let may_be_named = !self.stats.damaged.is_empty() && tree.try_exists().at(&tree)?;
            let needed = may_be_named || leases.contains(&digest.key());
            let use_ = if needed { InUse::Yes } else { image_in_use(self.store, &digest)? };
            // Only mount tables show a mount by a metadata directory.
            let may_be_mounted =
                || mounted.partial && files.iter().any(|file| is_dir(file) && !is_farm(&file.file_name()));
            if use_ == InUse::No && !may_be_mounted() {
                doomed.push(files);
            } else {
                self.stats.trees_unseen += u64::from(use_ != InUse::Yes);
                kept.push(digest);
            }
        }
        Ok((doomed, kept))
    }

    /// Marks a tree and its objects as live.
    fn mark(&mut self, digest: Digest) -> Result<()> {
        if self.live_trees.insert(digest) {
            // Without the list it is unknown what the image needs: then nothing may be removed.
            let objects = self.store.tree_objects(&digest).map_err(|error| {
                let names = self.store.names_of(&digest);
                Error::Damaged(format!("gc removes nothing while an image cannot be read ({names}): {error}, or forget it (`pagefold image rm`)"))
            })?;
            self.live_objects.extend(objects.iter().map(|object| object.0.key()));
        }
        Ok(())
    }

    /// Marks the trees of images' layers and their objects as live. A tree that is missing or damaged has none: no image is
    /// lost with it, and the layers are fetched again.
    fn mark_layers(&mut self, layers: Vec<Digest>) {
        for digest in layers {
            if let Ok(objects) = self.store.tree_objects(&digest)
                && self.live_trees.insert(digest)
            {
                self.live_objects.extend(objects.iter().map(|object| object.0.key()));
            }
        }
    }

    /// Removes the objects that are not live.
    fn sweep_objects(&mut self) -> Result<()> {
        let mut batch: Vec<(u128, u64, PathBuf)> = Vec::new();
        for shard in entries(&self.store.objects_dir())? {
            let prefix = shard.file_name().to_string_lossy().into_owned();
            for entry in entries(&shard.path())? {
                let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
                let Some(digest) = Digest::from_hex(name.as_bytes()) else { continue };
                if self.live_objects.contains(&digest.key()) {
                    self.stats.objects_kept += 1;
                    continue;
                }
                let size = entry.metadata().map_or(0, |meta| meta.len());
                batch.push((digest.key(), size, entry.path()));
                if batch.len() >= BATCH {
                    self.delete(&mut batch)?;
                }
            }
        }
        self.delete(&mut batch)
    }

    /// Deletes a batch of objects, except those that became live since they were marked.
    fn delete(&mut self, batch: &mut Vec<(u128, u64, PathBuf)>) -> Result<()> {
        let _exclusive = self.store.lock(true)?;
        let leased = self.leased()?;
        for digest in read_log(self.store)?.into_iter().skip(self.log_from) {
            // The log is written just before the name: a build killed between them leaves a digest without an image.
            let tree = self.store.tree_path(&digest);
            if tree.try_exists().at(&tree)? {
                self.mark(digest)?;
            }
        }
        for (key, size, path) in batch.drain(..) {
            if self.live_objects.contains(&key) || leased.contains(&key) {
                self.stats.objects_kept += 1;
                continue;
            }
            if !self.dry_run && !self.stats.removed(fs::remove_file(&path).at(&path)) {
                continue;
            }
            self.stats.objects_removed += 1;
            self.stats.bytes_removed += size;
        }
        Ok(())
    }
}

/// The digests published since the log was last emptied.
fn read_log(store: &Store) -> Result<Vec<Digest>> {
    let path = store.path("published");
    let log = unless_gone(fs::read(&path), &path)?.unwrap_or_default();
    Ok(log.as_chunks().0.iter().map(|raw| Digest(*raw)).collect())
}

/// What an entry takes: a directory with all below it.
fn bytes_of(file: &fs::DirEntry) -> u64 {
    if is_dir(file) { bytes_below(&file.path()) } else { file.metadata().map_or(0, |meta| meta.len()) }
}

/// What a directory takes with all below it. A link farm's objects are counted under their own names.
fn bytes_below(path: &Path) -> u64 {
    if is_farm(path.file_name().unwrap_or_default()) { link_farm::disk_bytes(path) } else { disk_bytes(path) }
}

/// Returns true if a name is that of a link farm, or of its remains.
fn is_farm(name: &OsStr) -> bool {
    let end = name.as_bytes().get(64..).unwrap_or_default();
    end.split(|byte| *byte == b'.').nth(1) == Some(link_farm::SUFFIX.as_bytes())
}

/// Returns true if a name is that of a metadata directory that is no longer mounted: one for all id mappings, or one that
/// leads to the objects' digests where another one leads to the link farm.
fn is_outdated(trees: &Path, name: &[u8]) -> bool {
    let kind = name[64..].strip_prefix(b".").filter(|kind| !kind.contains(&b'.')).unwrap_or_default();
    let is_directory = [ROOT_DIRECTORY, USER_DIRECTORY].iter().any(|start| kind.starts_with(start.as_bytes()));
    let has_farm_form = || trees.join(OsStr::from_bytes(&[name, FARM_SUFFIX.as_bytes()].concat())).exists();
    is_directory && !kind.ends_with(FARM_SUFFIX.as_bytes()) && (kind == USER_DIRECTORY.as_bytes() || has_farm_form())
}

fn is_dir(file: &fs::DirEntry) -> bool {
    file.file_type().map_or(true, |kind| kind.is_dir())
}

/// The end of the names of directories that are being removed.
const DOOMED: &str = ".doomed";

/// Removes the files of an image. Its directories are only renamed, each in one step, so that half a directory is never
/// taken for a whole one; the caller removes what `remains`. Returns true if nothing is left under its own name.
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
