//! Results on standard output, as text and as JSON.

use crate::help::{leaves, options};
use crate::tool::{Tool, tellers, text};
use std::collections::BTreeSet;
use std::process::Stdio;

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
        // A reader may close the pipe early: the tool then ends with status 0 and prints no error.
        let mut child = tool.command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
        drop(child.stdout.take());
        let output = child.wait_with_output().expect("it ends");
        assert_eq!(text(&output.stderr), "", "{args:?} | true");
        assert_eq!(output.status.code(), Some(0), "{args:?} | true");
    }
}

#[test]
fn json_output_is_one_document() {
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
    // Every command that prints results offers them as JSON.
    for (path, help) in leaves(&tool) {
        let silent = ["bench", "completions", "daemon", "env", "man", "run", "top"].contains(&path[0].as_str())
            || matches!(path.join(" ").as_str(), "disk mount" | "disk umount" | "image umount" | "image rm")
            || matches!(path.join(" ").as_str(), "image export" | "image exec");
        let offers = options(&help).iter().any(|(name, _)| name == "json");
        assert!(offers || silent, "{path:?} has no --json");
    }
}
