//! Disk images through the deduplicated cache, beside plain files in the kernel's page cache, a plain FUSE
//! pass-through, and qcow2 overlays on one base.
//!
//! Three questions: how much memory N images take that differ by one package upgrade; how fast warm reads are; how
//! much is read from disk when several independent copies of a file are read with memory for one. Every read is
//! checked against the content by a checksum, so no row can win by reading something else.

mod files;
mod growth;
mod guests;
mod memory;
mod pressure;
mod reads;
mod server;
mod show;

use growth::growth;
use memory::memory;
use pressure::pressure;
use reads::reads;
use serde::Serialize;
use server::serve;
use show::show;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

type Failure = Box<dyn std::error::Error>;

const ROUNDS: usize = 5;
/// Slices of the time for warm reads.
const SLICES: usize = 60;
const THREADS: usize = 8;

struct Size {
    /// Where `bench/fetch-images.sh` put real packages, if anywhere.
    inputs: Option<PathBuf>,
    images: usize,
    tree_mib: u64,
    file_mib: usize,
    round: Duration,
    guests: guests::Size,
}

#[derive(Serialize, Default)]
struct Results {
    machine: Machine,
    memory: Vec<MemoryRow>,
    reads: Vec<ReadRow>,
    pressure: Vec<PressureRow>,
    growth: Vec<GrowthRow>,
    guests: guests::Results,
    skipped: Vec<String>,
}

/// Where and of what this was measured.
#[derive(Serialize, Default)]
struct Machine {
    kernel: String,
    processor: String,
    processors: usize,
    memory_bytes: u64,
    load_1_min: String,
    qemu: String,
    commit: String,
    arguments: Vec<String>,
}

impl Machine {
    fn look(args: &[String]) -> Self {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let first_line = |program: &str, args: &[&str]| {
            let output = Command::new(program).args(args).stdin(Stdio::null()).output();
            let text = output.map_or(String::new(), |output| String::from_utf8_lossy(&output.stdout).into_owned());
            text.lines().next().unwrap_or_default().to_owned()
        };
        let info = read("/proc/cpuinfo");
        let model = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
        Self {
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            processor: model.map_or(String::new(), |(_, name)| name.to_owned()),
            processors: std::thread::available_parallelism().map_or(0, std::num::NonZero::get),
            memory_bytes: pagefold_os::procfs::available_and_total().1,
            load_1_min: read("/proc/loadavg").split(' ').next().unwrap_or_default().to_owned(),
            qemu: first_line("qemu-system-x86_64", &["--version"]),
            commit: first_line("git", &["describe", "--always", "--dirty"]),
            arguments: args.to_vec(),
        }
    }
}

#[derive(Serialize)]
struct MemoryRow {
    what: String,
    name: String,
    images: usize,
    bytes: u64,
    unique_bytes: u64,
    over_unique_percent: f64,
}

#[derive(Serialize)]
struct ReadRow {
    name: String,
    random_4k_per_s: f64,
    random_spread_percent: f64,
    sequential_mib_per_s: f64,
    sequential_spread_percent: f64,
}

#[derive(Serialize)]
struct PressureRow {
    name: String,
    disk_read_bytes: u64,
    against_kernel_percent: f64,
    seconds: f64,
}

#[derive(Serialize)]
struct GrowthRow {
    what: String,
    value: u64,
    /// Reads or writes of 4 KiB a second.
    per_s: f64,
    spread_percent: f64,
    resident_bytes: u64,
    metadata_bytes: u64,
}

const HOST_PARTS: &[&str] = &["reads", "memory", "pressure", "growth"];

const USAGE: &str = "usage: pagefold bench pagecache [PART…] [--quick|--full] [--json] [--inputs DIR]

  PART          reads, memory, pressure, growth; with guests: sharing, overhead, front-ends, memory-for-one;
                all without it
  --quick       seconds to minutes: small images, two guests
  --full        files of a gigabyte, as the paper has them (half of one where four guests read)
  --inputs DIR  images of bench/fetch-images.sh instead of those that are made here
  --json        JSON instead of tables

Examples:
  pagefold bench pagecache reads --quick
  pagefold bench pagecache sharing overhead";

