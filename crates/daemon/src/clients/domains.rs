//! The clients that are merged live, their domains, and the domains' workers.
//!
//! A domain is made when its first client joins, and is dropped when it has had no client for [`DOMAIN_IDLE`]. Each has
//! worker threads, which take steps with the clients that are due.
//!
//! Lock order: `domains`, then `connected`, then `past`.

use crate::clients::connection::Connection;
use crate::clients::merge_client::MergeClient;
use crate::clients::shared_client::SharedClient;
use crate::config::Config;
use crate::domain_key::{DOMAIN_IDLE, DomainKey};
use crate::memory_limits;
use crate::status::Totals;
use pagefold_merge::{ClientId, Domain, domain};
use pagefold_os::sync::lock;
use pagefold_os::wait::Bell;
use pagefold_os::{fd, heap, procfs, sched};
use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// Longest sleep of a worker that finds nothing to do.
const NAP: Duration = Duration::from_secs(1);
/// Processors, by number, among which a worker looks for one without another worker.
const CPUS_TRIED: u64 = 64;
/// Most domains at a time: each has threads, an index and a pool.
pub(crate) const DOMAINS_MAX: usize = 256;
/// Most connections of one process: it may connect anew before the daemon has seen its previous connection end.
pub(crate) const CONNECTIONS_PER_PROCESS: usize = 4;

/// The number of times that a domain's workers were woken, and its change.
pub(crate) type Wake = (Mutex<u64>, Condvar);

/// A domain with its workers.
pub(crate) struct LiveDomain {
    pub(crate) domain: Arc<Domain>,
    pub(crate) wake: Arc<Wake>,
    /// Its workers end.
    pub(crate) over: Arc<AtomicBool>,
    /// Its workers, without those that were replaced.
    workers: Vec<Arc<Worker>>,
    /// Clients that are about to be added.
    pub(crate) joining: usize,
    /// When its last client was seen.
    pub(crate) last_busy: Instant,
}

/// A worker, as other threads see it.
#[derive(Default)]
struct Worker {
    /// Its thread.
    thread: AtomicI32,
    /// When its step began, by the clock that does not jump; 0 between steps.
    step_began_ns: AtomicU64,
    /// Another has its place: it ends after its step.
    is_replaced: AtomicBool,
}

impl Worker {
    /// True if it has been in one step for longer than `patience`, and waits for something other than a processor.
    fn waits(&self, patience: Duration) -> bool {
        let began = self.step_began_ns.load(Ordering::Acquire);
        began != 0
            && sched::monotonic_ns().saturating_sub(began) > patience.as_nanos() as u64
            && !procfs::is_runnable(self.thread.load(Ordering::Relaxed))
    }
}

/// A connected client.
pub(crate) struct Connected {
    pub(crate) key: DomainKey,
    pub(crate) id: ClientId,
    pub(crate) shared: Arc<SharedClient>,
    pub(crate) connection: Arc<Connection>,
}

/// All clients that are merged live.
pub(crate) struct LiveClients {
    config: Config,
    pub(crate) domains: Mutex<BTreeMap<DomainKey, LiveDomain>>,
    pub(crate) connected: Mutex<Vec<Connected>>,
    /// Processor time of the agents of clients that have ended. Changes while `connected` is held.
    pub(crate) past_cpu_ns: AtomicU64,
    /// Event counts of domains that were dropped. Changes while `domains` is held.
    pub(crate) past: Mutex<Totals>,
    /// Processors on which workers take steps now.
    worker_cpus: Mutex<Vec<u64>>,
    /// Wakes the monitor when a client connects or the daemon stops.
    changed: Bell,
    stopping: AtomicBool,
}

impl LiveClients {
    pub(crate) fn new(config: Config) -> Arc<LiveClients> {
        Arc::new(LiveClients {
            config,
            domains: Mutex::default(),
            connected: Mutex::default(),
            past_cpu_ns: AtomicU64::new(0),
            past: Mutex::default(),
            worker_cpus: Mutex::default(),
            changed: Bell::new().expect("the first descriptors are there"),
            stopping: AtomicBool::new(false),
        })
    }

