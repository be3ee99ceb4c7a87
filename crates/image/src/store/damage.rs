//! Which objects were found damaged: a hint, from which a mount tells the operator that the image shows damaged files.
//!
//! The mark itself is the permission that an object has lost, see [`super::objects`].

use super::Store;
use super::objects::is_marked;
use crate::digest::Digest;
use crate::error::{At, Result};
use std::collections::BTreeSet;
use std::fs;

const LIST: &str = "damaged";

impl Store {
    /// Notes objects that were found damaged or missing. Unless all images were looked at (`in_all`), objects noted before
    /// stay noted until they are whole.
    pub(crate) fn note_damaged(&self, found: impl Iterator<Item = Digest>, in_all: bool) -> Result<()> {
        let before = self.noted_damage();
        let mut all: BTreeSet<Digest> = found.collect();
        all.extend(before.iter().filter(|object| !in_all && self.is_damaged(object)));
        if all == before {
            return Ok(());
        }
        let path = self.path(LIST);
        if all.is_empty() {
            return fs::remove_file(&path).at(&path);
        }
        let staged = self.path("staging").join(format!("{LIST}-{}", std::process::id()));
        let text: String = all.iter().map(|object| object.hex() + "\n").collect();
        fs::write(&staged, text).at(&staged)?;
        fs::rename(&staged, &path).at(&path)
    }

    /// How many objects of an image were found damaged or missing, and still are.
    pub(crate) fn count_damaged(&self, image: &Digest) -> usize {
        let noted = self.noted_damage();
        if noted.is_empty() {
            return 0;
        }
        let objects = self.tree_objects(image).unwrap_or_default();
        objects.iter().filter(|(object, ..)| noted.contains(object) && self.is_damaged(object)).count()
    }

    fn noted_damage(&self) -> BTreeSet<Digest> {
        let text = fs::read_to_string(self.path(LIST)).unwrap_or_default();
        text.lines().filter_map(|line| Digest::from_hex(line.as_bytes())).collect()
    }

    fn is_damaged(&self, object: &Digest) -> bool {
        fs::symlink_metadata(self.object_path(object)).map_or(true, |meta| is_marked(&meta))
    }
}
