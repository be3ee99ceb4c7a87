//! How fast a dry run is, what it takes, and whether it is right: against a naive scan in one thread (a hash map
//! of page digests), and against KSM, which finds out by merging. All three look at the same processes, which
//! hold known data: pages in runs, shared between processes in other order, alone, twice, and zero.

use pagefold_os::fd::Fd;
use pagefold_os::mem::Mapping;
use pagefold_os::{ksm, procfs};
use pagefold_scan::{Config, Process, Source, scan};
use serde::Serialize;
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hasher};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

const PAGE: usize = pagefold_os::PAGE_SIZE;
/// Pages in a run.
const RUN: u64 = 16;

/// What is measured: processes and MiB of each.
struct Size {
    processes: u64,
    mib: u64,
    rounds: usize,
}

#[derive(Serialize)]
struct Row {
    name: String,
    seconds: f64,
    spread_percent: f64,
    pages_per_s: f64,
    bytes_per_page: Option<f64>,
    saved_pages: u64,
}

#[derive(Serialize)]
struct Results {
    processes: u64,
    mib_each: u64,
    pages: u64,
    /// Pages that one copy of each content saves, by construction of the data.
    saved_pages_by_construction: u64,
    rows: Vec<Row>,
    skipped: Vec<String>,
}

const USAGE: &str = "usage: pagefold bench scan [--quick|--full] [--json]

  --quick  3 processes of 64 MiB
  --full   12 processes of 512 MiB
  --json   JSON instead of a table

Examples:
  pagefold bench scan --quick";

