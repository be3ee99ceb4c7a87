//! Wakes a thread of ours that waits for its descriptors. The program's threads have none of these, and no signal reaches ours;
//! but an access to a page that a userfaultfd holds is an event there.
//!
//! So each of our threads has such a page with nothing in it. Who rings touches it, and waits until that is answered, or the
//! descriptor closed; its signals are handled meanwhile. Once touched it rings no more: if it was not by us (but by who touches
//! all memory), our thread finds out by itself what it is to do, when it looks around the next time.

use crate::limits::NOTHING;
use crate::owned_ranges::{self, Owned};
use pagefold_os::raw::{Errno, Result};
use pagefold_os::uffd::{self, Uffd};
use pagefold_os::{PAGE_SIZE, Range, mem};

/// Its page is registered among the owned ranges. A forked child inherits it.
#[derive(Debug)]
pub(crate) struct Bell {
    owned: Owned,
}

impl Bell {
    pub(crate) const fn new(owned: Owned) -> Bell {
        Bell { owned }
    }

    /// Whoever rings is an event of `uffd` from here on, which has not the page yet.
    pub(crate) fn hang(&self, uffd: &Uffd) {
        let register = || self.empty_page().and_then(|page| uffd.register(page, uffd::MODE_MISSING));
        if register().is_err() {
            // A child by a bare fork may hold the descriptor that was there before, and the page stays that one's: whoever rang
            // would wait for the child. A page of a moment ago is left to who may ring it just now.
            owned_ranges::register(self.owned, NOTHING);
            let _ = register();
        }
    }

    fn empty_page(&self) -> Result<Range> {
        let page = owned_ranges::range_of(self.owned);
        // SAFETY: the page is ours, and nobody reads what it holds.
        if !page.is_empty() && unsafe { mem::advise(page.start, page.len(), libc::MADV_DONTNEED) }.is_ok() {
            return Ok(page);
        }
        let fresh = mem::Mapping::anonymous(PAGE_SIZE)?;
        let page = Range::pages_from(fresh.addr(), 1);
        owned_ranges::register(self.owned, page);
        core::mem::forget(fresh);
        Ok(page)
    }

    /// Reads from `uffd`, which has nothing but pages like this one, that somebody rang, and lets him go on.
    pub(crate) fn answer(uffd: &Uffd) {
        while let Ok(Some(event)) = uffd.read_event() {
            if let uffd::Event::PageFault { addr, .. } = event {
                let page = Range::pages_from(addr & !(PAGE_SIZE as u64 - 1), 1);
                if uffd.zero(page, 0).1 == Some(Errno(libc::EEXIST)) {
                    let _ = uffd.wake(page);
                }
            }
        }
    }

    /// Has the thread look up from what it waits for. The guard must not be held.
    ///
    /// It may not answer before another thread lets go of the guard, or another process does its part. Handlers of signals run
    /// meanwhile: they do beside an access of a thread's own, not beside one by the kernel.
    #[cfg(any(feature = "preload", test))]
    pub(crate) fn ring(&self) {
        let page = owned_ranges::range_of(self.owned);
        // Who takes away all that the list of mappings shows has this, too.
        // SAFETY: changes no bytes.
        if !page.is_empty()
            && unsafe { mem::protect(page.start, page.len(), libc::PROT_READ | libc::PROT_WRITE) }.is_ok()
        {
            // SAFETY: the page is there, and ours.
            unsafe { core::ptr::read_volatile(page.start as *const u8) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::Ordering;

    #[test]
    fn who_waits_is_woken() {
        let device = uffd::open_device().ok();
        static BELL: Bell = Bell::new(Owned::ColdWakeup);
        BELL.ring();
        // As by a child of a bare fork.
        let mut held = Vec::new();
        for round in 0..3 {
            let Ok(uffd) = Uffd::new(device.as_ref(), 0) else { return eprintln!("SKIPPED: needs a userfaultfd") };
            BELL.hang(&uffd);
            held.extend((round > 0).then(|| uffd.fd().duplicate().unwrap()));
            let (say, said) = std::sync::mpsc::channel();
            // Not scoped: a thread that is stuck must not hold up the test that says so.
            let waiting = std::thread::spawn(move || {
                let fd = uffd.fd().raw();
                // As long as it takes.
                let ready = pagefold_os::fd::poll(&mut [libc::pollfd { fd, events: libc::POLLIN, revents: 0 }], -1);
                if round > 0 {
                    Bell::answer(&uffd);
                }
                say.send(ready)
            });
            let ringing = std::thread::spawn(|| BELL.ring());
            assert_eq!(said.recv_timeout(std::time::Duration::from_secs(60)), Ok(Ok(1)), "round {round}");
            ringing.join().unwrap();
            assert_eq!(waiting.join().unwrap(), Ok(()));
            // With nobody there.
            BELL.ring();
        }
    }

    #[test]
    fn who_rings_hears_signals() {
        use std::os::unix::thread::JoinHandleExt as _;
        static BELL: Bell = Bell::new(Owned::Wakeup);
        static HEARD: core::sync::atomic::AtomicBool = core::sync::atomic::AtomicBool::new(false);
        extern "C" fn hear(_: libc::c_int) {
            HEARD.store(true, Ordering::Relaxed);
        }
        let Ok(uffd) = Uffd::new(uffd::open_device().ok().as_ref(), 0) else {
            return eprintln!("SKIPPED: needs a userfaultfd");
        };
        BELL.hang(&uffd);
        // SAFETY: the handler stores a word, and nobody else has the signal.
        unsafe { libc::signal(libc::SIGUSR1, hear as *const () as libc::sighandler_t) };
        let ringing = std::thread::spawn(|| BELL.ring());
        let fd = uffd.fd().raw();
        let rung = pagefold_os::fd::poll(&mut [libc::pollfd { fd, events: libc::POLLIN, revents: 0 }], 60_000);
        // SAFETY: the thread waits for us.
        unsafe { libc::pthread_kill(ringing.as_pthread_t(), libc::SIGUSR1) };
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while !HEARD.load(Ordering::Relaxed) && std::time::Instant::now() < deadline {
            crate::runtime::thread::yield_now();
        }
        let heard = HEARD.load(Ordering::Relaxed);
        drop(uffd);
        ringing.join().unwrap();
        assert_eq!((rung, heard), (Ok(1), true));
    }
}
