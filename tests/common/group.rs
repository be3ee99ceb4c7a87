//! Control groups with a limit of memory.

pub use super::control_group::Group;
use super::skipped;

impl Group {
    /// Makes a group, or says why the test is skipped.
    pub fn new() -> Option<Group> {
        static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let made = Group::named(&format!("pagefold-test-{}-{number}", std::process::id()));
        if made.is_none() {
            skipped("no memory control group can be made here (root, and the memory controller)");
        }
        made
    }

    /// Leaves no more than `room` bytes beyond what is used now.
    pub fn limit(&self, room: u64) {
        assert!(self.limit_to(self.used() + room));
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

    pub fn assert_nobody_was_killed(&self) {
        let killed = self.read(&["memory.oom_control", "memory.events"]);
        assert!(killed.lines().all(|line| !line.starts_with("oom_kill ") || line.ends_with(" 0")), "{killed}");
    }
}
