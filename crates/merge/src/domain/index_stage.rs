//! The index stage: which slot shall a new candidate show?
//!
//! Two ways lead to a slot. A page just above one that has been merged
//! is *predicted* to show the neighbour of that slot: no fingerprint, the
//! comparison under freeze proves it or not. Otherwise the page is fetched,
//! fingerprinted and looked up; a hit on another candidate makes a slot for
//! both, in the order in which neighbours match, so that runs stay runs.

use super::index_entry::IndexEntry;
use super::member::Work;
use super::{Domain, remap};
use crate::client::{FETCH_PAGES_MAX, Gone};
use crate::page::PageState;
use crate::plan::{self, PageRun, TargetSlot};
use crate::table::{CHUNK_LEN, CHUNK_PAGES, Huge};
use pagefold_os::page::is_zero;
use pagefold_os::{PAGE_SIZE, Page, Range, ranges, sched};
use pagefold_pool::{Fingerprint, PublishError, Published, Slot};
use pagefold_protocol::message::RefusalReason;
use std::collections::HashMap;
use std::time::Duration;

const PAGE: u64 = PAGE_SIZE as u64;

/// Pages fetched at once where a prediction may take over.
pub(super) const BLOCK_MIN: usize = 16;
/// Pages that a step indexes before it lets other clients have their turn.
const STEP_PAGES: usize = 16 << 10;
/// Runs at least this long are merged at once; shorter ones wait for the longest-first order.
const RUN_AT_ONCE: u64 = 16;
/// A pause in which another worker may make the slots that it has claimed, and how many a batch has: it copies some
/// thousand pages in so long. Pages that it has not done by then are looked up again.
const CLAIM_PAUSE: Duration = Duration::from_micros(50);
const CLAIM_PAUSES: usize = 100;
/// Predictions are tried for at least this many pages.
const PREDICT_MIN: u64 = 8;
/// A run at least this long at the end of a batch is taken to go on: behind shorter ones small batches cost more than
/// predictions save.
const FOLLOWED_MIN: u64 = 128;
/// Pages that one prediction covers at most.
const PREDICT_MAX: u64 = 2048;

impl Domain {
    /// Indexes fresh candidates; returns whether there were any, and whether some are left.
    pub(super) fn index_fresh(&self, work: &mut Work) -> Result<(bool, bool), Gone> {
        let runs = fresh_runs(work, STEP_PAGES);
        if runs.is_empty() {
            return Ok((false, false));
        }
        let mut batch: Vec<Range> = Vec::new();
        let mut batched = 0;
        for run in runs {
            let mut at = run.start;
            while at < run.end {
                let whole = is_whole(work, at);
                if whole && !batch.is_empty() {
                    self.index_batch(work, &batch)?;
                    batch.clear();
                    batched = 0;
                    continue;
                }
                if self.config.predict && batch.is_empty() {
                    let merged = self.predict(work, Range { start: at, end: run.end })?;
                    at += merged * PAGE;
                    if merged > 0 {
                        continue;
                    }
                }
                if work.is_resting() {
                    // The kernel refused a mapping meanwhile; what is left is looked up after the rest.
                    return Ok((true, true));
                }
                // A huge page is looked up as one: it is split where less than all of it is merged.
                let room = if whole { CHUNK_PAGES } else { work.block - batched.min(work.block) } as u64;
                let next = at / CHUNK_LEN * CHUNK_LEN + CHUNK_LEN;
                let end = if at + room * PAGE > next && is_whole(work, next) { run.end.min(next) } else { run.end };
                // A prediction that failed may have merged what lies behind the page that it failed at.
                let pages = fresh_pages(work, Range { start: at, end: end.min(at + room * PAGE) });
                if pages == 0 {
                    at += PAGE;
                    continue;
                }
                let part = Range::pages_from(at, pages);
                batch.push(part);
                batched += pages as usize;
                at = part.end;
                if batched >= work.block {
                    self.index_batch(work, &batch)?;
                    batch.clear();
                    batched = 0;
                }
            }
        }
        if !batch.is_empty() {
            self.index_batch(work, &batch)?;
        }
        let left = work.table.counts().fresh > 0;
        Ok((true, left))
    }

