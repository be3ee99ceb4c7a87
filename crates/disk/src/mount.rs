//! The life of a mount: lock the directory, mount, serve, unmount cleanly, and clean up after one that died.
//!
//! A FUSE mount of a dead process does not hang: the kernel closes the connection with the process's last
//! descriptor, and every call gets `ENOTCONN`. Only a process that lives and does not answer could make callers hang.
//! Therefore a panic in any thread aborts the process, and no thread waits without a limit for another process.

use crate::config::Config;
use crate::control::{self, Command, StopReport};
use crate::engine::Engine;
use crate::error::LostData;
use crate::fuse::{DiskFs, Session, StartError, Transport};
use crate::nbd;
use crate::stats::Status;
use fuser::{MountOption, SessionACL};
use pagefold_os::{heap, mountinfo};
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
    /// Where to mount them.
    pub mountpoint: PathBuf,
    /// The cache.
    pub config: Config,
    /// Threads that answer the kernel.
    pub threads: usize,
    /// How requests of the kernel arrive.
    pub transport: Transport,
    /// The directory of fingerprint files; `None` for none.
    pub fingerprints: Option<PathBuf>,
    /// Refuse every change.
    pub read_only: bool,
    /// Let other users access the mount, within the files' own permissions.
    pub allow_other: bool,
    /// Serve the images over NBD on this Unix socket too.
    pub nbd: Option<PathBuf>,
    /// How long open files are served after a request to stop.
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
    /// The directory belongs to a pseudo file system.
    #[error("{} holds files that the kernel generates, not images", .0.display())]
    Pseudo(PathBuf),
    /// Another mount serves the directory. Two caches over the same files would overwrite each other's writes.
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
    /// Rings are demanded, and there are none.
    #[error("--transport ring: {0}")]
    Ring(String),
    /// The cache or its threads cannot be started.
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
    /// The session ended before it served a request.
    #[error(
        "cannot serve the mount: {source}; each of its {threads} threads takes a descriptor, see ulimit -n and --workers"
    )]
    Session {
        /// Threads that should have answered the kernel.
        threads: usize,
        /// Why.
        source: io::Error,
    },
    /// The disk refused data at the end.
    #[error("{0}")]
    Unwritten(LostData),
}

/// The source in the mount table by which our mounts are recognised.
const SOURCE: &str = "pagefold-disk";

/// An event that the main thread waits for.
enum Event {
    /// A request to stop. A client of the control socket gets the report over its connection.
    Stop(Option<UnixStream>),
    /// The FUSE session ended, with its error.
    SessionEnded(Option<io::Error>),
}

/// Mounts, calls `ready`, serves until a request to stop or an unmount, and writes everything back.
///
/// # Errors
/// [`MountError`]; nothing stays mounted.
pub fn serve(options: &Options, ready: impl FnOnce(&Status)) -> Result<(), MountError> {
    end_the_process_on_panic();
    heap::map_large_allocations();
    // An open image takes two descriptors, a connection one. The old limit serves fewer of them.
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

    let (sender, events) = channel();
    // Before the mount, because a process that sees the mount may send a signal immediately.
    watch_signals(sender.clone()).map_err(MountError::Engine)?;
    // The kernel has applied the umask of the process that creates a file; this process must not apply its own as well.
    rustix::process::umask(Mode::empty());
    let session = start_session(&engine, &mountpoint, options)?;
    let transport = session.transport();
    let guard = watch_session(session, sender.clone()).map_err(MountError::Engine)?;
    if let Err(error) = answer_control(listener, engine.clone(), mountpoint.clone(), transport, sender) {
        let _ = unmount(&mountpoint, true);
        return Err(MountError::Engine(error));
    }
    if let Err(source) = wait_until_served(&mountpoint, &events) {
        let _ = unmount(&mountpoint, true);
        return Err(MountError::Session { threads: options.threads.max(1), source });
    }
    ready(&status(&engine, &mountpoint, transport));

    let mut stop_clients = wait_for_end(&mountpoint, &events, options.grace);
    // A session that has not ended has open files; calls on them get ENOTCONN when this process exits.
    drop(guard);
    let mut unwritten = engine.shut_down();
    let late = events.try_iter().filter_map(|event| if let Event::Stop(client) = event { client } else { None });
    stop_clients.extend(late);
    StopReport { unwritten: unwritten.clone() }.send(stop_clients);
    match unwritten.pop() {
        None => Ok(()),
        Some(last) => {
            unwritten.iter().for_each(|other| print_error(&other.to_string()));
            Err(MountError::Unwritten(last))
        }
    }
}

