//! Content lookup: which content of the arena has this fingerprint, and which is near to it.
//!
//! The exact index is a hash set of content offsets, five bytes and a control
//! byte each; the fingerprint itself stands in the content's header. A
//! fingerprint only finds: equality is proven on the bytes by the caller.
//!
//! The index of near pages is a table of fixed size: each page is entered
//! under the hashes of four of its 64-byte blocks, at places that the domain's
//! key chooses, and newer pages push older ones out. Losing an entry loses a
//! chance to save, nothing else.

use crate::arena::lock;
use hashbrown::HashTable;
use pagefold_os::{PAGE_SIZE, Page};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use twox_hash::XxHash3_64;

const SHARDS: usize = 256;
/// Blocks looked at per page.
const SAMPLES: usize = 4;
const BLOCK: usize = 64;
const AT_BITS: u32 = 40;

/// The domain's hash functions.
pub(crate) struct Hasher {
    secret: [u8; 192],
    samples: [usize; SAMPLES],
    seed: u64,
}

impl std::fmt::Debug for Hasher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hasher") // never the key
    }
}

impl Hasher {
    /// Derives them from the domain's key.
    pub(crate) fn new(key: [u64; 2]) -> Hasher {
        let mut secret = [0; 192];
        for (index, chunk) in secret.chunks_exact_mut(8).enumerate() {
            let mut input = [0; 16];
            input[..8].copy_from_slice(&key[1].to_le_bytes());
            input[8..].copy_from_slice(&(index as u64).to_le_bytes());
            chunk.copy_from_slice(&XxHash3_64::oneshot_with_seed(key[0], &input).to_le_bytes());
        }
        let quarter = PAGE_SIZE / BLOCK / SAMPLES;
        let samples = std::array::from_fn(|index| (index * quarter + secret[index] as usize % quarter) * BLOCK);
        Hasher { secret, samples, seed: key[0] ^ key[1].rotate_left(32) }
    }

    /// Fingerprint of a page.
    pub(crate) fn fingerprint(&self, page: &Page) -> u64 {
        XxHash3_64::oneshot_with_secret(&self.secret, page).expect("192 bytes are a secret")
    }

    /// Hashes of the sampled blocks that are not all one byte.
    fn samples(&self, page: &Page) -> impl Iterator<Item = u64> {
        let blocks = self.samples.map(|at| &page[at..at + BLOCK]);
        let seed = self.seed;
        blocks.into_iter().enumerate().filter_map(move |(index, block)| {
            let plain = block.iter().all(|byte| *byte == block[0]);
            (!plain).then(|| XxHash3_64::oneshot_with_seed(seed.wrapping_add(index as u64), block))
        })
    }
}

/// A content offset in five bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
struct At([u8; 5]);

impl At {
    fn new(at: usize) -> At {
        let bytes = (at as u64).to_le_bytes();
        At([bytes[0], bytes[1], bytes[2], bytes[3], bytes[4]])
    }

    fn get(self) -> usize {
        let [a, b, c, d, e] = self.0;
        u64::from_le_bytes([a, b, c, d, e, 0, 0, 0]) as usize
    }
}

/// One part of the exact index, locked.
pub(crate) struct Shard<'a> {
    table: MutexGuard<'a, HashTable<At>>,
    fingerprint: u64,
    words: &'a [AtomicU64],
}

impl Shard<'_> {
    /// The content that has the fingerprint.
    pub(crate) fn find(&self) -> Option<usize> {
        let (words, fingerprint) = (self.words, self.fingerprint);
        let found = self.table.find(spread(fingerprint), |at| words[at.get()].load(Ordering::Relaxed) == fingerprint);
        found.map(|at| at.get())
    }

    /// True if the content at `at` is the one in the index.
    pub(crate) fn holds(&self, at: usize) -> bool {
        self.table.find(spread(self.fingerprint), |other| *other == At::new(at)).is_some()
    }

    /// Enters a content whose header is written, unless its fingerprint is there.
    pub(crate) fn insert(&mut self, at: usize) -> bool {
        if self.find().is_some() {
            return false;
        }
        let words = self.words;
        self.table
            .insert_unique(spread(self.fingerprint), At::new(at), |at| spread(words[at.get()].load(Ordering::Relaxed)));
        true
    }

    /// Takes the content at `at` out, if it is in.
    pub(crate) fn remove(&mut self, at: usize) {
        if let Ok(entry) = self.table.find_entry(spread(self.fingerprint), |other| *other == At::new(at)) {
            entry.remove();
        }
    }
}

