//! Evicting pages: copied and stored while the program runs, then frozen, compared and dropped.
//!
//! All of it happens with `evict_state` locked and signals blocked, for a short time each. `park_idle` finds idle pages
//! by the marks of the page tables; `park` evicts the pages that it is given.

use super::super::decoder::SpinBudget;
use super::super::report::Parked;
use super::{
    BATCH, CHUNK, CLIENT, EVICTED, EvictState, FREEZE, RESIDENT, RESIDENT_STORED, Shared, for_runs, map_dontfork,
};
use crate::config::Effort;
use pagefold_os::fd::Fd;
use pagefold_os::signal::Blocked;
use pagefold_os::sync::lock;
use pagefold_os::{Errno, PAGE_SIZE, Page, Range as Addresses, mem, pagemap, syscall, uffd};
use std::ops::Range;
use std::sync::atomic::Ordering;

/// The age of a resident page: calls of `park_idle` since it was written. Of an evicted page: since its eviction.
const AGE: u8 = 0x1f;
/// One strike: the page was loaded too soon after its eviction. Strikes are counted above the age.
const STRIKE: u8 = 0x20;
const STRIKES_MAX: u8 = 3;

impl Shared {
    /// Discards the entry of a page that was stored and not evicted.
    fn discard_entry(&self, page: usize) {
        match self.freeze_page(page) {
            EVICTED => self.state(page).store(EVICTED, Ordering::Release),
            _ => {
                self.tier.discard(CLIENT, page as u64..page as u64 + 1);
                self.state(page).store(RESIDENT, Ordering::Release);
            }
        }
    }

    pub(in crate::region) fn park(&self, pages: Range<usize>, effort: Effort) -> Parked {
        let mut parked = Parked::default();
        for start in pages.clone().step_by(BATCH) {
            if !self.usable() {
                break;
            }
            // For a short time each, because signals are delayed.
            let _quiet = Blocked::all();
            let mut evict_state = lock(&self.evict_state);
            let some = start..(start + BATCH).min(pages.end);
            self.sweep(some.clone());
            let mut chosen = Vec::with_capacity(some.len());
            scan(&evict_state.pagemap, self.addresses(&some), resident(), |range| chosen.extend(self.pages_in(range)));
            self.evict_chosen(&mut evict_state, &chosen, effort, &mut parked);
        }
        parked
    }

    fn pages_in(&self, range: Addresses) -> Range<usize> {
        let page = |addr: u64| (addr - self.memory.addr()) as usize / PAGE_SIZE;
        page(range.start)..page(range.end)
    }

    /// Evicts pages, which are in ascending order: at most [`BATCH`].
    fn evict_chosen(&self, evict_state: &mut EvictState, chosen: &[usize], effort: Effort, parked: &mut Parked) {
        debug_assert!(chosen.len() <= BATCH);
        let mut places = Vec::with_capacity(chosen.len());
        {
            let pins = lock(&self.pins);
            let free = |page: &&usize| !pins.all.iter().any(|pin| pin.pages.contains(page));
            places.extend(chosen.iter().filter(free).copied());
        }
        parked.pinned += (chosen.len() - places.len()) as u64;
        let mut copied = 0;
        for_runs(places.iter().copied(), BATCH, |run| {
            if copied < BATCH && self.copy_out(evict_state, &run, copied) {
                copied += run.len();
            } else {
                copied = usize::MAX;
            }
        });
        if copied != places.len() {
            // A page was freed between the scan and the copy: it is not idle.
            parked.busy += places.len() as u64;
            return;
        }
        // SAFETY: the mapping has `BATCH` pages, and only this thread writes to it, because it has `evict_state` locked.
        let copies = unsafe { std::slice::from_raw_parts(evict_state.copies.as_ptr().cast::<Page>(), places.len()) };
        let pages: Vec<(u64, &Page)> = places.iter().map(|page| *page as u64).zip(copies).collect();
        let stored = self.tier.store_many(CLIENT, &pages, effort);
        // Runs of pages that are stored, with the indexes of their copies.
        let mut place = 0;
        while place < places.len() {
            let first = place;
            let mut end = place;
            while end < places.len()
                && end - first < FREEZE
                && stored[end].is_ok()
                && places[end] == places[first] + (end - first)
                && places[end] / CHUNK == places[first] / CHUNK
            {
                end += 1;
            }
            if end == first {
                parked.refused += 1;
                place += 1;
                continue;
            }
            self.freeze(evict_state, places[first]..places[end - 1] + 1, &copies[first..end], parked);
            place = end;
        }
    }

