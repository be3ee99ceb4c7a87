//! The daemon: begins, listens, sees who is gone, ends.

use crate::clients::connection::Peer;
use crate::clients::domains::ring;
use crate::clients::merge_client::Shared;
use crate::service::{control, http, verify};
use crate::status::{NotCovered, Totals};
use pagefold_merge::{ClientId, Domain};
use pagefold_os::fd::{self, Fd};
use pagefold_os::sync::lock;
use pagefold_os::wait::Bell;
use pagefold_os::{sock, uffd};
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crate::clients::domains::Group;

/// How a daemon works.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where it listens.
    pub socket: PathBuf,
    /// Worker threads per domain.
    pub workers: usize,
    /// One pass of the watch stage.
    pub period: Duration,
    /// Largest size of each domain's pool, in bytes.
    pub pool_max_bytes: u64,
    /// Mappings that merging may add to one client.
    pub vma_budget: u64,
    /// Run workers only when nobody else wants the processor.
    pub idle_priority: bool,
    /// Exit when there was neither client nor request for this long.
    pub idle_exit: Option<Duration>,
    /// Started for a program, by nobody who waits for more.
    pub on_demand: bool,
    /// Serve metrics here: `HOST:PORT` on loopback, or `unix:PATH`.
    pub metrics: Option<String>,
    /// Serve the page here, in the same way.
    pub web: Option<String>,
    /// Predict slots from neighbours.
    pub predict: bool,
    /// How the cold tier works.
    pub cold: crate::cold::Config,
}

/// One worker at ordinary priority and a period of 2 s, in a pool of 1 GiB; everything else off but the predictions. The
/// socket has no default.
impl Default for Config {
    fn default() -> Config {
        Config {
            socket: PathBuf::new(),
            workers: 1,
            period: Duration::from_secs(2),
            pool_max_bytes: 1 << 30,
            vma_budget: 1 << 14,
            idle_priority: false,
            idle_exit: None,
            on_demand: false,
            metrics: None,
            web: None,
            predict: true,
            cold: crate::cold::Config::default(),
        }
    }
}

/// Shortest and longest pause between looks whether clients are left, where it matters.
const IDLE_LOOKS: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(1)];
/// Pause after a connection that could not be taken.
const ACCEPT_PAUSE_MS: i32 = 50;
/// Most connections at once.
const CONNECTIONS_MAX: u64 = 4096;

/// Users and the names they gave.
pub(crate) type DomainKey = (u32, String);

pub(crate) struct Connected {
    pub(crate) key: DomainKey,
    pub(crate) id: ClientId,
    pub(crate) shared: Arc<Shared>,
    pub(crate) socket: Arc<Peer>,
}

/// The daemon's state.
pub struct Daemon {
    pub(crate) config: Config,
    pub(crate) groups: Mutex<BTreeMap<DomainKey, Group>>,
    pub(crate) connected: Mutex<Vec<Connected>>,
    pub(crate) not_covered: Mutex<VecDeque<NotCovered>>,
    pub(crate) device: Option<Fd>,
    pub(crate) started: Instant,
    pub(crate) stopping: AtomicBool,
    /// Rings for who listens when we stop, and for the monitor when we stop or somebody connects.
    pub(crate) bells: [Bell; 2],
    pub(crate) connections: AtomicU64,
    /// Processor time of agents whose clients are gone.
    pub(crate) past_cpu_ns: AtomicU64,
    /// What domains that are gone have counted.
    pub(crate) past: Mutex<Totals>,
    pub(crate) last_busy: Mutex<Instant>,
    /// Processors on which workers take steps now.
    pub(crate) seats: Mutex<Vec<u64>>,
    pub(crate) more_metrics: std::sync::OnceLock<MoreMetrics>,
    pub(crate) more_status: std::sync::OnceLock<MoreStatus>,
    pub(crate) cold: crate::cold::Cold,
    /// How far `verify` is: pages, and of how many.
    pub(crate) verified: [AtomicU64; 2],
    /// Held for as long as we are the daemon of our socket.
    pub(crate) lock: Mutex<Option<std::fs::File>>,
    /// Names of the sockets for metrics and the page.
    pub(crate) served: Mutex<Vec<http::Name>>,
}

/// Appends the metrics of other parts, as OpenMetrics families.
pub type MoreMetrics = fn(&mut String);
/// Adds what other parts tell to the page's status.
pub type MoreStatus = fn(&mut serde_json::Map<String, serde_json::Value>);

