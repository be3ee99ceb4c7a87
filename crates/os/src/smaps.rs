//! /proc/PID/smaps: mappings with the memory that they hold, and what the program said about them.

use crate::maps::{self, Map};
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

/// Calls `f` with each mapping that `smaps` describes.
///
/// # Errors
/// The first error of reading.
pub fn parse(mut smaps: impl Read, mut f: impl FnMut(&SmapsEntry<'_>)) -> io::Result<()> {
    // The first line of a mapping, kept until its last line is read.
    let mut first = Vec::new();
    let mut amounts = Amounts::default();
    let mut buffer = vec![0; 64 << 10];
    maps::for_each_line(
        &mut buffer,
        |out| smaps.read(out),
        |line| {
            if maps::parse_line(line).is_some() {
                first.clear();
                first.extend_from_slice(line);
                amounts = Amounts::default();
                return;
            }
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
                    if let Some(map) = maps::parse_line(&first) {
                        let Amounts { resident, anonymous, swapped, huge_tlb, keyed } = amounts;
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
        let text = "10000-12000 rw-p 00000000 00:00 0 \nRss: 8 kB\nAnonymous: 4 kB\nSwap: 12 kB\nProtectionKey: 3\n\
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
