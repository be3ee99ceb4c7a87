//! Dense compression: contents stored fast are compressed again, with a dictionary trained on pages of the whole tier.
//!
//! A content that would not get smaller is marked and not tried again.

use crate::arena::{NoSlot, ReserveClass};
use crate::codec::Codec;
use crate::config::Effort;
use crate::layout::{Meta, PATCHES_SHIFT, TRIED};
use crate::tier::{SAMPLES, SAMPLES_MIN, Tier, with_worker};
use pagefold_os::PAGE_SIZE;
use std::sync::atomic::Ordering;

impl Tier {
    /// Trains the first dictionary from pages of the whole tier, which is better than from those stored first.
    pub(super) fn train_widely(&self) {
        let contents = self.counters.contents.load(Ordering::Relaxed) as usize;
        if contents < SAMPLES_MIN || !self.is_sampling() {
            return;
        }
        let step = (contents / SAMPLES).max(1);
        let (mut seen, mut pages) = (0, Vec::new());
        self.walk((0, 0), &|_| true, |entry, _| {
            seen += 1;
            if seen % step == 0 {
                with_worker(|worker| {
                    let mut page = worker.take_page();
                    if self.read_content(entry.at, worker, &mut page).is_ok() {
                        pages.extend_from_slice(&page[..]);
                    }
                    worker.return_page(page);
                });
            }
            // Any error ends the walk.
            if pages.len() < SAMPLES * PAGE_SIZE { Ok(()) } else { Err(NoSlot::Full) }
        });
        // Only once, even if the samples make no dictionary.
        if pages.len() >= SAMPLES_MIN * PAGE_SIZE && self.stop_sampling() {
            self.train_on(&pages);
        }
    }

    /// Compresses contents of at least that age densely. Returns how many, and false if it ended early for a waiting store.
    pub(super) fn recompress_older(&self, ticks: u16) -> (u64, bool) {
        let untried = |word1: u64| {
            let meta = Meta::from_word(word1);
            word1 & TRIED == 0 && (meta.codec == Codec::Lz4 as u8 || meta.codec == Codec::Raw as u8)
        };
        let wanted = |at: usize| {
            let words = self.arena.words();
            let word2 = words[at + 2].load(Ordering::Relaxed);
            untried(words[at + 1].load(Ordering::Relaxed)) && self.age(word2) >= ticks && word2 >> PATCHES_SHIFT == 0
        };
        let (mut recompressed, mut whole) = (0, true);
        self.walk((0, 0), &wanted, |entry, moved| {
            if self.waiting_stores.load(Ordering::Relaxed) > 0 {
                whole = false;
                // Any error ends the walk.
                return Err(NoSlot::Full);
            }
            if self.spare(entry.key, entry.index) {
                return Ok(());
            }
            let made = self.densely(entry.at)?;
            recompressed += u64::from(made.is_some());
            if let Some(made) = made {
                moved.replace(self, entry, made);
            }
            Ok(())
        });
        self.counters.recompressed.fetch_add(recompressed, Ordering::Relaxed);
        (recompressed, whole)
    }

    /// A denser content with the same page; `None` if it would not be smaller, or cannot be read.
    fn densely(&self, at: usize) -> Result<Option<usize>, NoSlot> {
        let words = self.arena.words();
        let before = self.meta(at).len as usize;
        let made = with_worker(|worker| {
            let mut page = worker.take_page();
            let read = self.read_content(at, worker, &mut page).is_ok();
            let fingerprint = words[at].load(Ordering::Relaxed);
            let made = read
                .then(|| self.new_content(fingerprint, &page, Effort::Dense, Some(at), worker, ReserveClass::Reserve))
                .transpose();
            worker.return_page(page);
            made
        })?;
        match made {
            Some((made, _, bytes)) if bytes < before => Ok(Some(made)),
            other => {
                words[at + 1].fetch_or(TRIED, Ordering::Relaxed);
                if let Some((made, ..)) = other {
                    self.release(made);
                }
                Ok(None)
            }
        }
    }
}
