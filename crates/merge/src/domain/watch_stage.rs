//! The watch stage: one pass over a client per period.

use super::index_entry::{ChunkRef, IndexEntry};
use super::member::{Idle, Member, Work};
use super::{Domain, Managed, Unmerged};
use crate::client::{FREEZE_PAGES_MAX, Gone, MAPPINGS_MAX, PoolMapping, Written};
use crate::page::{PageState, on_period, on_written};
use crate::table::{CHUNK_LEN, CHUNK_PAGES, CHUNK_RECORD_BYTES, Chunk, Huge, Indexed, Table};
use pagefold_os::page::is_zero;
use pagefold_os::sync::{lock, write};
use pagefold_os::{PAGE_SIZE, Range, ranges, sched};
use pagefold_pool::SLOTS_PER_SEGMENT;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const PAGE: u64 = PAGE_SIZE as u64;

/// Periods that a huge page is left before it is probed first.
const HUGE_FIRST_PROBE: u8 = 2;
/// Huge pages that one step probes at most, before it lets other clients have their turn.
const HUGE_PROBES: usize = 32;
/// Highest exponent of the wait between probes.
const HUGE_BACKOFF_MAX: u8 = 5;
/// A huge page is split if at least one of this many of its pages is zero or has a twin.
const HUGE_PAYS_ONE_IN: usize = 4;
/// The index is swept of dead entries once in this many periods.
const SWEEP_PERIODS: usize = 16;
/// Periods after which healing is tried again where the budget of mappings did not allow it.
const HEAL_REST_PERIODS: u64 = 16;
/// Looks that are left out in a row at most: writes by others than the process, which its count of faults does not tell, are
/// seen so much later.
const SKIPPED_LOOKS_MAX: u32 = 15;
/// Pages of one client that are managed at most (512 GiB); the rest is left alone.
const PAGES_MAX: u64 = 1 << 27;
/// Bytes of records about the chunks of one client that need no room to be looked for (half a GiB of addresses): no more
/// than what else is kept of it.
const RECORDS_SMALL: u64 = 64 << 10;
/// User memory ends here.
const ADDRESS_MAX: u64 = 1 << 56;

impl Domain {
    pub(super) fn pass_period(&self, member: &Member, work: &mut Work) -> Result<(), Gone> {
        let began = sched::monotonic_ns();
        work.period += 1;
        let generation = work.client.generation();
        if work.generation != Some(generation) {
            // What the process cannot tell now it is asked for again.
            work.generation = self.refresh_regions(member, generation, work)?.then_some(generation);
        }
        self.look_unless_idle(work)?;
        if end_period(work) {
            work.idle = None;
        }
        work.table.compact();
        note_due_probes(work);
        self.heal_old(work)?;
        self.compact_pool(work)?;
        self.sweep_index();
        self.release_segments();
        work.client.forget(&self.pool)?;
        self.settle_leftover(work)?;
        self.count(|c| &c.full_scans, 1);
        self.count(|c| &c.watch_ns, sched::monotonic_ns() - began);
        Ok(())
    }

    /// Tells the client whether pages were left out. Runs that are found now come first: another system may take their
    /// pages.
    fn settle_leftover(&self, work: &mut Work) -> Result<(), Gone> {
        let is_due = |since: &mut u64| {
            self.indexing.load(Ordering::Acquire) == 0 || work.period - *since >= super::SHORT_WAIT_PERIODS
        };
        let left_out = work.left_out_since.take_if(is_due).is_some();
        work.client.settle_leftover(left_out)
    }

