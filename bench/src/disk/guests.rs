//! Disk images under real guests: what is shared beside KSM, what it costs the guests, and what it saves when the host
//! has memory for one copy of what four guests read.

use super::{Failure, Scratch, Server, cached_bytes, drop_cached, mib, random_file, summary, tool};
use crate::group::Group;
use crate::vm::{self, Boot, Guest, Setup};
use pagefold_os::{ksm, procfs};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How large.
pub struct Size {
    /// Guests that share, one row group each.
    pub guests: &'static [usize],
    /// How much of the kernel tree the images hold.
    pub tree_mib: u64,
    /// Rounds of the workload whose processor time is compared.
    pub rounds: usize,
    /// The file that four guests read.
    pub file_mib: usize,
    /// Rows of the pressure table that take long.
    pub all_peers: bool,
    /// How long KSM may go on alone.
    pub ksm_alone: Duration,
}

/// All rows.
#[derive(Serialize, Default)]
pub struct Results {
    /// The guests' kernel.
    guest_kernel: String,
    sharing: Vec<SharingRow>,
    overhead: Vec<OverheadRow>,
    front_ends: Vec<FrontEndRow>,
    pressure: Vec<PressureRow>,
}

#[derive(Serialize)]
struct FrontEndRow {
    name: String,
    reads_per_s: f64,
    spread_percent: f64,
    /// Processor time of QEMU and server, per read.
    cpu_us_per_read: f64,
    /// Whether the guest's memory stays private, which merging needs.
    guest_memory_private: bool,
}

#[derive(Serialize)]
struct SharingRow {
    guests: usize,
    name: String,
    pages_saved: u64,
    pages_scanned: u64,
    cpu_s: f64,
    host_cache_bytes: u64,
    seconds: f64,
}

#[derive(Serialize)]
struct OverheadRow {
    work: String,
    name: String,
    guest_cpu_s: f64,
    server_cpu_s: f64,
    spread_percent: f64,
    server_share_percent: f64,
    /// Guests and server together; median of rounds, and half their range.
    total_against_plain_percent: f64,
    total_range_percent: f64,
}

#[derive(Serialize)]
struct PressureRow {
    name: String,
    swap_bytes: u64,
    disk_read_bytes: u64,
    swap_change_percent: f64,
    disk_change_percent: f64,
    /// Most memory that the group had, its limit included in what counts.
    peak_bytes: u64,
    limit_bytes: u64,
    seconds: f64,
}

const MOUNT: &str = "mount -t ext4 -o ro /dev/vda /mnt && ls /mnt | wc -l";
const READ_TREE: &str = "find /mnt -type f -exec cat {} + | wc -c";
/// What guests do with the tree whose processor time is compared: name and command. The guest's own cache is emptied
/// first, so every byte comes from the host; a build goes through its sources once, with more work per byte than these.
const WORK: &[(&str, &str)] = &[
    (
        "read and digest",
        "echo 3 > /proc/sys/vm/drop_caches; find /mnt -type f | sort | head -n 2500 | xargs md5sum | md5sum",
    ),
    (
        "read and compress",
        "echo 3 > /proc/sys/vm/drop_caches; find /mnt -type f | sort | head -n 600 | xargs cat | gzip | md5sum",
    ),
];
/// A compiler run over a real program, as a step of a build: [`add_compiler`] leaves it in the images.
const BUILD: (&str, &str) = ("compile", "echo 3 > /proc/sys/vm/drop_caches; sh /mnt/build/run");
const GUEST_MIB: usize = 192;

/// The parts, by name.
pub const PARTS: &[&str] = &["sharing", "overhead", "front-ends", "memory-for-one"];

/// Measures the wanted parts; what cannot be measured here goes to `skipped`, and so does a part that failed.
pub fn measure(
    scratch: &Scratch,
    size: &Size,
    wanted: &dyn Fn(&str) -> bool,
    skipped: &mut Vec<String>,
) -> Result<Results, Failure> {
    let mut results = Results::default();
    let boot = match Boot::prepare(&scratch.dir("boot")?) {
        Ok(boot) => boot,
        Err(error) => {
            skipped.push(format!("guests: {error}"));
            return Ok(results);
        }
    };
    results.guest_kernel.clone_from(&boot.version);
    let most = size.guests.iter().copied().max().unwrap_or(0);
    let (directory, images) = tree_images(scratch, size.tree_mib, most)?;
    for part in PARTS.iter().filter(|part| wanted(part)) {
        eprintln!("pagecache: {part}");
        // One that fails must not take the others' rows with it.
        let outcome = match *part {
            "sharing" => size.guests.iter().try_for_each(|&count| {
                sharing(scratch, &boot, &directory, &images[..count], size, &mut results, skipped)
            }),
            "overhead" => {
                let count = if size.all_peers { 2 } else { 1 };
                overhead(scratch, &boot, &directory, &images[..count.min(most)], size, &mut results)
            }
            "front-ends" => front_ends(scratch, &boot, &directory, &images[0], size, &mut results, skipped),
            _ => pressure(scratch, &boot, size, &mut results, skipped),
        };
        if let Err(error) = outcome {
            skipped.push(format!("{part} {FAILED}: {error}"));
        }
    }
    Ok(results)
}

