//! Inserting, removing, and rebalancing of full and underfull nodes.

use super::node::{CAPACITY_MAX, FixedKey, Shape, inner_capacity, leaf_capacity};
use super::{ANCHOR, Again, BTree, Full, Position};
use crate::primitive::{Ordering, spin_hint};

/// The entries of one node or of two neighbours, copied out to be distributed again.
struct EntryBuffer<K> {
    keys: [K; 2 * CAPACITY_MAX + 1],
    /// Values of a leaf, or children of an inner node.
    below: [u64; 2 * CAPACITY_MAX + 2],
    count: usize,
}

/// Two neighbouring nodes under one parent.
struct Pair {
    left: u64,
    right: u64,
    /// The index of the key between them in their parent.
    between: usize,
}

impl<K: FixedKey> BTree<K> {
    /// Stores the value with the key and returns the previous value, in one descent.
    ///
    /// # Errors
    /// [`Full`] when the address space is used up.
    pub fn insert_or_replace(&self, key: K, value: u64) -> Result<Option<u64>, Full> {
        self.upsert(key, value, true)
    }

    /// Stores the value with the key unless the key is there; returns the existing value.
    ///
    /// # Errors
    /// [`Full`] when the address space is used up.
    pub fn get_or_insert(&self, key: K, value: u64) -> Result<Option<u64>, Full> {
        self.upsert(key, value, false)
    }

    fn upsert(&self, key: K, value: u64, replace: bool) -> Result<Option<u64>, Full> {
        loop {
            match self.try_upsert(key, value, replace) {
                Ok(outcome) => {
                    let old = outcome?;
                    if old.is_none() {
                        self.count().fetch_add(1, Ordering::Relaxed);
                    }
                    return Ok(old);
                }
                Err(Again) => spin_hint(),
            }
        }
    }

    fn try_upsert(&self, key: K, value: u64, replace: bool) -> Result<Result<Option<u64>, Full>, Again> {
        let mut out_of_nodes = false;
        let descent = self.descend(key, false, |position, shape| {
            if shape.count < inner_capacity::<K>() {
                return Ok(());
            }
            // Full: split before a child may need room for another key here.
            out_of_nodes = self.make_room(position, shape, key)?.is_err();
            Err(Again)
        });
        if out_of_nodes {
            return Ok(Err(Full));
        }
        let (position, _) = descent?;
        let pool = &self.pool;
        let leaf = position.leaf;
        if !pool.lock(leaf, position.leaf_version) {
            return Err(Again);
        }
        let shape = pool.shape(leaf);
        let at = pool.count_below(leaf, shape.count, key, false);
        if at < shape.count && pool.key::<K>(leaf, at) == key {
            let old = pool.value::<K>(leaf, at);
            if replace {
                pool.set_value::<K>(leaf, at, value);
                pool.unlock(leaf);
            } else {
                pool.unlock_unchanged(leaf);
            }
            return Ok(Ok(Some(old)));
        }
        if shape.count == leaf_capacity::<K>() {
            pool.unlock_unchanged(leaf);
            return match self.make_room(position, shape, key)? {
                Ok(()) => Err(Again),
                Err(full) => Ok(Err(full)),
            };
        }
        for index in (at..shape.count).rev() {
            pool.set_key(leaf, index + 1, pool.key::<K>(leaf, index));
            pool.set_value::<K>(leaf, index + 1, pool.value::<K>(leaf, index));
        }
        pool.set_key(leaf, at, key);
        pool.set_value::<K>(leaf, at, value);
        pool.set_shape(leaf, Shape { count: shape.count + 1, ..shape });
        pool.unlock(leaf);
        Ok(Ok(None))
    }

    /// Removes the key and returns its value, in one descent.
    pub fn remove(&self, key: K) -> Option<u64> {
        loop {
            match self.try_remove(key) {
                Ok(removed) => {
                    if removed.is_some() {
                        self.count().fetch_sub(1, Ordering::Relaxed);
                    }
                    return removed;
                }
                Err(Again) => spin_hint(),
            }
        }
    }

