//! A running process, read through /proc.
//!
//! Its files are opened when the first unit is read and closed after the last,
//! so that a scan of thousands of processes keeps few files open. `/proc/PID/mem`
//! and `/proc/PID/pagemap` stay bound to the memory they were opened on, and the
//! start time of the process is compared after opening: a process that takes over
//! a dead one's number is never read in its place.

use crate::error::Lost;
use crate::record::PageKind;
use crate::smaps::{self, Reason, Verdict};
use crate::source::{Identity, Pages, ScanPlan, Source, WorkUnit};
use pagefold_os::fd::Fd;
use pagefold_os::pagemap::{self, ENTRY_BYTES, PageEntry, Query, ScannedRange};
use pagefold_os::sync::lock;
use pagefold_os::{Errno, PAGE_SIZE, Range, procfs};
use std::ffi::CString;
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex};

/// Pages in a unit at least: large enough that handing it out costs nothing, small enough to share out well.
const UNIT_PAGES: u64 = (32 << 20) / PAGE_SIZE as u64;
/// Units of a sparse mapping for each [`UNIT_PAGES`] that are there: they may all lie in a part of it.
const UNITS_PER_FULL: u64 = 4;
/// How many pagemap entries one read takes.
const ENTRIES: usize = 512;

/// A running process.
#[derive(Debug)]
pub struct Process {
    pid: i32,
    identity: Identity,
    started: u64,
    files: Mutex<Option<Arc<Files>>>,
}

#[derive(Debug)]
struct Files {
    mem: Fd,
    pagemap: Fd,
}

impl Process {
    /// Takes up process `pid`; its domain is its user.
    ///
    /// # Errors
    /// [`Lost::Absent`] if there is no such process, [`Lost::Unfit`] if it is a thread of one.
    pub fn new(pid: i32) -> Result<Process, Lost> {
        let started = procfs::start_time(pid).ok_or(Lost::Absent)?;
        // Beside its process it would show all of the memory as duplicates.
        if procfs::field(&procfs::status(pid), "Tgid").is_some_and(|process| process != pid as u64) {
            return Err(Lost::Unfit("is a thread; name its process, Tgid in /proc/PID/status"));
        }
        let domain = std::fs::metadata(format!("/proc/{pid}"))?.uid().into();
        let name = procfs::name(pid).ok_or(Lost::Absent)?;
        let identity = Identity { pid: Some(pid), name, domain };
        Ok(Process { pid, identity, started, files: Mutex::new(None) })
    }

    /// Puts the process into `domain`.
    #[must_use]
    pub fn with_domain(mut self, domain: u64) -> Process {
        self.identity.domain = domain;
        self
    }

    fn files(&self) -> Result<Arc<Files>, Lost> {
        let mut slot = lock(&self.files);
        if let Some(files) = &*slot {
            return Ok(files.clone());
        }
        let open = |name: &str| -> Result<Fd, Lost> {
            let path = CString::new(format!("/proc/{}/{name}", self.pid)).map_err(|_| Lost::Absent)?;
            Ok(Fd::open(&path, libc::O_RDONLY, 0)?)
        };
        let opened = open("pagemap").and_then(|pagemap| Ok(Files { pagemap, mem: open("mem")? }));
        // The kernel says "no such file" of a process that is gone.
        let files = opened.map_err(|lost| if lost == Lost::Absent { Lost::Vanished } else { lost })?;
        if procfs::start_time(self.pid) != Some(self.started) {
            return Err(Lost::Vanished);
        }
        Ok(slot.insert(Arc::new(files)).clone())
    }
}

/// Fields of /proc/PID/stat.
const FLAGS: usize = 9;
/// A thread of the kernel's, in the flags.
const PF_KTHREAD: u64 = 0x0020_0000;

fn stat_field(pid: i32, number: usize) -> Option<u64> {
    let text = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    pagefold_os::stat::field(&text, number)?.parse().ok()
}

impl Source for Process {
    fn identity(&self) -> Identity {
        self.identity.clone()
    }

    fn plan(&self) -> Result<ScanPlan, Lost> {
        let mut plan = ScanPlan::default();
        let mut areas = 0u64;
        smaps::of_process(self.pid, |area| {
            areas += 1;
            plan.swapped += area.swapped;
            let clean = area.clean_file_pages();
            if clean > 0 {
                *plan.left_out.entry(Reason::PageCache).or_default() += clean;
            }
            match area.verdict {
                Verdict::Skip(reason) if area.skipped_pages() > 0 => {
                    *plan.left_out.entry(reason).or_default() += area.skipped_pages();
                }
                Verdict::Merged => {
                    plan.merged += area.range.pages().saturating_sub(area.anonymous);
                    if area.anonymous > 0 {
                        *plan.left_out.entry(Reason::Broken).or_default() += area.anonymous;
                    }
                }
                Verdict::Read(kind, reason) if kind == PageKind::Pool || area.anonymous > 0 => {
                    let read = if kind == PageKind::Pool { area.resident } else { area.anonymous };
                    plan.bytes += read * PAGE_SIZE as u64;
                    add_units(&mut plan.units, area.range, read, kind, reason);
                }
                Verdict::Skip(_) | Verdict::Read(..) => {}
            }
        })
        .map_err(|lost| if lost == Lost::Absent { Lost::Vanished } else { lost })?;
        if areas == 0 {
            // An ending process drops its memory first: it shows none while it still runs, and then as a zombie.
            let flags = stat_field(self.pid, FLAGS);
            let of_kernel = flags.is_some_and(|flags| flags & PF_KTHREAD != 0);
            return Err(if of_kernel {
                Lost::Unfit("has no memory: a thread of the kernel's")
            } else {
                Lost::Vanished
            });
        }
        plan.pinned = procfs::field(&procfs::status(self.pid), "VmPin").unwrap_or(0) * 1024 / PAGE_SIZE as u64;
        Ok(plan)
    }