    /// Returns false if the process cannot tell: then what was known stays.
    fn refresh_regions(&self, member: &Member, generation: u64, work: &mut Work) -> Result<bool, Gone> {
        self.mark_index_dirty();
        work.idle = None;
        let Some(mut ranges) = work.client.regions()? else { return Ok(false) };
        check_regions(&mut ranges)?;
        let has_all = self.keep_to_room(&work.table, &mut ranges);
        let mut discarded = 0;
        let pool = &self.pool;
        work.table.set_ranges(
            &ranges,
            |addr| {
                let indexed = Arc::<Indexed>::default();
                let to = ChunkRef { client: member.id, addr, indexed: indexed.clone() };
                (write(&self.chunks).take(to), indexed)
            },
            |_, state| {
                if let PageState::Shared(slot) = state {
                    pool.remove_sharer(slot);
                    discarded += 1;
                }
            },
            |number| write(&self.chunks).give_back(number),
        );
        self.count(|c| &c.pages_discarded, discarded);
        note_healed_unknown(work, has_all);
        let Some(mappings) = self.reconcile(work)? else { return Ok(false) };
        let inherits_later = self.may_inherit_later(work);
        if !inherits_later {
            self.name_earlier(work, &mappings)?;
        }
        let has_all = has_all && !inherits_later;
        // All plain memory, not only ranges that are new to the table: where the program mapped or discarded, unwatched
        // memory may lie at addresses that the table knows.
        let plain: Vec<Range> = ranges.iter().flat_map(|range| without(*range, &mappings)).collect();
        work.client.watch(&plain)?;
        *lock(&member.managed) = Managed { ranges, generation: Some(generation) };
        Ok(has_all)
    }

    /// Leaves out what is not known yet where there is no memory for the records: addresses cost a client nothing, and each
    /// chunk of them costs us some. False if it did.
    fn keep_to_room(&self, table: &Table, ranges: &mut Vec<Range>) -> bool {
        let (mut wanted, mut last) = (0, None);
        for range in ranges.iter() {
            let (first, end) = (range.start / CHUNK_LEN, (range.end - 1) / CHUNK_LEN + 1);
            wanted += end - first - u64::from(last == Some(first));
            last = Some(end - 1);
        }
        let more = wanted.saturating_sub(table.chunks().len() as u64);
        let record = CHUNK_RECORD_BYTES as u64;
        if more == 0 || wanted * record <= RECORDS_SMALL || self.config.room.has(|| more * record) {
            return true;
        }
        let mut known: Vec<Range> = Vec::new();
        for range in ranges.iter() {
            let mut at = range.start;
            while at < range.end {
                let end = range.end.min((at / CHUNK_LEN + 1) * CHUNK_LEN);
                match known.last_mut() {
                    _ if table.chunk(at).is_none() => {}
                    Some(last) if last.end == at => last.end = end,
                    _ => known.push(Range { start: at, end }),
                }
                at = end;
            }
        }
        *ranges = known;
        false
    }

    /// The client's pool mappings, checked; `None` if it cannot tell.
    pub(super) fn pool_mappings(&self, work: &mut Work) -> Result<Option<Vec<PoolMapping>>, Gone> {
        let Some(mut mappings) = work.client.pool_mappings()? else { return Ok(None) };
        check_mappings(&mut mappings)?;
        work.mappings = edges(&mappings);
        Ok(Some(mappings))
    }

    /// Compares the ledger with the mappings that are really there: pages that lost theirs are no sharers any more.
    fn reconcile(&self, work: &mut Work) -> Result<Option<Vec<PoolMapping>>, Gone> {
        let Some(mappings) = self.pool_mappings(work)? else { return Ok(None) };
        let mut discarded = 0;
        let mut at = 0;
        for chunk in work.table.chunks_mut() {
            if chunk.counts.shared == 0 && chunk.counts.broken == 0 {
                continue;
            }
            for index in chunk.pages() {
                let addr = chunk.page_addr(index);
                let state = chunk.state(index);
                if !matches!(state, PageState::Shared(_) | PageState::Broken { .. }) {
                    continue;
                }
                while at < mappings.len() && mappings[at].range.end <= addr {
                    at += 1;
                }
                let mapped = mappings.get(at).filter(|mapping| mapping.range.start <= addr);
                let holds = match (state, mapped) {
                    (PageState::Shared(slot), Some(mapping)) => {
                        let shown = mapping.index + ((addr - mapping.range.start) / PAGE) as u32;
                        shown == slot.index() && self.pool.segment_inode(slot.segment()) == Some(mapping.inode)
                    }
                    (_, mapped) => mapped.is_some(),
                };
                if !holds {
                    if let PageState::Shared(slot) = state {
                        self.pool.remove_sharer(slot);
                        discarded += 1;
                    }
                    chunk.set(index, PageState::Unknown);
                }
            }
        }
        self.count(|c| &c.pages_discarded, discarded);
        self.adopt(work, &mappings)?;
        Ok(Some(mappings))
    }

