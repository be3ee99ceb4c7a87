//! One memory file of the pool: filled in order, sealed, read-only.

use crate::primitive::{AtomicBool, AtomicU8, AtomicU32, Mutex, Ordering};
use crate::writable_mapping::{Huge, WritableMapping};
use pagefold_os::fd::Fd;
use pagefold_os::mem::{self, Mapping};
use pagefold_os::{PAGE_SIZE, Page, memfd, user};
use std::ffi::CString;
use std::io;
use std::sync::Arc;

/// Slots in a segment.
pub const SLOTS_PER_SEGMENT: u32 = if cfg!(loom) { 2 } else { 2048 };
/// Length of a segment in bytes.
pub const SEGMENT_LEN: usize = SLOTS_PER_SEGMENT as usize * PAGE_SIZE;
/// Bytes of our own records per segment.
pub const METADATA_BYTES: usize = SLOTS_PER_SEGMENT as usize * 4 + size_of::<Segment>();

/// Segments of the process, each of which has a mapping for as long as it is there; kept out of the models, which have no
/// limit.
static MAPPED: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);

/// How many segments the process has mapped.
pub fn mapped() -> u64 {
    MAPPED.load(std::sync::atomic::Ordering::Relaxed)
}

/// Name in /proc of the files of a pool.
pub fn file_name(pool: &str) -> String {
    format!("pagefold-pool:{pool}")
}

/// Marks a new segment's file as made for clients of `user`. Where the kernel refuses that, the file cannot be taken in
/// later.
fn sign(file: &Fd, user: Option<u32>) {
    if let Some(user) = user.filter(|user| *user != user::effective()) {
        let _ = memfd::set_group(file, user);
    }
}

/// What a segment's slots are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Standing {
    /// Any client with a page of this content may share it.
    Offered = 0,
    /// Sharers of a slot keep it; no slot gets a new sharer.
    Retired = 1,
    /// As `Offered`, for good: it could not be emptied.
    Kept = 2,
}

/// A segment.
#[derive(Debug)]
pub struct Segment {
    number: u32,
    inode: u64,
    reader: Arc<Fd>,
    read: Mapping,
    /// Our way to write, gone when the segment is sealed.
    write: Mutex<Option<WritableMapping>>,
    published: AtomicU32,
    /// Slots that have memory: those published, and all of a huge page of which one is.
    backed: AtomicU32,
    closed: AtomicBool,
    /// [`Standing`].
    standing: AtomicU8,
    live: AtomicU32,
    holds: AtomicU32,
    sharers: Box<[AtomicU32]>,
}

impl Segment {
    /// Makes an empty segment.
    pub fn create(pool: &str, user: Option<u32>, number: u32) -> io::Result<Segment> {
        let name = CString::new(file_name(pool)).map_err(io::Error::other)?;
        let file = memfd::create(&name, SEGMENT_LEN as u64)?;
        sign(&file, user);
        // Another user could otherwise open the file for writing through /proc; the seals are the real wall.
        memfd::set_mode(&file, 0o400)?;
        let reader = memfd::reopen_read_only(&file)?;
        let (_, inode) = memfd::len_and_inode(file.raw())?;
        let write = WritableMapping::new(file, SEGMENT_LEN)?;
        memfd::add_seals(write.file(), memfd::SEAL_SHRINK | memfd::SEAL_GROW | memfd::SEAL_FUTURE_WRITE)?;
        Segment::of(number, inode, reader, Some(write), 0)
    }

    /// The segment of an earlier pool's file, of which `slots` were written and that no process can write to.
    pub fn inherit(reader: Fd, inode: u64, slots: u32, number: u32) -> io::Result<Segment> {
        let segment = Segment::of(number, inode, reader, None, slots)?;
        segment.closed.store(true, Ordering::Release);
        Ok(segment)
    }

    fn of(number: u32, inode: u64, reader: Fd, write: Option<WritableMapping>, slots: u32) -> io::Result<Segment> {
        // Mapped through the read-only descriptor: a mapping that could become writable would forbid the last seal.
        let read = Mapping::file(reader.raw(), 0, SEGMENT_LEN, libc::PROT_READ, libc::MAP_SHARED)?;
        MAPPED.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        Ok(Segment {
            number,
            inode,
            reader: Arc::new(reader),
            read,
            write: Mutex::new(write),
            published: AtomicU32::new(slots),
            backed: AtomicU32::new(slots),
            closed: AtomicBool::new(false),
            standing: AtomicU8::new(Standing::Offered as u8),
            live: AtomicU32::new(0),
            holds: AtomicU32::new(0),
            sharers: (0..SLOTS_PER_SEGMENT).map(|_| AtomicU32::new(0)).collect(),
        })
    }

