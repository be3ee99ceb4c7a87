//! When a client is idle, and what follows. A function of time and samples: it reads no clock and no file.

use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Share of one processor that the program of an idle client may use: timers of runtimes and of guest kernels.
const CPU_SHARE: f64 = 0.01;
/// Pages that an idle client may touch for the first time in a second, in the sense of [`Sample::touched_pages`].
const TOUCHED_PAGES_PER_S: f64 = 64.0;
/// Shortest and longest pause between two looks at a client. There are sixteen looks in the idle time.
const LOOKS: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(5)];
/// Shortest and longest time that a client works before its memory returns to live merging: an eighth of the idle time.
const WORK: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(10)];
/// Most of the time that a parking may take is planned for, the rest is reserve.
const PLANNED: f64 = 0.8;

/// When clients are parked without a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParkPolicy {
    /// A client that was quiet for so long is parked.
    pub idle: Duration,
    /// Its parking is spread over this time.
    pub within: Duration,
}

/// Part of the idle time after which a client is parked while the host is short of memory.
const HURRY: u32 = 8;
/// Percent of the time for which programs wait for memory on a host that is short of it.
const STALLED: f64 = 10.0;

/// True of a host that has `available` of its memory left and shall keep `reserve`, or on which programs wait for memory
/// (`stall` percent of the last seconds): it has memory then that it cannot give out soon enough.
pub(crate) fn is_short(available: u64, reserve: u64, stall: Option<f64>) -> bool {
    available < reserve || stall.is_some_and(|stall| stall >= STALLED)
}

impl ParkPolicy {
    /// The idle time, on a host that [is short](is_short) of memory or is not.
    pub(crate) fn idle_time(&self, is_short: bool) -> Duration {
        if is_short { self.idle / HURRY } else { self.idle }
    }

    /// How long a client works before its memory returns to live merging: a reply or two are better served from the tier.
    pub(crate) fn work_time(&self) -> Duration {
        (self.idle / 8).clamp(WORK[0], WORK[1])
    }

    /// The pause between two looks at a client.
    pub(crate) fn look_interval(&self) -> Duration {
        (self.idle / 16).clamp(LOOKS[0], LOOKS[1])
    }
}

/// What a client does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activity {
    /// No policy is configured, or the client was not looked at yet.
    #[default]
    Unwatched,
    /// It worked since the last look but one.
    Busy,
    /// It is quiet, and has not been for long enough to be parked.
    Idle,
    /// Its memory was evicted, and it has touched none of it since.
    Parked,
    /// It was parked, and has begun to work.
    Waking,
}

impl Activity {
    /// All, in the order of a client's day.
    pub const ALL: [Activity; 5] =
        [Activity::Unwatched, Activity::Busy, Activity::Idle, Activity::Parked, Activity::Waking];

    /// Its name in JSON and in labels of metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Activity::Unwatched => "unwatched",
            Activity::Busy => "busy",
            Activity::Idle => "idle",
            Activity::Parked => "parked",
            Activity::Waking => "waking",
        }
    }
}

/// What is known of a client at one moment. Numbers count from the client's start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sample {
    /// Processor time of the program's own threads.
    pub cpu: Duration,
    /// Faults on evicted and fresh pages, and pages that the evictor's looks found written.
    pub touched_pages: u64,
    /// Of those: faults on evicted pages.
    pub refaults: u64,
    /// Its memory was evicted as a whole, by the policy or by request.
    pub parked: bool,
    /// Its threads cannot run: a frozen control group, or a stop signal. Its agent cannot answer.
    pub suspended: bool,
}

impl Sample {
    /// True if the program did more since `last` than timers do. Written pages are found once in `scan_interval`, so shorter
    /// times are allowed as many pages.
    pub(crate) fn shows_work_since(&self, last: &Sample, elapsed: Duration, scan_interval: Duration) -> bool {
        let cpu = self.cpu.saturating_sub(last.cpu);
        let touched = self.touched_pages.saturating_sub(last.touched_pages);
        let seconds = elapsed.max(scan_interval).as_secs_f64().max(1.0);
        cpu.as_secs_f64() > elapsed.as_secs_f64() * CPU_SHARE || touched as f64 > seconds * TOUCHED_PAGES_PER_S
    }
}