    /// Scans for writes, unless nothing can have changed: the last scan changed nothing, nothing was done since, and
    /// the process had no page fault, without which none of its threads can write to a protected page.
    fn look_unless_idle(&self, work: &mut Work) -> Result<(), Gone> {
        // Counted before the scan: a write during it is found by the next one.
        let counted = work.table.page_count() >= self.config.idle_pages_min;
        let faults = if counted { work.client.faults() } else { None };
        if let Some(idle) = work.idle.as_mut().filter(|idle| idle.left > 0 && faults == Some(idle.faults)) {
            idle.left -= 1;
            self.count(|c| &c.scans_skipped, 1);
            return Ok(());
        }
        let changed = self.look(work)?;
        work.idle = faults.filter(|_| !changed).map(|faults| Idle { faults, left: SKIPPED_LOOKS_MAX });
        Ok(())
    }

    /// Notes what was written since the last look: one cheap pass over everything, and a close look where it says so.
    /// Returns whether that changed anything.
    fn look(&self, work: &mut Work) -> Result<bool, Gone> {
        let mut ranges: Vec<Range> = Vec::new();
        for part in work.table.chunks().iter().flat_map(Chunk::parts) {
            ranges::append(&mut ranges, part);
        }
        let mut touched = Vec::new();
        for range in ranges {
            let before = touched.len();
            work.client.touched(range, &mut touched)?;
            touched[before..].iter_mut().for_each(|part| *part = clip(*part, range));
        }
        if !work.foreign.is_empty() {
            touched = touched.iter().flat_map(|range| without(*range, &work.foreign)).collect();
        }
        let suspects = suspects(work, &touched);
        let mut changed = false;
        for (range, huge) in suspects.plain {
            changed |= self.look_at(work, range, huge)?;
        }
        Ok(self.look_for_breaks(work, &suspects.shared)? || changed)
    }

    /// Notes the pages of `range` that were written since the last look. Returns whether that changed what we know.
    pub(super) fn look_at(&self, work: &mut Work, range: Range, huge: bool) -> Result<bool, Gone> {
        let mut written = Vec::new();
        work.client.written(range, huge, &mut written)?;
        let mut changed = false;
        for report in written {
            changed |= self.note_written(work, &Written { range: clip(report.range, range), ..report });
        }
        Ok(changed)
    }

    fn note_written(&self, work: &mut Work, report: &Written) -> bool {
        self.mark_index_dirty();
        let mut changed = false;
        let mut addr = report.range.start;
        while addr < report.range.end {
            let chunk_end = addr / CHUNK_LEN * CHUNK_LEN + CHUNK_LEN;
            let end = report.range.end.min(chunk_end);
            let Some((chunk, first)) = work.table.find_mut(addr) else {
                addr = end;
                continue;
            };
            if report.huge && chunk.huge != Huge::Split {
                if chunk.huge == Huge::No {
                    chunk.huge = Huge::Wait(HUGE_FIRST_PROBE, 1);
                    changed = true;
                }
                addr = end;
                continue;
            }
            if !report.huge && matches!(chunk.huge, Huge::Wait(..)) {
                // The kernel or the program split it.
                chunk.huge = Huge::No;
                chunk.indexed.clear();
                changed = true;
            }
            let last = (first + ((end - addr) / PAGE) as usize).min(CHUNK_PAGES);
            for index in (first..last).filter(|index| chunk.manages(chunk.page_addr(*index))).collect::<Vec<_>>() {
                let state = chunk.state(index);
                if let PageState::Shared(slot) = state {
                    // Watched memory lies there again: the program replaced the mapping.
                    self.pool.remove_sharer(slot);
                    self.count(|c| &c.pages_discarded, 1);
                }
                let next = match state {
                    // Merged, and shown as the kernel shows zeros.
                    PageState::Zero if report.zero => state,
                    _ if report.zero || report.swapped => PageState::Unknown,
                    _ => on_written(state),
                };
                changed |= next != state;
                chunk.set(index, next);
            }
            addr = end;
        }
        changed
    }

