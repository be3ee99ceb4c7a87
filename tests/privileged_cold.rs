//! The cold tier behind live clients: every page reads as last written, or raises SIGBUS when daemon and keeper are both
//! dead. `PAGEFOLD_KILLS=N` sets the number of killed daemons.

mod common;

use common::cold::{COMMANDS, Host, Served, program, spawn};
use common::{Random, TOOL, can_merge, skipped, wait_for};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

fn resident(pid: i32) -> u64 {
    pagefold_os::procfs::memory(pid).map_or(0, |memory| memory.anonymous)
}

#[test]
fn memory_calls_on_evicted_pages_behave_as_without_pagefold() {
    if !can_merge() || program().is_none() {
        return;
    }
    let host = Host::start(&["--cold-policy=manual"]);
    let mut client = Served::start(&host, &[], 16);
    let pid = client.pid();
    let before = resident(pid);
    assert!(before > 14 << 20, "{before}");
    for command in COMMANDS {
        // Memory from which the program just discarded something is left alone for a moment.
        wait_for(&format!("the pages to go before {command}"), 20, || {
            host.park(pid) > 1000 && resident(pid) < before / 4
        });
        client.does(command);
    }
    client.does("check");
    // Parked while it works.
    client.send("storm 3000");
    for _ in 0..10 {
        host.park(pid);
        std::thread::sleep(Duration::from_millis(50));
    }
    host.tool(&["unpark", &pid.to_string()]);
    client.expect_right("storm");
    client.does("check");
    // And while it walks through all of it, so that pages are loaded ahead of what it reads and go out again.
    for _ in 0..10 {
        host.park(pid);
        client.send("check");
        host.park(pid);
        client.expect_right("check");
    }
    host.park(pid);
    assert!(host.tool(&["unpark", "--all"]).status.success());
    assert_eq!(host.number(pid, "pages_out"), 0);
    client.does("check");
    assert_eq!(host.number(pid, "pages_lost"), 0);
    // The program's own wish.
    wait_for("the pages to go", 20, || {
        client.does("holes");
        client.does("advise pageout");
        host.number(pid, "pages_out") > 1000
    });
    client.does("advise willneed");
    wait_for("the pages to come", 20, || host.number(pid, "pages_out") == 0);
    client.does("check");
    // An end with pages out leaves nothing behind.
    host.park(pid);
    drop(client);
    wait_for("the tier to be empty", 20, || {
        let status = host.status();
        status["cold"]["clients"].as_array().is_some_and(Vec::is_empty) && status["cold"]["domains"][0]["pages"] == 0
    });
}

#[test]
fn the_programs_own_userfaultfd_comes_first() {
    if !can_merge() || program().is_none() {
        return;
    }
    let host = Host::start(&["--cold-policy=manual"]);
    let mut client = Served::start(&host, &[], 16);
    let pid = client.pid();
    for _ in 0..3 {
        host.wait_for_client(pid);
        wait_for("the pages to go", 20, || host.park(pid) > 1000);
        // What it wants to track comes back, all else can go out again.
        client.does("track");
        client.does("write 300");
        client.does("check");
    }
}

