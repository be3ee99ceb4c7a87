//! Memory of clients that is not managed, by reason.
//!
//! Which memory is managed, the agent has listed. The rest is what /proc/PID/smaps shows beside it. The reason follows the
//! rules of the agent's list, as far as the kernel tells of a mapping what they ask.

use crate::clients::merge_client::REGIONS_MAX;
use crate::clients::shared_client::SharedClient;
use crate::status::{FILE_PAGES, UnmanagedMemory};
use pagefold_merge::Managed;
use pagefold_os::fd::Fd;
use pagefold_os::pagemap::{self, Query, ScannedRange};
use pagefold_os::smaps::{self, SmapsEntry};
use pagefold_os::{Errno, Range, ranges};
use pagefold_protocol::message::ALL_MIN;
use std::collections::BTreeMap;
use std::ffi::CString;
use std::io;
use std::sync::atomic::Ordering;

/// The memory of a process that is not `managed`, the most first.
pub(super) fn of_process(shared: &SharedClient, managed: &Managed) -> io::Result<Vec<UnmanagedMemory>> {
    let mut bytes: BTreeMap<&'static str, u64> = BTreeMap::new();
    let rules = Rules {
        all: shared.manages_all,
        is_full: managed.ranges.len() >= REGIONS_MAX,
        is_new: managed.generation != Some(shared.counters().generation.load(Ordering::Acquire)),
    };
    let mut pagemap = None;
    let mut failed: Result<(), Errno> = Ok(());
    smaps::of_process(shared.pid, |mapping| {
        for (reason, held) in rules.judge(mapping) {
            let held = match held {
                Held::Known(held) => held,
                Held::Unmanaged => match outside(shared.pid, &mut pagemap, mapping, &managed.ranges) {
                    Ok(held) => held,
                    Err(errno) => return failed = Err(errno),
                },
            };
            if held > 0 {
                *bytes.entry(reason).or_default() += held;
            }
        }
    })?;
    failed?;
    let mut memory: Vec<UnmanagedMemory> =
        bytes.into_iter().map(|(reason, bytes)| UnmanagedMemory { reason: reason.into(), bytes }).collect();
    memory.sort_by_key(|one| std::cmp::Reverse(one.bytes));
    Ok(memory)
}

/// Bytes in memory of `mapping` outside of `ranges`, which are in order.
fn outside(pid: i32, pagemap: &mut Option<Fd>, mapping: &SmapsEntry<'_>, ranges: &[Range]) -> Result<u64, Errno> {
    let whole = mapping.map.range;
    let parts = without(whole, ranges);
    if mapping.resident == 0 || parts.is_empty() {
        return Ok(0);
    }
    if parts == [whole] {
        return Ok(mapping.resident);
    }
    if pagemap.is_none() {
        let path = CString::new(format!("/proc/{pid}/pagemap")).map_err(|_| Errno(libc::EINVAL))?;
        *pagemap = Some(Fd::open(&path, libc::O_RDONLY, 0)?);
    }
    let pagemap = pagemap.as_ref().ok_or(Errno(libc::ENOENT))?;
    // The kernel's zero page is in no account of memory.
    let query = Query {
        all_of: pagemap::PRESENT | pagemap::PFNZERO,
        inverted: pagemap::PFNZERO,
        report: pagemap::PRESENT,
        ..Query::default()
    };
    let mut regions = [ScannedRange::default(); 64];
    let mut bytes = 0;
    for part in parts {
        let mut at = part.start;
        while at < part.end {
            let (count, walked) = pagemap::scan(pagemap, Range { start: at, end: part.end }, query, &mut regions)?;
            bytes += regions[..count].iter().map(|region| region.end - region.start).sum::<u64>();
            if walked <= at {
                break;
            }
            at = walked;
        }
    }
    Ok(bytes)
}

/// The parts of `whole` in none of `managed`, which are in order.
fn without(whole: Range, managed: &[Range]) -> Vec<Range> {
    let first = managed.partition_point(|range| range.end <= whole.start);
    ranges::outside(whole, managed[first..].iter().copied())
}

/// How much of a mapping a reason is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Held {
    /// So many bytes.
    Known(u64),
    /// What is in memory and not managed.
    Unmanaged,
}

/// What of a client decides besides the mapping.
#[derive(Clone, Copy)]
struct Rules {
    /// All its large private memory is managed, not only what it marks.
    all: bool,
    /// As many ranges are managed as can be.
    is_full: bool,
    /// It has memory that it did not list yet.
    is_new: bool,
}

