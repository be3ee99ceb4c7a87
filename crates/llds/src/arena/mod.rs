//! Arena: memory for large structures.
//!
//! One range of address space is reserved once and filled as blocks are asked
//! for. The range never moves, so a block is named by its *offset* from the start,
//! and the same offsets hold in every process that maps the same arena. The
//! range uses the largest pages the system offers ([`Pages`]); [`Stats`] says
//! which it got. Freed memory goes back to the system in units of 2 MiB, except
//! explicit huge pages, which the arena keeps.
//!
//! An arena is private to the process, or lies in a file (in /dev/shm, on a
//! hugetlbfs, or anywhere) that several processes map. A shared arena keeps all
//! its state in the file. When a process is killed, at any instruction, any other
//! thread can release what the dead threads held ([`Arena::dead_threads`],
//! [`Arena::begin_recovery`]). At most one block per dead thread stays lost;
//! [`Arena::each_block`] finds it.
//!
//! What it does not promise: blocks are not zeroed, and the arena does not
//! know what they hold. For each block that a dead thread was about to link or
//! unlink, the structure above decides whether it was.
//!
//! ```
//! use llds::arena::{Arena, Options};
//! let arena = Arena::private(&Options::default())?;
//! let thread = arena.thread()?;
//! let block = arena.alloc(&thread, 100)?;
//! // SAFETY: the block was just allocated with 100 bytes, aligned to 16.
//! unsafe { arena.at(block).cast::<u64>().write(7) };
//! thread.settle_alloc();
//! arena.free(&thread, block);
//! # Ok::<(), llds::arena::Error>(())
//! ```

mod class;
mod error;
pub mod fault;
mod fork_sentinel;
mod layout;
mod liveness;
mod map;
mod open;
mod process_identity;
mod recovery;
mod registration;
mod retired;
mod span;
mod thread_record;

#[cfg(test)]
mod tests;

pub use class::{LOG_BYTES_MAX, SMALL_BYTES_MAX, SPAN_BYTES, class_bytes, class_of};
pub use error::Error;
pub use map::Backing;
pub use recovery::DeadThread;
pub use registration::{CachedThread, Call, ThreadRef};
pub use span::SpanStats;
pub use thread_record::{HAZARDS, INTENT_ALLOC, INTENT_RETIRE, THREADS_MAX, ThreadRecord};

use fork_sentinel::ForkSentinel;
use layout::Layout;
use process_identity::Identity;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// The pages requested for an arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pages {
    /// Explicit 2 MiB pages if enough are free for all of it, else transparent ones, else 4 KiB.
    #[default]
    Auto,
    /// 4 KiB only.
    Small,
    /// Transparent 2 MiB pages, else 4 KiB.
    Transparent,
    /// Explicit 2 MiB pages, else as [`Pages::Transparent`].
    Huge2M,
    /// Explicit 1 GiB pages, else as [`Pages::Huge2M`].
    Huge1G,
}

/// Where pages are placed on a machine with more than one memory node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Numa {
    /// On the node of the thread that touches them first.
    #[default]
    Local,
    /// On all nodes in turn.
    Interleave,
}

/// How an arena is made.
#[derive(Clone, Debug)]
pub struct Options {
    /// Bytes of blocks the arena can hold; also its reservation of address space.
    pub capacity_bytes: u64,
    /// Bytes at [`Arena::root`] for the structure's own fixed part, zero at first.
    pub root_bytes: usize,
    /// What kind of structure it holds; opening with another kind is refused. If the last byte is a digit, it is the
    /// version of the structure's own layout: a file with another digit gives [`Error::Version`].
    pub kind: u64,
    /// Pages asked for.
    pub pages: Pages,
    /// Placement on nodes.
    pub numa: Numa,
}

impl Default for Options {
    fn default() -> Options {
        Options { capacity_bytes: 256 << 30, root_bytes: 4096, kind: 0, pages: Pages::Auto, numa: Numa::Local }
    }
}

/// The pages of an arena and its contents.
#[derive(Clone, Copy, Debug)]
pub struct Stats {
    /// Pages under it.
    pub backing: Backing,
    /// Bytes of blocks it may hold.
    pub capacity_bytes: u64,
    /// Spans and blocks.
    pub spans: SpanStats,
    /// Thread records taken.
    pub thread_count: u64,
    /// Deaths that were cleaned up since the arena was made.
    pub recovery_count: u64,
}

