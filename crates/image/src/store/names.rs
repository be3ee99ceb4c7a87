//! Images by name: the record of each, and what a name may be.
//!
//! A record is a file of JSON under `images/`, renamed into place as the last
//! step of a build. Removing a name removes that file; the collector removes
//! what nothing needs any more.

use super::Store;
use crate::digest::Digest;
use crate::error::{At, Error, Result, input};
use crate::run_config::RunConfig;
use serde::{Deserialize, Serialize};
use std::fmt::{self, Display};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The cure of a damaged metadata image, in messages that do not name the image.
pub(super) const AGAIN: &str = "; build the image again";

/// Most names in a message.
const SHOWN: usize = 4;

/// What an image's name stands for.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ImageRecord {
    /// The name it was stored under.
    pub name: String,
    /// SHA-256 of the metadata image: equal trees have equal digests.
    pub digest: Digest,
    /// Names in the tree (hard links count once each).
    pub entries: u64,
    /// Regular files (inodes).
    pub files: u64,
    /// Bytes of all regular files.
    pub bytes: u64,
    /// Different objects.
    pub objects: u64,
    /// Bytes of the different objects.
    pub object_bytes: u64,
    /// Size of the metadata image, bytes.
    pub metadata_bytes: u64,
    /// When it was published, seconds since 1970.
    pub created_s: u64,
    /// What it was built from.
    pub source: String,
    /// How to run it, from an OCI image's configuration.
    #[serde(default, skip_serializing_if = "RunConfig::is_empty")]
    pub config: RunConfig,
    /// What could not be stored, one line each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// The trees of its layers, lowest first, if it came in layers that have digests.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<LayerTree>,
}

/// What the layers of an image up to one of them add up to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerTree {
    /// The chain ID of these layers, as container engines compute it: equal layers in equal order have equal chain IDs.
    pub chain: Digest,
    /// SHA-256 of the tree's metadata image.
    pub tree: Digest,
    /// What could not be stored of these layers, one line each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// An image that cannot be read: its record, so that it is unknown what the name stands for, or its metadata.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DamagedImage {
    /// The image.
    pub name: String,
    /// Its record, or metadata image.
    pub path: String,
    /// What is wrong with that, and what to do.
    pub what: String,
}

impl DamagedImage {
    fn new(name: String, path: &Path, error: impl Display) -> Self {
        let what = format!("{error}; build image {name:?} again, or forget it (`pagefold image rm`)");
        Self { name, path: path.display().to_string(), what }
    }

    /// An image with a metadata image and a list of objects that cannot be read because of `error`.
    pub(crate) fn by_tree(record: &ImageRecord, store: &Store, error: &str) -> Self {
        let path = store.tree_path(&record.digest);
        let what = error.strip_prefix(&format!("{}: ", path.display())).unwrap_or(error);
        Self::new(record.name.clone(), &path, what.strip_suffix(AGAIN).unwrap_or(what))
    }
}

impl Display for DamagedImage {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.what)
    }
}

/// The records of a domain.
#[derive(Clone, Debug, Default)]
pub struct ImageRecords {
    /// Images, by name.
    pub images: Vec<ImageRecord>,
    /// The others, by name.
    pub damaged: Vec<DamagedImage>,
}

/// Refuses what cannot be an image's name. Callers check before they build.
///
/// # Errors
/// A name that is empty, too long, or has control characters.
pub fn check_name(name: &str) -> Result<()> {
    if name.is_empty() || name.len() > 200 || name.chars().any(char::is_control) {
        return Err(input!("{name:?}: an image's name has 1 to 200 bytes and no control characters"));
    }
    let bytes = file_name(name).len();
    if bytes > 255 {
        return Err(input!(
            "{name:?}: too long; all but letters, digits, - _ and . takes three bytes of a file name, {bytes} of 255 here"
        ));
    }
    Ok(())
}

