//! Many operations in flight: a core can wait for a dozen cache lines at the same time.

use super::search::Attempt;
use super::word::{self, Control};
use super::{Full, SdTree};
use crate::epoch;
use crate::primitive::Ordering;

/// Searches in flight. Sixteen fill the line-fill buffers; twice that hides the second line of a few.
const IN_FLIGHT: usize = 32;

impl SdTree {
    #[inline(always)]
    fn prefetch_bucket(&self, fingerprint: u64) {
        self.memory.prefetch(Self::bucket_line(fingerprint, self.section_bits(fingerprint)));
    }

    /// Prefetches the child that the search will visit, if it will visit one.
    #[inline(always)]
    fn prefetch_child(&self, fingerprint: u64) -> bool {
        let level = self.section_bits(fingerprint);
        let line = Self::bucket_line(fingerprint, level);
        let control = self.memory.load_control(line);
        if control.has(Control::FROZEN) {
            // The bucket is being moved: the search will visit the next array.
            if level < self.max_bits {
                self.memory.prefetch(Self::bucket_line(fingerprint, level + 1));
            }
            return true;
        }
        let Some(slot) = control.link(Self::half_of(fingerprint, level)) else { return false };
        let link = self.memory.slot(line, slot).load(Ordering::Relaxed);
        // In a moving node the slot may hold a leaf, and a released line may hold anything: prefetch only existing lines.
        let child = word::value(link);
        if !word::is_leaf(link) && child < self.memory.lines() {
            self.memory.prefetch(child);
        }
        true
    }

    /// Looks all fingerprints up with 32 in flight; `found[i]` becomes the result of `get(fingerprints[i])`.
    ///
    /// # Panics
    /// When the slices differ in length.
    pub fn lookup_many(&self, fingerprints: &[u64], found: &mut [Option<u64>]) {
        assert_eq!(fingerprints.len(), found.len(), "as many places for results as keys");
        for &fingerprint in fingerprints.iter().take(IN_FLIGHT) {
            self.prefetch_bucket(fingerprint);
        }
        let mut ahead = fingerprints.iter().skip(IN_FLIGHT);
        // Searches that continue in a child, which is being prefetched.
        let mut pending = [0usize; IN_FLIGHT];
        let mut pending_count = 0;
        for (index, &fingerprint) in fingerprints.iter().enumerate() {
            if let Some(&next) = ahead.next() {
                self.prefetch_bucket(next);
            }
            match self.first_line(fingerprint) {
                Attempt::Found(value) => found[index] = Some(value),
                Attempt::Missing => found[index] = None,
                Attempt::Again => {
                    self.prefetch_child(fingerprint);
                    pending[pending_count] = index;
                    pending_count += 1;
                    if pending_count == IN_FLIGHT {
                        self.finish_pending(fingerprints, found, &pending);
                        pending_count = 0;
                    }
                }
            }
        }
        self.finish_pending(fingerprints, found, &pending[..pending_count]);
    }

    fn finish_pending(&self, fingerprints: &[u64], found: &mut [Option<u64>], pending: &[usize]) {
        for &index in pending {
            found[index] = self.get(fingerprints[index]);
        }
    }

    /// The part of a search that its first line answers; `Again` for all else.
    #[inline(always)]
    fn first_line(&self, fingerprint: u64) -> Attempt {
        let level = self.section_bits(fingerprint);
        let line = Self::bucket_line(fingerprint, level);
        let control = self.memory.load_control(line);
        if control.0 == 0 || control.has(Control::FROZEN | Control::MOVING) {
            return Attempt::Again;
        }
        let found = self.find_leaf(line, control, fingerprint << level, &mut |_| true);
        if found.is_none() && control.link(Self::half_of(fingerprint, level)).is_some() {
            return Attempt::Again;
        }
        // Pairs with the release of a slot's claim or free, as in `attempt`.
        if self.memory.load_control(line) != control {
            return Attempt::Again;
        }
        found.map_or(Attempt::Missing, |(_, word)| Attempt::Found(word::value(word)))
    }

    /// Inserts as [`SdTree::get_or_insert`] does for each pair in turn, while the lines of the next
    /// ones are prefetched; `existing[i]` becomes the result of the i-th.
    ///
    /// # Errors
    /// [`Full`] at the first pair that does not fit; `existing` is set for those before it.
    ///
    /// # Panics
    /// When the slices differ in length, or a value exceeds [`VALUE_MAX`](super::VALUE_MAX).
    pub fn get_or_insert_many(&self, pairs: &[(u64, u64)], existing: &mut [Option<u64>]) -> Result<(), Full> {
        assert_eq!(pairs.len(), existing.len(), "as many places for results as pairs");
        let mut buckets = pairs.iter().skip(IN_FLIGHT / 2);
        let mut children = pairs.iter().skip(IN_FLIGHT / 4);
        for &(fingerprint, _) in pairs.iter().take(IN_FLIGHT / 2) {
            self.prefetch_bucket(fingerprint);
        }
        for (pairs, existing) in pairs.chunks(IN_FLIGHT).zip(existing.chunks_mut(IN_FLIGHT)) {
            // One pin for some pairs; not for all, so that a long batch does not hold the clock.
            let _pin = epoch::pin();
            for (&(fingerprint, value), existing) in pairs.iter().zip(existing) {
                if let Some(&(next, _)) = buckets.next() {
                    self.prefetch_bucket(next);
                }
                if let Some(&(next, _)) = children.next() {
                    self.prefetch_child(next);
                }
                *existing = self.get_or_insert(fingerprint, value)?;
            }
        }
        Ok(())
    }
}
