//! What `pagefold-bench NAME --json` prints is what docs/schemas/bench.json says.

#[path = "../../tests/common/schema.rs"]
mod schema;

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The records below a directory, which has a folder per machine.
fn records(dir: &Path) -> Vec<PathBuf> {
    let inside = |dir: &Path| std::fs::read_dir(dir).expect("a folder").flatten().map(|entry| entry.path());
    inside(dir).flat_map(|machine| inside(&machine).collect::<Vec<_>>()).collect()
}

fn bench(args: &[&str]) -> Output {
    let output = Command::new(env!("CARGO_BIN_EXE_pagefold-bench")).args(args).output().expect("it runs");
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

#[test]
fn several_benches_are_one_document_and_one_record_each() {
    let dir = tempfile::tempdir().expect("a directory");
    let kept = dir.path().display().to_string();
    let small = ["--keys", "2000", "--rounds", "1", "--threads", "2", "--quick", "--json"];
    let output = bench(&[&["llds"][..], &small, &["--record", &kept]].concat());
    let document: Value = serde_json::from_slice(&output.stdout).expect("one JSON document");
    schema::assert_valid("bench", &document);
    let rows = document["rows"].as_array().unwrap();
    assert!(["index", "kv"].iter().all(|bench| rows.iter().any(|row| row["bench"] == *bench)), "{rows:?}");
    let sd_tree = |row: &&Value| row["structure"] == "sd-tree";
    let row = rows.iter().find(sd_tree).expect("a row of the SD tree");
    assert!(row["figures"]["get"][0].is_number(), "{row}");
    let mut names = Vec::new();
    for path in records(dir.path()) {
        let text = std::fs::read_to_string(&path).expect("a record");
        schema::assert_valid("bench-record", &serde_json::from_str(&text).expect("JSON"));
        assert!(!text.contains(&kept), "a record names no path of this machine: {text}");
        names.push(path.file_name().unwrap().to_string_lossy()[11..].to_owned());
    }
    names.sort();
    assert_eq!(names, ["index-quick.json", "kv-quick.json"], "named by bench and part, after the date");
}

#[test]
fn a_live_client_is_parked_and_touched() {
    let output = bench(&["zswap", "--part", "live", "--quick", "--guests", "0", "--json"]);
    let document: Value = serde_json::from_slice(&output.stdout).expect("one JSON document");
    schema::assert_valid("bench", &document);
    let told = String::from_utf8_lossy(&output.stderr);
    if let Some(skipped) = told.lines().find(|line| line.starts_with("SKIPPED") && line.contains(" live ")) {
        return eprintln!("{skipped}");
    }
    let rows = document["rows"].as_array().unwrap();
    let names = ["touch, random", "touch, random, cores busy", "touch, in order"];
    for name in names {
        let own: Vec<&Value> = rows.iter().filter(|row| row["name"] == name).collect();
        assert!(own.len() == 1 && own[0]["figures"]["p99 us"].is_number(), "{name}: {rows:?}");
        let times = own[0]["distribution_us"].as_array().expect("pairs").iter().map(|pair| pair[0].as_f64());
        assert!(times.len() == 16 && times.is_sorted(), "{name}: {rows:?}");
    }
}

#[test]
fn help_is_printed_and_ends_well() {
    for args in [&["--help"][..], &["all", "--help"], &["llds", "--help"]] {
        let text = String::from_utf8(bench(args).stdout).expect("text");
        for name in ["containers", "coverage", "erofs", "pagecache", "index", "kv", "pageone", "zswap"] {
            assert!(text.lines().any(|line| line.starts_with(&format!("  {name} "))), "{args:?}: {text}");
        }
    }
    for name in ["containers", "coverage", "erofs", "pagecache", "index", "kv", "pageone", "zswap"] {
        let text = String::from_utf8(bench(&[name, "--quick", "--help"]).stdout).expect("text");
        assert!(text.contains("--quick"), "{name}: {text}");
    }
}
