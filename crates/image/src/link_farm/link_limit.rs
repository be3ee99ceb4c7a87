//! The note that an object cannot have another hard link, because it has as many as its file system gives a file.
//!
//! While that is the case, none of the object's images gets a new link farm. Finding it out takes a link for each object
//! before it, so it is noted (`trees/DIGEST.unshelved`), and no mount tries again until the object has fewer links.

use crate::digest::Digest;
use crate::error::Error;
use crate::store::Store;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

/// The note of an image. The collector removes it with the image.
fn path(store: &Store, digest: &Digest) -> PathBuf {
    store.path("trees").join(format!("{}.unshelved", digest.hex()))
}

/// The note: which object, its inode, and its number of links. In a copy of the store the inode is another.
fn note_of(store: &Store, object: &Digest) -> io::Result<Vec<u8>> {
    let meta = fs::symlink_metadata(store.object_path(object))?;
    Ok([&object.0[..], &meta.ino().to_le_bytes(), &meta.nlink().to_le_bytes()].concat())
}

/// Notes that `object` of image `digest` cannot have another link. Without a note the next mount tries again.
pub(super) fn note(store: &Store, digest: &Digest, object: &Digest) {
    let _ = note_of(store, object).and_then(|note| fs::write(path(store, digest), note));
}

/// Returns true if there is a note for image `digest`, and the object is still as noted.
pub(super) fn is_noted(store: &Store, digest: &Digest) -> bool {
    let Ok(note) = fs::read(path(store, digest)) else { return false };
    let object = note.get(..32).and_then(|raw| Some(Digest(raw.try_into().ok()?)));
    object.is_some_and(|object| note_of(store, &object).is_ok_and(|now| now == note))
}

/// Returns true if `error` says that a file cannot have another hard link; some file systems give it a single one.
pub(super) fn is_link_limit(error: &Error) -> bool {
    let code = if let Error::Io { source, .. } = error { source.raw_os_error() } else { None };
    matches!(code, Some(libc::EMLINK | libc::EPERM | libc::EOPNOTSUPP))
}
