//! Mounts: the metadata image under overlayfs, with the objects as its data-only layer.
//!
//! Two files of equal content, in whatever images, lead overlayfs to one object, and the page cache belongs to the
//! object: that is the whole trick, and the kernel does it. What mounts where:
//!
//! | kind | metadata | needs |
//! |---|---|---|
//! | `erofs` | EROFS image, mounted from the plain file | root, Linux 6.12 |
//! | `loop` | the same through a loop device | root, Linux 6.8 |
//! | `directory` | a directory of empty files with overlay attributes | root on 6.8; a user namespace on 6.16 |
//! | `native` | self-contained EROFS with `inode_share` | root, Linux 7.0 with EROFS_FS_PAGE_CACHE_SHARE |
//!
//! A mount names its store, domain and image in the mount table, so that the table alone says what is mounted: there
//! is no record of ours to go stale. While a mount is set up its image is leased.

mod directory;
mod kernel;
mod upper;

use crate::digest::Digest;
use crate::error::{At, Error, Result};
use crate::profile::Profile;
use crate::shelf::{self, Shelf};
use crate::store::{Lease, ROOT_DIRECTORY, Record, Store, USER_DIRECTORY, is_full_or_fixed};
use crate::sys;
use directory::metadata_directory;
use kernel::{OPTION_MAX, failed};
use pagefold_os::mountinfo::{self, Mount};
use rustix::io::Errno;
use rustix::mount::{MountAttrFlags, UnmountFlags};
use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use upper::prepare_upper;

pub(crate) use directory::{NO_DEV_NODES, difference};
pub(crate) use kernel::{
    attach, by_descriptor, erofs_mount, has_inode_share, in_initial_namespace, open_path, overlay_mount,
};

/// How the metadata is shown; see the module's table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// The best that this kernel and user have.
    #[default]
    Auto,
    /// Self-contained EROFS with `inode_share`.
    Native,
    /// EROFS from the plain file.
    Erofs,
    /// EROFS through a loop device.
    Loop,
    /// A metadata directory.
    Directory,
}

/// How to mount.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Which metadata.
    pub kind: Kind,
    /// Directory for changes (`upper` and `work` are made in it); read-only without.
    pub upper: Option<PathBuf>,
    /// Ignore set-user-id bits.
    pub nosuid: bool,
    /// Refuse device nodes.
    pub nodev: bool,
    /// Refuse to run programs.
    pub noexec: bool,
    /// Do not read ahead what the image's start profile names.
    pub no_prefetch: bool,
}

impl Options {
    /// What is to be read ahead.
    pub(crate) fn profile(&self, store: &Store, digest: &Digest) -> Option<Profile> {
        if self.no_prefetch { None } else { Profile::load(store, digest) }
    }
}

/// What a mount became.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Mounted {
    /// The kind used.
    pub kind: Kind,
    /// What is not as in the image, one line each.
    pub notes: Vec<String>,
    /// Bytes that the image's start profile had the kernel read ahead.
    pub prefetched_bytes: u64,
}

/// Refuses what is no mountpoint, before anything is done for it.
fn check_mountpoint(target: &Path) -> Result<()> {
    let what = match fs::metadata(target) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => "no such directory; make it first (mkdir)",
        Ok(meta) if !meta.is_dir() => "not a directory; give one to mount on",
        // It would be out of sight below every process's own root, and who unmounts the root makes that read-only.
        Ok(_) if target.canonicalize().is_ok_and(|target| target.parent().is_none()) => {
            "the root cannot be mounted on; give another directory"
        }
        // Whatever else is wrong the mount itself will tell.
        _ => return Ok(()),
    };
    Err(Error::Refused(format!("mount: {}: {what}", target.display())))
}

/// Mounts an image at `target`. It stays while it is mounted; until then it is for the caller to keep it, by [`Store::hold`].
///
/// # Errors
/// A damaged image, a kernel or user that cannot.
pub fn mount(store: &Store, record: &Record, target: &Path, options: &Options) -> Result<Mounted> {
    check_mountpoint(target)?;
    let lease = Lease::new(store)?;
    let profile = options.profile(store, &record.digest);
    std::thread::scope(|scope| {
        if let Some(profile) = &profile {
            // The objects need no mount, and the disk need not rest while there is none.
            scope.spawn(|| profile.read_objects(store, &record.digest, false));
        }
        let (fd, mut mounted) = detached(store, &record.digest, &lease, options, None)?;
        if let Some(profile) = &profile {
            profile.look_up(&fd);
            mounted.prefetched_bytes = profile.bytes();
        }
        attach(&fd, target)?;
        Ok(mounted)
    })
}

