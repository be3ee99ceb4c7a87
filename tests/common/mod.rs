//! What the privileged tests share: a daemon of one's own, the C program with the scenarios, and loud skips.

#![allow(dead_code)]

pub mod executable;

pub mod boot;
pub mod cold;
mod control_group;
pub mod group;
pub mod guest;
pub mod packages;
pub mod systemd;
pub mod terminal;

use serde_json::Value;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The tool under test.
pub const TOOL: &str = env!("CARGO_BIN_EXE_pagefold");

/// The tool of another version, if `PAGEFOLD_BEFORE` names one; else the same.
pub fn tool_before() -> PathBuf {
    std::env::var_os("PAGEFOLD_BEFORE").map_or_else(|| TOOL.into(), PathBuf::from)
}

/// A seed that is another one in each run.
pub fn seed_by_clock() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(7, |time| time.as_nanos() as u64)
}

/// Random numbers; print the seed, so that a failure can be repeated.
pub struct Random(fastrand::Rng);

impl Random {
    /// With a seed by the clock, which is printed.
    pub fn by_clock() -> Random {
        let seed = seed_by_clock();
        println!("seed {seed}");
        Random::new(seed)
    }

    pub fn new(seed: u64) -> Random {
        Random(fastrand::Rng::with_seed(seed))
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.0.u64(..limit)
    }
}

/// Threads that keep the processors busy until dropped.
pub struct Busy {
    end: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Busy {
    pub fn start(threads: usize) -> Busy {
        let end = Arc::new(AtomicBool::new(false));
        let spin = |ended: Arc<AtomicBool>| {
            while !ended.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        };
        let start = |_| {
            let ended = end.clone();
            std::thread::spawn(move || spin(ended))
        };
        let threads = (0..threads).map(start).collect();
        Busy { end, threads }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.end.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Reports why a test is skipped, even when the test harness hides the output of passing tests.
pub fn skipped(why: &str) {
    // Not through the test harness, which hides the output of tests that pass.
    let _ = writeln!(std::io::stderr(), "SKIPPED: {why}");
}

/// True for the user root.
pub fn root() -> bool {
    pagefold_os::user::effective() == 0
}

/// True if this process may make namespaces and become other users; says so where not.
pub fn is_root() -> bool {
    if !root() {
        skipped("not root: no mount namespaces and other users");
    }
    root()
}

/// True if live merging works here; says why not.
pub fn can_merge() -> bool {
    let lack = pagefold_os::probe::all().into_iter().find(|finding| finding.needed && !finding.works);
    if let Some(lack) = &lack {
        skipped(&format!("{}: {}", lack.name, lack.detail));
    }
    lack.is_none() && !kernel_merges()
}

/// True if the kernel's KSM runs: it takes what programs mark mergeable before we do. Waits a while, for another test or
/// a benchmark may be using it.
fn kernel_merges() -> bool {
    let runs = || pagefold_os::ksm::read("run").is_ok_and(|run| run == 1);
    let began = Instant::now();
    while runs() && began.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(100));
    }
    if runs() {
        skipped("KSM runs and takes the pages first; echo 0 > /sys/kernel/mm/ksm/run");
    }
    runs()
}

/// The path of `program`, or `None` after saying that it is absent.
pub fn installed(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|dir| dir.join(program)).find(|path| path.is_file());
    if found.is_none() {
        skipped(&format!("{program} is not installed"));
    }
    found
}

/// The compiled C program with the scenarios; `None` after saying that there is no compiler.
pub fn semantics() -> Option<&'static Path> {
    static BUILT: OnceLock<Option<PathBuf>> = OnceLock::new();
    BUILT.get_or_init(|| c_program("semantics")).as_deref()
}

/// A C program of `tests/programs`: `NAME.c`, or all files of `NAME`. It is built once for each state of its sources, and
/// all test binaries use the same one. `None` after saying that there is no compiler.
pub fn c_program(name: &str) -> Option<PathBuf> {
    c_program_with(name, &[])
}

