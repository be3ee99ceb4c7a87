//! The listener: makes the daemon's socket, accepts connections until the daemon stops, and cleans up.

use crate::cold::handover::{adopt, keeper, shutdown};
use crate::service::daemon::Daemon;
use crate::service::{admission, attach, control, http, idle, metrics, sampler, started_programs, web};
use pagefold_os::fd::{self, Fd};
use pagefold_os::sock;
use pagefold_os::sync::lock;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

/// Shortest and longest pause between two looks whether the daemon has been idle for too long.
const IDLE_LOOKS: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(1)];
/// Pause after a connection that could not be accepted.
const ACCEPT_PAUSE_MS: i32 = 50;
/// Most connections that are answered at a time.
const CONNECTIONS_MAX: u64 = 4096;

/// Metrics or the page, by name, and where that is served.
type ServedName = (&'static str, http::Served);

/// Listens and serves until the daemon is asked to stop.
///
/// # Errors
/// If the socket cannot be made, or another daemon listens there (`AddrInUse`).
pub fn run(daemon: &Arc<Daemon>) -> io::Result<()> {
    let socket = &daemon.config.socket;
    let (listener, locked) = listen(socket)?;
    *lock(&daemon.socket_lock) = Some(locked);
    let (monitor, served) = start(daemon).inspect_err(|_| {
        daemon.stop();
        let _ = std::fs::remove_file(socket);
        remove_lock(socket, !daemon.cold.is_in_use());
    })?;
    pagefold_tier::fd_store::notify_ready();
    say_where(socket, &served);
    let result = accept_until_stopped(daemon, &listener);
    daemon.stop();
    drop(served);
    let nothing_out = shutdown::stop(&daemon.cold);
    let _ = std::fs::remove_file(socket);
    daemon.live.wake_workers();
    let _ = monitor.join();
    remove_lock(socket, nothing_out);
    result
}

/// Says on standard error where the daemon can be reached, in one write: other daemons may use the same terminal or journal.
fn say_where(socket: &Path, served: &[ServedName]) {
    let mut text = format!("pagefold: daemon {} listens at {}\n", std::process::id(), socket.display());
    for (what, served) in served {
        text += &format!("pagefold: {what} at {}\n", served.at);
    }
    let _ = io::stderr().write_all(text.as_bytes());
}

fn accept_until_stopped(daemon: &Arc<Daemon>, listener: &Fd) -> io::Result<()> {
    // A daemon that stays without clients need not look for them.
    let pause_ms =
        daemon.config.idle_exit.map_or(-1, |limit| (limit / 4).clamp(IDLE_LOOKS[0], IDLE_LOOKS[1]).as_millis() as i32);
    while !daemon.is_stopping() {
        let mut polls =
            [listener.raw(), daemon.stopped.fd().raw()].map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
        if fd::poll(&mut polls, pause_ms).map_err(io::Error::from)? == 0 {
            if is_idle_for_too_long(daemon) {
                break;
            }
            continue;
        }
        if polls[0].revents == 0 {
            continue;
        }
        let Ok(socket) = sock::accept(listener) else {
            // No descriptor is free, for instance: a busy loop would not free one.
            let _ = fd::poll(&mut polls[1..], ACCEPT_PAUSE_MS);
            continue;
        };
        if daemon.connections.load(Ordering::Relaxed) >= CONNECTIONS_MAX {
            continue;
        }
        daemon.connections.fetch_add(1, Ordering::Relaxed);
        // A process that asks whether there is a daemon is about to start a client of it.
        *lock(&daemon.last_busy) = Instant::now();
        let answering = daemon.clone();
        let spawned = thread::Builder::new().name("greet".into()).stack_size(256 << 10).spawn(move || {
            answer(&answering, socket);
            answering.connections.fetch_sub(1, Ordering::Relaxed);
        });
        if spawned.is_err() {
            daemon.connections.fetch_sub(1, Ordering::Relaxed);
        }
    }
    Ok(())
}

/// Answers the first packet of a new connection: a control request, or an agent's greeting.
fn answer(daemon: &Daemon, socket: Fd) {
    let Some(first) = admission::first_packet(&socket) else { return };
    if first.bytes.first() == Some(&b'{') {
        control::answer(daemon, &socket, &first.bytes);
    } else {
        admission::admit(daemon, socket, first);
    }
}

/// Does everything that may fail between listening and accepting. Returns the monitor's thread, and what is served beside
/// the socket.
fn start(daemon: &Arc<Daemon>) -> io::Result<(thread::JoinHandle<()>, Vec<ServedName>)> {
    // Clients of a dead daemon wait for their pages; no new client is accepted before they are served again.
    adopt::adopt(&daemon.cold).map_err(|error| with_subject("the keeper", &error))?;
    let live = daemon.live.clone();
    let monitor = thread::Builder::new().name("monitor".into()).spawn(move || live.monitor())?;
    if daemon.config.cold.keeper.is_some() {
        let keeping = daemon.clone();
        let watches = move || keeper::replace_ended(&keeping.cold, keeping.stopped.fd());
        thread::Builder::new().name("keeper-watch".into()).spawn(watches)?;
    }
    if !daemon.config.attach.is_empty() {
        let attaching = daemon.clone();
        thread::Builder::new().name("attach".into()).spawn(move || attach::follow_rules(&attaching))?;
    }
    if let Some(policy) = daemon.config.cold.park {
        let watching = daemon.clone();
        thread::Builder::new().name("idle".into()).spawn(move || idle::follow_policy(&watching, policy))?;
    }
    let entering = daemon.clone();
    thread::Builder::new().name("started".into()).spawn(move || started_programs::follow(&entering))?;
    let sampled = daemon.clone();
    thread::Builder::new().name("sample".into()).spawn(move || sampler::follow(&sampled))?;
    let mut served = Vec::new();
    if let Some(at) = &daemon.config.metrics {
        let metrics = metrics::serve(daemon.clone(), at).map_err(|error| with_subject("--metrics", &error));
        served.extend(unless_optional(daemon, metrics)?.map(|metrics| ("metrics", metrics)));
    }
    if let Some(at) = &daemon.config.web {
        let page = web::serve(daemon.clone(), at).map_err(|error| with_subject("--web", &error));
        served.extend(unless_optional(daemon, page)?.map(|page| ("page", page)));
    }
    Ok((monitor, served))
}

/// Another daemon of this machine may have the address, which the configuration file names for all daemons. A daemon that
/// was started on behalf of a program goes on without it. So does a daemon that adopted clients: they wait for their pages.
fn unless_optional(daemon: &Daemon, served: io::Result<http::Served>) -> io::Result<Option<http::Served>> {
    match served {
        Ok(served) => Ok(Some(served)),
        Err(error) if daemon.config.on_demand || daemon.cold.is_in_use() => {
            eprintln!("pagefold: {error}; goes on without");
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

fn is_idle_for_too_long(daemon: &Daemon) -> bool {
    let Some(limit) = daemon.config.idle_exit else { return false };
    let mut last = lock(&daemon.last_busy);
    if !daemon.live.is_empty() || daemon.cold.is_in_use() || daemon.connections.load(Ordering::Relaxed) > 0 {
        *last = Instant::now();
    }
    last.elapsed() > limit
}

/// The file that stays locked for as long as a daemon has the socket at `socket`.
fn lock_path(socket: &Path) -> PathBuf {
    let mut path = socket.as_os_str().to_owned();
    path.push(".lock");
    path.into()
}

/// Removes the lock's file, unless pages are out: the daemon that adopts them waits by it until this one has ended.
fn remove_lock(socket: &Path, nothing_out: bool) {
    if nothing_out {
        let _ = std::fs::remove_file(lock_path(socket));
    }
}

/// Listens at `path`. The returned file is locked until it is dropped.
fn listen(path: &Path) -> io::Result<(Fd, File)> {
    let bytes = path.as_os_str().as_bytes();
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).map_err(|error| with_subject(&parent.display().to_string(), &error))?;
    }
    // Without the lock two daemons that start at the same time could each believe to be the first.
    let locked = take_lock(&lock_path(path))?;
    // A daemon that is stopped by a signal accepts no connections.
    let connected = sock::connect_within(bytes, control::PATIENCE.as_millis() as u64);
    let Some(locked) = locked.filter(|_| connected.is_err()) else {
        return Err(io::Error::new(
            io::ErrorKind::AddrInUse,
            format!("a daemon listens at {} already", path.display()),
        ));
    };
    match std::fs::symlink_metadata(path) {
        // No process answers there: a daemon that was killed left the socket.
        Ok(found) if found.file_type().is_socket() && connected.is_err_and(|errno| errno.0 == libc::ECONNREFUSED) => {
            std::fs::remove_file(path)?;
        }
        Ok(_) => {
            remove_lock(path, true);
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                format!("{} exists and is not a daemon's socket: name another, or remove it", path.display()),
            ));
        }
        Err(_) => {}
    }
    Ok((sock::listen(bytes)?, locked))
}

