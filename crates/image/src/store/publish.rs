//! A build in progress: objects are staged, made durable, and given their names; the image's record comes last.
//!
//! Objects are written to a directory of the build's own. One syncfs makes a
//! batch of them durable before each is renamed to its digest, so what has a
//! name is complete. A build that ends early leaves nothing under a name but
//! whole objects.

use super::lease::Lease;
use super::trees::encode_objects;
use super::{Record, RunConfig, Store, is_marked, make_dir};
use crate::digest::Digest;
use crate::erofs;
use crate::error::{At, Error, Result};
use crate::shelf;
use crate::tree::{Data, INLINE_MAX, Tree};
use rustix::fs::RenameFlags;
use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Staged bytes after which a build publishes its objects so far: what a killed import does not have to redo.
const BATCH_BYTES: u64 = 1 << 30;

/// Staged objects after which it does.
const BATCH_OBJECTS: usize = 16_384;

/// What is read in pieces of this many bytes is not written where all of a piece is zero.
const HOLE_BYTES: usize = 1 << 16;

/// Objects claimed and looked for per hold of the domain lock: milliseconds.
const CLAIM_BATCH: usize = if cfg!(pagefold_stress) { 2 } else { 1024 };

impl Store {
    /// Starts a build: a lease and a place to stage in. What builds have left that died goes.
    ///
    /// # Errors
    /// The system's.
    pub fn build(&self) -> Result<Build<'_>> {
        crate::gc::clear_dead_builds(self);
        let lease = Lease::written(self)?;
        let staging = self.path("staging").join(&lease.id);
        make_dir(&staging, 0o700)?;
        Ok(Build {
            store: self,
            lease,
            disk: File::open(&staging).at(&staging)?,
            staging,
            staged: Mutex::default(),
            counter: AtomicU64::new(0),
            lost: AtomicBool::new(false),
            stats: BuildStats::default(),
        })
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
    /// Whether something of it may be lost.
    lost: AtomicBool,
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
    /// The system's; [`Error::Full`](crate::Error::Full).
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
    /// The reader's, the system's; [`Error::Full`](crate::Error::Full).
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
            write_data(&mut file, &buffer[..filled]).at(&path)?;
            size += filled as u64;
            filled = loop {
                match reader.read(buffer) {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    other => break other.at(what)?,
                }
            };
            tick(filled as u64);
        }
        // A hole at the end is not there yet.
        file.set_len(size).at(&path)?;
        let digest = Digest(hasher.finalize().into());
        self.stats.bytes_hashed.fetch_add(size, Ordering::Relaxed);
        if self.has(&digest, size)? {
            fs::remove_file(&path).at(&path)?;
        } else {
            self.stage(digest, size, path)?;
        }
        Ok(Data::Object(digest, size))
    }

    /// Makes what was written durable. The disk tells of a loss once: its silence to another thread, or to one more try,
    /// says nothing of what was written before.
    fn settle(&self, path: &Path) -> Result<()> {
        if self.lost.load(Ordering::Relaxed) {
            return Err(Error::Refused(format!(
                "{}: not all that was written has reached the disk; build it again",
                self.staging.display()
            )));
        }
        let settled = self.store.settle(&self.disk, path);
        if settled.is_err() {
            self.lost.store(true, Ordering::Relaxed);
        }
        settled
    }

    /// Makes what is staged durable and gives it its names.
    fn flush(&self, staged: &mut Staged) -> Result<()> {
        if staged.files.is_empty() {
            return Ok(());
        }
        self.settle(&self.staging)?;
        let digests: Vec<Digest> = staged.files.keys().copied().collect();
        let replaced = Cell::new(false);
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
                            shelf::note_incomplete(self.store, &[digest])?;
                            fs::rename(&path, &target).at(&target)?;
                            replaced.set(true);
                        }
                    }
                    other => other.at(&target)?,
                }
                staged.known.insert(digest);
            }
            Ok(())
        })??;
        staged.bytes = 0;
        if replaced.get() || shelf::is_mending_due(self.store) {
            shelf::mend(self.store)?;
        }
        Ok(())
    }

    /// Publishes `tree` under `name`.
    ///
    /// # Errors
    /// The system's; [`Error::Full`]. The name then still stands for what it stood for before, unless the error says that
    /// the image is stored.
    pub fn publish(
        &self,
        name: &str,
        tree: &Tree,
        source: &str,
        config: RunConfig,
        notes: Vec<String>,
    ) -> Result<Record> {
        super::check_name(name)?;
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
            self.settle(&self.staging)?;
        }
        self.flush(&mut staged)?;
        drop(staged);
        // The digest is ours from here on, and what takes long needs no lock.
        self.lease.claim(&[digest], || ())?;
        let (tree_path, list_path) = (self.store.tree_path(&digest), self.store.sidecar_path(&digest));
        // A mount that no table shows is known by its hold on this very file: one that is whole is never replaced.
        if same_content(&tree_path, &image.head) {
            fs::remove_file(&tree_staged).at(&tree_staged)?;
        } else {
            fs::rename(&tree_staged, &tree_path).at(&tree_path)?;
        }
        fs::rename(&list_staged, &list_path).at(&list_path)?;
        // What a build has left that ended before it had mended them, or could not read this image.
        if shelf::is_mending_due(self.store) {
            shelf::mend(self.store)?;
        }
        // Every name the record relies on is durable before the record is; its content is already.
        self.settle(&list_path)?;
        let images = self.store.path("images");
        let dir = File::open(&images).at(&images)?;
        self.lease.claim(&[], || {
            // The collector reads this to learn of images published since it listed them.
            let log = self.store.path("published");
            let mut file = File::options().append(true).create(true).mode(0o600).open(&log).at(&log)?;
            file.write_all(&digest.0).at(&log)?;
            let path = self.store.image_path(name);
            fs::rename(&record_staged, &path).at(&path)
        })??;
        if self.store.sync {
            dir.sync_all().map_err(|error| {
                Error::Refused(format!(
                    "{name}: stored, but the disk does not say that it will last: {error}; build it again"
                ))
            })?;
        }
        Ok(record)
    }
}