    /// Copies pages to the file of copies, from page `place` on. The kernel copies, so an absent page is an error instead of
    /// a fault.
    fn copy_out(&self, evict_state: &EvictState, run: &Range<usize>, place: usize) -> bool {
        let (mut from, end) = (self.addr(run.start), self.addr(run.end));
        let mut to = (place * PAGE_SIZE) as u64;
        while from < end {
            // SAFETY: the kernel reads the region's memory and fails with EFAULT if it cannot.
            match unsafe { syscall!(libc::SYS_pwrite64, evict_state.copies_fd.raw(), from, end - from, to) } {
                Ok(bytes) if bytes > 0 => {
                    from += bytes as u64;
                    to += bytes as u64;
                }
                _ => return false,
            }
        }
        true
    }

    /// Evicts the pages of one chunk that equal their stored copies. The others stay, and their entries are discarded.
    fn freeze(&self, evict_state: &mut EvictState, run: Range<usize>, copies: &[Page], parked: &mut Parked) {
        let chunk = run.start / CHUNK;
        if !evict_state.missing[chunk] {
            let all = chunk * CHUNK..((chunk + 1) * CHUNK).min(self.pages());
            let range = self.addresses(&all);
            evict_state.missing[chunk] = self.uffd.register(range, uffd::MODE_MISSING | uffd::MODE_WP).is_ok();
        }
        // Held until the pages are evicted or moved back: a thread that pins waits, and then loads evicted ones.
        let pins = lock(&self.pins);
        let pinned = pins.all.iter().any(|pin| pin.pages.start < run.end && run.start < pin.pages.end);
        if pinned || !evict_state.missing[chunk] {
            drop(pins);
            parked.busy += run.len() as u64;
            run.for_each(|page| self.discard_entry(page));
            return;
        }
        for page in run.clone() {
            self.freeze_page(page);
        }
        let base = evict_state.freeze_area.addr();
        let mut at = 0;
        let mut budget = SpinBudget::default();
        let mut single = false;
        while at < run.len() {
            let end = if single { at + 1 } else { run.len() };
            let source = Addresses { start: self.addr(run.start + at), end: self.addr(run.start + end) };
            let mode = uffd::MOVE_ALLOW_SRC_HOLES | uffd::DONTWAKE;
            let (moved, error) = self.uffd.move_pages(base + (at * PAGE_SIZE) as u64, source, mode);
            at += moved as usize / PAGE_SIZE;
            match error {
                None => {}
                Some(Errno(libc::EAGAIN)) if !budget.is_spent() => budget.spin(),
                Some(Errno(libc::EINVAL)) if !single => single = true,
                // In use by a device, for example: it stays.
                Some(_) => at += 1,
            }
        }
        // Not by mincore(2), because common seccomp filters, such as systemd's `@system-service`, forbid it.
        let mut is_frozen = [false; FREEZE];
        let present = pagemap::Query { all_of: pagemap::PRESENT, report: pagemap::PRESENT, ..Default::default() };
        scan(&evict_state.pagemap, Addresses::pages_from(base, run.len() as u64), present, |range| {
            let place = |addr: u64| (addr - base) as usize / PAGE_SIZE;
            is_frozen[place(range.start)..place(range.end)].fill(true);
        });
        let mut evicted = 0;
        for (at, page) in run.clone().enumerate() {
            // SAFETY: the page is in the freeze area, which only this thread uses, because it has `evict_state` locked.
            let frozen = || unsafe { &*((base + (at * PAGE_SIZE) as u64) as *const Page) };
            if is_frozen[at] && *frozen() == copies[at] {
                evicted += 1;
                self.counters.out.fetch_add(1, Ordering::Relaxed);
                self.state(page).store(EVICTED, Ordering::Release);
            } else {
                self.move_back(page, base + (at * PAGE_SIZE) as u64);
                self.tier.discard(CLIENT, page as u64..page as u64 + 1);
                self.state(page).store(RESIDENT, Ordering::Release);
            }
        }
        drop(pins);
        self.counters.parked.fetch_add(evicted, Ordering::Relaxed);
        parked.pages += evicted;
        parked.busy += run.len() as u64 - evicted;
        // SAFETY: the range is the freeze area; its pages are evicted or moved back. Its memory may be locked, if the
        // program called mlockall.
        let _ = unsafe { mem::advise(base, (FREEZE * PAGE_SIZE) as u64, libc::MADV_DONTNEED_LOCKED) };
        if let Some(ages) = &evict_state.ages {
            // SAFETY: the mapping has a byte for each page, and is used only with `evict_state` locked.
            let ages = unsafe { std::slice::from_raw_parts_mut(ages.as_ptr(), self.pages()) };
            ages[run].iter_mut().for_each(|age| *age &= !AGE);
        }
    }