impl Rules {
    /// Why memory of a mapping is not managed.
    fn judge(self, mapping: &SmapsEntry<'_>) -> Vec<(&'static str, Held)> {
        let map = &mapping.map;
        if mapping.huge_tlb > 0 {
            return vec![("huge TLB pages", Held::Known(mapping.huge_tlb))];
        }
        // The pool, the channel and the residency map are pagefold's.
        if map.name.starts_with(b"/memfd:pagefold") {
            return Vec::new();
        }
        if map.shared || mapping.has("sh") {
            return vec![(
                if is_shared_memory(map.name) { "shared memory" } else { FILE_PAGES },
                Held::Known(mapping.resident),
            )];
        }
        if map.inode != 0 {
            let clean = mapping.resident.saturating_sub(mapping.anonymous);
            let copies = if mapping.has("mg") { KSM_COPIES } else { FILE_COPIES };
            return vec![(FILE_PAGES, Held::Known(clean)), (copies, Held::Known(mapping.anonymous))];
        }
        vec![(self.judge_private(mapping), Held::Unmanaged)]
    }

    /// Why private memory of no file is not managed.
    fn judge_private(self, mapping: &SmapsEntry<'_>) -> &'static str {
        const FLAGS: [(&str, &str); 7] = [
            ("io", OF_KERNEL),
            ("lo", "locked (mlock)"),
            ("sl", "sealed (mseal)"),
            ("wf", "secret (MADV_WIPEONFORK)"),
            ("dd", "kept out of core dumps (MADV_DONTDUMP)"),
            ("um", "under a userfaultfd of the program's own"),
            ("ui", "under a userfaultfd of the program's own"),
        ];
        let map = &mapping.map;
        let is_of_kernel = map.name.starts_with(b"[")
            && ![&b"[anon:"[..], b"[heap]", b"[stack"].iter().any(|prefix| map.name.starts_with(prefix));
        if is_of_kernel {
            return OF_KERNEL;
        }
        if let Some((_, reason)) = FLAGS.iter().find(|(flag, _)| mapping.has(flag)) {
            return reason;
        }
        if mapping.keyed {
            "under a protection key"
        } else if map.name.starts_with(b"[stack") {
            "main stack"
        } else if !map.is_plain_anonymous() {
            "not both readable and writable"
        } else if !self.all {
            "not marked (MADV_MERGEABLE)"
        } else if map.name == b"[heap]" {
            "the end of the heap, which comes and goes"
        } else if map.range.len() < ALL_MIN {
            "mappings below 128 KiB"
        } else if self.is_full {
            "more ranges than can be managed"
        } else if self.is_new {
            "new, not looked at yet"
        } else {
            "excluded (MADV_UNMERGEABLE), or pagefold cannot see its end"
        }
    }
}

const OF_KERNEL: &str = "memory of devices or of the kernel";
const FILE_COPIES: &str = "changed copies of pages of files";
const KSM_COPIES: &str = "changed copies of pages of files, left to KSM";

/// True for a file, as the kernel names it, that is memory and nothing else.
fn is_shared_memory(name: &[u8]) -> bool {
    [&b"/memfd:"[..], b"/dev/shm/", b"/dev/zero", b"/SYSV", b"/anon_hugepage", b"anon_inode:", b"[anon_shmem:"]
        .iter()
        .any(|prefix| name.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULES: Rules = Rules { all: true, is_full: false, is_new: false };

    /// The reasons for a mapping of 4 MiB with 8 KiB in memory, 4 of them its own.
    fn judged(rules: Rules, rest: &str, more: &str) -> Vec<(&'static str, Held)> {
        let text = format!("100000-500000 {rest}\nRss: 8 kB\nAnonymous: 4 kB\n{more}\n");
        let mut all = Vec::new();
        smaps::parse(text.as_bytes(), |mapping| all.extend(rules.judge(mapping))).unwrap();
        all
    }

    #[test]
    fn each_kind_of_mapping_has_its_reason() {
        const PLAIN: &str = "rw-p 0 00:00 0 ";
        for (rest, more, reason) in [
            (PLAIN, "VmFlags: rd wr lo dd", "locked (mlock)"),
            (PLAIN, "VmFlags: rd wr sl", "sealed (mseal)"),
            (PLAIN, "VmFlags: rd wr wf", "secret (MADV_WIPEONFORK)"),
            (PLAIN, "VmFlags: rd wr dd", "kept out of core dumps (MADV_DONTDUMP)"),
            (PLAIN, "VmFlags: rd wr um", "under a userfaultfd of the program's own"),
            (PLAIN, "ProtectionKey: 1\nVmFlags: rd wr", "under a protection key"),
            (PLAIN, "VmFlags: rd wr uw", "excluded (MADV_UNMERGEABLE), or pagefold cannot see its end"),
            ("r--p 0 00:00 0 ", "VmFlags: rd", "not both readable and writable"),
            ("rw-p 0 00:00 0 [heap]", "VmFlags: rd wr", "the end of the heap, which comes and goes"),
            ("rw-p 0 00:00 0 [stack]", "VmFlags: rd wr gd", "main stack"),
            ("r-xp 0 00:00 0 [vdso]", "VmFlags: rd ex", OF_KERNEL),
        ] {
            assert_eq!(judged(RULES, rest, more), [(reason, Held::Unmanaged)], "{rest} {more}");
        }
        let plain = |rules| judged(rules, PLAIN, "VmFlags: rd wr")[0].0;
        assert_eq!(plain(Rules { all: false, ..RULES }), "not marked (MADV_MERGEABLE)");
        assert_eq!(plain(Rules { is_full: true, ..RULES }), "more ranges than can be managed");
        assert_eq!(plain(Rules { is_new: true, ..RULES }), "new, not looked at yet");
    }

    #[test]
    fn shared_memory_and_files_are_told_apart_and_pagefold_is_left_out() {
        let judged = |rest: &str, more: &str| judged(RULES, rest, more);
        let shared = "VmFlags: rd wr sh";
        for name in ["/dev/zero (deleted)", "/memfd:java_heap", "/dev/shm/a", "/SYSV00000000"] {
            assert_eq!(judged(&format!("rw-s 0 00:01 7 {name}"), shared), [("shared memory", Held::Known(8192))]);
        }
        assert_eq!(judged("rw-s 0 fe:00 7 /a", shared), [(FILE_PAGES, Held::Known(8192))]);
        let both = [(FILE_PAGES, Held::Known(4096)), (FILE_COPIES, Held::Known(4096))];
        assert_eq!(judged("rw-p 0 fe:00 7 /lib/libc.so.6", "VmFlags: rd wr"), both);
        let marked = judged("rw-p 0 fe:00 7 /snapshot", "VmFlags: rd wr mg");
        assert_eq!(marked, [(FILE_PAGES, Held::Known(4096)), (KSM_COPIES, Held::Known(4096))]);
        let huge = judged("rw-p 0 00:0e 7 /anon_hugepage", "Private_Hugetlb: 2048 kB\nVmFlags: rd ht");
        assert_eq!(huge, [("huge TLB pages", Held::Known(2 << 20))]);
        assert!(judged("rw-p 0 00:01 7 /memfd:pagefold-pool:1:x (deleted)", "VmFlags: rd wr uw").is_empty());
    }

    #[test]
    fn parts_outside_of_ranges_are_what_is_left() {
        let range = |start, end| Range { start, end };
        let ranges = [range(10, 20), range(30, 40), range(40, 50)];
        for (whole, parts) in [
            (range(0, 5), vec![range(0, 5)]),
            (range(12, 18), vec![]),
            (range(0, 60), vec![range(0, 10), range(20, 30), range(50, 60)]),
            (range(15, 35), vec![range(20, 30)]),
            (range(30, 50), vec![]),
            (range(45, 70), vec![range(50, 70)]),
        ] {
            assert_eq!(without(whole, &ranges), parts, "{whole:?}");
        }
    }

    #[test]
    fn of_a_mapping_that_is_managed_in_part_the_rest_counts() {
        let memory = pagefold_os::mem::Mapping::anonymous(1 << 20).unwrap();
        let half = Range { start: memory.addr(), end: memory.addr() + (1 << 19) };
        // Also, other tests have no mapping of such pages that the kernel would join with this one.
        // SAFETY: the advice leaves the bytes as they are.
        unsafe { pagefold_os::mem::advise(memory.addr(), 1 << 20, libc::MADV_NOHUGEPAGE) }.unwrap();
        for page in (0..3).chain(128..133) {
            // SAFETY: memory of this test.
            unsafe { ((half.start + page * 4096) as *mut u8).write_volatile(1) };
        }
        let me = std::process::id() as i32;
        let look = |ranges: &[Range]| {
            let mut bytes = None;
            smaps::of_process(me, |mapping| {
                if mapping.map.range.contains(&half) {
                    bytes = Some(outside(me, &mut None, mapping, ranges).unwrap());
                }
            })
            .unwrap();
            bytes
        };
        assert_eq!(look(&[half]), Some(5 * 4096));
        assert_eq!(look(&[]), Some(8 * 4096));
        assert_eq!(look(&[Range { start: half.start, end: half.start + (1 << 20) }]), Some(0));
    }

    #[test]
    fn a_process_that_is_gone_is_an_error() {
        let gone = of_process(&SharedClient::of(-1), &Managed::default());
        assert_eq!(gone.unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
