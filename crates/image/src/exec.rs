//! Runs a command with an image as its root, in a mount namespace of its own.
//!
//! As root the tree is mounted as `mount` would; other users get a user namespace in which they are root and the tree
//! a metadata directory (Linux 6.16). The namespace ends with its last process, and the mount with it.

use crate::error::{At, Error, Result};
use crate::mount::{self, Options};
use crate::profile;
use crate::store::{Lease, Record, Store};
use crate::sys;
use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::mount::{MountFlags, MountPropagationFlags};
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// What to run and how.
#[derive(Clone, Debug, Default)]
pub struct Run {
    /// Program and arguments; the image's own entry point when empty.
    pub command: Vec<OsString>,
    /// NAME=VALUE, over the image's.
    pub env: Vec<String>,
    /// Host paths to show in the tree: from, to.
    pub binds: Vec<(PathBuf, PathBuf)>,
    /// Start directory in the tree; the image's when empty.
    pub workdir: String,
    /// Changes go to memory and vanish at the end.
    pub scratch: bool,
    /// How to mount; `upper` keeps the changes.
    pub mount: Options,
    /// Note for so long what the command opens, as the image's start profile.
    pub learn: Option<Duration>,
}

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

fn tmpfs(to: &Path, data: &std::ffi::CStr) -> Result<()> {
    rustix::mount::mount("tmpfs", to, "tmpfs", MountFlags::NOSUID, data)
        .map_err(|errno| Error::Mount { what: format!("tmpfs on {}", to.display()), source: errno.into() })
}

/// What `path` is in the tree, to be mounted on. The image's links lead where they would for who has it as root, and
/// never to the host.
fn inside(tree: &OwnedFd, path: impl AsRef<Path>, flags: OFlags) -> io::Result<OwnedFd> {
    let flags = flags | OFlags::PATH | OFlags::CLOEXEC;
    let found = rustix::fs::openat2(tree, path.as_ref(), flags, Mode::empty(), ResolveFlags::IN_ROOT)?;
    let (root, here) = (rustix::fs::fstat(tree)?, rustix::fs::fstat(&found)?);
    if (root.st_dev, root.st_ino) == (here.st_dev, here.st_ino) {
        return Err(io::Error::other("leads to the root"));
    }
    Ok(found)
}

/// A name for an open file by which it can be mounted on.
fn by_descriptor(file: &OwnedFd) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

