//! The walk that all cleaning is: over the leaves, past the page words whose content is wanted elsewhere.
//!
//! A new content takes the place of an old one page by page, and is remembered for the others that show the old one.
//! References are held by whoever is at it, so that neither goes meanwhile.

use crate::arena::NoSlot;
use crate::layout::{LEAF_PAGES, LEAVES_PER_SLAB, REFS_MASK, Shown, TICK_SHIFT, split_key};
use crate::tier::Tier;
use std::collections::HashMap;
use std::sync::atomic::Ordering;

/// Contents remembered as moved before they are let go.
const MOVED_MAX: usize = 1 << 16;

/// One page word, and the content that it shows, referenced.
#[derive(Clone, Copy)]
pub(super) struct Seat {
    pub leaf: u32,
    pub index: usize,
    pub key: u64,
    pub word: u64,
    pub at: usize,
}

/// Contents made anew in this walk, by where they were; holds a reference to both.
#[derive(Default)]
pub(super) struct Moved(pub HashMap<usize, usize>);

impl Tier {
    /// Calls `act` for each page word whose content is `wanted`, from `start` on and round; ends early if `act` fails.
    ///
    /// Returns where it ended.
    pub(super) fn walk(
        &self,
        start: (usize, usize),
        wanted: &dyn Fn(usize) -> bool,
        mut act: impl FnMut(Seat, &mut Moved) -> Result<(), NoSlot>,
    ) -> (usize, usize) {
        let slabs = self.arena.leaf_slabs();
        let split = slabs.partition_point(|slab| *slab < start.0);
        let whole = |slab: &usize| (*slab, 0..LEAVES_PER_SLAB);
        // The slab to begin with comes twice: from the start on, and at the end up to it.
        let is_there = slabs.get(split) == Some(&start.0);
        let (head, tail) = if is_there {
            (Some((start.0, start.1..LEAVES_PER_SLAB)), Some((start.0, 0..start.1)))
        } else {
            (None, None)
        };
        let after = slabs[split + usize::from(is_there)..].iter().map(whole);
        let round = head.into_iter().chain(after).chain(slabs[..split].iter().map(whole)).chain(tail);
        let mut moved = Moved::default();
        let mut position = start;
        'walk: for (slab, slots) in round {
            for slot in slots {
                let leaf = (slab << 12 | slot) as u32;
                let key = self.arena.leaf_key(leaf).load(Ordering::Acquire);
                if key == 0 {
                    continue;
                }
                position = (slab, slot);
                for (index, word) in self.arena.leaf(leaf).iter().enumerate() {
                    // A glance without reference, which may err, before the look with one.
                    let Shown::Content(at) = Shown::from_word(word.load(Ordering::Relaxed)) else { continue };
                    if !self.arena.is_slot(at, 0) || !wanted(at as usize) {
                        continue;
                    }
                    let Some((word, at)) = self.word_with_ref(leaf, index, key) else { continue };
                    let seat = Seat { leaf, index, key, word, at };
                    let result = match moved.0.get(&at) {
                        Some(made) => {
                            self.add_ref(*made);
                            moved.replace(self, seat, *made);
                            Ok(())
                        }
                        None if wanted(at) => act(seat, &mut moved),
                        None => Ok(()),
                    };
                    self.release(at);
                    if result.is_err() {
                        break 'walk;
                    }
                }
                if moved.0.len() > MOVED_MAX {
                    moved.let_go(self);
                }
            }
        }
        moved.let_go(self);
        position
    }

    /// True once for a page that came back lately.
    pub(super) fn spare(&self, key: u64, index: usize) -> bool {
        let (region, cluster) = split_key(key);
        self.region(region).is_some_and(|region| region.spare(cluster * LEAF_PAGES as u64 + index as u64))
    }

    /// Lets the index find `made` instead of `old`.
    pub(super) fn succeed(&self, old: usize, made: usize) {
        let words = self.arena.words();
        let mut shard = self.contents.shard(words[old].load(Ordering::Relaxed), words);
        if shard.holds(old) {
            shard.remove(old);
            shard.insert(made);
        }
    }

    /// Gives `to` the tick of `from`: moving is no use.
    pub(super) fn copy_tick(&self, to: usize, from: usize) {
        self.set_tick(to, self.arena.word(from + 2).load(Ordering::Relaxed));
    }

    /// Gives the content `at` the tick that is in `word2`.
    pub(super) fn set_tick(&self, at: usize, word2: u64) {
        let ticks = 0xffff << TICK_SHIFT;
        let set = |word| Some(word & !ticks | word2 & ticks);
        let _ = self.arena.word(at + 2).fetch_update(Ordering::Relaxed, Ordering::Relaxed, set);
    }

    pub(super) fn age(&self, word2: u64) -> u16 {
        (self.tick.load(Ordering::Relaxed) as u16).wrapping_sub((word2 >> TICK_SHIFT) as u16)
    }
}

impl Moved {
    /// Lets the seat show `made`, whose reference is passed in, and remembers it if others show the old content too.
    pub(super) fn replace(&mut self, tier: &Tier, seat: Seat, made: usize) {
        let refs = tier.arena.word(seat.at + 2).load(Ordering::Relaxed) & REFS_MASK;
        if refs > 2 && !self.0.contains_key(&seat.at) {
            tier.add_ref(seat.at);
            tier.add_ref(made);
            self.0.insert(seat.at, made);
        }
        tier.succeed(seat.at, made);
        if tier.exchange(seat.leaf, seat.index, seat.key, seat.word, Shown::Content(made as u64).word()) {
            tier.release(seat.at);
        } else {
            tier.release(made);
        }
    }

    pub(super) fn let_go(&mut self, tier: &Tier) {
        for (old, made) in self.0.drain() {
            tier.release(old);
            tier.release(made);
        }
    }
}