impl Drop for Build<'_> {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.staging);
    }
}

/// Writes `bytes` where the file stands, but for pieces of zeros, which become holes.
fn write_data(file: &mut File, mut bytes: &[u8]) -> io::Result<()> {
    let is_zero = |piece: &[u8]| piece.iter().all(|&byte| byte == 0);
    while !bytes.is_empty() {
        let pieces = || bytes.chunks(HOLE_BYTES);
        let length = |count: usize| (count * HOLE_BYTES).min(bytes.len());
        let hole = length(pieces().take_while(|piece| is_zero(piece)).count());
        if hole > 0 {
            file.seek_relative(hole as i64)?;
            bytes = &bytes[hole..];
            continue;
        }
        let data = length(pieces().take_while(|piece| !is_zero(piece)).count());
        file.write_all(&bytes[..data])?;
        bytes = &bytes[data..];
    }
    Ok(())
}

/// Whether the object at `path` is there with its size, and was not found damaged.
fn is_whole(path: &Path, size: u64) -> bool {
    fs::symlink_metadata(path).is_ok_and(|meta| meta.len() == size && !is_marked(&meta))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::{Inode, Kind, Meta};

    #[test]
    fn nobody_waits_for_the_disk_of_a_build() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("s"), "default").unwrap();
        let build = store.build().unwrap();
        let mut tree = Tree::default();
        let data = build.put_bytes(&[1; 5000]).unwrap();
        tree.put(b"file", Inode { meta: Meta::default(), kind: Kind::File(data) }).unwrap();
        let (lock, looks) = (store.path("lock"), std::rc::Rc::new(Cell::new(0)));
        let count = looks.clone();
        super::super::AT_SETTLE.set(Some(Box::new(move || {
            let file = File::open(&lock).unwrap();
            rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).unwrap();
            count.set(count.get() + 1);
        })));
        build.publish("x", &tree, "t", RunConfig::default(), vec![]).unwrap();
        super::super::AT_SETTLE.set(None);
        assert_eq!(looks.get(), 2, "objects, and what the record relies on");
    }
}
