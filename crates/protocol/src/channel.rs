//! The channel: a sealed memory file that agent and daemon both have mapped.
//!
//! It holds the agent's counters, a list that the daemon writes, a list that the agent writes, and copies of pages. The
//! other side may write anywhere in it at any time. Entries are therefore copied by volatile accesses before they are
//! checked, and every entry type is [`Plain`]: any bytes are a valid value.

use crate::message::{EarlierSegment, EvictEntry, FETCH_PAGES_MAX, LIST_MAX, Outcome, RegionEntry, RemapPiece};
use crate::wait_histogram;
use core::ffi::CStr;
use core::sync::atomic::AtomicU64;
use pagefold_os::fd::Fd;
use pagefold_os::mem::{self, Mapping};
use pagefold_os::raw::{Errno, Result};
use pagefold_os::{PAGE_SIZE, Page, Range, memfd, syscall};

/// Bytes of an entry's place in a list.
const ENTRY_BYTES: usize = 32;

/// Offset of the counters.
const COUNTERS: usize = 0;
/// Offset of the list that the daemon writes.
const REQUEST_LIST: usize = PAGE_SIZE;
/// Offset of the list that the agent writes.
const ANSWER_LIST: usize = REQUEST_LIST + LIST_MAX * ENTRY_BYTES;
/// Offset of the copied pages.
const PAGES: usize = ANSWER_LIST + LIST_MAX * ENTRY_BYTES;
/// Length of the channel in bytes.
const LEN: usize = PAGES + FETCH_PAGES_MAX * PAGE_SIZE;

/// An entry of a list.
///
/// # Safety
/// Any bytes are a valid value of the type, and the type has no padding, which would leak bytes.
pub unsafe trait Plain: Copy + 'static {}

// SAFETY: an integer.
unsafe impl Plain for u8 {}
// SAFETY: an integer.
unsafe impl Plain for u32 {}
// SAFETY: an integer.
unsafe impl Plain for i32 {}
// SAFETY: an integer.
unsafe impl Plain for u64 {}
// SAFETY: `repr(C)` of two `u64`.
unsafe impl Plain for Range {}
// SAFETY: `repr(C)` of four `u64`.
unsafe impl Plain for RegionEntry {}
// SAFETY: `repr(C)` of a `u64`, four `u32` and a `u64`.
unsafe impl Plain for RemapPiece {}
// SAFETY: `repr(C)` of two `u64`.
unsafe impl Plain for EarlierSegment {}
// SAFETY: `repr(C)` of two `u32`.
unsafe impl Plain for Outcome {}
// SAFETY: `repr(C)` of three `u64` and two `u32`.
unsafe impl Plain for EvictEntry {}

/// Counters that the agent keeps in the channel for the daemon to show.
#[derive(Debug)]
#[repr(C)]
pub struct AgentCounters {
    /// Changes of the managed ranges: at another value the daemon sends `Regions`.
    pub generation: AtomicU64,
    /// Freezes.
    pub freezes: AtomicU64,
    /// Longest freeze in nanoseconds.
    pub freeze_ns_max: AtomicU64,
    /// Freezes by duration, in the buckets of [`wait_histogram`].
    pub freeze_us: [AtomicU64; wait_histogram::BUCKETS],
    /// Ranges that the program discarded over merged pages.
    pub discards: AtomicU64,
    /// Processor time of the agent's thread in nanoseconds.
    pub cpu_ns: AtomicU64,
    /// Bytes of memory that the agent has handed to the kernel's KSM.
    pub leftover_bytes: AtomicU64,
}

const _: () = assert!(size_of::<AgentCounters>() <= PAGE_SIZE);

/// The mapped channel with its file.
#[derive(Debug)]
pub struct Channel {
    fd: Fd,
    map: Mapping,
}

impl Channel {
    /// Makes a channel with the name `name` in /proc.
    ///
    /// # Errors
    /// As memfd_create(2) and mmap(2).
    pub fn create(name: &CStr) -> Result<Channel> {
        let fd = memfd::create(name, LEN as u64)?;
        memfd::add_seals(&fd, memfd::SEAL_SHRINK | memfd::SEAL_GROW | memfd::SEAL_SEAL)?;
        Channel::map(fd)
    }

    /// Maps the channel that the other side made.
    ///
    /// # Errors
    /// `EPROTO` if the file is too short or can shrink: an access beyond its end would be fatal; as mmap(2).
    pub fn open(fd: Fd) -> Result<Channel> {
        let (len, _) = memfd::len_and_inode(fd.raw())?;
        if len < LEN as u64 || memfd::seals(&fd)? & memfd::SEAL_SHRINK == 0 {
            return Err(Errno(libc::EPROTO));
        }
        Channel::map(fd)
    }

    fn map(fd: Fd) -> Result<Channel> {
        let map = Mapping::file(fd.raw(), 0, LEN, mem::READ_WRITE, libc::MAP_SHARED)?;
        Ok(Channel { fd, map })
    }

