//! A client that is merged live is parked, and comes back: its plain memory is the cold tier's meanwhile, what is merged
//! stays merged, and every page reads as last written.

mod common;

use common::cold::{COMMANDS, Host, Served, program};
use common::{Busy, Random, can_merge, may_run, wait_for};
use serde_json::Value;
use std::time::Duration;

/// Two clients with equal memory; the first has as much again without twins. Half of its memory merges, the rest can be
/// evicted.
const MIB: [u64; 2] = [16, 8];

fn live(host: &Host, pid: i32) -> Option<Value> {
    host.status()["clients"].as_array()?.iter().find(|client| client["pid"] == pid).cloned()
}

fn number(host: &Host, pid: i32, name: &str) -> u64 {
    live(host, pid).and_then(|client| client["stats"][name].as_u64()).unwrap_or(0)
}

fn wait_for_merging(host: &Host, pid: i32) {
    wait_for("pages to be merged", 60, || {
        live(host, pid).is_some_and(|client| client["stats"]["paused"] == false)
            && number(host, pid, "pages_sharing") > 50
    });
}

/// Waits until pages of it are merged and, it seems, no more will be: with two clients, three periods of each made no
/// difference.
fn merged_at_rest(host: &Host, pid: i32) {
    let periods = || host.status()["totals"]["full_scans"].as_u64().expect("a number");
    let mut last = (0, 0);
    wait_for("merging to come to rest", 300, || {
        let shared = number(host, pid, "pages_sharing");
        if shared != last.0 {
            last = (shared, periods());
        }
        shared > 0 && periods() >= last.1 + 6
    });
}

/// Evicts all memory of a client, more than `pages` pages. After an unmerge the agent may not be ready at first, and memory
/// with a recent discard is left alone for a moment.
fn park(host: &Host, pid: i32, pages: u64) {
    wait_for("the pages to go", 120, || {
        host.tool(&["park", &pid.to_string()]).status.success() && host.number(pid, "pages_out") > pages
    });
}

#[test]
fn a_merged_client_is_parked_and_comes_back() {
    if !can_merge() || program().is_none() {
        return;
    }
    let host = Host::start(&["--cold-policy=manual"]);
    let mut clients: Vec<Served> = MIB.iter().map(|mib| Served::start_live(&host, *mib)).collect();
    let pid = clients[0].pid();
    for command in COMMANDS {
        clients.iter().for_each(|client| wait_for_merging(&host, client.pid()));
        merged_at_rest(&host, pid);
        park(&host, pid, 100);
        let still = number(&host, pid, "pages_sharing");
        assert!(still > 0, "{command}: what is merged stays merged");
        // Not only where the first one was called.
        assert_eq!(may_run(pid, "pagefold-cold"), may_run(pid, "cold"));
        assert_eq!(live(&host, pid).expect("it is still one")["stats"]["paused"], true);
        host.verify();
        let now = number(&host, pid, "pages_sharing");
        assert!(now <= still, "{command}: {still} pages were merged when it was parked, {now} are");
        // What is out comes back under it, and the other one merges on meanwhile.
        clients.iter_mut().for_each(|client| client.does(command));
        let output = host.tool(&["unpark", &pid.to_string()]);
        assert!(output.status.success(), "unpark: {}", String::from_utf8_lossy(&output.stderr));
        wait_for("the tier to let it go", 20, || host.cold(pid).is_none());
        clients.iter_mut().for_each(|client| client.does("check"));
    }
    clients.iter().for_each(|client| wait_for_merging(&host, client.pid()));
    host.verify();
    // Parked and back while it works; at the end with pages out.
    clients[0].send("storm 4000");
    for _ in 0..15 {
        // Whether its agent is ready for it just now is not what is looked at.
        host.tool(&["park", &pid.to_string()]);
        std::thread::sleep(Duration::from_millis(30));
        host.tool(&["unpark", "--all"]);
    }
    clients[0].expect_right("storm");
    clients[0].does("check");
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("it lives");
    let tables = maps.lines().filter(|line| line.contains("pagefold-cold-table")).count();
    assert!(tables <= 1, "{tables} tables are mapped");
    wait_for("all to be parked", 120, || {
        host.tool(&["park", "--all"]).status.success() && clients.iter().all(|client| host.cold(client.pid()).is_some())
    });
    clients.iter_mut().for_each(|client| client.does("peek 100"));
    drop(clients);
    // A client is listed no more a moment before its last pages go.
    wait_for("everybody and all pages to be forgotten", 20, || {
        let status = host.status();
        let none = |list: &Value| list.as_array().is_some_and(Vec::is_empty);
        none(&status["clients"]) && none(&status["cold"]["clients"]) && status["cold"]["domains"][0]["pages"] == 0
    });
}

