//! A fault is answered: by zeros where nothing ever was, else by the page that is out, and by its neighbours.
//!
//! The faulting thread gets its page first. Neighbours follow as far as the pattern of faults goes, half of a large window
//! by the prefetcher. While the program walks through them the thread loads the pages that follow (`ReadAhead`).

use super::{CLUSTER_PAGES, Client, PAGE, Pending, Served, Service};
use pagefold_os::{Errno, PAGE_SIZE, Page, Range, fd};
use pagefold_protocol::residency_map::{DISCARDED, EVICTED, FROZEN, RESIDENT};
use pagefold_tier::Tier;
use std::sync::atomic::Ordering;

/// A window of so many pages or more is brought back by two hands: decompression is what takes the time.
const SHARED_FROM: u64 = 16;
/// Pages that a waking client gets with the one that it waits for, if it went on with them at the wakings before.
const FOLLOWING_PAGES: usize = 4;
/// Pages read ahead before the thread looks for new faults.
const READ_AHEAD_AT_ONCE: usize = 8;

/// Pages that the fault thread has loaded from the tier before their faults, while the program walks through the last
/// window.
///
/// Loading needs no lock. When a page is used, the thread checks that no page was evicted since and that this one still is.
#[derive(Default)]
pub(crate) struct ReadAhead {
    /// The pages of the probable next window.
    wanted: std::ops::Range<u64>,
    /// The page of `pages[0]`.
    first: u64,
    loaded: Vec<bool>,
    pages: Vec<Page>,
    /// [`Client::leaving`] before they were loaded.
    leaving: u64,
}

impl ReadAhead {
    /// The loaded pages from `page` on, for as long as `is_wanted`.
    fn run(&self, page: u64, is_wanted: impl Fn(u64) -> bool) -> &[Page] {
        let Some(place) = page.checked_sub(self.first).map(|place| place as usize) else { return &[] };
        let from = self.loaded.get(place..).unwrap_or_default();
        let len = from.iter().zip(page..).take_while(|(loaded, page)| **loaded && is_wanted(*page)).count();
        &self.pages[place.min(self.pages.len())..][..len]
    }
}

impl Client {
    pub(crate) fn serve_fault(
        &self,
        service: &mut Service,
        tier: &Tier,
        read_ahead: &mut ReadAhead,
        fault: &mut Pending,
    ) -> Served {
        let addr = fault.addr;
        if service.moving.contains_key(&addr) {
            return Served::Again;
        }
        match self.table.state(addr) {
            EVICTED => self.fault_in(service, tier, read_ahead, fault),
            FROZEN | DISCARDED => Served::Left,
            _ => self.fault_in_zeros(service, fault),
        }
    }

    /// A page that never was, or was discarded: zeros, with its absent neighbours if the program walks upwards.
    fn fault_in_zeros(&self, service: &mut Service, fault: &mut Pending) -> Served {
        let &mut Pending { addr, write, .. } = fault;
        if fault.want == 0 {
            self.counters.zero_faults.fetch_add(1, Ordering::Relaxed);
            fault.want = service.zeros.fault(addr / PAGE);
        }
        let mut end = addr + PAGE;
        while end < addr + fault.want * PAGE
            && self.table.state(end) == RESIDENT
            && (service.moving.is_empty() || !service.moving.contains_key(&end))
        {
            end += PAGE;
        }
        let mut from = addr;
        if write {
            if self.reserve_pages(1) == 0 {
                return self.wait_for_memory();
            }
            // SAFETY: the page of zeros is ours.
            let (_, error) = unsafe { self.uffd.copy(addr, service.zero.as_ptr() as u64, PAGE, 0) };
            match error {
                Some(Errno(libc::EAGAIN)) => return Served::Again,
                Some(Errno(libc::ENOMEM)) => return self.wait_for_memory(),
                None => {}
                Some(_) => {
                    let _ = self.uffd.wake(Range::pages_from(addr, 1));
                    return Served::Done;
                }
            }
            from += PAGE;
            if from == end {
                return Served::Done;
            }
        }
        let (done, error) = self.uffd.zero(Range { start: from, end }, 0);
        if done > 0 || write {
            return Served::Done;
        }
        match error {
            Some(Errno(libc::EAGAIN)) => Served::Again,
            Some(Errno(libc::ENOMEM)) => self.wait_for_memory(),
            _ => {
                // There already; or marked for write protection, which a copy takes for empty; or the run lies in
                // several mappings.
                // SAFETY: the page of zeros is ours.
                let (_, error) = unsafe { self.uffd.copy(addr, service.zero.as_ptr() as u64, PAGE, 0) };
                match error {
                    Some(Errno(libc::EAGAIN)) => return Served::Again,
                    Some(Errno(libc::ENOMEM)) => return self.wait_for_memory(),
                    _ => {}
                }
                let _ = self.uffd.wake(Range::pages_from(addr, 1));
                Served::Done
            }
        }
    }

