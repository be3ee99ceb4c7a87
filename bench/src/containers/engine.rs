//! A containerd of the bench's own, with two snapshotters: overlayfs' and ours.

use crate::files::fetched_images;
use crate::process::{self, Failure, Running, free_address, output, wait_for};
use serde_json::json;
use std::ffi::OsString;
use std::fs::{self, File};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// The snapshotters, by containerd's names for them. Only containerd 2.1 and later may have the last one.
const SNAPSHOTTERS: [&str; 3] = ["overlayfs", "pagefold", "erofs"];

const PATIENCE: Duration = Duration::from_secs(60);

/// `PATH` with the containerd of `bench/fetch-containerd.sh` in front, if it is there.
fn path() -> OsString {
    let fetched = std::path::absolute(fetched_images().join("containerd")).unwrap_or_default();
    let before = std::env::var_os("PATH").unwrap_or_default();
    std::env::join_paths(std::iter::once(fetched).chain(std::env::split_paths(&before))).unwrap_or(before)
}

/// A program, found in [`path()`].
fn program(name: &str) -> Command {
    let mut command = Command::new(name);
    command.env("PATH", path());
    command
}

/// What a program says of its version.
pub fn version(name: &str) -> Option<String> {
    output(program(name).arg("--version")).ok()?.lines().next().map(str::to_string)
}

/// The program that is missing here, if any.
pub fn lacks() -> Option<String> {
    let runs = |name: &&str| program(name).arg("--version").output().is_ok();
    if let Some(lacks) = ["containerd", "ctr", "runc"].iter().find(|program| !runs(program)) {
        return Some((*lacks).into());
    }
    let missing = "pagefold-snapshotter (cargo build --release -p pagefold-snapshotter)";
    process::beside("pagefold-snapshotter").is_err().then(|| missing.into())
}

/// containerd and our snapshotter, with everything below one directory. Containers end with this value.
pub struct Engine {
    dir: PathBuf,
    containerd: Running,
    _snapshotter: Running,
}

impl Engine {
    /// Starts both, and waits until they answer.
    pub fn start(dir: &Path) -> Result<Engine, Failure> {
        let at = dir.display();
        let mut config = format!(
            "version = 2\nroot = \"{at}/containerd\"\nstate = \"{at}/state\"\n\
             disabled_plugins = [\"io.containerd.grpc.v1.cri\"]\n[grpc]\naddress = \"{at}/containerd.sock\"\n\
             [ttrpc]\naddress = \"{at}/ttrpc.sock\"\n\
             [proxy_plugins.pagefold]\ntype = \"snapshot\"\naddress = \"{at}/snapshotter.sock\"\n"
        );
        // What containerd 2.x may unpack to.
        for snapshotter in SNAPSHOTTERS {
            config += "[[plugins.\"io.containerd.transfer.v1.local\".unpack_config]]\n";
            config += &format!("platform = \"linux\"\nsnapshotter = \"{snapshotter}\"\noptional = true\n");
        }
        fs::write(dir.join("config.toml"), config)?;
        let log = |name: &str| File::create(dir.join(name));
        let mut command = Command::new(process::beside("pagefold-snapshotter")?);
        command.arg("--root").arg(dir.join("root")).arg("--store").arg(dir.join("store"));
        command.arg("--socket").arg(dir.join("snapshotter.sock"));
        let snapshotter = Running::start(command.stdout(log("snapshotter.log")?).stderr(log("snapshotter.err")?))?;
        let socket = dir.join("snapshotter.sock");
        wait_for("the snapshotter", PATIENCE, || UnixStream::connect(&socket).ok())?;
        let mut command = program("containerd");
        command.arg("--config").arg(dir.join("config.toml"));
        let containerd = Running::start(command.stdout(log("containerd.log")?).stderr(log("containerd.err")?))?;
        let engine = Engine { dir: dir.into(), containerd, _snapshotter: snapshotter };
        wait_for("containerd", PATIENCE, || engine.ctr(&["version"]).ok())?;
        // A request that fails until containerd has reached the snapshotter.
        wait_for("containerd's snapshotter", PATIENCE, || {
            engine.ctr(&["snapshot", "--snapshotter", "pagefold", "ls"]).ok()
        })?;
        Ok(engine)
    }

