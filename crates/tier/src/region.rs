//! A memory region of this process with its own tier: idle pages are evicted, and faults are served in the faulting thread.
//!
//! It needs no daemon, no privilege, and no other thread but an optional [`Prefetcher`]. A touch of an evicted page
//! raises SIGBUS in the touching thread (userfaultfd with
//! `UFFD_FEATURE_SIGBUS`). The signal handler loads the page, verifies its
//! fingerprint, copies it in and returns. No thread has to be woken, which
//! takes most of the time of a fault that another thread serves.
//!
//! ```no_run
//! use pagefold_tier::{Config, Effort, Tier, region::ColdRegion};
//!
//! let tier = Tier::create(Config { bytes_max: 64 << 20, ..Config::default() }, None)?;
//! let mut region = ColdRegion::new(tier, 256 << 20)?;
//! region[..5].copy_from_slice(b"hello");
//! let parker = region.parker(); // for another thread, while this one uses the bytes
//! parker.park(0..256 << 20, Effort::Dense);
//! assert_eq!(&region[..5], b"hello"); // the touch loads the page
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! **What a program must know.**
//!
//! - *System calls* with a buffer in an evicted page fail with `EFAULT`: they
//!   do not fault like instructions. The program [pins](ColdRegion::pin) such a
//!   buffer first, which loads its pages and keeps them resident.
//! - *SIGBUS*: the first region installs a handler for the whole process. It
//!   passes other signals on to the previous handler, with the mask which that
//!   one requested, or to the default. A handler that the program installs later
//!   must pass on signals it does not know. SIGBUS must not be blocked in a
//!   thread that touches a region.
//! - *Stack*: the handler runs on the stack of the faulting thread and needs
//!   8 KiB there, the kernel's signal frame included (measured by
//!   `tests/unprivileged_region.rs`); its buffers lie elsewhere.
//! - *fork*: a child does not have the region (`MADV_DONTFORK`): a touch there
//!   is SIGSEGV, never zeros. The region's methods do nothing in a child.
//! - *Debuggers and core dumps* cannot read evicted pages.
//! - *The allocator's memory* must not be in a region, because the tier
//!   allocates when it stores. A [`Backing`](crate::Backing) must not allocate
//!   in `read`.
//! - A page that cannot be loaded (damaged, or its file unreadable) raises
//!   SIGBUS at each touch; a touch never reads other bytes.
//!
//! **Why the handler is safe.** It allocates nothing, frees nothing, and takes
//! only cluster locks, and these only for pages that are in the file or are
//! being changed. If the interrupted code of the same thread held such a lock,
//! the handler would deadlock. That cannot happen: the tier belongs to the
//! region, and code inside the tier has all signals blocked, touches no memory
//! of a region (the kernel copies pages, and reports `EFAULT` where an
//! instruction would fault) and waits for no page. Buffers for decompression
//! come from a pool; a thread that has one never waits for another.
//!
//! **No write is lost.** A page is evicted in the steps of the cold tier: it is
//! copied and stored while the program runs; then frozen (`UFFDIO_MOVE`),
//! compared with its copy, and dropped only if equal. Each page has a state
//! byte, which threads change by compare-and-swap: one thread loads a page, all
//! others wait for it.

mod decoder;
mod fault;
mod memory;
mod report;

use crate::config::Effort;
use crate::stats::Stats;
use crate::tier::Tier;
use memory::handle::Handle;
use pagefold_os::PAGE_SIZE;
pub use report::{FAULT_PAGES_MAX, Parked, REGION_BYTES_MAX, REGIONS_MAX, RegionError, RegionStats, Unreadable};
use std::ops::{Deref, DerefMut, Range};

/// A memory region with pages that may be evicted: private, initially zero, and writable.
///
/// The memory is unmapped when the region and its last [`Parker`], [`Prefetcher`] and [`Pinned`] are dropped.
#[derive(Debug)]
pub struct ColdRegion {
    shared: Handle,
}

/// Evicts and loads pages of a region, from any thread, while other threads use the bytes.
#[derive(Clone, Debug)]
pub struct Parker {
    shared: Handle,
}

