//! Control groups with a limit of memory.

use super::skipped;

/// A memory control group, removed when it is empty again.
pub struct Group(pub std::path::PathBuf);

impl Group {
    pub fn new() -> Option<Group> {
        let roots = ["/sys/fs/cgroup/memory", "/sys/fs/cgroup"];
        static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let name = format!("pagefold-test-{}-{number}", std::process::id());
        let made = roots.into_iter().map(|root| std::path::Path::new(root).join(&name)).find(|path| {
            let made = std::fs::create_dir(path).is_ok();
            let limits = ["memory.limit_in_bytes", "memory.max"].iter().any(|name| path.join(name).exists());
            if made && !limits {
                let _ = std::fs::remove_dir(path);
            }
            made && limits
        });
        if made.is_none() {
            skipped("no memory control group can be made here (root, and the memory controller)");
        }
        made.map(Group)
    }

    /// Reads the first of `names` that there is.
    pub fn read(&self, names: &[&str]) -> String {
        names.iter().find_map(|name| std::fs::read_to_string(self.0.join(name)).ok()).unwrap_or_default()
    }

    /// Leaves no more than `room` bytes beyond what is used now.
    pub fn limit(&self, room: u64) {
        let used = self.read(&["memory.usage_in_bytes", "memory.current"]);
        let limit = used.trim().parse::<u64>().expect("a number") + room;
        assert!(self.set(&[("memory.limit_in_bytes", &limit.to_string()), ("memory.max", &limit.to_string())]));
    }

    /// Takes the limit away.
    pub fn lift(&self) {
        assert!(self.set(&[("memory.limit_in_bytes", "-1"), ("memory.max", "max")]));
    }

    /// Writes the first of these settings that there is; true if it was taken.
    fn set(&self, settings: &[(&str, &str)]) -> bool {
        settings.iter().any(|(name, value)| std::fs::write(self.0.join(name), value).is_ok())
    }

    /// Has the kernel take back what it can.
    pub fn reclaim(&self) {
        // It says that it is not all.
        let _ = self.set(&[("memory.reclaim", "1G"), ("memory.force_empty", "0")]);
    }

    /// Bytes that are swapped out.
    pub fn swapped(&self) -> u64 {
        let text = self.read(&["memory.swap.current", "memory.stat"]);
        let line = text.lines().find_map(|line| line.strip_prefix("swap "));
        line.unwrap_or(&text).trim().parse().unwrap_or(0)
    }

    /// Bytes of memory files, mapped by anybody or not.
    pub fn shmem(&self) -> u64 {
        let text = self.read(&["memory.stat"]);
        let line = text.lines().find_map(|line| line.strip_prefix("shmem "));
        line.and_then(|line| line.trim().parse().ok()).expect("the group tells")
    }

    /// Has a process live in the group.
    pub fn take(&self, pid: i32) {
        std::fs::write(self.0.join("cgroup.procs"), pid.to_string()).expect("a member");
    }

    /// Has what `command` starts live in the group.
    pub fn adopt(&self, command: &mut std::process::Command) {
        use std::os::unix::process::CommandExt;
        let members = self.0.join("cgroup.procs");
        // SAFETY: a write to a file between fork and exec; the path was made before.
        unsafe { command.pre_exec(move || std::fs::write(&members, "0")) };
    }

    pub fn assert_nobody_was_killed(&self) {
        let killed = self.read(&["memory.oom_control", "memory.events"]);
        assert!(killed.lines().all(|line| !line.starts_with("oom_kill ") || line.ends_with(" 0")), "{killed}");
    }
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
