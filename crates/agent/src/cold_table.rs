//! Where each page of a client is: here, or in the cold tier. Shared by agent, daemon and keeper.
//!
//! A sealed memory file: a head, and per 2 MiB chunk of addresses a key and 512
//! bytes, one per page. The table says *where* a page is, the tier says *what*
//! it is. Whatever happens to either end, the table lives on with the file.
//!
//! **The pact.** Who changes a state, or reads events of the client's
//! userfaultfd, holds the pact: one word in the head, 0 free, else the holder.
//! So no event is being served while pages are frozen, and no page is frozen
//! between the moment an event is read and the moment it is obeyed. The daemon
//! only tries (a client may hold the word for ever: then only that client's
//! faults wait); the agent waits. A successor takes it from a dead daemon.
//!
//! The daemon believes nothing here but at the client's own cost: any state is
//! a valid byte, any key a number.

use core::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use pagefold_os::{PAGE_SIZE, Range, syscall};

/// Name of the table's file in /proc.
pub const NAME: &core::ffi::CStr = c"pagefold-cold-table";

/// First word of a table.
const MAGIC: u64 = 0x5046_434f_4c44_0001;

/// Chunks that a table can hold: 128 GiB of a client's memory.
pub const CHUNKS: usize = 1 << 16;
/// Pages of a chunk.
pub const CHUNK_PAGES: usize = 512;
/// Bytes of a chunk.
pub const CHUNK_BYTES: u64 = (CHUNK_PAGES * PAGE_SIZE) as u64;

/// Where so many chunks are on the way to a free place, one whose place may be had is looked for, among so many.
const CROWD: usize = 32;
const IDLE_LOOKS: usize = 1024;

const KEYS: usize = PAGE_SIZE;
const REMOVED: usize = KEYS + CHUNKS * 8;
const STATES: usize = REMOVED + CHUNKS * 8;
/// Length of the file; sparse, so that it costs 528 bytes per chunk in use.
pub const LEN: usize = STATES + CHUNKS * CHUNK_PAGES;

/// The page is resident, or never was: nothing of ours.
pub const RESIDENT: u8 = 0;
/// The page is in the tier.
pub const OUT: u8 = 1;
/// The agent has the page in hand. It holds the pact meanwhile, but for moments in which it lets the daemon read an event.
pub const FROZEN: u8 = 2;
/// As `FROZEN`, and the program discarded the page meanwhile.
pub const VOID: u8 = 3;

/// Bit of the end of what is being discarded: the kernel has done it.
const VOID_DONE: u64 = 1;

/// Bit of where pages are moved: nothing is known any more of what was there before.
const MOVE_CLEARED: u64 = 1;

/// The pact is free.
pub const PACT_FREE: u32 = 0;
/// The agent holds the pact.
pub const PACT_AGENT: u32 = 1;
/// The daemon holds the pact.
pub const PACT_DAEMON: u32 = 2;
/// The agent waits for the pact: set by it, so that the daemon wakes it.
const WAITS: u32 = 1;

/// Moments of discards kept for chunks that the table does not have: the chunk's number modulo this tells which.
pub const OTHERS: usize = 64;

/// Hints that wait for the daemon at most.
pub const HINTS: usize = 64;

/// What the program said about a range, by madvise(2).
#[repr(C)]
#[derive(Debug, Default)]
pub struct Hint {
    /// First address.
    pub start: AtomicU64,
    /// First address after it.
    pub end: AtomicU64,
    /// The advice; stored last.
    pub advice: AtomicU32,
    /// Counts hints.
    pub sequence: AtomicU32,
}

