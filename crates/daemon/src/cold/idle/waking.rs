//! What a parked client touches first when it wakes: remembered, and brought back ahead of its faults at the next waking.
//!
//! It is written behind the client's residency map too, for the next daemon.

use pagefold_os::mem::Mapping;
use pagefold_os::sync::lock;
use pagefold_os::{ADDRESS_END, PAGE_SIZE};
use pagefold_protocol::residency_map::{WAKING_RUNS, WakingRuns};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// For how long after its first touch a client is waking, in nanoseconds.
const WAKING_NS: u64 = 1_000_000_000;
/// Most pages that are remembered: 32 MiB, and some 20 ms of a thread to bring them back.
const PAGES_MAX: u64 = 8192;

/// Most runs of pages.
const RUNS_MAX: usize = WAKING_RUNS;
/// Pages have smaller numbers. A client could write others.
const PAGE_END: u64 = ADDRESS_END / PAGE_SIZE as u64;
/// And so have runs.
const NUMBER_END: u64 = 1 << 48;
/// A client that faults so many runs ahead of what comes back has overtaken it; farther ahead it goes another way.
const OVERTAKEN_MAX: u64 = 64;

/// The client works, or is not watched.
const AWAKE: u64 = 0;
/// The client is parked, and has touched nothing since. Any other number is the moment of the first touch.
const ASLEEP: u64 = 1;

/// The wakings of a client.
#[derive(Debug, Default)]
pub(crate) struct Wakings {
    state: AtomicU64,
    /// It woke, and the pages of the last waking are still to be brought back.
    due: AtomicBool,
    touched: Mutex<Touched>,
}

/// Pages, those touched longest ago first; no page is there twice.
#[derive(Debug, Default)]
struct Touched {
    runs: VecDeque<Range<u64>>,
    /// The same runs by their start, with their end and their number: each fault of a waking client asks for its page.
    places: BTreeMap<u64, (u64, u64)>,
    pages: u64,
    /// The number of the first run.
    first: u64,
    /// The number of the run that comes back next.
    next: u64,
    /// Where they are written, and what keeps that mapped.
    written: Option<(WakingRuns, Mapping)>,
}

impl Touched {
    fn add(&mut self, run: &Range<u64>) {
        let is_there = self.places.range(..run.end).next_back().is_some_and(|(_, (end, _))| run.start < *end);
        if is_there || run.end > PAGE_END {
            return;
        }
        let number = self.first + self.runs.len() as u64;
        self.pages += run.end - run.start;
        self.places.insert(run.start, (run.end, number));
        self.runs.push_back(run.clone());
        while self.pages > PAGES_MAX || self.runs.len() > RUNS_MAX {
            let Some(oldest) = self.runs.pop_front() else { break };
            self.pages -= oldest.end - oldest.start;
            self.places.remove(&oldest.start);
            if let Some((written, _)) = &self.written {
                written.remove(self.first);
            }
            self.first += 1;
        }
        // Last: the place may be that of the oldest.
        if let Some((written, _)) = &self.written {
            written.set(number, run);
        }
    }

    /// The pages of the next runs, as many runs as have `pages_min`.
    fn take_next(&mut self, pages_min: usize) -> Vec<u64> {
        let mut pages = Vec::new();
        self.next = self.next.max(self.first);
        while pages.len() < pages_min
            && let Some(run) = self.runs.get((self.next - self.first) as usize)
        {
            pages.extend(run.clone());
            self.next += 1;
        }
        pages
    }

    /// The number of the run in which `page` lies.
    fn number_of(&self, page: u64) -> Option<u64> {
        let (_, (end, number)) = self.places.range(..=page).next_back()?;
        (page < *end).then_some(*number)
    }
}

impl Wakings {
    /// The wakings that an earlier daemon wrote to `written`, which `map` keeps mapped, and those that are written there
    /// from now on.
    pub(crate) fn written_to(written: WakingRuns, map: Mapping) -> Wakings {
        let (runs, next) = written.all();
        let runs: Vec<Range<u64>> = runs.collect();
        let first = (next % NUMBER_END).saturating_sub(runs.len() as u64);
        let mut touched = Touched { first, next: first, ..Touched::default() };
        runs.iter().for_each(|run| touched.add(run));
        touched.written = Some((written, map));
        Wakings { touched: Mutex::new(touched), ..Wakings::default() }
    }

