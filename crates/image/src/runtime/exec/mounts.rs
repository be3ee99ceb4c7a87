//! What is mounted over the tree of a command: the host's proc and sys, a /dev of its own, and the operator's binds.

use crate::error::{At, Error, Result};
use crate::proc_fd::proc_fd_path;
use crate::progress;
use crate::runtime::mount::NO_DEV_NODES;
use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::mount::MountFlags;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};

/// Devices every program expects.
const DEVICES: [&str; 6] = ["null", "zero", "full", "random", "urandom", "tty"];

/// File system type of tmpfs, as statfs(2) tells it.
const TMPFS_MAGIC: rustix::fs::FsWord = 0x0102_1994;

fn bind(from: &Path, to: &Path) -> Result<()> {
    let what = |errno: rustix::io::Errno| Error::Mount {
        what: format!("bind {} to {}", from.display(), to.display()),
        source: errno.into(),
    };
    rustix::mount::mount_bind_recursive(from, to).map_err(what)
}

pub(super) fn tmpfs(to: &Path, data: &std::ffi::CStr) -> Result<()> {
    rustix::mount::mount("tmpfs", to, "tmpfs", MountFlags::NOSUID, data)
        .map_err(|errno| Error::Mount { what: format!("tmpfs on {}", to.display()), source: errno.into() })
}

/// Opens `path` of the tree to mount on it. The image's links lead where they would with the tree as root, and never to the
/// host.
fn inside(tree: &OwnedFd, path: impl AsRef<Path>, flags: OFlags) -> io::Result<OwnedFd> {
    let flags = flags | OFlags::PATH | OFlags::CLOEXEC;
    let found = rustix::fs::openat2(tree, path.as_ref(), flags, Mode::empty(), ResolveFlags::IN_ROOT)?;
    let (root, here) = (rustix::fs::fstat(tree)?, rustix::fs::fstat(&found)?);
    if (root.st_dev, root.st_ino) == (here.st_dev, here.st_ino) {
        return Err(io::Error::other("leads to the root"));
    }
    Ok(found)
}

/// Fills a new /dev.
fn devices(dev: &OwnedFd) -> Result<()> {
    // Devices are made only in the tmpfs that was just mounted.
    if rustix::fs::fstatfs(dev).at("/dev")?.f_type != TMPFS_MAGIC {
        return Err(Error::Refused(
            "exec: /dev of the image cannot be replaced: it leads to what is mounted already".into(),
        ));
    }
    for device in DEVICES {
        rustix::fs::openat(dev, device, OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC, Mode::from_raw_mode(0o666))
            .at(device)?;
        bind(&Path::new("/dev").join(device), &proc_fd_path(dev).join(device))?;
    }
    rustix::fs::mkdirat(dev, "shm", Mode::RWXU).at("/dev/shm")?;
    tmpfs(&proc_fd_path(dev).join("shm"), c"mode=1777")?;
    // Programs that open terminals of their own, as script and sshd do, do so here. A kernel without devpts affects only
    // them.
    rustix::fs::mkdirat(dev, "pts", Mode::from_raw_mode(0o755)).at("/dev/pts")?;
    let (pts, flags) = (proc_fd_path(dev).join("pts"), MountFlags::NOSUID | MountFlags::NOEXEC);
    if rustix::mount::mount("devpts", &pts, "devpts", flags, c"newinstance,ptmxmode=0666,mode=0620").is_ok() {
        rustix::fs::symlinkat("pts/ptmx", dev, "ptmx").at("/dev/ptmx")?;
    }
    for (name, target) in [
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
    ] {
        rustix::fs::symlinkat(target, dev, name).at(name)?;
    }
    Ok(())
}

/// Notes what the mount lacks, except device nodes if the tree gets a /dev of its own.
pub(super) fn report(tree: &OwnedFd, notes: &[String]) {
    let has_dev = inside(tree, "dev", OFlags::DIRECTORY).is_ok();
    for note in notes.iter().filter(|note| !(has_dev && note.contains(NO_DEV_NODES))) {
        progress::note(note);
    }
}

/// Mounts proc, sys and dev, and in a read-only tree directories for temporary files, where the tree has places for them.
pub(super) fn mount_system(tree: &OwnedFd, is_read_only: bool) -> Result<()> {
    for host in ["proc", "sys"] {
        if let Ok(target) = inside(tree, host, OFlags::DIRECTORY) {
            bind(&Path::new("/").join(host), &proc_fd_path(&target))?;
        }
    }
    if let Ok(target) = inside(tree, "dev", OFlags::DIRECTORY) {
        tmpfs(&proc_fd_path(&target), c"mode=0755")?;
        devices(&inside(tree, "dev", OFlags::DIRECTORY).at("/dev")?)?;
    }
    if is_read_only {
        for writable in ["tmp", "run"] {
            if let Ok(target) = inside(tree, writable, OFlags::DIRECTORY) {
                tmpfs(&proc_fd_path(&target), c"mode=1777")?;
            }
        }
    }
    Ok(())
}

/// Mounts host paths in the tree: from, to.
pub(super) fn mount_binds(tree: &OwnedFd, binds: &[(PathBuf, PathBuf)]) -> Result<()> {
    for (from, to) in binds {
        if !to.is_absolute() || to.components().any(|part| part == Component::ParentDir) {
            return Err(Error::Refused(format!("--bind {}: the path in the tree must be absolute", to.display())));
        }
        let target = inside(tree, to.strip_prefix("/").unwrap_or(to), OFlags::empty()).map_err(|error| {
            Error::Refused(format!("--bind {}: {error} in the image; make it there first", to.display()))
        })?;
        rustix::mount::mount_bind_recursive(from, proc_fd_path(&target)).map_err(|errno| {
            let what = match errno {
                rustix::io::Errno::NOENT => format!("no {} here", from.display()),
                rustix::io::Errno::NOTDIR => "a directory goes on a directory, a file on a file".into(),
                other => io::Error::from(other).to_string(),
            };
            Error::Refused(format!("--bind {}:{}: {what}", from.display(), to.display()))
        })?;
    }
    Ok(())
}
