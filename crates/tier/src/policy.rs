//! How fast pages are evicted, and how many a fault loads: pure functions.
//!
//! The governor controls the *idle time*: how long a page must not have been
//! written before it may be evicted. A refault costs the client time; the
//! tolerance is the share of the run time that refaults may cost. Above it the
//! idle time doubles and the pace halves; well below it both change slowly the
//! other way. As in TCP, the increase is slow and the decrease fast: the share
//! stays near the tolerance without a model of the program.
//!
//! There are two kinds of pressure, with opposite effects. Stalls *of the
//! client* (memory.pressure of its cgroup) count as lost time, whatever their
//! cause. Shortage *of the host* speeds eviction up: evicting more from idle
//! clients is better than an OOM kill. A client over twice its tolerance is
//! spared even then.

/// Settings of a [`Governor`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Share of run time that may be lost to refaults, 0 to 1. Default 0.01.
    pub tolerance: f64,
    /// Shortest idle time, in seconds. Default 10.
    pub idle_s_min: f64,
    /// Longest idle time, in seconds. Default 3600.
    pub idle_s_max: f64,
    /// Highest pace, in pages per second. Default 65,536: 256 MiB/s.
    pub pages_per_s_max: f64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { tolerance: 0.01, idle_s_min: 10.0, idle_s_max: 3600.0, pages_per_s_max: 65_536.0 }
    }
}

/// The measurements since the last step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Seen {
    /// Length of the period, in seconds.
    pub elapsed_s: f64,
    /// Time that the client's threads waited for refaults, in seconds.
    pub refault_s: f64,
    /// Share of the period in which the client stalled on memory for other reasons, 0 to 1 (PSI "some").
    pub client_stalled: f64,
    /// Memory used of the host or the cgroup, as a share of its limit, 0 to 1.
    pub used: f64,
}

/// What may be evicted until the next step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pace {
    /// Pages that were not written for this long, in seconds.
    pub idle_s: f64,
    /// At most this many of them per second.
    pub pages_per_s: f64,
}

/// Memory use above this share of the limit counts as shortage.
const SHORT_ABOVE: f64 = 0.9;
/// Slowest pace: one cluster per second, so that the recovery of a client is noticed.
const PAGES_PER_S_MIN: f64 = 8.0;

/// The feedback loop of one client.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Governor {
    limits: Limits,
    pace: Pace,
}

impl Governor {
    /// Starts with an idle time of two minutes, at which a third of a fleet's memory is cold, and a sixteenth of the
    /// highest pace.
    pub fn new(limits: Limits) -> Governor {
        Governor::starting_at(limits, 120.0)
    }

    /// As [`new`](Self::new), with another initial idle time, in seconds.
    pub fn starting_at(limits: Limits, idle_s: f64) -> Governor {
        let idle_s = idle_s.clamp(limits.idle_s_min, limits.idle_s_max);
        Governor { limits, pace: Pace { idle_s, pages_per_s: limits.pages_per_s_max / 16.0 } }
    }

    /// The pace now.
    pub fn pace(&self) -> Pace {
        self.pace
    }

    /// Evaluates a period and sets the pace for the next.
    pub fn step(&mut self, seen: &Seen) -> Pace {
        let elapsed_s = seen.elapsed_s.max(1e-3);
        let lost = seen.refault_s / elapsed_s + seen.client_stalled;
        let tolerance = self.limits.tolerance;
        let shortage = ((seen.used - SHORT_ABOVE) / (1.0 - SHORT_ABOVE)).clamp(0.0, 1.0);
        let Pace { idle_s, pages_per_s } = self.pace;
        let (idle_factor, pace_factor) = if lost > tolerance * if shortage > 0.0 { 2.0 } else { 1.0 } {
            (2.0, 0.5)
        } else if lost < tolerance / 2.0 || shortage > 0.0 {
            // A tenth less per ten seconds; in full shortage, half.
            let creep = (0.9 - 0.4 * shortage).powf(elapsed_s / 10.0);
            (creep, creep.recip().powi(2))
        } else {
            (1.0, 1.0)
        };
        self.pace = Pace {
            idle_s: (idle_s * idle_factor).clamp(self.limits.idle_s_min, self.limits.idle_s_max),
            pages_per_s: (pages_per_s * pace_factor)
                .clamp(PAGES_PER_S_MIN.min(self.limits.pages_per_s_max), self.limits.pages_per_s_max),
        };
        self.pace
    }
}

