//! The end of a cold client's session: every page that can return is faulted in, and the watch on its memory ends.
//!
//! A page that cannot return, because its daemon is lost or the program may not read it, is marked: a later touch is a bus
//! error and never reads zeros.

use super::daemon_liveness::DaemonLiveness;
use super::fault_in::{fault_in_by_thread, fault_in_everything};
use super::session::{ColdSession, RESIDENCY};
use crate::address_space::regions::for_each_anonymous;
use crate::runtime::wakeup::Wakeup;
use crate::state::{COLD_AGENT, SHARED};
use core::sync::atomic::{AtomicU64, Ordering};
use pagefold_os::fd::Fd;
use pagefold_os::{PAGE_SIZE, Range, mem, sched, uffd};
use pagefold_protocol::residency_map::{self, EVICTED, OWNER_AGENT, ResidencyMap, poison_evicted};

const PAGE: u64 = PAGE_SIZE as u64;

/// How long a leaving agent waits for the owner lock at a time, in milliseconds, and how often: longer in all than it takes
/// until daemon and keeper count as lost.
const SETTLE_MS: u32 = 100;
const SETTLE_TRIES: u32 = 150;

/// The last discards of earlier loans. A thread learns that its discard was read and acts on that a moment later, which may
/// be in the next loan.
static LAST_DISCARDS: [AtomicU64; residency_map::DISCARD_SLOTS] =
    [const { AtomicU64::new(0) }; residency_map::DISCARD_SLOTS];

