//! The configuration file as a running tool reads it: its places, the precedence of settings, and one line for an invalid
//! file.

mod common;

use common::{Reaped, TOOL, wait_for};
use serde_json::Value;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// The tool, with no configuration besides the one below `home`.
fn tool(home: &Path) -> Command {
    let mut command = Command::new(TOOL);
    command.env("HOME", home).env("NO_COLOR", "1");
    for name in ["XDG_CONFIG_HOME", "PAGEFOLD_CONFIG", "PAGEFOLD_STORE", "PAGEFOLD_SOCKET"] {
        command.env_remove(name);
    }
    command
}

fn write(path: &Path, text: &str) {
    std::fs::create_dir_all(path.parent().expect("a parent")).expect("directories");
    std::fs::write(path, text).expect("a file");
}

/// One line on standard error that starts with `start`, nothing else, and `code`.
fn refused(output: &Output, code: i32, start: &str) {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.starts_with(start), "{errors} does not start with {start}");
    assert_eq!(errors.lines().count(), 1, "{errors}");
    assert_eq!(output.status.code(), Some(code), "{errors}");
    assert!(output.stdout.is_empty());
}

#[test]
fn a_daemon_takes_its_defaults_from_the_users_file_and_the_command_line_wins() {
    let home = tempfile::tempdir().expect("a directory");
    let socket = home.path().join("s");
    let file = home.path().join(".config/pagefold/pagefold.toml");
    write(&file, &format!("socket = \"{}\"\n[daemon]\nworkers = 3\nscan_interval = \"7s\"\n", socket.display()));
    let mut daemon = tool(home.path());
    daemon.args(["daemon", "--workers", "2", "--no-keeper"]).stdin(Stdio::null()).stdout(Stdio::null());
    let _daemon = Reaped(daemon.spawn().expect("the daemon starts"));
    let status = || tool(home.path()).args(["status", "--json"]).output().expect("status");
    wait_for("the daemon to listen where the file says", 20, || status().status.success());
    let status: Value = serde_json::from_slice(&status().stdout).expect("JSON");
    assert_eq!(status["workers"], 2, "the command line wins");
    assert_eq!(status["scan_interval_s"], 7.0, "the file wins over what is built in");
}

#[test]
fn the_environment_names_the_socket_over_the_file_and_the_command_line_over_both() {
    let home = tempfile::tempdir().expect("a directory");
    let path = |name: &str| home.path().join(name).display().to_string();
    write(&home.path().join(".config/pagefold/pagefold.toml"), &format!("socket = {:?}\n", path("of-the-file")));
    let asked = |args: &[&str], socket: &str| {
        let output = tool(home.path()).env("PAGEFOLD_SOCKET", socket).args(args).output().expect("the tool");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let (environment, given) = (path("of-the-environment"), path("given"));
    for command in [&["verify"][..], &["pause", "--all"], &["unmerge", "1"], &["park", "1"]] {
        let with = [command, &["--socket", &given]].concat();
        for (args, socket, wanted) in [
            (command, &*environment, &*environment),
            (&with, &environment, &given),
            (command, "", &path("of-the-file")),
        ] {
            let said = asked(args, socket);
            assert!(said.contains(&format!("no daemon listens at {wanted};")), "{args:?}: {said}");
        }
    }
}

#[test]
fn the_files_store_is_the_one_status_tells_of_and_the_environment_wins() {
    let home = tempfile::tempdir().expect("a directory");
    let [socket, store, other] = ["s", "store", "other"].map(|name| home.path().join(name));
    let file = home.path().join(".config/pagefold/pagefold.toml");
    write(&file, &format!("socket = {socket:?}\n[image]\nstore = {store:?}\n"));
    write(&home.path().join("tree/file"), "content");
    let json = |command: &mut Command| -> Value {
        let output = command.output().expect("the tool");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).expect("JSON")
    };
    let tree = home.path().join("tree");
    json(tool(home.path()).args(["image", "build", "--json", "--name", "a"]).arg(&tree));
    assert!(store.exists());
    json(tool(home.path()).env("PAGEFOLD_STORE", &other).args(["image", "build", "--json", "--name", "b"]).arg(&tree));
    assert!(other.exists(), "the environment wins over the file");

    let mut daemon = tool(home.path());
    daemon.args(["daemon", "--no-keeper"]).stdin(Stdio::null()).stdout(Stdio::null());
    let _daemon = Reaped(daemon.spawn().expect("the daemon starts"));
    wait_for("the daemon to listen", 60, || tool(home.path()).arg("status").output().expect("status").status.success());
    let roots = |status: Value| -> Vec<Value> {
        status["images"].as_array().expect("stores").iter().map(|store| store["root"].clone()).collect()
    };
    assert_eq!(roots(json(tool(home.path()).args(["status", "--json"]))), [store.to_str().expect("text")]);
    let elsewhere = json(tool(home.path()).env("PAGEFOLD_STORE", &other).args(["status", "--json"]));
    assert_eq!(roots(elsewhere), [other.to_str().expect("text")]);
}

