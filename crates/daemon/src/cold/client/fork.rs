//! Children of forks that their agent did not see, and their children: they get their copies of evicted pages before they
//! can miss them.
//!
//! A child's descriptor is closed when it has them, which makes its memory the kernel's own and wakes it. It runs meanwhile:
//! what it discards, moves and forks waits to be read here, and until it is the kernel takes nothing in.
//!
//! The parent's residency map tells which pages are evicted, and does not change meanwhile. Of a child only the places are
//! kept where its memory differs from its parent's.

use super::copy_in::is_passing;
use super::{Client, LOST_MAX, PAGE, Service};
use crate::cold::handover::pending_children::{Kept, PendingChildren};
use pagefold_os::fd::Fd;
use pagefold_os::uffd::{Event, Uffd};
use pagefold_os::{Errno, PAGE_SIZE, Page, Range};
use pagefold_protocol::message::FETCH_PAGES_MAX;
use pagefold_protocol::residency_map::{EVICTED, FROZEN};
use pagefold_tier::Tier;
use std::collections::BTreeMap;
use std::time::Duration;

/// How often memory may be short for children's pages, before they are poisoned.
const REFUSED_MAX: u32 = 1000;
/// What children may do with their memory before they have it: events, and pauses.
const TRIES_MAX: u32 = 100_000;
const PAUSE: Duration = Duration::from_micros(100);
/// Parts of their memory that are cut, moved or copied for them meanwhile: so many at most are kept as well.
const STEPS_MAX: usize = 1 << 18;
/// Children, and theirs, that are given pages at once: those of a server that has a process for each connection.
const FAMILY_MAX: usize = 256;
/// Beyond every address.
const END: u64 = 1 << 62;

/// Where a child has what was at its parent's addresses when it was forked: the parts that it has not given up.
#[derive(Clone, Debug)]
struct MovedParts {
    /// By where they began, the ends of those, and where they begin now.
    parts: BTreeMap<u64, (u64, u64)>,
    /// By where they begin now, where they began.
    began: BTreeMap<u64, u64>,
}

impl MovedParts {
    /// Everything is where it was.
    fn new() -> MovedParts {
        MovedParts { parts: BTreeMap::from([(0, (END, 0))]), began: BTreeMap::from([(0, 0)]) }
    }

    /// Where the page that was at `addr` is; `None` if it is given up.
    fn of(&self, addr: u64) -> Option<u64> {
        let (start, (end, at)) = self.parts.range(..=addr).next_back()?;
        (addr < *end).then(|| at + (addr - start))
    }

    fn insert(&mut self, was: u64, part: Range) {
        if !part.is_empty() {
            self.parts.insert(was, (was + part.len(), part.start));
            self.began.insert(part.start, was);
        }
    }

    /// What is at `range` is given up. Returns its parts, and where each was.
    fn take(&mut self, range: Range) -> Vec<(u64, Range)> {
        if range.is_empty() {
            return Vec::new();
        }
        let first = self.began.range(..=range.start).next_back().map_or(range.start, |(at, _)| *at);
        let parts = self.began.range(first..range.end).map(|(at, was)| {
            let len = self.parts.get(was).map_or(0, |(end, _)| end - was);
            (*was, Range { start: *at, end: at + len })
        });
        let hit: Vec<_> = parts.filter(|(_, part)| part.overlaps(&range)).collect();
        let cut = |(was, part): (u64, Range)| {
            let taken = part.intersection(&range);
            let [first, last] = [taken.start, taken.end].map(|at| was + (at - part.start));
            self.parts.remove(&was);
            self.began.remove(&part.start);
            self.insert(was, Range { start: part.start, end: taken.start });
            self.insert(last, Range { start: taken.end, end: part.end });
            (first, taken)
        };
        hit.into_iter().map(cut).collect()
    }

    /// What is at `from` goes to `to`, in place of what is there. Returns how many parts that are.
    fn move_to(&mut self, from: Range, to: u64) -> usize {
        let moved = self.take(from);
        let lost = self.take(Range { start: to, end: to.saturating_add(from.len()) });
        let steps = moved.len() + lost.len();
        for (was, part) in moved {
            let start = to + (part.start - from.start);
            self.insert(was, Range { start, end: start + part.len() });
        }
        steps
    }
}

struct Child<'a> {
    /// Before `uffd`: closing the last descriptor waits for every thread that holds the child's memory, and the keeper,
    /// which serves all clients, must not be the one to wait.
    kept: Kept<'a>,
    uffd: Uffd,
    moved: MovedParts,
}

/// A child and its descendants, which are given pages.
struct Family<'a> {
    pending_children: &'a PendingChildren,
    children: Vec<Child<'a>>,
    tries: u32,
    steps: usize,
    refused: u32,
}

