//! PageONE's test, scaled down: processes that hold the same files in other orders, merged by us and by KSM.
//!
//! The published test ran 12 virtual machines with 16 GB of 20 MB files each.
//! Here processes hold synthetic files of 20 MB (5120 pages) in orders of their
//! own; `zero` gives each page a prefix of zero bytes, 128 on average, as the
//! second published test; `scattered` permutes single pages, so that no two
//! duplicates are neighbours: our worst case.
//!
//! One worker's speed is pages merged per second of its processor time (daemon
//! and agents together; ksmd's for KSM): wall time on a machine that others use
//! as well would measure them. Wall time from the start of merging is shown beside.

use pagefold_agent::client::{Client, Region};
use pagefold_daemon::control::{self, Answer, Request};
use pagefold_daemon::status::Status;
use pagefold_daemon::{Config, Daemon};
use pagefold_os::{PAGE_SIZE, ksm, procfs};
use serde::Serialize;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

/// Pages in one synthetic file: 20 MB.
const FILE_PAGES: u64 = 5120;
/// The scanner's shortest rest between two looks at the counters.
const LOOK: Duration = Duration::from_millis(20);
/// Merging has come to rest when nothing changed for this long.
const QUIET: Duration = Duration::from_millis(2500);
/// No run takes longer.
const RUN_MAX: Duration = Duration::from_secs(600);

/// How the files lie in the processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Layout {
    Files,
    Zero,
    Scattered,
}

impl Layout {
    fn name(self) -> &'static str {
        match self {
            Layout::Files => "files",
            Layout::Zero => "zero",
            Layout::Scattered => "scattered",
        }
    }
}

/// One measurement.
#[derive(Clone, Debug, Serialize)]
struct Row {
    engine: String,
    layout: Layout,
    processes: u64,
    mib_each: u64,
    workers: usize,
    pages_merged: u64,
    /// From the first merged page (KSM: from its start) to 99 % of the last.
    wall_s: f64,
    cpu_s: f64,
    /// Sum of the processes' proportional memory, plus all that the engine holds.
    memory_before_mib: f64,
    memory_after_mib: f64,
    metadata_bytes: u64,
    freeze_us_p99: f64,
    idle_pass_us_per_gib: f64,
}

impl Row {
    fn cpu_us_per_page(&self) -> f64 {
        self.cpu_s * 1e6 / self.pages_merged.max(1) as f64
    }
    fn wall_us_per_page(&self) -> f64 {
        self.wall_s * 1e6 / self.pages_merged.max(1) as f64
    }
}

/// Runs the benchmark.
pub fn run(args: &[String]) -> ExitCode {
    match args.first().map(String::as_str) {
        Some("--client") => return finish(client(&args[1..])),
        Some("--daemon") => return finish(daemon(&args[1..])),
        _ => {}
    }
    finish(measure(args))
}

type Failure = Box<dyn std::error::Error>;

fn finish(result: Result<(), Failure>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pagefold-bench pageone: {error}");
            ExitCode::FAILURE
        }
    }
}

fn measure(args: &[String]) -> Result<(), Failure> {
    let has = |name: &str| args.iter().any(|arg| arg == name);
    let value = |name: &str| {
        args.iter().position(|arg| arg == name).and_then(|at| args.get(at + 1)).and_then(|v| v.parse::<u64>().ok())
    };
    let (processes, mib, rounds) = if has("--quick") {
        (3, 40, 1)
    } else if has("--full") {
        (12, 512, 5)
    } else {
        (12, 160, 3)
    };
    let processes = value("--processes").unwrap_or(processes);
    let mib = value("--mib").unwrap_or(mib);
    let rounds = value("--rounds").unwrap_or(rounds);
    let (available, _) = procfs::available_and_total();
    if processes * (mib << 20) > available / 10 * 9 {
        return Err(format!("{processes} processes of {mib} MiB do not fit into {} MiB", available >> 20).into());
    }
    // SAFETY: returns a number.
    let with_ksm = unsafe { libc::geteuid() } == 0 && ksm::exists() && !has("--no-ksm");
    if !with_ksm {
        eprintln!("SKIPPED: the peer, KSM, needs root and a kernel that has it");
    }
    let mut rows: Vec<Row> = Vec::new();
    for round in 0..rounds {
        for layout in [Layout::Files, Layout::Zero, Layout::Scattered] {
            let shape = Shape { layout, processes, mib };
            for workers in [1, 2] {
                rows.push(ours(shape, workers, true)?);
            }
            if layout == Layout::Files {
                rows.push(ours(shape, 1, false)?);
            }
            if with_ksm {
                rows.push(kernel(shape, 1)?);
                if !has("--quick") {
                    rows.push(kernel(shape, 0)?);
                }
            }
            eprintln!("round {} of {rounds}: {} done", round + 1, layout.name());
        }
    }
    if has("--json") {
        println!("{}", serde_json::to_string_pretty(&rows)?);
    } else {
        show(&rows);
    }
    Ok(())
}