/// Prefetches for a region: its thread loads some of the pages after a fault, if the program accesses them in order.
///
/// ```no_run
/// # use pagefold_tier::{Config, Tier, region::ColdRegion};
/// # let tier = Tier::create(Config::default(), None)?;
/// let region = ColdRegion::new(tier, 256 << 20)?;
/// let prefetcher = region.prefetcher();
/// let thread = std::thread::spawn(move || prefetcher.run());
/// # let pages = region.as_chunks::<4096>().0;
/// let sum: u64 = pages.iter().map(|page| u64::from(page[0])).sum(); // two threads load the pages
/// drop(region); // ends the prefetcher
/// # thread.join().unwrap();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Prefetcher {
    shared: Handle,
}

/// Keeps pages of a region resident until it is dropped.
#[derive(Debug)]
pub struct Pinned {
    shared: Handle,
    id: u64,
}

impl ColdRegion {
    /// Maps `bytes` bytes, rounded up to pages. The region owns the tier from here on.
    ///
    /// # Errors
    /// [`RegionError`].
    pub fn new(tier: Tier, bytes: usize) -> Result<ColdRegion, RegionError> {
        if !(1..=REGION_BYTES_MAX).contains(&bytes) {
            return Err(RegionError::Size { bytes });
        }
        Ok(ColdRegion { shared: Handle::new(tier, bytes)? })
    }

    /// A handle for a thread that evicts pages.
    pub fn parker(&self) -> Parker {
        Parker { shared: self.shared.clone() }
    }

    /// A prefetcher, for a thread of its own.
    pub fn prefetcher(&self) -> Prefetcher {
        Prefetcher { shared: self.shared.clone() }
    }

    /// Address of the first byte, for programs with their own rules for sharing the memory between threads.
    ///
    /// Valid until the region is dropped.
    pub fn as_ptr(&self) -> *mut u8 {
        self.shared.memory().as_ptr()
    }

    /// Loads the pages of a range of bytes and keeps them resident, for buffers of system calls.
    ///
    /// # Errors
    /// A page cannot be loaded; nothing is pinned then.
    ///
    /// # Panics
    /// If the range is not in the region.
    pub fn pin(&self, bytes: Range<usize>) -> Result<Pinned, Unreadable> {
        self.parker().pin(bytes)
    }

    /// Frees the pages that lie wholly in a range of bytes, and their entries in the tier. The whole range reads as zero
    /// then.
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

    /// The figures now.
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
        // SAFETY: `shared` keeps the mapping as long as `self`, and an evicted page is loaded with the bytes that it had.
        unsafe { std::slice::from_raw_parts(memory.as_ptr(), memory.len()) }
    }
}

impl DerefMut for ColdRegion {
    fn deref_mut(&mut self) -> &mut [u8] {
        let memory = self.shared.memory();
        // SAFETY: `shared` keeps the mapping as long as `self`, an evicted page is loaded with the bytes that it had, and
        // `&mut self` is the only safe way to write.
        unsafe { std::slice::from_raw_parts_mut(memory.as_ptr(), memory.len()) }
    }
}

impl Drop for ColdRegion {
    fn drop(&mut self) {
        self.shared.close();
    }
}

impl Parker {
    /// Evicts the pages of a range of bytes, except pages that are pinned or are written meanwhile.
    ///
    /// # Panics
    /// If the range is not in the region.
    pub fn park(&self, bytes: Range<usize>, effort: Effort) -> Parked {
        self.shared.park(self.shared.pages_of(&bytes), effort)
    }

    /// Evicts pages that were not written during the last `idle` calls of this method (1 to 30), and advances the tier's
    /// tick: a thread calls this every few seconds. A page that was loaded soon after its eviction must be idle for twice
    /// as long, up to eight times.
    pub fn park_idle(&self, idle: u8) -> Parked {
        self.shared.park_idle(idle.clamp(1, 30))
    }

    /// Loads the evicted pages of a range; returns how many.
    ///
    /// # Errors
    /// Some pages cannot be loaded; the others are resident.
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
        // Never written pages near evicted ones are absent, too.
        self.shared.touch(pages);
        Ok(pinned)
    }

    /// The figures now.
    pub fn stats(&self) -> RegionStats {
        self.shared.stats()
    }

    /// The figures of the region's tier.
    pub fn tier_stats(&self) -> Stats {
        self.shared.tier_stats()
    }
}

impl Prefetcher {
    /// Prefetches until the region is dropped. Returns immediately in a child of a fork.
    ///
    /// While the program faults on evicted pages in order, the thread spins up to 100 us for the next window; otherwise it
    /// sleeps. It is useful if a processor is idle.
    pub fn run(&self) {
        self.shared.run_prefetcher();
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

    /// A region of `len` bytes with a small tier; `None`, with a message, if userfaultfd is not available.
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
