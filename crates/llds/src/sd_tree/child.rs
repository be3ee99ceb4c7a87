//! Children: splitting a full node, and the life of a child's line.

use super::sync_points::{Point, sync_here};
use super::word::{self, Control, SLOTS, SlotState};
use super::{DEPTH_MAX, Full, SdTree, header};
use crate::epoch;
use crate::primitive::Ordering;

/// Children held in reserve so that a helper always gets one: more than threads that can be in a split at the same time.
const RESERVED_CHILDREN: u64 = if cfg!(loom) { 2 } else { 1 << 13 };

/// New children between attempts to reuse retired ones, while there are few.
const CHILDREN_PER_ADVANCE: u64 = if cfg!(any(loom, pagefold_stress)) { 1 } else { 16 };

/// One of this many children may wait to be reused.
const CHILDREN_SPARED: u64 = 64;

const LINE_BITS: u32 = word::VALUE_BITS;
const LINE_MASK: u64 = word::VALUE_MAX;
const STAMP_MASK: u64 = u64::MAX >> LINE_BITS;

impl SdTree {
    fn first_child_line(&self) -> u64 {
        2 << self.max_bits
    }

    fn child_limit(&self) -> u64 {
        self.memory.lines() - self.first_child_line()
    }

    /// Makes room in a full node: chooses the half with more leaves and begins to move it to a
    /// child. `depth` is the node's distance from its bucket. The caller is pinned and looks again.
    pub(super) fn start_move(&self, line: u64, control: Control, depth: u32) -> Result<(), Full> {
        if depth >= DEPTH_MAX
            || self.shared(header::CHILDREN).load(Ordering::Relaxed) + RESERVED_CHILDREN > self.child_limit()
        {
            return Err(Full);
        }
        let mut halves: [(usize, Option<usize>); 2] = [(0, None); 2];
        for slot in 0..SLOTS {
            if control.state(slot) != SlotState::Leaf {
                continue;
            }
            let word = self.memory.slot(line, slot).load(Ordering::Acquire);
            if !word::is_leaf(word) || word::known_bits(word) == 0 {
                continue;
            }
            let (count, first) = &mut halves[word::half(word)];
            *count += 1;
            first.get_or_insert(slot);
        }
        if self.memory.load_control(line) != control {
            return Ok(());
        }
        let half = usize::from(halves[1].0 > halves[0].0);
        let Some(slot) = halves[half].1 else {
            // Nothing but links and slots that other threads are writing at this moment.
            return Err(Full);
        };
        debug_assert!(control.link(half).is_none(), "leaves of a linked half are in its child");
        let moving = control.with(Control::MOVING).set_link(half, Some(slot)).next_version();
        if self.memory.change(line, control, moving) {
            sync_here(Point::Moving);
            self.finish_move(line, moving);
        }
        Ok(())
    }

    /// Finishes a split: a thread that meets a moving node does this before anything else. Pinned.
    ///
    /// All helpers see the same leaves, because a moving node cannot change otherwise. Each builds a
    /// child of its own; the first to put its link over the leaf in the link's slot wins. That slot
    /// holds the same leaf again only after the link was removed, which the sweep does only when
    /// every thread that was pinned at the split has unpinned: no late helper can mistake it.
    pub(super) fn finish_move(&self, line: u64, control: Control) {
        let (half, link_slot) = control.moving();
        let mut next = control.without(Control::MOVING).set_state(link_slot, SlotState::Link).next_version();
        let mut leaves = [0; SLOTS];
        let mut count = 0;
        let first = self.memory.slot(line, link_slot).load(Ordering::Acquire);
        for slot in 0..SLOTS {
            if control.state(slot) != SlotState::Leaf {
                continue;
            }
            let word = if slot == link_slot { first } else { self.memory.slot(line, slot).load(Ordering::Acquire) };
            if !word::is_leaf(word) || word::half(word) != half {
                continue;
            }
            if slot != link_slot {
                next = next.set_state(slot, SlotState::Free);
            }
            // A leaf without known bits is never in a moving half; it can only seem so if the node has changed meanwhile.
            if word::known_bits(word) > 0 {
                leaves[count] = word::down(word);
                count += 1;
            }
        }
        if word::is_leaf(first) {
            if self.memory.load_control(line) != control {
                return;
            }
            let Some(child) = self.allocate_child() else { return };
            let mut states = self.memory.load_control(child).reborn();
            for (slot, leaf) in leaves[..count].iter().enumerate() {
                self.memory.slot(child, slot).store(*leaf, Ordering::Release);
                states = states.set_state(slot, SlotState::Leaf);
            }
            self.memory.control(child).store(states.0, Ordering::Release);
            let link = self.memory.slot(line, link_slot);
            if link.compare_exchange(first, child, Ordering::AcqRel, Ordering::Acquire).is_err() {
                self.free_child(child);
            } else {
                sync_here(Point::Linked);
            }
        }
        self.memory.change(line, control, next);
    }

