//! The daemon: domains and their workers, greetings, and who is gone.

use crate::cold::room;
use crate::link::{GreetError, Link, Shared};
use crate::peer::Peer;
use crate::status::{Client, NotCovered, Status, Totals};
use crate::{control, http, verify};
use pagefold_agent::wire::{Op, Packet};
use pagefold_merge::stats::DomainStats;
use pagefold_merge::{ClientId, Domain, domain};
use pagefold_os::fd::{self, Fd};
use pagefold_os::wait::Bell;
use pagefold_os::{procfs, sched, sock, uffd};
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

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

/// How long a domain without clients is kept: what it knows of its pages' contents serves the next ones.
pub(crate) const DOMAIN_REST: Duration = Duration::from_secs(60);
/// Longest nap of a worker that finds nothing to do.
const NAP: Duration = Duration::from_secs(1);
/// Shortest and longest pause between looks whether clients are left, where it matters.
const IDLE_LOOKS: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(1)];
/// Processors, by number, among which a worker looks for one without another worker.
const CPUS_TRIED: u64 = 64;
/// Pause after a connection that could not be taken.
const ACCEPT_PAUSE_MS: i32 = 50;
/// Most connections at once.
const CONNECTIONS_MAX: u64 = 4096;
/// Most domains at once: each has threads, an index and a pool.
const DOMAINS_MAX: usize = 256;
/// Most connections of one process: a new one may come before the end of the one before is seen.
const LINKS_MAX: usize = 4;
/// Processes remembered that could not be managed.
const NOT_COVERED_MAX: usize = 64;

/// Room in the daemon's own control group without which it takes nobody more: the kernel would end it. What it keeps of a
/// client to begin with is a tenth of that.
pub(crate) const CLIENT_BYTES: u64 = 1 << 20;
const NO_ROOM: &str = "the daemon is near the memory limit of its control group: raise it (MemoryMax=)";
const TOO_MANY_LINKS: &str = "it is connected several times already";

/// Users and the names they gave.
pub(crate) type DomainKey = (u32, String);

pub(crate) struct Group {
    pub(crate) domain: Arc<Domain>,
    wake: Arc<(Mutex<u64>, Condvar)>,
    /// Its workers end.
    over: Arc<AtomicBool>,
    /// Clients that are about to be added.
    joining: usize,
    /// When its last client was seen.
    last_busy: Instant,
}

pub(crate) struct Connected {
    pub(crate) key: DomainKey,
    pub(crate) id: ClientId,
    pub(crate) shared: Arc<Shared>,
    socket: Arc<Peer>,
}