#[test]
fn the_file_named_is_the_only_one_read() {
    let home = tempfile::tempdir().expect("a directory");
    let path = |name: &str| home.path().join(name);
    write(&path(".config/pagefold/pagefold.toml"), "nonsense = 1\n");
    write(&path("xdg/pagefold/pagefold.toml"), "other = 1\n");
    write(&path("named.toml"), &format!("socket = \"{}\"\n", path("from-file").display()));
    let status = |command: &mut Command| command.arg("status").output().expect("status");
    let nobody = |socket: &Path| format!("pagefold: no daemon listens at {}", socket.display());
    let home_file = path(".config/pagefold/pagefold.toml");
    refused(&status(&mut tool(home.path())), 1, &format!("pagefold: {}:1: nonsense: unknown", home_file.display()));
    let xdg_file = path("xdg/pagefold/pagefold.toml");
    let xdg = status(tool(home.path()).env("XDG_CONFIG_HOME", path("xdg")));
    refused(&xdg, 1, &format!("pagefold: {}:1: other: unknown", xdg_file.display()));
    let named = status(tool(home.path()).env("PAGEFOLD_CONFIG", path("named.toml")));
    refused(&named, 1, &nobody(&path("from-file")));
    let both = status(tool(home.path()).env("PAGEFOLD_CONFIG", "/nowhere").arg("--config").arg(path("named.toml")));
    refused(&both, 1, &nobody(&path("from-file")));
    let none =
        tool(home.path()).args(["--config", "none", "status", "--socket"]).arg(path("x")).output().expect("status");
    refused(&none, 1, &nobody(&path("x")));
    // Whatever lies here under that name.
    write(&path("none"), "here = 1\n");
    let here = |name: &str| {
        let mut here = tool(home.path());
        here.current_dir(home.path()).args(["--config", name, "status", "--socket"]).arg(path("x"));
        here.output().expect("status")
    };
    refused(&here("none"), 1, &nobody(&path("x")));
    refused(&here("./none"), 1, "pagefold: ./none:1: here: unknown");
}

