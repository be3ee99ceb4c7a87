//! A daemon with a keeper, for the tests of the cold tier.

use super::{PATIENCE, Reaped, TOOL, ask, c_program, comes, wait_for};
pub use pagefold_os::procfs::has_ended;
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

/// A daemon with a keeper: either may be replaced by the other at any time, so both are known by their sockets.
pub struct Host {
    pub child: Child,
    pub socket: PathBuf,
    pub dir: tempfile::TempDir,
}

impl Host {
    pub fn start(args: &[&str]) -> Host {
        Host::start_by(|socket| spawn(socket, args))
    }

    /// Like [`start`](Self::start), with a daemon that the caller starts.
    pub fn start_by(start: impl FnOnce(&Path) -> Child) -> Host {
        let dir = tempfile::tempdir().expect("a directory");
        let socket = dir.path().join("s");
        let child = start(&socket);
        let host = Host { child, socket, dir };
        host.wait();
        host
    }

    pub fn wait(&self) {
        wait_for("a daemon to listen", 30, || self.tool(&["status", "--json"]).status.success());
    }

    pub fn tool(&self, args: &[&str]) -> Output {
        ask(TOOL.as_ref(), &self.socket, args)
    }

    /// Gives a command for all clients and does not wait.
    pub fn tool_aside(&self, command: &str) -> Child {
        let mut tool = Command::new(TOOL);
        tool.args([command, "--all", "--socket"]).arg(&self.socket).stdout(Stdio::piped()).stderr(Stdio::piped());
        tool.spawn().expect("the tool runs")
    }

    pub fn run(&self, options: &[&str]) -> Command {
        let mut command = Command::new(TOOL);
        command.args(["run", "--cold", "--socket"]).arg(&self.socket).args(options).arg("--");
        command.current_dir(self.dir.path());
        command
    }

