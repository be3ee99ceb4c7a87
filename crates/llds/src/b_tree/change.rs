//! Inserting and removing, and keeping nodes neither full nor empty.

use super::node::{CAPACITY_MAX, FixedKey, Shape, inner_capacity, leaf_capacity};
use super::{ANCHOR, Again, BTree, Full, Place};
use crate::primitive::{Ordering, spin_hint};

/// The entries of one node or of two neighbours, taken out to be dealt out again.
struct Hand<K> {
    keys: [K; 2 * CAPACITY_MAX + 1],
    /// Values of a leaf, or children of an inner node.
    below: [u64; 2 * CAPACITY_MAX + 2],
    count: usize,
}

/// A node that makes room or is filled up: its place, and the neighbour it deals with.
struct Pair {
    left: u64,
    right: u64,
    /// The index of the key between them in their parent.
    between: usize,
}

impl<K: FixedKey> BTree<K> {
    /// Stores the value with the key and gives the value that was there, in one descent.
    ///
    /// # Errors
    /// [`Full`] when the address space is used up.
    pub fn insert_or_replace(&self, key: K, value: u64) -> Result<Option<u64>, Full> {
        self.upsert(key, value, true)
    }

    /// Stores the value with the key unless the key is there; gives the value that is.
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
        let descent = self.descend(key, false, |place, shape| {
            if shape.count < inner_capacity::<K>() {
                return Ok(());
            }
            // Full: split before a child may need room for another key here.
            out_of_nodes = self.make_room(place, shape, key)?.is_err();
            Err(Again)
        });
        if out_of_nodes {
            return Ok(Err(Full));
        }
        let (place, _) = descent?;
        let pool = &self.pool;
        let leaf = place.leaf;
        if !pool.lock(leaf, place.leaf_version) {
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
            return match self.make_room(place, shape, key)? {
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

    /// Removes the key and gives its value, in one descent.
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
        let (place, _) = self.descend(key, false, |_, _| Ok(()))?;
        let pool = &self.pool;
        let leaf = place.leaf;
        if !pool.lock(leaf, place.leaf_version) {
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
        if Self::is_underfull(shape) && place.parent != ANCHOR {
            self.relieve(key);
        }
        Ok(Some(value))
    }

    fn is_underfull(shape: Shape) -> bool {
        shape.count < Self::capacity(shape) / 3
    }

    /// Merges or fills up the underfull nodes on the key's path, bottom last. Gives up if others are
    /// at it: the next removal tries again.
    fn relieve(&self, key: K) {
        // Each round does a step for one level; a tree has a dozen levels at most.
        for _ in 0..24 {
            let descent = self.descend(key, false, |place, shape| {
                if (place.parent == ANCHOR && shape.count == 0) || (place.parent != ANCHOR && Self::is_underfull(shape))
                {
                    self.fill_up(place, shape)?;
                    return Err(Again);
                }
                Ok(())
            });
            if let Ok((place, shape)) = descent {
                if place.parent != ANCHOR && Self::is_underfull(shape) && self.fill_up(place, shape).is_err() {
                    continue;
                }
                // A merge may have left the root with one child.
                if !self.lower_root() {
                    return;
                }
            }
        }
    }

    /// Makes the root's only child the root; tells whether it did.
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

    /// Locks the node at a place and its parent, if both are as they were.
    fn lock_with_parent(&self, place: Place) -> Result<(), Again> {
        let pool = &self.pool;
        if !pool.lock(place.parent, place.parent_version) {
            return Err(Again);
        }
        if !pool.lock(place.leaf, place.leaf_version) {
            pool.unlock_unchanged(place.parent);
            return Err(Again);
        }
        Ok(())
    }

    /// Splits a full node, or lets a neighbour take some of a full leaf's entries.
    fn make_room(&self, place: Place, shape: Shape, key: K) -> Result<Result<(), Full>, Again> {
        let pool = &self.pool;
        self.lock_with_parent(place)?;
        let node = place.leaf;
        if place.parent != ANCHOR && shape.level == 0 && self.spill(place, key) {
            return Ok(Ok(()));
        }
        let parent_shape = pool.shape(place.parent);
        debug_assert!(place.parent == ANCHOR || parent_shape.count < inner_capacity::<K>());
        let Some(right) = pool.allocate() else {
            pool.unlock_unchanged(node);
            pool.unlock_unchanged(place.parent);
            return Ok(Err(Full));
        };
        let new_root = if place.parent == ANCHOR {
            let Some(root) = pool.allocate() else {
                pool.free(right);
                pool.unlock_unchanged(node);
                pool.unlock_unchanged(place.parent);
                return Ok(Err(Full));
            };
            Some(root)
        } else {
            None
        };
        let mut hand = Hand::new();
        hand.take(self, node, shape);
        // Keys that come in order leave full nodes behind them.
        let left_count = if key > hand.keys[hand.count - 1] {
            hand.count - 1
        } else if key < hand.keys[0] {
            1
        } else {
            hand.count / 2
        };
        let between = hand.deal(self, node, right, shape.level, left_count.max(1));
        pool.bring_to_life(right);
        match new_root {
            Some(root) => {
                pool.set_shape(root, Shape { count: 1, level: shape.level + 1 });
                pool.set_key(root, 0, between);
                pool.set_child::<K>(root, 0, node);
                pool.set_child::<K>(root, 1, right);
                pool.bring_to_life(root);
                pool.word(ANCHOR, 1).store(root, Ordering::Relaxed);
            }
            None => self.insert_child(place.parent, parent_shape, place.index, between, right),
        }
        pool.unlock(node);
        pool.unlock(place.parent);
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

    /// The node at a place with its left or right neighbour under the same parent.
    fn pair(&self, place: Place, to_the_right: bool) -> Option<Pair> {
        let pool = &self.pool;
        let parent_count = pool.shape(place.parent).count;
        if to_the_right {
            (place.index < parent_count).then(|| Pair {
                left: place.leaf,
                right: pool.child::<K>(place.parent, place.index + 1),
                between: place.index,
            })
        } else {
            (place.index > 0).then(|| Pair {
                left: pool.child::<K>(place.parent, place.index - 1),
                right: place.leaf,
                between: place.index - 1,
            })
        }
    }

    /// Locks the neighbour in a pair; its parent, which is locked, keeps it where it is.
    fn lock_neighbour(&self, neighbour: u64) -> bool {
        self.pool.read_version(neighbour).is_some_and(|version| self.pool.lock(neighbour, version))
    }

    /// Deals a full leaf's entries out over it and a neighbour with room. Holds and releases the locks of
    /// parent and leaf if it did; else leaves them.
    fn spill(&self, place: Place, key: K) -> bool {
        let pool = &self.pool;
        let capacity = leaf_capacity::<K>();
        for to_the_right in [true, false] {
            let Some(pair) = self.pair(place, to_the_right) else { continue };
            let neighbour = if to_the_right { pair.right } else { pair.left };
            if !self.lock_neighbour(neighbour) {
                continue;
            }
            let neighbour_shape = pool.shape(neighbour);
            // Worth it if some inserts pass before either is full again; and not where keys come in order,
            // since the neighbour would be filled entry by entry.
            let room = capacity - neighbour_shape.count;
            let ordered = key > pool.key::<K>(place.leaf, capacity - 1) || key < pool.key::<K>(place.leaf, 0);
            if room < 2 || (ordered && pool.shape(place.parent).count > 0 && room < capacity / 2) {
                pool.unlock_unchanged(neighbour);
                continue;
            }
            let mut hand = Hand::new();
            hand.take(self, pair.left, pool.shape(pair.left));
            hand.take(self, pair.right, pool.shape(pair.right));
            let left_count = hand.count / 2;
            let between = hand.deal(self, pair.left, pair.right, 0, left_count);
            pool.set_key(place.parent, pair.between, between);
            pool.unlock(neighbour);
            pool.unlock(place.leaf);
            pool.unlock(place.parent);
            return true;
        }
        false
    }

    /// Merges an underfull node with a neighbour, or takes some of the neighbour's entries.
    fn fill_up(&self, place: Place, shape: Shape) -> Result<(), Again> {
        let pool = &self.pool;
        self.lock_with_parent(place)?;
        let release = |changed: bool| {
            for node in [place.leaf, place.parent] {
                if changed { pool.unlock(node) } else { pool.unlock_unchanged(node) }
            }
        };
        if place.parent == ANCHOR {
            release(false);
            self.lower_root();
            return Ok(());
        }
        let pair = self.pair(place, true).or_else(|| self.pair(place, false));
        let Some(pair) = pair else {
            // Its parent has no other child: the parent is relieved first.
            release(false);
            return Ok(());
        };
        let neighbour = if pair.left == place.leaf { pair.right } else { pair.left };
        if !self.lock_neighbour(neighbour) {
            release(false);
            return Err(Again);
        }
        let mut hand = Hand::new();
        hand.take(self, pair.left, pool.shape(pair.left));
        if shape.level > 0 {
            // The key between the two comes down between their children.
            hand.keys[hand.count] = pool.key(place.parent, pair.between);
            hand.count += 1;
        }
        hand.take(self, pair.right, pool.shape(pair.right));
        let parent_shape = pool.shape(place.parent);
        let capacity = Self::capacity(shape);
        if hand.count <= capacity - capacity / 8 {
            hand.put_all(self, pair.left, shape.level);
            self.remove_child(place.parent, parent_shape, pair.between);
            pool.unlock(pair.left);
            pool.unlock(place.parent);
            pool.discard(pair.right);
        } else {
            let left_count = hand.count / 2;
            let between = hand.deal(self, pair.left, pair.right, shape.level, left_count);
            pool.set_key(place.parent, pair.between, between);
            pool.unlock(neighbour);
            release(true);
        }
        Ok(())
    }
}

impl<K: FixedKey> Hand<K> {
    fn new() -> Self {
        Self { keys: [K::MIN; 2 * CAPACITY_MAX + 1], below: [0; 2 * CAPACITY_MAX + 2], count: 0 }
    }

    /// Adds a node's entries behind those already in the hand. For a second inner node the caller has
    /// added the key between them.
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

    /// Deals all entries out over two nodes and gives the key between them. Of an inner node's keys
    /// that one goes up and into neither.
    fn deal(&self, tree: &BTree<K>, left: u64, right: u64, level: u32, left_count: usize) -> K {
        let up = usize::from(level > 0);
        let left_count = left_count.min(self.count - 1 - up).max(1);
        self.put(tree, left, level, 0, left_count);
        self.put(tree, right, level, left_count + up, self.count - left_count - up);
        self.keys[left_count]
    }
}
