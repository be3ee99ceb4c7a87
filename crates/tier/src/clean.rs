//! The cleaner: denser compression, compaction, writeback.
//!
//! All three are one motion: walk the leaves, and where a page shows a content
//! that should lie elsewhere, make the new content and exchange the page word,
//! if nobody changed it meanwhile. The old content goes when its last word has
//! gone. Nothing points back from a content to its pages, so nothing has to be
//! kept up to date for it: the walk costs a few nanoseconds per page and is
//! made for many contents at once.
//!
//! A crash in the middle leaves some pages on the old content and some on the
//! new: both are whole.

use crate::arena::{NoSlot, Purse, lock};
use crate::codec::{Codec, RAW_ABOVE_BYTES};
use crate::config::Effort;
use crate::layout::{
    HEADER_BYTES, LEAF_PAGES, LEAVES_PER_SLAB, Meta, PATCHES_SHIFT, REFS_MASK, SLAB_WORDS, Shown, TICK_SHIFT, TRIED,
    split_key,
};
use crate::stats::count;
use crate::tier::{SAMPLES, SAMPLES_MIN, Tier, with_worker};
use crate::writeback::{BLOCK_BYTES, Blocks, SEGMENT_BYTES};
use pagefold_os::PAGE_SIZE;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Contents remembered as moved before they are let go.
const MOVED_MAX: usize = 1 << 16;
/// Ages told apart when choosing what to write back; older is equal.
const AGES: usize = 1024;
/// Least payload that is worth a place in the file.
const WRITEBACK_BYTES_MIN: usize = 64;

/// What one call of [`Tier::tick`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cleaned {
    /// Contents compressed again, densely.
    pub recompressed: u64,
    /// Contents moved by compaction.
    pub moved: u64,
    /// Contents written back.
    pub written_back: u64,
}

/// What the cleaner remembers between its walks.
#[derive(Debug, Default)]
pub(crate) struct Cleaner {
    /// Leaf slab and slot at which writeback goes on: equally old pages go out in turn.
    position: (usize, usize),
    /// Rooms made; tells a store that waited for the cleaner that room was made meanwhile.
    rooms: u64,
    /// Tick before which a failed file is left alone.
    retry_tick: u64,
    /// Stores seen by the last walk for dense compression, and the tick of the last new one.
    stores_seen: (u64, u64),
    /// Slots freed when compaction last found nothing to do.
    frees_seen: u64,
}

/// One page word, and the content that it shows, referenced.
#[derive(Clone, Copy)]
struct Seat {
    leaf: u32,
    index: usize,
    key: u64,
    word: u64,
    at: usize,
}

/// The file could not be written, or there was no room for what stays in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileRefuses;

/// Contents made anew in this walk, by where they were; holds a reference to both.
#[derive(Default)]
struct Moved(HashMap<usize, usize>);

impl Tier {
    /// Lets a tick of cold time pass and cleans up: to be called every few seconds by a thread that may wait.
    ///
    /// Contents that were not stored or touched for `recompress_ticks` are compressed densely, slabs with free slots
    /// are compacted above `waste_percent`, and contents are written back when less than 5 % of the room is left.
    /// Does next to nothing when nothing changed.
    pub fn tick(&self) -> Cleaned {
        let tick = self.tick.fetch_add(1, Ordering::Relaxed) + 1;
        self.train_widely();
        let mut cleaner = lock(&self.cleaner);
        let mut cleaned = Cleaned::default();
        let stores = self.counters.stores.load(Ordering::Relaxed);
        if stores != cleaner.stores_seen.0 {
            cleaner.stores_seen = (stores, tick);
        }
        if tick <= cleaner.stores_seen.1 + u64::from(self.config.recompress_ticks) {
            let (recompressed, whole) = self.recompress_older(self.config.recompress_ticks);
            cleaned.recompressed = recompressed;
            if !whole {
                cleaner.stores_seen.1 = tick;
            }
        }
        if self.disk.is_some() && self.arena.held() > self.arena.bytes_max() / 100 * 95 {
            cleaned.written_back = self.write_back(&mut cleaner, self.room_wanted());
        }
        let usage = self.arena.usage();
        if usage.free_slots * 100 > usage.held * u64::from(self.config.waste_percent) {
            cleaned.moved = self.compact(&mut cleaner);
        }
        cleaned
    }

