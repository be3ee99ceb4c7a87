//! `pagefold bench erofs`: the memory that image trees save, and what the mounts cost.
//!
//! Memory is counted on the files themselves (cachestat, or mincore through a mount), every inode once, never by the
//! system's `Cached` line. Between two readings the counted files are evicted from the page cache by fadvise.
//!
//! Peers: plain directories, overlayfs with a shared base layer, a hard-linked store, and composefs' own mkcomposefs and
//! mount.composefs where they are installed or `bench/fetch-images.sh` has put them.

mod composefs;
mod memory;
mod times;
mod trees;

use crate::files::{fetched_images, target};
use crate::process::{self, Failure, sh};
use crate::scratch::Scratch;
use crate::{options, record};
use clap::Parser;
use composefs::Composefs;
use memory::{Pair, memory_of_pair, run_time};
use pagefold_image::mount::{self, Options};
use pagefold_image::store::Store;
use serde_json::{Value, json};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use times::{Started, build_speed, cold_start, map_and_read};
use trees::build_tree;
pub(crate) use trees::{evict, files, names_below, read_all};

/// Image trees: page cache shared by content, against other ways. Needs root.
#[derive(Parser, Debug)]
#[command(
    name = "pagefold bench erofs",
    after_help = "Examples:\n  pagefold bench erofs --quick\n  pagefold bench erofs --full --pair redis"
)]
struct Args {
    /// Two versions of a tree, made of this machine's own directories (the default).
    #[arg(long, conflicts_with = "full")]
    quick: bool,
    /// The pairs that bench/fetch-images.sh fetches, each over one Debian base, and their programs run from the mounts.
    #[arg(long)]
    full: bool,
    /// With --full: this pair only.
    #[arg(long, value_name = "NAME")]
    pair: Option<String>,
    /// With --full: times only.
    #[arg(long)]
    timed: bool,
    /// Where bench/fetch-images.sh puts its images.
    #[arg(long, value_name = "DIR")]
    inputs: Option<PathBuf>,
    /// Where trees and stores are made.
    #[arg(long, value_name = "SCRATCH")]
    dir: Option<PathBuf>,
    /// JSON instead of tables.
    #[arg(long)]
    json: bool,
}

/// A pair of `bench/images.toml`, which says what the fields mean.
#[derive(serde::Deserialize)]
pub struct Source {
    /// Its name.
    pub name: String,
    start: Vec<String>,
    /// What both versions do, in a shell in the tree.
    pub work: String,
}

/// The pairs.
pub fn sources() -> Vec<Source> {
    #[derive(serde::Deserialize)]
    struct File {
        pair: Vec<Source>,
    }
    toml::from_str::<File>(include_str!("../../images.toml")).expect("a test reads it").pair
}

/// Kind of a row, title of its table, columns.
const TABLES: [(&str, &str, &str); 5] = [
    (
        "read-all",
        "Every file of both versions read: memory by each way of keeping the trees",
        "pair|peer|MiB=resident_bytes:M1|metadata MiB=metadata_bytes:M1|saved=saved_percent:1 %|of ideal=of_ideal_percent:1 %",
    ),
    (
        "run time",
        "Programs of both versions run: pages of the trees in memory",
        "pair|plain MiB=plain_bytes:M1|pagefold MiB=pagefold_bytes:M1|saved=saved_percent:1 %|error",
    ),
    (
        "map and read",
        "The largest file mapped anew and read, warm, of processor time",
        "peer|MiB=bytes:M1|GB/s=gb_per_s:2",
    ),
    (
        "cold start",
        "Programs started with cold caches, against a plain directory",
        "peer|command|ms:1|least=ms_min:1|most=ms_max:1|ratio:3 x|of the fastest=ratio_of_fastest:3|CPU=cpu_ratio:3",
    ),
    (
        "build",
        "Trees built into images",
        "peer|MiB=bytes:M1|s=seconds:3|least=seconds_min:3|most=seconds_max:3|a first build takes=first_build_over_this:2 x",
    ),
];

fn quick(scratch: &Scratch, composefs: Option<&Composefs>, out: &mut Vec<Value>) -> Result<(), Failure> {
    let plain = [scratch.sub("plain-1")?, scratch.sub("plain-2")?];
    for dir in &plain {
        let dir = dir.display();
        sh(&format!(
            "cd /; cp -a --parents $(ls -d usr/lib/python3 usr/lib/python3.11 usr/share/perl 2>/dev/null) {dir}"
        ))?;
        // A program and what it is linked with, so that it starts in the tree.
        sh(&format!(
            "for p in /usr/bin/python3.11 /bin/sh; do cp -L --parents $p $(ldd $p | grep -o '/[^ ]*') {dir}; done"
        ))?;
    }
    let mut noise = vec![0; 48 << 20];
    fastrand::Rng::with_seed(1).fill(&mut noise);
    for dir in &plain {
        fs::write(dir.join("large"), &noise)?;
    }
    drop(noise);
    // The second version: every tenth file changed, every hundredth gone.
    for (number, (path, _)) in files(&plain[1]).into_iter().enumerate() {
        if path.extension().is_some_and(|end| end == "py" || end == "pyc") && number % 10 == 0 {
            use std::io::Write;
            File::options().append(true).open(&path)?.write_all(b"\n# changed\n")?;
        } else if path.extension().is_some_and(|end| end == "py") && number % 100 == 1 {
            fs::remove_file(&path)?;
        }
    }
    sh(&format!("sync -f {}", scratch.dir.display()))?;
    let pair = Pair { name: "local", plain, layers: None };
    let (store, mounts, records) = memory_of_pair(scratch, &pair, composefs, out)?;
    map_and_read(&pair.plain[0], &mounts[0], 15, out)?;
    cold_start(
        scratch,
        &Started { plain: &pair.plain[0], mounted: &mounts[0], store: &store, record: &records[0] },
        composefs,
        &["/usr/bin/python3.11", "-S", "-c", "import json, email, http.client"],
        9,
        out,
    )?;
    build_speed(scratch, &pair.plain[0], composefs, 3, out)
}

