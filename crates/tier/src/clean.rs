//! The cleaner: denser compression, compaction, writeback.
//!
//! All three work the same way: walk the leaves, make a new content for each
//! page word with a content to be replaced, and exchange the word, unless
//! another thread has changed it. The old content is freed with its last
//! reference. A content has no links to its pages, so there is nothing to keep
//! up to date: a walk costs a few nanoseconds per page and serves many contents.
//!
//! A crash in the middle leaves some pages with the old content and some with
//! the new one: both are complete.
//!
//! This file decides when to clean; `dense`, `compact` and `write_back` do it, each with a `walk`.

mod compact;
mod dense;
mod walk;
mod write_back;

use crate::backing_file::ZONE_BYTES;
use crate::layout::TICK_SHIFT;
use crate::tier::Tier;
use pagefold_os::sync::lock;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The largest age. A content has 16 bits for its tick, so older ages would wrap.
const AGE_MAX: u16 = 1 << 15;

/// What one call of [`Tier::tick`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cleaned {
    /// Contents recompressed densely.
    pub recompressed: u64,
    /// Contents moved by compaction.
    pub moved: u64,
    /// Contents written back.
    pub written_back: u64,
}

impl Tier {
    /// Advances the tick and cleans up. A thread that may wait calls this every few seconds.
    ///
    /// Contents that were not stored or touched for `recompress_ticks` are compressed densely, slabs with free slots
    /// are compacted above `waste_percent`, and contents are written back if less than 5 % of the limit is free, or when
    /// they were not used for `write_back_ticks`. Does very little if nothing has changed.
    pub fn tick(&self) -> Cleaned {
        let tick = self.tick.fetch_add(1, Ordering::Relaxed) + 1;
        self.train_widely();
        let mut cleaner = lock(&self.cleaner);
        if tick.is_multiple_of(u64::from(AGE_MAX) / 2) {
            self.clamp_ages();
        }
        let mut cleaned = Cleaned::default();
        let stores = self.counters.stores.load(Ordering::Relaxed);
        if stores != cleaner.stores_seen.0 {
            cleaner.stores_seen = (stores, tick);
        }
        if tick <= cleaner.stores_seen.1 + u64::from(self.config.recompress_ticks) {
            let (recompressed, whole) = self.recompress_older(self.config.recompress_ticks);
            cleaned.recompressed = recompressed;
            if !whole {
                cleaner.stores_seen.1 = tick;
            }
        }
        if self.disk.is_some() && self.arena.held() > self.arena.bytes_max() / 100 * 95 {
            cleaned.written_back = self.write_back(&mut cleaner, self.reclaim_bytes());
        }
        cleaned.written_back += self.write_back_aged(&mut cleaner);
        let usage = self.arena.usage();
        if usage.free_slots * 100 > usage.held * u64::from(self.config.waste_percent) {
            cleaned.moved = self.compact(&mut cleaner);
        }
        cleaned
    }

