//! The check of a link farm: its metadata is compared with the image, and its links are repaired.

use super::repair::repair_one;
use super::{CHECK_BYTES, LinkFarm};
use crate::digest::Digest;
use crate::error::{At, Result};
use crate::format::erofs;
use crate::store::Store;
use crate::tree::Tree;
use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;

/// What is wrong with an image's link farm, if it has one: files, and what to say about each. Links are repaired.
///
/// # Errors
/// The system's.
pub(crate) fn verify(store: &Store, digest: &Digest, tree: &Tree) -> Result<Vec<(PathBuf, String)>> {
    let path = LinkFarm::of(store, digest).metadata();
    let mut all = Vec::new();
    match fs::symlink_metadata(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        other => {
            other.at(&path)?;
            let (found, wanted) = (fs::read(&path).at(&path)?, erofs::write(tree, erofs::Layout::Mount)?.head);
            // The check itself may be that of the store that this one is a copy of: then the next mount writes it again.
            if found.len() != wanted.len() + CHECK_BYTES || found[..wanted.len()] != wanted {
                let again = "unmount the image and remove this file; the next mount makes it again";
                all.push((path, format!("not what the image makes it; {again}")));
            }
        }
    }
    let lock = store.lock_farms(true);
    let found = repair_one(store, digest, tree)?;
    drop(lock);
    if !found.missing.is_empty() {
        // What is built in its place is another file than the farm has.
        let _ = store.note_for_repair(&found.missing);
    }
    if found.wrong > 0 {
        let what = match &found.failed {
            None if found.wrong == 1 => "1 file is another than its object; mended".to_owned(),
            None => format!("{} files are others than their objects; mended", found.wrong),
            Some(error) => format!("files are others than the objects, and it cannot be mended: {error}"),
        };
        all.push((LinkFarm::of(store, digest).objects(), what));
    }
    Ok(all)
}
