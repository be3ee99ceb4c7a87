//! /proc/PID/smaps: mappings with the memory that they hold, and what the program said about them.

use crate::maps::{self, Line, Map};
use std::fs::File;
use std::io::{self, Read};

/// A mapping. Amounts are in bytes.
#[derive(Debug)]
pub struct SmapsEntry<'a> {
    /// What /proc/PID/maps says too.
    pub map: Map<'a>,
    /// In memory, pages of hugetlbfs excepted.
    pub resident: u64,
    /// Of that: the process's own, no file's.
    pub anonymous: u64,
    /// In swap.
    pub swapped: u64,
    /// In memory, pages of hugetlbfs.
    pub huge_tlb: u64,
    /// Its protection key is not 0.
    pub keyed: bool,
    /// The two-letter words of proc_pid_smaps(5).
    pub flags: &'a str,
}

impl SmapsEntry<'_> {
    /// True if `flag` is among the flags.
    pub fn has(&self, flag: &str) -> bool {
        self.flags.split_ascii_whitespace().any(|word| word == flag)
    }
}

/// Amounts of a mapping, until its last line is read.
#[derive(Default)]
struct Amounts {
    resident: u64,
    anonymous: u64,
    swapped: u64,
    huge_tlb: u64,
    keyed: bool,
}

