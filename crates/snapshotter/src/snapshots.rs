//! The operations on snapshots.
//!
//! *Locks.* `state` is held for short steps only; reading and writing files of a size that others choose happens without it.
//! An operation that takes long first reserves the names that it needs, so that no other one uses them or removes their
//! parents.
//!
//! *Commit.* The files of the upper directory become objects by hard links, and are deleted there while containerd goes on.
//! The note `committing` stands in the snapshot's directory from before the first link until they are deleted. A snapshotter
//! that finds the note when it starts deletes them, or, if the snapshot is not recorded as committed, gives the upper
//! directory files of its own again: the container could otherwise write into objects.

use crate::database::{Database, Snapshot, SnapshotKind, make_dir, now, sync_dir};
use crate::error::{At, Error, Result};
use crate::filter::Filters;
use crate::mounts::{self, Mount};
use crate::usage::{self, Usage};
use pagefold_image::build::{Omissions, upper};
use pagefold_image::digest::Digest;
use pagefold_image::mount::layers::upper_in_use;
use pagefold_image::store::Store;
use pagefold_image::tree::Tree;
use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};

/// The label by which containerd asks whether a layer is here: the name that it will be committed under.
const REFERENCE: &str = "containerd.io/snapshot.ref";

/// The note of a commit in progress.
const COMMITTING: &str = "committing";

/// A snapshotter: a database of snapshots and the store of their trees.
#[derive(Debug)]
pub struct Snapshots {
    store: Store,
    metacopy: bool,
    state: Mutex<State>,
    /// Held while metadata is mounted or unmounted.
    mounting: Mutex<()>,
}

#[derive(Debug)]
struct State {
    database: Database,
    /// Names of snapshots that are being made, with their parents.
    reserved: HashMap<String, String>,
    /// Snapshots that are being committed.
    busy: Vec<u64>,
    /// Threads that delete the unpacked files of committed snapshots.
    releases: HashMap<u64, JoinHandle<()>>,
    /// What each committed snapshot takes, until one is committed or removed.
    usage: Option<Arc<HashMap<u64, Usage>>>,
    /// Whether the store may have objects that only removed snapshots needed.
    is_garbage_left: bool,
}

impl State {
    fn is_taken(&self, name: &str) -> bool {
        self.database.all().contains_key(name) || self.reserved.contains_key(name)
    }

    fn has_children(&self, name: &str) -> bool {
        let parents = self.database.all().values().map(|snapshot| &snapshot.parent);
        parents.chain(self.reserved.values()).any(|parent| parent == name)
    }

    /// The committed snapshot `name`, to be another one's parent.
    fn parent(&self, name: &str) -> Result<Option<Snapshot>> {
        if name.is_empty() {
            return Ok(None);
        }
        match self.database.get(name)? {
            parent if parent.kind == SnapshotKind::Committed => Ok(Some(parent.clone())),
            _ => Err(Error::Invalid(format!("parent {name:?} is not committed"))),
        }
    }
}

/// A name that no other operation can take while this lives, and a snapshot that no other one changes.
struct Reservation<'a> {
    snapshots: &'a Snapshots,
    name: String,
    busy: Option<u64>,
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        let mut state = self.snapshots.state();
        state.reserved.remove(&self.name);
        state.busy.retain(|id| Some(*id) != self.busy);
    }
}

impl Snapshots {
    /// Opens the database below `root`, and undoes what an earlier process has begun and not ended.
    ///
    /// # Errors
    /// Another snapshotter with this root, a damaged file, a path that cannot be mounted from, the system's.
    pub fn open(root: &Path, store: Store) -> Result<Self> {
        let database = Database::open(root)?;
        for path in [database.root(), store.root()] {
            mounts::check_path(path)?;
        }
        let state = State {
            database,
            reserved: HashMap::new(),
            busy: Vec::new(),
            releases: HashMap::new(),
            usage: None,
            is_garbage_left: true,
        };
        let snapshots =
            Self { store, metacopy: mounts::needs_metacopy(), state: Mutex::new(state), mounting: Mutex::default() };
        snapshots.recover()?;
        Ok(snapshots)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while held")
    }

    /// The name of a snapshot's image in the store.
    fn image_name(&self, state: &State, id: u64) -> String {
        format!("containerd:{}:{id}", state.database.instance())
    }

    /// Removes a snapshot's image from the store, if it is there.
    fn forget_image(&self, image: &str) -> Result<()> {
        match self.store.remove(image) {
            Err(pagefold_image::Error::NoImage { .. }) => Ok(()),
            other => Ok(other?),
        }
    }

