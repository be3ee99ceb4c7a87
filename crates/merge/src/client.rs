//! What merging needs of a process: the trait its consumer wrote.
//!
//! A live process behind its agent is one implementer (in the daemon), the
//! simulated process of [`crate::sim`] the other.

use pagefold_os::fd::Fd;
use pagefold_os::{PAGE_SIZE, Page, Range};
use pagefold_pool::{Pool, Slot};
use pagefold_protocol::message::RefusalReason;

/// The client has ended, or broke the protocol: it is dropped, and no other client is touched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gone;

/// Pages that one [`Client::fetch`] copies at most.
pub const FETCH_PAGES_MAX: usize = pagefold_protocol::message::FETCH_PAGES_MAX;
/// Pages that are frozen together at most.
pub const FREEZE_PAGES_MAX: u64 = pagefold_protocol::message::FREEZE_PAGES_MAX as u64;
/// Pieces of one [`Client::remap`] at most.
pub const PIECES_MAX: usize = pagefold_protocol::message::LIST_MAX / 2;
/// Pool mappings that one client may have.
pub const MAPPINGS_MAX: usize = 1 << 20;
/// The largest budget of mappings: what a program cuts in pieces itself comes on top, and forked children have their
/// parent's.
pub const VMA_BUDGET_MAX: u64 = MAPPINGS_MAX as u64 / 2;

/// Neighbouring pages that were written, and what they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// The pages.
    pub range: Range,
    /// They are the kernel's zero page: read, never written.
    pub zero: bool,
    /// They are part of a huge page.
    pub huge: bool,
    /// They are in swap.
    pub swapped: bool,
}

/// A run of pages to be merged, with neighbouring slots or with nothing (zero pages).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemapPiece {
    /// The pages.
    pub range: Range,
    /// The first page's slot; `None` for zero pages.
    pub slot: Option<Slot>,
    /// Pieces of one number are frozen together; nothing merged lies between them.
    pub freeze: u32,
    /// It is in a freeze of its own, and not tried if the piece before it was not merged whole: both are one guess.
    pub follows: bool,
}

/// How a piece went: pages merged from the first on, and why it ended there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Pages merged.
    pub merged: u32,
    /// `Done`, or the reason of the first page that was not.
    pub why: RefusalReason,
}

/// A mapping of pool slots that a client has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolMapping {
    /// Its addresses.
    pub range: Range,
    /// Inode of the segment.
    pub inode: u64,
    /// First slot in the segment.
    pub index: u32,
}

/// A process with memory to merge.
pub trait Client: Send {
    /// A number that changes when the managed ranges (or merged pages, by a discard) changed. Cheap.
    fn generation(&mut self) -> u64;

    /// The managed ranges, ascending, disjoint; `None` if the process cannot tell now.
    ///
    /// # Errors
    /// [`Gone`].
    fn regions(&mut self) -> Result<Option<Vec<Range>>, Gone>;

    /// The pool mappings that the process has now, ascending; `None` if it cannot tell now.
    ///
    /// # Errors
    /// [`Gone`].
    fn pool_mappings(&mut self) -> Result<Option<Vec<PoolMapping>>, Gone>;

    /// A descriptor of the file that `mapping`, one of the process's pool mappings, shows; `None` if it cannot be had.
    fn open_segment(&mut self, _mapping: &PoolMapping) -> Option<Fd> {
        None
    }

    /// True if the process may have kept segments of earlier pools that have no number yet.
    fn keeps_earlier_segments(&self) -> bool {
        false
    }

    /// Tells the process which of the segments that it kept (by inode) have which number now. It closes the others.
    ///
    /// # Errors
    /// [`Gone`].
    fn name_earlier_segments(&mut self, _names: &[(u64, u32)]) -> Result<(), Gone> {
        Ok(())
    }

    /// Begins to watch `ranges` for writes.
    ///
    /// # Errors
    /// [`Gone`].
    fn watch(&mut self, ranges: &[Range]) -> Result<(), Gone>;