    fn try_remove(&self, key: K) -> Result<Option<u64>, Again> {
        let (position, _) = self.descend(key, false, |_, _| Ok(()))?;
        let pool = &self.pool;
        let leaf = position.leaf;
        if !pool.lock(leaf, position.leaf_version) {
            return Err(Again);
        }
        let shape = pool.shape(leaf);
        let at = pool.count_below(leaf, shape.count, key, false);
        if at == shape.count || pool.key::<K>(leaf, at) != key {
            pool.unlock_unchanged(leaf);
            return Ok(None);
        }
        let value = pool.value::<K>(leaf, at);
        for index in at + 1..shape.count {
            pool.set_key(leaf, index - 1, pool.key::<K>(leaf, index));
            pool.set_value::<K>(leaf, index - 1, pool.value::<K>(leaf, index));
        }
        let shape = Shape { count: shape.count - 1, ..shape };
        pool.set_shape(leaf, shape);
        pool.unlock(leaf);
        if Self::is_underfull(shape) && position.parent != ANCHOR {
            self.rebalance(key);
        }
        Ok(Some(value))
    }

    fn is_underfull(shape: Shape) -> bool {
        shape.count < Self::capacity(shape) / 3
    }

    /// Merges or fills the underfull nodes on the key's path, bottom last. Gives up if other threads
    /// interfere: the next removal tries again.
    fn rebalance(&self, key: K) {
        // Each round does a step for one level; a tree has a dozen levels at most.
        for _ in 0..24 {
            let descent = self.descend(key, false, |position, shape| {
                if (position.parent == ANCHOR && shape.count == 0)
                    || (position.parent != ANCHOR && Self::is_underfull(shape))
                {
                    self.merge_or_borrow(position, shape)?;
                    return Err(Again);
                }
                Ok(())
            });
            if let Ok((position, shape)) = descent {
                if position.parent != ANCHOR
                    && Self::is_underfull(shape)
                    && self.merge_or_borrow(position, shape).is_err()
                {
                    continue;
                }
                // A merge may have left the root with one child.
                if !self.lower_root() {
                    return;
                }
            }
        }
    }

    /// Makes the root's only child the root; returns true if it did.
    fn lower_root(&self) -> bool {
        let pool = &self.pool;
        let Some(anchor_version) = pool.read_version(ANCHOR) else { return false };
        let root = pool.word(ANCHOR, 1).load(Ordering::Relaxed);
        let Some(version) = pool.read_version(root) else { return false };
        let shape = pool.shape(root);
        if shape.level == 0 || shape.count > 0 || !pool.is_at(root, version) || !pool.lock(ANCHOR, anchor_version) {
            return false;
        }
        if !pool.lock(root, version) {
            pool.unlock_unchanged(ANCHOR);
            return false;
        }
        pool.word(ANCHOR, 1).store(pool.child::<K>(root, 0), Ordering::Relaxed);
        pool.unlock(ANCHOR);
        pool.discard(root);
        true
    }

    /// Locks the node at a position and its parent, if both are unchanged.
    fn lock_with_parent(&self, position: Position) -> Result<(), Again> {
        let pool = &self.pool;
        if !pool.lock(position.parent, position.parent_version) {
            return Err(Again);
        }
        if !pool.lock(position.leaf, position.leaf_version) {
            pool.unlock_unchanged(position.parent);
            return Err(Again);
        }
        Ok(())
    }

    /// Splits a full node, or moves some entries of a full leaf to a neighbour.
    fn make_room(&self, position: Position, shape: Shape, key: K) -> Result<Result<(), Full>, Again> {
        let pool = &self.pool;
        self.lock_with_parent(position)?;
        let node = position.leaf;
        if position.parent != ANCHOR && shape.level == 0 && self.shift_to_neighbour(position, key) {
            return Ok(Ok(()));
        }
        let parent_shape = pool.shape(position.parent);
        debug_assert!(position.parent == ANCHOR || parent_shape.count < inner_capacity::<K>());
        let Some(right) = pool.allocate() else {
            pool.unlock_unchanged(node);
            pool.unlock_unchanged(position.parent);
            return Ok(Err(Full));
        };
        let new_root = if position.parent == ANCHOR {
            let Some(root) = pool.allocate() else {
                pool.free(right);
                pool.unlock_unchanged(node);
                pool.unlock_unchanged(position.parent);
                return Ok(Err(Full));
            };
            Some(root)
        } else {
            None
        };
        let mut buffer = EntryBuffer::new();
        buffer.take(self, node, shape);
        // For keys inserted in order, leave a full node behind.
        let left_count = if key > buffer.keys[buffer.count - 1] {
            buffer.count - 1
        } else if key < buffer.keys[0] {
            1
        } else {
            buffer.count / 2
        };
        let between = buffer.distribute(self, node, right, shape.level, left_count.max(1));
        pool.publish(right);
        match new_root {
            Some(root) => {
                pool.set_shape(root, Shape { count: 1, level: shape.level + 1 });
                pool.set_key(root, 0, between);
                pool.set_child::<K>(root, 0, node);
                pool.set_child::<K>(root, 1, right);
                pool.publish(root);
                pool.word(ANCHOR, 1).store(root, Ordering::Relaxed);
            }
            None => self.insert_child(position.parent, parent_shape, position.index, between, right),
        }
        pool.unlock(node);
        pool.unlock(position.parent);
        Ok(Ok(()))
    }