    /// The file.
    pub const fn fd(&self) -> &Fd {
        &self.fd
    }

    /// The mapping.
    pub const fn mapping(&self) -> &Mapping {
        &self.map
    }

    /// The agent's counters; a hostile agent may keep any numbers there.
    pub const fn counters(&self) -> &AgentCounters {
        // SAFETY: the channel begins with the counters, is mapped as long as `self` lives, and cannot shrink (`create` and
        // `open`). They are atomics, which other writers do not invalidate.
        unsafe { &*self.map.as_ptr().add(COUNTERS).cast() }
    }

    /// Entry `index` of the daemon's list, copied.
    ///
    /// # Panics
    /// If `index` is not below [`LIST_MAX`].
    pub fn request<T: Plain>(&self, index: usize) -> T {
        self.entry(REQUEST_LIST, index)
    }

    /// Writes entry `index` of the daemon's list.
    ///
    /// # Panics
    /// If `index` is not below [`LIST_MAX`].
    pub fn put_request<T: Plain>(&self, index: usize, value: T) {
        self.put_entry(REQUEST_LIST, index, value);
    }

    /// Entry `index` of the agent's list, copied.
    ///
    /// # Panics
    /// If `index` is not below [`LIST_MAX`].
    pub fn answer<T: Plain>(&self, index: usize) -> T {
        self.entry(ANSWER_LIST, index)
    }

    /// Writes entry `index` of the agent's list.
    ///
    /// # Panics
    /// If `index` is not below [`LIST_MAX`].
    pub fn put_answer<T: Plain>(&self, index: usize, value: T) {
        self.put_entry(ANSWER_LIST, index, value);
    }

    fn entry<T: Plain>(&self, list: usize, index: usize) -> T {
        const { assert!(size_of::<T>() <= ENTRY_BYTES) };
        assert!(index < LIST_MAX);
        // SAFETY: the entry lies in a list of the mapped channel, aligned to 32 bytes, and any bytes are a value (`Plain`).
        // Volatile, because the other side may write at any time.
        unsafe { self.map.as_ptr().add(list + index * ENTRY_BYTES).cast::<T>().read_volatile() }
    }

    fn put_entry<T: Plain>(&self, list: usize, index: usize, value: T) {
        const { assert!(size_of::<T>() <= ENTRY_BYTES) };
        assert!(index < LIST_MAX);
        // SAFETY: the entry lies in a list of the mapped channel, aligned to 32 bytes. Volatile, because the other side may
        // read at any time.
        unsafe { self.map.as_ptr().add(list + index * ENTRY_BYTES).cast::<T>().write_volatile(value) }
    }

    /// The agent's byte about the page in place `place`: the answer's list of requests that answer by page.
    ///
    /// # Panics
    /// If `place` is not below [`FETCH_PAGES_MAX`].
    pub fn answer_of_page(&self, place: usize) -> u8 {
        assert!(place < FETCH_PAGES_MAX);
        // SAFETY: the byte lies in the mapped answer list; volatile, because the other side may write at any time.
        unsafe { self.map.as_ptr().add(ANSWER_LIST + place).read_volatile() }
    }

    /// Writes the agent's byte about the page in place `place`.
    ///
    /// # Panics
    /// If `place` is not below [`FETCH_PAGES_MAX`].
    pub fn put_answer_of_page(&self, place: usize, answer: u8) {
        assert!(place < FETCH_PAGES_MAX);
        // SAFETY: the byte lies in the mapped answer list; volatile, because the other side may read at any time.
        unsafe { self.map.as_ptr().add(ANSWER_LIST + place).write_volatile(answer) }
    }

    /// Copies the page in place `place` to private memory, where no other process can change it.
    ///
    /// # Panics
    /// If `place` is not below [`FETCH_PAGES_MAX`].
    pub fn read_page(&self, place: usize, page: &mut Page) {
        assert!(place < FETCH_PAGES_MAX);
        // SAFETY: the source lies in the mapped channel, the target is the caller's. The other side may write meanwhile; the
        // copy is torn then, and differs from the page when that is frozen and compared.
        unsafe { core::ptr::copy_nonoverlapping(self.page(place), page.as_mut_ptr(), PAGE_SIZE) }
    }

    /// Writes `page` to place `place`.
    ///
    /// # Panics
    /// If `place` is not below [`FETCH_PAGES_MAX`].
    pub fn write_page(&self, place: usize, page: &Page) {
        assert!(place < FETCH_PAGES_MAX);
        // SAFETY: the target lies in the mapped channel, the source is the caller's.
        unsafe { core::ptr::copy_nonoverlapping(page.as_ptr(), self.page(place), PAGE_SIZE) }
    }

