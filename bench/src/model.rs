//! `pagefold bench model`: merging and its index on machines that are not here, from what was measured on this one.
//!
//! A page costs processor time: some of it waits for memory, the rest does not. A client is in the hands of one worker at a
//! time, and worker and agent take turns, so a client is worth little more than one processor. From the records come the
//! costs of one worker, and what a page costs more when two work in runs; everything else is predicted and shown beside what
//! was measured, with the error. How that growth goes on with more workers nobody has measured: the model gives the best
//! case (it stays) and the worst (each worker adds as much as the second). What cannot be measured here is an assumption, and
//! named as one in the output and in docs/design/scaling.md.

use crate::{options, record};
use serde_json::{Value, json};
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

const PAGE: f64 = 4096.0;
const GIB: f64 = (1u64 << 30) as f64;

/// Bandwidth that a server gives each of its cores when all of them read, bytes a second: three quarters of 6 GB/s, which is
/// what twelve channels give 96 cores, and less than four channels give twelve. No machine has less than this one.
const ASSUMED_BANDWIDTH_PER_CORE: f64 = 4.5e9;
/// A guest of the published test.
const ASSUMED_CLIENT_BYTES: f64 = 16.0 * GIB;
/// Processors that a client runs on while its pages are taken away.
const ASSUMED_CLIENT_CPUS: f64 = 4.0;
/// Pages with a twin: 137 of 207 GB in the published test.
const ASSUMED_SHARE: f64 = 0.66;
/// Cache of a socket for an index that everybody uses.
const ASSUMED_CACHE_BYTES: f64 = 32.0 * 1024.0 * 1024.0;
/// What a processor's second-level TLB covers with huge pages; beyond it an access walks the page table.
const ASSUMED_TLB_BYTES: f64 = 4.0 * GIB;
/// Bytes of the SD tree per page, dense as the engine has it.
const INDEX_BYTES: f64 = 15.1;
/// Bytes of all records per page scanned, as the metadata test prints.
const RECORD_BYTES: f64 = 15.7;
/// The stock limit of workers per domain.
const WORKERS_MAX: f64 = 8.0;
/// What each further processor adds to a flush, of what the first costs: interrupts go out together, the slowest counts.
const ASSUMED_FLUSH_GROWTH: f64 = 0.1;
/// Times as much, or as little, as the model may be off from a recorded point.
const AGREEMENT: f64 = 1.3;

/// How the cost of a page in runs goes on growing with the processors at work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Growth {
    /// As with two, however many.
    Stays,
    /// Each adds what the second added.
    Linear,
}

/// How duplicates lie, and what the engine does with them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    /// In runs, predicted from their start.
    Runs,
    /// In runs, every page fingerprinted and looked up.
    Hashed,
    /// No two are neighbours.
    Scattered,
}

impl Work {
    const ALL: [Work; 3] = [Work::Runs, Work::Hashed, Work::Scattered];

    fn name(self) -> &'static str {
        match self {
            Work::Runs => "runs, predicted",
            Work::Hashed => "runs, all fingerprinted",
            Work::Scattered => "scattered",
        }
    }

    /// Bytes that come from memory for each page: the page and its slot for the comparison, and once more the page where it
    /// was fetched for its fingerprint long before. Copies in between stay in the cache.
    fn traffic(self) -> f64 {
        match self {
            Work::Runs => 2.0 * PAGE,
            Work::Hashed | Work::Scattered => 3.0 * PAGE,
        }
    }

    /// Flushes of other processors' TLBs for each page: three for each freeze of up to 128 pages, of which half are used;
    /// two for each page that is frozen and mapped alone.
    fn flushes(self) -> f64 {
        match self {
            Work::Runs | Work::Hashed => 3.0 / 64.0,
            Work::Scattered => 2.0,
        }
    }
}

/// A machine to predict for.
#[derive(Clone, Copy, Debug)]
struct Machine {
    processors: f64,
    memory: f64,
    /// Bytes a second that all processors read together.
    bandwidth: f64,
    clients: f64,
    /// Processors of one client.
    client_cpus: f64,
    workers: f64,
}

impl Machine {
    /// A server of the assumed kind.
    fn server(processors: f64, memory: f64, two_streams: f64) -> Machine {
        Machine {
            processors,
            memory,
            bandwidth: (processors * ASSUMED_BANDWIDTH_PER_CORE).max(two_streams),
            clients: (memory / ASSUMED_CLIENT_BYTES).max(1.0).floor(),
            client_cpus: ASSUMED_CLIENT_CPUS.min(processors),
            workers: processors,
        }
    }
}