    pub fn status(&self) -> Value {
        let output = self.tool(&["status", "--json"]);
        assert!(output.status.success(), "status: {}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).expect("status --json is JSON")
    }

    pub fn cold(&self, pid: i32) -> Option<Value> {
        let status = self.status();
        status["cold"]["clients"].as_array()?.iter().find(|client| client["pid"] == pid).cloned()
    }

    /// A number of a client; 0 if it is none.
    pub fn number(&self, pid: i32, name: &str) -> u64 {
        self.cold(pid).map_or(0, |client| client[name].as_u64().unwrap_or_else(|| panic!("no {name} in {client}")))
    }

    /// A command that runs what follows merged live.
    pub fn run_live(&self) -> Command {
        let mut command = Command::new(TOOL);
        command.args(["run", "--manage=all", "--socket"]).arg(&self.socket).arg("--").current_dir(self.dir.path());
        command
    }

    /// Every merged page shows its slot.
    pub fn verify(&self) {
        let output = self.tool(&["verify"]);
        assert!(output.status.success(), "verify: {}", String::from_utf8_lossy(&output.stdout));
    }

    pub fn wait_for_client(&self, pid: i32) {
        wait_for("the client to be connected", 30, || self.cold(pid).is_some_and(|client| client["connected"] == true));
    }

    /// Puts everything of a client out; returns the pages that are out afterwards.
    pub fn park(&self, pid: i32) -> u64 {
        let output = self.tool(&["park", &pid.to_string()]);
        assert!(output.status.success(), "park: {}", String::from_utf8_lossy(&output.stderr));
        self.number(pid, "pages_out")
    }

    fn keeper_path(&self) -> PathBuf {
        pagefold_daemon::cold::keeper_path(&self.socket)
    }

    pub fn keeper_pid(&self) -> Option<i32> {
        use std::os::unix::ffi::OsStrExt;
        let socket = pagefold_os::sock::connect(self.keeper_path().as_os_str().as_bytes()).ok()?;
        Some(pagefold_os::sock::peer(&socket).ok()?.pid)
    }

    pub fn pid(&self) -> i32 {
        self.status()["pid"].as_i64().expect("a number") as i32
    }

    /// Kills the current daemon by SIGKILL; the keeper starts the next one.
    pub fn kill_daemon(&mut self) {
        let pid = self.pid();
        kill(pid);
        if pid == self.child.id() as i32 {
            let _ = self.child.wait();
        }
        // A daemon that the keeper started is not a child of this process. Until it has ended it holds the lock, and a new
        // daemon would exit.
        wait_for("the daemon to have ended", 30, || has_ended(pid));
    }

    /// Like [`kill_daemon`](Self::kill_daemon), and starts the next daemon if the keeper holds no pages and starts none.
    pub fn replace_daemon(&mut self, args: &[&str]) {
        self.kill_daemon();
        self.restart_daemon(args);
    }

    /// Asks the current daemon to stop, and waits until it has.
    pub fn stop_daemon(&mut self) {
        let pid = self.pid();
        // SAFETY: a process that this test started.
        unsafe { libc::kill(pid, libc::SIGTERM) };
        wait_for("the daemon to have ended", 60, || has_ended(pid));
        let _ = self.child.wait();
    }

    /// Starts a daemon in place of one that has ended, unless the keeper does.
    pub fn restart_daemon(&mut self, args: &[&str]) {
        let keeper = pagefold_tier::keeper::Keeper::connect(&self.keeper_path());
        if keeper.and_then(|keeper| keeper.names()).map_or(true, |names| names.is_empty()) {
            self.child = spawn(&self.socket, args);
        }
        self.wait();
    }

    /// Kills daemon and keeper.
    pub fn kill_all(&mut self) {
        kill_with_keeper(&self.socket);
        let _ = self.child.wait();
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.kill_all();
    }
}

/// Kills the daemon at `socket` and its keeper, also one that is only starting. Either would replace the other, so all of
/// them stand still first.
pub fn kill_with_keeper(socket: &Path) {
    let mut found = Vec::new();
    loop {
        let new: Vec<i32> = serving(socket).filter(|pid| !found.contains(pid)).collect();
        if new.is_empty() {
            break;
        }
        new.iter().for_each(|pid| signal(*pid, libc::SIGSTOP));
        found.extend(new);
    }
    found.iter().for_each(|pid| kill(*pid));
    // Until it has ended a daemon holds the lock. No panic here: it would hide the panic of a failed test.
    if !comes(PATIENCE, || found.iter().all(|pid| has_ended(*pid))) {
        eprintln!("of {found:?}, daemons and keepers of {}, one does not end", socket.display());
    }
}

/// The daemons and keepers of a socket, by their arguments.
fn serving(socket: &Path) -> impl Iterator<Item = i32> {
    let paths =
        [socket.to_owned(), pagefold_daemon::cold::keeper_path(socket)].map(|path| path.into_os_string().into_vec());
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(move |pid: &i32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let words: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
        let is_keeper = words[0].ends_with(b"pagefold-keeper");
        let serves = is_keeper || words.get(1).is_some_and(|word| [&b"daemon"[..], b"keeper"].contains(word));
        // A daemon that the keeper starts has `--socket=` in the same word.
        serves && words.iter().any(|word| paths.iter().any(|path| word.ends_with(path)))
    })
}

pub fn kill(pid: i32) {
    signal(pid, libc::SIGKILL);
}

fn signal(pid: i32, signal: i32) {
    if pid > 1 {
        // SAFETY: a process that this test started.
        unsafe { libc::kill(pid, signal) };
    }
}

pub fn spawn(socket: &Path, args: &[&str]) -> Child {
    let mut command = Command::new(TOOL);
    command.args(["daemon", "--priority=normal", "--scan-interval", "250ms", "--socket"]).arg(socket).args(args);
    command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().expect("the daemon starts")
}

/// The path of a compiled client.
pub type Compiled = OnceLock<Option<PathBuf>>;

/// The client of `tests/programs/NAME.c`, compiled if it `fits` here.
pub fn compiled(built: &'static Compiled, name: &str, fits: impl FnOnce() -> bool) -> Option<&'static Path> {
    built.get_or_init(|| fits().then(|| c_program(name))?).as_deref()
}

/// The compiled client, once.
pub fn program() -> Option<&'static Path> {
    static BUILT: Compiled = OnceLock::new();
    compiled(&BUILT, "cold", || true)
}

