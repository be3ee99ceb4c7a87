//! The cleaner: denser compression, compaction, writeback.
//!
//! All three are one motion: walk the leaves, and where a page shows a content
//! that should lie elsewhere, make the new content and exchange the page word,
//! if nobody changed it meanwhile. The old content goes when its last word has
//! gone. Nothing points back from a content to its pages, so nothing has to be
//! kept up to date for it: the walk costs a few nanoseconds per page and is
//! made for many contents at once.
//!
//! A crash in the middle leaves some pages on the old content and some on the
//! new: both are whole.
//!
//! Here is what is done when; `dense`, `compact` and `write_back` do it, each by a `walk`.

mod compact;
mod dense;
mod walk;
mod write_back;

use crate::layout::TICK_SHIFT;
use crate::tier::Tier;
use crate::writeback::SEGMENT_BYTES;
use pagefold_os::sync::lock;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Ages from here on are one, so that none wraps: a content has 16 bits of the tick.
const AGE_MAX: u16 = 1 << 15;

/// What one call of [`Tier::tick`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cleaned {
    /// Contents compressed again, densely.
    pub recompressed: u64,
    /// Contents moved by compaction.
    pub moved: u64,
    /// Contents written back.
    pub written_back: u64,
}

/// What the cleaner remembers between its walks.
#[derive(Debug, Default)]
pub(crate) struct Cleaner {
    /// Leaf slab and slot at which writeback goes on: equally old pages go out in turn.
    position: (usize, usize),
    /// Tick before which a failed file is left alone.
    retry_tick: u64,
    /// Stores seen by the last walk for dense compression, and the tick of the last new one.
    stores_seen: (u64, u64),
    /// Slots freed when compaction last found nothing to do.
    frees_seen: u64,
}

impl Tier {
    /// Lets a tick of cold time pass and cleans up: to be called every few seconds by a thread that may wait.
    ///
    /// Contents that were not stored or touched for `recompress_ticks` are compressed densely, slabs with free slots
    /// are compacted above `waste_percent`, and contents are written back when less than 5 % of the room is left.
    /// Does next to nothing when nothing changed.
    pub fn tick(&self) -> Cleaned {
        let tick = self.tick.fetch_add(1, Ordering::Relaxed) + 1;
        self.train_widely();
        let mut cleaner = lock(&self.cleaner);
        if tick.is_multiple_of(u64::from(AGE_MAX) / 2) {
            self.keep_ages();
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
            cleaned.written_back = self.write_back(&mut cleaner, self.room_wanted());
        }
        let usage = self.arena.usage();
        if usage.free_slots * 100 > usage.held * u64::from(self.config.waste_percent) {
            cleaned.moved = self.compact(&mut cleaner);
        }
        cleaned
    }