fn median(mut values: Vec<f64>) -> (f64, f64, f64) {
    values.sort_by(f64::total_cmp);
    (values[values.len() / 2], values[0], values[values.len() - 1])
}

fn show(rows: &[Row]) {
    println!(
        "{:10} {:22} {:>9} {:>22} {:>10} {:>9} {:>9} {:>9} {:>10} {:>9}",
        "layout",
        "engine",
        "merged",
        "cpu us/page (min-max)",
        "wall us/pg",
        "speed",
        "after MiB",
        "meta MiB",
        "wait p99us",
        "idle us/GiB"
    );
    for layout in [Layout::Files, Layout::Zero, Layout::Scattered] {
        let mut engines: Vec<&str> = Vec::new();
        for row in rows.iter().filter(|row| row.layout == layout) {
            if !engines.contains(&row.engine.as_str()) {
                engines.push(&row.engine);
            }
        }
        let of = |engine: &str, f: &dyn Fn(&Row) -> f64| {
            median(rows.iter().filter(|row| row.layout == layout && row.engine == engine).map(f).collect())
        };
        let peer =
            engines.iter().find(|engine| engine.starts_with("KSM")).map(|engine| of(engine, &Row::cpu_us_per_page).0);
        for engine in &engines {
            let (cpu, low, high) = of(engine, &Row::cpu_us_per_page);
            println!(
                "{:10} {:22} {:>9} {:>22} {:>10.2} {:>9} {:>9.0} {:>9.1} {:>10.0} {:>9.0}",
                layout.name(),
                engine,
                of(engine, &|row| row.pages_merged as f64).0,
                format!("{cpu:.2} ({low:.2}-{high:.2})"),
                of(engine, &Row::wall_us_per_page).0,
                peer.map_or("-".into(), |peer| format!("{:.2} x", peer / cpu)),
                of(engine, &|row| row.memory_after_mib).0,
                of(engine, &|row| row.metadata_bytes as f64 / 1048576.0).0,
                of(engine, &|row| row.freeze_us_p99).0,
                of(engine, &|row| row.idle_pass_us_per_gib).0,
            );
        }
    }
}

#[derive(Clone, Copy)]
struct Shape {
    layout: Layout,
    processes: u64,
    mib: u64,
}

struct Crew(Vec<(Child, ChildStdin, BufReader<ChildStdout>)>);

impl Crew {
    fn start(shape: Shape, socket: Option<&Path>) -> Result<Crew, Failure> {
        let mut crew = Crew(Vec::new());
        for number in 0..shape.processes {
            let mut command = Command::new(std::env::current_exe()?);
            command.args(["pageone", "--client", shape.layout.name(), &shape.mib.to_string(), &number.to_string()]);
            if let Some(socket) = socket {
                command.arg(socket);
            }
            let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
            let (input, output) = child.stdin.take().zip(child.stdout.take()).ok_or("no pipes")?;
            crew.0.push((child, input, BufReader::new(output)));
            // One after the other: filling is not what is measured, and two would only disturb each other.
            crew.expect_last("ready")?;
        }
        Ok(crew)
    }

    fn expect_last(&mut self, wanted: &str) -> Result<(), Failure> {
        let Some((_, _, output)) = self.0.last_mut() else { return Ok(()) };
        expect(output, wanted)
    }

