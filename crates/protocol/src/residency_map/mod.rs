//! Where each page of a cold client is: resident, or evicted to the tier. Agent, daemon and keeper share it.
//!
//! A sealed memory file: a head, and for each 2 MiB chunk of addresses in use a key and 512 bytes, one per page. The map
//! says *where* a page is, the tier knows *what* it holds. The map lives as long as its file, whatever happens to agent or
//! daemon. Behind it the daemon writes what the client touched first when it last woke (`wakings`).
//!
//! **The owner lock.** A thread that changes a state, or reads events of the client's userfaultfd, holds the owner lock: one
//! word in the head, which names the holder or is free. So no event is served while the agent has pages frozen, and no page
//! is frozen between the moment an event is read and the moment its effect is in the map. The daemon only tries to lock: a
//! client may hold the word for ever, and then only that client's faults wait. The agent waits. A successor takes the lock
//! over from a dead daemon.
//!
//! The daemon trusts nothing here except at the client's own cost: any byte is a valid state, any number a valid key.

mod events;
mod hints;
mod owner_lock;
mod wakings;

pub use events::{apply_event, poison_evicted};
pub use hints::{HINTS, Hint};
pub use owner_lock::{OWNER_AGENT, OWNER_DAEMON, OWNER_NONE};
pub use wakings::{FILE_BYTES_WITH_WAKINGS, WAKING_RUNS, WAKINGS_BYTES, WakingRuns};

use core::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use pagefold_os::{PAGE_SIZE, Range};

/// Name of the file in /proc.
pub const FILE_NAME: &core::ffi::CStr = c"pagefold-cold-table";

/// First word of the file.
const MAGIC: u64 = 0x5046_434f_4c44_0001;

/// Maximum of chunks: 128 GiB of a client's memory.
pub const CHUNKS: usize = 1 << 16;
/// Pages of a chunk.
pub const CHUNK_PAGES: usize = 512;
/// Bytes of a chunk.
pub const CHUNK_BYTES: u64 = (CHUNK_PAGES * PAGE_SIZE) as u64;

/// After this many occupied places of a probe sequence, [`ResidencyMap::add_range`] prefers to replace an idle chunk.
const PROBE_CROWDED: usize = 32;
/// Places of a probe sequence among which it looks for an idle chunk.
const PROBE_IDLE_MAX: usize = 1024;

const KEYS: usize = PAGE_SIZE;
const LAST_DISCARDS: usize = KEYS + CHUNKS * 8;
const STATES: usize = LAST_DISCARDS + CHUNKS * 8;
/// Length of the map, and least length of the file. It is sparse, and costs 528 bytes per chunk in use.
pub const FILE_BYTES: usize = STATES + CHUNKS * CHUNK_PAGES;

/// The page is resident, or was never touched: the tier has nothing to do with it.
pub const RESIDENT: u8 = 0;
/// The page is in the tier.
pub const EVICTED: u8 = 1;
/// The agent has the page frozen. It holds the owner lock meanwhile, except for moments in which it lets the daemon read an
/// event.
pub const FROZEN: u8 = 2;
/// As [`FROZEN`], and the program has discarded the page since.
pub const DISCARDED: u8 = 3;

/// Times of the last discard that are kept for chunks outside the map: a chunk uses the slot of its number modulo this.
pub const DISCARD_SLOTS: usize = 64;

/// With room for fewer pages than these, an agent that brings much back stops, and the daemon looks at the limit at each
/// page.
pub const SCANT_PAGES: u64 = 64;

