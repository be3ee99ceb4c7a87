//! The snapshots on disk: a directory for each, with a small file that says what it is.
//!
//! ```text
//! ROOT/lock                         held while a snapshotter runs
//! ROOT/instance                     this snapshotter's own id
//! ROOT/new/                         a directory that is not whole yet
//! ROOT/snapshots/N/snapshot.json    what the snapshot is; replaced by rename(2)
//! ROOT/snapshots/N/fs, work         upper and work directory of an active snapshot
//! ROOT/snapshots/N/committing       there while its files may be objects too, before it is recorded as committed
//! ROOT/snapshots/N/places, digests  where the metadata of a committed one is mounted, by how it names objects
//! ROOT/removed/N                    removed, to be deleted
//! ```
//!
//! Each change is one rename, made durable before the caller goes on: after a crash or a loss of power a snapshot is there
//! as it was before a request or as it is after it.

use crate::error::{At, Error, Result};
use pagefold_image::digest::Digest;
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File};
use std::io::{Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// What a snapshot is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SnapshotKind {
    /// A read-only look at its parent.
    View,
    /// Changes over its parent.
    Active,
    /// A tree that never changes.
    Committed,
}

/// A moment, as seconds and nanoseconds since 1970.
pub type Time = (i64, u32);

/// The present moment.
pub fn now() -> Time {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    (now.as_secs() as i64, now.subsec_nanos())
}

/// A snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Its number: the name of its directory.
    pub id: u64,
    /// containerd's key of an active snapshot or view, or name of a committed one.
    pub name: String,
    /// The committed snapshot below it; empty if there is none.
    pub parent: String,
    /// What it is.
    pub kind: SnapshotKind,
    /// When it was made.
    pub created: Time,
    /// When it or its labels were changed.
    pub updated: Time,
    /// containerd's labels.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Whether its mounts keep metadata of changed files apart from bytes, and names of moved directories.
    #[serde(default)]
    pub metacopy: bool,
    /// The tree of a committed one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<Digest>,
}

/// All snapshots of a root directory, which this process alone changes.
#[derive(Debug)]
pub struct Database {
    root: PathBuf,
    instance: String,
    all: BTreeMap<String, Snapshot>,
    next: u64,
    _lock: File,
}

const FILE: &str = "snapshot.json";

