//! The window that a faulting thread and the prefetchers share.
//!
//! A thread that serves a fault claims a window of pages, loads the first piece, and publishes the rest. Both threads then
//! take pieces off its front until none is left. The untaken rest is one word, so each piece is taken once, and a preempted
//! prefetcher delays one piece, not half of the window. A thread that touches a page of that piece waits, as for any busy
//! page.

use pagefold_os::wait;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Pages of a piece.
pub(super) const PIECE: usize = 4;
/// How long a prefetcher spins for the next window before it sleeps: longer than a program takes to read one.
const SPIN_TIME: Duration = Duration::from_micros(100);
/// The word holds the first page above these bits, and the number of pages in them.
const COUNT_BITS: u32 = 16;

/// The published rest of a window: busy pages that no thread has taken yet.
#[derive(Debug, Default)]
pub(super) struct SharedWindow {
    /// The first page and how many; 0 if there are none.
    rest: AtomicU64,
    /// Running prefetchers.
    prefetchers: AtomicU32,
    /// Prefetchers that sleep, or are about to.
    asleep: AtomicU32,
    /// The futex word on which prefetchers sleep; changed when pages are published or the region is dropped.
    wakeups: AtomicU32,
}

fn word(pages: &Range<usize>) -> u64 {
    if pages.is_empty() { 0 } else { (pages.start as u64) << COUNT_BITS | pages.len() as u64 }
}

fn pages(word: u64) -> Range<usize> {
    let (first, count) = ((word >> COUNT_BITS) as usize, (word & ((1 << COUNT_BITS) - 1)) as usize);
    first..first + count
}

impl SharedWindow {
    /// Counts a prefetcher as running until the guard is dropped.
    pub(super) fn enter(&self) -> Running<'_> {
        self.prefetchers.fetch_add(1, Ordering::Relaxed);
        Running(self)
    }

    /// Returns true if a prefetcher runs.
    pub(super) fn has_prefetchers(&self) -> bool {
        self.prefetchers.load(Ordering::Relaxed) != 0
    }

    /// Publishes busy pages. Returns false if another window is published; the caller loads its pages alone then.
    pub(super) fn publish(&self, busy: &Range<usize>) -> bool {
        // Before `asleep` is read: a prefetcher raises `asleep` before it checks `rest` for the last time.
        if self.rest.compare_exchange(0, word(busy), Ordering::SeqCst, Ordering::Relaxed).is_err() {
            return false;
        }
        if self.asleep.load(Ordering::SeqCst) != 0 {
            self.wake_prefetchers();
        }
        true
    }

    /// Takes the first piece, if it belongs to `these` pages.
    pub(super) fn take(&self, these: &Range<usize>) -> Option<Range<usize>> {
        let mut rest = self.rest.load(Ordering::Acquire);
        loop {
            let untaken = pages(rest);
            if untaken.is_empty() || !these.contains(&untaken.start) {
                return None;
            }
            let cut = untaken.end.min(untaken.start + PIECE);
            match self.rest.compare_exchange_weak(rest, word(&(cut..untaken.end)), Ordering::AcqRel, Ordering::Acquire)
            {
                Ok(_) => return Some(untaken.start..cut),
                Err(now) => rest = now,
            }
        }
    }

    /// Wakes all sleeping prefetchers.
    pub(super) fn wake_prefetchers(&self) {
        self.wakeups.fetch_add(1, Ordering::Release);
        wait::wake(&self.wakeups);
    }

    /// Waits for published pages, or until `is_over` returns true and the prefetchers are woken.
    pub(super) fn wait(&self, is_over: impl Fn() -> bool) {
        let start = Instant::now();
        while start.elapsed() < SPIN_TIME {
            if self.rest.load(Ordering::Relaxed) != 0 {
                return;
            }
            std::hint::spin_loop();
        }
        self.asleep.fetch_add(1, Ordering::SeqCst);
        let seen = self.wakeups.load(Ordering::Acquire);
        if self.rest.load(Ordering::SeqCst) == 0 && !is_over() {
            wait::any([(&self.wakeups, seen)], u64::from(u32::MAX));
        }
        self.asleep.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Counts a prefetcher as running until it is dropped.
pub(super) struct Running<'a>(&'a SharedWindow);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.prefetchers.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU8;

    /// Threads that publish and finish windows, and prefetchers: each page is taken by exactly one of them.
    #[test]
    fn each_page_is_taken_once() {
        const WINDOWS: usize = 20_000;
        const LEN: usize = 30;
        let window = SharedWindow::default();
        let takes: Vec<AtomicU8> = (0..2 * WINDOWS * LEN).map(|_| AtomicU8::new(0)).collect();
        let note = |pages: Range<usize>| {
            for page in &takes[pages] {
                page.fetch_add(1, Ordering::Relaxed);
            }
        };
        let take = |these: &Range<usize>| match window.take(these) {
            Some(piece) => {
                assert!(piece.len() <= PIECE);
                note(piece);
                true
            }
            None => false,
        };
        let over = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while over.load(Ordering::Acquire) < 2 {
                        if !take(&(0..takes.len())) {
                            window.wait(|| over.load(Ordering::Acquire) == 2);
                        }
                    }
                });
            }
            for publisher in 0..2 {
                let (take, note, window, over) = (&take, &note, &window, &over);
                scope.spawn(move || {
                    for start in (0..WINDOWS).map(|number| (number * 2 + publisher) * LEN) {
                        let range = start..start + LEN;
                        if window.publish(&range) {
                            while take(&range) {}
                        } else {
                            note(range);
                        }
                    }
                    over.fetch_add(1, Ordering::Release);
                    window.wake_prefetchers();
                });
            }
        });
        assert!(takes.iter().all(|page| page.load(Ordering::Relaxed) == 1));
        assert_eq!(window.rest.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_word_holds_the_last_pages_of_the_largest_region() {
        let last = super::super::super::REGION_BYTES_MAX / 4096;
        for offered in [0..1, 5..37, last - 32..last] {
            assert_eq!(pages(word(&offered)), offered);
            assert_ne!(word(&offered), 0);
        }
        assert_eq!(word(&(7..7)), 0);
    }
}
