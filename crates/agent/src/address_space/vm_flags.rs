//! What the kernel says about the program's mappings: nothing else tells an agent that was not there when the program said it.
//!
//! The list of mappings names no advice, locks or keys; /proc/PID/smaps does, in its line `VmFlags`.

use crate::address_space::maps::POOL_NAME;
use crate::limits::ALL_MIN;
use crate::range_attributes::{Attributes, RangeAttributes};
use pagefold_os::fd::Fd;
use pagefold_os::raw::Result;
use pagefold_os::{Range, maps};

/// Neighbouring mappings of plain or merged memory: merging makes many small mappings of one that was large.
struct Extent {
    range: Range,
    /// It is managed whatever its length: some of it is merged, or marked by the program.
    is_kept: bool,
}

impl Extent {
    /// Begins the next one, and forgets what was noted of this one if it is too short.
    fn end(&mut self, table: &mut RangeAttributes, next: Range) {
        if !self.is_kept && self.range.len() < ALL_MIN {
            table.forget(self.range);
        }
        *self = Extent { range: next, is_kept: false };
    }
}

/// Brings `table` up to what the kernel says about plain memory: all extents that are long enough are managed, but for what their
/// flags exclude.
///
/// # Errors
/// As reading /proc/thread-self/smaps.
pub(crate) fn refresh(table: &mut RangeAttributes) -> Result<()> {
    let smaps = Fd::open(c"/proc/thread-self/smaps", libc::O_RDONLY, 0)?;
    let mut buffer = [0u8; 16 << 10];
    let mut current: Option<Range> = None;
    let mut extent = Extent { range: Range { start: 0, end: 0 }, is_kept: true };
    let (mut behind, mut is_pool, mut is_keyed) = (0, false, false);
    let mut at = 0;
    maps::for_each_line(
        &mut buffer,
        |out| smaps.read_at(out, at).inspect(|got| at += *got as u64),
        |line| {
            if let Some(map) = maps::parse_line(line) {
                // What was noted of a mapping that is gone says nothing about what comes there later.
                table.forget(Range { start: behind, end: map.range.start.max(behind) });
                behind = map.range.end;
                is_keyed = false;
                is_pool = map.name.starts_with(POOL_NAME) && !map.shared;
                let is_ours = is_pool || map.is_plain_anonymous();
                current = is_ours.then_some(map.range);
                if !is_ours {
                    table.forget(map.range);
                    extent.end(table, Range { start: behind, end: behind });
                } else if map.range.start == extent.range.end {
                    extent.range.end = behind;
                } else {
                    extent.end(table, map.range);
                }
                extent.is_kept |= is_pool;
            } else if let Some(key) = line.strip_prefix(b"ProtectionKey:") {
                is_keyed = key.trim_ascii() != b"0";
            } else if let (Some(flags), Some(range)) = (line.strip_prefix(b"VmFlags:"), current) {
                let noted = Attributes { keyed: is_keyed, ..of_flags(flags) };
                extent.is_kept |= noted.mergeable;
                // A mapping of the pool's never has what plain memory there had.
                table.change(range, |note| *note = Attributes { small: noted.small || is_pool && note.small, ..noted });
            }
        },
    )?;
    table.forget(Range { start: behind, end: u64::MAX });
    extent.end(table, Range { start: behind, end: behind });
    Ok(())
}

/// What the line `VmFlags` says.
fn of_flags(flags: &[u8]) -> Attributes {
    let has = |name: &[u8; 2]| flags.split(|byte| *byte == b' ').any(|flag| flag == name);
    Attributes {
        seen: true,
        locked: has(b"lo"),
        sealed: has(b"sl"),
        dont_fork: has(b"dc"),
        wipe_on_fork: has(b"wf"),
        huge: has(b"hg"),
        small: has(b"nh"),
        mergeable: has(b"mg"),
        dont_dump: has(b"dd"),
        // Stacks grow; device memory and special mappings are none of ours.
        excluded: has(b"gd") || has(b"io") || has(b"pf") || has(b"mm") || has(b"ht"),
        ..Attributes::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_os::mem;

    /// Merging cuts a mapping into pieces, which stay managed, however small: together they are as large as before.
    #[test]
    fn pieces_of_large_memory_are_managed() {
        let mut table = Box::new(RangeAttributes::new());
        let page = pagefold_os::PAGE_SIZE as u64;
        let whole = mem::Mapping::anonymous((ALL_MIN + 2 * page) as usize).unwrap();
        let short = mem::Mapping::anonymous(ALL_MIN as usize / 2).unwrap();
        let marked = mem::Mapping::anonymous(ALL_MIN as usize / 2).unwrap();
        for map in [&whole, &short, &marked] {
            // Neighbours with other rights: the kernel joins nothing with them.
            let at = map.addr();
            // SAFETY: memory of the test; the first and last page are not touched again.
            unsafe {
                libc::mprotect(at as *mut _, page as usize, libc::PROT_NONE);
                libc::mprotect((at + map.len() as u64 - page) as *mut _, page as usize, libc::PROT_NONE);
            }
        }
        // SAFETY: the advice leaves memory of the test as it is.
        unsafe { mem::advise(marked.addr(), marked.len() as u64, libc::MADV_MERGEABLE) }.unwrap();
        let middle = |map: &mem::Mapping| map.addr() + map.len() as u64 / 2;
        // SAFETY: as above; each advice cuts the mapping.
        unsafe { mem::advise(middle(&whole), page, libc::MADV_DONTDUMP) }.unwrap();
        refresh(&mut table).unwrap();
        assert!(table.at(whole.addr() + 2 * page).seen && table.at(middle(&whole)).dont_dump);
        assert!(table.at(middle(&marked)).mergeable && !table.at(middle(&short)).seen);
    }

    #[test]
    fn large_plain_memory_is_managed_but_for_what_its_flags_exclude() {
        let mut table = Box::new(RangeAttributes::new());
        // Apart from each other, so that the kernel joins none of them.
        let maps: Vec<_> = (0..4).map(|_| mem::Mapping::anonymous(3 << 20).unwrap()).collect();
        let advise = |map: &mem::Mapping, advice| {
            // SAFETY: memory of the test, which the advice leaves as it is.
            unsafe { mem::advise(map.addr(), map.len() as u64, advice) }.unwrap();
        };
        advise(&maps[1], libc::MADV_DONTDUMP);
        advise(&maps[2], libc::MADV_DONTFORK);
        advise(&maps[3], libc::MADV_WIPEONFORK);
        for _ in 0..2 {
            refresh(&mut table).unwrap();
            let at = |map: &mem::Mapping| table.at(map.addr() + (1 << 20));
            assert!(at(&maps[0]).seen && !at(&maps[0]).is_excluded(), "{:?}", at(&maps[0]));
            assert!(at(&maps[1]).dont_dump && at(&maps[2]).dont_fork && at(&maps[3]).is_excluded());
        }
    }
}