    /// The client is parked at the moment `now_ns`. A waking that is still under way goes on.
    pub(crate) fn sleep(&self, now_ns: u64) {
        let state = self.state.load(Ordering::Relaxed);
        let is_over = state == AWAKE || state != ASLEEP && now_ns.saturating_sub(state) > WAKING_NS;
        if is_over {
            // A fault that comes between is part of the next waking, or of none.
            let _ = self.state.compare_exchange(state, ASLEEP, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// A fault at the moment `now_ns` brings back the pages of `run`.
    pub(crate) fn note_fault(&self, run: Range<u64>, now_ns: u64) {
        let woke = match self.state.load(Ordering::Relaxed) {
            AWAKE => return,
            ASLEEP => {
                // No clock is as young as these two numbers.
                self.state.store(now_ns.max(ASLEEP + 1), Ordering::Relaxed);
                let mut touched = lock(&self.touched);
                touched.next = touched.first;
                self.due.store(!touched.runs.is_empty(), Ordering::Relaxed);
                now_ns
            }
            woke => woke,
        };
        if now_ns.saturating_sub(woke) > WAKING_NS {
            self.state.store(AWAKE, Ordering::Relaxed);
            return;
        }
        lock(&self.touched).add(&run);
    }

    /// True of a page that wakings before touched.
    pub(crate) fn remembers(&self, page: u64) -> bool {
        lock(&self.touched).number_of(page).is_some()
    }

    /// True once after each waking before which wakings were remembered: then [`next`](Self::next) has what comes back.
    pub(crate) fn take_due(&self) -> bool {
        // Faults of a client that is awake pay for one load.
        self.due.load(Ordering::Relaxed) && self.due.swap(false, Ordering::Relaxed)
    }

    /// Takes the pages that come back next, in the order of the faults before, which the program is likely to keep: of whole
    /// runs, at least `pages_min` if there are so many.
    pub(crate) fn next(&self, pages_min: usize) -> Vec<u64> {
        lock(&self.touched).take_next(pages_min)
    }

    /// As [`next`](Self::next), for a client that faults on `page` and goes the way of the wakings before, ahead of what
    /// comes back. What it has passed by comes back no more.
    pub(crate) fn next_after(&self, page: u64, pages_min: usize) -> Vec<u64> {
        if self.state.load(Ordering::Relaxed) <= ASLEEP {
            return Vec::new();
        }
        let mut touched = lock(&self.touched);
        match touched.number_of(page) {
            Some(number) if (touched.next..touched.next + OVERTAKEN_MAX).contains(&number) => {
                touched.next = number + 1;
                touched.take_next(pages_min)
            }
            _ => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_os::memfd;
    use pagefold_protocol::residency_map::WAKINGS_BYTES;

    /// A moment long after the clock began.
    const T: u64 = 1 << 50;

    /// All that comes back at the waking that has just begun.
    fn due(wakings: &Wakings) -> Option<Vec<u64>> {
        wakings.take_due().then(|| wakings.next(usize::MAX))
    }

    #[test]
    fn what_the_first_second_touched_comes_back_at_the_next_waking_and_only_once() {
        let wakings = Wakings::default();
        // Not parked: nothing is remembered.
        wakings.note_fault(5..6, T);
        assert!(due(&wakings).is_none());
        wakings.sleep(T);
        wakings.note_fault(64..80, T);
        // The first waking knows nothing before.
        assert_eq!(due(&wakings), None);
        wakings.note_fault(7..8, T + WAKING_NS);
        wakings.note_fault(100..101, T + WAKING_NS + 1);
        wakings.note_fault(101..102, T + 1);
        let expected: Vec<u64> = (64..80).chain([7]).collect();
        // The next waking ends without a fault after its second.
        for at in [2 * T, 3 * T] {
            wakings.sleep(at);
            wakings.note_fault(7..8, at + 5);
            assert_eq!(due(&wakings), Some(expected.clone()));
            assert_eq!(due(&wakings), None);
        }
        assert!(wakings.remembers(7) && wakings.remembers(79) && !wakings.remembers(80));
    }

    #[test]
    fn a_client_that_overtakes_is_followed_and_one_that_goes_another_way_is_not() {
        let wakings = Wakings::default();
        wakings.sleep(T);
        (0..200).for_each(|run| wakings.note_fault(run * 10..run * 10 + 1, T));
        // It wakes for the first time; it is awake; it wakes again.
        assert!(wakings.next_after(1990, 1).is_empty());
        wakings.note_fault(0..1, 2 * T);
        assert!(wakings.next_after(0, 1).is_empty());
        wakings.sleep(3 * T);
        wakings.note_fault(0..1, 3 * T);
        assert_eq!(wakings.next_after(0, 2), [10, 20]);
        assert_eq!(wakings.next(1), [30]);
        assert_eq!(wakings.next_after(90, 2), [100, 110]);
        // It comes already; far ahead; not remembered.
        assert!([20, 1990, 1991].into_iter().all(|page| wakings.next_after(page, 1).is_empty()));
        assert_eq!(wakings.next(1), [120]);
    }

    #[test]
    fn a_client_that_is_parked_while_it_wakes_goes_on_waking() {
        let wakings = Wakings::default();
        for at in [T, 2 * T] {
            wakings.sleep(at);
            wakings.note_fault(1..2, at);
        }
        assert!(wakings.take_due());
        wakings.sleep(2 * T + 1);
        wakings.note_fault(2..3, 2 * T + 2);
        assert!(!wakings.take_due());
    }

    /// More than once, for the numbers of runs go on.
    #[test]
    fn the_next_daemon_knows_what_the_last_waking_touched() {
        let file = memfd::create(c"wakings", WAKINGS_BYTES as u64).unwrap();
        let daemon = || {
            let prot = libc::PROT_READ | libc::PROT_WRITE;
            let map = Mapping::file(file.raw(), 0, WAKINGS_BYTES, prot, libc::MAP_SHARED).unwrap();
            // SAFETY: of that length, and no other code has the file.
            Wakings::written_to(unsafe { WakingRuns::at(map.addr()) }, map)
        };
        let mut expected: Vec<u64> = Vec::new();
        for turn in 0..5 {
            let wakings = daemon();
            assert_eq!(wakings.next(usize::MAX), expected, "turn {turn}");
            // A greeting makes a second one of a client that is known.
            drop(daemon());
            wakings.sleep(T);
            let touched = (0..700).map(|page| (turn * 700 + 699 - page) * 3);
            touched.clone().for_each(|page| wakings.note_fault(page..page + 2, T));
            expected.extend(touched.flat_map(|page| [page, page + 1]));
            expected.drain(..expected.len().saturating_sub(2 * RUNS_MAX));
        }
        // A client may write anything there, which then comes back at its own cost.
        let rest = file.raw();
        let map = Mapping::file(rest, 0, WAKINGS_BYTES, libc::PROT_WRITE, libc::MAP_SHARED).unwrap();
        for byte in [0xff, 0x01, 0x7f] {
            // SAFETY: all of the mapping, of which this is the only user.
            unsafe { std::ptr::write_bytes(map.addr() as *mut u8, byte, WAKINGS_BYTES) };
            let wakings = daemon();
            wakings.sleep(T);
            (0..10).for_each(|page| wakings.note_fault(page..page + 1, T));
            assert!(wakings.next(usize::MAX).iter().all(|page| *page < PAGE_END));
        }
    }

    /// A client that touches all of its memory in a second takes no more of the daemon's than others.
    #[test]
    fn the_newest_pages_are_kept_and_no_page_twice() {
        let wakings = Wakings::default();
        wakings.sleep(T);
        for run in 0..10_000 {
            wakings.note_fault(run * 64..run * 64 + 64, T);
            wakings.note_fault(run * 64 + 3..run * 64 + 4, T);
        }
        let pages = wakings.next(usize::MAX);
        assert_eq!(pages.len() as u64, PAGES_MAX);
        assert_eq!((pages[0], pages[PAGES_MAX as usize - 1]), (640_000 - PAGES_MAX, 639_999));
        (0..10_000).for_each(|page| wakings.note_fault(page * 2..page * 2 + 1, T));
        let touched = lock(&wakings.touched);
        assert_eq!((touched.runs.len(), touched.places.len(), touched.pages), (RUNS_MAX, RUNS_MAX, RUNS_MAX as u64));
    }
}
