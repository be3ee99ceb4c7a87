//! Searching: lookups that write nothing, and the steps down the tree that changes use too.
//!
//! A lookup reads a node's control word, its slots, and the control word again. A
//! lookup that meets unfinished work finishes it and restarts.

use super::SdTree;
#[cfg(all(target_arch = "x86_64", not(loom), not(miri)))]
use super::wide;
use super::word::{self, Control, SLOTS};
use crate::epoch;
use crate::primitive::{Ordering, spin_hint};

/// What one search reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    /// Cache lines.
    pub lines: u32,
    /// Key bits used to choose the bucket and, below it, the halves.
    pub path_bits: u32,
    /// Key bits compared with tags.
    pub tag_bits: u32,
}

/// The result of one attempt to search.
pub(super) enum Attempt {
    Found(u64),
    Missing,
    /// Another thread changed what was read, or left work unfinished: help, then try again.
    Again,
}

impl SdTree {
    /// Returns the value of a leaf that matches the fingerprint, very probably its own.
    #[inline]
    pub fn get(&self, fingerprint: u64) -> Option<u64> {
        self.get_with(fingerprint, |_| true)
    }

    /// Returns the value of a leaf that matches the fingerprint and passes `is_same`, which is called
    /// for each matching leaf (nearly always at most one) and should compare the full keys. It may be called for a value
    /// that another thread is just inserting or has just removed, and for no other.
    #[inline]
    pub fn get_with(&self, fingerprint: u64, mut is_same: impl FnMut(u64) -> bool) -> Option<u64> {
        loop {
            match self.attempt(fingerprint, &mut is_same) {
                Attempt::Found(value) => return Some(value),
                Attempt::Missing => return None,
                Attempt::Again => self.settle(fingerprint),
            }
        }
    }

    /// Finishes all unfinished work on the key's path.
    #[cold]
    fn settle(&self, fingerprint: u64) {
        let _pin = epoch::pin();
        let (mut line, mut level) = self.root(fingerprint);
        let mut parent = None;
        loop {
            let control = self.memory.load_control(line);
            if control.has(Control::FROZEN) {
                return self.unblock(line, parent);
            }
            if control.has(Control::MOVING) {
                self.finish_move(line, control);
                continue;
            }
            let half = Self::half_of(fingerprint, level);
            match self.child_of(line, control, fingerprint, level) {
                Some(Some(child)) => (parent, line, level) = (Some((line, half)), child, level + 1),
                Some(None) => {}
                None => return spin_hint(),
            }
        }
    }

    /// The slot of a leaf that matches and passes the check, and its word.
    #[inline(always)]
    pub(super) fn find_leaf(
        &self,
        line: u64,
        control: Control,
        key: u64,
        is_same: &mut impl FnMut(u64) -> bool,
    ) -> Option<(usize, u64)> {
        // All slots first, then the few that match: the loads and compares need no branches.
        let mut hits = self.matching_slots(line, key) & control.leaves();
        while hits != 0 {
            let slot = hits.trailing_zeros() as usize;
            let word = self.memory.slot(line, slot).load(Ordering::Acquire);
            // By now the slot may hold another leaf, or a link: `is_same` must not be called with the number of a line.
            if word::matches(word, key) && is_same(word::value(word)) {
                return Some((slot, word));
            }
            hits &= hits - 1;
        }
        None
    }

    /// One bit per slot with a matching word, whatever the slot holds.
    #[inline(always)]
    fn matching_slots(&self, line: u64, key: u64) -> u64 {
        #[cfg(all(target_arch = "x86_64", not(loom), not(miri)))]
        if crate::wide::has_avx512() {
            // SAFETY: `has_avx512` was checked, and a line's eight words are mapped and 64-byte aligned.
            let words = unsafe { wide::matching_words(std::ptr::from_ref(self.memory.control(line)).cast(), key) };
            return words >> 1;
        }
        let mut hits = 0u64;
        for slot in 0..SLOTS {
            let word = self.memory.slot(line, slot).load(Ordering::Acquire);
            hits |= u64::from(word::matches(word, key)) << slot;
        }
        hits
    }

