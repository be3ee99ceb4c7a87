//! Trees by digest: metadata images, and what lies beside each.
//!
//! An image is checked against the digest that names it whenever it is read.
//! The list of its objects is a shortcut that carries its own checksum; where it is missing
//! or damaged, the image gives the same list.

use super::Store;
use super::names::AGAIN;
use super::objects::is_marked;
use crate::digest::{Digest, hash_reader};
use crate::error::{At, Error, Result};
use crate::format::erofs;
use crate::tree::Tree;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::PathBuf;

/// How a metadata directory's name goes on after the image's digest.
pub(crate) const ROOT_DIRECTORY: &str = "rootdir";
/// The same for a user namespace; the id mapping's name follows.
pub(crate) const USER_DIRECTORY: &str = "userdir";
/// The end of that name if the directory's files lead to the image's link farm.
pub(crate) const FARM_SUFFIX: &str = "-shelved";

impl Store {
    /// The metadata image of `digest`.
    pub fn tree_path(&self, digest: &Digest) -> PathBuf {
        self.path("trees").join(format!("{}.erofs", digest.hex()))
    }

    /// The self-contained image of `digest`, where one was written.
    pub fn full_path(&self, digest: &Digest) -> PathBuf {
        self.path("trees").join(format!("{}.full.erofs", digest.hex()))
    }

    /// Returns true if there is a self-contained image of `digest` that was not found damaged.
    pub(crate) fn has_full(&self, digest: &Digest) -> bool {
        fs::symlink_metadata(self.full_path(digest)).is_ok_and(|meta| !is_marked(&meta))
    }

    /// The start profile of `digest`, where one was recorded.
    pub(crate) fn profile_path(&self, digest: &Digest) -> PathBuf {
        self.path("trees").join(format!("{}.start", digest.hex()))
    }

    /// The metadata of `digest` as a directory. Its files have all owners, or those that the user namespace with id
    /// mapping `mapping` knows. They lead to objects by place with `uses_farm`, else by digest.
    pub(crate) fn directory_path(&self, digest: &Digest, mapping: Option<&str>, uses_farm: bool) -> PathBuf {
        let kind = mapping.map_or(ROOT_DIRECTORY.to_string(), |mapping| format!("{USER_DIRECTORY}-{mapping}"));
        let suffix = if uses_farm { FARM_SUFFIX } else { "" };
        self.path("trees").join(format!("{}.{kind}{suffix}", digest.hex()))
    }

    /// All metadata directories, by image.
    pub(crate) fn directories(&self) -> Result<BTreeMap<Digest, Vec<PathBuf>>> {
        let (trees, mut all) = (self.path("trees"), BTreeMap::<Digest, Vec<PathBuf>>::new());
        for entry in fs::read_dir(&trees).at(&trees)? {
            let entry = entry.at(&trees)?;
            let name = entry.file_name();
            let Some((hex, kind)) = name.as_encoded_bytes().split_at_checked(64) else { continue };
            // Names with a further dot are notes, or remains.
            let kind = kind.strip_prefix(b".").filter(|kind| !kind.contains(&b'.')).unwrap_or_default();
            let whole = [ROOT_DIRECTORY, USER_DIRECTORY].iter().any(|start| kind.starts_with(start.as_bytes()));
            if let (true, Some(digest)) = (whole, Digest::from_hex(hex)) {
                all.entry(digest).or_default().push(entry.path());
            }
        }
        Ok(all)
    }

    /// Returns true if the store has something of image `digest`, or may have.
    pub(crate) fn knows(&self, digest: &Digest) -> bool {
        let paths = [self.tree_path(digest), self.objects_list_path(digest), self.full_path(digest)];
        paths.iter().any(|path| path.try_exists().unwrap_or(true))
    }

    /// The list of an image's objects.
    pub(super) fn objects_list_path(&self, digest: &Digest) -> PathBuf {
        self.path("trees").join(format!("{}.objects", digest.hex()))
    }

    /// The bytes of a metadata image, checked against the digest that names it.
    ///
    /// # Errors
    /// [`Error::Damaged`] if it is missing, or its bytes have another digest.
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
        self.tree_whole(digest, |mut file| hash_reader(&mut file).map(|(found, _)| (found, ())))
    }

    /// What `read` returns for a metadata image, if the digest it found names the image.
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
        if let Some(list) = fs::read(self.objects_list_path(digest)).ok().and_then(|bytes| decode_objects(&bytes)) {
            return Ok(list);
        }
        // The list is only a shortcut; the metadata image is the truth.
        Ok(self.tree(digest)?.objects())
    }
}

const OBJECTS_MAGIC: &[u8; 8] = b"PFOBJS01";

const OBJECT_ENTRY: usize = 44;

/// The list of a tree's objects as its file holds it: magic, entries, and the first 8 bytes of their SHA-256.
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

/// Reads a list of objects; `None` if the bytes are not exactly one.
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
