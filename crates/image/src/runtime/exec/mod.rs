//! Runs a command with an image as its root, in a mount namespace of its own.
//!
//! As root the tree is mounted as `mount` would; other users get a user namespace in which they are root and the tree
//! a metadata directory (Linux 6.16). As root the command runs as the image's user. The namespace ends with its last
//! process, and the mount with it.

use crate::error::{At, Error, Result};
use crate::mount::{self, Options, by_descriptor};
use crate::profile;
use crate::progress;
use crate::shelf::Shelf;
use crate::store::{Lease, Record, Store};
use crate::sys;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
use std::ffi::OsString;
use std::fs;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
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
    /// `USER[:GROUP]` to run as, by names of the tree or numbers; the image's when empty.
    pub user: String,
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

/// File system type of pipes without a name.
const PIPEFS_MAGIC: rustix::fs::FsWord = 0x5049_5045;

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

/// Goes to `path` of the tree, which is the root by now. Links of the kernel's own (/proc/PID/root) lead out of it, and
/// are refused. What is missing on the way is made if `make` is set.
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
    // Who wants terminals of its own, as script and sshd do, makes them here; on the rest a kernel without has no bearing.
    rustix::fs::mkdirat(dev, "pts", Mode::from_raw_mode(0o755)).at("/dev/pts")?;
    let (pts, flags) = (by_descriptor(dev).join("pts"), MountFlags::NOSUID | MountFlags::NOEXEC);
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

/// Who the command runs as.
#[derive(Debug, PartialEq, Eq)]
struct User {
    uid: u32,
    gid: u32,
    /// Supplementary groups.
    groups: Vec<u32>,
    home: String,
}

/// Most bytes of the tree's passwd and group files that are read.
const MOST_BYTES: u64 = 16 << 20;

