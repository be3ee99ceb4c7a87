//! The life of a mount: lock the directory, mount, serve, unmount cleanly, and clean up after one that died.
//!
//! A FUSE mount whose process is gone does not hang: the kernel closes the connection with the process's last
//! descriptor, and every call gets `ENOTCONN`. What could hang is a process that lives and does not answer, so a
//! panic in any thread ends the whole process at once, and nothing in it waits without an end on somebody outside.

use crate::config::Config;
use crate::control::{self, Command, Ended, Lost};
use crate::engine::{Engine, Unwritten};
use crate::fuse::DiskFs;
use crate::nbd;
use crate::stats::Status;
use fuser::{BackgroundSession, MountOption, Session, SessionACL};
use pagefold_os::mountinfo;
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::mount::UnmountFlags;
use std::fs::File;
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// How to mount.
#[derive(Clone, Debug)]
pub struct Options {
    /// The directory with the images.
    pub directory: PathBuf,
    /// Where to show them.
    pub mountpoint: PathBuf,
    /// The cache.
    pub config: Config,
    /// Threads that answer the kernel.
    pub threads: usize,
    /// Where to keep fingerprints, if anywhere.
    pub fingerprints: Option<PathBuf>,
    /// Refuse every change.
    pub read_only: bool,
    /// Let other users in; the files' own permissions still count.
    pub allow_other: bool,
    /// Serve the images over NBD on this Unix socket too.
    pub nbd: Option<PathBuf>,
    /// How long open files are served after a request to end.
    pub grace: Duration,
}

/// Why a mount could not be made, or did not end well.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The directory cannot be used.
    #[error("cannot open the directory {}: {source}", path.display())]
    Directory {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The directory is one of the kernel's.
    #[error("{} holds files of the kernel's own, and no images", .0.display())]
    Pseudo(PathBuf),
    /// Another mount serves the directory: two caches over the same files would overwrite each other.
    #[error("{} is mounted already; `pagefold disk status` shows where", .0.display())]
    Busy(PathBuf),
    /// The mount point cannot be used.
    #[error("cannot use the mount point {}: {why}", path.display())]
    Mountpoint {
        /// Which.
        path: PathBuf,
        /// Why, and what to do.
        why: String,
    },
    /// The kernel or `fusermount3` refused.
    #[error("cannot mount: {}; check that /dev/fuse is there and fusermount3 is installed", .0.to_string().trim_end())]
    Fuse(io::Error),
    /// The cache or its threads cannot be made.
    #[error("cannot start the cache: {0}")]
    Engine(io::Error),
    /// A socket cannot be made.
    #[error("cannot listen on {}: {source}", path.display())]
    Socket {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The session ended before it had begun.
    #[error(
        "cannot serve the mount: {source}; each of its {threads} threads takes a descriptor, see ulimit -n and --workers"
    )]
    Session {
        /// Threads that were to answer the kernel.
        threads: usize,
        /// Why.
        source: io::Error,
    },
    /// The disk refused data at the end.
    #[error("{0}")]
    Unwritten(Lost),
}

/// The source our mounts show in the mount table, by which they are known.
const SOURCE: &str = "pagefold-disk";

/// What the main thread waits for.
enum Event {
    /// Asked to end, perhaps by a client who waits to hear how that went.
    Stop(Option<UnixStream>),
    /// With the error that ended it.
    SessionEnded(Option<io::Error>),
}