    /// Returns true if the page in place `place` equals `page`.
    ///
    /// # Panics
    /// If `place` is not below [`FETCH_PAGES_MAX`].
    pub fn holds_page(&self, place: usize, page: &Page) -> bool {
        assert!(place < FETCH_PAGES_MAX);
        // SAFETY: the page lies in the mapped channel. Only the daemon writes there, and it waits for the answer meanwhile.
        page == unsafe { &*self.page(place).cast::<Page>() }
    }

    const fn page(&self, place: usize) -> *mut u8 {
        self.map.as_ptr().wrapping_add(PAGES + place * PAGE_SIZE)
    }

    /// Copies pages of this process from `range` on to the places from `place` on, as far as range and channel reach, and
    /// returns the bytes copied. The kernel reads them, by pwrite(2): a page that is gone ends the copy, and is not a fault.
    pub fn copy_in(&self, range: Range, place: usize) -> usize {
        let places = FETCH_PAGES_MAX.saturating_sub(place);
        let len = if range.is_empty() { 0 } else { range.pages().min(places as u64) as usize * PAGE_SIZE };
        let mut copied = 0;
        while copied < len {
            let (from, to) = (range.start + copied as u64, PAGES + place * PAGE_SIZE + copied);
            // SAFETY: the kernel reads the memory and reports what it cannot read; it writes inside the file, which this
            // process and the other side access by volatile reads and copies only.
            match unsafe { syscall!(libc::SYS_pwrite64, self.fd.raw(), from, len - copied, to) } {
                Ok(0) | Err(_) => break,
                Ok(bytes) => copied += bytes,
            }
        }
        copied
    }

    /// Populates the channel's memory for these places; false if there is none. The daemon does it before the agent writes
    /// there: the memory is charged to the daemon's control group then, and cannot kill a client at the limit of its own.
    pub fn populate(&self, places: core::ops::Range<usize>) -> bool {
        assert!(places.end <= FETCH_PAGES_MAX);
        let at = self.map.addr() + (PAGES + places.start * PAGE_SIZE) as u64;
        // SAFETY: a part of this mapping (checked); its bytes stay what they are.
        unsafe { mem::advise(at, (places.len() * PAGE_SIZE) as u64, libc::MADV_POPULATE_WRITE) }.is_ok()
    }

    /// Frees the memory of all places. They read zero until they are written again.
    pub fn release_pages(&self) {
        let at = self.map.addr() + PAGES as u64;
        // SAFETY: a part of this mapping of a shared file, which is accessed by copies only.
        let _ = unsafe { mem::advise(at, (LEN - PAGES) as u64, libc::MADV_REMOVE) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ends_see_the_same_lists_and_pages() {
        let daemon = Channel::create(c"channel").unwrap();
        let agent = Channel::open(daemon.fd().duplicate().unwrap()).unwrap();
        daemon.put_request(LIST_MAX - 1, Range { start: 1, end: 2 });
        assert_eq!(agent.request::<Range>(LIST_MAX - 1), Range { start: 1, end: 2 });
        agent.put_answer(3, 7u32);
        agent.put_answer_of_page(0, 9);
        assert_eq!((daemon.answer::<u32>(3), daemon.answer_of_page(0)), (7, 9));
        let memory = Mapping::anonymous(3 * PAGE_SIZE).unwrap();
        // SAFETY: mapped, and nothing else refers to it.
        unsafe { memory.as_ptr().write_bytes(5, 3 * PAGE_SIZE) };
        let range = Range::pages_from(memory.addr(), 3);
        assert_eq!(agent.copy_in(range, FETCH_PAGES_MAX - 2), 2 * PAGE_SIZE, "cut at the end of the channel");
        let mut page = [0; PAGE_SIZE];
        daemon.read_page(FETCH_PAGES_MAX - 1, &mut page);
        assert!(page == [5; PAGE_SIZE] && agent.holds_page(FETCH_PAGES_MAX - 2, &page));
        // SAFETY: nothing refers to the page.
        unsafe { mem::unmap(memory.addr() + PAGE_SIZE as u64, PAGE_SIZE as u64) }.unwrap();
        assert_eq!(agent.copy_in(range, 0), PAGE_SIZE, "ends where a page is gone");
        daemon.release_pages();
        assert!(agent.holds_page(FETCH_PAGES_MAX - 1, &[0; PAGE_SIZE]));
        core::mem::forget(memory);
    }

    #[test]
    fn a_file_that_can_shrink_or_is_too_short_is_refused() {
        let shrinks = memfd::create(c"channel", LEN as u64).unwrap();
        assert_eq!(Channel::open(shrinks).err(), Some(Errno(libc::EPROTO)));
        let short = memfd::create(c"channel", LEN as u64 - 1).unwrap();
        memfd::add_seals(&short, memfd::SEAL_SHRINK).unwrap();
        assert_eq!(Channel::open(short).err(), Some(Errno(libc::EPROTO)));
    }
}
