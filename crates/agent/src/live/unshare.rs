//! Private memory in the place of pool mappings: for pages that were written, and for all pages when a program is unmerged.

use crate::address_space::anonymous::watch_anonymous;
use crate::address_space::discarded_ranges;
use crate::cold;
use crate::limits::{MOVE_TRIES, NURSERY_LEN};
use crate::live::events::HOLD_MODES;
use crate::live::session::Agent;
use crate::runtime::thread::yield_now;
use crate::state::ATTACHED;
use core::ffi::c_int;
use pagefold_os::fd::Fd;
use pagefold_os::page::is_zero;
use pagefold_os::pagemap::{self, Query};
use pagefold_os::raw::Errno;
use pagefold_os::uffd;
use pagefold_os::{PAGE_SIZE, Range, mem, sched};
use pagefold_protocol::message::FREEZE_PAGES_MAX;

const PAGE: u64 = PAGE_SIZE as u64;

/// Moves a mapping to just there.
const INTO: libc::c_int = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;

impl Agent {
    /// Replaces the pool mappings of `range` by private memory, for pages that were written and for shared ones.
    ///
    /// The pages are taken aside by one `mremap(2)` that leaves the (now empty) mapping in place, where accesses
    /// wait; their bytes are copied to fresh memory, and that is moved into place, again by one `mremap(2)`.
    ///
    /// Fresh memory comes from the *nursery*, one mapping, at the offset that the address has: what comes from neighbouring
    /// places of one mapping is one mapping again where it arrives. Otherwise each range would remain one of its own.
    pub(crate) fn unshare(&mut self, range: Range) -> Result<(), Errno> {
        if range.is_empty() || range.pages() > FREEZE_PAGES_MAX as u64 || !range.start.is_multiple_of(PAGE) {
            return Err(Errno(libc::EINVAL));
        }
        let _held = self.lock_mappings();
        // The lock would go with the mapping; the pages are the program's own already.
        if self.keeps_mapping(range) {
            return Err(Errno(libc::EPERM));
        }
        let heap = self.heap.watch_end(range, &self.watch)?;
        let rights = self.rights_of_pool(range).ok_or(Errno(libc::EINVAL));
        let result = rights.and_then(|rights| self.replace_pool(range, rights));
        self.unwatch_heap(heap, range);
        let _ = self.quiet().wake(range);
        result
    }

    /// Registers the pool mappings of `range` with the descriptor that has them while they are unshared.
    fn register_quiet(&self, range: Range) -> Result<(), Errno> {
        if ATTACHED {
            // No thread of the program discards meanwhile. What it discarded before is filled: beyond here no page is
            // missing.
            discarded_ranges::for_each_in(range, |void| self.fill_absent(void));
            self.hold.unregister(range)?;
        }
        // The range has these modes, or fewer where a registration failed before. Asking for fewer would be `EBUSY`.
        self.quiet().register(range, HOLD_MODES)
    }

    /// The pool mappings of `range` stay.
    fn hold_again(&self, range: Range) {
        if ATTACHED {
            let _ = self.quiet().unregister(range);
        }
        self.hold_pool(range);
    }