/// The head.
#[repr(C)]
#[derive(Debug)]
pub struct Head {
    magic: AtomicU64,
    /// Region of the tier; 0 before the first greeting.
    pub region: AtomicU64,
    /// Tells clients of one region number apart, and lets nobody else claim it.
    pub token: AtomicU64,
    /// Tells arenas apart: pages went out into this one.
    pub arena: AtomicU64,
    /// Raised by each daemon that takes the client over, and by an agent that goes on without one: what was begun before is
    /// not finished.
    pub epoch: AtomicU32,
    /// The pact.
    pub pact: AtomicU32,
    waits: AtomicU32,
    /// Process id, as the agent sees itself.
    pub pid: AtomicU32,
    /// Pages that are out.
    pub out: AtomicU64,
    /// Pages that were lost and are SIGBUS now.
    pub lost: AtomicU64,
    /// Range that a call of the program's is discarding at this moment, if the end is not 0; see [`Head::void`].
    void_start: AtomicU64,
    /// See `void_start`; with [`VOID_DONE`] when the kernel has done it.
    void_end: AtomicU64,
    /// Next place of a hint; the program's threads count it up.
    pub hint_next: AtomicU32,
    /// Changes after each hint: the daemon sleeps on it.
    pub hinted: AtomicU32,
    /// Hints.
    pub hints: [Hint; HINTS],
    /// When chunks that are not in the table last lost pages by a discard, in monotonic nanoseconds; see [`OTHERS`].
    pub others: [AtomicU64; OTHERS],
    /// Pages that a limit left room for when the daemon last looked, plus one; 0 if it never did.
    room: AtomicU64,
    /// So many calls hold up all that could go out until what they need is back.
    pub bringing: AtomicU32,
    /// Counted up at least every second by a daemon that serves the client, connected or not.
    pub beat: AtomicU32,
    /// Not 0 from `park` to `unpark`: a daemon that takes the client over shows it so.
    pub parked: AtomicU32,
    /// Each chunk is at one of so many places on its way; 0 if the agent does not count that.
    reach: AtomicU32,
    /// Pages that a bare mremap(2) took elsewhere while they were out, and that are not there yet: no state tells of them.
    pub moving: AtomicU32,
    /// The daemon's: an mremap(2) that it is obeying, if the end is not 0; see [`Head::begun_move`].
    move_start: AtomicU64,
    /// See `move_start`.
    move_end: AtomicU64,
    /// See `move_start`; with [`MOVE_CLEARED`].
    move_to: AtomicU64,
}

impl Head {
    /// The daemon: there is room for so many pages.
    pub fn set_room(&self, pages: u64) {
        self.room.store(pages.saturating_add(1), Ordering::Release);
    }

    /// What a call of the program's is discarding at this moment, and whether the kernel has done it. Of two calls in turn,
    /// with the pact held: of the one or of the other.
    pub fn void(&self) -> Option<(Range, bool)> {
        let [end, start, again] =
            [&self.void_end, &self.void_start, &self.void_end].map(|one| one.load(Ordering::SeqCst));
        let range = Range { start, end: end & !VOID_DONE };
        (end == again && start < range.end && range.end < 1 << 47).then_some((range, end & VOID_DONE != 0))
    }

    /// A call of the program's discards `range` from now on, or has done so; nothing if that is empty. Returns what was
    /// there before, for the one that a signal handler interrupts.
    pub fn set_void(&self, range: Range, is_done: bool) -> (Range, bool) {
        let start = self.void_start.load(Ordering::SeqCst);
        let mut end = self.void_end.load(Ordering::SeqCst);
        if start != range.start {
            // In this order: see `void`.
            end = self.void_end.swap(0, Ordering::SeqCst);
            self.void_start.store(range.start, Ordering::SeqCst);
        }
        let new_end = match range.is_empty() {
            true => 0,
            false => range.end | if is_done { VOID_DONE } else { 0 },
        };
        self.void_end.store(new_end, Ordering::SeqCst);
        (Range { start, end: end & !VOID_DONE }, end & VOID_DONE != 0)
    }

    /// The daemon, with the pact held: obeys an mremap(2) from `from` to `to`, of which it knows nothing else any more if that
    /// `is_cleared`. For a successor, should it die in between.
    pub fn begin_move(&self, from: Range, to: u64, is_cleared: bool) {
        self.move_start.store(from.start, Ordering::SeqCst);
        self.move_to.store(to | if is_cleared { MOVE_CLEARED } else { 0 }, Ordering::SeqCst);
        // Last: what is begun is all here.
        self.move_end.store(from.end, Ordering::SeqCst);
    }

