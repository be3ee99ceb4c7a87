//! `pagefold image pull`, `push` and all that has `--remote` run the program that talks to registries.

use crate::common::{TOOL, executable};
use crate::tool::{Tool, text};
use std::path::Path;
use std::process::Command;

/// The tool where no other program lies beside it.
fn alone(tool: &Tool, args: &[&str]) -> Command {
    let path = tool.dir.path().join("pagefold");
    if !path.exists() {
        std::fs::hard_link(TOOL, &path).unwrap_or_else(|_| executable::copy(Path::new(TOOL), &path));
    }
    let mut command = Command::new(path);
    command.args(args).current_dir(tool.dir.path()).env("PAGEFOLD_CONFIG", "none").env("PATH", tool.dir.path());
    command.env("PAGEFOLD_STORE", tool.dir.path().join("store"));
    command
}

#[test]
fn without_the_program_one_line_says_how_to_get_it() {
    let tool = Tool::new();
    let gc = ["image", "gc", "--remote", "file:///srv/fleet"];
    for args in [["image", "pull", "app:1", "--json"], ["image", "push", "app:1", "example.org/app"], gc] {
        let refused = alone(&tool, &args).output().expect("the tool runs");
        let said = text(&refused.stderr);
        assert_eq!((refused.status.code(), said.lines().count()), (Some(1), 1), "{said}");
        assert!(said.contains("install the package pagefold-remote, or build it: cargo build"), "{said}");
        assert!(!tool.dir.path().join("store").exists());
    }
    let found = text(&alone(&tool, &["doctor", "--json"]).output().expect("the tool runs").stdout);
    assert!(found.contains("no pagefold-remote"), "{found}");
}

#[test]
fn the_program_gets_what_the_tool_was_told() {
    let tool = Tool::new();
    let script = tool.dir.path().join("pagefold-remote");
    executable::script("#!/bin/sh\nfor word; do echo \"$word\"; done\nexit 7\n", &script);
    let store = tool.dir.path().join("store").display().to_string();
    let pull = ["image", "--domain", "d", "pull", "redis:7", "--platform=linux/aarch64", "--plain-http"];
    let ran = alone(&tool, &pull).output().expect("the tool runs");
    assert_eq!(ran.status.code(), Some(7), "{}", text(&ran.stderr));
    let words: Vec<String> = text(&ran.stdout).lines().map(str::to_owned).collect();
    assert_eq!(words[..5], ["pull", "--domain", "d", "--store", &store]);
    for word in ["--name=redis:7", "--platform=linux/arm64", "--plain-http", "--timeout=30"] {
        assert!(words.iter().any(|other| other == word), "{word}: {words:?}");
    }
    assert_eq!(words[words.len() - 2..], ["--", "redis:7"]);
    // An image of a fleet's store has its own name there.
    let ran = alone(&tool, &["image", "pull", "s3://bucket/fleet/app:2"]).output().expect("the tool runs");
    let words = text(&ran.stdout);
    assert!(words.contains("\n--name=app:2\n") && words.ends_with("\n--\ns3://bucket/fleet/app:2\n"), "{words}");
    let ran = alone(&tool, &["image", "push", "-", "x/y", "--timeout=5", "--json"]).output().expect("the tool runs");
    let words = text(&ran.stdout);
    assert!(words.starts_with("push\n") && words.ends_with("--timeout=5\n--json\n--\nx/y\n"), "{words}");
    let of_fleet = |words: &[&str]| {
        let words = [&["image"], words, &["--remote", "s3://bucket/fleet"]].concat();
        text(&alone(&tool, &words).output().expect("the tool runs").stdout)
    };
    assert_eq!(of_fleet(&["ls"]), "ls\n--timeout=30\n--\ns3://bucket/fleet\n");
    let rm = of_fleet(&["rm", "app:1", "app:2", "--json"]);
    assert_eq!(rm, "rm\n--timeout=30\n--json\n--\ns3://bucket/fleet\napp:1\napp:2\n");
    let gc = ["image", "gc", "--remote", "s3://bucket/fleet", "--dry-run", "--keep=1h"];
    let words = text(&alone(&tool, &gc).output().expect("the tool runs").stdout);
    let expected = "gc\n--keep=3600\n--wait=900\n--dry-run\n--timeout=30\n--\ns3://bucket/fleet\n";
    assert_eq!(words, expected);
    // What cannot be a name or a platform is refused before anything runs.
    for wrong in [&["image", "pull", "app", "--name="][..], &["image", "pull", "app", "--platform=linux"]] {
        assert_eq!(alone(&tool, wrong).output().expect("the tool runs").status.code(), Some(2));
    }
}

#[test]
fn options_of_a_fleets_store_need_one() {
    let tool = Tool::new();
    let words: [&[&str]; 3] = [&["image", "ls"], &["image", "rm", "app:1"], &["image", "gc"]];
    for words in words {
        let mut options = vec!["--plain-http", "--timeout=5s"];
        if words.contains(&"gc") {
            options.extend(["--keep=1h", "--wait=1m"]);
        }
        for option in options {
            let said = tool.run(&[words, &[option]].concat());
            assert_eq!(said.status.code(), Some(2), "{words:?} {option}");
            assert!(text(&said.stderr).contains("--remote <URL>"), "{words:?} {option}: {}", text(&said.stderr));
        }
    }
}