/// Share of time, 0 to 1, in which some task stalled during the last ten seconds, from the text of a pressure file.
///
/// `None` if the text is not a pressure file's: the kernel may lack PSI, or have it switched off.
pub fn stalled_share(pressure: &str) -> Option<f64> {
    let some = pressure.lines().find(|line| line.starts_with("some "))?;
    let share: f64 = some.split_ascii_whitespace().find_map(|field| field.strip_prefix("avg10="))?.parse().ok()?;
    (0.0..=100.0).contains(&share).then_some(share / 100.0)
}

/// How many pages a fault loads, by the pattern of one client's faults.
///
/// A fault right after the last window doubles the window; a fault elsewhere halves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    pages: u64,
    pages_max: u64,
    /// One past the last loaded page.
    end: u64,
}

impl Window {
    /// Starts with one page; `pages_max` is rounded down to a power of two, at least one.
    pub fn new(pages_max: u64) -> Window {
        let pages_max = pages_max.max(1);
        Window { pages: 1, pages_max: 1 << pages_max.ilog2(), end: u64::MAX }
    }

    /// How many pages to load for a fault at `page`: a power of two, for the aligned group around it.
    pub fn fault(&mut self, page: u64) -> u64 {
        // A fault within the next window counts as sequential: the pages between may be resident.
        let is_sequential = page >= self.end && page - self.end < self.pages * 2;
        self.pages = if is_sequential { (self.pages * 2).min(self.pages_max) } else { (self.pages / 2).max(1) };
        self.end = page / self.pages * self.pages + self.pages;
        self.pages
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A client that touches each page periodically.
    struct Client {
        period_s: Vec<f64>,
        next_s: Vec<f64>,
        last_s: Vec<f64>,
        out: Vec<bool>,
    }

    const REFAULT_S: f64 = 100e-6;
    const STEP_S: f64 = 5.0;

    impl Client {
        fn new(period_s: Vec<f64>) -> Client {
            let next_s = period_s.iter().enumerate().map(|(page, period)| period * (page % 97) as f64 / 97.0).collect();
            let len = period_s.len();
            Client { period_s, next_s, last_s: vec![0.0; len], out: vec![false; len] }
        }

        /// Runs until `now_s`; returns the refaults.
        fn touch(&mut self, now_s: f64) -> u64 {
            let mut refaults = 0;
            for page in 0..self.out.len() {
                while self.next_s[page] <= now_s {
                    self.last_s[page] = self.next_s[page];
                    self.next_s[page] += self.period_s[page];
                    refaults += u64::from(std::mem::take(&mut self.out[page]));
                }
            }
            refaults
        }

        fn take(&mut self, pace: Pace, now_s: f64) {
            let mut left = pace.pages_per_s * STEP_S;
            for page in 0..self.out.len() {
                if left >= 1.0 && !self.out[page] && now_s - self.last_s[page] > pace.idle_s {
                    self.out[page] = true;
                    left -= 1.0;
                }
            }
        }
    }

    /// Runs the loop; returns the share of time lost in the second half, and the share of pages evicted at the end.
    fn simulate(client: &mut Client, governor: &mut Governor, seconds: f64, used: f64) -> (f64, f64) {
        let (mut now_s, mut lost_s) = (0.0, 0.0);
        let start_s = client.last_s.iter().copied().fold(0.0, f64::max);
        while now_s < seconds {
            now_s += STEP_S;
            let refault_s = client.touch(start_s + now_s) as f64 * REFAULT_S;
            if now_s > seconds / 2.0 {
                lost_s += refault_s;
            }
            let pace = governor.step(&Seen { elapsed_s: STEP_S, refault_s, client_stalled: 0.0, used });
            client.take(pace, start_s + now_s);
        }
        let out = client.out.iter().filter(|out| **out).count() as f64 / client.out.len() as f64;
        (lost_s / (seconds / 2.0), out)
    }

    /// A third hot, a third touched every one to twenty minutes, a third never again.
    fn mixed() -> Client {
        Client::new(
            (0..60_000)
                .map(|page| match page % 3 {
                    0 => 1.0,
                    1 => 60.0 + (page % 1200) as f64,
                    _ => 1e9,
                })
                .collect(),
        )
    }

    #[test]
    fn the_tolerance_holds_and_cold_memory_is_evicted() {
        let mut out_before = 0.0;
        for tolerance in [0.001, 0.01, 0.1] {
            let mut governor = Governor::new(Limits { tolerance, ..Limits::default() });
            let (lost, out) = simulate(&mut mixed(), &mut governor, 7200.0, 0.5);
            assert!(lost <= tolerance, "tolerance {tolerance}: lost {lost}");
            assert!(out > 0.32, "tolerance {tolerance}: only {out} of the memory out");
            assert!(out >= out_before - 0.02, "more tolerance, less memory out: {out} after {out_before}");
            out_before = out;
        }
    }

    #[test]
    fn a_client_that_becomes_busy_is_spared_quickly() {
        let mut client = mixed();
        let mut governor = Governor::new(Limits::default());
        simulate(&mut client, &mut governor, 3600.0, 0.5);
        // Everything becomes hot.
        let now_s = client.last_s.iter().copied().fold(0.0, f64::max);
        client.period_s.fill(20.0);
        client.next_s = (0..client.out.len()).map(|page| now_s + (page % 200) as f64 / 10.0).collect();
        let (lost, out) = simulate(&mut client, &mut governor, 1200.0, 0.5);
        assert!(lost < 0.01 && out < 0.05, "lost {lost}, out {out}");
    }

    #[test]
    fn shortage_evicts_more_but_within_bounds() {
        let (_, relaxed) = simulate(&mut mixed(), &mut Governor::new(Limits::default()), 3600.0, 0.5);
        let (lost, short) = simulate(&mut mixed(), &mut Governor::new(Limits::default()), 3600.0, 1.0);
        assert!(short >= relaxed, "{short} {relaxed}");
        assert!(lost < 0.03, "{lost}");
    }

    #[test]
    fn pressure_files_are_parsed_and_other_text_is_refused() {
        let text = "some avg10=12.50 avg60=0.00 avg300=0.00 total=0\nfull avg10=1.00 avg60=0.00 avg300=0.00 total=0\n";
        assert_eq!(stalled_share(text), Some(0.125));
        for text in ["", "full avg10=1.0", "some avg10=x", "some avg10=101", "some total=3"] {
            assert_eq!(stalled_share(text), None);
        }
    }

    #[test]
    fn the_window_follows_the_pattern() {
        let mut window = Window::new(8);
        let mut page = 0;
        let mut sizes = Vec::new();
        for _ in 0..5 {
            let pages = window.fault(page);
            sizes.push(pages);
            page = page / pages * pages + pages;
        }
        assert_eq!(sizes, [1, 2, 4, 8, 8]);
        assert_eq!([window.fault(9000), window.fault(50), window.fault(7000)], [4, 2, 1]);
    }

    proptest! {
        #[test]
        fn the_pace_stays_within_its_limits(
            steps in proptest::collection::vec((0.0..100.0_f64, 0.0..100.0_f64, 0.0..1.0_f64, 0.0..1.5_f64), 1..50)
        ) {
            let limits = Limits::default();
            let mut governor = Governor::new(limits);
            for (elapsed_s, refault_s, client_stalled, used) in steps {
                let pace = governor.step(&Seen { elapsed_s, refault_s, client_stalled, used });
                prop_assert!(pace.idle_s >= limits.idle_s_min && pace.idle_s <= limits.idle_s_max);
                prop_assert!(pace.pages_per_s >= 1.0 && pace.pages_per_s <= limits.pages_per_s_max);
            }
        }

        #[test]
        fn windows_are_powers_of_two_within_bounds(pages in proptest::collection::vec(any::<u64>(), 1..50), max in 0_u64..100) {
            let mut window = Window::new(max);
            for page in pages {
                let size = window.fault(page >> 3);
                prop_assert!(size.is_power_of_two() && size <= max.max(1));
            }
        }
    }
}
