//! Page offsets in and out of maps: insert, lookup, replace, erase, in random order.
//!
//! *dense*: the offsets 0 to n, as of a mapping that was evicted whole. *sparse*: single pages scattered over 2^33, as of
//! large mappings with few cold pages. The tier's own indexes are here as they are used there: a leaf of eight
//! words, found through a flat array or through the B-tree.

use super::row::Row;
use crate::index::{registry, run::resident_bytes};
use crate::process;
use crate::stats::{Spread, median};
use bench_peers::{Map, map};
use llds::b_tree::BTree;
use std::alloc::Layout;
use std::process::ExitCode;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

/// Ordered structures of the other benchmark that are run here too.
const ORDERED: &[&str] = &[
    "b-tree",
    "std-btree-lock",
    "rb-tree-lock",
    "absl-btree-lock",
    "scc-tree-index",
    "skiplist",
    "congee",
    "masstree",
];
const OWN: &[&str] = &["flat-array", "radix-64", "tier-flat", "tier-b-tree"];
const PHASES: [&str; 4] = ["insert Mop/s", "lookup Mop/s", "replace Mop/s", "erase Mop/s"];

/// Page `index` of `entries` in random order: a bijection of 0 to the next power of two, walked on until it fits.
fn offset(index: u64, entries: u64, dense: bool) -> u64 {
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
    if dense { at } else { (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 31) & !7 | at & 7 }
}

/// One word per page: 8 bytes each, whatever is there.
struct FlatArray(Vec<AtomicU64>);

map! { FlatArray, map, key, value,
    Some(map.0.get(key as usize)?.load(Ordering::Acquire)).filter(|value| *value != 0),
    map.0[key as usize].swap(value, Ordering::AcqRel) == 0,
    map.0[key as usize].swap(0, Ordering::AcqRel) != 0,
    fn replace(&self, key: u64, _old: u64, value: u64) -> bool {
        !self.insert(key, value)
    }
}

/// A radix tree of 64-way nodes over 36 bits, as the kernel's xarray: nodes are made on the way down and stay.
struct Radix {
    root: Node,
}

struct Node([AtomicPtr<Node>; 64]);

const RADIX_LEVELS: u32 = 6;

impl Node {
    fn new() -> Node {
        Node(std::array::from_fn(|_| AtomicPtr::new(std::ptr::null_mut())))
    }

    /// The slot of `key`; the last level holds values in place of pointers.
    fn slot(&self, key: u64, make: bool) -> Option<&AtomicPtr<Node>> {
        let mut node = self;
        for level in (1..RADIX_LEVELS).rev() {
            let slot = &node.0[(key >> (6 * level)) as usize % 64];
            let mut child = slot.load(Ordering::Acquire);
            if child.is_null() {
                if !make {
                    return None;
                }
                let made = Box::into_raw(Box::new(Node::new()));
                match slot.compare_exchange(child, made, Ordering::AcqRel, Ordering::Acquire) {
                    Ok(_) => child = made,
                    Err(other) => {
                        // SAFETY: `made` was made above and never published.
                        drop(unsafe { Box::from_raw(made) });
                        child = other;
                    }
                }
            }
            // SAFETY: a child is made by `Box::into_raw` above and freed by `Radix::drop` only.
            node = unsafe { &*child };
        }
        Some(&node.0[key as usize % 64])
    }

    fn free(&self, level: u32) {
        for slot in self.0.iter().filter(|_| level > 0) {
            let child = slot.load(Ordering::Relaxed);
            if !child.is_null() {
                // SAFETY: a child is made by `Box::into_raw` in `slot`; the tree is being dropped, so no other reference to it exists.
                let child = unsafe { Box::from_raw(child) };
                child.free(level - 1);
            }
        }
    }
}

impl Drop for Radix {
    fn drop(&mut self) {
        self.root.free(RADIX_LEVELS - 1);
    }
}

map! { Radix, map, key, value,
    Some(map.root.slot(key, false)?.load(Ordering::Acquire) as u64).filter(|value| *value != 0),
    map.root.slot(key, true).is_some_and(|slot| slot.swap(value as *mut Node, Ordering::AcqRel).is_null()),
    map.root.slot(key, false).is_some_and(|slot| !slot.swap(std::ptr::null_mut(), Ordering::AcqRel).is_null()),
    fn replace(&self, key: u64, _old: u64, value: u64) -> bool {
        !self.insert(key, value)
    }
}

/// The tier's structure: leaves of eight words, found by cluster.
struct Leaves {
    flat: Vec<AtomicU32>,
    tree: Option<BTree<u64>>,
    words: Vec<AtomicU64>,
    next: AtomicU32,
}

impl Leaves {
    fn new(entries: usize, dense: bool, flat: bool) -> Leaves {
        let leaves = if dense { entries.div_ceil(8) } else { entries };
        Leaves {
            flat: if flat { zeroed(leaves) } else { Vec::new() },
            tree: (!flat).then(|| BTree::new().expect("address space")),
            // Two threads that make the same leaf take two numbers: there are words for both.
            words: zeroed(8 * (leaves + leaves / 8 + 1024)),
            next: AtomicU32::new(1),
        }
    }

