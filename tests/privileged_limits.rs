//! Limits: where pool, mappings or memory end there is less saving, and never an error in a client. And what
//! `run` and `status` say when something is missing.

mod common;

use common::{Daemon, Reaped, Server, TOOL, can_merge, events, finish, semantics, wait_for};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

/// The daemon's status after the client `serve` had time to be merged as far as the limits allow.
fn after_merging(daemon: &Daemon, reached: impl Fn(&serde_json::Value) -> bool) -> Option<serde_json::Value> {
    let program = semantics().filter(|_| can_merge())?;
    let mut command = daemon.run(&[]);
    command.arg(program).arg("serve").stdin(Stdio::piped()).stdout(Stdio::null());
    let mut client = Reaped(command.spawn().expect("a client"));
    let mut last = serde_json::Value::Null;
    wait_for("the limit to be reached", 60, || {
        last = daemon.status();
        reached(&last)
    });
    let human = daemon.tool(&["status"]);
    assert!(human.status.success());
    use std::io::Write;
    writeln!(client.0.stdin.take().expect("a pipe"), "check").expect("the client reads");
    assert!(client.0.wait().expect("it ends").success(), "the client failed at a limit");
    Some(last)
}

#[test]
fn a_full_pool_means_less_saving() {
    let daemon = Daemon::start(&["--pool-max", "8M"]);
    let Some(status) = after_merging(&daemon, |status| events(status, "over_pool_max") > 0) else { return };
    assert!(status["totals"]["pool_bytes"].as_u64() <= Some(8 << 20), "{status}");
}

#[test]
fn a_small_budget_of_mappings_means_less_saving() {
    let Some(program) = semantics().filter(|_| can_merge()) else { return };
    let daemon = Daemon::start(&["--vma-budget", "300"]);
    let (status, out, err) = finish(daemon.run(&[]).arg(program).arg("mappings"), 120);
    assert!(status.success(), "{status} {out}{err}");
    assert!(events(&daemon.status(), "over_vma_budget") > 0, "nothing was refused: {}", daemon.status());
    let said = String::from_utf8_lossy(&daemon.tool(&["status"]).stdout).into_owned();
    assert!(said.contains("budget of mappings"), "{said}");
}

#[test]
fn the_program_gets_its_own_mappings() {
    let Some(program) = semantics().filter(|_| can_merge()) else { return };
    let daemon = Daemon::start(&[]);
    let (status, out, err) = finish(daemon.run(&[]).arg(program).arg("mappings"), 120);
    assert!(status.success(), "{status} {out}{err}");
}

#[test]
fn a_limit_of_memory_means_no_failure() {
    let Some(program) = semantics().filter(|_| can_merge()) else { return };
    let Some(group) = common::group::Group::new() else { return };
    let daemon = Daemon::start(&["--period", "500ms"]);
    let mut command = daemon.run(&[]);
    group.adopt(&mut command);
    let mut client = Server::start(command, program);
    // Less than a copy of the pages that one batch looks at; the kernel itself takes a quarter of it in one go.
    group.limit(1 << 20);
    wait_for("pages to be merged at the limit", 60, || client.check("check") > 4000);
    assert!(client.end().success(), "the client failed at a limit of memory");
    group.assert_nobody_was_killed();
}

/// What is given back is as few mappings as it was before it was merged, not one for each step.
#[test]
fn unmerged_memory_is_one_mapping_again() {
    let Some(program) = semantics().filter(|_| can_merge()) else { return };
    let daemon = Daemon::start(&[]);
    let mut client = Server::start(daemon.run(&[]), program);
    let pid = client.pid().to_string();
    let mappings = || std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("maps").lines().count();
    let before = mappings();
    wait_for("pages to be merged", 60, || client.check("check") > 8000);
    assert!(daemon.tool(&["unmerge", &pid]).status.success());
    assert_eq!(client.check("check"), 0);
    let after = mappings();
    assert!(after < before + 20, "{before} mappings before, {after} after");
}

#[test]
fn run_passes_on_how_the_program_ended() {
    if !can_merge() {
        return;
    }
    let daemon = Daemon::start(&[]);
    for code in [0, 1, 42, 125] {
        let (status, ..) = finish(daemon.run(&[]).args(["sh", "-c", &format!("exit {code}")]), 30);
        assert_eq!(status.code(), Some(code));
    }
    for signal in [libc::SIGTERM, libc::SIGKILL, libc::SIGSEGV] {
        let (status, ..) = finish(daemon.run(&[]).args(["sh", "-c", &format!("ulimit -c 0; kill -{signal} $$")]), 30);
        assert_eq!(status.signal(), Some(signal));
    }
}

#[test]
fn what_cannot_be_run_is_said_in_one_line() {
    if !can_merge() {
        return;
    }
    let daemon = Daemon::start(&[]);
    let plain = daemon.dir.path().join("plain");
    std::fs::write(&plain, "no program").expect("a file");
    let dead = daemon.dir.path().join("dead");
    drop(std::os::unix::net::UnixListener::bind(&dead).expect("a socket"));
    let mut dead_status = Command::new(TOOL);
    dead_status.args(["status", "--socket"]).arg(&dead);
    let mut absent_status = Command::new(TOOL);
    absent_status.args(["status", "--socket"]).arg(daemon.dir.path().join("absent"));
    let mut bad_socket = Command::new(TOOL);
    bad_socket.args(["run", "--socket", "/proc/no/such/place", "--", "true"]);
    let mut bad_domain = daemon.run(&[]);
    bad_domain = {
        drop(bad_domain);
        let mut command = Command::new(TOOL);
        command.args(["run", "--domain", "", "--", "true"]);
        command
    };
    let mut missing = daemon.run(&[]);
    missing.arg("no-such-program-anywhere");
    let mut not_executable = daemon.run(&[]);
    not_executable.arg(&plain);
    let cases = [
        (&mut missing, 127, "no-such-program-anywhere"),
        (&mut not_executable, 126, "plain"),
        (&mut dead_status, 1, "no daemon listens"),
        (&mut absent_status, 1, "no daemon listens"),
        (&mut bad_socket, 125, "/proc/no/such/place"),
        (&mut bad_domain, 125, "domain"),
    ];
    for (command, code, word) in cases {
        let (status, out, err) = finish(command, 30);
        assert_eq!(status.code(), Some(code), "{command:?}: {out}{err}");
        assert!(err.contains(word) && err.trim_end().lines().count() == 1, "{command:?}: {err}");
    }
    let (status, _, err) = finish(Command::new(TOOL).args(["run", "--no-such-option", "--", "true"]), 30);
    assert_eq!(status.code(), Some(2));
    assert!(err.contains("--no-such-option"), "{err}");
}
