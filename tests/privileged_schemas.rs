//! What the daemon's commands print with `--json`, with clients, a cold tier and a mount at work, is what docs/schemas say.

mod common;
#[path = "common/schema.rs"]
mod schema;

use common::{Daemon, Reaped, TOOL, can_merge, installed, skipped, wait_for};
use schema::assert_valid;
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Stdio};

fn parsed(output: &std::process::Output) -> Value {
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {said}"))
}

/// A program that fills 8 MiB with pages of its own content and sleeps.
fn client(daemon: &Daemon, options: &[&str]) -> Reaped {
    let program = r#"$d .= pack("N", $_) x 1024 for 1 .. 2048; sleep 1000"#;
    let mut command = daemon.run(options);
    command.args(["perl", "-e", program]).stdin(Stdio::null()).stdout(Stdio::null());
    Reaped(command.spawn().expect("perl starts"))
}

#[test]
fn status_and_park_match_their_schemas() {
    if !can_merge() || installed("perl").is_none() {
        return;
    }
    // A keeper would start another daemon when this one is killed at the end.
    let daemon = Daemon::start(&["--no-keeper"]);
    assert_valid("status", &daemon.status());
    let (_first, _second) = (client(&daemon, &["--manage=all"]), client(&daemon, &["--manage=all"]));
    let cold = client(&daemon, &["--cold"]);
    wait_for("pages to be shared", 60, || daemon.total("pages_sharing") > 1000);
    wait_for("the cold client to be known", 60, || !daemon.status()["cold"]["clients"].as_array().unwrap().is_empty());
    let pid = cold.pid().to_string();
    let mut pages = 0;
    wait_for("pages to go out", 60, || {
        let parked = parsed(&daemon.tool(&["park", "--json", &pid]));
        assert_valid("park", &parked);
        assert_eq!(parked["clients"], 1);
        pages += parked["pages"].as_u64().unwrap();
        pages > 1000
    });
    let status = daemon.status();
    assert_valid("status", &status);
    assert!(!status["cold"]["domains"].as_array().unwrap().is_empty(), "{status:#}");
    assert_valid("park", &parsed(&daemon.tool(&["unpark", "--json", &pid])));
}

/// A mount that ends with its owner.
struct Mount<'a> {
    at: &'a Path,
    run: &'a Path,
}

impl Drop for Mount<'_> {
    fn drop(&mut self) {
        let mut end = Command::new(TOOL);
        let _ = end.args(["disk", "umount", "--force"]).arg(self.at).env("PAGEFOLD_RUNTIME_DIR", self.run).output();
    }
}

#[test]
fn the_status_of_a_mount_matches_its_schema() {
    if !common::root() || !Path::new("/dev/fuse").exists() {
        return skipped("mounting needs root and /dev/fuse");
    }
    let scratch = tempfile::tempdir_in("/var/tmp").expect("a directory");
    let [images, at, run] = ["images", "at", "run"].map(|name| scratch.path().join(name));
    for dir in [&images, &at, &run] {
        std::fs::create_dir(dir).expect("a directory");
    }
    std::fs::write(images.join("a.raw"), vec![1; 1 << 20]).expect("an image");
    let tool = |args: &[&str]| {
        let output = Command::new(TOOL).args(args).env("PAGEFOLD_RUNTIME_DIR", &run).output().expect("the tool runs");
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        output
    };
    let (from, to) = (images.display().to_string(), at.display().to_string());
    tool(&["disk", "mount", &from, &to, "--cache-size", "64M", "--background"]);
    let _mount = Mount { at: &at, run: &run };
    std::fs::read(at.join("a.raw")).expect("the image is shown");
    let one = parsed(&tool(&["disk", "status", "--json", &to]));
    assert_valid("disk-status", &one);
    assert_eq!(one["images"][0]["name"], "a.raw", "{one:#}");
    assert_valid("disk-status", &parsed(&tool(&["disk", "status", "--json"])));
    // Without a daemon, the status of everything is that of the mounts.
    assert_valid("status", &parsed(&tool(&["status", "--json"])));
}
