//! The directory that a build reads: opened by descriptor, so that no symbolic link can lead the build out of it.

use crate::error::{At, Error, Result};
use crate::format::erofs;
use crate::store::FileState;
use crate::tree::{Meta, Xattrs};
use rustix::fs::{AtFlags, Dir, Mode, OFlags, ResolveFlags, Stat, StatxFlags};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The source directory of a build.
pub(super) struct SourceDirectory {
    root: PathBuf,
    top: OwnedFd,
}

/// A regular file of the source, open.
pub(super) struct OpenFile {
    pub(super) file: File,
    /// The path of the name by which it was opened.
    pub(super) path: PathBuf,
    pub(super) stat: Stat,
}

impl SourceDirectory {
    pub(super) fn open(root: &Path) -> Result<Self> {
        let root = root.canonicalize().at(root)?;
        let top = rustix::fs::open(&root, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).at(&root)?;
        Ok(Self { root, top })
    }

    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// The path of `path` outside the source, for messages.
    pub(super) fn full(&self, path: &Path) -> PathBuf {
        self.root.join(path)
    }

    pub(super) fn stat_root(&self) -> Result<Stat> {
        rustix::fs::fstat(&self.top).at(&self.root)
    }

    pub(super) fn root_xattrs(&self) -> Result<Xattrs> {
        read_xattrs(&self.top, OsStr::new("")).at(&self.root)
    }

    /// Opens `path`. A symbolic link on the way is an error: it could lead out of the source.
    fn open_beneath(&self, path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        let how = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        loop {
            match rustix::fs::openat2(&self.top, path, flags, Mode::empty(), how) {
                Err(Errno::AGAIN | Errno::INTR) => {}
                other => return other,
            }
        }
    }

    /// Opens the directory `path`; `None` if it no longer exists.
    pub(super) fn open_dir(&self, path: &Path) -> Result<Option<OwnedFd>> {
        match self.open_beneath(path, OFlags::RDONLY | OFlags::DIRECTORY) {
            Err(Errno::NOENT) => Ok(None),
            Err(Errno::NOTDIR | Errno::LOOP) => Err(replaced(&self.full(path))),
            other => other.map(Some).at(self.full(path)),
        }
    }

    /// Opens the regular file `path`; `None` if it no longer exists.
    pub(super) fn open_file(&self, path: &Path) -> Result<Option<OpenFile>> {
        let full = self.full(path);
        let file: File = match self.open_beneath(path, OFlags::RDONLY | OFlags::NONBLOCK) {
            Err(Errno::NOENT) => return Ok(None),
            // A link, a socket, or another file in the place of a directory.
            Err(Errno::LOOP | Errno::NXIO | Errno::NOTDIR) => return Err(replaced(&full)),
            other => other.at(&full)?.into(),
        };
        let stat = rustix::fs::fstat(&file).at(&full)?;
        if stat.st_mode & libc::S_IFMT != libc::S_IFREG {
            return Err(replaced(&full));
        }
        erofs::check_size(stat.st_size as u64, || full.display().to_string())?;
        Ok(Some(OpenFile { file, path: full, stat }))
    }
}

/// The error for a file or directory that was replaced by another kind of file: what stands there now may have a tree of its
/// own, so the build cannot go on.
fn replaced(full: &Path) -> Error {
    Error::Refused(format!(
        "{}: replaced by another kind of file while the tree was read; build again, or build from a copy or snapshot",
        full.display()
    ))
}