    /// Tries to merge `run` with the slots after the one its neighbour shows; returns the pages merged from its start.
    fn predict(&self, work: &mut Work, run: Range) -> Result<u64, Gone> {
        let PageState::Shared(before) = work.table.state(run.start.wrapping_sub(PAGE)) else { return Ok(0) };
        let next = Slot::from_number(before.number() + 1);
        if next.segment() != before.segment() || self.ends_copies(before) {
            return Ok(0);
        }
        // A wrong guess freezes pages in vain. Runs have long tails: one that is this long already may become twice as long.
        let shows = |back: u64| match work.table.state(run.start.wrapping_sub(back * PAGE)) {
            PageState::Shared(slot) => u64::from(slot.number()) + back == u64::from(next.number()),
            _ => false,
        };
        let behind = (1..=PREDICT_MAX).take_while(|back| shows(*back)).count() as u64;
        let published = u64::from(self.pool.published_from(next));
        // A huge page is merged whole, or looked up.
        let whole = is_whole(work, run.start) && behind >= FOLLOWED_MIN;
        let behind = if whole { behind.max(CHUNK_PAGES as u64) } else { behind };
        let pages = fresh_pages(work, Range::pages_from(run.start, run.pages().min(published).min(behind)));
        let end = run.start + pages * PAGE;
        let last = end / CHUNK_LEN * CHUNK_LEN;
        let pages =
            if (run.start..end).contains(&last) && is_whole(work, last) { (last - run.start) / PAGE } else { pages };
        if pages < PREDICT_MIN {
            return Ok(0);
        }
        let guess = PageRun { range: Range::pages_from(run.start, pages), target: Some(next) };
        let merged = self.merge_predicted(work, guess)?;
        self.count(|c| &c.pages_predicted, merged);
        Ok(merged)
    }

    /// Fetches, fingerprints, looks up; merges long runs, defers short ones.
    fn index_batch(&self, work: &mut Work, ranges: &[Range]) -> Result<(), Gone> {
        let began = sched::monotonic_ns();
        let count: usize = ranges.iter().map(|range| range.pages() as usize).sum();
        let mut readable = vec![false; count];
        self.with_buffer(count, |buffer| {
            work.client.fetch(ranges, buffer, &mut readable)?;
            self.index_pages(work, ranges, buffer, &readable, began)
        })
    }

    fn index_pages(
        &self,
        work: &mut Work,
        ranges: &[Range],
        pages: &[Page],
        readable: &[bool],
        began: u64,
    ) -> Result<(), Gone> {
        let addrs = || ranges.iter().flat_map(|range| (range.start..range.end).step_by(PAGE_SIZE));
        let mut targets: Vec<(u64, TargetSlot)> = Vec::new();
        let mut pairs: Vec<(Fingerprint, u64)> = Vec::with_capacity(pages.len());
        let mut looked: Vec<Looked> = Vec::with_capacity(pages.len());
        for (index, addr) in addrs().enumerate() {
            let Some((chunk, page)) = work.table.find_mut(addr) else { continue };
            let PageState::Candidate { backoff, .. } = chunk.state(page) else { continue };
            if !readable[index] {
                chunk.set(page, PageState::Unknown);
                continue;
            }
            chunk.set(page, PageState::Candidate { indexed: true, backoff });
            if is_zero(&pages[index]) {
                targets.push((addr, None));
            } else {
                let me = IndexEntry::Candidate { chunk: chunk.id, page: page as u32 };
                pairs.push((self.key.fingerprint(&pages[index]), me.value()));
                looked.push(Looked { addr, index, failed: backoff > 0 });
            }
        }
        let hashed = sched::monotonic_ns();
        self.count(|c| &c.pages_fingerprinted, pages.len() as u64);
        self.count(|c| &c.fingerprint_ns, hashed - began);
        let mut existing = vec![None; pairs.len()];
        // A full index means that these pages are not remembered as candidates; hits are still hits.
        let _ = self.index.get_or_insert_many(&pairs, &mut existing);
        let mut twins: Vec<Twin> = Vec::new();
        let mut claimed: Vec<(u64, Fingerprint)> = Vec::new();
        for (place, found) in existing.iter().enumerate() {
            let Looked { addr, index, failed } = looked[place];
            let (fingerprint, mine) = pairs[place];
            match found.map(IndexEntry::from_value) {
                None => {}
                Some(entry) if entry.value() == mine => {}
                // What the entry stands for is gone or changed: it becomes ours, unless a twin of ours was quicker.
                Some(entry) if self.is_stale(entry) => {
                    let is_ours = self.index.replace(fingerprint, entry.value(), mine);
                    if !is_ours {
                        remap::look_up_again(work, Range::pages_from(addr, 1));
                    }
                }
                // The index tells contents apart by some thirty bits. A page of another content than the slot's would be
                // frozen and compared in vain for ever: it stays as it is until it is written.
                Some(IndexEntry::Slot(slot)) if failed && self.shows_another(slot, &pages[index]) => {}
                Some(IndexEntry::Slot(slot)) => targets.push((addr, Some(slot))),
                Some(IndexEntry::Claimed) => claimed.push((addr, fingerprint)),
                Some(entry) => twins.push(Twin { addr, index, fingerprint, entry, mine }),
            }
        }
        self.lead_to_copies(&mut targets);
        let twins = without_forked(work, twins);
        let twins = self.affordable(work, twins, &targets);
        // For claims of others it waits only with no claim of its own.
        let mut pauses = CLAIM_PAUSES;
        targets.extend(self.publish_twins(work, &twins, pages, &mut pauses));
        for (addr, fingerprint) in claimed {
            let slot = self.claimed_slot(work, addr, fingerprint, &mut pauses);
            targets.extend(slot.map(|slot| (addr, Some(slot))));
        }
        targets.sort_unstable_by_key(|(addr, _)| *addr);
        let runs = plan::runs(targets);
        self.count(|c| &c.index_ns, sched::monotonic_ns() - hashed);
        // A long run that reaches the end of the batch will go on by prediction, if the slots after it exist: those that
        // this very batch published have none behind them yet.
        let last = ranges.last().map(|range| range.end);
        let follows = |run: &PageRun| {
            let next = run.target_at(run.range.pages()).filter(|_| run.range.pages() >= FOLLOWED_MIN);
            next.is_some_and(|next| next.index() != 0 && u64::from(self.pool.published_from(next)) >= PREDICT_MIN)
        };
        // One content again and again goes on with itself, not with what lies behind its slot.
        let repeats = matches!(&runs[..], [.., before, last] if before.target == last.target && last.target.is_some());
        let goes_on = !repeats && runs.last().is_some_and(|run| Some(run.range.end) == last && follows(run));
        work.block = if goes_on { BLOCK_MIN } else { (work.block * 2).min(FETCH_PAGES_MAX) };
        let at_once = |run: &PageRun| {
            run.target.is_none() || run.range.pages() >= RUN_AT_ONCE || goes_on && Some(run.range.end) == last
        };
        let (now, later): (Vec<PageRun>, Vec<PageRun>) = runs.into_iter().partition(at_once);
        work.defer(later);
        let now = self.within_budget(work, now);
        self.merge(work, &now).map(drop)
    }

