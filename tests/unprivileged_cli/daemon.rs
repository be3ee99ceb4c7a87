//! Commands that start a daemon or send it a request.

use crate::common;
use crate::tool::{Tool, merges, text};
use common::Reaped;
use std::io::Read;
use std::process::{Command, Stdio};

#[test]
fn run_names_a_path_that_is_no_daemons_socket_and_leaves_no_file() {
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

/// A daemon that exits because another one serves says so: only then does the command that started it wait for the other.
#[test]
fn a_daemon_that_ends_says_whether_another_serves() {
    let tool = Tool::new();
    // What a daemon at `name` reports to the process that started it, and prints on standard error.
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
    // The longest possible path of a socket; one byte more is refused below.
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
    // An orderly end leaves no file.
    // SAFETY: kill takes no pointers. The child was not waited for, so its pid is not reused.
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
    // SAFETY: kill takes no pointers. The child was not waited for, so its pid is not reused.
    unsafe { libc::kill(pid, libc::SIGSTOP) };
    let cure = format!("process {pid} is stopped; kill -CONT {pid} lets it go on");
    let line = format!("pagefold: the daemon at {} does not answer: {cure}\n", socket.display());
    let mut commands: Vec<(&[&str], i32)> = vec![
        (&["status"], 1),
        (&["status", "--json"], 1),
        (&["pause", "--all"], 1),
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
    // SAFETY: kill takes no pointers. The child was not waited for, so its pid is not reused.
    unsafe { libc::kill(pid, libc::SIGCONT) };
    assert!(tool.run(&["status", "--socket", "s"]).status.success());
}

#[test]
fn a_foreign_socket_is_distinguished_from_a_silent_daemon() {
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
fn a_runtime_directory_that_others_may_write_is_refused_without_advice_to_remove_it() {
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

/// Debian's initramfs mounts /run noexec.
#[test]
fn the_agent_is_placed_where_it_can_be_loaded() {
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
