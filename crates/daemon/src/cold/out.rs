//! Pages go out: copied, stored, taken away.
//!
//! Three steps for each batch: the agent copies its pages, the tier stores the copies, the agent takes away what still
//! equals its copy. One after the other: with two batches on their way, the agent working on one while the other was
//! stored, parking was a third slower on two processors, when it stored by Zstandard and that used them all. By LZ4 it may
//! pay.

use super::client::{Client, lock};
use super::link::{ColdLink, Gone};
use pagefold_agent::cold_table::{OUT, RESIDENT};
use pagefold_agent::wire::{DropEntry, FETCH_PAGES_MAX, LIST_MAX};
use pagefold_os::{PAGE_SIZE, Page, Range};
use pagefold_tier::{Effort, Tier};
use std::sync::atomic::Ordering;

const PAGE: u64 = PAGE_SIZE as u64;
/// Batches of which nothing goes before a tier that takes no more is believed.
const BARREN_MAX: u32 = 4;

/// A run to put out, and the managed range around it.
pub(super) type Run = (Range, Range);

/// Copies of the pages of a batch.
pub(super) struct Buffers {
    pages: Vec<Page>,
    have: Vec<bool>,
}

impl Buffers {
    pub(super) fn new() -> Buffers {
        Buffers { pages: vec![[0; PAGE_SIZE]; FETCH_PAGES_MAX], have: vec![false; FETCH_PAGES_MAX] }
    }
}

/// A page that was copied.
#[derive(Clone, Copy)]
struct Copied {
    /// Its number.
    page: u64,
    /// Where its copy lies in the channel.
    place: u32,
    /// The managed range that it lies in.
    around: Range,
}

/// Cuts runs into batches.
struct Batches<'a> {
    runs: &'a [Run],
    /// Next page of the first of them.
    start: u64,
}

impl<'a> Batches<'a> {
    fn of(runs: &'a [Run]) -> Batches<'a> {
        Batches { runs, start: runs.first().map_or(0, |(range, _)| range.start) }
    }
}

impl Iterator for Batches<'_> {
    type Item = Vec<Run>;

    fn next(&mut self) -> Option<Vec<Run>> {
        let mut batch = Vec::new();
        let mut room = FETCH_PAGES_MAX as u64;
        while room > 0
            && let Some((range, around)) = self.runs.first()
        {
            let end = range.end.min(self.start + room * PAGE);
            batch.push((Range { start: self.start, end }, *around));
            room -= (end - self.start) / PAGE;
            self.start = end;
            if end == range.end {
                self.runs = &self.runs[1..];
                self.start = self.runs.first().map_or(0, |(range, _)| range.start);
            }
        }
        (!batch.is_empty()).then_some(batch)
    }
}

/// What became of the pages.
#[derive(Default)]
struct Taken {
    gone: u64,
    /// Shared by a fork until a moment ago, perhaps: worth another attempt.
    busy: Vec<Run>,
}

struct Mover<'a> {
    client: &'a Client,
    link: &'a mut ColdLink,
    tier: &'a Tier,
    crowded: Effort,
}

/// Puts runs out, by LZ4, or with the effort `crowded` where the tier has not much room left; returns how many pages
/// went. Ends early when the tier takes no more.
pub(super) fn put_all(
    client: &Client,
    link: &mut ColdLink,
    tier: &Tier,
    runs: &[Run],
    crowded: Effort,
    buffers: &mut Buffers,
) -> Result<u64, Gone> {
    let mut mover = Mover { client, link, tier, crowded };
    let first = mover.put_out(runs, buffers)?;
    // What is pinned will say so again.
    let again = if first.busy.is_empty() { Taken::default() } else { mover.put_out(&first.busy, buffers)? };
    Ok(first.gone + again.gone)
}

