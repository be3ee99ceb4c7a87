//! What mounts and builds take: warm reads and maps, cold starts, builds.

use super::composefs::Composefs;
use super::trees::*;
use crate::process::{self, Failure, sh, wait_for};
use crate::scratch::Scratch;
use crate::stats::Spread;
use pagefold_image::profile::Profile;
use pagefold_image::store::{ImageRecord, Store};
use pagefold_os::mem::Mapping;
use serde_json::{Value, json};
use std::ffi::OsString;
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Processor time of this thread, in seconds: what a warm read costs, whatever else is running.
fn cpu_s() -> f64 {
    pagefold_os::sched::thread_cpu_ns() as f64 / 1e9
}

/// A whole file mapped shared and read-only.
fn map(path: &Path) -> Result<Mapping, Failure> {
    let file = File::open(path)?;
    let len = file.metadata()?.len() as usize;
    Ok(Mapping::file(file.as_raw_fd(), 0, len, libc::PROT_READ, libc::MAP_SHARED)?)
}

fn sum(mapping: &Mapping) -> u64 {
    // SAFETY: the mapping is readable and as long as its file, which stays whole during the bench; the slice does not outlive
    // the mapping.
    let words = unsafe { std::slice::from_raw_parts(mapping.as_ptr().cast::<u64>(), mapping.len() / 8) };
    words.iter().fold(0u64, |sum, word| sum.wrapping_add(*word))
}

