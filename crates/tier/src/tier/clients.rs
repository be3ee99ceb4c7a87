//! Ranges of pages and whole clients: discard, remove, fork.

use super::Tier;
use crate::error::StoreError;
use crate::layout::{LEAF_PAGES, PAGES_MAX, Shown};
use pagefold_os::sync::{lock, write};
use std::ops::Range;
use std::sync::atomic::Ordering;

impl Tier {
    /// Discards the pages of a range; returns how many there were.
    pub fn discard(&self, client: u32, pages: Range<u64>) -> u64 {
        let Some(found) = self.client(client) else { return 0 };
        let leaf_pages = LEAF_PAGES as u64;
        let mut discarded = 0;
        for (at, leaf) in found.directory.range(pages.start / leaf_pages, pages.end.div_ceil(leaf_pages)) {
            let mut old = [0; LEAF_PAGES];
            let shard = self.cluster_shard(client, at);
            let guard = lock(&shard.lock);
            // The leaf may have been freed since it was found.
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

    /// Removes a client and its pages; returns how many pages there were.
    ///
    /// The caller must not store pages of the client meanwhile.
    pub fn remove_client(&self, client: u32) -> u64 {
        let discarded = self.discard(client, 0..PAGES_MAX);
        let removed = write(&self.clients).remove(&client);
        if let Some(leaf) = removed.and_then(|client| client.record.get().copied()) {
            self.arena.leaf_key(leaf).store(0, Ordering::Release);
            self.arena.leaf(leaf)[0].store(0, Ordering::Release);
            self.arena.free_leaf(leaf);
        }
        discarded
    }

    /// Gives client `to` the pages of client `from`, as for the child of a fork. Copies page words only.
    ///
    /// Returns the pages of `to`.
    ///
    /// # Errors
    /// As [`Tier::store`]; `to` is then empty.
    pub fn fork_client(&self, from: u32, to: u32) -> Result<u64, StoreError> {
        let Some(parent) = self.client(from) else { return Ok(0) };
        if let Some(pages) = parent.pages {
            self.add_client(to, pages)?;
        }
        let child = self.client_or_new(to, 0, None)?;
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
                    self.remove_client(to);
                    return Err(self.refuse(error));
                }
                copied += 1;
            }
        }
        Ok(copied)
    }

    /// Gives page `to` of a client the content of page `from`. Copies the page word only; a successor finds the old word or
    /// the new one. Returns false, and does nothing, if the tier does not hold `from`.
    ///
    /// # Errors
    /// As [`Tier::store`].
    pub fn copy_page(&self, client: u32, from: u64, to: u64) -> Result<bool, StoreError> {
        let Some(found) = self.client(client) else { return Ok(false) };
        let (cluster, index) = (from / LEAF_PAGES as u64, from as usize % LEAF_PAGES);
        let word = {
            let _guard = lock(&self.cluster_shard(client, cluster).lock);
            let leaf = found.directory.get(cluster);
            let word = leaf.map_or(0, |leaf| self.arena.leaf(leaf)[index].load(Ordering::Acquire));
            self.share_word(word);
            word
        };
        if word == 0 {
            return Ok(false);
        }
        self.show(client, to, word).map(|()| true)
    }

    /// Marks a page as lost: loads of it fail.
    ///
    /// # Errors
    /// As [`Tier::store`].
    pub fn lose_page(&self, client: u32, page: u64) -> Result<(), StoreError> {
        self.show(client, page, Shown::Lost.word())
    }

    /// Publishes a word; the caller's reference passes to the page.
    fn show(&self, client: u32, page: u64, word: u64) -> Result<(), StoreError> {
        let shown = self
            .client_or_new(client, page, None)
            .and_then(|client| self.publish(&client, page, word).map_err(|error| self.refuse(error)));
        shown.inspect_err(|_| self.release_word(word))
    }

    /// The pages of a client that were loaded since the last call, in order: those to prefetch on unpark.
    pub fn take_touched(&self, client: u32) -> Vec<u64> {
        self.client(client).map(|client| client.take_touched()).unwrap_or_default()
    }
}