/// Entry point.
pub fn run(args: &[String]) -> ExitCode {
    let outcome = match args {
        [flag, kind, directory, at, cache, fingerprints, nbd] if flag == "--serve" => {
            serve(kind, Path::new(directory), Path::new(at), cache.parse().unwrap_or(64), fingerprints, nbd)
        }
        _ => {
            let words: Vec<&str> = HOST_PARTS.iter().chain(guests::PARTS).copied().collect();
            let flags = ["--quick", "--full", "--json"];
            if let Some(code) = crate::options::refuse(USAGE, args, &flags, &["--inputs"], &words) {
                return code;
            }
            measure(args)
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pagecache: {error}");
            ExitCode::FAILURE
        }
    }
}

const QUICK_GUESTS: guests::Size = guests::Size {
    guests: &[2],
    tree_mib: 16,
    rounds: 1,
    file_mib: 32,
    all_peers: false,
    ksm_alone: Duration::from_secs(10),
};
const GUESTS: guests::Size = guests::Size {
    guests: &[2, 3],
    tree_mib: 60,
    rounds: 4,
    file_mib: 128,
    all_peers: true,
    ksm_alone: Duration::from_secs(60),
};
// Four copies are more than the guests may have; with larger ones the disk takes a quarter of an hour.
const FULL_GUESTS: guests::Size = guests::Size { file_mib: 512, ..GUESTS };

fn measure(args: &[String]) -> Result<(), Failure> {
    let has = |flag: &str| args.iter().any(|arg| arg == flag);
    let inputs = args.iter().position(|arg| arg == "--inputs").and_then(|at| args.get(at + 1)).map(PathBuf::from);
    let size = if has("--full") {
        Size { inputs, images: 6, tree_mib: 400, file_mib: 1024, round: Duration::from_secs(2), guests: FULL_GUESTS }
    } else if has("--quick") {
        Size { inputs, images: 3, tree_mib: 40, file_mib: 64, round: Duration::from_millis(300), guests: QUICK_GUESTS }
    } else {
        Size { inputs, images: 4, tree_mib: 150, file_mib: 256, round: Duration::from_secs(1), guests: GUESTS }
    };
    let mut results = Results { machine: Machine::look(args), ..Results::default() };
    if !is_root() || !Path::new("/dev/fuse").exists() {
        eprintln!("SKIPPED: mounting needs root and /dev/fuse");
        crate::record::emit(serde_json::Value::Array(Vec::new()));
        return Ok(());
    }
    let scratch = Scratch::new()?;
    // Any part alone: `pagefold bench pagecache sharing --quick`.
    let any = HOST_PARTS.iter().chain(guests::PARTS).any(|part| has(part));
    let wanted = |part: &str| !any || has(part);
    if wanted("reads") {
        reads(&scratch, &size, &mut results)?;
    }
    if wanted("memory") {
        memory(&scratch, &size, &mut results)?;
    }
    if wanted("pressure") {
        pressure(&scratch, &size, &mut results)?;
    }
    if wanted("growth") {
        growth(&scratch, &size, &mut results)?;
    }
    if guests::PARTS.iter().any(|part| wanted(part)) {
        results.guests = guests::measure(&scratch, &size.guests, &wanted, &mut results.skipped)?;
    }
    crate::record::emit(serde_json::to_value(&results)?);
    if !has("--json") {
        show(&results);
    }
    match results.skipped.iter().find(|said| said.contains(guests::FAILED)) {
        Some(said) => Err(said.clone().into()),
        None => Ok(()),
    }
}

fn is_root() -> bool {
    // SAFETY: geteuid has no preconditions and cannot fail.
    unsafe { libc::geteuid() == 0 }
}

/// A directory on a real disk, gone with this value.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Result<Self, Failure> {
        let path = PathBuf::from(format!("/var/tmp/pagefold-bench-{}", std::process::id()));
        std::fs::create_dir(&path)?;
        Ok(Self(path))
    }

    fn dir(&self, name: &str) -> Result<PathBuf, Failure> {
        let path = self.0.join(name);
        std::fs::create_dir_all(&path)?;
        Ok(path)
    }
}

impl Scratch {
    /// The same files under another directory, for a second mount: one directory is served once.
    fn clone_of(&self, directory: &Path) -> Result<PathBuf, Failure> {
        let copy = self.dir("clone")?;
        for entry in std::fs::read_dir(directory)?.flatten() {
            let target = copy.join(entry.file_name());
            let _ = std::fs::remove_file(&target);
            std::fs::hard_link(entry.path(), target)?;
        }
        Ok(copy)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
