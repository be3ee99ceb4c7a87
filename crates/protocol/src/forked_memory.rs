//! The memory of a child that a program forked while it was merged: it shows the pool as its parent does, and no agent is in
//! it.
//!
//! The kernel hands over a userfaultfd for the child's memory before the child runs. By it the child's discards of merged
//! memory are answered from outside: what was discarded reads zero, and what is merely not mapped is the slot again. The
//! agent of the parent, or the daemon, owns the descriptor for as long as the child lives. Once it is closed, a discard
//! shows old bytes.

use pagefold_os::raw::Errno;
use pagefold_os::uffd::{Event, Uffd};
use pagefold_os::{PAGE_SIZE, Page, Range};

const PAGE: u64 = PAGE_SIZE as u64;

/// Ranges that are told apart at most.
const RANGES_MAX: usize = 1024;
/// How often a page is tried while a discard is under way.
const TRIES_MAX: usize = 1000;

static ZEROS: Page = [0; PAGE_SIZE];

/// The memory of one forked child.
#[derive(Debug)]
pub struct ForkedMemory {
    uffd: Uffd,
    /// Disjoint, in any order: what the child discarded, and what its parent had.
    discarded: [Range; RANGES_MAX],
    len: usize,
}

impl ForkedMemory {
    /// The child's memory behind `uffd`, where nothing is discarded or all that was is filled.
    pub const fn new(uffd: Uffd) -> ForkedMemory {
        ForkedMemory { uffd, discarded: [Range { start: 0, end: 0 }; RANGES_MAX], len: 0 }
    }

    /// The descriptor, to be waited for.
    pub const fn uffd(&self) -> &Uffd {
        &self.uffd
    }

    /// Answers what waits; `forked` gets the descriptor of a child of the child, whose memory is filled.
    ///
    /// Where no further range can be told apart nothing more is read: the child waits rather than read old bytes.
    pub fn serve(&mut self, mut forked: impl FnMut(Uffd)) {
        while self.len + 2 < RANGES_MAX {
            let Ok(Some(event)) = self.uffd.read_event_at_once() else { return };
            match event {
                Event::Remove(range) => {
                    self.add(range);
                    let _ = self.uffd.wake(range);
                }
                Event::Remap { from, to } => {
                    // What was discarded moved along; an empty mapping that is left behind reads zero.
                    for index in 0..self.len {
                        let part = self.discarded[index].intersection(&from);
                        if !part.is_empty() {
                            let start = to + (part.start - from.start);
                            self.add(Range { start, end: start + part.len() });
                        }
                    }
                    self.add(from);
                }
                Event::PageFault { addr, .. } => self.answer(Range::pages_from(addr & !(PAGE - 1), 1)),
                Event::Fork(fd) => {
                    // SAFETY: the kernel made the descriptor for the reader of this event, and it is wrapped once.
                    let child = Uffd::from_fd(unsafe { pagefold_os::fd::Fd::from_raw(fd) });
                    self.discarded[..self.len].iter().for_each(|range| fill(&child, *range));
                    forked(child);
                }
                Event::Unmap(_) | Event::Other(_) => {}
            }
        }
    }

    fn add(&mut self, range: Range) {
        for known in &mut self.discarded[..self.len] {
            if known.start <= range.end && range.start <= known.end {
                *known = Range { start: known.start.min(range.start), end: known.end.max(range.end) };
                return;
            }
        }
        // `serve` keeps places free: one for each range that an event may add, joined ranges aside.
        if let Some(place) = self.discarded.get_mut(self.len) {
            *place = range;
            self.len += 1;
        }
    }

    fn answer(&self, page: Range) {
        let is_discarded = self.discarded[..self.len].iter().any(|range| range.overlaps(&page));
        // Whatever the kernel says (mapped already, another mapping by now, a discard under way), the access tries again.
        let is_plain = !is_discarded && self.uffd.map_cached(page, 0).1 == Some(Errno(libc::EINVAL));
        if is_discarded || is_plain {
            let _ = fill_page(&self.uffd, page);
        }
        let _ = self.uffd.wake(page);
    }
}

/// Puts zeros wherever nothing is in `range` of the memory behind `uffd`.
pub fn fill(uffd: &Uffd, range: Range) {
    let (mut at, mut tries) = (range.start, 0);
    while at < range.end {
        let (done, error) = uffd.zero(Range { start: at, end: range.end }, 0);
        at += done;
        if error.is_some() {
            let error = fill_page(uffd, Range::pages_from(at, 1));
            match error {
                Some(Errno(libc::EAGAIN | libc::ENOMEM)) if tries < TRIES_MAX => tries += 1,
                _ => at += PAGE,
            }
        }
    }
}

