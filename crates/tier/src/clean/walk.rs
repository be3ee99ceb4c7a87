//! The walk that all cleaning uses: over the leaves, to the page words with a content that is to be replaced.
//!
//! A new content replaces an old one page by page, and is remembered for other pages with the old content. The walk holds
//! references to both, so that neither is freed meanwhile.

use crate::arena::NoSlot;
use crate::layout::{LEAF_PAGES, LEAVES_PER_SLAB, REFS_MASK, Shown, TICK_SHIFT, split_key};
use crate::tier::Tier;
use std::collections::HashMap;
use std::sync::atomic::Ordering;

/// Most replaced contents that are remembered; beyond it they are forgotten.
const MOVES_MAX: usize = 1 << 16;

/// A page word, with a reference to its content.
#[derive(Clone, Copy)]
pub(super) struct ReferencedWord {
    pub leaf: u32,
    pub index: usize,
    pub key: u64,
    pub word: u64,
    /// The content.
    pub at: usize,
}

/// The new contents of this walk, by the old ones; holds a reference to both.
#[derive(Default)]
pub(super) struct Moves(pub HashMap<usize, usize>);

impl Tier {
    /// Calls `act` for each page word with a `wanted` content, from `start` to the end and then from the beginning. Ends
    /// early if `act` fails.
    ///
    /// Returns the position where it ended.
    pub(super) fn walk(
        &self,
        start: (usize, usize),
        wanted: &dyn Fn(usize) -> bool,
        mut act: impl FnMut(ReferencedWord, &mut Moves) -> Result<(), NoSlot>,
    ) -> (usize, usize) {
        let slabs = self.arena.leaf_slabs();
        let split = slabs.partition_point(|slab| *slab < start.0);
        let whole = |slab: &usize| (*slab, 0..LEAVES_PER_SLAB);
        // The first slab is visited twice: from `start` on, and at the end up to `start`.
        let is_there = slabs.get(split) == Some(&start.0);
        let (head, tail) = if is_there {
            (Some((start.0, start.1..LEAVES_PER_SLAB)), Some((start.0, 0..start.1)))
        } else {
            (None, None)
        };
        let after = slabs[split + usize::from(is_there)..].iter().map(whole);
        let round = head.into_iter().chain(after).chain(slabs[..split].iter().map(whole)).chain(tail);
        let mut moved = Moves::default();
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
                    // A quick check without a reference, which may be wrong, before the one with a reference.
                    let Shown::Content(at) = Shown::from_word(word.load(Ordering::Relaxed)) else { continue };
                    if !self.arena.is_slot(at, 0) || !wanted(at as usize) {
                        continue;
                    }
                    let Some((word, at)) = self.word_with_ref(leaf, index, key) else { continue };
                    let entry = ReferencedWord { leaf, index, key, word, at };
                    let result = match moved.0.get(&at) {
                        Some(made) => {
                            self.add_ref(*made);
                            moved.replace(self, entry, *made);
                            Ok(())
                        }
                        None if wanted(at) => act(entry, &mut moved),
                        None => Ok(()),
                    };
                    self.release(at);
                    if result.is_err() {
                        break 'walk;
                    }
                }
                if moved.0.len() > MOVES_MAX {
                    moved.release_all(self);
                }
            }
        }
        moved.release_all(self);
        position
    }

    /// Returns true once for a page that was loaded lately.
    pub(super) fn spare(&self, key: u64, index: usize) -> bool {
        let (client, cluster) = split_key(key);
        self.client(client).is_some_and(|client| client.spare(cluster * LEAF_PAGES as u64 + index as u64))
    }

    /// Lets the index find `made` instead of `old`.
    pub(super) fn replace_in_index(&self, old: usize, made: usize) {
        let words = self.arena.words();
        let mut shard = self.contents.shard(words[old].load(Ordering::Relaxed), words);
        if shard.holds(old) {
            shard.remove(old);
            shard.insert(made);
        }
    }

    /// Gives `to` the tick of `from`, because moving a content is not a use of it.
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

impl Moves {
    /// Replaces the content of a page word by `made`; the caller's reference passes to the page. Remembers `made` if other
    /// pages have the old content too.
    pub(super) fn replace(&mut self, tier: &Tier, entry: ReferencedWord, made: usize) {
        let refs = tier.arena.word(entry.at + 2).load(Ordering::Relaxed) & REFS_MASK;
        if refs > 2 && !self.0.contains_key(&entry.at) {
            tier.add_ref(entry.at);
            tier.add_ref(made);
            self.0.insert(entry.at, made);
        }
        tier.replace_in_index(entry.at, made);
        if tier.exchange(entry.leaf, entry.index, entry.key, entry.word, Shown::Content(made as u64).word()) {
            tier.release(entry.at);
        } else {
            tier.release(made);
        }
    }

    pub(super) fn release_all(&mut self, tier: &Tier) {
        for (old, made) in self.0.drain() {
            tier.release(old);
            tier.release(made);
        }
    }
}