/// Makes the file at `path` if there is none, and locks it; `None` if another process has the lock.
fn take_lock(path: &Path) -> io::Result<Option<File>> {
    let is_named = |file: &File| -> io::Result<bool> {
        let ours = file.metadata()?;
        Ok(std::fs::metadata(path).is_ok_and(|named| (named.dev(), named.ino()) == (ours.dev(), ours.ino())))
    };
    loop {
        let file = File::options().create(true).truncate(false).write(true).open(path);
        let file = file.map_err(|error| with_subject(&path.display().to_string(), &error))?;
        if file.try_lock().is_err() {
            return Ok(None);
        }
        // The daemon that had it before removed the file as it ended: the next one would not look at this file.
        if is_named(&file)? {
            return Ok(Some(file));
        }
    }
}

/// `error`, preceded by the option or file that it concerns.
fn with_subject(subject: &str, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{subject}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use std::sync::atomic::AtomicU64;

    /// Though each removes the file as it ends.
    #[test]
    fn the_lock_has_one_holder_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.lock");
        let (holders, taken) = (AtomicU64::new(0), AtomicU64::new(0));
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    while taken.load(Ordering::Relaxed) < 2000 {
                        let Some(_held) = take_lock(&path).unwrap() else { continue };
                        assert_eq!(holders.fetch_add(1, Ordering::SeqCst), 0, "two have it");
                        taken.fetch_add(1, Ordering::Relaxed);
                        holders.fetch_sub(1, Ordering::SeqCst);
                        std::fs::remove_file(&path).unwrap();
                    }
                });
            }
        });
    }

    /// Where a file that is not a socket has its path, and where an address that was asked for is taken.
    #[test]
    fn a_daemon_that_does_not_start_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("f");
        std::fs::write(&file, "").unwrap();
        let at = |name: &str, metrics: Option<String>| {
            let config = Config { socket: dir.path().join(name), metrics, ..Config::default() };
            run(&Daemon::new(config)).unwrap_err().kind()
        };
        assert_eq!(at("f", None), io::ErrorKind::AlreadyExists);
        assert_eq!(at("s", Some(format!("unix:{}", file.display()))), io::ErrorKind::AlreadyExists);
        let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["f"]);
    }

    /// The daemon does not exit between a request for its status and the greeting of the program that asked.
    #[test]
    fn a_request_counts_as_use() {
        let dir = tempfile::tempdir().unwrap();
        let daemon = Daemon::new(Config { socket: dir.path().join("s"), ..Config::default() });
        let long_ago = Instant::now() - Duration::from_secs(1);
        *lock(&daemon.last_busy) = long_ago;
        let runs = {
            let daemon = daemon.clone();
            thread::spawn(move || run(&daemon))
        };
        let asked = (0..6000).any(|_| {
            thread::sleep(Duration::from_millis(10));
            control::ask(&daemon.config.socket, &control::Request::Status {}).is_ok()
        });
        assert!(asked, "it does not listen");
        assert!(*lock(&daemon.last_busy) > long_ago);
        daemon.stop();
        runs.join().unwrap().unwrap();
        // An orderly end leaves nothing.
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
