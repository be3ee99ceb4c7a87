//! Writeback: contents are written to the file, and stubs replace them in memory.
//!
//! A histogram of ages gives the age above which contents add up to the wanted bytes. These are packed into zones. Once
//! a zone is written, each page with one of its contents gets a stub. If the write fails, everything stays in memory.

use super::AGE_MAX;
use super::walk::{Moves, ReferencedWord};
use crate::arena::{NoSlot, ReserveClass};
use crate::backing_file::{BLOCK_BYTES, Blocks, ZONE_BYTES};
use crate::cleaner_state::CleanerState;
use crate::codec::{Codec, RAW_ABOVE_BYTES};
use crate::layout::{HEADER_BYTES, LEAVES_PER_SLAB, Meta, PATCHES_SHIFT, REFS_MASK, Shown};
use crate::stats::count;
use crate::tier::{Tier, with_worker};
use pagefold_os::PAGE_SIZE;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::Ordering;

/// Ages that the histogram distinguishes; older contents count as equally old.
const AGES: usize = 1024;
/// Smallest payload that is written back.
const WRITEBACK_BYTES_MIN: usize = 64;

/// The file could not be written, or there was no memory for a stub.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct WritebackFailed;

impl Tier {
    pub(super) fn write_back(&self, cleaner: &mut CleanerState, bytes_wanted: u64) -> u64 {
        let tick = self.tick.load(Ordering::Relaxed);
        if self.disk.is_none() || tick < cleaner.retry_tick {
            return 0;
        }
        let round = |cleaner: &mut CleanerState| match self.age_for(bytes_wanted) {
            Some(age_min) => self.write_back_round(cleaner, age_min, bytes_wanted, true),
            None => Ok((0, false)),
        };
        let mut result = round(cleaner);
        if result == Ok((0, true)) {
            // All candidates were spared, which happens only once in a row.
            result = round(cleaner);
        }
        self.count_written(cleaner, result).0
    }

    /// Writes back what was not used for [`Config::write_back_ticks`](crate::Config::write_back_ticks), a twentieth of the
    /// limit at a time.
    pub(super) fn write_back_aged(&self, cleaner: &mut CleanerState) -> u64 {
        let (tick, age_min) = (self.tick.load(Ordering::Relaxed), self.config.write_back_ticks.min(AGE_MAX / 2));
        // A walk over all pages each eighth of the age.
        let is_due = cleaner.has_aged || tick.is_multiple_of(u64::from(age_min / 8).max(1));
        if age_min == 0 || self.disk.is_none() || tick < cleaner.retry_tick || !is_due {
            return 0;
        }
        let result = self.write_back_round(cleaner, age_min, self.reclaim_bytes(), false);
        let (written, is_spared) = self.count_written(cleaner, result);
        cleaner.has_aged = written > 0 || is_spared || result.is_err();
        written
    }

    fn count_written(&self, cleaner: &mut CleanerState, result: Result<(u64, bool), WritebackFailed>) -> (u64, bool) {
        if result.is_err() {
            count(&self.counters.writeback_errors);
            cleaner.retry_tick = self.tick.load(Ordering::Relaxed) + 1;
        }
        let (written, is_spared) = result.unwrap_or_default();
        self.counters.written_back.fetch_add(written, Ordering::Relaxed);
        (written, is_spared)
    }

