//! Merged pages enter the page table before the program touches them: a thread that touches an unmapped one waits for the
//! agent.
//!
//! One fault maps all pages of the file in a window around it, if they are in memory, as pages of the pool are. So it is
//! enough to ask for one page of each window. The size of windows is a setting of the kernel that only root can read: the
//! agent finds out once whether they have the default size.

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
        // The last page of each window. Where the mapping starts inside a window, a request for the first page spills over
        // into the next window: there the first page is mapped then, and a request for it maps none of the others.
        at = ((at / WINDOW + 1) * WINDOW).min(mapping.end);
        read_in(Range { start: at - PAGE_SIZE as u64, end: at });
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
    let mut found = [pagemap::ScannedRange::default(); 64];
    let Ok((count, _)) = pagemap::scan(page_map, range, PRESENT, &mut found) else { return 0 };
    found.iter().take(count).map(|region| (region.end - region.start) / PAGE_SIZE as u64).sum()
}

/// Calls `each` with the number of each page of `range` that is in memory; of those that the kernel does not tell of it is
/// not called. Not by mincore(2): filters that let a service do all that services do, as systemd's `@system-service`, forbid
/// it.
pub(crate) fn each_present(range: Range, page_map: &Fd, mut each: impl FnMut(usize)) {
    let mut found = [pagemap::ScannedRange::default(); 32];
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A page that is left out costs the program a wait, and a core file or a debugger the page.
    #[test]
    fn every_page_is_mapped_wherever_in_a_window_the_mapping_starts() {
        const PAGES: u64 = 64;
        let file = pagefold_os::memfd::create(c"windows", PAGES * PAGE_SIZE as u64).unwrap();
        let len = PAGES as usize * PAGE_SIZE;
        let shared = mem::Mapping::file(file.raw(), 0, len, mem::READ_WRITE, libc::MAP_SHARED).unwrap();
        for page in 0..PAGES as usize {
            // SAFETY: inside the mapping just made.
            unsafe { shared.as_ptr().add(page * PAGE_SIZE).write(1) };
        }
        let page_map = Fd::open(c"/proc/self/pagemap", libc::O_RDONLY, 0).unwrap();
        let place = mem::Mapping::anonymous(len + 2 * WINDOW as usize).unwrap();
        let aligned = place.addr().next_multiple_of(WINDOW);
        let map = |start: u64| {
            let flags = libc::MAP_PRIVATE | libc::MAP_FIXED;
            // SAFETY: the range lies in `place`, which is this test's alone and long enough for every start.
            let at = unsafe { libc::mmap(start as *mut libc::c_void, len, mem::READ_WRITE, flags, file.raw(), 0) };
            assert_eq!(at as u64, start, "mmap");
            Range::pages_from(start, PAGES)
        };
        WINDOWS.store(LARGE, Ordering::Relaxed);
        populate(map(aligned), &page_map);
        if pages_there(Range::pages_from(aligned, PAGES), &page_map) < PAGES {
            return eprintln!("SKIPPED: one fault brings in less than 64 KiB here (fault_around_bytes)");
        }
        for offset in 0..WINDOW / PAGE_SIZE as u64 {
            let mapping = map(aligned + offset * PAGE_SIZE as u64);
            populate(mapping, &page_map);
            assert_eq!(pages_there(mapping, &page_map), PAGES, "the mapping starts at page {offset} of a window");
        }
    }
}