/// Mounts, calls `ready`, serves until it is told to end or unmounted from outside, and writes everything back.
///
/// # Errors
/// [`MountError`]; nothing stays mounted.
pub fn serve(options: &Options, ready: impl FnOnce(&Status)) -> Result<(), MountError> {
    end_the_process_on_panic();
    // An open image takes two, a connection one. With fewer it works, too.
    let _ = pagefold_os::fd::raise_limit();
    let _lock = lock_directory(&options.directory)?;
    let mountpoint = prepare_mountpoint(&options.directory, &options.mountpoint)?;
    let engine =
        Engine::start(&options.directory, options.config.clone(), options.fingerprints.as_deref(), options.read_only)
            .map_err(MountError::Engine)?;
    let (listener, socket) = control::bind(&mountpoint)
        .map_err(|source| MountError::Socket { path: control::socket_path(&mountpoint), source })?;
    let _socket = RemoveOnDrop(socket);
    let _nbd_socket = match &options.nbd {
        Some(path) => {
            let socket_error = |source| MountError::Socket { path: path.clone(), source };
            Some(RemoveOnDrop(nbd::listen(engine.clone(), path).map_err(socket_error)?))
        }
        None => None,
    };

    let (events, happened) = channel();
    // Before the mount: whoever sees it may send a signal at once.
    watch_signals(events.clone()).map_err(MountError::Engine)?;
    // The kernel applies the caller's umask to what he makes; ours must not come on top.
    rustix::process::umask(Mode::empty());
    let session = start_session(&engine, &mountpoint, options)?;
    let guard = watch_session(session, events.clone()).map_err(MountError::Engine)?;
    if let Err(error) = answer_control(listener, engine.clone(), mountpoint.clone(), events) {
        let _ = unmount(&mountpoint, true);
        return Err(MountError::Engine(error));
    }
    if let Err(source) = first_answer(&mountpoint, &happened) {
        let _ = unmount(&mountpoint, true);
        return Err(MountError::Session { threads: options.threads.max(1), source });
    }
    ready(&status(&engine, &mountpoint));

    let mut asked = end(&mountpoint, &happened, options.grace);
    // A session that will not end has open files; they get ENOTCONN when this process goes.
    drop(guard);
    let mut unwritten = engine.shut_down();
    asked.extend(happened.try_iter().filter_map(|event| if let Event::Stop(client) = event { client } else { None }));
    let lost = |one: &Unwritten| Lost { name: one.name.clone(), bytes: one.bytes, error: one.error.to_string() };
    Ended { unwritten: unwritten.iter().map(lost).collect() }.tell(asked);
    match unwritten.pop() {
        None => Ok(()),
        Some(last) => {
            unwritten.iter().for_each(|other| say(&lost(other).to_string()));
            Err(MountError::Unwritten(lost(&last)))
        }
    }
}

/// Waits for the end and unmounts; open files are served for `grace` after they were asked to go. Returns the clients
/// who asked for it.
fn end(mountpoint: &Path, happened: &Receiver<Event>, grace: Duration) -> Vec<UnixStream> {
    let mut asked = Vec::new();
    let broke = |error: io::Error| say(&format!("the connection to the kernel broke: {error}"));
    match happened.recv() {
        Ok(Event::Stop(client)) => asked.extend(client),
        Ok(Event::SessionEnded(error)) => {
            error.into_iter().for_each(broke);
            return asked;
        }
        Err(_) => return asked,
    }
    // What was written to mappings is the kernel's still; who keeps his would keep it from the disk for good.
    if let Ok(root) = rustix::fs::open(mountpoint, OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
    {
        let _ = rustix::fs::syncfs(root);
    }
    if unmount(mountpoint, false).is_err() {
        // In use: out of the name space now, gone for good with the last open file or this process.
        let _ = unmount(mountpoint, true);
    }
    let deadline = Instant::now() + grace;
    loop {
        match happened.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(Event::SessionEnded(error)) => {
                error.into_iter().for_each(broke);
                return asked;
            }
            Err(RecvTimeoutError::Disconnected | RecvTimeoutError::Timeout) => return asked,
            Ok(Event::Stop(client)) => asked.extend(client),
        }
    }
}

fn status(engine: &Engine, mountpoint: &Path) -> Status {
    Status { mountpoint: mountpoint.display().to_string(), ..engine.status() }
}

/// Tells the operator. Whoever listened may be gone, which must not end the mount as a failed `eprintln!` would.
fn say(text: &str) {
    let _ = std::io::Write::write_all(&mut io::stderr(), format!("pagefold: {text}\n").as_bytes());
}

/// A thread that is gone can no longer answer the kernel; the process that goes with it lets the kernel answer.
fn end_the_process_on_panic() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        before(info);
        std::process::abort();
    }));
}