    /// Moves a frozen page back to its address, if there is one.
    fn move_back(&self, page: usize, from: u64) {
        let range = Addresses::pages_from(from, 1);
        let mode = uffd::MOVE_ALLOW_SRC_HOLES | uffd::DONTWAKE;
        let mut budget = SpinBudget::default();
        loop {
            match self.uffd.move_pages(self.addr(page), range, mode).1 {
                None => return,
                Some(Errno(libc::EAGAIN | libc::ENOMEM | libc::EBUSY)) => budget.spin(),
                // The target is marked for write protection, which a move does not accept as empty, or has other access
                // rights than the freeze area: a copy works there. Or there is no frozen page: then a copy of zeros is
                // right, because neither side had a page. A copy never replaces a page. mincore(2) is no help, because it
                // reports a swapped page as absent.
                Some(_) => {
                    // SAFETY: the source page is in the freeze area.
                    match unsafe { self.uffd.copy(self.addr(page), from, PAGE_SIZE as u64, uffd::DONTWAKE) }.1 {
                        Some(Errno(libc::EAGAIN | libc::ENOMEM)) => budget.spin(),
                        _ => return,
                    }
                }
            }
        }
    }

    pub(in crate::region) fn park_idle(&self, idle: u8) -> Parked {
        let mut parked = Parked::default();
        if !self.usable() {
            return parked;
        }
        let _quiet = Blocked::all();
        let mut evict_state = lock(&self.evict_state);
        if evict_state.ages.is_none() {
            evict_state.ages = map_dontfork(self.pages()).ok();
        }
        let Some(ages) = &evict_state.ages else { return parked };
        // SAFETY: the mapping has a byte for each page, and is used only with `evict_state` locked.
        let ages = unsafe { std::slice::from_raw_parts_mut(ages.as_ptr(), self.pages()) };
        for chunk in (0..evict_state.missing.len()).filter(|chunk| evict_state.missing[*chunk]) {
            let all = chunk * CHUNK..((chunk + 1) * CHUNK).min(self.pages());
            for page in all.clone() {
                let age = &mut ages[page];
                match self.state(page).load(Ordering::Acquire) {
                    EVICTED => *age += u8::from(*age & AGE < AGE),
                    RESIDENT_STORED => {
                        let strikes = match *age / STRIKE {
                            strikes if *age & AGE <= idle => (strikes + 1).min(STRIKES_MAX),
                            strikes => strikes.saturating_sub(1),
                        };
                        *age = strikes * STRIKE;
                    }
                    _ => {}
                }
            }
            self.sweep(all);
        }
        let everything = self.addresses(&(0..self.pages()));
        let mut query = resident();
        query.all_of |= pagemap::WRITTEN;
        query.flags = pagemap::PROTECT;
        scan(&evict_state.pagemap, everything, query, |range| {
            ages[self.pages_in(range)].iter_mut().for_each(|age| *age &= !AGE);
        });
        let mut chosen = Vec::new();
        scan(&evict_state.pagemap, everything, resident(), |range| {
            for page in self.pages_in(range) {
                let age = &mut ages[page];
                *age += u8::from(*age & AGE < AGE);
                let wanted = u32::from(idle) << (*age / STRIKE);
                // One more, because the age starts at 1 in the call that sees the write.
                if u32::from(*age & AGE) > wanted.min(u32::from(AGE) - 1) {
                    chosen.push(page);
                }
            }
        });
        for some in chosen.chunks(BATCH) {
            self.evict_chosen(&mut evict_state, some, Effort::Fast, &mut parked);
        }
        drop(evict_state);
        self.tier.tick();
        parked
    }

