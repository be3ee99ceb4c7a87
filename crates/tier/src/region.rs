//! Memory of this process whose silent pages lie in a tier of its own, with faults served in the faulting thread.
//!
//! No daemon, no privilege, and no other thread but [one that is lent](Hand): a touch of a page that is out
//! raises SIGBUS in the thread that touches it (userfaultfd with
//! `UFFD_FEATURE_SIGBUS`), and the handler loads the page, proves it by its
//! fingerprint, copies it in and returns. So nobody has to be woken, which is
//! where a fault served elsewhere spends its time.
//!
//! ```no_run
//! use pagefold_tier::{Config, Effort, Tier, region::ColdRegion};
//!
//! let tier = Tier::create(Config { bytes_max: 64 << 20, ..Config::default() }, None)?;
//! let mut region = ColdRegion::new(tier, 256 << 20)?;
//! region[..5].copy_from_slice(b"hello");
//! let parker = region.parker(); // for another thread, while this one uses the bytes
//! parker.park(0..256 << 20, Effort::Dense);
//! assert_eq!(&region[..5], b"hello"); // brought back by the touch
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! **What a program must know.**
//!
//! - *System calls* that meet a page that is out get `EFAULT`: they do not
//!   fault like instructions. A buffer in a region that is passed to one is
//!   [pinned](ColdRegion::pin) first, which brings it back and keeps it.
//! - *SIGBUS*: the first region installs a handler for the whole process.
//!   What is not a fault of ours goes to the handler that was there before,
//!   with the mask it asked for, or to the default. A handler that the program
//!   installs later must pass on what it does not know; SIGBUS must not be
//!   blocked in a thread that touches a region.
//! - *Stack*: the handler runs on the stack of the faulting thread and needs
//!   8 KiB there, the kernel's frame of the signal included (measured by
//!   `tests/unprivileged_region.rs`); its buffers lie elsewhere.
//! - *fork*: a child does not have the region (`MADV_DONTFORK`): a touch there
//!   is SIGSEGV, never zeros. What a child needs, it gets by other means. The
//!   region's methods do nothing in a child.
//! - *Debuggers and core dumps* see nothing of a page that is out.
//! - *The allocator's memory* must not be in a region: the tier allocates when
//!   it stores. Neither may a [`Backing`](crate::Backing) allocate in `read`.
//! - A page that cannot be brought back (damaged, or its file unreadable) is
//!   SIGBUS for who touches it, at each touch again; never other bytes.
//!
//! **Why the handler is safe.** It allocates nothing, frees nothing and takes
//! one kind of lock, a cluster's, and that only for pages that are in the file
//! or that are disturbed. Who holds one in the same thread would be waited for
//! for ever; but the tier belongs to the region, and whoever is inside the tier
//! has all signals blocked, touches no memory of a region (pages are copied by
//! the kernel, which says `EFAULT` where an instruction would fault) and waits
//! for no page. Buffers for decompression lie in a pool; who has one waits for
//! nobody who wants one.
//!
//! **No write is lost.** A page goes out in the steps of the cold tier: copied
//! and stored while the program goes on; then frozen (`UFFDIO_MOVE`), compared
//! with its copy, and only if equal taken away. Each page has one byte that
//! says where it is; who changes it does so by compare-and-swap: one thread
//! brings a page back, all others wait for it.

mod decoder;
mod fault;
mod memory;

use crate::config::Effort;
use crate::error::StoreError;
use crate::stats::Stats;
use crate::tier::Tier;
use memory::Handle;
use pagefold_os::{Errno, PAGE_SIZE};
use std::ops::{Deref, DerefMut, Range};
use thiserror::Error;

/// Longest region, in bytes.
pub const REGION_BYTES_MAX: usize = 256 << 30;
/// Most regions of a process at once.
pub const REGIONS_MAX: usize = fault::SLOTS;
/// Pages that a fault brings back at most, while the program walks upwards; half as many without a [`Hand`].
pub const FAULT_PAGES_MAX: usize = 32;