/// What one worker costs, from a record: processor time and time on the wall, per page.
#[derive(Clone, Copy, Debug)]
struct Cost {
    cpu_us: f64,
    wall_us: f64,
}

/// What was measured.
#[derive(Clone, Debug)]
struct Parameters {
    costs: [Cost; 3],
    /// What a page costs more when two processors are at work, microseconds.
    second_us: [f64; 3],
    /// Bytes a second of one processor that compares pages, and of two.
    one_stream: f64,
    two_streams: f64,
    /// A flush that one other processor must take part in, nanoseconds.
    flush_ns: f64,
    /// A pass of the watch stage over memory at rest.
    watch_us_per_gib: f64,
    /// Keys, and nanoseconds for a lookup and an insert in batches.
    index: Vec<(f64, f64)>,
    cache_bytes: f64,
}

/// What stops it from being faster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Limit {
    Processors,
    Contention,
    Bandwidth,
    Workers,
    Clients,
}

impl Limit {
    fn name(self) -> &'static str {
        match self {
            Limit::Processors => "processors",
            Limit::Contention => "what workers share in the kernel",
            Limit::Bandwidth => "memory bandwidth",
            Limit::Workers => "workers",
            Limit::Clients => "clients: one channel, one mmap lock each",
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Merge {
    pages_per_s: f64,
    cpu_us: f64,
    busy: f64,
    limit: Limit,
}

impl Parameters {
    fn cost(&self, work: Work) -> Cost {
        self.costs[work as usize]
    }

    /// Merging all duplicates of a machine.
    fn merge(&self, machine: &Machine, work: Work, growth: Growth) -> Merge {
        let cost = self.cost(work);
        // Worker and agent of a client overlap a little: one worker keeps so many processors busy.
        let overlap = (cost.cpu_us / cost.wall_us).max(1.0);
        let pairs = machine.workers.min(machine.clients);
        let busy = (pairs * overlap).min(machine.processors);
        let alone = work.traffic() / self.one_stream * 1e6;
        let stream = self.one_stream.min(machine.bandwidth / busy);
        let waiting = work.traffic() / stream * 1e6;
        let others = (machine.client_cpus - 1.0).max(0.0);
        let flush_us = self.flush_ns / 1e3 * (others.min(1.0) + ASSUMED_FLUSH_GROWTH * (others - 1.0).max(0.0));
        let beside = match growth {
            Growth::Stays => (busy - 1.0).clamp(0.0, 1.0),
            Growth::Linear => (busy - 1.0).max(0.0),
        };
        let sharing = self.second_us[work as usize] * beside;
        // What waited for memory in the measured cost is part of it, however slow the rest was.
        let own = (cost.cpu_us - alone).max(0.0) + waiting + work.flushes() * flush_us;
        let cpu_us = own + sharing;
        let limit = if sharing > own {
            Limit::Contention
        } else if busy >= machine.processors && waiting > 1.05 * alone {
            Limit::Bandwidth
        } else if busy >= machine.processors {
            Limit::Processors
        } else if machine.workers < machine.clients {
            Limit::Workers
        } else {
            Limit::Clients
        };
        Merge { pages_per_s: busy / cpu_us * 1e6, cpu_us, busy, limit }
    }

    /// Seconds from silence to all duplicates merged, waiting for two periods not counted.
    fn merge_s(&self, machine: &Machine, work: Work, growth: Growth) -> f64 {
        machine.memory / PAGE * ASSUMED_SHARE / self.merge(machine, work, growth).pages_per_s
    }

    /// Share of all processors that watching takes at a period.
    fn watch_share(&self, machine: &Machine, period_s: f64) -> f64 {
        machine.memory / GIB * self.watch_us_per_gib / 1e6 / period_s / machine.processors
    }

    /// The period at which watching takes a hundredth of the machine.
    fn period_s(&self, machine: &Machine) -> f64 {
        self.watch_share(machine, 1.0) / 0.01
    }

    /// How an index of `keys` misses: beyond the core's own cache, the shared cache, the TLB.
    fn misses(&self, keys: f64, cache_bytes: f64) -> [f64; 4] {
        let beyond = |bytes: f64| (1.0 - bytes / (keys * INDEX_BYTES)).max(0.0);
        [1.0, beyond(1024.0 * 1024.0), beyond(cache_bytes), beyond(ASSUMED_TLB_BYTES)]
    }

    /// Nanoseconds of one access, one beyond the core's cache, one beyond all caches: the best fit without a negative one.
    fn index_costs(&self) -> [f64; 3] {
        let points: Vec<([f64; 4], f64)> =
            self.index.iter().map(|&(keys, ns)| (self.misses(keys, self.cache_bytes), ns)).collect();
        let mut best = ([0.0; 3], f64::INFINITY);
        for chosen in 1..8u32 {
            let Some(costs) = fit(&points, chosen).filter(|costs| costs.iter().all(|cost| *cost >= 0.0)) else {
                continue;
            };
            let error: f64 = points.iter().map(|(misses, ns)| ((predicted(&costs, misses) - ns) / ns).powi(2)).sum();
            if error < best.1 {
                best = (costs, error);
            }
        }
        best.0
    }

    /// Nanoseconds of a lookup and an insert among `keys`, on a machine whose shared cache is so large.
    fn index_ns(&self, keys: f64, cache_bytes: f64) -> f64 {
        let costs = self.index_costs();
        let misses = self.misses(keys, cache_bytes);
        // A walk of the page table beyond the TLB's reach: at most one more access to memory.
        predicted(&costs, &misses) + costs[2] * misses[3]
    }
}

fn predicted(costs: &[f64; 3], misses: &[f64; 4]) -> f64 {
    costs.iter().zip(misses).map(|(cost, misses)| cost * misses).sum()
}

/// Least squares, relative to each value, over the chosen columns.
fn fit(points: &[([f64; 4], f64)], chosen: u32) -> Option<[f64; 3]> {
    let columns: Vec<usize> = (0..3).filter(|column| chosen >> column & 1 == 1).collect();
    let n = columns.len();
    let mut matrix = vec![vec![0.0; n + 1]; n];
    for (misses, ns) in points {
        for (row, &a) in columns.iter().enumerate() {
            for (column, &b) in columns.iter().enumerate() {
                matrix[row][column] += misses[a] * misses[b] / ns / ns;
            }
            matrix[row][n] += misses[a] / ns;
        }
    }
    for pivot in 0..n {
        let best = (pivot..n).max_by(|&a, &b| matrix[a][pivot].abs().total_cmp(&matrix[b][pivot].abs()))?;
        matrix.swap(pivot, best);
        if matrix[pivot][pivot].abs() < 1e-12 {
            return None;
        }
        let above = matrix[pivot].clone();
        for (_, line) in matrix.iter_mut().enumerate().filter(|(row, _)| *row != pivot) {
            let factor = line[pivot] / above[pivot];
            line.iter_mut().zip(&above).skip(pivot).for_each(|(cell, above)| *cell -= factor * above);
        }
    }
    let mut costs = [0.0; 3];
    for (row, &column) in columns.iter().enumerate() {
        costs[column] = matrix[row][n] / matrix[row][row];
    }
    Some(costs)
}

// ---- what is measured here ----

/// Bytes a second that `threads` processors compare, each two buffers that no cache holds.
fn streams(threads: usize, rounds: usize) -> f64 {
    const BYTES: usize = 96 << 20;
    let go = std::sync::Barrier::new(threads);
    let go = &go;
    let rates: Vec<f64> = std::thread::scope(|scope| {
        let all: Vec<_> = (0..threads)
            .map(|_| {
                scope.spawn(move || {
                    let (a, b) = (vec![1u8; BYTES], vec![1u8; BYTES]);
                    go.wait();
                    let before = pagefold_os::sched::thread_cpu_ns();
                    for _ in 0..rounds {
                        assert!(black_box(&a) == black_box(&b));
                    }
                    let ns = pagefold_os::sched::thread_cpu_ns() - before;
                    (2 * BYTES * rounds) as f64 / ns as f64 * 1e9
                })
            })
            .collect();
        all.into_iter().map(|thread| thread.join().expect("it only reads")).collect()
    });
    rates.iter().sum()
}

/// Nanoseconds that a change of protection takes longer because one other processor runs in the same memory.
fn flush_ns(rounds: usize) -> f64 {
    let change = || {
        let mapping = pagefold_os::mem::Mapping::anonymous(2 * 4096).expect("two pages");
        let address = mapping.as_ptr();
        // SAFETY: the first byte of a mapping of this function's own.
        unsafe { address.write_volatile(1) };
        let began = Instant::now();
        for _ in 0..rounds {
            for protection in [libc::PROT_READ, libc::PROT_READ | libc::PROT_WRITE] {
                // SAFETY: the first page of a mapping of this function's own, which it has exclusively and which is writable
                // again at the end of each round.
                unsafe {
                    assert_eq!(libc::mprotect(address.cast(), 4096, protection), 0);
                }
            }
            // SAFETY: as above; the page must be in the table for the next change to have something to flush.
            unsafe { address.write_volatile(1) };
        }
        began.elapsed().as_nanos() as f64 / rounds as f64
    };
    let alone = change();
    let stop = AtomicBool::new(false);
    let beside = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        std::thread::sleep(std::time::Duration::from_millis(20));
        let beside = change();
        stop.store(true, Ordering::Relaxed);
        beside
    });
    (beside - alone).max(0.0)
}

