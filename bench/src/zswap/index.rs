//! Page offsets in the tier's index and in a red-black tree, the structure that the source's patch replaced.
//!
//! The offsets are single pages scattered over 2^33, as of large mappings with few cold pages, in random order. The source says
//! that lookups take a while from 100,000 entries on.

use super::measure::Area;
use super::row::Row;
use crate::index::registry;
use crate::stats::{Spread, median};
use bench_peers::Map;
use llds::b_tree::BTree;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

const ENTRIES: usize = 100_000;
const PHASES: [&str; 4] = ["insert Mop/s", "lookup Mop/s", "replace Mop/s", "erase Mop/s"];

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

/// Measures both, in turn; the red-black tree in a build with the feature `cpp-peers` alone.
pub fn measure(rounds: usize) -> io::Result<Vec<Row>> {
    let peer = registry::all().into_iter().find(|maker| maker.0 == "rb-tree-lock");
    let mut runs: [(&str, Vec<[f64; 4]>); 2] = [("tier-b-tree", Vec::new()), ("rb-tree-lock", Vec::new())];
    for _ in 0..rounds {
        runs[0].1.push(rates(&Leaves::new(ENTRIES)?));
        runs[1].1.extend(peer.iter().map(|peer| rates(&*(peer.1)(ENTRIES))));
    }
    let rows = runs.into_iter().filter(|(_, runs)| !runs.is_empty()).map(|(name, runs)| {
        let column = |index: usize| runs.iter().map(move |run| run[index]);
        let mut figures: Vec<(&'static str, f64)> =
            PHASES.iter().enumerate().map(|(index, name)| (*name, median(column(index)))).collect();
        figures.push(("spread of lookups %", Spread::of(column(1)).half_range_percent()));
        Row { part: "index", name: name.to_owned(), on: format!("{ENTRIES} sparse, 1 thr, wall"), figures }
    });
    Ok(rows.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_are_distinct() {
        for entries in [1000, 1024, 100_000] {
            let mut keys: Vec<u64> = (0..entries).map(|index| offset(index, entries)).collect();
            keys.sort_unstable();
            keys.dedup();
            assert_eq!(keys.len() as u64, entries);
            assert!(keys.iter().all(|key| *key < 1 << 33));
        }
    }

    #[test]
    fn the_tiers_structure_is_a_map() {
        let map = Leaves::new(5000).unwrap();
        let keys = || (0..5000).map(|index| (offset(index, 5000), index + 1));
        assert!(keys().all(|(key, value)| map.insert(key, value)));
        for (key, value) in keys() {
            assert_eq!(map.get(key), Some(value));
            assert!(map.replace(key, value, value + 1) && map.get(key) == Some(value + 1));
            assert!(map.remove(key, value + 1) && map.get(key).is_none() && !map.remove(key, 0));
        }
    }
}
