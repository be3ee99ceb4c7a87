//! Nothing that is merged is forgotten: a daemon that starts counts what programs share already, and shares it with others.
//!
//! `PAGEFOLD_RESTARTS=N` sets the number of restarts, `PAGEFOLD_CLIENTS=N` that of programs, 256 MiB each.
//! `PAGEFOLD_BEFORE=PATH` names a `pagefold` of another version: daemons are then replaced by daemons of the other version,
//! and agents of both are merged.

mod common;

use common::{
    Daemon, Random, Server, TOOL, can_merge, comes, events, executable, installed, is_root, semantics, tool_before,
    wait_for,
};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Pages of one client.
const PAGES: i64 = 1 << 16;
/// A user without privileges.
const NOBODY: u32 = 65534;
/// How long a daemon may take to count everything.
const KNOWS_WITHIN: Duration = Duration::from_secs(5);
/// And if that is more than a few programs show: 256 of them show 64 GiB.
const KNOWS_64_GIB_WITHIN: Duration = Duration::from_secs(30);

/// What the totals say of merged memory.
fn merged(daemon: &Daemon) -> (i64, i64, i64) {
    let totals = &daemon.status()["totals"];
    let number = |name: &str| totals[name].as_i64().unwrap_or_else(|| panic!("totals have no {name}"));
    (number("pages_sharing"), number("pages_shared"), number("deduplicated_bytes"))
}

/// What `verify` found: all pages, and those that show the frame of their slot.
fn verified(daemon: &Daemon) -> (i64, i64) {
    daemon.verify();
    let output = daemon.tool(&["verify", "--json"]);
    let found: Value = serde_json::from_slice(&output.stdout).expect("verify --json is JSON");
    let number = |name: &str| found[name].as_i64().unwrap_or_else(|| panic!("verify has no {name}: {found}"));
    (number("pages"), number("same_frame") + number("same_bytes"))
}

fn start_large(daemon: &Daemon, program: &std::path::Path) -> Server {
    Server::start_as("serve-large", daemon.run(&[]), program)
}

/// Waits until the daemon counts `pages` shared pages.
fn wait_merged(daemon: &Daemon, pages: i64) {
    let all = comes(120, || merged(daemon).0 >= pages);
    assert!(all, "not all is merged after two minutes: {}", String::from_utf8_lossy(&daemon.tool(&["status"]).stdout));
}

/// Waits until the new daemon counts the same as the last; returns how long that took.
fn wait_known(daemon: &Daemon, before: (i64, i64, i64)) -> Duration {
    let began = Instant::now();
    let mut after = (0, 0, 0);
    let known = comes(60, || {
        after = merged(daemon);
        after == before
    });
    assert!(known, "{before:?} before, {after:?} a minute after the restart");
    began.elapsed()
}

#[test]
fn the_next_daemon_counts_and_shares_what_is_merged() {
    let Some(program) = semantics().filter(|_| can_merge()) else { return };
    counts_and_shares(Daemon::start_of(tool_before(), &[]), TOOL.into(), program, 1);
}

