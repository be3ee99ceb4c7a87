//! Content lookup: which content of the arena has a given fingerprint, and which contents are near to a page.
//!
//! The exact index is a hash set of content offsets, five bytes and a control
//! byte each; the fingerprint itself stands in the content's header. A
//! fingerprint only finds a candidate: the caller compares the bytes.
//!
//! The index of near pages is a table without chains: each page is entered
//! under the hashes of four of its 64-byte blocks, at offsets that the domain's
//! key chooses, and newer pages replace older ones. A lost entry only loses a
//! chance to save memory. The table grows with the pages entered.

use hashbrown::HashTable;
use pagefold_os::sync::lock;
use pagefold_os::{PAGE_SIZE, Page};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};
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

    /// Hashes of the sampled blocks, without blocks of one repeated byte.
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

    /// Returns true if the content at `at` is the one in the index.
    pub(crate) fn holds(&self, at: usize) -> bool {
        self.table.find(spread(self.fingerprint), |other| *other == At::new(at)).is_some()
    }

    /// Enters a content with a written header, unless its fingerprint is there.
    pub(crate) fn insert(&mut self, at: usize) -> bool {
        if self.find().is_some() {
            return false;
        }
        let words = self.words;
        self.table
            .insert_unique(spread(self.fingerprint), At::new(at), |at| spread(words[at.get()].load(Ordering::Relaxed)));
        true
    }

    /// Removes the content at `at`, if it is in the index.
    pub(crate) fn remove(&mut self, at: usize) {
        if let Ok(entry) = self.table.find_entry(spread(self.fingerprint), |other| *other == At::new(at)) {
            entry.remove();
        }
    }
}

/// The low bits choose the shard, so the table uses other ones.
fn spread(fingerprint: u64) -> u64 {
    fingerprint.rotate_left(24)
}

/// Entries of the smallest table of near pages.
const NEAR_MIN: usize = 1 << 10;
/// Most doublings of it: 2^30 entries.
const NEAR_DOUBLINGS: usize = 20;

/// Which content has a block: 8 bytes per entry, [`AT_BITS`] bits for the content, the others for the block's hash.
///
/// Part `k` holds as many entries as all parts before it, so the table doubles without moving.
#[derive(Debug, Default)]
struct Near {
    parts: [OnceLock<Box<[AtomicU64]>>; NEAR_DOUBLINGS + 1],
    /// Entries in use, a power of two; 0 finds nothing.
    len: AtomicUsize,
    len_max: usize,
    remembered: AtomicUsize,
}

impl Near {
    fn new(len_max: usize) -> Near {
        let mut near = Near::default();
        if len_max > 0 {
            near.len_max = len_max.next_power_of_two().clamp(NEAR_MIN, NEAR_MIN << NEAR_DOUBLINGS);
            near.grow(0);
        }
        near
    }

    fn is_empty(&self) -> bool {
        self.len_max == 0
    }

    /// Doubles the table from `len` entries. Of several threads the first does it.
    fn grow(&self, len: usize) {
        let (part, _) = Near::part_of(len);
        let fresh = || -> Box<[AtomicU64]> {
            // An entry found under the shorter hash is copied, so that it is found under the longer one in either half.
            (0..len.max(NEAR_MIN)).map(|at| AtomicU64::new(if len == 0 { 0 } else { self.load(at) })).collect()
        };
        self.parts[part].get_or_init(fresh);
        let _ = self.len.compare_exchange(len, (len * 2).max(NEAR_MIN), Ordering::Release, Ordering::Relaxed);
    }

    /// The part that has entry `at`, and the entry's index there.
    fn part_of(at: usize) -> (usize, usize) {
        (at / NEAR_MIN).checked_ilog2().map_or((0, at), |log| (log as usize + 1, at - (NEAR_MIN << log)))
    }

    fn entry(&self, at: usize) -> Option<&AtomicU64> {
        let (part, index) = Near::part_of(at);
        self.parts[part].get()?.get(index)
    }

    fn load(&self, at: usize) -> u64 {
        self.entry(at).map_or(0, |entry| entry.load(Ordering::Relaxed))
    }

    fn slot(&self, hash: u64) -> usize {
        hash as usize & (self.len.load(Ordering::Acquire) - 1)
    }

    /// The content that was last entered under `hash`.
    fn find(&self, hash: u64) -> Option<usize> {
        let entry = self.load(self.slot(hash));
        (entry != 0 && entry >> AT_BITS == hash >> AT_BITS).then_some((entry & ((1 << AT_BITS) - 1)) as usize)
    }

    fn enter(&self, hash: u64, at: usize) {
        if let Some(entry) = self.entry(self.slot(hash)) {
            entry.store(hash >> AT_BITS << AT_BITS | at as u64, Ordering::Relaxed);
        }
    }

    /// Counts a page that was entered, and grows the table to as many entries as there are pages.
    fn count_page(&self) {
        let pages = self.remembered.fetch_add(1, Ordering::Relaxed);
        let len = self.len.load(Ordering::Relaxed);
        if pages >= len && len < self.len_max {
            self.grow(len);
        }
    }

    fn bytes(&self) -> usize {
        self.len.load(Ordering::Relaxed) * 8
    }
}

