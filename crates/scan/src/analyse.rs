//! Twins and runs, found in the records.
//!
//! 1. Each record learns its leader, the first record with the same print: one
//!    hash table per part of the print space, parts in parallel, no part's
//!    records in another's table.
//! 2. Leaders with twins are numbered in the order of their addresses. That is
//!    the order in which a merge gives out slots, so a run is a stretch of
//!    neighbouring pages with numbers that count up by one.
//! 3. Each source's longest runs are taken, up to its budget of mappings; what
//!    the taken pages save is summed up per content.

use crate::config::Config;
use crate::gather::{Found, Gathered};
use crate::record::{PageKind, PageRecord};
use crate::report::{Cost, Histogram, Ksm, Note, Report, SourceReport, Totals};
use crate::shifted;
use crate::{Identity, Lost};
use pagefold_os::PAGE_SIZE;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

/// Set in a leader's own entry if others follow it.
const HAS_TWINS: u32 = 1 << 31;
/// The entry of a page without twins.
const ALONE: u32 = u32::MAX;
/// Pages that can be analysed at once (8 TiB); beyond, sample.
const PAGES_MAX: usize = (1 << 31) - 1;
const PAGE: u64 = PAGE_SIZE as u64;

/// What is known about a content that occurs more than once.
#[derive(Clone, Copy, Default)]
struct Content {
    /// Copies that are ours to merge; once [`Twins::give_slots`] was called, those of them that are taken.
    own: u32,
    /// The last source seen, plus one, and [`SEVERAL`]; once slots are given, the slot or [`ALONE`].
    mark: u32,
    /// Copies that only the kernel could merge, [`SHARED`] and [`POOL`].
    others: u32,
}

/// In [`Content::others`]: some copy is shared by fork or KSM.
const SHARED: u32 = 1 << 31;
/// In [`Content::others`]: some copy is in the pool.
const POOL: u32 = 1 << 30;
/// In [`Content::mark`]: more than one source has it.
const SEVERAL: u32 = 1 << 31;

impl Content {
    const fn pooled(&self) -> bool {
        self.others & POOL != 0
    }

    /// True if a merge shares its own copies.
    const fn merges(&self) -> bool {
        self.own >= 2 || (self.own == 1 && self.pooled())
    }

    /// Pages that merging its own copies gives back.
    const fn saved(&self) -> u64 {
        if self.pooled() { self.own as u64 } else { self.own.saturating_sub(1) as u64 }
    }
}

pub(crate) fn analyse(gathered: Gathered, config: &Config) -> Report {
    let Gathered { mut sources, lost, mut records } = gathered;
    let mut report = Report { sample_one_in: config.one_in.max(1), ..Report::default() };
    report.notes.extend(lost.into_iter().map(|(identity, lost)| note(identity, &lost)));
    if records.len() > PAGES_MAX {
        sources.retain(|found| found.records.end <= PAGES_MAX);
        records.truncate(sources.last().map_or(0, |found| found.records.end));
        let what = "more than 2^31 pages: the last sources are left out; use --sample".to_owned();
        report.notes.push(Note { pid: None, name: "scan".into(), what, failure: true });
    }
    let one_in = u64::from(report.sample_one_in);
    let mut twins = Twins::find(records, config.workers.max(1));
    let (inside, across) = twins.count(&sources);
    let anchors = sources.iter_mut().map(|found| (std::mem::take(&mut found.anchors), found.records.start)).collect();
    let shifted = shifted::count(anchors, |index| twins.merging(index).is_some());
    for ((found, inside), shifted) in sources.iter().zip(inside).zip(shifted) {
        let mut source = twins.describe(found, inside, one_in);
        source.totals.duplicate_shifted = shifted;
        report.sources.push(source);
    }
    report.totals = total(&report.sources, across * one_in);
    for source in &report.sources {
        for (&reason, &pages) in &source.not_merged {
            *report.not_merged.entry(reason).or_default() += pages;
        }
    }
    report.ksm = twins.ksm(&sources, &report.totals, one_in);
    report.cost.sample_error_bytes = twins.sample_error_bytes(one_in);
    twins.give_slots();
    twins.take_runs(&sources, config, &mut report);
    twins.bill(&mut report);
    report
}