/// What a look at a client leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    Nothing,
    /// It has been quiet for long enough.
    Park,
    /// A parked client works again.
    Woke,
}

/// What the policy remembers of a client.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Idleness {
    activity: Activity,
    seen: Option<(Duration, Sample)>,
    /// The moment of the last sign of work.
    worked: Duration,
}

impl Idleness {
    pub(crate) fn activity(&self) -> Activity {
        self.activity
    }

    /// Takes the sample of the moment `now`, of a clock that never goes back.
    pub(crate) fn step(&mut self, now: Duration, sample: Sample, idle: Duration, scan_interval: Duration) -> Decision {
        let Some((before, last)) = self.seen.replace((now, sample)) else {
            if self.activity == Activity::Unwatched {
                self.worked = now;
                self.activity = if sample.parked { Activity::Parked } else { Activity::Busy };
            }
            return Decision::Nothing;
        };
        if sample.suspended {
            // A platform that thaws a sandbox wants it: its idle time begins anew then.
            self.worked = now;
            self.activity = if sample.parked { Activity::Parked } else { Activity::Idle };
            return Decision::Nothing;
        }
        let works = sample.shows_work_since(&last, now.saturating_sub(before), scan_interval);
        if sample.parked {
            self.worked = now;
            if works || sample.refaults > last.refaults {
                self.activity = Activity::Waking;
                return Decision::Woke;
            }
            self.activity = Activity::Parked;
            return Decision::Nothing;
        }
        if last.parked && self.activity == Activity::Parked {
            // Unparked by request.
            self.worked = now;
            self.activity = Activity::Waking;
            return Decision::Nothing;
        }
        if works {
            self.worked = now;
            self.activity = Activity::Busy;
            return Decision::Nothing;
        }
        self.activity = Activity::Idle;
        if now.saturating_sub(self.worked) >= idle { Decision::Park } else { Decision::Nothing }
    }

    /// The same client by samples that count anew: what it did so far is known.
    pub(crate) fn as_begun(&self) -> Idleness {
        Idleness { seen: None, ..*self }
    }

    /// A parking ended early, because the client worked or its agent was gone: its idle time begins anew.
    pub(crate) fn postpone(&mut self, now: Duration) {
        self.worked = now;
    }
}

