//! Changing: insert, remove and replace, each decided by one compare-and-swap of a node's control word.
//!
//! All three descend to the node that decides about the key and act there. If the
//! node has changed meanwhile they look again; if the key may belong to another
//! node now, they restart at the bucket.

use super::sync_points::{Point, sync_here};
use super::word::{self, Control, SlotState, VALUE_BITS, VALUE_MAX};
use super::{Full, SdTree, grow, header};
use crate::epoch;
use crate::primitive::{Ordering, spin_hint};

impl SdTree {
    /// Inserts the value unless a leaf matches the fingerprint. Returns the value of that leaf, or
    /// `None` if this one was inserted. If threads insert one fingerprint concurrently, exactly one gets `None`.
    ///
    /// # Errors
    /// [`Full`] when too many keys share their leading bits; never for well-spread keys.
    ///
    /// # Panics
    /// When `value` exceeds [`VALUE_MAX`].
    pub fn get_or_insert(&self, fingerprint: u64, value: u64) -> Result<Option<u64>, Full> {
        self.get_or_insert_with(fingerprint, value, |_| true)
    }

    /// Inserts as [`SdTree::get_or_insert`] does, but only values that pass `is_same` count as equal.
    ///
    /// # Errors
    /// As [`SdTree::get_or_insert`].
    ///
    /// # Panics
    /// As [`SdTree::get_or_insert`].
    pub fn get_or_insert_with(
        &self,
        fingerprint: u64,
        value: u64,
        mut is_same: impl FnMut(u64) -> bool,
    ) -> Result<Option<u64>, Full> {
        assert!(value <= VALUE_MAX, "value {value:#x} has more than {VALUE_BITS} bits");
        let _pin = epoch::pin();
        let existing = self.insert_pinned(fingerprint, value, &mut is_same)?;
        if existing.is_none() {
            self.count_insert();
        }
        Ok(existing)
    }

