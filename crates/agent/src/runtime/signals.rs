//! When the agent may block the program's signals.

#[cfg(feature = "preload")]
use crate::process::is_own_process;
#[cfg(feature = "preload")]
use core::sync::atomic::{AtomicBool, Ordering};
use pagefold_os::signal::Blocked;

/// Blocks the signals of the calling thread while it changes what the mapping lock protects: a handler would hold that lock
/// too, for its thread does. `None` if a seccomp filter may forbid the call.
pub(crate) fn block_signals() -> Option<Blocked> {
    may_block().then(Blocked::all)
}

#[cfg(feature = "preload")]
fn may_block() -> bool {
    MAY_BLOCK.load(Ordering::Acquire) && (!CHILD_FILTERED.load(Ordering::Acquire) || is_own_process())
}

/// Without the interposed functions the agent does not learn of filters.
#[cfg(not(feature = "preload"))]
const fn may_block() -> bool {
    true
}

/// False once a filter of the program may forbid it. The agent has left before, with everything that it managed.
#[cfg(feature = "preload")]
pub(crate) static MAY_BLOCK: AtomicBool = AtomicBool::new(true);

/// A child that shares this memory has installed a filter for itself alone, which the agent has not examined.
#[cfg(feature = "preload")]
pub(crate) static CHILD_FILTERED: AtomicBool = AtomicBool::new(false);
