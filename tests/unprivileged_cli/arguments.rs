//! Sizes, times and examples of every command, and the documented exit statuses.

use crate::help::{leaves, options};
use crate::tool::{Tool, text};
use std::collections::BTreeSet;

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
    let run = |program: &'static str| vec!["run", "--backend", "agent", "--socket", &socket, "--", program];
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
        (vec!["pause"], 2),
        (vec!["resume"], 2),
        (vec!["scan"], 2),
        (vec!["scan", "--tree", "x", "--sample", "1/4"], 2),
        (vec!["image", "build", "--name", "", "plain"], 2),
        (vec!["image", "import", "--name", &slashes, "plain"], 2),
        (vec!["daemon", "--pool-max", "0"], 2),
        (vec!["daemon", "--tier-max", "1"], 2),
        (vec!["daemon", "--vma-budget", "524289"], 2),
        (vec!["pause", "abc"], 2),
        (vec!["daemon", "--scan-interval", "1ms"], 2),
        (vec!["daemon", "--cold-scan-interval", "49ms"], 2),
        (vec!["disk", "mount", "/no/such", "/no/such", "--cache-size", "4T"], 2),
        (vec!["disk", "mount", "/no/such", "/no/such", "--cache-size", "4095K"], 2),
        (vec!["disk", "mount", "/no/such", "/no/such", "--cache-size", "4M"], 1),
        (vec!["demo", "--size", "1"], 2),
        (vec!["demo", "--processes", "0"], 2),
        (vec!["run"], 125),
        (vec!["run", "--refault-budget", "5", "--", "true"], 125),
        (vec!["run", "--backend", "agent", "--socket", "/no/such/dir/s", "--", "true"], 125),
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
    let _ = tool.run(&["stop", "--socket", &socket]);
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
    let refused = vec!["run", "--backend", "agent", "--socket", "/no/such/dir/s", "--", "true"];
    for (args, code) in [(refused, 125), (vec!["scan", "/no/such/file"], 1)] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let ended = tool.command(&args).stderr(writer).status().expect("the tool runs");
        assert_eq!(ended.code(), Some(code), "{args:?}");
    }
}