    /// The snapshotters that are here.
    pub fn snapshotters(&self) -> std::io::Result<Vec<&'static str>> {
        let plugins = self.ctr(&["plugin", "ls"])?;
        let works = |name: &&str| {
            plugins.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()).any(|words| {
                words.first() == Some(&"io.containerd.snapshotter.v1")
                    && words[1] == *name
                    && words.last() == Some(&"ok")
            })
        };
        Ok(SNAPSHOTTERS.into_iter().filter(works).collect())
    }

    /// What `ctr` prints.
    pub fn ctr(&self, args: &[&str]) -> std::io::Result<String> {
        let socket = self.dir.join("containerd.sock");
        output(program("timeout").args(["120", "ctr", "--address"]).arg(socket).args(args))
    }

    /// Imports an archive.
    pub fn import(&self, snapshotter: &str, archive: &Path) -> Result<(), Failure> {
        let archive = archive.display().to_string();
        Ok(self.ctr(&["image", "import", "--snapshotter", snapshotter, &archive]).map(drop)?)
    }

    /// Pulls an image into a namespace of containerd; returns the seconds that this takes.
    pub fn pull(&self, namespace: &str, snapshotter: &str, image: &str) -> Result<f64, Failure> {
        let start = Instant::now();
        self.ctr(&["-n", namespace, "image", "pull", "--plain-http", "--snapshotter", snapshotter, image])?;
        Ok(start.elapsed().as_secs_f64())
    }

    /// Runs a command in a new container and waits for its end; returns the milliseconds that this takes.
    pub fn run(&self, snapshotter: &str, image: &str, command: &[&str]) -> Result<f64, Failure> {
        let start = Instant::now();
        self.ctr(&[&["run", "--rm", "--snapshotter", snapshotter, image, "started"], command].concat())?;
        Ok(start.elapsed().as_secs_f64() * 1e3)
    }

    /// Starts a container that waits; returns the directory that is its root.
    pub fn hold(&self, snapshotter: &str, image: &str, name: &str) -> Result<PathBuf, Failure> {
        self.ctr(&["run", "-d", "--snapshotter", snapshotter, image, name, "/bin/sleep", "1000"])?;
        let root = self.dir.join("state/io.containerd.runtime.v2.task/default").join(name).join("rootfs");
        if fs::read_dir(&root)?.next().is_none() {
            return Err(format!("{}: the container's root is not here", root.display()).into());
        }
        Ok(root)
    }

    /// Ends a container that waits.
    pub fn release(&self, name: &str) -> Result<(), Failure> {
        self.ctr(&["task", "rm", "-f", name])?;
        Ok(self.ctr(&["container", "rm", name]).map(drop)?)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        for name in self.ctr(&["task", "ls", "-q"]).unwrap_or_default().lines() {
            let _ = self.ctr(&["task", "rm", "-f", name]);
        }
        // It ends by itself when it is told to, and then leaves no shim.
        // SAFETY: kill takes integers; the process is our child and was not waited for.
        unsafe { libc::kill(self.containerd.pid(), libc::SIGTERM) };
        let _ = self.containerd.0.wait();
    }
}

/// A registry of the bench's own, ended with this value.
pub struct Registry {
    /// Where it listens.
    pub host: String,
    _process: Running,
}

impl Registry {
    /// Starts the distribution's registry in `dir`; `None` where it is not installed.
    pub fn start(dir: &Path) -> Result<Option<Registry>, Failure> {
        let host = free_address()?.to_string();
        let config = json!({ "version": 0.1, "log": { "level": "error" }, "http": { "addr": host, "secret": "bench" },
            "storage": { "filesystem": { "rootdirectory": dir.join("data") } } });
        // YAML includes JSON.
        fs::write(dir.join("config.yml"), config.to_string())?;
        let Ok(process) =
            Running::start_silent(Command::new("docker-registry").arg("serve").arg(dir.join("config.yml")))
        else {
            return Ok(None);
        };
        wait_for("the registry", PATIENCE, || TcpStream::connect(&host).ok())?;
        Ok(Some(Registry { host, _process: process }))
    }
}
