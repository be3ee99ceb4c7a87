//! How slots get their memory while their segment is filled.
//!
//! A page of a shared mapping that is touched first costs a fault and is cleared before it is written: twice the time of the
//! copy. So pages come by `UFFDIO_COPY` into a mapping that is registered for missing pages, which allocates, copies and
//! maps in one call, and by whole huge pages in pools that are large enough. Where the kernel has neither, the fault does
//! it.

use crate::primitive::{AtomicU32, Ordering};
use pagefold_os::fd::Fd;
use pagefold_os::mem::{self, Mapping};
use pagefold_os::raw::Errno;
use pagefold_os::uffd::{self, Uffd};
use pagefold_os::{PAGE_SIZE, Page, Range};
use std::io;
use std::time::{Duration, Instant};

/// Slots that one huge page holds.
const BLOCK: u32 = 512;
const BLOCK_LEN: usize = BLOCK as usize * PAGE_SIZE;
/// A huge page that took longer to come had to be made by moving others' pages, or came from a host that had taken it away.
const SLOW: Duration = Duration::from_millis(1);
/// Huge pages that are not asked for after a failure: the first, and how many at most.
const REST: std::ops::RangeInclusive<u32> = 4..=1 << 16;

/// The writable mapping of a segment's file.
#[derive(Debug)]
pub struct WritableMapping {
    mapping: Mapping,
    file: Fd,
    /// The mapping is registered here, but for the huge pages. A page of it that is not there must not be touched.
    missing: Option<Uffd>,
    /// Slots that have memory: those that were written, and all of a huge page of which one was.
    backed: u32,
}

impl WritableMapping {
    /// Maps the whole of `file`, `len` bytes, which must not have been written yet.
    ///
    /// # Errors
    /// As mmap(2).
    pub fn new(file: Fd, len: usize) -> io::Result<WritableMapping> {
        let mapping = Mapping::file_aligned(file.raw(), len, mem::READ_WRITE, libc::MAP_SHARED, BLOCK_LEN)?;
        // No thread ever waits for a page here: touching a missing page is an immediate error.
        let features = uffd::FEATURE_MISSING_SHMEM | uffd::FEATURE_SIGBUS;
        // A service's filter may forbid the call, and allow the device.
        let by_device = |_| uffd::open_device().and_then(|device| Uffd::new(Some(&device), features));
        let missing = Uffd::user_mode_only(features).or_else(by_device).ok();
        let range = Range { start: mapping.addr(), end: mapping.addr() + len as u64 };
        let missing = missing.filter(|missing| missing.register(range, uffd::MODE_MISSING).is_ok());
        Ok(WritableMapping { mapping, file, missing, backed: 0 })
    }

    pub fn file(&self) -> &Fd {
        &self.file
    }

    /// Gives up the mapping.
    pub fn into_file(self) -> Fd {
        self.file
    }

    pub fn backed(&self) -> u32 {
        self.backed
    }

    /// Writes `pages` to the slots from `index` on, the ones behind the last that was written.
    pub fn put(&mut self, mut index: u32, pages: &[&Page], huge: Option<&Huge>) {
        let mut rest = pages;
        while !rest.is_empty() {
            let at = self.mapping.addr() + u64::from(index) * PAGE_SIZE as u64;
            let begins = index.is_multiple_of(BLOCK) && index >= self.backed;
            if begins && huge.is_some_and(|huge| self.make_huge(at, huge)) {
                self.backed = index + BLOCK;
            }
            let written = if index < self.backed {
                let there = rest.len().min((self.backed - index) as usize);
                self.write(at, &rest[..there])
            } else {
                let block_end = (index / BLOCK + 1) * BLOCK;
                let placed = self.place(at, &rest[..rest.len().min((block_end - index) as usize)]);
                if placed == 0 { self.write(at, &rest[..1]) } else { placed }
            };
            index += written as u32;
            self.backed = self.backed.max(index);
            rest = &rest[written..];
        }
    }

    /// Copies `pages` to `at`, where memory is, or comes when it is touched.
    fn write(&mut self, at: u64, pages: &[&Page]) -> usize {
        for (offset, page) in pages.iter().enumerate() {
            // SAFETY: the slots lie in the mapping and are not published yet, and the exclusive borrow makes us their only
            // writer.
            unsafe {
                let slot = (at as *mut u8).add(offset * PAGE_SIZE);
                core::ptr::copy_nonoverlapping(page.as_ptr(), slot, PAGE_SIZE);
            }
        }
        pages.len()
    }

    /// Has pages of these bytes at `at`, where nothing is: as many as lie side by side, by one call. Returns how many; 0 if
    /// the first is to be written.
    fn place(&mut self, at: u64, pages: &[&Page]) -> usize {
        let Some(missing) = &self.missing else { return 0 };
        let beside = |pair: &&[&Page]| core::ptr::eq(pair[0].as_ptr_range().end, pair[1].as_ptr());
        let count = 1 + pages.windows(2).take_while(beside).count();
        let mut done = 0;
        loop {
            let (from, len) = (pages[0].as_ptr() as u64 + done, (count * PAGE_SIZE) as u64 - done);
            // SAFETY: the source is as many pages of ours, neighbours.
            let (copied, error) = unsafe { missing.copy(at + done, from, len, uffd::DONTWAKE) };
            done += copied;
            match error {
                None => break,
                // A reader's page of zeros.
                Some(Errno(libc::EEXIST)) => break,
                Some(Errno(libc::EAGAIN)) => {}
                Some(_) => {
                    self.missing = None;
                    break;
                }
            }
        }
        done as usize / PAGE_SIZE
    }

