//! Programs that run already, and are static: they are entered, merged and left again while they work, and nothing is lost.

#![cfg(target_arch = "x86_64")]

mod common;

use common::cold::Host;
use common::{Daemon, Random, Reaped, Server, ask_until_done, c_program_with, shared_pages_in, skipped, wait_for};
use pagefold_os::{maps, smaps, sock};
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

/// Pages of the area that all instances hold.
const PAGES: u64 = 4096;

/// The compiled program, once; `None` after saying what is missing.
fn program() -> Option<&'static Path> {
    static BUILT: OnceLock<Option<PathBuf>> = OnceLock::new();
    common::static_program(&BUILT, "attached")
}

/// Starts the program as anybody would, with so many threads beside its first.
fn start(program: &Path, threads: u32) -> Server {
    Server::start_as(&threads.to_string(), Command::new("env"), program)
}

/// As [`start`]; its area can be executed.
fn start_executable(program: &Path, threads: u32) -> Server {
    let mut command = Command::new("env");
    command.arg("EXECUTABLE=1");
    Server::start_as(&threads.to_string(), command, program)
}

fn attach(daemon: &Daemon, server: &Server) {
    let said = ask_until_done(|words| daemon.tool(words), &["attach", &server.pid().to_string()]);
    assert!(said.is_empty(), "{said}");
}

fn detach(daemon: &Daemon, server: &Server) {
    ask_until_done(|words| daemon.tool(words), &["detach", &server.pid().to_string()]);
}

fn shared_pages(daemon: &Daemon, pid: i32) -> u64 {
    shared_pages_in(&daemon.status(), pid)
}

/// What a process shows of itself: threads, descriptors, and mappings that only an agent makes.
fn shape(pid: i32) -> (usize, usize, Vec<String>) {
    let count = |what: &str| fs::read_dir(format!("/proc/{pid}/{what}")).map_or(0, Iterator::count);
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let is_agents = |line: &&str| line.contains("pagefold") || line.starts_with("6fff");
    (count("task"), count("fd"), maps.lines().filter(is_agents).map(str::to_owned).collect())
}

/// One round of what programs do to their memory; every byte is checked by the program.
fn work(server: &mut Server, random: &mut Random) {
    let word = match random.below(5) {
        0 => format!("discard {}", 1 + random.below(2000)),
        1 => format!("write {}", 1 + random.below(100)),
        2 => format!("fork {}", 1 + random.below(3)),
        3 => format!("move {}", 1 + random.below(20)),
        _ => "reset 1".to_owned(),
    };
    server.check(&word);
}

#[test]
fn attached_programs_share_pages_and_keep_every_byte() {
    let Some(program) = program() else { return };
    share_and_keep([0, 3].map(|threads| start(program, threads)).into());
}

/// One program may execute its area, the other not: they share the same slots, each with its own rights.
#[test]
fn attached_programs_share_memory_that_can_be_executed() {
    let Some(program) = program() else { return };
    share_and_keep(vec![start_executable(program, 0), start_executable(program, 3), start(program, 1)]);
}

fn share_and_keep(mut servers: Vec<Server>) {
    let daemon = Daemon::start(&["--no-keeper"]);
    let mut random = Random::by_clock();
    let shapes: Vec<_> = servers.iter().map(|server| shape(server.pid())).collect();
    servers.iter().for_each(|server| attach(&daemon, server));
    wait_for("all to share their area", 120, || {
        servers.iter().all(|server| shared_pages(&daemon, server.pid()) >= PAGES * 9 / 10)
    });
    daemon.verify();
    for _ in 0..30 {
        servers.iter_mut().for_each(|server| work(server, &mut random));
    }
    for server in &mut servers {
        server.check("check 1");
    }
    daemon.verify();
    for (server, before) in servers.iter_mut().zip(shapes) {
        detach(&daemon, server);
        assert_eq!(shape(server.pid()), before);
        for word in ["check 1", "discard 500", "fork 1", "move 5", "check 1"] {
            server.check(word);
        }
    }
}

