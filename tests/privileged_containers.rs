//! Live memory of containers that containerd runs by runc: in namespaces of their own, under the engine's default seccomp
//! filter. They are attached by their control groups.

#![cfg(target_arch = "x86_64")]

mod common;

use common::cold::Host;
use common::{Reaped, Server, ask_until_done, shared_pages_in, skipped, wait_for};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// Pages of the area that all instances hold.
const PAGES: u64 = 4096;

/// The containers. runc knows those of all engines of a machine by name.
fn names() -> [String; 2] {
    ["one", "two"].map(|name| format!("pagefold-{name}-{}", std::process::id()))
}

/// containerd with everything below one directory.
struct Engine {
    dir: tempfile::TempDir,
    containerd: Reaped,
}

impl Engine {
    /// Starts it, and waits until it answers; `None` after saying what is missing.
    fn start() -> Option<Engine> {
        let has = |program: &str| Command::new(program).arg("--version").stdout(Stdio::null()).status().is_ok();
        if let Some(lacks) = ["containerd", "ctr", "runc"].iter().find(|program| !has(program)) {
            skipped(&format!("needs {lacks}"));
            return None;
        }
        let dir = tempfile::tempdir().expect("a directory");
        let at = dir.path().display();
        let config = format!(
            "version = 2\nroot = \"{at}/containerd\"\nstate = \"{at}/state\"\n\
             disabled_plugins = [\"io.containerd.grpc.v1.cri\"]\n[grpc]\naddress = \"{at}/c\"\n[ttrpc]\naddress = \"{at}/t\"\n"
        );
        fs::write(dir.path().join("config.toml"), config).expect("a file");
        let log = fs::File::create(dir.path().join("log")).expect("a file");
        let mut command = Command::new("containerd");
        command.arg("--config").arg(dir.path().join("config.toml"));
        command.stdout(log.try_clone().expect("a descriptor")).stderr(log);
        let containerd = Reaped(command.spawn().expect("containerd"));
        let engine = Engine { dir, containerd };
        wait_for("containerd to answer", 60, || {
            engine.ctr(&["version"]).output().is_ok_and(|said| said.status.success())
        });
        Some(engine)
    }

    fn ctr(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("ctr");
        command.arg("--address").arg(self.dir.path().join("c")).args(arguments);
        command
    }

    /// Runs the program at the root of a new container, under the default seccomp filter. It ends with its input.
    fn run(&self, root: &Path, name: &str) -> Server {
        let mut command = self.ctr(&["run", "--rm", "--seccomp", "--rootfs"]);
        command.arg(root).arg(name);
        Server::start_as("0", command, Path::new("/attached"))
    }

    /// The process of a container.
    fn pid(&self, name: &str) -> i32 {
        let tasks = String::from_utf8(self.ctr(&["task", "ls"]).output().expect("ctr").stdout).expect("text");
        let line = tasks.lines().find(|line| line.split_whitespace().next() == Some(name));
        let pid = line.and_then(|line| line.split_whitespace().nth(1)).and_then(|pid| pid.parse().ok());
        pid.unwrap_or_else(|| panic!("no task {name}: {tasks}"))
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // A shim of a container that a failed test has left.
        for name in names() {
            let _ = self.ctr(&["task", "rm", "-f", &name]).stdout(Stdio::null()).stderr(Stdio::null()).status();
        }
        common::cold::kill(self.containerd.pid());
    }
}

#[test]
fn containers_under_the_default_seccomp_filter_are_merged_and_parked() {
    static BUILT: OnceLock<Option<PathBuf>> = OnceLock::new();
    let Some(program) = common::static_program(&BUILT, "attached") else { return };
    let Some(engine) = Engine::start() else { return };
    let root = engine.dir.path().join("root");
    fs::create_dir(&root).expect("a directory");
    fs::copy(program, root.join("attached")).expect("a copy");
    let mut host = Host::start(&["--cold-policy=manual"]);
    let mut servers = names().map(|name| engine.run(&root, &name));
    let pids = names().map(|name| engine.pid(&name));
    let status = |pid: i32| fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    assert!(pids.iter().all(|pid| status(*pid).contains("Seccomp:\t2")), "no filter");
    for name in names() {
        ask_until_done(|words| host.tool(words), &["attach", "--cgroup", &format!("/default/{name}")]);
    }
    for round in 0..2 {
        wait_for("both to share their area", 120, || {
            servers.iter_mut().for_each(|server| _ = server.check("reset 1"));
            common::comes(30, || pids.iter().all(|pid| shared_pages_in(&host.status(), *pid) >= PAGES * 9 / 10))
        });
        for server in &mut servers {
            for word in ["write 500", "discard 200", "fork 1", "move 5", "check 1"] {
                server.check(word);
            }
        }
        for pid in pids {
            wait_for("the pages to go", 60, || {
                host.tool(&["park", &pid.to_string()]).status.success() && host.number(pid, "pages_out") > 0
            });
        }
        if round == 0 {
            host.replace_daemon(&["--cold-policy=manual"]);
        }
        for (server, pid) in servers.iter_mut().zip(pids) {
            ask_until_done(|words| host.tool(words), &["unpark", &pid.to_string()]);
            server.check("check 1");
        }
    }
    for (server, pid) in servers.iter_mut().zip(pids) {
        ask_until_done(|words| host.tool(words), &["detach", &pid.to_string()]);
        server.check("check 1");
    }
    for server in servers {
        assert!(server.end().success());
    }
}
