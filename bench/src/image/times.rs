//! What mounts and builds take: warm reads and maps, cold starts, builds.

use super::composefs::Composefs;
use super::trees::*;
use super::{Error, Scratch};
use pagefold_image::profile::Profile;
use pagefold_image::store::{Record, Store};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// CPU time of this thread, seconds: what a warm read costs, whoever else is running.
fn cpu_s() -> f64 {
    // SAFETY: timespec is plain numbers, and the clock is written into it.
    let time = unsafe {
        let mut time: libc::timespec = std::mem::zeroed();
        libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time);
        time
    };
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// A whole file mapped shared and read-only, at an address of the kernel's choice.
struct Mapped {
    start: *mut libc::c_void,
    size: usize,
}

impl Mapped {
    fn new(path: &Path) -> Result<Self, Error> {
        use std::os::fd::AsRawFd;
        let file = File::open(path)?;
        let size = file.metadata()?.len() as usize;
        // SAFETY: a new read-only mapping of a file that we hold open.
        let start =
            unsafe { libc::mmap(std::ptr::null_mut(), size, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        if start == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error().into());
        }
        Ok(Self { start, size })
    }

    fn sum(&self) -> u64 {
        // SAFETY: the mapping is whole pages of a file that nobody cuts short during the bench; it is read within its
        // size, and lives as long as `self`.
        let words = unsafe { std::slice::from_raw_parts(self.start.cast::<u64>(), self.size / 8) };
        words.iter().fold(0u64, |sum, word| sum.wrapping_add(*word))
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and no slice of it outlives a call of `sum`.
        unsafe { libc::munmap(self.start, self.size) };
    }
}

