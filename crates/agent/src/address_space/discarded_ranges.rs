//! Pages of the pool's mappings that the program discarded and that could not be made fresh memory: a bare call has sealed
//! the mapping (mseal(2)), or the kernel has no room for another one.
//!
//! The mapping stays then and would show the slot again, so what was discarded is remembered. Pages come back there by
//! faults that the agent's thread answers, with zeros. Only that thread changes the list; a forked child inherits it with
//! the mappings. What was once in it and is no mapping of the pool's any more does no harm.

use crate::address_space::maps::Maps;
use crate::runtime::thread::yield_now;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
use pagefold_os::raw::Errno;
use pagefold_os::uffd::Uffd;
use pagefold_os::{PAGE_SIZE, Range, syscall};
use pagefold_protocol::forked_memory::fill_page;

/// Ranges that are told apart at most: as many as mappings, by default. Costs no memory before it is used.
const RANGES_MAX: usize = 1 << 16;
/// How often a page is tried that cannot be put.
const TRIES_MAX: usize = 100_000;
/// How often what was discarded is gone through, at most, if there is ever more.
const PASSES_MAX: usize = 8;
/// Pages that one fault brings at most.
const STEP_PAGES: u64 = 64;

/// Disjoint, in order of address.
static RANGES: [[AtomicU64; 2]; RANGES_MAX] = [const { [const { AtomicU64::new(0) }; 2] }; RANGES_MAX];
static LEN: AtomicUsize = AtomicUsize::new(0);

/// Odd while the list changes.
static CHANGES: AtomicUsize = AtomicUsize::new(0);

fn get(index: usize) -> Range {
    let [start, end] = &RANGES[index];
    Range { start: start.load(Ordering::Relaxed), end: end.load(Ordering::Relaxed) }
}

fn set(index: usize, range: Range) {
    RANGES[index][0].store(range.start, Ordering::Relaxed);
    RANGES[index][1].store(range.end, Ordering::Relaxed);
}

/// How many of them satisfy `is_before`, which the first do.
fn count_while(is_before: impl Fn(Range) -> bool) -> usize {
    let (mut low, mut high) = (0, LEN.load(Ordering::Acquire));
    while low < high {
        let middle = low + (high - low) / 2;
        if is_before(get(middle)) { low = middle + 1 } else { high = middle }
    }
    low
}

/// `range` reads zero where the program has not written since.
pub(crate) fn add(range: Range) {
    change(|| {
        // With what touches it, so that one discard after another takes one place.
        let first = count_while(|void| void.end < range.start);
        let behind = count_while(|void| void.start <= range.end);
        let joined = if first < behind {
            Range { start: range.start.min(get(first).start), end: range.end.max(get(behind - 1).end) }
        } else {
            range
        };
        replace(first, behind, &[joined]);
    });
}

/// Puts `with` in place of those from `first` to before `behind`.
fn replace(first: usize, behind: usize, with: &[Range]) {
    let len = LEN.load(Ordering::Relaxed);
    let (to, new_len) = (first + with.len(), len - (behind - first) + with.len());
    if new_len > RANGES_MAX {
        // Old bytes where zeros belong would be the other way.
        // SAFETY: ends the process.
        let _ = unsafe { syscall!(libc::SYS_kill, syscall!(libc::SYS_getpid).unwrap_or(0), libc::SIGABRT) };
        return;
    }
    if to > behind {
        LEN.store(new_len, Ordering::Release);
        (behind..len).rev().for_each(|index| set(index + to - behind, get(index)));
    } else if to < behind {
        (behind..len).for_each(|index| set(index + to - behind, get(index)));
        LEN.store(new_len, Ordering::Release);
    }
    with.iter().enumerate().for_each(|(index, range)| set(first + index, *range));
}

/// What lay in `from` lies at `to` now; an empty mapping that was left behind reads zero.
#[cfg(feature = "attached")]
pub(crate) fn carry(from: Range, to: u64) {
    let mut rest = from;
    while let Some(part) = first_in(rest) {
        rest.start = part.end;
        let start = to + (part.start - from.start);
        add(Range { start, end: start + part.len() });
    }
    add(from);
}

/// What `range` shows is right: it was mapped anew.
pub(crate) fn remove(range: Range) {
    if !overlap(range) {
        return;
    }
    change(|| {
        let first = count_while(|void| void.end <= range.start);
        let behind = count_while(|void| void.start < range.end);
        let left = Range { start: get(first).start, end: range.start };
        let right = Range { start: range.end, end: get(behind - 1).end };
        let rest = [left, right];
        let (from, to) = (usize::from(left.start >= left.end), 1 + usize::from(right.start < right.end));
        replace(first, behind, &rest[from..to]);
    });
}

/// The first part of `range` that was discarded.
fn first_in(range: Range) -> Option<Range> {
    loop {
        let before = CHANGES.load(Ordering::Acquire);
        let first = count_while(|void| void.end <= range.start);
        let found = (first < LEN.load(Ordering::Relaxed)).then(|| get(first));
        fence(Ordering::Acquire);
        if before.is_multiple_of(2) && before == CHANGES.load(Ordering::Relaxed) {
            let part = found.map(|void| void.intersection(&range));
            return part.filter(|part| part.start < part.end);
        }
        yield_now();
    }
}

/// True if part of `range` was discarded.
pub(crate) fn overlap(range: Range) -> bool {
    first_in(range).is_some()
}