    fn look_for_breaks(&self, work: &mut Work, ranges: &[Range]) -> Result<bool, Gone> {
        let mut broken = Vec::new();
        for range in ranges {
            let before = broken.len();
            work.client.broken(*range, &mut broken)?;
            broken[before..].iter_mut().for_each(|part| *part = clip(*part, *range));
        }
        let mut breaks = 0;
        for range in broken {
            for addr in (range.start..range.end).step_by(PAGE_SIZE) {
                if let PageState::Shared(slot) = work.table.state(addr) {
                    self.pool.remove_sharer(slot);
                    work.table.set(addr, PageState::Broken { age: 0, backoff: 2 });
                    breaks += 1;
                }
            }
        }
        if breaks > 0 {
            self.mark_index_dirty();
        }
        work.cow_breaks += breaks;
        self.count(|c| &c.cow_breaks, breaks);
        Ok(breaks > 0)
    }

    /// Huge pages are left whole unless enough of their pages are zero or have a twin. Probes some of those that are due;
    /// false if there was nothing to do.
    pub(super) fn probe_huge(&self, work: &mut Work) -> Result<bool, Gone> {
        let left = work.probes.len().saturating_sub(HUGE_PROBES);
        let due = work.probes.split_off(left);
        for addr in &due {
            let Ok(at) = work.table.chunks().binary_search_by_key(addr, |chunk| chunk.addr) else { continue };
            let Huge::Wait(0, backoff) = work.table.chunks()[at].huge else { continue };
            let pays = self.probe(work, at)?;
            let next = (backoff + 1).min(HUGE_BACKOFF_MAX);
            // One that pays is split by the next look.
            work.idle = work.idle.filter(|_| !pays);
            work.table.chunks_mut()[at].huge = if pays { Huge::Split } else { Huge::Wait(1 << backoff, next) };
        }
        Ok(!due.is_empty())
    }

    fn probe(&self, work: &mut Work, at: usize) -> Result<bool, Gone> {
        let chunk = &work.table.chunks()[at];
        let parts: Vec<Range> = chunk.parts().collect();
        let pages = chunk.page_count() as usize;
        let mut readable = vec![false; pages];
        let mut pairs = Vec::with_capacity(pages);
        let mut zero = 0;
        let (client, table) = (&mut work.client, &work.table);
        self.with_buffer(pages, |buffer| {
            client.fetch(&parts, buffer, &mut readable)?;
            let chunk = &table.chunks()[at];
            chunk.indexed.clear();
            for ((index, page), _) in chunk.pages().zip(&*buffer).zip(&readable).filter(|(_, readable)| **readable) {
                if is_zero(page) {
                    zero += 1;
                } else {
                    chunk.indexed.set(index, true);
                    let entry = IndexEntry::Candidate { chunk: chunk.id, page: index as u32 };
                    pairs.push((self.key.fingerprint(page), entry.value()));
                }
            }
            Ok(())
        })?;
        self.count(|c| &c.pages_fingerprinted, pages as u64);
        let mut existing = vec![None; pairs.len()];
        let _ = self.index.get_or_insert_many(&pairs, &mut existing);
        let twins =
            existing.iter().zip(&pairs).filter(|(found, pair)| found.is_some_and(|value| value != pair.1)).count();
        Ok((zero + twins) * HUGE_PAYS_ONE_IN >= pages)
    }

    /// Broken pages become plain memory again, and may merge again: the longest runs first, as far as the budget of mappings
    /// reaches. A page that is healed alone in a run of slots costs two mappings, as one that is merged alone does.
    fn heal_old(&self, work: &mut Work) -> Result<(), Gone> {
        if work.period < work.heal_from {
            return Ok(());
        }
        let ripe = |state: PageState| matches!(state, PageState::Broken { age, .. } if age >= self.config.heal_periods);
        let mut runs: Vec<Range> = Vec::new();
        for chunk in work.table.chunks().iter().filter(|chunk| chunk.counts.broken > 0) {
            for index in chunk.pages().filter(|index| ripe(chunk.state(*index))) {
                ranges::append(&mut runs, Range::pages_from(chunk.page_addr(index), 1));
            }
        }
        if runs.is_empty() {
            return Ok(());
        }
        let Some(mappings) = self.pool_mappings(work)? else { return Ok(()) };
        // Where there is no pool mapping (any more), there is nothing to be healed.
        let elsewhere = runs.iter().flat_map(|run| without(*run, &mappings));
        for addr in elsewhere.flat_map(|range| (range.start..range.end).step_by(PAGE_SIZE)) {
            work.table.set(addr, PageState::Unknown);
        }
        let mut parts: Vec<(Range, i64)> = runs.iter().flat_map(|run| parts_of(*run, &mappings)).collect();
        parts.sort_by_key(|(part, _)| std::cmp::Reverse(part.pages()));
        let before = parts.len();
        parts.retain(|(part, added)| self.affords(part.pages(), *added, &mut work.mappings));
        if parts.len() < before {
            work.heal_from = work.period + HEAL_REST_PERIODS;
        }
        parts.sort_unstable_by_key(|(part, _)| part.start);
        let pieces: Vec<Range> = parts.iter().flat_map(|(part, _)| within(*part, &mappings)).collect();
        self.heal(work, &pieces).map(drop)
    }

