//! Page offsets in the tier's index and in a red-black tree, the structure that the source's patch replaced.
//!
//! The offsets are single pages scattered over 2^33, as of large mappings with few cold pages, in random order. The source
//! says that lookups take a while from 100,000 entries on.

use super::measure::Area;
use super::row;
use crate::index::registry;
use crate::process::Failure;
use crate::stats::median;
use bench_peers::Map;
use llds::b_tree::BTree;
use serde_json::{Value, json};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

const ENTRIES: usize = 100_000;

/// Page `index` of `entries` in random order: a bijection of 0 to the next power of two, walked on until it fits.
fn offset(index: u64, entries: u64) -> u64 {
    let bits = (64 - (entries - 1).leading_zeros()).max(2);
    let mask = (1 << bits) - 1;
    let mut at = index;
    loop {
        for (multiplier, shift) in [(0x9e37_79b9_7f4a_7c15_u64, bits / 2), (0xd6e8_feb8_6659_fd93, bits / 2 + 1)] {
            at = (at.wrapping_mul(multiplier | 1)) & mask;
            at ^= at >> shift;
        }
        if at < entries {
            break;
        }
    }
    // Far apart, and each in a cluster of its own.
    (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 31) & !7 | at & 7
}

/// The tier's structure: leaves of eight words, found by cluster through a B-tree.
struct Leaves {
    tree: BTree<u64>,
    /// Takes memory when it is touched.
    words: Area,
    next: AtomicU64,
}

impl Leaves {
    fn new(entries: usize) -> io::Result<Leaves> {
        let tree = BTree::new().map_err(io::Error::other)?;
        Ok(Leaves { tree, words: Area::new((entries + 1) * 64)?, next: AtomicU64::new(1) })
    }

    fn word(&self, leaf: u64, key: u64) -> &AtomicU64 {
        let at = (leaf * 8 + key % 8) as usize;
        assert!(at < self.words.0.len() / 8);
        // SAFETY: inside the mapping, as just checked; zeroed memory is an AtomicU64, and every access to it is atomic.
        unsafe { &*self.words.0.as_ptr().cast::<AtomicU64>().add(at) }
    }
}

impl Map for Leaves {
    fn get(&self, key: u64) -> Option<u64> {
        let word = self.word(self.tree.get(key / 8)?, key).load(Ordering::Acquire);
        Some(word).filter(|word| *word != 0)
    }

    fn insert(&self, key: u64, value: u64) -> bool {
        let leaf = self.tree.get(key / 8).unwrap_or_else(|| {
            let made = self.next.fetch_add(1, Ordering::Relaxed);
            self.tree.get_or_insert(key / 8, made).expect("room").unwrap_or(made)
        });
        self.word(leaf, key).swap(value, Ordering::AcqRel) == 0
    }

    fn remove(&self, key: u64, _: u64) -> bool {
        let Some(leaf) = self.tree.get(key / 8) else { return false };
        let is_there = self.word(leaf, key).swap(0, Ordering::AcqRel) != 0;
        // The tier frees an empty leaf and removes its key.
        if (0..8).all(|word| self.word(leaf, word).load(Ordering::Relaxed) == 0) {
            self.tree.remove(key / 8);
        }
        is_there
    }

    fn replace(&self, key: u64, _old: u64, value: u64) -> bool {
        !self.insert(key, value)
    }
}

/// The rates of the phases, in million operations per second.
fn rates(map: &dyn Map) -> [f64; 4] {
    let phase = |act: &dyn Fn(u64) -> bool| {
        let start = Instant::now();
        for index in 0..ENTRIES as u64 {
            assert!(act(offset(index, ENTRIES as u64)), "a wrong answer");
        }
        ENTRIES as f64 / start.elapsed().as_secs_f64() / 1e6
    };
    [
        phase(&|key| map.insert(key, key << 1 | 1)),
        phase(&|key| map.get(key) == Some(key << 1 | 1)),
        phase(&|key| map.replace(key, key << 1 | 1, key << 1 | 3)),
        phase(&|key| map.remove(key, key << 1 | 3)),
    ]
}

/// Measures both, in turn; the red-black tree in a build with the feature `peers` alone.
pub fn measure(rounds: usize) -> Result<Vec<Value>, Failure> {
    let peer = registry::all().into_iter().find(|maker| maker.0 == "rb-tree-lock");
    let mut runs: [(&str, Vec<[f64; 4]>); 2] = [("tier-b-tree", Vec::new()), ("rb-tree-lock", Vec::new())];
    for _ in 0..rounds {
        runs[0].1.push(rates(&Leaves::new(ENTRIES)?));
        runs[1].1.extend(peer.iter().map(|peer| rates(&*(peer.1)(ENTRIES))));
    }
    let rows = runs.into_iter().filter(|(_, runs)| !runs.is_empty()).map(|(name, runs)| {
        let column = |index: usize| runs.iter().map(move |run| run[index]);
        let figures = json!({ "insert Mop/s": median(column(0)), "lookup Mop/s": median(column(1)),
            "replace Mop/s": median(column(2)), "erase Mop/s": median(column(3)) });
        row::of("index", name, &format!("{ENTRIES} sparse, 1 thr, wall"), figures)
    });
    Ok(rows.collect())
}
