//! What a build has written and not yet published: objects without names, and the lease that keeps the objects it found.
//!
//! Objects are written to a directory of the build's own. One syncfs makes a
//! batch of them durable before each is renamed to its digest, so an object that has its
//! name is complete. A build that ends early leaves nothing under a name but
//! whole objects.

use super::lease::Lease;
use super::objects::is_whole;
use super::{Store, make_dir};
use crate::buffer::with_buffer;
use crate::digest::{Digest, hash_reader};
use crate::error::{At, Error, Result};
use crate::sys;
use crate::tree::{Data, INLINE_MAX};
use pagefold_os::fill::fill;
use rustix::fs::{AtFlags, CWD, RenameFlags, Stat};
use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

/// Staged bytes after which a build publishes its objects so far: a killed import does not have to redo them.
const BATCH_BYTES: u64 = 1 << 30;

/// Staged objects after which it does.
const BATCH_OBJECTS: usize = 16_384;

/// Size of the pieces that become holes if they are all zeros, bytes.
pub(crate) const HOLE_BYTES: usize = 1 << 16;

/// Objects claimed and looked for per hold of the domain lock: milliseconds.
const CLAIM_BATCH: usize = if cfg!(pagefold_stress) { 2 } else { 1024 };

/// What a build did.
#[derive(Debug, Default)]
pub struct BuildStats {
    /// Objects that were new to the store.
    pub objects_new: AtomicU64,
    /// Their bytes.
    pub bytes_new: AtomicU64,
    /// Files with an object that was there already.
    pub objects_found: AtomicU64,
    /// Bytes read and hashed.
    pub bytes_hashed: AtomicU64,
    /// Files with a digest that the stat cache knew.
    pub files_unchanged: AtomicU64,
}

/// Objects that are staged and have no names yet.
#[derive(Default)]
pub(crate) struct Batch {
    /// Digest to staging file.
    files: HashMap<Digest, PathBuf>,
    bytes: u64,
    /// Whether copies are among them: the disk may not have those yet.
    has_copies: bool,
    /// Digests that this build has claimed and seen in the store.
    known: HashSet<Digest>,
}

impl Batch {
    /// Returns true if the batch is to be published before more is staged.
    pub(crate) fn is_full(&self) -> bool {
        self.bytes >= BATCH_BYTES || self.files.len() >= BATCH_OBJECTS
    }
}

/// The staging directory of a build. Dropping it removes what was not published.
pub(crate) struct Staging<'a> {
    pub(super) store: &'a Store,
    pub(super) lease: Lease<'a>,
    dir: PathBuf,
    /// The staging directory, open since before the first write.
    disk: File,
    batch: Mutex<Batch>,
    counter: AtomicU64,
    /// Whether the disk has what is linked: see [`Staging::sync_before_links`].
    has_links: AtomicBool,
    /// Whether the disk may have lost something of the build.
    lost: AtomicBool,
    pub(crate) stats: BuildStats,
}

impl<'a> Staging<'a> {
    /// Takes a lease and makes a staging directory, after the remains of dead builds were removed.
    pub(crate) fn new(store: &'a Store) -> Result<Self> {
        store.clear_dead_builds();
        let lease = Lease::written(store)?;
        let dir = store.path("staging").join(lease.id());
        make_dir(&dir, 0o700)?;
        Ok(Self {
            store,
            lease,
            disk: File::open(&dir).at(&dir)?,
            dir,
            batch: Mutex::default(),
            counter: AtomicU64::new(0),
            has_links: AtomicBool::new(false),
            lost: AtomicBool::new(false),
            stats: BuildStats::default(),
        })
    }

