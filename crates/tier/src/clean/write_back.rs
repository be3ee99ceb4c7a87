//! Writeback: contents go to the file, and stubs stay.
//!
//! A histogram of ages says from which on contents make up what is wanted. Those are packed into segments; each page
//! that shows one gets a stub, once its segment is written. If the file refuses, everything stays where it was.

use super::Cleaner;
use super::walk::{Moved, Seat};
use crate::arena::{NoSlot, Purse};
use crate::codec::{Codec, RAW_ABOVE_BYTES};
use crate::layout::{HEADER_BYTES, LEAVES_PER_SLAB, Meta, PATCHES_SHIFT, REFS_MASK, Shown};
use crate::stats::count;
use crate::tier::{Tier, with_worker};
use crate::writeback::{BLOCK_BYTES, Blocks, SEGMENT_BYTES};
use pagefold_os::PAGE_SIZE;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::Ordering;

/// Ages told apart when choosing what to write back; older is equal.
const AGES: usize = 1024;
/// Least payload that is worth a place in the file.
const WRITEBACK_BYTES_MIN: usize = 64;

/// The file could not be written, or there was no room for what stays in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileRefuses;

impl Tier {
    pub(super) fn write_back(&self, cleaner: &mut Cleaner, bytes_wanted: u64) -> u64 {
        let tick = self.tick.load(Ordering::Relaxed);
        if self.disk.is_none() || tick < cleaner.retry_tick {
            return 0;
        }
        let mut result = self.write_back_round(cleaner, bytes_wanted);
        if result == Ok((0, true)) {
            // Everything was spared: not twice.
            result = self.write_back_round(cleaner, bytes_wanted);
        }
        let written = result.map_or(0, |(written, _)| written);
        if result.is_err() {
            count(&self.counters.writeback_errors);
            cleaner.retry_tick = tick + 1;
        }
        self.counters.written_back.fetch_add(written, Ordering::Relaxed);
        written
    }

