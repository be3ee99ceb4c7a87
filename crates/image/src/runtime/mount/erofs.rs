//! Mounts of the metadata image, from its file or through a loop device.

use super::kernel::erofs_mount;
use super::options::{MountKind, Mounted};
use super::request::Request;
use crate::error::{At, Error, Result};
use crate::sys;
use std::fs::File;
use std::os::fd::OwnedFd;

/// Mounts the metadata image from its file.
pub(super) fn by_file(request: &Request) -> Result<(OwnedFd, Mounted)> {
    let meta = erofs_mount(&request.metadata, None, request.aside.is_some())?;
    Ok((request.overlay_on(&meta)?, request.mounted(MountKind::Erofs, Vec::new())))
}

/// Mounts the metadata image through a loop device.
pub(super) fn by_loop_device(request: &Request) -> Result<(OwnedFd, Mounted)> {
    let file = File::open(&request.metadata).at(&request.metadata)?;
    // Freed with its last user: held until the mount uses it.
    let (device, _held) =
        sys::loop_device(&file).map_err(|source| Error::Mount { what: "loop device".into(), source })?;
    let meta = erofs_mount(&device, None, false)?;
    Ok((request.overlay_on(&meta)?, request.mounted(MountKind::Loop, Vec::new())))
}