struct Inner {
    id: u64,
    map: map::Mapping,
    layout: Layout,
    /// This process in thread records; `None` for a private arena, where threads die only with the process.
    identity: Option<Identity>,
    /// Tells a forked child from the process that made this handle.
    sentinel: Arc<ForkSentinel>,
    /// Numbers of the records taken through this handle.
    registered: Mutex<Vec<u16>>,
    /// Extents freed through this handle with pages that are not given back yet: since when, first span, spans. Oldest
    /// first.
    deferred: Mutex<VecDeque<(Instant, usize, usize)>>,
    /// The span from which on free pages are looked for next.
    next_trim: AtomicUsize,
}

/// A handle to an arena; clones are the same arena.
#[derive(Clone)]
pub struct Arena {
    inner: Arc<Inner>,
}

impl Arena {
    /// Returns the address of `offset`; the same block has other addresses in other processes.
    ///
    /// The offset must lie inside the arena; the caller is responsible for what is there.
    #[inline]
    pub fn at(&self, offset: u64) -> *mut u8 {
        debug_assert!((offset as usize) < self.inner.layout.bytes);
        self.inner.map.base().wrapping_add(offset as usize)
    }

    /// Returns the address of the structure's fixed part, 2 MiB aligned.
    pub fn root(&self) -> *mut u8 {
        self.at(self.inner.layout.root as u64)
    }

    /// Returns how many bytes the structure's fixed part has.
    pub fn root_bytes(&self) -> usize {
        self.inner.layout.root_bytes
    }

    /// Returns how many bytes of blocks it may hold.
    pub fn capacity_bytes(&self) -> u64 {
        (self.inner.layout.spans * SPAN_BYTES) as u64
    }

    /// Returns the offsets at which blocks can lie.
    #[inline]
    pub fn data_range(&self) -> std::ops::Range<u64> {
        self.inner.layout.data as u64..(self.inner.layout.data + self.inner.layout.spans * SPAN_BYTES) as u64
    }

    /// Returns true if the calling process is a forked child of the one that made this handle.
    #[inline]
    pub fn is_forked(&self) -> bool {
        self.inner.sentinel.is_forked_child()
    }

    /// Returns true if other processes can use this arena.
    #[inline]
    pub fn is_shared(&self) -> bool {
        self.inner.identity.is_some()
    }

    /// Returns about how many bytes lie in spans that are not free.
    #[inline]
    pub fn used_bytes(&self) -> u64 {
        (self.inner.used() * SPAN_BYTES) as u64
    }

    /// Returns how many threads at most have used the arena at the same time.
    #[inline]
    pub fn threads_max_seen(&self) -> u64 {
        self.inner.records_high().max(1)
    }

    /// Allocates a block of at least `size` bytes, aligned to 16 (to 64 if `size` is a multiple of 64).
    ///
    /// The thread's record holds the intent to link it; [`ThreadRecord::settle_alloc`] clears the intent once it is linked.
    ///
    /// # Errors
    /// [`Error::Full`] at the capacity, [`Error::NoMemory`] when the system has none.
    #[inline]
    pub fn alloc(&self, thread: &ThreadRef<'_>, size: usize) -> Result<u64, Error> {
        self.inner.alloc(thread, thread.owner, size)
    }

    /// Allocates `size` bytes, a multiple of 64, directly after the thread's previous allocation by this call.
    ///
    /// For arrays that grow by copying: blocks of any size lie densely, and their memory becomes free when all
    /// neighbours are freed, so copy them in the order in which they were made. [`Arena::is_log_sparse`] tells when a block
    /// keeps most of an extent's memory in use. Blocks made out of that order should go to a `second` log, so that they do
    /// not pin the first one's memory. Blocks over [`LOG_BYTES_MAX`] are allocated as by [`Arena::alloc`].
    ///
    /// # Errors
    /// As [`Arena::alloc`].
    pub fn alloc_log(&self, thread: &ThreadRef<'_>, size: usize, second: bool) -> Result<u64, Error> {
        self.inner.alloc_log(thread, thread.owner, size, second)
    }