    pub(crate) fn store(&self) -> &'a Store {
        self.store
    }

    /// Locks the staged objects.
    pub(crate) fn batch(&self) -> MutexGuard<'_, Batch> {
        self.batch.lock().expect("no panic while held")
    }

    /// Returns true if the store has object `digest`; if it has, the object stays until this build ends.
    pub(crate) fn has(&self, digest: &Digest, size: u64) -> Result<bool> {
        {
            let batch = self.batch();
            if batch.known.contains(digest) || batch.files.contains_key(digest) {
                return Ok(true);
            }
        }
        let path = self.store.object_path(digest);
        let there = || is_whole(&path, size);
        // Only an object that exists needs the claim, and then a second look. A missing one is claimed when it is published.
        if !there() {
            return Ok(false);
        }
        let found = self.lease.claim(&[*digest], there)?;
        if found {
            self.batch().known.insert(*digest);
            self.stats.objects_found.fetch_add(1, Ordering::Relaxed);
        }
        Ok(found)
    }

    /// [`Staging::has`] for many objects, in steps that hold the domain lock for a short time each.
    pub(crate) fn has_all(&self, wanted: &[(Digest, u64)]) -> Result<Vec<bool>> {
        let mut found = Vec::with_capacity(wanted.len());
        for piece in wanted.chunks(CLAIM_BATCH) {
            let digests: Vec<Digest> = piece.iter().map(|(digest, _)| *digest).collect();
            self.lease.claim(&digests, || {
                found.extend(piece.iter().map(|(digest, size)| is_whole(&self.store.object_path(digest), *size)));
            })?;
        }
        let there = || wanted.iter().zip(&found).filter(|(_, found)| **found).map(|((digest, _), _)| *digest);
        self.stats.objects_found.fetch_add(there().count() as u64, Ordering::Relaxed);
        self.batch().known.extend(there());
        Ok(found)
    }

    /// Opens an object that this build has staged or found, wherever it is by now.
    pub(crate) fn open_object(&self, digest: &Digest) -> Result<File> {
        // With the batch locked no object is between its two names.
        let batch = self.batch();
        let path = batch.files.get(digest).cloned().unwrap_or_else(|| self.store.object_path(digest));
        File::open(&path).at(&path)
    }

    /// Claims a tree, and with it the tree's objects. Returns true if the tree exists.
    pub(crate) fn claim_tree(&self, digest: &Digest) -> Result<bool> {
        self.lease.claim_tree(digest)
    }

    /// A new path in the staging directory.
    pub(crate) fn scratch_path(&self) -> PathBuf {
        self.dir.join(self.counter.fetch_add(1, Ordering::Relaxed).to_string())
    }

    pub(super) fn scratch(&self) -> Result<(PathBuf, File)> {
        let path = self.scratch_path();
        let file = File::options().read(true).write(true).create_new(true).mode(0o600).open(&path).at(&path)?;
        Ok((path, file))
    }

    /// A file without a name, for input that must be read twice; gone when closed.
    pub(crate) fn spool(&self) -> Result<File> {
        let (path, file) = self.scratch()?;
        fs::remove_file(&path).at(&path)?;
        Ok(file)
    }

    /// Adds the file `path` to the batch as object `digest`, or removes it if the batch has that object. It is a copy, or a
    /// link to a file that is not the build's.
    fn stage(&self, digest: Digest, size: u64, path: PathBuf, is_copy: bool) -> Result<()> {
        let mut batch = self.batch();
        if batch.files.contains_key(&digest) {
            drop(batch);
            return fs::remove_file(&path).at(&path);
        }
        batch.files.insert(digest, path);
        batch.bytes += size;
        batch.has_copies |= is_copy;
        self.stats.objects_new.fetch_add(1, Ordering::Relaxed);
        self.stats.bytes_new.fetch_add(size, Ordering::Relaxed);
        Ok(())
    }

    /// Stages an open file under another name of its own. Returns `None` if it cannot be an object: it is small, its owner
    /// may not read it, a process has it open or has changed it, or it is on another file system.
    pub(crate) fn link_file(&self, file: &mut File, what: &Path, stat: &Stat) -> Result<Option<Data>> {
        let size = stat.st_size as u64;
        // A file that its owner may not read would be taken for a damaged object.
        let may_be_object = size > INLINE_MAX && stat.st_mode & 0o400 != 0;
        let is_unused = |file: &File| matches!(sys::is_open_elsewhere(file), Ok(false));
        if !may_be_object || !is_unused(file) {
            return Ok(None);
        }
        let (digest, count) = hash_reader(file).at(what)?;
        self.stats.bytes_hashed.fetch_add(count, Ordering::Relaxed);
        if count != size {
            return Ok(None);
        }
        if self.has(&digest, size)? {
            return Ok(Some(Data::Object(digest, size)));
        }
        let path = self.scratch_path();
        let open = format!("/proc/self/fd/{}", file.as_raw_fd());
        if rustix::fs::linkat(CWD, open, CWD, &path, AtFlags::SYMLINK_FOLLOW).is_err() {
            return Ok(None);
        }
        let after = rustix::fs::fstat(&*file).at(what)?;
        if !sys::is_unwritten(stat, &after) || !is_unused(file) {
            fs::remove_file(&path).at(&path)?;
            return Ok(None);
        }
        self.stage(digest, size, path, false)?;
        Ok(Some(Data::Object(digest, size)))
    }

    /// Stages a file's bytes.
    pub(crate) fn put_bytes(&self, bytes: &[u8]) -> Result<Data> {
        let size = bytes.len() as u64;
        if size <= INLINE_MAX {
            return Ok(Data::Inline(bytes.into()));
        }
        let digest = Digest::of(bytes);
        self.stats.bytes_hashed.fetch_add(size, Ordering::Relaxed);
        if !self.has(&digest, size)? {
            let (path, mut file) = self.scratch()?;
            file.write_all(bytes).at(&path)?;
            self.stage(digest, size, path, true)?;
        }
        Ok(Data::Object(digest, size))
    }

    /// Stages everything that `reader` gives, without holding it in memory. Calls `tick` with the size of each piece.
    pub(crate) fn put_reader(&self, reader: &mut impl Read, what: &Path, mut tick: impl FnMut(u64)) -> Result<Data> {
        with_buffer(1 << 20, |buffer| self.put_pieces(reader, what, &mut tick, buffer))
    }

    fn put_pieces(
        &self,
        reader: &mut impl Read,
        what: &Path,
        tick: &mut impl FnMut(u64),
        buffer: &mut [u8],
    ) -> Result<Data> {
        // Full pieces: holes are where the file's pieces are zeros, however the reader hands it out.
        let mut next = |buffer: &mut [u8]| fill(buffer, |rest, _| reader.read(rest)).at(what);
        let mut filled = next(buffer)?;
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
            filled = next(buffer)?;
            tick(filled as u64);
        }
        // A hole at the end has not lengthened the file yet.
        file.set_len(size).at(&path)?;
        let digest = Digest(hasher.finalize().into());
        self.stats.bytes_hashed.fetch_add(size, Ordering::Relaxed);
        if self.has(&digest, size)? {
            fs::remove_file(&path).at(&path)?;
        } else {
            self.stage(digest, size, path, true)?;
        }
        Ok(Data::Object(digest, size))
    }

    /// Makes everything written so far durable. The disk reports a loss once: its silence towards another thread, or at
    /// a second try, says nothing of earlier writes.
    pub(super) fn sync(&self, path: &Path) -> Result<()> {
        if self.lost.load(Ordering::Relaxed) {
            return Err(Error::Refused(format!(
                "{}: not all that was written has reached the disk; build it again",
                self.dir.display()
            )));
        }
        let synced = self.store.sync_disk(&self.disk, path);
        if synced.is_err() {
            self.lost.store(true, Ordering::Relaxed);
        }
        synced
    }

    /// Makes the bytes durable of all files that [`Staging::link_file`] links from now on or has linked: another thread
    /// hashes them meanwhile. The caller has looked at each of them before, and links none that has changed since.
    pub(crate) fn sync_before_links(&self) -> Result<()> {
        self.sync(&self.dir)?;
        self.has_links.store(true, Ordering::Release);
        Ok(())
    }

    /// Makes the objects of the batch durable and gives them their names. Returns true if link farms need a repair: an
    /// object was replaced, or a repair was due already. The caller keeps the batch locked until it is done.
    pub(crate) fn flush(&self, batch: &mut Batch) -> Result<bool> {
        if batch.files.is_empty() {
            return Ok(false);
        }
        if batch.has_copies || !self.has_links.load(Ordering::Acquire) {
            self.sync(&self.dir)?;
        }
        let digests: Vec<Digest> = batch.files.keys().copied().collect();
        let mut replaced = false;
        self.lease.claim(&digests, || -> Result<()> {
            for (digest, path) in batch.files.drain() {
                replaced |= self.name_object(digest, &path)?;
                batch.known.insert(digest);
            }
            Ok(())
        })??;
        (batch.bytes, batch.has_copies) = (0, false);
        Ok(replaced || self.store.is_repair_due())
    }

    /// Gives the staged file `path` the name of object `digest`. Returns true if it replaced a damaged object.
    fn name_object(&self, digest: Digest, path: &Path) -> Result<bool> {
        let target = self.store.object_path(&digest);
        let result = match rename_new(path, &target) {
            Err(rustix::io::Errno::NOENT) => {
                make_dir(target.parent().expect("objects/xx"), 0o700)?;
                rename_new(path, &target)
            }
            other => other,
        };
        if result != Err(rustix::io::Errno::EXIST) {
            return result.at(&target).map(|()| false);
        }
        if is_whole(&target, fs::symlink_metadata(path).at(path)?.len()) {
            return fs::remove_file(path).at(path).map(|()| false);
        }
        // Damaged from outside; the staged bytes were hashed a moment ago.
        self.store.note_for_repair(&[digest])?;
        fs::rename(path, &target).at(&target)?;
        Ok(true)
    }
}

impl Drop for Staging<'_> {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// Writes `bytes` at the file's position, except pieces of zeros, which become holes.
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

/// Renames `from` to `to` unless that name exists.
fn rename_new(from: &Path, to: &Path) -> rustix::io::Result<()> {
    match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // File systems without the flag (NFS): a link refuses an existing name as well.
        Err(rustix::io::Errno::INVAL) => rustix::fs::link(from, to).and_then(|()| rustix::fs::unlink(from)),
        other => other,
    }
}
