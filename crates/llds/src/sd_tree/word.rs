//! The two kinds of word a node is made of: the control word and the slots.
//!
//! A slot that holds a leaf is `tag << 40 | value`. The tag is up to 23 key bits, those that
//! follow the bits which the path has used, then a one, then zeros: the lowest set bit says how
//! many key bits are known. A leaf that moves one level down loses its first known bit to the
//! path, by one shift, and no thread needs to know its key. A slot that holds a link has no tag.

/// Bits of a value: 2^40 pages are 4 PiB.
pub const VALUE_BITS: u32 = 40;
/// The largest value a leaf can hold.
pub const VALUE_MAX: u64 = (1 << VALUE_BITS) - 1;
/// Key bits that a fresh leaf remembers.
pub(super) const TAG_KEY_BITS: u32 = 63 - VALUE_BITS;

/// Leaves and links per node: the rest of the cache line after the control word.
#[cfg(all(not(loom), not(pagefold_stress)))]
pub(super) const SLOTS: usize = 7;
#[cfg(all(not(loom), pagefold_stress))]
pub(super) const SLOTS: usize = 3;
#[cfg(loom)]
pub(super) const SLOTS: usize = 2;

/// Makes the leaf for `fingerprint` in a node that the path reaches after `level` key bits.
pub(super) fn leaf(fingerprint: u64, level: u32, value: u64) -> u64 {
    debug_assert!(value <= VALUE_MAX && level < 64);
    let known = TAG_KEY_BITS.min(64 - level);
    let end = 63 - known;
    let bits = (fingerprint << level) >> (end + 1) << (end + 1);
    bits | 1 << end | value
}

/// The value of a leaf, or the line of a link.
pub(super) fn value(word: u64) -> u64 {
    word & VALUE_MAX
}

pub(super) fn is_leaf(word: u64) -> bool {
    word >> VALUE_BITS != 0
}

/// How many key bits a leaf still knows.
pub(super) fn known_bits(leaf: u64) -> u32 {
    63 - (leaf & !VALUE_MAX).trailing_zeros()
}

/// Tells whether all known bits of the leaf equal those of the key. `key` is the fingerprint
/// shifted left by the node's level.
#[inline(always)]
pub(super) fn matches(leaf: u64, key: u64) -> bool {
    // The known bits stand above the lowest set bit of the tag.
    let tag = leaf & !VALUE_MAX;
    (leaf ^ key) >> 1 < tag & tag.wrapping_neg()
}

/// The half of its node that a leaf belongs to: its first known bit.
pub(super) fn half(leaf: u64) -> usize {
    (leaf >> 63) as usize
}

/// The leaf one level down: its first known bit is the path's now.
pub(super) fn down(leaf: u64) -> u64 {
    debug_assert!(known_bits(leaf) > 0);
    (leaf & !VALUE_MAX) << 1 | value(leaf)
}

/// What a slot holds, two bits of the control word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SlotState {
    /// Nothing. The thread that changes it to `Claimed` may write the slot.
    Free = 0,
    /// A leaf that one thread is writing; no other thread reads it.
    Claimed = 1,
    Leaf = 2,
    /// The line of a child that holds all keys of one half.
    Link = 3,
}

/// A node's control word. Every change of a node is one compare-and-swap here, so the version
/// above the flags orders all of them.
///
/// `version:39 | PENDING | MOVING | READY | DONE | FROZEN | link1:3 | link0:3 | high:7 | low:7`, where
/// slot `i`'s state is bit `i` of `high` and bit `i` of `low`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Control(pub(super) u64);

const LINK_SHIFT: u32 = 14;
const LINK_BITS: u32 = 3;
const FLAG_SHIFT: u32 = 20;
const VERSION_SHIFT: u32 = 25;

/// Where the high bits of the states begin.
const HIGH_SHIFT: u32 = 7;
/// The low bits of the states.
const STATE_LOW: u64 = (1 << SLOTS) - 1;

impl Control {
    /// Set by a thread that moves the node's content to the next static array or unlinks the node: the
    /// content must not change any more. Never cleared while the node is linked.
    pub(super) const FROZEN: u64 = 1 << FLAG_SHIFT;
    /// Set when a frozen bucket's content is complete in the next static array.
    pub(super) const DONE: u64 = 2 << FLAG_SHIFT;
    /// Set when a node holds its first content; a bucket of a new static array lacks it.
    pub(super) const READY: u64 = 4 << FLAG_SHIFT;
    /// Set while a link replaces one leaf; a thread that meets it helps first.
    pub(super) const MOVING: u64 = 8 << FLAG_SHIFT;
    /// Set by the sweep on a child that is empty; cleared by the next insert.
    pub(super) const PENDING: u64 = 16 << FLAG_SHIFT;

