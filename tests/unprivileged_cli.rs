//! The command line as a whole: one style through all commands, and what it says about itself is so.

mod common;

use common::Reaped;
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::process::{Command, Output, Stdio};
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

struct Tool {
    dir: tempfile::TempDir,
}

impl Tool {
    fn new() -> Tool {
        Tool { dir: tempfile::tempdir().expect("a directory") }
    }

    /// The tool with stores, mounts and configuration of its own.
    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
        command.args(args).current_dir(self.dir.path()).stdin(Stdio::null());
        command.env("PAGEFOLD_CONFIG", "none").env("PAGEFOLD_STORE", self.dir.path().join("store"));
        command.env("PAGEFOLD_RUNTIME_DIR", self.dir.path().join("run")).env_remove("NO_COLOR");
        command
    }

    fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().expect("the tool runs")
    }

    fn socket(&self) -> String {
        self.dir.path().join("s").display().to_string()
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

/// Names of the commands in a help text.
fn listed(help: &str) -> Vec<String> {
    let Some(list) = help.split("Commands:").nth(1) else { return Vec::new() };
    let list = list.split("Options:").next().unwrap_or(list);
    let names = list.lines().filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    names.filter_map(|line| line.split_whitespace().next()).filter(|name| *name != "help").map(str::to_owned).collect()
}

/// Every command that does something, and its help.
fn leaves(tool: &Tool) -> Vec<(Vec<String>, String)> {
    let help = |path: &[String]| {
        let args: Vec<&str> = path.iter().map(String::as_str).chain(["--help"]).collect();
        text(&tool.run(&args).stdout)
    };
    let mut leaves = Vec::new();
    for name in listed(&help(&[])) {
        let members = listed(&help(std::slice::from_ref(&name)));
        for member in &members {
            let path = vec![name.clone(), member.clone()];
            leaves.push((path.clone(), help(&path)));
        }
        if members.is_empty() {
            let path = vec![name];
            leaves.push((path.clone(), help(&path)));
        }
    }
    assert!(leaves.len() > 25, "{}", leaves.len());
    leaves
}

/// The long options in a help text with the names of their values.
fn options(help: &str) -> Vec<(String, Option<String>)> {
    let of_line = |line: &str| {
        let line = line.trim_start();
        let at = line.starts_with('-').then(|| line.find("--"))??;
        let name: String = line[at + 2..].chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '-').collect();
        let rest = &line[at + 2 + name.len()..];
        let value = rest.strip_prefix(" <").and_then(|rest| rest.split('>').next()).map(str::to_owned);
        Some((name, value))
    };
    help.split("Examples:").next().unwrap_or_default().lines().filter_map(of_line).collect()
}

#[test]
fn sizes_and_times_are_taken_as_people_write_them() {
    let tool = Tool::new();
    let mut seen = BTreeSet::new();
    for (path, help) in leaves(&tool) {
        for (name, value) in options(&help) {
            let value = value.unwrap_or_default();
            let unit = ["_MS", "_S", "_BYTES", "-ms", "-s", "-bytes"].iter().any(|end| name.ends_with(end));
            let bare = ["MS", "S", "SECONDS", "BYTES", "MIB", "KIB"].contains(&value.as_str());
            assert!(!bare && (!unit || name == "max-bytes"), "{path:?} --{name} <{value}>: take SIZE or TIME");
            let (good, hint) = match value.as_str() {
                "SIZE" => (["10G", "512MiB", "1.5T"], "is no size; write 4096, 512M, 1.5GiB or 2TB"),
                "TIME" => (["5s", "1h", "250ms"], "is no time; write 2 (seconds), 250ms, 1.5m, 1h or 1d"),
                _ => continue,
            };
            seen.insert(value);
            let wrong = if path[0] == "run" { 125 } else { 2 };
            let said = |text: &str| {
                let option = format!("--{name}={text}");
                let args: Vec<&str> = path.iter().map(String::as_str).chain([option.as_str()]).collect();
                // Something else is wrong as well, so that nothing is done.
                let output = tool.command(&args).arg("--no-such-option").output().expect("the tool runs");
                assert_eq!(output.status.code(), Some(wrong));
                self::text(&output.stderr)
            };
            assert!(said("lots").contains(hint) || said("lots").contains("--no-such-option"), "{}", said("lots"));
            for good in good {
                assert!(said(good).contains("--no-such-option"), "{path:?} --{name}={good}: {}", said(good));
            }
            let alone = format!("--{name}=lots");
            let args: Vec<&str> = path.iter().map(String::as_str).chain([alone.as_str()]).collect();
            let said = tool.command(&args).output().expect("the tool runs");
            assert_eq!(said.status.code(), Some(wrong), "{path:?} {alone}");
            assert!(self::text(&said.stderr).contains(hint), "{path:?} {alone}: {}", self::text(&said.stderr));
        }
    }
    assert_eq!(seen.len(), 2, "{seen:?}");
}

