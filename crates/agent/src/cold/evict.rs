//! How pages are evicted: copied while the program runs, later frozen, compared with the copy, and freed.
//!
//! Mapping lock and owner lock are held from the freeze until each page is out or back where it was: no page may be in the
//! freeze area when either is free for good. Where a discard by a raw call waits for its event, the owner lock is given away
//! for a moment, so the states in the residency map say at any time which pages are frozen.

use super::daemon_liveness::DaemonLiveness;
use super::session::{ColdSession, Connection};
use crate::address_space::prefault;
use crate::address_space::regions::is_left_alone;
use crate::owned_ranges;
use crate::runtime::thread::yield_now;
use crate::state::{COLD_AGENT, SHARED};
use core::sync::atomic::Ordering;
use pagefold_os::raw::{Errno, Result};
use pagefold_os::{PAGE_SIZE, Page, Range, mem, sched, uffd};
use pagefold_protocol::channel::Channel;
use pagefold_protocol::message::{EVICT_BUSY, EVICT_DONE, EvictEntry, FETCH_PAGES_MAX, RegionEntry};
use pagefold_protocol::residency_map::{DISCARDED, EVICTED, FROZEN, RESIDENT};

const PAGE: u64 = PAGE_SIZE as u64;

/// A chunk from which the program discarded pages is left alone for so long, in nanoseconds: the thread that does it
/// through a raw system call acts a moment after the daemon heard of it.
const REMOVED_NS: u64 = 1_000_000_000;
/// How often a move that says "try again" is tried again before the page counts as pinned.
const MOVE_TRIES: u32 = 64;

impl ColdSession {
    /// Copies pages to the channel.
    /// Page `n` of all runs together lies in place `first + n`, and the byte of that place in the answer says whether it
    /// was copied. Returns the place behind the last.
    pub(super) fn copy(&self, connection: &Connection, count: usize, first: usize) -> Result<usize> {
        let channel = &connection.channel;
        let mut place = first.min(FETCH_PAGES_MAX);
        for index in 0..count {
            let run: RegionEntry = channel.request(index);
            let range = Range { start: run.start, end: run.end };
            let pages = if range.is_empty() { 0 } else { (range.pages() as usize).min(FETCH_PAGES_MAX - place) };
            let copied = channel.copy_in(range, place) / PAGE_SIZE;
            for page in 0..pages {
                channel.put_answer_of_page(place + page, u8::from(page < copied));
            }
            place += pages;
        }
        Ok(place)
    }

    /// Takes those pages away that still equal their copies; byte `n` of the answer says whether page `n` is out. It is
    /// `asked` now by the daemon's clock.
    pub(super) fn evict_pages(&mut self, connection: &Connection, count: usize, asked: u64) -> Result<usize> {
        let _held = SHARED.mapping_lock.lock(COLD_AGENT);
        // Of what a bare call has unmapped or moved the daemon hears first: else it would take what is there now, and goes
        // out, for what was there before.
        for _ in 0..MOVE_TRIES {
            if !self.residency.lock_within(200) {
                return Err(Errno(libc::EBUSY));
            }
            if !self.hold.is_changing() {
                return self.evict_with_lock(connection, count, asked);
            }
            self.residency.unlock();
            yield_now();
        }
        Err(Errno(libc::EAGAIN))
    }