/// No merge gives back what agents have for themselves. They had 450 KiB each: code, a stack of zeros, and a table of merged
/// memory with a page for each 2 MiB.
#[test]
fn agents_share_their_code_and_have_little_for_themselves() {
    let Some(program) = program() else { return };
    let daemon = Daemon::start(&["--no-keeper"]);
    let mut servers = [1, 0].map(|threads| start(program, threads));
    servers.iter().for_each(|server| attach(&daemon, server));
    let is_code = |map: &maps::Map<'_>| map.is_executable() && map.name.starts_with(b"/memfd:pagefold-agent");
    let code_of = |pid: i32| {
        let mut found = Vec::new();
        smaps::of_process(pid, |one| {
            found.extend(is_code(&one.map).then_some((one.map.range, one.map.inode, one.anonymous)))
        })
        .expect("it lives");
        found
    };
    let codes = servers.each_ref().map(|server| code_of(server.pid()));
    let [(range, inode, anonymous)] = codes[0][..] else { panic!("{codes:x?}") };
    let [(_, other_inode, other_anonymous)] = codes[1][..] else { panic!("{codes:x?}") };
    assert_eq!((other_inode, anonymous, other_anonymous), (inode, 0, 0), "{codes:x?}");
    // Its data and its stack follow the code.
    let own_of = |pid: i32| {
        let (mut end, mut own) = (0, 0);
        let look = |one: &smaps::SmapsEntry<'_>| {
            if is_code(&one.map) || one.map.range.start == end && one.map.inode == 0 {
                (end, own) = (one.map.range.end, own + one.anonymous);
            }
        };
        smaps::of_process(pid, look).expect("it lives");
        own
    };
    wait_for("all to share their area", 120, || {
        servers.iter().all(|server| shared_pages(&daemon, server.pid()) >= PAGES * 9 / 10)
    });
    wait_for("the agents to give back their stacks", 60, || {
        servers.iter().all(|server| own_of(server.pid()) <= 128 << 10)
    });
    let path = format!("/proc/{}/map_files/{:x}-{:x}", servers[0].pid(), range.start, range.end);
    let file = fs::File::options().write(true).open(path).expect("root opens what a process maps");
    let error = std::os::unix::fs::FileExt::write_at(&file, b"other", 0).expect_err("others execute it");
    assert_eq!(error.raw_os_error(), Some(libc::EPERM), "{error}");
    for server in &mut servers {
        server.check("fork 1");
        detach(&daemon, server);
        assert_eq!(code_of(server.pid()), []);
        server.check("check 1");
    }
}

#[test]
fn a_working_program_is_attached_and_left_again_and_again() {
    let Some(program) = program() else { return };
    let daemon = Daemon::start(&["--no-keeper"]);
    let mut random = Random::by_clock();
    let mut servers: Vec<Server> = [4, 1].map(|threads| start(program, threads)).into();
    let shapes: Vec<_> = servers.iter().map(|server| shape(server.pid())).collect();
    for round in 0..25 {
        for server in &servers {
            attach(&daemon, server);
        }
        std::thread::sleep(Duration::from_millis(random.below(600)));
        for server in &mut servers {
            work(server, &mut random);
        }
        for (server, before) in servers.iter_mut().zip(&shapes) {
            detach(&daemon, server);
            assert_eq!(shape(server.pid()), *before, "round {round}");
            server.check("check 1");
        }
    }
}

/// While a debugger has a thread of the program, what the entry left cannot be taken out.
#[test]
fn a_detach_that_did_not_get_to_its_end_is_ended_by_the_next() {
    let Some(program) = program() else { return };
    let daemon = Daemon::start(&["--no-keeper"]);
    let mut server = start(program, 2);
    let before = shape(server.pid());
    attach(&daemon, &server);
    let pid = server.pid();
    let (over, ended) = std::sync::mpsc::channel::<()>();
    let (seized, has_seized) = std::sync::mpsc::channel();
    let debugger = std::thread::spawn(move || {
        // SAFETY: has this thread trace a child of ours, until it ends.
        let result = unsafe { libc::ptrace(libc::PTRACE_SEIZE, pid, 0, 0) };
        seized.send(result).expect("the test waits");
        let _ = ended.recv();
    });
    assert_eq!(has_seized.recv().expect("it says so"), 0, "{}", io::Error::last_os_error());
    let said = daemon.tool(&["detach", &pid.to_string()]);
    assert!(!said.status.success(), "a debugger has it");
    drop(over);
    debugger.join().expect("it ends");
    detach(&daemon, &server);
    assert_eq!(shape(pid), before);
    server.check("check 1");
    let said = daemon.tool(&["detach", &pid.to_string()]);
    assert!(String::from_utf8_lossy(&said.stderr).contains("it is no client"), "it was left");
}

