//! The kernel's own merging, through /sys/kernel/mm/ksm.

use crate::procfs;
use std::fs;
use std::io;
use std::path::PathBuf;

/// Whether this kernel has KSM.
pub fn exists() -> bool {
    path("run").exists()
}

fn path(name: &str) -> PathBuf {
    PathBuf::from("/sys/kernel/mm/ksm").join(name)
}

/// Reads the value `name`.
///
/// # Errors
/// As reading the file; a value that is no number is `InvalidData`.
pub fn read(name: &str) -> io::Result<i64> {
    fs::read_to_string(path(name))?.trim().parse().map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// Writes the value `name`.
///
/// # Errors
/// As writing the file.
pub fn write(name: &str, value: i64) -> io::Result<()> {
    fs::write(path(name), value.to_string())
}

/// Records of single pages that KSM keeps about process `pid` (kernel 6.1 or later).
pub fn rmap_items(pid: i32) -> Option<u64> {
    Some(of_process(pid)?.rmap_items)
}

/// What KSM did to a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessStat {
    /// Records of single pages.
    pub rmap_items: u64,
    /// Pages that it merged, zero pages included.
    pub merged_pages: u64,
    /// Bytes of these pages less the bytes of the records (kernel 6.4 or later).
    pub profit_bytes: Option<i64>,
    /// All its memory may be merged, as by `PR_SET_MEMORY_MERGE` (kernel 6.15 or later).
    pub merges_all: Option<bool>,
}

/// What KSM did to process `pid` (kernel 6.1 or later, a process that the caller may trace); `None` if that is not to be
/// seen.
pub fn of_process(pid: i32) -> Option<ProcessStat> {
    Some(parse_stat(&fs::read_to_string(format!("/proc/{pid}/ksm_stat")).ok()?))
}

fn parse_stat(text: &str) -> ProcessStat {
    let find =
        |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok());
    let count = |name: &str| find(name).unwrap_or(0).max(0) as u64;
    ProcessStat {
        rmap_items: count("ksm_rmap_items"),
        merged_pages: count("ksm_merging_pages") + count("ksm_zero_pages"),
        profit_bytes: find("ksm_process_profit"),
        merges_all: text.lines().find_map(|line| Some(line.strip_prefix("ksm_merge_any:")?.trim() == "yes")),
    }
}

/// Checks that KSM is unused.
///
/// # Errors
/// If KSM is absent or in use: it runs, shares pages, or sets its own rate.
pub fn unused() -> io::Result<()> {
    if !exists() {
        return Err(io::Error::new(io::ErrorKind::NotFound, "this kernel has no KSM"));
    }
    unused_with(read, merged_by_anybody, &fs::read_to_string(path("advisor_mode")).unwrap_or_default())
}

/// Whether any process has pages that KSM merged: what it counts itself stays when the last one ends, until it runs again.
fn merged_by_anybody() -> bool {
    let pids = procfs::pids();
    // Without /proc it cannot be known: assume the worst.
    pids.is_empty()
        || pids.into_iter().any(|pid| match fs::read_to_string(format!("/proc/{pid}/ksm_merging_pages")) {
            Ok(pages) => tells_of_merged(&pages),
            // Not ours to see; else it is gone.
            Err(error) => error.kind() == io::ErrorKind::PermissionDenied,
        })
}

/// What a process says of its merged pages; one without memory, a thread of the kernel's, says nothing.
fn tells_of_merged(pages: &str) -> bool {
    !matches!(pages.trim(), "" | "0")
}

fn unused_with(
    read: impl Fn(&str) -> io::Result<i64>,
    anybody_merged: impl Fn() -> bool,
    advisor: &str,
) -> io::Result<()> {
    let taken = |why: &str| Err(io::Error::new(io::ErrorKind::ResourceBusy, format!("KSM is in use already: {why}")));
    if read("run")? == 1 {
        return taken("it runs");
    }
    if read("pages_shared")? != 0 && anybody_merged() {
        return taken("it shares pages");
    }
    if !advisor.is_empty() && !advisor.contains("[none]") {
        return taken("its advisor is on");
    }
    Ok(())
}