/// All that the client does, one after the other.
pub const COMMANDS: [&str; 13] = [
    "check",
    "peek 500",
    "write 500",
    "discard 200",
    "rawdiscard 200",
    "guard 100",
    "fork",
    "move",
    "unmap",
    "rawfork",
    "storm 300",
    "advise willneed",
    "check",
];

/// The client, which knows what every byte of its memory must be.
pub struct Served {
    child: Reaped,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Served {
    pub fn start(host: &Host, options: &[&str], mib: u64) -> Served {
        let served = Served::start_by(host.run(options), mib);
        host.wait_for_client(served.pid());
        served
    }

    /// One that is merged live.
    pub fn start_live(host: &Host, mib: u64) -> Served {
        Served::start_by(host.run_live(), mib)
    }

    pub fn start_by(mut command: Command, mib: u64) -> Served {
        command.arg(program().expect("looked for before")).arg(mib.to_string());
        Served::start_of(command)
    }

    /// Runs `program`, which is merged live, under the host's daemon.
    pub fn start_live_of(host: &Host, program: &Path) -> Served {
        let mut command = host.run_live();
        command.arg(program);
        Served::start_of(command)
    }

    /// Any program that says `ready`, and `right` to each command.
    pub fn start_of(mut command: Command) -> Served {
        let mut child = Reaped(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("a client"));
        let input = child.0.stdin.take().expect("a pipe");
        let output = BufReader::new(child.0.stdout.take().expect("a pipe"));
        let mut served = Served { child, input, output };
        assert_eq!(served.line(), "ready");
        served
    }

    pub fn pid(&self) -> i32 {
        self.child.pid()
    }

    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("a line");
        line.trim_end().to_owned()
    }

    pub fn send(&mut self, command: &str) {
        writeln!(self.input, "{command}").expect("the client reads");
    }

    pub fn expect_right(&mut self, command: &str) {
        let line = self.line();
        assert_eq!(line, "right", "{command}: the client found wrong bytes, or died");
    }

    /// What it says beside being right.
    pub fn says(&mut self, command: &str) -> String {
        self.send(command);
        let line = self.line();
        let said = line.strip_prefix("right").map(|said| said.trim_start().to_owned());
        said.unwrap_or_else(|| panic!("{command}: the client found wrong bytes, or died: {line:?}"))
    }

    /// True if it was done, false if there was no memory for it.
    pub fn tries(&mut self, command: &str) -> bool {
        self.send(command);
        match self.line().as_str() {
            "right" => true,
            "refused" => false,
            line => panic!("{command}: {line:?}"),
        }
    }

    pub fn does(&mut self, command: &str) {
        self.send(command);
        self.expect_right(command);
    }
}

/// Gives these commands for all clients in turn until dropped.
pub struct Parking {
    end: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Parking {
    pub fn start(socket: &Path, commands: &'static [&'static str], pause: Duration) -> Parking {
        let end = Arc::new(AtomicBool::new(false));
        let (ended, socket) = (end.clone(), socket.to_owned());
        let thread = std::thread::spawn(move || {
            for command in commands.iter().cycle() {
                if ended.load(Ordering::Relaxed) {
                    return;
                }
                let _ = Command::new(TOOL).args([command, "--all", "--socket"]).arg(&socket).output();
                std::thread::sleep(pause);
            }
        });
        Parking { end, thread: Some(thread) }
    }
}

impl Drop for Parking {
    fn drop(&mut self) {
        self.end.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Has all of a program's silent memory go to the tier and come back, lets it fork, and parks and unparks all the time while
/// it storms over its memory: it reads what it wrote.
pub fn storm_beside_parking(program: &Path, pages: u64) {
    let host = Host::start(&["--cold-scan-interval", "200ms", "--cold-idle", "100ms"]);
    let mut command = host.run(&[]);
    command.arg(program);
    let mut client = Served::start_of(command);
    let pid = client.pid();
    host.wait_for_client(pid);
    wait_for("memory to go", 240, || host.park(pid) > pages);
    client.says("check");
    host.park(pid);
    client.says("fork");
    let _parking = Parking::start(&host.socket, &["park", "park", "unpark"], Duration::from_millis(300));
    for _ in 0..3 {
        client.says("storm 4000");
    }
    client.says("check");
}
