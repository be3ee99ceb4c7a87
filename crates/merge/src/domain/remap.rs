//! The remap stage, as the domain sees it: runs go out, outcomes come back, the ledger is settled.

use super::Domain;
use super::member::{Member, Work};
use crate::client::{Gone, Outcome, PIECES_MAX, RemapPiece};
use crate::page::{BACKOFF_MAX, PageState};
use crate::plan::{self, PageRun, TargetSlot};
use crate::table::Huge;
use pagefold_os::{PAGE_SIZE, Range, sched};
use pagefold_protocol::message::RefusalReason;

const PAGE: u64 = PAGE_SIZE as u64;

/// Rounds in which the rest of a run is tried again after a page in it failed.
const ROUNDS_MAX: usize = 4;
/// Periods that merging rests when the kernel refused a mapping.
const REST_PERIODS: u64 = 8;
/// Periods after which a page that found no room is tried again.
const PUT_OFF_PERIODS: u32 = 64;
/// Periods after which a refused page is tried again.
const REFUSED_PERIODS: u32 = 16;

impl Domain {
    /// Merges what other clients' steps found about our candidates.
    pub(super) fn take_inbox(&self, member: &Member, work: &mut Work) -> Result<bool, Gone> {
        let mut notices = member.take_notices();
        if notices.is_empty() {
            return Ok(false);
        }
        notices.sort_unstable_by_key(|(addr, _)| *addr);
        notices.dedup_by_key(|(addr, _)| *addr);
        for (addr, _) in &notices {
            if let Some((chunk, _)) = work.table.find_mut(*addr)
                && let Huge::Wait(_, backoff) = chunk.huge
            {
                // Another client shares its content by now: probe it in the next period.
                chunk.huge = Huge::Wait(0, backoff);
            }
        }
        for (addr, _) in notices.iter().filter(|(_, slot)| slot.is_none()) {
            look_up_again(work, Range::pages_from(*addr, 1));
        }
        let candidates =
            notices.iter().filter(|(addr, _)| matches!(work.table.state(*addr), PageState::Candidate { .. }));
        let runs = plan::runs(candidates.filter_map(|(addr, slot)| slot.map(|slot| (*addr, Some(slot)))));
        let (now, later): (Vec<PageRun>, Vec<PageRun>) = runs.into_iter().partition(|run| run.range.pages() >= 16);
        work.defer(later);
        let now = self.within_budget(work, now);
        self.merge(work, &now)?;
        Ok(true)
    }

    /// Merges the short runs, longest first as far as the budget of mappings reaches.
    pub(super) fn merge_deferred(&self, work: &mut Work) -> Result<bool, Gone> {
        if work.deferred.is_empty() {
            return Ok(false);
        }
        let waiting = work.take_deferred();
        // Pieces that came by different ways may be neighbours by now, or name a page twice.
        let mut pairs: Vec<(u64, TargetSlot)> = waiting
            .iter()
            .flat_map(|run| (0..run.range.pages()).map(|page| (run.range.start + page * PAGE, run.target_at(page))))
            .collect();
        pairs.sort_by_key(|(addr, _)| *addr);
        pairs.dedup_by_key(|(addr, _)| *addr);
        pairs.retain(|(addr, _)| matches!(work.table.state(*addr), PageState::Candidate { .. }));
        self.spread(work, &mut pairs);
        let mut runs = plan::runs(pairs);
        runs.sort_by_key(|run| std::cmp::Reverse(run.range.pages()));
        let mut used = work.mappings;
        let mut chosen = Vec::with_capacity(runs.len());
        let mut left = 0;
        for run in runs {
            if !self.fits(work, &run, &mut used) {
                left += 1;
                for addr in (run.range.start..run.range.end).step_by(PAGE_SIZE) {
                    Self::refuse(work, RefusalReason::Limit);
                    put_off(work, addr);
                }
                continue;
            }
            chosen.push(run);
        }
        self.count(|c| &c.over_vma_budget_runs, left);
        if left > 0 {
            work.leave_out();
        }
        chosen.sort_unstable_by_key(|run| run.range.start);
        self.merge(work, &chosen)?;
        Ok(true)
    }

    /// The runs that the budget of mappings allows now; the others wait for the longest-first order.
    pub(super) fn within_budget(&self, work: &mut Work, runs: Vec<PageRun>) -> Vec<PageRun> {
        let mut used = work.mappings;
        let (now, later) = runs.into_iter().partition(|run| self.fits(work, run, &mut used));
        work.defer(later);
        now
    }

    /// True if `run` is worth its mappings when `used` are taken; they are taken then.
    fn fits(&self, work: &Work, run: &PageRun, used: &mut i64) -> bool {
        self.affords(run.range.pages(), plan::mappings_added(&work.table, run), used)
    }

    /// True if a run of `pages` is worth the mappings that it adds when `used` are taken; they are taken then.
    pub(super) fn affords(&self, pages: u64, added: i64, used: &mut i64) -> bool {
        let fits = added <= 0 || pages >= plan::run_pages_min((*used).max(0) as u64, self.config.vma_budget);
        *used += if fits { added } else { 0 };
        fits
    }