/// The daemon is the tracer: whatever step of an entry, merge or leave it is at, the program goes on as if nothing had been.
#[test]
fn a_tracer_that_is_killed_at_any_instant_is_not_missed() {
    let Some(program) = program() else { return };
    let mut daemon = Daemon::start(&["--no-keeper"]);
    let mut random = Random::by_clock();
    let mut server = start(program, 3);
    let pid = server.pid().to_string();
    let before = shape(server.pid());
    for round in 0..40 {
        let asked = Command::new(common::TOOL)
            .args(["attach", "--socket"])
            .arg(&daemon.socket)
            .arg(&pid)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the tool runs");
        let mut asked = Reaped(asked);
        let longest = if round % 2 == 0 { 12_000 } else { 400_000 };
        std::thread::sleep(Duration::from_micros(random.below(longest)));
        daemon.replace();
        let _ = asked.0.wait();
        work(&mut server, &mut random);
        server.check("check 1");
        // An agent that is in the program greets the next daemon; one that was not served leaves by itself.
        wait_for("the agent to come back or to leave", 60, || {
            shared_pages(&daemon, server.pid()) > 0
                || daemon.status()["clients"].as_array().is_some_and(|clients| !clients.is_empty())
                || shape(server.pid()) == before
        });
        if shape(server.pid()) != before {
            detach(&daemon, &server);
        }
        assert_eq!(shape(server.pid()), before, "round {round}");
    }
    attach(&daemon, &server);
    server.check("check 1");
}

/// Two programs that share their area, and whether they do.
fn merged_pair(program: &Path, host: &Host) -> (Vec<Server>, impl Fn(&Host) -> bool + use<>) {
    let servers: Vec<Server> = [0, 0].map(|threads| start(program, threads)).into();
    for server in &servers {
        attach_to(host, server, &[]);
    }
    let pids: Vec<i32> = servers.iter().map(Server::pid).collect();
    let is_merged = move |host: &Host| {
        let status = host.status();
        let count = status["clients"].as_array().map_or(0, Vec::len);
        count == 2 && pids.iter().all(|pid| shared_pages_in(&status, *pid) >= PAGES * 9 / 10)
    };
    wait_for("both to share their area", 120, || is_merged(host));
    (servers, is_merged)
}

/// The daemon lives: it has another keeper at once, and children that were forked meanwhile wait for that only.
#[test]
fn forked_children_go_to_the_next_keeper() {
    let Some(program) = program() else { return };
    let host = Host::start(&[]);
    let (mut servers, is_merged) = merged_pair(program, &host);
    for _ in 0..3 {
        let keeper = host.keeper_pid().expect("a keeper");
        common::cold::kill(keeper);
        wait_for("the keeper to have ended", 60, || common::cold::has_ended(keeper));
        for word in ["keep 10", "tell 2", "fork 2", "end 0"] {
            servers[0].check(word);
        }
        wait_for("the next keeper", 60, || host.keeper_pid().is_some_and(|next| next != keeper));
        wait_for("both to share their area", 120, || {
            servers.iter_mut().for_each(|server| _ = server.check("reset 1"));
            common::comes(5, || is_merged(&host))
        });
    }
    servers.iter_mut().for_each(|server| _ = server.check("check 1"));
    host.verify();
}