    /// Compresses every content densely now, whatever its age, as after parking. Stores that wait for memory go first.
    pub fn recompress_all(&self) -> u64 {
        self.train_widely();
        let mut sum = 0;
        loop {
            let mut cleaner = lock(&self.cleaner);
            let (recompressed, whole) = self.recompress_older(0);
            sum += recompressed;
            if whole {
                // The replaced contents left free slots in many slabs.
                self.compact(&mut cleaner);
                return sum;
            }
            drop(cleaner);
            while self.waiting_stores.load(Ordering::Relaxed) > 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// Empties slabs that are mostly free and returns them to the kernel; returns the contents moved.
    pub fn compact_now(&self) -> u64 {
        let mut cleaner = lock(&self.cleaner);
        cleaner.frees_seen = 0;
        self.compact(&mut cleaner)
    }

    /// Writes contents back until about `bytes` of memory are free; returns the contents written.
    pub fn write_back_now(&self, bytes: u64) -> u64 {
        let mut cleaner = lock(&self.cleaner);
        cleaner.retry_tick = 0;
        let written = self.write_back(&mut cleaner, bytes);
        self.compact(&mut cleaner);
        written
    }

    /// Frees memory for a store; false if that is not possible.
    pub(crate) fn reclaim(&self) -> bool {
        // Read before the lock: while this thread waits for it, another one may reclaim.
        let before = self.reclaims.load(Ordering::Acquire);
        self.waiting_stores.fetch_add(1, Ordering::Relaxed);
        let mut cleaner = lock(&self.cleaner);
        self.waiting_stores.fetch_sub(1, Ordering::Relaxed);
        if self.reclaims.load(Ordering::Acquire) != before {
            return true;
        }
        let written = self.write_back(&mut cleaner, self.reclaim_bytes());
        let moved = self.compact(&mut cleaner);
        let made = written + moved > 0;
        self.reclaims.fetch_add(u64::from(made), Ordering::Release);
        made
    }

    /// Sets larger ages to [`AGE_MAX`], so that old contents do not look fresh after the tick wraps.
    fn clamp_ages(&self) {
        let oldest = (self.tick.load(Ordering::Relaxed) as u16).wrapping_sub(AGE_MAX);
        let is_older = |at: usize| self.age(self.arena.word(at + 2).load(Ordering::Relaxed)) > AGE_MAX;
        self.walk((0, 0), &is_older, |entry, _| {
            self.set_tick(entry.at, u64::from(oldest) << TICK_SHIFT);
            Ok(())
        });
    }

    /// Bytes to write back at a time: a twentieth of the limit, and at least a whole zone of the file.
    fn reclaim_bytes(&self) -> u64 {
        (self.arena.bytes_max() / 20).max(ZONE_BYTES as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::tests::{noise, texty};
    use crate::config::{Config, Effort};
    use crate::layout::{LEAF_PAGES, Shown, leaf_key};
    use pagefold_os::PAGE_SIZE;

    #[test]
    fn concurrent_stores_that_need_memory_share_one_reclaim() {
        let file = crate::BackingFile::create(&std::env::temp_dir(), 64 << 20).unwrap();
        let tier = Tier::create(Config { bytes_max: 8 << 20, ..Config::default() }, Some(Box::new(file))).unwrap();
        for page in 0..1500 {
            tier.store(1, page, &noise(page), Effort::Fast).unwrap();
        }
        let before = tier.reclaims.load(Ordering::Relaxed);
        std::thread::scope(|scope| {
            let held = lock(&tier.cleaner);
            let stores: Vec<_> = (0..4).map(|_| scope.spawn(|| tier.reclaim())).collect();
            while tier.waiting_stores.load(Ordering::Relaxed) < 4 {
                std::thread::sleep(Duration::from_millis(1));
            }
            drop(held);
            assert!(stores.into_iter().all(|store| store.join().unwrap()));
        });
        assert_eq!(tier.reclaims.load(Ordering::Relaxed) - before, 1);
    }

    #[test]
    fn old_contents_go_to_the_file_although_there_is_memory() {
        let file = crate::BackingFile::create(&std::env::temp_dir(), 64 << 20).unwrap();
        let config = Config { bytes_max: 64 << 20, write_back_ticks: 16, ..Config::default() };
        let tier = Tier::create(config, Some(Box::new(file))).unwrap();
        for page in 0..1000 {
            tier.store(1, page, &noise(page), Effort::Fast).unwrap();
        }
        let mut page = [0; PAGE_SIZE];
        for tick in 0..40 {
            // A page that is in use stays.
            tier.load(1, 0, &mut page).unwrap();
            let in_file = tier.stats().contents_on_disk;
            assert!(tick >= 16 || in_file == 0, "{in_file} contents in the file after {tick} ticks");
            tier.tick();
        }
        let stats = tier.stats();
        assert_eq!(stats.contents, 1000);
        // A mostly empty zone is not written.
        assert!((700..1000).contains(&stats.contents_on_disk), "{stats:?}");
        assert!(stats.bytes_held < 2 << 20, "{stats:?}");
        for number in 0..1000 {
            tier.load(1, number, &mut page).unwrap();
            assert!(page == noise(number), "page {number}");
        }
    }

    #[test]
    fn a_page_that_is_to_be_ready_is_not_made_dense() {
        let tier = Tier::create(Config { bytes_max: 8 << 20, ..Config::default() }, None).unwrap();
        for (page, effort) in [(0, Effort::Ready), (1, Effort::Fast)] {
            tier.store(1, page, &texty(2 * page), effort).unwrap();
        }
        assert_eq!((tier.recompress_all(), tier.recompress_all()), (1, 0));
        let mut page = [0; PAGE_SIZE];
        for number in [0, 1] {
            tier.load(1, number, &mut page).unwrap();
            assert!(page == texty(2 * number));
        }
    }

    #[test]
    fn contents_that_are_cold_for_days_do_not_look_fresh() {
        let file = crate::BackingFile::create(&std::env::temp_dir(), 64 << 20).unwrap();
        let config = Config { bytes_max: 8 << 20, patches: false, ..Config::default() };
        let tier = Tier::create(config, Some(Box::new(file))).unwrap();
        tier.store(1, 0, &texty(1), Effort::Dense).unwrap();
        // The next tick would wrap the age.
        for tick in (1..=u64::from(u16::MAX)).filter(|tick| (tick + 1).is_multiple_of(1 << 10)) {
            tier.tick.store(tick, Ordering::Relaxed);
            if tick == u64::from(u16::MAX) {
                tier.store(1, 1, &texty(2), Effort::Dense).unwrap();
            }
            tier.tick();
        }
        // One of the two.
        assert_eq!(tier.write_back_now(64), 1);
        let is_in_file = |page: usize| {
            let leaf = tier.client(1).unwrap().directory.get(0).unwrap();
            let Shown::Content(at) = Shown::from_word(tier.arena.leaf(leaf)[page].load(Ordering::Relaxed)) else {
                panic!("page {page} is not there")
            };
            tier.meta(at as usize).is_on_disk()
        };
        assert_eq!((is_in_file(0), is_in_file(1)), (true, false));
    }

    /// A slab that held leaves when the cleaner listed it may hold contents later, and these may look like a key and words.
    /// Only the client's directory decides, so they are neither counted nor written.
    #[test]
    fn bytes_that_look_like_a_leaf_are_ignored() {
        let tier = Tier::create(Config { bytes_max: 8 << 20, recompress_ticks: 0, ..Config::default() }, None).unwrap();
        for (client, page) in [(1, 0), (2, 0), (2, 1)] {
            tier.store(client, page, &texty(u64::from(client) * 8 + page), Effort::Fast).unwrap();
        }
        let leaf = tier.client(1).unwrap().directory.get(0).unwrap();
        let wanted = tier.client(2).unwrap().directory.get(0).unwrap();
        let word = tier.arena.leaf(wanted)[1].load(Ordering::Relaxed);
        assert_eq!(tier.discard(1, 0..LEAF_PAGES as u64), 1);
        // The slab stays, because client 2 has a leaf in it.
        assert_eq!(leaf >> 12, wanted >> 12);
        let key = leaf_key(1, 0);
        tier.arena.leaf_key(leaf).store(key, Ordering::Relaxed);
        tier.arena.leaf(leaf)[1].store(word, Ordering::Relaxed);
        assert!(tier.word_with_ref(leaf, 1, key).is_none());
        assert!(!tier.exchange(leaf, 1, key, word, 0));
        assert!(tier.recompress_all() > 0);
        tier.compact_now();
        assert_eq!(tier.arena.leaf(leaf)[1].load(Ordering::Relaxed), word, "overwritten");
        let mut page = [0; PAGE_SIZE];
        tier.load(2, 1, &mut page).unwrap();
        assert!(page == texty(17));
        tier.arena.leaf_key(leaf).store(0, Ordering::Relaxed);
        tier.arena.leaf(leaf)[1].store(0, Ordering::Relaxed);
        tier.remove_client(2);
        let stats = tier.stats();
        assert_eq!((stats.pages, stats.contents, stats.payload_bytes), (0, 0, 0), "a reference too many");
    }
}