impl Daemon {
    /// Makes a daemon with no domain yet.
    pub fn new(config: Config) -> Arc<Daemon> {
        let cold = crate::cold::Cold::new(config.cold.clone(), &config.socket);
        Arc::new(Daemon {
            cold,
            verified: Default::default(),
            lock: Mutex::default(),
            served: Mutex::default(),
            config,
            groups: Mutex::default(),
            connected: Mutex::default(),
            seats: Mutex::default(),
            not_covered: Mutex::default(),
            device: uffd::open_device().ok(),
            started: Instant::now(),
            stopping: AtomicBool::new(false),
            bells: [(); 2].map(|()| Bell::new().expect("the first descriptors are there")),
            connections: AtomicU64::new(0),
            past_cpu_ns: AtomicU64::new(0),
            past: Mutex::default(),
            last_busy: Mutex::new(Instant::now()),
            more_metrics: std::sync::OnceLock::new(),
            more_status: std::sync::OnceLock::new(),
        })
    }

    /// Lets `more` append the metrics of parts that the daemon does not know. The first call counts.
    pub fn add_metrics(&self, more: MoreMetrics) {
        let _ = self.more_metrics.set(more);
    }

    /// Lets `more` add to the page's status what the daemon does not know. The first call counts.
    pub fn add_status(&self, more: MoreStatus) {
        let _ = self.more_status.set(more);
    }

    /// Listens and serves until asked to stop.
    ///
    /// # Errors
    /// If the socket cannot be made, or another daemon listens there (`AddrInUse`).
    pub fn run(self: &Arc<Daemon>) -> io::Result<()> {
        let listener = self.listen()?;
        let monitor = self.start().inspect_err(|_| {
            self.stop();
            lock(&self.served).clear();
            let _ = std::fs::remove_file(&self.config.socket);
            self.remove_lock(!self.cold.is_in_use());
        })?;
        pagefold_tier::fd_store::notify_ready();
        // Who never leaves for want of clients need not look for them.
        let pause_ms = self
            .config
            .idle_exit
            .map_or(-1, |limit| (limit / 4).clamp(IDLE_LOOKS[0], IDLE_LOOKS[1]).as_millis() as i32);
        while !self.stopping.load(Ordering::Acquire) {
            let mut polls = [listener.raw(), self.bells[0].fd().raw()].map(for_input);
            if fd::poll(&mut polls, pause_ms).map_err(io::Error::from)? == 0 {
                if self.idle_for_too_long() {
                    break;
                }
                continue;
            }
            if polls[0].revents == 0 {
                continue;
            }
            let Ok(socket) = sock::accept(&listener) else {
                // No descriptor is free, for instance: a busy loop would not free one.
                let _ = fd::poll(&mut polls[1..], ACCEPT_PAUSE_MS);
                continue;
            };
            if self.connections.load(Ordering::Relaxed) >= CONNECTIONS_MAX {
                continue;
            }
            self.connections.fetch_add(1, Ordering::Relaxed);
            // Who asks whether there is a daemon is about to start a client of it.
            *lock(&self.last_busy) = Instant::now();
            let daemon = self.clone();
            let spawned = thread::Builder::new().name("greet".into()).stack_size(256 << 10).spawn(move || {
                daemon.greet(socket);
                daemon.connections.fetch_sub(1, Ordering::Relaxed);
            });
            if spawned.is_err() {
                self.connections.fetch_sub(1, Ordering::Relaxed);
            }
        }
        self.stop();
        lock(&self.served).clear();
        let nothing_out = self.cold.stop();
        let _ = std::fs::remove_file(&self.config.socket);
        self.ring_workers();
        let _ = monitor.join();
        self.remove_lock(nothing_out);
        Ok(())
    }

    /// All that may fail between listening and serving.
    fn start(self: &Arc<Daemon>) -> io::Result<thread::JoinHandle<()>> {
        // Clients of a dead daemon wait; nobody new is let in before they are served again.
        self.cold.adopt().map_err(|error| said("the keeper", &error))?;
        let monitor = {
            let daemon = self.clone();
            thread::Builder::new().name("monitor".into()).spawn(move || daemon.monitor())?
        };
        if let Some(at) = &self.config.metrics {
            self.may_lack(crate::service::metrics::serve(self.clone(), at).map_err(|error| said("--metrics", &error)))?;
        }
        if let Some(at) = &self.config.web {
            self.may_lack(crate::service::web::serve(self.clone(), at).map_err(|error| said("--web", &error)))?;
        }
        Ok(monitor)
    }

    /// Who takes pages over waits until we are gone.
    fn remove_lock(&self, nothing_out: bool) {
        if nothing_out {
            let _ = std::fs::remove_file(self.lock_path());
        }
    }