/// What makes one plain mapping of a range, part of it merged and part of it out, loses neither, nor what is written
/// meanwhile.
#[test]
fn gathering_a_parked_range_finds_all_of_it() {
    if !can_merge() || program().is_none() {
        return;
    }
    let host = Host::start(&["--cold-policy=manual"]);
    for (before, command) in [("block", "grow"), ("check", "wipe")] {
        let mut client = Served::start_live(&host, 16);
        let pid = client.pid();
        client.does(before);
        wait_for_merging(&host, pid);
        wait_for("much to be merged", 60, || number(&host, pid, "pages_sharing") > 500);
        park(&host, pid, 1000);
        client.does(command);
    }
}

#[test]
fn a_daemon_killed_during_a_loan_is_replaced_by_one_that_knows_it() {
    if !can_merge() || program().is_none() {
        return;
    }
    let mut host = Host::start(&["--cold-policy=manual"]);
    let mut clients: Vec<Served> = MIB.iter().map(|mib| Served::start_live(&host, *mib)).collect();
    let pid = clients[0].pid();
    for round in 0..4 {
        clients.iter().for_each(|client| wait_for_merging(&host, client.pid()));
        park(&host, pid, 100);
        if round % 2 == 0 {
            clients[0].send("storm 1500");
        }
        host.kill_daemon();
        host.wait();
        wait_for("both to be back", 30, || {
            host.cold(pid).is_some_and(|client| client["connected"] == true && client["parked"] == true)
                && live(&host, pid).is_some_and(|client| client["stats"]["paused"] == true)
        });
        if round % 2 == 0 {
            clients[0].expect_right("storm");
        }
        clients.iter_mut().for_each(|client| client.does("peek 200"));
        assert!(host.tool(&["unpark", &pid.to_string()]).status.success());
        wait_for("the tier to let it go", 20, || host.cold(pid).is_none());
        clients.iter_mut().for_each(|client| client.does("check"));
    }
    clients.iter().for_each(|client| wait_for_merging(&host, client.pid()));
    host.verify();
}

#[test]
fn a_daemon_that_stops_brings_everything_back() {
    if !can_merge() || program().is_none() {
        return;
    }
    let mut host = Host::start(&["--cold-policy=manual"]);
    let [mut client, mut twin] = MIB.map(|mib| Served::start_live(&host, mib));
    wait_for_merging(&host, client.pid());
    park(&host, client.pid(), 100);
    // SAFETY: a process that this test started.
    unsafe { libc::kill(host.pid(), libc::SIGTERM) };
    let _ = host.child.wait();
    client.does("check");
    host.child = common::cold::spawn(&host.socket, &["--cold-policy=manual"]);
    host.wait();
    [&client, &twin].iter().for_each(|client| wait_for_merging(&host, client.pid()));
    assert!(host.cold(client.pid()).is_none());
    client.does("write 100");
    twin.does("check");
    client.does("check");
}

