//! The repair of link farms after objects were replaced or came back: such an object has another inode than before.

use super::link_limit::{self, is_link_limit};
use super::{LinkFarm, SUFFIX};
use crate::digest::Digest;
use crate::error::{At, Error, Result};
use crate::layout::placed_objects;
use crate::store::Store;
use crate::tree::Tree;
use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Makes all link farms lead to the objects that have their digests' names now.
///
/// # Errors
/// The system's. The repair then stays due.
pub(crate) fn repair(store: &Store) -> Result<()> {
    let trees = store.path("trees");
    let _lock = store.lock_farms(true)?;
    let noted = store.begin_repair()?;
    let mut missing = Vec::new();
    for entry in fs::read_dir(&trees).at(&trees)? {
        let entry = entry.at(&trees)?;
        let name = entry.file_name();
        let Some((hex, end)) = name.as_encoded_bytes().split_at_checked(64) else { continue };
        let is_farm = end.strip_prefix(b".") == Some(SUFFIX.as_bytes());
        let Some(digest) = Digest::from_hex(hex).filter(|_| is_farm) else { continue };
        match store.tree(&digest) {
            Ok(tree) => {
                let found = repair_one(store, &digest, &tree)?;
                match found.failed {
                    Some(error) if !is_link_limit(&error) => return Err(error),
                    // The farm belongs to a copy of a store and keeps its own file; its image's next mount does without it.
                    _ => missing.extend(found.missing),
                }
            }
            // A damaged image does not tell its objects before it is built again.
            Err(_) if entry.path().exists() => missing.extend(&noted),
            Err(_) => {}
        }
    }
    if !missing.is_empty() {
        missing.sort_unstable();
        missing.dedup();
        store.note_for_repair(&missing)?;
    }
    store.end_repair()
}

/// What the repair of one link farm found.
#[derive(Default)]
pub(super) struct Repaired {
    /// Links that led to other files than the objects.
    pub(super) wrong: u64,
    /// Objects that do not exist.
    pub(super) missing: Vec<Digest>,
    /// Why it ended before all was repaired, if it did.
    pub(super) failed: Option<Error>,
}

impl Repaired {
    /// An error unless everything was repaired.
    pub(super) fn into_complete(self) -> Result<Self> {
        if let Some(error) = self.failed { Err(error) } else { Ok(self) }
    }
}

/// Repairs one link farm if it exists. The caller holds the exclusive lock of the farms, unless there can be none: then
/// nothing can be written either.
pub(super) fn repair_one(store: &Store, digest: &Digest, tree: &Tree) -> Result<Repaired> {
    let (farm, mut found) = (LinkFarm::of(store, digest), Repaired::default());
    if !farm.objects().is_dir() {
        return Ok(found);
    }
    // A repair that was killed may have left this link to some object, which would keep the object's blocks.
    let staged = farm.path.join("staged");
    let _ = fs::remove_file(&staged);
    for (object, place) in placed_objects(tree) {
        let link = farm.object(&place);
        let repaired = repair_link(&farm, &store.object_path(&object), &link, &staged);
        found.wrong += u64::from(repaired.is_wrong);
        found.missing.extend(repaired.is_missing.then_some(object));
        if repaired.is_at_link_limit {
            link_limit::note(store, digest, &object);
        }
        if let Err(error) = repaired.result.at(&link) {
            let is_lasting = !is_link_limit(&error);
            found.failed = Some(error);
            if is_lasting {
                break;
            }
        }
    }
    Ok(found)
}

/// What the repair of one link found.
struct RepairedLink {
    /// Whether the link led to another file than the object.
    is_wrong: bool,
    /// Whether the object does not exist.
    is_missing: bool,
    /// Whether the object cannot have another link.
    is_at_link_limit: bool,
    result: io::Result<()>,
}

/// Makes `link` lead to the object at `object`, by way of the new link `staged`.
fn repair_link(farm: &LinkFarm, object: &Path, link: &Path, staged: &Path) -> RepairedLink {
    let inode = |path: &Path| fs::symlink_metadata(path).ok().map(|meta| (meta.dev(), meta.ino()));
    let mut repaired = RepairedLink { is_wrong: false, is_missing: false, is_at_link_limit: false, result: Ok(()) };
    loop {
        let Some(wanted) = inode(object) else {
            repaired.is_missing = true;
            return repaired;
        };
        if inode(link) == Some(wanted) {
            return repaired;
        }
        let directory = link.parent().expect("objects/N");
        // The farm itself is not made again: the collector may have taken it meanwhile.
        let linked = fs::create_dir(directory)
            .or_else(|error| if error.kind() == ErrorKind::AlreadyExists { Ok(()) } else { Err(error) })
            .and_then(|()| fs::hard_link(object, staged))
            .and_then(|()| fs::rename(staged, link));
        // The staged link stays if another repair was faster: a rename over a link to the same file does nothing.
        let _ = fs::remove_file(staged);
        let Err(error) = linked else {
            // Look again: a build may have replaced the object meanwhile.
            repaired.is_wrong = true;
            continue;
        };
        repaired.is_at_link_limit = error.raw_os_error() == Some(libc::EMLINK);
        // Otherwise the collector has taken the farm, or the object.
        if farm.objects().is_dir() && inode(object) == Some(wanted) {
            repaired.is_wrong = true;
            repaired.result = Err(error);
        }
        return repaired;
    }
}
