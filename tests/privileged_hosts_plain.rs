//! Programs that libvirt, podman and systemd started as ever, without wrapper, environment or drop-in: rules and commands
//! attach them as they are, under the filters that each of the three gives them.

#![cfg(target_arch = "x86_64")]

mod common;

use common::cold::Host;
use common::{
    Daemon, Reaped, Server, ask_until_done, c_program, can_merge, guest, installed, is_root, packages, shared_pages_in,
    skipped, systemd, wait_for,
};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

fn source(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// True if the kernel shows a seccomp filter on the process.
fn has_filter(pid: i32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/status")).is_ok_and(|status| status.contains("\nSeccomp:\t2\n"))
}

/// What of ours a process has: mappings, and threads.
fn traces(pid: i32) -> Vec<String> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let names = threads.filter_map(|thread| fs::read_to_string(thread.path().join("comm")).ok());
    maps.lines().map(str::to_owned).chain(names).filter(|line| line.contains("pagefold")).collect()
}

/// The guest's first program: compares a file with its first digest again and again.
const INIT: &str = "\
b=/bin/busybox
first=$($b md5sum /data)
n=0
while :; do
    [ \"$($b md5sum /data)\" = \"$first\" ] || echo PAGEFOLD-WRONG
    n=$((n + 1))
    echo PAGEFOLD-ROUND $n
    $b sleep 1
done
";

/// Bytes of the file that both guests have.
const DATA_LEN: usize = 20 << 20;

/// Rounds that a guest has printed.
fn rounds(console: &Path) -> usize {
    let text = String::from_utf8_lossy(&fs::read(console).unwrap_or_default()).into_owned();
    assert!(!text.contains("PAGEFOLD-WRONG"), "{text}");
    text.matches("PAGEFOLD-ROUND").count()
}

/// The emulator of libvirt's guest of this name.
fn emulator(name: &str) -> Option<i32> {
    pagefold_os::procfs::pids().into_iter().find(|pid| {
        let arguments = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let is_qemu = fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe.starts_with("/usr/bin/"));
        let name = format!("guest={name},");
        is_qemu && arguments.windows(name.len()).any(|part| part == name.as_bytes())
    })
}

#[test]
fn a_rule_attaches_guests_of_libvirt() {
    if !is_root() || !can_merge() {
        return;
    }
    let Some(parts) = guest::needs(&[]) else { return };
    if ["libvirtd", "virsh", "unshare"]
        .iter()
        .any(|program| !Path::new("/usr/sbin").join(program).exists() && installed(program).is_none())
    {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    // Guests run as libvirt's own user.
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).expect("its own directory");
    let mut random = common::Random::new(7);
    let data: Vec<u8> = (0..DATA_LEN).map(|_| random.below(256) as u8).collect();
    let initramfs = guest::initramfs(dir.path(), &parts, INIT, &[("data".into(), data)]);
    // Libvirt gives both files to the guests' user.
    let kernel = dir.path().join("kernel");
    fs::copy(&parts.0.path, &kernel).expect("a copy");
    let console = |name: &str| dir.path().join(format!("console-pagefold-{name}"));
    let xml = format!(
        "<domain type='qemu'><name>NAME</name><memory unit='MiB'>128</memory>\
         <os><type arch='x86_64'>hvm</type><kernel>{}</kernel><initrd>{}</initrd>\
         <cmdline>console=ttyS0 quiet panic=-1</cmdline></os>\
         <devices><serial type='file'><source path='{}/console-NAME'/></serial></devices></domain>\n",
        kernel.display(),
        initramfs.display(),
        dir.path().display()
    );
    fs::write(dir.path().join("guest.xml"), xml).expect("a file");
    let mut trial = Command::new("unshare");
    trial.args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh"]);
    trial.arg(source("tests/programs/libvirt.sh")).arg(dir.path());
    trial.env("PATH", format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default()));
    trial.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let _libvirt = Reaped(trial.spawn().expect("unshare"));
    let said = || fs::read_to_string(dir.path().join("said")).unwrap_or_default();
    wait_for("libvirt to start both guests", 900, || {
        ["RUNNING", "FAILED", "ABSENT"].iter().any(|word| said().contains(word))
    });
    if said().contains("ABSENT") {
        return skipped(&format!("libvirt starts no guest here: {}", said().trim()));
    }
    assert!(said().contains("RUNNING 2"), "{}", said());
    let names = ["one", "two"];
    let pids = names.map(|name| emulator(&format!("pagefold-{name}")).expect("the guest"));
    for name in names {
        wait_for("the guest to work", 300, || rounds(&console(name)) > 0);
    }
    assert!(pids.iter().all(|pid| has_filter(*pid)), "libvirt gives its guests a sandbox");
    // The user keeps the rule off other guests of this machine.
    let user = fs::metadata(format!("/proc/{}", pids[0])).expect("it runs").uid();
    let config = dir.path().join("pagefold.toml");
    let rule = format!(
        "[[attach]]\nexe = \"/usr/bin/qemu-system-*\"\nuser = \"{user}\"\nmin = \"32M\"\ndomain = \"guests\"\n"
    );
    fs::write(&config, rule).expect("a file");
    let host = Host::start(&["--cold-policy=manual", "--config", config.to_str().expect("text")]);
    wait_for("both guests to share what both hold", 300, || {
        let status = host.status();
        pids.iter().all(|pid| shared_pages_in(&status, *pid) > DATA_LEN as u64 / 4096 / 2)
    });
    let status = host.status();
    for pid in pids {
        let clients = status["clients"].as_array().expect("clients");
        let client = clients.iter().find(|client| client["pid"] == pid).expect("a client");
        assert_eq!((&client["attached"], &client["domain"]), (&true.into(), &"guests".into()), "{client}");
    }
    host.verify();
    let works_on = |name: &str| {
        let before = rounds(&console(name));
        wait_for("the guest to work on", 120, || rounds(&console(name)) > before + 1);
    };
    names.iter().for_each(|name| works_on(name));
    wait_for("pages of a guest to leave", 60, || {
        host.tool(&["park", &pids[0].to_string()]).status.success() && host.number(pids[0], "pages_out") > 0
    });
    works_on("one");
    ask_until_done(|words| host.tool(words), &["unpark", &pids[0].to_string()]);
    works_on("one");
    host.verify();
    for (name, pid) in names.into_iter().zip(pids) {
        ask_until_done(|words| host.tool(words), &["detach", &pid.to_string()]);
        assert_eq!(traces(pid), Vec::<String>::new());
        works_on(name);
    }
    // No rule attaches them again.
    assert!(pids.iter().all(|pid| traces(*pid).is_empty()));
}

