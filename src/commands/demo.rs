//! `pagefold demo`: the main job, live, on real data, with nothing but this machine's own files.
//!
//! Several processes read the same files in different orders into private
//! memory. A daemon merges them; each process then compares every byte with the
//! files, writes to some shared pages, and compares again. As root the same is
//! done once more with the kernel's KSM.

use crate::error::Error;
use crate::output::{Progress, Style, Table, print, print_json};
use crate::{daemon_client, note, say, units};
use pagefold_daemon::control::{Answer, Request};
use pagefold_daemon::status::Status;
use pagefold_os::{ksm, procfs};
use pagefold_scan::Ksm;
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

const PAGE: usize = 4096;

/// Pause between two looks whether we are asked to end.
const LOOK_MS: i32 = 100;

/// How long memory must be silent before our daemon merges it: two of its periods.
const SILENCE_S: u64 = 2;

/// Longest time to wait for merging to come to rest.
const MERGE_MAX: Duration = Duration::from_secs(120);

/// See it work: real processes, merged live, beside the kernel's KSM
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  pagefold demo
  pagefold demo --processes 8 --size 256M --no-ksm
  pagefold demo --json

Nothing is left behind but the agent's file, also when interrupted; KSM's settings are put back.")]
pub struct Args {
    /// Processes to start
    #[arg(long, default_value = "4", value_name = "N", value_parser = processes)]
    processes: usize,
    /// Memory that each fills with the contents of this machine's files
    #[arg(long, default_value = "128M", value_name = "SIZE", value_parser = size)]
    size: u64,
    /// Leave the comparison with KSM out (it needs root)
    #[arg(long)]
    no_ksm: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn processes(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|count| (2..=64).contains(count)).ok_or_else(|| "takes 2 to 64".to_owned())
}

fn size(text: &str) -> Result<u64, String> {
    let size = units::size(text)?;
    if size >= 1 << 20 { Ok(size) } else { Err("takes at least 1 MiB".into()) }
}

/// One process of the demonstration: fills memory, then obeys lines on standard input
#[derive(clap::Args)]
pub struct ClientArgs {
    /// Bytes of memory
    size: u64,
    /// Order of the files
    seed: u64,
}

/// What one way of merging achieved.
#[derive(Clone, Debug, Serialize)]
struct Row {
    name: &'static str,
    before_bytes: u64,
    /// With all that merging itself keeps.
    after_bytes: u64,
    /// Of that: the daemon and the kernel's mappings, or KSM's records.
    own_bytes: u64,
    seconds: f64,
    cpu_seconds: f64,
    pages_merged: u64,
    intact: usize,
    processes: usize,
}

/// The signal by which we were asked to end; 0 for none.
static ASKED: AtomicI32 = AtomicI32::new(0);

extern "C" fn on_signal(signal: libc::c_int) {
    ASKED.store(signal, Ordering::Relaxed);
}

/// Has signals end us only once all is put back; a second one ends us at once.
fn heed_signals() {
    for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGTERM] {
        // SAFETY: all zeros is an action, which the kernel then fills; the handler only stores to an atomic.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            // A signal that the caller had ignored stays ignored, as nohup wants.
            if libc::sigaction(signal, std::ptr::null(), &mut action) == 0 && action.sa_sigaction != libc::SIG_IGN {
                action.sa_sigaction = on_signal as *const () as libc::sighandler_t;
                action.sa_flags = libc::SA_RESTART | libc::SA_RESETHAND;
                libc::sigaction(signal, &action, std::ptr::null_mut());
            }
        }
    }
}

/// To be called again and again by all that waits.
fn go_on() -> Result<(), Error> {
    if ASKED.load(Ordering::Relaxed) == 0 { Ok(()) } else { Err("interrupted".into()) }
}

