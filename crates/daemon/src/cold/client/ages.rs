//! What the evictor knows of a client's pages: their ages, and how its evictions are paced.
//!
//! This is data. The evictor looks at page map and tier and tells it what it found there.
//!
//! **Probation is the first cooling.** A page that was not written for long is stored by LZ4 and leaves the client. A read
//! brings it back, and it must then be silent twice as long before it is evicted again. This way reads are noticed at the
//! price of a fault, as they would be if the page only lay aside, but its memory is free meanwhile.

use crate::cold::evict::batch::Run;
use pagefold_os::{PAGE_SIZE, Range, sched};
use pagefold_protocol::residency_map::{CHUNK_BYTES, CHUNK_PAGES};
use pagefold_tier::policy::{Governor, Pace};
use std::collections::HashMap;
use std::time::Instant;

const PAGE: u64 = PAGE_SIZE as u64;
/// A page that stayed out for less than a fourth of the usual time is in use.
const SOON: f64 = 4.0;
/// Most strikes of a page: each doubles the silence after which it is evicted.
const STRIKES_MAX: u8 = 5;
/// Pages remembered as touched lately: unpark brings them back first.
const TOUCHED_MAX: usize = 1 << 16;
/// Age of a page that the program called cold.
const OLD: u8 = 254;

/// Milliseconds of a moment, the unit of [`now`]: the number of moments wraps after an hour.
const MOMENT_MS: u64 = 64;

/// The present moment.
pub(crate) fn now() -> u16 {
    (sched::quick_monotonic_ns() / 1_000_000 / MOMENT_MS) as u16
}

/// Of each page of a chunk: its age in ticks, how often it came back too early, and the moment when it was evicted last.
struct Chunk {
    age: [u8; CHUNK_PAGES],
    strikes: [u8; CHUNK_PAGES],
    left: [u16; CHUNK_PAGES],
}

impl Chunk {
    fn new() -> Box<Chunk> {
        Box::new(Chunk { age: [0; CHUNK_PAGES], strikes: [0; CHUNK_PAGES], left: [0; CHUNK_PAGES] })
    }
}

/// What the evictor knows of a client.
#[derive(Default)]
pub(crate) struct EvictionState {
    pub(crate) ages: PageAges,
    pub(crate) pacing: Pacing,
}

/// How fast a client's pages are evicted.
#[derive(Default)]
pub(crate) struct Pacing {
    pub(crate) governor: Option<Governor>,
    /// When the governor was asked last.
    pub(crate) stepped: Option<Instant>,
    /// When memory was short last.
    pub(crate) shorted: Option<Instant>,
    /// The client's time lost to faults when the governor was asked last.
    pub(crate) fault_ns: u64,
    /// The governor's last answer.
    pub(crate) pace: Option<Pace>,
}

/// The ages of a client's pages.
#[derive(Default)]
pub(crate) struct PageAges {
    regions: Vec<Range>,
    chunks: HashMap<u64, Box<Chunk>>,
    touched: Vec<u64>,
    /// Address at which the last turn of evictions ended: the hand of a clock over all pages of one age.
    hand: u64,
    /// How long pages that came back lately had been out, in moments, as a running mean.
    usual_absence: f64,
}

/// A page's chunk, and its place there.
fn place_of(addr: u64) -> (u64, usize) {
    (addr / CHUNK_BYTES, (addr % CHUNK_BYTES) as usize / PAGE_SIZE)
}

fn pages_of(range: Range) -> impl Iterator<Item = u64> {
    (range.start..range.end).step_by(PAGE_SIZE)
}

impl PageAges {
    /// The managed ranges.
    pub(crate) fn regions(&self) -> &[Range] {
        &self.regions
    }

