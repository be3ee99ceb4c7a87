//! What the graphs show: a bounded past. The daemon keeps it so that it is there when a page is opened; `top` begins with
//! its copy.
//!
//! Two rings for all domains together and for each domain: every sample of the last ten minutes, and the mean of each
//! minute of the last day. Memory is bounded by the number of domains that are remembered, not by time.

use crate::status::Status;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};

/// Points of each fine ring: ten minutes at one a second.
pub const FINE_POINTS_MAX: usize = 600;
/// Points of each coarse ring: a day of minutes.
pub const COARSE_POINTS_MAX: usize = 1440;
/// Seconds that a coarse point stands for.
pub const COARSE_SECONDS: f64 = 60.0;
/// Domains with a past of their own; the rest counts in the sums.
pub const DOMAINS_MAX: usize = 16;

/// What is drawn, at one moment; rates are per second since the moment before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Point {
    /// Seconds since 1970.
    pub time: f64,
    /// Memory saved by live merging and the cold tier, less all that pagefold uses; of a domain: less its pool, records,
    /// mappings and tier.
    pub saved_bytes: f64,
    /// Processors in use: of daemon and agents, of a domain its agents' only.
    pub cpu: f64,
    /// Bytes of pages that are in the cold tier.
    pub cold_bytes: f64,
    /// Touches of pages in the cold tier.
    pub faults: f64,
    /// Pages merged.
    pub merged: f64,
    /// Merged pages written again.
    pub cow_breaks: f64,
    /// Memory of the machine that the kernel could give to programs.
    pub available_bytes: f64,
}

impl Point {
    fn plus(self, other: Point) -> Point {
        Point {
            time: other.time,
            saved_bytes: self.saved_bytes + other.saved_bytes,
            cpu: self.cpu + other.cpu,
            cold_bytes: self.cold_bytes + other.cold_bytes,
            faults: self.faults + other.faults,
            merged: self.merged + other.merged,
            cow_breaks: self.cow_breaks + other.cow_breaks,
            available_bytes: self.available_bytes + other.available_bytes,
        }
    }

    fn over(self, count: f64) -> Point {
        Point {
            time: self.time,
            saved_bytes: self.saved_bytes / count,
            cpu: self.cpu / count,
            cold_bytes: self.cold_bytes / count,
            faults: self.faults / count,
            merged: self.merged / count,
            cow_breaks: self.cow_breaks / count,
            available_bytes: self.available_bytes / count,
        }
    }
}

/// What has to be remembered of a sample to tell the next one's rates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
struct Counters {
    saved_bytes: f64,
    cold_bytes: f64,
    available_bytes: f64,
    cpu_ns: u64,
    faults: u64,
    merged: u64,
    cow_breaks: u64,
}

/// Only every sample of the last minutes is for other processes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
struct Series {
    last: Option<(f64, Counters)>,
    fine: VecDeque<Point>,
    #[serde(skip)]
    coarse: VecDeque<Point>,
    #[serde(skip)]
    minute: Point,
    #[serde(skip)]
    minute_points: f64,
}

impl Series {
    fn push(&mut self, time: f64, now: Counters) {
        let seconds = self.last.map_or(0.0, |(then, _)| time - then);
        let before = self.last.replace((time, now)).map(|(_, before)| before);
        // Clients go and take their counts along: a rate is then zero, not negative.
        let rate = |of: fn(&Counters) -> u64| match before {
            Some(before) if seconds > 0.0 => of(&now).saturating_sub(of(&before)) as f64 / seconds,
            _ => 0.0,
        };
        let point = Point {
            time,
            saved_bytes: now.saved_bytes,
            cpu: rate(|c| c.cpu_ns) / 1e9,
            cold_bytes: now.cold_bytes,
            faults: rate(|c| c.faults),
            merged: rate(|c| c.merged),
            cow_breaks: rate(|c| c.cow_breaks),
            available_bytes: now.available_bytes,
        };
        put(&mut self.fine, point, FINE_POINTS_MAX);
        if self.minute_points > 0.0 && (time / COARSE_SECONDS).floor() > (self.minute.time / COARSE_SECONDS).floor() {
            // Its time is the end of its minute: a page that asks for newer points must get it.
            put(&mut self.coarse, Point { time, ..self.minute.over(self.minute_points) }, COARSE_POINTS_MAX);
            (self.minute, self.minute_points) = (Point::default(), 0.0);
        }
        self.minute = self.minute.plus(point);
        self.minute_points += 1.0;
    }
}

