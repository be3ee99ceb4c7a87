//! Nothing that is merged is forgotten: a daemon that starts counts what programs share already, and shares it with others.
//! `PAGEFOLD_RESTARTS=N` sets the number of restarts. `PAGEFOLD_BEFORE=PATH` names a `pagefold` of another version: daemons
//! are then replaced by daemons of the other version, and agents of both are merged.

mod common;

use common::{Daemon, Random, Server, TOOL, can_merge, comes, events, semantics, tool_before, wait_for};
use serde_json::Value;
use std::time::{Duration, Instant};

/// Pages of one client.
const PAGES: i64 = 1 << 16;
/// How long a daemon may take to count everything.
const KNOWS_WITHIN: Duration = Duration::from_secs(5);

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
    wait_for("all to be merged", 120, || merged(daemon).0 >= pages);
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
    let mut daemon = Daemon::start_of(tool_before(), &[]);
    let mut clients: Vec<Server> = (0..2).map(|_| start_large(&daemon, program)).collect();
    wait_merged(&daemon, 2 * PAGES);
    // Some pages are written: they are the clients' own now, and their slots dead.
    clients.iter_mut().for_each(|client| _ = client.check("write"));
    // The daemon does not know of the writes at once: what lies in the pool the kernel tells.
    wait_for("all to be merged again", 120, || {
        let shown: usize = clients.iter_mut().map(|client| client.check("check")).sum();
        shown as i64 == 2 * PAGES && merged(&daemon).0 == 2 * PAGES
    });
    let before = merged(&daemon);
    daemon.tool_path = TOOL.into();
    daemon.replace();
    let took = wait_known(&daemon, before);
    println!("{before:?} known after {took:?}");
    assert!(took < KNOWS_WITHIN, "known after {took:?} only");
    assert_eq!(verified(&daemon), (before.0, before.0), "verify sees all");
    assert_eq!((events(&daemon.status(), "pages_merged"), events(&daemon.status(), "pages_compacted")), (0, 0));
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