    /// How many of `want` pages may come back now, within the memory limits; they count as used.
    ///
    /// A thread that pauses evictions until its pages are back would wait for itself, so it gets all of them. The agent
    /// reads from the residency map how much memory is left.
    pub(crate) fn reserve_pages(&self, want: u64) -> u64 {
        let reserved = self.limits.reserve_pages(want);
        let head = self.table.head();
        head.set_headroom(self.limits.free());
        if head.paused_evictions.load(Ordering::SeqCst) > 0 { want } else { reserved }
    }

    /// The client has reached its memory limit, or is about to. The fault waits until other pages are evicted.
    pub(crate) fn wait_for_memory(&self) -> Served {
        self.lacks_memory.store(true, Ordering::Relaxed);
        Served::Again
    }

    /// A page that is out comes back, and then its neighbours, as many as the pattern of faults says.
    fn fault_in(&self, service: &mut Service, tier: &Tier, read_ahead: &mut ReadAhead, fault: &mut Pending) -> Served {
        let (addr, page) = (fault.addr, fault.addr / PAGE);
        if fault.want == 0 {
            self.counters.refaults.fetch_add(1, Ordering::Relaxed);
            fault.want = service.window.fault(page);
        }
        let want = fault.want.min(CLUSTER_PAGES as u64);
        let want = match self.reserve_pages(want) {
            0 => return self.wait_for_memory(),
            reserved if reserved < want => 1,
            _ => want,
        };
        let first = page / want * want;
        self.wakings.note_fault(first..first + want, fault.since_ns);
        // The page itself first: the faulting thread goes on while its neighbours come.
        if let Err(error) = tier.load(self.client_id, page, &mut service.cluster[0]) {
            return self.lose(tier, addr, &error);
        }
        if !self.copy_run(tier, page, page + 1, service.cluster[0].as_ptr() as u64).contains(&page) {
            return Served::Again;
        }
        // A waking client goes on as before: while it uses this page the next ones come.
        let next = self.wakings.next_after(page, FOLLOWING_PAGES);
        if !next.is_empty() && self.reserve_pages(next.len() as u64) == next.len() as u64 {
            for page in next {
                if self.table.state(page * PAGE) == EVICTED
                    && tier.load_quietly(self.client_id, page, &mut service.cluster[0])
                {
                    self.copy_run(tier, page, page + 1, service.cluster[0].as_ptr() as u64);
                }
            }
        }
        // The other half goes to the prefetcher, if it is free.
        let (mut at, mut end) = (first, first + want);
        if want >= SHARED_FROM {
            let middle = first + want / 2;
            let other = if page < middle { middle..end } else { first..middle };
            if self.prefetcher.offer(self.client_id, other) {
                (at, end) = if page < middle { (first, middle) } else { (middle, end) };
            }
        }
        if read_ahead.leaving != self.leaving.load(Ordering::SeqCst) {
            // A page that came and went again since has another content.
            read_ahead.loaded.clear();
        }
        while at < end {
            let ready = read_ahead.run(at, |page| page < end && self.table.state(page * PAGE) == EVICTED);
            if !ready.is_empty() {
                let len = ready.len() as u64;
                if self.copy_run(tier, at, at + len, ready.as_ptr() as u64).end < at + len {
                    break;
                }
                at += len;
                continue;
            }
            // Only evicted pages are loaded: other entries are stale. A page that cannot be read is left to its own fault.
            let mut len = 0;
            while at + len < end
                && self.table.state((at + len) * PAGE) == EVICTED
                && tier.load_quietly(self.client_id, at + len, &mut service.cluster[len as usize])
            {
                len += 1;
            }
            if len > 0 && self.copy_run(tier, at, at + len, service.cluster[0].as_ptr() as u64).end < at + len {
                break;
            }
            at += len.max(1);
        }
        if want == CLUSTER_PAGES as u64 {
            // Our half of the next window.
            read_ahead.wanted = first + want..first + want + want / 2;
        }
        Served::Done
    }

