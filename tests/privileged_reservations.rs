//! Addresses that a program reserves and opens piece by piece, or wants by themselves: what is open is managed, every byte
//! is as it was written, and what is not costs nothing.

mod common;

use common::cold::{Compiled, Host, Served, compiled};
use common::{can_merge, wait_for};
use std::path::Path;
use std::sync::OnceLock;

/// The compiled client, once.
fn program() -> Option<&'static Path> {
    static BUILT: Compiled = OnceLock::new();
    compiled(&BUILT, "reservations", can_merge)
}

/// Waits until nearly all of the 8,192 pages of each area are merged. Islands of a page among closed ones are left alone.
fn wait_for_merging(client: &mut Served) {
    let mut last = Vec::<u64>::new();
    wait_for("the areas to be merged", 240, || {
        let said = client.says("merged");
        last = said.split(' ').map(|number| number.parse().expect("a number")).collect();
        last[..3].iter().all(|merged| *merged > 8000)
    });
    assert_eq!(last[3], 0, "islands fill the list");
}

#[test]
fn reservations_opened_piece_by_piece_are_merged() {
    let Some(program) = program() else { return };
    let host = Host::start(&["--no-keeper"]);
    let mut client = Served::start_live_of(&host, program);
    wait_for_merging(&mut client);
    client.says("check");
    host.verify();
    for _ in 0..3 {
        client.says("storm 4000");
        client.says("fork");
    }
    // Whatever was done to a part, it is managed still.
    client.says("settle");
    wait_for_merging(&mut client);
    host.verify();
    let pid = client.pid().to_string();
    assert!(host.tool(&["unmerge", &pid]).status.success());
    client.says("check");
}

#[test]
fn reservations_opened_piece_by_piece_are_evicted_and_come_back() {
    let Some(program) = program() else { return };
    common::cold::storm_beside_parking(program, 24_000);
}
