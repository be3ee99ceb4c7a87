//! Loading pages: for faults, in the handler, and in ranges by `unpark`.
//!
//! A thread that loads a page makes it busy first, so that one thread loads it and the others wait. The handler leaves
//! the old entries in the tier, because it must not free memory; `unpark` discards them. Signals are blocked while a page
//! is busy.

use super::super::decoder::{Decoder, DecoderGuard, SpinBudget};
use super::super::report::{FAULT_PAGES_MAX, Unreadable};
use super::shared_window::PIECE;
use super::{BUSY, CHUNK, EVICTED, RESIDENT, RESIDENT_STORED, Shared};
use crate::stats::count;
use pagefold_os::signal::Blocked;
use pagefold_os::sync::lock;
use pagefold_os::{Errno, PAGE_SIZE, Page, Range as Addresses, sched, uffd};
use std::ops::Range;
use std::sync::atomic::Ordering;

/// A resident page that faults this often in a row cannot be mended here: the fault has another cause.
const STUCK_MAX: u64 = 10_000;

impl Shared {
    /// Serves a fault; `None` if the address is not in the region, false if the page cannot be loaded.
    pub(in crate::region) fn serve(&self, addr: u64) -> Option<bool> {
        let page = usize::try_from(addr.checked_sub(self.memory.addr())?).ok()? / PAGE_SIZE;
        if page >= self.pages() || !self.is_ours() {
            return None;
        }
        let state = self.state(page);
        let mut budget = SpinBudget::default();
        let mut waited = false;
        loop {
            match state.load(Ordering::Acquire) {
                EVICTED => {
                    if state.compare_exchange(EVICTED, BUSY, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                        return Some(self.serve_evicted(page));
                    }
                }
                // Another thread has loaded it meanwhile.
                RESIDENT | RESIDENT_STORED if waited => return Some(true),
                before @ (RESIDENT | RESIDENT_STORED) => {
                    if state.compare_exchange(before, BUSY, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                        let served = self.serve_fresh(page);
                        state.store(before, Ordering::Release);
                        return Some(served);
                    }
                }
                _ => {
                    waited = true;
                    budget.spin();
                }
            }
        }
    }

    /// Fills a never written page, in a chunk with evicted pages, with zeros. The page is busy.
    fn serve_fresh(&self, page: usize) -> bool {
        count(&self.counters.zero_faults);
        let mut budget = SpinBudget::default();
        loop {
            match self.uffd.zero(Addresses::pages_from(self.addr(page), 1), uffd::DONTWAKE).1 {
                Some(Errno(libc::EAGAIN | libc::ENOMEM)) if !budget.is_spent() => budget.spin(),
                Some(Errno(libc::ENOMEM)) => return false,
                // It is resident already: another thread was faster. If this repeats, the fault has another cause.
                Some(Errno(libc::EEXIST)) => {
                    let before = self.stuck.load(Ordering::Relaxed);
                    let times = if before >> 16 == page as u64 { before & 0xffff } else { 0 };
                    self.stuck.store((page as u64) << 16 | (times + 1), Ordering::Relaxed);
                    return times < STUCK_MAX;
                }
                // The chunk is no longer in missing mode, so the kernel serves the fault.
                _ => {
                    self.stuck.store(0, Ordering::Relaxed);
                    return true;
                }
            }
        }
    }

    /// Loads an evicted page, which is busy now, and the pages after it if the program faults in ascending order.
    fn serve_evicted(&self, page: usize) -> bool {
        let start = sched::quick_monotonic_ns();
        count(&self.counters.faults);
        let (end, last) = (self.window_end.load(Ordering::Relaxed), self.window_pages.load(Ordering::Relaxed));
        // A fault within the next window counts as sequential: the pages between may be resident.
        let is_sequential = page as u64 >= end && page as u64 - end < last * 2;
        // With a prefetcher, twice as many pages take about the same time.
        let window_max = if self.window.has_prefetchers() { FAULT_PAGES_MAX } else { FAULT_PAGES_MAX / 2 } as u64;
        let window = if is_sequential { (last * 2).min(window_max) } else { (last / 2).max(1) };
        self.window_pages.store(window, Ordering::Relaxed);
        self.window_end.store(page as u64 + window, Ordering::Relaxed);
        let end = page + self.claim_following(page, window as usize);
        let rest = end.min(page + PIECE)..end;
        let is_published = self.window.has_prefetchers() && !rest.is_empty() && self.window.publish(&rest);
        let loaded = self.fault_in(page, if is_published { PIECE } else { end - page });
        while let Some(piece) = self.window.take(&rest) {
            self.fault_in(piece.start, piece.len());
        }
        self.counters.fault_ns.fetch_add(sched::quick_monotonic_ns().saturating_sub(start), Ordering::Relaxed);
        loaded > 0
    }

    /// Makes the evicted pages after `page`, which is busy, busy too. Returns how many pages of one chunk are busy then, at
    /// most `max`.
    fn claim_following(&self, page: usize, max: usize) -> usize {
        let end = (page + max).min((page / CHUNK + 1) * CHUNK).min(self.pages());
        let claim = |page: &usize| {
            self.state(*page).compare_exchange(EVICTED, BUSY, Ordering::Acquire, Ordering::Relaxed).is_ok()
        };
        (page + 1..end).take_while(claim).count() + 1
    }

