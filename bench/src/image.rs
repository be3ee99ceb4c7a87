//! `pagefold bench erofs`: the memory that image trees save, and what the mounts cost.
//!
//! Memory is counted on the files themselves (cachestat, or mincore through a mount), every inode once, never by the
//! system's `Cached` line. Between two readings the counted files are taken out of the page cache by fadvise.
//!
//! Peers: plain directories, overlayfs with a shared base layer, a hard-linked store, self-contained EROFS images, and
//! composefs' own mkcomposefs and mount.composefs where they are installed or `bench/fetch-images.sh` has put them.
//!
//! `--quick` makes two versions of a tree from local system directories. `--full` takes the real pairs that
//! `bench/fetch-images.sh` has fetched, each laid over one Debian base, and runs their programs from the mounts; `--counts`
//! leaves out what is timed, for machines that are busy, and `--timed` all else. `--many` fills a store with 10,000 images.
//! Needs root.

mod composefs;
mod many;
mod memory;
mod show;
mod times;
mod trees;

use crate::{options, record};
use composefs::Composefs;
use many::{look, many_images};
use memory::{Pair, memory_of_pair, run_time};
use pagefold_image::mount::{self, Options};
use pagefold_image::store::Store;
use pagefold_os::mountinfo;
use serde_json::{Value, json};
use show::print_table;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use times::{Started, build_speed, cold_start, throughput};
use trees::{build_tree, files, sh};

type Error = Box<dyn std::error::Error>;

const USAGE: &str = "usage: pagefold bench erofs [--quick | --full [--inputs DIR] [--pair NAME] [--counts|--timed] | --many]
                            [--dir SCRATCH] [--keep] [--json]
  --quick   two versions made of this machine's own directories
  --full    the pairs that bench/fetch-images.sh makes, made if need be; --counts leaves out what is timed, --timed all else
  --many    10,000 images over 100 bases: list, stat, gc";

/// The source's figures for the same pairs: read-all and run time, per cent.
const SOURCE: [(&str, u32, u32); 6] = [
    ("redis", 33, 4),
    ("postgres", 28, 37),
    ("tensorflow", 16, 10),
    ("mariadb", 21, 11),
    ("nginx", 44, 26),
    ("tomcat", 49, 47),
];

/// The pair of which builds are measured.
const BUILT: &str = "postgres";

struct Scratch {
    dir: PathBuf,
    keep: bool,
}

impl Scratch {
    fn sub(&self, name: &str) -> Result<PathBuf, Error> {
        let path = self.dir.join(name);
        fs::create_dir_all(&path)?;
        Ok(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let table = fs::read("/proc/self/mountinfo").unwrap_or_default();
        let ours: Vec<_> = mountinfo::parse(&table).filter(|mount| mount.at.starts_with(&self.dir)).collect();
        for mount in ours.iter().rev() {
            let _ = Command::new("umount").arg("-l").arg(&mount.at).status();
        }
        if !self.keep {
            let _ = fs::remove_dir_all(&self.dir);
        }
    }
}

fn quick(scratch: &Scratch, composefs: Option<&Composefs>, out: &mut Vec<Value>) -> Result<(), Error> {
    let plain = [scratch.sub("plain-1")?, scratch.sub("plain-2")?];
    let sources = ["/usr/lib/python3", "/usr/lib/python3.11", "/usr/share/perl"];
    for dir in &plain {
        for source in sources.iter().filter(|source| Path::new(source).is_dir()) {
            sh(&format!(
                "mkdir -p {0}/usr/lib {0}/usr/share && cp -a {source} {0}$(dirname {source})/",
                dir.display()
            ))?;
        }
        // A program and what it is linked with, so that it starts in the tree.
        sh(&format!(
            "for p in /usr/bin/python3.11 /bin/sh; do for f in $p $(ldd $p | grep -o '/[^ ]*'); do mkdir -p {0}$(dirname $f); cp -L $f {0}$f; done; done",
            dir.display()
        ))?;
    }
    let mut seed = 1u64;
    let noise: Vec<u8> = std::iter::repeat_with(|| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (seed >> 56) as u8
    })
    .take(48 << 20)
    .collect();
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
    throughput(&pair.plain[0], &mounts[0], 15, out)?;
    cold_start(
        scratch,
        &Started { plain: &pair.plain[0], mounted: &mounts[0], store: &store, record: &records[0] },
        composefs,
        &["/usr/bin/python3.11", "-S", "-c", "import json, email, http.client"],
        9,
        out,
    )?;
    build_speed(scratch, &pair.plain[0], composefs, 3, out)?;
    many_images(scratch, 50, 10, out)?;
    many_images(scratch, 500, 10, out)
}

/// Makes the inputs of the full bench: some ten minutes, by the package managers of this system.
fn fetch(cache: &Path) -> Result<(), Error> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/fetch-images.sh");
    eprintln!("bench erofs: {}: no inputs there; {script} makes them", cache.display());
    let status = Command::new(script).arg(cache).stdout(Stdio::null()).status();
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{script} {}: {status}; what it said stands above", cache.display()).into()),
        Err(error) => Err(format!("{script}: {error}").into()),
    }
}

/// Which part of the full bench to run.
#[derive(Clone, Copy, PartialEq)]
enum Part {
    All,
    /// Without what is timed.
    Counts,
    /// Only what is timed.
    Timed,
}

