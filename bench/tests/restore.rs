//! A run that ends early, by a signal or by SIGKILL, leaves no file behind.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

fn names(dir: &Path) -> Vec<String> {
    fs::read_dir(dir).expect("a directory").flatten().map(|entry| entry.file_name().to_string_lossy().into()).collect()
}

/// A run under way that has files in its temporary directory.
fn started(dir: &Path) -> Child {
    let mut child = Command::new(env!("CARGO_BIN_EXE_pagefold-bench"))
        .args(["kv", "--tables", "shared", "--keys", "1000000", "--threads", "1", "--rounds", "1000"])
        .env("TMPDIR", dir)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("it starts");
    let own = dir.join(format!("pagefold-bench-{}", child.id()));
    while !own.is_dir() || names(&own).is_empty() {
        assert!(child.try_wait().expect("ours").is_none(), "it ended before it had a file");
        std::thread::sleep(Duration::from_millis(5));
    }
    child
}

fn end(dir: &Path, child: &mut Child, pid: i32, signal: i32) -> ExitStatus {
    // SAFETY: kill(2) takes no pointer; the process is our child, or a child that our child has not reaped yet.
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
    let status = child.wait().expect("ours");
    let left: Vec<String> = names(dir).into_iter().filter(|name| !name.ends_with(".lock")).collect();
    assert!(left.is_empty(), "{left:?}");
    status
}

#[test]
fn a_run_that_gets_a_signal_leaves_no_file() {
    for signal in [libc::SIGTERM, libc::SIGQUIT] {
        let dir = tempfile::tempdir().expect("a directory");
        let mut child = started(dir.path());
        let pid = child.id() as i32;
        let status = end(dir.path(), &mut child, pid, signal);
        assert_eq!((status.code(), status.signal()), (Some(128 + signal), None));
    }
}

#[test]
fn the_next_run_removes_the_files_of_a_run_with_a_killed_guard() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut child = started(dir.path());
    child.kill().expect("ours");
    child.wait().expect("ours");
    let left = |ending: &str| names(dir.path()).iter().any(|name| name.ends_with(ending));
    assert!(left(".before") && left(&format!("-{}", child.id())), "{:?}", names(dir.path()));
    let mut next = started(dir.path());
    assert!(!left(&format!("-{}", child.id())), "{:?}", names(dir.path()));
    let pid = next.id() as i32;
    end(dir.path(), &mut next, pid, libc::SIGTERM);
}

#[test]
fn a_run_that_is_killed_leaves_no_file() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut child = started(dir.path());
    let guarded = fs::read_to_string(format!("/proc/{0}/task/{0}/children", child.id())).expect("the guard's child");
    let guarded = guarded.trim().parse().expect("one child");
    let status = end(dir.path(), &mut child, guarded, libc::SIGKILL);
    assert_eq!((status.code(), status.signal()), (Some(1), None));
}

#[test]
fn no_process_outlives_a_killed_guard() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut child = started(dir.path());
    let child_of = |pid: u32| -> Option<u32> {
        let text = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
        text.split_whitespace().next()?.parse().ok()
    };
    let guarded = child_of(child.id()).expect("the guard's child");
    let worker = loop {
        match child_of(guarded) {
            Some(worker) => break worker,
            None => std::thread::sleep(Duration::from_millis(5)),
        }
        assert!(child.try_wait().expect("ours").is_none(), "it started no process");
    };
    // SAFETY: kill(2) takes no pointer; the run has not reaped this child yet.
    assert_eq!(unsafe { libc::kill(worker as i32, libc::SIGSTOP) }, 0);
    child.kill().expect("ours");
    child.wait().expect("ours");
    let runs = |pid: u32| fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| !line.is_empty());
    for _ in 0..12_000 {
        if !runs(guarded) && !runs(worker) {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    // SAFETY: kill(2) takes no pointer; the group is the run's.
    unsafe { libc::kill(-(guarded as i32), libc::SIGKILL) };
    panic!("a process goes on: {} {}", runs(guarded), runs(worker));
}
