//! Processes that asked to be managed and could not be, and why.

use crate::status::UnmanagedProcess;
use pagefold_os::procfs;
use pagefold_os::sync::lock;
use std::collections::VecDeque;
use std::sync::Mutex;

/// Processes that are remembered.
const REFUSALS_MAX: usize = 64;

/// The latest refusals, the oldest first.
#[derive(Default)]
pub(crate) struct Refusals(Mutex<VecDeque<UnmanagedProcess>>);

impl Refusals {
    /// Why process `pid` was refused last.
    pub(crate) fn reason(&self, pid: i32) -> Option<String> {
        lock(&self.0).iter().rev().find(|one| one.pid == pid).map(|one| one.reason.clone())
    }

    pub(crate) fn all(&self) -> Vec<UnmanagedProcess> {
        lock(&self.0).iter().cloned().collect()
    }

    /// Drops what was noted of process `pid`: it is managed now, or there is a newer refusal.
    pub(crate) fn forget(&self, pid: i32) {
        // Processes of a pid namespace that the daemon does not see all have the number 0.
        lock(&self.0).retain(|one| one.pid != pid || pid == 0);
    }

    pub(crate) fn note(&self, pid: i32, reason: String) {
        self.forget(pid);
        let mut list = lock(&self.0);
        // A refused process asks again and again; it must not push the others out of the list.
        list.retain(|one| one.pid != pid || one.reason != reason);
        if list.len() == REFUSALS_MAX {
            list.pop_front();
        }
        list.push_back(UnmanagedProcess { pid, name: procfs::name(pid).unwrap_or_default(), reason });
    }
}
