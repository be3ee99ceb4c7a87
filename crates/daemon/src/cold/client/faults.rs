//! A fault is answered: by zeros where nothing ever was, else by the page that is out, and by its neighbours.
//!
//! The faulting thread gets its page first. Neighbours follow as far as the pattern of faults goes, half of a large window by the
//! prefetcher. While the program walks through them the thread loads what comes next (`Ahead`).

use super::{CLUSTER_PAGES, Client, PAGE, Pending, Served, Service};
use pagefold_os::{Errno, PAGE_SIZE, Page, Range, fd};
use pagefold_protocol::residency_map::{DISCARDED, EVICTED, FROZEN, RESIDENT};
use pagefold_tier::Tier;
use std::sync::atomic::Ordering;

/// A window of so many pages or more is brought back by two hands: decompression is what takes the time.
const SHARED_FROM: u64 = 16;
/// Pages loaded ahead before the thread looks for new faults.
const AHEAD_AT_ONCE: usize = 8;

/// What the client's thread has loaded ahead, while the program walks through what came last.
///
/// Loading needs no lock; that nothing left in the meantime and that a page is still out is looked at when it is used.
#[derive(Default)]
pub(crate) struct Ahead {
    /// What the next fault will probably want.
    wanted: std::ops::Range<u64>,
    /// The first page that is here.
    first: u64,
    loaded: Vec<bool>,
    pages: Vec<Page>,
    /// [`Client::leaving`] before they were loaded.
    leaving: u64,
}

