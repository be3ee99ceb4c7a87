//! Tutorial and README keep their word: every block of docs/tutorial.md runs, in order, and prints what the page shows; the
//! README's block of first commands runs in one terminal.

mod common;

use common::{TOOL, can_merge, executable, installed, skipped};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const PAGE: &str = include_str!("../docs/tutorial.md");

/// A block of commands, and what the page says it prints.
struct Block {
    commands: String,
    shown: Option<String>,
}

/// The ```sh blocks, each with the ```text block after it.
fn blocks(page: &str) -> Vec<Block> {
    let mut blocks: Vec<Block> = Vec::new();
    let mut rest = page;
    while let Some((_, after)) = rest.split_once("\n```") {
        let (kind, after) = after.split_once('\n').expect("a fence has a line");
        let (body, after) = after.split_once("\n```").expect("a fence is closed");
        match (kind, blocks.last_mut()) {
            ("sh", _) => blocks.push(Block { commands: body.to_owned(), shown: None }),
            ("text", Some(block)) if block.shown.is_none() => block.shown = Some(body.to_owned()),
            other => panic!("a block of kind {:?} that this test does not know", other.0),
        }
        rest = after;
    }
    blocks
}

/// A line without its figures and its spacing: sizes, times, shares and counts become `#`.
fn without_figures(line: &str) -> String {
    const UNITS: [&str; 14] = ["B", "KiB", "MiB", "GiB", "TiB", "ns", "us", "ms", "s", "m", "h", "d", "%", "kB"];
    let mut words: Vec<String> = Vec::new();
    for word in line.split_whitespace() {
        let digits = word.trim_matches(|c: char| "()-+,;.".contains(c));
        let number = digits.starts_with(|c: char| c.is_ascii_digit())
            && digits.chars().all(|c| c.is_ascii_digit() || ",.".contains(c));
        let follows_number = words.last().is_some_and(|last| last.ends_with('#'));
        if number {
            // Two units make one time (1 m 05 s); columns of a table stay apart.
            words.push(word.trim_start_matches('-').replace(digits, "#"));
        } else if follows_number && UNITS.contains(&digits) {
            let last = words.last_mut().expect("it follows one");
            *last += &word.replace(digits, "");
        } else {
            words.push(word.to_owned());
        }
    }
    words.join(" ")
}

/// Whether a shown line fits a printed one; `…` stands for anything.
fn line_fits(shown: &str, printed: &str) -> bool {
    let (shown, printed) = (without_figures(shown), without_figures(printed));
    let parts: Vec<&str> = shown.split('…').map(str::trim).collect();
    let [first, .., last] = parts[..] else { return shown == printed };
    let mut rest = match printed.strip_prefix(first) {
        Some(rest) => rest,
        None => return false,
    };
    for part in &parts[1..parts.len() - 1] {
        match rest.split_once(part) {
            Some((_, after)) => rest = after,
            None => return false,
        }
    }
    rest.ends_with(last)
}

/// Whether the shown lines fit the printed ones; a line of `…` alone stands for any number of lines.
fn fits(shown: &[&str], printed: &[&str]) -> bool {
    match (shown.first(), printed.first()) {
        (None, None) => true,
        (Some(&"…"), None) => fits(&shown[1..], printed),
        (Some(&"…"), Some(_)) => fits(&shown[1..], printed) || fits(shown, &printed[1..]),
        (Some(line), Some(said)) => line_fits(line, said) && fits(&shown[1..], &printed[1..]),
        _ => false,
    }
}

#[test]
fn figures_may_differ_and_words_may_not() {
    assert!(line_fits("63.0 MiB saved by 2 pages", "1,024 B saved by 40,000 pages"));
    assert!(line_fits("a   0 B  (ratio 13.6)", "a 7.5 MiB (ratio 2)"));
    assert!(!line_fits("63.0 MiB saved", "63.0 MiB lost"));
    assert!(!line_fits("1 2 3", "1 2"));
    assert!(line_fits("mounted … at …/mnt, process 5", "mounted /tmp/x at /tmp/y/mnt, process 77"));
    assert!(!line_fits("mounted … at …/mnt", "mounted /tmp/x at /tmp/y"));
    assert!(fits(&["a", "…", "z"], &["a", "b", "c", "z"]) && fits(&["a", "…"], &["a"]));
    assert!(!fits(&["a", "…", "z"], &["a", "b"]));
    assert_eq!(blocks("x\n```sh\nls\n```\n\n```text\na\nb\n```\n").len(), 1);
}

