//! `pagefold bench lazy`: the first start of a program on a host that has nothing of its image, by a whole pull and by a
//! lazy mount.
//!
//! nginx shows the fleet's store, behind a link of 1 Gbit/s with 20 ms for the way there and back ([`network`]). A
//! program is ready when it has done what `bench/images.toml` has as its work. Both ways end with a writable mount and
//! run the same shell there.

mod network;

use crate::files::{fetched_images, target};
use crate::process::{self, Failure, Running, output, sh, wait_for};
use crate::scratch::Scratch;
use crate::stats::{Spread, median};
use crate::{image, options, record};
use clap::Parser;
use network::Link;
use serde_json::{Value, json};
use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

/// The way to the server and back.
const THERE_AND_BACK: Duration = Duration::from_millis(20);

/// The link's bits a second.
const BITS_PER_S: f64 = 1e9;

/// First starts of images that are not here: whole pulls against mounts that fetch what is opened. Needs root.
#[derive(Parser, Debug)]
#[command(
    name = "pagefold bench lazy",
    after_help = "Examples:\n  pagefold bench lazy --quick\n  pagefold bench lazy --only postgres --only tomcat"
)]
struct Args {
    /// Rounds; the median and the spread are shown. Without it five (with --quick one).
    #[arg(long, value_name = "N", value_parser = options::positive())]
    rounds: Option<usize>,
    #[command(flatten)]
    only: options::Only,
    /// Where bench/fetch-images.sh put its images.
    #[arg(long, value_name = "DIR")]
    inputs: Option<PathBuf>,
    /// Where images and stores are made.
    #[arg(long, value_name = "SCRATCH")]
    dir: Option<PathBuf>,
    #[command(flatten)]
    extent: options::Extent,
}

/// An image: its name, its files, and what a program of it has to do until it is ready.
struct Input {
    name: String,
    tree: PathBuf,
    work: String,
}

/// A way to a first start.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Pull,
    Lazy,
    LazyWithoutProfile,
}

impl Way {
    const ALL: [Self; 3] = [Self::Pull, Self::Lazy, Self::LazyWithoutProfile];

    fn name(self) -> &'static str {
        match self {
            Self::Pull => "whole pull",
            Self::Lazy => "lazy",
            Self::LazyWithoutProfile => "lazy, no start profile",
        }
    }
}

/// Entry point.
pub fn run(args: &[String]) -> ExitCode {
    options::run("lazy", args, |args| measure(&args))
}

fn measure(args: &Args) -> Result<(), Failure> {
    record::emit(Vec::new());
    if !process::is_root() {
        eprintln!("SKIPPED: bench lazy needs root to mount");
        return Ok(());
    }
    if !["nginx", "setpriv"].iter().all(|name| sh(&format!("command -v {name}")).is_ok()) {
        eprintln!("SKIPPED: bench lazy needs nginx and setpriv");
        return Ok(());
    }
    process::beside("pagefold-remote")?;
    let scratch = Scratch::new(&args.dir.clone().unwrap_or_else(target))?;
    let inputs = args.inputs.clone().unwrap_or_else(fetched_images);
    let rounds = args.extent.rounds(args.rounds);
    let mut rows = Vec::new();
    if args.only.wants("python").unwrap_or(args.extent.quick || !inputs.is_dir()) {
        first_starts(&scratch, &of_this_machine(&scratch)?, rounds, &mut rows)?;
    }
    for source in image::sources() {
        let layer = inputs.join(format!("layers/{}-1", source.name));
        if args.extent.quick || !args.only.wants(&source.name).unwrap_or(true) {
            continue;
        }
        if !layer.is_dir() {
            eprintln!("SKIPPED: {}: bench/fetch-images.sh fetches it", source.name);
            continue;
        }
        let tree = scratch.sub(&format!("tree-{}", source.name))?;
        let layers = format!("lowerdir={}:{}", layer.display(), inputs.join("base").display());
        process::run("mount", &["-t", "overlay", "-o", &layers, "bench", &tree.display().to_string()])?;
        first_starts(&scratch, &Input { name: source.name, tree, work: source.work }, rounds, &mut rows)?;
    }
    let versions = record::first_line(&["nginx", "-v"]);
    record::emit_versions(json!({ "nginx": versions }));
    record::table(
        "The first start of an image that is not here, at 20 ms and 1 Gbit/s",
        "image|way|ready s=seconds:2|MiB moved until then=moved_bytes:M1|image MiB=image_bytes:M0|against the pull=of_pull:2 x",
        rows,
    );
    Ok(())
}

/// Python of this machine, which starts and reads a little of its library.
fn of_this_machine(scratch: &Scratch) -> Result<Input, Failure> {
    let tree = scratch.sub("tree-python")?;
    let at = tree.display();
    sh(&format!(
        "cd /; for p in /bin/sh $(readlink -f /usr/bin/python3); do cp -L --parents $p $(ldd $p | grep -o '/[^ ]*') {at}; done
         cp -a --parents $(ls -d usr/lib/python3 usr/lib/python3.* 2>/dev/null) usr/lib/gcc {at} 2>/dev/null || :
         mv {at}/usr/bin/python3.* {at}/usr/bin/python3; mkdir -p {at}/proc {at}/dev {at}/tmp"
    ))?;
    let work = "/usr/bin/python3 -c 'import json, email, http.client, decimal; print(6 * 7)'".into();
    Ok(Input { name: "python".into(), tree, work })
}