    /// Sets the managed ranges. Ages at other addresses are dropped: memory may never be there again.
    pub(crate) fn set_regions(&mut self, regions: Vec<Range>) {
        self.chunks.retain(|chunk, _| {
            let (start, end) = (chunk * CHUNK_BYTES, (chunk + 1) * CHUNK_BYTES);
            let at = regions.partition_point(|region| region.end <= start);
            regions.get(at).is_some_and(|region| region.start < end)
        });
        self.regions = regions;
    }

    /// Adds a tick to the age of every page.
    pub(crate) fn grow_older(&mut self) {
        for chunk in self.chunks.values_mut() {
            for age in &mut chunk.age {
                *age = age.saturating_add(1);
            }
        }
    }

    /// The pages of `range` were written since the last look.
    pub(crate) fn note_written(&mut self, range: Range) {
        for addr in pages_of(range) {
            let (chunk, at) = place_of(addr);
            self.chunks.entry(chunk).or_insert_with(Chunk::new).age[at] = 0;
        }
    }

    /// The pages of `range`, which are resident, are evicted in the next turn unless they are written before. The caller
    /// must not name absent pages: a program may call all of its addresses cold, and each chunk named here takes memory.
    pub(crate) fn make_old(&mut self, range: Range) {
        for addr in pages_of(range) {
            let (chunk, at) = place_of(addr);
            let chunk = self.chunks.entry(chunk).or_insert_with(Chunk::new);
            chunk.age[at] = OLD;
            chunk.strikes[at] = 0;
        }
    }

    /// Records that `pages` came back at the moment `now`.
    ///
    /// Each is younger than it looks, and gets a strike. While memory is `short` everything comes back some time: then only
    /// a page that came back much sooner than most gets a strike, and the others lose half of theirs. Page tables do not
    /// tell of reads, so this is all that is known of pages that are read again and again.
    pub(crate) fn record_refaults(&mut self, pages: Vec<u64>, now: u16, short: bool) {
        let (mut sum, mut count) = (0.0, 0u32);
        for page in pages {
            let (chunk, at) = place_of(page * PAGE);
            if let Some(chunk) = self.chunks.get_mut(&chunk) {
                let absence = f64::from(now.wrapping_sub(chunk.left[at]));
                (sum, count) = (sum + absence, count + 1);
                chunk.age[at] = 0;
                chunk.strikes[at] = if short && absence * SOON > self.usual_absence {
                    chunk.strikes[at] / 2
                } else {
                    chunk.strikes[at].saturating_add(1).min(STRIKES_MAX)
                };
            }
            if self.touched.len() < TOUCHED_MAX {
                self.touched.push(page);
            }
        }
        if count > 0 {
            let mean = sum / f64::from(count);
            self.usual_absence = if self.usual_absence == 0.0 { mean } else { 0.8 * self.usual_absence + 0.2 * mean };
        }
    }

    /// The client is being parked. The pages of `touched` came back since it was unparked, and come back first next time.
    pub(crate) fn park(&mut self, regions: Vec<Range>, touched: Vec<u64>) {
        self.set_regions(regions);
        self.touched = touched;
    }

    /// The client is being unparked: all ages begin anew. Returns the pages that were touched before.
    pub(crate) fn unpark(&mut self) -> Vec<u64> {
        self.chunks.clear();
        std::mem::take(&mut self.touched)
    }