    /// Puts a key and the child right of it into an inner node with room.
    fn insert_child(&self, inner: u64, shape: Shape, at: usize, key: K, child: u64) {
        let pool = &self.pool;
        for index in (at..shape.count).rev() {
            pool.set_key(inner, index + 1, pool.key::<K>(inner, index));
            pool.set_child::<K>(inner, index + 2, pool.child::<K>(inner, index + 1));
        }
        pool.set_key(inner, at, key);
        pool.set_child::<K>(inner, at + 1, child);
        pool.set_shape(inner, Shape { count: shape.count + 1, ..shape });
    }

    fn remove_child(&self, inner: u64, shape: Shape, at: usize) {
        let pool = &self.pool;
        for index in at + 1..shape.count {
            pool.set_key(inner, index - 1, pool.key::<K>(inner, index));
            pool.set_child::<K>(inner, index, pool.child::<K>(inner, index + 1));
        }
        pool.set_shape(inner, Shape { count: shape.count - 1, ..shape });
    }

    /// The node at a position with its left or right neighbour under the same parent.
    fn pair(&self, position: Position, to_the_right: bool) -> Option<Pair> {
        let pool = &self.pool;
        let parent_count = pool.shape(position.parent).count;
        if to_the_right {
            (position.index < parent_count).then(|| Pair {
                left: position.leaf,
                right: pool.child::<K>(position.parent, position.index + 1),
                between: position.index,
            })
        } else {
            (position.index > 0).then(|| Pair {
                left: pool.child::<K>(position.parent, position.index - 1),
                right: position.leaf,
                between: position.index - 1,
            })
        }
    }

    /// Locks the neighbour in a pair; the locked parent keeps it linked.
    fn lock_neighbour(&self, neighbour: u64) -> bool {
        self.pool.read_version(neighbour).is_some_and(|version| self.pool.lock(neighbour, version))
    }

    /// Distributes a full leaf's entries over it and a neighbour with room. Releases the locks of parent
    /// and leaf if it returns true; otherwise the caller still holds them.
    fn shift_to_neighbour(&self, position: Position, key: K) -> bool {
        let pool = &self.pool;
        let capacity = leaf_capacity::<K>();
        for to_the_right in [true, false] {
            let Some(pair) = self.pair(position, to_the_right) else { continue };
            let neighbour = if to_the_right { pair.right } else { pair.left };
            if !self.lock_neighbour(neighbour) {
                continue;
            }
            let neighbour_shape = pool.shape(neighbour);
            // Worth it if some inserts fit before either is full again; and not for keys inserted in order,
            // since the neighbour would be filled entry by entry.
            let room = capacity - neighbour_shape.count;
            let ordered = key > pool.key::<K>(position.leaf, capacity - 1) || key < pool.key::<K>(position.leaf, 0);
            if room < 2 || (ordered && pool.shape(position.parent).count > 0 && room < capacity / 2) {
                pool.unlock_unchanged(neighbour);
                continue;
            }
            let mut buffer = EntryBuffer::new();
            buffer.take(self, pair.left, pool.shape(pair.left));
            buffer.take(self, pair.right, pool.shape(pair.right));
            let left_count = buffer.count / 2;
            let between = buffer.distribute(self, pair.left, pair.right, 0, left_count);
            pool.set_key(position.parent, pair.between, between);
            pool.unlock(neighbour);
            pool.unlock(position.leaf);
            pool.unlock(position.parent);
            return true;
        }
        false
    }

