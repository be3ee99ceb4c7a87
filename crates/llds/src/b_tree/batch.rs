//! Many lookups in flight: all keys of a group descend one level together.

use super::node::FixedKey;
use super::{ANCHOR, BTree};
use crate::primitive::Ordering;

/// Lookups that descend together.
const GROUP: usize = 24;

impl<K: FixedKey> BTree<K> {
    /// Looks all keys up with two dozen in flight; `found[i]` becomes the result of `get(keys[i])`.
    ///
    /// # Panics
    /// When the slices differ in length.
    pub fn get_many(&self, keys: &[K], found: &mut [Option<u64>]) {
        assert_eq!(keys.len(), found.len(), "as many places for results as keys");
        for (keys, found) in keys.chunks(GROUP).zip(found.chunks_mut(GROUP)) {
            self.get_group(keys, found);
        }
    }

    fn get_group(&self, keys: &[K], found: &mut [Option<u64>]) {
        let pool = &self.pool;
        // Each lookup's node; its version is read when its lines have arrived, and the parent's stored version
        // is checked afterwards. A parent of 0 at version 0 is a lookup that must be repeated singly.
        let mut nodes = [0u64; GROUP];
        let mut parents = [(0u64, 0u64); GROUP];
        let root = pool.read_version(ANCHOR).map(|version| (version, pool.word(ANCHOR, 1).load(Ordering::Relaxed)));
        let Some((anchor_version, root)) = root else {
            return self.get_singly(keys, found);
        };
        for index in 0..keys.len() {
            nodes[index] = root;
            parents[index] = (ANCHOR, anchor_version);
        }
        let mut left = keys.len();
        // Lookups that still descend; the others have their answer.
        let mut descending: [usize; GROUP] = std::array::from_fn(|index| index);
        while left > 0 {
            let mut still = 0;
            for slot in 0..left {
                let index = descending[slot];
                let (key, node, (parent, parent_version)) = (keys[index], nodes[index], parents[index]);
                let version = pool.read_version(node).filter(|_| pool.is_at(parent, parent_version));
                let Some(version) = version else {
                    found[index] = self.get(key);
                    continue;
                };
                let shape = pool.shape(node);
                if shape.level == 0 {
                    found[index] = self.read_leaf(node, version, shape, key).unwrap_or_else(|_| self.get(key));
                    continue;
                }
                let child_index = pool.count_below(node, shape.count, key, true);
                let child = pool.child::<K>(node, child_index);
                if !pool.is_at(node, version) {
                    found[index] = self.get(key);
                    continue;
                }
                pool.prefetch(child);
                nodes[index] = child;
                parents[index] = (node, version);
                descending[still] = index;
                still += 1;
            }
            left = still;
        }
    }

    fn get_singly(&self, keys: &[K], found: &mut [Option<u64>]) {
        for (&key, found) in keys.iter().zip(found) {
            *found = self.get(key);
        }
    }
}
