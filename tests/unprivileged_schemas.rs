//! What commands print with `--json` is what docs/schemas say: a key that is renamed, removed or new fails here.

#[path = "common/schema.rs"]
mod schema;

use schema::{assert_valid, root, schema, violations};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;

/// The tool under test.
const TOOL: &str = env!("CARGO_BIN_EXE_pagefold");

/// Runs the tool and gives what it printed as JSON; exit status 1 is a result where `may_fail`.
fn json_of(dir: &Path, args: &[&str], may_fail: bool) -> Value {
    let output = Command::new(TOOL)
        .args(args)
        .current_dir(dir)
        .env("PAGEFOLD_RUNTIME_DIR", dir.join("run"))
        .env("PAGEFOLD_STORE", dir.join("store"))
        .output()
        .expect("the tool runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() || may_fail && output.status.code() == Some(1), "{args:?}: {said}");
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{args:?}: {error}: {said}"))
}

/// A directory with two files that are half equal, and two trees.
fn data() -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a directory");
    let page = |number: usize| vec![number as u8 + 1; 4096];
    for (name, own) in [("a", 100), ("b", 200)] {
        let tree = dir.path().join(format!("tree-{name}"));
        std::fs::create_dir(&tree).expect("a directory");
        let bytes: Vec<u8> = (0..64).chain([own, own]).flat_map(page).chain([0; 8192]).collect();
        std::fs::write(dir.path().join(format!("{name}.raw")), &bytes).expect("a file");
        std::fs::write(tree.join("file"), &bytes).expect("a file");
        std::fs::write(tree.join("same"), page(7)).expect("a file");
        std::os::unix::fs::symlink("same", tree.join("link")).expect("a link");
    }
    std::fs::create_dir(dir.path().join("run")).expect("a directory");
    dir
}

#[test]
fn scans_match_their_schemas() {
    let data = data();
    let dir = data.path();
    let files = json_of(dir, &["scan", "--json", "./a.raw", "./b.raw"], false);
    assert_valid("scan", &files);
    assert!(files["totals"]["duplicate_across"].as_u64() > Some(0), "{files:#}");
    // A live process has reasons and mappings that a file has not.
    let own = std::process::id().to_string();
    assert_valid("scan", &json_of(dir, &["scan", "--json", &own], false));
    assert_valid("scan-tree", &json_of(dir, &["scan", "--json", "--tree", "tree-a", "tree-b"], false));
    assert_valid("scan-tree", &json_of(dir, &["image", "scan", "--json", "tree-a"], false));
    assert_valid("image-stat-any", &json_of(dir, &["image", "stat", "--json", "--any", "tree-a", "tree-b"], false));
    let images = json_of(dir, &["disk", "scan", "--json", "a.raw", "b.raw", "absent.raw"], true);
    assert_valid("disk-scan", &images);
    assert_eq!(images["unreadable"].as_array().map(Vec::len), Some(1), "{images:#}");
}

#[test]
fn image_commands_match_their_schemas() {
    let data = data();
    let dir = data.path();
    for name in ["a", "b"] {
        let built = json_of(dir, &["image", "build", "--json", "--name", name, &format!("tree-{name}")], false);
        assert!(built["digest"].is_string(), "{built:#}");
    }
    let export = ["image", "export", "--format", "oci", "a", "layout"];
    assert!(Command::new(TOOL).args(export).current_dir(dir).env("PAGEFOLD_STORE", dir.join("store")).status().is_ok());
    json_of(dir, &["image", "import", "--json", "--name", "c", "layout"], false);
    let list = json_of(dir, &["image", "ls", "--json"], false);
    assert_valid("image-ls", &list);
    assert_eq!(list.as_array().map(Vec::len), Some(3));
    assert_eq!(list[2]["layers"][0]["tree"], list[0]["digest"], "{list:#}");
    assert_valid("image-stat", &json_of(dir, &["image", "stat", "--json"], false));
    let output = Command::new(TOOL)
        .args(["image", "ls", "--json", "a"])
        .env("PAGEFOLD_STORE", dir.join("store"))
        .output()
        .expect("the tool runs");
    let lines: Vec<Value> =
        String::from_utf8_lossy(&output.stdout).lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert!(lines.len() >= 3, "{lines:?}");
    lines.iter().for_each(|line| assert_valid("image-ls-files", line));
    std::fs::write(dir.join("store/domains/default/images/a"), "{").expect("a record");
    let stat = json_of(dir, &["image", "stat", "--json"], true);
    assert_valid("image-stat", &stat);
    assert_eq!(stat["damaged"].as_array().map(Vec::len), Some(1), "{stat:#}");
}

#[test]
fn doctor_and_empty_status_match_their_schemas() {
    let data = data();
    assert_valid("doctor", &json_of(data.path(), &["doctor", "--json"], true));
    assert_valid("disk-status", &json_of(data.path(), &["disk", "status", "--json"], false));
}

#[test]
fn records_of_benchmarks_match_their_schema() {
    let records = format!("{}/bench/record", root());
    let mut checked = 0;
    // One folder per machine and kernel.
    let folders = std::fs::read_dir(&records).expect("a folder").flatten().map(|folder| folder.path());
    for entry in folders.flat_map(|folder| std::fs::read_dir(folder).expect("records")).flatten() {
        if entry.path().extension().is_none_or(|kind| kind != "json") {
            continue;
        }
        let text = std::fs::read_to_string(entry.path()).expect("a record");
        let record: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{:?}: {error}", entry.path()));
        // Those of benches that wrote documents of their own, before there was one form for all.
        if record.get("command").is_some() {
            assert_valid("bench-record", &record);
            checked += 1;
        }
    }
    assert!(checked > 0, "{records} holds no record");
}

#[test]
fn schemas_are_strict() {
    let stat = json!({ "clients": 1, "pages": 2, "bytes": 8192, "seconds": 0.5 });
    let park = schema("park");
    assert_eq!(violations(&park, &stat), Vec::<String>::new());
    for (change, key) in [("gone", "pages"), ("renamed", "bytes"), ("of another type", "clients")] {
        let mut wrong = stat.clone();
        let value = wrong.as_object_mut().unwrap().remove(key).unwrap();
        match change {
            "renamed" => drop(wrong.as_object_mut().unwrap().insert(format!("{key}_now"), value)),
            "of another type" => wrong[key] = json!("1"),
            _ => {}
        }
        assert!(!violations(&park, &wrong).is_empty(), "{key} is {change}, and nobody noticed");
    }
    for entry in std::fs::read_dir(format!("{}/docs/schemas", root())).expect("schemas").flatten() {
        let name = entry.file_name().to_string_lossy().trim_end_matches(".json").to_owned();
        strict(&name, &schema(&name));
    }
}

/// Every object with properties says which are required, and allows no others.
fn strict(at: &str, schema: &Value) {
    let Some(rules) = schema.as_object() else { return };
    if rules.contains_key("properties") && !rules["properties"].get("properties").is_some_and(Value::is_object) {
        assert_eq!(rules.get("additionalProperties"), Some(&Value::Bool(false)), "{at}");
        assert!(rules.contains_key("required"), "{at}");
    }
    for (key, value) in rules {
        match value {
            Value::Object(_) => strict(&format!("{at}/{key}"), value),
            Value::Array(all) => all.iter().for_each(|value| strict(&format!("{at}/{key}"), value)),
            _ => {}
        }
    }
}
