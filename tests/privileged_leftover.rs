//! The leftover: what the budget of mappings keeps private is merged by the kernel's KSM where that runs, and nothing of
//! that is left when a program leaves. So are pages that clones of a template wrote.

mod common;

use common::{Daemon, Server, c_program_with, can_merge, is_root, skipped, wait_for};
use pagefold_os::ksm::{self, Settings};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard};

/// Bytes of the memory that all instances hold, and of what each marks itself if it is asked to.
const AREA: u64 = 32 << 20;
const MARKED: u64 = 2 << 20;
const MIB: u64 = 1 << 20;
/// Far fewer mappings than there are pages.
const FEW_MAPPINGS: [&str; 5] = ["--no-keeper", "--vma-budget", "600", "--scan-interval", "100ms"];

/// KSM is one for the machine: its settings are put back when this is dropped.
struct Ksm {
    _settings: Settings,
    _alone: MutexGuard<'static, ()>,
}

impl Ksm {
    /// `None` after saying what is missing. KSM does not run yet.
    fn take() -> Option<Ksm> {
        static ALONE: Mutex<()> = Mutex::new(());
        if !is_root() {
            skipped("only root changes the settings of KSM");
            return None;
        }
        let alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if !can_merge() {
            return None;
        }
        match Settings::take() {
            Ok(settings) => {
                for (name, value) in [("pages_to_scan", 20_000), ("sleep_millisecs", 10)] {
                    ksm::write(name, value).expect("a setting of KSM's");
                }
                Some(Ksm { _settings: settings, _alone: alone })
            }
            Err(error) => {
                skipped(&error.to_string());
                None
            }
        }
    }

    fn run(&self, runs: bool) {
        // 2: what it merged is unmerged.
        ksm::write("run", if runs { 1 } else { 2 }).expect("KSM's switch");
    }
}

fn program(options: &[&str]) -> Option<PathBuf> {
    c_program_with("scattered", options)
}

/// Three instances, each with an order of its own; the last one marks some memory itself.
fn instances(program: &Path, command: impl Fn() -> Command) -> Vec<Server> {
    let start = |order: &str, marks: bool| {
        let mut command = command();
        if marks {
            command.env("MARKS", "1");
        }
        Server::start_as(order, command, program)
    };
    vec![start("1", false), start("2", false), start("3", true)]
}

/// Memory of the processes and their children in bytes, each page counted once.
fn memory(servers: &[Server]) -> u64 {
    let of = |pid: i32| {
        let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).expect("it lives");
        let line = text.lines().find_map(|line| line.strip_prefix("Pss:")).expect("the kernel tells");
        line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") * 1024
    };
    servers.iter().flat_map(family).map(of).sum()
}

/// A process and its children.
fn family(server: &Server) -> Vec<i32> {
    let pid = server.pid();
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).expect("it lives");
    let children = children.split_ascii_whitespace().map(|child| child.parse().expect("a number"));
    std::iter::once(pid).chain(children).collect()
}

/// The memory once it has not become less for a while.
fn settled(servers: &[Server]) -> u64 {
    let (mut least, mut since) = (u64::MAX, 0);
    while since < 15 {
        let now = memory(servers);
        since = if now + MIB / 4 < least { 0 } else { since + 1 };
        least = least.min(now);
        std::thread::sleep(std::time::Duration::from_millis(200));
    }
    least
}

/// Bytes of a process that KSM looks at.
fn marked(server: &Server) -> u64 {
    marked_in(server, 0..u64::MAX)
}