    /// Merges an underfull node with a neighbour, or moves some of the neighbour's entries to it.
    fn merge_or_borrow(&self, position: Position, shape: Shape) -> Result<(), Again> {
        let pool = &self.pool;
        self.lock_with_parent(position)?;
        let release = |changed: bool| {
            for node in [position.leaf, position.parent] {
                if changed { pool.unlock(node) } else { pool.unlock_unchanged(node) }
            }
        };
        if position.parent == ANCHOR {
            release(false);
            self.lower_root();
            return Ok(());
        }
        let pair = self.pair(position, true).or_else(|| self.pair(position, false));
        let Some(pair) = pair else {
            // Its parent has no other child: the parent is rebalanced first.
            release(false);
            return Ok(());
        };
        let neighbour = if pair.left == position.leaf { pair.right } else { pair.left };
        if !self.lock_neighbour(neighbour) {
            release(false);
            return Err(Again);
        }
        let mut buffer = EntryBuffer::new();
        buffer.take(self, pair.left, pool.shape(pair.left));
        if shape.level > 0 {
            // The parent's key between the two separates their children.
            buffer.keys[buffer.count] = pool.key(position.parent, pair.between);
            buffer.count += 1;
        }
        buffer.take(self, pair.right, pool.shape(pair.right));
        let parent_shape = pool.shape(position.parent);
        let capacity = Self::capacity(shape);
        if buffer.count <= capacity - capacity / 8 {
            buffer.put_all(self, pair.left, shape.level);
            self.remove_child(position.parent, parent_shape, pair.between);
            pool.unlock(pair.left);
            pool.unlock(position.parent);
            pool.discard(pair.right);
        } else {
            let left_count = buffer.count / 2;
            let between = buffer.distribute(self, pair.left, pair.right, shape.level, left_count);
            pool.set_key(position.parent, pair.between, between);
            pool.unlock(neighbour);
            release(true);
        }
        Ok(())
    }
}

impl<K: FixedKey> EntryBuffer<K> {
    fn new() -> Self {
        Self { keys: [K::MIN; 2 * CAPACITY_MAX + 1], below: [0; 2 * CAPACITY_MAX + 2], count: 0 }
    }

    /// Appends a node's entries to the buffer. For a second inner node the caller has added the key between
    /// them.
    fn take(&mut self, tree: &BTree<K>, node: u64, shape: Shape) {
        let pool = &tree.pool;
        for index in 0..shape.count {
            self.keys[self.count + index] = pool.key(node, index);
        }
        if shape.level == 0 {
            for index in 0..shape.count {
                self.below[self.count + index] = pool.value::<K>(node, index);
            }
        } else {
            for index in 0..=shape.count {
                self.below[self.count + index] = pool.child::<K>(node, index);
            }
        }
        self.count += shape.count;
    }

    fn put(&self, tree: &BTree<K>, node: u64, level: u32, from: usize, count: usize) {
        let pool = &tree.pool;
        for index in 0..count {
            pool.set_key(node, index, self.keys[from + index]);
        }
        if level == 0 {
            for index in 0..count {
                pool.set_value::<K>(node, index, self.below[from + index]);
            }
        } else {
            for index in 0..=count {
                pool.set_child::<K>(node, index, self.below[from + index]);
            }
        }
        pool.set_shape(node, Shape { count, level });
    }

    fn put_all(&self, tree: &BTree<K>, node: u64, level: u32) {
        self.put(tree, node, level, 0, self.count);
    }

    /// Distributes all entries over two nodes and returns the key between them. Of an inner node's keys
    /// that one goes to the parent and into neither node.
    fn distribute(&self, tree: &BTree<K>, left: u64, right: u64, level: u32, left_count: usize) -> K {
        let up = usize::from(level > 0);
        let left_count = left_count.min(self.count - 1 - up).max(1);
        self.put(tree, left, level, 0, left_count);
        self.put(tree, right, level, left_count + up, self.count - left_count - up);
        self.keys[left_count]
    }
}