/// What the kernel says of a FUSE mount.
const FUSE: libc::__fsword_t = 0x6573_5546;

/// Locks the directory against a second mount; the lock goes with the process, however it ends.
fn lock_directory(path: &Path) -> Result<File, MountError> {
    let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
    let directory = rustix::fs::open(path, flags, Mode::empty())
        .map_err(|error| MountError::Directory { path: path.to_owned(), source: error.into() })?;
    if pagefold_os::volume::is_pseudo(&directory) {
        return Err(MountError::Pseudo(path.to_owned()));
    }
    match rustix::fs::flock(&directory, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(directory.into()),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(MountError::Busy(path.to_owned())),
        Err(error) => Err(MountError::Directory { path: path.to_owned(), source: error.into() }),
    }
}

fn prepare_mountpoint(directory: &Path, mountpoint: &Path) -> Result<PathBuf, MountError> {
    let refuse = |why: String| MountError::Mountpoint { path: mountpoint.to_owned(), why };
    let absolute = resolve(mountpoint).map_err(|error| refuse(error.to_string()))?;
    clean_stale(&absolute)
        .map_err(|error| refuse(format!("a dead mount lies there and cannot be removed: {error}")))?;
    if is_mounted(&absolute) {
        return Err(refuse("a mount of images lies there; `pagefold disk umount` takes it away".to_owned()));
    }
    let metadata = absolute.metadata().map_err(|error| refuse(format!("{error}; create it first")))?;
    if !metadata.is_dir() {
        return Err(refuse("it is no directory".to_owned()));
    }
    let directory = directory.canonicalize().map_err(|error| refuse(error.to_string()))?;
    if absolute.starts_with(&directory) {
        // The mount would show itself, and looking at it from inside could wait for itself.
        return Err(refuse("it must not lie inside the directory it shows".to_owned()));
    }
    Ok(absolute)
}

/// Links that a mount point's name may lead through.
const LINKS_MAX: usize = 40;

/// The mount point as the mount table and its socket name it: absolute, links resolved. What is mounted there is not looked
/// at: a dead mount would answer nothing but `ENOTCONN`.
///
/// # Errors
/// Its directory cannot be looked at, or the path has no name at its end.
pub fn resolve(mountpoint: &Path) -> io::Result<PathBuf> {
    let no_name = || io::Error::new(io::ErrorKind::InvalidInput, "it has no name of its own");
    let mut path = mountpoint.to_owned();
    for _ in 0..LINKS_MAX {
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let parent = parent.canonicalize()?;
        let absolute = parent.join(path.file_name().ok_or_else(no_name)?);
        match std::fs::read_link(&absolute) {
            Ok(target) => path = parent.join(target),
            Err(_) => return Ok(absolute),
        }
    }
    Err(rustix::io::Errno::LOOP.into())
}

fn start_session(engine: &Arc<Engine>, mountpoint: &Path, options: &Options) -> Result<BackgroundSession, MountError> {
    let mut config = fuser::Config::default();
    config.mount_options = vec![
        MountOption::FSName(SOURCE.to_owned()),
        MountOption::Subtype("pagefold".to_owned()),
        MountOption::DefaultPermissions,
        MountOption::NoDev,
        MountOption::NoSuid,
        if options.read_only { MountOption::RO } else { MountOption::RW },
    ];
    config.acl = if options.allow_other { SessionACL::All } else { SessionACL::RootAndOwner };
    if !options.allow_other && !rustix::process::geteuid().is_root() {
        // For plain users `fusermount3` allows others only where /etc/fuse.conf says so.
        config.acl = SessionACL::Owner;
    }
    config.n_threads = Some(options.threads.max(1));
    config.clone_fd = true;
    let fs = DiskFs::new(engine.clone()).map_err(MountError::Fuse)?;
    Session::new(fs, mountpoint, &config).and_then(Session::spawn).map_err(MountError::Fuse)
}