    /// Walks once over contents of at least this age; returns the contents written, and whether any was spared.
    /// A mostly empty zone wastes the file: one is written only if `may_waste` and nothing else was written.
    fn write_back_round(
        &self,
        cleaner: &mut CleanerState,
        age_min: u16,
        bytes_wanted: u64,
        may_waste: bool,
    ) -> Result<(u64, bool), WritebackFailed> {
        let mut batch = Batch::new();
        let (mut freed, mut written, mut spared, mut failed) = (0, 0, false, false);
        let is_wanted = |at: usize| self.writeback_age(at).is_some_and(|age| age >= age_min);
        let position = self.walk(cleaner.position, &is_wanted, |entry, moved| {
            if self.spare(entry.key, entry.index) {
                spared = true;
                return Ok(());
            }
            // Other pages of the batch may have the same content: the batch holds a reference for each.
            self.add_ref(entry.at);
            if !batch.add(self, entry) {
                self.release(entry.at);
                return Ok(());
            }
            if batch.is_full() {
                match batch.write(self, moved) {
                    Some((contents, bytes)) => {
                        written += contents;
                        freed += bytes;
                    }
                    None => failed = true,
                }
            }
            // Any error ends the walk.
            if failed || freed + batch.used as u64 >= bytes_wanted { Err(NoSlot::Full) } else { Ok(()) }
        });
        cleaner.position = position;
        if !failed && (may_waste && written == 0 || batch.used >= ZONE_BYTES / 2) {
            let mut last = Moves::default();
            match batch.write(self, &mut last) {
                Some((contents, _)) => written += contents,
                None => failed = true,
            }
            last.release_all(self);
        }
        batch.abandon(self);
        if failed { Err(WritebackFailed) } else { Ok((written, spared)) }
    }

    /// Age of a content; `None` if it may not be written back.
    fn writeback_age(&self, at: usize) -> Option<u16> {
        let meta = self.meta(at);
        let word2 = self.arena.word(at + 2).load(Ordering::Relaxed);
        let may = !meta.is_on_disk() && meta.resident_len() >= WRITEBACK_BYTES_MIN && word2 >> PATCHES_SHIFT == 0;
        may.then(|| self.age(word2))
    }

    /// The age above which contents add up to `bytes`; `None` if none may be written back.
    fn age_for(&self, bytes: u64) -> Option<u16> {
        let mut by_age = vec![0_u64; AGES];
        let mut seen = HashSet::new();
        for slab in self.arena.leaf_slabs() {
            for slot in 0..LEAVES_PER_SLAB {
                for word in self.arena.leaf((slab << 12 | slot) as u32) {
                    let Shown::Content(at) = Shown::from_word(word.load(Ordering::Relaxed)) else { continue };
                    if !self.arena.is_slot(at, 0) {
                        continue;
                    }
                    let Some(age) = self.writeback_age(at as usize) else { continue };
                    let shared = self.arena.word(at as usize + 2).load(Ordering::Relaxed) & REFS_MASK > 1;
                    if !shared || seen.insert(at) {
                        by_age[(age as usize).min(AGES - 1)] += self.meta(at as usize).resident_len() as u64;
                    }
                }
            }
        }
        let mut sum = 0;
        let enough = by_age.iter().rposition(|part| {
            sum += part;
            sum >= bytes
        });
        (sum > 0).then(|| enough.unwrap_or(0) as u16)
    }
}

/// Contents that are to be written in one zone.
struct Batch {
    blocks: Blocks,
    used: usize,
    words: Vec<ReferencedWord>,
    /// The offset of each content in the batch, and its encoding there.
    placed: HashMap<usize, (usize, Meta)>,
}

impl Batch {
    fn new() -> Batch {
        Batch { blocks: Blocks::new(ZONE_BYTES), used: 0, words: Vec::new(), placed: HashMap::new() }
    }

    fn is_full(&self) -> bool {
        self.used + PAGE_SIZE + 8 > ZONE_BYTES
    }

    /// Adds the content of a page word; false if it cannot be read. The entry's reference passes to the batch if true.
    fn add(&mut self, tier: &Tier, entry: ReferencedWord) -> bool {
        if !self.placed.contains_key(&entry.at) {
            let mut meta = tier.meta(entry.at);
            let free = &mut self.blocks.get_mut()[self.used..];
            if meta.codec == Codec::Patch as u8 {
                // A patch in the file would need its base in memory, or a second read.
                let Some((codec, dictionary, len)) = encode_without_base(tier, entry.at, free) else { return false };
                meta = Meta { len: len as u16, codec: codec as u8, dictionary };
            } else {
                let words = &tier.arena.words()[entry.at + HEADER_BYTES / 8..][..(meta.len as usize).div_ceil(8)];
                for (chunk, word) in free.chunks_exact_mut(8).zip(words) {
                    chunk.copy_from_slice(&word.load(Ordering::Relaxed).to_le_bytes());
                }
            }
            self.placed.insert(entry.at, (self.used, meta));
            self.used += (meta.len as usize).next_multiple_of(8);
        }
        self.words.push(entry);
        true
    }