#[test]
fn an_invalid_file_is_one_line_with_file_line_and_key() {
    let home = tempfile::tempdir().expect("a directory");
    let file = home.path().join("c.toml");
    let daemon = |text: &str| {
        write(&file, text);
        tool(home.path()).arg("--config").arg(&file).arg("daemon").output().expect("the tool")
    };
    let at = |rest: &str| format!("pagefold: {}:{rest}", file.display());
    refused(&daemon("[daemon]\n\nperod = \"2s\"\n"), 1, &at("3: daemon.perod: unknown key; [daemon] has "));
    refused(
        &daemon("[daemon]\nkeep_cold_on_exit = \"true\"\n"),
        1,
        &at("2: daemon.keep_cold_on_exit: takes true or false, not a string"),
    );
    refused(&daemon("[daemon]\ntier_file_max = \"much\"\n"), 1, &at("2: daemon.tier_file_max: `much`: "));
    refused(&daemon("[daemon\n"), 1, &at("1: no TOML: "));
    // Whatever command meets it, and `run` reports what is not its program's fault by its own status.
    let run = tool(home.path()).args(["run", "--config"]).arg(&file).args(["--", "true"]).output().expect("the tool");
    refused(&run, 125, &at("1: no TOML: "));
    // Help does not need the file.
    let help = tool(home.path()).args(["daemon", "--help", "--config"]).arg(&file).output().expect("the tool");
    assert!(help.status.success());
}

/// A relative name holds for the daemon as well, which `run` starts elsewhere; an empty one is none.
#[test]
fn a_relative_path_in_the_environment_starts_at_the_current_directory() {
    let home = tempfile::tempdir().expect("a directory");
    write(&home.path().join("c.toml"), "[daemon]\nperod = \"2s\"\n");
    let run = tool(home.path())
        .current_dir(home.path())
        .env("PAGEFOLD_CONFIG", "c.toml")
        .env("PAGEFOLD_RUNTIME_DIR", "rt")
        .args(["env", "--socket", "s"])
        .output()
        .expect("the tool");
    let errors = String::from_utf8_lossy(&run.stderr).into_owned();
    assert!(errors.contains("daemon.perod: unknown key"), "{errors}");
    let env = tool(home.path())
        .current_dir(home.path())
        .env("PAGEFOLD_CONFIG", "")
        .env("PAGEFOLD_RUNTIME_DIR", "rt")
        .args(["env"])
        .output()
        .expect("the tool");
    let said = String::from_utf8_lossy(&env.stdout).into_owned();
    let agent = format!("{}/rt/pagefold-agent-", home.path().display());
    assert!(env.status.success() && said.contains(&agent), "{said}");
}

/// What a program under `run` starts by another version's `run` has one agent, wherever the first one lies.
#[test]
fn another_agent_is_not_loaded_beside() {
    let home = tempfile::tempdir().expect("a directory");
    let agents =
        "/tmp/pagefold-1/agent-0.0.9-1f.so:/run/user/1/pagefold/agent-1.2.3-rc1-0.so /x/pagefold-agent-9.9.9-a.so";
    let env = tool(home.path())
        .env("PAGEFOLD_RUNTIME_DIR", home.path().join("rt"))
        .env("LD_PRELOAD", format!("{agents}:/x/libfoo.so:/x/agent-smith.so"))
        .arg("env")
        .output()
        .expect("the tool");
    let said = String::from_utf8_lossy(&env.stdout).into_owned();
    let line = said.lines().find(|line| line.contains("LD_PRELOAD=")).unwrap_or_else(|| panic!("{said}"));
    assert_eq!(line.matches("agent-").count(), 2, "{line}");
    assert!(line.contains("/x/libfoo.so:/x/agent-smith.so"), "{line}");
}

