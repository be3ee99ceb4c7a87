//! The pages of one client: four bytes each, with counts per chunk so that quiet chunks cost nothing, and less where a
//! whole chunk rests in one state or shows one run of slots.

use crate::page::{Packed, PageState};
use pagefold_os::{PAGE_SIZE, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const PAGE: u64 = PAGE_SIZE as u64;

/// Pages in a chunk: 2 MiB, a huge page.
pub const CHUNK_PAGES: usize = 512;
/// Bytes in a chunk.
pub const CHUNK_LEN: u64 = CHUNK_PAGES as u64 * PAGE;
/// Bytes of our records about a chunk at least, whether its pages are there or not.
pub const CHUNK_RECORD_BYTES: usize = size_of::<Chunk>() + size_of::<Indexed>() + 2 * size_of::<usize>();

/// Counts of states in a chunk or in all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Armed, arming, sleeping, refused or broken: need a look each period.
    pub busy: u32,
    /// Of those: sleeping, so not to be protected.
    pub sleeping: u32,
    /// Candidates.
    pub candidate: u32,
    /// Candidates with a fingerprint that was not looked up yet.
    pub fresh: u32,
    /// Shared.
    pub shared: u32,
    /// Broken.
    pub broken: u32,
    /// Zero.
    pub zero: u32,
    /// Refused.
    pub refused: u32,
}

impl Counts {
    fn apply(&mut self, state: PageState, sign: i32) {
        let step = |count: &mut u32| *count = count.wrapping_add_signed(sign);
        match state {
            PageState::Unknown => {}
            PageState::Armed { .. } | PageState::Arming { .. } => step(&mut self.busy),
            PageState::Sleeping { .. } => {
                step(&mut self.busy);
                step(&mut self.sleeping);
            }
            PageState::Candidate { indexed, .. } => {
                step(&mut self.candidate);
                if !indexed {
                    step(&mut self.fresh);
                }
            }
            PageState::Shared(_) => step(&mut self.shared),
            PageState::Broken { .. } => {
                step(&mut self.busy);
                step(&mut self.broken);
            }
            PageState::Zero => step(&mut self.zero),
            PageState::Refused { .. } => {
                step(&mut self.busy);
                step(&mut self.refused);
            }
        }
    }

    /// Pages with changing content: all that need a look but the refused and broken ones.
    pub fn volatile(&self) -> u32 {
        self.busy - self.broken - self.refused
    }
}

/// How a chunk that huge pages back is treated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Huge {
    /// Not huge, as far as we know, or worth splitting: treated page by page.
    #[default]
    No,
    /// Huge: left alone until the next probe, in this many periods; the second number is the back-off.
    Wait(u8, u8),
    /// Worth splitting: protected like any memory, which splits it at the first write or merge.
    Split,
}

/// Which pages of a chunk are in the index as candidates, for any worker that finds an entry of theirs.
///
/// A set bit says that the page was entered and, as far as anybody knows, still has that content. It is a hint: what a
/// stale hint costs is a comparison.
#[derive(Debug, Default)]
pub struct Indexed([AtomicU64; CHUNK_PAGES / 64]);

impl Indexed {
    /// True if page `index` is in the index.
    pub fn get(&self, index: usize) -> bool {
        // Relaxed: a hint, as said above.
        self.0[index / 64].load(Ordering::Relaxed) >> (index % 64) & 1 != 0
    }

    /// Enters or withdraws page `index`.
    pub fn set(&self, index: usize, indexed: bool) {
        let bit = 1 << (index % 64);
        match indexed {
            true => self.0[index / 64].fetch_or(bit, Ordering::Relaxed),
            false => self.0[index / 64].fetch_and(!bit, Ordering::Relaxed),
        };
    }

    /// Withdraws all pages.
    pub fn clear(&self) {
        self.0.iter().for_each(|word| word.store(0, Ordering::Relaxed));
    }
}