fn watch_signals(events: Sender<Event>) -> io::Result<()> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    let mut signals = signal_hook::iterator::Signals::new([SIGTERM, SIGINT, SIGHUP])?;
    std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
        for _ in signals.forever() {
            if events.send(Event::Stop(None)).is_err() {
                return;
            }
        }
    })?;
    Ok(())
}

/// Tells when the session ended; the session's own clean-up runs then, too.
fn watch_session(session: BackgroundSession, events: Sender<Event>) -> io::Result<std::thread::JoinHandle<()>> {
    // Where the thread is refused, the session goes with the closure, and the mount with it.
    std::thread::Builder::new().name("session".to_owned()).spawn(move || {
        // The main thread may be past listening.
        let _ = events.send(Event::SessionEnded(session.join().err()));
    })
}

/// Waits for the session's first answer, which comes behind all descriptors that its threads take.
///
/// # Errors
/// What ended the session.
fn first_answer(mountpoint: &Path, happened: &Receiver<Event>) -> io::Result<()> {
    use rustix::io::Errno;
    match rustix::fs::statfs(mountpoint) {
        // The session has ended, and its mount with it.
        Ok(found) if found.f_type != FUSE => {}
        Err(Errno::NOTCONN | Errno::CONNABORTED) => {}
        // An error is an answer, too.
        _ => return Ok(()),
    }
    // Who asks for an end meanwhile gets it.
    let ended = happened.iter().find_map(|event| if let Event::SessionEnded(why) = event { Some(why) } else { None });
    Err(ended.flatten().unwrap_or_else(|| io::Error::other("it was unmounted")))
}

fn answer_control(
    listener: UnixListener,
    engine: Arc<Engine>,
    mountpoint: PathBuf,
    events: Sender<Event>,
) -> io::Result<()> {
    let accept = move || {
        control::accept_all(&listener, |stream| {
            let (engine, mountpoint, events) = (engine.clone(), mountpoint.clone(), events.clone());
            let serve = move || {
                // A client that went away is his own affair.
                let _ = control::serve(stream, |command, client| match command {
                    Command::Status => serde_json::to_string(&status(&engine, &mountpoint)).unwrap_or_default(),
                    Command::Flush => match engine.sync_all() {
                        Ok(()) => r#"{"flushed":true}"#.to_owned(),
                        Err(error) => serde_json::json!({ "error": error.to_string() }).to_string(),
                    },
                    Command::Stop => {
                        let _ = events.send(Event::Stop(client.try_clone().ok()));
                        r#"{"stopping":true}"#.to_owned()
                    }
                });
            };
            // One thread each: a client that dawdles must not keep the others waiting. Where there is none for it, its
            // connection is closed.
            let _ = std::thread::Builder::new().name("control-client".to_owned()).spawn(serve);
        })
    };
    std::thread::Builder::new().name("control".to_owned()).spawn(accept)?;
    Ok(())
}

/// Removes a file, if it is there still.
#[derive(Debug)]
pub struct RemoveOnDrop(pub PathBuf);