    fn leaf(&self, key: u64) -> Option<usize> {
        let leaf = match &self.tree {
            Some(tree) => tree.get(key / 8)? as u32,
            None => self.flat[key as usize / 8].load(Ordering::Acquire),
        };
        (leaf != 0).then_some(leaf as usize * 8 + key as usize % 8)
    }
}

impl Map for Leaves {
    fn get(&self, key: u64) -> Option<u64> {
        Some(self.words[self.leaf(key)?].load(Ordering::Acquire)).filter(|value| *value != 0)
    }

    fn insert(&self, key: u64, value: u64) -> bool {
        let at = self.leaf(key).unwrap_or_else(|| {
            let leaf = match &self.tree {
                Some(tree) => {
                    let made = u64::from(self.next.fetch_add(1, Ordering::Relaxed));
                    tree.get_or_insert(key / 8, made).expect("room").unwrap_or(made) as u32
                }
                None => {
                    let slot = &self.flat[key as usize / 8];
                    let made = self.next.fetch_add(1, Ordering::Relaxed);
                    match slot.compare_exchange(0, made, Ordering::AcqRel, Ordering::Acquire) {
                        Ok(_) => made,
                        Err(other) => other,
                    }
                }
            };
            leaf as usize * 8 + key as usize % 8
        });
        self.words[at].swap(value, Ordering::AcqRel) == 0
    }

    fn remove(&self, key: u64, _: u64) -> bool {
        let Some(at) = self.leaf(key) else { return false };
        let there = self.words[at].swap(0, Ordering::AcqRel) != 0;
        // The tier frees an empty leaf and removes its key.
        if let Some(tree) = &self.tree {
            let leaf = &self.words[at / 8 * 8..at / 8 * 8 + 8];
            if leaf.iter().all(|word| word.load(Ordering::Relaxed) == 0) {
                tree.remove(key / 8);
            }
        }
        there
    }

    fn replace(&self, key: u64, _old: u64, value: u64) -> bool {
        !self.insert(key, value)
    }
}

/// Words with an all-zero zero.
///
/// # Safety
/// All-zero bytes are a valid value.
unsafe trait Zero {}
// SAFETY: an all-zero AtomicU32 is the number zero.
unsafe impl Zero for AtomicU32 {}
// SAFETY: an all-zero AtomicU64 is the number zero.
unsafe impl Zero for AtomicU64 {}

/// Zeroed words, which take no memory before they are touched.
fn zeroed<T: Zero>(len: usize) -> Vec<T> {
    if len == 0 {
        return Vec::new();
    }
    let layout = Layout::array::<T>(len).expect("fits into memory");
    // SAFETY: `len` is not 0 and T is a word, so the layout has a size.
    let words = unsafe { std::alloc::alloc_zeroed(layout) }.cast::<T>();
    if words.is_null() {
        std::alloc::handle_alloc_error(layout);
    }
    // SAFETY: as many words as were allocated, by the allocator and with the layout of a vector, and all are zero.
    unsafe { Vec::from_raw_parts(words, len, len) }
}

fn make(name: &str, entries: usize, dense: bool) -> Option<Box<dyn Map>> {
    Some(match name {
        "flat-array" if dense => Box::new(FlatArray(zeroed(entries))),
        "tier-flat" if dense => Box::new(Leaves::new(entries, dense, true)),
        // Flat arrays over 2^33 pages would take all memory.
        "flat-array" | "tier-flat" => return None,
        "tier-b-tree" => Box::new(Leaves::new(entries, dense, false)),
        "radix-64" => Box::new(Radix { root: Node::new() }),
        _ => {
            let maker = registry::all().into_iter().find(|maker| maker.0 == name)?;
            maker.2(entries, true)
        }
    })
}

/// Bytes that a structure takes per entry at most, as measured, and somewhat more.
fn bytes_per_entry(name: &str, dense: bool) -> f64 {
    match name {
        // A page alone in its cluster has all inner nodes to itself.
        "radix-64" if !dense => 1100.0,
        "congee" if !dense => 250.0,
        "flat-array" | "tier-flat" | "radix-64" => 16.0,
        _ => 140.0,
    }
}

/// Measures one structure in this process and prints its figures.
pub fn run_cell(cell: &str) -> ExitCode {
    let parts: Vec<&str> = cell.split(',').collect();
    let [name, entries, threads, kind] = parts[..] else { return ExitCode::from(2) };
    let (Ok(entries), Ok(threads)) = (entries.parse::<usize>(), threads.parse::<usize>()) else {
        return ExitCode::from(2);
    };
    let dense = kind == "dense";
    let before = resident_bytes();
    let Some(map) = make(name, entries, dense) else { return ExitCode::from(2) };
    let phase = |act: &(dyn Fn(u64) -> bool + Sync)| {
        let start = Instant::now();
        std::thread::scope(|scope| {
            for thread in 0..threads {
                scope.spawn(move || {
                    let part = entries / threads;
                    for index in thread * part..(thread + 1) * part {
                        assert!(act(offset(index as u64, entries as u64, dense)), "a wrong answer");
                    }
                });
            }
        });
        (entries / threads * threads) as f64 / start.elapsed().as_secs_f64() / 1e6
    };
    let insert = phase(&|key| map.insert(key, key << 1 | 1));
    let bytes = (resident_bytes() - before) / entries as f64;
    let lookup = phase(&|key| map.get(key) == Some(key << 1 | 1));
    let replace = phase(&|key| map.replace(key, key << 1 | 1, key << 1 | 3));
    for index in (0..entries / threads * threads).step_by(entries / 1000 + 1) {
        let key = offset(index as u64, entries as u64, dense);
        assert!(map.get(key) == Some(key << 1 | 3), "not replaced");
    }
    let erase = phase(&|key| map.remove(key, key << 1 | 3));
    println!("{insert} {lookup} {replace} {erase} {bytes}");
    ExitCode::SUCCESS
}

