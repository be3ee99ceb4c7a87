//! What /proc tells about processes and the system.

use crate::Range;
use crate::{maps, stat};
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

/// A mapping with its own name, for callers that keep it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnedMap {
    /// Its addresses.
    pub range: Range,
    /// `PROT_*` bits.
    pub prot: i32,
    /// True if writes are visible to others.
    pub shared: bool,
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// Inode of the file, 0 for anonymous memory.
    pub inode: u64,
    /// File name or the kernel's word.
    pub name: String,
}

/// Lists the mappings of `pid`.
///
/// # Errors
/// As reading /proc/PID/maps: no such process, or no right to look.
pub fn maps(pid: i32) -> io::Result<Vec<OwnedMap>> {
    let mut file = File::open(format!("/proc/{pid}/maps"))?;
    let mut all = Vec::new();
    let mut buffer = vec![0; 64 << 10];
    maps::for_each(
        &mut buffer,
        |out| file.read(out),
        |line| {
            if let maps::Line::Mapping(map) = line {
                all.push(OwnedMap {
                    range: map.range,
                    prot: map.prot,
                    shared: map.shared,
                    offset: map.offset,
                    inode: map.inode,
                    name: String::from_utf8_lossy(map.name).into_owned(),
                });
            }
        },
    )?;
    Ok(all)
}

/// What follows `key` in a file of `key: value` lines, such as /proc/PID/status or smaps_rollup, without blanks around it.
pub fn value<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':')).map(str::trim)
}

/// Returns true if the process or thread of this /proc/PID/status has a seccomp filter.
pub fn has_filter(status: &str) -> bool {
    value(status, "Seccomp").is_some_and(|mode| mode != "0")
}

/// The number that is the [`value`] of `key`, without its unit.
pub fn field(text: &str, key: &str) -> Option<u64> {
    value(text, key)?.split_whitespace().next()?.parse().ok()
}

/// Memory of a process in bytes, from smaps_rollup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Resident.
    pub rss: u64,
    /// Resident, each page divided by its mappers.
    pub pss: u64,
    /// Of that: shared memory, as of memory files.
    pub pss_shared_memory: u64,
    /// Resident and not shared.
    pub private: u64,
    /// Anonymous.
    pub anonymous: u64,
}

/// Memory of `pid`.
///
/// # Errors
/// As reading /proc/PID/smaps_rollup.
pub fn memory(pid: i32) -> io::Result<MemoryUse> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
    let kib = |key| field(&text, key).unwrap_or(0) * 1024;
    Ok(MemoryUse {
        rss: kib("Rss"),
        pss: kib("Pss"),
        pss_shared_memory: kib("Pss_Shmem"),
        private: kib("Private_Clean") + kib("Private_Dirty"),
        anonymous: kib("Anonymous"),
    })
}

/// Resident bytes of `pid`, 0 if it is gone. Cheap: unlike [`memory`] it walks no page tables.
pub fn rss(pid: i32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
    let pages: u64 = text.split(' ').nth(1).and_then(|field| field.parse().ok()).unwrap_or(0);
    pages * crate::PAGE_SIZE as u64
}

/// Resident anonymous bytes of `pid`, 0 if it is gone. Cheap: it walks no page tables.
pub fn anonymous(pid: i32) -> u64 {
    field(&status(pid), "RssAnon").unwrap_or(0) * 1024
}

/// Reads a file of `pid` that holds its name. The kernel may cut the name within a letter, and the process may choose any
/// bytes.
fn lossy(pid: i32, file: &str) -> Option<String> {
    fs::read(format!("/proc/{pid}/{file}")).ok().map(|text| String::from_utf8_lossy(&text).into_owned())
}

/// The command name of `pid`, at most 15 bytes of it.
pub fn name(pid: i32) -> Option<String> {
    lossy(pid, "comm").map(|name| name.trim_end().to_owned())
}

/// /proc/PID/status of `pid`, for [`field`]; empty if there is none.
pub fn status(pid: i32) -> String {
    lossy(pid, "status").unwrap_or_default()
}