/// Entry point.
pub fn run(args: &[String]) -> ExitCode {
    if let [flag, process, pages, mergeable] = args
        && flag == "--child"
        && let (Ok(process), Ok(pages)) = (process.parse(), pages.parse())
    {
        return child(process, pages, mergeable == "true");
    }
    if let [flag, workers, subjects @ ..] = args
        && flag == "--one"
        && let Ok(workers) = workers.parse()
    {
        return one(workers, subjects);
    }
    if let Some(code) = crate::options::refuse(USAGE, args, &["--quick", "--full", "--json"], &[], &[]) {
        return code;
    }
    let has = |flag: &str| args.iter().any(|arg| arg == flag);
    let size = if has("--quick") {
        Size { processes: 3, mib: 64, rounds: 5 }
    } else if has("--full") {
        Size { processes: 12, mib: 512, rounds: 5 }
    } else {
        Size { processes: 4, mib: 256, rounds: 5 }
    };
    match measure(&size) {
        Ok(results) => {
            crate::record::emit(serde_json::to_value(&results).expect("plain data"));
            if !has("--json") {
                print(&results);
            }
        }
        Err(error) => {
            eprintln!("scan: {error}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

fn print(results: &Results) {
    println!(
        "{} processes of {} MiB, {} pages; one copy of each content saves {} of them\n",
        results.processes, results.mib_each, results.pages, results.saved_pages_by_construction
    );
    println!(
        "{:<26} {:>9} {:>8} {:>14} {:>12} {:>12}",
        "", "seconds", "spread", "pages/s", "bytes/page", "saved pages"
    );
    for row in &results.rows {
        let memory = row.bytes_per_page.map_or("-".into(), |bytes| format!("{bytes:.1}"));
        println!(
            "{:<26} {:>9.3} {:>6.1} % {:>14.0} {:>12} {:>12}",
            row.name, row.seconds, row.spread_percent, row.pages_per_s, memory, row.saved_pages
        );
    }
    for skipped in &results.skipped {
        println!("SKIPPED: {skipped}");
    }
}

/// What page `page` of process `process` holds: 0 for zeros, else a number for the content.
fn content(process: u64, page: u64, pages: u64) -> u64 {
    let runs = pages / RUN;
    let (run, place) = (page / RUN, page % RUN);
    // Each process has the common runs in another order: a multiplier that is prime to any number of runs below it.
    let common = (run.wrapping_mul(1_000_003 + 2 * process) + process) % runs;
    let number = |kind: u64, run: u64| 1 + (kind << 56 | run << 8 | place);
    match run % 10 {
        0..=3 => number(1, common),
        4..=7 => number(2 + process, run),
        8 => number(2 + process, run - 4),
        _ => 0,
    }
}

/// A process that holds its part of the data until its standard input ends; KSM may merge it if it is `mergeable`.
fn child(process: u64, pages: u64, mergeable: bool) -> ExitCode {
    let Ok(mapping) = Mapping::anonymous(pages as usize * PAGE) else { return ExitCode::FAILURE };
    for page in 0..pages {
        let content = content(process, page, pages);
        let start = mapping.as_ptr().wrapping_add(page as usize * PAGE).cast::<u64>();
        for word in 0..PAGE as u64 / 8 {
            let value = if content == 0 { 0 } else { (content ^ word << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1 };
            // SAFETY: the word lies in the mapping, which is ours, readable and writable.
            unsafe { start.add(word as usize).write_volatile(value) };
        }
    }
    if mergeable {
        // SAFETY: numbers only. A kernel without KSM refuses, and the parent will see that nothing merges.
        unsafe { libc::prctl(libc::PR_SET_MEMORY_MERGE, 1, 0, 0, 0) };
    }
    println!("ready {:x} {:x}", mapping.addr(), mapping.len());
    let _ = std::io::stdout().flush();
    let _ = std::io::stdin().read_line(&mut String::new());
    ExitCode::SUCCESS
}

/// One scan in a process of its own, so that no memory of another is reused: ours, or naive with 0 workers.
/// Subjects are PID:START:LENGTH.
fn one(workers: usize, subjects: &[String]) -> ExitCode {
    let number = |text: Option<&str>| text.and_then(|text| text.parse().ok()).unwrap_or(0u64);
    let area = |text: &String| {
        let mut parts = text.split(':');
        Area { pid: number(parts.next()) as i32, start: number(parts.next()), len: number(parts.next()) }
    };
    let areas: Vec<Area> = subjects.iter().map(area).collect();
    let (seconds, result) = timed(|| if workers == 0 { naive(&areas) } else { ours(&areas, workers) });
    match result {
        Ok((saved, memory)) => println!("{seconds} {saved} {memory}"),
        Err(error) => {
            eprintln!("scan: {error}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

/// Where a subject's data is.
struct Area {
    pid: i32,
    start: u64,
    len: u64,
}

struct Subject {
    child: Child,
    start: u64,
    len: u64,
}

impl Subject {
    fn start(process: u64, pages: u64, mergeable: bool) -> std::io::Result<Subject> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["scan", "--child", &process.to_string(), &pages.to_string(), &mergeable.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().ok_or(std::io::ErrorKind::BrokenPipe)?).read_line(&mut line)?;
        let mut numbers = line.split(' ').skip(1).map(|hex| u64::from_str_radix(hex.trim(), 16).unwrap_or(0));
        let (start, len) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        Ok(Subject { child, start, len })
    }

    fn pid(&self) -> i32 {
        self.child.id() as i32
    }
}

impl Drop for Subject {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

type Error = Box<dyn std::error::Error>;

fn measure(size: &Size) -> Result<Results, Error> {
    let pages_each = (size.mib << 20) / PAGE as u64;
    // KSM of somebody else would merge our subjects, whose pages would then be no duplicates any more: it gets none.
    let settings = ksm::Settings::take();
    let subjects = (0..size.processes).map(|process| Subject::start(process, pages_each, settings.is_ok()));
    let subjects: Vec<Subject> = subjects.collect::<Result<_, _>>()?;
    let pages = pages_each * size.processes;
    let mut results = Results {
        processes: size.processes,
        mib_each: size.mib,
        pages,
        saved_pages_by_construction: by_construction(size.processes, pages_each),
        rows: Vec::new(),
        skipped: Vec::new(),
    };
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    // Side by side: one of each per round, so that a slow moment of the machine hits all of them.
    let workers: Vec<usize> = if cores > 1 { vec![1, cores] } else { vec![1] };
    let mut times = vec![Vec::new(); workers.len() + 1];
    let mut found = vec![(0, 0.0); workers.len() + 1];
    for _ in 0..size.rounds {
        for (at, &workers) in workers.iter().chain(&[0]).enumerate() {
            let (seconds, saved, memory) = apart(&subjects, workers)?;
            if saved.abs_diff(results.saved_pages_by_construction) > pages / 100 {
                return Err(format!("found {saved} pages to save: does somebody else run KSM meanwhile?").into());
            }
            times[at].push(seconds);
            found[at] = (saved, memory);
        }
    }
    let names = workers.iter().map(|workers| format!("pagefold scan, {workers} workers"));
    for (name, (times, (saved, memory))) in names.chain(["naive, 1 thread".into()]).zip(times.into_iter().zip(found)) {
        results.rows.push(row(name, times, pages, Some(memory / pages as f64), saved));
    }
    match settings.map_err(Error::from).and_then(|settings| by_ksm(size, &subjects, settings)) {
        Ok((times, saved)) => results.rows.push(row("KSM, until it is done".into(), times, pages, None, saved)),
        Err(error) => results.skipped.push(format!("KSM: {error}; it takes root, and a KSM that nobody else uses")),
    }
    Ok(results)
}

/// Runs [`one`] and returns its seconds, saved pages and bytes.
fn apart(subjects: &[Subject], workers: usize) -> Result<(f64, u64, f64), Error> {
    let areas = subjects.iter().map(|subject| format!("{}:{}:{}", subject.pid(), subject.start, subject.len));
    let mut command = Command::new(std::env::current_exe()?);
    let output = command.args(["scan", "--one", &workers.to_string()]).args(areas).output()?;
    let text = String::from_utf8(output.stdout)?;
    match text.split_whitespace().collect::<Vec<_>>().as_slice() {
        [seconds, saved, memory] => Ok((seconds.parse()?, saved.parse()?, memory.parse()?)),
        _ => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned().into()),
    }
}

fn timed<T>(f: impl FnOnce() -> T) -> (f64, T) {
    let began = Instant::now();
    let result = f();
    (began.elapsed().as_secs_f64(), result)
}

fn row(name: String, mut times: Vec<f64>, pages: u64, bytes_per_page: Option<f64>, saved_pages: u64) -> Row {
    times.sort_by(f64::total_cmp);
    let seconds = times[times.len() / 2];
    let spread_percent = (times[times.len() - 1] - times[0]) * 100.0 / seconds;
    Row { name, seconds, spread_percent, pages_per_s: pages as f64 / seconds, bytes_per_page, saved_pages }
}

fn by_construction(processes: u64, pages: u64) -> u64 {
    let mut contents = HashMap::new();
    for process in 0..processes {
        for page in 0..pages {
            *contents.entry(content(process, page, pages)).or_insert(0u64) += 1;
        }
    }
    // Zero pages need not one copy.
    contents.iter().map(|(&content, &copies)| if content == 0 { copies } else { copies - 1 }).sum()
}

/// Peak of our own memory while `f` runs, beyond what we had before, in bytes.
fn with_peak<T>(f: impl FnOnce() -> T) -> (T, f64) {
    let kib = |key| {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        procfs::field(&status, key).unwrap_or(0) as f64 * 1024.0
    };
    // Resets the peak.
    let _ = std::fs::write("/proc/self/clear_refs", "5");
    let before = kib("VmRSS");
    let result = f();
    (result, (kib("VmHWM") - before).max(0.0))
}

fn ours(areas: &[Area], workers: usize) -> Result<(u64, f64), Error> {
    let mut sources: Vec<Box<dyn Source>> = Vec::new();
    for area in areas {
        sources.push(Box::new(Process::new(area.pid)?));
    }
    let config = Config { workers, map_budget: u64::MAX, ..Config::default() };
    let (report, memory) = with_peak(|| scan(sources, &config, &mut |_| {}));
    if let Some(note) = report.notes.first() {
        return Err(format!("{}: {}", note.name, note.what).into());
    }
    Ok(((report.cost.saved_duplicate_bytes + report.cost.saved_zero_bytes) / PAGE as u64, memory))
}

/// What one would write first: read, hash with the standard library, count in its hash map.
fn naive(areas: &[Area]) -> Result<(u64, f64), Error> {
    let (result, memory) = with_peak(|| -> Result<u64, Error> {
        let mut buffer = vec![0; 1 << 20];
        let mut seen: HashMap<u64, u64> = HashMap::new();
        let mut saved = 0;
        for area in areas {
            let mem = Fd::open(&std::ffi::CString::new(format!("/proc/{}/mem", area.pid))?, libc::O_RDONLY, 0)?;
            let mut at = area.start;
            while at < area.start + area.len {
                let got = mem.read_at(&mut buffer, at)?;
                if got == 0 {
                    return Err("the process is gone".into());
                }
                for page in buffer[..got].chunks_exact(PAGE) {
                    if page.iter().all(|&byte| byte == 0) {
                        saved += 1;
                        continue;
                    }
                    let mut hasher = DefaultHasher::new();
                    hasher.write(page);
                    let copies = seen.entry(hasher.finish()).or_insert(0);
                    saved += u64::from(*copies > 0);
                    *copies += 1;
                }
                at += got as u64;
            }
        }
        Ok(saved)
    });
    Ok((result?, memory))
}

/// Lets KSM, which was taken, merge the processes, from nothing until a full scan brings nothing more.
fn by_ksm(size: &Size, subjects: &[Subject], _taken: ksm::Settings) -> Result<(Vec<f64>, u64), Error> {
    let sharing = || Ok::<_, std::io::Error>(ksm::read("pages_sharing")? + ksm::read("ksm_zero_pages").unwrap_or(0));
    let mut times = Vec::new();
    let mut saved = 0;
    for _ in 0..size.rounds {
        ksm::write("run", 2)?;
        for (name, value) in
            [("pages_to_scan", 1_000_000), ("sleep_millisecs", 0), ("use_zero_pages", 1), ("smart_scan", 0)]
        {
            // Older kernels lack the last two.
            let _ = ksm::write(name, value);
        }
        let before = sharing()?;
        let began = Instant::now();
        ksm::write("run", 1)?;
        let (mut last, mut last_scans) = (before, ksm::read("full_scans")?);
        let mut done = began.elapsed();
        while began.elapsed() < Duration::from_secs(300) {
            std::thread::sleep(Duration::from_millis(5));
            let (now, scans) = (sharing()?, ksm::read("full_scans")?);
            if now != last {
                done = began.elapsed();
                (last, last_scans) = (now, scans);
            } else if scans >= last_scans + 2 {
                break;
            }
        }
        if last <= before {
            return Err("nothing merged".into());
        }
        times.push(done.as_secs_f64());
        saved = (last - before).unsigned_abs();
    }
    // Its own end is checked so that a process that died midway is no result.
    let alive = subjects.iter().all(|subject| procfs::memory(subject.pid()).is_ok());
    if alive { Ok((times, saved)) } else { Err("a process ended".into()) }
}
