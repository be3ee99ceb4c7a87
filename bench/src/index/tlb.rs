//! `pagefold bench index --tlb`: what huge pages are worth, apart from locks: one thread, lookups one at a time, on 4 KiB
//! and on 2 MiB pages, with the misses of TLB and cache per lookup.
//!
//! Misses are counted by the processor where `perf_event_open(2)` gives its counters. Guests often have none; then
//! they are simulated by cachegrind, whose cache with lines as long as a page *is* a TLB: 64 entries behind which are
//! 2,048, and on 2 MiB pages 64 and 512. A lookup's share is the difference of two runs, one of twice as many lookups.

use super::run::Plan;
use super::{Args, Dist, Mix, in_child, maps, median_and_spread};
use crate::options::Clock;
use std::io;
use std::process::{Command, Stdio};

/// What `--tlb` compares where nothing else is said.
const DEFAULT: &[&str] = &[
    "sd-tree",
    "b-tree",
    "forrest",
    "rb-tree-bare",
    "rb-tree-lock",
    "std-btree-lock",
    "std-hash-lock",
    "dashmap",
    "congee",
];

/// Lookups of the shorter of the two simulated runs.
const LOOKUPS: usize = 100_000;

/// A simulated cache: its lines (pages, for a TLB) and how many of them in two levels.
struct Geometry {
    line_bytes: usize,
    first: usize,
    second: usize,
}

const SMALL_TLB: Geometry = Geometry { line_bytes: 4096, first: 64, second: 2048 };
const HUGE_TLB: Geometry = Geometry { line_bytes: 2 << 20, first: 64, second: 512 };
/// 32 KiB, then 32 MiB.
const CACHE: Geometry = Geometry { line_bytes: 64, first: 512, second: 512 << 10 };

/// One line of the table.
#[derive(serde::Serialize)]
struct Row {
    structure: &'static str,
    keys: usize,
    small_rates: Vec<f64>,
    huge_rates: Vec<f64>,
    /// Misses per lookup: of the first and second level on 4 KiB pages, the same on 2 MiB pages, of the last cache.
    misses: Option<[f64; 5]>,
}

pub(super) fn run(args: &Args) -> Result<(), String> {
    let keys = args.common.keys(30_000_000);
    let rounds = args.common.rounds();
    let known = maps::all();
    let wanted: Vec<&str> =
        if args.only.is_empty() { DEFAULT.to_vec() } else { args.only.iter().map(String::as_str).collect() };
    let mut rows: Vec<Row> = known
        .iter()
        .filter(|maker| wanted.contains(&maker.0))
        .map(|maker| Row { structure: maker.0, keys, small_rates: Vec::new(), huge_rates: Vec::new(), misses: None })
        .collect();
    let plan = |row: &Row, huge: bool, operations: usize, seed: u64| Plan {
        structure: row.structure.into(),
        keys,
        threads: 1,
        mix: Mix::Get,
        dist: args.dist,
        clock: Clock::Cpu,
        huge,
        operations,
        seed,
    };
    let operations = if args.common.quick { 400_000 } else { 4_000_000 };
    for round in 0..rounds {
        for row in &mut rows {
            for huge in [false, true] {
                let rate = in_child(&plan(row, huge, operations, round as u64))?["get"];
                if huge { &mut row.huge_rates } else { &mut row.small_rates }.push(rate);
            }
        }
    }
    let counted = counters_are_there();
    let by = if counted {
        "counted by the processor"
    } else if has_valgrind() {
        "simulated by cachegrind (this machine has no counters)"
    } else {
        eprintln!("SKIPPED: misses: neither perf_event_open nor valgrind is there");
        "not counted: neither perf_event_open nor valgrind is there"
    };
    // Simulation takes a hundred times as long, so fewer keys if there are many.
    let simulated_keys = if counted { keys } else { keys.min(1_000_000) };
    for row in &mut rows {
        let lookups = |huge, lookups| Plan { keys: simulated_keys, ..plan(row, huge, lookups, 0) };
        row.misses = if counted {
            let small = in_child(&lookups(false, operations))?;
            let huge = in_child(&lookups(true, operations))?;
            let of = |figures: &super::run::Figures, name: &str| figures.get(name).copied().unwrap_or(f64::NAN);
            let [small_tlb, huge_tlb] = [of(&small, "tlb-miss/get"), of(&huge, "tlb-miss/get")];
            Some([f64::NAN, small_tlb, f64::NAN, huge_tlb, of(&small, "cache-miss/get")])
        } else if has_valgrind() {
            let mut misses = [0.0; 5];
            for (at, huge, geometry) in [(0, false, SMALL_TLB), (2, true, HUGE_TLB), (4, false, CACHE)] {
                let [first, second] = simulate(&|n| lookups(huge, n), &geometry)?;
                misses[at] = if at == 4 { second } else { first };
                if at != 4 {
                    misses[at + 1] = second;
                }
            }
            Some(misses)
        } else {
            None
        };
    }
    crate::record::emit(serde_json::json!({
        "bench": "index", "table": "tlb", "keys": keys, "dist": args.dist, "rounds": rounds, "misses": by,
        "misses_of_keys": simulated_keys, "rows": rows,
    }));
    if args.common.json {
        return Ok(());
    }
    let dist = if args.dist == Dist::Zipf { "zipfian 0.99" } else { "uniform" };
    println!(
        "{keys} keys, one thread, {dist} lookups, million per second of processor time, median of {rounds}\n\
         misses per lookup {by}, {simulated_keys} keys: first and second TLB on 4 KiB pages, on 2 MiB pages; last cache"
    );
    println!(
        "{:18}{:>13}{:>13}{:>7}{:>16}{:>16}{:>8}",
        "", "4 KiB", "2 MiB", "gain", "4 KiB TLB", "2 MiB TLB", "cache"
    );
    for row in &rows {
        let (small, small_spread) = median_and_spread(&row.small_rates);
        let (huge, huge_spread) = median_and_spread(&row.huge_rates);
        let misses = row.misses.map_or_else(String::new, |m| {
            let pair = |a: f64, b: f64| if a.is_nan() { format!("{b:.2}") } else { format!("{a:.2} {b:.2}") };
            format!("{:>16}{:>16}{:>8.2}", pair(m[0], m[1]), pair(m[2], m[3]), m[4])
        });
        println!(
            "{:18}{:>13}{:>13}{:>7}{misses}",
            row.structure,
            format!("{small:.2} +-{small_spread:.0}"),
            format!("{huge:.2} +-{huge_spread:.0}"),
            format!("{:.2}", huge / small),
        );
    }
    Ok(())
}

