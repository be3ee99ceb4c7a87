//! Link farms are made by the first mount of their image, and made again where their metadata is damaged.

use super::repair::repair_one;
use super::{LinkFarm, SUFFIX, link_limit, write_metadata};
use crate::digest::Digest;
use crate::error::{At, Error, Result};
use crate::in_use::{InUse, in_use};
use crate::layout::{OBJECTS_PER_DIRECTORY, placed_objects};
use crate::remove_tree::remove_tree;
use crate::store::{Lease, Store};
use crate::tree::Tree;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::Path;
use std::time::Duration;

/// What an object takes in a metadata image, at least: inode and attributes.
const OBJECT_BYTES: u64 = 192;

/// How often, a millisecond apart, a damaged link farm is checked for being in use.
const IN_USE_CHECKS: u32 = 20;

/// The link farm of an image that `lease` has claimed, with its metadata checked; it is made if there is none. `None` if it
/// cannot be made: then the image itself is to be mounted.
///
/// # Errors
/// A damaged metadata image, from which no link farm can be made.
pub(crate) fn find_or_make(store: &Store, digest: &Digest, lease: &Lease) -> Result<Option<LinkFarm>> {
    let farm = LinkFarm::of(store, digest);
    match farm.is_whole(digest) {
        Ok(true) => return Ok(Some(farm)),
        Ok(false) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(_) => return Ok(None),
    }
    if link_limit::is_noted(store, digest) || !has_space(store, digest) {
        return Ok(None);
    }
    let tree = store.tree(digest)?;
    if lease.write_down().is_err() {
        return Ok(None);
    }
    let staged = store.path("staging").join(lease.id());
    let made = fs::create_dir_all(&staged).at(&staged).and_then(|()| {
        if !farm.path.exists() && make(store, digest, &tree, &staged)? {
            return Ok(());
        }
        replace(store, digest, &tree, &staged)
    });
    let _ = remove_tree(&staged);
    Ok(made.is_ok().then_some(farm))
}

/// Returns true if the disk has space for a link farm: it takes less than the image, and a directory for 256 objects.
/// Without this check, a mount on a full disk would make all of the farm but its end, and the next mount would again.
fn has_space(store: &Store, digest: &Digest) -> bool {
    let image = store.tree_path(digest);
    let (Ok(meta), Ok(disk)) = (fs::metadata(&image), rustix::fs::statvfs(&image)) else { return true };
    // The farm of an image without objects has three.
    let dirs = meta.len() / (OBJECT_BYTES * u64::from(OBJECTS_PER_DIRECTORY)) + 4;
    // Some file systems count nothing.
    let blocks = disk.f_blocks == 0 || disk.f_bavail > meta.len() / disk.f_frsize.max(1) + dirs;
    blocks && (disk.f_files == 0 || disk.f_favail >= dirs)
}

/// Makes the link farm of `digest` below `staged`, and gives it its name. Returns false if that name exists already.
fn make(store: &Store, digest: &Digest, tree: &Tree, staged: &Path) -> Result<bool> {
    // A repair waits until this farm has its name, so that it sees the farm.
    let _lock = store.lock_farms(false)?;
    store.upgrade()?;
    // Opened before the first write: it is to report the loss of any of them.
    let disk = File::open(staged).at(staged)?;
    let (new, farm) = (LinkFarm { path: staged.join(SUFFIX) }, LinkFarm::of(store, digest));
    fs::create_dir(&new.path).at(&new.path)?;
    fs::create_dir(new.objects()).at(&new.path)?;
    for (number, (object, place)) in placed_objects(tree).enumerate() {
        let link = new.object(&place);
        if number.is_multiple_of(OBJECTS_PER_DIRECTORY as usize) {
            let directory = link.parent().expect("objects/N");
            fs::create_dir(directory).at(directory)?;
        }
        link_object(store, digest, &object, &link)?;
    }
    write_metadata(tree, digest, &new.metadata())?;
    // A farm that has its name is complete, after a power cut too.
    store.sync_disk(&disk, staged)?;
    match fs::rename(&new.path, &farm.path) {
        // Another mount was first.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EEXIST | libc::ENOTEMPTY)) => Ok(false),
        other => other.map(|()| true).at(&farm.path),
    }
}

/// Links `object` of image `digest` at `link`. A missing object is noted for repair: the rest of the image is of use without
/// it.
fn link_object(store: &Store, digest: &Digest, object: &Digest, link: &Path) -> Result<()> {
    let try_link = || fs::hard_link(store.object_path(object), link);
    let linked = match try_link() {
        // A build that brings the object looks for the note after it has given the object its name. If it did so before the
        // note was written, the object exists now.
        Err(error) if error.kind() == ErrorKind::NotFound => {
            store.note_for_repair(&[*object])?;
            try_link()
        }
        other => other,
    };
    match linked {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) if error.raw_os_error() == Some(libc::EMLINK) => {
            link_limit::note(store, digest, object);
            Err(error).at(link)
        }
        other => other.at(link),
    }
}

/// Makes an existing link farm with damaged metadata again, as in a copy of a store.
fn replace(store: &Store, digest: &Digest, tree: &Tree, staged: &Path) -> Result<()> {
    let (farm, path) = (LinkFarm::of(store, digest), staged.join("meta.erofs"));
    let _lock = store.lock_farms(true)?;
    // Another mount was first.
    if farm.is_whole(digest).is_ok_and(|whole| whole) {
        return Ok(());
    }
    wait_until_unused(&farm)?;
    store.upgrade()?;
    let disk = File::open(staged).at(staged)?;
    match fs::create_dir(farm.objects()) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
        made => made.at(farm.objects())?,
    }
    let missing = repair_one(store, digest, tree)?.into_complete()?.missing;
    if !missing.is_empty() {
        store.note_for_repair(&missing)?;
        // An object that got its name before the note was written would be repaired by no build.
        repair_one(store, digest, tree)?.into_complete()?;
    }
    write_metadata(tree, digest, &path)?;
    store.sync_disk(&disk, staged)?;
    fs::rename(&path, farm.metadata()).at(farm.metadata())
}

/// Waits until the farm's metadata is not open elsewhere: it may only be being checked.
///
/// # Errors
/// It stays in use. By the hold on this very file the collector knows of a mount that no table shows.
fn wait_until_unused(farm: &LinkFarm) -> Result<()> {
    for _ in 0..IN_USE_CHECKS {
        if in_use(&farm.metadata())? == InUse::No {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Err(Error::Refused(format!("{}: damaged, and in use", farm.metadata().display())))
}
