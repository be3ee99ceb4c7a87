//! The clock of the rates that this process measures.

use crate::index::run;
use crate::options::Clock;
use std::sync::OnceLock;

/// The clock of this process's rates: set once, from the plan.
pub(super) static CLOCK: OnceLock<Clock> = OnceLock::new();

pub(super) fn clock() -> Clock {
    CLOCK.get().copied().unwrap_or(Clock::Wall)
}

/// Runs `work(thread)` in all threads at the same time; million operations per second.
pub(super) fn timed(threads: usize, operations: usize, work: impl Fn(usize) + Sync) -> f64 {
    run::timed(threads, operations, clock(), work)
}
