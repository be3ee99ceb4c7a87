//! Pages come back: by faults, in the handler, and all at once by `unpark`.
//!
//! Whoever brings a page makes it busy first, so that one does and the others wait. The handler leaves old entries
//! behind, for nothing may be freed there; `unpark` discards them. Signals are blocked while a page is busy.

use super::super::decoder::{Decoder, Patience, Taken};
use super::super::{FAULT_PAGES_MAX, Unreadable};
use super::hand::PIECE;
use super::{BACK, BUSY, CHUNK, HERE, OUT, Shared};
use crate::stats::count;
use pagefold_os::signal::Blocked;
use pagefold_os::sync::lock;
use pagefold_os::{Errno, PAGE_SIZE, Page, Range as Addresses, sched, uffd};
use std::ops::Range;
use std::sync::atomic::Ordering;

/// A page that is here and faults nevertheless, so many times in a row, is not ours to mend.
const STUCK_MAX: u64 = 10_000;

impl Shared {
    /// Serves a fault; `None` if the address is not ours, false if the page cannot be brought back.
    pub(in crate::region) fn serve(&self, addr: u64) -> Option<bool> {
        let page = usize::try_from(addr.checked_sub(self.memory.addr())?).ok()? / PAGE_SIZE;
        if page >= self.pages() || !self.is_ours() {
            return None;
        }
        let state = self.state(page);
        let mut patience = Patience::default();
        let mut waited = false;
        loop {
            match state.load(Ordering::Acquire) {
                OUT => {
                    if state.compare_exchange(OUT, BUSY, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                        return Some(self.bring_fault(page));
                    }
                }
                // Somebody brought it while we waited.
                HERE | BACK if waited => return Some(true),
                here @ (HERE | BACK) => {
                    if state.compare_exchange(here, BUSY, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                        let served = self.bring_zeros(page);
                        state.store(here, Ordering::Release);
                        return Some(served);
                    }
                }
                _ => {
                    waited = true;
                    patience.wait();
                }
            }
        }
    }

    /// An absent page that never was, in a chunk where others are out. The page is busy.
    fn bring_zeros(&self, page: usize) -> bool {
        count(&self.counters.zero_faults);
        let mut patience = Patience::default();
        loop {
            match self.uffd.zero(Addresses::pages_from(self.addr(page), 1), uffd::DONTWAKE).1 {
                Some(Errno(libc::EAGAIN | libc::ENOMEM)) if !patience.ended() => patience.wait(),
                Some(Errno(libc::ENOMEM)) => return false,
                // It is here: somebody was quicker. Unless that never ends: the kernel has another reason.
                Some(Errno(libc::EEXIST)) => {
                    let before = self.stuck.load(Ordering::Relaxed);
                    let times = if before >> 16 == page as u64 { before & 0xffff } else { 0 };
                    self.stuck.store((page as u64) << 16 | (times + 1), Ordering::Relaxed);
                    return times < STUCK_MAX;
                }
                // No longer in missing mode: the kernel serves it.
                _ => {
                    self.stuck.store(0, Ordering::Relaxed);
                    return true;
                }
            }
        }
    }

    /// Brings a page back that is busy and was out, and those behind it if the program walks upwards.
    fn bring_fault(&self, page: usize) -> bool {
        let start = sched::quick_monotonic_ns();
        count(&self.counters.faults);
        let (end, last) = (self.window_end.load(Ordering::Relaxed), self.window_pages.load(Ordering::Relaxed));
        // Within the next window counts as behind: the pages between may be here.
        let behind = page as u64 >= end && page as u64 - end < last * 2;
        // As long a wait with two hands as with one.
        let window_max = if self.offer.has_hands() { FAULT_PAGES_MAX } else { FAULT_PAGES_MAX / 2 } as u64;
        let window = if behind { (last * 2).min(window_max) } else { (last / 2).max(1) };
        self.window_pages.store(window, Ordering::Relaxed);
        self.window_end.store(page as u64 + window, Ordering::Relaxed);
        let end = page + self.claim_behind(page, window as usize);
        let rest = end.min(page + PIECE)..end;
        let offered = self.offer.has_hands() && !rest.is_empty() && self.offer.make(&rest);
        let brought = self.bring(page, if offered { PIECE } else { end - page });
        while let Some(piece) = self.offer.take(&rest) {
            self.bring(piece.start, piece.len());
        }
        self.counters.fault_ns.fetch_add(sched::quick_monotonic_ns().saturating_sub(start), Ordering::Relaxed);
        brought > 0
    }