    pub(super) fn has(self, flag: u64) -> bool {
        self.0 & flag != 0
    }

    pub(super) fn with(self, flag: u64) -> Self {
        Self(self.0 | flag)
    }

    pub(super) fn without(self, flag: u64) -> Self {
        Self(self.0 & !flag)
    }

    pub(super) fn next_version(self) -> Self {
        Self(self.0.wrapping_add(1 << VERSION_SHIFT))
    }

    /// A ready and empty node with the version after this one's.
    pub(super) fn reborn(self) -> Self {
        Self((self.next_version().0 >> VERSION_SHIFT) << VERSION_SHIFT | Self::READY)
    }

    pub(super) fn state(self, slot: usize) -> SlotState {
        match self.0 >> slot & 1 | (self.0 >> (HIGH_SHIFT as usize + slot) & 1) << 1 {
            0 => SlotState::Free,
            1 => SlotState::Claimed,
            2 => SlotState::Leaf,
            _ => SlotState::Link,
        }
    }

    pub(super) fn set_state(self, slot: usize, state: SlotState) -> Self {
        let planes = 1 << slot | 1 << (HIGH_SHIFT as usize + slot);
        let state = state as u64;
        Self(self.0 & !planes | (state & 1) << slot | (state >> 1) << (HIGH_SHIFT as usize + slot))
    }

    /// One bit per slot: those that hold a leaf.
    #[inline(always)]
    pub(super) fn leaves(self) -> u64 {
        self.0 >> HIGH_SHIFT & !self.0 & STATE_LOW
    }

    pub(super) fn free_slot(self) -> Option<usize> {
        let free = !(self.0 | self.0 >> HIGH_SHIFT) & STATE_LOW;
        (free != 0).then(|| free.trailing_zeros() as usize)
    }

    /// A slot that no thread is writing.
    pub(super) fn quiet_slot(self) -> Option<usize> {
        (0..SLOTS).find(|&slot| self.state(slot) != SlotState::Claimed)
    }

    /// Tells that no slot holds or is about to hold anything.
    pub(super) fn is_empty(self) -> bool {
        self.0 & (STATE_LOW | STATE_LOW << HIGH_SHIFT) == 0
    }

    /// The slot of the link that holds all keys of `half`. While `MOVING` the slot may still hold its leaf.
    #[inline(always)]
    pub(super) fn link(self, half: usize) -> Option<usize> {
        ((self.0 >> (LINK_SHIFT + LINK_BITS * half as u32) & 7) as usize).checked_sub(1)
    }

    pub(super) fn set_link(self, half: usize, slot: Option<usize>) -> Self {
        let shift = LINK_SHIFT + LINK_BITS * half as u32;
        let code = slot.map_or(0, |slot| slot as u64 + 1);
        Self(self.0 & !(7 << shift) | code << shift)
    }

    /// The half that is moving from leaves to a link, and the slot of that link.
    pub(super) fn moving(self) -> (usize, usize) {
        debug_assert!(self.has(Self::MOVING));
        for half in 0..2 {
            if let Some(slot) = self.link(half)
                && self.state(slot) != SlotState::Link
            {
                return (half, slot);
            }
        }
        unreachable!("a moving node has a link code for a slot that is not a link yet")
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn leaf_matches_its_own_key_at_every_depth(key: u64, level in 0u32..40, value in 0..=VALUE_MAX) {
            let mut word = leaf(key, level, value);
            for depth in 0..TAG_KEY_BITS.min(63 - level) {
                prop_assert!(matches(word, key << (level + depth)));
                prop_assert_eq!(known_bits(word), TAG_KEY_BITS.min(64 - level) - depth);
                prop_assert_eq!(half(word) as u64, key << (level + depth) >> 63);
                prop_assert_eq!(super::value(word), value);
                prop_assert!(is_leaf(word));
                word = down(word);
            }
        }

        #[test]
        fn leaf_differs_from_a_key_that_differs_in_a_known_bit(key: u64, level in 0u32..41, bit in 0..TAG_KEY_BITS) {
            let word = leaf(key, level, 7);
            prop_assert!(!matches(word, (key << level) ^ (1 << (63 - bit))));
        }
    }
}