    fn shows_another(&self, slot: Slot, page: &Page) -> bool {
        self.pool.with_page(slot, |shown| shown != page).unwrap_or(false)
    }

    /// Returns true for an entry of a slot that was released, or of a page that changed or is gone.
    fn is_stale(&self, entry: IndexEntry) -> bool {
        match entry {
            IndexEntry::Slot(slot) => self.pool.published_from(slot) == 0,
            IndexEntry::Candidate { chunk, page } => !super::read(&self.chunks).is_indexed(chunk, page),
            IndexEntry::Claimed => false,
        }
    }

    /// The slot that another worker made for the content of the page at `addr`, or makes within the `pauses` that are left.
    /// Without one the page is looked up again.
    fn claimed_slot(&self, work: &mut Work, addr: u64, fingerprint: Fingerprint, pauses: &mut usize) -> Option<Slot> {
        loop {
            match self.index.get(fingerprint).map(IndexEntry::from_value) {
                Some(IndexEntry::Slot(slot)) => return Some(slot),
                Some(IndexEntry::Claimed) if *pauses > 0 => {
                    *pauses -= 1;
                    std::thread::sleep(CLAIM_PAUSE);
                }
                _ => {
                    remap::look_up_again(work, Range::pages_from(addr, 1));
                    return None;
                }
            }
        }
    }

