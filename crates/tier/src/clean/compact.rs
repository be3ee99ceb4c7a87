//! Compaction: moves contents out of the emptiest slabs of a class into free slots of the others, and frees those slabs.
//!
//! A patch moves with its base, because it names the base by its offset.

use crate::arena::{NoSlot, ReserveClass};
use crate::cleaner_state::CleanerState;
use crate::codec::Codec;
use crate::layout::{HEADER_BYTES, PATCHES_SHIFT, SLAB_WORDS, TRIED};
use crate::tier::Tier;
use std::sync::atomic::Ordering;

impl Tier {
    pub(super) fn compact(&self, cleaner: &mut CleanerState) -> u64 {
        let counters = &self.counters;
        let frees = [&counters.discards, &counters.written_back, &counters.recompressed, &counters.stores]
            .iter()
            .map(|counter| counter.load(Ordering::Relaxed))
            .sum();
        if frees == cleaner.frees_seen || self.arena.start_draining(usize::MAX) == 0 {
            cleaner.frees_seen = frees;
            return 0;
        }
        let draining = self.arena.draining();
        let base_of = |at: usize| (self.meta(at).codec == Codec::Patch as u8).then(|| self.payload_word(at) as usize);
        let is_draining = |at: usize| draining.contains(&(at / SLAB_WORDS));
        let wanted = |at: usize| is_draining(at) || base_of(at).is_some_and(is_draining);
        let mut count_moved = 0;
        self.walk((0, 0), &wanted, |entry, moved| {
            let made = match base_of(entry.at) {
                Some(base) if is_draining(base) => {
                    let base = match moved.0.get(&base) {
                        Some(made) => *made,
                        None => {
                            let made = self.copy_content(base, None)?;
                            // The patch holds a reference to the old base; the map holds its own.
                            self.add_ref(base);
                            self.replace_in_index(base, made);
                            moved.0.insert(base, made);
                            count_moved += 1;
                            made
                        }
                    };
                    self.copy_content(entry.at, Some(base))?
                }
                _ => self.copy_content(entry.at, None)?,
            };
            count_moved += 1;
            moved.replace(self, entry, made);
            Ok(())
        });
        self.arena.stop_draining();
        counters.moved.fetch_add(count_moved, Ordering::Relaxed);
        cleaner.frees_seen = if count_moved == 0 { frees } else { 0 };
        count_moved
    }

    /// A copy of a referenced content in another slot; a patch gets `base` if one is given.
    fn copy_content(&self, at: usize, base: Option<usize>) -> Result<usize, NoSlot> {
        let words = self.arena.words();
        let meta = self.meta(at);
        let len = meta.resident_len();
        let mut payload: Vec<u8> = words[at + HEADER_BYTES / 8..][..len.div_ceil(8)]
            .iter()
            .flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes())
            .collect();
        payload.truncate(len);
        let is_patch = meta.codec == Codec::Patch as u8;
        if let (true, Some(base)) = (is_patch, base) {
            payload[..8].copy_from_slice(&(base as u64).to_le_bytes());
        }
        let made = self.write_content(words[at].load(Ordering::Relaxed), meta, &payload, ReserveClass::Reserve)?;
        if is_patch {
            let base = self.payload_word(made) as usize;
            self.add_ref(base);
            words[base + 2].fetch_add(1 << PATCHES_SHIFT, Ordering::Relaxed);
        }
        if let Some(disk) = self.disk.as_ref().filter(|_| meta.is_on_disk()) {
            disk.add_live(self.payload_word(made), meta.len as usize);
        }
        words[made + 1].fetch_or(words[at + 1].load(Ordering::Relaxed) & TRIED, Ordering::Relaxed);
        self.copy_tick(made, at);
        Ok(made)
    }
}