    /// Compresses every content densely now, whatever its age: after parking, when the time does not press. Stores that
    /// need room go first.
    pub fn recompress_all(&self) -> u64 {
        self.train_widely();
        let mut sum = 0;
        loop {
            let mut cleaner = lock(&self.cleaner);
            let (recompressed, whole) = self.recompress_older(0);
            sum += recompressed;
            if whole {
                // What was replaced left its slots all over the place.
                self.compact(&mut cleaner);
                return sum;
            }
            drop(cleaner);
            while self.hurried.load(Ordering::Relaxed) > 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// Trains the first dictionary from pages all over the tier: better than from those that came first.
    fn train_widely(&self) {
        let contents = self.counters.contents.load(Ordering::Relaxed) as usize;
        if contents < SAMPLES_MIN || !self.is_sampling() {
            return;
        }
        let step = (contents / SAMPLES).max(1);
        let (mut seen, mut pages) = (0, Vec::new());
        self.walk((0, 0), &|_| true, |seat, _| {
            seen += 1;
            if seen % step == 0 {
                with_worker(|worker| {
                    let mut page = worker.take_page();
                    if self.read_content(seat.at, worker, &mut page).is_ok() {
                        pages.extend_from_slice(&page[..]);
                    }
                    worker.return_page(page);
                });
            }
            // Any error ends the walk.
            if pages.len() < SAMPLES * PAGE_SIZE { Ok(()) } else { Err(NoSlot::Full) }
        });
        // Once, also where they teach nothing.
        if pages.len() >= SAMPLES_MIN * PAGE_SIZE && self.stop_sampling() {
            self.train_on(&pages);
        }
    }

    /// Empties slabs that are mostly free and returns them to the kernel; returns the contents moved.
    pub fn compact_now(&self) -> u64 {
        let mut cleaner = lock(&self.cleaner);
        cleaner.frees_seen = 0;
        self.compact(&mut cleaner)
    }

    /// Writes contents back until about `bytes` of memory are free; returns the contents written.
    pub fn write_back_now(&self, bytes: u64) -> u64 {
        let mut cleaner = lock(&self.cleaner);
        cleaner.retry_tick = 0;
        let written = self.write_back(&mut cleaner, bytes);
        self.compact(&mut cleaner);
        written
    }

    /// Makes room for a store; false if there is none to be had.
    pub(crate) fn make_room(&self) -> bool {
        self.hurried.fetch_add(1, Ordering::Relaxed);
        let before = lock(&self.cleaner).rooms;
        let mut cleaner = lock(&self.cleaner);
        self.hurried.fetch_sub(1, Ordering::Relaxed);
        if cleaner.rooms != before {
            return true;
        }
        let written = self.write_back(&mut cleaner, self.room_wanted());
        let moved = self.compact(&mut cleaner);
        let made = written + moved > 0;
        cleaner.rooms += u64::from(made);
        made
    }

    /// Bytes to write back at once: a twentieth of the room, and at least a whole segment of the file.
    fn room_wanted(&self) -> u64 {
        (self.arena.bytes_max() / 20).max(SEGMENT_BYTES as u64)
    }

    /// Compresses contents of that age densely; returns how many, and whether nobody waited for the cleaner meanwhile.
    fn recompress_older(&self, ticks: u16) -> (u64, bool) {
        let untried = |word1: u64| {
            let meta = Meta::from_word(word1);
            word1 & TRIED == 0 && (meta.codec == Codec::Lz4 as u8 || meta.codec == Codec::Raw as u8)
        };
        let wanted = |at: usize| {
            let words = self.arena.words();
            let word2 = words[at + 2].load(Ordering::Relaxed);
            untried(words[at + 1].load(Ordering::Relaxed)) && self.age(word2) >= ticks && word2 >> PATCHES_SHIFT == 0
        };
        let (mut recompressed, mut whole) = (0, true);
        self.walk((0, 0), &wanted, |seat, moved| {
            if self.hurried.load(Ordering::Relaxed) > 0 {
                whole = false;
                // Any error ends the walk.
                return Err(NoSlot::Full);
            }
            if self.spare(seat.key, seat.index) {
                return Ok(());
            }
            let made = self.densely(seat.at)?;
            recompressed += u64::from(made.is_some());
            if let Some(made) = made {
                moved.replace(self, seat, made);
            }
            Ok(())
        });
        self.counters.recompressed.fetch_add(recompressed, Ordering::Relaxed);
        (recompressed, whole)
    }

    /// A denser content with the same page; `None` if it would not be smaller, or cannot be read.
    fn densely(&self, at: usize) -> Result<Option<usize>, NoSlot> {
        let words = self.arena.words();
        let before = self.meta(at).len as usize;
        let made = with_worker(|worker| {
            let mut page = worker.take_page();
            let read = self.read_content(at, worker, &mut page).is_ok();
            let fingerprint = words[at].load(Ordering::Relaxed);
            let made = read
                .then(|| self.new_content(fingerprint, &page, Effort::Dense, Some(at), worker, Purse::Reserve))
                .transpose();
            worker.return_page(page);
            made
        })?;
        match made {
            Some((made, _, bytes)) if bytes < before => Ok(Some(made)),
            other => {
                words[at + 1].fetch_or(TRIED, Ordering::Relaxed);
                if let Some((made, ..)) = other {
                    self.release(made);
                }
                Ok(None)
            }
        }
    }

    fn compact(&self, cleaner: &mut Cleaner) -> u64 {
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
        let leaves_slab = |at: usize| draining.contains(&(at / SLAB_WORDS));
        let wanted = |at: usize| leaves_slab(at) || base_of(at).is_some_and(leaves_slab);
        let mut count_moved = 0;
        self.walk((0, 0), &wanted, |seat, moved| {
            let made = match base_of(seat.at) {
                Some(base) if leaves_slab(base) => {
                    let base = match moved.0.get(&base) {
                        Some(made) => *made,
                        None => {
                            let made = self.copy_content(base, None)?;
                            // The patch's reference keeps the old base; the map wants its own.
                            self.add_ref(base);
                            self.succeed(base, made);
                            moved.0.insert(base, made);
                            count_moved += 1;
                            made
                        }
                    };
                    self.copy_content(seat.at, Some(base))?
                }
                _ => self.copy_content(seat.at, None)?,
            };
            count_moved += 1;
            moved.replace(self, seat, made);
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
        let made = self.write_content(words[at].load(Ordering::Relaxed), meta, &payload, Purse::Reserve)?;
        if is_patch {
            let base = self.payload_word(made) as usize;
            self.add_ref(base);
            words[base + 2].fetch_add(1 << PATCHES_SHIFT, Ordering::Relaxed);
        }
        if let Some(disk) = self.disk.as_ref().filter(|_| meta.is_on_disk()) {
            disk.keep(self.payload_word(made), meta.len as usize);
        }
        words[made + 1].fetch_or(words[at + 1].load(Ordering::Relaxed) & TRIED, Ordering::Relaxed);
        self.set_tick(made, at);
        Ok(made)
    }

    /// Gives `to` the tick of `from`: moving is no use.
    fn set_tick(&self, to: usize, from: usize) {
        let words = self.arena.words();
        let ticks = 0xffff << TICK_SHIFT;
        let tick = words[from + 2].load(Ordering::Relaxed) & ticks;
        let set = |word| Some(word & !ticks | tick);
        let _ = words[to + 2].fetch_update(Ordering::Relaxed, Ordering::Relaxed, set);
    }

    /// Lets the index find `made` instead of `old`.
    fn succeed(&self, old: usize, made: usize) {
        let words = self.arena.words();
        let mut shard = self.contents.shard(words[old].load(Ordering::Relaxed), words);
        if shard.holds(old) {
            shard.remove(old);
            shard.insert(made);
        }
    }

    fn age(&self, word2: u64) -> u16 {
        (self.tick.load(Ordering::Relaxed) as u16).wrapping_sub((word2 >> TICK_SHIFT) as u16)
    }

    /// True once for a page that came back lately.
    fn spare(&self, key: u64, index: usize) -> bool {
        let (region, cluster) = split_key(key);
        self.region(region).is_some_and(|region| region.spare(cluster * LEAF_PAGES as u64 + index as u64))
    }

    /// Calls `act` for each page word whose content is `wanted`, from `start` on and round; ends early if `act` fails.
    ///
    /// Returns where it ended.
    fn walk(
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

    // Writeback.

    fn write_back(&self, cleaner: &mut Cleaner, bytes_wanted: u64) -> u64 {
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

impl Moved {
    /// Lets the seat show `made`, whose reference is passed in, and remembers it if others show the old content too.
    fn replace(&mut self, tier: &Tier, seat: Seat, made: usize) {
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

    fn let_go(&mut self, tier: &Tier) {
        for (old, made) in self.0.drain() {
            tier.release(old);
            tier.release(made);
        }
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
                        tier.set_tick(stub, seat.at);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::tests::texty;
    use crate::config::Config;
    use crate::layout::leaf_key;

    /// A slab that held leaves when the cleaner listed them may hold contents a moment later, and those may look like a key
    /// and words. The region knows its leaves; nothing that looks like one is counted or written.
    #[test]
    fn what_looks_like_a_leaf_is_none() {
        let tier = Tier::create(Config { bytes_max: 8 << 20, recompress_ticks: 0, ..Config::default() }, None).unwrap();
        for (region, page) in [(1, 0), (2, 0), (2, 1)] {
            tier.store(region, page, &texty(u64::from(region) * 8 + page), Effort::Fast).unwrap();
        }
        let leaf = tier.region(1).unwrap().directory.get(0).unwrap();
        let wanted = tier.region(2).unwrap().directory.get(0).unwrap();
        let word = tier.arena.leaf(wanted)[1].load(Ordering::Relaxed);
        assert_eq!(tier.discard(1, 0..LEAF_PAGES as u64), 1);
        // The slab stays, for region 2 has a leaf in it.
        assert_eq!(leaf >> 12, wanted >> 12);
        let key = leaf_key(1, 0);
        tier.arena.leaf_key(leaf).store(key, Ordering::Relaxed);
        tier.arena.leaf(leaf)[1].store(word, Ordering::Relaxed);
        assert!(tier.word_with_ref(leaf, 1, key).is_none());
        assert!(!tier.exchange(leaf, 1, key, word, 0));
        assert!(tier.recompress_all() > 0);
        tier.compact_now();
        assert_eq!(tier.arena.leaf(leaf)[1].load(Ordering::Relaxed), word, "overwritten");
        let mut page = [0; PAGE_SIZE];
        tier.load(2, 1, &mut page).unwrap();
        assert!(page == texty(17));
        tier.arena.leaf_key(leaf).store(0, Ordering::Relaxed);
        tier.arena.leaf(leaf)[1].store(0, Ordering::Relaxed);
        tier.remove_region(2);
        let stats = tier.stats();
        assert_eq!((stats.pages, stats.contents, stats.payload_bytes), (0, 0, 0), "a reference too many");
    }
}
