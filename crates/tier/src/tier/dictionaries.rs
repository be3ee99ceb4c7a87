//! The domain's dictionaries: sampling, training, publishing, loading.

use super::{SAMPLES, Tier};
use crate::codec::{self, Dictionary};
use crate::layout::{self, DICTIONARIES, DICTIONARY_BYTES, MAGIC, superblock};
use crate::stats::count;
use pagefold_os::sync::lock;
use pagefold_os::{PAGE_SIZE, Page};
use std::sync::atomic::Ordering;
use twox_hash::XxHash3_64;

impl Tier {
    /// Samples every fourth densely stored page until there are enough to train a dictionary from. Pages stored fast are
    /// sampled by the cleaner, because training takes as long as storing ten thousand of them.
    pub(super) fn sample(&self, data: &Page) {
        if self.dictionary.load(Ordering::Relaxed) != 0 {
            return;
        }
        let full = {
            // Never waits: a page may stay unsampled.
            let Ok(mut samples) = self.samples.try_lock() else { return };
            samples.seen += 1;
            if samples.done || samples.seen % 4 != 0 {
                return;
            }
            samples.pages.extend_from_slice(data);
            if samples.pages.len() < SAMPLES * PAGE_SIZE {
                return;
            }
            samples.done = true;
            std::mem::take(&mut samples.pages)
        };
        self.train_on(&full);
    }

    /// Returns true if the first dictionary is still to be trained.
    pub(crate) fn is_sampling(&self) -> bool {
        self.dictionary.load(Ordering::Relaxed) == 0 && !lock(&self.samples).done
    }

    /// Ends sampling, because the caller has enough samples; false if another thread had ended it.
    pub(crate) fn stop_sampling(&self) -> bool {
        let mut samples = lock(&self.samples);
        samples.pages = Vec::new();
        !std::mem::replace(&mut samples.done, true)
    }

    /// Trains a dictionary from sample pages (whole pages, one after the other) and uses it for later dense stores.
    /// Returns false if the samples make none, or if there are 15 dictionaries already.
    pub fn train_on(&self, samples: &[u8]) -> bool {
        let Some(bytes) = codec::train(samples) else { return false };
        self.install_dictionary(&bytes)
    }

    pub(super) fn install_dictionary(&self, bytes: &[u8]) -> bool {
        let _one_at_a_time = lock(&self.cleaner);
        let directory = |number: usize| self.arena.word(superblock::DICTIONARIES + number - 1);
        let Some(number) = (1..=DICTIONARIES).find(|number| directory(*number).load(Ordering::Relaxed) == 0) else {
            return false;
        };
        if number == 1 && self.arena.allocate_dictionaries().is_err() {
            return false;
        }
        let words = &self.arena.words()[layout::dictionary_word(number)..][..DICTIONARY_BYTES / 8];
        for (word, chunk) in words.iter().zip(bytes.chunks(8)) {
            let mut eight = [0; 8];
            eight[..chunk.len()].copy_from_slice(chunk);
            word.store(u64::from_le_bytes(eight), Ordering::Relaxed);
        }
        // Publishes the dictionary, before any content uses it.
        directory(number).store(bytes.len() as u64 | dictionary_check(bytes) << 32, Ordering::Release);
        self.load_dictionary(number)
    }

    /// Loads dictionary `number` of the arena, if it is complete.
    pub(crate) fn load_dictionary(&self, number: usize) -> bool {
        let entry = self.arena.word(superblock::DICTIONARIES + number - 1).load(Ordering::Acquire);
        let len = (entry & 0xffff_ffff) as usize;
        if len == 0 || len > DICTIONARY_BYTES {
            return false;
        }
        let words = &self.arena.words()[layout::dictionary_word(number)..][..len.div_ceil(8)];
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect();
        bytes.truncate(len);
        if dictionary_check(&bytes) != entry >> 32 {
            return false;
        }
        let Some(dictionary) = Dictionary::new(number as u8, &bytes) else { return false };
        let number = dictionary.number();
        if self.dictionaries[usize::from(number) - 1].set(dictionary).is_ok() {
            self.dictionary.store(number, Ordering::Release);
            count(&self.counters.dictionaries);
        }
        true
    }
}

/// Checksum of a dictionary, 32 bits, never 0 with a length of 0.
fn dictionary_check(bytes: &[u8]) -> u64 {
    XxHash3_64::oneshot_with_seed(MAGIC, bytes) >> 32
}