    /// Makes the memory at `block`, where nothing is written yet, one huge page; false if it is not.
    fn make_huge(&mut self, block: u64, huge: &Huge) -> bool {
        if cfg!(loom) || !huge.is_wanted() {
            return false;
        }
        let range = Range { start: block, end: block + BLOCK_LEN as u64 };
        // The kernel fills no hole in a range that is watched for missing pages, and counts the page after the hole as part
        // of it.
        let mapped = self.mapping.addr() + self.mapping.len() as u64;
        let open = Range { end: mapped.min(range.end + PAGE_SIZE as u64), ..range };
        if self.missing.as_ref().is_some_and(|missing| missing.unregister(open).is_err()) {
            self.missing = None;
        }
        let began = Instant::now();
        // SAFETY: the block lies in the mapping, holds no published slot, and only this call writes to it: `&mut self`.
        // The kernel makes a huge page only where it finds a page.
        unsafe { (block as *mut u8).write_volatile(0) };
        // SAFETY: the bytes stay what they are.
        let made = unsafe { mem::advise(block, BLOCK_LEN as u64, mem::MADV_COLLAPSE) }.is_ok();
        huge.note(made && began.elapsed() < SLOW);
        // What is left out is written where it comes.
        let closed = Range { start: if made { range.end } else { range.start }, ..open };
        if let Some(missing) = &self.missing
            && !closed.is_empty()
        {
            let _ = missing.register(closed, uffd::MODE_MISSING);
        }
        made
    }
}

/// Whether slots are to lie on huge pages: there many are mapped, and given back, at once. The kernel may have none, or only
/// after moving others' pages about: then it is not asked for a while, twice as long each time.
#[derive(Debug, Default)]
pub struct Huge {
    /// Huge pages that are not asked for before the next one is.
    rest: AtomicU32,
    /// How many that were after the last failure.
    rested: AtomicU32,
}

impl Huge {
    fn is_wanted(&self) -> bool {
        let rest = self.rest.load(Ordering::Relaxed);
        self.rest.store(rest.saturating_sub(1), Ordering::Relaxed);
        rest == 0
    }

    fn note(&self, is_good: bool) {
        let rest = (self.rested.load(Ordering::Relaxed) * 2).clamp(*REST.start(), *REST.end());
        let rest = if is_good { 0 } else { rest };
        self.rested.store(rest, Ordering::Relaxed);
        self.rest.store(rest, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use pagefold_os::memfd;

    const BLOCKS: u32 = 4;

    fn file() -> Fd {
        memfd::create(c"pagefold-test", u64::from(BLOCKS) * BLOCK_LEN as u64).unwrap()
    }

    /// Returns whether the kernel makes huge pages of a file's pages that no userfaultfd watches.
    fn has_huge_pages() -> bool {
        let (file, len) = (file(), BLOCKS as usize * BLOCK_LEN);
        let plain = Mapping::file_aligned(file.raw(), len, mem::READ_WRITE, libc::MAP_SHARED, BLOCK_LEN).unwrap();
        (0..BLOCKS as usize).all(|block| {
            let at = plain.addr() + (block * BLOCK_LEN) as u64;
            // SAFETY: a page of the mapping, which is ours alone.
            unsafe { (at as *mut u8).write_volatile(1) };
            // SAFETY: the bytes stay what they are.
            unsafe { mem::advise(at, BLOCK_LEN as u64, mem::MADV_COLLAPSE) }.is_ok()
        })
    }

    #[test]
    fn every_block_is_a_huge_page_where_there_are_any() {
        if !has_huge_pages() {
            return eprintln!("SKIPPED: the kernel makes no huge page of this file's");
        }
        let mut writable = WritableMapping::new(file(), BLOCKS as usize * BLOCK_LEN).unwrap();
        let page: Page = [7; PAGE_SIZE];
        for block in 0..BLOCKS {
            // A fresh one: how long the last took says nothing of this one.
            writable.put(block * BLOCK, &[&page], Some(&Huge::default()));
            assert_eq!(writable.backed(), (block + 1) * BLOCK, "block {block}");
        }
    }

    #[test]
    fn slots_behind_a_huge_page_come_one_by_one() {
        let mut writable = WritableMapping::new(file(), BLOCKS as usize * BLOCK_LEN).unwrap();
        let pages: Vec<Page> = (0..BLOCKS * BLOCK).map(|slot| [slot as u8 ^ (slot >> 8) as u8; PAGE_SIZE]).collect();
        for (block, slots) in pages.chunks(BLOCK as usize).enumerate() {
            let huge = Huge::default();
            for (index, page) in slots.iter().enumerate() {
                writable.put((block * BLOCK as usize + index) as u32, &[page], (block % 2 == 0).then_some(&huge));
            }
        }
        let file = writable.into_file();
        let shown = Mapping::file(file.raw(), 0, pages.len() * PAGE_SIZE, libc::PROT_READ, libc::MAP_SHARED).unwrap();
        for (slot, page) in pages.iter().enumerate() {
            // SAFETY: a published slot of the file; published slots are not written again.
            let slot_bytes = unsafe { &*shown.as_ptr().add(slot * PAGE_SIZE).cast::<Page>() };
            assert!(slot_bytes == page, "slot {slot}");
        }
    }
}
