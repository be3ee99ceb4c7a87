//! What passes between the steps of an eviction.

use pagefold_os::Range;

/// A run of pages to evict, and the managed range around it.
pub(crate) type Run = (Range, Range);

/// A page that the agent copied to the channel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Copied {
    /// Its number.
    pub(crate) page: u64,
    /// Where its copy lies in the channel.
    pub(crate) place: u32,
    /// The managed range that it lies in.
    pub(crate) around: Range,
}