/// What a child has discarded is known to the keeper alone, which outlives daemons; without it children wait.
#[test]
fn forked_children_outlive_daemons() {
    let Some(program) = program() else { return };
    let mut host = Host::start(&[]);
    let (mut servers, is_merged) = merged_pair(program, &host);
    let keeper = host.keeper_pid().expect("a keeper");
    let [server, _] = &mut servers[..] else { unreachable!() };
    // More than one bundle of anything; some are forked while there is no daemon.
    for word in ["keep 40", "tell 1"] {
        server.check(word);
    }
    host.kill_daemon();
    for word in ["tell 2", "keep 3", "tell 1"] {
        server.check(word);
    }
    host.restart_daemon(&[]);
    wait_for("the agents to come back", 60, || is_merged(&host));
    for word in ["keep 3", "tell 2", "fork 2"] {
        server.check(word);
    }
    assert_eq!(host.keeper_pid(), Some(keeper));
    // The keeper that a stopped daemon no longer needs stays for them.
    host.stop_daemon();
    for word in ["tell 1", "end 0", "keep 2", "tell 1", "end 0"] {
        server.check(word);
    }
    // Neither daemon nor keeper: what is forked now waits at its first discard, for the next ones.
    common::cold::kill(keeper);
    // A child that is sent to a keeper which ends is lost with it.
    wait_for("the keeper to have ended", 60, || common::cold::has_ended(keeper));
    server.check("keep 40");
    host.restart_daemon(&[]);
    wait_for("the agents to come back", 60, || is_merged(&host));
    assert_ne!(host.keeper_pid(), Some(keeper));
    for word in ["tell 2", "end 0", "check 1", "fork 2"] {
        server.check(word);
    }
    host.verify();
}

fn attach_to(host: &Host, server: &Server, options: &[&str]) {
    let pid = server.pid().to_string();
    let said = ask_until_done(|words| host.tool(words), &[&["attach"], options, &[pid.as_str()]].concat());
    assert!(said.is_empty(), "{said}");
}

/// Evicts all memory of a program, or nearly: at that moment a page may be pinned, or a thread not stop in time.
fn park(host: &Host, server: &Server, pages: u64) {
    wait_for("the pages to go", 60, || {
        let output = host.tool(&["park", &server.pid().to_string()]);
        output.status.success() && host.number(server.pid(), "pages_out") >= pages
    });
}

