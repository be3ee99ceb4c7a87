//! The transfer of pages to the tier: copied, stored, dropped.
//!
//! Each batch takes three steps: the agent copies its pages, the tier stores the copies, and the agent drops the pages that
//! still equal their copies. Several batches are on their way, each in its own part of the channel: while some are stored
//! the agent drops earlier ones and copies later ones.

use super::batch::{Copied, Run};
use super::compress_workers::{CompressWorkers, Target};
use crate::cold::agent_connection::{AgentConnection, Gone};
use crate::cold::client::Client;
use crate::memory_limits;
use pagefold_os::sync::lock;
use pagefold_os::{PAGE_SIZE, Range};
use pagefold_protocol::message::{EvictEntry, FETCH_PAGES_MAX, LIST_MAX};
use pagefold_protocol::residency_map::{EVICTED, RESIDENT};
use pagefold_tier::{Effort, Tier};
use std::collections::VecDeque;
use std::iter::Peekable;
use std::sync::atomic::Ordering;

const PAGE: u64 = PAGE_SIZE as u64;
/// So many batches without an evicted page mean that a full tier takes no more.
const BARREN_MAX: u32 = 4;

/// Batches that may be on their way, each in its own part of the channel.
const BATCHES: usize = 4;
/// Most pages of a batch.
const BATCH_PAGES: usize = FETCH_PAGES_MAX / BATCHES;
/// Most pages that are stored between two looks at the daemon's own memory limit.
const ROOM_PAGES: u64 = 2048;
/// Bytes of that which are left to the cleaner, which recompresses what is stored.
const ROOM_KEPT: u64 = 16 << 20;

/// Cuts runs into batches.
struct Batches<I: Iterator<Item = Run>> {
    runs: Peekable<I>,
    /// Next page of the first of them; 0 if that is its first.
    start: u64,
}

impl<I: Iterator<Item = Run>> Batches<I> {
    fn of(runs: I) -> Batches<I> {
        Batches { runs: runs.peekable(), start: 0 }
    }

    fn is_empty(&mut self) -> bool {
        self.runs.peek().is_none()
    }
}

impl<I: Iterator<Item = Run>> Iterator for Batches<I> {
    type Item = Vec<Run>;

    fn next(&mut self) -> Option<Vec<Run>> {
        let mut batch = Vec::new();
        let mut room = BATCH_PAGES as u64;
        while room > 0
            && let Some((range, around)) = self.runs.peek()
        {
            let start = range.start.max(self.start);
            let end = range.end.min(start + room * PAGE);
            batch.push((Range { start, end }, *around));
            room -= (end - start) / PAGE;
            self.start = end;
            if end == range.end {
                self.runs.next();
                self.start = 0;
            }
        }
        (!batch.is_empty()).then_some(batch)
    }
}

/// What became of the pages.
#[derive(Default)]
struct Taken {
    gone: u64,
    /// Perhaps shared by a fork until a moment ago: worth another attempt.
    busy: Vec<Run>,
}

struct Transfer<'a> {
    client: &'a Client,
    link: &'a mut AgentConnection,
    tier: &'a Tier,
    crowded: Effort,
    /// Pages that may be stored before the next look at the daemon's memory limit.
    pages_left: u64,
}

/// Evicts runs, by LZ4, or with the effort `crowded` where the tier is nearly full; returns how many pages were evicted.
/// Ends early when the tier takes no more.
pub(crate) fn put_all(
    client: &Client,
    link: &mut AgentConnection,
    tier: &Tier,
    runs: impl IntoIterator<Item = Run>,
    crowded: Effort,
) -> Result<u64, Gone> {
    let mut transfer = Transfer { client, link, tier, crowded, pages_left: 0 };
    let first = transfer.put_out(runs.into_iter())?;
    // What is pinned will say so again.
    let again = if first.busy.is_empty() { Taken::default() } else { transfer.put_out(first.busy.into_iter())? };
    Ok(first.gone + again.gone)
}

