//! The sweep: removes dead leaves and empty children, a few buckets at a time.

use super::word::{self, Control, SLOTS, SlotState};
use super::{SdTree, header};
use crate::epoch;
use crate::primitive::Ordering;

/// The position of a sweep between its steps. It is a position among the keys, so it stays valid while the tree grows.
#[derive(Clone, Debug, Default)]
pub struct SweepCursor {
    /// The leading bits of the next bucket's keys; lower bits are zero.
    next: u64,
    passes: u64,
}

impl SweepCursor {
    /// Begins at the lowest key.
    pub fn new() -> Self {
        Self::default()
    }

    /// How many times the sweep has been through the whole tree.
    pub fn passes(&self) -> u64 {
        self.passes
    }
}

impl SdTree {
    /// Visits the next `bucket_count` buckets and removes the leaves with a value that `keep` rejects.
    /// Returns the number of removed leaves. Other threads may read and write meanwhile.
    ///
    /// Every second pass marks empty children; the passes in between cut off those that are still
    /// empty, so their memory can be reused. `keep` may be called several times for one leaf, and not at
    /// all for one that is inserted or moved meanwhile. A removed leaf is exactly one that `keep` rejected:
    /// a pair that another thread removed and inserted again meanwhile counts as another leaf.
    pub fn retain(&self, cursor: &mut SweepCursor, bucket_count: usize, mut keep: impl FnMut(u64) -> bool) -> u64 {
        epoch::clock().try_advance();
        let mut removed = 0;
        for _ in 0..bucket_count {
            // A pin per bucket: a long sweep does not hold the clock.
            let _pin = epoch::pin();
            let (line, level) = self.root(cursor.next);
            removed += self.sweep_node(line, None, cursor.passes % 2 == 1, &mut keep);
            let next = (cursor.next >> (64 - level)) + 1;
            cursor.next = if next == 1 << level { 0 } else { next << (64 - level) };
            if cursor.next == 0 {
                cursor.passes += 1;
            }
        }
        if removed > 0 {
            self.count_removals(removed);
        }
        removed
    }

    fn sweep_node(
        &self,
        line: u64,
        parent: Option<(u64, usize)>,
        cutting: bool,
        keep: &mut impl FnMut(u64) -> bool,
    ) -> u64 {
        let mut removed = 0;
        for slot in 0..SLOTS {
            removed += u64::from(self.sweep_leaf(line, slot, keep));
        }
        for half in 0..2 {
            let control = self.memory.load_control(line);
            if let Some(slot) = control.link(half)
                && control.state(slot) == SlotState::Link
            {
                let link = self.memory.slot(line, slot).load(Ordering::Acquire);
                if self.memory.load_control(line) == control {
                    removed += self.sweep_node(word::value(link), Some((line, half)), cutting, keep);
                }
            }
        }
        if let Some((parent, half)) = parent {
            self.sweep_empty(line, parent, half, cutting);
        }
        removed
    }

    /// Removes the leaf of a slot if `keep` rejects it, and returns true if it did. If the node changes meanwhile, the slot
    /// may hold another leaf with the same word, so `keep` is called again.
    fn sweep_leaf(&self, line: u64, slot: usize, keep: &mut impl FnMut(u64) -> bool) -> bool {
        loop {
            let control = self.memory.load_control(line);
            // The leaf is being moved: the next pass meets it at its new place.
            if control.has(Control::FROZEN | Control::MOVING) || control.state(slot) != SlotState::Leaf {
                return false;
            }
            let leaf = self.memory.slot(line, slot).load(Ordering::Acquire);
            if self.memory.load_control(line) != control {
                continue;
            }
            if !word::is_leaf(leaf) || keep(word::value(leaf)) {
                return false;
            }
            if self.memory.change(line, control, control.set_state(slot, SlotState::Free).next_version()) {
                return true;
            }
        }
    }

    /// Marks an empty child, or cuts off one that was marked long ago and is still empty.
    ///
    /// Between mark and cut all threads pinned at the mark must have unpinned: among them is every late
    /// helper of the split that made this link, which still expects the old leaf in the link's slot.
    fn sweep_empty(&self, line: u64, parent: u64, half: usize, cutting: bool) {
        let control = self.memory.load_control(line);
        if !control.is_empty() || control.has(Control::FROZEN | Control::MOVING) {
            return;
        }
        let marked = self.memory.word(header::HEAD, header::MARKED);
        if cutting && control.has(Control::PENDING) {
            // Read after the mark was seen: the latest mark's epoch covers this one.
            if !epoch::clock().is_past(marked.load(Ordering::Acquire)) {
                return;
            }
            if self.memory.change(line, control, control.with(Control::FROZEN).next_version()) {
                self.cut(parent, half, line);
            }
        } else if !cutting && !control.has(Control::PENDING) {
            marked.fetch_max(epoch::clock().now(), Ordering::AcqRel);
            self.memory.change(line, control, control.with(Control::PENDING).next_version());
        }
    }
}