    /// Ends what a process that was killed has begun.
    fn recover(&self) -> Result<()> {
        let state = self.state();
        let prefix = self.image_name(&state, 0);
        let prefix = prefix.trim_end_matches('0');
        let mut images: Vec<String> = self.store.records()?.images.into_iter().map(|image| image.name).collect();
        images.retain(|name| name.starts_with(prefix));
        for snapshot in state.database.all().values() {
            let dir = state.database.dir(snapshot.id);
            if snapshot.kind == SnapshotKind::Committed {
                let name = self.image_name(&state, snapshot.id);
                images.retain(|image| *image != name);
                release(&dir)?;
            } else if dir.join(COMMITTING).exists() {
                unshare(&dir)?;
            }
        }
        for name in images {
            // Published for a commit that was not recorded, or of a removed snapshot.
            self.store.remove(&name)?;
        }
        Ok(())
    }

    /// Makes an active snapshot or a view over `parent`.
    ///
    /// # Errors
    /// The name is taken, the parent is missing or not committed; the layer that the labels refer to is here already.
    pub fn create(
        &self,
        kind: SnapshotKind,
        name: &str,
        parent: &str,
        labels: BTreeMap<String, String>,
    ) -> Result<Vec<Mount>> {
        check_key(name)?;
        if let Some(target) = labels.get(REFERENCE)
            && let Some(known) = self.known_layer(target, parent)?
        {
            return Err(Error::Exists(known));
        }
        let (reservation, below, id) = {
            let mut state = self.state();
            if state.is_taken(name) {
                return Err(Error::Exists(name.into()));
            }
            let below = state.parent(parent)?;
            state.reserved.insert(name.into(), parent.into());
            (Reservation { snapshots: self, name: name.into(), busy: None }, below, state.database.next_id())
        };
        let (created, metacopy) = (now(), self.metacopy);
        let snapshot = Snapshot {
            id,
            name: name.into(),
            parent: parent.into(),
            kind,
            created,
            updated: created,
            labels,
            metacopy,
            digest: None,
        };
        let layers = below.map(|below| self.layers(&below, &snapshot)).transpose()?;
        let mut state = self.state();
        state.database.insert(snapshot.clone(), |dir| {
            if kind == SnapshotKind::Active || layers.is_none() {
                make_upper(dir, layers.as_ref().map(|layers| &*layers.0))?;
            }
            Ok(())
        })?;
        let dir = state.database.dir(id);
        drop(state);
        drop(reservation);
        Ok(mounts::mounts(&snapshot, &dir, layers))
    }

    /// The committed snapshot that a layer with reference `target` over `parent` would become. It is made of an image of the
    /// store, if one has these layers.
    fn known_layer(&self, target: &str, parent: &str) -> Result<Option<String>> {
        let (reservation, id, image, below) = {
            let mut state = self.state();
            if let Some(known) = committed_layer(&state.database, target, parent) {
                return Ok(Some(known.into()));
            }
            let below = state.parent(parent)?.map(|below| below.labels.get(REFERENCE).cloned().unwrap_or_default());
            let id = state.database.next_id();
            let name = format!("layers/{id} {target}");
            state.reserved.insert(name.clone(), parent.into());
            (Reservation { snapshots: self, name, busy: None }, id, self.image_name(&state, id), below)
        };
        let chain = target.strip_prefix("sha256:").and_then(|hex| Digest::from_hex(hex.as_bytes()));
        let Some(chain) = chain else { return Ok(None) };
        let build = self.store.build()?;
        let Some(known) = build.known_chain(&chain)? else { return Ok(None) };
        if known.below.map(|below| below.to_string()) != below {
            return Ok(None);
        }
        let source = format!("layers {target} of another image");
        let digest = build.publish(&image, &known.tree, &source, Default::default(), known.notes)?.digest;
        let created = now();
        let mut state = self.state();
        let made = state.database.insert(
            Snapshot {
                id,
                name: reservation.name.clone(),
                parent: parent.into(),
                kind: SnapshotKind::Committed,
                created,
                updated: created,
                labels: BTreeMap::from([(REFERENCE.into(), target.into())]),
                metacopy: self.metacopy,
                digest: Some(digest),
            },
            |_| Ok(()),
        );
        state.usage = None;
        drop(state);
        if let Err(error) = made {
            self.forget_image(&image)?;
            return Err(error);
        }
        Ok(Some(reservation.name.clone()))
    }