    /// As [`evict_pages`](Self::evict_pages), with mapping lock and owner lock held; that is free then.
    pub(super) fn evict_with_lock(&mut self, connection: &Connection, count: usize, asked: u64) -> Result<usize> {
        let channel = &connection.channel;
        (0..FETCH_PAGES_MAX).for_each(|place| channel.put_answer_of_page(place, 0));
        if self.residency.head().epoch.load(Ordering::Relaxed) != connection.epoch {
            // Another daemon has taken over, and does not know what this request is about.
            self.residency.unlock();
            return Err(Errno(libc::ESTALE));
        }
        for index in 0..count {
            let run: EvictEntry = channel.request(index);
            let (pages, place) = (run.pages as usize, run.place as usize);
            let range = Range::pages_from(run.start, u64::from(run.pages));
            let around = Range { start: run.around_start, end: run.around_end };
            let inside = around.start <= range.start && range.end <= around.end;
            if pages == 0 || place + pages > FETCH_PAGES_MAX || !range.start.is_multiple_of(PAGE) || !inside {
                continue;
            }
            // The owner lock may have been away for a moment, and with it the daemon that asked.
            if self.residency.head().epoch.load(Ordering::Relaxed) == connection.epoch {
                self.evict_run(range, around, place, connection, asked);
            }
        }
        self.residency.unlock();
        // Wakes threads that wait for a page that stayed, or that faulted on a frozen page.
        for index in 0..count {
            let run: EvictEntry = channel.request(index);
            let _ = self.hold.wake(Range::pages_from(run.start, u64::from(run.pages.min(FETCH_PAGES_MAX as u32))));
        }
        self.make_exclusive(channel, count);
        let (Some(freeze_area), Some(mover)) = (&self.freeze_area, &self.mover) else { return Ok(0) };
        // Its rights are those of all memory that is evicted.
        owned_ranges::empty_freeze_area(freeze_area.range(), mem::READ_WRITE, mover);
        Ok(count)
    }

    /// Makes pages that the kernel would not move exclusive to the process, as the next write would: a page that a fork
    /// shared counts as shared until then, even long after the child has ended. The daemon may ask again.
    ///
    /// Without the owner lock: a page that is evicted meanwhile is a fault that the daemon answers. That fault must not wait
    /// for room, because the daemon makes room only after this answer.
    pub(super) fn make_exclusive(&self, channel: &Channel, count: usize) {
        for index in 0..count {
            let run: EvictEntry = channel.request(index);
            let pages = run.pages as usize;
            if run.place as usize + pages > FETCH_PAGES_MAX {
                continue;
            }
            let busy = |page: usize| channel.answer_of_page(run.place as usize + page) == EVICT_BUSY;
            let mut page = 0;
            while page < pages {
                let from = page;
                while page < pages && busy(page) {
                    page += 1;
                }
                if from < page {
                    let start = run.start + (from * PAGE_SIZE) as u64;
                    let bringing = &self.residency.head().paused_evictions;
                    bringing.fetch_add(1, Ordering::SeqCst);
                    // SAFETY: changes no bytes.
                    let _ =
                        unsafe { mem::advise(start, ((page - from) * PAGE_SIZE) as u64, libc::MADV_POPULATE_WRITE) };
                    bringing.fetch_sub(1, Ordering::SeqCst);
                }
                page += 1;
            }
        }
    }