impl Mover<'_> {
    fn put_out(&mut self, runs: &[Run], buffers: &mut Buffers) -> Result<Taken, Gone> {
        let mut taken = Taken::default();
        let mut barren = 0;
        for batch in Batches::of(runs) {
            let gone = taken.gone;
            let mut copied = self.copy(&batch, buffers)?;
            let pages: Vec<(u64, &Page)> =
                copied.iter().map(|one| (one.page, &buffers.pages[one.place as usize])).collect();
            let effort = if self.tier.is_crowded() { self.crowded } else { Effort::Fast };
            let stored = self.tier.store_many(self.client.region, &pages, effort);
            // A refused page stays where it is.
            let mut kept = stored.iter().map(Result::is_ok);
            copied.retain(|_| kept.next().unwrap_or(false));
            self.take_away(&copied, &mut taken)?;
            barren = if taken.gone > gone { 0 } else { barren + 1 };
            let full = barren >= BARREN_MAX && self.tier.stats().bytes_held >= self.tier.stats().bytes_max;
            if full || self.client.gone.load(Ordering::Relaxed) {
                break;
            }
        }
        Ok(taken)
    }

    fn copy(&mut self, runs: &[Run], buffers: &mut Buffers) -> Result<Vec<Copied>, Gone> {
        let wanted = self.resident(runs);
        if wanted.is_empty() {
            return Ok(Vec::new());
        }
        let ranges: Vec<Range> = wanted.iter().map(|(range, _)| *range).collect();
        self.link.copy(&ranges, &mut buffers.pages, &mut buffers.have)?;
        let addrs = wanted
            .iter()
            .flat_map(|(range, around)| (range.start..range.end).step_by(PAGE_SIZE).map(move |addr| (addr, *around)));
        let copied = addrs.zip(&buffers.have).enumerate().filter(|(_, (_, have))| **have);
        Ok(copied
            .map(|(place, ((addr, around), _))| Copied { page: addr / PAGE, place: place as u32, around })
            .collect())
    }

    /// The parts of `runs` that are nobody's business at this moment: not out, no entry being discarded.
    fn resident(&self, runs: &[Run]) -> Vec<Run> {
        let mut wanted: Vec<Run> = Vec::with_capacity(runs.len());
        if lock(&self.client.service).is_moving() {
            return wanted;
        }
        for (range, around) in runs {
            let mut start = range.start;
            for addr in (range.start..range.end).step_by(PAGE_SIZE) {
                if self.client.table.state(addr) != RESIDENT {
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
        wanted.truncate(LIST_MAX);
        wanted
    }

    /// Has the agent take those pages away that still equal their copies, which are stored.
    fn take_away(&mut self, stored: &[Copied], taken: &mut Taken) -> Result<(), Gone> {
        let mut entries: Vec<DropEntry> = Vec::new();
        for Copied { page, place, around } in stored {
            match entries.last_mut() {
                Some(last)
                    if last.start + u64::from(last.pages) * PAGE == page * PAGE
                        && last.place + last.pages == *place
                        && last.around_start == around.start =>
                {
                    last.pages += 1;
                }
                _ => entries.push(DropEntry {
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
        // If the agent is gone now we do not know what it did: the entries stay until books and world are reconciled.
        let client = self.client;
        client.leaving.fetch_add(1, Ordering::SeqCst);
        let busy = self.link.drop_pages(&entries)?;
        client.counters.agent_cpu_ns.store(self.link.agent_cpu_ns, Ordering::Relaxed);
        let _service = lock(&client.service);
        let mut gone = 0;
        for Copied { page, place, around } in stored {
            if busy.binary_search(place).is_ok() {
                taken.busy.push((Range::pages_from(page * PAGE, 1), *around));
            }
            // The table says what happened. A page that went and came back already has no entry any more.
            if client.table.state(page * PAGE) == OUT {
                gone += 1;
            } else {
                self.tier.discard(client.region, *page..page + 1);
            }
        }
        client.counters.pages_out_ever.fetch_add(gone, Ordering::Relaxed);
        taken.gone += gone;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let batches: Vec<Vec<Run>> = Batches::of(&runs).collect();
        assert_eq!(pages(&batches.concat()), pages(&runs));
        let (last, full) = batches.split_last().expect("some");
        assert!(full.iter().all(|batch| pages(batch).len() == FETCH_PAGES_MAX));
        assert!((1..=FETCH_PAGES_MAX).contains(&pages(last).len()));
        assert_eq!(Batches::of(&[]).count(), 0);
    }
}
