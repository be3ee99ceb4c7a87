//! What the kernel tells of a client's memory: faults, which are kept to be served, and what takes pages away.
//!
//! Pages go by discards and unmaps, move by mremap(2), and are copied by forks that the agent did not see (`fork`). All of
//! that is obeyed before any fault of the same batch is served.

use super::event_journal::EVENTS;
use super::{Client, LOST_MAX, PAGE, Pending, Served, Service};
use pagefold_os::uffd::Event;
use pagefold_os::{ADDRESS_END, Errno, PAGE_SIZE, Range, sched};
use pagefold_protocol::message::FETCH_PAGES_MAX;
use pagefold_protocol::residency_map::{DISCARDED, EVICTED, FROZEN, RESIDENT};
use pagefold_tier::Tier;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// In place of an address under which the tier has a page: it has none.
const NOWHERE: u64 = !(PAGE - 1);
/// The tier has pages that are awaited under where they are awaited, and so much further on, where no memory can be.
pub(crate) const AWAITED: u64 = ADDRESS_END;
/// Tries to bring in moved pages, a millisecond apart: the thread that moved them may wait for a processor.
const MOVED_TRIES: u32 = 1000;

impl Client {
    /// Reads what events there are, obeys those that take pages away, and keeps the faults.
    pub(crate) fn read_events(&self, service: &mut Service, tier: &Tier) -> usize {
        let got = service.journal.read(&self.uffd);
        let now = sched::quick_monotonic_ns();
        // What takes pages away comes first: the kernel delivers faults before it, and they wait anyway.
        for place in 0..got {
            match service.journal.event(place) {
                Some(Event::PageFault { .. }) | None => {}
                Some(event) => self.obey_event(service, tier, place, event),
            }
        }
        for place in 0..got {
            if let Some(Event::PageFault { addr, write, thread }) = service.journal.event(place) {
                note_fault(service, addr & !(PAGE - 1), write, thread, now);
                service.journal.remove(place);
            }
        }
        if got > 0 {
            self.tell_moving(service);
        }
        got
    }

    /// Obeys what a daemon before us had read and not obeyed.
    pub(crate) fn obey_left(&self, service: &mut Service, tier: &Tier) {
        for place in 0..EVENTS {
            match service.journal.event(place) {
                None => {}
                // Its descriptor died with its reader.
                Some(Event::Fork(_)) => {
                    if self.lacks_pages(service) {
                        eprintln!(
                            "pagefold: {} ({}): a child that it forked as the daemon was killed may read zeros: end it",
                            self.name, self.pid
                        );
                    }
                    service.journal.remove(place);
                }
                Some(event) => self.obey_event(service, tier, place, event),
            }
        }
    }

    /// Obeys the event at `place` of the journal, and removes it. A fault asks for nothing here.
    pub(crate) fn obey_event(&self, service: &mut Service, tier: &Tier, place: usize, event: Event) {
        match event {
            Event::Remove(range) | Event::Unmap(range) => self.forget(service, tier, range),
            Event::Remap { from, to } => self.moved(service, tier, place, from, to),
            Event::Fork(fd) => self.forked(service, tier, place, fd),
            Event::PageFault { .. } | Event::Other(_) => {}
        }
        service.journal.remove(place);
    }

    /// Whether pages of the client are out, in the agent's hands, or on the move.
    pub(crate) fn lacks_pages(&self, service: &Service) -> bool {
        let everything = Range { start: 0, end: u64::MAX >> 1 };
        service.is_moving() || self.table.has(everything, EVICTED) || self.table.has(everything, FROZEN)
    }

    /// Tells the agent how many pages are on the move.
    pub(crate) fn tell_moving(&self, service: &Service) {
        self.table.head().moving_pages.store(service.moving.len() as u32, Ordering::SeqCst);
    }

