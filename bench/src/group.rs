//! Control groups with a limit of memory, of either version.

use crate::process::wait_for;
use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// How long the kernel may take to reclaim memory down to a limit.
const SETTLE: Duration = Duration::from_secs(60);

/// Where memory control groups are: the directory and the file of the limit.
fn root() -> io::Result<(PathBuf, &'static str)> {
    let unified = Path::new("/sys/fs/cgroup");
    let controllers = fs::read_to_string(unified.join("cgroup.controllers")).unwrap_or_default();
    if controllers.contains("memory") {
        fs::write(unified.join("cgroup.subtree_control"), "+memory")?;
        return Ok((unified.to_owned(), "memory.max"));
    }
    if unified.join("memory/memory.limit_in_bytes").exists() {
        return Ok((unified.join("memory"), "memory.limit_in_bytes"));
    }
    Err(io::Error::other("no memory control groups"))
}

/// Refuses groups of version 2: there zswap's pool counts against the limit of the swapped group, and the cold tier's memory
/// counts for its daemon. One limit would not be the same for both.
pub fn zswap_lies_outside() -> io::Result<()> {
    match root()? {
        (_, "memory.max") => Err(io::Error::other(
            "control groups v2 count zswap's pool inside the limit and ours outside: boot with v1",
        )),
        _ => Ok(()),
    }
}

/// A memory control group, removed with this value.
pub struct ControlGroup {
    /// Its directory.
    pub path: PathBuf,
    limit: PathBuf,
}

impl ControlGroup {
    /// Makes a group without a limit.
    pub fn new(name: &str) -> io::Result<ControlGroup> {
        let (root, limit) = root()?;
        let path = root.join(format!("pagefold-bench-{}-{name}", std::process::id()));
        fs::create_dir(&path)?;
        Ok(ControlGroup { limit: path.join(limit), path })
    }

    /// Sets the limit; the kernel reclaims memory down to it first, which may take several attempts.
    /// Fails if the kernel does not get there within a minute.
    pub fn limit(&self, bytes: u64) -> io::Result<()> {
        wait_for("a control group's limit", SETTLE, || fs::write(&self.limit, bytes.to_string()).ok())
    }

    /// Says how readily the kernel swaps memory of this group instead of dropping its file cache.
    /// Fails on the second version, which has no such setting.
    pub fn set_swappiness(&self, percent: u64) -> io::Result<()> {
        fs::write(self.path.join("memory.swappiness"), percent.to_string())
    }

    /// Processes that the kernel has killed for want of memory since the machine started, here and in any group.
    pub fn killed() -> u64 {
        let text = fs::read_to_string("/proc/vmstat").unwrap_or_default();
        text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.parse().ok()).unwrap_or(0)
    }

    /// The number in the first of these files that there is: each version has its own names.
    pub fn number(&self, names: &[&str]) -> Option<u64> {
        names.iter().find_map(|name| fs::read_to_string(self.path.join(name)).ok()?.trim().parse().ok())
    }
}

impl Drop for ControlGroup {
    fn drop(&mut self) {
        // Its processes were waited for; the kernel may need a moment for the last of their memory.
        let _ = wait_for("the group's end", Duration::from_secs(5), || fs::remove_dir(&self.path).ok());
    }
}

/// Makes `command` start as a member of the control group in `group`.
pub fn join(command: &mut Command, group: &Path) {
    let path =
        std::ffi::CString::new(group.join("cgroup.procs").display().to_string()).expect("a path has no zero byte");
    // SAFETY: the closure runs between fork and exec and only calls open, write and close, which are async-signal-safe; the
    // path was made before the fork.
    unsafe {
        command.pre_exec(move || {
            let fd = libc::open(path.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
            let done = fd >= 0 && libc::write(fd, b"0".as_ptr().cast(), 1) == 1;
            let error = std::io::Error::last_os_error();
            libc::close(fd);
            if done { Ok(()) } else { Err(error) }
        });
    }
}