/// Those between two addresses.
fn marked_in(server: &Server, range: std::ops::Range<u64>) -> u64 {
    let text = fs::read_to_string(format!("/proc/{}/smaps", server.pid())).expect("it lives");
    let (mut mapping, mut all) = (0..0, 0);
    for line in text.lines() {
        let ends = line.split(' ').next().and_then(|word| word.split_once('-'));
        if let Some((Ok(start), Ok(end))) =
            ends.map(|(start, end)| (u64::from_str_radix(start, 16), u64::from_str_radix(end, 16)))
        {
            mapping = start.max(range.start)..end.min(range.end);
        } else if line.starts_with("VmFlags:") && line.split(' ').any(|flag| flag == "mg") {
            all += mapping.end.saturating_sub(mapping.start);
        }
    }
    all
}

fn leftover(daemon: &Daemon, server: &Server) -> Value {
    let status = daemon.status();
    let clients = status["clients"].as_array().cloned().unwrap_or_default();
    clients
        .into_iter()
        .find(|client| client["pid"] == server.pid())
        .map(|client| client["leftover"].clone())
        .unwrap_or_default()
}

fn wait_for_state(daemon: &Daemon, servers: &[Server], state: &str) {
    wait_for(&format!("each leftover to be: {state}"), 120, || {
        servers.iter().all(|server| leftover(daemon, server)["state"].as_str().is_some_and(|is| is.contains(state)))
    });
}

/// Every byte is right whatever the programs do.
fn work(servers: &mut [Server]) {
    for word in ["check 1", "write 300", "fork 2", "discard 200", "fork 1", "write 100"] {
        for server in servers.iter_mut() {
            server.check(word);
        }
    }
}

fn end(servers: Vec<Server>) {
    for server in servers {
        assert!(server.end().success(), "a program failed");
    }
}

