//! What the agent manages of a program when it does not see the program's calls: long extents, as the [kernel](smaps) tells
//! of them.

use crate::address_space::smaps;
use crate::range_attributes::{Attributes, RangeAttributes};
use pagefold_os::Range;
use pagefold_os::raw::Result;
use pagefold_protocol::message::ALL_MIN;

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

/// Brings `table` up to what the kernel says about plain memory: all extents that are long enough are managed, but for what
/// their flags exclude.
///
/// # Errors
/// As reading /proc/thread-self/smaps.
pub(crate) fn refresh(table: &mut RangeAttributes) -> Result<()> {
    let mut extent = Extent { range: Range { start: 0, end: 0 }, is_kept: true };
    let mut behind = 0;
    smaps::for_each(|mapping| {
        // What was noted of a mapping that is gone says nothing about what comes there later.
        table.forget(Range { start: behind, end: mapping.range.start.max(behind) });
        behind = mapping.range.end;
        if !mapping.is_plain && !mapping.is_pool {
            if mapping.is_private_file {
                table.change(mapping.range, |note| *note = with_handed(mapping.said, note.handed));
            } else {
                table.forget(mapping.range);
            }
            return extent.end(table, Range { start: behind, end: behind });
        }
        if mapping.range.start == extent.range.end {
            extent.range.end = behind;
        } else {
            extent.end(table, mapping.range);
        }
        let (said, is_pool) = (mapping.said, mapping.is_pool);
        extent.is_kept |= is_pool || said.mergeable;
        // A mapping of the pool's never has what plain memory there had.
        table.change(mapping.range, |note| {
            let small = said.small || is_pool && note.small;
            *note = Attributes { seen: true, small, ..with_handed(said, note.handed) };
        });
    })?;
    table.forget(Range { start: behind, end: u64::MAX });
    extent.end(table, Range { start: behind, end: behind });
    Ok(())
}

/// What the kernel says, of memory that the agent `handed` to KSM or did not: the mark is the agent's where it did.
fn with_handed(said: Attributes, handed: bool) -> Attributes {
    Attributes { handed, mergeable: said.mergeable && !handed, ..said }
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
        // SAFETY: the page lies in `whole`, the test's memory; each advice cuts the mapping and changes no bytes.
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
