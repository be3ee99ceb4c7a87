//! What a client touched first at its last wakings: the daemon writes it down here, so that the next one knows it too.
//!
//! Runs of pages, each with a number, in the order in which they were touched. They lie behind the map, in a part of the
//! file that older agents do not make. Like the map this can be written by the client: any word is a run or none.

use super::FILE_BYTES;
use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering};

/// Most runs.
pub const WAKING_RUNS: usize = 2047;
/// Length of this part of the file; it is sparse as well.
pub const WAKINGS_BYTES: usize = (WAKING_RUNS + 1) * 8;
/// Length of a file that has it.
pub const FILE_BYTES_WITH_WAKINGS: usize = FILE_BYTES + WAKINGS_BYTES;

/// Bits of a run's length in its word; above them is its first page.
const LENGTH_BITS: u32 = 16;

/// This part of the file, mapped.
#[derive(Clone, Copy, Debug)]
pub struct WakingRuns {
    base: u64,
}

impl WakingRuns {
    /// The part that is mapped at `base`.
    ///
    /// # Safety
    /// [`WAKINGS_BYTES`] bytes of a file that cannot shrink are mapped there, readable and writable, as long as the value is
    /// used.
    pub const unsafe fn at(base: u64) -> WakingRuns {
        WakingRuns { base }
    }

    /// The number after the last run's, and a word for each run: that of its number modulo their count.
    fn words(&self) -> (&AtomicU64, &[AtomicU64]) {
        // SAFETY: the caller of `at` promised the mapping; atomics allow other writers.
        let words = unsafe { core::slice::from_raw_parts(self.base as *const AtomicU64, WAKING_RUNS + 1) };
        (&words[0], &words[1..])
    }

    /// Writes the run with this number in the place of the oldest. A longer one than [`u16::MAX`] pages is not written.
    pub fn set(&self, number: u64, run: &Range<u64>) {
        let (next, words) = self.words();
        let length = u16::try_from(run.end.saturating_sub(run.start)).unwrap_or(0);
        words[number as usize % WAKING_RUNS].store(run.start << LENGTH_BITS | u64::from(length), Ordering::Relaxed);
        next.store(number.wrapping_add(1), Ordering::Relaxed);
    }

    /// Removes the run with this number.
    pub fn remove(&self, number: u64) {
        self.words().1[number as usize % WAKING_RUNS].store(0, Ordering::Relaxed);
    }

    /// The runs, the oldest first, and the number after the last one's.
    pub fn all(&self) -> (impl Iterator<Item = Range<u64>> + '_, u64) {
        let (next, words) = self.words();
        let next = next.load(Ordering::Relaxed);
        let from_oldest = (0..WAKING_RUNS).map(move |step| {
            let word = words[(next as usize % WAKING_RUNS + step) % WAKING_RUNS].load(Ordering::Relaxed);
            let start = word >> LENGTH_BITS;
            start..start + (word & ((1 << LENGTH_BITS) - 1))
        });
        (from_oldest.filter(|run| !run.is_empty()), next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_os::mem::Mapping;

    #[test]
    fn the_newest_runs_are_found_in_their_order() {
        let memory = Mapping::anonymous(WAKINGS_BYTES).unwrap();
        // SAFETY: private memory of the right length, kept until the end.
        let runs = unsafe { WakingRuns::at(memory.addr()) };
        assert_eq!((runs.all().0.count(), runs.all().1), (0, 0));
        let count = WAKING_RUNS as u64;
        (0..count + 10).for_each(|number| runs.set(number, &(number * 100..number * 100 + 1 + number % 64)));
        runs.remove(10);
        let (found, next) = runs.all();
        let found: Vec<Range<u64>> = found.collect();
        assert_eq!((found.len() as u64, next), (count - 1, count + 10));
        assert!(found.is_sorted_by(|one, other| one.start < other.start) && found[0].start == 1100);
        // What a client may write there.
        runs.words().0.store(u64::MAX, Ordering::Relaxed);
        runs.words().1.iter().for_each(|word| word.store(u64::MAX, Ordering::Relaxed));
        assert_eq!(runs.all().0.count() as u64, count);
        runs.set(runs.all().1, &(0..1 << 20));
        assert_eq!(runs.all().0.count() as u64, count - 1);
    }
}