#[test]
fn with_ksm_scattered_pages_take_no_more_memory_than_by_ksm_alone() {
    let Some(ksm) = Ksm::take() else { return };
    let Some(program) = program(&[]) else { return };
    ksm.run(true);
    let daemon = Daemon::start(&FEW_MAPPINGS);
    let alone = instances(&program, || daemon.run(&["--backend", "ksm"]));
    let by_ksm = settled(&alone);
    assert!(by_ksm < AREA + AREA / 2, "{} MiB", by_ksm / MIB);
    end(alone);
    ksm.run(false);
    let mut servers = instances(&program, || daemon.run(&["--manage", "all"]));
    wait_for_state(&daemon, &servers, "KSM does not run");
    for server in &servers[..2] {
        assert_eq!((marked(server), leftover(&daemon, server)["handed_bytes"].as_u64()), (0, Some(0)));
    }
    let private = memory(&servers);
    assert!(private > 2 * AREA + AREA / 2, "{} MiB", private / MIB);
    let said = String::from_utf8_lossy(&daemon.tool(&["status"]).stdout).into_owned();
    assert!(said.contains("leftover: private: KSM does not run (echo 1 > "), "{said}");
    ksm.run(true);
    wait_for_state(&daemon, &servers, "handed to KSM");
    // An agent has memory of its own in each program.
    wait_for("what is left to be merged", 120, || memory(&servers) < by_ksm + by_ksm / 10 + 3 * MIB);
    let both = settled(&servers);
    println!("private {} MiB, by KSM alone {}, handed to KSM {}", private / MIB, by_ksm / MIB, both / MIB);
    let told = leftover(&daemon, &servers[0]);
    assert!(told["handed_bytes"].as_u64() > Some(AREA / 2), "{told}");
    assert!(told["ksm_pages"].as_u64() > Some(4000), "{told}");
    work(&mut servers);
    daemon.verify();
    // Private again, as far as the program did not ask for it.
    for (server, own) in servers.iter_mut().zip([0, 0, MARKED]) {
        let output = daemon.tool(&["unmerge", &server.pid().to_string()]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        server.check("check 1");
        assert_eq!(marked(server), own);
        let told = leftover(&daemon, server);
        assert_eq!((told["state"].as_str(), told["handed_bytes"].as_u64()), (Some(""), Some(0)), "{told}");
    }
    assert!(memory(&servers) > 2 * AREA + AREA / 2);
    work(&mut servers);
    end(servers);
}

#[test]
fn detached_programs_leave_ksm() {
    let Some(ksm) = Ksm::take() else { return };
    let Some(program) = program(&["-static"]) else { return };
    ksm.run(true);
    let daemon = Daemon::start(&FEW_MAPPINGS);
    let mut servers = instances(&program, || Command::new("env"));
    let ask = |verb: &str, server: &Server| {
        common::ask_until_done(|words| daemon.tool(words), &[verb, &server.pid().to_string()]);
    };
    servers.iter().for_each(|server| ask("attach", server));
    wait_for_state(&daemon, &servers, "handed to KSM");
    wait_for("what is left to be merged", 120, || memory(&servers) < AREA + AREA / 2);
    work(&mut servers);
    for (server, own) in servers.iter_mut().zip([0, 0, MARKED]) {
        ask("detach", server);
        server.check("check 1");
        assert_eq!(marked(server), own);
    }
    work(&mut servers);
    end(servers);
}

/// No agent can live beside their filter, which forbids the call by which KSM gets their memory, and is in force again
/// afterwards.
#[test]
fn programs_with_a_filter_are_attached_to_ksm() {
    let Some(ksm) = Ksm::take() else { return };
    let Some(program) = program(&["-static"]) else { return };
    let daemon = Daemon::start(&FEW_MAPPINGS);
    let start = |order: &str| {
        let mut command = Command::new("env");
        command.arg("FILTERED=1");
        Server::start_as(order, command, &program)
    };
    let mut servers = vec![start("1"), start("2")];
    let tool = |arguments: &[&str], server: &Server| {
        let output = daemon.tool(&[arguments, &[server.pid().to_string().as_str()]].concat());
        let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        (output.status.success(), said)
    };
    for (arguments, why) in [
        (&["attach"][..], "seccomp filter"),
        (&["attach", "--backend", "ksm"], "KSM does not run"),
        (&["attach", "--backend", "ksm", "--domain", "own"], "leave --domain"),
    ] {
        let (done, said) = tool(arguments, &servers[0]);
        assert!(!done && said.contains(why), "{said}");
    }
    ksm.run(true);
    assert!(!tool(&["attach", "--backend", "agent"], &servers[0]).0);
    for server in &servers {
        wait_for("it to be attached", 60, || {
            let (done, said) = tool(&["attach"], server);
            assert!(said.contains(if done { "KSM merges it instead" } else { "could be borrowed" }), "{said}");
            done
        });
        assert!(marked(server) >= AREA);
    }
    wait_for("their pages to be merged", 120, || memory(&servers) < AREA + AREA / 2);
    for server in &mut servers {
        for word in ["check 1", "write 300", "discard 200", "write 100"] {
            server.check(word);
        }
        assert!(common::comes(60, || tool(&["detach"], server).0), "it is not detached");
        assert_eq!(marked(server), 0);
        server.check("check 1");
    }
    let status = |server: &Server| fs::read_to_string(format!("/proc/{}/status", server.pid())).expect("it lives");
    assert!(servers.iter().all(|server| status(server).contains("Seccomp:\t2")));
    // A forbidden call is the end of it.
    let mut last = servers.pop().expect("two");
    last.tell("forbidden 1");
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&last.end()), Some(libc::SIGSYS));
    end(servers);
}