/// A file of users or groups; empty where there is none. It is the image's, so it may be anything.
fn database(path: &str) -> Result<String> {
    if !fs::metadata(path).is_ok_and(|meta| meta.is_file()) {
        return Ok(String::new());
    }
    let mut bytes = Vec::new();
    fs::File::open(path).and_then(|file| file.take(MOST_BYTES).read_to_end(&mut bytes)).at(path)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

impl User {
    /// What `wanted`, USER[:GROUP], is by the contents of passwd(5) and group(5).
    fn find(wanted: &str, passwd: &str, group: &str) -> Result<Self> {
        fn lines(text: &str) -> impl Iterator<Item = Vec<&str>> {
            text.lines().map(|line| line.split(':').collect())
        }
        let number = |text: &str| text.parse::<u32>().ok().filter(|&id| id != u32::MAX);
        let unknown = |what: &str, name: &str| {
            Error::Refused(format!("exec: no {what} {name:?} in the image's /etc; give a number, or another --user"))
        };
        let (name, group_name) = wanted.split_once(':').unwrap_or((wanted, ""));
        // A name may look like a number; then it is a name, as for other engines.
        let fits = |fields: &[&str], key: &str| {
            fields.len() > 2 && (fields[0] == key || number(key).is_some_and(|id| number(fields[2]) == Some(id)))
        };
        let entry = lines(passwd).find(|fields| fits(fields, name) && fields.len() > 5);
        let ids = match &entry {
            Some(fields) => number(fields[2]).zip(number(fields[3])),
            // Trees without passwd have a root too.
            None => number(name).or((name == "root").then_some(0)).zip(Some(0)),
        };
        let (uid, gid) = ids.ok_or_else(|| unknown("user", name))?;
        let home = entry.as_ref().map_or("", |fields| fields[5]);
        let mut user = Self { uid, gid, groups: Vec::new(), home: home.into() };
        if user.home.is_empty() {
            user.home = if uid == 0 { "/root" } else { "/" }.into();
        }
        if group_name.is_empty() {
            let member = entry.as_ref().map_or(name, |fields| fields[0]);
            let has = |fields: &Vec<&str>| fields.len() > 3 && fields[3].split(',').any(|name| name == member);
            user.groups = lines(group).filter(has).filter_map(|fields| number(fields[2])).collect();
        } else {
            let entry = lines(group).find(|fields| fits(fields, group_name));
            let gid = entry.map_or_else(|| number(group_name), |fields| number(fields[2]));
            user.gid = gid.ok_or_else(|| unknown("group", group_name))?;
        }
        Ok(user)
    }

    /// Makes this process, which has one thread, the user's.
    fn become_it(&self) -> io::Result<()> {
        use rustix::fs::{Gid, Uid};
        use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
        let (uid, gid) = (Uid::from_raw(self.uid), Gid::from_raw(self.gid));
        let groups: Vec<Gid> = self.groups.iter().copied().map(Gid::from_raw).collect();
        set_thread_groups(&groups)?;
        // Programs open their output again by /dev/stdout, and a pipe is who made it's.
        let (input, output, error) = (io::stdin(), io::stdout(), io::stderr());
        for pipe in [input.as_fd(), output.as_fd(), error.as_fd()] {
            if rustix::fs::fstatfs(pipe).is_ok_and(|fs| fs.f_type == PIPEFS_MAGIC) {
                let _ = rustix::fs::fchown(pipe, Some(uid), None);
            }
        }
        set_thread_res_gid(gid, gid, gid)?;
        set_thread_res_uid(uid, uid, uid)?;
        Ok(())
    }
}

/// Replaces this process by the command, which `become_it` does (exec(2)); must be called while it has one thread. Returns
/// only what went wrong. Record and lease are those of [`Store::hold`].
///
/// # Errors
/// The kernel or user cannot mount; the command is not in the tree.
pub fn exec(
    store: &Store,
    record: &Record,
    lease: &Lease,
    run: &Run,
    become_it: impl FnOnce(Command) -> io::Error,
) -> Error {
    match prepare(store, record, lease, run) {
        Ok(command) => {
            let program = command.get_program().to_string_lossy().into_owned();
            Error::Exec { program, image: record.name.clone(), source: become_it(command) }
        }
        Err(error) => error,
    }
}

fn prepare(store: &Store, record: &Record, lease: &Lease, run: &Run) -> Result<Command> {
    // Before this process leaves the host's namespace, and the store's sight.
    let watch = run.learn.map(|patience| profile::watch(store, &record.digest, patience)).transpose()?;
    // The disk gets to it while there is something else to do.
    if let Ok(file) = fs::File::open(Shelf::of(store, &record.digest).metadata()) {
        let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::WillNeed);
    }
    let profile = if run.learn.is_none() { run.mount.profile(store, &record.digest) } else { None };
    // Without it the command starts as well, only later.
    let ahead = profile.and_then(|profile| profile.read_ahead(store, &record.digest));
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    let all_users = uid.is_root() && mount::in_initial_namespace();
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
    let leases = mount::open_path(&store.path("leases")).at(store.path("leases"))?;
    // Nobody else sees what this namespace has there: all commands have the one directory. To make and remove one of its own
    // would wait for the disk.
    let (mut place, mut aside) = (store.exec_place(), store.exec_place());
    if run.scratch && options.upper.is_none() {
        tmpfs(&place, c"mode=0700")?;
        options.upper = Some(place.join("scratch"));
        (place, aside) = (place.join("root"), place.join("metadata"));
        fs::create_dir(&place).and_then(|()| fs::create_dir(&aside)).at(&place)?;
    }
    let (tree, mounted) = mount::detached(store, &record.digest, lease, &options, Some(&aside))?;
    if let Some(ahead) = ahead {
        ahead.look_up(&tree);
    }
    let has_dev = inside(&tree, "dev", OFlags::DIRECTORY).is_ok();
    for note in mounted.notes.iter().filter(|note| !(has_dev && note.contains(mount::NO_DEV_NODES))) {
        progress::note(note);
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
        rustix::mount::mount_bind_recursive(from, by_descriptor(&target)).map_err(|errno| {
            let what = match errno {
                rustix::io::Errno::NOENT => format!("no {} here", from.display()),
                rustix::io::Errno::NOTDIR => "a directory goes on a directory, a file on a file".into(),
                other => io::Error::from(other).to_string(),
            };
            Error::Refused(format!("--bind {}:{}: {what}", from.display(), to.display()))
        })?;
    }
    if let Some(watch) = &watch {
        watch.begin(&place)?;
    }
    rustix::process::chdir(&place).at(&place)?;
    rustix::process::pivot_root(".", ".")
        .map_err(|errno| Error::Mount { what: "pivot_root".into(), source: errno.into() })?;
    rustix::mount::unmount(".", UnmountFlags::DETACH)
        .map_err(|errno| Error::Mount { what: "leaving the old root".into(), source: errno.into() })?;
    // By descriptor: the store is out of sight now, for the lease's own clean-up too. The mount table names the image.
    let _ = rustix::fs::unlinkat(&leases, lease.id(), AtFlags::empty());
    let config = &record.config;
    let workdir = if run.workdir.is_empty() { config.working_dir.as_str() } else { run.workdir.as_str() };
    let workdir = Path::new("/").join(workdir);
    match enter(&workdir, false) {
        // Engines make the image's own, where anything can be made.
        Err(Errno::NOENT) if run.workdir.is_empty() => {
            if enter(&workdir, true).is_err() {
                let shown = workdir.display();
                progress::note(&format!("the image has no {shown}, where it wants to start; the command starts in /"));
                rustix::process::chdir("/").at("/")?;
            }
        }
        other => other.map_err(|errno| {
            let (shown, error) = (workdir.display(), io::Error::from(errno));
            Error::Refused(format!("exec: {shown}: {error} in image {}; --workdir names another", record.name))
        })?,
    }

    let own = config.entrypoint.iter().chain(&config.cmd).map(OsString::from).collect();
    let words: Vec<OsString> = if run.command.is_empty() { own } else { run.command.clone() };
    let Some((program, arguments)) = words.split_first() else {
        return Err(Error::Refused(format!(
            "exec: image {} has no command of its own; give one after --",
            record.name
        )));
    };
    let wanted = if run.user.is_empty() { &config.user } else { &run.user };
    let mut home = "/root".to_string();
    if !wanted.is_empty() {
        let user = database("/etc/passwd").and_then(|users| User::find(wanted, &users, &database("/etc/group")?));
        let found = user.and_then(|user| match user.become_it() {
            // What we are in a user's namespace.
            Err(_) if !all_users && (user.uid, user.gid) == (0, 0) => Ok(user.home),
            Ok(()) => Ok(user.home),
            Err(error) => Err(Error::Refused(format!("exec: user {wanted}: {error}; only root has other users"))),
        });
        match found {
            Ok(found) => home = found,
            Err(error) if all_users || !run.user.is_empty() => return Err(error),
            Err(_) => {
                progress::note(&format!("the command runs as you, not as the image's user {wanted}: that needs root"));
            }
        }
    }
    let mut env: Vec<(String, String)> = vec![
        ("PATH".into(), "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".into()),
        ("HOME".into(), home),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_names_of_the_tree_or_numbers() {
        let passwd = "root:x:0:0::/root:/bin/sh\nbroken\napp:x:1001:1002:An app:/home/app:\n77:x:5:6::/h:\nbad:x:y:z::/:\nhalf:x:8:z::/:\n";
        let group = "app:x:1002:\nextra:x:1003:other,app\nmore:x:1004:app\nnone:x:1005:apps\n";
        let user = |uid, gid, groups: &[u32], home: &str| User { uid, gid, groups: groups.into(), home: home.into() };
        for (wanted, expected) in [
            ("root", user(0, 0, &[], "/root")),
            ("app", user(1001, 1002, &[1003, 1004], "/home/app")),
            ("1001", user(1001, 1002, &[1003, 1004], "/home/app")),
            ("app:extra", user(1001, 1003, &[], "/home/app")),
            ("app:9", user(1001, 9, &[], "/home/app")),
            ("77", user(5, 6, &[], "/h")),
            ("1000", user(1000, 0, &[], "/")),
            ("1000:more", user(1000, 1004, &[], "/")),
            ("0:0", user(0, 0, &[], "/root")),
        ] {
            assert_eq!(User::find(wanted, passwd, group).unwrap(), expected, "{wanted}");
        }
        assert_eq!(User::find("5:6", "", "").unwrap(), user(5, 6, &[], "/"));
        assert_eq!(User::find("root", "", "").unwrap(), user(0, 0, &[], "/root"));
        for wanted in ["nobody", "app:none-such", "4294967295", "-1", "bad", "half", ":5", "broken"] {
            let error = User::find(wanted, passwd, group).unwrap_err().to_string();
            assert!(error.contains("in the image's /etc") && !error.contains('\n'), "{error}");
        }
    }
}
