//! How long programs waited for pagefold: since they became clients, and over the last minutes.
//!
//! Counts of waits by duration only grow. A client keeps copies of its counts, one each half minute. What was counted since
//! the copy of five minutes ago is the recent past.

use pagefold_tier::quantile_bucket;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// The recent past. It reaches back for up to half a minute longer.
pub const RECENT: Duration = Duration::from_secs(300);
/// Time between two copies of the counts.
const STEP: Duration = Duration::from_secs(30);

/// Times for which accesses of a program waited, in microseconds. Each is an upper bound, as counts are by duration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Waits {
    /// Waits.
    pub count: u64,
    /// Half of them were shorter.
    pub p50_us: u64,
    /// 99 of 100 of them were shorter.
    pub p99_us: u64,
    /// All of them were at most that long.
    pub max_us: u64,
}

impl Waits {
    /// Of `counts` by duration, where `end` is the first duration too long for a bucket. None was longer than `longest_ns`.
    fn of(counts: &[u64], end: fn(usize) -> u64, longest_ns: u64) -> Waits {
        let longest = longest_ns.div_ceil(1000);
        let below = |q| match quantile_bucket(counts, q) {
            // The last bucket has no end.
            Some(bucket) if bucket + 1 < counts.len() => end(bucket).min(longest),
            Some(_) => longest,
            None => 0,
        };
        let count = counts.iter().fold(0u64, |sum, count| sum.saturating_add(*count));
        Waits { count, p50_us: below(0.5), p99_us: below(0.99), max_us: below(1.0) }
    }

    /// The longer of both in each.
    pub fn worst(self, other: Waits) -> Waits {
        Waits {
            count: self.count.saturating_add(other.count),
            p50_us: self.p50_us.max(other.p50_us),
            p99_us: self.p99_us.max(other.p99_us),
            max_us: self.max_us.max(other.max_us),
        }
    }
}

/// Copies of a client's counts, the oldest first.
#[derive(Debug)]
pub(crate) struct PastCounts {
    since: Instant,
    copies: VecDeque<(Instant, Vec<u64>)>,
}

impl Default for PastCounts {
    fn default() -> PastCounts {
        PastCounts { since: Instant::now(), copies: VecDeque::new() }
    }
}

impl PastCounts {
    /// The waits since the beginning and in the recent past, where `counts` are those of `now`.
    pub(crate) fn waits(
        &mut self,
        now: Instant,
        counts: &[u64],
        end: fn(usize) -> u64,
        longest_ns: u64,
    ) -> (Waits, Waits) {
        let last = self.copies.back().map_or(self.since, |(at, _)| *at);
        if now.saturating_duration_since(last) >= STEP {
            self.copies.push_back((now, counts.to_vec()));
        }
        let is_old = |(at, _): &(Instant, Vec<u64>)| now.saturating_duration_since(*at) >= RECENT;
        while self.copies.get(1).is_some_and(is_old) {
            self.copies.pop_front();
        }
        let all = Waits::of(counts, end, longest_ns);
        // A client that is younger has waited all its time recently.
        let Some((_, then)) = self.copies.front().filter(|copy| is_old(copy)) else { return (all, all) };
        let recent: Vec<u64> = counts.iter().zip(then).map(|(now, then)| now.saturating_sub(*then)).collect();
        (all, Waits::of(&recent, end, longest_ns))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_protocol::wait_histogram::{BUCKETS, bucket, bucket_end};

    #[test]
    fn quantiles_are_the_ends_of_their_buckets_and_no_longer_than_the_longest() {
        let of = |counts: &[u64]| Waits::of(counts, bucket_end, 4200);
        assert_eq!(of(&[0; 8]), Waits::default());
        assert_eq!(of(&[98, 0, 1, 0, 1, 0]), Waits { count: 100, p50_us: 1, p99_us: 3, max_us: 5 });
        assert_eq!(of(&[0, 0, 0, 0, 0, 1, 0]), Waits { count: 1, p50_us: 5, p99_us: 5, max_us: 5 });
        // The last bucket holds all that is longer.
        assert_eq!(of(&[1, 1]), Waits { count: 2, p50_us: 1, p99_us: 5, max_us: 5 });
        // A hostile client: the sum does not overflow.
        assert_eq!(of(&[u64::MAX; 64]).count, u64::MAX);
    }

    #[test]
    fn what_waited_long_ago_is_not_recent_and_copies_are_few() {
        let mut past = PastCounts::default();
        let begin = past.since;
        let mut counts = vec![0u64; BUCKETS];
        let mut recent_p99 = Vec::new();
        // Long waits in the first minute, short ones later, one each second.
        for second in 0..1200u64 {
            let us = if second < 60 { 900 } else { 10 };
            counts[bucket(us)] += 1;
            let now = begin + Duration::from_secs(second);
            let (all, recent) = past.waits(now, &counts, bucket_end, 1_000_000);
            assert_eq!(all.count, second + 1);
            assert!(recent.count <= (RECENT + STEP).as_secs() && recent.count <= all.count, "{recent:?}");
            assert!(second < RECENT.as_secs() || recent.count >= RECENT.as_secs(), "{recent:?}");
            assert!(past.copies.len() <= (RECENT.as_secs() / STEP.as_secs()) as usize + 2);
            assert_eq!(all.max_us, 1000.min(bucket_end(bucket(900))));
            recent_p99.push(recent.p99_us);
        }
        assert!(recent_p99[100] >= 900 && recent_p99[420..].iter().all(|us| *us < 20), "{recent_p99:?}");
    }
}