    /// Mounts the metadata of `parent` for a snapshot over it.
    fn layers(&self, parent: &Snapshot, over: &Snapshot) -> Result<(std::path::PathBuf, std::path::PathBuf)> {
        let _mounting = self.mounting.lock().expect("no panic while held");
        let dir = self.state().database.dir(parent.id);
        let extract = over.kind == SnapshotKind::Active && mounts::is_extracted_to(&over.name);
        mounts::mount_metadata(&self.store, &digest(parent)?, &dir, extract)
    }

    /// What containerd is to mount for an active snapshot or a view.
    ///
    /// # Errors
    /// There is none, or it is committed.
    pub fn mounts(&self, name: &str) -> Result<Vec<Mount>> {
        let (snapshot, below, dir) = {
            let state = self.state();
            let snapshot = state.database.get(name)?.clone();
            if snapshot.kind == SnapshotKind::Committed {
                return Err(Error::Precondition(format!("snapshot {name:?} is committed, and has no mounts")));
            }
            let below = state.parent(&snapshot.parent)?;
            (snapshot.clone(), below, state.database.dir(snapshot.id))
        };
        let layers = below.map(|below| self.layers(&below, &snapshot)).transpose()?;
        Ok(mounts::mounts(&snapshot, &dir, layers))
    }

    /// Makes the active snapshot `key` the committed snapshot `name`.
    ///
    /// # Errors
    /// The name is taken; there is no active snapshot of that key; files that keep changing, a full disk.
    pub fn commit(&self, name: &str, key: &str, mut labels: BTreeMap<String, String>) -> Result<()> {
        check_key(name)?;
        let (reservation, active, below, dir, image) = {
            let mut state = self.state();
            if state.is_taken(name) {
                return Err(Error::Exists(name.into()));
            }
            let active = state.database.get(key)?.clone();
            if active.kind != SnapshotKind::Active || state.busy.contains(&active.id) {
                return Err(Error::Precondition(format!("snapshot {key:?} is not active, or is being committed")));
            }
            let below = state.parent(&active.parent)?;
            state.reserved.insert(name.into(), active.parent.clone());
            state.busy.push(active.id);
            let (dir, image) = (state.database.dir(active.id), self.image_name(&state, active.id));
            (Reservation { snapshots: self, name: name.into(), busy: Some(active.id) }, active, below, dir, image)
        };
        if let Some(reference) = active.labels.get(REFERENCE) {
            labels.entry(REFERENCE.into()).or_insert_with(|| reference.clone());
        }
        let committed = self.build(&active, below.as_ref(), &dir, &image, name).and_then(|digest| {
            let created = now();
            let snapshot = Snapshot {
                name: name.into(),
                kind: SnapshotKind::Committed,
                created,
                updated: created,
                labels,
                digest: Some(digest),
                ..active.clone()
            };
            let mut state = self.state();
            state.database.replace(key, snapshot)?;
            state.usage = None;
            Ok(())
        });
        if let Err(error) = committed {
            unshare(&dir)?;
            self.forget_image(&image)?;
            return Err(error);
        }
        // The snapshot is committed, whatever happens now; the next start would do the rest.
        let said = |done: Result<()>, name: &str| {
            if let Err(error) = done {
                eprintln!("pagefold-snapshotter: after the commit of {name:?}: {error}");
            }
        };
        said(self.end_extraction(below.as_ref()), name);
        // containerd unpacks the next layer meanwhile.
        let name = name.to_owned();
        let released = thread::Builder::new().name("release".into()).spawn({
            let (dir, name) = (dir.clone(), name.clone());
            move || said(release(&dir), &name)
        });
        match released {
            Ok(release) => {
                let mut state = self.state();
                state.releases.retain(|_, release| !release.is_finished());
                state.releases.insert(active.id, release);
            }
            Err(_) => said(release(&dir), &name),
        }
        // Last: a removal finds the snapshot busy, or the release to wait for.
        drop(reservation);
        Ok(())
    }

    /// Waits until nothing works in the directory of snapshot `id` any more.
    fn wait_for_release(&self, id: u64) {
        let release = self.state().releases.remove(&id);
        if let Some(release) = release {
            let _ = release.join();
        }
    }