/// Settings that [`Settings::restore`] (or drop) puts back.
#[derive(Debug)]
pub struct Settings {
    saved: Vec<(&'static str, i64)>,
}

const TUNABLES: &[&str] = &[
    "sleep_millisecs",
    "pages_to_scan",
    "smart_scan",
    "use_zero_pages",
    "max_page_sharing",
    "merge_across_nodes",
    "run",
];

impl Settings {
    /// Remembers all tunables as they are.
    ///
    /// # Errors
    /// If KSM is not there.
    pub fn save() -> io::Result<Settings> {
        read("run")?;
        Ok(Settings { saved: TUNABLES.iter().filter_map(|name| Some((*name, read(name).ok()?))).collect() })
    }

    /// Remembers all tunables, for a caller that needs KSM to itself.
    ///
    /// # Errors
    /// As [`unused`]; nothing was changed then.
    pub fn take() -> io::Result<Settings> {
        unused()?;
        Settings::save()
    }

    /// Puts all tunables back; also unmerges what was merged meanwhile if KSM was stopped before.
    pub fn restore(&mut self) {
        for (name, value) in self.saved.drain(..) {
            if name == "run" && value == 0 {
                unmerge_all();
            }
            let _ = write(name, value);
        }
    }
}

/// Has KSM give up all that it merged. Pages of processes that are just ending stay at first.
fn unmerge_all() {
    for _ in 0..20 {
        let _ = write("run", 2);
        if read("pages_shared").is_ok_and(|shared| shared == 0) {
            return;
        }
        let _ = write("run", 0);
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
}

impl Drop for Settings {
    fn drop(&mut self) {
        self.restore();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(run: i64, shared: i64, advisor: &str) -> Option<io::ErrorKind> {
        let read = |name: &str| match name {
            "run" => Ok(run),
            "pages_shared" => Ok(shared),
            _ => Err(io::ErrorKind::NotFound.into()),
        };
        unused_with(read, || shared > 1, advisor).err().map(|error| error.kind())
    }

    /// Threads of the kernel have no memory, and are on every machine.
    #[test]
    fn threads_of_the_kernel_have_merged_nothing() {
        assert!(tells_of_merged("7\n") && !tells_of_merged("0\n") && !tells_of_merged(""));
    }

    #[test]
    fn what_ksm_did_to_a_process_is_read_as_far_as_the_kernel_tells() {
        let text =
            "ksm_rmap_items 7\nksm_zero_pages 1\nksm_merging_pages 5\nksm_process_profit -448\nksm_mergeable: yes\n";
        let all = ProcessStat { rmap_items: 7, merged_pages: 6, profit_bytes: Some(-448), merges_all: None };
        assert_eq!(parse_stat(text), all);
        assert_eq!(parse_stat("ksm_rmap_items 7\n"), ProcessStat { rmap_items: 7, ..ProcessStat::default() });
    }

    #[test]
    fn a_process_that_marks_nothing_has_no_records() {
        match rmap_items(std::process::id() as i32) {
            Some(items) => assert_eq!(items, 0),
            None => println!("SKIPPED: this kernel tells nothing of KSM's records"),
        }
        assert_eq!(rmap_items(i32::MAX), None);
    }

    #[test]
    fn a_ksm_in_use_is_not_taken() {
        for none in ["", "[none] scan-time\n"] {
            assert_eq!(state(0, 0, none), None);
            // Counted still, of processes that have ended.
            assert_eq!(state(0, 1, none), None);
            // Stopped, and everything unmerged.
            assert_eq!(state(2, 0, none), None);
        }
        for (run, shared, advisor) in [(1, 0, ""), (0, 7, ""), (1, 7, ""), (0, 0, "none [scan-time]\n")] {
            assert_eq!(state(run, shared, advisor), Some(io::ErrorKind::ResourceBusy));
        }
        let absent = unused_with(|_| Err(io::ErrorKind::NotFound.into()), || true, "");
        assert_eq!(absent.unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
