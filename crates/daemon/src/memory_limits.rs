//! How much memory a client may still take: the limits of its control groups (both versions), and the host's.

use pagefold_os::sync::lock;
use pagefold_os::{PAGE_SIZE, procfs};
use pagefold_protocol::residency_map::SCANT_PAGES;
use pagefold_tier::policy::stalled_share;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};

/// Above this share of its limit a client's memory goes out whether it is silent or not.
pub(crate) const SHORT: f64 = 0.945;
/// From this share of a limit on it is asked how much of the memory in use is only the file cache.
pub(crate) const TIGHT: f64 = 0.75;
/// Share of a limit that pages which come back may fill; the rest is for the program's own
/// allocations. No eviction comes in time for those: at a limit the kernel kills, and does not ask the daemon.
const FILLED: f64 = 0.965;
/// Bytes that a small limit keeps for the program beyond its share: what the kernel needs at once for a process.
const FLOOR: u64 = 4 << 20;
/// Pages that come back between two looks, where there is no limit near: one may be set at any time.
const PAGES_BETWEEN: u64 = 256;
/// Bytes that the daemon's own control group must have left for it to accept another client: at its limit the kernel would
/// kill the daemon. A new client takes a tenth of them at first.
pub(crate) const CLIENT_BYTES: u64 = 1 << 20;
/// Numbers from here on mean "no limit" in version 1.
const NO_LIMIT: u64 = 1 << 60;

/// Memory in use beside what is allowed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Usage {
    /// In use, without file cache that could go at once, in bytes.
    pub used: u64,
    /// Allowed, in bytes.
    pub limit: u64,
}

impl Usage {
    /// In use of what is allowed.
    pub fn share(&self) -> f64 {
        self.used as f64 / self.limit.max(1) as f64
    }

    /// Bytes that may be filled yet.
    fn free(self) -> u64 {
        ((self.limit as f64 * FILLED) as u64).saturating_sub(self.used)
    }
}

/// One control group, and its files.
#[derive(Debug)]
struct Level {
    path: PathBuf,
    used: File,
    limits: Vec<File>,
    stat: Option<File>,
    pressure: Option<File>,
}

fn text(file: &File) -> Option<String> {
    // A file of the kernel's: the whole of it in one read, if the buffer is large enough.
    let mut buffer = vec![0; 16 << 10];
    let got = file.read_at(&mut buffer, 0).ok()?;
    buffer.truncate(got);
    String::from_utf8(buffer).ok()
}

fn number(file: &File) -> Option<u64> {
    let mut buffer = [0; 32];
    let got = file.read_at(&mut buffer, 0).ok()?;
    std::str::from_utf8(&buffer[..got]).ok()?.trim().parse().ok()
}

impl Level {
    fn open(path: &Path) -> Option<Level> {
        let open = |names: &[&str]| -> Vec<File> {
            names.iter().filter_map(|name| File::open(path.join(name)).ok()).collect()
        };
        Some(Level {
            path: path.to_owned(),
            used: open(&["memory.current", "memory.usage_in_bytes"]).pop()?,
            limits: open(&["memory.high", "memory.max", "memory.limit_in_bytes"]),
            stat: open(&["memory.stat"]).pop(),
            pressure: open(&["memory.pressure"]).pop(),
        })
    }

    fn usage(&self) -> Option<Usage> {
        let limit = self.limits.iter().filter_map(number).min().filter(|limit| *limit < NO_LIMIT)?;
        let kept = (limit as f64 * (1.0 - FILLED)) as u64;
        let mut usage = Usage { used: number(&self.used)?, limit: limit.saturating_sub(FLOOR.saturating_sub(kept)) };
        if usage.share() > TIGHT {
            let cache = self.stat.as_ref().and_then(text).map_or(0, |text| file_cache(&text));
            usage.used = usage.used.saturating_sub(cache);
        }
        Some(usage)
    }
}

/// Bytes of file cache that a memory.stat tells: of the group and all below it.
fn file_cache(stat: &str) -> u64 {
    let field = |name: &str| -> Option<u64> {
        stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
    };
    // Version 1 tells the group's own without, and the sum with the prefix.
    let sum = |prefix: &str| Some(field(&format!("{prefix}inactive_file"))? + field(&format!("{prefix}active_file"))?);
    sum("total_").or_else(|| sum("")).unwrap_or(0)
}