    /// Makes pages behind `page`, which is busy, busy as far as they are out: so many in all, at most `max`, of one chunk.
    fn claim_behind(&self, page: usize, max: usize) -> usize {
        let end = (page + max).min((page / CHUNK + 1) * CHUNK).min(self.pages());
        let claim =
            |page: &usize| self.state(*page).compare_exchange(OUT, BUSY, Ordering::Acquire, Ordering::Relaxed).is_ok();
        (page + 1..end).take_while(claim).count() + 1
    }

    /// Brings pages back that are busy and were out; returns how many from the first on came. The others are out again.
    pub(super) fn bring(&self, page: usize, len: usize) -> usize {
        let mut came = 0;
        if let Some(mut decoder) = Taken::take() {
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
            came = self.copy_in(page, &pages[..loaded]);
        }
        for at in page..page + len {
            self.state(at).store(if at < page + came { BACK } else { OUT }, Ordering::Release);
        }
        self.counters.out.fetch_sub(came as u64, Ordering::Relaxed);
        self.counters.back.fetch_add(came as u64, Ordering::Relaxed);
        came
    }

    fn copy_in(&self, page: usize, data: &[Page]) -> usize {
        let mut came = 0;
        let mut patience = Patience::default();
        // A copy stays within one mapping; the program may have cut ours.
        let mut single = false;
        while came < data.len() {
            let wanted = if single { 1 } else { data.len() - came };
            let (source, len) = (data[came..].as_ptr() as u64, (wanted * PAGE_SIZE) as u64);
            // SAFETY: the pages are ours and lie one behind the other.
            let (done, error) = unsafe { self.uffd.copy(self.addr(page + came), source, len, uffd::DONTWAKE) };
            came += done as usize / PAGE_SIZE;
            match error {
                None => {}
                Some(Errno(libc::EAGAIN | libc::ENOMEM)) if !patience.ended() => patience.wait(),
                Some(Errno(libc::ENOENT)) if !single => single = true,
                Some(_) => break,
            }
        }
        came
    }

    /// Reads a byte of each page, which brings those that are absent. Not with signals blocked.
    pub(in crate::region) fn touch(&self, pages: Range<usize>) {
        if !self.usable() {
            return;
        }
        for page in pages {
            // SAFETY: a byte of the mapping; volatile, because the read is what counts.
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
            // A short time each: signals wait.
            let _quiet = Blocked::all();
            let state = self.state(page);
            match state.load(Ordering::Acquire) {
                OUT if state.compare_exchange(OUT, BUSY, Ordering::Acquire, Ordering::Relaxed).is_ok() => {
                    let len = self.claim_behind(page, FAULT_PAGES_MAX.min(pages.end - page));
                    let came = self.bring(page, len);
                    brought += came as u64;
                    page += came;
                    if came == 0 {
                        lost.get_or_insert(Unreadable { first: page * PAGE_SIZE, pages: 0 }).pages += 1;
                        page += 1;
                    }
                }
                HERE | BACK => page += 1,
                // Somebody has it in hand: when that is over, it is here or out.
                _ => self.wait_for(page),
            }
        }
        let end = pages.end;
        for chunk in pages.start / CHUNK..end.div_ceil(CHUNK) {
            let _quiet = Blocked::all();
            let mut parking = lock(&self.parking);
            let all = chunk * CHUNK..((chunk + 1) * CHUNK).min(self.pages());
            self.sweep(all.clone());
            // Also one that somebody has in hand: until its bytes are there, who touches it must not get the kernel's zeros.
            let here = |page| matches!(self.state(page).load(Ordering::Acquire), HERE | BACK);
            if parking.missing[chunk] && all.clone().all(here) {
                // Nothing goes out while we have `parking`: absent pages are the kernel's again.
                let range = self.addresses(&all);
                if self.uffd.unregister(range).is_ok() {
                    // Whether it is watched again or not: what goes out next asks for both.
                    parking.missing[chunk] = false;
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
    fn a_page_that_is_on_its_way_back_is_no_fresh_one() {
        let Some(mut region) = region(2 * PAGE_SIZE) else { return };
        (0..).zip(&mut *region).for_each(|(at, byte): (usize, _)| *byte = (at * at / 64) as u8 | 1);
        let before = region.to_vec();
        assert_eq!(region.parker().park(0..2 * PAGE_SIZE, Effort::Fast).pages, 2);
        // As a handler has it that was interrupted before its copy.
        region.shared.state(1).store(BUSY, Ordering::Release);
        assert_eq!(region.shared.unpark(0..1).unwrap(), 1);
        region.shared.state(1).store(OUT, Ordering::Release);
        assert!(*region == before[..]);
    }
}