impl Transfer<'_> {
    fn put_out(&mut self, runs: impl Iterator<Item = Run>) -> Result<Taken, Gone> {
        let mut batches = Batches::of(runs);
        let Some(mut copied) = self.copy_next(&mut batches, 0)? else { return Ok(Taken::default()) };
        let channel = self.link.channel().clone();
        let Client { client_id, wakings, .. } = self.client;
        let target = Target { tier: self.tier, client_id: *client_id, channel: &channel, wakings };
        if batches.is_empty() {
            let mut buffer = [0; PAGE_SIZE];
            copied.retain(|one| target.store(one, &mut buffer, self.effort()));
            let mut taken = Taken::default();
            self.take_away(&copied, &mut taken)?;
            return Ok(taken);
        }
        std::thread::scope(|scope| self.put_out_by(&mut CompressWorkers::start(scope, target), batches, copied))
    }

    /// True if there is memory for a batch: at a limit of its own control group the kernel would kill the daemon.
    fn has_room(&mut self) -> bool {
        const BATCH: u64 = BATCH_PAGES as u64;
        if self.pages_left < BATCH {
            // The nearer the limit, the sooner the next look: there are other clients.
            let free = memory_limits::own().free_apart(&self.client.limits).saturating_sub(ROOM_KEPT);
            self.pages_left = (free / PAGE / 4).min(ROOM_PAGES);
        }
        let has = self.pages_left >= BATCH;
        self.pages_left = self.pages_left.saturating_sub(BATCH);
        has
    }

    /// By LZ4, or as `crowded` says where the tier has not much room left.
    fn effort(&self) -> Effort {
        if self.tier.is_crowded() { self.crowded } else { Effort::Fast }
    }

    /// Stores the copied batch, which lies in the first part of the channel, and all that come behind it.
    fn put_out_by(
        &mut self,
        workers: &mut CompressWorkers<'_>,
        mut batches: Batches<impl Iterator<Item = Run>>,
        copied: Vec<Copied>,
    ) -> Result<Taken, Gone> {
        let mut taken = Taken::default();
        let mut barren = 0;
        let mut on_their_way = VecDeque::from([(0, workers.store(copied, self.effort()))]);
        let mut free: Vec<usize> = (1..BATCHES).rev().collect();
        let mut is_full = false;
        while let Some((part, batch)) = on_their_way.pop_front() {
            while let Some(part) = free.pop_if(|_| !is_full)
                && let Some(copied) = self.copy_next(&mut batches, part)?
            {
                on_their_way.push_back((part, workers.store(copied, self.effort())));
            }
            let gone = taken.gone;
            self.take_away(&workers.finish(batch), &mut taken)?;
            free.push(part);
            barren = if taken.gone == gone { barren + 1 } else { 0 };
            is_full = barren >= BARREN_MAX && self.tier.stats().bytes_held >= self.tier.stats().bytes_max
                || self.client.gone.load(Ordering::Relaxed);
        }
        Ok(taken)
    }

    /// Copies the next batch of which anything can be copied, and that there is room for.
    fn copy_next(
        &mut self,
        batches: &mut Batches<impl Iterator<Item = Run>>,
        part: usize,
    ) -> Result<Option<Vec<Copied>>, Gone> {
        while self.has_room()
            && let Some(batch) = batches.next()
        {
            let copied = self.copy(&batch, part * BATCH_PAGES)?;
            if !copied.is_empty() {
                return Ok(Some(copied));
            }
        }
        Ok(None)
    }

    fn copy(&mut self, runs: &[Run], first: usize) -> Result<Vec<Copied>, Gone> {
        let wanted = self.resident(runs);
        if wanted.is_empty() {
            return Ok(Vec::new());
        }
        let ranges: Vec<Range> = wanted.iter().map(|(range, _)| *range).collect();
        let have = self.link.copy(&ranges, first, BATCH_PAGES)?;
        let addrs = wanted
            .iter()
            .flat_map(|(range, around)| (range.start..range.end).step_by(PAGE_SIZE).map(move |addr| (addr, *around)));
        let copied = addrs.zip(&have).zip(first as u32..).filter(|((_, have), _)| **have);
        Ok(copied.map(|(((addr, around), _), place)| Copied { page: addr / PAGE, place, around }).collect())
    }

    /// The parts of `runs` that may be evicted now: resident, without an entry that is being discarded, and without a page
    /// that moved from or to there and is not brought in yet. Those are left out page by page, since their return may need
    /// the memory that the rest frees.
    fn resident(&self, runs: &[Run]) -> Vec<Run> {
        let mut wanted: Vec<Run> = Vec::with_capacity(runs.len());
        // Held to the end: a thread that brings a page back marks it resident first, and discards its entry before it
        // unlocks this.
        let service = lock(&self.client.service);
        let (start, end) = (runs.iter().map(|(run, _)| run.start).min(), runs.iter().map(|(run, _)| run.end).max());
        let moving = service.moving_in(Range { start: start.unwrap_or(0), end: end.unwrap_or(0) });
        for (range, around) in runs {
            let mut start = range.start;
            for addr in (range.start..range.end).step_by(PAGE_SIZE) {
                if self.client.table.state(addr) != RESIDENT || moving.contains(&addr) {
                    if start < addr {
                        wanted.push((Range { start, end: addr }, *around));
                    }
                    start = addr + PAGE;
                }
            }
            if start < range.end {
                wanted.push((Range { start, end: range.end }, *around));
            }
        }
        drop(service);
        wanted.truncate(LIST_MAX);
        wanted
    }

    /// Has the agent take those pages away that still equal their copies, which are stored.
    fn take_away(&mut self, stored: &[Copied], taken: &mut Taken) -> Result<(), Gone> {
        let mut entries: Vec<EvictEntry> = Vec::new();
        for Copied { page, place, around } in stored {
            match entries.last_mut() {
                Some(last)
                    if last.start + u64::from(last.pages) * PAGE == page * PAGE
                        && last.place + last.pages == *place
                        && last.around_start == around.start =>
                {
                    last.pages += 1;
                }
                _ => entries.push(EvictEntry {
                    start: page * PAGE,
                    around_start: around.start,
                    around_end: around.end,
                    pages: 1,
                    place: *place,
                }),
            }
        }
        if entries.is_empty() {
            return Ok(());
        }
        // If the agent is gone now, what it did is unknown: the entries stay until tier and client are reconciled.
        let client = self.client;
        client.leaving.fetch_add(1, Ordering::SeqCst);
        let busy = self.link.drop_pages(&entries)?;
        client.note_agent_cpu(self.link.agent_cpu_ns);
        let service = lock(&client.service);
        let mut gone = 0;
        for Copied { page, place, around } in stored {
            if busy.binary_search(place).is_ok() {
                taken.busy.push((Range::pages_from(page * PAGE, 1), *around));
            }
            // The table says what happened. A page that went and came back already has no entry any more.
            // One that went out and was moved away by mremap(2) is still needed where it moved.
            if client.table.state(page * PAGE) == EVICTED || service.is_awaited(*page) {
                gone += 1;
            } else {
                self.tier.discard(client.client_id, *page..page + 1);
            }
        }
        client.counters.pages_evicted.fetch_add(gone, Ordering::Relaxed);
        taken.gone += gone;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cold::idle::waking::Wakings;
    use pagefold_os::fd::Fd;
    use pagefold_os::{Page, sock};
    use pagefold_protocol::channel::Channel;
    use pagefold_protocol::message::Packet;
    use std::os::fd::IntoRawFd;
    use std::sync::Arc;

    fn transfer<'a>(client: &'a Client, link: &'a mut AgentConnection, tier: &'a Tier) -> Transfer<'a> {
        Transfer { client, link, tier, crowded: Effort::Fast, pages_left: 0 }
    }

    #[test]
    fn batches_hold_every_page_once_and_in_order() {
        let around = Range { start: 0, end: 1 << 40 };
        let lengths = [1, 300, 255, 256, 257, 1, 1, 1000];
        let mut runs = Vec::new();
        let mut at = 7;
        for pages in lengths {
            runs.push((Range::pages_from(at * PAGE, pages), around));
            at += pages + 3;
        }
        let pages = |runs: &[Run]| -> Vec<u64> {
            runs.iter().flat_map(|(range, _)| (range.start / PAGE)..(range.end / PAGE)).collect()
        };
        let batches: Vec<Vec<Run>> = Batches::of(runs.iter().copied()).collect();
        assert_eq!(pages(&batches.concat()), pages(&runs));
        let (last, full) = batches.split_last().expect("some");
        assert!(full.iter().all(|batch| pages(batch).len() == BATCH_PAGES));
        assert!((1..=BATCH_PAGES).contains(&pages(last).len()));
        assert_eq!(Batches::of(std::iter::empty()).count(), 0);
    }

    /// A page that mremap(2) takes elsewhere after the agent let go of it, and before we look, is needed where it is now;
    /// one that came back meanwhile is not.
    #[test]
    fn a_page_that_is_moved_while_it_is_evicted_is_kept() {
        use crate::cold::client::tests;
        let Some((client, memory)) = tests::own(0, 4) else { return };
        let tier =
            Tier::create(pagefold_tier::Config { bytes_max: 8 << 20, ..Default::default() }, None).expect("memory");
        let around = Range::pages_from(memory.addr(), 4);
        let first = memory.addr() / PAGE;
        let stored: Vec<Copied> = (0..2).map(|at| Copied { page: first + at, place: at as u32, around }).collect();
        let content = |at: u64| -> Page { std::array::from_fn(|byte| (byte / 7) as u8 ^ at as u8) };
        for (one, at) in stored.iter().zip(1..) {
            tier.store(client.client_id, one.page, &content(at), Effort::Fast).expect("room");
            client.table.find_or_add(one.page * PAGE).expect("room");
        }
        let (ours, agent) = std::os::unix::net::UnixDatagram::pair().expect("sockets");
        // SAFETY: each descriptor has one owner.
        let [ours, agent] = [ours, agent].map(|one| unsafe { Fd::from_raw(one.into_raw_fd()) });
        let mut link = AgentConnection::new(Arc::new(ours.into())).expect("a channel");
        let mut taken = Taken::default();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut request = [0; size_of::<Packet>()];
                sock::receive(&agent, &mut request, 0).expect("a request");
                for one in &stored {
                    client.table.set_state(one.page * PAGE, EVICTED);
                }
                tests::moved(&client, &tier, Range::pages_from(first * PAGE, 1), (first + 3) * PAGE);
                client.table.set_state((first + 1) * PAGE, RESIDENT);
                sock::send(&agent, &request, &[]).expect("an answer");
            });
            let mut transfer = transfer(&client, &mut link, &tier);
            assert!(transfer.take_away(&stored, &mut taken).is_ok());
        });
        assert_eq!(taken.gone, 0);
        assert_eq!(tier.stats().pages, 1, "the moved page is lost, or what is back is kept");
        tests::bring_moved(&client, &tier);
        // SAFETY: the page is there, mapped and ours.
        let came = unsafe { &*(((first + 3) * PAGE) as *const Page) };
        assert!(*came == content(1) && tier.stats().pages == 0);
    }

    /// Where memory is short a moved page waits until other pages were evicted.
    #[test]
    fn moving_pages_do_not_keep_others_from_eviction() {
        use crate::cold::client::tests;
        let Some((client, _memory)) = tests::own(0, 1) else { return };
        let tier =
            Tier::create(pagefold_tier::Config { bytes_max: 4 << 20, ..Default::default() }, None).expect("memory");
        let ours = std::os::unix::net::UnixDatagram::pair().expect("sockets").0;
        // SAFETY: the descriptor has one owner.
        let mut link =
            AgentConnection::new(Arc::new(unsafe { Fd::from_raw(ours.into_raw_fd()) }.into())).expect("a channel");
        let transfer = transfer(&client, &mut link, &tier);
        let pages = |first: u64, count| Range::pages_from((1 << 40) + first * PAGE, count);
        let around = pages(0, 100);
        // One to elsewhere, one from there, one within, and one that has no entry.
        for (from, to) in [(3, 1000), (1000, 5), (7, 20), (1 << 20, 21)] {
            tests::await_moved(&client, pages(from, 1).start, pages(to, 1).start);
        }
        let wanted = transfer.resident(&[(pages(0, 9), around), (pages(19, 4), around), (pages(50, 1), around)]);
        let expected = [pages(0, 3), pages(4, 1), pages(6, 1), pages(8, 1), pages(19, 1), pages(22, 1), pages(50, 1)];
        assert_eq!(wanted, expected.map(|range| (range, around)));
        assert!(transfer.resident(&[]).is_empty());
    }

    /// A page has just come back, and its entry is not discarded yet: if it were stored now, that discard would hit the new
    /// entry.
    #[test]
    fn a_page_that_comes_back_is_stored_when_its_entry_is_gone() {
        use crate::cold::client::tests;
        use std::time::Duration;
        // So many are looked at before it.
        const BEFORE: u64 = 1 << 20;
        let Some((client, _memory)) = tests::own(0, 1) else { return };
        let tier =
            Tier::create(pagefold_tier::Config { bytes_max: 4 << 20, ..Default::default() }, None).expect("memory");
        let run = Range::pages_from(1 << 40, BEFORE + 1);
        let (addr, page) = (run.end - PAGE, run.end / PAGE - 1);
        client.table.find_or_add(addr).expect("room");
        let ours = std::os::unix::net::UnixDatagram::pair().expect("sockets").0;
        // SAFETY: the descriptor has one owner.
        let mut link =
            AgentConnection::new(Arc::new(unsafe { Fd::from_raw(ours.into_raw_fd()) }.into())).expect("a channel");
        let transfer = transfer(&client, &mut link, &tier);
        for round in 0..10 {
            tier.store(client.client_id, page, &[7; PAGE_SIZE], Effort::Fast).expect("room");
            client.table.set_state(addr, EVICTED);
            let (tell, told) = std::sync::mpsc::channel();
            std::thread::scope(|scope| {
                let (client, tier) = (&client, &tier);
                // What the client's thread does, with a pause in the middle.
                scope.spawn(move || {
                    told.recv().expect("it begins");
                    std::thread::sleep(Duration::from_millis(1));
                    let service = lock(&client.service);
                    client.table.set_state(addr, RESIDENT);
                    let _ = told.recv_timeout(Duration::from_millis(200));
                    tier.discard(client.client_id, page..page + 1);
                    drop(service);
                });
                tell.send(()).expect("a receiver");
                let wanted = transfer.resident(&[(run, run)]);
                let too_early =
                    wanted.last().is_some_and(|(last, _)| last.end == run.end) && tier.contains(client.client_id, page);
                let _ = tell.send(());
                assert!(!too_early, "round {round}");
            });
        }
    }

    #[test]
    fn workers_tell_of_each_page_whether_it_was_stored() {
        let tier =
            Tier::create(pagefold_tier::Config { bytes_max: 8 << 20, ..Default::default() }, None).expect("memory");
        let around = Range { start: 0, end: 1 << 40 };
        let channel = Channel::create(c"channel").expect("memory");
        let wakings = Wakings::default();
        std::thread::scope(|scope| {
            let target = Target { tier: &tier, client_id: 1, channel: &channel, wakings: &wakings };
            let mut workers = CompressWorkers::start(scope, target);
            // Batch after batch, several at once, until the tier is full: noise, so that each page takes room.
            let (mut noise, mut refused) = (fastrand::Rng::with_seed(1), 0);
            for first in (0..4000).step_by(FETCH_PAGES_MAX) {
                let mut on_their_way = VecDeque::new();
                for part in 0..BATCHES {
                    // A batch of any length, and not in order.
                    let count = BATCH_PAGES - (first / FETCH_PAGES_MAX + part) % BATCH_PAGES;
                    let place = |at| (part * BATCH_PAGES + at) as u32;
                    let pages: Vec<Page> = (0..count)
                        .map(|_| {
                            let mut page = [0; PAGE_SIZE];
                            noise.fill(&mut page);
                            page
                        })
                        .collect();
                    pages.iter().enumerate().for_each(|(at, page)| channel.write_page(place(at) as usize, page));
                    let batch = (0..count)
                        .rev()
                        .map(|at| Copied { page: (first + part * BATCH_PAGES + at) as u64, place: place(at), around })
                        .collect();
                    on_their_way.push_back((first + part * BATCH_PAGES, pages, workers.store(batch, Effort::Fast)));
                }
                for (first, pages, batch) in on_their_way {
                    let stored = workers.finish(batch);
                    for (at, page) in pages.iter().enumerate() {
                        let mut loaded = [0; PAGE_SIZE];
                        let is_there = tier.load(1, (first + at) as u64, &mut loaded).is_ok();
                        assert_eq!(stored.iter().any(|one| one.page == (first + at) as u64), is_there);
                        assert!(!is_there || loaded == *page);
                        refused += usize::from(!is_there);
                    }
                }
            }
            assert!(refused > 0, "8 MiB of noise do not go into 8 MiB with their books");
        });
    }
}