    /// Takes a line for a child: a freed one, a retired one that is past its epoch, or a new one.
    fn allocate_child(&self) -> Option<u64> {
        if let Some(line) = self.pop_free() {
            return Some(line);
        }
        // Advancing the clock costs microseconds and interrupts other threads, a new line costs nothing: try it rarely.
        let ever = self.shared(header::CHILDREN).load(Ordering::Relaxed);
        let between = (ever / CHILDREN_SPARED).next_power_of_two().max(CHILDREN_PER_ADVANCE);
        let due = ever.is_multiple_of(between) || ever + RESERVED_CHILDREN > self.child_limit();
        if due
            && self.reclaim_retired()
            && let Some(line) = self.pop_free()
        {
            return Some(line);
        }
        let count = self.shared(header::CHILDREN).fetch_add(1, Ordering::Relaxed);
        if count >= self.child_limit() {
            self.shared(header::CHILDREN).fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        Some(self.first_child_line() + count)
    }

    fn pop_free(&self) -> Option<u64> {
        let head = self.shared(header::FREE);
        let mut word = head.load(Ordering::Acquire);
        loop {
            let line = word & LINE_MASK;
            if line == 0 {
                return None;
            }
            // This may be a leaf by now, if another thread took the line; then the count of changes above the line differs.
            let next = self.memory.slot(line, 0).load(Ordering::Acquire) & LINE_MASK;
            let changed = ((word >> LINE_BITS) + 1) << LINE_BITS | next;
            match head.compare_exchange(word, changed, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => {
                    self.shared(header::FREE_COUNT).fetch_sub(1, Ordering::Relaxed);
                    return Some(line);
                }
                Err(seen) => word = seen,
            }
        }
    }

    /// Puts a line that no other thread can reach into the free list.
    fn free_child(&self, line: u64) {
        self.shared(header::FREE_COUNT).fetch_add(1, Ordering::Relaxed);
        let head = self.shared(header::FREE);
        let mut word = head.load(Ordering::Acquire);
        loop {
            self.memory.slot(line, 0).store(word & LINE_MASK, Ordering::Release);
            let changed = ((word >> LINE_BITS) + 1) << LINE_BITS | line;
            match head.compare_exchange(word, changed, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return,
                Err(seen) => word = seen,
            }
        }
    }

    /// Removes the link to a child that a sweep froze. Any thread that meets such a child does this.
    pub(super) fn cut(&self, parent: u64, half: usize, child: u64) {
        loop {
            let child_control = self.memory.load_control(child);
            let control = self.memory.load_control(parent);
            let frozen_by_sweep = child_control.has(Control::PENDING) && child_control.has(Control::FROZEN);
            if control.has(Control::FROZEN) || !frozen_by_sweep {
                // The parent is moved together with the child's (empty) content; or the child was frozen with its bucket.
                return;
            }
            if control.has(Control::MOVING) {
                self.finish_move(parent, control);
                continue;
            }
            let Some(slot) = control.link(half) else { return };
            let link = self.memory.slot(parent, slot).load(Ordering::Acquire);
            if self.memory.load_control(parent) != control {
                continue;
            }
            if word::value(link) != child {
                return;
            }
            let cut = control.set_state(slot, SlotState::Free).set_link(half, None).next_version();
            if self.memory.change(parent, control, cut) {
                self.retire_child(child);
                return;
            }
        }
    }

    /// Retires an unlinked, frozen child until its epoch is past. The caller is pinned.
    ///
    /// The bag is chosen by the epoch modulo 3, so older content of the same bag is at least three
    /// epochs old. The chain runs through a slot that no stopped claimer can still write.
    pub(super) fn retire_child(&self, line: u64) {
        let Some(slot) = self.memory.load_control(line).quiet_slot() else {
            // Every slot is claimed by a stopped thread: the line is lost, not reused under it.
            return;
        };
        let now = epoch::clock().now();
        let bag = self.shared(header::RETIRED + (now % 3) as usize);
        loop {
            let word = bag.load(Ordering::Acquire);
            let same_epoch = word >> LINE_BITS == now & STAMP_MASK;
            let next = if same_epoch { word & LINE_MASK } else { 0 };
            self.memory.slot(line, slot).store(next, Ordering::Release);
            let changed = (now & STAMP_MASK) << LINE_BITS | line;
            if bag.compare_exchange(word, changed, Ordering::AcqRel, Ordering::Acquire).is_ok() {
                if !same_epoch {
                    self.free_chain(word & LINE_MASK);
                }
                return;
            }
        }
    }

    /// Moves retired children that are past their epoch to the free list; returns true if there were any.
    pub(super) fn reclaim_retired(&self) -> bool {
        let full = (0..3).any(|bag| self.shared(header::RETIRED + bag).load(Ordering::Relaxed) & LINE_MASK != 0);
        if !full {
            return false;
        }
        epoch::clock().try_advance();
        let mut drained = false;
        for bag in 0..3 {
            let bag = self.shared(header::RETIRED + bag);
            let word = bag.load(Ordering::Acquire);
            let line = word & LINE_MASK;
            let age = epoch::clock().now().wrapping_sub(word >> LINE_BITS) & STAMP_MASK;
            if line == 0 || age < 2 {
                continue;
            }
            let emptied = word & !LINE_MASK;
            if bag.compare_exchange(word, emptied, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                self.free_chain(line);
                drained = true;
            }
        }
        drained
    }

    fn free_chain(&self, mut line: u64) {
        while line != 0 {
            let slot = self.memory.load_control(line).quiet_slot().expect("the slot the chain runs through");
            let next = self.memory.slot(line, slot).load(Ordering::Acquire) & LINE_MASK;
            self.free_child(line);
            line = next;
        }
    }
}