    /// The domain of `key`, made with its workers if there is none. It is not dropped before the caller calls
    /// [`add`](Self::add).
    pub(crate) fn join(self: &Arc<LiveClients>, key: &DomainKey) -> io::Result<(Arc<Domain>, Arc<Wake>)> {
        let mut domains = lock(&self.domains);
        if let Some(live) = domains.get_mut(key) {
            live.joining += 1;
            return Ok((live.domain.clone(), live.wake.clone()));
        }
        if domains.len() >= DOMAINS_MAX {
            return Err(io::Error::other(format!("there are {DOMAINS_MAX} already")));
        }
        let reserve = self.config.reserve_bytes;
        let domain = Arc::new(Domain::new(domain::Config {
            name: key.1.clone(),
            user: Some(key.0),
            period_ns: self.config.period.as_nanos() as u64,
            pool_max_bytes: self.config.pool_max_bytes,
            room: pagefold_pool::Room::new(move |bytes| memory_limits::own().has_beside(bytes, reserve)),
            vma_budget: self.config.vma_budget,
            predict: self.config.predict,
            ..domain::Config::default()
        })?);
        let mut live = LiveDomain {
            domain,
            wake: Arc::default(),
            over: Arc::default(),
            workers: Vec::new(),
            joining: 1,
            last_busy: Instant::now(),
        };
        for number in 0..self.config.workers.max(1) {
            // One worker is enough.
            if let Err(error) = self.start_worker(key, &mut live)
                && number == 0
            {
                return Err(error);
            }
        }
        let of_domain = (live.domain.clone(), live.wake.clone());
        domains.insert(key.clone(), live);
        Ok(of_domain)
    }

    fn start_worker(self: &Arc<LiveClients>, key: &DomainKey, live: &mut LiveDomain) -> io::Result<()> {
        let worker = Arc::new(Worker::default());
        let (clients, key, works) = (self.clone(), key.clone(), worker.clone());
        let (domain, wake, over) = (live.domain.clone(), live.wake.clone(), live.over.clone());
        let name = format!("worker-{}", live.workers.len());
        thread::Builder::new().name(name).spawn(move || clients.work(&key, &domain, &wake, &over, &works))?;
        live.workers.push(worker);
        Ok(())
    }

    /// Starts another worker for each that its client has kept waiting for longer than `patience`, as a client does while
    /// its server of files does not answer: the other clients do not wait.
    pub(crate) fn replace_waiting_workers(self: &Arc<LiveClients>, patience: Duration) {
        for (key, live) in lock(&self.domains).iter_mut() {
            let waiting: Vec<Arc<Worker>> =
                live.workers.iter().filter(|worker| worker.waits(patience)).cloned().collect();
            for waits in waiting {
                if self.start_worker(key, live).is_ok() {
                    waits.is_replaced.store(true, Ordering::Release);
                    live.workers.retain(|worker| !Arc::ptr_eq(worker, &waits));
                }
            }
        }
    }

    /// Drops the domain of `key` if it has had no client for `idle`: its name may never come again.
    fn retire(&self, key: &DomainKey, idle: Duration) {
        let mut domains = lock(&self.domains);
        let Some(live) = domains.get_mut(key) else { return };
        if live.joining > 0 || !live.domain.clients().is_empty() {
            live.last_busy = Instant::now();
        } else if live.last_busy.elapsed() >= idle
            // Only this pool accounts for its segments that processes which left still map; they count towards its largest
            // size.
            && live.domain.pool().stats().orphaned_bytes == 0
            && let Some(live) = domains.remove(key)
        {
            let events = live.domain.stats().events;
            let mut past = lock(&self.past);
            past.full_scans += events.full_scans;
            past.cow_breaks += events.cow_breaks;
            past.pages_merged += events.pages_merged;
            past.pages_zeroed += events.pages_zeroed;
            live.over.store(true, Ordering::Release);
            wake(&live.wake);
        }
    }

