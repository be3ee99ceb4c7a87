//! The park policy: programs that become idle are parked without a request, and have every byte when they go on.

mod common;

use common::can_merge;
use common::cold::{Host, Served, program};
use common::{TOOL, installed, is_root, skipped, wait_for};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The client's memory.
const MIB: u64 = 64;
const PAGES: u64 = MIB * 256;

/// A daemon with a policy that is the only reason for evictions.
fn host(idle: &str, within: &str) -> Host {
    Host::start(&policy(idle, within).each_ref().map(String::as_str))
}

fn policy(idle: &str, within: &str) -> [String; 4] {
    let [idle, within] = [format!("--park-idle={idle}"), format!("--park-within={within}")];
    ["--cold-policy=manual".into(), "--cold-scan-interval=200ms".into(), idle, within]
}

fn activity(host: &Host, pid: i32) -> String {
    host.cold(pid).map_or(String::new(), |client| client["activity"].as_str().expect("a word").to_owned())
}

fn wait_until_parked(host: &Host, pid: i32) {
    // A client that has just been woken is said to be parked until the policy looks at it.
    let is_out = || host.number(pid, "pages_out") > PAGES * 9 / 10;
    wait_for("the policy to park the client", 60, || activity(host, pid) == "parked" && is_out());
    wait_for("the room for copies of its pages to be freed", 10, || kib_of(pid, "pagefold-cold-channel") < 256);
}

/// What the process has in memory of the files with this name, in KiB.
fn kib_of(pid: i32, name: &str) -> u64 {
    let smaps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).expect("it lives");
    let of_file = smaps.split_inclusive("VmFlags:").filter(|mapping| mapping.contains(name));
    of_file.filter_map(|mapping| mapping.split_once("Rss:")?.1.split_whitespace().next()?.parse::<u64>().ok()).sum()
}

