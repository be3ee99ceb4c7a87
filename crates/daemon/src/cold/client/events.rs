//! What the kernel tells of a client's memory: faults, which are kept to be served, and what takes pages away.
//!
//! Pages go by discards and unmaps, move by mremap(2), and are copied by forks that nobody saw. All of that is obeyed
//! before any fault of the same batch is served.

use super::{Client, PAGE, Served, Service};
use pagefold_agent::cold_table::{FROZEN, OUT, RESIDENT, VOID};
use pagefold_os::fd::Fd;
use pagefold_os::uffd::{self, Event, Uffd};
use pagefold_os::{Errno, PAGE_SIZE, Range, sched};
use pagefold_tier::Tier;
use std::time::Duration;

/// Events read before the thread looks at anything else.
const EVENTS: usize = uffd::EVENTS_MAX;

impl Client {
    /// Reads what events there are, obeys those that take pages away, and keeps the faults.
    pub(super) fn read_events(&self, service: &mut Service, tier: &Tier) -> usize {
        let mut events = [Event::Other(0); EVENTS];
        let got = self.uffd.read_events(&mut events).unwrap_or(0);
        let events = &events[..got];
        // What takes pages away comes first: the kernel delivers faults before it, and they wait anyway.
        for event in events {
            match *event {
                Event::Remove(range) | Event::Unmap(range) => self.forget(service, tier, range),
                Event::Remap { from, to } => self.moved(service, tier, from, to),
                Event::Fork(fd) => self.forked(service, tier, fd),
                Event::PageFault { .. } | Event::Other(_) => {}
            }
        }
        for event in events {
            if let Event::PageFault { addr, write, thread } = *event {
                let addr = addr & !(PAGE - 1);
                service.faulter = thread;
                match service.pending.iter_mut().find(|(other, _)| *other == addr) {
                    Some((_, other)) => *other |= write,
                    None => service.pending.push((addr, write)),
                }
            }
        }
        got
    }

    /// The pages of `range` are the program's nothing from now on.
    pub(super) fn forget(&self, service: &mut Service, tier: &Tier, range: Range) {
        if range.is_empty() {
            return;
        }
        self.table.note_removed(range, sched::quick_monotonic_ns());
        self.table.for_each_run(range.start, range.end, FROZEN, |start, end| self.set(start, end, VOID));
        self.table.for_each_run(range.start, range.end, OUT, |start, end| {
            self.set(start, end, RESIDENT);
            tier.discard(self.region, start / PAGE..end / PAGE);
        });
        if service.is_moving() {
            let void: Vec<u64> = service.moving.range(range.start..range.end).map(|(to, _)| *to).collect();
            for to in void {
                if let Some(from) = service.moving.remove(&to) {
                    tier.discard(self.region, from / PAGE..from / PAGE + 1);
                }
            }
        }
    }

    /// The pages of `from` are at `to` now; those that are out must come in there.
    pub(super) fn moved(&self, service: &mut Service, tier: &Tier, from: Range, to: u64) {
        let target = Range { start: to, end: to.saturating_add(from.len()) };
        // Whatever was known of the target's addresses is of an earlier mapping.
        self.forget(service, tier, target);
        let again: Vec<(u64, u64)> = service.moving.range(from.start..from.end).map(|(to, at)| (*to, *at)).collect();
        for (was, at) in again {
            service.moving.remove(&was);
            service.moving.insert(to + (was - from.start), at);
        }
        self.table.for_each_run(from.start, from.end, OUT, |start, end| {
            for addr in (start..end).step_by(PAGE_SIZE) {
                self.table.set_state(addr, RESIDENT);
                service.moving.insert(to + (addr - from.start), addr);
            }
        });
    }