/// Keys and nanoseconds of a batched lookup and a batched insert, by `pagefold bench index` in processes of its own.
fn index_points(sizes: &[usize], rounds: usize) -> Result<Vec<(f64, f64)>, String> {
    let mut points = Vec::new();
    for keys in sizes {
        let words = format!("--threads 1 --clock cpu --only sd-tree-dense --json --keys {keys} --rounds {rounds}");
        let args: Vec<String> = words.split(' ').map(str::to_string).collect();
        let rows = crate::apart("index", &args).map_err(|error| format!("the index's bench: {error}"))?.rows;
        let rate = |name: &str| -> Option<f64> {
            rows.first()?["figures"][name].as_array()?.iter().filter_map(Value::as_f64).reduce(f64::max)
        };
        let both = rate("get-batch").zip(rate("insert-batch")).ok_or("the index's bench has no batched figures")?;
        points.push((*keys as f64, 1e3 / both.0 + 1e3 / both.1));
    }
    Ok(points)
}

fn shared_cache_bytes() -> f64 {
    let text = std::fs::read_to_string("/sys/devices/system/cpu/cpu0/cache/index3/size").unwrap_or_default();
    let kib = text.trim().strip_suffix('K').and_then(|kib| kib.parse::<f64>().ok());
    kib.map_or(ASSUMED_CACHE_BYTES, |kib| kib * 1024.0)
}

