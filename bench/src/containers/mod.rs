//! `pagefold bench containers`: images and containers of containerd by our snapshotter, beside containerd's for overlayfs
//! and EROFS.
//!
//! Memory is counted on the files of the containers' roots, each page once: both kinds of roots are mounts of overlayfs, and
//! the frames tell which of their files show one memory. The ideal is what the different files of both versions take.

mod engine;
mod images;

use crate::image::{evict, files, names_below, read_all};
use crate::process::{self, Failure};
use crate::scratch::Scratch;
use crate::stats::Spread;
use crate::{files::target, options, record};
use clap::Parser;
use engine::{Engine, Registry, lacks};
use images::{Version, versions};
use pagefold_image::progress::Progress;
use pagefold_image::{scan, stat};
use serde_json::{Value, json};
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

/// Containers of containerd: memory, unpacking and starts, against its overlayfs snapshotter. Needs root.
#[derive(Parser, Debug)]
#[command(name = "pagefold bench containers", after_help = "Example:\n  pagefold bench containers --quick")]
struct Args {
    /// Rounds of starts and pulls; without it 9 (with --quick 1).
    #[arg(long, value_name = "N", value_parser = options::positive())]
    rounds: Option<usize>,
    /// Where images and containers are made.
    #[arg(long, value_name = "SCRATCH")]
    dir: Option<PathBuf>,
    #[command(flatten)]
    extent: options::Extent,
}

/// Kind of a row, title of its table, columns.
const TABLES: [(&str, &str, &str); 3] = [
    (
        "container memory",
        "Every file of two versions read in containers: page cache",
        "peer|MiB=resident_bytes:M1|of the ideal=of_ideal:3 x",
    ),
    (
        "pull",
        "An image of a registry on this machine pulled and unpacked by ctr",
        "peer|known|s=seconds:3|against overlayfs=of_overlayfs:2 x",
    ),
    (
        "container start",
        "A container started, with /bin/true, and removed",
        "peer|caches|ms:1|against overlayfs=of_overlayfs:2 x",
    ),
];

/// Entry point.
pub fn run(args: &[String]) -> ExitCode {
    options::run("containers", args, |args| measure(&args))
}

fn measure(args: &Args) -> Result<(), Failure> {
    record::emit(Vec::new());
    if !process::is_root() {
        eprintln!("SKIPPED: bench containers needs root to mount");
        return Ok(());
    }
    if let Some(lacks) = lacks() {
        eprintln!("SKIPPED: bench containers needs {lacks}");
        return Ok(());
    }
    let scratch = Scratch::new(&args.dir.clone().unwrap_or_else(target))?;
    let rounds = args.rounds.unwrap_or(if args.extent.quick { 1 } else { 9 });
    let versions = versions(&scratch)?;
    let mut rows = Vec::new();
    let engine = Engine::start(&scratch.sub("engine")?)?;
    let peers = engine.snapshotters()?;
    for snapshotter in &peers {
        for version in &versions {
            engine.import(snapshotter, &version.archive)?;
        }
    }
    pulls(&scratch, &engine, &versions[0], (&peers, rounds), &mut rows)?;
    memory(&engine, &peers, &versions, &mut rows)?;
    starts(&engine, &versions[0], (&peers, rounds), &mut rows)?;
    drop(engine);
    record::emit_versions(json!({ "containerd": engine::version("containerd"), "runc": engine::version("runc") }));
    for (kind, title, columns) in TABLES {
        record::table(title, columns, rows.iter().filter(|row| row["bench"] == kind).cloned().collect());
    }
    Ok(())
}

/// Rows of the snapshotters; the others are compared with the first.
fn compare(kind: &str, field: &str, more: (&str, &str), peers: &[&str], measured: Vec<Vec<f64>>, out: &mut Vec<Value>) {
    let spreads: Vec<Spread> = measured.into_iter().map(Spread::of).collect();
    for (peer, spread) in peers.iter().zip(&spreads) {
        let ratio = spread.median / spreads[0].median;
        out.push(json!({ "bench": kind, "peer": peer, more.0: more.1, field: spread, "of_overlayfs": ratio }));
    }
}

