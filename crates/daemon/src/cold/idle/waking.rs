//! What a parked client touches first when it wakes: remembered, and brought back ahead of its faults at the next waking.

use pagefold_os::sync::lock;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// For how long after its first touch a client is waking, in nanoseconds.
const WAKING_NS: u64 = 1_000_000_000;
/// Most pages that are remembered: 32 MiB, and some 20 ms of a thread to bring them back.
const PAGES_MAX: u64 = 8192;

/// Most runs of pages.
const RUNS_MAX: usize = 2048;

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
    /// The same runs, from start to end: each fault of a waking client asks whether its pages are known.
    ends: BTreeMap<u64, u64>,
    pages: u64,
}

impl Touched {
    fn add(&mut self, run: &Range<u64>) {
        if self.ends.range(..run.end).next_back().is_some_and(|(_, end)| run.start < *end) {
            return;
        }
        self.pages += run.end - run.start;
        self.ends.insert(run.start, run.end);
        self.runs.push_back(run.clone());
        while self.pages > PAGES_MAX || self.runs.len() > RUNS_MAX {
            let Some(oldest) = self.runs.pop_front() else { break };
            self.pages -= oldest.end - oldest.start;
            self.ends.remove(&oldest.start);
        }
    }
}

impl Wakings {
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
                self.due.store(true, Ordering::Release);
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

    /// The pages to bring back now, in the order of their faults, which the program is likely to keep; `None` unless the client has
    /// just woken from a sleep, and wakings before this one are remembered.
    pub(crate) fn take_due(&self) -> Option<Vec<u64>> {
        // Faults of a client that is awake pay for one load.
        if !self.due.load(Ordering::Relaxed) || !self.due.swap(false, Ordering::Acquire) {
            return None;
        }
        Some(lock(&self.touched).runs.iter().cloned().flatten().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A moment long after the clock began.
    const T: u64 = 1 << 50;

    #[test]
    fn what_the_first_second_touched_comes_back_at_the_next_waking_and_only_once() {
        let wakings = Wakings::default();
        // Not parked: nothing is remembered.
        wakings.note_fault(5..6, T);
        assert_eq!(wakings.take_due(), None);
        wakings.sleep(T);
        wakings.note_fault(64..80, T);
        // The first waking knows what it touches itself: it is there, and costs a look.
        assert_eq!(wakings.take_due(), Some((64..80).collect()));
        assert_eq!(wakings.take_due(), None);
        wakings.note_fault(7..8, T + WAKING_NS);
        wakings.note_fault(100..101, T + WAKING_NS + 1);
        wakings.note_fault(101..102, T + 1);
        let expected: Vec<u64> = (64..80).chain([7]).collect();
        // The next waking ends without a fault after its second.
        for at in [2 * T, 3 * T] {
            wakings.sleep(at);
            wakings.note_fault(7..8, at + 5);
            assert_eq!(wakings.take_due(), Some(expected.clone()));
        }
    }

    #[test]
    fn a_client_that_is_parked_while_it_wakes_goes_on_waking() {
        let wakings = Wakings::default();
        wakings.sleep(T);
        wakings.note_fault(1..2, T);
        assert!(wakings.take_due().is_some());
        wakings.sleep(T + 1);
        wakings.note_fault(2..3, T + 2);
        assert_eq!(wakings.take_due(), None);
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
        let pages = wakings.take_due().expect("it woke");
        assert_eq!(pages.len() as u64, PAGES_MAX);
        assert_eq!((pages[0], pages[PAGES_MAX as usize - 1]), (640_000 - PAGES_MAX, 639_999));
        (0..10_000).for_each(|page| wakings.note_fault(page * 2..page * 2 + 1, T));
        let touched = lock(&wakings.touched);
        assert_eq!((touched.runs.len(), touched.ends.len(), touched.pages), (RUNS_MAX, RUNS_MAX, RUNS_MAX as u64));
    }
}
