//! Trees by digest: metadata images, and the list of each one's objects beside it.
//!
//! An image is checked against the digest that names it whenever it is read.
//! The list is a shortcut that carries its own checksum; where it is missing
//! or damaged the image tells the same.

use super::Store;
use super::names::AGAIN;
use crate::digest::Digest;
use crate::erofs;
use crate::error::{At, Error, Result};
use crate::tree::Tree;
use std::fs::{self, File};
use std::io::{self, Read};

impl Store {
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
                return Err(Error::Damaged(format!("{}: missing{AGAIN}", path.display())));
            }
            other => other.at(&path)?,
        };
        if found != *digest {
            return Err(Error::Damaged(format!("{}: damaged{AGAIN}", path.display())));
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
}

const OBJECTS_MAGIC: &[u8; 8] = b"PFOBJS01";

const OBJECT_ENTRY: usize = 44;

/// The list of a tree's objects as the sidecar holds it: magic, entries, and their SHA-256's first 8 bytes.
pub(super) fn encode_objects(list: &[(Digest, u64, u32)]) -> Vec<u8> {
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