/// Pulls of the first version into a containerd that knows nothing, and then into another namespace of the same one. It has
/// the content then. ctr of containerd 1.6 does not tell a snapshotter which layer it unpacks, so both unpack again.
///
/// What our snapshotter answers for is on the disk. What overlayfs' does is not, so a row shows its pulls with a sync.
fn pulls(
    scratch: &Scratch,
    engine: &Engine,
    version: &Version,
    (peers, rounds): (&[&str], usize),
    out: &mut Vec<Value>,
) -> Result<(), Failure> {
    let Some(registry) = Registry::start(&scratch.sub("registry")?)? else {
        eprintln!("SKIPPED: pulls need docker-registry");
        return Ok(());
    };
    let image = format!("{}/app:1", registry.host);
    engine.ctr(&["image", "push", "--plain-http", &image, &version.name])?;
    let names = [peers, &["overlayfs, synced"]].concat();
    let mut measured = [(); 2].map(|()| vec![vec![]; names.len()]);
    for round in 0..rounds {
        for turn in 0..peers.len() {
            let peer = (round + turn) % peers.len();
            let own = Scratch { dir: scratch.sub(&format!("pull-{round}-{turn}"))? };
            // What the last one had is deleted.
            process::sh(&format!("sync -f {}", own.dir.display()))?;
            let engine = Engine::start(&own.dir)?;
            for (known, namespace) in ["one", "two"].into_iter().enumerate() {
                let pulled = engine.pull(namespace, peers[peer], &image)?;
                measured[known][peer].push(pulled);
                // The next pull finds a disk at rest.
                let start = Instant::now();
                process::sh(&format!("sync -f {}", own.dir.display()))?;
                if peer == 0 {
                    measured[known][peers.len()].push(pulled + start.elapsed().as_secs_f64());
                }
            }
        }
    }
    for (known, measured) in ["nothing", "everything"].into_iter().zip(measured) {
        compare("pull", "seconds", ("known", known), &names, measured, out);
    }
    Ok(())
}

/// The page cache of two containers, one of each version, after every file was read in both.
fn memory(engine: &Engine, peers: &[&str], versions: &[Version; 2], out: &mut Vec<Value>) -> Result<(), Failure> {
    let plain = versions.each_ref().map(|version| version.plain.clone());
    let predicted = scan::trees(&plain, &Progress::silent())?;
    let ideal = predicted.total_bytes - predicted.file.duplicate_bytes;
    out.push(json!({ "bench": "container memory", "peer": "ideal", "resident_bytes": ideal, "of_ideal": 1.0 }));
    for snapshotter in peers {
        let mut roots = Vec::new();
        for (number, version) in versions.iter().enumerate() {
            roots.push(engine.hold(snapshotter, &version.name, &format!("held-{number}"))?);
        }
        roots.iter().for_each(|root| evict(names_below(root)));
        for (root, plain) in roots.iter().zip(&plain) {
            let (read, expected) = (read_all(&files(root))?, files(plain).iter().map(|(_, size)| size).sum::<u64>());
            if read != expected {
                return Err(format!("{snapshotter}: a container gave {read} bytes, its files have {expected}").into());
            }
        }
        let held = stat::held(&roots, &Progress::silent())?;
        if held.memory_unknown + held.unreadable > 0 {
            return Err(format!("{snapshotter}: the kernel does not tell what is in memory: {held:?}").into());
        }
        out.push(json!({ "bench": "container memory", "peer": snapshotter, "resident_bytes": held.resident_bytes,
            "duplicate_bytes": held.duplicate_bytes,
            "of_ideal": held.resident_bytes as f64 / ideal as f64 }));
        for number in 0..versions.len() {
            engine.release(&format!("held-{number}"))?;
        }
    }
    Ok(())
}

/// Starts of a container, warm, and with everything out of the kernel's caches.
fn starts(
    engine: &Engine,
    version: &Version,
    (peers, rounds): (&[&str], usize),
    out: &mut Vec<Value>,
) -> Result<(), Failure> {
    let caches = "/proc/sys/vm/drop_caches";
    for kind in ["warm", "cold"] {
        if kind == "cold" && fs::OpenOptions::new().write(true).open(caches).is_err() {
            eprintln!("SKIPPED: cold starts: {caches} cannot be written");
            continue;
        }
        let mut measured = vec![vec![]; peers.len()];
        for round in 0..=rounds {
            for turn in 0..peers.len() {
                let peer = (round + turn) % peers.len();
                if kind == "cold" {
                    process::sh("sync")?;
                    fs::write(caches, "3")?;
                    // containerd, runc and the host's own programs start warm for both.
                    engine.ctr(&["version"])?;
                    process::run("runc", &["--version"])?;
                    process::run("true", &[])?;
                }
                let ms = engine.run(peers[peer], &version.name, &["/bin/true"])?;
                // The first round warms what both have in common.
                if round > 0 {
                    measured[peer].push(ms);
                }
            }
        }
        compare("container start", "ms", ("caches", kind), peers, measured, out);
    }
    Ok(())
}