/// The states of a chunk's pages.
#[derive(Debug)]
enum States {
    /// Page `i` has the packed value `first + i * step`: all pages alike, or one run of slots.
    Row { first: Packed, step: u32 },
    /// Each page its own.
    Each(Box<[Packed; CHUNK_PAGES]>),
}

impl States {
    fn get(&self, index: usize) -> Packed {
        match self {
            States::Row { first, step } => first.plus(index as u32 * step),
            States::Each(states) => states[index],
        }
    }

    fn set(&mut self, index: usize, state: Packed) {
        match self {
            States::Row { .. } if self.get(index) == state => {}
            States::Row { .. } => {
                let mut states = Box::new([Packed::default(); CHUNK_PAGES]);
                states.iter_mut().enumerate().for_each(|(index, state)| *state = self.get(index));
                states[index] = state;
                *self = States::Each(states);
            }
            States::Each(states) => states[index] = state,
        }
    }

    /// Keeps a row in two words.
    fn compact(&mut self) {
        let States::Each(states) = self else { return };
        for step in [0, 1] {
            let first = states[0];
            if states.iter().enumerate().all(|(index, state)| *state == first.plus(index as u32 * step)) {
                *self = States::Row { first, step };
                return;
            }
        }
    }
}

/// A chunk-aligned piece of one region or more.
#[derive(Debug)]
pub struct Chunk {
    /// Address of the chunk (aligned to its length).
    pub addr: u64,
    /// The part of it from the first managed page to the last.
    managed: Range,
    /// What lies in `managed` and is not managed: it is never looked at, read or frozen.
    gaps: Vec<Range>,
    /// The chunk's number in the domain, for candidates in the index.
    pub id: u32,
    /// Huge page or not.
    pub huge: Huge,
    /// Counts of its states.
    pub counts: Counts,
    /// Which pages are in the index.
    pub indexed: Arc<Indexed>,
    states: States,
    /// Some state changed since `states` was compacted.
    changed: bool,
}

impl Chunk {
    fn new(addr: u64, managed: Range, gaps: Vec<Range>, id: u32, indexed: Arc<Indexed>) -> Chunk {
        Chunk {
            addr,
            managed,
            gaps,
            id,
            huge: Huge::No,
            counts: Counts::default(),
            indexed,
            states: States::Row { first: Packed::default(), step: 0 },
            changed: false,
        }
    }

    /// The state of page `index`.
    pub fn state(&self, index: usize) -> PageState {
        self.states.get(index).get()
    }

    /// Address of page `index`.
    pub fn page_addr(&self, index: usize) -> u64 {
        self.addr + index as u64 * PAGE
    }

    /// Sets the state of page `index`.
    pub fn set(&mut self, index: usize, state: PageState) {
        let before = self.states.get(index).get();
        if before == state {
            return;
        }
        self.counts.apply(before, -1);
        self.counts.apply(state, 1);
        self.states.set(index, state.pack());
        self.changed = true;
        let in_index = |state| matches!(state, PageState::Candidate { indexed: true, .. });
        if in_index(before) != in_index(state) {
            self.indexed.set(index, in_index(state));
        }
    }

    /// True if the page at `addr` is managed.
    pub fn manages(&self, addr: u64) -> bool {
        let within = |range: &Range| range.start <= addr && addr < range.end;
        within(&self.managed) && !self.gaps.iter().any(within)
    }

    /// Page numbers of the managed part.
    pub fn pages(&self) -> impl Iterator<Item = usize> + use<> {
        let all = ((self.managed.start - self.addr) / PAGE) as usize..((self.managed.end - self.addr) / PAGE) as usize;
        let addr = self.addr;
        // Most chunks have no gap, and an empty list costs nothing.
        let gaps = self.gaps.clone();
        all.filter(move |index| {
            let page = addr + *index as u64 * PAGE;
            !gaps.iter().any(|gap| gap.start <= page && page < gap.end)
        })
    }

