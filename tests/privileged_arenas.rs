//! Blocks of threads: what the C library's malloc gives to threads other than the first is merged, and goes to the cold
//! tier, where its end is known; every byte is as it was written.

mod common;

use common::cold::{Compiled, Host, Parking, Served, compiled};
use common::{can_merge, is_root, skipped, wait_for};
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

/// The compiled client, once.
fn program() -> Option<&'static Path> {
    static BUILT: Compiled = OnceLock::new();
    compiled(&BUILT, "arenas", || {
        let known = cfg!(all(target_arch = "x86_64", target_env = "gnu"));
        if !known {
            skipped("arenas are known on x86-64 only");
        }
        can_merge() && known
    })
}

/// Pages of its blocks that are the pool's: in first heaps, and in later ones.
fn merged(client: &mut Served) -> (u64, u64) {
    let said = client.says("merged");
    let mut numbers = said.split(' ').map(|number| number.parse().expect("a number"));
    (numbers.next().expect("two"), numbers.next().expect("two"))
}

/// Six times 14 MiB are the same, and 64 MiB are a hundred blocks again and again: 34,000 pages, in first heaps alone.
const PAGES: u64 = 33_000;
/// What the holders have not written since.
const PAGES_KEPT: u64 = 30_000;

fn wait_for_merging(client: &mut Served, pages: u64) {
    wait_for("blocks to be merged", 240, || merged(client).0 > pages);
    assert_eq!(merged(client).1, 0, "later heaps end unseen");
}

#[test]
fn blocks_of_threads_are_merged() {
    let Some(program) = program() else { return };
    let host = Host::start(&["--no-keeper"]);
    let mut client = Served::start_live_of(&host, program);
    wait_for_merging(&mut client, PAGES);
    client.says("check");
    host.verify();
    client.says("fork");
    for _ in 0..3 {
        client.says("storm 4000");
    }
    wait_for_merging(&mut client, PAGES_KEPT);
    host.verify();
    let pid = client.pid().to_string();
    assert!(host.tool(&["unmerge", &pid]).status.success());
    client.says("check");
}

#[test]
fn blocks_of_threads_go_to_the_tier_and_come_back() {
    let Some(program) = program() else { return };
    // Most of 174 MiB, of which 20 or so are in a later heap.
    common::cold::storm_beside_parking(program, 34_000);
}

#[test]
fn blocks_of_threads_are_merged_parked_and_merged_again() {
    let Some(program) = program() else { return };
    let host = Host::start(&[]);
    let mut client = Served::start_live_of(&host, program);
    wait_for_merging(&mut client, PAGES);
    {
        let _parking = Parking::start(&host.socket, &["park", "unpark"], Duration::from_millis(500));
        for _ in 0..2 {
            client.says("storm 5000");
        }
    }
    let _ = host.tool(&["unpark", "--all"]);
    client.says("check");
    wait_for_merging(&mut client, PAGES_KEPT);
    host.verify();
}

/// Where memory is strictly accounted the C library maps the end of a heap anew, and takes it for clear.
#[test]
fn arenas_that_end_are_left_alone() {
    let Some(program) = program() else { return };
    if !is_root() {
        return skipped("needs root, for mounts of its own");
    }
    let host = Host::start(&["--no-keeper"]);
    let two = host.dir.path().join("two");
    std::fs::write(&two, "2\n").expect("a file");
    let script =
        "mount --bind \"$1\" /proc/sys/vm/overcommit_memory && exec \"$2\" run --manage all --socket \"$3\" -- \"$4\"";
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", script, "sh"]).arg(&two).arg(common::TOOL).arg(&host.socket).arg(program);
    let mut client = Served::start_of(command);
    // Others' are merged.
    let mut others = Served::start_live_of(&host, program);
    wait_for_merging(&mut others, PAGES);
    client.says("storm 4000");
    assert_eq!(merged(&mut client), (0, 0));
}
