//! `pagefold scan` at the command line: what it prints, in text and JSON, and how it ends.

use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

fn scan(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pagefold")).arg("scan").args(args).output().expect("the tool runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("the tool writes UTF-8")
}

fn json(output: &Output) -> serde_json::Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", text(&output.stderr)))
}

/// A process that does nothing, ended with the test.
struct Sleeper(Child);

impl Sleeper {
    fn start() -> Sleeper {
        Sleeper::by("sleep".as_ref())
    }

    /// By `program`, which is sleep(1) under whatever name.
    fn by(program: &std::ffi::OsStr) -> Sleeper {
        let sleeper = Sleeper(Command::new(program).arg("600").stdout(Stdio::null()).spawn().expect("sleep"));
        // Before it sleeps it may not have the memory yet that it will have.
        let (began, stat) = (Instant::now(), format!("/proc/{}/stat", sleeper.0.id()));
        let sleeps = |stat: Vec<u8>| stat.windows(4).any(|four| four == b") S ");
        while !std::fs::read(&stat).is_ok_and(sleeps) {
            assert!(began.elapsed() < Duration::from_secs(60), "it does not sleep");
            std::thread::sleep(Duration::from_millis(1));
        }
        sleeper
    }

    fn pid(&self) -> String {
        self.0.id().to_string()
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn two_files_with_common_pages() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = |name: &str, pages: std::ops::Range<u32>| {
        let bytes: Vec<u8> = pages.flat_map(|n| (n + 1).to_le_bytes().repeat(1024)).collect();
        let path = dir.path().join(name).display().to_string();
        std::fs::write(&path, bytes).expect("a file");
        path
    };
    let (one, two) = (file("one", 0..100), file("two", 50..150));
    let output = scan(&[&one, &two, "--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let report = json(&output);
    assert_eq!(report["totals"]["examined"], 200);
    assert_eq!(report["totals"]["duplicate_across"], 50);
    assert_eq!(report["totals"]["unique"], 100);
    assert_eq!(report["runs"]["mean"], 50.0);
    assert_eq!(report["cost"]["duplicate_bytes"], 50 * 4096);
    assert_eq!(report["sources"][1]["duplicate_across"], 50);
    let shown = text(&scan(&[&one, &two]).stdout);
    for part in ["duplicate across     50  200 KiB", "32-63     2    100", "own metadata", "deduplicated", "freed"] {
        assert!(shown.contains(part), "`{part}` is not in\n{shown}");
    }
    // The same file by two names is one file.
    let twice = json(&scan(&[&one, &format!("{}/./one", dir.path().display()), "--json"]));
    assert_eq!(twice["totals"]["duplicate_across"], 0);
    assert_eq!(twice["notes"][0]["what"], "named twice, scanned once");
}

#[test]
fn a_missing_file_beside_a_good_one_is_a_note_and_a_failure() {
    let dir = tempfile::tempdir().expect("a directory");
    let good = dir.path().join("good").display().to_string();
    std::fs::write(&good, [7; 4096]).expect("a file");
    let output = scan(&[&good, "/nowhere/at/all"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stdout).contains("note: /nowhere/at/all: no such process or file"));
    let output = scan(&["/nowhere/at/all"]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(text(&output.stderr), "pagefold: scan: /nowhere/at/all: no such process or file\n");
    let output = scan(&[&dir.path().display().to_string()]);
    assert!(text(&output.stderr).contains("is a directory; `--tree DIR` scans one"), "{}", text(&output.stderr));
}

#[test]
fn wrong_usage_is_two() {
    for args in [&[][..], &["--all", "1"], &["--sample", "2", "1"], &["--workers", "0", "1"], &["--nonsense"]] {
        assert_eq!(scan(args).status.code(), Some(2), "{args:?}");
    }
}

#[test]
fn a_process_is_scanned_while_it_runs() {
    let sleeper = Sleeper::start();
    let output = scan(&[&sleeper.pid(), "--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let report = json(&output);
    assert_eq!(report["sources"][0]["pid"].to_string(), sleeper.pid());
    assert_eq!(report["sources"][0]["name"], "sleep");
    assert!(report["totals"]["examined"].as_u64().is_some_and(|pages| pages > 4));
}

/// The kernel cuts names at 15 bytes, wherever that is in a letter.
#[test]
fn a_process_whose_name_is_cut_within_a_letter_is_scanned() {
    let dir = tempfile::tempdir().expect("a directory");
    let found = |path: &&str| std::path::Path::new(path).exists();
    let sleep = ["/bin/sleep", "/usr/bin/sleep"].into_iter().find(found).expect("sleep");
    let link = dir.path().join("спящийпроцесс");
    std::os::unix::fs::symlink(sleep, &link).expect("a link");
    let sleeper = Sleeper::by(link.as_ref());
    let output = scan(&[&sleeper.pid(), "--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert_eq!(json(&output)["sources"][0]["name"], "спящийп\u{fffd}");
    let all = json(&scan(&["--all", "--json"]));
    let pids: Vec<String> =
        all["sources"].as_array().expect("sources").iter().map(|one| one["pid"].to_string()).collect();
    assert!(pids.contains(&sleeper.pid()), "{pids:?}");
}

/// Its memory is its process's: side by side they would be duplicates of each other.
#[test]
fn a_thread_is_no_process() {
    // The test's own, which lives as long as the scan.
    let thread = std::thread::spawn(|| {
        let own = std::fs::read_link("/proc/thread-self").expect("this thread");
        scan(&[&own.file_name().expect("its number").to_string_lossy()])
    });
    let output = thread.join().expect("a scan");
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("is a thread; name its process"), "{}", text(&output.stderr));
}

/// A reader that leaves early (`| head -1`) is no failure and no message.
#[test]
fn a_closed_pipe_is_no_failure() {
    let sleeper = Sleeper::start();
    let mut child = Command::new(env!("CARGO_BIN_EXE_pagefold"))
        .args(["scan", &sleeper.pid()])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the tool runs");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("it ends");
    assert_eq!((output.status.code(), text(&output.stderr).as_str()), (Some(0), ""));
}

/// Pages that pagefold has merged are reported as merged, not as a possible saving.
#[test]
fn merged_pages_of_clients_are_no_saving() {
    let dir = tempfile::tempdir().expect("a directory");
    let socket = dir.path().join("daemon.sock");
    let tool = || Command::new(env!("CARGO_BIN_EXE_pagefold"));
    let mut daemon = tool();
    daemon
        .args(["daemon", "--priority=normal", "--no-keeper", "--scan-interval", "200ms", "--socket"])
        .arg(&socket)
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let mut daemon = Sleeper(daemon.spawn().expect("the daemon starts"));
    let began = Instant::now();
    while !socket.exists() {
        if daemon.0.try_wait().expect("a state").is_some() {
            println!("SKIPPED: no daemon can run here; pagefold doctor tells why");
            return;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "the daemon does not listen");
        std::thread::sleep(Duration::from_millis(20));
    }
    let program = "import mmap,hashlib,time\nm=mmap.mmap(-1,4096*2000,flags=mmap.MAP_PRIVATE|mmap.MAP_ANONYMOUS)\n\
                   for i in range(2000): m[i*4096:i*4096+32]=hashlib.sha256(b'%d' % i).digest()\ntime.sleep(600)";
    let client = || {
        let mut client = tool();
        client.args(["run", "--manage=all", "--socket"]).arg(&socket).args(["--", "python3", "-c", program]);
        Sleeper(client.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the client starts"))
    };
    let mut clients = [client(), client()];
    let pids: Vec<String> = clients.iter().map(Sleeper::pid).collect();
    let mut last = serde_json::Value::Null;
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(180) {
        if clients.iter_mut().any(|client| client.0.try_wait().expect("a state").is_some()) {
            println!("SKIPPED: no python3 here to be a client");
            return;
        }
        let output = scan(&[&pids[0], &pids[1], "--json"]);
        if output.status.success() {
            last = json(&output);
            let merged = last["totals"]["shared_by_pagefold"].as_u64().unwrap_or(0);
            let left = last["totals"]["duplicate_across"].as_u64().unwrap_or(u64::MAX);
            if merged >= 4000 && left < 500 {
                return;
            }
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    panic!("4000 merged pages are not seen as merged: {last}");
}

#[test]
fn a_sample_without_duplicates_reports_no_error_of_zero() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("alone");
    std::fs::write(&file, [7; 4096]).expect("a file");
    let shown = text(&scan(&["--sample", "1/16", &file.display().to_string()]).stdout);
    assert!(shown.contains("estimated from one content in 16.\n"), "{shown}");
}
