//! Growing the static part: a section at a time, by the inserting threads, without stopping any thread.
//!
//! Each helper claims different buckets, so that helpers do not repeat work. Buckets that a helper claimed and left undone
//! are moved by a helper that finds none left to claim, so no thread waits for another.

use super::sync_points::{Point, sync_here};
use super::word::{self, Control, SLOTS, SlotState};
use super::{DOUBLINGS_MAX, SECTION_BITS, SECTIONS, SdTree, header};
use crate::epoch;
use crate::primitive::{AtomicU64, Ordering};
use std::ops::Range;

/// Inserts of one thread between its steps of work on growing.
pub(super) const INSERTS_PER_STEP: u64 = if cfg!(loom) { 1 } else { 16 };
/// Buckets moved in a step. Sixteen inserts fill three buckets, so growing stays ahead of filling.
const BUCKETS_PER_STEP: u64 = 24;
/// Buckets by which the position advances at most in a step: as many as several helpers moved meanwhile.
const COUNTED_PER_STEP: u64 = 8 * BUCKETS_PER_STEP;
/// Lines in a huge page: the unit in which memory goes back to the system.
const LINES_PER_HUGE_PAGE: u64 = (2 << 20) / crate::line_memory::LINE_BYTES as u64;

/// Attempts to release memory while one release unit is outgrown.
const TRIES_PER_RELEASE: u64 = 8;

/// Bits of a release word that stand for array parts, from the smallest array on.
const PART_BITS: u32 = 16;
const PARTS: u64 = (1 << PART_BITS) - 1;

const _: () = assert!(DOUBLINGS_MAX <= PART_BITS);

/// The current growth, packed into one word so that all threads agree on it.
#[derive(Clone, Copy)]
struct Growth {
    section: u64,
    bits: u32,
    position: u64,
}

impl Growth {
    fn pack(self) -> u64 {
        (self.section << 48 | u64::from(self.bits) << 40 | self.position) + 1
    }

    fn unpack(word: u64) -> Option<Self> {
        let word = word.checked_sub(1)?;
        Some(Self { section: word >> 48, bits: (word >> 40) as u8 as u32, position: word & ((1 << 40) - 1) })
    }

    /// Returns true if both are the same growth, whatever their positions.
    fn is_same(&self, other: &Growth) -> bool {
        (self.section, self.bits) == (other.section, other.bits)
    }

    /// Buckets to be moved.
    fn bucket_count(self) -> u64 {
        1 << (self.bits - SECTION_BITS)
    }
}

/// Sections that release their parts of the array of `bits` leading bits together: memory is released in whole huge pages.
fn sections_per_release(bits: u32) -> u64 {
    (LINES_PER_HUGE_PAGE >> (bits - SECTION_BITS)).clamp(1, SECTIONS)
}

impl SdTree {
    fn release_word(&self, section: u64) -> &AtomicU64 {
        self.memory.word(header::RELEASES + section / 8, (section % 8) as usize)
    }