    /// The managed ranges, ascending.
    pub fn parts(&self) -> impl Iterator<Item = Range> {
        let starts = std::iter::once(self.managed.start).chain(self.gaps.iter().map(|gap| gap.end));
        let ends = self.gaps.iter().map(|gap| gap.start).chain(std::iter::once(self.managed.end));
        starts.zip(ends).map(|(start, end)| Range { start, end })
    }

    /// Pages that are managed.
    pub fn page_count(&self) -> u64 {
        self.managed.pages() - self.gaps.iter().map(Range::pages).sum::<u64>()
    }

    /// Keeps the states small where they form a row; worth a try only after changes, and for rows that last.
    fn compact(&mut self) {
        let Counts { candidate, fresh, shared, busy, zero, .. } = self.counts;
        let whole = CHUNK_PAGES as u32;
        let lasts = candidate - fresh == whole || shared == whole || zero == whole;
        if self.changed && (lasts || busy + candidate + shared + zero == 0) {
            self.states.compact();
            self.changed = false;
        }
    }
}

/// All chunks of a client, by address.
#[derive(Debug, Default)]
pub struct Table {
    chunks: Vec<Chunk>,
}

impl Table {
    /// The chunks, ascending.
    pub fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    /// The chunks, ascending, to be changed.
    pub fn chunks_mut(&mut self) -> &mut [Chunk] {
        &mut self.chunks
    }

    fn position(&self, addr: u64) -> Result<usize, usize> {
        self.chunks.binary_search_by_key(&(addr / CHUNK_LEN * CHUNK_LEN), |chunk| chunk.addr)
    }

    /// The chunk in which `addr` lies, if there is one.
    pub fn chunk(&self, addr: u64) -> Option<&Chunk> {
        self.position(addr).ok().map(|at| &self.chunks[at])
    }

    /// The chunk of `addr`, if the address is managed, and its page number there.
    pub fn find(&self, addr: u64) -> Option<(&Chunk, usize)> {
        let chunk = &self.chunks[self.position(addr).ok()?];
        chunk.manages(addr).then(|| (chunk, ((addr - chunk.addr) / PAGE) as usize))
    }

    /// As [`find`](Self::find), to be changed.
    pub fn find_mut(&mut self, addr: u64) -> Option<(&mut Chunk, usize)> {
        let at = self.position(addr).ok()?;
        let chunk = &mut self.chunks[at];
        let index = ((addr - chunk.addr) / PAGE) as usize;
        chunk.manages(addr).then_some((chunk, index))
    }

    /// The state of the page at `addr`; `Unknown` if it is not managed.
    pub fn state(&self, addr: u64) -> PageState {
        self.find(addr).map_or(PageState::Unknown, |(chunk, index)| chunk.state(index))
    }

    /// Sets the state of the page at `addr`, if it is managed, and returns what it was.
    pub fn set(&mut self, addr: u64, state: PageState) -> PageState {
        match self.find_mut(addr) {
            Some((chunk, index)) => {
                let before = chunk.state(index);
                chunk.set(index, state);
                before
            }
            None => PageState::Unknown,
        }
    }

