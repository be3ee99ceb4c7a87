//! The private namespaces of a command, and its way to the new root.

use super::run::ExecOptions;
use crate::error::{At, Error, Result};
use crate::progress;
use crate::store::ImageRecord;
use crate::sys;
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::mount::{MountPropagationFlags, UnmountFlags};
use std::fs;
use std::io;
use std::path::Path;

/// Moves this process into a mount namespace of its own; a plain user gets a user namespace too, and is root in it.
pub(super) fn enter_private() -> Result<()> {
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    let mut flags = libc::CLONE_NEWNS;
    if !uid.is_root() {
        flags |= libc::CLONE_NEWUSER;
    }
    sys::unshare(flags).map_err(|source| Error::Mount { what: "namespaces".into(), source })?;
    if !uid.is_root() {
        // The user's one id becomes root inside: mapping more ids needs a privileged helper.
        fs::write("/proc/self/setgroups", "deny").at("/proc/self/setgroups")?;
        fs::write("/proc/self/uid_map", format!("0 {} 1", uid.as_raw())).at("/proc/self/uid_map")?;
        fs::write("/proc/self/gid_map", format!("0 {} 1", gid.as_raw())).at("/proc/self/gid_map")?;
    }
    rustix::mount::mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        .map_err(|errno| Error::Mount { what: "private namespace".into(), source: errno.into() })
}

/// Makes the mount at `root` the root of this process, and unmounts the old root.
pub(super) fn pivot_to(root: &Path) -> Result<()> {
    rustix::process::chdir(root).at(root)?;
    rustix::process::pivot_root(".", ".")
        .map_err(|errno| Error::Mount { what: "pivot_root".into(), source: errno.into() })?;
    rustix::mount::unmount(".", UnmountFlags::DETACH)
        .map_err(|errno| Error::Mount { what: "leaving the old root".into(), source: errno.into() })
}

/// Changes to the directory `path` of the tree, which is the root now. The kernel's own links (/proc/PID/root) could lead
/// out of it and are refused. With `make`, missing directories on the way are made.
fn enter(path: &Path, make: bool) -> rustix::io::Result<()> {
    let open = |path: &Path| {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::openat2(CWD, path, flags, Mode::empty(), ResolveFlags::NO_MAGICLINKS)
    };
    let dir = match (open(path), path.parent(), path.file_name()) {
        (Err(Errno::NOENT), Some(parent), Some(name)) if make => {
            enter(parent, true)?;
            rustix::fs::mkdirat(CWD, name, Mode::from_raw_mode(0o777))?;
            open(Path::new(name))?
        }
        (found, ..) => found?,
    };
    rustix::process::fchdir(dir)
}

/// Changes to the directory where the command starts.
pub(super) fn enter_workdir(record: &ImageRecord, run: &ExecOptions) -> Result<()> {
    let workdir = if run.workdir.is_empty() { &record.config.working_dir } else { &run.workdir };
    let workdir = Path::new("/").join(workdir);
    let shown = workdir.display();
    match enter(&workdir, false) {
        // Like other engines, make the image's own where anything can be made.
        Err(Errno::NOENT) if run.workdir.is_empty() => {
            if enter(&workdir, true).is_err() {
                progress::note(&format!("the image has no {shown}, where it wants to start; the command starts in /"));
                rustix::process::chdir("/").at("/")?;
            }
            Ok(())
        }
        other => other.map_err(|errno| {
            let error = io::Error::from(errno);
            Error::Refused(format!("exec: {shown}: {error} in image {}; --workdir names another", record.name))
        }),
    }
}