    /// [`unshare`](Self::unshare) for one pool mapping with `rights`; the caller wakes the threads that wait there.
    fn replace_pool(&mut self, range: Range, rights: libc::c_int) -> Result<(), Errno> {
        let len = range.len();
        let frozen_at = sched::monotonic_ns();
        // Where is the kernel's choice: a place chosen here would be unmapped first, and stay so if the move is refused.
        const ASIDE: libc::c_int = libc::MREMAP_MAYMOVE | libc::MREMAP_DONTUNMAP;
        let moved = self.register_quiet(range).and_then(|()| {
            // SAFETY: the target is free; the source mapping stays in place, empty.
            unsafe { mem::remap(range.start, len, len, ASIDE, 0) }
        });
        let aside = match moved {
            Ok(aside) => aside,
            Err(errno) => {
                self.hold_again(range);
                if errno == Errno(libc::EPERM) {
                    self.note_sealed(range);
                }
                return Err(errno);
            }
        };
        // What comes from the nursery may be read and written, and executed if that is asked for.
        let usual = rights == mem::READ_WRITE;
        let kept = self.is_kept_from_copies(range);
        // What leaves the nursery has the attributes of the nursery.
        let may_be_nursery = (usual || rights == mem::READ_WRITE_EXECUTE) && !kept;
        let in_nursery = if may_be_nursery { self.copy_to_nursery(range, aside, rights) } else { None };
        // SAFETY: the fresh memory is ours; nothing is read or written there until it is the program's.
        let allow = |fresh: &mem::Mapping| usual || unsafe { mem::protect(fresh.addr(), len, rights) }.is_ok();
        let fresh = if in_nursery.is_some() { None } else { copy_of(aside, len).ok().filter(allow) };
        if let Some(fresh) = fresh.as_ref().filter(|_| kept) {
            self.keep_from_copies(Range::pages_from(fresh.addr(), range.pages()), range);
        }
        let (from, flags) = match in_nursery {
            // The nursery stays whole.
            Some(at) => (Some(at), INTO | libc::MREMAP_DONTUNMAP),
            None => (fresh.as_ref().map(mem::Mapping::addr), INTO),
        };
        // SAFETY: the target is the empty mapping we left; what appears there has the bytes that were there.
        let moved =
            from.ok_or(Errno(libc::ENOMEM)).and_then(|from| unsafe { mem::remap(from, len, len, flags, range.start) });
        let result = match moved {
            Ok(_) => {
                core::mem::forget(fresh);
                // SAFETY: the old mapping, to which no reference is left.
                let _ = unsafe { mem::unmap(aside, len) };
                self.keep_attributes(range, true);
                let _ = watch_anonymous(&self.watch, range);
                let _ = self.watch.write_protect(range);
                if ATTACHED {
                    discarded_ranges::remove(range);
                }
                Ok(())
            }
            Err(errno) => {
                // One mapping less: their number may be what is at its limit.
                drop(fresh);
                self.fault_in(range, aside);
                self.hold_again(range);
                if let Some(at) = in_nursery {
                    empty_nursery(at, len);
                }
                Err(errno)
            }
        };
        if let Some(at) = in_nursery.filter(|_| !usual) {
            self.end_rights_in_nursery(Range { start: at, end: at + len });
        }
        self.note_freeze(sched::monotonic_ns() - frozen_at);
        result
    }

    /// Gives `range` of the nursery, from which memory with other rights has moved, the rights of the rest.
    fn end_rights_in_nursery(&mut self, range: Range) {
        // SAFETY: memory of the agent's, which nothing uses now.
        if unsafe { mem::protect(range.start, range.len(), mem::READ_WRITE) }.is_err() {
            // What came from there would have rights that the program never gave.
            self.nursery = Some(None);
        }
    }

    /// Has what lies at `aside` in `range` again, where it was.
    fn fault_in(&self, range: Range, aside: u64) {
        let len = range.len();
        for _ in 0..MOVE_TRIES {
            // SAFETY: the old mapping with all its pages returns to where it was.
            if unsafe { mem::remap(aside, len, len, INTO, range.start) }.is_ok() {
                return;
            }
            // The empty mapping is there still, if the kernel did not get as far as to unmap it: it shows the slots, and
            // takes the program's own pages without a new mapping.
            if self.maps.pools(range, |_, _| true) == Ok(true) {
                break;
            }
            yield_now();
        }
        for offset in (0..len).step_by(PAGE_SIZE) {
            self.bring_page_back(range, range.start + offset, aside + offset);
        }
        // SAFETY: the bytes are where they belong, or that place is gone.
        let _ = unsafe { mem::unmap(aside, len) };
    }

