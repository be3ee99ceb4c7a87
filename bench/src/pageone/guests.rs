//! Real guests: QEMU machines that booted apart and read the same files, each in an order of its own.

use super::engine::{Engine, Running};
use super::{Failure, Options, PERIOD, Report, Spread, settle};
use crate::vm::{self, Boot, Guest, Setup};
use pagefold_scan::{Config, Process, Report as Found, Source, scan};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Merging has come to rest when nothing changed for this long: guests write now and then, and KSM's passes are long.
const QUIET: Duration = Duration::from_secs(8);

/// One run over guests.
struct Run {
    /// Pages that one copy of each content would save, as the dry run finds before anything is merged.
    could_save: u64,
    saved: u64,
    /// Duplicates in huge pages at the end: those that were left whole, and QEMU's own.
    left_huge: u64,
    pages_per_run: f64,
    merged: u64,
    cpu_s: f64,
}

/// Measures guests under us and under KSM.
pub fn measure(options: &Options, report: &mut Report) -> Result<(), Failure> {
    let dir = tempfile::tempdir()?;
    let boot = match Boot::prepare(dir.path()) {
        Ok(boot) => boot,
        Err(error) => {
            eprintln!("SKIPPED: guests: {error}");
            return Ok(());
        }
    };
    let tool = std::env::current_exe()?.with_file_name("pagefold");
    if !tool.exists() {
        eprintln!("SKIPPED: guests: no {}; cargo build --release makes it", tool.display());
        return Ok(());
    }
    let counts: &[usize] = match (options.quick, options.full) {
        (true, _) => &[2],
        (_, true) => &[2, 4, 8],
        _ => &[2, 4],
    };
    let tree_mib = if options.quick { 24 } else { 96 };
    let image = image(dir.path(), tree_mib)?;
    crate::record::table!(
        "guests: booted apart, each read {tree_mib} MiB of the same files in its own order; linux {}",
        boot.version
    );
    crate::record::table!(
        "{:7} {:22} {:>10} {:>9} {:>10} {:>8} {:>10} {:>20} {:>8}",
        "guests",
        "engine",
        "can save",
        "mean run",
        "saved",
        "share",
        "left huge",
        "cpu us/page",
        "speed"
    );
    for count in counts {
        let mut peer: Option<f64> = None;
        for engine in options.pair().into_iter().rev() {
            let mut runs = Vec::new();
            for _ in 0..if options.quick { 1 } else { options.rounds.min(3) } {
                runs.push(once(engine, &boot, &tool, &image, *count)?);
            }
            let of = |f: &dyn Fn(&Run) -> f64| Spread::of(runs.iter().map(f).collect());
            let cpu = of(&|run| run.cpu_s * 1e6 / run.merged.max(1) as f64);
            let share = of(&|run| run.saved as f64 / run.could_save.max(1) as f64);
            let speed = peer.map(|peer| peer / cpu.median);
            crate::record::table!(
                "{count:<7} {:22} {:>10} {:>9.1} {:>10} {:>8} {:>10} {:>20} {:>8}",
                engine.name(),
                of(&|run| run.could_save as f64).median,
                of(&|run| run.pages_per_run).median,
                of(&|run| run.saved as f64).median,
                format!("{:.1} %", share.median * 100.0),
                of(&|run| run.left_huge as f64).median,
                cpu.show(2),
                speed.map_or("-".into(), |speed| format!("{speed:.2} x"))
            );
            report.rows.push(json!({
                "part": "guests", "guests": count, "engine": engine.name(), "tree_mib": tree_mib,
                "could_save_pages": of(&|run| run.could_save as f64).median,
                "saved_pages": of(&|run| run.saved as f64).median, "merged": of(&|run| run.merged as f64).median,
                "mean_run": of(&|run| run.pages_per_run).median, "share": share.json(), "left_huge_pages": of(&|run| run.left_huge as f64).median,
                "cpu_us_per_page": cpu.json(), "speed_against_ksm": speed,
            }));
            peer.get_or_insert(cpu.median);
        }
    }
    Ok(())
}

