//! What protecting by a query does on this kernel.

use pagefold_os::fd::Fd;
use pagefold_os::mem::Mapping;
use pagefold_os::pagemap::{self, Query, ScannedRange};
use pagefold_os::uffd::{self, Uffd};
use pagefold_os::{PAGE_SIZE, Range};

const PAGES: usize = 8;

fn written(pagemap: &Fd, range: Range) -> Vec<usize> {
    let query = Query { all_of: pagemap::WRITTEN, report: pagemap::WRITTEN, ..Query::default() };
    let mut out = [ScannedRange::default(); PAGES];
    let (count, _) = pagemap::scan(pagemap, range, query, &mut out).expect("a scan");
    let pages = out[..count].iter().flat_map(|range| (range.start..range.end).step_by(PAGE_SIZE));
    pages.map(|addr| ((addr - range.start) / PAGE_SIZE as u64) as usize).collect()
}

/// A private copy in a file's mapping must stay "written", or no later scan would find it.
#[test]
fn only_pages_that_match_are_protected() {
    let device = Fd::open(c"/dev/userfaultfd", libc::O_RDWR | libc::O_CLOEXEC, 0).ok();
    let features = uffd::FEATURE_PAGEFAULT_FLAG_WP | uffd::FEATURE_WP_ASYNC | uffd::FEATURE_WP_HUGETLBFS_SHMEM;
    let uffd = match Uffd::new(device.as_ref(), features) {
        Ok(uffd) => uffd,
        Err(errno) => return println!("SKIPPED: userfaultfd is not to be had: {errno}"),
    };
    // SAFETY: a name and flags.
    let file = unsafe { libc::memfd_create(c"pages".as_ptr(), libc::MFD_CLOEXEC) };
    // SAFETY: just made, ours.
    let file = unsafe { Fd::from_raw(file) };
    for page in 0..PAGES {
        assert_eq!(file.write(&[page as u8 + 1; PAGE_SIZE]), Ok(PAGE_SIZE));
    }
    let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_POPULATE);
    let memory = Mapping::file(file.raw(), 0, PAGES * PAGE_SIZE, prot, flags).expect("a mapping");
    // Readable, not copied: a populated private writable mapping has copies of everything.
    // SAFETY: our own mapping, of a file that has these bytes.
    unsafe { pagefold_os::mem::advise(memory.addr(), (PAGES * PAGE_SIZE) as u64, libc::MADV_DONTNEED) }
        .expect("dropped");
    for page in 0..PAGES {
        // SAFETY: inside the mapping.
        assert_eq!(unsafe { memory.as_ptr().add(page * PAGE_SIZE).read_volatile() }, page as u8 + 1);
    }
    let range = Range::pages_from(memory.addr(), PAGES as u64);
    uffd.register(range, uffd::MODE_WP).expect("watched");
    let write = |page: usize| {
        // SAFETY: inside the mapping, which is private and writable.
        unsafe { memory.as_ptr().add(page * PAGE_SIZE).write_volatile(0) };
    };
    write(3);
    write(6);
    let pagemap = Fd::open(c"/proc/self/pagemap", libc::O_RDONLY | libc::O_CLOEXEC, 0).expect("pagemap");
    let query = Query { all_of: pagemap::MERGED, flags: pagemap::PROTECT, ..Query::default() };
    pagemap::protect(&pagemap, range, query).expect("protected");
    assert_eq!(written(&pagemap, range), [3, 6], "private copies are not the file's pages");
    write(0);
    assert_eq!(written(&pagemap, range), [0, 3, 6], "a write to a protected page is seen");
}