impl Database {
    /// Opens the database below `root`, and makes it where it is missing.
    ///
    /// # Errors
    /// Another snapshotter with this root, a damaged file, the system's.
    pub fn open(root: &Path) -> Result<Self> {
        make_dir(root)?;
        let root = root.canonicalize().at(root)?;
        let path = root.join("lock");
        let lock = File::options().write(true).create(true).truncate(false).open(&path).at(&path)?;
        if rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            let text = format!("{}: another snapshotter uses it; end that one, or give --root", root.display());
            return Err(Error::Precondition(text));
        }
        for part in ["snapshots", "removed", "new"] {
            make_dir(&root.join(part))?;
        }
        let new = root.join("new");
        fs::remove_dir_all(&new).at(&new)?;
        make_dir(&new)?;
        let instance = instance(&root)?;
        let mut database = Self { root, instance, all: BTreeMap::new(), next: 1, _lock: lock };
        database.load()?;
        Ok(database)
    }

    fn load(&mut self) -> Result<()> {
        for part in ["removed", "snapshots"] {
            let dir = self.root.join(part);
            for entry in fs::read_dir(&dir).at(&dir)? {
                let path = entry.at(&dir)?.path();
                let id = path.file_name().and_then(|name| name.to_str()?.parse::<u64>().ok());
                let damaged = |what: String| {
                    Error::Precondition(format!("{}: {what}; remove it with what containerd has on it", path.display()))
                };
                let id = id.ok_or_else(|| damaged("not a snapshot".into()))?;
                self.next = self.next.max(id + 1);
                if part == "removed" {
                    continue;
                }
                let text = fs::read(path.join(FILE)).map_err(|error| damaged(format!("{FILE}: {error}")))?;
                let snapshot: Snapshot =
                    serde_json::from_slice(&text).map_err(|error| damaged(format!("{FILE}: {error}")))?;
                if snapshot.id != id {
                    return Err(damaged(format!("{FILE}: of snapshot {}", snapshot.id)));
                }
                if let Some(other) = self.all.insert(snapshot.name.clone(), snapshot) {
                    return Err(damaged(format!("{FILE}: {:?} is snapshot {} too", other.name, other.id)));
                }
            }
        }
        Ok(())
    }

    /// The directory of everything.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// This snapshotter's own id: two of them may use one store.
    pub fn instance(&self) -> &str {
        &self.instance
    }

    /// All snapshots by name.
    pub fn all(&self) -> &BTreeMap<String, Snapshot> {
        &self.all
    }

    /// The snapshot of that name.
    ///
    /// # Errors
    /// There is none.
    pub fn get(&self, name: &str) -> Result<&Snapshot> {
        self.all.get(name).ok_or_else(|| Error::NotFound(name.into()))
    }

    /// The directory of a snapshot.
    pub fn dir(&self, id: u64) -> PathBuf {
        self.root.join("snapshots").join(id.to_string())
    }

    /// A number for a new snapshot.
    pub fn next_id(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    /// Adds a snapshot; `fill` makes what its directory has.
    ///
    /// # Errors
    /// The system's, and those of `fill`; then there is no such snapshot.
    pub fn insert(&mut self, snapshot: Snapshot, fill: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
        let (new, dir) = (self.root.join("new").join(snapshot.id.to_string()), self.dir(snapshot.id));
        let made = make_dir(&new).and_then(|()| {
            fill(&new)?;
            write(&new.join(FILE), &snapshot)?;
            sync_dir(&new)?;
            fs::rename(&new, &dir).at(&dir)
        });
        if made.is_err() {
            let _ = fs::remove_dir_all(&new);
        }
        made?;
        sync_dir(&self.root.join("snapshots"))?;
        self.all.insert(snapshot.name.clone(), snapshot);
        Ok(())
    }

    /// Replaces snapshot `name` by `snapshot`, which has the same number and may have another name.
    ///
    /// # Errors
    /// The system's; then the old one stays.
    pub fn replace(&mut self, name: &str, snapshot: Snapshot) -> Result<()> {
        let dir = self.dir(snapshot.id);
        write(&dir.join(FILE), &snapshot)?;
        sync_dir(&dir)?;
        self.all.remove(name);
        self.all.insert(snapshot.name.clone(), snapshot);
        Ok(())
    }

    /// Takes snapshot `name` out. Returns its directory, which is to be deleted.
    ///
    /// # Errors
    /// There is none; the system's.
    pub fn remove(&mut self, name: &str) -> Result<PathBuf> {
        let id = self.get(name)?.id;
        let removed = self.root.join("removed").join(id.to_string());
        fs::rename(self.dir(id), &removed).at(&removed)?;
        self.all.remove(name);
        sync_dir(&self.root.join("snapshots"))?;
        Ok(removed)
    }

    /// Directories of removed snapshots.
    ///
    /// # Errors
    /// The system's.
    pub fn removed(&self) -> Result<Vec<PathBuf>> {
        let dir = self.root.join("removed");
        fs::read_dir(&dir).at(&dir)?.map(|entry| Ok(entry.at(&dir)?.path())).collect()
    }
}

/// This snapshotter's id, made with its root directory.
fn instance(root: &Path) -> Result<String> {
    let path = root.join("instance");
    if let Ok(text) = fs::read_to_string(&path)
        && text.len() == 16
    {
        return Ok(text);
    }
    let mut bytes = [0u8; 8];
    File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes)).at("/dev/urandom")?;
    let text = format!("{:016x}", u64::from_le_bytes(bytes));
    replace_file(&path, text.as_bytes())?;
    sync_dir(root)?;
    Ok(text)
}

