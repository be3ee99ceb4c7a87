//! The root of a new upper directory: a mount shows it in the place of its lower layers' root.

use crate::build::source::{SourceDirectory, meta};
use crate::error::{At, Result};
use crate::format::acl;
use crate::tree::{drop_overlay_xattrs, show};
use rustix::fs::{CWD, Gid, Mode, Uid, XattrFlags};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Gives directory `to` the owner, mode and attributes of directory `from`.
///
/// # Errors
/// The system's.
pub fn copy_root(from: &Path, to: &Path) -> Result<()> {
    let source = SourceDirectory::open(from)?;
    let mut meta = meta(&source.stat_root()?, source.root_xattrs()?);
    drop_overlay_xattrs(&mut meta.xattrs);
    rustix::fs::chownat(
        CWD,
        to,
        Some(Uid::from_raw(meta.uid)),
        Some(Gid::from_raw(meta.gid)),
        rustix::fs::AtFlags::empty(),
    )
    .at(to)?;
    let mut mode = meta.mode;
    for (name, value) in &meta.xattrs {
        match rustix::fs::setxattr(to, OsStr::from_bytes(name), value, XattrFlags::empty()) {
            // The file system of the upper directory has no such attributes.
            Err(Errno::NOTSUP) => mode = acl::mode_without(name, value, mode),
            other => other.at(to.join(show(name)))?,
        }
    }
    rustix::fs::chmod(to, Mode::from_raw_mode(mode.into())).at(to)
}