impl<'a> Family<'a> {
    fn of(child: Uffd, pending_children: &'a PendingChildren) -> Family<'a> {
        let mut family = Family { pending_children, children: Vec::new(), tries: 0, steps: 0, refused: 0 };
        family.add(child, MovedParts::new());
        family
    }

    /// With the keeper before anything else: it runs already.
    fn add(&mut self, uffd: Uffd, moved: MovedParts) {
        let kept = self.pending_children.keep(&uffd);
        self.children.push(Child { kept, uffd, moved });
    }

    /// They do too much with their memory.
    fn is_left_alone(&self) -> bool {
        self.tries > TRIES_MAX || self.steps > STEPS_MAX || self.children.len() > FAMILY_MAX
    }

    /// True if memory may be asked for once more.
    fn asks_again(&mut self) -> bool {
        self.refused += 1;
        std::thread::sleep(PAUSE);
        self.refused < REFUSED_MAX
    }

    /// What `event` says that one of them did.
    fn obey(&mut self, number: usize, event: Event) {
        let Some(Child { moved, .. }) = self.children.get_mut(number) else { return };
        match event {
            Event::Remove(range) | Event::Unmap(range) => self.steps += moved.take(range).len(),
            Event::Remap { from, to } => self.steps += moved.move_to(from, to),
            // It lacks what its parent lacks.
            Event::Fork(fd) => {
                let moved = moved.clone();
                self.steps += moved.parts.len();
                self.add(made(fd), moved);
            }
            // A fault waits for its page, or for the end.
            Event::PageFault { .. } | Event::Other(_) => {}
        }
    }

    /// Gives everybody `page`, or SIGBUS if there is none, where they have what was at `was`.
    fn give(&mut self, was: u64, page: Option<&Page>) {
        let mut next = 0;
        while let Some(Child { uffd, moved, .. }) = self.children.get_mut(next) {
            let (_, error) = match (moved.of(was), page.filter(|_| self.refused < REFUSED_MAX)) {
                // SAFETY: the page is ours.
                (Some(at), Some(page)) => unsafe { uffd.copy(at, page.as_ptr() as u64, PAGE, 0) },
                (Some(at), None) => uffd.poison(Range::pages_from(at, 1), 0),
                (None, _) => (0, None),
            };
            match error {
                Some(Errno(libc::EAGAIN)) => match uffd.read_event_at_once() {
                    Ok(Some(event)) => self.obey(next, event),
                    _ => std::thread::sleep(PAUSE),
                },
                Some(Errno(libc::ENOMEM)) => {
                    self.asks_again();
                }
                // It has ended.
                Some(Errno(libc::ESRCH)) => drop(self.children.remove(next)),
                // Done, or not the child's (MADV_DONTFORK).
                _ => {
                    next += 1;
                    continue;
                }
            }
            self.tries += 1;
            if self.is_left_alone() {
                return;
            }
        }
    }

    /// Leaves them to wait. A child without a descriptor would read zeros, so the descriptors of all that live are held.
    fn withhold(self) {
        let (children, kept): (Vec<_>, Vec<_>) =
            self.children.into_iter().map(|child| (child.uffd, child.kept)).unzip();
        self.pending_children.hold(children.into_iter());
        drop(kept);
    }
}

/// What the kernel made when the event of a fork was read.
fn made(fd: i32) -> Uffd {
    // SAFETY: made for us, and told once.
    Uffd::from_fd(unsafe { Fd::from_raw(fd) })
}

impl Client {
    /// The program forked by a call that its agent did not see.
    pub(crate) fn forked(&self, service: &mut Service, tier: &Tier, place: usize, fd: i32) {
        let child = made(fd);
        // It lacks nothing: the keeper need not be asked to have it.
        if !self.lacks_pages(service) {
            return;
        }
        let mut family = Family::of(child, &self.pending_children);
        // The keeper has it: a successor need not know more.
        service.journal.remove(place);
        let Service { moving, cluster, .. } = service;
        let page = &mut cluster[0];
        let mut give = |was: u64, from: u64| {
            if family.children.is_empty() || family.is_left_alone() {
                return;
            }
            let is_here = loop {
                match tier.load(self.client_id, from / PAGE, page) {
                    Err(error) if is_passing(&error) && family.asks_again() => {}
                    loaded => break loaded.is_ok(),
                }
            };
            family.give(was, is_here.then_some(&*page));
        };
        // A table may claim far more than there is.
        let mut most = tier.client_pages(self.client_id) + LOST_MAX;
        self.table.for_each_run(0, u64::MAX >> 1, EVICTED, |start, end| {
            let end = end.min(start + most * PAGE);
            most -= (end - start) / PAGE;
            (start..end).step_by(PAGE_SIZE).for_each(|addr| give(addr, addr));
        });
        // Those that the parent still waits for after an mremap(2) are out as well, and nothing at their new place says so.
        moving.iter().for_each(|(to, from)| give(*to, *from));
        // Pages that the agent has frozen may differ from what is stored, and it is not known yet: SIGBUS, also if the
        // parent gets them back.
        let mut most = FETCH_PAGES_MAX as u64;
        self.table.for_each_run(0, u64::MAX >> 1, FROZEN, |start, end| {
            let end = end.min(start + most * PAGE);
            most -= (end - start) / PAGE;
            for addr in (start..end).step_by(PAGE_SIZE) {
                if !family.is_left_alone() {
                    family.give(addr, None);
                }
            }
        });
        if family.is_left_alone() {
            eprintln!("pagefold: {} ({}): a child of it is left to wait for its pages", self.name, self.pid);
            family.withhold();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_os::uffd;
    use std::sync::Arc;

    /// As many entries as the child has made parts, and each page is where it would be if all were noted.
    #[test]
    fn places_are_those_of_every_page() {
        const PAGES: u64 = 64;
        let mut numbers = fastrand::Rng::with_seed(1);
        let mut random = |below: u64| numbers.u64(..below);
        for _ in 0..200 {
            let mut moved = MovedParts::new();
            let mut at: Vec<Option<u64>> = (0..PAGES).map(|page| Some(page * PAGE)).collect();
            for done in 1..20 {
                let from = Range::pages_from(random(2 * PAGES) * PAGE, random(9));
                let to = from.end + random(PAGES) * PAGE;
                let target = Range { start: to, end: to + from.len() };
                let is_in = |range: &Range, at: u64| range.start <= at && at < range.end;
                let moves = random(2) == 0;
                for place in &mut at {
                    *place = place.and_then(|at| match moves {
                        true if is_in(&from, at) => Some(to + (at - from.start)),
                        true => (!is_in(&target, at)).then_some(at),
                        false => (!is_in(&from, at)).then_some(at),
                    });
                }
                if moves {
                    moved.move_to(from, to);
                } else {
                    moved.take(from);
                }
                let found: Vec<_> = (0..PAGES).map(|page| moved.of(page * PAGE)).collect();
                assert_eq!(found, at, "{from:?} to {to:#x}: {moved:?}");
                assert!(moved.parts.len() == moved.began.len() && moved.parts.len() <= 1 + 3 * done);
            }
        }
    }

    /// However many there are: one that is let go would read zeros.
    #[test]
    fn a_child_that_is_left_to_wait_waits_as_long_as_it_lives() {
        const FAMILIES: usize = 3;
        let device = uffd::open_device().ok();
        let Ok(uffd) = Uffd::new(device.as_ref(), 0) else { return eprintln!("SKIPPED: no userfaultfd for us") };
        let _ = pagefold_os::fd::raise_limit();
        let pending_children = PendingChildren::new(Arc::default());
        for _ in 0..FAMILIES {
            let mut family = Family::of(Uffd::from_fd(uffd.fd().duplicate().unwrap()), &pending_children);
            while !family.is_left_alone() {
                let Ok(fd) = uffd.fd().duplicate() else { return eprintln!("SKIPPED: too few descriptors for us") };
                family.add(Uffd::from_fd(fd), MovedParts::new());
            }
            family.withhold();
        }
        assert_eq!(pending_children.count(None), FAMILIES * (FAMILY_MAX + 1));
    }

    /// A child that is left to wait outlives its parent, and reads no zeros then.
    #[test]
    fn a_child_that_is_left_to_wait_outlives_its_parent() {
        let Some((client, _memory)) = super::super::tests::own(0, 1) else { return };
        let pending_children = client.pending_children.clone();
        Family::of(Uffd::from_fd(client.uffd.fd().duplicate().unwrap()), &client.pending_children).withhold();
        drop(client);
        assert_eq!(pending_children.count(None), 1, "its memory is the kernel's");
    }

    /// What a child has done to its memory is cut, moved and copied so often, and no more.
    #[test]
    fn a_child_that_changes_its_memory_too_often_is_left_to_wait() {
        const PARTS: u64 = 1000;
        let device = uffd::open_device().ok();
        let Ok(uffd) = Uffd::new(device.as_ref(), 0) else { return eprintln!("SKIPPED: no userfaultfd for us") };
        let pending_children = PendingChildren::new(Arc::default());
        let mut family = Family::of(uffd, &pending_children);
        for part in 0..PARTS {
            family.obey(0, Event::Remove(Range::pages_from(2 * part * PAGE, 1)));
        }
        let (mut from, mut to) = (0, 1 << 40);
        let mut moves = 0;
        while !family.is_left_alone() && moves < TRIES_MAX {
            family.obey(0, Event::Remap { from: Range::pages_from(from, 2 * PARTS), to });
            std::mem::swap(&mut from, &mut to);
            moves += 1;
        }
        assert!(u64::from(moves) <= STEPS_MAX as u64 / PARTS + 1, "{moves} moves");
        assert_eq!(family.children[0].moved.of(3 * PAGE), Some(3 * PAGE + if moves % 2 == 1 { 1 << 40 } else { 0 }));
    }
}