    fn tell(&mut self, line: &str, wanted: &str) -> Result<(), Failure> {
        for (_, input, _) in &mut self.0 {
            writeln!(input, "{line}")?;
        }
        for (_, _, output) in &mut self.0 {
            expect(output, wanted)?;
        }
        Ok(())
    }

    fn pss(&self) -> u64 {
        self.0.iter().filter_map(|(child, ..)| procfs::memory(child.id() as i32).ok()).map(|memory| memory.pss).sum()
    }
}

fn expect(output: &mut BufReader<ChildStdout>, wanted: &str) -> Result<(), Failure> {
    let mut line = String::new();
    output.read_line(&mut line)?;
    if line.trim_end() == wanted { Ok(()) } else { Err(format!("a process said {line:?} instead of {wanted}").into()) }
}

impl Drop for Crew {
    fn drop(&mut self) {
        for (child, ..) in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

struct OwnDaemon(Child, PathBuf);

impl Drop for OwnDaemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
        let _ = std::fs::remove_file(&self.1);
    }
}

fn status(socket: &Path) -> Result<Status, Failure> {
    match control::ask(socket, &Request::Status {})? {
        Answer::Status(status) => Ok(*status),
        other => Err(format!("{other:?}").into()),
    }
}

fn ours(shape: Shape, workers: usize, predict: bool) -> Result<Row, Failure> {
    let socket = std::env::temp_dir().join(format!("pagefold-bench-{}.sock", std::process::id()));
    let child = Command::new(std::env::current_exe()?)
        .args(["pageone", "--daemon"])
        .arg(&socket)
        .args([workers.to_string(), u8::from(predict).to_string()])
        .spawn()?;
    let daemon = OwnDaemon(child, socket);
    let began = Instant::now();
    while status(&daemon.1).is_err() {
        if began.elapsed() > Duration::from_secs(10) {
            return Err("the daemon does not listen".into());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let mut crew = Crew::start(shape, Some(&daemon.1))?;
    // Regions are watched from their making; merging waits until all are full, so that it is one piece of work.
    let before = crew.pss();
    let at_start = status(&daemon.1)?;
    control::ask(&daemon.1, &Request::Resume { pid: None })?;
    let began = Instant::now();
    let mut samples: Vec<(Instant, u64)> = vec![(began, at_start.totals.pages_merged)];
    let mut cpu = (at_start.totals.cpu_ns, at_start.totals.cpu_ns);
    loop {
        std::thread::sleep(LOOK);
        let now = status(&daemon.1)?;
        let merged = now.totals.pages_merged;
        let (last_time, last) = samples[samples.len() - 1];
        if merged != last {
            samples.push((Instant::now(), merged));
            cpu.1 = now.totals.cpu_ns;
        }
        if merged > 0 && last_time.elapsed() > QUIET && merged == last || began.elapsed() > RUN_MAX {
            break;
        }
    }
    let total = samples[samples.len() - 1].1;
    let first = samples.iter().position(|(_, merged)| *merged > 0).unwrap_or(0);
    let end = samples.iter().find(|(_, merged)| *merged * 100 >= total * 99).map_or(began, |sample| sample.0);
    let begin = samples[first.saturating_sub(1)].0.max(samples[first].0 - LOOK);
    let watch_before = status(&daemon.1)?;
    std::thread::sleep(Duration::from_secs(2));
    let watch_after = status(&daemon.1)?;
    let watched = |status: &Status| {
        status
            .domains
            .iter()
            .map(|domain| (domain.events.watch_ns, domain.events.full_scans))
            .fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1))
    };
    let (ns, scans) =
        (watched(&watch_after).0 - watched(&watch_before).0, watched(&watch_after).1 - watched(&watch_before).1);
    let gib_each = shape.mib as f64 / 1024.0;
    let mut histogram = [0u64; 16];
    for client in &watch_after.clients {
        client.freeze_us_log2.iter().take(16).enumerate().for_each(|(bucket, count)| histogram[bucket] += count);
    }
    let after = crew.pss() + procfs::memory(daemon.0.id() as i32).map(|memory| memory.pss).unwrap_or(0);
    crew.tell("check", "intact")?;
    Ok(Row {
        engine: format!(
            "pagefold, {workers} worker{}{}",
            if workers > 1 { "s" } else { "" },
            if predict { "" } else { ", hashed" }
        ),
        layout: shape.layout,
        processes: shape.processes,
        mib_each: shape.mib,
        workers,
        pages_merged: total,
        wall_s: (end - begin).as_secs_f64(),
        cpu_s: (cpu.1 - cpu.0) as f64 / 1e9,
        memory_before_mib: before as f64 / 1048576.0,
        memory_after_mib: after as f64 / 1048576.0,
        metadata_bytes: watch_after.totals.metadata_bytes,
        freeze_us_p99: quantile(&histogram, 0.99),
        idle_pass_us_per_gib: ns as f64 / 1000.0 / scans.max(1) as f64 / gib_each,
    })
}

