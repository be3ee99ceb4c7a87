//! /proc/PID/smaps, and what each mapping means to a merge.

use crate::error::Lost;
use crate::record::PageKind;
use pagefold_os::smaps::{self, SmapsEntry};
use pagefold_os::{PAGE_SIZE, Range};
use serde::Serialize;

/// Why present pages would not be merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// Writes are meant to be seen by others.
    SharedMapping,
    /// A file's pages, which the kernel's page cache shares already.
    PageCache,
    /// The process's own copies of a file's pages: UFFDIO_MOVE refuses them.
    FileCopy,
    /// mlock: the program asked that no access ever waits.
    Locked,
    /// MADV_DONTDUMP, which marks secrets; not even read.
    DontDump,
    /// MADV_WIPEONFORK, which marks secrets; not even read.
    WipeOnFork,
    /// Huge pages from hugetlbfs.
    HugeTlb,
    /// Can be executed and not written.
    Executable,
    /// The main thread's stack, which grows.
    Stack,
    /// Cannot be written, so that a page cannot be put back in place.
    ReadOnly,
    /// mseal: the mapping may not be replaced.
    Sealed,
    /// Merged by pagefold and written since; they merge again when they are silent.
    Broken,
    /// Another userfaultfd owns the range, and could hang a reader.
    Userfaultfd,
    /// Memory of devices and of the kernel.
    Special,
}

impl Reason {
    /// The reason in words.
    pub const fn words(self) -> &'static str {
        match self {
            Reason::SharedMapping => "shared mapping: others must see writes to it",
            Reason::PageCache => "file pages: the page cache shares them already",
            Reason::FileCopy => "changed pages of private file mappings",
            Reason::Locked => "locked (mlock)",
            Reason::DontDump => "secret (MADV_DONTDUMP)",
            Reason::WipeOnFork => "secret (MADV_WIPEONFORK)",
            Reason::HugeTlb => "huge TLB pages",
            Reason::Executable => "executable and read-only",
            Reason::Stack => "main stack",
            Reason::ReadOnly => "read-only or without access",
            Reason::Sealed => "sealed (mseal)",
            Reason::Broken => "merged once and written since",
            Reason::Userfaultfd => "another userfaultfd owns the range",
            Reason::Special => "memory of devices or of the kernel",
        }
    }
}

/// What to do about a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Read its present anonymous pages; they are of this kind, and if only the kernel can merge them, why.
    Read(PageKind, Option<Reason>),
    /// It shows pages of pagefold's pool, but for those that were written since. Reading it would fault pages in.
    Merged,
    /// Leave it alone.
    Skip(Reason),
}

/// One mapping with the pages it holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Area {
    pub range: Range,
    pub verdict: Verdict,
    pub resident: u64,
    pub anonymous: u64,
    pub swapped: u64,
    huge_tlb: u64,
    file: bool,
}

/// Names that the kernel shows for memory files of pagefold's pool.
const POOL_PREFIX: &[u8] = b"/memfd:pagefold";

/// The code of agents in programs that were attached.
const AGENT_PREFIX: &[u8] = b"/memfd:pagefold-agent";

/// Decides about a mapping.
fn judge(mapping: &SmapsEntry<'_>, file: bool) -> Verdict {
    let map = &mapping.map;
    let has = |flag| mapping.has(flag);
    let kernel_only = |reason| Verdict::Read(PageKind::KernelOnly, Some(reason));
    let writable = libc::PROT_READ | libc::PROT_WRITE;
    let bracket = map.name.starts_with(b"[") && !map.name.starts_with(b"[anon:") && map.name != b"[heap]";
    let (pool, stack) = (map.name.starts_with(POOL_PREFIX), map.name.starts_with(b"[stack"));
    if has("ht") {
        Verdict::Skip(Reason::HugeTlb)
    } else if map.name.starts_with(AGENT_PREFIX) {
        Verdict::Skip(Reason::PageCache)
    } else if pool && map.shared {
        // The agent's own window to the pool: what is in there, a merge need not store again.
        Verdict::Read(PageKind::Pool, None)
    } else if pool {
        Verdict::Merged
    } else if map.shared || has("sh") {
        Verdict::Skip(Reason::SharedMapping)
    } else if bracket && !stack || has("io") || has("pf") {
        Verdict::Skip(Reason::Special)
    } else if has("um") || has("ui") {
        Verdict::Skip(Reason::Userfaultfd)
    } else if has("dd") {
        Verdict::Skip(Reason::DontDump)
    } else if has("wf") {
        Verdict::Skip(Reason::WipeOnFork)
    } else if file {
        kernel_only(Reason::FileCopy)
    } else if has("lo") {
        kernel_only(Reason::Locked)
    } else if has("sl") {
        kernel_only(Reason::Sealed)
    } else if map.is_executable() && !map.is_plain_anonymous() {
        kernel_only(Reason::Executable)
    } else if stack {
        kernel_only(Reason::Stack)
    } else if map.prot & writable != writable {
        kernel_only(Reason::ReadOnly)
    } else if map.is_plain_anonymous() {
        Verdict::Read(PageKind::Own, None)
    } else {
        kernel_only(Reason::Special)
    }
}

