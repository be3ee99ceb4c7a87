//! A daemon is ended, or replaced by another, by one command: it says what becomes of memory, and every byte stays right.

mod common;

use common::cold::{Host, Served};
use common::{TOOL, can_merge, comes, wait_for};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, Stdio};

const MIB: u64 = 32;

/// Two clients that share their memory, and a client with cold memory. Returns them and the number of cold pages.
fn clients(host: &Host) -> (Vec<Served>, u64) {
    let mut clients: Vec<Served> = (0..2).map(|_| Served::start_live(host, MIB)).collect();
    clients.push(Served::start(host, &[], MIB));
    // Most pages of the two are equal; a page that is not waits for no twin.
    let wanted = 2 * MIB * 256 / 2;
    wait_for("the two to be merged", 60, || host.status()["totals"]["pages_sharing"].as_u64() >= Some(wanted));
    let out = host.park(clients[2].pid());
    assert!(out > 0, "nothing is cold");
    (clients, out)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn stop_returns_cold_memory_and_ends_daemon_and_keeper() {
    if common::cold::program().is_none() || !can_merge() {
        return;
    }
    let mut host = Host::start(&[]);
    let (mut clients, out) = clients(&host);
    let sharing = host.status()["totals"]["pages_sharing"].as_u64().expect("a number");
    let (daemon, keeper) = (host.pid(), host.keeper_pid().expect("a keeper"));
    let stopped = host.tool(&["stop", "--json"]);
    assert!(stopped.status.success(), "{}", text(&stopped.stderr));
    let said: Value = serde_json::from_slice(&stopped.stdout).expect("stop --json is JSON");
    let number = |name: &str| said[name].as_u64().unwrap_or_else(|| panic!("no {name} in {said}"));
    assert_eq!(number("pid"), daemon as u64);
    assert_eq!((number("merged_clients"), number("cold_clients"), number("cold_clients_left")), (2, 1, 0));
    assert_eq!(number("cold_bytes"), out * 4096);
    assert!(number("merged_bytes") >= sharing * 4096 * 9 / 10, "{said}, {sharing} pages shared before");
    // Its process has ended, by itself, and the keeper with it; nothing is left of their sockets.
    assert!(host.child.try_wait().expect("it is ours").is_some_and(|status| status.success()), "it still runs");
    assert!(comes(30, || !std::path::Path::new(&format!("/proc/{keeper}/exe")).exists()), "the keeper {keeper} lives");
    assert!(!host.socket.exists() && host.keeper_pid().is_none());
    // Without a daemon: merged pages, and those that were cold.
    clients.iter_mut().for_each(|client| client.does("check"));
    clients.iter_mut().for_each(|client| client.does("write 500"));
    clients.iter_mut().for_each(|client| client.does("check"));
    let again = host.tool(&["stop"]);
    let said = format!("pagefold: no daemon listens at {}: nothing to stop\n", host.socket.display());
    assert_eq!((again.status.code(), text(&again.stderr)), (Some(1), said));
}

#[test]
fn a_daemon_that_replaces_another_keeps_merged_and_cold_memory() {
    if common::cold::program().is_none() || !can_merge() {
        return;
    }
    let mut host = Host::start(&[]);
    let (mut clients, out) = clients(&host);
    let before = host.status()["totals"]["pages_sharing"].as_u64().expect("a number");
    let (first, keeper, cold) = (host.pid(), host.keeper_pid(), clients[2].pid());
    let daemon = || {
        let mut command = Command::new(TOOL);
        command.args(["daemon", "--priority=normal", "--web", "127.0.0.1:0", "--socket"]).arg(&host.socket);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        command
    };
    // Beside a running daemon it says what to do, and changes nothing.
    let (at, refused) = (host.socket.display(), daemon().output().expect("the tool runs"));
    let said = format!(
        "pagefold: a daemon listens at {at} already; this command with --replace takes its place, pagefold stop --socket {at} \
         ends it; clients keep merged pages\n"
    );
    assert_eq!((refused.status.code(), text(&refused.stderr)), (Some(1), said));
    assert_eq!(host.pid(), first);

    let mut second = daemon().arg("--replace").spawn().expect("the daemon starts");
    let mut said = BufReader::new(second.stderr.take().expect("a pipe"));
    let mut lines = Vec::new();
    while !lines.last().is_some_and(|line: &String| line.starts_with("pagefold: page at ")) {
        let mut line = String::new();
        assert_ne!(said.read_line(&mut line).expect("a line"), 0, "it ended: {lines:?}");
        lines.push(line.trim_end().to_owned());
    }
    std::thread::spawn(move || drop(said.read_to_end(&mut Vec::new())));
    assert_eq!(lines[0], format!("pagefold: takes the place of daemon {first}"), "{lines:?}");
    assert!(lines[1].ends_with(" of 2 clients stay merged; a write still copies the page"), "{lines:?}");
    assert!(lines[2].ends_with(" of cold memory of 1 client stay with the keeper meanwhile"), "{lines:?}");
    assert_eq!(lines[3], format!("pagefold: daemon {} listens at {}", second.id(), host.socket.display()));
    let page = lines[4].strip_prefix("pagefold: page at http://").and_then(|rest| rest.strip_suffix('/'));
    let mut stream = std::net::TcpStream::connect(page.expect("an address")).expect("the page is served");
    stream.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").expect("it reads");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("it answers");
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");

    let mut old = std::mem::replace(&mut host.child, second);
    assert!(old.wait().expect("it is ours").success());
    assert_eq!((host.pid(), host.keeper_pid()), (host.child.id() as i32, keeper));
    wait_for("the new daemon to count merged pages", 60, || {
        host.status()["totals"]["pages_sharing"].as_u64() >= Some(before * 95 / 100)
    });
    host.wait_for_client(cold);
    assert_eq!(host.number(cold, "pages_out"), out, "cold pages stay cold");
    clients.iter_mut().for_each(|client| client.does("check"));
    host.verify();

    let stopped = host.tool(&["stop"]);
    let said = text(&stopped.stdout);
    assert!(stopped.status.success(), "{said}{}", text(&stopped.stderr));
    let said: Vec<&str> = said.lines().collect();
    assert_eq!(said[0], format!("daemon {} at {}", host.child.id(), host.socket.display()));
    assert!(said[1].ends_with(" of 2 clients stay merged; a write still copies the page"), "{said:?}");
    assert!(said.last().is_some_and(|line| line.starts_with("stopped in ")), "{said:?}");
    clients.iter_mut().for_each(|client| client.does("check"));
}

/// A replacing daemon that cannot start leaves the work to the keeper, which starts a daemon with cold memory to serve.
#[test]
fn a_replacement_that_dies_leaves_cold_clients_served() {
    if common::cold::program().is_none() {
        return;
    }
    let host = Host::start(&[]);
    let mut client = Served::start(&host, &[], MIB);
    assert!(host.park(client.pid()) > 0);
    let first = host.pid();
    // With so few descriptors it can stop the first daemon, and cannot take over what that left with the keeper.
    let script = format!("ulimit -n 14; exec {TOOL} daemon --replace --socket {}", host.socket.display());
    let output =
        Command::new("timeout").args(["-s", "KILL", "5", "bash", "-c", &script]).output().expect("timeout runs");
    println!("{}", text(&output.stderr));
    host.wait();
    assert_ne!(host.pid(), first);
    client.does("check");
}
