//! Pages come in: copied to the client, then *resident* in its table, then their entries are discarded.
//!
//! The caller holds `service` and the owner lock; a thread that loads beside the client's own takes both after loading. A
//! page that cannot be loaded is poisoned, never replaced.

use super::{Client, PAGE, Served};
use pagefold_os::{Errno, Page, Range};
use pagefold_protocol::residency_map::{EVICTED, RESIDENT};
use pagefold_tier::{LoadError, Tier};
use std::sync::atomic::Ordering;

/// Lost pages of a client that are reported with a line each; the counter has all. A client can claim any number.
const LOSSES_TOLD: u64 = 16;

/// True if memory was short for the read: nothing is wrong with the bytes.
pub(crate) fn is_passing(error: &LoadError) -> bool {
    let errno = match error {
        LoadError::ReadBack { source, .. } => source.raw_os_error(),
        _ => None,
    };
    matches!(errno, Some(libc::ENOMEM | libc::EAGAIN))
}

impl Client {
    /// Brings back the evicted ones of `pages`, at most [`super::CLUSTER_PAGES`], beside the client's own thread. A page
    /// that cannot be brought back now is left to its own fault.
    pub(crate) fn bring_ahead(&self, tier: &Tier, pages: std::ops::Range<u64>, buffer: &mut [Page]) {
        let leaving = self.leaving.load(Ordering::SeqCst);
        // Loading needs no lock: what is true at the end counts.
        let pages: Vec<u64> = pages.collect();
        let load = |(page, place): (&u64, &mut Page)| {
            self.table.state(page * PAGE) == EVICTED && tier.load_quietly(self.client_id, *page, place)
        };
        let loaded: Vec<bool> = pages.iter().zip(&mut *buffer).map(load).collect();
        let _service = self.take_service();
        if self.take_owner_lock(200) {
            // A page that came and went again meanwhile has another content. Checked under the owner lock: no page is
            // evicted until that is free.
            if self.leaving.load(Ordering::SeqCst) == leaving {
                self.copy_loaded(tier, &pages, &loaded, buffer);
            }
            self.table.unlock();
        }
    }

    /// Copies those of `pages` to the client that were loaded into the same places of `buffer` and are still out; true if
    /// all came. The caller holds `service` and the owner lock.
    pub(crate) fn copy_loaded(&self, tier: &Tier, pages: &[u64], loaded: &[bool], buffer: &[Page]) -> bool {
        let ready = |at: usize| loaded[at] && self.table.state(pages[at] * PAGE) == EVICTED;
        let mut all = true;
        let mut at = 0;
        while at < pages.len() {
            let from = at;
            while at < pages.len() && pages[at] == pages[from] + (at - from) as u64 && ready(at) {
                at += 1;
            }
            if at == from {
                at += 1;
                continue;
            }
            let end = pages[from] + (at - from) as u64;
            all &= self.copy_run(tier, pages[from], end, buffer[from..at].as_ptr() as u64).end == end;
        }
        all
    }

    /// Copies pages `start..end`, which are out, to the client and settles the books; returns the part that is done.
    pub(crate) fn copy_run(&self, tier: &Tier, start: u64, end: u64, source: u64) -> std::ops::Range<u64> {
        let mut at = start;
        // A copy stays within one mapping; a run may lie in several. Then page by page.
        let mut single = false;
        while at < end {
            let len = if single { 1 } else { end - at };
            // SAFETY: the caller's pages are ours and lie one behind the other from `source`.
            let (done, error) = unsafe { self.uffd.copy(at * PAGE, source + (at - start) * PAGE, len * PAGE, 0) };
            let came = at + done / PAGE;
            if came > at {
                self.settle(tier, at, came);
                at = came;
            }
            match error {
                None => {}
                // It is there: another thread was quicker, or a predecessor died right after the copy.
                Some(Errno(libc::EEXIST)) => {
                    self.settle(tier, at, at + 1);
                    let _ = self.uffd.wake(Range::pages_from(at * PAGE, 1));
                    at += 1;
                }
                Some(Errno(libc::ENOMEM)) => {
                    self.lacks_memory.store(true, Ordering::Relaxed);
                    return start..at;
                }
                Some(Errno(libc::EAGAIN)) => return start..at,
                Some(Errno(libc::ESRCH)) => return start..end,
                Some(_) if !single => single = true,
                // No mapping of ours there: an event will say so.
                Some(_) => {
                    let _ = self.uffd.wake(Range::pages_from(at * PAGE, 1));
                    at += 1;
                }
            }
        }
        start..at
    }

    pub(crate) fn settle(&self, tier: &Tier, start: u64, end: u64) {
        self.set(start * PAGE, end * PAGE, RESIDENT);
        tier.discard(self.client_id, start..end);
        self.counters.pages_returned.fetch_add(end - start, Ordering::Relaxed);
    }

    /// A page cannot be brought back: a thread that touches it gets SIGBUS, never other bytes. If only memory is short, it
    /// waits.
    pub(crate) fn lose(&self, tier: &Tier, addr: u64, error: &LoadError) -> Served {
        if is_passing(error) {
            return self.wait_for_memory();
        }
        let (_, result) = self.uffd.poison(Range::pages_from(addr, 1), 0);
        self.lost(tier, addr, error, result)
    }

