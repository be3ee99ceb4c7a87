//! A second hand: another thread brings some of the pages that a program walks through.
//!
//! Who serves a fault claims a window of pages, brings the first piece, and offers the rest. Both then take piece after
//! piece off its front until none is left. What nobody has taken yet is one word, so each piece has one taker, and a hand
//! that loses its processor keeps one piece, not half of the window; who meets a page of it waits, as for any busy page.

use super::Shared;
use pagefold_os::signal::Blocked;
use pagefold_os::wait;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Pages that are taken at once.
pub(super) const PIECE: usize = 4;
/// How long a hand looks for the next window before it sleeps: longer than a program takes to read through one.
const LOOKS: Duration = Duration::from_micros(100);
/// A word holds the first page above so many bits, and how many pages below.
const COUNT_BITS: u32 = 16;

/// Busy pages that nobody has taken yet.
#[derive(Debug, Default)]
pub(super) struct Offer {
    /// The first page and how many; 0 without an offer.
    rest: AtomicU64,
    /// Hands that work.
    hands: AtomicU32,
    /// Hands that sleep, or are about to.
    asleep: AtomicU32,
    /// Changed, and rung, when there is an offer for who sleeps, or nothing to wait for any more.
    bell: AtomicU32,
}

fn word(pages: &Range<usize>) -> u64 {
    if pages.is_empty() { 0 } else { (pages.start as u64) << COUNT_BITS | pages.len() as u64 }
}

fn pages(word: u64) -> Range<usize> {
    let (first, count) = ((word >> COUNT_BITS) as usize, (word & ((1 << COUNT_BITS) - 1)) as usize);
    first..first + count
}

impl Offer {
    /// True if there is a hand to offer pages to.
    pub(super) fn has_hands(&self) -> bool {
        self.hands.load(Ordering::Relaxed) != 0
    }

    /// Offers busy pages; false if another window is being brought, and they are the caller's alone.
    pub(super) fn make(&self, offered: &Range<usize>) -> bool {
        // Before the look at who sleeps; who goes to sleep says so before he looks once more.
        if self.rest.compare_exchange(0, word(offered), Ordering::SeqCst, Ordering::Relaxed).is_err() {
            return false;
        }
        if self.asleep.load(Ordering::SeqCst) != 0 {
            self.ring();
        }
        true
    }

    /// Takes the first pages of the offer, if they are some of `these`.
    pub(super) fn take(&self, these: &Range<usize>) -> Option<Range<usize>> {
        let mut rest = self.rest.load(Ordering::Acquire);
        loop {
            let offered = pages(rest);
            if offered.is_empty() || !these.contains(&offered.start) {
                return None;
            }
            let cut = offered.end.min(offered.start + PIECE);
            match self.rest.compare_exchange_weak(rest, word(&(cut..offered.end)), Ordering::AcqRel, Ordering::Acquire)
            {
                Ok(_) => return Some(offered.start..cut),
                Err(now) => rest = now,
            }
        }
    }

    /// Wakes every hand that sleeps.
    pub(super) fn ring(&self) {
        self.bell.fetch_add(1, Ordering::Release);
        wait::wake(&self.bell);
    }

    /// Waits for an offer, or for `over`.
    fn wait(&self, over: impl Fn() -> bool) {
        let start = Instant::now();
        while start.elapsed() < LOOKS {
            if self.rest.load(Ordering::Relaxed) != 0 {
                return;
            }
            std::hint::spin_loop();
        }
        self.asleep.fetch_add(1, Ordering::SeqCst);
        let seen = self.bell.load(Ordering::Acquire);
        if self.rest.load(Ordering::SeqCst) == 0 && !over() {
            wait::any([(&self.bell, seen)], u64::from(u32::MAX));
        }
        self.asleep.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Counts a hand as long as it works.
struct Working<'a>(&'a Offer);

impl Drop for Working<'_> {
    fn drop(&mut self) {
        self.0.hands.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Shared {
    /// Works as a second hand until the region is dropped. Not with signals blocked.
    pub(in crate::region) fn lend_hand(&self) {
        if !self.is_ours() {
            return;
        }
        self.offer.hands.fetch_add(1, Ordering::Relaxed);
        let _working = Working(&self.offer);
        while self.usable() {
            let taken = {
                let _quiet = Blocked::all();
                let piece = self.offer.take(&(0..self.pages()));
                piece.map(|piece| self.bring(piece.start, piece.len()))
            };
            match taken {
                Some(came) => _ = self.counters.by_hand.fetch_add(came as u64, Ordering::Relaxed),
                None => self.offer.wait(|| !self.usable()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU8;

    /// Makers that finish what they offered, and hands: each page is taken by one of them.
    #[test]
    fn each_page_is_taken_once() {
        const WINDOWS: usize = 20_000;
        const LEN: usize = 30;
        let offer = Offer::default();
        let takes: Vec<AtomicU8> = (0..2 * WINDOWS * LEN).map(|_| AtomicU8::new(0)).collect();
        let note = |pages: Range<usize>| {
            for page in &takes[pages] {
                page.fetch_add(1, Ordering::Relaxed);
            }
        };
        let take = |these: &Range<usize>| match offer.take(these) {
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
                            offer.wait(|| over.load(Ordering::Acquire) == 2);
                        }
                    }
                });
            }
            for maker in 0..2 {
                let (take, note, offer, over) = (&take, &note, &offer, &over);
                scope.spawn(move || {
                    for window in (0..WINDOWS).map(|number| (number * 2 + maker) * LEN) {
                        let window = window..window + LEN;
                        if offer.make(&window) {
                            while take(&window) {}
                        } else {
                            note(window);
                        }
                    }
                    over.fetch_add(1, Ordering::Release);
                    offer.ring();
                });
            }
        });
        assert!(takes.iter().all(|page| page.load(Ordering::Relaxed) == 1));
        assert_eq!(offer.rest.load(Ordering::Relaxed), 0);
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