#[test]
fn exit_codes_are_those_of_the_help_text() {
    let tool = Tool::new();
    let help = text(&tool.run(&["--help"]).stdout);
    let documented = help.split("Exit status:").nth(1).expect("exit codes");
    for code in ["  0  ", "  1  ", "  2  ", "125", "126", "127"] {
        assert!(documented.contains(code), "{code} is not documented:\n{documented}");
    }
    let socket = tool.socket();
    std::fs::write(tool.dir.path().join("plain"), "no program").expect("a file");
    let run = |program: &'static str| vec!["run", "--backend", "remap", "--socket", &socket, "--", program];
    let merges = tool.run(&["doctor"]).status.success();
    let slashes = "/".repeat(100);
    for (args, code) in [
        (vec!["--version"], 0),
        (vec!["image", "ls"], 0),
        (vec!["disk", "status"], 0),
        (vec!["status", "--socket", &socket], 1),
        (vec!["park", "--all", "--socket", &socket], 1),
        (vec!["park", "1", "2", "--socket", &socket], 1),
        (vec!["unpark", "1", "2", "--socket", &socket], 1),
        (vec!["unmerge", "1", "2", "--socket", &socket], 1),
        (vec!["pause", "1", "2", "--socket", &socket], 1),
        (vec!["resume", "1", "2", "--socket", &socket], 1),
        (vec!["verify", "--socket", &socket], 1),
        (vec!["man", "plain"], 1),
        (vec!["scan", "/no/such/file"], 1),
        (vec!["image", "mount", "nothing", "/mnt"], 1),
        (vec!["image", "exec", "nothing", "--", "true"], 125),
        (vec!["image", "build", "--name", "a", "plain"], 1),
        (vec!["disk", "umount", "/no/such/mount"], 1),
        (vec!["man", "/proc/nowhere"], 1),
        (vec![], 2),
        (vec!["nonsense"], 2),
        (vec!["park"], 2),
        (vec!["park", "--all", "1"], 2),
        (vec!["unmerge"], 2),
        (vec!["scan"], 2),
        (vec!["scan", "--tree", "x", "--sample", "1/4"], 2),
        (vec!["image", "build", "--name", "", "plain"], 2),
        (vec!["image", "import", "--name", &slashes, "plain"], 2),
        (vec!["daemon", "--pool-max", "0"], 2),
        (vec!["daemon", "--tier-max", "1"], 2),
        (vec!["daemon", "--vma-budget", "524289"], 2),
        (vec!["pause", "abc"], 2),
        (vec!["daemon", "--period", "1ms"], 2),
        (vec!["daemon", "--cold-tick", "49ms"], 2),
        (vec!["disk", "mount", "/no/such", "/no/such", "--cache-size", "4T"], 2),
        (vec!["disk", "mount", "/no/such", "/no/such", "--cache-size", "4095K"], 2),
        (vec!["disk", "mount", "/no/such", "/no/such", "--cache-size", "4M"], 1),
        (vec!["demo", "--size", "1"], 2),
        (vec!["demo", "--processes", "0"], 2),
        (vec!["run"], 125),
        (vec!["run", "--tolerance", "5", "--", "true"], 125),
        (vec!["run", "--backend", "remap", "--socket", "/no/such/dir/s", "--", "true"], 125),
        (vec!["--config", "none", "run", "--no-such-option"], 125),
        (vec!["run", "--domain", "", "--", "true"], 125),
        (run("/no/such/program"), 127),
        (run("./plain"), 126),
        (run("false"), 1),
        (run("true"), 0),
    ] {
        if args[..].first() == Some(&"run") && args.len() > 5 && !merges {
            println!("SKIPPED: no merging here, so none of {args:?}");
            continue;
        }
        let output = tool.run(&args);
        let errors = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {errors}");
        // Of its own failure the tool says one line, the cause, and says that it is the tool that says so.
        if code == 1 && args[0] != "run" {
            assert!(errors.starts_with("pagefold: ") && errors.trim_end().lines().count() == 1, "{args:?}: {errors}");
        }
        // What is wrong does not go where results go.
        assert!(code == 0 || output.stdout.is_empty(), "{args:?}: {}", text(&output.stdout));
    }
    // The daemon that `run` started for these.
    let _ = Command::new("python3").args(["-c", STOP, &socket]).status();
}

const STOP: &str = "import socket,sys\ns=socket.socket(socket.AF_UNIX,socket.SOCK_SEQPACKET)\n\
s.connect(sys.argv[1])\ns.send(b'{\"ask\":\"stop\"}')\ns.recv(4096)";

/// True if this user can merge here and KSM does not; else says why not.
fn merges(tool: &Tool) -> bool {
    if !tool.run(&["doctor"]).status.success() {
        println!("SKIPPED: no merging here: `pagefold doctor` tells more");
        return false;
    }
    if std::fs::read_to_string("/sys/kernel/mm/ksm/run").is_ok_and(|run| run.trim() != "0") {
        println!("SKIPPED: KSM is in use");
        return false;
    }
    true
}

#[test]
fn a_demonstration_leaves_nothing_but_the_agent() {
    let tool = Tool::new();
    if !merges(&tool) {
        return;
    }
    // Of a daemon for all, which its own is not.
    let file = tool.dir.path().join("c.toml");
    std::fs::write(&file, "[daemon]\nmetrics = \"unix:/nowhere/at/all\"\n").expect("a file");
    let mut demo = tool.command(&["demo", "--no-ksm", "--processes", "2", "--size", "4M"]);
    let shown = demo.env("PAGEFOLD_CONFIG", &file).output().expect("the tool runs");
    assert!(shown.status.success(), "{}", text(&shown.stderr));
    assert!(text(&shown.stdout).contains("after: the processes and pagefold's daemon"), "{}", text(&shown.stdout));
    let left = left_by_demo(&tool);
    assert!(left.is_empty(), "{left:?}");
}

/// Names in the runtime directory that are no agent's.
fn left_by_demo(tool: &Tool) -> Vec<String> {
    let left = std::fs::read_dir(tool.dir.path().join("run")).expect("the runtime directory");
    let left = left.map(|entry| entry.expect("an entry").file_name().into_string().expect("UTF-8"));
    left.filter(|name| !name.starts_with("pagefold-agent-")).collect()
}

#[test]
fn a_demonstration_that_is_ended_leaves_no_process() {
    let tool = Tool::new();
    if !merges(&tool) {
        return;
    }
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGKILL] {
        let mut demo = tool.command(&["demo", "--no-ksm", "--processes", "2", "--size", "4M"]);
        // Daemon and processes have the same standard error.
        let mut demo = demo.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("the tool runs");
        let (sender, lines) = std::sync::mpsc::channel();
        let errors = BufReader::new(demo.stderr.take().expect("a pipe"));
        std::thread::spawn(move || {
            for line in errors.lines() {
                let _ = sender.send(line.expect("a line"));
            }
        });
        let patience = Duration::from_secs(300);
        let mut said = Vec::new();
        while said.len() < 2 {
            said.push(lines.recv_timeout(patience).unwrap_or_else(|_| panic!("the demo begins: {said:?}")));
        }
        // SAFETY: a child that was not waited for.
        unsafe { libc::kill(demo.id() as i32, signal) };
        let ended = loop {
            match lines.recv_timeout(patience) {
                Ok(line) => said.push(line),
                Err(why) => break why,
            }
        };
        demo.wait().expect("its end");
        assert_eq!(ended, RecvTimeoutError::Disconnected, "{signal}: somebody lives: {said:?}");
        let mut left = left_by_demo(&tool);
        // Who is killed cannot remove the last file.
        left.retain(|name| signal != libc::SIGKILL || !name.ends_with(".lock"));
        assert!(left.is_empty(), "{signal}: {left:?}");
    }
}

#[test]
fn run_names_what_is_no_daemons_socket_and_leaves_nothing_beside_it() {
    let tool = Tool::new();
    if !merges(&tool) {
        return;
    }
    std::fs::create_dir(tool.dir.path().join("d")).expect("a directory");
    std::fs::write(tool.dir.path().join("f"), "").expect("a file");
    for name in ["d", "f"] {
        let run = tool.run(&["run", "--socket", name, "--", "true"]);
        let (errors, path) = (text(&run.stderr), tool.dir.path().join(name));
        assert_eq!(run.status.code(), Some(125), "{errors}");
        let said =
            format!("pagefold: no daemon at {}: what is there is no daemon's socket; name another\n", path.display());
        assert_eq!(errors, said);
        assert!(!path.with_extension("log").exists() && !path.with_extension("lock").exists());
    }
}