/// An ext4 image with files of this machine.
fn image(dir: &Path, mib: u64) -> Result<PathBuf, Failure> {
    let tree = dir.join("tree");
    std::fs::create_dir(&tree)?;
    let mut left = (mib << 20) as i64;
    let mut number = 0;
    for from in ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/bin", "/usr/share"] {
        let mut entries: Vec<PathBuf> =
            std::fs::read_dir(from).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
        entries.sort();
        for path in entries {
            let Ok(metadata) = path.symlink_metadata() else { continue };
            if left > 0 && metadata.is_file() && metadata.len() > 0 && metadata.len() < 16 << 20 {
                std::fs::copy(&path, tree.join(format!("f{number}")))?;
                number += 1;
                left -= metadata.len() as i64;
            }
        }
    }
    let image = dir.join("disk.raw");
    let blocks = ((mib * 3 / 2 + 64) * 256).to_string();
    let made = Command::new("mke2fs")
        .args(["-q", "-t", "ext4", "-b", "4096", "-d"])
        .arg(&tree)
        .arg(&image)
        .arg(blocks)
        .status()?;
    if !made.success() {
        return Err("mke2fs failed".into());
    }
    std::fs::remove_dir_all(tree)?;
    Ok(image)
}

fn dry_run(pids: &[i32]) -> Result<Found, Failure> {
    let mut sources: Vec<Box<dyn Source>> = Vec::new();
    for pid in pids {
        sources.push(Box::new(Process::new(*pid)?));
    }
    Ok(scan(sources, &Config { map_budget: u64::MAX, ..Config::default() }, &mut |_| {}))
}

fn once(engine: Engine, boot: &Boot, tool: &Path, image: &Path, count: usize) -> Result<Run, Failure> {
    let running = Running::start(engine, PERIOD)?;
    let under = match running.socket() {
        Some(socket) => {
            // Beside its guest's memory, which QEMU marks itself, the kernel and the first files that it boots are equal too.
            let run = ["run", "--manage=all", "--socket"].map(str::to_owned);
            [vec![tool.display().to_string()], run.into(), vec![socket.display().to_string(), "--".into()]].concat()
        }
        None => Vec::new(),
    };
    let setup = Setup {
        memory_mib: 256,
        drive: format!("file={},format=raw,cache=writeback,readonly=on", image.display()),
        accel: Some("tcg,thread=multi".into()),
        under,
        ..Setup::default()
    };
    let mut guests: Vec<Guest> = (0..count).map(|_| Guest::start(boot, &setup)).collect::<Result<_, _>>()?;
    let pids: Vec<i32> = guests.iter().map(Guest::pid).collect();
    running.hold(&pids)?;
    guests.iter_mut().try_for_each(Guest::ready)?;
    vm::all(&mut guests, "mkdir -p /mnt; mount -t ext4 -o ro /dev/vda /mnt; echo $?")?;
    for (number, guest) in guests.iter_mut().enumerate() {
        // Sorted by a digest that begins with the guest's number: another order in each.
        guest.begin(&format!(
            "cd /mnt; for f in f*; do echo $(echo {number}$f | md5sum | cut -c1-8) $f; done | sort | while read d f; do cat $f; done | md5sum"
        ))?;
    }
    for guest in &mut guests {
        guest.wait()?;
    }
    let found = dry_run(&pids)?;
    let could_save = (found.cost.saved_duplicate_bytes + found.cost.saved_zero_bytes) / 4096;
    let samples = settle(&running, QUIET)?;
    let last = samples[samples.len() - 1];
    let left = dry_run(&pids)?.totals.duplicate_huge;
    // They still work, and read what they read before.
    let said = vm::all(&mut guests, "cat /mnt/f* | md5sum")?;
    if said.windows(2).any(|pair| pair[0] != pair[1]) {
        return Err(format!("guests read different things: {said:?}").into());
    }
    Ok(Run {
        could_save,
        saved: running.saved(),
        left_huge: left,
        pages_per_run: found.runs.mean,
        merged: last.merged - samples[0].merged,
        cpu_s: (last.cpu_ns - samples[0].cpu_ns) as f64 / 1e9,
    })
}
