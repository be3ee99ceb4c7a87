//! Pages go out: copied and stored while the program goes on, then frozen, compared and let go.
//!
//! All of it is done with `parking` held and signals blocked, for a short time each. Which pages are silent `cool`
//! finds out from the marks of the page tables; `park` takes what is named.

use super::super::Parked;
use super::super::decoder::Patience;
use super::{BACK, BATCH, CHUNK, FREEZE, HERE, OUT, Parking, REGION, Shared, for_runs, own};
use crate::config::Effort;
use pagefold_os::fd::Fd;
use pagefold_os::signal::Blocked;
use pagefold_os::sync::lock;
use pagefold_os::{Errno, PAGE_SIZE, Page, Range as Addresses, mem, pagemap, syscall, uffd};
use std::ops::Range;
use std::sync::atomic::Ordering;

/// The age of a page that is here: calls of `cool` since it was written; of a page that is out: since it went.
const AGE: u8 = 0x1f;
/// How often it came back too soon, above the age.
const STRIKE: u8 = 0x20;
const STRIKES_MAX: u8 = 3;

impl Shared {
    /// Discards the entry of a page that was stored and did not go out.
    fn forget(&self, page: usize) {
        match self.take(page) {
            OUT => self.state(page).store(OUT, Ordering::Release),
            _ => {
                self.tier.discard(REGION, page as u64..page as u64 + 1);
                self.state(page).store(HERE, Ordering::Release);
            }
        }
    }

    pub(in crate::region) fn park(&self, pages: Range<usize>, effort: Effort) -> Parked {
        let mut parked = Parked::default();
        for start in pages.clone().step_by(BATCH) {
            if !self.usable() {
                break;
            }
            // A short time each: signals wait.
            let _quiet = Blocked::all();
            let mut parking = lock(&self.parking);
            let some = start..(start + BATCH).min(pages.end);
            self.sweep(some.clone());
            let mut chosen = Vec::with_capacity(some.len());
            scan(&parking.pagemap, self.addresses(&some), resident(), |range| chosen.extend(self.pages_in(range)));
            self.put_out(&mut parking, &chosen, effort, &mut parked);
        }
        parked
    }

    fn pages_in(&self, range: Addresses) -> Range<usize> {
        let page = |addr: u64| (addr - self.memory.addr()) as usize / PAGE_SIZE;
        page(range.start)..page(range.end)
    }