fn note(identity: Identity, lost: &Lost) -> Note {
    let failure = *lost != Lost::Vanished;
    Note { pid: identity.pid, name: identity.name, what: lost.to_string(), failure }
}

/// Sums over the sources; `across` is what no single source can know.
fn total(sources: &[SourceReport], across: u64) -> Totals {
    let mut sum = Totals { duplicate_across: across, ..Totals::default() };
    for SourceReport { totals, .. } in sources {
        sum.examined += totals.examined;
        sum.zero += totals.zero;
        sum.zero_mapped += totals.zero_mapped;
        sum.unique += totals.unique;
        sum.duplicate_inside += totals.duplicate_inside;
        sum.duplicate_huge += totals.duplicate_huge;
        sum.duplicate_shifted += totals.duplicate_shifted;
        sum.shared_already += totals.shared_already;
        sum.shared_by_pagefold += totals.shared_by_pagefold;
        sum.kernel_only += totals.kernel_only;
        sum.swapped += totals.swapped;
        sum.pinned += totals.pinned;
    }
    sum
}

struct Twins {
    records: Vec<PageRecord>,
    /// Per record the number of its content, or [`ALONE`].
    content_of: Vec<u32>,
    contents: Vec<Content>,
}

impl Twins {
    fn find(records: Vec<PageRecord>, workers: usize) -> Twins {
        let (content_of, count) = number_contents(leaders(&records, workers));
        Twins { records, content_of, contents: vec![Content::default(); count] }
    }

    /// The content of record `index`, if it occurs more than once and a merge would share it.
    fn merging(&self, index: usize) -> Option<&Content> {
        let content = self.contents.get(self.content_of[index] as usize)?;
        (self.records[index].kind() == PageKind::Own && content.merges()).then_some(content)
    }

    /// Counts the copies of each content. Returns per source its copies of pages of its own, and in all the copies
    /// of pages of other sources; first copies are not counted. The pool counts as another source.
    fn count(&mut self, sources: &[Found]) -> (Vec<u64>, u64) {
        let mut inside = vec![0; sources.len()];
        let mut across = 0;
        for ((found, inside), here) in sources.iter().zip(&mut inside).zip(1..) {
            for index in found.records.clone() {
                let Some(content) = self.contents.get_mut(self.content_of[index] as usize) else { continue };
                match self.records[index].kind() {
                    PageKind::KernelOnly => content.others += 1,
                    PageKind::Shared => content.others |= SHARED,
                    PageKind::Pool => content.others |= POOL,
                    PageKind::Own => {
                        content.own += 1;
                        let last = content.mark & !SEVERAL;
                        if last == here {
                            *inside += 1;
                        } else {
                            content.mark = if last == 0 { here } else { here | SEVERAL };
                            across += u64::from(last != 0);
                        }
                    }
                }
            }
        }
        across += self.contents.iter().filter(|content| content.own > 0 && content.pooled()).count() as u64;
        (inside, across)
    }

    fn describe(&self, found: &Found, inside: u64, one_in: u64) -> SourceReport {
        let mut totals = Totals { duplicate_inside: inside, ..Totals::default() };
        let mut saved_pages = 0.0;
        for index in found.records.clone() {
            let record = self.records[index];
            match (record.kind(), self.merging(index)) {
                (PageKind::KernelOnly, _) => totals.kernel_only += 1,
                (PageKind::Shared, _) => totals.shared_already += 1,
                (PageKind::Pool, _) => {}
                (PageKind::Own, None) => totals.unique += 1,
                (PageKind::Own, Some(content)) => {
                    saved_pages += content.saved() as f64 / f64::from(content.own);
                    totals.duplicate_huge += u64::from(record.huge());
                    totals.duplicate_across += u64::from(content.mark & SEVERAL != 0 || content.pooled());
                }
            }
        }
        let counts = &found.counts;
        SourceReport {
            pid: found.identity.pid,
            name: found.identity.name.clone(),
            domain: found.identity.domain,
            totals: Totals {
                examined: counts.examined,
                zero: counts.zero,
                zero_mapped: counts.zero_mapped,
                unique: totals.unique * one_in,
                duplicate_inside: totals.duplicate_inside * one_in,
                duplicate_across: totals.duplicate_across * one_in,
                duplicate_huge: totals.duplicate_huge * one_in,
                duplicate_shifted: 0,
                shared_already: totals.shared_already * one_in + counts.zero_shared,
                shared_by_pagefold: found.merged,
                kernel_only: totals.kernel_only * one_in + counts.zero_kernel_only,
                swapped: found.swapped,
                pinned: found.pinned,
            },
            deduplicated_bytes: bytes(counts.zero)
                .saturating_add((saved_pages * (one_in * PAGE) as f64).round() as u64),
            not_merged: counts.left_out.clone(),
        }
    }