// ---- what is recorded ----

/// The figures of a recorded row of merging: its layout, workers, whether fingerprinted, processor and wall time per page.
struct Recorded {
    work: Work,
    layout: String,
    workers: f64,
    processes: f64,
    cost: Cost,
}

fn recorded(row: &Value) -> Option<Recorded> {
    let engine = row["engine"].as_str()?.strip_prefix("pagefold, ")?;
    let workers: f64 = engine.split(' ').next()?.parse().ok()?;
    let layout = row["layout"].as_str().filter(|_| row["part"] == "merge")?;
    let work = match (layout, engine.ends_with("hashed")) {
        ("files" | "zero", false) => Work::Runs,
        ("files" | "zero", true) => Work::Hashed,
        ("scattered", false) => Work::Scattered,
        _ => return None,
    };
    let median = |name: &str| row[name]["median"].as_f64();
    let cost = Cost { cpu_us: median("cpu_us_per_page")?, wall_us: median("wall_us_per_page")? };
    Some(Recorded { work, layout: layout.into(), workers, processes: row["processes"].as_f64()?, cost })
}

/// What the records hold: the costs of one worker, what the second adds, watching, and every point to check against (the last
/// of each kind).
type FromRecords = ([Cost; 3], [f64; 3], f64, Vec<Recorded>);

fn from_records(rows: &[Value]) -> Result<FromRecords, String> {
    let points: Vec<Recorded> = rows.iter().filter_map(recorded).collect();
    let one = |work: Work| {
        let fits = |point: &&Recorded| point.work == work && point.workers == 1.0 && point.layout != "zero";
        let found = points.iter().rev().find(fits).map(|point| point.cost);
        found.ok_or_else(|| format!("the records hold no row of one worker for {}", work.name()))
    };
    let costs = [one(Work::Runs)?, one(Work::Hashed)?, one(Work::Scattered)?];
    let two = |work: Work| {
        let fits = |point: &&Recorded| point.work == work && point.workers == 2.0 && point.layout != "zero";
        points.iter().rev().find(fits).map(|point| (point.cost.cpu_us - costs[work as usize].cpu_us).max(0.0))
    };
    let runs = two(Work::Runs).ok_or("the records hold no row of two workers")?;
    // Fingerprinting adds nothing that is shared; merging in runs does.
    let second_us = [runs, two(Work::Hashed).unwrap_or(runs), two(Work::Scattered).unwrap_or(runs)];
    let idle = |engine: &str| rows.iter().rev().find(|row| row["part"] == "idle" && row["engine"] == engine);
    // Records from before looks were left out have the plain name.
    let idle = idle("pagefold, 1 worker, faults elsewhere").or_else(|| idle("pagefold, 1 worker"));
    let watch =
        idle.and_then(|row| row["us_per_gib"]["median"].as_f64()).ok_or("the records hold no row of idle memory")?;
    let mut last: Vec<Recorded> = Vec::new();
    for point in points {
        last.retain(|other| (other.work, &other.layout, other.workers) != (point.work, &point.layout, point.workers));
        last.push(point);
    }
    Ok((costs, second_us, watch, last))
}