    /// Puts pages out, in order: at most [`BATCH`].
    fn put_out(&self, parking: &mut Parking, chosen: &[usize], effort: Effort, parked: &mut Parked) {
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
            if copied < BATCH && self.copy_out(parking, &run, copied) {
                copied += run.len();
            } else {
                copied = usize::MAX;
            }
        });
        if copied != places.len() {
            // A page went between the look and the copy: it is not silent.
            parked.busy += places.len() as u64;
            return;
        }
        // SAFETY: the mapping is that long, and nobody writes to it before we return.
        let copies = unsafe { std::slice::from_raw_parts(parking.copies.as_ptr().cast::<Page>(), places.len()) };
        let pages: Vec<(u64, &Page)> = places.iter().map(|page| *page as u64).zip(copies).collect();
        let stored = self.tier.store_many(REGION, &pages, effort);
        // Runs of pages that are stored, with the place of their copies.
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
            self.freeze(parking, places[first]..places[end - 1] + 1, &copies[first..end], parked);
            place = end;
        }
    }

    /// Copies pages to the file of copies from `place` on, by the kernel: a page that is gone is an error and no fault.
    fn copy_out(&self, parking: &Parking, run: &Range<usize>, place: usize) -> bool {
        let (mut from, end) = (self.addr(run.start), self.addr(run.end));
        let mut to = (place * PAGE_SIZE) as u64;
        while from < end {
            // SAFETY: the kernel reads the region's memory and reports what it cannot read.
            match unsafe { syscall!(libc::SYS_pwrite64, parking.copies_fd.raw(), from, end - from, to) } {
                Ok(bytes) if bytes > 0 => {
                    from += bytes as u64;
                    to += bytes as u64;
                }
                _ => return false,
            }
        }
        true
    }

    /// Takes pages of one chunk away that equal their copies, which are stored; the others stay, and their entries go.
    fn freeze(&self, parking: &mut Parking, run: Range<usize>, copies: &[Page], parked: &mut Parked) {
        let chunk = run.start / CHUNK;
        if !parking.missing[chunk] {
            let all = chunk * CHUNK..((chunk + 1) * CHUNK).min(self.pages());
            let range = self.addresses(&all);
            parking.missing[chunk] = self.uffd.register(range, uffd::MODE_MISSING | uffd::MODE_WP).is_ok();
        }
        // Held until the pages are out or back: who pins meanwhile waits, and then finds and brings them.
        let pins = lock(&self.pins);
        let pinned = pins.all.iter().any(|pin| pin.pages.start < run.end && run.start < pin.pages.end);
        if pinned || !parking.missing[chunk] {
            drop(pins);
            parked.busy += run.len() as u64;
            run.for_each(|page| self.forget(page));
            return;
        }
        for page in run.clone() {
            self.take(page);
        }
        let base = parking.staging.addr();
        let mut at = 0;
        let mut patience = Patience::default();
        let mut single = false;
        while at < run.len() {
            let end = if single { at + 1 } else { run.len() };
            let source = Addresses { start: self.addr(run.start + at), end: self.addr(run.start + end) };
            let mode = uffd::MOVE_ALLOW_SRC_HOLES | uffd::DONTWAKE;
            let (moved, error) = self.uffd.move_pages(base + (at * PAGE_SIZE) as u64, source, mode);
            at += moved as usize / PAGE_SIZE;
            match error {
                None => {}
                Some(Errno(libc::EAGAIN)) if !patience.ended() => patience.wait(),
                Some(Errno(libc::EINVAL)) if !single => single = true,
                // In a device's hands, say: it stays.
                Some(_) => at += 1,
            }
        }
        // Not by mincore(2): filters that let a service do all that services do, as systemd's `@system-service`, forbid it.
        let mut staged = [false; FREEZE];
        let present = pagemap::Query { all_of: pagemap::PRESENT, report: pagemap::PRESENT, ..Default::default() };
        scan(&parking.pagemap, Addresses::pages_from(base, run.len() as u64), present, |range| {
            let place = |addr: u64| (addr - base) as usize / PAGE_SIZE;
            staged[place(range.start)..place(range.end)].fill(true);
        });
        let mut went = 0;
        for (at, page) in run.clone().enumerate() {
            // SAFETY: the page is in the staging area, where nobody but us comes.
            let frozen = || unsafe { &*((base + (at * PAGE_SIZE) as u64) as *const Page) };
            if staged[at] && *frozen() == copies[at] {
                went += 1;
                self.counters.out.fetch_add(1, Ordering::Relaxed);
                self.state(page).store(OUT, Ordering::Release);
            } else {
                self.move_back(page, base + (at * PAGE_SIZE) as u64);
                self.tier.discard(REGION, page as u64..page as u64 + 1);
                self.state(page).store(HERE, Ordering::Release);
            }
        }
        drop(pins);
        self.counters.parked.fetch_add(went, Ordering::Relaxed);
        parked.pages += went;
        parked.busy += run.len() as u64 - went;
        // SAFETY: the staging area is ours; what is there is out. A program may have all that it maps locked.
        let _ = unsafe { mem::advise(base, (FREEZE * PAGE_SIZE) as u64, libc::MADV_DONTNEED_LOCKED) };
        if let Some(ages) = &parking.ages {
            // SAFETY: a byte for each page; nobody else looks at it without `parking`.
            let ages = unsafe { std::slice::from_raw_parts_mut(ages.as_ptr(), self.pages()) };
            ages[run].iter_mut().for_each(|age| *age &= !AGE);
        }
    }

    /// Moves a staged page back to where it was, if there is one.
    fn move_back(&self, page: usize, from: u64) {
        let range = Addresses::pages_from(from, 1);
        let mode = uffd::MOVE_ALLOW_SRC_HOLES | uffd::DONTWAKE;
        let mut patience = Patience::default();
        loop {
            match self.uffd.move_pages(self.addr(page), range, mode).1 {
                None => return,
                Some(Errno(libc::EAGAIN | libc::ENOMEM | libc::EBUSY)) => patience.wait(),
                // Marked for write protection, which a move does not take for empty, or with other rights than the staging
                // area has, but a copy goes there; or nothing is to be moved. Not asked of mincore(2), which says of a page in
                // swap that it is not there: a copy replaces nothing, and where nothing was on either side zeros are right.
                Some(_) => {
                    // SAFETY: the page is in the staging area.
                    match unsafe { self.uffd.copy(self.addr(page), from, PAGE_SIZE as u64, uffd::DONTWAKE) }.1 {
                        Some(Errno(libc::EAGAIN | libc::ENOMEM)) => patience.wait(),
                        _ => return,
                    }
                }
            }
        }
    }

    pub(in crate::region) fn cool(&self, silent: u8) -> Parked {
        let mut parked = Parked::default();
        if !self.usable() {
            return parked;
        }
        let _quiet = Blocked::all();
        let mut parking = lock(&self.parking);
        if parking.ages.is_none() {
            parking.ages = own(self.pages()).ok();
        }
        let Some(ages) = &parking.ages else { return parked };
        // SAFETY: a byte for each page; nobody else looks at it without `parking`.
        let ages = unsafe { std::slice::from_raw_parts_mut(ages.as_ptr(), self.pages()) };
        for chunk in (0..parking.missing.len()).filter(|chunk| parking.missing[*chunk]) {
            let all = chunk * CHUNK..((chunk + 1) * CHUNK).min(self.pages());
            for page in all.clone() {
                let age = &mut ages[page];
                match self.state(page).load(Ordering::Acquire) {
                    OUT => *age += u8::from(*age & AGE < AGE),
                    BACK => {
                        let strikes = match *age / STRIKE {
                            strikes if *age & AGE <= silent => (strikes + 1).min(STRIKES_MAX),
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
        scan(&parking.pagemap, everything, query, |range| {
            ages[self.pages_in(range)].iter_mut().for_each(|age| *age &= !AGE);
        });
        let mut chosen = Vec::new();
        scan(&parking.pagemap, everything, resident(), |range| {
            for page in self.pages_in(range) {
                let age = &mut ages[page];
                *age += u8::from(*age & AGE < AGE);
                let wanted = u32::from(silent) << (*age / STRIKE);
                // One since it was seen to be written.
                if u32::from(*age & AGE) > wanted.min(u32::from(AGE) - 1) {
                    chosen.push(page);
                }
            }
        });
        for some in chosen.chunks(BATCH) {
            self.put_out(&mut parking, some, Effort::Fast, &mut parked);
        }
        drop(parking);
        self.tier.tick();
        parked
    }

    pub(in crate::region) fn discard(&self, pages: Range<usize>) {
        if !self.usable() {
            return;
        }
        let _quiet = Blocked::all();
        let _parking = lock(&self.parking);
        for start in pages.clone().step_by(CHUNK) {
            let some = start..(start + CHUNK).min(pages.end);
            let out = some.clone().filter(|page| self.take(*page) == OUT).count();
            self.counters.out.fetch_sub(out as u64, Ordering::Relaxed);
            let range = self.addresses(&some);
            // SAFETY: the caller has the region to itself and wants zeros, also of what it has locked.
            let _ = unsafe { mem::advise(range.start, range.len(), libc::MADV_DONTNEED_LOCKED) };
            self.tier.discard(REGION, some.start as u64..some.end as u64);
            some.for_each(|page| self.state(page).store(HERE, Ordering::Release));
        }
    }
}

/// Pages of the program's own that are here, and not the kernel's zero page.
fn resident() -> pagemap::Query {
    let all_of = pagemap::PRESENT | pagemap::PFNZERO;
    pagemap::Query { all_of, inverted: pagemap::PFNZERO, report: pagemap::PRESENT, ..Default::default() }
}

/// Calls `f` with the parts of `range` whose pages match; a scan that fails finds nothing, and nothing goes out.
fn scan(pagemap: &Fd, range: Addresses, query: pagemap::Query, mut f: impl FnMut(Addresses)) {
    let mut found = [pagemap::Region::default(); 128];
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

    /// Has the calling thread's mincore(2) fail from now on, which says of pages in swap that they are not there; false if
    /// that may not be.
    fn forbid_mincore() -> bool {
        let step = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
        let mut filter = [
            step(0x20, 0, 0, 0),
            step(0x15, 0, 1, libc::SYS_mincore as u32),
            step(0x06, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
            step(0x06, 0, 0, libc::SECCOMP_RET_ALLOW),
        ];
        let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
        // SAFETY: numbers, and a program that outlives the call, which copies it; it concerns this thread alone.
        unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
                && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0
        }
    }

    /// As systemd's `@system-service` has it.
    #[test]
    fn pages_go_out_where_mincore_is_forbidden() {
        let Some(mut region) = region(3 * PAGE_SIZE) else { return };
        // The page between was never there.
        let places = [0, 2].map(|page| page * PAGE_SIZE);
        places.iter().for_each(|start| region[*start..][..PAGE_SIZE].fill(7));
        let parker = region.parker();
        let went = std::thread::spawn(move || forbid_mincore().then(|| parker.park(0..3 * PAGE_SIZE, Effort::Fast)));
        match went.join().unwrap() {
            None => return eprintln!("SKIPPED: no filter of system calls here"),
            Some(parked) => assert_eq!(parked, Parked { pages: 2, ..Parked::default() }),
        }
        assert!(places.iter().all(|start| region[*start..][..PAGE_SIZE].iter().all(|byte| *byte == 7)));
        assert_eq!((region[PAGE_SIZE], region.stats().pages_back), (0, 2));
    }

    /// The program changes a page's rights while it is in the parker's hands, and nobody tells what is there.
    #[test]
    fn a_page_in_hand_goes_back_whatever_the_kernel_tells_of_it() {
        let Some(mut region) = region(PAGE_SIZE) else { return };
        region.fill(7);
        let shared = &region.shared;
        let staging = lock(&shared.parking).staging.addr();
        let moved = shared.uffd.move_pages(staging, shared.addresses(&(0..1)), uffd::DONTWAKE);
        assert_eq!(moved, (PAGE_SIZE as u64, None));
        // SAFETY: a page of the region's, which is read only.
        let set = unsafe { libc::mprotect(region.as_ptr().cast(), PAGE_SIZE, libc::PROT_READ) };
        assert_eq!(set, 0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                if !forbid_mincore() {
                    eprintln!("SKIPPED: no filter of system calls here");
                }
                shared.move_back(0, staging);
            });
        });
        assert!(region.iter().all(|byte| *byte == 7), "it is lost");
    }
}