    /// Publishes the tree of an active snapshot as an image. Its files may be objects afterwards.
    fn build(
        &self,
        active: &Snapshot,
        below: Option<&Snapshot>,
        dir: &Path,
        image: &str,
        name: &str,
    ) -> Result<Digest> {
        let (upper, note) = (dir.join("fs"), dir.join(COMMITTING));
        File::create(&note).and_then(|file| file.sync_all()).at(&note)?;
        sync_dir(dir)?;
        let parent = match below {
            Some(below) => self.store.tree(&digest(below)?)?,
            None => Tree::default(),
        };
        // What containerd unpacks to is not mounted: overlayfs's attributes in it come from an archive.
        let follow_redirects = active.metacopy && !mounts::is_extracted_to(&active.name);
        let options = upper::Options { follow_redirects, copy: upper_in_use(&upper) };
        let (build, mut omissions) = (self.store.build()?, Omissions::default());
        let tree = upper::apply(&build, &parent, &upper, options, &mut omissions)?;
        let notes = omissions.lines();
        for line in &notes {
            eprintln!("pagefold-snapshotter: {name}: {line}");
        }
        let source = format!("containerd snapshot {name}");
        Ok(build.publish(image, &tree, &source, Default::default(), notes)?.digest)
    }

    /// Unmounts the metadata that unpacking over `parent` needed, if nothing uses it any more.
    fn end_extraction(&self, parent: Option<&Snapshot>) -> Result<()> {
        let Some(parent) = parent else { return Ok(()) };
        let _mounting = self.mounting.lock().expect("no panic while held");
        let state = self.state();
        let mut children = state.database.all().values().filter(|other| other.parent == parent.name);
        // Without a link farm containers use this metadata, too. containerd may not have mounted it yet: it would find an
        // empty directory.
        let is_used = children.any(|child| child.kind != SnapshotKind::Committed)
            || state.reserved.values().any(|other| *other == parent.name);
        let dir = state.database.dir(parent.id);
        drop(state);
        if is_used { Ok(()) } else { mounts::unmount_metadata(&dir, false) }
    }

    /// Removes a snapshot.
    ///
    /// # Errors
    /// There is none; it has children, or is being committed.
    pub fn remove(&self, name: &str) -> Result<()> {
        let id = self.state().database.get(name)?.id;
        self.wait_for_release(id);
        let (snapshot, removed, below) = {
            let _mounting = self.mounting.lock().expect("no panic while held");
            let mut state = self.state();
            let snapshot = state.database.get(name)?.clone();
            if state.has_children(name) {
                return Err(Error::Precondition(format!("cannot remove snapshot {name:?}: it has children")));
            }
            if state.busy.contains(&snapshot.id) {
                return Err(Error::Precondition(format!("cannot remove snapshot {name:?}: it is being committed")));
            }
            let below = state.parent(&snapshot.parent)?;
            let image = self.image_name(&state, snapshot.id);
            let removed = state.database.remove(name)?;
            if snapshot.kind == SnapshotKind::Committed {
                state.usage = None;
                state.is_garbage_left = true;
                self.forget_image(&image)?;
            }
            (snapshot, removed, below)
        };
        delete(&removed)?;
        if mounts::is_extracted_to(&snapshot.name) {
            self.end_extraction(below.as_ref())?;
        }
        Ok(())
    }

    /// The snapshot of that name.
    ///
    /// # Errors
    /// There is none.
    pub fn stat(&self, name: &str) -> Result<Snapshot> {
        self.state().database.get(name).cloned()
    }

    /// Changes labels: those that `paths` name (`labels`, `labels.NAME`), or all without any.
    ///
    /// # Errors
    /// There is no such snapshot; something else is to be changed.
    pub fn update(&self, name: &str, labels: &BTreeMap<String, String>, paths: &[String]) -> Result<Snapshot> {
        let mut state = self.state();
        let mut snapshot = state.database.get(name)?.clone();
        if paths.is_empty() {
            snapshot.labels.clone_from(labels);
        }
        for path in paths {
            match path.strip_prefix("labels").map(|rest| rest.strip_prefix('.')) {
                Some(Some(label)) => match labels.get(label) {
                    Some(value) => _ = snapshot.labels.insert(label.into(), value.clone()),
                    None => _ = snapshot.labels.remove(label),
                },
                Some(None) if path == "labels" => snapshot.labels.clone_from(labels),
                _ => return Err(Error::Invalid(format!("snapshot {name:?}: {path:?} cannot be changed"))),
            }
        }
        snapshot.updated = now();
        state.database.replace(name, snapshot.clone())?;
        Ok(snapshot)
    }

    /// The snapshots that `filters` ask for, by name.
    ///
    /// # Errors
    /// A filter that breaks the syntax.
    pub fn list(&self, filters: &[String]) -> Result<Vec<Snapshot>> {
        let filters = Filters::parse(filters)?;
        let state = self.state();
        Ok(state.database.all().values().filter(|snapshot| filters.match_snapshot(snapshot)).cloned().collect())
    }