    /// Copies the page at `from` to `to` in the empty mapping of `range`, if it is the program's own, and shows the slot
    /// else.
    fn bring_page_back(&self, range: Range, to: u64, from: u64) {
        let page = Range::pages_from(to, 1);
        // In memory or swap, and not the file's page.
        let own = pagemap::Query {
            all_of: pagemap::FILE,
            inverted: pagemap::FILE,
            any_of: pagemap::PRESENT | pagemap::SWAPPED,
            report: pagemap::PRESENT,
            ..Query::default()
        };
        let mut found = [pagemap::ScannedRange::default()];
        if matches!(pagemap::scan(&self.pagemap, Range::pages_from(from, 1), own, &mut found), Ok((0, _))) {
            let _ = self.quiet().map_cached(page, uffd::DONTWAKE);
            return;
        }
        loop {
            // SAFETY: the old mapping, which no other thread knows.
            let (_, error) = unsafe { self.quiet().copy(to, from, PAGE, uffd::DONTWAKE) };
            match error {
                // A discard is under way: its event must be read before anything is copied.
                Some(Errno(libc::EAGAIN)) => match self.quiet().read_event() {
                    // Threads that wait for this range are woken in the end, when the page is there.
                    Ok(Some(uffd::Event::PageFault { addr, .. })) if (range.start..range.end).contains(&addr) => {}
                    Ok(Some(event)) => self.serve_event(event),
                    _ => yield_now(),
                },
                Some(Errno(libc::ENOMEM)) => yield_now(),
                Some(Errno(libc::EFAULT)) => {
                    let _ = guard(to);
                    return;
                }
                // Done; or unmapped or discarded by a bare call: the page has no home any more.
                _ => return,
            }
        }
    }

    /// Copies the pages that lie aside to the place in the nursery that belongs to `range`, which has `rights` then; `None`
    /// if that cannot be had.
    fn copy_to_nursery(&mut self, range: Range, aside: u64, rights: c_int) -> Option<u64> {
        let offset = range.start % NURSERY_LEN;
        let at = self.nursery().filter(|_| offset + range.len() <= NURSERY_LEN)? + offset;
        let mut done = 0;
        while done < range.len() {
            // SAFETY: the old mapping lies aside, as long as `range`.
            let (copied, error) = unsafe { self.quiet().copy(at + done, aside + done, range.len() - done, 0) };
            done += copied;
            match error {
                None => {}
                Some(Errno(libc::EFAULT)) if guard(at + done).is_ok() => done += PAGE,
                Some(_) => {
                    if done > 0 {
                        empty_nursery(at, done);
                    }
                    return None;
                }
            }
        }
        // SAFETY: memory of the agent's, which nothing uses until it is the program's.
        if rights != mem::READ_WRITE && unsafe { mem::protect(at, range.len(), rights) }.is_err() {
            // Where the kernel has no room for more mappings it may have changed the first ones.
            self.end_rights_in_nursery(Range { start: at, end: at + range.len() });
            empty_nursery(at, range.len());
            return None;
        }
        Some(at)
    }
}

/// Fresh memory with the bytes of the `len` at `from`, and guards where the program has them.
///
/// # Errors
/// `ENOMEM` if a page can be neither read nor guarded, or is out (see [`cold`](crate::cold)); else the kernel's.
pub(crate) fn copy_of(from: u64, len: u64) -> Result<mem::Mapping, Errno> {
    // Through the kernel, which also reads what the program itself may not, but what is guarded.
    let memory = Fd::open(c"/proc/thread-self/mem", libc::O_RDONLY, 0)?;
    let fresh = mem::Mapping::anonymous(len as usize)?;
    let mut page = [0u8; PAGE_SIZE];
    'pages: for offset in (0..len).step_by(PAGE_SIZE) {
        let mut tries = 0;
        // This way of reading does not wait for a page that is out, nor for one of the pool's that the kernel took from
        // here.
        while memory.read_at(&mut page, from + offset) != Ok(PAGE_SIZE) {
            if cold::is_evicted(from + offset) || tries == MOVE_TRIES {
                return Err(Errno(libc::ENOMEM));
            }
            if !comes(from + offset)? {
                guard(fresh.addr() + offset).map_err(|_| Errno(libc::ENOMEM))?;
                continue 'pages;
            }
            tries += 1;
        }
        // SAFETY: the fresh memory is ours and as long.
        let to = unsafe { fresh.as_ptr().add(offset as usize) };
        if is_zero(&page) {
            // SAFETY: inside the fresh memory. The kernel then maps its zero page there, which takes no memory.
            unsafe { core::ptr::read_volatile(to) };
        } else {
            // SAFETY: inside the fresh memory, to which no reference exists.
            unsafe { core::ptr::copy_nonoverlapping(page.as_ptr(), to, PAGE_SIZE) };
        }
    }
    Ok(fresh)
}