pub(crate) fn make_dir(path: &Path) -> Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path).at(path)
}

fn write(path: &Path, snapshot: &Snapshot) -> Result<()> {
    replace_file(path, &serde_json::to_vec_pretty(snapshot).expect("plain data"))
}

/// Writes a file, durably, before it gets its name.
fn replace_file(path: &Path, bytes: &[u8]) -> Result<()> {
    let new = path.with_extension("new");
    let mut file = File::create(&new).at(&new)?;
    file.write_all(bytes).and_then(|()| file.sync_all()).at(&new)?;
    fs::rename(&new, path).at(path)
}

/// Makes the names in a directory durable.
pub(crate) fn sync_dir(path: &Path) -> Result<()> {
    File::open(path).and_then(|dir| dir.sync_all()).at(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(database: &mut Database, name: &str) -> Snapshot {
        Snapshot {
            id: database.next_id(),
            name: name.into(),
            parent: String::new(),
            kind: SnapshotKind::Active,
            created: now(),
            updated: now(),
            labels: BTreeMap::from([("a".into(), "b".into())]),
            metacopy: false,
            digest: None,
        }
    }

    #[test]
    fn what_was_written_is_read_by_the_next_process() {
        let dir = tempfile::tempdir().unwrap();
        let mut database = Database::open(dir.path()).unwrap();
        let mut first = snapshot(&mut database, "first");
        database.insert(first.clone(), |dir| make_dir(&dir.join("fs"))).unwrap();
        let second = snapshot(&mut database, "second");
        database.insert(second, |_| Ok(())).unwrap();
        first.name = "renamed".into();
        first.kind = SnapshotKind::Committed;
        first.digest = Some(Digest::of(b"tree"));
        database.replace("first", first.clone()).unwrap();
        let removed = database.remove("second").unwrap();
        assert!(matches!(database.get("first"), Err(Error::NotFound(_))));
        let instance = database.instance().to_string();
        drop(database);
        let mut database = Database::open(dir.path()).unwrap();
        assert_eq!(database.all().values().collect::<Vec<_>>(), [&first]);
        assert_eq!((database.instance(), database.removed().unwrap()), (&*instance, vec![removed]));
        assert!(database.dir(first.id).join("fs").is_dir());
        assert_eq!(database.next_id(), 3, "no number comes twice");
    }

    #[test]
    fn a_snapshot_that_could_not_be_made_is_not_there() {
        let dir = tempfile::tempdir().unwrap();
        let mut database = Database::open(dir.path()).unwrap();
        let new = snapshot(&mut database, "new");
        let failed = database.insert(new, |_| Err(Error::Invalid("no".into())));
        assert!(failed.is_err() && database.all().is_empty());
        // As a process leaves it that is killed meanwhile.
        make_dir(&dir.path().join("new/7")).unwrap();
        drop(database);
        let database = Database::open(dir.path()).unwrap();
        assert!(database.all().is_empty() && fs::read_dir(dir.path().join("new")).unwrap().next().is_none());
    }

    #[test]
    fn one_root_has_one_snapshotter_and_only_whole_snapshots() {
        let dir = tempfile::tempdir().unwrap();
        let mut database = Database::open(dir.path()).unwrap();
        let text = Database::open(dir.path()).unwrap_err().to_string();
        assert!(text.contains("another snapshotter"), "{text}");
        let new = snapshot(&mut database, "new");
        let file = database.dir(new.id).join(FILE);
        database.insert(new, |_| Ok(())).unwrap();
        drop(database);
        fs::write(&file, "{").unwrap();
        let text = Database::open(dir.path()).unwrap_err().to_string();
        assert!(text.contains("snapshots/1") && text.contains(FILE), "{text}");
    }
}
