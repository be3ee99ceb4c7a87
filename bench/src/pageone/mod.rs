//! PageONE's test, scaled down: processes that hold the same files in other orders, merged by us and by KSM.
//!
//! The published test ran 12 virtual machines with 16 GB of 20 MB files each.
//! Here processes hold synthetic files of 20 MB (5120 pages) in orders of their
//! own; `zero` gives each page a prefix of zero bytes, 128 on average, as the
//! second published test; `scattered` permutes single pages, so that no two
//! duplicates are neighbours: our worst case; `huge` is files in huge pages, as
//! the memory of virtual machines is.
//!
//! One worker's speed is pages merged per second of its processor time (daemon
//! and agents together; ksmd's for KSM): wall time on a machine that others use
//! as well would measure them. Wall time is shown beside, for every engine by the
//! same two clocks: while it merges, and from the word to begin ([`pace`]).

mod apart;
mod churn;
mod crew;
mod engine;
mod guests;
mod moments;

use crate::record;
use crate::undo::Undo;
use crew::{Layout, Shape};
use engine::{Engine, Look, Running};
use pagefold_os::{ksm, procfs};
use serde_json::{Value, json};
use std::process::ExitCode;
use std::time::Duration;

type Failure = Box<dyn std::error::Error>;

/// The scanner's shortest rest between two looks at the counters.
const LOOK: Duration = Duration::from_millis(40);
/// Merging has come to rest when nothing changed for this long.
const QUIET: Duration = Duration::from_millis(2500);
/// No run takes longer.
const RUN_MAX: Duration = Duration::from_secs(600);
/// The period of our watch stage where it is not what is measured.
const PERIOD: Duration = Duration::from_millis(500);

const HELP: &str = "\
usage: pagefold bench pageone [--quick|--full] [--only PART] [options]

  --only PART      merge, apart, breaks, delay, idle, churn, growth or guests; without it all but guests (with --full: all)
  --layout NAME    merge: files, zero, scattered, huge or runs-N only
  --engine NAME    merge: the engine of that name in the table, or all whose names begin so
  --processes N    merge: so many processes, of
  --mib N          so many MiB each
  --rounds N       runs of each row (growth, guests: at most 3); the median and the spread are shown
  --no-ksm         without the peer
  --json           rows as JSON";

/// Runs the benchmark.
pub fn run(args: &[String]) -> ExitCode {
    let result = match args.first().map(String::as_str) {
        Some("--client") => crew::member(&args[1..]),
        Some("--daemon") => engine::daemon(&args[1..]),
        _ if args.iter().any(|arg| arg == "--help" || arg == "-h") => {
            println!("{HELP}");
            Ok(())
        }
        _ => measure(args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pagefold-bench pageone: {error}");
            ExitCode::FAILURE
        }
    }
}

/// What was asked for.
struct Options {
    quick: bool,
    full: bool,
    only: Option<String>,
    layout: Option<Layout>,
    engine: Option<String>,
    processes: Option<u64>,
    mib: Option<u64>,
    rounds: usize,
    with_ksm: bool,
    json: bool,
}

/// In the order in which they run.
const PARTS: [(&str, Part); 8] = [
    ("merge", merge),
    ("apart", apart::apart),
    ("breaks", moments::breaks),
    ("delay", moments::delay),
    ("idle", moments::idle),
    ("churn", churn::churn),
    ("growth", growth),
    ("guests", guests::measure),
];