/// Who started a daemon that ends waits for another one only if there is one: a daemon that gives way says so.
#[test]
fn a_daemon_that_ends_tells_whether_another_comes() {
    let tool = Tool::new();
    // What a daemon at `name` says to whoever started it, and on its standard error.
    let started = |name: &str| {
        let (input, mut ours) = std::os::unix::net::UnixStream::pair().expect("sockets");
        let mut command = tool.command(&["daemon", "--on-demand", "--no-keeper", "--socket", name]);
        let daemon = command.stdin(std::os::fd::OwnedFd::from(input)).stderr(Stdio::piped()).spawn();
        drop(command);
        let errors = daemon.expect("the tool runs").wait_with_output().expect("its end").stderr;
        let mut said = String::new();
        ours.read_to_string(&mut said).expect("its last word");
        (said, text(&errors))
    };
    // One can be and the other cannot.
    // As long as a socket's path may be.
    let metrics = format!("{}/{}", tool.dir.path().display(), "m".repeat(106 - tool.dir.path().as_os_str().len()));
    let at = format!("unix:{metrics}");
    let mut command = tool.command(&["daemon", "--no-keeper", "--socket", "s", "--metrics", &at, "--web", "unix:w"]);
    let daemon = Reaped(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the tool runs"));
    let socket = tool.dir.path().join("s");
    common::wait_for("the daemon to listen", 120, || socket.exists());
    let served = [metrics.as_str(), "w"].map(|name| tool.dir.path().join(name));
    common::wait_for("its other sockets", 120, || served.iter().all(|path| path.exists()));
    let (said, errors) = started("s");
    assert_eq!(said, "another", "{errors}");
    let lock = tool.dir.path().join("t.lock");
    std::fs::create_dir(&lock).expect("a directory");
    let (said, errors) = started("t");
    assert_eq!(said, "");
    assert!(errors.contains(&lock.display().to_string()), "{errors}");
    // And an orderly end leaves nothing.
    // SAFETY: a child that was not waited for.
    unsafe { libc::kill(daemon.pid(), libc::SIGTERM) };
    common::wait_for("the daemon's end", 120, || !tool.dir.path().join("s.lock").exists());
    let left: Vec<_> = std::fs::read_dir(tool.dir.path()).expect("the directory").flatten().collect();
    let left: Vec<_> =
        left.iter().map(|entry| entry.file_name()).filter(|name| name != "run" && name != "t.lock").collect();
    assert!(left.is_empty(), "{left:?}");
    let long = tool.run(&["daemon", "--no-keeper", "--socket", "s", "--metrics", &format!("{at}m")]);
    let said = format!(": {metrics}m: 108 bytes, and a socket's path has 107 at most; name a shorter one\n");
    assert!(text(&long.stderr).contains(&said), "{}", text(&long.stderr));
}

/// By every command that asks it, in one line, and not minutes later.
#[test]
fn a_daemon_that_is_stopped_is_named_with_its_cure() {
    let tool = Tool::new();
    let mut command = tool.command(&["daemon", "--no-keeper", "--socket", "s"]);
    let daemon = Reaped(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the tool runs"));
    let (socket, pid) = (tool.dir.path().join("s"), daemon.pid());
    common::wait_for("the daemon to answer", 120, || tool.run(&["status", "--socket", "s"]).status.success());
    // SAFETY: a child that was not waited for.
    unsafe { libc::kill(pid, libc::SIGSTOP) };
    let cure = format!("process {pid} is stopped; kill -CONT {pid} lets it go on");
    let line = format!("pagefold: the daemon at {} does not answer: {cure}\n", socket.display());
    let mut commands: Vec<(&[&str], i32)> = vec![
        (&["status"], 1),
        (&["status", "--json"], 1),
        (&["pause"], 1),
        (&["resume", "1", "2"], 1),
        (&["unmerge", "1"], 1),
        (&["verify"], 1),
        (&["park", "--all"], 1),
        (&["unpark", "1"], 1),
    ];
    if merges(&tool) {
        commands.push((&["run"], 125));
    }
    for (args, code) in commands {
        let program: &[&str] = if args == ["run"] { &["--", "true"] } else { &[] };
        let asked = tool.run(&[args, &["--socket", "s"], program].concat());
        assert_eq!((text(&asked.stderr), asked.status.code()), (line.clone(), Some(code)), "{args:?}");
    }
    // SAFETY: as above.
    unsafe { libc::kill(pid, libc::SIGCONT) };
    assert!(tool.run(&["status", "--socket", "s"]).status.success());
}

#[test]
fn what_is_no_daemons_socket_is_told_from_a_daemon_that_says_nothing() {
    let tool = Tool::new();
    let path = |name: &str| tool.dir.path().join(name);
    let _streams = std::os::unix::net::UnixListener::bind(path("streams")).expect("a socket");
    let packets = pagefold_os::sock::listen(std::os::unix::ffi::OsStrExt::as_bytes(path("packets").as_os_str()));
    let packets = packets.expect("a socket");
    let hangs_up = std::thread::spawn(move || drop(pagefold_os::sock::accept(&packets).expect("a connection")));
    for (name, said) in [
        ("streams", "no daemon at PATH: what is there is another program's; name another"),
        ("packets", "the daemon at PATH does not answer: it hung up: it ended, or serves as many as it can"),
    ] {
        let asked = tool.run(&["status", "--socket", name]);
        let said = said.replace("PATH", &path(name).display().to_string());
        assert_eq!((text(&asked.stderr), asked.status.code()), (format!("pagefold: {said}\n"), Some(1)));
    }
    hangs_up.join().expect("it listened");
}

#[test]
fn a_runtime_directory_that_others_may_write_is_described_and_not_to_be_removed() {
    let tool = Tool::new();
    let open = tool.dir.path().join("run");
    std::fs::create_dir(&open).expect("a directory");
    std::fs::set_permissions(&open, std::os::unix::fs::PermissionsExt::from_mode(0o777)).expect("its mode");
    for (dir, is) in [(open.as_path(), "with mode 0777"), (std::path::Path::new("/etc/passwd"), "no directory")] {
        let refused = tool.command(&["status"]).env("PAGEFOLD_RUNTIME_DIR", dir).output().expect("the tool runs");
        let errors = text(&refused.stderr);
        assert_eq!(refused.status.code(), Some(1), "{errors}");
        assert!(errors.contains(is) && errors.contains("set PAGEFOLD_RUNTIME_DIR"), "{errors}");
        assert!(!errors.contains("remove"), "{errors}");
    }
}

/// Debian's initramfs mounts /run so, and everything below.
#[test]
fn the_agent_lies_where_it_can_be_loaded() {
    let tool = Tool::new();
    let run = tool.dir.path().join("run");
    std::fs::create_dir(&run).expect("a directory");
    let in_namespace = |others: &str, then: &str| {
        let script = format!(
            "mount -t tmpfs -o noexec,mode=700 none {run} && mount -t tmpfs -o {others} none /var/cache &&
             mkdir {run}/tmp && export TMPDIR={run}/tmp PAGEFOLD_RUNTIME_DIR={run} || exit 77; {then}",
            run = run.display()
        );
        let mut unshare = Command::new("unshare");
        unshare
            .args(["-rm", "sh", "-c", &script, env!("CARGO_BIN_EXE_pagefold")])
            .output()
            .ok()
            .filter(|done| done.status.code() != Some(77))
    };
    let loaded = in_namespace("mode=755", "\"$0\" env; env $(\"$0\" env) true; \"$0\" doctor");
    let Some(loaded) = loaded.filter(|done| !done.stdout.is_empty()) else {
        return println!("SKIPPED: no namespace of our own");
    };
    let (said, errors) = (text(&loaded.stdout), text(&loaded.stderr));
    assert!(said.contains("LD_PRELOAD=/var/cache/pagefold/pagefold-agent-") && errors.is_empty(), "{said}{errors}");
    assert!(said.contains("ok       a directory for the agent: /var/cache/pagefold\n"), "{said}");
    let nowhere = in_namespace("noexec,mode=755", "exec \"$0\" env").expect("a namespace");
    let errors = text(&nowhere.stderr);
    assert_eq!(nowhere.status.code(), Some(1), "{errors}");
    assert!(errors.contains("is mounted noexec; set PAGEFOLD_RUNTIME_DIR"), "{errors}");
}

#[test]
fn names_of_files_do_not_write_to_the_terminal() {
    let tool = Tool::new();
    std::fs::create_dir(tool.dir.path().join("d\x1b[1m")).expect("a directory");
    std::fs::write(tool.dir.path().join("d\x1b[1m/r\x1b[31med\n.raw"), [7; 8192]).expect("a file");
    for (args, name) in [
        (["disk", "scan", "d\x1b[1m"], "d?[1m/r?[31med?.raw "),
        (["scan", "--tree", "d\x1b[1m"], " d?[1m\n"),
        (["image", "scan", "d\x1b[1m"], " d?[1m\n"),
    ] {
        let shown = tool.run(&args);
        assert!(shown.status.success(), "{args:?}: {}", text(&shown.stderr));
        let shown = text(&shown.stdout);
        assert!(shown.contains(name) && !shown.contains('\x1b'), "{args:?}: {shown:?}");
    }
}

#[test]
fn images_do_not_write_to_the_terminal_through_errors() {
    let tool = Tool::new();
    let layout = tool.dir.path().join("layout");
    std::fs::create_dir(&layout).unwrap();
    std::fs::write(layout.join("oci-layout"), "{}").unwrap();
    let manifest = |digest| {
        serde_json::json!({ "digest": digest, "size": 0,
        "annotations": { "org.opencontainers.image.ref.name": "a\u{1b}[2Jb\npagefold: all is well" } })
    };
    let both = serde_json::json!({ "manifests": [manifest("1"), manifest("2")] });
    std::fs::write(layout.join("index.json"), both.to_string()).unwrap();
    let refused = tool.run(&["image", "import", "--name", "a:1", "layout"]);
    let said = text(&refused.stderr);
    assert!(said.contains("choose one with --ref") && said.contains("a?[2Jb?pagefold"), "{said:?}");
    assert!(said.lines().count() == 1 && !said.contains('\x1b'), "{said:?}");
}

#[test]
fn examples_fit_a_terminal() {
    let tool = Tool::new();
    for (path, help) in leaves(&tool) {
        let examples = help.split("Examples:\n").nth(1).unwrap_or_else(|| panic!("{path:?} has no examples"));
        for line in examples.lines().take_while(|line| !line.is_empty()) {
            assert!(line.starts_with("  ") && line.len() <= 80, "{path:?}: {line}");
        }
    }
}

#[test]
fn a_closed_standard_error_changes_no_exit_status() {
    let tool = Tool::new();
    let refused = vec!["run", "--backend", "remap", "--socket", "/no/such/dir/s", "--", "true"];
    for (args, code) in [(refused, 125), (vec!["scan", "/no/such/file"], 1)] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let ended = tool.command(&args).stderr(writer).status().expect("the tool runs");
        assert_eq!(ended.code(), Some(code), "{args:?}");
    }
}

#[test]
fn a_guest_starts_without_pagefold_where_run_fails() {
    let tool = Tool::new();
    if !merges(&tool) {
        return;
    }
    let socket = tool.socket();
    let mut daemon = tool.command(&["daemon", "--socket", &socket]).stderr(Stdio::null()).spawn().expect("a daemon");
    let began = std::time::Instant::now();
    while !tool.run(&["status", "--socket", &socket]).status.success() {
        assert!(began.elapsed() < std::time::Duration::from_secs(60), "no daemon");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let open = tool.dir.path().join("open");
    std::fs::create_dir(&open).expect("a directory");
    std::fs::set_permissions(&open, std::os::unix::fs::PermissionsExt::from_mode(0o777)).expect("its mode");
    let beside = std::path::Path::new(env!("CARGO_BIN_EXE_pagefold")).parent().expect("a directory");
    let mut wrapper = Command::new("/bin/sh");
    wrapper.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/dist/libvirt/pagefold-qemu")).args(["-m", "1"]);
    wrapper.env("PATH", format!("{}:/usr/bin:/bin", beside.display())).env("PAGEFOLD_CONFIG", "none");
    wrapper.env("PAGEFOLD_SOCKET", &socket).env("PAGEFOLD_QEMU", "echo").env("PAGEFOLD_RUNTIME_DIR", &open);
    let guest = wrapper.output().expect("the wrapper");
    let _ = daemon.kill();
    let _ = daemon.wait();
    assert_eq!((guest.status.code(), text(&guest.stdout)), (Some(0), "-m 1\n".to_owned()));
    let said = text(&guest.stderr);
    assert!(said.contains("this guest is not merged: ") && said.contains("must be a directory of user"), "{said}");
}

#[test]
fn a_forced_umount_does_not_wait_for_who_agrees_and_does_not_end() {
    use std::io::{BufRead, BufReader, Write};
    let tool = Tool::new();
    let (run, at) = (tool.dir.path().join("run"), tool.dir.path().join("at"));
    std::fs::create_dir(&at).expect("a directory");
    std::fs::create_dir(&run).expect("a directory");
    std::fs::set_permissions(&run, std::os::unix::fs::PermissionsExt::from_mode(0o700)).expect("its mode");
    let named = pagefold_disk::control::socket_path(&at.canonicalize().expect("a path"));
    let socket = run.join(named.file_name().expect("a name"));
    let listener = std::os::unix::net::UnixListener::bind(&socket).expect("a socket");
    let status = pagefold_disk::Status { pid: std::process::id(), ..Default::default() };
    std::thread::spawn(move || {
        let mut open = Vec::new();
        for mut stream in listener.incoming().flatten() {
            let mut line = String::new();
            let _ = BufReader::new(&stream).read_line(&mut line);
            if line.starts_with("status") {
                let _ = writeln!(stream, "{}", serde_json::to_string(&status).expect("plain data"));
            } else {
                let _ = writeln!(stream, "{{\"stopping\":true}}");
                open.push(stream);
            }
        }
    });
    let ended = tool.run(&["disk", "umount", "--force", at.to_str().expect("a path")]);
    assert_eq!(ended.status.code(), Some(1));
    let said = text(&ended.stderr);
    assert!(said.contains("does not end; what it had not written back is lost"), "{said}");
}

#[test]
fn questions_make_no_store_of_images() {
    let tool = Tool::new();
    for args in
        [&["image", "ls"][..], &["image", "ls", "--json"], &["image", "stat"], &["image", "verify"], &["image", "gc"]]
    {
        let shown = tool.run(args);
        assert!(shown.status.success(), "{args:?}: {}", text(&shown.stderr));
        assert!(text(&shown.stderr).contains("note: no image store in"), "{args:?}: {}", text(&shown.stderr));
    }
    for args in
        [&["image", "ls", "a"][..], &["image", "stat", "a"], &["image", "rm", "a"], &["image", "export", "a", "x"]]
    {
        let refused = tool.run(args);
        assert_eq!(refused.status.code(), Some(1), "{args:?}");
        assert!(text(&refused.stderr).contains("no image \"a\" in domain"), "{args:?}: {}", text(&refused.stderr));
    }
    let typing_error = tool.run(&["image", "--domain", "typo", "ls"]);
    assert!(text(&typing_error.stderr).contains("no domain \"typo\" in"), "{}", text(&typing_error.stderr));
    assert!(!tool.dir.path().join("store").exists());
}

#[test]
fn an_image_that_is_missing_keeps_no_other_from_being_removed() {
    let (tool, _) = tellers("1");
    assert!(tool.run(&["image", "build", "--name", "a:1", "tree"]).status.success());
    let removed = tool.run(&["image", "rm", "missing", "a:1"]);
    assert_eq!(removed.status.code(), Some(1));
    let said = text(&removed.stderr);
    assert!(said.contains("no image \"missing\"") && said.trim_end().lines().count() == 1, "{said}");
    assert!(!text(&tool.run(&["image", "ls"]).stdout).contains("a:1"));
}

#[test]
fn a_record_that_cannot_be_read_is_named_beside_the_others() {
    let (tool, _) = tellers("1");
    for name in ["a:1", "b:1"] {
        assert!(tool.run(&["image", "build", "--name", name, "tree"]).status.success());
    }
    let path = tool.dir.path().join("store/domains/default/images/a%3a1");
    std::fs::write(&path, "{").expect("a record");
    for (args, others) in [
        (["image", "ls"].to_vec(), "b:1"),
        (vec!["image", "ls", "--json"], "b:1"),
        (vec!["image", "stat"], "b:1"),
        (vec!["image", "stat", "--json"], "b:1"),
        (vec!["image", "gc", "--dry-run"], "1 tree and 1 object kept"),
        (vec!["image", "gc", "--json"], "\"trees_kept\": 1"),
    ] {
        let shown = tool.run(&args);
        let (out, said) = (text(&shown.stdout), text(&shown.stderr));
        assert_eq!(shown.status.code(), Some(1), "{args:?}");
        assert!(out.contains(others), "{args:?}: {out}");
        assert!(said.lines().count() == 1 && said.contains("a%3a1: "), "{args:?}: {said}");
        assert!(said.contains("build image \"a:1\" again, or forget it (`pagefold image rm`)"), "{args:?}: {said}");
    }
    let verified = tool.run(&["image", "verify"]);
    assert_eq!(verified.status.code(), Some(1));
    assert!(text(&verified.stdout).contains("(images: a:1)"), "{}", text(&verified.stdout));
    assert!(tool.run(&["image", "rm", "a:1"]).status.success());
    assert!(tool.run(&["image", "gc"]).status.success());
}

#[test]
fn a_proof_that_was_asked_for_and_not_given_is_no_success() {
    let (tool, _) = tellers("1");
    assert!(tool.run(&["image", "build", "--name", "a:1", "tree"]).status.success());
    assert!(tool.run(&["image", "verify"]).status.success());
    // Root of a namespace of its own is not root here.
    let mut inside = Command::new("unshare");
    inside.args(["--user", "--map-root-user", env!("CARGO_BIN_EXE_pagefold"), "image", "verify", "--frames"]);
    inside.current_dir(tool.dir.path()).stdin(Stdio::null());
    inside.env("PAGEFOLD_CONFIG", "none").env("PAGEFOLD_STORE", tool.dir.path().join("store"));
    match inside.output() {
        Ok(verified) if text(&verified.stderr).starts_with("unshare") => {
            println!("SKIPPED: {}", text(&verified.stderr));
        }
        Ok(verified) => {
            assert!(text(&verified.stdout).contains("frames not compared"), "{}", text(&verified.stdout));
            assert_eq!(verified.status.code(), Some(1));
        }
        Err(error) => println!("SKIPPED: unshare: {error}"),
    }
}

#[test]
fn what_images_are_refused_for_is_one_line_with_a_way_out() {
    let (tool, _) = tellers("1");
    assert!(tool.run(&["image", "build", "--name", "a:1", "tree"]).status.success());
    std::fs::write(tool.dir.path().join("packed"), b"\xfd7zXZ\0\0\x04").expect("a file");
    std::fs::write(tool.dir.path().join("text"), "no archive").expect("a file");
    let tarred = Command::new("tar").args(["-cf", "cut.tar", "tree"]).current_dir(tool.dir.path()).status();
    assert!(tarred.expect("tar runs").success());
    let cut = std::fs::File::options().write(true).open(tool.dir.path().join("cut.tar")).expect("an archive");
    cut.set_len(50_000).expect("it is longer");
    for (args, said) in [
        (["image", "mount", "a:1", "missing"].to_vec(), "mount: missing: no such directory; make it first (mkdir)"),
        (vec!["image", "mount", "a:1", "packed"], "mount: packed: not a directory;"),
        (vec!["image", "build", "--name", "b:1", "packed"], "packed: this archive is packed with xz"),
        (vec!["image", "export", "--format", "oci", "a:1", "-"], "only a tar goes to standard output"),
        (vec!["image", "export", "--format", "oci", "a:1", "text"], "text: not a directory; give a new one"),
        (vec!["image", "import", "--name", "b:1", "tree"], "a plain directory or archive is for image build"),
        (vec!["image", "import", "--name", "b:1", "text"], "text: tar: cut off in a header, after 0 entries; a plain"),
        (vec!["image", "import", "--name", "b:1", "packed"], "packed: this archive is packed with xz"),
        (
            vec!["image", "build", "--name", "b:1", "text"],
            "text: tar: cut off in a header, after 0 entries; build takes",
        ),
        (vec!["image", "build", "--name", "b:1", "cut.tar"], "cut.tar: tar: tree/file: the archive is cut off"),
        (vec!["image", "import", "--name", "b:1", "cut.tar"], "cut.tar: tar: cut off in tree/file"),
        (vec!["image", "build", "--store", "text", "--name", "b:1", "tree"], "text: not a directory; give --store"),
        (
            vec!["image", "build", "--store", "text/s", "--name", "b:1", "tree"],
            "text/s: Not a directory (os error 20); --store names another store",
        ),
        (vec!["image", "ls", "--store", "text"], "text: not a directory; give --store"),
        (vec!["image", "export", "--format", "oci", "a:1", "none/layout"], "none/layout: No such file or directory"),
    ] {
        let refused = tool.run(&args);
        let error = text(&refused.stderr);
        assert_eq!(refused.status.code(), Some(1), "{args:?}: {error}");
        assert!(error.lines().count() == 1 && error.contains(said), "{args:?}: {error}");
        // What is an archive, or an image, is not sent elsewhere.
        let elsewhere = error.contains("build takes") || error.contains("is for image build");
        assert!(!elsewhere || ["text", "tree"].contains(args.last().expect("a path")), "{args:?}: {error}");
    }
    assert!(!tool.dir.path().join("none").exists());
}

#[test]
fn who_names_no_input_makes_no_store() {
    let tool = Tool::new();
    let path = |name: &str| tool.dir.path().join(name);
    let _socket = std::os::unix::net::UnixListener::bind(path("socket")).expect("a socket");
    for (how, name, said) in [
        ("build", "none", "none: No such file or directory (os error 2)"),
        ("import", "none", "none: No such file or directory (os error 2)"),
        ("build", "socket", "socket: No such device or address (os error 6)"),
        ("import", "/dev/null", "/dev/null: a device, from which no archive comes; give a file, or a pipe"),
    ] {
        let refused = tool.run(&["image", how, "--name", "a:1", name]);
        assert_eq!((refused.status.code(), text(&refused.stderr)), (Some(1), format!("pagefold: {said}\n")));
        assert!(!path("store").exists(), "{how} {name}");
    }
}

#[test]
fn an_image_comes_by_pipe_and_a_wrong_one_is_named() {
    let (tool, _) = tellers("1");
    assert!(tool.run(&["image", "build", "--name", "a:1", "tree"]).status.success());
    assert!(tool.run(&["image", "export", "--format", "oci", "a:1", "layout"]).status.success());
    let layout = tool.dir.path().join("layout");
    assert!(
        Command::new("tar").args(["-cf", "../image.tar", "."]).current_dir(&layout).status().expect("tar").success()
    );
    let image = std::fs::File::open(tool.dir.path().join("image.tar")).expect("an archive");
    let mut pipe = Command::new("cat").stdin(image).stdout(Stdio::piped()).spawn().expect("cat runs");
    let mut import = tool.command(&["image", "import", "--name", "b:1", "-"]);
    let imported = import.stdin(pipe.stdout.take().expect("a pipe")).output().expect("the tool runs");
    assert!(pipe.wait().expect("it ends").success());
    assert!(imported.status.success(), "{}", text(&imported.stderr));
    let listed = text(&tool.run(&["image", "ls"]).stdout);
    let digests: BTreeSet<&str> = listed.lines().skip(1).filter_map(|line| line.split_whitespace().nth(1)).collect();
    assert_eq!(digests.len(), 1, "{listed}");
    // One byte of the layer is another.
    let blobs = std::fs::read_dir(layout.join("blobs/sha256")).expect("blobs").flatten();
    let layer = blobs.max_by_key(|blob| blob.metadata().map_or(0, |meta| meta.len())).expect("a layer").path();
    let mut bytes = std::fs::read(&layer).expect("a layer");
    *bytes.iter_mut().find(|byte| **byte == 7).expect("a byte of the file") = 8;
    std::fs::write(&layer, bytes).expect("a layer");
    for how in ["build", "import"] {
        let refused = tool.run(&["image", how, "--name", "c:1", "layout"]);
        let said = text(&refused.stderr);
        assert!(said.starts_with("pagefold: layout: layer 1 ") && said.contains("fetch it again"), "{said}");
    }
}

#[test]
fn nobody_types_an_archive() {
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    let tool = Tool::new();
    let keyboard = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).expect("a pseudo-terminal");
    grantpt(&keyboard).and_then(|()| unlockpt(&keyboard)).expect("it is ours");
    let name = ptsname(&keyboard, Vec::new()).expect("its name");
    for how in ["build", "import"] {
        let terminal = std::fs::File::open(name.to_str().expect("ASCII")).expect("the terminal");
        // Who reads it nevertheless finds its end.
        rustix::io::write(&keyboard, b"\x04").expect("a key");
        let refused = tool.command(&["image", how, "--name", "a:1", "-"]).stdin(terminal).output().expect("it runs");
        let said = text(&refused.stderr);
        assert!(!refused.status.success() && said.contains("does not come from a terminal"), "{how}: {said}");
    }
}

#[test]
fn what_gives_bytes_for_ever_is_no_archive() {
    let tool = Tool::new();
    for how in ["build", "import"] {
        for path in ["/dev/zero", "-"] {
            let mut command = Command::new("timeout");
            command.args(["20", env!("CARGO_BIN_EXE_pagefold"), "image", how, "--name", "a:1", path]);
            if how == "import" {
                command.args(["--max-bytes", "1M"]);
            }
            command.env("PAGEFOLD_CONFIG", "none").env("PAGEFOLD_STORE", tool.dir.path().join("store"));
            let zeros = std::fs::File::open("/dev/zero").expect("the device");
            let refused = command.stdin(zeros).output().expect("timeout runs");
            let said = text(&refused.stderr);
            assert_eq!(refused.status.code(), Some(1), "{how} {path}: {said}");
            assert_eq!(
                said,
                format!("pagefold: {path}: a device, from which no archive comes; give a file, or a pipe\n")
            );
        }
    }
}

#[test]
fn sockets_that_an_archive_cannot_have_are_said() {
    let (tool, _) = tellers("1");
    let _socket = std::os::unix::net::UnixListener::bind(tool.dir.path().join("tree/s")).expect("a socket");
    assert!(tool.run(&["image", "build", "--name", "a:1", "tree"]).status.success());
    for (format, output, said) in
        [("tar", "out.tar", true), ("tar", "-", true), ("oci", "out", true), ("erofs", "e", false)]
    {
        let exported = tool.run(&["image", "export", "--format", format, "a:1", output]);
        assert!(exported.status.success(), "{format}");
        assert_eq!(text(&exported.stderr).contains("1 socket is left out"), said, "{format}");
    }
}

/// The system takes no longer ones, and so most programs that unpack archives do not either.
#[test]
fn paths_that_few_can_unpack_are_said() {
    let tool = Tool::new();
    // As long as a path may be, and one more, by an archive's one header each.
    let long = |bytes: usize| {
        let path = "0123456789/".repeat(bytes / 11) + &"f".repeat(bytes % 11);
        let record = format!("{} path={path}\n", bytes + 11);
        assert_eq!(record.len(), bytes + 11);
        let header = |kind: u8, size: usize| {
            let mut block = [0; 512];
            block[0] = b'f';
            block[100..107].copy_from_slice(b"0000644");
            block[124..135].copy_from_slice(format!("{size:011o}").as_bytes());
            block[156] = kind;
            block[257..263].copy_from_slice(b"ustar\0");
            block[148..156].fill(b' ');
            let sum: u64 = block.iter().map(|&byte| u64::from(byte)).sum();
            block[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
            block
        };
        let mut bytes = header(b'x', record.len()).to_vec();
        bytes.extend(record.as_bytes());
        bytes.resize(bytes.len().next_multiple_of(512), 0);
        bytes.extend(header(b'0', 0));
        bytes
    };
    for (name, paths, said) in
        [("a:1", &[4095][..], None), ("a:2", &[4095, 4096], Some("1 path has more than 4,095 bytes"))]
    {
        let mut archive: Vec<u8> = paths.iter().flat_map(|&bytes| long(bytes)).collect();
        archive.extend([0; 1024]);
        std::fs::write(tool.dir.path().join("in.tar"), archive).expect("an archive");
        let built = tool.run(&["image", "build", "--name", name, "in.tar"]);
        assert!(built.status.success(), "{}", text(&built.stderr));
        for format in ["tar", "oci", "erofs"] {
            let exported = tool.run(&["image", "export", "--format", format, name, &format!("{name}.{format}")]);
            let notes = text(&exported.stderr);
            assert!(exported.status.success(), "{notes}");
            match said.filter(|_| format != "erofs") {
                Some(said) => assert!(notes.lines().count() == 1 && notes.contains(said), "{format}: {notes}"),
                None => assert_eq!(notes, "", "{name} {format}"),
            }
        }
        let again = tool.run(&["image", "build", "--name", "b:1", &format!("{name}.tar")]);
        assert!(again.status.success(), "{}", text(&again.stderr));
    }
    let listed = text(&tool.run(&["image", "ls"]).stdout);
    let digest = |name: &str| {
        listed.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next().map(str::to_owned))
    };
    assert!(digest("b:1").is_some() && digest("b:1") == digest("a:2"), "{listed}");
}

#[test]
fn a_failed_export_leaves_nothing_and_names_its_file() {
    let (tool, _) = tellers("1");
    assert!(tool.run(&["image", "build", "--name", "a:1", "tree"]).status.success());
    let digest = text(&tool.run(&["image", "ls", "a:1", "--json"]).stdout);
    let at = digest.find("\"sha256:").expect("a file with an object") + 8;
    let object = tool.dir.path().join("store/domains/default/objects");
    let object = object.join(&digest[at..at + 2]).join(&digest[at + 2..at + 64]);
    std::fs::remove_file(&object).unwrap_or_else(|error| panic!("{}: {error}", object.display()));
    let names = || {
        let all = std::fs::read_dir(tool.dir.path()).expect("the directory").flatten();
        all.map(|entry| entry.file_name().into_string().expect("UTF-8"))
            .filter(|name| name.starts_with("out"))
            .collect::<Vec<_>>()
    };
    for format in ["tar", "oci", "erofs"] {
        let failed = tool.run(&["image", "export", "--format", format, "a:1", "out"]);
        assert_eq!(failed.status.code(), Some(1), "{format}");
        assert_eq!(names(), [""; 0], "{format}: {}", text(&failed.stderr));
    }
    // What had the name has it still.
    std::fs::write(tool.dir.path().join("out"), "before").expect("a file");
    std::fs::create_dir(tool.dir.path().join("out-dir")).expect("a directory");
    for (format, output) in [("tar", "out"), ("erofs", "out"), ("oci", "out-dir")] {
        assert_eq!(
            tool.run(&["image", "export", "--format", format, "a:1", output]).status.code(),
            Some(1),
            "{format}"
        );
        assert_eq!(std::fs::read(tool.dir.path().join("out")).expect("it is there"), b"before", "{format}");
    }
    assert_eq!(std::fs::read_dir(tool.dir.path().join("out-dir")).expect("it is there").count(), 0);
    // Killed where it waits for an object that does not come.
    assert!(Command::new("mkfifo").arg(&object).status().expect("mkfifo runs").success());
    for (format, half) in [("tar", "out."), ("erofs", "out."), ("oci", "out-dir/blobs/sha256/.layer")] {
        let output = if format == "oci" { "out-dir" } else { "out" };
        let mut child = tool.command(&["image", "export", "--format", format, "a:1", output]).spawn().expect("it runs");
        let began = std::time::Instant::now();
        let begun = || match format {
            "oci" => tool.dir.path().join(half).exists(),
            _ => names().iter().any(|name: &String| name.starts_with(half)),
        };
        while !begun() && began.elapsed() < Duration::from_secs(60) {
            std::thread::sleep(Duration::from_millis(5));
        }
        child.kill().and_then(|()| child.wait()).expect("it ends");
        assert_eq!(std::fs::read(tool.dir.path().join("out")).expect("it is there"), b"before", "{format}");
        assert!(!tool.dir.path().join("out-dir/index.json").exists(), "{format}");
        names().iter().filter(|name| name.starts_with("out.")).for_each(|name| {
            std::fs::remove_file(tool.dir.path().join(name)).expect("a half");
        });
    }
    std::fs::remove_file(&object).expect("a pipe");
    let full = tool.run(&["image", "export", "a:1", "/dev/full"]);
    assert!(std::path::Path::new("/dev/full").exists());
    assert_eq!(full.status.code(), Some(1));
}

#[test]
fn paths_in_json_are_those_of_the_tree() {
    use std::os::unix::ffi::OsStrExt;
    let tool = Tool::new();
    std::fs::create_dir(tool.dir.path().join("tree")).expect("a directory");
    for name in [&b"back\\slash"[..], b"tab\there", b"new\nline", b"bad\xff"] {
        std::fs::write(tool.dir.path().join("tree").join(std::ffi::OsStr::from_bytes(name)), "x").expect("a file");
    }
    assert!(tool.run(&["image", "build", "--name", "a:1", "tree"]).status.success());
    std::os::unix::fs::symlink(std::ffi::OsStr::from_bytes(b"to\xff"), tool.dir.path().join("tree/z")).expect("a link");
    assert!(tool.run(&["image", "build", "--name", "b:1", "tree"]).status.success());
    let last = text(&tool.run(&["image", "ls", "b:1", "--json"]).stdout);
    let last: serde_json::Value = serde_json::from_str(last.lines().last().expect("a line")).expect("JSON");
    assert_eq!((&last["target"], &last["target_hex"]), (&"to\u{fffd}".into(), &"746fff".into()), "{last}");
    let listed = text(&tool.run(&["image", "ls", "a:1", "--json"]).stdout);
    let lines = listed.lines().map(|line| serde_json::from_str(line).expect("JSON"));
    let paths: BTreeSet<(String, Option<String>)> = lines
        .map(|line: serde_json::Value| {
            let of = |key: &str| line[key].as_str().map(str::to_owned);
            (of("path").expect("a path"), of("path_hex"))
        })
        .collect();
    let expected = ["", "back\\slash", "new\nline", "tab\there"].map(|path| (path.to_owned(), None));
    let odd = ("bad\u{fffd}".to_owned(), Some("626164ff".to_owned()));
    assert_eq!(paths, expected.into_iter().chain([odd]).collect());
}

/// A tool with a small tree beside it, and what tells something of it and of process `pid`, in an order that works.
fn tellers(pid: &str) -> (Tool, Vec<Vec<&str>>) {
    let tool = Tool::new();
    std::fs::create_dir(tool.dir.path().join("tree")).expect("a directory");
    std::fs::write(tool.dir.path().join("tree/file"), vec![7; 100_000]).expect("a file");
    let tellers = vec![
        vec!["image", "build", "--name", "a:1", "tree"],
        vec!["image", "ls"],
        vec!["image", "stat"],
        vec!["image", "verify"],
        vec!["image", "gc", "--dry-run"],
        vec!["image", "scan", "tree"],
        vec!["scan", pid],
        vec!["scan", "--tree", "tree"],
        vec!["disk", "scan", "tree/file"],
        vec!["disk", "status"],
    ];
    (tool, tellers)
}

#[test]
fn results_are_plain_and_quiet_when_piped() {
    let pid = std::process::id().to_string();
    let (tool, mut all) = tellers(&pid);
    all.extend([vec!["--help"], vec!["image", "ls", "a:1"]]);
    for args in all {
        let output = tool.run(&args);
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
        assert!(!output.stdout.is_empty(), "{args:?}");
        assert!(!text(&output.stdout).contains('\x1b'), "{args:?}");
        assert_eq!(text(&output.stderr), "", "{args:?}");
        // Whoever reads may have seen enough: that is no failure, and nothing to complain about.
        let mut child = tool.command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
        drop(child.stdout.take());
        let output = child.wait_with_output().expect("it ends");
        assert_eq!(text(&output.stderr), "", "{args:?} | true");
        assert_eq!(output.status.code(), Some(0), "{args:?} | true");
    }
}

#[test]
fn what_offers_json_prints_one_document() {
    let pid = std::process::id().to_string();
    let (tool, all) = tellers(&pid);
    for args in all {
        let mut json = args.clone();
        json.insert(if args[0] == "scan" { 1 } else { 2 }, "--json");
        let output = tool.run(&json);
        assert!(output.status.success(), "{json:?}: {}", text(&output.stderr));
        let value: serde_json::Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{json:?}: {error}: {}", text(&output.stdout)));
        assert!(value.is_object() || value.is_array(), "{json:?}");
    }
    // Whoever tells something offers it as JSON.
    for (path, help) in leaves(&tool) {
        let silent = ["bench", "completions", "daemon", "env", "man", "run", "top"].contains(&path[0].as_str())
            || matches!(path.join(" ").as_str(), "disk mount" | "disk umount" | "image umount" | "image rm")
            || matches!(path.join(" ").as_str(), "image export" | "image exec");
        let offers = options(&help).iter().any(|(name, _)| name == "json");
        assert!(offers || silent, "{path:?} has no --json");
    }
}

/// What `command` with `args` says, started with SIGPIPE ignored or not, a signal blocked and a standard descriptor closed.
fn begun(mut command: Command, args: &[&str], ignored: bool, closed: libc::c_int) -> (Option<i32>, String) {
    let begin = move || {
        // SAFETY: system calls that are safe between fork and exec, on a set that is filled first.
        unsafe {
            let mut set = std::mem::zeroed();
            libc::sigemptyset(&mut set);
            libc::sigaddset(&mut set, libc::SIGUSR1);
            libc::pthread_sigmask(libc::SIG_SETMASK, &set, std::ptr::null_mut());
            libc::signal(libc::SIGPIPE, if ignored { libc::SIG_IGN } else { libc::SIG_DFL });
            libc::close(closed);
        }
        Ok(())
    };
    // SAFETY: as above.
    unsafe { command.args(args).pre_exec(begin) };
    let output = command.output().expect("it runs");
    (output.status.code(), text(&output.stdout))
}

/// Programs that tell how they began.
const TELL: [[&str; 4]; 2] =
    [["/bin/grep", "-E", "SigBlk|SigIgn", "/proc/self/status"], ["/bin/ls", "-1", "-U", "/proc/self/fd"]];

/// As if it had been started without the tool: signals that are ignored or blocked stay so, and what is closed is closed.
#[test]
fn what_run_becomes_begins_as_it_began() {
    let tool = Tool::new();
    if !merges(&tool) {
        return;
    }
    let daemon = common::Daemon::start(&["--no-keeper"]);
    for (ignored, closed) in [(true, 0), (false, 2)] {
        for args in TELL {
            let plain = begun(Command::new(args[0]), &args[1..], ignored, closed);
            assert_eq!(begun(daemon.run(&[]), &args, ignored, closed), plain, "{args:?}");
        }
    }
}

#[test]
fn what_image_exec_becomes_begins_as_it_began() {
    let tool = Tool::new();
    let tree = tool.dir.path().join("tree");
    for dir in ["usr", "proc"] {
        std::fs::create_dir_all(tree.join(dir)).expect("a directory");
    }
    for dir in ["bin", "lib", "lib64"] {
        std::os::unix::fs::symlink(format!("usr/{dir}"), tree.join(dir)).expect("a link");
    }
    assert!(tool.run(&["image", "build", "--name", "a:1", "tree"]).status.success());
    let exec = ["image", "exec", "a:1", "--bind", "/usr:/usr", "--"];
    let can = tool.command(&exec).arg("/bin/true").output().expect("the tool runs");
    if !can.status.success() {
        return println!("SKIPPED: image exec cannot run a program here: {}", text(&can.stderr));
    }
    for (ignored, closed) in [(true, 0), (false, 2)] {
        for args in TELL {
            let plain = begun(Command::new(args[0]), &args[1..], ignored, closed);
            assert_eq!(begun(tool.command(&exec), &args, ignored, closed), plain, "{args:?}");
        }
    }
}

/// With the path, the cause and the cure; nothing is mounted, and nothing left.
#[test]
fn a_mount_that_has_no_place_for_its_socket_says_so_in_one_line() {
    let tool = Tool::new();
    let long = tool.dir.path().join("l".repeat(100));
    for name in ["images", "mnt"] {
        std::fs::create_dir(tool.dir.path().join(name)).expect("a directory");
    }
    std::fs::write(tool.dir.path().join("images/a"), vec![1; 4096]).expect("a file");
    let below_a_file = std::path::Path::new("/etc/passwd/run");
    for (run, why) in [(long.as_path(), "too long for sockets"), (below_a_file, "Not a directory")] {
        for more in [&[][..], &["--background"]] {
            let mut mount = tool.command(&["disk", "mount", "images", "mnt"]);
            let refused = mount.args(more).env("PAGEFOLD_RUNTIME_DIR", run).output().expect("the tool runs");
            let said = text(&refused.stderr);
            assert_eq!(refused.status.code(), Some(1), "{said}");
            let told = [run.to_str().expect("UTF-8"), why, "; set PAGEFOLD_RUNTIME_DIR to another directory\n"];
            assert!(said.lines().count() == 1 && told.iter().all(|part| said.contains(part)), "{said}");
        }
    }
    assert!(!long.exists());
    let nbd = tool.run(&["disk", "mount", "images", "mnt", "--nbd", &long.display().to_string()]);
    let said = text(&nbd.stderr);
    assert!(said.contains("107 bytes at most; name a shorter one\n") && said.lines().count() == 1, "{said}");
}