    /// Brings in what moved; what must wait stays in the list.
    pub(super) fn bring_moved(&self, service: &mut Service, tier: &Tier) {
        let Service { moving, cluster, .. } = service;
        moving.retain(|to, from| {
            let page = &mut cluster[0];
            if let Err(error) = tier.load(self.region, *from / PAGE, page) {
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
            tier.discard(self.region, *from / PAGE..*from / PAGE + 1);
            false
        });
    }

    /// The program forked by a call that nobody saw: the child gets its copies now, before it can miss them.
    ///
    /// The child's descriptor is closed then, which makes its memory the kernel's own and wakes it.
    fn forked(&self, service: &mut Service, tier: &Tier, fd: i32) {
        // SAFETY: the kernel made the descriptor for us when the event was read.
        let child = Uffd::from_fd(unsafe { Fd::from_raw(fd) });
        let Service { moving, cluster, .. } = service;
        let page = &mut cluster[0];
        // Under one address the tier has it, at the other the child needs it.
        let mut give = |from: u64, to: u64| {
            if tier.load(self.region, from / PAGE, page).is_err() {
                child.poison(Range::pages_from(to, 1), 0);
                return;
            }
            for _ in 0..1000 {
                // SAFETY: the page is ours.
                let (_, error) = unsafe { child.copy(to, page.as_ptr() as u64, PAGE, 0) };
                match error {
                    Some(Errno(libc::EAGAIN | libc::ENOMEM)) => std::thread::sleep(Duration::from_micros(100)),
                    // Done, or not the child's (MADV_DONTFORK).
                    _ => break,
                }
            }
        };
        self.table.for_each_run(0, u64::MAX >> 1, OUT, |start, end| {
            (start..end).step_by(PAGE_SIZE).for_each(|addr| give(addr, addr));
        });
        // Those that the parent still waits for after an mremap(2) are out as well, and nothing at their new place says so.
        moving.iter().for_each(|(to, from)| give(*from, *to));
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::own;
    use super::*;
    use crate::server::lock;
    use pagefold_os::{Page, fd};

    /// A forked child has what its parent moved by mremap(2) and has not got back yet.
    #[test]
    fn a_child_has_pages_that_were_on_the_move() {
        let Some((client, memory)) = own(uffd::FEATURE_EVENT_FORK, 3) else { return };
        let config = pagefold_tier::Config { bytes_max: 4 << 20, ..Default::default() };
        let tier = Tier::create(config, None).unwrap();
        let page_at = |number: u64| memory.addr() + number * PAGE;
        // Page 1 is out, and page 2 was when it lay elsewhere.
        let elsewhere = 1 << 30;
        for (addr, byte) in [(page_at(1), 7), (elsewhere, 8)] {
            let page: Page = std::array::from_fn(|at| if at % 2 == 0 { byte } else { at as u8 });
            tier.store(client.region, addr / PAGE, &page, pagefold_tier::Effort::Fast).unwrap();
        }
        client.table.find_or_add(page_at(1)).unwrap();
        client.table.set_state(page_at(1), OUT);
        lock(&client.service).moving.insert(page_at(2), elsewhere);
        // The reader must be there when the fork waits for it.
        let forked = std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut polls = [libc::pollfd { fd: client.uffd.fd().raw(), events: libc::POLLIN, revents: 0 }];
                fd::poll(&mut polls, 20_000).unwrap();
                let mut service = lock(&client.service);
                client.read_events(&mut service, &tier)
            });
            // By a bare call: fork(3) holds the allocator's locks meanwhile, which the reader may want.
            // SAFETY: the child reads memory and ends.
            let child = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) } as i32;
            if child == 0 {
                // SAFETY: mapped and readable.
                let byte = |number: u64| unsafe { core::ptr::read_volatile(page_at(number) as *const u8) };
                let seen = i32::from(byte(1) == 7) | i32::from(byte(2) == 8) << 1 | i32::from(byte(0) == 0) << 2;
                // SAFETY: ends this process at once.
                unsafe { libc::_exit(seen) };
            }
            assert_eq!(reader.join().unwrap(), 1, "no event of the fork");
            child
        });
        let mut status = 0;
        // SAFETY: our own child.
        assert_eq!(unsafe { libc::waitpid(forked, &mut status, 0) }, forked);
        assert_eq!((libc::WIFEXITED(status), libc::WEXITSTATUS(status)), (true, 7), "bits of pages that were right");
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
                // SAFETY: memory of ours that nobody uses.
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
        // There: so nobody gets another page there.
        assert_eq!(client.uffd.zero(Range::pages_from(page_at(2), 1), 0).1, Some(Errno(libc::EEXIST)));
        assert_eq!(client.table.head().lost.load(std::sync::atomic::Ordering::Relaxed), 1);
    }
}