    /// Makes the managed ranges `ranges` (ascending, disjoint). New chunks get their number and their place in the index
    /// from `new`; pages that are managed no more are given to `dropped` with their state, chunks that are gone with
    /// their number to `freed`.
    pub fn set_ranges(
        &mut self,
        ranges: &[Range],
        mut new: impl FnMut(u64) -> (u32, Arc<Indexed>),
        mut dropped: impl FnMut(u64, PageState),
        mut freed: impl FnMut(u32),
    ) {
        let mut wanted: Vec<(u64, Range, Vec<Range>)> = Vec::new();
        for range in ranges {
            let mut at = range.start;
            while at < range.end {
                let addr = at / CHUNK_LEN * CHUNK_LEN;
                let end = range.end.min(addr + CHUNK_LEN);
                match wanted.last_mut() {
                    Some((last, managed, gaps)) if *last == addr => {
                        if managed.end < at {
                            gaps.push(Range { start: managed.end, end: at });
                        }
                        managed.end = end;
                    }
                    _ => wanted.push((addr, Range { start: at, end }, Vec::new())),
                }
                at = end;
            }
        }
        let mut old = std::mem::take(&mut self.chunks).into_iter().peekable();
        let mut drop_pages = |chunk: &mut Chunk, managed: Range, gaps: Vec<Range>| {
            let before = chunk.pages();
            (chunk.managed, chunk.gaps) = (managed, gaps);
            for index in before {
                let addr = chunk.page_addr(index);
                if !chunk.manages(addr) {
                    dropped(addr, chunk.state(index));
                    chunk.set(index, PageState::Unknown);
                }
            }
        };
        const NOTHING: Range = Range { start: 0, end: 0 };
        for (addr, managed, gaps) in wanted {
            while let Some(mut gone) = old.next_if(|chunk| chunk.addr < addr) {
                drop_pages(&mut gone, NOTHING, Vec::new());
                freed(gone.id);
            }
            match old.next_if(|chunk| chunk.addr == addr) {
                Some(mut chunk) => {
                    if (chunk.managed, &chunk.gaps) != (managed, &gaps) {
                        drop_pages(&mut chunk, managed, gaps);
                    }
                    self.chunks.push(chunk);
                }
                None => {
                    let (id, indexed) = new(addr);
                    self.chunks.push(Chunk::new(addr, managed, gaps, id, indexed));
                }
            }
        }
        for mut gone in old {
            drop_pages(&mut gone, NOTHING, Vec::new());
            freed(gone.id);
        }
    }

    /// Stores what has come to rest in less memory.
    pub fn compact(&mut self) {
        self.chunks.iter_mut().for_each(Chunk::compact);
    }

    /// Counts over all chunks.
    pub fn counts(&self) -> Counts {
        let mut all = Counts::default();
        for chunk in &self.chunks {
            let c = &chunk.counts;
            all.busy += c.busy;
            all.sleeping += c.sleeping;
            all.candidate += c.candidate;
            all.fresh += c.fresh;
            all.shared += c.shared;
            all.broken += c.broken;
            all.zero += c.zero;
            all.refused += c.refused;
        }
        all
    }

    /// Pages that are managed.
    pub fn page_count(&self) -> u64 {
        self.chunks.iter().map(Chunk::page_count).sum()
    }

    /// Bytes of our own records.
    pub fn memory_bytes(&self) -> u64 {
        let each = self.chunks.iter().filter(|chunk| matches!(chunk.states, States::Each(_))).count();
        let gaps: usize = self.chunks.iter().map(|chunk| chunk.gaps.capacity()).sum();
        (self.chunks.capacity() * CHUNK_RECORD_BYTES
            + each * CHUNK_PAGES * size_of::<Packed>()
            + gaps * size_of::<Range>()) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_pool::Slot;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, BTreeSet};

