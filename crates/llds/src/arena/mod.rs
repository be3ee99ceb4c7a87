//! Arena: memory for large structures.
//!
//! One range of address space is reserved once and filled as blocks are asked
//! for; it never moves, so a block is named by its *offset* from the start,
//! and the same offsets hold in every process that maps the same arena. The
//! range stands on the largest pages the system has ([`Pages`]); [`Stats`]
//! says which it got. Freed memory goes back to the system in units of 2 MiB,
//! but for explicit huge pages, which stay.
//!
//! An arena is private to the process, or lies in a file (in /dev/shm, on a
//! hugetlbfs, or anywhere) that several processes map. A shared arena keeps
//! everything it knows in the file: when a process is killed at any
//! instruction, whoever notices takes over what the dead threads held
//! ([`Arena::dead_seats`], [`Arena::begin_recovery`]). What remains lost is at
//! most one block per dead thread, which [`Arena::each_block`] finds.
//!
//! What it does not promise: blocks are not zeroed, and the arena does not
//! know what they hold. It is up to the structure above to say, for each block
//! a dead thread was about to link or unlink, whether it did.
//!
//! ```
//! use llds::arena::{Arena, Options};
//! let arena = Arena::private(&Options::default())?;
//! let seat = arena.seat()?;
//! let block = arena.alloc(&seat, 100)?;
//! // SAFETY: the block is ours and 8-byte aligned.
//! unsafe { arena.at(block).cast::<u64>().write(7) };
//! seat.settle_alloc();
//! arena.free(&seat, block);
//! # Ok::<(), llds::arena::Error>(())
//! ```

mod alive;
mod class;
mod error;
pub mod fault;
mod layout;
mod limbo;
mod map;
mod open;
mod recovery;
mod seat;
mod sentinel;
mod span;
mod thread;

#[cfg(test)]
mod tests;

pub use class::{LOG_BYTES_MAX, SMALL_BYTES_MAX, SPAN_BYTES, class_bytes, class_of};
pub use error::Error;
pub use map::Backing;
pub use recovery::DeadSeat;
pub use seat::{HAZARDS, INTENT_ALLOC, INTENT_RETIRE, SEATS_MAX, Seat};
pub use span::SpanStats;
pub use thread::{Call, QuickSeat, SeatRef};

use layout::Layout;
use seat::Identity;
use sentinel::Sentinel;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Which pages an arena is asked to stand on.
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
    /// version of the structure's own layout, and [`Error::Version`] tells of another.
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

/// What an arena stands on and holds.
#[derive(Clone, Copy, Debug)]
pub struct Stats {
    /// Pages under it.
    pub backing: Backing,
    /// Bytes of blocks it may hold.
    pub capacity_bytes: u64,
    /// Spans and blocks.
    pub spans: SpanStats,
    /// Seats taken.
    pub seat_count: u64,
    /// Deaths that were cleaned up since the arena was made.
    pub recovery_count: u64,
}

struct Inner {
    id: u64,
    map: map::Mapping,
    layout: Layout,
    /// Who we are in seats; `None` for a private arena, whose threads cannot die alone.
    identity: Option<Identity>,
    /// A page the kernel wipes in a forked child: non-zero in the process that made the arena.
    sentinel: Arc<Sentinel>,
    /// Seats taken through this handle.
    taken: Mutex<Vec<u16>>,
    /// Extents freed through this handle whose pages are still there: since when, first span, spans. Oldest first.
    late: Mutex<VecDeque<(Instant, usize, usize)>>,
}

/// A handle to an arena; clones are the same arena.
#[derive(Clone)]
pub struct Arena {
    inner: Arc<Inner>,
}

impl Arena {
    /// Returns the address of `offset`; the same block has other addresses in other processes.
    ///
    /// The offset must lie inside the arena; what is there is the caller's business.
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

    /// Whether the calling process is a forked child of the one that made this handle.
    #[inline]
    pub fn is_forked(&self) -> bool {
        self.inner.sentinel.is_wiped()
    }

    /// Whether other processes can use this arena.
    #[inline]
    pub fn is_shared(&self) -> bool {
        self.inner.identity.is_some()
    }

    /// Gives out a block of at least `size` bytes, aligned to 16 (to 64 if `size` is a multiple of 64).
    ///
    /// The seat notes the intent to link it; [`Seat::settle_alloc`] strikes that out once it is linked.
    ///
    /// # Errors
    /// [`Error::Full`] at the capacity, [`Error::NoMemory`] when the system has none.
    #[inline]
    pub fn alloc(&self, seat: &SeatRef<'_>, size: usize) -> Result<u64, Error> {
        self.inner.alloc(seat, seat.owner, size)
    }