fn put(ring: &mut VecDeque<Point>, point: Point, most: usize) {
    if ring.len() == most {
        ring.pop_front();
    }
    ring.push_back(point);
}

/// Points as columns, the form in which they are short as JSON.
#[derive(Debug, Default, Serialize)]
pub struct Columns {
    time: Vec<f64>,
    saved_bytes: Vec<f64>,
    cpu: Vec<f64>,
    cold_bytes: Vec<f64>,
    faults: Vec<f64>,
    merged: Vec<f64>,
    cow_breaks: Vec<f64>,
    available_bytes: Vec<f64>,
}

impl Columns {
    fn of(ring: &VecDeque<Point>, since: f64) -> Columns {
        let mut columns = Columns::default();
        let short = |value: f64| (value * 1e4).round() / 1e4;
        for point in ring.iter().filter(|point| point.time > since) {
            columns.time.push(point.time);
            columns.saved_bytes.push(point.saved_bytes.round());
            columns.cpu.push(short(point.cpu));
            columns.cold_bytes.push(point.cold_bytes.round());
            columns.faults.push(short(point.faults));
            columns.merged.push(short(point.merged));
            columns.cow_breaks.push(short(point.cow_breaks));
            columns.available_bytes.push(point.available_bytes.round());
        }
        columns
    }
}

/// What `/history.json` answers.
#[derive(Debug, Serialize)]
pub struct Past {
    /// The domain; `None` for all together.
    pub domain: Option<String>,
    /// One point a sample.
    pub fine: Columns,
    /// One point a minute.
    pub coarse: Columns,
}

/// The past of all domains.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct History {
    all: Series,
    domains: BTreeMap<String, Series>,
}

impl History {
    /// Takes the status at `time`, in seconds since 1970.
    pub fn push(&mut self, time: f64, status: &Status) {
        let mut now: BTreeMap<&str, Counters> = BTreeMap::new();
        let mut sum = Counters {
            saved_bytes: status.saved_bytes(None) as f64,
            available_bytes: status.host.available_bytes as f64,
            cpu_ns: status.totals.cpu_ns,
            merged: status.totals.pages_merged + status.totals.pages_zeroed,
            cow_breaks: status.totals.cow_breaks,
            ..Counters::default()
        };
        // Several users may each have a domain of one name; it is one in the view.
        for domain in &status.domains {
            let counters = now.entry(&domain.name).or_default();
            counters.merged += domain.events.pages_merged + domain.events.pages_zeroed;
            counters.cow_breaks += domain.events.cow_breaks;
        }
        for client in &status.clients {
            now.entry(&client.domain).or_default().cpu_ns += client.stats.agent_cpu_ns;
        }
        for tier in &status.cold.domains {
            let counters = now.entry(&tier.name).or_default();
            for counters in [counters, &mut sum] {
                counters.cold_bytes += tier.cold_bytes as f64;
            }
        }
        for client in &status.cold.clients {
            let counters = now.entry(&client.domain).or_default();
            counters.cpu_ns += client.agent_cpu_ns;
            for counters in [counters, &mut sum] {
                counters.faults += client.refaults;
            }
        }
        self.all.push(time, sum);
        self.domains.retain(|name, _| now.contains_key(name.as_str()));
        for (name, mut counters) in now {
            counters.saved_bytes = status.saved_bytes(Some(name)) as f64;
            counters.available_bytes = status.host.available_bytes as f64;
            if !self.domains.contains_key(name) && self.domains.len() >= DOMAINS_MAX {
                continue;
            }
            self.domains.entry(name.to_owned()).or_default().push(time, counters);
        }
    }

