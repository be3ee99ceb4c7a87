//! A memory control group of either version. The tests and the benchmarks share this file.

#![allow(dead_code)]

use std::path::{Path, PathBuf};

/// A memory control group, removed when it is empty again.
pub struct Group(pub PathBuf);

impl Group {
    /// Makes a group without a limit; `None` without root or without the memory controller.
    pub fn named(name: &str) -> Option<Group> {
        // A second version hands its controllers down only when told to.
        let _ = std::fs::write("/sys/fs/cgroup/cgroup.subtree_control", "+memory");
        let paths = ["/sys/fs/cgroup/memory", "/sys/fs/cgroup"].map(|root| Path::new(root).join(name));
        let made = paths.into_iter().find(|path| {
            let made = std::fs::create_dir(path).is_ok();
            let limits = ["memory.limit_in_bytes", "memory.max"].iter().any(|name| path.join(name).exists());
            if made && !limits {
                let _ = std::fs::remove_dir(path);
            }
            made && limits
        });
        made.map(Group)
    }

    /// Reads the first of `names` that there is: each version has its own.
    pub fn read(&self, names: &[&str]) -> String {
        names.iter().find_map(|name| std::fs::read_to_string(self.0.join(name)).ok()).unwrap_or_default()
    }

    /// Bytes that its processes use.
    pub fn used(&self) -> u64 {
        self.read(&["memory.usage_in_bytes", "memory.current"]).trim().parse().expect("a number")
    }

    /// Sets the limit; false if the kernel could not reclaim memory down to it.
    pub fn limit_to(&self, bytes: u64) -> bool {
        self.set(&[("memory.limit_in_bytes", &bytes.to_string()), ("memory.max", &bytes.to_string())])
    }

    /// Takes the limit away.
    pub fn lift(&self) {
        assert!(self.set(&[("memory.limit_in_bytes", "-1"), ("memory.max", "max")]));
    }

    /// Writes the first of these settings that there is; true if it was taken.
    pub fn set(&self, settings: &[(&str, &str)]) -> bool {
        settings.iter().any(|(name, value)| std::fs::write(self.0.join(name), value).is_ok())
    }

    /// Has what `command` starts live in the group.
    pub fn adopt(&self, command: &mut std::process::Command) {
        join(command, &self.0);
    }
}

/// Has what `command` starts live in the group of this directory.
pub fn join(command: &mut std::process::Command, group: &Path) {
    use std::os::unix::process::CommandExt;
    let members = group.join("cgroup.procs");
    // SAFETY: a write to a file between fork and exec; the path was made before.
    unsafe { command.pre_exec(move || std::fs::write(&members, "0")) };
}

impl Drop for Group {
    fn drop(&mut self) {
        // The kernel needs a moment to see that its processes have ended.
        for _ in 0..100 {
            if std::fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}
