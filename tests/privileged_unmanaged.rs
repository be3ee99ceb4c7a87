//! Status names the memory of a client that is not managed, by bytes and reason.

mod common;

use common::cold::{Compiled, Host, Served, compiled};
use common::{can_merge, is_root, wait_for};
use pagefold_daemon::control::{self, Answer, Request};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::OnceLock;

const MIB: i64 = 1 << 20;
/// The reason for memory that the agent did not list yet.
const NEW: &str = "new, not looked at yet";

/// The compiled client, once.
fn program() -> Option<&'static Path> {
    static BUILT: Compiled = OnceLock::new();
    compiled(&BUILT, "unmanaged", || is_root() && can_merge())
}

/// Bytes by reason, once the client was looked at.
fn unmanaged(host: &Host, pid: i32) -> BTreeMap<String, i64> {
    let status = host.status();
    let clients = status["clients"].as_array().expect("a list");
    let Some(client) = clients.iter().find(|client| client["pid"] == pid) else { return BTreeMap::new() };
    let list = client["unmanaged"].as_array().expect("a list");
    let sizes: Vec<i64> = list.iter().map(|one| one["bytes"].as_i64().expect("a number")).collect();
    assert!(sizes.is_sorted_by(|one, next| one >= next), "the largest first: {list:?}");
    list.iter().map(|one| one["reason"].as_str().expect("a text").to_owned()).zip(sizes).collect()
}

#[test]
fn memory_that_is_left_alone_is_named_by_bytes_and_reason() {
    let Some(program) = program() else { return };
    let host = Host::start(&["--no-keeper"]);
    let mut client = Served::start_live_of(&host, program);
    let pid = client.pid();
    // A question for counts alone walks no page tables.
    let counted = || match control::ask(&host.socket, &Request::Counts {}) {
        Ok(Answer::Status(status)) => status.clients.into_iter().find(|client| client.pid == pid),
        other => panic!("{other:?}"),
    };
    wait_for("the client to be counted", 60, || counted().is_some());
    assert!(counted().is_some_and(|client| client.unmanaged.is_empty()), "the client was looked at");
    let mut before = BTreeMap::new();
    wait_for("the client to be looked at", 60, || {
        before = unmanaged(&host, pid);
        !before.is_empty() && !before.contains_key(NEW)
    });
    client.says("fill");
    let expected = [
        "shared memory",
        "locked (mlock)",
        "kept out of core dumps (MADV_DONTDUMP)",
        "secret (MADV_WIPEONFORK)",
        "not both readable and writable",
        "excluded (MADV_UNMERGEABLE), or pagefold cannot see its end",
        "under a userfaultfd of the program's own",
        "mappings below 128 KiB",
        "changed copies of pages of files",
    ];
    let mut found = BTreeMap::new();
    let added = |found: &BTreeMap<String, i64>, reason: &str| {
        found.get(reason).unwrap_or(&0) - before.get(reason).unwrap_or(&0)
    };
    // What is managed is new at first, as are the ranges that the program excluded.
    wait_for("the list to be known, and the client to be looked at again", 120, || {
        found = unmanaged(&host, pid);
        !found.contains_key(NEW) && added(&found, expected[0]) > 0
    });
    for reason in expected {
        let off = added(&found, reason) - 8 * MIB;
        assert!(off.abs() <= 2 * 4096, "{reason}: {off} bytes off in {found:?}, before {before:?}");
    }
    let all: i64 = expected.iter().map(|reason| added(&found, reason)).sum();
    let total = found.values().sum::<i64>() - before.values().sum::<i64>();
    assert!((total - all).abs() < MIB, "what is managed is not named: {found:?}, before {before:?}");
    let text = String::from_utf8(host.tool(&["status"]).stdout).expect("text");
    let line = format!("{pid} unmanaged not managed: ");
    let told =
        text.lines().find_map(|told| told.strip_prefix(&line)).unwrap_or_else(|| panic!("no {line:?} in {text}"));
    assert!(expected.iter().all(|reason| told.contains(reason)), "{told}");
}