/// The control groups that count a process's memory, its own first, by what /proc/PID/cgroup says; all are mounted at
/// `root`.
fn levels_of(text: &str, root: &Path) -> Vec<Level> {
    let mut levels = Vec::new();
    for line in text.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let mounts: &[&str] = match controllers {
            "" => &["", "unified"],
            names if names.split(',').any(|name| name == "memory") => &["memory"],
            _ => continue,
        };
        for root in mounts.iter().map(|mount| root.join(mount)) {
            let own = root.join(path.trim_matches('/'));
            levels.extend(own.ancestors().take_while(|path| path.starts_with(&root)).filter_map(Level::open));
        }
    }
    levels
}

/// Where a process is.
#[derive(Debug, Default)]
struct Membership {
    /// As /proc/PID/cgroup says it.
    text: String,
    levels: Vec<Level>,
}

/// What a client may still take.
#[derive(Debug)]
pub(crate) struct MemoryLimits {
    /// The process with the groups that count, wherever it is moved to; 0 for none.
    pid: i32,
    /// Bytes of the host's memory that are available, and all.
    host: fn() -> (u64, u64),
    membership: Mutex<Membership>,
    /// Pages that may come back before the next look.
    left: AtomicI64,
    /// Pages that there was room for at the last look.
    free: AtomicU64,
    /// At the last look something had to go out.
    short: AtomicBool,
}

/// The daemon's own.
pub(crate) fn own() -> &'static MemoryLimits {
    static OWN: OnceLock<MemoryLimits> = OnceLock::new();
    OWN.get_or_init(|| MemoryLimits::of(std::process::id() as i32))
}

impl MemoryLimits {
    pub fn of(pid: i32) -> MemoryLimits {
        MemoryLimits::new(pid, procfs::available_and_total, Membership::default())
    }

    fn new(pid: i32, host: fn() -> (u64, u64), membership: Membership) -> MemoryLimits {
        let (left, free, short) = Default::default();
        MemoryLimits { pid, host, membership: Mutex::new(membership), left, free, short }
    }

    /// Looks whether the process is in other control groups by now.
    fn follow(&self) {
        if self.pid != 0
            && let Ok(text) = std::fs::read_to_string(format!("/proc/{}/cgroup", self.pid))
        {
            self.be_at(text, Path::new("/sys/fs/cgroup"));
        }
    }

    fn be_at(&self, text: String, root: &Path) {
        let mut membership = lock(&self.membership);
        if membership.text != text {
            *membership = Membership { levels: levels_of(&text, root), text };
            // The pages left were those of another limit.
            self.left.store(0, Ordering::Relaxed);
        }
    }

    /// The tightest limit of a control group, of those in which the process is now.
    fn tightest(&self) -> Option<Usage> {
        self.follow();
        let membership = lock(&self.membership);
        let usages = membership.levels.iter().filter_map(Level::usage);
        usages.max_by(|one, other| one.share().total_cmp(&other.share()))
    }

    /// The tightest of all limits, the host's memory among them.
    pub fn usage(&self) -> Usage {
        let (available, total) = (self.host)();
        let host = Usage { used: total.saturating_sub(available), limit: total };
        self.tightest().filter(|usage| usage.share() > host.share()).unwrap_or(host)
    }

    /// True if `bytes` more would fill no limit of a control group.
    pub fn has(&self, bytes: u64) -> bool {
        self.tightest().is_none_or(|usage| bytes <= usage.free())
    }

    /// As [`has`](Self::has), and true only if the host keeps `reserve` bytes available besides.
    pub fn has_beside(&self, bytes: u64, reserve: u64) -> bool {
        let keeps = reserve == 0 || (self.host)().0 >= reserve.saturating_add(bytes);
        keeps && self.has(bytes)
    }

    /// Bytes that fill no limit of a control group but of those that `other` is in as well: what is put out of there makes
    /// room there.
    pub fn free_apart(&self, other: &MemoryLimits) -> u64 {
        self.follow();
        other.follow();
        let others: Vec<PathBuf> = lock(&other.membership).levels.iter().map(|level| level.path.clone()).collect();
        let membership = lock(&self.membership);
        let usages = membership.levels.iter().filter(|level| !others.contains(&level.path)).filter_map(Level::usage);
        usages.map(Usage::free).min().unwrap_or(u64::MAX)
    }

