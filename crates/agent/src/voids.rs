//! Pages of the pool's mappings that the program discarded and that could not be made fresh memory: a bare call has sealed the
//! mapping (mseal(2)), or the kernel has no room for another one.
//!
//! The mapping stays then and would show the slot again, so what was discarded is remembered. Pages come back there by faults
//! that the agent's thread answers, with zeros. Only that thread changes the list; a forked child inherits it with the mappings.
//! What was once in it and is no mapping of the pool's any more does no harm.

use crate::thread::yield_now;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
use pagefold_os::raw::Errno;
use pagefold_os::uffd::Uffd;
use pagefold_os::{PAGE_SIZE, Page, Range, syscall};

/// Ranges that are told apart at most: as many as mappings, by default. Costs no memory before it is used.
const VOIDS_MAX: usize = 1 << 16;
/// How often a page is tried that cannot be put.
const TRIES_MAX: usize = 100_000;
/// Pages that one fault brings at most.
const STEP_PAGES: u64 = 64;

static VOIDS: [[AtomicU64; 2]; VOIDS_MAX] = [const { [const { AtomicU64::new(0) }; 2] }; VOIDS_MAX];
static LEN: AtomicUsize = AtomicUsize::new(0);

/// Odd while the list changes.
static CHANGES: AtomicUsize = AtomicUsize::new(0);

static ZEROS: Page = [0; PAGE_SIZE];

fn get(index: usize) -> Range {
    let [start, end] = &VOIDS[index];
    Range { start: start.load(Ordering::Relaxed), end: end.load(Ordering::Relaxed) }
}

fn set(index: usize, range: Range) {
    VOIDS[index][0].store(range.start, Ordering::Relaxed);
    VOIDS[index][1].store(range.end, Ordering::Relaxed);
}

fn all() -> impl Iterator<Item = Range> {
    (0..LEN.load(Ordering::Acquire)).map(get)
}

/// `range` reads zero where nobody has written since.
pub(crate) fn add(mut range: Range) {
    change(|| {
        // With what touches it, so that one discard after another takes one place.
        while let Some(index) = all().position(|void| void.start <= range.end && range.start <= void.end) {
            let void = get(index);
            range = Range { start: range.start.min(void.start), end: range.end.max(void.end) };
            take_out(index);
        }
        put_in(range);
    });
}

fn put_in(range: Range) {
    let len = LEN.load(Ordering::Relaxed);
    if len == VOIDS_MAX {
        // Old bytes where zeros belong would be the other way.
        // SAFETY: ends the process.
        let _ = unsafe { syscall!(libc::SYS_kill, libc::getpid(), libc::SIGABRT) };
        return;
    }
    set(len, range);
    LEN.store(len + 1, Ordering::Release);
}

fn take_out(index: usize) {
    let last = LEN.load(Ordering::Relaxed) - 1;
    set(index, get(last));
    LEN.store(last, Ordering::Release);
}

/// What `range` shows is right: it was mapped anew.
pub(crate) fn remove(range: Range) {
    if !overlap(range) {
        return;
    }
    change(|| {
        while let Some(index) = all().position(|void| void.overlaps(&range)) {
            let void = get(index);
            take_out(index);
            for rest in [Range { start: void.start, end: range.start }, Range { start: range.end, end: void.end }] {
                if rest.start < rest.end {
                    put_in(rest);
                }
            }
        }
    });
}

/// True if part of `range` was discarded.
pub(crate) fn overlap(range: Range) -> bool {
    all().any(|void| void.overlaps(&range))
}

/// Calls `act` with each range that was discarded, with some more than once if the list changes meanwhile.
pub(crate) fn for_each(mut act: impl FnMut(Range)) {
    loop {
        let before = CHANGES.load(Ordering::Acquire);
        all().for_each(&mut act);
        fence(Ordering::Acquire);
        if before.is_multiple_of(2) && before == CHANGES.load(Ordering::Relaxed) {
            return;
        }
        yield_now();
    }
}

/// Changes the list; who goes through it meanwhile does so again.
fn change(act: impl FnOnce()) {
    CHANGES.fetch_add(1, Ordering::AcqRel);
    act();
    CHANGES.fetch_add(1, Ordering::Release);
}

/// Answers a fault at `page` by zeros, which the pool's mapping has not; false if it was not discarded. Who waits is to be woken.
pub(crate) fn answer(hold: &Uffd, page: Range) -> bool {
    let Some(void) = all().find(|void| void.overlaps(&page)) else { return false };
    let end = void.end.min(page.start + STEP_PAGES * PAGE_SIZE as u64);
    // All of it may lie in several mappings.
    if hold.zero(Range { start: page.start, end }, 0).0 == 0 {
        fill_page(hold, page);
    }
    true
}

/// Puts zeros wherever nothing is in `range`, which is one mapping of the pool's and was discarded. While a discard is under way,
/// or memory is short, nothing can be put: `serve` answers what waits.
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

/// Puts zeros into one page if nothing is there, and says why it could not.
fn fill_page(hold: &Uffd, page: Range) -> Option<Errno> {
    match hold.zero(page, 0).1 {
        // Nothing may be there but a mark of write protection, on which only a copy is put.
        // SAFETY: the kernel reads the page of zeros.
        Some(Errno(libc::EEXIST)) => unsafe { hold.copy(page.start, ZEROS.as_ptr() as u64, PAGE_SIZE as u64, 0) }.1,
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_discarded_is_known_until_it_is_mapped_anew() {
        let pages = |start: u64, end: u64| Range { start: start << 12, end: end << 12 };
        let known = || (0..100).filter(|&page| overlap(pages(page, page + 1))).collect::<Vec<_>>();
        assert!(known().is_empty());
        add(pages(10, 20));
        add(pages(30, 31));
        add(pages(20, 22));
        assert_eq!((known(), all().count()), ((10..22).chain([30]).collect(), 2));
        // Across both.
        add(pages(21, 30));
        assert_eq!((known(), all().count()), ((10..31).collect(), 1));
        remove(pages(12, 14));
        remove(pages(30, 40));
        remove(pages(50, 60));
        assert_eq!((known(), all().count()), ((10..12).chain(14..30).collect(), 2));
        remove(pages(0, 100));
        assert!(known().is_empty());
        // Each apart, as where a guest gives every other page back.
        (0..8_000).for_each(|page| add(pages(2 * page, 2 * page + 1)));
        assert!(all().count() == 8_000 && overlap(pages(15_998, 15_999)) && !overlap(pages(15_999, 16_000)));
        remove(pages(0, 16_000));
        assert!(all().next().is_none());
    }
}
