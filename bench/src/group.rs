//! Control groups with a limit of memory, of either version.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long the kernel may take to bring what is in use down to a limit.
const SETTLE: Duration = Duration::from_secs(60);

/// Where memory control groups are: the directory, the file of the limit, and this process's group there.
///
/// # Errors
/// If there are none, or their limits may not be set.
pub fn root() -> io::Result<(PathBuf, &'static str, String)> {
    let groups = fs::read_to_string("/proc/self/cgroup")?;
    let home = |mark: &str| groups.lines().find_map(|line| line.split_once(mark)).map(|(_, home)| home.to_owned());
    let unified = Path::new("/sys/fs/cgroup");
    let controllers = fs::read_to_string(unified.join("cgroup.controllers")).unwrap_or_default();
    if controllers.contains("memory") {
        fs::write(unified.join("cgroup.subtree_control"), "+memory")?;
        return Ok((unified.to_owned(), "memory.max", home("0::").unwrap_or_default()));
    }
    if unified.join("memory/memory.limit_in_bytes").exists() {
        return Ok((unified.join("memory"), "memory.limit_in_bytes", home(":memory:").unwrap_or_default()));
    }
    Err(io::Error::other("no memory control groups"))
}

/// Refuses groups of version 2: there zswap's pool counts against the limit of who was swapped out, and what the cold
/// tier holds counts for its daemon. One limit would not be the same for both.
///
/// # Errors
/// As [`root`], or on version 2.
pub fn zswap_lies_outside() -> io::Result<()> {
    match root()? {
        (_, "memory.max", _) => Err(io::Error::other(
            "control groups v2 count zswap's pool inside the limit and ours outside: boot with v1",
        )),
        _ => Ok(()),
    }
}

/// A memory control group, gone with this value.
pub struct Group {
    /// Its directory.
    pub path: PathBuf,
    limit: PathBuf,
}

impl Group {
    /// Makes a group without a limit.
    ///
    /// # Errors
    /// As [`root`], or if it cannot be made.
    pub fn new(name: &str) -> io::Result<Group> {
        let (root, limit, _) = root()?;
        let path = root.join(format!("pagefold-bench-{}-{name}", std::process::id()));
        fs::create_dir(&path)?;
        Ok(Group { limit: path.join(limit), path })
    }

    /// Sets the limit; the kernel brings what is in use down to it first, which may take it a few turns.
    ///
    /// # Errors
    /// If that does not come about within a minute.
    pub fn limit(&self, bytes: u64) -> io::Result<()> {
        let end = Instant::now() + SETTLE;
        loop {
            match fs::write(&self.limit, bytes.to_string()) {
                Err(_) if Instant::now() < end => std::thread::sleep(Duration::from_millis(10)),
                done => return done,
            }
        }
    }

    /// Says how readily the kernel swaps memory of this group instead of dropping its file cache.
    ///
    /// # Errors
    /// The second version has no such setting.
    pub fn set_swappiness(&self, percent: u64) -> io::Result<()> {
        fs::write(self.path.join("memory.swappiness"), percent.to_string())
    }

    /// Processes that the kernel has killed for want of memory since the machine started, here and in any group.
    pub fn killed() -> u64 {
        let text = fs::read_to_string("/proc/vmstat").unwrap_or_default();
        text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.parse().ok()).unwrap_or(0)
    }

    /// Bytes of file cache that no program has mapped: what the kernel drops before anything else.
    pub fn idle_file_cache(&self) -> u64 {
        let text = fs::read_to_string(self.path.join("memory.stat")).unwrap_or_default();
        let field = |name: &str| -> u64 {
            let value = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok();
            text.lines().find_map(value).unwrap_or(0)
        };
        // Each version has its own name for the last.
        (field("active_file") + field("inactive_file")).saturating_sub(field("mapped_file") + field("file_mapped"))
    }

    /// The number in the first of these files that there is: each version has its own names.
    pub fn number(&self, names: &[&str]) -> Option<u64> {
        names.iter().find_map(|name| fs::read_to_string(self.path.join(name)).ok()?.trim().parse().ok())
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Its processes were waited for; the kernel may need a moment for the last of their memory.
        for _ in 0..100 {
            if fs::remove_dir(&self.path).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}