/// Model beside measurement: what, measured, predicted, whether the model was fitted to it.
fn checks(parameters: &Parameters, points: &[Recorded], processors: f64) -> Vec<(String, f64, f64, bool)> {
    let here = |point: &Recorded| Machine {
        processors,
        memory: 0.0,
        bandwidth: if processors > 1.0 { parameters.two_streams * processors / 2.0 } else { parameters.one_stream },
        clients: point.processes,
        client_cpus: 1.0,
        workers: point.workers,
    };
    let merging = points.iter().map(|point| {
        let wall = 1e6 / parameters.merge(&here(point), point.work, Growth::Linear).pages_per_s;
        let fitted = point.layout != "zero" && (point.workers == 1.0 || point.work == Work::Runs);
        let layout = if point.layout == "zero" { ", zeros before" } else { "" };
        let what = format!(
            "{}{layout}: us a page, {} worker{}",
            point.work.name(),
            point.workers,
            if point.workers == 1.0 { "" } else { "s" }
        );
        (what, point.cost.wall_us, wall, fitted)
    });
    let index = parameters.index.iter().map(|&(keys, ns)| {
        (
            format!("index, {keys:.0} keys: ns for lookup and insert"),
            ns,
            parameters.index_ns(keys, parameters.cache_bytes),
            true,
        )
    });
    merging.chain(index).collect()
}

// ---- output ----

const USAGE: &str = "usage: pagefold bench model [--quick|--full] [--json] [--records DIR]

  --records DIR  where the records of pageone are (default: bench/record)";

/// Measures, checks, predicts.
pub fn run(args: &[String]) -> ExitCode {
    if let Some(code) = options::refuse(USAGE, args, &["--quick", "--full", "--json"], &["--records"], &[]) {
        return code;
    }
    let value = |name: &str| args.iter().position(|arg| arg == name).and_then(|at| args.get(at + 1)).cloned();
    let records = value("--records").map_or_else(|| PathBuf::from("bench/record"), PathBuf::from);
    match measure(args, &records) {
        Ok((parameters, points)) => {
            record::emit(Value::Array(report(&parameters, &points)));
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("pagefold-bench model: {error}");
            ExitCode::FAILURE
        }
    }
}

fn measure(args: &[String], records: &Path) -> Result<(Parameters, Vec<Recorded>), String> {
    let rows =
        record::read_all(records, &["pageone".into()]).map_err(|error| format!("{}: {error}", records.display()))?;
    let (costs, second_us, watch_us_per_gib, points) = from_records(&rows)?;
    let quick = args.iter().any(|arg| arg == "--quick");
    let full = args.iter().any(|arg| arg == "--full");
    let sizes: &[usize] = match (quick, full) {
        (true, _) => &[100_000, 1_000_000],
        (_, true) => &[100_000, 300_000, 1_000_000, 3_000_000, 10_000_000, 30_000_000, 100_000_000],
        _ => &[100_000, 300_000, 1_000_000, 3_000_000, 10_000_000, 30_000_000],
    };
    let rounds = if quick { 1 } else { 5 };
    // The best of the rounds: others on the machine only ever take away.
    let best = |measure: &dyn Fn() -> f64, better: fn(f64, f64) -> f64| {
        (0..rounds).map(|_| measure()).reduce(better).expect("at least one round")
    };
    let parameters = Parameters {
        costs,
        second_us,
        one_stream: best(&|| streams(1, 4), f64::max),
        two_streams: best(&|| streams(2, 4), f64::max),
        flush_ns: best(&|| flush_ns(20_000), f64::min),
        watch_us_per_gib,
        index: index_points(sizes, rounds)?,
        cache_bytes: shared_cache_bytes(),
    };
    Ok((parameters, points))
}