impl Ahead {
    /// Pages from `page` on that are here, for as long as `is_wanted`.
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
        ahead: &mut Ahead,
        fault: &mut Pending,
    ) -> Served {
        let addr = fault.addr;
        if service.moving.contains_key(&addr) {
            return Served::Again;
        }
        match self.table.state(addr) {
            EVICTED => self.bring_fault(service, tier, ahead, fault),
            FROZEN | DISCARDED => Served::Left,
            _ => self.bring_zero(service, fault),
        }
    }

    /// A page that never was, or was discarded: zeros, with its absent neighbours if the program walks upwards.
    fn bring_zero(&self, service: &mut Service, fault: &mut Pending) -> Served {
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
            if self.grant(1) == 0 {
                return self.starve();
            }
            // SAFETY: the page of zeros is ours.
            let (_, error) = unsafe { self.uffd.copy(addr, service.zero.as_ptr() as u64, PAGE, 0) };
            match error {
                Some(Errno(libc::EAGAIN)) => return Served::Again,
                Some(Errno(libc::ENOMEM)) => return self.starve(),
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
            Some(Errno(libc::ENOMEM)) => self.starve(),
            _ => {
                // There already; or marked for write protection, which a copy takes for empty; or the run lies in
                // several mappings.
                // SAFETY: the page of zeros is ours.
                let (_, error) = unsafe { self.uffd.copy(addr, service.zero.as_ptr() as u64, PAGE, 0) };
                match error {
                    Some(Errno(libc::EAGAIN)) => return Served::Again,
                    Some(Errno(libc::ENOMEM)) => return self.starve(),
                    _ => {}
                }
                let _ = self.uffd.wake(Range::pages_from(addr, 1));
                Served::Done
            }
        }
    }

    /// How many of `want` pages may come back now.
    ///
    /// A thread that pauses evictions until its pages are back would wait for itself: it gets them in any case. The agent is told how
    /// much memory is left.
    pub(crate) fn grant(&self, want: u64) -> u64 {
        let granted = self.limits.grant(want);
        let head = self.table.head();
        head.set_headroom(self.limits.free());
        if head.paused_evictions.load(Ordering::SeqCst) > 0 { want } else { granted }
    }

    /// The kernel gives the client no memory, or would soon: its limit is reached. The access waits until something else
    /// went out.
    pub(crate) fn starve(&self) -> Served {
        self.starved.store(true, Ordering::Relaxed);
        Served::Again
    }

    /// A page that is out comes back, and then its neighbours, as many as the pattern of faults says.
    fn bring_fault(&self, service: &mut Service, tier: &Tier, ahead: &mut Ahead, fault: &mut Pending) -> Served {
        let (addr, page) = (fault.addr, fault.addr / PAGE);
        if fault.want == 0 {
            self.counters.refaults.fetch_add(1, Ordering::Relaxed);
            fault.want = service.window.fault(page);
        }
        let want = fault.want.min(CLUSTER_PAGES as u64);
        let want = match self.grant(want) {
            0 => return self.starve(),
            granted if granted < want => 1,
            _ => want,
        };
        let first = page / want * want;
        // The page itself first: the faulting thread goes on while its neighbours come.
        if let Err(error) = tier.load(self.region, page, &mut service.cluster[0]) {
            return self.lose(tier, addr, &error);
        }
        if !self.copy_run(tier, page, page + 1, service.cluster[0].as_ptr() as u64).contains(&page) {
            return Served::Again;
        }
        // The other half goes to the second hand, if it is free.
        let (mut at, mut end) = (first, first + want);
        if want >= SHARED_FROM {
            let middle = first + want / 2;
            let other = if page < middle { middle..end } else { first..middle };
            if self.prefetcher.offer(self.region, other) {
                (at, end) = if page < middle { (first, middle) } else { (middle, end) };
            }
        }
        if ahead.leaving != self.leaving.load(Ordering::SeqCst) {
            // A page that came and went again since has another content.
            ahead.loaded.clear();
        }
        while at < end {
            let ready = ahead.run(at, |page| page < end && self.table.state(page * PAGE) == EVICTED);
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
                && tier.load_quietly(self.region, at + len, &mut service.cluster[len as usize])
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
            ahead.wanted = first + want..first + want + want / 2;
        }
        Served::Done
    }

    /// Loads what the next fault will probably want, until a fault comes.
    pub(crate) fn load_ahead(&self, tier: &Tier, ahead: &mut Ahead) {
        let wanted = std::mem::take(&mut ahead.wanted);
        if wanted.is_empty() {
            return;
        }
        ahead.leaving = self.leaving.load(Ordering::SeqCst);
        ahead.first = wanted.start;
        ahead.loaded.clear();
        ahead.pages.resize(CLUSTER_PAGES / 2, [0; PAGE_SIZE]);
        for (page, place) in wanted.zip(&mut ahead.pages) {
            if ahead.loaded.len() % AHEAD_AT_ONCE == AHEAD_AT_ONCE - 1 {
                let mut poll = [libc::pollfd { fd: self.uffd.fd().raw(), events: libc::POLLIN, revents: 0 }];
                if fd::poll(&mut poll, 0) != Ok(0) {
                    return;
                }
            }
            ahead.loaded.push(self.table.state(page * PAGE) == EVICTED && tier.load_quietly(self.region, page, place));
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
            client.serve(&tier, &mut Ahead::default());
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
    fn what_was_loaded_ahead_ends_where_something_is_missing() {
        let mut ahead = Ahead { first: 64, ..Ahead::default() };
        let all = |_| true;
        assert!(ahead.run(64, all).is_empty());
        ahead.pages = (0..4).map(|page| [page; PAGE_SIZE]).collect();
        ahead.loaded = vec![true, true, false, true];
        let run = |page: u64, is_wanted: &dyn Fn(u64) -> bool| -> Vec<u8> {
            ahead.run(page, is_wanted).iter().map(|page| page[0]).collect()
        };
        assert_eq!(run(64, &all), [0, 1]);
        assert_eq!(run(65, &all), [1]);
        assert!(run(66, &all).is_empty());
        assert_eq!(run(67, &all), [3]);
        assert!([63, 68, 1000].iter().all(|page| run(*page, &all).is_empty()));
        assert_eq!(run(64, &|page| page != 65), [0]);
    }
}