    /// The pages of `range` are the program's nothing from now on.
    pub(crate) fn forget(&self, service: &mut Service, tier: &Tier, range: Range) {
        if range.is_empty() {
            return;
        }
        self.table.note_discard(range, sched::quick_monotonic_ns());
        self.table.for_each_run(range.start, range.end, FROZEN, |start, end| self.set(start, end, DISCARDED));
        self.table.for_each_run(range.start, range.end, EVICTED, |start, end| {
            self.set(start, end, RESIDENT);
            tier.discard(self.client_id, start / PAGE..end / PAGE);
        });
        if service.is_moving() {
            for (_, from) in take_range(&mut service.moving, range) {
                tier.discard(self.client_id, from / PAGE..from / PAGE + 1);
            }
        }
    }

    /// The pages of `from` are at `to` now; those that are out must come in there. The event is at `place` of the journal.
    fn moved(&self, service: &mut Service, tier: &Tier, place: usize, from: Range, to: u64) {
        // First: a thread that sees the pages as not evicted must also see this.
        self.table.head().moving_pages.fetch_add(1, Ordering::SeqCst);
        // Whatever was known of the target's addresses is of an earlier mapping; not of what is taken along.
        if !service.journal.is_cleared(place) {
            self.forget(service, tier, Range { start: to, end: to.saturating_add(from.len()) });
            service.journal.set_cleared(place);
        }
        self.take_along(service, tier, from, to);
    }

    /// What is out of `from` is awaited at `to`. Each step is one that may have been done before: a successor does all of
    /// them again, and finds what is awaited in the tier.
    fn take_along(&self, service: &mut Service, tier: &Tier, from: Range, to: u64) {
        let new = |addr: u64| to + (addr - from.start);
        // The page was being evicted when mremap(2) moved it, so the agent does not know its new address and drops its copy.
        // The new address must never read zeros. A page that the agent had put back has moved along and is intact. An agent
        // freezes no more pages than this at a time, whatever its residency map claims.
        let mut most = FETCH_PAGES_MAX;
        self.table.for_each_run(from.start, from.end, FROZEN, |start, end| {
            for addr in (start..end).step_by(PAGE_SIZE).take(most) {
                most -= 1;
                let kept = tier.lose_page(self.client_id, awaited_at(new(addr)) / PAGE).map(|()| awaited_at(new(addr)));
                service.moving.insert(new(addr), kept.unwrap_or(NOWHERE));
                self.table.set_state(addr, DISCARDED);
            }
        });
        for (was, at) in take_range(&mut service.moving, from) {
            let kept = awaited_at(new(was));
            let is_kept = at != NOWHERE && tier.copy_page(self.client_id, at / PAGE, kept / PAGE).is_ok();
            let at_last = match is_kept {
                true => kept,
                // By the name that says where it was a successor would bring it there.
                false if at >= AWAITED => NOWHERE,
                false => at,
            };
            service.moving.insert(new(was), at_last);
            if at_last != at {
                tier.discard(self.client_id, at / PAGE..at / PAGE + 1);
            }
        }
        // A table may claim far more than there is.
        let mut most = (tier.client_pages(self.client_id) + LOST_MAX).saturating_sub(service.moving.len() as u64);
        self.table.for_each_run(from.start, from.end, EVICTED, |start, end| {
            for addr in (start..end).step_by(PAGE_SIZE).take(most as usize) {
                most -= 1;
                let (page, kept) = (addr / PAGE, awaited_at(new(addr)));
                // Where the tier has no room for its new name it has the old one as long as we live.
                let is_kept = tier.copy_page(self.client_id, page, kept / PAGE).is_ok();
                service.moving.insert(new(addr), if is_kept { kept } else { addr });
                self.table.set_state(addr, RESIDENT);
                if is_kept {
                    tier.discard(self.client_id, page..page + 1);
                }
            }
        });
    }