impl Options {
    fn parse(args: &[String]) -> Result<Options, Failure> {
        let mut options = Options {
            quick: false,
            full: false,
            only: None,
            layout: None,
            engine: None,
            processes: None,
            mib: None,
            rounds: 0,
            with_ksm: true,
            json: false,
        };
        let mut rest = args.iter();
        while let Some(arg) = rest.next() {
            let mut value = || rest.next().ok_or_else(|| format!("{arg} takes a value; see --help"));
            match arg.as_str() {
                "--quick" => options.quick = true,
                "--full" => options.full = true,
                "--json" => options.json = true,
                "--no-ksm" => options.with_ksm = false,
                "--only" => options.only = Some(value()?.clone()),
                "--layout" => {
                    let name = value()?;
                    options.layout = Some(Layout::parse(name).ok_or_else(|| format!("no layout {name}; see --help"))?);
                }
                "--engine" => options.engine = Some(value()?.clone()),
                "--processes" => options.processes = Some(value()?.parse()?),
                "--mib" => options.mib = Some(value()?.parse()?),
                "--rounds" => options.rounds = value()?.parse()?,
                other => return Err(format!("unknown option {other}; see --help").into()),
            }
        }
        if let Some(part) = options.only.as_ref().filter(|part| !PARTS.iter().any(|(name, _)| name == part)) {
            let names = PARTS.map(|(name, _)| name);
            return Err(format!("no part {part}; there are {}", names.join(", ")).into());
        }
        if options.rounds == 0 {
            options.rounds = if options.quick { 1 } else { 5 };
        }
        Ok(options)
    }

    fn wants(&self, part: &str) -> bool {
        match &self.only {
            Some(only) => only == part,
            None => part != "guests" || self.full,
        }
    }

    fn shape(&self, layout: Layout) -> Result<Shape, Failure> {
        let (processes, mib) = match (self.quick, self.full) {
            (true, _) => (3, 40),
            (_, true) => (12, 512),
            _ => (8, 160),
        };
        let shape = Shape { layout, processes: self.processes.unwrap_or(processes), mib: self.mib.unwrap_or(mib) };
        let (available, _) = procfs::available_and_total();
        if shape.pages() * 4096 > available / 10 * 9 {
            return Err(format!(
                "{} processes of {} MiB do not fit into {} MiB",
                shape.processes,
                shape.mib,
                available >> 20
            )
            .into());
        }
        Ok(shape)
    }

    /// The engines that are compared where one of each is enough.
    fn pair(&self) -> Vec<Engine> {
        let ours = Engine::Ours { workers: 1, predict: true };
        if self.with_ksm { vec![ours, Engine::Ksm { smart_scan: 1 }] } else { vec![ours] }
    }
}

/// A part of the benchmark: prints its table and adds its rows to the report.
type Part = fn(&Options, &mut Report) -> Result<(), Failure>;

/// Rows and how they are shown; medians are taken over rows that agree in all named columns.
#[derive(Default)]
struct Report {
    rows: Vec<Value>,
}

/// Whether KSM can be had: as root, on a kernel that has it, while nobody else uses it.
fn peer() -> Result<(), Failure> {
    // SAFETY: returns a number.
    if unsafe { libc::geteuid() } != 0 {
        return Err("it needs root".into());
    }
    Ok(ksm::unused()?)
}

fn measure(args: &[String]) -> Result<(), Failure> {
    let mut options = Options::parse(args)?;
    if options.with_ksm
        && let Err(why) = peer()
    {
        eprintln!("SKIPPED: the peer, KSM: {why}");
        options.with_ksm = false;
    }
    // For pages that are merged one by one.
    let _mappings = Undo::set("/proc/sys/vm/max_map_count", "4000000");
    let mut report = Report::default();
    for (name, part) in PARTS {
        if options.wants(name) {
            part(&options, &mut report)?;
        }
    }
    record::emit(Value::Array(report.rows));
    record::emit_versions(json!({ "qemu": record::first_line(&["qemu-system-x86_64", "--version"]) }));
    Ok(())
}

// ---- merging ----

/// One run of an engine over a crew, until nothing more is merged.
struct Merged {
    pages: u64,
    pace: Pace,
    cpu_s: f64,
    before_mib: f64,
    /// Sum of the processes' proportional memory, plus all that the engine holds.
    after_mib: f64,
    metadata_mib: f64,
    freeze_us_p99: Option<f64>,
}