    /// Heals pieces, each inside one pool mapping, and settles the ledger; returns the pages that are plain memory now.
    pub(super) fn heal(&self, work: &mut Work, pieces: &[Range]) -> Result<u64, Gone> {
        let mut healed = 0;
        for batch in pieces.chunks(256) {
            let mut done = Vec::new();
            work.idle = None;
            work.client.heal(batch, &mut done)?;
            for (range, done) in batch.iter().zip(done) {
                for addr in (range.start..range.end).step_by(PAGE_SIZE) {
                    let state = work.table.state(addr);
                    let backoff = if let PageState::Broken { backoff, .. } = state { backoff } else { 1 };
                    if done {
                        if let PageState::Shared(slot) = state {
                            self.pool.remove_sharer(slot);
                        }
                        healed += 1;
                        work.table.set(addr, PageState::Armed { silent: 0, backoff, fresh: false });
                        if work.table.find(addr).is_none() {
                            ranges::append(&mut work.healed_unknown, Range::pages_from(addr, 1));
                        }
                    } else if let PageState::Broken { .. } = state {
                        // Something may be reading into it: try again as late as it took to get here.
                        work.table.set(addr, PageState::Broken { age: 0, backoff });
                    }
                }
            }
        }
        if healed > 0 && !work.foreign.is_empty() {
            // What was healed there is plain memory from now on, to be watched.
            work.generation = None;
        }
        self.count(|c| &c.pages_restored, healed);
        Ok(healed)
    }

    pub(super) fn unmerge_all(&self, work: &mut Work) -> Result<Unmerged, Gone> {
        self.mark_index_dirty();
        work.client.take_back_leftover()?;
        work.left_out_since = None;
        work.take_deferred();
        // Planned merges are dropped with the notices: their pages are looked up anew when work goes on.
        for chunk in work.table.chunks_mut().iter_mut().filter(|chunk| chunk.counts.candidate > 0) {
            for index in chunk.pages() {
                if let PageState::Candidate { backoff, .. } = chunk.state(index) {
                    chunk.set(index, PageState::Candidate { indexed: false, backoff });
                }
            }
        }
        let mut pages = 0;
        if let Some(mappings) = self.pool_mappings(work)? {
            let pieces: Vec<Range> = mappings.iter().flat_map(|mapping| within(mapping.range, &mappings)).collect();
            pages = self.heal(work, &pieces)?;
        }
        let left = match self.reconcile(work)? {
            Some(mappings) => mappings.iter().map(|mapping| mapping.range.pages()).sum(),
            // It cannot list them now.
            None => {
                let counts = work.table.counts();
                u64::from(counts.shared) + u64::from(counts.broken)
            }
        };
        Ok(Unmerged { pages, left })
    }

    /// Drops index entries of candidates that are none any more, a part in each period.
    fn sweep_index(&self) {
        let Ok(mut sweep) = self.sweep.try_lock() else { return };
        let index_changes = self.index_changes.load(Ordering::Relaxed);
        if index_changes != sweep.seen {
            sweep.seen = index_changes;
            // One part more than a round: the change may lie in the middle of a part.
            sweep.left = SWEEP_PERIODS + 1;
        }
        if sweep.left == 0 {
            return;
        }
        sweep.left -= 1;
        let buckets = (self.index.memory_bytes() / 64) as usize / SWEEP_PERIODS + 64;
        let chunks = super::read(&self.chunks);
        self.index.retain(&mut sweep.cursor, buckets, |value| match IndexEntry::from_value(value) {
            IndexEntry::Slot(slot) => self.pool.published_from(slot) > 0,
            IndexEntry::Candidate { chunk, page } => chunks.is_indexed(chunk, page),
            IndexEntry::Claimed => true,
        });
    }