    /// As [`lose`](Self::lose), where the kernel has said `result` to the page's end.
    fn lost(&self, tier: &Tier, addr: u64, error: &LoadError, result: Option<Errno>) -> Served {
        match result {
            Some(Errno(libc::EAGAIN)) => return Served::Again,
            // Of page tables. Called resident now it would read zeros.
            Some(Errno(libc::ENOMEM)) => return self.wait_for_memory(),
            _ => {}
        }
        // What was moved may have been there all along.
        let is_there = result == Some(Errno(libc::EEXIST)) && self.table.state(addr) != EVICTED;
        if !is_there && self.counters.lost.load(Ordering::Relaxed) < LOSSES_TOLD {
            eprintln!(
                "pagefold: {} ({}): the page at {addr:#x} is lost ({error}); an access to it ends in SIGBUS",
                self.name, self.pid
            );
        }
        if self.table.set_state(addr, RESIDENT) == EVICTED {
            tier.discard(self.client_id, addr / PAGE..addr / PAGE + 1);
        }
        let _ = self.uffd.wake(Range::pages_from(addr, 1));
        if !is_there {
            self.counters.lost.fetch_add(1, Ordering::Relaxed);
            self.table.head().lost.fetch_add(1, Ordering::Relaxed);
        }
        Served::Done
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::own;
    use super::*;
    use pagefold_os::PAGE_SIZE;
    use std::io;

    #[test]
    fn a_page_loaded_before_it_was_evicted_again_is_not_copied_in() {
        let Some((client, memory)) = own(0, 1) else { return };
        let tier = Tier::create(pagefold_tier::Config { bytes_max: 4 << 20, ..Default::default() }, None).unwrap();
        let page = memory.addr() / PAGE;
        let store = |byte: u8| {
            let content: Page = std::array::from_fn(|at| if at % 2 == 0 { byte } else { at as u8 });
            tier.store(client.client_id, page, &content, pagefold_tier::Effort::Fast).unwrap();
        };
        client.table.find_or_add(memory.addr()).unwrap();
        client.table.set_state(memory.addr(), EVICTED);
        // Many times: the thread that brings it gives up soon if it loses the processor meanwhile.
        for _ in 0..1000 {
            store(1);
            assert!(client.table.try_lock(pagefold_protocol::residency_map::OWNER_AGENT));
            std::thread::scope(|scope| {
                let brings = scope.spawn(|| client.bring_ahead(&tier, page..page + 1, &mut [[0; PAGE_SIZE]; 1]));
                // It has loaded it when it has this.
                while client.service.try_lock().is_ok() && !brings.is_finished() {
                    std::hint::spin_loop();
                }
                // As evictor and agent do with a page that came back and was written.
                store(2);
                client.leaving.fetch_add(1, Ordering::SeqCst);
                client.table.unlock();
            });
            assert_eq!(client.table.state(memory.addr()), EVICTED, "the page has the content that it had before");
        }
    }

    #[test]
    fn a_page_that_cannot_be_read_for_want_of_memory_is_not_lost() {
        let Some((client, memory)) = own(0, 1) else { return };
        let tier = Tier::create(pagefold_tier::Config { bytes_max: 4 << 20, ..Default::default() }, None).unwrap();
        let page = memory.addr() / PAGE;
        tier.store(client.client_id, page, &[7; PAGE_SIZE], pagefold_tier::Effort::Fast).unwrap();
        client.table.find_or_add(memory.addr()).unwrap();
        client.table.set_state(memory.addr(), EVICTED);
        let lose = |errno| {
            let source = io::Error::from_raw_os_error(errno);
            let error = LoadError::ReadBack { client: client.client_id, page, source };
            let waits = matches!(client.lose(&tier, memory.addr(), &error), Served::Again);
            (waits, tier.contains(client.client_id, page), client.counters.lost.load(Ordering::Relaxed))
        };
        assert_eq!(lose(libc::ENOMEM), (true, true, 0));
        assert_eq!(lose(libc::EAGAIN), (true, true, 0));
        assert_eq!(lose(libc::EIO), (false, false, 1));
    }

    /// The kernel may have no memory for the mark that makes a touch SIGBUS.
    #[test]
    fn a_page_that_cannot_be_poisoned_yet_waits() {
        let Some((client, memory)) = own(0, 1) else { return };
        let tier = Tier::create(pagefold_tier::Config { bytes_max: 4 << 20, ..Default::default() }, None).unwrap();
        client.table.find_or_add(memory.addr()).unwrap();
        client.table.set_state(memory.addr(), EVICTED);
        let error = LoadError::NotStored { client: client.client_id, page: memory.addr() / PAGE };
        let lost = |result| {
            let waits = matches!(client.lost(&tier, memory.addr(), &error, result), Served::Again);
            (waits, client.table.state(memory.addr()), client.counters.lost.load(Ordering::Relaxed))
        };
        assert_eq!(lost(Some(Errno(libc::ENOMEM))), (true, EVICTED, 0));
        assert_eq!(lost(Some(Errno(libc::EAGAIN))), (true, EVICTED, 0));
        assert_eq!(lost(None), (false, RESIDENT, 1));
    }
}
