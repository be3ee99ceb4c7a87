//! What tells whether a client works. Nothing here costs the client anything, or asks its agent.

use super::policy::{self, Sample};
use crate::cold::client::Client;
use pagefold_os::procfs;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The sample of this moment; `None` if the kernel does not tell, because the process has ended.
pub(crate) fn sample(client: &Client) -> Option<Sample> {
    let counters = &client.counters;
    let refaults = counters.refaults.load(Ordering::Relaxed);
    let fresh = counters.zero_faults.load(Ordering::Relaxed);
    let written = counters.pages_written.load(Ordering::Relaxed);
    // Before the agent's time: what the agent does meanwhile would count as the program's.
    let cpu_ns = procfs::cpu_ns(client.pid)?;
    let agent_ns = counters.agent_cpu_ns.load(Ordering::Relaxed);
    Some(Sample {
        cpu: Duration::from_nanos(cpu_ns.saturating_sub(agent_ns)),
        touched_pages: refaults + fresh + written,
        refaults,
        parked: client.is_parked(),
        suspended: is_suspended(client.pid),
    })
}

/// True if the host has less memory than `reserve`, or its programs wait for memory.
pub(crate) fn is_host_short(reserve: u64) -> bool {
    let stall = procfs::memory_stall(Path::new("/proc/pressure/memory"));
    policy::is_short(procfs::available_and_total().0, reserve, stall)
}

/// True if no thread of the process can run: it is stopped, or its control group is frozen.
pub(crate) fn is_suspended(pid: i32) -> bool {
    procfs::is_stopped(pid)
        || std::fs::read_to_string(format!("/proc/{pid}/cgroup"))
            .is_ok_and(|groups| is_frozen(&groups, Path::new("/sys/fs/cgroup")))
}

/// True if a control group of those that /proc/PID/cgroup names is frozen, or is about to be; all are mounted at `root`.
fn is_frozen(groups: &str, root: &Path) -> bool {
    groups.lines().any(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { return false };
        let path = path.trim_matches('/');
        let text = |mount: &str, file: &str| std::fs::read_to_string(root.join(mount).join(path).join(file));
        if controllers.is_empty() {
            // The request stands in the group that was frozen, which may be one above, and comes before the effect: the
            // agent may be frozen in the middle of its work.
            let mounts = [root.join("unified"), root.to_owned()];
            mounts.iter().any(|mount| {
                let groups = Path::new(path).ancestors().map(|group| mount.join(group).join("cgroup.freeze"));
                groups.map(std::fs::read_to_string).any(|freeze| freeze.is_ok_and(|freeze| freeze.trim() == "1"))
            })
        } else {
            controllers.split(',').any(|name| name == "freezer")
                && text("freezer", "freezer.state").is_ok_and(|state| state.trim() != "THAWED")
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frozen_group_is_found_in_both_versions_and_a_thawed_one_is_not() {
        let root = tempfile::tempdir().expect("a directory");
        let put = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
            std::fs::write(path, text).expect("a file");
        };
        put("two/cgroup.freeze", "1\n");
        put("two/below/cgroup.freeze", "0\n");
        put("thawed/cgroup.freeze", "0\n");
        put("unified/mixed/cgroup.freeze", "1\n");
        put("freezer/one/freezer.state", "FROZEN\n");
        put("freezer/soon/freezer.state", "FREEZING\n");
        put("freezer/thawed/freezer.state", "THAWED\n");
        for (groups, frozen) in [
            ("0::/two\n", true),
            ("0::/two/below\n", true),
            ("0::/mixed\n", true),
            ("9:freezer:/one\n0::/thawed\n", true),
            ("9:cpu,freezer:/soon\n", true),
            ("9:freezer:/thawed\n0::/thawed\n", false),
            ("9:cpu:/one\n0::/nowhere\n", false),
            ("nonsense", false),
            ("", false),
        ] {
            assert_eq!(is_frozen(groups, root.path()), frozen, "{groups:?}");
        }
    }

    #[test]
    fn the_pressure_of_memory_is_read_from_the_kernels_file() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("memory");
        for (text, stall) in [
            (
                "some avg10=12.50 avg60=0.00 avg300=0.00 total=1\nfull avg10=99.00 avg60=0.00 avg300=0.00 total=1\n",
                Some(12.5),
            ),
            ("some avg10=0.00 avg60=44.00 avg300=0.00 total=1\n", Some(0.0)),
            ("some avg10=many\n", None),
            ("", None),
        ] {
            std::fs::write(&file, text).expect("a file");
            assert_eq!(procfs::memory_stall(&file), stall, "{text}");
        }
        assert_eq!(procfs::memory_stall(&dir.path().join("nothing")), None);
        // Not all kernels have it.
        let here = procfs::memory_stall(Path::new("/proc/pressure/memory"));
        assert_eq!(here.is_some(), std::fs::read("/proc/pressure/memory").is_ok());
    }

    #[test]
    fn this_process_runs_and_one_that_ended_is_not_sampled() {
        assert!(!is_suspended(std::process::id() as i32));
        assert_eq!(procfs::cpu_ns(i32::MAX), None);
    }
}