fn has_valgrind() -> bool {
    Command::new("valgrind").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
}

/// Misses per lookup in both levels.
fn simulate(plan: &dyn Fn(usize) -> Plan, geometry: &Geometry) -> Result<[f64; 2], String> {
    let (short, long) = (misses(&plan(LOOKUPS), geometry)?, misses(&plan(2 * LOOKUPS), geometry)?);
    Ok([0, 1].map(|level| long[level].saturating_sub(short[level]) as f64 / LOOKUPS as f64))
}

/// Misses of data in both levels, over a whole run.
fn misses(plan: &Plan, geometry: &Geometry) -> Result<[u64; 2], String> {
    let program = std::env::current_exe().map_err(|error| format!("cannot find this program: {error}"))?;
    let cache = |lines: usize, ways: usize| format!("{},{ways},{}", lines * geometry.line_bytes, geometry.line_bytes);
    let output = Command::new("valgrind")
        .args(["--tool=cachegrind", "--cachegrind-out-file=/dev/null", "--I1=32768,8,64"])
        .arg(format!("--D1={}", cache(geometry.first, geometry.first.min(64))))
        .arg(format!("--LL={}", cache(geometry.second, 16)))
        .arg(program)
        .args(["index", "--child", &serde_json::to_string(plan).expect("a plain plan")])
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("cannot start valgrind: {error}"))?;
    let text = String::from_utf8_lossy(&output.stderr);
    let field = |name: &str| {
        let line = text.lines().find(|line| line.contains(name))?;
        let number: String = line.split_once(name)?.1.split('(').next()?.chars().filter(char::is_ascii_digit).collect();
        number.parse().ok()
    };
    match (field("D1  misses:"), field("LLd misses:")) {
        (Some(first), Some(second)) if output.status.success() => Ok([first, second]),
        _ => Err(format!("cachegrind failed on {}: {}\n{text}", plan.structure, output.status)),
    }
}

/// A counter of the processor over this process's threads that are started later.
pub(super) struct Counter(i32);

/// The counters of a lookup: name, and `perf_event_attr`'s type and config.
pub(super) const COUNTERS: [(&str, u32, u64); 2] = [
    // PERF_TYPE_HW_CACHE: data TLB, reads, misses.
    ("tlb-miss/get", 3, 3 | 1 << 16),
    // PERF_TYPE_HARDWARE: misses of the last cache.
    ("cache-miss/get", 0, 3),
];

impl Counter {
    /// `None` where the machine or the kernel has no such counter for us.
    pub(super) fn open(kind: u32, config: u64) -> Option<Counter> {
        // struct perf_event_attr, first version (PERF_ATTR_SIZE_VER0): 64 bytes.
        let mut attr = [0u64; 8];
        attr[0] = u64::from(kind) | 64 << 32;
        attr[1] = config;
        // inherit, exclude_kernel, exclude_hv
        attr[5] = 1 << 1 | 1 << 5 | 1 << 6;
        // SAFETY: the attributes are ours and as long as they say; the call returns a descriptor or an error.
        let descriptor = unsafe { libc::syscall(libc::SYS_perf_event_open, attr.as_ptr(), 0, -1, -1, 0) } as i32;
        (descriptor >= 0).then_some(Counter(descriptor))
    }

    /// Events so far. Threads that have ended are in it.
    pub(super) fn read(&self) -> u64 {
        let mut count = 0u64;
        // SAFETY: the descriptor is ours, and a counter of one event reads as one word.
        let got = unsafe { libc::read(self.0, (&raw mut count).cast(), 8) };
        assert_eq!(got, 8, "a counter reads: {}", io::Error::last_os_error());
        count
    }
}

impl Drop for Counter {
    fn drop(&mut self) {
        // SAFETY: the descriptor is ours.
        unsafe { libc::close(self.0) };
    }
}

fn counters_are_there() -> bool {
    COUNTERS.iter().all(|&(_, kind, config)| Counter::open(kind, config).is_some())
}