    fn evict_run(&self, range: Range, around: Range, place: usize, connection: &Connection, asked: u64) {
        let channel = &connection.channel;
        let (Some(mover), Some(freeze_area)) = (&self.mover, &self.freeze_area) else { return };
        let held = SHARED.mapping_lock.lock(COLD_AGENT);
        if is_left_alone(SHARED.tables(&held).table, range) {
            return;
        }
        // The note is by the daemon's clock or by ours, which a time namespace may have set apart.
        let now = [asked, sched::monotonic_ns()];
        let is_calm = |index| {
            let removed = self.residency.last_discard(index).load(Ordering::Relaxed);
            now.iter().all(|now| now.abs_diff(removed) > REMOVED_NS)
        };
        if !self.residency.add_range(range, is_calm) {
            return;
        }
        // In missing mode from here on: an access to an absent page of the region waits for the daemon.
        if self.hold.register(around, uffd::MODE_MISSING | uffd::MODE_WP).is_err()
            && self.hold.register(range, uffd::MODE_MISSING | uffd::MODE_WP).is_err()
        {
            return;
        }
        let pages = range.pages() as usize;
        let base = freeze_area.range().start + (place * PAGE_SIZE) as u64;
        // Marked before the move, so that an absent page never counts as untouched while the owner lock is given away for a
        // moment.
        for addr in (range.start..range.end).step_by(PAGE_SIZE) {
            self.residency.set_state(addr, FROZEN);
        }
        let mut at = range.start;
        let mut tries = 0;
        // A move stays within one mapping; a run may lie in several. Then page by page.
        let mut single = false;
        while at < range.end {
            let mode = uffd::MOVE_ALLOW_SRC_HOLES | uffd::DONTWAKE;
            let end = if single { at + PAGE } else { range.end };
            let (moved, error) = mover.move_pages(base + (at - range.start), Range { start: at, end }, mode);
            at += moved;
            match error {
                None => {}
                Some(Errno(libc::EAGAIN)) if tries < MOVE_TRIES => tries += 1,
                Some(Errno(libc::EINVAL)) if !single => single = true,
                Some(Errno(errno)) => {
                    if errno == libc::EBUSY {
                        let page = (at - range.start) as usize / PAGE_SIZE;
                        channel.put_answer_of_page(place + page, EVICT_BUSY);
                    }
                    at += PAGE;
                    tries = 0;
                }
            }
        }
        let mut back = [true; FETCH_PAGES_MAX];
        prefault::each_present(Range::pages_from(base, range.pages()), &self.pagemap, |page| {
            // SAFETY: the page is resident in the freeze area, where no other thread writes.
            let frozen = unsafe { &*((base + (page * PAGE_SIZE) as u64) as *const Page) };
            if channel.holds_page(place + page, frozen) {
                back[page] = false;
                self.residency.set_state(range.start + (page * PAGE_SIZE) as u64, EVICTED);
                channel.put_answer_of_page(place + page, EVICT_DONE);
            }
        });
        let mut page = 0;
        while page < pages {
            let from = page;
            while page < pages && back[page] {
                page += 1;
            }
            if from < page {
                let start = (from * PAGE_SIZE) as u64;
                self.move_back(range.start + start, base + start, (page - from) as u64);
                for addr in (range.start + start..range.start + (page * PAGE_SIZE) as u64).step_by(PAGE_SIZE) {
                    self.residency.set_state(addr, RESIDENT);
                }
            }
            page += 1;
        }
    }

    /// Moves frozen pages back to where they were; holes are skipped. The owner lock is held before and after.
    fn move_back(&self, dst: u64, src: u64, pages: u64) {
        let end = src + pages * PAGE;
        let mut liveness = DaemonLiveness::default();
        let mut at = src;
        let mut single = false;
        while at < end {
            let target = dst + (at - src);
            let mode = uffd::MOVE_ALLOW_SRC_HOLES | uffd::DONTWAKE;
            let stop = if single { at + PAGE } else { end };
            let (moved, error) = self.hold.move_pages(target, Range { start: at, end: stop }, mode);
            at += moved;
            let target = dst + (at - src);
            match error {
                None => {}
                // The program discards something through a raw call: its event must be read before anything moves.
                Some(Errno(libc::EAGAIN)) => self.let_events_pass(target, at, (end - at) / PAGE, &mut liveness),
                Some(Errno(libc::ENOMEM | libc::EBUSY)) => yield_now(),
                // The run lies in several mappings.
                Some(Errno(errno)) if !single && errno != libc::EEXIST => single = true,
                // The place is marked for write protection, which a move does not take for empty, but a copy does; or its
                // rights have changed by a raw call. Where nothing was there zeros are right too.
                Some(_) => {
                    // SAFETY: the page is in the freeze area.
                    let (_, error) = unsafe { self.hold.copy(target, at, PAGE, uffd::DONTWAKE) };
                    match error {
                        Some(Errno(libc::EAGAIN)) => self.let_events_pass(target, at, (end - at) / PAGE, &mut liveness),
                        Some(Errno(libc::ENOMEM)) => yield_now(),
                        _ => at += PAGE,
                    }
                }
            }
        }
    }

