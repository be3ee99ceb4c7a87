//! The watch stage: one pass over a client per period.

use super::huge_pages::note_due_probes;
use super::index_entry::ChunkRef;
use super::listed_ranges::{check_mappings, check_regions, edges, without};
use super::member::{Member, Work};
use super::{Domain, Managed};
use crate::client::{Gone, PoolMapping};
use crate::page::{PageState, on_period};
use crate::table::{CHUNK_LEN, CHUNK_RECORD_BYTES, Indexed, Table};
use pagefold_os::sync::{lock, write};
use pagefold_os::{PAGE_SIZE, Range, ranges, sched};
use std::sync::Arc;
use std::sync::atomic::Ordering;

const PAGE: u64 = PAGE_SIZE as u64;

/// Bytes of records about the chunks of one client that need no room to be looked for (half a GiB of addresses): no more
/// than what else is kept of it.
const RECORDS_SMALL: u64 = 64 << 10;

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
        let inherits_later = work.not_inherited.end_period();
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
    pub(super) fn reconcile(&self, work: &mut Work) -> Result<Option<Vec<PoolMapping>>, Gone> {
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