/// Warm reads and maps, plain against mount, in turn: of the largest file, and of files below 2 MiB (most of a tree).
/// `mapped` reads a standing mapping, `map and read` maps the file anew each time, page faults and all.
pub(super) fn throughput(plain: &Path, mounted: &Path, rounds: usize, out: &mut Vec<Value>) -> Result<(), Failure> {
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
        let there = |(path, size): &(PathBuf, u64)| -> Result<(PathBuf, u64), Failure> {
            Ok((mounted.join(path.strip_prefix(plain)?), *size))
        };
        let other = list.iter().map(there).collect::<Result<Vec<_>, Failure>>()?;
        let bytes: u64 = list.iter().map(|(_, size)| size).sum();
        if bytes == 0 {
            continue;
        }
        // Enough passes that a round takes tens of milliseconds of CPU time.
        let passes = ((512 << 20) / bytes).clamp(1, 200);
        let once = |list: &[(PathBuf, u64)]| -> Result<f64, Failure> {
            let standing = match what {
                "mapped" => list.iter().map(|(path, _)| map(path)).collect::<Result<Vec<_>, _>>()?,
                _ => Vec::new(),
            };
            std::hint::black_box(standing.iter().map(sum).fold(0, u64::wrapping_add));
            let start = cpu_s();
            for _ in 0..passes {
                if what.starts_with("read") {
                    std::hint::black_box(read_all(list)?);
                } else if what == "mapped" {
                    std::hint::black_box(standing.iter().map(sum).fold(0, u64::wrapping_add));
                } else {
                    for (path, _) in list {
                        std::hint::black_box(sum(&map(path)?));
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
        let (ratio, a, b) = (Spread::of(ratios), Spread::of(a), Spread::of(b));
        out.push(json!({ "bench": "warm", "what": what, "bytes": bytes, "files": list.len(), "rounds": rounds,
            "ext4_gb_per_s": a.median, "pagefold_gb_per_s": b.median, "ratio_of_fastest": b.high / a.high,
            "ratio": ratio.median, "ratio_min": ratio.low, "ratio_max": ratio.high }));
    }
    Ok(())
}

/// What programs are started from: a plain directory, a standing mount of its image, and the image.
pub(super) struct Started<'a> {
    pub plain: &'a Path,
    pub mounted: &'a Path,
    pub store: &'a Store,
    pub record: &'a ImageRecord,
}

/// Has `pagefold image exec` record what `command` reads, and returns the words that start it with that profile; `None`
/// where the tool is not built.
fn learned(started: &Started, command: &[&str]) -> Result<Option<Vec<OsString>>, Failure> {
    let tool = match process::tool() {
        Ok(tool) => tool,
        Err(error) => {
            eprintln!("SKIPPED: learned starts: {error}");
            return Ok(None);
        }
    };
    let words = |more: &[&str]| -> Vec<OsString> {
        let mut words = vec![tool.clone().into(), "image".into(), "--store".into(), started.store.root().into()];
        words.extend(
            ["exec", &started.record.name].iter().chain(more).chain(&["--"]).chain(command).map(OsString::from),
        );
        words
    };
    let learn = words(&["--record-profile"]);
    let said = Command::new(&learn[0]).args(&learn[1..]).stdout(Stdio::null()).stderr(Stdio::null()).status()?;
    if !said.success() {
        return Err(format!("{learn:?}: {said}").into());
    }
    wait_for("a profile", Duration::from_secs(60), || Profile::load(started.store, &started.record.digest))?;
    Ok(Some(words(&[])))
}

/// Starts `command` with everything out of the kernel's caches, names and inodes too, from a plain directory and from
/// mounts in turn, and by `exec` of the image, which mounts it and prefetches what an earlier start needed; the order
/// turns each round. Other load on the disk only adds time, so the fastest runs are recorded as well.
pub(super) fn cold_start(
    scratch: &Scratch,
    started: &Started,
    composefs: Option<&Composefs>,
    command: &[&str],
    rounds: usize,
    out: &mut Vec<Value>,
) -> Result<(), Failure> {
    let run = |words: &[OsString]| -> Result<(f64, f64), Failure> {
        // SAFETY: sync takes nothing and cannot fail.
        unsafe { libc::sync() };
        fs::write("/proc/sys/vm/drop_caches", "3")?;
        // The program that enters the tree is the host's: it starts warm for all.
        Command::new(&words[0]).arg("--version").stdout(Stdio::null()).status()?;
        let (start, cpu) = (Instant::now(), process::cpu_s(libc::RUSAGE_CHILDREN));
        let status = Command::new(&words[0]).args(&words[1..]).stdout(Stdio::null()).stderr(Stdio::null()).status()?;
        if !status.success() {
            return Err(format!("{words:?}: {status}").into());
        }
        Ok((start.elapsed().as_secs_f64() * 1e3, (process::cpu_s(libc::RUSAGE_CHILDREN) - cpu) * 1e3))
    };
    if let Err(error) = fs::OpenOptions::new().write(true).open("/proc/sys/vm/drop_caches") {
        eprintln!("SKIPPED: cold starts: /proc/sys/vm/drop_caches: {error}");
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
    let wall = |which: usize| Spread::of(times[which].iter().map(|run| run.0));
    let cpu = |which: usize| Spread::of(times[which].iter().map(|run| run.1)).median;
    for (which, (peer, _)) in starts.iter().enumerate() {
        let ms = wall(which);
        out.push(json!({ "bench": "cold start", "peer": peer, "command": command.join(" "), "rounds": rounds,
            "ms": ms.median, "ms_min": ms.low, "ms_max": ms.high, "cpu_ms": cpu(which),
            "ratio": ms.median / wall(0).median, "ratio_of_fastest": ms.low / wall(0).low, "cpu_ratio": cpu(which) / cpu(0) }));
    }
    Ok(())
}

/// Builds `dir` anew, again unchanged, and beside other builders; the input is in memory, the output durable. Nothing is removed
/// before the last round: ext4 without a journal looks for minutes at each inode that was freed before it gives out another, which
/// made every builder five times slower.
pub(super) fn build_speed(
    scratch: &Scratch,
    dir: &Path,
    composefs: Option<&Composefs>,
    rounds: usize,
    out: &mut Vec<Value>,
) -> Result<(), Failure> {
    let list = files(dir);
    let bytes: u64 = list.iter().map(|(_, size)| size).sum();
    const PEERS: [&str; 3] = ["pagefold", "pagefold, no change", "mkcomposefs and sync"];
    let mut times: [Vec<f64>; 3] = Default::default();
    read_all(&list)?;
    for round in 0..rounds {
        let root = scratch.dir.join(format!("speed-{round}"));
        let place = scratch.sub(&format!("speed-peer-{round}"))?;
        let sync = format!("sync -f {}", scratch.dir.display());
        sh(&sync)?;
        let store = Store::open(&root, "default")?;
        times[0].push(build_tree(&store, "a", dir)?.1.as_secs_f64());
        times[1].push(build_tree(&store, "b", dir)?.1.as_secs_f64());
        if let Some(composefs) = composefs {
            fs::create_dir(place.join("objects"))?;
            sh(&sync)?;
            let start = Instant::now();
            composefs.build(&place.join("objects"), dir, &place.join("image.cfs"))?;
            sh(&sync)?;
            times[2].push(start.elapsed().as_secs_f64());
        }
    }
    for round in 0..rounds {
        for place in ["speed", "speed-peer"] {
            fs::remove_dir_all(scratch.dir.join(format!("{place}-{round}")))?;
        }
    }
    let first = Spread::of(times[0].iter().copied()).median;
    for (peer, seconds) in PEERS.iter().zip(times).filter(|(_, seconds)| !seconds.is_empty()) {
        let spread = Spread::of(seconds);
        out.push(json!({ "bench": "build", "peer": peer, "bytes": bytes, "files": list.len(), "seconds": spread.median,
            "seconds_min": spread.low, "seconds_max": spread.high, "mb_per_s": bytes as f64 / spread.median / 1e6, "rounds": rounds,
            "first_build_over_this": first / spread.median }));
    }
    Ok(())
}