    /// Releases pool segments that have no sharer any more.
    pub(super) fn release_segments(&self) {
        for segment in self.pool.unshared() {
            let key = &self.key;
            let index = &self.index;
            let mut elsewhere = Vec::new();
            let released = self.pool.release(segment, |slot, page| {
                let fingerprint = key.fingerprint(page);
                index.remove(fingerprint, IndexEntry::Slot(slot).value());
                if self.has_unlisted(fingerprint) {
                    elsewhere.push(fingerprint);
                }
            });
            if released {
                write(&self.repeats).retain(|first| first.segment() != segment);
                self.notify_owners(&self.list_instead(segment, &elsewhere));
            }
        }
    }

    pub(super) fn notices(&self, member: &Member) -> Vec<(u64, Option<pagefold_pool::Slot>)> {
        std::mem::take(&mut *lock(&member.notices))
    }
}

/// Checks what a client says about its managed ranges, and takes as many as we follow.
fn check_regions(ranges: &mut Vec<Range>) -> Result<(), Gone> {
    let mut before = PAGE;
    let mut room = PAGES_MAX;
    for range in ranges.iter_mut() {
        check(*range, before)?;
        before = range.end;
        range.end = range.end.min(range.start + room * PAGE);
        room -= range.pages();
    }
    ranges.retain(|range| !range.is_empty());
    Ok(())
}

/// Checks what a client says about its pool mappings. What lies behind the end of a segment shows nothing.
fn check_mappings(mappings: &mut Vec<PoolMapping>) -> Result<(), Gone> {
    let mut before = PAGE;
    for mapping in mappings.iter_mut() {
        check(mapping.range, before)?;
        before = mapping.range.end;
        let pages = SLOTS_PER_SEGMENT.saturating_sub(mapping.index);
        mapping.range.end = mapping.range.end.min(mapping.range.start + u64::from(pages) * PAGE);
    }
    mappings.retain(|mapping| !mapping.range.is_empty());
    if mappings.len() > MAPPINGS_MAX { Err(Gone) } else { Ok(()) }
}

/// Mappings that there are more for the pool's: one for each edge. Those that touch have one in common.
fn edges(mappings: &[PoolMapping]) -> i64 {
    let touching = mappings.windows(2).filter(|pair| pair[0].range.end == pair[1].range.start).count();
    (mappings.len() * 2 - touching) as i64
}

/// Pages that need a close look.
#[derive(Debug, Default)]
struct Suspects {
    /// Plain memory, and whether its huge pages may be split.
    plain: Vec<(Range, bool)>,
    /// Pages that show slots, as far as we know.
    shared: Vec<Range>,
}

impl Suspects {
    fn add_plain(&mut self, range: Range, huge: bool) {
        match self.plain.last_mut() {
            Some((last, flag)) if last.end == range.start && *flag == huge => last.end = range.end,
            _ => self.plain.push((range, huge)),
        }
    }
}

/// Sorts what may have been written by what it was. Volatile pages are neither looked at nor protected, so that they pay
/// no fault meanwhile; broken ones wait to be healed.
fn suspects(work: &Work, touched: &[Range]) -> Suspects {
    let mut suspects = Suspects::default();
    for range in touched {
        let mut at = range.start;
        while at < range.end {
            let Some(chunk) = work.table.chunk(at) else {
                at = (at / CHUNK_LEN + 1) * CHUNK_LEN;
                continue;
            };
            let end = range.end.min(chunk.addr + CHUNK_LEN);
            let split = chunk.huge == Huge::Split;
            let counts = chunk.counts;
            if counts.shared + counts.broken + counts.sleeping == 0 {
                for part in chunk.parts() {
                    let part = Range { start: part.start.max(at), end: part.end.min(end) };
                    if part.start < part.end {
                        suspects.add_plain(part, split);
                    }
                }
            } else {
                let pages = ((at - chunk.addr) / PAGE) as usize..((end - chunk.addr) / PAGE) as usize;
                for index in pages.filter(|index| chunk.manages(chunk.page_addr(*index))) {
                    let page = Range::pages_from(chunk.page_addr(index), 1);
                    match chunk.state(index) {
                        PageState::Shared(_) => ranges::append(&mut suspects.shared, page),
                        PageState::Sleeping { .. } | PageState::Broken { .. } => {}
                        _ => suspects.add_plain(page, split),
                    }
                }
            }
            at = end;
        }
    }
    suspects
}

