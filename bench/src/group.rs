//! Control groups with a limit of memory, of either version.

use crate::process::wait_for;
pub use control_group::{Group, join};
use std::io;
use std::path::Path;
use std::time::Duration;

#[path = "../../tests/common/control_group.rs"]
mod control_group;

/// How long the kernel may take to reclaim memory down to a limit.
const SETTLE: Duration = Duration::from_secs(60);

/// Refuses groups of version 2: there zswap's pool counts against the limit of the swapped group, and the cold tier's memory
/// counts for its daemon. One limit would not be the same for both.
pub fn zswap_lies_outside() -> io::Result<()> {
    if Path::new("/sys/fs/cgroup/memory/memory.limit_in_bytes").exists() {
        return Ok(());
    }
    Err(io::Error::other("control groups v2 count zswap's pool inside the limit and ours outside: boot with v1"))
}

impl Group {
    /// Makes a group of this run, without a limit.
    pub fn of_run(name: &str) -> io::Result<Group> {
        let made = Group::named(&format!("pagefold-bench-{}-{name}", std::process::id()));
        made.ok_or_else(|| io::Error::other("no memory control groups"))
    }

    /// Sets the limit; the kernel reclaims memory down to it first, which may take several attempts.
    /// Fails if the kernel does not get there within a minute.
    pub fn limit(&self, bytes: u64) -> io::Result<()> {
        wait_for("a control group's limit", SETTLE, || self.limit_to(bytes).then_some(()))
    }

    /// Ends every process in it.
    pub fn end_all(&self) -> io::Result<()> {
        wait_for("the end of a control group's processes", SETTLE, || (end_members(&self.0) == 0).then_some(()))
    }
}

/// Kills the processes in the control group of this directory; returns how many there were.
pub fn end_members(group: &Path) -> usize {
    let members = std::fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
    let pids: Vec<i32> = members.lines().filter_map(|line| line.parse().ok()).filter(|pid| *pid > 0).collect();
    for pid in &pids {
        // SAFETY: kill(2) takes no pointer. The groups of runs hold what runs have started.
        unsafe { libc::kill(*pid, libc::SIGKILL) };
    }
    pids.len()
}
