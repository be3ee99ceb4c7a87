//! The tier's counters.

use crate::codec::Codec;
use std::sync::atomic::{AtomicU64, Ordering};

/// Buckets of the latency histogram: bucket `n` counts loads below 2^n us, from 2^0 on; the last has no bound.
pub const LATENCY_BUCKETS: usize = 16;

/// The tier's figures now. Counters count from the creation or adoption of the tier.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Pages that the tier holds for clients.
    pub pages: u64,
    /// Different contents of these pages, without those of same-filled pages.
    pub contents: u64,
    /// Pages that one word fills.
    pub pages_filled: u64,
    /// Contents kept uncompressed, because they do not compress.
    pub contents_raw: u64,
    /// Contents kept by LZ4.
    pub contents_lz4: u64,
    /// Contents kept by Zstandard.
    pub contents_zstd: u64,
    /// Contents kept as a patch against a near page.
    pub contents_patch: u64,
    /// Contents in the backing file.
    pub contents_on_disk: u64,
    /// Bytes of payloads in memory.
    pub payload_bytes: u64,
    /// Memory of the arena, in bytes; `bytes_max` limits it.
    pub bytes_held: u64,
    /// Limit of `bytes_held`.
    pub bytes_max: u64,
    /// Part of `bytes_held`: free slots in slabs. Compaction can free this waste.
    pub bytes_free_slots: u64,
    /// Part of `bytes_held`: the unused ends of slots and slabs. This waste stays.
    pub bytes_rounding: u64,
    /// Part of `bytes_held`: leaves, which hold the page words.
    pub bytes_leaves: u64,
    /// Memory outside the arena, in bytes: indexes, directories, free maps, dictionaries. A successor rebuilds it.
    pub bytes_metadata: u64,
    /// Bytes of payloads in the backing file.
    pub disk_bytes: u64,
    /// Bytes of the backing file in use.
    pub disk_bytes_held: u64,
    /// Stores that succeeded.
    pub stores: u64,
    /// Of these, those with a content that was in the tier already.
    pub stores_shared: u64,
    /// Stores refused because the tier was full or memory short.
    pub stores_refused: u64,
    /// Pages loaded.
    pub loads: u64,
    /// Of these, those read from the backing file.
    pub loads_from_disk: u64,
    /// Load attempts that were repeated because the page was changed during them.
    pub loads_retried: u64,
    /// Loads that failed: damaged or unreadable.
    pub loads_failed: u64,
    /// Pages discarded.
    pub discards: u64,
    /// Contents recompressed densely.
    pub recompressed: u64,
    /// Contents written back.
    pub written_back: u64,
    /// Batches that could not be written.
    pub writeback_errors: u64,
    /// Contents moved by compaction.
    pub moved: u64,
    /// Dictionaries trained.
    pub dictionaries: u64,
    /// Loads by time, see [`LATENCY_BUCKETS`].
    pub load_us: [u64; LATENCY_BUCKETS],
}

impl Stats {
    /// Memory that the pages would take uncompressed, divided by what they take now; 0 if nothing is held.
    pub fn ratio(&self) -> f64 {
        let held = self.bytes_held + self.bytes_metadata;
        if held == 0 { 0.0 } else { (self.pages * pagefold_os::PAGE_SIZE as u64) as f64 / held as f64 }
    }

    /// Upper bound in us of the bucket in which quantile `q` of the loads lies; `None` without loads.
    pub fn load_us_quantile(&self, q: f64) -> Option<u64> {
        quantile_bucket(&self.load_us, q).map(|bucket| 1 << bucket)
    }
}

/// The bucket of a histogram in which quantile `q` lies; `None` if nothing was counted. Counts of a hostile client do not
/// overflow.
pub fn quantile_bucket(counts: &[u64], q: f64) -> Option<usize> {
    let total: u128 = counts.iter().map(|count| u128::from(*count)).sum();
    // No more than there are: a large number is rounded.
    let wanted = ((total as f64 * q).ceil() as u128).min(total);
    let mut sum = 0;
    counts.iter().position(|count| {
        sum += u128::from(*count);
        sum >= wanted && sum > 0
    })
}

macro_rules! counters {
    ($($name:ident),*) => {
        /// The counters of [`Stats`]. Each is exact, but they are not read at the same instant.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub $name: AtomicU64,)*
            pub load_us: [AtomicU64; LATENCY_BUCKETS],
        }

        impl Counters {
            /// Copies them into `stats`.
            pub(crate) fn fill(&self, stats: &mut Stats) {
                $(stats.$name = self.$name.load(Ordering::Relaxed);)*
                for (to, from) in stats.load_us.iter_mut().zip(&self.load_us) {
                    *to = from.load(Ordering::Relaxed);
                }
            }
        }
    };
}

impl Counters {
    /// The counter of contents that are kept in memory by this codec; none for pages of one word, which are no contents.
    pub(crate) fn contents_of(&self, codec: Codec) -> Option<&AtomicU64> {
        match codec {
            Codec::Raw => Some(&self.contents_raw),
            Codec::Lz4 => Some(&self.contents_lz4),
            Codec::Zstd => Some(&self.contents_zstd),
            Codec::Patch => Some(&self.contents_patch),
            Codec::Fill => None,
        }
    }
}

counters!(
    pages,
    contents,
    pages_filled,
    contents_raw,
    contents_lz4,
    contents_zstd,
    contents_patch,
    contents_on_disk,
    payload_bytes,
    stores,
    stores_shared,
    stores_refused,
    loads,
    loads_from_disk,
    loads_retried,
    loads_failed,
    discards,
    recompressed,
    written_back,
    writeback_errors,
    moved,
    dictionaries
);

/// Adds one.
pub(crate) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl Counters {
    /// Counts a load that took `ns`.
    pub(crate) fn loaded(&self, ns: u64) {
        let us = ns / 1000;
        let bucket = (64 - us.leading_zeros() as usize).min(LATENCY_BUCKETS - 1);
        count(&self.load_us[bucket]);
        count(&self.loads);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_upper_bounds() {
        let counters = Counters::default();
        for ns in [500, 900, 1500, 3000, 900_000_000] {
            counters.loaded(ns);
        }
        let mut stats = Stats::default();
        counters.fill(&mut stats);
        assert_eq!(stats.load_us_quantile(0.4), Some(1));
        assert_eq!(stats.load_us_quantile(0.6), Some(2));
        assert_eq!(stats.load_us_quantile(0.8), Some(4));
        assert_eq!(stats.load_us_quantile(1.0), Some(1 << (LATENCY_BUCKETS - 1)));
        assert_eq!(Stats::default().load_us_quantile(0.5), None);
    }
}