/// True if nothing was discarded that is known here.
#[cfg(feature = "preload")]
pub(crate) fn is_empty() -> bool {
    LEN.load(Ordering::Acquire) == 0
}

/// Calls `act` with each part of a mapping of the pool's that was discarded, with some more than once if the list changes
/// meanwhile: what a thread goes on discarding beside is not waited for without end. `maps` is used for nothing else here.
pub(crate) fn for_each(maps: &Maps, mut act: impl FnMut(Range)) {
    for _ in 0..PASSES_MAX {
        let before = CHANGES.load(Ordering::Acquire);
        let everything = Range { start: 0, end: u64::MAX };
        let Some(first) = first_in(everything) else { return };
        // One look at the mappings, of which there may be as many as ranges.
        let _ = maps.pools(Range { start: first.start, ..everything }, |part, _| {
            let mut rest = part;
            while let Some(void) = first_in(rest) {
                act(void);
                rest.start = void.end;
            }
            false
        });
        if before == CHANGES.load(Ordering::Acquire) {
            return;
        }
    }
}

/// Calls `act` with each discarded part of `range`, which changes no more meanwhile.
pub(crate) fn for_each_in(range: Range, mut act: impl FnMut(Range)) {
    let mut rest = range;
    while let Some(void) = first_in(rest) {
        act(void);
        rest.start = void.end;
    }
}

/// In a forked child: a change that the parent's thread had begun is never finished there.
#[cfg(feature = "preload")]
pub(crate) fn after_fork_child() {
    CHANGES.store(0, Ordering::Release);
}

/// Changes the list; a lookup in the meantime is repeated.
fn change(act: impl FnOnce()) {
    CHANGES.fetch_add(1, Ordering::AcqRel);
    act();
    CHANGES.fetch_add(1, Ordering::Release);
}

/// Answers a fault at `page` with zeros, which the pool mapping does not show; false if the page was not discarded. The
/// caller wakes the waiting threads.
pub(crate) fn answer(hold: &Uffd, page: Range) -> bool {
    let step = Range::pages_from(page.start, STEP_PAGES);
    let Some(Range { end, .. }) = first_in(step).filter(|void| void.start == page.start) else { return false };
    // All of it may lie in several mappings.
    if hold.zero(Range { start: page.start, end }, 0).0 == 0 {
        fill_page(hold, page);
    }
    true
}

/// Puts zeros wherever nothing is in `range`, which is one mapping of the pool's and was discarded. While a discard is under
/// way, or memory is short, nothing can be put: `serve` answers what waits.
pub(crate) fn fill(hold: &Uffd, range: Range, serve: impl Fn()) {
    let (mut at, mut tries) = (range.start, 0);
    while at < range.end {
        let (done, error) = hold.zero(Range { start: at, end: range.end }, 0);
        at += done;
        if error.is_none() {
            continue;
        }
        let error = fill_page(hold, Range::pages_from(at, 1));
        if matches!(error, Some(Errno(libc::EAGAIN | libc::ENOMEM))) && tries < TRIES_MAX {
            tries += 1;
            serve();
            yield_now();
        } else {
            at += PAGE_SIZE as u64;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_discarded_range_is_known_until_it_is_mapped_anew() {
        let pages = |start: u64, end: u64| Range { start: start << 12, end: end << 12 };
        let known = || (0..100).filter(|&page| overlap(pages(page, page + 1))).collect::<Vec<_>>();
        assert!(known().is_empty());
        add(pages(10, 20));
        add(pages(30, 31));
        add(pages(20, 22));
        assert_eq!((known(), LEN.load(Ordering::Relaxed)), ((10..22).chain([30]).collect(), 2));
        // Across both.
        add(pages(21, 30));
        assert_eq!((known(), LEN.load(Ordering::Relaxed)), ((10..31).collect(), 1));
        assert_eq!((first_in(pages(5, 20)), first_in(pages(20, 20))), (Some(pages(10, 20)), None));
        remove(pages(12, 14));
        remove(pages(30, 40));
        remove(pages(50, 60));
        assert_eq!((known(), LEN.load(Ordering::Relaxed)), ((10..12).chain(14..30).collect(), 2));
        remove(pages(0, 100));
        assert!(known().is_empty());
        // Any, beside a map of pages.
        let mut random = fastrand::Rng::with_seed(5);
        let mut model = [false; 100];
        for _ in 0..20_000 {
            let (start, len, adds) = (random.u64(..90), random.u64(1..10), random.bool());
            if adds {
                add(pages(start, start + len))
            } else {
                remove(pages(start, start + len))
            }
            model[start as usize..(start + len) as usize].fill(adds);
            assert!((0..100).all(|page| overlap(pages(page, page + 1)) == model[page as usize]));
            let apart = (1..LEN.load(Ordering::Relaxed)).all(|index| get(index - 1).end < get(index).start);
            assert!(apart, "{:?}", known());
        }
        remove(pages(0, 100));
        // Each apart, as where a guest gives every other page back.
        (0..8_000).for_each(|page| add(pages(2 * page, 2 * page + 1)));
        assert!(
            LEN.load(Ordering::Relaxed) == 8_000 && overlap(pages(15_998, 15_999)) && !overlap(pages(15_999, 16_000))
        );
        remove(pages(0, 16_000));
        assert_eq!(LEN.load(Ordering::Relaxed), 0);
    }
}