/// Mounts an image attached nowhere yet; the mount lives as long as the descriptor or where it is attached. Where a program
/// starts in it at once, `aside` is a place in a namespace of its own where the metadata's mount may stay until the old root
/// goes: to end it by itself takes longer than to make it.
pub(crate) fn detached(
    store: &Store,
    digest: &Digest,
    lease: &Lease,
    options: &Options,
    aside: Option<&Path>,
) -> Result<(OwnedFd, Mounted)> {
    if !lease.claim_tree(digest)? {
        let path = store.tree_path(digest);
        return Err(Error::Damaged(format!("{}: missing; build the image again", path.display())));
    }
    let initial = in_initial_namespace();
    let is_directory = options.kind == Kind::Directory || options.kind == Kind::Auto && !initial;
    let shelf = match options.kind {
        Kind::Native => None,
        _ => checked(store, digest, lease, is_directory, aside.is_some())?,
    };
    let (metadata, mut objects) = match &shelf {
        Some(shelf) => (shelf.metadata(), vec![shelf.objects()]),
        None => (store.tree_path(digest), vec![store.objects_dir()]),
    };
    if options.upper.is_some() {
        // Of a file whose mode was changed the upper layer says where its content is, as the mount had it that changed it.
        let others = [Shelf::of(store, digest).objects(), store.objects_dir()];
        objects
            .extend(others.into_iter().filter(|other| !objects.contains(other) && other.is_dir()).collect::<Vec<_>>());
    }
    let mut attributes = MountAttrFlags::empty();
    attributes.set(MountAttrFlags::MOUNT_ATTR_NOSUID, options.nosuid);
    attributes.set(MountAttrFlags::MOUNT_ATTR_NODEV, options.nodev);
    attributes.set(MountAttrFlags::MOUNT_ATTR_NOEXEC, options.noexec);
    if options.upper.is_none() {
        attributes |= MountAttrFlags::MOUNT_ATTR_RDONLY;
    }
    // Locked until the mount is there.
    let (_lock, mut notes) = match &options.upper {
        Some(upper) => {
            prepare_upper(store, digest, upper, !initial, shelf.is_some()).map(|(lock, notes)| (Some(lock), notes))?
        }
        None => (None, Vec::new()),
    };
    let full = store.full_path(digest);
    let domain = format!("{}.{}", store.id(), store.domain());
    let source = store.mount_source(digest);
    let done = |kind, notes| Mounted { kind, notes, prefetched_bytes: 0 };
    let native = || -> Result<(OwnedFd, Mounted)> {
        if full.as_os_str().len() > OPTION_MAX {
            return Err(Error::Refused(format!(
                "mount: {}: more than {OPTION_MAX} bytes, too long for a native mount; use another --kind",
                full.display()
            )));
        }
        if full.exists() && !store.has_full(digest) {
            return Err(Error::Damaged(format!("{}: damaged; build the image with --native again", full.display())));
        }
        let fd = erofs_mount(&full, Some(&domain), false)?;
        if options.upper.is_some() {
            return Err(Error::Refused("mount: a native mount is read-only; use --kind erofs with --upper".into()));
        }
        Ok((fd, done(Kind::Native, Vec::new())))
    };
    let over = |meta: &OwnedFd| -> Result<OwnedFd> {
        let overlay = |meta: &Path| overlay_mount(&source, meta, &objects, false, options, attributes);
        if let Some(aside) = aside {
            attach(meta, aside)?;
            return overlay(&by_descriptor(meta));
        }
        // Since 6.15 a layer may be a mount that is attached nowhere.
        overlay(&by_descriptor(meta)).or_else(|first| {
            let place = store.path("staging").join(lease.id()).join("meta");
            fs::create_dir_all(&place).at(&place)?;
            let result = match attach(meta, &place) {
                Ok(()) => overlay(&place),
                Err(_) => Err(first),
            };
            let _ = rustix::mount::unmount(&place, UnmountFlags::DETACH);
            let _ = fs::remove_dir(&place).and_then(|()| fs::remove_dir(place.parent().expect("staging/ID")));
            result
        })
    };
    let erofs = || -> Result<(OwnedFd, Mounted)> {
        let meta = erofs_mount(&metadata, None, aside.is_some())?;
        Ok((over(&meta)?, done(Kind::Erofs, Vec::new())))
    };
    let through_loop = || -> Result<(OwnedFd, Mounted)> {
        let file = File::open(&metadata).at(&metadata)?;
        let (device, _held) =
            sys::loop_device(&file).map_err(|source| Error::Mount { what: "loop device".into(), source })?;
        let meta = erofs_mount(&device, None, false)?;
        Ok((over(&meta)?, done(Kind::Loop, Vec::new())))
    };
    let directory = || -> Result<(OwnedFd, Mounted)> {
        let mut objects = objects.clone();
        let made = metadata_directory(store, digest, lease, !initial, shelf.is_some());
        let (meta, notes) = match made {
            // There may be one from before there was a shelf.
            Err(error) if shelf.is_some() && is_full_or_fixed(&error) => {
                if !objects.contains(&store.objects_dir()) {
                    objects.push(store.objects_dir());
                }
                metadata_directory(store, digest, lease, !initial, false).map_err(|_| error)?
            }
            made => made?,
        };
        let fd = overlay_mount(&source, &meta, &objects, !initial, options, attributes)?;
        Ok((fd, done(Kind::Directory, notes)))
    };
    let (fd, mut mounted) = match options.kind {
        Kind::Native => native(),
        Kind::Erofs => erofs(),
        Kind::Loop => through_loop(),
        Kind::Directory => directory(),
        Kind::Auto if !initial => directory(),
        Kind::Auto => {
            let named = full.as_os_str().len() <= OPTION_MAX;
            if named && store.has_full(digest) && has_inode_share() && options.upper.is_none() {
                native()
            } else {
                erofs().or_else(|first| through_loop().or_else(|_| directory()).map_err(|_| first))
            }
        }
    }?;
    mounted.notes.append(&mut notes);
    let damaged = store.count_damaged(digest);
    if damaged > 0 {
        mounted.notes.push(format!(
            "{damaged} of the image's objects were found damaged and are shown as they are: pagefold image verify names them, \
             a build that has them again mends them"
        ));
    }
    Ok((fd, mounted))
}