/// The low bits choose the shard; the table wants its bits from elsewhere.
fn spread(fingerprint: u64) -> u64 {
    fingerprint.rotate_left(24)
}

/// Both indexes.
#[derive(Debug)]
pub(crate) struct Contents {
    shards: Vec<Mutex<HashTable<At>>>,
    near: Vec<AtomicU64>,
}

impl std::fmt::Debug for At {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.get())
    }
}

impl Contents {
    /// Makes empty indexes; `near_entries` of 0 finds no near pages.
    pub(crate) fn new(near_entries: usize) -> Contents {
        let entries = if near_entries == 0 { 0 } else { near_entries.next_power_of_two() };
        Contents {
            shards: (0..SHARDS).map(|_| Mutex::new(HashTable::new())).collect(),
            near: (0..entries).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Locks the part that a fingerprint belongs to.
    pub(crate) fn shard<'a>(&'a self, fingerprint: u64, words: &'a [AtomicU64]) -> Shard<'a> {
        Shard { table: lock(&self.shards[fingerprint as usize % SHARDS]), fingerprint, words }
    }

    /// Contents that share sampled blocks with the page, those that share most first.
    pub(crate) fn near(&self, hasher: &Hasher, page: &Page) -> impl Iterator<Item = usize> + use<> {
        let mut found = [(0_usize, 0_usize); SAMPLES];
        let mut count = 0;
        if !self.near.is_empty() {
            for hash in hasher.samples(page) {
                let entry = self.near[hash as usize & (self.near.len() - 1)].load(Ordering::Relaxed);
                if entry == 0 || entry >> AT_BITS != hash >> AT_BITS {
                    continue;
                }
                let at = (entry & ((1 << AT_BITS) - 1)) as usize;
                match found[..count].iter_mut().find(|(other, _)| *other == at) {
                    Some((_, hits)) => *hits += 1,
                    None => {
                        found[count] = (at, 1);
                        count += 1;
                    }
                }
            }
        }
        found[..count].sort_by_key(|(_, hits)| std::cmp::Reverse(*hits));
        found.into_iter().take(count).map(|(at, _)| at)
    }

    /// Lets later pages find this one as a base.
    pub(crate) fn remember(&self, hasher: &Hasher, page: &Page, at: usize) {
        if self.near.is_empty() {
            return;
        }
        for hash in hasher.samples(page) {
            let entry = hash >> AT_BITS << AT_BITS | at as u64;
            self.near[hash as usize & (self.near.len() - 1)].store(entry, Ordering::Relaxed);
        }
    }

    /// Bytes of both.
    pub(crate) fn bytes(&self) -> u64 {
        let tables: usize = self.shards.iter().map(|shard| lock(shard).allocation_size()).sum();
        (tables + self.near.len() * 8 + SHARDS * size_of::<Mutex<HashTable<At>>>()) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_change_fingerprints_and_samples_ignore_plain_blocks() {
        let page = [7; PAGE_SIZE];
        let (one, two) = (Hasher::new([1, 2]), Hasher::new([1, 3]));
        assert_ne!(one.fingerprint(&page), two.fingerprint(&page));
        assert_eq!(one.samples(&page).count(), 0);
        let varied: Page = std::array::from_fn(|at| ((at * at) >> 3) as u8);
        assert_eq!(one.samples(&varied).count(), SAMPLES);
    }

    #[test]
    fn a_near_page_is_found_and_a_far_one_is_not() {
        let hasher = Hasher::new([5, 6]);
        let contents = Contents::new(1000);
        let page: Page = std::array::from_fn(|at| ((at * at) >> 3) as u8);
        contents.remember(&hasher, &page, 77);
        let mut near = page;
        near[hasher.samples[0]] ^= 1;
        assert_eq!(contents.near(&hasher, &near).collect::<Vec<_>>(), [77]);
        let far: Page = std::array::from_fn(|at| ((at * 31) >> 2) as u8);
        assert_eq!(contents.near(&hasher, &far).count(), 0);
    }
}
