//! Limits: where pool, mappings or memory end there is less saving, and never an error in a client. And what
//! `run` and `status` say when something is missing.

mod common;

use common::{Daemon, Reaped, Server, TOOL, can_merge, events, finish, semantics, skipped, wait_for};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
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
    let Some(status) = after_merging(&daemon, |status| events(status, "pool_full_pages") > 0) else { return };
    assert!(status["totals"]["pool_bytes"].as_u64() <= Some(8 << 20), "{status}");
}

#[test]
fn a_small_budget_of_mappings_means_less_saving() {
    let Some(program) = semantics().filter(|_| can_merge()) else { return };
    let daemon = Daemon::start(&["--vma-budget", "300"]);
    let (status, out, err) = finish(daemon.run(&[]).arg(program).arg("mappings"), 400);
    assert!(status.success(), "{status} {out}{err}");
    assert!(events(&daemon.status(), "over_vma_budget_runs") > 0, "nothing was refused: {}", daemon.status());
    let said = String::from_utf8_lossy(&daemon.tool(&["status"]).stdout).into_owned();
    assert!(said.contains("budget of mappings"), "{said}");
}

#[test]
fn the_program_gets_its_own_mappings() {
    let Some(program) = semantics().filter(|_| can_merge()) else { return };
    let daemon = Daemon::start(&[]);
    let (status, out, err) = finish(daemon.run(&[]).arg(program).arg("mappings"), 400);
    assert!(status.success(), "{status} {out}{err}");
}

#[test]
fn a_limit_of_memory_means_no_failure() {
    let Some(program) = semantics().filter(|_| can_merge()) else { return };
    let Some(group) = common::group::Group::new() else { return };
    let daemon = Daemon::start(&["--scan-interval", "500ms"]);
    let mut command = daemon.run(&[]);
    group.adopt(&mut command);
    let mut client = Server::start(command, program);
    // Less than a copy of the pages that one batch looks at; the kernel itself takes a quarter of it in one go.
    group.limit(1 << 20);
    wait_for("pages to be merged at the limit", 60, || client.check("check") > 4000);
    assert!(client.end().success(), "the client failed at a limit of memory");
    group.assert_nobody_was_killed();
}

/// The kernel kills a daemon beyond its limit; a pool that stops growing in time only saves less.
#[test]
fn a_daemon_at_its_limit_of_memory_merges_less() {
    let Some(program) = semantics().filter(|_| can_merge()) else { return };
    let Some(group) = common::group::Group::new() else { return };
    let daemon = Daemon::start(&["--scan-interval", "100ms"]);
    group.take(daemon.pid());
    // What it keeps of clients fits, and the 16 MiB of theirs do not.
    group.limit(12 << 20);
    let mut client = Server::start(daemon.run(&[]), program);
    wait_for("the pool to find no room", 60, || events(&daemon.status(), "segment_alloc_failed_pages") > 0);
    assert!(client.check("check") < 8000);
    group.assert_nobody_was_killed();
    group.lift();
    wait_for("pages to be merged", 120, || client.check("check") > 8000);
    assert!(client.end().success());
}

/// A client costs the daemon memory: without memory a new client is not covered, until there is some.
#[test]
fn a_daemon_at_its_memory_limit_accepts_no_more_clients() {
    let Some(program) = semantics().filter(|_| can_merge()) else { return };
    let Some(group) = common::group::Group::new() else { return };
    let daemon = Daemon::start(&["--scan-interval", "100ms"]);
    group.take(daemon.pid());
    group.limit(4 << 20);
    let mut clients: Vec<Server> = (0..60).map(|_| Server::start(daemon.run(&[]), program)).collect();
    let unmanaged_processes = || {
        let status = daemon.status();
        let list = status["unmanaged_processes"].as_array().expect("a list");
        list.iter().filter(|one| one["reason"].as_str().is_some_and(|reason| reason.contains("MemoryMax="))).count()
    };
    wait_for("clients not to be covered", 60, || unmanaged_processes() > 0);
    group.assert_nobody_was_killed();
    group.lift();
    wait_for("all to be covered", 120, || unmanaged_processes() == 0);
    for client in &mut clients {
        client.check("check");
    }
    clients.into_iter().for_each(|client| assert!(client.end().success()));
}

