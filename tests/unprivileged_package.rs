//! The Debian packages, made from the tool under test: what is in them, and what an installation does and leaves.

mod common;

use common::{
    TOOL, executable, installed,
    packages::{self, remote, snapshotter},
    skipped,
};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

fn source(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// Runs `command`, which must succeed, and returns what it printed.
fn ok(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{command:?}: {text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

/// The packages, made once; `None` after saying why not.
fn made() -> Option<&'static Path> {
    static BUILT: OnceLock<Option<tempfile::TempDir>> = OnceLock::new();
    let built = BUILT.get_or_init(|| {
        installed("dpkg-deb")?;
        Some(packages::build())
    });
    built.as_ref().map(|dir| dir.path())
}

/// The tool's and the library's unpacked in one place, without running anything of theirs.
fn unpacked() -> Option<tempfile::TempDir> {
    let dir = made()?;
    let root = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    for name in ["pagefold", "libforrest0", "libforrest-dev"] {
        ok(Command::new("dpkg-deb").arg("-x").arg(packages::of(dir, name)).arg(root.path()));
    }
    Some(root)
}

#[test]
fn packages_hold_the_expected_files() {
    let Some(dir) = made() else { return };
    let version = ok(Command::new(TOOL).arg("--version"));
    let version = version.trim().strip_prefix("pagefold ").expect("a version");
    for (name, files) in [
        (
            "pagefold",
            &[
                "/usr/bin/pagefold",
                "/usr/share/man/man1/pagefold.1.gz",
                "/usr/share/man/man1/pagefold-daemon.1.gz",
                "/usr/share/man/man5/pagefold.toml.5.gz",
                "/usr/share/man/man7/pagefold.7.gz",
                "/usr/share/bash-completion/completions/pagefold",
                "/usr/share/zsh/vendor-completions/_pagefold",
                "/usr/share/fish/vendor_completions.d/pagefold.fish",
                "/etc/pagefold/pagefold.toml",
                "/usr/lib/systemd/system/pagefold.service",
                "/usr/lib/systemd/system/pagefold@.service",
                "/usr/lib/systemd/user/pagefold.service",
                "/usr/share/pagefold/libvirt/pagefold-qemu",
                "/usr/share/pagefold/prometheus/pagefold.rules.yml",
                "/usr/share/pagefold/grafana/pagefold.json",
                "/usr/share/pagefold/examples/service.conf",
                "/usr/lib/sysctl.d/50-pagefold.conf",
                "/usr/lib/udev/rules.d/70-pagefold.rules",
                "/usr/share/doc/pagefold/copyright",
                "/usr/share/doc/pagefold/changelog.gz",
            ][..],
        ),
        ("libforrest0", &["/libforrest.so.0", "/usr/share/doc/libforrest0/copyright"][..]),
        (
            "libforrest-dev",
            &[
                "/usr/include/forrest.h",
                "/libforrest.a",
                "/libforrest.so",
                "/pkgconfig/forrest.pc",
                "/usr/share/man/man3/forrest.3.gz",
            ][..],
        ),
    ] {
        let file = packages::of(dir, name);
        let info = ok(Command::new("dpkg-deb").arg("--info").arg(&file));
        for line in [format!("Package: {name}"), format!("Version: {version}-1")] {
            assert!(info.lines().any(|found| found.trim() == line), "{name} has no {line}: {info}");
        }
        assert!(info.contains("Depends: ") && info.contains("Description: "), "{info}");
        let contents = ok(Command::new("dpkg-deb").arg("--contents").arg(&file));
        for line in contents.lines() {
            assert!(line.contains(" root/root "), "{name}: not root's: {line}");
            assert!(line.starts_with('l') || !line[1..10].contains("w--w"), "{name}: others may write: {line}");
        }
        let paths: BTreeSet<&str> = contents
            .lines()
            .filter_map(|line| line.split(" ./").nth(1))
            .map(|path| path.split(" -> ").next().unwrap_or(path))
            .collect();
        for wanted in files {
            let found = paths.iter().any(|path| format!("/{path}").ends_with(wanted));
            assert!(found, "{name} has no {wanted}: {contents}");
        }
    }
    // Each command has its page.
    let contents = ok(Command::new("dpkg-deb").arg("--contents").arg(packages::of(dir, "pagefold")));
    let pages = contents.lines().filter(|line| line.contains("/man1/pagefold-")).count();
    assert!(pages >= 15, "{pages} manual pages of commands");
}

#[test]
fn the_snapshotter_has_a_package_with_its_unit() {
    let Some(dir) = made() else { return };
    if !snapshotter().exists() {
        return skipped("the snapshotter is not built: cargo build -p pagefold-snapshotter");
    }
    let root = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    ok(Command::new("dpkg-deb").arg("-x").arg(packages::of(dir, "pagefold-snapshotter")).arg(root.path()));
    let program = root.path().join("usr/bin/pagefold-snapshotter");
    assert!(ok(Command::new(&program).arg("--version")).starts_with("pagefold-snapshotter "));
    let unit = "usr/lib/systemd/system/pagefold-snapshotter.service";
    let text = std::fs::read_to_string(root.path().join(unit)).expect("the unit");
    // Its mounts must be seen by containerd: these give a service a mount namespace of its own.
    let isolates = ["ProtectSystem", "ProtectHome", "PrivateTmp", "PrivateDevices", "ReadWritePaths", "ProtectProc"];
    assert!(!text.lines().any(|line| isolates.iter().any(|option| line.starts_with(option))), "{text}");
    if installed("systemd-analyze").is_none() {
        return;
    }
    let file = root.path().join("pagefold-snapshotter.service");
    std::fs::write(&file, text.replace("/usr/bin/pagefold-snapshotter", &program.display().to_string()))
        .expect("a unit");
    let checked = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&file).output().expect("it runs");
    let said = String::from_utf8_lossy(&checked.stderr).into_owned();
    assert!(!said.contains("pagefold"), "{said}");
}

#[test]
fn the_program_for_registries_has_a_package() {
    let Some(dir) = made() else { return };
    if !remote().exists() {
        return skipped("pagefold-remote is not built: cargo build -p pagefold-remote");
    }
    let root = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    for name in ["pagefold", "pagefold-remote"] {
        ok(Command::new("dpkg-deb").arg("-x").arg(packages::of(dir, name)).arg(root.path()));
    }
    assert!(
        ok(Command::new(root.path().join("usr/bin/pagefold-remote")).arg("--version")).starts_with("pagefold-remote ")
    );
    // The tool finds it beside itself: what fails is the connection.
    let store = root.path().join("store");
    let pulled = Command::new(root.path().join("usr/bin/pagefold"))
        .args(["image", "pull", "127.0.0.1:1/app"])
        .env("PAGEFOLD_STORE", &store)
        .env("PATH", "/nowhere")
        .output()
        .expect("it runs");
    let said = String::from_utf8_lossy(&pulled.stderr).into_owned();
    assert!(!pulled.status.success() && said.contains("127.0.0.1:1") && said.contains("refused"), "{said}");
}

#[test]
fn the_same_input_makes_the_same_packages() {
    let Some(first) = made() else { return };
    let second = packages::build();
    for name in ["pagefold", "libforrest0", "libforrest-dev"] {
        let (a, b) = (std::fs::read(packages::of(first, name)), std::fs::read(packages::of(second.path(), name)));
        assert!(a.expect("a package") == b.expect("a package"), "{name} differs from one build to the next");
    }
}

#[test]
fn installed_files_work_in_their_places() {
    let Some(root) = unpacked() else { return };
    let at = |path: &str| root.path().join(path);
    let shown = ok(Command::new(at("usr/bin/pagefold")).arg("--version"));
    assert!(shown.starts_with("pagefold "), "{shown}");
    // The configuration as installed is read, and sets nothing.
    let refused = Command::new(at("usr/bin/pagefold"))
        .arg("--config")
        .arg(at("etc/pagefold/pagefold.toml"))
        .args(["status", "--socket"])
        .arg(at("nobody"))
        .output()
        .expect("the tool");
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(said.starts_with("pagefold: no daemon listens at "), "{said}");
    // A manual page is found by its name.
    if installed("man").is_some() {
        let found = Command::new("man").arg("-M").arg(at("usr/share/man")).args(["-w", "pagefold-daemon"]).output();
        let found = found.expect("man runs");
        if String::from_utf8_lossy(&found.stderr).contains("minimized") {
            skipped("man is a stub here");
        } else {
            let path = String::from_utf8_lossy(&found.stdout).into_owned();
            assert!(path.trim().ends_with("man1/pagefold-daemon.1.gz"), "{path}");
        }
    }
    if installed("bash").is_some() {
        let script = at("usr/share/bash-completion/completions/pagefold");
        let ask = "source \"$1\" && complete -p pagefold && COMP_WORDS=(pagefold da) COMP_CWORD=1 && \
            _pagefold pagefold da pagefold && echo \"${COMPREPLY[@]}\"";
        let path = format!("{}:{}", at("usr/bin").display(), std::env::var("PATH").expect("text"));
        let found = ok(Command::new("bash").args(["-c", ask, "bash"]).arg(script).env("PATH", path));
        assert!(found.lines().last().is_some_and(|line| line.contains("daemon")), "{found}");
    }
    for (shell, script) in [
        ("zsh", "usr/share/zsh/vendor-completions/_pagefold"),
        ("fish", "usr/share/fish/vendor_completions.d/pagefold.fish"),
    ] {
        if installed(shell).is_some() {
            ok(Command::new(shell).arg("-n").arg(at(script)));
        }
    }
}

/// What the configuration file offers works in the unit as packaged, or with the drop-in that it names.
#[test]
fn a_socket_for_a_group_has_its_drop_in() {
    let read = |path: &str| std::fs::read_to_string(source(path)).expect("a file of the sources");
    let offered = read("dist/pagefold.toml");
    let (_, rest) = offered.split_once(",group=").expect("a socket for a group");
    let (group, rest) = rest.split_once('"').expect("a string's end");
    assert!(rest.contains("examples/group.conf"), "{rest}");
    let drop_in = read("dist/examples/group.conf");
    let has = |line: &str| drop_in.lines().any(|found| found == line);
    // To give it to the group, and to let the group reach it.
    assert!(has(&format!("SupplementaryGroups={group}")) && has("SystemCallFilter=@chown"), "{drop_in}");
    assert!(has("RuntimeDirectoryMode=0711"), "{drop_in}");
}

#[test]
fn a_c_program_builds_and_runs_with_the_installed_library() {
    if installed("cc").is_none() || installed("pkg-config").is_none() {
        return;
    }
    let Some(root) = unpacked() else { return };
    let libraries =
        std::fs::read_dir(root.path().join("usr/lib")).expect("usr/lib").flatten().map(|entry| entry.path());
    let library = libraries.into_iter().find(|dir| dir.join("libforrest.a").exists()).expect("the library");
    let flags = ok(Command::new("pkg-config")
        .args(["--cflags", "--libs", "forrest"])
        .env("PKG_CONFIG_LIBDIR", library.join("pkgconfig"))
        .env("PKG_CONFIG_SYSROOT_DIR", root.path())
        .env("PKG_CONFIG_ALLOW_SYSTEM_CFLAGS", "1")
        .env("PKG_CONFIG_ALLOW_SYSTEM_LIBS", "1"));
    let program = root.path().join("check");
    let compile = |command: &mut Command| ok(command.arg("-o").arg(&program).arg("-pthread"));
    compile(Command::new("cc").arg(source("crates/forrest/tests/c/check.c")).args(flags.split_whitespace()));
    // Needs nothing of the -dev package but at build time.
    let said = ok(Command::new(&program).env("LD_LIBRARY_PATH", &library).current_dir(root.path()));
    assert!(said.contains("ok"), "{said}");
}

#[test]
fn systemd_takes_the_units_and_finds_little_exposed() {
    if installed("systemd-analyze").is_none() {
        return;
    }
    let Some(root) = unpacked() else { return };
    for (scope, path, name) in [
        ("--system", "usr/lib/systemd/system/pagefold.service", "pagefold.service"),
        ("--system", "usr/lib/systemd/system/pagefold@.service", "pagefold@root.service"),
        ("--user", "usr/lib/systemd/user/pagefold.service", "pagefold.service"),
    ] {
        let unit = std::fs::read_to_string(root.path().join(path)).expect("the unit");
        let program = root.path().join("usr/bin/pagefold");
        let unit = unit.replace("/usr/bin/pagefold", &program.display().to_string());
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join(name);
        std::fs::write(&file, unit).expect("a unit");
        let checked = Command::new("systemd-analyze")
            .args([scope, "verify", "--man=no"])
            .arg(&file)
            .env("XDG_RUNTIME_DIR", dir.path())
            .output()
            .expect("systemd-analyze");
        let said = String::from_utf8_lossy(&checked.stderr).into_owned();
        let about_us = said.lines().filter(|line| line.contains("pagefold")).collect::<Vec<_>>();
        assert!(about_us.is_empty(), "{path}: {about_us:?}");
        if scope == "--user" {
            // The judgement is made for services of the system.
            continue;
        }
        let exposed = Command::new("systemd-analyze")
            .args(["security", "--offline=true", "--threshold", EXPOSURE_MAX])
            .arg(&file)
            .output()
            .expect("systemd-analyze");
        let said = String::from_utf8_lossy(&exposed.stdout).into_owned();
        if said.is_empty() {
            skipped("systemd-analyze cannot judge a unit offline before version 250");
            continue;
        }
        assert!(exposed.status.success(), "{path}: {said}");
    }
}

/// Ten times the figure of `systemd-analyze security`, with room for what later versions ask for.
const EXPOSURE_MAX: &str = "25";

/// A directory of programs that note how they were called, and fail.
fn failing(names: &[&str], dir: &Path) -> PathBuf {
    let log = dir.join("calls");
    for name in names {
        let script = format!("#!/bin/sh\necho \"{name} $*\" >> '{}'\nexit 1\n", log.display());
        executable::script(&script, &dir.join(name));
    }
    log
}

#[test]
fn the_scripts_of_the_package_never_fail() {
    let scripts = [
        "postinst configure",
        "postinst configure 0.0.1-1",
        "postinst abort-upgrade",
        "prerm remove",
        "prerm upgrade 0.2.0-1",
        "postrm remove",
        "postrm purge",
    ];
    for present in [&["sysctl", "udevadm", "systemctl", "pagefold"][..], &[][..]] {
        let dir = tempfile::tempdir().expect("a directory");
        let log = failing(present, dir.path());
        for tool in ["cat", "sed", "rmdir"] {
            if let Some(path) = installed(tool) {
                std::os::unix::fs::symlink(path, dir.path().join(tool)).expect("a link");
            }
        }
        for call in scripts {
            let (script, args) = call.split_once(' ').expect("script and arguments");
            ok(Command::new("/bin/sh")
                .arg(source(&format!("dist/deb/{script}")))
                .args(args.split(' '))
                .env("PATH", dir.path())
                .env_remove("DPKG_ROOT"));
        }
        let called = std::fs::read_to_string(&log).unwrap_or_default();
        assert_eq!(called.contains("udevadm control --reload"), !present.is_empty(), "{called}");
        // Into another root nothing of this machine is touched.
        let _ = std::fs::remove_file(&log);
        for call in scripts {
            let (script, args) = call.split_once(' ').expect("script and arguments");
            let mut command = Command::new("/bin/sh");
            command.arg(source(&format!("dist/deb/{script}"))).args(args.split(' '));
            ok(command.env("PATH", dir.path()).env("DPKG_ROOT", "/nowhere"));
        }
        assert!(!log.exists(), "{}", std::fs::read_to_string(&log).unwrap_or_default());
    }
}

#[test]
fn dpkg_installs_upgrades_and_purges_it() {
    let Some(dir) = made() else { return };
    if !common::root() {
        return skipped("only root gives files to root, as dpkg does");
    }
    let root = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    std::fs::create_dir_all(root.path().join("var/lib/dpkg/updates")).expect("dpkg's directory");
    std::fs::create_dir_all(root.path().join("var/lib/dpkg/info")).expect("dpkg's directory");
    std::fs::write(root.path().join("var/lib/dpkg/status"), "").expect("dpkg's file");
    let dpkg = |args: &[&str], files: &[PathBuf]| -> Output {
        let mut command = Command::new("dpkg");
        command.arg(format!("--root={}", root.path().display()));
        command.args(["--force-script-chrootless", "--force-depends", "--force-confold", "--force-unsafe-io"]);
        command.args(args).args(files).env("LC_ALL", "C").output().expect("dpkg")
    };
    let done = |output: Output| {
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{errors}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let all: Vec<PathBuf> =
        ["libforrest0", "libforrest-dev", "pagefold"].iter().map(|name| packages::of(dir, name)).collect();
    done(dpkg(&["--install"], &all));
    assert!(done(dpkg(&["--status", "pagefold"], &[])).contains("Status: install ok installed"));
    let config = root.path().join("etc/pagefold/pagefold.toml");
    let mine = "[daemon]\nworkers = 3\n";
    std::fs::write(&config, mine).expect("a configuration");
    done(dpkg(&["--install"], &all[2..]));
    assert_eq!(std::fs::read_to_string(&config).expect("still there"), mine, "an upgrade keeps what the owner wrote");
    let altered = done(dpkg(&["--verify", "pagefold"], &[]));
    assert!(altered.lines().all(|line| line.contains("/etc/pagefold/pagefold.toml")), "{altered}");
    done(dpkg(&["--remove", "pagefold"], &[]));
    assert!(config.exists() && !root.path().join("usr/bin/pagefold").exists());
    done(dpkg(&["--purge", "pagefold", "libforrest-dev", "libforrest0"], &[]));
    let left = ok(Command::new("find").arg(root.path()).args([
        "-mindepth",
        "1",
        "-name",
        "*pagefold*",
        "-o",
        "-name",
        "*forrest*",
    ]));
    assert_eq!(left, "", "left behind: {left}");
}

/// Licences under which code may be linked into a program under MIT or Apache-2.0.
const LICENCES: [&str; 12] = [
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "bzip2-1.0.6",
    "ISC",
    "MIT",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// True if one licence of each part of `expression` is among them.
fn is_permitted(expression: &str) -> bool {
    let one_of = |part: &str| part.trim_matches(['(', ')']).split(" OR ").any(|one| LICENCES.contains(&one.trim()));
    expression.split(" AND ").all(|part| one_of(part.trim()))
}

#[test]
fn what_is_linked_is_listed_and_its_licences_permit_it() {
    assert!(is_permitted("(GPL-3.0 OR MIT) AND Zlib") && !is_permitted("MIT AND GPL-3.0") && !is_permitted("GPL-3.0"));
    if installed("python3").is_none() {
        return;
    }
    if !Command::new("python3").args(["-c", "import tomllib"]).output().is_ok_and(|output| output.status.success()) {
        return skipped("this python3 reads no TOML (3.11 does)");
    }
    for name in ["pagefold", "pagefold-snapshotter", "pagefold-remote"] {
        let listed = ok(Command::new(source("dist/sbom.py")).arg(name).env("SOURCE_DATE_EPOCH", "1700000000"));
        let listed: serde_json::Value = serde_json::from_str(&listed).expect("JSON");
        assert_eq!(listed["metadata"]["component"]["name"], name);
        assert_eq!(listed["metadata"]["timestamp"], "2023-11-14T22:13:20Z");
        let components = listed["components"].as_array().expect("components");
        assert!(components.iter().any(|one| one["name"] == "libc"), "{components:?}");
        // Tests and benchmarks alone use these.
        assert!(components.iter().all(|one| one["name"] != "proptest" && one["name"] != "pagefold-bench"));
        for one in components {
            let licence = one["licenses"][0]["expression"].as_str().expect("a licence");
            assert!(is_permitted(licence), "{}: {licence}", one["name"]);
            // What is not of this workspace comes from the registry, as it was when the lock file was made.
            let is_ours =
                licence == "MIT OR Apache-2.0" && one["version"] == listed["metadata"]["component"]["version"];
            assert!(is_ours || one["hashes"][0]["content"].as_str().is_some_and(|sum| sum.len() == 64), "{one}");
        }
    }
}