    /// Gives the owner lock away for a moment, so that the daemon reads the waiting events; drops pages that they discard.
    /// If no daemon is left to read them, the agent reads them, and takes the lock from its dead holder.
    fn let_events_pass(&self, dst: u64, src: u64, pages: u64, liveness: &mut DaemonLiveness) {
        self.residency.unlock();
        yield_now();
        let mut alone = liveness.is_lost(&self.residency);
        while !alone && !self.residency.lock_within(100) {
            alone = liveness.is_lost(&self.residency);
        }
        if alone {
            self.force_lock();
            self.apply_events();
        }
        for page in 0..pages {
            if self.residency.state(dst + page * PAGE) == DISCARDED
                && let Some(mover) = &self.mover
            {
                owned_ranges::empty_freeze_area(Range::pages_from(src + page * PAGE, 1), mem::READ_WRITE, mover);
            }
        }
    }

    /// Ends the missing mode of `range` if no page of it is out; new pages cost nothing of ours again.
    pub(super) fn release(&self, range: Range) -> Result<()> {
        let _held = SHARED.mapping_lock.lock(COLD_AGENT);
        if !self.residency.lock_within(200) {
            return Err(Errno(libc::EBUSY));
        }
        let result = if self.residency.has(range, EVICTED) {
            Err(Errno(libc::EBUSY))
        } else {
            self.hold.unregister(range).and_then(|()| self.hold.register(range, uffd::MODE_WP))
        };
        self.residency.unlock();
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cold::fixture::{LONG, connected, connected_with};
    use pagefold_protocol::residency_map::OWNER_DAEMON;
    use std::sync::atomic::AtomicBool;
    use std::sync::{Arc, mpsc};
    use std::thread;

    /// While the agent makes pages exclusive, the daemon makes no room.
    #[test]
    fn making_pages_exclusive_does_not_wait_for_room() {
        let Some((cold, connection, memory)) = connected() else { return };
        let entry = EvictEntry {
            start: memory.addr(),
            around_start: memory.addr(),
            around_end: memory.addr() + PAGE,
            pages: 1,
            place: 0,
        };
        connection.channel.put_request(0, entry);
        connection.channel.put_answer_of_page(0, EVICT_BUSY);
        let bringing = || cold.residency.head().paused_evictions.load(Ordering::SeqCst);
        let asked = thread::scope(|scope| {
            let makes = scope.spawn(|| cold.make_exclusive(&connection.channel, 1));
            let mut polls = [libc::pollfd { fd: cold.hold.fd().raw(), events: libc::POLLIN, revents: 0 }];
            assert_eq!(pagefold_os::fd::poll(&mut polls, 60_000), Ok(1), "no fault");
            let asked = bringing();
            let page = [0u8; PAGE_SIZE];
            // SAFETY: the bytes are ours.
            let _ = unsafe { cold.hold.copy(memory.addr(), page.as_ptr() as u64, PAGE, 0) };
            makes.join().unwrap();
            asked
        });
        assert_eq!((asked, bringing()), (1, 0));
    }

    /// The daemon would take what goes out for what was there before.
    #[test]
    fn no_page_is_evicted_before_the_daemon_has_read_an_unmap() {
        let Some((mut cold, connection, memory)) = connected_with(uffd::FEATURE_EVENT_UNMAP) else { return };
        let page = memory.addr() + PAGE;
        let run = EvictEntry { start: page, around_start: page, around_end: page + PAGE, pages: 1, place: 0 };
        let went = thread::scope(|scope| {
            scope.spawn(|| {
                // SAFETY: the test's memory, which is not used meanwhile.
                let _ = unsafe { mem::unmap(page, PAGE) };
            });
            let mut polls = [libc::pollfd { fd: cold.hold.fd().raw(), events: libc::POLLIN, revents: 0 }];
            assert_eq!(pagefold_os::fd::poll(&mut polls, 60_000), Ok(1), "no event");
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
            let mut went = || {
                // SAFETY: where nothing is any more.
                unsafe {
                    assert_eq!(mem::map(page, PAGE, mem::READ_WRITE, flags, -1, 0), Ok(page));
                    (page as *mut u8).write_bytes(8, PAGE_SIZE);
                }
                connection.channel.put_request(0, run);
                connection.channel.write_page(0, &[8; PAGE_SIZE]);
                let _ = cold.evict_pages(&connection, 1, sched::monotonic_ns());
                cold.residency.state(page) == EVICTED
            };
            let went = went();
            while cold.hold.is_changing() {
                let _ = cold.hold.read_event_at_once();
            }
            went
        });
        // Else the mapping's end would wait for a reader.
        drop(cold);
        assert!(!went);
    }

    /// The daemon notes discards by its own clock, which in another time namespace is another.
    #[test]
    fn a_discard_is_timed_by_the_clock_that_noted_it() {
        const DAY_NS: u64 = 86_400_000_000_000;
        const NOTED: u64 = 400 * DAY_NS;
        let Some((mut cold, connection, memory)) = connected() else { return };
        let page = memory.addr() + PAGE;
        let run = EvictEntry { start: page, around_start: page, around_end: page + PAGE, pages: 1, place: 0 };
        connection.channel.put_request(0, run);
        connection.channel.write_page(0, &[7; PAGE_SIZE]);
        cold.residency.find_or_add(page).unwrap();
        let mut goes = |noted: u64, asked: u64| {
            cold.residency.note_discard(Range::pages_from(page, 1), noted);
            cold.evict_pages(&connection, 1, asked).unwrap();
            cold.residency.state(page) == EVICTED
        };
        assert!(!goes(NOTED, NOTED + 900_000_000), "too early by the daemon's clock");
        assert!(!goes(sched::monotonic_ns(), NOTED + DAY_NS), "too early by our own");
        assert!(goes(NOTED, NOTED + 1_100_000_000));
        // Else what is not there would wait.
        drop(cold);
    }

    /// A daemon dies while it holds the owner lock, before it has read of a discard for which a page must wait to come back.
    #[test]
    fn a_page_moves_back_though_no_daemon_is_left() {
        let Some((mut cold, connection, memory)) = connected() else { return };
        let (residency, first) = (cold.residency, memory.addr());
        // It differs from its copy.
        let run =
            EvictEntry { start: first + PAGE, around_start: first, around_end: first + 2 * PAGE, pages: 1, place: 0 };
        connection.channel.put_request(0, run);
        // SAFETY: the test's memory, which is not used meanwhile.
        let discards = thread::spawn(move || unsafe { mem::advise(first, PAGE, libc::MADV_DONTNEED) });
        let mut polls = [libc::pollfd { fd: cold.hold.fd().raw(), events: libc::POLLIN, revents: 0 }];
        assert_eq!(pagefold_os::fd::poll(&mut polls, 60_000), Ok(1), "no discard");
        let over = Arc::new(AtomicBool::new(false));
        let dies = {
            let over = over.clone();
            move || {
                while !over.load(Ordering::Relaxed)
                    && (residency.state(first + PAGE) != FROZEN || !residency.try_lock(OWNER_DAEMON))
                {
                    thread::yield_now();
                }
            }
        };
        let dies = thread::spawn(dies);
        let (say, said) = mpsc::channel();
        thread::spawn(move || {
            assert!(cold.residency.lock_within(1000));
            say.send((cold.evict_with_lock(&connection, 1, sched::monotonic_ns()), cold)).is_ok()
        });
        let (dropped, cold) = said.recv_timeout(LONG).expect("it waits for a daemon");
        over.store(true, Ordering::Relaxed);
        dies.join().unwrap();
        assert_eq!((dropped, discards.join().unwrap()), (Ok(1), Ok(())));
        // Else what is not there would wait.
        drop(cold);
        // SAFETY: mapped and ours.
        assert_eq!(unsafe { memory.as_ptr().add(PAGE_SIZE).read() }, 7);
    }
}