/// A static program that a daemon of root's attaches, compiled once; `None` after saying what is missing.
pub fn static_program(built: &'static OnceLock<Option<PathBuf>>, name: &str) -> Option<&'static Path> {
    if !can_merge() {
        return None;
    }
    if !is_root() {
        skipped("only a daemon with CAP_SYS_PTRACE follows forks of attached programs");
        return None;
    }
    built.get_or_init(|| c_program_with(name, &["-static"])).as_deref()
}

/// As [`c_program`], with more options for the compiler.
pub fn c_program_with(name: &str, options: &[&str]) -> Option<PathBuf> {
    let cc = installed("cc")?;
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs");
    let mut files = vec![sources.join(format!("{name}.c"))];
    if let Ok(entries) = std::fs::read_dir(sources.join(name)) {
        files = entries.map(|entry| entry.expect("an entry").path()).collect();
        files.sort();
    }
    // Several programs include them.
    files.extend(["bare_call.h", "known_bytes.h"].map(|name| sources.join(name)));
    let mut state = DefaultHasher::new();
    options.hash(&mut state);
    files.iter().for_each(|file| std::fs::read(file).expect("a source").hash(&mut state));
    let builds = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let dir = builds.join(format!("{name}-{:016x}", state.finish()));
    if !dir.exists() {
        let new = tempfile::tempdir_in(builds).expect("a directory");
        let mut command = Command::new(cc);
        command.args(["-O2", "-Wall", "-Werror", "-pthread"]).args(options).arg("-o").arg(new.path().join(name));
        command.args(files.iter().filter(|file| file.extension().is_some_and(|extension| extension == "c")));
        let done = command.output().expect("cc runs");
        assert!(done.status.success(), "cc: {}", String::from_utf8_lossy(&done.stderr));
        // If another test binary was faster, this fails and its program is used.
        let _ = std::fs::rename(new.path(), &dir);
    }
    Some(dir.join(name))
}

/// Python where distributions install it, without wrappers in PATH; `None` after saying that there is none.
pub fn python() -> Option<&'static str> {
    let found = ["/usr/bin/python3", "/usr/local/bin/python3"].into_iter().find(|path| Path::new(path).exists());
    if found.is_none() {
        skipped("python3 is not installed");
    }
    found
}

/// A daemon of the test's own.
pub struct Daemon {
    pub child: Child,
    pub socket: PathBuf,
    pub dir: tempfile::TempDir,
    args: Vec<String>,
    /// What the daemon, its clients and questions to it are started with.
    pub tool_path: PathBuf,
}

impl Daemon {
    /// Starts one that listens in a new directory.
    pub fn start(args: &[&str]) -> Daemon {
        Daemon::start_of(TOOL.into(), args)
    }

    /// As [`start`](Daemon::start), a daemon of this tool's version.
    pub fn start_of(tool_path: PathBuf, args: &[&str]) -> Daemon {
        Daemon::start_in(tempfile::tempdir().expect("a directory"), tool_path, args)
    }

    /// As [`start_of`](Daemon::start_of), in a directory that is made already.
    pub fn start_in(dir: tempfile::TempDir, tool_path: PathBuf, args: &[&str]) -> Daemon {
        let socket = dir.path().join("s");
        let args: Vec<String> = args.iter().map(|arg| arg.to_string()).collect();
        let child = spawn_daemon(&tool_path, &socket, &args);
        let daemon = Daemon { child, socket, dir, args, tool_path };
        daemon.wait_until_it_listens();
        daemon
    }

    fn wait_until_it_listens(&self) {
        wait_for("the daemon to listen", 20, || self.tool(&["status", "--json"]).status.success());
    }

    /// Kills it and starts the next at the same place.
    pub fn replace(&mut self) {
        self.kill();
        self.child = spawn_daemon(&self.tool_path, &self.socket, &self.args);
        self.wait_until_it_listens();
    }

    /// As [`replace`](Self::replace); the next daemon has other options.
    pub fn replace_with(&mut self, args: &[&str]) {
        self.args = args.iter().map(|arg| arg.to_string()).collect();
        self.replace();
    }

