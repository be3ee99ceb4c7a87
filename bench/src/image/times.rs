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
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Maps the largest file anew and reads it, of the plain tree and of the mount in turn: page faults and all, by processor
/// time.
pub(super) fn map_and_read(plain: &Path, mounted: &Path, rounds: usize, out: &mut Vec<Value>) -> Result<(), Failure> {
    let (path, bytes) = files(plain).into_iter().max_by_key(|(_, size)| *size).ok_or("an empty tree")?;
    // Enough passes that a round takes tens of milliseconds.
    let passes = ((512 << 20) / bytes.max(1)).clamp(1, 200);
    let gb_per_s = |path: &Path| -> Result<f64, Failure> {
        let (file, start) = (File::open(path)?, pagefold_os::sched::thread_cpu_ns());
        for _ in 0..passes {
            let map = Mapping::file(file.as_raw_fd(), 0, bytes as usize, libc::PROT_READ, libc::MAP_SHARED)?;
            // SAFETY: the mapping is readable and as long as its file, which stays whole during the bench; the slice does
            // not outlive the mapping.
            let words = unsafe { std::slice::from_raw_parts(map.as_ptr().cast::<u64>(), map.len() / 8) };
            std::hint::black_box(words.iter().fold(0u64, |sum, word| sum.wrapping_add(*word)));
        }
        Ok((bytes * passes) as f64 / (pagefold_os::sched::thread_cpu_ns() - start) as f64)
    };
    let places = [path.clone(), mounted.join(path.strip_prefix(plain)?)];
    places.iter().try_for_each(|place| gb_per_s(place).map(drop))?;
    let measured = (0..rounds).map(|_| Ok([gb_per_s(&places[0])?, gb_per_s(&places[1])?]));
    let measured = measured.collect::<Result<Vec<_>, Failure>>()?;
    for (number, peer) in ["plain directory", "pagefold"].into_iter().enumerate() {
        let gb_per_s = Spread::of(measured.iter().map(|round| round[number]));
        out.push(
            json!({ "bench": "map and read", "peer": peer, "bytes": bytes, "rounds": rounds, "gb_per_s": gb_per_s }),
        );
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

/// Builds `dir` anew, again unchanged, and beside other builders; the input is in memory, the output durable. Nothing is
/// removed before the last round: ext4 without a journal looks for minutes at each inode that was freed before it gives out
/// another, which made every builder five times slower.
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