    /// Counts up to `wanted` pages as used, as many as may come back now, and returns their number. It is 0 if they would
    /// fill a limit: other pages have to be evicted first, because the kernel kills at the limit and does not wait for the
    /// evictor.
    pub fn reserve_pages(&self, wanted: u64) -> u64 {
        if self.left.fetch_sub(wanted as i64, Ordering::Relaxed) >= wanted as i64 {
            return wanted;
        }
        let free = self.tightest().map_or(u64::MAX, |usage| {
            self.short.store(usage.share() > SHORT, Ordering::Relaxed);
            usage.free() / PAGE_SIZE as u64
        });
        self.free.store(free, Ordering::Relaxed);
        let left = (free / 4).min(PAGES_BETWEEN);
        let reserved = left.min(wanted);
        // An agent takes this look for the latest: where it would stop, the next page looks again.
        let rest = if free < SCANT_PAGES { 0 } else { left - reserved };
        self.left.store(rest as i64, Ordering::Relaxed);
        reserved
    }

    /// Pages that there was room for when [`MemoryLimits::reserve_pages`] last looked.
    pub fn free(&self) -> u64 {
        self.free.load(Ordering::Relaxed)
    }

    /// True once after a look that found too little room: the evictor must free some before there is none.
    pub fn is_short(&self) -> bool {
        self.short.load(Ordering::Relaxed) && self.short.swap(false, Ordering::Relaxed)
    }