    fn ksm(&self, sources: &[Found], totals: &Totals, one_in: u64) -> Ksm {
        let (mut saved, mut nodes) = (0, 0);
        for content in &self.contents {
            let copies =
                u64::from(content.own) + u64::from(content.others & (POOL - 1)) + u64::from(content.others >> 31);
            if copies >= 2 {
                let kept = copies.div_ceil(Ksm::SHARERS_MAX);
                nodes += kept;
                saved += copies - kept;
            }
        }
        let zero: u64 = sources.iter().map(|found| found.counts.zero + found.counts.zero_kernel_only).sum();
        let examined = totals.examined;
        let deduplicated_bytes = bytes(saved * one_in + zero);
        let metadata_bytes = (examined + nodes * one_in) * Ksm::ITEM_BYTES;
        Ksm { examined, deduplicated_bytes, metadata_bytes, saved_bytes: net(deduplicated_bytes, metadata_bytes) }
    }

    /// Contents are in the sample or not, all copies together: the variance is the sum of the squares of what
    /// each content saves, times n (n - 1).
    fn sample_error_bytes(&self, one_in: u64) -> u64 {
        let squares: f64 = self.contents.iter().filter(|c| c.merges()).map(|c| (c.saved() as f64).powi(2)).sum();
        (1.96 * (squares * (one_in * (one_in - 1)) as f64).sqrt() * PAGE as f64).round() as u64
    }

    /// Gives each content that merges its slot, in the order of addresses. From here on `own` counts taken copies.
    fn give_slots(&mut self) {
        let mut slot = 0;
        for content in &mut self.contents {
            content.mark = if content.merges() { slot } else { ALONE };
            slot += u32::from(content.merges());
            content.own = 0;
        }
    }

    /// The slot of record `index`, if it merges.
    fn slot(&self, index: usize) -> Option<u32> {
        let content = self.contents.get(self.content_of[index] as usize)?;
        (self.records[index].kind() == PageKind::Own && content.mark != ALONE).then_some(content.mark)
    }

    /// The first run among `records`.
    fn next_run(&self, mut records: Range<usize>) -> Option<Range<usize>> {
        let (start, mut slot) = records.find_map(|index| Some((index, self.slot(index)?)))?;
        let goes_on = |index: &usize| {
            slot += 1;
            self.records[*index].follows() && self.slot(*index) == Some(slot)
        };
        let more = records.take_while(goes_on).count();
        Some(start..start + 1 + more)
    }

    /// Counts runs, and takes each source's longest up to its budget.
    fn take_runs(&mut self, sources: &[Found], config: &Config, report: &mut Report) {
        let shortest = |taken: u64| (config.shortest_run)(taken, config.map_budget);
        let one_in = u64::from(report.sample_one_in);
        let mut buckets = Buckets::default();
        for found in sources {
            let mut lengths = Vec::new();
            let mut left = found.records.clone();
            while let Some(run) = self.next_run(left.clone()) {
                left.start = run.end;
                lengths.push(run.len() as u32);
            }
            let pages: u64 = lengths.iter().map(|&length| u64::from(length)).sum();
            report.runs.pages += pages * one_in;
            let (runs, taken_runs, over) = if one_in == 1 {
                lengths.iter().for_each(|&length| buckets.add(u64::from(length)));
                let (taken, over) = self.take_longest(found, &mut lengths, shortest);
                (lengths.len() as u64, taken, over)
            } else {
                let runs = estimate_runs(pages, pages - lengths.len() as u64, one_in);
                self.take_all(found);
                // How long they are is not known in a sample: as long as the mean.
                let mean = (pages * one_in).checked_div(runs).unwrap_or(0);
                let taken = first(runs, |taken| shortest(taken) > mean.max(1));
                (runs, taken, (pages * one_in * (runs - taken)).checked_div(runs).unwrap_or(0))
            };
            report.runs.count += runs;
            report.cost.mappings += taken_runs;
            report.cost.over_budget_pages += over;
        }
        report.runs.mean =
            if report.runs.count == 0 { 0.0 } else { report.runs.pages as f64 / report.runs.count as f64 };
        report.runs.histogram = buckets.histogram();
    }

