//! What a mount is made from: the layers that the image has, checked before the kernel parses them.

use super::kernel::{attach, overlay_mount};
use super::options::{MountKind, Mounted, Options};
use crate::digest::Digest;
use crate::error::{At, Result};
use crate::link_farm::{self, LinkFarm};
use crate::proc_fd::proc_fd_path;
use crate::store::{Lease, Store};
use crate::sys;
use rustix::mount::{MountAttrFlags, UnmountFlags};
use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// A mount to be made.
pub(super) struct Request<'a> {
    pub(super) store: &'a Store,
    pub(super) digest: &'a Digest,
    pub(super) lease: &'a Lease<'a>,
    pub(super) options: &'a Options,
    /// A place in a private mount namespace for the metadata's mount.
    pub(super) aside: Option<&'a Path>,
    /// Whether this process is in a user namespace of its own, where EROFS cannot be mounted.
    pub(super) in_user_namespace: bool,
    /// The image's link farm, unless there can be none or the kind does not use it.
    pub(super) farm: Option<LinkFarm>,
    /// The metadata image.
    pub(super) metadata: PathBuf,
    /// The data-only layers.
    pub(super) objects: Vec<PathBuf>,
    pub(super) attributes: MountAttrFlags,
    /// The source that the mount table shows.
    pub(super) source: String,
}

impl<'a> Request<'a> {
    /// Checks the image's metadata, and finds its layers; the link farm is made if there is none.
    pub(super) fn new(
        store: &'a Store,
        digest: &'a Digest,
        lease: &'a Lease<'a>,
        options: &'a Options,
        aside: Option<&'a Path>,
        in_initial_namespace: bool,
    ) -> Result<Self> {
        let is_directory =
            options.kind == MountKind::Directory || options.kind == MountKind::Auto && !in_initial_namespace;
        let farm = match options.kind {
            MountKind::Native => None,
            // A link farm has no place for an object that comes later.
            _ if options.coming.is_some() => {
                store.check_tree(digest)?;
                None
            }
            _ => checked_farm(store, digest, lease, is_directory, aside.is_some())?,
        };
        let (metadata, mut objects) = match &farm {
            Some(farm) => (farm.metadata(), vec![farm.objects()]),
            None => (store.tree_path(digest), vec![store.objects_dir()]),
        };
        if options.upper.is_some() {
            // For a file with a changed mode, the upper layer says where its content is, in the layer of the mount that
            // changed it.
            for other in [LinkFarm::of(store, digest).objects(), store.objects_dir()] {
                if !objects.contains(&other) && other.is_dir() {
                    objects.push(other);
                }
            }
        }
        // Last: what the store has is looked up there.
        objects.extend(options.coming.clone());
        Ok(Self {
            store,
            digest,
            lease,
            options,
            aside,
            in_user_namespace: !in_initial_namespace,
            farm,
            metadata,
            objects,
            attributes: attributes(options),
            source: store.mount_source(digest),
        })
    }

    pub(super) fn mounted(&self, kind: MountKind, notes: Vec<String>) -> Mounted {
        Mounted { kind, notes, prefetched_bytes: 0 }
    }

    /// Mounts overlayfs over the metadata directory `meta` and the data-only layers `objects`.
    pub(super) fn overlay(&self, meta: &Path, objects: &[PathBuf], user: bool) -> Result<OwnedFd> {
        overlay_mount(&self.source, meta, objects, user, self.options.upper.as_deref(), self.attributes)
    }

    /// Mounts overlayfs over the mounted metadata image `meta`.
    pub(super) fn overlay_on(&self, meta: &OwnedFd) -> Result<OwnedFd> {
        let overlay = |meta: &Path| self.overlay(meta, &self.objects, false);
        if let Some(aside) = self.aside {
            attach(meta, aside)?;
            return overlay(&proc_fd_path(meta));
        }
        // Since 6.15 a layer may be a mount that is attached nowhere.
        overlay(&proc_fd_path(meta)).or_else(|first| {
            self.with_attached(meta, |place| match place {
                Some(place) => overlay(place),
                None => Err(first),
            })
        })
    }

    /// Attaches `mount` while `work` runs: aside if that is possible, else in the staging directory. `work` gets `None` if
    /// it cannot be attached.
    pub(super) fn with_attached<T>(&self, mount: &OwnedFd, work: impl FnOnce(Option<&Path>) -> Result<T>) -> Result<T> {
        if let Some(aside) = self.aside {
            let attached = attach(mount, aside).is_ok();
            let result = work(attached.then_some(aside));
            if attached {
                let _ = rustix::mount::unmount(aside, UnmountFlags::DETACH);
            }
            return result;
        }
        let place = self.store.path("staging").join(self.lease.id()).join("meta");
        fs::create_dir_all(&place).at(&place)?;
        let attached = attach(mount, &place).is_ok();
        let result = work(attached.then_some(&*place));
        let _ = rustix::mount::unmount(&place, UnmountFlags::DETACH);
        let _ = fs::remove_dir(&place).and_then(|()| fs::remove_dir(place.parent().expect("staging/ID")));
        result
    }
}

fn attributes(options: &Options) -> MountAttrFlags {
    let mut attributes = MountAttrFlags::empty();
    attributes.set(MountAttrFlags::MOUNT_ATTR_NOSUID, options.nosuid);
    attributes.set(MountAttrFlags::MOUNT_ATTR_NODEV, options.nodev);
    attributes.set(MountAttrFlags::MOUNT_ATTR_NOEXEC, options.noexec);
    attributes.set(MountAttrFlags::MOUNT_ATTR_RDONLY, options.upper.is_none());
    attributes
}

/// The image's link farm, with the metadata that is to be mounted checked: the kernel must parse only what the writer wrote.
///
/// The kernel will need few of these pages. Unless they are needed immediately (`keep_cached`), pages that only the check
/// brought into memory are dropped.
pub(super) fn checked_farm(
    store: &Store,
    digest: &Digest,
    lease: &Lease,
    is_directory: bool,
    keep_cached: bool,
) -> Result<Option<LinkFarm>> {
    let farm = LinkFarm::of(store, digest);
    if is_directory {
        let whole = farm.seems_whole(store, digest);
        return if whole { Ok(Some(farm)) } else { link_farm::find_or_make(store, digest, lease) };
    }
    let is_cold =
        |path: &Path| File::open(path).is_ok_and(|file| sys::cached_pages(&file).is_ok_and(|pages| pages == 0));
    // By name and not open: a mount that replaces a damaged farm first checks whether the file is open elsewhere.
    let mut cold_files: Vec<_> =
        [farm.metadata(), store.tree_path(digest)].into_iter().filter(|path| is_cold(path)).collect();
    let found = link_farm::find_or_make(store, digest, lease)?;
    if found.is_none() {
        store.check_tree(digest)?;
    }
    if keep_cached {
        cold_files.clear();
    }
    for file in cold_files.iter().filter_map(|path| File::open(path).ok()) {
        let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed);
    }
    Ok(found)
}