    proptest! {
        #[test]
        fn ranges_come_and_go_as_in_a_set_of_pages(
            steps in proptest::collection::vec(proptest::collection::vec((0u64..3000, 1u64..700), 0..6), 1..12)
        ) {
            let mut table = Table::default();
            let mut model: BTreeMap<u64, PageState> = BTreeMap::new();
            let mut next_id = 0;
            let mut live_ids = BTreeSet::new();
            for (step, ranges) in steps.iter().enumerate() {
                let mut pages = BTreeSet::new();
                for (start, len) in ranges {
                    pages.extend(*start..start + len);
                }
                let mut joined: Vec<Range> = Vec::new();
                for page in &pages {
                    match joined.last_mut() {
                        Some(last) if last.end == page * PAGE => last.end += PAGE,
                        _ => joined.push(Range::pages_from(page * PAGE, 1)),
                    }
                }
                let mut lost = BTreeMap::new();
                let mut freed = Vec::new();
                let mut made = Vec::new();
                table.set_ranges(
                    &joined,
                    |_| { next_id += 1; made.push(next_id); (next_id, Arc::default()) },
                    |addr, state| { if state != PageState::Unknown { lost.insert(addr / PAGE, state); } },
                    |id| freed.push(id),
                );
                live_ids.extend(made);
                for id in freed {
                    prop_assert!(live_ids.remove(&id));
                }
                prop_assert_eq!(live_ids.len(), table.chunks().len());
                for (page, state) in &lost {
                    prop_assert_eq!(model.remove(page), Some(*state));
                    prop_assert!(!pages.contains(page));
                }
                for page in 0..3700 {
                    let state = model.get(&page).copied().unwrap_or(PageState::Unknown);
                    prop_assert_eq!(table.state(page * PAGE), state);
                    prop_assert_eq!(table.find(page * PAGE).is_some(), pages.contains(&page));
                }
                let parts: Vec<Range> = table.chunks().iter().flat_map(Chunk::parts).collect();
                prop_assert_eq!(parts.iter().map(Range::pages).sum::<u64>(), pages.len() as u64);
                prop_assert!(parts.iter().all(|part| pages.contains(&(part.start / PAGE))));
                prop_assert_eq!(table.page_count(), pages.len() as u64);
                let listed = table.chunks().iter().flat_map(|chunk| chunk.pages().map(|index| chunk.page_addr(index) / PAGE));
                prop_assert!(listed.eq(pages.iter().copied()));
                if step % 2 == 0 {
                    table.compact();
                }
                for page in pages.iter().filter(|page| (**page + step as u64).is_multiple_of(3)) {
                    let state = PageState::Shared(Slot::from_number(*page as u32));
                    table.set(page * PAGE, state);
                    model.insert(*page, state);
                }
                prop_assert_eq!(table.counts().shared as usize, model.len());
            }
        }
    }

    #[test]
    fn rows_are_small_and_change_page_by_page() {
        let mut table = Table::default();
        table.set_ranges(&[Range::pages_from(CHUNK_LEN, 4 * 512)], |_| (0, Arc::default()), |_, _| {}, |_| {});
        let empty = table.memory_bytes();
        for page in 0..512 {
            table.set(CHUNK_LEN + page * PAGE, PageState::Shared(Slot::from_number(1000 + page as u32)));
            table.set(2 * CHUNK_LEN + page * PAGE, PageState::Candidate { indexed: true, backoff: 0 });
            table.set(3 * CHUNK_LEN + page * PAGE, PageState::Candidate { indexed: page != 7, backoff: 0 });
        }
        let full = table.memory_bytes();
        table.compact();
        assert_eq!(full - empty, 3 * 2048);
        assert_eq!(table.memory_bytes() - empty, 2048, "one page is fresh, so its chunk is no row");
        assert_eq!(table.state(CHUNK_LEN + 511 * PAGE), PageState::Shared(Slot::from_number(1511)));
        let (chunk, index) = table.find(2 * CHUNK_LEN + 5 * PAGE).unwrap();
        assert!(chunk.indexed.get(index));
        table.set(2 * CHUNK_LEN + 5 * PAGE, PageState::Armed { silent: 0, backoff: 0, fresh: true });
        let (chunk, index) = table.find(2 * CHUNK_LEN + 5 * PAGE).unwrap();
        assert!(!chunk.indexed.get(index) && chunk.indexed.get(index + 1));
        assert_eq!(chunk.state(index + 1), PageState::Candidate { indexed: true, backoff: 0 });
        assert_eq!((table.counts().shared, table.counts().candidate, table.counts().fresh), (512, 1023, 1));
    }
}
