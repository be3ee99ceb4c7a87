//! Real guests: QEMU machines that booted apart and read the same files, each in an order of its own.

use super::args::Args;
use super::engine::{MergingEngine, Running};
use super::settle::{PERIOD, settle};
use crate::files::{copy_files, ext4};
use crate::process::Failure;
use crate::record;
use crate::stats::Spread;
use crate::vm::{self, Boot, Guest, Setup, same};
use pagefold_scan::{Config, Process, Report as Found, Source, scan};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Merging has come to rest when nothing changed for this long: guests write now and then, and KSM's passes are long.
const QUIET: Duration = Duration::from_secs(8);

/// One run over guests.
struct Run {
    /// Pages that one copy of each content would save, as the dry run finds before anything is merged.
    could_save: u64,
    saved: u64,
    merged: u64,
    cpu_s: f64,
}

/// Measures guests under us and under KSM.
pub fn measure(args: &Args) -> Result<(), Failure> {
    let dir = tempfile::tempdir()?;
    let boot = match Boot::prepare(dir.path()) {
        Ok(boot) => boot,
        Err(error) => {
            eprintln!("SKIPPED: guests: {error}");
            return Ok(());
        }
    };
    let counts: &[usize] = match (args.extent.quick, args.extent.full) {
        (true, _) => &[2],
        (_, true) => &[2, 4, 8],
        _ => &[2, 4],
    };
    let tree_mib = if args.extent.quick { 24 } else { 96 };
    let (tree, image) = (dir.path().join("tree"), dir.path().join("disk.raw"));
    let from = ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/bin", "/usr/share"].map(PathBuf::from);
    copy_files(&from, &tree, tree_mib, true)?;
    ext4(&tree, &image, tree_mib * 3 / 2 + 64)?;
    let mut rows = Vec::new();
    for count in counts {
        for engine in args.pair() {
            let mut runs = Vec::new();
            for _ in 0..if args.extent.quick { 1 } else { args.rounds().min(3) } {
                runs.push(once(engine, &boot, &image, *count)?);
            }
            let of = |f: &dyn Fn(&Run) -> f64| Spread::of(runs.iter().map(f));
            let cpu = of(&|run| run.cpu_s * 1e6 / run.merged.max(1) as f64);
            let share = of(&|run| run.saved as f64 / run.could_save.max(1) as f64);
            rows.push(json!({
                "part": "guests", "guests": count, "engine": engine.name(), "tree_mib": tree_mib,
                "could_save_pages": of(&|run| run.could_save as f64).median,
                "saved_pages": of(&|run| run.saved as f64).median, "merged": of(&|run| run.merged as f64).median,
                "share": share, "cpu_us_per_page": cpu,
            }));
        }
    }
    record::table(
        &format!(
            "guests: booted apart, each read {tree_mib} MiB of the same files in its own order; linux {}",
            boot.version
        ),
        "guests|engine|can save=could_save_pages:0|saved=saved_pages:0|share:3|CPU us/page=cpu_us_per_page:2",
        rows,
    );
    Ok(())
}

fn dry_run(pids: &[i32]) -> Result<Found, Failure> {
    let mut sources: Vec<Box<dyn Source>> = Vec::new();
    for pid in pids {
        sources.push(Box::new(Process::new(*pid)?));
    }
    Ok(scan(sources, &Config { map_budget: u64::MAX, ..Config::default() }, &mut |_| {}))
}

fn once(engine: MergingEngine, boot: &Boot, image: &Path, count: usize) -> Result<Run, Failure> {
    let running = Running::start(engine, PERIOD)?;
    let setup = Setup {
        memory_mib: 256,
        drive: format!("file={},format=raw,cache=writeback,readonly=on", image.display()),
        accel: Some("tcg,thread=multi".into()),
        // Besides guest memory, which QEMU marks itself, the kernel and the first files that it boots are equal too.
        under: running.run(&["--manage=all"]),
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
    let could_save = (found.cost.duplicate_bytes + found.cost.zero_bytes) / 4096;
    let samples = settle(&running, QUIET)?;
    let last = samples[samples.len() - 1];
    // They still read the same bytes.
    same(&vm::all(&mut guests, "cat /mnt/f* | md5sum")?)?;
    Ok(Run {
        could_save,
        saved: running.saved(),
        merged: last.merged - samples[0].merged,
        cpu_s: (last.cpu_ns - samples[0].cpu_ns) as f64 / 1e9,
    })
}