    /// The oldest resident pages, at most `pages_max`, that were silent for at least `ticks`; a page with strikes counts as
    /// younger. They are noted as evicted at the moment `now`. `resident` calls its second argument with the resident parts
    /// of a range.
    ///
    /// # Errors
    /// As `resident`.
    pub(crate) fn take_oldest<E>(
        &mut self,
        ticks: u64,
        pages_max: u64,
        now: u16,
        mut resident: impl FnMut(Range, &mut dyn FnMut(Range)) -> Result<(), E>,
    ) -> Result<Vec<Run>, E> {
        let mut by_age: Vec<Vec<Run>> = (0..=255).map(|_| Vec::new()).collect();
        for around in &self.regions {
            resident(*around, &mut |range| {
                for addr in pages_of(range) {
                    let (chunk, at) = place_of(addr);
                    let Some(chunk) = self.chunks.get(&chunk) else { continue };
                    // The effective age: a page that came back early counts as younger.
                    let age = chunk.age[at] >> chunk.strikes[at];
                    if u64::from(age) < ticks {
                        continue;
                    }
                    let runs = &mut by_age[usize::from(age)];
                    match runs.last_mut() {
                        Some((range, around)) if range.end == addr && addr < around.end => range.end = addr + PAGE,
                        _ => runs.push((Range::pages_from(addr, 1), *around)),
                    }
                }
            })?;
        }
        let mut left = pages_max;
        let mut runs = Vec::new();
        for mut same_age in by_age.into_iter().rev() {
            // Goes on from where the last turn ended: a page that came back behind the hand stays for a round.
            let behind = same_age.partition_point(|(range, _)| range.end <= self.hand);
            same_age.rotate_left(behind);
            for (range, around) in same_age {
                if left == 0 {
                    return Ok(runs);
                }
                let end = range.end.min(range.start + left * PAGE);
                let run = Range { start: range.start, end };
                left -= run.pages();
                self.hand = end;
                for addr in pages_of(run) {
                    let (chunk, at) = place_of(addr);
                    if let Some(chunk) = self.chunks.get_mut(&chunk) {
                        chunk.left[at] = now;
                    }
                }
                runs.push((run, around));
            }
        }
        Ok(runs)
    }
}

#[cfg(test)]
impl PageAges {
    /// The age of page `number`; `None` if nothing is kept of its chunk.
    pub(crate) fn age(&self, number: u64) -> Option<u8> {
        let (chunk, at) = place_of(number * PAGE);
        self.chunks.get(&chunk).map(|chunk| chunk.age[at])
    }

