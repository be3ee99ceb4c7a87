//! The kernel's KSM as a peer: at full speed, for all memory of the programs.

use crate::process::Failure;
use pagefold_os::{ksm, procfs};
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Bytes of KSM's record about a page that it looks at, and of that about a page that it shares.
pub const RECORD_BYTES: u64 = pagefold_scan::Ksm::ITEM_BYTES;

/// Bytes of KSM's records about these processes, and about the pages that it shares.
pub fn records_bytes(pids: impl Iterator<Item = i32>) -> u64 {
    let shared = ksm::read("pages_shared").unwrap_or(0).max(0) as u64;
    (pids.filter_map(ksm::rmap_items).sum::<u64>() + shared) * RECORD_BYTES
}

/// Takes KSM's settings for this run and sets the highest speed; it begins when its switch `run` is 1. Dropping the value
/// restores them.
pub fn at_full_speed() -> Result<ksm::Settings, Failure> {
    let settings = ksm::Settings::take()?;
    for (name, value) in [("pages_to_scan", 1_000_000), ("sleep_millisecs", 0)] {
        ksm::write(name, value)?;
    }
    // Older kernels lack it.
    let _ = ksm::write("use_zero_pages", 1);
    Ok(settings)
}

/// The kernel's thread that scans.
///
/// # Errors
/// If this process does not see it, as in a pid namespace.
pub fn scanner() -> Result<i32, Failure> {
    let scanner = procfs::pids().into_iter().find(|pid| procfs::name(*pid).as_deref() == Some("ksmd"));
    scanner.ok_or_else(|| "ksmd is not to be seen".into())
}

/// Has all memory of the program that `command` starts merged (`PR_SET_MEMORY_MERGE`).
pub fn merge_all(command: &mut Command) {
    // SAFETY: between fork and exec the closure makes one system call, which is async-signal-safe.
    unsafe {
        command.pre_exec(|| match libc::prctl(libc::PR_SET_MEMORY_MERGE, 1, 0, 0, 0) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        })
    };
}