    /// Compresses every content densely now, whatever its age: after parking, when the time does not press. Stores that
    /// need room go first.
    pub fn recompress_all(&self) -> u64 {
        self.train_widely();
        let mut sum = 0;
        loop {
            let mut cleaner = lock(&self.cleaner);
            let (recompressed, whole) = self.recompress_older(0);
            sum += recompressed;
            if whole {
                // What was replaced left its slots all over the place.
                self.compact(&mut cleaner);
                return sum;
            }
            drop(cleaner);
            while self.hurried.load(Ordering::Relaxed) > 0 {
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

    /// Makes room for a store; false if there is none to be had.
    pub(crate) fn make_room(&self) -> bool {
        // Before the lock: who waits for it waits for the room that another makes.
        let before = self.rooms.load(Ordering::Acquire);
        self.hurried.fetch_add(1, Ordering::Relaxed);
        let mut cleaner = lock(&self.cleaner);
        self.hurried.fetch_sub(1, Ordering::Relaxed);
        if self.rooms.load(Ordering::Acquire) != before {
            return true;
        }
        let written = self.write_back(&mut cleaner, self.room_wanted());
        let moved = self.compact(&mut cleaner);
        let made = written + moved > 0;
        self.rooms.fetch_add(u64::from(made), Ordering::Release);
        made
    }

    /// What is older than [`AGE_MAX`] is as old as that, and does not look fresh a while later.
    fn keep_ages(&self) {
        let oldest = (self.tick.load(Ordering::Relaxed) as u16).wrapping_sub(AGE_MAX);
        let is_older = |at: usize| self.age(self.arena.word(at + 2).load(Ordering::Relaxed)) > AGE_MAX;
        self.walk((0, 0), &is_older, |seat, _| {
            self.set_tick(seat.at, u64::from(oldest) << TICK_SHIFT);
            Ok(())
        });
    }

    /// Bytes to write back at once: a twentieth of the room, and at least a whole segment of the file.
    fn room_wanted(&self) -> u64 {
        (self.arena.bytes_max() / 20).max(SEGMENT_BYTES as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::tests::texty;
    use crate::config::{Config, Effort};
    use crate::layout::{LEAF_PAGES, Shown, leaf_key};
    use pagefold_os::PAGE_SIZE;

    #[test]
    fn stores_that_want_room_at_once_share_one() {
        let file = crate::BackingFile::create(&std::env::temp_dir(), 64 << 20).unwrap();
        let tier = Tier::create(Config { bytes_max: 8 << 20, ..Config::default() }, Some(Box::new(file))).unwrap();
        let mut state = 1_u64;
        for page in 0..1500 {
            let noise = std::array::from_fn(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 56) as u8
            });
            tier.store(1, page, &noise, Effort::Fast).unwrap();
        }
        let before = tier.rooms.load(Ordering::Relaxed);
        std::thread::scope(|scope| {
            let held = lock(&tier.cleaner);
            let stores: Vec<_> = (0..4).map(|_| scope.spawn(|| tier.make_room())).collect();
            while tier.hurried.load(Ordering::Relaxed) < 4 {
                std::thread::sleep(Duration::from_millis(1));
            }
            drop(held);
            assert!(stores.into_iter().all(|store| store.join().unwrap()));
        });
        assert_eq!(tier.rooms.load(Ordering::Relaxed) - before, 1);
    }

    #[test]
    fn what_is_cold_for_days_does_not_look_fresh() {
        let file = crate::BackingFile::create(&std::env::temp_dir(), 64 << 20).unwrap();
        let config = Config { bytes_max: 8 << 20, patches: false, ..Config::default() };
        let tier = Tier::create(config, Some(Box::new(file))).unwrap();
        tier.store(1, 0, &texty(1), Effort::Dense).unwrap();
        // The next tick is as many as the age has numbers.
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
            let leaf = tier.region(1).unwrap().directory.get(0).unwrap();
            let Shown::Content(at) = Shown::from_word(tier.arena.leaf(leaf)[page].load(Ordering::Relaxed)) else {
                panic!("page {page} is not there")
            };
            tier.meta(at as usize).is_on_disk()
        };
        assert_eq!((is_in_file(0), is_in_file(1)), (true, false));
    }

    /// A slab that held leaves when the cleaner listed them may hold contents a moment later, and those may look like a key
    /// and words. The region knows its leaves; nothing that looks like one is counted or written.
    #[test]
    fn what_looks_like_a_leaf_is_none() {
        let tier = Tier::create(Config { bytes_max: 8 << 20, recompress_ticks: 0, ..Config::default() }, None).unwrap();
        for (region, page) in [(1, 0), (2, 0), (2, 1)] {
            tier.store(region, page, &texty(u64::from(region) * 8 + page), Effort::Fast).unwrap();
        }
        let leaf = tier.region(1).unwrap().directory.get(0).unwrap();
        let wanted = tier.region(2).unwrap().directory.get(0).unwrap();
        let word = tier.arena.leaf(wanted)[1].load(Ordering::Relaxed);
        assert_eq!(tier.discard(1, 0..LEAF_PAGES as u64), 1);
        // The slab stays, for region 2 has a leaf in it.
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
        tier.remove_region(2);
        let stats = tier.stats();
        assert_eq!((stats.pages, stats.contents, stats.payload_bytes), (0, 0, 0), "a reference too many");
    }
}
