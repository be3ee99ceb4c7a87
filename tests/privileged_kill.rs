//! Daemons and clients are killed at random instants: the others continue with every byte right, and nothing is left over.
//! `PAGEFOLD_KILLS=N` sets the number of rounds.

mod common;

use common::group::Group;
use common::{Daemon, Random, Server, can_merge, events, may_run, semantics, skipped, wait_for};
use pagefold_os::sched::Cpus;
use std::time::Duration;

/// Descriptors of pool segments that the process has open.
fn pool_descriptors(pid: i32) -> usize {
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let targets = entries.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    targets.filter(|target| target.to_string_lossy().contains("pagefold-pool")).count()
}

/// Pages that the daemon has merged so far.
fn pages_merged(daemon: &Daemon) -> u64 {
    events(&daemon.status(), "pages_merged")
}

#[test]
fn killed_daemons_and_clients_leave_the_others_running() {
    let Some(program) = semantics().filter(|_| can_merge()) else { return };
    let rounds = std::env::var("PAGEFOLD_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(24u32);
    let seed = u64::from(std::process::id()) | 1;
    println!("seed {seed}");
    let mut random = Random::new(seed);
    let mut daemon = Daemon::start(&[]);
    let mut servers: Vec<Server> = (0..3).map(|_| Server::start(daemon.run(&[]), program)).collect();
    for round in 0..rounds {
        std::thread::sleep(Duration::from_millis(random.below(500)));
        let what = random.below(3);
        if what != 1 {
            daemon.kill();
        }
        if what != 0 {
            let victim = random.below(3) as usize;
            servers.remove(victim);
        }
        for server in &mut servers {
            server.check(if random.below(2) == 0 { "check" } else { "write" });
        }
        if what != 1 {
            daemon.replace();
        }
        while servers.len() < 3 {
            servers.push(Server::start(daemon.run(&[]), program));
        }
        for server in &mut servers {
            server.check("write");
        }
        assert!(daemon.is_alive(), "round {round}: the daemon died by itself");
    }
    // The last daemon knows all, and merging goes on with it.
    wait_for("all clients to greet the last daemon", 30, || {
        daemon.status()["clients"].as_array().is_some_and(|clients| clients.len() == 3)
    });
    servers.push(Server::start(daemon.run(&[]), program));
    let new = servers.len() - 1;
    wait_for("a new client to be merged", 60, || servers[new].check("check") > 3000);
    daemon.verify();
    // Without clients the daemon releases all segments.
    servers.clear();
    wait_for("the daemon to forget its clients", 30, || {
        daemon.status()["clients"].as_array().is_some_and(Vec::is_empty)
    });
    wait_for("the pool to become empty", 30, || {
        daemon.total("pages_sharing") == 0 && pool_descriptors(daemon.pid()) <= 2
    });
}

/// Clients that map a pool keep its memory alive after the daemon: it is freed with the last of them, whichever is killed
/// when.
#[test]
fn a_daemon_that_is_killed_while_it_merges_loses_nothing_and_leaves_nothing() {
    let Some(program) = semantics().filter(|_| can_merge()) else { return };
    let group = Group::new();
    let rounds = std::env::var("PAGEFOLD_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(24u32);
    let mut random = Random::by_clock();
    let mut daemon = Daemon::start(&[]);
    let start = |daemon: &Daemon| {
        let mut command = daemon.run(&[]);
        group.iter().for_each(|group| group.adopt(&mut command));
        Server::start_as("restless", command, program)
    };
    let take = |daemon: &Daemon| group.iter().for_each(|group| group.take(daemon.pid()));
    take(&daemon);
    let mut clients: Vec<Server> = (0..3).map(|_| start(&daemon)).collect();
    let (mut merged, mut merging) = (0, 0);
    for _ in 0..rounds {
        // Agents look for a daemon twice a second; then it takes half a second until the first pages are merged.
        std::thread::sleep(Duration::from_millis(random.below(1600)));
        let events = pages_merged(&daemon);
        merged += u64::from(events > 0);
        daemon.kill();
        if random.below(4) == 0 {
            clients.remove(random.below(3) as usize);
        }
        std::thread::sleep(Duration::from_millis(random.below(200)));
        for client in &mut clients {
            merging += client.check(if random.below(2) == 0 { "check" } else { "fork" });
        }
        daemon.replace();
        take(&daemon);
        while clients.len() < 3 {
            clients.push(start(&daemon));
        }
    }
    assert!(merged > 0 && merging > 0, "no daemon was killed that had merged anything");
    println!("{merged} of {rounds} daemons had merged something, {merging} pages were shared without one");
    wait_for("the last daemon to have everybody in its books", 60, || {
        clients.iter_mut().for_each(|client| _ = client.check("check"));
        daemon.total("pages_sharing") > 3 * 2000
    });
    daemon.verify();
    clients.clear();
    wait_for("the daemon to let go of all", 30, || {
        daemon.total("pages_sharing") == 0 && pool_descriptors(daemon.pid()) <= 2
    });
    daemon.kill();
    if let Some(group) = group {
        wait_for("the pools of all daemons to be gone", 30, || group.shmem() == 0);
    }
}

#[test]
fn the_next_daemon_takes_over_merged_pages() {
    let Some(program) = semantics().filter(|_| can_merge()) else { return };
    let mut daemon = Daemon::start(&[]);
    let mut servers: Vec<Server> = (0..2).map(|_| Server::start(daemon.run(&[]), program)).collect();
    for server in &mut servers {
        wait_for("pages to be merged", 60, || server.check("check") > 7500);
    }
    daemon.replace();
    // What is merged stays so when the daemon changes.
    servers.iter_mut().for_each(|server| assert!(server.check("check") > 0));
    wait_for("the next daemon to have them in its books", 20, || daemon.total("pages_sharing") > 14_000);
    assert_eq!(
        events(&daemon.status(), "pages_compacted"),
        0,
        "they were moved, although their segments can be taken in"
    );
    daemon.verify();
}

/// The agent runs where a worker of the daemon asks it, for as long as that one asks.
#[test]
fn without_a_daemon_the_agent_runs_anywhere() {
    let Some(program) = semantics().filter(|_| can_merge()) else { return };
    let mut daemon = Daemon::start(&[]);
    let mut server = Server::start(daemon.run(&[]), program);
    let Some((_, false)) = may_run(server.pid(), "semantics") else { return skipped("one processor only") };
    for _ in 0..2 {
        server.check("check");
        let follows = || may_run(server.pid(), "pagefold-agent").is_some_and(|(_, is_one)| is_one);
        wait_for("the agent to follow", 60, follows);
        daemon.kill();
        wait_for("the agent to run anywhere", 60, || !follows());
        assert_eq!(may_run(server.pid(), "pagefold-agent"), may_run(server.pid(), "semantics"));
        daemon.replace();
    }
}

/// A worker binds itself to one processor for a step only; otherwise the operator sets its processors, at any time.
#[test]
fn a_daemon_that_is_bound_to_a_processor_stays_there() {
    let Some(program) = semantics().filter(|_| can_merge()) else { return };
    let daemon = Daemon::start(&["--no-keeper"]);
    let mut server = Server::start(daemon.run(&[]), program);
    let Some((_, false)) = may_run(server.pid(), "semantics") else { return skipped("one processor only") };
    let first = Cpus::of_thread().expect("a set").iter().next().expect("a processor");
    let one = Cpus::one(first).expect("a processor");
    wait_for("the worker to work", 60, || server.check("check") > 0);
    let stays = || {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", daemon.pid())).expect("its threads");
        for task in tasks.flatten().filter_map(|task| task.file_name().to_str()?.parse().ok()) {
            let _ = one.bind(task);
        }
        // In many steps.
        (0..20).all(|_| {
            server.check("write");
            std::thread::sleep(Duration::from_millis(50));
            may_run(daemon.pid(), "worker-0").expect("a worker").1
        })
    };
    // A setting that arrives in the middle of a step for the same processor is lost, hence several tries.
    assert!(std::iter::repeat_with(stays).take(5).any(|stayed| stayed), "the worker went back to where it was before");
}
