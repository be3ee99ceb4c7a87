//! The one place where loom's atomics replace the standard library's.
//!
//! Every lock-free path of this crate takes its atomics from here, so that `--cfg loom` checks the
//! code that ships and not a copy of it.

#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU64, Ordering, fence};

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU64, Ordering, fence};

/// Spin-loop hint inside a retry loop; under loom it lets another thread run.
pub(crate) fn spin_hint() {
    #[cfg(not(loom))]
    std::hint::spin_loop();
    #[cfg(loom)]
    loom::thread::yield_now();
}