/// Calls `f` with each mapping that `smaps` describes. Of one that the kernel tells a second time, since it grew meanwhile,
/// that is the rest, with at most as many bytes as it has room for.
///
/// # Errors
/// The first error of reading.
pub fn parse(mut smaps: impl Read, mut f: impl FnMut(&SmapsEntry<'_>)) -> io::Result<()> {
    // The mapping, until its last line is read. Its name is kept apart.
    let mut name = Vec::new();
    let mut mapping = None;
    let mut amounts = Amounts::default();
    let mut buffer = vec![0; 64 << 10];
    maps::for_each(
        &mut buffer,
        |out| smaps.read(out),
        |line| {
            let line = match line {
                Line::Mapping(map) => {
                    name.clear();
                    name.extend_from_slice(map.name);
                    mapping = Some(Map { name: &[], ..map });
                    amounts = Amounts::default();
                    return;
                }
                Line::Detail(line) => line,
            };
            let Some((key, value)) = std::str::from_utf8(line).ok().and_then(|line| line.split_once(':')) else {
                return;
            };
            let number = || value.split_whitespace().next().and_then(|number| number.parse::<u64>().ok()).unwrap_or(0);
            match key {
                "Rss" => amounts.resident = number() << 10,
                "Anonymous" => amounts.anonymous = number() << 10,
                "Swap" => amounts.swapped = number() << 10,
                "Private_Hugetlb" | "Shared_Hugetlb" => amounts.huge_tlb += number() << 10,
                "ProtectionKey" => amounts.keyed = number() != 0,
                "VmFlags" => {
                    if let Some(map) = mapping.take() {
                        let [resident, anonymous, swapped, huge_tlb] =
                            [amounts.resident, amounts.anonymous, amounts.swapped, amounts.huge_tlb]
                                .map(|bytes| bytes.min(map.range.len()));
                        let (map, keyed) = (Map { name: &name, ..map }, amounts.keyed);
                        f(&SmapsEntry { map, resident, anonymous, swapped, huge_tlb, keyed, flags: value });
                    }
                }
                _ => {}
            }
        },
    )
}

/// Calls `f` with each mapping of process `pid`.
///
/// # Errors
/// As reading /proc/PID/smaps: no such process, or no right to look.
pub fn of_process(pid: i32, f: impl FnMut(&SmapsEntry<'_>)) -> io::Result<()> {
    parse(File::open(format!("/proc/{pid}/smaps"))?, f)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::{self, Mapping as Memory};
    use crate::{PAGE_SIZE, Range};

    #[test]
    fn amounts_and_flags_belong_to_their_mapping() {
        let text = "10000-13000 rw-p 00000000 00:00 0 \nRss: 8 kB\nAnonymous: 4 kB\nSwap: 12 kB\nProtectionKey: 3\n\
                    VmFlags: rd wr lo \n\
                    20000-22000 rw-s 00000000 00:01 7  /a: b\nShared_Hugetlb: 4 kB\nPrivate_Hugetlb: 2 kB\nVmFlags: sh ht\n";
        let mut found = Vec::new();
        parse(text.as_bytes(), |one| {
            let amounts = [one.resident, one.anonymous, one.swapped, one.huge_tlb].map(|bytes| bytes >> 10);
            found.push((one.map.range.start, amounts, one.keyed, one.has("lo"), one.map.name.to_vec()));
        })
        .unwrap();
        let expected = [
            (0x10000, [8, 4, 12, 0], true, true, Vec::new()),
            (0x20000, [0, 0, 0, 6], false, false, b"/a: b".to_vec()),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn a_mapping_that_is_told_again_counts_once() {
        let amounts = |kib: u64| format!("Rss: {kib} kB\nAnonymous: {kib} kB\nSwap: 0 kB\nVmFlags: rd wr\n");
        let head = |end: u64| format!("10000-{end:x} rw-p 00000000 00:00 0 \n");
        let text = [head(0x14000), amounts(16), head(0x1b000), amounts(44), head(0x1a000), amounts(40)].concat();
        let mut found = Vec::new();
        parse(text.as_bytes(), |one| found.push((one.map.range, one.resident >> 10, one.anonymous >> 10))).unwrap();
        let range = |start, end| Range { start, end };
        assert_eq!(found, [(range(0x10000, 0x14000), 16, 16), (range(0x14000, 0x1b000), 28, 28)]);
    }

    #[test]
    fn mappings_that_split_and_join_meanwhile_never_overlap() {
        const CHUNKS: usize = 400;
        let memory = Memory::anonymous(2 * CHUNKS * PAGE_SIZE).unwrap();
        let at = |page: usize| memory.addr() + (page * PAGE_SIZE) as u64;
        let is_done = std::sync::atomic::AtomicBool::new(false);
        let (mut overlaps, mut failed) = (Vec::new(), Vec::new());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_done.load(std::sync::atomic::Ordering::Relaxed) {
                    // SAFETY: memory of this test, which nothing looks at.
                    unsafe {
                        for chunk in 0..CHUNKS {
                            mem::protect(at(2 * chunk), PAGE_SIZE as u64, libc::PROT_READ).unwrap();
                        }
                        mem::protect(at(0), (2 * CHUNKS * PAGE_SIZE) as u64, mem::READ_WRITE).unwrap();
                    }
                }
            });
            for _ in 0..300 {
                let mut end = 0;
                let looked = of_process(std::process::id() as i32, |one| {
                    if one.map.range.start < end {
                        overlaps.push((one.map.range, end));
                    }
                    end = one.map.range.end;
                });
                failed.extend(looked.err());
            }
            is_done.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        assert!(failed.is_empty() && overlaps.is_empty(), "{failed:?} {:x?}", overlaps.first());
    }

    #[test]
    fn memory_of_this_process_is_found() {
        const PAGES: u64 = 16;
        let memory = Memory::anonymous(PAGES as usize * PAGE_SIZE).unwrap();
        let own = Range::pages_from(memory.addr(), PAGES);
        // SAFETY: memory of this test.
        unsafe {
            mem::advise(own.start, own.len(), libc::MADV_DONTDUMP).unwrap();
            std::ptr::write_bytes(own.start as *mut u8, 1, 3 * PAGE_SIZE);
        }
        let mut found = Vec::new();
        of_process(std::process::id() as i32, |one| {
            if one.map.range == own {
                found.push((one.resident, one.anonymous, one.has("dd")));
            }
        })
        .unwrap();
        assert_eq!(found, [(3 * PAGE_SIZE as u64, 3 * PAGE_SIZE as u64, true)]);
        assert_eq!(of_process(-1, |_| {}).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