/// The head of the file.
#[repr(C)]
#[derive(Debug)]
pub struct Head {
    magic: AtomicU64,
    /// The tier's id of the client; 0 before the first handshake.
    pub client_id: AtomicU64,
    /// A random number that tells clients of one id apart, so that no other client can claim it.
    pub token: AtomicU64,
    /// Id of the arena to which pages were evicted.
    pub arena: AtomicU64,
    /// Raised by each daemon that takes the client over, and by an agent that goes on without a daemon: operations that
    /// began in an earlier epoch do not finish.
    pub epoch: AtomicU32,
    /// The owner lock.
    pub owner: AtomicU32,
    /// 1 if the agent waits for the owner lock, so that the daemon wakes it.
    has_waiter: AtomicU32,
    /// Process id, as the agent sees itself.
    pub pid: AtomicU32,
    /// Evicted pages.
    pub evicted: AtomicU64,
    /// Pages that were lost: an access raises SIGBUS.
    pub lost: AtomicU64,
    /// Unused: the words after it keep their places.
    _unused: [AtomicU64; 2],
    /// Number of the next hint; the program's threads count it up.
    pub hint_next: AtomicU32,
    /// Changes after each hint: the daemon sleeps on this word.
    pub hinted: AtomicU32,
    /// Hints.
    pub hints: [Hint; HINTS],
    /// When chunks outside the map last lost pages by a discard, in monotonic nanoseconds; see [`DISCARD_SLOTS`].
    pub shared_discards: [AtomicU64; DISCARD_SLOTS],
    /// Pages below the client's memory limit when the daemon last looked, plus one; 0 if it never did.
    headroom: AtomicU64,
    /// Calls that hold up evictions until the pages that they need are resident.
    pub paused_evictions: AtomicU32,
    /// Raised at least every second by a daemon that serves the client, connected or not.
    pub heartbeat: AtomicU32,
    /// Not 0 from `park` to `unpark`: a daemon that takes the client over shows it as parked.
    pub parked: AtomicU32,
    /// Every chunk lies within this many places of its probe sequence; 0 if the agent does not count that.
    probe_max: AtomicU32,
    /// Pages that a raw mremap(2) moved while they were evicted, and that are not at their new address yet: no state shows
    /// them.
    pub moving_pages: AtomicU32,
}

const _: () = assert!(size_of::<Head>() <= PAGE_SIZE);

impl Head {
    /// Daemon: there is room for `pages` more pages below the client's memory limit.
    pub fn set_headroom(&self, pages: u64) {
        self.headroom.store(pages.saturating_add(1), Ordering::Release);
    }

    /// Agent: there is room for less than [`SCANT_PAGES`], as far as is known.
    pub fn is_scant(&self) -> bool {
        self.headroom.load(Ordering::Acquire).wrapping_sub(1) < SCANT_PAGES
    }
}

/// A mapped residency map.
#[derive(Clone, Copy, Debug)]
pub struct ResidencyMap {
    base: u64,
}

impl ResidencyMap {
    /// The map in the file that is mapped at `base`.
    ///
    /// # Safety
    /// [`FILE_BYTES`] bytes of a file that cannot shrink are mapped there, readable and writable, as long as the value and
    /// references from it are used.
    pub const unsafe fn at(base: u64) -> ResidencyMap {
        ResidencyMap { base }
    }

    /// First address.
    pub const fn base(&self) -> u64 {
        self.base
    }

    /// Marks a new file as a residency map.
    pub fn initialize(&self) {
        self.head().magic.store(MAGIC, Ordering::Release);
    }

    /// Returns true if this is a residency map of this version.
    pub fn is_valid(&self) -> bool {
        self.head().magic.load(Ordering::Acquire) == MAGIC
    }

