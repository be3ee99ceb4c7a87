//! What the cleaner remembers between its walks.

/// The state; its lock makes the cleaner one at a time.
#[derive(Debug, Default)]
pub(crate) struct CleanerState {
    /// Leaf slab and slot at which writeback continues, so that equally old pages are written in turn.
    pub(crate) position: (usize, usize),
    /// Tick before which a failed file is not tried again.
    pub(crate) retry_tick: u64,
    /// Stores seen by the last walk for dense compression, and the tick of the last new one.
    pub(crate) stores_seen: (u64, u64),
    /// The last walk over old contents found some, so the next tick walks again.
    pub(crate) has_aged: bool,
    /// Slots freed when compaction last found nothing to do.
    pub(crate) frees_seen: u64,
}