    /// A worker: takes steps with clients that are due.
    fn work(&self, key: &DomainKey, domain: &Domain, wake: &Wake, over: &AtomicBool, worker: &Worker) {
        if self.config.idle_priority {
            let _ = sched::donate_idle_time();
        }
        worker.thread.store(sched::thread(), Ordering::Relaxed);
        let mut gone = Vec::new();
        let ends = || [&self.stopping, over, &worker.is_replaced].iter().any(|end| end.load(Ordering::Acquire));
        while !ends() {
            let seen = *lock(&wake.0);
            let now = sched::monotonic_ns();
            // For the length of a step worker and agent stay on one processor and take turns there. Left alone, the kernel
            // wakes each on the processor that rests, and waking one costs more than most requests.
            let everywhere = sched::Cpus::of_thread().ok();
            let cpu = everywhere.as_ref().and_then(|everywhere| self.take_cpu(everywhere));
            worker.step_began_ns.store(now, Ordering::Release);
            let step = domain.step_any(now, cpu, &mut gone);
            worker.step_began_ns.store(0, Ordering::Release);
            if let (Some(cpu), Some(everywhere)) = (cpu, &everywhere) {
                lock(&self.worker_cpus).retain(|taken| *taken != cpu);
                // Restored only if no other process has set this thread's affinity meanwhile.
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
                        // Other workers may help: this step may have found work for other clients.
                        *lock(&wake.0) += 1;
                        wake.1.notify_one();
                    }
                }
                None => {
                    self.retire(key, DOMAIN_IDLE);
                    if domain.release_buffers(now) {
                        heap::trim();
                    }
                    let wait =
                        domain.due_ns().map_or(NAP, |due| Duration::from_nanos(due.saturating_sub(now)).min(NAP));
                    let wait = wait.max(Duration::from_micros(200));
                    let rung = lock(&wake.0);
                    // Else a client became due since this worker looked.
                    if *rung == seen {
                        let _ = wake.1.wait_timeout(rung, wait);
                    }
                }
            }
        }
    }

    /// Binds the calling worker to the processor it is on, or to another one if a worker has that already.
    fn take_cpu(&self, everywhere: &sched::Cpus) -> Option<u64> {
        let here = sched::cpu()?;
        let mut taken = lock(&self.worker_cpus);
        let free = |cpu: &u64| everywhere.contains(*cpu) && !taken.contains(cpu);
        let cpu = std::iter::once(here).chain(0..CPUS_TRIED).find(free)?;
        sched::Cpus::one(cpu)?.bind_thread().ok()?;
        taken.push(cpu);
        Some(cpu)
    }

    /// Notices clients that ended: their connection hangs up.
    pub(crate) fn monitor(&self) {
        while !self.stopping.load(Ordering::Acquire) {
            let connections: Vec<Arc<Connection>> =
                lock(&self.connected).iter().map(|client| client.connection.clone()).collect();
            let mut polls: Vec<libc::pollfd> = connections
                .iter()
                .map(|connection| libc::pollfd { fd: connection.raw(), events: libc::POLLRDHUP, revents: 0 })
                .chain([libc::pollfd { fd: self.changed.fd().raw(), events: libc::POLLIN, revents: 0 }])
                .collect();
            if fd::poll(&mut polls, -1).is_err() {
                thread::sleep(Duration::from_millis(100));
            }
            if polls.last().is_some_and(|poll| poll.revents != 0) {
                self.changed.hush();
            }
            for (poll, connection) in polls.iter().zip(&connections) {
                if poll.revents & (libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR | libc::POLLNVAL) != 0 {
                    self.forget(|client| Arc::ptr_eq(&client.connection, connection));
                }
            }
        }
    }

    /// Removes the clients that `which` names, which have ended.
    pub(crate) fn forget(&self, which: impl Fn(&Connected) -> bool) {
        let mut out = Vec::new();
        lock(&self.connected).retain(|client| {
            let gone = which(client);
            if gone {
                // Under the lock: at any time its processor time is counted exactly once, here or in the past.
                self.past_cpu_ns.fetch_add(client.shared.cpu_ns(), Ordering::Relaxed);
                out.push((client.key.clone(), client.id));
            }
            !gone
        });
        for (key, id) in out {
            let domain = lock(&self.domains).get(&key).map(|live| live.domain.clone());
            if let Some(domain) = domain {
                domain.remove(id);
            }
        }
    }

    /// Processor time that the agents of process `pid` have spent on live merging.
    pub(crate) fn agent_cpu_ns(&self, pid: i32) -> u64 {
        lock(&self.connected)
            .iter()
            .filter(|client| client.shared.pid == pid)
            .map(|client| client.shared.cpu_ns())
            .sum()
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

    /// The clients of the processes that `wanted` names: process, domain and id.
    pub(crate) fn clients_where(&self, wanted: impl Fn(i32) -> bool) -> Vec<(i32, Arc<Domain>, ClientId)> {
        let domains = lock(&self.domains);
        lock(&self.connected)
            .iter()
            .filter(|client| wanted(client.shared.pid))
            .filter_map(|client| Some((client.shared.pid, domains.get(&client.key)?.domain.clone(), client.id)))
            .collect()
    }

    /// All clients.
    pub(crate) fn all(&self) -> Vec<(Arc<SharedClient>, Arc<Domain>, ClientId)> {
        let domains = lock(&self.domains);
        let of =
            |client: &Connected| Some((client.shared.clone(), domains.get(&client.key)?.domain.clone(), client.id));
        lock(&self.connected).iter().filter_map(of).collect()
    }

    /// Adds a client of the domain that [`join`](Self::join) returned, unless its process has connected too often meanwhile.
    pub(crate) fn add(
        &self,
        key: &DomainKey,
        domain: &Domain,
        client: MergeClient,
        connection: Arc<Connection>,
    ) -> bool {
        let shared = client.shared();
        let mut connected = lock(&self.connected);
        let accepted = !is_connected_too_often(&connected, shared.pid);
        if accepted {
            let id = domain.add(Box::new(client));
            connected.push(Connected { key: key.clone(), id, shared, connection });
        }
        drop(connected);
        if let Some(live) = lock(&self.domains).get_mut(key) {
            live.joining -= 1;
        }
        if accepted {
            self.changed.ring();
        }
        accepted
    }

    /// Ends the workers and the monitor.
    pub(crate) fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        self.changed.ring();
    }

    /// Wakes the workers of all domains.
    pub(crate) fn wake_workers(&self) {
        lock(&self.domains).values().for_each(|live| wake(&live.wake));
    }

    /// True if process `pid` has as many connections as it may.
    pub(crate) fn is_connected_too_often(&self, pid: i32) -> bool {
        is_connected_too_often(&lock(&self.connected), pid)
    }

    /// True if there is no client.
    pub(crate) fn is_empty(&self) -> bool {
        lock(&self.connected).is_empty()
    }
}