/// The attributes of `name` in the open directory, or of the open file itself if `name` is empty. Never follows a link.
pub(super) fn read_xattrs(dir: &impl AsRawFd, name: &OsStr) -> rustix::io::Result<Xattrs> {
    let mut path = PathBuf::from(format!("/proc/self/fd/{}", dir.as_raw_fd()));
    if !name.is_empty() {
        path.push(name);
    }
    let mut names = vec![0u8; 1 << 10];
    // The descriptor's own link must be followed, a child must not.
    let follow = name.is_empty();
    let list = |names: &mut Vec<u8>| match follow {
        true => rustix::fs::listxattr(&path, &mut names[..]),
        false => rustix::fs::llistxattr(&path, &mut names[..]),
    };
    let count = match list(&mut names) {
        Err(Errno::RANGE) => {
            names = vec![0; 1 << 16];
            list(&mut names)
        }
        other => other,
    };
    let count = match count {
        Err(Errno::NOTSUP) => 0,
        other => other?,
    };
    let mut all = Xattrs::new();
    for xattr in names[..count].split(|&byte| byte == 0).filter(|name| !name.is_empty()) {
        let mut value = vec![0u8; 1 << 16];
        let got = match follow {
            true => rustix::fs::getxattr(&path, xattr, &mut value[..]),
            false => rustix::fs::lgetxattr(&path, xattr, &mut value[..]),
        };
        match got {
            // Removed since it was listed, or closed to this user.
            Err(Errno::NODATA | Errno::PERM | Errno::ACCESS | Errno::NOTSUP) => {}
            Err(error) => return Err(error),
            Ok(count) => {
                all.insert(xattr.into(), value[..count].into());
            }
        }
    }
    Ok(all)
}

/// What `name` in the open directory is, and its target if it is a symbolic link.
pub(super) fn stat_and_target(dir: &OwnedFd, name: &OsStr) -> rustix::io::Result<(Stat, Box<[u8]>)> {
    let mut looks = 0;
    loop {
        looks += 1;
        let stat = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)?;
        if stat.st_mode & libc::S_IFMT != libc::S_IFLNK {
            return Ok((stat, Box::default()));
        }
        match rustix::fs::readlinkat(dir, name, Vec::new()) {
            // Replaced since the stat by a file that is not a link.
            Err(Errno::INVAL) if looks < 16 => {}
            other => return Ok((stat, other?.to_bytes().into())),
        }
    }
}

/// Returns true if `name` is on another file system than `device`. A user's own FUSE mount answers other users, root
/// included, nothing but this, and only if the call asks for nothing else.
pub(super) fn is_mounted(dir: &OwnedFd, name: &OsStr, device: u64) -> bool {
    rustix::fs::statx(dir, name, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::empty())
        .is_ok_and(|found| rustix::fs::makedev(found.stx_dev_major, found.stx_dev_minor) != device)
}

/// Why files are left out that no longer exist when they are read: to the image they never existed.
pub(super) const GONE: &str = "files or directories that went away while the tree was read were left out";

/// A file's metadata for the tree.
pub(super) fn meta(stat: &Stat, xattrs: Xattrs) -> Meta {
    Meta {
        mode: (stat.st_mode & 0o7777) as u16,
        uid: stat.st_uid,
        gid: stat.st_gid,
        mtime_s: stat.st_mtime,
        mtime_ns: stat.st_mtime_nsec as u32,
        xattrs,
    }
}

/// The names in a directory but for itself and its parent, in order: equal directories give equal trees.
pub(super) fn names(dir: &OwnedFd, full: &Path) -> Result<Vec<Vec<u8>>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(dir).at(full)? {
        let name = entry.at(full)?.file_name().to_bytes().to_vec();
        if name != b"." && name != b".." {
            names.push(name);
        }
    }
    names.sort_unstable();
    Ok(names)
}

/// The size and times by which a change of a file shows.
pub(super) fn file_state(stat: &Stat) -> FileState {
    FileState {
        size: stat.st_size as u64,
        mtime: (stat.st_mtime, stat.st_mtime_nsec as u32),
        ctime: (stat.st_ctime, stat.st_ctime_nsec as u32),
    }
}

/// The last name of a path of the source.
pub(super) fn last_name(path: &Path) -> &[u8] {
    path.file_name().unwrap_or_default().as_bytes()
}