    /// The share of time in which something in the client's control group waited for memory.
    pub fn stalled(&self) -> f64 {
        let membership = lock(&self.membership);
        let pressure = membership.levels.first().and_then(|level| level.pressure.as_ref());
        pressure.and_then(text).and_then(|text| stalled_share(&text)).unwrap_or(0.0)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// What is left of so many MiB of which so many are used.
    pub(crate) fn limited(dir: &Path, used: u64, limit: u64) -> MemoryLimits {
        let [used, limit] = [used, limit].map(|mib| (mib << 20).to_string());
        let files =
            [("memory.usage_in_bytes", &*used), ("memory.limit_in_bytes", &*limit), ("memory.stat", "cache 1\n")];
        at(vec![group(dir, &files)])
    }

    fn at(levels: Vec<Level>) -> MemoryLimits {
        // Of a host that has everything.
        MemoryLimits::new(0, || (1, 1), Membership { levels, ..Membership::default() })
    }

    #[test]
    fn a_process_that_is_moved_has_the_limit_of_its_new_group() {
        let root = tempfile::tempdir().expect("a directory");
        for (name, limit) in [("one", "1000"), ("two", "500")] {
            let dir = root.path().join(name);
            std::fs::create_dir(&dir).expect("a directory");
            group(&dir, &[("memory.current", &(100 << 20).to_string()), ("memory.max", &format!("{limit}000000"))]);
        }
        let room = at(Vec::new());
        let limit = || room.tightest().map(|usage| usage.limit);
        room.be_at("0::/one\n".into(), root.path());
        assert!(limit() == Some(1_000_000_000) && room.reserve_pages(1) == 1 && room.left.load(Ordering::Relaxed) > 0);
        room.be_at("0::/two/\n".into(), root.path());
        assert_eq!((limit(), room.left.load(Ordering::Relaxed)), (Some(500_000_000), 0));
        room.be_at("1:cpu:/one\n0::/\n".into(), root.path());
        assert_eq!(limit(), None);
        // `reserve_pages` looks, too.
        let text = std::fs::read_to_string("/proc/self/cgroup").expect("this process has groups");
        let room = MemoryLimits::of(std::process::id() as i32);
        room.be_at("0::/one\n".into(), root.path());
        room.reserve_pages(1);
        assert_eq!(lock(&room.membership).text, text);
        // Nothing is known of a process that has ended.
        let room = MemoryLimits::of(i32::MAX);
        room.be_at("0::/one\n".into(), root.path());
        room.usage();
        assert_eq!(lock(&room.membership).text, "0::/one\n");
    }

    #[test]
    fn file_cache_is_read_in_both_versions() {
        let second = "anon 4096\nfile 12288\ninactive_file 8192\nactive_file 4096\nslab 3\n";
        assert_eq!(file_cache(second), 12288);
        let first = "cache 5\ninactive_file 1\nactive_file 2\nhierarchical_memory_limit 9\n\
                     total_inactive_file 100\ntotal_active_file 20\n";
        assert_eq!(file_cache(first), 120);
        assert_eq!(file_cache("nonsense\ninactive_file many\n"), 0);
    }

    fn group(dir: &Path, files: &[(&str, &str)]) -> Level {
        files.iter().for_each(|(name, content)| std::fs::write(dir.join(name), content).expect("a file"));
        Level::open(dir).expect("the files of a group")
    }

    #[test]
    fn what_is_near_a_limit_gets_little_and_what_is_over_it_nothing() {
        let dir = tempfile::tempdir().expect("a directory");
        let mib = |mib: u64| (mib << 20).to_string();
        let level = group(
            dir.path(),
            &[
                ("memory.usage_in_bytes", &mib(400)),
                ("memory.limit_in_bytes", &mib(1000)),
                ("memory.stat", "cache 1\n"),
            ],
        );
        assert_eq!(level.usage(), Some(Usage { used: 400 << 20, limit: 1000 << 20 }));
        let room = at(vec![level]);
        assert_eq!(room.reserve_pages(64), 64);
        assert!(!room.is_short());
        let use_up = |used: u64| {
            std::fs::write(dir.path().join("memory.usage_in_bytes"), mib(used)).expect("a file");
            room.left.store(0, Ordering::Relaxed);
        };
        use_up(964);
        // Of the one MiB that is left, a quarter before the next look.
        assert_eq!((room.reserve_pages(4096), room.free()), (64, 256));
        assert!(room.is_short() && !room.is_short());
        use_up(966);
        assert_eq!((room.reserve_pages(1), room.free()), (0, 0));
        std::fs::write(
            dir.path().join("memory.stat"),
            format!("total_inactive_file {}\ntotal_active_file 0\n", 50 << 20),
        )
        .expect("a file");
        use_up(980);
        assert_eq!(room.reserve_pages(64), 64, "the file cache can go");
        std::fs::write(dir.path().join("memory.limit_in_bytes"), mib(20)).expect("a file");
        use_up(67);
        assert_eq!(room.reserve_pages(1), 0, "of a small limit more is kept");
    }

    #[test]
    fn a_limit_that_left_little_room_is_looked_at_for_each_page() {
        let dir = tempfile::tempdir().expect("a directory");
        let room = limited(dir.path(), 0, 1000);
        let set = |file: &str, bytes: u64| std::fs::write(dir.path().join(file), bytes.to_string()).expect("a file");
        set("memory.usage_in_bytes", (965 << 20) - (60 << 12));
        assert_eq!((room.reserve_pages(1), room.free()), (1, 60));
        set("memory.limit_in_bytes", 2000 << 20);
        assert!(room.reserve_pages(1) == 1 && room.free() > 1000, "a limit that is lifted is heard of at once");
    }

    #[test]
    fn there_is_room_for_what_fills_no_limit() {
        let dir = tempfile::tempdir().expect("a directory");
        let room = limited(dir.path(), 900, 1000);
        assert!(room.has(65 << 20) && !room.has(66 << 20));
        assert!(at(Vec::new()).has(u64::MAX / 2));
    }

    #[test]
    fn the_hosts_reserve_is_kept() {
        let mut room = at(Vec::new());
        room.host = || (10 << 20, 64 << 20);
        let has = |bytes: u64, reserve: u64| room.has_beside(bytes << 20, reserve << 20);
        assert_eq!([has(8, 2), has(8, 3), has(64, 0)], [true, false, true]);
        assert!(!room.has_beside(1, u64::MAX));
        let dir = tempfile::tempdir().expect("a directory");
        assert!(!limited(dir.path(), 964, 1000).has_beside(8 << 20, 0), "limits of control groups count too");
    }

    #[test]
    fn what_is_put_out_makes_room_in_the_groups_that_both_are_in() {
        let dirs = [(); 3].map(|()| tempfile::tempdir().expect("a directory"));
        let [both, ours, theirs] = [(&dirs[0], 990), (&dirs[1], 900), (&dirs[2], 999)].map(|(dir, used)| {
            limited(dir.path(), used, 1000);
            move || Level::open(dir.path()).expect("the files of a group")
        });
        let own = at(vec![ours(), both()]);
        assert_eq!(own.free_apart(&at(vec![theirs(), both()])), 65 << 20);
        assert_eq!(own.free_apart(&at(vec![theirs()])), 0, "it is full");
        assert_eq!(own.free_apart(&at(vec![both(), ours()])), u64::MAX);
    }

    #[test]
    fn no_limit_is_none_in_both_versions() {
        let dir = tempfile::tempdir().expect("a directory");
        let second =
            group(dir.path(), &[("memory.current", "4096\n"), ("memory.high", "max\n"), ("memory.max", "max\n")]);
        assert_eq!(second.usage(), None);
        let dir = tempfile::tempdir().expect("a directory");
        let first = group(
            dir.path(),
            &[("memory.usage_in_bytes", "4096\n"), ("memory.limit_in_bytes", "9223372036854771712\n")],
        );
        assert_eq!(first.usage(), None);
    }
}