    /// Copies `pages` to the next free slots, as many as there are; returns the first and how many. They may lie on huge
    /// pages as `huge` decides, if it is given.
    pub fn fill(&self, pages: &[&Page], huge: Option<&Huge>) -> (u32, usize) {
        let mut write = self.write.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let first = self.published.load(Ordering::Relaxed);
        let Some(writable) = &mut *write else { return (first, 0) };
        let count = pages.len().min((SLOTS_PER_SEGMENT - first) as usize);
        writable.put(first, &pages[..count], huge);
        self.backed.store(writable.backed(), Ordering::Relaxed);
        // Release pairs with the acquire in `published`: a thread that sees the count sees the bytes.
        self.published.store(first + count as u32, Ordering::Release);
        (first, count)
    }

    /// Makes the segment unwritable for everybody, for ever.
    pub fn close(&self) {
        let mut write = self.write.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(writable) = write.take() {
            // With our mapping the last way to write is gone: `SEAL_FUTURE_WRITE` forbids new mappings, write(2) and holes.
            let file = writable.into_file();
            // The kernel answers EBUSY while a page is pinned, by a client's direct I/O from it for instance.
            let _ = memfd::add_seals(&file, memfd::SEAL_WRITE | memfd::SEAL_SEAL);
        }
        self.closed.store(true, Ordering::Release);
    }

    /// The content of a published slot.
    pub fn page(&self, index: u32) -> Option<&Page> {
        // SAFETY: published slots are never written again, and the mapping lives as long as `self`.
        (index < self.published())
            .then(|| unsafe { &*self.read.as_ptr().add(index as usize * PAGE_SIZE).cast::<Page>() })
    }

    /// Takes its pages out of our page table; they are mapped again when they are read.
    pub fn rest(&self) {
        // SAFETY: a read-only mapping of a file: it reads the same afterwards.
        let _ = unsafe { mem::advise(self.read.addr(), SEGMENT_LEN as u64, libc::MADV_DONTNEED) };
    }

    pub fn number(&self) -> u32 {
        self.number
    }

    pub fn inode(&self) -> u64 {
        self.inode
    }

    pub fn reader(&self) -> Arc<Fd> {
        self.reader.clone()
    }

    pub fn published(&self) -> u32 {
        self.published.load(Ordering::Acquire)
    }

    /// Bytes of memory that its pages take.
    pub fn bytes(&self) -> u64 {
        u64::from(self.backed.load(Ordering::Relaxed)) * PAGE_SIZE as u64
    }

    pub fn is_full(&self) -> bool {
        self.published() == SLOTS_PER_SEGMENT
    }

    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Tells what its slots are for. A worker that asks just before this changes may still share a slot: that share is
    /// counted, and so seen later.
    pub fn is(&self, standing: Standing) -> bool {
        self.standing.load(Ordering::Acquire) == standing as u8
    }

    pub fn set_standing(&self, standing: Standing) {
        self.standing.store(standing as u8, Ordering::Release);
    }

    /// Mappings of all its slots.
    pub fn mappings(&self) -> u64 {
        self.sharers.iter().map(|sharers| u64::from(sharers.load(Ordering::Relaxed))).sum()
    }

    /// Returns true if nothing keeps it: no slot is shared, and no worker is about to share one.
    pub fn is_unshared(&self) -> bool {
        // In this order: a worker counts its shares before it drops its hold.
        self.holds.load(Ordering::Acquire) == 0 && self.live() == 0
    }

    pub fn hold(&self) {
        self.holds.fetch_add(1, Ordering::Relaxed);
    }

    pub fn give_up(&self) {
        self.holds.fetch_sub(1, Ordering::Release);
    }

    /// Slots with sharers.
    pub fn live(&self) -> u32 {
        self.live.load(Ordering::Acquire)
    }

    pub fn sharers(&self, index: u32) -> u32 {
        self.sharers[index as usize].load(Ordering::Acquire)
    }

    /// Adds `by` sharers and returns how many there were.
    pub fn add_sharers(&self, index: u32, by: u32) -> u32 {
        let before = self.sharers[index as usize].fetch_add(by, Ordering::AcqRel);
        if before == 0 && by > 0 {
            self.live.fetch_add(1, Ordering::AcqRel);
        }
        before
    }

    /// Removes one sharer and returns how many there were; at zero nothing happens.
    pub fn remove_sharer(&self, index: u32) -> u32 {
        let take = |count: u32| count.checked_sub(1);
        match self.sharers[index as usize].fetch_update(Ordering::AcqRel, Ordering::Acquire, take) {
            Ok(before) => {
                if before == 1 {
                    self.live.fetch_sub(1, Ordering::AcqRel);
                }
                before
            }
            Err(_) => 0,
        }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        MAPPED.fetch_sub(1, std::sync::atomic::Ordering::Relaxed);
    }
}
