//! Downloads: packed layers on their way into the store. What a pull that ended early has fetched stays for the next one.
//!
//! A pull locks the files of its layers before it fetches, in the order of their names, until its image is published. A
//! second pull with the same layers waits, and then finds most of them known.

use super::{Store, entries, make_dir, unless_gone};
use crate::digest::{Digest, Hashing};
use crate::error::{At, Result, input};
use rustix::fs::FlockOperation;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The file of a packed layer, locked: its bytes from the first on, as far as they were fetched.
#[derive(Debug)]
pub struct Download {
    path: PathBuf,
    file: File,
    bytes: u64,
}

/// Locks the file `path`, which `open` opens; `None` if another process has it locked and `wait` is not set. Not the file of
/// a pull that has removed it meanwhile.
fn lock(path: &Path, wait: bool, open: impl Fn(&Path) -> std::io::Result<File>) -> Result<Option<File>> {
    let operation = if wait { FlockOperation::LockExclusive } else { FlockOperation::NonBlockingLockExclusive };
    loop {
        let Some(file) = unless_gone(open(path), path)? else { return Ok(None) };
        match rustix::fs::flock(&file, operation) {
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
            locked => locked.at(path)?,
        }
        if file.metadata().at(path)?.nlink() > 0 {
            return Ok(Some(file));
        }
    }
}

impl Store {
    /// Locks the download of the packed layer `digest`; an empty one if there is none. Waits for a pull that has it. A pull
    /// that takes several takes them in the order of their digests, or two pulls could wait for each other.
    ///
    /// # Errors
    /// The system's.
    pub fn download(&self, digest: &Digest) -> Result<Download> {
        let dir = self.path("downloads");
        make_dir(&dir, 0o700)?;
        let path = dir.join(digest.hex());
        let open =
            |path: &Path| File::options().read(true).write(true).create(true).truncate(false).mode(0o600).open(path);
        let file = lock(&path, true, open)?.ok_or_else(|| input!("{}: removed", path.display()))?;
        let bytes = file.metadata().at(&path)?.len();
        Ok(Download { path, file, bytes })
    }

    /// The downloads that no pull has.
    pub(crate) fn abandoned_downloads(&self) -> Result<Vec<Download>> {
        let dir = self.path("downloads");
        let mut found = Vec::new();
        if !dir.try_exists().at(&dir)? {
            return Ok(found);
        }
        for entry in entries(&dir)? {
            let path = entry.path();
            if let Some(file) = lock(&path, false, |path| File::open(path))? {
                let bytes = file.metadata().at(&path)?.len();
                found.push(Download { path, file, bytes });
            }
        }
        Ok(found)
    }
}

impl Download {
    /// How many bytes there are.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Appends `piece`.
    ///
    /// # Errors
    /// The system's; [`Error::Full`](crate::Error::Full).
    pub fn append(&mut self, piece: &[u8]) -> Result<()> {
        self.file.seek(SeekFrom::Start(self.bytes)).at(&self.path)?;
        self.file.write_all(piece).at(&self.path)?;
        self.bytes += piece.len() as u64;
        Ok(())
    }

    /// Forgets all bytes.
    ///
    /// # Errors
    /// The system's.
    pub fn restart(&mut self) -> Result<()> {
        self.file.set_len(0).at(&self.path)?;
        self.bytes = 0;
        Ok(())
    }

    /// Compares the digest of all bytes with `expected`; `what` names them in an error.
    ///
    /// # Errors
    /// [`Error::Digest`](crate::Error::Digest); the system's.
    pub fn check(&self, what: &str, expected: Digest) -> Result<()> {
        Hashing::new(self.reader()?).finish(what, expected)
    }

    /// Reads from the first byte on.
    ///
    /// # Errors
    /// The system's.
    pub fn reader(&self) -> Result<impl Read + use<>> {
        let mut file = self.file.try_clone().at(&self.path)?;
        file.rewind().at(&self.path)?;
        Ok(file)
    }

    /// Removes the file.
    ///
    /// # Errors
    /// The system's.
    pub fn remove(self) -> Result<()> {
        fs::remove_file(&self.path).at(&self.path)
    }
}