    /// What a daemon before us had not brought in yet where it was moved.
    pub(crate) fn find_moving(&self, service: &mut Service, tier: &Tier) {
        let mut from = AWAITED / PAGE;
        while let stored = tier.neighbours(self.client_id, from, 4096)
            && let Some(last) = stored.last()
        {
            from = last + 1;
            service.moving.extend(stored.iter().map(|page| (page * PAGE - AWAITED, page * PAGE)));
        }
    }

    /// Brings in moved pages, beside the client's own thread; false if some must wait for long. Until they are in, absent
    /// pages there must not read zeros.
    pub(crate) fn bring_all_moved(&self, tier: &Tier) -> bool {
        for _ in 0..MOVED_TRIES {
            let mut service = self.take_service();
            if service.is_moving() && self.take_owner_lock(2000) {
                self.bring_moved(&mut service, tier);
                self.table.unlock();
            }
            if !service.is_moving() {
                return true;
            }
            drop(service);
            std::thread::sleep(Duration::from_millis(1));
        }
        false
    }

    /// Brings in what moved; what must wait stays in the list.
    pub(crate) fn bring_moved(&self, service: &mut Service, tier: &Tier) {
        if !service.is_moving() {
            return;
        }
        let Service { moving, cluster, .. } = service;
        let mut has_room = true;
        moving.retain(|to, from| {
            // As for touched pages: the kernel kills at a limit, while a thread that touches one of these pages only waits.
            has_room = has_room && (self.moved_at_once.load(Ordering::Relaxed) || self.reserve_pages(1) > 0);
            if !has_room {
                self.wait_for_memory();
                return true;
            }
            let page = &mut cluster[0];
            if let Err(error) = tier.load(self.client_id, *from / PAGE, page) {
                if matches!(self.lose(tier, *to, &error), Served::Again) {
                    return true;
                }
            } else {
                // SAFETY: the page is ours.
                let (_, error) = unsafe { self.uffd.copy(*to, page.as_ptr() as u64, PAGE, 0) };
                if matches!(error, Some(Errno(libc::EAGAIN | libc::ENOMEM))) {
                    return true;
                }
            }
            tier.discard(self.client_id, *from / PAGE..*from / PAGE + 1);
            false
        });
        self.tell_moving(service);
    }
}

/// Keeps a fault to be served.
fn note_fault(service: &mut Service, addr: u64, write: bool, thread: i32, now: u64) {
    service.faulter = thread;
    match service.pending.iter_mut().find(|other| other.addr == addr) {
        Some(other) => other.write |= write,
        None => service.pending.push(Pending { addr, write, since_ns: now, want: 0 }),
    }
}

/// Takes the entries of `range` away.
fn take_range(map: &mut BTreeMap<u64, u64>, range: Range) -> Vec<(u64, u64)> {
    if range.is_empty() {
        return Vec::new();
    }
    let taken: Vec<(u64, u64)> = map.range(range.start..range.end).map(|(at, from)| (*at, *from)).collect();
    for (at, _) in &taken {
        map.remove(at);
    }
    taken
}

/// Where the tier has the page that is awaited at `to`.
fn awaited_at(to: u64) -> u64 {
    to + AWAITED
}

#[cfg(test)]
mod tests {
    use super::super::tests::{FORKING, moved, own, successor};
    use super::*;
    use pagefold_os::mem::Mapping;
    use pagefold_os::sync::lock;
    use pagefold_os::uffd;
    use pagefold_os::{Page, fd};
    use pagefold_protocol::residency_map;