/// Upper bound in microseconds of the bucket that holds quantile `q`.
fn quantile(histogram: &[u64; 16], q: f64) -> f64 {
    let total: u64 = histogram.iter().sum();
    let mut seen = 0;
    for (bucket, count) in histogram.iter().enumerate() {
        seen += count;
        if seen as f64 >= total as f64 * q {
            return f64::from(1u32 << bucket);
        }
    }
    0.0
}

fn kernel(shape: Shape, smart_scan: i64) -> Result<Row, Failure> {
    let mut settings = ksm::Settings::save()?;
    for (name, value) in [("run", 2), ("pages_to_scan", 1_000_000), ("sleep_millisecs", 0), ("use_zero_pages", 1)] {
        ksm::write(name, value)?;
    }
    let _ = ksm::write("smart_scan", smart_scan);
    let mut crew = Crew::start(shape, None)?;
    crew.tell("merge", "merging")?;
    let scanner = procfs::pids().into_iter().find(|pid| procfs::name(*pid).as_deref() == Some("ksmd"));
    let scanner = scanner.ok_or("ksmd is not to be seen")?;
    let cpu = || procfs::cpu_ns(scanner).unwrap_or(0);
    let before = crew.pss();
    // Pages merged as we count them: every place that shows a shared page, the first one included.
    let merged = || {
        let read = |name| ksm::read(name).unwrap_or(0).max(0) as u64;
        read("pages_sharing") + read("pages_shared")
    };
    let (cpu_start, held) = (cpu(), merged());
    let began = Instant::now();
    ksm::write("run", 1)?;
    let mut samples = vec![(began, held, cpu_start)];
    loop {
        std::thread::sleep(LOOK);
        let now = merged();
        let (last_time, last, _) = samples[samples.len() - 1];
        if now != last {
            samples.push((Instant::now(), now, cpu()));
        }
        if now > held && now == last && last_time.elapsed() > QUIET || began.elapsed() > RUN_MAX {
            break;
        }
    }
    let last = samples[samples.len() - 1];
    let total = last.1 - held;
    let end = samples.iter().find(|sample| (sample.1 - held) * 100 >= total * 99).unwrap_or(&last);
    // A pass over memory in which nothing is left to merge.
    let (scans, idle_cpu) = (ksm::read("full_scans")?, cpu());
    std::thread::sleep(Duration::from_secs(3));
    let passes = (ksm::read("full_scans")? - scans).max(1) as f64;
    let idle_us = (cpu() - idle_cpu) as f64 / 1000.0 / passes / (shape.processes as f64 * shape.mib as f64 / 1024.0);
    ksm::write("run", 0)?;
    let after = crew.pss();
    crew.tell("check", "intact")?;
    drop(crew);
    settings.restore();
    Ok(Row {
        engine: format!("KSM, smart_scan {smart_scan}"),
        layout: shape.layout,
        processes: shape.processes,
        mib_each: shape.mib,
        workers: 1,
        pages_merged: total,
        wall_s: (end.0 - began).as_secs_f64(),
        cpu_s: (end.2 - cpu_start) as f64 / 1e9,
        memory_before_mib: before as f64 / 1048576.0,
        // Its records: 64 bytes for each page that it looks at, 64 for each shared one.
        memory_after_mib: after as f64 / 1048576.0 + (shape.processes * shape.mib * 256 * 64) as f64 / 1048576.0,
        metadata_bytes: shape.processes * shape.mib * 256 * 64,
        freeze_us_p99: f64::NAN,
        idle_pass_us_per_gib: idle_us,
    })
}