fn is_connected_too_often(connected: &[Connected], pid: i32) -> bool {
    // Processes of a pid namespace that the daemon does not see all have the number 0.
    pid != 0 && connected.iter().filter(|client| client.shared.pid == pid).count() >= CONNECTIONS_PER_PROCESS
}

/// Wakes the workers of a domain; a worker that is about to sleep sees that the number changed.
pub(crate) fn wake(wake: &Wake) {
    *lock(&wake.0) += 1;
    wake.1.notify_all();
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::clients::connection::tests::pair;
    use pagefold_os::PAGE_SIZE;

    pub(crate) fn clients() -> Arc<LiveClients> {
        LiveClients::new(Config { pool_max_bytes: 64 << 20, ..Config::default() })
    }

    pub(crate) fn connected(pid: i32) -> Connected {
        let (socket, _) = pair();
        Connected {
            key: (0, "d".into()),
            id: 1,
            shared: Arc::new(SharedClient::of(pid)),
            connection: Arc::new(socket.into()),
        }
    }

    impl LiveClients {
        /// Has `client` in the list, and not in its domain.
        pub(crate) fn list(self: &Arc<LiveClients>, client: Connected) {
            self.join(&client.key).unwrap();
            lock(&self.connected).push(client);
        }

        /// Ends the workers of a daemon that never ran.
        pub(crate) fn end(&self) {
            self.stop();
            lock(&self.domains).values().for_each(|live| live.over.store(true, Ordering::Release));
            self.wake_workers();
        }

        fn orphaned_bytes(&self) -> u64 {
            lock(&self.domains).values().map(|live| live.domain.pool().stats().orphaned_bytes).sum()
        }
    }

    #[test]
    fn the_number_of_domains_is_bounded() {
        let clients = clients();
        for number in 0..DOMAINS_MAX {
            clients.join(&(0, number.to_string())).unwrap();
        }
        assert!(clients.join(&(0, "one more".into())).is_err());
        assert!(clients.join(&(0, "7".into())).is_ok(), "it is there already");
        clients.end();
    }

    /// Else a domain of the same name would have the whole of its pool's largest size once more.
    #[test]
    fn a_domain_stays_while_a_process_still_maps_its_pool() {
        let clients = clients();
        let key = (0, "d".to_owned());
        let (domain, _) = clients.join(&key).unwrap();
        lock(&clients.domains).get_mut(&key).unwrap().joining -= 1;
        let first = domain.pool().publish(&[&[1; PAGE_SIZE]]).unwrap().first;
        // Of a process that has left, and still maps it.
        let shown = domain.pool().segment_fd(first.segment());
        domain.pool().close_open_segments();
        assert!(domain.pool().release(first.segment(), |_, _| ()));
        clients.retire(&key, Duration::ZERO);
        assert_eq!(clients.orphaned_bytes(), PAGE_SIZE as u64);
        drop(shown);
        clients.retire(&key, Duration::ZERO);
        assert!(lock(&clients.domains).is_empty());
        clients.end();
    }

    #[test]
    fn a_domain_without_clients_is_dropped_after_a_while() {
        let clients = LiveClients::new(Config {
            workers: 3,
            period: Duration::from_millis(10),
            pool_max_bytes: 64 << 20,
            vma_budget: 100,
            ..Config::default()
        });
        let key = (0, "sandbox".to_owned());
        let (domain, _) = clients.join(&key).unwrap();
        clients.retire(&key, Duration::ZERO);
        assert_eq!(lock(&clients.domains).len(), 1, "a client is joining");
        lock(&clients.domains).get_mut(&key).unwrap().joining -= 1;
        clients.retire(&key, Duration::from_secs(3600));
        assert_eq!(lock(&clients.domains).len(), 1, "it is kept for a while");
        let worked = Arc::downgrade(&domain);
        drop(domain);
        clients.retire(&key, Duration::ZERO);
        assert_eq!(lock(&clients.domains).len(), 0);
        // Its workers end, and all that it held is freed.
        for _ in 0..1000 {
            if worked.upgrade().is_none() {
                return;
            }
            thread::sleep(Duration::from_millis(10));
        }
        panic!("its workers go on");
    }
}
