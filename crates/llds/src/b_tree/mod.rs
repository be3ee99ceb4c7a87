//! The B-tree: a concurrent ordered map for keys and values of fixed size.
//!
//! Nodes are eight cache lines: 31 pairs in a leaf of `u64` keys, 41 children in an inner node, searched
//! with AVX-512 where the processor has it. All links are 32-bit numbers into a reserved range on huge
//! pages.
//!
//! # Why it can be trusted
//!
//! Every node has a version with a lock bit. Writers lock the few nodes they change: one leaf for
//! nearly all operations. Readers lock nothing and write nothing: they read a node's version, then the
//! node, then the version again, and on the way down they read the child's version before they check
//! the parent's for the last time, so that a child's version is always one at which it was linked.
//! Node memory is never unmapped and a node's version never goes back, not even when the node is freed
//! and reused, so an unchanged version proves what was read without any epoch.
//!
//! Splits are prepared on the way down (a full inner node is split before its child needs room), so a
//! writer never holds more than three neighbouring nodes. Before a leaf is split, its neighbours take
//! some of its entries, which keeps leaves 80 to 90 % full; leaves that empty are merged.
//!
//! # What it does not promise
//!
//! Readers never make a writer wait. But a thread that meets a locked node retries until it is unlocked:
//! a writer that is stopped for good while it holds a leaf's lock blocks all operations on that leaf.
//! Where that is not acceptable, use the [SD tree](crate::sd_tree).
//!
//! A scan is exact leaf by leaf: each leaf's entries are from one moment, later leaves from later ones.

mod batch;
mod build;
mod change;
mod node;
mod pool;
mod scan;
#[cfg(all(target_arch = "x86_64", not(loom), not(miri), not(pagefold_stress)))]
mod search;

#[cfg(all(test, not(loom)))]
mod tests;

pub use build::BuildError;
pub use node::FixedKey;
pub use scan::Scan;

use crate::epoch;
use crate::primitive::{AtomicU64, Ordering, spin_hint};
use node::{Shape, inner_capacity, leaf_capacity};
use pool::Pool;
use std::io;
use std::marker::PhantomData;

/// Cache lines per node.
#[cfg(all(not(loom), not(pagefold_stress)))]
const NODE_LINES: u64 = 8;
#[cfg(all(not(loom), pagefold_stress))]
const NODE_LINES: u64 = 2;
#[cfg(loom)]
const NODE_LINES: u64 = 1;

/// Set in the version of a node that is in no tree.
const OBSOLETE: u64 = 2;
const VERSION_STEP: u64 = 4;

/// The node above the root: its version covers the root's number, which is its second word.
const ANCHOR: u64 = 0;

const SHARDS: usize = 16;

/// The tree's address space is used up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the B-tree is full: its address space is used up")]
pub struct Full;

/// Statistics of the tree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Entries.
    pub entry_count: u64,
    /// Nodes in use.
    pub node_count: u64,
    /// Levels of inner nodes above the leaves.
    pub height: u32,
    /// Bytes of memory in use, including free nodes that were not given back to the system.
    pub memory_bytes: u64,
}

/// A concurrent ordered map from `u64`, `u128` or `(u64, u64)` keys to `u64` values. See the
/// [module](self).
///
/// ```
/// let tree = llds::b_tree::BTree::<u64>::new()?;
/// assert_eq!(tree.insert_or_replace(5, 50)?, None);
/// assert_eq!(tree.insert_or_replace(5, 51)?, Some(50));
/// assert_eq!(tree.insert_or_replace(9, 90)?, None);
/// assert_eq!(tree.scan(..=9).rev().collect::<Vec<_>>(), [(9, 90), (5, 51)]);
/// assert_eq!(tree.remove(5), Some(51));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct BTree<K: FixedKey> {
    pool: Pool,
    counts: Box<[Count]>,
    _keys: PhantomData<fn(K) -> K>,
}

#[repr(align(128))]
struct Count(AtomicU64);

/// The end of a descent.
#[derive(Clone, Copy)]
struct Position {
    /// The leaf's parent, or the anchor.
    parent: u64,
    parent_version: u64,
    /// Which of the parent's children.
    index: usize,
    leaf: u64,
    leaf_version: u64,
}

/// Another thread changed what was read: retry.
struct Again;

impl<K: FixedKey> BTree<K> {
    /// Makes an empty tree with room for 2^32 nodes, on huge pages where the system has them.
    ///
    /// # Errors
    /// When the address space cannot be reserved.
    pub fn new() -> io::Result<Self> {
        Self::with_pages(true)
    }