    /// Gives each twin's content a slot, and tells the candidate that had it first.
    fn publish_twins(
        &self,
        work: &mut Work,
        twins: &[Twin],
        pages: &[Page],
        pauses: &mut usize,
    ) -> Vec<(u64, TargetSlot)> {
        let mut targets = Vec::with_capacity(twins.len());
        let mut notices = Vec::with_capacity(twins.len());
        // One content gets one slot, however often it stands here.
        let mut firsts: HashMap<Fingerprint, First> = HashMap::with_capacity(twins.len());
        let (fresh, again): (Vec<&Twin>, Vec<&Twin>) =
            twins.iter().partition(|twin| firsts.insert(twin.fingerprint, First::Lost).is_none());
        let claimed = IndexEntry::Claimed.value();
        let claims = |twin: &&Twin| self.index.replace(twin.fingerprint, twin.entry.value(), claimed);
        let (ours, others): (Vec<&Twin>, Vec<&Twin>) = fresh.into_iter().partition(claims);
        let mut rest = &ours[..];
        let mut is_full = false;
        let mut refused = 0;
        while !rest.is_empty() {
            let refs: Vec<&Page> = rest.iter().map(|twin| &pages[twin.index]).collect();
            let Published { first, taken, hold } = match self.pool.publish_in(work.lane, &refs) {
                Ok(published) => published,
                // They are looked up again later.
                Err(error) => {
                    is_full = matches!(error, PublishError::Full { .. });
                    refused = rest.len();
                    for twin in rest {
                        self.index.replace(twin.fingerprint, claimed, twin.entry.value());
                        firsts.insert(twin.fingerprint, First::Refused);
                        remap::put_off(work, twin.addr);
                    }
                    break;
                }
            };
            // Ours alone: once we share the slots, they are there for the other candidates as well.
            work.held_segments.insert(hold.segment(), hold);
            for (offset, twin) in rest[..taken].iter().enumerate() {
                let slot = Slot::from_number(first.number() + offset as u32);
                let leads = self.index.replace(twin.fingerprint, claimed, IndexEntry::Slot(slot).value());
                debug_assert!(leads, "a claim is undone by the worker that made it");
                firsts.insert(twin.fingerprint, First::Has(slot));
                targets.push((twin.addr, Some(slot)));
                notices.push((twin.entry, Some(slot)));
            }
            rest = &rest[taken..];
        }
        for twin in others {
            if let Some(slot) = self.claimed_slot(work, twin.addr, twin.fingerprint, pauses) {
                firsts.insert(twin.fingerprint, First::Has(slot));
                targets.push((twin.addr, Some(slot)));
            }
        }
        for twin in again {
            match firsts.get(&twin.fingerprint) {
                Some(First::Has(slot)) => targets.push((twin.addr, Some(*slot))),
                Some(First::Refused) => {
                    refused += 1;
                    remap::put_off(work, twin.addr);
                }
                Some(First::Lost) | None => remap::look_up_again(work, Range::pages_from(twin.addr, 1)),
            }
        }
        self.count(|c| if is_full { &c.pool_full_pages } else { &c.segment_alloc_failed_pages }, refused as u64);
        self.notify_owners(&notices);
        targets
    }
}

/// What became of the first page of a content.
enum First {
    Has(Slot),
    /// Another worker was quicker, and its slot is not there yet, or is gone already.
    Lost,
    /// There was no segment for it.
    Refused,
}

/// A page that is looked up.
#[derive(Clone, Copy)]
struct Looked {
    addr: u64,
    /// Its place among the fetched pages.
    index: usize,
    /// It was caught writing before, or compared in vain.
    failed: bool,
}

/// A page with the same content as another candidate.
#[derive(Clone, Copy)]
pub(super) struct Twin {
    pub(super) addr: u64,
    /// Its place among the fetched pages.
    index: usize,
    pub(super) fingerprint: Fingerprint,
    /// The other one, to which the index leads.
    pub(super) entry: IndexEntry,
    /// What the index would say of this one.
    pub(super) mine: u64,
}

/// The twins with pages that no other process maps. The function refuses the others; a later scan tries them again, like
/// pages that the agent could not freeze.
fn without_forked(work: &mut Work, mut twins: Vec<Twin>) -> Vec<Twin> {
    let (mut parts, mut alone) = (Vec::new(), Vec::with_capacity(twins.len()));
    twins.iter().for_each(|twin| ranges::append(&mut parts, Range::pages_from(twin.addr, 1)));
    parts.into_iter().for_each(|part| work.client.mapped_alone(part, &mut alone));
    debug_assert!(alone.is_sorted(), "a batch is in order of address");
    twins.retain(|twin| {
        let is_alone = alone.binary_search(&twin.addr).is_ok();
        if !is_alone {
            remap::refuse_page(work, twin.addr, RefusalReason::Pinned);
        }
        is_alone
    });
    twins
}

fn is_fresh(work: &Work, addr: u64) -> bool {
    matches!(work.table.state(addr), PageState::Candidate { indexed: false, .. })
}

/// True if a huge page of which nothing was looked up yet may begin at `addr`.
fn is_whole(work: &Work, addr: u64) -> bool {
    addr.is_multiple_of(CHUNK_LEN)
        && work
            .table
            .find(addr)
            .is_some_and(|(chunk, _)| chunk.huge == Huge::Split && chunk.counts.fresh as usize == CHUNK_PAGES)
}

/// How many pages from the start of `range` on are candidates that were not looked up yet.
fn fresh_pages(work: &Work, range: Range) -> u64 {
    let pages = (range.start..range.end).step_by(PAGE_SIZE);
    pages.take_while(|addr| is_fresh(work, *addr)).count() as u64
}

/// Runs of candidates that were not looked up yet, about `pages_max` pages.
fn fresh_runs(work: &Work, pages_max: usize) -> Vec<Range> {
    let mut runs: Vec<Range> = Vec::new();
    let mut pages = 0;
    for chunk in work.table.chunks().iter().filter(|chunk| chunk.counts.fresh > 0) {
        if pages >= pages_max {
            break;
        }
        for index in chunk.pages() {
            if let PageState::Candidate { indexed: false, .. } = chunk.state(index) {
                pages += 1;
                ranges::append(&mut runs, Range::pages_from(chunk.page_addr(index), 1));
            }
        }
    }
    runs
}