/// Marks a part that should have worked.
pub const FAILED: &str = "FAILED";

// ---- images with a kernel tree ----

/// A tree of kernel sources of this machine, or other files of the system, and what it is.
fn kernel_tree() -> PathBuf {
    let sources = std::fs::read_dir("/usr/src").into_iter().flatten().flatten().map(|entry| entry.path());
    let mut found: Vec<PathBuf> = sources
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            path.is_dir() && name.starts_with("linux-") && (name.ends_with("-common") || !name.contains("headers"))
        })
        .collect();
    found.sort();
    found.pop().unwrap_or_else(|| PathBuf::from("/usr/include"))
}

/// Copies the tree's files, directory by directory, until there are `mib` of them.
fn copy_tree(from: &Path, to: &Path, left: &mut i64) -> Result<(), Failure> {
    std::fs::create_dir_all(to)?;
    let mut entries: Vec<PathBuf> = std::fs::read_dir(from)?.flatten().map(|entry| entry.path()).collect();
    entries.sort();
    for path in entries {
        if *left <= 0 {
            return Ok(());
        }
        let target = to.join(path.file_name().ok_or("no name")?);
        let metadata = path.symlink_metadata()?;
        if metadata.is_dir() {
            copy_tree(&path, &target, left)?;
        } else if metadata.is_file() {
            std::fs::copy(&path, target)?;
            *left -= metadata.len().next_multiple_of(4096) as i64;
        }
    }
    Ok(())
}

/// Makes `count` images that were installed apart: each its own file system with the same tree.
fn tree_images(scratch: &Scratch, tree_mib: u64, count: usize) -> Result<(PathBuf, Vec<PathBuf>), Failure> {
    let tree = scratch.dir("kernel-tree")?;
    copy_tree(&kernel_tree(), &tree, &mut ((tree_mib << 20) as i64))?;
    if let Err(error) = add_compiler(&tree.join("build")) {
        eprintln!("pagecache: no compiler for the guests: {error}");
    }
    let directory = scratch.dir("guest-images")?;
    let blocks = ((tree_mib * 3 / 2 + 96) * 256).to_string();
    let tree = tree.display().to_string();
    let images: Vec<PathBuf> = (0..count).map(|n| directory.join(format!("guest{n}.raw"))).collect();
    for image in &images {
        tool("mke2fs", &["-q", "-t", "ext4", "-b", "4096", "-d", &tree, &image.display().to_string(), &blocks])?;
        drop_cached(image)?;
    }
    std::fs::remove_dir_all(tree)?;
    Ok((directory, images))
}

/// Leaves this machine's C compiler, a program of this project, the headers it asks for and a script in `build`.
fn add_compiler(build: &Path) -> Result<(), Failure> {
    const PROGRAM: &str = include_str!("../../../tests/programs/semantics.c");
    std::fs::create_dir_all(build)?;
    let source = build.join("main.c");
    std::fs::write(&source, PROGRAM)?;
    let say = |program: &str, args: &[&str]| -> Result<String, Failure> {
        let output = std::process::Command::new(program).args(args).output()?;
        match output.status.success() {
            true => Ok(String::from_utf8(output.stdout)?),
            false => Err(format!("{program}: {}", String::from_utf8_lossy(&output.stderr)).into()),
        }
    };
    let compiler = say("gcc", &["-print-prog-name=cc1"])?.trim().to_owned();
    std::fs::copy(&compiler, build.join("cc1"))?;
    for word in say("ldd", &[&compiler])?.split_whitespace().filter(|word| word.starts_with('/')) {
        let name = Path::new(word).file_name().ok_or("no name")?;
        let name = if word.contains("ld-linux") { "ld.so".as_ref() } else { name };
        std::fs::copy(word, build.join(name))?;
    }
    let wanted = say("gcc", &["-M", &source.display().to_string()])?;
    for header in wanted.split_whitespace().filter(|word| word.starts_with('/') && word.ends_with(".h")) {
        let target = build.join(format!("root{header}"));
        std::fs::create_dir_all(target.parent().ok_or("no parent")?)?;
        std::fs::copy(header, target)?;
    }
    let own = say("gcc", &["-print-file-name=include"])?;
    let places = [own.trim(), "/usr/include/x86_64-linux-gnu", "/usr/include"];
    let places: String = places.iter().map(|place| format!(" -isystem root{place}")).collect();
    let run = format!(
        "cd /mnt/build\n./ld.so --library-path . ./cc1 -quiet -O1 -nostdinc{places} main.c -o /asm && md5sum < /asm\n"
    );
    Ok(std::fs::write(build.join("run"), run)?)
}

fn raw_drive(path: &Path, cache: &str) -> String {
    format!("file={},format=raw,cache={cache}", path.display())
}

fn boot_all(boot: &Boot, drives: impl Iterator<Item = String>, setup: &Setup) -> Result<Vec<Guest>, Failure> {
    let start = |drive| Guest::start(boot, &Setup { drive, ..setup.clone() });
    let mut guests: Vec<Guest> = drives.map(start).collect::<Result<_, _>>()?;
    guests.iter_mut().try_for_each(Guest::ready)?;
    Ok(guests)
}

fn plain_setup() -> Setup {
    Setup { memory_mib: GUEST_MIB, ..Setup::default() }
}