/// A daemon without descriptors gives that reason for each client that it does not cover, and covers it once it has some.
#[test]
fn a_limit_of_descriptors_is_named() {
    let Some(program) = semantics().filter(|_| can_merge()) else { return };
    let daemon = Daemon::start(&["--scan-interval", "500ms"]);
    let limit = |most: u64| {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: writes one limit.
        let got = unsafe { libc::prlimit(daemon.pid(), libc::RLIMIT_NOFILE, core::ptr::null(), &raw mut limit) };
        limit.rlim_cur = most;
        // SAFETY: reads one limit, writes none.
        let set = unsafe { libc::prlimit(daemon.pid(), libc::RLIMIT_NOFILE, &raw const limit, core::ptr::null_mut()) };
        assert_eq!((got, set), (0, 0), "prlimit: {}", std::io::Error::last_os_error());
    };
    let taken = || -> Vec<u64> {
        let fds = std::fs::read_dir(format!("/proc/{}/fd", daemon.pid())).expect("the daemon's").flatten();
        fds.filter_map(|fd| fd.file_name().to_str()?.parse().ok()).collect()
    };
    // The connection that checked whether the daemon listens is closed.
    wait_for("the daemon to rest", 20, || {
        let before = taken();
        std::thread::sleep(std::time::Duration::from_millis(300));
        before == taken()
    });
    let taken = taken();
    // Room for a connection, and not for what comes by it.
    limit((0..).filter(|number| !taken.contains(number)).nth(1).unwrap_or(0));
    let client = Server::start(daemon.run(&[]), program);
    let why = |daemon: &Daemon| {
        // The status request needs the one descriptor too.
        let output = daemon.tool(&["status", "--json"]);
        let status: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        status["unmanaged_processes"]
            .as_array()
            .map(|list| list.iter().map(|one| one["reason"].to_string()).collect::<String>())
    };
    wait_for("the reason", 120, || why(&daemon).is_some_and(|why| why.contains("LimitNOFILE")));
    limit(1 << 10);
    wait_for("the client to be covered", 120, || why(&daemon).is_some_and(|why| why.is_empty()));
    assert!(client.end().success());
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

/// What a device may be reading into cannot be given back, and is not said to be.
#[test]
fn unmerge_fails_where_memory_stays_shared() {
    let Some(program) = semantics().filter(|_| can_merge()) else { return };
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    std::fs::write(dir.path().join("disk"), [0; 4096]).expect("a file");
    let direct = std::fs::File::options().read(true).custom_flags(libc::O_DIRECT).open(dir.path().join("disk"));
    let Ok(direct) = direct else { return skipped("no O_DIRECT here") };
    let daemon = Daemon::start(&[]);
    let mut command = daemon.run(&[]);
    // SAFETY: one system call; the descriptor that it makes is the program's.
    unsafe {
        command.pre_exec(move || match libc::dup(direct.as_raw_fd()) {
            -1 => Err(std::io::Error::last_os_error()),
            _ => Ok(()),
        })
    };
    let mut client = Server::start(command, program);
    wait_for("pages to be merged", 60, || client.check("check") > 8000);
    let pid = client.pid().to_string();
    let output = daemon.tool(&["unmerge", &pid]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && errors.contains("O_DIRECT"), "{:?}: {errors}", output.status);
    let output = daemon.tool(&["unmerge", "--json", &pid]);
    let told: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert!(told["count"] == 0 && told["left"].as_u64() > Some(8000), "{told}");
    assert!(client.check("check") > 8000);
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
fn a_program_that_cannot_run_is_reported_in_one_line() {
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
    // KSM has no domains.
    let mut no_wall = Command::new(TOOL);
    no_wall.args(["run", "--backend", "ksm", "--domain", "mine", "--", "true"]);
    let file = daemon.dir.path().join("notes");
    std::fs::write(&file, "notes").expect("a file");
    let mut no_socket = Command::new(TOOL);
    no_socket.args(["run", "--socket"]).arg(&file).args(["--", "true"]);
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
        (&mut no_wall, 125, "--domain needs the agent"),
        (&mut no_socket, 125, "is no daemon's socket"),
    ];
    for (command, code, word) in cases {
        let (status, out, err) = finish(command, 30);
        assert_eq!(status.code(), Some(code), "{command:?}: {out}{err}");
        assert!(err.contains(word) && err.trim_end().lines().count() == 1, "{command:?}: {err}");
    }
    assert_eq!(std::fs::read_to_string(&file).expect("the file"), "notes");
    let (status, _, err) = finish(Command::new(TOOL).args(["run", "--no-such-option", "--", "true"]), 30);
    assert_eq!(status.code(), Some(125));
    assert!(err.contains("--no-such-option"), "{err}");
}

/// The program has no child that it did not start, and the daemon keeps none of its descriptors open.
#[test]
fn a_daemon_started_by_run_is_independent() {
    if !can_merge() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let socket = dir.path().join("s");
    let mut shell = Command::new("sh");
    shell.arg("-c").arg("exec 9>\"$1\"; exec \"$2\" run --socket \"$3\" -- sleep 60").arg("sh");
    shell.arg(dir.path().join("lock")).arg(TOOL).arg(&socket);
    let program = Reaped(shell.spawn().expect("a shell"));
    let mut daemon = 0;
    wait_for("a daemon", 20, || {
        let status = Command::new(TOOL).args(["status", "--json", "--socket"]).arg(&socket).output().expect("the tool");
        daemon = serde_json::from_slice(&status.stdout)
            .map_or(0, |status: serde_json::Value| status["pid"].as_i64().unwrap_or(0) as i32);
        daemon > 0
    });
    let stat = std::fs::read(format!("/proc/{daemon}/stat")).expect("the daemon's");
    let parent = pagefold_os::stat::field(&stat, 4).map(str::to_owned);
    let holds = std::fs::read_dir(format!("/proc/{daemon}/fd")).expect("the daemon's").flatten();
    let held = holds.filter_map(|fd| std::fs::read_link(fd.path()).ok()).any(|file| file.ends_with("lock"));
    // SAFETY: a process that this test started.
    unsafe { libc::kill(daemon, libc::SIGTERM) };
    assert_ne!(parent, Some(program.pid().to_string()), "the daemon is the program's child");
    assert!(!held, "the daemon has the program's file open");
}