    /// The page faults of the process so far. While the number stays the same, none of its threads has written to a page
    /// that was protected, nor to one that was not there; writes of other processes (a debugger) need not count. `None` if
    /// it is unknown.
    fn faults(&mut self) -> Option<u64> {
        None
    }

    /// Appends, ascending, all pages of `range` that may have been written since they were last protected, whatever lies
    /// there: pages that were never protected, and pages that are not there, as well. Protects nothing, and is cheap.
    ///
    /// # Errors
    /// [`Gone`].
    fn touched(&mut self, range: Range, out: &mut Vec<Range>) -> Result<(), Gone>;

    /// Appends the watched pages of `range` that were written since they were last protected, and protects them again.
    /// Pages in swap are best left out until they come back: what is told of them is not looked at.
    /// Huge pages are protected only if `huge`; otherwise they are told again and again.
    ///
    /// # Errors
    /// [`Gone`].
    fn written(&mut self, range: Range, huge: bool, out: &mut Vec<Written>) -> Result<(), Gone>;

    /// Appends the pages of `range`, merged ones, that have been written since, those in swap too. The others are
    /// protected: [`touched`](Self::touched) need not tell them until they are written.
    ///
    /// # Errors
    /// [`Gone`].
    fn broken(&mut self, range: Range, out: &mut Vec<Range>) -> Result<(), Gone>;

    /// Copies the pages of `runs`, at most [`FETCH_PAGES_MAX`] in all, to `out`, one after the other, and tells for each
    /// whether it could be read. No other process can change the copy.
    ///
    /// # Errors
    /// [`Gone`].
    fn fetch(&mut self, runs: &[Range], out: &mut [Page], readable: &mut [bool]) -> Result<(), Gone>;

    /// Appends the pages of `range` that no other process maps. A page that a fork shares cannot be merged before one of
    /// both writes to it: it is not worth a slot.
    fn mapped_alone(&mut self, range: Range, out: &mut Vec<u64>) {
        out.extend((range.start..range.end).step_by(PAGE_SIZE));
    }

    /// Freezes, compares and maps the pieces (ascending, at most [`PIECES_MAX`]); appends one outcome each.
    ///
    /// # Errors
    /// [`Gone`].
    fn remap(&mut self, pool: &Pool, pieces: &[RemapPiece], out: &mut Vec<Outcome>) -> Result<(), Gone>;

    /// Gives private memory back for each range (at most [`FREEZE_PAGES_MAX`] pages, in one pool mapping); appends
    /// whether it did.
    ///
    /// # Errors
    /// [`Gone`].
    fn heal(&mut self, ranges: &[Range], out: &mut Vec<bool>) -> Result<(), Gone>;

    /// Lets go of the segments that `pool` has let go, so that no descriptor keeps their memory.
    ///
    /// # Errors
    /// [`Gone`].
    fn forget(&mut self, _pool: &Pool) -> Result<(), Gone> {
        Ok(())
    }

    /// Lends the plain memory to the cold tier (`lent`) and stops watching it, or takes it back. Merged memory stays as it
    /// is. Returns false if that is not possible.
    ///
    /// # Errors
    /// [`Gone`].
    fn lend_memory(&mut self, _lent: bool) -> Result<bool, Gone> {
        Ok(false)
    }

    /// Returns true if the cold tier already has its plain memory.
    fn is_lent(&self) -> bool {
        false
    }

    /// Called in each period. `left_out`: since the last call, pages of it with a twin stayed private because it has no
    /// mappings left for runs as short as theirs. It may have another system merge its plain memory.
    ///
    /// # Errors
    /// [`Gone`].
    fn settle_leftover(&mut self, _left_out: bool) -> Result<(), Gone> {
        Ok(())
    }

    /// No other system merges its memory any longer: what [`settle_leftover`](Self::settle_leftover) began is undone.
    ///
    /// # Errors
    /// [`Gone`].
    fn take_back_leftover(&mut self) -> Result<(), Gone> {
        Ok(())
    }

    /// Releases buffers: nothing will be fetched for a while.
    fn release_buffers(&mut self) {}

    /// Processor time that the client's side spent for us, in nanoseconds.
    fn cpu_ns(&mut self) -> u64 {
        0
    }
}
