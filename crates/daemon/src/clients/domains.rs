//! Domains with their workers: made when a client of theirs comes, let go when none has come for long.

use crate::service::listener::{Daemon, DomainKey};

use crate::memory_limits;
use pagefold_merge::{Domain, domain};
use pagefold_os::sched;
use pagefold_os::sync::lock;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// How long a domain without clients is kept: what it knows of its pages' contents serves the next ones.
pub(crate) const DOMAIN_REST: Duration = Duration::from_secs(60);
/// Longest nap of a worker that finds nothing to do.
const NAP: Duration = Duration::from_secs(1);
/// Processors, by number, among which a worker looks for one without another worker.
const CPUS_TRIED: u64 = 64;
/// Most domains at once: each has threads, an index and a pool.
pub(crate) const DOMAINS_MAX: usize = 256;

pub(crate) struct Group {
    pub(crate) domain: Arc<Domain>,
    pub(crate) wake: Arc<(Mutex<u64>, Condvar)>,
    /// Its workers end.
    pub(crate) over: Arc<AtomicBool>,
    /// Clients that are about to be added.
    pub(crate) joining: usize,
    /// When its last client was seen.
    pub(crate) last_busy: Instant,
}

impl Daemon {
    /// The domain of `key`, which stays until who joins is added; made, with its workers, if there is none.
    #[allow(clippy::type_complexity)]
    pub(crate) fn join(self: &Arc<Daemon>, key: &DomainKey) -> io::Result<(Arc<Domain>, Arc<(Mutex<u64>, Condvar)>)> {
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
            room: pagefold_pool::Room::new(|bytes| memory_limits::own().has(bytes)),
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
}

/// Wakes the workers of a domain; who is about to sleep sees that the number changed.
pub(crate) fn ring(wake: &(Mutex<u64>, Condvar)) {
    *lock(&wake.0) += 1;
    wake.1.notify_all();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::service::listener::Config;
    use crate::service::listener::tests::daemon;
    use pagefold_os::PAGE_SIZE;

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