    /// Loads the pages of the probable next window until a fault comes.
    pub(crate) fn fill_read_ahead(&self, tier: &Tier, read_ahead: &mut ReadAhead) {
        let wanted = std::mem::take(&mut read_ahead.wanted);
        if wanted.is_empty() {
            return;
        }
        read_ahead.leaving = self.leaving.load(Ordering::SeqCst);
        read_ahead.first = wanted.start;
        read_ahead.loaded.clear();
        read_ahead.pages.resize(CLUSTER_PAGES / 2, [0; PAGE_SIZE]);
        for (page, place) in wanted.zip(&mut read_ahead.pages) {
            if read_ahead.loaded.len() % READ_AHEAD_AT_ONCE == READ_AHEAD_AT_ONCE - 1 {
                let mut poll = [libc::pollfd { fd: self.uffd.fd().raw(), events: libc::POLLIN, revents: 0 }];
                if fd::poll(&mut poll, 0) != Ok(0) {
                    return;
                }
            }
            read_ahead
                .loaded
                .push(self.table.state(page * PAGE) == EVICTED && tier.load_quietly(self.client_id, page, place));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::own;
    use super::*;
    use crate::memory_limits::tests::limited;
    use pagefold_os::sched;
    use pagefold_os::sync::lock;

    /// A fault that has to wait for room counts once, and for as long as it waited.
    #[test]
    fn a_fault_that_is_tried_again_is_one() {
        let Some((mut client, memory)) = own(0, 1) else { return };
        let tier = Tier::create(pagefold_tier::Config { bytes_max: 4 << 20, ..Default::default() }, None).unwrap();
        let dir = tempfile::tempdir().unwrap();
        client.limits = limited(dir.path(), 999, 1000);
        const WAITED_NS: u64 = 50_000_000;
        let since_ns = sched::quick_monotonic_ns() - WAITED_NS;
        lock(&client.service).pending.push(Pending { addr: memory.addr(), write: true, since_ns, want: 0 });
        let serve = || {
            client.serve(&tier, &mut ReadAhead::default());
            lock(&client.service).pending.len()
        };
        assert!((0..10).all(|_| serve() == 1), "there was no room");
        limited(dir.path(), 100, 1000);
        assert_eq!(serve(), 0);
        let [faults, ns] =
            [&client.counters.zero_faults, &client.counters.fault_ns].map(|one| one.load(Ordering::Relaxed));
        assert!(faults == 1 && ns >= WAITED_NS, "{faults} faults, {ns} ns");
    }

    #[test]
    fn read_ahead_ends_at_the_first_missing_page() {
        let mut read_ahead = ReadAhead { first: 64, ..ReadAhead::default() };
        let all = |_| true;
        assert!(read_ahead.run(64, all).is_empty());
        read_ahead.pages = (0..4).map(|page| [page; PAGE_SIZE]).collect();
        read_ahead.loaded = vec![true, true, false, true];
        let run = |page: u64, is_wanted: &dyn Fn(u64) -> bool| -> Vec<u8> {
            read_ahead.run(page, is_wanted).iter().map(|page| page[0]).collect()
        };
        assert_eq!(run(64, &all), [0, 1]);
        assert_eq!(run(65, &all), [1]);
        assert!(run(66, &all).is_empty());
        assert_eq!(run(67, &all), [3]);
        assert!([63, 68, 1000].iter().all(|page| run(*page, &all).is_empty()));
        assert_eq!(run(64, &|page| page != 65), [0]);
    }
}
