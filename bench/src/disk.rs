//! Disk images through the deduplicated cache, beside plain files in the kernel's page cache, a plain FUSE
//! pass-through, and qcow2 overlays on one base.
//!
//! Three questions: how much memory N images take that differ by one package upgrade; how fast warm reads are; how
//! much is read from disk when several independent copies of a file are read with memory for one. Every read is
//! checked against the content by a checksum, so no row can win by reading something else.

mod guests;

use fuser::{
    Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, KernelConfig, OpenFlags,
    ReplyAttr, ReplyData, ReplyEntry, ReplyOpen, Request,
};
use pagefold_disk::control;
use pagefold_disk::mount::{self, Options};
use pagefold_disk::{Config, Status};
use serde::Serialize;
use std::cell::RefCell;
use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant, UNIX_EPOCH};

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

// ---- the servers ----

/// A mount in another process, gone with this value.
struct Server {
    child: Child,
    at: PathBuf,
    runtime: PathBuf,
}

impl Server {
    fn start(
        scratch: &Scratch,
        kind: &str,
        directory: &Path,
        cache_mib: usize,
        fingerprints: Option<&Path>,
    ) -> Result<Self, Failure> {
        Self::start_in(scratch, kind, directory, cache_mib, fingerprints, None)
    }

    /// Another cache beside the first, at a mount point named `name`.
    fn start_at(scratch: &Scratch, name: &str, directory: &Path, cache_mib: usize) -> Result<Self, Failure> {
        let inner = Scratch(scratch.dir(name)?);
        let server = Self::start(&inner, "cache", directory, cache_mib, None);
        // Its directory goes with the outer one, after the mount.
        std::mem::forget(inner);
        server
    }

    /// The cache, with a socket for NBD.
    fn start_with_nbd(scratch: &Scratch, directory: &Path, cache_mib: usize, nbd: &Path) -> Result<Self, Failure> {
        Self::start_as(scratch, "cache", directory, cache_mib, None, None, Some(nbd), &[])
    }

    /// The cache, run by `under`.
    fn start_under(scratch: &Scratch, directory: &Path, cache_mib: usize, under: &[String]) -> Result<Self, Failure> {
        Self::start_as(scratch, "cache", directory, cache_mib, None, None, None, under)
    }

    /// The same, charged to a control group.
    fn start_in(
        scratch: &Scratch,
        kind: &str,
        directory: &Path,
        cache_mib: usize,
        fingerprints: Option<&Path>,
        group: Option<&Path>,
    ) -> Result<Self, Failure> {
        Self::start_as(scratch, kind, directory, cache_mib, fingerprints, group, None, &[])
    }

    #[allow(clippy::too_many_arguments, reason = "the settings of a mount, spelled out")]
    fn start_as(
        scratch: &Scratch,
        kind: &str,
        directory: &Path,
        cache_mib: usize,
        fingerprints: Option<&Path>,
        group: Option<&Path>,
        nbd: Option<&Path>,
        under: &[String],
    ) -> Result<Self, Failure> {
        let at = scratch.dir(&format!("mnt-{kind}"))?;
        let runtime = scratch.dir("run")?;
        let text = |path: Option<&Path>| path.map_or(String::new(), |path| path.display().to_string());
        let (fingerprints, nbd) = (text(fingerprints), text(nbd));
        let own = std::env::current_exe()?;
        let mut command = match under.split_first() {
            None => Command::new(own),
            Some((program, args)) => {
                let mut command = Command::new(program);
                command.args(args).arg(own);
                command
            }
        };
        command.args(["pagecache", "--serve", kind]).args([directory, &at]).args([
            cache_mib.to_string(),
            fingerprints,
            nbd,
        ]);
        if let Some(group) = group {
            crate::vm::join_group(&mut command, group);
        }
        let child = command.env("PAGEFOLD_RUNTIME_DIR", &runtime).stdin(Stdio::null()).spawn()?;
        let mut server = Self { child, at, runtime };
        let device = server.at.parent().ok_or("no parent")?.metadata()?.dev();
        let started = Instant::now();
        while server.at.metadata()?.dev() == device || (kind == "cache" && server.status().is_err()) {
            if server.child.try_wait()?.is_some() || started.elapsed() > Duration::from_secs(20) {
                return Err(format!("the {kind} server does not come up").into());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(server)
    }

    fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    fn status(&self) -> Result<Status, Failure> {
        let name = control::socket_path(&self.at);
        let name = name.file_name().ok_or("no name")?;
        Ok(control::ask_status(&self.runtime.join(name))?)
    }

    /// Memory of the process beyond what an idle one has: resident anonymous bytes.
    fn anonymous_bytes(&self) -> Result<u64, Failure> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).ok_or("no RssAnon")?;
        Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? << 10)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The signal that asks: fingerprints are kept at a clean end.
        // SAFETY: the child is ours and not reaped yet, so its id is still its own.
        unsafe { libc::kill(self.child.id() as i32, libc::SIGTERM) };
        let _ = self.child.wait();
        let _ = mount::unmount(&self.at, true);
    }
}