    /// Merges runs (ascending) of candidates; returns the pages merged.
    pub(super) fn merge(&self, work: &mut Work, runs: &[PageRun]) -> Result<u64, Gone> {
        let mut merged = 0;
        let mut runs: Vec<PageRun> = runs.iter().flat_map(|run| candidates_of(work, *run)).collect();
        for _ in 0..ROUNDS_MAX {
            if runs.is_empty() || work.is_resting() {
                break;
            }
            let (count, rest) = self.merge_round(work, &runs, false)?;
            merged += count;
            // A look between the pieces may have found some of them written.
            runs = rest.into_iter().flat_map(|run| candidates_of(work, run)).collect();
        }
        // Each round settles one page of each run at least, so this ends.
        runs.iter().for_each(|run| look_up_again(work, run.range));
        Ok(merged)
    }

    /// Merges a predicted run; returns the pages merged from its start. A wrong prediction leaves the pages as they were.
    pub(super) fn merge_predicted(&self, work: &mut Work, run: PageRun) -> Result<u64, Gone> {
        self.merge_round(work, &[run], true)?;
        let pages = (0..run.range.pages())
            .take_while(|page| matches!(work.table.state(run.range.start + page * PAGE), PageState::Shared(_)));
        Ok(pages.count() as u64)
    }

    /// One round of remaps; returns the pages merged and the runs that are left behind failing pages.
    fn merge_round(&self, work: &mut Work, runs: &[PageRun], predicted: bool) -> Result<(u64, Vec<PageRun>), Gone> {
        let began = sched::monotonic_ns();
        let mut pieces = plan::remap_pieces(&work.table, runs);
        // One run, and where it is wrong all behind that is.
        pieces.iter_mut().skip(1).for_each(|piece| piece.follows = predicted);
        debug_assert!(
            pieces.iter().all(|piece| {
                let mut pages = (piece.range.start..piece.range.end).step_by(PAGE_SIZE);
                pages.all(|addr| matches!(work.table.state(addr), PageState::Candidate { .. }))
            }),
            "only candidates are frozen"
        );
        pieces.retain(|piece| {
            let reserved = self.reserve(piece);
            if !reserved && !predicted {
                // The segment was let go between look-up and now.
                look_up_again(work, piece.range);
            }
            reserved
        });
        let mut merged = 0;
        let mut rest = Vec::new();
        let mut outcomes: Vec<Outcome> = Vec::new();
        let mut at = 0;
        while at < pieces.len() {
            // A freeze must not be cut by the limit of a request.
            let mut end = (at + PIECES_MAX).min(pieces.len());
            while end < pieces.len() && end > at + 1 && pieces[end - 1].freeze == pieces[end].freeze {
                end -= 1;
            }
            outcomes.clear();
            if let Err(gone) = self.look_between(work, &pieces[at..end]) {
                pieces[at..].iter().for_each(|piece| self.unreserve(piece, 0));
                return Err(gone);
            }
            work.idle = None;
            let result = work.client.remap(&self.pool, &pieces[at..end], &mut outcomes);
            outcomes.resize(end - at, Outcome { merged: 0, why: RefusalReason::NotAnonymous });
            for (piece, outcome) in pieces[at..end].iter().zip(&outcomes) {
                let outcome =
                    if result.is_ok() { *outcome } else { Outcome { merged: 0, why: RefusalReason::NotAnonymous } };
                merged += self.settle(work, piece, outcome, predicted, &mut rest);
            }
            if let Err(gone) = result {
                pieces[end..].iter().for_each(|piece| self.unreserve(piece, 0));
                return Err(gone);
            }
            at = end;
            if predicted && rest.iter().any(|run| run.range.start > 0) {
                pieces[at..].iter().for_each(|piece| self.unreserve(piece, 0));
                break;
            }
        }
        self.count(|c| &c.remap_ns, sched::monotonic_ns() - began);
        Ok((merged, rest))
    }

    /// Looks for writes to the pages that are frozen only because they lie between pieces: the freeze ends with all of
    /// them protected, and would hide what was written since the last look.
    fn look_between(&self, work: &mut Work, pieces: &[RemapPiece]) -> Result<(), Gone> {
        let mut at = 0;
        while at < pieces.len() {
            let len = pieces[at..].iter().take_while(|piece| piece.freeze == pieces[at].freeze).count();
            let range = Range { start: pieces[at].range.start, end: pieces[at + len - 1].range.end };
            if pieces[at..at + len].iter().map(|piece| piece.range.pages()).sum::<u64>() < range.pages() {
                self.look_at(work, range, false)?;
            }
            at += len;
        }
        Ok(())
    }

    /// Counts the sharers of a piece before it is mapped, so that its segment stays; false if it is gone.
    fn reserve(&self, piece: &RemapPiece) -> bool {
        let Some(slot) = piece.slot else { return true };
        let pages = piece.range.pages() as u32;
        for page in 0..pages {
            if !self.pool.add_sharers(pagefold_pool::Slot::from_number(slot.number() + page), 1) {
                (0..page)
                    .for_each(|page| self.pool.remove_sharer(pagefold_pool::Slot::from_number(slot.number() + page)));
                return false;
            }
        }
        true
    }

