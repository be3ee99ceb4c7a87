//! The file that makes a directory an image store: its format number, and the store's own id.

use crate::error::{At, Error, Result};
use crate::random_id::random_id;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The newest store format that this program reads.
pub const FORMAT: u64 = 2;
/// The format of a new store. The next one is for stores with link farms: an older collector would not know that they
/// are mounted.
const FIRST_FORMAT: u64 = 1;
const FORMAT_FILE: &str = "pagefold-image-store";

#[derive(Serialize, Deserialize)]
pub(super) struct Format {
    format: u64,
    pub(super) id: String,
}

/// Makes the directory `root` a store unless it is one.
///
/// # Errors
/// A directory that has something else in it; the system's.
pub(super) fn create(root: &Path) -> Result<()> {
    let path = root.join(FORMAT_FILE);
    if path.exists() {
        return Ok(());
    }
    // A concurrent first user links the format before anything else, so entries without it belong to something else. A
    // file system of its own has `lost+found` from the start.
    let mut entries = fs::read_dir(root).at(root)?.flatten();
    let foreign = entries.any(|entry| {
        let name = entry.file_name();
        !name.as_encoded_bytes().starts_with(b".") && name != "lost+found"
    });
    if foreign && !path.exists() {
        return Err(Error::Refused(format!(
            "{}: neither empty nor an image store; give --store another directory",
            root.display()
        )));
    }
    let staged = stage(root, &Format { format: FIRST_FORMAT, id: random_id()? })?;
    // Of two concurrent first users the first link wins; the other user reads that file.
    match fs::hard_link(&staged, &path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error).at(&path),
        _ => fs::remove_file(&staged).at(&staged),
    }
}

/// Writes a format file under a temporary name, durably.
fn stage(root: &Path, format: &Format) -> Result<PathBuf> {
    let text = serde_json::to_vec(format).expect("plain data");
    let staged = root.join(format!(".{}", random_id()?));
    let mut file = File::options().write(true).create_new(true).mode(0o600).open(&staged).at(&staged)?;
    let written = file.write_all(&text).and_then(|()| file.sync_all());
    if written.is_err() {
        let _ = fs::remove_file(&staged);
    }
    written.at(&staged).map(|()| staged)
}

/// Reads the format of the store at `root`.
///
/// # Errors
/// A store of a later version; a damaged file.
pub(super) fn read(root: &Path) -> Result<Format> {
    let path = root.join(FORMAT_FILE);
    let text = fs::read(&path).at(&path)?;
    let bad = |error| Error::Damaged(format!("{}: {error}; restore it from another copy", path.display()));
    // In a store of a later version only the number must be readable.
    let number: serde_json::Value = serde_json::from_slice(&text).map_err(bad)?;
    let found = number["format"].as_u64().unwrap_or(u64::MAX);
    if found > FORMAT {
        return Err(Error::Newer { path: root.into(), found, known: FORMAT });
    }
    serde_json::from_slice(&text).map_err(bad)
}

/// Raises the store's format to the newest, which closes it to versions that do not know it.
pub(super) fn upgrade(root: &Path, id: &str) -> Result<()> {
    let path = root.join(FORMAT_FILE);
    let text = fs::read(&path).at(&path)?;
    if serde_json::from_slice(&text).is_ok_and(|now: Format| now.format >= FORMAT) {
        return Ok(());
    }
    let staged = stage(root, &Format { format: FORMAT, id: id.into() })?;
    let renamed = fs::rename(&staged, &path);
    if renamed.is_err() {
        let _ = fs::remove_file(&staged);
    }
    renamed.at(&path)
}

/// Refuses the store of another user. That user could not use what this process makes in it, this process's collector
/// could not see what the other user's builds rely on, and the other user's links would lead this process elsewhere.
///
/// The owner is that of the format file: the directory may belong to another user, or to many. A file server may give
/// all files one owner; then the files that this process makes have that owner too.
pub(super) fn check_owner(root: &Path) -> Result<()> {
    let path = root.join(FORMAT_FILE);
    let owner = fs::symlink_metadata(&path).at(&path)?.uid();
    let owner_of_new_files = || -> Result<u32> {
        let probe = root.join(format!(".{}", random_id()?));
        let file = File::options().write(true).create_new(true).mode(0o600).open(&probe).at(&probe)?;
        fs::remove_file(&probe).at(&probe)?;
        Ok(file.metadata().at(&probe)?.uid())
    };
    if owner == rustix::process::geteuid().as_raw() || owner_of_new_files().is_ok_and(|uid| uid == owner) {
        return Ok(());
    }
    Err(Error::Refused(format!(
        "{}: a store of user {owner}'s; run as that user, or give --store another directory",
        root.display()
    )))
}