    pub(in crate::region) fn discard(&self, pages: Range<usize>) {
        if !self.usable() {
            return;
        }
        let _quiet = Blocked::all();
        let _parking = lock(&self.evict_state);
        for start in pages.clone().step_by(CHUNK) {
            let some = start..(start + CHUNK).min(pages.end);
            let evicted = some.clone().filter(|page| self.freeze_page(*page) == EVICTED).count();
            self.counters.out.fetch_sub(evicted as u64, Ordering::Relaxed);
            let range = self.addresses(&some);
            // SAFETY: the caller has the region borrowed exclusively and wants zeros, of locked memory too.
            let _ = unsafe { mem::advise(range.start, range.len(), libc::MADV_DONTNEED_LOCKED) };
            self.tier.discard(CLIENT, some.start as u64..some.end as u64);
            some.for_each(|page| self.state(page).store(RESIDENT, Ordering::Release));
        }
    }
}

/// Matches resident pages that are not the kernel's zero page.
fn resident() -> pagemap::Query {
    let all_of = pagemap::PRESENT | pagemap::PFNZERO;
    pagemap::Query { all_of, inverted: pagemap::PFNZERO, report: pagemap::PRESENT, ..Default::default() }
}

/// Calls `f` with the parts of `range` with matching pages. A failed scan finds nothing, so that nothing is evicted.
fn scan(pagemap: &Fd, range: Addresses, query: pagemap::Query, mut f: impl FnMut(Addresses)) {
    let mut found = [pagemap::ScannedRange::default(); 128];
    let mut start = range.start;
    while start < range.end {
        let part = Addresses { start, end: range.end };
        let Ok((count, walked)) = pagemap::scan(pagemap, part, query, &mut found) else { return };
        found[..count].iter().for_each(|region| f(Addresses { start: region.start, end: region.end }));
        if walked <= start {
            return;
        }
        start = walked;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::tests::region;

    /// Forbids mincore(2) to the calling thread, because it reports swapped pages as absent; false if filters are refused.
    fn forbid_mincore() -> bool {
        let step = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
        let mut filter = [
            step(0x20, 0, 0, 0),
            step(0x15, 0, 1, libc::SYS_mincore as u32),
            step(0x06, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
            step(0x06, 0, 0, libc::SECCOMP_RET_ALLOW),
        ];
        let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
        // SAFETY: the kernel copies `program`, which outlives the call; the filter applies to this thread only.
        unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
                && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0
        }
    }

    /// As under systemd's `@system-service` filter.
    #[test]
    fn pages_are_evicted_even_if_mincore_is_forbidden() {
        let Some(mut region) = region(3 * PAGE_SIZE) else { return };
        // The page between was never written.
        let places = [0, 2].map(|page| page * PAGE_SIZE);
        places.iter().for_each(|start| region[*start..][..PAGE_SIZE].fill(7));
        let parker = region.parker();
        let evicting =
            std::thread::spawn(move || forbid_mincore().then(|| parker.park(0..3 * PAGE_SIZE, Effort::Fast)));
        match evicting.join().unwrap() {
            None => return eprintln!("SKIPPED: no filter of system calls here"),
            Some(parked) => assert_eq!(parked, Parked { pages: 2, ..Parked::default() }),
        }
        assert!(places.iter().all(|start| region[*start..][..PAGE_SIZE].iter().all(|byte| *byte == 7)));
        assert_eq!((region[PAGE_SIZE], region.stats().pages_loaded), (0, 2));
    }

    /// The program changes a page's access rights while the page is frozen, and mincore is forbidden.
    #[test]
    fn a_frozen_page_moves_back_even_if_its_access_rights_changed() {
        let Some(mut region) = region(PAGE_SIZE) else { return };
        region.fill(7);
        let shared = &region.shared;
        let freeze_area = lock(&shared.evict_state).freeze_area.addr();
        let moved = shared.uffd.move_pages(freeze_area, shared.addresses(&(0..1)), uffd::DONTWAKE);
        assert_eq!(moved, (PAGE_SIZE as u64, None));
        // SAFETY: the page lies in the region, and the test only reads it from here on.
        let set = unsafe { libc::mprotect(region.as_ptr().cast(), PAGE_SIZE, libc::PROT_READ) };
        assert_eq!(set, 0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                if !forbid_mincore() {
                    eprintln!("SKIPPED: no filter of system calls here");
                }
                shared.move_back(0, freeze_area);
            });
        });
        assert!(region.iter().all(|byte| *byte == 7), "it is lost");
    }
}