/// The structures that this build has.
pub fn names() -> impl Iterator<Item = &'static str> {
    let known: Vec<&str> = registry::all().iter().map(|maker| maker.0).collect();
    OWN.iter().chain(ORDERED.iter().filter(move |name| known.contains(name))).copied()
}

/// Measures the structures that `only` names, all if it names none, each in a process of its own, rounds in turn.
pub fn measure(entries: usize, rounds: usize, only: &[String]) -> Vec<Row> {
    let wanted = |name: &&str| only.is_empty() || only.iter().any(|only| only == name);
    let mut cells: Vec<(String, Vec<[f64; 5]>)> = Vec::new();
    for kind in ["dense", "sparse"] {
        for threads in [1, 2] {
            for name in names().filter(wanted).filter(|name| kind == "dense" || !name.contains("flat")) {
                let bytes = entries as f64 * bytes_per_entry(name, kind == "dense");
                if bytes > pagefold_os::procfs::available_and_total().0 as f64 * 0.8 {
                    eprintln!("SKIPPED: {name} with {entries} {kind} offsets: {:.0} GB of memory", bytes / 1e9);
                    continue;
                }
                cells.push((format!("{name},{entries},{threads},{kind}"), Vec::new()));
            }
        }
    }
    for _ in 0..rounds {
        for (cell, figures) in &mut cells {
            let command = process::own("zswap").map(|mut command| {
                command.args(["--cell", cell]);
                command
            });
            let text = command.and_then(|mut command| process::output(&mut command)).unwrap_or_default();
            let values: Vec<f64> = text.split_ascii_whitespace().filter_map(|value| value.parse().ok()).collect();
            match values.try_into() {
                Ok(values) => figures.push(values),
                Err(_) => eprintln!("zswap: {cell}: no figures"),
            }
        }
    }
    let row = |(cell, figures): (String, Vec<[f64; 5]>)| {
        let parts: Vec<&str> = cell.split(',').collect();
        let column = |index: usize| -> Vec<f64> { figures.iter().map(|row| row[index]).collect() };
        let mut columns: Vec<(&'static str, f64)> =
            PHASES.iter().enumerate().map(|(index, name)| (*name, median(column(index)))).collect();
        let lookups = Spread::of(column(1));
        columns.push(("bytes/entry", median(column(4))));
        columns.push(("spread %", (lookups.high - lookups.low) / lookups.high * 100.0));
        Row {
            part: "index",
            name: parts[0].to_owned(),
            on: format!("{} {}, {} thr, wall", parts[1], parts[3], parts[2]),
            figures: columns,
        }
    };
    cells.into_iter().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_are_distinct() {
        for (entries, dense) in [(1000, true), (1024, true), (100_000, false)] {
            let mut keys: Vec<u64> = (0..entries).map(|index| offset(index, entries, dense)).collect();
            keys.sort_unstable();
            keys.dedup();
            assert_eq!(keys.len() as u64, entries);
            assert!(!dense || keys.last() == Some(&(entries - 1)));
            assert!(keys.iter().all(|key| *key < 1 << 33));
        }
    }

    #[test]
    fn zeroed_words_take_memory_when_they_are_touched() {
        let before = resident_bytes();
        let words = zeroed::<AtomicU64>(1 << 28);
        words[1 << 27].store(7, Ordering::Relaxed);
        assert_eq!((words[0].load(Ordering::Relaxed), words[1 << 27].load(Ordering::Relaxed)), (0, 7));
        // Of 2 GiB; other tests run meanwhile.
        assert!(resident_bytes() - before < f64::from(1 << 30));
    }

    #[test]
    fn all_structures_are_maps() {
        for name in names() {
            for dense in [true, false] {
                let Some(map) = make(name, 5000, dense) else { continue };
                for index in 0..5000 {
                    assert!(map.insert(offset(index, 5000, dense), index + 1), "{name}");
                }
                for index in 0..5000 {
                    let key = offset(index, 5000, dense);
                    assert_eq!(map.get(key), Some(index + 1), "{name}");
                    assert!(map.replace(key, index + 1, index + 2) && map.get(key) == Some(index + 2), "{name}");
                    assert!(map.remove(key, index + 2) && map.get(key).is_none() && !map.remove(key, 0), "{name}");
                }
            }
        }
    }
}