/// The memory limit is half of what is evicted. After `unpark`, and when the daemon stops, pages beyond it stay evicted and
/// no process is killed.
#[test]
fn pages_beyond_a_memory_limit_stay_parked() {
    if !can_merge() || program().is_none() {
        return;
    }
    let Some(group) = common::group::Group::new() else { return };
    let mut host = Host::start(&["--cold-policy=manual"]);
    let mut command = std::process::Command::new(common::TOOL);
    command.args(["run", "--manage=all", "--socket"]).arg(&host.socket).arg("--").current_dir(host.dir.path());
    group.adopt(&mut command);
    let mut client = Served::start_by(command, 96);
    let pid = client.pid();
    wait_for("it to be merged", 60, || live(&host, pid).is_some_and(|client| client["stats"]["paused"] == false));
    park(&host, pid, 10_000);
    let all = host.number(pid, "pages_out");
    group.limit(all * 4096 / 2);
    for _ in 0..2 {
        let output = host.tool(&["unpark", &pid.to_string()]);
        assert!(output.status.success(), "unpark: {}", String::from_utf8_lossy(&output.stderr));
        let out = host.number(pid, "pages_out");
        assert!(out > 0 && out < all, "{out} of {all} are out");
    }
    // SAFETY: a process that this test started.
    unsafe { libc::kill(host.pid(), libc::SIGTERM) };
    let _ = host.child.wait();
    host.child = common::cold::spawn(&host.socket, &["--cold-policy=manual"]);
    host.wait();
    wait_for("it to be back", 60, || host.cold(pid).is_some_and(|client| client["connected"] == true));
    group.assert_nobody_was_killed();
    group.lift();
    client.does("check");
    wait_for("the tier to let it go", 60, || {
        host.tool(&["unpark", &pid.to_string()]);
        host.cold(pid).is_none()
    });
    client.does("check");
    wait_for("it to be merged again", 60, || live(&host, pid).is_some_and(|client| client["stats"]["paused"] == false));
    group.assert_nobody_was_killed();
}

/// `PAGEFOLD_KILLS=N` sets the number of turns, of which one in eight kills the daemon.
#[test]
fn in_any_order_every_byte_is_right() {
    if !can_merge() || program().is_none() {
        return;
    }
    let turns: u64 = std::env::var("PAGEFOLD_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(60);
    let mut random = Random::by_clock();
    const DAEMON: [&str; 3] = ["--cold-policy=manual", "--cold-scan-interval", "1s"];
    let mut host = Host::start(&DAEMON);
    let mut clients: Vec<Served> = MIB.iter().map(|mib| Served::start_live(&host, *mib)).collect();
    clients.iter().for_each(|client| wait_for_merging(&host, client.pid()));
    for _ in 0..turns {
        let client = &mut clients[random.below(2) as usize];
        let pid = client.pid().to_string();
        // Whether the daemon can just now is not what is looked at.
        match random.below(8) {
            0 | 1 => drop(host.tool(&["park", &pid])),
            2 => drop(host.tool(&["unpark", &pid])),
            3 => drop(host.tool(&[if random.below(2) == 0 { "park" } else { "unpark" }, "--all"])),
            4 => {
                let moving = host.tool_aside(if random.below(2) == 0 { "park" } else { "unpark" });
                std::thread::sleep(Duration::from_millis(random.below(40)));
                host.replace_daemon(&DAEMON);
                let _ = moving.wait_with_output();
            }
            5 => std::thread::sleep(Duration::from_millis(random.below(1500))),
            _ => {
                const SOME: [&str; 9] = [
                    "check",
                    "peek 300",
                    "write 300",
                    "discard 100",
                    "rawdiscard 50",
                    "guard 50",
                    "fork",
                    "storm 150",
                    "unmap",
                ];
                client.does(SOME[random.below(9) as usize]);
            }
        }
    }
    wait_for("everybody to be back", 60, || {
        let _ = host.tool(&["unpark", "--all"]);
        clients.iter().all(|client| {
            host.cold(client.pid()).is_none()
                && live(&host, client.pid()).is_some_and(|client| client["stats"]["paused"] == false)
        })
    });
    clients.iter_mut().for_each(|client| client.does("check"));
    host.verify();
}

/// A thread that discards by a bare system call acts a moment after the daemon heard of it, and on a busy machine a long
/// one.
#[test]
fn a_late_discard_still_reads_zero() {
    if !can_merge() || program().is_none() {
        return;
    }
    let rounds: u64 = std::env::var("PAGEFOLD_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(4);
    let host = Host::start(&["--cold-policy=manual"]);
    let mut client = Served::start_live(&host, 16);
    let pid = client.pid();
    wait_for("the client to be known", 20, || live(&host, pid).is_some());
    let _busy = Busy::start(6);
    for _ in 0..rounds {
        client.send("storm 1000");
        for _ in 0..4 {
            host.tool(&["park", "--all"]);
            std::thread::sleep(Duration::from_millis(30));
            host.tool(&["unpark", "--all"]);
        }
        client.expect_right("storm");
    }
    client.does("check");
}