    /// Takes the longest of the runs with these `lengths`, as long as they are worth it. Returns how many were taken, and
    /// how many pages were not.
    fn take_longest(&mut self, found: &Found, lengths: &mut [u32], shortest: impl Fn(u64) -> u64) -> (u64, u64) {
        // Runs longer than the limit are taken, and of those as long as it the first `at_limit`.
        let (mut limit, mut at_limit) = (0, 0);
        let count = lengths.len() as u64;
        // Where all are worth it their order is of no matter.
        if count > 0 && shortest(count - 1) > 1 {
            lengths.sort_unstable_by(|a, b| b.cmp(a));
        }
        let taken = first(count, |taken| shortest(taken) > u64::from(lengths[taken as usize]));
        if let Some(&length) = lengths.get(taken as usize) {
            limit = length;
            at_limit = lengths[..taken as usize].iter().filter(|&&length| length == limit).count();
        }
        let mut over = 0;
        let mut left = found.records.clone();
        while let Some(run) = self.next_run(left.clone()) {
            left.start = run.end;
            let length = run.len() as u32;
            if length > limit || (length == limit && at_limit > 0) {
                at_limit -= usize::from(length == limit);
                for index in run {
                    self.contents[self.content_of[index] as usize].own += 1;
                }
            } else {
                over += u64::from(length);
            }
        }
        (taken, over)
    }

    fn take_all(&mut self, found: &Found) {
        for index in found.records.clone() {
            if self.slot(index).is_some() {
                self.contents[self.content_of[index] as usize].own += 1;
            }
        }
    }

    /// What the taken copies save, and what they cost.
    fn bill(&self, report: &mut Report) {
        let one_in = u64::from(report.sample_one_in);
        let mut saved: u64 = self.contents.iter().filter(|c| c.mark != ALONE).map(Content::saved).sum();
        saved *= one_in;
        let (pages, cost) = (report.runs.pages, &mut report.cost);
        if one_in > 1 && pages > 0 {
            // Which runs are beyond the budget is not known in a sample: all give up the same share.
            saved -= (u128::from(saved) * u128::from(cost.over_budget_pages) / u128::from(pages)) as u64;
        }
        cost.duplicate_bytes = bytes(saved);
        cost.zero_bytes = bytes(report.totals.zero);
        cost.mapping_bytes = cost.mappings * Cost::MAPPING_BYTES;
        cost.scanned_bytes = (report.totals.zero + report.totals.unique + pages) * Cost::SCANNED_BYTES;
        cost.shared_bytes = (pages - cost.over_budget_pages) * Cost::SHARED_BYTES;
        let spent = cost.mapping_bytes + cost.scanned_bytes + cost.shared_bytes;
        cost.saved_bytes = net(cost.duplicate_bytes.saturating_add(cost.zero_bytes), spent);
    }
}

/// The first number below `end` for which `holds`, as for all behind it; `end` if there is none.
fn first(end: u64, holds: impl Fn(u64) -> bool) -> u64 {
    let (mut from, mut to) = (0, end);
    while from < to {
        let middle = from + (to - from) / 2;
        if holds(middle) { to = middle } else { from = middle + 1 }
    }
    from
}

/// Bytes of `pages`, as many as can be told: files of holes have exabytes each.
fn bytes(pages: u64) -> u64 {
    pages.saturating_mul(PAGE)
}