    fn read(&self, unit: &WorkUnit, buffer: &mut [u8], pages: &mut Pages) -> Result<(), Lost> {
        let files = self.files()?;
        let range = Range::pages_from(unit.first_page * PAGE_SIZE as u64, unit.page_count);
        let mut found = [ScannedRange::default(); 256];
        let mut walked = range.start;
        while walked < range.end {
            let left = Range { start: walked, end: range.end };
            let (count, end) = pagemap::scan(&files.pagemap, left, query(unit.kind), &mut found)?;
            for scanned in &found[..count] {
                if scanned.categories & pagemap::PFNZERO != 0 {
                    pages.take_zero_mapped((scanned.end - scanned.start) / PAGE_SIZE as u64);
                } else {
                    files.read_scanned(scanned, buffer, pages)?;
                }
            }
            pages.beat();
            if end <= walked {
                break;
            }
            walked = end;
        }
        Ok(())
    }

    fn close(&self) {
        *lock(&self.files) = None;
    }
}

/// Present pages; of a pool's mapping the file's pages too, else only the process's own.
fn query(kind: PageKind) -> Query {
    let own = if kind == PageKind::Pool { 0 } else { pagemap::FILE };
    Query {
        all_of: pagemap::PRESENT | own,
        inverted: own,
        report: pagemap::PFNZERO | pagemap::HUGE,
        ..Query::default()
    }
}

/// Divides `range`, of which `present` pages are there, into units. Their number grows with what is there, not with the
/// range: addresses cost a process nothing.
fn add_units(units: &mut Vec<WorkUnit>, range: Range, present: u64, kind: PageKind, reason: Option<Reason>) {
    let most = UNITS_PER_FULL * present.div_ceil(UNIT_PAGES).max(1);
    let step = UNIT_PAGES.max(range.pages().div_ceil(most));
    let first = range.start / PAGE_SIZE as u64;
    let mut done = 0;
    while done < range.pages() {
        let page_count = step.min(range.pages() - done);
        units.push(WorkUnit { first_page: first + done, page_count, kind, reason, continues: done > 0 });
        done += page_count;
    }
}

impl Files {
    fn read_scanned(&self, scanned: &ScannedRange, buffer: &mut [u8], pages: &mut Pages) -> Result<(), Lost> {
        let huge = scanned.categories & pagemap::HUGE != 0;
        let mut first = scanned.start / PAGE_SIZE as u64;
        let end = scanned.end / PAGE_SIZE as u64;
        let mut entries = [0u8; ENTRIES * ENTRY_BYTES];
        while first < end {
            let want = (end - first).min(ENTRIES as u64) as usize;
            let offset = first * ENTRY_BYTES as u64;
            let got = self.pagemap.read_at(&mut entries[..want * ENTRY_BYTES], offset)? / ENTRY_BYTES;
            if got == 0 {
                return Err(Lost::Vanished);
            }
            let (entries, _) = entries[..got * ENTRY_BYTES].as_chunks();
            let shared = |index: usize| {
                let entry = PageEntry::from_bytes(entries[index]);
                entry.is_present().then_some(!entry.is_exclusive())
            };
            let mut at = 0;
            while at < got {
                let same = (at..got).take_while(|&index| shared(index) == shared(at)).count();
                if let Some(shared) = shared(at) {
                    self.read_pages(first + at as u64, same, shared, huge, buffer, pages)?;
                }
                at += same;
            }
            first += got as u64;
        }
        Ok(())
    }

    /// Reads `count` pages from `first` on; pages that went away meanwhile are skipped.
    fn read_pages(
        &self,
        mut first: u64,
        mut count: usize,
        shared: bool,
        huge: bool,
        buffer: &mut [u8],
        pages: &mut Pages,
    ) -> Result<(), Lost> {
        while count > 0 {
            let want = buffer.len().min(count * PAGE_SIZE);
            let taken = match self.mem.read_at(&mut buffer[..want], first * PAGE_SIZE as u64) {
                // End of file: the memory has no user left.
                Ok(0) => return Err(Lost::Vanished),
                Ok(bytes) => bytes / PAGE_SIZE,
                Err(Errno(libc::EIO | libc::EFAULT)) => 0,
                Err(errno) => return Err(errno.into()),
            };
            pages.take(first, shared, huge, &buffer[..taken * PAGE_SIZE]);
            let passed = taken.max(1);
            first += passed as u64;
            count -= passed;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn units(pages: u64, present: u64) -> Vec<WorkUnit> {
        let mut units = Vec::new();
        add_units(&mut units, Range::pages_from(0, pages), present, PageKind::Own, None);
        units
    }

    #[test]
    fn units_are_as_many_as_what_is_there() {
        assert!(units(127 << 18, 1).len() <= UNITS_PER_FULL as usize, "127 GiB of addresses with one page");
        let full = units(1 << 20, 1 << 20);
        assert_eq!(full.len() as u64, (1 << 20) / UNIT_PAGES);
        for some in [units(12_345_678, 3), units(8191, 8191), units(1, 1), units(1 << 30, 1 << 22), full] {
            let end = some.iter().fold(0, |at, unit| {
                assert_eq!((unit.first_page, unit.continues), (at, at > 0));
                at + unit.page_count
            });
            assert!(end == some.iter().map(|unit| unit.page_count).sum::<u64>() && end > 0);
        }
    }
}
