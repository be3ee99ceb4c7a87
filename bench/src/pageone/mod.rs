//! PageONE's test, scaled down: processes that hold the same files in other orders, merged by us and by KSM.
//!
//! The published test ran 12 virtual machines with 16 GB of 20 MB files each. Here processes hold synthetic files of 20 MB
//! (5120 pages) in orders of their own; `zero` gives each page a prefix of zero bytes, 128 on average, as the second
//! published test; `scattered` permutes single pages, so that no two duplicates are neighbours: our worst case; `huge` is
//! files in huge pages, as the memory of virtual machines is.
//!
//! One worker's speed is pages merged per second of its processor time (daemon and agents together; ksmd's for KSM): on a
//! machine that others use too, wall time would measure them. Wall time while it merges is shown beside it, for every
//! engine by the same rule ([`settle::pace`]).

mod args;
mod churn;
mod engine;
mod guests;
mod latency;
mod merge;
mod settle;
mod workload;

use crate::options;
use crate::process::{self, Failure};
use crate::record;
use crate::restore::Undo;
use args::{Args, Part};
use pagefold_os::ksm;
use serde_json::json;
use std::process::ExitCode;

/// Measures a part and prints its table.
type Measure = fn(&Args) -> Result<(), Failure>;

const PARTS: [(Part, Measure); 7] = [
    (Part::Merge, merge::merge),
    (Part::Breaks, latency::breaks),
    (Part::Delay, latency::delay),
    (Part::Idle, latency::idle),
    (Part::First, latency::first),
    (Part::Churn, churn::churn),
    (Part::Guests, guests::measure),
];

/// Entry point.
pub fn run(args: &[String]) -> ExitCode {
    options::run("pageone", args, |args: Args| match args.client.is_empty() {
        true => measure(args),
        false => workload::member(&args.client),
    })
}

/// Whether KSM can be measured: as root, on a kernel that has it, while no other program uses it.
fn peer() -> Result<(), Failure> {
    if !process::is_root() {
        return Err("it needs root".into());
    }
    Ok(ksm::unused()?)
}

fn measure(mut args: Args) -> Result<(), Failure> {
    if let Err(why) = peer() {
        eprintln!("SKIPPED: the peer, KSM: {why}");
        args.no_ksm = true;
    }
    // For pages that are merged one by one.
    let _mappings = Undo::set("/proc/sys/vm/max_map_count", "4000000");
    record::emit(Vec::new());
    record::emit_versions(json!({ "qemu": record::first_line(&["qemu-system-x86_64", "--version"]) }));
    PARTS.into_iter().filter(|(part, _)| args.wants(*part)).try_for_each(|(_, part)| part(&args))
}