fn daemon(args: &[String]) -> Result<(), Failure> {
    let [socket, workers, predict] = args else { return Err("--daemon SOCKET WORKERS PREDICT".into()) };
    let daemon = Daemon::new(Config {
        socket: PathBuf::from(socket),
        workers: workers.parse()?,
        period: Duration::from_millis(500),
        pool_max_bytes: 1 << 40,
        vma_budget: 1 << 22,
        idle_priority: false,
        idle_exit: None,
        metrics: None,
        predict: predict == "1",
        cold: Default::default(),
    });
    Ok(daemon.run()?)
}

enum Held {
    Ours(Region),
    Plain(pagefold_os::mem::Mapping),
}

fn client(args: &[String]) -> Result<(), Failure> {
    let [layout, mib, number, socket @ ..] = args else { return Err("--client LAYOUT MIB NUMBER [SOCKET]".into()) };
    let (mib, number): (u64, u64) = (mib.parse()?, number.parse()?);
    let pages = mib * 256;
    let mut held = match socket.first() {
        Some(socket) => {
            Held::Ours(Region::new(&Client::connect(Path::new(socket), "bench")?, pages as usize * PAGE_SIZE)?)
        }
        None => Held::Plain(pagefold_os::mem::Mapping::anonymous(pages as usize * PAGE_SIZE)?),
    };
    let order = order(layout, pages, number);
    {
        let bytes = bytes(&mut held);
        for (place, id) in order.iter().enumerate() {
            fill(&mut bytes[place * PAGE_SIZE..][..PAGE_SIZE], *id, layout == "zero");
        }
    }
    println!("ready");
    for line in std::io::stdin().lock().lines() {
        match line?.as_str() {
            "merge" => {
                let bytes = bytes(&mut held);
                // SAFETY: the range is ours; merging keeps its content.
                unsafe { pagefold_os::mem::advise(bytes.as_ptr() as u64, bytes.len() as u64, libc::MADV_MERGEABLE) }?;
                println!("merging");
            }
            "check" => {
                let bytes = bytes(&mut held);
                let mut expected = vec![0; PAGE_SIZE];
                let right = order.iter().enumerate().all(|(place, id)| {
                    fill(&mut expected, *id, layout == "zero");
                    bytes[place * PAGE_SIZE..][..PAGE_SIZE] == expected[..]
                });
                println!("{}", if right { "intact" } else { "wrong" });
            }
            _ => break,
        }
    }
    Ok(())
}

fn bytes(held: &mut Held) -> &mut [u8] {
    match held {
        Held::Ours(region) => region,
        // SAFETY: the mapping is ours and lives as long as `held`.
        Held::Plain(map) => unsafe { std::slice::from_raw_parts_mut(map.as_ptr(), map.len()) },
    }
}

/// Which page's content lies at each place.
fn order(layout: &str, pages: u64, number: u64) -> Vec<u64> {
    let unit = if layout == "scattered" { 1 } else { FILE_PAGES };
    let mut units: Vec<u64> = (0..pages.div_ceil(unit)).collect();
    let mut random = (number + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    for index in (1..units.len()).rev() {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        units.swap(index, (random % (index as u64 + 1)) as usize);
    }
    units.iter().flat_map(|first| first * unit..(first * unit + unit).min(pages)).collect()
}

/// Writes the content of page `id`: random, after a prefix of zeros (0 to 256 bytes) if `zero`.
fn fill(page: &mut [u8], id: u64, zero: bool) {
    let mut state = (id + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    for word in page.chunks_exact_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        word.copy_from_slice(&state.to_le_bytes());
    }
    if zero {
        let prefix = (id.wrapping_mul(0xD134_2543_DE82_EF95) >> 40) as usize % 257;
        page[..prefix].fill(0);
    }
}