#[test]
fn a_file_that_cannot_be_read_is_one_line() {
    let home = tempfile::tempdir().expect("a directory");
    let call = |path: &Path| tool(home.path()).args(["status", "--config"]).arg(path).output().expect("the tool");
    let missing = home.path().join("missing.toml");
    refused(&call(&missing), 1, &format!("pagefold: {}: cannot read: No such file", missing.display()));
    refused(&call(home.path()), 1, &format!("pagefold: {}: cannot read: Is a directory", home.path().display()));
    let binary = home.path().join("binary.toml");
    std::fs::write(&binary, b"# fine\nsocket = \"\xff\"\n").expect("a file");
    refused(&call(&binary), 1, &format!("pagefold: {}:2: not UTF-8 text", binary.display()));
    std::fs::File::create(home.path().join("long.toml")).and_then(|file| file.set_len(2 << 20)).expect("a file");
    refused(
        &call(&home.path().join("long.toml")),
        1,
        &format!("pagefold: {}/long.toml: longer", home.path().display()),
    );
    if common::root() {
        // Root reads every file, so the user's own file must be root's.
        let file = home.path().join(".config/pagefold/pagefold.toml");
        write(&file, "[daemon]\n");
        std::os::unix::fs::chown(&file, Some(12345), None).expect("chown");
        let others = tool(home.path()).arg("status").output().expect("the tool");
        refused(&others, 1, &format!("pagefold: {}: belongs to user 12345, not to you", file.display()));
    } else {
        std::fs::write(&missing, "").expect("a file");
        std::fs::set_permissions(&missing, std::fs::Permissions::from_mode(0o000)).expect("chmod");
        refused(&call(&missing), 1, &format!("pagefold: {}: cannot read: Permission denied", missing.display()));
    }
}

#[test]
fn options_of_the_cold_tier_need_it_wherever_it_is_asked_for() {
    let home = tempfile::tempdir().expect("a directory");
    let refused = tool(home.path()).args(["run", "--refault-budget", "2", "--", "true"]).output().expect("the tool");
    assert_eq!(refused.status.code(), Some(125));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("--refault-budget needs --cold"));
    // The file may hold such a default for calls that are cold.
    let file = home.path().join("c.toml");
    write(&file, "[run]\nrefault_budget = 2\n");
    let plain =
        tool(home.path()).args(["status", "--socket", "/nowhere", "--config"]).arg(&file).output().expect("tool");
    assert!(String::from_utf8_lossy(&plain.stderr).starts_with("pagefold: no daemon listens"));
}

#[test]
fn the_daemon_that_run_starts_reads_the_same_file() {
    let home = tempfile::tempdir().expect("a directory");
    if !common::can_merge() {
        return;
    }
    let file = home.path().join("c.toml");
    write(&file, &format!("socket = \"{}\"\n[daemon]\nworkers = 3\n", home.path().join("s").display()));
    // A name that means something only from here.
    let run = tool(home.path()).current_dir(home.path()).args(["run", "--config", "c.toml", "--", "true"]).output();
    let run = run.expect("the tool");
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let status = tool(home.path()).args(["status", "--json", "--config"]).arg(&file).output().expect("the tool");
    let status: Value = serde_json::from_slice(&status.stdout).expect("JSON");
    let pid = status["pid"].as_i64().expect("a number") as i32;
    // SAFETY: the daemon that this test's `run` started.
    unsafe { libc::kill(pid, libc::SIGTERM) };
    assert_eq!(status["workers"], 3, "{status}");
    wait_for("the daemon to end", 20, || !Path::new(&format!("/proc/{pid}")).exists());
}

#[test]
fn a_park_policy_that_contradicts_itself_is_one_line() {
    let home = tempfile::tempdir().expect("a directory");
    let file = home.path().join(".config/pagefold/pagefold.toml");
    let socket = home.path().join("s").display().to_string();
    let daemon = |args: &[&str]| {
        let output = tool(home.path()).args(["daemon", "--socket", &socket]).args(args).output();
        output.expect("the tool runs")
    };
    write(&file, "[park]\nidle = \"5m\"\nwithin = \"10m\"\n");
    refused(&daemon(&[]), 1, "pagefold: --park-within 10 m 00 s is longer than --park-idle 5 m 00 s: ");
    write(&file, "[park]\nwithin = \"10s\"\n");
    refused(&daemon(&[]), 1, "pagefold: --park-within needs --park-idle");
    write(&file, "[park]\nidle = \"0s\"\n");
    refused(&daemon(&[]), 1, &format!("pagefold: {}:2: park.idle: `0s`: takes at least 100ms", file.display()));
}
