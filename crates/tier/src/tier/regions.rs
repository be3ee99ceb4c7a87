//! Whole ranges and regions: discard, remove, fork.

use super::Tier;
use crate::error::StoreError;
use crate::layout::{LEAF_PAGES, PAGES_MAX, Shown};
use pagefold_os::sync::{lock, write};
use std::ops::Range;
use std::sync::atomic::Ordering;

impl Tier {
    /// Forgets the pages of a range; returns how many there were.
    pub fn discard(&self, region: u32, pages: Range<u64>) -> u64 {
        let Some(found) = self.region(region) else { return 0 };
        let leaf_pages = LEAF_PAGES as u64;
        let mut discarded = 0;
        for (at, leaf) in found.directory.range(pages.start / leaf_pages, pages.end.div_ceil(leaf_pages)) {
            let mut old = [0; LEAF_PAGES];
            let shard = self.cluster_shard(region, at);
            let guard = lock(&shard.lock);
            // The leaf may have gone since it was found.
            if found.directory.get(at) == Some(leaf) {
                for (index, word) in self.arena.leaf(leaf).iter().enumerate() {
                    if pages.contains(&(at * leaf_pages + index as u64)) {
                        old[index] = word.swap(0, Ordering::AcqRel);
                    }
                }
                shard.version.fetch_add(1, Ordering::Release);
                self.drop_leaf_if_empty(&found, at, leaf, shard);
            }
            drop(guard);
            for word in old.into_iter().filter(|word| *word != 0) {
                discarded += 1;
                self.release_word(word);
            }
        }
        found.stored.fetch_sub(discarded, Ordering::Relaxed);
        self.counters.pages.fetch_sub(discarded, Ordering::Relaxed);
        self.counters.discards.fetch_add(discarded, Ordering::Relaxed);
        discarded
    }

    /// Forgets a region and its pages; returns how many pages there were.
    ///
    /// The caller sees to it that nobody stores into the region meanwhile.
    pub fn remove_region(&self, region: u32) -> u64 {
        let discarded = self.discard(region, 0..PAGES_MAX);
        let removed = write(&self.regions).remove(&region);
        if let Some(leaf) = removed.and_then(|region| region.record.get().copied()) {
            self.arena.leaf_key(leaf).store(0, Ordering::Release);
            self.arena.leaf(leaf)[0].store(0, Ordering::Release);
            self.arena.free_leaf(leaf);
        }
        discarded
    }

    /// Lets region `to` show what `from` shows: the child of a fork. Nothing is copied but page words.
    ///
    /// Returns the pages of `to`.
    ///
    /// # Errors
    /// As [`Tier::store`]; `to` is then empty.
    pub fn fork_region(&self, from: u32, to: u32) -> Result<u64, StoreError> {
        let Some(parent) = self.region(from) else { return Ok(0) };
        if let Some(pages) = parent.pages {
            self.add_region(to, pages)?;
        }
        let child = self.region_or_new(to, 0, None)?;
        let leaf_pages = LEAF_PAGES as u64;
        let mut copied = 0;
        for (at, leaf) in parent.directory.range(0, u64::MAX) {
            let mut words = [0; LEAF_PAGES];
            {
                let _guard = lock(&self.cluster_shard(from, at).lock);
                if parent.directory.get(at) == Some(leaf) {
                    for (word, shown) in words.iter_mut().zip(self.arena.leaf(leaf)) {
                        *word = shown.load(Ordering::Acquire);
                        self.share_word(*word);
                    }
                }
            }
            for (index, word) in words.iter().enumerate().filter(|(_, word)| **word != 0) {
                if let Err(error) = self.publish(&child, at * leaf_pages + index as u64, *word) {
                    words[index..].iter().for_each(|word| self.release_word(*word));
                    self.remove_region(to);
                    return Err(self.refuse(error));
                }
                copied += 1;
            }
        }
        Ok(copied)
    }

    /// Has page `to` of a region show what page `from` shows, instead of what it did; nothing is copied but the page word, and a
    /// successor finds `to` as it was or as it is. False if `from` is not here; then nothing is done.
    ///
    /// # Errors
    /// As [`Tier::store`].
    pub fn copy_page(&self, region: u32, from: u64, to: u64) -> Result<bool, StoreError> {
        let Some(found) = self.region(region) else { return Ok(false) };
        let (cluster, index) = (from / LEAF_PAGES as u64, from as usize % LEAF_PAGES);
        let word = {
            let _guard = lock(&self.cluster_shard(region, cluster).lock);
            let leaf = found.directory.get(cluster);
            let word = leaf.map_or(0, |leaf| self.arena.leaf(leaf)[index].load(Ordering::Acquire));
            self.share_word(word);
            word
        };
        if word == 0 {
            return Ok(false);
        }
        self.show(region, to, word).map(|()| true)
    }

    /// Says of a page that it was here and cannot be had: loads of it are errors.
    ///
    /// # Errors
    /// As [`Tier::store`].
    pub fn lose_page(&self, region: u32, page: u64) -> Result<(), StoreError> {
        self.show(region, page, Shown::Lost.word())
    }

    /// Publishes a word of ours.
    fn show(&self, region: u32, page: u64, word: u64) -> Result<(), StoreError> {
        let shown = self
            .region_or_new(region, page, None)
            .and_then(|region| self.publish(&region, page, word).map_err(|error| self.refuse(error)));
        shown.inspect_err(|_| self.release_word(word))
    }

    /// Pages of a region that were brought back since the last call, in order: what to prefetch on unpark.
    pub fn take_touched(&self, region: u32) -> Vec<u64> {
        self.region(region).map(|region| region.take_touched()).unwrap_or_default()
    }
}
