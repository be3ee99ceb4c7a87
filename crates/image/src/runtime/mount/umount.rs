//! Unmounts images, and nothing else.

use super::kernel::failed;
use crate::error::{At, Error, Result};
use crate::store::{ROOT_DIRECTORY, USER_DIRECTORY};
use pagefold_os::mountinfo::{self, Mount};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Returns true if a mount shows a metadata directory.
fn by_directory(mount: &Mount) -> bool {
    let name =
        |option: &[u8]| option.rsplit(|byte| *byte == b'/').next().and_then(|name| name.get(65..72)?.try_into().ok());
    let lower = mount.options.split(|byte| *byte == b',').filter(|option| option.starts_with(b"lowerdir"));
    lower.filter_map(name).any(|end: [u8; 7]| [ROOT_DIRECTORY, USER_DIRECTORY].map(str::as_bytes).contains(&&end[..]))
}

/// Unmounts what [`mount`](super::mount()) mounted at `target`; with `lazy` the mount leaves the directory immediately, and
/// ends with its last user. The collector cannot see users of a metadata directory without a mount: there `lazy` changes
/// nothing.
///
/// # Errors
/// No image is mounted there; it is in use.
pub fn umount(target: &Path, lazy: bool) -> Result<()> {
    let target = &target.canonicalize().at(target)?;
    // The kernel would make the root read-only instead, or hide all mounts.
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
    fn the_root_is_not_unmounted() {
        assert!(umount(Path::new("/"), false).unwrap_err().to_string().contains("the root"));
    }
}
