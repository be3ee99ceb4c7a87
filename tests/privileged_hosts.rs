//! Under what runs programs already: libvirt's emulator, libvirt itself, containers of podman, services of systemd.

mod common;

use common::{Daemon, Reaped, TOOL, c_program, can_merge, finish, installed, is_root, skipped, systemd, wait_for};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

fn source(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// A directory with the tool and whatever else must be found by name.
fn path_with_the_tool(dir: &Path) -> String {
    let bin = dir.join("bin");
    std::fs::create_dir_all(&bin).expect("a directory");
    let _ = std::os::unix::fs::symlink(TOOL, bin.join("pagefold"));
    format!("{}:{}", bin.display(), std::env::var("PATH").unwrap_or_default())
}

/// True if the daemon has a client of this process id.
fn has_client(daemon: &Daemon, pid: i32) -> bool {
    daemon.status()["clients"].as_array().is_some_and(|list| list.iter().any(|client| client["pid"] == pid))
}

const LIBVIRTS_SANDBOX: &str = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";

#[test]
fn the_emulator_for_libvirt_merges_guests_and_never_keeps_one_from_starting() {
    if !can_merge() || installed("qemu-system-x86_64").is_none() {
        return;
    }
    // Without a keeper, no other daemon starts when this one is killed at the end.
    let daemon = Daemon::start(&["--no-keeper"]);
    let wrapper = source("dist/libvirt/pagefold-qemu");
    let path = path_with_the_tool(daemon.dir.path());
    let qemu = |socket: &Path, args: &[&str], env: &[(&str, &str)]| {
        let mut command = Command::new(&wrapper);
        // As libvirt has it: an environment of its own, nothing inherited.
        command.env_clear().env("PATH", &path).env("LC_ALL", "C").env("PAGEFOLD_SOCKET", socket);
        command
            .env("PAGEFOLD_QEMU", installed("qemu-system-x86_64").expect("QEMU"))
            .envs(env.iter().copied())
            .args(args);
        command
    };
    let guest =
        ["-name", "guest=a b,debug-threads=on", "-S", "-accel", "tcg", "-m", "64", "-nodefaults", "-display", "none"];
    let start = |socket: &Path, more: &[&str], env: &[(&str, &str)]| {
        let log = std::fs::File::create(daemon.dir.path().join("log")).expect("a log");
        let args: Vec<&str> = guest.iter().chain(more).copied().collect();
        let mut command = qemu(socket, &args, env);
        Reaped(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().expect("the wrapper"))
    };
    let log = || std::fs::read_to_string(daemon.dir.path().join("log")).unwrap_or_default();
    // The wrapper becomes the emulator: same process, so libvirt's signals and limits are the guest's.
    let is_qemu = |guest: &Reaped| {
        let exe = std::fs::read_link(format!("/proc/{}/exe", guest.pid())).unwrap_or_default();
        exe.file_name().is_some_and(|name| name.to_string_lossy().starts_with("qemu-system"))
    };
    // Libvirt's first question.
    let (status, said, _) = finish(&mut qemu(&daemon.socket, &["-version"], &[]), 120);
    assert!(status.success() && said.contains("QEMU emulator version"), "{said}");

    let plain = start(&daemon.socket, &[], &[]);
    wait_for("a guest of the emulator to be a client", 30, || has_client(&daemon, plain.pid()));
    assert!(is_qemu(&plain));
    let domain = start(&daemon.socket, &[], &[("PAGEFOLD_DOMAIN", "customer 7")]);
    wait_for("a guest of another owner to be a client", 30, || has_client(&daemon, domain.pid()));
    let status = daemon.status();
    let of = |pid: i32| {
        let clients = status["clients"].as_array().expect("clients");
        clients.iter().find(|client| client["pid"] == pid).map(|client| client["domain"].clone()).expect("the client")
    };
    assert_eq!((of(plain.pid()), of(domain.pid())), ("default".into(), "customer 7".into()));

    // Its sandbox forbids new processes and the choice of processors; the agent does without, and stays.
    let sandboxed = start(&daemon.socket, &["-sandbox", LIBVIRTS_SANDBOX], &[]);
    wait_for("a guest in its sandbox to be a client", 30, || has_client(&daemon, sandboxed.pid()));
    wait_for("its sandbox to be on", 30, || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", sandboxed.pid())).unwrap_or_default();
        status.lines().any(|line| line == "Seccomp:\t2")
    });
    let arguments = std::fs::read_to_string(format!("/proc/{}/cmdline", sandboxed.pid())).expect("arguments");
    assert!(arguments.contains("\0guest=a b,debug-threads=on\0"), "{arguments}");
    // Merging what it has is asked of its agent by two looks at least.
    std::thread::sleep(std::time::Duration::from_secs(3));
    assert!(is_qemu(&sandboxed) && has_client(&daemon, sandboxed.pid()));
    // The cold tier's agent too.
    let cold = start(&daemon.socket, &["-sandbox", LIBVIRTS_SANDBOX], &[("PAGEFOLD_COLD", "1")]);
    let move_all = |command: &str| {
        let pid = cold.pid().to_string();
        finish(Command::new(TOOL).args([command, "--socket"]).arg(&daemon.socket).arg(pid), 30).0.success()
    };
    let is_cold = || daemon.status()["cold"]["clients"].as_array().is_some_and(|list| !list.is_empty());
    wait_for("a guest in its sandbox to be a client of the cold tier", 30, is_cold);
    assert!(move_all("park") && move_all("unpark"));
    assert!(is_qemu(&cold) && is_cold());

    let alone = start(&daemon.dir.path().join("nobody"), &[], &[]);
    wait_for("it to say that there is no daemon", 30, || log().contains("no daemon at"));
    wait_for("the guest to run without a daemon", 30, || is_qemu(&alone));
}

