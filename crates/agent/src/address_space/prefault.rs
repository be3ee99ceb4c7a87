//! Merged pages enter the page table before the program touches them: a thread that touches an unmapped one waits for the agent.
//!
//! One fault maps all pages of the file in a window around it, if they are in memory, as pages of the pool are. So it is enough
//! to ask for one page of each window. The size of windows is a setting of the kernel that only root can read: the agent finds
//! out once whether they have the default size.

use core::sync::atomic::{AtomicU8, Ordering};
use pagefold_os::fd::Fd;
use pagefold_os::pagemap::{self, Query};
use pagefold_os::{PAGE_SIZE, Range, mem};

/// What one fault brings in, by default: aligned to its own length.
const WINDOW: u64 = 64 << 10;
/// Mappings at least this long are asked for by windows.
const LONG: u64 = 2 * WINDOW;

const UNKNOWN: u8 = 0;
const SMALL: u8 = 1;
const LARGE: u8 = 2;
/// Whether windows are as large as that.
static WINDOWS: AtomicU8 = AtomicU8::new(UNKNOWN);

/// True if [`populate`] is the quicker way for one mapping of this length.
pub(crate) fn is_long(mapping: Range) -> bool {
    mapping.len() >= LONG && WINDOWS.load(Ordering::Relaxed) != SMALL
}

/// Has the pages of one mapping of a pool file in the page table, as far as they are in memory.
pub(crate) fn populate(mapping: Range, page_map: &Fd) {
    let mut at = mapping.start;
    while at < mapping.end {
        read_in(Range::pages_from(at, 1));
        at = (at / WINDOW + 1) * WINDOW;
    }
    if WINDOWS.load(Ordering::Relaxed) == UNKNOWN {
        let there = pages_there(mapping, page_map);
        if there == mapping.pages() {
            WINDOWS.store(LARGE, Ordering::Relaxed);
        } else {
            // A page that is locked at this moment is left out, and tells nothing about the size.
            if there < mapping.pages() / 2 {
                WINDOWS.store(SMALL, Ordering::Relaxed);
            }
            read_in(mapping);
        }
    }
}

/// Has all pages of `range` in the page table, whatever mappings lie there.
pub(crate) fn read_in(range: Range) {
    // SAFETY: reads pages in, changes nothing; where the program has taken its rights away meanwhile it is an error.
    let _ = unsafe { mem::advise(range.start, range.len(), libc::MADV_POPULATE_READ) };
}

const PRESENT: Query = Query { all_of: pagemap::PRESENT, report: pagemap::PRESENT, any_of: 0, inverted: 0, flags: 0 };

fn pages_there(range: Range, page_map: &Fd) -> u64 {
    let mut found = [pagemap::Region::default(); 64];
    let Ok((count, _)) = pagemap::scan(page_map, range, PRESENT, &mut found) else { return 0 };
    found.iter().take(count).map(|region| (region.end - region.start) / PAGE_SIZE as u64).sum()
}

/// Calls `each` with the number of each page of `range` that is in memory; of those that the kernel does not tell of it is not
/// called. Not by mincore(2): filters that let a service do all that services do, as systemd's `@system-service`, forbid it.
pub(crate) fn each_present(range: Range, page_map: &Fd, mut each: impl FnMut(usize)) {
    let mut found = [pagemap::Region::default(); 32];
    let mut start = range.start;
    while start < range.end {
        let Ok((count, walked)) = pagemap::scan(page_map, Range { start, ..range }, PRESENT, &mut found) else {
            return;
        };
        for region in found.iter().take(count) {
            let number = |addr: u64| ((addr - range.start) / PAGE_SIZE as u64) as usize;
            (number(region.start)..number(region.end)).for_each(&mut each);
        }
        if walked <= start {
            return;
        }
        start = walked;
    }
}