/// Fills a new /dev.
fn devices(dev: &OwnedFd) -> Result<()> {
    // Nothing is made in what is not ours.
    if rustix::fs::fstatfs(dev).at("/dev")?.f_type != TMPFS_MAGIC {
        return Err(Error::Refused(
            "exec: /dev of the image cannot be replaced: it leads to what is mounted already".into(),
        ));
    }
    for device in DEVICES {
        rustix::fs::openat(dev, device, OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC, Mode::from_raw_mode(0o666))
            .at(device)?;
        bind(&Path::new("/dev").join(device), &by_descriptor(dev).join(device))?;
    }
    rustix::fs::mkdirat(dev, "shm", Mode::RWXU).at("/dev/shm")?;
    tmpfs(&by_descriptor(dev).join("shm"), c"mode=1777")?;
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

/// Replaces this process by the command; must be called while it has one thread. Returns only what went wrong.
///
/// # Errors
/// The kernel or user cannot mount; the command is not in the tree.
pub fn exec(store: &Store, record: &Record, run: &Run) -> Error {
    match prepare(store, record, run) {
        Ok(mut command) => {
            let program = command.get_program().to_string_lossy().into_owned();
            let error = command.exec();
            Error::Refused(format!("exec: {program}: {error} (in image {})", record.name))
        }
        Err(error) => error,
    }
}

fn prepare(store: &Store, record: &Record, run: &Run) -> Result<Command> {
    let lease = Lease::new(store)?;
    // Before this process leaves the host's namespace, and the store's sight.
    let watch = run.learn.map(|patience| profile::watch(store, &record.digest, patience)).transpose()?;
    let profile = if run.learn.is_none() { run.mount.profile(store, &record.digest) } else { None };
    if let Some(profile) = &profile {
        // Without it the command starts as well, only later.
        let _ = sys::in_background(&[], || profile.read_objects(store));
    }
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    let mut flags = libc::CLONE_NEWNS;
    if !uid.is_root() {
        flags |= libc::CLONE_NEWUSER;
    }
    sys::unshare(flags).map_err(|source| Error::Mount { what: "namespaces".into(), source })?;
    if !uid.is_root() {
        // Our one id, as root inside: without a helper nobody may map more.
        fs::write("/proc/self/setgroups", "deny").at("/proc/self/setgroups")?;
        fs::write("/proc/self/uid_map", format!("0 {} 1", uid.as_raw())).at("/proc/self/uid_map")?;
        fs::write("/proc/self/gid_map", format!("0 {} 1", gid.as_raw())).at("/proc/self/gid_map")?;
    }
    rustix::mount::mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        .map_err(|errno| Error::Mount { what: "private namespace".into(), source: errno.into() })?;

    let mut options = run.mount.clone();
    // Made before the namespace's own tmpfs may cover it, and empty outside of the namespace.
    let root = store.path("staging").join(lease.id());
    fs::create_dir_all(&root).at(&root)?;
    let staging = mount::open_path(&store.path("staging")).at(&root)?;
    let leases = mount::open_path(&store.path("leases")).at(&root)?;
    tmpfs(&root, c"mode=0700")?;
    let (scratch, place) = (root.join("scratch"), root.join("root"));
    fs::create_dir(&scratch).and_then(|()| fs::create_dir(&place)).at(&root)?;
    if run.scratch && options.upper.is_none() {
        options.upper = Some(scratch);
    }
    let lease_mount = Lease::new(store)?;
    let (tree, mounted) = mount::detached(store, &record.digest, &lease_mount, &options)?;
    for note in &mounted.notes {
        eprintln!("pagefold: note: {note}");
    }
    if let Some(profile) = &profile {
        let _ = sys::in_background(&[tree.as_raw_fd()], || profile.look_up(&tree));
    }
    mount::attach(&tree, &place)?;

    for host in ["proc", "sys"] {
        if let Ok(target) = inside(&tree, host, OFlags::DIRECTORY) {
            bind(&Path::new("/").join(host), &by_descriptor(&target))?;
        }
    }
    if let Ok(target) = inside(&tree, "dev", OFlags::DIRECTORY) {
        tmpfs(&by_descriptor(&target), c"mode=0755")?;
        devices(&inside(&tree, "dev", OFlags::DIRECTORY).at("/dev")?)?;
    }
    if options.upper.is_none() {
        for writable in ["tmp", "run"] {
            if let Ok(target) = inside(&tree, writable, OFlags::DIRECTORY) {
                tmpfs(&by_descriptor(&target), c"mode=1777")?;
            }
        }
    }
    for (from, to) in &run.binds {
        if !to.is_absolute() || to.components().any(|part| part == std::path::Component::ParentDir) {
            return Err(Error::Refused(format!("--bind {}: the path in the tree must be absolute", to.display())));
        }
        let target = inside(&tree, to.strip_prefix("/").unwrap_or(to), OFlags::empty()).map_err(|error| {
            Error::Refused(format!("--bind {}: {error} in the image; make it there first", to.display()))
        })?;
        bind(from, &by_descriptor(&target))?;
    }
    if let Some(watch) = &watch {
        watch.begin(&place)?;
    }
    rustix::process::chdir(&place).at(&place)?;
    rustix::process::pivot_root(".", ".")
        .map_err(|errno| Error::Mount { what: "pivot_root".into(), source: errno.into() })?;
    rustix::mount::unmount(".", rustix::mount::UnmountFlags::DETACH)
        .map_err(|errno| Error::Mount { what: "leaving the old root".into(), source: errno.into() })?;
    // By descriptor: the store is out of sight now, for the leases' own clean-up too. The mount table names the image.
    let _ = rustix::fs::unlinkat(&staging, lease.id(), rustix::fs::AtFlags::REMOVEDIR);
    for lease in [&lease, &lease_mount] {
        let _ = rustix::fs::unlinkat(&leases, lease.id(), rustix::fs::AtFlags::empty());
    }
    let config = &record.config;
    let workdir = if run.workdir.is_empty() { config.working_dir.as_str() } else { run.workdir.as_str() };
    let workdir = if workdir.is_empty() { "/" } else { workdir };
    rustix::process::chdir(workdir).at(workdir)?;

    let own = config.entrypoint.iter().chain(&config.cmd).map(OsString::from).collect();
    let words: Vec<OsString> = if run.command.is_empty() { own } else { run.command.clone() };
    let Some((program, arguments)) = words.split_first() else {
        return Err(Error::Refused(format!(
            "exec: image {} has no command of its own; give one after --",
            record.name
        )));
    };
    let mut env: Vec<(String, String)> = vec![
        ("PATH".into(), "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".into()),
        ("HOME".into(), "/root".into()),
    ];
    if let Ok(term) = std::env::var("TERM") {
        env.push(("TERM".into(), term));
    }
    env.extend(
        config.env.iter().chain(&run.env).filter_map(|pair| pair.split_once('=')).map(|(k, v)| (k.into(), v.into())),
    );
    let mut command = Command::new(program);
    command.args(arguments).env_clear().envs(env);
    Ok(command)
}