    /// Walks once; returns the contents written and whether any was spared, or that the file refuses.
    fn write_back_round(&self, cleaner: &mut Cleaner, bytes_wanted: u64) -> Result<(u64, bool), FileRefuses> {
        let Some(age_min) = self.age_for(bytes_wanted) else { return Ok((0, false)) };
        let mut batch = Batch::new();
        let (mut freed, mut written, mut spared, mut failed) = (0, 0, false, false);
        let may_go = |at: usize| self.may_go(at).is_some_and(|age| age >= age_min);
        let position = self.walk(cleaner.position, &may_go, |seat, moved| {
            if self.spare(seat.key, seat.index) {
                spared = true;
                return Ok(());
            }
            // Another page of the batch may show it: the batch keeps a reference for each.
            self.add_ref(seat.at);
            if !batch.add(self, seat) {
                self.release(seat.at);
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
        // A segment that is mostly empty is a waste of the file, unless it is all there is.
        if !failed && (written == 0 || batch.used >= SEGMENT_BYTES / 2) {
            let mut last = Moved::default();
            match batch.write(self, &mut last) {
                Some((contents, _)) => written += contents,
                None => failed = true,
            }
            last.let_go(self);
        }
        batch.abandon(self);
        if failed { Err(FileRefuses) } else { Ok((written, spared)) }
    }

    /// Age of a content that may be written back; `None` if it may not.
    fn may_go(&self, at: usize) -> Option<u16> {
        let meta = self.meta(at);
        let word2 = self.arena.word(at + 2).load(Ordering::Relaxed);
        let may = !meta.is_on_disk() && meta.resident_len() >= WRITEBACK_BYTES_MIN && word2 >> PATCHES_SHIFT == 0;
        may.then(|| self.age(word2))
    }

    /// The age from which on contents make up `bytes`; `None` if nothing may go.
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
                    let Some(age) = self.may_go(at as usize) else { continue };
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

/// Contents on their way to the file.
struct Batch {
    blocks: Blocks,
    used: usize,
    seats: Vec<Seat>,
    /// Where each content lies in the batch, and how it is to be read there.
    placed: HashMap<usize, (usize, Meta)>,
}

impl Batch {
    fn new() -> Batch {
        Batch { blocks: Blocks::new(SEGMENT_BYTES), used: 0, seats: Vec::new(), placed: HashMap::new() }
    }

    fn is_full(&self) -> bool {
        self.used + PAGE_SIZE + 8 > SEGMENT_BYTES
    }

    /// Takes the content of a seat in, with the reference passed in; false if it cannot be read.
    fn add(&mut self, tier: &Tier, seat: Seat) -> bool {
        if !self.placed.contains_key(&seat.at) {
            let mut meta = tier.meta(seat.at);
            let room = &mut self.blocks.get_mut()[self.used..];
            if meta.codec == Codec::Patch as u8 {
                // A patch in the file would keep its base in memory, or need two reads.
                let Some((codec, dictionary, len)) = plainly(tier, seat.at, room) else { return false };
                meta = Meta { len: len as u16, codec: codec as u8, dictionary };
            } else {
                let words = &tier.arena.words()[seat.at + HEADER_BYTES / 8..][..(meta.len as usize).div_ceil(8)];
                for (chunk, word) in room.chunks_exact_mut(8).zip(words) {
                    chunk.copy_from_slice(&word.load(Ordering::Relaxed).to_le_bytes());
                }
            }
            self.placed.insert(seat.at, (self.used, meta));
            self.used += (meta.len as usize).next_multiple_of(8);
        }
        self.seats.push(seat);
        true
    }

    /// Leaves the contents where they are.
    fn abandon(&mut self, tier: &Tier) {
        self.seats.drain(..).for_each(|seat| tier.release(seat.at));
    }

    /// Writes the batch and lets its pages show what is in the file: contents and bytes of memory freed.
    ///
    /// Contents that other pages show too are remembered in `moved`. `None` if the file refuses; everything then
    /// stays as it was.
    fn write(&mut self, tier: &Tier, moved: &mut Moved) -> Option<(u64, u64)> {
        if self.seats.is_empty() {
            return Some((0, 0));
        }
        let len = self.used.next_multiple_of(BLOCK_BYTES);
        let used = std::mem::take(&mut self.used);
        let seats = std::mem::take(&mut self.seats);
        let placed = std::mem::take(&mut self.placed);
        self.blocks.get_mut()[used..len].fill(0);
        let disk = tier.disk.as_ref()?;
        let written = disk.write(&self.blocks.get()[..len]);
        let mut stubs: HashMap<usize, usize> = HashMap::new();
        let mut freed = 0;
        let mut ok = written.is_ok();
        if let Ok(offset) = &written {
            for seat in &seats {
                let stub = match stubs.get(&seat.at) {
                    Some(stub) => *stub,
                    None => {
                        let (start, meta) = placed[&seat.at];
                        let start = offset + start as u64;
                        let on_disk = Meta { codec: meta.codec | Meta::ON_DISK, ..meta };
                        let fingerprint = tier.arena.word(seat.at).load(Ordering::Relaxed);
                        let Ok(stub) = tier.write_content(fingerprint, on_disk, &start.to_le_bytes(), Purse::Reserve)
                        else {
                            ok = false;
                            break;
                        };
                        disk.keep(start, meta.len as usize);
                        tier.copy_tick(stub, seat.at);
                        tier.succeed(seat.at, stub);
                        freed += tier.meta(seat.at).resident_len() as u64;
                        stubs.insert(seat.at, stub);
                        stub
                    }
                };
                tier.add_ref(stub);
                if tier.exchange(seat.leaf, seat.index, seat.key, seat.word, Shown::Content(stub as u64).word()) {
                    tier.release(seat.at);
                } else {
                    tier.release(stub);
                }
            }
            disk.forget(*offset, 1);
        }
        for (old, stub) in &stubs {
            // Our reference to the stub goes to the map.
            if let std::collections::hash_map::Entry::Vacant(vacant) = moved.0.entry(*old) {
                tier.add_ref(*old);
                vacant.insert(*stub);
            } else {
                tier.release(*stub);
            }
        }
        seats.iter().for_each(|seat| tier.release(seat.at));
        ok.then_some((stubs.len() as u64, freed))
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        debug_assert!(self.seats.is_empty() || std::thread::panicking(), "references would leak");
    }
}

/// Compresses a patched content without its base, into `room`.
fn plainly(tier: &Tier, at: usize, room: &mut [u8]) -> Option<(Codec, u8, usize)> {
    with_worker(|worker| {
        let mut page = worker.take_page();
        let read = tier.read_content(at, worker, &mut page).is_ok();
        let result = read.then(|| {
            let (dictionary, digested) = tier.current_dictionary();
            match worker.coder.zstd(&page, digested, RAW_ABOVE_BYTES) {
                Some(bytes) => {
                    room[..bytes.len()].copy_from_slice(bytes);
                    (Codec::Zstd, dictionary, bytes.len())
                }
                None => {
                    room[..PAGE_SIZE].copy_from_slice(&page[..]);
                    (Codec::Raw, 0, PAGE_SIZE)
                }
            }
        });
        worker.return_page(page);
        result
    })
}