    /// Forks a child that ends with what `work` gives, while another thread reads the client's events; whether it ended by
    /// itself, and with what.
    fn forked(client: &Client, tier: &Tier, work: impl Fn() -> i32) -> (bool, i32) {
        // The reader must be there when the fork waits for it.
        let child = std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut polls = [libc::pollfd { fd: client.uffd.fd().raw(), events: libc::POLLIN, revents: 0 }];
                fd::poll(&mut polls, 20_000).unwrap();
                let mut service = lock(&client.service);
                client.read_events(&mut service, tier)
            });
            // By a bare call: fork(3) holds the allocator's locks meanwhile, which the reader may want.
            // SAFETY: the child works on its copies, allocates nothing, and ends.
            let child = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) } as i32;
            if child == 0 {
                let code = work();
                // SAFETY: ends this process at once.
                unsafe { libc::_exit(code) };
            }
            assert_eq!(reader.join().unwrap(), 1, "no event of the fork");
            child
        });
        let mut status = 0;
        // SAFETY: our own child.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        (libc::WIFEXITED(status), libc::WEXITSTATUS(status))
    }

    /// A forked child has what its parent moved by mremap(2) and has not got back yet.
    #[test]
    fn a_child_has_pages_that_were_on_the_move() {
        let _alone = lock(&FORKING);
        let Some((client, memory)) = own(uffd::FEATURE_EVENT_FORK, 3) else { return };
        let config = pagefold_tier::Config { bytes_max: 4 << 20, ..Default::default() };
        let tier = Tier::create(config, None).unwrap();
        let page_at = |number: u64| memory.addr() + number * PAGE;
        // Page 1 is out, and page 2 was when it lay elsewhere.
        let elsewhere = 1 << 30;
        for (addr, byte) in [(page_at(1), 7), (elsewhere, 8)] {
            let page: Page = std::array::from_fn(|at| if at % 2 == 0 { byte } else { at as u8 });
            tier.store(client.client_id, addr / PAGE, &page, pagefold_tier::Effort::Fast).unwrap();
        }
        client.table.find_or_add(page_at(1)).unwrap();
        client.table.set_state(page_at(1), EVICTED);
        lock(&client.service).moving.insert(page_at(2), elsewhere);
        let seen = forked(&client, &tier, || {
            // SAFETY: mapped and readable.
            let byte = |number: u64| unsafe { core::ptr::read_volatile(page_at(number) as *const u8) };
            i32::from(byte(1) == 7) | i32::from(byte(2) == 8) << 1 | i32::from(byte(0) == 0) << 2
        });
        assert_eq!(seen, (true, 7), "bits of pages that were right");
    }

    /// A forked child loses what the agent has in hand, but for what is back already.
    #[test]
    fn a_child_reads_no_zeros_where_pages_are_in_the_agents_hands() {
        let _alone = lock(&FORKING);
        let Some((client, memory)) = own(uffd::FEATURE_EVENT_FORK, 2) else { return };
        let tier = Tier::create(pagefold_tier::Config { bytes_max: 4 << 20, ..Default::default() }, None).unwrap();
        let page_at = |number: u64| memory.addr() + number * PAGE;
        client.table.find_or_add(page_at(0)).unwrap();
        client.table.find_or_add(page_at(1)).unwrap();
        (0..2).for_each(|number| _ = client.table.set_state(page_at(number), FROZEN));
        client.uffd.zero(Range::pages_from(page_at(1), 1), 0);
        let seen = forked(&client, &tier, || {
            let is_there = |number: u64| {
                // SAFETY: reads pages in by a bare call, changes nothing.
                let read = unsafe { libc::syscall(libc::SYS_madvise, page_at(number), PAGE, libc::MADV_POPULATE_READ) };
                i32::from(read == 0)
            };
            is_there(0) | is_there(1) << 1
        });
        assert_eq!(seen, (true, 2), "bits of pages that are there");
    }

    /// A forked child discards, moves and forks before it has its pages, as often as a server does that has many processes.
    #[test]
    fn a_child_may_do_with_its_memory_what_it_likes() {
        // So many that it comes to do it before it has them.
        const PAGES: u64 = 20_000;
        // Of which these look at fewer.
        const GRANDCHILDREN: usize = 24;
        const FEWER: u64 = 1_000;
        let _alone = lock(&FORKING);
        let features = uffd::FEATURE_EVENT_FORK
            | uffd::FEATURE_EVENT_REMOVE
            | uffd::FEATURE_EVENT_UNMAP
            | uffd::FEATURE_EVENT_REMAP;
        let Some((client, memory)) = own(features, PAGES) else { return };
        // It ends before the memory, also if the test fails: the memory's end would wait for a reader of its events.
        let client = client;
        let config = pagefold_tier::Config { bytes_max: 64 << 20, ..Default::default() };
        let tier = Tier::create(config, None).unwrap();
        let page_at = |number: u64| memory.addr() + number * PAGE;
        for number in 0..PAGES {
            let page: Page = std::array::from_fn(|at| if at % 2 == 0 { number as u8 | 1 } else { at as u8 });
            tier.store(client.client_id, page_at(number) / PAGE, &page, pagefold_tier::Effort::Fast).unwrap();
            client.table.find_or_add(page_at(number)).unwrap();
            client.table.set_state(page_at(number), EVICTED);
        }
        let target = Mapping::anonymous(PAGES as usize * PAGE_SIZE).unwrap();
        let wrong = forked(&client, &tier, || {
            // SAFETY: the child works on its copies of our memory by bare calls; each touch is of mapped memory.
            unsafe {
                let discard = libc::syscall(libc::SYS_madvise, page_at(0), PAGE, libc::MADV_DONTNEED);
                let unmap = libc::syscall(libc::SYS_munmap, page_at(1), PAGE);
                let fixed = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
                let half = PAGES / 2 * PAGE;
                let moved =
                    libc::syscall(libc::SYS_mremap, page_at(PAGES / 2), half, half, fixed, target.addr()) as u64;
                let mut grandchildren = [0; GRANDCHILDREN];
                let mut pages = PAGES;
                for grandchild in &mut grandchildren {
                    *grandchild = libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) as i32;
                    if *grandchild == 0 {
                        pages = FEWER;
                        break;
                    }
                }
                let byte = |addr: u64| core::ptr::read_volatile(addr as *const u8);
                let mut wrong = i32::from(discard != 0 || unmap != 0 || moved != target.addr());
                wrong += i32::from(byte(page_at(0)) != 0);
                for number in 2..pages {
                    let behind = number.checked_sub(PAGES / 2).map(|number| target.addr() + number * PAGE);
                    wrong += i32::from(byte(behind.unwrap_or(page_at(number))) != number as u8 | 1);
                }
                for grandchild in grandchildren.into_iter().filter(|_| pages == PAGES) {
                    let mut status = 0;
                    let waited = libc::syscall(libc::SYS_wait4, grandchild, &raw mut status, 0, 0);
                    wrong += i32::from(waited != i64::from(grandchild));
                    wrong += libc::WEXITSTATUS(status) + i32::from(!libc::WIFEXITED(status));
                }
                wrong.min(100)
            }
        });
        assert_eq!(wrong, (true, 0), "so many pages were wrong");
    }

    /// A moved page that cannot be loaded is SIGBUS in the end, also if a discard is under way when that is found.
    #[test]
    fn a_moved_page_that_is_damaged_waits_until_it_can_be_poisoned() {
        let Some((client, memory)) = own(uffd::FEATURE_EVENT_REMOVE, 3) else { return };
        let tier = Tier::create(pagefold_tier::Config { bytes_max: 4 << 20, ..Default::default() }, None).unwrap();
        let page_at = |number: u64| memory.addr() + number * PAGE;
        // Where the tier has nothing.
        lock(&client.service).moving.insert(page_at(2), 1 << 30);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // SAFETY: the pages lie in this test's mapping, and no reference to them exists.
                let _ = unsafe { pagefold_os::mem::advise(page_at(0), PAGE, libc::MADV_DONTNEED) };
            });
            let mut polls = [libc::pollfd { fd: client.uffd.fd().raw(), events: libc::POLLIN, revents: 0 }];
            assert_eq!(fd::poll(&mut polls, 60_000), Ok(1), "no discard");
            let mut service = lock(&client.service);
            client.bring_moved(&mut service, &tier);
            let waits = service.is_moving();
            client.read_events(&mut service, &tier);
            assert!(waits, "given up before it was poisoned");
            let mut polls = 0;
            while service.is_moving() && polls < 60_000 {
                client.bring_moved(&mut service, &tier);
                std::thread::sleep(Duration::from_millis(1));
                polls += 1;
            }
        });
        // A page is there, so no other can be mapped there.
        assert_eq!(client.uffd.zero(Range::pages_from(page_at(2), 1), 0).1, Some(Errno(libc::EEXIST)));
        assert_eq!(client.table.head().lost.load(std::sync::atomic::Ordering::Relaxed), 1);
    }

    /// Its agent knows of no page that is on the move but by this.
    #[test]
    fn the_head_tells_how_many_pages_are_on_the_move() {
        let Some((client, memory)) = own(uffd::FEATURE_EVENT_REMAP, 3) else { return };
        let tier = Tier::create(pagefold_tier::Config { bytes_max: 4 << 20, ..Default::default() }, None).unwrap();
        let target = Mapping::anonymous(2 * PAGE_SIZE).unwrap();
        let told = || client.table.head().moving_pages.load(std::sync::atomic::Ordering::SeqCst);
        let moved = memory.addr() + PAGE;
        for addr in [moved, moved + PAGE] {
            client.table.find_or_add(addr).unwrap();
            client.table.set_state(addr, EVICTED);
            tier.store(client.client_id, addr / PAGE, &[7; PAGE_SIZE], pagefold_tier::Effort::Fast).unwrap();
        }
        let before = std::thread::scope(|scope| {
            let moves = scope.spawn(|| {
                let fixed = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
                // SAFETY: the pages lie in this test's mapping, and no reference to them exists.
                unsafe { libc::syscall(libc::SYS_mremap, moved, 2 * PAGE, 2 * PAGE, fixed, target.addr()) }
            });
            let mut polls = [libc::pollfd { fd: client.uffd.fd().raw(), events: libc::POLLIN, revents: 0 }];
            assert_eq!(fd::poll(&mut polls, 60_000), Ok(1), "no move");
            client.read_events(&mut lock(&client.service), &tier);
            let before = told();
            assert_eq!(moves.join().unwrap() as u64, target.addr());
            before
        });
        assert_eq!(before, 2);
        client.bring_moved(&mut lock(&client.service), &tier);
        assert_eq!(told(), 0);
        lock(&client.service).moving.insert(memory.addr(), moved);
        assert!(client.reconcile(&tier));
        assert_eq!(told(), 1);
        lock(&client.service).moving.clear();
    }

    /// A daemon dies before it brings in what was moved, or in the middle of obeying that, and so does the next one.
    #[test]
    fn what_is_on_the_move_outlives_the_daemon() {
        for (is_obeyed, is_cleared) in [(true, true), (false, false), (false, true)] {
            let Some((first, memory)) = own(0, 4) else { return };
            let tier = Tier::create(pagefold_tier::Config { bytes_max: 4 << 20, ..Default::default() }, None).unwrap();
            // One page goes there at once, another by way of a third place, and a third was in the agent's hands.
            let (from, to, way) = (Range::pages_from(1 << 30, 3), memory.addr(), 1 << 31);
            let page_at = |number: u64| from.start + number * PAGE;
            first.table.find_or_add(from.start).unwrap();
            for number in 0..2 {
                let page = [7 + number as u8; PAGE_SIZE];
                tier.store(first.client_id, page_at(number) / PAGE, &page, pagefold_tier::Effort::Fast).unwrap();
                first.table.set_state(page_at(number), EVICTED);
            }
            first.table.set_state(page_at(2), FROZEN);
            moved(&first, &tier, Range::pages_from(page_at(1), 2), way);
            let second = successor(first, &tier);
            let moves = [(Range::pages_from(page_at(0), 1), to), (Range::pages_from(way, 2), to + PAGE)];
            let [one, two] = moves;
            moved(&second, &tier, one.0, one.1);
            if is_obeyed {
                moved(&second, &tier, two.0, two.1);
            } else {
                let journal = &mut lock(&second.service).journal;
                journal.put(3, [uffd::EVENT_REMAP.into(), two.0.start, two.1, two.0.len()]);
                if is_cleared {
                    journal.set_cleared(3);
                }
            }
            let third = successor(second, &tier);
            assert!((0..EVENTS).all(|place| lock(&third.service).journal.event(place).is_none()));
            third.bring_moved(&mut lock(&third.service), &tier);
            assert!(!lock(&third.service).is_moving() && tier.stats().pages == 0);
            // SAFETY: there, mapped and ours.
            let bytes = [0, 1].map(|number| unsafe { ((to + number * PAGE) as *const u8).read_volatile() });
            assert_eq!(bytes, [7, 8]);
            assert_eq!(third.counters.lost.load(std::sync::atomic::Ordering::Relaxed), 1, "it reads zeros");
        }
    }

    /// A program near its limit moves more than that has room for.
    #[test]
    fn what_was_moved_waits_for_room() {
        use crate::memory_limits::tests::limited;
        let Some((mut client, memory)) = own(0, 2) else { return };
        let tier = Tier::create(pagefold_tier::Config { bytes_max: 4 << 20, ..Default::default() }, None).unwrap();
        let dir = tempfile::tempdir().unwrap();
        client.limits = limited(dir.path(), 999, 1000);
        let (to, from) = (memory.addr() + PAGE, 1 << 30);
        tier.store(client.client_id, from / PAGE, &[7; PAGE_SIZE], pagefold_tier::Effort::Fast).unwrap();
        let mut service = lock(&client.service);
        service.moving.insert(to, from);
        client.bring_moved(&mut service, &tier);
        assert!(service.is_moving() && client.lacks_memory.load(std::sync::atomic::Ordering::Relaxed));
        limited(dir.path(), 100, 1000);
        client.bring_moved(&mut service, &tier);
        assert!(!service.is_moving());
        // SAFETY: there, mapped and ours.
        assert_eq!(unsafe { (to as *const u8).read_volatile() }, 7);
    }

    /// The client may set its descriptor to block, and daemon and client share the descriptor's flags.
    #[test]
    fn a_blocking_descriptor_does_not_hold_up_the_fault_thread() {
        let Some((client, memory)) = own(uffd::FEATURE_EVENT_REMOVE, 1) else { return };
        let tier = Tier::create(pagefold_tier::Config { bytes_max: 4 << 20, ..Default::default() }, None).unwrap();
        // SAFETY: `F_SETFL` takes no pointer; the descriptor is the client's and open.
        assert_eq!(unsafe { libc::fcntl(client.uffd.fd().raw(), libc::F_SETFL, 0) }, 0);
        let (done, is_done) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| done.send(client.read_events(&mut lock(&client.service), &tier)).unwrap());
            let mut read = is_done.recv_timeout(Duration::from_secs(60)).ok();
            if read.is_none() {
                // Frees the reader.
                scope.spawn(|| {
                    // SAFETY: the pages lie in this test's mapping, and no reference to them exists.
                    let _ = unsafe { pagefold_os::mem::advise(memory.addr(), PAGE, libc::MADV_DONTNEED) };
                });
                read = is_done.recv().ok();
            }
            assert_eq!(read, Some(0), "it waited for an event");
        });
    }

    /// What a client writes into its table is not kept for each page that it moves.
    #[test]
    fn no_more_pages_are_on_the_move_than_there_are() {
        let Some((client, _memory)) = own(0, 1) else { return };
        let tier = Tier::create(pagefold_tier::Config { bytes_max: 4 << 20, ..Default::default() }, None).unwrap();
        let from = Range { start: 1 << 40, end: (1 << 40) + 2 * LOST_MAX * PAGE };
        for addr in (from.start..from.end).step_by(residency_map::CHUNK_BYTES as usize) {
            client.table.find_or_add(addr).unwrap();
        }
        let mut service = lock(&client.service);
        for turn in 1..3 {
            client.set(from.start, from.end, EVICTED);
            client.obey(&mut service, &tier, &[Event::Remap { from, to: turn << 41 }]);
            assert_eq!(service.moving.len() as u64, LOST_MAX);
        }
    }

    /// The agent has pages in hand, and has put back one of them.
    #[test]
    fn a_page_that_is_moved_while_the_agent_has_it_is_lost() {
        let Some((client, memory)) = own(0, 4) else { return };
        let tier = Tier::create(pagefold_tier::Config { bytes_max: 4 << 20, ..Default::default() }, None).unwrap();
        let page_at = |number: u64| memory.addr() + number * PAGE;
        client.table.find_or_add(page_at(0)).unwrap();
        client.table.find_or_add(page_at(1)).unwrap();
        client.set(page_at(0), page_at(2), FROZEN);
        // SAFETY: the bytes are ours.
        let (copied, _) = unsafe { client.uffd.copy(page_at(3), [7u8; PAGE_SIZE].as_ptr() as u64, PAGE, 0) };
        assert_eq!(copied, PAGE);
        let mut service = lock(&client.service);
        client.obey(&mut service, &tier, &[Event::Remap { from: Range::pages_from(page_at(0), 2), to: page_at(2) }]);
        assert_eq!([0, 1].map(|number| client.table.state(page_at(number))), [DISCARDED; 2], "they would be put back");
        client.bring_moved(&mut service, &tier);
        assert!(!service.is_moving());
        // A page is there, so no other can be mapped there.
        assert_eq!(client.uffd.zero(Range::pages_from(page_at(2), 1), 0).1, Some(Errno(libc::EEXIST)));
        assert_eq!(client.counters.lost.load(std::sync::atomic::Ordering::Relaxed), 1, "the one that is there is none");
        // SAFETY: mapped and there.
        assert_eq!(unsafe { memory.as_ptr().add(3 * PAGE_SIZE).read_volatile() }, 7);
    }

    /// Where daemon and keeper are gone, what is out is SIGBUS also where a bare mremap(2) takes it meanwhile.
    #[test]
    fn a_page_that_is_moved_while_all_is_given_up_is_lost() {
        let Some((client, memory)) = own(uffd::FEATURE_EVENT_REMAP, 4) else { return };
        let target = Mapping::anonymous(PAGE_SIZE).unwrap();
        for number in [0, 3] {
            client.table.find_or_add(memory.addr() + number * PAGE).unwrap();
            client.table.set_state(memory.addr() + number * PAGE, EVICTED);
        }
        let moved = memory.addr() + 3 * PAGE;
        let lost = std::thread::scope(|scope| {
            scope.spawn(|| {
                let fixed = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
                // SAFETY: the pages lie in this test's mapping, and no reference to them exists.
                unsafe { libc::syscall(libc::SYS_mremap, moved, PAGE, PAGE, fixed, target.addr()) }
            });
            let mut polls = [libc::pollfd { fd: client.uffd.fd().raw(), events: libc::POLLIN, revents: 0 }];
            assert_eq!(fd::poll(&mut polls, 60_000), Ok(1), "no move");
            pagefold_protocol::residency_map::poison_evicted(&client.uffd, &client.table)
        });
        let there = |addr| client.uffd.zero(Range::pages_from(addr, 1), 0).1 == Some(Errno(libc::EEXIST));
        assert_eq!((lost, there(memory.addr()), there(target.addr())), (2, true, true));
    }
}