/// Waits for a request to stop, or for the end of the session, and unmounts. Open files are served for `grace` after the
/// request. Returns the clients that asked for it.
fn wait_for_end(mountpoint: &Path, events: &Receiver<Event>, grace: Duration) -> Vec<UnixStream> {
    let mut stop_clients = Vec::new();
    let print_cause = |error: io::Error| print_error(&format!("the connection to the kernel broke: {error}"));
    match events.recv() {
        Ok(Event::Stop(client)) => stop_clients.extend(client),
        Ok(Event::SessionEnded(error)) => {
            error.into_iter().for_each(print_cause);
            return stop_clients;
        }
        Err(_) => return stop_clients,
    }
    // Data written through shared mappings is still in the kernel. Without this sync, a program that keeps its mapping
    // would keep that data from the disk until this process exits, and then it would be lost.
    if let Ok(root) = rustix::fs::open(mountpoint, OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
    {
        let _ = rustix::fs::syncfs(root);
    }
    if unmount(mountpoint, false).is_err() {
        // In use: removed from the name space now, and completely with the last open file or with this process.
        let _ = unmount(mountpoint, true);
    }
    let deadline = Instant::now() + grace;
    loop {
        match events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(Event::SessionEnded(error)) => {
                error.into_iter().for_each(print_cause);
                return stop_clients;
            }
            Err(RecvTimeoutError::Disconnected | RecvTimeoutError::Timeout) => return stop_clients,
            Ok(Event::Stop(client)) => stop_clients.extend(client),
        }
    }
}

fn status(engine: &Engine, mountpoint: &Path, transport: Transport) -> Status {
    let (mountpoint, transport) = (mountpoint.display().to_string(), transport.name().to_owned());
    Status { mountpoint, transport, ..engine.status() }
}

/// Prints an error for the operator. A closed standard error must not end the mount, as it would with `eprintln!`.
fn print_error(text: &str) {
    let _ = std::io::Write::write_all(&mut io::stderr(), format!("pagefold: {text}\n").as_bytes());
}

/// After a panic a thread no longer answers the kernel. If the process ends, the kernel answers instead.
fn end_the_process_on_panic() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        before(info);
        std::process::abort();
    }));
}

/// The file system type that the kernel reports for a FUSE mount.
const FUSE: libc::__fsword_t = 0x6573_5546;