fn serve(
    kind: &str,
    directory: &Path,
    at: &Path,
    cache_mib: usize,
    fingerprints: &str,
    nbd: &str,
) -> Result<(), Failure> {
    if kind == "plain" {
        return serve_plain(directory, at);
    }
    let options = Options {
        directory: directory.to_owned(),
        mountpoint: at.to_owned(),
        config: Config {
            cache_bytes: cache_mib << 20,
            // Under `pagefold run`, as the tool's own mount does.
            merge: std::env::var_os("PAGEFOLD_SOCKET").is_some(),
            ..Config::default()
        },
        threads: THREADS,
        fingerprints: (!fingerprints.is_empty()).then(|| PathBuf::from(fingerprints)),
        read_only: false,
        allow_other: false,
        nbd: (!nbd.is_empty()).then(|| PathBuf::from(nbd)),
        grace: Duration::from_secs(1),
    };
    Ok(mount::serve(&options, |_| ())?)
}

/// The plain peer: hands every read on to the file below, with the same threads and flags.
struct Plain {
    files: Vec<(std::ffi::OsString, File)>,
}

thread_local! {
    static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

impl Plain {
    fn attr(&self, number: u64) -> Option<FileAttr> {
        let (size, kind) = match number {
            1 => (0, FileType::Directory),
            n => (self.files.get(n as usize - 2)?.1.metadata().ok()?.len(), FileType::RegularFile),
        };
        Some(FileAttr {
            ino: INodeNo(number),
            size,
            blocks: size / 512,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind,
            perm: 0o755,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }
}

impl Filesystem for Plain {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> std::io::Result<()> {
        let _ = config.add_capabilities(fuser::InitFlags::FUSE_ASYNC_DIO);
        let _ = config.set_max_write(1 << 20);
        let _ = config.set_max_background(64);
        Ok(())
    }

    fn lookup(&self, _request: &Request, _parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let at = self.files.iter().position(|(file, _)| file == name);
        match at.and_then(|at| self.attr(at as u64 + 2)) {
            Some(attr) => reply.entry(&Duration::from_secs(1), &attr, Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _request: &Request, number: INodeNo, _handle: Option<FileHandle>, reply: ReplyAttr) {
        match self.attr(number.0) {
            Some(attr) => reply.attr(&Duration::from_secs(1), &attr),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn open(&self, _request: &Request, number: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(number.0), FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES);
    }

    fn read(
        &self,
        _request: &Request,
        _number: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _owner: Option<fuser::LockOwner>,
        reply: ReplyData,
    ) {
        BUFFER.with_borrow_mut(|buffer| {
            if buffer.len() < size as usize {
                buffer.resize(size as usize, 0);
            }
            match self.files[handle.0 as usize - 2].1.read_at(&mut buffer[..size as usize], offset) {
                Ok(count) => reply.data(&buffer[..count]),
                Err(_) => reply.error(Errno::EIO),
            }
        });
    }
}

fn serve_plain(directory: &Path, at: &Path) -> Result<(), Failure> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        files.push((entry.file_name(), File::open(entry.path())?));
    }
    let mut config = fuser::Config::default();
    config.n_threads = Some(THREADS);
    config.clone_fd = true;
    config.mount_options = vec![fuser::MountOption::FSName("plain".to_owned())];
    Ok(fuser::mount(Plain { files }, at, &config)?)
}

// ---- helpers ----

fn xorshift(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

fn random_file(path: &Path, mib: usize, seed: u64) -> Result<(), Failure> {
    use std::io::Write;
    let mut state = seed | 1;
    let mut file = File::create(path)?;
    let mut buffer = vec![0; 1 << 20];
    for _ in 0..mib {
        buffer.chunks_mut(8).for_each(|word| word.copy_from_slice(&xorshift(&mut state).to_le_bytes()));
        file.write_all(&buffer)?;
    }
    Ok(file.sync_all()?)
}

/// Takes a file out of the kernel's page cache.
fn drop_cached(path: &Path) -> Result<(), Failure> {
    let file = File::open(path)?;
    file.sync_all()?;
    // SAFETY: the descriptor is open for the call; the advice changes no content.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    Ok(())
}

/// Bytes of a file in the kernel's page cache now.
fn cached_bytes(path: &Path) -> Result<u64, Failure> {
    let file = File::open(path)?;
    let length = file.metadata()?.len() as usize;
    if length == 0 {
        return Ok(0);
    }
    // SAFETY: a fresh read-only mapping of a file nobody cuts while we look; never read, only asked about.
    let resident = unsafe {
        let base = libc::mmap(std::ptr::null_mut(), length, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0);
        if base == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error().into());
        }
        let mut pages = vec![0u8; length.div_ceil(4096)];
        let result = libc::mincore(base, length, pages.as_mut_ptr());
        libc::munmap(base, length);
        if result != 0 {
            return Err(std::io::Error::last_os_error().into());
        }
        pages.iter().filter(|&&page| page & 1 == 1).count()
    };
    Ok(resident as u64 * 4096)
}

/// Reads what a file holds besides holes, in 1 MiB pieces; returns a checksum of it. A guest does not read its free
/// space either, and the kernel would keep pages of zeros for it.
fn read_data(path: &Path) -> Result<u64, Failure> {
    let file = File::open(path)?;
    let end = file.metadata()?.len();
    let mut buffer = vec![0; 1 << 20];
    let (mut sum, mut at) = (0u64, 0);
    // SAFETY: the descriptor is open for both calls; seeking touches no memory.
    let seek = |from: u64, whence| unsafe { libc::lseek(file.as_raw_fd(), from as i64, whence) };
    while at < end {
        let data = seek(at, libc::SEEK_DATA);
        if data < 0 {
            break;
        }
        let hole = u64::try_from(seek(data as u64, libc::SEEK_HOLE))?;
        at = data as u64;
        while at < hole {
            let part = (hole - at).min(1 << 20) as usize;
            file.read_exact_at(&mut buffer[..part], at)?;
            let words = buffer[..part].chunks_exact(8).map(|w| u64::from_le_bytes(w.try_into().expect("8 bytes")));
            sum = words.fold(sum, |sum, word| sum.rotate_left(5) ^ word);
            at += part as u64;
        }
    }
    Ok(sum)
}

/// Reads a whole file in 1 MiB pieces; returns a checksum of it.
fn read_through(path: &Path) -> Result<u64, Failure> {
    let mut file = File::open(path)?;
    let mut buffer = vec![0; 1 << 20];
    let mut sum = 0u64;
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(sum),
            count => {
                let words = buffer[..count].chunks_exact(8).map(|w| u64::from_le_bytes(w.try_into().expect("8 bytes")));
                sum = words.fold(sum, |sum, word| sum.rotate_left(5) ^ word);
            }
        }
    }
}

/// Median and spread (half of the range, in percent of the median).
fn summary(mut samples: Vec<f64>) -> (f64, f64) {
    samples.sort_by(f64::total_cmp);
    let median = samples[samples.len() / 2];
    (median, 50.0 * (samples[samples.len() - 1] - samples[0]) / median)
}

/// Median and spread of many samples (half of what lies between the quartiles, in percent of the median).
fn middle(mut samples: Vec<f64>) -> (f64, f64) {
    samples.sort_by(f64::total_cmp);
    let at = |part: usize| samples[samples.len() * part / 4];
    (at(2), 50.0 * (at(3) - at(1)) / at(2))
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn tool(program: &str, args: &[&str]) -> Result<(), Failure> {
    let output = Command::new(program).args(args).stdin(Stdio::null()).output()?;
    if output.status.success() {
        Ok(())
    } else {
        Err(format!("{program}: {}", String::from_utf8_lossy(&output.stderr)).into())
    }
}

// ---- warm reads ----

fn random_reads(path: &Path, time: Duration) -> Result<f64, Failure> {
    let file = File::open(path)?;
    let blocks = file.metadata()?.len() / 4096;
    let mut state = 0x1234_5678_9abc_def1;
    let mut buffer = [0; 4096];
    let started = Instant::now();
    let mut count = 0u64;
    while started.elapsed() < time {
        for _ in 0..64 {
            file.read_exact_at(&mut buffer, xorshift(&mut state) % blocks * 4096)?;
        }
        count += 64;
    }
    Ok(count as f64 / started.elapsed().as_secs_f64())
}

fn sequential_reads(path: &Path, time: Duration) -> Result<f64, Failure> {
    let file = File::open(path)?;
    let size = file.metadata()?.len();
    let mut buffer = vec![0; 1 << 20];
    let started = Instant::now();
    let (mut at, mut bytes) = (0, 0u64);
    while started.elapsed() < time {
        file.read_exact_at(&mut buffer, at)?;
        at = (at + (1 << 20)) % size;
        bytes += 1 << 20;
    }
    Ok(mib(bytes) / started.elapsed().as_secs_f64())
}

/// Reads a file in single blocks in a random order, so that no two neighbours lie beside each other in a cache.
fn read_in_pieces(path: &Path) -> Result<(), Failure> {
    let file = File::open(path)?;
    let blocks = file.metadata()?.len() / 4096;
    let mut buffer = [0; 4096];
    let mut at = 0;
    for _ in 0..blocks {
        // A step without a common divisor with the count passes by every block once.
        at = (at + 7_368_787) % blocks;
        file.read_exact_at(&mut buffer, at * 4096)?;
    }
    Ok(())
}

fn reads(scratch: &Scratch, size: &Size, results: &mut Results) -> Result<(), Failure> {
    let directory = scratch.dir("reads")?;
    let path = directory.join("image");
    random_file(&path, size.file_mib, 7)?;
    let ours = Server::start(scratch, "cache", &directory, size.file_mib + 64, None)?;
    let plain = Server::start(scratch, "plain", &directory, 0, None)?;
    let scattered = Server::start_at(scratch, "scattered", &scratch.clone_of(&directory)?, size.file_mib + 64)?;
    read_in_pieces(&scattered.at.join("image"))?;
    let places = [
        ("plain file, kernel's page cache", path.clone()),
        ("plain FUSE pass-through", plain.at.join("image")),
        ("pagefold disk", ours.at.join("image")),
        ("pagefold disk, blocks brought in at random", scattered.at.join("image")),
    ];
    let sums: Vec<u64> = places.iter().map(|(_, place)| read_through(place)).collect::<Result<_, _>>()?;
    if sums.windows(2).any(|pair| pair[0] != pair[1]) {
        return Err("the three ways give different bytes".into());
    }
    let mut samples = places.each_ref().map(|_| (Vec::new(), Vec::new()));
    // In turn and in short slices, so that a disturbance hits all of them, and few slices of each.
    let slice = size.round / SLICES as u32 * 2;
    for _ in 0..SLICES {
        for ((_, place), samples) in places.iter().zip(&mut samples) {
            samples.0.push(random_reads(place, slice)?);
            samples.1.push(sequential_reads(place, slice)?);
        }
    }
    for ((name, _), (random, sequential)) in places.into_iter().zip(samples) {
        let (random_4k_per_s, random_spread_percent) = middle(random);
        let (sequential_mib_per_s, sequential_spread_percent) = middle(sequential);
        results.reads.push(ReadRow {
            name: name.to_owned(),
            random_4k_per_s,
            random_spread_percent,
            sequential_mib_per_s,
            sequential_spread_percent,
        });
    }
    Ok(())
}

// ---- memory for images that differ by an upgrade ----

/// Copies files of this system into `to` until there are `mib` of them: real content, the same for every image.
fn copy_tree(to: &Path, mib: u64) -> Result<Vec<PathBuf>, Failure> {
    let mut copied = Vec::new();
    let mut bytes = 0;
    let mut pending =
        vec![PathBuf::from("/usr/bin"), PathBuf::from("/usr/lib/x86_64-linux-gnu"), PathBuf::from("/usr/share")];
    pending.reverse();
    while let Some(directory) = pending.pop() {
        let Ok(entries) = std::fs::read_dir(&directory) else { continue };
        let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        paths.sort();
        for path in paths {
            let Ok(metadata) = path.symlink_metadata() else { continue };
            if metadata.is_dir() {
                pending.push(path);
            } else if metadata.is_file() && metadata.len() < 32 << 20 {
                let target = to.join(format!("{:05}", copied.len()));
                if std::fs::copy(&path, &target).is_ok() {
                    bytes += metadata.len();
                    copied.push(target);
                }
            }
            if bytes >= mib << 20 {
                return Ok(copied);
            }
        }
    }
    Ok(copied)
}

/// Makes the images: image n is installed apart, after one package (every 20th file) was upgraded to version n.
fn make_images(scratch: &Scratch, size: &Size) -> Result<(PathBuf, Vec<PathBuf>), Failure> {
    let tree = scratch.dir("tree")?;
    let directory = scratch.dir("images")?;
    let files = copy_tree(&tree, size.tree_mib)?;
    let mut images = Vec::new();
    for n in 0..size.images {
        for (at, file) in files.iter().enumerate().filter(|(at, _)| at % 20 == 7) {
            let mut bytes = std::fs::read(file)?;
            // Longer than before and different from the middle on, as a rebuilt program is.
            let mut state = (n * 1_000_003 + at + 1) as u64;
            let half = bytes.len() / 2;
            bytes[half..].chunks_mut(8).for_each(|word| {
                let fresh = xorshift(&mut state).to_le_bytes();
                word.copy_from_slice(&fresh[..word.len()]);
            });
            bytes.extend(std::iter::repeat_n(n as u8 + 1, 5000));
            std::fs::write(file, bytes)?;
        }
        let image = directory.join(format!("image{n}.raw"));
        let blocks = format!("{}", (size.tree_mib * 3 / 2 + 64) * 256);
        let tree = tree.display().to_string();
        tool("mke2fs", &["-q", "-t", "ext4", "-b", "4096", "-d", &tree, &image.display().to_string(), &blocks])?;
        images.push(image);
    }
    std::fs::remove_dir_all(tree)?;
    Ok((directory, images))
}

fn memory(scratch: &Scratch, size: &Size, results: &mut Results) -> Result<(), Failure> {
    match make_images(scratch, size) {
        Ok((directory, images)) => {
            memory_of(scratch, "files of this system, every 20th rebuilt", &directory, &images, results)?;
            std::fs::remove_dir_all(directory)?;
        }
        Err(error) => results.skipped.push(format!("memory of images: {error}")),
    }
    let Some(inputs) = &size.inputs else {
        results.skipped.push("memory of real packages: bench/fetch-images.sh DIR, then --inputs DIR".to_owned());
        return Ok(());
    };
    for name in ["redis", "nginx", "mariadb", "postgres"] {
        match upgraded_images(scratch, inputs, name) {
            Ok((directory, images)) => {
                memory_of(scratch, &format!("Debian with {name}, two versions"), &directory, &images, results)?;
                std::fs::remove_dir_all(directory)?;
            }
            Err(error) => results.skipped.push(format!("memory of {name}: {error}")),
        }
    }
    Ok(())
}

/// Disk images of a Debian root with each version of a package, as `bench/fetch-images.sh` fetched them.
fn upgraded_images(scratch: &Scratch, inputs: &Path, name: &str) -> Result<(PathBuf, Vec<PathBuf>), Failure> {
    let directory = scratch.dir(&format!("real-{name}"))?;
    let merged = scratch.dir("merged")?;
    let mut images = Vec::new();
    for version in [1, 2] {
        let (base, layer) = (inputs.join("base"), inputs.join(format!("layers/{name}-{version}")));
        if !layer.is_dir() {
            return Err(format!("{} is not there", layer.display()).into());
        }
        let at = merged.display().to_string();
        let layers = format!("lowerdir={}:{}", layer.display(), base.display());
        tool("mount", &["-t", "overlay", "-o", &layers, "pagefold-bench", &at])?;
        let image = directory.join(format!("{name}{version}.raw"));
        let made = tool("mke2fs", &["-q", "-t", "ext4", "-b", "4096", "-d", &at, &image.display().to_string(), "1G"]);
        tool("umount", &[&at])?;
        made?;
        images.push(image);
    }
    Ok((directory, images))
}

/// All images read through the kernel's page cache, as overlays on one base, and through the mount.
fn memory_of(
    scratch: &Scratch,
    what: &str,
    directory: &Path,
    images: &[PathBuf],
    results: &mut Results,
) -> Result<(), Failure> {
    let report = pagefold_disk::scan::scan(images, |_, _| ());
    let unique_bytes = report.equal.first().ok_or("an empty scan")?.unique_bytes;
    let mut row = |name: &str, bytes: u64| {
        results.memory.push(MemoryRow {
            what: what.to_owned(),
            name: name.to_owned(),
            images: images.len(),
            bytes,
            unique_bytes,
            over_unique_percent: 100.0 * (bytes as f64 / unique_bytes as f64 - 1.0),
        });
    };
    let mut sums = Vec::new();
    let mut kernel = 0;
    for image in images {
        drop_cached(image)?;
        sums.push(read_data(image)?);
        kernel += cached_bytes(image)?;
    }
    row("plain files, kernel's page cache", kernel);
    if let Ok(bytes) = overlays(scratch, images) {
        row("qcow2 overlays on one base (clones only)", bytes);
    }
    images.iter().try_for_each(|image| drop_cached(image))?;
    let cache_mib = (unique_bytes >> 20) as usize + 64;
    let server = Server::start(scratch, "cache", directory, cache_mib, None)?;
    let idle = server.anonymous_bytes()?;
    for (image, sum) in images.iter().zip(&sums) {
        let name = image.file_name().ok_or("no name")?;
        if read_data(&server.at.join(name))? != *sum {
            return Err("the mount gives other bytes than the file".into());
        }
    }
    let status = server.status()?;
    let kept: u64 = images.iter().map(|image| cached_bytes(image)).sum::<Result<u64, _>>()?;
    row("pagefold disk: blocks and bookkeeping", status.resident_bytes + status.metadata_bytes + kept);
    row("pagefold disk: growth of the process", server.anonymous_bytes()?.saturating_sub(idle) + kept);
    Ok(())
}

/// What the page cache would hold of a base and of overlays with the clusters that differ, all read.
fn overlays(scratch: &Scratch, images: &[PathBuf]) -> Result<u64, Failure> {
    let directory = scratch.dir("overlays")?;
    let base = images[0].display().to_string();
    let mut bytes = cached_bytes(&images[0])?;
    for (n, image) in images.iter().enumerate().skip(1) {
        let overlay = directory.join(format!("{n}.qcow2"));
        let (from, to) = (image.display().to_string(), overlay.display().to_string());
        tool("qemu-img", &["convert", "-f", "raw", "-O", "qcow2", "-B", &base, "-F", "raw", &from, &to])?;
        drop_cached(&overlay)?;
        read_data(&overlay)?;
        bytes += cached_bytes(&overlay)?;
    }
    std::fs::remove_dir_all(directory)?;
    Ok(bytes)
}

// ---- independent copies with memory for one ----

const READERS: usize = 4;
const PASSES: usize = 2;

fn pressure(scratch: &Scratch, size: &Size, results: &mut Results) -> Result<(), Failure> {
    let directory = scratch.dir("copies")?;
    let copies: Vec<PathBuf> = (0..READERS).map(|n| directory.join(format!("copy{n}"))).collect();
    random_file(&copies[0], size.file_mib, 99)?;
    for copy in &copies[1..] {
        std::fs::copy(&copies[0], copy)?;
        drop_cached(copy)?;
    }
    let sum = read_through(&copies[0])?;
    let limit_mib = size.file_mib + size.file_mib / 4;
    let cold = || copies.iter().try_for_each(|copy| drop_cached(copy));

    cold()?;
    let kernel = match limited_reads(&copies, limit_mib, sum) {
        Ok((bytes, seconds)) => {
            let name = format!("plain files, {limit_mib} MiB of page cache (control group)");
            results.pressure.push(PressureRow { name, disk_read_bytes: bytes, against_kernel_percent: 0.0, seconds });
            bytes
        }
        Err(error) => {
            results.skipped.push(format!("plain files with limited memory: {error}"));
            return Ok(());
        }
    };
    let fingerprints = scratch.dir("fingerprints")?;
    for (name, store) in [
        ("pagefold disk", None),
        ("pagefold disk, fingerprints being learnt", Some(&*fingerprints)),
        ("pagefold disk, fingerprints known", Some(&*fingerprints)),
    ] {
        cold()?;
        let server = Server::start(scratch, "cache", &directory, limit_mib, store)?;
        let started = Instant::now();
        let places: Vec<PathBuf> = (0..READERS).map(|n| server.at.join(format!("copy{n}"))).collect();
        read_all(&places, sum)?;
        let seconds = started.elapsed().as_secs_f64();
        let bytes = server.status()?.disk_read_bytes;
        results.pressure.push(PressureRow {
            name: format!("{name}, cache of {limit_mib} MiB"),
            disk_read_bytes: bytes,
            against_kernel_percent: 100.0 * (bytes as f64 / kernel as f64 - 1.0),
            seconds,
        });
    }
    Ok(())
}

/// Every reader reads its copy through, twice, all at once.
fn read_all(places: &[PathBuf], sum: u64) -> Result<(), Failure> {
    let results: Vec<Result<bool, String>> = std::thread::scope(|scope| {
        let reader = |place: &PathBuf| {
            (0..PASSES).try_fold(true, |ok, _| Ok(ok && read_through(place).map_err(|e| e.to_string())? == sum))
        };
        let handles: Vec<_> = places.iter().map(|place| scope.spawn(move || reader(place))).collect();
        handles.into_iter().map(|handle| handle.join().unwrap_or(Err("a reader panicked".to_owned()))).collect()
    });
    for result in results {
        if !result? {
            return Err("a reader got other bytes than were written".into());
        }
    }
    Ok(())
}

/// The same in a memory control group with a limit; returns bytes read from disk and seconds.
fn limited_reads(copies: &[PathBuf], limit_mib: usize, sum: u64) -> Result<(u64, f64), Failure> {
    let (root, limit, home) = crate::group::root()?;
    let group = root.join(format!("pagefold-bench-{}", std::process::id()));
    std::fs::create_dir(&group)?;
    let pid = std::process::id().to_string();
    let outcome = (|| {
        std::fs::write(group.join(limit), ((limit_mib as u64) << 20).to_string())?;
        std::fs::write(group.join("cgroup.procs"), &pid)?;
        let before = disk_reads()?;
        let started = Instant::now();
        read_all(copies, sum)?;
        Ok((disk_reads()? - before, started.elapsed().as_secs_f64()))
    })();
    // Home again, whatever happened, or the group could not go.
    std::fs::write(root.join(home.trim_start_matches('/')).join("cgroup.procs"), &pid)?;
    std::fs::remove_dir(&group)?;
    outcome
}

/// Bytes this process made the disk read.
fn disk_reads() -> Result<u64, Failure> {
    let io = std::fs::read_to_string("/proc/self/io")?;
    let line = io.lines().find_map(|line| line.strip_prefix("read_bytes: ")).ok_or("no read_bytes")?;
    Ok(line.trim().parse()?)
}

// ---- growth ----

/// Random reads or writes a second at one setting, and the memory they leave.
fn growth(scratch: &Scratch, size: &Size, results: &mut Results) -> Result<(), Failure> {
    let directory = scratch.dir("growth")?;
    let file_mib = size.file_mib / 4;
    for n in 0..16 {
        random_file(&directory.join(format!("{n}")), file_mib, 5)?;
    }
    let mut row = |what: String, value: usize, server: &Server, samples: Vec<f64>| -> Result<(), Failure> {
        let status = server.status()?;
        let (per_s, spread_percent) = summary(samples);
        let (resident_bytes, metadata_bytes) = (status.resident_bytes, status.metadata_bytes);
        results.growth.push(GrowthRow {
            what,
            value: value as u64,
            per_s,
            spread_percent,
            resident_bytes,
            metadata_bytes,
        });
        Ok(())
    };
    let rounds = |work: &dyn Fn() -> Result<f64, Failure>| (0..ROUNDS).map(|_| work()).collect::<Result<Vec<_>, _>>();
    for images in [1, 4, 16] {
        let server = Server::start(scratch, "cache", &directory, file_mib + 64, None)?;
        for n in 0..images {
            read_through(&server.at.join(format!("{n}")))?;
        }
        let last = server.at.join(format!("{}", images - 1));
        let samples = rounds(&|| random_reads(&last, size.round / 3))?;
        row(format!("reads: equal images of {file_mib} MiB"), images, &server, samples)?;
    }
    for mib in [file_mib / 4, file_mib, file_mib * 4] {
        let image = directory.join("size");
        random_file(&image, mib, 6)?;
        let server = Server::start(scratch, "cache", &directory, file_mib * 4 + 64, None)?;
        read_through(&server.at.join("size"))?;
        let samples = rounds(&|| random_reads(&server.at.join("size"), size.round / 3))?;
        row("reads: one image, MiB, all in the cache".to_owned(), mib, &server, samples)?;
    }
    for percent in [25, 50, 100] {
        let server = Server::start(scratch, "cache", &directory, file_mib * 4 * percent / 100, None)?;
        read_through(&server.at.join("size"))?;
        let samples = rounds(&|| random_reads(&server.at.join("size"), size.round / 3))?;
        row(format!("reads: cache in % of an image of {} MiB", file_mib * 4), percent, &server, samples)?;
    }
    for writers in [1, 2, 4, 8] {
        let server = Server::start(scratch, "cache", &directory, file_mib * 8 + 64, None)?;
        let samples = rounds(&|| random_writes(&server.at, writers, size.round / 3))?;
        row("writes: writers, an image each, synced at the end".to_owned(), writers, &server, samples)?;
    }
    Ok(std::fs::remove_dir_all(directory)?)
}

/// 4 KiB writes a second of `writers` threads, each to its own image, the final syncs included.
fn random_writes(at: &Path, writers: usize, time: Duration) -> Result<f64, Failure> {
    let started = Instant::now();
    let count = std::thread::scope(|scope| {
        let write = |n: usize| -> std::io::Result<u64> {
            let file = File::options().write(true).open(at.join(format!("{n}")))?;
            let blocks = file.metadata()?.len() / 4096;
            let mut state = 77 + n as u64;
            let mut buffer = [0; 4096];
            let mut count = 0;
            while started.elapsed() < time {
                let place = xorshift(&mut state) % blocks;
                buffer[..8].copy_from_slice(&state.to_le_bytes());
                file.write_all_at(&buffer, place * 4096)?;
                count += 1;
            }
            file.sync_all()?;
            Ok(count)
        };
        let threads: Vec<_> = (0..writers).map(|n| scope.spawn(move || write(n))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a writer panicked")).sum::<std::io::Result<u64>>()
    })?;
    Ok(count as f64 / started.elapsed().as_secs_f64())
}

fn show(results: &Results) {
    show_reads(results);
    show_memory(results);
    show_growth(results);
    guests::show(&results.guests);
    for skipped in &results.skipped {
        println!("SKIPPED: {skipped}");
    }
}

fn show_reads(results: &Results) {
    if results.reads.is_empty() {
        return;
    }
    println!(
        "Warm reads through one file handle, one thread (median of {SLICES}, spread = half between the quartiles)"
    );
    println!("{:42} {:>14} {:>8} {:>14} {:>8}", "", "4 KiB random/s", "+-", "1 MiB seq MiB/s", "+-");
    for row in &results.reads {
        println!(
            "{:42} {:>14.0} {:>6.1} % {:>14.0} {:>6.1} %",
            row.name,
            row.random_4k_per_s,
            row.random_spread_percent,
            row.sequential_mib_per_s,
            row.sequential_spread_percent
        );
    }
    if let [kernel, plain, ours, _] = &results.reads[..] {
        println!(
            "pagefold disk / plain FUSE: random {:.2}, sequential {:.2}; kernel / pagefold disk: random {:.1}, sequential {:.1}",
            ours.random_4k_per_s / plain.random_4k_per_s,
            ours.sequential_mib_per_s / plain.sequential_mib_per_s,
            kernel.random_4k_per_s / ours.random_4k_per_s,
            kernel.sequential_mib_per_s / ours.sequential_mib_per_s,
        );
    }
}

fn show_memory(results: &Results) {
    if results.memory.is_empty() && results.pressure.is_empty() {
        return;
    }
    println!("\nMemory for images that differ by one upgrade, everything in them read");
    println!("{:46} {:42} {:>7} {:>10} {:>11} {:>9}", "", "", "images", "MiB", "unique MiB", "over it");
    for row in &results.memory {
        println!(
            "{:46} {:42} {:>7} {:>10.1} {:>11.1} {:>7.1} %",
            row.what,
            row.name,
            row.images,
            mib(row.bytes),
            mib(row.unique_bytes),
            row.over_unique_percent
        );
    }
    println!("\n{READERS} independent copies of one file read {PASSES} times at once, memory for 1.25 of one");
    println!("{:60} {:>12} {:>10} {:>8}", "", "disk MiB", "change", "s");
    for row in &results.pressure {
        println!(
            "{:60} {:>12.1} {:>8.1} % {:>8.2}",
            row.name,
            mib(row.disk_read_bytes),
            row.against_kernel_percent,
            row.seconds
        );
    }
}

fn show_growth(results: &Results) {
    if results.growth.is_empty() {
        return;
    }
    println!("\nGrowth (median of {ROUNDS}, spread = half the range)");
    println!("{:52} {:>6} {:>10} {:>8} {:>14} {:>10}", "", "", "4 KiB/s", "+-", "resident MiB", "books MiB");
    for row in &results.growth {
        println!(
            "{:52} {:>6} {:>10.0} {:>6.1} % {:>14.1} {:>10.2}",
            row.what,
            row.value,
            row.per_s,
            row.spread_percent,
            mib(row.resident_bytes),
            mib(row.metadata_bytes)
        );
    }
}