/// The name of an image's record.
fn file_name(name: &str) -> String {
    let mut file = String::new();
    for byte in name.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' => file.push(byte.into()),
            b'.' if !file.is_empty() => file.push('.'),
            _ => file.push_str(&format!("%{byte:02x}")),
        }
    }
    file
}

/// The image that a record of this name belongs to.
fn image_name(file: &[u8]) -> String {
    let (mut name, mut rest) = (Vec::new(), file);
    while let Some((&first, after)) = rest.split_first() {
        let hex = after.get(..2).filter(|hex| first == b'%' && hex.iter().all(u8::is_ascii_hexdigit));
        match hex.and_then(|hex| u8::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok()) {
            Some(byte) => {
                name.push(byte);
                rest = &after[2..];
            }
            None => {
                name.push(first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&name).into_owned()
}

impl Store {
    pub(super) fn image_path(&self, name: &str) -> PathBuf {
        self.path("images").join(file_name(name))
    }

    /// The record of image `name`.
    ///
    /// # Errors
    /// [`Error::NoImage`]; a damaged record.
    pub fn image(&self, name: &str) -> Result<ImageRecord> {
        let path = self.image_path(name);
        match fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text)
                .map_err(|error| Error::Damaged(DamagedImage::new(name.into(), &path, error).to_string())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(Error::NoImage { name: name.into(), domain: self.domain.clone(), store: self.root.clone() })
            }
            Err(error) => Err(error).at(path),
        }
    }

    /// All images, by name.
    ///
    /// # Errors
    /// A damaged record, the system's.
    pub fn images(&self) -> Result<Vec<ImageRecord>> {
        let ImageRecords { images, damaged } = self.records()?;
        damaged.first().map_or(Ok(images), |record| Err(Error::Damaged(record.to_string())))
    }

    /// All images, and the records that cannot be read.
    ///
    /// # Errors
    /// The system's.
    pub fn records(&self) -> Result<ImageRecords> {
        let dir = self.path("images");
        let mut all = ImageRecords::default();
        for entry in fs::read_dir(&dir).at(&dir)? {
            let entry = entry.at(&dir)?;
            let path = entry.path();
            let read = match fs::read(&path) {
                // Removed since the directory was read.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                read => read.map_err(|error| error.to_string()),
            };
            match read.and_then(|text| serde_json::from_slice(&text).map_err(|error| error.to_string())) {
                Ok(record) => all.images.push(record),
                Err(error) => {
                    let name = image_name(entry.file_name().as_encoded_bytes());
                    all.damaged.push(DamagedImage::new(name, &path, error));
                }
            }
        }
        all.images.sort_by(|a, b| a.name.cmp(&b.name));
        all.damaged.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }

    /// The names that stand for an image, for messages; its digest if it has none.
    pub(crate) fn names_of(&self, digest: &Digest) -> String {
        let images = self.records().unwrap_or_default().images;
        let mut names: Vec<&str> =
            images.iter().filter(|image| image.digest == *digest).map(|image| image.name.as_str()).collect();
        if names.len() > SHOWN {
            names.truncate(SHOWN);
            names.push("…");
        }
        if names.is_empty() { digest.to_string() } else { names.join(", ") }
    }

    /// Removes the name; the collector takes what nothing needs any more.
    ///
    /// # Errors
    /// [`Error::NoImage`].
    pub fn remove(&self, name: &str) -> Result<()> {
        let _shared = self.lock(false)?;
        let path = self.image_path(name);
        match fs::remove_file(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(Error::NoImage { name: name.into(), domain: self.domain.clone(), store: self.root.clone() })
            }
            other => other.at(path),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_called_after_its_image_and_the_image_after_its_record() {
        for name in ["app", "app:1", ".hidden", "a/b c%41", "\u{fc}"] {
            assert_eq!(image_name(file_name(name).as_bytes()), name);
        }
        // A file name that no image name gives is shown as it is.
        assert_eq!(image_name(b"%+1%4"), "%+1%4");
    }
}
