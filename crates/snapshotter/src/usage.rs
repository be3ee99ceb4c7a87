//! What a snapshot takes: for an active one its upper directory, for a committed one what removing it would free.

use crate::database::{Database, SnapshotKind};
use crate::error::{At, Result};
use pagefold_image::digest::Digest;
use pagefold_image::store::Store;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// What a snapshot takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes on the disk.
    pub bytes: u64,
    /// Files.
    pub inodes: u64,
}

/// What the files below `path` take, each once.
///
/// # Errors
/// The system's; files that go away meanwhile are none.
pub fn of_directory(path: &Path) -> Result<Usage> {
    let (mut usage, mut seen) = (Usage::default(), HashSet::new());
    let mut todo = vec![path.to_path_buf()];
    while let Some(path) = todo.pop() {
        let is_gone = |error: &std::io::Error| error.kind() == std::io::ErrorKind::NotFound;
        let meta = match std::fs::symlink_metadata(&path) {
            Err(error) if is_gone(&error) => continue,
            other => other.at(&path)?,
        };
        if meta.nlink() > 1 && !meta.is_dir() && !seen.insert(meta.ino()) {
            continue;
        }
        usage.bytes += meta.blocks() * 512;
        usage.inodes += 1;
        if meta.is_dir() {
            match std::fs::read_dir(&path) {
                Err(error) if is_gone(&error) => {}
                other => {
                    for entry in other.at(&path)? {
                        todo.push(entry.at(&path)?.path());
                    }
                }
            }
        }
    }
    Ok(usage)
}

/// The trees of all committed snapshots with those of their parents, by id.
pub type Trees = HashMap<u64, (Digest, Option<Digest>)>;

/// The trees of the committed snapshots of a database.
pub fn trees(database: &Database) -> Trees {
    let digest = |name: &str| database.all().get(name).and_then(|snapshot| snapshot.digest);
    let committed = database.all().values().filter(|snapshot| snapshot.kind == SnapshotKind::Committed);
    committed.filter_map(|snapshot| Some((snapshot.id, (snapshot.digest?, digest(&snapshot.parent))))).collect()
}

/// What each committed snapshot alone keeps: objects that its own layer has brought and that no other layer, and no other
/// image of the store, has. Objects that two layers have are no snapshot's own: removing either frees nothing.
///
/// # Errors
/// The store's.
pub fn of_committed(store: &Store, trees: &Trees) -> Result<HashMap<u64, Usage>> {
    // A snapshot's layer is what its tree has and its parent's has not.
    let objects = |digest: &Digest| -> Result<HashMap<Digest, u64>> {
        Ok(store.tree_objects(digest)?.into_iter().map(|(digest, size, _)| (digest, size)).collect())
    };
    let mut holders: HashMap<Digest, (u64, Option<u64>)> = HashMap::new();
    let mut hold = |digest: Digest, size: u64, holder: Option<u64>| {
        let held = holders.entry(digest).or_insert((size, holder));
        if held.1 != holder {
            held.1 = None;
        }
    };
    for (id, (digest, parent)) in trees {
        let below = parent.as_ref().map(&objects).transpose()?.unwrap_or_default();
        for (object, size) in objects(digest)? {
            if !below.contains_key(&object) {
                hold(object, size, Some(*id));
            }
        }
    }
    let ours: HashSet<Digest> = trees.values().map(|(digest, _)| *digest).collect();
    let others: BTreeSet<Digest> = store.records()?.images.into_iter().map(|image| image.digest).collect();
    for digest in others.difference(&ours.iter().copied().collect()) {
        for (object, size) in objects(digest)? {
            hold(object, size, None);
        }
    }
    let mut usage: HashMap<u64, Usage> = HashMap::new();
    for (id, (digest, _)) in trees {
        let metadata = std::fs::metadata(store.tree_path(digest)).map_or(0, |meta| meta.blocks() * 512);
        usage.insert(*id, Usage { bytes: metadata, inodes: 1 });
    }
    for (size, holder) in holders.into_values() {
        if let Some(used) = holder.and_then(|id| usage.get_mut(&id)) {
            used.bytes += size.next_multiple_of(4096);
            used.inodes += 1;
        }
    }
    Ok(usage)
}