    /// Prepares the next [`Arena::alloc_log`] of about `size` bytes from the first log. A fresh huge page takes a hundred
    /// microseconds to allocate; call this before taking a lock, so that no thread waits for the page with the lock.
    pub fn ready_log(&self, thread: &ThreadRef<'_>, size: usize) {
        self.inner.ready_log(thread, thread.owner, size);
    }

    /// Returns the bytes left in the extent that the next [`Arena::alloc_log`] uses. A caller with a flexible size can
    /// choose one that fills the extent exactly.
    pub fn log_room(&self, thread: &ThreadRef<'_>, second: bool) -> usize {
        self.inner.log_room(thread, thread.owner, second)
    }

    /// Returns the extent in which a block from [`Arena::alloc_log`] lies, and whether it belongs to a second log.
    pub fn log_of(&self, block: u64) -> Option<(u64, bool)> {
        self.inner.log_of(block)
    }

    /// Returns true if a block from [`Arena::alloc_log`] is one of few left in its extent, so that moving it frees memory.
    pub fn is_log_sparse(&self, block: u64, size: usize) -> bool {
        self.inner.is_log_sparse(block, size)
    }

    /// Frees a block immediately. No thread may be able to reach it any more. Does nothing where no block begins.
    pub fn free(&self, thread: &ThreadRef<'_>, block: u64) {
        self.inner.free(block, thread.owner);
    }

    /// Makes room findable: frees retired blocks, and takes back the units from which no thread allocates at this moment. An
    /// allocation that finds no room does the same.
    ///
    /// # Errors
    /// As [`Arena::thread`].
    pub fn relieve(&self) -> Result<(), Error> {
        if self.is_forked() {
            return Err(Error::Forked);
        }
        if let Some(thread) = self.thread_cached() {
            self.collect(&thread);
        }
        self.collect_left();
        // A record for this call, so that a thread without one keeps none.
        let owner = self.inner.register()?;
        self.inner.relieve(self.inner.record_at(owner), owner);
        self.inner.deregister(owner, Some(Instant::now()));
        Ok(())
    }

    /// Gives the pages of free memory back to the system.
    pub fn trim(&self, thread: &ThreadRef<'_>) {
        self.inner.collect(thread, thread.owner);
        self.collect_left();
        self.inner.disown_all(thread, thread.owner);
        self.inner.trim(thread.owner);
    }

    /// Returns the size of the block at `block` in bytes, 0 if there is none. The size of a log block is not stored: 64.
    pub fn block_bytes(&self, block: u64) -> u64 {
        self.inner.block_bytes(block)
    }

    /// Returns true if an allocated block begins at `block`.
    pub fn is_allocated(&self, block: u64) -> bool {
        self.inner.is_allocated(block)
    }

    /// Calls `visit` with every allocated block. Exact only while no thread allocates or frees.
    pub fn each_block(&self, visit: impl FnMut(u64)) {
        self.inner.each_block(visit);
    }

    /// Returns the arena's pages and contents. Walks all spans.
    pub fn stats(&self) -> Stats {
        let inner = &self.inner;
        Stats {
            backing: inner.map.backing(),
            capacity_bytes: self.capacity_bytes(),
            spans: inner.span_stats(),
            thread_count: (1..=inner.records_high())
                .filter(|&owner| inner.record_at(owner).state.load(Ordering::Relaxed) != 0)
                .count() as u64,
            recovery_count: inner.header().recoveries.load(Ordering::Relaxed),
        }
    }
}

impl Inner {
    #[inline]
    fn record_at(&self, owner: u64) -> &ThreadRecord {
        let index = owner as usize - 1;
        assert!(index < THREADS_MAX);
        // SAFETY: the layout has THREADS_MAX records inside the mapping (index asserted), 64-byte aligned; a record consists
        // of atomics, for which every bit pattern is a value.
        unsafe { &*self.map.base().add(self.layout.records).cast::<ThreadRecord>().add(index) }
    }

    #[inline]
    fn word(&self, offset: u64) -> &AtomicU64 {
        debug_assert!(offset.is_multiple_of(8) && (offset as usize) < self.layout.bytes);
        // SAFETY: callers take offsets from the layout or from a span's cut, so they lie inside the mapping and are
        // multiples of 8.
        unsafe { &*self.map.base().add(offset as usize).cast::<AtomicU64>() }
    }

    fn records_high(&self) -> u64 {
        self.header().records_high.load(Ordering::Acquire).min(THREADS_MAX as u64)
    }
}
