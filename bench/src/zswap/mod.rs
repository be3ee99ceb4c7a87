//! `pagefold bench zswap`: the cold tier beside the kernel's zswap and zram, and its index beside trees and arrays.
//!
//! Six parts: `index` (page offsets in and out of maps), `density` (memory held for real pages), `latency` (a page
//! out and in), `live` (a client parked, touched when its pages are dense and while they are LZ4, brought back), `half`
//! (a program under a limit of half its memory), `growth` (costs against what pages are made of, threads, and how often
//! a client faults).
//! What the kernel's side needs (a swap file, zswap's switch, a zram device) is made for the run and undone afterwards;
//! what cannot be had is reported as skipped, with the reason.

mod density;
mod growth;
mod half;
mod index;
mod kernel;
mod latency;
mod live;
mod pages;
mod side;
mod stress;

use clap::{Parser, ValueEnum};
use std::process::ExitCode;

/// A part of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    Index,
    Density,
    Latency,
    Live,
    Half,
    Growth,
}

/// The cold tier beside zswap, zram, and other indexes.
#[derive(Parser, Debug)]
#[command(
    name = "pagefold bench zswap",
    after_help = "Examples:\n  pagefold bench zswap --quick\n  pagefold bench zswap --part index --entries 10000000\n  \
                  pagefold bench zswap --part density --guests 4"
)]
struct Args {
    /// Parts to run; all without it.
    #[arg(long, value_delimiter = ',')]
    part: Vec<Part>,
    /// Entries in the index.
    #[arg(long, value_delimiter = ',')]
    entries: Vec<usize>,
    /// Structures of the index part, by name; all without it.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Rounds; medians and spread are of these.
    #[arg(long)]
    rounds: Option<usize>,
    /// Guests to boot for the density of guests; 0 leaves them out.
    #[arg(long)]
    guests: Option<usize>,
    /// Seconds: small sets, one round, no guests.
    #[arg(long)]
    quick: bool,
    /// All sizes that the tables show.
    #[arg(long)]
    full: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Time the index by the processor time of its threads: for machines on which others work too.
    #[arg(long)]
    cpu_clock: bool,
    /// One cell of the index part, run in a process of its own.
    #[arg(long, hide = true)]
    cell: Option<String>,
    /// A daemon or a client of the live part.
    #[arg(long, hide = true)]
    process: Vec<String>,
}

