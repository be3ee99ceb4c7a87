//! The prefetcher: another thread loads some of the pages that a program accesses in order.

use super::Shared;
use pagefold_os::signal::Blocked;
use std::sync::atomic::Ordering;

impl Shared {
    /// Prefetches until the region is dropped. The caller must not have signals blocked.
    pub(in crate::region) fn run_prefetcher(&self) {
        if !self.is_ours() {
            return;
        }
        let _running = self.window.enter();
        while self.usable() {
            let taken = {
                let _quiet = Blocked::all();
                let piece = self.window.take(&(0..self.pages()));
                piece.map(|piece| self.fault_in(piece.start, piece.len()))
            };
            match taken {
                Some(loaded_count) => _ = self.counters.prefetched.fetch_add(loaded_count as u64, Ordering::Relaxed),
                None => self.window.wait(|| !self.usable()),
            }
        }
    }
}
