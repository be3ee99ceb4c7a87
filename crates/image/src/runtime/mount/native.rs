//! Native mounts: the self-contained EROFS image; its files share page cache by their fingerprints.
//!
//! Some kernels parse the option for that and do not have the feature: Debian's 7.0 has no EROFS_FS_PAGE_CACHE_SHARE. Such a
//! mount succeeds and shares nothing. Only the mount table shows whether the option took effect.

use super::kernel::{OPTION_MAX, clone_mount, erofs_mount};
use super::options::{MountKind, Mounted};
use super::request::Request;
use crate::error::{At, Error, Result};
use pagefold_os::mountinfo;
use std::fs;
use std::os::fd::OwnedFd;
use std::path::Path;

/// The option by which a native mount shares page cache, as the mount table shows it.
pub(crate) const SHARED_OPTION: &str = "inode_share";

/// Returns true if the image has a self-contained form that can be mounted as asked for.
pub(super) fn can_be_native(request: &Request) -> bool {
    let is_named = request.store.full_path(request.digest).as_os_str().len() <= OPTION_MAX;
    is_named
        && request.options.coming.is_none()
        && request.store.has_full(request.digest)
        && request.options.upper.is_none()
}

/// Mounts the self-contained image, whether it shares page cache or not.
pub(super) fn by_native_image(request: &Request) -> Result<(OwnedFd, Mounted)> {
    let (fd, shares) = mount_native(request)?;
    let mut notes = Vec::new();
    if !shares {
        notes.push(
            "this kernel's EROFS does not share page cache (EROFS_FS_PAGE_CACHE_SHARE): equal files take memory once per \
             image; mounts of another --kind share them"
                .into(),
        );
    }
    Ok((fd, request.mounted(MountKind::Native, notes)))
}

/// Mounts the self-contained image if the mount shares page cache.
pub(super) fn by_sharing_native_image(request: &Request) -> Option<(OwnedFd, Mounted)> {
    let (fd, _) = mount_native(request).ok().filter(|(_, shares)| *shares)?;
    Some((fd, request.mounted(MountKind::Native, Vec::new())))
}

/// Mounts the self-contained image. Returns whether the mount shares page cache.
fn mount_native(request: &Request) -> Result<(OwnedFd, bool)> {
    let store = request.store;
    let full = store.full_path(request.digest);
    if full.as_os_str().len() > OPTION_MAX {
        return Err(Error::Refused(format!(
            "mount: {}: more than {OPTION_MAX} bytes, too long for a native mount; use another --kind",
            full.display()
        )));
    }
    if full.exists() && !store.has_full(request.digest) {
        return Err(Error::Damaged(format!("{}: damaged; build the image with --native again", full.display())));
    }
    let sharing_domain = format!("{}.{}", store.id(), store.domain());
    let fd = erofs_mount(&full, Some(&sharing_domain), false)?;
    if request.options.upper.is_some() {
        return Err(Error::Refused("mount: a native mount is read-only; use --kind erofs with --upper".into()));
    }
    // A mount table that cannot be looked at shows nothing.
    let shares = shares_page_cache(request, &fd).unwrap_or(false);
    Ok((fd, shares))
}

/// Returns true if the mount table shows that `mount` shares page cache. The table has only attached mounts, so a clone of
/// the mount is attached for the look.
fn shares_page_cache(request: &Request, mount: &OwnedFd) -> Result<bool> {
    let clone = clone_mount(mount)?;
    request.with_attached(&clone, |place| {
        let table = fs::read("/proc/self/mountinfo").at("/proc/self/mountinfo")?;
        Ok(place.is_some_and(|place| mount_shows_option(&table, place, SHARED_OPTION)))
    })
}

/// Returns true if the uppermost mount at `place` in a mount table has the file system option `name`.
pub(crate) fn mount_shows_option(table: &[u8], place: &Path, name: &str) -> bool {
    mountinfo::parse(table).filter(|mount| mount.at == *place).last().is_some_and(|mount| mount.has_option(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parsed_option_counts_only_if_the_mounted_file_system_shows_it() {
        let line = |number: u32, options: &str| {
            format!(
                "{number} 35 0:53 / /staging/meta ro,relatime - erofs /s/x.full.erofs ro,cache_strategy=disabled{options}\n"
            )
        };
        let shown = |table: &str| mount_shows_option(table.as_bytes(), Path::new("/staging/meta"), SHARED_OPTION);
        assert!(shown(&line(36, ",inode_share,domain_id=d")), "as Linux 7.2 with EROFS_FS_PAGE_CACHE_SHARE shows it");
        assert!(!shown(&line(36, "")), "as Linux 7.0 without it");
        assert!(!shown(&line(36, ",no_inode_share")) && !shown(""));
        // Of several mounts at one place the last is the visible one.
        assert!(!shown(&(line(36, ",inode_share") + &line(37, ""))));
        assert!(shown(&(line(36, "") + &line(37, ",inode_share"))));
        // The option of another mount does not count.
        let other = line(36, "") + &line(37, ",inode_share").replace("/staging/meta", "/elsewhere");
        assert!(!shown(&other));
    }
}