    /// The head.
    pub fn head(&self) -> &'static Head {
        // SAFETY: the caller of `at` promised the mapping, which begins with the head; atomics allow other writers.
        unsafe { &*(self.base as *const Head) }
    }

    fn keys(&self) -> &'static [AtomicU64] {
        // SAFETY: the caller of `at` promised the mapping, in which the keys lie; atomics allow other writers.
        unsafe { core::slice::from_raw_parts((self.base + KEYS as u64) as *const AtomicU64, CHUNKS) }
    }

    /// Notes that `range` loses pages by a discard at `now`; the caller holds the owner lock.
    pub fn note_discard(&self, range: Range, now: u64) {
        if range.is_empty() {
            return;
        }
        let (first, last) = (range.start / CHUNK_BYTES, (range.end - 1) / CHUNK_BYTES);
        if last - first < 4096 {
            for chunk in first..=last {
                let known = self.find(chunk * CHUNK_BYTES).map(|index| self.last_discard(index));
                known.unwrap_or(self.shared_discard(chunk)).store(now, Ordering::Relaxed);
            }
        } else {
            self.for_each_chunk(|base, index| {
                if base + CHUNK_BYTES > range.start && base < range.end {
                    self.last_discard(index).store(now, Ordering::Relaxed);
                }
            });
            self.head().shared_discards.iter().for_each(|slot| slot.store(now, Ordering::Relaxed));
        }
    }

    /// The noted times of discards, as they would stand if no chunk were in the map.
    pub fn last_discards(&self) -> [u64; DISCARD_SLOTS] {
        let mut times = self.head().shared_discards.each_ref().map(|slot| slot.load(Ordering::Relaxed));
        self.for_each_chunk(|base, index| {
            let time = &mut times[(base / CHUNK_BYTES) as usize % DISCARD_SLOTS];
            *time = (*time).max(self.last_discard(index).load(Ordering::Relaxed));
        });
        times
    }

    /// When the chunk at `index` last lost pages by a discard, in monotonic nanoseconds.
    pub fn last_discard(&self, index: usize) -> &'static AtomicU64 {
        // SAFETY: the caller of `at` promised the mapping; the modulo keeps the index inside the array.
        unsafe { &*((self.base + (LAST_DISCARDS + index % CHUNKS * 8) as u64) as *const AtomicU64) }
    }

    /// When chunks outside the map that share a slot with `chunk` last lost pages.
    fn shared_discard(&self, chunk: u64) -> &'static AtomicU64 {
        &self.head().shared_discards[chunk as usize % DISCARD_SLOTS]
    }

    /// The states of the chunk at `index`.
    pub fn states(&self, index: usize) -> &'static [AtomicU8; CHUNK_PAGES] {
        // SAFETY: the caller of `at` promised the mapping; the modulo keeps the index inside the array.
        unsafe { &*((self.base + (STATES + index % CHUNKS * CHUNK_PAGES) as u64) as *const [AtomicU8; CHUNK_PAGES]) }
    }

    /// Index of the chunk that holds `addr`, if the map has it.
    pub fn find(&self, addr: u64) -> Option<usize> {
        let key = addr / CHUNK_BYTES + 1;
        let probe_max = match self.head().probe_max.load(Ordering::Acquire) as usize {
            0 => CHUNKS,
            probe_max => probe_max,
        };
        for index in Self::probe(key).take(probe_max) {
            match self.keys()[index].load(Ordering::Acquire) {
                0 => return None,
                found if found == key => return Some(index),
                _ => {}
            }
        }
        None
    }

    /// As [`find`](Self::find), and adds the chunk; for the agent only, with the owner lock. `None` if the map is full.
    pub fn find_or_add(&self, addr: u64) -> Option<usize> {
        let key = addr / CHUNK_BYTES + 1;
        self.find(addr).or_else(|| self.insert(key, Self::probe(key).position(|index| self.is_free(index))?))
    }

    /// Adds the chunks of `range`. Where the map is crowded they replace chunks of which no page is evicted or frozen. For
    /// the agent only, with the owner lock, while no other holder of that lock iterates over the map. Calls `f` with the
    /// index of each; false if the map is full, or `f` returns false.
    pub fn add_range(&self, range: Range, f: impl Fn(usize) -> bool) -> bool {
        let chunks = || range.start / CHUNK_BYTES..range.end.div_ceil(CHUNK_BYTES);
        let is_wanted = |index: usize| chunks().contains(&self.keys()[index].load(Ordering::Relaxed).wrapping_sub(1));
        chunks().all(|chunk| {
            let key = chunk + 1;
            let free = |places| Self::probe(key).take(places).position(|index| self.is_free(index));
            // A free place counts as idle too. So the place found is never after a free one, where a lookup would stop.
            let idle =
                || Self::probe(key).take(PROBE_IDLE_MAX).position(|index| self.is_idle(index) && !is_wanted(index));
            let step = || free(PROBE_CROWDED).or_else(idle).or_else(|| free(CHUNKS));
            self.find(chunk * CHUNK_BYTES).or_else(|| self.insert(key, step()?)).is_some_and(&f)
        })
    }

    fn is_free(&self, index: usize) -> bool {
        self.keys()[index].load(Ordering::Relaxed) == 0
    }

    /// Returns true if no page of the chunk at `index` is evicted or frozen.
    fn is_idle(&self, index: usize) -> bool {
        self.states(index).iter().all(|state| state.load(Ordering::Relaxed) == RESIDENT)
    }

    /// Puts `key` at place `step` of its probe sequence. Its time of the last discard comes from the shared slot, to which
    /// that of a replaced chunk goes.
    fn insert(&self, key: u64, step: usize) -> Option<usize> {
        let index = Self::probe(key).nth(step)?;
        let last_discard = self.last_discard(index);
        let before = self.keys()[index].load(Ordering::Relaxed);
        if before != 0 {
            self.shared_discard(before - 1).fetch_max(last_discard.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        last_discard.store(self.shared_discard(key - 1).load(Ordering::Relaxed), Ordering::Relaxed);
        // Before the key: a thread that finds the key has seen how far it may be.
        self.head().probe_max.fetch_max(step as u32 + 1, Ordering::Release);
        self.keys()[index].store(key, Ordering::Release);
        Some(index)
    }

    /// The places at which `key` may be, in the order of a lookup.
    fn probe(key: u64) -> impl Iterator<Item = usize> {
        let first = (key.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as usize % CHUNKS;
        (0..CHUNKS).map(move |step| (first + step) % CHUNKS)
    }

    /// The state of the page at `addr`.
    pub fn state(&self, addr: u64) -> u8 {
        let page = (addr % CHUNK_BYTES) as usize / PAGE_SIZE;
        self.find(addr).map_or(RESIDENT, |index| self.states(index)[page].load(Ordering::Acquire))
    }

    /// Sets the state of the page at `addr`, if the map has its chunk, and counts; the caller holds the owner lock.
    /// Returns the state before.
    pub fn set_state(&self, addr: u64, state: u8) -> u8 {
        let Some(index) = self.find(addr) else { return RESIDENT };
        let page = (addr % CHUNK_BYTES) as usize / PAGE_SIZE;
        // Release pairs with the acquire in `state`: a thread that sees a page evicted finds its entry in the tier.
        let before = self.states(index)[page].swap(state, Ordering::AcqRel);
        if before != EVICTED && state == EVICTED {
            self.head().evicted.fetch_add(1, Ordering::Relaxed);
        } else if before == EVICTED && state != EVICTED {
            self.head().evicted.fetch_sub(1, Ordering::Relaxed);
        }
        before
    }

    /// Calls `f` with the first address and index of each chunk in use.
    pub fn for_each_chunk(&self, mut f: impl FnMut(u64, usize)) {
        for (index, key) in self.keys().iter().enumerate() {
            let key = key.load(Ordering::Acquire);
            if key != 0 && key < 1 << 36 {
                f((key - 1) * CHUNK_BYTES, index);
            }
        }
    }

    /// Returns true if a page of `range` is in state `state`.
    pub fn has(&self, range: Range, state: u8) -> bool {
        let mut any = false;
        self.for_each_run(range.start, range.end, state, |_, _| any = true);
        any
    }

    /// Calls `f` with the addresses of each run of pages in state `state` within `start..end`.
    pub fn for_each_run(&self, start: u64, end: u64, state: u8, mut f: impl FnMut(u64, u64)) {
        let mut one = |base: u64, index: usize| {
            let first = (start.clamp(base, base + CHUNK_BYTES) - base) as usize / PAGE_SIZE;
            let last = (end.clamp(base, base + CHUNK_BYTES) - base) as usize / PAGE_SIZE;
            let states = self.states(index);
            let mut page = first;
            while page < last {
                if states[page].load(Ordering::Acquire) != state {
                    page += 1;
                    continue;
                }
                let from = page;
                while page < last && states[page].load(Ordering::Acquire) == state {
                    page += 1;
                }
                f(base + (from * PAGE_SIZE) as u64, base + (page * PAGE_SIZE) as u64);
            }
        };
        let (first, last) = (start / CHUNK_BYTES, end.saturating_add(CHUNK_BYTES - 1) / CHUNK_BYTES);
        if last.saturating_sub(first) > 4096 {
            self.for_each_chunk(one);
        } else {
            for chunk in first..last {
                if let Some(index) = self.find(chunk * CHUNK_BYTES) {
                    one(chunk * CHUNK_BYTES, index);
                }
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use pagefold_os::mem::Mapping;

    /// Calls `act` with an empty map in private memory.
    pub(crate) fn with_map(act: impl FnOnce(ResidencyMap)) {
        let memory = Mapping::anonymous(FILE_BYTES).unwrap();
        // SAFETY: private memory of the right length, kept until the end.
        let map = unsafe { ResidencyMap::at(memory.addr()) };
        map.initialize();
        assert!(map.is_valid());
        act(map);
    }

    #[test]
    fn states_are_counted_and_found_in_runs() {
        with_map(|map| {
            let page = PAGE_SIZE as u64;
            let at = 0x7000_0000_0000 + 510 * page;
            assert_eq!(map.state(at), RESIDENT);
            assert_eq!(map.set_state(at, EVICTED), RESIDENT, "no chunk, no state");
            for addr in (0..4).map(|n| at + n * page) {
                assert!(map.find_or_add(addr).is_some());
                map.set_state(addr, EVICTED);
            }
            assert_eq!(map.head().evicted.load(Ordering::Relaxed), 4);
            let mut runs = Vec::new();
            map.for_each_run(at + page, u64::MAX >> 1, EVICTED, |start, end| runs.push((start - at, end - at)));
            assert_eq!(runs, [(page, 2 * page), (2 * page, 4 * page)], "cut where chunks meet");
            assert_eq!(map.set_state(at, RESIDENT), EVICTED);
            assert_eq!(map.head().evicted.load(Ordering::Relaxed), 3);
        });
    }

    #[test]
    fn an_added_chunk_keeps_its_last_discard() {
        with_map(|map| {
            let chunk = |n: u64| Range { start: n * CHUNK_BYTES + 4096, end: n * CHUNK_BYTES + 8192 };
            map.note_discard(chunk(7), 100);
            let add_range =
                |n: u64| map.last_discard(map.find_or_add(n * CHUNK_BYTES).unwrap()).load(Ordering::Relaxed);
            assert_eq!((add_range(7), add_range(8)), (100, 0));
            map.note_discard(chunk(7), 200);
            assert_eq!(
                (add_range(7), add_range(7 + DISCARD_SLOTS as u64)),
                (200, 100),
                "chunks share a place before they enter"
            );
            map.note_discard(Range { start: 0, end: 1 << 47 }, 300);
            assert_eq!((add_range(7), add_range(8), add_range(9)), (300, 300, 300));
            map.note_discard(chunk(8), 400);
            map.note_discard(chunk(12), 500);
            let last_discards = map.last_discards();
            assert_eq!((last_discards[7], last_discards[8], last_discards[12]), (300, 400, 500));
        });
    }

    #[test]
    fn a_full_table_says_so() {
        with_map(|map| {
            for chunk in 0..CHUNKS as u64 {
                assert!(map.find_or_add(chunk * 3 * CHUNK_BYTES).is_some());
            }
            assert!(map.find_or_add(1 << 46).is_none() && map.find(1 << 46).is_none());
            for chunk in 0..CHUNKS as u64 {
                map.set_state(chunk * 3 * CHUNK_BYTES, [EVICTED, FROZEN, DISCARDED][chunk as usize % 3]);
            }
            let there = Range { start: 1 << 46, end: (1 << 46) + 4096 };
            assert!(!map.add_range(there, |_| true) && map.find(1 << 46).is_none());
            map.set_state(99 * 3 * CHUNK_BYTES, RESIDENT);
            let mut seen = 0;
            map.for_each_chunk(|_, _| seen += 1);
            assert_eq!(seen, CHUNKS);
        });
    }

    #[test]
    fn idle_chunks_are_replaced() {
        for out_max in [CHUNKS / 3, CHUNKS * 9 / 10] {
            make_room(out_max);
        }
    }

    /// At most `out_max` pages are evicted or frozen.
    fn make_room(out_max: usize) {
        with_map(|map| {
            let page = PAGE_SIZE as u64;
            let mut out = std::collections::BTreeMap::new();
            let mut random = fastrand::Rng::with_seed(7);
            for step in 0..4 * CHUNKS as u64 {
                // The last pages of one chunk and the first ones of the next.
                let chunk = random.u64(..1 << 25);
                let range = Range { start: (chunk + 1) * CHUNK_BYTES - page, end: (chunk + 1) * CHUNK_BYTES + page };
                assert!(map.add_range(range, |_| true), "step {step}");
                assert!(map.find(range.start).is_some() && map.find(range.end - page).is_some(), "step {step}");
                let (state, other) = if step % 2 == 0 { (EVICTED, FROZEN) } else { (DISCARDED, EVICTED) };
                for (addr, state) in [(range.start, state), (range.end - page, other)] {
                    map.set_state(addr, state);
                    out.insert(addr, state);
                }
                while out.len() > out_max {
                    let (addr, state) = if step % 3 == 0 { out.pop_first() } else { out.pop_last() }.unwrap();
                    assert_eq!(map.set_state(addr, RESIDENT), state);
                }
            }
            assert!(out.iter().all(|(addr, state)| map.state(*addr) == *state));
            let mut found = std::collections::BTreeMap::new();
            for state in [EVICTED, FROZEN, DISCARDED] {
                map.for_each_run(0, u64::MAX >> 1, state, |start, end| {
                    found.extend((start..end).step_by(PAGE_SIZE).map(|addr| (addr, state)));
                });
            }
            assert_eq!(found, out);
        });
    }

    #[test]
    fn a_replaced_chunk_keeps_its_last_discard() {
        with_map(|map| {
            let one = |chunk: u64| Range { start: chunk * CHUNK_BYTES, end: chunk * CHUNK_BYTES + 4096 };
            assert!(map.add_range(one(DISCARD_SLOTS as u64), |_| true));
            map.note_discard(one(DISCARD_SLOTS as u64), 700);
            let mut shared_discards =
                (DISCARD_SLOTS as u64 + 1..).filter(|chunk| !chunk.is_multiple_of(DISCARD_SLOTS as u64));
            while map.find(one(DISCARD_SLOTS as u64).start).is_some() {
                assert!(map.add_range(one(shared_discards.next().unwrap()), |_| true));
            }
            assert_eq!(map.last_discards()[0], 700);
            assert!(map.add_range(one(DISCARD_SLOTS as u64), |_| true));
            let last_discard = map.last_discard(map.find(one(DISCARD_SLOTS as u64).start).unwrap());
            assert_eq!(last_discard.load(Ordering::Relaxed), 700);
        });
    }
}