    /// It has obeyed.
    pub fn end_move(&self) {
        self.move_end.store(0, Ordering::SeqCst);
    }

    /// What a daemon was obeying when it died, with the pact held: see [`begin_move`](Self::begin_move).
    pub fn begun_move(&self) -> Option<(Range, u64, bool)> {
        let [start, end, to] = [&self.move_start, &self.move_end, &self.move_to].map(|one| one.load(Ordering::SeqCst));
        let (range, is_cleared) = (Range { start, end }, to & MOVE_CLEARED != 0);
        let to = to & !MOVE_CLEARED;
        let is_one = !range.is_empty() && end < 1 << 47 && to < 1 << 47;
        is_one.then_some((range, to, is_cleared))
    }

    /// Pages that there is room for, as far as is known.
    pub fn room(&self) -> u64 {
        self.room.load(Ordering::Acquire).wrapping_sub(1)
    }
}

const _: () = assert!(size_of::<Head>() <= PAGE_SIZE);

/// A mapped table.
#[derive(Clone, Copy, Debug)]
pub struct Table {
    base: u64,
}

impl Table {
    /// The table that is mapped at `base`.
    ///
    /// # Safety
    /// [`LEN`] bytes of a file that cannot shrink are mapped there, readable and writable, as long as the value is used.
    pub const unsafe fn at(base: u64) -> Table {
        Table { base }
    }

    /// First address.
    pub const fn base(&self) -> u64 {
        self.base
    }

    /// Writes the mark of a table.
    pub fn begin(&self) {
        self.head().magic.store(MAGIC, Ordering::Release);
    }

    /// True if this is a table of this version.
    pub fn is_table(&self) -> bool {
        self.head().magic.load(Ordering::Acquire) == MAGIC
    }