impl Area {
    fn new(mapping: &SmapsEntry<'_>) -> Area {
        let pages = |bytes| bytes / PAGE_SIZE as u64;
        let file = mapping.map.inode != 0 || mapping.map.name.starts_with(b"/");
        Area {
            range: mapping.map.range,
            verdict: judge(mapping, file),
            resident: pages(mapping.resident),
            anonymous: pages(mapping.anonymous),
            swapped: pages(mapping.swapped),
            huge_tlb: pages(mapping.huge_tlb),
            file,
        }
    }

    /// Present pages that are not read although the mapping is: a file's clean ones.
    pub(crate) fn clean_file_pages(&self) -> u64 {
        match self.verdict {
            Verdict::Read(PageKind::Pool, _) => 0,
            Verdict::Read(..) if self.file => self.resident.saturating_sub(self.anonymous),
            _ => 0,
        }
    }

    /// Present pages of a mapping that is left alone.
    pub(crate) fn skipped_pages(&self) -> u64 {
        self.resident.max(self.huge_tlb)
    }
}

/// Calls `f` with each mapping of process `pid`.
pub(crate) fn of_process(pid: i32, mut f: impl FnMut(&Area)) -> Result<(), Lost> {
    Ok(smaps::of_process(pid, |mapping| f(&Area::new(mapping)))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(head: &str, flags: &str) -> Verdict {
        let text = format!("{head}\nSize: 8 kB\nRss:    8 kB\nAnonymous: 4 kB\nSwap: 4 kB\nVmFlags: {flags}\n");
        let mut found = None;
        smaps::parse(text.as_bytes(), |mapping| {
            let area = Area::new(mapping);
            assert_eq!((area.resident, area.anonymous, area.swapped), (2, 1, 1));
            found = Some(area.verdict);
        })
        .expect("text reads");
        found.expect("one mapping")
    }

    #[test]
    fn each_kind_of_mapping_is_told_apart() {
        let anonymous = "10000-12000 rw-p 00000000 00:00 0 ";
        let kernel_only = |reason| Verdict::Read(PageKind::KernelOnly, Some(reason));
        for (head, flags, expected) in [
            (anonymous, "rd wr mr mw me ac", Verdict::Read(PageKind::Own, None)),
            (anonymous, "rd wr mr mw me ac uw mg", Verdict::Read(PageKind::Own, None)),
            ("10000-12000 rw-p 0 00:00 0  [heap]", "rd wr", Verdict::Read(PageKind::Own, None)),
            ("10000-12000 rw-p 0 00:00 0  [anon:arena]", "rd wr", Verdict::Read(PageKind::Own, None)),
            (anonymous, "rd wr lo", kernel_only(Reason::Locked)),
            (anonymous, "rd wr sl", kernel_only(Reason::Sealed)),
            (anonymous, "rd wr dd", Verdict::Skip(Reason::DontDump)),
            (anonymous, "rd wr wf", Verdict::Skip(Reason::WipeOnFork)),
            (anonymous, "rd wr um", Verdict::Skip(Reason::Userfaultfd)),
            (anonymous, "rd wr ui", Verdict::Skip(Reason::Userfaultfd)),
            ("10000-12000 rw-p 0 00:0e 7 /anon_hugepage (deleted)", "rd wr de ht", Verdict::Skip(Reason::HugeTlb)),
            ("10000-12000 rw-s 0 00:01 7 /dev/zero (deleted)", "rd wr sh", Verdict::Skip(Reason::SharedMapping)),
            ("10000-12000 r--p 0 00:00 0 [vvar]", "rd mr pf io de dd", Verdict::Skip(Reason::Special)),
            ("10000-12000 rwxp 0 00:00 0 ", "rd wr ex", Verdict::Read(PageKind::Own, None)),
            ("10000-12000 r-xp 0 00:00 0 ", "rd ex", kernel_only(Reason::Executable)),
            ("10000-12000 r--p 0 00:00 0 ", "rd mr", kernel_only(Reason::ReadOnly)),
            ("10000-12000 rw-p 0 00:00 0 [stack]", "rd wr gd", kernel_only(Reason::Stack)),
            ("10000-12000 rw-p 0 fe:00 7 /lib/libc.so.6", "rd wr", kernel_only(Reason::FileCopy)),
            ("10000-12000 rw-p 0 00:01 7 /memfd:pagefold-pool (deleted)", "rd wr um", Verdict::Merged),
            ("10000-12000 r--s 0 00:01 7 /memfd:pagefold-pool:x", "rd sh", Verdict::Read(PageKind::Pool, None)),
            ("10000-12000 r-xp 0 00:01 7 /memfd:pagefold-agent (deleted)", "rd ex", Verdict::Skip(Reason::PageCache)),
            ("10000-12000 rw-s 0 00:01 7 /memfd:other", "rd wr sh", Verdict::Skip(Reason::SharedMapping)),
        ] {
            assert_eq!(verdict(head, flags), expected, "{head} {flags}");
        }
    }

    #[test]
    fn our_own_mappings_are_all_seen() {
        let mut areas = 0;
        of_process(std::process::id() as i32, |area| {
            assert!(area.range.start < area.range.end);
            areas += 1;
        })
        .expect("we may read ourselves");
        assert!(areas > 5);
        assert_eq!(of_process(-1, |_| {}), Err(Lost::Absent));
    }
}
