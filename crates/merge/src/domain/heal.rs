//! Pages of the pool become plain memory again.

use super::listed_ranges::{parts_of, within, without};
use super::member::Work;
use super::{Domain, Unmerged};
use crate::client::Gone;
use crate::page::PageState;
use pagefold_os::{PAGE_SIZE, Range, ranges};

/// Periods after which healing is tried again where the budget of mappings did not allow it.
const HEAL_REST_PERIODS: u64 = 16;

impl Domain {
    /// Broken pages become plain memory again, and may merge again: the longest runs first, as far as the budget of mappings
    /// reaches. A page that is healed alone in a run of slots costs two mappings, as one that is merged alone does.
    pub(super) fn heal_old(&self, work: &mut Work) -> Result<(), Gone> {
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
}