    /// Bytes of addresses that have ages.
    pub(crate) fn covered_bytes(&self) -> u64 {
        self.chunks.len() as u64 * CHUNK_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    const FIRST: u64 = 1 << 30;

    fn pages(first: u64, count: u64) -> Range {
        Range::pages_from(FIRST + first * PAGE, count)
    }

    /// Ages of `count` pages, all of which were written just now.
    fn written(count: u64) -> PageAges {
        let mut ages = PageAges::default();
        ages.set_regions(vec![pages(0, count)]);
        ages.note_written(pages(0, count));
        ages
    }

    /// Takes the oldest of pages that are all resident, at moment `now`; their numbers.
    fn take(ages: &mut PageAges, ticks: u64, pages_max: u64, now: u16) -> Vec<u64> {
        let all = |range, found: &mut dyn FnMut(Range)| {
            found(range);
            Ok::<(), Infallible>(())
        };
        let Ok(runs) = ages.take_oldest(ticks, pages_max, now, all);
        runs.into_iter().flat_map(|(run, _)| pages_of(run)).map(|addr| (addr - FIRST) / PAGE).collect()
    }

    #[test]
    fn silent_pages_are_evicted_the_oldest_first_and_no_more_than_asked_for() {
        let mut ages = written(6);
        for written in [3, 1, 4] {
            ages.grow_older();
            ages.note_written(pages(written, 1));
        }
        // Silent for 3 ticks: 0, 2, 5; for 2: 3; for 1: 1; for none: 4.
        assert_eq!(take(&mut ages, 2, 100, 0), [0, 2, 5, 3]);
        assert_eq!(take(&mut ages, 1, 4, 0).len(), 4);
        assert!(take(&mut ages, 4, 100, 0).is_empty());
    }

    #[test]
    fn a_page_that_comes_back_must_be_silent_twice_as_long() {
        let mut ages = written(2);
        let silent_ticks = |ages: &mut PageAges| {
            ages.note_written(pages(0, 2));
            (0..=255).find(|_| {
                ages.grow_older();
                take(ages, 2, 100, 0).contains(&0)
            })
        };
        assert_eq!(silent_ticks(&mut ages), Some(1));
        ages.record_refaults(vec![FIRST / PAGE], 1, false);
        assert_eq!(silent_ticks(&mut ages), Some(3));
        ages.record_refaults(vec![FIRST / PAGE], 1, false);
        assert_eq!(silent_ticks(&mut ages), Some(7));
        // The other page never came back.
        ages.note_written(pages(0, 2));
        (0..2).for_each(|_| ages.grow_older());
        assert_eq!(take(&mut ages, 2, 100, 0), [1]);
    }

    /// All pages are equally old where memory is short and nothing is written.
    #[test]
    fn the_next_turn_goes_on_where_the_last_one_ended() {
        let mut ages = written(8);
        assert_eq!(take(&mut ages, 0, 3, 0), [0, 1, 2]);
        // As one run is taken up to its middle, the whole run starts anew: the hand moves by runs.
        let halves = |ages: &mut PageAges| {
            let odd = |range: Range, found: &mut dyn FnMut(Range)| {
                pages_of(range).filter(|addr| addr / PAGE % 2 == 1).for_each(|addr| found(Range::pages_from(addr, 1)));
                Ok::<(), Infallible>(())
            };
            let Ok(runs) = ages.take_oldest(0, 2, 0, odd);
            runs.into_iter().map(|(run, _)| (run.start - FIRST) / PAGE).collect::<Vec<_>>()
        };
        assert_eq!([halves(&mut ages), halves(&mut ages), halves(&mut ages)], [[3, 5], [7, 1], [3, 5]]);
    }

    #[test]
    fn a_page_that_a_program_calls_cold_goes_before_the_silent_ones() {
        let mut ages = written(4);
        (0..3).for_each(|_| ages.grow_older());
        ages.record_refaults(vec![FIRST / PAGE + 2], 1, false);
        ages.make_old(pages(2, 1));
        assert_eq!(take(&mut ages, 1, 1, 0), [2]);
    }

    /// While memory is short everything comes back some time: a strike for that would let no page go.
    #[test]
    fn where_memory_is_short_only_pages_that_come_back_soon_are_kept() {
        let mut ages = written(2);
        take(&mut ages, 0, 2, 0);
        // The usual absence: a hundred moments.
        ages.record_refaults(vec![FIRST / PAGE, FIRST / PAGE + 1], 100, false);
        take(&mut ages, 0, 2, 200);
        ages.record_refaults(vec![FIRST / PAGE], 205, true);
        ages.record_refaults(vec![FIRST / PAGE + 1], 300, true);
        (0..4).for_each(|_| ages.grow_older());
        assert_eq!(take(&mut ages, 2, 100, 300), [1]);
    }

    #[test]
    fn unpark_is_told_what_came_back_before() {
        let mut ages = written(4);
        take(&mut ages, 0, 4, 0);
        ages.record_refaults(vec![FIRST / PAGE + 3], 5, false);
        assert_eq!(ages.unpark(), [FIRST / PAGE + 3]);
        assert!(ages.unpark().is_empty() && ages.covered_bytes() == 0);
    }

    /// A program may map its memory at new addresses again and again.
    #[test]
    fn ages_of_unmapped_memory_are_dropped() {
        let mut ages = PageAges::default();
        let region = |chunk: u64, pages| Range::pages_from(chunk * CHUNK_BYTES + 7 * PAGE, pages);
        for chunk in 2..1000 {
            ages.chunks.insert(chunk, Chunk::new());
            let regions = [region(1, 1), region(chunk - 1, 1), region(chunk, CHUNK_PAGES as u64), region(5000, 1)];
            ages.set_regions(regions.to_vec());
        }
        let mut left: Vec<u64> = ages.chunks.into_keys().collect();
        left.sort_unstable();
        assert_eq!(left, [998, 999]);
    }
}