/// A daemon without privileges may not open what a program maps: the agents hand it over. Each restart but the first is that
/// of a daemon that inherited.
#[test]
fn the_next_daemon_of_a_plain_user_counts_and_shares_too() {
    let Some(program) = semantics().filter(|_| is_root() && can_merge()) else { return };
    let needed = ["unshare", "setpriv"].map(installed);
    if needed.contains(&None) {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    std::os::unix::fs::chown(dir.path(), Some(NOBODY), Some(NOBODY)).expect("it is given away");
    // A private /dev/userfaultfd that all users may open. Programs, and the daemon, keep the number of the process.
    let tool = dir.path().join("pagefold");
    let script = format!(
        "#!/bin/sh
        [ \"$1\" = verify ] || [ \"$1\" = status ] && exec {TOOL} \"$@\"
        exec unshare --mount sh -c '
            mknod -m 666 {dir}/uffd-$$ c $(stat -c \"0x%t 0x%T\" /dev/userfaultfd)
            mount --bind {dir}/uffd-$$ /dev/userfaultfd
            exec setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups --no-new-privs {TOOL} \"$@\"' sh \"$@\"
        ",
        dir = dir.path().display()
    );
    executable::script(&script, &tool);
    counts_and_shares(Daemon::start_in(dir, tool.clone(), &[]), tool, program, 3);
}

/// Ends when the daemon, of another version at first, was replaced `restarts` times by one of `tool`.
fn counts_and_shares(mut daemon: Daemon, tool: PathBuf, program: &Path, restarts: u32) {
    let count = std::env::var("PAGEFOLD_CLIENTS").ok().and_then(|text| text.parse().ok()).unwrap_or(2i64);
    let mut clients: Vec<Server> = Vec::new();
    while clients.len() < count as usize {
        clients.push(start_large(&daemon, program));
        // More than a few at a time might be more than the machine's memory.
        if clients.len().is_multiple_of(8) || clients.len() == count as usize {
            wait_merged(&daemon, clients.len() as i64 * PAGES);
        }
    }
    // Some pages are written: they are the clients' own now, and their slots dead.
    clients.iter_mut().for_each(|client| _ = client.check("write"));
    // The daemon does not know of the writes at once: what lies in the pool the kernel tells.
    wait_for("all to be merged again", 120, || {
        let shown: usize = clients.iter_mut().map(|client| client.check("check")).sum();
        shown as i64 == count * PAGES && merged(&daemon).0 == count * PAGES
    });
    let before = merged(&daemon);
    daemon.tool_path = tool;
    for _ in 0..restarts {
        daemon.replace();
        let took = wait_known(&daemon, before);
        println!("{before:?} known after {took:?}");
        assert!(took < KNOWS_WITHIN.max(KNOWS_64_GIB_WITHIN * count as u32 / 256), "known after {took:?} only");
        assert_eq!(verified(&daemon), (before.0, before.0), "verify sees all");
        assert_eq!((events(&daemon.status(), "pages_merged"), events(&daemon.status(), "pages_compacted")), (0, 0));
    }
    // A program that comes now shares the same slots.
    clients.push(start_large(&daemon, program));
    wait_for("a new client to share", 60, || merged(&daemon).0 >= before.0 + PAGES * 95 / 100);
    let shared = merged(&daemon).1;
    assert!(shared - before.1 <= PAGES / 20, "{shared} slots, {} before: the new client shares others", before.1);
    clients.iter_mut().for_each(|client| assert!(client.check("check") as i64 >= PAGES * 95 / 100));
    daemon.verify();
    clients.clear();
    wait_for("the pool to become empty", 30, || {
        let totals = daemon.status()["totals"].clone();
        ["pages_sharing", "pool_bytes", "pool_orphaned_bytes"].iter().all(|name| totals[*name] == 0)
    });
}

/// Daemons are killed at any instant, of merging too, while clients write. The last one counts what the kernel shows.
#[test]
fn restarts_lose_no_page() {
    let Some(program) = semantics().filter(|_| can_merge()) else { return };
    let restarts = std::env::var("PAGEFOLD_RESTARTS").ok().and_then(|text| text.parse().ok()).unwrap_or(20u32);
    let mut random = Random::by_clock();
    let mut daemon = Daemon::start(&[]);
    let versions = [tool_before(), TOOL.into()];
    let mut clients = Vec::new();
    for at in 0..3 {
        daemon.tool_path = versions[at % 2].clone();
        clients.push(Server::start(daemon.run(&[]), program));
    }
    for _ in 0..restarts {
        std::thread::sleep(Duration::from_millis(random.below(1500)));
        clients.iter_mut().for_each(|client| _ = client.check(if random.below(2) == 0 { "write" } else { "check" }));
        daemon.tool_path = versions[random.below(2) as usize].clone();
        daemon.replace();
    }
    daemon.tool_path = TOOL.into();
    daemon.replace();
    wait_for("everything to be merged and known", 60, || {
        let shown: usize = clients.iter_mut().map(|client| client.check("check")).sum();
        shown > 3 * 8000 && merged(&daemon).0 == shown as i64
    });
    daemon.verify();
    clients.clear();
    wait_for("the pool to become empty", 30, || merged(&daemon) == (0, 0, 0));
}