    /// Does a small share of the current growth, and begins one if the tree is loaded. Pinned.
    pub(super) fn grow_step(&self) {
        let active = self.shared(header::ACTIVE);
        let mut budget = BUCKETS_PER_STEP;
        while budget > 0 {
            let seen = active.load(Ordering::Acquire);
            if let Some(growth) = Growth::unpack(seen) {
                budget -= self.grow_on(seen, growth, budget);
                continue;
            }
            let bucket_count = self.shared(header::BUCKETS).load(Ordering::Relaxed);
            if self.len() * 10 <= bucket_count * self.load_tenths {
                return;
            }
            let Some(growth) = self.next_growth() else { return };
            // A release needs two steps of the clock, so try it several times while the next unit is outgrown.
            if growth.section.is_multiple_of((sections_per_release(growth.bits) / TRIES_PER_RELEASE).max(1)) {
                self.release_arrays();
            }
            let _ = active.compare_exchange(0, growth.pack(), Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    /// The first of the smallest sections, if it may still grow.
    fn next_growth(&self) -> Option<Growth> {
        let smallest = (0..SECTIONS).min_by_key(|&section| self.section_word(section).load(Ordering::Acquire))?;
        let bits = self.section_word(smallest).load(Ordering::Acquire) as u32;
        (bits < self.max_bits).then_some(Growth { section: smallest, bits, position: 0 })
    }

    /// Moves up to `budget` buckets, finishes the growth if they were the last, and returns their number (at least 1).
    fn grow_on(&self, seen: u64, growth: Growth, budget: u64) -> u64 {
        let active = self.shared(header::ACTIVE);
        let section = self.section_word(growth.section);
        if section.load(Ordering::Acquire) != u64::from(growth.bits) {
            // Another thread finished it but has not yet cleared `ACTIVE`.
            let _ = active.compare_exchange(seen, 0, Ordering::AcqRel, Ordering::Relaxed);
            return 1;
        }
        let start = Self::section_start(growth.section, growth.bits);
        let (mine, is_claimed) = self.claim(growth, budget);
        let step = (mine.end - mine.start).max(1);
        for position in mine.clone() {
            self.migrate(start + position, growth.bits);
        }
        // Only the helper with the first uncounted buckets advances the position: lines that other threads wrote are far
        // away, so they should be read once. If no helper has those buckets any more, a helper without a claim advances it.
        let seen = if is_claimed { active.load(Ordering::Acquire) } else { seen };
        let Some(growth) = Growth::unpack(seen).filter(|now| now.is_same(&growth)) else { return step };
        if is_claimed && mine.start != growth.position {
            return step;
        }
        // A helper that advances the position has seen `DONE` in all buckets before it, its own and those of others.
        let most = (growth.position + COUNTED_PER_STEP).min(growth.bucket_count());
        let done = |position: &u64| self.memory.load_control(start + position).has(Control::DONE);
        let end = growth.position + (growth.position..most).take_while(done).count() as u64;
        let moved = Growth { position: end, ..growth };
        if end < growth.bucket_count() {
            let _ = active.compare_exchange(seen, moved.pack(), Ordering::AcqRel, Ordering::Relaxed);
            return step;
        }
        let grown = u64::from(growth.bits) + 1;
        if section.compare_exchange(u64::from(growth.bits), grown, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            self.shared(header::BUCKETS).fetch_add(growth.bucket_count(), Ordering::Relaxed);
            self.release_later(growth.section, growth.bits);
        }
        let _ = active.compare_exchange(seen, 0, Ordering::AcqRel, Ordering::Relaxed);
        step
    }

    /// Claims up to `budget` buckets that no other helper claimed, and returns true with them; if none are left, returns the
    /// first that are not counted as done, and false.
    fn claim(&self, growth: Growth, budget: u64) -> (Range<u64>, bool) {
        let claims = self.memory.word(header::CLAIMS, 0);
        loop {
            let seen = claims.load(Ordering::Relaxed);
            let taken = Growth::unpack(seen).filter(|claim| claim.is_same(&growth)).map_or(0, |claim| claim.position);
            let from = taken.max(growth.position);
            let claimed = from < growth.bucket_count();
            let from = if claimed { from } else { growth.position };
            let end = (from + budget).min(growth.bucket_count());
            let next = Growth { position: end, ..growth };
            if !claimed || claims.compare_exchange(seen, next.pack(), Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                return (from..end, claimed);
            }
        }
    }

    /// Marks an outgrown array part for release. Parts of the section that wait already get the same, later stamp.
    fn release_later(&self, section: u64, bits: u32) {
        let part = 1 << (bits - self.first_bits);
        // The clock is read after the word, so the stamp is never older than the one it replaces.
        let noted = |seen: u64| Some(epoch::clock().now() << PART_BITS | seen & PARTS | part);
        let _ = self.release_word(section).fetch_update(Ordering::AcqRel, Ordering::Acquire, noted);
    }

    /// The outgrown array parts of a section that no thread can write any more: one bit each.
    fn past_parts(&self, section: u64) -> u64 {
        let word = self.release_word(section).load(Ordering::Acquire);
        if word & PARTS != 0 && epoch::clock().is_past(word >> PART_BITS) { word & PARTS } else { 0 }
    }

    /// Releases the memory of outgrown array parts that no thread can write any more. Costs a system call, and has no effect
    /// before all parts in one huge page are outgrown.
    pub(super) fn release_arrays(&self) {
        let waiting = |section| self.release_word(section).load(Ordering::Acquire) & PARTS;
        let mut parts = (0..SECTIONS).fold(0, |parts, section| parts | waiting(section));
        if parts == 0 {
            return;
        }
        epoch::clock().try_advance();
        while parts != 0 {
            let bits = self.first_bits + parts.trailing_zeros();
            parts &= parts - 1;
            let group = sections_per_release(bits);
            for first in (0..SECTIONS).step_by(group as usize) {
                self.release_group(first..first + group, bits);
            }
        }
    }

    /// Releases the parts of a group of sections in the array of `bits` leading bits, if all of them may be released.
    fn release_group(&self, group: Range<u64>, bits: u32) {
        let bit = 1 << (bits - self.first_bits);
        if !group.clone().all(|section| self.past_parts(section) & bit != 0) {
            return;
        }
        let lines = (group.end - group.start) << (bits - SECTION_BITS);
        if lines >= LINES_PER_HUGE_PAGE {
            let start = Self::section_start(group.start, bits);
            self.memory.release(start..start + lines);
        }
        // A part is outgrown once: a late or concurrent helper clears the same bit and no other.
        for section in group {
            self.release_word(section).fetch_and(!bit, Ordering::Relaxed);
        }
    }

    /// Resolves a frozen node for a thread that met it. A bucket's content is moved; a child that a
    /// sweep froze is cut off. A child that was frozen with its bucket needs nothing: the search
    /// restarts at the bucket.
    pub(super) fn unblock(&self, line: u64, parent: Option<(u64, usize)>) {
        match parent {
            Some((parent, half)) => self.cut(parent, half, line),
            None if !self.memory.load_control(line).has(Control::DONE) => self.migrate(line, line.ilog2()),
            None => {}
        }
    }

    /// Freezes a node and returns its last control word. The caller is pinned.
    pub(super) fn freeze(&self, line: u64) -> Control {
        loop {
            let control = self.memory.load_control(line);
            if control.has(Control::FROZEN) {
                return control;
            }
            if control.has(Control::MOVING) {
                self.finish_move(line, control);
                continue;
            }
            let frozen = control.with(Control::FROZEN).next_version();
            if self.memory.change(line, control, frozen) {
                return frozen;
            }
        }
    }

    /// Moves a bucket to its two successors in the next array; any thread may do or finish it. Pinned.
    ///
    /// A half that has a child *is* that child, one level down: its words are copied as they are.
    /// Otherwise the half's leaves go down one bit. The words that helpers write depend on frozen nodes
    /// only, so all helpers write the same, and only over zeros: a word is never zero again once it was
    /// filled, so a late helper changes nothing.
    pub(super) fn migrate(&self, line: u64, bits: u32) {
        let control = self.freeze(line);
        if control.has(Control::DONE) {
            return;
        }
        sync_here(Point::Frozen);
        let index = line - (1 << bits);
        let mut children = [None; 2];
        for (half, child) in children.iter_mut().enumerate() {
            let target = (1 << (bits + 1)) | index << 1 | half as u64;
            let mut filled = Control(0).reborn();
            let mut words = [0; SLOTS];
            if let Some(slot) = control.link(half) {
                let link = word::value(self.memory.slot(line, slot).load(Ordering::Acquire));
                *child = Some(link);
                let frozen = self.freeze(link);
                for (slot, word) in words.iter_mut().enumerate() {
                    if matches!(frozen.state(slot), SlotState::Leaf | SlotState::Link) {
                        *word = self.memory.slot(link, slot).load(Ordering::Acquire);
                        filled = filled.set_state(slot, frozen.state(slot));
                    }
                }
                for half in 0..2 {
                    filled = filled.set_link(half, frozen.link(half));
                }
            } else {
                let mut count = 0;
                for slot in (0..SLOTS).filter(|&slot| control.state(slot) == SlotState::Leaf) {
                    let word = self.memory.slot(line, slot).load(Ordering::Acquire);
                    if word::half(word) == half {
                        words[count] = word::down(word);
                        filled = filled.set_state(count, SlotState::Leaf);
                        count += 1;
                    }
                }
            }
            if !self.memory.load_control(target).has(Control::READY) {
                for (slot, &word) in words.iter().enumerate().filter(|&(_, &word)| word != 0) {
                    let _ =
                        self.memory.slot(target, slot).compare_exchange(0, word, Ordering::AcqRel, Ordering::Relaxed);
                }
                let _ = self.memory.change(target, Control(0), filled);
            }
            if half == 0 {
                sync_here(Point::HalfCopied);
            }
        }
        if self.memory.change(line, control, control.with(Control::DONE)) {
            for child in children.into_iter().flatten() {
                self.retire_child(child);
            }
        }
    }
}