/// True if `pid` is stopped by a signal, as by Ctrl-Z.
pub fn is_stopped(pid: i32) -> bool {
    stat_line(pid).is_some_and(|stat| stat::field(&stat, STATE) == Some("T"))
}

/// True if process or thread `id` waits for nothing but a processor.
pub fn is_runnable(id: i32) -> bool {
    stat_line(id).is_some_and(|stat| stat::field(&stat, STATE) == Some("R"))
}

/// Processor time that `pid` used, user and system, in nanoseconds; threads that ended included.
pub fn cpu_ns(pid: i32) -> Option<u64> {
    // The kernel's largest. The number of a clock has room for 29 bits of it: a larger one would name another's clock.
    const PID_MAX: i32 = 1 << 22;
    if !(1..=PID_MAX).contains(&pid) {
        return None;
    }
    // By the process's own clock: /proc/PID/stat counts in ticks of 10 ms.
    let (mut clock, mut time) = (0, libc::timespec { tv_sec: 0, tv_nsec: 0 });
    // SAFETY: both calls fill what they are given.
    let told = unsafe {
        libc::clock_getcpuclockid(pid, &raw mut clock) == 0 && libc::clock_gettime(clock, &raw mut time) == 0
    };
    told.then(|| time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}

/// Page faults of `pid` so far, with and without I/O; threads that ended included.
pub fn faults(pid: i32) -> Option<u64> {
    let stat = stat_line(pid)?;
    let [minor, major] = [10, 12].map(|number| stat::field(&stat, number)?.parse::<u64>().ok());
    Some(minor? + major?)
}

/// Start time of `pid` in clock ticks since boot. With the process id it names a process for good. A process that has ended
/// and waits to be reaped still has one.
pub fn start_time(pid: i32) -> Option<u64> {
    stat::field(&stat_line(pid)?, START_TIME)?.parse().ok()
}

/// As [`start_time`], but `None` also for a process that has ended and waits to be reaped.
pub fn start_time_of_running(pid: i32) -> Option<u64> {
    let stat = stat_line(pid)?;
    if is_dead(&stat) {
        return None;
    }
    stat::field(&stat, START_TIME)?.parse().ok()
}

/// True if process `pid` is gone, or nothing is left of it but its number: its files are closed.
///
/// Its first thread may have ended while others still end. Until the last of them has, its descriptors are open.
pub fn has_ended(pid: i32) -> bool {
    let is_last = || threads(pid).is_ok_and(|threads| threads.len() <= 1);
    stat_line(pid).is_none_or(|stat| is_dead(&stat) && is_last())
}

fn is_dead(stat: &[u8]) -> bool {
    stat::field(stat, STATE).is_none_or(|state| matches!(state, "Z" | "X"))
}

/// Fields of /proc/PID/stat, numbered as in proc_pid_stat(5).
const STATE: usize = 3;
const START_TIME: usize = 22;

fn stat_line(pid: i32) -> Option<Vec<u8>> {
    fs::read(format!("/proc/{pid}/stat")).ok()
}

/// All process ids.
pub fn pids() -> Vec<i32> {
    numbers_in("/proc").unwrap_or_default()
}

/// The threads of `pid`, by number.
///
/// # Errors
/// As opendir(3): there is no such process.
pub fn threads(pid: i32) -> io::Result<Vec<i32>> {
    numbers_in(&format!("/proc/{pid}/task"))
}

/// The children of a process, of all its threads; none if it has ended.
pub fn children(pid: i32) -> Vec<i32> {
    let of_thread = |id: i32| fs::read_to_string(format!("/proc/{pid}/task/{id}/children")).unwrap_or_default();
    let all: String = threads(pid).unwrap_or_default().into_iter().map(of_thread).collect();
    all.split_whitespace().filter_map(|child| child.parse().ok()).collect()
}

/// The files of a directory that have a number for a name, in order.
fn numbers_in(directory: &str) -> io::Result<Vec<i32>> {
    let entries = fs::read_dir(directory)?;
    let mut numbers: Vec<i32> = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect();
    numbers.sort_unstable();
    Ok(numbers)
}

/// Mappings that the kernel allows a process (`vm.max_map_count`).
pub fn mappings_max() -> u64 {
    let text = fs::read_to_string("/proc/sys/vm/max_map_count").ok();
    // The kernel's default where the setting cannot be read.
    text.and_then(|text| text.trim().parse().ok()).unwrap_or(65_530)
}

/// Bytes of memory that the system could give out, and in all.
pub fn available_and_total() -> (u64, u64) {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    (field(&text, "MemAvailable").unwrap_or(0) * 1024, field(&text, "MemTotal").unwrap_or(0) * 1024)
}

/// Percent of the last ten seconds in which some program of the host waited for memory: what `file` says, which is
/// /proc/pressure/memory but in tests. `None` if the kernel does not tell (`psi=0`).
pub fn memory_stall(file: &Path) -> Option<f64> {
    let text = fs::read_to_string(file).ok()?;
    text.strip_prefix("some avg10=")?.split(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn we_find_ourselves() {
        let here = &raw const TEST_STATIC as u64;
        static TEST_STATIC: u8 = 1;
        let me = std::process::id() as i32;
        assert!(maps(me).unwrap().iter().any(|map| map.range.start <= here && here < map.range.end));
        assert!(memory(me).unwrap().rss > 0 && rss(me) > 0);
        assert!(cpu_ns(me).is_some());
        assert!(start_time(me).is_some_and(|time| time > 0) && start_time_of_running(me) == start_time(me));
        assert_eq!(start_time(-1), None);
        assert!(pids().contains(&me));
        assert_eq!(maps(-1).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn processor_time_keeps_threads_that_ended_and_is_exact() {
        let me = std::process::id() as i32;
        let spent = std::thread::spawn(|| {
            while crate::sched::thread_cpu_ns() < 200_000_000 {}
            crate::sched::thread_cpu_ns()
        });
        let spent = spent.join().expect("no panic");
        let total = cpu_ns(me).expect("we are there");
        assert!(total >= spent, "{total} of {spent}");
        // Every look costs some: no tick of 10 ms stands still.
        assert!(cpu_ns(me).expect("we are there") > total);
        assert_eq!(cpu_ns(i32::MAX), None);
    }

    #[test]
    fn faults_are_counted_and_those_of_threads_that_ended_are_kept() {
        let me = std::process::id() as i32;
        let before = faults(me).expect("we are there");
        let touch = || {
            let fresh = crate::mem::Mapping::anonymous(64 * crate::PAGE_SIZE).expect("memory");
            for page in 0..64 {
                // SAFETY: inside a mapping of this test.
                unsafe { (fresh.addr() as *mut u8).add(page * crate::PAGE_SIZE).write_volatile(1) };
            }
        };
        std::thread::spawn(touch).join().expect("no panic");
        let after = faults(me).expect("we are there");
        assert!(after > before, "{after} after {before}");
        assert_eq!(faults(-1), None);
    }

    #[test]
    fn a_process_that_waits_to_be_reaped_has_a_start_time_and_does_not_run() {
        let mut child = std::process::Command::new("/bin/true").spawn().expect("a child");
        let pid = child.id() as i32;
        let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while start_time_of_running(pid).is_some() && std::time::Instant::now() < until {
            std::thread::yield_now();
        }
        assert!(start_time(pid).is_some() && start_time_of_running(pid).is_none() && has_ended(pid));
        assert!(!has_ended(std::process::id() as i32));
        child.wait().expect("it has ended");
        assert!(start_time(pid).is_none() && has_ended(pid));
    }

    #[test]
    fn a_field_is_found_by_its_whole_name() {
        let text = "VmPinned:\t 3 kB\nVmPin:\t 17 kB\n";
        assert_eq!(field(text, "VmPin"), Some(17));
        assert_eq!(field(text, "Vm"), None);
    }
}