/// A range of user memory that begins at `before` or later.
fn check(range: Range, before: u64) -> Result<(), Gone> {
    let aligned = range.start.is_multiple_of(PAGE) && range.end.is_multiple_of(PAGE);
    if aligned && before <= range.start && range.start < range.end && range.end <= ADDRESS_MAX {
        Ok(())
    } else {
        Err(Gone)
    }
}

/// The whole pages of `range` that lie in `limits`.
pub(super) fn clip(range: Range, limits: Range) -> Range {
    let start = range.start.clamp(limits.start, limits.end).next_multiple_of(PAGE);
    let end = range.end.min(limits.end) / PAGE * PAGE;
    Range { start, end: end.max(start) }
}

/// Ages all pages that need a look; returns whether there were any.
fn end_period(work: &mut Work) -> bool {
    let mut aged = false;
    for chunk in work.table.chunks_mut().iter_mut().filter(|chunk| chunk.counts.busy > 0) {
        for index in chunk.pages() {
            let state = chunk.state(index);
            let next = on_period(state);
            if next != state {
                chunk.set(index, next);
                aged = true;
            }
        }
    }
    aged
}

/// Takes up the pages that were healed before the table had them. Those that it does not have now are none of ours if it
/// `has_all`.
fn note_healed_unknown(work: &mut Work, has_all: bool) {
    for range in std::mem::take(&mut work.healed_unknown) {
        for addr in (range.start..range.end).step_by(PAGE_SIZE) {
            match work.table.find(addr) {
                Some((chunk, index)) if chunk.state(index) == PageState::Unknown => {
                    work.table.set(addr, PageState::Armed { silent: 0, backoff: 1, fresh: false });
                }
                None if !has_all => ranges::append(&mut work.healed_unknown, Range::pages_from(addr, 1)),
                _ => {}
            }
        }
    }
}

/// Another period of waiting is over for huge pages; notes which are due, the first last.
fn note_due_probes(work: &mut Work) {
    work.probes.clear();
    for chunk in work.table.chunks_mut().iter_mut().rev() {
        match chunk.huge {
            Huge::Wait(0, _) => work.probes.push(chunk.addr),
            Huge::Wait(periods, backoff) => chunk.huge = Huge::Wait(periods - 1, backoff),
            Huge::No | Huge::Split => {}
        }
    }
}

/// The parts of `range` that lie outside all `mappings`.
fn without(range: Range, mappings: &[PoolMapping]) -> Vec<Range> {
    ranges::outside(range, parts_of(range, mappings).map(|(part, _)| part))
}

/// The parts of `range` inside single mappings, and the mappings that there are more once a part is none of the pool's.
fn parts_of(range: Range, mappings: &[PoolMapping]) -> impl Iterator<Item = (Range, i64)> + use<'_> {
    let first = mappings.partition_point(|mapping| mapping.range.end <= range.start);
    mappings[first..].iter().take_while(move |mapping| mapping.range.start < range.end).map(move |mapping| {
        let part = range.intersection(&mapping.range);
        let added = i64::from(mapping.range.start < part.start) + i64::from(part.end < mapping.range.end);
        (part, added)
    })
}