/// Drives of images shown by a server; `cache=none`, so that the host's kernel keeps no copy of its own.
fn through<'a>(server: &'a Server, images: &'a [PathBuf]) -> impl Iterator<Item = String> + 'a {
    images.iter().map(|image| raw_drive(&server.at.join(image.file_name().unwrap_or_default()), "none"))
}

fn cpu_s(pids: impl IntoIterator<Item = i32>) -> f64 {
    // Of threads that ended, too, which only the process's own line has.
    pids.into_iter().filter_map(procfs::cpu_ns).sum::<u64>() as f64 / 1e9
}

fn same(said: &[String]) -> Result<(), Failure> {
    match said.windows(2).all(|pair| pair[0] == pair[1]) && !said.iter().any(String::is_empty) {
        true => Ok(()),
        false => Err(format!("guests read different things: {said:?}").into()),
    }
}

// ---- what is shared ----

fn sharing(
    scratch: &Scratch,
    boot: &Boot,
    directory: &Path,
    images: &[PathBuf],
    size: &Size,
    results: &mut Results,
    skipped: &mut Vec<String>,
) -> Result<(), Failure> {
    let count = images.len();
    let server = Server::start(scratch, "cache", directory, (size.tree_mib * 2 + 64) as usize, None)?;
    let mut guests = boot_all(boot, through(&server, images), &plain_setup())?;
    same(&vm::all(&mut guests, MOUNT)?)?;
    let (started, cpu) = (Instant::now(), cpu_s([server.pid()]));
    same(&vm::all(&mut guests, READ_TREE)?)?;
    let seconds = started.elapsed().as_secs_f64();
    let status = server.status()?;
    let scanned = status.misses + status.read_ahead_blocks;
    let ours = status.memory_saved_bytes / 4096;
    results.sharing.push(SharingRow {
        guests: count,
        name: "pagefold disk (host's cache)".to_owned(),
        pages_saved: ours,
        pages_scanned: scanned,
        cpu_s: cpu_s([server.pid()]) - cpu,
        host_cache_bytes: status.resident_bytes + status.metadata_bytes,
        seconds,
    });
    drop(guests);
    drop(server);

    if let Err(error) = one_pool(scratch, boot, directory, images, size, results) {
        skipped.push(format!("guests and mount in one pool: {error}"));
    }

    // The same guests on the plain files, with KSM on their memory.
    images.iter().try_for_each(|image| drop_cached(image))?;
    let ksmd = procfs::pids().into_iter().find(|pid| procfs::name(*pid).as_deref() == Some("ksmd"));
    let (Ok(mut settings), Some(ksmd)) = (ksm::Settings::save(), ksmd) else {
        skipped.push("KSM on the guests: this kernel has none".to_owned());
        return Ok(());
    };
    if ksm::read("run")? == 1 {
        skipped.push("KSM on the guests: it runs already, for somebody else".to_owned());
        return Ok(());
    }
    ksm::write("run", 2)?;
    ksm::write("run", 0)?;
    let mut guests = boot_all(boot, images.iter().map(|image| raw_drive(image, "writeback")), &plain_setup())?;
    same(&vm::all(&mut guests, MOUNT)?)?;
    let read = |name| ksm::read(name).map(|value| value.max(0) as u64);
    let (scanned_before, cpu_before) = (read("pages_scanned")?, cpu_s([ksmd]));
    // As many pages as our cache looked at, spread over the time that the workload took there.
    ksm::write("sleep_millisecs", 20)?;
    ksm::write("pages_to_scan", ((scanned as f64 * 0.02 / seconds) as i64).max(1))?;
    ksm::write("run", 1)?;
    let started = Instant::now();
    guests.iter_mut().try_for_each(|guest| guest.begin(READ_TREE))?;
    let deadline = started + Duration::from_secs(120);
    while read("pages_scanned")? - scanned_before < scanned && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    ksm::write("run", 0)?;
    let budget = read("pages_scanned")? - scanned_before;
    if budget > scanned + scanned / 4 {
        // Its counters and settings are the machine's: somebody else turned it on again.
        skipped.push(format!(
            "KSM on {count} guests: it scanned {budget} pages of {scanned}; somebody else drives it too"
        ));
        guests.iter_mut().try_for_each(|guest| guest.wait().map(drop))?;
        return Ok(());
    }
    same(&guests.iter_mut().map(Guest::wait).collect::<Result<Vec<_>, _>>()?)?;
    let kept: u64 = images.iter().map(|image| cached_bytes(image)).sum::<Result<u64, _>>()?;
    let mut row = |name: String, pages_scanned: u64, cpu: f64, since: Instant| -> Result<(), Failure> {
        results.sharing.push(SharingRow {
            guests: count,
            name,
            pages_saved: read("pages_sharing")?,
            pages_scanned,
            cpu_s: cpu,
            host_cache_bytes: kept,
            seconds: since.elapsed().as_secs_f64(),
        });
        Ok(())
    };
    row("plain files, KSM on the guests, equal scan budget".to_owned(), budget, cpu_s([ksmd]) - cpu_before, started)?;
    // With all the budget it wants, until it finds nothing more: what the equal budget costs it.
    ksm::write("sleep_millisecs", 10)?;
    ksm::write("pages_to_scan", 5000)?;
    ksm::write("run", 1)?;
    let started = Instant::now();
    let mut last = (0, Instant::now());
    while started.elapsed() < size.ksm_alone && last.1.elapsed() < Duration::from_secs(5) {
        std::thread::sleep(Duration::from_millis(250));
        let now = read("pages_sharing")?;
        if now > last.0 + last.0 / 100 {
            last = (now, Instant::now());
        }
    }
    ksm::write("run", 0)?;
    let scanned_alone = read("pages_scanned")? - scanned_before;
    row(
        "the same, KSM going on until nothing more comes".to_owned(),
        scanned_alone,
        cpu_s([ksmd]) - cpu_before,
        started,
    )?;
    settings.restore();
    Ok(())
}