/// Ends what a failed run left: the programs of its group, its mounts.
struct Cleanup<'a> {
    dir: &'a Path,
    group: i32,
}

impl Drop for Cleanup<'_> {
    fn drop(&mut self) {
        // SAFETY: kill takes no pointers. The process group was made by this test; after a good run it is empty.
        unsafe { libc::kill(-self.group, libc::SIGKILL) };
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let here = self.dir.display().to_string();
        for at in mounts.lines().filter_map(|line| line.split(' ').nth(1)).filter(|at| at.starts_with(&here)) {
            let _ = Command::new(TOOL)
                .args(["disk", "umount", "--force", at])
                .env("PAGEFOLD_RUNTIME_DIR", self.dir.join("run"))
                .output();
            let _ = Command::new("umount").args(["-l", at]).output();
        }
    }
}

#[test]
fn the_tutorial_runs_as_it_is_written() {
    if !common::root() {
        return skipped("the tutorial mounts: it needs root");
    }
    if !can_merge() || installed("perl").is_none() {
        return;
    }
    if !Path::new("/dev/fuse").exists() {
        return skipped("the tutorial shows disk images: there is no /dev/fuse");
    }
    if let Some(lack) = pagefold_image::doctor().into_iter().find(|check| check.name.contains("mount") && !check.ok) {
        return skipped(&format!("the tutorial mounts image trees: {}: {}", lack.name, lack.detail));
    }
    let blocks = blocks(PAGE);
    let scratch = tempfile::tempdir_in("/var/tmp").expect("a directory");
    let run = scratch.path().join("run");
    std::fs::create_dir(&run).expect("a directory");
    let here = scratch.path().join("here");
    std::fs::create_dir(&here).expect("a directory");
    let mut script = String::from("set -eu\n");
    for (number, block) in blocks.iter().enumerate() {
        script += &format!("echo '--- block {number}'\n{}\n", block.commands);
    }
    let output = scratch.path().join("output");
    let file = std::fs::File::create(&output).expect("a file");
    let tools = Path::new(TOOL).parent().expect("it lies somewhere").display().to_string();
    let mut child = Command::new("bash")
        .args(["-c", &script])
        .current_dir(&here)
        .env("PATH", format!("{tools}:{}", std::env::var("PATH").unwrap_or_default()))
        .env("PAGEFOLD_RUNTIME_DIR", &run)
        // `status` shows stores too: not this machine's.
        .env("PAGEFOLD_STORE", scratch.path().join("no-store"))
        .stdin(Stdio::null())
        .stdout(file.try_clone().expect("a descriptor"))
        .stderr(file)
        .process_group(0)
        .spawn()
        .expect("bash starts");
    let cleanup = Cleanup { dir: scratch.path(), group: child.id() as i32 };
    let began = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().expect("it is ours") {
            break Some(status);
        }
        // Some hundred times what it takes: only a tutorial that hangs comes here.
        if began.elapsed() > Duration::from_secs(300) {
            break None;
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    drop(cleanup);
    let printed = std::fs::read_to_string(&output).expect("its output");
    assert!(status.is_some_and(|status| status.success()), "{status:?}:\n{printed}");
    for (number, block) in blocks.iter().enumerate() {
        let (_, after) = printed.split_once(&format!("--- block {number}\n")).expect("every block began");
        let said = after.split_once("--- block ").map_or(after, |(said, _)| said);
        let (said, shown): (Vec<&str>, Vec<&str>) = (
            said.lines().collect(),
            match &block.shown {
                Some(shown) => shown.lines().collect(),
                // What the page does not show must not be there: a message would be a surprise.
                None => Vec::new(),
            },
        );
        assert!(
            fits(&shown, &said),
            "after\n{}\nthe page shows\n{}\nand this was printed:\n{}",
            block.commands,
            shown.join("\n"),
            said.join("\n")
        );
    }
}

/// The block of commands under "Use it".
fn first_commands() -> String {
    let (_, after) = include_str!("../README.md").split_once("\n## Use it\n\n```sh\n").expect("README has the block");
    after.split_once("\n```").expect("a fence is closed").0.to_owned()
}

/// Programs of the block that this test brings along: nothing is installed, and the server is any program with memory.
fn stand_ins(dir: &Path, python: &str) {
    let server =
        format!("exec {python} -c 'import time; m = bytes(64 << 20).replace(b\"\\0\", b\"r\"); time.sleep(600)'\n");
    for (name, text) in [("cargo", "exit 0\n"), ("redis-server", server.as_str())] {
        let path = dir.join(name);
        executable::script(&format!("#!/bin/sh\n{text}"), &path);
    }
}

#[test]
fn the_readmes_first_commands_work_in_one_terminal() {
    let Some(python) = common::python().filter(|_| can_merge()) else { return };
    if std::net::TcpListener::bind("127.0.0.1:9200").is_err() {
        return skipped("127.0.0.1:9200 is taken, and the README's page is there");
    }
    let scratch = tempfile::tempdir_in("/var/tmp").expect("a directory");
    let bin = scratch.path().join("bin");
    std::fs::create_dir(&bin).expect("a directory");
    stand_ins(&bin, python);
    let tools = Path::new(TOOL).parent().expect("it lies somewhere").display().to_string();
    let path = format!("{}:{tools}:{}", bin.display(), std::env::var("PATH").unwrap_or_default());
    let with_environment = |command: &mut Command| {
        command.env("PATH", &path).env("PAGEFOLD_RUNTIME_DIR", scratch.path().join("run"));
        command.env("PAGEFOLD_STORE", scratch.path().join("no-store")).env("PAGEFOLD_CONFIG", "none");
        command.env("TERM", "xterm-256color").current_dir(scratch.path());
    };
    let (keyboard, terminal) = common::terminal::open();
    let mut bash = Command::new("bash");
    bash.args(["-c", &format!("set -e\n{}", first_commands())]).process_group(0);
    with_environment(&mut bash);
    bash.stdin(terminal()).stdout(terminal()).stderr(terminal());
    let mut running = bash.spawn().expect("bash starts");
    // It holds the terminal open.
    drop(bash);
    let cleanup = Cleanup { dir: scratch.path(), group: running.id() as i32 };
    let shown = common::read_all(keyboard.try_clone().expect("a copy"));
    let mut keys = keyboard;
    // `top` is the only command that reads keys.
    let ended = common::comes(300, || {
        let _ = std::io::Write::write_all(&mut keys, b"q");
        running.try_wait().expect("it is ours").is_some()
    });
    let status = ended.then(|| running.wait().expect("it has ended"));
    let is_up = common::comes(60, || std::net::TcpStream::connect("127.0.0.1:9200").is_ok());
    let clients = || {
        let mut tool = Command::new(TOOL);
        with_environment(tool.args(["status", "--json"]));
        let said: Option<serde_json::Value> =
            serde_json::from_slice(&tool.output().expect("the tool runs").stdout).ok();
        said.and_then(|said| said["clients"].as_array().map(Vec::len))
    };
    let are_clients = common::comes(60, || clients() == Some(2));
    let mut tool = Command::new(TOOL);
    with_environment(tool.arg("stop"));
    let stopped = tool.output().expect("the tool runs");
    drop((cleanup, keys, terminal));
    let shown = shown.join().expect("its output");
    assert!(status.is_some_and(|status| status.success()) && is_up, "{status:?}, page {is_up}:\n{shown}");
    assert!(are_clients, "{:?} clients:\n{shown}", clients());
    for line in ["listens at", "page at http://127.0.0.1:9200/"] {
        assert!(shown.contains(line), "no {line:?} in\n{shown}");
    }
    assert!(stopped.status.success(), "{}", String::from_utf8_lossy(&stopped.stderr));
}
