//! Building a tree from sorted entries: full nodes, one pass.

use super::node::{FixedKey, Shape, inner_capacity, leaf_capacity};
use super::{ANCHOR, BTree, Full};
use crate::primitive::Ordering;
use std::io;

/// Why a tree could not be built.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// The entries are not in ascending order of their keys, each key once.
    #[error("entry {index} is not above the one before it: sort the entries and leave each key once")]
    NotAscending {
        /// Which entry.
        index: u64,
    },
    /// The address space is used up.
    #[error(transparent)]
    Full(#[from] Full),
    /// The address space could not be reserved.
    #[error("the tree's address space could not be reserved")]
    Reserve(#[from] io::Error),
}

impl<K: FixedKey> BTree<K> {
    /// Makes a tree of entries that come in ascending order. Nodes are filled to the last place: 16.5
    /// bytes per entry for `u64` keys.
    ///
    /// # Errors
    /// When the entries are not ascending, or the address space cannot be reserved.
    pub fn from_sorted(entries: impl IntoIterator<Item = (K, u64)>) -> Result<Self, BuildError> {
        let tree = Self::new()?;
        let pool = &tree.pool;
        // The nodes of the current level, each with the smallest key below it.
        let mut level = Vec::new();
        let mut leaf = pool.word(ANCHOR, 1).load(Ordering::Relaxed);
        let mut count = 0;
        let mut last = None;
        let mut total = 0;
        for (key, value) in entries {
            if last.is_some_and(|last| key <= last) {
                return Err(BuildError::NotAscending { index: total });
            }
            if count == leaf_capacity::<K>() {
                leaf = pool.allocate().ok_or(Full)?;
                pool.publish(leaf);
                count = 0;
            }
            if count == 0 {
                level.push((key, leaf));
            }
            pool.set_key(leaf, count, key);
            pool.set_value::<K>(leaf, count, value);
            count += 1;
            pool.set_shape(leaf, Shape { count, level: 0 });
            last = Some(key);
            total += 1;
        }
        let mut height = 0;
        while level.len() > 1 {
            height += 1;
            let mut above = Vec::with_capacity(level.len() / inner_capacity::<K>() + 1);
            let mut rest = &level[..];
            while !rest.is_empty() {
                let full = inner_capacity::<K>() + 1;
                // The last node must not get a single child: it would have no key.
                let take = if rest.len() == full + 1 { full - 1 } else { full.min(rest.len()) };
                let (children, left) = rest.split_at(take);
                rest = left;
                let inner = pool.allocate().ok_or(Full)?;
                for (index, &(key, child)) in children.iter().enumerate() {
                    pool.set_child::<K>(inner, index, child);
                    if index > 0 {
                        pool.set_key(inner, index - 1, key);
                    }
                }
                pool.set_shape(inner, Shape { count: children.len() - 1, level: height });
                pool.publish(inner);
                above.push((children[0].0, inner));
            }
            level = above;
        }
        if let Some(&(_, root)) = level.first() {
            pool.word(ANCHOR, 1).store(root, Ordering::Release);
        }
        tree.count().store(total, Ordering::Relaxed);
        Ok(tree)
    }
}
