//! Tier, residency map and memory are made to agree, after another daemon's death or an agent's new greeting.

use super::events::AWAITED;
use super::{Client, PAGE, Service};
use pagefold_os::sync::lock;
use pagefold_os::{Range, pagemap, sched};
use pagefold_protocol::residency_map::{self, EVICTED, OWNER_DAEMON};
use pagefold_tier::Tier;
use std::collections::HashSet;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// A discard that is under way is waited for so long, in nanoseconds: one that fails leaves what it did not come to.
const VOID_NS: u64 = 100_000_000;

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
        self.finish_move(&mut service, tier);
        let patience = sched::quick_monotonic_ns() + VOID_NS;
        loop {
            // A discarding thread waits until its event is read.
            self.read_events(&mut service, tier);
            let is_late = sched::quick_monotonic_ns() > patience;
            if self.obey_void(&mut service, tier, is_late) || is_late {
                break;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
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

    /// A discard of the program's, of which the event may have died with its reader, is obeyed when it is done, or when it
    /// is `late`; false if one is under way that is not done.
    pub(crate) fn obey_void(&self, service: &mut Service, tier: &Tier, late: bool) -> bool {
        let Some((range, is_done)) = self.table.head().discarding() else { return true };
        if is_done || late {
            self.forget(service, tier, range);
        }
        is_done
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
        let everything = Range { start: 1 << 20, end: (1 << 47) - PAGE };
        let _ = self.uffd.wake(everything);
    }
}

#[cfg(test)]
mod tests {
    use super::super::faults::ReadAhead;
    use super::super::tests::own;
    use super::*;
    use pagefold_os::{PAGE_SIZE, uffd};

    /// A daemon dies while the program discards two pages, and the kernel refuses the second: it is sealed, say.
    #[test]
    fn a_discard_that_fails_takes_no_more_than_the_kernel_did() {
        let Some((client, memory)) = own(uffd::FEATURE_EVENT_REMOVE, 2) else { return };
        let tier = Tier::create(pagefold_tier::Config { bytes_max: 4 << 20, ..Default::default() }, None).unwrap();
        let pages = [memory.addr(), memory.addr() + PAGE];
        for addr in pages {
            tier.store(client.client_id, addr / PAGE, &[7; PAGE_SIZE], pagefold_tier::Effort::Fast).unwrap();
            client.table.find_or_add(addr).unwrap();
            client.table.set_state(addr, EVICTED);
        }
        let both = Range::pages_from(pages[0], 2);
        client.table.head().set_discarding(both, false);
        std::thread::scope(|scope| {
            let fails = scope.spawn(|| {
                // SAFETY: the page lies in this test's mapping, and no reference to it exists.
                let _ = unsafe { pagefold_os::mem::advise(pages[0], PAGE, libc::MADV_DONTNEED) };
                client.table.head().set_discarding(Range { start: 0, end: 0 }, false);
            });
            assert!(client.reconcile(&tier));
            while !fails.is_finished() {
                client.serve(&tier, &mut ReadAhead::default());
            }
        });
        let is_out = |addr| client.table.state(addr) == EVICTED && tier.contains(client.client_id, addr / PAGE);
        assert_eq!(pages.map(is_out), [false, true]);
    }

    /// Its event has died with its reader.
    #[test]
    fn a_discard_that_is_done_is_obeyed() {
        let Some((client, memory)) = own(0, 1) else { return };
        let tier = Tier::create(pagefold_tier::Config { bytes_max: 4 << 20, ..Default::default() }, None).unwrap();
        let page = Range::pages_from(memory.addr(), 1);
        client.table.find_or_add(page.start).unwrap();
        client.table.set_state(page.start, EVICTED);
        client.table.head().set_discarding(page, false);
        client.serve(&tier, &mut ReadAhead::default());
        let under_way = client.table.state(page.start);
        client.table.head().set_discarding(page, true);
        client.serve(&tier, &mut ReadAhead::default());
        assert_eq!((under_way, client.table.state(page.start)), (EVICTED, residency_map::RESIDENT));
    }
}