/// The image's shelf, and what is to be mounted checked: the kernel shall parse only what our writer wrote. It will want few of
/// these pages: what the check alone brings into memory goes out again, unless it is wanted at once.
fn checked(store: &Store, digest: &Digest, lease: &Lease, is_directory: bool, at_once: bool) -> Result<Option<Shelf>> {
    let shelf = Shelf::of(store, digest);
    if is_directory {
        return if shelf.seems_whole(store, digest) { Ok(Some(shelf)) } else { shelf::find(store, digest, lease) };
    }
    let is_cold =
        |path: &Path| File::open(path).is_ok_and(|file| sys::cached_pages(&file).is_ok_and(|pages| pages == 0));
    // By name: who wants a damaged one replaced looks whether somebody has it open.
    let mut cold_files: Vec<_> =
        [shelf.metadata(), store.tree_path(digest)].into_iter().filter(|path| is_cold(path)).collect();
    let found = shelf::find(store, digest, lease)?;
    if found.is_none() {
        store.check_tree(digest)?;
    }
    if at_once {
        cold_files.clear();
    }
    for file in cold_files.iter().filter_map(|path| File::open(path).ok()) {
        let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed);
    }
    Ok(found)
}

/// Whether a mount shows a metadata directory.
fn by_directory(mount: &Mount) -> bool {
    let name =
        |option: &[u8]| option.rsplit(|byte| *byte == b'/').next().and_then(|name| name.get(65..72)?.try_into().ok());
    let lower = mount.options.split(|byte| *byte == b',').filter(|option| option.starts_with(b"lowerdir"));
    lower.filter_map(name).any(|end: [u8; 7]| [ROOT_DIRECTORY, USER_DIRECTORY].map(str::as_bytes).contains(&&end[..]))
}

/// Unmounts what [`mount`] mounted at `target`; with `lazy` it is gone from there at once, and ends with its last user.
/// Nothing tells the collector of those who use a metadata directory without a mount: there `lazy` changes nothing.
///
/// # Errors
/// Nothing of ours is mounted there; it is in use.
pub fn umount(target: &Path, lazy: bool) -> Result<()> {
    let target = &target.canonicalize().at(target)?;
    // The kernel would make the root read-only instead, or take all there is out of sight.
    if target.parent().is_none() {
        return Err(Error::Refused("/: the root is not for pagefold to unmount".into()));
    }
    let table = fs::read("/proc/self/mountinfo").at("/proc/self/mountinfo")?;
    let last = mountinfo::parse(&table).filter(|mount| mount.at == *target).last();
    match last.as_ref().map(|mount| mount.source.as_os_str().as_bytes()) {
        Some(source) if source.starts_with(b"pagefold:") || source.ends_with(b".full.erofs") => {}
        Some(_) => return Err(Error::Refused(format!("{}: not mounted by pagefold; use umount", target.display()))),
        None => return Err(Error::Refused(format!("{}: nothing is mounted there", target.display()))),
    }
    let kept = last.is_some_and(|mount| by_directory(&mount));
    let flags = if lazy && !kept { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    rustix::mount::unmount(target, flags).map_err(|errno| match errno {
        Errno::BUSY if kept => Error::Refused(format!(
            "{}: in use; end what uses it (a mount by a metadata directory cannot be unmounted before: gc would take it)",
            target.display()
        )),
        Errno::BUSY => Error::Refused(format!("{}: in use; end what uses it, or umount --lazy", target.display())),
        other => failed(target.display().to_string())(other),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_mountpoint_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        let said = |path: &Path| check_mountpoint(path).unwrap_err().to_string();
        for (path, what) in
            [(&*dir.path().join("none"), "make it first"), (&file, "not a directory"), (Path::new("/"), "the root")]
        {
            assert!(said(path).contains(what), "{}", said(path));
        }
        assert!(said(Path::new("/proc/..")).contains("the root"));
        check_mountpoint(dir.path()).unwrap();
        assert!(umount(Path::new("/"), false).unwrap_err().to_string().contains("the root"));
    }
}
