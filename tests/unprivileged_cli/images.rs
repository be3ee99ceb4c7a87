//! `pagefold image`: questions change nothing, and a refusal is one line with its cure.

use crate::tool::{Tool, tellers, text};
use std::process::{Command, Stdio};

#[test]
fn queries_create_no_image_store() {
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
fn a_missing_image_does_not_stop_the_removal_of_others() {
    let (tool, _) = tellers("1");
    assert!(tool.run(&["image", "build", "--name", "a:1", "tree"]).status.success());
    let removed = tool.run(&["image", "rm", "missing", "a:1"]);
    assert_eq!(removed.status.code(), Some(1));
    let said = text(&removed.stderr);
    assert!(said.contains("no image \"missing\"") && said.trim_end().lines().count() == 1, "{said}");
    assert!(!text(&tool.run(&["image", "ls"]).stdout).contains("a:1"));
}

#[test]
fn an_unreadable_record_is_named_and_the_others_are_shown() {
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
fn a_requested_proof_that_cannot_be_given_is_a_failure() {
    let (tool, _) = tellers("1");
    assert!(tool.run(&["image", "build", "--name", "a:1", "tree"]).status.success());
    assert!(tool.run(&["image", "verify"]).status.success());
    // Root of a namespace of its own is not root here.
    let mut inside = Command::new("unshare");
    inside.args(["--user", "--map-root-user", env!("CARGO_BIN_EXE_pagefold"), "image", "verify", "--check-frames"]);
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
fn refusals_of_images_are_one_line_with_a_cure() {
    let (tool, _) = tellers("1");
    assert!(tool.run(&["image", "build", "--name", "a:1", "tree"]).status.success());
    std::fs::write(tool.dir.path().join("packed"), b"\x04\x22\x4d\x18\x64\x40\xa7").expect("a file");
    std::fs::write(tool.dir.path().join("text"), "no archive").expect("a file");
    let tarred = Command::new("tar").args(["-cf", "cut.tar", "tree"]).current_dir(tool.dir.path()).status();
    assert!(tarred.expect("tar runs").success());
    let cut = std::fs::File::options().write(true).open(tool.dir.path().join("cut.tar")).expect("an archive");
    cut.set_len(50_000).expect("it is longer");
    for (args, said) in [
        (["image", "mount", "a:1", "missing"].to_vec(), "mount: missing: no such directory; make it first (mkdir)"),
        (vec!["image", "mount", "a:1", "packed"], "mount: packed: not a directory;"),
        (vec!["image", "build", "--name", "b:1", "packed"], "packed: this archive is packed with lz4"),
        (vec!["image", "export", "--format", "oci", "a:1", "-"], "only a tar goes to standard output"),
        (vec!["image", "export", "--format", "oci", "a:1", "text"], "text: not a directory; give a new one"),
        (vec!["image", "import", "--name", "b:1", "tree"], "a plain directory or archive is for image build"),
        (vec!["image", "import", "--name", "b:1", "text"], "text: tar: cut off in a header, after 0 entries; a plain"),
        (vec!["image", "import", "--name", "b:1", "packed"], "packed: this archive is packed with lz4"),
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