/// Puts zeros into one page if nothing is there, and says why it could not.
pub fn fill_page(uffd: &Uffd, page: Range) -> Option<Errno> {
    match uffd.zero(page, 0).1 {
        // Perhaps only the mark of write protection, which a discard leaves and a copy replaces.
        Some(Errno(libc::EEXIST)) => {
            // SAFETY: reads a page of this module's, and writes only where the kernel finds nothing.
            unsafe { uffd.copy(page.start, (&raw const ZEROS) as u64, PAGE, 0) }.1
        }
        error => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_os::fd::Fd;
    use pagefold_os::{mem, memfd, uffd};

    /// A mapping of a file, as merged memory is, behind a descriptor of this process.
    fn merged(pages: usize) -> Option<(ForkedMemory, mem::Mapping)> {
        let features = uffd::FEATURE_EVENT_REMOVE
            | uffd::FEATURE_MISSING_SHMEM
            | uffd::FEATURE_MINOR_SHMEM
            | uffd::FEATURE_EVENT_REMAP
            | uffd::FEATURE_WP_ASYNC
            | uffd::FEATURE_PAGEFAULT_FLAG_WP
            | uffd::FEATURE_WP_HUGETLBFS_SHMEM;
        let uffd = Uffd::new(uffd::open_device().ok().as_ref(), features).ok()?;
        let file = memfd::create(c"pagefold-pool", (pages * PAGE_SIZE) as u64).unwrap();
        (0..pages).for_each(|page| assert_eq!(file.write(&[1 + page as u8; PAGE_SIZE]), Ok(PAGE_SIZE)));
        let map = mem::Mapping::file(file.raw(), 0, pages * PAGE_SIZE, mem::READ_WRITE, libc::MAP_PRIVATE).unwrap();
        let range = Range::pages_from(map.addr(), pages as u64);
        // SAFETY: reads pages in.
        unsafe { mem::advise(range.start, range.len(), libc::MADV_POPULATE_READ) }.unwrap();
        uffd.register(range, uffd::MODE_MISSING | uffd::MODE_MINOR | uffd::MODE_WP).unwrap();
        // As the agent leaves it: a discard keeps the mark.
        uffd.write_protect(range).unwrap();
        Some((ForkedMemory::new(uffd), map))
    }

    #[test]
    fn what_a_child_discards_reads_zero_and_all_else_the_slot() {
        let Some((mut memory, map)) = merged(8) else { return std::eprintln!("SKIPPED: needs a userfaultfd") };
        let start = map.addr();
        let program = std::thread::spawn(move || {
            let read = |page: u64| {
                // SAFETY: a page of the mapping, which lives until this thread has ended.
                unsafe { ((start + page * PAGE) as *const u8).read_volatile() }
            };
            assert_eq!(read(0), 1);
            for _ in 0..100 {
                // SAFETY: discards pages of the mapping, to which no reference exists.
                unsafe { mem::advise(start + 2 * PAGE, 3 * PAGE, libc::MADV_DONTNEED) }.unwrap();
                assert_eq!([1, 2, 3, 4, 5].map(read), [2, 0, 0, 0, 6]);
                // SAFETY: a page of the mapping; the write gives the process a page of its own.
                unsafe { ((start + 2 * PAGE) as *mut u8).write_volatile(77) };
                assert_eq!(read(2), 77);
            }
        });
        while !program.is_finished() {
            let fd = memory.uffd().fd().raw();
            let _ = pagefold_os::fd::poll(&mut [libc::pollfd { fd, events: libc::POLLIN, revents: 0 }], 5);
            memory.serve(|_| unreachable!("nothing forks"));
        }
        program.join().unwrap();
        drop(map);
    }

    #[test]
    fn ranges_that_touch_take_one_place() {
        let null = Fd::open(c"/dev/null", libc::O_RDWR, 0).unwrap();
        let mut memory = ForkedMemory::new(Uffd::from_fd(null));
        (0..4 * RANGES_MAX as u64).for_each(|page| memory.add(Range::pages_from(page * PAGE, 1)));
        assert_eq!((memory.len, memory.discarded[0]), (1, Range::pages_from(0, 4 * RANGES_MAX as u64)));
    }
}