/// Pushes an image, and measures its first start on hosts that have nothing, in turns.
fn first_starts(scratch: &Scratch, input: &Input, rounds: usize, out: &mut Vec<Value>) -> Result<(), Failure> {
    eprintln!("bench lazy: {}", input.name);
    let (fleet, store) =
        (scratch.sub(&format!("fleet-{}", input.name))?, scratch.sub(&format!("store-{}", input.name))?);
    let built = tool(&store, &["build", "--name", "app", "--json", &input.tree.display().to_string()])?;
    let built: Value = serde_json::from_str(&built)?;
    let push = |tag: &str| tool(&store, &["push", "app", &format!("file://{}/app:{tag}", fleet.display())]);
    push("plain")?;
    // A start is recorded before the image is pushed to the fleet.
    let recorded = ["exec", "--rw", "--record-profile=60", "app", "--", "/bin/sh", "-ec", &input.work];
    tool(&store, &recorded)?;
    push("profiled")?;
    let server = Nginx::start(&scratch.sub(&format!("nginx-{}", input.name))?, &fleet)?;
    let link = Link::to(server.address, THERE_AND_BACK, BITS_PER_S)?;
    let mut measured = [(); 3].map(|()| (Vec::new(), Vec::new()));
    for round in 0..rounds {
        for turn in 0..Way::ALL.len() {
            let number = (round + turn) % Way::ALL.len();
            let host = Scratch { dir: scratch.sub(&format!("host-{}-{round}-{turn}", input.name))? };
            let (seconds, moved) = first_start(&host, input, Way::ALL[number], &link)?;
            measured[number].0.push(seconds);
            measured[number].1.push(moved);
        }
    }
    let of_pull = median(measured[0].0.iter().copied());
    for (way, (seconds, moved)) in Way::ALL.into_iter().zip(measured) {
        let seconds = Spread::of(seconds);
        out.push(
            json!({ "bench": "lazy start", "image": input.name, "way": way.name(), "of_pull": seconds.median / of_pull,
            "seconds": seconds, "moved_bytes": Spread::of(moved), "image_bytes": built["bytes"] }),
        );
    }
    drop(server);
    sh(&format!("rm -rf {} {}", fleet.display(), store.display()))?;
    Ok(())
}

/// Seconds until the program is ready, and bytes that came until then.
fn first_start(host: &Scratch, input: &Input, way: Way, link: &Link) -> Result<(f64, f64), Failure> {
    let (store, at, upper) = (host.sub("store")?, host.sub("mnt")?, host.sub("upper")?);
    let tag = if way == Way::LazyWithoutProfile { "plain" } else { "profiled" };
    let address = format!("http://{}/app:{tag}", link.address);
    let (shown, upper) = (at.display().to_string(), format!("--upper={}", upper.display()));
    // What the last host had is deleted.
    sh(&format!("sync -f {}", host.dir.display()))?;
    let (began, before) = (Instant::now(), link.moved());
    if way == Way::Pull {
        tool(&store, &["pull", &address])?;
        tool(&store, &["mount", &format!("app:{tag}"), &shown, &upper])?;
    } else {
        tool(&store, &["mount", "--lazy", &address, &shown, &upper])?;
    }
    sh(&format!("mount -t proc proc {shown}/proc; mount --bind /dev {shown}/dev; chmod 1777 {shown}/tmp"))?;
    let ready = output(Command::new("chroot").arg(&at).args(["/bin/sh", "-ec", &input.work]));
    let (seconds, moved) = (began.elapsed().as_secs_f64(), link.moved() - before);
    sh(&format!("umount -l {shown}/proc {shown}/dev"))?;
    ready?;
    tool(&store, &["umount", "--lazy", &shown])?;
    // The process that served the mount ends with it, and then the store has no build in progress.
    wait_for("the end of the mount", Duration::from_secs(120), || {
        fs::read_dir(store.join("domains/default/leases")).ok()?.next().is_none().then_some(())
    })?;
    Ok((seconds, moved as f64))
}

/// `pagefold image` with a store.
fn tool(store: &Path, args: &[&str]) -> Result<String, Failure> {
    Ok(output(Command::new(process::tool()?).args(["image", "--store"]).arg(store).args(args))?)
}

/// nginx, which shows a directory; ended with this value.
struct Nginx {
    address: SocketAddr,
    _process: Running,
}

impl Nginx {
    fn start(dir: &Path, root: &Path) -> Result<Self, Failure> {
        let address = process::free_address()?;
        let (at, root) = (dir.display(), root.display());
        let paths =
            ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"].map(|name| format!("{name}_temp_path {at}/{name};"));
        let config = dir.join("nginx.conf");
        fs::write(
            &config,
            format!(
                "user root; daemon off; master_process off; pid {at}/pid; error_log {at}/log; events {{}}
                 http {{ access_log off; sendfile on; {} server {{ listen {address}; root {root}; }} }}",
                paths.concat()
            ),
        )?;
        let process = Running::start_silent(Command::new("nginx").arg("-c").arg(&config))?;
        wait_for("nginx", Duration::from_secs(20), || TcpStream::connect(address).ok())?;
        Ok(Self { address, _process: process })
    }
}
