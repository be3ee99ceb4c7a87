//! Which pages were written since the last look.

use super::Domain;
use super::huge_pages::HUGE_FIRST_PROBE;
use super::listed_ranges::{clip, without};
use super::member::{Idle, Work};
use crate::client::{Gone, Written};
use crate::page::{PageState, on_written};
use crate::table::{CHUNK_LEN, CHUNK_PAGES, Chunk, Huge};
use pagefold_os::{PAGE_SIZE, Range, ranges};

const PAGE: u64 = PAGE_SIZE as u64;

/// Looks that are left out in a row at most: writes by others than the process, which its count of faults does not tell, are
/// seen so much later.
const SKIPPED_LOOKS_MAX: u32 = 15;

impl Domain {
    /// Scans for writes, unless nothing can have changed: the last scan changed nothing, nothing was done since, and
    /// the process had no page fault, without which none of its threads can write to a protected page.
    pub(super) fn look_unless_idle(&self, work: &mut Work) -> Result<(), Gone> {
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
