//! Scans in both directions, a leaf at a time.

use super::node::{CAPACITY_MAX, FixedKey, leaf_capacity};
use super::{ANCHOR, Again, BTree};
use crate::primitive::{Ordering, spin_hint};
use std::ops::{Bound, RangeBounds};

/// The entries of one leaf at one moment, and the bounds of the keys it may hold.
struct Page<K> {
    entries: [(K, u64); CAPACITY_MAX],
    start: usize,
    end: usize,
    /// All keys of the leaf are at least this; `None` for the first leaf.
    low: Option<K>,
    /// All keys of the leaf are below this; `None` for the last leaf.
    high: Option<K>,
}

/// An iterator over the entries of a range, from either end. Each leaf's entries are from one moment.
pub struct Scan<'a, K: FixedKey> {
    tree: &'a BTree<K>,
    low: Bound<K>,
    high: Bound<K>,
    front: Option<Box<Page<K>>>,
    back: Option<Box<Page<K>>>,
    /// No further leaf in this direction can hold a key of the range.
    front_done: bool,
    back_done: bool,
}

impl<K: FixedKey> BTree<K> {
    /// Goes through the entries of a range in the order of their keys, or backwards by `rev`.
    pub fn scan(&self, range: impl RangeBounds<K>) -> Scan<'_, K> {
        Scan {
            tree: self,
            low: range.start_bound().cloned(),
            high: range.end_bound().cloned(),
            front: None,
            back: None,
            front_done: false,
            back_done: false,
        }
    }

    /// Copies the leaf that holds the key, or with `before` the one that holds the keys just below it.
    fn copy_leaf(&self, key: Option<K>, before: bool, page: &mut Page<K>) {
        while self.try_copy_leaf(key, before, page).is_err() {
            spin_hint();
        }
    }

    fn try_copy_leaf(&self, key: Option<K>, before: bool, page: &mut Page<K>) -> Result<(), Again> {
        let pool = &self.pool;
        page.low = None;
        page.high = None;
        let mut parent = ANCHOR;
        let mut parent_version = pool.read_version(ANCHOR).ok_or(Again)?;
        let mut node = pool.word(ANCHOR, 1).load(Ordering::Relaxed);
        loop {
            let version = pool.read_version(node).ok_or(Again)?;
            if !pool.is_at(parent, parent_version) {
                return Err(Again);
            }
            let shape = pool.shape(node);
            if shape.level == 0 {
                page.start = 0;
                page.end = shape.count.min(leaf_capacity::<K>());
                for (index, entry) in page.entries[..page.end].iter_mut().enumerate() {
                    *entry = (pool.key(node, index), pool.value::<K>(node, index));
                }
                return if pool.is_at(node, version) { Ok(()) } else { Err(Again) };
            }
            let index = match key {
                Some(key) => pool.count_below(node, shape.count, key, !before),
                None if before => shape.count,
                None => 0,
            };
            let (low, high) = (
                (index > 0).then(|| pool.key::<K>(node, index - 1)),
                (index < shape.count).then(|| pool.key::<K>(node, index)),
            );
            let child = pool.child::<K>(node, index);
            // The scan will read the neighbour in its direction next.
            let next = if before { index.checked_sub(1) } else { (index < shape.count).then_some(index + 1) };
            let next = next.filter(|_| shape.level == 1).map(|next| pool.child::<K>(node, next));
            if !pool.is_at(node, version) {
                return Err(Again);
            }
            if let Some(next) = next {
                pool.prefetch(next);
            }
            page.low = low.or(page.low);
            page.high = high.or(page.high);
            (parent, parent_version, node) = (node, version, child);
        }
    }
}

impl<K: FixedKey> Page<K> {
    fn new() -> Box<Self> {
        Box::new(Self { entries: [(K::MIN, 0); CAPACITY_MAX], start: 0, end: 0, low: None, high: None })
    }
}

impl<K: FixedKey> Iterator for Scan<'_, K> {
    type Item = (K, u64);

    fn next(&mut self) -> Option<(K, u64)> {
        loop {
            if let Some(page) = &mut self.front
                && page.start < page.end
            {
                let (key, value) = page.entries[page.start];
                page.start += 1;
                if !(self.low, self.high).contains(&key) {
                    // Below the range in its first leaf; above it, the scan is over.
                    let above = matches!(self.high, Bound::Included(high) if key > high)
                        || matches!(self.high, Bound::Excluded(high) if key >= high);
                    if above {
                        self.front_done = true;
                        page.start = page.end;
                    }
                    continue;
                }
                self.low = Bound::Excluded(key);
                return Some((key, value));
            }
            if self.front_done {
                return None;
            }
            let from = match (&self.front, self.low) {
                (Some(page), _) => page.high,
                (None, Bound::Included(key) | Bound::Excluded(key)) => Some(key),
                (None, Bound::Unbounded) => None,
            };
            let page = self.front.get_or_insert_with(Page::new);
            self.tree.copy_leaf(from, false, page);
            self.front_done = page.high.is_none();
        }
    }
}

impl<K: FixedKey> DoubleEndedIterator for Scan<'_, K> {
    fn next_back(&mut self) -> Option<(K, u64)> {
        loop {
            if let Some(page) = &mut self.back
                && page.start < page.end
            {
                page.end -= 1;
                let (key, value) = page.entries[page.end];
                if !(self.low, self.high).contains(&key) {
                    let below = matches!(self.low, Bound::Included(low) if key < low)
                        || matches!(self.low, Bound::Excluded(low) if key <= low);
                    if below {
                        self.back_done = true;
                        page.end = page.start;
                    }
                    continue;
                }
                self.high = Bound::Excluded(key);
                return Some((key, value));
            }
            if self.back_done {
                return None;
            }
            // An included bound is in the leaf of the keys from it on; all else is in the leaf before.
            let (from, before) = match (&self.back, self.high) {
                (Some(page), _) => (page.low, true),
                (None, Bound::Included(key)) => (Some(key), false),
                (None, Bound::Excluded(key)) => (Some(key), true),
                (None, Bound::Unbounded) => (None, true),
            };
            let page = self.back.get_or_insert_with(Page::new);
            self.tree.copy_leaf(from, before, page);
            self.back_done = page.low.is_none();
        }
    }
}