/// Waits for the page at `addr` as an access of the program's does; false if that is a fault.
///
/// # Errors
/// `ENOMEM` if there is no memory for it.
fn comes(addr: u64) -> Result<bool, Errno> {
    // SAFETY: reads the page in, changes nothing.
    match unsafe { mem::advise(addr, PAGE, libc::MADV_POPULATE_READ) } {
        Ok(()) => Ok(true),
        Err(Errno(libc::ENOMEM | libc::EAGAIN | libc::EINTR)) => Err(Errno(libc::ENOMEM)),
        Err(_) => Ok(false),
    }
}

/// Makes an access to the page at `addr`, which is ours, a fault, as the program did where its bytes would come from.
fn guard(addr: u64) -> Result<(), Errno> {
    // SAFETY: the page is the agent's or the program's empty mapping; no reference to it exists.
    unsafe { mem::advise(addr, PAGE, mem::MADV_GUARD_INSTALL) }
}

/// Takes pages out of the nursery. A discard there would wait for ourselves to read that it happened.
fn empty_nursery(at: u64, len: u64) {
    if let Ok(target) = mem::Mapping::anonymous(len as usize) {
        // SAFETY: both are ours; what arrives goes with the target.
        let _ = unsafe { mem::remap(at, len, len, INTO | libc::MREMAP_DONTUNMAP, target.addr()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::Ordering;
    use pagefold_os::uffd::Uffd;

    /// A page of a file that the kernel took from the page table, so that an access to it waits for an answer.
    #[test]
    fn a_copy_waits_for_pages_that_are_not_mapped() {
        let features = uffd::FEATURE_MINOR_SHMEM | uffd::FEATURE_MISSING_SHMEM;
        let device = uffd::open_device().ok();
        let Ok(hold) = Uffd::new(device.as_ref(), features) else {
            return eprintln!("SKIPPED: needs a userfaultfd");
        };
        let file = pagefold_os::memfd::create(c"copied", 4 * PAGE).unwrap();
        let shared = mem::Mapping::file(file.raw(), 0, 4 * PAGE_SIZE, mem::READ_WRITE, libc::MAP_SHARED).unwrap();
        let bytes = |at: usize| 1 + (at / 7) as u8 % 250;
        for at in 0..shared.len() {
            // SAFETY: inside the mapping.
            unsafe { shared.as_ptr().add(at).write(bytes(at)) };
        }
        let shown = mem::Mapping::file(file.raw(), 0, 4 * PAGE_SIZE, mem::READ_WRITE, libc::MAP_PRIVATE).unwrap();
        // SAFETY: the pages are the test's own; a guard is one of the four.
        let guarded = unsafe { mem::advise(shown.addr() + PAGE, PAGE, mem::MADV_GUARD_INSTALL) }.is_ok();
        hold.register(Range::pages_from(shown.addr(), 4), uffd::MODE_MISSING | uffd::MODE_MINOR).unwrap();
        let ends = std::sync::atomic::AtomicBool::new(false);
        let fresh = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !ends.load(Ordering::Acquire) {
                    let fd = hold.fd().raw();
                    let _ = pagefold_os::fd::poll(&mut [libc::pollfd { fd, events: libc::POLLIN, revents: 0 }], 20);
                    if let Ok(Some(uffd::Event::PageFault { addr, .. })) = hold.read_event() {
                        let _ = hold.map_cached(Range::pages_from(addr & !(PAGE - 1), 1), 0);
                    }
                }
            });
            let fresh = copy_of(shown.addr(), 4 * PAGE);
            ends.store(true, Ordering::Release);
            fresh
        });
        let fresh = fresh.unwrap();
        for page in (0..4).filter(|page| !guarded || *page != 1) {
            for at in page * PAGE_SIZE..(page + 1) * PAGE_SIZE {
                assert!(comes(fresh.addr() + at as u64 / PAGE * PAGE).unwrap(), "page {page} is a guard");
                // SAFETY: inside the copy, at a page that is there.
                assert_eq!(unsafe { fresh.as_ptr().add(at).read() }, bytes(at), "byte {at}");
            }
        }
        assert!(!guarded || !comes(fresh.addr() + PAGE).unwrap(), "the guard is lost");
    }
}