#[test]
fn memory_that_ksm_has_is_parked_and_returns() {
    let Some(ksm) = Ksm::take() else { return };
    let Some(program) = program(&[]) else { return };
    ksm.run(true);
    let daemon = Daemon::start(&[&FEW_MAPPINGS[..], &["--cold-policy", "manual"]].concat());
    let mut servers = instances(&program, || daemon.run(&["--manage", "all"]));
    wait_for_state(&daemon, &servers, "handed to KSM");
    wait_for("what is left to be merged", 120, || memory(&servers) < AREA + AREA / 2);
    for _ in 0..2 {
        for server in &servers {
            let output = daemon.tool(&["park", &server.pid().to_string()]);
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
        work(&mut servers);
    }
    for server in &mut servers {
        assert!(daemon.tool(&["unpark", &server.pid().to_string()]).status.success());
        server.check("check 1");
    }
    end(servers);
}

/// KSM knows no domains, and merges locked memory too.
#[test]
fn what_is_not_to_be_handed_stays_private() {
    let Some(ksm) = Ksm::take() else { return };
    let Some(program) = program(&[]) else { return };
    ksm.run(true);
    let mut daemon = Daemon::start(&FEW_MAPPINGS);
    let servers = instances(&program, || daemon.run(&["--manage", "all", "--domain", "owner"]));
    wait_for_state(&daemon, &servers, "its domain has a name");
    assert_eq!(servers.iter().map(marked).collect::<Vec<_>>(), [0, 0, MARKED]);
    end(servers);
    let mut servers = instances(&program, || daemon.run(&["--manage", "all"]));
    wait_for_state(&daemon, &servers, "handed to KSM");
    // Locked memory is the program's alone.
    let pages = AREA / 4096;
    let area = 4096 * servers[0].check(&format!("lock {pages}")) as u64;
    assert_eq!(marked_in(&servers[0], area..area + AREA), 0);
    assert!(servers[1..].iter().all(|server| marked(server) > AREA / 2));
    // Nor has KSM what the program tracks by a userfaultfd of its own, whose marks it would drop.
    let tracked = AREA / 8;
    let area = 4096 * servers[1].check(&format!("track {}", tracked / 4096)) as u64;
    assert_eq!(marked_in(&servers[1], area..area + tracked), 0);
    servers[1].check("untrack 1");
    // The next daemon does not hand it over, and takes back what this one did.
    daemon.replace_with(&[&FEW_MAPPINGS[..], &["--leftover", "private"]].concat());
    wait_for_state(&daemon, &servers[1..], "--leftover private");
    wait_for("what was handed to be taken back", 60, || servers[1..].iter().map(marked).sum::<u64>() == MARKED);
    servers[0].check("write 300");
    work(&mut servers[1..]);
    end(servers);
}

/// Bytes of a template, and what each clone writes of it: pages that all clones write, each elsewhere.
const TEMPLATE: u64 = 16 << 20;
const WRITTEN: u64 = TEMPLATE / 2;

/// A template's file, in a directory that is removed with it.
struct Template {
    path: PathBuf,
    _dir: tempfile::TempDir,
}

impl Template {
    fn make(program: &Path) -> Template {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
        let path = dir.path().join("template");
        let mut command = Command::new("env");
        command.env("TEMPLATE", &path);
        end(vec![Server::start_as("make", command, program)]);
        Template { path, _dir: dir }
    }

    /// Three clones; each maps the file.
    fn clones(&self, program: &Path, command: impl Fn() -> Command) -> Vec<Server> {
        let clone = |number: &str| {
            let mut command = command();
            command.env("TEMPLATE", &self.path);
            Server::start_as(number, command, program)
        };
        ["1", "2", "3"].map(clone).into()
    }
}

/// Waits until the clones hold in common what they all wrote: nearly all that two of three had for themselves.
fn wait_for_common(what: &str, servers: &[Server], private: u64) {
    wait_for(what, 120, || memory(servers) < private - 2 * WRITTEN + WRITTEN / 4);
    println!("{what}: {} MiB, then {}", private / MIB, memory(servers) / MIB);
}

/// Each byte is right, also where a discard has the template's own page return.
fn work_of_clones(servers: &mut [Server]) {
    for word in ["check 1", "write 300", "discard 200", "write 100"] {
        for server in servers.iter_mut() {
            server.check(word);
        }
    }
}

#[test]
fn what_clones_of_a_file_wrote_is_merged_by_ksm_and_the_rest_stays_the_files() {
    let Some(ksm) = Ksm::take() else { return };
    let Some(program) = c_program_with("clones", &[]) else { return };
    let template = Template::make(&program);
    let daemon = Daemon::start(&["--no-keeper", "--scan-interval", "100ms"]);
    ksm.run(false);
    let mut servers = template.clones(&program, || daemon.run(&["--manage", "all"]));
    let mut own = template.clones(&program, || daemon.run(&["--manage", "all", "--domain", "owner"]));
    let private = memory(&servers);
    assert!(servers.iter().all(|server| marked(server) == 0));
    ksm.run(true);
    wait_for_state(&daemon, &servers, "private mappings of files handed to KSM");
    wait_for_common("clones of a file under run", &servers, private);
    for server in &servers {
        assert_eq!(leftover(&daemon, server)["handed_bytes"].as_u64(), Some(TEMPLATE));
        // KSM's pages count as the program's own: no page of the file's became one.
        let smaps = fs::read_to_string(format!("/proc/{}/smaps", server.pid())).expect("it lives");
        let (_, area) = smaps.split_once(template.path.to_str().expect("a name")).expect("it maps the file");
        let copies = area.lines().find_map(|line| line.strip_prefix("Anonymous:")).expect("the kernel tells");
        assert_eq!(copies.trim(), format!("{} kB", WRITTEN / 1024));
    }
    let said = String::from_utf8_lossy(&daemon.tool(&["status"]).stdout).into_owned();
    assert!(said.contains("private mappings of files handed to KSM"), "{said}");
    assert!(own.iter().all(|server| marked(server) == 0), "KSM knows no domains");
    work_of_clones(&mut servers);
    work_of_clones(&mut own);
    for server in &mut servers {
        assert!(daemon.tool(&["unmerge", &server.pid().to_string()]).status.success());
        assert_eq!(marked(server), 0);
        server.check("check 1");
    }
    end(own);
    end(servers);
}

#[test]
fn what_attached_clones_of_a_file_wrote_is_merged_by_ksm() {
    let Some(ksm) = Ksm::take() else { return };
    let Some(program) = c_program_with("clones", &["-static"]) else { return };
    let template = Template::make(&program);
    ksm.run(true);
    let daemon = Daemon::start(&["--no-keeper", "--scan-interval", "100ms"]);
    let ask = |words: &[&str], server: &Server| {
        common::ask_until_done(|words| daemon.tool(words), &[words, &[&server.pid().to_string()]].concat())
    };
    for way in ["agent", "ksm"] {
        let mut servers = template.clones(&program, || Command::new("env"));
        let private = memory(&servers);
        for server in &servers {
            ask(&["attach", "--backend", way], server);
        }
        wait_for_common(&format!("clones of a file, attached by {way}"), &servers, private);
        work_of_clones(&mut servers);
        for server in &mut servers {
            ask(&["detach"], server);
            assert_eq!(marked(server), 0);
            server.check("check 1");
        }
        end(servers);
    }
}

/// Forks share what none of them wrote. What they wrote the agents merge, or KSM where it is a file's.
#[test]
fn what_forks_of_a_zygote_wrote_is_merged() {
    let Some(ksm) = Ksm::take() else { return };
    let Some(program) = c_program_with("clones", &[]) else { return };
    let template = Template::make(&program);
    let daemon = Daemon::start(&["--no-keeper", "--scan-interval", "100ms"]);
    for of_file in [false, true] {
        ksm.run(false);
        let mut command = daemon.run(&["--manage", "all"]);
        command.env("CLONES", "3");
        if of_file {
            command.env("TEMPLATE", &template.path);
        }
        let mut servers = vec![Server::start_as("zygote", command, &program)];
        let private = memory(&servers);
        ksm.run(of_file);
        wait_for_common(if of_file { "forks that map a file" } else { "forks" }, &servers, private);
        work_of_clones(&mut servers);
        end(servers);
    }
}
