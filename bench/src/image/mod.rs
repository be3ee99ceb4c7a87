//! `pagefold bench erofs`: the memory that image trees save, and what the mounts cost.
//!
//! Memory is counted on the files themselves (cachestat, or mincore through a mount), every inode once, never by the
//! system's `Cached` line. Between two readings the counted files are evicted from the page cache by fadvise.
//!
//! Peers: plain directories, overlayfs with a shared base layer, a hard-linked store, and composefs' own mkcomposefs and
//! mount.composefs where they are installed or `bench/fetch-images.sh` has put them.

mod composefs;
mod many;
mod memory;
mod table;
mod times;
mod trees;

use crate::files::{fetched_images, target};
use crate::process::{self, Failure, sh};
use crate::scratch::Scratch;
use crate::stats::Random;
use crate::{options, record};
use clap::Parser;
use composefs::Composefs;
use many::{look, many_images};
use memory::{Pair, memory_of_pair, run_time};
use pagefold_image::mount::{self, Options};
use pagefold_image::store::Store;
use serde_json::{Value, json};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use times::{Started, build_speed, cold_start, throughput};
use trees::{build_tree, files};

/// Image trees: page cache shared by content, against other ways. Needs root.
#[derive(Parser, Debug)]
#[command(
    name = "pagefold bench erofs",
    after_help = "Examples:\n  pagefold bench erofs --quick\n  pagefold bench erofs --full --pair redis"
)]
struct Args {
    /// Two versions of a tree, made of this machine's own directories (the default).
    #[arg(long, conflicts_with_all = ["full", "many"])]
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
    /// A store of 10,000 images over 100 bases: list, stat, gc.
    #[arg(long, conflicts_with = "full")]
    many: bool,
    /// Where bench/fetch-images.sh puts its images.
    #[arg(long, value_name = "DIR")]
    inputs: Option<PathBuf>,
    /// Where trees and stores are made.
    #[arg(long, value_name = "SCRATCH")]
    dir: Option<PathBuf>,
    /// JSON instead of tables.
    #[arg(long)]
    json: bool,
    /// One look at a store (used by the driver).
    #[arg(long, hide = true, num_args = 2, value_names = ["WHAT", "STORE"])]
    look: Vec<String>,
}

/// The pairs of the source, each with a program of it that is started cold.
const PAIRS: [(&str, &[&str]); 6] = [
    // Builds are measured with this one, before anything is removed: see there.
    ("postgres", &["/opt/postgres/bin/postgres", "--version"]),
    ("redis", &["/usr/bin/redis-server", "--version"]),
    (
        "tensorflow",
        &[
            "/usr/bin/env",
            "LD_LIBRARY_PATH=/opt/python/lib",
            "/opt/python/bin/python3.10",
            "-c",
            "import json, email, http.client, decimal",
        ],
    ),
    ("mariadb", &["/usr/sbin/mariadbd", "--version"]),
    ("nginx", &["/usr/sbin/nginx", "-v"]),
    ("tomcat", &["/usr/lib/jvm/java/bin/java", "-version"]),
];

fn quick(scratch: &Scratch, composefs: Option<&Composefs>, out: &mut Vec<Value>) -> Result<(), Failure> {
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
    let mut noise = vec![0; 48 << 20];
    Random(1).fill(&mut noise);
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
    let mut measured = 0;
    for (name, start) in PAIRS {
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
        if name == PAIRS[0].0 {
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
            if let Err(error) = run_time(scratch, &pair, &store, &records, out) {
                out.push(json!({ "bench": "run time", "pair": name, "error": error.to_string() }));
            }
            let [record, _] = records;
            (store, mounts.to_vec(), record)
        };
        let started = Started { plain: &pair.plain[0], mounted: &mounts[0], store: &store, record: &record };
        cold_start(scratch, &started, composefs, start, 21, out)?;
        if name == "tensorflow" {
            throughput(&pair.plain[0], &mounts[0], 15, out)?;
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
    let args: Args = match options::parse("erofs", args) {
        Ok(args) => args,
        Err(code) => return code,
    };
    if let [what, root] = &args.look[..] {
        let looked = look(what, Path::new(root)).map(|(count, peak_kib)| println!("{count} {peak_kib}"));
        return options::exit_code("erofs", looked);
    }
    options::exit_code("erofs", measure(&args))
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
    let result = if args.full {
        full(&scratch, &inputs, args, tools, &mut rows)
    } else if args.many {
        many_images(&scratch, 1_000, 100, &mut rows).and_then(|()| many_images(&scratch, 10_000, 100, &mut rows))
    } else {
        quick(&scratch, tools, &mut rows)
    };
    record::emit_versions(json!({
        "composefs": tools.map(Composefs::version),
        "inputs": fs::read_to_string(inputs.join("versions")).unwrap_or_default().lines().collect::<Vec<_>>(),
    }));
    table::print(&rows);
    record::emit(rows);
    result
}