/// Why a region could not be made.
#[derive(Debug, Error)]
pub enum RegionError {
    /// The length is none.
    #[error("a region of {bytes} bytes cannot be made: 1 byte to 256 GiB")]
    Size {
        /// Bytes asked for.
        bytes: usize,
    },
    /// The process has [`REGIONS_MAX`] regions.
    #[error("no more than {REGIONS_MAX} regions at once: drop one first")]
    TooMany,
    /// The kernel gives no userfaultfd with signals, moves and asynchronous write protection.
    #[error("userfaultfd: {0}: Linux 6.8 or later, and no filter of system calls in the way, are needed")]
    Userfaultfd(#[source] Errno),
    /// The kernel gives no memory, or not what belongs to it.
    #[error("memory for the region: {0}")]
    Memory(#[source] Errno),
    /// The tier knows the region already, or has no room for its record.
    #[error(transparent)]
    Tier(#[from] StoreError),
}

/// Pages that cannot be brought back: damaged, or their file unreadable. A touch of them is SIGBUS.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{pages} pages of the region cannot be brought back, the first at byte {first}; a touch of them is SIGBUS")]
pub struct Unreadable {
    /// Offset of the first in bytes.
    pub first: usize,
    /// How many.
    pub pages: u64,
}

/// What became of the pages that were to go out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Parked {
    /// They are out.
    pub pages: u64,
    /// Written while they were on their way, or in the hands of a device: they stay.
    pub busy: u64,
    /// Pinned: they stay.
    pub pinned: u64,
    /// The tier is full or has no memory: they stay.
    pub refused: u64,
}

/// A moment's figures of a region; counters count from its making.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegionStats {
    /// Pages of the region.
    pub pages: u64,
    /// Pages that are out now.
    pub pages_out: u64,
    /// Pages that ever went out.
    pub pages_parked: u64,
    /// Pages that came back, by faults and by `unpark`.
    pub pages_back: u64,
    /// Faults on pages that were out.
    pub faults: u64,
    /// Time that threads spent in them, in nanoseconds.
    pub fault_ns: u64,
    /// Pages of these faults' windows that a [`Hand`] brought.
    pub pages_by_hand: u64,
    /// Faults on fresh pages near pages that are out.
    pub zero_faults: u64,
    /// Attempts to bring a page back that failed.
    pub pages_unreadable: u64,
    /// Pages pinned now.
    pub pages_pinned: u64,
}

/// Memory whose pages may be out: private, zeroed at first, writable like any.
///
/// Dropping it unmaps the memory, once the last [`Parker`] and [`Pinned`] are gone too.
#[derive(Debug)]
pub struct ColdRegion {
    shared: Handle,
}

/// Puts pages of a region out and brings them back, from any thread, while others use the bytes.
#[derive(Clone, Debug)]
pub struct Parker {
    shared: Handle,
}

/// A second hand of a region: a thread that brings some of the pages behind a fault while the program walks upwards.
///
/// ```no_run
/// # use pagefold_tier::{Config, Tier, region::ColdRegion};
/// # let tier = Tier::create(Config::default(), None)?;
/// let region = ColdRegion::new(tier, 256 << 20)?;
/// let hand = region.hand();
/// let thread = std::thread::spawn(move || hand.work());
/// # let pages = region.as_chunks::<4096>().0;
/// let sum: u64 = pages.iter().map(|page| u64::from(page[0])).sum(); // two threads bring the pages
/// drop(region); // ends the work
/// # thread.join().unwrap();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Hand {
    shared: Handle,
}

/// Keeps pages of a region here for as long as it lives.
#[derive(Debug)]
pub struct Pinned {
    shared: Handle,
    id: u64,
}

impl ColdRegion {
    /// Maps `bytes` bytes, rounded up to pages, over a tier that is the region's alone from here on.
    ///
    /// # Errors
    /// [`RegionError`].
    pub fn new(tier: Tier, bytes: usize) -> Result<ColdRegion, RegionError> {
        if !(1..=REGION_BYTES_MAX).contains(&bytes) {
            return Err(RegionError::Size { bytes });
        }
        Ok(ColdRegion { shared: Handle::new(tier, bytes)? })
    }

    /// A handle for the thread that puts pages out.
    pub fn parker(&self) -> Parker {
        Parker { shared: self.shared.clone() }
    }

    /// A second hand, for a thread that does nothing else.
    pub fn hand(&self) -> Hand {
        Hand { shared: self.shared.clone() }
    }

    /// First byte, for programs that share the memory between threads by rules of their own.
    ///
    /// Good until the region is dropped.
    pub fn as_ptr(&self) -> *mut u8 {
        self.shared.memory().as_ptr()
    }

    /// Brings a range of bytes back and keeps it: for buffers of system calls.
    ///
    /// # Errors
    /// A page cannot be brought back; nothing is pinned then.
    ///
    /// # Panics
    /// If the range is not in the region.
    pub fn pin(&self, bytes: Range<usize>) -> Result<Pinned, Unreadable> {
        self.parker().pin(bytes)
    }