    /// Every sample of the last ten minutes, oldest first, of all together or of one domain; empty if that has no past here.
    pub fn fine(&self, domain: Option<&str>) -> &VecDeque<Point> {
        static NONE: VecDeque<Point> = VecDeque::new();
        self.series(domain).map_or(&NONE, |series| &series.fine)
    }

    fn series(&self, domain: Option<&str>) -> Option<&Series> {
        domain.map_or(Some(&self.all), |name| self.domains.get(name))
    }

    /// The points after `since`, of all together or of one domain; empty if that has no past here.
    pub fn past(&self, domain: Option<&str>, since: f64) -> Past {
        let series = self.series(domain);
        let columns = |ring: fn(&Series) -> &VecDeque<Point>| {
            series.map(|series| Columns::of(ring(series), since)).unwrap_or_default()
        };
        Past { domain: domain.map(str::to_owned), fine: columns(|s| &s.fine), coarse: columns(|s| &s.coarse) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_merge::stats::DomainStats;

    fn status(names: &[String], merged: u64) -> Status {
        let mut status = Status::default();
        status.totals.saved_bytes = 4096;
        status.totals.pages_merged = merged;
        for name in names {
            status.domains.push(DomainStats { name: name.clone(), general_profit: 100, ..DomainStats::default() });
        }
        status
    }

    #[test]
    fn rings_and_domains_are_bounded() {
        let mut history = History::default();
        let names: Vec<String> = (0..DOMAINS_MAX + 5).map(|number| format!("d{number}")).collect();
        for second in 0..60 * (COARSE_POINTS_MAX + 20) {
            // All of them now and then is enough to try the bound.
            let known = if second % 1000 == 0 { &names[..] } else { &names[..1] };
            history.push(second as f64, &status(known, second as u64 * 10));
            assert!(history.domains.len() <= DOMAINS_MAX);
        }
        let past = history.past(None, 0.0);
        assert_eq!((past.fine.time.len(), past.coarse.time.len()), (FINE_POINTS_MAX, COARSE_POINTS_MAX));
        assert!(past.fine.merged.iter().all(|rate| *rate == 10.0), "{:?}", &past.fine.merged[..5]);
        assert!(past.coarse.saved_bytes.iter().all(|bytes| *bytes == 4096.0));
        // Another process gets the samples, and its next one has rates.
        let text = serde_json::to_string(&history).expect("JSON");
        let mut copy: History = serde_json::from_str(&text).expect("a history");
        assert_eq!(copy.fine(None), history.fine(None));
        assert_eq!(copy.fine(Some("d0")), history.fine(Some("d0")));
        let last = history.fine(None).back().expect("a point").time;
        copy.push(last + 2.0, &status(&names[..1], (last as u64 + 2) * 10));
        assert_eq!(copy.fine(None).back().expect("a point").merged, 10.0);
        assert!(past.coarse.time.windows(2).all(|pair| pair[1] - pair[0] == COARSE_SECONDS));
    }

    #[test]
    fn a_daemon_of_other_counts_gives_no_negative_rates_and_since_cuts() {
        let mut history = History::default();
        history.push(1.0, &status(&["a".into()], 100));
        history.push(2.0, &status(&["a".into()], 50));
        history.push(3.0, &status(&["a".into()], 70));
        assert_eq!(history.past(None, 0.0).fine.merged, [0.0, 0.0, 20.0]);
        assert_eq!(history.past(None, 2.0).fine.time, [3.0]);
        assert_eq!(history.past(Some("a"), 0.0).fine.saved_bytes, [100.0; 3]);
        assert!(history.past(Some("b"), 0.0).fine.time.is_empty());
        history.push(4.0, &status(&[], 70));
        assert!(history.past(Some("a"), 0.0).fine.time.is_empty(), "a domain that is gone is forgotten");
    }
}
