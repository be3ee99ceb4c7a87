//! The layers of an image for a program that mounts overlayfs by itself, such as a container engine.

use super::kernel::{attach, erofs_mount};
use super::request::checked_farm;
use super::upper;
use crate::digest::Digest;
use crate::error::{At, Error, Result};
use crate::link_farm::LinkFarm;
use crate::store::{Lease, Store};
use crate::sys;
use std::fs::File;
use std::path::{Path, PathBuf};

/// How the metadata names objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Naming {
    /// By their places in the image's link farm: programs start faster from cold caches.
    Places,
    /// By digest, in the directory of all objects.
    Digests,
}

/// The data-only layer that belongs to metadata of this naming.
pub fn objects(store: &Store, digest: &Digest, naming: Naming) -> PathBuf {
    match naming {
        Naming::Places => LinkFarm::of(store, digest).objects(),
        Naming::Digests => store.objects_dir(),
    }
}

/// Mounts an image's metadata at `target`: files there have names, owners and sizes, and no bytes. Returns false if the
/// image has no link farm and none can be made, which only [`Naming::Places`] needs. The metadata is checked before.
///
/// # Errors
/// A damaged image, a kernel that cannot mount EROFS.
pub fn mount_metadata(store: &Store, digest: &Digest, naming: Naming, target: &Path) -> Result<bool> {
    let lease = Lease::new(store)?;
    if !lease.claim_tree(digest)? {
        return Err(Error::Damaged(format!("{}: missing; build the image again", store.tree_path(digest).display())));
    }
    let metadata = match naming {
        Naming::Digests => {
            store.check_tree(digest)?;
            store.tree_path(digest)
        }
        Naming::Places => match checked_farm(store, digest, &lease, false, false)? {
            Some(farm) => farm.metadata(),
            None => return Ok(false),
        },
    };
    let mount = erofs_mount(&metadata, None, false).or_else(|first| {
        let file = File::open(&metadata).at(&metadata)?;
        // Freed with its last user: held until the mount uses it.
        let Ok((device, _held)) = sys::loop_device(&file) else { return Err(first) };
        erofs_mount(&device, None, false)
    })?;
    attach(&mount, target)?;
    Ok(true)
}

/// Returns true if some mount, in any namespace, has its changes in the directory `layer`.
pub fn upper_in_use(layer: &Path) -> bool {
    upper::in_use(layer, false)
}