/// How much patches have saved lately. On unrelated pages they cost time and save nothing.
#[derive(Debug, Default)]
pub(crate) struct PatchBenefit {
    skipped: AtomicU32,
    tries: AtomicU32,
    saved_bytes: AtomicU32,
}

impl PatchBenefit {
    /// Tries after which the average counts, and after which it is halved.
    const TRIES: (u32, u32) = (256, 4096);
    /// Bytes that a try must save on average.
    const SAVED_MIN: u32 = 48;
    /// If patches do not pay, one of this many pages is tried.
    const ONE_IN: u32 = 16;

    /// Returns true if a patch for the next page is worth a try.
    pub(crate) fn is_worth_trying(&self) -> bool {
        let tries = self.tries.load(Ordering::Relaxed);
        let pays = tries < Self::TRIES.0 || self.saved_bytes.load(Ordering::Relaxed) / tries >= Self::SAVED_MIN;
        pays || self.skipped.fetch_add(1, Ordering::Relaxed).is_multiple_of(Self::ONE_IN)
    }

    /// Notes a try that saved so much.
    pub(crate) fn note(&self, saved_bytes: usize) {
        self.saved_bytes.fetch_add(saved_bytes as u32, Ordering::Relaxed);
        if self.tries.fetch_add(1, Ordering::Relaxed) + 1 >= Self::TRIES.1 {
            // Concurrent calls may lose a few tries, which does not matter.
            self.tries.store(Self::TRIES.1 / 2, Ordering::Relaxed);
            self.saved_bytes.store(self.saved_bytes.load(Ordering::Relaxed) / 2, Ordering::Relaxed);
        }
    }
}

/// Both indexes.
#[derive(Debug)]
pub(crate) struct Contents {
    shards: Vec<Mutex<HashTable<At>>>,
    near: Near,
    pub(crate) patch_benefit: PatchBenefit,
}

impl std::fmt::Debug for At {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.get())
    }
}

impl Contents {
    /// Makes empty indexes, with at most about `near_entries` for near pages; 0 finds none.
    pub(crate) fn new(near_entries: usize) -> Contents {
        let shards = (0..SHARDS).map(|_| Mutex::new(HashTable::new())).collect();
        Contents { shards, near: Near::new(near_entries), patch_benefit: PatchBenefit::default() }
    }

    /// Locks the part that a fingerprint belongs to.
    pub(crate) fn shard<'a>(&'a self, fingerprint: u64, words: &'a [AtomicU64]) -> Shard<'a> {
        Shard { table: lock(&self.shards[fingerprint as usize % SHARDS]), fingerprint, words }
    }

    /// Contents that share sampled blocks with the page, those with the most shared blocks first.
    pub(crate) fn near(&self, hasher: &Hasher, page: &Page) -> impl Iterator<Item = usize> + use<> {
        let mut found = [(0_usize, 0_usize); SAMPLES];
        let mut count = 0;
        if !self.near.is_empty() {
            for at in hasher.samples(page).filter_map(|hash| self.near.find(hash)) {
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

    /// Enters a page, so that later pages find it as a base.
    pub(crate) fn remember(&self, hasher: &Hasher, page: &Page, at: usize) {
        if !self.near.is_empty() {
            hasher.samples(page).for_each(|hash| self.near.enter(hash, at));
            self.near.count_page();
        }
    }

    /// Bytes of both.
    pub(crate) fn bytes(&self) -> u64 {
        let tables: usize = self.shards.iter().map(|shard| lock(shard).allocation_size()).sum();
        (tables + self.near.bytes() + SHARDS * size_of::<Mutex<HashTable<At>>>()) as u64
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

    #[test]
    fn the_near_table_grows_with_its_pages_and_loses_few() {
        let near = Near::new(1 << 14);
        assert_eq!(near.bytes(), NEAR_MIN * 8);
        let hash = |page: u64| XxHash3_64::oneshot_with_seed(9, &page.to_le_bytes());
        let pages = 5000;
        for page in 0..pages {
            near.enter(hash(page), page as usize + 1);
            near.count_page();
        }
        assert_eq!(near.bytes(), 8192 * 8);
        let kept = (0..pages).filter(|page| near.find(hash(*page)) == Some(*page as usize + 1)).count();
        // Of 5000 pages in 8192 entries a quarter is replaced by chance, and more of the first ones, in smaller tables.
        assert!(kept > 2500, "{kept} of {pages}");
        (0..1 << 16).for_each(|_| near.count_page());
        assert_eq!(near.bytes(), (1 << 14) * 8);
    }

    #[test]
    fn patches_that_do_not_pay_are_tried_seldom_until_they_pay_again() {
        let benefit = PatchBenefit::default();
        let tried = |saved: usize, pages: usize| {
            (0..pages).filter(|_| benefit.is_worth_trying()).map(|_| benefit.note(saved)).count()
        };
        assert_eq!(tried(400, 10_000), 10_000);
        assert!(tried(0, 100_000) < 20_000);
        assert!(tried(0, 16_000) <= 1_000);
        tried(400, 40_000);
        assert_eq!(tried(400, 1_000), 1_000);
    }
}
