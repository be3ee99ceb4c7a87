//! Tier, residency map and memory are made to agree, after another daemon's death or an agent's new greeting.

use super::events::AWAITED;
use super::{Client, PAGE};
use pagefold_os::sync::lock;
use pagefold_os::{ADDRESS_END, Range, pagemap};
use pagefold_protocol::residency_map::{self, EVICTED, OWNER_DAEMON};
use pagefold_tier::Tier;
use std::collections::HashSet;
use std::sync::atomic::Ordering;

impl Client {
    /// Makes books and world agree after another daemon's death or an agent's new greeting: what that one began is void.
    ///
    /// Entries of pages that are not evicted are discarded. Pages that are marked evicted and are present become resident.
    /// Every thread that waits for an event that died with its reader faults again.
    pub(crate) fn reconcile(&self, tier: &Tier) -> bool {
        let mut service = lock(&self.service);
        // A dead daemon may have held it. An agent that holds it will give it back soon.
        let head = self.table.head();
        let _ = head.owner.compare_exchange(OWNER_DAEMON, 0, Ordering::AcqRel, Ordering::Relaxed);
        if !self.take_owner_lock(2_000_000) {
            return false;
        }
        head.epoch.fetch_add(1, Ordering::SeqCst);
        // Before any event: those are of what was moved by then.
        self.find_moving(&mut service, tier);
        self.obey_left(&mut service, tier);
        self.read_events(&mut service, tier);
        self.find_present(tier);
        // The old names of those that could get no other.
        let awaited: HashSet<u64> = service.moving.values().map(|at| at / PAGE).collect();
        let mut from = 0;
        while let stored = tier.neighbours(self.client_id, from, 4096)
            && let Some(last) = stored.last().filter(|_| from < AWAITED / PAGE)
        {
            from = last + 1;
            for page in stored {
                if self.table.state(page * PAGE) != EVICTED && !awaited.contains(&page) {
                    tier.discard(self.client_id, page..page + 1);
                }
            }
        }
        // The count may have been between two stores.
        let mut out = 0;
        self.table.for_each_run(0, u64::MAX >> 1, EVICTED, |start, end| out += (end - start) / PAGE);
        head.evicted.store(out, Ordering::Relaxed);
        self.tell_moving(&service);
        self.table.unlock();
        drop(service);
        self.wake_all();
        true
    }

    /// Pages that were copied in, but not yet called resident, by a daemon that died. Those of which the kernel does not
    /// tell are found when they are brought: a copy does not replace what is there.
    fn find_present(&self, tier: &Tier) {
        let query = pagemap::Query {
            // Not what is in swap: marks without a page count as that.
            all_of: pagemap::PRESENT,
            report: pagemap::PRESENT,
            ..Default::default()
        };
        let mut found = [pagemap::ScannedRange::default(); 64];
        let mut failed = false;
        // Run by run: a table may claim more of them than we want to hold.
        self.table.for_each_run(0, u64::MAX >> 1, EVICTED, |start, end| {
            let mut start = start;
            while start < end && !failed {
                let Ok((count, walked)) = pagemap::scan(&self.pagemap, Range { start, end }, query, &mut found) else {
                    failed = true;
                    return;
                };
                for scanned in &found[..count] {
                    self.settle(tier, scanned.start / PAGE, scanned.end / PAGE);
                }
                if walked <= start {
                    break;
                }
                start = walked;
            }
        });
    }

    /// Wakes every thread that waits in registered memory; a thread that must go on waiting faults again.
    fn wake_all(&self) {
        self.table.for_each_chunk(|base, _| {
            let _ = self.uffd.wake(Range { start: base, end: base + residency_map::CHUNK_BYTES });
        });
        // Fresh memory of registered ranges may lie in chunks that the table does not have.
        let everything = Range { start: 1 << 20, end: ADDRESS_END - PAGE };
        let _ = self.uffd.wake(everything);
    }
}

