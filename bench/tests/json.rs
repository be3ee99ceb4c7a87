//! What `pagefold-bench NAME --json` prints is what docs/schemas/bench.json says, and a plot is made of a run's own rows.

#[path = "../../tests/common/schema.rs"]
mod schema;

use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};

fn bench(args: &[&str]) -> Output {
    let output = Command::new(env!("CARGO_BIN_EXE_pagefold-bench")).args(args).output().expect("it runs");
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

fn bars(plot: &Path) -> usize {
    let text = std::fs::read_to_string(plot).unwrap_or_else(|error| panic!("{}: {error}", plot.display()));
    let tree = roxmltree::Document::parse(&text).expect("a plot is XML");
    tree.descendants().filter(|node| node.attribute("class").is_some_and(|class| class.starts_with("bar "))).count()
}

#[test]
fn a_run_prints_its_schema_and_draws_its_rows() {
    let dir = tempfile::tempdir().expect("a directory");
    let plots = dir.path().display().to_string();
    let small = ["--keys", "2000", "--rounds", "1", "--threads", "1", "--quick", "--json"];
    let kept = dir.path().join("kept").display().to_string();
    let output = bench(&[&["kv", "--tables", "source", "--plot", &plots, "--record", &kept][..], &small].concat());
    let document: Value = serde_json::from_slice(&output.stdout).expect("one JSON document");
    schema::assert_valid("bench", &document);
    assert_eq!(document["bench"], "kv");
    let rows = document["rows"].as_array().unwrap();
    assert!(rows.iter().any(|row| row["name"] == "forrest" && row["table"] == "source"), "{rows:?}");
    let lines = document["published"].as_array().unwrap();
    let valued = lines.iter().filter(|line| line["value"].is_number()).count();
    assert_eq!(bars(&dir.path().join("llds.svg")), valued, "a bar for each value");
    let record = std::fs::read_dir(kept).expect("it was made").next().expect("one record").expect("readable").path();
    assert!(record.file_name().unwrap().to_string_lossy().ends_with("-source.json"), "named by its part: {record:?}");
    schema::assert_valid(
        "bench-record",
        &serde_json::from_slice(&std::fs::read(record).expect("a record")).expect("JSON"),
    );
}

#[test]
fn several_benches_are_one_document_and_one_record_each() {
    let dir = tempfile::tempdir().expect("a directory");
    let records = dir.path().display().to_string();
    let small = ["--keys", "2000", "--rounds", "1", "--threads", "1", "--quick", "--json"];
    let output = bench(&[&["llds"][..], &small, &["--record", &records]].concat());
    let document: Value = serde_json::from_slice(&output.stdout).expect("one JSON document");
    schema::assert_valid("bench", &document);
    let rows = document["rows"].as_array().unwrap();
    assert!(["index", "kv"].iter().all(|bench| rows.iter().any(|row| row["bench"] == *bench)), "{rows:?}");
    let mut written = 0;
    for entry in std::fs::read_dir(dir.path()).expect("records").flatten() {
        let text = std::fs::read_to_string(entry.path()).expect("a record");
        schema::assert_valid("bench-record", &serde_json::from_str(&text).expect("JSON"));
        assert!(!text.contains(&records), "where it was kept is nobody's affair: {text}");
        written += 1;
    }
    assert_eq!(written, 2);
}

/// Pages that went out lately come back from LZ4, older ones from Zstandard: neither row is to be taken for the other.
#[test]
fn a_live_client_is_touched_with_dense_pages_and_with_light_ones() {
    let output = bench(&["zswap", "--part", "live", "--quick", "--guests", "0", "--json"]);
    let document: Value = serde_json::from_slice(&output.stdout).expect("one JSON document");
    schema::assert_valid("bench", &document);
    let told = String::from_utf8_lossy(&output.stderr);
    if let Some(skipped) = told.lines().find(|line| line.starts_with("SKIPPED") && line.contains(" live ")) {
        return eprintln!("{skipped}");
    }
    let rows = document["rows"].as_array().unwrap();
    let names = ["touch, random", "touch, random, cores busy", "touch, in order"];
    let light = ["touch, random, LZ4", "touch, random, LZ4, cores busy", "touch, in order, LZ4"];
    for name in names.iter().chain(&light) {
        let own: Vec<&Value> = rows.iter().filter(|row| row["name"] == **name).collect();
        assert!(own.len() == 1 && own[0]["figures"]["p99 us"].is_number(), "{name}: {rows:?}");
    }
}

#[test]
fn all_plots_come_from_the_records() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = dir.path().display().to_string();
    let output = bench(&["plot", &at, "--records", concat!(env!("CARGO_MANIFEST_DIR"), "/record"), "--json"]);
    let sources: Vec<Value> = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(sources.len(), 5);
    for source in sources {
        let name = source["name"].as_str().unwrap();
        let valued = source["figures"].as_array().unwrap().iter().filter(|line| line["value"].is_number()).count();
        assert_eq!(bars(&dir.path().join(format!("{name}.svg"))), valued, "{name}");
    }
}
