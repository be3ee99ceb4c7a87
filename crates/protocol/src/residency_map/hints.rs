//! Hints: what the program said about its memory by madvise(2).

use super::ResidencyMap;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Maximum of hints that wait for the daemon.
pub const HINTS: usize = 64;

/// Advice about a range.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Hint {
    /// First address.
    pub start: AtomicU64,
    /// First address after it.
    pub end: AtomicU64,
    /// The advice, stored last; 0 if there is no hint.
    pub advice: AtomicU32,
    /// Number of the hint.
    pub sequence: AtomicU32,
}

impl ResidencyMap {
    /// Leaves a hint for the daemon. If too many wait, the oldest is lost.
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

    /// Calls `f` with number, addresses and advice of each waiting hint, in no order. A hint that is being written may come
    /// with wrong addresses.
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

#[cfg(test)]
mod tests {
    use super::super::tests::with_map;

    #[test]
    fn hints_arrive_once() {
        with_map(|map| {
            map.hint(4096, 8192, libc::MADV_COLD);
            map.hint(8192, 8192, libc::MADV_COLD);
            let mut got = Vec::new();
            map.take_hints(|number, start, end, advice| got.push((number, start, end, advice)));
            map.take_hints(|_, _, _, _| panic!("again"));
            assert_eq!(got, [(0, 4096, 8192, libc::MADV_COLD)]);
        });
    }
}