    /// Drops the batch: its contents stay in memory.
    fn abandon(&mut self, tier: &Tier) {
        self.words.drain(..).for_each(|entry| tier.release(entry.at));
    }

    /// Writes the batch and gives its pages stubs. Returns the contents written and the bytes of memory freed.
    ///
    /// Contents that other pages have too are remembered in `moved`. `None` if the write fails; everything stays in
    /// memory then.
    fn write(&mut self, tier: &Tier, moved: &mut Moves) -> Option<(u64, u64)> {
        if self.words.is_empty() {
            return Some((0, 0));
        }
        let len = self.used.next_multiple_of(BLOCK_BYTES);
        let used = std::mem::take(&mut self.used);
        let words = std::mem::take(&mut self.words);
        let placed = std::mem::take(&mut self.placed);
        self.blocks.get_mut()[used..len].fill(0);
        let disk = tier.disk.as_ref()?;
        let written = disk.write(&self.blocks.get()[..len]);
        let mut stubs: HashMap<usize, usize> = HashMap::new();
        let mut freed = 0;
        let mut ok = written.is_ok();
        if let Ok(offset) = &written {
            for entry in &words {
                let stub = match stubs.get(&entry.at) {
                    Some(stub) => *stub,
                    None => {
                        let (start, meta) = placed[&entry.at];
                        let start = offset + start as u64;
                        let on_disk = Meta { codec: meta.codec | Meta::ON_DISK, ..meta };
                        let fingerprint = tier.arena.word(entry.at).load(Ordering::Relaxed);
                        let Ok(stub) =
                            tier.write_content(fingerprint, on_disk, &start.to_le_bytes(), ReserveClass::Reserve)
                        else {
                            ok = false;
                            break;
                        };
                        disk.add_live(start, meta.len as usize);
                        tier.copy_tick(stub, entry.at);
                        tier.replace_in_index(entry.at, stub);
                        freed += tier.meta(entry.at).resident_len() as u64;
                        stubs.insert(entry.at, stub);
                        stub
                    }
                };
                tier.add_ref(stub);
                if tier.exchange(entry.leaf, entry.index, entry.key, entry.word, Shown::Content(stub as u64).word()) {
                    tier.release(entry.at);
                } else {
                    tier.release(stub);
                }
            }
            disk.remove_live(*offset, 1);
        }
        for (old, stub) in &stubs {
            // The reference to the stub passes to the map.
            if let std::collections::hash_map::Entry::Vacant(vacant) = moved.0.entry(*old) {
                tier.add_ref(*old);
                vacant.insert(*stub);
            } else {
                tier.release(*stub);
            }
        }
        words.iter().for_each(|entry| tier.release(entry.at));
        ok.then_some((stubs.len() as u64, freed))
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        debug_assert!(self.words.is_empty() || std::thread::panicking(), "references would leak");
    }
}

/// Compresses a patched content without its base, into `out`.
fn encode_without_base(tier: &Tier, at: usize, out: &mut [u8]) -> Option<(Codec, u8, usize)> {
    with_worker(|worker| {
        let mut page = worker.take_page();
        let read = tier.read_content(at, worker, &mut page).is_ok();
        let result = read.then(|| {
            let (dictionary, digested) = tier.current_dictionary();
            match worker.coder.zstd(&page, digested, RAW_ABOVE_BYTES) {
                Some(bytes) => {
                    out[..bytes.len()].copy_from_slice(bytes);
                    (Codec::Zstd, dictionary, bytes.len())
                }
                None => {
                    out[..PAGE_SIZE].copy_from_slice(&page[..]);
                    (Codec::Raw, 0, PAGE_SIZE)
                }
            }
        });
        worker.return_page(page);
        result
    })
}
