//! Which clients a command is about.

use serde::{Deserialize, Serialize};

/// Which clients a command is about.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ClientSelector {
    /// The clients of a process.
    Pid(i32),
    /// The clients of a cgroup and of those below it: a path in /sys/fs/cgroup, absolute or relative to it.
    Cgroup(String),
    /// All clients.
    All,
}

impl ClientSelector {
    /// True if the command is about this process.
    pub fn has(&self, pid: i32) -> bool {
        match self {
            ClientSelector::All => true,
            ClientSelector::Pid(wanted) => pid == *wanted,
            ClientSelector::Cgroup(path) => {
                let path = path.strip_prefix("/sys/fs/cgroup").unwrap_or(path).trim_matches('/');
                let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
                text.lines().filter_map(|line| line.splitn(3, ':').nth(2)).any(|own| {
                    let own = own.trim_matches('/');
                    path.is_empty() || own == path || own.strip_prefix(path).is_some_and(|rest| rest.starts_with('/'))
                })
            }
        }
    }
}