/// A row of a table: its names and its figures with their units in the column names.
#[derive(Debug, serde::Serialize)]
pub struct Row {
    /// Which part.
    pub part: &'static str,
    /// What was measured.
    pub name: String,
    /// On what.
    pub on: String,
    /// Column and value.
    #[serde(serialize_with = "by_column")]
    pub figures: Vec<(&'static str, f64)>,
}

/// An object with a value per column; what was not measured is null.
fn by_column<S: serde::Serializer>(figures: &[(&str, f64)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(figures.iter().copied())
}

/// Runs the benchmark with the arguments after its name.
pub fn run(words: &[String]) -> ExitCode {
    let args =
        match Args::try_parse_from(std::iter::once("pagefold bench zswap").chain(words.iter().map(String::as_str))) {
            Ok(args) => args,
            Err(error) => {
                let _ = error.print();
                return ExitCode::from(if error.use_stderr() { 2 } else { 0 });
            }
        };
    if let Some(cell) = &args.cell {
        return index::run_cell(cell);
    }
    if !args.process.is_empty() {
        return live::run_process(&args.process);
    }
    let wanted = |part| args.part.is_empty() || args.part.contains(&part);
    let rounds = args.rounds.unwrap_or(if args.quick { 1 } else { 5 });
    let mut rows = Vec::new();
    let mut show = |found: Vec<Row>| {
        if !args.json {
            print(&found);
        }
        rows.extend(found);
    };
    if wanted(Part::Index) {
        let sizes = match (&args.entries[..], args.quick, args.full) {
            ([], true, _) => vec![100_000],
            ([], _, true) => vec![100_000, 1_000_000, 10_000_000],
            ([], ..) => vec![1_000_000],
            (sizes, ..) => sizes.to_vec(),
        };
        if let Some(unknown) = args.only.iter().find(|name| !index::names().any(|known| known == *name)) {
            let known: Vec<&str> = index::names().collect();
            eprintln!("pagefold bench zswap: no structure {unknown}; there are {}", known.join(", "));
            return ExitCode::from(2);
        }
        for entries in sizes {
            show(index::measure(entries, rounds, if args.cpu_clock { "cpu" } else { "wall" }, &args.only));
        }
    }
    if [Part::Density, Part::Latency, Part::Live, Part::Growth].into_iter().any(wanted) {
        let unrelated = pages::unrelated(if args.quick { 24 << 20 } else { 256 << 20 });
        match unrelated {
            Ok(unrelated) => {
                if wanted(Part::Density) {
                    show(density::measure("python heap and redis", &unrelated));
                }
                if wanted(Part::Live) {
                    for _ in 0..rounds.min(3) {
                        let idle = std::time::Duration::from_secs(if args.quick { 2 } else { 10 });
                        match live::measure("python heap and redis", &unrelated, idle) {
                            Ok(found) => show(found),
                            Err(error) => eprintln!("SKIPPED: a live client: {error}"),
                        }
                        match live::measure_lz4("python heap and redis", &unrelated) {
                            Ok(found) => show(found),
                            Err(error) => eprintln!("SKIPPED: a live client's pages as LZ4: {error}"),
                        }
                    }
                }
                if wanted(Part::Growth) {
                    match live::by_rate("python heap and redis", &unrelated) {
                        Ok(found) => show(found),
                        Err(error) => eprintln!("SKIPPED: faults by rate: {error}"),
                    }
                }
                if wanted(Part::Latency) {
                    show(latency::measure(&unrelated, if args.quick { 2000 } else { 20_000 }));
                }
            }
            Err(error) => eprintln!("SKIPPED: live pages of unrelated programs: {error}"),
        }
    }
    if wanted(Part::Growth) {
        show(growth::measure(if args.quick { 2000 } else { 40_000 }));
    }
    if wanted(Part::Half) {
        let (mib, requests) = if args.quick { (32, 10_000) } else { (256, 200_000) };
        match half::measure(mib, requests, rounds.min(3)) {
            Ok(found) => show(found),
            Err(error) => eprintln!("SKIPPED: redis with half its memory: {error}"),
        }
        let (mib, seconds) = if args.quick { (64, 1.0) } else { (256, 10.0) };
        match stress::measure(mib, seconds, rounds.min(3)) {
            Ok(found) => show(found),
            Err(error) => eprintln!("SKIPPED: stress-ng with half its memory: {error}"),
        }
    }
    let guests = args.guests.unwrap_or(if args.quick { 0 } else { 4 });
    if (wanted(Part::Density) || wanted(Part::Live)) && guests > 0 {
        match pages::guests(guests) {
            Ok(found) => {
                let on = format!("{guests} guests of one distribution");
                if wanted(Part::Live) {
                    match live::measure(&on, &found, std::time::Duration::from_secs(10)) {
                        Ok(found) => show(found),
                        Err(error) => eprintln!("SKIPPED: live guests: {error}"),
                    }
                    match live::measure_lz4(&on, &found) {
                        Ok(found) => show(found),
                        Err(error) => eprintln!("SKIPPED: live guests' pages as LZ4: {error}"),
                    }
                }
                if wanted(Part::Density) {
                    show(density::measure(&on, &found));
                }
            }
            Err(error) => eprintln!("SKIPPED: guests: {error}"),
        }
    }
    crate::record::emit_versions(serde_json::json!({ "zswap": kernel::Zswap::compressor() }));
    // A figure that is not a number (nothing was measured there) is null.
    crate::record::emit(serde_json::to_value(&rows).expect("plain data"));
    ExitCode::SUCCESS
}

/// Prints rows; a new head wherever the columns change.
fn print(rows: &[Row]) {
    let mut columns: Vec<&str> = Vec::new();
    for row in rows {
        let own: Vec<&str> = row.figures.iter().map(|(name, _)| *name).collect();
        if own != columns {
            columns = own;
            let head: String = columns.iter().map(|name| format!(" {name:>13}")).collect();
            println!("\n{:8} {:34} {:30}{head}", "part", "what", "on");
        }
        let cells: String = row
            .figures
            .iter()
            .map(|(_, value)| match *value {
                value if value.is_nan() => format!(" {:>13}", "-"),
                value if value >= 1000.0 => format!(" {value:>13.0}"),
                value => format!(" {value:>13.3}"),
            })
            .collect();
        println!("{:8} {:34} {:30}{cells}", row.part, row.name, row.on);
    }
}

/// Median of some figures.
pub fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The value below which `share` of the sorted values lie.
pub fn quantile(sorted: &[f64], share: f64) -> f64 {
    sorted
        .get(((sorted.len() as f64 * share) as usize).min(sorted.len().saturating_sub(1)))
        .copied()
        .unwrap_or(f64::NAN)
}