    /// The head.
    pub fn head(&self) -> &'static Head {
        // SAFETY: `at` promised the mapping; atomics bear whatever others write.
        unsafe { &*(self.base as *const Head) }
    }

    fn keys(&self) -> &'static [AtomicU64] {
        // SAFETY: as above; the keys lie inside the file.
        unsafe { core::slice::from_raw_parts((self.base + KEYS as u64) as *const AtomicU64, CHUNKS) }
    }

    /// Notes that `range` loses pages by a discard at `now`; the pact is held.
    pub fn note_removed(&self, range: Range, now: u64) {
        if range.is_empty() {
            return;
        }
        let (first, last) = (range.start / CHUNK_BYTES, (range.end - 1) / CHUNK_BYTES);
        if last - first < 4096 {
            for chunk in first..=last {
                let known = self.find(chunk * CHUNK_BYTES).map(|index| self.removed(index));
                known.unwrap_or(&self.head().others[chunk as usize % OTHERS]).store(now, Ordering::Relaxed);
            }
        } else {
            self.for_each_chunk(|base, index| {
                if base + CHUNK_BYTES > range.start && base < range.end {
                    self.removed(index).store(now, Ordering::Relaxed);
                }
            });
            self.head().others.iter().for_each(|other| other.store(now, Ordering::Relaxed));
        }
    }

    /// What [`note_removed`](Self::note_removed) noted, as it would be of chunks that are not in the table.
    pub fn removals(&self) -> [u64; OTHERS] {
        let mut removals = self.head().others.each_ref().map(|other| other.load(Ordering::Relaxed));
        self.for_each_chunk(|base, index| {
            let other = &mut removals[(base / CHUNK_BYTES) as usize % OTHERS];
            *other = (*other).max(self.removed(index).load(Ordering::Relaxed));
        });
        removals
    }

    /// When the chunk at `index` last lost pages by a discard, in monotonic nanoseconds.
    pub fn removed(&self, index: usize) -> &'static AtomicU64 {
        // SAFETY: as above; the index is cut to the array.
        unsafe { &*((self.base + (REMOVED + index % CHUNKS * 8) as u64) as *const AtomicU64) }
    }

    /// The states of the chunk at `index`.
    pub fn states(&self, index: usize) -> &'static [AtomicU8; CHUNK_PAGES] {
        // SAFETY: as above; the index is cut to the array.
        unsafe { &*((self.base + (STATES + index % CHUNKS * CHUNK_PAGES) as u64) as *const [AtomicU8; CHUNK_PAGES]) }
    }

    /// Index of the chunk that holds `addr`, if the table has it.
    pub fn find(&self, addr: u64) -> Option<usize> {
        let key = addr / CHUNK_BYTES + 1;
        let reach = match self.head().reach.load(Ordering::Acquire) as usize {
            0 => CHUNKS,
            reach => reach,
        };
        for index in self.way(key).take(reach) {
            match self.keys()[index].load(Ordering::Acquire) {
                0 => return None,
                found if found == key => return Some(index),
                _ => {}
            }
        }
        None
    }

    /// As [`find`](Self::find), and enters the chunk; for the agent alone, with the pact. `None` if the table is full.
    pub fn find_or_add(&self, addr: u64) -> Option<usize> {
        let key = addr / CHUNK_BYTES + 1;
        self.find(addr).or_else(|| self.give(key, self.way(key).position(|index| self.is_free(index))?))
    }

    /// Enters the chunks of `range`, where it is crowded in place of others of which nothing is out or in hand; for the agent
    /// alone, with the pact, where nobody who holds that goes through the table. Calls `f` with the index of each; false if
    /// the table is full, or `f` says so.
    pub fn enter(&self, range: Range, f: impl Fn(usize) -> bool) -> bool {
        let chunks = || range.start / CHUNK_BYTES..range.end.div_ceil(CHUNK_BYTES);
        let is_wanted = |index: usize| chunks().contains(&self.keys()[index].load(Ordering::Relaxed).wrapping_sub(1));
        chunks().all(|chunk| {
            let key = chunk + 1;
            let free = |looks| self.way(key).take(looks).position(|index| self.is_free(index));
            // A free place is idle too, so none behind one: there the way ends for who looks for a chunk.
            let idle = || self.way(key).take(IDLE_LOOKS).position(|index| self.is_idle(index) && !is_wanted(index));
            let step = || free(CROWD).or_else(idle).or_else(|| free(CHUNKS));
            self.find(chunk * CHUNK_BYTES).or_else(|| self.give(key, step()?)).is_some_and(&f)
        })
    }

    fn is_free(&self, index: usize) -> bool {
        self.keys()[index].load(Ordering::Relaxed) == 0
    }

    /// Nothing is out of the chunk at `index`, and nothing in hand.
    fn is_idle(&self, index: usize) -> bool {
        self.states(index).iter().all(|state| state.load(Ordering::Relaxed) == RESIDENT)
    }

    /// Gives the place `step` places on its way to `key`. Until now it was one of the others; who had the place is one from now
    /// on.
    fn give(&self, key: u64, step: usize) -> Option<usize> {
        let index = self.way(key).nth(step)?;
        let removed = self.removed(index);
        let other = |key: u64| &self.head().others[(key - 1) as usize % OTHERS];
        let before = self.keys()[index].load(Ordering::Relaxed);
        if before != 0 {
            other(before).fetch_max(removed.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        removed.store(other(key).load(Ordering::Relaxed), Ordering::Relaxed);
        // First: who finds the key has seen how far it may be.
        self.head().reach.fetch_max(step as u32 + 1, Ordering::Release);
        self.keys()[index].store(key, Ordering::Release);
        Some(index)
    }

    /// The places at which `key` may be, in their order.
    fn way(&self, key: u64) -> impl Iterator<Item = usize> + use<> {
        let first = Self::place(key);
        (0..CHUNKS).map(move |step| (first + step) % CHUNKS)
    }

    fn place(key: u64) -> usize {
        (key.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as usize % CHUNKS
    }

    /// The state of the page at `addr`.
    pub fn state(&self, addr: u64) -> u8 {
        let page = (addr % CHUNK_BYTES) as usize / PAGE_SIZE;
        self.find(addr).map_or(RESIDENT, |index| self.states(index)[page].load(Ordering::Acquire))
    }

    /// Sets the state of the page at `addr`, whose chunk is there, keeping count; the pact is held.
    /// Returns the state before.
    pub fn set_state(&self, addr: u64, state: u8) -> u8 {
        let Some(index) = self.find(addr) else { return RESIDENT };
        let page = (addr % CHUNK_BYTES) as usize / PAGE_SIZE;
        // Release pairs with the acquire in `state`: who sees a page out finds its entry.
        let before = self.states(index)[page].swap(state, Ordering::AcqRel);
        if before != OUT && state == OUT {
            self.head().out.fetch_add(1, Ordering::Relaxed);
        } else if before == OUT && state != OUT {
            self.head().out.fetch_sub(1, Ordering::Relaxed);
        }
        before
    }

    /// Calls `f` with each chunk in use: its first address and index.
    pub fn for_each_chunk(&self, mut f: impl FnMut(u64, usize)) {
        for (index, key) in self.keys().iter().enumerate() {
            let key = key.load(Ordering::Acquire);
            if key != 0 && key < 1 << 36 {
                f((key - 1) * CHUNK_BYTES, index);
            }
        }
    }

    /// True if a page of `range` is in state `state`.
    pub fn has(&self, range: Range, state: u8) -> bool {
        let mut any = false;
        self.for_each_run(range.start, range.end, state, |_, _| any = true);
        any
    }

    /// Calls `f` with each run of pages in state `state` within `start..end`: its addresses.
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

    /// Takes the pact for `holder` if it is free.
    pub fn try_pact(&self, holder: u32) -> bool {
        // Acquire pairs with the release in `free_pact`: we see the states as the last holder left them.
        self.head().pact.compare_exchange(PACT_FREE, holder, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Takes the pact for the agent, waiting up to about `ms` milliseconds.
    pub fn wait_pact(&self, ms: u32) -> bool {
        let head = self.head();
        for _ in 0..ms.max(1) * 4 {
            if self.try_pact(PACT_AGENT) {
                return true;
            }
            head.waits.store(WAITS, Ordering::SeqCst);
            let timeout = libc::timespec { tv_sec: 0, tv_nsec: 250_000 };
            // SAFETY: the word is mapped as long as the table is.
            let _ = unsafe {
                syscall!(
                    libc::SYS_futex,
                    head.pact.as_ptr(),
                    libc::FUTEX_WAIT,
                    PACT_DAEMON,
                    core::ptr::from_ref(&timeout)
                )
            };
        }
        false
    }

    /// Gives the pact back.
    pub fn free_pact(&self) {
        let head = self.head();
        head.pact.store(PACT_FREE, Ordering::SeqCst);
        if head.waits.swap(0, Ordering::SeqCst) != 0 {
            // SAFETY: as above.
            let _ = unsafe { syscall!(libc::SYS_futex, head.pact.as_ptr(), libc::FUTEX_WAKE, 1) };
        }
    }

    /// Leaves a hint for the daemon; the oldest is lost when there are too many.
    pub fn hint(&self, start: u64, end: u64, advice: i32) {
        let sequence = self.head().hint_next.fetch_add(1, Ordering::Relaxed);
        let hint = &self.head().hints[sequence as usize % HINTS];
        hint.sequence.store(sequence, Ordering::Relaxed);
        hint.start.store(start, Ordering::Relaxed);
        hint.end.store(end, Ordering::Relaxed);
        // Pairs with the swap in `take_hints`.
        hint.advice.store(advice as u32, Ordering::Release);
        self.head().hinted.fetch_add(1, Ordering::Release);
        pagefold_os::wait::wake(&self.head().hinted);
    }

    /// Calls `f` with each hint that waits: its number, addresses and advice, in no order. Half a hint that is being
    /// written is at worst a wrong one.
    pub fn take_hints(&self, mut f: impl FnMut(u32, u64, u64, i32)) {
        for hint in &self.head().hints {
            if hint.advice.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let advice = hint.advice.swap(0, Ordering::Acquire);
            let (start, end) = (hint.start.load(Ordering::Relaxed), hint.end.load(Ordering::Relaxed));
            if advice != 0 && start < end {
                f(hint.sequence.load(Ordering::Relaxed), start, end, advice as i32);
            }
        }
    }
}

#[cfg(all(test, not(feature = "preload")))]
mod tests {
    use super::*;
    use pagefold_os::mem::Mapping;

    fn with_table(act: impl FnOnce(Table)) {
        let memory = Mapping::anonymous(LEN).unwrap();
        // SAFETY: private memory of the right length, kept until the end.
        let table = unsafe { Table::at(memory.addr()) };
        table.begin();
        assert!(table.is_table());
        act(table);
    }

    #[test]
    fn states_are_counted_and_found_in_runs() {
        with_table(|table| {
            let page = PAGE_SIZE as u64;
            let at = 0x7000_0000_0000 + 510 * page;
            assert_eq!(table.state(at), RESIDENT);
            assert_eq!(table.set_state(at, OUT), RESIDENT, "no chunk, no state");
            for addr in (0..4).map(|n| at + n * page) {
                assert!(table.find_or_add(addr).is_some());
                table.set_state(addr, OUT);
            }
            assert_eq!(table.head().out.load(Ordering::Relaxed), 4);
            let mut runs = Vec::new();
            table.for_each_run(at + page, u64::MAX >> 1, OUT, |start, end| runs.push((start - at, end - at)));
            assert_eq!(runs, [(page, 2 * page), (2 * page, 4 * page)], "cut where chunks meet");
            assert_eq!(table.set_state(at, RESIDENT), OUT);
            assert_eq!(table.head().out.load(Ordering::Relaxed), 3);
        });
    }

    #[test]
    fn a_chunk_that_enters_has_lost_what_it_lost_before() {
        with_table(|table| {
            let chunk = |n: u64| Range { start: n * CHUNK_BYTES + 4096, end: n * CHUNK_BYTES + 8192 };
            table.note_removed(chunk(7), 100);
            let enter = |n: u64| table.removed(table.find_or_add(n * CHUNK_BYTES).unwrap()).load(Ordering::Relaxed);
            assert_eq!((enter(7), enter(8)), (100, 0));
            table.note_removed(chunk(7), 200);
            assert_eq!((enter(7), enter(7 + OTHERS as u64)), (200, 100), "chunks share a place before they enter");
            table.note_removed(Range { start: 0, end: 1 << 47 }, 300);
            assert_eq!((enter(7), enter(8), enter(9)), (300, 300, 300));
            table.note_removed(chunk(8), 400);
            table.note_removed(chunk(12), 500);
            let removals = table.removals();
            assert_eq!((removals[7], removals[8], removals[12]), (300, 400, 500));
        });
    }

    #[test]
    fn a_full_table_says_so() {
        with_table(|table| {
            for chunk in 0..CHUNKS as u64 {
                assert!(table.find_or_add(chunk * 3 * CHUNK_BYTES).is_some());
            }
            assert!(table.find_or_add(1 << 46).is_none() && table.find(1 << 46).is_none());
            for chunk in 0..CHUNKS as u64 {
                table.set_state(chunk * 3 * CHUNK_BYTES, [OUT, FROZEN, VOID][chunk as usize % 3]);
            }
            let there = Range { start: 1 << 46, end: (1 << 46) + 4096 };
            assert!(!table.enter(there, |_| true) && table.find(1 << 46).is_none());
            table.set_state(99 * 3 * CHUNK_BYTES, RESIDENT);
            let mut seen = 0;
            table.for_each_chunk(|_, _| seen += 1);
            assert_eq!(seen, CHUNKS);
        });
    }

    #[test]
    fn chunks_of_which_nothing_is_out_make_room() {
        for out_max in [CHUNKS / 3, CHUNKS * 9 / 10] {
            make_room(out_max);
        }
    }

    /// So many pages are out or in hand at most.
    fn make_room(out_max: usize) {
        with_table(|table| {
            let page = PAGE_SIZE as u64;
            let mut out = std::collections::BTreeMap::new();
            let mut random = 7_u64;
            for step in 0..4 * CHUNKS as u64 {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                // The last pages of one chunk and the first ones of the next.
                let chunk = random % (1 << 25);
                let range = Range { start: (chunk + 1) * CHUNK_BYTES - page, end: (chunk + 1) * CHUNK_BYTES + page };
                assert!(table.enter(range, |_| true), "step {step}");
                assert!(table.find(range.start).is_some() && table.find(range.end - page).is_some(), "step {step}");
                let (state, other) = if step % 2 == 0 { (OUT, FROZEN) } else { (VOID, OUT) };
                for (addr, state) in [(range.start, state), (range.end - page, other)] {
                    table.set_state(addr, state);
                    out.insert(addr, state);
                }
                while out.len() > out_max {
                    let (addr, state) = if step % 3 == 0 { out.pop_first() } else { out.pop_last() }.unwrap();
                    assert_eq!(table.set_state(addr, RESIDENT), state);
                }
            }
            assert!(out.iter().all(|(addr, state)| table.state(*addr) == *state));
            let mut found = std::collections::BTreeMap::new();
            for state in [OUT, FROZEN, VOID] {
                table.for_each_run(0, u64::MAX >> 1, state, |start, end| {
                    found.extend((start..end).step_by(PAGE_SIZE).map(|addr| (addr, state)));
                });
            }
            assert_eq!(found, out);
        });
    }

    #[test]
    fn a_chunk_that_made_room_has_lost_what_it_lost() {
        with_table(|table| {
            let one = |chunk: u64| Range { start: chunk * CHUNK_BYTES, end: chunk * CHUNK_BYTES + 4096 };
            assert!(table.enter(one(OTHERS as u64), |_| true));
            table.note_removed(one(OTHERS as u64), 700);
            let mut others = (OTHERS as u64 + 1..).filter(|chunk| !chunk.is_multiple_of(OTHERS as u64));
            while table.find(one(OTHERS as u64).start).is_some() {
                assert!(table.enter(one(others.next().unwrap()), |_| true));
            }
            assert_eq!(table.removals()[0], 700);
            assert!(table.enter(one(OTHERS as u64), |_| true));
            let removed = table.removed(table.find(one(OTHERS as u64).start).unwrap());
            assert_eq!(removed.load(Ordering::Relaxed), 700);
        });
    }

    #[test]
    fn one_holds_the_pact() {
        with_table(|table| {
            use std::sync::atomic::AtomicU32 as Count;
            static INSIDE: Count = Count::new(0);
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    for _ in 0..2_000 {
                        while !table.try_pact(PACT_DAEMON) {
                            std::thread::yield_now();
                        }
                        assert_eq!(INSIDE.fetch_add(1, Ordering::Relaxed), 0);
                        assert_eq!(INSIDE.fetch_sub(1, Ordering::Relaxed), 1);
                        table.free_pact();
                    }
                });
                for _ in 0..2_000 {
                    assert!(table.wait_pact(10_000));
                    assert_eq!(INSIDE.fetch_add(1, Ordering::Relaxed), 0);
                    assert_eq!(INSIDE.fetch_sub(1, Ordering::Relaxed), 1);
                    table.free_pact();
                }
            });
        });
    }

    #[test]
    fn a_discard_in_a_discard_ends_alone() {
        with_table(|table| {
            let head = table.head();
            let [outer, inner] =
                [4, 6].map(|chunk| Range { start: chunk * CHUNK_BYTES, end: (chunk + 1) * CHUNK_BYTES });
            assert!(head.set_void(outer, false).0.is_empty() && head.void() == Some((outer, false)));
            let before = head.set_void(inner, false);
            head.set_void(inner, true);
            assert_eq!((before, head.void()), ((outer, false), Some((inner, true))));
            head.set_void(before.0, before.1);
            assert_eq!(head.void(), Some((outer, false)));
            head.set_void(Range { start: 0, end: 0 }, false);
            assert_eq!(head.void(), None);
        });
    }

    #[test]
    fn hints_arrive_once() {
        with_table(|table| {
            table.hint(4096, 8192, libc::MADV_COLD);
            table.hint(8192, 8192, libc::MADV_COLD);
            let mut got = Vec::new();
            table.take_hints(|number, start, end, advice| got.push((number, start, end, advice)));
            table.take_hints(|_, _, _, _| panic!("again"));
            assert_eq!(got, [(0, 4096, 8192, libc::MADV_COLD)]);
        });
    }
}
