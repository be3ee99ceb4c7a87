//! The client's thread: waits for events, serves them, and looks whether the client is still there.
//!
//! A thread that found work looks for more for a while, for waking it is dearer than a page. One that follows the
//! faulting thread from processor to processor does not (`fault_affinity`).

use super::faults::ReadAhead;
use super::{Client, FAULT_BUCKETS, Served};
use crate::clients::connection::Connection;
use crate::cold::fault_affinity::FaultAffinity;
use crate::cold::group::Group;
use crate::cold::threads;
use pagefold_os::sync::lock;
use pagefold_os::{fd, sched};
use pagefold_tier::Tier;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// A thread that found work looks for more for so long before it sleeps, in nanoseconds: a sleeping processor takes
/// longer to wake than a page takes to come back.
const SPIN_NS: u64 = 30_000;

impl Client {
    /// The client's thread: serves faults until the client has ended.
    pub(crate) fn run(self: &Arc<Client>, group: &Arc<Group>) {
        let mut patience = 8u32;
        let mut read_ahead = ReadAhead::default();
        let mut affinity = FaultAffinity::new(self.pid);
        while !self.gone.load(Ordering::Acquire) {
            self.table.head().heartbeat.fetch_add(1, Ordering::Release);
            let socket = lock(&self.socket).clone();
            let mut polls = [
                libc::pollfd { fd: self.uffd.fd().raw(), events: libc::POLLIN, revents: 0 },
                libc::pollfd {
                    fd: socket.as_ref().map_or(-1, |socket| socket.raw()),
                    events: libc::POLLRDHUP,
                    revents: 0,
                },
            ];
            // No event announces when a moved page can be brought in: the thread that moved it may have to run first.
            let waiting = {
                let service = lock(&self.service);
                !service.pending.is_empty() || service.is_moving()
            };
            let ready = fd::poll(&mut polls, if waiting { 1 } else { group.awake.pause_ms(500) });
            if ready == Ok(0) {
                group.awake.idle(sched::quick_monotonic_ns());
                affinity.rest();
            }
            if polls[1].revents != 0 || (ready == Ok(0) && socket.is_none()) {
                self.hung_up(group, socket.as_ref());
            }
            if polls[0].revents & libc::POLLERR != 0 {
                // The client has its descriptor wait, of which poll(2) then tells nothing.
                let _ = self.uffd.fd().set_nonblocking();
            }
            if polls[0].revents == 0 && !waiting {
                continue;
            }
            // Looks for more for a while when that paid lately.
            let mut spin_end = 0;
            let mut sum = 0;
            loop {
                let (served, faulter) = self.serve(&group.tier, &mut read_ahead);
                sum += served;
                let now = sched::quick_monotonic_ns();
                if served > 0 {
                    group.awake.answered(served as u32, now);
                    if faulter != 0 {
                        affinity.served(served, faulter, now);
                    }
                }
                if affinity.follows() {
                    break;
                }
                self.fill_read_ahead(&group.tier, &mut read_ahead);
                let now = sched::quick_monotonic_ns();
                if served > 0 {
                    spin_end = if patience > 0 { now + SPIN_NS } else { 0 };
                    patience = (patience + 1).min(16);
                } else if now > spin_end {
                    patience = patience.saturating_sub(1);
                    if patience == 0 && now.is_multiple_of(64) {
                        patience = 2;
                    }
                    break;
                }
                std::hint::spin_loop();
            }
            let wants_room = self.limits.is_short() || self.lacks_memory.load(Ordering::Relaxed);
            if wants_room && !self.rang_evictor.swap(true, Ordering::AcqRel) {
                group.ring();
            }
            if self.wakings.take_due() {
                threads::start_waking(group, self);
            }
            if sum == 0 {
                // The client keeps the owner lock, or has no memory: it bears the delay itself.
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        // No other client may be left to end the wakefulness; a client that still needs it restores it with its next fault.
        group.awake.idle(u64::MAX);
    }

    /// The agent's connection has ended: did the process, or did it only leave?
    fn hung_up(&self, group: &Group, socket: Option<&Arc<Connection>>) {
        if let Some(socket) = socket {
            let mut current = lock(&self.socket);
            if current.as_ref().is_some_and(|current| Arc::ptr_eq(current, socket)) {
                *current = None;
            }
        }
        let left = self.table.head().client_id.load(Ordering::Acquire) == 0;
        if left || !self.uffd.is_alive() {
            group.remove(self.client_id);
        }
    }

    /// Reads and serves what waits; returns how many faults and events that were, and the thread that faulted last.
    pub(crate) fn serve(&self, tier: &Tier, read_ahead: &mut ReadAhead) -> (usize, i32) {
        // A mutex is not fair: a thread that locks it again and again starves the others.
        if self.waiting.load(Ordering::Relaxed) > 0 {
            let patience = sched::quick_monotonic_ns() + SPIN_NS;
            while self.waiting.load(Ordering::Relaxed) > 0 && sched::quick_monotonic_ns() < patience {
                std::hint::spin_loop();
            }
        }
        let mut service = lock(&self.service);
        let mut served = 0;
        if !self.take_owner_lock(200) {
            return (0, 0);
        }
        let got = self.read_events(&mut service, tier);
        served += got;
        self.bring_moved(&mut service, tier);
        let mut waiting = std::mem::take(&mut service.pending);
        let count = waiting.len();
        waiting.retain_mut(|fault| match self.serve_fault(&mut service, tier, read_ahead, fault) {
            Served::Done => {
                let ns = sched::quick_monotonic_ns().saturating_sub(fault.since_ns);
                self.counters.fault_ns.fetch_add(ns, Ordering::Relaxed);
                self.counters.fault_ns_max.fetch_max(ns, Ordering::Relaxed);
                let bucket = (64 - (ns / 1000).leading_zeros() as usize).min(FAULT_BUCKETS - 1);
                self.counters.fault_us[bucket].fetch_add(1, Ordering::Relaxed);
                served += 1;
                false
            }
            Served::Left => {
                served += 1;
                false
            }
            Served::Again => true,
        });
        // All of them waiting for memory: no use in asking again at once.
        let stuck = count > 0 && waiting.len() == count && got == 0;
        service.pending.append(&mut waiting);
        self.table.unlock();
        if stuck {
            drop(service);
            std::thread::sleep(Duration::from_micros(200));
            return (0, 0);
        }
        (served, service.faulter)
    }
}

#[cfg(test)]
mod tests {
    use super::super::PAGE;
    use super::super::Pending;
    use super::super::tests::{await_moved, own};
    use super::*;
    use crate::cold::config::Config;
    use crate::cold::tiers::Tiers;
    use crate::memory_limits::tests::limited;
    use pagefold_os::PAGE_SIZE;
    use pagefold_tier::Effort;

    /// The evictor cannot help a client that is being parked: it is called once, and not at each try of the fault.
    #[test]
    fn a_fault_that_waits_for_memory_calls_the_evictor_once() {
        let Some((mut client, memory)) = own(0, 1) else { return };
        let dir = tempfile::tempdir().unwrap();
        client.limits = limited(dir.path(), 999, 1000);
        let cold = Tiers::new(Config::default(), &dir.path().join("s"));
        let group = cold.group(&(0, "default".into()), 4 << 20).unwrap();
        lock(&client.service).pending.push(Pending { addr: memory.addr(), write: true, since_ns: 0, want: 0 });
        let client = Arc::new(client);
        std::thread::scope(|scope| {
            scope.spawn(|| client.run(&group));
            while client.table.head().heartbeat.load(Ordering::Relaxed) < 100 {
                std::thread::yield_now();
            }
            client.gone.store(true, Ordering::Release);
        });
        assert_eq!(group.bell.load(Ordering::Relaxed), 1);
    }

    /// A page was moved while it was evicted, and the thread that moved it had no processor when the event was read.
    #[test]
    fn a_moved_page_comes_in_without_another_event() {
        let Some((client, memory)) = own(0, 2) else { return };
        let dir = tempfile::tempdir().unwrap();
        let cold = Tiers::new(Config::default(), &dir.path().join("s"));
        let group = cold.group(&(0, "default".into()), 4 << 20).unwrap();
        let [to, from] = [memory.addr() + PAGE, 1 << 30];
        group.tier.store(client.client_id, from / PAGE, &[7; PAGE_SIZE], Effort::Fast).unwrap();
        let client = Arc::new(client);
        let came = std::thread::scope(|scope| {
            scope.spawn(|| client.run(&group));
            while client.table.head().heartbeat.load(Ordering::Relaxed) == 0 {
                std::thread::yield_now();
            }
            await_moved(&client, from, to);
            let came = (0..10_000).any(|_| {
                std::thread::sleep(Duration::from_millis(1));
                !lock(&client.service).is_moving()
            });
            client.gone.store(true, Ordering::Release);
            came
        });
        assert!(came);
        // SAFETY: there, mapped and ours.
        assert_eq!(unsafe { (to as *const u8).read_volatile() }, 7);
    }
}