#[test]
fn killed_daemons_are_replaced_and_no_page_is_lost() {
    if !can_merge() || program().is_none() {
        return;
    }
    let rounds: u64 = std::env::var("PAGEFOLD_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(12);
    let mut random = Random::by_clock();
    let mut host = Host::start(&["--cold-policy=manual"]);
    let mut clients: Vec<Served> = (0..2).map(|_| Served::start(&host, &[], 8)).collect();
    let end = Instant::now() + Duration::from_secs(if rounds > 12 { 3600 } else { 45 });
    for round in 0..rounds {
        if Instant::now() > end {
            println!("after {round} rounds: no time left");
            break;
        }
        for client in &clients {
            host.wait_for_client(client.pid());
            if random.below(4) > 0 {
                host.park(client.pid());
            }
        }
        // All of this at the same time, and the daemon is killed in the middle.
        let all_park = random.below(2) == 0;
        let mut parking = all_park.then(|| {
            let mut command = Command::new(TOOL);
            command.args(["park", "--all", "--socket"]).arg(&host.socket);
            command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the tool runs")
        });
        let command = match random.below(4) {
            0 => "check".to_owned(),
            // Without bare system calls: what those discard at the instant of a daemon's death is a known limit.
            1 => format!("work {}", 20 + random.below(200)),
            2 => format!("write {}", 1 + random.below(2000)),
            _ => format!("discard {}", 1 + random.below(300)),
        };
        clients.iter_mut().for_each(|client| client.send(&command));
        std::thread::sleep(Duration::from_micros(random.below(60_000)));
        host.kill_daemon();
        clients.iter_mut().for_each(|client| client.expect_right(&command));
        host.wait();
        if let Some(parking) = &mut parking {
            let _ = parking.wait();
        }
        if random.below(6) == 0 {
            // A client may be killed too; the others are not affected.
            clients.remove(0);
            clients.push(Served::start(&host, &[], 8));
        }
    }
    clients.iter_mut().for_each(|client| client.does("check"));
    for client in &clients {
        host.wait_for_client(client.pid());
        assert_eq!(host.number(client.pid(), "pages_lost"), 0);
    }
}

/// A child of a raw fork waits for the pages that it has not received when the daemon dies, even beyond the next daemon's
/// end.
#[test]
fn a_child_reads_no_zeros_when_the_daemon_dies_while_it_is_given_its_pages() {
    if !can_merge() || program().is_none() {
        return;
    }
    let mut host = Host::start(&["--cold-policy=manual"]);
    let mut client = Served::start(&host, &[], 64);
    client.does("fill");
    for _ in 0..3 {
        host.wait_for_client(client.pid());
        wait_for("the pages to go", 20, || host.park(client.pid()) > 10_000);
        client.send("waitfork");
        host.kill_daemon();
        host.wait();
        host.kill_daemon();
        client.expect_right("waitfork");
        host.wait();
        client.does("check");
    }
}

/// What a bare move took along while it was out the next daemon brings in, and the one after it.
#[test]
fn a_page_that_is_being_evicted_survives_the_daemon() {
    if !can_merge() || program().is_none() {
        return;
    }
    let mut random = Random::by_clock();
    let mut host = Host::start(&["--cold-policy=manual"]);
    let mut client = Served::start(&host, &[], 64);
    client.does("fill");
    for round in 0..6 {
        host.wait_for_client(client.pid());
        wait_for("the pages to go", 20, || host.park(client.pid()) > 10_000);
        client.send("baremove");
        std::thread::sleep(Duration::from_micros(random.below(40_000)));
        host.kill_daemon();
        if round % 2 == 0 {
            host.wait();
            host.kill_daemon();
        }
        client.expect_right("baremove");
        if round % 3 == 0 {
            client.does("baremove");
        }
        client.does("check");
        host.wait();
    }
    host.wait_for_client(client.pid());
    assert_eq!(host.number(client.pid(), "pages_lost"), 0);
}

#[test]
fn a_taken_address_does_not_keep_the_next_daemon_from_its_clients() {
    if !can_merge() || program().is_none() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let metrics = dir.path().join("metrics.sock");
    let mut host = Host::start(&["--cold-policy=manual", "--metrics", &format!("unix:{}", metrics.display())]);
    let mut client = Served::start(&host, &[], 16);
    let pid = client.pid();
    host.wait_for_client(pid);
    wait_for("the pages to go", 20, || host.park(pid) > 1000);
    // Something else lies where its successor wants to serve.
    std::fs::remove_file(&metrics).expect("the daemon's socket");
    std::fs::write(&metrics, "precious").expect("a file");
    host.kill_daemon();
    client.does("check");
    host.wait();
    host.wait_for_client(pid);
    assert_eq!(host.number(pid, "pages_lost"), 0);
    assert_eq!(std::fs::read(&metrics).expect("the file"), b"precious");
}

#[test]
fn a_client_that_cannot_reach_the_next_daemon_is_served_by_it() {
    if !can_merge() || program().is_none() {
        return;
    }
    let mut host = Host::start(&["--cold-policy=manual"]);
    let mut client = Served::start(&host, &[], 16);
    let pid = client.pid();
    host.wait_for_client(pid);
    wait_for("the pages to go", 20, || host.park(pid) > 1000);
    let out = host.number(pid, "pages_out");
    // No socket has a name there.
    client.does("chroot");
    host.kill_daemon();
    host.wait();
    assert_eq!(host.number(pid, "pages_out"), out, "the next daemon has not taken over all");
    let is_parked = || host.cold(pid).is_some_and(|client| client["parked"] == true);
    assert!(is_parked(), "the next daemon does not know that it is parked");
    // Longer than pages wait for a daemon where there is none.
    std::thread::sleep(Duration::from_secs(13));
    assert_eq!((host.number(pid, "pages_out"), host.number(pid, "pages_lost")), (out, 0));
    client.does("check");
}

#[test]
fn with_daemon_and_keeper_dead_a_lost_page_is_a_sigbus_and_never_other_bytes() {
    if !can_merge() || program().is_none() {
        return;
    }
    let mut host = Host::start(&["--cold-policy=manual"]);
    let mut client = Served::start(&host, &[], 4);
    let out = host.park(client.pid());
    assert!(out > 500, "{out}");
    host.kill_all();
    // The client waits, finds that no daemon will come, and continues with the pages it has.
    client.send("lost");
    let line = client.line();
    let lost: u64 =
        line.strip_prefix("lost ").and_then(|count| count.parse().ok()).unwrap_or_else(|| panic!("{line:?}"));
    assert_eq!(lost, out, "every page that was out is gone, and no other");
    // Another daemon serves it from now on.
    host.child = spawn(&host.socket, &["--cold-policy=manual"]);
    host.wait();
    host.wait_for_client(client.pid());
}

#[test]
fn a_new_daemon_without_the_old_tier_reports_lost_pages_immediately() {
    if !can_merge() || program().is_none() {
        return;
    }
    let mut host = Host::start(&["--cold-policy=manual", "--no-keeper"]);
    let mut client = Served::start(&host, &[], 4);
    let out = host.park(client.pid());
    host.kill_all();
    host.child = spawn(&host.socket, &["--cold-policy=manual", "--no-keeper"]);
    host.wait();
    host.wait_for_client(client.pid());
    client.send("lost");
    assert_eq!(client.line(), format!("lost {out}"));
}

#[test]
fn a_full_tier_and_a_full_disk_cost_saving_and_nothing_else() {
    if !can_merge() || program().is_none() {
        return;
    }
    let refused = |host: &Host| host.status()["cold"]["domains"][0]["stores_refused"].as_u64().unwrap_or(0);
    let host = Host::start(&["--cold-policy=manual", "--tier-max", "4M", "--tier-dir", "none"]);
    let mut client = Served::start(&host, &[], 24);
    host.park(client.pid());
    assert!(refused(&host) > 0, "24 MiB went into 4");
    for command in ["check", "storm 200", "fork", "check"] {
        client.does(command);
        host.park(client.pid());
    }
    drop((client, host));
    // A file that takes two segments and no more.
    let disk = tempfile::tempdir().expect("a directory");
    let path = disk.path().to_str().expect("a path").to_owned();
    let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=2m", "tmpfs", &path]).status();
    if !mounted.is_ok_and(|status| status.success()) {
        return skipped("tmpfs cannot be mounted here");
    }
    let unmount = Unmount(path.clone());
    let host = Host::start(&["--cold-policy=manual", "--tier-max", "4M", "--tier-dir", &path]);
    let mut client = Served::start(&host, &[], 24);
    for command in ["check", "storm 200", "write 500", "check"] {
        host.park(client.pid());
        client.does(command);
    }
    assert!(refused(&host) > 0, "24 MiB went into 4 and a file of 2");
    assert_eq!(host.number(client.pid(), "pages_lost"), 0);
    drop((client, host));
    drop(unmount);
}

/// Unmounts when dropped.
struct Unmount(String);

impl Drop for Unmount {
    fn drop(&mut self) {
        let _ = Command::new("umount").args(["-l", &self.0]).status();
    }
}

/// A program populates all its memory in one call, under a limit of half of it. Nothing can be evicted while the agent waits
/// for the call, so the call is refused, or continues page by page: it must not wait for itself.
#[test]
fn faults_beyond_a_memory_limit_are_refused() {
    if !can_merge() || program().is_none() {
        return;
    }
    let Some(group) = common::group::Group::new() else { return };
    let host = Host::start(&["--cold-scan-interval", "200ms", "--cold-policy=manual"]);
    let mut command = host.run(&[]);
    group.adopt(&mut command);
    let mut client = Served::start_by(command, 96);
    host.wait_for_client(client.pid());
    // Memory that came to its place just now is left alone for a moment.
    let park = |client: &Served| wait_for("the pages to go", 20, || host.park(client.pid()) > 20_000);
    for command in ["fork", "rawfork", "move"] {
        park(&client);
        assert!(client.tries(command), "{command}: without a limit there is room");
    }
    park(&client);
    group.limit(48 << 20);
    for command in ["fork", "move", "track", "fork"] {
        assert!(!client.tries(command), "{command}: 96 MiB fit into 48");
        client.does("peek 5000");
    }
    for command in ["populate", "check", "write 3000", "populate", "check"] {
        client.does(command);
    }
    assert!(host.number(client.pid(), "pages_out") > 5000);
    assert_eq!(host.number(client.pid(), "pages_lost"), 0);
    group.lift();
    for command in ["fork", "move", "track", "check"] {
        assert!(client.tries(command), "{command}: there is room again");
    }
    group.assert_nobody_was_killed();
}

/// The kernel would end the daemon, and its keeper, which has what is out.
#[test]
fn a_daemon_at_its_limit_of_memory_parks_less() {
    if !can_merge() || program().is_none() {
        return;
    }
    let Some(group) = common::group::Group::new() else { return };
    let host = Host::start(&["--cold-policy=manual", "--tier-dir", "none"]);
    group.take(host.pid());
    let mut client = Served::start(&host, &[], 256);
    group.limit(32 << 20);
    let out = host.park(client.pid());
    assert!((1000..50_000).contains(&out), "{out}");
    client.does("check");
    group.assert_nobody_was_killed();
    group.lift();
    wait_for("the pages to go", 20, || host.park(client.pid()) > 50_000);
    client.does("check");
}

#[test]
fn a_client_moved_to_another_group_stays_within_its_limit() {
    if !can_merge() || program().is_none() {
        return;
    }
    let Some(group) = common::group::Group::new() else { return };
    let host = Host::start(&["--cold-scan-interval", "200ms", "--cold-policy=manual"]);
    let mut client = Served::start(&host, &[], 96);
    wait_for("the pages to go", 20, || host.park(client.pid()) > 20_000);
    group.take(client.pid());
    group.limit(48 << 20);
    // During this time only the fault thread knows that the client moved to the group.
    assert!(host.tool(&["unpark", &client.pid().to_string()]).status.success());
    for command in ["check", "write 3000", "check"] {
        client.does(command);
    }
    assert!(host.number(client.pid(), "pages_out") > 5000);
    assert_eq!(host.number(client.pid(), "pages_lost"), 0);
    group.lift();
    group.assert_nobody_was_killed();
}

/// A daemon that is not told of forks, for it has no `CAP_SYS_PTRACE`; nothing, said loudly, if that cannot be taken away.
fn host_without_ptrace() -> Option<(tempfile::TempDir, Host)> {
    let dir = tempfile::tempdir().expect("a directory");
    let without = ["--inh-caps=-sys_ptrace", "--bounding-set=-sys_ptrace"];
    if !Command::new("setpriv").args(without).arg("true").status().is_ok_and(|status| status.success()) {
        skipped("setpriv cannot take CAP_SYS_PTRACE away here");
        return None;
    }
    let host = Host::start_by(|socket| {
        let mut command = Command::new("setpriv");
        command
            .args(without)
            .arg(TOOL)
            .args(["daemon", "--cold-policy=manual", "--no-keeper", "--tier-dir"])
            .arg(dir.path());
        command.arg("--socket").arg(socket).stdin(Stdio::null()).stdout(Stdio::null());
        command.spawn().expect("the daemon starts")
    });
    Some((dir, host))
}

/// What a program forks while pages are out has them all, by whatever call, also beside memory that is not for the child.
#[test]
fn a_child_has_every_page_that_it_inherits() {
    if !can_merge() || program().is_none() {
        return;
    }
    let Some((_dir, host)) = host_without_ptrace() else { return };
    let mut client = Served::start(&host, &[], 16);
    // So that what is out is one run, far longer than what comes with a neighbour.
    client.does("fill");
    for command in ["partfork", "clone3", "partfork"] {
        wait_for("the pages to go", 20, || host.park(client.pid()) > 2000);
        client.does(command);
        client.does("check");
    }
    drop((client, host));
    // The child of a fork that the library did not see is no client of its own: the agent of its parent brings it the pages.
    let host = Host::start(&["--cold-policy=manual"]);
    let mut client = Served::start(&host, &[], 16);
    for command in ["barefork", "clone3"] {
        wait_for("the pages to go", 20, || host.park(client.pid()) > 2000);
        client.does(command);
        client.does("check");
    }
}

/// Memory that the program hid from itself (`PROT_NONE`) comes back as well where everything must: for a child, under a
/// daemon that is not told of forks, and when the agent leaves for a moment.
#[test]
fn hidden_memory_comes_back_too() {
    if !can_merge() || program().is_none() {
        return;
    }
    let Some((_dir, host)) = host_without_ptrace() else { return };
    let mut client = Served::start(&host, &[], 16);
    for command in ["hide", "hidetrack", "fork", "hidemove", "hide"] {
        wait_for("the pages to go", 20, || host.park(client.pid()) > 2000);
        client.does(command);
        client.does("check");
    }
}

/// A seal forbids to move and replace mappings, ours too: what is sealed by a call that is seen is here for good, and what
/// is sealed by another one goes out and comes back as ever.
#[test]
fn sealed_memory_is_right() {
    // SAFETY: seals nothing.
    let sealed = unsafe { libc::syscall(libc::SYS_mseal, 0, 0, 0) };
    if sealed != 0 && std::io::Error::last_os_error().raw_os_error() == Some(libc::ENOSYS) {
        return skipped("this kernel has no mseal(2)");
    }
    if !can_merge() || program().is_none() {
        return;
    }
    let host = Host::start(&["--cold-policy=manual"]);
    for seal in ["rawseal", "seal"] {
        let mut client = Served::start(&host, &[], 16);
        host.wait_for_client(client.pid());
        wait_for("the pages to go", 20, || host.park(client.pid()) > 2000);
        client.does(seal);
        let out = host.number(client.pid(), "pages_out");
        assert_eq!(out > 0, seal == "rawseal", "{out} pages are out");
        for command in
            ["discard 100", "check", "rawdiscard 100", "check", "fork", "write 300", "check", "fill", "check"]
        {
            client.does(command);
        }
        if seal == "rawseal" {
            wait_for("the pages to go again", 20, || host.park(client.pid()) > 2000);
        } else {
            // Longer than pages stay that lie beside discards.
            std::thread::sleep(Duration::from_secs(2));
            assert_eq!(host.park(client.pid()), 0, "what is sealed went out");
        }
        client.does("rawdiscard 100");
        client.does("check");
    }
}

/// Plays the service manager's fd store: what a daemon leaves at the socket, by name.
struct Manager {
    socket: pagefold_os::fd::Fd,
    left: Vec<(String, pagefold_os::fd::Fd)>,
    /// The daemon said that it serves.
    ready: bool,
}

impl Manager {
    fn listen(path: &Path) -> Manager {
        let socket = std::os::unix::net::UnixDatagram::bind(path).expect("a socket");
        socket.set_nonblocking(true).expect("a flag");
        Manager { socket: std::os::fd::OwnedFd::from(socket).into(), left: Vec::new(), ready: false }
    }

    /// Obeys what has come.
    fn read(&mut self) {
        let mut text = [0; 4096];
        while let Ok((len, mut fds)) = pagefold_os::sock::receive(&self.socket, &mut text, 0) {
            let text = String::from_utf8(text[..len].to_vec()).expect("text");
            if text == "READY=1" {
                self.ready = true;
                continue;
            }
            let name = text.lines().find_map(|line| line.strip_prefix("FDNAME=")).expect("a name").to_owned();
            if text.lines().any(|line| line == "FDSTOREREMOVE=1") {
                self.left.retain(|(other, _)| *other != name);
            } else if text.lines().any(|line| line == "FDSTORE=1") {
                assert!(name.len() < 256 && name.bytes().all(|byte| byte.is_ascii_graphic() && byte != b':'), "{name}");
                self.left.push((name, fds.take(0).expect("a descriptor")));
            }
        }
    }

    /// Starts a daemon as the service manager does: with descriptors from number 3 on, the last one left first, and a
    /// foreign one among them.
    fn start(&self, socket: &Path, notify: &Path, args: &[&str]) -> std::process::Child {
        use std::os::unix::process::CommandExt;
        let stranger = pagefold_os::fd::Fd::open(c"/dev/null", libc::O_RDONLY, 0).expect("/dev/null");
        // Far from the numbers that they are to have.
        let far = |fd: &pagefold_os::fd::Fd| {
            // SAFETY: F_DUPFD_CLOEXEC takes no pointer, and `fd` is open.
            let fd = unsafe { libc::fcntl(fd.raw(), libc::F_DUPFD_CLOEXEC, 200) };
            // SAFETY: the call above made the descriptor, and nothing else owns it.
            unsafe { pagefold_os::fd::Fd::from_raw(fd) }
        };
        let mut all: Vec<(&str, pagefold_os::fd::Fd)> =
            self.left.iter().rev().map(|(name, fd)| (name.as_str(), far(fd))).collect();
        all.insert(all.len() / 2, ("somebody-elses", far(&stranger)));
        let names: Vec<&str> = all.iter().map(|(name, _)| *name).collect();
        let numbers: Vec<i32> = all.iter().map(|(_, fd)| fd.raw()).collect();
        let mut command = Command::new("sh");
        // The process that the descriptors are for is known only once it is there.
        command.args(["-c", "LISTEN_PID=$$ exec \"$@\"", "sh", TOOL]);
        command.args(["daemon", "--priority=normal", "--scan-interval", "1s", "--socket"]).arg(socket).args(args);
        command.env("LISTEN_FDS", names.len().to_string()).env("LISTEN_FDNAMES", names.join(":"));
        command.env("NOTIFY_SOCKET", notify).stdin(Stdio::null()).stdout(Stdio::null());
        let pass = move || {
            for (number, fd) in (3..).zip(&numbers) {
                // SAFETY: dup2 takes no pointers. It runs in the child before exec, where no other thread uses the number.
                if unsafe { libc::dup2(*fd, number) } < 0 {
                    return Err(std::io::Error::last_os_error());
                }
            }
            Ok(())
        };
        // SAFETY: dup2(2) is all that happens between fork and exec.
        unsafe { command.pre_exec(pass) };
        command.spawn().expect("the daemon starts")
    }
}

#[test]
fn with_daemon_and_keeper_dead_the_service_manager_brings_every_page_back() {
    if !can_merge() || program().is_none() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let notify = dir.path().join("notify");
    let mut manager = Manager::listen(&notify);
    let args = ["--cold-policy=manual", "--tier-max", "8M"];
    let mut host = Host::start_by(|socket| manager.start(socket, &notify, &args));
    let mut clients: Vec<Served> = (0..2).map(|_| Served::start(&host, &[], 12)).collect();
    let pids: Vec<i32> = clients.iter().map(Served::pid).collect();
    // The userfaultfd, the residency map, the page map and the journal of events.
    const DESCRIPTORS: usize = 4;
    for round in 0..2 {
        for pid in &pids {
            // Memory from which the program just discarded something is left alone for a moment.
            wait_for(&format!("the pages to go in round {round}"), 20, || host.park(*pid) > 1000);
        }
        manager.read();
        assert!(std::mem::take(&mut manager.ready), "the daemon did not say that it serves");
        let arenas = manager.left.iter().filter(|(name, _)| name.contains("arena")).count();
        assert!(arenas > 0 && manager.left.len() == arenas + DESCRIPTORS * clients.len(), "{:?}", manager.left);
        host.kill_all();
        clients[0].send("check");
        host.child = manager.start(&host.socket, &notify, &args);
        host.wait();
        clients[0].expect_right("check");
        clients[1].does("storm 200");
        for client in &mut clients {
            client.does("check");
            host.wait_for_client(client.pid());
            assert_eq!(host.number(client.pid(), "pages_lost"), 0);
        }
    }
    // What is not needed any more is not held any more.
    clients.remove(0);
    wait_for("the manager to be told", 20, || {
        manager.read();
        manager.left.iter().filter(|(name, _)| name.contains("client")).count() == DESCRIPTORS
    });
    clients[0].does("check");
}
