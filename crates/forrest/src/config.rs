//! Settings of a store.

use crate::hash::Hash;
pub use llds::arena::{Numa, Pages};

/// Settings of a store. Those that affect its layout are fixed at creation; opening reads them from the store.
///
/// ```
/// use forrest::{Hash, Options};
/// let store = Options::new().limit_bytes(64 << 20).hash(Hash::Keyed).private()?;
/// # Ok::<(), forrest::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Options {
    pub(crate) limit_bytes: Option<u64>,
    pub(crate) hash: Option<Hash>,
    pub(crate) pages: Pages,
    pub(crate) numa: Numa,
    pub(crate) ordered: bool,
}

impl Options {
    /// Returns the default settings: no limit below 256 GiB (64 GiB for a shared store), MurmurHash64A with seed 9,
    /// the largest pages that are there.
    pub fn new() -> Options {
        Options::default()
    }

    /// Sets how many bytes entries and table may take; an operation that needs more fails, nothing is evicted.
    ///
    /// Rounded up to 512 KiB and limited to 1023 GiB. The fixed part (1 MiB, and 2 % for bookkeeping) comes on top.
    pub fn limit_bytes(mut self, bytes: u64) -> Options {
        self.limit_bytes = Some(bytes);
        self
    }

    /// Also keeps keys in order, for [`Store::scan`](crate::Store::scan); only for a private store.
    ///
    /// Reads cost the same. Inserting or deleting a key also changes a B-tree, and each key up to 15 bytes takes about
    /// 30 further bytes, which the limit does not count. Longer keys are kept in order under one lock.
    pub fn ordered(mut self) -> Options {
        self.ordered = true;
        self
    }

    /// Sets how keys are hashed.
    pub fn hash(mut self, hash: Hash) -> Options {
        self.hash = Some(hash);
        self
    }

    /// Sets the pages asked for.
    pub fn pages(mut self, pages: Pages) -> Options {
        self.pages = pages;
        self
    }

    /// Sets where a private store's pages are placed on a machine with several memory nodes.
    pub fn numa(mut self, numa: Numa) -> Options {
        self.numa = numa;
        self
    }
}