    /// Takes back the sharers of a piece from page `from` on.
    fn unreserve(&self, piece: &RemapPiece, from: u32) {
        if let Some(slot) = piece.slot {
            for page in from..piece.range.pages() as u32 {
                self.pool.remove_sharer(pagefold_pool::Slot::from_number(slot.number() + page));
            }
        }
    }

    fn settle(
        &self,
        work: &mut Work,
        piece: &RemapPiece,
        outcome: Outcome,
        predicted: bool,
        rest: &mut Vec<PageRun>,
    ) -> u64 {
        let pages = piece.range.pages() as u32;
        let merged = outcome.merged.min(pages);
        let done = PageRun { range: Range::pages_from(piece.range.start, u64::from(merged)), target: piece.slot };
        if merged > 0 {
            work.mappings += plan::mappings_added(&work.table, &done);
        }
        for page in 0..merged {
            let state = match done.target_at(u64::from(page)) {
                Some(slot) => PageState::Shared(slot),
                None => PageState::Zero,
            };
            work.table.set(piece.range.start + u64::from(page) * PAGE, state);
        }
        match piece.slot {
            Some(_) => self.count(|c| &c.pages_merged, u64::from(merged)),
            None => self.count(|c| &c.pages_zeroed, u64::from(merged)),
        }
        self.count(|c| &c.runs_merged, u64::from(merged > 0));
        if merged == pages {
            return u64::from(merged);
        }
        self.unreserve(piece, merged);
        let failed = piece.range.start + u64::from(merged) * PAGE;
        for addr in (failed..piece.range.end).step_by(PAGE_SIZE) {
            // The look before the freeze found zeros there. What was written since is protected by now, and no look will
            // tell of it.
            if work.table.state(addr) == PageState::Unknown {
                work.table.set(addr, PageState::Armed { silent: 0, backoff: 0, fresh: false });
            }
        }
        let whole = PageRun { range: piece.range, target: piece.slot };
        if outcome.why == RefusalReason::Limit {
            work.rest_until = work.period + REST_PERIODS;
            work.leave_out();
        }
        if predicted {
            // Not a page that changed, but a guess that was wrong; the fingerprint decides.
            self.count(|c| &c.compare_failed, u64::from(rest.is_empty()));
            rest.push(PageRun { range: Range { start: failed, end: piece.range.end }, target: None });
            return u64::from(merged);
        }
        Self::refuse(work, outcome.why);
        let state = match outcome.why {
            RefusalReason::Done | RefusalReason::Changed | RefusalReason::Discarded => {
                self.count(|c| &c.compare_failed, 1);
                let backoff = match work.table.state(failed) {
                    PageState::Candidate { backoff, .. } => backoff,
                    _ => 0,
                };
                // Written, or never equal: with a back-off the next look-up compares.
                let backoff = (backoff + 1).min(BACKOFF_MAX);
                PageState::Armed { silent: 0, backoff, fresh: false }
            }
            RefusalReason::Absent => PageState::Unknown,
            RefusalReason::Pinned | RefusalReason::NotAnonymous | RefusalReason::Limit => {
                PageState::Refused { why: outcome.why, periods: REFUSED_PERIODS }
            }
        };
        work.table.set(failed, state);
        if failed + PAGE < piece.range.end {
            let target = whole.target_at(u64::from(merged) + 1);
            rest.push(PageRun { range: Range { start: failed + PAGE, end: piece.range.end }, target });
        }
        u64::from(merged)
    }
}

/// Leaves the page at `addr` alone for a while: it could not be merged.
pub(super) fn refuse_page(work: &mut Work, addr: u64, why: RefusalReason) {
    Domain::refuse(work, why);
    work.table.set(addr, PageState::Refused { why, periods: REFUSED_PERIODS });
}

/// Leaves the candidate at `addr` alone for long: there is no room for it now.
pub(super) fn put_off(work: &mut Work, addr: u64) {
    if let PageState::Candidate { .. } = work.table.state(addr) {
        work.table.set(addr, PageState::Refused { why: RefusalReason::Limit, periods: PUT_OFF_PERIODS });
    }
}

/// Has the candidates of `range` looked up once more: nothing in the index leads to them any longer.
pub(super) fn look_up_again(work: &mut Work, range: Range) {
    for addr in (range.start..range.end).step_by(PAGE_SIZE) {
        if let PageState::Candidate { backoff, .. } = work.table.state(addr) {
            work.table.set(addr, PageState::Candidate { indexed: false, backoff });
        }
    }
}

/// The parts of `run` that are (still) candidates.
fn candidates_of(work: &Work, run: PageRun) -> Vec<PageRun> {
    let pages = (0..run.range.pages()).map(|page| (run.range.start + page * PAGE, run.target_at(page)));
    plan::runs(pages.filter(|(addr, _)| matches!(work.table.state(*addr), PageState::Candidate { .. })))
}
