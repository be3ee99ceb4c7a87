//! An engine merges until it comes to rest: how far it was when, and its pace.

use super::engine::{Look, Running};
use crate::process::Failure;
use std::time::Duration;

/// The pause between two looks at the counters.
const LOOK: Duration = Duration::from_millis(40);
/// Merging has come to rest when nothing changed for this long.
pub const QUIET: Duration = Duration::from_millis(2500);
/// The longest time for one run.
const RUN_MAX: Duration = Duration::from_secs(600);
/// The period of our watch stage where it is not what is measured.
pub const PERIOD: Duration = Duration::from_millis(500);

/// Wall time per page, in microseconds, by the same rule for every engine: from the first look that saw a merged page until
/// 99 % of the pages were merged; none if one look saw all of them. Leaves out the time before the first merge: our silent
/// periods, KSM's pass that only takes checksums.
pub fn pace(samples: &[Look]) -> Option<f64> {
    let start = samples[0];
    let total = samples[samples.len() - 1].merged;
    let end = *samples.iter().find(|sample| sample.merged * 100 >= total * 99).unwrap_or(&start);
    let first = *samples.iter().find(|sample| sample.merged > start.merged).unwrap_or(&end);
    let us = (end.at - first.at).as_secs_f64() * 1e6;
    (end.merged > first.merged).then(|| us / (end.merged - first.merged) as f64)
}

/// The most points of memory over time.
const POINTS: usize = 40;

/// Seconds since the start, and the host's memory in use then in MiB, of which the workload had `before_mib` at the start.
pub fn memory_over_time(samples: &[Look], before_mib: f64) -> Vec<[f64; 2]> {
    let mut picked: Vec<usize> = (0..=POINTS).map(|point| point * (samples.len() - 1) / POINTS).collect();
    picked.dedup();
    let start = samples[0];
    let point = |at: usize| {
        let gained_mib = (samples[at].available as f64 - start.available as f64) / f64::from(1 << 20);
        [(samples[at].at - start.at).as_secs_f64(), before_mib - gained_mib]
    };
    picked.into_iter().map(point).collect()
}

/// Merges until nothing changes for `quiet`; returns a look for each change.
pub fn settle(running: &Running, quiet: Duration) -> Result<Vec<Look>, Failure> {
    let mut samples = vec![running.look()];
    let mut last = samples[0];
    running.go()?;
    loop {
        std::thread::sleep(LOOK);
        let now = running.look();
        if now.merged != samples[samples.len() - 1].merged {
            samples.push(now);
        }
        // Running guests write a little all the time: growth by less than a fiftieth is no progress.
        if now.activity > last.activity + last.activity / 50 {
            last = now;
        }
        if now.merged > 0 && last.at.elapsed() > quiet || samples[0].at.elapsed() > RUN_MAX {
            return Ok(samples);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    fn looks(began: Instant, seen: &[(u64, u64)]) -> Vec<Look> {
        let look = |&(ms, merged)| {
            let at = began + Duration::from_millis(ms);
            Look { at, merged, cpu_ns: 0, activity: merged, available: merged << 20 }
        };
        seen.iter().map(look).collect()
    }

    #[test]
    fn the_pace_depends_on_the_looks_alone() {
        let began = Instant::now();
        // A second without a merge, for silence or for checksums, then 1000 pages every 40 ms.
        let seen = pace(&looks(began, &[(0, 0), (1000, 1000), (1040, 2000), (1080, 3000), (1120, 4000), (9000, 4001)]));
        assert_eq!(seen, Some(40.0));
        let later = pace(&looks(began, &[(0, 0), (3000, 1000), (3040, 2000), (3080, 3000), (3120, 4000)]));
        assert_eq!(later, Some(40.0), "a later first merge changes nothing");
        // Pages that one look saw have no pace.
        assert_eq!((pace(&looks(began, &[(0, 0), (100, 1000)])), pace(&looks(began, &[(0, 0)]))), (None, None));
    }

    #[test]
    fn memory_over_time_has_the_start_the_end_and_few_points() {
        let began = Instant::now();
        let two = memory_over_time(&looks(began, &[(0, 5), (1500, 15)]), 100.0);
        assert_eq!(two, [[0.0, 100.0], [1.5, 90.0]]);
        let seen: Vec<(u64, u64)> = (0..1000).map(|at| (at, at)).collect();
        let many = memory_over_time(&looks(began, &seen), 1000.0);
        assert_eq!((many.len(), many[0], many[POINTS]), (POINTS + 1, [0.0, 1000.0], [0.999, 1.0]));
    }
}