fn report(parameters: &Parameters, points: &[Recorded]) -> Vec<Value> {
    let processors = std::thread::available_parallelism().map_or(1, usize::from) as f64;
    let mut rows = vec![json!({
        "part": "parameters", "second_us": parameters.second_us, "one_stream_bytes_per_s": parameters.one_stream,
        "two_streams_bytes_per_s": parameters.two_streams, "flush_ns": parameters.flush_ns,
        "watch_us_per_gib": parameters.watch_us_per_gib, "cache_bytes": parameters.cache_bytes, "processors": processors,
        "index_ns": parameters.index, "index_costs_ns": parameters.index_costs(),
    })];
    record::table!(
        "measured here: one processor compares {:.1} GB/s, two {:.1}; a flush with one other processor {:.0} ns;\n\
         recorded: a page in runs costs {:.2} us, {:.2} more beside a second worker; watching {:.0} us per GiB and pass;\n\
         index: {:.1} ns, beyond the core's cache {:.1} more, beyond all caches {:.1} more",
        parameters.one_stream / 1e9,
        parameters.two_streams / 1e9,
        parameters.flush_ns,
        parameters.cost(Work::Runs).cpu_us,
        parameters.second_us[0],
        parameters.watch_us_per_gib,
        parameters.index_costs()[0],
        parameters.index_costs()[1],
        parameters.index_costs()[2],
    );
    record::table!(
        "assumed: {:.1} GB/s of memory bandwidth per core, clients of {:.0} GiB on {} processors, {:.0} % duplicates",
        ASSUMED_BANDWIDTH_PER_CORE / 1e9,
        ASSUMED_CLIENT_BYTES / GIB,
        ASSUMED_CLIENT_CPUS,
        100.0 * ASSUMED_SHARE,
    );
    record::table!("\n{:66} {:>9} {:>9} {:>8}", "the model beside what was measured", "measured", "model", "error");
    for (what, measured, model, fitted) in checks(parameters, points, processors) {
        let error = 100.0 * (model / measured - 1.0);
        let note = match (fitted, (model / measured).max(measured / model) < AGREEMENT) {
            (true, _) => "  fitted",
            (_, true) => "",
            _ => "  off by more than the model allows itself",
        };
        record::table!("{what:66} {measured:>9.2} {model:>9.2} {error:>+6.1} %{note}");
        rows.push(json!({ "part": "check", "what": what, "measured": measured, "model": model, "fitted": fitted }));
    }
    for work in Work::ALL {
        record::table!(
            "\n{}: seconds until all duplicates are merged, best and worst case\n{:>6} {:>8} {:>8} {:>16} {:>16} {:>11} {:>9}  limit \
             with all workers, best; worst",
            work.name(),
            "cores",
            "memory",
            "clients",
            "8 workers",
            "all workers",
            "best GiB/s",
            "PageONE's"
        );
        for (processors, gib) in machines() {
            let machine = Machine::server(processors, gib * GIB, parameters.two_streams);
            let stock = Machine { workers: processors.min(WORKERS_MAX), ..machine };
            let [best, worst] = [Growth::Stays, Growth::Linear].map(|growth| parameters.merge(&machine, work, growth));
            let [stock_s, stock_worst_s, all_s, all_worst_s] = [
                parameters.merge_s(&stock, work, Growth::Stays),
                parameters.merge_s(&stock, work, Growth::Linear),
                parameters.merge_s(&machine, work, Growth::Stays),
                parameters.merge_s(&machine, work, Growth::Linear),
            ];
            let gib_per_s = best.pages_per_s * PAGE / GIB;
            // The published engine, taken to scale without loss as it says it does: 136.8 GB in 58 s on 12 threads.
            let theirs_s = machine.memory * ASSUMED_SHARE / (136.8e9 / 58.0 / 12.0 * processors);
            record::table!(
                "{processors:>6} {:>8} {:>8} {:>16} {:>16} {gib_per_s:>11.2} {theirs_s:>9.1}  {}; {}",
                size(machine.memory),
                machine.clients,
                format!("{stock_s:.1} to {stock_worst_s:.1}"),
                format!("{all_s:.1} to {all_worst_s:.1}"),
                best.limit.name(),
                worst.limit.name(),
            );
            rows.push(json!({
                "part": "merge", "work": work.name(), "processors": processors, "memory_gib": gib,
                "clients": machine.clients, "eight_workers_s": stock_s, "eight_workers_worst_s": stock_worst_s,
                "all_workers_s": all_s, "all_workers_worst_s": all_worst_s, "busy": best.busy,
                "cpu_us_per_page": best.cpu_us, "gib_per_s": gib_per_s, "limit": best.limit.name(),
                "limit_worst": worst.limit.name(), "published_s": theirs_s,
            }));
        }
    }
    record::table!(
        "\nwatching, index, records\n{:>6} {:>8} {:>14} {:>16} {:>12} {:>16} {:>14} {:>9}",
        "cores",
        "memory",
        "watch at 2 s",
        "period for 1 %",
        "index",
        "ns per page",
        "of hashing",
        "records"
    );
    for (processors, gib) in machines() {
        let machine = Machine::server(processors, gib * GIB, parameters.two_streams);
        let keys = machine.memory / PAGE;
        let ns = parameters.index_ns(keys, ASSUMED_CACHE_BYTES);
        let share = parameters.watch_share(&machine, 2.0);
        let of_hashing = ns / 1e3 / parameters.cost(Work::Hashed).cpu_us;
        record::table!(
            "{processors:>6} {:>8} {:>12.1} % {:>14.1} s {:>12} {ns:>16.0} {:>12.1} % {:>9}",
            size(machine.memory),
            100.0 * share,
            parameters.period_s(&machine),
            size(keys * INDEX_BYTES),
            100.0 * of_hashing,
            size(keys * RECORD_BYTES),
        );
        rows.push(json!({
            "part": "watch and index", "processors": processors, "memory_gib": gib, "watch_share": share,
            "period_s_for_1_percent": parameters.period_s(&machine), "index_bytes": keys * INDEX_BYTES,
            "index_ns_per_page": ns, "index_of_hashing": of_hashing, "records_bytes": keys * RECORD_BYTES,
        }));
    }
    rows
}