    /// Gives out `size` bytes, a multiple of 64, right behind what the thread got by this call before.
    ///
    /// For arrays that are copied to grow: blocks of any size lie densely, and their memory comes back when all
    /// neighbours are gone, so copy them in the order in which they were made. [`Arena::is_log_sparse`] says when a
    /// block keeps memory for itself. Blocks made out of that order should go to a `second` log, lest they keep the
    /// first one's memory. Blocks over [`LOG_BYTES_MAX`] are given as by [`Arena::alloc`].
    ///
    /// # Errors
    /// As [`Arena::alloc`].
    pub fn alloc_log(&self, seat: &SeatRef<'_>, size: usize, second: bool) -> Result<u64, Error> {
        self.inner.alloc_log(seat, seat.owner, size, second)
    }

    /// Has ready what the next [`Arena::alloc_log`] of about `size` bytes needs, of the first log: a fresh page takes a hundred
    /// microseconds to come, for which nobody should wait who waits for a lock.
    pub fn ready_log(&self, seat: &SeatRef<'_>, size: usize) {
        self.inner.ready_log(seat, seat.owner, size);
    }

    /// Bytes left where [`Arena::alloc_log`] gives next: who may take a little more or less leaves none at the end.
    pub fn log_room(&self, seat: &SeatRef<'_>, second: bool) -> usize {
        self.inner.log_room(seat, second)
    }

    /// Returns the extent in which a block from [`Arena::alloc_log`] lies, and whether it is of a second log.
    pub fn log_of(&self, block: u64) -> Option<(u64, bool)> {
        self.inner.log_of(block)
    }

    /// Whether a block from [`Arena::alloc_log`] holds memory that few others share, so that moving it frees some.
    pub fn is_log_sparse(&self, block: u64, size: usize) -> bool {
        self.inner.is_log_sparse(block, size)
    }

    /// Takes a block back at once. Nobody may be able to reach it any more. Where no block begins, nothing is done.
    pub fn free(&self, seat: &SeatRef<'_>, block: u64) {
        self.inner.free(block, seat.owner);
    }

    /// Gives the pages of free memory back to the system.
    pub fn trim(&self, seat: &SeatRef<'_>) {
        self.inner.collect(seat, seat.owner);
        self.collect_left();
        self.inner.drop_leases(seat, seat.owner);
        self.inner.trim(seat.owner);
    }

    /// Returns the size of the block at `block` in bytes, 0 if there is none. Log blocks do not tell: 64.
    pub fn block_bytes(&self, block: u64) -> u64 {
        self.inner.block_bytes(block)
    }

    /// Whether a block that is given out begins at `block`.
    pub fn is_allocated(&self, block: u64) -> bool {
        self.inner.is_allocated(block)
    }

    /// Calls `visit` with every block that is given out. Exact only while nobody allocates or frees.
    pub fn each_block(&self, visit: impl FnMut(u64)) {
        self.inner.each_block(visit);
    }

    /// Returns what the arena stands on and holds. Walks all spans.
    pub fn stats(&self) -> Stats {
        let inner = &self.inner;
        Stats {
            backing: inner.map.backing(),
            capacity_bytes: self.capacity_bytes(),
            spans: inner.span_stats(),
            seat_count: (1..=inner.seats_high())
                .filter(|&owner| inner.seat_at(owner).state.load(Ordering::Relaxed) != 0)
                .count() as u64,
            recovery_count: inner.header().recoveries.load(Ordering::Relaxed),
        }
    }
}

impl Inner {
    #[inline]
    fn seat_at(&self, owner: u64) -> &Seat {
        let index = owner as usize - 1;
        assert!(index < SEATS_MAX);
        // SAFETY: the seats lie inside the mapping, 64-byte aligned, and consist of atomics.
        unsafe { &*self.map.base().add(self.layout.seats).cast::<Seat>().add(index) }
    }

    #[inline]
    fn word(&self, offset: u64) -> &AtomicU64 {
        debug_assert!(offset.is_multiple_of(8) && (offset as usize) < self.layout.bytes);
        // SAFETY: offsets come from the layout or from a span's cut, so they lie inside the mapping and are aligned.
        unsafe { &*self.map.base().add(offset as usize).cast::<AtomicU64>() }
    }

    fn seats_high(&self) -> u64 {
        self.header().seats_high.load(Ordering::Acquire).min(SEATS_MAX as u64)
    }
}
