//! The kernel's side of a mount: file systems are configured, mounted detached, and attached.

use crate::error::{At, Error, Result};
use crate::proc_fd::{open_path, proc_fd_path};
use rustix::fs::CWD;
use rustix::io::Errno;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags};
use std::ffi::OsStr;
use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

pub(super) fn failed(what: impl Into<String>) -> impl FnOnce(Errno) -> Error {
    let what = what.into();
    move |errno| Error::Mount { what, source: errno.into() }
}

/// A file system being configured; its errors carry what the kernel said about them.
pub(super) struct Context {
    pub(super) fd: OwnedFd,
    name: &'static str,
    /// Directories that paths by descriptor lead to, held open until the mount is made.
    held: Vec<OwnedFd>,
}

/// The most bytes of an option's value.
pub(super) const OPTION_MAX: usize = 255;

impl Context {
    pub(super) fn new(name: &'static str) -> Result<Self> {
        let fd = rustix::mount::fsopen(name, FsOpenFlags::FSOPEN_CLOEXEC).map_err(failed(name))?;
        Ok(Self { fd, name, held: Vec::new() })
    }

    fn explain(&self, step: &str, errno: Errno) -> Error {
        let mut said = String::new();
        let mut buffer = [0u8; 1024];
        while let Ok(count @ 1..) = rustix::io::read(&self.fd, &mut buffer) {
            let line = String::from_utf8_lossy(&buffer[..count]).into_owned();
            // Each message starts with its severity: "e ", "w " or "i ".
            said = line.get(2..).unwrap_or_default().trim_end().to_string();
        }
        let what =
            if said.is_empty() { format!("{} {step}", self.name) } else { format!("{} {step} ({said})", self.name) };
        failed(what)(errno)
    }

    pub(super) fn string(&self, key: &str, value: impl AsRef<OsStr>) -> Result<()> {
        rustix::mount::fsconfig_set_string(self.fd.as_fd(), key, value.as_ref())
            .map_err(|errno| self.explain(key, errno))
    }

    /// Sets an option to a path of any length: a path that is too long goes by its directory's descriptor, so that the mount
    /// table still has its last name.
    pub(super) fn path(&mut self, key: &str, path: &Path) -> Result<()> {
        if path.as_os_str().len() <= OPTION_MAX {
            return self.string(key, path);
        }
        let (dir, name) = path.parent().zip(path.file_name()).unwrap_or((path, OsStr::new("")));
        let fd = open_path(dir).at(dir)?;
        self.string(key, proc_fd_path(&fd).join(name))?;
        self.held.push(fd);
        Ok(())
    }

    pub(super) fn flag(&self, key: &str) -> Result<()> {
        rustix::mount::fsconfig_set_flag(self.fd.as_fd(), key).map_err(|errno| self.explain(key, errno))
    }

    pub(super) fn create(&self, attributes: MountAttrFlags) -> Result<OwnedFd> {
        rustix::mount::fsconfig_create(self.fd.as_fd()).map_err(|errno| self.explain("create", errno))?;
        rustix::mount::fsmount(self.fd.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)
            .map_err(|errno| self.explain("mount", errno))
    }
}

/// Returns true if this process is in the initial user namespace, where EROFS can be mounted and `trusted.*` be set.
pub(crate) fn in_initial_namespace() -> bool {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    map.split_ascii_whitespace().eq(["0", "0", "4294967295"])
}

/// Mounts the EROFS image `path`, detached; with `share`, its files share page cache with other images of that domain.
///
/// The kernel reads metadata directly, not through the page cache of the image file, or it would have the blocks twice,
/// unless they are `cached` there already.
pub(crate) fn erofs_mount(path: &Path, share: Option<&str>, cached: bool) -> Result<OwnedFd> {
    let attempt = |direct: bool| {
        let mut context = Context::new("erofs")?;
        if share.is_none() {
            context.path("source", path)?;
        } else {
            // This name in the mount table identifies the image.
            context.string("source", path)?;
        }
        context.flag("ro")?;
        if direct {
            context.flag("directio")?;
        }
        if let Some(domain) = share {
            context.flag("inode_share")?;
            context.string("domain_id", domain)?;
        }
        context.create(MountAttrFlags::MOUNT_ATTR_RDONLY)
    };
    if cached { attempt(false) } else { attempt(true).or_else(|_| attempt(false)) }
}

/// Overlayfs over one metadata layer and data-only layers, detached.
pub(crate) fn overlay_mount(
    source: &str,
    meta: &Path,
    objects: &[PathBuf],
    user: bool,
    upper: Option<&Path>,
    attributes: MountAttrFlags,
) -> Result<OwnedFd> {
    // Before 6.16 data-only layers need metacopy; with an upper layer, metacopy also keeps sharing across a chmod.
    // `userxattr` and metacopy exclude each other.
    let attempt = |metacopy: bool| {
        let mut context = Context::new("overlay")?;
        context.string("source", source)?;
        context.path("lowerdir+", meta)?;
        for objects in objects {
            context.path("datadir+", objects)?;
        }
        if user {
            context.flag("userxattr")?;
        }
        if metacopy {
            context.string("metacopy", "on")?;
            context.string("redirect_dir", if upper.is_some() { "on" } else { "follow" })?;
        }
        match upper {
            Some(upper) => {
                context.path("upperdir", &upper.join("upper"))?;
                context.path("workdir", &upper.join("work"))?;
            }
            None => context.flag("ro")?,
        }
        context.create(attributes)
    };
    if user { attempt(false) } else { attempt(true).or_else(|first| attempt(false).map_err(|_| first)) }
}

/// Attaches a detached mount at `target`.
pub(crate) fn attach(mount: &OwnedFd, target: &Path) -> Result<()> {
    rustix::mount::move_mount(mount, "", CWD, target, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
        .map_err(failed(target.display().to_string()))
}

/// A detached clone of a mount, of the same file system.
pub(super) fn clone_mount(mount: &OwnedFd) -> Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
    rustix::mount::open_tree(mount, "", flags).map_err(failed("clone of a mount"))
}
