//! Whether a file is open somewhere, a kernel mount included.

use crate::error::{At, Result};
use crate::sys;
use std::fs::File;
use std::io;
use std::path::Path;

/// What the kernel says about other users of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InUse {
    /// The file is not open elsewhere.
    No,
    /// The file is open elsewhere: perhaps in a mount that no mount table shows, because it is attached nowhere or in a
    /// namespace without processes.
    Yes,
    /// The kernel does not say: the file system has no leases (NFS), or the file belongs to another user.
    Unknown,
}

/// Asks the kernel whether `path` is open elsewhere. A file that does not exist is not in use.
pub(crate) fn in_use(path: &Path) -> Result<InUse> {
    match File::open(path) {
        Ok(file) => Ok(match sys::is_open_elsewhere(&file) {
            Ok(true) => InUse::Yes,
            Ok(false) => InUse::No,
            Err(_) => InUse::Unknown,
        }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(InUse::No),
        // The file was found damaged and closed to its owner: only root can have mounted it.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied && !rustix::process::geteuid().is_root() => {
            Ok(InUse::No)
        }
        Err(error) => Err(error).at(path),
    }
}