    /// As `kill -9`.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    pub fn is_alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Runs the tool with `args` and this daemon's socket.
    pub fn tool(&self, args: &[&str]) -> Output {
        ask(&self.tool_path, &self.socket, args)
    }

    /// A command that runs its program (to be added) under this daemon.
    pub fn run(&self, options: &[&str]) -> Command {
        let mut command = Command::new(&self.tool_path);
        command.arg("run").arg("--socket").arg(&self.socket).args(options).arg("--").current_dir(self.dir.path());
        command
    }

    /// The daemon's status.
    pub fn status(&self) -> Value {
        let output = self.tool(&["status", "--json"]);
        assert!(output.status.success(), "status: {}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).expect("status --json is JSON")
    }

    /// A number of the status' totals.
    pub fn total(&self, name: &str) -> i64 {
        self.status()["totals"][name].as_i64().unwrap_or_else(|| panic!("totals have no {name}"))
    }

    /// Compares every shared page with its slot, through the kernel's page tables.
    pub fn verify(&self) {
        let output = self.tool(&["verify"]);
        assert!(
            output.status.success(),
            "verify: {}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        cold::kill_with_keeper(&self.socket);
        self.kill();
    }
}

fn spawn_daemon(tool_path: &Path, socket: &Path, args: &[String]) -> Child {
    let mut command = Command::new(tool_path);
    // Without --priority normal its workers would wait for idle time, of which a machine that runs tests has none.
    command.args(["daemon", "--priority=normal", "--socket"]).arg(socket);
    if !args.iter().any(|arg| arg == "--scan-interval") {
        command.args(["--scan-interval", "100ms"]);
    }
    command.args(args).stdin(Stdio::null()).stdout(Stdio::null()).spawn().expect("the daemon starts")
}

/// A client that runs the scenario `serve`; ends with its owner.
pub struct Server {
    child: Reaped,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Server {
    /// Starts `program` by `command`, which [`Daemon::run`] made, and waits until its memory is there.
    pub fn start(command: Command, program: &Path) -> Server {
        Server::start_as("serve", command, program)
    }

    /// As [`start`](Self::start), with another scenario that answers in the same way.
    pub fn start_as(scenario: &str, mut command: Command, program: &Path) -> Server {
        command.arg(program).arg(scenario).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = Reaped(command.spawn().expect("a client"));
        let input = child.0.stdin.take().expect("a pipe");
        let mut output = BufReader::new(child.0.stdout.take().expect("a pipe"));
        let mut line = String::new();
        output.read_line(&mut line).expect("a line");
        assert_eq!(line, "ready\n");
        Server { child, input, output }
    }

    pub fn pid(&self) -> i32 {
        self.child.pid()
    }

    /// Lets the client compare every byte; returns how many of its pages lie in the pool.
    pub fn check(&mut self, word: &str) -> usize {
        let sent = writeln!(self.input, "{word}");
        let mut line = String::new();
        self.output.read_line(&mut line).expect("a line");
        if sent.is_err() || line.is_empty() {
            panic!("the client died: {:?}", self.child.0.wait());
        }
        let pages = line.trim().strip_prefix("right ").and_then(|pages| pages.parse().ok());
        pages.unwrap_or_else(|| panic!("the client found wrong bytes, or died: {line:?}"))
    }

    /// Gives a command, and does not wait for its answer.
    pub fn tell(&mut self, word: &str) {
        writeln!(self.input, "{word}").expect("it reads");
    }

    /// Has no more to ask; tells how the client ended.
    pub fn end(self) -> ExitStatus {
        let Server { mut child, input, .. } = self;
        drop(input);
        child.0.wait().expect("it ends")
    }
}

/// Pages of a process that show the pool, by a status.
pub fn shared_pages_in(status: &Value, pid: i32) -> u64 {
    let clients = status["clients"].as_array().cloned().unwrap_or_default();
    clients
        .iter()
        .filter(|client| client["pid"] == pid)
        .filter_map(|client| client["stats"]["pages_sharing"].as_u64())
        .sum()
}

/// Events of one name in a status, over all domains.
pub fn events(status: &Value, name: &str) -> u64 {
    status["domains"].as_array().into_iter().flatten().filter_map(|domain| domain["events"][name].as_u64()).sum()
}

/// A child that ends with its owner.
pub struct Reaped(pub Child);

impl Reaped {
    pub fn pid(&self) -> i32 {
        self.0.id() as i32
    }
}

impl Drop for Reaped {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The least, in seconds, that [`wait_for`] and [`finish`] wait: on a machine that is busy with other things, moments
/// take long.
const PATIENCE: u64 = 120;

/// Where the thread of that name of a process may run, as the kernel writes it, and whether that is one processor only;
/// `None` if there is no such thread.
pub fn may_run(pid: i32, name: &str) -> Option<(String, bool)> {
    std::fs::read_dir(format!("/proc/{pid}/task")).ok()?.flatten().find_map(|task| {
        let status = std::fs::read_to_string(task.path().join("status")).ok()?;
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        let cpus = field("Cpus_allowed:").filter(|_| field("Name:") == Some(name))?;
        let count: u32 = cpus.chars().filter_map(|digit| digit.to_digit(16)).map(u32::count_ones).sum();
        Some((cpus.to_owned(), count == 1))
    })
}

/// Waits until `ready`, or panics after `seconds` (and two minutes at least), which only says that it will never be.
pub fn wait_for(what: &str, seconds: u64, ready: impl FnMut() -> bool) {
    let seconds = seconds.max(PATIENCE);
    assert!(comes(seconds, ready), "waited {seconds} s in vain for {what}");
}

/// Waits until `ready`, for at most `seconds`; true if it came.
pub fn comes(seconds: u64, mut ready: impl FnMut() -> bool) -> bool {
    let began = Instant::now();
    while !ready() {
        if began.elapsed() > Duration::from_secs(seconds) {
            return false;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    true
}

/// Runs a tool with `args` and the socket of a daemon.
pub fn ask(tool: &Path, socket: &Path, args: &[&str]) -> Output {
    let (command, rest) = args.split_first().expect("a command");
    Command::new(tool).arg(command).arg("--socket").arg(socket).args(rest).output().expect("the tool runs")
}

/// Gives the tool a command for a running program until it succeeds: on a busy machine none of the program's threads may
/// stand still in time, and a page that is pinned at this moment stays where it is. The tool says so, and may be asked
/// again. Returns what it said of its success as an error or a warning.
pub fn ask_until_done(tool: impl Fn(&[&str]) -> Output, words: &[&str]) -> String {
    let mut said = String::new();
    let done = comes(120, || {
        let output = tool(words);
        said = String::from_utf8_lossy(&output.stderr).into_owned();
        output.status.success()
    });
    assert!(done, "{words:?}: {said}");
    said
}

/// Runs `command` to its end; kills it and fails after `seconds`, and two minutes at least.
pub fn finish(command: &mut Command, seconds: u64) -> (ExitStatus, String, String) {
    let seconds = seconds.max(PATIENCE);
    let mut child =
        Reaped(command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts"));
    let out = read_all(child.0.stdout.take().expect("a pipe"));
    let err = read_all(child.0.stderr.take().expect("a pipe"));
    let began = Instant::now();
    let status = loop {
        if let Some(status) = child.0.try_wait().expect("wait") {
            break status;
        }
        if began.elapsed() > Duration::from_secs(seconds) {
            let pid = child.pid();
            let stacks = std::fs::read_to_string(format!("/proc/{pid}/stack")).unwrap_or_default();
            drop(child);
            panic!("still running after {seconds} s: {command:?}\n{stacks}");
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    (status, out.join().expect("output"), err.join().expect("output"))
}

/// Reads `from` in a thread of its own.
pub fn read_all(mut from: impl Read + Send + 'static) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = from.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}