fn net(saved: u64, spent: u64) -> i64 {
    (i128::from(saved) - i128::from(spent)).clamp(i64::MIN.into(), i64::MAX.into()) as i64
}

/// Runs in all, from a sample of one content in `one_in` with `pages` pages of which `continuing` continue the
/// page before. Two neighbours are both in the sample with probability one in `one_in` squared.
fn estimate_runs(pages: u64, continuing: u64, one_in: u64) -> u64 {
    let all = pages * one_in;
    // No estimate below one run per 512 pages: a merge takes chunks of that size.
    all.saturating_sub(continuing * one_in * one_in).max(all.div_ceil(512))
}

/// Runs by length, doubling from bucket to bucket up to 512 pages, the most that is merged at once.
#[derive(Default)]
struct Buckets([(u64, u64); 10]);

impl Buckets {
    fn add(&mut self, length: u64) {
        let bucket = &mut self.0[(length.ilog2() as usize).min(9)];
        bucket.0 += 1;
        bucket.1 += length;
    }

    fn histogram(&self) -> Vec<Histogram> {
        if self.0.iter().all(|bucket| bucket.0 == 0) {
            return Vec::new();
        }
        let bucket = |(power, &(runs, pages)): (usize, &(u64, u64))| Histogram {
            from: 1 << power,
            to: (power < 9).then_some((2 << power) - 1),
            runs,
            pages,
        };
        self.0.iter().enumerate().map(bucket).collect()
    }
}

/// For each record the first record of the same print; leaders that others follow carry [`HAS_TWINS`].
fn leaders(records: &[PageRecord], workers: usize) -> Vec<u32> {
    let leaders: Vec<AtomicU32> = (0..records.len() as u32).map(AtomicU32::new).collect();
    if records.len() < 1 << 14 {
        lead_part(records, &leaders, 0, 1);
    } else {
        std::thread::scope(|scope| {
            for part in 0..workers {
                let leaders = &leaders;
                scope.spawn(move || lead_part(records, leaders, part as u64, workers as u64));
            }
        });
    }
    leaders.into_iter().map(AtomicU32::into_inner).collect()
}

/// Spreads a print over all bits: in a sample its high bits are zero, and its lowest always are.
const fn spread(print: u64) -> u64 {
    (print >> 4).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Finds leaders among the records of one of `parts` parts. Entries of other parts are not touched, so that no
/// order between threads matters.
fn lead_part(records: &[PageRecord], leaders: &[AtomicU32], part: u64, parts: u64) {
    let in_part = |record: &PageRecord| ((spread(record.print()) >> 32) * parts) >> 32 == part;
    let count = records.iter().filter(|record| in_part(record)).count();
    // Three quarters full at most: 5.3 bytes per page.
    let mut table = vec![ALONE; count * 4 / 3 + 1];
    for (index, record) in records.iter().enumerate().filter(|(_, record)| in_part(record)) {
        // Other bits than those that chose the part.
        let low = spread(record.print()) << 32;
        let mut place = ((u128::from(low) * table.len() as u128) >> 64) as usize;
        loop {
            let leader = table[place];
            if leader == ALONE {
                table[place] = index as u32;
                break;
            }
            if records[leader as usize].print() == record.print() {
                leaders[leader as usize].fetch_or(HAS_TWINS, Ordering::Relaxed);
                leaders[index].store(leader, Ordering::Relaxed);
                break;
            }
            place = if place + 1 == table.len() { 0 } else { place + 1 };
        }
    }
}

/// Turns leaders into numbers of contents, in the order of the leaders; returns how many there are.
fn number_contents(mut leaders: Vec<u32>) -> (Vec<u32>, usize) {
    let mut count = 0;
    for index in 0..leaders.len() {
        let leader = leaders[index];
        leaders[index] = if leader & HAS_TWINS != 0 {
            count += 1;
            count - 1
        } else if leader as usize == index {
            ALONE
        } else {
            // Leaders come first, so this one has its number.
            leaders[leader as usize]
        };
    }
    (leaders, count as usize)
}
