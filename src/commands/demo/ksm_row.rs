//! The demonstration's second row: the kernel's KSM merges the same processes.

use super::crew::Crew;
use super::interrupt::{LOOK, go_on, pause};
use super::row::{MERGE_MAX, REST, Row, storm};
use crate::error::Error;
use crate::note;
use pagefold_os::{ksm, procfs};
use pagefold_scan::Ksm;
use std::time::{Duration, Instant};

/// KSM's speed as the kernel sets it.
const DEFAULT_SPEED: [(&str, i64); 2] = [("pages_to_scan", 100), ("sleep_millisecs", 20)];

/// KSM's nodes: one for each page it keeps, and one for each chain of equal ones.
fn ksm_nodes() -> u64 {
    let read = |name| ksm::read(name).unwrap_or(0).max(0) as u64;
    read("pages_shared") + read("stable_node_chains")
}

/// Has KSM merge such processes.
pub(super) fn merge(processes: usize, size: u64) -> Result<Row, Error> {
    note!("");
    note!("The same with the kernel's KSM (pages_to_scan 1000000, sleep_millisecs 0) …");
    let mut settings = ksm::Settings::take()?;
    for (name, value) in [("run", 2), ("pages_to_scan", 1_000_000), ("sleep_millisecs", 0), ("use_zero_pages", 1)] {
        ksm::write(name, value)?;
    }
    let mut crew = Crew::start(processes, size, &[])?;
    let before_bytes = crew.pss();
    let scanner = procfs::pids().into_iter().find(|pid| procfs::name(*pid).as_deref() == Some("ksmd"));
    let cpu = || scanner.and_then(procfs::cpu_ns).unwrap_or(0);
    let cpu_before = cpu();
    crew.tell("merge")?;
    let sharing = || ksm::read("pages_sharing").unwrap_or(0).max(0) as u64;
    let (held, nodes) = (sharing(), ksm_nodes());
    let began = Instant::now();
    ksm::write("run", 1)?;
    let mut last = (held, began.elapsed(), cpu());
    while began.elapsed() < MERGE_MAX {
        pause(LOOK)?;
        let now = sharing();
        if now != last.0 {
            last = (now, began.elapsed(), cpu());
        }
        let scans = began.elapsed() - last.1;
        if last.0 > held && scans > Duration::from_millis(3500) {
            break;
        }
    }
    // As `scan` bills it: a record for each page looked at, and a node for each kept.
    let items: u64 = crew.pids().filter_map(ksm::rmap_items).sum();
    let own_bytes = (items + ksm_nodes().saturating_sub(nodes)) * Ksm::ITEM_BYTES;
    let after_bytes = crew.pss() + own_bytes;
    let pages_merged = last.0 - held + ksm::read("pages_shared").unwrap_or(0).max(0) as u64;
    let at_rest = || {
        let before = cpu();
        pause(REST)?;
        Ok::<f64, Error>((cpu() - before) as f64 / REST.as_nanos() as f64 * 100.0)
    };
    let rest_cpu_percent = at_rest()?;
    for (name, value) in DEFAULT_SPEED {
        ksm::write(name, value)?;
    }
    let by_default = at_rest()?;
    ksm::write("run", 0)?;
    let mut intact = crew.check()?;
    let write_us = storm(&mut crew)?;
    intact = intact.min(crew.check()?);
    drop(crew);
    settings.restore();
    go_on()?;
    Ok(Row {
        name: "KSM",
        before_bytes,
        after_bytes,
        own_bytes,
        seconds: last.1.as_secs_f64(),
        cpu_seconds: (last.2 - cpu_before) as f64 / 1e9,
        pages_merged,
        rest_cpu_percent,
        rest_cpu_percent_by_default: Some(by_default),
        write_us,
        intact,
        processes,
    })
}
