//! containerd with this snapshotter: images are imported, containers run, the snapshotter is killed, and nothing stays.
//! The containerd is the tests' own: configuration, root, state and sockets lie in a temporary directory.

mod common;

use common::oci::{File, archive};
use common::{Process, Scratch, frames, start, until};
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

const APPLETS: [&str; 7] = ["sh", "cat", "sleep", "ls", "md5sum", "stat", "mv"];

/// A containerd that has pagefold as a snapshotter.
struct Engine {
    scratch: Scratch,
    containerd: Process,
}

impl Engine {
    /// `None` after saying why it cannot run here.
    fn new() -> Option<Self> {
        let scratch = Scratch::new()?;
        let has = |program: &str| Command::new(program).arg("--version").stdout(Stdio::null()).status().is_ok();
        if let Some(lacks) = ["containerd", "ctr", "runc"].iter().find(|program| !has(program)) {
            println!("SKIPPED: needs {lacks}");
            return None;
        }
        if !Path::new("/bin/busybox").exists() {
            println!("SKIPPED: needs a static /bin/busybox");
            return None;
        }
        let dir = scratch.path().display();
        let config = format!(
            r#"version = 2
root = "{dir}/containerd"
state = "{dir}/state"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
address = "{dir}/containerd.sock"
[ttrpc]
address = "{dir}/ttrpc.sock"
[proxy_plugins.pagefold]
type = "snapshot"
address = "{dir}/snapshotter.sock"
exports = {{ root = "{dir}/root" }}
[[plugins."io.containerd.transfer.v1.local".unpack_config]]
platform = "linux"
snapshotter = "pagefold"
"#
        );
        let file = scratch.path().join("config.toml");
        fs::write(&file, config).unwrap();
        let log = fs::File::create(scratch.path().join("containerd.log")).unwrap();
        let mut command = Command::new("containerd");
        command.arg("--config").arg(&file).stdout(log.try_clone().unwrap()).stderr(log);
        let containerd = Process(command.spawn().unwrap());
        let engine = Self { scratch, containerd };
        until("containerd answers", || engine.ctr(&["version"]).status.success());
        Some(engine)
    }

    fn dir(&self) -> &Path {
        self.scratch.path()
    }

    fn ctr(&self, args: &[&str]) -> Output {
        let socket = self.dir().join("containerd.sock");
        Command::new("timeout").args(["60", "ctr", "--address"]).arg(socket).args(args).output().unwrap()
    }

    /// What ctr prints; it must succeed.
    fn ok(&self, args: &[&str]) -> String {
        let out = self.ctr(args);
        let (text, errors) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
        let log = || fs::read_to_string(self.dir().join("containerd.log")).unwrap_or_default();
        assert!(out.status.success(), "ctr {args:?}: {text}{errors}\n{}", log());
        text.into_owned()
    }

    /// Makes the archive of image `name` with these layers.
    fn archive(&self, name: &str, layers: &[&[File]]) -> PathBuf {
        let path = self.dir().join(format!("{}.tar", name.replace(['/', ':'], "-")));
        fs::write(&path, archive(name, layers)).unwrap();
        path
    }

    fn import(&self, archive: &Path) -> Output {
        self.ctr(&["image", "import", "--snapshotter", "pagefold", archive.to_str().unwrap()])
    }

    /// Runs a command in a new container of `image`, and returns what it prints.
    fn run(&self, image: &str, name: &str, script: &str) -> String {
        self.ok(&["run", "--rm", "--snapshotter", "pagefold", image, name, "/bin/sh", "-c", script])
    }