    /// What a snapshot takes.
    ///
    /// # Errors
    /// There is none; the system's.
    pub fn usage(&self, name: &str) -> Result<Usage> {
        let (snapshot, dir, known, trees) = {
            let state = self.state();
            let snapshot = state.database.get(name)?.clone();
            let dir = state.database.dir(snapshot.id);
            (snapshot, dir, state.usage.clone(), usage::trees(&state.database))
        };
        if snapshot.kind != SnapshotKind::Committed {
            let upper = dir.join("fs");
            return if upper.exists() { usage::of_directory(&upper) } else { Ok(Usage::default()) };
        }
        let all = match known {
            Some(known) => known,
            None => {
                let all = Arc::new(usage::of_committed(&self.store, &trees)?);
                let mut state = self.state();
                // What was committed or removed meanwhile is not counted in it.
                if usage::trees(&state.database) == trees {
                    state.usage = Some(all.clone());
                }
                all
            }
        };
        Ok(all.get(&snapshot.id).copied().unwrap_or_default())
    }

    /// Deletes what removed snapshots have left, and objects of the store that nothing needs any more.
    ///
    /// # Errors
    /// The system's.
    pub fn clean_up(&self) -> Result<()> {
        let (removed, is_garbage_left) = {
            let mut state = self.state();
            (state.database.removed()?, std::mem::take(&mut state.is_garbage_left))
        };
        for dir in removed {
            delete(&dir)?;
        }
        if is_garbage_left && let Err(error) = pagefold_image::gc::collect(&self.store, false) {
            self.state().is_garbage_left = true;
            return Err(error.into());
        }
        Ok(())
    }
}

impl Drop for Snapshots {
    fn drop(&mut self) {
        let releases = std::mem::take(&mut self.state().releases);
        releases.into_values().for_each(|release| drop(release.join()));
    }
}

fn check_key(key: &str) -> Result<()> {
    if key.is_empty() { Err(Error::Invalid("a snapshot's key is empty".into())) } else { Ok(()) }
}

fn digest(committed: &Snapshot) -> Result<Digest> {
    committed.digest.ok_or_else(|| Error::Precondition(format!("snapshot {:?} has no tree", committed.name)))
}

/// The committed snapshot that a layer with that reference and parent would become.
fn committed_layer<'a>(database: &'a Database, target: &str, parent: &str) -> Option<&'a str> {
    let is_known = |snapshot: &&Snapshot| {
        let reference = snapshot.labels.get(REFERENCE).map(String::as_str);
        snapshot.kind == SnapshotKind::Committed && snapshot.parent == parent && reference == Some(target)
    };
    database.all().values().find(is_known).map(|snapshot| snapshot.name.as_str())
}

/// Makes the upper and work directory of a new snapshot in `dir`. A mount shows the upper directory's owner and mode as the
/// root's: they are those of the root of the parent's metadata.
fn make_upper(dir: &Path, metadata: Option<&Path>) -> Result<()> {
    let upper = dir.join("fs");
    make_dir(&upper)?;
    fs::set_permissions(&upper, Permissions::from_mode(0o755)).at(&upper)?;
    if let Some(metadata) = metadata {
        upper::copy_root(metadata, &upper)?;
        let work = dir.join("work");
        make_dir(&work)?;
        fs::set_permissions(&work, Permissions::from_mode(0o711)).at(&work)?;
    }
    Ok(())
}

/// Deletes the files of an active snapshot that is committed now.
fn release(dir: &Path) -> Result<()> {
    upper::release(&dir.join("fs"))?;
    remove_dir(&dir.join("work"))?;
    remove_note(dir)
}

/// Ends a commit that has failed: the upper directory shares no files with the store any more.
fn unshare(dir: &Path) -> Result<()> {
    upper::unshare(&dir.join("fs"))?;
    remove_note(dir)
}

fn remove_note(dir: &Path) -> Result<()> {
    let note = dir.join(COMMITTING);
    match fs::remove_file(&note) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        other => other.at(&note),
    }
}

/// Deletes the directory of a removed snapshot.
fn delete(dir: &Path) -> Result<()> {
    mounts::unmount_metadata(dir, true)?;
    upper::release(&dir.join("fs"))?;
    remove_dir(dir)
}

fn remove_dir(dir: &Path) -> Result<()> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        other => other.at(dir),
    }
}