/// Wall time per page, in microseconds, until 99 % of the pages were merged.
struct Pace {
    /// Between the first look that saw a merged page and the end; none if one look saw all of them. Leaves out what comes
    /// before the first merge: our silent periods, KSM's pass that only takes checksums.
    merging_us: Option<f64>,
    /// From the word to merge: all of that is in it.
    from_start_us: f64,
}

/// The pace that these looks show. It knows nothing of the engine: the clock begins at the same moments for all.
fn pace(samples: &[Look]) -> Pace {
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

/// Merges until nothing changes for `quiet`; returns how far it was, whenever that changed.
fn settle(running: &Running, quiet: Duration) -> Result<Vec<Look>, Failure> {
    let mut samples = vec![running.look()];
    let mut last = samples[0];
    running.go()?;
    loop {
        std::thread::sleep(LOOK);
        let now = running.look();
        if now.merged != samples[samples.len() - 1].merged {
            samples.push(now);
        }
        // Guests that live write a little all the time: less than a fiftieth more is no progress.
        if now.activity > last.activity + last.activity / 50 {
            last = now;
        }
        if now.merged > 0 && last.at.elapsed() > quiet || samples[0].at.elapsed() > RUN_MAX {
            return Ok(samples);
        }
    }
}

fn merge_once(engine: Engine, shape: Shape) -> Result<Merged, Failure> {
    let running = Running::start(engine, PERIOD)?;
    let mut crew = running.crew(shape)?;
    crew.fill()?;
    let before = crew.pss();
    let samples = settle(&running, QUIET)?;
    let last = samples[samples.len() - 1];
    let after = crew.pss() + running.own_bytes(shape.pages());
    crew.check()?;
    Ok(Merged {
        pages: last.merged,
        pace: pace(&samples),
        cpu_s: (last.cpu_ns - samples[0].cpu_ns) as f64 / 1e9,
        before_mib: before as f64 / 1048576.0,
        after_mib: after as f64 / 1048576.0,
        metadata_mib: running.metadata_bytes(shape.pages()) as f64 / 1048576.0,
        freeze_us_p99: running.freeze_us_p99(),
    })
}

fn merge(options: &Options, report: &mut Report) -> Result<(), Failure> {
    let layouts: Vec<Layout> = options.layout.map_or_else(|| Layout::ALL.to_vec(), |layout| vec![layout]);
    let mut engines = vec![
        Engine::Ours { workers: 1, predict: true },
        Engine::Ours { workers: 2, predict: true },
        Engine::Ours { workers: 1, predict: false },
    ];
    if options.with_ksm {
        engines.push(Engine::Ksm { smart_scan: 1 });
        engines.push(Engine::Ksm { smart_scan: 0 });
    }
    if let Some(name) = &options.engine {
        let whole = engines.iter().any(|engine| engine.name() == *name);
        engines.retain(|engine| if whole { engine.name() == *name } else { engine.name().starts_with(name) });
    }
    crate::record::table!("merging: time per page merged, memory, and the longest 1 % of waits");
    crate::record::table!("wall time: between the first and the last of the merged pages, and from the word to merge");
    crate::record::table!(
        "{:10} {:22} {:>9} {:>20} {:>8} {:>17} {:>17} {:>8} {:>9} {:>8} {:>10}",
        "layout",
        "engine",
        "merged",
        "cpu us/page",
        "speed",
        "wall us/page",
        "from the word",
        "before",
        "after MiB",
        "records",
        "wait p99"
    );
    for layout in layouts {
        let shape = options.shape(layout)?;
        let mut runs: Vec<(Engine, Vec<Merged>)> = engines.iter().map(|engine| (*engine, Vec::new())).collect();
        for round in 0..options.rounds {
            for (engine, rows) in &mut runs {
                rows.push(merge_once(*engine, shape)?);
            }
            eprintln!("{}: round {} of {}", layout.name(), round + 1, options.rounds);
        }
        let of = |engine: usize, f: &dyn Fn(&Merged) -> f64| Spread::of(runs[engine].1.iter().map(f).collect());
        let cpu = |row: &Merged| row.cpu_s * 1e6 / row.pages.max(1) as f64;
        let peer = runs.iter().position(|(engine, _)| matches!(engine, Engine::Ksm { .. }));
        let peer = peer.map(|at| of(at, &cpu).median);
        for (at, (engine, rows)) in runs.iter().enumerate() {
            let spread = of(at, &cpu);
            let (wall, from_start) = walls(rows);
            let (before, after) = (of(at, &|row| row.before_mib).median, of(at, &|row| row.after_mib).median);
            let records = of(at, &|row| row.metadata_mib).median;
            let wait = rows[0].freeze_us_p99.map(|_| of(at, &|row| row.freeze_us_p99.unwrap_or(0.0)));
            let speed = peer.map(|peer| peer / spread.median);
            crate::record::table!(
                "{:10} {:22} {:>9} {:>20} {:>8} {:>17} {:>17} {:>8.0} {:>9.0} {:>8.1} {:>10}",
                layout.name(),
                engine.name(),
                of(at, &|row| row.pages as f64).median,
                spread.show(2),
                speed.map_or("-".into(), |speed| format!("{speed:.2} x")),
                wall.show(2),
                from_start.show(2),
                before,
                after,
                records,
                wait.as_ref().map_or("-".into(), |wait| format!("{:.0} us", wait.median)),
            );
            report.rows.push(json!({
                "part": "merge", "layout": layout.name(), "engine": engine.name(), "processes": shape.processes,
                "mib_each": shape.mib, "pages_merged": of(at, &|row| row.pages as f64).median,
                "cpu_us_per_page": spread.json(), "speed_against_ksm": speed, "wall_us_per_page": wall.json(),
                "wall_us_per_page_from_start": from_start.json(),
                "memory_before_mib": before, "memory_after_mib": after, "records_mib": records,
                "freeze_us_p99": wait.map(|wait| wait.json()),
            }));
        }
    }
    Ok(())
}

/// Both wall times per page, of runs: while merging, where it could be seen, and from the word to merge.
fn walls(rows: &[Merged]) -> (Spread, Spread) {
    (
        Spread::of(rows.iter().filter_map(|row| row.pace.merging_us).collect()),
        Spread::of(rows.iter().map(|row| row.pace.from_start_us).collect()),
    )
}

// ---- growth ----

fn growth(options: &Options, report: &mut Report) -> Result<(), Failure> {
    let base = if options.quick {
        Shape { layout: Layout::Files, processes: 2, mib: 40 }
    } else {
        Shape { layout: Layout::Files, processes: 4, mib: 120 }
    };
    let mut shapes: Vec<(&str, Shape, usize)> = Vec::new();
    let scales: &[u64] = if options.quick { &[1, 2] } else { &[1, 2, 4, 8] };
    shapes.extend(scales.iter().map(|by| ("pages", Shape { mib: base.mib / 2 * by, ..base }, 1)));
    let counts: &[u64] = if options.quick { &[2, 4] } else { &[2, 4, 8, 16] };
    shapes.extend(counts.iter().map(|processes| ("clients", Shape { processes: *processes, ..base }, 1)));
    shapes.extend([1, 2, 4].iter().map(|workers| ("workers", base, *workers)));
    let lens: &[u64] = if options.quick { &[2, 64] } else { &[1, 2, 4, 8, 16, 64, 256, 1024] };
    shapes.extend(lens.iter().map(|run| ("run length", Shape { layout: Layout::Runs(*run), ..base }, 1)));
    crate::record::table!(
        "growth: {} processes of {} MiB in files of 20 MB, but for what the first column says",
        base.processes,
        base.mib
    );
    crate::record::table!(
        "{:12} {:>10} {:>20} {:>20} {:>17} {:>10}",
        "grows",
        "to",
        "cpu us/page",
        "KSM",
        "wall us/page",
        "wait p99"
    );
    for (what, shape, workers) in shapes {
        let to = match what {
            "pages" => shape.pages(),
            "clients" => shape.processes,
            "workers" => workers as u64,
            _ => match shape.layout {
                Layout::Runs(pages) => pages,
                _ => 0,
            },
        };
        let mut ours: Vec<Merged> = Vec::new();
        let mut peer: Vec<Merged> = Vec::new();
        for _ in 0..options.rounds.min(3) {
            ours.push(merge_once(Engine::Ours { workers, predict: true }, shape)?);
            if options.with_ksm && what != "workers" {
                peer.push(merge_once(Engine::Ksm { smart_scan: 1 }, shape)?);
            }
        }
        let cpu =
            |rows: &[Merged]| Spread::of(rows.iter().map(|row| row.cpu_s * 1e6 / row.pages.max(1) as f64).collect());
        let (wall, from_start) = walls(&ours);
        let wait = Spread::of(ours.iter().filter_map(|row| row.freeze_us_p99).collect());
        let ksm = (!peer.is_empty()).then(|| cpu(&peer));
        crate::record::table!(
            "{what:12} {to:>10} {:>20} {:>20} {:>17} {:>10.0}",
            cpu(&ours).show(2),
            ksm.as_ref().map_or("-".into(), |ksm| ksm.show(2)),
            wall.show(2),
            wait.median
        );
        report.rows.push(json!({
            "part": "growth", "grows": what, "to": to, "processes": shape.processes, "mib_each": shape.mib,
            "layout": shape.layout.name(), "workers": workers, "cpu_us_per_page": cpu(&ours).json(),
            "ksm_cpu_us_per_page": ksm.map(|ksm| ksm.json()), "wall_us_per_page": wall.json(),
            "wall_us_per_page_from_start": from_start.json(),
            "freeze_us_p99": wait.json(),
        }));
    }
    Ok(())
}

/// Median and spread of what was measured.
struct Spread {
    median: f64,
    low: f64,
    high: f64,
}

impl Spread {
    fn of(mut values: Vec<f64>) -> Spread {
        values.sort_by(f64::total_cmp);
        match values.as_slice() {
            [] => Spread { median: f64::NAN, low: f64::NAN, high: f64::NAN },
            values => Spread { median: values[values.len() / 2], low: values[0], high: values[values.len() - 1] },
        }
    }

    fn show(&self, digits: usize) -> String {
        if self.median.is_nan() {
            return "-".into();
        }
        if self.low == self.high {
            return format!("{:.digits$}", self.median);
        }
        format!("{:.digits$} ({:.digits$}-{:.digits$})", self.median, self.low, self.high)
    }

    fn json(&self) -> Value {
        json!({ "median": self.median, "low": self.low, "high": self.high })
    }
}

/// The value at `share` of ascending `values`.
fn quantile(values: &[u64], share: f64) -> u64 {
    values.get((values.len() as f64 * share) as usize).or(values.last()).copied().unwrap_or(0)
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
    fn the_pace_is_a_matter_of_the_looks_alone() {
        let began = Instant::now();
        // A second in which nothing is merged, be it for silence or for checksums, then 1000 pages in 40 ms.
        let seen = pace(&looks(began, &[(0, 0), (1000, 1000), (1040, 2000), (1080, 3000), (1120, 4000), (9000, 4001)]));
        assert_eq!((seen.merging_us, seen.from_start_us), (Some(40.0), 280.0));
        // How long it took to begin changes the second figure alone.
        let later = pace(&looks(began, &[(0, 0), (3000, 1000), (3040, 2000), (3080, 3000), (3120, 4000)]));
        assert_eq!((later.merging_us, later.from_start_us), (Some(40.0), 780.0));
    }

    #[test]
    fn what_one_look_saw_has_no_pace_of_merging() {
        let seen = pace(&looks(Instant::now(), &[(0, 0), (100, 1000)]));
        assert_eq!((seen.merging_us, seen.from_start_us), (None, 100.0));
        let nothing = pace(&looks(Instant::now(), &[(0, 0)]));
        assert_eq!((nothing.merging_us, nothing.from_start_us), (None, 0.0));
    }
}