/// Makes the inputs of the full bench: some ten minutes, by the package managers of this system.
fn fetch(cache: &Path) -> Result<(), Failure> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/fetch-images.sh");
    eprintln!("bench erofs: {}: no inputs there; {script} makes them", cache.display());
    let status = Command::new(script).arg(cache).stdout(Stdio::null()).status();
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{script} {}: {status}; what it said stands above", cache.display()).into()),
        Err(error) => Err(format!("{script}: {error}").into()),
    }
}

fn full(
    scratch: &Scratch,
    cache: &Path,
    args: &Args,
    composefs: Option<&Composefs>,
    out: &mut Vec<Value>,
) -> Result<(), Failure> {
    let base = cache.join("base");
    let (sources, mut measured) = (sources(), 0);
    for Source { name, start, work } in &sources {
        let layers = [base.clone(), cache.join(format!("layers/{name}-1")), cache.join(format!("layers/{name}-2"))];
        if args.pair.as_ref().is_some_and(|only| only != name) || !layers[1].is_dir() || !layers[2].is_dir() {
            eprintln!("bench erofs: {name}: left out");
            continue;
        }
        eprintln!("bench erofs: {name}");
        let mut plain = Vec::new();
        for (number, layer) in layers.iter().enumerate().skip(1).take(2) {
            let (at, dir) = (scratch.sub("merged")?, scratch.sub(&format!("plain-{name}-{number}"))?);
            sh(&format!(
                "mount -t overlay -o ro,lowerdir={}:{} bench {3} && cp -a {3}/. {2}/ && umount {3}",
                layer.display(),
                base.display(),
                dir.display(),
                at.display()
            ))?;
            plain.push(dir);
        }
        sh(&format!("sync -f {}", scratch.dir.display()))?;
        let pair = Pair { name, plain: [plain.remove(0), plain.remove(0)], layers: Some(layers) };
        if *name == sources[0].name {
            build_speed(scratch, &pair.plain[0], composefs, 5, out)?;
        }
        let (store, mounts, record) = if args.timed {
            let store = Store::open(&scratch.dir.join(format!("store-{name}")), "default")?;
            let (record, _) = build_tree(&store, "1", &pair.plain[0])?;
            let at = scratch.sub(&format!("mnt-{name}-1"))?;
            mount::mount(&store, &record, &at, &Options::default())?;
            (store, vec![at], record)
        } else {
            let (store, mounts, records) = memory_of_pair(scratch, &pair, composefs, out)?;
            if let Err(error) = run_time(scratch, &pair, work, &store, &records, out) {
                out.push(json!({ "bench": "run time", "pair": name, "error": error.to_string() }));
            }
            let [record, _] = records;
            (store, mounts.to_vec(), record)
        };
        let started = Started { plain: &pair.plain[0], mounted: &mounts[0], store: &store, record: &record };
        let start: Vec<&str> = start.iter().map(String::as_str).collect();
        cold_start(scratch, &started, composefs, &start, 21, out)?;
        if name == "tensorflow" {
            map_and_read(&pair.plain[0], &mounts[0], 15, out)?;
        }
        for at in &mounts {
            mount::umount(at, true)?;
        }
        for dir in pair.plain.iter().chain([&store.root().to_path_buf()]) {
            sh(&format!("rm -rf {}", dir.display()))?;
        }
        measured += 1;
    }
    if measured == 0 {
        return Err("no pair was there to measure".into());
    }
    Ok(())
}

/// Entry point.
pub fn run(args: &[String]) -> ExitCode {
    options::run("erofs", args, |args| measure(&args))
}

fn measure(args: &Args) -> Result<(), Failure> {
    record::emit(Vec::new());
    if !process::is_root() {
        eprintln!("SKIPPED: bench erofs needs root to mount");
        return Ok(());
    }
    let scratch = Scratch::new(&args.dir.clone().unwrap_or_else(target))?;
    let inputs = args.inputs.clone().unwrap_or_else(fetched_images);
    // The file that the script writes last.
    if args.full && !inputs.join("versions").exists() {
        fetch(&inputs)?;
    }
    let composefs = Composefs::find(&inputs);
    if composefs.is_none() {
        eprintln!("SKIPPED: composefs' tools are not here (bench/fetch-composefs.sh gets them)");
    }
    let (mut rows, tools) = (Vec::new(), composefs.as_ref());
    let result =
        if args.full { full(&scratch, &inputs, args, tools, &mut rows) } else { quick(&scratch, tools, &mut rows) };
    record::emit_versions(json!({
        "composefs": tools.map(Composefs::version),
        "inputs": fs::read_to_string(inputs.join("versions")).unwrap_or_default().lines().collect::<Vec<_>>(),
    }));
    for (kind, title, columns) in TABLES {
        record::table(title, columns, rows.iter().filter(|row| row["bench"] == kind).cloned().collect());
    }
    result
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_first_pair_is_the_one_that_builds_are_measured_with() {
        assert_eq!(super::sources()[0].name, "postgres");
    }
}