    /// Starts a container that waits. Returns its process.
    fn start(&self, image: &str, name: &str) -> u32 {
        self.ok(&["run", "-d", "--snapshotter", "pagefold", image, name, "/bin/sleep", "1000"]);
        let tasks = self.ok(&["task", "ls"]);
        let line = tasks.lines().find(|line| line.split_whitespace().next() == Some(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    fn stop(&self, name: &str) {
        self.ok(&["task", "kill", "--signal", "SIGKILL", name]);
        until("the task ends", || {
            !self.ok(&["task", "ls"]).lines().any(|line| line.contains("RUNNING") && line.starts_with(name))
        });
        self.ok(&["task", "delete", name]);
    }

    /// Snapshots that the snapshotter has, by number.
    fn snapshots(&self) -> BTreeSet<u64> {
        let names = fs::read_dir(self.dir().join("root/snapshots")).unwrap();
        names.map(|entry| entry.unwrap().file_name().to_str().unwrap().parse().unwrap()).collect()
    }

    /// Removes all images, waits until containerd has collected what they had, and compares what is left with nothing.
    fn remove_everything(&self) {
        for namespace in ["default", "other"] {
            for image in self.ok(&["-n", namespace, "image", "ls", "-q"]).lines() {
                self.ok(&["-n", namespace, "image", "rm", "--sync", image]);
            }
        }
        until("the snapshots are removed", || self.snapshots().is_empty());
        assert_eq!(self.scratch.mounted(), Vec::<PathBuf>::new());
        let objects = self.dir().join("store/domains/default/objects");
        let files = || Command::new("find").arg(&objects).args(["-type", "f"]).output().unwrap().stdout;
        until("the objects are collected", || files().is_empty());
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        for name in self.ctr(&["task", "ls", "-q"]).stdout.split(|byte| *byte == b'\n') {
            if !name.is_empty() {
                let name = String::from_utf8_lossy(name).into_owned();
                self.ctr(&["task", "rm", "-f", &name]);
            }
        }
        self.containerd.kill();
    }
}

/// A layer with a shell.
fn base(busybox: &[u8]) -> Vec<File<'_>> {
    let mut files: Vec<File> = vec![
        ("bin/", 0o755, b""),
        ("tmp/", 0o1777, b""),
        ("etc/", 0o755, b""),
        ("etc/old", 0o644, b"old"),
        ("gone/", 0o755, b""),
    ];
    files.push(("gone/file", 0o644, b"gone"));
    let names = ["bin/sh", "bin/cat", "bin/sleep", "bin/ls", "bin/md5sum", "bin/stat", "bin/mv"];
    assert_eq!(names.len(), APPLETS.len());
    files.extend(names.map(|name| (name, 0o755, busybox)));
    files
}

fn random(size: usize) -> Vec<u8> {
    let mut bytes = vec![0; size];
    std::io::Read::read_exact(&mut fs::File::open("/dev/urandom").unwrap(), &mut bytes).unwrap();
    bytes
}

#[test]
fn containers_of_different_images_share_page_cache_and_outlive_the_snapshotter() {
    let Some(engine) = Engine::new() else { return };
    let mut snapshotter = start(engine.dir());
    let (busybox, shared) = (fs::read("/bin/busybox").unwrap(), random(1 << 20));
    let base = base(&busybox);
    // Neither names the directory that its file lies in: it is the lower layer's, or none but the file's.
    let first: &[File] = &[("tmp/library.so", 0o644, &shared), ("etc/.wh.old", 0o644, b""), (".wh.gone", 0o644, b"")];
    let second: &[File] =
        &[("opt/app/renamed.so", 0o755, &shared), ("gone/.wh..wh..opq", 0o644, b""), ("gone/new", 0o644, b"new")];
    for (name, layer) in [("test/a:1", first), ("test/b:1", second)] {
        let out = engine.import(&engine.archive(name, &[&base, layer]));
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    }
    assert_eq!(engine.snapshots().len(), 3, "the base layer is one");
    let tree = |image: &str, name: &str| {
        engine.run(image, name, "stat -c '%A %u %n' /tmp /etc/* /gone/* /opt /opt/app/* 2>&1; true")
    };
    let a = tree("test/a:1", "look-a");
    assert!(a.contains("drwxrwxrwt 0 /tmp\n") && a.contains("'/etc/*'") && a.contains("'/gone/*'"), "{a}");
    let b = tree("test/b:1", "look-b");
    assert!(b.contains("-rw-r--r-- 0 /etc/old\n") && b.contains("0 /gone/new\n") && !b.contains("/gone/file"), "{b}");
    assert!(b.contains("-rwxr-xr-x 0 /opt/app/renamed.so\n"), "{b}");

    let (first, second) = (engine.start("test/a:1", "one"), engine.start("test/b:1", "two"));
    let frames_of = |process: u32, path: &str| frames(Path::new(&format!("/proc/{process}/root/{path}")));
    let library = frames_of(first, "tmp/library.so");
    assert_eq!((library.len(), library), (256, frames_of(second, "opt/app/renamed.so")), "equal files are cached once");
    assert_eq!(frames_of(first, "bin/sh"), frames_of(second, "bin/cat"));

    snapshotter.kill();
    let exec = |name: &str, id: &str, script: &str| {
        engine.ok(&["task", "exec", "--exec-id", id, name, "/bin/sh", "-c", script])
    };
    let sum = exec("one", "e1", "echo changed > /tmp/new; md5sum < /tmp/library.so");
    assert!(!engine.ctr(&["run", "--rm", "--snapshotter", "pagefold", "test/a:1", "x", "/bin/sh"]).status.success());
    let _snapshotter = start(engine.dir());
    // containerd waits for a moment before it connects again.
    until("containerd has connected again", || {
        engine.ctr(&["snapshot", "--snapshotter", "pagefold", "usage"]).status.success()
    });
    assert_eq!(exec("two", "e2", "md5sum < /opt/app/renamed.so"), sum);
    assert_eq!(engine.run("test/a:1", "after", "cat /etc/* /tmp/library.so | md5sum"), sum);

    // What a container has changed becomes an image's layer.
    engine.stop("one");
    engine.ok(&["snapshot", "--snapshotter", "pagefold", "commit", "changed", "one"]);
    engine.ok(&["container", "rm", "one"]);
    engine.ok(&["snapshot", "--snapshotter", "pagefold", "prepare", "again", "changed"]);
    let mounts = engine.ok(&["snapshot", "--snapshotter", "pagefold", "mounts", "/mnt", "again"]);
    let at = engine.scratch.dir("at");
    let command = mounts.trim().replace("/mnt", at.to_str().unwrap()).replacen("mount", "mount -i", 1);
    assert!(Command::new("sh").args(["-c", &command]).status().unwrap().success(), "{command}");
    assert_eq!(
        (fs::read(at.join("tmp/new")).unwrap(), fs::read(at.join("tmp/library.so")).unwrap()),
        (b"changed\n".to_vec(), shared)
    );
    assert_eq!(fs::metadata(at.join("tmp")).unwrap().permissions().mode() & 0o7777, 0o1777);
    common::unmount(&at);
    for name in ["again", "changed"] {
        engine.ok(&["snapshot", "--snapshotter", "pagefold", "rm", name]);
    }
    engine.stop("two");
    engine.ok(&["container", "rm", "two"]);

    engine.remove_everything();
}

/// Whatever request a kill interrupts, a later one succeeds, and containers have the right bytes.
#[test]
fn a_snapshotter_that_is_killed_again_and_again_loses_nothing() {
    let Some(engine) = Engine::new() else { return };
    let busybox = fs::read("/bin/busybox").unwrap();
    let base = base(&busybox);
    let contents: Vec<(String, Vec<u8>)> = (0..60).map(|number| (format!("data/{number}"), random(40_000))).collect();
    let layer: Vec<File> = contents.iter().map(|(path, bytes)| (&**path, 0o644, &**bytes)).collect();
    let all: Vec<u8> = (0..60).flat_map(|number: usize| contents[number].1.clone()).collect();
    let archive = engine.archive("test/c:1", &[&base, &layer[..30], &layer[30..]]);
    fs::write(engine.dir().join("expected"), all).unwrap();
    let expected =
        Command::new("md5sum").stdin(fs::File::open(engine.dir().join("expected")).unwrap()).output().unwrap();
    let script = "i=0; while [ $i -lt 60 ]; do cat /data/$i; i=$((i+1)); done | md5sum";

    let (stop, pause_ms) = (AtomicBool::new(false), AtomicU64::new(0));
    let mut kills = 0;
    std::thread::scope(|scope| {
        let killer = scope.spawn(|| {
            let mut kills = 0;
            while !stop.load(Ordering::Relaxed) {
                let mut snapshotter = start(engine.dir());
                // Each pause is longer than the one before, up to what a busy machine takes.
                let pause =
                    pause_ms.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |pause| Some(pause * 5 / 4 + 1));
                let pause = Duration::from_millis(pause.expect("always some").min(20_000));
                let began = std::time::Instant::now();
                while began.elapsed() < pause && !stop.load(Ordering::Relaxed) {
                    std::thread::sleep(Duration::from_millis(2));
                }
                snapshotter.kill();
                kills += 1;
            }
            kills
        });
        for round in 0..4u64 {
            pause_ms.store(10 + round * 7, Ordering::Relaxed);
            let began = std::time::Instant::now();
            while !engine.import(&archive).status.success() {
                assert!(began.elapsed() < Duration::from_secs(60), "an import succeeds between kills");
            }
            let name = format!("run-{round}");
            let run = ["run", "--rm", "--snapshotter", "pagefold", "test/c:1", &*name, "/bin/sh", "-c", script];
            for attempt in 0.. {
                let out = engine.ctr(&run);
                if out.status.success() {
                    assert_eq!(out.stdout, expected.stdout, "the container has the image's bytes");
                    break;
                }
                assert!(attempt < 100, "{}", String::from_utf8_lossy(&out.stderr));
                engine.ctr(&["task", "rm", "-f", &name]);
                engine.ctr(&["container", "rm", &name]);
                engine.ctr(&["snapshot", "--snapshotter", "pagefold", "rm", &name]);
            }
            engine.ctr(&["image", "rm", "--sync", "test/c:1"]);
        }
        stop.store(true, Ordering::Relaxed);
        kills = killer.join().unwrap();
    });
    println!("{kills} kills");
    assert!(kills > 5);
    let _snapshotter = start(engine.dir());
    until("an import succeeds", || engine.import(&archive).status.success());
    assert_eq!(engine.run("test/c:1", "last", script).into_bytes(), expected.stdout);
    for key in
        engine.ok(&["snapshot", "--snapshotter", "pagefold", "ls"]).lines().filter(|line| line.contains("Active"))
    {
        engine.ok(&["snapshot", "--snapshotter", "pagefold", "rm", key.split("  ").next().unwrap().trim()]);
    }
    engine.remove_everything();
}