#[cfg(test)]
mod tests {
    use super::super::event_journal::EVENTS;
    use super::super::tests::{own, successor};
    use super::*;
    use pagefold_os::uffd;
    use pagefold_os::{PAGE_SIZE, fd, mem};
    use pagefold_protocol::residency_map::RESIDENT;

    fn tier() -> Tier {
        Tier::create(pagefold_tier::Config { bytes_max: 4 << 20, ..Default::default() }, None).unwrap()
    }

    fn evict(client: &Client, tier: &Tier, addr: u64, byte: u8) {
        tier.store(client.client_id, addr / PAGE, &[byte; PAGE_SIZE], pagefold_tier::Effort::Fast).unwrap();
        client.table.find_or_add(addr).unwrap();
        client.table.set_state(addr, EVICTED);
    }

    /// Reads the event of `call`, and dies.
    fn read_and_die(client: &Client, call: impl FnOnce() + Send) {
        std::thread::scope(|scope| {
            let calls = scope.spawn(call);
            let mut polls = [libc::pollfd { fd: client.uffd.fd().raw(), events: libc::POLLIN, revents: 0 }];
            assert_eq!(fd::poll(&mut polls, 60_000), Ok(1), "no event");
            assert_eq!(lock(&client.service).journal.read(&client.uffd), 1);
            // The kernel lets it go on.
            calls.join().unwrap();
        });
    }

    #[test]
    fn a_discard_that_a_dead_daemon_had_read_is_obeyed() {
        let Some((client, memory)) = own(uffd::FEATURE_EVENT_REMOVE, 2) else { return };
        let (tier, pages) = (tier(), [memory.addr(), memory.addr() + PAGE]);
        pages.iter().for_each(|addr| evict(&client, &tier, *addr, 7));
        read_and_die(&client, || {
            // SAFETY: the page lies in this test's mapping, and no reference to it exists.
            unsafe { mem::advise(pages[0], PAGE, libc::MADV_DONTNEED) }.unwrap();
        });
        assert_eq!(client.table.state(pages[0]), EVICTED, "it had obeyed");
        let client = successor(client, &tier);
        assert_eq!(pages.map(|addr| client.table.state(addr)), [RESIDENT, EVICTED]);
        assert_eq!(pages.map(|addr| tier.contains(client.client_id, addr / PAGE)), [false, true]);
        assert!((0..EVENTS).all(|place| lock(&client.service).journal.event(place).is_none()));
    }

    #[test]
    fn a_move_that_a_dead_daemon_had_read_is_obeyed() {
        let Some((client, memory)) = own(uffd::FEATURE_EVENT_REMAP, 2) else { return };
        let target = mem::Mapping::anonymous(PAGE_SIZE).unwrap();
        let (tier, from) = (tier(), memory.addr() + PAGE);
        evict(&client, &tier, from, 7);
        read_and_die(&client, || {
            // SAFETY: the page moves to a mapping of this test's, and no reference to either exists.
            unsafe { mem::remap(from, PAGE, PAGE, libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED, target.addr()) }.unwrap();
        });
        let client = successor(client, &tier);
        client.bring_moved(&mut lock(&client.service), &tier);
        assert!(!lock(&client.service).is_moving());
        // SAFETY: there, mapped and ours.
        assert_eq!(unsafe { target.as_ptr().read_volatile() }, 7);
    }

    /// The number of its descriptor was the dead daemon's.
    #[test]
    fn a_fork_that_a_dead_daemon_had_read_closes_nothing_of_its_successors() {
        let Some((client, memory)) = own(0, 1) else { return };
        let tier = tier();
        evict(&client, &tier, memory.addr(), 7);
        let ours = client.pagemap.duplicate().unwrap();
        lock(&client.service).journal.put(5, [uffd::EVENT_FORK.into(), ours.raw() as u64, 0, 0]);
        let client = successor(client, &tier);
        assert!(lock(&client.service).journal.event(5).is_none());
        assert!(pagefold_os::pagemap::is_one(&ours));
    }
}