/// Locks the directory against a second mount. The lock ends with the process, however that ends.
fn lock_directory(path: &Path) -> Result<File, MountError> {
    let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
    let directory = rustix::fs::open(path, flags, Mode::empty())
        .map_err(|error| MountError::Directory { path: path.to_owned(), source: error.into() })?;
    if pagefold_os::filesystem::is_pseudo(&directory) {
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
    clean_stale(&absolute).map_err(|error| refuse(format!("a dead mount is there and cannot be removed: {error}")))?;
    if is_mounted(&absolute) {
        return Err(refuse("images are mounted there already; `pagefold disk umount` unmounts them".to_owned()));
    }
    let metadata = absolute.metadata().map_err(|error| refuse(format!("{error}; create it first")))?;
    if !metadata.is_dir() {
        return Err(refuse("it is not a directory".to_owned()));
    }
    let directory = directory.canonicalize().map_err(|error| refuse(error.to_string()))?;
    if absolute.starts_with(&directory) {
        // The mount would show itself, and a look into it could wait for itself.
        return Err(refuse("it must not lie inside the directory it shows".to_owned()));
    }
    Ok(absolute)
}

/// Most links that a mount point's name may lead through.
const LINKS_MAX: usize = 40;

/// The mount point as the mount table and its socket name it: absolute, links resolved. Never touches the mount itself: a
/// dead one would answer with `ENOTCONN`.
///
/// # Errors
/// Its directory cannot be read, or the path does not end in a name.
pub fn resolve(mountpoint: &Path) -> io::Result<PathBuf> {
    let no_name = || io::Error::new(io::ErrorKind::InvalidInput, "the path does not end in a name");
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

fn start_session(engine: &Arc<Engine>, mountpoint: &Path, options: &Options) -> Result<Session, MountError> {
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
        // `fusermount3` allows it to unprivileged users only if /etc/fuse.conf says so.
        config.acl = SessionACL::Owner;
    }
    config.n_threads = Some(options.threads.max(1));
    config.clone_fd = true;
    let fs = DiskFs::new(engine.clone()).map_err(MountError::Fuse)?;
    Session::start(fs, mountpoint, &config, options.transport, print_error).map_err(|error| match error {
        StartError::Ring(why) => MountError::Ring(why),
        StartError::Mount(error) => MountError::Fuse(error),
    })
}

fn watch_signals(sender: Sender<Event>) -> io::Result<()> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    let mut signals = signal_hook::iterator::Signals::new([SIGTERM, SIGINT, SIGHUP])?;
    std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
        for _ in signals.forever() {
            if sender.send(Event::Stop(None)).is_err() {
                return;
            }
        }
    })?;
    Ok(())
}

/// Sends an event when the session has ended and cleaned up.
fn watch_session(session: Session, sender: Sender<Event>) -> io::Result<std::thread::JoinHandle<()>> {
    // If the thread cannot be started, the closure is dropped, and the session and the mount with it.
    std::thread::Builder::new().name("session".to_owned()).spawn(move || {
        // The main thread may have stopped receiving.
        let _ = sender.send(Event::SessionEnded(session.join().err()));
    })
}

/// Waits for the session's first answer. The session opens the descriptors of all its threads before it.
///
/// # Errors
/// The session's error, if it has ended.
fn wait_until_served(mountpoint: &Path, events: &Receiver<Event>) -> io::Result<()> {
    match rustix::fs::statfs(mountpoint) {
        // The session has ended, and its mount with it.
        Ok(found) if found.f_type != FUSE => {}
        Err(error) if is_closed(error) => {}
        // Any other error is an answer of the session.
        _ => return Ok(()),
    }
    // A request to stop is dropped here: the mount ends anyway.
    let ended = events.iter().find_map(|event| if let Event::SessionEnded(why) = event { Some(why) } else { None });
    Err(ended.flatten().unwrap_or_else(|| io::Error::other("it was unmounted")))
}

fn answer_control(
    listener: UnixListener,
    engine: Arc<Engine>,
    mountpoint: PathBuf,
    transport: Transport,
    sender: Sender<Event>,
) -> io::Result<()> {
    let accept = move || {
        control::accept_all(&listener, |stream| {
            let (engine, mountpoint, sender) = (engine.clone(), mountpoint.clone(), sender.clone());
            let serve = move || {
                // An error of the connection concerns that client only.
                let _ = control::serve(stream, |command, client| match command {
                    Command::Status => {
                        serde_json::to_string(&status(&engine, &mountpoint, transport)).unwrap_or_default()
                    }
                    Command::Flush => match engine.sync_all() {
                        Ok(()) => r#"{"flushed":true}"#.to_owned(),
                        Err(error) => serde_json::json!({ "error": error.to_string() }).to_string(),
                    },
                    Command::Stop => {
                        let _ = sender.send(Event::Stop(client.try_clone().ok()));
                        r#"{"stopping":true}"#.to_owned()
                    }
                });
            };
            // A thread for each client, so that a slow one does not delay others. If it cannot be started, the connection
            // is closed.
            let _ = std::thread::Builder::new().name("control-client".to_owned()).spawn(serve);
        })
    };
    std::thread::Builder::new().name("control".to_owned()).spawn(accept)?;
    Ok(())
}