/// The pause before the next part of a parking, of which `parts` are left and which has `left` time: the parts are spread
/// evenly over most of that time. `took` is how long the last part took.
pub(crate) fn pause(parts: usize, left: Duration, took: Duration) -> Duration {
    if parts == 0 {
        return Duration::ZERO;
    }
    (left.mul_f64(PLANNED) / u32::try_from(parts).unwrap_or(u32::MAX)).saturating_sub(took)
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDLE: Duration = Duration::from_secs(60);
    const SCAN: Duration = Duration::from_secs(5);

    fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// A client, its clock, and what it has done so far.
    struct Simulated {
        idleness: Idleness,
        now: Duration,
        sample: Sample,
    }

    impl Simulated {
        fn new() -> Simulated {
            // The clock of a host that has run for long.
            let (idleness, sample) = Default::default();
            let mut client = Simulated { idleness, now: s(1_000_000), sample };
            assert_eq!(client.after(0, |_| ()), (Decision::Nothing, Activity::Busy));
            client
        }

        /// Looks `seconds` later, in which the client did `work`.
        fn after(&mut self, seconds: u64, work: impl FnOnce(&mut Sample)) -> (Decision, Activity) {
            work(&mut self.sample);
            self.now += s(seconds);
            let decision = self.idleness.step(self.now, self.sample, IDLE, SCAN);
            (decision, self.idleness.activity())
        }

        fn quiet(&mut self, seconds: u64) -> (Decision, Activity) {
            self.after(seconds, |_| ())
        }
    }

    #[test]
    fn a_client_is_parked_after_the_idle_time_and_not_before() {
        let mut client = Simulated::new();
        for _ in 0..11 {
            assert_eq!(client.quiet(5), (Decision::Nothing, Activity::Idle));
        }
        assert_eq!(client.quiet(4), (Decision::Nothing, Activity::Idle));
        assert_eq!(client.quiet(1), (Decision::Park, Activity::Idle));
        // The caller has parked it.
        assert_eq!(client.after(5, |sample| sample.parked = true), (Decision::Nothing, Activity::Parked));
        assert_eq!(client.quiet(100_000), (Decision::Nothing, Activity::Parked));
    }

    #[test]
    fn timers_are_not_work_and_a_little_more_than_timers_is() {
        // Five seconds: 1 % of a processor is 50 ms, and 320 pages are allowed.
        for (cpu_ms, pages, is_idle) in [(50, 320, true), (51, 0, false), (0, 321, false), (0, 0, true)] {
            let mut client = Simulated::new();
            client.quiet(59);
            let (_, activity) = client.after(5, |sample| {
                sample.cpu += Duration::from_millis(cpu_ms);
                sample.touched_pages += pages;
            });
            assert_eq!(activity == Activity::Idle, is_idle, "{cpu_ms} ms, {pages} pages: {activity:?}");
            assert_eq!(client.quiet(1).0 == Decision::Park, is_idle, "{cpu_ms} ms, {pages} pages");
        }
    }

    /// It uses hardly any processor time between the looks, and writes much.
    #[test]
    fn a_client_that_pretends_to_be_idle_and_floods_is_busy() {
        let mut client = Simulated::new();
        for _ in 0..100 {
            let flood = |sample: &mut Sample| sample.touched_pages += 10_000;
            assert_eq!(client.after(5, flood), (Decision::Nothing, Activity::Busy));
        }
    }

    #[test]
    fn the_first_touch_wakes_a_parked_client_and_it_is_parked_again_only_after_the_idle_time() {
        let mut client = Simulated::new();
        client.after(5, |sample| sample.parked = true);
        let touch = |sample: &mut Sample| {
            sample.refaults += 1;
            sample.touched_pages += 1;
        };
        assert_eq!(client.after(5, touch), (Decision::Woke, Activity::Waking));
        // As the caller does.
        client.sample.parked = false;
        assert_eq!(client.quiet(30), (Decision::Nothing, Activity::Idle));
        assert_eq!(client.quiet(29), (Decision::Nothing, Activity::Idle));
        assert_eq!(client.quiet(1), (Decision::Park, Activity::Idle));
    }

    #[test]
    fn a_client_that_works_while_parked_wakes_and_is_busy() {
        let mut client = Simulated::new();
        client.after(5, |sample| sample.parked = true);
        let work = |sample: &mut Sample| sample.cpu += s(1);
        assert_eq!(client.after(5, work), (Decision::Woke, Activity::Waking));
        client.sample.parked = false;
        assert_eq!(client.after(5, work), (Decision::Nothing, Activity::Busy));
    }

    #[test]
    fn unpark_starts_the_idle_time_anew() {
        let mut client = Simulated::new();
        client.after(5, |sample| sample.parked = true);
        client.quiet(3600);
        assert_eq!(client.after(5, |sample| sample.parked = false), (Decision::Nothing, Activity::Waking));
        assert_eq!(client.quiet(59), (Decision::Nothing, Activity::Idle));
        assert_eq!(client.quiet(1), (Decision::Park, Activity::Idle));
    }

    /// Its agent is suspended with it, and could only fail to answer.
    #[test]
    fn a_suspended_client_is_not_parked_and_not_right_after_it_goes_on() {
        let mut client = Simulated::new();
        client.quiet(59);
        let suspend = |sample: &mut Sample| sample.suspended = true;
        assert_eq!(client.after(3600, suspend), (Decision::Nothing, Activity::Idle));
        assert_eq!(client.after(5, |sample| sample.suspended = false), (Decision::Nothing, Activity::Idle));
        assert_eq!(client.quiet(54), (Decision::Nothing, Activity::Idle));
        assert_eq!(client.quiet(1), (Decision::Park, Activity::Idle));
    }

    /// Live merging counts other things than the cold tier does.
    #[test]
    fn a_quiet_client_stays_quiet_when_its_samples_count_anew() {
        let mut client = Simulated::new();
        client.after(50, |sample| sample.touched_pages = 10);
        client.idleness = client.idleness.as_begun();
        let anew =
            |sample: &mut Sample| *sample = Sample { cpu: s(999), touched_pages: 1_000_000, ..Sample::default() };
        assert_eq!(client.after(9, anew), (Decision::Nothing, Activity::Idle));
        assert_eq!(client.quiet(1), (Decision::Park, Activity::Idle));
        assert_eq!(client.after(1, |sample| sample.cpu += s(1)), (Decision::Nothing, Activity::Busy));
    }

    #[test]
    fn a_parking_that_failed_is_tried_again_after_the_idle_time() {
        let mut client = Simulated::new();
        assert_eq!(client.quiet(60).0, Decision::Park);
        client.idleness.postpone(client.now);
        assert_eq!(client.quiet(59).0, Decision::Nothing);
        assert_eq!(client.quiet(1).0, Decision::Park);
    }

    /// A successor adopts clients that an earlier daemon parked.
    #[test]
    fn a_client_that_is_parked_at_the_first_look_stays_so() {
        let mut idleness = Idleness::default();
        let sample = Sample { parked: true, refaults: 7, touched_pages: 7, ..Sample::default() };
        assert_eq!(idleness.step(s(1), sample, IDLE, SCAN), Decision::Nothing);
        assert_eq!(idleness.activity(), Activity::Parked);
        assert_eq!(idleness.step(s(2), sample, IDLE, SCAN), Decision::Nothing);
        assert_eq!(idleness.activity(), Activity::Parked);
    }

    #[test]
    fn a_number_that_goes_back_and_a_look_without_time_are_no_work() {
        let last = Sample { cpu: s(9), touched_pages: 9_000, ..Sample::default() };
        assert!(!Sample::default().shows_work_since(&last, Duration::ZERO, SCAN));
        let mut idleness = Idleness::default();
        idleness.step(s(9), last, IDLE, SCAN);
        assert_eq!(idleness.step(s(3), Sample::default(), IDLE, SCAN), Decision::Nothing);
        assert_eq!(idleness.activity(), Activity::Idle);
    }

    #[test]
    fn a_host_below_its_reserve_or_under_pressure_parks_sooner() {
        let policy = ParkPolicy { idle: s(80), within: s(10) };
        let idle = |available, reserve, stall| policy.idle_time(is_short(available, reserve, stall));
        let by_reserve = [0, (2 << 30) - 1, 2 << 30, u64::MAX].map(|available| idle(available, 2 << 30, None));
        assert_eq!(by_reserve, [s(10), s(10), s(80), s(80)]);
        assert_eq!(idle(0, 0, None), s(80), "there is no reserve");
        let by_stall = [0.0, 9.99, 10.0, 100.0].map(|stall| idle(u64::MAX, 2 << 30, Some(stall)));
        assert_eq!(by_stall, [s(80), s(80), s(10), s(10)]);
    }

    #[test]
    fn looks_and_work_follow_the_idle_time_within_bounds() {
        let look = |idle| ParkPolicy { idle, within: s(1) }.look_interval();
        assert_eq!([look(s(1)), look(s(16)), look(s(3600))], [LOOKS[0], s(1), LOOKS[1]]);
        let work = |idle| ParkPolicy { idle, within: s(1) }.work_time();
        assert_eq!([work(s(1)), work(s(16)), work(s(3600))], [WORK[0], s(2), WORK[1]]);
    }

    #[test]
    fn parts_are_spread_over_most_of_the_time_and_late_ones_do_not_wait() {
        assert_eq!(pause(8, s(10), Duration::ZERO), s(1));
        assert_eq!(pause(8, s(10), Duration::from_millis(300)), Duration::from_millis(700));
        assert_eq!(pause(8, s(10), s(2)), Duration::ZERO);
        assert_eq!(pause(8, Duration::ZERO, Duration::ZERO), Duration::ZERO);
        assert_eq!(pause(0, s(10), Duration::ZERO), Duration::ZERO);
        // The whole ends in time: each pause is planned anew from what is left.
        let (mut left, part) = (s(10), Duration::from_millis(20));
        for parts in (0..100).rev() {
            left -= part + pause(parts, left - part, part);
        }
        assert!(left < s(4), "{left:?}");
    }
}
