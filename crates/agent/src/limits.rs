//! Sizes and limits that several modules share.

use pagefold_os::{PAGE_SIZE, Range};

/// Pages of a huge page.
pub(crate) const HUGE_PAGES: usize = 512;
/// Its length and alignment in bytes.
pub(crate) const HUGE_LEN: u64 = (HUGE_PAGES * PAGE_SIZE) as u64;

/// Length of the nursery: unshared memory becomes one mapping again within ranges of this length.
pub(crate) const NURSERY_LEN: u64 = 32 << 20;

/// How often a refused `UFFDIO_MOVE` is retried before the page counts as pinned.
pub(crate) const MOVE_TRIES: u32 = 64;

/// The empty range.
pub(crate) const NOTHING: Range = Range { start: 0, end: 0 };