impl Drop for RemoveOnDrop {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Whether a mount of ours lies at `mountpoint`, by the mount table: this never touches the mount itself.
pub fn is_mounted(mountpoint: &Path) -> bool {
    mounted().iter().any(|at| at == mountpoint)
}

/// Where mounts of ours lie, of all users, dead ones included, by the mount table.
pub fn mounted() -> Vec<PathBuf> {
    let table = std::fs::read("/proc/self/mountinfo").unwrap_or_default();
    mountinfo::parse(&table)
        .filter(|mount| mount.kind.starts_with("fuse") && mount.source == Path::new(SOURCE))
        .map(|mount| mount.at)
        .collect()
}

/// Removes a mount of ours whose process is gone; returns whether there was one.
///
/// # Errors
/// It cannot be unmounted.
pub fn clean_stale(mountpoint: &Path) -> io::Result<bool> {
    if !is_mounted(mountpoint) {
        return Ok(false);
    }
    // A process that lives may not answer, so its socket is asked before the mount is. Attributes would not do: the
    // kernel believes them for a while, dead or not.
    let alive = UnixStream::connect(control::socket_path(mountpoint)).is_ok();
    if alive || rustix::fs::statvfs(mountpoint).err() != Some(rustix::io::Errno::NOTCONN) {
        return Ok(false);
    }
    unmount(mountpoint, true)?;
    Ok(true)
}

/// Unmounts; with `lazy`, also while files are open.
///
/// # Errors
/// `EBUSY` while files are open; the kernel's or `fusermount3`'s.
pub fn unmount(mountpoint: &Path, lazy: bool) -> io::Result<()> {
    let flags = if lazy { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    match rustix::mount::unmount(mountpoint, flags) {
        Err(rustix::io::Errno::PERM) => {
            // A plain user's way goes through the set-uid helper.
            let mut helper = std::process::Command::new("fusermount3");
            helper.arg(if lazy { "-uz" } else { "-u" }).arg("--").arg(mountpoint);
            let output = helper.output()?;
            if output.status.success() {
                Ok(())
            } else {
                Err(io::Error::other(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
            }
        }
        other => Ok(other?),
    }
}

/// Cuts the kernel's connection of the mount at `mountpoint`, for a process that lives and does not answer: every
/// waiting call returns with an error at once.
///
/// # Errors
/// Not mounted, or not ours to cut.
pub fn abort(mountpoint: &Path) -> io::Result<()> {
    // A forced unmount cuts the connection first, and may then find the mount busy all the same.
    match rustix::mount::unmount(mountpoint, UnmountFlags::FORCE) {
        Ok(()) | Err(rustix::io::Errno::BUSY) => return Ok(()),
        Err(rustix::io::Errno::PERM) => {}
        Err(error) => return Err(error.into()),
    }
    // A plain user's way is the control file system, where his own connections are his.
    let table = std::fs::read("/proc/self/mountinfo")?;
    let mount = mountinfo::parse(&table).find(|mount| mount.at == mountpoint).ok_or(io::ErrorKind::NotFound)?;
    // The connection's name is the minor number of the mount's device.
    let minor = mount.device.split(':').nth(1).unwrap_or_default();
    std::fs::write(format!("/sys/fs/fuse/connections/{minor}/abort"), "1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_point_is_known_by_all_of_its_names() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().canonicalize().unwrap();
        let link = |to: &str, at: &str| std::os::unix::fs::symlink(to, base.join(at)).unwrap();
        std::fs::create_dir(base.join("real")).unwrap();
        link("real", "one");
        link(base.join("one").to_str().unwrap(), "two");
        for name in ["real", "real/", "one", "two", "./two"] {
            assert_eq!(resolve(&base.join(name)).unwrap(), base.join("real"), "{name}");
        }
        // What is to be made there is somebody else's affair.
        assert_eq!(resolve(&base.join("missing")).unwrap(), base.join("missing"));
        link("round", "round");
        assert_eq!(resolve(&base.join("round")).unwrap_err().raw_os_error(), Some(libc::ELOOP));
        assert!(resolve(Path::new("/")).is_err() && resolve(&base.join("missing/x")).is_err());
    }

    #[test]
    fn a_mount_point_inside_the_directory_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("inside")).unwrap();
        let error = prepare_mountpoint(dir.path(), &dir.path().join("inside")).unwrap_err();
        assert!(error.to_string().contains("must not lie inside"), "{error}");
        let missing = prepare_mountpoint(&dir.path().join("inside"), &dir.path().join("missing")).unwrap_err();
        assert!(missing.to_string().contains("create it first"), "{missing}");
    }

    #[test]
    fn what_the_kernel_makes_up_is_no_image() {
        let error = lock_directory(Path::new("/proc/self")).unwrap_err();
        assert!(matches!(error, MountError::Pseudo(_)), "{error}");
    }

    #[test]
    fn a_directory_is_locked_once() {
        let dir = tempfile::tempdir().unwrap();
        let first = lock_directory(dir.path()).unwrap();
        assert!(matches!(lock_directory(dir.path()), Err(MountError::Busy(_))));
        drop(first);
        lock_directory(dir.path()).unwrap();
    }
}
