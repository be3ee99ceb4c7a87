//! The choice of a mount's kind, and the order in which a mount is made.

use super::directory::by_directory;
use super::erofs::{by_file, by_loop_device};
use super::kernel::{attach, in_initial_namespace};
use super::native::{by_native_image, by_sharing_native_image, can_be_native};
use super::options::{MountKind, Mounted, Options};
use super::request::Request;
use super::upper::prepare_upper;
use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::store::{ImageRecord, Lease, Store};
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

/// Refuses a target that is not a mountpoint, before anything is done for it.
fn check_mountpoint(target: &Path) -> Result<()> {
    let what = match fs::metadata(target) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => "no such directory; make it first (mkdir)",
        Ok(meta) if !meta.is_dir() => "not a directory; give one to mount on",
        // The mount would be hidden below every process's own root, and unmounting the root makes that read-only.
        Ok(_) if target.canonicalize().is_ok_and(|target| target.parent().is_none()) => {
            "the root cannot be mounted on; give another directory"
        }
        // The mount itself reports everything else.
        _ => return Ok(()),
    };
    Err(Error::Refused(format!("mount: {}: {what}", target.display())))
}

/// Mounts an image at `target`. The image stays in the store while it is mounted; until then the caller keeps it, by
/// [`Store::hold`].
///
/// # Errors
/// A damaged image, a kernel or user that cannot.
pub fn mount(store: &Store, record: &ImageRecord, target: &Path, options: &Options) -> Result<Mounted> {
    mount_tree(store, &record.digest, target, options)
}

/// [`mount`] for a tree that is no image yet: [`Build::name_early`](crate::build::Build::name_early).
///
/// # Errors
/// The same.
pub fn mount_tree(store: &Store, digest: &Digest, target: &Path, options: &Options) -> Result<Mounted> {
    check_mountpoint(target)?;
    let lease = Lease::new(store)?;
    let profile = options.profile(store, digest);
    std::thread::scope(|scope| {
        if let Some(profile) = &profile {
            // The objects can be read before the mount exists: the disk need not rest meanwhile.
            scope.spawn(|| profile.read_objects(store, digest, false));
        }
        let (fd, mut mounted) = mount_detached(store, digest, &lease, options, None)?;
        if let Some(profile) = &profile {
            profile.look_up(&fd);
            mounted.prefetched_bytes = profile.bytes();
        }
        attach(&fd, target)?;
        Ok(mounted)
    })
}

/// Mounts an image without attaching it; the mount lives as long as the descriptor, or the place where it is attached.
///
/// If a program starts in the image immediately, `aside` is a place in a private mount namespace where the metadata's mount
/// may stay until the old root is unmounted: ending it separately takes longer than making it.
pub(crate) fn mount_detached(
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
    let request = Request::new(store, digest, lease, options, aside, in_initial_namespace())?;
    // Held until the mount exists.
    let (_lock, mut notes) = match &options.upper {
        Some(upper) => {
            let (lock, notes) = prepare_upper(store, digest, upper, request.in_user_namespace, request.farm.is_some())?;
            (Some(lock), notes)
        }
        None => (None, Vec::new()),
    };
    let (fd, mut mounted) = match options.kind {
        MountKind::Native => by_native_image(&request)?,
        MountKind::Erofs => by_file(&request)?,
        MountKind::Loop => by_loop_device(&request)?,
        MountKind::Directory => by_directory(&request)?,
        MountKind::Auto => by_best(&request)?,
    };
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

/// The best kind that this kernel and user have. A native mount is best only if it shares page cache: one that does not
/// would take the sharing that the other kinds have.
fn by_best(request: &Request) -> Result<(OwnedFd, Mounted)> {
    if request.in_user_namespace {
        return by_directory(request);
    }
    if can_be_native(request)
        && let Some(mounted) = by_sharing_native_image(request)
    {
        return Ok(mounted);
    }
    by_file(request).or_else(|first| by_loop_device(request).or_else(|_| by_directory(request)).map_err(|_| first))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_that_is_not_a_mountpoint_is_refused() {
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
    }
}
