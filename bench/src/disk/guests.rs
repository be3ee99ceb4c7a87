//! Disk images under real guests: what is shared beside KSM, what it costs the guests, and what it saves when the host
//! has memory for one copy of what four guests read.

mod front_ends;
mod overhead;
mod pressure;
mod sharing;
mod show;

use super::files::drop_cached;
use super::server::Server;
use super::{Failure, Scratch};
use crate::undo::command;
use crate::vm::{Boot, Guest, Setup};
use front_ends::front_ends;
use overhead::overhead;
use pagefold_os::procfs;
use pressure::pressure;
use serde::Serialize;
use sharing::sharing;
pub(super) use show::show;
use std::path::{Path, PathBuf};
use std::time::Duration;

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

impl Size {
    /// A cache that has room for all that is in two images.
    fn cache_mib(&self) -> usize {
        (self.tree_mib * 2 + 64) as usize
    }
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
        command("mke2fs", &["-q", "-t", "ext4", "-b", "4096", "-d", &tree, &image.display().to_string(), &blocks])?;
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