    /// Makes an empty tree on huge pages or on ordinary ones.
    ///
    /// # Errors
    /// As [`BTree::new`].
    pub fn with_pages(huge: bool) -> io::Result<Self> {
        // 2^32 nodes are 2 TiB of address space; under a limit on it, less.
        let mut chunks = if cfg!(loom) { 1 } else { (1u64 << 32) / pool::CHUNK_NODES };
        let pool = loop {
            match Pool::new(chunks, huge) {
                Ok(pool) => break pool,
                Err(_) if chunks > 512 => chunks /= 2,
                Err(error) => return Err(error),
            }
        };
        let tree = Self { pool, counts: (0..SHARDS).map(|_| Count(AtomicU64::new(0))).collect(), _keys: PhantomData };
        let root = tree.pool.allocate().expect("an empty pool has a node");
        tree.pool.set_shape(root, Shape { count: 0, level: 0 });
        tree.pool.publish(root);
        tree.pool.word(ANCHOR, 1).store(root, Ordering::Relaxed);
        tree.pool.word(ANCHOR, 0).store(VERSION_STEP, Ordering::Release);
        Ok(tree)
    }

    fn capacity(shape: Shape) -> usize {
        if shape.level == 0 { leaf_capacity::<K>() } else { inner_capacity::<K>() }
    }

    /// Descends to the leaf for the key. With `before` it is the leaf that would hold the keys just below it.
    ///
    /// `visit` sees each inner node before its child is read: parent, its version, the node's index in
    /// it, the node, its version, its shape. It may end the descent.
    #[inline(always)]
    fn descend(
        &self,
        key: K,
        before: bool,
        mut visit: impl FnMut(Position, Shape) -> Result<(), Again>,
    ) -> Result<(Position, Shape), Again> {
        let pool = &self.pool;
        let mut parent = ANCHOR;
        let mut parent_version = pool.read_version(ANCHOR).ok_or(Again)?;
        let mut node = pool.word(ANCHOR, 1).load(Ordering::Relaxed);
        let mut index = 0;
        // The number may be stale; it is always that of a node in the pool, and checked next.
        let mut version = pool.read_version(node).ok_or(Again)?;
        if !pool.is_at(parent, parent_version) {
            return Err(Again);
        }
        loop {
            let shape = pool.shape(node);
            let position = Position { parent, parent_version, index, leaf: node, leaf_version: version };
            if shape.level == 0 {
                return Ok((position, shape));
            }
            visit(position, shape)?;
            let child_index = pool.count_below(node, shape.count, key, !before);
            let child = pool.child::<K>(node, child_index);
            if !pool.is_at(node, version) {
                return Err(Again);
            }
            pool.prefetch(child);
            let child_version = pool.read_version(child).ok_or(Again)?;
            if !pool.is_at(node, version) {
                return Err(Again);
            }
            (parent, parent_version, index) = (node, version, child_index);
            (node, version) = (child, child_version);
        }
    }

    /// Returns the value of the key.
    #[inline]
    pub fn get(&self, key: K) -> Option<u64> {
        loop {
            if let Ok(value) = self.try_get(key) {
                return value;
            }
            spin_hint();
        }
    }

    #[inline(always)]
    fn try_get(&self, key: K) -> Result<Option<u64>, Again> {
        let (position, shape) = self.descend(key, false, |_, _| Ok(()))?;
        self.read_leaf(position.leaf, position.leaf_version, shape, key)
    }

    #[inline(always)]
    fn read_leaf(&self, leaf: u64, version: u64, shape: Shape, key: K) -> Result<Option<u64>, Again> {
        let at = self.pool.count_below(leaf, shape.count, key, false);
        let found = at < shape.count.min(leaf_capacity::<K>()) && self.pool.key::<K>(leaf, at) == key;
        let value = found.then(|| self.pool.value::<K>(leaf, at));
        if self.pool.is_at(leaf, version) { Ok(value) } else { Err(Again) }
    }

    /// Returns true if the key is there.
    pub fn contains(&self, key: K) -> bool {
        self.get(key).is_some()
    }

    /// Counts the entries; exact while no thread changes the tree.
    pub fn len(&self) -> u64 {
        let sum = self.counts.iter().fold(0u64, |sum, count| sum.wrapping_add(count.0.load(Ordering::Relaxed)));
        // An entry may be counted in one shard and its removal in another, so a sum of racing reads can be negative.
        if (sum as i64) < 0 { 0 } else { sum }
    }

    /// Returns true if there are no entries.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Reads the tree's statistics.
    pub fn stats(&self) -> Stats {
        let root = self.pool.word(ANCHOR, 1).load(Ordering::Acquire);
        Stats {
            entry_count: self.len(),
            node_count: self.pool.used(),
            height: self.pool.shape(root).level,
            memory_bytes: self.pool.touched_bytes(),
        }
    }

    /// Bytes of memory that the tree uses in total.
    pub fn memory_bytes(&self) -> u64 {
        self.pool.touched_bytes()
    }

    fn count(&self) -> &AtomicU64 {
        &self.counts[epoch::thread_index() % SHARDS].0
    }
}