    /// Another daemon of this machine may have the address that the file with defaults names for all: one that was started
    /// for a program goes on without, and so does one that took clients over: they wait for their pages.
    fn may_lack(&self, served: io::Result<http::Name>) -> io::Result<()> {
        match served {
            Ok(name) => lock(&self.served).push(name),
            Err(error) if self.config.on_demand || self.cold.is_in_use() => {
                eprintln!("pagefold: {error}; goes on without");
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Asks the daemon to stop; [`run`](Self::run) returns soon after. Clients keep what is merged.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        self.bells.iter().for_each(Bell::ring);
    }

    /// Its file is locked for as long as we are the daemon of our socket.
    fn lock_path(&self) -> PathBuf {
        let mut path = self.config.socket.as_os_str().to_owned();
        path.push(".lock");
        path.into()
    }

    fn listen(&self) -> io::Result<Fd> {
        use std::os::unix::ffi::OsStrExt;
        let path = &self.config.socket;
        let bytes = path.as_os_str().as_bytes();
        // Two that start at once must not both believe to be the first: one would take the other's clients away.
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent).map_err(|error| said(&parent.display().to_string(), &error))?;
        }
        let file = take_lock(&self.lock_path())?;
        let locked = file.is_some();
        *lock(&self.lock) = file;
        // One that is stopped takes no connections.
        let connected = sock::connect_within(bytes, control::PATIENCE.as_millis() as u64);
        if !locked || connected.is_ok() {
            return Err(io::Error::new(
                io::ErrorKind::AddrInUse,
                format!("a daemon listens at {} already", path.display()),
            ));
        }
        use std::os::unix::fs::FileTypeExt;
        match std::fs::symlink_metadata(path) {
            // It answers nobody: a daemon that was killed left it.
            Ok(found)
                if found.file_type().is_socket() && connected.is_err_and(|errno| errno.0 == libc::ECONNREFUSED) =>
            {
                std::fs::remove_file(path)?;
            }
            Ok(_) => {
                self.remove_lock(true);
                return Err(io::Error::new(
                    io::ErrorKind::AlreadyExists,
                    format!("{} is there, and is no daemon's socket: name another, or remove it", path.display()),
                ));
            }
            Err(_) => {}
        }
        Ok(sock::listen(bytes)?)
    }

    /// Has all workers look whether there is something to do.
    pub(crate) fn ring_workers(&self) {
        lock(&self.groups).values().for_each(|group| ring(&group.wake));
    }

    fn idle_for_too_long(&self) -> bool {
        let Some(limit) = self.config.idle_exit else { return false };
        let mut last = lock(&self.last_busy);
        if !lock(&self.connected).is_empty() || self.cold.is_in_use() || self.connections.load(Ordering::Relaxed) > 0 {
            *last = Instant::now();
        }
        last.elapsed() > limit
    }

    /// Notices clients that ended: their socket hangs up.
    fn monitor(&self) {
        while !self.stopping.load(Ordering::Acquire) {
            let sockets: Vec<Arc<Peer>> = lock(&self.connected).iter().map(|client| client.socket.clone()).collect();
            let mut polls: Vec<libc::pollfd> = sockets
                .iter()
                .map(|socket| libc::pollfd { fd: socket.raw(), events: libc::POLLRDHUP, revents: 0 })
                .chain([for_input(self.bells[1].fd().raw())])
                .collect();
            if fd::poll(&mut polls, -1).is_err() {
                thread::sleep(Duration::from_millis(100));
            }
            if polls.last().is_some_and(|poll| poll.revents != 0) {
                self.bells[1].hush();
            }
            for (poll, socket) in polls.iter().zip(&sockets) {
                if poll.revents & (libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR | libc::POLLNVAL) != 0 {
                    self.forget(|client| Arc::ptr_eq(&client.socket, socket));
                }
            }
        }
    }

    pub(crate) fn forget(&self, which: impl Fn(&Connected) -> bool) {
        let mut out = Vec::new();
        lock(&self.connected).retain(|client| {
            let gone = which(client);
            if gone {
                // Under the lock, so that it counts as one of these or as the past's at any time.
                self.past_cpu_ns.fetch_add(client.shared.cpu_ns(), Ordering::Relaxed);
                out.push((client.key.clone(), client.id));
            }
            !gone
        });
        for (key, id) in out {
            let domain = lock(&self.groups).get(&key).map(|group| group.domain.clone());
            if let Some(domain) = domain {
                domain.remove(id);
            }
        }
    }

