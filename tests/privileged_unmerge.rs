//! A program goes on while its memory is unmerged: it waits for small batches. The machine's load does not change their
//! number.

mod common;

use common::{Daemon, Reaped, c_program, can_merge, is_root, wait_for};
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{ChildStdin, ChildStdout, Command, Stdio};

const MIB: u64 = 64;
const PAGES: u64 = MIB * 256;
/// Most pages of one request to unshare.
const BATCH_PAGES: u64 = 512;
/// Longest wait on a quiet machine, in microseconds, and the longest wait at rest by which a machine counts as quiet.
const QUIET_US: [u64; 2] = [10_000, 1_000];

/// `tests/programs/gap.c`.
struct Toucher {
    child: Reaped,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Toucher {
    fn start(mut command: Command) -> Toucher {
        command.arg(MIB.to_string()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = Reaped(command.spawn().expect("the program starts"));
        let input = child.0.stdin.take().expect("a pipe");
        let output = BufReader::new(child.0.stdout.take().expect("a pipe"));
        let mut toucher = Toucher { child, input, output };
        assert_eq!(toucher.line(), "ready");
        toucher
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("a line");
        line.trim_end().to_owned()
    }

    /// The longest touch since the last question, in microseconds. All bytes that it read were right.
    fn longest_touch(&mut self) -> u64 {
        writeln!(self.input, "?").expect("the program lives");
        let line = self.line();
        let touch = line.split(' ').next().and_then(|word| word.parse().ok());
        touch.unwrap_or_else(|| panic!("the program read wrong bytes, or died: {line:?}"))
    }
}

fn client(daemon: &Daemon, pid: i32) -> Value {
    let status = daemon.status();
    let found = status["clients"].as_array().and_then(|clients| clients.iter().find(|client| client["pid"] == pid));
    found.cloned().unwrap_or_default()
}

/// Merges two programs that `start` makes clients, and unmerges the first. Returns what its status said before and after.
fn unmerge_one(daemon: &Daemon, mut touchers: [Toucher; 2]) -> (Value, Value) {
    let pids = [touchers[0].child.pid(), touchers[1].child.pid()];
    let sharing = |pid| client(daemon, pid)["stats"]["pages_sharing"].as_u64();
    wait_for("both to be merged", 120, || pids.iter().all(|pid| sharing(*pid) >= Some(PAGES * 3 / 4)));
    touchers[0].longest_touch();
    std::thread::sleep(std::time::Duration::from_secs(1));
    let at_rest = touchers[0].longest_touch();
    let before = client(daemon, pids[0]);
    let output = daemon.tool(&["unmerge", "--json", &pids[0].to_string()]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let told: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert!(told["count"].as_u64() >= Some(PAGES * 3 / 4) && told["left"] == 0, "{told}");
    let touch = touchers[0].longest_touch();
    println!("longest wait at rest {at_rest} us, while unmerged {touch} us");
    assert!(touch < QUIET_US[0] || at_rest > QUIET_US[1], "waited {touch} us; {at_rest} us at rest");
    touchers[1].longest_touch();
    (before, client(daemon, pids[0]))
}

fn program() -> Option<std::path::PathBuf> {
    if can_merge() { c_program("gap") } else { None }
}

#[test]
fn a_program_that_is_unmerged_goes_on() {
    let Some(program) = program() else { return };
    let daemon = Daemon::start(&[]);
    let start = || {
        let mut command = daemon.run(&["--manage=all"]);
        command.arg(&program);
        Toucher::start(command)
    };
    let (before, after) = unmerge_one(&daemon, [start(), start()]);
    let freezes = |client: &Value| client["freezes"].as_u64().expect("a number");
    // One for each half MiB at least: nothing is frozen for longer than that takes.
    let wanted = PAGES * 3 / 4 / 128;
    assert!(freezes(&after) - freezes(&before) >= wanted, "{before} {after}");
}

/// All of its threads stand still for each batch.
#[test]
fn an_attached_program_stands_still_for_small_batches() {
    let Some(program) = program().filter(|_| cfg!(target_arch = "x86_64") && is_root()) else { return };
    let daemon = Daemon::start(&["--no-keeper"]);
    let start = |program: &Path| {
        let toucher = Toucher::start(Command::new(program));
        let pid = toucher.child.pid().to_string();
        common::ask_until_done(|words| daemon.tool(words), &["attach", &pid]);
        toucher
    };
    let (before, after) = unmerge_one(&daemon, [start(&program), start(&program)]);
    let stops = |client: &Value| client["stops"].as_u64().expect("a number");
    let wanted = PAGES * 3 / 4 / BATCH_PAGES;
    assert!(stops(&after) - stops(&before) >= wanted, "{before} {after}");
}
