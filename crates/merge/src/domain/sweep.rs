//! What nothing needs any more goes: dead entries of the index, and segments of the pool without sharers.

use super::Domain;
use super::index_entry::IndexEntry;
use pagefold_os::sync::{read, write};
use std::sync::atomic::Ordering;

/// The index is swept of dead entries once in this many periods.
const SWEEP_PERIODS: usize = 16;

impl Domain {
    /// Drops index entries of candidates that are none any more, a part in each period.
    pub(super) fn sweep_index(&self) {
        let Ok(mut sweep) = self.sweep.try_lock() else { return };
        let index_changes = self.index_changes.load(Ordering::Relaxed);
        if index_changes != sweep.seen {
            sweep.seen = index_changes;
            // One part more than a round: the change may lie in the middle of a part.
            sweep.left = SWEEP_PERIODS + 1;
        }
        if sweep.left == 0 {
            return;
        }
        sweep.left -= 1;
        let buckets = (self.index.memory_bytes() / 64) as usize / SWEEP_PERIODS + 64;
        let chunks = read(&self.chunks);
        self.index.retain(&mut sweep.cursor, buckets, |value| match IndexEntry::from_value(value) {
            IndexEntry::Slot(slot) => self.pool.published_from(slot) > 0,
            IndexEntry::Candidate { chunk, page } => chunks.is_indexed(chunk, page),
            IndexEntry::Claimed => true,
        });
    }

    /// Releases pool segments that have no sharer any more.
    pub(super) fn release_segments(&self) {
        for segment in self.pool.unshared() {
            let key = &self.key;
            let index = &self.index;
            let mut elsewhere = Vec::new();
            let released = self.pool.release(segment, |slot, page| {
                let fingerprint = key.fingerprint(page);
                index.remove(fingerprint, IndexEntry::Slot(slot).value());
                if self.has_unlisted(fingerprint) {
                    elsewhere.push(fingerprint);
                }
            });
            if released {
                write(&self.repeats).retain(|first| first.segment() != segment);
                self.notify_owners(&self.list_instead(segment, &elsewhere));
            }
        }
    }
}