/// Removes a file when dropped, if the file still exists.
#[derive(Debug)]
pub struct RemoveOnDrop(pub PathBuf);

impl Drop for RemoveOnDrop {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Returns true if the mount table has a mount of ours at `mountpoint`. Never touches the mount itself.
pub fn is_mounted(mountpoint: &Path) -> bool {
    mounted().iter().any(|at| at == mountpoint)
}

/// The mount points of our mounts, of all users and dead ones included, by the mount table.
pub fn mounted() -> Vec<PathBuf> {
    let table = std::fs::read("/proc/self/mountinfo").unwrap_or_default();
    mountinfo::parse(&table)
        .filter(|mount| mount.kind.starts_with("fuse") && mount.source == Path::new(SOURCE))
        .map(|mount| mount.at)
        .collect()
}

/// Returns true if a call failed because the kernel has closed the connection, or closed it during the call.
fn is_closed(error: rustix::io::Errno) -> bool {
    use rustix::io::Errno;
    matches!(error, Errno::NOTCONN | Errno::CONNABORTED | Errno::CANCELED)
}

/// Removes a mount of ours with a dead process; returns whether there was one.
///
/// # Errors
/// It cannot be unmounted.
pub fn clean_stale(mountpoint: &Path) -> io::Result<bool> {
    if !is_mounted(mountpoint) {
        return Ok(false);
    }
    // A live process may not answer, so its socket is tried before the mount. Attributes are no test: the kernel caches
    // them even if the process is dead.
    let alive = UnixStream::connect(control::socket_path(mountpoint)).is_ok();
    if alive || !rustix::fs::statvfs(mountpoint).is_err_and(is_closed) {
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
            // An unprivileged user unmounts through the set-uid helper.
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

/// Cuts off a process that lives and does not answer: kills the listener of `socket`, and aborts the kernel's connection of
/// the mount at `mountpoint`. Every waiting call returns with an error.
///
/// The kernel cannot take back a request that it has handed to a ring's thread while that is stopped. The death of the
/// process does.
///
/// # Errors
/// Not mounted, or the caller may not abort it.
pub fn cut_off(mountpoint: &Path, socket: &Path) -> io::Result<()> {
    if let Some(server) = control::server(socket) {
        let _ = rustix::process::kill_process(server, rustix::process::Signal::KILL);
    }
    abort(mountpoint)
}

/// Aborts the kernel's connection of the mount at `mountpoint`, for a process that lives and does not answer: every
/// waiting call returns with an error.
///
/// # Errors
/// Not mounted, or the caller may not abort it.
pub fn abort(mountpoint: &Path) -> io::Result<()> {
    // A forced unmount aborts the connection first; the mount may be busy nevertheless.
    match rustix::mount::unmount(mountpoint, UnmountFlags::FORCE) {
        Ok(()) | Err(rustix::io::Errno::BUSY) => return Ok(()),
        Err(rustix::io::Errno::PERM) => {}
        Err(error) => return Err(error.into()),
    }
    // An unprivileged user aborts through the control file system, where the user owns the files of its connections.
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
    fn all_names_of_a_mount_point_resolve_to_the_same_path() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().canonicalize().unwrap();
        let link = |to: &str, at: &str| std::os::unix::fs::symlink(to, base.join(at)).unwrap();
        std::fs::create_dir(base.join("real")).unwrap();
        link("real", "one");
        link(base.join("one").to_str().unwrap(), "two");
        for name in ["real", "real/", "one", "two", "./two"] {
            assert_eq!(resolve(&base.join(name)).unwrap(), base.join("real"), "{name}");
        }
        // The mount point itself need not exist.
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
    fn a_pseudo_file_system_is_refused() {
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
