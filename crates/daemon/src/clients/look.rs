//! What a look at a client found.

use crate::status::UnmanagedMemory;
use pagefold_os::ksm::ProcessStat;
use std::time::Instant;

/// What the last look at a client found.
#[derive(Debug, Default)]
pub(crate) struct Look {
    /// When its memory was last looked at.
    pub(super) looked: Option<Instant>,
    /// Its memory that is not managed, the most first.
    pub(crate) unmanaged: Vec<UnmanagedMemory>,
    /// What KSM made of memory that was handed to it.
    pub(crate) ksm: ProcessStat,
    /// Some thread looks at it now.
    pub(super) is_in_hand: bool,
}