/// The daemon reads a file of the test's in the place of the kernel's.
#[test]
fn pressure_on_memory_brings_parking_forward() {
    const PRESSURE: &str = "/proc/pressure/memory";
    if !can_merge() || program().is_none() || installed("unshare").is_none() {
        return;
    }
    if !is_root() || std::fs::read(PRESSURE).is_err() {
        return skipped("only root mounts over /proc/pressure/memory, where the kernel has it");
    }
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("memory");
    let say = |avg10: &str| {
        std::fs::write(
            &file,
            format!(
                "some avg10={avg10} avg60=0.00 avg300=0.00 total=1
"
            ),
        )
        .expect("a file");
    };
    say("0.00");
    // More than the test waits for; an eighth is less.
    let host = Host::start_by(|socket| {
        let script = format!(r#"mount --bind "$0" {PRESSURE} && exec "$@""#);
        let mut daemon = std::process::Command::new("unshare");
        daemon
            .args(["-m", "sh", "-c", &script])
            .arg(&file)
            .args([TOOL, "daemon", "--priority=normal", "--no-keeper", "--socket"])
            .arg(socket);
        daemon.args(["--cold-policy=manual", "--park-idle=3m", "--park-within=1s"]).spawn().expect("unshare runs")
    });
    let mut client = Served::start(&host, &[], MIB);
    wait_for("the client to be idle", 60, || activity(&host, client.pid()) == "idle");
    assert_eq!(host.number(client.pid(), "pages_evicted"), 0);
    say("50.00");
    wait_until_parked(&host, client.pid());
    client.does("check");
}

#[test]
fn an_idle_program_is_parked_and_a_touch_wakes_it() {
    if !can_merge() || program().is_none() {
        return;
    }
    let host = host("2s", "1s");
    let mut client = Served::start(&host, &[], MIB);
    let pid = client.pid();
    // Longer than the idle time.
    client.send("storm 4000");
    let end = Instant::now() + Duration::from_secs(3);
    while Instant::now() < end {
        let seen = activity(&host, pid);
        assert!(["busy", "unwatched"].contains(&&*seen), "{seen} while it works");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(host.number(pid, "pages_evicted"), 0);
    client.expect_right("storm");
    for _ in 0..2 {
        wait_until_parked(&host, pid);
        let text = String::from_utf8(host.tool(&["status"]).stdout).expect("text");
        assert!(text.contains(" (parked)"), "{text}");
        let memory = pagefold_os::procfs::memory(pid).expect("it lives").anonymous;
        assert!(memory < (MIB << 20) / 8, "{memory} bytes are left in memory");
        client.does("check");
        wait_for("the policy to see it", 10, || ["waking", "busy", "idle"].contains(&&*activity(&host, pid)));
    }
    // A request wins: what an operator brings back has the whole idle time.
    wait_until_parked(&host, pid);
    assert!(host.tool(&["unpark", &pid.to_string()]).status.success());
    assert_eq!(host.number(pid, "pages_out"), 0);
    wait_for("the policy to see that", 10, || activity(&host, pid) != "parked");
    client.does("check");
    assert_eq!(host.number(pid, "pages_lost"), 0);
}

/// What stays parked leaves memory for the disk, and comes back from there, also to a successor of a killed daemon.
#[test]
fn what_stays_parked_goes_to_the_file() {
    if !can_merge() || program().is_none() {
        return;
    }
    let args = ["--park-idle=2s", "--park-within=500ms", "--tier-file-after=2s"];
    let mut host = Host::start(&[&["--cold-policy=manual", "--cold-scan-interval=200ms"][..], &args].concat());
    let mut client = Served::start(&host, &[], MIB);
    let pid = client.pid();
    let in_file = |host: &Host| {
        wait_until_parked(host, pid);
        wait_for("the tier's memory to be empty but for its indexes", 60, || {
            let domain = &host.status()["cold"]["domains"][0];
            let number = |field: &str| domain[field].as_u64().expect("a number");
            number("disk_bytes") > 8 << 20 && number("memory_bytes") - number("metadata_bytes") < 4 << 20
        });
    };
    in_file(&host);
    client.does("check");
    in_file(&host);
    host.kill_daemon();
    client.does("check");
    host.wait_for_client(pid);
    in_file(&host);
    client.does("fill");
    client.does("check");
    assert_eq!(host.number(pid, "pages_lost"), 0);
}

/// The parking takes seconds here, so that both come in the middle of it.
#[test]
fn a_touch_ends_a_parking_and_a_killed_daemon_loses_nothing_of_it() {
    if !can_merge() || program().is_none() {
        return;
    }
    let mut host = host("4s", "4s");
    let mut client = Served::start(&host, &[], MIB);
    let pid = client.pid();
    let in_the_middle = |host: &Host| {
        wait_for("a parking to begin", 60, || host.number(pid, "pages_out") > 0);
        let out = host.number(pid, "pages_out");
        assert!(out < PAGES * 3 / 4 && activity(host, pid) == "idle", "{out} pages went at once");
    };
    in_the_middle(&host);
    client.does("check");
    let out = host.number(pid, "pages_out");
    std::thread::sleep(Duration::from_secs(2));
    let later = host.number(pid, "pages_out");
    assert!(later <= out + PAGES / 8, "the parking went on: {out} pages, then {later}");
    in_the_middle(&host);
    host.kill_daemon();
    client.does("check");
    host.wait_for_client(pid);
    // The successor has the same policy.
    wait_until_parked(&host, pid);
    host.kill_daemon();
    client.does("check");
    host.wait_for_client(pid);
    assert_eq!(host.number(pid, "pages_lost"), 0);
}

/// A program that reads the same scattered pages each time that it wakes, all but the first a moment later: a reply that is
/// computed. The second time the pages are there before it asks, and later too when the daemon is another.
#[test]
fn what_a_program_touches_when_it_wakes_comes_before_it_asks_the_next_time() {
    let Some(python) = common::python().filter(|_| can_merge()) else { return };
    let script = "
import sys, mmap, time
pages = 16384
area = mmap.mmap(-1, pages * 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
def stamp(i): return (i * 2654435761).to_bytes(8, 'little') * 8
for i in range(pages): area[i * 4096:i * 4096 + 64] = stamp(i)
wanted = [(i * 7919) % pages for i in range(600)]
print('ready', flush=True)
for line in sys.stdin:
    for n, i in enumerate(wanted):
        if area[i * 4096:i * 4096 + 64] != stamp(i): sys.exit(f'page {i} is wrong')
        if n == 0: time.sleep(0.4)
    print('right', flush=True)
";
    let mut host = host("2s", "500ms");
    let mut command = host.run(&[]);
    command.arg(python).args(["-c", script]);
    let mut client = Served::start_of(command);
    let pid = client.pid();
    host.wait_for_client(pid);
    let mut wake = |host: &Host| {
        let before = host.number(pid, "refaults");
        client.does("reply");
        host.number(pid, "refaults") - before
    };
    let mut refaults = Vec::new();
    for _ in 0..2 {
        wait_until_parked(&host, pid);
        refaults.push(wake(&host));
    }
    // The keeper starts the next one.
    wait_until_parked(&host, pid);
    host.kill_daemon();
    host.wait();
    host.wait_for_client(pid);
    refaults.push(wake(&host));
    wait_until_parked(&host, pid);
    let args = policy("2s", "500ms");
    host.child =
        common::cold::spawn(&host.socket, &[&["--replace"], &args.each_ref().map(String::as_str)[..]].concat());
    wait_for("the daemon to be replaced", 60, || {
        let status = host.tool(&["status", "--json"]).stdout;
        let status: serde_json::Value = serde_json::from_slice(&status).unwrap_or_default();
        status["pid"] == host.child.id()
    });
    host.wait_for_client(pid);
    refaults.push(wake(&host));
    let is_spared = |later: &[u64]| later.iter().all(|later| *later < refaults[0] / 4);
    assert!(refaults[0] > 200 && is_spared(&refaults[1..]), "faults of each waking: {refaults:?}");
    assert_eq!(host.number(pid, "pages_lost"), 0);
}

/// A control group of version 2 that can be frozen; removed in the end.
struct Freezer(PathBuf);

impl Freezer {
    fn new() -> Option<Freezer> {
        let roots = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].map(PathBuf::from);
        let root = roots.into_iter().find(|root| root.join("cgroup.procs").exists())?;
        let path = root.join(format!("pagefold-test-idle-{}", std::process::id()));
        std::fs::create_dir(&path).ok()?;
        Some(Freezer(path)).filter(|made| made.0.join("cgroup.freeze").exists())
    }

    fn put(&self, file: &str, text: &str) {
        std::fs::write(self.0.join(file), text).unwrap_or_else(|error| panic!("{file}: {error}"));
    }
}

impl Drop for Freezer {
    fn drop(&mut self) {
        let _ = std::fs::write(self.0.join("cgroup.freeze"), "0");
        wait_for("the group to be empty", 10, || std::fs::remove_dir(&self.0).is_ok());
    }
}

/// Its agent is frozen with it. It was taken for gone after ten seconds, and other clients waited for as long.
#[test]
fn a_frozen_or_stopped_program_keeps_its_agent() {
    if !can_merge() || program().is_none() {
        return;
    }
    let Some(freezer) = Freezer::new() else {
        return skipped("no control group of version 2 can be made here");
    };
    let host = Host::start(&["--cold-policy=manual", "--park-idle=4s", "--park-within=1s"]);
    let mut clients = [(); 2].map(|()| Served::start(&host, &[], MIB));
    let [frozen, stopped] = [clients[0].pid(), clients[1].pid()];
    // The evictor has asked both agents, and asks them again after the five seconds of its scans: none is frozen with a
    // request in its hands.
    std::thread::sleep(Duration::from_millis(1500));
    freezer.put("cgroup.procs", &frozen.to_string());
    freezer.put("cgroup.freeze", "1");
    // SAFETY: a process that this test started.
    unsafe { libc::kill(stopped, libc::SIGSTOP) };
    wait_for("the program to stop", 10, || pagefold_os::procfs::is_stopped(stopped));
    let began = Instant::now();
    host.tool(&["park", "--all"]);
    assert!(began.elapsed() < Duration::from_secs(8), "park waited for an agent that cannot answer");
    // A client that runs is served meanwhile.
    let other = Served::start(&host, &[], MIB);
    wait_until_parked(&host, other.pid());
    std::thread::sleep(Duration::from_secs(17).saturating_sub(began.elapsed()));
    for pid in [frozen, stopped] {
        let client = host.cold(pid).expect("a client");
        assert!(client["connected"] == true && client["pages_out"] == 0, "{client}");
    }
    freezer.put("cgroup.freeze", "0");
    // SAFETY: kill(2) takes no pointer; `stopped` is the test's own child, not yet reaped.
    unsafe { libc::kill(stopped, libc::SIGCONT) };
    for client in &mut clients {
        client.does("check");
        wait_until_parked(&host, client.pid());
        client.does("check");
    }
}

/// What is merged stays merged; the rest is lent to the cold tier while it is idle, and merged again after it has worked for
/// a while.
#[test]
fn idle_programs_that_are_merged_live_are_parked_and_merged_again_when_they_work() {
    if !can_merge() || program().is_none() {
        return;
    }
    let host = host("2s", "500ms");
    // The first has twins in the second for half of its memory.
    let plain = std::process::Command::new("env");
    let mut clients = [Served::start_live(&host, 32), Served::start_by(plain, 16)];
    let pids = [clients[0].pid(), clients[1].pid()];
    common::ask_until_done(|words| host.tool(words), &["attach", &pids[1].to_string()]);
    let sharing = |pid: i32| {
        let status = host.status();
        let client = status["clients"].as_array().expect("a list").iter().find(|client| client["pid"] == pid).cloned();
        client.map_or(0, |client| client["stats"]["pages_sharing"].as_u64().expect("a number"))
    };
    for _ in 0..2 {
        // All but a few of the second one's pages are merged.
        for (pid, out) in pids.into_iter().zip([1000, 0]) {
            wait_for("the policy to park it", 90, || {
                activity(&host, pid) == "parked" && host.number(pid, "pages_out") >= out
            });
        }
        assert!(pids.iter().all(|pid| sharing(*pid) > 0), "what was merged before they were idle is merged still");
        clients.iter_mut().for_each(|client| client.does("check"));
    }
    clients.iter_mut().for_each(|client| client.send("storm 8000"));
    for pid in pids {
        wait_for("its memory to be merged again", 60, || host.cold(pid).is_none());
    }
    clients.iter_mut().for_each(|client| client.expect_right("storm"));
    for (client, pid) in clients.iter_mut().zip(pids) {
        wait_for("the policy to park it once more", 90, || activity(&host, pid) == "parked");
        client.does("check");
        assert_eq!(host.number(pid, "pages_lost"), 0);
    }
}