    /// Gives the pages wholly in a range of bytes back to the system and forgets what the tier has for them; all of the
    /// range reads as zero.
    ///
    /// # Panics
    /// If the range is not in the region.
    pub fn discard(&mut self, bytes: Range<usize>) {
        let pages = self.shared.pages_of(&bytes);
        if !self.shared.is_ours() {
            return;
        }
        let (first, end) = (bytes.start.next_multiple_of(PAGE_SIZE), bytes.end / PAGE_SIZE * PAGE_SIZE);
        if first >= end {
            self[bytes].fill(0);
            return;
        }
        debug_assert!(pages.start * PAGE_SIZE <= first && end <= pages.end * PAGE_SIZE);
        self.shared.discard(first / PAGE_SIZE..end / PAGE_SIZE);
        self[bytes.start..first].fill(0);
        self[end..bytes.end].fill(0);
    }

    /// The figures of the moment.
    pub fn stats(&self) -> RegionStats {
        self.shared.stats()
    }

    /// The figures of the region's tier.
    pub fn tier_stats(&self) -> Stats {
        self.parker().tier_stats()
    }
}

impl Deref for ColdRegion {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        let memory = self.shared.memory();
        // SAFETY: the mapping lives as long as `self`, and what is out comes back with the bytes that it had.
        unsafe { std::slice::from_raw_parts(memory.as_ptr(), memory.len()) }
    }
}

impl DerefMut for ColdRegion {
    fn deref_mut(&mut self) -> &mut [u8] {
        let memory = self.shared.memory();
        // SAFETY: as above, and `&mut self` is the only safe way to write.
        unsafe { std::slice::from_raw_parts_mut(memory.as_ptr(), memory.len()) }
    }
}

impl Drop for ColdRegion {
    fn drop(&mut self) {
        self.shared.close();
    }
}

impl Parker {
    /// Puts the pages of a range of bytes out, those written meanwhile and those pinned excepted.
    ///
    /// # Panics
    /// If the range is not in the region.
    pub fn park(&self, bytes: Range<usize>, effort: Effort) -> Parked {
        self.shared.park(self.shared.pages_of(&bytes), effort)
    }

    /// Puts those pages out that were not written between `silent` calls of this (1 to 30), and lets a tick of the tier
    /// pass: to be called every few seconds. A page that came back soon must be silent for twice as long, up to eight
    /// times.
    pub fn cool(&self, silent: u8) -> Parked {
        self.shared.cool(silent.clamp(1, 30))
    }

    /// Brings the pages of a range back; returns how many.
    ///
    /// # Errors
    /// Some cannot be brought back; the others are here.
    ///
    /// # Panics
    /// If the range is not in the region.
    pub fn unpark(&self, bytes: Range<usize>) -> Result<u64, Unreadable> {
        self.shared.unpark(self.shared.pages_of(&bytes))
    }

    /// As [`ColdRegion::pin`].
    ///
    /// # Errors
    /// As there.
    ///
    /// # Panics
    /// If the range is not in the region.
    pub fn pin(&self, bytes: Range<usize>) -> Result<Pinned, Unreadable> {
        let pages = self.shared.pages_of(&bytes);
        let id = self.shared.pin(pages.clone());
        let pinned = Pinned { shared: self.shared.clone(), id };
        self.shared.unpark(pages.clone())?;
        // Fresh pages near pages that are out are absent too.
        self.shared.touch(pages);
        Ok(pinned)
    }

    /// The figures of the moment.
    pub fn stats(&self) -> RegionStats {
        self.shared.stats()
    }

    /// The figures of the region's tier.
    pub fn tier_stats(&self) -> Stats {
        self.shared.tier_stats()
    }
}

impl Hand {
    /// Works until the region is dropped; at once in a child of a fork.
    ///
    /// While the program walks through pages that are out, the thread looks for the next ones, up to 100 us each time;
    /// else it sleeps. It pays where a processor rests.
    pub fn work(&self) {
        self.shared.lend_hand();
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.shared.unpin(self.id);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::{ColdRegion, RegionError};
    use crate::{Config, Tier};

    /// A region of `len` bytes with a small tier; `None`, which it says, where there is no userfaultfd for us.
    pub(crate) fn region(len: usize) -> Option<ColdRegion> {
        let tier = Tier::create(Config { bytes_max: 4 << 20, ..Config::default() }, None).unwrap();
        match ColdRegion::new(tier, len) {
            Ok(region) => Some(region),
            Err(error @ RegionError::Userfaultfd(_)) => {
                eprintln!("SKIPPED: {error}");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }
}