/// Cores and GiB that are predicted.
fn machines() -> impl Iterator<Item = (f64, f64)> {
    [
        (1.0, 64.0),
        (2.0, 64.0),
        (12.0, 64.0),
        (12.0, 256.0),
        (48.0, 256.0),
        (48.0, 1024.0),
        (192.0, 1024.0),
        (192.0, 4096.0),
    ]
    .into_iter()
}

fn size(bytes: f64) -> String {
    match bytes {
        bytes if bytes >= 1024.0 * GIB => format!("{:.0} TiB", bytes / GIB / 1024.0),
        bytes if bytes >= GIB => format!("{:.0} GiB", bytes / GIB),
        bytes => format!("{:.0} MiB", bytes / GIB * 1024.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parameters() -> Parameters {
        Parameters {
            costs: [
                Cost { cpu_us: 2.4, wall_us: 2.1 },
                Cost { cpu_us: 5.0, wall_us: 4.8 },
                Cost { cpu_us: 13.1, wall_us: 12.7 },
            ],
            second_us: [0.5, 0.5, 0.0],
            one_stream: 12e9,
            two_streams: 18e9,
            flush_ns: 1500.0,
            watch_us_per_gib: 1500.0,
            index: vec![(1e4, 20.0), (1e5, 24.0), (1e6, 40.0), (1e7, 70.0)],
            cache_bytes: ASSUMED_CACHE_BYTES,
        }
    }

    fn server(processors: f64, gib: f64) -> Machine {
        Machine::server(processors, gib * GIB, parameters().two_streams)
    }

    #[test]
    fn more_processors_are_never_slower_and_more_memory_never_faster() {
        let parameters = parameters();
        for work in Work::ALL {
            for gib in [64.0, 256.0, 1024.0, 4096.0] {
                // From two on: a client of more than one processor needs flushes that one processor does not.
                for growth in [Growth::Stays, Growth::Linear] {
                    let time = |cores| parameters.merge_s(&server(cores, gib), work, growth);
                    let times: Vec<f64> = [4.0, 12.0, 48.0, 192.0, 384.0].map(time).into();
                    assert!(times.windows(2).all(|pair| pair[1] <= pair[0] * 1.000_001), "{work:?}, {gib}: {times:?}");
                }
            }
            for cores in [1.0, 12.0, 192.0] {
                let time = |gib| parameters.merge_s(&server(cores, gib), work, Growth::Stays);
                let times: Vec<f64> = [64.0, 128.0, 1024.0, 4096.0].map(time).into();
                assert!(times.windows(2).all(|pair| pair[1] >= pair[0]), "{work:?}, {cores}: {times:?}");
            }
        }
    }

    #[test]
    fn the_worst_case_is_never_better_and_has_a_ceiling() {
        let parameters = parameters();
        for (cores, gib) in machines() {
            for work in Work::ALL {
                let [best, worst] =
                    [Growth::Stays, Growth::Linear].map(|growth| parameters.merge(&server(cores, gib), work, growth));
                assert!(worst.pages_per_s <= best.pages_per_s * 1.000_001, "{work:?}: {best:?}, {worst:?}");
                let second = parameters.second_us[work as usize];
                assert!(second == 0.0 || worst.pages_per_s < 2e6 / second, "{work:?}: {worst:?}");
            }
        }
    }

    #[test]
    fn nothing_exceeds_its_limit() {
        let parameters = parameters();
        for work in Work::ALL {
            for (cores, gib) in machines() {
                let machine = server(cores, gib);
                let merge = parameters.merge(&machine, work, Growth::Stays);
                assert!(merge.busy <= machine.processors);
                assert!(merge.pages_per_s * work.traffic() <= machine.bandwidth * 1.000_001, "{work:?} on {machine:?}");
                // One client is worth one worker and what its agent overlaps.
                let one = Machine { clients: 1.0, ..machine };
                let cost = parameters.cost(work);
                assert!(parameters.merge(&one, work, Growth::Stays).pages_per_s <= 1e6 / cost.wall_us * 1.000_001);
            }
        }
    }

    #[test]
    fn the_limit_is_what_would_help() {
        let parameters = parameters();
        let base = server(48.0, 1024.0);
        let merge = |machine: &Machine| parameters.merge(machine, Work::Runs, Growth::Stays);
        let rate = |machine: &Machine| merge(machine).pages_per_s;
        let few_workers = Machine { workers: 4.0, ..base };
        assert_eq!(merge(&few_workers).limit, Limit::Workers);
        assert!(rate(&Machine { workers: 5.0, ..few_workers }) > rate(&few_workers));
        let one_client = Machine { clients: 1.0, ..base };
        assert_eq!(merge(&one_client).limit, Limit::Clients);
        assert!(rate(&Machine { clients: 2.0, ..one_client }) > rate(&one_client));
        let slow_memory = Machine { bandwidth: 40e9, ..base };
        assert_eq!(merge(&slow_memory).limit, Limit::Bandwidth);
        assert!(rate(&Machine { bandwidth: 80e9, ..slow_memory }) > rate(&slow_memory));
        assert_eq!(parameters.merge(&base, Work::Runs, Growth::Linear).limit, Limit::Contention);
    }

    #[test]
    fn an_index_never_gets_cheaper_with_size_and_its_fit_is_close() {
        let parameters = parameters();
        let sizes = [1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10];
        let costs: Vec<f64> = sizes.iter().map(|keys| parameters.index_ns(*keys, ASSUMED_CACHE_BYTES)).collect();
        assert!(costs.windows(2).all(|pair| pair[1] >= pair[0]), "{costs:?}");
        assert!(costs[7] < 3.0 * costs[4], "constant depth: no logarithm in it, {costs:?}");
        for &(keys, ns) in &parameters.index {
            let model = parameters.index_ns(keys, parameters.cache_bytes);
            assert!((model / ns).max(ns / model) < AGREEMENT, "{keys}: {model} against {ns}");
        }
    }

    #[test]
    fn a_fit_finds_what_made_the_points() {
        let mut parameters = parameters();
        let made = [20.0, 10.0, 40.0];
        for point in &mut parameters.index {
            *point = (point.0, 0.0);
        }
        let points: Vec<(f64, f64)> = [1e4, 1e5, 1e6, 3e6, 1e7, 1e8]
            .map(|keys| (keys, predicted(&made, &parameters.misses(keys, parameters.cache_bytes))))
            .into();
        parameters.index = points;
        let found = parameters.index_costs();
        assert!(found.iter().zip(made).all(|(found, made)| (found - made).abs() < 0.01), "{found:?}");
    }

    #[test]
    fn watching_grows_with_memory_and_shrinks_with_the_period() {
        let parameters = parameters();
        let (small, large) = (server(48.0, 256.0), server(48.0, 1024.0));
        assert!((parameters.watch_share(&large, 2.0) / parameters.watch_share(&small, 2.0) - 4.0).abs() < 1e-9);
        let period = parameters.period_s(&large);
        assert!((parameters.watch_share(&large, period) - 0.01).abs() < 1e-9);
    }

    /// The model, calibrated with one worker and this machine's streams as recorded, against all recorded points.
    #[test]
    fn the_model_agrees_with_the_records() {
        let dir = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/record"));
        let (costs, second_us, watch_us_per_gib, points) =
            from_records(&record::read_all(dir, &["pageone".into()]).unwrap()).unwrap();
        let rows = record::read_all(dir, &["model".into()]).unwrap();
        let row = rows.iter().rev().find(|row| row["part"] == "parameters").expect("a record of the model");
        let number = |name: &str| row[name].as_f64().unwrap_or_else(|| panic!("the record has no {name}"));
        let index = row["index_ns"]
            .as_array()
            .unwrap()
            .iter()
            .map(|pair| (pair[0].as_f64().unwrap(), pair[1].as_f64().unwrap()));
        let parameters = Parameters {
            costs,
            second_us,
            one_stream: number("one_stream_bytes_per_s"),
            two_streams: number("two_streams_bytes_per_s"),
            flush_ns: number("flush_ns"),
            watch_us_per_gib,
            index: index.collect(),
            cache_bytes: number("cache_bytes"),
        };
        let checks = checks(&parameters, &points, number("processors"));
        let free = checks.iter().filter(|check| !check.3).count();
        assert!(free >= 3, "too little was recorded to check anything: {checks:?}");
        for (what, measured, model, _) in checks {
            assert!((model / measured).max(measured / model) < AGREEMENT, "{what}: model {model}, measured {measured}");
        }
    }
}