    /// True if client `id` of process `pid` is connected still.
    pub(crate) fn is_connected(&self, pid: i32, id: ClientId) -> bool {
        lock(&self.connected).iter().any(|client| client.shared.pid == pid && client.id == id)
    }

    /// The clients of process `pid` (one, unless it connected twice), or all.
    pub(crate) fn clients_of(&self, pid: Option<i32>) -> Vec<(Arc<Domain>, ClientId)> {
        let clients = self.clients_where(|own| pid.is_none_or(|pid| pid == own));
        clients.into_iter().map(|(_, domain, id)| (domain, id)).collect()
    }

    /// The clients whose process is `wanted`, which stands first.
    pub(crate) fn clients_where(&self, wanted: impl Fn(i32) -> bool) -> Vec<(i32, Arc<Domain>, ClientId)> {
        let groups = lock(&self.groups);
        lock(&self.connected)
            .iter()
            .filter(|client| wanted(client.shared.pid))
            .filter_map(|client| Some((client.shared.pid, groups.get(&client.key)?.domain.clone(), client.id)))
            .collect()
    }

    /// Compares every shared mapping with its slot through the kernel's own page tables.
    pub fn verify(&self) -> crate::status::Verified {
        verify::verify(self)
    }
}

/// The file at `path`, made if need be, and locked; `None` if somebody else has the lock.
fn take_lock(path: &Path) -> io::Result<Option<std::fs::File>> {
    use std::os::unix::fs::MetadataExt;
    let same = |file: &std::fs::File| -> io::Result<bool> {
        let ours = file.metadata()?;
        Ok(std::fs::metadata(path).is_ok_and(|named| (named.dev(), named.ino()) == (ours.dev(), ours.ino())))
    };
    loop {
        let file = std::fs::File::options().create(true).truncate(false).write(true).open(path);
        let file = file.map_err(|error| said(&path.display().to_string(), &error))?;
        if file.try_lock().is_err() {
            return Ok(None);
        }
        // Who had it before has removed the file as it ended: nobody else would look at this one.
        if same(&file)? {
            return Ok(Some(file));
        }
    }
}

/// An error of what was asked for by `option`.
fn said(option: &str, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{option}: {error}"))
}

fn for_input(fd: i32) -> libc::pollfd {
    libc::pollfd { fd, events: libc::POLLIN, revents: 0 }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn daemon() -> Arc<Daemon> {
        // It does not listen.
        Daemon::new(Config { pool_max_bytes: 64 << 20, ..Config::default() })
    }

    pub(crate) fn pair() -> (Fd, Fd) {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        (std::os::fd::OwnedFd::from(ours).into(), std::os::fd::OwnedFd::from(theirs).into())
    }

    pub(crate) fn connected(pid: i32) -> Connected {
        let (socket, _) = pair();
        Connected { key: (0, "d".into()), id: 1, shared: Arc::new(Shared::of(pid)), socket: Arc::new(socket.into()) }
    }

    /// Though each removes the file as it ends.
    #[test]
    fn one_at_a_time_has_the_lock() {
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

    /// Neither in the place of what is none's socket, nor without an address that was asked for.
    #[test]
    fn who_does_not_start_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("f");
        std::fs::write(&file, "").unwrap();
        let at = |name: &str, metrics: Option<String>| {
            let config = Config { socket: dir.path().join(name), metrics, ..Config::default() };
            Daemon::new(config).run().unwrap_err().kind()
        };
        assert_eq!(at("f", None), io::ErrorKind::AlreadyExists);
        assert_eq!(at("s", Some(format!("unix:{}", file.display()))), io::ErrorKind::AlreadyExists);
        let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["f"]);
    }

    /// Between a request for the status and the greeting of the program that asked for it the daemon does not leave.
    #[test]
    fn a_request_is_no_idleness() {
        let dir = tempfile::tempdir().unwrap();
        let daemon = Daemon::new(Config { socket: dir.path().join("s"), ..Config::default() });
        let long_ago = Instant::now() - Duration::from_secs(1);
        *lock(&daemon.last_busy) = long_ago;
        let runs = {
            let daemon = daemon.clone();
            thread::spawn(move || daemon.run())
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

    impl Daemon {
        /// Has `client` in its list, and not in its domain.
        pub(crate) fn list(self: &Arc<Daemon>, client: Connected) {
            self.join(&client.key).unwrap();
            lock(&self.connected).push(client);
        }

        /// Ends the workers of one that does not run.
        pub(crate) fn end(&self) {
            self.stop();
            lock(&self.groups).values().for_each(|group| group.over.store(true, Ordering::Release));
            self.ring_workers();
        }
    }
}