/// The daemon's state.
pub struct Daemon {
    pub(crate) config: Config,
    pub(crate) groups: Mutex<BTreeMap<DomainKey, Group>>,
    pub(crate) connected: Mutex<Vec<Connected>>,
    not_covered: Mutex<VecDeque<NotCovered>>,
    device: Option<Fd>,
    started: Instant,
    pub(crate) stopping: AtomicBool,
    /// Rings for who listens when we stop, and for the monitor when we stop or somebody connects.
    bells: [Bell; 2],
    connections: AtomicU64,
    /// Processor time of agents whose clients are gone.
    past_cpu_ns: AtomicU64,
    /// What domains that are gone have counted.
    past: Mutex<Totals>,
    last_busy: Mutex<Instant>,
    /// Processors on which workers take steps now.
    seats: Mutex<Vec<u64>>,
    pub(crate) more_metrics: std::sync::OnceLock<MoreMetrics>,
    pub(crate) more_status: std::sync::OnceLock<MoreStatus>,
    pub(crate) cold: crate::cold::Cold,
    /// How far `verify` is: pages, and of how many.
    pub(crate) verified: [AtomicU64; 2],
    /// Held for as long as we are the daemon of our socket.
    lock: Mutex<Option<std::fs::File>>,
    /// Names of the sockets for metrics and the page.
    served: Mutex<Vec<http::Name>>,
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
        pagefold_tier::fd_store::tell_ready();
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
            self.may_lack(crate::metrics::serve(self.clone(), at).map_err(|error| said("--metrics", &error)))?;
        }
        if let Some(at) = &self.config.web {
            self.may_lack(crate::web::serve(self.clone(), at).map_err(|error| said("--web", &error)))?;
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
        let lock = take_lock(&self.lock_path())?;
        let locked = lock.is_some();
        *crate::server::lock(&self.lock) = lock;
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

    /// Finds out who connected: an agent, or somebody with a control request.
    fn greet(self: &Arc<Daemon>, socket: Fd) {
        let mut buffer = vec![0; 64 << 10];
        if sock::set_timeout(&socket, 5_000).is_err() {
            return;
        }
        let Ok((got, fds)) = sock::receive(&socket, &mut buffer, 0) else { return };
        let bytes = &buffer[..got];
        if bytes.first() == Some(&b'{') {
            control::answer(self, &socket, bytes);
            return;
        }
        match Packet::parse(bytes).filter(|packet| packet.op == Op::Hello as u32) {
            Some(hello) => self.add_client(socket, &hello, fds),
            None => {
                let mut refusal = Packet::new(Op::Welcome);
                refusal.status = libc::EPROTO;
                let _ = sock::send(&socket, refusal.bytes(), &[]);
            }
        }
    }

    fn add_client(self: &Arc<Daemon>, socket: Fd, hello: &Packet, fds: sock::Fds) {
        let Ok(cred) = sock::peer(&socket) else { return };
        let text: Vec<u8> = hello.text.iter().copied().take_while(|byte| *byte != 0).collect();
        // Two names must not become one: a domain is what its clients trust.
        let Ok(name) = String::from_utf8(text) else {
            return self.note_not_covered(cred.pid, "the name of its domain is not UTF-8".into());
        };
        let name = if name.is_empty() { "default".to_owned() } else { name };
        if fds.is_cut() {
            return self.note_not_greeted(cred.pid, &GreetError::NoDescriptor);
        }
        if hello.a & pagefold_agent::wire::HELLO_COLD != 0 {
            let key = (cred.uid, name);
            return match self.cold.greet(socket, hello, fds, self.device.as_ref(), key) {
                Ok(()) => self.forget_not_covered(cred.pid),
                Err(error) => self.note_not_greeted(cred.pid, &error),
            };
        }
        if self.has_all_links(&lock(&self.connected), cred.pid) {
            return self.note_not_covered(cred.pid, TOO_MANY_LINKS.into());
        }
        if !room::own().has(CLIENT_BYTES) {
            return self.note_not_covered(cred.pid, NO_ROOM.into());
        }
        let socket = Arc::new(Peer::from(socket));
        let link = match Link::greet(socket.clone(), hello, fds, self.device.as_ref()) {
            Ok(link) => link,
            Err(error) => return self.note_not_greeted(cred.pid, &error),
        };
        let shared = link.shared();
        let key = (cred.uid, name);
        let (domain, wake) = match self.join(&key) {
            Ok(joined) => joined,
            Err(error) => {
                self.note_not_covered(cred.pid, format!("no domain for it: {error}"));
                return;
            }
        };
        let mut connected = lock(&self.connected);
        // Others of it may have come meanwhile.
        let refused = self.has_all_links(&connected, cred.pid);
        if !refused {
            let id = domain.add(Box::new(link));
            connected.push(Connected { key: key.clone(), id, shared, socket });
        }
        drop(connected);
        if let Some(group) = lock(&self.groups).get_mut(&key) {
            group.joining -= 1;
        }
        if refused {
            return self.note_not_covered(cred.pid, TOO_MANY_LINKS.into());
        }
        self.forget_not_covered(cred.pid);
        self.bells[1].ring();
        ring(&wake);
    }

    /// True if process `pid` has as many connections as it may.
    fn has_all_links(&self, connected: &[Connected], pid: i32) -> bool {
        // Those that cannot be seen from here all have the number 0.
        pid != 0 && connected.iter().filter(|client| client.shared.pid == pid).count() >= LINKS_MAX
    }

    /// Why a process was refused last.
    pub(crate) fn why_not_covered(&self, pid: i32) -> Option<String> {
        lock(&self.not_covered).iter().rev().find(|one| one.pid == pid).map(|one| one.reason.clone())
    }

    /// Notes why a greeting came to nothing, but not of a process that ended meanwhile.
    fn note_not_greeted(&self, pid: i32, error: &GreetError) {
        if !matches!(error, GreetError::HungUp) {
            self.note_not_covered(pid, error.to_string());
        }
    }

    /// What was noted of process `pid` is over: it is covered now, or there is something newer.
    fn forget_not_covered(&self, pid: i32) {
        // Those that cannot be seen from here all have the number 0.
        lock(&self.not_covered).retain(|one| one.pid != pid || pid == 0);
    }

    fn note_not_covered(&self, pid: i32, reason: String) {
        self.forget_not_covered(pid);
        let mut list = lock(&self.not_covered);
        // Who is refused asks again and again; the others stay in the list.
        list.retain(|one| one.pid != pid || one.reason != reason);
        if list.len() == NOT_COVERED_MAX {
            list.pop_front();
        }
        list.push_back(NotCovered { pid, name: procfs::name(pid).unwrap_or_default(), reason });
    }

    /// The domain of `key`, which stays until who joins is added; made, with its workers, if there is none.
    #[allow(clippy::type_complexity)]
    fn join(self: &Arc<Daemon>, key: &DomainKey) -> io::Result<(Arc<Domain>, Arc<(Mutex<u64>, Condvar)>)> {
        let mut groups = lock(&self.groups);
        if let Some(group) = groups.get_mut(key) {
            group.joining += 1;
            return Ok((group.domain.clone(), group.wake.clone()));
        }
        if groups.len() >= DOMAINS_MAX {
            return Err(io::Error::other(format!("there are {DOMAINS_MAX} already")));
        }
        let domain = Arc::new(Domain::new(domain::Config {
            name: key.1.clone(),
            period_ns: self.config.period.as_nanos() as u64,
            pool_max_bytes: self.config.pool_max_bytes,
            room: pagefold_pool::Room::new(|bytes| room::own().has(bytes)),
            vma_budget: self.config.vma_budget,
            predict: self.config.predict,
            ..domain::Config::default()
        })?);
        let wake = Arc::new((Mutex::new(0), Condvar::new()));
        let over = Arc::new(AtomicBool::new(false));
        for number in 0..self.config.workers.max(1) {
            let (daemon, domain, wake, over, key) =
                (self.clone(), domain.clone(), wake.clone(), over.clone(), key.clone());
            let work = move || daemon.work(&key, &domain, &wake, &over);
            // One is enough.
            if let Err(error) = thread::Builder::new().name(format!("worker-{number}")).spawn(work)
                && number == 0
            {
                return Err(error);
            }
        }
        let (of_group, last_busy) = ((domain.clone(), wake.clone()), Instant::now());
        groups.insert(key.clone(), Group { domain, wake, over, joining: 1, last_busy });
        Ok(of_group)
    }

    /// Lets go of the domain of `key` if it has had no client for `rest`: its name may never come again.
    fn let_go(&self, key: &DomainKey, rest: Duration) {
        let mut groups = lock(&self.groups);
        let Some(group) = groups.get_mut(key) else { return };
        if group.joining > 0 || !group.domain.clients().is_empty() {
            group.last_busy = Instant::now();
        } else if group.last_busy.elapsed() >= rest
            // What processes that have left show of its pool is in its books alone, and counts towards its largest size.
            && group.domain.pool().stats().lingering_bytes == 0
            && let Some(group) = groups.remove(key)
        {
            let events = group.domain.stats().events;
            let mut past = lock(&self.past);
            past.full_scans += events.full_scans;
            past.breaks += events.breaks;
            past.pages_merged += events.pages_merged + events.pages_zeroed;
            group.over.store(true, Ordering::Release);
            ring(&group.wake);
        }
    }

    /// A worker: takes steps with clients that are due.
    fn work(&self, key: &DomainKey, domain: &Domain, wake: &(Mutex<u64>, Condvar), over: &AtomicBool) {
        if self.config.idle_priority {
            let _ = sched::donate_idle_time();
        }
        let mut gone = Vec::new();
        while !self.stopping.load(Ordering::Acquire) && !over.load(Ordering::Acquire) {
            let seen = *lock(&wake.0);
            let now = sched::monotonic_ns();
            // For the length of a step worker and agent stay on one processor and take turns there. Left alone, the kernel
            // wakes each on the processor that rests, and waking one costs more than most requests.
            let everywhere = sched::Cpus::of_thread().ok();
            let seat = everywhere.as_ref().and_then(|everywhere| self.take_seat(everywhere));
            let step = domain.step_any(now, seat, &mut gone);
            if let (Some(cpu), Some(everywhere)) = (seat, &everywhere) {
                lock(&self.seats).retain(|taken| *taken != cpu);
                // Who has said meanwhile where this thread may run means it.
                if sched::Cpus::of_thread().ok() == sched::Cpus::one(cpu) {
                    let _ = everywhere.bind_thread();
                }
            }
            for id in gone.drain(..) {
                self.forget(|client| client.id == id && client.key == *key);
            }
            match step {
                Some(next) => {
                    if next.worked && next.due_ns <= now {
                        // Other workers may help: what this step found may be mail for other clients.
                        *lock(&wake.0) += 1;
                        wake.1.notify_one();
                    }
                }
                None => {
                    self.let_go(key, DOMAIN_REST);
                    let wait =
                        domain.due_ns().map_or(NAP, |due| Duration::from_nanos(due.saturating_sub(now)).min(NAP));
                    let wait = wait.max(Duration::from_micros(200));
                    let rung = lock(&wake.0);
                    // Else something happened since we looked.
                    if *rung == seen {
                        let _ = wake.1.wait_timeout(rung, wait);
                    }
                }
            }
        }
    }

    /// Binds the calling worker to the processor it is on, or to one of its own if another worker sits there.
    fn take_seat(&self, everywhere: &sched::Cpus) -> Option<u64> {
        let here = sched::cpu()?;
        let mut seats = lock(&self.seats);
        let free = |cpu: &u64| everywhere.contains(*cpu) && !seats.contains(cpu);
        let cpu = std::iter::once(here).chain(0..CPUS_TRIED).find(free)?;
        sched::Cpus::one(cpu)?.bind_thread().ok()?;
        seats.push(cpu);
        Some(cpu)
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

    fn forget(&self, which: impl Fn(&Connected) -> bool) {
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

    /// Everything that can be told.
    pub fn status(&self) -> Status {
        // Together: a domain that is let go is one of these or of the past.
        let (domains, past): (Vec<(DomainKey, Arc<Domain>)>, Totals) = {
            let groups = lock(&self.groups);
            (groups.iter().map(|(key, group)| (key.clone(), group.domain.clone())).collect(), *lock(&self.past))
        };
        let of = |key: &DomainKey, domain: &Domain| DomainStats { uid: key.0, ..domain.stats() };
        let mut stats: Vec<_> = domains.iter().map(|(key, domain)| (key.clone(), of(key, domain))).collect();
        let me = std::process::id() as i32;
        let rss_bytes = procfs::rss(me);
        let mut agents_cpu_ns = self.cold.agents_cpu_ns();
        let connected = lock(&self.connected);
        agents_cpu_ns += self.past_cpu_ns.load(Ordering::Relaxed);
        let clients = connected
            .iter()
            .map(|client| {
                let counters = client.shared.counters();
                agents_cpu_ns += client.shared.cpu_ns();
                let of_domain = stats.iter_mut().find(|(key, _)| *key == client.key);
                Client {
                    pid: client.shared.pid,
                    uid: client.shared.uid,
                    name: client.shared.name.clone(),
                    domain: client.key.1.clone(),
                    stats: of_domain
                        .and_then(|(_, domain)| domain.clients.get(&client.id).cloned())
                        .unwrap_or_default(),
                    freezes: counters.freezes.load(Ordering::Relaxed),
                    freeze_ns_max: counters.freeze_ns_max.load(Ordering::Relaxed),
                    freeze_us: counters.freeze_us.iter().map(|count| count.load(Ordering::Relaxed)).collect(),
                }
            })
            .collect();
        drop(connected);
        let cpu_ns = procfs::cpu_ns(me).unwrap_or(0) + agents_cpu_ns;
        let mut totals = Totals { cpu_ns, ..past };
        for (_, domain) in &stats {
            totals.pages_shared += domain.pages_shared;
            totals.pages_sharing += domain.pages_sharing;
            totals.pages_zero += domain.pages_zero;
            totals.pages_unshared += domain.pages_unshared;
            totals.pages_volatile += domain.pages_volatile;
            totals.pages += domain.pages;
            totals.full_scans += domain.events.full_scans;
            totals.breaks += domain.events.breaks;
            totals.pages_merged += domain.events.pages_merged + domain.events.pages_zeroed;
            totals.saved_bytes += domain.saved_bytes;
            totals.pool_bytes += domain.pool_bytes;
            totals.pool_lingering_bytes += domain.pool_lingering_bytes;
            totals.metadata_bytes += domain.metadata_bytes + domain.mapping_bytes;
            totals.general_profit += domain.general_profit;
        }
        Status {
            version: env!("CARGO_PKG_VERSION").into(),
            pid: me,
            uptime_s: self.started.elapsed().as_secs_f64(),
            workers: self.config.workers,
            period_s: self.config.period.as_secs_f64(),
            rss_bytes,
            totals,
            domains: stats.into_iter().map(|(_, domain)| domain).collect(),
            clients,
            not_covered: lock(&self.not_covered).iter().cloned().collect(),
            cold: self.cold.status(),
            verifying: crate::status::Verifying {
                pages: self.verified[0].load(Ordering::Relaxed),
                pages_total: self.verified[1].load(Ordering::Relaxed),
            },
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

/// Wakes the workers of a domain; who is about to sleep sees that the number changed.
fn ring(wake: &(Mutex<u64>, Condvar)) {
    *lock(&wake.0) += 1;
    wake.1.notify_all();
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use pagefold_os::PAGE_SIZE;

    pub(crate) fn daemon() -> Arc<Daemon> {
        // It does not listen.
        Daemon::new(Config { pool_max_bytes: 64 << 20, ..Config::default() })
    }

    fn pair() -> (Fd, Fd) {
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

    /// What clients write into their channel is theirs, and spoils no sum.
    #[test]
    fn counters_of_a_hostile_client_do_not_overflow() {
        let daemon = daemon();
        let me = std::process::id() as i32;
        for _ in 0..3 {
            let client = connected(me);
            let counters = client.shared.counters();
            counters.cpu_ns.store(u64::MAX, Ordering::Relaxed);
            counters.freeze_us.iter().for_each(|count| count.store(u64::MAX, Ordering::Relaxed));
            lock(&daemon.connected).push(client);
        }
        let most = || 4 * procfs::cpu_ns(me).unwrap();
        let status = daemon.status();
        assert!((1..=most()).contains(&status.totals.cpu_ns), "{}", status.totals.cpu_ns);
        crate::metrics::render(&status);
        daemon.forget(|_| true);
        let later = daemon.status().totals.cpu_ns;
        assert!((status.totals.cpu_ns..=most()).contains(&later), "{later}");
    }

    /// Whoever comes and goes meanwhile: a collector takes a counter that falls for one that began anew.
    #[test]
    fn processor_time_never_falls() {
        let daemon = daemon();
        let me = std::process::id() as i32;
        let (over, read) = (AtomicBool::new(false), AtomicU64::new(0));
        thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut before = 0;
                while !over.load(Ordering::Relaxed) {
                    let now = daemon.status().totals.cpu_ns;
                    read.fetch_add(1, Ordering::Relaxed);
                    if now < before {
                        return Some((before, now));
                    }
                    before = now;
                }
                None
            });
            for _ in 0..200 {
                let clients: Vec<_> = (0..16).map(|_| connected(me)).collect();
                let counters = clients.iter().map(|client| client.shared.counters());
                counters.for_each(|counters| counters.cpu_ns.store(u64::MAX, Ordering::Relaxed));
                lock(&daemon.connected).extend(clients);
                let seen = read.load(Ordering::Relaxed) + 2;
                while read.load(Ordering::Relaxed) < seen && !reader.is_finished() {
                    thread::yield_now();
                }
                daemon.forget(|_| true);
            }
            over.store(true, Ordering::Relaxed);
            assert_eq!(reader.join().unwrap(), None);
        });
    }

    /// Else a domain of the same name would have the whole of its pool's largest size once more.
    #[test]
    fn a_domain_stays_while_somebody_shows_its_pool() {
        let daemon = daemon();
        let key = (0, "d".to_owned());
        let (domain, _) = daemon.join(&key).unwrap();
        lock(&daemon.groups).get_mut(&key).unwrap().joining -= 1;
        let first = domain.pool().publish(&[&[1; PAGE_SIZE]]).unwrap().first;
        // Of a process that has left, and maps it still.
        let shown = domain.pool().segment_fd(first.segment());
        domain.pool().close_open_segments();
        assert!(domain.pool().release(first.segment(), |_, _| ()));
        daemon.let_go(&key, Duration::ZERO);
        let lingering = || daemon.status().totals.pool_lingering_bytes;
        assert_eq!(lingering(), PAGE_SIZE as u64);
        drop(shown);
        daemon.let_go(&key, Duration::ZERO);
        assert!(lingering() == 0 && lock(&daemon.groups).is_empty());
        daemon.end();
    }

    #[test]
    fn domains_and_links_of_one_process_have_an_end() {
        let daemon = daemon();
        for number in 0..DOMAINS_MAX {
            daemon.join(&(0, number.to_string())).unwrap();
        }
        assert!(daemon.join(&(0, "one more".into())).is_err());
        assert!(daemon.join(&(0, "7".into())).is_ok(), "it is there already");
        // A process that is connected as often as it may be.
        let me = std::process::id() as i32;
        *lock(&daemon.connected) = (0..LINKS_MAX).map(|_| connected(me)).collect();
        let (ours, theirs) = pair();
        sock::send(&theirs, b"x", &[]).unwrap();
        let (_, fds) = sock::receive(&ours, &mut [0], 0).unwrap();
        daemon.add_client(ours, &Packet::new(Op::Hello), fds);
        assert_eq!(daemon.why_not_covered(me).as_deref(), Some(TOO_MANY_LINKS));
        assert!(!daemon.has_all_links(&lock(&daemon.connected), me + 1));
        daemon.end();
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

    /// A program that forks many short-lived children does not fill the list of those that cannot be managed.
    #[test]
    fn who_ends_while_it_is_greeted_is_not_named() {
        let daemon = daemon();
        let me = std::process::id() as i32;
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let of_child = std::ffi::CString::new(format!("/proc/{}/pagemap", child.id())).unwrap();
        let ended = Fd::open(&of_child, libc::O_RDONLY, 0).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        let here = Fd::open(c"/proc/self/pagemap", libc::O_RDONLY, 0).unwrap();
        let greeted = |flags: u64, pagemap: &Fd| {
            let (ours, theirs) = pair();
            let hello = Packet { a: flags, ..Packet::new(Op::Hello) };
            sock::send(&theirs, hello.bytes(), &[pagemap.raw()]).unwrap();
            drop(theirs);
            daemon.greet(ours);
            daemon.why_not_covered(me)
        };
        for flags in [0, pagefold_agent::wire::HELLO_COLD] {
            // After its greeting, and before it was looked at.
            assert_eq!([&here, &ended].map(|pagemap| greeted(flags, pagemap)), [None, None]);
        }
        // One that says why is.
        daemon.note_not_greeted(me, &GreetError::ClientCannot(pagefold_os::Errno(libc::EPERM)));
        daemon.note_not_greeted(me, &GreetError::Protocol);
        assert_eq!(lock(&daemon.not_covered).len(), 1, "the last reason of a process is the one that holds");
        daemon.forget_not_covered(me);
        assert_eq!(daemon.why_not_covered(me), None);
    }

    #[test]
    fn names_that_cannot_be_told_apart_are_no_domains() {
        let daemon = daemon();
        for byte in [0xfe, 0xff] {
            let (ours, theirs) = pair();
            sock::send(&theirs, b"x", &[]).unwrap();
            let (_, fds) = sock::receive(&ours, &mut [0], 0).unwrap();
            let mut hello = Packet::new(Op::Hello);
            hello.text[..2].copy_from_slice(&[b'a', byte]);
            daemon.add_client(ours, &hello, fds);
        }
        let reason = daemon.why_not_covered(std::process::id() as i32).unwrap();
        assert!(reason.contains("not UTF-8"), "{reason}");
        // Who asks again and again takes one place.
        assert!(lock(&daemon.groups).is_empty() && lock(&daemon.not_covered).len() == 1);
    }

    #[test]
    fn a_domain_that_nobody_comes_back_to_is_let_go() {
        let dir = tempfile::tempdir().unwrap();
        let daemon = Daemon::new(Config {
            socket: dir.path().join("s"),
            workers: 3,
            period: Duration::from_millis(10),
            pool_max_bytes: 64 << 20,
            vma_budget: 100,
            ..Config::default()
        });
        let key = (0, "sandbox".to_owned());
        let (domain, _) = daemon.join(&key).unwrap();
        daemon.let_go(&key, Duration::ZERO);
        assert_eq!(lock(&daemon.groups).len(), 1, "somebody joins");
        lock(&daemon.groups).get_mut(&key).unwrap().joining -= 1;
        daemon.let_go(&key, Duration::from_secs(3600));
        assert_eq!(lock(&daemon.groups).len(), 1, "it rests first");
        let worked = Arc::downgrade(&domain);
        drop(domain);
        daemon.let_go(&key, Duration::ZERO);
        assert_eq!(lock(&daemon.groups).len(), 0);
        // Its workers end, and all that it held goes.
        for _ in 0..1000 {
            if worked.upgrade().is_none() {
                return;
            }
            thread::sleep(Duration::from_millis(10));
        }
        panic!("its workers go on");
    }
}