/// Pages of the area that all instances of the program hold.
const PAGES: u64 = 4096;

/// podman with everything of its own below one directory.
struct Podman(tempfile::TempDir);

impl Podman {
    fn command(&self, runtime: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh"]).arg(source("tests/programs/podman_plain.sh")).arg(self.0.path());
        command.args(["--runtime", runtime]).args(arguments);
        command
    }
}

/// The containers by name, each run by another program if both are there.
fn containers() -> [(String, &'static str); 2] {
    let has = |program: &str| Command::new(program).arg("--version").stdout(Stdio::null()).status().is_ok();
    [("one", "crun"), ("two", if has("runc") { "runc" } else { "crun" })]
        .map(|(name, runtime)| (format!("pagefold-plain-{name}-{}", std::process::id()), runtime))
}

impl Drop for Podman {
    fn drop(&mut self) {
        for (name, runtime) in containers() {
            let _ = self.command(runtime, &["rm", "--force", "--time", "0", "--ignore", &name]).output();
        }
        // Made by podman, and empty again unless a container of this machine's own is in it.
        for controller in fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten() {
            let parent = controller.path().join("libpod_parent");
            let _ = fs::remove_dir(parent.join("conmon"));
            let _ = fs::remove_dir(parent);
        }
    }
}

#[test]
fn containers_of_podman_are_attached_by_their_control_groups() {
    static BUILT: OnceLock<Option<PathBuf>> = OnceLock::new();
    let Some(program) = common::static_program(&BUILT, "attached") else { return };
    if ["podman", "crun", "unshare"].iter().any(|program| installed(program).is_none()) {
        return;
    }
    let podman = Podman(tempfile::tempdir().expect("a directory"));
    let root = podman.0.path().join("root");
    for dir in ["proc", "sys", "dev", "tmp", "etc", "run"] {
        fs::create_dir_all(root.join(dir)).expect("a directory");
    }
    fs::copy(program, root.join("attached")).expect("a copy");
    let root = format!("{}:O", root.display());
    let run = |name: &str, runtime: &str| {
        // Some machines have lower limits than podman asks for.
        let limits = ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096"];
        let options = ["run", "--rm", "--interactive", "--network", "none", "--name", name];
        podman.command(runtime, &[&options[..], &limits, &["--rootfs", &root]].concat())
    };
    // Where no container runs at all, there is nothing to try.
    let (name, runtime) = &containers()[0];
    let tried = run(name, runtime).args(["/attached", "0"]).stdin(Stdio::null()).output().expect("podman");
    if !tried.status.success() {
        let errors = String::from_utf8_lossy(&tried.stderr).into_owned();
        return skipped(&format!("podman runs no container here: {}", errors.lines().last().unwrap_or("")));
    }
    let mut servers =
        containers().map(|(name, runtime)| Server::start_as("0", run(&name, runtime), Path::new("/attached")));
    let inspect = |name: &str, runtime: &str, what: &str| {
        let said = podman.command(runtime, &["inspect", "--format", what, name]).output().expect("podman");
        assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
        String::from_utf8(said.stdout).expect("text").trim().to_owned()
    };
    let pids = containers()
        .map(|(name, runtime)| inspect(&name, runtime, "{{.State.Pid}}").parse::<i32>().expect("a process id"));
    let groups = containers().map(|(name, runtime)| inspect(&name, runtime, "{{.State.CgroupPath}}"));
    assert!(pids.iter().all(|pid| has_filter(*pid)), "podman gives its containers a filter");
    let mut daemon = Daemon::start(&["--no-keeper"]);
    let merge_and_leave = |daemon: &Daemon, servers: &mut [Server; 2]| {
        wait_for("both to share their area", 120, || {
            servers.iter_mut().for_each(|server| _ = server.check("reset 1"));
            common::comes(30, || pids.iter().all(|pid| shared_pages_in(&daemon.status(), *pid) >= PAGES * 9 / 10))
        });
        daemon.verify();
        for (server, pid) in servers.iter_mut().zip(pids) {
            for word in ["write 500", "discard 200", "fork 1", "move 5", "check 1"] {
                server.check(word);
            }
            ask_until_done(|words| daemon.tool(words), &["detach", &pid.to_string()]);
            assert_eq!(traces(pid), Vec::<String>::new());
            server.check("check 1");
        }
    };
    for group in &groups {
        ask_until_done(|words| daemon.tool(words), &["attach", "--cgroup", group]);
    }
    merge_and_leave(&daemon, &mut servers);
    // The same by a rule about both.
    let parent = Path::new(&groups[0]).parent().and_then(Path::to_str).expect("a path");
    daemon.replace_with(&["--no-keeper", "--attach", &format!("cgroup={parent},exe=/attached,domain=web")]);
    merge_and_leave(&daemon, &mut servers);
    for server in servers {
        assert!(server.end().success());
    }
}

#[test]
fn rules_attach_services_of_systemd_under_the_shipped_unit() {
    if !is_root() || !can_merge() {
        return;
    }
    let Some(program) = c_program("silent") else { return };
    let Some(said) = systemd::probe(&program, "systemd_plain") else { return };
    let services = ["loose", "root-one", "root-two", "user-one", "user-two"];
    let done = [
        "attached without a filter",
        "cure in the status",
        "attached all",
        "merged",
        "verified",
        "parked",
        "unparked",
        "stays left",
        "active 0 deaf",
    ];
    let of_services = services.iter().flat_map(|name| [format!("left {name}"), format!("active 0 {name}")]);
    for line in done.map(str::to_owned).into_iter().chain(of_services) {
        assert!(said.lines().any(|found| found == line), "no `{line}` in {said}");
    }
    let of = |start: &str| said.lines().find_map(|line| line.strip_prefix(start)).unwrap_or_else(|| panic!("{said}"));
    let cure = of("cure: ");
    assert!(of("refused: ").contains(cure) && cure.contains("filters.conf"), "{said}");
    assert!(of("deaf: ").contains("(socket)"), "{said}");
    assert!(!said.contains("/proc/"), "traces are left: {said}");
}

#[test]
fn the_package_leads_a_newcomer_to_merged_guests() {
    if !is_root() || !can_merge() {
        return;
    }
    let needed = ["apt-get", "dpkg-deb", "python3"].map(installed);
    if needed.contains(&None) || guest::needs(&[]).is_none() {
        return;
    }
    let dir = packages::build();
    let done = Command::new(source("tests/first-vm")).arg(packages::of(dir.path(), "pagefold")).output();
    let done = done.expect("tests/first-vm runs");
    let said = String::from_utf8_lossy(&done.stdout);
    println!("{said}");
    assert!(done.status.success(), "{said}{}", String::from_utf8_lossy(&done.stderr));
}