fn full(
    scratch: &Scratch,
    cache: &Path,
    only: Option<&str>,
    part: Part,
    composefs: Option<&Composefs>,
    out: &mut Vec<Value>,
) -> Result<(), Error> {
    let base = cache.join("base");
    let mut first = true;
    // Builds are measured before anything was removed: see there.
    let (builds, others): (Vec<_>, Vec<_>) = SOURCE.into_iter().partition(|(name, ..)| *name == BUILT);
    for (name, ..) in builds.into_iter().chain(others) {
        let layers = [base.clone(), cache.join(format!("layers/{name}-1")), cache.join(format!("layers/{name}-2"))];
        if only.is_some_and(|only| only != name) || !layers[1].is_dir() || !layers[2].is_dir() {
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
        if part != Part::Counts && name == BUILT {
            build_speed(scratch, &pair.plain[0], composefs, 5, out)?;
        }
        let (store, mounts, record) = if part == Part::Timed {
            let store = Store::open(&scratch.dir.join(format!("store-{name}")), "default")?;
            let (record, _) = build_tree(&store, "1", &pair.plain[0])?;
            let at = scratch.sub(&format!("mnt-{name}-1"))?;
            mount::mount(&store, &record, &at, &Options::default())?;
            (store, vec![at], record)
        } else {
            let (store, mounts, records) = memory_of_pair(scratch, &pair, composefs, out)?;
            if let Err(error) = run_time(scratch, &pair, &store, &records, out) {
                out.push(json!({ "bench": "run time", "pair": name, "error": error.to_string() }));
            }
            let [record, _] = records;
            (store, mounts.to_vec(), record)
        };
        if part != Part::Counts {
            let start = match name {
                "redis" => &["/usr/bin/redis-server", "--version"][..],
                "postgres" => &["/opt/postgres/bin/postgres", "--version"],
                "tensorflow" => &[
                    "/usr/bin/env",
                    "LD_LIBRARY_PATH=/opt/python/lib",
                    "/opt/python/bin/python3.10",
                    "-c",
                    "import json, email, http.client, decimal",
                ],
                "tomcat" => &["/usr/lib/jvm/java/bin/java", "-version"],
                "mariadb" => &["/usr/sbin/mariadbd", "--version"],
                _ => &["/usr/sbin/nginx", "-v"],
            };
            let started = Started { plain: &pair.plain[0], mounted: &mounts[0], store: &store, record: &record };
            cold_start(scratch, &started, composefs, start, 21, out)?;
            if name == "tensorflow" {
                throughput(&pair.plain[0], &mounts[0], 15, out)?;
            }
        }
        for at in &mounts {
            mount::umount(at, true)?;
        }
        for dir in pair.plain.iter().chain([&store.root().to_path_buf()]) {
            sh(&format!("rm -rf {}", dir.display()))?;
        }
        first = false;
    }
    if first {
        return Err("no pair was there to measure".into());
    }
    Ok(())
}

/// Runs the bench.
pub fn run(args: &[String]) -> ExitCode {
    let value = |name: &str| args.iter().position(|arg| arg == name).and_then(|at| args.get(at + 1)).cloned();
    let has = |name: &str| args.iter().any(|arg| arg == name);
    if let [first, what, root, ..] = args
        && first == "--look"
    {
        return match look(what, Path::new(root)) {
            Ok((count, peak_kib)) => {
                println!("{count} {peak_kib}");
                ExitCode::SUCCESS
            }
            Err(error) => {
                eprintln!("bench erofs: {error}");
                ExitCode::FAILURE
            }
        };
    }
    let flags = ["--quick", "--full", "--many", "--counts", "--timed", "--keep", "--json"];
    if let Some(code) = options::refuse(USAGE, args, &flags, &["--inputs", "--pair", "--dir"], &[]) {
        return code;
    }
    // SAFETY: geteuid takes nothing and cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("SKIPPED: bench erofs needs root to mount");
        record::emit(Value::Array(Vec::new()));
        return ExitCode::SUCCESS;
    }
    let target = PathBuf::from(std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into()));
    let parent = value("--dir").map_or_else(|| target.clone(), PathBuf::from);
    let dir = parent.join(format!("pagefold-bench-{}-erofs", std::process::id()));
    if let Err(error) = fs::create_dir_all(&dir) {
        eprintln!("bench erofs: {}: {error}", dir.display());
        return ExitCode::FAILURE;
    }
    let scratch = Scratch { dir: dir.canonicalize().unwrap_or(dir), keep: has("--keep") };
    let mut rows = Vec::new();
    let inputs = value("--inputs").map_or_else(|| target.join("bench-images"), PathBuf::from);
    // The file that the script writes last.
    if has("--full")
        && !inputs.join("versions").exists()
        && let Err(error) = fetch(&inputs)
    {
        eprintln!("bench erofs: {error}");
        return ExitCode::FAILURE;
    }
    let composefs = Composefs::find(&inputs);
    if composefs.is_none() {
        eprintln!(
            "bench erofs: composefs' tools are not here (bench/fetch-composefs.sh gets them); their rows are left out"
        );
    }
    let result = if has("--full") {
        let part = match (has("--counts"), has("--timed")) {
            (true, _) => Part::Counts,
            (_, true) => Part::Timed,
            _ => Part::All,
        };
        full(&scratch, &inputs, value("--pair").as_deref(), part, composefs.as_ref(), &mut rows)
    } else if has("--many") {
        many_images(&scratch, 1_000, 100, &mut rows).and_then(|()| many_images(&scratch, 10_000, 100, &mut rows))
    } else {
        quick(&scratch, composefs.as_ref(), &mut rows)
    };
    record::emit_versions(json!({
        "composefs": composefs.as_ref().map(Composefs::version),
        "mkfs.erofs": record::first_line(&["mkfs.erofs", "--version"]),
        "inputs": fs::read_to_string(inputs.join("versions")).unwrap_or_default().lines().collect::<Vec<_>>(),
    }));
    record::emit(Value::Array(rows.clone()));
    if !has("--json") {
        print_table(&rows);
    }
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench erofs: {error}");
            ExitCode::FAILURE
        }
    }
}