/// Attached for the tier alone, and attached to be merged: what is merged of the latter stays merged. All calls are bare,
/// also where they meet evicted pages.
#[test]
fn attached_programs_are_parked_and_keep_every_byte() {
    let Some(program) = program() else { return };
    let mut host = Host::start(&["--cold-policy=manual"]);
    let mut random = Random::by_clock();
    for (threads, options) in [(0, &["--cold"][..]), (3, &["--cold"]), (0, &[]), (3, &[])] {
        let mut server = start(program, threads);
        let before = shape(server.pid());
        attach_to(&host, &server, options);
        for round in 0..4 {
            server.check("write 2000");
            park(&host, &server, 1000);
            if round == 2 {
                host.replace_daemon(&["--cold-policy=manual"]);
            }
            for _ in 0..6 {
                work(&mut server, &mut random);
            }
            if round == 3 {
                server.check("keep 2");
                server.check("tell 1");
            }
            host.tool(&["unpark", &server.pid().to_string()]);
            server.check("check 1");
        }
        server.check("end 0");
        server.check("write 2000");
        wait_for("its agent to be there", 60, || {
            host.tool(&["park", &server.pid().to_string()]).status.success()
                && host.number(server.pid(), "pages_out") > 0
        });
        let cold = host.cold(server.pid()).expect("a client of the tier");
        assert_eq!(cold["attached"], true);
        assert!(cold["stops"].as_u64() > Some(0), "{cold}");
        // With pages out.
        let output = host.tool(&["detach", &server.pid().to_string()]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(shape(server.pid()), before, "{options:?}");
        for word in ["check 1", "discard 500", "fork 1", "move 5", "check 1"] {
            server.check(word);
        }
        assert!(host.cold(server.pid()).is_none());
    }
}

/// Programs to which no path of the daemon's leads: in another mount namespace, as in a container, and of a user that may
/// not look into the directory of its socket.
fn start_apart(program: &Path, host: &Host) -> [Server; 2] {
    let mut elsewhere = Command::new("unshare");
    let hide = "mount -t tmpfs none \"$0\" && exec \"$@\"";
    elsewhere.args(["--mount", "sh", "-c", hide]).arg(host.dir.path());
    let mut of_another_user = Command::new("env");
    of_another_user.uid(65534).gid(65534);
    [elsewhere, of_another_user].map(|command| Server::start_as("0", command, program))
}

/// Their agents reach each daemon after the one that entered by way of the keeper.
#[test]
fn programs_to_which_no_path_leads_follow_the_daemons() {
    let Some(program) = program() else { return };
    let mut host = Host::start(&["--cold-policy=manual"]);
    let mut random = Random::by_clock();
    for options in [&[][..], &["--cold"]] {
        let mut servers = start_apart(program, &host);
        servers.iter().for_each(|server| attach_to(&host, server, options));
        for round in 0..3 {
            for server in &mut servers {
                server.check("write 2000");
                park(&host, server, 1000);
            }
            if round == 1 {
                let keeper = host.keeper_pid().expect("a keeper");
                common::cold::kill(keeper);
                wait_for("the next keeper", 60, || host.keeper_pid().is_some_and(|next| next != keeper));
            }
            host.replace_daemon(&["--cold-policy=manual"]);
            for server in &mut servers {
                work(server, &mut random);
                server.check("write 2000");
                // Only an agent that is connected evicts.
                park(&host, server, 1000);
                wait_for("all to be back", 60, || {
                    host.tool(&["unpark", &server.pid().to_string()]).status.success()
                        && host.number(server.pid(), "pages_out") == 0
                });
                server.check("check 1");
            }
        }
        for server in &mut servers {
            // An agent greets again when its loan has ended.
            let output = host.tool(&["detach", &server.pid().to_string()]);
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            server.check("check 1");
        }
    }
    host.verify();
}

/// Neither the path nor the keeper leads their agents to the next daemon, which asks them.
#[test]
fn programs_that_lost_daemon_and_keeper_are_attached_again() {
    let Some(program) = program() else { return };
    let mut host = Host::start(&["--cold-policy=manual"]);
    let mut servers = start_apart(program, &host);
    for round in 0..3 {
        for server in &mut servers {
            attach_to(&host, server, &[]);
            server.check("write 2000");
            park(&host, server, 1000);
            // What is out with both killed is lost.
            ask_until_done(|words| host.tool(words), &["unpark", &server.pid().to_string()]);
            server.check("check 1");
        }
        if round < 2 {
            host.kill_all();
            host.restart_daemon(&["--cold-policy=manual"]);
        }
    }
    // A daemon does not take another one's clients.
    let other = Host::start(&[]);
    let output = other.tool(&["attach", &servers[0].pid().to_string()]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("a client of another daemon"), "{said}");
    for server in &mut servers {
        ask_until_done(|words| host.tool(words), &["detach", &server.pid().to_string()]);
        server.check("check 1");
    }
}

/// Its filter allows what the agent calls, and ends the program at anything else.
fn start_filtered(program: &Path, allowed: impl Iterator<Item = libc::c_long>) -> Server {
    let allowed: Vec<String> = allowed.map(|number| number.to_string()).collect();
    let mut command = Command::new("env");
    command.arg(format!("ALLOWED={}", allowed.join(",")));
    // Other threads would be without the filter.
    Server::start_as("0", command, program)
}

/// The kernel ends a program at the first call of the agent's of which the filter was not asked.
#[test]
fn a_filter_is_asked_about_each_call_of_the_agents() {
    use pagefold_protocol::seccomp_filter::called_when_attached;
    let Some(program) = program() else { return };
    let mut host = Host::start(&["--cold-policy=manual"]);
    let mut random = Random::by_clock();
    let calls = || called_when_attached().filter(|number| *number != libc::SYS_userfaultfd || !has_device());
    for options in [&[][..], &["--cold"]] {
        let mut servers = [start_filtered(program, calls()), start_filtered(program, calls())];
        for server in &servers {
            attach_to(&host, server, options);
        }
        if options.is_empty() {
            let pids = servers.each_ref().map(Server::pid);
            let status = || host.status();
            wait_for("them to share", 120, || pids.iter().all(|pid| shared_pages_in(&status(), *pid) > PAGES / 2));
        }
        for round in 0..3 {
            for server in &mut servers {
                work(server, &mut random);
                server.check("write 2000");
                // What is merged stays.
                park(&host, server, if options.is_empty() { 1 } else { 1000 });
                work(server, &mut random);
            }
            if round == 1 {
                host.replace_daemon(&["--cold-policy=manual"]);
            }
        }
        for server in &mut servers {
            ask_until_done(|words| host.tool(words), &["detach", &server.pid().to_string()]);
            server.check("check 1");
        }
    }
    // One call less, and it is the filter that is named.
    for missing in
        [libc::SYS_mremap, libc::SYS_sched_setaffinity, libc::SYS_socketpair, libc::SYS_close_range, libc::SYS_ioctl]
    {
        let mut server = start_filtered(program, calls().filter(|number| *number != missing));
        let output = host.tool(&["attach", &server.pid().to_string()]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        // mremap(2) the program needs itself. Its agent can do without a processor of its choice.
        if [libc::SYS_mremap, libc::SYS_sched_setaffinity].contains(&missing) {
            assert!(output.status.success(), "{said}");
        } else {
            assert!(!output.status.success() && said.contains("seccomp filter forbids a system call"), "{said}");
        }
        server.check("check 1");
    }
}

/// As services under systemd's `MemoryDenyWriteExecute=`: the agent's code is mapped from a file there.
#[test]
fn programs_that_may_not_make_memory_executable_are_attached() {
    const SET_MDWE: libc::c_int = 65;
    const REFUSE_EXEC_GAIN: libc::c_ulong = 1;
    let Some(program) = program() else { return };
    let daemon = Daemon::start(&["--no-keeper"]);
    let start = || {
        let mut command = Command::new("env");
        let restrict = || {
            // SAFETY: this request of prctl(2) takes no pointer.
            match unsafe { libc::prctl(SET_MDWE, REFUSE_EXEC_GAIN, 0, 0, 0) } {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            }
        };
        // SAFETY: one system call, without memory.
        unsafe { command.pre_exec(restrict) };
        Server::start_as("1", command, program)
    };
    let mut servers = [start(), start()];
    let shapes = servers.each_ref().map(|server| shape(server.pid()));
    servers.iter().for_each(|server| attach(&daemon, server));
    wait_for("both to share their area", 120, || {
        servers.iter().all(|server| shared_pages(&daemon, server.pid()) >= PAGES * 9 / 10)
    });
    for (server, before) in servers.iter_mut().zip(shapes) {
        assert_eq!(shape(server.pid()).1, before.1, "the program's descriptors");
        work(server, &mut Random::new(7));
        detach(&daemon, server);
        assert_eq!(shape(server.pid()), before);
        server.check("check 1");
    }
}

/// The agent makes no userfaultfd by a call if the daemon has a device for it.
fn has_device() -> bool {
    pagefold_os::uffd::open_device().is_ok()
}

/// In another mount namespace any user may listen at the path that led to the daemon. The agent tells that process nothing.
#[test]
fn an_agent_does_not_greet_another_user() {
    let Some(program) = program() else { return };
    let mut host = Host::start(&[]);
    let mut server = start(program, 0);
    attach_to(&host, &server, &[]);
    host.kill_daemon();
    fs::remove_file(&host.socket).expect("the socket of the dead daemon");
    let listener = sock::packet_socket().expect("a socket");
    let (address, len) = sock::address(host.socket.as_os_str().as_bytes()).expect("an address");
    let fd = listener.raw();
    // SAFETY: the address lives across the call and is as long as said.
    assert_eq!(unsafe { libc::bind(fd, (&raw const address).cast(), len) }, 0);
    let mut command = Command::new("sleep");
    command.arg("1000").uid(65534).gid(65534);
    // The kernel remembers the user that listens.
    // SAFETY: one system call, without memory.
    let listens = unsafe {
        command.pre_exec(move || if libc::listen(fd, 8) == 0 { Ok(()) } else { Err(io::Error::last_os_error()) })
    };
    let _other = Reaped(listens.spawn().expect("sleep"));
    for _ in 0..2 {
        let greeted = sock::accept(&listener).expect("the agent connects");
        let (got, _) = sock::receive(&greeted, &mut [0; 64], 0).expect("the end");
        assert_eq!(got, 0, "it greets another user");
    }
    fs::remove_file(&host.socket).expect("the socket");
    host.restart_daemon(&[]);
    wait_for("the agent to come back", 60, || host.status()["clients"][0]["pid"] == server.pid());
    server.check("check 1");
}

/// What runs already and what comes later; what an operator detaches stays detached.
#[test]
fn a_rule_attaches_what_it_names() {
    let Some(program) = program() else { return };
    // A link: a file that was just written cannot be executed while a child of another test still has it open.
    let dir = tempfile::tempdir_in(program.parent().expect("a directory")).expect("a directory");
    let own = dir.path().join("ruled");
    fs::hard_link(program, &own).expect("a link");
    let mut servers = vec![start(&own, 1)];
    let rule = format!("user=4294967294; exe={}/r*,min=1M,domain=ruled", dir.path().display());
    let daemon = Daemon::start(&["--no-keeper", "--attach", &rule]);
    servers.push(start(&own, 0));
    let other = start(program, 0);
    wait_for("both to share their area", 120, || {
        servers.iter().all(|server| shared_pages(&daemon, server.pid()) >= PAGES * 9 / 10)
    });
    let status = daemon.status();
    let clients = status["clients"].as_array().expect("clients");
    assert!(clients.iter().all(|client| client["domain"] == "ruled" && client["attached"] == true), "{clients:?}");
    assert!(clients.iter().all(|client| client["pid"] != other.pid()), "no rule names it");
    detach(&daemon, &servers[0]);
    let listed = |pid: i32| {
        let status = daemon.status();
        status["clients"].as_array().is_some_and(|clients| clients.iter().any(|client| client["pid"] == pid))
    };
    std::thread::sleep(Duration::from_secs(3));
    assert!(!listed(servers[0].pid()) && listed(servers[1].pid()));
    for server in &mut servers {
        server.check("check 1");
    }
}

/// The preloaded agent loads into none of them: below `run` itself, and below a shell that is a client.
#[test]
fn static_programs_are_entered_under_run() {
    let Some(program) = program() else { return };
    if let Err(errno) = pagefold_os::exec_events::ExecEvents::open() {
        return skipped(&format!("the kernel tells no process events: {errno}"));
    }
    let daemon = Daemon::start(&["--no-keeper"]);
    let run = |manage: &str, domain: &str| {
        let mut command = Command::new(common::TOOL);
        command.args(["run", "--manage", manage, "--domain", domain, "--socket"]).arg(&daemon.socket).arg("--");
        command
    };
    let shell = |mut command: Command| {
        command.args(["sh", "-c", "\"$0\" \"$@\"; true"]);
        command
    };
    let mut servers = [
        Server::start_as("1", run("all", "entered"), program),
        Server::start_as("0", shell(run("all", "entered")), program),
        // It marks nothing.
        Server::start_as("0", run("marked", "entered"), program),
    ];
    let child = wait_for_child(servers[1].pid());
    let pids = [servers[0].pid(), child];
    wait_for("both to share their area", 120, || pids.iter().all(|pid| shared_pages(&daemon, *pid) >= PAGES * 9 / 10));
    let status = daemon.status();
    let clients = status["clients"].as_array().expect("clients");
    let is_entered = |client: &&serde_json::Value| client["domain"] == "entered" && client["attached"] == true;
    assert_eq!(clients.iter().filter(is_entered).count(), 2, "{clients:?}");
    assert!(clients.iter().all(|client| client["pid"] != servers[2].pid()), "{clients:?}");
    let mut random = Random::by_clock();
    for server in &mut servers {
        (0..5).for_each(|_| work(server, &mut random));
        server.check("check 1");
    }
    // All hold the same again; the last one has marked it, and stands still: it is named.
    for server in &mut servers {
        server.check("reset 1");
    }
    // The daemon does not look in between: it would enter the program before that stands still.
    let signal = |pid: i32, signal: i32| {
        // SAFETY: sends a signal to a child of ours.
        unsafe { libc::kill(pid, signal) };
    };
    signal(daemon.pid(), libc::SIGSTOP);
    servers[2].check("mark 1");
    signal(servers[2].pid(), libc::SIGSTOP);
    signal(daemon.pid(), libc::SIGCONT);
    wait_for("its reason", 60, || {
        let status = daemon.status();
        let unmanaged = status["unmanaged_processes"].as_array().cloned().unwrap_or_default();
        let is_named = |process: &serde_json::Value| {
            process["pid"] == servers[2].pid() && process["reason"].as_str().is_some_and(|why| why.contains("stopped"))
        };
        unmanaged.iter().any(is_named)
    });
    signal(servers[2].pid(), libc::SIGCONT);
    wait_for("what all hold to be shared", 120, || {
        [pids[0], pids[1], servers[2].pid()].iter().all(|pid| shared_pages(&daemon, *pid) >= PAGES * 9 / 10)
    });
    servers[2].check("check 1");
}

/// The preloaded agent stands aside beside musl, whose file has no name of its own where its loader is a link.
#[test]
fn programs_of_musl_are_entered_under_run() {
    const SPECS: &str = "/usr/lib/x86_64-linux-musl/musl-gcc.specs";
    let Some(_) = program() else { return };
    if !Path::new(SPECS).exists() {
        return skipped(&format!("{SPECS} is not installed"));
    }
    if let Err(errno) = pagefold_os::exec_events::ExecEvents::open() {
        return skipped(&format!("the kernel tells no process events: {errno}"));
    }
    let Some(program) = c_program_with("attached", &["-specs", SPECS]) else { return };
    let daemon = Daemon::start(&["--no-keeper"]);
    let start = || {
        let mut command = Command::new(common::TOOL);
        command.args(["run", "--manage", "all", "--socket"]).arg(&daemon.socket).arg("--");
        Server::start_as("1", command, &program)
    };
    let mut servers = [start(), start()];
    wait_for("both to share their area", 120, || {
        servers.iter().all(|server| shared_pages(&daemon, server.pid()) >= PAGES * 9 / 10)
    });
    for server in &mut servers {
        server.check("check 1");
    }
}

/// The first child of a process.
fn wait_for_child(pid: i32) -> i32 {
    let first = || pagefold_os::procfs::children(pid).first().copied();
    wait_for("the shell's child", 20, || first().is_some());
    first().expect("it runs")
}

#[test]
fn what_cannot_be_attached_is_refused_in_one_line() {
    let Some(program) = program() else { return };
    let daemon = Daemon::start(&["--no-keeper"]);
    let refused = |pid: i32, reason: &str| {
        let output = daemon.tool(&["attach", &pid.to_string()]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(reason) && said.lines().count() == 1, "{pid}: {said}");
    };
    refused(2, "thread of the kernel");
    refused(daemon.pid(), "the daemon itself");
    let mut gone = Command::new("true").spawn().expect("it starts");
    gone.wait().expect("it ends");
    refused(gone.id() as i32, "no such process");
    let server = start(program, 0);
    attach(&daemon, &server);
    refused(server.pid(), "client already");
    let stopped = start(program, 0);
    // SAFETY: sends a signal to a child of ours.
    unsafe { libc::kill(stopped.pid(), libc::SIGSTOP) };
    wait_for("it to stop", 20, || {
        fs::read_to_string(format!("/proc/{}/stat", stopped.pid())).unwrap().contains(") T ")
    });
    refused(stopped.pid(), "stopped");
    let output = daemon.tool(&["detach", &stopped.pid().to_string()]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("no client"));
    for (arguments, reason) in [
        (&["attach", "--exe", "/nowhere/*"][..], "no program matches"),
        (&["attach", "--user", "nobody-of-that-name"], "there is no user"),
    ] {
        let output = daemon.tool(arguments);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(reason), "{arguments:?}: {said}");
    }
}