    /// Descends to the node that decides about the key: the first with a leaf that matches and passes the check, or the
    /// last of the path. Finishes unfinished work on the way. `act` gets the node and the leaf, if there is one.
    #[inline(always)]
    fn descend<T>(
        &self,
        fingerprint: u64,
        is_same: &mut impl FnMut(u64) -> bool,
        mut act: impl FnMut(&Node, Option<(usize, u64)>, &mut dyn FnMut(u64) -> bool) -> Next<T>,
    ) -> T {
        'restart: loop {
            let (mut line, root_level) = self.root(fingerprint);
            let mut level = root_level;
            let mut parent = None;
            loop {
                let control = self.memory.load_control(line);
                if control.has(Control::FROZEN) {
                    self.unblock(line, parent.map(|(parent, level)| (parent, Self::half_of(fingerprint, level))));
                    continue 'restart;
                }
                if control.has(Control::MOVING) {
                    self.finish_move(line, control);
                    continue;
                }
                let found = self.find_leaf(line, control, fingerprint << level, is_same);
                if found.is_none()
                    && let Some(child) = self.child_of(line, control, fingerprint, level)
                {
                    match child {
                        Some(child) => (parent, line, level) = (Some((line, level)), child, level + 1),
                        None => continue,
                    }
                    continue;
                }
                match act(&Node { line, control, level, depth: level - root_level }, found, is_same) {
                    Next::Done(result) => return result,
                    Next::Again => continue,
                    Next::Restart => continue 'restart,
                }
            }
        }
    }

    fn insert_pinned(
        &self,
        fingerprint: u64,
        value: u64,
        is_same: &mut impl FnMut(u64) -> bool,
    ) -> Result<Option<u64>, Full> {
        let mut spins_left = 10_000;
        self.descend(fingerprint, is_same, |node, found, is_same| {
            let &Node { line, control, level, depth } = node;
            if let Some((_, found)) = found {
                if self.memory.load_control(line) != control {
                    return Next::Again;
                }
                return Next::Done(Ok(Some(word::value(found))));
            }
            let Some(slot) = control.free_slot() else {
                match self.start_move(line, control, depth) {
                    // Every slot is being written by another thread, for a moment or because those threads are stopped.
                    Err(Full) if control.leaves() == 0 && spins_left > 0 => {
                        spins_left -= 1;
                        spin_hint();
                    }
                    Err(Full) => return Next::Done(Err(Full)),
                    Ok(()) => {}
                }
                return Next::Again;
            };
            let claimed = control.set_state(slot, SlotState::Claimed).without(Control::PENDING).next_version();
            if !self.memory.change(line, control, claimed) {
                return Next::Again;
            }
            sync_here(Point::Claimed);
            self.memory.slot(line, slot).store(word::leaf(fingerprint, level, value), Ordering::Release);
            sync_here(Point::Written);
            match self.commit(line, claimed, slot, fingerprint, level, is_same) {
                Commit::Done => Next::Done(Ok(None)),
                Commit::Exists(existing) => Next::Done(Ok(Some(existing))),
                Commit::Elsewhere => Next::Restart,
            }
        })
    }

    /// Makes the claimed and written slot a leaf, unless an equal key was inserted first.
    fn commit(
        &self,
        line: u64,
        claimed: Control,
        slot: usize,
        fingerprint: u64,
        level: u32,
        is_same: &mut dyn FnMut(u64) -> bool,
    ) -> Commit {
        let mut control = claimed;
        loop {
            if self.memory.change(line, control, control.set_state(slot, SlotState::Leaf).next_version()) {
                return Commit::Done;
            }
            control = self.memory.load_control(line);
            if control.has(Control::FROZEN) {
                // The thread that moved the node's content did not move a claimed slot.
                return Commit::Elsewhere;
            }
            if control.has(Control::MOVING) {
                self.finish_move(line, control);
                continue;
            }
            let found = self.find_leaf(line, control, fingerprint << level, &mut |found| is_same(found));
            if self.memory.load_control(line) != control {
                continue;
            }
            if let Some((_, word)) = found {
                self.unclaim(line, slot);
                return Commit::Exists(word::value(word));
            }
            if control.link(Self::half_of(fingerprint, level)).is_some() {
                self.unclaim(line, slot);
                return Commit::Elsewhere;
            }
        }
    }

    /// Frees a claimed slot; in a frozen node that is not needed.
    fn unclaim(&self, line: u64, slot: usize) {
        loop {
            let control = self.memory.load_control(line);
            if control.has(Control::FROZEN) {
                return;
            }
            if self.memory.change(line, control, control.set_state(slot, SlotState::Free).next_version()) {
                return;
            }
        }
    }

    /// Finds the leaf with this fingerprint and value and calls `step` with its node and slot until `step` returns a result.
    #[inline(always)]
    fn with_leaf<T>(&self, fingerprint: u64, value: u64, mut step: impl FnMut(&Node, usize) -> Option<T>) -> Option<T> {
        self.descend(fingerprint, &mut |found| found == value, |node, found, _| match found {
            Some((slot, _)) => step(node, slot).map_or(Next::Again, |result| Next::Done(Some(result))),
            None if self.memory.load_control(node.line) == node.control => Next::Done(None),
            None => Next::Again,
        })
    }

    /// Removes the leaf with this fingerprint if its value is `expected`; returns true if it was there.
    pub fn remove(&self, fingerprint: u64, expected: u64) -> bool {
        let _pin = epoch::pin();
        let removed = self.with_leaf(fingerprint, expected, |&Node { line, control, .. }, slot| {
            self.memory.change(line, control, control.set_state(slot, SlotState::Free).next_version()).then_some(())
        });
        if removed.is_some() {
            self.count_removals(1);
        }
        removed.is_some()
    }

    /// Replaces `old_value` by `new_value` in the leaf with this fingerprint, in one step for all
    /// readers; returns true if it was there. Also `false` if the leaf's bucket has no room for the step and
    /// is at its last level, which needs the same hostile keys as [`Full`].
    ///
    /// # Panics
    /// When `new_value` exceeds [`VALUE_MAX`].
    pub fn replace(&self, fingerprint: u64, old_value: u64, new_value: u64) -> bool {
        assert!(new_value <= VALUE_MAX, "value {new_value:#x} has more than {VALUE_BITS} bits");
        let _pin = epoch::pin();
        self.with_leaf(fingerprint, old_value, |&Node { line, control, level, depth }, slot| {
            let Some(fresh) = control.free_slot() else {
                return self.start_move(line, control, depth).err().map(|Full| false);
            };
            let claimed = control.set_state(fresh, SlotState::Claimed).next_version();
            if !self.memory.change(line, control, claimed) {
                return None;
            }
            // The new leaf stores bits of the whole fingerprint, which may be more than the old leaf knew.
            self.memory.slot(line, fresh).store(word::leaf(fingerprint, level, new_value), Ordering::Release);
            let swapped = claimed.set_state(fresh, SlotState::Leaf).set_state(slot, SlotState::Free).next_version();
            if self.memory.change(line, claimed, swapped) {
                return Some(true);
            }
            self.unclaim(line, fresh);
            None
        })
        .unwrap_or(false)
    }

    /// Counts a leaf and does this thread's share of growing. The caller is pinned.
    #[inline(always)]
    fn count_insert(&self) {
        let inserts = if let Some(line) = self.own_counts() {
            let (leaves, inserts) = (self.memory.word(line, 0), self.memory.word(line, 1));
            leaves.store(leaves.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
            let count = inserts.load(Ordering::Relaxed).wrapping_add(1);
            inserts.store(count, Ordering::Relaxed);
            count
        } else {
            self.memory.word(header::COUNT_SHARED, 0).fetch_add(1, Ordering::Relaxed).wrapping_add(1)
        };
        if inserts.is_multiple_of(grow::INSERTS_PER_STEP) {
            self.grow_step();
        }
    }
}

/// A node on the path of a change, as it was read: neither moving nor frozen.
struct Node {
    line: u64,
    control: Control,
    level: u32,
    /// Levels below its bucket.
    depth: u32,
}

/// What to do after a node was examined.
enum Next<T> {
    Done(T),
    /// The node has changed: look again.
    Again,
    /// The key may belong to another node now: restart at the bucket.
    Restart,
}

/// The result of a commit.
enum Commit {
    Done,
    /// An equal key is there, with this value.
    Exists(u64),
    /// The key now belongs to another node.
    Elsewhere,
}