/// Has the process of `command` get `signal` should we be killed. For the main thread: it is the end of the one that
/// starts it that counts.
fn end_with_us(command: &mut Command, signal: libc::c_int) -> &mut Command {
    let us = std::process::id() as libc::pid_t;
    // SAFETY: system calls alone between fork and exec.
    unsafe {
        command.pre_exec(move || {
            libc::prctl(libc::PR_SET_PDEATHSIG, signal as libc::c_ulong);
            // We may be gone already.
            if libc::getppid() != us {
                libc::_exit(1);
            }
            Ok(())
        })
    }
}

/// Runs the demonstration.
pub fn run(args: Args) -> Result<ExitCode, Error> {
    heed_signals();
    let done = demonstrate(&args);
    match ASKED.load(Ordering::Relaxed) {
        0 => done,
        signal => {
            // SAFETY: signal(2) sets the default action, so no handler of ours runs; raise(3) takes no pointer.
            unsafe {
                libc::signal(signal, libc::SIG_DFL);
                libc::raise(signal);
            }
            Ok(ExitCode::from(128 + signal as u8))
        }
    }
}

fn demonstrate(args: &Args) -> Result<ExitCode, Error> {
    let (available, _) = procfs::available_and_total();
    if args.size > available / 4 * 3 / args.processes as u64 {
        let (size, free) = (units::show_size(args.size), units::show_size(available));
        return Err(format!(
            "{} processes of {size} do not fit: {free} are free; use a smaller --size",
            args.processes
        )
        .into());
    }
    if let Some(lack) = pagefold_os::probe::all().into_iter().find(|finding| finding.needed && !finding.works) {
        return Err(format!("{}: {}; {}", lack.name, lack.detail, lack.cure).into());
    }
    let mut rows = vec![with_pagefold(args)?];
    // SAFETY: returns a number.
    let root = unsafe { libc::geteuid() } == 0;
    let why_no_ksm = match ksm::unused() {
        _ if args.no_ksm => None,
        _ if !root => Some("As root the kernel's KSM does the same beside it.".to_owned()),
        Err(error) => Some(format!("Without the kernel's KSM beside it: {error}.")),
        Ok(()) => {
            rows.push(with_ksm(args)?);
            None
        }
    };
    if args.json {
        print_json(&rows)?;
    } else {
        show(&rows, why_no_ksm)?;
    }
    let intact = rows.iter().all(|row| row.intact == row.processes);
    Ok(if intact { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Says how far it is, on standard error: results alone go to standard output.
macro_rules! tell {
    ($args:expr, $($arguments:tt)*) => {
        if !$args.json {
            note!($($arguments)*);
        }
    };
}

fn show(rows: &[Row], why_no_ksm: Option<String>) -> Result<(), Error> {
    let style = Style::stdout();
    say!("");
    let mut table = Table::new(style, &["", "before", "after", "time", "processor", "per page", "data"]);
    for row in rows {
        let data = if row.intact == row.processes { "intact".to_owned() } else { "WRONG".to_owned() };
        table.row([
            row.name.to_owned(),
            units::show_size(row.before_bytes),
            units::show_size(row.after_bytes),
            format!("{:.1} s", row.seconds),
            format!("{:.2} s", row.cpu_seconds),
            format!("{:.2} us", row.cpu_seconds * 1e6 / row.pages_merged.max(1) as f64),
            data,
        ]);
    }
    print(&table.render(0))?;
    let own = |row: &Row| match row.name {
        "KSM" => format!("KSM's records, {}", units::show_size(row.own_bytes)),
        _ => format!("{}'s daemon and mappings, {}", row.name, units::show_size(row.own_bytes)),
    };
    let own = rows.iter().map(own).collect::<Vec<_>>().join(", or ");
    say!("after: the processes and {own}");
    say!(
        "time: of pagefold's, {SILENCE_S} s are the silence that it waits for; per page: processor time per page merged"
    );
    if let Some(why) = why_no_ksm {
        say!("\n{why}");
    }
    say!("\nNow yours: pagefold run --manage all -- YOUR-PROGRAM, a few times, and pagefold status.");
    Ok(())
}

/// The processes, their pipes, and that they end with us.
struct Crew(Vec<(Child, ChildStdin, BufReader<ChildStdout>)>);

impl Crew {
    fn start(args: &Args, environment: &[(String, String)]) -> Result<Crew, Error> {
        let mut crew = Crew(Vec::new());
        for number in 0..args.processes {
            let mut command = Command::new(std::env::current_exe()?);
            command
                .args(["demo-client", &args.size.to_string(), &number.to_string()])
                .env_remove("LD_PRELOAD")
                .envs(environment.iter().cloned())
                .stdin(Stdio::piped())
                .stdout(Stdio::piped());
            let mut child = end_with_us(&mut command, libc::SIGKILL).spawn()?;
            let pipes = child.stdin.take().zip(child.stdout.take()).ok_or("no pipes")?;
            crew.0.push((child, pipes.0, BufReader::new(pipes.1)));
        }
        crew.answers("ready")?;
        Ok(crew)
    }

    fn tell(&mut self, line: &str) -> Result<(), Error> {
        for (_, input, _) in &mut self.0 {
            writeln!(input, "{line}")?;
        }
        Ok(())
    }

    /// Reads one line of each; returns how many begin with `wanted`.
    fn answers(&mut self, wanted: &str) -> Result<usize, Error> {
        let mut count = 0;
        for (child, _, output) in &mut self.0 {
            // Each answers by one line: nothing of it was read before.
            let mut answer = [libc::pollfd { fd: output.get_ref().as_raw_fd(), events: libc::POLLIN, revents: 0 }];
            while pagefold_os::fd::poll(&mut answer, LOOK_MS).map_err(std::io::Error::from)? == 0 {
                go_on()?;
            }
            let mut line = String::new();
            if output.read_line(&mut line)? == 0 {
                return Err(format!("process {} of the demonstration ended: {}", child.id(), child.wait()?).into());
            }
            count += usize::from(line.trim_end().starts_with(wanted));
        }
        Ok(count)
    }

    fn pss(&self) -> u64 {
        self.0.iter().filter_map(|(child, ..)| procfs::memory(child.id() as i32).ok()).map(|memory| memory.pss).sum()
    }

    fn check(&mut self) -> Result<usize, Error> {
        self.tell("check")?;
        self.answers("intact")
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        for (child, ..) in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A daemon of the demonstration's own.
struct OwnDaemon {
    child: Child,
    socket: PathBuf,
}

impl Drop for OwnDaemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        for end in ["", ".lock"] {
            let mut path = self.socket.clone().into_os_string();
            path.push(end);
            let _ = std::fs::remove_file(path);
        }
    }
}

fn with_pagefold(args: &Args) -> Result<Row, Error> {
    let socket = daemon_client::runtime_dir()?.join(format!("demo-{}.sock", std::process::id()));
    let mut command = Command::new(std::env::current_exe()?);
    command
        // What the file says is for another daemon: its addresses, for instance, are taken.
        .args([
            "daemon",
            "--config",
            "none",
            "--priority=normal",
            "--scan-interval",
            &format!("{}s", SILENCE_S / 2),
            "--socket",
        ])
        .arg(&socket)
        .env_remove("LD_PRELOAD")
        .stdin(Stdio::null());
    // In good order: it removes its socket.
    let child = end_with_us(&mut command, libc::SIGTERM).spawn()?;
    let mut daemon = OwnDaemon { child, socket };
    let mut ended = false;
    let decided = || {
        ended = daemon.child.try_wait().is_ok_and(|status| status.is_some());
        ended || daemon_client::status(&daemon.socket).is_ok()
    };
    wait_for(decided, daemon_client::DAEMON_START_MAX, "the daemon does not listen")?;
    if ended {
        return Err("the daemon has ended".into());
    }
    tell!(
        args,
        "{} processes fill {} each with the files of this machine, in different orders …",
        args.processes,
        units::show_size(args.size)
    );
    // The processes wait to be merged until all are full, so that before and after can be told.
    let mut crew = Crew::start(args, &daemon_client::environment(&daemon.socket, Some("demo"), false, None)?)?;
    let before_bytes = crew.pss();
    tell!(args, "{} in memory; merging …", units::show_size(before_bytes));
    crew.tell("merge")?;
    crew.answers("merging")?;
    let began = Instant::now();
    let (status, seconds) = settle(&daemon.socket, began)?;
    let own = procfs::memory(daemon.child.id() as i32).unwrap_or_default();
    let mapping_bytes: u64 = status.domains.iter().map(|domain| domain.mapping_bytes).sum();
    // Pool pages that the daemon maps are the processes' memory, whichever process the kernel charges.
    let own_bytes = own.pss - own.pss_shared_memory + mapping_bytes;
    let after_bytes = crew.pss() + own.pss + mapping_bytes;
    let merged = status.totals.pages_merged + status.totals.pages_zeroed;
    tell!(
        args,
        "{} after {seconds:.1} s: {} pages are mapped in {} places; comparing every byte …",
        units::show_size(after_bytes),
        units::show_count(status.totals.pages_shared),
        units::show_count(status.totals.pages_sharing)
    );
    let mut intact = crew.check()?;
    let Answer::Verified(verified) = daemon_client::ask(&daemon.socket, &Request::Verify {})? else {
        return Err("the daemon answered something else".into());
    };
    if !verified.wrong.is_empty() {
        return Err(format!(
            "{} of {} shared pages are wrong: {}",
            verified.wrong.len(),
            verified.pages,
            verified.wrong[0]
        )
        .into());
    }
    tell!(args, "every byte is right; each process writes to 1000 shared pages …");
    crew.tell("write 1000")?;
    crew.answers("written")?;
    intact = intact.min(crew.check()?);
    if intact == args.processes {
        tell!(args, "every byte is right again: each write went to its own process alone.");
    }
    Ok(Row {
        name: "pagefold",
        before_bytes,
        after_bytes,
        own_bytes,
        seconds,
        cpu_seconds: status.totals.cpu_ns as f64 / 1e9,
        pages_merged: merged,
        intact,
        processes: args.processes,
    })
}

/// Waits until nothing more is merged for three periods; returns the status and the time at which it came to rest.
fn settle(socket: &Path, began: Instant) -> Result<(Status, f64), Error> {
    let mut last = (0, began.elapsed());
    let mut progress = Progress::new("merging");
    loop {
        std::thread::sleep(Duration::from_millis(100));
        go_on()?;
        let status = daemon_client::status(socket)?;
        let totals = &status.totals;
        // What was looked at and found to have a twin, or none; the rest still changes or waits for its turn.
        let seen = totals.pages_sharing + totals.pages_zero + totals.pages_unshared;
        progress.update(seen * PAGE as u64, totals.pages.max(seen) * PAGE as u64);
        let merged = totals.pages_merged + totals.pages_zeroed;
        if merged != last.0 {
            last = (merged, began.elapsed());
        }
        let quiet = began.elapsed() - last.1;
        if last.0 > 0 && quiet > Duration::from_millis(3500) || began.elapsed() > MERGE_MAX {
            return Ok((status, last.1.as_secs_f64()));
        }
        if last.0 == 0 && began.elapsed() > Duration::from_secs(30) {
            let why = match status.unmanaged_processes.first() {
                Some(process) => process.reason.clone(),
                None if ksm::read("run").is_ok_and(|run| run == 1) => {
                    "KSM runs, which may have them already (echo 0 > /sys/kernel/mm/ksm/run)".to_owned()
                }
                None => "no reason known".to_owned(),
            };
            return Err(format!("nothing was merged in 30 s: {why}; pagefold doctor tells more").into());
        }
    }
}

/// KSM's nodes: one for each page it keeps, and one for each chain of equal ones.
fn ksm_nodes() -> u64 {
    let read = |name| ksm::read(name).unwrap_or(0).max(0) as u64;
    read("pages_shared") + read("stable_node_chains")
}

fn with_ksm(args: &Args) -> Result<Row, Error> {
    tell!(args, "");
    tell!(args, "The same with the kernel's KSM (pages_to_scan 1000000, sleep_millisecs 0) …");
    let mut settings = ksm::Settings::take()?;
    for (name, value) in [("run", 2), ("pages_to_scan", 1_000_000), ("sleep_millisecs", 0), ("use_zero_pages", 1)] {
        ksm::write(name, value)?;
    }
    let mut crew = Crew::start(args, &[])?;
    let before_bytes = crew.pss();
    let scanner = procfs::pids().into_iter().find(|pid| procfs::name(*pid).as_deref() == Some("ksmd"));
    let cpu = || scanner.and_then(procfs::cpu_ns).unwrap_or(0);
    let cpu_before = cpu();
    crew.tell("merge")?;
    crew.answers("merging")?;
    let sharing = || ksm::read("pages_sharing").unwrap_or(0).max(0) as u64;
    let (held, nodes) = (sharing(), ksm_nodes());
    let began = Instant::now();
    ksm::write("run", 1)?;
    let mut last = (held, began.elapsed(), cpu());
    while began.elapsed() < MERGE_MAX {
        std::thread::sleep(Duration::from_millis(100));
        go_on()?;
        let now = sharing();
        if now != last.0 {
            last = (now, began.elapsed(), cpu());
        }
        let scans = began.elapsed() - last.1;
        if last.0 > held && scans > Duration::from_millis(3500) {
            break;
        }
    }
    ksm::write("run", 0)?;
    // As `scan` bills it: a record for each page looked at, and a node for each kept.
    let items: u64 = crew.0.iter().filter_map(|(child, ..)| ksm::rmap_items(child.id() as i32)).sum();
    let own_bytes = (items + ksm_nodes().saturating_sub(nodes)) * Ksm::ITEM_BYTES;
    let after_bytes = crew.pss() + own_bytes;
    let intact = crew.check()?;
    let pages_merged = last.0 - held + ksm::read("pages_shared").unwrap_or(0).max(0) as u64;
    drop(crew);
    settings.restore();
    Ok(Row {
        name: "KSM",
        before_bytes,
        after_bytes,
        own_bytes,
        seconds: last.1.as_secs_f64(),
        cpu_seconds: (last.2 - cpu_before) as f64 / 1e9,
        pages_merged,
        intact,
        processes: args.processes,
    })
}

fn wait_for(mut ready: impl FnMut() -> bool, limit: Duration, what: &str) -> Result<(), Error> {
    let began = Instant::now();
    while !ready() {
        go_on()?;
        if began.elapsed() > limit {
            return Err(what.into());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// Runs one process of the demonstration.
pub fn client(args: ClientArgs) -> Result<ExitCode, Error> {
    let mut memory = Memory::fill(args.size as usize, args.seed)?;
    println!("ready");
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["merge"] => {
                memory.mergeable()?;
                println!("merging");
            }
            ["check"] => match memory.check()? {
                None => println!("intact"),
                Some(at) => println!("WRONG at page {at}"),
            },
            ["write", pages] => {
                memory.write(pages.parse()?);
                println!("written");
            }
            _ => return Err(format!("{line:?} is nothing this process does").into()),
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Memory filled with files, and what was written to it since.
struct Memory {
    bytes: &'static mut [u8],
    /// (file, first page, pages)
    files: Vec<(PathBuf, usize, usize)>,
    written: BTreeMap<usize, u64>,
    random: u64,
}

impl Memory {
    fn fill(size: usize, seed: u64) -> Result<Memory, Error> {
        let size = size / PAGE * PAGE;
        let mut files = files(size)?;
        // Fisher-Yates with an xorshift generator; the seed gives the order.
        let mut random = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        for index in (1..files.len()).rev() {
            files.swap(index, (next(&mut random) % (index as u64 + 1)) as usize);
        }
        // SAFETY: a fresh private mapping, used as bytes until the process ends.
        let bytes = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let at = libc::mmap(std::ptr::null_mut(), size, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
            if at == libc::MAP_FAILED {
                return Err(std::io::Error::last_os_error().into());
            }
            libc::madvise(at, size, libc::MADV_NOHUGEPAGE);
            std::slice::from_raw_parts_mut(at.cast::<u8>(), size)
        };
        let mut placed = Vec::new();
        let mut page = 0;
        for (path, len) in files {
            let pages = len.div_ceil(PAGE).min(size / PAGE - page);
            if pages == 0 {
                break;
            }
            let content = std::fs::read(&path).unwrap_or_default();
            let taken = content.len().min(pages * PAGE);
            bytes[page * PAGE..page * PAGE + taken].copy_from_slice(&content[..taken]);
            placed.push((path, page, pages));
            page += pages;
        }
        Ok(Memory { bytes, files: placed, written: BTreeMap::new(), random })
    }

    fn mergeable(&mut self) -> Result<(), Error> {
        // SAFETY: the range is ours; merging keeps its content.
        let done = unsafe { libc::madvise(self.bytes.as_mut_ptr().cast(), self.bytes.len(), libc::MADV_MERGEABLE) };
        if done == 0 { Ok(()) } else { Err(std::io::Error::last_os_error().into()) }
    }

    /// The first page that differs from the files and from what was written, if any.
    fn check(&self) -> Result<Option<usize>, Error> {
        for (path, first, pages) in &self.files {
            let mut expected = std::fs::read(path).unwrap_or_default();
            expected.resize(pages * PAGE, 0);
            for (page, value) in self.written.range(first..&(first + pages)) {
                expected[(page - first) * PAGE..][..8].copy_from_slice(&value.to_le_bytes());
            }
            let actual = &self.bytes[first * PAGE..][..pages * PAGE];
            if actual != expected {
                let wrong = actual.chunks(PAGE).zip(expected.chunks(PAGE)).position(|(a, e)| a != e).unwrap_or(0);
                return Ok(Some(first + wrong));
            }
        }
        Ok(None)
    }

    fn write(&mut self, pages: usize) {
        let used = self.files.last().map_or(0, |(_, first, pages)| first + pages).max(1) as u64;
        for _ in 0..pages {
            let page = (next(&mut self.random) % used) as usize;
            let value = next(&mut self.random);
            self.bytes[page * PAGE..][..8].copy_from_slice(&value.to_le_bytes());
            self.written.insert(page, value);
        }
    }
}

fn next(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

/// Files of this machine, `size` bytes of them, the same for every caller.
fn files(size: usize) -> Result<Vec<(PathBuf, usize)>, Error> {
    let mut found = Vec::new();
    let mut total = 0;
    let mut dirs: Vec<PathBuf> =
        ["/usr/lib", "/usr/bin", "/usr/share", "/usr/libexec", "/lib", "/opt"].map(PathBuf::from).into();
    dirs.reverse();
    while let Some(dir) = dirs.pop() {
        let mut entries: Vec<_> = std::fs::read_dir(&dir).into_iter().flatten().flatten().collect();
        entries.sort_by_key(std::fs::DirEntry::file_name);
        for entry in entries {
            let Ok(kind) = entry.file_type() else { continue };
            if kind.is_dir() {
                dirs.push(entry.path());
            } else if kind.is_file() {
                let len = entry.metadata().map(|meta| meta.len() as usize).unwrap_or(0);
                if len >= PAGE && std::fs::File::open(entry.path()).is_ok() {
                    found.push((entry.path(), len));
                    total += len.next_multiple_of(PAGE);
                }
            }
            if total >= size {
                return Ok(found);
            }
        }
    }
    if found.is_empty() { Err("this machine has no files to show it with".into()) } else { Ok(found) }
}
