//! The comparison of page frames: files of mounts must show the very memory of their objects.

use crate::digest::Digest;
use crate::error::{At, Result};
use crate::proc_fd::open_path;
use crate::runtime::mounts::{MountEntry, mounts};
use crate::store::{Lease, Store};
use crate::sys;
use crate::tree::{Data, FileKind};
use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// How often pages with different frames are looked at: the kernel moves pages to make room (compaction), rarely twice.
const FRAME_LOOKS: u32 = 8;

/// What the comparison found.
#[derive(Default)]
pub(super) struct Frames {
    pub(super) compared: u64,
    pub(super) equal: u64,
    /// Whether anything is mounted in this namespace.
    pub(super) any_mount: bool,
}

/// Compares the frames of all files of all mounts in this namespace with those of their objects.
pub(super) fn compare_frames(store: &Store, lease: &Lease) -> Result<Frames> {
    let here = fs::metadata("/proc/self/ns/mnt").map(|meta| meta.ino()).at("/proc/self/ns/mnt")?;
    let mut found = Frames::default();
    for mount in mounts(store)?.into_iter().filter(|mount| mount.namespace == here) {
        // Unmounted just now, or hidden below another mount.
        let Ok(top) = open_path(&mount.mountpoint) else { continue };
        let device = rustix::fs::fstat(&top).at(&mount.mountpoint)?.st_dev;
        if mount.device != format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device)) {
            continue;
        }
        found.any_mount = true;
        lease.claim_tree(&mount.digest)?;
        compare_mount(store, &mount, &top, &mut found)?;
    }
    Ok(found)
}

/// Compares the files of the mount with the root `top`.
fn compare_mount(store: &Store, mount: &MountEntry, top: &OwnedFd, found: &mut Frames) -> Result<()> {
    let tree = store.tree(&mount.digest)?;
    let (mut result, mut seen) = (Ok(()), HashSet::new());
    tree.walk(|path, id| {
        let FileKind::File(Data::Object(digest, size)) = &tree.inode(id).kind else { return };
        if result.is_err() || !seen.insert(id) {
            return;
        }
        match compare_file(store, mount, top, path, digest, *size) {
            // Over a writable layer a file may be gone, or have bytes of its own.
            Err(_) if mount.writable => {}
            Ok(Some((pages, same))) if mount.writable && pages != same => {}
            Ok(Some((pages, same))) => {
                found.compared += pages;
                found.equal += same;
            }
            Ok(None) => {}
            Err(error) => result = Err(error),
        }
    });
    result
}

/// Compares the file `path` of a mount with its object; `None` if something else is mounted over it.
fn compare_file(
    store: &Store,
    mount: &MountEntry,
    top: &OwnedFd,
    path: &[u8],
    digest: &Digest,
    size: u64,
) -> Result<Option<(u64, u64)>> {
    let (shown, object) = (mount.mountpoint.join(OsStr::from_bytes(path)), store.object_path(digest));
    let how = ResolveFlags::NO_XDEV | ResolveFlags::NO_SYMLINKS;
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOFOLLOW;
    let file = match rustix::fs::openat2(top, path, flags, Mode::empty(), how) {
        Err(Errno::XDEV) => return Ok(None),
        other => other.at(&shown).map(File::from)?,
    };
    let object_file = File::open(&object).at(&object)?;
    same_frames(&file, &shown, &object_file, &object, size).map(Some)
}

/// How many pages a file and its object have, and how many of them have the same frames. Both are mapped at the same time;
/// a page that the kernel moves between the two looks is looked at again.
fn same_frames(file: &File, shown: &Path, object_file: &File, object: &Path, size: u64) -> Result<(u64, u64)> {
    let a = sys::MappedFile::new(file, size).at(shown)?;
    let b = sys::MappedFile::new(object_file, size).at(object)?;
    let (mut open, mut pages): (Vec<usize>, u64) = (Vec::new(), 0);
    for attempt in 0..FRAME_LOOKS {
        let (a, b) = (a.frames().at(shown)?, b.frames().at(object)?);
        if attempt == 0 {
            open = (0..a.len().max(b.len())).collect();
            pages = open.len() as u64;
        }
        open.retain(|&page| a.get(page).is_none_or(|frame| *frame == 0 || Some(frame) != b.get(page)));
        if open.is_empty() {
            break;
        }
    }
    Ok((pages, pages - open.len() as u64))
}
