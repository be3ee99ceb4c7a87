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

/// Wall time per page, in microseconds, until 99 % of the pages were merged.
pub struct Pace {
    /// Between the first look that saw a merged page and the end; none if one look saw all of them. Leaves out the time
    /// before the first merge: our silent periods, KSM's pass that only takes checksums.
    pub merging_us: Option<f64>,
    /// From the request to merge, everything included.
    pub from_start_us: f64,
}

/// The pace that these looks show, by the same rule for every engine.
pub fn pace(samples: &[Look]) -> Pace {
    let start = samples[0];
    let total = samples[samples.len() - 1].merged;
    let end = *samples.iter().find(|sample| sample.merged * 100 >= total * 99).unwrap_or(&start);
    let first = *samples.iter().find(|sample| sample.merged > start.merged).unwrap_or(&end);
    let us = |from: Look, pages: u64| (end.at - from.at).as_secs_f64() * 1e6 / pages.max(1) as f64;
    Pace {
        merging_us: (end.merged > first.merged).then(|| us(first, end.merged - first.merged)),
        from_start_us: us(start, end.merged - start.merged),
    }
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
        let look = |&(ms, merged)| Look { at: began + Duration::from_millis(ms), merged, cpu_ns: 0, activity: merged };
        seen.iter().map(look).collect()
    }

    #[test]
    fn the_pace_depends_on_the_looks_alone() {
        let began = Instant::now();
        // A second without a merge, for silence or for checksums, then 1000 pages every 40 ms.
        let seen = pace(&looks(began, &[(0, 0), (1000, 1000), (1040, 2000), (1080, 3000), (1120, 4000), (9000, 4001)]));
        assert_eq!((seen.merging_us, seen.from_start_us), (Some(40.0), 280.0));
        // A later first merge changes the second figure only.
        let later = pace(&looks(began, &[(0, 0), (3000, 1000), (3040, 2000), (3080, 3000), (3120, 4000)]));
        assert_eq!((later.merging_us, later.from_start_us), (Some(40.0), 780.0));
    }

    #[test]
    fn pages_that_one_look_saw_have_no_merging_pace() {
        let seen = pace(&looks(Instant::now(), &[(0, 0), (100, 1000)]));
        assert_eq!((seen.merging_us, seen.from_start_us), (None, 100.0));
        let nothing = pace(&looks(Instant::now(), &[(0, 0)]));
        assert_eq!((nothing.merging_us, nothing.from_start_us), (None, 0.0));
    }
}
