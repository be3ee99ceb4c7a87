//! Bare system calls on memory of attached programs that is being merged, as many and as fast as they come. Each program
//! knows all its bytes. Short here; for a night: `PAGEFOLD_DISCARDS=100000000`, `PAGEFOLD_FORKS=100000`,
//! `PAGEFOLD_MAPPINGS=100000000` and `PAGEFOLD_ATTACHMENTS=10000` set the counts.

#![cfg(target_arch = "x86_64")]

mod common;

use common::{Daemon, Random, Server, ask_until_done, wait_for};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The compiled program, once; `None` after saying what is missing.
fn program() -> Option<&'static Path> {
    static BUILT: OnceLock<Option<PathBuf>> = OnceLock::new();
    common::static_program(&BUILT, "torture")
}

/// How many of `name` there shall be.
fn count(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// A program that holds `pages` pages, the first ones as every other.
fn start(program: &Path, pages: u64) -> Server {
    Server::start_as(&pages.to_string(), Command::new("env"), program)
}

fn start_daemon() -> Daemon {
    Daemon::start(&["--no-keeper", "--scan-interval", "50ms", "--leftover", "private"])
}

/// Does `what` until it succeeds: on a busy machine no thread may be borrowed in time, or a page is pinned at that moment.
fn do_with(daemon: &Daemon, what: &str, server: &Server) {
    ask_until_done(|words| daemon.tool(words), &[what, &server.pid().to_string()]);
}

fn sharing(daemon: &Daemon, pid: i32) -> u64 {
    let status = daemon.status();
    let clients = status["clients"].as_array().into_iter().flatten();
    clients.filter(|client| client["pid"] == pid).filter_map(|client| client["stats"]["pages_sharing"].as_u64()).sum()
}

/// Two programs with equal memory, merged, make `calls` calls of a kind in parts; prints how many there were and what was
/// merged.
fn torture(word: &str, pages: u64, calls: u64) {
    let Some(program) = program() else { return };
    let daemon = start_daemon();
    let mut servers = [pages, pages].map(|pages| start(program, pages));
    for server in &servers {
        do_with(&daemon, "attach", server);
    }
    wait_for("pages to be shared", 120, || servers.iter().all(|server| sharing(&daemon, server.pid()) > pages / 2));
    let part = (calls / 2).clamp(1, 1_000_000);
    let mut made = 0;
    while made < calls {
        for server in &mut servers {
            made += server.check(&format!("{word} {part}")) as u64;
        }
    }
    servers.iter_mut().for_each(|server| _ = server.check("check 1"));
    daemon.verify();
    let merged = common::events(&daemon.status(), "pages_merged");
    println!("{word}: {made} calls, {merged} pages merged meanwhile, every byte right");
    assert!(merged > 0);
    for server in &mut servers {
        do_with(&daemon, "detach", server);
        server.check("check 1");
    }
}

#[test]
fn bare_discards_read_zeros() {
    torture("discard", 8192, count("PAGEFOLD_DISCARDS", 40_000));
}

#[test]
fn bare_forks_see_every_byte() {
    torture("fork", 4096, count("PAGEFOLD_FORKS", 200));
}

#[test]
fn mappings_that_come_and_go_lose_no_byte() {
    torture("map", 1024, count("PAGEFOLD_MAPPINGS", 200_000));
}

/// In, merged, compared, out again: each time nothing is left, and nothing was changed.
#[test]
fn programs_are_attached_merged_and_left_again() {
    let Some(program) = program() else { return };
    let daemon = start_daemon();
    let mut random = Random::by_clock();
    let mut servers = [1024; 4].map(|pages| start(program, pages));
    let maps = |server: &Server| std::fs::read_to_string(format!("/proc/{}/maps", server.pid())).expect("it lives");
    let is_agents = |line: &str| line.contains("pagefold") || line.contains("rwxp");
    let calls = count("PAGEFOLD_ATTACHMENTS", 8);
    let mut made = 0;
    while made < calls {
        servers.iter().for_each(|server| do_with(&daemon, "attach", server));
        if random.below(4) > 0 {
            wait_for("pages to be shared", 120, || servers.iter().all(|server| sharing(&daemon, server.pid()) > 0));
            daemon.verify();
        }
        for server in &mut servers {
            server.check(&format!("discard {}", 1 + random.below(50)));
            server.check("fork 1");
        }
        for server in &mut servers {
            do_with(&daemon, "detach", server);
            server.check("check 1");
            let threads = pagefold_os::procfs::threads(server.pid()).expect("it lives");
            assert_eq!(threads.len(), 1, "{threads:?}");
            let left: Vec<String> = maps(server).lines().filter(|line| is_agents(line)).map(str::to_owned).collect();
            assert!(left.is_empty(), "{left:?}");
            made += 1;
        }
    }
    println!("{made} attachments, every byte right");
}