/// The parts of `range` inside single mappings, each short enough to be frozen at once.
pub(super) fn within(range: Range, mappings: &[PoolMapping]) -> Vec<Range> {
    let mut parts = Vec::new();
    for (part, _) in parts_of(range, mappings) {
        let mut at = part.start;
        while at < part.end {
            let end = part.end.min(at + FREEZE_PAGES_MAX * PAGE);
            parts.push(Range { start: at, end });
            at = end;
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn pages(ranges: &[Range]) -> BTreeSet<u64> {
        ranges.iter().flat_map(|range| (range.start..range.end).step_by(PAGE_SIZE)).collect()
    }

    #[test]
    fn touching_mappings_have_an_edge_in_common() {
        let at = |page: u64, pages| PoolMapping {
            range: Range::pages_from(page * PAGE, pages),
            inode: 1,
            index: 7 * page as u32,
        };
        assert_eq!(edges(&[]), 0);
        assert_eq!(edges(&[at(16, 2)]), 2);
        assert_eq!(edges(&[at(16, 2), at(18, 1), at(19, 4)]), 4);
        assert_eq!(edges(&[at(16, 2), at(18, 1), at(20, 4)]), 5);
    }

    /// Disjoint, ascending ranges of gaps and lengths in pages.
    fn layout(parts: &[(u64, u64)]) -> Vec<Range> {
        let mut at = 16;
        let place = |(gap, len): &(u64, u64)| {
            let start = at + gap;
            at = start + len;
            Range::pages_from(start * PAGE, *len)
        };
        parts.iter().map(place).collect()
    }

    proptest! {
        #[test]
        fn without_and_within_cut_a_range_in_two_sets(
            parts in proptest::collection::vec((0u64..40, 1u64..600), 0..12),
            start in 0u64..2000,
            len in 1u64..3000,
        ) {
            let ranges = layout(&parts);
            let mappings: Vec<PoolMapping> =
                ranges.iter().map(|range| PoolMapping { range: *range, inode: 1, index: 0 }).collect();
            let range = Range::pages_from(start * PAGE, len);
            let outside = without(range, &mappings);
            let inside = within(range, &mappings);
            let all = pages(&[range]);
            let mapped = pages(&ranges);
            prop_assert_eq!(pages(&outside), all.difference(&mapped).copied().collect::<BTreeSet<u64>>());
            prop_assert_eq!(pages(&inside), all.intersection(&mapped).copied().collect::<BTreeSet<u64>>());
            for piece in inside {
                prop_assert!(!piece.is_empty() && piece.pages() <= FREEZE_PAGES_MAX);
                prop_assert!(ranges.iter().any(|range| range.contains(&piece)), "a piece lies in one mapping");
            }
        }

        #[test]
        fn what_a_client_claims_is_taken_as_it_is_or_not_at_all(
            claims in proptest::collection::vec((any::<u64>(), any::<u64>()), 1..4),
            parts in proptest::collection::vec((0u64..40, 1u64..600), 1..12),
            index in any::<u32>(),
        ) {
            let claimed: Vec<Range> = claims.iter().map(|(start, end)| Range { start: *start, end: *end }).collect();
            let aligned = |range: &Range| Range { start: range.start & !(PAGE - 1), end: range.end & !(PAGE - 1) };
            for mut regions in [claimed.clone(), claimed.iter().map(aligned).collect()] {
                if check_regions(&mut regions).is_ok() {
                    prop_assert!(regions.iter().all(|range| range.start < range.end && range.end <= ADDRESS_MAX));
                    prop_assert!(regions.windows(2).all(|pair| pair[0].end <= pair[1].start));
                    prop_assert!(regions.iter().map(Range::pages).sum::<u64>() <= PAGES_MAX);
                }
            }
            let honest = layout(&parts);
            let mut regions = honest.clone();
            prop_assert_eq!(check_regions(&mut regions), Ok(()));
            prop_assert_eq!(&regions, &honest);
            let mut mappings: Vec<PoolMapping> =
                honest.iter().map(|range| PoolMapping { range: *range, inode: 1, index }).collect();
            prop_assert_eq!(check_mappings(&mut mappings), Ok(()));
            for mapping in mappings {
                prop_assert!(u64::from(mapping.index) + mapping.range.pages() <= u64::from(SLOTS_PER_SEGMENT));
            }
        }

        #[test]
        fn a_clipped_report_is_whole_pages_of_what_was_asked(start in any::<u64>(), end in any::<u64>(), at in 0u64..1 << 40, len in 1u64..1 << 20) {
            let limits = Range::pages_from(at * PAGE, len);
            let near = Range { start: start % (1 << 53), end: end % (1 << 53) };
            for report in [Range { start, end }, near, Range { start: u64::MAX - start % PAGE, end: u64::MAX }] {
                let clipped = clip(report, limits);
                prop_assert!(clipped.is_empty() || limits.contains(&clipped) && report.contains(&clipped));
                prop_assert!(clipped.is_empty() || clipped.start.is_multiple_of(PAGE) && clipped.end.is_multiple_of(PAGE));
            }
        }
    }
}