#[test]
fn libvirt_starts_guests_through_the_emulator() {
    if !is_root() || !can_merge() {
        return;
    }
    for program in ["libvirtd", "virsh", "qemu-system-x86_64", "unshare"] {
        let sbin = Path::new("/usr/sbin").join(program).exists();
        if !sbin && installed(program).is_none() {
            return;
        }
    }
    let daemon = Daemon::start(&[]);
    let path = path_with_the_tool(daemon.dir.path());
    // Its own /etc/libvirt, /run/libvirt and so on; its processes end with the namespace.
    let mut trial = Command::new("unshare");
    trial.args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh"]);
    trial.arg(source("tests/programs/libvirt.sh")).arg(daemon.dir.path()).arg(source("dist/libvirt/pagefold-qemu"));
    trial.env("PATH", format!("{path}:/usr/sbin:/sbin")).env("SOCKET", &daemon.socket);
    trial.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let _libvirt = Reaped(trial.spawn().expect("unshare"));
    let said = || std::fs::read_to_string(daemon.dir.path().join("said")).unwrap_or_default();
    let decided = || ["RUNNING", "FAILED", "ABSENT"].iter().any(|word| said().contains(word));
    // Longer than the script's own limits, all together.
    wait_for("libvirt to start both guests", 900, decided);
    if said().contains("ABSENT") {
        return skipped(&format!("libvirt starts no guest here: {}", said().trim()));
    }
    assert!(said().contains("RUNNING 2"), "{}", said());
    wait_for("both guests to be clients", 30, || {
        let clients = daemon.status()["clients"].clone();
        clients.as_array().is_some_and(|list| list.len() == 2)
    });
}

/// Exit status of the script if podman runs no container at all.
const NO_CONTAINERS: i32 = 3;

#[test]
fn containers_of_podman_merge_with_each_other() {
    if !is_root() || !can_merge() || installed("podman").is_none() || installed("crun").is_none() {
        return;
    }
    let daemon = Daemon::start(&[]);
    let dir = daemon.dir.path();
    let Some(program) = c_program("silent") else { return };
    let env = Command::new(TOOL)
        .args(["env", "--manage=all", "--socket"])
        .arg(&daemon.socket)
        .output()
        .expect("pagefold env");
    assert!(env.status.success(), "{}", String::from_utf8_lossy(&env.stderr));
    std::fs::write(dir.join("env"), env.stdout).expect("a file");
    let mut trial = Command::new("unshare");
    trial.args(["--mount", "--cgroup", "sh"]).arg(source("tests/programs/podman.sh")).arg(dir).arg(program);
    trial.stdin(Stdio::null()).stdout(Stdio::null());
    let mut trial =
        Reaped(trial.stderr(std::fs::File::create(dir.join("errors")).expect("a file")).spawn().expect("unshare"));
    let said = |name: &str| std::fs::read_to_string(dir.join(name)).unwrap_or_default();
    wait_for("both containers to be ready", 300, || {
        let ended = trial.0.try_wait().expect("wait").and_then(|status| status.code());
        assert!(matches!(ended, None | Some(NO_CONTAINERS)), "podman: {}", said("errors"));
        ended.is_some() || said("one").contains("ready") && said("two").contains("ready")
    });
    if trial.0.try_wait().expect("wait").is_some() {
        return skipped(&format!("podman runs no container here: {}", said("errors").lines().last().unwrap_or("")));
    }
    wait_for("pages of the containers to merge", 60, || daemon.total("pages_sharing") > 7000);
    daemon.verify();
    assert!(!said("one").contains("wrong") && !said("two").contains("wrong"));
    std::fs::write(dir.join("stop"), "").expect("a file");
    wait_for("the containers to end", 30, || trial.0.try_wait().expect("wait").is_some());
}

#[test]
fn services_of_systemd_merge_under_the_shipped_unit() {
    if !is_root() || !can_merge() {
        return;
    }
    let Some(program) = c_program("silent") else { return };
    let Some(said) = systemd::probe(&program, "systemd_drop_ins") else { return };
    let of_root = [
        "active pagefold",
        "active one",
        "active two",
        "merged",
        "verified",
        "active under a filter, 0 times anew",
        "active again",
        "merged again",
    ];
    let of_a_user = ["active of a user", "merged of a user", "verified of a user", "user daemon daemon"];
    for line in of_root.into_iter().chain(of_a_user) {
        assert!(said.lines().any(|found| found == line), "no `{line}` in {said}");
    }
}
