//! Wakes a thread of the agent that waits for its descriptors. The program's threads have none of these descriptors, and no
//! signal reaches the agent's threads; but an access to a page that a userfaultfd has registered is an event there.
//!
//! So each thread of the agent has an empty page for this. A thread that wakes it touches the page, and waits until the
//! fault is answered or the descriptor closed; its signals are handled meanwhile. A page that is present wakes no more. If
//! something else touched it (a call that touches all memory), the agent's thread finds out what to do at its next
//! housekeeping.

use crate::limits::NOTHING;
use crate::owned_ranges::{self, Owned};
use pagefold_os::raw::{Errno, Result};
use pagefold_os::uffd::{self, Uffd};
use pagefold_os::{PAGE_SIZE, Range, mem};

/// Its page is registered among the owned ranges. A forked child inherits it.
#[derive(Debug)]
pub(crate) struct Wakeup {
    owned: Owned,
}

impl Wakeup {
    pub(crate) const fn new(owned: Owned) -> Wakeup {
        Wakeup { owned }
    }

    /// Registers the page with `uffd`, which has not had it yet: a wakeup is an event there from now on.
    pub(crate) fn register(&self, uffd: &Uffd) {
        let register = || self.empty_page().and_then(|page| uffd.register(page, uffd::MODE_MISSING));
        if register().is_err() {
            // A child made by a raw fork may hold the descriptor that was there before, and its registration of the page: a
            // waking thread would wait for the child. The old page stays mapped for a thread that may be touching it just
            // now.
            owned_ranges::register(self.owned, NOTHING);
            let _ = register();
        }
    }

    fn empty_page(&self) -> Result<Range> {
        let page = owned_ranges::range_of(self.owned);
        // SAFETY: the page is the agent's, and its content is never used.
        if !page.is_empty() && unsafe { mem::advise(page.start, page.len(), libc::MADV_DONTNEED) }.is_ok() {
            return Ok(page);
        }
        let fresh = mem::Mapping::anonymous(PAGE_SIZE)?;
        let page = Range::pages_from(fresh.addr(), 1);
        owned_ranges::register(self.owned, page);
        core::mem::forget(fresh);
        Ok(page)
    }

    /// Reads the wakeups from `uffd`, which has only pages like this one, and wakes the threads that wait there.
    pub(crate) fn drain(uffd: &Uffd) {
        while let Ok(Some(event)) = uffd.read_event() {
            if let uffd::Event::PageFault { addr, .. } = event {
                let page = Range::pages_from(addr & !(PAGE_SIZE as u64 - 1), 1);
                if uffd.zero(page, 0).1 == Some(Errno(libc::EEXIST)) {
                    let _ = uffd.wake(page);
                }
            }
        }
    }

    /// Wakes the thread where it waits. The mapping lock must not be held.
    ///
    /// It may not answer before another thread lets go of the mapping lock, or another process does its part. Handlers of
    /// signals run meanwhile: they do beside an access of a thread's own, not beside one by the kernel.
    #[cfg(any(feature = "preload", test))]
    pub(crate) fn wake(&self) {
        let page = owned_ranges::range_of(self.owned);
        if page.is_empty() {
            return;
        }
        // A program that changes the rights of all its mappings changes those of this page, too.
        // SAFETY: changes no bytes.
        if unsafe { mem::protect(page.start, page.len(), mem::READ_WRITE) }.is_ok() {
            // SAFETY: the page is mapped, readable and the agent's.
            unsafe { core::ptr::read_volatile(page.start as *const u8) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::Ordering;

    #[test]
    fn a_waiting_thread_is_woken() {
        let device = uffd::open_device().ok();
        static WAKEUP: Wakeup = Wakeup::new(Owned::ColdWakeup);
        WAKEUP.wake();
        // As by a child of a bare fork.
        let mut held = Vec::new();
        for round in 0..3 {
            let Ok(uffd) = Uffd::new(device.as_ref(), 0) else { return eprintln!("SKIPPED: needs a userfaultfd") };
            WAKEUP.register(&uffd);
            held.extend((round > 0).then(|| uffd.fd().duplicate().unwrap()));
            let (say, said) = std::sync::mpsc::channel();
            // Not scoped: a thread that is stuck must not hold up the test that says so.
            let waiting = std::thread::spawn(move || {
                let fd = uffd.fd().raw();
                // As long as it takes.
                let ready = pagefold_os::fd::poll(&mut [libc::pollfd { fd, events: libc::POLLIN, revents: 0 }], -1);
                if round > 0 {
                    Wakeup::drain(&uffd);
                }
                say.send(ready)
            });
            let ringing = std::thread::spawn(|| WAKEUP.wake());
            assert_eq!(said.recv_timeout(std::time::Duration::from_secs(60)), Ok(Ok(1)), "round {round}");
            ringing.join().unwrap();
            assert_eq!(waiting.join().unwrap(), Ok(()));
            // Without a thread that waits.
            WAKEUP.wake();
        }
    }

    #[test]
    fn a_waking_thread_handles_signals() {
        use std::os::unix::thread::JoinHandleExt as _;
        static WAKEUP: Wakeup = Wakeup::new(Owned::Wakeup);
        static HEARD: core::sync::atomic::AtomicBool = core::sync::atomic::AtomicBool::new(false);
        extern "C" fn hear(_: libc::c_int) {
            HEARD.store(true, Ordering::Relaxed);
        }
        let Ok(uffd) = Uffd::new(uffd::open_device().ok().as_ref(), 0) else {
            return eprintln!("SKIPPED: needs a userfaultfd");
        };
        WAKEUP.register(&uffd);
        // SAFETY: the handler stores a word, and no other test uses the signal.
        unsafe { libc::signal(libc::SIGUSR1, hear as *const () as libc::sighandler_t) };
        let ringing = std::thread::spawn(|| WAKEUP.wake());
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