    /// One search without a write and without a pin; the head of `sd_tree` argues why it is sound.
    #[inline(always)]
    fn attempt(&self, fingerprint: u64, is_same: &mut impl FnMut(u64) -> bool) -> Attempt {
        let mut level = self.section_bits(fingerprint);
        let mut line = Self::bucket_line(fingerprint, level);
        let mut control = self.memory.load_control(line);
        if control.has(Control::FROZEN) {
            if !control.has(Control::DONE) || level >= self.max_bits {
                return Attempt::Again;
            }
            level += 1;
            line = Self::bucket_line(fingerprint, level);
            control = self.memory.load_control(line);
        }
        if control.0 == 0 {
            // An untouched first bucket is empty; any other zero is memory that was released during the search.
            let section = Self::section_of(fingerprint);
            let untouched = level == self.initial_bits(section) && self.section_bits(fingerprint) == level;
            return if untouched { Attempt::Missing } else { Attempt::Again };
        }
        loop {
            if control.has(Control::FROZEN | Control::MOVING) {
                return Attempt::Again;
            }
            let found = self.find_leaf(line, control, fingerprint << level, is_same);
            let link = match found {
                Some(_) => None,
                None => control.link(Self::half_of(fingerprint, level)),
            };
            let Some(slot) = link else {
                // Pairs with the release compare-exchange that claimed or freed a slot: had a slot changed meanwhile,
                // its new word could only be seen together with a new control word.
                if self.memory.load_control(line) != control {
                    return Attempt::Again;
                }
                return found.map_or(Attempt::Missing, |(_, word)| Attempt::Found(word::value(word)));
            };
            let link = self.memory.slot(line, slot).load(Ordering::Acquire);
            if self.memory.load_control(line) != control {
                return Attempt::Again;
            }
            let child = word::value(link);
            let child_control = self.memory.load_control(child);
            // Still linked after its control word was read: so that word was this child's.
            if self.memory.load_control(line) != control {
                return Attempt::Again;
            }
            (line, level, control) = (child, level + 1, child_control);
        }
    }

    /// The bucket that now holds the key, and its level. The caller is pinned.
    pub(super) fn root(&self, fingerprint: u64) -> (u64, u32) {
        loop {
            let bits = self.section_bits(fingerprint);
            let line = Self::bucket_line(fingerprint, bits);
            let control = self.memory.load_control(line);
            if !control.has(Control::FROZEN) {
                return (line, bits);
            }
            if !control.has(Control::DONE) {
                self.migrate(line, bits);
            }
            let next = Self::bucket_line(fingerprint, bits + 1);
            if !self.memory.load_control(next).has(Control::FROZEN) {
                return (next, bits + 1);
            }
            // The section has finished this growth and is in the next one.
        }
    }

    /// The child for the key: `None` without a link, `Some(None)` if the node has changed.
    #[inline(always)]
    pub(super) fn child_of(&self, line: u64, control: Control, fingerprint: u64, level: u32) -> Option<Option<u64>> {
        let slot = control.link(Self::half_of(fingerprint, level))?;
        let link = self.memory.slot(line, slot).load(Ordering::Acquire);
        Some((self.memory.load_control(line) == control).then(|| word::value(link)))
    }

    /// Returns what a search for the fingerprint reads: lines, and bits of the key.
    ///
    /// A bit counts each time it is used: once by the path, and by the tag window of each line.
    pub fn trace(&self, fingerprint: u64) -> Trace {
        let _pin = epoch::pin();
        let (mut line, mut level) = self.root(fingerprint);
        let mut trace = Trace { lines: 0, path_bits: level, tag_bits: 0 };
        loop {
            trace.lines += 1;
            trace.tag_bits += word::TAG_KEY_BITS.min(64 - level);
            let control = self.memory.load_control(line);
            let found = self.find_leaf(line, control, fingerprint << level, &mut |_| true);
            if found.is_some() || control.has(Control::MOVING | Control::FROZEN) {
                return trace;
            }
            let Some(Some(child)) = self.child_of(line, control, fingerprint, level) else { return trace };
            (line, level) = (child, level + 1);
            trace.path_bits += 1;
        }
    }
}