/// Copies the last discards of earlier loans to the residency map of a new one.
pub(super) fn restore_discards(residency: &ResidencyMap) {
    for (other, removal) in residency.head().shared_discards.iter().zip(&LAST_DISCARDS) {
        other.store(removal.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

impl ColdSession {
    /// Brings everything back and ends; for good, or until the thread is started again.
    pub(super) fn leave(self) {
        self.fault_in_everything();
        self.leave_now();
    }

    /// Ends, when everything is back that can be.
    fn leave_now(self) {
        // A dead daemon may have left the owner lock taken: this waits for it before the mapping lock is held.
        let mut settles = self.settle();
        if settles {
            // What cannot be read for now (hidden, and its rights cannot be changed) would read zeros later.
            poison_evicted(&self.hold, &self.residency);
            self.residency.unlock();
        }
        // A holder that did not give the lock away once is not waited for again.
        let mut take_owner_lock = || {
            settles = if settles { self.residency.lock_within(1000) } else { self.residency.try_lock(OWNER_AGENT) };
            settles
        };
        self.drain_wakeups();
        // Unregistered now, because daemon and keeper have the descriptor too, and another descriptor may be about to
        // register the memory.
        for_each_anonymous(&self.maps, |range| {
            // A page is resident a moment before the map says so: the daemon holds the owner lock until it does.
            let settled = take_owner_lock();
            // What could not be brought back shall not read as zeros.
            if !self.residency.has(range, EVICTED) {
                let _ = self.hold.unregister(range);
            }
            if settled {
                self.residency.unlock();
            }
        });
        if take_owner_lock() {
            self.read_last_events();
            self.residency.unlock();
        }
        // Tells the daemon that the end of the connection is no accident.
        self.residency.head().client_id.store(0, Ordering::Release);
        self.drain_wakeups();
        // Readers of the map hold the mapping lock.
        let held = SHARED.mapping_lock.lock(COLD_AGENT);
        RESIDENCY.store(0, Ordering::Release);
        drop(held);
        // SAFETY: the mapping that `make` kept; no thread can find it any more.
        let _ = unsafe { mem::unmap(self.residency.base(), residency_map::FILE_BYTES as u64) };
        // Closing the descriptors ends all watching.
    }

    /// Faults everything in as long as a daemon or keeper lives; pages that are still evicted then are lost.
    fn fault_in_everything(&self) {
        let head = self.residency.head();
        let has_evicted = || head.evicted.load(Ordering::Acquire) > 0 || head.moving_pages.load(Ordering::SeqCst) > 0;
        let mut liveness = DaemonLiveness::of(&self.residency);
        let mut watch = || {
            self.drain_wakeups();
            let _ = pagefold_os::fd::poll(&mut [], 1);
            if liveness.is_lost(&self.residency) {
                self.poison_all();
            }
            liveness.is_unreachable()
        };
        // By another thread: a thread that waits for a page does not see that the daemon dies. Where no thread may be
        // started, the standby thread does it.
        let is_done = has_evicted() && fault_in_by_thread(|| _ = watch());
        // By this thread otherwise, but not while no daemon can be reached.
        while !is_done && has_evicted() && watch() {}
        if !is_done && has_evicted() {
            fault_in_everything();
        }
    }

    /// Takes the owner lock, from a dead daemon if need be; false if a live holder does not give it away.
    fn settle(&self) -> bool {
        let mut liveness = DaemonLiveness::of(&self.residency);
        for _ in 0..SETTLE_TRIES {
            self.drain_wakeups();
            if self.residency.lock_within(SETTLE_MS) {
                return true;
            }
            if liveness.is_lost(&self.residency) {
                self.force_lock();
                self.apply_events();
                return true;
            }
        }
        false
    }

    /// Wakes the threads that touched a wakeup page of this thread.
    pub(super) fn drain_wakeups(&self) {
        self.mover.iter().for_each(Wakeup::drain);
    }

    /// Reads the events that wait, after which there are no more, and keeps what is known of discards. The owner lock is
    /// held.
    fn read_last_events(&self) {
        while let Ok(Some(event)) = self.hold.read_event() {
            match event {
                uffd::Event::Remove(range) => self.residency.note_discard(range, sched::monotonic_ns()),
                uffd::Event::PageFault { addr, .. } => {
                    let _ = self.hold.wake(Range::pages_from(addr & !(PAGE - 1), 1));
                }
                // SAFETY: the kernel made the descriptor for us just now; the child has all its memory.
                uffd::Event::Fork(fd) => drop(unsafe { Fd::from_raw(fd) }),
                _ => {}
            }
        }
        for (kept, removal) in LAST_DISCARDS.iter().zip(self.residency.last_discards()) {
            kept.store(removal, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cold::fixture::{LEAVING, LONG, connected, connected_with};
    use crate::state::MAY_START;
    use pagefold_os::raw::Errno;
    use pagefold_os::syscall;
    use pagefold_os::uffd::Uffd;
    use pagefold_protocol::residency_map::{OWNER_DAEMON, RESIDENT};
    use std::sync::atomic::AtomicBool;
    use std::sync::{PoisonError, mpsc};
    use std::thread;
    use std::time::{Duration, Instant};

    #[test]
    fn a_leaving_agent_does_not_wait_for_a_dead_daemon() {
        let _alone = LEAVING.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((cold, _connection, memory)) = connected() else { return };
        cold.residency.find_or_add(memory.addr()).unwrap();
        cold.residency.set_state(memory.addr(), EVICTED);
        RESIDENCY.store(cold.residency.base(), Ordering::Release);
        let (say, said) = mpsc::channel();
        thread::spawn(move || {
            cold.leave();
            say.send(())
        });
        assert_eq!(said.recv_timeout(LONG), Ok(()));
        assert!(!super::super::fault_in::read_in(Range::pages_from(memory.addr(), 1)), "the page is no SIGBUS");
    }

    /// No thread may be started any more, and the daemon dies while a page is waited for.
    #[test]
    fn a_leaving_agent_without_threads_does_not_wait_for_a_dying_daemon() {
        let _alone = LEAVING.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((cold, _connection, memory)) = connected() else { return };
        let residency = cold.residency;
        residency.find_or_add(memory.addr()).unwrap();
        residency.set_state(memory.addr(), EVICTED);
        RESIDENCY.store(residency.base(), Ordering::Release);
        super::super::fault_in::start_standby();
        MAY_START.store(false, Ordering::Release);
        let (say, said) = mpsc::channel();
        thread::spawn(move || {
            cold.leave();
            say.send(())
        });
        // A daemon that serves, until the page is touched.
        while residency.head().paused_evictions.load(Ordering::SeqCst) == 0 {
            residency.head().heartbeat.fetch_add(1, Ordering::Release);
            thread::sleep(Duration::from_millis(1));
        }
        let left = said.recv_timeout(LONG);
        MAY_START.store(true, Ordering::Release);
        assert_eq!(left, Ok(()), "it waits for the page for ever");
        assert!(!super::super::fault_in::read_in(Range::pages_from(memory.addr(), 1)), "the page is no SIGBUS");
    }

    /// Does `act` beside a daemon that lives and has mapped the table too.
    fn with_a_daemon<T>(residency_fd: &Fd, act: impl FnOnce(&residency_map::Head) -> T) -> T {
        let map =
            mem::Mapping::file(residency_fd.raw(), 0, residency_map::FILE_BYTES, mem::READ_WRITE, libc::MAP_SHARED)
                .unwrap();
        // SAFETY: of that length, and mapped beyond the call.
        let head = unsafe { ResidencyMap::at(map.addr()) }.head();
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Acquire) {
                    head.heartbeat.fetch_add(1, Ordering::Release);
                    thread::sleep(Duration::from_millis(1));
                }
            });
            let done = act(head);
            over.store(true, Ordering::Release);
            done
        })
    }

    /// Pages that a raw mremap(2) moved are neither evicted in the map nor present.
    #[test]
    fn a_leaving_agent_waits_for_moving_pages() {
        let _alone = LEAVING.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((cold, _connection, memory)) = connected() else { return };
        // SAFETY: dup(2) takes no pointer, and the new descriptor has this one owner.
        let hold = Uffd::from_fd(unsafe { Fd::from_raw(libc::dup(cold.hold.fd().raw())) });
        cold.residency.head().moving_pages.store(1, Ordering::SeqCst);
        RESIDENCY.store(cold.residency.base(), Ordering::Release);
        let residency_fd = cold.residency_fd.duplicate().unwrap();
        let (waits, came) = with_a_daemon(&residency_fd, |head| {
            let leaves = thread::spawn(move || cold.leave());
            while !leaves.is_finished() && head.paused_evictions.load(Ordering::SeqCst) == 0 {
                thread::sleep(Duration::from_millis(1));
            }
            // Another daemon takes over, and knows of it.
            head.epoch.fetch_add(1, Ordering::SeqCst);
            thread::sleep(Duration::from_millis(50));
            let waits = !leaves.is_finished();
            // SAFETY: the bytes are ours.
            let came = unsafe { hold.copy(memory.addr(), [7u8; PAGE_SIZE].as_ptr() as u64, PAGE, 0) };
            head.moving_pages.store(0, Ordering::SeqCst);
            leaves.join().unwrap();
            (waits, came)
        });
        assert_eq!((waits, came), (true, (PAGE, None)));
    }

    /// A raw mremap(2) has moved a page, and the daemon has no time to read the event.
    #[test]
    fn a_leaving_agent_waits_for_a_move_that_is_not_read_yet() {
        let _alone = LEAVING.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((cold, _connection, memory)) = connected_with(uffd::FEATURE_EVENT_REMAP) else { return };
        // SAFETY: dup(2) takes no pointer, and the new descriptor has this one owner.
        let hold = Uffd::from_fd(unsafe { Fd::from_raw(libc::dup(cold.hold.fd().raw())) });
        let (residency, from) = (cold.residency, memory.addr());
        let target = mem::Mapping::anonymous(PAGE_SIZE).unwrap();
        let to = target.addr();
        residency.find_or_add(from).unwrap();
        residency.set_state(from, EVICTED);
        RESIDENCY.store(residency.base(), Ordering::Release);
        let moves = thread::spawn(move || {
            let fixed = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            // SAFETY: the test's memory, which is not used meanwhile.
            let _ = unsafe { syscall!(libc::SYS_mremap, from, PAGE, PAGE, fixed, to) };
        });
        let mut polls = [libc::pollfd { fd: hold.fd().raw(), events: libc::POLLIN, revents: 0 }];
        assert_eq!(pagefold_os::fd::poll(&mut polls, 60_000), Ok(1), "no move");
        let residency_fd = cold.residency_fd.duplicate().unwrap();
        with_a_daemon(&residency_fd, |head| {
            let leaves = thread::spawn(move || cold.leave());
            while !leaves.is_finished() && head.paused_evictions.load(Ordering::SeqCst) == 0 {
                thread::yield_now();
            }
            thread::sleep(Duration::from_millis(20));
            if matches!(hold.read_event_at_once(), Ok(Some(uffd::Event::Remap { .. }))) {
                head.moving_pages.store(1, Ordering::SeqCst);
                residency.set_state(from, RESIDENT);
                moves.join().unwrap();
                // SAFETY: the bytes are ours.
                unsafe { hold.copy(to, [7u8; PAGE_SIZE].as_ptr() as u64, PAGE, 0) };
                head.moving_pages.store(0, Ordering::SeqCst);
            }
            leaves.join().unwrap();
        });
        let is_there = super::super::fault_in::read_in(Range::pages_from(to, 1));
        // SAFETY: it can be read, as was just seen.
        assert_eq!(is_there.then(|| unsafe { *(to as *const u8) }), Some(7), "it is no page, or another");
        // Its first page may belong to another mapping by now.
        core::mem::forget(memory);
    }

    /// Memory that the program may not read, and that is sealed, so that its rights cannot change.
    #[test]
    fn a_page_that_cannot_return_never_reads_zeros() {
        let _alone = LEAVING.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((cold, _connection, memory)) = connected() else { return };
        // SAFETY: the page is never read; it stays mapped to the end of the process.
        let sealed = unsafe {
            mem::protect(memory.addr(), PAGE, libc::PROT_NONE).unwrap();
            syscall!(libc::SYS_mseal, memory.addr(), PAGE, 0)
        };
        if sealed.is_err() {
            return eprintln!("SKIPPED: this kernel seals no memory");
        }
        cold.residency.find_or_add(memory.addr()).unwrap();
        cold.residency.set_state(memory.addr(), EVICTED);
        RESIDENCY.store(cold.residency.base(), Ordering::Release);
        // SAFETY: dup(2) takes no pointer, and the new descriptor has this one owner.
        let hold = Uffd::from_fd(unsafe { Fd::from_raw(libc::dup(cold.hold.fd().raw())) });
        with_a_daemon(&cold.residency_fd, |_| cold.fault_in_everything());
        assert_eq!(cold.residency.state(memory.addr()), EVICTED, "it came");
        cold.leave_now();
        // Registered again it takes nothing in where a mark is.
        let range = Range::pages_from(memory.addr(), 1);
        let _ = hold.register(range, uffd::MODE_MISSING);
        assert_eq!(hold.zero(range, 0).1, Some(Errno(libc::EEXIST)), "it would read zeros");
        core::mem::forget(memory);
    }

    /// A daemon dies while it holds the owner lock, and with the event of a discard unread; another process keeps its
    /// descriptor.
    #[test]
    fn a_leaving_agent_takes_the_owner_lock_of_a_dead_daemon() {
        let _alone = LEAVING.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((cold, _connection, memory)) = connected() else { return };
        let first = memory.addr();
        // SAFETY: dup(2) takes no pointer, and the new descriptor has this one owner.
        let _kept = unsafe { Fd::from_raw(libc::dup(cold.hold.fd().raw())) };
        assert!(cold.residency.try_lock(OWNER_DAEMON));
        RESIDENCY.store(cold.residency.base(), Ordering::Release);
        let (say, said) = mpsc::channel();
        thread::spawn(move || {
            // SAFETY: the test's memory, which is not used meanwhile.
            let _ = unsafe { mem::advise(first, PAGE, libc::MADV_DONTNEED) };
            say.send(())
        });
        let mut polls = [libc::pollfd { fd: cold.hold.fd().raw(), events: libc::POLLIN, revents: 0 }];
        assert_eq!(pagefold_os::fd::poll(&mut polls, 60_000), Ok(1), "no discard");
        let leaves = thread::spawn(move || cold.leave());
        assert_eq!(said.recv_timeout(LONG), Ok(()), "the discard was not read");
        leaves.join().unwrap();
    }

    #[test]
    fn a_thread_that_waits_for_the_owner_lock_answers_wakeups() {
        let Some((cold, _connection, _memory)) = connected() else { return };
        let bell = mem::Mapping::anonymous(PAGE_SIZE).unwrap();
        let mover = cold.mover.as_ref().unwrap();
        mover.register(Range::pages_from(bell.addr(), 1), uffd::MODE_MISSING).unwrap();
        assert!(cold.residency.try_lock(OWNER_DAEMON));
        let rung = AtomicBool::new(false);
        let (end, rung) = (Instant::now() + LONG, &rung);
        thread::scope(|scope| {
            scope.spawn(|| {
                // SAFETY: mapped and ours.
                unsafe { bell.as_ptr().read_volatile() };
                rung.store(true, Ordering::Relaxed);
            });
            while !rung.load(Ordering::Relaxed) && Instant::now() < end {
                cold.settle();
            }
            let heard = rung.load(Ordering::Relaxed);
            // Otherwise the waking thread would wait for ever.
            drop(cold);
            assert!(heard, "the wakeup was not answered");
        });
    }
}