    /// Loads evicted pages, which are busy now. Returns how many were loaded, from the first on; the others are evicted
    /// again.
    pub(super) fn fault_in(&self, page: usize, len: usize) -> usize {
        let mut loaded_count = 0;
        if let Some(mut decoder) = DecoderGuard::take() {
            let Decoder { worker, pages } = &mut *decoder;
            let mut loaded = 0;
            let mut load =
                |at: usize| self.tier.load_in_fault(&self.index, (page + at) as u64, &mut pages[at], worker).is_ok();
            while loaded < len && load(loaded) {
                loaded += 1;
            }
            if loaded < len {
                count(&self.counters.unreadable);
            }
            loaded_count = self.copy_in(page, &pages[..loaded]);
        }
        for at in page..page + len {
            self.state(at).store(if at < page + loaded_count { RESIDENT_STORED } else { EVICTED }, Ordering::Release);
        }
        self.counters.out.fetch_sub(loaded_count as u64, Ordering::Relaxed);
        self.counters.loaded.fetch_add(loaded_count as u64, Ordering::Relaxed);
        loaded_count
    }

    fn copy_in(&self, page: usize, data: &[Page]) -> usize {
        let mut loaded_count = 0;
        let mut budget = SpinBudget::default();
        // A copy must stay within one mapping, and the program may have split the region's.
        let mut single = false;
        while loaded_count < data.len() {
            let wanted = if single { 1 } else { data.len() - loaded_count };
            let (source, len) = (data[loaded_count..].as_ptr() as u64, (wanted * PAGE_SIZE) as u64);
            // SAFETY: the source is `data`, a contiguous slice; the target pages are busy, so only this thread fills
            // them.
            let (done, error) = unsafe { self.uffd.copy(self.addr(page + loaded_count), source, len, uffd::DONTWAKE) };
            loaded_count += done as usize / PAGE_SIZE;
            match error {
                None => {}
                Some(Errno(libc::EAGAIN | libc::ENOMEM)) if !budget.is_spent() => budget.spin(),
                Some(Errno(libc::ENOENT)) if !single => single = true,
                Some(_) => break,
            }
        }
        loaded_count
    }

    /// Reads a byte of each page, which loads absent ones. The caller must not have signals blocked.
    pub(in crate::region) fn touch(&self, pages: Range<usize>) {
        if !self.usable() {
            return;
        }
        for page in pages {
            // SAFETY: the byte lies in the region's mapping; volatile, so that the read is not optimised away.
            unsafe { (self.addr(page) as *const u8).read_volatile() };
        }
    }

    pub(in crate::region) fn unpark(&self, pages: Range<usize>) -> Result<u64, Unreadable> {
        let mut brought = 0;
        let mut lost: Option<Unreadable> = None;
        if !self.usable() {
            return Ok(0);
        }
        let mut page = pages.start;
        while page < pages.end {
            // For a short time each, because signals are delayed.
            let _quiet = Blocked::all();
            let state = self.state(page);
            match state.load(Ordering::Acquire) {
                EVICTED if state.compare_exchange(EVICTED, BUSY, Ordering::Acquire, Ordering::Relaxed).is_ok() => {
                    let len = self.claim_following(page, FAULT_PAGES_MAX.min(pages.end - page));
                    let loaded_count = self.fault_in(page, len);
                    brought += loaded_count as u64;
                    page += loaded_count;
                    if loaded_count == 0 {
                        lost.get_or_insert(Unreadable { first: page * PAGE_SIZE, pages: 0 }).pages += 1;
                        page += 1;
                    }
                }
                RESIDENT | RESIDENT_STORED => page += 1,
                // Another thread is changing it: wait until it is resident or evicted.
                _ => self.wait_for(page),
            }
        }
        let end = pages.end;
        for chunk in pages.start / CHUNK..end.div_ceil(CHUNK) {
            let _quiet = Blocked::all();
            let mut evict_state = lock(&self.evict_state);
            let all = chunk * CHUNK..((chunk + 1) * CHUNK).min(self.pages());
            self.sweep(all.clone());
            // A busy page does not count as resident: a touch before its bytes are copied in must not read the kernel's
            // zeros.
            let is_resident = |page| matches!(self.state(page).load(Ordering::Acquire), RESIDENT | RESIDENT_STORED);
            if evict_state.missing[chunk] && all.clone().all(is_resident) {
                // No page is evicted while `evict_state` is locked, so the kernel may serve absent pages again.
                let range = self.addresses(&all);
                if self.uffd.unregister(range).is_ok() {
                    // If this registration fails, the next eviction requests both modes again.
                    evict_state.missing[chunk] = false;
                    let _ = self.uffd.register(range, uffd::MODE_WP);
                }
            }
        }
        lost.map_or(Ok(brought), Err)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Effort;
    use crate::region::tests::region;

    #[test]
    fn a_page_that_is_being_loaded_is_not_treated_as_never_written() {
        let Some(mut region) = region(2 * PAGE_SIZE) else { return };
        (0..).zip(&mut *region).for_each(|(at, byte): (usize, _)| *byte = (at * at / 64) as u8 | 1);
        let before = region.to_vec();
        assert_eq!(region.parker().park(0..2 * PAGE_SIZE, Effort::Fast).pages, 2);
        // As in a handler that was preempted before its copy.
        region.shared.state(1).store(BUSY, Ordering::Release);
        assert_eq!(region.shared.unpark(0..1).unwrap(), 1);
        region.shared.state(1).store(EVICTED, Ordering::Release);
        assert!(*region == before[..]);
    }
}
