//! Books and world are made to agree, after another daemon's death or an agent's new greeting.

use super::{Client, PAGE};
use crate::server::lock;
use pagefold_agent::cold_table::{self, OUT, PACT_DAEMON};
use pagefold_os::{Range, pagemap};
use pagefold_tier::Tier;
use std::sync::atomic::Ordering;

impl Client {
    /// Makes books and world agree after another daemon's death or an agent's new greeting: what that one began is void.
    ///
    /// Entries of pages that are not out are discarded; pages that are out and here are here; everybody who waits for an
    /// event that died with its reader faults again.
    pub(in crate::cold) fn reconcile(&self, tier: &Tier) -> bool {
        let mut service = lock(&self.service);
        // A dead daemon may have held it. An agent that holds it will give it back soon.
        let head = self.table.head();
        let _ = head.pact.compare_exchange(PACT_DAEMON, 0, Ordering::AcqRel, Ordering::Relaxed);
        if !self.take_pact(2_000_000) {
            return false;
        }
        head.epoch.fetch_add(1, Ordering::SeqCst);
        // A discard that is under way: the event may have died with its reader.
        let end = head.void_end.load(Ordering::SeqCst);
        let start = head.void_start.load(Ordering::Relaxed);
        if start < end && end < 1 << 47 {
            self.forget(&mut service, tier, Range { start, end });
        }
        self.find_present(tier);
        let mut from = 0;
        loop {
            let stored = tier.neighbours(self.region, from, 4096);
            let Some(last) = stored.last() else { break };
            from = last + 1;
            for page in stored {
                if self.table.state(page * PAGE) != OUT && !service.is_awaited(page) {
                    tier.discard(self.region, page..page + 1);
                }
            }
        }
        // The count may have been between two stores.
        let mut out = 0;
        self.table.for_each_run(0, u64::MAX >> 1, OUT, |start, end| out += (end - start) / PAGE);
        head.out.store(out, Ordering::Relaxed);
        self.tell_moving(&service);
        self.table.free_pact();
        drop(service);
        self.wake_all();
        true
    }

    /// Pages that were copied in, but not yet called resident, by a daemon that died.
    fn find_present(&self, tier: &Tier) {
        let query = pagemap::Query {
            // Not what is in swap: marks without a page count as that.
            all_of: pagemap::PRESENT,
            report: pagemap::PRESENT,
            ..Default::default()
        };
        let mut found = [pagemap::Region::default(); 64];
        let mut failed = false;
        // Run by run: a table may claim more of them than we want to hold.
        self.table.for_each_run(0, u64::MAX >> 1, OUT, |start, end| {
            let mut start = start;
            while start < end && !failed {
                let Ok((count, walked)) = pagemap::scan(&self.pagemap, Range { start, end }, query, &mut found) else {
                    failed = true;
                    return;
                };
                for region in &found[..count] {
                    self.settle(tier, region.start / PAGE, region.end / PAGE);
                }
                if walked <= start {
                    break;
                }
                start = walked;
            }
        });
    }

    /// Wakes everybody who waits in memory of ours; who must go on waiting faults again.
    fn wake_all(&self) {
        self.table.for_each_chunk(|base, _| {
            let _ = self.uffd.wake(Range { start: base, end: base + cold_table::CHUNK_BYTES });
        });
        // Fresh memory of registered ranges may lie in chunks that the table does not have.
        let everything = Range { start: 1 << 20, end: (1 << 47) - PAGE };
        let _ = self.uffd.wake(everything);
    }
}