/// Warm reads and maps, plain against mount, in turn: of the largest file, and of files below 2 MiB (most of a tree).
/// `mapped` reads a standing mapping, `map and read` maps the file anew each time, page faults and all.
pub(super) fn throughput(plain: &Path, mounted: &Path, rounds: usize, out: &mut Vec<Value>) -> Result<(), Error> {
    let all = files(plain);
    let largest = all.iter().max_by_key(|(_, size)| *size).ok_or("an empty tree")?.clone();
    let mut small: Vec<_> = all.into_iter().filter(|(_, size)| (64 << 10..2 << 20).contains(size)).collect();
    small.sort_by_key(|(_, size)| std::cmp::Reverse(*size));
    small.truncate(100);
    for (what, list) in [
        ("read", vec![largest.clone()]),
        ("read, small files", small.clone()),
        ("mapped", vec![largest.clone()]),
        ("map and read", vec![largest]),
        ("map and read, small files", small),
    ] {
        let there = |(path, size): &(PathBuf, u64)| -> Result<(PathBuf, u64), Error> {
            Ok((mounted.join(path.strip_prefix(plain)?), *size))
        };
        let other = list.iter().map(there).collect::<Result<Vec<_>, Error>>()?;
        let bytes: u64 = list.iter().map(|(_, size)| size).sum();
        if bytes == 0 {
            continue;
        }
        // Enough passes that a round takes tens of milliseconds of CPU time.
        let passes = ((512 << 20) / bytes).clamp(1, 200);
        let once = |list: &[(PathBuf, u64)]| -> Result<f64, Error> {
            let standing = match what {
                "mapped" => list.iter().map(|(path, _)| Mapped::new(path)).collect::<Result<Vec<_>, _>>()?,
                _ => Vec::new(),
            };
            std::hint::black_box(standing.iter().map(Mapped::sum).fold(0, u64::wrapping_add));
            let start = cpu_s();
            for _ in 0..passes {
                if what.starts_with("read") {
                    std::hint::black_box(read_all(list)?);
                } else if what == "mapped" {
                    std::hint::black_box(standing.iter().map(Mapped::sum).fold(0, u64::wrapping_add));
                } else {
                    for (path, _) in list {
                        std::hint::black_box(Mapped::new(path)?.sum());
                    }
                }
            }
            Ok((bytes * passes) as f64 / (cpu_s() - start) / 1e9)
        };
        once(&list)?;
        once(&other)?;
        let (mut a, mut b, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..rounds {
            a.push(once(&list)?);
            b.push(once(&other)?);
            ratios.push(b.last().expect("just pushed") / a.last().expect("just pushed"));
        }
        let (ratio, low, high) = median(ratios);
        let (a, b) = (median(a), median(b));
        out.push(json!({ "bench": "warm", "what": what, "bytes": bytes, "files": list.len(), "rounds": rounds,
            "ext4_gb_per_s": a.0, "pagefold_gb_per_s": b.0, "ratio_of_fastest": b.2 / a.2,
            "ratio": ratio, "ratio_min": low, "ratio_max": high }));
    }
    Ok(())
}

/// CPU time of ended children, seconds.
fn children_cpu_s() -> f64 {
    // SAFETY: rusage is plain numbers, and the call writes into it.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_CHILDREN, &mut usage);
        usage
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

/// What programs are started from: a plain directory, a standing mount of its image, and the image.
pub(super) struct Started<'a> {
    pub plain: &'a Path,
    pub mounted: &'a Path,
    pub store: &'a Store,
    pub record: &'a Record,
}

/// Has `pagefold image exec` learn what `command` needs, and returns the words that start it with that knowledge; `None`
/// where the program is not built.
fn learned(started: &Started, command: &[&str]) -> Result<Option<Vec<OsString>>, Error> {
    let tool = std::env::current_exe()?.with_file_name("pagefold");
    if !tool.exists() {
        eprintln!("bench erofs: SKIPPED: learned starts: no {}; cargo build --release makes it", tool.display());
        return Ok(None);
    }
    let words = |more: &[&str]| -> Vec<OsString> {
        let mut words = vec![tool.clone().into(), "image".into(), "--store".into(), started.store.root().into()];
        words.extend(
            ["exec", &started.record.name].iter().chain(more).chain(&["--"]).chain(command).map(OsString::from),
        );
        words
    };
    let learn = words(&["--record-profile"]);
    let said = Command::new(&learn[0]).args(&learn[1..]).stdout(Stdio::null()).stderr(Stdio::null()).status()?;
    let since = Instant::now();
    while Profile::load(started.store, &started.record.digest).is_none() {
        if !said.success() || since.elapsed() > Duration::from_secs(60) {
            return Err(format!("{learn:?}: {said}, and no profile").into());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(Some(words(&[])))
}

/// Starts `command` with everything out of the kernel's caches, names and inodes too, from a plain directory and from
/// mounts in turn, and by `exec` of the image, which mounts it and reads ahead what an earlier start has needed; the order
/// turns each round. What others do to the disk only adds, so the fastest tell as well.
pub(super) fn cold_start(
    scratch: &Scratch,
    started: &Started,
    composefs: Option<&Composefs>,
    command: &[&str],
    rounds: usize,
    out: &mut Vec<Value>,
) -> Result<(), Error> {
    let run = |words: &[OsString]| -> Result<(f64, f64), Error> {
        // SAFETY: sync takes nothing and cannot fail.
        unsafe { libc::sync() };
        fs::write("/proc/sys/vm/drop_caches", "3")?;
        // The program that leads into the tree is the host's: it starts warm for all.
        Command::new(&words[0]).arg("--version").stdout(Stdio::null()).status()?;
        let (start, cpu) = (Instant::now(), children_cpu_s());
        let status = Command::new(&words[0]).args(&words[1..]).stdout(Stdio::null()).stderr(Stdio::null()).status()?;
        if !status.success() {
            return Err(format!("{words:?}: {status}").into());
        }
        Ok((start.elapsed().as_secs_f64() * 1e3, (children_cpu_s() - cpu) * 1e3))
    };
    if let Err(error) = fs::OpenOptions::new().write(true).open("/proc/sys/vm/drop_caches") {
        eprintln!("bench erofs: SKIPPED: cold starts: /proc/sys/vm/drop_caches: {error}");
        return Ok(());
    }
    let mut roots = vec![("plain directory", started.plain.to_path_buf()), ("pagefold", started.mounted.to_path_buf())];
    let place = scratch.sub("cold-composefs")?;
    if let Some(composefs) = composefs {
        let at = scratch.sub("cold-composefs/mnt")?;
        composefs.build(&scratch.sub("cold-composefs/objects")?, started.plain, &place.join("image"))?;
        composefs.mount(&place.join("objects"), &place.join("image"), &at)?;
        roots.push(("composefs' own tools", at));
    }
    // Programs find themselves and their libraries through /proc.
    let with_proc: Vec<_> = roots.iter().map(|(_, root)| root.join("proc")).filter(|proc| proc.is_dir()).collect();
    for proc in &with_proc {
        sh(&format!("mount -t proc proc {}", proc.display()))?;
    }
    let chroot = |root: &Path| -> Vec<OsString> {
        ["chroot".into(), root.into()].into_iter().chain(command.iter().map(OsString::from)).collect()
    };
    let mut starts: Vec<_> = roots.iter().map(|(peer, root)| (*peer, chroot(root))).collect();
    starts.extend(learned(started, command)?.map(|words| ("pagefold exec, learned", words)));
    for (_, words) in &starts {
        run(words)?;
    }
    let mut times = vec![Vec::new(); starts.len()];
    for round in 0..rounds {
        for step in 0..starts.len() {
            let which = (round + step) % starts.len();
            times[which].push(run(&starts[which].1)?);
        }
    }
    for proc in &with_proc {
        sh(&format!("umount {}", proc.display()))?;
    }
    if composefs.is_some() {
        sh(&format!("umount {}", place.join("mnt").display()))?;
    }
    fs::remove_dir_all(&place)?;
    let wall = |which: usize| median(times[which].iter().map(|run| run.0).collect());
    let cpu = |which: usize| median(times[which].iter().map(|run| run.1).collect()).0;
    for (which, (peer, _)) in starts.iter().enumerate() {
        let mut ratios: Vec<f64> = times[which].iter().zip(&times[0]).map(|(run, plain)| run.0 / plain.0).collect();
        ratios.sort_by(f64::total_cmp);
        let (middle, fastest, slowest) = wall(which);
        out.push(json!({ "bench": "cold start", "peer": peer, "command": command.join(" "), "rounds": rounds,
            "ms": middle, "ms_min": fastest, "ms_max": slowest, "cpu_ms": cpu(which),
            "ratio": middle / wall(0).0, "ratio_of_fastest": fastest / wall(0).1, "cpu_ratio": cpu(which) / cpu(0),
            "round_ratio": ratios[rounds / 2], "round_ratio_low": ratios[rounds / 4],
            "round_ratio_high": ratios[rounds - 1 - rounds / 4] }));
    }
    Ok(())
}

/// Builds `dir` anew, again unchanged, and beside other builders; the input is in memory, the output durable. Nothing is removed
/// before the last round: ext4 without a journal looks for minutes at each inode that was freed before it gives out another, which
/// made builds five times as long, whoever built.
pub(super) fn build_speed(
    scratch: &Scratch,
    dir: &Path,
    composefs: Option<&Composefs>,
    rounds: usize,
    out: &mut Vec<Value>,
) -> Result<(), Error> {
    let list = files(dir);
    let bytes: u64 = list.iter().map(|(_, size)| size).sum();
    let has_mkfs = Command::new("mkfs.erofs").arg("-V").output().is_ok();
    const PEERS: [&str; 5] =
        ["pagefold", "pagefold, no change", "mkcomposefs and sync", "mkfs.erofs and sync", "cp -a and sync"];
    let mut times: [Vec<f64>; 5] = Default::default();
    read_all(&list)?;
    for round in 0..rounds {
        let root = scratch.dir.join(format!("speed-{round}"));
        let place = scratch.sub(&format!("speed-peer-{round}"))?;
        let sync = format!("sync -f {}", scratch.dir.display());
        sh(&sync)?;
        let store = Store::open(&root, "default")?;
        times[0].push(build_tree(&store, "a", dir)?.1.as_secs_f64());
        times[1].push(build_tree(&store, "b", dir)?.1.as_secs_f64());
        let timed = |run: &dyn Fn() -> Result<(), Error>| -> Result<f64, Error> {
            sh(&sync)?;
            let start = Instant::now();
            run()?;
            sh(&sync)?;
            Ok(start.elapsed().as_secs_f64())
        };
        if let Some(composefs) = composefs {
            fs::create_dir(place.join("objects"))?;
            times[2].push(timed(&|| composefs.build(&place.join("objects"), dir, &place.join("image.cfs")))?);
        }
        if has_mkfs {
            let image = place.join("peer.erofs");
            times[3].push(timed(&|| sh(&format!("mkfs.erofs --quiet {} {}", image.display(), dir.display())))?);
        }
        let copy = place.join("copy");
        times[4].push(timed(&|| sh(&format!("cp -a {} {}", dir.display(), copy.display())))?);
    }
    for round in 0..rounds {
        for place in ["speed", "speed-peer"] {
            fs::remove_dir_all(scratch.dir.join(format!("{place}-{round}")))?;
        }
    }
    let first = median(times[0].clone()).0;
    for (peer, seconds) in PEERS.iter().zip(times).filter(|(_, seconds)| !seconds.is_empty()) {
        let (middle, low, high) = median(seconds);
        out.push(json!({ "bench": "build", "peer": peer, "bytes": bytes, "files": list.len(), "seconds": middle,
            "seconds_min": low, "seconds_max": high, "mb_per_s": bytes as f64 / middle / 1e6, "rounds": rounds,
            "first_build_over_this": first / middle }));
    }
    Ok(())
}
