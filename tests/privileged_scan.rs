//! `pagefold scan` between users, and of all processes. Needs root to become another user, and to make a PID
//! namespace in which "all processes" are this test's own.

#[path = "common/executable.rs"]
mod executable;

use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// The unprivileged user and group of Linux distributions.
const NOBODY: u32 = 65534;

fn is_root() -> bool {
    let root = std::fs::metadata("/proc/self").is_ok_and(|meta| std::os::unix::fs::MetadataExt::uid(&meta) == 0);
    if !root {
        println!("SKIPPED: needs root to become another user");
    }
    root
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("the tool writes UTF-8")
}

struct Sleeper(Child);

impl Sleeper {
    fn start(uid: u32) -> Sleeper {
        let spawned = Command::new("sleep").arg("600").stdout(Stdio::null()).uid(uid).gid(uid).spawn();
        let sleeper = Sleeper(spawned.expect("sleep"));
        // Before it sleeps it may not have the memory yet that it will have.
        let (began, stat) = (Instant::now(), format!("/proc/{}/stat", sleeper.0.id()));
        while !std::fs::read_to_string(&stat).is_ok_and(|stat| stat.contains("(sleep) S ")) {
            assert!(began.elapsed() < Duration::from_secs(60), "it does not sleep");
            std::thread::sleep(Duration::from_millis(1));
        }
        sleeper
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A copy of the tool where everybody may run it.
fn tool() -> (tempfile::TempDir, std::path::PathBuf) {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().expect("a directory");
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).expect("permissions");
    let path = dir.path().join("pagefold");
    executable::copy(std::path::Path::new(env!("CARGO_BIN_EXE_pagefold")), &path);
    (dir, path)
}

fn as_nobody(tool: &std::path::Path, args: &[&str]) -> Output {
    Command::new(tool).arg("scan").args(args).uid(NOBODY).gid(NOBODY).current_dir("/").output().expect("the tool runs")
}

#[test]
fn another_users_process_is_refused_in_one_line() {
    if !is_root() {
        return;
    }
    let (_dir, tool) = tool();
    let roots = Sleeper::start(0);
    let output = as_nobody(&tool, &[&roots.0.id().to_string()]);
    assert_eq!(output.status.code(), Some(1));
    let errors = text(&output.stderr);
    assert!(
        errors.contains("(sleep): may not be read")
            && errors.contains("run as its owner, or as root with CAP_SYS_PTRACE"),
        "{errors}"
    );
    assert_eq!(errors.lines().count(), 1, "{errors}");
}

#[test]
fn all_scans_every_readable_process() {
    if !is_root() {
        return;
    }
    let (_dir, tool) = tool();
    let (own, _roots) = (Sleeper::start(NOBODY), Sleeper::start(0));
    let output = as_nobody(&tool, &["--all", "--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let sources = report["sources"].as_array().expect("sources");
    assert!(sources.iter().any(|source| source["pid"] == own.0.id()), "{sources:?}");
    assert!(sources.iter().all(|source| source["domain"] == NOBODY), "{sources:?}");
    let notes = report["notes"].to_string();
    assert!(notes.contains("may not be read; run as root with CAP_SYS_PTRACE to see them"), "{notes}");
}

#[test]
fn processes_that_ended_or_have_no_memory_are_reported_in_one_line() {
    if !is_root() {
        return;
    }
    let mut ended = Command::new("true").spawn().expect("true");
    // Not waited for yet: it stays, without memory.
    let zombie =
        || std::fs::read_to_string(format!("/proc/{}/stat", ended.id())).is_ok_and(|stat| stat.contains(") Z "));
    while !zombie() {
        std::thread::yield_now();
    }
    let scan = |pid: u32| {
        let output = Command::new(env!("CARGO_BIN_EXE_pagefold")).args(["scan", &pid.to_string()]).output();
        text(&output.expect("the tool runs").stderr)
    };
    let said = scan(ended.id());
    ended.wait().expect("it ended");
    assert!(said.contains("(true): ended during the scan") && said.lines().count() == 1, "{said}");
    if !std::fs::read_to_string("/proc/2/comm").is_ok_and(|name| name == "kthreadd\n") {
        println!("SKIPPED: no kernel threads are seen here");
        return;
    }
    let said = scan(2);
    assert!(said.contains("(kthreadd): has no memory") && said.lines().count() == 1, "{said}");
}

#[test]
fn all_finds_every_process_of_a_namespace() {
    if !is_root() {
        return;
    }
    let script = format!(
        "sleep 600 & a=$!; sleep 600 & b=$!; while grep -qx sh /proc/$a/comm /proc/$b/comm; do sleep 0.05; done; {} scan --all --json; s=$?; kill $a $b; exit $s",
        env!("CARGO_BIN_EXE_pagefold")
    );
    let output = Command::new("unshare")
        .args(["--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", &script])
        .output()
        .expect("unshare");
    if output.stdout.is_empty() && text(&output.stderr).contains("unshare") {
        println!("SKIPPED: no PID namespace here: {}", text(&output.stderr));
        return;
    }
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let names: Vec<&str> =
        report["sources"].as_array().expect("sources").iter().filter_map(|source| source["name"].as_str()).collect();
    assert_eq!(names.iter().filter(|name| **name == "sleep").count(), 2, "{names:?}");
    assert!(names.contains(&"sh") && !names.contains(&"pagefold"), "{names:?}");
}