/// The tool's daemon, gone with this value.
struct Daemon {
    child: std::process::Child,
    tool: PathBuf,
    socket: PathBuf,
}

impl Daemon {
    fn start(scratch: &Scratch) -> Result<Daemon, Failure> {
        let tool = std::env::current_exe()?.with_file_name("pagefold");
        if !tool.exists() {
            return Err(format!("{} is not built: cargo build --release", tool.display()).into());
        }
        let socket = scratch.dir("daemon")?.join("s");
        let mut command = std::process::Command::new(&tool);
        command.args(["daemon", "--busy", "--period", "500ms", "--socket"]).arg(&socket);
        let child = command.stdin(std::process::Stdio::null()).stdout(std::process::Stdio::null()).spawn()?;
        let daemon = Daemon { child, tool, socket };
        let started = Instant::now();
        while daemon.totals().is_err() {
            if started.elapsed() > Duration::from_secs(20) {
                return Err("the daemon does not come up".into());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(daemon)
    }

    /// What makes a program a client.
    fn run(&self) -> Vec<String> {
        [&*self.tool.display().to_string(), "run", "--socket", &self.socket.display().to_string(), "--"]
            .map(str::to_owned)
            .into()
    }

    /// Bytes saved net of the pool, and processor seconds of daemon and agents.
    fn totals(&self) -> Result<(u64, f64), Failure> {
        let mut command = std::process::Command::new(&self.tool);
        let output = command.args(["status", "--json", "--socket"]).arg(&self.socket).output()?;
        let status: serde_json::Value = serde_json::from_slice(&output.stdout)?;
        let number = |name: &str| status["totals"][name].as_u64().ok_or(format!("totals have no {name}"));
        let saved = number("saved_bytes")?.saturating_sub(number("pool_bytes")?);
        Ok((saved, number("cpu_ns")? as f64 / 1e9))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Guests and mount under `pagefold run`: the guests' own copies and the host's are one frame.
fn one_pool(
    scratch: &Scratch,
    boot: &Boot,
    directory: &Path,
    images: &[PathBuf],
    size: &Size,
    results: &mut Results,
) -> Result<(), Failure> {
    let daemon = Daemon::start(scratch)?;
    let server = Server::start_under(scratch, directory, (size.tree_mib * 2 + 64) as usize, &daemon.run())?;
    let setup = Setup { under: daemon.run(), ..plain_setup() };
    let mut guests = boot_all(boot, through(&server, images), &setup)?;
    same(&vm::all(&mut guests, MOUNT)?)?;
    let (cpu, cpu_merging, started) = (cpu_s([server.pid()]), daemon.totals()?.1, Instant::now());
    same(&vm::all(&mut guests, READ_TREE)?)?;
    let mut last = (0, Instant::now());
    while started.elapsed() < size.ksm_alone && last.1.elapsed() < Duration::from_secs(5) {
        std::thread::sleep(Duration::from_millis(250));
        let now = daemon.totals()?.0;
        if now > last.0 + last.0 / 100 {
            last = (now, Instant::now());
        }
    }
    let (saved, cpu_merged) = daemon.totals()?;
    let status = server.status()?;
    results.sharing.push(SharingRow {
        guests: images.len(),
        name: "the same in one pool: guests and mount under run".to_owned(),
        pages_saved: (status.memory_saved_bytes + saved) / 4096,
        pages_scanned: status.misses + status.read_ahead_blocks,
        // The server's own agent is in both: too much rather than too little.
        cpu_s: cpu_s([server.pid()]) - cpu + cpu_merged - cpu_merging,
        host_cache_bytes: status.resident_bytes + status.metadata_bytes,
        seconds: started.elapsed().as_secs_f64(),
    });
    // Still one truth for all of them.
    same(&vm::all(&mut guests, "find /mnt -type f | sort | xargs cat | md5sum")?)?;
    Ok(())
}

// ---- what it costs ----

fn guests_have(guests: &mut [Guest], path: &str) -> Result<bool, Failure> {
    Ok(vm::all(guests, &format!("ls {path}"))?.iter().all(|said| said == path))
}

fn overhead(
    scratch: &Scratch,
    boot: &Boot,
    directory: &Path,
    images: &[PathBuf],
    size: &Size,
    results: &mut Results,
) -> Result<(), Failure> {
    let server = Server::start(scratch, "cache", directory, (size.tree_mib * 2 + 64) as usize, None)?;
    let mut plain = boot_all(boot, images.iter().map(|image| raw_drive(image, "writeback")), &plain_setup())?;
    let mut ours = boot_all(boot, through(&server, images), &plain_setup())?;
    same(&[vm::all(&mut plain, MOUNT)?, vm::all(&mut ours, MOUNT)?].concat())?;
    let pids = |guests: &[Guest]| guests.iter().map(Guest::pid).collect::<Vec<_>>();
    let mut rows = Vec::new();
    let builds = guests_have(&mut plain, "/mnt/build/run")?;
    // One kind is enough to see that it runs.
    let (plain_work, build) = if size.all_peers { (WORK, builds.then_some(&BUILD)) } else { (&WORK[..1], None) };
    for (work, command) in plain_work.iter().chain(build) {
        let mut samples: Vec<[f64; 3]> = Vec::new();
        // The first round warms up: memory is plentiful on both sides.
        for round in 0..=size.rounds {
            // At the same time, so that what else the machine does weighs on both alike.
            let before = [cpu_s(pids(&plain)), cpu_s(pids(&ours)), cpu_s([server.pid()])];
            plain.iter_mut().chain(&mut ours).try_for_each(|guest| guest.begin(command))?;
            same(&plain.iter_mut().chain(&mut ours).map(Guest::wait).collect::<Result<Vec<_>, _>>()?)?;
            let after = [cpu_s(pids(&plain)), cpu_s(pids(&ours)), cpu_s([server.pid()])];
            if round > 0 {
                samples.push(std::array::from_fn(|at| after[at] - before[at]));
            }
        }
        let column = |value: &dyn Fn(&[f64; 3]) -> f64| summary(samples.iter().map(value).collect());
        let totals = samples.iter().map(|s| 100.0 * ((s[1] + s[2]) / s[0] - 1.0));
        let (low, high) = totals.clone().fold((f64::MAX, f64::MIN), |(low, high), t| (low.min(t), high.max(t)));
        let (guests_plain, guests_ours) = (column(&|s| s[0]), column(&|s| s[1]));
        rows.push(OverheadRow {
            work: (*work).to_owned(),
            name: "plain files, kernel's page cache".to_owned(),
            guest_cpu_s: guests_plain.0,
            server_cpu_s: 0.0,
            spread_percent: guests_plain.1,
            server_share_percent: 0.0,
            total_against_plain_percent: 0.0,
            total_range_percent: 0.0,
        });
        rows.push(OverheadRow {
            work: (*work).to_owned(),
            name: "pagefold disk".to_owned(),
            guest_cpu_s: guests_ours.0,
            server_cpu_s: column(&|s| s[2]).0,
            spread_percent: guests_ours.1,
            server_share_percent: column(&|s| 100.0 * s[2] / (s[1] + s[2])).0,
            total_against_plain_percent: summary(totals.collect()).0,
            total_range_percent: (high - low) / 2.0,
        });
    }
    results.overhead = rows;
    Ok(())
}

// ---- the ways from a guest to the host ----

/// A server of QEMU's own, gone with this value.
struct StorageDaemon(std::process::Child);

impl StorageDaemon {
    fn start(image: &Path, export: &str, socket: &Path) -> Result<StorageDaemon, Failure> {
        let mut command = std::process::Command::new("qemu-storage-daemon");
        command.arg("--blockdev").arg(format!("driver=file,node-name=f,locking=off,filename={}", image.display()));
        if export == "nbd" {
            command.arg("--nbd-server").arg(format!("addr.type=unix,addr.path={}", socket.display()));
            command.args(["--export", "type=nbd,id=e,node-name=f,name=disk,writable=on"]);
        } else {
            let address = format!("addr.type=unix,addr.path={}", socket.display());
            command.arg("--export").arg(format!("type={export},id=e,node-name=f,{address},writable=on"));
        }
        let child = command.stdin(std::process::Stdio::null()).spawn()?;
        let mut daemon = StorageDaemon(child);
        let started = Instant::now();
        while !socket.exists() {
            if daemon.0.try_wait()?.is_some() || started.elapsed() > Duration::from_secs(20) {
                return Err("qemu-storage-daemon does not come up".into());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(daemon)
    }
}

impl Drop for StorageDaemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// 4 KiB reads past the guest's own cache, each waiting for the one before: round trips, nothing else.
fn front_ends(
    scratch: &Scratch,
    boot: &Boot,
    directory: &Path,
    image: &Path,
    size: &Size,
    results: &mut Results,
    skipped: &mut Vec<String>,
) -> Result<(), Failure> {
    let reads: usize = if size.all_peers { 4000 } else { 500 };
    let sockets = scratch.dir("sockets")?;
    let (ours_nbd, nbd, rings) = (sockets.join("ours"), sockets.join("nbd"), sockets.join("rings"));
    let server = Server::start_with_nbd(scratch, directory, (size.tree_mib * 2 + 64) as usize, &ours_nbd)?;
    let daemons = StorageDaemon::start(image, "nbd", &nbd)
        .and_then(|first| Ok((first, StorageDaemon::start(image, "vhost-user-blk", &rings)?)));
    let name = image.file_name().and_then(|name| name.to_str()).ok_or("no name")?;
    let socket_drive =
        |socket: &Path, name: &str| format!("file=nbd+unix:///{name}?socket={},format=raw", socket.display());
    let mount_drive = raw_drive(&server.at.join(name), "none");
    let with_drive = |drive: String| Setup { drive, ..plain_setup() };
    let plain_drive = format!("{},file.locking=off", raw_drive(image, "writeback"));
    let mut rows: Vec<(&str, Setup, Vec<i32>)> = vec![
        ("plain file, kernel's page cache", with_drive(plain_drive), vec![]),
        ("pagefold disk, the mounted file", with_drive(mount_drive), vec![server.pid()]),
        ("pagefold disk, NBD", with_drive(socket_drive(&ours_nbd, name)), vec![server.pid()]),
    ];
    match &daemons {
        Err(error) => skipped.push(format!("vhost-user-blk against NBD: {error}")),
        Ok((by_nbd, by_rings)) => {
            let setup = with_drive(socket_drive(&nbd, "disk"));
            rows.push(("QEMU's storage daemon, NBD", setup, vec![by_nbd.0.id() as i32]));
            let extra = [
                "-object".to_owned(),
                format!("memory-backend-memfd,id=m,size={GUEST_MIB}M,share=on"),
                "-machine".to_owned(),
                "memory-backend=m".to_owned(),
                "-chardev".to_owned(),
                format!("socket,id=c,path={}", rings.display()),
                "-device".to_owned(),
                "vhost-user-blk-pci,chardev=c".to_owned(),
            ];
            let setup = Setup { extra: extra.into(), ..plain_setup() };
            rows.push(("QEMU's storage daemon, vhost-user-blk", setup, vec![by_rings.0.id() as i32]));
        }
    }
    let command = format!("dd if=/dev/vda of=/dev/null bs=4k count={reads} iflag=direct 2> /dev/null && echo done");
    let mut guests: Vec<Guest> =
        rows.iter().map(|(_, setup, _)| Guest::start(boot, setup)).collect::<Result<_, _>>()?;
    guests.iter_mut().try_for_each(Guest::ready)?;
    let mut samples = vec![(Vec::new(), Vec::new()); rows.len()];
    for round in 0..size.rounds + 1 {
        for (((_, _, servers), guest), samples) in rows.iter().zip(&mut guests).zip(&mut samples) {
            let pids: Vec<i32> = servers.iter().copied().chain([guest.pid()]).collect();
            let (cpu, started) = (cpu_s(pids.clone()), Instant::now());
            let said = guest.run(&command)?;
            if said != "done" {
                return Err(format!("a guest's dd failed: {said}").into());
            }
            // The first round warms up.
            if round > 0 {
                samples.0.push(reads as f64 / started.elapsed().as_secs_f64());
                samples.1.push((cpu_s(pids) - cpu) * 1e6 / reads as f64);
            }
        }
    }
    for ((name, setup, _), (rates, cpu)) in rows.iter().zip(samples) {
        let (reads_per_s, spread_percent) = summary(rates);
        results.front_ends.push(FrontEndRow {
            name: (*name).to_owned(),
            reads_per_s,
            spread_percent,
            cpu_us_per_read: summary(cpu).0,
            guest_memory_private: setup.extra.is_empty(),
        });
    }
    Ok(())
}

// ---- memory for one ----

const READERS: usize = 4;
const PASSES: usize = 3;
/// Small guests: what they cannot keep they ask the host for again.
const SMALL_MIB: usize = 96;
/// What QEMU takes beyond its guest's memory, with a small buffer for translated code.
const QEMU_MIB: usize = 56;

/// A swap file, in use while this value lives.
struct Swap(PathBuf);

impl Swap {
    fn start(path: PathBuf, mib: usize) -> Result<Swap, Failure> {
        random_file(&path, mib, 3)?;
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
        let name = path.display().to_string();
        tool("mkswap", &[&name])?;
        tool("swapon", &[&name])?;
        Ok(Swap(path))
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        let _ = tool("swapoff", &[&self.0.display().to_string()]);
        let _ = std::fs::remove_file(&self.0);
    }
}

fn vmstat(name: &str) -> Result<u64, Failure> {
    let text = std::fs::read_to_string("/proc/vmstat")?;
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')).ok_or("no such counter")?;
    Ok(value.trim().parse()?)
}

/// Bytes that a process made the disk read, swap included.
fn process_reads(pid: i32) -> u64 {
    let io = std::fs::read_to_string(format!("/proc/{pid}/io")).unwrap_or_default();
    io.lines().find_map(|line| line.strip_prefix("read_bytes: ")?.trim().parse().ok()).unwrap_or(0)
}

fn pressure(
    scratch: &Scratch,
    boot: &Boot,
    size: &Size,
    results: &mut Results,
    skipped: &mut Vec<String>,
) -> Result<(), Failure> {
    let directory = scratch.dir("guest-copies")?;
    let copies: Vec<PathBuf> = (0..READERS).map(|n| directory.join(format!("copy{n}.raw"))).collect();
    random_file(&copies[0], size.file_mib, 17)?;
    copies[1..].iter().try_for_each(|copy| std::fs::copy(&copies[0], copy).map(drop))?;
    let swap = match Swap::start(scratch.0.join("swap"), 1024) {
        Ok(swap) => swap,
        Err(error) => {
            skipped.push(format!("memory for one: no swap file: {error}"));
            return Ok(());
        }
    };
    let fingerprints = scratch.dir("guest-fingerprints")?;
    if !size.all_peers {
        learn(scratch, &directory, &copies, size, &fingerprints)?;
    }
    let plain_files = Pressed { name: "plain files, kernel's page cache", ..Pressed::default() };
    let cached = Pressed { name: "pagefold disk", cached: true, ..Pressed::default() };
    let known = Some(&*fingerprints);
    let mut plain = (0, 0);
    for how in [
        plain_files,
        Pressed { name: "the same, KSM on the guests (its default rate)", with_ksm: true, long: true, ..plain_files },
        cached,
        Pressed { name: "pagefold disk, fingerprints being learnt", store: known, long: true, ..cached },
        Pressed { name: "pagefold disk, fingerprints known", store: known, ..cached },
        Pressed { name: "plain files, swappiness 100", swappiness: Some(100), long: true, ..plain_files },
        Pressed { name: "pagefold disk, swappiness 100", swappiness: Some(100), long: true, ..cached },
    ] {
        if how.long && !size.all_peers {
            continue;
        }
        eprintln!("pagecache: memory for one: {}", how.name);
        copies.iter().try_for_each(|copy| drop_cached(copy))?;
        let Some(under_pressure) = read_under_pressure(scratch, boot, size, &directory, &copies, &how)? else {
            skipped.push(format!("memory for one: {}: these control groups have no swappiness", how.name));
            continue;
        };
        let UnderPressure { swapped, read, peak_bytes, limit_bytes, seconds } = under_pressure;
        if !how.cached && !how.with_ksm {
            plain = (swapped, read);
        }
        let (swap_plain, read_plain) = plain;
        results.pressure.push(PressureRow {
            name: how.name.to_owned(),
            swap_bytes: swapped,
            disk_read_bytes: read,
            swap_change_percent: 100.0 * (swapped as f64 / (swap_plain as f64).max(1.0) - 1.0),
            disk_change_percent: 100.0 * (read as f64 / (read_plain as f64).max(1.0) - 1.0),
            peak_bytes,
            limit_bytes,
            seconds,
        });
    }
    drop(swap);
    Ok(std::fs::remove_dir_all(directory)?)
}

/// Reads all copies through a mount once, so that their fingerprints are there.
fn learn(scratch: &Scratch, directory: &Path, copies: &[PathBuf], size: &Size, store: &Path) -> Result<(), Failure> {
    let server = Server::start(scratch, "cache", directory, size.file_mib + 64, Some(store))?;
    for copy in copies {
        super::read_through(&server.at.join(copy.file_name().ok_or("no name")?))?;
    }
    Ok(())
}

/// A row of the table: how the guests read, and what the kernel may do meanwhile.
#[derive(Clone, Copy, Default)]
struct Pressed<'a> {
    name: &'static str,
    /// Through the cache, else plain files.
    cached: bool,
    with_ksm: bool,
    /// Fingerprints.
    store: Option<&'a Path>,
    /// How readily the kernel swaps the guests instead of dropping file cache, where it is not its default (60).
    swappiness: Option<u64>,
    /// Not in the quick run.
    long: bool,
}

/// What four guests did to the host.
struct UnderPressure {
    /// Bytes swapped in and out.
    swapped: u64,
    /// Bytes of images read from disk.
    read: u64,
    peak_bytes: u64,
    limit_bytes: u64,
    seconds: f64,
}

/// One row; none if its swappiness cannot be had.
fn read_under_pressure(
    scratch: &Scratch,
    boot: &Boot,
    size: &Size,
    directory: &Path,
    copies: &[PathBuf],
    how: &Pressed,
) -> Result<Option<UnderPressure>, Failure> {
    // The guests, and one copy of the file with a quarter to spare; the server's own memory comes out of that quarter.
    let limit_mib = READERS * (SMALL_MIB + QEMU_MIB) + size.file_mib + size.file_mib / 4;
    let group = Group::new(if how.cached { "disk" } else { "plain" })?;
    group.limit((limit_mib as u64) << 20)?;
    if how.swappiness.is_some_and(|swappiness| group.set_swappiness(swappiness).is_err()) {
        return Ok(None);
    }
    let mut setup = Setup { memory_mib: SMALL_MIB, group: Some(group.path.clone()), ..Setup::default() };
    setup.accel = Some("tcg,tb-size=16".to_owned());
    let cache_mib = size.file_mib + size.file_mib / 16;
    let server = match how.cached {
        true => Some(Server::start_in(scratch, "cache", directory, cache_mib, how.store, Some(&group.path))?),
        false => None,
    };
    let mut settings = None;
    if how.with_ksm && ksm::read("run").is_ok_and(|run| run == 0) {
        settings = ksm::Settings::save().ok();
        ksm::write("sleep_millisecs", 20)?;
        ksm::write("pages_to_scan", 100)?;
        ksm::write("run", 1)?;
    }
    let mut guests = match &server {
        Some(server) => boot_all(boot, through(server, copies), &setup)?,
        None => boot_all(boot, copies.iter().map(|copy| raw_drive(copy, "writeback")), &setup)?,
    };
    let pids: Vec<i32> = guests.iter().map(Guest::pid).chain(server.iter().map(Server::pid)).collect();
    let swaps = || -> Result<(u64, u64), Failure> { Ok((vmstat("pswpin")? * 4096, vmstat("pswpout")? * 4096)) };
    let reads = || pids.iter().copied().map(process_reads).sum::<u64>();
    let (swap_before, read_before, started) = (swaps()?, reads(), Instant::now());
    for _ in 0..PASSES {
        same(&vm::all(&mut guests, "md5sum < /dev/vda")?)?;
    }
    let (swap_after, seconds) = (swaps()?, started.elapsed().as_secs_f64());
    let swapped_in = swap_after.0 - swap_before.0;
    // What came back from swap is no read of an image.
    let read = (reads() - read_before).saturating_sub(swapped_in);
    // Of the first kind of groups; the second tells it elsewhere.
    let peak_bytes = group.number(&["memory.max_usage_in_bytes", "memory.peak"]).unwrap_or(0);
    drop(guests);
    drop(server);
    if let Some(mut settings) = settings {
        settings.restore();
    }
    Ok(Some(UnderPressure {
        swapped: swapped_in + swap_after.1 - swap_before.1,
        read,
        peak_bytes,
        limit_bytes: (limit_mib as u64) << 20,
        seconds,
    }))
}

/// Prints the tables.
pub fn show(results: &Results) {
    if !results.sharing.is_empty() {
        show_sharing(results);
    }
    if !results.overhead.is_empty() {
        show_overhead(results);
    }
    if !results.front_ends.is_empty() {
        show_front_ends(results);
    }
    if !results.pressure.is_empty() {
        show_pressure(results);
    }
}

fn show_sharing(results: &Results) {
    println!(
        "\nGuests (QEMU, emulated; Linux {}) read a kernel tree, one image each, installed apart",
        results.guest_kernel
    );
    println!(
        "{:52} {:>7} {:>12} {:>10} {:>8} {:>15} {:>6}",
        "", "guests", "pages saved", "looked at", "CPU s", "host cache MiB", "s"
    );
    for row in &results.sharing {
        println!(
            "{:52} {:>7} {:>12} {:>10} {:>8.2} {:>15.1} {:>6.1}",
            row.name,
            row.guests,
            row.pages_saved,
            row.pages_scanned,
            row.cpu_s,
            mib(row.host_cache_bytes),
            row.seconds
        );
    }
    for rows in results.sharing.chunk_by(|a, b| a.guests == b.guests) {
        if let (Some(ours), Some(ksm)) = (rows.first(), rows.iter().find(|row| row.name.ends_with("equal scan budget")))
        {
            let against = match ksm.pages_saved {
                0 => "KSM saved no page at an equal scan budget".to_owned(),
                n => format!("{:.1} x the pages of KSM at an equal scan budget", ours.pages_saved as f64 / n as f64),
            };
            println!("{} guests: {against}", ours.guests);
        }
    }
}

fn show_overhead(results: &Results) {
    println!("\nProcessor time of guests with a kernel tree, their own caches emptied, the host's warm");
    println!(
        "{:20} {:34} {:>10} {:>9} {:>9} {:>15} {:>16}",
        "", "", "guests' s", "+-", "server s", "server's share", "all vs plain"
    );
    for row in &results.overhead {
        println!(
            "{:20} {:34} {:>10.2} {:>7.1} % {:>9.3} {:>13.2} % {:>7.1} % +- {:.1}",
            row.work,
            row.name,
            row.guest_cpu_s,
            row.spread_percent,
            row.server_cpu_s,
            row.server_share_percent,
            row.total_against_plain_percent,
            row.total_range_percent
        );
    }
}

fn show_front_ends(results: &Results) {
    println!("\n4 KiB reads of one guest past its cache, one at a time (median of rounds)");
    println!("{:40} {:>10} {:>8} {:>14} {:>22}", "", "reads/s", "+-", "CPU us a read", "guest memory");
    for row in &results.front_ends {
        println!(
            "{:40} {:>10.0} {:>6.1} % {:>14.1} {:>22}",
            row.name,
            row.reads_per_s,
            row.spread_percent,
            row.cpu_us_per_read,
            if row.guest_memory_private { "private, can merge" } else { "shared, cannot merge" }
        );
    }
}

fn show_pressure(results: &Results) {
    let limit = results.pressure.first().map_or(0, |row| row.limit_bytes);
    println!(
        "\n{READERS} guests read an independent copy of one file {PASSES} times, host memory for the guests and one copy ({:.0} MiB)",
        mib(limit)
    );
    println!(
        "{:48} {:>10} {:>9} {:>10} {:>9} {:>10} {:>7}",
        "", "swap MiB", "change", "disk MiB", "change", "peak MiB", "s"
    );
    for row in &results.pressure {
        println!(
            "{:48} {:>10.1} {:>7.1} % {:>10.1} {:>7.1} % {:>10.1} {:>7.1}",
            row.name,
            mib(row.swap_bytes),
            row.swap_change_percent,
            mib(row.disk_read_bytes),
            row.disk_change_percent,
            mib(row.peak_bytes),
            row.seconds
        );
    }
}
